"""Rows on disk as an endless shuffled stream."""

import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from samerun.config import Data
from samerun.data.order import Order, shuffle
from samerun.errors import require


class Dataset:
    """Rows of tokens, and the endless stream of shuffled epochs over them.

    The tokens of all documents, one after the other, are a stream. Documents and rows cut it into segments: segment s
    is the tokens edges[s] to edges[s + 1] - 1, and row r the segments first[r] to first[r + 1] - 1. These numbers, and
    the tokens, lie in files that are mapped into memory. So a start is as quick with large data as with small.
    """

    def __init__(self, folder: Path, index: dict[str, Any], seed: int):
        """Open what write_index() has left in the folder."""

        def mapped(name: str) -> np.ndarray | None:
            return np.frombuffer(mapped_file(folder / name), np.int64) if name in index["sizes"] else None

        self.folder = folder
        self.index = index
        self.order = Order(len(self), seed)
        self.tokens = index["tokens"]
        self.edges = mapped("edges.bin")
        self.first = mapped("first.bin")  # None: each row is one segment.
        self.targets = mapped("targets.bin")  # Before each row. None: there are no labels.
        self.hashes = mapped("hashes.bin")  # Of each document. None: nothing is evaluated.
        self.extents = mapped("extents.bin").reshape(2 + len(index["types"]), -1)
        self.types = [np.dtype(name) for name in index["types"]]
        self.files = [np.frombuffer(mapped_file(file), np.uint8) for file, _ in index["token_files"]]

    def __len__(self) -> int:
        return self.index["rows"]

    def rows_at(self, start: int, count: int) -> np.ndarray:
        """The numbers of the rows at positions start to start + count - 1 of the shuffled stream."""
        return self.order.rows_at(start, count)

    def first_segment(self, row: int | np.ndarray) -> int | np.ndarray:
        return row if self.first is None else self.first[row]

    def read(self, row: int) -> np.ndarray:
        """int64 [3, tokens]: input ids, targets (the token that follows, or -100) and positions in the segment."""
        edges = self.edges[self.first_segment(row) : self.first_segment(row + 1) + 1].tolist()
        start, end = edges[0], edges[-1]
        tokens = np.empty((3, end - start), np.int64)
        ids, targets, positions = tokens
        ids[:] = self.read_column(0, start, end)
        targets[:-1] = self.read_column(1, start + 1, end) if self.targets is not None else ids[1:]
        for begin, end in itertools.pairwise(edges):
            targets[end - 1 - start] = -100  # What follows the last token of a segment is of another document.
            positions[begin - start : end - start] = np.arange(end - begin)
        return tokens

    def read_column(self, column: int, start: int, end: int) -> np.ndarray:
        """Input ids (column 0) or labels (column 1) of the tokens start to end - 1, in one extent or several."""
        kind, parts = self.types[column], []
        extent = self.extents[0].searchsorted(start, side="right") - 1
        while start < end:
            first, file, *places = self.extents[:, extent].tolist()
            stop = min(end, int(self.extents[0, extent + 1]))
            begin = places[column] + (start - first) * kind.itemsize
            parts.append(self.files[file][begin : begin + (stop - start) * kind.itemsize].view(kind))
            start, extent = stop, extent + 1
        if len(parts) == 1:  # As nearly always.
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, kind)

    def sizes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, target tokens) of each row. The first token of a segment is no target: nothing comes before it."""
        first, end = self.first_segment(rows), self.first_segment(rows + 1)
        lengths = self.edges[end] - self.edges[first]
        if self.targets is None:
            return lengths, lengths - (end - first)
        return lengths, self.targets[rows + 1] - self.targets[rows]

    def read_rows(self, rows: np.ndarray) -> list[np.ndarray]:
        """The rows of a micro-batch. A rank without rows gets a token without target: it must take part in the pass."""
        if len(rows):
            return [self.read(row) for row in rows]
        token = self.read(0)[:, :1]  # A real one, because the embedding of some others is 0, by which norms divide.
        token[1] = -100
        return [token]

    def attention_length(self) -> float:
        """The length of the segment that a token is in, on average over all tokens."""
        return self.index["tokens_seen"] / self.index["tokens"]

    def parts(self) -> list["Dataset"]:
        """The data sets of which this consists."""
        return [self]

    def fingerprint(self) -> int:
        """A checksum of the rows and of the order in which they are shuffled."""
        return self.index["fingerprint"]


def mapped_file(file: str | Path) -> pa.Buffer:
    """Unlike numpy, pyarrow keeps no file open for this. There may be more of them than a process may open."""
    with pa.memory_map(str(file)) as opened:
        return opened.read_buffer()


def all_sizes(data: Dataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Dataset.sizes() of all rows, a million at a time."""
    for start in range(0, len(data), 2**20):
        yield data.sizes(np.arange(start, min(start + 2**20, len(data))))


def checksum_of_rows(data: Dataset) -> int:
    """A checksum of all tokens and targets, of where rows end, and of the order in which they are shuffled."""
    of_tokens = data.index["checksum_of_ids"], data.index["checksum_of_labels"]
    checksum = zlib.crc32(np.array(of_tokens), zlib.crc32(shuffle(np.arange(100), len(data), seed=0)))
    for lengths, _ in all_sizes(data):
        checksum = zlib.crc32(lengths.astype(np.int32), checksum)
    return checksum


def check_token_ids(data: Dataset, vocab_size: int, name: str) -> None:
    """Raises UserError for ids outside the vocabulary, for which a GPU would fail without an explanation."""
    lacks = {"lowest_id", "lowest_label", "highest"} - getattr(data, "index", {}).keys()  # That of a fork may.
    told = f"data: the index of {type(data).__name__} lacks {', '.join(sorted(lacks))} of {name}"
    require(not lacks, f"{told}; give them, or delete check_vocabulary from build_setup")
    advice = "a vocabulary begins at 0, and what is not to be learned gets -100 in labels"
    for column, lowest in ("input_ids", data.index["lowest_id"]), ("labels", data.index["lowest_label"]):
        require(lowest >= 0, f"data: {name} has {lowest} among its {column}; {advice}")
    known = f"the model's vocabulary is 0 to {vocab_size - 1}; data.tokenizer must be the model's"
    highest = data.index["highest"]
    require(highest < vocab_size, f"data: {name} has the token id {highest}, {known}")


def longest_row(config: Data, joined: bool) -> np.ndarray:
    """A full row that takes the most memory. A single document does, unless documents are kept apart by a mask."""
    needs_mask = config.packing != "none" and not joined
    document = config.sequence_length // 2 if needs_mask else config.sequence_length
    row = np.zeros((3, config.sequence_length), int)
    row[2] = np.arange(config.sequence_length) % document
    return row
