"""From documents to an index of packed rows on disk: how it is written, found again, and when it is made anew."""

import inspect
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from samerun.config import Data
from samerun.data.documents import hold_out, kept_rows, load_documents, take
from samerun.data.order import ORDER, as_int32, running_sum
from samerun.data.overlap import are_among, hash_documents
from samerun.data.rows import Dataset, all_sizes, checksum_of_rows
from samerun.data.sources import data_cache, hashed_key, identity_of, require_writable
from samerun.data.token_files import (
    TokenFile,
    as_dataset,
    identity_of_token_files,
    names_of_token_files,
    open_token_files,
)
from samerun.data.tokenize import tokenize
from samerun.errors import name_place, require, say
from samerun.files import delete, real_path, replace_file, size_and_sample, stamp, sync


class IndexWriter:
    """Writes where the rows of documents lie, for Dataset to map it into memory.

    It takes one batch of documents after another, so that it needs little memory. The tokens stay in the files of Arrow
    that the batches come from. An extent is tokens that lie together in one of them. The files of the index hold int64:

        edges.bin    [segments + 1]            the first token of each segment, and the end
        first.bin    [rows + 1]                the first segment of each row; not there if each row is one segment
        targets.bin  [rows + 1]                how many targets there are before each row; only there with labels
        hashes.bin   [documents]               hash_documents(); only there if the run has an evaluation
        extents.bin  [2 + columns, extents + 1]  of each extent the first token, the number of its file, and the bytes
                                               of the file before its ids and before its labels
    """

    def __init__(self, files: dict[str, BinaryIO], packing: str, length: int, columns: list[str]):
        self.files = files
        self.packing = packing
        self.length = length
        self.columns = columns  # input_ids and, if there are any, labels, or what their columns are called.
        self.tokens = 0  # So far, as the next three.
        self.segments = 0
        self.rows = 0
        self.targets = 0
        self.tokens_seen = 0  # By all tokens together, if each sees its whole segment.
        self.lowest_id = self.lowest_label = self.highest = 0
        self.unlike = 0  # Labels that are another token than the one at their place.
        self.checksum_of_ids = self.checksum_of_labels = 0
        self.extents = []
        self.types = []  # Of the columns, as numpy calls them.

    def append(self, name: str, numbers: np.ndarray) -> None:
        if name in self.files:
            self.files[name].write(np.ascontiguousarray(numbers, np.int64))  # numpy's tofile() hides a full disk.

    def add(self, batch: pa.RecordBatch, file: int, place: range, kept: np.ndarray | None) -> None:
        """Add a batch of documents from a file that is mapped to this place in memory.

        `kept` tells which of its documents, in rising order; None is all.
        """
        whole = batch
        if kept is not None:
            batch = batch.take(pa.array(kept))
        lengths = pc.list_value_length(batch.column(self.columns[0])).to_numpy()
        if not lengths.any():
            return
        offsets = self.tokens + running_sum(lengths)
        cuts = cut_into_rows(offsets, self.packing, self.length)
        if self.packing == "best_fit":  # The packer made a row of several documents, and notes their lengths.
            offsets = self.tokens + running_sum(batch.column("seq_lengths").flatten())
        edges = np.sort(np.concatenate((offsets, cuts)), kind="stable")
        edges = edges[np.diff(edges, append=offsets[-1]) > 0]  # Empty documents are gone; the end begins the next one.
        self.append("edges", edges)
        self.append("first", self.segments + np.searchsorted(edges, cuts))
        self.tokens_seen += int((np.diff(edges, append=offsets[-1]) ** 2).sum())

        tokens = [batch.column(name).flatten().to_numpy() for name in self.columns]
        self.types = [part.dtype.name for part in tokens]
        self.note_extents(whole, file, place, offsets, kept)
        self.note_targets(tokens, edges - self.tokens, cuts - self.tokens)
        self.tokens += len(tokens[0])
        self.segments += len(edges)
        self.rows += len(cuts)

    def note_extents(
        self, batch: pa.RecordBatch, file: int, place: range, offsets: np.ndarray, kept: np.ndarray | None
    ) -> None:
        """Note where the tokens lie in the file: one extent, or one for each run of neighbours that are kept."""
        lists = [batch.column(name) for name in self.columns]
        # Where the tokens are in memory: the first buffer of an array tells its nulls, the second one has the values.
        values = [column.flatten() for column in lists]
        addresses = [part.buffers()[1].address + part.offset * part.type.byte_width for part in values]
        is_mapped = all(address in place for address in addresses)
        require(is_mapped, "data: the Arrow files are compressed; save the data set anew by save_to_disk()")
        firsts = begins = np.zeros(1, np.int64)
        if kept is not None:
            runs = np.flatnonzero(np.diff(kept, prepend=-2) != 1)
            firsts = offsets[runs] - self.tokens
            begins = running_sum(pc.list_value_length(lists[0]).to_numpy())[kept[runs]]
        for first, begin in zip(firsts.tolist(), begins.tolist()):
            places = (address - place.start + begin * part.type.byte_width for address, part in zip(addresses, values))
            self.extents.append([self.tokens + first, file, *places])

    def note_targets(self, tokens: list[np.ndarray], edges: np.ndarray, cuts: np.ndarray) -> None:
        """Note how many targets come before each row, and the range and a checksum of the ids."""
        ids, *labels = tokens
        self.lowest_id = min(self.lowest_id, int(ids.min(initial=0)))
        self.highest = max(self.highest, int(ids.max(initial=0)))
        for part in as_int32(ids):
            self.checksum_of_ids = zlib.crc32(part, self.checksum_of_ids)
        if not labels:
            self.targets += len(ids) - len(edges)  # The first token of a segment is no target: nothing comes before it.
            return
        is_target = labels[0] != -100
        is_target[edges] = False
        before = running_sum(is_target)
        self.append("targets", self.targets + before[cuts])
        self.targets += int(before[-1])
        self.lowest_label = min(self.lowest_label, int(labels[0].min(where=is_target, initial=0)))
        self.highest = max(self.highest, int(labels[0].max(where=is_target, initial=0)))
        self.unlike += int((is_target & (labels[0] != ids)).sum())
        targets = np.where(is_target, labels[0], -100).astype(np.int32)
        self.checksum_of_labels = zlib.crc32(targets, self.checksum_of_labels)

    def finish(self) -> dict[str, Any]:
        """Complete the files, and return what they hold in all."""
        require(self.tokens, "data: there are no tokens")
        advice = "check roles or labels, and that documents have more than one token"
        require(self.targets, f"data or data.eval_source: there is no target token; {advice}")
        self.append("edges", np.array([self.tokens]))
        self.append("first", np.array([self.segments]))
        self.append("targets", np.array([self.targets]))
        self.extents.append([self.tokens] + [0] * (len(self.extents[0]) - 1))
        self.append("extents", np.array(self.extents).T)
        totals = ("rows", "tokens", "tokens_seen", "lowest_id", "lowest_label", "highest", "types")
        totals += ("unlike", "checksum_of_ids", "checksum_of_labels")
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


