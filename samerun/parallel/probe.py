"""Whether ranks that have divided a model compute what it computes as a whole: its loss, and all its gradients."""

import functools
import math
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from samerun.model.checks import probe_batch


def try_out_whole(model: PreTrainedModel, loss_of: Callable) -> dict[str, float]:
    """The loss of a short row, and the norm of each gradient, which is let go of as soon as that is known.

    They are in the order of the backward pass: what is wrong comes before what that makes wrong.
    """
    batch, found, hooks = probe_batch(model, model.device), {}, []

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
