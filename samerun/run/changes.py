"""How a launch differs from the checkpoint that it goes on from: what is refused, and what is only said."""

import math
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from samerun.config import FROZEN, GONE, MAY_CHANGE, ROW_ORDER, ROWS, Config
from samerun.dotted import config_fields, flat_settings, is_within, setting_of, unflatten
from samerun.errors import UserError, require, say
from samerun.run.agreement import OF_NO_MODEL
from samerun.run.checkpoint import Progress
from samerun.run.setup import Setup

# Where the data, their tokenizer and their chat template lie. Whether they are the same is told by the rows.
PLACES = re.compile(r"data\.(sources\.[\w-]+\.)?(path|name|files|split|tokenizer|chat_template)")


def check_unchanged(setup: Setup, checkpoint: Path, manifest: dict[str, Any], record: dict[str, Any]) -> None:
    """Raises UserError if the config or the data has changed so much that this would be another run.

    Says which of the changes run.allow_changes lets pass.
    """
    ours = record["config"]
    theirs = {FROZEN: ours.get(FROZEN)} | manifest["config"]  # Older manifests do not say it.
    same_rows = theirs.get(ROWS) == ours[ROWS]
    changed, passed = {}, {}
    for name, before, now in changed_settings(type(setup.config), theirs, ours):
        if same_rows and PLACES.fullmatch(name):
            continue
        told = passed if is_allowed(setup.config, name) else changed
        told[name] = f"  {name}: {before!r} in the checkpoint, {now!r} now"
        if name == ROWS and (others := changed_sources(manifest, record)):
            told[name] += f". Sources with other rows: {', '.join(others)}"
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
        allow = advice_to_allow(setup.config, [*setup.config.run.allow_changes, *changed])
        advice = f"{advice_to_begin(setup, checkpoint)}, or continue with these changes: {allow}"
        raise UserError("\n".join([f"{checkpoint} is of another config:", *changed.values(), advice]))
    if passed:
        say("\n".join(["run.allow_changes: this run goes on with other settings:", *passed.values()]))


def advice_to_begin(setup: Setup, checkpoint: Path) -> str:
    """How to begin another run than that of a checkpoint, which run.resume may have named."""
    is_own = checkpoint.parent == setup.folder.checkpoints
    return "Choose a new run.output_dir" if is_own else "Begin a new run, perhaps with its weights by run.init_from"


