"""Hostile input bounces off: each bad config, file, model, checkpoint or launch ends with status 2 and one message.

A case names what is changed in a good config, and the words that its message must hold: what is wrong, where, and what
to write instead. TMP in a case stands for the test's own folder, DATA for the folder of shared inputs.
"""

import json
import re
import shutil
import time
import zipfile
from pathlib import Path

import helpers
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml
from filelock import FileLock
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

import train
from samerun.run.folder import RunFolder

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
GOOD = {
    "run.output_dir": "TMP/out",
    "run.max_steps": 4,
    "run.save_every": 2,
    "run.trackers": [],
    "batch.global_batch_size": 4,
    "batch.max_micro_batch_size": 4,
    "data.files": ["DATA/docs/*.txt"],
    "data.sequence_length": 32,
    "model.architecture": LLAMA,
}
HELD = []  # So that the locks last.
CASES = []
CONFIG = ["--config", "TMP/config.yaml"]


def architecture(**settings):
    return {"model.architecture": LLAMA | settings}


def case(name, changes, *words, make=lambda tmp, data: None, argv=CONFIG, env=None, text=None):
    CASES.append(pytest.param(changes, words, make, argv, env or {}, text, id=name.replace(" ", "-")))


def file(name, content=b""):
    return lambda tmp, data: (tmp / name).write_bytes(content)


def folder(name):
    return lambda tmp, data: (tmp / name).mkdir()


# The YAML file -------------------------------------------------------------------------------------------------------

case(
    "malformed yaml",
    {},
    'TMP/config.yaml", line 3, column 6',
    "expected ',' or ']'",
    text="run:\n  trackers: [a, b\nbatch:\n  x: 1\n",
)
case("tab in yaml", {}, 'TMP/config.yaml", line 2, column 1', "token", text="run:\n\tmax_steps: 3\n")
case(
    "duplicate key",
    {},
    'TMP/config.yaml", line 4',
    "max_steps",
    text="run:\n  max_steps: 3\n  seed: 1\n  max_steps: 4\n",
)
case("an alias in itself", {}, "an alias stands within", text="data: &a\n  x: *a\n")
case("brackets without end", {}, "nested too deeply", text=f"run: {'[' * 3000}{']' * 3000}\n")
for tagged in "!!bool x", "!!timestamp x", "!!float ''":
    case(f"tagged {tagged[2:6]}", {}, "TMP/config.yaml: a value is not of the kind", text=f"run: {tagged}\n")
case("too many minutes", {"run": {"timeout_minutes": 1e300}}, "run.timeout_minutes", "less than or equal to 1000000")
case("too long rows", {"data": {"sequence_length": 10**21}}, "data.sequence_length", "less than 2147483648")
case("config is a list", {}, "TMP/config.yaml: its top level must be sections", text="- run\n- batch\n")
case(
    "config is a list, and there is an override",
    {},
    "TMP/config.yaml: its top level must be sections",
    text="- run\n- batch\n",
    argv=[*CONFIG, "--run.seed", "1"],
)
case("config is a word", {}, "TMP/config.yaml: its top level must be sections", text="run\n")
case("config is empty", {}, "TMP/config.yaml", "exactly one of", text="")
case("config is binary", {}, "TMP/config.yaml", "utf-8", "save it as UTF-8", make=file("config.yaml", b"\xff\xfe"))
case("config has a control character", {}, "TMP/config.yaml", "characters", text="run:\n  max_steps: \x07\n")
case("config is missing", {}, "TMP/nope.yaml", "No such file", argv=["--config", "TMP/nope.yaml"])
case("config is a folder", {}, "TMP: Is a directory", argv=["--config", "TMP"])

# Keys and values -----------------------------------------------------------------------------------------------------

case("unknown section", {"optimizer.learning_rate": 0.1}, "optimizer: unknown key", "did you mean optim")
case(
    "unknown section of an override",
    {},
    "command line: optimizer: unknown key; did you mean optim",
    argv=[*CONFIG, "--optimizer.learning_rate", "3"],
)
case(
    "a section that lacks a setting",
    {"run.max_steps": None},
    "config.yaml: run: give",
    argv=[*CONFIG, "--run.seed", "3"],
)
case("unknown field", {"run.max_stepz": 5}, "run.max_stepz: unknown key", "did you mean run.max_steps")
case(
    "field of another section",
    {"run.learning_rate": 1e-4},
    "run.learning_rate: unknown key",
    "mean optim.learning_rate",
)
case(
    "unknown nested field",
    {"data.eval_source": {"fils": ["DATA/docs"]}},
    "data.eval_source.fils: unknown key; did you mean data.eval_source.files?",
)
case("a word that is a boolean", {}, "model.attention", "need quotes", argv=[*CONFIG, "--model.attention", "off"])
case("unlike any key", {"run.zzzzzz": 5}, "run.zzzzzz: unknown key")
case("own setting unlike any", {"own.zzzzzz": 1}, "own.zzzzzz: unknown key; python train.py --help lists them all")
case(
    "unknown field of a named source",
    {"data.eval_source": {"docs": {"fils": ["DATA/docs"]}}},
    "data.eval_source.docs.fils: unknown key; did you mean data.eval_source.docs.files?",
)
case("string for an integer", {"run.max_steps": "100"}, "run.max_steps", "integer", "'100'")
case("boolean for an integer", {"run.max_steps": True}, "run.max_steps", "integer", "True")
case("fraction for an integer", {"run.log_every": 1.5}, "run.log_every", "integer", "1.5")
case("integer for a boolean", {"run.keep_best": 1}, "run.keep_best", "boolean")
case("changes that are not named", {"run.allow_changes": True}, "run.allow_changes: Input", "valid list, not True")
case("changes of nothing", {"run.allow_changes": "optim.lr"}, "'optim.lr' is not a setting", "as optim.learning_rate")
case("string for a number", {"optim.learning_rate": "fast"}, "optim.learning_rate", "number", "'fast'")
case("infinity", {"optim.learning_rate": float("inf")}, "optim.learning_rate", "finite")
case("not a number", {"optim.weight_decay": float("nan")}, "optim.weight_decay", "finite")
case(
    "several wrong values",
    {"run.seed": -1, "optim.min_learning_rate_ratio": 1.5},
    "run.seed",
    "optim.min_learning_rate_ratio",
    "less than or equal to 1",
)
case("fewer than no steps", {"run.max_steps": -1}, "run.max_steps", "greater than or equal to 0")
case("sequence of one token", {"data.sequence_length": 1}, "data.sequence_length", "greater than or equal to 2")
case("unknown choice", {"optim.schedule": "cosin"}, "optim.schedule", "'cosine'", "'linear'", "'cosin'")
case("scalar for a section", {"batch": 16}, "batch:", "dictionary")
case("seed too large", {"run.seed": 2**70}, "run.seed", "less than")
case("empty prompt", {"data.eval_fraction": 0.1, "eval.prompts": ["def ", ""]}, "eval.prompts", "empty")
case("empty output_dir", {"run.output_dir": ""}, "run.output_dir")

# Fields that contradict each other -----------------------------------------------------------------------------------

