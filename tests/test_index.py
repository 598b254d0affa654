"""The index of the rows lies on disk. It is made once, and anew as soon as the data or a setting is another one.

Its rows are compared with what plain loops over lists make of the documents. What a start on much data costs is in
benchmarks/big_data.py.
"""

import errno
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import transformers
from helpers import ROOT, launch, make_rows, rows_by_use, run, tiny_config, training_rows, write_rows
from reference import shuffled

from samerun import files
from samerun.config import Data, Model
from samerun.data import index as index_room
from samerun.data.load import load_data
from samerun.data.rows import Dataset
from samerun.errors import UserError
from samerun.model.tokenizer import load_tokenizer

LENGTH = 8


def rows_of(documents: list[dict], packing: str) -> list[list[tuple]]:
    """Each row as (id, target, position) of its tokens, from the documentation: a target is the next token's label."""
    tokens = []
    for document in documents:
        ids, labels = document["input_ids"], document.get("labels", document["input_ids"])
        for at, (token, label) in enumerate(zip(ids, labels)):
            tokens.append((token, label, at == 0))
    rows = [tokens[at : at + LENGTH] for at in range(0, len(tokens), LENGTH)]
    if packing == "none":
        rows, at = [], 0
        for document in documents:
            end = at + len(document["input_ids"])
            rows += [tokens[begin : min(begin + LENGTH, end)] for begin in range(at, end, LENGTH)]
            at = end
    made = []
    for row in rows:
        made.append([])
        for at, (token, _, is_first) in enumerate(row):
            has_next = at + 1 < len(row) and not row[at + 1][2]
            position = 0 if at == 0 or is_first else made[-1][-1][2] + 1
            made[-1].append((token, row[at + 1][1] if has_next else -100, position))
    return made


def save(folder: Path, documents: list[dict], batch: int = 5, shards: int = 3) -> Path:
    """A folder of save_to_disk, in several files of small batches: chunks then end inside of rows."""
    kind = datasets.List(datasets.Value("int32"))
    whole = datasets.Dataset.from_list(documents, features=datasets.Features({name: kind for name in documents[0]}))
    whole.save_to_disk(folder, num_shards=shards)
    for file in folder.glob("*.arrow"):
        table = pa.ipc.open_stream(file.read_bytes()).read_all()
        with pa.ipc.new_stream(str(file), table.schema) as writer:
            writer.write_table(table.combine_chunks(), max_chunksize=batch)
    return folder


def config_of(folder: Path, **settings) -> Data:
    return Data(path=str(folder), format="tokens", sequence_length=LENGTH, **({"packing": "none"} | settings))


def read_all(data: Dataset) -> list[list[tuple]]:
    return [list(zip(*data.read(row).tolist())) for row in range(len(data))]


def documents_of(seed: int, masked: float = 0.0) -> list[dict]:
    rng = np.random.default_rng(seed)
    lengths = [0, 0, 0, 0, 0, 0, 1, LENGTH, 3 * LENGTH, 2 * LENGTH + 1, *rng.integers(0, 2 * LENGTH, 80), 0]
    rows = make_rows(lengths, seed=seed, masked=masked)
    return [{"input_ids": [], "labels": []} if masked and not row["input_ids"] else row for row in rows]


@pytest.mark.parametrize("masked", [0.0, 0.4], ids=["all", "labels"])
@pytest.mark.parametrize("packing", ["none", "concat"])
def test_rows(tmp_path, packing, masked):
    """Tokens, targets, positions, sizes and the checksum that checkpoints hold; of the first start and of the next."""
    documents = documents_of(1, masked)
    config, expected = config_of(save(tmp_path / "documents", documents), packing=packing), rows_of(documents, packing)
    ids = [token for row in expected for token, _, _ in row]
    targets = [-100] + [target for row in expected for _, target, _ in row][:-1]  # Of each token, as the next one's.
    sums = [zlib.crc32(np.array(ids, np.int32)), zlib.crc32(np.array(targets, np.int32)) if masked else 0]
    checksum = zlib.crc32(np.array(sums), zlib.crc32(np.array(shuffled(0, len(expected), 100))))
    checksum = zlib.crc32(np.array([len(row) for row in expected], np.int32), checksum)
    positions = [position for row in expected for _, _, position in row]
    pieces = np.diff([at for at, position in enumerate(positions) if position == 0] + [len(positions)])
    for _ in range(2):
        data = training_rows(config, seed=3)
        assert read_all(data) == expected
        lengths, targets = data.sizes(np.arange(len(data)))
        assert lengths.tolist() == [len(row) for row in expected] and data.tokens == sum(lengths)
        assert targets.tolist() == [sum(target != -100 for _, target, _ in row) for row in expected]
        assert data.attention_length() == pytest.approx(sum(size * size for size in pieces) / sum(pieces))
        assert data.fingerprint() == checksum


