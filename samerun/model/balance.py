"""Balanced experts: what makes the routers of a mixture send all experts about as many tokens.

Without balance, a router soon sends most tokens to a few experts, and the others learn nothing. There are two ways:

- Biases (model.balance_experts). A router with biases, as those of DeepSeek-V3 and GLM-4.5, chooses the experts whose
  score and bias are the largest, and weighs them by the scores alone. So the biases change who computes, and no
  gradient. After each step, the bias of each expert that got fewer tokens than the mean rises by a fixed amount, and
  that of each one that got more falls (arXiv:2408.15664).
- A term of the loss (model.balance_loss), for Mixtral, Qwen3-MoE and others: see ExpertBalance.term().

A token counts if it is a target, wherever it is computed: no padding does. So all ranks together count the same on any
machine.
"""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from samerun.config import Model
from samerun.errors import require
from samerun.model.architecture import ROUTER_BIASES

NO_TARGETS = "model.balance_experts, balance_loss: need a target for each token; leave them out"


@dataclass
class Layer:
    """The modules of a layer that choose experts and compute with them."""

    experts: torch.nn.Module
    router: torch.nn.Module | None  # If its logits are the first that it returns.
    owner_of_bias: torch.nn.Module | None  # If the bias is a buffer.
    bias: str

    def get_bias(self) -> torch.Tensor:
        return self.owner_of_bias.get_buffer(self.bias)

    def number_of_experts(self) -> int:
        """LongCat's routers also choose experts that compute nothing."""
        return self.get_bias().numel() if self.bias else self.experts.num_experts


class ExpertBalance:
    """The tokens that each expert of each layer of a model gets in a step, and what follows from them."""

    def __init__(self, model: PreTrainedModel, config: Model, device: torch.device):
        self.amount, self.weight = config.balance_experts, config.balance_loss
        self.layers = layers_to_balance(model, config)
        for layer in self.layers:
            experts = layer.experts
            experts.tokens_of_experts = torch.zeros(layer.number_of_experts(), dtype=torch.int64, device=device)
            experts.is_target = experts.logits = None
            experts.register_forward_pre_hook(count_tokens)
            if self.weight:
                layer.router.register_forward_hook(functools.partial(keep_logits, experts))
        # int64 [layers, experts], of all ranks: the tokens of the latest step, and of the latest one with an update.
        self.load = self.load_before = torch.stack([layer.experts.tokens_of_experts for layer in self.layers])

    def counting(self, passed: Callable, add: Callable) -> Callable:
        """The same forward pass of a model over a batch, which tells the layers which tokens are targets.

        `add`, called with what the pass returns and term(), returns the former with the latter.
        """

        def counted(model: torch.nn.Module, batch: Any, **options: Any) -> Any:
            require(hasattr(batch, "targets"), NO_TARGETS)
            is_target = batch.targets.flatten() != -100
            self.tell(is_target)
            returned = passed(model, batch, **options)
            self.tell(None)  # A layer that computes its activations again does not count again.
            return add(returned, self.term(is_target)) if self.weight and torch.is_grad_enabled() else returned

        return counted

    def tell(self, is_target: torch.Tensor | None) -> None:
        for layer in self.layers:
            layer.experts.is_target = is_target

    def term(self, is_target: torch.Tensor) -> torch.Tensor:
        """The load-balancing loss of the latest pass: the sum over its targets and layers, times its weight.

        It is that of each layer as in arXiv:2101.03961 (equations 4 to 6), with the shares of the global batch
        (arXiv:2501.11873): of experts with as many tokens each, 1 per target. The shares are those of the step before,
        because a step knows its own only at its end. So it is a sum over tokens that does not depend on the
        micro-batches, as any other loss.
        """
        total, tokens = torch.zeros((), device=is_target.device), self.load_before.sum(1, keepdim=True)
        shares = torch.where(tokens > 0, self.load_before / tokens, 1 / self.load_before.shape[1])
        for layer, shares_of_layer in zip(self.layers, shares * shares.shape[1]):
            logits, layer.experts.logits = layer.experts.logits, None
            if logits is not None:  # Otherwise the layer is another rank's.
                of_tokens = (logits.softmax(-1, torch.float32) * shares_of_layer).sum(-1)
                total = total + (of_tokens * is_target).sum()
        return self.weight * total

    def take_load(self, is_alone: bool) -> None:
        """Add up what all ranks have counted in the passes of a step."""
        counts = [layer.experts.tokens_of_experts for layer in self.layers]
        self.load = torch.stack(counts)
        torch._foreach_zero_(counts)
        if not is_alone:
            dist.all_reduce(self.load)

    def update(self, is_skipped: torch.Tensor) -> None:
        """Move the biases, unless the step made no update. That of an expert with exactly the mean stays."""
        self.load_before = torch.where(is_skipped, self.load_before, self.load)
        tokens = self.load.sum(1, keepdim=True)
        directions = (tokens - self.load * self.load.shape[1]).sign() * ~is_skipped
        for direction, layer in zip(directions, self.layers):
            if self.amount and not layer.get_bias().is_meta:  # Then another rank of a pipeline has it.
                layer.get_bias().add_(self.amount * direction)

    def metrics(self) -> dict[str, float | None]:
        """By how much more tokens than the mean the experts with the most get, in the worst layer: 0 is balanced.

        None for a step without targets.
        """
        largest = (self.load.max(1).values / self.load.double().mean(1)).max().item()
        return {"train/expert_overload": None if math.isnan(largest) else largest - 1}


