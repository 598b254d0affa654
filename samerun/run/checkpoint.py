"""Checkpoints: written, verified, found, loaded."""

import json
import math
import re
import shutil
import sys
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from samerun.cli import describe
from samerun.errors import AgreedError, UserError, as_user_error, is_main_process, require, say
from samerun.files import replace_file, replace_folder, size_and_checksum, sync
from samerun.meeting import Meeting
from samerun.model.outline import unwrapped
from samerun.parallel.mesh import Parallelism
from samerun.parallel.state import without_wrappers


@dataclass
class Progress:
    """How far the run has come. The manifest of a checkpoint holds all of it."""

    step: NonNegativeInt = 0
    skipped_steps: NonNegativeInt = 0  # Steps without an update: a number was not finite, or no row had a target.
    skipped_in_a_row: NonNegativeInt = 0  # How many of the last steps, because a number was not finite.
    evaluated_step: Annotated[int, Field(ge=-1)] = -1  # The last step with a complete evaluation; -1: none.
    rows: NonNegativeInt = 0
    tokens: NonNegativeInt = 0  # Padding included.
    real_tokens: NonNegativeInt = 0
    target_tokens: NonNegativeInt = 0
    # For run.keep_best. Forgotten when that checkpoint is gone, or the evaluation is of other rows.
    best_loss: float = sys.float_info.max
    best_checkpoint: str = ""
    # For run.patience. Forgotten when the evaluation is of other rows.
    lowest_loss: float = sys.float_info.max
    evaluations_in_vain: Annotated[int, Field(ge=-1)] = 0  # The evaluations since then. -1: one will be made again.
    # For SourceMetrics.
    source_sums: dict[str, float] | None = None
    source_targets: dict[str, NonNegativeInt] | None = None
    expert_load: list[list[NonNegativeInt]] | None = None  # For model.balance_loss: [layers, experts].
    own: dict[str, Any] = field(default_factory=dict)  # What a fork wants to keep. JSON must be able to hold it.

    def add(self, counts: dict[str, int]) -> None:
        """Count one more step, with its rows and tokens."""
        self.step += 1
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def note_loss(self, loss: float) -> None:
        """Remember the evaluation loss after this step if it is the best so far. Step 0 has no checkpoint."""
        if self.step and loss < self.best_loss:
            self.best_loss, self.best_checkpoint = loss, checkpoint_name(self.step)

    def count_evaluation(self, loss: float) -> None:
        """Note that the step is evaluated, and whether that has lowered the loss."""
        self.evaluated_step = self.step
        if loss < self.lowest_loss:
            self.lowest_loss, self.evaluations_in_vain = loss, 0
        else:
            self.evaluations_in_vain += 1

    def forget_best(self) -> None:
        self.best_loss, self.best_checkpoint = Progress.best_loss, Progress.best_checkpoint

    def forget_lowest(self) -> None:
        self.lowest_loss, self.evaluations_in_vain = Progress.lowest_loss, Progress.evaluations_in_vain

    def is_best(self) -> bool:
        return self.best_checkpoint == checkpoint_name(self.step)


# What else a resume reads in a manifest, besides its config. Older ones do not say it.
OF_RUN = {"sources": dict, "model": dict, "max_steps": int, "code": dict, "launch": dict}


def progress_in(manifest: dict[str, Any]) -> Progress:
    """What a manifest says. Raises UserError if it is no progress."""
    try:
        return TypeAdapter(Progress).validate_python(manifest)
    except ValidationError as error:
        raise UserError(describe(error)) from None


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last. Other names in it, of copies or archives, are not ours."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def save_checkpoint(
    folder: Path, keep: int, state: dict[str, torch.Tensor], manifest: dict, group: dist.ProcessGroup | None
) -> None:
    """All ranks write into a draft. When all are done, the main process gives it its name and deletes old checkpoints.

    Runs in the background: the state is a copy, and the ranks agree in a process group of their own. A process that is
    killed leaves the draft, which RunFolder.begin() deletes.
    """
    final = folder / checkpoint_name(manifest["step"])
    draft = folder / f".{final.name}.tmp"
    writer = dcp.HuggingFaceStorageWriter(str(draft), save_distributed=True)
    try:
        metadata = dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)
    except dcp.CheckpointException:
        shutil.rmtree(draft, ignore_errors=True)  # Its disk may be full.
        raise
    files = written_files(draft, group)
    if not is_main_process():
        return
    check_is_whole(draft, files, metadata.state_dict_metadata)
    replace_file(draft / "manifest.json", json.dumps({**manifest, "files": files}, indent=2))
    with suppress(OSError):  # The checkpoint does not need them.
        sync(folder.parent / "metrics.jsonl")  # The steps up to this one will not be logged again.
    replace_folder(draft, final)  # In its place can only be a damaged one, which find_checkpoint() passed over.
    delete_old(folder, keep, manifest)


