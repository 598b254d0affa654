"""Only products and activations are in bf16, fp16 or float8, under every strategy. What is kept or added up is float32.

One launch of two steps tells. Its rows are two different ones, again and again: 4 in the first step and 128 in the
second one, one per micro-step. So both steps have the same mean gradient, if it is added up in float32. In bf16, with
its eight bits, the sums of 128 small numbers would be some per cent off. The learning rate is so small that a weight
in bf16 would not change.
"""

import math
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from helpers import (
    STRATEGIES,
    Done,
    by_strategy,
    check_continued,
    difference,
    make_rows,
    resume_from,
    run,
    slow_but,
    tiny_config,
    write_rows,
)
from safetensors.torch import load_file

from samerun.data.batches import collate
from samerun.optim import LossScale
from samerun.parallel.fsdp import precision_policy
from samerun.run.checkpoint import Progress
from samerun.run.saver import check_skipped
from samerun.run.setup import check_documents

RATE, EPSILON = 2e-9, 1e-30
FLOAT16 = "--mixed_precision", "fp16"
FLOAT8 = "--mixed_precision", "fp8", "--fp8_backend", "ao"
IN_FLOAT8 = "fp8.yaml", "DDP", "FSDP2", "HSDP", "sequence, DDP", "sequence, FSDP2", "context, FSDP2"
IN_BF16 = [name for name in STRATEGIES if name != "fp8.yaml"]
needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao, see accelerate_configs/fp8.yaml"
)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """The config of 4 and of 128 rows. Without momentum and clipping, AdamW's first moment is the gradient."""
    folder = tmp_path_factory.mktemp("two-steps")
    config = tiny_config(folder)
    one, other = make_rows([17, 24], seed=4)
    sources = {"one": write_rows(folder / "one", [one] * 64), "other": write_rows(folder / "other", [other] * 64)}
    config["run"] |= {"max_steps": 2, "save_every": 1}
    config["batch"] = {"global_batch_size": 128, "max_micro_batch_size": 1, "warmup": [{"steps": 1, "rows": 4}]}
    config["data"] |= {"sources": {name: {"path": str(path), "weight": 1} for name, path in sources.items()}}
    config["data"] |= {"path": None, "eval_source": None}
    config["optim"] = {"learning_rate": RATE, "schedule": "constant", "weight_decay": 0, "adam_beta1": 0}
    config["optim"] |= {"adam_eps": EPSILON, "max_grad_norm": None}
    # Weights whose bf16 copies are the same after the first step. Those that are not copied under autocast, the
    # embedding and the norms, are so large that their changes are lost in float32, too. So is the largest one of each
    # matrix, by which float8 scales.
    model = transformers.AutoModelForCausalLM.from_pretrained(config["model"]["pretrained"])
    for weight in model.parameters():
        weight.data = weight.sign() * weight.abs().clamp(min=0.001).bfloat16().float()
        weight.data[(0,) * weight.ndim] = torch.tensor(0.51).bfloat16()
    model.get_input_embeddings().weight.data *= 64
    model.save_pretrained(config["model"]["pretrained"])
    return config


