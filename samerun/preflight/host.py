"""What a host holds in its own memory, beyond what the libraries of its ranks take: about a GiB for each."""

import torch
import transformers
from torch.nn import Embedding, ModuleList

from samerun.errors import require
from samerun.model.lora import starts_from_weights
from samerun.model.outline import is_of_transformers, is_quantized
from samerun.model.small import layers_to_try, narrow, with_layers
from samerun.preflight.memory import model_without_storage, numbers_in, own_part
from samerun.preflight.planned_launch import PlannedLaunch
from samerun.run.export import export_dtype


def memory_per_host(launch: PlannedLaunch, found: transformers.PreTrainedConfig) -> dict[str, float]:
    """The most bytes of host memory, by what its ranks are doing. Their weights are on devices.

    A rank that reads or draws weights has one module of the model at a time, and what it is made from. For a
    checkpoint, each copies what it trains, and what it writes takes twice its size in addition, as safetensors makes
    one block of it. In the export, that copy is still there; where ranks share the weights, two at most have a layer.

    Raises UserError where a rank builds the whole model.
    """
    config, layout = launch.config, launch.layout
    is_whole = is_quantized(config.model, found)
    if config.model.lora is not None:
        is_whole |= starts_from_weights(config.model.lora)
    model = model_without_storage(config.model, found, found.get_text_config().num_hidden_layers)
    plain = model if config.model.lora is None else model.get_base_model()
    is_whole |= not config.model.pretrained and not is_of_transformers(plain)
    kinds = "quantized weights, of LoRA that starts from weights, and of new weights of a class of one's own"
    require(not is_whole, f"each rank builds the whole model of {kinds}")
    ranks = min(config.perf.ranks_per_host, launch.num_processes)
    largest = max(numbers_in(module) for module in modules_at_a_time(model))
    tried = 0  # By every rank, before it has its part.
    if layout.is_divided or layout.row_ranks > 1:
        chunks = layout.pp * config.model.chunks_per_rank() if layout.pp > 1 else 1
        few = narrow(with_layers(model.config, layers_to_try(model, chunks)), layout.ep)
        tried = numbers_in(model_without_storage(config.model, few, few.get_text_config().num_hidden_layers))
    part = own_part(config, found, layout)
    state = (4 * part.trained + part.moments) / layout.shards
    writers = launch.num_processes / (layout.shards * layout.tp * layout.pp)  # They share what all of them have.
    writing = min(ranks, 2) if launch.is_sharded or layout.is_divided else ranks
    dtype, exported = getattr(torch, config.model.dtype), export_dtype(config, launch.precision)
    return {
        "start": ranks * 2 * max(largest * dtype.itemsize, 4 * tried),
        "save": ranks * (state + 2 * state / writers),
        "export": ranks * state + writing * 2 * largest * exported.itemsize,
    }


def modules_at_a_time(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers, and the tables of embeddings."""
    layers = [layer for module in model.modules() if isinstance(module, ModuleList) for layer in module]
    return layers + [module for module in model.modules() if isinstance(module, Embedding)]