@pytest.mark.parametrize("packing", ["none", "concat", "best_fit"])
def test_a_split_named_twice(tmp_path, packing):
    """Its files are there twice, and so is every token. The folder of the data stays as it is: it may be read-only."""
    for split, number in ("train", 3), ("test", 5):
        rows = "".join(json.dumps({"input_ids": [number] * length}) + "\n" for length in (2, 7, 4))
        (tmp_path / f"{split}.jsonl").write_text(rows)
    before = sorted(tmp_path.iterdir())
    data = training_rows(config_of(tmp_path, split="test+train+test", packing=packing))
    found = sorted(token for row in read_all(data) for token, _, _ in row)
    assert found == [3] * 13 + [5] * 26 and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("settings, first", [({"drop_nulls": True}, 0), ({"split": "train[2:]"}, 2)])
def test_documents_that_are_some_of_the_rows_of_their_file(tmp_path, settings, first):
    rows = [[5, 6], None, [7, 8, 9], [10, 11]]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    data = training_rows(config_of(tmp_path, packing="none", **settings))
    assert [data.read(row)[0].tolist() for row in range(len(data))] == [row for row in rows[first:] if row]


@pytest.fixture
def sources(tmp_path):
    """Data of each kind: a saved data set, the same with a held-out share, files of texts, and a part of a file."""
    texts = "".join(json.dumps({"text": "a" * length, "id": length}) + "\n" for length in range(1, 40))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text(texts)
    save(tmp_path / "saved", documents_of(1))
    rows = "".join(json.dumps({"input_ids": [number, number + 1]}) + "\n" for number in range(20))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.jsonl").write_text(rows)
    return {
        "saved": config_of(tmp_path / "saved"),
        "held out": config_of(tmp_path / "saved", eval_fraction=0.2),
        "texts": Data(files=str(tmp_path / "texts"), sequence_length=LENGTH),
        "packed": Data(files=str(tmp_path / "texts"), sequence_length=LENGTH, packing="best_fit"),
        "part": config_of(tmp_path / "files", split="train[5:9]"),
    }


@pytest.mark.parametrize("kind", ["saved", "held out", "texts", "packed", "part"])
def test_a_second_start_opens_no_data(sources, monkeypatch, capsys, kind):
    tokenizer = transformers.ByT5Tokenizer()
    first = list(rows_by_use(sources[kind], tokenizer).values())
    told = capsys.readouterr().out
    if kind == "part":
        assert sorted(row[0][0] for row in read_all(first[0])) == [5, 6, 7, 8]

    def fail(*args, **more):
        raise AssertionError("the data is opened")

    monkeypatch.setattr(datasets.Dataset, "__init__", fail)
    second = list(rows_by_use(sources[kind], tokenizer).values())
    for before, now in zip(first, second, strict=True):
        assert read_all(now) == read_all(before) and now.fingerprint() == before.fingerprint()
        for numbers in now.edges, now.extents:  # They are of mapped files, and not copied.
            while isinstance(numbers, np.ndarray):
                numbers = numbers.base
            assert isinstance(numbers, pa.Buffer)
        assert all(isinstance(file.base, pa.Buffer) for file in now.files)
    assert capsys.readouterr().out == re.sub("Tokenizing .*\n", "", told)
    assert ("not read: id" in told) == (kind in ("texts", "packed"))


