"""Trackers beside metrics.jsonl: a run is one curve in each of them, however often and wherever it is continued."""

import json
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker

from samerun.config import Run
from samerun.errors import as_user_error, one_line, require, say
from samerun.files import replace_file
from samerun.run.folder import RunFolder

# What a tracker calls a run that goes on: its options, of the name and the id of the run.
RUN_OPTIONS = {
    "wandb": lambda name, id: {"name": name, "id": id, "resume": "allow"},
    "comet_ml": lambda name, id: {"experiment_key": id, "mode": "get_or_create"},
    "trackio": lambda name, id: {"name": f"{name}-{id[:8]}", "resume": "allow"},  # It knows runs by their names.
    "swanlab": lambda name, id: {"experiment_name": name, "id": id, "resume": "allow"},
}
# Trackers that choose the id of a run themselves: the option that names it, and where the tracker has it.
OWN_IDS = {
    "mlflow": ("run_id", lambda tracker: tracker.info.run_id),
    "aim": ("run_hash", lambda tracker: tracker.hash),
}

BEGUN = []  # Of each call of main(), its trackers, which end_training() takes out, and the program's own run of W&B.


def start_trackers(
    folder: RunFolder, accelerator: Accelerator, config: Run, settings: dict[str, Any], project: str, step: int
) -> None:
    """Let Accelerate's trackers go on after this step. trackers.json in the run folder has the ids of the run."""
    name, note = folder.path.resolve().name, folder.path / "trackers.json"
    ids = read_ids(note)
    ids.setdefault("id", uuid.uuid4().hex)
    given = config.tracker_options
    unknown = given.keys() - LOGGER_TYPE_TO_CLASS.keys()  # With "all", the config could name any.
    known = ", ".join(LOGGER_TYPE_TO_CLASS)
    require(not unknown, f"run.tracker_options: {', '.join(sorted(unknown))} is not a tracker; there are {known}")
    options = {tracker: of_run(name, ids["id"]) for tracker, of_run in RUN_OPTIONS.items()}
    options["mlflow"] = {"run_name": name}
    for tracker, (option, _) in OWN_IDS.items():
        if tracker in ids:
            options.setdefault(tracker, {})[option] = ids[tracker]
    options = {tracker: options.get(tracker, {}) | given.get(tracker, {}) for tracker in options | given}
    with as_user_error("run.trackers: cannot start one of them; see run.tracker_options"):
        # Accelerate's own would have the name of the project, and folders of settings beside the curves.
        board = TensorBoardTracker(
            name, folder.path / "tensorboard", **{"purge_step": step + 1} | options.pop("tensorboard", {})
        )
        accelerator.log_with = [board if str(kind) == "tensorboard" else kind for kind in accelerator.log_with]
        of_program = getattr(sys.modules.get("wandb"), "run", None)
        try:
            accelerator.init_trackers(project, init_kwargs=options)
        finally:
            BEGUN.append((accelerator.trackers, of_program))
    folder.track = log_to_each(accelerator.trackers)
    for tracker in accelerator.trackers:  # Only the main process has any.
        if tracker is board:
            board.writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in settings.items()))
        elif tracker.name not in ids:  # MLflow refuses other values for a run that has some.
            tracker.store_init_configuration({name: str(value) for name, value in settings.items()})
        if tracker.name in OWN_IDS:
            ids[tracker.name] = OWN_IDS[tracker.name][1](tracker.tracker)
    if accelerator.trackers:
        replace_file(note, json.dumps(ids))


def end_left_trackers() -> None:
    """End those of a call of main() that has failed. Otherwise, W&B logs the next run into the curve of this one, and
    MLflow refuses the next run."""
    while BEGUN:
        trackers, of_program = BEGUN.pop()
        for tracker in trackers:
            with suppress(Exception):  # It may not have been started. Then it has no run, which is its `tracker`.
                if tracker.name == "wandb":
                    if tracker.tracker is not of_program:
                        tracker.tracker.finish(exit_code=1)
                elif tracker.name == "mlflow" and tracker.tracker:  # MLflow would also end one of the program.
                    import mlflow

                    mlflow.end_run("FAILED")
                else:
                    tracker.finish()


def log_to_each(trackers: list[Any]) -> Callable:
    """What logs to all of these. What one raises is said once, and ends nothing: metrics.jsonl has it all."""
    failed = set()

    def log(metrics: dict[str, Any], step: int) -> None:
        for tracker in trackers:
            try:
                tracker.log(metrics, step=step)
            except Exception as error:  # Each tracker has its own.
                if tracker.name not in failed:
                    say(f"run.trackers: {tracker.name}: {one_line(error)}. The run goes on; this is said once.")
                failed.add(tracker.name)

    return log


def read_ids(note: Path) -> dict[str, str]:
    """What trackers.json holds; nothing for a new run, for one that an earlier version of this script began, or where
    the file is damaged."""
    try:
        return {name: id for name, id in dict(json.loads(note.read_text())).items() if isinstance(id, str)}
    except (OSError, ValueError, TypeError):
        return {}
