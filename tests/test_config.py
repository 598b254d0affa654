"""The config: what is accepted and what it becomes, what is refused and how, and that --help and the schema tell it.

test_bad_input.py runs single mistakes through main(); this file is about the rules, over all fields.
"""

import io
import itertools
import json
import math
import os
import re
import sys
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

import train
from samerun.cli import FOREIGN_NAMES, Export, Mode, help_text, load_config, take_mode
from samerun.config import Config, Section
from samerun.dotted import config_fields, flat_settings
from samerun.errors import UserError
from samerun.run.changes import changed_settings
from samerun.yaml12 import parse_yaml, to_yaml

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
GOOD = """\
run: {max_steps: 10}
batch: {global_batch_size: 8}
data: {files: [a.txt], tokenizer: bytes}
model: {architecture: {model_type: llama}}
"""


@pytest.fixture
def load(tmp_path):
    """Loads a config of this text with these words on the command line."""

    def load(*words, text=GOOD):
        (tmp_path / "config.yaml").write_text(text)
        return load_config(["--config", str(tmp_path / "config.yaml"), *words], train.Settings)

    return load


@pytest.fixture
def refusal(load, tmp_path):
    """The message with which load() refuses, one problem per line, without where they are; None if it accepts."""

    def refusal(*words, text=GOOD):
        try:
            load(*words, text=text)
        except UserError as error:
            return str(error).removeprefix("command line: ").removeprefix(f"{tmp_path / 'config.yaml'}: ")

    return refusal


def at(config, path):
    """The value at a dotted path."""
    names = path.split(".")
    return reduce(lambda node, name: node[name] if isinstance(node, dict) else getattr(node, name), names, config)


def good_with(path, value):
    """GOOD with a value at a dotted path, as YAML."""
    settings = yaml.safe_load(GOOD)
    *sections, name = path.split(".")
    reduce(lambda node, section: node.setdefault(section, {}), sections, settings)[name] = value
    return yaml.safe_dump(settings)


def schema_fields(schema):
    """The fields of the JSON schema by dotted path, found without the script's own listing."""
    fields = {}
    for section, kind in schema["properties"].items():  # What is nested more deeply, such as a source, is a value.
        of_section = schema["$defs"][kind["$ref"].split("/")[-1]]["properties"]
        fields |= {f"{section}.{name}": field for name, field in of_section.items()}
    return fields


def type_names(field):
    """What a person would call the types that a schema field takes: "int", "None", "'cosine'", ..."""
    words = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "array": "list", "object": "dict"}
    for option in field.get("anyOf") or field.get("oneOf") or [field]:
        if "oneOf" in option:
            yield from type_names(option)
        elif "$ref" in option:
            yield option["$ref"].split("/")[-1]
        elif "enum" in option or "const" in option:
            yield from option.get("enum", [option.get("const")])
        else:
            yield words.get(option["type"], "None")


SCHEMA = train.Settings.model_json_schema()
FIELDS = schema_fields(SCHEMA)


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, number",
    [
        ("1e-4", 1e-4),
        ("1E-4", 1e-4),
        ("1.e-4", 1e-4),
        ("1.0e-4", 1e-4),
        (".1e-3", 1e-4),
        ("+1e-4", 1e-4),
        ("2e3", 2000.0),
        ("1", 1.0),
        ("0.5", 0.5),
    ],
)
def test_numbers_as_people_write_them(load, text, number):
    """PyYAML reads 1e-4 as a string, since YAML 1.1 wants a dot and a sign. Here it is a number everywhere."""
    assert load(text=GOOD + f"optim: {{learning_rate: {text}}}").optim.learning_rate == number
    assert load("--optim.learning_rate", text).optim.learning_rate == number
    assert load("--model.architecture.eps", text).model.architecture == {"model_type": "llama", "eps": number}
    nested = GOOD.replace("llama", f"llama, rope: {{theta: [{text}]}}")
    assert load(text=nested).model.architecture["rope"] == {"theta": [number]}


