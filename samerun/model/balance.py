"""Balanced experts without a term of the loss: the biases by which a mixture's routers choose follow the experts' load.

Without balance, a router soon sends most tokens to a few experts, and the others learn nothing. A router with biases,
as those of DeepSeek-V3 and GLM-4.5, chooses the experts whose score and bias are the largest, and weighs them by the
scores alone. So the biases change who computes, and no gradient. After each step, the bias of each expert that got
fewer tokens than the mean rises by a fixed amount, and that of each one that got more falls (arXiv:2408.15664).

A token counts if it is a target, wherever it is computed: no padding does. So all ranks together count the same on any
machine.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from samerun.errors import require
from samerun.model.architecture import ROUTER_BIASES

NO_TARGETS = "model.balance_experts: needs a target for each token; leave it out"


class ExpertBalance:
    """The tokens that each expert of each layer of a model gets in a step, and the biases that follow from it."""

    def __init__(self, model: torch.nn.Module, amount: float, device: torch.device):
        self.amount = amount
        self.layers = layers_with_biases(model)
        setting = "model.balance_experts"
        kind = model.config.model_type
        advice = "has biases that are buffers, as those of DeepSeek-V3 are; leave it out"
        require(self.layers, f"{setting}: no router of this {kind} {advice}")
        for experts, owner, name in self.layers:
            is_list = type(experts).forward is torch.nn.Module.forward  # The layer calls each of them.
            advice = "are a list, and nothing counts the tokens of each; leave it out"
            require(not is_list, f"{setting}: the experts of this {kind} {advice}")
            count = owner.get_buffer(name).numel()
            experts.tokens_of_experts = torch.zeros(count, dtype=torch.int64, device=device)
            experts.is_target = None
            experts.register_forward_pre_hook(count_tokens)
        self.load: torch.Tensor | None = None  # int64 [layers, experts]: the tokens of the latest step, of all ranks.

    def counting(self, passed: Callable) -> Callable:
        """The same forward pass of a model over a batch, which tells the layers which tokens are targets."""

        def counted(model: torch.nn.Module, batch: Any, **options: Any) -> Any:
            require(hasattr(batch, "targets"), NO_TARGETS)
            self.tell(batch.targets.flatten() != -100)
            returned = passed(model, batch, **options)
            self.tell(None)  # A layer that computes its activations again does not count again.
            return returned

        return counted

    def tell(self, is_target: torch.Tensor | None) -> None:
        for experts, _, _ in self.layers:
            experts.is_target = is_target

    def take_load(self, is_alone: bool) -> None:
        """Add up what all ranks have counted in the passes of a step."""
        counts = [experts.tokens_of_experts for experts, _, _ in self.layers]
        self.load = torch.stack(counts)
        torch._foreach_zero_(counts)
        if not is_alone:
            dist.all_reduce(self.load)

    def update(self, is_skipped: torch.Tensor) -> None:
        """Move the biases, unless the step made no update. That of an expert with exactly the mean stays."""
        tokens = self.load.sum(1, keepdim=True)
        directions = (tokens - self.load * self.load.shape[1]).sign() * ~is_skipped
        for direction, (_, owner, name) in zip(directions, self.layers):
            bias = owner.get_buffer(name)
            if not bias.is_meta:  # Then another rank of a pipeline has it.
                bias.add_(self.amount * direction)

    def metrics(self) -> dict[str, float | None]:
        """By how much more tokens than the mean the experts with the most get, in the worst layer: 0 is balanced.

        None for a step without targets.
        """
        largest = (self.load.max(1).values / self.load.double().mean(1)).max().item()
        return {"train/expert_overload": None if math.isnan(largest) else largest - 1}


def layers_with_biases(model: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module, str]]:
    """The experts of each layer, the module that has the biases of their router, and their name in it."""
    found = []
    for block in model.modules():
        experts = getattr(block, "experts", None)
        for owner in (block, *block.children()):
            names = [name for name in ROUTER_BIASES if name in owner._buffers]
            if isinstance(experts, torch.nn.Module) and names:
                found.append((experts, owner, names[0]))
    return found


def count_tokens(experts: torch.nn.Module, args: tuple) -> None:
    """Before a pass of the experts, whose second argument is the numbers of those that each token has, [tokens, k]."""
    if not torch.is_grad_enabled() or experts.is_target is None:  # No pass of training.
        return
    chosen = args[1]
    require(len(experts.is_target) == len(chosen), NO_TARGETS)
    targets = experts.is_target[:, None].expand_as(chosen)
    experts.tokens_of_experts.scatter_add_(0, chosen.flatten(), targets.flatten().long())
