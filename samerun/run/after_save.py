"""What run.after_save does: a command for each complete checkpoint, such as one that copies it to object storage."""

import json
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from samerun.errors import is_main_process, one_line, say
from samerun.files import replace_file, size_and_sample
from samerun.meeting import OF_A_LAUNCH

# What launchers set for their ranks, or how such names begin.
LAUNCHED = (*OF_A_LAUNCH, "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
LAUNCHED += ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_")
LAUNCHED += ("ACCELERATE_USE_", "FSDP_", "PARALLELISM_CONFIG_")


def run_apart(command: str | list[str], **variables: str) -> tuple[int, str]:
    """Run a shell command or a program, outside of the launch. Returns its exit status and last line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    done = subprocess.run(
        command,
        shell=isinstance(command, str),
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for the run. It does not end a copy.
    )
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return done.returncode, lines[-1] if lines else "it printed nothing"


class Background:
    """Does something in the background, on the main process, for one checkpoint at a time.

    While it works, only the newest checkpoint waits. A failure is said and counted, and ends nothing.
    """

    setting = ""  # The one that asks for it.

    def __init__(self, is_wanted: bool):
        self.is_wanted = is_wanted and is_main_process()
        self.lock = threading.Lock()
        self.worker: threading.Thread | None = None
        self.waiting: Path | None = None
        self.failures = 0

    def begin(self, checkpoint: Path) -> None:
        """Called when a checkpoint is complete, or has been noted in once more."""
        if not self.is_wanted:
            return
        with self.lock:
            if self.worker:
                self.waiting = checkpoint
                return
            # It has its checkpoint from the start: before it comes to ask for one, a newer one may wait.
            self.worker = threading.Thread(target=self.work, args=[checkpoint], daemon=True)  # A failed run ends it.
            self.worker.start()

    def work(self, checkpoint: Path | None) -> None:
        while checkpoint:
            try:
                self.run(checkpoint)
            except Exception as error:
                self.failures += 1
                say(f"{self.setting} failed for {checkpoint.name} ({self.failures} so far): {one_line(error)}")
            with self.lock:
                checkpoint, self.waiting = self.waiting, None
                if checkpoint is None or not checkpoint.exists():  # A save deletes old ones before it brings its own.
                    checkpoint = self.worker = None

    def run(self, checkpoint: Path) -> None:
        """Do it for a checkpoint. What goes wrong is raised."""
        raise NotImplementedError

    def finish(self) -> None:
        """Return when it is done for the last checkpoint."""
        with self.lock:
            worker = self.worker
        if worker:
            say(f"Waiting for {self.setting}.")
            while worker.is_alive():
                worker.join(1)  # Without a limit, Python would not answer a signal that came just before.


class AfterSave(Background):
    setting = "run.after_save"

    def __init__(self, command: str | None):
        super().__init__(command is not None)
        self.command = command

    def make_up_for(self, checkpoint: Path) -> None:
        """Begin with the newest checkpoint of an earlier launch, unless that has done it: it may have been killed."""
        try:
            is_done = self.note_of(checkpoint).read_text() == self.told_of(checkpoint)
        except OSError:
            is_done = False
        if not is_done and checkpoint.exists():
            self.begin(checkpoint)

    def run(self, checkpoint: Path) -> None:
        note, told = self.note_of(checkpoint), self.told_of(checkpoint)
        status, last_line = run_apart(self.command, CHECKPOINT=str(checkpoint.absolute()), RUN_FOLDER=str(note.parent))
        if status:
            raise RuntimeError(f"exit status {status}: {last_line}")
        with suppress(OSError):  # Then it is done once more.
            replace_file(note, told)

    def note_of(self, checkpoint: Path) -> Path:
        """Where it is noted what was done last. The folder of the run may have a link to that of its checkpoints."""
        return checkpoint.absolute().parent.parent / "after_save.json"

    def told_of(self, checkpoint: Path) -> str:
        """The manifest tells a checkpoint from an earlier one of the step, and from what was noted in it later."""
        manifest = size_and_sample(checkpoint / "manifest.json")
        return json.dumps({"command": self.command, "checkpoint": checkpoint.name, "manifest": manifest}) + "\n"
