"""Tokens that other programs have written are mapped as they are: the rows are those of the same tokens as lists."""

import json
import math
import os
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
from helpers import rows_by_use, run, tiny_config, training_rows
from test_data import byte_tokenizer
from test_finetune import END
from tokenizers import Tokenizer, models, pre_tokenizers

from samerun.config import Data, Model, Source
from samerun.data import token_files
from samerun.data.load import load_data
from samerun.data.rows import Dataset
from samerun.errors import UserError
from samerun.model.tokenizer import load_tokenizer

LENGTH = 8
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def documents_of(seed: int, end: int | None = None) -> list[list[int]]:
    """Documents, empty ones among them; with `end`, each ends in that token and has it nowhere else."""
    rng = np.random.default_rng(seed)
    lengths = [1, LENGTH, 3 * LENGTH, 2 * LENGTH + 1, *rng.integers(1, 2 * LENGTH, 60)]
    found = [rng.integers(1, 120, length).tolist() for length in lengths]
    return [[*ids[:-1], end] for ids in found] if end is not None else [[], *found[:9], [], [], *found[9:], []]


def write_megatron(path: Path, documents: list[list[int]], kind: str = "uint16", sentences: bool = False) -> None:
    """As megatron/core/datasets/indexed_dataset.py lays it out. With sentences, a document is of several sequences."""
    sequences, document_indices = [], [0]
    for document in documents:
        cut = len(document) // 3 if sentences else 0
        sequences += [document[:cut], document[cut:]] if sentences else [document]
        document_indices.append(len(sequences))
    path.with_suffix(".bin").write_bytes(b"".join(np.array(part, kind).tobytes() for part in sequences))
    index, pointer, size = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[kind]), 0, np.dtype(kind).itemsize
    index += struct.pack("<QQ", len(sequences), len(document_indices))
    index += b"".join(struct.pack("<i", len(part)) for part in sequences)
    for part in sequences:
        index += struct.pack("<q", pointer)
        pointer += len(part) * size
    index += b"".join(struct.pack("<q", number) for number in document_indices)
    path.with_suffix(".idx").write_bytes(index)


def write_arrow(path: Path, documents: list[list[int]]) -> None:
    pq.write_table(pa.table({"input_ids": pa.array(documents, pa.list_(pa.int64()))}), path)


def read_all(data: Dataset) -> list:
    return [data.read(row).tolist() for row in range(len(data))]


def rows_of(folder: Path, files: str, tokenizer=None, **settings) -> dict[str, list]:
    """All rows to train on, and all that are held out."""
    config = Data(files=str(folder / files), format="tokens", sequence_length=LENGTH, **settings)
    return {use: read_all(part) for use, part in rows_by_use(config, tokenizer, seed=3).items()}


@pytest.mark.parametrize("eval_fraction", [0.0, 0.2])
@pytest.mark.parametrize("packing", ["none", "concat", "best_fit"])
@pytest.mark.parametrize("kind, sentences", [("uint16", False), ("int32", True), ("uint8", False)])
def test_megatron(tmp_path, packing, eval_fraction, kind, sentences):
    """Two files, and a folder that has them with their .idx."""
    parts = documents_of(1), documents_of(2)
    (tmp_path / "tokens").mkdir()
    for name, documents in zip("ab", parts):
        write_megatron(tmp_path / "tokens" / name, documents, kind, sentences)
    write_arrow(tmp_path / "same.parquet", sum(parts, []))
    settings = {"packing": packing, "eval_fraction": eval_fraction}
    expected = rows_of(tmp_path, "same.parquet", **settings)
    assert rows_of(tmp_path, "tokens", **settings) == rows_of(tmp_path, "tokens/*.bin", **settings) == expected


