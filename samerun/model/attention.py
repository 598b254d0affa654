"""Attention that keeps the documents of a row apart, and its two ways over several ranks."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from samerun.data.batches import Documents, RowPiece, RowRanks
from samerun.errors import UserError


def piece_of(documents: Documents, begin: int, end: int) -> RowPiece:
    """The tokens from `begin` to `end` of a row."""
    bounds = np.cumsum((0, *documents.lengths))
    first = np.searchsorted(bounds, begin, side="right") - 1
    last = np.searchsorted(bounds, end)
    bounds, ends = bounds[first : last + 1], documents.ends[first : last + 1]
    start = int(bounds[0])
    own = np.diff(bounds.clip(begin, end)).tolist()
    seen = np.diff(bounds.clip(max=end)).tolist()
    return RowPiece(
        own=Documents(tuple(own), max(own), ends.clamp(begin, end) - begin),
        seen=Documents(tuple(seen), max(seen), ends.clamp(max=end) - start),
        begin=start,
        mask_of=functools.cache(causal_mask),
    )


DOCUMENTS = "documents"  # The name of document_attention() among the attentions of transformers.

# Older versions of torch have no enable_gqa. They take fewer key heads without it.
KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    documents: Documents | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention for transformers, in which each token sees its own document up to itself, and no other one.

    transformers makes no masks for an attention that it does not know. A mask would be as large as the square of the
    tokens, most of it would be of no use, and flash attention would not take it.

    query, key, value: [rows, heads, tokens, head size]; several rows if documents.are_rows, each of which then is a
    document. Returns [rows, tokens, heads, head size].
    """
    if documents is None:  # Without masks by transformers, padding and windows would count for nothing, in silence.
        for_all, for_now = "model.set_attn_implementation('sdpa') after build_model", "`with attention(model, 'sdpa'):`"
        advice = f"give it what model_inputs() returns, or let it have transformers' masks: {for_all}, or {for_now}"
        raise UserError(f"model: it is called without documents, and would attend to all that comes before; {advice}")
    if attention_mask is not None:
        raise ValueError("this model has a mask of its own")
    if documents.row_pieces:
        return context_attention(module, query, key, value, documents, **options), None
    if documents.row_ranks:
        return ulysses_attention(query, key, value, documents, **options), None
    if has_flash(query, value, documents, **options):
        if has_cudnn(query, documents, **options):
            return attention_of_rows(query, key, value, documents, **options), None
        return flash_attention(query, key, value, documents, documents, **options), None
    if query.shape[0] > 1 and sees_whole(documents, **options):  # Less work than below, and compiled.
        return sdpa_attention_forward(module, query, key, value, None, **options)
    return attention_by_document(module, query, key, value, documents, documents, **options), None


