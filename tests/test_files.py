"""data.files: which files are read, each by its own name, and what a !pattern leaves out."""

import calendar
import glob
import gzip
import inspect
import json
import os
import re
import shutil
import textwrap
import zipfile
from pathlib import Path

import datasets
import pytest
from helpers import run, tiny_config, write_config

from samerun.config import Data, Source
from samerun.data.sources import BUILDERS, data_suffix, list_files, load_source
from samerun.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with files whose names say what is in them."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "docs/a.txt",
        "docs/private/s.txt",
        "docs/private/t.txt",
        "a[1].txt",
        "a1.txt",
        "my [v1]/b.txt",
        "q*.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def texts(*patterns) -> list[str]:
    return load_source(Source(files=list(patterns)))["text"]


@pytest.mark.parametrize(
    "patterns, found",
    [
        (["a[1].txt", "a1.txt"], ["a[1].txt", "a1.txt"]),  # The first is a name, although it is a pattern as well.
        (["a[1].txt"], ["a[1].txt"]),
        (["a?.txt"], ["a1.txt"]),
        (["my [v1]"], ["my [v1]/b.txt"]),
        (["my [[]v1]/*"], ["my [v1]/b.txt"]),
        (["q*.txt"], ["q*.txt"]),
        (["docs"], ["docs/a.txt", "docs/private/s.txt", "docs/private/t.txt"]),
        (["docs", "docs/*.txt", "./docs/a.txt"], ["docs/a.txt", "docs/private/s.txt", "docs/private/t.txt"]),
        (["docs", "!docs/private"], ["docs/a.txt"]),
        (["docs", "!docs/private/"], ["docs/a.txt"]),
        (["./docs", "!docs/private/s.txt"], ["docs/a.txt", "docs/private/t.txt"]),
        (["docs", "!./docs/private/s.txt"], ["docs/a.txt", "docs/private/t.txt"]),
        (["docs", "!*/private/*"], ["docs/a.txt"]),
        (["docs", "!*/of-another-machine/*"], ["docs/a.txt", "docs/private/s.txt", "docs/private/t.txt"]),
        (["docs", "!docs/**/private/**/s.txt"], ["docs/a.txt", "docs/private/t.txt"]),  # A ** may be no folder,
        (["docs", "!**/**/s.txt"], ["docs/a.txt", "docs/private/t.txt"]),  # some folders, or all of them.
        (["**/*.txt", "!**/private/**/t.txt", "!**/my*/**", "!**/docs/**/[as].txt"], ["a1.txt", "a[1].txt", "q*.txt"]),
        (["*", "docs", "!a[1].txt", "!docs/private"], ["a1.txt", "q*.txt", "docs/a.txt"]),
    ],
)
def test_what_is_read(folder, patterns, found):
    assert texts(*patterns) == found
    absolute = [f"!{folder}/{word[1:]}" if word[:1] == "!" and word[1] != "*" else word for word in patterns]
    assert texts(*absolute) == found


def test_links_that_lead_nowhere(folder):
    """As those of git-annex whose files were not fetched."""
    (folder / "docs" / "lost.txt").symlink_to("nowhere")
    for pattern in "docs", "docs/*", "docs/lost.txt":
        with pytest.raises(UserError, match="data.files: docs/lost.txt is a link to a file that is not there"):
            list_files([pattern])
    assert "docs/lost.txt" not in list_files(["docs", "!docs/lost.txt"])


def test_a_folder_whose_name_looks_like_a_pattern(tmp_path, monkeypatch):
    """datasets would read the one that the pattern matches. It may also be one of the folders that the data are in."""
    for name, text in ("run[1]", "right"), ("run1", "wrong"):
        for file in "a.txt", "in/a.txt":
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
    monkeypatch.chdir(tmp_path / "run[1]")
    for path in str(tmp_path / "run[1]"), ".", "in":
        with pytest.raises(UserError, match="for a pattern; name the folder in the list `files`"):
            load_source(Source(path=path))
        assert set(texts(path)) == {"right"}
    (tmp_path / "run[1]" / "b.txt").write_text("left out")
    assert texts("*.txt", "!b*.txt") == texts("a.txt") == ["right"]