@pytest.mark.parametrize("harm", ["no index.json", "cut short", "half written", "a file is gone"])
def test_a_damaged_index_is_made_anew(tmp_path, harm):
    documents = documents_of(2, masked=0.3)
    config = config_of(save(tmp_path / "documents", documents), packing="concat")
    data = training_rows(config)
    folder = data.folder
    if harm == "no index.json":  # As if the machine had stopped before the end.
        (folder / "index.json").unlink()
        (folder / "edges.bin").write_bytes(b"1234567890")
    elif harm == "cut short":
        (folder / "targets.bin").write_bytes((folder / "targets.bin").read_bytes()[:-8])
    elif harm == "half written":
        (folder / "index.json").write_text((folder / "index.json").read_text()[:-30])
    else:
        (folder / "first.bin").unlink()
    data = training_rows(config)
    assert read_all(data) == rows_of(documents, "concat") and data.folder == folder


def test_other_data_in_the_same_place(tmp_path):
    """Saved anew, or another file under the old name, with the old state.json."""
    folder = tmp_path / "documents"
    for seed in 1, 2:
        documents = documents_of(seed)
        shutil.rmtree(folder, ignore_errors=True)
        data = training_rows(config_of(save(folder, documents)))
        assert read_all(data) == rows_of(documents, "none")
    for file in folder.glob("*.arrow"):
        file.write_bytes(file.read_bytes())  # The same tokens, written at another time: another index of the same rows.
    other = training_rows(config_of(folder))
    assert other.folder != data.folder and other.fingerprint() == data.fingerprint()


def test_each_token_and_target_counts(tmp_path):
    """In what tells the rows from others."""
    documents = [{"input_ids": [5] * 6, "labels": [-100, *[5] * 5]} for _ in range(300)]
    known = set()
    for number, change in enumerate([None, ("input_ids", 4, 6), ("labels", 4, -100), ("labels", 0, 5)]):
        for at in (0, 137, 299) if change else (0,):
            rows = [{name: list(values) for name, values in row.items()} for row in documents]
            if change:
                column, place, value = change
                rows[at][column][place] = value
            data = training_rows(config_of(save(tmp_path / f"{number}-{at}", rows)))
            known.add(data.fingerprint())
    assert len(known) == 1 + 3 + 3  # The label of a first token is no target.


def test_labels_that_are_shifted_already(tmp_path):
    """They look like others, and would train each token to be followed by the one after the next."""
    for shift, is_told in (0, False), (1, True):
        rows = [{"input_ids": [10, 11, 12, 13], "labels": [*[10, 11, 12, 13][shift:], *[-100] * shift]}] * 3
        data = training_rows(config_of(save(tmp_path / f"{shift}", rows)))
        told = [note for note in data.index["notes"] if note.startswith("labels that are another token ")]
        assert bool(told) == is_told and all("their place: 6; " in note for note in told)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_an_index_on_a_full_disk():
    """numpy's tofile() would go on."""
    with pytest.raises(OSError) as raised, open("/dev/full", "wb") as file:
        index_room.IndexWriter({"edges": file}, "none", 8, ["input_ids"]).append("edges", np.arange(9))
    assert raised.value.errno == errno.ENOSPC


def test_a_file_in_place_of_an_index(tmp_path):
    config = config_of(save(tmp_path / "documents", documents_of(1)))
    data = training_rows(config)
    shutil.rmtree(data.folder)
    data.folder.write_text("mine")
    assert len(training_rows(config)) == len(data)


def test_tokens_that_are_gone_from_the_cache_are_made_again(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 10)
    config, tokenizer = Data(files=str(tmp_path / "a.txt"), sequence_length=LENGTH), transformers.ByT5Tokenizer()
    before = training_rows(config, tokenizer)
    for file, _ in before.index["token_files"]:
        Path(file).unlink()
    now = training_rows(config, tokenizer)
    assert read_all(now) == read_all(before)


def test_each_setting_has_an_index_of_its_own(tmp_path):
    tokenizer, texts = transformers.ByT5Tokenizer(), tmp_path / "a.jsonl"
    rows = [{"text": f"some words {n}", "other": f"more words than that {n}"} for n in range(9)]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {"files": str(texts), "sequence_length": LENGTH}
    more = [{"sequence_length": 5}, {"column": "other"}, {"eval_fraction": 0.3}]
    more += [{"drop_nulls": True}, {"parse_special_tokens": True}]
    longer = transformers.ByT5Tokenizer()
    longer.add_tokens(["words"])
    loaded = [rows_by_use(Data(**(base | change)), tokenizer) for change in [{}, *more]]
    loaded += [rows_by_use(Data(**base), longer), rows_by_use(Data(**base, packing="none"), tokenizer)]
    loaded += [rows_by_use(Data(**(base | {"eval_fraction": 0.3})), tokenizer, seed=1)]
    folders = [part.folder for one in loaded for part in one.values()]
    assert len(set(folders)) == len(folders) == 11


