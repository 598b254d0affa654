"""The promise itself: losses and weights of a plain torch loop with one big batch, however the work is split."""

import json
from itertools import accumulate

import datasets
import numpy as np
import pytest
from helpers import (
    WHOLE_ROWS,
    cross_entropy,
    difference,
    launch,
    make_rows,
    packed_config,
    resume_from,
    run,
    tiny_config,
    tiny_model,
    write_rows,
)
from reference import shuffled, train_reference
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """The config of all cases, and the plain loop's result for it."""
    folder = tmp_path_factory.mktemp("exact")
    config = tiny_config(folder)
    config["run"]["eval_every"] = 15
    rows, held_out = (list(datasets.load_from_disk(folder / name)) for name in ("rows", "held-out"))
    size, steps = config["batch"]["global_batch_size"], config["run"]["max_steps"]
    order = shuffled(config["run"]["seed"], len(rows), steps * size)
    did = train_reference(config, lambda step: [rows[i] for i in order[(step - 1) * size : step * size]], held_out)

    # What the comparison is worth: clipping works on some steps, no epoch ends with a step, the model has learned.
    clipped = [norm > config["optim"]["max_grad_norm"] for norm in did.grad_norms]
    assert 5 < sum(clipped) < 25 and len(rows) % size and did.losses[-1] < did.losses[0] - 1
    before = load_file(folder / "start" / "model.safetensors")
    assert all((did.weights[name] - before[name]).abs().max() > 0.01 for name in before)
    return config, did


# processes (None: in this process), max_micro_batch_size, whether they reduce at once; then what the plan must be.
CASES = {
    "1 process, whole batch": (1, 10, False, {"micro_batch_size": 10, "grad_accum_steps": 1}),
    "1 process, a row at a time": (None, 1, False, {"micro_batch_size": 1, "grad_accum_steps": 10}),
    "2 processes": (2, 3, False, {"micro_batch_size": 3, "grad_accum_steps": 2}),
    "2 processes, sync each micro-step": (2, 2, True, {"micro_batch_size": 2, "grad_accum_steps": 3}),
    "3 processes, uneven, some without a row": (3, 1, False, {"micro_batch_size": 1, "grad_accum_steps": 4}),
    "3 processes, uneven": (3, 2, False, {"micro_batch_size": 2, "grad_accum_steps": 2}),
    "4 processes, uneven, some without a row": (4, 1, False, {"micro_batch_size": 1, "grad_accum_steps": 3}),
}
SLOW = "3 processes, uneven", "4 processes, uneven, some without a row"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_equals_the_plain_loop(truth, tmp_path, case):
    config, did = truth
    processes, limit, sync, plan = CASES[case]
    overrides = "--batch.max_micro_batch_size", limit, "--batch.accumulation", "immediate" if sync else "deferred"
    if processes:  # One of them by the real command.
        done = launch(tmp_path, config, *overrides, processes=processes, warm=case != "2 processes")
    else:
        done = run(tmp_path, config, *overrides)

    planned = {name: done.metrics[0][f"plan/{name}"] for name in plan}  # That it was split as this case says.
    assert planned == plan and done.metrics[0]["plan/num_processes"] == (processes or 1)
    did.check(done)
    assert done.logged("train/target_tokens") == list(accumulate(did.targets))
    assert done.logged("train/rows")[-1] == 300
    if limit == 1:  # Nothing is padded. A rank without a row computes on one token.
        seen = shuffled(7, 23, 300)
        lengths = [len(row["input_ids"]) for row in datasets.load_from_disk(config["data"]["path"])]
        parts = (processes or 1) * plan["grad_accum_steps"]
        assert done.logged("train/tokens")[-1] == sum(lengths[row] for row in seen) + 30 * (parts - 10)
    evaluated = {line["step"]: line["eval/loss"] for line in done.metrics if "eval/loss" in line}
    assert evaluated == pytest.approx(did.eval_losses, rel=5e-7)  # So any two splits agree to 1e-6.
    [last] = [line for line in done.metrics if line["step"] == 30 and "eval/loss" in line]
    assert last["eval/perplexity"] == pytest.approx(np.exp(cross_entropy(last)), rel=1e-5)
    assert "UserWarning" not in done.output  # Nothing that the user cannot act on.


@pytest.mark.parametrize("processes, rows", [(None, ()), (2, ()), (None, WHOLE_ROWS)])
def test_packed_documents_are_as_if_alone(tmp_path, processes, rows):
    """Documents that share a row do not see each other, and none predicts the first token of the next.

    Some cases have learned positions: rotary ones are relative and forgive a document that does not start at 0.
    """
    config, pieces = packed_config(tmp_path, *rows)
    config["model"] = {"pretrained": str(tiny_model(tmp_path / "start", learned_positions=processes is None))}
    done = launch(tmp_path, config, processes=processes, warm=True) if processes else run(tmp_path, config)
    train_reference(config, lambda step: pieces).check(done)