def test_neither_a_path_nor_files():
    """As in a fork that reads data.sources, which are several, as one."""
    with pytest.raises(UserError, match="data: neither path nor files; what loads the rows must give load_source"):
        load_source(Source())


def test_the_home_folder(folder, monkeypatch):
    """In a YAML file, no shell replaces the ~."""
    monkeypatch.setenv("HOME", str(folder))
    assert texts("~/docs", "!~/docs/private/*") == ["docs/a.txt"]
    assert Source(path="~/docs").path == str(folder / "docs")
    assert Data(tokenizer="~/docs").tokenizer == str(folder / "docs")


def test_the_standard_library_can_be_left_out():
    everything = list_files(["{stdlib}/*.py"])
    assert len(everything) > 50
    kept = list_files(["{stdlib}/*.py", "!{stdlib}/a*.py"])
    assert 0 < len(kept) < len(everything) and not any(os.path.basename(file).startswith("a") for file in kept)


@pytest.mark.parametrize(
    "patterns, message",
    [
        (["docs", "!docs/privat"], r"'!docs/privat' leaves nothing out"),
        (["docs", "!other/docs"], r"'!other/docs' leaves nothing out"),
        (["docs", "!docs"], r"leave out all that they name"),
        (["!docs"], r"only leave out"),
        (["nothing/*"], r"nothing matches 'nothing/\*'"),
    ],
)
def test_what_is_refused(folder, patterns, message):
    with pytest.raises(UserError, match=f"data.files: .*{message}"):
        list_files(patterns)


def test_a_name_that_datasets_cannot_read(folder):
    (folder / "d::e.txt").write_text("x")
    with pytest.raises(UserError, match=r"data.files: d::e.txt: .*rename"):
        texts("d::e.txt")


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "x.JSONL", "x.jsonl.gz", "x.json"])
def test_lines_of_json_by_any_name(tmp_path, name):
    content = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert texts(str(tmp_path / name)) == ["one", "two"]


def test_columns_that_datasets_takes_for_traces_of_agents(tmp_path):
    names = "id", "source", "model", "system_prompt", "messages"
    (tmp_path / "x.jsonl").write_text(json.dumps(dict.fromkeys(names, "a") | {"messages": []}) + "\n")
    assert load_source(Source(files=str(tmp_path / "x.jsonl"))).column_names == list(names)


@pytest.mark.parametrize("name", ["a.jsonl.zip", "a.jsonl.tar.gz", "a.zip", "a.tar.gz", "a-2.0.zip"])
def test_an_archive_tells_by_its_name_what_is_in_it(tmp_path, name):
    """Otherwise the lines of JSON in it would be learned as one text."""
    for number in "12":
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{number}.jsonl").write_text(json.dumps({"text": number}) + "\n")
    stem, kind = re.match(r"(.*)\.(zip|tar.gz)", str(tmp_path / name)).groups()
    shutil.make_archive(stem, "gztar" if kind == "tar.gz" else kind, tmp_path / "in")
    if ".jsonl" in name:
        assert texts(str(tmp_path / name)) == ["1", "2"]
    else:
        with pytest.raises(UserError, match=f"data.files: .*{name}: unpack it, or name it"):
            texts(str(tmp_path / name))


