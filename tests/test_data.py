"""What a document may be: in which columns and of which types, and which rows are left out."""

import bz2
import datetime
import gzip
import json
import re
import tempfile
from pathlib import Path
from unittest import mock

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
from helpers import ROOT, launch, make_rows, run, tiny_config, write_rows
from reference import shuffled
from test_finetune import END, START, by_hand, byte_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from samerun.config import Config, Data, Model, Source
from samerun.data import sources, text_files
from samerun.data.batches import Prefetcher, StepBatch
from samerun.data.chat import tokenize_conversation
from samerun.data.documents import load_documents
from samerun.data.encode import Encoder
from samerun.data.load import load_data
from samerun.data.rows import Dataset
from samerun.data.tokenize import tokenize, tokenize_text
from samerun.errors import UserError
from samerun.model.build import build_model
from samerun.model.tokenizer import load_tokenizer
from samerun.run.sample import encode_prompt


@pytest.fixture
def config(tmp_path):
    """A run of two steps."""
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 2}
    config["optim"]["warmup_steps"] = 0
    return config


def test_many_files_that_cannot_be_read(tmp_path, monkeypatch):
    """A failure passes, or none of the files is to blame for it. Never are some of them taken for all."""
    files = [str(tmp_path / f"{number:02}.jsonl") for number in range(20)]
    for number, file in enumerate(files):
        Path(file).write_text(json.dumps({"text": str(number)}))
    read, calls = sources.read_files, []

    def fail_once(builder: str, some: list[str]) -> datasets.Dataset:
        calls.append(some)
        if len(calls) == 1:
            raise OSError("503")
        return read(builder, some)

    def have_room_for_ten(builder: str, some: list[str]) -> datasets.Dataset:
        if len(some) > 10:
            raise OSError("No space left on device")
        return read(builder, some)

    monkeypatch.setattr(sources, "read_files", fail_once)
    assert list(sources.load_files(files)["text"]) == [str(number) for number in range(20)]
    monkeypatch.setattr(sources, "read_files", have_room_for_ten)
    with pytest.raises(UserError, match=f"cannot load {files[0]} and 19 more files: .*No space"):
        sources.load_files(files)


# Tokens --------------------------------------------------------------------------------------------------------------


def test_tokens_need_no_tokenizer(config, tmp_path):
    """Not even one beside the pretrained model. The run is the same, and the model is exported alone."""
    named = run(tmp_path, config, "--run.output_dir", tmp_path / "named")
    done = run(tmp_path, config, "--data.tokenizer", "null")
    assert (done.losses, done.logged("eval/loss")) == (named.losses, named.logged("eval/loss"))
    assert not list(done.folder.glob("model/token*")) and list(named.folder.glob("model/token*"))
    assert transformers.AutoModelForCausalLM.from_pretrained(done.folder / "model")
    no_tokenizer = "There is no tokenizer to export with the model"
    assert no_tokenizer in done.output and no_tokenizer not in named.output


def test_what_a_launch_says_of_its_rows(config, tmp_path):
    """How many and how full they are, and all targets of the row that has most of them in the first step."""
    rows = list(datasets.load_from_disk(config["data"]["path"]))
    done = run(tmp_path, config, "--data.tokenizer", "null")
    fill = sum(len(row["input_ids"]) for row in rows) / len(rows) / 24
    assert f"Data: 23 rows, {fill:.1%} full; 2.3 steps per epoch\n" in done.output
    targets = [[label for label in rows[row]["labels"][1:] if label != -100] for row in shuffled(7, 23, 10)]
    assert f"The loss covers, for example: {max(targets, key=len)}\n" in done.output


def test_special_tokens_beside_ready_tokens(config, tmp_path):
    """They get embeddings, as they do beside texts."""
    for added, size in ([], 384), (["<a>", "<b>"], 386):
        data = {"format": "tokens", "tokenizer": "bytes", "special_tokens": added}
        settings = Config(**(config | {"data": config["data"] | data}))
        model = build_model(settings, load_tokenizer(settings.data, settings.model))
        assert model.get_input_embeddings().num_embeddings == size