@pytest.mark.parametrize("count, fraction", [(10, 0.05), (4, 0.25), (2, 0.5)])
@pytest.mark.parametrize("packing", ["none", "concat"])
def test_held_out_neighbours_are_the_ones_left_out(tmp_path, packing, count, fraction):
    """Where a single document is held out, or all at one end, datasets cuts the others out of its table."""
    for number in range(count):
        np.save(tmp_path / f"{number}.npy", np.full(5, number + 1, np.uint16))
    for seed in range(6):
        config = Data(files=str(tmp_path / "*.npy"), format="tokens", sequence_length=5, packing=packing)
        config = config.model_copy(update={"eval_fraction": fraction})
        data, held_out = load_data(config, None, seed=seed)
        trained, evaluated = ({row[0][0] for row in read_all(part)} for part in (data, held_out[""]))
        assert len(evaluated) == math.ceil(fraction * count) and trained | evaluated == set(range(1, count + 1))
        assert not trained & evaluated


@pytest.mark.parametrize("shape, cut", [((100,), -100), ((100,), 50), ((20, 20), -100)])
def test_a_npy_that_is_not_as_long_as_it_says(tmp_path, shape, cut):
    np.save(tmp_path / "a.npy", np.ones(shape, np.uint16))
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content[:cut] if cut < 0 else content + bytes(cut))
    told, has = math.prod(shape), math.prod(shape) + cut // 2
    with pytest.raises(UserError, match=f"a.npy: .*its header says {told} tokens, and it has {has}"):
        rows_of(tmp_path, "a.npy")


@pytest.mark.parametrize(
    "kind, name", [("uint16", "a.npy"), ("uint32", "a.npy"), ("uint16", "a.bin"), ("uint32", "a.bin")]
)
@pytest.mark.parametrize("packing", ["none", "concat"])
def test_flat_files(tmp_path, packing, kind, name):
    """A document ends with the end of a text that data.tokenizer has. Without one, a file is a document."""
    documents = documents_of(1, END)
    flat = np.array(sum(documents, []), kind)
    if name == "a.npy":
        np.save(tmp_path / name, flat)
    else:
        flat.tofile(tmp_path / name)
    config = Data(files="a", format="tokens", tokenizer=byte_tokenizer(tmp_path / "tokenizer", None))
    tokenizer = load_tokenizer(config, Model())
    assert tokenizer.eos_token_id == END
    settings = {"packing": packing, "token_dtype": kind}
    for same, reader in (documents, tokenizer), ([flat.tolist()], None):
        write_arrow(tmp_path / "same.parquet", same)
        assert rows_of(tmp_path, name, reader, **settings) == rows_of(tmp_path, "same.parquet", reader, **settings)


def test_lines_of_an_array_are_documents(tmp_path):
    lines = np.arange(60, dtype=np.uint16).reshape(12, 5)
    np.save(tmp_path / "a.npy", lines)
    [rows] = rows_of(tmp_path, "a.npy", packing="none").values()
    assert sorted(row[0] for row in rows) == lines.tolist()


def test_each_of_many_documents_is_compared(tmp_path):
    """10,000 at a time: the last one of these, and the last one of all."""
    lines = np.arange(24_002, dtype=np.uint16).reshape(-1, 2)
    np.save(tmp_path / "train.npy", lines)
    np.save(tmp_path / "eval.npy", lines[[9999, 12_000]])
    config = Data(files=str(tmp_path / "train.npy"), format="tokens", sequence_length=1000)
    evaluated = config.model_copy(update={"eval_source": Source(files=str(tmp_path / "eval.npy"))})
    _, held_out = load_data(evaluated, None, seed=0)
    assert held_out[""].index["notes"][-1] == "2 of 2 documents are also trained on."
    data, held_out = load_data(config.model_copy(update={"eval_fraction": 0.1}), None, seed=0)
    assert (data.tokens, held_out[""].tokens) == (2 * 10_800, 2 * 1201)  # A tenth of 12,001, rounded up.