def test_a_compressed_text(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo"))
    assert texts(str(tmp_path / "a.txt.gz")) == ["one\ntwo"]


@pytest.mark.parametrize(
    "url", ["https://host/a.jsonl?download=true", "https://host/a.jsonl.gz#x", "hf://datasets/b/a.JSONL"]
)
def test_the_format_of_a_url(url):
    assert BUILDERS[data_suffix(url)] == "json"


@pytest.mark.parametrize(
    "files",
    [
        {"a.txt": "one\n\ntwo\r\n", "sub/b.txt": "three"},
        {"a.csv": "text\nNA\n007\n", "b.csv": "text\n1.50\n"},
        {"a.csv": "text,n\na,1,\nb,2,\n"},
        {"a.jsonl": '{"text": "one"}', "b.jsonl": '{"text": "2024-05-01"}'},
    ],
)
def test_a_folder_is_read_as_its_files_are(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, newline="")
    assert load_source(Source(path=str(tmp_path)))["text"][:] == texts(str(tmp_path))[:]


def test_a_table_of_a_folder_with_more_cells_than_its_header(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion\nq1,a1,note\nq2,a2,note\n")
    with pytest.raises(UserError, match="cannot load .*Length of header"):
        load_source(Source(path=str(tmp_path)))


def test_the_files_of_a_folder_may_be_splits(tmp_path):
    for name in "train", "test":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n\n{name}")
    for split in "train", "test":
        assert load_source(Source(path=str(tmp_path), split=split))["text"][:] == [f"{split}\n\n{split}"]


@pytest.mark.parametrize(
    "read, left",
    [
        (["LICENSE.txt", "urls.txt"], ["data.jsonl"]),  # The most common kind.
        (["train.txt", "test.txt"], ["books.txt", "sub/more.txt"]),  # Those whose names tell a split.
        (["a.jsonl", "b.json", "c.jsonl.gz"], []),
        (["a.jsonl", "README.md", "LICENSE", "dataset_infos.json"], []),
    ],
)
def test_what_is_not_read_of_a_folder_is_told(tmp_path, read, left):
    for name in read + left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = b"{}" if name == "dataset_infos.json" else b'{"text": "word"}\n'
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    notes = []
    load_source(Source(path=str(tmp_path)), notes.append)
    told = f"files of {tmp_path} that are not read: {', '.join(left)}; data.files can name them."
    assert notes == ([told] if left else [])


@pytest.mark.parametrize(
    "readme, name, content, found",
    [
        (None, "a.tsv", "text\tn\n007\t1\n", ["007"]),
        ("{data_files: a.csv, sep: ;}", "a.csv", "text;n\n007;1\n", ["007"]),
        ("{data_files: a.txt, sample_by: paragraph}", "a.txt", "one\n\ntwo", ["one", "two"]),
        ("{data_files: a.json, field: rows}", "a.json", '{"rows": [{"text": "one"}]}', ["one"]),
    ],
)
def test_how_a_folder_says_that_it_is_to_be_read(tmp_path, readme, name, content, found):
    (tmp_path / name).write_text(content)
    if readme:
        (tmp_path / "README.md").write_text(f"---\nconfigs: [{{config_name: of_the_folder, {readme[1:]}]\n---\n")
    assert load_source(Source(path=str(tmp_path)))["text"][:] == found


def test_a_field_that_a_file_does_not_have(tmp_path):
    (tmp_path / "a.json").write_text('{"lines": [{"text": "one"}]}')
    (tmp_path / "README.md").write_text("---\nconfigs: [{config_name: a, data_files: a.json, field: rows}]\n---\n")
    with pytest.raises(UserError, match=f"cannot load {tmp_path}: ValueError: it has no field 'rows'"):
        load_source(Source(path=str(tmp_path)))


@pytest.mark.parametrize(
    "kind, good, bad, problem",
    [
        ("jsonl", '{"text": "one"}\n', '{"text": "two"}\n{"text": \n', "ValueError: line 2 is no JSON"),
        ("csv", "text\none\n", "text\none, two\n", "ParserWarning: Length of header"),
    ],
)
def test_the_bad_file_of_a_folder_is_named(tmp_path, kind, good, bad, problem):
    for name in "ac":
        (tmp_path / f"{name}.{kind}").write_text(good)
    (tmp_path / f"b.{kind}").write_text(bad)
    with pytest.raises(UserError, match=f"^data: cannot load {tmp_path}/b.{kind}: {problem}"):
        load_source(Source(path=str(tmp_path)))


def test_a_bad_file_in_an_archive_of_a_folder(tmp_path):
    """datasets looks into the archive. Its name tells no format, which is nothing to complain of here."""
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("a.jsonl", '{"text": "two"}\n{"text": \n')
    with pytest.raises(UserError, match=f"^data: cannot load {tmp_path}: ValueError: line 2 is no JSON"):
        load_source(Source(path=str(tmp_path)))


def test_types_in_the_readme_of_a_folder_change_no_value(tmp_path):
    """datasets writes them there with push_to_hub. It would give both messages both keys."""
    rows = [{"text": "2024-05-01", "calls": [{"x": 1}, {"y": 1e-12}]}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    calls = "{name: calls, list: [{name: x, dtype: int64}, {name: y, dtype: float64}]}"
    features = f"features: [{{name: text, dtype: string}}, {calls}]"
    (tmp_path / "README.md").write_text(f"---\ndataset_info: {{{features}}}\n---\n")
    found = load_source(Source(path=str(tmp_path)))
    assert found["text"][:] == ["2024-05-01"]
    assert json.loads(found.data.column("calls")[0].as_py()) == rows[0]["calls"]


def test_a_tsv_is_a_table_also_by_its_name(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tn\n007, b\t1\n")
    found = load_source(Source(files=[str(tmp_path / "a.tsv")]))
    assert found[:] == {"text": ["007, b"], "n": ["1"]}
    (tmp_path / "a.csv").write_text("text,n\n007,1\n")
    with pytest.raises(UserError, match=".tsv and .csv files do not mix"):
        load_source(Source(files=[str(tmp_path / "a.tsv"), str(tmp_path / "a.csv")]))


def test_a_saved_folder_has_no_split(tmp_path):
    config = tiny_config(tmp_path)
    config["data"]["split"] = "validation"
    done = run(tmp_path, config, expect=2)
    assert re.search("save_to_disk .*split", done.output) and not (tmp_path / "run").exists()
    assert write_config(tmp_path, config).exists()


@pytest.mark.parametrize("names", [("train", "validation"), ("train_sft", "train_gen"), ("books", "web")], ids=str)
def test_the_splits_of_a_saved_folder(tmp_path, names):
    """Are those it was saved with, whatever they are called. Never are several of them taken for one."""
    columns = {name: {"text": [f"one of {name}", f"two of {name}"], f"of_{name}": [1, 2]} for name in names}
    saved = {name: datasets.Dataset.from_dict(columns[name]).with_format("numpy") for name in names}
    empty = datasets.Dataset.from_dict({"text": []})
    datasets.DatasetDict(saved | {"empty": empty}).save_to_disk(tmp_path)
    datasets.load_from_disk(tmp_path / names[0]).map(lambda row: {"text": "changed"})  # Leaves its result there.
    notes = []
    for name in names:
        assert load_source(Source(path=str(tmp_path), split=name), notes.append)[:] == columns[name]
        assert load_source(Source(path=str(tmp_path), split=f"{name}[1:]"))["text"][:] == columns[name]["text"][1:]
    assert notes == []
    with pytest.raises(UserError, match=f"Unknown split .*{names[0]}.*{names[1]}"):
        load_source(Source(path=str(tmp_path), split="test"))
    with pytest.raises(UserError, match="leave out name"):
        load_source(Source(path=str(tmp_path), name="test", split=names[0]))


def test_conversations_about_the_library():
    """Each call is the signature that Python itself gives. The file is made once."""
    [file] = list_files(["{stdlib_chats}"])
    chats = [json.loads(line)["messages"] for line in Path(file).read_text().splitlines()]
    assert len(chats) > 1000 and len({chat[0]["content"] for chat in chats}) > 0.9 * len(chats)
    assert all([turn["role"] for turn in chat] == ["user", "assistant"] * 2 for chat in chats)
    calls = {chat[0]["content"]: (chat[1]["content"], chat[3]["content"]) for chat in chats}
    for function in textwrap.fill, shutil.copyfileobj, calendar.isleap, glob.glob, textwrap.dedent:
        name = f"{function.__module__}.{function.__name__}"
        call, purpose = calls[f"How do I call {name}?"]
        assert call == name + str(inspect.signature(function))
        assert purpose == " ".join(inspect.getdoc(function).split("\n\n")[0].split())
    before = Path(file).stat().st_mtime_ns
    assert list_files(["{stdlib_chats}"]) == [file] and Path(file).stat().st_mtime_ns == before