@pytest.mark.parametrize("values", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("list_of", [pa.list_, pa.large_list, lambda values: pa.list_(values, 8)])
def test_every_type_of_tokens(tmp_path, list_of, values):
    rows = [row["input_ids"] for row in make_rows([8] * 5)]
    rows = [[token % 100 for token in row] for row in rows]
    table = pa.table({"input_ids": pa.array(rows, list_of(getattr(pa, values)()))})
    pq.write_table(table, tmp_path / "rows.parquet")
    config = Data(files=str(tmp_path), format="tokens", packing="none", sequence_length=8, eval_fraction=0.2)
    trained_on, held_out = load_data(config, None, seed=0)
    parts = [trained_on, *held_out.values()]
    read = [part.read(row)[0].tolist() for part in parts for row in range(len(part))]
    assert sorted(read) == sorted(rows)


@pytest.mark.parametrize(
    "name, advice", [("attention_mask", "leave it out"), ("completion_mask", "labels"), ("assistant_masks", "labels")]
)
def test_tokens_that_other_programs_mask(tmp_path, name, advice):
    """Padding, or a prompt, would be learned: only labels are read. A mask of ones says nothing and is passed over."""
    config = Data(files=str(tmp_path), format="tokens")
    for mask in ([1, 1, 1], [0, 1, 1]):
        row = {"input_ids": [5, 6, 7], name: mask}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        if all(mask):
            assert load_documents(config)["input_ids"][:] == [[5, 6, 7]]
            for no_mask in "none", [0.5, 0.5, 0.5], [[1, 1, 1]], None:
                (tmp_path / "rows.jsonl").write_text(json.dumps(row | {name: no_mask}) + "\n")
                assert load_documents(config)["input_ids"][:] == [[5, 6, 7]]
            for zeros in [False, True, True], [0, None, 1]:
                (tmp_path / "rows.jsonl").write_text(json.dumps(row | {name: zeros}) + "\n")
                with pytest.raises(UserError, match=f"{name}' has 0 for"):
                    load_documents(config)
    with pytest.raises(UserError, match=f"{name}' has 0 for .*{advice}"):
        load_documents(config)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"labels": [-100, 6, 7]}) + "\n")
    if name == "attention_mask":  # Labels say what is learned, and not what is padding.
        with pytest.raises(UserError, match="has 0 for padding"):
            load_documents(config)
    else:
        assert load_documents(config)["labels"][:] == [[-100, 6, 7]]


# Texts ---------------------------------------------------------------------------------------------------------------


def documents(folder, rows, format: str, saved: bool | str = False, **settings) -> list[dict]:
    """What train.py makes of rows in a file, or in a data set that datasets has saved, maybe with a format."""
    source = {"path": str(folder / "rows")}
    if saved:
        kind = saved if isinstance(saved, str) else None
        datasets.Dataset.from_list(rows).with_format(kind).save_to_disk(folder / "rows")
    else:
        source = {"files": str(folder / "rows.jsonl")}
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Data(**source, format=format, tokenizer=byte_tokenizer(folder / "tokenizer", None), **settings)
    tokenizer = load_tokenizer(config, Model())
    return list(tokenize(load_documents(config), config, tokenizer, Path(tempfile.mkdtemp(dir=folder))))


def test_a_prompt_is_not_learned(tmp_path):
    rows = documents(tmp_path, [{"prompt": "2+2", "completion": "=4"}, {"prompt": "", "completion": "é"}], "text")
    assert rows == [
        {"input_ids": [*b"2+2=4", END], "labels": [-100] * 3 + [*b"=4", END]},
        {"input_ids": [*"é".encode(), END], "labels": [*"é".encode(), END]},
    ]


def test_the_end_after_an_empty_completion_is_learned(tmp_path):
    """Also if the tokenizer ends each text by itself, and so the prompt alone as well."""
    name = byte_tokenizer(tmp_path / "tokenizer", None)
    tokenizer = load_tokenizer(Data(files="a", tokenizer=name), Model())
    ends = TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", END)])
    for processor in tokenizer.backend_tokenizer.post_processor, ends:
        if processor:
            tokenizer.backend_tokenizer.post_processor = processor
        batch = {"prompt": ["ab", "ab"], "completion": ["", "c"]}
        rows = tokenize_text(batch, ["prompt", "completion"], Encoder(tokenizer))
        assert rows["input_ids"] == [[*b"ab", END], [*b"abc", END]]
        assert rows["labels"] == [[-100, -100, END], [-100, -100, *b"c", END]]


