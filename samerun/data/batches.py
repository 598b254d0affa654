"""From rows to the micro-batches of a step."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single_autograd

from samerun.data.mixture import Mixture
from samerun.data.rows import Dataset
from samerun.plan import Stage


class RowRanks:
    """The ranks that share a row. They send each other what they have of it."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def size(self) -> int:
        return self.group.size()

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """Send each rank one of the parts [ranks, ...]. Returns what each of them has sent."""
        return all_to_all_single_autograd(parts, None, None, self.group)


@dataclass(frozen=True)
class Documents:
    """Where the documents of a micro-batch lie: one after the other in a single row, or each in a row of its own.

    To compiled code it is an object whose list nobody reads. With each new list, it would be compiled anew.
    """

    lengths: tuple[int, ...]  # In tokens. The host knows them without asking the device.
    longest: int  # Of the lengths.
    ends: torch.Tensor  # int32 [documents + 1] on the device: 0, and where each document ends.
    row_ranks: RowRanks | None = None  # The ranks among which its tokens are divided, if they are.
    # With context parallelism, what this rank has of the row, whose lengths and ends the above remain.
    row_pieces: tuple["RowPiece", ...] = ()
    are_rows: bool = False  # All have one length, and such lengths are few (multiples of 64), see has_cudnn().
    plans_flash: bool = False  # For --plan, which has no GPU to ask: flash attention computes whatever it is made for.