def test_a_step_without_targets_changes_nothing(tmp_path):
    """Neither weights nor the optimizer's state; it counts for the schedule. The run goes on, also where it continues
    with such a step, on two processes."""
    order, rows = shuffled(7, 8, 12), make_rows([20, 24, 9, 13, 24, 17, 22, 15], seed=4)
    for number in order[4:6]:  # Both rows of step 3.
        rows[number]["labels"] = [-100] * len(rows[number]["input_ids"])
    for row in rows:
        row.setdefault("labels", row["input_ids"])
    config = tiny_config(tmp_path)
    config["data"]["path"] = str(write_rows(tmp_path / "partly", rows))
    config["batch"] = {"global_batch_size": 2, "max_micro_batch_size": 2}
    config["run"] |= {"max_steps": 6, "save_every": 1, "keep_checkpoints": 9}
    did = train_reference(config, lambda step: [rows[i] for i in order[2 * step - 2 : 2 * step]])
    assert [step for step, targets in enumerate(did.targets, start=1) if not targets] == [3]

    def check(done, after: int) -> None:
        assert done.launches == [after] and difference(done.weights, did.weights) < 1e-5
        np.testing.assert_allclose(np.array(done.losses, float), did.losses[after:], rtol=1e-5)  # null is a NaN.
        np.testing.assert_allclose(done.logged("train/learning_rate"), did.learning_rates[after:], rtol=1e-12)
        assert done.logged("train/skipped_steps") == [0, 0, 1, 1, 1, 1][after:]
        told = [line for line in done.output.splitlines() if "no update" in line]
        assert told == ["Step 3 makes no update: none of its rows has a target token."] * (after < 3)

    done = run(tmp_path, config)
    check(done, 0)
    folders = [done.folder / "checkpoints" / f"step-0000000{step}" for step in (2, 3, 4)]
    states = [load_file(next(folder.glob("*.safetensors"))) for folder in folders]
    assert any(name.startswith("optimizer.state.") for name in states[0])
    assert difference(states[0], states[1]) == 0 < difference(states[1], states[2])
    before, after = (("--run.resume", folder, "--run.output_dir", tmp_path / folder.name) for folder in folders[:2])
    check(launch(tmp_path, config, *before, processes=2, warm=True), 2)
    check(run(tmp_path, config, *after), 3)


def test_dropout(tmp_path):
    """Each step, seed and rank drops out something else, a run that continues the same, and an evaluation nothing. The
    weights stand still here, and all rows are the same."""
    start = tiny_model(tmp_path / "gpt2", learned_positions=True)
    found = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(found | {"resid_pdrop": 0.5}))
    config = tiny_config(tmp_path)
    config["model"] = {"pretrained": str(start)}
    config["data"]["path"] = str(write_rows(tmp_path / "same", make_rows([24]) * 6))
    config["batch"] = {"global_batch_size": 1, "max_micro_batch_size": 1}
    config["optim"] |= {"learning_rate": 1e-30, "warmup_steps": 0}
    config["run"] |= {"max_steps": 6, "save_every": 3}
    config["run"]["eval_every"] = 1
    done = run(tmp_path, config)
    assert len({*done.losses}) == 6
    assert len({*done.logged("eval/loss")}) == 1
    continued = run(tmp_path, config, *resume_from(done, 3), "--run.output_dir", tmp_path / "continued")
    assert continued.losses == done.losses[3:]
    other = run(tmp_path, config, "--run.seed", 8, "--run.output_dir", tmp_path / "other")
    assert not {*other.losses} & {*done.losses}
    two = "--batch.global_batch_size", 2, "--run.output_dir", tmp_path / "two"
    losses = launch(tmp_path, config, *two, processes=2, warm=True).losses
    assert not np.isclose(losses, done.losses, rtol=1e-4).any()


@pytest.mark.slow
def test_a_checkpoint_from_before_the_first_update(tmp_path):
    """It has the state of an optimizer that has made no update, of several processes as of one."""
    order, rows = shuffled(7, 8, 12), make_rows([20, 24, 9, 13, 24, 17, 22, 15], seed=4)
    for number in range(8):
        rows[number]["labels"] = (
            [-100] * len(rows[number]["input_ids"]) if number in order[:2] else rows[number]["input_ids"]
        )
    config = tiny_config(tmp_path)
    config["data"]["path"] = str(write_rows(tmp_path / "partly", rows))
    config["batch"] = {"global_batch_size": 2, "max_micro_batch_size": 2}
    config["run"] |= {"max_steps": 6, "save_every": 1, "keep_checkpoints": 9}
    did = train_reference(config, lambda step: [rows[i] for i in order[2 * step - 2 : 2 * step]])
    assert did.targets[0] == 0 < min(did.targets[1:])
    done = launch(tmp_path, config, processes=2, warm=True)
    first = done.folder / "checkpoints" / "step-00000001"
    weights = [(name, value) for file in first.glob("*.safetensors") for name, value in load_file(file).items()]
    state = [value for name, value in weights if name.startswith("optimizer.")]
    assert state and not any(value.any() for value in state)
    again = run(tmp_path, config, "--run.resume", first, "--run.output_dir", tmp_path / "again")
    alone = run(tmp_path, config, "--run.output_dir", tmp_path / "alone")
    first = alone.folder / "checkpoints" / "step-00000001"
    on_two = "--run.resume", first, "--run.output_dir", tmp_path / "on-two"
    on_two = launch(tmp_path, config, *on_two, processes=2, warm=True)
    for part in done, again, alone, on_two:
        assert difference(part.weights, did.weights) < 1e-5
        np.testing.assert_allclose(part.losses[-5:], did.losses[1:], rtol=1e-5)