case("no length", {"run.max_steps": None}, "run", "exactly one of", "max_steps", "max_epochs", "max_tokens")
case("two lengths", {"run.max_epochs": 1.0}, "run", "exactly one of", "max_steps", "max_epochs", "null")
case(
    "no batch", {"batch.global_batch_size": None}, "batch", "exactly one of", "global_batch_size", "global_batch_tokens"
)
case(
    "two batches",
    {"batch.global_batch_tokens": 64},
    "batch",
    "exactly one of",
    "global_batch_size",
    "global_batch_tokens",
    "null",
)
case("no model", {"model.architecture": None}, "model", "exactly one of", "pretrained", "architecture")
case("two models", {"model.pretrained": "DATA/model"}, "model", "exactly one of", "pretrained", "architecture", "null")
case(
    "tokens between multiples",
    {"batch.global_batch_size": None, "batch.global_batch_tokens": 100},
    "batch.global_batch_tokens 100",
    "data.sequence_length",
    "96 and 128",
)
case("fewer tokens than a row", {"batch.global_batch_size": None, "batch.global_batch_tokens": 20}, "multiple", "; 32 ")
case(
    "unknown key in the warm-up of the batch",
    {"batch.warmup": [{"steps": 1, "row": 2}]},
    "batch.warmup.0.row: unknown key; a stage has steps, rows, tokens",
)
case("warm-up of the batch without steps", {"batch.warmup": [{"rows": 2}]}, "batch.warmup.0.steps: Field required")
case("warm-up of the batch in pairs", {"batch.warmup": [[0, 2]]}, "batch.warmup.0", "dictionary", "[0, 2]")
case(
    "warm-up of the batch of nothing",
    {"batch.warmup": [{"steps": 1, "rows": 2}, {"steps": 1}]},
    "batch.warmup.1: give exactly one of rows, tokens",
)
case(
    "warm-up of the batch between multiples",
    {"batch.warmup": [{"steps": 1, "tokens": 100}]},
    "batch.warmup.0.tokens 100",
    "data.sequence_length",
    "96 and 128",
)
case(
    "warm-up of the batch as long as the run",
    {"batch.warmup": [{"steps": 3, "rows": 1}, {"steps": 1, "rows": 2}]},
    "batch.warmup: the global batch begins with step 5, and the run has 4",
)
case(
    "less data than the batch of a stage",
    {"batch.warmup": [{"steps": 1, "rows": 5000}]},
    "134 rows; lower the global batch of 5000",
)
case("no source", {"data.files": []}, "data", "exactly one of", "path", "files")
case("path and files", {"data.path": "DATA/docs"}, "data", "exactly one of", "path", "files")
case(
    "two evaluation sets",
    {"data.eval_fraction": 0.1, "data.eval_source": {"files": ["DATA/docs"]}},
    "data",
    "at most one of",
    "eval_fraction",
    "eval_source",
)
EVAL_SOURCE = {"files": ["DATA/docs"]}
case(
    "several evaluations beside a single one",
    {"data.eval_source": EVAL_SOURCE | {"docs": EVAL_SOURCE}},
    "data.eval_source: has files of a single source beside several",
    "put --data.eval_source null before",
)
case("evaluation of nothing", {"data.eval_source": {}}, "data.eval_source: give exactly one of path, files")
case(
    "one of several evaluations of nothing",
    {"data.eval_source": {"docs": EVAL_SOURCE, "none": {}}},
    "data.eval_source.none: give exactly one of path, files",
)
case(
    "one of several evaluations is null",
    {"data.eval_source": {"docs": EVAL_SOURCE, "none": None}},
    "data.eval_source.none",
    "dictionary",
)
case(
    "split of evaluation files",
    {"data.eval_source": {"docs": EVAL_SOURCE | {"split": "test"}}},
    "data.eval_source.docs.split go with data.eval_source.docs.path",
)
for name in "loss", "bits_per_byte", "files":
    case(
        f"evaluation called {name}",
        {"data.eval_source": {name: EVAL_SOURCE}},
        f"data.eval_source.{name}: is what a metric or a setting is called; take another name",
    )
for name in "a/b", "a.b", "a b":
    case(
        f"evaluation called {name}",
        {"data.eval_source": {name: EVAL_SOURCE}},
        f"data.eval_source.{name}: a name has only letters, digits, _ and -",
    )
case(
    "follow a name that is not there",
    {"data.eval_source": {"docs": EVAL_SOURCE, "more": EVAL_SOURCE}, "eval.follow": "doc"},
    "eval.follow 'doc': data.eval_source has docs, more",
)
case(
    "follow one of one",
    {"data.eval_source": EVAL_SOURCE, "eval.follow": "docs"},
    "eval.follow 'docs': data.eval_source has no names",
)
case(
    "missing file of an evaluation",
    {"data.eval_source": {"docs": EVAL_SOURCE, "more": {"files": "TMP/nope.txt"}}},
    "data.eval_source.more: data.files: nothing matches 'TMP/nope.txt'",
)
case(
    "best checkpoint without an evaluation",
    {"run.keep_best": True},
    "run.keep_best needs data.eval_fraction or data.eval_source",
)
case(
    "no step and no evaluation",
    {"run.max_steps": 0},
    "run.max_steps 0 only evaluates, and needs data.eval_fraction or data.eval_source",
)
case(
    "4 bits of another type than the launch",
    {"model.dtype": "float16", "model.load_in_4bit": True, "model.lora": {"r": 2, "target_modules": ["q_proj"]}},
    "model.load_in_4bit: with mixed_precision bf16, use model.dtype bfloat16",
    env={"ACCELERATE_MIXED_PRECISION": "bf16"},
)
case(
    "prompts without an evaluation", {"eval.prompts": ["a"]}, "eval.prompts need data.eval_fraction or data.eval_source"
)
case(
    "all weights in bfloat16",
    {"model.dtype": "bfloat16"},
    "model.dtype bfloat16",
    "frozen",
    "model.lora",
    "use float32",
)
case("patience without evaluation", {"run.patience": 2}, "run.patience needs data.eval_fraction or eval_source")
case(
    "patience without evaluations",
    {"run.patience": 2, "run.eval_every": 0, "data.eval_fraction": 0.1},
    "run.patience needs",
    "run.eval_every",
)
case("split of files", {"data.split": "validation"}, "data", "split", "files", "path")
case("warmup longer than the run", {"optim.warmup_steps": 5}, "optim.warmup_steps", "exceeds the run's 4 steps")
case(
    "warmup longer than the epochs",
    {"run.max_steps": None, "run.max_epochs": 0.1, "optim.warmup_steps": 500},
    "optim.warmup_steps",
    "exceeds",
    "steps",
)
case(
    "a run that would not learn",
    {"run.max_steps": None, "run.max_epochs": 1e-4, "optim.min_learning_rate_ratio": 0},
    "optim.min_learning_rate_ratio: the only step would have a learning rate of 0; take more steps, or a ratio above 0",
)
case("architecture without a type", {"model.architecture": {"hidden_size": 16}}, "model.architecture", "model_type")

# Data ----------------------------------------------------------------------------------------------------------------


def jsonl(*rows):
    return file("rows.jsonl", "".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows).encode())


def files(*contents):
    def make(tmp, data):
        (tmp / "many").mkdir()
        for number, content in enumerate(contents):
            (tmp / "many" / f"{number}.jsonl").write_text(f"{content}\n")

    return make


MIXED = pa.table({"input_ids": pa.array([[3, 4]] * 9, pa.large_list(pa.int64())), "labels": [[3, 4]] * 9})
FIXED = pa.table({"input_ids": pa.array([[1, 2]] * 9, pa.list_(pa.int32(), 2))})
USER = {"role": "user", "content": "a"}
ROWS = {"data.files": ["TMP/rows.jsonl"]}
TOKENS = ROWS | {"data.format": "tokens", "data.tokenizer": "bytes", "batch.global_batch_size": 1}
EVALUATE = TOKENS | {"data.files": "DATA/tokens.jsonl", "data.eval_source.files": "TMP/rows.jsonl"}
CHAT = ROWS | {"data.format": "chat", "data.chat_template": None, "batch.global_batch_size": 1}
TEMPLATE = CHAT | {"data.tokenizer": "DATA/tokenizer", "data.chat_template": "DATA/template.jinja"}

