"""What build_optimizer() and train_step() in train.py stand on.

Which weights decay, which are for Muon, AdamW in 8 bits; the guard of updates, and the loss scale of fp16.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from samerun.errors import UserError, one_line, require

# Parameters of several dimensions that multiply no states: a number for each channel, expert or head.
NO_MATRICES = {"A_log", "D", "b1", "b2", "dt_bias", "scale", "time_mix_key", "time_mix_receptance", "time_mix_value"}

# What torch says of an operation that it does not have for DTensors.
OF_SHARDS = "sharding strategy", "Sharding propagation"

FIRST_SCALE, LEAST_SCALE, LARGEST_SCALE = 2.0**10, 2.0**-10, 2.0**20  # Of LossScale: powers of 2 round nothing.
BEYOND_FP16 = "fp16 has no numbers above 65,504; use bf16, or no"


def weight_matrices(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The weights that decay: matrices, also stacked ones of experts, embeddings and kernels.

    The biases of experts are stacked, too, and a Mamba's A_log has a value per channel and state. So the number of
    dimensions does not tell. What its model has marked as _no_weight_decay does not decay, either, nor do norms, some
    of which have a row for each head.
    """
    found, of_norms = set(), set()
    for module in model.modules():
        if "Norm" in type(module).__name__ and not isinstance(module, torch.nn.Embedding):
            of_norms.update(module.parameters(recurse=False))
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        is_marked = getattr(parameter, "_no_weight_decay", False)
        is_named = last in NO_MATRICES or "bias" in last
        if parameter.ndim >= 2 and not is_named and not is_marked and parameter not in of_norms:
            found.add(parameter)
    return found


