"""DeepSpeed's ZeRO-2 and ZeRO-3 make the run of a plain loop, too. Without the package, there is nothing to test."""

import json
import os
import re
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import datasets
import helpers
import numpy as np
import pytest
import test_damage
import torch
import torch.distributed as dist
import transformers
import yaml
from helpers import (
    ROOT,
    Done,
    check_continued,
    difference,
    loss_of_run,
    resume_from,
    run,
    tiny_config,
    tiny_model,
    write_rows,
)
from reference import shuffled, train_reference
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from samerun.config import Batch, Model, Optim
from samerun.errors import UserError
from samerun.parallel.deepspeed import DeepSpeed
from samerun.parallel.layout import layout_of

pytest.importorskip("deepspeed", reason="pip install deepspeed==0.19.8")

AS_GPU = ROOT / "tests" / "wrapper_cpu_as_gpu.py"
FLOAT32 = "--mixed_precision", "no"


def launch(folder: Path, config: dict, launcher: str, *settings, script: Path = ROOT / "train.py", **more) -> Done:
    """Two warm CPU processes, in float32."""
    how = {"launcher": launcher, "processes": 2, "options": FLOAT32, "warm": True, "env": {"DS_ACCELERATOR": "cpu"}}
    return helpers.launch(folder, config, *settings, script=(AS_GPU, script), **(how | more))


def launcher_file(folder: Path, **zero) -> str:
    """A launcher file with a config of DeepSpeed's own, as start() takes it."""
    settings = folder / "zero.json"
    settings.write_text(json.dumps({"zero_optimization": zero}))
    plugin = {"deepspeed_config_file": str(settings), "zero3_init_flag": False}
    launched = {"distributed_type": "DEEPSPEED", "num_machines": 1, "num_processes": 2, "deepspeed_config": plugin}
    (folder / "launcher.yaml").write_text(yaml.safe_dump(launched))
    return os.path.relpath(folder / "launcher", ROOT / "accelerate_configs")


@pytest.fixture(scope="module")
def zero3(tmp_path_factory):
    """Of so small a model, ZeRO-3 would leave all weights whole on every rank, unless it is told to divide all."""
    return launcher_file(tmp_path_factory.mktemp("zero3"), stage=3, stage3_param_persistence_threshold=0)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """The config of all cases, with a tied model, and the plain loop's result for it."""
    folder = tmp_path_factory.mktemp("deepspeed")
    config = tiny_config(folder)
    config["model"] = {"pretrained": str(tiny_model(folder / "tied", learned_positions=True))}
    config["run"] |= {"max_steps": 12, "eval_every": 6, "save_every": 2, "keep_checkpoints": 6}
    config["batch"]["max_micro_batch_size"] = 2
    config["optim"]["max_grad_norm"] = 1.63
    rows, held_out = (list(datasets.load_from_disk(folder / part)) for part in ("rows", "held-out"))
    order = shuffled(config["run"]["seed"], len(rows), 120)
    rows_of = lambda step: [rows[i] for i in order[step * 10 - 10 : step * 10]]  # noqa: E731
    did = train_reference(config, rows_of, held_out, eval_every=6)
    clipped = sum(norm > config["optim"]["max_grad_norm"] for norm in did.grad_norms)
    assert 2 < clipped < 12, sorted(did.grad_norms)
    return config, did


SHIPPED = {2: "deepspeed_zero2", 3: "deepspeed_zero3"}
IMMEDIATE = "--batch.accumulation", "immediate"


@pytest.fixture(scope="module")
def runs(truth, zero3, tmp_path_factory):
    """runs(stage, processes, *settings): the finished run. Each is made once."""

    @cache
    def result(stage: int, processes: int, *settings, warm: bool = True) -> Done:
        launcher = zero3 if stage == 3 and warm else SHIPPED[stage]
        folder = tmp_path_factory.mktemp("run")
        done = launch(folder, truth[0], launcher, *settings, processes=processes, warm=warm)
        assert done.metrics[0]["plan/num_processes"] == processes
        return done

    return result


