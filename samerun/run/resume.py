"""Continue a run, begin one with the weights of another, or end one that is finished; what a manifest says of a run."""

import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from samerun.config import FROZEN, ROW_ORDER, ROWS, Config
from samerun.data.mixture import Mixture
from samerun.dotted import config_fields, flat_settings, flatten, setting_of
from samerun.errors import Stopped, require, say
from samerun.run.after_save import AfterSave
from samerun.run.agreement import settings_of
from samerun.run.changes import (
    changes_of_model,
    check_same_adapter,
    check_same_frozen,
    check_same_model,
    check_unchanged,
    say_if_code_has_changed,
    say_if_launched_otherwise,
    say_if_others_are_held_out,
    say_if_rate_differs,
    say_if_rows_are_others,
    say_if_rows_do_not_follow,
    say_if_rows_repeat,
    say_if_sources_do_not_follow,
)
from samerun.run.checkpoint import Progress, checkpoint_name, load_checkpoint, progress_in, verify_checkpoint
from samerun.run.folder import RunFolder, kept_best
from samerun.run.hub import push_export
from samerun.run.launch import describe_launch
from samerun.run.setup import Setup


def flat_config(setup: Setup) -> dict[str, Any]:
    """The config by dotted names, the rows, their order, and frozen weights: what must stay the same when a run is
    continued."""
    more = {ROWS: setup.train_data.fingerprint(), ROW_ORDER: setup.train_data.order.name}
    if setup.frozen_weights is not None:
        more[FROZEN] = setup.frozen_weights
    return flat_settings(setup.config) | more


def run_record(setup: Setup, versions: dict[str, str], code: dict[str, str]) -> dict[str, Any]:
    """What the manifest of a checkpoint says about the run, besides its progress."""
    return {
        "config": flat_config(setup),
        "sources": setup.train_data.fingerprints() if isinstance(setup.train_data, Mixture) else {},
        "model": flatten(settings_of(setup.model)),
        "max_steps": setup.max_steps,
        "plan": asdict(setup.plan),
        "evaluation": eval_fingerprint(setup, setup.followed()) if setup.eval_data else None,
        "evaluations": [eval_fingerprint(setup, name) for name in setup.eval_data],
        "versions": versions,
        "code": code,
        "launch": describe_launch(setup.accelerator, setup.parallel.layout),
    }


def eval_fingerprint(setup: Setup, name: str) -> int:
    """A checksum of the rows that an evaluation is of: their numbers, and all tokens of their data."""
    data = setup.eval_data[name]
    of_data = zlib.crc32(str(data.fingerprint()).encode())  # A fork's may be a number or a text.
    return zlib.crc32(np.asarray(setup.eval_rows(data), np.int64), of_data)


def note_other_evaluations(
    setup: Setup, progress: Progress, path: Path, manifest: dict[str, Any], record: dict[str, Any]
) -> None:
    """Forget losses of other rows. Let a run that is over make evaluations of its last step that it has not made."""
    before, now = manifest.get("evaluation"), record["evaluation"]  # Older manifests do not say it, nor the others.
    if None not in (before, now) and before != now:
        say("The evaluation is not of the same rows as before: its lowest loss so far does not count any more.")
        progress.forget_best()
        progress.forget_lowest()
    made, all_now = manifest.get("evaluations"), set(record["evaluations"])
    made = set(made) if isinstance(made, list) else all_now
    if not setup.is_over(progress):
        return
    is_new_folder = path.parent != setup.folder.checkpoints
    loses_none = made < all_now and before in (None, now)  # In the log, they take the place of those made before.
    if is_new_folder or loses_none:
        progress.evaluated_step = progress.step - 1
        if setup.lacks_evaluation(progress):
            progress.evaluations_in_vain -= 1  # It will be counted again.
    elif all_now - made:
        say(f"The last step keeps its evaluation. For another one, give run.resume {path} and a new run.output_dir.")


