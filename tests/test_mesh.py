"""Any product of dimensions is the run of a plain loop, too: ranks that divide a model in two, three and four ways."""

import gzip
import itertools
import json
import math
import re
from collections import Counter
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import (
    ROOT,
    VOCABULARY,
    Done,
    check_continued,
    launch,
    loss_of_run,
    resume_from,
    run,
    tiny_config,
)
from reference import shuffled, train_reference
from safetensors.torch import load_file
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from samerun.config import Batch, Config, Eval, Model, Optim
from samerun.errors import UserError
from samerun.model.attention import DOCUMENTS
from samerun.model.checks import probe_batch
from samerun.parallel.layout import REFUSED, Layout, check_combination, check_type_of_codes
from samerun.parallel.mesh import Parallelism
from samerun.parallel.probe import first_difference, try_out_whole

SCRIPT = ROOT / "tests" / "wrapper_cpu_as_gpu.py", ROOT / "train.py"
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": VOCABULARY, "head_dim": 8}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
SHAPE |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS = {
    "llama": ("llama", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),  # Its q_norm and k_norm are whole on the ranks of tp.
    "experts": ("qwen3_moe", EXPERTS),
    "tied experts": ("qwen3_moe", EXPERTS | {"tie_word_embeddings": True}),
}


def family(folder: Path, name: str) -> Path:
    """A tiny model whose norms are not all the same numbers."""
    torch.manual_seed(1)
    kind, change = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SHAPE | change))
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """truth(model): the config of all cases with this model, and the plain loop's result for it."""

    @cache
    def result(name: str):
        folder = tmp_path_factory.mktemp("mesh")
        config = tiny_config(folder)
        config["run"] |= {"max_steps": 6, "eval_every": 3, "save_every": 1, "keep_checkpoints": 9}
        config["model"]["pretrained"] = str(family(folder / "model", name))
        config["batch"]["max_micro_batch_size"] = 2
        rows, held_out = (list(datasets.load_from_disk(folder / part)) for part in ("rows", "held-out"))
        order = shuffled(config["run"]["seed"], len(rows), 80)
        rows_of = lambda step: [rows[i] for i in order[step * 10 - 10 : step * 10]]  # noqa: E731
        did = train_reference(config, rows_of, held_out, eval_every=3)
        clipped = [norm > config["optim"]["max_grad_norm"] for norm in did.grad_norms]
        assert 2 < sum(clipped)
        did.model.save_pretrained(folder / "end")  # In the files of a mixture, each expert has matrices of its own.
        did.weights = load_file(folder / "end" / "model.safetensors")
        return config, did

    return result


def layout(fsdp2: bool, pp: int = 1, ep: int = 1, **sizes: int) -> dict:
    """How a launch gets these sizes: those that Accelerate knows from the launcher file, the others from the config."""
    sizes = {f"PARALLELISM_CONFIG_{name.upper()}_SIZE": str(size) for name, size in sizes.items()}
    settings = "--model.pipeline_ranks", pp, "--model.expert_ranks", ep
    return {"launcher": "fsdp2" if fsdp2 else "multi_gpu", "env": sizes, "settings": settings}


