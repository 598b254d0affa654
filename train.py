"""Train a causal language model with Hugging Face Accelerate: state the batch, get the same run on any machine.

    accelerate launch train.py --config configs/small.yaml [--section.field VALUE ...]
    python train.py --config configs/small.yaml --plan 1 2 4 8      what would run elsewhere: no data, no device
    python train.py --help                                          every setting

Everything is a function of the step: the rows, the learning rate and the random numbers of step N follow from (config, N)
alone, never from the number of processes or from what happened before. So a checkpoint is weights, optimizer state and a
small manifest, and there is no scheduler, sampler or data loader state to save, lose or get wrong.

1 Config - 2 Batch plan - 3 Data - 4 Model - 5 Optimizer - 6 Throughput - 7 Checkpoints - 8 Evaluation - 9 main().
Start at the end: main() is the table of contents, and the training loop.
"""

import bisect
import contextlib
import copy
import difflib
import fcntl
import fnmatch
import glob
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import typing
import warnings
import zlib
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

STARTED = time.perf_counter()  # Importing the libraries is part of the run's start-up time.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # Processes share that work, see tokenize().

import accelerate
import datasets
import numpy as np
import peft
import pyarrow.compute as pc
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from accelerate.utils.memory import should_reduce_batch_size
from filelock import FileLock
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic import PositiveInt, ValidationError, model_validator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.nn.functional import all_to_all_single
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm

FORMAT = "accelerate-template 1"  # In every checkpoint's manifest: what has another one is not ours.

# 1. Config ------------------------------------------------------------------------------------------------------------


class UserError(ValueError):
    """A mistake in the config, the data, a checkpoint or the launch: ends as one message and exit status 2."""


Strings = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class Run(Section):
    output_dir: str = "runs/default"
    """Run folder. The same command continues what it finds there."""
    max_steps: PositiveInt | None = None
    """Length of the run in optimizer steps (give exactly one of max_steps, max_epochs, max_tokens)."""
    max_epochs: PositiveFloat | None = None
    """Length in passes over the data, rounded up to whole steps."""
    max_tokens: PositiveInt | None = None
    """Length in tokens, rounded up to whole steps."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights, the row order and dropout."""
    log_every: PositiveInt = 10
    """Steps between log lines; device values are read on the host only there."""
    eval_every: NonNegativeInt = 100
    """Steps between evaluations; 0: only after the last step."""
    save_every: NonNegativeInt = 100
    """Steps between checkpoints; 0: only after the last step."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept; older ones are deleted once a newer one is complete."""
    resume: str = "auto"
    """auto: continue from the newest complete checkpoint; never: refuse to continue; or a checkpoint's folder."""
    init_from: str | None = None
    """Checkpoint folder whose weights start this run at step 0."""
    allow_changes: bool = False
    """Continue although the config changes the mathematics of the started run."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When the loss or the gradient norm is not finite: end the run, or skip the update and count it."""
    max_nonfinite_steps: PositiveInt = 10
    """With on_nonfinite skip: end the run after this many skipped updates in a row."""
    trackers: Strings = ["tensorboard"]
    """Accelerate trackers that get every metric: tensorboard, wandb, mlflow, trackio, ..."""


class Batch(Section):
    global_batch_size: PositiveInt | None = None
    """Rows per optimizer step over all devices (give exactly one of global_batch_size, global_batch_tokens)."""
    global_batch_tokens: PositiveInt | None = None
    """Tokens per optimizer step, a multiple of data.sequence_length."""
    max_micro_batch_size: PositiveInt | Literal["auto"] = "auto"
    """Most rows that one device can process at once; auto tries. It never changes the result."""
    sync_each_micro_step: bool = False
    """Average gradients after each micro-step (less memory with FSDP2), not once per step (less traffic)."""


class Source(Section):
    path: str | None = None
    """Dataset as datasets.load_dataset takes it (Hub name or local folder), or a save_to_disk folder."""
    name: str | None = None
    """Configuration of the dataset, as load_dataset takes it."""
    files: Strings = []
    """Local files, folders, globs or URLs, and !patterns to leave out; {stdlib} is the running Python's library folder."""
    split: str = "train"
    """Split to train on."""
    weight: PositiveFloat = 1.0
    """Share of this source's rows, relative to the other sources' weights."""


class Data(Source):
    sources: list[Source] = []
    """Several weighted sources, instead of path or files."""
    format: Literal["text", "chat", "tokens"] = "text"
    """text: documents; chat: lists of role and content, loss on assistant turns; tokens: input_ids, optional labels."""
    column: str | None = None
    """Column of the documents; default by format: text, messages, input_ids."""
    tokenizer: str = "bytes"
    """Hub name or folder of a tokenizer; bytes: UTF-8 bytes, needs no files."""
    chat_template: str | None = None
    """File with a Jinja chat template, in place of the tokenizer's."""
    sequence_length: Annotated[int, Field(ge=2)] = 512
    """Most tokens in a row; longer documents continue in further rows, nothing is dropped."""
    packing: Literal["none", "concat", "best_fit"] = "concat"
    """none: a document per row, padded; concat: documents joined and cut; best_fit: whole documents share rows."""
    eval_fraction: Share = 0.0
    """Share of the documents held out for evaluation (give at most one of eval_fraction, eval_source)."""
    eval_source: Source | None = None
    """Source to evaluate on, as path, name, split or files."""
    num_workers: NonNegativeInt = 0
    """Processes that tokenize, 0: one per core. The rows are the same for any number."""


class Lora(Section):
    rank: PositiveInt = 16
    """Rank of the update (LoRA, arXiv:2106.09685)."""
    alpha: PositiveFloat = 32.0
    """The update is scaled by alpha / rank."""
    dropout: Share = 0.0
    """Dropout before the update; the same run on any machine is promised for 0."""
    target_modules: Strings = ["all-linear"]
    """Names of the modules to adapt, or all-linear."""
    merge: bool = False
    """Export the merged model instead of the adapter."""


class Model(Section):
    pretrained: str | None = None
    """Hub name or folder of a model to fine-tune (give exactly one of pretrained, architecture)."""
    architecture: dict[str, Any] | None = None
    """From scratch: model_type and the fields of its transformers config; vocab_size defaults to the tokenizer's."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model or tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored weights. Mixed precision is the launcher file's."""
    attention: str = "sdpa"
    """transformers attention implementation: sdpa, eager, flex_attention, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    compile: Literal["none", "regional", "full"] = "none"
    """torch.compile each decoder layer (starts fast) or the whole model."""
    fused_loss: bool = False
    """Never hold all logits at once: project and compare in chunks, recomputed in the backward pass."""
    lora: Lora | None = None
    """Train a low-rank adapter only."""


class Optim(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    """torch.optim.AdamW, or SGD with momentum adam_beta1."""
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Shape after the warmup; wsd (warmup, stable, decay) falls linearly over the last decay_fraction of the run."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warmup, the first at learning_rate / warmup_steps."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Last learning rate as a share of the peak."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the run in which wsd decays."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices; norms and biases are excluded."""
    adam_beta1: Share = 0.9
    """Decay rate of the first moment."""
    adam_beta2: Share = 0.95
    """Decay rate of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the update's denominator."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm to this; null: never."""


class Eval(Section):
    max_rows: PositiveInt | None = None
    """Evaluate on the first so many rows; null: all."""
    prompts: Strings = []
    """Prompts to continue after each evaluation (through the chat template where there is one)."""
    max_new_tokens: PositiveInt = 128
    """Length of each continuation."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0: greedy."""
    keep_best: bool = False
    """Also export the weights of the lowest evaluation loss, to model-best/."""