@pytest.mark.parametrize("text", ["'1e-4'", '"1e-4"', "1e-4x", "e-4", "1e", "1e-", "1-4", "v1e4"])
def test_strings_stay_strings(load, refusal, text):
    assert load("--run.output_dir", text).run.output_dir == text.strip("'\"")
    assert re.match(r"optim.learning_rate: .*number", refusal("--optim.learning_rate", text))


def test_one_string_stands_for_a_list_of_one(load):
    found = load(
        "--data.files", "docs/*.txt", "--run.trackers=wandb", "--eval.prompts", "q_proj", "--data.eval_fraction=.1"
    )
    assert (found.data.files, found.run.trackers) == (["docs/*.txt"], ["wandb"])
    assert found.eval.prompts == ["q_proj"]


@pytest.mark.parametrize(
    "path, edge, beyond",
    [
        ("run.seed", [0, 2**32 - 1], [-1, 2**32]),
        ("run.max_steps", [1], [-1]),
        ("run.log_every", [1], [0]),
        ("run.eval_every", [0], [-1]),
        ("run.save_every", [0], [-1]),
        ("run.keep_checkpoints", [1], [0]),
        ("run.max_skipped_steps", [0], [-1]),
        ("batch.global_batch_size", [1], [0, -8]),
        ("batch.max_micro_batch_size", [1], [0, "max"]),
        ("data.format", ["text", "tokens"], ["json"]),
        ("data.packing", ["none", "concat", "best_fit"], ["true"]),
        ("data.sequence_length", [2], [1, 0]),
        ("data.eval_fraction", [0, 0.99], [1.0, -0.1]),
        ("optim.learning_rate", [1e-12], [0, -1, ".inf", ".nan"]),
        ("optim.schedule", ["constant", "linear", "cosine"], ["wsd"]),
        ("optim.warmup_steps", [0, 10], [-1]),
        ("optim.min_learning_rate_ratio", [0, 1], [-0.1, 1.01]),
        ("optim.decay_fraction", [1e-9, 1], [0, 1.01]),
        ("optim.weight_decay", [0], [-0.1]),
        ("optim.adam_beta1", [0], [1.0]),
        ("optim.adam_beta2", [0], [1.0, -0.1]),
        ("optim.adam_eps", [1e-30], [0]),
        ("optim.max_grad_norm", [1e-9, None], [0]),
        ("eval.max_rows", [1, None], [0]),
        ("eval.max_new_tokens", [1], [0]),
        ("perf.peak_tflops", [1e-3, None], [0]),
        ("perf.device_memory_gib", [1e-3, None], [0]),
    ],
)
def test_ranges(load, refusal, path, edge, beyond):
    for value in edge:
        assert at(load(f"--{path}={json.dumps(value)}"), path) == value
    for value in beyond:
        assert (refusal(f"--{path}={value}") or "accepted").startswith(path), value


def test_every_field_refuses_another_type(refusal):
    """A mapping where there is none, and a number for what is one: refused under the field's own path, once."""
    for path, field in FIELDS.items():
        is_mapping = {"dict", *SCHEMA["$defs"]} & set(type_names(field))
        wrong = "3" if is_mapping else "{x: 1}"
        message = refusal(f"--{path}", wrong)
        assert re.match(rf"(--)?{path}\b.*$(?!\n)", message or "accepted"), f"{path}: {message}"


@pytest.mark.parametrize(
    "path, value",
    [
        ("run.max_steps", "'10'"),
        ("run.max_steps", "10.0"),
        ("run.max_steps", "true"),
        ("run.seed", "1e3"),
        ("run.seed", "[1]"),
        ("run.keep_best", "1"),
        ("run.keep_best", "'true'"),
        ("run.output_dir", "7"),
        ("optim.learning_rate", "true"),
        ("data.files", "[1]"),
        ("batch.max_micro_batch_size", "8.0"),
        ("run.keep_best", "0"),
    ],
)
def test_nothing_is_converted(refusal, path, value):
    """A quoted number or a 1 for true is more often a mistake than a wish."""
    assert refusal(f"--{path}={value}").startswith(path)


