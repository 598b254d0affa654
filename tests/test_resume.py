"""A run that is stopped in any way and continued on any number of processes is the run that was never stopped."""

import contextlib
import io
import json
import os
import platform
import re
import shutil
import signal
import socket
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from helpers import (
    Done,
    difference,
    held_after,
    kill_tree,
    launch,
    make_rows,
    resume_from,
    run,
    slow_but,
    start,
    tiny_config,
    tiny_model,
    write_rows,
)
from matplotlib.figure import Figure
from reference import learning_rate, shuffled, train_reference
from safetensors.torch import load_file

import train
from samerun.config import Config, Optim, Section
from samerun.dotted import flatten
from samerun.meeting import Meeting
from samerun.model.tokenizer import byte_tokenizer
from samerun.run import checkpoint, export, resume, sample
from samerun.run import folder as folder_room
from samerun.run import saver as saver_room
from samerun.run.changes import changed_settings, say_if_others_are_held_out, say_if_rate_differs
from samerun.run.checkpoint import Progress

STEPS = list(range(1, 31))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The config of this file, and the run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(folder)
    config["run"]["save_every"] = 5
    return config, run(folder, config)


@pytest.fixture
def again(whole, tmp_path):
    """The config and a copy of the finished run, to be continued."""
    config, done = whole
    shutil.copytree(done.folder, tmp_path / "run")
    return config, Done(0, "", tmp_path / "run")


def assert_same(done: Done, other: Done) -> None:
    """Every step is logged once, with the losses and the final weights of the other run."""
    assert [line["step"] for line in done.metrics if "train/loss" in line] == STEPS
    np.testing.assert_allclose(done.losses, other.losses, rtol=1e-6)
    assert difference(done.weights, other.weights) < 1e-5


def wait_for_step(process, done: Done, launches: int, step: int = 0) -> None:
    """Return while launch number `launches` of a run goes on: when it has done a step of its own and reached `step`."""
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, IndexError, json.JSONDecodeError):  # Empty or half a line so far.
            began, last = done.launches, done.metrics[-1]["step"]
            if len(began) == launches and last > began[-1] and last >= step:
                return
        time.sleep(0.02)
    kill_tree(process)
    raise AssertionError(f"step {step} was not reached:\n{process.communicate()[0]}")


@pytest.mark.slow
def test_stopped_in_every_way(whole, tmp_path):
    """kill -9 at step 13 on 2 processes, SIGTERM on 3, SIGTERM to the launcher of 1, SIGTERM to 1 without; 2 finish."""
    config, done = whole[0], Done(0, "", tmp_path / "run")
    # Evaluating and sampling after each step gives the time to signal in the middle, and must not change the weights.
    slow = "--run.eval_every", 1, "--eval.max_new_tokens", 30, "--eval.prompts"

    process = start(tmp_path, config, *slow, "[a, b]", processes=2, warm=True, script=held_after(tmp_path, 19))
    wait_for_step(process, done, 1, 13)
    kill_tree(process)
    process.wait()
    assert done.status["status"] == "running"  # Nobody was left to write anything else.
    saved = [name for name in done.checkpoints if not name.startswith(".")][-1]
    assert 13 <= len(done.losses) < 20 and saved in ("step-00000010", "step-00000015")

    process = start(tmp_path, config, *slow, "[a, b]", processes=3, warm=True, script=held_after(tmp_path, 23))
    wait_for_step(process, done, 2, 15)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    stopped = done.status["step"]
    assert "Continuing" in output and str(done.folder / "checkpoints" / saved) in output and process.returncode
    assert done.status["status"] == "stopped" and done.checkpoints[-1] == f"step-{stopped:08d}"
    assert 15 <= stopped < 25 and len(done.losses) == stopped  # Nothing done is lost, and none of it is logged twice.

    # The launcher of a single process dies without passing the signal on. The next run, started at once, has to wait
    # until the orphan has noticed, saved and let go of the folder.
    orphaned = start(tmp_path, config, *slow, "[a, b, c, d, e]", processes=1, script=held_after(tmp_path, 25))
    wait_for_step(orphaned, done, 3)
    orphaned.send_signal(signal.SIGTERM)
    orphaned.wait(timeout=10)
    held = held_after(tmp_path, 28)
    process = start(tmp_path, config, *slow, "[a, b, c, d, e]", processes=None, warm=True, script=held)
    wait_for_step(process, done, 4)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert "Stopped by" in orphaned.communicate(timeout=10)[0] and "Stopped by SIGTERM" in output
    assert process.returncode == 0 and done.status["status"] == "stopped" and stopped + 2 <= done.status["step"] < 30

    finished = launch(tmp_path, config, processes=2, warm=True)
    assert finished.status == {"status": "finished", "step": 30}
    assert_same(finished, whole[1])