def test_a_prompt_that_alone_has_other_tokens():
    """GPT-2 leaves the last of several line breaks to the word that follows, if there is one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "ĊĊ"])}
    plain = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain)
    prompts = ["Q:\n\n", "Q:    "]
    assert len(tokenizer(prompts[0])["input_ids"]) == 3
    batch = {"prompt": prompts, "completion": ["A1", ""]}
    rows = tokenize_text(batch, ["prompt", "completion"], Encoder(tokenizer))
    assert rows["labels"] == [[-100] * 4 + [vocabulary["A"], vocabulary["1"]], [-100] * 6]


def test_a_column_of_texts_goes_before_a_pair(tmp_path):
    row = {"prompt": "a", "completion": "b", "text": "c"}
    assert documents(tmp_path, [row], "text") == [{"input_ids": [*b"c", END]}]


def test_tokens_that_reach_over_the_end_of_a_prompt():
    """Byte pairs may join its last letter with the first of the completion. That token is learned."""
    tokenizer = transformers.ByT5Tokenizer()
    tokenizer.add_tokens(["bc"])
    row = tokenize_text({"prompt": ["ab"], "completion": ["cd"]}, ["prompt", "completion"], Encoder(tokenizer))
    a, bc, d, end = row["input_ids"][0]
    assert row["labels"] == [[-100, bc, d, end]] and (a, d, end) == (100, 103, 1)


def test_tokens_that_reach_over_the_begin_of_what_the_assistant_says(tmp_path):
    """They are learned, also where a prompt ends in front of them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path, None))
    tokenizer.add_tokens(["bc"])
    tokenizer.chat_template = "{% for m in messages %}"
    tokenizer.chat_template += "{% if m.role == 'user' %}{{ m.content }}{% else %}"
    tokenizer.chat_template += "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    for parts in [turns], [turns[:1], turns[1:]]:
        (a, bc, d), labels = tokenize_conversation(parts, None, Encoder(tokenizer), "all")
        assert labels == [-100, bc, d] and (a, d) == (97, 100)


