"""Save checkpoints in the background; end a run whose numbers are not finite any more."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from samerun.errors import name_place
from samerun.optim import BEYOND_FP16, Guard
from samerun.run.after_save import AfterSave
from samerun.run.checkpoint import Progress, checkpoint_name, list_checkpoints, note_in_checkpoint, save_checkpoint
from samerun.run.hub import PushCheckpoints
from samerun.run.launch import new_host_group
from samerun.run.replicas import check_copies
from samerun.run.setup import Setup


class Saver:
    """Saves checkpoints in the background, one at a time."""

    def __init__(self, setup: Setup, record: dict[str, Any], checkpoint: tuple[Path, dict] | None):
        self.setup = setup
        self.folder = setup.folder.checkpoints
        self.record = record
        self.group = new_host_group(setup.accelerator)
        # Not a DefaultStager: that of torch 2.11 and 2.12 fails the second time.
        self.stager = StateDictStager(pin_memory=setup.accelerator.device.type == "cuda")
        self.pool = ThreadPoolExecutor(1)
        self.pending: list[Future] = []
        self.after_save = AfterSave(setup.config.run.after_save)
        self.pushes = PushCheckpoints(setup.config)
        self.saved_step = 0  # The last one with a checkpoint in the folder of this run.
        if checkpoint and checkpoint[0].parent == self.folder:
            self.saved_step = checkpoint[1]["step"]
            self.after_save.make_up_for(checkpoint[0])

    def save(self, progress: Progress) -> None:
        """Returns as soon as the state is copied to the memory of the host.

        If the step has a checkpoint already, only its manifest is written anew, once it is complete. Step 0 has none.
        """
        if progress.step == 0:
            return
        self.setup.folder.check_is_held()
        progress.expert_load = self.setup.parallel.expert_load()
        keep = self.setup.config.run.keep_checkpoints
        if progress.step == self.saved_step:
            known = {name: self.record[name] for name in ("evaluation", "evaluations")} | asdict(progress)
            self.in_background(progress, note_in_checkpoint, self.folder, keep, known)
            return
        self.wait()
        check_copies(self.setup.wrapped, self.group)
        state = self.stager.stage(self.setup.parallel.state_to_save(self.setup.wrapped, self.setup.optimizers))
        manifest = {**self.record, **asdict(progress)}
        self.in_background(progress, save_checkpoint, self.folder, keep, state, manifest, self.group)
        self.saved_step = progress.step

    def in_background(self, progress: Progress, work: Callable, *arguments: Any) -> None:
        """Do what leaves a complete checkpoint of this step."""
        checkpoint = self.folder / checkpoint_name(progress.step)
        is_pushed = self.pushes.every == "save" or progress.is_best()

        def run() -> None:
            work(*arguments)
            self.after_save.begin(checkpoint)
            if is_pushed:
                self.pushes.begin(checkpoint)

        self.pending.append(self.pool.submit(run))

    def wait(self) -> None:
        """Raises what went wrong with the last save."""
        while self.pending:
            done = self.pending.pop(0)
            if error := done.exception():
                name_place(error, self.folder)
                self.pool.shutdown()  # Its thread lets go of the run, whose folder is locked as long as anybody has it.
            done.result()

    def wait_for_background(self) -> None:
        """Return when all that is done for complete checkpoints is done."""
        self.after_save.finish()
        self.pushes.finish()


def check_skipped(setup: Setup, guard: Guard, saver: Saver, progress: Progress) -> None:
    """Raises ArithmeticError for too many skipped updates in a row, and notes their number. Waits for the device."""
    progress.skipped_steps, progress.skipped_in_a_row = guard.read()
    if progress.skipped_in_a_row <= guard.max_skipped_steps:
        return
    first = progress.step - progress.skipped_in_a_row + 1
    saver.wait()
    stage = setup.stage_at(first)
    rows = setup.train_data.rows_at(stage.row_of(first), stage.plan.global_batch_size).tolist()
    good = (list_checkpoints(setup.folder.checkpoints) or ["none"])[-1]
    told = f"the loss or gradient norm of step {first} is not finite; that update was not made"
    if setup.accelerator.mixed_precision == "fp16":
        told += f"; {BEYOND_FP16}"
    raise ArithmeticError(f"{told}. Rows: {rows}. Last good checkpoint: {good}")