def test_finished_and_started_again(again):
    """Says so and leaves the model alone, here on 2 processes, and with a change that makes no other run."""
    config, before = again
    model, losses = before.folder / "model" / "model.safetensors", before.losses
    written = model.stat()
    for settings, processes in ((), 2), (("--run.save_every", 3), None):
        done = launch(before.folder.parent, config, *settings, processes=processes, warm=True)
        said = done.output.replace(str(done.folder.parent), "").lower()  # The folder has the name of this test.
        assert "finished" in said and "30" in said
        assert (model.stat().st_ino, model.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
        assert done.status == {"status": "finished", "step": 30} and done.losses == losses


def test_what_is_finished_is_told_before_anything_is_built(again, monkeypatch):
    """A longer run is built, and so is one whose last checkpoint is gone."""

    def built(*args):
        raise MemoryError("it builds")

    config, before = again
    monkeypatch.setattr(train, "build_setup", built)
    done = run(before.folder.parent, config)
    assert f"Finished already: {done.folder}, step 30. Add steps, or choose a new run.output_dir." in done.output
    assert "Finished already" in run(before.folder.parent, config, "--run.resume", "elsewhere").output
    assert "it builds" in run(before.folder.parent, config, "--run.max_steps", 31, expect=1).output
    shutil.rmtree(before.folder / "checkpoints" / "step-00000030")
    (before.folder / "status.json").write_text(json.dumps({"status": "finished", "step": 30}))
    assert "it builds" in run(before.folder.parent, config, expect=1).output


def seen_in(figure):
    """Of each axes, its title and its lines as (style, x, y): a drawn figure is cleared."""
    seen = []
    for axes in figure.axes:
        lines = [(line.get_linestyle(), line.get_xdata(), line.get_ydata()) for line in axes.lines]
        seen.append((axes.get_title(), lines))
    return seen


def test_curves_show_where_a_run_was_continued(again, monkeypatch):
    """They are drawn at each evaluation, at the end and at a stop, and have the learning rate, too."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(seen_in(figure)))
    config, before = again
    tokens = {line["step"]: line["train/tokens"] for line in before.metrics if "train/tokens" in line}
    done = run(before.folder.parent, config, "--run.max_steps", 40, "--run.eval_every", 5, curves=True)
    assert len(drawn) == 3  # Two evaluations and the end.
    titles = [title for title, _ in drawn[-1]]
    assert titles == ["Loss", "Throughput while training", "Learning rate"]
    for _, lines in drawn[-1]:
        assert [x[0] for style, x, _ in lines if style == ":"] == [pytest.approx(tokens[30] / 1e6)]
    [rates] = [y for style, _, y in drawn[-1][2][1] if style == "-"]
    assert rates.tolist() == pytest.approx(done.logged("train/learning_rate"))

    train_step = train.train_step
    monkeypatch.setattr(train, "train_step", lambda *args: signal.raise_signal(signal.SIGTERM) or train_step(*args))
    assert run(before.folder.parent, config, "--run.max_steps", 50, curves=True).status["status"] == "stopped"
    assert len(drawn) == 4

    (before.folder / "curves.png").touch()
    monkeypatch.setattr(train, "train_step", train_step)
    run(before.folder.parent, config, "--run.max_steps", 50, curves=True)
    assert len(drawn) == 5  # Evaluations leave a new picture alone; the end does not.


def test_curves_that_cannot_be_drawn(tmp_path):
    """Neither at an evaluation nor at the end are they a reason to fail. Here a folder has their name."""
    (tmp_path / "run" / "curves.png").mkdir(parents=True)
    os.utime(tmp_path / "run" / "curves.png", (0, 0))  # Old, so that it is tried at each evaluation.
    done = run(tmp_path, tiny_config(tmp_path), "--run.max_steps", 6, "--run.eval_every", 3, curves=True)
    told = re.findall("^curves.png could not be drawn: .*", done.output, re.M)
    assert len(told) == 3 and all("Is a directory" in line for line in told)
    assert done.status == {"status": "finished", "step": 6}
    assert len(done.losses) == 6 and len(done.logged("eval/loss")) == 2


def test_lines_that_are_not_on_a_terminal_say_how_long(whole):
    """Where no progress bar does."""
    output = run(whole[1].folder.parent, whole[0], "--run.output_dir", whole[1].folder.parent / "lines").output
    lines = [line for line in output.splitlines() if line.startswith("step ") and "train/loss" in line]
    ends = [re.search(r"  epoch ([\d.]+)(  (\d\d:\d\d) left)?$", line).groups() for line in lines]
    assert len(lines) == 30 and ends[0][2] is None and ends[-1][2] == "00:00" and all(end[2] for end in ends[1:])
    assert [float(epoch) for epoch, *_ in ends] == pytest.approx([10 * step / 23 for step in STEPS], rel=1e-3)
    assert "%|" not in output


def test_a_terminal_has_a_progress_bar(again, monkeypatch):
    """Of all steps, those of earlier launches as well. Its first state and its last one are always shown."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(io, "StringIO", Terminal)  # Where run() lets it print.
    config, before = again
    output = run(before.folder.parent, config, "--run.max_steps", 33).output
    bars = re.findall(r"(\d+)%\|[^|]*\| (\d+)/(\d+) \[", output)
    assert bars[0] == ("91", "30", "33") and bars[-1] == ("100", "33", "33")  # 30 / 33 = 90.9 %
    assert "train/loss" in output and "  epoch " not in output and " left\n" not in output  # Which the bar tells.


@pytest.mark.parametrize("during", ["start_accelerator", "build_setup"])
@pytest.mark.parametrize("continued", [False, True])
def test_stopped_before_its_first_step(again, tmp_path, monkeypatch, continued, during):
    """So that who looks at the status starts it again. Nothing is lost, and that is no failure."""
    config, before = again
    more = ["--run.max_steps", 40] + ([] if continued else ["--run.output_dir", tmp_path / "new"])
    with monkeypatch.context() as patch:
        function = getattr(train, during)
        patch.setattr(train, during, lambda *args: signal.raise_signal(signal.SIGTERM) or function(*args))
        done = run(tmp_path, config, *more)
    assert done.status == {"status": "stopped", "step": 30 if continued else 0}
    assert done.output.endswith("Stopped by SIGTERM before the first step; the same command continues.\n")
    assert run(tmp_path, config, *more, "--run.log_every", 7).status == {"status": "finished", "step": 40}


def test_a_status_that_is_damaged(again):
    """Its run goes on from the checkpoints. Without them, the model is not replaced."""
    config, before = again
    status = before.folder / "status.json"
    status.write_text('{"status": "finished", "step": null}')
    assert run(before.folder.parent, config).status == {"status": "finished", "step": 30}
    status.write_text('{"status": "finished", "step": null}')
    shutil.rmtree(before.folder / "checkpoints")
    done = run(before.folder.parent, config, expect=2)
    assert "holds a run (finished, step None) without its checkpoints; choose another folder" in done.output


def die_at(patch, folder, step):
    """An error at the beginning of a step. Step 3 waits until the checkpoint of step 2 is there."""
    train_step = train.train_step

    def dies(setup, batch, *more):
        while batch.step == 3 and not (folder / "checkpoints" / "step-00000002").exists():  # Saved in the background.
            time.sleep(0.01)
        if batch.step == step:
            raise MemoryError("it dies")
        return train_step(setup, batch, *more)

    patch.setattr(train, "train_step", dies)


@pytest.mark.parametrize("status", ["running", "failed"])
@pytest.mark.parametrize("how", ["empty", "gone", "only the model"])
def test_what_was_saved_is_not_begun_again(tmp_path, monkeypatch, status, how):
    """Where its checkpoints are away, such as on a disk that is not mounted. When they are back, it goes on."""
    config, folder = tiny_config(tmp_path), tmp_path / "run"
    config["run"] |= {"save_every": 2, "max_steps": 5}
    with monkeypatch.context() as patch:
        die_at(patch, folder, 4)
        if status == "running":  # As after a kill.
            patch.setattr(folder_room.RunFolder, "note_failure", lambda *args: None)
        done = run(tmp_path, config, expect=1)
    assert done.status["status"] == status and done.status["step"] == 3
    shutil.move(folder / "checkpoints", tmp_path / "away")
    if how == "empty":
        (folder / "checkpoints").mkdir()
    if how == "only the model":
        (folder / "model").mkdir()
        (folder / "status.json").write_text(json.dumps({"status": status, "step": 3}))
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    done = run(tmp_path, config, expect=2)
    assert f"{folder} holds a run ({status}, step 3) without its checkpoints; choose another folder" in done.output
    assert before == {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    shutil.move(tmp_path / "away", folder / "checkpoints")
    assert run(tmp_path, config).launches == [0, 2]


def test_what_was_not_saved_is_begun_again(tmp_path, monkeypatch):
    """After a kill before the first checkpoint, nothing is there to go on from, and nothing is lost."""
    config = tiny_config(tmp_path)
    config["run"] |= {"save_every": 2, "max_steps": 5}
    with monkeypatch.context() as patch:
        die_at(patch, tmp_path / "run", 2)
        patch.setattr(folder_room.RunFolder, "note_failure", lambda *args: None)
        done = run(tmp_path, config, expect=1)
    assert done.status["status"] == "running" and done.status["step"] == 1
    done = run(tmp_path, config)
    assert done.launches == [0, 0] and len(done.losses) == 5 and done.status == {"status": "finished", "step": 5}


@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl", "config.yaml"])
def test_killed_while_it_begins(tmp_path, monkeypatch, name):
    """After any of the first files, the folder is known as that of a run, and the same command starts it."""
    config, replace_file = tiny_config(tmp_path), folder_room.replace_file

    def killed(path, *args, **how):
        replace_file(path, *args, **how)
        if path.name == name:
            raise MemoryError("it dies")

    with monkeypatch.context() as patch:
        patch.setattr(folder_room, "replace_file", killed)
        patch.setattr(folder_room.RunFolder, "note_failure", lambda *args: None)
        done = run(tmp_path, config, "--run.max_steps", 5, expect=1)
    assert (done.folder / name).exists() and not done.output.count("step 1/5")
    assert run(tmp_path, config, "--run.max_steps", 5).status == {"status": "finished", "step": 5}


def test_metrics_that_are_a_link(again):
    """To a file on another disk it stays one. To what is no file it is refused before anything is written."""
    config, before = again
    metrics, target = before.folder / "metrics.jsonl", before.folder.parent / "metrics on another disk"
    shutil.move(metrics, target)
    metrics.symlink_to(target)
    done = run(before.folder.parent, config, "--run.max_steps", 31)
    assert metrics.is_symlink() and len(done.losses) == 31 and target.read_text() == metrics.read_text()
    metrics.unlink()
    metrics.symlink_to("/dev/full")
    done = run(before.folder.parent, config, "--run.max_steps", 32, expect=2)
    assert f"{metrics} is neither a file nor a link to one; remove it" in done.output


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"])
def test_a_variable_that_is_no_number(whole, tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "two")
    done = run(tmp_path, whole[0], expect=2)
    assert f"the environment variable {name} is 'two', not a number; unset it" in done.output


def test_a_variable_of_too_many_digits(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "9" * 5000)
    done = run(tmp_path, whole[0], expect=2)
    assert f"the environment variable WORLD_SIZE is '{'9' * 50}', not a number; unset it" in done.output


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_count_of_no_process(whole, tmp_path, monkeypatch, name):
    """Cores are divided by it."""
    monkeypatch.setenv(name, "0")
    done = run(tmp_path, whole[0], expect=2)
    assert f"the environment variable {name} is 0; unset it" in done.output


@pytest.mark.parametrize("name", ["status.json", "config.yaml"])
def test_a_folder_in_place_of_a_file(whole, tmp_path, name):
    """It cannot be replaced, so the same command would never continue."""
    (tmp_path / "run" / name).mkdir(parents=True)
    done = run(tmp_path, whole[0], expect=2)
    assert f"run.output_dir: {tmp_path}/run/{name} is a folder, not a file; move it away" in done.output


@pytest.mark.parametrize("status", ["running", "finished"])
def test_without_the_model(whole, again, status):
    """A run that was killed between the last checkpoint and the export, or whose model was deleted, exports it."""
    config, before = again
    shutil.rmtree(before.folder / "model")
    (before.folder / "status.json").write_text(json.dumps({"status": status, "step": 30}))
    done = run(before.folder.parent, config)
    assert done.status == {"status": "finished", "step": 30}
    assert_same(done, whole[1])


def test_an_evaluation_that_was_logged_and_not_noted(again):
    """A kill may come in between. It is made again, and is logged once."""
    config, before = again
    manifest = before.folder / "checkpoints" / "step-00000030" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"evaluated_step": 0}))
    (before.folder / "status.json").write_text('{"status": "running", "step": 30}')
    done = run(before.folder.parent, config)
    assert [line["step"] for line in done.metrics if "eval/loss" in line] == [30] and done.launches == [0, 30]


