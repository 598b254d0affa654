"""Save in the background; continue a run, or refuse; end one that is beyond repair."""

import re
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from samerun.cli import is_within
from samerun.config import FROZEN, ROW_ORDER, ROWS, Config, config_fields, flatten, setting_of
from samerun.errors import Stopped, UserError, name_place, require, say
from samerun.optim import Guard
from samerun.run.after_save import AfterSave
from samerun.run.agreement import OF_NO_MODEL, settings_of
from samerun.run.checkpoint import (
    Progress,
    advice_to_allow,
    changed_settings,
    checkpoint_name,
    is_allowed,
    list_checkpoints,
    load_checkpoint,
    note_in_checkpoint,
    progress_in,
    save_checkpoint,
    verify_checkpoint,
)
from samerun.run.folder import RunFolder, kept_best
from samerun.run.hub import PushCheckpoints, push_export
from samerun.run.launch import describe_launch, new_host_group
from samerun.run.replicas import check_copies
from samerun.run.setup import Setup


def flat_config(setup: Setup) -> dict[str, Any]:
    """The config by dotted names, the rows, their order, and frozen weights: what must stay the same when a run is
    continued."""
    more = {ROWS: setup.train_data.fingerprint(), ROW_ORDER: setup.train_data.order.name}
    if setup.frozen_weights is not None:
        more[FROZEN] = setup.frozen_weights
    return flatten({**setup.config.model_dump(), **more})


def run_record(setup: Setup, versions: dict[str, str], code: dict[str, str]) -> dict[str, Any]:
    """What the manifest of a checkpoint says about the run, besides its progress."""
    return {
        "config": flat_config(setup),
        "model": flatten(settings_of(setup.model)),
        "max_steps": setup.max_steps,
        "plan": asdict(setup.plan),
        "evaluation": eval_fingerprint(setup) if setup.eval_data else None,
        "versions": versions,
        "code": code,
        "launch": describe_launch(setup.accelerator, setup.parallel.layout),
    }


def eval_fingerprint(setup: Setup) -> int:
    """A checksum of the rows that the evaluation loss is of: their numbers, and all tokens of their data."""
    data = setup.eval_data[setup.followed()]
    of_data = zlib.crc32(str(data.fingerprint()).encode())  # A fork's may be a number or a text.
    return zlib.crc32(np.asarray(setup.eval_rows(data), np.int64), of_data)


def resume(setup: Setup, checkpoint: tuple[Path, dict] | None, record: dict[str, Any]) -> Progress:
    """Load the checkpoint to continue from or, into a new run, the weights of run.init_from."""
    run = setup.config.run
    if checkpoint is None:
        if run.init_from:
            load_initial_weights(setup, Path(run.init_from), record)
        return Progress()

    path, manifest = checkpoint
    check_unchanged(setup, path, manifest["config"], record["config"])
    if not any(name.startswith(("model", "data.tokenizer", "data.special_tokens")) for name in run.allow_changes):
        check_same_model(path, manifest.get("model", {}), record["model"])
    say_if_launched_otherwise(manifest.get("launch", {}), record["launch"])
    say_if_code_has_changed(manifest.get("code", {}), record["code"])
    progress = progress_in(manifest)
    require(
        progress.step <= setup.max_steps,
        f"run.max_steps, max_epochs or max_tokens: the run would end after step {setup.max_steps:,}, and {path} "
        f"is of a later one; give a length of at least {progress.step:,} steps, or choose a new run.output_dir",
    )
    if manifest.get("evaluation", record["evaluation"]) != record["evaluation"]:  # Older manifests do not say it.
        say("The evaluation is not of the same rows as before: its lowest loss so far does not count any more.")
        progress.forget_best()
        progress.forget_lowest()
    # The best checkpoint is gone, or no longer wanted: the next evaluation is the best one again.
    if not (run.keep_best and kept_best(setup.folder, progress)):
        progress.forget_best()
    say_if_rows_do_not_follow(setup, progress)
    say_if_sources_do_not_follow(progress.rows, manifest["config"], record["config"])
    if not setup.is_over(progress) or not setup.folder.is_finished(progress.step):
        load_checkpoint(path, setup.parallel, setup.wrapped, setup.optimizers)
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


