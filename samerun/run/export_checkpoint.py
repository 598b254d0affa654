"""What --export does: a checkpoint as a model, without a run, on one process and without a device.

The weights are read and written one layer at a time, so that no more of them is in memory. Only to merge a LoRA adapter
into its model takes memory for all of that model, in its own type, and so does one that adapts or adds embeddings.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from transformers.utils.hub import CHAT_TEMPLATE_DIR

from samerun.cli import Export
from samerun.config import FROZEN, Config
from samerun.data.encode import number_of_ids
from samerun.dotted import flat_settings
from samerun.errors import UserError, as_user_error, require, say
from samerun.files import delete, replace_folder
from samerun.meeting import Meeting
from samerun.model.architecture import model_config
from samerun.model.build import added_tokens, build_model, rows_needed
from samerun.model.lora import add_lora
from samerun.model.outline import bare, is_quantized, outline, state_of
from samerun.model.tokenizer import load_tokenizer, use_tokenizer
from samerun.model.weights import fill_weights
from samerun.run.agreement import checksum_of_frozen
from samerun.run.changes import advice_to_allow, changed_settings, is_allowed
from samerun.run.checkpoint import (
    checkpoint_name,
    find_checkpoint,
    list_checkpoints,
    progress_in,
    step_of,
    verify_checkpoint,
)
from samerun.run.export import (
    export_dtype,
    names_of_adapter,
    planned_weights,
    write_configs,
    write_tokenizer,
    write_weights,
)
from samerun.run.launch import StopSignal, go_offline_without_network, silence_libraries

# The settings that decide what a checkpoint is exported as.
OF_WHAT_IS_EXPORTED = "model.", "data.format", "data.tokenizer", "data.special_tokens", "data.chat_template"
OF_A_MODEL = {".json", ".safetensors", ".jinja", ".model", ".txt", ".py", ".md"}  # What an export may write.


def export_checkpoint(config: Config, asked: Export) -> None:
    """Write a checkpoint of the run as a model. A model that is there already stays until the new one is complete."""
    StopSignal().raise_at_signals()
    silence_libraries()
    require(Meeting(1).size == 1, "--export: one process does it; start it as python train.py")
    is_adapter = config.model.lora is not None
    require(is_adapter or not asked.merge, "--merge: needs model.lora, an adapter to be merged into its model")
    refusal = "--export: to average adapters is not to average their models; give one step"
    require(not (is_adapter and len(asked.which) > 1), refusal)
    checkpoints = []
    for which in asked.which:
        checkpoint, manifest = chosen_checkpoint(config, which)
        check_same_settings(config, checkpoint, manifest["config"])
        checkpoints.append(checkpoint)
    what = checkpoint.name
    if len(checkpoints) > 1:
        what = f"average-{'-'.join(str(step_of(one)) for one in checkpoints)}"
    name = f"model-{what}-merged" if asked.merge else f"model-{what}"
    folder = Path(asked.to or f"{config.run.output_dir}/{name}")
    check_replaceable(folder)
    require(folder.resolve() != Path.cwd(), f"--to: {folder} is where this command runs; name a folder in it")
    is_base = config.model.pretrained and folder.resolve() == Path(config.model.pretrained).resolve()
    require(not is_base, f"--to: {folder} is model.pretrained; name another folder")
    go_offline_without_network(config)
    tokenizer = load_tokenizer(config.data, config.model)
    dtype = export_dtype(config, manifest.get("launch", {}).get("precision", "no"))
    saved = SavedWeights(checkpoints, manifest["config"].get(FROZEN))
    draft = folder.with_name(f".{folder.name}.tmp")
    with alone_with(folder):
        with as_user_error(f"--to: cannot write {folder}"):
            delete(draft)  # That of a killed process.
            draft.mkdir(parents=True)
        try:
            write_model(config, saved, tokenizer, dtype, asked.merge, draft)
            replace_folder(draft, folder)
        finally:
            delete(draft)
    kind = "adapter" if is_adapter and not asked.merge else "model"
    say(f"Exported: {folder} ({what}, {kind}, {str(dtype).removeprefix('torch.')})")


@contextmanager
def alone_with(folder: Path) -> Iterator[None]:
    """Raises UserError if another process exports to this folder: it would give its name to a draft of this one."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    with as_user_error(f"--to: cannot write {folder}"):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError("another process exports to it") from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # While nobody else can have it.
        lock.release()