def test_finished_checkpoint_into_a_new_folder(whole, tmp_path):
    """run.resume names a checkpoint of another run folder, with no step left to do: export and finish. An evaluation
    that is made again, or not wanted any more, is not counted for run.patience."""
    config, first = whole
    for number, settings in enumerate([(), ("--data.eval_source", "null")]):
        to = "--run.output_dir", tmp_path / str(number)
        done = run(tmp_path, config, *resume_from(first, 30), *to, *settings)
        assert done.status == {"status": "finished", "step": 30} and difference(done.weights, first.weights) == 0
        assert done.checkpoints == ["step-00000030"]
        manifests = [one.folder / "checkpoints" / "step-00000030" / "manifest.json" for one in (first, done)]
        before, now = (json.loads(path.read_text())["evaluations_in_vain"] for path in manifests)
        assert now == before


def test_run_folder(whole):
    """Two checkpoints are kept, and their manifests say what was done, on what and with what."""
    config, done = whole
    assert done.status == {"status": "finished", "step": 30}
    assert done.checkpoints == ["step-00000025", "step-00000030"]
    rows = list(datasets.load_from_disk(config["data"]["path"]))
    for step, folder in zip((25, 30), sorted((done.folder / "checkpoints").iterdir())):
        manifest = json.loads((folder / "manifest.json").read_text())
        batches = np.reshape(shuffled(7, len(rows), 10 * step), (step, 10))
        lengths = np.array([len(row["input_ids"]) for row in rows])[batches]
        targets = np.array([sum(label != -100 for label in row["labels"][1:]) for row in rows])[batches]
        seen = {
            "step": step,
            "rows": 10 * step,
            "tokens": lengths.sum(),  # Nothing is padded.
            "real_tokens": lengths.sum(),
            "target_tokens": targets.sum(),
        }
        assert {name: manifest[name] for name in seen} == seen
        plan = {"num_processes": 1, "global_batch_size": 10, "micro_batch_size": 10, "grad_accum_steps": 1}
        assert manifest["plan"].items() >= plan.items()
        assert manifest["versions"]["torch"] == torch.__version__
        assert manifest["versions"]["python"] == platform.python_version() and "git" in manifest["versions"]
        flat = {f"{part}.{name}": config[part][name] for part in ("batch", "optim") for name in config[part]}
        assert manifest["config"].items() >= flat.items()
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
        assert manifest["files"] == {name: [len(content), zlib.crc32(content)] for name, content in files.items()}
    text = (done.folder / "config.yaml").read_text()
    resolved = yaml.safe_load(text)
    assert resolved["optim"].items() >= config["optim"].items()
    assert resolved["optim"]["decay_fraction"] == 1.0  # A default, too, is resolved.
    notes = [json.loads(line.removeprefix("# ")) for line in text.splitlines()[-2:]]
    assert notes == [manifest["versions"], manifest["launch"]]
    # What is resolved is a config like any other, here of the run that it is from.
    assert "Finished already" in run(done.folder.parent, resolved).output


def test_what_a_run_writes_is_utf8_whatever_the_locale(tmp_path):
    """On some clusters that is Latin-1, or ASCII alone."""
    rows = write_rows(tmp_path / "named", [{"größe": row["input_ids"]} for row in make_rows([24] * 10)])
    config = tiny_config(tmp_path)
    config["data"] = {"path": str(rows), "column": "größe", "format": "tokens", "sequence_length": 24}
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    settings = "--run.max_steps", 1, "--optim.warmup_steps", 0
    done = launch(tmp_path, config, *settings, processes=None, env=ascii_alone)
    assert yaml.safe_load((done.folder / "config.yaml").read_bytes())["data"]["column"] == ["größe"]


def test_status_while_the_run_goes_on(tmp_path, monkeypatch):
    """Before each step: the last one that was logged, and who is at it."""
    seen, train_step = [], train.train_step

    def looked(setup, batch, *more):
        seen.append((batch.step, json.loads((tmp_path / "run" / "status.json").read_text())))
        return train_step(setup, batch, *more)

    monkeypatch.setattr(train, "train_step", looked)
    run(tmp_path, tiny_config(tmp_path), "--run.max_steps", 7, "--run.log_every", 3)
    who = f"process {os.getpid()} on {socket.gethostname()}"
    logged = {1: 0, 2: 0, 3: 0, 4: 3, 5: 3, 6: 3, 7: 6}
    assert seen == [(step, {"status": "running", "step": last, "process": who}) for step, last in logged.items()]


def test_a_busy_folder_is_told_at_once_and_waited_for(tmp_path, monkeypatch):
    """With who holds it, who here lets go of it as soon as that is said."""
    folder, told, say = tmp_path / "run", [], folder_room.say
    folder.mkdir()
    (folder / "status.json").write_text('{"status": "running", "step": 3, "process": "process 12 on elsewhere"}')
    holder = FileLock(folder / ".lock")
    holder.acquire()

    def heard(text):
        if "in use" in text:
            told.append(text)
            holder.release()
        say(text)

    monkeypatch.setattr(folder_room, "say", heard)
    done = run(tmp_path, tiny_config(tmp_path), "--run.max_steps", 5)
    assert told == [f"{folder} is in use, by process 12 on elsewhere if that still runs. Waiting for 45 s."]
    assert done.status == {"status": "finished", "step": 5}


@pytest.mark.parametrize("seconds", [0, 0.5])
def test_a_signal_while_a_folder_is_waited_for(tmp_path, monkeypatch, seconds):
    """It is answered at once, and not after the 45 s: launchers and schedulers kill after 30."""
    folder, say = tmp_path / "run", folder_room.say
    folder.mkdir()
    holder = FileLock(folder / ".lock")
    holder.acquire()

    def heard(text):
        say(text)
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        if not seconds:
            timer.join()

    monkeypatch.setattr(folder_room, "say", heard)
    began = time.monotonic()
    done = run(tmp_path, tiny_config(tmp_path), expect=1)
    holder.release()
    assert time.monotonic() - began < 20 and os.listdir(folder) == [".lock"]
    assert done.output.endswith("Stopped by SIGTERM; the same command continues.\n")


