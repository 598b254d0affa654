"""From a YAML file and a command line to a Config: overrides, --help, hints for wrong keys."""

import argparse
import difflib
import json
import re
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from samerun.config import BatchStage, Config, Source, WeightedSource, WeightStage
from samerun.dotted import config_fields, is_within
from samerun.errors import UserError, one_line, prefix_errors, require
from samerun.yaml12 import comment_in, parse_yaml


def help_text(story: str, kind: type[Config]) -> str:
    """All settings, below the docstring of train.py."""
    text = f"{story}\nSettings, in the YAML file or as --section.field VALUE, where VALUE is YAML:\n"
    sections, defaults = kind.model_json_schema()["$defs"], kind.model_construct().model_dump()
    for path, field in config_fields(kind).items():
        section, name = path.split(".")
        properties = sections[kind.model_fields[section].annotation.__name__]["properties"]
        words = type_words(properties[name])
        default = json.dumps(defaults[section][name], default=to_jsonable_python)
        text += f"\n  --{path}  {words}, default {default}\n      {field.description}"
    return text


def type_words(schema: dict[str, Any]) -> str:
    """The type of a setting in the words of Python, from its JSON schema: int | None, 'linear' | 'cosine'."""
    plain = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "object": "dict", "null": "None"}
    if "anyOf" in schema or "oneOf" in schema:
        return " | ".join(type_words(choice) for choice in schema.get("anyOf") or schema["oneOf"])
    if "$ref" in schema:
        return schema["$ref"].split("/")[-1]
    if "enum" in schema:
        return " | ".join(repr(value) for value in schema["enum"])
    if "const" in schema:
        return repr(schema["const"])
    if isinstance(schema.get("additionalProperties"), dict):
        return f"dict[str, {type_words(schema['additionalProperties'])}]"
    if "prefixItems" in schema:
        return f"tuple[{', '.join(map(type_words, schema['prefixItems']))}]"
    if schema.get("type") == "array":
        return f"list[{type_words(schema['items'])}]"
    return plain.get(schema.get("type"), "Any")


def describe(error: ValidationError, kind: type[Config] = Config) -> str:
    """One line per problem: the dotted path, what is wrong, and what was given."""
    # How pydantic and our tags name the choices of a setting.
    union_branch = re.compile(r"bool|constrained-int|literal\[.*|function-\w+\[.*|list\[.*|one source|several sources")
    problems = {}
    for problem in error.errors():
        path = ".".join(part for part in map(str, problem["loc"]) if not union_branch.fullmatch(part))
        if problem["type"] == "extra_forbidden":
            text = f"unknown key; {nearest_setting(path, kind)}"
        elif problem["type"] == "value_error":
            text = str(problem["ctx"]["error"])
        else:
            text = f"{problem['msg']}, not {problem['input']!r}"
            if problem["type"] == "string_type" and isinstance(problem["input"], bool):
                text += "; in YAML, yes, no, on and off need quotes to be words, as \"'off'\" in a command"
        problems.setdefault(path, []).append(text)
    lines = []
    for path, texts in problems.items():
        text = " or ".join(texts)
        lines.append(f"{path}: {text}" if path else text)
    return "\n".join(lines)