@pytest.mark.parametrize(
    "single, ids", [("$A", b"ab"), ("<s> $A", [259, *b"ab"]), ("<s> $A <|im_end|>", [259, *b"ab"])]
)
def test_samples_begin_as_the_texts_do(tmp_path, single, ids):
    """Llama's tokenizer, for example, begins each text with a token. T5's ends it with one, which no prompt has."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path, None))
    tokenizer.add_tokens(["<s>"], special_tokens=True)
    specials = [("<s>", 259), ("<|im_end|>", END)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    config = mock.Mock(data=Data(files="a.txt"))
    assert encode_prompt("ab", config, Encoder(tokenizer)).tolist() == [list(ids)]
    [text] = tokenize_text({"text": ["ab"]}, ["text"], Encoder(tokenizer))["input_ids"]
    assert text == [*ids, END]


@pytest.mark.parametrize(
    "name, content", [("a.jsonl", '{"text": "a"}\n{"text": null}\n'), ("a.csv", "text,n\na,1\n,2\n")]
)
def test_nulls_are_left_out(tmp_path, capsys, name, content):
    (tmp_path / name).write_text(content)
    config = Data(files=str(tmp_path / name), drop_nulls=True)
    assert load_documents(config)["text"][:] == ["a"]
    assert "1 of 2 rows are null in 'text', and left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "format, rows",
    [
        ("text", [{"prompt": "a", "completion": "b"}, {"prompt": None, "completion": "c"}, {"prompt": "d"}]),
        ("tokens", [{"input_ids": [1, 2], "labels": [1, 2]}, {"labels": [3, 4]}, {"input_ids": [5, 6]}]),
    ],
)
def test_documents_of_which_a_part_is_null_are_left_out(tmp_path, format, rows):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_documents(Data(files=str(tmp_path / "a.jsonl"), format=format, drop_nulls=True))
    assert list(found) == rows[:1]


@pytest.mark.parametrize(
    "name, content, texts",
    [
        ("a.csv", "text,n\nNone,1\nNA,2\nnull,3\n", ["None", "NA", "null"]),
        ("a.txt", "\ufeffhi\r\n\n", ["hi\r\n\n"]),
        ("a.csv", "\ufefftext,n\r\nhi,1\r\n", ["hi"]),
        ("a.csv", "text,source\nhello world,web,\nbye,book,\n", ["hello world", "bye"]),  # Not web and book.
        ("a.jsonl", '\ufeff{"text": "hi"}\r\n', ["hi"]),
    ],
)
def test_words_that_look_empty_and_marks_of_windows(tmp_path, name, content, texts):
    (tmp_path / name).write_text(content, newline="")
    config = Data(files=str(tmp_path / name))
    assert load_documents(config)["text"][:] == texts


@pytest.mark.parametrize(
    "cells",
    [["1.50", "1e5"], ["007", "-0"], ["True", "False"], ["12345678901234567890123", "1"], ["5", "NaN"]],
    ids=str,
)
@pytest.mark.parametrize("words", [0, 1, 10_000])
def test_cells_are_texts_as_they_are_written(tmp_path, words, cells):
    """Also where all look like numbers in a file, or in one of the parts of 10,000 rows that pandas reads."""
    texts = [f"word {number}" for number in range(words)] + cells
    (tmp_path / "a.csv").write_text("\n".join(["n,text", *(f"{n},{text}" for n, text in enumerate(texts))]))
    (tmp_path / "b.csv").write_text("\n".join(["text,n", *(f"{text}," for text in cells)]))
    config = Data(files=[str(tmp_path / "a.csv"), str(tmp_path / "b.csv")])
    assert load_documents(config)["text"][:] == texts + cells


def test_a_part_of_a_table_without_texts(tmp_path, capsys):
    lines = ["a,1"] * 10_000 + [",2", '"",3', ","]
    (tmp_path / "a.csv").write_text("\n".join(["text,n", *lines]))
    config = Data(files=str(tmp_path / "a.csv"), drop_nulls=True)
    assert load_documents(config)["text"][:] == ["a"] * 10_000
    assert "3 of 10,003 rows are null in 'text'" in capsys.readouterr().out


def test_a_table_without_rows_beside_another_one(tmp_path):
    """Adds nothing, wherever it comes."""
    for name, rows in ("a", ""), ("b", "word\n"), ("c", ""):
        (tmp_path / f"{name}.csv").write_text(f"text\n{rows}")
    config = Data(files=str(tmp_path))
    assert load_documents(config)["text"][:] == ["word"]


@pytest.mark.parametrize("setting", ["files", "path"])
def test_a_parquet_file_without_rows_beside_another_one(tmp_path, setting):
    """As programs leave that write one for each of their parts."""
    for name, rows in ("a", []), ("b", ["word"] * 20_001), ("c", []):
        pq.write_table(pa.table({"text": pa.array(rows, pa.string())}), tmp_path / f"{name}.parquet")
    config = Data(**{setting: str(tmp_path)})
    assert load_documents(config)["text"][:] == ["word"] * 20_001


DATES = ["2024-05-01", "2024-05-01T10:00:00Z", "2024-05-01 10:00"]


@pytest.mark.parametrize("before", [[], ["hello", None]], ids=["first", "after texts"])
@pytest.mark.parametrize("after", [[], ["bye"]], ids=["last", "before texts"])
def test_dates_are_texts_as_they_are_written(tmp_path, before, after):
    """Also where all texts of a file are dates, which datasets would take for times."""
    for name, texts in ("a", before), ("b", DATES), ("c", after):
        lines = [json.dumps({"text": text, "n": 1, "day": DATES[0]}) for text in texts]
        if lines:
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    config = Data(files=str(tmp_path), drop_nulls=True)
    assert load_documents(config)["text"][:] == [text for text in before + DATES + after if text]


@pytest.mark.parametrize("other", [1.5, True, {"a": 1}, ["b"]], ids=str)
def test_what_is_no_text_is_not_learned(tmp_path, other):
    """Also in a file after another one, where datasets would write it as a text."""
    for name, text in ("a", "x"), ("b", other):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}))
    config = Data(files=str(tmp_path))
    told = re.escape(
        f"data.column: 'text' holds {json.dumps(other)} in row 0, counted from 0, of {tmp_path}/b.jsonl, not text"
    )
    with pytest.raises(UserError, match=told):
        load_documents(config)


def test_a_text_that_is_not_utf_8_in_a_saved_data_set(tmp_path):
    """As datasets takes one from a .jsonl of the Hub."""
    texts = pa.array([b"a", "Müll".encode("latin-1")], pa.binary()).view(pa.string())
    datasets.Dataset(pa.table({"text": texts})).save_to_disk(tmp_path / "rows")
    with pytest.raises(UserError, match="'text', in the part from row 0 on, counted from 0: .*UTF8"):
        load_documents(Data(path=str(tmp_path / "rows")))


def test_files_of_many_columns_are_read_twice_at_most(tmp_path, monkeypatch):
    files = [tmp_path / f"{number:02}.jsonl" for number in range(12)]
    for number, file in enumerate(files):
        file.write_text(json.dumps({"text": "a", f"own{number}": number, "hashes": [number, 2**64 * (number == 9)]}))
    read, parts_of = [], text_files.parts_of
    monkeypatch.setattr(text_files, "parts_of", lambda file, config: read.append(file) or parts_of(file, config))
    documents = sources.load_files(list(map(str, files)))
    assert documents["text"][:] == ["a"] * 12 and documents["own3"][3] == 3
    assert documents.data.column("hashes")[9].as_py() == f"[9, {2**64}]"
    assert len(read) <= 1 + 12 + 1 + 12  # The first one tells the types of the columns each time.
    read.clear()
    sources.load_files([str(file) for file in files if file.write_text('{"text": "a"}')])
    assert len(read) <= 1 + 12


@pytest.mark.parametrize("first, last, kind", [([], [True], "bool"), ([3], [], "int64"), ([], [], "null")])
def test_an_empty_list_is_of_any_type(tmp_path, first, last, kind):
    for name, marks in ("a", first), ("b", last):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"input_ids": [1], "marks": marks}))
    documents = sources.load_source(Source(files=str(tmp_path)))
    assert documents["marks"][:] == [first, last] and f"'{kind}'" in str(documents.features["marks"])


@pytest.mark.parametrize(
    "text, found",
    [
        ('{"text": "a"} {"text": "b"}\n{"text": "c"}', ["a", "b", "c"]),
        ('{\n"text": "a"\n}\n{\n"text": "b"\n}\n', ["a", "b"]),
        ('[{"text": "a"},\n{"text": "b"}]', ["a", "b"]),
        ('["a",\n"b"]', ["a", "b"]),
        ('\n\n{"text": "a"}\n\n{"text": null}\n', ["a"]),
        pytest.param(json.dumps([*map(str, range(2001))]), [*map(str, range(2001))], id="more than are read at once"),
    ],
)
def test_how_rows_stand_in_a_json_file(tmp_path, text, found):
    (tmp_path / "a.json").write_text(text)
    config = Data(files=str(tmp_path), drop_nulls=True)
    assert load_documents(config)["text"][:] == found


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.gz", "a.jsonl.bz2"])
def test_compressed_files_are_read_as_others_are(tmp_path, name):
    """With the mark and the ends of lines of Windows."""
    text = json.dumps({"text": "é\r\n"}, ensure_ascii=False) + "\r\n" if ".jsonl" in name else "é\r\n"
    content = text.encode("utf-8-sig")
    pack = {"gz": gzip.compress, "bz2": bz2.compress}.get(name.rsplit(".")[-1], bytes)
    (tmp_path / name).write_bytes(pack(content))
    config = Data(files=str(tmp_path / name))
    assert load_documents(config)["text"][:] == ["é\r\n"]
    (tmp_path / name).write_bytes(pack("é".encode("latin-1")))
    with pytest.raises(UserError, match=f"cannot load .*{name}"):
        load_documents(config)


def test_columns_of_all_kinds_in_a_later_part(tmp_path):
    """A part is 10 MiB. A column that comes later is null before, and one that is not read may be of any type."""
    rows = [{"text": "a" * 1000, "n": 1, "tags": None}] * 12_000
    rows += [{"text": "b", "n": "one", "tags": [1], "more": {"x": 1}}, {"text": "c", "tags": ["x"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    documents = sources.load_source(Source(files=str(tmp_path / "a.jsonl")))
    assert documents[-3:] == {
        "text": ["a" * 1000, "b", "c"],
        "n": [1, "one", None],
        "tags": [None, [1], ["x"]],
        "more": [None, {"x": 1}, None],
    }
    assert len(documents) == len(rows)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_dates_in_messages_are_texts(tmp_path, suffix):
    """In a file after another one, and alone."""
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in ["q", *DATES]]
    for name, rows in ("a", chats[:1]), ("b", chats[1:]):
        rows = [{"messages": messages} for messages in rows]
        text = json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows))
        (tmp_path / f"{name}.{suffix}").write_text(text)
    for files, expected in ("*", chats), ("b*", chats[1:]):
        config = Data(files=str(tmp_path / files), format="chat")
        assert load_documents(config)["messages"][:] == expected


@pytest.mark.parametrize(
    "source, held_out, shared",
    [
        ({"files": "docs"}, {"files": ["c.txt", "a.txt"]}, "1 of 2 documents are"),
        ({"files": "docs"}, {"files": "docs"}, "2 of 2 documents are"),
        ({"files": "docs"}, {"files": "c.txt"}, None),
        ({"files": "docs"}, {"files": "copy.jsonl"}, "1 of 2 documents are"),
        ({"path": "docs"}, {"path": "docs"}, "2 of 2 documents are"),
        ({"path": "docs"}, {"files": "docs"}, "2 of 2 documents are"),
        ({"path": "lines"}, {"path": "lines", "split": "train[:20%]"}, "2 of 2 documents are"),
        ({"path": "lines", "split": "train[20%:]"}, {"path": "lines", "split": "train[:20%]"}, None),
        ({"path": "lines"}, {"files": "lines/a.jsonl"}, "10 of 10 documents are"),
        (
            {"sources": {"a": {"files": "docs", "weight": 1}, "b": {"files": "c.txt", "weight": 1}}},
            {"files": "c.txt"},
            "1 of 1",
        ),
    ],
)
def test_evaluation_on_what_is_trained_on_is_told(tmp_path, monkeypatch, capsys, source, held_out, shared):
    """What is read is compared, not the names by which it is given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "lines").mkdir()
    for name in ("docs/a.txt", "docs/b.txt", "c.txt"):
        (tmp_path / name).write_text(f"some words of {name}\n")
    (tmp_path / "a.txt").symlink_to("docs/a.txt")
    copy = [{"text": "some words of docs/a.txt\n"}, {"text": "some words of docs/d.txt\n"}]
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in copy))
    (tmp_path / "lines/a.jsonl").write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(10)))
    for _ in range(2):  # Of the first start and of the next.
        load_data(Data(**source, eval_source=held_out), transformers.ByT5Tokenizer(), seed=0)
        told = [line for line in capsys.readouterr().out.splitlines() if "trained on" in line]
        assert len(told) == bool(shared) and all(line.startswith(f"Evaluation: {shared}") for line in told)