@pytest.mark.parametrize("first", ["log_every", "save_every"])
def test_a_folder_that_another_run_has_by_now(tmp_path, monkeypatch, first):
    """Somebody deletes it while the run goes on, and starts another one there: that alone writes into it, be it a log
    line or a checkpoint that would be the next."""
    folder, train_step = tmp_path / "run", train.train_step

    def replaced(setup, batch, *more):
        if batch.step == 3:
            folder.rename(tmp_path / "before")
            folder.mkdir()
            for name in (".lock", "metrics.jsonl", "status.json"):
                (folder / name).write_text("of another run")
        return train_step(setup, batch, *more)

    monkeypatch.setattr(train, "train_step", replaced)
    settings = "--run.max_steps", 5, "--run.log_every", 100, f"--run.{first}", 4
    done = run(tmp_path, tiny_config(tmp_path), *settings, expect=2)
    assert [line for line in done.output.splitlines() if line.startswith("error:")] == [
        f"error: run.output_dir {folder} was replaced, and another run uses it; this one has ended"
    ]
    assert {path.name: path.read_text() for path in folder.rglob("*")} == {
        name: "of another run" for name in (".lock", "metrics.jsonl", "status.json")
    }


def test_a_folder_without_its_lock(tmp_path, monkeypatch):
    """Somebody has cleaned it of hidden files. The run goes on."""
    train_step = train.train_step

    def cleaned(setup, *more):
        (tmp_path / "run" / ".lock").unlink(missing_ok=True)
        return train_step(setup, *more)

    monkeypatch.setattr(train, "train_step", cleaned)
    assert run(tmp_path, tiny_config(tmp_path), "--run.max_steps", 5).status["status"] == "finished"


def test_extended(again, tmp_path):
    """A finished run may be made longer; the schedule is then that of the longer run, which is said."""
    config, before = again
    done = run(before.folder.parent, config, "--run.max_steps", 40)
    assert any("schedule" in line and "30" in line and "40" in line for line in done.output.splitlines())
    assert [line["step"] for line in done.metrics if "train/loss" in line] == [*STEPS, *range(31, 41)]
    expected = [learning_rate(config["optim"], step, 40) for step in range(31, 41)]
    assert done.logged("train/learning_rate")[30:] == pytest.approx(expected, rel=1e-12)
    was, would_be = (learning_rate(config["optim"], 30, length) for length in (30, 40))
    told = f"Step 30 had a learning rate of {was:.4g}; on this schedule, it would have had {would_be:.4g}."
    assert told in done.output and would_be > 2 * was
    other = *resume_from(done, 35), "--run.output_dir", tmp_path / "other", "--run.max_steps", 40
    assert "had a learning rate of" not in run(tmp_path, config, *other).output
    assert done.status == {"status": "finished", "step": 40}


def test_changed_mathematics_is_refused(again, tmp_path):
    """With everything that differs, both ways out, and without a trace in the run folder."""
    config, before = again
    start = Path(config["model"]["pretrained"])
    shutil.copytree(start, tmp_path / "other-start")
    other_rows = write_rows(tmp_path / "other-rows", make_rows([24] * 23))
    changes = {
        "batch.global_batch_size": (10, 5),
        "data.sequence_length": (24, 20),
        "data.packing": ("none", "concat"),
        "data.path": (config["data"]["path"], str(other_rows)),
        "run.seed": (7, 8),
        "optim.learning_rate": (0.005, 0.001),
        "optim.schedule": ("cosine", "linear"),
        "optim.max_grad_norm": (1.1, None),
        "optim.weight_decay": (0.1, 0.2),
        "model.pretrained": (str(start), str(tmp_path / "other-start")),
    }
    contents = {path: path.read_bytes() for path in before.folder.rglob("*") if path.is_file()}
    overrides = [word for path, (_, now) in changes.items() for word in (f"--{path}", json.dumps(now))]
    done = run(tmp_path, config, *overrides, expect=2)
    for path, values in changes.items():
        line = next(line for line in done.output.splitlines() if path in line)
        assert all(repr(value) in line for value in values)
    [advice] = re.findall(r"run.output_dir, .* --run.allow_changes '\[(.*)\]'", done.output)
    assert sorted(advice.split(", ")) == sorted([*changes, "data fingerprint"])
    assert {path: path.read_bytes() for path in before.folder.rglob("*") if path.is_file()} == contents


def test_a_changed_model_is_refused(tmp_path):
    """Its weights are in the checkpoint, and its config is in its folder."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 6
    run(tmp_path, config)
    file = Path(config["model"]["pretrained"]) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.5}))
    message = run(tmp_path, config, "--run.max_steps", 8, expect=2).output
    assert "  rms_norm_eps: 1e-06 in the checkpoint, 0.5 now" in message
    done = run(tmp_path, config, "--run.max_steps", 8, "--run.allow_changes", "[model.pretrained]")
    assert done.status["step"] == 8


def test_another_tokenizer_may_be_allowed(tmp_path):
    """With another end of text in the model's config, which follows from data.tokenizer. For more tokens than those of
    the checkpoint, its weights are too few."""
    config = tiny_config(tmp_path)
    (tmp_path / "a.txt").write_text("A text about nothing. " * 40)
    config["data"] |= {"path": None, "files": str(tmp_path / "a.txt"), "format": "text", "packing": "concat"}
    config["data"]["eval_source"], config["optim"]["warmup_steps"] = None, 0
    for number, name in enumerate(("before", "now"), start=5):
        tokenizer = byte_tokenizer()
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(number)
        tokenizer.save_pretrained(tmp_path / name)
    before, now = (("--data.tokenizer", tmp_path / name, "--run.max_steps") for name in ("before", "now"))
    run(tmp_path, config, *before, 2)
    done = run(tmp_path, config, *now, 3, "--run.allow_changes", "[data.tokenizer, data fingerprint]")
    assert done.launches == [0, 2] and "other settings:\n  data.tokenizer: " in done.output
    grown = "--data.special_tokens", "[<new>]", "--run.allow_changes", "[data.special_tokens]"
    refused = run(tmp_path, config, *now, 4, *grown, expect=2).output
    assert "  vocab_size: 384 in the checkpoint, 385 now" in refused
    allow = "--run.allow_changes '[data.special_tokens, model.pretrained]'"
    assert f"Choose a new run.output_dir, or continue with it, if its weights are as large as those: {allow}" in refused


def test_changed_data_is_refused(tmp_path):
    """Other tokens in the same place under the same config: told by the fingerprint."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 5
    run(tmp_path, config)
    rows = list(datasets.load_from_disk(config["data"]["path"], keep_in_memory=True))
    rows[3]["input_ids"][0] += 1
    shutil.rmtree(config["data"]["path"])
    write_rows(tmp_path / "rows", rows)
    done = run(tmp_path, config, "--run.max_steps", 6, expect=2)
    assert "data" in done.output.replace(str(tmp_path), "")
    assert "run.output_dir" in done.output and "--run.allow_changes '[data fingerprint]'" in done.output
    done = run(tmp_path, config, "--run.max_steps", 6, "--run.allow_changes", "[data fingerprint]")
    assert done.status["step"] == 6 and "goes on with other settings:\n  data fingerprint: " in done.output
    assert "The run goes on 50 rows after the beginning of the new ones" in done.output


def test_without_a_step_left_nothing_is_said_of_the_next_ones(tmp_path):
    """As where a checkpoint is only evaluated: neither rate nor rows matter any more."""
    config = tiny_config(tmp_path)
    config["optim"]["warmup_steps"] = 2
    before = run(tmp_path, config, "--run.max_steps", 10, "--run.save_every", 5)
    others = *resume_from(before, 5), "--run.seed", 9, "--run.allow_changes", "[run.seed]"
    for steps in 5, 6:
        done = run(tmp_path, config, *others, "--run.output_dir", tmp_path / f"to-{steps}", "--run.max_steps", steps)
        for told in "Step 5 had a learning rate of", "Earlier steps had other rows":
            assert (told in done.output) == (steps > 5)