def checkpoint(done: Done, step: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, of all ranks."""
    reader = dcp.HuggingFaceStorageReader(str(done.folder / "checkpoints" / f"step-{step:08}"))
    found = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in found.items()}
    dcp.load(state, storage_reader=reader)
    return state


def check_two_steps(done: Done, config: dict) -> None:
    few, many = checkpoint(done, 1), checkpoint(done, 2)
    assert {tensor.dtype for tensor in [*many.values(), *done.weights.values()]} == {torch.float32}
    changed = 0
    for name, before in load_file(Path(config["model"]["pretrained"]) / "model.safetensors").items():
        gradient, same = (state[f"optimizer.state.{name}.exp_avg"] for state in (few, many))
        assert (same - gradient).norm() < 1e-5 * gradient.norm(), f"{name}: not added up in float32"
        has_more_bits = gradient.bfloat16() != gradient
        assert has_more_bits[gradient != 0].float().mean() > 0.05, f"{name}: the gradients are added up in bf16"
        after = few[f"model.{name}"]
        # The first step of AdamW without momentum, where the two bias corrections cancel out.
        torch.testing.assert_close(after, before - RATE * gradient / (gradient.abs() + EPSILON), rtol=0, atol=0)
        assert torch.equal(after.bfloat16(), before.bfloat16())  # In bf16 nothing has changed.
        changed += int((after != before).sum())
    assert changed > 10_000
    assert done.losses[0] == pytest.approx(done.losses[1], rel=2e-6)
    for loss, rows in zip(done.losses, (4, 128)):
        total = loss * rows / 2 * (16 + 23)  # Targets of the two rows.
        assert np.float32(total).view(np.int32) % 2**12, "the loss of each micro-step was rounded to bf16"


@pytest.mark.parametrize("case", slow_but("one device", of=IN_BF16))
def test_what_is_kept_and_added_up_is_float32(two_steps, tmp_path, case):
    check_two_steps(by_strategy(tmp_path, two_steps, case), two_steps)


@pytest.mark.parametrize("case", slow_but("FSDP2", of=IN_BF16))
def test_what_is_kept_and_added_up_beside_fp16_is_float32(two_steps, tmp_path, case):
    check_two_steps(by_strategy(tmp_path, two_steps, case, options=FLOAT16), two_steps)


@needs_torchao
@pytest.mark.parametrize("case", slow_but("FSDP2", of=IN_FLOAT8))
def test_what_is_kept_and_added_up_beside_float8_is_float32(two_steps, tmp_path, case):
    check_two_steps(by_strategy(tmp_path, two_steps, case, options=FLOAT8), two_steps)


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    """The config of 12 steps, and its run on one process in float32."""
    folder = tmp_path_factory.mktemp("curve")
    config = tiny_config(folder)
    config["run"]["max_steps"] = 12
    config["batch"]["max_micro_batch_size"] = 2
    return config, run(folder, config)


@pytest.mark.slow
def test_a_pipeline_exports_what_it_saves(curve, tmp_path):
    """Though the evaluation before it has left weights that are gathered, in bf16."""
    settings = "--run.export_dtype", "float32", "--run.max_steps", 6
    done = by_strategy(tmp_path, curve[0], "pipeline, FSDP2", *settings)
    saved = checkpoint(done, 6)
    assert done.logged("eval/loss") and len(done.weights) > 10
    assert all(torch.equal(weight, saved[f"model.{name}"]) for name, weight in done.weights.items())


def check_near(done: Done, one: Done, bound: float) -> None:
    """The losses are within a bound of those in float32, and not the same. So are the evaluations."""
    off = np.abs(np.array(done.losses) / one.losses - 1).max()
    assert 1e-6 < off < bound
    assert done.logged("eval/loss") == pytest.approx(one.logged("eval/loss"), rel=bound)


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_BF16)
def test_losses_in_bf16_are_near_those_in_float32(curve, tmp_path, case):
    """Nor do copies drift apart, which the checkpoint at the end would refuse."""
    config, one = curve
    check_near(by_strategy(tmp_path, config, case), one, 3e-3)  # The largest of all is 1.0e-3.


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one device", "tensor, FSDP2", "context, FSDP2", "pipeline, FSDP2"])
def test_losses_in_fp16_are_nearer_to_those_in_float32(curve, tmp_path, case):
    """It has three bits more than bf16."""
    config, one = curve
    check_near(by_strategy(tmp_path, config, case, options=FLOAT16), one, 3e-3 / 8)


@pytest.mark.parametrize("case", slow_but("one device", of=["one device", "DDP", "FSDP2", "tensor"]))
def test_steps_that_are_too_large_for_fp16_are_computed_again(tmp_path, case):
    """No update is left out, and dropout draws the same numbers: the gradients of 512 equal rows add up in a matrix."""
    config = tiny_config(tmp_path)
    rows = write_rows(tmp_path / "equal", make_rows([24], seed=4) * 512)
    config["data"] |= {"path": str(rows)}
    config["batch"] = {"global_batch_size": 512, "max_micro_batch_size": 512}
    config["run"] |= {"max_steps": 4}
    config["optim"] |= {"warmup_steps": 0}
    model = transformers.AutoModelForCausalLM.from_pretrained(config["model"]["pretrained"])
    model.config.attention_dropout = 0.9 if case == "one device" else 0.0
    model.save_pretrained(config["model"]["pretrained"])
    one, done = (
        by_strategy(tmp_path, config, case, "--run.output_dir", tmp_path / precision, options=options)
        for precision, options in {"no": ("--mixed_precision", "no"), "fp16": FLOAT16}.items()
    )
    assert done.logged("train/skipped_steps") == [0] * 4 and one.losses[3] < 0.95 * one.losses[0]
    assert done.losses != one.losses and done.losses == pytest.approx(one.losses, rel=5e-5)


@pytest.mark.parametrize("case", slow_but("one device", of=["one device", "FSDP2", "pipeline, DDP"]))
def test_a_loss_in_chunks_has_the_loss_scale_of_fp16(tmp_path, case):
    """As few gradients are 0 as without chunks, of tokens that the model finds improbable (model.chunked_loss)."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 1, "save_every": 1}
    config["optim"] |= {"warmup_steps": 0, "max_grad_norm": None}
    model = transformers.AutoModelForCausalLM.from_pretrained(config["model"]["pretrained"])
    model.lm_head.weight.data *= 100  # Most probabilities are below 1e-7.
    model.save_pretrained(config["model"]["pretrained"])
    shares = []
    for chunked in False, True:
        settings = "--run.output_dir", tmp_path / f"chunked-{chunked}", "--model.chunked_loss", chunked
        found = checkpoint(by_strategy(tmp_path, config, case, *settings, options=FLOAT16), 1)
        shares.append((found["optimizer.state.lm_head.weight.exp_avg"] == 0).float().mean().item())
    assert shares[1] == pytest.approx(shares[0], rel=0.1)


def test_the_loss_scale_of_fp16():
    number, infinite = torch.tensor(1.0), torch.tensor(math.inf)
    scale = LossScale("fp16")
    assert not scale.must_repeat(number, number)  # One good step before those that are too large.
    assert [scale.must_repeat(number, infinite) for _ in range(3)] == [True] * 3 and scale.value == 2**7
    assert [scale.must_repeat(number, number) for _ in range(999)] == [False] * 999 and scale.value == 2**7
    assert not scale.must_repeat(number, number) and scale.value == 2**8
    assert not scale.must_repeat(infinite, infinite) and scale.value == 2**8  # A scale cannot mend a loss.
    assert [scale.must_repeat(number, infinite) for _ in range(19)] == [True] * 18 + [False]
    assert scale.value == 2**10  # None was small enough.
    for _ in range(11_000):
        scale.must_repeat(number, number)
    assert scale.value == 2**20  # A larger one would soon be too large.
    for precision in "no", "bf16", "fp8":
        scale = LossScale(precision)
        assert scale.value is None and not scale.must_repeat(number, infinite)
    # The passes on 4 ranks, over which gradients are averaged, multiply by 4 themselves.
    assert LossScale("fp16", 4).of_passes(0.1) == 2**8 and LossScale("bf16", 4).of_passes(0.1) == 0.1


@pytest.mark.parametrize("precision, computes_in", [("no", None), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_the_types_of_fsdp2(precision, computes_in):
    """Losses alone would not tell: in fp16, autocast would also multiply what FSDP2 has gathered in bf16."""
    policy = precision_policy(SimpleNamespace(native_amp=precision != "no", mixed_precision=precision))
    types = (getattr(torch, computes_in), torch.float32) if computes_in else (None, None)
    assert (policy.param_dtype, policy.reduce_dtype) == types


@pytest.mark.parametrize("precision, is_said", [("fp16", True), ("bf16", False)])
def test_numbers_that_no_loss_scale_mends(monkeypatch, precision, is_said):
    """A model whose loss is too large for fp16, before the first step and in it."""
    monkeypatch.setattr("samerun.run.setup.sums_in", lambda *_: {"loss": math.inf})
    setup, guard = mock.Mock(collate=collate, vocabulary=384), mock.Mock(max_skipped_steps=0)
    setup.accelerator.mixed_precision, setup.folder.checkpoints = precision, Path("none")
    guard.read.return_value = 1, 1
    for check in lambda: check_documents(setup), lambda: check_skipped(setup, guard, mock.Mock(), Progress(step=1)):
        with pytest.raises(Exception) as told:
            check()
        assert ("; fp16 has no numbers above 65,504; use bf16, or no" in str(told.value)) == is_said


@needs_torchao
@pytest.mark.parametrize("case", slow_but("FSDP2", of=IN_FLOAT8))
def test_losses_in_float8_are_near_those_in_float32(curve, tmp_path, case):
    """A CPU emulates torchao's rounding."""
    config, one = curve
    check_near(by_strategy(tmp_path, config, case, options=FLOAT8), one, 1e-2)


@needs_torchao
@pytest.mark.slow
def test_checkpoints_move_between_float8_and_float32(curve, tmp_path):
    config, one = curve
    config = config | {"run": config["run"] | {"save_every": 4, "keep_checkpoints": 3}}

    def folder(name: str) -> tuple:
        return "--run.output_dir", tmp_path / name

    whole = by_strategy(tmp_path, config, "FSDP2", *folder("whole"), options=FLOAT8)
    check_continued(
        by_strategy(tmp_path, config, "FSDP2", *folder("again"), *resume_from(whole, 8), options=FLOAT8), whole, 8
    )
    plain = run(tmp_path, config, *folder("plain"), *resume_from(whole, 4))
    shapes = [{name: tensor.shape for name, tensor in checkpoint(done, 8).items()} for done in (whole, plain)]
    assert shapes[0] == shapes[1]
    np.testing.assert_allclose(plain.losses, one.losses[4:], rtol=1e-2)
    back = by_strategy(tmp_path, config, "DDP", *folder("back"), *resume_from(plain, 8), options=FLOAT8)
    assert back.launches == [8]
    np.testing.assert_allclose(back.losses, one.losses[8:], rtol=1e-2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(back.folder / "model").state_dict()
    assert difference({name: loaded[name] for name in back.weights}, back.weights) == 0


@needs_torchao
def test_another_library_of_float8_is_refused(curve, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    monkeypatch.setattr("accelerate.accelerator.TERecipeKwargs", object)  # As if it were installed.
    output = run(tmp_path, curve[0], expect=2).output
    assert ": mixed_precision fp8: only torchao's is supported; put --fp8_backend ao after" in output