@pytest.mark.parametrize(
    "stage, processes, settings, warm",
    [
        (2, 2, (), True),
        pytest.param(3, 2, (), True, marks=pytest.mark.slow),
        pytest.param(2, 4, IMMEDIATE, True, marks=pytest.mark.slow),
        pytest.param(3, 4, IMMEDIATE, True, marks=pytest.mark.slow),
        pytest.param(2, 2, (), False, marks=pytest.mark.slow),
        pytest.param(3, 2, (), False, marks=pytest.mark.slow),
    ],
)
def test_equals_the_plain_loop(truth, runs, stage, processes, settings, warm):
    """With clipping, accumulation, uneven batches and evaluation, also by the real command. The export loads."""
    config, did = truth
    done = runs(stage, processes, *settings, warm=warm)
    did.check(done)
    assert done.logged("train/target_tokens") == list(accumulate(did.targets))
    evaluated = {line["step"]: line["eval/loss"] for line in done.metrics if "eval/loss" in line}
    assert evaluated == pytest.approx(did.eval_losses, rel=5e-7)
    said = done.output.replace("launcher DEEPSPEED", "")
    assert not re.search("warning|deepspeed", said, re.IGNORECASE)
    assert f"Model: {did.model.num_parameters():,} parameters" in done.output
    model = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model")
    ids = torch.arange(24)[None]
    torch.testing.assert_close(model(ids).logits, did.model(ids).logits, rtol=1e-4, atol=1e-4)


def test_zero3_begins_as_the_plain_loop(truth, runs):
    """In a few steps, with divided weights, and with samples in between."""
    samples = "--eval.prompts", "some", "--eval.max_new_tokens", 4, "--run.eval_every", 2
    done = runs(3, 2, "--run.max_steps", 5, *samples)
    np.testing.assert_allclose(done.losses, truth[1].losses[:5], rtol=1e-6)
    np.testing.assert_allclose(done.logged("train/grad_norm"), truth[1].grad_norms[:5], rtol=1e-5)
    assert len(done.logged("eval/sample_0")) == 3