def changed_sources(manifest: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """The sources of both runs that now have other rows. Older manifests do not list them."""
    before, now = manifest.get("sources", {}), record["sources"]
    return [name for name in now if name in before and before[name] != now[name]]


def changed_settings(
    kind: type[Config], theirs: dict[str, Any], ours: dict[str, Any]
) -> Iterable[tuple[str, Any, Any]]:
    """What must not change and has: its name, its value in a manifest, and its value now, of two flattened configs.

    A setting that is newer than the manifest had its default.
    """
    defaults = defaults_beside(kind, theirs)
    for name in {**ours, **theirs}:
        before, now = theirs.get(name, defaults.get(name)), ours.get(name)
        if before != now and not may_change(kind, name):
            yield name, before, now


def defaults_beside(kind: type[Config], theirs: dict[str, Any]) -> dict[str, Any]:
    """The defaults of what a manifest lacks because it is older, flattened: of settings, and of parts of a section.

    A setting that it has as a value, or as a dictionary, lacks nothing.
    """
    config, known = kind.model_construct(), {setting_of(name) for name in theirs}

    def is_newer(name: str) -> bool:
        setting = setting_of(name)
        section, field = setting.split(".")
        has_parts = isinstance(getattr(getattr(config, section), field), BaseModel)
        return setting not in known or (has_parts and setting not in theirs)

    return {name: default for name, default in flat_settings(config).items() if is_newer(name)}


def may_change(kind: type[Config], name: str) -> bool:
    """Whether a run may be continued with another value of this setting; `name` is its dotted path, or longer."""
    field = config_fields(kind).get(setting_of(name))
    return field is not None and MAY_CHANGE in field.metadata


def is_allowed(config: Config, name: str) -> bool:
    """Whether run.allow_changes lets a change of this name pass, or of what it is a part of."""
    return any(is_within(name_of_change(config, name), setting) for setting in config.run.allow_changes)


def name_of_change(config: Config, name: str) -> str:
    """What run.allow_changes calls it. A setting that the code has lost cannot be named there."""
    is_gone = "." in name and setting_of(name) not in config_fields(type(config))  # ROWS and the like have no dot.
    return GONE if is_gone else name


def advice_to_allow(config: Config, names: Iterable[str]) -> str:
    """The option that lets these changes pass. One word stands for all settings of a source."""
    words = [".".join(name_of_change(config, name).split(".")[:3]) for name in names]
    return f"--run.allow_changes '[{', '.join(dict.fromkeys(words))}]'"


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


def say_if_rows_repeat(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """run.init_from begins at step 0 of the order that the seed decides."""
    if all(theirs.get(name) == ours[name] for name in (ROWS, "run.seed")):
        say(f"run.init_from: {path} is of a run that began with the same rows.")


def say_if_others_are_held_out(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """The seed also decides which documents data.eval_fraction holds out."""
    is_same_data = all(theirs.get(name) == now for name, now in ours.items() if name.startswith("data."))
    if ours["data.eval_fraction"] and is_same_data and theirs.get("run.seed") != ours["run.seed"]:
        told = "another run.seed makes data.eval_fraction hold out other documents"
        say(f"run.init_from: {told}, which {path} may have learned.")


def check_same_model(setup: Setup, path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises UserError if the transformers config is another one, but for what another version of transformers adds."""
    changed = [f"  {difference}" for difference in changes_of_model(before, now)]
    allow = advice_to_allow(setup.config, [*setup.config.run.allow_changes, "model.pretrained"])
    advice = f"{advice_to_begin(setup, path)}, or continue with it, if its weights are as large as those: {allow}"
    told = [f"{path} is of a model with another config:", *changed, advice]
    require(not changed, "\n".join(told))


def changes_of_model(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two transformers configs, of the settings that both of them have."""
    return [
        f"{name}: {before[name]!r} in the checkpoint, {now[name]!r} now"
        for name in sorted(before.keys() & now.keys())
        if name.rpartition(".")[2] not in OF_NO_MODEL and before[name] != now[name]
    ]


def say_if_launched_otherwise(manifest: dict[str, Any], record: dict[str, Any]) -> None:
    """The run may go on in another precision or with other libraries, which may change what it computes, but not in
    silence."""
    before, now = (found.get("launch", {}) | found.get("versions", {}) for found in (manifest, record))
    names = [name for name in now if name not in ("layout", "git")]  # Any layout is the same run. Code is told apart.
    changed = [name for name in names if before.get(name, now[name]) != now[name]]
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
    if next_row != progress.rows:
        say(
            f"Earlier steps had another batch: {progress.rows:,} rows are done, and step {step:,} begins after "
            f"{next_row:,} rows of the stream. To go on with the next row, list the steps so far in batch.warmup, and "
            "name that in run.allow_changes."
        )


def say_if_rate_differs(setup: Setup, step: int, manifest: dict[str, Any], learning_rate_at: Callable) -> None:
    """Where a schedule of another length or kind goes on, the learning rate may jump after the step of a checkpoint."""
    now, settings = setup.config.optim, manifest["config"].items()
    try:
        theirs = unflatten({k.removeprefix("optim."): v for k, v in settings if k.startswith("optim.")})
        # Settings of a fork that are newer than the manifest had their defaults.
        known = {name: theirs[name] for name in theirs.keys() & type(now).model_fields}
        before = type(now).model_validate(known, strict=False)  # A tuple was written as a list.
    except (ValidationError, TypeError, AttributeError):  # This code would refuse them, or a key has a dot.
        return
    was = learning_rate_at(before, step, manifest.get("max_steps", step), before.learning_rate)
    would_be = learning_rate_at(now, step, setup.max_steps, now.learning_rate)
    if not math.isclose(was, would_be):
        say(f"Step {step:,} had a learning rate of {was:.4g}; on this schedule, it would have had {would_be:.4g}.")


def say_if_rows_are_others(rows: int, manifest: dict[str, Any], record: dict[str, Any]) -> None:
    """With other data, or another order, which run.allow_changes may let pass, nobody knows which rows come again."""
    theirs, ours = manifest["config"], record["config"]
    are_others = theirs.get(ROWS) != ours[ROWS]
    before, sources = manifest.get("sources"), record["sources"]
    if before and sources:  # What other weights change, say_if_sources_do_not_follow() says.
        kept = [name for name in before if name in sources]
        are_others = kept != [name for name in sources if sources[name] == before.get(name)]
    if are_others or theirs.get("run.seed") != ours["run.seed"]:
        say(
            f"Earlier steps had other rows, or another order. The run goes on {rows:,} rows after the beginning of the "
            "new ones, so rows may be left out or repeated; epochs and run.max_tokens count as if all steps had them."
        )


def say_if_sources_do_not_follow(
    setup: Setup, progress: Progress, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    """With other weights than before, which run.allow_changes may let pass, each source goes on where it would be if it
    had had them from the start."""
    before, now = rows_of_sources(setup, progress, theirs), rows_of_sources(setup, progress, ours)
    moved = [name for name in now if now[name] != before.get(name, 0)]
    if before and moved:
        moves = "; ".join(f"{name} after about {now[name]:,} rows, not {before.get(name, 0):,}" for name in moved)
        say(
            "Earlier steps had other weights. Each source goes on where the new ones would have brought it, and so "
            f"leaves out or repeats rows: {moves}. To go on with the next row of each, keep the weights up to now, and "
            f"add the new ones to data.stages, from_step {progress.step + 1} or later."
        )


def rows_of_sources(setup: Setup, progress: Progress, config: dict[str, Any]) -> dict[str, int]:
    """How many rows of each source of a mixture there are so far, by a flattened config, to within a block."""
    found = {name: re.fullmatch(r"data\.sources\.([\w-]+)\.weight", name) for name in config}
    first = {match[1]: config[name] for name, match in found.items() if match}
    stages = [{"from_step": 1, "weights": first}, *config.get("data.stages", [])]
    begins = [stage["from_step"] for stage in stages]
    begins = [min(progress.rows, setup.stage_at(step).row_of(step)) for step in begins] + [progress.rows]
    counts = dict.fromkeys(first, Fraction())
    for stage, begin, end in zip(stages, begins, begins[1:]):
        weights = {name: Fraction(str(weight)) for name, weight in stage["weights"].items()}
        for name, weight in weights.items():
            counts[name] += (end - begin) * weight / sum(weights.values())
    return {name: int(count) for name, count in counts.items()}
