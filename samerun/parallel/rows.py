"""Sequence and context parallelism: ranks share each row.

Each computes on a part of the tokens, so that longer rows fit into memory. Only the attention looks at other tokens,
see document_attention(): with sp a rank then has all tokens of some heads, with cp its own tokens, and keys and values
of all of them.
"""

import math
from dataclasses import replace

import numpy as np
import torch

from samerun.config import Config
from samerun.data.batches import MicroBatch, RowRanks, in_one_row, lengthen
from samerun.errors import require
from samerun.model.architecture import ropes_in
from samerun.model.attention import DOCUMENTS, piece_of
from samerun.parallel.layout import Layout


def check_shared_rows(model: torch.nn.Module, config: Config, layout: Layout) -> None:
    """Raises UserError for a model whose rows the ranks cannot share.

    A model whose documents are kept apart by document_attention() looks at other tokens nowhere else.
    """
    found, setting = model.config.get_text_config(), layout.setting("cp" if layout.cp > 1 else "sp")
    name, joins = found.model_type, model.config._attn_implementation == DOCUMENTS
    advice = "needs model.attention sdpa, and a model that works without padding"
    require(joins, f"{setting} {advice}; not {name}")
    # These frequencies follow from the longest document of a pass, of which each rank would know its part only.
    for rope in ropes_in(getattr(found, "rope_parameters", None)):
        if rope.get("rope_type") in ("longrope", "dynamic"):
            short = rope.get("original_max_position_embeddings", found.max_position_embeddings)
            is_short = config.data.sequence_length <= short
            require(is_short, f"{setting}: the rope of this {name} needs data.sequence_length <= {short}")


def part_of_row(batch: MicroBatch, layout: Layout, number: int, ranks: RowRanks | None) -> MicroBatch:
    """The tokens of one of the ranks that share rows: with sp a piece, with cp one of each half. All have as many.

    Late tokens of a document see more than early ones, so the second piece is the mirrored one (section 3.3.2 of
    Llama 3, arXiv:2407.21783): all ranks have about as much to compute.
    """
    own = [number, 2 * layout.cp - 1 - number] if layout.cp > 1 else [number]
    count = layout.row_ranks * len(own)
    batch = in_one_row(batch)
    length = math.ceil(batch.length / count)
    batch = lengthen(batch, length * count)
    pieces = [(one * length, (one + 1) * length) for one in own]
    documents = replace(batch.documents, row_ranks=ranks)
    if layout.cp > 1:
        documents = replace(documents, row_pieces=tuple(piece_of(batch.documents, *piece) for piece in pieces))
    part = {}
    for name in "input_ids", "targets", "position_ids":
        part[name] = torch.cat([getattr(batch, name)[:, begin:end] for begin, end in pieces], dim=1)
    learned = places_in_pieces(batch.learned, pieces)
    return MicroBatch(**part, learned=learned, documents=documents, source_ends=ends_in(batch.source_ends, pieces))


def places_in_pieces(places: np.ndarray, pieces: list[tuple[int, int]]) -> np.ndarray:
    """Where tokens at sorted places of a row are in some pieces of it, each with its begin and end, that are joined."""
    found, before = [], 0
    for begin, end in pieces:
        first, last = np.searchsorted(places, (begin, end))
        found.append(places[first:last] - begin + before)
        before += end - begin
    return np.concatenate(found)


def ends_in(source_ends: dict[str, int], pieces: list[tuple[int, int]]) -> dict[str, int]:
    """Where the sources end in pieces of the tokens, each with its begin and end, that follow one another."""
    ends = {}
    for source, source_end in source_ends.items():
        ends[source] = sum(min(max(begin, source_end), end) - begin for begin, end in pieces)
    return ends