def resume(
    setup: Setup, checkpoint: tuple[Path, dict] | None, record: dict[str, Any], learning_rate_at: Callable
) -> Progress:
    """Load the checkpoint to continue from or, into a new run, the weights of run.init_from.

    `learning_rate_at` is that of train.py.
    """
    run = setup.config.run
    if checkpoint is None:
        if run.init_from:
            load_initial_weights(setup, Path(run.init_from), record)
        return Progress()

    path, manifest = checkpoint
    check_unchanged(setup, path, manifest, record)
    if not any(name.startswith(("model", "data.tokenizer")) for name in run.allow_changes):
        check_same_model(setup, path, manifest.get("model", {}), record["model"])
    say_if_launched_otherwise(manifest, record)
    say_if_code_has_changed(manifest.get("code", {}), record["code"])
    progress = progress_in(manifest)
    require(
        progress.step <= setup.max_steps,
        f"run.max_steps, max_epochs or max_tokens: the run would end after step {setup.max_steps:,}, and {path} "
        f"is of a later one; give a length of at least {progress.step:,} steps, or choose a new run.output_dir",
    )
    note_other_evaluations(setup, progress, path, manifest, record)
    # The best checkpoint is gone, or no longer wanted: the next evaluation is the best one again.
    if not (run.keep_best and kept_best(setup.folder, progress)):
        progress.forget_best()
    if progress.step < setup.max_steps:  # All of this is about the steps to come.
        say_if_rate_differs(setup, progress.step, manifest, learning_rate_at)
        say_if_rows_do_not_follow(setup, progress)
        say_if_rows_are_others(progress.rows, manifest, record)
        say_if_sources_do_not_follow(setup, progress, manifest["config"], record["config"])
    if not setup.is_over(progress) or not setup.folder.is_finished(progress.step):
        load_checkpoint(path, setup.parallel, setup.wrapped, setup.optimizers)
        setup.parallel.continue_expert_load(progress.expert_load)
        say(f"Continuing after step {progress.step:,} from {path}, on the schedule of {setup.max_steps:,} steps.")
    return progress


def load_initial_weights(setup: Setup, path: Path, record: dict[str, Any]) -> None:
    """Load the weights of run.init_from. Raises UserError if they are none of this model, and says what differs."""
    manifest = verify_checkpoint(path, setup.folder.meeting)
    check_same_adapter(path, manifest["config"], record["config"])
    check_same_frozen(path, manifest["config"], record["config"], setup.config)
    for difference in changes_of_model(manifest.get("model", {}), record["model"]):
        say(f"run.init_from: the model of these weights differs in {difference}.")
    load_checkpoint(path, setup.parallel, setup.wrapped, [])
    say_if_rows_repeat(path, manifest["config"], record["config"])
    say_if_others_are_held_out(path, manifest["config"], record["config"])


def is_finished_already(folder: RunFolder, config: Config, checkpoint: tuple[Path, dict] | None) -> bool:
    """Whether a run with this very config, but for where it lies, is finished: the same answer on all ranks."""
    if checkpoint is None:
        return False
    theirs, ours = checkpoint[1]["config"], flat_settings(config)
    places, settings = {"run.output_dir", "run.resume"}, config_fields(type(config))
    names = ours.keys() | {name for name in theirs if setting_of(name) in settings}  # Such as a source that is gone.
    is_same = all(theirs.get(name) == ours.get(name) for name in names - places)
    return folder.meeting.by_main(lambda: is_same) and folder.is_finished(checkpoint[1]["step"])


def end_finished(folder: RunFolder, config: Config, progress: Progress, max_steps: int) -> None:
    """Say that all steps are done, and make up for what an earlier launch has not copied or pushed."""
    step = progress.step
    advice = "Raise run.patience" if config.run.patience and step < max_steps else "Add steps"
    say(f"Finished already: {folder.path}, step {step:,}. {advice}, or choose a new run.output_dir.")
    after_save = AfterSave(config.run.after_save)
    with suppress(Stopped):  # The run is as finished as it was, and the same command tries again.
        after_save.make_up_for(folder.checkpoints / checkpoint_name(step))
        after_save.finish()
        push_export(config)