@pytest.mark.parametrize("packing", ["none", "concat", "best_fit"])
def test_what_is_held_out_is_not_trained_on(tmp_path, capsys, packing):
    """Sources that overlap, and a document that is there twice, also in another format."""
    files = {name: tmp_path / f"{name}.jsonl" for name in "ab"}
    texts = {"a": [f"text {n % 30}" for n in range(40)], "b": [f"text {n}" for n in range(20, 60)]}
    for name, file in files.items():
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[name]))
    sources = {name: {"files": str(file), "weight": 1.0} for name, file in files.items()}
    config = Data(sources=sources, sequence_length=16, packing=packing, eval_fraction=0.3)
    tokenizer = transformers.ByT5Tokenizer()
    for _ in range(2):
        train, held_out = load_data(config, tokenizer, seed=0)
        trained_on, evaluated_on = (documents_in(data, tokenizer) for data in (train, held_out[""]))
        assert not set(trained_on) & set(evaluated_on)
        assert set(trained_on) | set(evaluated_on) == {f"text {n}" for n in range(60)}
        assert len(evaluated_on) == 24  # 30 % of each source, as without the other.
        left_out = 80 - 24 - len(trained_on)
        told = re.findall(r"(\d+) documents are the same as some that are held out", capsys.readouterr().out)
        assert left_out > 0 and sum(map(int, told)) == left_out


