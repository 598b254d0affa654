"""What a small model is tried for: what a token sees, sliding windows included, and what its loss depends on."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from samerun.config import Config, Model
from samerun.data.batches import MicroBatch, collate
from samerun.errors import UserError, as_user_error, require, say
from samerun.meeting import Meeting
from samerun.model.architecture import ropes_in
from samerun.model.attention import DOCUMENTS, attention
from samerun.model.build import has_known_layers, vocabulary_size
from samerun.model.lora import check_adapter_loads
from samerun.model.loss import joins_documents, model_inputs, patched, wants_chunks
from samerun.model.outline import let_go
from samerun.model.small import model_to_try
from samerun.plan import Stage

# Layers may do something else with every 128 tokens, as those of DeepSeek-V4, which compress them into one: in a row of
# this length, its two documents share some of them.
LONG = 512


def check_model(
    model: torch.nn.Module, config: Config, new_tokens: Sequence[int], meeting: Meeting, loss_of: Callable
) -> tuple[bool, bool]:
    """Whether a pass in training draws random numbers, and whether the loss is computed in chunks.

    Raises UserError if a token sees what it must not, or if packing changes the loss. The main process tries that out,
    and settles on the attention for all ranks.
    """
    name, is_random, chunked = meeting.by_main(lambda: settle_model(model, config, new_tokens, loss_of))
    if name != model.config._attn_implementation:
        model.set_attn_implementation(name)
    if config.model.attention == "sdpa" and not joins_documents(model):
        say(f"Rows are padded, because a {model.config.model_type} does not keep documents apart in a single row.")
    return is_random, chunked


def settle_model(
    model: torch.nn.Module, config: Config, new_tokens: Sequence[int], loss_of: Callable
) -> tuple[str, bool, bool]:
    """The attention, and what check_model() returns, by a small model of the kind."""
    small = model_to_try(model, config.model, new_tokens)
    if config.model.lora is not None:
        check_adapter_loads(small)
    is_tried = can_be_tried(small)
    if is_tried:
        settle_attention(small, config.data.packing, loss_of, config.data.sequence_length)
    with attention(small, way_to_try(small)):
        check_sum(small, loss_of)
        if config.model.gradient_checkpointing == "selective":
            check_selective(small, loss_of)
    if is_tried:
        check_loss(small, config.data.packing, loss_of)
    is_random = draws_random_numbers(small)
    wanted = wants_chunks(config.model, vocabulary_size(model))  # The small one has fewer tokens.
    chunked = wanted and allows_chunks(small, config.model, loss_of)
    if small is not model:
        let_go(small)  # Its cycles would keep it until Python collects them, while the ranks get their parts.
    return small.config._attn_implementation, is_random, chunked


def can_be_tried(model: torch.nn.Module) -> bool:
    """Whether the model's attention works on a CPU, where it is tried before the ranks get their parts."""
    return model.config._attn_implementation in ("sdpa", "eager", DOCUMENTS)


def way_to_try(model: torch.nn.Module) -> str:
    """The model's attention, or one that works on a CPU for what does not depend on it."""
    return model.config._attn_implementation if can_be_tried(model) else "eager"


@torch.no_grad()
def draws_random_numbers(model: torch.nn.Module) -> bool:
    """Whether passes in training differ in what some module returns, as by dropout or a router that tries its luck.

    The loss alone would not tell: at first, a LoRA adapter adds nothing, whatever its dropout is. Some models draw
    numbers and do nothing with them, such as those that leave out no layers by a chance of 0.
    """
    with torch.random.fork_rng(devices=[]), attention(model, way_to_try(model)):
        before = states_of_chance(model.device)
        first = sums_inside(model)
        if states_of_chance(model.device) == before:
            return False
        return any(sums_inside(model) != first for _ in range(7))


