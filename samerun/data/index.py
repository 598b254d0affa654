"""The index of the rows on disk: how it is written, found again, and when it is made anew."""

import inspect
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from samerun.config import Data, Source
from samerun.data.documents import hold_out, load_documents
from samerun.data.order import ORDER, running_sum
from samerun.data.rows import Dataset, all_sizes, checksum_of_rows
from samerun.data.sources import identity_of
from samerun.data.tokenize import tokenize
from samerun.errors import require
from samerun.files import replace_file, stamp


class IndexWriter:
    """Writes where the rows of documents lie, for Dataset to map it into memory.

    It takes one batch of documents after another, so that it needs little memory. The tokens stay in the files of Arrow
    that the batches come from. A chunk is the tokens of one batch. The files of the index hold int64:

        edges.bin    [pieces + 1]              the first token of each piece, and the end
        first.bin    [rows + 1]                the first piece of each row; not there if each row is one piece
        targets.bin  [rows + 1]                how many targets there are before each row; only there with labels
        chunks.bin   [2 + columns, chunks + 1] of each chunk the first token, the number of its file, and the bytes of
                                               the file before its ids and before its labels
    """

    def __init__(self, files: dict[str, BinaryIO], packing: str, length: int, columns: list[str]):
        self.files = files
        self.packing = packing
        self.length = length
        self.columns = columns  # input_ids and, if there are any, labels, or what their columns are called.
        self.tokens = self.pieces = self.rows = self.targets = 0  # So far.
        self.tokens_seen = 0  # By all tokens together, if each sees its whole piece.
        self.lowest_id = self.lowest_label = self.highest = 0
        self.chunks = []
        self.types = []  # Of the columns, as numpy calls them.

    def append(self, name: str, numbers: np.ndarray) -> None:
        if name in self.files:
            numbers.astype(np.int64).tofile(self.files[name])

    def add(self, batch: pa.RecordBatch, file: int, place: range) -> None:
        """Add a batch of documents from a file that is mapped to this place in memory."""
        lists = [batch.column(name) for name in self.columns]
        lengths = pc.list_value_length(lists[0]).to_numpy()
        if not lengths.any():
            return
        offsets = self.tokens + running_sum(lengths)
        cuts = cut_into_rows(offsets, self.packing, self.length)
        if self.packing == "best_fit":  # The packer made a row of several documents, and notes their lengths.
            offsets = self.tokens + running_sum(batch.column("seq_lengths").flatten())
        edges = np.sort(np.concatenate((offsets, cuts)), kind="stable")
        edges = edges[np.diff(edges, append=offsets[-1]) > 0]  # Empty documents are gone; the end begins the next one.
        self.append("edges", edges)
        self.append("first", self.pieces + np.searchsorted(edges, cuts))
        self.tokens_seen += int((np.diff(edges, append=offsets[-1]) ** 2).sum())

        values = [column.flatten() for column in lists]
        # Where the tokens are in memory: the first buffer of an array tells its nulls, the second one has the values.
        addresses = [part.buffers()[1].address + part.offset * part.type.byte_width for part in values]
        is_mapped = all(address in place for address in addresses)
        require(is_mapped, "data: the Arrow files are compressed; save the data set anew by save_to_disk()")
        self.chunks.append([self.tokens, file, *(address - place.start for address in addresses)])
        tokens = [part.to_numpy() for part in values]
        self.types = [part.dtype.name for part in tokens]
        self.note_targets(tokens, edges - self.tokens, cuts - self.tokens)
        self.tokens += len(tokens[0])
        self.pieces += len(edges)
        self.rows += len(cuts)

    def note_targets(self, tokens: list[np.ndarray], edges: np.ndarray, cuts: np.ndarray) -> None:
        """Note how many targets come before each row, and the range of the ids."""
        ids, *labels = tokens
        self.lowest_id = min(self.lowest_id, int(ids.min(initial=0)))
        self.highest = max(self.highest, int(ids.max(initial=0)))
        if not labels:
            self.targets += len(ids) - len(edges)  # The first token of a piece is no target: nothing comes before it.
            return
        is_target = labels[0] != -100
        is_target[edges] = False
        before = running_sum(is_target)
        self.append("targets", self.targets + before[cuts])
        self.targets += int(before[-1])
        self.lowest_label = min(self.lowest_label, int(labels[0].min(where=is_target, initial=0)))
        self.highest = max(self.highest, int(labels[0].max(where=is_target, initial=0)))

    def finish(self) -> dict[str, Any]:
        """Complete the files, and return what they hold in all."""
        require(self.tokens, "data: there are no tokens")
        advice = "check roles or labels, and that documents have more than one token"
        require(self.targets, f"data or data.eval_source: there is no target token; {advice}")
        self.append("edges", np.array([self.tokens]))
        self.append("first", np.array([self.pieces]))
        self.append("targets", np.array([self.targets]))
        self.chunks.append([self.tokens] + [0] * (len(self.chunks[0]) - 1))
        self.append("chunks", np.array(self.chunks).T)
        totals = ("rows", "tokens", "tokens_seen", "lowest_id", "lowest_label", "highest", "types")
        return {name: getattr(self, name) for name in totals}


