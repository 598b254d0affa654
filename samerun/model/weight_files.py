"""The weights of a pretrained model: of its files, a rank reads what it keeps.

transformers renames and merges what it reads, so it gets a layer at a time, in parts where it leaves tensors as they
are: the rows or columns that FSDP2 or tensor parallelism has given to this rank, or its experts.
"""

import copy
import os
import re
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig, _get_resolved_checkpoint_files

from samerun.config import Model
from samerun.model.outline import extend_embeddings, let_go, state_of

Place = tuple[torch.Tensor, torch.Tensor | None]  # A tensor of this rank, and the rows of a weight that it wants.
Places = dict[str, list[Place]]  # By the names of weights.
Region = tuple[slice, ...]  # Of a tensor: from where to where in each dimension.


@dataclass
class Weight:
    """One that was drawn or read, or a region of it."""

    numbers: torch.Tensor
    samples: dict[str, int] = field(default_factory=dict)  # Of what it was made from, under names common to all ranks.
    region: Region = ()  # If it is not the whole.


@dataclass
class FileTensors:
    """The tensors in files that a weight is made of."""

    is_changed: bool  # Merged with others, transposed or the like, and not only renamed.
    files: dict[str, str] = field(default_factory=dict)  # By the names of the tensors.
    stacks: dict[str, list[str]] = field(default_factory=dict)  # Names in the order of the experts that they are.

    def region(self, shape: torch.Size, places: list[Place], tensors: dict[str, Any]) -> Region:
        """What is to be read of the weight, () for all of it. Where experts are merged, it is whole ones."""
        [(place, rows), *others] = places
        if others or rows is not None or not isinstance(place, DTensor) or place.shape != shape:
            return ()
        region = region_of(place)
        if not self.is_changed and all(tensor.get_shape() == list(shape) for tensor in tensors.values()):
            return region
        if self.stacks and all(len(names) == shape[0] for names in self.stacks.values()):
            return region[0], *(slice(0, size) for size in shape[1:])
        return ()

    def parts(self, tensors: dict[str, Any], region: Region) -> dict[str, Any]:
        """The tensors, or their parts, that the region is made of."""
        if not region:
            return tensors
        if self.is_changed:
            return {name: tensors[name] for names in self.stacks.values() for name in names[region[0]]}
        return {name: FilePart(tensor, region) for name, tensor in tensors.items()}


class FilePart:
    """A region of a tensor in a file, for transformers, which reads all of what it is given."""

    def __init__(self, tensor: Any, region: Region):
        self.tensor, self.region = tensor, region

    def __getitem__(self, everything: Any) -> torch.Tensor:
        return self.tensor[self.region]