def test_a_setting_that_is_newer_than_the_checkpoint_had_its_default(capsys):
    """One of a fork, which its learning rate depends on."""

    class OptimOfFork(Optim):
        share: float = 1.0

    def learning_rate_at(config, step, max_steps, peak):
        return peak * config.share

    setup = SimpleNamespace(config=SimpleNamespace(optim=OptimOfFork(learning_rate=0.5, share=0.1)), max_steps=9)
    say_if_rate_differs(setup, 5, {"config": {"optim.learning_rate": 0.5}, "max_steps": 9}, learning_rate_at)
    assert "Step 5 had a learning rate of 0.5; on this schedule, it would have had 0.05." in capsys.readouterr().out


class Decay(Section):
    factor: float = 1.0
    since: int = 1


class OptimWithParts(Optim):
    decay: Decay = Decay()
    factors: dict[str, float] = {}
    steps: list[Decay] = []
    cycle: tuple[float, float] = (0.0, 1.0)


@pytest.mark.parametrize(
    "settings, rate_of",
    [
        ({"decay": {"factor": 0.5}}, lambda optim: optim.decay.factor),
        ({"factors": {"all": 0.5}}, lambda optim: optim.factors["all"]),
        ({"steps": [{"factor": 0.5}]}, lambda optim: optim.steps[0].factor),
        ({"cycle": (0.5, 1.0)}, lambda optim: optim.cycle[0]),
    ],
    ids=["section", "dict", "list", "tuple"],
)
def test_the_rate_of_before_by_settings_that_have_parts(capsys, settings, rate_of):
    """Of a fork. The manifest has their names with dots, a list for a tuple, and settings that are gone."""
    before, now = (OptimWithParts.model_validate({**settings, "learning_rate": rate}) for rate in (0.3, 0.1))
    setup = SimpleNamespace(config=SimpleNamespace(optim=now), max_steps=9)
    settings = json.loads(json.dumps(flatten({"optim": before.model_dump()}))) | {"optim.that_is_gone": 1}
    manifest = {"config": settings, "max_steps": 9}
    for rate, told in (0.3, "Step 5 had a learning rate of 0.15; on this"), (0.1, None):
        manifest["config"]["optim.learning_rate"] = rate
        say_if_rate_differs(setup, 5, manifest, lambda optim, step, length, peak: peak * rate_of(optim))
        said = capsys.readouterr().out
        assert told in said if told else not said


@pytest.mark.parametrize(
    "factors",
    [{"a": "not a number"}, {"a": 1.0, "a.b": 0.5}, {"a.b": 0.5, "a": 1.0}, {"a": 1.0, "a.b.c": 0.5}],
    ids=["other type", "dotted key", "dotted key first", "two dots"],
)
def test_a_rate_of_before_that_is_not_known(capsys, factors):
    """It may be one of other code, in which the setting had another type."""
    now = OptimWithParts(learning_rate=0.1)
    setup = SimpleNamespace(config=SimpleNamespace(optim=now), max_steps=9)
    manifest = {"config": {f"optim.factors.{name}": factor for name, factor in factors.items()}, "max_steps": 9}
    say_if_rate_differs(setup, 5, manifest, lambda *given: pytest.fail("is asked for a rate"))
    assert capsys.readouterr().out == ""


class OwnWithParts(Section):
    maybe: Decay | None = Decay()
    always: Decay = Decay()
    factors: dict[str, float] = {"a": 1.0}


class ConfigWithParts(Config):
    own: OwnWithParts = OwnWithParts()


@pytest.mark.parametrize(
    "before, changed",
    [
        ({}, []),
        ({"own.always.factor": 1.0}, []),  # Decay has got another setting since.
        ({"own.maybe": None}, ["own.maybe.factor", "own.maybe.since"]),
        ({"own.factors": {}}, ["own.factors", "own.factors.a"]),
        ({"own.factors.b": 1.0}, ["own.factors.a", "own.factors.b"]),
    ],
    ids=["newer", "newer part", "none", "empty", "other key"],
)
def test_what_a_checkpoint_lacks_of_a_setting(before, changed):
    """It had its default only if the checkpoint does not say otherwise."""
    now = flatten({"own": OwnWithParts().model_dump()})
    assert sorted(name for name, *_ in changed_settings(ConfigWithParts, before, now)) == changed


def test_another_batch_that_is_allowed(tmp_path):
    """The rows follow from the step, as if all steps had had that batch. That is said, and how to go on in order."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 6
    before = run(tmp_path, config)
    shutil.copytree(before.folder, tmp_path / "copy")
    more = "--run.max_steps", 8, "--batch.global_batch_size", 5, "--run.allow_changes"
    told = "60 rows are done, and step 7 begins after 30 rows"
    done = run(tmp_path, config, *more, "[batch.global_batch_size]")
    assert told in done.output
    assert done.logged("train/rows")[-3:] == [60, 65, 70]
    assert done.logged("train/epoch")[-3:] == pytest.approx([60 / 23, 65 / 23, 70 / 23])  # Since step 0, as the rows.
    stage = "--batch.warmup", "[{steps: 6, rows: 10}]", "--run.output_dir", tmp_path / "copy"
    done = run(tmp_path, config, *more, "[batch.global_batch_size, batch.warmup]", *stage)
    assert done.status["step"] == 8 and "rows are done" not in done.output


def test_no_setting_is_a_change(tmp_path):
    """An adapter with peft's own settings is not none at all."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 6
    run(tmp_path, config)
    done = run(tmp_path, config, "--model.lora", "{}", expect=2)
    assert "model.lora: None in the checkpoint, {" in done.output


def test_empty_settings():
    """They are values, but no section: a fork may add its first setting to a run."""
    assert flatten({"own": {}, "model": {"lora": {}, "dtype": "float32"}}) == {
        "model.lora": {},
        "model.dtype": "float32",
    }


def is_known_as_finished(before: dict, now: dict, **more) -> bool:
    """Of a run that had the first config, and more settings in its manifest, and now has the second one."""
    known, asked = (train.Settings.model_validate(config) for config in (before, now))
    manifest = {"config": flatten(known.model_dump()) | more, "step": 30}
    folder = SimpleNamespace(is_finished=lambda step: True, meeting=Meeting(1))
    return resume.is_finished_already(folder, asked, (Path("step-00000030"), manifest))


def test_a_key_that_is_gone_from_a_setting_is_a_change(tmp_path):
    """But not one of a setting that the code does not have any more."""
    config = tiny_config(tmp_path)
    deep = {"model_type": "llama", "num_hidden_layers": 1}
    before, now = (config | {"model": {"architecture": shape}} for shape in (deep, {"model_type": "llama"}))
    assert is_known_as_finished(before, before)
    assert is_known_as_finished(before, before, **{"own.that_is_gone": 0.1})
    assert not is_known_as_finished(before, now)


def test_a_source_that_is_gone_is_a_change(tmp_path):
    config = tiny_config(tmp_path)
    source = {"path": config["data"].pop("path"), "weight": 1}
    both, one = ({name: source for name in names} for names in ("ab", "a"))
    before, now = (config | {"data": config["data"] | {"sources": sources}} for sources in (both, one))
    assert is_known_as_finished(before, before)
    assert not is_known_as_finished(before, now)
    assert not is_known_as_finished(now, before)  # Nor is one that is new.