def cut_into_rows(offsets: np.ndarray, packing: str, length: int) -> np.ndarray:
    """Where rows begin in a part of the stream: that of the documents that begin at offsets[:-1]."""
    begin, end = offsets[0], offsets[-1]
    if packing == "best_fit":  # The documents are rows already.
        return offsets[:-1]
    if packing == "concat":  # Wherever a row is full.
        return np.arange(-(-begin // length) * length, end, length)
    # Every document from its start.
    rows_of = (np.diff(offsets) + length - 1) // length
    first_row = np.cumsum(rows_of) - rows_of
    row_in_document = np.arange(rows_of.sum()) - np.repeat(first_row, rows_of)
    return np.repeat(offsets[:-1], rows_of) + length * row_in_document


def whole_files(documents: datasets.Dataset) -> list[str]:
    """The files whose rows, one after the other, are the documents. No files where these are only some of the rows."""
    files, rows = [file["filename"] for file in documents.cache_files], 0
    for file in files:
        with pa.memory_map(file) as mapped:
            rows += sum(batch.num_rows for batch in pa.ipc.open_stream(mapped))
    is_whole = documents._indices is None and rows == len(documents)
    return files if is_whole else []


def write_index(documents: datasets.Dataset, packing: str, length: int, folder: Path) -> dict[str, Any]:
    """Write the files of an index, and return what goes into its index.json."""
    columns = documents.column_names
    if packing == "best_fit":
        from trl import pack_dataset  # Not at the top of the file, because it takes two seconds.

        fixed = "fixed_size_list" in str(documents.data.schema)
        require(not fixed, "data.packing best_fit: TRL does not pack lists of a fixed size; use concat or none")
        options = {"batch_size": 10_000, "cache_file_name": str(folder / "packed.arrow")}
        documents = pack_dataset(documents, length, "bfd_split", options)
    files = whole_files(documents)
    if not files:  # The documents are a selection, or in memory.
        documents = documents.flatten_indices(cache_file_name=str(folder / "documents.arrow"))
        files = whole_files(documents)
    names = ["edges", "chunks"]
    if packing != "none":
        names.append("first")
    if len(columns) == 2:
        names.append("targets")
    with ExitStack() as opened:
        written = {name: opened.enter_context(open(folder / f"{name}.bin", "wb")) for name in names}
        writer = IndexWriter(written, packing, length, columns)
        for number, file in enumerate(files):
            with pa.memory_map(file) as mapped:
                address = mapped.read_buffer(1).address  # Where the first byte of the file is in memory.
                mapped.seek(0)
                for batch in pa.ipc.open_stream(mapped):
                    writer.add(batch, number, range(address, address + mapped.size()))
        totals = writer.finish()
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.bin")}
    return {**totals, "sizes": sizes, "token_files": [[file, stamp(file)] for file in files]}


# What they hold decides the tokens, or how they are cut into rows: other code makes new ones.
ROOMS_OF_TOKENS = tuple(f"samerun.data.{room}" for room in ("order", "sources", "documents", "encode", "tokenize"))
ROOMS_OF_ROWS = tuple(f"samerun.data.{room}" for room in ("order", "rows", "index"))


def load_rows(source: Source, config: Data, tokenizer, made_by: str, seed: int, held_out: bool = False) -> Dataset:
    """The rows of a source, by their index on disk. Only where there is none yet, the data is opened to make it.

    `made_by` tells the tokenizer from others. Another tokenizer, or other code, makes another index. Rows that are
    packed in another way have an index of their own, and the same tokens.
    """
    selection = [config.eval_fraction, seed, held_out, ORDER] if config.eval_fraction else []
    settings = [config.format, config.column, config.drop_nulls, config.parse_special_tokens]
    tokens_key = hashed_key(identity_of(source), settings, selection, made_by, source_of(*ROOMS_OF_TOKENS))
    index_key = hashed_key(tokens_key, config.packing, config.sequence_length, ORDER, source_of(*ROOMS_OF_ROWS))
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    folder, tokens = cache / "train-index" / index_key, cache / "train-tokens" / tokens_key
    index = read_index(folder)
    if index is None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        notes = []
        documents = load_documents(source, config, notes.append)
        if config.eval_fraction:
            kept, other = hold_out(documents, config.eval_fraction, seed)
            documents = other if held_out else kept
        documents = tokenize(documents, config, tokenizer, tokens)
        index = write_index(documents, config.packing, config.sequence_length, folder)
        rows = Dataset(folder, index, seed)
        note_rows_without_target(rows, notes.append)
        index |= {"notes": notes, "fingerprint": checksum_of_rows(rows)}
        replace_file(folder / "index.json", json.dumps(index))  # Last, because it says that the others are complete.
    return Dataset(folder, index, seed)


def source_of(*rooms: str) -> str:
    """The code of modules by their names."""
    return "".join(inspect.getsource(sys.modules[room]) for room in rooms)


def hashed_key(*parts: Any) -> str:
    return datasets.fingerprint.Hasher.hash(parts)


def read_index(folder: Path) -> dict[str, Any] | None:
    """What an index holds. None if there is none, or a file is not as it was."""
    try:
        index = json.loads((folder / "index.json").read_text())
        is_whole = all(os.path.getsize(folder / name) == size for name, size in index["sizes"].items())
        is_current = all(stamp(file) == known for file, known in index["token_files"])
    except (OSError, ValueError):
        return None
    return index if is_whole and is_current else None


def note_rows_without_target(data: Dataset, note: Callable[[str], None]) -> None:
    """Such as the first part of a prompt that is longer than a row, or a chat in which no assistant speaks."""
    without = sum(int((targets == 0).sum()) for _, targets in all_sizes(data))
    if without and data.targets is not None:  # Otherwise these are texts of a single token.
        note(f"rows without a target token, from which nothing is learned: {without:,} of {len(data):,}.")
