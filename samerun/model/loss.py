"""What applies token_loss(), which is in train.py, to a micro-batch: to all its logits at once or in chunks."""

import functools
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers

from samerun.config import Model
from samerun.data.batches import MicroBatch, in_one_row, to_device
from samerun.errors import require
from samerun.model.attention import DOCUMENTS
from samerun.model.outline import unwrapped

CHUNK = 768  # With model.chunked_loss, the logits of this many tokens exist at a time.
COMPILED_CHUNK = 4096  # See chunk_size().
LARGE_VOCABULARY = 4096  # From here on, chunks take about as long as all logits at once, and less memory.


def wants_chunks(config: Model, vocabulary: int) -> bool:
    """Whether the loss is to be computed in chunks, if the model allows it."""
    if config.chunked_loss != "auto":
        return config.chunked_loss
    return vocabulary >= LARGE_VOCABULARY and config.compile != "full"  # That compiles the whole loss.


def add_up_terms(metrics: dict[str, torch.Tensor], source_ends: dict[str, int]) -> dict[str, torch.Tensor]:
    """The metrics of token_loss() as sums NAME over all tokens and, of those that have terms, NAME/SOURCE as well.

    The tokens of a mixture are those of one source after those of another. `source_ends` says where each source ends.
    Raises UserError for terms of some tokens only, such as those with a target: their sources are not known.
    """
    sums = {name: terms.detach().sum() for name, terms in metrics.items()}
    for name, terms in metrics.items():
        if source_ends and terms.ndim:
            tokens = max(source_ends.values())
            fits = len(terms) >= tokens  # A rank without rows has a token of no source.
            advice = "return one per token, 0 where there is no target, or their sum"
            require(fits, f"token_loss: the metric {name} has {len(terms)} values for {tokens} tokens; {advice}")
            parts = terms.detach().tensor_split(list(source_ends.values()))
            sums |= {f"{name}/{source}": part.sum() for source, part in zip(source_ends, parts)}
    return sums


