"""Several sources mixed by weight, as one endless stream of rows."""

import itertools
import json
import math
import zlib
from dataclasses import dataclass

import numpy as np

from samerun.data.order import Order, running_sum
from samerun.data.rows import Dataset


@dataclass(frozen=True)
class MixtureStage:
    """A part of the stream, in blocks. In each, every source has the same number of rows, in an order of its own."""

    first_row: int  # Where it begins in the stream. It ends where the next one begins.
    before: np.ndarray  # How many rows of each source come before it.
    counts: np.ndarray  # How many rows of each source a block has.
    order: Order  # Of the rows of a block.

    def __len__(self) -> int:
        """The rows of a block."""
        return int(self.counts.sum())

    def owners(self, start: int, count: int) -> np.ndarray:
        """The number of the source at each of the positions start to start + count - 1 of the stream."""
        slots = np.repeat(np.arange(len(self.counts)), self.counts)
        return slots[self.order.rows_at(start - self.first_row, count)]

    def count_before(self, position: int) -> np.ndarray:
        """How many rows of each source come before a position of the stream."""
        blocks, begun = divmod(position - self.first_row, len(self))
        in_block = np.bincount(self.owners(position - begun, begun), minlength=len(self.counts))
        return self.before + blocks * self.counts + in_block


class Mixture(Dataset):
    """Rows of several sources in the ratio of their weights, as one endless stream.

    Each source goes through shuffled epochs of its own, and its rows follow one another as if it were alone. The rows
    of all sources are numbered one source after the other.
    """

    def __init__(self, sources: dict[str, Dataset], counts: list[int], seed: int):
        """In a block, a source has as many rows as `counts` says."""
        self.sources = sources
        self.seed = seed
        self.stages = []
        self.offsets = running_sum([len(data) for data in sources.values()])  # The first row of each.
        self.begin_stage(0, counts)
        parts = [data.index for data in sources.values()]
        self.index = {name: min(part[name] for part in parts) for name in ("lowest_id", "lowest_label")}
        self.index["highest"] = max(part["highest"] for part in parts)
        self.index["notes"] = [f"{name}: {note}" for name, data in sources.items() for note in data.index["notes"]]
        for name in ("tokens", "tokens_seen"):  # As often as the first stage has them, in as many rows as there are.
            per_block = sum(count * part[name] / part["rows"] for count, part in zip(counts, parts))
            self.index[name] = per_block / sum(counts) * len(self)
        self.tokens = self.index["tokens"]

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def order(self) -> Order:
        return self.stages[0].order

    def begin_stage(self, first_row: int, counts: list[int]) -> None:
        """From a position of the stream on, have other blocks. Each source goes on with its next row."""
        before = self.stages[-1].count_before(first_row) if self.stages else np.zeros(len(counts), np.int64)
        # With the same seed, a source as large as a block would be in the order of the block.
        order = Order(sum(counts), (self.seed + 1 + len(self.stages)) % 2**32)
        self.stages.append(MixtureStage(first_row, before, np.array(counts), order))

    def rows_at(self, start: int, count: int) -> np.ndarray:
        """The numbers of the rows at positions start to start + count - 1 of the stream."""
        rows = [np.empty(0, np.int64)]
        ends = [*(stage.first_row for stage in self.stages[1:]), math.inf]
        for stage, end in zip(self.stages, ends):
            begin, stop = max(start, stage.first_row), min(start + count, end)
            if begin < stop:
                rows.append(self.rows_in(stage, begin, stop - begin))
        return np.concatenate(rows)

    def rows_in(self, stage: MixtureStage, start: int, count: int) -> np.ndarray:
        """As rows_at(), if all of the rows are in this stage."""
        owners, rows = stage.owners(start, count), np.empty(count, np.int64)
        for number, (data, before) in enumerate(zip(self.sources.values(), stage.count_before(start).tolist())):
            own = owners == number
            rows[own] = self.offsets[number] + data.rows_at(before, own.sum())
        return rows

    def read(self, row: int) -> np.ndarray:
        """As Dataset.read()."""
        number = self.owners_of(row)
        return self.parts()[number].read(row - self.offsets[number])

    def parts(self) -> list[Dataset]:
        """As Dataset.parts()."""
        return list(self.sources.values())

    def owners_of(self, rows: int | np.ndarray) -> int | np.ndarray:
        """The number of the source of each row."""
        return np.searchsorted(self.offsets, rows, side="right") - 1

    def sizes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As Dataset.sizes()."""
        lengths, targets = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        owners = self.owners_of(rows)
        for number, data in enumerate(self.sources.values()):
            own = owners == number
            lengths[own], targets[own] = data.sizes(rows[own] - self.offsets[number])
        return lengths, targets

    def read_rows(self, rows: np.ndarray) -> list[np.ndarray]:
        """As Dataset.read_rows(), but the rows of one source after those of another."""
        return super().read_rows(rows[np.argsort(self.owners_of(rows), kind="stable")])

    def source_ends(self, rows: np.ndarray, joined: bool) -> dict[str, int]:
        """How many tokens of a micro-batch of read_rows() come before the end of each source, padding included."""
        lengths, _ = self.sizes(rows)
        if not joined:
            lengths[:] = lengths.max(initial=0)
        return dict(zip(self.sources, itertools.accumulate(self.by_source(rows, lengths).values())))

    def fingerprints(self) -> dict[str, int]:
        """The fingerprint of each source."""
        return {name: data.fingerprint() for name, data in self.sources.items()}

    def by_source(self, rows: np.ndarray, counts: np.ndarray) -> dict[str, int]:
        """The sum of the counts of rows, for each source."""
        sums = np.bincount(self.owners_of(rows), counts, len(self.sources))
        return dict(zip(self.sources, sums.astype(int).tolist()))

    def fingerprint(self) -> int:
        """A checksum of the rows of all sources. The weights are in the config."""
        return zlib.crc32(json.dumps(list(self.fingerprints().values())).encode())

    def count_before(self, position: int) -> dict[str, int]:
        """How many rows of each source come before a position of the stream."""
        stage = [stage for stage in self.stages if stage.first_row <= position][-1]
        return dict(zip(self.sources, stage.count_before(position).tolist()))
