"""Tensor parallelism is the run of a plain loop, too: ranks that share matrices, alone and with FSDP2 around them."""

import re
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from helpers import (
    ROOT,
    VOCABULARY,
    WHOLE_ROWS,
    Done,
    check_continued,
    difference,
    launch,
    make_rows,
    packed_config,
    resume_from,
    run,
    tiny_config,
    write_rows,
)
from reference import shuffled, train_reference

from samerun.config import Batch, Config, Data, Eval, Model, Optim
from samerun.data.batches import collate
from samerun.errors import UserError
from samerun.parallel.layout import Layout, check_combination, layout_of
from samerun.parallel.mesh import Parallelism, check_divisible
from samerun.parallel.tensor import with_few_lengths

AS_GPU = ROOT / "tests" / "wrapper_cpu_as_gpu.py"


def by_file(processes: int, size: int, script: Path = ROOT / "train.py", **more) -> dict:
    """The launcher file that ships, with its GPUs replaced by CPU processes."""
    groups = processes // size
    options = "--mixed_precision", "no", "--parallelism_config_tp_size", size
    name = "tensor_parallel"
    if groups > 1:
        name = "fsdp2_tensor_parallel"
    how = {"launcher": name, "options": options, "script": (AS_GPU, script), "warm": True}
    return how | {"processes": processes} | more