def test_a_setting_that_the_code_has_lost(tmp_path):
    """Nobody can name it any more, so all such settings have one name together."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 2, 0
    path = run(tmp_path, config).folder / "checkpoints" / "step-00000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"] |= {"own.that_is_gone": 0.1, "own.gone_too": 2, "optim.that_is_gone": None}
    path.write_text(json.dumps(manifest))
    message = run(tmp_path, config, "--run.max_steps", 3, "--optim.adam_eps", 0.1, expect=2).output
    assert "  own.that_is_gone: 0.1 in the checkpoint, None now" in message
    assert "--run.allow_changes '[optim.adam_eps, settings that are gone]'" in message
    done = run(tmp_path, config, "--run.max_steps", 3, "--run.allow_changes", "[settings that are gone]")
    assert done.launches == [0, 2] and "other settings:\n  own.that_is_gone: 0.1 in the checkpoint" in done.output


def test_data_that_have_moved(tmp_path):
    """Other places, here of two sources: the rows are the same, and so is the run. With other rows, the places are
    among what has changed."""
    config = tiny_config(tmp_path)
    sources = {name: {"path": config["data"].pop("path") if name == "a" else None, "weight": 1} for name in "ab"}
    sources["b"]["path"] = str(write_rows(tmp_path / "more", make_rows([24] * 12, masked=0.1)))
    config["data"]["sources"] = sources
    config["run"] |= {"max_steps": 8, "save_every": 4}
    whole = run(tmp_path, config, "--run.output_dir", tmp_path / "whole")
    for name, source in sources.items():
        source["path"] = str(shutil.copytree(source["path"], tmp_path / "moved" / name))
    done = run(tmp_path, config, *resume_from(whole, 4))
    assert done.launches == [4] and difference(done.weights, whole.weights) == 0
    sources["b"]["path"] = str(write_rows(tmp_path / "others", make_rows([24] * 12, seed=3, masked=0.1)))
    done = run(tmp_path, config, *resume_from(whole, 4), "--run.output_dir", tmp_path / "refused", expect=2)
    assert "data.sources.b.path" in done.output and "data.sources.a.path: " in done.output


def test_changes_are_named(again, tmp_path):
    """What is named passes and is listed; what is not named is refused beside it."""
    config, before = again
    changes = "--run.max_steps", 32, "--optim.learning_rate", 0.001, "--optim.weight_decay", 0.2
    done = run(tmp_path, config, *changes, "--run.allow_changes", "optim.learning_rate", expect=2)
    assert "optim.weight_decay: 0.1 in the checkpoint, 0.2 now\nChoose" in done.output
    assert "--run.allow_changes '[optim.learning_rate, optim.weight_decay]'" in done.output
    done = run(tmp_path, config, *changes, "--run.allow_changes", "[optim.learning_rate, optim.weight_decay]")
    assert "\n  optim.learning_rate: 0.005 in the checkpoint, 0.001 now\n" in done.output
    assert done.status == {"status": "finished", "step": 32}


def test_harmless_changes_and_a_chosen_checkpoint(whole, again, tmp_path):
    """From step 25, chosen by its path, with all that may change changed: the same weights. In the folder that it is
    of, which goes on from step 30, that is refused; a folder that has begun with it goes on from its own."""
    config, before = again
    chosen = before.folder / "checkpoints" / "step-00000025"
    refused = run(before.folder.parent, config, "--run.resume", chosen, expect=2)
    assert "run.resume" in refused.output and "another run.output_dir" in refused.output
    assert before.checkpoints == ["step-00000025", "step-00000030"]
    harmless = {
        "run.resume": chosen,
        "run.log_every": 2,
        "run.eval_every": 3,
        "run.save_every": 2,
        "run.keep_checkpoints": 1,
        "batch.max_micro_batch_size": 3,
        "batch.accumulation": "immediate",
        "model.attention": "eager",
        "eval.max_rows": 4,
    }
    harmless["run.output_dir"] = tmp_path / "other"
    words = [word for path, now in harmless.items() for word in (f"--{path}", now)]
    done = run(tmp_path, config, *words)
    assert f"after step 25 from {chosen}" in done.output and done.checkpoints == ["step-00000030"]
    assert [line["step"] for line in done.metrics if "train/loss" in line] == [26, 28, 30]
    assert difference(done.weights, whole[1].weights) < 1e-5
    (done.folder / "status.json").unlink()
    assert f"after step 30 from {done.folder}" in run(tmp_path, config, *words).output


@pytest.mark.parametrize("absolute", [True, False])
def test_a_checkpoint_is_found_however_its_path_is_written(whole, again, tmp_path, monkeypatch, absolute):
    """run.resume by an absolute path where run.output_dir is relative, and the other way round."""
    config, _ = again
    monkeypatch.chdir(tmp_path)
    here, there = (tmp_path, Path()) if absolute else (Path(), tmp_path)
    chosen = "--run.resume", here / "run" / "checkpoints" / "step-00000025"
    refused = run(tmp_path, config, *chosen, "--run.output_dir", there / "run", expect=2)
    assert "run.resume names a checkpoint of this run" in refused.output
    done = run(tmp_path, config, *chosen, "--run.output_dir", there / "other")
    assert done.launches == [25] and difference(done.weights, whole[1].weights) == 0


def test_a_launch_from_the_folder_of_the_checkpoints(again, tmp_path, monkeypatch):
    """The word auto is no path in it."""
    config, done = again
    monkeypatch.chdir(done.folder / "checkpoints")
    assert "Finished already" in run(tmp_path, config).output


def test_changes_that_are_insisted_on(again, tmp_path):
    """allow_changes continues with the config's values, not with those that lie in the checkpoint's optimizer."""
    config, before = again
    weights = []
    for weight_decay in (0.1, 0.9):
        done = run(
            tmp_path,
            config,
            "--run.resume",
            before.folder / "checkpoints" / "step-00000025",
            "--run.output_dir",
            tmp_path / str(weight_decay),
            "--optim.learning_rate",
            0.001,
            "--optim.weight_decay",
            weight_decay,
            "--run.allow_changes",
            "[optim.learning_rate, optim.weight_decay]",
        )
        weights.append(done.weights)
    expected = [learning_rate(config["optim"] | {"learning_rate": 0.001}, step, 30) for step in range(26, 31)]
    assert done.logged("train/learning_rate") == pytest.approx(expected, rel=1e-12)
    assert difference(*weights) > 1e-5


def test_damaged_checkpoint_is_passed_over(whole, again):
    config, before = again
    checkpoints = before.folder / "checkpoints"
    damaged = max((checkpoints / "step-00000030").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    (checkpoints / ".step-00000035.tmp").mkdir()  # What a kill during a save leaves behind.
    done = run(before.folder.parent, config)
    assert str(damaged) in done.output and done.launches == [0, 25]
    assert done.checkpoints == ["step-00000025", "step-00000030"]  # Written anew, and the leftover is gone.
    assert_same(done, whole[1])


def test_tied_weights(whole, tmp_path):
    """A model whose output layer is its embedding: two names, one tensor, in checkpoint, resume and export."""
    config = whole[0] | {"model": {"pretrained": str(tiny_model(tmp_path / "start", learned_positions=True))}}
    done = run(tmp_path, config)
    weights = done.weights
    assert "lm_head.weight" not in weights
    for name in ("model", "checkpoints/step-00000030"):
        shutil.rmtree(done.folder / name)
    done = run(tmp_path, config)
    assert done.launches == [0, 25] and difference(done.weights, weights) < 1e-5


def test_a_weight_without_a_gradient(tmp_path, monkeypatch):
    """A fork may have a head that it does not use, here not before step 4. Until then the optimizer has no state of it,
    and a run that is continued has none, either."""
    build_model, train_step, token_loss, now = train.build_model, train.train_step, train.token_loss, {}

    def with_head(*args):
        model = build_model(*args)
        model.head = now["head"] = torch.nn.Linear(3, 3)
        return model

    def noted(setup, batch, *more):
        now["used"] = batch.step >= 4
        return train_step(setup, batch, *more)

    def with_head_loss(logits, targets, **settings):
        loss, metrics = token_loss(logits, targets, **settings)
        if now.get("used"):
            loss = loss + (targets >= 0).sum() * now["head"](torch.ones(3)).square().sum()
        return loss, metrics

    monkeypatch.setattr(train, "build_model", with_head)
    monkeypatch.setattr(train, "train_step", noted)
    monkeypatch.setattr(train, "token_loss", with_head_loss)
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 6, "save_every": 1, "keep_checkpoints": 6}
    whole = run(tmp_path, config)
    for step in 2, 4:
        chosen = whole.folder / "checkpoints" / f"step-0000000{step}"
        done = run(tmp_path, config, "--run.resume", chosen, "--run.output_dir", tmp_path / f"{step}")
        assert done.launches == [step] and difference(done.weights, whole.weights) == 0
        for name in done.checkpoints:
            saved = [
                load_file(next((one.folder / "checkpoints" / name).glob("*.safetensors"))) for one in (done, whole)
            ]
            assert difference(*saved) == 0


def test_a_run_that_is_there_goes_before_the_checkpoint_that_is_named(again, tmp_path):
    """So that the same command continues it. It may be another run than the user thinks, and so a line tells."""
    config, first = again
    shutil.rmtree(first.folder / "checkpoints" / "step-00000030")
    done = run(tmp_path, config, "--run.resume", tmp_path / "nowhere")
    assert done.launches == [0, 25] and f"run.resume {tmp_path / 'nowhere'} is not read" in done.output


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_a_cache_that_cannot_be_written(whole, tmp_path, monkeypatch, make):
    make(tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "cache")
    done = run(tmp_path, whole[0], expect=2)
    assert f"the cache of data sets, {tmp_path / 'cache'}, cannot be used; set HF_HOME" in done.output
    assert "the same command continues" not in done.output


def test_a_config_beside_a_checkpoint(again, tmp_path):
    """Somebody has put it there, to open the weights by other tools."""
    config, first = again
    shutil.copy(first.folder / "model" / "config.json", first.folder / "checkpoints" / "step-00000025")
    shutil.rmtree(first.folder / "checkpoints" / "step-00000030")
    done = run(tmp_path, config)
    assert done.launches == [0, 25] and "passed over" not in done.output


def test_another_seed_holds_out_others(capsys, tmp_path):
    """Of data.eval_fraction: run.init_from says that the weights may have learned them, where the data are the same."""

    def told(seed, fraction, path="a"):
        theirs = {"run.seed": 1, "data.eval_fraction": fraction, "data.path": "a"}
        say_if_others_are_held_out(Path("x"), theirs, theirs | {"run.seed": seed, "data.path": path})
        return capsys.readouterr().out

    assert "hold out other documents, which x may have learned" in told(2, 0.1)
    assert told(1, 0.1) == told(2, 0.0) == told(2, 0.1, path="b") == ""
    config = tiny_config(tmp_path)
    config["data"] |= {"eval_source": None, "eval_fraction": 0.2}
    settings = "--run.max_steps", 1, "--optim.warmup_steps", 0
    first = run(tmp_path, config, *settings).folder / "checkpoints" / "step-00000001"
    new = "--run.init_from", first, "--run.seed", 8, "--run.output_dir", tmp_path / "new"
    assert f"hold out other documents, which {first} may have learned" in run(tmp_path, config, *settings, *new).output


def test_init_from(whole, tmp_path):
    """A new run from a checkpoint's weights: step 1, warmup, a fresh optimizer, as the plain loop from that model."""
    config, first = whole
    weights = str(first.folder / "checkpoints" / "step-00000030")
    config = config | {"run": config["run"] | {"init_from": weights, "seed": 8}}
    rows = list(datasets.load_from_disk(config["data"]["path"]))
    order = shuffled(8, len(rows), 300)
    start_model = {"model": {"pretrained": str(first.folder / "model")}}
    truth = train_reference(config | start_model, lambda step: [rows[i] for i in order[10 * step - 10 : 10 * step]])
    done = run(tmp_path, config)
    truth.check(done)
    again = "is of a run that began with the same rows."
    of_one_seed = run(tmp_path, config, "--run.seed", 7, "--run.output_dir", tmp_path / "same", "--run.max_steps", 5)
    assert again in of_one_seed.output and again not in done.output

    # Started again after an interruption, the run continues itself and does not begin anew.
    shutil.rmtree(done.folder / "checkpoints" / "step-00000030")
    done = run(tmp_path, config)
    assert done.launches == [0, 25]
    truth.check(done)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_processes_that_do_not_see_each_other(whole, tmp_path, monkeypatch, device):
    """Two of these would each train alone into the same folder: WORLD_SIZE says 2, but there is no process group."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device == "gpu")
    done = run(tmp_path, whole[0], expect=2)
    assert "launch: WORLD_SIZE" in done.output and "start by accelerate launch" in done.output
    assert not list(tmp_path.rglob("status.json"))


def test_a_rank_without_a_launcher(whole, tmp_path, monkeypatch):
    """Left in the environment by another tool, RANK would make of the only process one that leaves the checkpoints to
    the main process."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # Other ranks leave the message to the main process.
    assert "unset" in run(tmp_path, whole[0], expect=2).output
    assert not list(tmp_path.rglob("status.json"))