def has_flash(
    query: torch.Tensor, value: torch.Tensor, documents: Documents, dropout: float = 0.0, **options: Any
) -> bool:
    """Whether torch's flash attention can compute this: on a GPU since Ampere, in 16 bits, heads of some sizes."""
    head = query.shape[-1]
    is_made_for = head == value.shape[-1] and head % 8 == 0 and head <= 256 and not dropout
    if documents.plans_flash or not is_made_for:
        return is_made_for
    if not query.is_cuda or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    return torch.is_autocast_enabled("cuda") or value.dtype in (torch.bfloat16, torch.float16)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: Documents,
    seen: Documents,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """All documents in one kernel of torch: each token of `own` sees its document in `seen` up to itself, see RowPiece.

    FlashAttention (since 2.1) takes the queries of a document to be the last of its keys.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):  # Which does not know this function, and rotary embeddings are in float32.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    groups = {"enable_gqa": query.shape[1] != key.shape[1]} if KNOWS_GROUPS else {}
    output = varlen_attn(
        *(states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)),
        cu_seq_q=own.ends,
        cu_seq_k=seen.ends,
        max_q=own.longest,
        max_k=seen.longest,
        scale=scaling,
        window_size=(sliding_window - 1 if sliding_window else -1, 0),  # Tokens before and after each one.
        **groups,
    )
    return output.unflatten(0, (query.shape[0], -1))


def sees_whole(documents: Documents, sliding_window: int | None = None, **options: Any) -> bool:
    """Whether no document is longer than the window of this attention, if it has one."""
    return not sliding_window or documents.longest <= sliding_window


def has_cudnn(query: torch.Tensor, documents: Documents, **options: Any) -> bool:
    """Whether to use cuDNN's attention, given has_flash(): it is faster on Hopper, and for Blackwell torch prefers it.

    It takes only rows of one length. For each new length, it makes a plan, so the lengths are to be few.
    """
    if not query.is_cuda or not documents.are_rows or query.shape[-1] > 128:
        return False
    is_recent = torch.cuda.get_device_capability(query.device) in ((9, 0), (10, 0))
    return is_recent and sees_whole(documents, **options)


def attention_of_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scaling: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """Documents that are all of one length, as the rows of plain causal attention."""
    rows = [as_rows(states, documents.longest) for states in (query, key, value)]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        has_groups = query.shape[1] != key.shape[1]
        output = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scaling, enable_gqa=has_groups)
    return output.transpose(1, 2).flatten(0, 1).unflatten(0, (query.shape[0], -1))


def as_rows(states: torch.Tensor, length: int) -> torch.Tensor:
    """From [1, heads, tokens, head size] to [documents, heads, length, head size], by a view alone.

    Several rows are documents already. The gradient of an index or a slice would be a copy in a tensor of zeros.
    """
    if states.shape[0] > 1:
        return states
    return states.view(states.shape[1], -1, length, states.shape[3]).transpose(0, 1)


def causal_mask(
    length: int, length_seen: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """What is added to the scores of the tokens seen, for each of the last ones: 0, or -inf where it does not see them.

    [1, 1, length, length_seen]. None for all tokens without a window that matters: without a mask, each sees all up
    to itself.
    """
    before = length_seen - length
    if before == 0 and (not window or length <= window):
        return None
    is_seen = torch.ones(length, length_seen, dtype=torch.bool, device=device).tril(before)
    if window:
        is_seen = is_seen.triu(before + 1 - window)
    return torch.zeros(1, 1, length, length_seen, dtype=dtype, device=device).masked_fill(~is_seen, -math.inf)


@torch.compiler.disable  # Otherwise each new list of lengths would be compiled.
def attention_by_document(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: Documents,
    seen: Documents,
    sliding_window: int | None = None,
    mask_of: Callable = causal_mask,
    **options: Any,
) -> torch.Tensor:
    """One document after the other. Neighbours of the same length are computed together."""
    device, dtype = query.device, query.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    both_lengths = zip(own.lengths, seen.lengths)
    runs = [(*lengths, len(list(group))) for lengths, group in itertools.groupby(both_lengths)]
    sizes = [length * count for length, _, count in runs]
    sizes_seen = [length_seen * count for _, length_seen, count in runs]
    parts = [(query, key, value)]
    if len(runs) > 1:
        parts = zip(query.split(sizes, dim=2), key.split(sizes_seen, dim=2), value.split(sizes_seen, dim=2))
    outputs = []
    for (length, length_seen, _), of_run in zip(runs, parts):
        queries = as_rows(of_run[0], length)
        keys, values = (as_rows(states, length_seen) for states in of_run[1:])
        mask = mask_of(length, length_seen, sliding_window, dtype, device)
        output, _ = sdpa_attention_forward(module, queries, keys, values, mask, **options)
        outputs.append(output.flatten(0, 1))
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return output.unflatten(0, (query.shape[0], -1))


@torch.compiler.disable
def ulysses_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, **options: Any
) -> torch.Tensor:
    """The attention of a row whose tokens are divided among ranks (DeepSpeed-Ulysses, arXiv:2309.14509).

    Each rank gives its tokens to the others and gets all tokens of a part of the heads. Afterwards it gives them back.
    """
    ranks = documents.row_ranks
    if torch.is_autocast_enabled(query.device.type):  # Rotary embeddings are in float32: twice the traffic for nothing.
        query, key = query.to(value.dtype), key.to(value.dtype)
    copies = math.lcm(key.shape[1], ranks.size()) // key.shape[1]  # Key heads that several ranks need.
    key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
    heads = [all_to_all(states, ranks, split=1, join=2) for states in (query, key, value)]

    module = SimpleNamespace(num_key_value_groups=heads[0].shape[1] // heads[1].shape[1])
    output, _ = document_attention(module, *heads, None, replace(documents, row_ranks=None), **options)
    return all_to_all(output, ranks, split=1, join=2)


@torch.compiler.disable
def context_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    **options: Any,
) -> torch.Tensor:
    """The attention of a row of which each rank has two pieces (section 3.3.2 of Llama 3, arXiv:2407.21783).

    Each rank gets the keys and values of all tokens, and computes for its own queries.

    query, key, value: [1, heads, tokens / ranks, head size]. Returns [1, tokens / ranks, heads, head size].
    """
    if torch.is_autocast_enabled(query.device.type):  # As for Ulysses. The query is not sent.
        key = key.to(value.dtype)
    key, value = (gather_row(states, documents.row_ranks) for states in (key, value))
    outputs = []
    for piece, queries in zip(documents.row_pieces, query.chunk(2, dim=2)):
        end = piece.begin + sum(piece.seen.lengths)
        keys, values = (states[:, :, piece.begin : end] for states in (key, value))
        states = queries, keys, values, piece.own, piece.seen
        if has_flash(queries, values, documents, **options):
            outputs.append(flash_attention(*states, **options))
        else:
            outputs.append(attention_by_document(module, *states, mask_of=piece.mask_of, **options))
    return torch.cat(outputs, dim=1)


def gather_row(states: torch.Tensor, ranks: RowRanks) -> torch.Tensor:
    """All tokens of a row in their order, from the two pieces of each rank, see part_of_row().

    An all-to-all of copies sends as much as an all-gather would. Its gradients are added up here, and so rounded once.

    states: [1, heads, tokens / ranks, head size]. Returns [1, heads, tokens, head size].
    """
    copies = states.expand(ranks.size(), -1, -1, -1)
    pieces = all_to_all(copies, ranks, split=0, join=2).chunk(2 * ranks.size(), dim=2)
    first_half, second_half = pieces[::2], pieces[1::2]  # Of each rank one. The second ones are mirrored.
    return torch.cat((*first_half, *reversed(second_half)), dim=2)


def all_to_all(states: torch.Tensor, ranks: RowRanks, split: int, join: int) -> torch.Tensor:
    """Split along one dimension, send each rank its part, and join what they have sent along another one."""
    parts = ranks.exchange(torch.stack(states.chunk(ranks.size(), dim=split)))
    return torch.cat(parts.unbind(), dim=join)


@contextmanager
def attention(model: torch.nn.Module, name: str):
    """Another attention of transformers for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
