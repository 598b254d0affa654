"""Which documents are both trained on and evaluated on."""

import itertools

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from samerun.data.documents import kept_rows
from samerun.data.order import as_int32, running_sum

AT_ONCE = 10_000  # Documents, because a chunk may be a whole file of tokens.


def hash_documents(documents: datasets.Dataset) -> np.ndarray:
    """int64: the same number for the same token ids, wherever they are read from and of whichever type they are.

    It is 0 for a document of fewer than two tokens, which has nothing to learn or to evaluate. Two different documents
    of 1e7 have the same number with a probability of 1e14 / 2 / 2**64 = 3e-6.
    """
    found = []
    # All rows of the table, also where the documents are some of them: datasets takes longer to gather these.
    for chunk in documents.data.column(documents.column_names[0]).chunks:
        for start in range(0, len(chunk), AT_ONCE):
            found.append(hash_lists(chunk.slice(start, AT_ONCE)))
    hashes, kept = np.concatenate(found), kept_rows(documents)
    return hashes if kept is None else hashes[kept]


def hash_lists(lists: pa.Array) -> np.ndarray:
    ends = running_sum(pc.fill_null(lists.value_lengths(), 0).to_numpy())
    tokens = lists.flatten().to_numpy()
    pairs = itertools.pairwise(ends.tolist())
    hashes = [hash_tokens(tokens[begin:end]) if end > begin + 1 else 0 for begin, end in pairs]
    return np.array(hashes, np.uint64).view(np.int64)


def hash_tokens(tokens: np.ndarray) -> int:
    hasher = xxhash.xxh3_64()
    for part in as_int32(tokens):
        hasher.update(part)
    return hasher.intdigest()


def are_among(hashes: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
    """Which documents are also among the others."""
    return np.isin(hashes, np.concatenate(others)) & (hashes != 0)
