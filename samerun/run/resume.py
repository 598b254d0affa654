"""Save in the background; continue a run, or refuse."""

import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from samerun.config import Config, flatten, may_change
from samerun.data.order import ORDER, shuffle
from samerun.errors import UserError, require, say
from samerun.run.checkpoint import Progress, load_checkpoint, progress_in, save_checkpoint, verify_checkpoint
from samerun.run.folder import kept_best, library_versions
from samerun.run.launch import new_host_group
from samerun.run.setup import Setup


def flat_config(setup: Setup) -> dict[str, Any]:
    """The config by dotted names, and the rows and their order: what must stay the same when a run is continued."""
    rows = {"data fingerprint": setup.train_data.fingerprint(), "order of the rows": ORDER}
    return flatten({**setup.config.model_dump(), **rows})


def run_record(setup: Setup) -> dict[str, Any]:
    """What the manifest of a checkpoint says about the run, besides its progress."""
    return {
        "config": flat_config(setup),
        "max_steps": setup.max_steps,
        "plan": asdict(setup.plan),
        "evaluation": eval_fingerprint(setup) if setup.eval_data else None,
        "versions": library_versions(),
    }


def eval_fingerprint(setup: Setup) -> int:
    """A checksum of the rows that the evaluation loss is of."""
    data = setup.eval_data[setup.followed()]
    rows = setup.eval_rows(data)
    lengths, _ = data.sizes(rows)
    checksum = zlib.crc32(lengths.astype(np.int32))
    for row in rows[shuffle(np.arange(100), len(rows), seed=0)]:
        checksum = zlib.crc32(data.read(row).tobytes(), checksum)
    return checksum


def resume(setup: Setup, found: tuple[Path, dict] | None, record: dict[str, Any]) -> Progress:
    """Load the checkpoint to continue from or, into a new run, the weights of run.init_from."""
    run = setup.config.run
    if found is None:
        if run.init_from:
            verify_checkpoint(Path(run.init_from))
            load_checkpoint(Path(run.init_from), setup.parallel, setup.model, [])
        return Progress()

    checkpoint, manifest = found
    if not run.allow_changes:
        check_unchanged(type(setup.config), checkpoint, manifest["config"], record["config"])
    progress = progress_in(manifest)
    require(
        progress.step <= setup.max_steps,
        f"run.max_steps, max_epochs or max_tokens: the run would end after step {setup.max_steps:,}, and {checkpoint} "
        f"is of a later one; give a length of at least {progress.step:,} steps, or choose a new run.output_dir",
    )
    if manifest.get("evaluation", record["evaluation"]) != record["evaluation"]:  # Older manifests do not say it.
        say("The evaluation is not of the same rows as before: its lowest loss so far does not count any more.")
        progress.forget_best()
        progress.forget_lowest()
    # The best checkpoint is gone, or no longer wanted: the next evaluation is the best one again.
    if not (run.keep_best and kept_best(setup.folder, progress)):
        progress.forget_best()
    if not setup.is_over(progress) or not setup.folder.is_finished():
        load_checkpoint(checkpoint, setup.parallel, setup.model, setup.optimizers)
        say(f"Continuing after step {progress.step:,} from {checkpoint}, on the schedule of {setup.max_steps:,} steps.")
    return progress


def check_unchanged(kind: type[Config], checkpoint: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises UserError if the config or the data has changed so much that this would be another run."""
    require(
        theirs.get("order of the rows") == ORDER,
        f"{checkpoint} is of another version of train.py, which shuffles the rows in another order. Finish the run "
        "with that version, choose a new run.output_dir, or continue in the new order: --run.allow_changes true",
    )
    defaults = flatten(kind.model_construct().model_dump())  # For settings that are newer than the checkpoint.
    changed = []
    for name in {**ours, **theirs}:
        before, now = theirs.get(name, defaults.get(name)), ours.get(name)
        if before != now and not may_change(kind, name):
            changed.append(f"  {name}: {before!r} in the checkpoint, {now!r} now")
    if changed:
        advice = "Choose a new run.output_dir, or continue with these changes: --run.allow_changes true"
        raise UserError("\n".join([f"{checkpoint} is of another config:", *changed, advice]))


class Saver:
    """Saves checkpoints in the background, one at a time."""

    def __init__(self, setup: Setup, record: dict[str, Any], step: int):
        self.setup = setup
        self.folder = setup.folder.checkpoints
        self.record = record
        self.group = new_host_group(setup.accelerator)
        # Not a DefaultStager: that of torch 2.11 and 2.12 fails the second time.
        self.stager = StateDictStager(pin_memory=setup.accelerator.device.type == "cuda")
        self.pool = ThreadPoolExecutor(1)
        self.pending: Future | None = None
        self.saved_step = step

    def save(self, progress: Progress) -> None:
        """Returns as soon as the state is copied to the memory of the host."""
        self.wait()
        state = self.stager.stage(self.setup.parallel.state(self.setup.model, self.setup.optimizers))
        manifest = {**self.record, **asdict(progress)}
        keep = self.setup.config.run.keep_checkpoints
        self.pending = self.pool.submit(save_checkpoint, self.folder, keep, state, manifest, self.group)
        self.saved_step = progress.step

    def wait(self) -> None:
        """Raises what went wrong with the last save."""
        if self.pending:
            self.pending.result()
