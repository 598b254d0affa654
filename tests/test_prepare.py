"""Tokenizing is done in parts, of which none is done twice, and --prepare does it for machines without network."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import datasets
import psutil
import pytest
import tokenizers
import transformers
from fake_hub import FakeHub
from filelock import FileLock, Timeout
from helpers import ROOT, Done, kill_tree, launch, start, tiny_model, training_rows, write_config, write_rows
from test_finetune import CHATML, byte_tokenizer
from tokenizers import decoders, models, pre_tokenizers

import train
from samerun.config import Data, Model
from samerun.data import load as load_room
from samerun.data.load import load_data
from samerun.errors import UserError
from samerun.model.tokenizer import load_tokenizer
from samerun.preflight import prepare as prepare_room
from samerun.preflight.prepare import describe_row

# Parts ----------------------------------------------------------------------------------------------------------------


def texts(count: int) -> list[str]:
    return [f"{number} is the number of this text" for number in range(count)]


def tokens_of(text: str) -> list[int]:
    """As ByT5 has them: each byte and 3, and 1 for the end."""
    return [byte + 3 for byte in text.encode()] + [1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def source_of(folder: Path, rows: list[dict]) -> dict:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"files": str(folder / "rows.jsonl")}


def files_in(cache: Path) -> dict[Path, int]:
    """When each file of the tokens and indexes was written."""
    found = [*cache.glob("train-tokens/*/*"), *cache.glob("train-index/*/*")]
    return {file: file.stat().st_mtime_ns for file in found}


def test_parts_are_those_of_the_whole(tmp_path, cache, monkeypatch, capsys):
    """In order, with lines that tell how far it is. What there is already is neither made nor announced again."""
    written = texts(300)
    config = Data(**source_of(tmp_path, [{"text": text} for text in written]), packing="none", sequence_length=64)
    monkeypatch.setattr("samerun.data.tokenize.PART", 3000)
    monkeypatch.setattr("samerun.data.tokenize.LINE_SECONDS", 0)
    data = training_rows(config, transformers.ByT5Tokenizer())
    assert [data.read(row)[0].tolist() for row in range(300)] == list(map(tokens_of, written))
    lines = re.findall("^Token.*", capsys.readouterr().out, re.M)
    parts = sorted(cache.glob("train-tokens/*/*.arrow"))
    assert lines[0] == "Tokenizing 300 documents." and len(lines) == len(parts) > 2
    done = [int(line.split()[1]) for line in lines[1:]]
    assert done == sorted(set(done)) and 0 < done[0] and done[-1] < 300
    assert all(
        re.fullmatch(r"Tokenized \d+ of 300 documents; [\d,]+ per second, [\d:]+ left", one) for one in lines[1:]
    )

    made = files_in(cache)
    packed = config.model_copy(update={"packing": "concat", "sequence_length": 16})
    data = training_rows(packed, transformers.ByT5Tokenizer())
    stream = [token for text in written for token in tokens_of(text)]
    assert data.read(20)[0].tolist() == stream[320:336]
    assert "Token" not in capsys.readouterr().out
    assert made.items() <= files_in(cache).items()

    first, *others = parts
    first.unlink()
    load_data(config, transformers.ByT5Tokenizer(), 0)
    assert f"Tokenizing 300 documents; 1 of {len(parts)} parts are left to do.\n" in capsys.readouterr().out
    assert all(made[file] == time for file, time in files_in(cache).items() if file in others) and first.exists()


@pytest.mark.parametrize("drop", [False, True])
def test_a_bad_document_has_its_own_number_in_any_part(tmp_path, cache, monkeypatch, drop):
    chats = [{"messages": [{"role": "assistant", "content": "It is."}]} for _ in range(50)]
    chats[37]["messages"][0]["role"] = "nobody"
    if drop:
        chats[5]["messages"] = None
    template = "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}"
    template += "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    (tmp_path / "template").write_text(template)
    config = Data(
        **source_of(tmp_path, chats),
        format="chat",
        tokenizer=str(byte_tokenizer(tmp_path / "tokenizer", None)),
        chat_template=str(tmp_path / "template"),
        drop_nulls=drop,
    )
    monkeypatch.setattr("samerun.data.tokenize.PART", 500)
    with pytest.raises(UserError, match="row 37, counted from 0: .*who"):
        load_data(config, load_tokenizer(config, Model()), 0)


def test_a_process_that_is_killed_is_no_mistake_in_the_data(tmp_path, cache, monkeypatch):
    """Linux kills one when memory is short."""

    def killed(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    source = source_of(tmp_path, [{"text": text} for text in texts(50)])
    monkeypatch.setattr("samerun.data.tokenize.PART", 500)
    monkeypatch.setattr("samerun.data.tokenize.CORES", 2)
    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="was killed, .*; the same command continues"):
        patch.setattr("samerun.data.tokenize.tokenize_text", killed)
        load_data(Data(**source), transformers.ByT5Tokenizer(), 0)
    load_data(Data(**source), transformers.ByT5Tokenizer(), 0)  # The same command continues.


def test_the_main_process_tokenizes_and_tells_of_it(tmp_path):
    """It goes first, whichever rank starts first."""
    config = {"run": {"max_steps": 1, "trackers": []}, "batch": {"global_batch_size": 2}}
    config["data"] = source_of(tmp_path, [{"text": text} for text in texts(50)])
    config["data"] |= {"sequence_length": 16, "tokenizer": "bytes"}
    config["model"] = {"pretrained": str(tiny_model(tmp_path / "start"))}
    done = launch(tmp_path, config, processes=2, warm=True)
    assert done.output.count("Tokenizing 50 documents.") == 1


MANY_FILES = 300


def test_a_process_holds_no_token_file_open(tmp_path, cache, monkeypatch):
    """There may be more of them than it may open. They are mapped all the same."""
    rows = [{"text": text} for text in texts(MANY_FILES)]
    config = Data(**source_of(tmp_path, rows), packing="none", sequence_length=64)
    monkeypatch.setattr("samerun.data.tokenize.PART", 1)
    before = psutil.Process().num_fds()
    data = training_rows(config, transformers.ByT5Tokenizer())
    assert len(data.files) == MANY_FILES and psutil.Process().num_fds() < before + 20
    assert data.read(299)[0].tolist() == tokens_of("299 is the number of this text")


WAITS = """
import time
from pathlib import Path
def tokenize_part(*args, tokenize_part=tokenize.tokenize_part):
    while args[-1] > 7 and Path.cwd() == Path(__file__).parent:  # The launch that is to be killed, and maybe late.
        time.sleep(1)
    return tokenize_part(*args)