def check_same_adapter(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises UserError for a whole model where this run has an adapter, or the reverse. What else differs, such as the
    scale of the adapter, is said."""
    was_whole, is_whole = (config.get("model.lora", {}) is None for config in (theirs, ours))
    was, wanted, export = "a whole model", "an adapter", "--export"
    if is_whole:
        was, wanted, export = "an adapter", "a whole model", "--export with --merge"
    advice = f"make a model of it by {export} and the config of its run, and give that as model.pretrained"
    refusal = f"run.init_from: {path} is of {was}, and with this model.lora the run trains {wanted}; {advice}"
    require(was_whole == is_whole, refusal)
    for name in sorted(theirs.keys() | ours.keys()):
        if is_within(name, "model.lora") and theirs.get(name) != ours.get(name):
            say(f"run.init_from: {name}: {theirs.get(name)!r} in the checkpoint, {ours.get(name)!r} now.")


def check_same_frozen(path: Path, theirs: dict[str, Any], ours: dict[str, Any], config: Config) -> None:
    """Raises UserError if the weights of run.init_from were trained above others, unless that is allowed."""
    before, now = theirs.get(FROZEN), ours.get(FROZEN)
    if before is None or now is None or before == now:  # Older manifests do not say it.
        return
    told = f"run.init_from: {path} was trained above other frozen weights than those of model.pretrained now"
    allow = advice_to_allow(config, [FROZEN])
    require(is_allowed(config, FROZEN), f"{told}; give its model, or start all the same: {allow}")
    say(f"{told}.")


def check_same_model(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises UserError if the transformers config is another one, but for what another version of transformers adds."""
    changed = [f"  {difference}" for difference in changes_of_model(before, now)]
    advice = "Choose a new run.output_dir, or continue with it: --run.allow_changes '[model.pretrained]'"
    told = [f"{path} is of a model with another config:", *changed, advice]
    require(not changed, "\n".join(told))


def changes_of_model(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two transformers configs, of the settings that both of them have."""
    return [
        f"{name}: {before[name]!r} in the checkpoint, {now[name]!r} now"
        for name in sorted(before.keys() & now.keys())
        if name.rpartition(".")[2] not in OF_NO_MODEL and before[name] != now[name]
    ]


def say_if_launched_otherwise(before: dict[str, str], now: dict[str, str]) -> None:
    """The run may go on in another precision, which changes what it computes, but not in silence."""
    changed = [name for name in ("precision", "launcher") if before.get(name, now[name]) != now[name]]
    if changed:
        told = [f"{name} {before[name]} in the checkpoint, {now[name]} now" for name in changed]
        say(f"The launch is not as before: {'; '.join(told)}.")


def say_if_code_has_changed(before: dict[str, str], now: dict[str, str]) -> None:
    """A fork's loss or data may compute something else now. Whether that was meant, only its author knows."""
    changed = [name for name in before.keys() & now.keys() if before[name] != now[name]]
    if changed:
        first, *others = sorted(changed, key=lambda name: (name.count("/"), name))  # What lies beside train.py first.
        say(f"The code is not as it was before: {first}{f', and others: {len(others)}' if others else ''}.")


def say_if_rows_do_not_follow(setup: Setup, progress: Progress) -> None:
    """With another batch than before, which run.allow_changes may let pass, a step stands for other rows."""
    step = progress.step + 1
    next_row = setup.stage_at(step).row_of(step)
    if step <= setup.max_steps and next_row != progress.rows:
        say(
            f"Earlier steps had another batch: {progress.rows:,} rows are done, and step {step:,} begins after "
            f"{next_row:,} rows of the stream. To go on with the next row, list the steps so far in batch.warmup, and "
            "name that in run.allow_changes."
        )


def say_if_sources_do_not_follow(rows: int, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """With other weights than before, which run.allow_changes may let pass, each source goes on where it would be if it
    had had them from the start."""
    before, now = rows_of_sources(rows, theirs), rows_of_sources(rows, ours)
    moved = [name for name in now if now[name] != before.get(name, 0)]
    if before and moved:
        moves = "; ".join(f"{name} after about {now[name]:,} rows, not {before.get(name, 0):,}" for name in moved)
        say(
            "Earlier steps had other weights. Each source goes on where the new ones would have brought it, and so "
            f"leaves out or repeats rows: {moves}."
        )


def rows_of_sources(rows: int, config: dict[str, Any]) -> dict[str, int]:
    """How many of so many rows of a mixture are of each source, by a flattened config, to within a block."""
    found = {name: re.fullmatch(r"data\.sources\.([\w-]+)\.weight", name) for name in config}
    weights = {match[1]: Fraction(str(config[name])) for name, match in found.items() if match}
    return {name: int(rows * weight / sum(weights.values())) for name, weight in weights.items()}


def is_finished_already(folder: RunFolder, config: Config, checkpoint: tuple[Path, dict] | None) -> bool:
    """Whether a run with this very config, but for where it lies, is finished: the same answer on all ranks."""
    if checkpoint is None:
        return False
    theirs, ours = checkpoint[1]["config"], flatten(config.model_dump())
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


# Where the data, their tokenizer and their chat template lie. Whether they are the same is told by the rows.
PLACES = re.compile(r"data\.(sources\.[\w-]+\.)?(path|name|files|split|tokenizer|chat_template)")


def check_unchanged(setup: Setup, checkpoint: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises UserError if the config or the data has changed so much that this would be another run.

    Says which of the changes run.allow_changes lets pass.
    """
    theirs = {FROZEN: ours.get(FROZEN)} | theirs  # Older manifests do not say it.
    same_rows = theirs.get(ROWS) == ours[ROWS]
    changed, passed = {}, {}
    for name, before, now in changed_settings(type(setup.config), theirs, ours):
        if same_rows and PLACES.fullmatch(name):
            continue
        told = passed if is_allowed(setup.config, name) else changed
        told[name] = f"  {name}: {before!r} in the checkpoint, {now!r} now"
    if ROWS in changed and "strftime_now" in str(getattr(setup.tokenizer, "chat_template", "")):
        changed[ROWS] += (
            ". The chat template writes today's date: fix it by data.chat_template_kwargs, such as "
            "{date_string: 26 Jul 2024}, if the template reads that, or in a template of your own"
        )
    if FROZEN in changed:
        changed[FROZEN] += ". model.pretrained is another model than before, under the same name"
    if ROW_ORDER in changed:
        changed[ROW_ORDER] += ". Finish the run with the version of the script that began it"
    if changed:
        allow = advice_to_allow(setup.config, [*passed, *changed])
        advice = f"Choose a new run.output_dir, or continue with these changes: {allow}"
        raise UserError("\n".join([f"{checkpoint} is of another config:", *changed.values(), advice]))
    if passed:
        say("\n".join(["run.allow_changes: this run goes on with other settings:", *passed.values()]))


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
        self.saved_step = 0  # The last one with a checkpoint in the folder of this run. Step 0 needs none.
        if checkpoint and checkpoint[0].parent == self.folder:
            self.saved_step = checkpoint[1]["step"]
            self.after_save.make_up_for(checkpoint[0])

    def save(self, progress: Progress) -> None:
        """Returns as soon as the state is copied to the memory of the host.

        If the step has a checkpoint already, only its manifest is written anew, once it is complete.
        """
        keep = self.setup.config.run.keep_checkpoints
        if progress.step == self.saved_step:
            self.in_background(progress, note_in_checkpoint, self.folder, keep, asdict(progress))
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
    raise ArithmeticError(
        f"the loss or gradient norm of step {first} is not finite; that update was not made. "
        f"Rows: {rows}. Last good checkpoint: {good}"
    )