case(
    "missing file", {"data.files": ["DATA/docs/*.txt", "TMP/nope.txt"]}, "data.files", "nothing matches", "TMP/nope.txt"
)
case("glob without a match", {"data.files": "TMP/**/*.rst"}, "data.files", "nothing matches", "TMP/**/*.rst")
case(
    "folder without files",
    {"data.files": "TMP/empty"},
    "data.files",
    "nothing matches",
    "TMP/empty",
    make=folder("empty"),
)
case("everything left out", {"data.files": ["DATA/docs/*.txt", "!*docs*"]}, "data.files", "*docs*")
case("only patterns to leave out", {"data.files": ["!*.txt"]}, "data.files", "!*.txt")
case("file types mixed", {"data.files": ["DATA/docs/0.txt", "DATA/good.jsonl"]}, "data.files", ".txt", ".jsonl")
case("a file for a source", {"data.eval_source": "a.jsonl"}, "data.eval_source: a source is", "files: FILE")
case(
    "a file as path",
    {"data.files": [], "data.path": "TMP/rows.jsonl"},
    "data: cannot load TMP/rows.jsonl: it is a file; name it in the list `files`, in place of `path`",
    make=jsonl({"text": "a"}),
)
case("empty file", {"data.files": "TMP/empty.txt"}, "TMP/empty.txt: it is empty", make=file("empty.txt"))
case("empty table", ROWS, "data: cannot load TMP/rows.jsonl: it is empty", make=jsonl())
case("empty list", {"data.files": "TMP/a.json"}, "TMP/a.json: ", "it has no rows", make=file("a.json", b"[]"))
case(
    "broken jsonl",
    ROWS,
    "data: cannot load TMP/rows.jsonl: ",
    "line 3 is no JSON: Unterminated string starting at: character 10",
    make=jsonl({"text": "fine"}, "", '{"text": "cut of'),
)
case(
    "broken jsonl with several rows in a line",
    ROWS,
    "line 2 is no JSON: Unterminated string starting at: character 10",
    make=jsonl('{"text": "a"} {"text": "b"}', '{"text": "cut of'),
)
case(
    "broken json", ROWS | {"data.files": "TMP/a.json"}, "TMP/a.json", "line 2 column 2", make=file("a.json", b"[1,\n }")
)
case("a number for a row", ROWS, "TMP/rows.jsonl", "line 2 is 5, and no object", make=jsonl({"text": "fine"}, 5))
case(
    "not utf-8",
    {"data.files": "TMP/latin.txt"},
    "data",
    "TMP/latin.txt",
    "utf-8",
    make=file("latin.txt", "Müll".encode("latin-1") * 99),
)
case(
    "not utf-8 in a jsonl",
    ROWS,
    "data: cannot load TMP/rows.jsonl: ",
    "'text' of row 1, counted from 0, is not UTF-8",
    make=file("rows.jsonl", '{"text": "fine"}\n{"text": "Müll"}\n{"text": "fine"}\n'.encode("latin-1")),
)
case(
    "half of a surrogate pair in a long list",
    {"data.files": "TMP/a.json"},
    "'text' of row 1000, counted from 0, is not UTF-8, or half of a surrogate pair",
    make=file("a.json", json.dumps(["a"] * 1000 + ["\ud83d"]).encode()),
)
case(
    "not utf-8 in a chat",
    TEMPLATE,
    "data: cannot load TMP/rows.jsonl: ",
    "'messages' of row 0, counted from 0, is not UTF-8",
    make=file(
        "rows.jsonl",
        '{"messages": [{"role": "user", "content": "Müll"}, {"role": "assistant", "content": "b"}]}'.encode("latin-1"),
    ),
)
case(
    "unknown split",
    {"data.files": [], "data.path": "DATA/table", "data.split": "tran"},
    "data",
    "tran",
    "train",
    make=jsonl({"text": "a"}),
)
for setting in "data.name", "data.split":
    case(
        f"{setting} of a saved folder",
        {"data.files": [], "data.path": "TMP/saved", setting: "test"},
        "TMP/saved",
        "save_to_disk",
        "leave out name and split",
        make=lambda tmp, data: helpers.write_rows(tmp / "saved", [{"text": "a"}] * 9),
    )
case("unknown dataset folder", {"data.files": [], "data.path": "TMP/nope"}, "data", "TMP/nope")
case(
    "dataset name without network",
    {"data.files": [], "data.path": "nobody/nothing"},
    "data",
    "nobody/nothing",
    "check the name",
    "hf auth login",
    "local folder without network",
)
case(
    "wrong column",
    ROWS | {"data.column": "body"},
    "data.column",
    "'body'",
    "text, title",
    make=jsonl({"text": "a", "title": "b"}),
)
case(
    "one column twice",
    ROWS | {"data.column": ["text", "text"]},
    "text, text are not different",
    make=jsonl({"text": "a"}),
)
case("default column absent", ROWS, "data.column", "'text'", "the data has content", make=jsonl({"content": "a"}))
case(
    "null text",
    ROWS,
    "data.column: 2 of 4 rows are null in 'text'",
    "the first is row 1",
    "data.drop_nulls: true",
    make=jsonl({"text": "a"}, {"text": None}, {"text": "b"}, {"text": None}),
)
case(
    "one bad file of many",
    {"data.files": "TMP/many/*.jsonl"},
    "cannot load TMP/many/2.jsonl: ",
    "line 2 is no JSON",
    make=files('{"text": "a"}', '{"text": "b"}', '{"text": "c"}\n{"text": "d', '{"text": "e'),
)
case(
    "files of other columns",
    {"data.files": "TMP/many/*.jsonl"},
    "cannot load TMP/many/0.jsonl together with TMP/many/2.jsonl",
    "the columns are body, and before they were text",
    make=files('{"text": "a"}', '{"text": "b"}', '{"body": "c"}', '{"text": "d"}'),
)
case(
    "the last file of other columns",
    {"data.files": "TMP/many/*.jsonl"},
    "0.jsonl together with TMP/many/3.jsonl",
    make=files('{"text": "a"}', '{"text": "b"}', '{"text": "c"}', '{"body": "d"}'),
)
case("chat for text", ROWS, "data.column", "'text'", "data.format chat", make=jsonl({"text": [USER]}))
case("numbers for text", ROWS, "data", "'text'", "text", make=jsonl({"text": 1}, {"text": 2}))
case(
    "chat without a template",
    CHAT | {"data.tokenizer": "DATA/tokenizer"},
    "data.chat_template: null, and DATA/tokenizer has none; name a file, such as configs/chat_template.jinja",
    make=jsonl({"messages": [{"role": "user", "content": "a"}]}),
)
case(
    "chat template missing",
    CHAT | {"data.chat_template": "TMP/nope.jinja"},
    "data.chat_template: cannot read TMP/nope.jinja from TMP",
    "No such file",
    make=jsonl({"messages": []}),
)
case(
    "chat template broken",
    TEMPLATE | {"data.chat_template": "DATA/broken.jinja"},
    "data",
    "TemplateSyntaxError",
    "unexpected '}'",
    make=jsonl({"messages": [{"role": "user", "content": "a"}]}),
)
case(
    "unknown speaker",
    TEMPLATE | {"data.eval_fraction": 0.5},  # The number is that of the file all the same.
    "messages",
    "row 3, counted from 0",
    "'alien'",
    "human, gpt",
    make=jsonl(*[{"messages": [{"from": name, "value": "a"}]} for name in ("gpt", "gpt", "gpt", "alien")]),
)
SAID = '{"messages": [{"from": "gpt", "value": "a"}]}'
case(
    "unknown speaker in one of several files",
    TEMPLATE | {"data.files": "TMP/many", "data.eval_fraction": 0.5},
    "messages",
    "row 1, counted from 0, of TMP/many/2.jsonl: ",
    "'alien'",
    make=files(f"{SAID}\n{SAID}\n{SAID}", "", f"{SAID}\n{SAID.replace('gpt', 'alien')}\n{SAID}"),
)
case(
    "null in one of several files",
    {"data.files": "TMP/many"},
    "1 of 5 rows are null in 'text'",
    "the first is row 0, counted from 0, of TMP/many/1.jsonl",
    make=files('{"text": "a"}\n' * 3, '{"text": null}\n{"text": "a"}', ""),
)