# What other trainers (transformers, TRL, axolotl, litgpt, llm-foundry, torchtitan) call our settings.
FOREIGN_NAMES = {
    "optim.learning_rate": "lr",
    "batch.global_batch_size": "batch_size total_batch_size train_batch_size global_train_batch_size "
    "gradient_accumulation_steps gradient_accumulation_iters",
    "batch.accumulation": "sync_each_micro_step",
    "batch.max_micro_batch_size": "per_device_train_batch_size per_device_eval_batch_size local_batch_size "
    "device_train_microbatch_size micro_batch_size auto_find_batch_size",
    "run.max_epochs": "num_train_epochs num_epochs epochs",
    "run.max_tokens": "max_duration",
    "run.max_steps": "max_train_steps steps",
    "optim.warmup_steps": "warmup_ratio num_warmup_steps lr_warmup_steps",
    "optim.schedule": "lr_scheduler_type lr_scheduler",
    "optim.name": "optimizer",
    "optim.max_grad_norm": "gradient_clipping max_norm",
    "run.log_every": "logging_steps log_interval",
    "run.eval_every": "eval_steps eval_interval",
    "run.save_every": "save_steps save_interval checkpointing_steps",
    "run.keep_checkpoints": "save_total_limit",
    "run.keep_best": "load_best_model_at_end",
    "run.patience": "early_stopping_patience",
    "run.resume": "resume_from_checkpoint",
    "run.output_dir": "overwrite_output_dir out_dir",
    "run.trackers": "report_to with_tracking",
    "data.sequence_length": "sequence_len seq_len max_seq_len max_seq_length max_length block_size",
    "data.packing": "sample_packing",
    "data.eval_fraction": "val_set_size validation_split_percentage",
    "data.eval_source": "validation_file",
    "eval.at_start": "eval_on_start",
    "data.files": "train_file",
    "data.sources": "datasets dataset_mixer",
    "data.path": "dataset_name",
    "data.name": "dataset_config_name",
    "data.column": "dataset_text_field",
    "model.pretrained": "model_name_or_path base_model",
    "data.tokenizer": "tokenizer_name",
    "model.attention": "attn_implementation flash_attention",
    "model.compile": "torch_compile",
    "model.dtype": "torch_dtype",
    "model.lora": "lora_r lora_alpha",
    "model.load_in_4bit": "bnb_4bit_quant_type load_in_8bit",
}


def nearest_setting(path: str, kind: type[Config]) -> str:
    """A hint for a key that does not exist: the same name in another section, another trainer's, or a similar one."""
    if path.startswith("batch.warmup."):
        return f"a stage has {', '.join(BatchStage.model_fields)}"
    if path.startswith("data.stages."):
        return f"a stage has {', '.join(WeightStage.model_fields)}"
    known = config_fields(kind)
    section, _, key = path.rpartition(".")
    if path in known:
        return f"write it as {section}: and, indented below, {key}:"
    in_source = section.startswith("data.sources.") and difflib.get_close_matches(key, WeightedSource.model_fields)
    if in_source:
        return f"did you mean {section}.{in_source[0]}?"
    in_evaluation = section.startswith("data.eval_source") and difflib.get_close_matches(key, Source.model_fields)
    if in_evaluation:
        return f"did you mean {section}.{in_evaluation[0]}?"
    for ours, foreign in FOREIGN_NAMES.items():
        if key.replace("-", "_") in foreign.split():
            return f"did you mean {ours}? {known[ours].description}"
    elsewhere = [name for name in known if name.split(".")[1] == key]
    siblings = [name.split(".")[1] for name in known if name.startswith(f"{section}.")]
    similar = difflib.get_close_matches(key, siblings, cutoff=0.2)  # So low that lr finds learning_rate.
    others = [name for name in kind.model_fields if name != section]
    anywhere = difflib.get_close_matches(path, [*known, *others])
    near = [*elsewhere, *(f"{section}.{name}" for name in similar), *anywhere]
    return f"did you mean {near[0]}?" if near else "python train.py --help lists them all"


@dataclass(frozen=True)
class Export:
    """What --export asks for."""

    which: list[str]  # "best", "last" or a step. Of several steps, the average of their weights.
    to: str | None
    merge: bool


@dataclass(frozen=True)
class Mode:
    """What a command line asks for in place of a launch: at most one of these; the others are None."""

    plan: list[int] | None  # Numbers of processes.
    prepare: list[int] | None  # The rows to show.
    export: Export | None