def hidden_matrices(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The weights for Muon: all matrices except embeddings and the output layer (kellerjordan.github.io/posts/muon).

    Experts that are stacked in one weight are left to AdamW, because torch's Muon takes no more than two dimensions.
    """
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]  # With their adapters.
    ends += [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    outside = {weight for module in ends for weight in module.parameters()}
    return {matrix for matrix in weight_matrices(model) - outside if matrix.ndim == 2}


def adamw_8bit(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """AdamW of bitsandbytes, with both moments in blocks of 256 numbers of 8 bits (arxiv.org/abs/2110.02861).

    Weights of fewer than 4,096 numbers keep moments in float32. Raises UserError if bitsandbytes is not installed.
    """
    try:
        import bitsandbytes
    except ImportError:
        raise UserError("optim.name adamw_8bit: needs bitsandbytes; pip install bitsandbytes==0.50.2") from None

    class AdamW8bit(bitsandbytes.optim.AdamW8bit):
        state_dict = torch.optim.Optimizer.state_dict  # Theirs nests what belongs to the codes.

        def init_state(self, group: dict[str, Any], weight: torch.nn.Parameter, *place: int) -> None:
            super().init_state(group, weight, *place)
            # Checkpoints keep tensors that share no memory. There the step is an int, and weights share their tables.
            kept = self.state[weight].items()
            self.state[weight] = {name: torch.as_tensor(value).clone() for name, value in kept}

    return AdamW8bit(groups, **settings)


class Guard:
    """Skips an update if the loss or the norm of the gradients is not finite.

    A fused optimizer of torch skips by itself if its `found_inf` is 1. That is a tensor on the device, so the host need
    not wait for it. For any other optimizer the host waits in every step, to know whether to call it.
    """

    def __init__(self, max_skipped_steps: int, skipped_steps: int, skipped_in_a_row: int, device: torch.device):
        self.max_skipped_steps = max_skipped_steps
        # The number of skipped updates since step 0, and how many of them were the last ones, in a row.
        self.skipped_steps = torch.tensor(skipped_steps, device=device)
        self.skipped_in_a_row = torch.tensor(skipped_in_a_row, device=device)
        self.tried: set[torch.optim.Optimizer] = set()  # Those that first_update() has called.

    def skip(self) -> None:
        """Count a step without an update, which is no sign of trouble.

        It ends a row of skipped updates, unless the row is too long already: then its first step must stay known.
        """
        self.skipped_steps = self.skipped_steps + 1
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * (self.skipped_in_a_row > self.max_skipped_steps)

    def update(self, optimizers: list[torch.optim.Optimizer], loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Call the optimizers, unless a value is not finite or too many updates in a row were skipped already."""
        value = loss + grad_norm
        # As ~isfinite(value), which takes six operations in place of two: infinity minus itself is NaN, too.
        is_not_finite = (value - value).isnan()
        bad = is_not_finite | (self.skipped_in_a_row > self.max_skipped_steps)
        self.skipped_steps = self.skipped_steps + bad
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * bad
        for optimizer in optimizers:
            if is_fused(optimizer):
                optimizer.found_inf = bad.float()
            elif bad:  # Waits for the device.
                continue
            if optimizer in self.tried:
                optimizer.step()
            else:
                first_update(optimizer)
                self.tried.add(optimizer)

    def read(self) -> tuple[int, int]:
        """The two counters. Waits for the device."""
        skipped, in_a_row = torch.stack((self.skipped_steps, self.skipped_in_a_row)).tolist()
        return skipped, in_a_row


class LossScale:
    """What the passes in fp16 multiply the loss of each target by: their smallest gradients would otherwise become 0.

    If a gradient gets too large for fp16, the scale is halved, and the step is computed again. So no step loses its
    update, which is the same up to rounding whatever the scale is, and no checkpoint needs the scale.
    """

    def __init__(self, precision: str, averages_over: int = 1):
        self.value = FIRST_SCALE if precision == "fp16" else None  # Other precisions need none.
        self.averages_over = averages_over  # The passes multiply by as much, see accumulate().
        self.good_steps = 0

    def of_passes(self, scale: float) -> float:
        """The scale for forward_backward(), which is `scale` in other precisions."""
        return scale if self.value is None else self.value / self.averages_over

    def must_repeat(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> bool:
        """Whether it was too large for this step, which is to be computed again. Waits for the device, in fp16."""
        if self.value is None:
            return False
        is_too_large = loss.isfinite() & ~grad_norm.isfinite()
        if not is_too_large:
            self.good_steps += 1
            if self.good_steps % 1000 == 0:  # Perhaps the gradients are smaller by now.
                self.value = min(2 * self.value, LARGEST_SCALE)
            return False
        self.good_steps = 0
        if self.value > LEAST_SCALE:
            self.value /= 2
            return True
        self.value = FIRST_SCALE  # No scale helps, and Guard skips the update.
        return False


def first_update(optimizer: torch.optim.Optimizer) -> None:
    """Call an optimizer. Raises UserError if torch cannot divide what it does, or if it keeps something that no
    checkpoint does: a continued run would go on with a different optimizer, without a word."""
    name, before = f"build_optimizer: {type(optimizer).__name__}", numbers_of_groups(optimizer)
    try:
        optimizer.step()
    except RuntimeError as error:
        if not any(word in str(error) for word in OF_SHARDS):
            raise
        first = "take one without fused=True, another one" if is_fused(optimizer) else "take another one"
        advice = f"{first}, or a launcher file that does not divide them"
        raise UserError(f"{name} cannot update weights that ranks divide ({one_line(error)}); {advice}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):  # That of DeepSpeed calls one of torch.
        return
    now = numbers_of_groups(optimizer)
    changed = sorted({key for old, new in zip(before, now) for key in new if new[key] != old.get(key)})
    advice = "no checkpoint keeps; let it keep them as tensors in the state of each weight"
    require(not changed, f"{name} changes {', '.join(changed)} of its parameter groups, which {advice}")
    check_state(optimizer)


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError if the optimizer keeps of a weight what no checkpoint does."""
    name = f"build_optimizer: {type(optimizer).__name__}"
    for weight, state in optimizer.state.items():
        if not isinstance(weight, torch.Tensor):
            raise UserError(f"{name} keeps {weight!r} beside the state of each weight; put it into that state")
        for key, value in state.items():
            if type(value) not in (torch.Tensor, DTensor):
                raise UserError(f"{name} keeps {key} as {value!r}; checkpoints keep plain tensors, so make it one")
            is_part = isinstance(weight, DTensor) and not isinstance(value, DTensor) and value.numel() > 1
            advice = "make it a DTensor, as torch.zeros_like(weight) is"
            require(not is_part, f"{name} keeps {key} of each rank, and checkpoints that of the first one; {advice}")


def numbers_of_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """What the groups have besides their weights. The rates are set in every step."""
    return [
        {key: value for key, value in group.items() if isinstance(value, int | float) and key != "lr"}
        for group in optimizer.param_groups
    ]


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer skips its update by itself when its found_inf is 1."""
    return all(group.get("fused") for group in optimizer.param_groups)