def archive(tmp, data):
    """Of two files. After it is an empty one, so that there are two names, and two files with rows."""
    (tmp / "many").mkdir()
    (tmp / "many" / "1.jsonl").touch()
    with zipfile.ZipFile(tmp / "many" / "0.jsonl.zip", "w") as packed:
        packed.writestr("a.jsonl", '{"text": "a"}\n')
        packed.writestr("b.jsonl", '{"text": null}\n')


case("null in a file of an archive", {"data.files": "TMP/many"}, "the first is row 1, counted from 0.", make=archive)
case(
    "labels of other length in one of several files",
    TOKENS | {"data.files": "TMP/many"},
    "differ in length in row 1, counted from 0, of TMP/many/1.jsonl",
    make=files(
        '{"input_ids": [1], "labels": [1]}', '{"input_ids": [], "labels": []}\n{"input_ids": [1], "labels": []}'
    ),
)
case(
    "chat that its template refuses",
    TEMPLATE | {"data.chat_template": "DATA/strict.jinja"},
    "row 1, counted from 0: TemplateError: no system",
    make=jsonl({"messages": [USER]}, {"messages": [USER | {"role": "system"}]}),
)
case("chat without a role", TEMPLATE, "row 1", "no role", make=jsonl({"messages": [USER]}, {"messages": [{"a": "b"}]}))
case(
    "chat of an Assistant",
    TEMPLATE,
    "row 1",
    "a message has the role 'Assistant'; write 'assistant'",
    make=jsonl({"messages": [USER]}, {"messages": [USER, {"role": "Assistant", "content": "b"}]}),
)
case(
    "chat of numbers",
    TEMPLATE,
    "row 1",
    "a message has the content 4, which is no text",
    make=jsonl({"messages": [USER]}, {"messages": [USER, {"role": "assistant", "content": 4}]}),
)
case(
    "a chat template for images",
    TEMPLATE | {"data.chat_template": "DATA/images.jinja"},
    "data.chat_template: it leaves out what is said by user and assistant",
    make=jsonl({"messages": [USER]}),
)
case(
    "chat with a mapping for a content",
    TEMPLATE,
    "row 1",
    "the content {'ok': True}, which is no text; quote it",
    make=jsonl({"messages": [USER]}, {"messages": [USER, {"role": "assistant", "content": {"ok": True}}]}),
)
for messages in "hello", {"role": "user"}, 5, ["a"]:
    case(
        f"{messages} for messages",
        TEMPLATE,
        f"data.column: 'messages' holds {json.dumps(messages)} in row 1, counted from 0, not lists of role and content",
        make=jsonl({"messages": [USER]}, {"messages": messages}),
    )
case("a text for a message", TEMPLATE, "row 0", "a message is 'a'", make=jsonl({"messages": [USER, "a"]}))
case(
    "a number among tokens that is none",
    TOKENS,
    "'input_ids' holds [1, 1.5] in row 2, counted from 0, not lists of integers",
    make=jsonl(*[{"input_ids": [1, 2]}] * 2, {"input_ids": [1, 1.5]}),
)
case("too large a token", TOKENS, "[18446744073709551616] in row 0", make=jsonl({"input_ids": [2**64]}))
case("a key twice", ROWS, "line 2: 'text' is there twice", make=jsonl({"text": "a"}, '{"text": "a", "text": "b"}'))
case("labels for tokens", TOKENS | {"data.column": "labels"}, "labels, labels", make=jsonl({"labels": [1, 2]}))
case(
    "a role is a number",
    TEMPLATE,
    "row 1, counted from 0: a message has the role 5, which is no text",
    make=jsonl({"messages": [USER]}, {"messages": [USER | {"role": 5}]}),
)
case(
    "a message is from a list",
    TEMPLATE,
    "row 1, counted from 0: a message is from ['human'], which is none of human",
    make=jsonl({"messages": [USER]}, {"messages": [{"from": ["human"], "value": "a"}]}),
)
case("a null message", TEMPLATE, "row 1", "no role", make=jsonl({"messages": [USER]}, {"messages": [USER, None]}))
case("no messages", TEMPLATE, "row 1", "no messages", make=jsonl({"messages": [USER]}, {"messages": []}))
case("messages are text", TEMPLATE, "data", "'messages'", "role", make=jsonl({"messages": "hello"}))
case(
    "messages without a role",
    TEMPLATE,
    "data: cannot use messages as chat: row 0, counted from 0: ",
    "a message has speaker, says, and no role",
    make=jsonl({"messages": [{"speaker": "human", "says": "hello"}]}),
)
case(
    "tokenizer that cannot tell who speaks",
    TEMPLATE | {"data.tokenizer": "TMP/slow"},
    "TMP/slow is not a fast tokenizer; only fast ones tell the assistant's tokens; name another one",
    make=lambda tmp, data: (
        transformers.ByT5Tokenizer().save_pretrained(tmp / "slow"),
        jsonl({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})(tmp, data),
    ),
)
case(
    "nobody answers",
    TEMPLATE,
    "no target",
    "roles",
    make=jsonl(*[{"messages": [{"role": "user", "content": "a"}]}] * 9),
)
for name, lines in {
    "a comma without quotes": "id,text\n1,Hello, world\n2,Bye, all\n",
    "a comma without quotes in the only column": "text\none, two\nthree, four\n",
    "a comma without quotes in one row": "text\none, two\nthree\n",
}.items():
    case(
        name,
        ROWS | {"data.files": "TMP/rows.csv"},
        "data: cannot load TMP/rows.csv",
        "Length of header",
        make=lambda tmp, data, lines=lines: (tmp / "rows.csv").write_text(lines),
    )
case(
    "a table without rows",
    ROWS | {"data.files": "TMP/rows.csv"},
    "data: cannot load TMP/rows.csv: it has no rows",
    make=lambda tmp, data: (tmp / "rows.csv").write_text("text\n"),
)
case("tokens are text", TOKENS, "data", "'input_ids'", "integers", make=jsonl(*[{"input_ids": "abc"}] * 9))
case(
    "tokens are lists of text", TOKENS, "data", "'input_ids'", "integers", make=jsonl(*[{"input_ids": ["a", "b"]}] * 9)
)
case("tokens are fractions", TOKENS, "data", "'input_ids'", "integers", make=jsonl(*[{"input_ids": [0.5, 1.5]}] * 9))
case(
    "null tokens", TOKENS, "data", "'input_ids'", "null", make=jsonl(*[{"input_ids": [1, 2]}] * 9, {"input_ids": None})
)
case("null among tokens", TOKENS, "data", "'input_ids'", "null", make=jsonl(*[{"input_ids": [1, None, 2]}] * 9))
for packing in "concat", "best_fit":
    case(
        f"labels of other length with {packing}",
        TOKENS | {"data.packing": packing},
        "data",
        "input_ids and labels differ in length in row 2, counted from 0",
        make=jsonl(*[{"input_ids": [1, 2], "labels": [1, 2]}] * 2, *[{"input_ids": [1, 2], "labels": [1]}] * 9),
    )
case(
    "no targets",
    TOKENS,
    "no target",
    "labels",
    make=jsonl(*[{"input_ids": [1, 2], "labels": [-100] * 2}] * 9),
)
for table, kinds in (FIXED, "fixed_size_list"), (MIXED, "large_list and list"):
    case(
        f"best_fit of {kinds}",
        TOKENS | {"data.files": "TMP/rows.parquet", "data.packing": "best_fit"},
        "data.packing best_fit",
        f"not {kinds}; use concat or none",
        make=lambda tmp, data, table=table: pq.write_table(table, tmp / "rows.parquet"),
    )
