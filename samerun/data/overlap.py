"""Which documents are both trained on and evaluated on."""

import itertools

import datasets
import numpy as np
import xxhash

from samerun.data.order import running_sum

BATCH = 10_000  # Documents that are read at a time.


def hash_documents(documents: datasets.Dataset) -> np.ndarray:
    """int64: the same number for the same token ids, wherever they are read from and of whichever type they are.

    It is 0 for a document of fewer than two tokens, which has nothing to learn or to evaluate. Two different documents
    of 1e7 have the same number with a probability of 1e14 / 2 / 2**64 = 3e-6.
    """
    column, found = documents.column_names[0], []
    for batch in documents.select_columns(column).with_format("arrow").iter(BATCH):
        for lists in batch[column].chunks:
            ends = running_sum(lists.value_lengths().to_numpy())
            ids = memoryview(lists.flatten().to_numpy().astype(np.int32))
            pairs = itertools.pairwise(ends.tolist())
            hashes = [xxhash.xxh3_64_intdigest(ids[begin:end]) if end > begin + 1 else 0 for begin, end in pairs]
            found.append(np.array(hashes, np.uint64).view(np.int64))
    return np.concatenate(found)


def are_among(hashes: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
    """Which documents are also among the others."""
    return np.isin(hashes, np.concatenate(others)) & (hashes != 0)