tokenize.tokenize_part = tokenize_part
"""


@pytest.mark.slow
def test_a_killed_launch_is_continued(tmp_path):
    """The parts that were complete stay as they are. The rest is made, and nothing else is left behind."""
    written = texts(12_000)
    source_of(tmp_path, [{"text": text * 9} for text in written])
    script = tmp_path / "fork.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train\nfrom samerun.data import tokenize\n"
        "tokenize.PART, tokenize.LINE_SECONDS = 2**18, 0\n" + WAITS + "sys.exit(train.main())\n"
    )
    config = {
        "run": {"max_steps": 1},
        "batch": {"global_batch_size": 1},
        "model": {"architecture": {"model_type": "llama"}},
    }
    config["data"] = {"files": str(tmp_path / "rows.jsonl"), "sequence_length": 512}
    options = {"processes": None, "script": script, "env": {"HF_DATASETS_CACHE": str(tmp_path / "cache")}}
    process = start(tmp_path, config, "--prepare", **options, cwd=tmp_path)
    for line in process.stdout:
        if re.match("Tokenized [4-9],", line):  # A third of them, more or less.
            break
    workers = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGKILL)
    psutil.wait_procs(workers, timeout=20)
    kill_tree(process)
    complete = [note.with_suffix(".arrow") for note in tmp_path.glob("cache/train-tokens/*/*.json")]
    made = {file: file.stat().st_mtime_ns for file in complete}
    assert made

    done = launch(tmp_path, config, "--prepare", **options)
    [left, parts] = map(int, re.search(r"; (\d+) of (\d+) parts are left", done.output).groups())
    assert 0 < left < parts
    files = files_in(tmp_path / "cache")
    assert made.items() <= files.items() and not [file for file in files if file.name.startswith("tmp")]
    index = json.loads(next((tmp_path / "cache").glob("train-index/*/index.json")).read_text())
    tokens = [row for file, _ in index["token_files"] for row in datasets.Dataset.from_file(file)["input_ids"]]
    assert tokens == [tokens_of(text * 9) for text in written]


@pytest.mark.slow
def test_one_launch_at_a_time_prepares_data(tmp_path):
    """The other one says that it waits, and goes on afterwards."""
    config = {"run": {"max_steps": 1, "output_dir": str(tmp_path / "run")}, "batch": {"global_batch_size": 1}}
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config["model"] = {"architecture": {"model_type": "llama", **shape}}
    config["data"] = source_of(tmp_path, [{"text": "abcdefghi"}]) | {"sequence_length": 16}
    (tmp_path / "cache").mkdir()
    with FileLock(tmp_path / "cache" / "train.lock"):
        environment = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
        process = start(tmp_path, config, processes=None, env=environment)
        assert any("Another launch prepares data in the same cache." in line for line in process.stdout)
    process.stdout.read()
    assert process.wait() == 0 and files_in(tmp_path / "cache")


# --prepare ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path):
    """A model with its tokenizer, and texts, for a Hub; and a config that names them."""
    tiny_model(tmp_path / "model")
    byte_tokenizer(tmp_path / "model", None)
    (tmp_path / "texts").mkdir()
    source_of(tmp_path / "texts", [{"text": text} for text in texts(40)])
    config = {
        "run": {"max_steps": 2, "trackers": []},
        "batch": {"global_batch_size": 4},
        "data": {"path": "me/texts", "sequence_length": 16, "eval_source": {"path": "me/texts"}},
        "model": {"pretrained": "me/model"},
    }
    return {"models/me/model": tmp_path / "model", "datasets/me/texts": tmp_path / "texts"}, config


@pytest.mark.slow
def test_a_launch_without_network_after_prepare(published, tmp_path):
    """It finds data, tokens, tokenizer and weights, and does not ask the Hub again and again, although nobody has told
    it that there is no network."""
    repositories, config = published
    caches = {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    with FakeHub(repositories) as hub:
        done = launch(tmp_path, config, "--prepare", processes=None, env=hub.environment | caches)
    assert "Tokenizing 40 documents" in done.output and "Prepared" in done.output and not done.folder.exists()
    assert [line for line in hub.requests if line.startswith("GET") and line.endswith("/model.safetensors")]
    made = files_in(tmp_path / "cache")
    done = launch(tmp_path, config, processes=None, env=hub.environment | caches)
    assert "The Hub cannot be reached" in done.output and "Tokenizing" not in done.output
    assert "Retrying" not in done.output
    assert len(done.losses) == 1 and files_in(tmp_path / "cache") == made
    export = launch(tmp_path, config, "--export", "last", processes=None, env=hub.environment | caches)
    assert "The Hub cannot be reached" in export.output and "Exported" in export.output
    assert "Retrying" not in export.output


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", None], ids=["data", "model"])
def test_what_is_not_in_the_cache_is_one_message_without_network(published, tmp_path, tokenizer):
    """After one question to the Hub. huggingface_hub itself asks six times for a file, which takes half a minute."""
    _, config = published
    config["data"]["tokenizer"] = tokenizer
    with FakeHub({}) as hub:
        gone = hub.environment | {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = launch(tmp_path, config, processes=None, env=gone, expect=2)
    assert done.output.count("The Hub cannot be reached") == 1 and "Retrying" not in done.output
    name = "me/texts" if tokenizer else "me/model"
    assert re.findall(f"^error: data.*cannot load {name}: ", done.output, re.M)


def test_prepare_finds_mistakes_and_needs_no_model(tmp_path, capsys):
    config = {
        "run": {"max_steps": 1},
        "batch": {"global_batch_size": 1},
        "model": {"architecture": {"model_type": "lama"}},
    }
    config["data"] = source_of(tmp_path, [{"text": f"some words {n}"} for n in range(9)]) | {"eval_fraction": 0.3}
    assert train.main(["--config", str(write_config(tmp_path, config)), "--prepare"]) == 2
    assert "model.architecture" in capsys.readouterr().err
    config["model"]["architecture"]["model_type"] = "llama"
    assert train.main(["--prepare", "--config", str(write_config(tmp_path, config))]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^Evaluation: \d+ rows$", output, re.M)
    assert "Prepared" in output and not (tmp_path / "run").exists()


def test_prepare_waits_for_its_turn(tmp_path, cache, monkeypatch):
    """Processes that share a cache look for data one after the other. Who waits says so, and here the other one ends
    just then. While the data are loaded, nobody else has a turn."""
    config = {"run": {"max_steps": 1}, "batch": {"global_batch_size": 1}, "data": source_of(tmp_path, [{"text": "a"}])}
    config |= {"model": {"architecture": {"model_type": "llama"}}}
    said, turns, load = [], [], prepare_room.load_data
    monkeypatch.setattr(load_room, "say", lambda text: said.append(text) or other.release())

    def look(*args):
        with suppress(Timeout), FileLock(cache / "train.lock", timeout=0):
            turns.append("another one's")
        return load(*args)

    monkeypatch.setattr(prepare_room, "load_data", look)
    cache.mkdir()
    other = FileLock(cache / "train.lock")
    other.acquire()
    for _ in range(2):  # The second time, nobody else is there.
        assert train.main(["--prepare", "--config", str(write_config(tmp_path, config))]) == 0
    assert said == ["Another launch prepares data in the same cache. Waiting until it has done that."] and not turns


SENTENCES = tokenizers.Tokenizer(models.WordLevel({word: number for number, word in enumerate("▁a ▁b ▁c ▁d".split())}))
SENTENCES.pre_tokenizer, SENTENCES.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()


@pytest.mark.parametrize(
    "tokenizer, shown",
    [
        (None, " 3« 0» 1 2« 3»\n--- next document\n 2« 1»"),
        # This decoder drops the space before the first token of what it gets.
        (transformers.PreTrainedTokenizerFast(tokenizer_object=SENTENCES), "d« a» b c« d»\n--- next document\nc« b»"),
    ],
    ids=["ids", "text"],
)
def test_what_is_learned_of_a_row(tmp_path, tokenizer, shown):
    """A document's first token never is, nor what its labels leave out."""
    rows = [{"input_ids": [3, 0, 1, 2, 3], "labels": [3, 0, -100, -100, 3]}, {"input_ids": [2, 1], "labels": [2, 1]}]
    path = str(write_rows(tmp_path / "rows", rows))
    data = training_rows(Data(path=path, format="tokens", packing="concat", sequence_length=7))
    assert describe_row(data, 0, tokenizer) == shown


