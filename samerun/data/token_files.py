"""Tokens that other programs have written to flat files: Megatron's .bin with its .idx, and arrays in .npy or .bin."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa

from samerun.config import Data
from samerun.data.order import running_sum
from samerun.data.sources import list_files
from samerun.errors import UserError, as_user_error, require
from samerun.files import stamp

SUFFIXES = {".bin", ".npy"}

# What the number in the header of Megatron's .idx says of the tokens in its .bin. Its other types are no integers.
MEGATRON_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}

BATCH = 10_000  # Documents whose rows are worked out at a time.


@dataclass(frozen=True)
class TokenFile:
    """Document d of a file is tokens[offsets[d] : offsets[d + 1]]."""

    path: str
    tokens: np.ndarray  # Mapped into memory.
    offsets: np.ndarray  # int64 [documents + 1]
    header: int  # Bytes of the file before its first token.

    def documents(self) -> pa.LargeListArray:
        """Lists of tokens, which are not copied."""
        return pa.LargeListArray.from_arrays(pa.array(self.offsets), pa.array(self.tokens))

    def batches(self) -> Iterator[tuple[pa.RecordBatch, range]]:
        """Batches of the documents, and the place in memory to which the file is mapped."""
        end = self.tokens.ctypes.data + self.tokens.nbytes
        place = range(self.tokens.ctypes.data - self.header, end)
        for batch in pa.table({"input_ids": self.documents()}).to_batches(BATCH):
            yield batch, place


def names_of_token_files(config: Data) -> list[str]:
    """The flat files of a source, without Megatron's .idx beside them. No names if the source is of another kind."""
    if config.format != "tokens":
        return []
    files = list_files(config.files)
    flat = [file for file in files if Path(file).suffix in SUFFIXES]
    others = [file for file in files if Path(file).suffix not in SUFFIXES and not is_index(file)]
    if flat and others:
        raise UserError(f"data.files: {flat[0]} and {others[0]} do not mix; choose by a pattern")
    for file in flat:
        require("://" not in file, f"data.files: {file}: it is mapped into memory, so download it first")
    return flat


def is_index(file: str) -> bool:
    return Path(file).suffix == ".idx" and Path(file).with_suffix(".bin").exists()


def identity_of_token_files(files: list[str]) -> list:
    """What changes when the tokens do."""
    identity = []
    for name in files:
        for file in Path(name), Path(name).with_suffix(".idx"):
            if file.exists():
                identity.append([str(file.resolve()), stamp(file)])
    return identity


def open_token_files(
    files: list[str], dtype: str | None, end: int | None, note: Callable[[str], None]
) -> list[TokenFile]:
    """Map files into memory. `end` is the token that ends a document where a file does not tell the documents."""
    opened = []
    for file in files:
        with as_user_error(f"data.files: cannot use {file}"):
            opened.append(open_token_file(file, dtype, end))
    types = {part.tokens.dtype.name: part.path for part in opened}
    found = " and ".join(f"{path} has {name}" for name, path in types.items())
    require(len(types) == 1, f"data.files: {found}; give files of the same type")
    note(f"documents in {len(files):,} files of tokens: {sum(len(part.offsets) - 1 for part in opened):,}.")
    return opened


LLM_C = 20240520, 20240801  # With which the 256 int32 begin that llm.c and modded-nanogpt write before their tokens.