class WeightFiles:
    """The safetensors files of a model."""

    def __init__(self, plain: PreTrainedModel, config: Model):
        """`plain`: the model with its weights on the meta device."""
        # transformers would read in several threads, each of which would keep memory for the parts that it has read.
        os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
        self.plain, self.config = plain, config
        dtype = getattr(torch, config.dtype)
        mapping = get_model_conversion_mapping(plain)
        self.options = LoadStateDictConfig(dtype=dtype, dtype_plan=plain._get_dtype_plan(dtype), weight_mapping=mapping)
        self.shapes = {name: weight.shape for name, weight in plain.state_dict().items()}

    def read(self, places: Places, vocab_size: int, seed: int) -> Iterable[dict[str, Weight]]:
        """What `places` want of the weights, as transformers renames and merges them. A few layers are there at once.

        `vocab_size` and `seed`: rows that the model has no tokens for are made from those that it has.
        """
        embedding = self.plain.get_input_embeddings()
        are_added = vocab_size > embedding.num_embeddings
        for sources in self.sources({layer_of(name) for name in places}):
            if not are_added:  # The other weights of this layer belong to other ranks.
                sources = {name: source for name, source in sources.items() if name in places or source.is_changed}
            loaded = self.load(sources, places)
            if are_added and not embedding.weight.is_meta:
                self.plain.tie_weights()
                torch.manual_seed(seed)
                extend_embeddings(self.plain, vocab_size)
            yield {
                name: Weight(numbers, *loaded[name])
                for name, numbers in state_of(self.plain).items()
                if name in loaded and not numbers.is_meta
            }
            let_go(self.plain)

    def load(self, sources: dict[str, FileTensors], places: Places) -> dict[str, tuple[dict[str, int], Region]]:
        """Read weights into the model. Returns the samples and the region of each, as Weight has them."""
        regions, samples, opened, wanted = {}, {}, {}, {}
        with ExitStack() as stack:
            for name, source in sources.items():
                for file in source.files.values():
                    if file not in opened:
                        opened[file] = stack.enter_context(safe_open(file, "pt"))
                tensors = {key: opened[file].get_slice(key) for key, file in source.files.items()}
                if name in places:
                    regions[name] = source.region(self.shapes[name], places[name], tensors)
                    self.cut(name, regions[name])
                parts = source.parts(tensors, regions.get(name, ()))
                samples[name] = {key: sample_of_rows(tensors[key]) for key in parts}
                wanted |= parts
            info, _ = convert_and_load_state_dict_in_model(self.plain, wanted, self.options)
        loaded = self.shapes.keys() - info.missing_keys
        return {name: (samples.get(name, {}), regions.get(name, ())) for name in loaded}

    def cut(self, name: str, region: Region) -> None:
        """Make a weight, which is on the meta device, as small as a region of it."""
        if region:
            module, _, inner = name.rpartition(".")
            parameters = self.plain.get_submodule(module)._parameters
            old = parameters[inner]
            part = torch.empty([there.stop - there.start for there in region], dtype=old.dtype, device="meta")
            parameters[inner] = torch.nn.Parameter(part, old.requires_grad)

    def sources(self, layers: set[int]) -> Iterable[dict[str, FileTensors]]:
        """The tensors that each weight is made of: those of a layer together, and each merged weight by itself.

        For a while there are both those and the merged one, and the experts may be nearly all of a layer.
        """
        mapping = copy.deepcopy(self.options.weight_mapping)  # It keeps notes about what it has seen.
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        renamings = [entry for entry in mapping if entry not in converters]
        converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, state = self.plain.base_model_prefix, self.plain.state_dict()
        for number, files in sorted(self.files_of_layers().items()):
            if number not in layers:
                continue
            renamed, changed = {}, {}
            for key in sorted(files, key=dot_natural_key):
                name, pattern = rename_source_key(key, renamings, converters, prefix, state)
                if name not in state and key in state:  # As transformers does.
                    name, pattern = key, None
                source = (changed if pattern else renamed).setdefault(name, FileTensors(pattern is not None))
                source.files[key] = files[key]
                if pattern and stacks_experts(converter_of[pattern]):
                    source.stacks.setdefault(pattern, []).append(key)
            yield renamed
            yield from ({name: source} for name, source in changed.items())

    def files_of_layers(self) -> dict[int, dict[str, str]]:
        """The files of the tensors of each layer, by their names. -1 stands for what is in no layer."""
        files, _ = _get_resolved_checkpoint_files(
            self.config.pretrained,
            variant=None,
            gguf_file=None,
            use_safetensors=None,
            user_agent=None,
            is_remote_code=self.config.trust_remote_code,
            transformers_explicit_filename=getattr(self.plain.config, "transformers_weights", None),
        )
        layers = {}
        for file in files:
            if file.endswith(".safetensors"):
                with safe_open(file, "pt") as opened:
                    for key in opened.keys():
                        layers.setdefault(layer_of(key), {})[key] = file
        return layers


def layer_of(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1


def stacks_experts(converter: Any) -> bool:
    """Whether each expert in files is one of the merged ones, or a part of its matrix."""
    first, *others = converter.operations
    is_stack = type(first) is MergeModulelist and first.dim == 0
    return is_stack and all(type(one) is Concatenate and one.dim > 0 for one in others)


def region_of(place: DTensor) -> Region:
    """What this rank keeps of a tensor."""
    [chunk] = place.__create_chunk_list__()
    return tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))


def sample_of(tensor: torch.Tensor) -> int:
    """A checksum of some numbers. It tells other weights apart in no time, and not a single bit."""
    numbers = tensor.detach().flatten()
    some = numbers[:: max(1, len(numbers) // 256)].float().cpu().contiguous()
    return zlib.crc32(some.view(torch.uint8).numpy())


def sample_of_rows(tensor: Any) -> int:
    """sample_of() some rows of a tensor in a file, whatever part of it a rank reads."""
    *counts, _ = tensor.get_shape() or [0]
    if not counts:
        return sample_of(tensor[...])
    rows = [[slice(count * number // 8, count * number // 8 + 1) for count in counts] for number in range(8)]
    return sample_of(torch.cat([tensor[tuple(row)] for row in rows]))
