"""Whether ranks that have divided a model compute what it computes as a whole: its loss, and all its gradients."""

import copy
import functools
import math
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from samerun.data.batches import collate
from samerun.model.build import vocabulary_size
from samerun.model.checks import probe_row
from samerun.model.loss import joins_documents


def small_model(model: PreTrainedModel, chunks: int, device: torch.device) -> PreTrainedModel:
    """A model of the same kind and width with few layers, in float32 and the same on all ranks.

    What differs from one rank to another, such as the plans of transformers and the sums over ranks, is a matter of the
    kind and the layout. So a mistake in it shows in a few layers, and no rank needs the whole model to find it. What
    this cannot see: what only further layers of a kind do, and a weight of the real model that is not finite.
    """
    found = copy.deepcopy(model.config)
    text, count = found.get_text_config(), layers_to_try(model, chunks)
    text.num_hidden_layers = count
    for name in "layer_types", "mlp_layer_types":
        if getattr(text, name, None):
            setattr(text, name, getattr(text, name)[:count])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = type(model)._from_config(found, dtype=torch.float32)
        for parameter in small.parameters():  # No two alike, and large enough that all gradients are above rounding.
            if parameter.ndim < 2:
                parameter.data += 0.1 * torch.randn_like(parameter)
            else:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    small.set_attn_implementation(model.config._attn_implementation)
    return small.to(device).eval()


def layers_to_try(model: PreTrainedModel, chunks: int) -> int:
    """So many of the first layers that there is one of each kind, and one for each chunk of a pipeline."""
    layers, types = model.get_decoder().layers, getattr(model.config.get_text_config(), "layer_types", None)
    first = {}
    for number, layer in enumerate(layers):
        shapes = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
        first.setdefault((types and types[number], shapes), number)
    return min(len(layers), max(2, chunks, 1 + max(first.values())))


def try_out_whole(model: PreTrainedModel, loss_of: Callable) -> dict[str, float]:
    """The loss of a short row, and the norm of each gradient, which is let go of as soon as that is known.

    They are in the order of the backward pass: what is wrong comes before what that makes wrong.
    """
    batch = collate([probe_row(vocabulary_size(model), packed=True)], model.device, joins_documents(model))
    found, hooks = {}, []

    def note(name: str, parameter: torch.nn.Parameter) -> None:
        found[f"gradient of {name}"] = parameter.grad.norm().item()
        parameter.grad = None

    for name, parameter in model.named_parameters():
        hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(note, name)))
    loss, metrics = loss_of(model, batch, chunked=False)
    loss.backward()
    for hook in hooks:
        hook.remove()
    norm = math.hypot(*found.values())
    return {"loss": metrics["loss"].item()} | found | {"gradient norm": norm}


def first_difference(whole: dict[str, float], divided: dict[str, float]) -> str:
    """The first name whose value is another one beyond rounding in float32, or ""."""
    rounding = 1e-6 * max(whole.values())
    for name, value in whole.items():
        tolerance = 1e-5 if name == "loss" else 1e-3
        if not abs(divided.get(name, math.nan) - value) <= tolerance * value + rounding:
            return name
    return ""
