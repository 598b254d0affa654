"""DTensors, the state of a checkpoint, and optimizers of a model that was divided."""

import math
import re

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor

from samerun.model.outline import unwrapped
from samerun.optim import check_state


def retarget(
    optimizers: list[torch.optim.Optimizer], names: dict[torch.nn.Parameter, str], model: torch.nn.Module
) -> None:
    """Let the optimizers train the parameters that the model has now under the names of those that they were made for.

    There is one group per mesh of devices, because a fused update cannot mix parameters of several, or whole ones.
    """
    for optimizer in optimizers:
        groups = []
        for group in optimizer.param_groups:
            alike = {}
            for old in group["params"]:
                parameter = model.get_parameter(names[old])
                if parameter.is_meta:  # Another rank trains it.
                    continue
                alike.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
            groups += [group | {"params": parameters} for parameters in alike.values()]
        optimizer.param_groups = groups


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose parts are on several ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shards_of(tensor: torch.Tensor) -> int:
    """Into how many parts a tensor is divided among ranks."""
    placements = getattr(tensor, "placements", ())
    return math.prod(tensor.device_mesh.size(at) for at, one in enumerate(placements) if not one.is_replicate())


def without_wrappers(name: str) -> str:
    """The name of a weight as a checkpoint has it."""
    return re.sub(r"\b(_checkpoint_wrapped_module|_orig_mod)\.", "", name)


def names_of_shared(model: torch.nn.Module) -> set[str]:
    """The names of parameters that have an earlier name, too, as the trained rows of tied embeddings have with LoRA."""
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    first = {name for name, _ in model.named_parameters()}
    return {without_wrappers(name) for name in every - first}


def scales_of_frozen(model: torch.nn.Module) -> tuple[str, ...]:
    """How the names of the scales of quantized weights begin. bitsandbytes saves them as parts of what they belong to,
    which is frozen."""
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    return tuple(f"{without_wrappers(name)}." for name in frozen)


def trained_state(wrapped: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """The weights that are trained, by their names in the unwrapped model, and the state of the optimizers.

    Rates, betas and the like are not in it, because they are in the config. For an optimizer that has no state yet,
    torch makes it, by a step with a learning rate of 0. torch counts that as an update, so the count is set back to 0.
    """
    new = [optimizer for optimizer in optimizers if not optimizer.state]
    for optimizer in new:
        optimizer.zero_grad()  # torch makes no state while there are gradients, and DDP keeps its own, as zeros.
    options = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True)
    weights, optimizer_state = get_state_dict(wrapped, optimizers, options=options)
    for optimizer in new:
        check_state(optimizer)
        for of_weight in optimizer.state.values():
            if "step" in of_weight:
                of_weight["step"].zero_()
    model = unwrapped(wrapped)
    tied = {*model.all_tied_weights_keys, *names_of_shared(model)}  # Saved once, by the name of what they are tied to.
    scales = scales_of_frozen(model)
    state = {f"optimizer.{name}": value for name, value in optimizer_state.items() if name.startswith("state.")}
    left_out = {name for name, value in weights.items() if value.is_meta or name in tied or name.startswith(scales)}
    return state | {f"model.{name}": value for name, value in weights.items() if name not in left_out}