@pytest.mark.parametrize("kind", ["save_to_disk", "files"])
def test_each_split_has_an_index_of_its_own(tmp_path, kind):
    splits = {"train": [3] * 4, "test": [4] * 4}
    if kind == "files":
        for split, row in splits.items():
            (tmp_path / f"{split}.jsonl").write_text(json.dumps({"input_ids": row}))
    else:
        saved = {split: datasets.Dataset.from_dict({"input_ids": [row]}) for split, row in splits.items()}
        datasets.DatasetDict(saved).save_to_disk(tmp_path)
    for split, row in splits.items():
        data = training_rows(config_of(tmp_path, split=split))
        assert data.read(0)[0].tolist() == row


def test_each_setting_of_chats_and_of_tokens_has_an_index_of_its_own(tmp_path):
    pairs, tokens = tmp_path / "pairs.jsonl", tmp_path / "tokens.bin"
    pairs.write_text(json.dumps({"prompt": "a", "completion": "b"}))
    tokens.write_bytes(bytes(range(1, 9)))
    of_pairs = {
        "files": str(pairs),
        "tokenizer": "bytes",
        "chat_template": str(ROOT / "configs" / "chat_template.jinja"),
    }
    of_tokens = {"files": str(tokens), "format": "tokens", "sequence_length": LENGTH}
    changes = [{"format": "text"}, {"format": "chat"}, {"format": "chat", "train_on": "last"}]
    configs = [Data(**of_pairs, sequence_length=LENGTH, **change) for change in changes]
    tokenizer = load_tokenizer(configs[1], Model())
    configs += [Data(**of_tokens, token_dtype=dtype) for dtype in ("uint16", "uint32")]
    folders = [training_rows(config, tokenizer).folder for config in configs]
    assert len(set(folders)) == 5


def indexes_of(folder: Path) -> dict[Path, int]:
    """When the indexes of what lies in this folder were completed."""
    found = Path(datasets.config.HF_DATASETS_CACHE).glob("train-index/*/index.json")
    return {file: file.stat().st_mtime_ns for file in found if str(folder) in file.read_text()}


def replace(file: Path, content: bytes) -> None:
    """Other content of the same size and, as archives and reproducible images have it, of the same time."""
    before = file.stat()
    assert before.st_size == len(content)
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("kind", ["a file", "a large file", "a folder", "an archive", "save_to_disk"])
def test_other_content_of_the_same_size_and_time(tmp_path, kind):
    """Is other data, whatever datasets keeps of it by name and time."""
    data, size = tmp_path / "data", 300_000 if kind == "a large file" else 20
    words = [f'{{"text": "{letter * size}"}}\n'.encode() for letter in "ab"]
    if kind == "save_to_disk":
        write_rows(data, [{"input_ids": [3] * 20}])
        [file] = data.glob("*.arrow")
        write_rows(tmp_path / "other", [{"input_ids": [4] * 20}])
        words = [path.read_bytes() for path in (file, next((tmp_path / "other").glob("*.arrow")))]
        config = config_of(data)
    else:
        data.mkdir()
        file = data / ("a.jsonl.gz" if kind == "an archive" else "a.jsonl")
        words = [gzip.compress(text, mtime=0) for text in words] if kind == "an archive" else words
        source = {"path": str(data)} if kind == "a folder" else {"files": str(file)}
        config = Data(**source, sequence_length=LENGTH)
    seen = []
    file.write_bytes(words[0])
    for _ in range(2):
        rows = training_rows(config, None if kind == "save_to_disk" else transformers.ByT5Tokenizer())
        seen.append(int(rows.read(0)[0, 0]))
        replace(file, words[1])
    assert seen == ([3, 4] if kind == "save_to_disk" else [3 + ord("a"), 3 + ord("b")])


