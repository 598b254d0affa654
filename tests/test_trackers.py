"""A run is one curve in each tracker, also after a kill and on another number of processes."""

import json
import os
import re
import signal
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from accelerate import PartialState
from accelerate.tracking import TensorBoardTracker
from helpers import Done, launch, run, tiny_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from samerun.run import trackers
from samerun.run.trackers import log_to_each

KILL_AFTER = 7  # Steps. The last checkpoint before that is of step 5.
ENDED = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
import train
def log(setup, progress, *more, log=train.log):
    log(setup, progress, *more)
    if progress.step == {KILL_AFTER} and "KILL" in os.environ:
        while not (setup.folder.checkpoints / "step-00000005").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), int(os.environ["KILL"]))
train.log = log
sys.exit(train.main())
"""


def config_of(folder: Path, *trackers: str) -> dict:
    config = tiny_config(folder)
    config["run"] |= {"max_steps": 10, "save_every": 5, "trackers": list(trackers), "output_dir": str(folder / "a run")}
    return config


def ended_and_continued(folder: Path, config: dict, env: dict, number: signal.Signals = signal.SIGKILL) -> Done:
    """A run on one process that gets a signal some steps after its checkpoint, and goes on on two."""
    script = folder / "ended.py"
    script.write_text(ENDED)
    how = {"script": script, "warm": True}
    expect = -number if number == signal.SIGKILL else 0
    launch(folder, config, env=env | {"KILL": str(int(number))}, **how, processes=None, expect=expect)
    done = launch(folder, config, env=env, **how, processes=2)
    assert done.launches == [0, 5 if number == signal.SIGKILL else 7]
    return done


def assert_one_curve(points: list[tuple[int, float]], done: Done) -> None:
    """Each step once, with the value of metrics.jsonl."""
    assert [step for step, _ in points] == list(range(1, 11))
    assert [value for _, value in points] == pytest.approx(done.losses, rel=1e-5)


def test_tensorboard(tmp_path):
    """One folder with the name of the run, and nothing beside it. The steps that the kill has discarded are dropped."""
    done = ended_and_continued(tmp_path, config_of(tmp_path, "tensorboard"), {})
    board = done.folder / "tensorboard"
    assert [path.name for path in board.iterdir()] == ["a run"]
    files = list((board / "a run").iterdir())
    assert len(files) == 2 and all(path.name.startswith("events.out.tfevents.") for path in files)
    events = EventAccumulator(str(board / "a run")).Reload()
    assert_one_curve([(event.step, event.value) for event in events.Scalars("train/loss")], done)
    assert "config/text_summary" in events.Tags()["tensors"]


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_wandb(tmp_path, number):
    """Offline, where each launch leaves a folder, which `wandb sync` joins by the id of the run. The second one goes on
    at the step after the checkpoint. What a killed launch had not yet written is lost, which is W&B's own."""
    config = config_of(tmp_path, "wandb")
    name = {"name": "my own"} if number == signal.SIGTERM else {}  # The default is that of the run folder.
    config["run"]["tracker_options"] = {"wandb": {"tags": ["first"], "notes": "to be tested"} | name}
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    done = ended_and_continued(tmp_path, config, env, number)
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    run_id = json.loads((done.folder / "trackers.json").read_text())["id"]
    assert len(folders) == 2 and all(folder.name.endswith(run_id) for folder in folders)
    first, second = (read_wandb(folder / f"run-{run_id}.wandb") for folder in folders)
    assert second[0] == {"id": run_id, "name": name.get("name", "a run"), "tags": ["first"]}
    if number == signal.SIGTERM:
        assert first[0] == second[0]
        assert_one_curve(first[1] + second[1], done)
    else:
        assert [step for step, _ in second[1]] == [6, 7, 8, 9, 10]


