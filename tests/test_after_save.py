"""run.after_save: a command for each complete checkpoint, in the background, which never ends a run."""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import difference, launch, run, tiny_config

from samerun.errors import Stopped
from samerun.run import after_save as room
from samerun.run.after_save import AfterSave, Background
from samerun.run.checkpoint import note_in_checkpoint


def wait_for(file: Path | str) -> str:
    """A command that ends when the file is there: after 200 s at the latest."""
    return f'for each in $(seq 2000); do test -e "{file}" && break; sleep 0.1; done'


def config_of(folder: Path, command: str, **more) -> dict:
    config = tiny_config(folder)
    # All are kept: the command may come to one when the run has saved others.
    config["run"] |= {"max_steps": 10, "save_every": 5, "keep_checkpoints": 9, "after_save": command, **more}
    return config


def test_a_copy_continues_the_run(tmp_path):
    """Copied by the command as it is documented, brought back into another folder, and continued there."""
    storage = tmp_path / "storage"
    copy = f'mkdir -p {storage} && cp -r "$CHECKPOINT" {storage}/ && test -d "$RUN_FOLDER/checkpoints"'
    done = launch(tmp_path, config_of(tmp_path, copy), processes=2, warm=True)
    assert "failed" not in done.output
    names = sorted(path.name for path in storage.iterdir())
    assert names == done.checkpoints == ["step-00000005", "step-00000010"]
    manifest = json.loads((storage / "step-00000010" / "manifest.json").read_text())
    files = {path.name for path in (storage / "step-00000010").iterdir()}
    assert files == {*manifest["files"], "manifest.json"}
    assert manifest["evaluated_step"] == 10  # The evaluation came later, and the command was run once more.
    back = tmp_path / "elsewhere"
    shutil.copytree(storage / "step-00000005", back / "checkpoints" / "step-00000005")
    again = run(tmp_path, config_of(tmp_path, "true"), "--run.output_dir", back)
    assert again.launches == [5] and difference(again.weights, done.weights) < 1e-5


def test_a_failure_is_said_and_counted(tmp_path):
    done = run(tmp_path, config_of(tmp_path, "echo first; echo no room there >&2; exit 3"))
    said = re.findall(r"run.after_save failed for (\S+) \((\d+) so far\): exit status 3: (.*)", done.output)
    assert said[0] == ("step-00000005", "1", "no room there") and done.status["status"] == "finished"
    assert [int(count) for _, count, _ in said] == list(range(1, len(said) + 1)) and said[-1][0] == "step-00000010"


def test_what_an_earlier_launch_has_not_done_is_made_up_for(tmp_path):
    """It failed, or its launch was killed. What is done is not done again."""
    room, log = tmp_path / "room", tmp_path / "log"
    config = config_of(tmp_path, f'test -d {room} && basename "$CHECKPOINT" >> {log}')
    assert "run.after_save failed for step-00000010" in run(tmp_path, config).output
    room.mkdir()
    for _ in range(2):
        assert "Finished already" in run(tmp_path, config).output
        assert log.read_text() == "step-00000010\n"
    (tmp_path / "run" / "after_save.json").unlink()
    run(tmp_path, config, "--run.max_steps", 12)
    assert log.read_text().splitlines()[1] == "step-00000010" and log.read_text().endswith("step-00000012\n")


def test_a_finished_run_that_is_stopped_meanwhile_stays_finished(tmp_path):
    room, file = tmp_path / "room", tmp_path / "go"
    config = config_of(tmp_path, f"test -d {room} && kill -TERM $PPID && {wait_for(file)}")
    run(tmp_path, config)
    room.mkdir()
    done = run(tmp_path, config)
    assert "Finished already" in done.output
    assert not (tmp_path / "run" / "after_save.json").exists()  # The launch has not waited for the end of the command.
    file.touch()
    assert done.status == {"status": "finished", "step": 10}


def checkpoint_of(folder: Path, name: str, manifest: str = "{}") -> Path:
    """One with a manifest, and no weights."""
    checkpoint = folder / "run" / "checkpoints" / name
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "manifest.json").write_text(manifest)
    return checkpoint


