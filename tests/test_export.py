"""The export: the files that save_pretrained() would write, whoever writes them, and --export, which needs no run."""

import json
import math
import os
import re
import shutil
import signal
import weakref
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from helpers import (
    ROOT,
    VOCABULARY,
    Done,
    difference,
    launch,
    make_rows,
    run,
    slow_but,
    tiny_config,
    tiny_model,
    write_rows,
)
from safetensors.torch import load_file

import train
from samerun.config import Config, Model, Run
from samerun.errors import UserError
from samerun.model.tokenizer import byte_tokenizer
from samerun.run import export
from samerun.run.export import export_dtype, planned_weights, without_storage, write_weights
from samerun.run.export_checkpoint import SavedWeights

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
SHAPE |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = "llama", "qwen3", "mixtral", "qwen3_moe", "olmoe", "jamba", "gpt_oss", "gemma3_text"


def family(kind: str, **more) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    known = transformers.AutoConfig.for_model(kind).to_dict()
    shape = {name: value for name, value in (SHAPE | EXPERTS | more).items() if name in known}
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **shape))


def contents(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors in each file of weights."""
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def assert_same_weights(some: Path, other: Path) -> None:
    """The same names, types and bits."""
    ours, theirs = (
        {name: one for file in contents(folder).values() for name, one in file.items()} for folder in (some, other)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name])


def assert_same_files(some: Path, other: Path) -> None:
    """In the same files, too, and with the same index."""
    assert_same_weights(some, other)
    ours, theirs = ({file: set(tensors) for file, tensors in contents(folder).items()} for folder in (some, other))
    assert ours == theirs
    index = "model.safetensors.index.json"
    assert (some / index).exists() == (other / index).exists() == (len(ours) > 1)
    if len(ours) > 1:
        assert json.loads((some / index).read_text()) == json.loads((other / index).read_text())


def assert_divided(folder: Path, size: int) -> None:
    """Files of at most this size, but for a larger weight alone, and an index that says where each weight is."""
    files, index = contents(folder), json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    sizes = [sum(one.nbytes for one in tensors.values()) for tensors in files.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(total <= size or len(tensors) == 1 for total, tensors in zip(sizes, files.values()))
    assert list(files) == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shard_size(monkeypatch):
    """Sets the size of files, of which tiny models otherwise need one."""
    split = export.split_torch_state_dict_into_shards

    def set_size(size):
        monkeypatch.setattr(
            export, "split_torch_state_dict_into_shards", lambda state: split(state, max_shard_size=size)
        )

    return set_size


@pytest.mark.parametrize("size, dtype", [(10**9, torch.float32), (60_000, torch.bfloat16)])
@pytest.mark.parametrize("kind", FAMILIES)
def test_files_are_those_of_save_pretrained(tmp_path, shard_size, kind, size, dtype):
    """Also where the files have other names, and a matrix of its own for each expert. Each of 3 ranks writes some."""
    shard_size(size)
    model = family(kind).to(dtype)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    weights = {name: one for name, one in model.state_dict().items() if name not in model.all_tied_weights_keys}
    (tmp_path / "ours").mkdir()
    for rank in 2, 1, 0:
        read = lambda name, ranks, rank=rank: weights[name] if rank in ranks else None  # noqa: E731
        write_weights(model, planned_weights(model, weights, dtype), read, tmp_path / "ours", rank, ranks=3)
    for path in (tmp_path / "ours").glob("*.safetensors"):  # Where the numbers begin, as there.
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    saved = {name for file in contents(tmp_path / "theirs").values() for name in file}
    as_they_are = saved == weights.keys()
    if as_they_are:
        assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    else:  # save_pretrained() has all experts of a layer in one file, because they are parts of one tensor.
        assert_same_weights(tmp_path / "ours", tmp_path / "theirs")
    if len(contents(tmp_path / "theirs")) > 1:
        assert_divided(tmp_path / "ours", size)


def test_one_layer_at_a_time_is_in_memory(tmp_path, shard_size):
    """Also of a file that has many, and though its parts take turns."""
    model, alive, most = family("mixtral", num_hidden_layers=6), weakref.WeakSet(), 0
    weights = model.state_dict()

    def read(name, ranks):
        nonlocal most
        tensor = weights[name].clone()
        alive.add(tensor)
        most = max(most, sum(one.nbytes for one in alive))
        return tensor

    write_weights(model, without_storage(weights), read, tmp_path)
    layer = sum(weights[name].nbytes for name in weights if name.startswith("model.layers.0."))
    whole = sum(one.nbytes for one in weights.values())
    assert most <= 2 * layer < whole / 2
    assert contents(tmp_path).keys() == {"model.safetensors"}


def test_a_tensor_of_any_strides(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"row": whole[1], "column": whole[:, 1], "turned": whole.T, "repeated": whole[:1].expand(3, 4)}
    file = export.SafetensorsFile(tmp_path / "a", tensors)
    for name, tensor in tensors.items():
        file.write(name, tensor)
    file.close()
    assert difference(load_file(tmp_path / "a"), tensors) == 0


def test_what_is_written_at_a_time():
    """All of a layer, because a file may have one matrix for its experts."""
    layer = [f"model.layers.0.{name}" for name in ("experts.0.up", "experts.1.up", "norm")]
    other = ["model.layers.1.norm"]
    assert list(export.by_layer(["embed", *layer, *other]).values()) == [["embed"], layer, other]


def test_a_file_that_lacks_a_tensor_is_an_error(tmp_path):
    file = export.SafetensorsFile(tmp_path / "a", {"one": torch.zeros(2), "other": torch.zeros(())})
    file.write("one", torch.ones(2))
    with pytest.raises(ValueError, match="a lacks other"):
        file.close()


def test_what_a_rank_has_written_is_on_the_disk(tmp_path, monkeypatch):
    """The main process, which gives the folder its name, may be on another machine."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    file = export.SafetensorsFile(tmp_path / "a", {"one": torch.zeros(2)})
    file.write("one", torch.ones(2))
    file.close()
    assert synced == [(tmp_path / "a").stat().st_size]


# Type -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked, saved, precision, expected",
    [
        ("auto", None, "no", "float32"),
        ("auto", None, "bf16", "bfloat16"),
        ("auto", None, "fp8", "bfloat16"),
        ("auto", None, "fp16", "float16"),
        ("auto", "bfloat16", "no", "bfloat16"),
        ("auto", "float16", "bf16", "float16"),
        ("auto", "float32", "bf16", "float32"),
        ("float16", "bfloat16", "bf16", "float16"),
        ("float32", None, "bf16", "float32"),
        ("auto", "float64", "no", "float32"),
    ],
)
@pytest.mark.parametrize("is_said", [True, False])
def test_the_type(tmp_path, asked, saved, precision, expected, is_said):
    """That of the pretrained model, which its config may not say, or that in which a new one is trained."""
    model = Model(architecture={"model_type": "llama"})
    if saved:
        family("llama").to(getattr(torch, saved)).save_pretrained(tmp_path)
        model = Model(pretrained=str(tmp_path))
        found = json.loads((tmp_path / "config.json").read_text())
        assert found["dtype"] == saved
        if not is_said:
            del found["dtype"]
            found["attn_implementation"] = "flash_attention_2"  # Which is not installed here.
            (tmp_path / "config.json").write_text(json.dumps(found))
    config = Config.model_construct(run=Run(export_dtype=asked), model=model)
    assert export_dtype(config, precision) == getattr(torch, expected)


