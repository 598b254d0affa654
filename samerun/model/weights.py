"""The first weights of a model, one layer at a time: drawn from the seed or read from files, and kept in part.

A model is built with placeholders, which have the shapes of its weights and take no memory. As soon as the ranks have
divided it, each of them fills in what it keeps. So no host holds more than the parts of its ranks and a few layers.

A weight is drawn from the seed and the name of its module. It is the same in every layout, whoever draws it.
"""

import copy
import os
import re
import tempfile
import zlib
from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from samerun.config import FROZEN, Model
from samerun.errors import require, say
from samerun.model.outline import bare, extend_embeddings, is_of_transformers, let_go, load_whole, state_of
from samerun.model.weight_files import Places, Weight, WeightFiles, region_of, sample_of

# What peft and torch put into the names of weights.
WRAPPERS = re.compile(
    r"^base_model\.model\.|"
    r"\b(base_layer|original_module|token_adapter|modules_to_save\.default|_checkpoint_wrapped_module|_orig_mod)\."
)
TOKEN_ROWS = re.compile(r"\btoken_adapter\.trainable_tokens_(delta|original)\.default$")


# Placeholders ---------------------------------------------------------------------------------------------------------


def put_placeholders(model: torch.nn.Module) -> set[str]:
    """In place of weights on the meta device: memory that was never written to, so that no page of it is taken.

    FSDP2, Accelerate and optimizers take them for weights like any other. Returns their names, and those of buffers
    that files of weights hold, too.
    """
    empty_weights(model, "meta" if torch.get_default_device().type == "meta" else None)
    return set(state_of(model))


def placeholders_on_meta(model: torch.nn.Module) -> set[str]:
    """Put the placeholders on the meta device until they are divided: a part of one is a copy, which takes memory.

    Returns their names, for empty_weights().
    """
    here = {name for name, weight in model.named_parameters() if not weight.is_meta}
    waiting = here & names_of_placeholders(model)
    empty_weights(model, "meta", waiting)
    return waiting


def empty_weights(model: torch.nn.Module, device: str | None, names: set[str] | None = None) -> None:
    """Put weights that were never written to in place of those of these names, or of all. Tied ones stay tied.

    Without a device, they come to that of the ranks that have parts of them, or to the CPU.
    """
    old = {weight for name, weight in model.named_parameters() if names is None or name in names}
    new = {}
    for weight in old:
        place = device or (weight.device_mesh.device_type if isinstance(weight, DTensor) else "cpu")
        new[weight] = torch.nn.Parameter(torch.empty_like(weight, device=place), weight.requires_grad)
        new[weight].__dict__ |= weight.__dict__  # Such as _no_weight_decay.
    for module in model.modules():
        for name, weight in module._parameters.items():
            module._parameters[name] = new.get(weight, weight)


# Filled in ------------------------------------------------------------------------------------------------------------


class FirstWeights:
    """What the placeholders of a model stand for."""

    def __init__(self, config: Model, found: transformers.PreTrainedConfig, vocab_size: int, seed: int):
        """`vocab_size`: how many embeddings the model is to have. A pretrained one may come with fewer."""
        self.config, self.found, self.vocab_size, self.seed = config, copy.deepcopy(found), vocab_size, seed
        self.names: set[str] = set()  # Of what is to be filled in, without adapters.
        self.was_whole = False  # Whether some of them could not be read or drawn by themselves.
        self.samples: dict[str, int] = {}  # Of the weights that this rank has met, by whether they are trained.

    @torch.no_grad()
    def fill(self, model: torch.nn.Module, device: torch.device, is_small: bool = False) -> None:
        """Give the weights that this rank keeps their numbers, on its device. Small models need no turns."""
        if not self.names:
            return
        places = self.places_in(model)
        with torch.random.fork_rng(devices=[]):
            left = self.keep(places, self.one_by_one(places), device)
            self.was_whole = bool(left)
            if left:
                reason = f"{min(left)} is not drawn or read by itself"
                with nullcontext() if is_small else turn_on_this_machine(reason):
                    torch.manual_seed(self.seed)
                    whole = load_whole(self.config, self.found)
                    extend_embeddings(whole, self.vocab_size)
                    left = self.keep(left, [whole_weights(state_of(whole))], device)
        require(not left, f"model: nothing gives {min(left, default='')} its numbers")
        self.names = set()

    def keep(self, places: Places, units: Iterable[dict[str, Weight]], device: torch.device) -> Places:
        """Put these weights into their places on this rank. Returns the places that have got nothing."""
        left = dict(places)
        for unit in units:
            for name in unit.keys() & left.keys():
                is_frozen = False
                for place, rows in left.pop(name):
                    put(place, unit[name], rows, device)
                    is_frozen |= isinstance(place, torch.nn.Parameter) and not place.requires_grad
                kind = FROZEN if is_frozen else "model"
                self.samples |= {f"{kind}: sample of {source}": sample for source, sample in unit[name].samples.items()}
            unit.clear()  # Before the next one is there.
        return left

    def one_by_one(self, places: Places) -> Iterable[dict[str, Weight]]:
        """The weights of a layer at a time, by their names. Layers that have none of `places` are left out."""
        plain = bare(self.config, self.found, fills_buffers=False)  # Of which only weights are taken.
        if self.config.pretrained:
            return WeightFiles(plain, self.config).read(places, self.vocab_size, self.seed)
        if not is_of_transformers(plain):
            return []  # The code of a fork may also draw weights elsewhere, such as in __init__().
        return map(whole_weights, drawn(plain, self.seed, set(places)))

    def places_in(self, model: torch.nn.Module) -> Places:
        """Where this rank keeps a weight, by the name that it has without adapters: tensors, and the rows they want."""
        places, tied = {}, model.all_tied_weights_keys
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            plain, rows = WRAPPERS.sub("", name), None
            if TOKEN_ROWS.search(name):
                adapter = model.get_submodule(TOKEN_ROWS.sub("token_adapter", name))
                plain = WRAPPERS.sub("", TOKEN_ROWS.sub("weight", name))
                rows = torch.tensor(adapter.token_indices["default"])
            plain = tied.get(plain, plain)  # A copy of an output layer that peft has made is no longer tied.
            is_wanted = plain in self.names and (isinstance(tensor, torch.nn.Parameter) or self.config.pretrained)
            if (is_wanted or rows is not None) and not tensor.is_meta:
                places.setdefault(plain, []).append((tensor, rows))
        return places