# It needs a multiple of 2 passes, and 10 rows on 1 or 2 pipelines are 4 or 2 of 3 rows.
INTERLEAVED = "--model.pipeline_schedule", "Interleaved1F1B", "--batch.max_micro_batch_size", 3
EACH = "--batch.accumulation", "immediate"
KEPT, WITHIN = ("--batch.accumulation", "kept_weights"), ("--batch.accumulation", "within_copies")
CHUNKED = "--model.chunked_loss", "true", "--model.gradient_checkpointing", "true"
FSDP2, DDP = True, False
# Model, processes, layout, settings. What two dimensions do is also tested by three, where these take no longer.
CASES = {
    "DDP x TP": ("tied", 4, layout(DDP, tp=2), ()),
    "SP x TP": ("llama", 4, layout(DDP, sp=2, tp=2), ()),
    "PP x TP": ("llama", 4, layout(DDP, pp=2, tp=2), INTERLEAVED),
    "PP x CP": ("tied", 4, layout(FSDP2, pp=2, cp=2), ()),
    "experts x PP": ("tied experts", 4, layout(FSDP2, pp=2, ep=2), EACH),
    "FSDP2, weights kept": ("tied", 4, layout(FSDP2), KEPT),
    "HSDP, between copies once": ("llama", 4, layout(FSDP2, dp_replicate=2), WITHIN),
    "PP x FSDP2, weights kept": ("llama", 4, layout(FSDP2, pp=2), (*KEPT, *INTERLEAVED)),
    "PP x HSDP, between copies once": ("tied", 8, layout(FSDP2, pp=2, dp_replicate=2), WITHIN),
    "FSDP2 x TP x PP, tied": ("tied", 8, layout(FSDP2, tp=2, pp=2), CHUNKED),
    "FSDP2 x TP x PP, interleaved": ("llama", 8, layout(FSDP2, tp=2, pp=2), (*INTERLEAVED, *CHUNKED)),
    "FSDP2 x TP x PP, untied": ("llama", 8, layout(FSDP2, tp=2, pp=2), ()),
    "FSDP2 x TP x PP, tied, interleaved": ("tied", 8, layout(FSDP2, tp=2, pp=2), INTERLEAVED),
    "HSDP x TP": ("tied", 8, layout(FSDP2, dp_replicate=2, tp=2), ()),
    "HSDP x SP": ("llama", 8, layout(FSDP2, dp_replicate=2, sp=2), EACH),
    "HSDP x CP": ("tied", 8, layout(FSDP2, dp_replicate=2, cp=2), CHUNKED),
    "DDP x TP x PP": ("tied", 8, layout(DDP, tp=2, pp=2), ()),
    "CP x TP x FSDP2": ("tied", 8, layout(FSDP2, cp=2, tp=2), CHUNKED),
    "PP x CP x FSDP2": ("tied", 8, layout(FSDP2, pp=2, cp=2), ()),
    "PP x SP x FSDP2": ("llama", 8, layout(FSDP2, pp=2, sp=2), INTERLEAVED),
    "experts x HSDP": ("experts", 8, layout(FSDP2, dp_replicate=2, ep=2), ("--batch.max_micro_batch_size", 1)),
    "PP x FSDP2 x TP x experts": ("tied experts", 8, layout(FSDP2, pp=2, tp=2, ep=4), ()),
    "experts x PP x CP": ("experts", 8, layout(FSDP2, pp=2, cp=2, ep=2), INTERLEAVED),
    "PP x CP x TP": ("tied", 8, layout(DDP, pp=2, cp=2, tp=2), ()),
    "PP x FSDP2 x CP x TP": ("tied", 16, layout(FSDP2, pp=2, cp=2, tp=2), INTERLEAVED),
}
QUICK = ("PP x CP",)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"sp": 3}, "parallelism_config_sp_size 3: must divide the 4 attention heads; for other sizes take "),
        ({"tp": 4}, "parallelism_config_tp_size 4: must divide the 4 attention heads and the 2 key heads"),
        ({"pp": 8}, "model.pipeline_ranks 8: the 4 layers cannot be divided among 8 chunks"),
    ],
)
def test_too_few_layers_and_heads(tmp_path, sizes, message):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model.config._attn_implementation = DOCUMENTS
    accelerator = SimpleNamespace(state=SimpleNamespace(), mixed_precision="no")
    parallel = Parallelism(Config(**tiny_config(tmp_path)), accelerator, Layout(**sizes), None)
    with pytest.raises(UserError, match=message):
        parallel.prepare(model, [], None)