def family(folder: Path, name: str, **change) -> Path:
    """A tiny model of this family, whose norms and biases are not all the same numbers."""
    torch.manual_seed(1)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "head_dim": 8,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 4}
    tokens = {"use_cache": False, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    found = transformers.AutoConfig.for_model(name, **{**shape, **heads, **tokens, **change})
    model = transformers.AutoModelForCausalLM.from_config(found)
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


# In Qwen3 and Gemma3, q_norm and k_norm are whole on each rank, and have the gradients of its own heads.
MODELS = {
    "llama": {"intermediate_size": 65},  # Which two ranks cannot divide evenly.
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "tied qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"query_pre_attn_scalar": 8},  # Tied.
    "phi3": {"num_key_value_heads": 4},  # Its query, key and value are one matrix.
}


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """truth(model): the config of all cases with this model, and the plain loop's result for it."""

    @cache
    def result(name: str):
        folder = tmp_path_factory.mktemp("tensor-parallel")
        config = tiny_config(folder)
        config["run"] |= {"max_steps": 12, "eval_every": 6, "save_every": 4, "keep_checkpoints": 3}
        config["model"]["pretrained"] = str(family(folder / "model", name.split()[-1], **MODELS[name]))
        rows, held_out = (list(datasets.load_from_disk(folder / part)) for part in ("rows", "held-out"))
        order = shuffled(config["run"]["seed"], len(rows), 120)
        rows_of = lambda step: [rows[i] for i in order[step * 10 - 10 : step * 10]]  # noqa: E731
        did = train_reference(config, rows_of, held_out, eval_every=6)
        assert 2 < sum(norm > config["optim"]["max_grad_norm"] for norm in did.grad_norms) < 12
        tokens = [sum(len(rows[i]["input_ids"]) for i in order[: 10 * step]) for step in range(1, 13)]
        return config, did, tokens

    return result


# Model, how it is launched, settings; then how many groups share the 10 rows of a step, and in how many passes.
IMMEDIATE = "--batch.accumulation", "immediate"
CHUNKED = "--model.chunked_loss", "true"
ALONE = {"data_parallel_size": 1, "micro_batch_size": 4, "grad_accum_steps": 3}
IN_TWO = {"data_parallel_size": 2, "micro_batch_size": 3, "grad_accum_steps": 2}
CASES = {
    "2": ("tied qwen3", by_file(2, 2), (), {"data_parallel_size": 1, "micro_batch_size": 5, "grad_accum_steps": 2}),
    "2 x 2": ("tied qwen3", by_file(4, 2), (), IN_TWO),
    "2 x 2 by the real command": ("qwen3", by_file(4, 2, warm=False), IMMEDIATE, IN_TWO),
    "4": ("phi3", by_file(4, 4), CHUNKED, ALONE),
    "2, Llama": ("llama", by_file(2, 2), (), ALONE),
    "2, Qwen2": ("qwen2", by_file(2, 2), CHUNKED, ALONE),
    "2, Qwen3": ("qwen3", by_file(2, 2), (), ALONE),
    "2, Gemma3": ("gemma3_text", by_file(2, 2), IMMEDIATE, ALONE),
    "2 x 2, Gemma3": ("gemma3_text", by_file(4, 2), (*CHUNKED, *IMMEDIATE), IN_TWO),
    "2 x 2, Qwen2": ("qwen2", by_file(4, 2), CHUNKED, IN_TWO),
    "2 x 2, Llama": ("llama", by_file(4, 2), (), IN_TWO),
}


@pytest.fixture(scope="module")
def runs(truth, tmp_path_factory):
    """runs(case, *settings): the finished run of a case. Each is made once."""

    @cache
    def result(case: str, *more) -> Done:
        model, how, settings, plan = CASES[case]
        folder = tmp_path_factory.mktemp("run")
        limit = "--batch.max_micro_batch_size", plan["micro_batch_size"]
        done = launch(folder, truth(model)[0], *limit, *settings, *more, **how)
        assert {name: done.metrics[0][f"plan/{name}"] for name in plan} == plan
        assert done.metrics[0]["plan/num_processes"] == how["processes"]
        return done

    return result


@pytest.mark.slow  # On a CPU, the arithmetic of DTensors takes long.
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_loop(truth, runs, case):
    """With clipping, uneven batches and evaluation. Every token is counted once, and the export loads as ever."""
    config, did, tokens = truth(CASES[case][0])
    done, processes = runs(case), CASES[case][1]["processes"]
    did.check(done)
    assert done.logged("train/target_tokens") == list(accumulate(did.targets))
    assert done.tokens == tokens
    evaluated = {line["step"]: line["eval/loss"] for line in done.metrics if "eval/loss" in line}
    assert evaluated == pytest.approx(did.eval_losses, rel=5e-7)
    rates = zip(done.logged("perf/tokens_per_second"), done.logged("perf/tokens_per_second_per_device"))
    assert [rate and rate / of_one for rate, of_one in rates][1:] == pytest.approx([processes] * 11)
    assert "Warning" not in done.output and "W1" not in done.output

    model = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model")
    ids = torch.arange(24)[None]
    torch.testing.assert_close(model(ids).logits, did.model(ids).logits, rtol=1e-4, atol=1e-4)
    begun = transformers.AutoConfig.from_pretrained(config["model"]["pretrained"]).to_diff_dict()
    ended = model.config.to_diff_dict()
    assert {name for name in begun.keys() | ended.keys() if begun.get(name) != ended.get(name)} <= {"_name_or_path"}


WARMUP = "--run.max_steps", 5, "--data.eval_source", "null"  # The learning rate of these steps is that of a longer run.


@pytest.mark.parametrize("case", ["2", pytest.param("2 x 2", marks=pytest.mark.slow)])
def test_begins_as_the_plain_loop(truth, runs, case):
    """A few steps."""
    did, done = truth("tied qwen3")[1], runs(case, *WARMUP)
    np.testing.assert_allclose(done.losses, did.losses[:5], rtol=1e-6)
    np.testing.assert_allclose(done.logged("train/grad_norm"), did.grad_norms[:5], rtol=1e-5)


@pytest.mark.slow
def test_compiled(tmp_path, monkeypatch):
    """Code for micro-steps of two rows, and for those of one. Of each, six functions are compiled, some of them twice:
    the test of the divided model has positions of another stride."""
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 5
    config["batch"] |= {"global_batch_size": 5, "max_micro_batch_size": 2}
    config["data"] |= {"packing": "concat", "sequence_length": 64, "eval_source": None}
    config["model"] = {"architecture": QWEN3}
    one = run(tmp_path, config, "--run.output_dir", tmp_path / "one")
    how = by_file(2, 2) | {"warm": False, "timeout": 600}
    done = launch(tmp_path, config, "--model.compile", "regional", **how)
    np.testing.assert_allclose(done.losses, one.losses, rtol=1e-6)
    assert "recompile_limit" not in done.output and 0 < len(done.recompiled) <= 2 * 2 * 6


@pytest.mark.slow
@pytest.mark.parametrize("processes, size, rows", [(2, 2, ()), (4, 2, ()), (2, 2, WHOLE_ROWS)])
def test_packed_documents_are_as_if_alone(tmp_path, processes, size, rows):
    """In a model whose windows are shorter than some of the documents."""
    config, pieces = packed_config(tmp_path, *rows)
    config["model"] = {"pretrained": str(family(tmp_path / "model", "mistral"))}
    done = launch(tmp_path, config, **by_file(processes, size))
    train_reference(config, lambda step: pieces).check(done)


def test_micro_batches_have_few_lengths():
    """And the same targets. Rows with padding stay as they are."""
    rows = [np.stack([np.full(length, 5), np.full(length, 6), np.arange(length)]) for length in (3, 62, 63)]
    device = torch.device("cpu")
    joined = [collate(rows, device, joined=True), collate(rows[:1], device, joined=True)]
    short, long = sorted(with_few_lengths(joined), key=lambda batch: batch.length)
    assert (short.length, long.length) == (64, 128) and with_few_lengths([long])[0] is long
    assert (short.targets[0, :3] == 6).all() and (short.targets[0, 3:] == -100).all()
    padded = [collate(rows, device, joined=False)]
    assert with_few_lengths(padded) is padded


def test_whole_rows_are_joined():
    """They are two documents of a row, as all others are: its targets and positions follow one another."""
    row = np.stack([np.arange(64), np.arange(1, 65), np.arange(64)])
    batch = collate([row, row + 64 * (np.arange(3) < 2)[:, None]], torch.device("cpu"), joined=True)
    assert batch.input_ids.shape == batch.targets.shape == (2, 64) and batch.position_ids.shape == (1, 64)
    [joined] = with_few_lengths([batch])
    assert joined.input_ids.tolist() == [list(range(128))] and joined.targets.tolist() == [list(range(1, 129))]
    assert joined.position_ids.tolist() == [[*range(64), *range(64)]]
    assert joined.documents.lengths == (64, 64) and joined.learned.tolist() == list(range(128))


@pytest.mark.slow
def test_checkpoint_moves(truth, runs, tmp_path):
    """From DDP to two ranks that share all, to 2 x 2, to FSDP2, to one process, and from there to 2 x 2."""
    config, did, _ = truth("tied qwen3")

    def go_on(done: Done, step: int, **how) -> Done:
        folder = tmp_path / f"{done.folder.parent.name}-{step}-{len(how)}"
        settings = *resume_from(done, step), "--run.output_dir", folder
        moved = launch(tmp_path, config, *settings, "--run.save_every", 2, "--run.keep_checkpoints", 9, **how)
        check_continued(moved, did, step)
        return moved

    first = launch(tmp_path, config, processes=2, warm=True)
    check_continued(first, did, 0)
    shared = go_on(first, 4, **by_file(2, 2))
    both = go_on(shared, 6, **by_file(4, 2))
    fsdp2 = {"launcher": "fsdp2", "options": ("--mixed_precision", "no"), "script": (AS_GPU, ROOT / "train.py")}
    sharded = go_on(both, 8, processes=2, warm=True, **fsdp2)
    go_on(sharded, 10, processes=None, warm=True)
    go_on(first, 8, **by_file(4, 2))


QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DROPPED = {"model_type": "phi3", "resid_pdrop": 0.2, "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, full_rows, how",
    [
        (QWEN3, False, by_file(4, 2)),
        # No rank has as many rows of the embedding as another one.
        (QWEN3 | {"vocab_size": 2029}, False, by_file(4, 2)),
        (QWEN3 | DROPPED, True, by_file(2, 2)),
    ],
    ids=["from scratch", "an odd vocabulary", "dropout"],
)
def test_is_the_run_of_one_process(tmp_path, architecture, full_rows, how):
    """Also with dropout, where the passes are the same: what is whole on all ranks must drop out alike. Rows that are
    lengthened drop out otherwise, so these have 64 tokens each."""
    config = tiny_config(tmp_path)
    config["model"] = {"architecture": architecture}
    if full_rows:
        rows = write_rows(tmp_path / "full", make_rows([64] * 20, seed=1))
        config["data"] |= {"path": str(rows), "sequence_length": 64}
    config["batch"]["max_micro_batch_size"] = 3
    config["run"]["max_steps"] = 10
    one = run(tmp_path, config, "--run.output_dir", tmp_path / "one")
    done = launch(tmp_path, config, **how)
    np.testing.assert_allclose(done.losses, one.losses, rtol=1e-6)
    assert difference(done.weights, one.weights) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, how",
    [
        (("--model.gradient_checkpointing", "true", *CHUNKED), by_file(2, 2)),
        (("--model.gradient_checkpointing", "selective", *IMMEDIATE), by_file(4, 2)),
        (("--batch.max_micro_batch_size", "auto"), by_file(4, 2)),
        (("--eval.prompts", "some", "--eval.max_new_tokens", "4"), by_file(2, 2)),
        (("--eval.prompts", "some", "--eval.max_new_tokens", "4"), by_file(4, 2)),
        (("--model.attention", "eager"), by_file(2, 2)),
    ],
)
def test_with_other_settings(truth, tmp_path, settings, how):
    config, did, _ = truth("qwen3")
    done = launch(tmp_path, config, *settings, **how)
    assert done.metrics[0]["plan/micro_batch_size"] == (10 if how["processes"] == 2 else 5)
    did.check(done)