def test_what_is_noted_in_a_checkpoint_later_is_not_done_yet(tmp_path):
    """Such as its evaluation. What an earlier launch has copied before that does not count."""
    one = AfterSave(f'cat "$CHECKPOINT/manifest.json" >> {tmp_path / "log"}')
    one.make_up_for(tmp_path / "run" / "checkpoints" / "step-0")  # Which is gone.
    one.finish()
    for manifest in "{}", "{}", '{"evaluated_step": 1}':
        one.make_up_for(checkpoint_of(tmp_path, "step-1", manifest))
        one.finish()
    one.make_up_for(checkpoint_of(tmp_path, "step-2", '{"evaluated_step": 1}'))
    one.finish()
    assert (tmp_path / "log").read_text() == "{}" + 2 * '{"evaluated_step": 1}' and one.failures == 0
    other = AfterSave(f"touch {tmp_path / 'other'}")
    other.make_up_for(checkpoint_of(tmp_path, "step-2", '{"evaluated_step": 1}'))
    other.finish()
    assert (tmp_path / "other").exists()


def test_what_is_noted_meanwhile_is_not_done_yet(tmp_path):
    one = AfterSave(f'echo "{{}} " > "$CHECKPOINT/manifest.json"; echo done >> {tmp_path / "log"}')
    checkpoint = checkpoint_of(tmp_path, "step-1")
    for _ in range(3):  # The second time, nothing changes.
        one.make_up_for(checkpoint)
        one.finish()
    assert (tmp_path / "log").read_text() == "done\n" * 2


@pytest.mark.parametrize(("command", "told"), [("exit 3", "it printed nothing"), (r"printf '\377'; exit 3", "\ufffd")])
def test_what_a_command_prints_may_be_nothing_or_no_text(tmp_path, capsys, command, told):
    one = AfterSave(command)
    one.begin(checkpoint_of(tmp_path, "step-1"))
    one.finish()
    assert f"(1 so far): exit status 3: {told}\n" in capsys.readouterr().out


def test_what_cannot_be_noted_is_done_once_more(tmp_path):
    """It is no failure of the command. Here a folder has the name of the note."""
    (tmp_path / "run" / "after_save.json").mkdir(parents=True)
    one = AfterSave(f"echo done >> {tmp_path / 'log'}")
    for _ in range(2):
        one.make_up_for(checkpoint_of(tmp_path, "step-1"))
        one.finish()
    assert (tmp_path / "log").read_text() == "done\n" * 2 and one.failures == 0


def test_a_command_that_is_killed_has_failed(tmp_path):
    one = AfterSave("kill -9 $$")
    one.begin(checkpoint_of(tmp_path, "step-1"))
    one.finish()
    assert one.failures == 1


def test_what_is_copied_has_only_whole_files(tmp_path, monkeypatch):
    """Also while something is noted in a checkpoint."""
    checkpoint = checkpoint_of(tmp_path, "step-00000001")
    seen, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: seen.append(os.listdir(checkpoint)) or replace(*paths))
    note_in_checkpoint(checkpoint.parent, 2, {"step": 1, "evaluated_step": 1, "best_checkpoint": None})
    assert seen == [["manifest.json"]] and json.loads((checkpoint / "manifest.json").read_text())["evaluated_step"] == 1
    assert [path.name for path in checkpoint.parent.iterdir()] == ["step-00000001"]


def slow_command(file: Path | str, log: Path) -> str:
    """A command that says when it begins and ends, which is when the file is there."""
    name = '$(basename "$CHECKPOINT")'
    return f"echo begin {name} >> {log}; {wait_for(file)}; sleep 0.2; echo end {name} >> {log}"


def test_one_at_a_time_and_then_the_newest(tmp_path, monkeypatch):
    log, file, said = tmp_path / "log", tmp_path / "go", []
    monkeypatch.setattr(room, "say", lambda text: said.append(text) or file.touch())
    one = AfterSave(slow_command(file, log))
    for step in range(1, 5):
        one.begin(checkpoint_of(tmp_path, f"step-{step}"))
        while one.worker and not (log.exists() and log.read_text()):  # Until the first one has begun.
            time.sleep(0.01)
    assert log.read_text() == "begin step-1\n"  # Nobody waits.
    assert one.worker.daemon  # Nor does a run that fails.
    one.finish()
    assert said == ["Waiting for run.after_save."]
    lines = log.read_text().splitlines()
    assert lines == ["begin step-1", "end step-1", "begin step-4", "end step-4"] and one.failures == 0