class Perf(Section):
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of one device in the precision used, for MFU; null: from the table, or MFU is null."""
    profile_steps: Annotated[list[PositiveInt], Field(max_length=2)] = []
    """[first, last]: write a torch profiler trace of these steps."""


class Config(Section):
    run: Run = Run()
    batch: Batch = Batch()
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    eval: Eval = Eval()
    perf: Perf = Perf()

    @model_validator(mode="after")
    def check(self) -> "Config":
        run, batch, data, length = self.run, self.batch, self.data, self.data.sequence_length
        for section, *names in (("run", "max_steps", "max_epochs", "max_tokens"), ("model", "pretrained", "architecture"),
                                ("batch", "global_batch_size", "global_batch_tokens")):
            given = [f"{section}.{name}" for name in names if getattr(getattr(self, section), name) is not None]
            if len(given) != 1:
                found = f"{' and '.join(given)} are set; set all but one to null" if given else "none is set"
                raise ValueError(f"give exactly one of {section}.{f' or {section}.'.join(names)}: {found}")
        if (tokens := batch.global_batch_tokens) and tokens % length:
            near = " and ".join(str(n) for n in (tokens // length * length, -(-tokens // length) * length) if n)
            raise ValueError(f"batch.global_batch_tokens {tokens} is no multiple of data.sequence_length {length}; {near} are")
        if self.model.architecture is not None and "model_type" not in self.model.architecture:
            raise ValueError("model.architecture needs a model_type, for example llama")
        for source in [*(data.sources or [data]), *([data.eval_source] if data.eval_source else [])]:
            if bool(source.path) == bool(source.files):
                raise ValueError("each source of data needs exactly one of path or files")
        if data.sources and (data.path or data.files):
            raise ValueError("give data.sources, or data.path or data.files, not both")
        if data.eval_source and data.eval_fraction:
            raise ValueError("give at most one of data.eval_fraction, data.eval_source")
        if run.max_steps and self.optim.warmup_steps > run.max_steps:
            raise ValueError(f"optim.warmup_steps {self.optim.warmup_steps} exceeds run.max_steps {run.max_steps}")
        if len(span := self.perf.profile_steps) == 1 or span != sorted(span):
            raise ValueError(f"perf.profile_steps takes [first, last], not {span}")
        return self

    @property
    def global_batch_size(self) -> int:
        """Rows per optimizer step."""
        return self.batch.global_batch_size or self.batch.global_batch_tokens // self.data.sequence_length


# Settings that may differ between a checkpoint and the run that continues it: they do not change the mathematics.
HARMLESS = re.compile(
    r"run\.(?!seed).*|batch\.(max_micro_batch_size|sync_each_micro_step)|eval\..*|perf\..*|data\.num_workers"
    r"|model\.(attention|gradient_checkpointing|compile|fused_loss|trust_remote_code|lora\.merge)"
)


class ConfigLoader(yaml.SafeLoader):
    """YAML as people read it: 1e-4 is a number (a string in PyYAML's YAML 1.1), and no key may be given twice."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.MarkedYAMLError(problem=f"{twice[0]} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def read_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, ConfigLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise UserError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from None


def config_fields(section: type[BaseModel] = Config, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted path."""
    fields = {}
    for name, info in section.model_fields.items():
        kinds = [kind for kind in (info.annotation, *typing.get_args(info.annotation)) if isinstance(kind, type)]
        nested = next((kind for kind in kinds if issubclass(kind, Section)), None)
        if nested and nested is not Source:
            fields |= config_fields(nested, f"{prefix}{name}.")
        else:
            fields[prefix + name] = info
    return fields


def describe(error: ValidationError) -> str:
    """A line per problem: dotted path, what is wrong, what was given, and the nearest name for an unknown key."""
    known, problems = config_fields(), {}
    for problem in error.errors():
        # Behind a field's path pydantic adds the branch of a union ("constrained-int"): keep what is a path of ours.
        path = ".".join(str(part) for part in problem["loc"] if re.fullmatch(r"[a-z_0-9]+", str(part)) and part != "int")
        text = problem["msg"][0].lower() + problem["msg"][1:] + f", not {problem['input']!r}"
        if problem["type"] == "value_error":
            text = str(problem["ctx"]["error"])
        elif problem["type"] == "extra_forbidden":
            same = [name for name in known if name.split(".")[-1] == path.split(".")[-1]]
            near = same or difflib.get_close_matches(path, known, 1)
            text = f"unknown key; did you mean {near[0]}?" if near else "unknown key; python train.py --help lists them all"
        problems.setdefault(path, []).append(text)
    return "\n".join(": ".join(filter(None, (path, " or ".join(texts)))) for path, texts in problems.items())


def print_help() -> None:
    print(__doc__.split("\n\n")[1] + "\n\nSettings, in the YAML file or as --section.field VALUE, where VALUE is YAML:\n")
    for path, info in config_fields().items():
        kind = re.sub(r"typing\.|Annotated\[|, (annotated_types|Gt|Ge|Field|BeforeValidator).*?\)+\]|<class '|'>|Optional", "", str(info.annotation))
        print(f"  --{path}  {kind}, default {json.dumps(info.default)}\n      {info.description}")


def load_config(argv: list[str]) -> tuple[Config, list[int]]:
    """The validated config of a command line, and the process counts of --plan. Raises UserError for any other word."""
    config_file, process_counts, overrides, words = None, [], {}, list(argv)
    while words:
        name, _, value = words.pop(0).partition("=")
        if name == "--plan":
            while words and words[0].isdigit():
                process_counts.append(int(words.pop(0)))
            if not all(process_counts) or not process_counts:
                raise UserError("--plan takes process counts, for example --plan 1 2 4 8")
            continue
        if not name.startswith("--"):
            raise UserError(f"unexpected argument {name!r}: settings are given as --section.field VALUE")
        if not value and not words:
            raise UserError(f"{name} needs a value")
        value = value or words.pop(0)
        if name == "--config":
            config_file = value
        else:
            overrides[name[2:]] = read_yaml(value, name)
    if config_file is None:
        raise UserError("--config is missing: python train.py --config configs/small.yaml")
    try:
        settings = read_yaml(Path(config_file).read_text(encoding="utf-8"), config_file) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {config_file}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{config_file}: expected sections (run:, batch:, ...), found {type(settings).__name__}")
    for path, value in overrides.items():
        *sections, name = path.split(".")
        where = settings
        for section in sections:
            where[section] = where = where[section] if isinstance(where.get(section), dict) else {}
        where[name] = value
    try:
        return Config.model_validate(settings), process_counts
    except ValidationError as error:
        raise UserError(f"{config_file}: " + describe(error).replace("\n", f"\n{config_file}: ")) from None


# 2. Batch plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How one global batch is split over ranks and micro-steps."""

    num_processes: int
    data_parallel_size: int
    global_batch_size: int
    micro_batch_size: int
    grad_accum_steps: int
    sequence_length: int

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    @property
    def idle_share(self) -> float:
        """Mean share of a step in which a rank waits for those with one row more."""
        ranks = self.data_parallel_size
        return 1 - self.global_batch_size / (ranks * -(-self.global_batch_size // ranks))

    def micro_batches(self, rank: int) -> list[slice]:
        """The rows of each micro-step on a data-parallel rank, as slices of the step's rows sorted by length.

        The rows are cut into data_parallel_size * grad_accum_steps pieces, sizes differing by at most one. Piece k goes to
        micro-step k // ranks; odd micro-steps deal theirs in reverse, so that all ranks get a like share of long rows.
        """
        slices, ranks = [], self.data_parallel_size
        size, larger = divmod(self.global_batch_size, ranks * self.grad_accum_steps)
        for micro_step in range(self.grad_accum_steps):
            k = micro_step * ranks + (ranks - 1 - rank if micro_step % 2 else rank)
            start = k * size + min(k, larger)
            slices.append(slice(start, start + size + (k < larger)))
        return slices

    def even_neighbours(self) -> str:
        """The nearest batch sizes and process counts without idle ranks."""
        rows, ranks, group = self.global_batch_size, self.data_parallel_size, self.num_processes // self.data_parallel_size
        sizes = [str(n) for n in (rows // ranks * ranks, -(-rows // ranks) * ranks) if n]
        below, above = (next((n for n in span if rows % n == 0), 0) for span in (range(min(ranks, rows), 0, -1), range(ranks, rows + 1)))
        return f"{' or '.join(sizes)} rows, {' or '.join(str(n * group) for n in (below, above) if n)} processes"

    def story(self) -> str:
        rows, ranks, accum = self.global_batch_size, self.data_parallel_size, self.grad_accum_steps
        group = self.num_processes // ranks
        groups = f" in groups of {group} that work on the same rows" if group > 1 else ""
        text = (f"Batch plan: {rows:,} rows x {self.sequence_length:,} tokens = {self.tokens_per_step:,} tokens per step, on "
                f"{self.num_processes} process{'es' * (self.num_processes > 1)}{groups}.\n"
                f"  {ranks} data-parallel rank{'s' * (ranks > 1)} x {accum} micro-step{'s' * (accum > 1)} x {self.micro_batch_size} "
                f"rows{' at most' if rows % (ranks * accum) else f' = {rows:,} rows'}; every step trains on exactly {rows:,} rows.")
        if self.idle_share:
            text += f"\n  Uneven: ranks idle {self.idle_share:.1%} of the time. Even: {self.even_neighbours()}."
        return text


def plan_batch(global_batch_size: int, max_micro_batch_size: int, num_processes: int, sequence_length: int, group: int = 1) -> Plan:
    """Memory first: as few passes as max_micro_batch_size allows, then as even as possible. Nothing is floored.

    `group` is the number of ranks that work on the same rows (tensor or sequence parallel). Raises UserError if the
    processes do not form whole groups.
    """
    if num_processes % group:
        raise UserError(f"{num_processes} processes do not form groups of {group} (tensor or sequence parallel); launch a "
                        f"multiple of {group}")
    ranks = num_processes // group
    rows = -(-global_batch_size // ranks)
    grad_accum_steps = -(-rows // max_micro_batch_size)
    return Plan(num_processes, ranks, global_batch_size, -(-rows // grad_accum_steps), grad_accum_steps, sequence_length)


def parallel_sizes() -> tuple[int, int]:
    """(tensor, sequence) parallel sizes of the launcher file, which accelerate passes on in the environment."""
    tensor, sequence, context = (int(os.environ.get(f"PARALLELISM_CONFIG_{kind}_SIZE", 1)) for kind in ("TP", "SP", "CP"))
    if context > 1 or min(tensor, sequence) > 1:
        raise UserError("launcher file: give one of parallelism_config_tp_size and _sp_size, and no _cp_size")
    return tensor, sequence


def print_plans(config: Config, process_counts: list[int]) -> None:
    """The table of --plan: no data, no weights, no device."""
    rows, length, most = config.global_batch_size, config.data.sequence_length, config.batch.max_micro_batch_size
    table = [["processes", "data-parallel", "micro-batch", "accumulation", "rows/step", "tokens/step", "idle", "nearest even"]]
    for n in process_counts:
        plan = plan_batch(rows, rows if most == "auto" else most, n, length, math.prod(parallel_sizes()))
        table.append([f"{x:,}" for x in (n, plan.data_parallel_size, plan.micro_batch_size, plan.grad_accum_steps, rows, plan.tokens_per_step)])
        table[-1] += [f"{plan.idle_share:.1%}", plan.even_neighbours()] if plan.idle_share else ["0%", "is even"]
    for line in table:
        print("  ".join(cell.rjust(max(len(row[i]) for row in table)) for i, cell in enumerate(line)))
    if most == "auto":
        print("max_micro_batch_size is auto, found out at launch; the table is for a device where all its rows fit.")


# 3. Data --------------------------------------------------------------------------------------------------------------
# Documents are tokenized once, into memory-mapped Arrow files. A row is one or more pieces of that stream of tokens, so
# it does not depend on the number of tokenizing workers, and finding row 100,000,000 costs what finding row 0 costs.


def list_files(patterns: list[str]) -> list[str]:
    """The files that the patterns name, less those that a !pattern names; a folder stands for all in it."""
    found, excluded = [], [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    for pattern in (pattern for pattern in patterns if not pattern.startswith("!")):
        pattern = pattern.replace("{stdlib}", sysconfig.get_path("stdlib"))
        pattern = os.path.join(pattern, "**") if os.path.isdir(pattern) else pattern
        matches = [pattern] if "://" in pattern else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
        matches = [file for file in matches if not any(fnmatch.fnmatch(file, x) for x in excluded)]
        if not matches:
            raise UserError(f"data.files: nothing matches {pattern!r} in {os.getcwd()}")
        found += matches
    return found


def load_source(source: Source) -> datasets.Dataset:
    """The documents of one source, memory-mapped."""
    builders = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
    try:
        if source.files:
            files = list_files(source.files)
            builder = builders.get(Path(files[0]).suffix, "text")
            options = {"sample_by": "document"} if builder == "text" else {}  # Otherwise a document per line.
            return datasets.load_dataset(builder, data_files=files, split="train", **options)
        if os.path.isfile(os.path.join(source.path, "dataset_dict.json")):
            return datasets.load_from_disk(source.path)[source.split]
        if os.path.isfile(os.path.join(source.path, "state.json")):
            return datasets.load_from_disk(source.path)
        return datasets.load_dataset(source.path, source.name, split=source.split)
    except UserError:
        raise
    except Exception as error:  # The library raises a dozen types for a user's mistakes.
        cause, local = error.__cause__ or error, source.files or os.path.exists(source.path)
        hint = "" if local else "; without network access, give a local folder"
        raise UserError(f"data: cannot load {source.path or source.files}: {type(cause).__name__}: {cause}{hint}") from error


def tokenize_text(batch: dict, column: str, tokenizer) -> dict:
    """Token ids of each document, ending in the tokenizer's end-of-text token where it has one."""
    ids, end = tokenizer(batch[column])["input_ids"], tokenizer.eos_token_id
    return {"input_ids": [x if end is None or x[-1:] == [end] else x + [end] for x in ids]}


def tokenize_chat(batch: dict, column: str, tokenizer) -> dict:
    """Token ids of each conversation, and labels that are -100 except for what the assistant says.

    A template with {% generation %} markers tells which tokens those are. Without, an assistant's turn is what follows
    the prompt for an answer; templates that render a turn differently once later ones are there are refused.
    """
    rows, render = {"input_ids": [], "labels": []}, tokenizer.apply_chat_template
    marked = re.search(r"{%-?\s*generation", tokenizer.chat_template) is not None
    for messages in batch[column]:
        full = render(messages, return_dict=True, return_assistant_tokens_mask=marked)
        ids, said = full["input_ids"], full["assistant_masks"] if marked else [0] * len(full["input_ids"])
        for i in [i for i, message in enumerate(messages) if message["role"] == "assistant" and not marked]:
            before = render(messages[:i], add_generation_prompt=True, return_dict=True)["input_ids"]
            after = render(messages[: i + 1], return_dict=True)["input_ids"]
            if ids[: len(before)] != before or ids[: len(after)] != after:
                raise ValueError("the chat template changes earlier turns once later ones are there; give one with "
                                 "{% generation %} markers as data.chat_template")
            said[len(before) : len(after)] = [1] * (len(after) - len(before))
        rows["input_ids"].append(ids)
        rows["labels"].append([x if s else -100 for x, s in zip(ids, said)])
    return rows


def tokenize(documents: datasets.Dataset, config: Data, tokenizer) -> datasets.Dataset:
    """Documents as lists of token ids (and labels): in parallel, cached by the content of data and tokenizer."""
    column = config.column or {"text": "text", "chat": "messages", "tokens": "input_ids"}[config.format]
    if column not in documents.column_names:
        raise UserError(f"data.column: no column {column!r}; the data has {', '.join(documents.column_names)}")
    if config.format == "tokens":
        documents = documents.rename_column(column, "input_ids") if column != "input_ids" else documents
        wanted = [name for name in ("input_ids", "labels") if name in documents.column_names]
        return documents.select_columns(wanted).flatten_indices()
    if config.format == "chat" and not tokenizer.chat_template:
        raise UserError(f"data.tokenizer {config.tokenizer} has no chat template; give one as data.chat_template")
    workers = min(config.num_workers or len(os.sched_getaffinity(0)), len(documents) // 64)
    try:  # The arguments are plain values because they key the cache: a config object differs between launches.
        return documents.map(
            tokenize_chat if config.format == "chat" else tokenize_text, batched=True, batch_size=64, desc="Tokenizing",
            fn_kwargs={"column": column, "tokenizer": tokenizer}, num_proc=workers if workers > 1 else None,
            remove_columns=documents.column_names)
    except Exception as error:
        raise UserError(f"data: cannot use column {column!r} as {config.format}: {type(error).__name__}: {error}") from error


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing bin packing (Johnson 1973): pieces in row order, and where each row starts in them."""
    rows, spaces = [], []  # spaces: sorted (tokens left, row)
    for piece in np.argsort(-lengths, kind="stable").tolist():
        fitting = bisect.bisect_left(spaces, (int(lengths[piece]), -1))
        space, row = spaces.pop(fitting) if fitting < len(spaces) else (capacity, len(rows))
        rows += [[]] if row == len(rows) else []
        rows[row].append(piece)
        bisect.insort(spaces, (space - int(lengths[piece]), row))
    return np.concatenate(rows), np.cumsum([0] + [len(row) for row in rows[:-1]])


class Dataset:
    """Rows of several sources, numbered in one sequence, and the endless stream of shuffled epochs over them.

    A row is one or more pieces of the stream of all documents' tokens: pieces first[row] to first[row + 1] - 1, piece p
    from token starts[p] to stops[p] - 1. Documents longer than a row continue in further rows; nothing is dropped.
    """

    BLOCK = 1000  # Positions of the shuffled stream in which each source has exactly its share.

    def __init__(self, sources: list[datasets.Dataset], weights: list[float], config: Data, seed: int):
        tokens, self.seed = datasets.concatenate_datasets(sources).data, seed
        self.columns = {name: tokens.column(name) for name in tokens.column_names}
        lengths = {name: pc.list_value_length(column).to_numpy() for name, column in self.columns.items()}
        if any((lengths[name] != lengths["input_ids"]).any() for name in lengths):
            raise UserError("data: input_ids and labels differ in length")
        self.offsets = np.concatenate(([0], np.cumsum(lengths["input_ids"], dtype=np.int64)))
        starts, stops, first, self.bases, length = [], [], [], [0], config.sequence_length
        for low, high in zip(ends := np.cumsum([0] + [len(s) for s in sources]), ends[1:]):
            offsets = np.unique(self.offsets[low : high + 1])  # Empty documents have no rows.
            if config.packing == "concat":  # Cut at multiples of the row length; a piece ends wherever a document does.
                cuts = np.arange(offsets[0], offsets[-1], length)
                edges = np.union1d(offsets, cuts)
                order, rows = slice(None), np.searchsorted(edges, cuts)
            else:
                counts = -(-np.diff(offsets) // length)
                nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
                edges = np.append(np.repeat(offsets[:-1], counts) + nth * length, offsets[-1])
                best = config.packing == "best_fit" and len(edges) > 1
                order, rows = best_fit(np.diff(edges), length) if best else (slice(None), np.arange(len(edges) - 1))
            first.append(rows + sum(map(len, starts)))
            starts.append(edges[:-1][order])
            stops.append(edges[1:][order])
            self.bases.append(self.bases[-1] + len(rows))
            if not len(rows):
                raise UserError("data: a source has no tokens")
        self.starts, self.stops = np.concatenate(starts), np.concatenate(stops)
        self.first = np.append(np.concatenate(first), len(self.starts))
        self.lengths = np.add.reduceat((self.stops - self.starts).astype(np.int32), self.first[:-1])
        shares = np.diff(np.round(np.cumsum([0] + weights) / sum(weights) * self.BLOCK)).astype(int)
        self.slots = np.repeat(np.arange(len(sources)), shares)
        # A permutation is as large as the data: keep the two that a step may straddle, for each source.
        self.permutation = lru_cache(2 * len(sources))(self.permutation)

    def __len__(self) -> int:
        return len(self.lengths)

    def permutation(self, source: int, epoch: int) -> np.ndarray:
        seed = [self.seed, epoch, source] if source else [self.seed, epoch]
        return np.random.default_rng(seed).permutation(self.bases[source + 1] - self.bases[source])

    def rows_at(self, start: int, count: int) -> np.ndarray:
        """Row numbers at positions start to start + count - 1 of the shuffled stream."""
        positions, owners = np.arange(start, start + count), np.zeros(count, int)
        blocks, slots = np.divmod(positions, self.BLOCK)
        for block in np.unique(blocks) if len(self.bases) > 2 else []:
            order = np.random.default_rng([self.seed, block, 0, self.BLOCK]).permutation(self.slots)
            here = blocks == block
            owners[here] = order[slots[here]]
            for source in range(len(self.bases) - 1):
                mine, earlier = here & (owners == source), np.cumsum(order == source) - 1
                positions[mine] = block * (earlier[-1] + 1) + earlier[slots[mine]]
        rows = np.empty(count, np.int64)
        for source in np.unique(owners):
            epochs, offsets = np.divmod(positions, self.bases[source + 1] - self.bases[source])
            for epoch in np.unique(epochs[owners == source]):
                mine = (owners == source) & (epochs == epoch)
                rows[mine] = self.bases[source] + self.permutation(source, int(epoch))[offsets[mine]]
        return rows

    def read(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(input_ids, targets) of each piece; targets[i] is the token that follows input_ids[i], or -100 for none."""
        pieces = []
        for piece in range(self.first[row], self.first[row + 1]):
            document = int(np.searchsorted(self.offsets, self.starts[piece], side="right")) - 1
            span = slice(*(int(edge - self.offsets[document]) for edge in (self.starts[piece], self.stops[piece])))
            # Zero-copy views of the memory-mapped file.
            ids, labels = (self.columns[name][document].values[span].to_numpy() for name in ("input_ids", self.labels))
            pieces.append((ids, np.append(labels[1:], -100)))
        return pieces

    @property
    def labels(self) -> str:
        return "labels" if "labels" in self.columns else "input_ids"

    def sizes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, target tokens) of each row. A piece's first token is no target: nothing comes before it."""
        if self.labels == "labels":
            return self.lengths[rows], np.array([sum((t != -100).sum() for _, t in self.read(row)) for row in rows], int)
        return self.lengths[rows], self.lengths[rows] - (self.first[rows + 1] - self.first[rows])

    def fingerprint(self) -> int:
        """Tells whether a checkpoint was trained on these rows, in the order in which this numpy shuffles them."""
        some = np.random.default_rng([0, 0]).permutation(len(self))[:100]
        ids = [ids.astype(np.int64) for row in some for ids, _ in self.read(row)]
        return zlib.crc32(np.concatenate([some, *ids]).tobytes(), zlib.crc32(self.lengths.tobytes()))


def load_data(config: Data, tokenizer, seed: int) -> tuple[Dataset, Dataset | None]:
    """Training rows, and evaluation rows or None."""
    sources = config.sources or [config]
    train = [load_source(source) for source in sources]
    held_out = [load_source(config.eval_source)] if config.eval_source else []
    for i, documents in enumerate(train if config.eval_fraction else []):
        order, count = np.random.default_rng(seed).permutation(len(documents)), round(len(documents) * config.eval_fraction)
        if not 0 < count < len(documents):
            raise UserError(f"data.eval_fraction {config.eval_fraction} of {len(documents)} documents leaves nothing to "
                            "evaluate or to train on; use data.eval_source")
        train[i], held_out = documents.select(np.sort(order[count:])), held_out + [documents.select(np.sort(order[:count]))]
    train, held_out = ([tokenize(documents, config, tokenizer) for documents in part] for part in (train, held_out))
    eval_data = Dataset(held_out, [1.0] * len(held_out), config, seed) if held_out else None
    return Dataset(train, [source.weight for source in sources], config, seed), eval_data


@dataclass(frozen=True)
class Shape:
    """How rows become tensors: padded to a multiple; sequence-parallel rank `part` of `parts` takes its slice."""

    multiple: int = 1
    parts: int = 1
    part: int = 0
    number_documents: bool = True

    def width(self, longest: int) -> int:
        return max(1, -(-longest // self.multiple)) * self.multiple


def collate(rows: list[list[tuple[np.ndarray, np.ndarray]]], shape: Shape) -> dict[str, torch.Tensor]:
    """Rows as int64 tensors [rows, width], padded on the right: input_ids, targets, position_ids, documents.

    `documents` numbers the pieces of a row so that attention can keep them apart, over the whole width also where the
    others are a slice. Where every row is one piece it is left out with the positions: padding comes after every real
    token, so causal attention needs no mask. No rows make one row without targets, because all ranks must take part.
    """
    width = shape.width(max((sum(len(ids) for ids, _ in row) for row in rows), default=1))
    input_ids, documents = np.zeros((2, max(1, len(rows)), width), np.int64)
    targets, position_ids = np.full_like(input_ids, -100), np.zeros_like(input_ids) + np.arange(width)
    for r, row in enumerate(rows):
        at = 0
        for number, (ids, following) in enumerate(row):
            input_ids[r, at : at + len(ids)], targets[r, at : at + len(ids)] = ids, following
            position_ids[r, at:], documents[r, at:] = np.arange(width - at), number
            at += len(ids)
    own = slice(shape.part * width // shape.parts, (shape.part + 1) * width // shape.parts)
    batch = {"input_ids": input_ids[:, own], "targets": targets[:, own]}
    if documents.any() or shape.parts > 1:
        batch |= {"position_ids": position_ids[:, own]} | ({"documents": documents} if shape.number_documents else {})
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()}


@dataclass
class Step:
    """The work of one optimizer step: this rank's micro-batches, and what all ranks process together."""

    rows: np.ndarray
    micro_batches: list[dict[str, torch.Tensor]]
    target_tokens: int
    real_tokens: int
    tokens: int


def load_step(step: int, data: Dataset, plan: Plan, rank: int, shape: Shape, vocab_size: int) -> Step:
    """The step's rows, sorted by length, cut as the plan says. Raises UserError for rows that cannot be trained on."""
    rows = data.rows_at((step - 1) * plan.global_batch_size, plan.global_batch_size)
    lengths, targets = data.sizes(rows)
    if not targets.sum():
        raise UserError(f"step {step}: no row has a target token ({rows[:8].tolist()}...); check the labels")
    by_length = np.argsort(lengths, kind="stable")
    rows, lengths = rows[by_length], lengths[by_length]
    micro_batches = [collate([data.read(row) for row in rows[piece]], shape) for piece in plan.micro_batches(rank)]
    if (worst := max(int(batch["input_ids"].max()) for batch in micro_batches)) >= vocab_size:
        raise UserError(f"step {step}: token id {worst} in the data, but the vocabulary ends at {vocab_size - 1}")
    # Every rank works out what the others process: no count ever needs communication.
    pieces = [piece for r in range(plan.data_parallel_size) for piece in plan.micro_batches(r)]
    slots = sum(max(1, p.stop - p.start) * shape.width(int(lengths[p].max(initial=1))) for p in pieces)
    return Step(rows, micro_batches, int(targets.sum()), int(lengths.sum()), slots)


# 4. Model -------------------------------------------------------------------------------------------------------------


def load_pretrained(what: str, name: str, load, **options) -> Any:
    """load(name, **options) of transformers, its many errors as one UserError."""
    try:
        return load(name, **options)
    except Exception as error:
        hint = "" if os.path.exists(name) else "; without network access, give a local folder"
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{what}: cannot load {name}: {type(error).__name__}: {reason}{hint}") from error


def load_tokenizer(config: Config) -> transformers.PreTrainedTokenizerBase:
    if config.data.tokenizer == "bytes":
        tokenizer = transformers.ByT5Tokenizer()
    else:
        tokenizer = load_pretrained("data.tokenizer", config.data.tokenizer, transformers.AutoTokenizer.from_pretrained,
                                    trust_remote_code=config.model.trust_remote_code)
    if config.data.chat_template:
        try:
            tokenizer.chat_template = Path(config.data.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"data.chat_template {config.data.chat_template}: {error.strerror}") from None
    return tokenizer


def model_config(config: Config, vocab_size: int) -> transformers.PreTrainedConfig:
    """The transformers config of the model. Raises UserError for a model that does not exist or fit the data."""
    length = config.data.sequence_length
    if config.model.pretrained:
        found = load_pretrained("model.pretrained", config.model.pretrained, transformers.AutoConfig.from_pretrained,
                                trust_remote_code=config.model.trust_remote_code)
    else:
        given = {"vocab_size": vocab_size, "max_position_embeddings": length, "use_cache": False, **config.model.architecture}
        try:
            found = transformers.AutoConfig.for_model(**given)
        except Exception as error:
            raise UserError(f"model.architecture: {str(error).strip().splitlines()[0]}") from error
        if unknown := [name for name in given if name not in found.to_dict() and name not in found.attribute_map]:
            raise UserError(f"model.architecture: {found.model_type} has no setting {', '.join(unknown)}")
    if (positions := getattr(found, "max_position_embeddings", None)) and length > positions:
        raise UserError(f"data.sequence_length {length} exceeds the model's {positions} positions (max_position_embeddings)")
    return found


def has_plain_attention(found: transformers.PreTrainedConfig, config: Model) -> bool:
    """Whether attend() serves: SDPA, no sliding windows, one type of layer. Otherwise transformers makes the masks."""
    sliding = getattr(found, "use_sliding_window", True) and getattr(found, "sliding_window", None)
    return config.attention == "sdpa" and not sliding and len(set(getattr(found, "layer_types", None) or [])) < 2


def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, group=None, **_):
    """SDPA on [rows, heads, width, head size] with the mask of compute_loss(), or causal where that is None.

    For "sdpa" transformers builds masks itself, and reads the positions on the host in every pass to do so, which makes
    a GPU wait. With a sequence-parallel group (Ulysses, arXiv:2309.14509) each rank holds a slice of the sequence: ranks
    trade it for the whole sequence of a share of the heads, and trade back.
    """
    parts = dist.get_world_size(group) if group else 1

    def trade(x: torch.Tensor, split: int, join: int) -> torch.Tensor:
        received = torch.stack([part.contiguous() for part in x.chunk(parts, split)])
        return torch.cat(all_to_all_single(torch.empty_like(received), received, group=group).unbind(), join)

    if parts > 1:
        copies = parts // math.gcd(parts, key.shape[1])  # Fewer key heads than ranks: some ranks share one.
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        query, key, value = (trade(x, 1, 2) for x in (query, key, value))
    causal = attention_mask is None and query.shape[2] > 1  # A single query is generation's, after a cache.
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, dropout, causal, scale=scaling,
                                         enable_gqa=query.shape[1] != key.shape[1])
    return (trade(out, 2, 1) if parts > 1 else out).transpose(1, 2).contiguous(), None


def build_model(config: Config, found: transformers.PreTrainedConfig, vocab_size: int, group=None) -> torch.nn.Module:
    """The model, the same on every rank: from its seed, or from its files. `group`: sequence-parallel ranks."""
    transformers.AttentionInterface.register("attend", partial(attend, group=group))
    attention, tensor_parallel = "attend" if has_plain_attention(found, config.model) else config.model.attention, parallel_sizes()[0]
    options = {"dtype": getattr(torch, config.model.dtype), "attn_implementation": attention}
    if group and attention != "attend":
        raise UserError("sequence parallelism needs model.attention sdpa and a model without sliding windows")
    torch.manual_seed(config.run.seed)
    if config.model.pretrained:
        model = load_pretrained("model.pretrained", config.model.pretrained, transformers.AutoModelForCausalLM.from_pretrained,
                                trust_remote_code=config.model.trust_remote_code, config=found, **options)
    else:
        try:
            model = transformers.AutoModelForCausalLM.from_config(found, **options)
        except Exception as error:
            raise UserError(f"model.architecture: {type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    if vocab_size > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(vocab_size)
    if config.model.lora:
        model = add_lora(model, config.model.lora)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.model.fused_loss:
        fuse_loss(model)
    if config.model.compile == "full":
        model.compile()
    elif config.model.compile == "regional":
        for layer in (module for module in model.modules() if type(module).__name__ in model._no_split_modules):
            layer.compile()
    return model


def add_lora(model: torch.nn.Module, lora: Lora) -> torch.nn.Module:
    modules = lora.target_modules[0] if lora.target_modules == ["all-linear"] else lora.target_modules
    try:
        return peft.get_peft_model(model, peft.LoraConfig(
            task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=modules))
    except ValueError as error:
        raise UserError(f"model.lora: {error}") from error


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed over the tokens that have a target, in float32."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")


def fuse_loss(model: torch.nn.Module, chunk: int = 1024) -> None:
    """Make the output layer return the loss of `head.targets`, if set, a chunk of tokens at a time."""
    head, config = model.get_output_embeddings(), model.config
    project = head.forward
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_scaling", 1) != 1:
        raise UserError("model.fused_loss: this model changes its logits after the output layer")

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if (targets := head.__dict__.pop("targets", None)) is None:
            return project(hidden)
        pieces = zip(hidden.flatten(0, 1).split(chunk), targets.flatten().split(chunk))
        return sum(checkpoint(lambda h, t: cross_entropy(project(h), t), h, t, use_reentrant=False) for h, t in pieces)

    head.forward, head.fused = forward, True


def compute_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], head: torch.nn.Module) -> torch.Tensor:
    """Sum of the cross-entropy over a micro-batch's targets. `head`: the model's output layer."""
    inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    if "documents" in batch:
        documents = batch["documents"]  # Mask [rows, 1, width, width]: earlier tokens of the same document.
        inputs["attention_mask"] = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    if hasattr(head, "fused"):
        head.__dict__["targets"] = batch["targets"]
        return model(**inputs, use_cache=False).logits
    return cross_entropy(model(**inputs, use_cache=False).logits, batch["targets"])


def flops_per_token(found: transformers.PreTrainedConfig, config: Config) -> float:
    """Forward and backward matrix FLOPs per token at the full row length, recomputation not counted.

    Counted by torch on a model without storage, so it holds for any architecture and for frozen weights. Eager attention
    because the counter does not look inside fused kernels. For a Llama this is 6 N + 12 L H Q T of PaLM
    (arXiv:2204.02311, appendix B), with N less the embedding.
    """
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(found), attn_implementation="eager")
        model = add_lora(model, config.model.lora) if config.model.lora else model
        ids = torch.zeros(1, config.data.sequence_length, dtype=torch.long)
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops() / config.data.sequence_length


# 5. Optimizer ---------------------------------------------------------------------------------------------------------


def build_optimizer(model: torch.nn.Module, config: Optim) -> torch.optim.Optimizer:
    """AdamW or SGD over two groups: matrices decay, norms and biases do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
              {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
    options = {"lr": config.learning_rate, "fused": True}  # A fused step obeys Guard's flag on the device.
    if config.name == "sgd":
        return torch.optim.SGD([g for g in groups if g["params"]], momentum=config.adam_beta1, **options)
    betas = config.adam_beta1, config.adam_beta2
    return torch.optim.AdamW([g for g in groups if g["params"]], betas=betas, eps=config.adam_eps, **options)


def learning_rate_at(config: Optim, step: int, max_steps: int) -> float:
    """Learning rate of a step, 1 to max_steps. A function, because a scheduler's state is there to be lost or skewed."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    span = max_steps - config.warmup_steps
    if config.schedule == "wsd":
        span = min(span, round(max_steps * config.decay_fraction))
    done = max(0, step - (max_steps - span)) / max(1, span)  # Share of the decay: 0 on the plateau, 1 at the last step.
    shape = {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * done))}.get(config.schedule, 1 - done)
    return config.learning_rate * (config.min_learning_rate_ratio + (1 - config.min_learning_rate_ratio) * shape)


class NonFinite(ArithmeticError):
    """The loss or the gradient norm is not finite: exit status 1."""


class Guard:
    """Keeps non-finite numbers out of the weights without a host read per step.

    check() sets `found_inf` on the device, and a fused optimizer then does nothing, its step count included. With
    on_nonfinite stop the flag sticks, so the weights stay as the last good step left them until read() ends the run.
    """

    def __init__(self, config: Run, device: torch.device):
        self.stop, self.limit = config.on_nonfinite == "stop", config.max_nonfinite_steps
        self.state = torch.zeros(4, device=device)  # First bad step, bad steps, bad steps in a row, longest such row.

    def check(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        first, count, row, longest = self.state
        bad = 1 - (torch.isfinite(loss) & torch.isfinite(grad_norm)).float()
        bad = torch.maximum(bad, (first > 0).float()) if self.stop else bad
        row = (row + 1) * bad
        first = torch.where((first == 0) & (bad > 0), float(step), first)
        self.state = torch.stack([first, count + bad, row, torch.maximum(longest, row)])
        optimizer.found_inf = bad

    def read(self) -> int:
        """Skipped steps so far. Waits for the device. Raises NonFinite where the run must end."""
        first, count, _, longest = map(int, self.state.tolist())
        if count and self.stop:
            raise NonFinite(f"the loss or the gradient norm of step {first} is not finite; that update was not made")
        if longest >= self.limit:
            raise NonFinite(f"{longest} updates in a row were skipped because the loss or gradient norm was not finite")
        return count


# 6. Throughput --------------------------------------------------------------------------------------------------------

TRAINING = ("data", "micro_steps", "optimizer")  # The phases that rates are about.

# Dense peak TFLOP/s by device and precision ("no" is float32), from the vendors' datasheets, without sparsity.
PEAK_TFLOPS = {
    "B200": {"fp8": 4500, "bf16": 2250, "fp16": 2250, "no": 75}, "H200": {"fp8": 1979, "bf16": 989, "fp16": 989, "no": 67},
    "H100 PCIe": {"fp8": 1513, "bf16": 756, "fp16": 756, "no": 51}, "H100": {"fp8": 1979, "bf16": 989, "fp16": 989, "no": 67},
    "A100": {"bf16": 312, "fp16": 312, "no": 19.5}, "L40S": {"fp8": 733, "bf16": 362, "fp16": 362, "no": 91.6},
    "L4": {"fp8": 242, "bf16": 121, "fp16": 121, "no": 30.3}, "V100": {"fp16": 125, "no": 15.7}, "T4": {"fp16": 65, "no": 8.1},
}


def peak_flops(device: torch.device, precision: str, config: Perf) -> float | None:
    """Peak FLOP/s of one device in the precision of this run, None where it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = next((peaks for known, peaks in PEAK_TFLOPS.items() if known in name), {})
    peak = config.peak_tflops or peaks.get(precision)
    return peak and peak * 1e12


class Meter:
    """Books every second of the run to exactly one phase and counts what was processed; rates are over a window.

    By the host's clock: a window opens and closes at log lines, after a device value was read on the host, so all work
    queued on a GPU is inside. The first step of a launch (compilation, memory pools) is booked as warmup.
    """

    def __init__(self, clock=time.perf_counter, started: float | None = None):
        self.clock, self.phase, self.since = clock, "startup", clock() if started is None else started
        self.seconds, self.counts, self.window, self.warm = Counter(), Counter(), (Counter(), Counter()), False

    def enter(self, phase: str) -> str:
        """Book the time since the last call to the phase that ends here. Returns that phase."""
        now, ended = self.clock(), self.phase
        self.seconds[ended if self.warm or ended not in TRAINING else "warmup"] += now - self.since
        self.phase, self.since = phase, now
        return ended

    def count(self, step: Step) -> None:
        """Book a finished step."""
        self.enter(self.phase)
        if self.warm:
            self.counts.update(steps=1, rows=len(step.rows), tokens=step.tokens, real_tokens=step.real_tokens)
        self.warm = True

    def rates(self, num_processes: int, flops: float, peak: float | None) -> dict[str, float | None]:
        """The perf/ metrics since the last call, None where no whole step lies in between."""
        self.enter(self.phase)
        seconds, counts = self.seconds - self.window[0], self.counts - self.window[1]
        self.window, busy = (self.seconds.copy(), self.counts.copy()), sum(seconds[phase] for phase in TRAINING)

        def per(amount: float, base: float) -> float | None:
            return amount / base if counts["steps"] and base > 0 else None

        return {
            "perf/tokens_per_second": per(counts["tokens"], busy),
            "perf/tokens_per_second_per_device": per(counts["tokens"], busy * num_processes),
            "perf/micro_step_tokens_per_second_per_device": per(counts["tokens"], seconds["micro_steps"] * num_processes),
            "perf/real_tokens_per_second": per(counts["real_tokens"], busy),
            "perf/rows_per_second": per(counts["rows"], busy),
            "perf/step_seconds": per(busy, counts["steps"]),
            "perf/data_seconds": per(seconds["data"], counts["steps"]),
            # Padding is not useful work: the model's FLOPs are those of the real tokens.
            "perf/mfu": per(counts["real_tokens"] * flops, busy * num_processes * (peak or 0)),
        }

    def summary(self) -> dict[str, float]:
        """Where the wall clock went, and tokens per second of training time and of all time."""
        self.enter(self.phase)
        total, busy = sum(self.seconds.values()), sum(self.seconds[phase] for phase in TRAINING)
        return {f"summary/{phase}_seconds": spent for phase, spent in self.seconds.items()} | {
            "summary/wall_seconds": total, "summary/tokens_per_second": self.counts["tokens"] / busy if busy else None,
            "summary/goodput_tokens_per_second": self.counts["tokens"] / total}


# 7. Checkpoints and the run folder ------------------------------------------------------------------------------------


def write_json(path: Path, content: dict) -> None:
    """Write or replace a file so that a reader sees the old content or the new, never half of it."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(draft, path)


def lock_folder(folder: Path, patience_seconds: float = 45):
    """An open file that holds the run folder until the process ends. Raises UserError if another run keeps it.

    Patient, because the ranks of a launcher that was just killed may still be saving.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")
    except OSError as error:
        raise UserError(f"run.output_dir {folder}: {error.strerror}") from None
    deadline = time.monotonic() + patience_seconds
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        if time.monotonic() > deadline:
            raise UserError(f"run.output_dir {folder} is in use by another run; stop that one or choose another folder")
        time.sleep(0.5)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


class Checkpoints:
    """Complete or absent: written to a temporary folder, listed with checksums in a manifest, then renamed.

    torch.distributed.checkpoint in safetensors files: every rank writes what it holds, and any number of ranks under any
    strategy reads what it needs. Writing goes on in the background once the tensors are copied.
    """

    def __init__(self, folder: Path, keep: int, accelerator: Accelerator):
        self.folder, self.keep, self.is_main = folder, keep, accelerator.is_main_process
        # Background saves run collectives in a thread: without a group of their own they would meet training's.
        self.group = dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        self.pool, self.pending = ThreadPoolExecutor(1), None
        for leftover in folder.glob(".*.tmp") if self.is_main else []:
            shutil.rmtree(leftover)

    def all(self) -> list[Path]:
        """Checkpoint folders, newest first."""
        return sorted(self.folder.glob("step-*"), reverse=True)

    def state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[dict, dict, dict]:
        """(weights, optimizer state, the tensors of both): what is trained, by the names of the bare model."""
        options = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True)
        weights, moments = get_state_dict(model, [optimizer] if optimizer else [], options=options)
        both = {f"model.{k}": v for k, v in weights.items()} | {f"optimizer.{k}": v for k, v in moments.items()}
        return weights, moments, {k: v for k, v in both.items() if isinstance(v, torch.Tensor)}

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, manifest: dict) -> None:
        """Start saving. Raises what went wrong with the save before, if anything did."""
        self.wait()
        final = self.folder / f"step-{manifest['step']:08d}"
        draft = self.folder / f".{final.name}.tmp"
        writer = dcp.HuggingFaceStorageWriter(str(draft), save_distributed=True)
        saved = dcp.async_save(self.state(model, optimizer)[2], storage_writer=writer, process_group=self.group)
        # Rank 0 is done only when it has every rank's result: it alone completes the checkpoint.
        self.pending = self.pool.submit(self.complete, saved, draft, final, manifest) if self.is_main else saved

    def complete(self, saved: Future, draft: Path, final: Path, manifest: dict) -> None:
        saved.result()
        files = {path.name: {"bytes": path.stat().st_size, "crc32": checksum(path)} for path in sorted(draft.iterdir())}
        write_json(draft / "manifest.json", manifest | {"files": files})
        shutil.rmtree(final, ignore_errors=True)  # A damaged one of the same step that resume passed over.
        os.replace(draft, final)
        for old in self.all()[self.keep :]:
            shutil.rmtree(old)

    def wait(self) -> None:
        """Until the save under way is complete."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    @staticmethod
    def verify(folder: Path) -> dict:
        """The manifest of a checkpoint. Raises UserError that names what is missing, cut short or altered."""
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            files = manifest["files"] if manifest["format"] == FORMAT else None
            for name, listed in files.items():
                path = folder / name
                if not path.is_file():
                    raise UserError(f"{path} is missing")
                if path.stat().st_size != listed["bytes"] or checksum(path) != listed["crc32"]:
                    raise UserError(f"{path} is not as it was written: its size or checksum differs from the manifest's")
        except (OSError, json.JSONDecodeError, AttributeError, KeyError, TypeError):
            raise UserError(f"{folder} is no checkpoint of this script: no readable manifest.json of its format") from None
        return manifest

    def newest(self) -> tuple[Path, dict] | None:
        """The newest undamaged checkpoint and its manifest; damaged ones are named and passed over."""
        for folder in self.all():
            try:
                return folder, self.verify(folder)
            except UserError as error:
                say(f"Checkpoint passed over: {error}")
        if self.all():
            raise UserError(f"no checkpoint in {self.folder} is usable; delete them, or choose another run.output_dir")
        return None

    def load(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Load into the model and, if given, the optimizer, whatever strategy and process count wrote the checkpoint."""
        weights, moments, tensors = self.state(model, optimizer)
        own = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] if optimizer else []
        try:
            dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
        except Exception as error:
            raise UserError(f"{folder} does not fit this model: {str(error).strip().splitlines()[0]}") from error
        weights |= {k: tensors[f"model.{k}"] for k in weights}
        moments |= {k: tensors[f"optimizer.{k}"] for k in moments if f"optimizer.{k}" in tensors}
        options = StateDictOptions(strict=False, flatten_optimizer_state_dict=True)
        set_state_dict(model, [optimizer] if optimizer else [], model_state_dict=weights, optim_state_dict=moments, options=options)
        for group, hyperparameters in zip(optimizer.param_groups if optimizer else [], own):
            group.update(hyperparameters)  # The config's, not the checkpoint's.


def differences(ours: dict, theirs: dict, prefix: str = "") -> list[str]:
    """The settings, by dotted path, that differ between two configs and change the mathematics."""
    found = []
    for name in sorted(ours.keys() | theirs.keys()):
        path, a, b = prefix + name, ours.get(name), theirs.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, path + ".")
        elif a != b and not HARMLESS.fullmatch(path):
            found.append(f"{path}: {b!r} in the checkpoint, {a!r} now")
    return found


def find_checkpoint(config: Config, checkpoints: Checkpoints) -> tuple[Path, dict] | None:
    """The checkpoint to continue from and its manifest, the same on every rank; None to start at step 0."""
    choice = [None]
    if checkpoints.is_main:
        if config.run.resume == "never" and checkpoints.all():
            raise UserError(f"run.resume is never, but {checkpoints.folder} is not empty; choose another run.output_dir")
        chosen = Path(config.run.resume)
        choice = [checkpoints.newest() if config.run.resume in ("auto", "never") else (chosen, checkpoints.verify(chosen))]
        changed = differences(config.model_dump(), choice[0][1]["config"]) if choice[0] else []
        if changed and not config.run.allow_changes:
            raise UserError(f"the config differs from that of {choice[0][0]}:\n  " + "\n  ".join(changed) + "\nChoose a new "
                            "run.output_dir, or continue with these changes: --run.allow_changes true")
    if checkpoints.group:
        dist.broadcast_object_list(choice)
    return choice[0]


def export_model(model, accelerator: Accelerator, tokenizer, folder: Path, merge: bool = False) -> None:
    """Write what from_pretrained() loads. Every rank takes part: sharded weights are gathered."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if accelerator.is_main_process:
        draft, bare = folder.with_name(f".{folder.name}.tmp"), accelerator.unwrap_model(model)
        shutil.rmtree(draft, ignore_errors=True)
        if merge:
            bare = copy.deepcopy(bare).merge_and_unload()
            weights = bare.state_dict()
        bare.save_pretrained(draft, state_dict=weights)
        tokenizer.save_pretrained(draft)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(draft, folder)
    accelerator.wait_for_everyone()


class Stop:
    """Lets a signal to any rank stop all ranks after the same step."""

    def __init__(self, accelerator: Accelerator):
        self.requested, self.since, self.work, self.flag = "", 0.0, None, torch.zeros(1)
        self.group = dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)
        if {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
            threading.Thread(target=self.watch_launcher, args=(os.getppid(),), daemon=True).start()

    def on_signal(self, number: int, frame) -> None:
        # Launchers repeat signals, and a terminal signals launcher and ranks alike: only a later one insists.
        if self.requested and time.monotonic() - self.since > 2:
            os._exit(1)
        if not self.requested:
            self.requested, self.since = signal.Signals(number).name, time.monotonic()

    def watch_launcher(self, launcher: int) -> None:
        """Stop when the launcher is gone: nobody else would end its ranks, and a new launch waits for their lock."""
        while os.getppid() == launcher:
            time.sleep(0.5)
        self.requested = self.requested or "the launcher's death"
        time.sleep(20)  # Enough to save while all ranks live; where one does not, the others wait in vain.
        os._exit(1)

    def agreed(self) -> bool:
        """Whether to stop now, the same answer on every rank. To be called once per step.

        Each rank's wish goes into an all-reduce of a host tensor over gloo that is started here and read at the next call:
        no device takes part, and the exchange has a whole step to finish unnoticed.
        """
        if self.group is None:
            return bool(self.requested)
        agreed = self.settle()
        self.flag = torch.tensor([float(bool(self.requested))])
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return agreed

    def settle(self) -> bool:
        """Finish the exchange under way."""
        if self.work:
            self.work.wait()
        self.work = None
        return bool(self.flag.item())


# 8. Evaluation --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(loss_of, data: Dataset, plan: Plan, rank: int, shape: Shape, max_rows: int | None, total) -> float:
    """Mean loss per target token, each row counted once. `total` sums a tensor over the ranks."""
    rows = np.arange(min(len(data), max_rows or len(data)))
    lengths, targets = data.sizes(rows)
    rows = rows[np.argsort(lengths, kind="stable")]
    # Every rank makes as many passes as the others, the last ones maybe without rows, so that collectives match.
    size, own = plan.micro_batch_size, rows[rank :: plan.data_parallel_size]
    passes = -(-len(rows) // (size * plan.data_parallel_size))
    batches = ([data.read(row) for row in own[i * size : (i + 1) * size]] for i in range(passes))
    return total(sum(loss_of(collate(batch, shape)).double() for batch in batches)).item() / int(targets.sum())


@torch.no_grad()
def sample(bare, accelerator: Accelerator, tokenizer, config: Eval, seed: int) -> list[str]:
    """Continuations of the prompts. All ranks generate the same, which sharded weights need and whole ones allow."""
    texts, attention = [], bare.config._attn_implementation
    bare.set_attn_implementation("sdpa" if attention == "attend" else attention)  # Each rank has whole sequences here.
    torch.manual_seed(seed)
    for prompt in config.prompts:
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([ids], device=accelerator.device)
        choice = {"do_sample": True, "temperature": config.temperature} if config.temperature else {"do_sample": False}
        with accelerator.autocast():
            out = bare.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=config.max_new_tokens, use_cache=True,
                                pad_token_id=tokenizer.pad_token_id or 0, synced_gpus=accelerator.num_processes > 1, **choice)
        texts.append(tokenizer.decode(out[0], skip_special_tokens=True))
    bare.set_attn_implementation(attention)
    return texts


def draw_curves(folder: Path) -> None:
    """curves.png from metrics.jsonl: loss against tokens, throughput, and where the time went."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    phases = {k[8:-8].replace("_", " "): v for k, v in lines[-1].items() if k.endswith("_seconds") and k != "summary/wall_seconds"}
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    loss, speed, clock = figure.subplots(1, 3, width_ratios=(2, 1.3, 1.2))
    for key, style, label in (("train/loss", "-", "training batch"), ("eval/loss", "o-", "evaluation")):
        points = [(line["train/tokens"] / 1e6, line[key]) for line in lines if key in line]
        loss.plot(*zip(*points), style, label=label) if points else None
    loss.set(title="Loss", xlabel="tokens (millions)", ylabel="nats per token")
    loss.legend()
    points = [(line["step"], line["perf/tokens_per_second"] / 1e3) for line in lines if line.get("perf/tokens_per_second")]
    speed.plot(*zip(*points)) if points else None
    speed.set(title="Throughput while training", xlabel="step", ylabel="thousand tokens per second", ylim=(0, None))
    clock.bar_label(clock.barh(*zip(*sorted(phases.items(), key=lambda item: item[1]))), fmt="%.1f", padding=3)
    clock.set(title="Where the time went", xlabel="seconds")
    for axes in (loss, speed, clock):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(folder / "curves.png", dpi=110)


# 9. main() and the loop -----------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print from the main process only, without tearing the progress bar."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write(text)


def start_accelerator(config: Config) -> Accelerator:
    """The Accelerator of this launch. Raises UserError where the processes do not form one run."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # One process needs none.
    for library in (transformers, datasets):
        library.utils.logging.set_verbosity_error()
        if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
            library.utils.logging.disable_progress_bar()
    cpu = not torch.accelerator.is_available()
    if cpu and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # accelerate launch sets 1, whatever the machine has.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    try:
        accelerator = Accelerator(
            cpu=cpu, log_with=config.run.trackers, project_dir=config.run.output_dir,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=1, sync_with_dataloader=False, sync_each_batch=config.batch.sync_each_micro_step),
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    except (ValueError, ImportError) as error:
        raise UserError(f"launch: {error}") from error
    if (launched := int(os.environ.get("WORLD_SIZE", 1))) != accelerator.num_processes:
        raise UserError(f"launch: {launched} processes were started that do not see each other (Accelerate counts "
                        f"{accelerator.num_processes}), so each would train alone; launch with a file of accelerate_configs/, "
                        "for several CPU processes with cpu.yaml")
    return accelerator


def versions() -> dict[str, str]:
    """What made this run: library versions, and the git commit of the script where there is one."""
    git = subprocess.run(["git", "-C", Path(__file__).resolve().parent, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    libraries = {module.__name__: str(module.__version__) for module in (torch, accelerate, transformers, datasets, np)}
    return {"python": platform.python_version(), **libraries, "git_commit": git.stdout.strip()}


def flatten(nested: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


class Metrics:
    """metrics.jsonl and the trackers get the same keys, from the main process."""

    def __init__(self, folder: Path, step: int, accelerator: Accelerator, config: Config):
        self.path, self.accelerator = folder / "metrics.jsonl", accelerator
        if accelerator.is_main_process:
            # Steps after the checkpoint are about to be done again.
            lines = self.path.read_text().splitlines() if self.path.exists() else []
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
            draft = self.path.with_name(".metrics.jsonl.tmp")
            draft.write_text("".join(line + "\n" for line in kept))
            os.replace(draft, self.path)
        plain = {k: v if isinstance(v, int | float | str) else json.dumps(v) for k, v in flatten(config.model_dump()).items()}
        accelerator.init_trackers("tensorboard", config=plain)

    def write(self, step: int, values: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        self.accelerator.log({k: v for k, v in values.items() if isinstance(v, int | float)}, step=step)


def largest_micro_batch(most: int, fits) -> int:
    """The largest size up to `most` for which fits(size) holds: doubled until it does not, then the gap is halved."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def show_rows(step: Step, tokenizer) -> None:
    """The first row of the first step as text, and what of it is in the loss."""
    ids, targets = (step.micro_batches[0][name][0] for name in ("input_ids", "targets"))
    said = tokenizer.decode(targets[targets >= 0][:160])
    say(f"First row ({len(ids)} tokens, {int((targets >= 0).sum())} in the loss), shortened: {tokenizer.decode(ids[:160])!r}\n"
        f"  in the loss: {said!r}")


def reports_errors(main):
    """Turns what ends a run into one message from one process, and an exit status: 2 for the user's mistakes, else 1."""

    def wrapped(argv: list[str] | None = None) -> int:
        try:
            return main(sys.argv[1:] if argv is None else argv)
        except (UserError, NonFinite, OSError) as error:
            if os.environ.get("RANK", "0") != "0":
                time.sleep(5)  # The main process has most likely found the same and says it; the launcher ends us.
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 2 if isinstance(error, UserError) else 1
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            print(f"error: out of memory; set batch.max_micro_batch_size lower than it is (the result does not change): {error}", file=sys.stderr)
            return 1
        finally:
            AcceleratorState._reset_state(True)  # What accelerate keeps per process, so that main() can be called again.
            GradientState._reset_state()

    return wrapped


@reports_errors
def main(argv: list[str]) -> int:
    """Run one command line, without the program's name. Returns the exit status."""
    if "--help" in argv:
        print_help()
        return 0
    config, process_counts = load_config(argv)
    if process_counts:
        print_plans(config, process_counts)
        return 0
    meter, run = Meter(started=STARTED), config.run
    accelerator = start_accelerator(config)
    device, is_main, folder = accelerator.device, accelerator.is_main_process, Path(run.output_dir)
    lock = lock_folder(folder) if is_main else None
    checkpoints = Checkpoints(folder / "checkpoints", run.keep_checkpoints, accelerator)
    found = find_checkpoint(config, checkpoints)

    # Tokenized once per machine by the process that gets the lock; the others wait outside of any collective.
    tokenizer = load_tokenizer(config)
    os.makedirs(datasets.config.HF_DATASETS_CACHE, exist_ok=True)
    with FileLock(os.path.join(datasets.config.HF_DATASETS_CACHE, "train.lock")):
        train_data, eval_data = load_data(config.data, tokenizer, run.seed)
    accelerator.wait_for_everyone()

    tensor_parallel, sequence_parallel = parallel_sizes()
    group = dist.new_subgroups(sequence_parallel)[0] if sequence_parallel > 1 else None
    architecture = model_config(config, len(tokenizer))
    bare = build_model(config, architecture, len(tokenizer), group)
    head, vocab_size = bare.get_output_embeddings(), bare.get_input_embeddings().num_embeddings
    num_parameters, num_trained = (sum(p.numel() for p in bare.parameters() if p.requires_grad >= need) for need in (False, True))
    flops, peak = flops_per_token(bare.config, config), peak_flops(device, accelerator.mixed_precision, config.perf)
    model, optimizer = accelerator.prepare(bare, build_optimizer(bare, config.optim))
    shape = Shape(sequence_parallel * (64 if config.model.compile != "none" else 1), sequence_parallel,
                  accelerator.process_index % sequence_parallel, has_plain_attention(architecture, config.model))

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return compute_loss(model, {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}, head)

    def total(value: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; those of a tensor-parallel group all hold the same."""
        if accelerator.num_processes > 1:
            dist.all_reduce(value)
        return value / tensor_parallel

    def fits(size: int) -> bool:
        """Whether all ranks have the memory for two passes (the second on top of gradients) over the longest rows."""
        ok = torch.ones((), device=device)
        try:
            with accelerator.no_sync(model):
                for _ in range(2):
                    rows = [[(np.zeros(config.data.sequence_length, int),) * 2]] * size
                    accelerator.backward(loss_of(collate(rows, shape)) * 0)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            ok.zero_()
        optimizer.zero_grad()
        if accelerator.num_processes > 1:
            dist.all_reduce(ok, dist.ReduceOp.MIN)
        return bool(ok)

    # The batch plan.
    limit, group_size = config.batch.max_micro_batch_size, tensor_parallel * sequence_parallel
    rows_per_rank = plan_batch(config.global_batch_size, 1, accelerator.num_processes, config.data.sequence_length, group_size).grad_accum_steps
    if limit == "auto":
        checkpoints.state(model, optimizer.optimizer)  # Makes the optimizer's state, which takes memory too.
        limit = largest_micro_batch(rows_per_rank, fits)
        optimizer.optimizer.state.clear()
        if not limit:
            raise UserError("batch.max_micro_batch_size auto: not even one row fits in memory; shorten data.sequence_length")
    plan = plan_batch(config.global_batch_size, limit, accelerator.num_processes, config.data.sequence_length, group_size)
    rank = accelerator.process_index // group_size
    accelerator.gradient_accumulation_steps = plan.grad_accum_steps
    if plan.global_batch_size > len(train_data):
        raise UserError(f"the global batch of {plan.global_batch_size} rows is larger than the data, {len(train_data)} rows of at "
                        f"most {plan.sequence_length} tokens")
    max_steps = run.max_steps or math.ceil((run.max_tokens or 0) / plan.tokens_per_step) or math.ceil(
        run.max_epochs * len(train_data) / plan.global_batch_size - 1e-9)

    # Where to start.
    counted = ("step", "rows", "tokens", "real_tokens", "target_tokens")
    seen, fingerprint = dict.fromkeys(counted, 0), train_data.fingerprint()
    if found:
        seen = {name: found[1][name] for name in counted}
        if found[1]["data_fingerprint"] != fingerprint and not run.allow_changes:
            raise UserError(f"the data is not what {found[0]} was trained on (files, tokenizer or numpy changed); choose a new "
                            "run.output_dir, or continue all the same: --run.allow_changes true")
        checkpoints.load(found[0], model, optimizer.optimizer)
    elif run.init_from:
        checkpoints.verify(Path(run.init_from))
        checkpoints.load(Path(run.init_from), model, None)
    if is_main:
        write_json(folder / "status.json", {"status": "running", "step": seen["step"]})
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump() | {"versions": versions()}, sort_keys=False))
    guard, stop, metrics = Guard(run, device), Stop(accelerator), Metrics(folder, seen["step"], accelerator, config)
    metrics.write(seen["step"], {f"plan/{k}": v for k, v in asdict(plan).items()} | {"plan/tokens_per_step": plan.tokens_per_step})
    data_line = f"Data: {len(train_data):,} rows, {int(train_data.lengths.sum()):,} tokens; {len(train_data) / plan.global_batch_size:,.1f} steps per epoch"
    say(plan.story() + f"\n{data_line}; {max_steps:,} steps in this run.\nModel: {num_parameters:,} parameters, {num_trained:,} trained; "
        f"{flops / 1e6:,.1f} MFLOP per token.")
    say(f"Continuing from {found[0]}." if found else "")

    def save() -> None:
        before = meter.enter("checkpoint")
        guard.read()
        checkpoints.save(model, optimizer.optimizer, {
            "format": FORMAT, **seen, "plan": asdict(plan), "limit": limit, "data_fingerprint": fingerprint, "config": config.model_dump(),
            "versions": versions()})
        meter.enter(before)

    pool, step = ThreadPoolExecutor(1), seen["step"]
    upcoming = pool.submit(load_step, step + 1, train_data, plan, rank, shape, vocab_size)
    bar = tqdm(total=max_steps, initial=step, disable=not (is_main and sys.stderr.isatty()), unit="step")
    stopped = False
    meter.enter("data")
    while step < max_steps and not (stopped := stop.agreed()):
        step, work = step + 1, upcoming.result()
        upcoming = pool.submit(load_step, step + 1, train_data, plan, rank, shape, vocab_size)
        learning_rate = learning_rate_at(config.optim, step, max_steps)
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate
        seed = int(np.random.SeedSequence([run.seed, step, accelerator.process_index]).generate_state(1)[0])
        torch.manual_seed(seed)

        meter.enter("micro_steps")
        loss = torch.zeros((), device=device)
        for batch in work.micro_batches:
            with accelerator.accumulate(model):
                micro_loss = loss_of(batch)
                loss += micro_loss.detach()
                # The gradient wanted is that of (sum over all ranks and micro-steps of micro_loss) / target_tokens. backward()
                # divides by grad_accum_steps and the wrapper averages over the ranks, so both are multiplied in here.
                accelerator.backward(micro_loss * (plan.grad_accum_steps * accelerator.num_processes / work.target_tokens))
        meter.enter("optimizer")
        loss = total(loss) / work.target_tokens
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm or math.inf)
        guard.check(step, loss, grad_norm, optimizer.optimizer)
        optimizer.step()
        optimizer.zero_grad()
        meter.count(work)
        done = (step, len(work.rows), work.tokens, work.real_tokens, work.target_tokens)
        seen = {name: step if name == "step" else seen[name] + more for name, more in zip(counted, done)}
        bar.update()

        last = step == max_steps
        line = {}
        if last or step % run.log_every == 0:
            line = {"train/loss": loss.item(), "train/grad_norm": grad_norm.item(), "train/learning_rate": learning_rate}
            meter.enter("logging")
            line |= {"train/skipped_steps": guard.read(), "train/epoch": seen["rows"] / len(train_data)}
            line |= {f"train/{name}": seen[name] for name in ("rows", "tokens", "target_tokens")}
            line |= meter.rates(accelerator.num_processes, flops, peak)
        if eval_data and (last or run.eval_every and step % run.eval_every == 0):
            meter.enter("evaluation")
            model.eval()
            line["eval/loss"] = evaluate(loss_of, eval_data, plan, rank, shape, config.eval.max_rows, total)
            line["eval/perplexity"] = math.exp(min(line["eval/loss"], 700))
            meter.enter("sampling")
            for text in sample(accelerator.unwrap_model(model), accelerator, tokenizer, config.eval, run.seed):
                say("--- sample\n" + text)
            model.train()
        if line:
            meter.enter("logging")
            metrics.write(step, {"train/tokens": seen["tokens"]} | line)
            say(f"step {step:,}/{max_steps:,}  " + "  ".join(f"{k.split('/')[1]} {v:.4g}" for k, v in line.items() if isinstance(v, float)))
        if last or run.save_every and step % run.save_every == 0:
            save()
        meter.enter("data")
    bar.close()
    meter.enter("checkpoint")
    if stopped and seen["step"] > (found[1]["step"] if found else 0):
        save()
    stop.settle()
    checkpoints.wait()
    if stopped:
        if is_main:
            write_json(folder / "status.json", {"status": "stopped", "step": step})
        say(f"Stopped by {stop.requested or 'a signal to another rank'} after step {step:,}; the same command continues.")
    else:
        export_model(model, accelerator, tokenizer, folder / "model", bool(config.model.lora and config.model.lora.merge))
    metrics.write(step, meter.summary())
    say("Where the time went: " + ", ".join(f"{k[8:-8]} {v:.1f} s" for k, v in meter.summary().items() if k.endswith("_seconds")))
    if is_main and not stopped:
        draw_curves(folder)
        write_json(folder / "status.json", {"status": "finished", "step": step})
    pool.shutdown(cancel_futures=True)
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