def config_of_noise(folder):
    """Two rows of noise are learned by heart, so the loss on others rises in the end."""
    config = tiny_config(folder)
    noise = [{"input_ids": row} for row in np.random.default_rng(9).integers(3, 40, (2, 24)).tolist()]
    config["data"]["path"] = str(write_rows(folder / "noise", noise))
    config["batch"]["global_batch_size"] = 2
    config["optim"] |= {"schedule": "constant", "warmup_steps": 0, "learning_rate": 0.01}
    config["run"]["eval_every"] = 2
    return config


def test_patience(tmp_path):
    """The run finishes after 3 evaluations in a row that are not the best so far, and so does one that is continued on
    2 processes from the second of them. More patience goes on."""
    config = config_of_noise(tmp_path)
    config["run"] |= {"save_every": 2, "keep_checkpoints": 3}
    patient = run(tmp_path, config, "--run.output_dir", tmp_path / "patient")
    losses = patient.logged("eval/loss")
    last = next(n for n in range(4, len(losses) + 1) if min(losses[: n - 3]) < min(losses[n - 3 : n]))
    assert 2 * last < 30  # Otherwise there is nothing to wait for.

    done = run(tmp_path, config, "--run.patience", 3)
    end = {"status": "finished", "step": 2 * last}
    assert done.status == end and done.logged("eval/loss") == losses[:last]
    assert "that did not lower the loss: 3\n" in done.output and done.checkpoints[-1] == f"step-{2 * last:08d}"
    advice = f"Finished already: {done.folder}, step {2 * last}. Raise run.patience, or choose a new run.output_dir."
    assert advice in run(tmp_path, config, "--run.patience", 3).output

    shutil.rmtree(done.folder / "checkpoints" / done.checkpoints[-1])
    continued = launch(tmp_path, config, "--run.patience", 3, processes=2, warm=True)
    assert continued.status == end and continued.launches == [0, 2 * last - 2]
    assert difference(continued.weights, done.weights) < 1e-5
    assert run(tmp_path, config, "--run.patience", 4).status == {"status": "finished", "step": 2 * last + 2}


def test_a_loss_that_stays_the_same_is_not_lower(tmp_path):
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 9, "eval_every": 1, "patience": 2, "keep_best": True}
    config["optim"] |= {"learning_rate": 1e-30, "warmup_steps": 0}
    done = run(tmp_path, config)
    assert done.status["step"] == 3, "By run.patience."
    assert done.checkpoints[0] == "step-00000001", "By run.keep_best."
    assert "run.patience: evaluations in a row" in done.output
    short = "--run.max_steps", 2, "--run.output_dir", tmp_path / "short"
    assert "run.patience: evaluations in a row" not in run(tmp_path, config, *short).output
    assert "step 2. Add steps, or choose" in run(tmp_path, config, *short).output  # More patience would not go on.


def what_was_logged(done: Done) -> list[dict]:
    """The lines about steps and evaluations, without what depends on the speed or on the launches."""
    kept = [{name: line[name] for name in line if not name.startswith("perf/")} for line in done.metrics]
    return [line for line in kept if "train/tokens" in line]