def files_of(documents: datasets.Dataset) -> list[str]:
    """The Arrow files whose rows, one after the other, are the data of which the documents are some or all. An
    empty list if some rows are elsewhere, such as in memory."""
    files, rows = datasets.table.list_table_cache_files(documents.data), 0
    for file in files:
        rows += sum(batch.num_rows for batch, _ in read_batches(file))
    return files if rows == documents.data.num_rows else []


def can_stay(documents: datasets.Dataset) -> bool:
    """Whether an index can say which rows of their files the documents are: in their order, and none of them null."""
    kept = kept_rows(documents)
    has_nulls = any(values.null_count for values in documents.data.columns)
    return kept is None or ((np.diff(kept) > 0).all() and not has_nulls)


def read_batches(file: str | TokenFile) -> Iterator[tuple[pa.RecordBatch, range]]:
    """The batches of a file, and the place in memory to which it is mapped meanwhile."""
    if isinstance(file, TokenFile):
        yield from file.batches()
        return
    with pa.memory_map(file) as mapped:
        address = mapped.read_buffer(1).address  # Where the first byte of the file is in memory.
        mapped.seek(0)
        for batch in pa.ipc.open_stream(mapped):
            yield batch, range(address, address + mapped.size())


def pack_best_fit(documents: datasets.Dataset, length: int, folder: Path) -> datasets.Dataset:
    """The documents packed by TRL: several in a row, whose lengths are in the column seq_lengths."""
    from trl import pack_dataset  # Not at the top of the file: few runs need it, and it takes a while.

    kinds = sorted({str(kind).partition("<")[0] for kind in documents.data.schema.types})
    told = f"data.packing best_fit: TRL packs columns that are all list or all large_list, not {' and '.join(kinds)}"
    require(kinds in (["list"], ["large_list"]), f"{told}; use concat or none")
    options = {"batch_size": 10_000, "cache_file_name": str(folder / "packed.arrow")}
    return pack_dataset(documents, length, "bfd_split", options)


