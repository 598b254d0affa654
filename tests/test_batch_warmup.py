"""batch.warmup: the rows of a step follow from its number alone, also where the batch changes, however it is split."""

import json
import shutil
import time
from itertools import accumulate

import datasets
import pytest
from helpers import difference, held_after, kill_tree, launch, run, start, tiny_config
from reference import batch_sizes, shuffled, train_reference

import train
from samerun.config import Config
from samerun.run.meter import Meter

# 23 rows: 4 steps of 3 rows, 5 of 7, and 21 of 10, so that epochs end inside of steps and of stages.
WARMUP = [{"steps": 4, "rows": 3}, {"steps": 5, "rows": 7}]


def test_the_time_left_knows_the_rows_of_all_steps(tmp_path, monkeypatch):
    """A second for each row, in 3 steps of 3 rows, 2 of 7 and 3 of 10."""
    monkeypatch.setattr(Meter, "seconds_left", lambda self, rows: rows)
    left = []
    monkeypatch.setattr(train, "show", lambda step, last, metrics, names, seconds: left.append(seconds))
    config = tiny_config(tmp_path)
    config["batch"]["warmup"] = [{"steps": 3, "rows": 3}, {"steps": 2, "rows": 7}]
    config["optim"]["warmup_steps"] = 0
    run(tmp_path, config, "--run.max_steps", 8, "--run.log_every", 1)
    assert [seconds for seconds in left if seconds is not None] == [50, 47, 44, 37, 30, 20, 10, 0]


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """The config of all runs, and the plain loop's result for it."""
    folder = tmp_path_factory.mktemp("warmup")
    config = tiny_config(folder)
    config["batch"]["warmup"] = WARMUP
    rows = list(datasets.load_from_disk(folder / "rows"))
    ends = list(accumulate(batch_sizes(config["batch"], config["run"]["max_steps"])))
    order = shuffled(config["run"]["seed"], len(rows), ends[-1])
    did = train_reference(config, lambda step: [rows[i] for i in order[([0, *ends][step - 1]) : ends[step - 1]]])
    return config, did, ends


# processes, max_micro_batch_size, and the micro-steps that this gives for 3, 7 and 10 rows.
CASES = {
    "1 process, whole batches": (None, 10, (1, 1, 1)),
    "1 process, of 2 rows": (None, 2, (2, 4, 5)),
    "2 processes": (2, 2, (1, 2, 3)),
    "3 processes, uneven": (3, 1, (1, 3, 4)),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case == "2 processes" else case for case in CASES]
)
def test_equals_the_plain_loop(truth, tmp_path, case):
    config, did, ends = truth
    processes, limit, micro_steps = CASES[case]
    limit = "--batch.max_micro_batch_size", limit
    if processes:
        done = launch(tmp_path, config, *limit, processes=processes, warm=True)
    else:
        done = run(tmp_path, config, *limit)
    did.check(done)
    assert done.logged("train/rows") == ends
    assert done.logged("train/target_tokens") == list(accumulate(did.targets))
    assert done.logged("train/epoch") == pytest.approx([end / 23 for end in ends])
    table = [line.split() for line in done.output.splitlines()]
    head = next(number for number, line in enumerate(table) if line[:1] == ["from_step"])
    columns = [table[head].index(name) for name in ("from_step", "global_batch", "grad_accum")]
    stages = [tuple(int(line[column]) for column in columns) for line in table[head + 1 : head + 4]]
    assert stages == list(zip((1, 5, 10), (3, 7, 10), micro_steps))
    # The plan of the metrics is that of the global batch, which the run comes to.
    planned = done.metrics[0]
    assert (planned["plan/global_batch_size"], planned["plan/grad_accum_steps"]) == (10, micro_steps[-1])


@pytest.mark.parametrize("sync", ["deferred", "immediate"])
def test_gradients_are_averaged_once_per_step(truth, tmp_path, monkeypatch, sync):
    """Accelerate counts micro-steps over all steps. In a stage with another number of them it would be off, and with
    DDP the ranks would go on from different gradients: in the last micro-step of a step, it must be at a multiple."""
    config, *_ = truth
    seen = []
    backward = train.Accelerator.backward

    def note(self, *args, **options):
        seen.append((self.gradient_accumulation_steps, self.sync_gradients))
        return backward(self, *args, **options)

    monkeypatch.setattr(train.Accelerator, "backward", note)
    settings = "--batch.max_micro_batch_size", 2, "--batch.accumulation", sync, "--run.max_steps", 12
    run(tmp_path, config, *settings)
    expected = []
    for micro_steps in [2] * 4 + [4] * 5 + [5] * 3:
        expected += [(micro_steps, number == micro_steps) for number in range(1, micro_steps + 1)]
    assert seen == expected


@pytest.mark.slow
def test_continued_across_the_stages_on_other_processes(truth, tmp_path):
    """From inside of a stage, from its end, and from the begin of the last one."""
    config, did, ends = truth
    run_of = config | {"run": config["run"] | {"save_every": 1, "keep_checkpoints": 99}}
    done = run(tmp_path, run_of, "--batch.max_micro_batch_size", 2)
    for step, processes in (2, 2), (4, 3), (7, None), (9, 2), (10, 3):
        folder = tmp_path / f"from-{step}"
        folder.mkdir()
        there = config | {"run": config["run"] | {"output_dir": str(folder / "run")}}
        limits = "--batch.max_micro_batch_size", 3, "--run.resume", done.folder / "checkpoints" / f"step-{step:08d}"
        if processes:
            more = launch(folder, there, *limits, processes=processes, warm=True)
        else:
            more = run(folder, there, *limits)
        assert more.launches == [step] and more.logged("train/rows") == ends[step:]
        assert more.losses == pytest.approx(did.losses[step:], rel=2e-6)
        assert difference(more.weights, did.weights) < 1e-5