def disturb(patch: pytest.MonkeyPatch, step: int, moment: str) -> None:
    """Stop or kill the run at a moment of the evaluation after a step. Fails if it goes on to evaluate or to sample."""
    now, evaluate_step, eval_batches, encode_prompt = {}, train.evaluate_step, train.eval_batches, sample.encode_prompt
    count_evaluation, new_saver = Progress.count_evaluation, train.Saver

    def reach(*moments):
        assert "ended" not in now
        if now.get("evaluates") == step and moment in moments:
            now["ended"] = True
            if moment.startswith("killed"):
                now["saver"].wait()  # As a process does that ends.
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)

    def noted(setup, progress, *more):
        now["evaluates"] = progress.step
        return evaluate_step(setup, progress, *more)

    def batches(*args):
        for number, batch in enumerate(eval_batches(*args)):
            reach(*(("micro-batch", "killed") if number == 1 else ()))
            yield batch

    def prompt(*args):
        reach("prompt")
        return encode_prompt(*args)

    def counted(*args):
        reach("killed when logged")
        count_evaluation(*args)

    patch.setattr(train, "Saver", lambda *args: now.setdefault("saver", new_saver(*args)))
    patch.setattr(train, "evaluate_step", noted)
    patch.setattr(train, "eval_batches", batches)
    patch.setattr(sample, "encode_prompt", prompt)
    patch.setattr(Progress, "count_evaluation", counted)


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """A config, and its run that ends by patience, with the steps of its best and of its last evaluation."""
    folder = tmp_path_factory.mktemp("patient")
    config = config_of_noise(folder)
    config["run"] |= {"save_every": 4, "keep_best": True, "patience": 2}
    config["batch"]["max_micro_batch_size"] = 2
    config["eval"] = {"prompts": ["[a, b]", "[c]"], "max_new_tokens": 3}
    done = run(folder, config)
    losses = {line["step"]: line["eval/loss"] for line in done.metrics if "eval/loss" in line}
    best, end = min(losses, key=losses.get), max(losses)
    assert end == best + 4 < 30
    return config, done, best, end


@pytest.mark.parametrize(
    "moment", slow_but("micro-batch", of=["micro-batch", "prompt", "killed", "killed when logged"])
)
def test_stopped_while_it_evaluates(patient, tmp_path, monkeypatch, moment):
    """At the best evaluation, at the one with which patience ends, or at one without a checkpoint of its step. Nothing
    more is evaluated, the step is saved, and the next launch makes up for the evaluation: the run that nobody stopped.
    """
    config, whole, best, end = patient
    killed = moment.startswith("killed")
    for step in (best, best + 2, end) if moment == "micro-batch" else (best, end):
        config["run"]["output_dir"] = str(tmp_path / f"{step}")
        with monkeypatch.context() as patch:
            disturb(patch, step, moment)
            stopped = run(tmp_path, config, expect=int(killed))
        last = f"step-{step:08d}"
        assert killed or (stopped.status == {"status": "stopped", "step": step} and stopped.checkpoints[-1] == last)
        done = run(tmp_path, config)
        assert done.launches[1] <= step if killed else done.launches == [0, step]
        assert what_was_logged(done) == what_was_logged(whole) and done.status == whole.status
        assert f"(step-{best:08d})" in done.output and difference(done.weights, whole.weights) == 0
        assert {f"step-{best:08d}", f"step-{end:08d}"} <= {*done.checkpoints}


def test_the_best_is_marked_and_not_saved_twice(tmp_path, monkeypatch):
    """A step with a checkpoint of its own that turns out to be the best: the tensors are written once."""
    saved = []
    monkeypatch.setattr(
        saver_room, "save_checkpoint", lambda *args: saved.append(args[3]["step"]) or save_checkpoint(*args)
    )
    save_checkpoint = checkpoint.save_checkpoint
    config = config_of_noise(tmp_path)
    config["run"] |= {"max_steps": 12, "save_every": 2, "keep_checkpoints": 1, "keep_best": True}
    done = run(tmp_path, config)
    losses = {line["step"]: line["eval/loss"] for line in done.metrics if "eval/loss" in line}
    best = f"step-{min(losses, key=losses.get):08d}"
    assert saved == [2, 4, 6, 8, 10, 12] and done.checkpoints == [best, "step-00000012"] and f"({best})" in done.output
    assert json.loads((done.folder / "checkpoints" / best / "manifest.json").read_text())["best_checkpoint"] == best


def test_a_checkpoint_is_of_its_step_however_long_it_takes(tmp_path, monkeypatch):
    """The next save waits until it is written."""
    config, saved = tiny_config(tmp_path), {}
    config["run"] |= {"max_steps": 5, "save_every": 1, "keep_checkpoints": 5}
    save_checkpoint, seconds = checkpoint.save_checkpoint, iter([0] * 5 + [0.5] + [0] * 4)
    monkeypatch.setattr(
        saver_room, "save_checkpoint", lambda *args: time.sleep(next(seconds)) or save_checkpoint(*args)
    )
    for name in "quick", "slow":
        done = run(tmp_path, config, "--run.output_dir", tmp_path / name)
        saved[name] = load_file(next((done.folder / "checkpoints" / "step-00000001").glob("*.safetensors")))
    assert difference(saved["slow"], saved["quick"]) == 0


def test_a_checkpoint_that_is_the_best_no_more_goes(tmp_path):
    """Also if that is known after the last save."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 6, "save_every": 2, "eval_every": 2, "keep_checkpoints": 1, "keep_best": True}
    done = run(tmp_path, config)
    losses = done.logged("eval/loss")
    assert losses[2] < losses[1] < losses[0] and done.checkpoints == ["step-00000006"]


def test_the_export_is_named_by_what_it_is(tmp_path, monkeypatch):
    """Where the best checkpoint is damaged when the run ends, the model is that of the last step."""
    monkeypatch.setattr(export, "kept_best", lambda *_: None)
    config = config_of_noise(tmp_path)
    config["run"] |= {"max_steps": 12, "keep_best": True}
    done = run(tmp_path, config)
    losses = done.logged("eval/loss")
    assert min(losses) < losses[-1] and "/model (last step) loads" in done.output
    assert done.status == {"status": "finished", "step": 12}  # So that run.hub pushes it as that.


def test_a_best_checkpoint_that_stays_behind_is_told(tmp_path):
    """The one of a fork is the best of its own evaluations, which may be worse."""
    config = config_of_noise(tmp_path)
    config["run"] |= {"max_steps": 12, "keep_best": True}
    best, last = run(tmp_path, config).checkpoints[0], 12
    assert best != f"step-{last:08d}"
    words = ("--run.output_dir", tmp_path / "fork", "--run.max_steps", last + 2)
    fork = run(tmp_path, config, *resume_from(Done(0, "", tmp_path / "run"), last), *words)
    assert f"Best checkpoint passed over: {fork.folder}/checkpoints/{best} is not there\n" in fork.output


def test_the_best_is_kept_and_exported(tmp_path):
    """The best step, here of an earlier launch, is kept beside the newest, and is what model/ holds."""
    config = config_of_noise(tmp_path)
    config["run"] |= {"keep_checkpoints": 1, "keep_best": True}
    names = {}
    for max_steps in 12, 20:
        done = run(tmp_path, config, "--run.max_steps", max_steps)
        losses = {line["step"]: line["eval/loss"] for line in done.metrics if "eval/loss" in line}
        best = names[max_steps] = f"step-{min(losses, key=losses.get):08d}"
        assert done.checkpoints == [best, f"step-{max_steps:08d}"]
        saved = load_file(next((done.folder / "checkpoints" / best).glob("*.safetensors")))
        saved = {name.removeprefix("model."): tensor for name, tensor in saved.items() if name.startswith("model.")}
        assert difference(done.weights, saved) == 0 and f"({best})" in done.output
    assert names[12] == names[20]  # Otherwise the second launch has nothing to remember.
    config["run"] |= {"max_steps": 20, "keep_best": False, "output_dir": str(tmp_path / "last")}
    last = run(tmp_path, config, "--run.keep_checkpoints", 9)  # An evaluation saves nothing by itself.
    assert last.checkpoints == ["step-00000020"] and difference(last.weights, done.weights) > 1e-3
    # It is not asked for any more: the last step is exported again.
    config["run"] |= {"max_steps": 20, "output_dir": str(done.folder)}
    (done.folder / "status.json").unlink()
    again = run(tmp_path, config)
    assert "(last step)" in again.output and difference(again.weights, last.weights) == 0