case("rows of one token", TOKENS | {"data.packing": "none"}, "no target", make=jsonl(*[{"input_ids": [1]}] * 9))
case("token beyond the vocabulary", TOKENS, "999", "vocabulary", "383", make=jsonl(*[{"input_ids": [1, 999]}] * 9))
case(
    "vocabulary smaller than the tokenizer's",
    architecture(vocab_size=10),
    "model: cannot build llama: its vocab_size 10 is less than the 384 of the tokenizer",
)
PADDED = LLAMA | {"model_type": "gemma3_text", "head_dim": 8, "vocab_size": 384, "pad_token_id": 500}
case(
    "a pad token beyond the vocabulary of the text",
    {"model.architecture": {"model_type": "gemma3", "text_config": PADDED}},
    "model: cannot build gemma3: AssertionError: Padding_idx must be within num_embeddings",
)
case(
    "a model without sdpa",
    architecture(model_type="gemma2", head_dim=16),
    "model: cannot build gemma2: transformers has no sdpa for it; give model.attention: eager",
)
case("negative token", TOKENS, "-7", "vocabulary", make=jsonl(*[{"input_ids": [1, -7]}] * 9))
case(
    "mask among the tokens",
    TOKENS,
    "-100 among its input_ids",
    "-100 in labels",
    make=jsonl(*[{"input_ids": [1, -100, 2]}] * 9),
)
case(
    "token beyond the vocabulary in the evaluation data",
    EVALUATE,
    "the evaluation data has the token id 999",
    "vocabulary is 0 to 383",
    make=jsonl({"input_ids": [1, 2]}, {"input_ids": [1, 999]}),
)
case(
    "tokens and a model of unknown vocabulary",
    TOKENS | {"data.tokenizer": None},
    "model.architecture",
    "vocab_size",
    "data.tokenizer",
)
case(
    "tokens and prompts without a tokenizer",
    TOKENS | {"data.tokenizer": None, "data.eval_fraction": 0.5, "eval.prompts": ["a"]},
    "eval.prompts need data.tokenizer",
)
case(
    "label beyond the vocabulary",
    TOKENS,
    "999",
    "vocabulary",
    make=jsonl(*[{"input_ids": [1, 2], "labels": [1, 999]}] * 9),
)
case(
    "negative label",
    TOKENS,
    "-5 among its labels",
    "-100 in labels",
    make=jsonl(*[{"input_ids": [1, 2], "labels": [1, -5]}] * 9),
)
case(
    "evaluation without targets",
    EVALUATE,
    "data.eval_source",
    "no target",
    make=jsonl({"input_ids": [1, 2], "labels": [-100, -100]}),
)
case(
    "one of several evaluations without targets",
    TOKENS
    | {"data.files": "DATA/tokens.jsonl", "data.packing": "none", "eval.max_rows": 1}
    | {"data.eval_source": {"tokens": {"files": "DATA/tokens.jsonl"}, "rows": {"files": "TMP/rows.jsonl"}}},
    "data.eval_source.rows",
    "no target token",
    make=jsonl({"input_ids": [1, 2], "labels": [-100, -100]}, {"input_ids": [1, 2], "labels": [1, 2]}),
)
case(
    "no targets among the rows to evaluate on",
    TOKENS
    | {"data.files": "DATA/tokens.jsonl", "data.eval_source.files": "TMP/rows.jsonl"}
    | {"data.packing": "none", "eval.max_rows": 1},
    "data.eval_source",
    "no target",
    make=jsonl({"input_ids": [1, 2], "labels": [-100, -100]}, {"input_ids": [1, 2], "labels": [1, 2]}),
)
case("less data than a batch", {"batch.global_batch_size": 5000}, "data", "5000", "134 rows", "lower the global batch")
case(
    "one document",
    ROWS | {"data.eval_fraction": 0.5},
    "data.eval_fraction",
    "0.5 of 1 documents",
    "data.eval_source",
    make=jsonl({"text": "a" * 500}),
)
case(
    "one document, twice",
    ROWS | {"data.eval_fraction": 0.5},
    "data.eval_fraction: all documents are the same as some that are held out",
    make=jsonl(*[{"text": "a" * 500}] * 2),
)

# Tokenizers and models -----------------------------------------------------------------------------------------------

PRETRAINED = {"model.architecture": None, "model.pretrained": "TMP/model", "data.tokenizer": "bytes"}


def model_folder(**files):
    """A copy of the good model; files by stem: their content, or None to remove them."""

    def make(tmp, data):
        shutil.copytree(data / "model", tmp / "model")
        for path in (tmp / "model").iterdir():
            if path.stem in files:
                path.unlink() if files[path.stem] is None else path.write_bytes(files[path.stem])

    return make


def half_a_model(tmp, data):
    model = transformers.AutoModelForCausalLM.from_pretrained(data / "model")
    model.save_pretrained(tmp / "model", state_dict={k: v for k, v in model.state_dict().items() if "mlp" not in k})


def model_with_code(tmp, data):
    model_folder(config=json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}).encode())(tmp, data)
    (tmp / "model" / "own.py").write_text(f"open({str(tmp / 'executed')!r}, 'w')\nclass Own: pass\n")


def adapter(tmp, data):
    (tmp / "model").mkdir()
    (tmp / "model" / "adapter_config.json").write_text("{}")