def records(data: bytes) -> Iterator[bytes]:
    """Those of a .wandb file: a header of 7 bytes, then a log in LevelDB's format, in blocks of 32 KiB.

    A record has one or several pieces, each with a checksum, its length and its kind: 1 all, 2 the first, 3 a middle
    one, 4 the last.
    """
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:  # Too little for a piece.
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def read_wandb(path: Path) -> tuple[dict, list[tuple[int, float]]]:
    """Who the run of a file is, and its (step, loss)."""
    from wandb.proto.wandb_internal_pb2 import Record

    identity, points = {}, []
    for data in records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run" and not identity:
            run_of = record.run
            identity = {"id": run_of.run_id, "name": run_of.display_name, "tags": list(run_of.tags)}
        if record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss" in values:
                points.append((json.loads(values["_step"]), json.loads(values["train/loss"])))
    return identity, points


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")
def test_mlflow(tmp_path, monkeypatch):
    """In a file. It keeps both values of a step that was done twice, and they are the same. A setting that may change
    does, which MLflow would refuse to note for a run that has begun."""
    config = config_of(tmp_path, "mlflow")
    config["run"]["tracker_options"] = {"mlflow": {"tags": {"kind": "a test"}}}
    env = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = ended_and_continued(tmp_path, config, env)
    more = launch(tmp_path, config, "--run.max_steps", 12, env=env, warm=True, processes=None)
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=env["MLFLOW_TRACKING_URI"])
    [experiment] = [one for one in client.search_experiments() if one.name != "Default"]
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "a run" and found.info.status == "FINISHED" and found.data.tags["kind"] == "a test"
    assert found.info.run_id == json.loads((done.folder / "trackers.json").read_text())["mlflow"]
    assert found.data.params["run.max_steps"] == "10"
    points = {}
    for metric in client.get_metric_history(found.info.run_id, "train/loss"):
        points.setdefault(metric.step, []).append(metric.value)
    assert list(points) == list(range(1, 13)) and len(points[7]) == 2
    for step, values in points.items():
        assert values == pytest.approx([more.losses[step - 1]] * len(values), rel=1e-5)


def test_trackers_of_a_failed_call_are_ended(tmp_path, monkeypatch):
    """A program that calls main() for one trial after another: the tracker of a trial that has failed is not the one of
    the next trial. Those that have been ended are left alone."""
    begun, ended = [], []

    class Tracker(TensorBoardTracker):
        def start(self):
            begun.append(self)
            super().start()

        def finish(self):
            ended.append(self)
            super().finish()

    def fail(*arguments):
        raise LookupError("pruned")

    monkeypatch.setattr(trackers, "TensorBoardTracker", Tracker)
    config = config_of(tmp_path, "tensorboard")
    run(tmp_path, config)
    assert len(begun) == 1 and ended == begun
    with monkeypatch.context() as patch, pytest.raises(LookupError):
        patch.setattr(train, "step_metrics", fail)
        run(tmp_path, config, "--run.output_dir", str(tmp_path / "pruned"))
    assert len(begun) == 2 and ended == begun
    assert not PartialState._shared_state  # A tracker asks it for the rank, by which it would begin anew.
    run(tmp_path, config, "--run.output_dir", str(tmp_path / "next"))
    assert len(begun) == 3 and ended == begun


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")
def test_mlflow_after_a_failed_call(tmp_path, monkeypatch):
    """Its run counts as failed, and the next call has its own, which MLflow would refuse to start. It refuses one
    beside a run of the program, which goes on."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = config_of(tmp_path, "mlflow")
    run(tmp_path, config, "--optim.learning_rate", "1e30", "--optim.max_grad_norm", "null", expect=1)
    run(tmp_path, config, "--run.output_dir", str(tmp_path / "next"))
    import mlflow

    client = mlflow.MlflowClient()
    [experiment] = [one for one in client.search_experiments() if one.name != "Default"]
    found = {one.info.run_name: one.info.status for one in client.search_runs([experiment.experiment_id])}
    assert found == {"a run": "FAILED", "next": "FINISHED"}
    with mlflow.start_run() as active:
        run(tmp_path, config, "--run.output_dir", str(tmp_path / "beside"), expect=2)
        assert mlflow.active_run().info.run_id == active.info.run_id


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
def test_wandb_after_a_failed_call(tmp_path, monkeypatch):
    """Its run is ended, because the next one would be logged into it. A run of the program goes on."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    config = config_of(tmp_path, "wandb")
    failing = "--optim.learning_rate", "1e30", "--optim.max_grad_norm", "null", "--optim.warmup_steps", 0
    run(tmp_path, config, *failing, expect=1)
    assert wandb.run is None
    with wandb.init() as active:
        run(tmp_path, config, *failing, "--run.output_dir", str(tmp_path / "beside"), expect=1)
        assert wandb.run is active