@pytest.mark.parametrize("layout", [Layout(is_sharded=True, tp=2), Layout(is_sharded=True, pp=2)], ids=["tp", "pp"])
def test_activation_checkpointing_that_transformers_does_not_offer(tmp_path, monkeypatch, layout):
    """The launcher file asks for it."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model.config._attn_implementation = DOCUMENTS
    model.supports_gradient_checkpointing = False
    plugin = SimpleNamespace(activation_checkpointing=True)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no")
    parallel = Parallelism(Config(**tiny_config(tmp_path)), accelerator, layout, None)
    monkeypatch.setattr(parallel, "make_groups", lambda: None)
    with pytest.raises(UserError, match="launch: fsdp_activation_checkpointing: .* for a llama; use false"):
        parallel.prepare(model, [], None)


@pytest.fixture
def groups_of():
    """groups_of(layout): a rank of 8 that has made its groups, in a torch that talks to nobody."""

    def result(layout: Layout) -> Parallelism:
        dist.init_process_group("fake", store=FakeStore(), rank=layout.rank, world_size=8)
        accelerator = SimpleNamespace(state=SimpleNamespace(), device=torch.device("cpu"), mixed_precision="no")
        parallel = Parallelism(None, accelerator, layout, None)
        parallel.make_groups()
        return parallel

    yield result
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "layout, expected",
    [
        (
            Layout(5, is_sharded=True, dp_replicate=2, dp_shard=2, tp=2),
            {"dp_replicate": [1, 5], "data": [5, 7], "tp": [4, 5]},
        ),
        (Layout(5, is_sharded=True, dp_shard=2, cp=2, tp=2), {"data": [1, 3, 5, 7], "tp": [4, 5]}),
        (Layout(5, dp_replicate=4, tp=2), {"data": [1, 3, 5, 7], "tp": [4, 5]}),
    ],
    ids=["HSDP x TP", "FSDP2 x CP x TP", "DDP x TP"],
)
def test_who_is_in_which_group(groups_of, layout, expected):
    """The more ranks send each other, the nearer they are. Other groups might compute the same, and be slow."""
    mesh = groups_of(layout).mesh
    assert {name: mesh[name].mesh.tolist() for name in expected} == expected


def test_who_shares_experts(groups_of):
    """Neighbours have other experts, and FSDP2 shards each of them within a copy."""
    mesh = groups_of(Layout(5, is_sharded=True, dp_replicate=2, dp_shard=4, ep=2)).expert_mesh
    found = {name: mesh[name].mesh.tolist() for name in mesh.mesh_dim_names[1:]}
    assert found == {"dp_replicate": [1, 5], "efsdp": [5, 7], "ep": [4, 5]}


def test_a_rank_without_a_gradient_adds_zeros(groups_of):
    """As of an expert that none of its tokens has chosen. The others wait for it."""
    parallel, weight = groups_of(Layout(dp_replicate=4, tp=2)), torch.nn.Parameter(torch.ones(3))
    parallel.owed = [([weight], dist.group.WORLD)]
    parallel.reduce_gradients(torch.nn.ParameterList([weight]))
    assert weight.grad.tolist() == [0, 0, 0]


def test_who_keeps_memory_for_gradients():
    """DDP only, in its buckets."""
    assert Layout(dp_replicate=2).has_buckets
    others = [Layout(), Layout(is_sharded=True, dp_shard=2), Layout(dp_replicate=2, tp=2), Layout(dp_replicate=2, pp=2)]
    assert not any(layout.has_buckets for layout in others)


def start(folder: Path, config: dict, processes: int, how: dict, *settings, **more) -> Done:
    how = how | {"processes": processes, "script": SCRIPT, "warm": True, "timeout": 900} | more
    options = how.pop("options", ("--mixed_precision", "no"))
    return launch(folder, config, *how.pop("settings"), *settings, options=options, **how)


@pytest.mark.slow
def test_activation_checkpointing_of_the_launcher_file(truth, tmp_path):
    """In all ways that divide a model by hand; that it takes place at all, test_tensor_parallel.py shows."""
    name, processes, how, settings = CASES["PP x FSDP2 x TP x experts"]
    options = "--mixed_precision", "no", "--fsdp_activation_checkpointing", "true"
    config, did = truth(name)
    did.check(start(tmp_path, config, processes, how, *settings, options=options))


@pytest.fixture(scope="module")
def runs(truth, tmp_path_factory):
    """runs(case, *settings): the finished run of a case. Each is made once."""

    @cache
    def result(case: str, *more) -> Done:
        name, processes, how, settings = CASES[case]
        return start(tmp_path_factory.mktemp("run"), truth(name)[0], processes, how, *settings, *more)

    return result


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_loop(truth, runs, case):
    """With accumulation, clipping, uneven rows and evaluation. Every token counts once; the export loads as ever."""
    did, done = truth(CASES[case][0])[1], runs(case)
    did.check(done)
    assert done.logged("train/target_tokens") == list(accumulate(did.targets))
    evaluated = {line["step"]: line["eval/loss"] for line in done.metrics if "eval/loss" in line}
    assert evaluated == pytest.approx(did.eval_losses, rel=5e-7)
    assert done.metrics[0]["plan/grad_accum_steps"] > 1
    assert "Warning" not in done.output
    model = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model")
    ids = torch.arange(24)[None]
    torch.testing.assert_close(model(ids).logits, did.model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", QUICK)
def test_begins_as_the_plain_loop(truth, runs, case):
    """A few steps, in which the learning rate is that of the longer run."""
    did, done = truth(CASES[case][0])[1], runs(case, "--run.max_steps", 5, "--data.eval_source", "null")
    np.testing.assert_allclose(done.losses, did.losses[:5], rtol=1e-6)
    np.testing.assert_allclose(done.logged("train/grad_norm"), did.grad_norms[:5], rtol=1e-5)


PROFILED = "--perf.profile_steps", "[2, 2]", "--run.max_steps", 5, "--data.eval_source", "null"


def sent(done: Done) -> Counter:
    """How often the main process took part in each kind of exchange, in a step of PROFILED."""
    with gzip.open(done.folder / "profile.json.gz") as file:
        return Counter(event.get("name") for event in json.load(file)["traceEvents"])


# 4 layers, the embedding, and what is in none of them; or the 2 layers of a rank of a pipeline, and what else it has.
@pytest.mark.slow
@pytest.mark.parametrize("sizes, modules", [({}, 6), ({"pp": 2}, 3)], ids=["FSDP2", "PP x FSDP2"])
def test_kept_weights_are_gathered_once_per_step(truth, tmp_path, sizes, modules):
    """And their gradients are averaged in each of the 2 micro-steps."""
    limit = "--batch.max_micro_batch_size", 2 if not sizes else 3
    done = start(tmp_path, truth("llama")[0], 4, layout(FSDP2, **sizes), *KEPT, *PROFILED, *limit)
    names = sent(done)
    assert names["c10d::_allgather_base_"] == modules
    assert names["c10d::_reduce_scatter_base_"] == modules * 2 == modules * done.metrics[0]["plan/grad_accum_steps"]


@pytest.mark.slow
@pytest.mark.parametrize("sizes, modules", [({}, 6), ({"pp": 2}, 3)], ids=["HSDP", "PP x HSDP"])
def test_copies_average_once_per_step(truth, tmp_path, sizes, modules):
    """Instead of in each of the 2 micro-steps."""
    limit = "--batch.max_micro_batch_size", 2 if not sizes else 3
    times = []
    for accumulation in EACH, WITHIN:
        folder = "--run.output_dir", tmp_path / accumulation[1]
        how = layout(FSDP2, dp_replicate=2, **sizes)
        done = start(tmp_path, truth("llama")[0], 4, how, *accumulation, *PROFILED, *limit, *folder)
        times.append(sent(done)["c10d::allreduce_"])
    assert done.metrics[0]["plan/grad_accum_steps"] == 2 and times[0] - times[1] == modules


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ways",
    [
        ("tied", ["FSDP2 x TP x PP, tied", None, "CP x TP x FSDP2", "HSDP x TP"]),
        ("tied experts", ["PP x FSDP2 x TP x experts", None, "experts x PP"]),
    ],
)
def test_checkpoint_moves(truth, runs, tmp_path, name, ways):
    """From one layout of three dimensions to one process, to another one, and to HSDP x TP."""
    config, did = truth(name)
    done = runs(ways[0])
    for number, case in enumerate(ways[1:], start=1):
        step = 1 + number
        settings = *resume_from(done, step), "--run.output_dir", tmp_path / f"{number}"
        if case is None:
            done = run(tmp_path, config, *settings)
        else:
            _, processes, how, more = CASES[case]
            done = start(tmp_path, config, processes, how, *more, *settings)
        check_continued(done, did, step)


MISTAKE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import train
from torch.distributed.fsdp import FSDPModule
from samerun.parallel import mesh
from samerun.parallel.layout import Layout
from samerun.parallel.mesh import Parallelism
divide_by, note_reductions = FSDPModule.set_gradient_divide_factor, Parallelism.note_reductions
def note_none_of_the_first(self, *arguments):
    note_reductions(self, *arguments)
    del self.owed[0]
CHANGE
sys.exit(train.main())
"""
# What is wrong, model, processes, layout; then which weight the message names. None of them changes the loss.
MISTAKES = {
    "experts are divided twice": (
        "FSDPModule.set_gradient_divide_factor = lambda self, factor: divide_by(self, 2 * factor)",
        ("experts", 4, layout(FSDP2, dp_replicate=2, ep=2)),
        r"model\.layers\.\d\.mlp\.experts\.\w+",
    ),
    "a tied embedding is not added up": (
        "from samerun.parallel.pipeline import PipelineSchedule as it; it.tied = lambda self: None",
        ("tied", 2, layout(DDP, pp=2)),
        r"model\.embed_tokens\.weight",
    ),
    "norms of heads are not added up": (
        "divide = mesh.divide_matrices; mesh.divide_matrices = lambda *some, **others: divide(*some, **others)[:0]",
        ("tied", 2, layout(DDP, tp=2)),
        r"model\.layers\.\d\.self_attn\.[qk]_norm\.weight",
    ),
    "cp is left out of the average": (
        "Layout.averages_over = property(lambda self: self.data_parallel_size)",
        ("llama", 4, layout(FSDP2, cp=2, tp=2)),
        r"[\w.]+\.weight",
    ),
    "ranks with other rows are not added up": (
        "Parallelism.note_reductions = note_none_of_the_first",
        ("llama", 4, layout(DDP, tp=2)),
        r"[\w.]+\.weight",
    ),
    "the last micro-step does not average": (
        "from samerun.parallel.pipeline import PipelineSchedule as it; it.average_from_now_on = lambda *_: None",
        ("llama", 4, layout(FSDP2, pp=2)),
        r"[\w.]+\.weight",
    ),
}
QUICKLY_REFUSED = ("a tied embedding is not added up", "no"), ("norms of heads are not added up", "bf16")
REFUSALS = [(mistake, precision) for mistake in MISTAKES for precision in ("no", "bf16")]


