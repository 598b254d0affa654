"""The order of the rows is a permutation in each epoch, as random as chance, and the same with all libraries.

The tests of randomness compare counts with what a fair shuffle gives, by Pearson's chi-square. Nothing in them is left
to chance: the seed is fixed, so that they pass always or never.
"""

import math
import tracemalloc

import datasets
import numpy as np
import pytest
from reference import shuffled

from samerun.data.documents import hold_out
from samerun.data.order import ORDER, Order, hashed, shuffle


def epochs_of(count, epochs, seed=0):
    """int [epochs, count]: the rows of an epoch in their order."""
    return shuffle(np.arange(epochs * count), count, seed).reshape(epochs, count)


def check_even(counts, expected, degrees_of_freedom):
    """Pearson's chi-square is below what chance exceeds once in 30,000 times (Wilson and Hilferty's formula)."""
    chi_square = ((counts - expected) ** 2 / expected).sum()
    spread = 2 / (9 * degrees_of_freedom)
    bound = degrees_of_freedom * (1 - spread + 4 * math.sqrt(spread)) ** 3
    assert chi_square < bound, f"chi-square {chi_square:.0f} with {degrees_of_freedom} degrees of freedom"


def test_the_order_is_a_promise():
    """Whoever changes these numbers breaks the resume of every run, and must change train.ORDER, too."""
    assert ORDER == "Feistel network of 6 rounds"
    assert shuffle(np.arange(16), 8, 7).tolist() == [4, 3, 6, 5, 0, 2, 1, 7, 7, 0, 2, 4, 6, 5, 1, 3]
    far = 10**9 * 3 + np.arange(4)  # In the fourth epoch.
    assert shuffle(far, 10**9, 0).tolist() == [902690860, 261690946, 353519345, 260549672]
    assert shuffle(far, 10**9, 2**32 - 1).tolist() == [632431150, 843184083, 652301744, 618359982]


def test_the_random_numbers_are_those_of_the_paper():
    """The first numbers of splitmix64 with the state 1234567, as its authors' program prints them."""
    states = [(1234567 + step * 0x9E3779B97F4A7C15) % 2**64 for step in range(5)]
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert hashed(np.array(states, np.uint64)).tolist() == published


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_each_position_alone_gives_the_same(seed):
    """The network of the reference, in plain integers, one position at a time."""
    for count in 1, 2, 3, 23, 63, 64, 65, 100, 257:
        positions = min(3 * count, 300)
        assert shuffle(np.arange(positions), count, seed).tolist() == shuffled(seed, count, positions)


def test_steps_of_any_size_in_any_order():
    """Of some positions the rows are known in advance: fewer or more than a step has, and not those before it."""
    order, expected = Order(700, seed=3), shuffled(3, 700, 5000)
    for start, count in [(0, 10), (10, 1010), (1020, 10), (1030, 3000), (4030, 1), (1000, 40), (999, 300), (4700, 300)]:
        assert order.rows_at(start, count).tolist() == expected[start : start + count]


def test_every_epoch_has_every_row_once():
    for count in range(1, 301):
        assert (np.sort(epochs_of(count, 3), axis=1) == np.arange(count)).all(), count
    for count in 2**16 - 1, 2**16, 2**16 + 1, 10**6:
        assert (np.sort(epochs_of(count, 1)) == np.arange(count)).all(), count