def write_model(
    config: Config, saved: "SavedWeights", tokenizer: Any, dtype: torch.dtype, merge: bool, folder: Path
) -> None:
    if config.model.lora is None:
        model = meta_model(config, tokenizer, saved)
        use_tokenizer(model, tokenizer, config)
        planned = planned_weights(model, state_of(model), dtype)
        saved.check_names(planned)
        write_configs(model, folder, dtype)
        write_weights(model, planned, lambda name, _: saved.read(name).to(planned[name].dtype), folder)
    elif not merge:
        model = adapted_model(config, tokenizer, saved)
        use_tokenizer(model, tokenizer, config)
        model.save_pretrained(folder, state_dict=adapter_weights(model, saved, dtype))
    else:
        model = whole_model(config, tokenizer, saved, dtype)
        advice = "merge the adapter into the model that they were made from, by peft"
        require(not getattr(model, "is_quantized", False), f"--merge: model.pretrained has quantized weights; {advice}")
        model = model.merge_and_unload()
        use_tokenizer(model, tokenizer, config)
        weights = state_of(model)
        planned = planned_weights(model, weights, dtype)
        write_configs(model, folder, dtype)
        write_weights(model, planned, lambda name, _: weights[name].detach().to(planned[name].dtype), folder)
    write_tokenizer(model, tokenizer, config, folder)


# The checkpoint -------------------------------------------------------------------------------------------------------


def chosen_checkpoint(config: Config, which: str) -> tuple[Path, dict[str, Any]]:
    """The checkpoint of a run that is called last, best, or by its step, and its manifest. Raises UserError."""
    folder, alone = Path(config.run.output_dir) / "checkpoints", Meeting(1)
    there = ", ".join(str(step_of(one)) for one in list_checkpoints(folder))
    require(there, f"--export: {folder} has no checkpoint; check run.output_dir")
    if which.isdecimal():  # To verify the newest one, too, would take as long again.
        name = checkpoint_name(int(which))
    else:
        newest, manifest = find_checkpoint("auto", folder, alone)
        if which == "last":
            return newest, manifest
        name = progress_in(manifest).best_checkpoint
        require(
            name,
            f"--export best: {newest} knows of no best one; run.keep_best keeps it, "
            "from the first evaluation with a finite loss on",
        )
    path = folder / name
    require(path.is_dir(), f"--export {which}: there is no {path}; there are those of the steps {there}")
    return path, verify_checkpoint(path, alone)


def check_same_settings(config: Config, checkpoint: Path, theirs: dict[str, Any]) -> None:
    """Raises UserError if the config asks for another model or tokenizer than that of the checkpoint."""
    names, told = [], []
    for name, before, now in changed_settings(type(config), theirs, flat_settings(config)):
        if name.startswith(OF_WHAT_IS_EXPORTED):
            names.append(name)
            if not is_allowed(config, name):
                told.append(f"{checkpoint} has {name}: {before!r}, and the config {now!r}")
    if told:
        advice = f"To export it all the same: {advice_to_allow(config, names)}"
        raise UserError("\n".join([*told, advice]))


def check_replaceable(folder: Path) -> None:
    """Raises UserError for a folder that holds anything but an exported model."""
    if not os.path.lexists(folder):
        return
    require(folder.is_dir() and not folder.is_symlink(), f"--to: {folder} exists, and is not a folder; name another")
    files = [path for path in folder.iterdir() if path.name != CHAT_TEMPLATE_DIR]
    others = [path.name for path in files if path.is_dir() or path.suffix not in OF_A_MODEL]
    require(not others, f"--to: {folder} also holds {min(others, default='')}; name another folder")
    has_config = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    is_free = (has_config and any(folder.glob("*.safetensors"))) or not os.listdir(folder)
    require(is_free, f"--to: {folder} exists, and does not hold a model; name another folder")


class SavedWeights:
    """The weights in a checkpoint, or the average of those in several, by their names in the model, read one by one."""

    def __init__(self, checkpoints: list[Path], frozen: str | None):
        """`frozen`: a checksum of those that they do not hold. Raises UserError unless they are of one model."""
        self.checkpoint, self.frozen = checkpoints[0], frozen
        self.readers = [CheckpointReader(str(checkpoint)) for checkpoint in checkpoints]
        self.found, *others = [reader.weights() for reader in self.readers]
        for checkpoint, found in zip(checkpoints[1:], others):
            sizes, wanted = ({name: one.size for name, one in weights.items()} for weights in (found, self.found))
            require(sizes == wanted, f"{checkpoint} is of another model than {self.checkpoint}")

    def read(self, name: str) -> torch.Tensor:
        first, *others = self.readers
        average = first.read(name)
        if average.is_floating_point():  # Buffers may count.
            for number, reader in enumerate(others, start=2):
                average.lerp_(reader.read(name), 1 / number)
        return average

    def check_names(self, model: dict[str, torch.Tensor]) -> None:
        """Raises UserError unless these are the weights of a model."""
        for name in self.found.keys() ^ model.keys():
            where = "the checkpoint" if name in self.found else "the model"
            raise UserError(f"{self.checkpoint} is of another model: only {where} has {name}")
        for name, weight in model.items():
            saved, wanted = tuple(self.found[name].size), tuple(weight.shape)
            require(saved == wanted, f"{self.checkpoint} is of another model: {name} has {saved, wanted}")