# Keys ----------------------------------------------------------------------------------------------------------------


def test_a_misspelled_key_is_refused_and_the_right_one_named(refusal):
    """Each field without its last letter, on the command line and in the file: nothing completes an abbreviation."""
    for typo in {path[:-1] for path in FIELDS}:
        answers = [f"{typo}: unknown key; did you mean {path}?" for path in FIELDS if path[:-1] == typo]
        assert refusal(f"--{typo}", "1") in answers  # Two answers for adam_beta.
        assert refusal(text=good_with(typo, 1)) in answers


@pytest.mark.parametrize(
    "key, answer",
    [
        ("run.max_step", "run.max_step: unknown key; did you mean run.max_steps?"),
        ("run.max-steps", "run.max-steps: unknown key; did you mean run.max_steps?"),
        ("run.Max_Steps", "run.Max_Steps: unknown key; did you mean run.max_steps?"),
        ("max_steps", "max_steps: unknown key; did you mean run.max_steps?"),
        ("run.learning_rate", "run.learning_rate: unknown key; did you mean optim.learning_rate?"),
        ("data.global_batch_size", "data.global_batch_size: unknown key; did you mean batch.global_batch_size?"),
        ("optimizer.learning_rate", "optimizer: unknown key; did you mean optim"),  # The section, whatever is in it.
        ("optim.lr", "optim.lr: unknown key; did you mean optim.learning_rate?"),
        ("run.epochs", "run.epochs: unknown key; did you mean run.max_epochs?"),
        ("batch.sync_each_micro_step", "batch.sync_each_micro_step: unknown key; did you mean batch.accumulation?"),
        ("run.zzzzzzzz", "run.zzzzzzzz: unknown key; python train.py --help"),  # Nothing is near.
        ("zzz.zzz", "zzz: unknown key; python train.py --help"),
    ],
)
def test_did_you_mean(refusal, key, answer):
    assert refusal(f"--{key}", "5").startswith(answer)


def test_a_dotted_path_as_a_key_of_the_file(refusal):
    assert refusal(text=GOOD + "run.seed: 3\n").endswith("write it as run: and, indented below, seed:")


# What people know from transformers, TRL, axolotl and llm-foundry.
KNOWN_ELSEWHERE = """
lr batch_size per_device_train_batch_size gradient_accumulation_steps num_train_epochs warmup_ratio logging_steps
save_total_limit lr_scheduler_type report_to resume_from_checkpoint micro_batch_size sequence_len sample_packing
val_set_size device_train_microbatch_size
"""


def test_names_of_other_trainers_are_answered_with_ours(refusal):
    """Written in any way, and in any section: with the setting that it is here, and what that does."""
    answers = {name: ours for ours, names in FOREIGN_NAMES.items() for name in names.split()}
    assert answers.keys() >= set(KNOWN_ELSEWHERE.split())
    for name, ours in answers.items():
        for key in name, name.replace("_", "-"), f"run.{name}":
            answer = f"{key}: unknown key; did you mean {ours}? {FIELDS[ours]['description']}"
            assert refusal(f"--{key}", "1") == answer


def test_all_problems_are_told_at_once(refusal):
    message = refusal("--run.sed", "1", "--optim.adam_beta1", "2", "--eval.max_rows", "x")
    assert {line.split(": ")[0] for line in message.splitlines()} == {"run.sed", "optim.adam_beta1", "eval.max_rows"}


# YAML ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, line, column, word",
    [
        ("run: @x\n", 1, 6, "token"),
        ("run:\n  max_steps: 3\n\tseed: 1\n", 3, 1, ""),  # Indented by a tab.
        ("run:\n  max_steps: 3\nbatch: [1\n", 4, 1, "]"),  # Still open at the end.
        ("run:\n  max_steps: 3\n  seed: 1\n  max_steps: 4\n", 4, 3, "max_steps"),  # The second of two.
        ("run: {seed: 1}\nbatch: {}\nrun: {seed: 2}\n", 3, 1, "run"),
        ("model:\n  architecture:\n    {hidden_size: 8, 'hidden_size': 16}\n", 3, 22, "hidden_size"),
        ("run: !!python/name:os.system\n", 1, 6, "python/name"),  # Nothing is ever executed.
    ],
)
def test_yaml_errors_name_line_and_column(refusal, text, line, column, word):
    message = refusal(text=text)
    assert re.search(f"line {line}, column {column}\\b", message) and word in message