def documents_in(data: Dataset, tokenizer) -> list[str]:
    ids = [token for row in range(len(data)) for token in data.read(row)[0].tolist()]
    texts = tokenizer.decode(ids).split(tokenizer.eos_token)
    assert texts.pop() == ""
    return texts


def test_documents_with_nothing_to_learn_are_not_compared(tmp_path, capsys):
    """Such as empty files, of which there may be many."""
    rows = [{"text": ""}] * 20 + [{"text": f"line {number}"} for number in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Data(files=str(tmp_path / "a.jsonl"), sequence_length=16, eval_fraction=0.5)
    load_data(config, transformers.ByT5Tokenizer(), seed=0)
    assert "held out" not in capsys.readouterr().out


# Conversations -------------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
OTHER_TOOL = {"type": "function", "function": {"name": "g", "arguments": {"day": 3}}}
WITH_TOOLS = [
    {"role": "user", "content": "?", "name": "Eve"},
    {"role": "assistant", "content": None, "tool_calls": [TOOL, OTHER_TOOL]},
    {"role": "tool", "content": "4", "tool_call_id": "x"},
    {"role": "assistant", "content": "4!"},
]
CHATML = {"chat_template": str(ROOT / "configs" / "chat_template.jinja")}


@pytest.mark.parametrize("saved", [False, True], ids=["a file", "a saved data set"])
def test_the_template_sees_the_messages_as_they_were_written(tmp_path, saved):
    """Arrow gives each message the keys of all, and each call the arguments of all, with null in them."""
    template = "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
    (tmp_path / "template").write_text(template)
    [row] = documents(tmp_path, [{"messages": WITH_TOOLS}], "chat", saved, chat_template=str(tmp_path / "template"))
    text = bytes(row["input_ids"]).decode().replace("}{", "}\n{")
    user, call, *answers = WITH_TOOLS
    call = {"role": "assistant", "tool_calls": [TOOL, OTHER_TOOL]}  # transformers leaves out its content of null.
    assert [json.loads(line) for line in text.splitlines()] == [user, call, *answers]


def test_a_last_character_of_several_tokens_is_learned_whole(tmp_path):
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    (tmp_path / "template").write_text(template)
    row = [{"role": "assistant", "content": content} for content in ("a🙂", "é", "b")]
    [row] = documents(tmp_path, [{"messages": row}], "chat", chat_template=str(tmp_path / "template"))
    assert row["labels"] == [*"a🙂".encode(), -100, *"é".encode(), -100, *b"b", -100]


def test_messages_of_sharegpt(tmp_path):
    said = [("system", "s"), ("human", "a"), ("gpt", "b"), ("user", "c"), ("assistant", "d"), ("function", "e")]
    rows = [{"conversations": [{"from": who, "value": what} for who, what in said]}]
    roles = ["system", "user", "assistant", "user", "assistant", "tool"]
    expected = by_hand([(role, what) for role, (_, what) in zip(roles, said)], chatml=True)
    assert documents(tmp_path, rows, "chat", **CHATML) == [expected]


def test_a_content_in_parts_is_their_text(tmp_path):
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    row = [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}]
    assert documents(tmp_path, [{"messages": row}], "chat", **CHATML) == [
        by_hand([("user", "a"), ("assistant", "bc")], chatml=True)
    ]
    parts[0] = {"type": "image", "url": "a.png"}
    with pytest.raises(UserError, match="row 0, counted from 0: a content has the part .*a.png"):
        documents(tmp_path, [{"messages": row}], "chat", **CHATML)