def test_without_trackers(tmp_path):
    names = {path.name for path in run(tmp_path, config_of(tmp_path)).folder.iterdir()}
    assert "metrics.jsonl" in names and not names & {"trackers.json", "tensorboard"}


def test_options_of_a_tracker_that_is_not_used(tmp_path):
    config = config_of(tmp_path, "tensorboard")
    config["run"]["tracker_options"] = {"wandb": {"entity": "me"}}
    output = run(tmp_path, config, expect=2).output
    assert re.search("run.tracker_options: 'wandb' is not one of run.trackers", output)


def test_options_of_a_tracker_that_does_not_exist(tmp_path):
    """With `all`, the config cannot know which ones there are."""
    config = config_of(tmp_path, "all")
    config["run"]["tracker_options"] = {"tensorbord": {"flush_secs": 5}}
    output = run(tmp_path, config, expect=2).output
    assert re.search("error: run.tracker_options: tensorbord is not a tracker; there are .*tensorboard, ", output)


def test_options_reach_the_tracker(tmp_path):
    """As the keywords of its class: here, a part of the name of TensorBoard's files."""
    config = config_of(tmp_path, "tensorboard")
    config["run"] |= {"max_steps": 5, "tracker_options": {"tensorboard": {"filename_suffix": ".mine"}}}
    done = run(tmp_path, config)
    [file] = (done.folder / "tensorboard" / "a run").iterdir()
    assert file.name.endswith(".mine")


@pytest.mark.parametrize("option", ["no_such", "logging_dir", "run_name"])
def test_an_option_that_does_not_exist(tmp_path, option):
    """Or that the run folder decides."""
    config = config_of(tmp_path, "tensorboard")
    config["run"] |= {"max_steps": 5, "tracker_options": {"tensorboard": {option: "1"}}}
    output = run(tmp_path, config, expect=2).output
    assert re.search(f"error: run.trackers: cannot start one of them; see run.tracker_options: .*{option}", output)
    assert os.path.exists(tmp_path / "a run" / "status.json")


@pytest.mark.parametrize("damaged", ["", "[]", "7", '{"id": 7, "mlflow": null}'])
def test_damaged_ids(tmp_path, damaged):
    """Without them, a run has new ones, and goes on."""
    config = config_of(tmp_path, "tensorboard")
    (tmp_path / "a run").mkdir()
    note = tmp_path / "a run" / "trackers.json"
    note.write_text(damaged)
    run(tmp_path, config)
    assert re.fullmatch(r'{"id": "[0-9a-f]{32}"}\n', note.read_text())


def test_a_tracker_that_fails(capsys):
    """The others get all, and the run goes on. That is said once."""

    class Fails:
        name = "wandb"

        def log(self, metrics, step):
            raise ConnectionError("no route to host")

    class Works:
        name, steps = "tensorboard", []

        def log(self, metrics, step):
            self.steps.append(step)

    log = log_to_each([Fails(), Works()])
    for step in 1, 2:
        log({"train/loss": 1.0}, step=step)
    assert capsys.readouterr().out == "run.trackers: wandb: no route to host. The run goes on; this is said once.\n"
    assert Works.steps == [1, 2]
