"""The first weights: drawn as transformers does, the same in every layout, or those in the files of a model."""

import re
import weakref
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import difference, launch, loss_of_run, packed_config, run, slow_but, tiny_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_agreement import fork
from test_mesh import DDP, EXPERTS, FSDP2, SCRIPT, SHAPE, family, layout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from samerun.config import Config, Data, Model
from samerun.errors import UserError
from samerun.meeting import Meeting
from samerun.model.architecture import number_of_experts
from samerun.model.build import make_model, outlined_model
from samerun.model.checks import check_model
from samerun.model.outline import bare
from samerun.model.small import fewer_experts, model_to_try
from samerun.model.weight_files import FileTensors, Weight, WeightFiles, layer_of, sample_of_rows, stacks_experts
from samerun.model.weights import FirstWeights, drawn, fill_weights, units

FAMILIES = {
    "llama": {},
    "gpt2": {},  # The layers draw some of what is within their modules.
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "gemma2": {},
    "olmo": {},
    "bloom": {},
    "falcon": {},
    "biogpt": {},
    "mamba": {},
    "jamba": {"num_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "qwen3_moe": EXPERTS,
    "modernbert-decoder": {"sliding_window": 6, "bos_token_id": 1, "eos_token_id": 2},  # It fills modules from outside.
}


def config_of(kind: str) -> transformers.PreTrainedConfig:
    shape = {"vocab_size": 384, "n_embd": 32, "n_head": 4, "n_layer": 2} if kind == "gpt2" else dict(SHAPE)
    if kind == "falcon":  # It calculates that.
        del shape["head_dim"]
    return transformers.AutoConfig.for_model(kind, **shape | FAMILIES[kind])


@pytest.mark.parametrize("kind", FAMILIES)
def test_drawn_as_transformers_does(kind):
    """Mean and deviation of each weight, within what chance allows for as many numbers; buffers to the bit."""
    found = config_of(kind)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(found)
    ours = make_model(Model(attention="eager"), found, 0, seed=3)
    expected = dict(theirs.named_parameters())
    assert list(expected) == [name for name, _ in ours.named_parameters()]
    for name, weight in ours.named_parameters():
        one, other, count = weight.double(), expected[name].double(), weight.numel()
        deviation = other.std().item() if count > 1 else 0.0
        assert abs(one.mean() - other.mean()) <= 7 * deviation / count**0.5 + 1e-7, name
        if count > 1:
            assert abs(one.std() - deviation) <= 7 * deviation / (2 * count) ** 0.5 + 1e-7, name
    for (name, ours_), (_, theirs_) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(ours_, theirs_), name


class OwnConfig(transformers.LlamaConfig):
    model_type = "llama_of_a_fork"


class OwnLlama(transformers.LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        for layer in self.model.layers:
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)


def test_a_model_of_a_fork_draws_its_own_weights():
    """Also in __init__(), as nanoGPT scales the last matrices of its layers."""
    transformers.AutoConfig.register(OwnConfig.model_type, OwnConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(OwnConfig, OwnLlama, exist_ok=True)
    one, again, other = (make_model(Model(attention="eager"), OwnConfig(**SHAPE), 0, seed) for seed in (3, 3, 4))
    assert difference(one.state_dict(), again.state_dict()) == 0
    for layer in one.model.layers:
        assert layer.mlp.down_proj.weight.abs().max() == 0
    assert 0.01 < one.lm_head.weight.std() < 0.03
    assert (one.lm_head.weight - other.lm_head.weight).abs().max() > 0.01


class TiedConfig(transformers.LlamaConfig):
    model_type = "tied_of_a_fork"


class TiedLlama(transformers.LlamaForCausalLM):
    config_class = TiedConfig

    def __init__(self, config: TiedConfig):
        super().__init__(config)
        self.lm_head.weight = self.model.embed_tokens.weight


def test_a_weight_that_only_the_code_of_a_fork_ties():
    """As nanoGPT ties its output layer. On the meta device, where models are built first, such a line has no effect."""
    transformers.AutoConfig.register(TiedConfig.model_type, TiedConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(TiedConfig, TiedLlama, exist_ok=True)
    message = "its lm_head.weight is model.embed_tokens.weight, but transformers does not know; set _tied_weights_keys"
    with pytest.raises(UserError, match=message):
        make_model(Model(attention="eager"), TiedConfig(**SHAPE), 0, seed=3)
    tied = make_model(Model(attention="eager"), TiedConfig(**SHAPE, tie_word_embeddings=True), 0, seed=3)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_that_ranks_build_in_turn_is_said_once(tmp_path):
    """Of the model of the run, and not of small ones that are tried before it."""
    transformers.AutoConfig.register(OwnConfig.model_type, OwnConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(OwnConfig, OwnLlama, exist_ok=True)
    config = tiny_config(tmp_path) | {"model": {"architecture": SHAPE | {"model_type": OwnConfig.model_type}}}
    assert run(tmp_path, config, *STANDS_STILL).output.count("build the whole model in turn") == 1


def test_no_two_modules_and_no_two_seeds_draw_the_same():
    found = config_of("llama")
    some, other = (dict(make_model(Model(), found, 0, seed).named_parameters()) for seed in (3, 4))
    again = dict(make_model(Model(), found, 0, 3).named_parameters())
    matrices = [name for name, weight in some.items() if weight.ndim == 2]
    assert all(torch.equal(some[name], again[name]) for name in some)
    assert not any(torch.equal(some[name], other[name]) for name in matrices)
    firsts = {some[name].flatten()[0].item() for name in matrices}
    assert len(firsts) == len(matrices)


@pytest.mark.parametrize("kind", FAMILIES)
def test_drawn_alike_by_each_rank(kind):
    """In every layout: whichever weights a rank keeps, and so draws, they are those of the whole model."""
    eager, found = Model(attention="eager"), config_of(kind)
    whole = dict(make_model(eager, found, 0, seed=3).named_parameters())
    names, met = list(whole), set()
    for first in reversed(range(0, len(names), 5)):
        for unit in drawn(bare(eager, found), 3, set(names[first : first + 5])):
            assert all(torch.equal(weight, whole[name]) for name, weight in unit.items())
            met |= unit.keys()
    assert len(met) > len(names) / 2


def test_a_layer_is_gone_before_the_next_is_made():
    first, before = FirstWeights(Model(), config_of("llama"), 0, seed=3), []

    def made(names: str):
        for name in names:
            assert all(weight() is None for weight in before)
            unit = {name: Weight(torch.ones(2))}
            before.append(weakref.ref(unit[name].numbers))
            yield unit

    places = {name: [(torch.nn.Parameter(torch.zeros(2)), None)] for name in "abc"}
    assert not first.keep(places, made("abc"), torch.device("cpu"))
    assert all(place.sum() == 2 for [(place, _)] in places.values()) and len(before) == 3


def test_only_layers_are_drawn_of_which_something_is_kept():
    """A rank of a pipeline does not draw the layers of others to throw them away."""
    model = make_model(Model(), config_of("llama"), 0, seed=3)
    [unit] = drawn(bare(Model(), config_of("llama")), 3, {"model.layers.1.input_layernorm.weight"})
    layer = {f"model.layers.1.{name}": weight for name, weight in model.model.layers[1].named_parameters()}
    assert difference(unit, layer) == 0


LARGE = {"vocab_size": 50_000, "num_hidden_layers": 12, "n_layer": 12, "intermediate_size": 5000, "ffn_dim": 5000}
LARGE |= {"num_experts": 64, "num_local_experts": 64, "moe_intermediate_size": 5000}


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_tried_is_small(kind):
    """50,000 = 52 * 960 + 80 tokens become 1,040, and 5,000 = 5 * 960 + 200 columns 1,160. Of the experts, twice as
    many are left as see a token."""
    found = config_of(kind)
    for name, size in LARGE.items():
        if hasattr(found, name):
            setattr(found, name, size)
    if vars(found).get("layer_types"):
        found.layer_types = 6 * found.layer_types[:2]
    eager = Model(attention="eager")
    small = model_to_try(outlined_model(eager, found, 0, seed=0), eager)
    text, sizes = small.config, {size for weight in small.parameters() for size in weight.shape}
    assert len(small.get_input_embeddings().weight) == 1040 and not sizes & {50_000, 5000, 10_000}
    # Jamba has attention in one layer of eight. The first layer of ModernBERT lacks a norm.
    assert text.num_hidden_layers <= {"jamba": 8, "modernbert-decoder": 3}.get(kind, 2)
    if experts := number_of_experts(text):
        assert experts[1] == 2 * text.num_experts_per_tok
    assert small(input_ids=torch.arange(8)[None]).logits.shape == (1, 8, 1040)


def test_the_vocabulary_of_the_run_decides_on_chunks():
    """Though what is tried has fewer tokens."""
    for tokens, chunked in (4000, False), (5000, True):
        found = config_of("llama")
        found.vocab_size = tokens
        config = Config.model_construct(model=Model(), data=Data.model_construct(packing="none"))
        model = outlined_model(config.model, found, 0, seed=0)
        assert check_model(model, config, [], Meeting(1), loss_of_run()) == (False, chunked)


def test_experts_that_are_left_can_be_shared():
    """By 3 ranks, or as DeepSeek-V3 chooses 8 in 4 of 8 groups, which must have two each."""
    text = transformers.DeepseekV3Config()
    assert (text.num_experts_per_tok, text.n_group, text.topk_group) == (8, 8, 4)
    assert fewer_experts(text, 256, 1) == 16 and fewer_experts(text, 256, 32) == 64
    assert fewer_experts(config_of("qwen3_moe"), 48, 3) == 6
    assert fewer_experts(config_of("qwen3_moe"), 4, 1) == 4


# Model, processes, layout.
LAYOUTS = {
    "DDP": ("tied", 2, layout(DDP)),
    "FSDP2": ("llama", 2, layout(FSDP2)),
    "TP": ("tied", 2, layout(DDP, tp=2)),
    "PP": ("tied", 2, layout(DDP, pp=2)),
    "experts": ("experts", 2, layout(FSDP2, ep=2)),
    "FSDP2, and nothing of a router and of experts for one rank": ("experts", 3, layout(FSDP2)),
    "HSDP": ("experts", 4, layout(FSDP2, dp_replicate=2)),
    "CP x FSDP2": ("llama", 4, layout(FSDP2, cp=2)),
    "experts x TP": ("experts", 4, layout(FSDP2, tp=2, ep=4)),
    "experts x PP": ("tied experts", 4, layout(FSDP2, pp=2, ep=2)),
    "FSDP2 x TP x PP": ("llama", 8, layout(FSDP2, tp=2, pp=2)),
}
QUICK = ("FSDP2",)
KINDS = {"llama": {}, "tied": {"tie_word_embeddings": True}, "experts": EXPERTS}
KINDS["tied experts"] = EXPERTS | {"tie_word_embeddings": True}


def pretrained_model(folder: Path, name: str) -> Path:
    """family(), with a pad token whose embedding is not 0."""
    file = family(folder, name) / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][0] = torch.linspace(0.1, 0.2, SHAPE["hidden_size"])
    save_file(weights, file, {"format": "pt"})
    return folder


# An update by nothing: a number that is not 0 stays as it is, to the bit.
STANDS_STILL = "--run.max_steps", 1, "--optim.learning_rate", 1e-30, "--optim.warmup_steps", 0


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """first(model, pretrained): a config, and the weights that one process begins with, to the bit."""

    @cache
    def result(name: str, pretrained: bool):
        folder = tmp_path_factory.mktemp("first")
        config = tiny_config(folder)
        if pretrained:
            config["model"] = {"pretrained": str(pretrained_model(folder / "model", name))}
        else:
            kind = "qwen3_moe" if "experts" in name else "qwen3"
            config["model"] = {"architecture": {"model_type": kind, **SHAPE, **KINDS[name]}}
        return config, run(folder, config, *STANDS_STILL).weights

    return result


@pytest.mark.slow
@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("case", LAYOUTS)
def test_all_layouts_begin_with_the_same_weights(tmp_path, first, case, pretrained):
    name, processes, how = LAYOUTS[case]
    config, expected = first(name, pretrained)
    how = how | {"processes": processes, "script": SCRIPT, "warm": True, "options": ("--mixed_precision", "no")}
    done = launch(tmp_path, config, *how.pop("settings"), *STANDS_STILL, **how)
    assert difference(done.weights, expected) == 0
    if pretrained:
        assert difference(expected, load_file(f"{config['model']['pretrained']}/model.safetensors")) == 0


@pytest.mark.parametrize("case", QUICK)
def test_some_layouts_begin_with_the_same_weights(tmp_path, first, case):
    test_all_layouts_begin_with_the_same_weights(tmp_path, first, case, False)


COUNTS = """
from samerun.model.weight_files import WeightFiles
read = WeightFiles.read
def counted(*args):
    numbers = 0
    for weights in read(*args):
        numbers += sum(weight.numbers.numel() for weight in weights.values())
        yield weights
    print(f"rank {rank} has read {numbers} numbers", flush=True)
WeightFiles.read = counted
"""


@pytest.mark.parametrize("case", slow_but("experts", of=["FSDP2", "PP", "experts"]))
def test_a_rank_reads_what_it_keeps(tmp_path, first, case):
    """Of each matrix, layer, or stack of experts. All ranks together read each number of the files once."""
    name, processes, how = LAYOUTS[case]
    config, expected = first("llama" if case == "PP" else name, True)
    how = how | {"processes": processes, "script": (SCRIPT[0], fork(tmp_path / "fork.py", COUNTS)), "warm": True}
    done = launch(tmp_path, config, *how.pop("settings"), *STANDS_STILL, options=("--mixed_precision", "no"), **how)
    assert difference(done.weights, expected) == 0
    numbers = [int(found) for found in re.findall(r"has read (\d+) numbers", done.output)]
    whole = sum(weight.numel() for weight in load_file(f"{config['model']['pretrained']}/model.safetensors").values())
    assert len(numbers) == processes and sum(numbers) == whole and max(numbers) < 0.6 * whole


@pytest.mark.parametrize("tokens", [0, SHAPE["vocab_size"]])
def test_a_rank_reads_no_other_weights_of_a_layer(tmp_path, tokens):
    """Unless the model lacks tokens of the tokenizer."""
    config = Model(pretrained=str(pretrained_model(tmp_path, "llama")))
    plain = bare(config, transformers.AutoConfig.from_pretrained(tmp_path))
    name = "model.layers.1.mlp.up_proj.weight"
    [unit] = WeightFiles(plain, config).read({name: [(plain.get_parameter(name), None)]}, tokens, 0)
    assert list(unit) == [name]


def test_a_weight_that_is_a_part_of_one_in_the_files(tmp_path):
    """Those of an HRM name the joined one only by the first of its parts."""
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("hrm_text", **SHAPE))
    made.save_pretrained(tmp_path)
    name, config = "model.L_module.layers.0.self_attn.k_proj.weight", Model(pretrained=str(tmp_path), attention="eager")
    assert name not in load_file(tmp_path / "model.safetensors")
    plain = bare(config, transformers.AutoConfig.from_pretrained(tmp_path))
    units = WeightFiles(plain, config).read({name: [(plain.get_parameter(name), None)]}, 0, 0)
    [found] = [unit[name].numbers for unit in units if name in unit]
    assert torch.equal(found, made.get_parameter(name))


DEEPSEEK = SHAPE | {"n_routed_experts": 12, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
DEEPSEEK |= {"first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
DEEPSEEK |= {"qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}


def test_files_of_several_layers_each(tmp_path):
    """Also a buffer that is saved, and experts of which each has matrices of its own in the files."""
    found = transformers.AutoConfig.for_model("deepseek_v3", **DEEPSEEK)
    made = transformers.AutoModelForCausalLM.from_config(found)
    for name, buffer in made.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(torch.rand_like(buffer))
    made.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    config, found = Model(pretrained=str(tmp_path)), transformers.AutoConfig.from_pretrained(tmp_path)
    ours = make_model(config, found, 0, seed=3)
    assert difference(ours.state_dict(), made.state_dict()) == 0
    merged = [file for files in WeightFiles(bare(config, found), config).sources({1}) for file in files.values()]
    stacks = [names for file in merged for names in file.stacks.values()]  # Of which a rank may read some, by number.
    assert len(stacks) == 3
    assert all([int(re.search(r"experts\.(\d+)", one)[1]) for one in names] == [*range(12)] for names in stacks)


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_rows_that_a_model_lacks_are_drawn_by_the_seed(tmp_path, name):
    """Alike on each rank, around the mean of those that the model has."""
    config = Model(pretrained=str(pretrained_model(tmp_path, name)))
    found = transformers.AutoConfig.from_pretrained(tmp_path)
    size, made = found.vocab_size, []
    for chance in 1, 2:
        model = outlined_model(config, found, size + 64, seed=3)
        torch.manual_seed(chance)
        fill_weights(model, torch.device("cpu"))
        made.append(model.state_dict())
    assert difference(*made) == 0
    kept = load_file(tmp_path / "model.safetensors")
    for layer in "model.embed_tokens.weight", "lm_head.weight":
        rows, before = made[0][layer], kept.get(layer, kept["model.embed_tokens.weight"])
        assert torch.equal(rows[:size], before) and len({row.sum().item() for row in rows[size:]}) > 1
        assert (rows[size:] - before.mean(0)).abs().max() < 1e-3


def test_files_are_read_where_the_config_says(tmp_path):
    """By a name of their own, in bfloat16, but for what a model keeps in float32."""
    found = transformers.AutoConfig.for_model("deepseek_v3", **DEEPSEEK)
    kind = transformers.AutoModelForCausalLM
    kind.from_config(found).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "own.safetensors")
    found = transformers.AutoConfig.from_pretrained(tmp_path)
    found.transformers_weights = "own.safetensors"
    theirs = kind.from_pretrained(tmp_path, config=found, dtype=torch.bfloat16)
    plain = bare(Model(pretrained=str(tmp_path), dtype="bfloat16"), found)
    places = {name: [(weight, None)] for name, weight in plain.state_dict().items()}
    files, ours = WeightFiles(plain, Model(pretrained=str(tmp_path), dtype="bfloat16")), {}
    for unit in files.read(places, 0, 0):
        ours |= {name: weight.numbers for name, weight in unit.items()}
    assert all(weight.is_meta for weight in plain.parameters())  # A layer is let go of before the next one is read.
    expected = theirs.state_dict()
    assert {name: weight.dtype for name, weight in ours.items()} == {name: expected[name].dtype for name in ours}
    assert difference(ours, expected) == 0


@pytest.fixture
def rank_of_four():
    """rank_of_four(dimension): what rank 1 has of a [8, 4] that is divided in a dimension, without other processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    yield lambda dimension: distribute_tensor(torch.zeros(8, 4), mesh, [Shard(dimension)], src_data_rank=None)
    dist.destroy_process_group()


class InFile:
    def __init__(self, *shape: int):
        self.shape = [*shape]

    def get_shape(self) -> list[int]:
        return self.shape


def test_what_a_rank_reads_of_a_weight(rank_of_four):
    """A region of the only tensor, or of a merged one whole experts. All, where the numbers would not be the same."""
    rows, columns, shape = rank_of_four(0), rank_of_four(1), torch.Size([8, 4])
    same, experts = {"a": InFile(8, 4)}, {f"{number}": InFile(4) for number in range(8)}
    renamed, changed = FileTensors(False), FileTensors(True)
    stacked, of_pairs = (FileTensors(True, stacks={"any": [*experts][::step]}) for step in (1, 2))
    all_rows, all_columns = slice(0, 8), slice(0, 4)
    assert renamed.region(shape, [(rows, None)], same) == (slice(2, 4), all_columns)
    assert renamed.region(shape, [(columns, None)], same) == (all_rows, slice(1, 2))
    assert stacked.region(shape, [(rows, None)], experts) == (slice(2, 4), all_columns)
    assert stacked.region(shape, [(columns, None)], experts) == (all_rows, all_columns)
    assert [*stacked.parts(experts, (slice(2, 4), all_columns))] == ["2", "3"]
    for source, place, tensors in (
        (renamed, [(rows, None), (rows, None)], same),
        (renamed, [(rows, torch.tensor([1]))], same),
        (renamed, [(torch.zeros(8, 4), None)], same),
        (renamed, [(rows, None)], {"a": InFile(4, 8)}),
        (changed, [(rows, None)], same),
        (of_pairs, [(rows, None)], experts),
    ):
        assert source.region(shape, place, tensors) == () and source.parts(tensors, ()) == tensors
    assert renamed.region(torch.Size([16, 4]), [(rows, None)], {"a": InFile(16, 4)}) == ()


def test_what_stacks_experts():
    """Each one whole, or a part of its columns: then a rank reads its own experts."""
    for operations, expected in (
        ([MergeModulelist(dim=0)], True),
        ([MergeModulelist(dim=0), Concatenate(dim=1)], True),
        ([MergeModulelist(dim=1)], False),
        ([MergeModulelist(dim=0), Concatenate(dim=0)], False),
        ([MergeModulelist(dim=0), Transpose(1, 2)], False),
        ([Concatenate(dim=1)], False),
    ):
        assert stacks_experts(SimpleNamespace(operations=operations)) == expected


def test_which_layer_a_weight_is_in():
    names = "model.layers.12.mlp.fc1.weight", "model.layers.3.mlp.experts.7.w2.weight", "model.embed2.weight"
    assert [layer_of(name) for name in names] == [12, 3, -1]


def test_other_numbers_in_files_have_another_sample(tmp_path):
    """Of any of 8 rows, also in an expert; with few numbers, or with none."""
    tensors = {"0": torch.zeros(16, 4), "scalar": torch.ones(()), "vector": torch.ones(3), "none": torch.ones(0, 4)}
    for number in range(8):
        tensors[f"{number + 1}"] = torch.zeros(16, 4).index_fill_(0, torch.tensor(2 * number), 1.0)
    tensors |= {"experts": torch.full((8, 16, 4), 2.0), "other experts": torch.full((8, 16, 4), 2.0)}
    tensors["other experts"][7, 14] = 1
    save_file(tensors, tmp_path / "any.safetensors")
    with safe_open(tmp_path / "any.safetensors", "pt") as file:
        samples = [sample_of_rows(file.get_slice(name)) for name in tensors]
    assert len(set(samples)) == len(tensors)


def test_files_that_cannot_be_read_in_part(tmp_path, capsys):
    """Those that torch has pickled are read as a whole, by one process of a machine at a time, and the run says so."""
    pretrained_model(tmp_path / "model", "llama")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    torch.save(weights, tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "model" / "model.safetensors").unlink()
    config = tiny_config(tmp_path) | {"model": {"pretrained": str(tmp_path / "model")}}
    done = run(tmp_path, config, *STANDS_STILL)
    assert "build the whole model in turn" in done.output
    assert difference(done.weights, weights) == 0


def test_layers_are_units():
    """What is drawn at a time: a layer, and each module outside of layers."""
    names = [name for _, name, *_ in units(bare(Model(), config_of("llama")))]
    assert names == ["model.embed_tokens", *(f"model.layers.{number}" for number in range(4)), "model.norm", "lm_head"]


def test_the_model_of_the_run_is_checked_as_it_is(tmp_path, monkeypatch):
    """A small model of the kind has two layers. In one beyond these, the documents of a row see each other."""
    config = packed_config(tmp_path)[0] | {"model": {"architecture": {"model_type": "qwen3", **SHAPE}}}
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 1, 0
    assert run(tmp_path, config, *STANDS_STILL).status["status"] == "finished"
    whole = Qwen3Attention.forward

    def forward(self, hidden_states, *args, documents=None, **more):
        mixed = hidden_states.cumsum(1) if self.layer_idx == 3 else hidden_states
        return whole(self, mixed, *args, documents=documents, **more)

    monkeypatch.setattr(Qwen3Attention, "forward", forward)
    done = run(tmp_path, config, *STANDS_STILL, "--run.output_dir", tmp_path / "again", expect=2)
    assert re.search(
        r"error: data.packing: the loss of two documents is [\d.]+ in one row, [\d.]+ in rows", done.output
    )