def test_only_the_completion_of_a_conversation_is_learned(tmp_path):
    prompt = [("user", "a"), ("assistant", "b"), ("user", "c")]
    completion = [("assistant", "d"), ("user", "e"), ("assistant", "f")]
    pair = {"prompt": prompt, "completion": completion}
    row = {name: [dict(zip(["role", "content"], turn)) for turn in turns] for name, turns in pair.items()}
    whole, first = by_hand(prompt + completion, chatml=True), len(by_hand(prompt, chatml=True)["input_ids"])
    expected = whole | {"labels": [-100] * first + whole["labels"][first:]}
    assert expected["labels"].count(END) == 2 and expected["input_ids"][0] == START
    assert documents(tmp_path, [row], "chat", **CHATML) == [expected]


def chat_config(folder, messages: list) -> dict:
    """For a short run on conversations, enough of them to be tokenized by several processes."""
    config = tiny_config(folder)
    config["run"] |= {"max_steps": 5}
    path = write_rows(folder / "chats", [{"messages": turns} for turns in messages])
    tokenizer, template = byte_tokenizer(folder / "tokenizer", None), str(ROOT / "configs" / "chat_template.jinja")
    data = {"path": str(path), "format": "chat", "tokenizer": tokenizer, "chat_template": template}
    return config | {"data": data | {"sequence_length": 24}}


GOOD = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.slow
def test_conversations_are_tokenized_once(tmp_path):
    """A launch finds in the cache what another one made. As `python train.py`: an import would have other names."""
    config, made = chat_config(tmp_path, [GOOD] * 200), []
    for name in "first", "second":
        done = launch(tmp_path, config, "--run.output_dir", tmp_path / name, processes=None, warm=True)
        assert "Warning" not in done.output
        made.append(sorted(map(str, Path(datasets.config.HF_DATASETS_CACHE).glob("train-tokens/*/*.arrow"))))
        assert ("Tokenizing 200 documents" in done.output) == (name == "first")
    assert made[0] == made[1] != []
    assert not list((tmp_path / "chats").glob("cache-*"))  # The folder of the data may be read-only.


@pytest.mark.parametrize("kind", ["arrow", "numpy"])
def test_the_format_of_a_saved_data_set(tmp_path, kind):
    """In which it gives its rows to others, and which datasets saves with it."""
    (tmp_path / "other").mkdir()
    expected = documents(tmp_path / "other", [{"messages": GOOD}], "chat", **CHATML)
    assert documents(tmp_path, [{"messages": GOOD}], "chat", saved=kind, **CHATML) == expected != []


def test_a_prompt_that_its_template_changes(tmp_path):
    """Many templates show the thinking of the last turn only. Alone, such a prompt is longer than in the whole."""
    said = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    template = f"{{% for m in messages %}}{{% generation %}}{said}{{% endgeneration %}}{{% endfor %}}"
    (tmp_path / "template").write_text(template)
    row = {"prompt": "<think>a lot</think>b", "completion": "c"}
    row = {name: [{"role": "assistant", "content": content}] for name, content in row.items()}
    with pytest.raises(UserError, match="row 0, counted from 0: the chat template changes the prompt"):
        documents(tmp_path, [row], "chat", chat_template=str(tmp_path / "template"))


def test_times_are_not_learned(tmp_path):
    """datasets makes times of a .jsonl of the Hub whose texts are all dates. How they were written is lost."""
    day = datetime.datetime(2024, 5, 1)
    for speaker, said in ("role", "content"), ("from", "value"):
        row = {"messages": [{speaker: role, said: day} for role in ("user", "assistant")]}
        with pytest.raises(UserError, match="'messages' holds .*timestamp.*, not lists of .* save them as .parquet"):
            documents(tmp_path / said, [row], "chat", saved=True, **CHATML)
    with pytest.raises(UserError, match="'completion' holds timestamp.*, not text; .* save them as .parquet"):
        documents(tmp_path, [{"prompt": "When?", "completion": day}], "text", saved=True)


def test_columns_that_are_not_read_are_told(tmp_path, capsys):
    row = {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}], "id": 3, "n": 4}
    documents(tmp_path, [row], "chat", **CHATML)
    assert "columns read: messages, tools; not read: id, n.\n" in capsys.readouterr().out


