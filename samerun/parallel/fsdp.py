"""FSDP2 and HSDP: each rank holds a shard of the weights, and gathers those of one layer at a time."""

from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from samerun.errors import require
from samerun.model.loss import patched
from samerun.model.outline import unsplit_modules


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that are sharded one by one. One that holds the embedding, as in a BERT, is left out: the output
    layer may have the same weight, and both must be sharded together."""
    embedding = model.get_input_embeddings()
    return [module for module in unsplit_modules(model) if embedding not in module.modules()]


def shard_layers(model: torch.nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """FSDP2 among the ranks of a mesh that have the same part of the model. The weights of others are on meta."""
    elsewhere = {parameter for parameter in model.parameters() if parameter.is_meta}
    for module in [*layers_of(model), model]:
        fully_shard(module, mesh=mesh, ignored_params=elsewhere, **options)


def names_of_layers(model: torch.nn.Module) -> list[str]:
    """The classes that Accelerate is to shard one by one: it refuses those that the model lacks, and transformers may
    name such ones, as for Gemma 3. Raises UserError if there are none, because all would be gathered at once."""
    named = set(model._no_split_modules or [])
    present = {type(module).__name__ for module in layers_of(model)}
    advice = "name them in fsdp_transformer_layer_cls_to_wrap of the launcher file"
    require(present or not named, f"launch: FSDP2 finds no layers called {', '.join(sorted(named))}; {advice}")
    return sorted(present)


def are_elsewhere(model: torch.nn.Module, layers: list[torch.nn.Module]) -> bool:
    """Whether a module outside of these layers has one of their weights, too."""
    inside = {module for layer in layers for module in layer.modules()}
    weights = {weight for layer in layers for weight in layer.parameters()}
    others = (module for module in model.modules() if module not in inside)
    return any(not weights.isdisjoint(module.parameters(recurse=False)) for module in others)


@contextmanager
def whole_embeddings(model: torch.nn.Module):
    """While Accelerate shards a model, hide its input embedding and output layer if it would tear apart what is shared:
    it puts each into a unit, or both into one if their weight is the same. The weight may be within an adapter, or also
    that of an encoder's embedding and a decoder's, as in T5, and the bias another module's, as in BERT."""
    layers = [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]
    are_one = len({getattr(layer, "weight", layer) for layer in layers}) == 1
    units = [layers] if are_one else [[layer] for layer in layers]
    with ExitStack() as hidden:
        if any(are_elsewhere(model, unit) for unit in units):
            for name in "get_input_embeddings", "get_output_embeddings":
                hidden.enter_context(patched(model, name, lambda: None))
        yield


def before_backward(module: torch.nn.Module, accumulation: str, is_last: bool, recurse: bool = True) -> None:
    """Tell FSDP2 what to do after the coming backward pass, see batch.accumulation. Accelerate defers reductions."""
    if accumulation == "within_copies":
        module.set_requires_all_reduce(is_last, recurse=recurse)
    if accumulation == "kept_weights":  # Those that the next micro-step would gather again. An update needs them gone.
        module.set_reshard_after_backward(is_last, recurse=recurse)


def precision_policy(accelerator: Accelerator) -> MixedPrecisionPolicy:
    """The types of FSDP2. Accelerate's and torch's own policies would also sum over the ranks in bf16 or fp16."""
    if not accelerator.native_amp:
        return MixedPrecisionPolicy()
    computes_in = torch.float16 if accelerator.mixed_precision == "fp16" else torch.bfloat16
    return MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32)


def sharding_options(accelerator: Accelerator) -> dict[str, Any]:
    """What the launcher file says about FSDP2, as fully_shard() takes it."""
    return {
        "reshard_after_forward": accelerator.state.fsdp_plugin.reshard_after_forward,
        "mp_policy": precision_policy(accelerator),
    }