@pytest.mark.slow
def test_checkpoint_goes_through_all_strategies(truth, runs, zero3, tmp_path):
    """ZeRO-2 on 2 -> DDP 2 -> ZeRO-3 on 4 -> FSDP2 2 -> ZeRO-2 on 3 -> one process -> ZeRO-3 on 2, from step 2 on."""
    config, did = truth
    done = runs(2, 2)
    ways = [("cpu", 2), (zero3, 4), ("fsdp2", 2), (SHIPPED[2], 3), (None, None)]
    for number, (launcher, processes) in enumerate(ways, start=1):
        settings = *resume_from(done, 2 * number), "--run.output_dir", tmp_path / str(number)
        if launcher is None:
            done = run(tmp_path, config, *settings)
        else:
            done = launch(tmp_path, config, launcher, *settings, processes=processes, warm=True)
        check_continued(done, did, 2 * number)
    first = tmp_path / "1" / "checkpoints" / "step-00000004"
    again = "--run.init_from", first, "--run.max_steps", 5, "--optim.warmup_steps", 0
    weights = launch(tmp_path, config, zero3, *again, warm=True)
    same = launch(tmp_path, config, "cpu", *again, "--run.output_dir", tmp_path / "same", warm=True)
    np.testing.assert_allclose(weights.losses, same.losses, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        ("--model.chunked_loss", "true", "--model.gradient_checkpointing", "true"),
        ("--model.gradient_checkpointing", "selective"),
        ("--batch.warmup", "[{steps: 3, rows: 3}, {steps: 2, rows: 7}]"),
        ("--optim.max_grad_norm", "null", "--run.keep_best", "true", "--run.eval_every", 2),
        ("--model.lora", "{r: 4, target_modules: all-linear}"),
    ],
    ids=["chunked loss", "selective", "warmup", "no clipping", "LoRA"],
)
def test_with_other_settings(truth, zero3, tmp_path, stage, settings):
    shared = "--run.max_steps", 8, *settings
    one = run(tmp_path, truth[0], *shared, "--run.output_dir", tmp_path / "one")
    done = launch(tmp_path, truth[0], zero3 if stage == 3 else SHIPPED[2], *shared, warm=True)
    np.testing.assert_allclose(done.losses, one.losses, rtol=1e-6)
    np.testing.assert_allclose(done.logged("train/grad_norm"), one.logged("train/grad_norm"), rtol=1e-5)
    file = "adapter_model.safetensors" if "--model.lora" in settings else "model.safetensors"
    assert difference(*(load_file(which.folder / "model" / file) for which in (done, one))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_optimizer(truth, tmp_path, stage):
    config, did = truth
    offload = {"offload_optimizer": {"device": "cpu"}}
    file = launcher_file(tmp_path, stage=stage, **offload)
    whole = launch(tmp_path, config, file, warm=True)
    did.check(whole)
    settings = *resume_from(whole, 8), "--run.output_dir", tmp_path / "moved"
    check_continued(launch(tmp_path, config, file, *settings, warm=True), did, 8)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_in_bf16(truth, zero3, tmp_path, stage):
    """Near the run in float32, and not the same. With beta1 0 and no clipping, AdamW's first moment is the gradient:
    its digits tell that it was added up in float32. The export has the weights in float32, and says so."""
    config, did = truth
    settings = "--run.max_steps", 5, "--optim.adam_beta1", 0, "--optim.max_grad_norm", "null"
    settings = *settings, "--batch.max_micro_batch_size", 5  # More micro-steps would hide a sum over ranks in bf16.
    file = zero3 if stage == 3 else SHIPPED[2]
    options = "--mixed_precision", "bf16"
    done = launch(tmp_path, config, file, *settings, options=options, warm=True)
    np.testing.assert_allclose(done.losses[:2], did.losses[:2], rtol=1e-2)
    assert done.losses != pytest.approx(did.losses[:5], rel=1e-6)
    state = {}
    for part in (done.folder / "checkpoints" / "step-00000005").glob("*.safetensors"):
        state |= load_file(part)
    moments = [tensor for name, tensor in state.items() if name.endswith("exp_avg")]
    assert moments
    for tensor in [*moments, *done.weights.values()]:
        tensor = tensor[tensor != 0]
        assert tensor.dtype == torch.float32 and (tensor.bfloat16() != tensor).float().mean() > 0.1
    model = transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model")
    assert difference(done.weights, {name: dict(model.named_parameters())[name].data for name in done.weights}) == 0


POISONED = """
import runpy, sys
sys.path[:0] = {path!r}
import pytest, test_damage
test_damage.poison(pytest.MonkeyPatch(), {{4}}, test_damage.{how})  # The first pass is none of a step.
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("how", ["in_the_loss", "in_the_gradient"])
def test_not_finite(tmp_path, zero3, monkeypatch, stage, how):
    """The third step makes no update, and the others are as ever."""
    config = tiny_config(tmp_path)
    config["batch"]["max_micro_batch_size"] = 5
    settings = "--run.max_steps", 6, "--run.max_skipped_steps", 1
    script = tmp_path / "poisoned.py"
    path = [str(ROOT / "tests"), str(ROOT)]
    script.write_text(POISONED.format(path=path, how=how, script=str(ROOT / "train.py")))
    done = launch(tmp_path, config, zero3 if stage == 3 else SHIPPED[2], *settings, script=script, warm=True)
    with monkeypatch.context() as patch:
        test_damage.poison(patch, {5, 6}, getattr(test_damage, how))
        one = run(tmp_path, config, *settings, "--run.output_dir", tmp_path / "one")
    assert done.logged("train/skipped_steps") == one.logged("train/skipped_steps") == [0, 0, 1, 1, 1, 1]
    assert difference(done.weights, one.weights) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_without_targets_changes_nothing(tmp_path, zero3, stage):
    order, rows = shuffled(7, 8, 12), helpers.make_rows([20, 24, 9, 13, 24, 17, 22, 15], seed=4)
    for number, row in enumerate(rows):
        is_masked = number in order[:2] or number in order[4:6]  # Steps 1, 3 and 6.
        row["labels"] = [-100] * len(row["input_ids"]) if is_masked else row["input_ids"]
    config = tiny_config(tmp_path)
    config["data"]["path"] = str(write_rows(tmp_path / "partly", rows))
    config["batch"] = {"global_batch_size": 2, "max_micro_batch_size": 2}
    config["run"] |= {"max_steps": 6, "save_every": 1, "keep_checkpoints": 9}
    did = train_reference(config, lambda step: [rows[i] for i in order[2 * step - 2 : 2 * step]])
    assert [step for step, targets in enumerate(did.targets, start=1) if not targets] == [1, 3, 6]
    launcher = zero3 if stage == 3 else SHIPPED[2]
    done = launch(tmp_path, config, launcher, warm=True)
    assert done.logged("train/skipped_steps") == [1, 1, 2, 2, 2, 3]
    assert difference(done.weights, did.weights) < 1e-5
    for step in (1, 3):  # Where no update was made yet, and where the weights had one.
        settings = *resume_from(done, step), "--run.output_dir", tmp_path / f"from-{step}"
        assert difference(run(tmp_path, config, *settings).weights, did.weights) < 1e-5
    ddp = launch(
        tmp_path, config, "cpu", "--run.output_dir", tmp_path / "ddp", warm=True
    )  # Its first checkpoint has no state.
    settings = *resume_from(ddp, 1), "--run.output_dir", tmp_path / "from-ddp"
    assert difference(launch(tmp_path, config, launcher, *settings, warm=True).weights, did.weights) < 1e-5


def strategy(zero: dict, precision: str = "no", config: dict | None = None, **settings) -> DeepSpeed:
    """A DeepSpeed without processes."""
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 2} | zero, **settings})
    accelerator = SimpleNamespace(
        num_processes=2,
        process_index=0,
        mixed_precision=precision,
        state=SimpleNamespace(deepspeed_plugin=plugin),
    )
    sections = {"model": Model(pretrained="any"), "optim": Optim(), "batch": Batch()}
    config = SimpleNamespace(**sections | (config or {}))
    return DeepSpeed(config, accelerator, layout_of(config, 2, is_sharded=False), loss_of_run())


def test_accepted_launches():
    strategy({"offload_optimizer": {"device": "cpu"}}, gradient_clipping=1.0, train_batch_size="auto").check()
    strategy({"stage": 3, "offload_param": {"device": "none"}}, gradient_accumulation_steps=1).check()
    strategy({"offload_optimizer": None, "offload_param": {"pin_memory": True}}).check()


MORE = "cannot be combined with {}; leave it out, or take accelerate_configs/fsdp2.yaml"


@pytest.mark.parametrize(
    "launched, message",
    [
        ({"zero": {"stage": 1}}, "zero_stage 1 is not supported; use 2 or 3, or DDP"),
        ({"zero_optimization": {}}, "zero_stage 0 is not supported"),
        ({"precision": "fp8"}, MORE.format("mixed_precision fp8")),
        ({"config": {"model": Model(pretrained="any", compile="regional")}}, MORE.format("model.compile")),
        (
            {"config": {"model": Model(pretrained="any", balance_experts=0.001)}},
            MORE.format("model.balance_experts"),
        ),
        ({"config": {"model": Model(pretrained="any", balance_loss=0.001)}}, MORE.format("model.balance_loss")),
        ({"zero": {"offload_param": {"device": "cpu"}}}, MORE.format("offloading of the weights, or to NVMe")),
        ({"zero": {"offload_optimizer": {"device": "nvme"}}}, MORE.format("offloading of the weights, or to NVMe")),
        ({"config": {"optim": Optim(name="muon")}}, "needs whole matrices"),
        (
            {"config": {"model": Model(pretrained="any", pipeline_ranks=2)}},
            MORE.format("sequence, context, tensor or pipeline parallelism"),
        ),
        (
            {"config": {"batch": Batch(max_micro_batch_size="auto")}},
            MORE.format("batch.max_micro_batch_size: auto"),
        ),
        ({"train_batch_size": 64}, "train_batch_size of DeepSpeed is 64; leave it out, because batch and optim"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu of DeepSpeed is 4; leave it out"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps of DeepSpeed is 4; leave it out"),
        ({"gradient_clipping": 0.5}, "gradient_clipping of DeepSpeed is 0.5; leave it out"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer of DeepSpeed is {'type': 'AdamW'}; leave it out"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler of DeepSpeed is {'type': 'WarmupLR'}; leave it out"),
    ],
)
def test_refused_launches(launched, message):
    with pytest.raises(UserError, match=re.escape(message)):
        strategy(**{"zero": {}} | launched).check()


@pytest.mark.parametrize("size", ["PARALLELISM_CONFIG_SP_SIZE", "PARALLELISM_CONFIG_CP_SIZE"])
def test_refused_with_shared_rows(monkeypatch, size):
    monkeypatch.setenv(size, "2")
    with pytest.raises(UserError, match="sequence, context, tensor or pipeline parallelism"):
        strategy({}).check()


def test_refused_norm_of_some_gradients():
    """Which a fork may log."""
    with pytest.raises(UserError, match="DeepSpeed keeps gradients to itself, so nobody knows the norm of some"):
        strategy({}).norm_of_gradients([])


def test_refused_numbers_of_updates(monkeypatch):
    """A checkpoint in which one weight had an update more than the other, or alone had any. DeepSpeed has one count."""
    deepspeed = strategy({})
    parts = [(f"optimizer.state.{name}.step", None, "step") for name in ("one", "other")]
    monkeypatch.setattr(deepspeed, "parts", lambda *_: parts)
    monkeypatch.setattr(deepspeed, "write", lambda *_: None)
    monkeypatch.setattr(deepspeed, "step_without_update", lambda *_: None)
    three, four = torch.tensor(3.0), torch.tensor(4.0)
    deepspeed.load_state(dict(zip([name for name, *_ in parts], (three, three))), None, [])
    deepspeed.load_state({}, None, [])  # As of another optimizer, which run.allow_changes allows.
    for some in {parts[0][0]: three}, dict(zip([name for name, *_ in parts], (three, four))):
        with pytest.raises(UserError, match="run.resume: some weights had more updates than others"):
            deepspeed.load_state(some, None, [])


@pytest.fixture
def mesh_of_four():
    """Of rank 1, in a torch that talks to nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


class WithScales(torch.nn.BatchNorm1d):
    """Saves the scales of a frozen weight beside it, as bitsandbytes does."""

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(2)


def test_what_a_checkpoint_holds(mesh_of_four, monkeypatch):
    """A copy of this rank's rows, and the buffers that a model saves, which other strategies look for. Nothing of what
    is frozen."""
    deepspeed, model = strategy({}), WithScales(8).requires_grad_(False)
    numbers = {"weight": torch.arange(8.0), "step": torch.tensor(3.0)}
    deepspeed.mesh = mesh_of_four
    monkeypatch.setattr(deepspeed, "parts", lambda *_: [(name, None, name) for name in numbers])
    monkeypatch.setattr(deepspeed, "read", lambda parameter, key: numbers[key])
    state = deepspeed.state_to_save(SimpleNamespace(module=model), [])
    for tensor in numbers.values():
        tensor.zero_()
    assert (state.pop("weight").to_local().tolist(), state.pop("step").to_local().item()) == ([2, 3], 3)
    assert state == {f"model.{name}": buffer for name, buffer in model.named_buffers()}


WITH_SGD = """
import sys
sys.path.insert(0, {root!r})
import torch, train
train.build_optimizer = lambda model, config: [torch.optim.SGD(model.parameters())]
sys.exit(train.main())
"""


@pytest.mark.slow
def test_refused_optimizer(tmp_path):
    script = tmp_path / "sgd.py"
    script.write_text(WITH_SGD.format(root=str(ROOT)))
    done = launch(tmp_path, tiny_config(tmp_path), SHIPPED[2], script=script, expect=None)
    assert done.code and done.output.count("error: optim.name: DeepSpeed needs one optimizer that is fused") == 1
    assert "Traceback" not in done.output


FROZEN_MATRICES = """
import sys
sys.path.insert(0, {root!r})
import train
build_optimizer = train.build_optimizer
def of_vectors(model, config):
    for weight in model.parameters():
        weight.requires_grad_(weight.ndim < 2)
    return build_optimizer(model, config)
train.build_optimizer = of_vectors
sys.exit(train.main())
"""


@pytest.mark.slow
def test_frozen_weights_are_exported(truth, zero3, tmp_path):
    """ZeRO-3 divides them, too. The optimizer's first group, of what decays, has no weights here."""
    script = tmp_path / "fork.py"
    script.write_text(FROZEN_MATRICES.format(root=str(ROOT)))
    settings = "--run.max_steps", 5
    done = launch(tmp_path, truth[0], zero3, *settings, script=script, warm=True)
    ddp = launch(tmp_path, truth[0], "cpu", *settings, "--run.output_dir", tmp_path / "ddp", script=script, warm=True)
    np.testing.assert_allclose(done.losses, ddp.losses, rtol=1e-6)
    assert difference(done.weights, ddp.weights) < 1e-5