@pytest.mark.parametrize("value", ["!!int x", "!!timestamp 2001-99-99", "9" * 5000])
def test_values_that_cannot_be_made_are_refused(refusal, value):
    """PyYAML raises a bare ValueError for them."""
    assert "run.output_dir" in refusal("--run.output_dir", value)


def test_an_empty_section_has_its_defaults(load, refusal):
    """All of its lines may be commented out."""
    text = f"{GOOD}\noptim:\n  # learning_rate: 1\n"
    assert load(text=text) == load() and refusal(text=f"{GOOD}\noptims:\n").startswith("optims: unknown key")


def test_an_empty_file_is_only_incomplete(refusal):
    assert "exactly one of" in refusal(text="# nothing yet\n")


# The command line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, path, value",
    [
        (["--run.max_steps", "20"], "run.max_steps", 20),
        (["--run.max_steps=20"], "run.max_steps", 20),
        (["--run.output_dir=a=b"], "run.output_dir", "a=b"),
        (["--run.output_dir", "a#b"], "run.output_dir", "a#b"),
        (["--run.output_dir", '"a #b"'], "run.output_dir", "a #b"),
        (["--run.seed", "1", "--run.seed", "2"], "run.seed", 2),
        (["--data.eval_fraction", ".5"], "data.eval_fraction", 0.5),
        (["--data.files", "[a, b]"], "data.files", ["a", "b"]),
        (["--run.trackers", "[]"], "run.trackers", []),
        (["--optim.max_grad_norm", "null"], "optim.max_grad_norm", None),
        (["--batch.global_batch_size", "null", "--batch.global_batch_tokens", "1024"], "global_batch_size", 2),
        (["--run.max_steps", "null", "--run.max_epochs", "3"], "run.max_epochs", 3.0),
        (["--data.eval_fraction", ".5", "--eval.prompts", "['a: b', -1e]"], "eval.prompts", ["a: b", "-1e"]),
        (["--model.architecture.hidden_size", "64"], "model.architecture", {"model_type": "llama", "hidden_size": 64}),
        (["--model.architecture.rope.theta", "1e4"], "model.architecture.rope", {"theta": 1e4}),
        (["--model.architecture.x", "1", "--model.architecture", "{a: 2}"], "model.architecture", {"a": 2}),
        (["--model.lora.r", "8", "--model.lora", "{}"], "model.lora", {}),
        (["--data.files", "null", "--data.path", "docs"], "data.files", []),
        (["--model.architecture", "null", "--model.pretrained", "./x"], "model.pretrained", "./x"),
        (["--data.eval_source.path", "held-out"], "data.eval_source.path", "held-out"),
        (["--run.output_dir=~/run"], "run.output_dir", str(Path.home() / "run")),
    ],
)
def test_overrides(load, words, path, value):
    assert at(load(*words), path) == value


def test_a_merge_of_a_merge(load):
    """What is merged may give a key that stands beside it, also where the merge itself has one."""
    text = GOOD.replace("llama", "llama, a: &a {one: 1, two: 1}, b: &b {<<: *a, two: 2}, c: {<<: *b, one: 3}")
    found = load(text=text).model.architecture
    assert (found["b"], found["c"]) == ({"one": 1, "two": 2}, {"one": 3, "two": 2})


def test_a_mistake_within_a_list_is_one_of_the_command_line(load):
    with pytest.raises(UserError, match="^command line: batch.warmup: "):
        load("--batch.warmup.0.rows", "3")