def compute_loss(
    wrapped: torch.nn.Module, batch: MicroBatch, token_loss: Callable, chunked: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """token_loss() of a micro-batch, all as sums.

    With `chunked`, the logits of a few tokens at a time, and none of tokens without a target.
    """
    model = unwrapped(wrapped)
    is_compiled = compiles_loss(model, batch)
    if is_compiled:
        token_loss = compiled(token_loss)
    if chunked:
        return loss_in_chunks(wrapped, batch, token_loss, is_compiled)
    loss, metrics = token_loss(wrapped(**model_inputs(model, batch)).logits.flatten(0, 1), batch.targets.flatten())
    return loss, add_up_terms(metrics, batch.source_ends)


def compiles_loss(model: torch.nn.Module, batch: MicroBatch) -> bool:
    """Whether torch compiles the loss: only on a GPU, because for a CPU that takes longer than most runs gain by it."""
    return batch.targets.is_cuda and getattr(model, "is_compiled", False)


@functools.cache
def compiled(token_loss: Callable) -> Callable:
    """token_loss() as code for any number of tokens, which never stores the logits in float32."""
    return torch.compile(token_loss, dynamic=True)


def joins_documents(model: torch.nn.Module) -> bool:
    """Whether the model takes the documents of a micro-batch without padding, see collate()."""
    attention = model.config._attn_implementation
    return attention == DOCUMENTS or "flash" in attention


def model_inputs(model: torch.nn.Module, batch: MicroBatch) -> dict[str, Any]:
    """What the model's forward() takes."""
    if model.config._attn_implementation != DOCUMENTS:
        whole = not (batch.documents and batch.documents.row_ranks)
        advice = "first call its set_attn_implementation() with config._attn_implementation of the trained model"
        require(whole, f"model_inputs: ranks share rows, of which another model would see a part; {advice}")
        batch = in_one_row(batch)  # As the kernels behind transformers' words for documents want it.
    names = ("input_ids", "inputs_embeds", "position_ids", "documents")
    inputs = {name: value for name in names if (value := getattr(batch, name)) is not None}
    inputs["use_cache"] = False  # transformers keeps packed documents apart only without a cache.
    if batch.documents and model.config._attn_implementation != DOCUMENTS:
        documents = inputs.pop("documents")  # The flash attention of transformers has its own words for them.
        inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = documents.ends
        inputs["max_length_q"] = inputs["max_length_k"] = documents.longest
    return inputs


def chunk_size(output_layer: torch.nn.Module, is_compiled: bool) -> int:
    """How many targets have logits at a time.

    Each chunk adds to the gradient of a trained output layer, which takes as long as the products of some 500 targets.
    Compiled code holds a third of what the logits take otherwise, so there are to be fewer chunks.
    """
    is_trained = any(parameter.requires_grad for parameter in output_layer.parameters())
    return COMPILED_CHUNK if is_compiled and is_trained else CHUNK


def loss_in_chunks(
    wrapped: torch.nn.Module, batch: MicroBatch, token_loss: Callable, is_compiled: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """token_loss() of some targets at a time. All of it happens inside forward(), in one call of each module.

    DDP and FSDP2, which gather weights and wait for gradients by hooks, so see a pass like any other. Only the layers
    can be compiled, because autograd is called here.
    """
    model = unwrapped(wrapped)
    layers, output_layer = model.get_decoder(), model.get_output_embeddings()
    head = head_of(model)

    def forward(**inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        outputs = layers(**inputs)

        def loss_of(states: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            head_of_chunk = functools.partial(head, outputs)
            size, scale = chunk_size(output_layer, is_compiled), 1.0
            if hasattr(model, "loss_scale"):  # Small models that are tried have none.
                scale = model.loss_scale.value or 1.0
            return add_up_chunks(head_of_chunk, states.flatten(0, 1), batch, trained, token_loss, size, scale)

        with patched(output_layer, "forward", loss_of):
            return output_layer(outputs[0])

    with patched(model, "forward", forward):
        return wrapped(**model_inputs(model, batch))


def add_up_chunks(
    head: Callable,
    states: torch.Tensor,
    batch: MicroBatch,
    weights: list[torch.nn.Parameter],
    token_loss: Callable,
    size: int,
    scale: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """token_loss() of `size` targets at a time, of the logits that `head` makes of their states [tokens, width].

    The gradients of a chunk are computed at once, so that its logits are neither kept nor computed a second time. They
    are those of the loss times `scale`, see LossScale.
    """
    training, targets = torch.is_grad_enabled(), batch.targets.flatten()
    total, metrics, of_states, of_weights = 0.0, {}, torch.zeros_like(states), {}
    learned = batch.learned if len(batch.learned) else np.zeros(1, np.int64)  # All weights must get a gradient.
    for first in range(0, len(learned), size):
        places_on_host = learned[first : first + size]
        places = to_device(places_on_host, states.device)
        chunk = states.detach()[places].requires_grad_(training)
        loss, metrics_of_chunk = token_loss(head(chunk), targets[places])
        if training:
            of_states[places] = gradient_of_states(loss * scale, chunk, weights, of_weights)
        total = total + loss.detach()
        ends = {source: int(np.searchsorted(places_on_host, end)) for source, end in batch.source_ends.items()}
        add_metrics(metrics, add_up_terms(metrics_of_chunk, ends))
    if training:
        total = WithGradients.apply(total, scale, [of_states, *of_weights.values()], states, *of_weights)
    return total, metrics


def gradient_of_states(
    loss: torch.Tensor,
    states: torch.Tensor,
    weights: list[torch.nn.Parameter],
    total: dict[torch.nn.Parameter, torch.Tensor],
) -> torch.Tensor:
    """Returns the gradient of the states, and adds those of the weights to `total`, in float32.

    Only some of the weights are behind the states. The others have no gradient.
    """
    with torch.autocast(states.device.type, enabled=False):  # It is meant for forward passes.
        gradient, *gradients = torch.autograd.grad(loss, [states, *weights], allow_unused=True)
    for weight, more in zip(weights, gradients):
        if weight in total:
            total[weight] += more
        elif more is not None:
            total[weight] = more.float()
    return gradient


class WithGradients(torch.autograd.Function):
    """A value whose gradients with respect to some tensors are known already, times a scale."""

    @staticmethod
    def forward(
        ctx, value: torch.Tensor, scale: float, gradients: list[torch.Tensor], *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.scale, ctx.gradients = scale, gradients
        return value.clone()

    @staticmethod
    def backward(ctx, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # Autograd takes what nobody else holds, and copies the rest.
        return None, None, None, *(gradient.mul_(factor / ctx.scale) for gradient in gradients)


def head_of(model: torch.nn.Module) -> Callable:
    """What forward() does after the layers, in the model's own way: the output layer, and what scales or bounds logits.

    It is a function of what the layers have returned, and of states [tokens, width] in place of theirs.
    """
    forward, layers, output_layer = model.forward, model.get_decoder(), model.get_output_embeddings()
    place_of_layers, place_of_output_layer = place_of(layers, model), place_of(output_layer, model)
    without_hooks = StandIn(output_layer.forward, output_layer)

    def head(outputs: transformers.utils.ModelOutput, states: torch.Tensor) -> torch.Tensor:
        known = type(outputs)(**{**outputs, "last_hidden_state": states[None]})
        without_layers = StandIn(lambda *_, **__: known, layers)
        with patched(*place_of_layers, without_layers), patched(*place_of_output_layer, without_hooks):
            return forward(inputs_embeds=states[None], use_cache=False).logits.flatten(0, 1)

    return head


class StandIn(torch.nn.Module):
    """A module that calls a function, for a while in the place of another module, whose attributes it borrows."""

    def __init__(self, function: Callable, other: torch.nn.Module | None = None):
        super().__init__()
        self.forward = function
        self.__dict__["other"] = other  # Not a module within this one.

    def __getattr__(self, name: str) -> Any:
        return getattr(self.other, name)


def place_of(module: torch.nn.Module, model: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """The module that holds this one, and under which name."""
    places = []
    for parent in model.modules():
        places += [(parent, name) for name, child in parent.named_children() if child is module]
    [place] = places
    return place


@contextmanager
def patched(owner: Any, name: str, value: Any):
    """Let an attribute have another value for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def check_names(known: Iterable[str], names: Iterable[str]) -> None:
    """Raises UserError for other metrics than in an earlier pass, or on another rank: their sums would be mixed up."""
    odd = sorted(set(known) ^ set(names))
    advice = "let each call return the same names, with 0 where there is nothing to count"
    require(not odd, f"token_loss: some calls return the metrics {', '.join(odd)}, and others do not; {advice}")


def add_metrics(total: dict[str, torch.Tensor], more: dict[str, torch.Tensor]) -> None:
    """Add the values of the same name, without their gradients. Raises UserError if there are other names."""
    check_names(total or more, more)
    for name, value in more.items():
        value = value.detach()
        total[name] = total[name] + value if name in total else value
