"""What run.after_save does: a command for each complete checkpoint, such as one that copies it to object storage."""

import os
import subprocess
import threading
from pathlib import Path

from samerun.errors import is_main_process, say


class AfterSave:
    """Runs the command in the background, on the main process, for one checkpoint at a time.

    While it runs, only the newest checkpoint waits. A failure is said and counted, and ends nothing.
    """

    def __init__(self, command: str | None):
        self.command = command if is_main_process() else None
        self.lock = threading.Lock()
        self.worker: threading.Thread | None = None
        self.waiting: Path | None = None
        self.failures = 0

    def begin(self, checkpoint: Path) -> None:
        """Called when a checkpoint is complete, or has been noted in once more."""
        if not self.command:
            return
        with self.lock:
            self.waiting = checkpoint
            if self.worker is None:
                self.worker = threading.Thread(target=self.work, daemon=True)  # A run that fails does not wait.
                self.worker.start()

    def work(self) -> None:
        while True:
            with self.lock:
                checkpoint, self.waiting = self.waiting, None
                if checkpoint is None:
                    self.worker = None
                    return
            self.run(checkpoint)

    def run(self, checkpoint: Path) -> None:
        path = checkpoint.resolve()
        places = {"CHECKPOINT": str(path), "RUN_FOLDER": str(path.parent.parent)}
        done = subprocess.run(
            self.command,
            shell=True,
            env=os.environ | places,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the run. It does not end a copy.
        )
        if done.returncode:
            self.failures += 1
            told = done.stdout.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
            status = f"exit status {done.returncode}, {self.failures} so far"
            say(f"run.after_save failed for {checkpoint.name} ({status}): {told[-1]}")

    def finish(self) -> None:
        """Return when the command has run for the last checkpoint."""
        with self.lock:
            worker = self.worker
        if worker:
            say("Waiting for run.after_save.")
            worker.join()