def test_a_character_is_shown_with_its_last_token(tmp_path):
    """Its first token may be one that is not learned, as that of a document never is."""
    rows = [{"input_ids": [*"éaé".encode()], "labels": [-100, -100, -100, -100, 169]}]
    data = training_rows(Data(path=str(write_rows(tmp_path / "rows", rows)), format="tokens", sequence_length=7))
    tokenizer = transformers.AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path / "tokenizer", None))
    assert describe_row(data, 0, tokenizer) == "éa«é»"


def test_prepare_shows_rows(tmp_path, capsys):
    """Of a conversation, what the assistant says and the end of its turn."""
    said = {"user": "«1»?", "assistant": "Två"}
    chat = {"messages": [{"role": role, "content": content} for role, content in said.items()]}
    config = {
        "run": {"max_steps": 1},
        "batch": {"global_batch_size": 1},
        "data": source_of(tmp_path, [chat] * 2) | {"format": "chat", "chat_template": str(CHATML), "packing": "none"},
        "model": {"architecture": {"model_type": "llama"}},
    }
    config["data"]["tokenizer"] = byte_tokenizer(tmp_path / "tokenizer", None)
    words = ["--config", str(write_config(tmp_path, config))]
    assert train.main([*words, "--prepare", "1"]) == 0
    shown = "<|im_start|>user\n«1»?<|im_end|>\n<|im_start|>assistant\n«Två<|im_end|>»\n"
    assert f"\n--- row 1\n{shown}\n---\nPrepared" in capsys.readouterr().out
    for beyond in "2", "-1":
        assert train.main(["--prepare", beyond, *words]) == 2
        assert f"error: --prepare {beyond}: the rows are 0 to 1" in capsys.readouterr().err