class CheckpointReader(dcp.HuggingFaceStorageReader):
    """Reads the headers of all files once, and not for each weight."""

    def weights(self) -> dict[str, TensorStorageMetadata]:
        saved = self.read_metadata().state_dict_metadata
        return {name.removeprefix("model."): one for name, one in saved.items() if name.startswith("model.")}

    def read(self, name: str) -> torch.Tensor:
        found = self.metadata.state_dict_metadata[f"model.{name}"]
        whole = torch.empty(found.size, dtype=found.properties.dtype)
        dcp.load({f"model.{name}": whole}, storage_reader=self, no_dist=True)  # In place.
        return whole

    @functools.cached_property
    def metadata(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self.metadata


# The model ------------------------------------------------------------------------------------------------------------


def meta_model(config: Config, tokenizer: Any, saved: SavedWeights) -> transformers.PreTrainedModel:
    """The model as a run has it, on the meta device, and with as many embeddings as the checkpoint."""
    model = meta_base(config, tokenizer)
    embedding = model.get_input_embeddings().weight
    name = next(name for name, weight in model.named_parameters() if weight is embedding)
    if name in saved.found and saved.found[name].size[0] != len(embedding):
        model.resize_token_embeddings(saved.found[name].size[0], mean_resizing=False)
    return model


def meta_base(config: Config, tokenizer: Any) -> transformers.PreTrainedModel:
    found = model_config(config, number_of_ids(tokenizer) if tokenizer else None)
    settings = config.model.model_copy(update={"attention": "eager"})  # Nothing is computed, maybe without a GPU.
    with as_user_error(f"model: cannot build {settings.pretrained or found.model_type}", settings.pretrained):
        # transformers converts codes only if they have numbers. Under a whole model that is trained, there are none.
        make = bare if config.model.lora is not None and is_quantized(settings, found) else outline
        return make(settings, found).to("meta")


def adapted_model(config: Config, tokenizer: Any, saved: SavedWeights) -> torch.nn.Module:
    """The model with its adapter. The weights below it have no storage, unless the export needs some of them."""
    base = meta_base(config, tokenizer)
    has_grown = rows_needed(config, tokenizer) > base.get_input_embeddings().num_embeddings
    with torch.device("meta"):
        model = add_lora(base, config.model.lora, added_tokens(config, tokenizer))
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    adapts_rows = any(hasattr(layer, "base_layer") for layer in ends)
    if has_grown or adapts_rows:  # peft then saves all rows, also those that are not trained.
        return whole_model(config, tokenizer, saved, torch.float32)
    return model


def whole_model(config: Config, tokenizer: Any, saved: SavedWeights, dtype: torch.dtype) -> torch.nn.Module:
    """The model with its adapter, all in memory. The weights below the adapter are as their files have them."""
    kept = "bfloat16" if dtype == torch.bfloat16 else "float32"
    if not config.model.pretrained:  # Drawn in another type, they would be other numbers.
        kept = config.model.dtype
    settings = config.model.model_copy(update={"dtype": kept, "load_in_4bit": False})
    model = build_model(config.model_copy(update={"model": settings}), tokenizer)
    fill_weights(model, torch.device("cpu"))
    frozen = checksum_of_frozen(model.first_weights.samples)
    # PiSSA and the like change those that are frozen. What was not read by itself has the type of model.dtype. With
    # load_in_4bit, the run has noted a sample of codes.
    is_same = frozen in (None, saved.frozen) or model.first_weights.was_whole or config.model.load_in_4bit
    require(is_same, f"model.pretrained is another model than the one that {saved.checkpoint} was trained above")
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    for name in saved.found:
        require(name in weights, f"{saved.checkpoint} is of another model: it has {name}")
        weights[name].data.copy_(saved.read(name))
    return model


def adapter_weights(model: torch.nn.Module, saved: SavedWeights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the export of an adapter is made of. A weight with several names is everywhere by the first of them."""
    parameters, weights = dict(model.named_parameters()), {}
    for name in names_of_adapter(model):  # peft saves none of those that are still on the meta device.
        weights[name] = (saved.read(name) if name in saved.found else parameters[name].detach()).to(dtype)
    buffers = dict(model.named_buffers()).keys()  # Checkpoints have those of the model below, too.
    missing = saved.found.keys() - parameters.keys() - buffers
    require(not missing, f"{saved.checkpoint} is of another model: it has {min(missing, default='')}")
    return weights