@pytest.mark.parametrize("format", ["text", "tokens"])
@pytest.mark.parametrize("what", ["train-index/*/edges.bin", "train-index/*/index.json", "the tokens", "all"])
def test_zeros_after_a_power_loss(tmp_path, monkeypatch, capsys, format, what):
    """Of the right size and time, as a disk may leave a file whose content it has not written yet. Found at the start,
    told, and made anew."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    documents = {"text": {"text": "some words and more of them"}, "tokens": {"input_ids": list(range(3, 60))}}[format]
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(documents)}\n" * 200)
    config = Data(files=str(tmp_path / "a.jsonl"), format=format, tokenizer="bytes", sequence_length=LENGTH)
    tokenizer = transformers.ByT5Tokenizer() if format == "text" else None
    before = read_all(training_rows(config, tokenizer))
    kept = "train-tokens" if format == "text" else "train-documents"
    patterns = {"the tokens": [f"{kept}/**/*.arrow"], "all": ["**/*.arrow", "**/*.bin", "**/*.json"]}.get(what, [what])
    damaged = [file for pattern in patterns for file in (tmp_path / "cache").glob(pattern)]
    assert damaged
    for file in damaged:
        replace(file, bytes(file.stat().st_size))
    capsys.readouterr()
    assert read_all(training_rows(config, tokenizer)) == before
    said = capsys.readouterr().out
    assert "made anew" in said and str(tmp_path / "cache") in said
    assert "dataset_info.json" not in said  # The folder that it is in is told.
    assert read_all(training_rows(config, tokenizer)) == before and not capsys.readouterr().out


def test_documents_that_are_not_noted_as_complete_are_made_anew(tmp_path, monkeypatch):
    """As after a power loss right after they were written."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7]}))
    config = Data(files=str(tmp_path / "a.jsonl"), format="tokens", sequence_length=LENGTH)
    before = read_all(training_rows(config))
    for note in [*(tmp_path / "cache").rglob("train-complete.json"), *(tmp_path / "cache").rglob("index.json")]:
        note.unlink()
    for file in (tmp_path / "cache").rglob("*.arrow"):
        replace(file, bytes(file.stat().st_size))
    assert read_all(training_rows(config)) == before