@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
def test_the_type_of_a_model_of_another_task(tmp_path, saved):
    """A fork may train a ViT, which is no causal model. The config of an older one does not say its type."""
    vit = transformers.ViTConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=4, patch_size=2
    )
    transformers.ViTForImageClassification(vit).to(getattr(torch, saved)).save_pretrained(tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    del found["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(found))
    config = Config.model_construct(run=Run(), model=Model(pretrained=str(tmp_path)))
    assert export_dtype(config, "no") == getattr(torch, saved)


OWN = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_the_type_of_a_model_with_code_of_its_own(tmp_path):
    """Its class is not one of transformers (model.trust_remote_code)."""
    family("llama").bfloat16().save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    found = json.loads((tmp_path / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    found |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": classes}
    del found["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(found))
    model = Model(pretrained=str(tmp_path), trust_remote_code=True)
    assert export_dtype(Config.model_construct(run=Run(), model=model), "no") == torch.bfloat16


def test_what_transformers_has_in_float32_is_written_so(tmp_path):
    """The biases of a router have steps of 0.001, which are rounded away in bf16."""
    config, kept = tiny_config(tmp_path), "e_score_correction_bias"
    model = family("glm4_moe", num_hidden_layers=2, n_routed_experts=4, moe_intermediate_size=16)
    for name, buffer in model.named_buffers():
        if name.endswith(kept):
            buffer += 0.501
    model.save_pretrained(tmp_path / "start")
    short = "--run.max_steps", 2, "--optim.warmup_steps", 0, "--run.export_dtype", "bfloat16"
    done = run(tmp_path, config, *short)
    words = "--config", tmp_path / "config.yaml", *short, "--export", "last", "--to", tmp_path / "to"
    assert train.main([*map(str, words)]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model", dtype="auto")
    loaded.save_pretrained(tmp_path / "again")
    for folder in "run/model", "to":
        assert_same_weights(tmp_path / folder, tmp_path / "again")
    assert loaded.dtype == torch.bfloat16
    biases = [buffer for name, buffer in loaded.named_buffers() if name.endswith(kept)]
    assert biases and all(torch.equal(bias, torch.full_like(bias, 0.501)) for bias in biases)


@pytest.mark.parametrize("kind", ["minimax_m2", "lfm2_moe"])
def test_biases_of_routers_are_always_in_float32(kind):
    """Also where transformers would have them in 16 bits: other programs do not."""
    few = {"num_hidden_layers": 2, "num_local_experts": 4, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2}
    model = family(kind, **few)
    planned = planned_weights(model, model.state_dict(), torch.bfloat16)
    in_float32 = {name for name, weight in planned.items() if weight.dtype == torch.float32}
    assert in_float32 and in_float32 == {name for name, _ in model.named_buffers() if name.endswith("_bias")}


def test_numbers_that_count_keep_their_type():
    """Such as the batches that a norm has seen."""
    norm = torch.nn.BatchNorm1d(2)
    planned = planned_weights(norm, norm.state_dict(), torch.bfloat16)
    assert planned["weight"].dtype == torch.bfloat16 and planned["num_batches_tracked"].dtype == torch.int64


def checkpoint_weights(done: Done, step: int) -> dict[str, torch.Tensor]:
    """Of a run on one process."""
    [file] = (done.folder / "checkpoints" / f"step-{step:08}").glob("*.safetensors")
    saved = load_file(file)
    return {name.removeprefix("model."): one for name, one in saved.items() if name.startswith("model.")}


def test_a_run_exports_in_the_type_of_its_model(tmp_path):
    """Its float32 weights stay in the checkpoint. config.json says the type, and from_pretrained() takes it."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 2, 0
    start = Path(config["model"]["pretrained"])
    transformers.AutoModelForCausalLM.from_pretrained(start).bfloat16().save_pretrained(start)
    done = run(tmp_path, config)
    saved = checkpoint_weights(done, 2)
    assert {one.dtype for one in saved.values()} == {torch.float32}
    assert {one.dtype for one in done.weights.values()} == {torch.bfloat16}
    assert difference(done.weights, {name: one.bfloat16() for name, one in saved.items()}) == 0
    assert json.loads((done.folder / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model").dtype == torch.bfloat16


# Layouts --------------------------------------------------------------------------------------------------------------

FORK = f"""
import functools, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import train
from samerun.run import export
CHANGE
sys.exit(train.main())
"""
SMALL_FILES = "export.split_torch_state_dict_into_shards = functools.partial(\
export.split_torch_state_dict_into_shards, max_shard_size=30_000)"
IN_A_PIPELINE = "--model.pipeline_ranks", 2
LAYOUTS = {  # Kind of model, launcher file, processes, sizes for Accelerate, settings.
    "DDP": ("llama", "multi_gpu", 2, {}, ()),
    "FSDP2": ("qwen3_moe", "fsdp2", 3, {}, ()),
    "experts": ("qwen3_moe", "fsdp2", 4, {}, ("--model.expert_ranks", 2)),
    "pipeline": ("qwen3_moe", "fsdp2", 4, {}, IN_A_PIPELINE),
    "pipeline, tensor": ("qwen3", "multi_gpu", 4, {"TP": 2}, IN_A_PIPELINE),
    "tied, all": ("qwen3", "fsdp2", 8, {"TP": 2}, (*IN_A_PIPELINE, "--batch.max_micro_batch_size", 3)),
}


def config_of(folder: Path, kind: str) -> dict:
    config = tiny_config(folder)
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 3, 0
    config["batch"]["max_micro_batch_size"] = 2
    config["data"]["eval_source"] = None
    model = family(kind, tie_word_embeddings=True)
    model.save_pretrained(folder / "family")
    config["model"]["pretrained"] = str(folder / "family")
    return config


def on_layout(folder: Path, config: dict, layout: str, change: str, *overrides, **more) -> Done:
    _, launcher, processes, sizes, settings = LAYOUTS[layout]
    script = folder / "fork.py"
    script.write_text(FORK.replace("CHANGE", change))
    more |= {"env": {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}}
    more |= {"options": ("--mixed_precision", "no"), "script": (ROOT / "tests" / "wrapper_cpu_as_gpu.py", script)}
    how = {"launcher": launcher, "processes": processes, "warm": True, "timeout": 600} | more
    return launch(folder, config, *settings, *overrides, **how)


@pytest.mark.parametrize("layout", slow_but("FSDP2", of=LAYOUTS))
def test_every_layout_writes_the_same_model(tmp_path, layout):
    """In several files and, rounding aside, with the weights and the logits of one process."""
    config = config_of(tmp_path, LAYOUTS[layout][0])
    done = on_layout(tmp_path, config, layout, SMALL_FILES)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    model.save_pretrained(tmp_path / "theirs")
    assert len(contents(done.folder / "model")) > 4  # Most ranks have one to write.
    assert_divided(done.folder / "model", 30_000)
    assert_same_weights(done.folder / "model", tmp_path / "theirs")
    one = run(tmp_path, config, "--run.output_dir", tmp_path / "one")
    expected = transformers.AutoModelForCausalLM.from_pretrained(one.folder / "model")
    assert difference(model.state_dict(), expected.state_dict()) < 1e-5
    ids = torch.arange(24)[None]
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)
    assert contents(one.folder / "model").keys() == {"model.safetensors"}


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_the_old_model(tmp_path):
    """The launch after it exports."""
    config = config_of(tmp_path, "qwen3_moe")
    before = run(tmp_path, config)
    old = contents(before.folder / "model")
    (before.folder / "status.json").unlink()
    kill = """
write = export.SafetensorsFile.write
def killed(self, name, tensor):
    write(self, name, tensor)
    if int(os.environ["RANK"]) == 1 and "layers.2" in name:
        os.kill(os.getpid(), signal.SIGKILL)
export.SafetensorsFile.write = killed
"""
    settings = "--run.max_steps", 5
    on_layout(tmp_path, config, "FSDP2", SMALL_FILES + kill, *settings, expect=None)
    assert before.status["status"] != "finished" and before.checkpoints[-1] == "step-00000005"
    assert list((before.folder / ".model.tmp").glob("*.safetensors"))
    now = contents(before.folder / "model")
    assert difference(now["model.safetensors"], old["model.safetensors"]) == 0
    done = run(tmp_path, config, *settings)
    assert difference(done.weights, old["model.safetensors"]) > 1e-4
    assert not (before.folder / ".model.tmp").exists()


# --export -------------------------------------------------------------------------------------------------------------


def exported(done: Done, config: dict, folder: Path, which: str, *more, expect: int = 0) -> Done:
    """--export by main(argv), into folder/out."""
    return run(folder, config, "--export", which, "--to", folder / "out", *more, expect=expect)


def assert_same_model(some: Path, other: Path) -> None:
    """All that is in the two folders is the same, byte by byte but for the order of names."""
    assert {path.name for path in some.iterdir()} == {path.name for path in other.iterdir()}
    assert_same_files(some, other)
    for path in some.glob("*.json"):
        if path.name != "model.safetensors.index.json":
            assert json.loads(path.read_text()) == json.loads((other / path.name).read_text()), path.name


def chat_data(folder: Path) -> dict:
    """Chats whose turns end with a token that is new to the model."""
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 12
    template = (ROOT / "configs" / "chat_template.jinja").read_text().replace("<|im_end|>", "</turn>")
    (folder / "template.jinja").write_text(template)
    data = {"path": str(write_rows(folder / "chats", [{"messages": chat} for chat in chats])), "format": "chat"}
    data |= {"tokenizer": "bytes", "special_tokens": ["</turn>"], "packing": "none", "sequence_length": 32}
    return data | {"chat_template": str(folder / "template.jinja")}


@pytest.mark.parametrize("kind", ["pretrained", "new", "new, in bf16", "tied", "mixture", "bf16", "chat"])
def test_a_checkpoint_becomes_what_its_run_exports(tmp_path, monkeypatch, kind):
    """File by file, from a pretrained or a new model, with tied weights, experts, and tokens that are new to it. With
    run.export_dtype auto, a new one has the type of the launch that trained it."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 2, 0
    if kind.startswith("new"):
        config["model"] = {"architecture": {"model_type": "llama"} | {k: v for k, v in SHAPE.items() if v is not None}}
    elif kind == "tied":
        config["model"]["pretrained"] = str(tiny_model(tmp_path / "tied", learned_positions=True))
    elif kind == "mixture":
        config |= {"model": config_of(tmp_path, "qwen3_moe")["model"]}
    elif kind == "bf16":
        family("llama").bfloat16().save_pretrained(tmp_path / "bf16")
        config["model"]["pretrained"] = str(tmp_path / "bf16")
    elif kind == "chat":
        config["data"] = chat_data(tmp_path)
    with monkeypatch.context() as patch:
        if kind == "new, in bf16":
            patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        done = run(tmp_path, config)
    output = exported(done, config, tmp_path, "last").output
    assert "step-00000002" in output and str(tmp_path / "out") in output
    assert_same_model(tmp_path / "out", done.folder / "model")


def test_several_chat_templates_are_replaced_with_the_model(tmp_path):
    """transformers puts those beside the default into a folder. Other folders are not a model's."""
    config = tiny_config(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ messages }} {{ tools }}"}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config["data"]["tokenizer"] = str(tmp_path / "tokenizer")
    settings = "--run.max_steps", 1, "--optim.warmup_steps", 0
    done = run(tmp_path, config, *settings)
    for _ in range(2):
        exported(done, config, tmp_path, "last", *settings)
        (found,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
        assert [path.name for path in found.iterdir()] == ["tool_use.jinja"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run of 6 steps with a checkpoint of each 2nd, in which the first evaluation is the best."""
    folder = tmp_path_factory.mktemp("kept")
    config = tiny_config(folder)
    noise = make_rows([24, 24], seed=9)
    config["data"]["path"] = str(write_rows(folder / "noise", noise))
    config["batch"]["global_batch_size"] = 2
    config["optim"] |= {"schedule": "constant", "warmup_steps": 0, "learning_rate": 0.05}
    config["run"] |= {"max_steps": 12, "save_every": 4, "eval_every": 4, "keep_best": True, "keep_checkpoints": 2}
    return config, run(folder, config)


def test_a_step_is_exported_without_a_look_at_others(kept, tmp_path):
    """Of which the newest may be damaged, or as large again."""
    config, done = kept
    shutil.copytree(done.folder, tmp_path / "copy")
    (tmp_path / "copy" / "checkpoints" / "step-00000012" / "manifest.json").write_text("{}")
    of_copy = "--run.output_dir", tmp_path / "copy"
    assert "passed over" not in exported(done, config, tmp_path, "8", *of_copy).output
    assert "passed over" in exported(done, config, tmp_path, "last", *of_copy).output


OTHER_TOKENIZER = "--data.tokenizer", "{ROOT}", "--run.allow_changes", "[data.tokenizer]"


@pytest.mark.parametrize("which", ["8", "last", "best"])
def test_which_checkpoint(kept, tmp_path, which):
    """From checkpoints of 2 processes, too, which have a part each."""
    config, done = kept
    manifest = json.loads((done.folder / "checkpoints" / "step-00000012" / "manifest.json").read_text())
    names = {"8": "step-00000008", "last": "step-00000012", "best": manifest["best_checkpoint"]}
    settings = "--run.output_dir", done.folder
    exported(done, config, tmp_path, which, *settings)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert difference(ours, checkpoint_weights(done, int(names[which][5:]))) == 0
    if which == "best":
        assert_same_model(tmp_path / "out", done.folder / "model")


def test_evaluations_without_a_finite_loss_are_told(tmp_path, monkeypatch):
    """They were made, and none of them is the best one."""
    config = tiny_config(tmp_path)
    monkeypatch.setattr(train, "evaluate_one", lambda *of_a_setup: {"loss": math.nan})
    settings = "--run.keep_best", "true", "--run.max_steps", 1, "--optim.warmup_steps", 0
    done = run(tmp_path, config, *settings)
    assert done.logged("eval/loss") == [None]
    output = exported(done, config, tmp_path, "best", *settings, expect=2).output
    assert "knows of no best one; run.keep_best keeps it, from the first evaluation with a finite loss on" in output


def test_without_a_name_the_model_is_beside_that_of_the_run(kept, tmp_path):
    config, done = kept
    code = run(tmp_path, config, "--run.output_dir", done.folder, "--export", "8", "--run.export_dtype", "float16")
    folder = done.folder / "model-step-00000008"
    assert str(folder) in code.output and "float16" in code.output
    [weights] = contents(folder).values()
    assert {one.dtype for one in weights.values()} == {torch.float16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"


def test_the_average_of_checkpoints(kept, tmp_path):
    """In an order that is not that of their steps."""
    config, done = kept
    settings = "--run.output_dir", done.folder
    steps = [int(name.removeprefix("step-")) for name in done.checkpoints]
    steps = [*steps[1:], steps[0]]
    output = run(tmp_path, config, *settings, "--export", *steps).output
    folder = done.folder / f"model-average-{'-'.join(map(str, steps))}"
    assert len(steps) > 1 and f"Exported: {folder} (average-" in output
    weights = [checkpoint_weights(done, step) for step in steps]
    average = {name: sum(one[name].double() for one in weights) / len(steps) for name in weights[0]}
    assert difference(load_file(folder / "model.safetensors"), average) < 1e-7
    assert difference(weights[0], average) > 1e-4
    config = config | {"model": {"pretrained": str(folder)}}
    assert run(tmp_path, config, "--run.max_steps", 1, "--optim.warmup_steps", 0).losses
    shutil.rmtree(folder)


def test_what_an_average_is_of(tmp_path):
    """A number that counts is that of the first checkpoint. Checkpoints of two models have none, nor have those of
    another model than the config's."""

    def write(name: str, **weights: torch.Tensor) -> Path:
        weights = {f"model.{key}": weight for key, weight in weights.items()}
        dcp.save(weights, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / name)), no_dist=True)
        return tmp_path / name

    some = write("some", count=torch.tensor([3]), weight=torch.tensor([1.0, 2.0]))
    other = write("other", count=torch.tensor([7]), weight=torch.tensor([2.0, 6.0]))
    average = SavedWeights([some, other], None)
    assert average.read("count").tolist() == [3] and average.read("weight").tolist() == [1.5, 4.0]
    for name, weights in {"larger": {"weight": torch.ones(3)}, "without": {}}.items():
        another = write(name, count=torch.tensor([7]), **weights)
        with pytest.raises(UserError, match=f"{another} is of another model than {some}"):
            SavedWeights([some, another], None)
    sizes = {"count": torch.empty(1), "weight": torch.empty(2)}
    average.check_names(sizes)
    for model, told in (
        (sizes | {"weight": torch.empty(3)}, "weight has"),
        (sizes | {"more": torch.ones(1)}, "only the model"),
    ):
        with pytest.raises(UserError, match=f"{some} is of another model: {told}"):
            average.check_names(model)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--export", "7"), r"--export 7: there is no .*step-00000007; there are those of the steps .*8, 12"),
        (("--export", "first"), "--export first: give best, last or a step or"),
        (("--export", "8", "last"), "--export 8 last: give .*, for their average, steps such as 800 900 1000"),
        (("--export", "8", "08"), "--export 8 08: names a step twice"),
        (("--export", "12", "7"), r"--export 7: there is no .*step-00000007; there are those of the steps .*8, 12"),
        (("--export",), "command line: .*expected at least one argument"),
        (("--to", "out"), "--to and --merge go with --export"),
        (("--export", "last", "--merge"), "--merge: needs model.lora"),
        (("--export", "last", "--plan", "2"), "give one of --plan, --prepare and --export"),
        (("--export", "last", "--run.output_dir", "nothing"), "nothing/checkpoints has no checkpoint"),
        (("--export", "last", "--to", "{ROOT}"), r"--to: .* also holds \.ci; name another folder"),
        (("--export", "last", "--model.lora", "{r: 2}"), "has model.lora"),
        (("--export", "8", "12", "--model.lora", "{r: 2}"), "to average adapters is not to average their models"),
        (("--export", "last", *OTHER_TOKENIZER), "data.tokenizer .*: cannot load"),
    ],
)
def test_refused(kept, tmp_path, words, message):
    config, done = kept
    words = [word.replace("{ROOT}", str(ROOT)) for word in words]
    given = [] if "--run.output_dir" in words else ["--run.output_dir", str(done.folder)]
    output = run(tmp_path, config, *given, *words, expect=2).output
    assert re.search(message, output) and output.count("error:") == 1 and "Traceback" not in output
    assert not list(done.folder.glob(".*.tmp"))


def test_of_several_processes_is_refused(kept, tmp_path, monkeypatch):
    config, done = kept
    for name, value in {"WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
    output = exported(done, config, tmp_path, "last", "--run.output_dir", done.folder, expect=2).output
    assert "--export: one process does it; start it as python train.py" in output


def test_not_in_place_of_where_it_runs(kept, tmp_path, monkeypatch):
    """Whoever stands in an empty folder would be left in one that is deleted."""
    config, done = kept
    words = "--run.output_dir", done.folder, "--export", "last", "--to"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ".", tmp_path / "here":
        assert f"--to: {name} is where this command runs" in run(tmp_path, config, *words, name, expect=2).output
    run(tmp_path, config, *words, "model")
    assert Path("model", "model.safetensors").exists()


def test_another_model_is_refused(kept, tmp_path):
    """Even where no setting tells: its files have changed."""
    config, done = kept
    other = tmp_path / "other"
    family("llama", num_hidden_layers=1).save_pretrained(other)
    for path in (done.folder / "checkpoints").glob("step-*/manifest.json"):
        assert json.loads(path.read_text())["config"]["model.pretrained"] == config["model"]["pretrained"]
    more = "--run.output_dir", done.folder
    output = exported(done, config, tmp_path, "last", *more, "--model.pretrained", other, expect=2).output
    assert re.search("has model.pretrained: .*, and the config", output)
    start, saved = Path(config["model"]["pretrained"]), tmp_path / "saved"
    start.rename(saved)
    other.rename(start)
    output = exported(done, config, tmp_path, "last", *more, expect=2).output
    start.rename(other)
    saved.rename(start)
    assert re.search(r"is of another model: only the checkpoint has model\.layers\.1\.", output)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_another_tokenizer_is_refused(kept, tmp_path):
    """Its special tokens may have other ids. What has only moved can be allowed."""
    config, done = kept
    where = "--run.output_dir", done.folder
    moved = shutil.copytree(config["model"]["pretrained"], tmp_path / "moved")
    for setting, value in ("data.special_tokens", "[<a>]"), ("data.tokenizer", "other"), ("model.pretrained", moved):
        changed = *where, f"--{setting}", value
        output = exported(done, config, tmp_path, "last", *changed, expect=2).output
        assert f"has {setting}: " in output and f"all the same: --run.allow_changes '[{setting}]'" in output
    exported(done, config, tmp_path, "last", *changed, "--run.allow_changes", "[model.pretrained]")
    (tmp_path / "same").mkdir()
    exported(done, config, tmp_path / "same", "last", *where)
    assert_same_files(tmp_path / "same" / "out", tmp_path / "out")


def test_a_signal_ends_an_export(kept, tmp_path, monkeypatch):
    """At once, and nothing of it is left."""
    config, done = kept
    close = export.SafetensorsFile.close
    monkeypatch.setattr(
        export.SafetensorsFile, "close", lambda file: signal.raise_signal(signal.SIGTERM) or close(file)
    )
    signal.signal(signal.SIGTERM, lambda *_: None)  # What the caller of main() does at a signal.
    ended = exported(done, config, tmp_path, "last", "--run.output_dir", done.folder, expect=None)
    assert "Stopped by SIGTERM" in ended.output and "Exported" not in ended.output
    assert not [*tmp_path.glob("out"), *tmp_path.glob(".out*")]


def test_two_exports_into_one_folder(kept, tmp_path, monkeypatch):
    """The second one would delete the draft of the first, which would then give its name to that of the second."""
    config, done = kept
    close, more = export.SafetensorsFile.close, ("--run.output_dir", done.folder)
    refused = []

    def close_late(file):
        monkeypatch.setattr(export.SafetensorsFile, "close", close)
        refused.append(exported(done, config, tmp_path, "12", *more, expect=None))
        close(file)

    monkeypatch.setattr(export.SafetensorsFile, "close", close_late)
    exported(done, config, tmp_path, "8", *more)
    assert refused[0].code == 2 and "out: another process exports to it" in refused[0].output
    assert (tmp_path / "out" / "model.safetensors").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_exported_leaves_the_old_model(kept, tmp_path):
    config, done = kept
    more = "--run.output_dir", done.folder
    exported(done, config, tmp_path, "8", *more)
    old = load_file(tmp_path / "out" / "model.safetensors")
    script = tmp_path / "fork.py"
    kill = "export.SafetensorsFile.close = lambda self: os.kill(os.getpid(), signal.SIGKILL)"
    script.write_text(FORK.replace("CHANGE", kill))
    to = "--export", "last", "--to", tmp_path / "out", *more
    launch(tmp_path, config, *to, processes=None, script=script, warm=True, expect=-signal.SIGKILL)
    assert difference(load_file(tmp_path / "out" / "model.safetensors"), old) == 0
    exported(done, config, tmp_path, "last", *more)
    assert difference(load_file(tmp_path / "out" / "model.safetensors"), checkpoint_weights(done, 12)) == 0
    assert not list(tmp_path.glob(".out*"))


# LoRA -----------------------------------------------------------------------------------------------------------------

ADAPTERS = {
    "matrices": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
    "whole modules": {"r": 2, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "embeddings": {"r": 2, "target_modules": ["embed_tokens", "q_proj"]},
}


@pytest.mark.parametrize("kind", [*ADAPTERS, "new tokens", "new tokens, tied"])
def test_an_adapter_and_its_merger(tmp_path, kind):
    """The adapter is that of the run, byte by byte. Merged, it has the logits that peft computes with both."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 3, 0
    config["optim"]["learning_rate"] = 0.05
    if kind in ADAPTERS:
        config["model"]["lora"] = ADAPTERS[kind]
    else:
        start = tiny_model(tmp_path / "other", learned_positions="tied" in kind)
        config["model"] = {"pretrained": str(start), "lora": {"r": 2, "target_modules": "all-linear"}}
        (tmp_path / "a.txt").write_text("A text about nothing. " * 40)
        config["data"] |= {"path": None, "files": str(tmp_path / "a.txt"), "format": "text", "packing": "concat"}
        config["data"] |= {"special_tokens": ["<new>"], "eval_source": None}
        config["data"]["parse_special_tokens"] = True
        config["batch"]["global_batch_size"] = 4
    done = run(tmp_path, config)
    exported(done, config, tmp_path, "last")
    ours, theirs = (folder / "adapter_model.safetensors" for folder in (tmp_path / "out", done.folder / "model"))
    assert difference(load_file(ours), load_file(theirs)) == 0
    for name in "adapter_config.json", "tokenizer.json":
        assert (tmp_path / "out" / name).read_text() == (done.folder / "model" / name).read_text()

    output = run(tmp_path, config, "--export", "last", "--merge").output
    merged = done.folder / "model-step-00000003-merged"
    assert str(merged) in output and not (merged / "adapter_config.json").exists()
    both = peft.AutoPeftModelForCausalLM.from_pretrained(done.folder / "model").eval()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and type(model).__name__ != "PeftModel"
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(model(ids).logits, both(input_ids=ids).logits, rtol=0, atol=1e-5)
    start = Path(config["model"]["pretrained"])
    base = transformers.AutoModelForCausalLM.from_pretrained(start)
    assert (model(ids).logits[..., :VOCABULARY] - base(ids).logits).abs().max() > 1e-3

    torch.nn.init.zeros_(base.get_input_embeddings().weight)
    base.save_pretrained(start)  # Another model under the same name.
    command = "--export", "last", "--merge", "--to", tmp_path / "another"
    assert "model.pretrained is another model than" in run(tmp_path, config, *command, expect=2).output
    assert not (tmp_path / "another").exists()


def test_an_adapter_beside_weights_in_bf16(tmp_path):
    """Merged in bf16, as the model below it is: within the rounding of bf16, twice."""
    config = tiny_config(tmp_path)
    start = Path(config["model"]["pretrained"])
    transformers.AutoModelForCausalLM.from_pretrained(start).bfloat16().save_pretrained(start)
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 3, 0
    config["optim"]["learning_rate"] = 0.05
    config["model"] |= {"dtype": "bfloat16", "lora": {"r": 4}}
    done = run(tmp_path, config)
    run(tmp_path, config, "--export", "last", "--merge", "--to", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    adapter = load_file(done.folder / "model" / "adapter_model.safetensors")
    base = load_file(start / "model.safetensors")
    assert {one.dtype for one in [*merged.values(), *adapter.values()]} == {torch.bfloat16}
    saved = checkpoint_weights(done, 3)
    name = "model.layers.1.self_attn.q_proj"
    up, down = (saved[f"base_model.model.{name}.lora_{part}.default.weight"] for part in "BA")
    expected = base[f"{name}.weight"].float() + (8 / 4) * up @ down  # lora_alpha is 8.
    assert (expected - base[f"{name}.weight"].float()).abs().max() > 0.01
    torch.testing.assert_close(merged[f"{name}.weight"].float(), expected, rtol=2**-8, atol=1e-6)
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


def test_an_adapter_that_changes_what_is_below_it(tmp_path):
    """As of model.lora.init_lora_weights pissa. Merged, it has the logits that peft computes with both."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 2, 0
    config["model"]["lora"] = {"r": 4, "init_lora_weights": "pissa"}
    done = run(tmp_path, config)
    run(tmp_path, config, "--export", "last", "--merge", "--to", tmp_path / "merged")
    both = peft.AutoPeftModelForCausalLM.from_pretrained(done.folder / "model").eval()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(model(ids).logits, both(input_ids=ids).logits, rtol=0, atol=1e-5)


def test_an_adapter_of_a_chat_says_where_an_answer_ends(tmp_path):
    """peft saves no generation_config.json with what model.lora trains."""
    config = tiny_config(tmp_path)
    config["data"], config["model"]["lora"] = chat_data(tmp_path), {"r": 2}
    folder = run(tmp_path, config, "--run.max_steps", 1, "--optim.warmup_steps", 0).folder / "model"
    end = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("</turn>")
    assert end in transformers.GenerationConfig.from_pretrained(folder).eos_token_id


def test_an_adapter_above_embeddings_that_have_grown(tmp_path):
    """For a tokenizer of more tokens than the model has. Their rows are drawn, and no others would be as good below
    what model.lora trains, so they are saved with it."""
    config = tiny_config(tmp_path)
    start = Path(config["model"]["pretrained"])
    small = transformers.AutoModelForCausalLM.from_pretrained(start)
    small.resize_token_embeddings(100)
    small.save_pretrained(start)
    (tmp_path / "a.txt").write_text("A text about nothing. " * 40)
    config["data"] |= {"path": None, "files": str(tmp_path / "a.txt"), "format": "text", "packing": "concat"}
    config["data"]["eval_source"], config["model"]["lora"] = None, {"r": 2}
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 1, 0
    done = run(tmp_path, config)
    saved = load_file(done.folder / "model" / "adapter_model.safetensors")
    whole = {name: weight for name, weight in saved.items() if "lora" not in name}
    assert {len(weight) for weight in whole.values()} == {VOCABULARY} and len(whole) == 2
    for name, before in ("model.embed_tokens", small.get_input_embeddings()), ("lm_head", small.lm_head):
        assert torch.equal(whole[f"base_model.model.{name}.weight"][:100], before.weight)
    exported(done, config, tmp_path, "last")
    assert_same_weights(tmp_path / "out", done.folder / "model")


def test_an_adapter_above_files_that_cannot_be_read_in_part(tmp_path):
    """Those that torch has pickled. The run has read them in bf16, and its export has the embeddings as they are."""
    config = tiny_config(tmp_path)
    start = Path(config["model"]["pretrained"])
    weights = load_file(start / "model.safetensors")
    torch.save(weights, start / "pytorch_model.bin")
    (start / "model.safetensors").unlink()
    config["model"] |= {"dtype": "bfloat16", "lora": {"r": 2, "target_modules": ["embed_tokens"]}}
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 1, 0
    exported(run(tmp_path, config), config, tmp_path, "last")
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    [embedding] = (saved[name] for name in saved if "lora" not in name)
    assert torch.equal(embedding, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "kind, targets, more",
    [
        # The weights below the adapter are drawn anew, and in bf16 they are other numbers than in float32.
        ("llama", ["q_proj", "embed_tokens"], {}),
        # Checkpoints also hold its buffers, e_score_correction_bias.
        ("minimax_m2", ["q_proj"], {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_an_adapter_of_a_new_model(tmp_path, kind, targets, more):
    config = tiny_config(tmp_path)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    lora = {"r": 2, "target_modules": targets}
    architecture = {"model_type": kind, **shape, **heads, **ids, **more}
    config["model"] = {"architecture": architecture, "dtype": "bfloat16", "lora": lora}
    done = run(tmp_path, config, "--run.max_steps", 1, "--optim.warmup_steps", 0)
    run(tmp_path, config, "--run.max_steps", 1, "--export", "last", "--to", tmp_path / "out")
    expected, found = (
        load_file(path / "adapter_model.safetensors") for path in (done.folder / "model", tmp_path / "out")
    )
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    run(tmp_path, config, "--run.max_steps", 1, "--export", "last", "--merge", "--to", tmp_path / "merged")


def test_a_project_is_not_replaced(kept, tmp_path):
    """Though it has a config.json; nor is what the run has begun with."""
    config, done = kept
    project = tmp_path / "project"
    project.mkdir()
    (project / "config.json").write_text("{}")
    words = "--run.output_dir", done.folder, "--export", "last", "--to"
    assert "does not hold a model" in run(tmp_path, config, *words, project, expect=2).output
    (project / "model.safetensors").touch()
    (project / "thesis").mkdir()
    assert "also holds thesis" in run(tmp_path, config, *words, project, expect=2).output
    (tmp_path / "link").symlink_to(project)
    assert "link exists, and is not a folder" in run(tmp_path, config, *words, tmp_path / "link", expect=2).output
    base = config["model"]["pretrained"]
    assert "is model.pretrained" in run(tmp_path, config, *words, base, expect=2).output
    assert sorted(path.name for path in project.iterdir()) == ["config.json", "model.safetensors", "thesis"]