def config_of(**model) -> Config:
    sections = {"model": Model(pretrained="any", **model), "batch": Batch(global_batch_size=8)}
    return Config.model_construct(**sections, optim=Optim(), eval=Eval(), data=Data.model_construct(sequence_length=24))


def check(processes: int, size: int, monkeypatch, precision: str = "no", model: dict | None = None, **plugin) -> None:
    """What a launch checks before it has a model."""
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", str(size))
    asked = {"cpu_ram_efficient_loading": False, "cpu_offload": None} | plugin
    config = config_of(**model or {})
    layout = layout_of(config, processes, is_sharded=bool(plugin))
    check_combination(layout, config, precision, SimpleNamespace(**asked) if plugin else None)


def test_who_shares_with_whom(monkeypatch):
    """Neighbours, which are on one machine, have the same rows. With DDP as with FSDP2."""
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    for is_sharded in False, True:
        ranks = [layout_of(config_of(), 6, is_sharded, rank) for rank in range(6)]
        assert [one.data_parallel_rank for one in ranks] == [0, 0, 1, 1, 2, 2]
        assert [one.place("tp") for one in ranks] == [0, 1] * 3
        assert {one.data_parallel_size for one in ranks} == {3}
        assert {one.averages_over for one in ranks} == {3 if is_sharded else 1}  # Without FSDP2 they are added up.