def names_of_placeholders(model: torch.nn.Module) -> set[str]:
    """The names of the parameters that have no numbers yet."""
    weights = getattr(model, "first_weights", None)
    if not isinstance(weights, FirstWeights):
        return set()
    waiting = weights.names | {copy for copy, name in model.all_tied_weights_keys.items() if name in weights.names}
    return {name for name, _ in model.named_parameters() if WRAPPERS.sub("", TOKEN_ROWS.sub("weight", name)) in waiting}


def fill_weights(model: torch.nn.Module, device: torch.device) -> None:
    """Give the weights of this rank their numbers, on its device. A model of a fork may have them already."""
    if isinstance(getattr(model, "first_weights", None), FirstWeights):
        model.first_weights.fill(model, device)


def whole_weights(state: dict[str, torch.Tensor]) -> dict[str, Weight]:
    return {name: Weight(numbers, {name: sample_of(numbers)}) for name, numbers in state.items()}


def put(place: torch.Tensor, weight: Weight, rows: torch.Tensor | None, device: torch.device) -> None:
    """Copy what this rank keeps of a weight into its place."""
    numbers = weight.numbers if rows is None else weight.numbers[rows]
    if isinstance(place, DTensor):
        starts = [there.start for there in weight.region] or [0] * place.ndim
        inner = [slice(here.start - start, here.stop - start) for here, start in zip(region_of(place), starts)]
        place.to_local().copy_(numbers[tuple(inner)])
    else:
        place.data = numbers.to(device=device, dtype=place.dtype, copy=True)


@contextmanager
def turn_on_this_machine(reason: str):
    """One process of a machine at a time."""
    say(f"The ranks of a machine build the whole model in turn: {reason}.")
    with FileLock(Path(tempfile.gettempdir()) / f"samerun-{os.getuid()}.lock"):  # Others may not open the file.
        yield


# A new model ----------------------------------------------------------------------------------------------------------


def drawn(plain: PreTrainedModel, seed: int, names: set[str]) -> Iterable[dict[str, torch.Tensor]]:
    """The weights of a new model, as its own _init_weights() draws them."""
    for owner, prefix, module, recurse, above in units(plain):
        inner = {name: f"{prefix}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=recurse)}
        inner = {name: whole for name, whole in inner.items() if whole not in plain.all_tied_weights_keys}
        if names.isdisjoint(inner.values()):
            continue
        parts = list(module.named_modules()) if recurse else [("", module)]
        for _, part in parts:
            for name, weight in part._parameters.items():
                if weight is not None:
                    empty = torch.full(weight.shape, torch.nan, dtype=weight.dtype)
                    part._parameters[name] = torch.nn.Parameter(empty, weight.requires_grad)
        # Not torch.manual_seed(), which seeds devices, too, and takes a while for it. These numbers are of the CPU.
        for name, part in reversed(parts):  # What a module changes in those within it comes after these.
            torch.default_generator.manual_seed(zlib.crc32(f"{seed} {prefix} {name}".encode()))
            owner._init_weights(part)
        for its_owner, name, outer in reversed(above):  # The modules beside this one have no numbers that could change.
            torch.default_generator.manual_seed(zlib.crc32(f"{seed} {prefix} within {name}".encode()))
            its_owner._init_weights(outer)
        done = [name for name in inner if not module.get_parameter(name).sum().isnan()]  # A sum takes no memory.
        yield {inner[name]: module.get_parameter(name) for name in done}
        let_go(module, recurse)


def units(plain: PreTrainedModel) -> Iterable[tuple[PreTrainedModel, str, torch.nn.Module, bool, list[tuple]]]:
    """Layers as a whole, and the modules outside of layers by themselves: with the model that draws their weights,
    their name, whether the modules within belong to them, and the modules that they are in, from the outermost on."""

    def walk(owner: PreTrainedModel, prefix: str, module: torch.nn.Module, above: list[tuple]):
        if isinstance(module, PreTrainedModel):
            owner = module
        if any(weight is not None for weight in module._parameters.values()):
            yield owner, prefix, module, False, above
        above = [*above, (owner, prefix, module)]
        for name, child in module.named_children():
            whole = f"{prefix}.{name}".lstrip(".")
            if isinstance(module, torch.nn.ModuleList):
                yield owner, whole, child, True, above
            else:
                yield from walk(owner, whole, child, above)

    return walk(plain, "", plain, [])