def test_an_override_changes_only_what_it_names(load):
    """Also where the file uses one mapping twice, by a YAML anchor."""
    text = GOOD.replace("llama", "llama, text: &same {size: 1}, image: *same")
    found = load("--model.architecture.image.size", "2", text=text).model.architecture
    assert (found["text"], found["image"]) == ({"size": 1}, {"size": 2})
    before, after = load().model_dump(), load("--run.seed", "9").model_dump()
    before["run"]["seed"] = 9
    assert before == after


@pytest.mark.parametrize(
    "words, message",
    [
        (["--run.max_steps"], "run.max_steps"),
        (["--run.max_steps", "--run.seed", "3"], "run.max_steps"),  # Its value is missing, not "--run.seed".
        (["--run.output_dir=", "--run.seed", "3"], "run.output_dir"),
        (["20"], "20"),
        (["-run.max_steps", "20"], "-run.max_steps"),
        (["--run.max_step", "5"], "run.max_step: unknown key; did you mean run.max_steps?"),
        (["--run", "5"], "run: "),
        (["--run.max_steps.x", "5"], "run.max_steps"),
        (["--data.files", "*.jsonl"], "data.files *.jsonl: the value is not YAML"),
        (["--run.output_dir", "runs/a #2"], "run.output_dir runs/a #2: in YAML, #2 is a comment"),
        (["--data.files", "# a"], "data.files # a: in YAML, # a is a comment"),
        (["--data.files", "[a, b]  # c"], "data.files [a, b]  # c: in YAML, # c is a comment"),
        (["--model.lora", "r: 2  # c"], "model.lora r: 2  # c: in YAML, # c is a comment"),
        (["--data.files", "[a]", "--data.files.x", "b"], "data.files.x b: a part of this path is a list"),
        (["--data.files", "[a]", "--data.files.x.y", "b"], "data.files.x.y b: a part of this path is a list"),
        (["--data.files", "[a]", "--data.files.1", "b"], "data.files.1 b: a part of this path is a list"),
    ],
)
def test_command_lines_that_are_refused(refusal, words, message):
    """The message opens with the word that is wrong."""
    assert (refusal(*words) or "accepted").removeprefix("--").startswith(message)


@pytest.mark.parametrize("key", ["", ".", ".run", "run.", "run..seed"])
def test_empty_names_are_refused(refusal, key):
    assert refusal(f"--{key}", "5")


def test_config_file_is_required(tmp_path):
    missing, folder = ["--config", str(tmp_path / "none.yaml")], ["--config", str(tmp_path)]
    for words in [], ["--run.max_steps", "3"], ["--config"], missing, folder:
        with pytest.raises(UserError, match=f"--config|{tmp_path}"):
            load_config(words)


@pytest.mark.parametrize(
    "mode, asked",
    [
        (["--plan", "1", "2", "16"], Mode([1, 2, 16], None, None)),
        (["--prepare"], Mode(None, [], None)),
        (["--prepare", "7", "0"], Mode(None, [7, 0], None)),
        (["--export", "7"], Mode(None, None, Export(["7"], None, merge=False))),
        (["--export", "7", "9"], Mode(None, None, Export(["7", "9"], None, merge=False))),
        ([], Mode(None, None, None)),
    ],
)
def test_a_mode_may_stand_anywhere(mode, asked):
    rest = ["--run.seed", "3", "--config", "a.yaml"]
    for place in 0, 2, 4:
        assert take_mode([*rest[:place], *mode, *rest[place:]]) == (rest, asked)


# Rules across fields -------------------------------------------------------------------------------------------------

RULES = [
    ("exactly one", {"run.max_steps": 10, "run.max_epochs": 1.5, "run.max_tokens": 4096}),
    ("exactly one", {"batch.global_batch_size": 8, "batch.global_batch_tokens": 4096}),
    ("exactly one", {"model.pretrained": "./x", "model.architecture": "{model_type: llama}"}),
    ("exactly one", {"data.path": "./x", "data.files": "[a.txt]"}),
    ("at most one", {"data.eval_fraction": 0.1, "data.eval_source": "{files: [a.txt]}"}),
]
UNSET = {"data.files": "[]", "data.eval_fraction": "0"}