def in_files(
    documents: datasets.Dataset, token_files: list[TokenFile], folder: Path
) -> tuple[datasets.Dataset, list[str] | list[TokenFile]]:
    """The documents, and the files that they lie in. They are copied into one if an index cannot tell where that is."""
    if can_stay(documents):
        files = token_files or files_of(documents)
        if files:
            return documents, files
    documents = documents.flatten_indices(cache_file_name=str(folder / "documents.arrow"))
    return documents, files_of(documents)


def write_index(
    documents: datasets.Dataset, token_files: list[TokenFile], packing: str, length: int, folder: Path
) -> dict[str, Any]:
    """Write the files of an index, and return what goes into its index.json. `token_files`: where the documents lie."""
    columns = documents.column_names
    if packing == "best_fit":
        documents, token_files = pack_best_fit(documents, length, folder), []
    documents, files = in_files(documents, token_files, folder)
    names = ["edges", "extents"]
    if packing != "none":
        names.append("first")
    if len(columns) == 2:
        names.append("targets")
    with ExitStack() as opened:
        written = {name: opened.enter_context(open(folder / f"{name}.bin", "wb")) for name in names}
        writer = IndexWriter(written, packing, length, columns)
        kept, row = kept_rows(documents), 0
        for number, file in enumerate(files):
            for batch, place in read_batches(file):
                own = None
                if kept is not None:
                    first, end = np.searchsorted(kept, (row, row + batch.num_rows))
                    own = kept[first:end] - row
                row += batch.num_rows
                writer.add(batch, number, place, own)
        totals = writer.finish()
    # As identity_of_token_files() has them: the next launch may have another working folder.
    paths = [real_path(file.path) if isinstance(file, TokenFile) else file for file in files]
    complete = [*folder.glob("*.bin"), *folder.glob("*.arrow")]
    for file in complete:
        sync(file)
    sizes = {file.name: size_and_sample(file) for file in complete}
    return {**totals, "sizes": sizes, "token_files": [[path, stamp(path)] for path in paths]}


# What they hold decides the tokens, or how they are cut into rows: other code makes new ones.
ROOMS_OF_TOKENS = "order", "sources", "text_files", "token_files", "documents", "encode", "chat", "tokenize"
ROOMS_OF_ROWS = "order", "rows", "overlap", "index"


def load_rows(
    config: Data, tokenizer, made_by: str, seed: int, held_out: bool = False, others: list[Dataset] | None = None
) -> Dataset:
    """The rows of a single source, by their index on disk. Only where there is none yet, the data is opened to make it.

    `made_by` tells the tokenizer from others. Another tokenizer, or other code, makes another index. Rows that are
    packed in another way have an index of their own, and the same tokens. `others` are those that must not have the
    same documents, or None if nothing is evaluated.
    """
    flat = names_of_token_files(config)
    identity = identity_of_token_files(flat) if flat else identity_of(config)
    selection = [config.eval_fraction, seed, held_out, ORDER] if config.eval_fraction else []
    settings = [config.format, config.column, config.train_on, config.drop_nulls, config.parse_special_tokens]
    settings.append(config.token_dtype)
    tokens_key = hashed_key(identity, settings, selection, made_by, source_of(ROOMS_OF_TOKENS))
    apart_from = None if others is None else [other.folder.name for other in others]
    rows_key = [config.packing, config.sequence_length, ORDER, apart_from, source_of(ROOMS_OF_ROWS)]
    cache = data_cache()
    folder = cache / "train-index" / hashed_key(tokens_key, rows_key)
    tokens = cache / "train-tokens" / tokens_key
    index = read_index(folder)
    if index is None:
        require_writable(cache)
        delete(folder)
        folder.mkdir(parents=True)
        try:
            make_index(folder, tokens, config, tokenizer, seed, held_out, others)
        except OSError as error:
            name_place(error, cache)
            raise
        index = json.loads((folder / "index.json").read_text())
    return Dataset(folder, index, seed)