def open_token_file(file: str, dtype: str | None, end: int | None) -> TokenFile:
    data = np.frombuffer(pa.memory_map(file).read_buffer(), np.uint8)
    index = Path(file).with_suffix(".idx")
    if Path(file).suffix == ".bin" and index.exists():
        kind, offsets = read_megatron_index(index)
        tokens = data.view(kind)
        require(len(tokens) == offsets[-1], f"{index} is of {offsets[-1]:,} tokens, and it has {len(tokens):,}")
        return TokenFile(file, tokens, offsets, 0)
    kind, shape, header = read_npy_header(file)
    if kind is None:
        has_header = int.from_bytes(data[:4].tobytes(), "little") in LLM_C
        require(not has_header, f"it begins with a header of llm.c; cut it: tail -c +1025 {file} > NEW.bin")
        require(dtype, "it does not tell the type of its tokens; give data.token_dtype: uint16 or uint32")
        kind = np.dtype(dtype)
    is_native = kind.kind in "ui" and kind.isnative
    require(
        is_native and len(shape) <= 2, f"it is an array of {kind.str} with {len(shape)} axes, and no list of tokens"
    )
    tokens = data[header:].view(kind)
    if not header and dtype == "uint16":
        require(not looks_like_uint32(tokens), "each second token is almost 0: give data.token_dtype: uint32")
    if header:
        told = math.prod(shape)
        require(len(tokens) == told, f"its header says {told:,} tokens, and it has {len(tokens):,}")
    if len(shape) == 2:  # A line is a document.
        return TokenFile(file, tokens, np.arange(shape[0] + 1) * shape[1], header)
    return TokenFile(file, tokens, ends_of_documents(tokens, end), header)


def looks_like_uint32(tokens: np.ndarray) -> bool:
    """Whether uint16 may be the halves of uint32: the upper ones are below 16 for any vocabulary below 2**20."""
    lower, upper = tokens[0:20_000:2], tokens[1:20_000:2]
    return len(upper) > 100 and upper.max() < 16 <= lower.max()


def read_npy_header(file: str) -> tuple[np.dtype | None, tuple[int, ...], int]:
    """Type, shape, and the bytes of the header. Some programs call a file .npy that has none."""
    with open(file, "rb") as opened:
        if opened.read(6) != b"\x93NUMPY":
            return None, (0,), 0
        opened.seek(0)
        version = np.lib.format.read_magic(opened)
        reads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, by_columns, kind = reads[version](opened)
        require(not by_columns or len(shape) == 1, "its lines are not one after the other; save it in C order")
        return kind, shape, opened.tell()


def ends_of_documents(tokens: np.ndarray, end: int | None) -> np.ndarray:
    """Where documents begin, and where the last one ends."""
    found = [np.zeros(1, np.int64)]
    if end is not None:
        for start in range(0, len(tokens), 2**24):  # Some at a time, because the comparison takes memory.
            found.append(np.flatnonzero(tokens[start : start + 2**24] == end) + start + 1)
    return np.unique(np.concatenate([*found, [len(tokens)]]))


def read_megatron_index(file: Path) -> tuple[np.dtype, np.ndarray]:
    """The type of the tokens, and where the documents begin and end, from the header of megatron.core's IndexedDataset.

    It has documents of one or more sequences, which lie one after the other.
    """
    index = pa.memory_map(str(file)).read_buffer()
    require(index[:9] == b"MMIDIDX\x00\x00" and index[9:17] == b"\x01" + bytes(7), f"{file} is no .idx of Megatron")
    require(index[17] in MEGATRON_TYPES, f"{file} says that the tokens are no integers (type {index[17]})")
    kind = np.dtype(MEGATRON_TYPES[index[17]])
    sequences, edges = np.frombuffer(index, np.int64, 2, 18).tolist()
    lengths = np.frombuffer(index, np.int32, sequences, 34)
    pointers = np.frombuffer(index, np.int64, sequences, 34 + 4 * sequences)
    documents = np.frombuffer(index, np.int64, edges, 34 + 12 * sequences)
    offsets = running_sum(lengths)
    in_order = np.array_equal(pointers, offsets[:-1] * kind.itemsize)
    require(in_order, f"in {file}, the sequences do not lie one after the other")
    is_whole = edges and documents[0] == 0 and documents[-1] == sequences and (documents[1:] >= documents[:-1]).all()
    require(is_whole, f"in {file}, the documents are not all the sequences, one after the other")
    return kind, offsets[documents]


def as_dataset(files: list[TokenFile]) -> datasets.Dataset:
    """All documents, still in their files."""
    table = pa.table({"input_ids": pa.chunked_array([file.documents() for file in files])})
    return datasets.Dataset(
        datasets.table.InMemoryTable(table), fingerprint="mapped"
    )  # Else datasets hashes all of it.