@pytest.mark.slow
def test_killed_in_the_warmup(truth, tmp_path):
    """All processes end at once, some steps into the second stage, and others go on."""
    config, did, _ = truth
    config = config | {"run": config["run"] | {"save_every": 1}}
    how = {"processes": 2, "warm": True, "script": held_after(tmp_path, 8)}
    process = start(tmp_path, config, "--batch.max_micro_batch_size", 2, **how)
    while process.poll() is None and not list((tmp_path / "run" / "checkpoints").glob("step-0000000[6-8]")):
        time.sleep(0.005)
    kill_tree(process)
    done = launch(tmp_path, config, "--batch.max_micro_batch_size", 2, processes=3, warm=True)
    assert 6 <= done.launches[1] <= 8
    did.check(done)


# Lengths of runs, by arithmetic: the stages above have 12 + 35 rows in 9 steps, and an epoch has 23 rows of 24 tokens.
@pytest.mark.parametrize(
    "length, steps",
    [
        (("max_tokens", 24), 1),
        (("max_tokens", 12 * 24), 4),
        (("max_tokens", 12 * 24 + 1), 5),
        (("max_tokens", 47 * 24), 9),
        (("max_tokens", 47 * 24 + 1), 10),
        (("max_tokens", 300 * 24), 35),  # 9 steps for 47 rows, and 26 for the other 253.
        (("max_tokens", 307 * 24 + 1), 36),
        (("max_epochs", 1e-12), 1),
        (("max_epochs", 1.0), 6),  # 12 + 7 + 4 of 7
        (("max_epochs", 2.0), 9),  # 46 of 47
        (("max_epochs", 47 / 23), 9),
        (("max_epochs", 67 / 23), 11),
        (("max_epochs", 3.0), 12),  # 69: 47 + 10 + 10 + 2
    ],
)
def test_epochs_and_tokens_to_steps(truth, length, steps):
    config, _, _ = truth
    name, value = length
    run_ = {"max_steps": None, name: value}
    config = Config.model_validate({**config, "run": run_})
    stages = train.plan_stages(config, 10, 1, 1)
    assert train.run_length(config, stages, 23, 23 * 24) == steps


def test_tokens_are_rows(tmp_path, capsys):
    """--plan has a line per stage and number of processes. 48 tokens are 2 rows of 24."""
    config = tiny_config(tmp_path)
    config["batch"] = {
        "global_batch_tokens": 240,
        "max_micro_batch_size": "auto",
        "warmup": [{"steps": 6, "tokens": 48}],
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert train.main(["--config", str(tmp_path / "config.yaml"), "--plan", "1", "4"]) == 0
    output = capsys.readouterr().out.splitlines()
    head, *lines = [line.split() for line in output if not line.startswith("Idle:")]
    names = "from_step", "processes", "global_batch", "micro_batch", "grad_accum", "tokens_per_step"
    found = [tuple(int(line[head.index(name)]) for name in names) for line in lines]
    assert found == [(1, 1, 2, 2, 1, 48), (7, 1, 10, 10, 1, 240), (1, 4, 2, 1, 1, 48), (7, 4, 10, 3, 1, 240)]


def test_a_stage_may_be_larger_than_the_global_batch_and_not_than_the_data(tmp_path):
    config = tiny_config(tmp_path)
    for rows, code in (23, 0), (24, 2):
        config["batch"]["warmup"] = [{"steps": 1, "rows": rows}]
        done = run(tmp_path, config, "--run.max_steps", 2, "--optim.warmup_steps", 0, expect=code)
    assert "data: 23 rows; lower the global batch of 24" in done.output


def test_another_warmup_is_another_run(truth, tmp_path):
    """It is refused, as any change of the batch is; a checkpoint from before there was the setting is continued."""
    config, _, _ = truth
    without = config | {"batch": {name: value for name, value in config["batch"].items() if name != "warmup"}}
    run(tmp_path, without, "--run.max_steps", 12)
    done = run(tmp_path, config, "--run.max_steps", 13, expect=2)
    assert "batch.warmup: [] in the checkpoint, [{'steps': 4, 'rows': 3" in done.output
    manifest = tmp_path / "run" / "checkpoints" / "step-00000012" / "manifest.json"
    older = json.loads(manifest.read_text())
    del older["config"]["batch.warmup"]
    manifest.write_text(json.dumps(older))
    assert run(tmp_path, without, "--run.max_steps", 13).launches == [0, 12]

    shutil.rmtree(tmp_path / "run")
    run(tmp_path, config, "--run.max_steps", 12)
    assert run(tmp_path, config, "--run.max_steps", 13).launches == [0, 12]


def test_tokens_are_those_of_the_rows(tmp_path):
    """Not the most that rows could have: the run ends with the step in which the tokens are reached, but for the chance
    that a part of an epoch has longer rows. Whole epochs have no such chance."""
    config = tiny_config(tmp_path)
    lengths = [len(row["input_ids"]) for row in datasets.load_from_disk(config["data"]["path"])]
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = None, 0
    for epochs in (1, 10):  # 23 rows in steps of 10.
        done = run(
            tmp_path, config, "--run.max_tokens", epochs * sum(lengths), "--run.output_dir", tmp_path / f"{epochs}"
        )
        assert done.metrics[-1]["step"] == -(-epochs * len(lengths) // 10)
        assert done.logged("train/epoch")[-1] == pytest.approx(done.metrics[-1]["step"] * 10 / len(lengths))