# What the Hub refuses -------------------------------------------------------------------------------------------------

REFUSED = {
    "gated data": {"data.path": "me/gated"},
    "missing data": {"data.path": "me/none"},
    "gated model": {"model.pretrained": "me/gated"},
    "missing model": {"model.pretrained": "me/none"},
    "gated weights": {"model.pretrained": "me/gated", "data.tokenizer": "bytes"},
    "gated tokenizer": {"data.tokenizer": "me/gated"},
    "missing tokenizer": {"data.tokenizer": "me/none"},
    "gated evaluation": {"data.eval_source.path": "me/gated"},
}


@pytest.mark.slow
def test_what_is_gated_or_missing_is_one_message(published, tmp_path):
    repositories, config = published
    path = write_config(tmp_path, config)
    words = [[f"--{name}={value}" for name, value in changes.items()] for changes in REFUSED.values()]
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import train
for words in {words}:
    print(train.main(["--config", {str(path)!r}, *words]))
"""
    caches = {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    with FakeHub(repositories, gated={"models/me/gated", "datasets/me/gated"}) as hub:
        environment = {**os.environ, **hub.environment, **caches}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\d$", done.stdout, re.M) == ["2"] * len(REFUSED)
    messages = done.stderr.strip().splitlines()
    assert len(messages) == len(REFUSED), done.stderr
    for (case, changes), message in zip(REFUSED.items(), messages):
        setting, name = next(iter(changes.items()))
        assert message.startswith("error: ") and name in message and "`hf auth login`" in message, case
        assert setting.split(".")[0] in message
        assert ("gated" in message.replace("private or gated", "").replace("me/gated", "")) == ("gated" in case), case
    assert not Done(0, "", tmp_path / "run").folder.exists()