def states_of_chance(device: torch.device) -> list:
    """Those of the generators that reseed() seeds. A pass that draws random numbers changes one of them."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    _, numbers, *place = np.random.get_state()
    return [random.getstate(), numbers.tolist(), place, *(state.tolist() for state in states)]


def sums_inside(model: torch.nn.Module) -> list[float]:
    """The sums of all that the modules return in a pass in training."""
    sums = []

    def note(module: torch.nn.Module, args: tuple, output: Any) -> None:
        sums.extend(value.double().sum().item() for value in tree_leaves(output) if isinstance(value, torch.Tensor))

    # A router may only choose by chance for a few tokens, so there are many.
    rows = [probe_row(vocabulary_size(model), packed=False, first=8 * number) for number in range(64)]
    batch = collate(rows, model.device, joins_documents(model))
    with forward_hook(model.modules(), note):
        try_pass(model.train(), batch)
    return sums


@contextmanager
def forward_hook(modules: Iterable[torch.nn.Module], hook: Callable):
    """Let each of the modules have a hook for a while."""
    with ExitStack() as hooked:
        for module in modules:
            hooked.enter_context(module.register_forward_hook(hook))
        yield


def try_pass(model: torch.nn.Module, batch: MicroBatch) -> Any:
    """What the model returns. Raises UserError if it raises an error, as for heads that do not divide, or lacks logits
    of tokens, as a fork's model may."""
    advice = "its settings must fit together, such as num_attention_heads and num_key_value_heads"
    with as_user_error(
        f"model.pretrained or model.architecture: no pass of this {model.config.model_type} works; {advice}"
    ):
        output = model(**model_inputs(model, batch))
    found = getattr(getattr(output, "logits", None), "shape", ())
    advice = "return a CausalLMOutput with logits [rows, tokens, vocabulary], one for each token of input_ids"
    kind = model.config.model_type
    require(math.prod(found[:2]) == batch.targets.numel(), f"model: forward() of this {kind} lacks logits; {advice}")
    return output


def probe_row(vocab_size: int, packed: bool, first: int = 0, lengths: tuple[int, int] = (4, 4)) -> np.ndarray:
    """A row [3, tokens] as of Dataset.read(): two documents of these lengths, or a single one. With another `first`, of
    other tokens."""
    count, middle = sum(lengths), vocab_size // 2  # At the ends are special tokens, whose embedding may be 0.
    ids = (middle + first + np.arange(count)) % vocab_size
    targets = np.append(ids[1:], -100)
    positions = np.arange(count)
    if packed:
        targets[lengths[0] - 1] = -100
        positions = np.concatenate([np.arange(length) for length in lengths])
    return np.stack((ids, targets, positions))


def probe_batch(model: torch.nn.Module, device: torch.device) -> MicroBatch:
    """A row of two documents, as a micro-batch of this model."""
    return collate([probe_row(vocabulary_size(model), packed=True)], device, joins_documents(model))