@pytest.mark.parametrize(
    "mistake, precision",
    [pytest.param(*it, marks=() if it in QUICKLY_REFUSED else pytest.mark.slow) for it in REFUSALS],
)
def test_a_mistake_is_refused_by_the_name_of_a_weight(truth, tmp_path, mistake, precision):
    """In bf16, too, where the losses of the first steps would tell nothing."""
    change, (name, processes, how), weight = MISTAKES[mistake]
    script = tmp_path / "fork.py"
    script.write_text(MISTAKE.replace("CHANGE", change))
    more = {"options": ("--mixed_precision", precision), "script": (SCRIPT[0], script), "expect": None}
    output = start(tmp_path, truth(name)[0], processes, how, **more).output
    [found] = re.findall("^error: .*", output, re.M)
    kind = MODELS[name][0]
    expected = f"error: launch: divided as .*, a {kind} computes another gradient of {weight}; take FSDP2"
    assert re.fullmatch(expected, found)


def test_what_the_whole_model_computes():
    """The norms of the gradients of a plain backward pass, from the last layer to the first, and of all of them."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    found = try_out_whole(model, loss_of_run())
    assert all(weight.grad is None for weight in model.parameters())
    batch = probe_batch(model, model.device)
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
    loss, _ = train.token_loss(logits[0], batch.targets[0])
    loss.backward()
    expected = {f"gradient of {name}": weight.grad.norm().item() for name, weight in model.named_parameters()}
    expected |= {"loss": loss.item(), "gradient norm": sum(norm**2 for norm in expected.values()) ** 0.5}
    assert found == pytest.approx(expected, rel=1e-5)
    names = list(found)
    assert (names[0], names[1], names[-1]) == ("loss", "gradient of lm_head.weight", "gradient norm")
    assert names[-2] == "gradient of model.embed_tokens.weight"


def test_the_whole_model_has_no_chunks(monkeypatch):
    """Those of model.chunked_loss, on ranks that have divided it, are compared with it."""
    monkeypatch.setattr("samerun.model.loss.loss_in_chunks", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    assert try_out_whole(model, partial(loss_of_run(), chunked=True))


@pytest.mark.parametrize(
    "changes, name",
    [
        ({}, ""),
        ({"loss": 4 + 4e-5}, ""),
        ({"loss": 4 + 5e-5}, "loss"),
        ({"loss": 4 - 5e-5}, "loss"),
        ({"late": 2 + 1.9e-3}, ""),
        ({"late": 2 - 2.1e-3}, "late"),
        ({"early": 2.1, "late": 2.1}, "late"),
        ({"early": math.nan}, "early"),
        ({"early": None}, "early"),
        ({"small": 3e-6}, ""),  # Rounding, of numbers as large as the largest.
        ({"small": 1e-5}, "small"),
    ],
)
def test_which_differences_are_no_rounding(changes, name):
    """1e-5 of a loss, and 1e-3 of a gradient."""
    whole = {"loss": 4.0, "late": 2.0, "early": 2.0, "small": 0.0}
    divided = {name: value for name, value in (whole | changes).items() if value is not None}
    assert first_difference(whole, divided) == name


@pytest.mark.parametrize(
    "accumulation, copies, is_sharded, message",
    [
        ("within_copies", 1, True, "batch.accumulation within_copies: needs HSDP"),
        ("kept_weights", 1, False, "batch.accumulation kept_weights: needs FSDP2"),
        ("within_copies", 2, True, None),
        ("kept_weights", 1, True, None),
    ],
)
def test_what_accumulation_needs(accumulation, copies, is_sharded, message):
    batch = Batch(global_batch_size=8, accumulation=accumulation)
    config = Config.model_construct(model=Model(pretrained="any"), batch=batch, optim=Optim(), eval=Eval())
    layout = Layout(is_sharded=is_sharded, dp_replicate=copies)
    if message is None:
        check_combination(layout, config, "no", None)
    else:
        with pytest.raises(UserError, match=message):
            check_combination(layout, config, "no", None)


@pytest.mark.parametrize(
    "dtype, in_4bit, precision, other",
    [
        ("float32", True, "bf16", None),
        ("float16", True, "fp16", None),
        ("bfloat16", True, "fp8", None),
        ("bfloat16", False, "fp16", None),
        ("float16", False, "bf16", None),
        ("float32", True, "fp16", "float16"),
        ("bfloat16", True, "fp16", "float16"),
        ("float16", True, "bf16", "bfloat16"),
    ],
)
def test_the_type_of_codes_is_that_of_the_launch(dtype, in_4bit, precision, other):
    """Of model.load_in_4bit."""
    model = Model(pretrained="any", lora={"r": 1}, dtype=dtype, load_in_4bit=in_4bit)
    if other is None:
        check_type_of_codes(model, precision)
    else:
        with pytest.raises(UserError, match=f"^model.load_in_4bit: with .* {precision}, use model.dtype {other}$"):
            check_type_of_codes(model, precision)


def test_no_row_of_the_matrix_allows_what_a_more_general_row_refuses():
    for narrow, general in itertools.permutations(REFUSED, 2):
        if narrow.setting.startswith(f"{general.setting} "):
            assert {*general.dimensions} <= {*narrow.dimensions}, narrow.setting