case("tokenizer folder missing", {"data.tokenizer": "./TMP/nope"}, "data.tokenizer", "TMP/nope", "folder")
case("tokenizer folder empty", {"data.tokenizer": "TMP/empty"}, "data.tokenizer", "TMP/empty", make=folder("empty"))
case(
    "tokenizer that draws random numbers",
    {"data.tokenizer": "TMP/random"},
    "data.tokenizer",
    "cannot load TMP/random: it draws random numbers; set dropout to null in its tokenizer.json",
    make=lambda tmp, data: transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.1))
    ).save_pretrained(tmp / "random"),
)
case(
    "tokenizer without network",
    {"data.tokenizer": "nobody/nothing"},
    "data.tokenizer",
    "nobody/nothing",
    "check the name",
    "hf auth login",
    "local folder without network",
)
case("unknown model type", architecture(model_type="lama"), "model", "has no model_type lama; near are ['llama', ")
case("not a causal model", {"model.architecture": {"model_type": "vit"}}, "model", "vit", "causal")
case(
    "unknown architecture setting",
    architecture(num_layer=2),
    "model.architecture",
    "llama has no setting num_layer",
    "num_hidden_layers",
)
case(
    "setting that only a rotary embedding reads",
    architecture(model_type="gpt_neox", head_dim=32),
    "model.architecture",
    "gpt_neox has no setting head_dim",
)
case("type in the architecture", architecture(dtype="bfloat16"), "model.architecture", "dtype", "model.dtype")
case(
    "a loss of the routers in the architecture",
    architecture(model_type="qwen3_moe", router_aux_loss_coef=0.01),
    "model.architecture",
    "router_aux_loss_coef has no effect here; give model.balance_loss",
)
case(
    "attention in the architecture", architecture(attn_implementation="eager"), "model.architecture", "model.attention"
)
case(
    "unknown setting of the rope",
    architecture(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "beta_fats": 2}),
    "the rope of llama has no setting beta_fats",
    "beta_fast",
)
case(
    "unknown setting of a part",
    {"model.architecture": {"model_type": "gemma3", "text_config": {"hidden_sise": 32}}},
    "text_config has no setting hidden_sise",
    "hidden_size",
)
case("wrong type in the architecture", architecture(hidden_size="big"), "model", "hidden_size", "int")
case("no gradients on a CPU", {"model.attention": "flex_attention"}, "model.attention flex_attention", "use sdpa")
case("heads do not divide", architecture(num_attention_heads=3), "model", "16", "3", "heads")
case(
    "key heads do not divide",
    architecture(num_attention_heads=4, num_key_value_heads=3, hidden_size=16),
    "model.architecture",
    "4",
    "3",
    "num_key_value_heads",
)
case(
    "sequence beyond the positions", architecture(max_position_embeddings=16), "data.sequence_length 32", "16 positions"
)
TEXT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
TEXT |= {"num_key_value_heads": 1, "vocab_size": 384}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
case(
    "sequence beyond the positions of the text",
    {
        "model.architecture": {
            "model_type": "gemma3",
            "text_config": TEXT | {"max_position_embeddings": 16},
            "vision_config": VISION,
        }
    },
    "data.sequence_length 32",
    "16 positions",
)
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40}
PROMPT = {"data.eval_fraction": 0.1, "eval.prompts": ["abc"]}
case(
    "sequence beyond the positions by their own name",
    {"model.architecture": GPT2, "data.sequence_length": 64},
    "data.sequence_length 64",
    "40 positions",
)
case(
    "prompt beyond learned positions",
    PROMPT | {"model.architecture": GPT2, "eval.max_new_tokens": 39},
    "eval.prompts",
    "3 tokens of 'abc' and 39 more",
    "positions",
    "eval.max_new_tokens",
)
case(
    "prompt beyond the vocabulary",
    EVALUATE | {"model.architecture": LLAMA | {"vocab_size": 50}, "eval.prompts": ["abc"]},
    "eval.prompts: 'abc' has the token id 102",  # The byte 99 of c, after the three special tokens.
    "vocabulary is 0 to 49",
    "data.tokenizer",
    make=jsonl({"input_ids": [1, 2]}),
)
case("model folder missing", PRETRAINED, "model", "TMP/model", "folder")
case("model folder empty", PRETRAINED, "model", "TMP/model", make=folder("model"))
case(
    "model without a tokenizer",
    PRETRAINED | {"data.tokenizer": None},
    "data.tokenizer",
    "cannot load TMP/model",
    make=model_folder(),
)
case(
    "model without network",
    PRETRAINED | {"model.pretrained": "nobody/nothing"},
    "model",
    "nobody/nothing",
    "check the name",
    "hf auth login",
    "local folder without network",
)
case("no such model folder", PRETRAINED | {"model.pretrained": "runs/no/model"}, "there is no folder runs/no/model")
case("model config is no json", PRETRAINED, "model", "TMP/model", "json", make=model_folder(config=b"{"))
case("model without weights", PRETRAINED, "model", "TMP/model", "safetensors", make=model_folder(model=None))
case("model weights cut short", PRETRAINED, "model", "TMP/model", make=model_folder(model=b"\x10\0\0\0\0\0\0\0{"))
case("model is an adapter", PRETRAINED, "model.pretrained", "adapter", "merge", make=adapter)
case("model weights incomplete", PRETRAINED, "model", "TMP/model", "mlp", make=half_a_model)
case("model with its own code", PRETRAINED, "model", "TMP/model", "trust_remote_code", make=model_with_code)
case(
    "model positions",
    PRETRAINED | {"data.sequence_length": 64},
    "data.sequence_length 64",
    "32 positions",
    make=model_folder(),
)
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
case(
    "rope of the longest row",
    architecture(model_type="phi3", pad_token_id=0, original_max_position_embeddings=16, rope_parameters=LONGROPE),
    "longrope",
    "batch.max_micro_batch_size: 1",
    "data.sequence_length to at most 16",
)
case(
    "rope of the longest row in some layers",
    architecture(
        model_type="gemma3_text",
        head_dim=8,
        rope_parameters={
            "full_attention": LONGROPE | {"factor": 2.0, "original_max_position_embeddings": 16},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "longrope",
    "batch.max_micro_batch_size: 1",
    "data.sequence_length to at most 16",
)
case("lora target", {"model.lora.target_modules": ["q_proj", "nope_proj"]}, "model.lora: target_modules", "nope_proj")
case(
    "lora of two layers at once",
    {"model.lora": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}},
    "model.lora: ensure_weight_tying",
    "leave it out",
)
case(
    "lora saves no such layer",
    {"model.lora": {"target_modules": ["q_proj"], "modules_to_save": "lm_hed"}},
    "model.lora: modules_to_save",
    "lm_hed",
    "leave it out",
)
case(
    "lora rank of no matrix",
    {"model.lora": {"target_modules": ["q_proj"], "rank_pattern": {"qproj": 2}}},
    "model.lora: rank_pattern",
    "nothing that gets an adapter is called qproj; leave it out",
)
case(
    "lora rank of a matrix without an adapter",
    {"model.lora": {"target_modules": ["q_proj"], "alpha_pattern": {"k_proj": 2}}},
    "model.lora: alpha_pattern",
    "nothing that gets an adapter is called k_proj; leave it out",
)
case(
    "lora excludes no matrix",
    {"model.lora": {"target_modules": ["q_proj"], "exclude_modules": ["k_prj"]}},
    "model.lora",
    "exclude_modules={'k_prj'} but no modules were excluded",
)
case(
    "lora of no experts",
    {"model.lora": {"target_modules": ["q_proj"], "target_parameters": ["experts.up"]}},
    "model.lora",
    "target_parameters=['experts.up'] were set but no parameter was matched",
)
case(
    "lora of no layer",
    {"model.lora": {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]}},
    "model.lora: layers_to_transform",
    "no layer has the number [2]; the first one is 0",
)
case(
    "lora of no number",
    {"model.lora": {"target_modules": "all-linear", "lora_alpha": "x"}},
    "model.lora: TypeError",
)
case(
    "lora that is not trained",  # Only the biases are.
    architecture(attention_bias=True)
    | {"model.lora": {"target_modules": "all-linear", "inference_mode": True, "bias": "all"}},
    "model.lora",
    "leave out inference_mode",
)
case(
    "lora times 0",
    {"model.lora": {"target_modules": "all-linear", "lora_alpha": 0}},
    "model.lora",
    "a lora_alpha of 0",
)
case(
    "lora without targets",  # Those of an Olmo are not known to peft.
    architecture(model_type="olmo2") | {"model.lora": {}},
    "model",
    "olmo2",
    "specify",
    "target_modules",
)
case("unknown attention", {"model.attention": "flash"}, "model", "attn_implementation", "flash", "sdpa")
case("attention not installed", {"model.attention": "flash_attention_2"}, "model", "FlashAttention2", "installed")

# The run folder and checkpoints --------------------------------------------------------------------------------------


def hold_lock(tmp, data):
    HELD.append(FileLock(tmp / "out" / ".lock"))
    HELD[-1].acquire()


def trained(edit=lambda folder: None):
    """The run folder of a finished run, as output_dir."""

    def make(tmp, data):
        shutil.rmtree(tmp / "out")
        shutil.copytree(data / "trained", tmp / "out")
        for folder in (tmp / "out" / "checkpoints").iterdir():
            edit(folder)

    return make


