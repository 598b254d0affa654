"""data.packing best_fit: TRL's packer decides which documents share a row, and the run is that of the documents apart.

Packing by concat is compared with independent loops in test_exact.py and test_finetune.py, isolation in test_models.py.
"""

from pathlib import Path

import numpy as np
import pytest
from helpers import difference, launch, make_rows, run, tiny_config, training_rows, write_rows

from samerun.config import Data
from samerun.data.rows import Dataset

LENGTH = 24


def packed(folder: Path, lengths: list[int]) -> tuple[Dataset, list[list[int]]]:
    """Documents of these lengths, no token twice, as they are put into rows."""
    starts = np.cumsum([0, *lengths])
    documents = [list(range(start, start + length)) for start, length in zip(starts, lengths)]
    path = str(write_rows(folder / "documents", [{"input_ids": document} for document in documents]))
    config = Data(path=path, format="tokens", packing="best_fit", sequence_length=LENGTH)
    return training_rows(config), documents


def pieces(data: Dataset, row: int) -> list[list[int]]:
    """A row, cut where positions begin anew."""
    ids, _, positions = data.read(row)
    return [piece.tolist() for piece in np.split(ids, np.flatnonzero(positions == 0)[1:])]


def test_documents_are_kept_whole(tmp_path):
    rng = np.random.default_rng(5)
    data, documents = packed(tmp_path, rng.integers(0, LENGTH + 1, 300).tolist())
    found = [piece for row in range(len(data)) for piece in pieces(data, row)]
    assert sorted(found) == sorted(document for document in documents if document)
    lengths, targets = data.sizes(np.arange(len(data)))
    assert max(lengths) <= LENGTH
    # Every document of n tokens has n - 1 targets: all but its first.
    assert targets.sum() == sum(max(0, len(document) - 1) for document in documents)


def test_the_folder_of_the_data_stays_as_it_is(tmp_path):
    """It may be read-only."""
    folder = write_rows(tmp_path / "rows", make_rows([3, 4, 5]))
    before = sorted(folder.iterdir())
    config = Data(path=str(folder), format="tokens", packing="best_fit", sequence_length=LENGTH)
    data = training_rows(config)
    assert data.tokens == 12 and sorted(folder.iterdir()) == before


def test_longer_documents_continue_in_further_rows(tmp_path):
    data, (long, short) = packed(tmp_path, [2 * LENGTH + 5, LENGTH - 5])
    rows = sorted(pieces(data, row) for row in range(len(data)))
    assert rows == sorted([[long[:LENGTH]], [long[LENGTH : 2 * LENGTH]], [short, long[2 * LENGTH :]]])


def test_rows_are_full(tmp_path):
    """From rows cut to pieces, so the optimum is known: best-fit decreasing needs at most 11/9 of it, and a few more
    (D. S. Johnson, Near-optimal bin packing algorithms, 1973: 4)."""
    rng, optimum = np.random.default_rng(6), 60
    cuts = [np.sort(rng.choice(np.arange(1, LENGTH), 3, replace=False)) for _ in range(optimum)]
    lengths = np.concatenate([np.diff([0, *cut, LENGTH]) for cut in cuts])
    data, _ = packed(tmp_path, rng.permutation(lengths).tolist())
    assert optimum <= len(data) <= 11 / 9 * optimum + 4


@pytest.mark.parametrize("processes", [None, 2])
def test_the_run_is_that_of_the_documents_apart(tmp_path, processes):
    """Each step is the whole data, once as documents padded and once as packed rows: the same targets, the same run."""
    config = tiny_config(tmp_path)
    documents = make_rows(np.random.default_rng(3).integers(2, LENGTH + 1, 23).tolist(), seed=4, masked=0.3)
    data = training_rows(
        Data(
            path=str(write_rows(tmp_path / "documents", documents)),
            format="tokens",
            packing="best_fit",
            sequence_length=LENGTH,
        )
    )
    assert len(data) < 16
    config["run"]["max_steps"] = 5
    config["data"] |= {"path": str(tmp_path / "documents"), "eval_source": None}
    apart = run(tmp_path, config, "--run.output_dir", tmp_path / "apart", "--batch.global_batch_size", len(documents))
    config["data"]["packing"] = "best_fit"
    config["batch"] = {"global_batch_size": len(data), "max_micro_batch_size": 4}
    joint = launch(tmp_path, config, processes=processes, warm=True) if processes else run(tmp_path, config)
    assert joint.losses == pytest.approx(apart.losses, rel=1e-6)
    assert difference(joint.weights, apart.weights) < 1e-5
    assert joint.logged("perf/tokens_per_second")[-1]