def tokens_seen(model: torch.nn.Module, row: np.ndarray, tokens: Sequence[int]) -> Iterator[list[int]]:
    """For each of `tokens`, those of the row that its logits depend on, by their gradient in the embeddings.

    It is exactly 0 where nothing flows. The logits themselves would not tell, because what an untrained model leaks may
    be less than rounding.
    """
    embedded = []

    def keep(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # Some models change it in place.

    tables = {module for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    tables.add(model.get_input_embeddings())  # What peft puts in its place may compute without it.
    batch = collate([row], model.device, joins_documents(model))
    with forward_hook(tables, keep):
        logits = try_pass(model.eval(), batch).logits[0]
    # The gradients of a plain sum may cancel out.
    weights = torch.linspace(0.5, 1.5, logits.shape[1], device=logits.device)
    for token in tokens:
        seen = torch.zeros(row.shape[1], dtype=torch.bool, device=logits.device)
        total = (logits[token] * weights).sum()
        for gradient in torch.autograd.grad(total, embedded, allow_unused=True, retain_graph=True):
            if gradient is not None:
                finite = gradient.isfinite().all()
                title = f"this {model.config.model_type}"
                require(finite, f"model: the gradients of {title} are not finite before any step")
                seen |= (gradient.reshape(-1, row.shape[1], gradient.shape[-1]) != 0).any(2).any(0)
        yield seen.nonzero().flatten().tolist()


def what_leaks(model: torch.nn.Module, packed: bool, lengths: tuple[int, int] = (4, 4)) -> str:
    """What a token sees and must not: "later tokens", "other documents", or nothing: ""."""
    row = probe_row(vocabulary_size(model), packed, lengths=lengths)
    begin, end = lengths[0], sum(lengths)
    tokens = begin // 2, begin + lengths[1] // 4, end - 1  # One of the first document, two of the second.
    for token, seen in zip(tokens, tokens_seen(model, row, tokens)):
        if max(seen, default=0) > token:
            return "later tokens"
        if packed and token >= begin and min(seen, default=token) < begin:
            return "other documents"
    return ""


def settle_attention(model: torch.nn.Module, packing: str, loss_of: Callable, sequence_length: int = LONG) -> None:
    """Take padded rows and transformers' own masks if the model needs them.

    Raises UserError if a token sees too much all the same, maybe only in a row of `sequence_length` tokens.
    """
    if model.config._attn_implementation == DOCUMENTS:
        if keeps_documents_apart(model, loss_of):
            return
        model.set_attn_implementation("sdpa")

    name, found = model.config.model_type, what_leaks(model, packed=False)
    if not found and packing != "none":
        found = what_leaks(model, packed=True)
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model  # Without peft's adapters.
        if not found and not has_known_layers(plain):
            length = min(sequence_length, LONG)
            first = 2 * length // 5 | 1  # Odd, so that tokens that belong together cross the border.
            found = what_leaks(model, True, (first, length - first))
    causal = found != "later tokens"
    require(causal, f"model: a token of this {name} sees later ones; take a causal model (is_decoder: true)")
    require(not found, f"data.packing: in a {name} the documents of a row see each other; use none")


def keeps_documents_apart(model: torch.nn.Module, loss_of: Callable) -> bool:
    """Whether the model computes the same with document_attention() as with transformers' masks, and nothing leaks."""
    row = probe_row(vocabulary_size(model), packed=True)
    try:
        with short_windows(model):
            if what_leaks(model, packed=True):
                return False
            joined = probe_loss(model, [row], loss_of)
            with attention(model, "sdpa"):
                alone = probe_loss(model, [row[:, :4], row[:, 4:]], loss_of)
        return is_same_loss(model, joined, alone)
    except Exception:  # Its forward() does not pass on what document_attention() needs, or has a mask of its own.
        return False


@contextmanager
def short_windows(model: torch.nn.Module):
    """Let all sliding windows be of two tokens for a while, so that a short row shows whether they are kept."""
    holders = [model.config.get_text_config(), *model.modules()]
    with ExitStack() as shortened:
        for holder in holders:
            if getattr(holder, "sliding_window", None):
                shortened.enter_context(patched(holder, "sliding_window", 2))
        yield


def probe_loss(model: torch.nn.Module, rows: list[np.ndarray], loss_of: Callable, chunked: bool = False) -> float:
    """The loss of rows that are one micro-batch."""
    return probe_sums(model, rows, loss_of, chunked=chunked)[0]


def probe_sums(
    model: torch.nn.Module, rows: list[np.ndarray], loss_of: Callable, chunked: bool = False
) -> tuple[float, dict[str, float]]:
    """Loss and metrics of rows that are one micro-batch."""
    batch = collate(rows, model.device, joins_documents(model))
    with torch.no_grad():
        loss, metrics = loss_of(model.eval(), batch, chunked=chunked)
        return loss.item(), {name: float(value) for name, value in metrics.items()}


def is_same_loss(model: torch.nn.Module, one: float, other: float) -> bool:
    return abs(one - other) <= max(1e-5, torch.finfo(model.dtype).eps / 10) * abs(other)


def check_sum(model: torch.nn.Module, loss_of: Callable) -> None:
    """Raises UserError if the loss of two rows in one micro-batch is not finite, or not the sum of their losses.

    A mean is not, nor is what compares rows. The run would depend on how rows are split.
    """
    row = probe_row(vocabulary_size(model), packed=True)
    rows = [row[:, :4], row[:, 4:]]
    (together, sums), (again, _), *apart = (
        probe_sums(model, some, loss_of) for some in (rows, rows, rows[:1], rows[1:])
    )
    found = f"the loss of two rows is {together:g} before any step"
    require(math.isfinite(together), f"token_loss or compute_loss: {found}")
    if together != again:  # Random numbers, which differ in each pass.
        return
    alone = [loss for loss, _ in apart]
    advice = "return a sum, to which each row adds the same beside any other"
    found = f"two rows have the loss {together:.6g}, and alone {alone[0]:.6g} and {alone[1]:.6g}"
    require(is_same_loss(model, together, sum(alone)), f"token_loss or compute_loss: {found}; {advice}")
    for name, value in sums.items():
        alone = [metrics.get(name, math.nan) for _, metrics in apart]
        found = f"two rows have the metric {name} {value:.6g}, and alone {alone[0]:.6g} and {alone[1]:.6g}"
        differs = abs(value - sum(alone)) > 5e-2 * max(1, abs(value))  # Rounding may decide what a metric counts.
        require(not differs, f"token_loss or compute_loss: {found}; {advice}")


def check_selective(model: torch.nn.Module, loss_of: Callable) -> None:
    """Raises UserError for a model whose layers cannot compute only a part of their activations again.

    Some write into the results that are kept. In autocast, others have cast a weight already, in an earlier layer.
    """
    batch = collate([probe_row(vocabulary_size(model), packed=False)], model.device, joins_documents(model))
    kind = model.config.model_type
    for in_bf16 in False, True:
        with as_user_error(f"model.gradient_checkpointing: selective does not work for a {kind}; take true"):
            with torch.random.fork_rng(devices=[]):
                with torch.autocast(model.device.type, torch.bfloat16, enabled=in_bf16):
                    loss, _ = loss_of(model.train(), batch, chunked=False)
                loss.backward()
    model.zero_grad()


def check_loss(model: torch.nn.Module, packing: str, loss_of: Callable) -> None:
    """Raises UserError if packing changes the loss of this model."""
    if packing == "none":
        return
    row = probe_row(vocabulary_size(model), packed=True)
    expected = probe_loss(model, [row[:, :4], row[:, 4:]], loss_of)
    same = is_same_loss(model, probe_loss(model, [row], loss_of), expected)
    name = model.config.model_type
    require(same, f"data.packing: a {name} computes another loss where documents share a row; use none")


def allows_chunks(model: torch.nn.Module, config: Model, loss_of: Callable) -> bool:
    """Whether the loss is the same in chunks. Raises UserError if it is not, and model.chunked_loss asks for them."""
    row = probe_row(vocabulary_size(model), packed=True)
    apart, name = [row[:, :4], row[:, 4:]], model.config.model_type
    refusal = f"model.chunked_loss: a {name} computes its logits from more than the states of its layers; use false"
    with attention(model, way_to_try(model)):
        expected = probe_loss(model, apart, loss_of)
        try:
            with as_user_error(refusal):
                same = is_same_loss(model, probe_loss(model, apart, loss_of, chunked=True), expected)
            require(same, refusal)
        except UserError:
            if config.chunked_loss is True:
                raise
            return False
    return True


def check_rope(model: torch.nn.Module, stages: list[Stage], sequence_length: int) -> None:
    """Raises UserError for a longrope that would make the loss of a row depend on the other rows of its pass.

    It has other frequencies for a whole pass as soon as one of its rows is longer than in the model's first training.
    """
    ropes = ropes_in(getattr(model.config.get_text_config(), "rope_parameters", None))
    lengths = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    if lengths and max(stage.plan.micro_batch_size for stage in stages) > 1:
        short = min(lengths)
        advice = f"set batch.max_micro_batch_size: 1, or data.sequence_length to at most {short}"
        is_short = sequence_length <= short
        require(is_short, f"model: with its longrope, the loss of a row depends on the rows that go with it; {advice}")
