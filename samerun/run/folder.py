"""run.output_dir: its lock, status, metrics and config."""

import json
import math
import os
import re
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from samerun.config import Config
from samerun.errors import (
    Stopped,
    UserError,
    as_user_error,
    is_lost_rank,
    is_main_process,
    name_place,
    one_line,
    original,
    require,
    say,
)
from samerun.files import delete, replace_file, whole_lines
from samerun.meeting import Meeting
from samerun.run.checkpoint import Progress, list_checkpoints, step_of, verify_checkpoint
from samerun.run.launch import StopSignal
from samerun.yaml12 import to_yaml


class RunFolder:
    """run.output_dir. All ranks write checkpoints; the main process writes the rest, and holds the folder's lock."""

    # Seconds to wait for the lock. After a kill of the launcher its ranks may still save: for 20 s, see StopSignal, or
    # for 30 s under torchrun.
    PATIENCE = 45

    def __init__(self, path: str, meeting: Meeting):
        self.meeting = meeting
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.track: Callable = lambda metrics, step: None  # Until start_trackers(). It then gives them to the trackers.
        self.lock = FileLock(self.path / ".lock")
        self.held: os.stat_result | None = None  # The lock's file.
        self.logged_step: int | None = None  # None until begin().
        self.failure: OSError | None = None  # Of a log line.
        self.saved_step = 0  # The last one that was seen to have a checkpoint in this folder.
        self.exported_step: int | None = None  # That of the best checkpoint, if it has been exported.
        self.is_ours = False  # Whether what is in the folder is of this run, as far as that is known.
        # Those that this launch will make, the innermost first. A refused launch removes them.
        self.new_folders = []
        if is_main_process():
            self.new_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]

    def __enter__(self) -> "RunFolder":
        if is_main_process():
            with as_user_error(f"run.output_dir {self.path}: not writable, or in use by another run; choose another"):
                try:
                    self.lock.acquire(timeout=0)
                except Timeout:
                    holder = self.read_status().get("process", "another process")
                    say(f"{self.path} is in use, by {holder} if that still runs. Waiting for {self.PATIENCE} s.")
                    StopSignal.raises = True  # Launchers kill 30 s after a signal.
                    if StopSignal.requested:
                        raise Stopped(StopSignal.requested) from None
                    self.lock.acquire(timeout=self.PATIENCE)
                    StopSignal.raises = False
                self.held = os.stat(self.lock.lock_file)
        return self

    def __exit__(self, kind, error, traceback) -> bool:
        """A launch that fails says why in status.json. One that was refused leaves no folder behind.

        One that is stopped before its first step has not failed: its error is not passed on.
        """
        is_stopped = isinstance(error, Stopped)
        if is_stopped:
            StopSignal.raises = False  # Nothing is left for another signal to stop.
            if self.is_ours:
                self.set_status("stopped", self.look_for_saved())
            self.meeting.stopped_by = str(error)
            say(f"Stopped by {error} before the first step; the same command continues.")
        elif is_main_process():
            if error and self.logged_step is not None:
                self.note_failure(one_line(original(error)) or kind.__name__)
                if is_lost_rank(error):  # The meeting will ask which one. Otherwise, a parent may use the folder again.
                    self.meeting.note_failure = self.note_failure
            with suppress(OSError):  # A parent may hold another run by now.
                if self.new_folders and os.listdir(self.path) == [".lock"]:
                    (self.path / ".lock").unlink()
                    for folder in self.new_folders:
                        folder.rmdir()
        # The lock stays until this process ends, or nobody refers to this object: the next launch begins after that.
        return is_stopped

    def note_failure(self, reason: str) -> None:
        status = {"status": "failed", "step": self.logged_step, "reason": reason}
        try:
            self.set_status(**status)
        except OSError:  # On a full disk there may still be the place that the file has already.
            with suppress(OSError), open(self.path / "status.json", "r+") as file:
                file.write(self.status_line(**status) + "\n")
                file.truncate()

    def look_for_saved(self) -> int:
        """The last step with a checkpoint, 0 for none. It stays the answer where the disk of checkpoints/ is lost."""
        self.saved_step = max([self.saved_step, *map(step_of, list_checkpoints(self.checkpoints))])
        return self.saved_step

    def take_over(self) -> None:
        """Raises UserError unless the folder is new or holds a run."""
        if is_main_process():
            is_folder = self.checkpoints.is_dir() or not os.path.lexists(self.checkpoints)
            require(is_folder, f"run.output_dir: {self.checkpoints} is neither a folder nor a link to one")
            for file in (self.path / "status.json", self.path / "config.yaml"):
                require(not file.is_dir(), f"run.output_dir: {file} is a folder, not a file; move it away")
            self.check_that_nothing_is_lost()
            self.is_ours = True

    def check_shared(self) -> None:
        """Raises UserError if it is another folder for some rank than for the main process, which has the lock by now.

        The main process makes a file there that no launch before has made, so neither a leftover of another launch nor
        what a network disk remembers of one is mistaken for it.
        """
        name = self.meeting.by_main(lambda: f".shared-{uuid.uuid4().hex}.tmp")
        try:
            self.meeting.by_main((self.path / name).touch)
            self.meeting.together(lambda: self.check_sees(name))
        finally:
            if is_main_process():
                (self.path / name).unlink(missing_ok=True)

    def check_sees(self, name: str) -> None:
        is_shared = (self.path / name).exists()
        require(is_shared, f"run.output_dir {self.path} is another folder on {self.meeting.host}; share one")
        own = self.path / name.replace(".tmp", f"-{self.meeting.rank}.tmp")
        with as_user_error(f"run.output_dir: {self.meeting.host} cannot write in {self.path}"):
            own.touch()
            own.unlink()

    def check_that_nothing_is_lost(self) -> None:
        """Raises UserError if this launch would replace what another run, or the user, left here."""
        if self.look_for_saved():
            return  # It continues from there.
        status, model = self.read_status(), self.path / "model"
        has_ended = status["status"] == "finished" or (status["status"] == "stopped" and status["step"] != 0)
        has_saved = has_ended or "saved_step" in status or (status["status"] and model.exists())
        other = f"{self.path} holds a run ({status['status']}, step {status['step']}) without its checkpoints"
        require(not has_saved, f"run.output_dir: {other}; choose another folder")
        foreign = [model] if model.exists() else []
        if not os.path.lexists(self.path / "status.json"):  # A run writes it before these.
            files = self.path / "config.yaml", self.path / "metrics.jsonl"
            foreign += [file for file in files if file.exists() and file.stat().st_size > 0]
        names = " and ".join(map(str, foreign))
        advice = "which would replace it; choose a new run.output_dir"
        require(not foreign, f"run.output_dir: {names} is not of this run, {advice}")

    def begin(self, config: Config, progress: Progress, notes: list[dict[str, Any]]) -> None:
        """Prepare the folder for the steps to come: delete what a killed launch left half done, forget the metrics of
        what will be done again, and write down config and status. The notes are the last lines of config.yaml."""
        self.meeting.by_main(lambda: self.begin_on_main(config, progress, notes))

    def begin_on_main(self, config: Config, progress: Progress, notes: list[dict[str, Any]]) -> None:
        """begin(), of which the other ranks only hear what it refuses."""
        file, metrics = self.metrics_until(progress)
        for leftover in self.leftovers():
            delete(leftover)
        self.log_status(progress.step)  # First, so that who kills the run now leaves a folder that is known as a run's.
        replace_file(file, metrics)
        settings = to_yaml(config.model_dump())
        comments = [f"# {json.dumps(note)}\n" for note in notes]
        replace_file(self.path / "config.yaml", settings + "".join(comments))

    def check_is_held(self) -> None:
        """Raises UserError if the folder is another one by now. A lock keeps nobody from deleting a folder, and from
        starting another run there: this one would write into its files."""
        if is_main_process() and os.path.exists(self.lock.lock_file):
            is_same = os.path.samestat(self.held, os.stat(self.lock.lock_file))
            if not is_same:
                self.logged_step, self.new_folders = None, []  # So that nothing is noted or removed there.
            require(is_same, f"run.output_dir {self.path} was replaced, and another run uses it; this one has ended")

    def log_status(self, step: int) -> None:
        """Write down that the run goes on, and has come to this step."""
        self.logged_step = step
        self.set_status("running", step, process=f"process {os.getpid()} on {socket.gethostname()}")

    def leftovers(self) -> list[Path]:
        """Names that this script alone gives, to what it has not finished to write or to delete."""
        of_checkpoint = re.compile(r"\.step-\d{8,}(\.old)?\.tmp")
        hidden = [path for path in self.checkpoints.glob(".step-*.tmp") if of_checkpoint.fullmatch(path.name)]
        names = ("config.yaml", "status.json", "metrics.jsonl", "model", "model.old")
        hidden += [*self.path.glob(".shared-*.tmp"), *self.path.glob(".hub-*.tmp")]
        return [*hidden, *(self.path / f".{name}.tmp" for name in names)]

    def metrics_until(self, progress: Progress) -> tuple[Path, str]:
        """The file of metrics.jsonl, and what to keep of it: later steps and evaluations will be logged again, and a
        last line may be cut short."""

        def is_done(line: dict[str, Any]) -> bool:
            return line["step"] <= (progress.evaluated_step if "eval/loss" in line else progress.step)

        metrics = Path(os.path.realpath(self.path / "metrics.jsonl"))  # A link stays one.
        is_usable = metrics.is_file() or (not metrics.exists() and metrics.parent.is_dir())
        require(is_usable, f"run.output_dir: {self.path}/metrics.jsonl is neither a file nor a link to one; remove it")
        if not metrics.exists():
            return metrics, ""
        with as_user_error(f"run.output_dir: {metrics} is damaged; fix it, or move it away"):
            kept = [line for line in whole_lines(metrics) if is_done(json.loads(line))]
        return metrics, "".join(kept)

    def set_status(self, status: str, step: int, **more: str) -> None:
        if is_main_process():
            self.look_for_saved()
            text = self.status_line(status, step, **more)
            replace_file(self.path / "status.json", text, lasting=status != "running")

    def status_line(self, status: str, step: int, **more: str) -> str:
        """The text of status.json. That of a run that goes on or has failed also has the last saved step, if any."""
        has_ended = status in ("stopped", "finished")  # Then `step` is saved.
        saved = {"saved_step": self.saved_step} if self.saved_step and not has_ended else {}
        exported = {"exported_step": self.exported_step} if status == "finished" and self.exported_step else {}
        return json.dumps({"status": status, "step": step, **saved, **exported, **more})

    def is_finished(self, step: int) -> bool:
        """Whether nothing is left to do after this step: the same answer on all ranks, however late a network disk is.

        A model that the user has deleted is exported again.
        """

        def is_over() -> bool:
            status = self.read_status()
            has_ended = status["status"] == "finished" and status["step"] == step
            return has_ended and (self.path / "model").exists()

        return self.meeting.by_main(is_over)

    def read_status(self) -> dict[str, Any]:
        """What set_status() wrote last. The status is empty in a new folder."""
        try:
            return {"status": "", "step": 0} | json.loads((self.path / "status.json").read_text())
        except (OSError, ValueError, TypeError):  # None, or not one of ours.
            return {"status": "", "step": 0}

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Write to metrics.jsonl and to the trackers. JSON knows no NaN or infinity: they become null."""
        self.check_is_held()
        metrics = {name: None if is_not_finite(value) else value for name, value in metrics.items()}
        known = {name: value for name, value in metrics.items() if value is not None}
        try:
            if is_main_process():
                with open(self.path / "metrics.jsonl", "a") as file:
                    file.write(json.dumps({"step": step, **metrics}) + "\n")
                self.log_status(step)
        except OSError as error:  # A checkpoint may have another disk, or others may make room in time.
            name_place(error, self.path)
            self.failure = self.failure or error
            StopSignal.requested = "a disk that fails"
        self.track(known, step=step)

    def raise_log_failure(self) -> None:
        """Raises what went wrong with a log line. All ranks have saved by now: the status notes it."""
        if self.failure:
            raise self.failure
        self.log_status(self.logged_step)


def kept_best(folder: RunFolder, progress: Progress) -> Path | None:
    """The checkpoint with the lowest evaluation loss, unless it is gone or damaged: the same answer on all ranks."""
    best = folder.checkpoints / progress.best_checkpoint
    if not progress.best_checkpoint:
        return None
    if not folder.meeting.by_main(best.exists):  # As after run.resume with one of another folder.
        say(f"Best checkpoint passed over: {best} is not there")
        return None
    try:
        verify_checkpoint(best, folder.meeting)
    except UserError as error:
        say(f"Best checkpoint passed over: {error}")
        return None
    return best


def is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