def test_documents_that_begin_alike_are_not_the_same(tmp_path):
    for name, last in ("train", 7), ("eval", 8):
        np.save(tmp_path / f"{name}.npy", np.array([*range(1000), last], np.uint16))
    evaluated = {"files": str(tmp_path / "eval.npy")}
    config = Data(files=str(tmp_path / "train.npy"), format="tokens", sequence_length=1024, eval_source=evaluated)
    notes = load_data(config, None, seed=0)[1][""].index["notes"]
    assert notes and not any("trained on" in note for note in notes)


@pytest.mark.parametrize("documents", [1, 10])
def test_large_files_take_little_memory(tmp_path, documents):
    """Also where they are compared with an evaluation, and where a file is a single document."""
    tokens = np.arange(10**7, dtype=np.uint16).reshape(documents, -1)
    for name in "train", "eval":
        np.save(tmp_path / f"{name}.npy", tokens)
    evaluated = {"files": str(tmp_path / "eval.npy")}
    config = Data(files=str(tmp_path / "train.npy"), format="tokens", sequence_length=1024, eval_source=evaluated)
    tracemalloc.start()
    data, held_out = load_data(config, None, seed=0)
    assert tracemalloc.get_traced_memory()[1] < tokens.nbytes
    tracemalloc.stop()
    assert held_out[""].index["notes"][-1] == f"{documents} of {documents} documents are also trained on."
    assert data.index["checksum_of_ids"] == zlib.crc32(tokens.astype(np.int32))