def check_balance(found: PreTrainedConfig, config: Model) -> None:
    """Raises UserError for a model that cannot be balanced in this way, before its weights exist."""
    if config.balance_experts or config.balance_loss:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(found, trust_remote_code=config.trust_remote_code)
        layers_to_balance(model, config)


def layers_to_balance(model: PreTrainedModel, config: Model) -> list[Layer]:
    """Raises UserError if there are none, or none that can be balanced in this way."""
    layers, kind = mixture_layers(model), model.config.model_type
    if config.balance_experts:
        layers = [layer for layer in layers if layer.bias]
        advice = "has biases that are buffers, as those of DeepSeek-V3 are; leave it out"
        require(layers, f"model.balance_experts: no router of this {kind} {advice}")
    if config.balance_loss:
        layers = [layer for layer in layers if layer.router]
        is_known = hasattr(sys.modules[type(model.get_decoder()).__module__], "load_balancing_loss_func")
        advice = "as it has for a mixtral or a qwen3_moe; leave it out"
        require(layers and is_known, f"model.balance_loss: transformers has no such loss for this {kind}, {advice}")
    for layer in layers:
        is_list = type(layer.experts).forward is torch.nn.Module.forward  # The layer calls each of them.
        advice = "are a list, and nothing counts the tokens of each; leave it out"
        require(not is_list, f"model.balance_experts: the experts of this {kind} {advice}")
    return layers


def mixture_layers(model: PreTrainedModel) -> list[Layer]:
    """All layers with experts, and what of their routers can be found."""
    routers = set()  # The classes of those that return their logits first, as transformers has noted.
    for part in model.modules():
        recorder = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        if getattr(recorder, "index", None) == 0:
            routers.add(recorder.target_class)
    found = []
    for block in model.modules():
        experts = getattr(block, "experts", None)
        if isinstance(experts, torch.nn.Module):
            children = [below_adapters(child) for child in block.children()]
            router = next((child for child in children if type(child) in routers), None)
            biases = [(owner, name) for owner in (block, *children) for name in ROUTER_BIASES]
            biases = [(owner, name) for owner, name in biases if name in owner._buffers]
            found.append(Layer(below_adapters(experts), router, *(biases or [(None, "")])[0]))
    return found


def below_adapters(module: torch.nn.Module) -> torch.nn.Module:
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def count_tokens(experts: torch.nn.Module, args: tuple) -> None:
    """Before a pass of the experts, whose second argument is the numbers of those that each token has, [tokens, k]."""
    if not torch.is_grad_enabled() or experts.is_target is None:  # No pass of training.
        return
    chosen = args[1]
    require(len(experts.is_target) == len(chosen), NO_TARGETS)
    targets = experts.is_target[:, None].expand_as(chosen)
    experts.tokens_of_experts.scatter_add_(0, chosen.flatten(), targets.flatten().long())


def keep_logits(experts: torch.nn.Module, router: torch.nn.Module, args: tuple, returned: tuple) -> None:
    """After a pass of the router, whose logits are [tokens, experts]."""
    if torch.is_grad_enabled() and experts.is_target is not None:
        require(returned[0].shape[:-1] == experts.is_target.shape, NO_TARGETS)
        experts.logits = returned[0]


def add_to_loss(returned: tuple[torch.Tensor, dict], term: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """The metrics stay those of token_loss()."""
    loss, metrics = returned
    return loss + term, metrics


def add_to_states(chunk: Any) -> Callable:
    """For a chunk of a pipeline that does not end with the loss, and so multiplies the term by its scale here."""
    return lambda states, term: CarryTerm.apply(states, term * chunk.scale)


class CarryTerm(torch.autograd.Function):
    """States as they are, whose backward pass is also that of a term of the loss."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        return states.view_as(states)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.ones((), device=gradient.device)
