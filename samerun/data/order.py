"""The order of the rows, computed from seed and position: the heart of the promise."""

import math
from collections.abc import Iterator

import numpy as np

# What shuffle() does. Checkpoints record it, because a run cannot be continued in another order: change both together.
ORDER = "Feistel network of 6 rounds"


def shuffle(positions: np.ndarray, count: int, seed: int) -> np.ndarray:
    """The numbers of the rows at these positions of the endless stream of shuffled epochs over `count` rows.

    They are computed, so that nothing is as large as the data. Imagine the rows of an epoch in a table that is about
    square. A round rotates each of its columns by a random number of places, and then each of its lines, so that no two
    rows come to the same place. What ends in a place beyond the last row goes through all rounds again. This is the
    generalized Feistel network with cycle walking of Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
    (CT-RSA 2002).
    """
    places = max(count, 64)  # In a smaller table, six rounds would not be enough.
    height = 2 * (math.isqrt(places - 1) // 2 + 1)  # Even: with two odd sides, only half of all orders could occur.
    width = math.ceil(places / height)
    epochs, rows = np.divmod(positions.astype(np.uint64), count)
    keys = hashed(hashed(np.array([seed], np.uint64)) + epochs)
    outside = np.full(len(rows), True)
    while outside.any():
        key = keys[outside]
        y, x = np.divmod(rows[outside], width)
        for half in range(0, 12, 2):  # Each half of a round has random numbers of its own: x and y are below 2**40.
            # Half of a random number is added, so that the sum stays below 2**64.
            y = (y + hashed(key + (half << 40) + x) // 2) % height
            x = (x + hashed(key + ((half + 1) << 40) + y) // 2) % width
        rows[outside] = y * width + x
        outside = rows >= count
    return rows.astype(np.int64)


class Order:
    """The endless stream of shuffled epochs over `count` rows, of which some are always known in advance.

    To shuffle 1,024 positions takes numpy about three times as long as the few of one step.
    """

    AHEAD = 1024
    name = ORDER

    def __init__(self, count: int, seed: int):
        self.count = count
        self.seed = seed
        self.start, self.rows = 0, np.empty(0, np.int64)  # Those that are known, from this position on.

    def rows_at(self, start: int, count: int) -> np.ndarray:
        """The numbers of the rows at positions start to start + count - 1."""
        if not self.start <= start <= start + count <= self.start + len(self.rows):
            positions = np.arange(start, start + max(count, self.AHEAD))
            self.start, self.rows = start, shuffle(positions, self.count, self.seed)
        return self.rows[start - self.start :][:count]


def hashed(numbers: np.ndarray) -> np.ndarray:
    """64 random bits for each number: a step of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).

    uint64 wraps around, so that the bits are the same on every machine and with every version of numpy.
    """
    numbers = numbers + 0x9E3779B97F4A7C15
    numbers = (numbers ^ (numbers >> 30)) * 0xBF58476D1CE4E5B9
    numbers = (numbers ^ (numbers >> 27)) * 0x94D049BB133111EB
    return numbers ^ (numbers >> 31)


def running_sum(lengths: np.ndarray | list[int]) -> np.ndarray:
    """Where each part begins if parts of these lengths follow one another, and where the last one ends."""
    return np.append(0, np.cumsum(lengths, dtype=np.int64))


def as_int32(numbers: np.ndarray) -> Iterator[np.ndarray]:
    """The numbers as int32, a part at a time: a file of tokens may be larger than the memory."""
    for start in range(0, len(numbers), 2**20):
        yield numbers[start : start + 2**20].astype(np.int32)