class CountingName(str):
    """Counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        CountingName.compared += 1
        return str.__eq__(self, other)


def test_many_files(monkeypatch):
    """They are not compared with each other."""
    names = [CountingName(f"{number}.npy") for number in range(1000)]
    monkeypatch.setattr(token_files, "list_files", lambda patterns: names)
    assert token_files.names_of_token_files(Data(files="*.npy", format="tokens")) == names
    assert CountingName.compared <= 2 * len(names)


def test_nothing_is_copied(tmp_path):
    """Not even where documents between others are held out."""
    write_megatron(tmp_path / "a", documents_of(1))
    config = Data(files=str(tmp_path / "a.bin"), format="tokens", sequence_length=LENGTH, eval_fraction=0.2)
    data = training_rows(config, seed=3)
    assert [file for file, _ in data.index["token_files"]] == [str(tmp_path / "a.bin")]
    assert not list(data.folder.glob("*.arrow"))


def test_one_index_from_wherever_a_file_is_named(tmp_path, monkeypatch, capsys):
    """A path from the working folder is another one for the next launch, and its data are the same."""
    (tmp_path / "other").mkdir()
    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=np.uint16))
    read = []
    for folder, name in (".", "tokens.npy"), ("other", "../tokens.npy"), ("other", str(tmp_path / "tokens.npy")):
        monkeypatch.chdir(tmp_path / folder)
        data = training_rows(Data(files=name, format="tokens", sequence_length=LENGTH))
        read.append([data.folder, data.index["token_files"], read_all(data)])
    assert read[0] == read[1] == read[2] and "made anew" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "size, types",
    [
        (256, ["uint8", "int16"]),
        (32_768, ["uint16", "int16"]),
        (32_769, ["uint16", "int32"]),
        (65_537, ["uint32", "int32"]),
    ],
)
def test_our_own_tokens_take_the_smallest_type(tmp_path, size, types):
    """As int64, a token would take 8 bytes, and its label as many."""
    words = Tokenizer(models.WordLevel({str(number): number for number in range(size)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    row = {"prompt": "1 ", "completion": f"2 {size - 1}"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = Data(files=str(tmp_path / "rows.jsonl"), sequence_length=LENGTH)
    data = training_rows(config, transformers.PreTrainedTokenizerFast(tokenizer_object=words))
    assert data.index["types"] == types
    assert read_all(data) == [[[1, 2, size - 1], [2, size - 1, -100], [0, 1, 2]]]


def test_other_tokens_in_the_same_place(tmp_path):
    for seed in 1, 2:
        write_megatron(tmp_path / "a", documents_of(seed))
        write_arrow(tmp_path / f"{seed}.parquet", documents_of(seed))
        assert rows_of(tmp_path, "a.bin") == rows_of(tmp_path, f"{seed}.parquet")


def test_other_documents_of_the_same_tokens(tmp_path):
    """Only the .idx is another one."""
    documents = [[5, 6], [7, 8, 9]]
    for some in documents, [sum(documents, [])]:
        write_megatron(tmp_path / "a", some)
        os.utime(tmp_path / "a.bin", ns=(0, 0))
        write_arrow(tmp_path / f"{len(some)}.parquet", some)
        assert rows_of(tmp_path, "a.bin") == rows_of(tmp_path, f"{len(some)}.parquet")


def llm_c_header() -> bytes:
    """As its data/data_common.py has it."""
    return np.array([20240520, 1, 3, *[0] * 253], "<i4").tobytes() + np.array([50256, 1, 2], "<u2").tobytes()


def spoil(path: Path, offset: int, value: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:offset] + value + old[offset + len(value) :])


@pytest.mark.parametrize(
    "harm, told",
    [
        (lambda folder: spoil(folder / "a.idx", 0, b"X"), "is no .idx of Megatron"),
        (lambda folder: spoil(folder / "a.idx", 9, b"\x02"), "is no .idx of Megatron"),
        (lambda folder: spoil(folder / "a.idx", 17, bytes([7])), "the tokens are no integers"),
        (lambda folder: spoil(folder / "a.idx", 17, bytes([4])), "do not lie one after the other"),
        (lambda folder: spoil(folder / "a.idx", 34, b"\x99"), "do not lie one after the other"),
        (lambda folder: (folder / "a.idx").write_bytes((folder / "a.idx").read_bytes()[:-3]), "smaller than requested"),
        (lambda folder: (folder / "a.bin").write_bytes((folder / "a.bin").read_bytes()[:-2]), "is of 64 tokens"),
        (lambda folder: (folder / "a.idx").unlink(), "give data.token_dtype: uint16 or uint32"),
        (lambda folder: np.save(folder / "b.npy", np.zeros(9, np.float32)), "array of <f4 with 1 axes"),
        (lambda folder: np.save(folder / "b.npy", np.zeros(9, ">u2")), "array of >u2 with 1 axes"),
        (lambda folder: np.save(folder / "b.npy", np.zeros(9, np.uint32)), "b.npy has uint32; give files of the same"),
        (lambda folder: (folder / "b.bin").write_bytes(llm_c_header()), "b.bin: .* header of llm.c; cut it"),
        (lambda folder: (folder / "b.txt").write_text("a"), "a.bin and .*b.txt do not mix"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, harm, told):
    write_megatron(tmp_path / "a", [list(range(40)), list(range(24))])
    harm(tmp_path)
    with pytest.raises(UserError, match=told):
        rows_of(tmp_path, "", packing="concat")


def test_uint32_is_not_read_as_uint16(tmp_path):
    np.arange(1000, dtype=np.uint32).tofile(tmp_path / "a.bin")
    assert rows_of(tmp_path, "a.bin", packing="concat", token_dtype="uint32")
    with pytest.raises(UserError, match="a.bin: each second token is almost 0: give data.token_dtype: uint32"):
        rows_of(tmp_path, "a.bin", packing="concat", token_dtype="uint16")


def test_a_run(tmp_path):
    """Through train.py, with the losses of the same tokens as lists."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 3}
    config["optim"]["warmup_steps"] = 0
    documents = documents_of(5)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in documents))
    write_megatron(tmp_path / "rows", documents)
    losses = []
    for name in "rows.jsonl", "rows.bin":
        given = ["--data.path", "null", "--data.files", tmp_path / name, "--run.output_dir", tmp_path / f"run-{name}"]
        given += ["--data.eval_source", "null", "--data.eval_fraction", 0.1]
        losses.append(run(tmp_path, config, *given).losses)
    assert losses[0] == losses[1] and len(losses[0]) == 3