def make_index(
    folder: Path, tokens: Path, config: Data, tokenizer, seed: int, held_out: bool, others: list[Dataset] | None
) -> None:
    """Write the index of load_rows() into the folder. `tokens` is where tokens are kept."""
    flat, notes = names_of_token_files(config), []
    end = tokenizer.eos_token_id if tokenizer else None
    token_files = open_token_files(flat, config.token_dtype, end, notes.append) if flat else []
    documents = as_dataset(token_files) if flat else load_documents(config, notes.append)
    if config.eval_fraction:
        kept, other = hold_out(documents, config.eval_fraction, seed)
        documents = other if held_out else kept
    documents = tokenize(documents, config, tokenizer, tokens)
    if others is not None:
        documents = compare_documents(documents, others, config.eval_fraction > 0, folder, notes.append)
    index = write_index(documents, token_files, config.packing, config.sequence_length, folder)
    rows = Dataset(folder, index, seed)
    note_rows_without_target(rows, notes.append)
    if index["unlike"]:
        advice = "labels must not be shifted: that of a token stands at its place, and the model learns the next one"
        notes.append(f"labels that are another token than the one at their place: {index['unlike']:,}; {advice}.")
    index |= {"notes": notes, "fingerprint": checksum_of_rows(rows)}
    replace_file(folder / "index.json", json.dumps(index))  # Last, because it says that the others are complete.


def compare_documents(
    documents: datasets.Dataset, others: list[Dataset], leave_out: bool, folder: Path, note: Callable[[str], None]
) -> datasets.Dataset:
    """The documents, without those that others hold out for evaluation. Those that others train on are counted.

    Writes hashes.bin, by which later data are compared with these.
    """
    hashes = hash_documents(documents)
    shared = are_among(hashes, [other.hashes for other in others]) if others else np.zeros(len(hashes), bool)
    if shared.any() and leave_out:
        note(f"{shared.sum():,} documents are the same as some that are held out, and left out of training.")
        require(not shared.all(), "data.eval_fraction: all documents are the same as some that are held out")
        documents, hashes = take(documents, np.flatnonzero(~shared)), hashes[~shared]
    elif shared.any():
        note(f"{shared.sum():,} of {len(hashes):,} documents are also trained on.")
    (folder / "hashes.bin").write_bytes(hashes)
    return documents


def source_of(rooms: tuple[str, ...]) -> str:
    """The code of rooms of samerun/data/."""
    return "".join(inspect.getsource(sys.modules[f"samerun.data.{room}"]) for room in rooms)


def read_index(folder: Path) -> dict[str, Any] | None:
    """What an index holds. None if there is none, or a file is not as it was."""
    note = folder / "index.json"
    if not note.exists():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        index = json.loads(note.read_text())
        is_whole = all(size_and_sample(folder / name) == known for name, known in index["sizes"].items())
        if is_whole and all(stamp(file) == known for file, known in index["token_files"]):
            return index
    say(f"Data: the index {folder}, or its tokens, are not as they were written. The index is made anew.")
    return None


def note_rows_without_target(data: Dataset, note: Callable[[str], None]) -> None:
    """Note how many there are, such as a part of a long prompt, or a chat in which no assistant speaks."""
    without = sum(int((targets == 0).sum()) for _, targets in all_sizes(data))
    if without and data.targets is not None:  # Otherwise these are texts of a single token.
        note(f"rows without a target token, from which nothing is learned: {without:,} of {len(data):,}.")