def test_zeros_in_the_middle_of_large_tokens(tmp_path, monkeypatch):
    """Of a large file, a start reads some parts. For its new time, the index is made anew, and all of it is read."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'text': 'some words and more' * 20})}\n" * 1000)
    config, tokenizer = Data(files=str(tmp_path / "a.jsonl"), sequence_length=512), transformers.ByT5Tokenizer()
    before = read_all(training_rows(config, tokenizer))
    tokens = min((tmp_path / "cache").glob("train-tokens/**/*.arrow"))
    middle = (tokens.stat().st_size - files.SAMPLE) * 3 // 7 + files.SAMPLE
    content = tokens.read_bytes()
    tokens.write_bytes(content[:middle] + bytes(files.SAMPLE) + content[middle + files.SAMPLE :])
    assert content != tokens.read_bytes()
    assert read_all(training_rows(config, tokenizer)) == before


def test_what_is_noted_as_complete_is_on_the_disk(tmp_path, monkeypatch):
    """Each file is synced before the note that says that it is whole, and that before it has its name."""
    events, sync, replace = [], files.sync, os.replace
    monkeypatch.setattr(files, "sync", lambda path: events.append(Path(path).name) or sync(path))
    monkeypatch.setattr(index_room, "sync", lambda path: events.append(Path(path).name) or sync(path))
    monkeypatch.setattr(
        os, "replace", lambda old, new: events.append((Path(old).name, Path(new).name)) or replace(old, new)
    )
    texts = tmp_path / "a.txt"
    texts.write_text("some words")
    config = Data(files=str(texts), sequence_length=LENGTH, packing="best_fit")
    load_data(config, transformers.ByT5Tokenizer(), seed=0)
    order = ["1-of-1.arrow", ".1-of-1.json.tmp", (".1-of-1.json.tmp", "1-of-1.json"), "edges.bin", "extents.bin"]
    order += ["packed.arrow", ".index.json.tmp", (".index.json.tmp", "index.json")]
    assert all(one in events for one in order)
    assert [events.index(one) for one in order[:4]] == sorted(events.index(one) for one in order[:4])
    assert max(map(events.index, order[:-2])) < events.index(order[-2]) < events.index(order[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_rows_keep_no_file_open(tmp_path):
    """There may be more sources than files that a process may open."""
    folder = save(tmp_path / "documents", documents_of(1))
    load_data(config_of(folder), None, seed=0)
    before = len(os.listdir("/proc/self/fd"))
    rows = training_rows(config_of(folder))
    assert len(os.listdir("/proc/self/fd")) == before and len(rows.read(0))


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EFBIG, None])  # EFBIG: by `ulimit -f`, or a FAT disk.
def test_a_cache_disk_that_is_full(tmp_path, monkeypatch, full):
    """Is what the message is about, and not the documents. So is a machine without a place for temporary files."""

    def fails(*args):
        if full:
            raise OSError(full, os.strerror(full))
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr("samerun.data.tokenize.tokenize_part", fails)
    config = tiny_config(tmp_path)
    (tmp_path / "a.txt").write_text("some words")
    config["data"] = {"files": str(tmp_path / "a.txt"), "tokenizer": "bytes", "sequence_length": 4}
    done = run(tmp_path, config, expect=1)
    cache = f"{os.strerror(full or 0)}: '{datasets.config.HF_DATASETS_CACHE}'; make room there"
    place = "No usable temporary directory found in ['/tmp', '/var/tmp']; set TMPDIR to a folder that can be written"
    assert (cache if full else place) in done.output and "cannot use" not in done.output


# Root may write anywhere, unless it gives that up (CAP_DAC_OVERRIDE) before it begins.
WITHOUT_OVERRIDE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are those of Linux")
def test_a_prepared_cache_on_a_read_only_disk(tmp_path, monkeypatch):
    """Is enough for a launch; one with other rows says what is missing. Here the data are in a folder and in a file,
    and some of them are held out."""
    config, cache = tiny_config(tmp_path), tmp_path / "cache"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text("".join(f'{{"text": "word {number}"}}\n' for number in range(50)))
    sources = {
        "a": {"path": str(tmp_path / "texts"), "weight": 1},
        "b": {"files": str(tmp_path / "texts" / "a.jsonl"), "weight": 1},
    }
    config["data"] = {"sources": sources, "sequence_length": 8, "tokenizer": "bytes", "eval_fraction": 0.2}
    config["run"]["max_steps"], config["optim"]["warmup_steps"] = 2, 0
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    run(tmp_path, config, "--prepare")
    before = sorted(cache.rglob("*"))
    for path in [cache, *before]:
        path.chmod(path.stat().st_mode & 0o555)
    script = "-c", WITHOUT_OVERRIDE, ROOT / "train.py"
    env = {"HF_DATASETS_CACHE": str(cache)}
    done = launch(tmp_path, config, processes=None, env=env, script=script, timeout=600)
    assert done.status == {"status": "finished", "step": 2} and sorted(cache.rglob("*")) == before

    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != cache and access(path, mode))
    done = run(tmp_path, config, "--data.sequence_length", 9, "--run.output_dir", tmp_path / "other", expect=2)
    assert f"{cache}, cannot be used" in done.output and "read-only, and lacks what --prepare makes" in done.output


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are those of Linux")
@pytest.mark.parametrize(
    "source, found",
    [
        ({"path": "me/texts"}, "it is read-only, and lacks what --prepare makes of these data"),
        ({"files": "{stdlib_chats}"}, "PermissionError: "),
    ],
)
def test_a_read_only_cache_that_nobody_has_prepared(tmp_path, source, found):
    config, cache = tiny_config(tmp_path), tmp_path / "cache"
    cache.mkdir(mode=0o555)
    config["data"] = {**source, "sequence_length": 8, "tokenizer": "bytes"}
    script = "-c", WITHOUT_OVERRIDE, ROOT / "train.py"
    env = {"HF_DATASETS_CACHE": str(cache)}
    output = launch(tmp_path, config, processes=None, env=env, script=script, expect=2).output
    advice = "cannot be used; set HF_HOME or HF_DATASETS_CACHE to another one"
    assert f"the cache of data sets, {cache}, {advice}: {found}" in output and "hf auth" not in output


@pytest.mark.slow
def test_all_processes_and_launches_share_one(tmp_path):
    """Two processes make it once, and three find it."""
    config = tiny_config(tmp_path)
    config["run"]["max_steps"] = 6
    launch(tmp_path, config, processes=2, warm=True)
    made = indexes_of(tmp_path)
    assert len(made) == 2  # Of the rows, and of those to evaluate on.
    launch(tmp_path, config, "--run.output_dir", tmp_path / "again", processes=3, warm=True)
    assert indexes_of(tmp_path) == made


def test_tokens_beyond_the_vocabulary_are_found_at_the_start(tmp_path):
    """Wherever they are, and not first in the step that has the row."""
    config = tiny_config(tmp_path)
    rows = make_rows([24] * 40)
    rows[-1]["input_ids"][-1] = 384
    write_rows(tmp_path / "rows-384", rows)
    done = run(
        tmp_path,
        config,
        "--data.path",
        tmp_path / "rows-384",
        "--run.max_steps",
        1,
        "--optim.warmup_steps",
        0,
        expect=2,
    )
    assert "the training data has the token id 384, the model's vocabulary is 0 to 383" in done.output


@pytest.mark.parametrize("at", [0, 15, 29])
def test_the_range_of_the_tokens_is_that_of_all_batches(tmp_path, at):
    """Of ids, and of labels that are targets: that of a first token is none."""
    documents = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]} for _ in range(30)]
    documents[at] = {"input_ids": [5, -2, 7, 900], "labels": [-9, -3, 1000, -100]}
    data = training_rows(config_of(save(tmp_path / "documents", documents)))
    assert [data.index[name] for name in ("lowest_id", "lowest_label", "highest")] == [-2, -3, 1000]
    assert data.index["unlike"] == 2


def test_compressed_tokens_are_refused(tmp_path):
    """Their place in the file is not that of the tokens. datasets itself never writes such files."""
    folder = save(tmp_path / "documents", documents_of(1))
    for file in folder.glob("*.arrow"):
        table = pa.ipc.open_stream(file.read_bytes()).read_all()
        with pa.ipc.new_stream(str(file), table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            writer.write_table(table)
    with pytest.raises(UserError, match="compressed; save the data set anew"):
        load_data(config_of(folder), None, seed=0)


# Loads a data set with the rooms of a copy as they are, and again after a comment was added to each of them in turn.
WITH_EDITED_ROOMS = """
import json, linecache, sys
from pathlib import Path
sys.path.insert(0, ".")
from samerun.data.load import load_data
from samerun.model.tokenizer import load_tokenizer
from samerun.config import Config
config = Config.model_validate(json.loads(Path("config.json").read_text()))
def load():
    linecache.checkcache()
    train, _ = load_data(config.data, load_tokenizer(config.data, config.model), 0)
    tokens = {Path(file).parent.name for file, *_ in train.index["token_files"]}
    return [train.folder.name, *tokens]
