"""The trained model as from_pretrained() loads it, written by all ranks: none of them has all of it in its memory.

The weights go from the ranks that have them to those that write them, one layer at a time, and each file has one rank
that writes it. Names and index of the files are those of save_pretrained(), and each has at most 5 GB, the default of
huggingface_hub.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from torch.distributed.fsdp import FSDPModule
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import str_to_torch_dtype

from samerun.config import Config
from samerun.errors import as_user_error, is_main_process
from samerun.files import replace_file, replace_folder
from samerun.model.architecture import ROUTER_BIASES
from samerun.model.outline import is_of_transformers
from samerun.run.checkpoint import Progress, load_checkpoint, step_of
from samerun.run.folder import kept_best
from samerun.run.setup import Setup

Read = Callable[[str, set[int]], torch.Tensor | None]  # A whole weight by its name, on the host of these ranks only.


def export_best(setup: Setup, progress: Progress) -> str:
    """Export the model of the best checkpoint if one is kept, otherwise of the last step. Returns what to say of it."""
    if setup.max_steps == 0:  # The model is as it was.
        return f"{setup.folder.path}/metrics.jsonl has the evaluation"
    best = kept_best(setup.folder, progress)
    if best:
        load_checkpoint(best, setup.parallel, setup.wrapped, [])
        setup.folder.exported_step = step_of(best)
    export_model(setup)
    which = best.name if best else "last step"
    owner = ""
    if setup.config.model.lora is not None:  # transformers cannot load one that trains rows of new tokens.
        owner = "peft's "
    return f"{setup.folder.path}/model ({which}) loads with {owner}from_pretrained()"


def export_model(setup: Setup) -> None:
    """Write the model into the run folder. Every rank takes part. An older model stays until this one is complete."""
    folder, accelerator, parallel = setup.folder.path / "model", setup.accelerator, setup.parallel
    draft = folder.with_name(".model.tmp")
    if is_main_process():
        draft.mkdir(exist_ok=True)  # What a killed launch has left, RunFolder.begin() has deleted.
        if setup.config.model.lora is None:
            write_configs(setup.model, draft, setup.export_dtype)
        write_tokenizer(setup.model, setup.tokenizer, setup.config, draft)
    accelerator.wait_for_everyone()  # Now all ranks can write into it. A launcher that has ended is not needed here.
    parts = parallel.weights_to_export(setup.model)
    planned = planned_weights(setup.model, parts, setup.export_dtype)

    def read(name: str, ranks: set[int]) -> torch.Tensor | None:
        return parallel.gather_weight(name, parts[name], planned[name].dtype, ranks)

    if setup.config.model.lora is not None:
        unwrap_layers(setup.model)
        wanted = set(names_of_adapter(setup.model))
        adapter = {name: read(name, {0}) for name in planned if name in wanted}
        if is_main_process():
            setup.model.save_pretrained(draft, state_dict=adapter)
    else:
        write_weights(setup.model, planned, read, draft, accelerator.process_index, accelerator.num_processes)
    accelerator.wait_for_everyone()  # Now all files are complete.
    if is_main_process():
        replace_folder(draft, folder)


def export_dtype(config: Config, precision: str) -> torch.dtype:
    """The type of the exported weights, see run.export_dtype. `precision` is that of the launch."""
    asked, pretrained = config.run.export_dtype, config.model.pretrained
    if asked != "auto":
        return getattr(torch, asked)
    if not pretrained:
        return {"no": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    options = {"trust_remote_code": config.model.trust_remote_code}
    with as_user_error(f"model.pretrained: cannot tell the type of {pretrained}", pretrained):
        known = transformers.AutoConfig.from_pretrained(pretrained, **options)
        found = known.dtype
        if found is None:  # Only its files say it. On the meta device, none of their weights is read.
            options |= {"dtype": "auto", "device_map": "meta", "attn_implementation": "eager"}
            kind = transformers.AutoModelForCausalLM
            if is_of_transformers(known) and type(known) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
                kind = getattr(transformers, known.architectures[0])  # Of a fork's task, such as a ViT.
            found = kind.from_pretrained(pretrained, **options).dtype
    return found if found in (torch.float16, torch.bfloat16) else torch.float32


def planned_weights(
    model: transformers.PreTrainedModel, weights: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Names, shapes and types of weights as they are exported. Only floating-point numbers change their type.

    Of these, transformers has some in float32 in any model, such as the biases of most routers, and also saves them so.
    Those of all routers are written so, because small steps balance them.
    """
    in_float32 = *ROUTER_BIASES, *(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    planned = without_storage(weights)
    for name, weight in planned.items():
        if weight.is_floating_point():
            is_kept = any(part in name for part in in_float32)
            planned[name] = weight.to(torch.float32 if is_kept else dtype)
    return planned


def without_storage(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights without their numbers."""
    planned = {}
    for name, weight in weights.items():
        shape = getattr(weight, "ds_shape", weight.shape)  # DeepSpeed's ZeRO-3 leaves a parameter without numbers.
        planned[name] = torch.empty(shape, dtype=weight.dtype, device="meta")
    return planned


# The files of a model -------------------------------------------------------------------------------------------------


def write_weights(
    model: transformers.PreTrainedModel,
    planned: dict[str, torch.Tensor],
    read: Read,
    folder: Path,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Write the files of `planned`, see planned_weights(), and their index. All ranks call it with the same names."""
    model = with_own_class(model)
    layers = by_layer(list(planned))
    saved = {}  # What the files have of a layer: maybe other names, or several for one weight.
    for layer, names in layers.items():
        saved[layer] = revert_weight_conversion(model, {name: planned[name] for name in names})
    tensors = {name: one for some in saved.values() for name, one in some.items()}
    split = split_torch_state_dict_into_shards(without_storage(tensors))  # A view would count as what it is one of.
    file_of, files = split.tensor_to_filename, list(split.filename_to_tensors)
    writer_of = {file: number * ranks // len(files) for number, file in enumerate(files)}
    own = {}
    for file, names in split.filename_to_tensors.items():
        if writer_of[file] == rank:
            own[file] = SafetensorsFile(folder / file, {name: tensors[name] for name in names})

    for layer, names in layers.items():
        writers = {writer_of[file_of[name]] for name in saved[layer]}
        whole = {name: read(name, writers) for name in names}
        if rank in writers:
            for name, tensor in revert_weight_conversion(model, whole).items():
                if file_of[name] in own:
                    own[file_of[name]].write(name, tensor)
    for file in own.values():
        file.close()
    if rank == 0 and len(files) > 1:
        numbers = sum(tensor.numel() for tensor in tensors.values())
        index = {"metadata": {"total_parameters": numbers, **split.metadata}, "weight_map": file_of}
        replace_file(folder / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True))


def with_own_class(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """By its name, transformers knows what the weights are called in files. FSDP2 gives a model another class."""
    if not isinstance(model, FSDPModule):
        return model
    kind = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    own = kind.__new__(kind)
    own.__dict__.update(model.__dict__)
    return own


def by_layer(names: list[str]) -> dict[str, list[str]]:
    """Names of weights by their layer, such as model.layers.3. Those outside of layers are alone."""
    layers = {}
    for name in names:
        numbered = re.match(r"(.*?\.\d+)\.", name)
        layers.setdefault(numbered[1] if numbered else name, []).append(name)
    return layers


class SafetensorsFile:
    """A file of tensors that are written one by one, in any order. safetensors itself wants all of them at once.

    The format: 8 bytes with the length of a header, the header in JSON, and the tensors, one after the other.
    """

    TYPES = {kind: name for name, kind in str_to_torch_dtype.items()}

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor]):
        """`tensors` may be without storage."""
        header, self.places, end = {"__metadata__": {"format": "pt"}}, {}, 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": self.TYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            self.places[name] = begin
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # So that the numbers are aligned.
        self.file = open(path, "wb")  # noqa: SIM115  close() ends it.
        self.file.write(len(text).to_bytes(8, "little") + text)
        self.start = self.file.tell()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        self.file.seek(self.start + self.places.pop(name))
        self.file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())

    def close(self) -> None:
        """Return when all of it is on the disk."""
        if self.places:
            raise ValueError(f"{self.file.name} lacks {min(self.places)}")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def write_configs(model: transformers.PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """All that save_pretrained() writes besides the weights, which it would delete. The config has their type."""
    model.save_pretrained(folder, state_dict={})
    model.config.dtype = dtype
    model.config.save_pretrained(folder)


def write_tokenizer(model: torch.nn.Module, tokenizer: Any, config: Config, folder: Path) -> None:
    if config.data.has_chats:
        model.generation_config.save_pretrained(folder)  # An adapter does not save it.
    if tokenizer:
        tokenizer.save_pretrained(folder)


def unwrap_layers(model: torch.nn.Module) -> None:
    """Take out the modules that fsdp_activation_checkpointing has put around layers: they change the names of weights,
    by which peft knows its adapters."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if hasattr(layer, "_checkpoint_wrapped_module"):
                setattr(module, name, layer._checkpoint_wrapped_module)


def names_of_adapter(model: torch.nn.Module) -> list[str]:
    """What the export of an adapter needs: what is trained, and embeddings, which peft saves if they have grown."""
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    kept = {weight for layer in layers if layer is not None for weight in layer.parameters()}
    return [name for name, weight in model.named_parameters() if weight.requires_grad or weight in kept]