def test_the_first_one_has_its_turn(tmp_path, monkeypatch):
    """However late its thread begins, and however soon the next one comes."""
    work = AfterSave.work
    monkeypatch.setattr(AfterSave, "work", lambda *args: time.sleep(0.2) or work(*args))
    one = AfterSave(f'basename "$CHECKPOINT" >> {tmp_path / "log"}')
    for step in 1, 2, 3:
        one.begin(checkpoint_of(tmp_path, f"step-{step}"))
    one.finish()
    assert (tmp_path / "log").read_text() == "step-1\nstep-3\n"


def test_one_that_is_gone_before_its_turn_is_passed_over(tmp_path):
    """The next save deletes it, which may take long, and only then says that its own is complete."""
    log, gate = tmp_path / "log", tmp_path / "gate"
    os.mkfifo(gate)
    one = AfterSave(
        f'test "$CHECKPOINT" = {tmp_path}/run/checkpoints/step-1 && cat {gate}; basename $CHECKPOINT >> {log}'
    )
    one.begin(checkpoint_of(tmp_path, "step-1"))
    one.begin(waiting := checkpoint_of(tmp_path, "step-2"))
    worker = one.worker
    shutil.rmtree(waiting)
    gate.write_text("")  # Now the first one ends.
    worker.join()
    one.begin(checkpoint_of(tmp_path, "step-3"))
    one.finish()
    assert log.read_text() == "step-1\nstep-3\n" and one.failures == 0


def test_a_signal_that_does_not_interrupt_the_wait(monkeypatch):
    """Such as one that comes just before the wait, or that another thread receives."""
    is_waited_for, is_over, ended = threading.Event(), threading.Event(), []

    class Signalled(Background):
        setting = "run.after_save"

        def run(self, checkpoint: Path) -> None:
            is_waited_for.wait()
            time.sleep(0.2)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            is_over.wait(60)
            ended.append(checkpoint)

    def stop(number: int, frame):
        raise Stopped("SIGTERM")

    monkeypatch.setattr(room, "say", lambda text: is_waited_for.set())
    signal.signal(signal.SIGTERM, stop)
    one = Signalled(True)
    one.begin(Path())
    with pytest.raises(Stopped):
        one.finish()
    assert not ended
    is_over.set()


def test_its_environment(tmp_path, monkeypatch):
    """The command is one process, no rank, and not reached by Ctrl-C. The checkpoints may have a disk of their own."""
    of_ranks = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"}
    of_ranks |= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ANY", "ACCELERATE_USE_ANY", "FSDP_ANY"}
    of_ranks |= {"ROLE_NAME", "ROLE_WORLD_SIZE", "PARALLELISM_CONFIG_ANY"}
    for name in of_ranks:
        monkeypatch.setenv(name, "0")
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    session = f"{sys.executable} -c 'import os; print(os.getsid(0))'"
    one = AfterSave(f"cd /; env > {tmp_path / 'environment'}; {session} > {tmp_path / 'session'}")
    monkeypatch.chdir(tmp_path)
    one.begin(checkpoint_of(Path(), "step-1"))
    one.finish()
    told = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)
    assert told["RUN_FOLDER"] == str(tmp_path / "run")
    assert told["CHECKPOINT"] == str(tmp_path / "run" / "checkpoints" / "step-1")
    assert told["PATH"] == os.environ["PATH"] and not told.keys() & of_ranks
    assert int((tmp_path / "session").read_text()) != os.getsid(0) and one.failures == 0


def test_only_the_main_process_runs_it(tmp_path, monkeypatch):
    checkpoint, log = checkpoint_of(tmp_path, "step-1"), tmp_path / "log"
    for rank in "1", "0":
        monkeypatch.setenv("RANK", rank)
        one = AfterSave(f"echo {rank} >> {log}")
        one.begin(checkpoint)
        one.finish()
    assert log.read_text() == "0\n"


def test_the_run_does_not_wait_while_it_trains(tmp_path):
    """Only at its end, for the last checkpoint."""
    log = tmp_path / "log"
    command = slow_command("$RUN_FOLDER/model", log)  # By then, the last checkpoint is what waits.
    run(tmp_path, config_of(tmp_path, command, save_every=2))
    lines = log.read_text().splitlines()
    assert lines[:2] == ["begin step-00000002", "end step-00000002"] and lines[-1] == "end step-00000010"
    assert not {"begin step-00000004", "begin step-00000006", "begin step-00000008"} & {*lines}