@pytest.mark.parametrize("rule, fields", RULES, ids=[" or ".join(fields) for _, fields in RULES])
def test_exactly_one(refusal, rule, fields):
    """Every combination: accepted if the rule allows it, else refused with the rule and the names of the fields."""
    for given in itertools.product([True, False], repeat=len(fields)):
        values = {path: value if on else UNSET.get(path, "null") for (path, value), on in zip(fields.items(), given)}
        message = refusal(*(f"--{path}={value}" for path, value in values.items()))
        if sum(given) == 1 or (rule == "at most one" and not any(given)):
            assert message is None, (values, message)
        else:
            names = [rule, *(name for path in fields for name in path.split("."))]
            assert message and not [name for name in names if name not in message], (values, message)


@pytest.mark.parametrize(
    "tokens, rows, near",
    [  # Rows are 512 tokens long.
        (8192, 16, None),
        (512, 1, None),
        (8000, None, "7680 and 8192"),
        (8193, None, "8192 and 8704"),
        (100, None, "512"),  # Zero rows are no alternative.
    ],
)
def test_global_batch_tokens_are_whole_rows(load, refusal, tokens, rows, near):
    words = "--batch.global_batch_size=null", f"--batch.global_batch_tokens={tokens}"
    if rows:
        assert load(*words).global_batch_size == rows
    else:
        assert re.search(rf"global_batch_tokens {tokens} .*sequence_length.*; {near}\b", refusal(*words))


# YAML -----------------------------------------------------------------------------------------------------------------

ODD_TEXTS = ["1e5", "010", "1.", "${HOME", "${HOME}", "1:30", "yes", "null", "a: b", "2024-05-01", "0x1F", "- x", "é\n"]


def test_what_a_run_writes_is_read_as_it_was(load):
    """config.yaml of the run folder is a config like any other, whatever a prompt looks like."""
    before = load("--eval.prompts", json.dumps(ODD_TEXTS), "--data.eval_fraction", "0.5")
    assert before.eval.prompts == ODD_TEXTS
    assert load(text=to_yaml(before.model_dump())) == before


def test_values_that_json_lacks_stay_what_they_are(load):
    """Infinity is a limit in some models, and another limit is a change. Keys need not be texts."""
    limits = "model_type: mamba2, time_step_limit: [0.0, .inf], id2label: {0: a}"
    config, other = (
        load(text=GOOD.replace("model_type: llama", text)) for text in (limits, limits.replace(".inf", "1"))
    )
    shape = {"model_type": "mamba2", "time_step_limit": [0.0, math.inf], "id2label": {0: "a"}}
    assert config.model.architecture == shape
    assert load(text=to_yaml(config.model_dump())) == config
    changes = changed_settings(train.Settings, flat_settings(other), flat_settings(config))
    assert list(changes) == [("model.architecture.time_step_limit", [0.0, 1], [0.0, math.inf])]


@pytest.mark.parametrize("text", ["._", "-.__", "0x_", "_1", "e5"])
def test_a_number_has_a_digit(text):
    assert parse_yaml(text) == text


@pytest.mark.parametrize("text, number", [("010", 10), ("1_000", 1000), ("0x10", 16), ("+4", 4)])
def test_numbers_are_those_that_people_read(load, text, number):
    """By YAML 1.1, 010 is eight."""
    assert load(text=GOOD.replace("10", text)).run.max_steps == number
    assert load("--run.max_steps", text).run.max_steps == number


# --help and the schema ------------------------------------------------------------------------------------------------