def note_in_checkpoint(folder: Path, keep: int, known: dict[str, Any]) -> None:
    """Note in the complete checkpoint of a step what has become known since, such as its evaluation loss."""
    if is_main_process():
        checkpoint = folder / checkpoint_name(known["step"])
        path = checkpoint / "manifest.json"
        # Outside, because the checkpoint may be copied at any moment. But a link may lead to another disk.
        draft = None if checkpoint.is_symlink() else folder / f".{checkpoint.name}.tmp"
        replace_file(path, json.dumps({**json.loads(path.read_text()), **known}, indent=2), draft=draft)
        delete_old(folder, keep, known)


def delete_old(folder: Path, keep: int, manifest: dict[str, Any]) -> None:
    """Keep the newest checkpoints up to that of the manifest, and the best one."""
    # A checkpoint of a later step is a damaged one. It must not count as one of those to keep.
    up_to_now = [checkpoint for checkpoint in list_checkpoints(folder) if step_of(checkpoint) <= manifest["step"]]
    for old in up_to_now[:-keep]:
        if old.name != manifest["best_checkpoint"] and not old.is_symlink():
            hidden = old.rename(folder / f".{old.name}.old.tmp")  # So that nobody finds it half deleted.
            shutil.rmtree(hidden, ignore_errors=True)


def written_files(draft: Path, group: dist.ProcessGroup | None) -> dict[str, list[int]]:
    """On the main process, size and checksum of each file that the ranks have written. Each reads its own again."""
    rank = dist.get_rank(group) if group else 0
    paths = sorted(draft.glob(f"shard-{rank + 1:05}-*"))  # Named by HuggingFaceStorageWriter; a rank may have none.
    own = {path.name: size_and_checksum(path) for path in paths}
    if not group:
        return own
    told = [{}] * dist.get_world_size(group)
    dist.gather_object(own, told if rank == 0 else None, group=group, group_dst=0)
    return {name: size_and_sum for files in told for name, size_and_sum in files.items()}