found = {"": load()}
for room in Path("samerun").rglob("*.py"):
    before = room.read_text()
    room.write_text(before + "# Edited.\\n")
    found[str(room)] = load()
    room.write_text(before)
print("found", json.dumps(found))
"""


def test_other_code_makes_other_rows(tmp_path):
    """Each room that decides tokens or rows, and no other one. What lies in a cache must not outlive the code of it."""
    shutil.copytree(ROOT / "samerun", tmp_path / "samerun", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n' * 5)
    config = {
        "run": {"max_steps": 1},
        "batch": {"global_batch_size": 1},
        "data": {"files": "text.jsonl", "sequence_length": 8},
        "model": {"architecture": {"model_type": "llama"}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", WITH_EDITED_ROOMS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(re.search("^found (.*)", done.stdout, re.M)[1])
    rows, tokens = found.pop("")
    assert len(found) > 30
    other_rows = {Path(room).stem for room, (own_rows, _) in found.items() if own_rows != rows}
    other_tokens = {Path(room).stem for room, (_, own_tokens) in found.items() if own_tokens != tokens}
    of_tokens = {"order", "sources", "text_files", "token_files", "documents", "encode", "chat", "tokenize"}
    assert other_tokens == of_tokens and other_rows == of_tokens | {"rows", "overlap", "index"}
    assert len(list((tmp_path / "cache" / "train-documents").iterdir())) == 2  # Another text_files.py reads anew.