def test_every_field_has_one_line_of_documentation():
    for section in SCHEMA["$defs"].values():
        for name, field in section["properties"].items():
            assert re.fullmatch(r"\S.*\.", field.get("description", "")), f"{section['title']}.{name}"
    assert set(config_fields(train.Settings)) == set(FIELDS)


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--config", "nope.yaml", "--help"]])
def test_help_lists_every_field_with_type_default_and_doc(capsys, words):
    assert train.main(words) == 0
    blocks = re.split(r"^ *--(?=\w+\.)", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    blocks = {path: " ".join(rest) for path, *rest in map(str.split, blocks)}
    assert list(blocks) == list(FIELDS)
    for path, field in FIELDS.items():
        kind, _, rest = blocks[path].partition("default ")
        assert rest.startswith(f"{json.dumps(field['default'])} {' '.join(field['description'].split())}"), path
        missing = [name for name in type_names(field) if not re.search(rf"\b{name}\b", kind.replace("null", "None"))]
        assert not missing, f"--{path}: {missing} not in {kind!r}"
        plain = not re.search(r"typing|Annotated|__main__|train\.|<|class|[()]", kind)
        assert plain and kind.count("[") == kind.count("]"), f"--{path}: {kind!r} is no plain type"


class Teacher(Section):
    weight: float = 0.5


class Norm(Enum):
    RMS = "rms"
    LAYER = "layer"


class Own(Section, strict=False):
    """Settings of a fork, of any type that JSON can write."""

    teacher: Teacher = Teacher()
    names: list = []
    shares: list[float] = Field(default_factory=lambda: [0.5])
    betas: tuple[float, float] = (0.9, 0.95)
    layers: tuple[int, ...] = ()
    file: Path = Path("a/b")
    norm: Norm = Norm.RMS
    more: Any = None


class Settings(Config):
    own: Own = Own()


def test_help_knows_the_settings_of_a_fork():
    text = help_text("", Settings)
    lines = [line.strip() for line in text.splitlines() if line.startswith("  --own.")]
    assert lines == [
        '--own.teacher  Teacher, default {"weight": 0.5}',
        "--own.names  list[Any], default []",
        "--own.shares  list[float], default [0.5]",
        "--own.betas  tuple[float, float], default [0.9, 0.95]",
        "--own.layers  list[int], default []",
        '--own.file  str, default "a/b"',
        '--own.norm  Norm, default "rms"',
        "--own.more  Any, default null",
    ]


def test_settings_of_a_fork_are_what_its_types_say(tmp_path):
    """What a run writes about them is read as it was, and is no change."""
    file = tmp_path / "config.yaml"
    file.write_text(GOOD + "own: {betas: [0.8, 1], layers: [3], file: c.txt, norm: layer, teacher: {weight: 1}}")
    config = load_config(["--config", str(file)], Settings)
    assert config.own == Own(
        betas=(0.8, 1.0), layers=(3,), file=Path("c.txt"), norm=Norm.LAYER, teacher=Teacher(weight=1.0)
    )
    file.write_text(to_yaml(config.model_dump()))
    assert load_config(["--config", str(file)], Settings) == config
    manifest = json.loads(json.dumps(flat_settings(config)))
    assert not list(changed_settings(Settings, manifest, flat_settings(config)))
    before = {name: value for name, value in manifest.items() if not name.startswith("own.")}  # None was known then.
    assert {name for name, _, _ in changed_settings(Settings, before, flat_settings(config))} == {
        "own.betas",
        "own.layers",
        "own.file",
        "own.norm",
        "own.teacher.weight",
    }
    with pytest.raises(UserError, match=r"own.betas.1: Field required"):
        load_config(["--config", str(file), "--own.betas", "[0.9]"], Settings)


def test_help_that_nobody_reads_to_its_end(monkeypatch, capsys):
    """As `python -u train.py --help | head` does not."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, write_through=True))
        assert train.main(["--help"]) == 0
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


REGENERATE = """python -c "import json, train; open('configs/schema.json', 'w').write(\
json.dumps(train.Settings.model_json_schema(), indent=2) + chr(10))\""""


def test_schema_is_current():
    assert (CONFIGS / "schema.json").read_text() == json.dumps(SCHEMA, indent=2) + "\n", f"regenerate it: {REGENERATE}"


def test_schema_takes_a_single_string_where_the_script_does():
    """Otherwise editors mark `files: data/*.txt` as wrong."""
    for path in "data.files", "run.trackers", "eval.prompts":
        assert "string" in [kind["type"] for kind in FIELDS[path].get("anyOf", [])], path