def test_what_is_told_of_several_sources(tmp_path, capsys):
    """Once, with the name of the source. Of the evaluation, what is not told of the training data already."""
    for name, extra in ("a", "id"), ("b", "url"), ("held", "n"):
        rows = [{"text": f"words {n} of {name}", extra: 1} for n in range(9)]
        rows += [{"text": None, extra: 2}] * (name == "b")
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = {name: {"files": str(tmp_path / f"{name}.jsonl"), "weight": 1} for name in "ab"}
    config = Data(sources=sources, eval_fraction=0.3, drop_nulls=True)
    tokenizer = transformers.ByT5Tokenizer()
    told = [
        "Data: a: columns read: text; not read: id.",
        "Data: b: columns read: text; not read: url.",
        "Data: b: 1 of 10 rows are null in 'text', and left out.",
    ]
    for _ in range(2):  # The second time from the index.
        load_data(config, tokenizer, 0)
        assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(("Data", "Eval"))] == told
    held_out = {"files": str(tmp_path / "held.jsonl")}
    config = Data(files=str(tmp_path / "a.jsonl"), eval_source={"same": config.sources["a"], "held": held_out})
    load_data(config, tokenizer, 0)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("Data", "Eval"))] == [
        "Data: columns read: text; not read: id.",
        "Evaluation same: 9 of 9 documents are also trained on.",
        "Evaluation held: columns read: text; not read: n.",
    ]


def test_the_row_of_a_bad_conversation_in_parallel(tmp_path):
    bad = [{"role": "user", "content": None}]
    config = chat_config(tmp_path, [GOOD] * 199 + [bad])
    done = launch(tmp_path, config, processes=None, warm=True, expect=2)
    [message] = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert "cannot use messages as chat: row 199, counted from 0: a message has role, and no content" in message


@pytest.mark.parametrize("packing, counts", [("none", "3 of 5"), ("concat", "2 of 4"), ("best_fit", "2 of 4")])
def test_rows_without_a_target_are_counted(tmp_path, capsys, packing, counts):
    """Rows of at most 4 tokens: none AAAA|A|BBBB|Bb|ccc, concat AAAA|ABBB|BbbC|cc, best fit AAAA|BBBB|cccA|Bb. In the
    loss are the small letters, without the first of a piece."""
    rows = [
        {"input_ids": [3] * 5, "labels": [-100] * 5},
        {"input_ids": [4] * 6, "labels": [-100] * 4 + [4] * 2},
        {"input_ids": [5] * 3, "labels": [5] * 3},
    ]
    path = str(write_rows(tmp_path / "rows", rows))
    config = Data(path=path, format="tokens", packing=packing, sequence_length=4)
    message = f"Data: rows without a target token, from which nothing is learned: {counts}."
    for _ in range(2):  # The second time from the index.
        load_data(config, None, 0)
        assert message in capsys.readouterr().out.splitlines()


def test_all_rows_with_a_target_need_no_word(tmp_path, capsys):
    path = str(write_rows(tmp_path / "rows", [{"input_ids": [3]}, {"input_ids": [3, 4]}]))
    load_data(Data(path=path, format="tokens", packing="none", sequence_length=4), None, 0)
    assert "without a target" not in capsys.readouterr().out


def test_no_documents(tmp_path):
    pq.write_table(pa.table({"text": pa.array([None, None], pa.string())}), tmp_path / "a.parquet")
    config = Data(files=str(tmp_path / "a.parquet"), drop_nulls=True)
    with pytest.raises(UserError, match="there are no documents"):
        load_documents(config)


def test_a_vocabulary_with_gaps(tmp_path):
    """The model has a row for each id, also if fewer of them are tokens."""
    vocabulary = {"a": 0, "b": 3, "<unk>": 9}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / "t")
    path = write_rows(tmp_path / "texts", [{"text": "abcab" * 9}] * 20)
    config = tiny_config(tmp_path)
    config["data"] = {"path": str(path), "tokenizer": str(tmp_path / "t"), "sequence_length": 16}
    config["model"] = {"architecture": {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32}}
    config["model"]["architecture"] |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    done = run(tmp_path, config)
    assert done.weights["model.embed_tokens.weight"].shape == (10, 16)


def test_small_steps_are_loaded_several_at_once():
    """As many as make 16,384 tokens; large ones one by one, since a GPU would hold them all. None after the last."""

    def loaded(tokens, last):
        batches, alone = Prefetcher(lambda step: StepBatch(step, [], {"tokens": tokens}, {}), 5, last), []
        while batches.loaded:
            alone.append([batch.step for batch in batches.loaded])
            while batches.loaded:
                batches.take()
            batches.load_ahead()
        return alone

    assert loaded(4096, 12) == [[5], [6, 7, 8, 9], [10, 11, 12]]
    assert loaded(20_000, 8) == [[5], [6], [7], [8]]
    assert loaded(1, 40) == [[5], [*range(6, 41)]]