@pytest.mark.parametrize(
    "launched, message",
    [
        ({"processes": 2, "size": 4}, "parallelism_config_tp_size 4: does not divide the 2 processes"),
        ({"processes": 5, "size": 2}, "parallelism_config_tp_size 2: does not divide the 5 processes"),
        ({"processes": 2, "size": 2, "model": {"lora": {"r": 4}}}, "cannot be combined with model.lora"),
        ({"processes": 4, "size": 2, "model": {"compile": "full"}}, "cannot be combined with model.compile"),
        ({"processes": 2, "size": 2, "precision": "fp8"}, "cannot be combined with mixed_precision fp8"),
        (
            {"processes": 4, "size": 2, "activation_checkpointing_offload": True},
            "fsdp_activation_checkpointing_offload",
        ),
    ],
)
def test_refused_launches(monkeypatch, launched, message):
    with pytest.raises(UserError, match=message):
        check(**launched, monkeypatch=monkeypatch)


def test_refused_without_a_plan():
    found = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=VOCABULARY)
    with pytest.raises(UserError, match="transformers has no plan how ranks share a gpt2"):
        check_divisible(transformers.GPT2LMHeadModel(found), config_of(), Layout(tp=2))


def test_a_loss_of_something_else_is_refused(tmp_path):
    """As that of a fork without text: a small model is tried on tokens."""
    config = Config(**tiny_config(tmp_path))
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model.pretrained)
    accelerator = SimpleNamespace(state=None, device=torch.device("cpu"), mixed_precision="no")
    parallel = Parallelism(config, accelerator, Layout(tp=2), lambda model, images: images.pixels)
    with pytest.raises(UserError, match="divided as tp 2, the first try of a small model, on a few tokens, fails"):
        parallel.try_out(model, None)