@dataclass(frozen=True)
class RowPiece:
    """Neighbouring tokens of a row, and the tokens that they see: the same documents from their beginnings on.

    Each document of `own` is the end of the one in `seen`.
    """

    own: Documents
    seen: Documents
    begin: int  # The token of the row with which `seen` begins.
    mask_of: Callable  # causal_mask(), which remembers masks as long as the piece lives: all layers need the same.


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass computes on: some rows, joined to a single one, of one length, or padded.

    A task of another kind has a class of its own here. It is made by collate() and read by the loss; the loop, the plan
    and the checkpoints do not look inside.
    """

    input_ids: torch.Tensor | None  # int64 [rows, tokens]. None behind the first layers of a pipeline.
    targets: torch.Tensor  # int64 [rows, tokens]: the token that follows, or -100 where none is to be learned.
    learned: np.ndarray  # int64: where targets, as a single row, are not -100. The host knows it without asking.
    # int64 [rows, tokens], or [1, tokens] for all rows: from 0 in each document. None: from 0 in each row.
    position_ids: torch.Tensor | None = None
    documents: Documents | None = None  # None for rows with padding.
    source_ends: dict[str, int] = field(default_factory=dict)  # Where the tokens of each source of a mixture end.
    inputs_embeds: torch.Tensor | None = None  # [1, tokens, width], in place of the ids.

    @property
    def length(self) -> int:
        """The tokens of each row, padding included."""
        return self.targets.shape[1]


def collate(rows: list[np.ndarray], device: torch.device, joined: bool) -> MicroBatch:
    """The rows, each int64 [3, tokens] as of Dataset.read(), on the device."""
    tokens = np.concatenate(rows, axis=1)[:, None] if joined else pad_rows(rows)
    documents = documents_at(tokens[2, 0], device) if joined else None
    if documents and documents.are_rows:  # Each can be a row of its own. All have the same positions.
        tokens = tokens.reshape(3, -1, documents.longest)
    # As .data, each has its own count of changes: a loss may change the targets, though autograd keeps the ids.
    input_ids, targets, positions = (part.data for part in to_device(tokens, device))
    learned = np.flatnonzero(tokens[1] != -100)
    if joined:
        return MicroBatch(input_ids, targets, learned, positions[:1], documents)
    # By the positions, transformers keeps the documents of a row apart.
    has_several = any(row[2, -1] < row.shape[1] - 1 for row in rows)
    return MicroBatch(input_ids, targets, learned, positions if has_several else None)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that the host need not wait for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # The copy then runs in the background.
    return tensor.to(device, non_blocking=True)


def documents_at(positions: np.ndarray, device: torch.device) -> Documents:
    """The documents of joined rows. Each is a segment of Dataset, so that the positions of its tokens begin at 0."""
    ends = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
    lengths = tuple(end - begin for begin, end in itertools.pairwise(ends))
    are_rows = len(set(lengths)) == 1 and lengths[0] % 64 == 0
    return Documents(lengths, max(lengths), to_device(np.array(ends, np.int32), device), are_rows=are_rows)


def in_one_row(batch: MicroBatch) -> MicroBatch:
    """A micro-batch of collate() with its documents in a single row, even if each had a row of its own."""
    rows = len(batch.targets)
    if not batch.documents or rows == 1:
        return batch
    return replace(
        batch,
        input_ids=batch.input_ids.view(1, -1),
        targets=batch.targets.view(1, -1),
        position_ids=batch.position_ids.repeat(1, rows),
    )


def lengthen(batch: MicroBatch, length: int) -> MicroBatch:
    """A micro-batch of one row with more tokens at its end: documents of one token that is no target."""
    documents, before = batch.documents, batch.length
    missing = length - before
    if not missing:
        return batch
    more_ids = batch.input_ids[:, :1].expand(1, missing)  # Real ones, see Dataset.read_rows().
    more = torch.arange(before + 1, length + 1, device=documents.ends.device, dtype=torch.int32)
    lengths = documents.lengths + (1,) * missing
    ends = torch.cat((documents.ends, more))
    return replace(
        batch,
        input_ids=torch.cat((batch.input_ids, more_ids), dim=1),
        targets=F.pad(batch.targets, (0, missing), value=-100),
        position_ids=F.pad(batch.position_ids, (0, missing)),
        documents=replace(documents, lengths=lengths, ends=ends, are_rows=False),
    )


def pad_rows(rows: list[np.ndarray]) -> np.ndarray:
    """int64 [3, rows, width], padded on the right. That needs no mask: no token attends to what comes after it."""
    padded = np.zeros((3, len(rows), max(row.shape[1] for row in rows)), np.int64)
    padded[1] = -100
    for number, row in enumerate(rows):
        padded[:, number, : row.shape[1]] = row
    return padded


def padded_tokens(lengths: np.ndarray, joined: bool) -> int:
    """The tokens of a micro-batch with rows of these lengths, padding included."""
    if joined:
        return max(1, int(lengths.sum()))
    return max(1, len(lengths)) * int(lengths.max(initial=1))


def targets_of(batch: Any) -> torch.Tensor | None:
    """The tokens or classes that a micro-batch learns. That of a fork may have none, or others, as a regression has."""
    targets = getattr(batch, "targets", None)
    return targets if isinstance(targets, torch.Tensor) and not targets.is_floating_point() else None


@dataclass(frozen=True)
class StepBatch:
    """The global batch of one step."""

    step: int
    micro_batches: list[MicroBatch]  # What this rank computes on.
    counts: dict[str, int]  # What all ranks together compute on.
    source_targets: dict[str, int]  # The target tokens of each source of a mixture.


def load_step(
    step: int, data: Dataset, stage: Stage, rank: int, joined: bool, device: torch.device, collate: Callable
) -> StepBatch:
    """The rows of a step as micro-batches. `collate` is collate() or, for a task of another kind, its like."""
    rows = data.rows_at(stage.row_of(step), stage.plan.global_batch_size)
    lengths, targets = data.sizes(rows)
    micro_steps = stage.plan.split(lengths, joined)
    own_rows = [rows[micro_step[rank]] for micro_step in micro_steps]
    micro_batches = [collate(data.read_rows(own), device, joined) for own in own_rows]
    source_targets = {}
    if isinstance(data, Mixture):
        source_targets = data.by_source(rows, targets)
        ends = [data.source_ends(own, joined) for own in own_rows]
        micro_batches = [replace(batch, source_ends=own) for batch, own in zip(micro_batches, ends)]
    # Every rank works out what the others process, so no count ever needs communication.
    counts = {
        "rows": len(rows),
        "tokens": sum(padded_tokens(lengths[own], joined) for own in itertools.chain(*micro_steps)),
        "real_tokens": int(lengths.sum()),
        "target_tokens": int(targets.sum()),
    }
    return StepBatch(step, micro_batches, counts, source_targets=source_targets)


class Prefetcher:
    """The batches of the coming steps, loaded while the device still computes the current one."""

    # In tokens of all ranks. Small steps are loaded several at once: alone, each would find the CPU's caches cold.
    AHEAD = 2**14

    def __init__(self, load: Callable[[int], StepBatch], first_step: int, last_step: int):
        self.load = load
        self.loaded = [load(first_step)]
        self.next_step = first_step + 1
        self.last_step = last_step

    def take(self) -> StepBatch:
        return self.loaded.pop(0)

    def load_ahead(self) -> None:
        """Load the next step, or the next few, unless some are left."""
        if self.loaded:
            return
        tokens = 0
        while tokens < self.AHEAD and self.next_step <= self.last_step:
            self.loaded.append(self.load(self.next_step))
            tokens += self.loaded[-1].counts["tokens"]
            self.next_step += 1