@pytest.mark.parametrize("count", [10**8, 2**31 + 11, 2**33])
def test_large_data(count):
    """The rows of some steps are found at once, far into a run, in no more memory than they take."""
    tracemalloc.start()
    positions = 10**6 * count + np.linspace(0, count - 1, 50_000).astype(np.int64)  # Of epoch 1,000,000.
    rows = shuffle(positions, count, 0)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    assert len(set(rows.tolist())) == len(rows) and rows.min() >= 0 and rows.max() < count
    tenths = np.bincount(rows * 10 // count, minlength=10)
    check_even(tenths, len(rows) / 10, 9)
    assert abs(np.corrcoef(positions, rows)[0, 1]) < 4 / math.sqrt(len(rows))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_every_order_is_as_likely(count):
    orders = epochs_of(count, 100 * math.factorial(count))
    _, counts = np.unique(orders @ 10 ** np.arange(count), return_counts=True)
    assert len(counts) == math.factorial(count)
    check_even(counts, 100, len(counts) - 1)


COUNTS = [7, 8, 9, 16, 23, 63, 64, 65, 81, 100]


@pytest.mark.parametrize("count", COUNTS)
def test_rows_and_positions(count):
    """Each row comes to each position, before each other row and right after each other row, equally often."""
    many = 3000
    orders = epochs_of(count, many)
    cells = np.bincount((orders + count * np.arange(count)).flatten(), minlength=count**2)
    check_even(cells, many / count, count * (count - 1))

    successors = np.bincount((orders[:, :-1] * count + orders[:, 1:]).flatten(), minlength=count**2)
    successors = successors.reshape(count, count)[~np.eye(count, dtype=bool)]
    check_even(successors, many / count, (count - 1) ** 2)

    position_of = np.argsort(orders, axis=1)
    one, other = np.triu_indices(count, 1)
    before = (position_of[:, one] < position_of[:, other]).sum(0)
    assert abs(before - many / 2).max() < 5 * math.sqrt(many) / 2


@pytest.mark.parametrize("count", COUNTS)
def test_odd_orders_are_as_frequent_as_even_ones(count):
    """A network whose turns are all even, as on 4 x 4 places with XOR, would give half of all orders only."""
    orders = epochs_of(count, 3000)
    one, other = np.triu_indices(count, 1)
    odd = (orders[:, one] > orders[:, other]).sum(1) % 2
    check_even(np.bincount(odd), 1500, 1)


@pytest.mark.parametrize("count", [50, 1000])
def test_rows_that_stay_where_they_are(count):
    """Their number has the Poisson distribution with the mean 1, and so has that of the rows two epochs share."""
    orders = epochs_of(count, 4000)
    poisson = [math.exp(-1) / math.factorial(k) for k in range(5)]
    expected = 4000 * np.array([*poisson, 1 - sum(poisson)])
    for same in orders == np.arange(count), orders == np.roll(orders, 1, axis=0), orders == epochs_of(count, 4000, 1):
        check_even(np.bincount(same.sum(1).clip(max=5), minlength=6), expected, 5)


def test_epochs_and_seeds_have_nothing_in_common():
    """For neighbours, too: the correlations of their orders are those of chance."""
    count = 1000
    of_seeds = [shuffle(np.arange(2 * count), count, seed).reshape(2, count) for seed in range(30)]
    correlations = np.corrcoef(np.concatenate(of_seeds))[np.triu_indices(60, 1)] * math.sqrt(count)
    assert abs(correlations).max() < 5 and abs(correlations.mean()) < 0.1
    assert correlations.std() == pytest.approx(1, abs=0.1)


def test_held_out_documents():
    """data.eval_fraction holds out a random share, rounded up, and the rest stays in its order."""
    documents = datasets.Dataset.from_dict({"number": range(31)})
    rest, held_out = hold_out(documents, 0.25, 7)
    assert held_out["number"][:] == shuffled(7, 31, 8)
    assert rest["number"][:] == sorted(set(range(31)) - set(held_out["number"]))


@pytest.mark.parametrize("fraction, count, size", [(0.07, 100, 7), (0.55, 100, 55), (0.071, 100, 8), (1e-12, 10, 1)])
def test_how_many_documents_are_held_out(fraction, count, size):
    """0.07 * 100 is 7.000000000000001."""
    _, held_out = hold_out(datasets.Dataset.from_dict({"number": range(count)}), fraction, 7)
    assert len(held_out) == size