CHANGED_PLAN = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import train, transformers
CHANGE
sys.exit(train.main())
"""
# As if transformers had forgotten that the ranks have different gradients of these norms, or had a plan for the output
# layer only, as it has for some models.
FORGOTTEN = "transformers.Qwen3Config.base_model_tp_plan.pop('layers.*.self_attn.k_norm')"
NO_LAYERS = "transformers.Qwen3Config.base_model_tp_plan.clear()"


TP = "parallelism_config_tp_size [24]: "
CHANGES_GRADIENTS = "divided as tp 2, a qwen3 computes another gradient of .*k_norm.weight; take FSDP2"


# Prints how often the MLPs of a step were called.
COUNTED = """
calls = []
def forward(self, states, forward=transformers.models.qwen3.modeling_qwen3.Qwen3MLP.forward):
    calls.append(1)
    return forward(self, states)
transformers.models.qwen3.modeling_qwen3.Qwen3MLP.forward = forward
def train_step(*args, train_step=train.train_step):
    before, result = len(calls), train_step(*args)
    train.say(f"MLPs: {len(calls) - before}")
    return result
train.train_step = train_step
"""


@pytest.mark.slow
def test_activation_checkpointing_of_the_launcher_file(truth, tmp_path):
    """Each of the 2 layers computes its MLP once more in the backward pass of the only micro-step."""
    config, did, _ = truth("qwen3")
    script = tmp_path / "fork.py"
    script.write_text(CHANGED_PLAN.replace("CHANGE", COUNTED))
    how = by_file(4, 2, script=script)
    how["options"] = (*how["options"], "--fsdp_activation_checkpointing", "true")
    done = launch(tmp_path, config, **how)
    did.check(done)
    assert re.findall("^MLPs: .*", done.output, re.M) == [f"MLPs: {2 * 2}"] * 12


OR_EXPERTS = r"FSDP2, alone or with model\.expert_ranks"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, change, size, message",
    [
        ("qwen3", FORGOTTEN, 2, CHANGES_GRADIENTS),
        ("qwen3", NO_LAYERS, 2, TP + "a qwen3 has no plan in transformers that divides its layers; take FSDP2"),
        ("qwen3", "", 4, TP + "must divide the 4 attention heads and the 2 key heads"),
        ("mixtral", "", 2, TP + "a part of .*experts.gate_up_proj of this mixtral cannot be saved; take " + OR_EXPERTS),
    ],
    ids=["forgotten", "no layers", "two key heads for four ranks", "experts"],
)
def test_refused_by_its_behaviour(tmp_path, name, change, size, message):
    config = tiny_config(tmp_path)
    config["model"]["pretrained"] = str(family(tmp_path / "model", name))
    script = tmp_path / "fork.py"
    script.write_text(CHANGED_PLAN.replace("CHANGE", change))
    output = launch(tmp_path, config, expect=None, **by_file(size, size, script=script)).output
    [found] = re.findall("^error: .*", output, re.M)
    assert re.fullmatch(f"error: launch: {message}", found)