def check_is_whole(draft: Path, files: Iterable[str], planned: dict[str, TensorStorageMetadata]) -> None:
    """Raises OSError unless the files hold all that was to be saved, and nothing else."""
    missing = {name: tensor.size.numel() for name, tensor in planned.items()}
    for file in files:
        with safe_open(draft / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  It is no dictionary.
                missing[name] = missing.get(name, 0) - math.prod(opened.get_slice(name).get_shape())
    wrong = [name for name, numbers in missing.items() if numbers]
    if wrong:
        raise OSError(f"{draft} lacks parts of {len(wrong)} of {len(planned)} tensors, such as {min(wrong)}")


def verify_checkpoint(folder: Path, meeting: Meeting) -> dict:
    """The manifest. All ranks call it, and each checks some of the files.

    Raises UserError, on all ranks, that names the file that is missing, cut short or altered, or a host on which the
    folder has another checkpoint.
    """
    manifest = meeting.by_main(lambda: read_manifest(folder))
    here = meeting.together(lambda: [meeting.host, files_told_by(folder)])
    for host, files in here:
        if files != here[0][1]:
            raise AgreedError(
                f"{folder} is another checkpoint on {host} than on {here[0][0]}; the nodes must share one"
            )
    largest_first = sorted(manifest["files"].items(), key=lambda file: file[1], reverse=True)
    share = largest_first[meeting.rank :: meeting.size]
    meeting.together(lambda: check_files(folder, share))
    return manifest


def files_told_by(folder: Path) -> int:
    """A checksum of the names, sizes and checksums in a manifest."""
    with as_user_error(f"no complete checkpoint of this script: {folder / 'manifest.json'}"):
        files = json.loads((folder / "manifest.json").read_text())["files"]
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


def check_files(folder: Path, files: list[tuple[str, list[int]]]) -> None:
    """Raises UserError for one that is not as it was written, by its name, size and checksum."""
    with as_user_error(f"no complete checkpoint of this script: {folder / 'manifest.json'}"):
        for name, written in files:
            if size_and_checksum(folder / name) != written:
                raise OSError(f"{folder / name} is not as it was written: its size or checksum differs")


def read_manifest(folder: Path) -> dict:
    """Raises UserError if it is not one, or its folder no checkpoint."""
    if not (folder / "manifest.json").exists():
        is_model, is_adapter = ((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
        require(not is_model, f"{folder} is a model, not a checkpoint of this script; give it as model.pretrained")
        require(not is_adapter, f"{folder} is an exported adapter; give a checkpoint of its run")
    inside = list_checkpoints(folder / "checkpoints") or list_checkpoints(folder)
    if inside:
        raise UserError(f"{folder} is not a checkpoint, but has some; give one of them, such as {inside[-1]}")
    beside = list_checkpoints(folder.parent)
    if beside and not folder.exists():
        raise UserError(f"there is no {folder}; beside it are others, such as {beside[-1]}")
    with as_user_error(f"no complete checkpoint of this script: {folder / 'manifest.json'}"):
        manifest = json.loads((folder / "manifest.json").read_text())
        is_whole = isinstance(manifest["config"], dict) and "step" in manifest and manifest["files"]
        require(is_whole, "it lacks config, step or files")
        progress = progress_in(manifest)
        is_named = re.fullmatch(r"step-\d{8,}", folder.name)
        require(not is_named or step_of(folder) == progress.step, f"it is of step {progress.step}, by another name")
        others = {path.name for path in folder.glob("*.safetensors")} - manifest["files"].keys()
        require(not others, f"{min(others, default='')} beside it is not part of it, but would be read; move it away")
        are_sizes_and_sums = all(len(size_and_sum) == 2 for size_and_sum in manifest["files"].values())
        require(are_sizes_and_sums, "its files are not listed by size and checksum")
        wrong = [name for name, kind in OF_RUN.items() if not isinstance(manifest.get(name, kind()), kind)]
        require(not wrong, f"what it says of {', '.join(wrong)} is not what a run writes")
        return manifest


def find_checkpoint(resume: str, folder: Path, meeting: Meeting) -> tuple[Path, dict] | None:
    """The newest checkpoint that passes verify_checkpoint(), and its manifest. None: start at step 0.

    All ranks call it and get the same: the main process looks into the folder.
    """
    found = meeting.by_main(lambda: checkpoints_to_try(resume, folder))
    damage = None
    for checkpoint in map(Path, found):
        try:
            return checkpoint, verify_checkpoint(checkpoint, meeting)
        except UserError as error:
            damage = error
            if str(checkpoint) != found[-1]:
                say(f"Checkpoint passed over: {error}")
    if damage:
        raise damage
    return None


def checkpoints_to_try(resume: str, folder: Path) -> list[str]:
    """The newest one first.

    The folder's own checkpoints go first, so that a run that began with the one that `resume` names can go on.
    """
    found = list_checkpoints(folder)[::-1]
    require(resume != "never" or not found, f"run.resume is never, but {folder} exists; choose another run.output_dir")
    if resume not in ("auto", "never"):
        is_own = found and folder.resolve() in Path(resume).resolve().parents
        advice = "to go back, choose another run.output_dir"
        require(not is_own, f"run.resume names a checkpoint of this run; {advice}")
        if found:
            say(f"run.resume {resume} is not read, because {folder} has checkpoints of this run.")
        found = found or [Path(resume)]
    return list(map(str, found))


def load_checkpoint(
    folder: Path, parallel: Parallelism, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Load into the model and optimizers. The checkpoint may be of another layout of the ranks."""
    state = parallel.state_to_save(model, optimizers)
    reader = dcp.HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata.keys()
    kept = kinds_of_state(saved)
    if optimizers:
        allowed = any(name.startswith(("optim", "own")) for name in parallel.config.run.allow_changes)
        check_same_state(folder, kept, state, allowed)
    forget_unused(model, optimizers, kept)
    # Without the state of a weight that had no gradient before the checkpoint: there is none to load.
    state = {name: value for name, value in state.items() if name in saved or name.startswith("model.")}
    with as_user_error(f"{folder} is of another model"):
        of_others = {f"model.{name}" for name, tensor in model.state_dict().items() if tensor.is_meta}
        surplus = {name for name in saved - state.keys() - of_others if name.startswith("model.")}
        require(not surplus, f"it also has {min(surplus, default='')}")
        dcp.load(state, storage_reader=reader)  # In place.
    parallel.load_state(state, model, optimizers)


def check_same_state(folder: Path, kept: dict[str, set[str]], state: Iterable[str], allowed: bool) -> None:
    """Raises UserError if the optimizers keep something else of the weights than those that saved the checkpoint did:
    what a checkpoint does not have begins as if there were no steps before. Says so if that is allowed.

    A rank of a pipeline may have none of the weights that one of several optimizers trains. `kept`: see
    kinds_of_state(). `state`: the names of what this rank has.
    """
    own = [name.removeprefix("model.") for name in state if name.startswith("model.")]
    theirs = set().union(*(kept.get(name, ()) for name in own))
    ours = set().union(*kinds_of_state(state).values())
    if theirs <= ours <= set().union(*kept.values()):
        return
    has, keeps = ", ".join(sorted(theirs)) or "nothing", ", ".join(sorted(ours)) or "nothing"
    difference = (
        f"{folder} is of another optimizer: for each weight, it has {has}, and build_optimizer now keeps {keeps}"
    )
    advice = "begin a new run with its weights by run.init_from, or continue: --run.allow_changes '[optim.name]'"
    require(allowed, f"{difference}; {advice}")
    say(f"{difference}. What it lacks begins anew.")


def kinds_of_state(names: Iterable[str]) -> dict[str, set[str]]:
    """What optimizers keep of each weight, such as exp_avg, by the names of tensors in a checkpoint."""
    kinds = {}
    for name in names:
        if name.startswith("optimizer.state."):
            weight, _, kind = name.removeprefix("optimizer.state.").rpartition(".")
            kinds.setdefault(weight, set()).add(kind)
    return kinds


def forget_unused(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], kept: Iterable[str]) -> None:
    """Delete the new state of weights of which the checkpoint kept none. Up to it they never had a gradient."""
    for name, parameter in unwrapped(model).named_parameters():
        if without_wrappers(name) not in kept:
            for optimizer in optimizers:
                optimizer.state.pop(parameter, None)