def edit_manifest(config=(), **entries):
    def edit(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["config"].update(config)
        (folder / "manifest.json").write_text(json.dumps(manifest | entries))

    return edit


def as_shuffled_by_numpy(folder):
    """The manifest as it was when numpy shuffled: it does not name the order, and has another fingerprint."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["config"]["order of the rows"]
    manifest["config"]["data fingerprint"] = 1
    (folder / "manifest.json").write_text(json.dumps(manifest))


case(
    "output_dir on object storage", {"run.output_dir": "s3://bucket/x"}, "run.output_dir: s3://bucket/x is not a folder"
)
case("output_dir is a file", {"run.output_dir": "TMP/file"}, "run.output_dir", "TMP/file", make=file("file"))
case(
    "output_dir below a file",
    {"run.output_dir": "TMP/file/out"},
    "run.output_dir",
    "TMP/file/out",
    "directory",
    make=file("file"),
)
case("output_dir cannot be made", {"run.output_dir": "/proc/out"}, "run.output_dir /proc/out")


def no_run(config):
    """The run folder is none of ours: there is a config, or there are metrics."""

    def make(tmp, data):
        (tmp / "out" / "status.json").unlink()
        if config:
            (tmp / "out" / "metrics.jsonl").write_text("")  # Has nothing to lose.
            shutil.copy(tmp / "config.yaml", tmp / "out")

    return make


case(
    "output_dir with the config",
    {},
    "run.output_dir: TMP/out/config.yaml is not of this run",
    "choose a new run.output_dir",
    make=no_run(config=True),
    argv=["--config", "TMP/out/config.yaml"],
)
case(
    "output_dir with other metrics",
    {},
    "run.output_dir: TMP/out/metrics.jsonl is not of this run",
    "choose a new run.output_dir",
    make=no_run(config=False),
)


def no_checkpoints(make):
    return lambda tmp, data: make(tmp / "out" / "checkpoints")


case(
    "checkpoints is a file",
    {},
    "TMP/out/checkpoints is neither a folder",
    make=no_checkpoints(lambda path: path.write_text("")),
)
case(
    "checkpoints leads nowhere",
    {},
    "TMP/out/checkpoints is neither a folder nor a link to one",
    make=no_checkpoints(lambda path: path.symlink_to("nowhere")),
)
case("output_dir in use", {}, "run.output_dir", "TMP/out", "in use by another run", "choose another", make=hold_lock)
case("unknown tracker", {"run.trackers": ["wandbb"]}, "run.trackers", "wandbb", "tensorboard")
case("tracker not installed", {"run.trackers": ["dvclive"]}, "run.trackers", "dvclive", "install")
case("resume path missing", {"run.resume": "TMP/nope"}, "TMP/nope/manifest.json", "No such file")
case(
    "resume path of another step",
    {"run.resume": "DATA/trained/checkpoints/step-00000005"},
    "there is no DATA/trained/checkpoints/step-00000005; beside it are others, such as DATA/trained/checkpoints/step-0",
)
case("resume path foreign", {"run.resume": "DATA/docs"}, "DATA/docs/manifest.json", "No such file")
case("resume from a model", {"run.resume": "DATA/model"}, "DATA/model is a model, not a checkpoint")
case(
    "resume from a run folder",
    {"run.resume": "DATA/trained"},
    "DATA/trained is not a checkpoint, but has some; give one of them, such as DATA/trained/checkpoints/step-00000004",
)
case(
    "weights from a folder of checkpoints",
    {"run.init_from": "DATA/trained/checkpoints"},
    "give one of them, such as DATA/trained/checkpoints/step-00000004",
)
case(
    "foreign manifest",
    {},
    "TMP/out/checkpoints/step-0000000",
    "manifest.json",
    make=trained(edit_manifest(files=["model.bin"])),
)
case(
    "never resume", {"run.resume": "never"}, "run.resume is never", "TMP/out", "another run.output_dir", make=trained()
)
case(
    "checkpoint of another model",
    architecture(hidden_size=32),
    "model.architecture.hidden_size: 16 in the checkpoint, 32 now",
    "allow_changes",
    "new run.output_dir",
    make=trained(),
)
case(
    "resume path of another model",
    architecture(hidden_size=32) | {"run.resume": "DATA/trained/checkpoints/step-00000004"},
    "model.architecture.hidden_size: 16",
    "DATA/trained/checkpoints/step-00000004",
    "run.init_from",
)
case(
    "another model all the same",
    architecture(hidden_size=32) | {"run.allow_changes": "model.architecture", "run.max_steps": 8},
    "step-00000004",
    "another model",
    make=trained(),
)
case(
    "changed mathematics",
    {"batch.global_batch_size": 5, "data.sequence_length": 16, "run.seed": 1, "optim.learning_rate": 1e-5},
    "batch.global_batch_size: 4 in the checkpoint, 5 now",
    "data.sequence_length: 32",
    "run.seed: 0",
    "optim.learning_rate",
    "--run.allow_changes '[run.seed, batch.global_batch_size, data.sequence_length, optim.learning_",
    "new run.output_dir",
    make=trained(),
)
case(
    "rows in another order",
    {"run.max_steps": 6},
    "Finish the run with the version of the script that began it",
    "new run.output_dir",
    "--run.allow_changes '[data fingerprint, order of the rows]'",
    make=trained(as_shuffled_by_numpy),
)
case(
    "changed data",
    {"run.max_steps": 6},
    "data fingerprint: 1 in the checkpoint",
    "step-00000004",
    "--run.allow_changes '[data fingerprint]'",
    "new run.output_dir",
    make=trained(edit_manifest({"data fingerprint": 1})),
)
case(
    "shorter than what is done",
    {"run.max_steps": 3},
    "run.max_steps",
    "would end after step 3",
    "TMP/out/checkpoints/step-00000004 is of a later one",
    "at least 4 steps",
    "new run.output_dir",
    make=trained(),
)
case(
    "init_from of a model",
    {"run.init_from": "DATA/model"},
    "DATA/model is a model, not a checkpoint",
    "model.pretrained",
)
case(
    "init_from of an exported adapter",
    {"run.init_from": "TMP/model"},
    "TMP/model is an exported adapter; give a checkpoint of its run",
    make=adapter,
)
case("init_from missing", {"run.init_from": "TMP/nope"}, "TMP/nope/manifest.json", "No such file")
case(
    "init_from of a run that began with other weights",
    {"run.init_from": "DATA/trained/checkpoints/step-00000004"},
    "run.init_from: None in the checkpoint, 'DATA/trained/checkpoints/step-00000004' now",
    "new run.output_dir",
    make=trained(),
)
case(
    "init_from of a wider model",
    architecture(hidden_size=32) | {"run.init_from": "DATA/trained/checkpoints/step-00000004"},
    "DATA/trained/checkpoints/step-00000004 is of another model",
)
case(
    "init_from of a shallower model",
    architecture(num_hidden_layers=2) | {"run.init_from": "DATA/trained/checkpoints/step-00000004"},
    "DATA/trained/checkpoints/step-00000004 is of another model",
    "layers.1",
)
case(
    "init_from of a deeper model",
    {"run.init_from": "DATA/deeper/checkpoints/step-00000001"},
    "DATA/deeper/checkpoints/step-00000001 is of another model",
    "layers.1",
)

# The command line and the launch -------------------------------------------------------------------------------------

case("no arguments", {}, "--config FILE", argv=[])
case("two configs", {}, "one --config FILE", argv=["--config", "DATA/trained.yaml", *CONFIG])
case("option without a value", {}, "--run.max_steps", "no value; write null", argv=[*CONFIG, "--run.max_steps"])
case("option with an unset variable", {}, "--run.resume", "no value; write null", argv=[*CONFIG, "--run.resume", ""])
case("stray word", {}, "fast", "--section.field VALUE", argv=[*CONFIG, "fast"])
case("unknown override", {}, "unknown key", "did you mean run.max_steps", argv=[*CONFIG, "--run.max_step", "3"])
case(
    "abbreviated override",
    {},
    "command line: max_steps: unknown key",
    "did you mean run.max_steps",
    argv=[*CONFIG, "--max_steps", "3"],
)
case(
    "override of a wrong type",
    {},
    "command line: run.max_steps",
    "integer",
    "'ten'",
    argv=[*CONFIG, "--run.max_steps", "ten"],
)
case(
    "override that needs another setting",
    {},
    "command line: run.keep_best needs data.eval_fraction or data.eval_source",
    argv=[*CONFIG, "--run.keep_best", "true"],
)
case("override is no yaml", {}, "--data.files", argv=[*CONFIG, "--data.files", "[a"])
case("override below a field", {}, "run.max_steps", "integer", argv=[*CONFIG, "--run.max_steps.more", "3"])
case("plan without counts", {}, "--plan", argv=[*CONFIG, "--plan"])
case("plan for no process", {}, "--plan", "at least 1", argv=[*CONFIG, "--plan", "2", "0"])
case("plan and prepare", {}, "one of --plan, --prepare", argv=[*CONFIG, "--plan", "2", "--prepare"])
case("plan for a word", {}, "many", argv=[*CONFIG, "--plan", "2", "many"])
case("plan for half a process", {}, "1.5", argv=[*CONFIG, "--plan", "2", "1.5"])
case(
    "processes without groups",
    {},
    "launch: parallelism_config_sp_size 2",
    "does not divide the 3 processes",
    argv=[*CONFIG, "--plan", "3"],
    env={"PARALLELISM_CONFIG_SP_SIZE": "2"},
)
case(
    "wrong in the file, beside an override of almost this name",
    {"run.seeds": 1},
    "TMP/config.yaml: run.seeds: unknown key",
    argv=[*CONFIG, "--run.seed", "2"],
)
case(
    "a group of no number",
    {},
    "launch: PARALLELISM_CONFIG_SP_SIZE is ''; give a number of processes",
    argv=[*CONFIG, "--plan", "2"],
    env={"PARALLELISM_CONFIG_SP_SIZE": ""},
)
for name, value in ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"):
    words = "launch: WORLD_SIZE or LOCAL_RANK is set without MASTER_ADDR and RANK; unset them"
    case(f"{name} without a launcher", {}, words, env={name: value})
case(
    "a rank that does not know which",
    {},
    "launch: WORLD_SIZE or LOCAL_RANK is set without RANK; unset them, or start by accelerate launch",
    env={"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
)
case("fp16", {}, "error: launch: mixed_precision fp16 is for GPUs", env={"ACCELERATE_MIXED_PRECISION": "fp16"})
case("unknown precision", {}, "launch", "mixed_precision BF16", "bf16", env={"ACCELERATE_MIXED_PRECISION": "BF16"})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The shared inputs: documents, a chat template, a model, and checkpoints of two models."""
    data = tmp_path_factory.mktemp("data")
    (data / "docs").mkdir()
    for i in range(40):
        (data / "docs" / f"{i}.txt").write_text(f"document {i} " * 9)
    (data / "table").mkdir()
    (data / "table" / "rows.jsonl").write_text('{"text": "a"}\n')
    (data / "good.jsonl").write_text('{"text": "a"}\n')
    (data / "beyond.jsonl").write_text('{"input_ids": [1, 999]}\n' * 9)
    (data / "tokens.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 9)
    (data / "template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    )
    (data / "strict.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    (data / "images.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    (data / "broken.jinja").write_text("{% for m in messages %}{% generation %}{{ m.role }")
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(letters, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(data / "tokenizer")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**LLAMA, vocab_size=259, max_position_embeddings=32)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(data / "model")
    for name, changes in ("trained", {}), ("deeper", architecture(num_hidden_layers=2) | {"run.max_steps": 1}):
        path = write_config(data / f"{name}.yaml", GOOD | changes | {"run.output_dir": f"DATA/{name}"}, data, data)
        assert train.main(["--config", path]) == 0
    return data


def fill(value, tmp, data):
    """TMP and DATA in a case's strings."""
    if isinstance(value, dict):
        return {k: fill(v, tmp, data) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [fill(v, tmp, data) for v in value]
    return value.replace("TMP", str(tmp)).replace("DATA", str(data)) if isinstance(value, str) else value


def write_config(path, settings, tmp, data):
    """A YAML file of dotted settings."""
    nested = {}
    for dotted, value in fill(settings, tmp, data).items():
        *sections, name = dotted.split(".")
        where = nested
        for section in sections:
            where = where.setdefault(section, {})
        where[name] = value
    path.write_text(yaml.safe_dump(nested))
    return str(path)


def contents(folder):
    """Every file with its bytes, and every folder. The lock of a run folder is there to be taken."""
    paths = [path for path in folder.rglob("*") if path.name != ".lock"]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.parametrize("changes, words, make, argv, env, text", CASES)
def test_bad_input(tmp_path, data, monkeypatch, capsys, changes, words, make, argv, env, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 9}\n{"step": 9')
    (tmp_path / "out" / "status.json").write_text('{"status": "failed", "step": 9}')
    section = next((name for name in changes if "." not in name), "")  # A whole section replaced.
    good = {k: v for k, v in GOOD.items() if not section or not k.startswith(f"{section}.")}
    write_config(tmp_path / "config.yaml", good | changes, tmp_path, data)
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    make(tmp_path, data)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "flops_per_token", helpers.flops_per_token)
    monkeypatch.setattr(RunFolder, "PATIENCE", 1)
    before, started = contents(tmp_path), time.monotonic()
    status = train.main(fill(argv, tmp_path, data))
    out, err = capsys.readouterr()
    assert status == 2
    assert err.startswith("error: ") and err.count("\nerror: ") == 0 and "Traceback" not in out + err
    for word in fill(words, tmp_path, data):
        assert word.lower() in err.lower()
    assert contents(tmp_path) == before
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "changes",
    [
        {"data.files": "TMP/nope.txt"},
        TOKENS | {"data.files": "DATA/beyond.jsonl"},  # Found when everything else is ready.
        architecture(hidden_size="big"),
        {"run.resume": "TMP/nope"},
        {"run.init_from": "DATA/deeper/checkpoints/step-00000001"},
        {"optim.warmup_steps": 5},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_refused_launch_leaves_no_folder(tmp_path, data, monkeypatch, changes):
    """Of those that it has made. One that was there before stays."""
    (tmp_path / "runs").mkdir()
    settings = GOOD | changes | {"run.output_dir": "TMP/runs/mine/first"}
    monkeypatch.setattr(train, "flops_per_token", helpers.flops_per_token)
    assert train.main(["--config", write_config(tmp_path / "config.yaml", settings, tmp_path, data)]) == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.yaml", "runs"]


def test_enough_cases():
    assert len(CASES) >= 45


@pytest.mark.parametrize(
    "processes, changes, word, rows, env, warm",
    [
        (1, {"run.max_stepz": 5}, "did you mean run.max_steps", [], {}, True),
        (2, {"run.max_stepz": 5}, "did you mean run.max_steps", [], {}, True),  # Every rank finds it,
        pytest.param(2, {"run.max_stepz": 5}, "did you mean run.max_steps", [], {}, False, marks=pytest.mark.slow),
        (2, {"run.output_dir": "TMP/config.yaml"}, "run.output_dir", [], {}, True),  # only the main process,
        (2, TOKENS | {"batch.global_batch_size": 2}, "999", [[1, 2], [1, 2, 999]], {}, True),  # only another rank.
        (2, {}, "launch", [], {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "4"}, True),
    ],
)
def test_bad_launch(tmp_path, data, processes, changes, word, rows, env, warm):
    jsonl(*[{"input_ids": row} for row in rows])(tmp_path, data)
    settings = write_config(tmp_path / "settings.yaml", GOOD | {"data.packing": "none"} | changes, tmp_path, data)
    settings = yaml.safe_load(Path(settings).read_text())
    done = helpers.launch(tmp_path, settings, processes=processes, expect=None, env=env, warm=warm)
    messages = re.findall(r"^error: .*", done.output, re.MULTILINE)
    assert done.code != 0 and len(messages) == 1 and word in messages[0], done.output
    assert 'train.py", line' not in done.output  # No traceback of ours; the launcher prints its own.
    assert not (tmp_path / "out").exists()
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]  # No rank is left.