def take_mode(argv: list[str]) -> tuple[list[str], Mode]:
    """The words of a command line besides --plan, --prepare and --export, and what these ask for. Raises UserError."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    parser.add_argument("--plan", nargs="+", type=int)
    parser.add_argument("--prepare", nargs="*", type=int)
    parser.add_argument("--export", nargs="+")
    parser.add_argument("--to")
    parser.add_argument("--merge", action="store_true")
    try:
        asked, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"command line: {error}") from None
    modes = [mode for mode in (asked.plan, asked.prepare, asked.export) if mode is not None]
    with prefix_errors("command line"):
        require(len(modes) < 2, "give one of --plan, --prepare and --export")
        require(min(asked.plan or [1]) > 0, "--plan: give numbers of processes, at least 1")
        which, export = asked.export, None
        if which is None:
            require(not (asked.to or asked.merge), "--to and --merge go with --export")
        else:
            is_known = which in (["best"], ["last"]) or all(word.isdecimal() for word in which)
            told = f"--export {' '.join(which)}"
            require(is_known, f"{told}: give best, last or a step or, for their average, steps such as 800 900 1000")
            require(len(which) == 1 or len({*map(int, which)}) == len(which), f"{told}: names a step twice")
            export = Export(which, asked.to, asked.merge)
    return rest, Mode(asked.plan, asked.prepare, export)


def load_config(argv: list[str], kind: type[Config] = Config) -> Config:
    """The validated config of the other words, see take_mode(). Raises UserError."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    parser.add_argument("--config", action="append", default=[])
    where, given = "command line", []
    try:
        args, rest = parser.parse_known_args(argv)
        require(len(args.config) == 1, "give one --config FILE; see --help")
        file = where = args.config[0]
        with open(file, encoding="utf-8") as opened:
            settings = parse_yaml(opened) or {}
        require(isinstance(settings, dict), "its top level must be sections, such as run: and data:")
        # All lines of a section may be commented out.
        settings = {section: {} if value is None else value for section, value in settings.items()}
        for name, value in split_overrides(rest):
            where = f"{name} {value}".strip()
            is_setting = re.fullmatch(r"--\w[\w-]*(\.\w[\w-]*)*", name)
            require(is_setting, "not --section.field VALUE")
            require(value and not value.startswith("--"), "no value; write null for none, or '\"\"' for an empty text")
            override(settings, name[2:], value)
            given.append(name[2:])
        return kind.model_validate(settings)
    except ValidationError as error:
        problems = describe(error, kind)
        where = "command line" if is_about(problems, given) else file
        raise UserError(f"{where}: {problems}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: {error}; save it as UTF-8") from None
    except (OSError, ValueError, argparse.ArgumentError, yaml.YAMLError) as error:
        message = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"{where}: {message}") from None


def is_about(problems: str, overrides: list[str]) -> bool:
    """Whether the first problem is one of these settings, a part of one, or what one is a part of."""
    setting, rest = re.fullmatch(r"([^\s:]*)(.*)", problems, re.DOTALL).groups()
    if any(is_within(setting, name) for name in overrides):
        return True
    # A section may also lack another setting, which its file should have.
    is_section = "." not in setting and not rest.startswith(": unknown key")
    return not is_section and any(is_within(name, setting) for name in overrides)


def override(settings: dict[str, Any], path: str, text: str) -> None:
    """Replace what is at a dotted path by a value in YAML. Raises UserError."""
    advice = "quotes of its own, as in '\"*.txt\"', make any text YAML"
    try:
        value, comment = parse_yaml(text), comment_in(text)
    except yaml.YAMLError as error:
        raise UserError(f"the value is not YAML: {one_line(error)}; {advice}") from None
    require(not comment, f"in YAML, {comment} is a comment; {advice}")
    *parents, last = path.split(".")
    try:
        for part in parents:
            if isinstance(settings, dict) and not isinstance(settings.get(part), dict | list):
                settings[part] = {}
            settings = settings[int(part) if isinstance(settings, list) else part]
        settings[int(last) if isinstance(settings, list) else last] = value
    except (TypeError, ValueError, IndexError, AttributeError):
        raise UserError("a part of this path is a list; give its items by their numbers from 0, or all of it") from None


def split_overrides(rest: list[str]) -> list[tuple[str, str]]:
    """The pairs of --section.field VALUE and --section.field=VALUE; the last value is empty where one is missing."""
    words = []
    for word in rest:
        words += word.split("=", 1) if word.startswith("--") else [word]
    if len(words) % 2:
        words.append("")
    return list(zip(words[::2], words[1::2]))
