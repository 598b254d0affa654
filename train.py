"""Train a causal language model with Hugging Face Accelerate: state the batch, get the same run on any machine.

    accelerate launch train.py --config configs/small.yaml [--section.field VALUE ...]
    python train.py --config configs/small.yaml --plan 1 2 4 8      what would run elsewhere: no data, no device
    python train.py --help                                          every setting

Everything is a function of the step: its rows, learning rate and random numbers follow from the config and its number,
never from how many processes there are. So a checkpoint needs no state of a scheduler, sampler or data loader.

1 Config, 2 Batch plan, 3 Data, 4 Model, 5 Optimizer, 6 Throughput, 7 Checkpoints, 8 Evaluation, 9 train(): start there.
"""
import argparse, copy, ctypes, difflib, fnmatch, gc, glob, itertools, json, math, os, re, resource, shutil
import signal, subprocess, sys, sysconfig, time, warnings, zlib
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

STARTED = time.perf_counter()  # Importing the libraries is part of the run's start-up time.
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "DATASETS_VERBOSITY": "critical", "TOKENIZERS_PARALLELISM": "false"}
if sys.platform == "linux":  # Nobody else ends the ranks of a dead launcher, or the tokenizing workers of a dead rank.
    end_with_parent = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)  # PR_SET_PDEATHSIG; a fork clears it.
    os.register_at_fork(after_in_child=end_with_parent)
    if {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        end_with_parent()
import accelerate
import datasets
import numpy as np
import pandas as pd
import pyarrow.compute as pc
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
import yaml
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, broadcast_object_list, memory
from filelock import FileLock
from omegaconf import OmegaConf, errors
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm

accelerate.optimizer.is_lomo_available = lru_cache(accelerate.optimizer.is_lomo_available)  # It searches the disk.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS
SHOWN = ("train/loss", "eval/loss", "train/learning_rate", "train/grad_norm", "perf/tokens_per_second")
CAUSAL = "sdpa_causal"  # transformers' sdpa without its masks, see build_model().

# 1. Config ------------------------------------------------------------------------------------------------------------
class UserError(ValueError):
    """A mistake in the config, the data, a checkpoint or the launch: ends as one message and exit status 2."""

def require(condition: Any, message: str) -> None:
    if not condition:
        raise UserError(message)

def doc(default: Any, text: str, **limits) -> Any:
    """A setting: its default, its line in --help and schema.json, and its range."""
    return Field(default, description=text, **limits)

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], BeforeValidator(lambda value: [value] if isinstance(value, str) else value,
                                              json_schema_input_type=Text | list[Text])]

class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

class Run(Section):
    output_dir: str = doc("runs/default", "Run folder; the same command continues what it finds there.", min_length=1)
    max_steps: int | None = doc(None, "Length in optimizer steps (one of max_steps, max_epochs, max_tokens).", gt=0)
    max_epochs: float | None = doc(None, "Length in passes over the data, rounded up to whole steps.", gt=0)
    max_tokens: int | None = doc(None, "Length in tokens, rounded up to whole steps.", gt=0)
    seed: int = doc(0, "Seed of the initial weights, the row order and dropout.", ge=0, lt=2**32)
    log_every: int = doc(10, "Steps between log lines; device values are read on the host only there.", gt=0)
    eval_every: int = doc(100, "Steps between evaluations; 0: only after the last step.", ge=0)
    save_every: int = doc(100, "Steps between checkpoints; 0: only after the last step.", ge=0)
    keep_checkpoints: int = doc(2, "Checkpoints kept; older ones go once a newer one is complete.", gt=0)
    keep_best: bool = doc(False, "Also save and keep that of the lowest evaluation loss, and export its model.")
    resume: str = doc("auto", "auto: from the newest checkpoint; never: refuse; or a checkpoint's folder to start at.")
    init_from: str | None = doc(None, "Checkpoint folder whose weights start this run at step 0.")
    allow_changes: bool = doc(False, "Continue although the config changes the mathematics of the started run.")
    max_skipped_steps: int = doc(0, "Updates in a row that may be skipped for a number not finite.", ge=0)
    trackers: Texts = doc(["tensorboard"], "Accelerate trackers that get every metric: tensorboard, wandb, ...")

class Batch(Section):
    global_batch_size: int | None = doc(None, "Rows per step over all devices (this or global_batch_tokens).", gt=0)
    global_batch_tokens: int | None = doc(None, "Tokens per step, a multiple of data.sequence_length.", gt=0)
    max_micro_batch_size: Annotated[int, Field(gt=0)] | Literal["auto"] = doc(8, "Most rows in a pass; auto: by trial.")
    sync_each_micro_step: bool = doc(False, "Average gradients each micro-step: less memory with FSDP2, more traffic.")

class Source(Section):
    path: str | None = doc(None, "Dataset as load_dataset takes it (Hub name, local folder), or a save_to_disk folder.")
    name: str | None = doc(None, "Configuration of the dataset, as load_dataset takes it.")
    files: Texts = doc([], "Local files, folders, globs, URLs; !patterns to leave out; {stdlib}: Python's library.")
    split: str = doc("train", "Split of the dataset.")

class Data(Source):
    format: Literal["text", "chat", "tokens"] = doc("text", "Documents; role and content lists; input_ids and labels.")
    column: str | None = doc(None, "Column of the documents; by default text, messages or input_ids.")
    chat_template: str | None = doc(None, "File with a Jinja chat template, in place of the tokenizer's.")
    tokenizer: str | None = doc(None, "Hub name or folder, or bytes (UTF-8); null: of model.pretrained, or bytes.")
    sequence_length: int = doc(512, "Most tokens in a row; longer documents continue in further rows.", ge=2)
    packing: Literal["none", "concat", "best_fit"] = doc("concat", "A document per row; joined and cut; or kept whole.")
    eval_fraction: float = doc(0.0, "Share of the documents held out for evaluation (or eval_source).", ge=0, lt=1)
    eval_source: Source | None = doc(None, "Source to evaluate on: path, name and split, or files.")

class Model(Section):
    pretrained: str | None = doc(None, "Hub name or folder of a model to fine-tune (this or architecture).")
    architecture: dict[str, Any] | None = doc(None, "From scratch: model_type and fields of its transformers config.")
    trust_remote_code: bool = doc(False, "Run the Python code that comes with the model or tokenizer.")
    attention: str = doc("sdpa", "transformers attention: sdpa, eager, flex_attention, flash_attention_2, ...")
    dtype: Literal["float32", "bfloat16"] = doc("float32", "Of the weights; bfloat16 is for frozen ones, under lora.")
    lora: dict[str, Any] | None = doc(None, "Train an adapter only: fields of peft.LoraConfig, as r and lora_alpha.")
    gradient_checkpointing: bool = doc(False, "Recompute activations in the backward pass: less memory, slower.")
    chunked_loss: bool = doc(False, "Logits of 1,024 tokens at a time: less memory, one more pass of the output layer.")
    compile: Literal["none", "regional", "full"] = doc("none", "torch.compile each decoder layer, or the whole model.")

class Optim(Section):
    learning_rate: float = doc(3e-4, "Peak learning rate of AdamW.", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = doc("cosine", "Shape of the decay after the warmup.")
    warmup_steps: int = doc(0, "Steps of linear warmup, the first at learning_rate / warmup_steps.", ge=0)
    min_learning_rate_ratio: float = doc(0.1, "Last learning rate as a share of the peak.", ge=0, le=1)
    decay_fraction: float = doc(1.0, "Share of the run, its last, for the decay; below 1: WSD.", gt=0, le=1)
    weight_decay: float = doc(0.1, "Decoupled weight decay of matrices; norms and biases are excluded.", ge=0)
    adam_beta1: float = doc(0.9, "Decay rate of the first moment.", ge=0, lt=1)
    adam_beta2: float = doc(0.95, "Decay rate of the second moment.", ge=0, lt=1)
    adam_eps: float = doc(1e-8, "Added to the update's denominator.", gt=0)
    max_grad_norm: float | None = doc(1.0, "Clip the global gradient norm to this; null: never.", gt=0)

class Eval(Section):
    max_rows: int | None = doc(None, "Evaluate on the first so many rows; null: all.", gt=0)
    prompts: Texts = doc([], "Prompts to continue after each evaluation, as a user's turn if format is chat.")
    max_new_tokens: int = doc(128, "Length of each continuation.", gt=0)
    temperature: float = doc(0.8, "Sampling temperature of the continuations; 0: greedy.", ge=0)

class Perf(Section):
    peak_tflops: float | None = doc(None, "Peak TFLOP/s of a device, for MFU; null: from the table, or none.", gt=0)
    profile_steps: list[int] | None = doc(None, "[a, b]: profile steps a to b.", min_length=2, max_length=2)

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
        data, length, tokens = self.data, self.data.sequence_length, self.batch.global_batch_tokens or 0
        near = " and ".join(str(n) for n in (tokens // length * length, -(-tokens // length) * length) if n)
        require(not tokens % length,
                f"batch.global_batch_tokens {tokens} is no multiple of data.sequence_length; {near} are")
        require(data.path or (not data.name and data.split == "train"), "data.name and data.split go with data.path")
        require(not (data.eval_source and data.eval_fraction), "give at most one of data.eval_fraction and eval_source")
        for name, *choices in (("run", "max_steps", "max_epochs", "max_tokens"), ("data", "path", "files"), (
                "batch", "global_batch_size", "global_batch_tokens"), ("model", "pretrained", "architecture")):
            given = sum(bool(getattr(getattr(self, name), choice)) for choice in choices)
            require(given == 1, f"{name}: give exactly one of {', '.join(choices)}, and null for the others")
        return self
    @property
    def global_batch_size(self) -> int:
        return self.batch.global_batch_size or self.batch.global_batch_tokens // self.data.sequence_length

# Settings that may differ between a checkpoint and the run that continues it: they do not change the mathematics.
HARMLESS = re.compile(r"(run\.(?!seed)|batch\.(max_micro|sync)|eval\.|perf\.|model\.(trust|atten|grad|chunk|comp)).*")

def config_fields() -> dict[str, Any]:
    return {f"{section}.{name}": field for section, holder in Config.model_fields.items()
            for name, field in holder.annotation.model_fields.items()}

def help_text() -> str:
    text = f"{__doc__}\nSettings, in the YAML file or as --section.field VALUE, where VALUE is YAML:\n"
    for path, info in config_fields().items():
        kind = re.sub(r"\w+\.(?=[A-Z])|<class '|'>|Annotated\[(\w+).*?\)\]\)\]", r"\1", str(info.annotation))
        text += f"\n  --{path}  {kind}, default {json.dumps(info.default)}\n      {info.description}"
    return text

def describe(error: ValidationError) -> str:
    """A line per problem: dotted path, what is wrong, what was given, and the nearest name for an unknown key."""
    problems, known = {}, config_fields()
    branch = re.compile(r"constrained-int|int|literal.*|function-.*|list.*")  # pydantic's names for parts of a union.
    for problem in error.errors():
        path = ".".join(name for name in map(str, problem["loc"]) if not branch.fullmatch(name))
        section, _, key = path.replace("eval_source.", "").rpartition(".")
        inside = [name.split(".")[1] for name in known if name.startswith(f"{section}.")]
        near = [name for name in known if name.split(".")[1] == key]
        near += [f"{section}.{name}" for name in difflib.get_close_matches(key, inside, cutoff=0.2)]  # lr is one.
        near += difflib.get_close_matches(path, [*known, *Config.model_fields])
        hint = f"did you mean {near[0]}?" if near else "python train.py --help lists them all"
        text = {"extra_forbidden": f"unknown key; {hint}", "value_error": str(problem.get("ctx", {}).get("error"))}
        problems.setdefault(path, []).append(text.get(problem["type"], f"{problem['msg']}, not {problem['input']!r}"))
    return "\n".join(": ".join(filter(None, (path, " or ".join(texts)))) for path, texts in problems.items())

def load_config(argv: list[str]) -> tuple[Config, list[int]]:
    """The validated config of a command line, and the process counts of --plan. Raises UserError for other words."""
    where, parser = "command line", argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    parser.add_argument("--config")
    parser.add_argument("--plan", nargs="+", type=int, default=[])
    try:  # OmegaConf reads YAML as people do: 1e-4 is a number (a string in YAML 1.1), and no key is given twice.
        args, rest = parser.parse_known_args(argv)
        require(args.config and min(args.plan, default=1) > 0, "give --config FILE, --plan at least 1; see --help")
        settings = OmegaConf.load(where := args.config)
        words = [word for option in rest for word in (option.split("=", 1) if option.startswith("--") else [option])]
        for name, value in zip(words[::2], [*words[1::2], ""]):
            where = f"{name} {value}".strip()
            known = re.fullmatch(r"--\w[\w-]*(\.\w[\w-]*)*", name) and not (value or "--").startswith("--")
            require(known, "not --section.field VALUE")
            settings.merge_with_dotlist([f"{name[2:]}={value}"])
        return Config.model_validate(OmegaConf.to_container(settings)), args.plan
    except ValidationError as error:
        raise UserError(f"{args.config}: {describe(error)}") from None
    except (OSError, ValueError, argparse.ArgumentError, yaml.YAMLError, errors.OmegaConfBaseException) as error:
        raise UserError(f"{where}: {getattr(error, 'strerror', None) or ' '.join(str(error).split())}") from None

# 2. Batch plan --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    """How one global batch is split over ranks and micro-steps."""
    num_processes: int
    data_parallel_size: int
    global_batch_size: int
    micro_batch_size: int
    grad_accum_steps: int
    tokens_per_step: int
    def idle_share(self) -> float:
        """Mean share of a step in which a rank waits for those with one row more."""
        rows_per_rank = self.global_batch_size / self.data_parallel_size
        return 1 - rows_per_rank / math.ceil(rows_per_rank)
    def split(self, rows: np.ndarray) -> list[list[np.ndarray]]:
        """Rows sorted by length as [micro_step][rank], sizes within one; odd micro-steps deal in reverse."""
        ranks, pieces = self.data_parallel_size, np.array_split(rows, self.data_parallel_size * self.grad_accum_steps)
        return [pieces[at : at + ranks][:: -1 if at // ranks % 2 else 1] for at in range(0, len(pieces), ranks)]
    def even_neighbours(self) -> str:
        """The nearest batch sizes and process counts that leave no rank idle."""
        rows, ranks, processes = self.global_batch_size, self.data_parallel_size, self.num_processes
        sizes = [n for n in (rows // ranks * ranks, -(-rows // ranks) * ranks) if n]
        even = [n * processes // ranks for n in range(1, rows + 1) if rows % n == 0]
        counts = [n for n in even if n <= processes][-1:] + [n for n in even if n > processes][:1]
        return f"{' or '.join(map(str, sizes))} rows, {' or '.join(map(str, counts))} processes"

def plan_batch(global_batch_size: int, max_micro_batch_size: int, num_processes: int, sequence_length: int,
               group: int = 1) -> Plan:
    """As few passes as memory allows, then as even as possible. `group` ranks share their rows (model parallelism)."""
    require(not num_processes % group, f"{num_processes} processes form no groups of {group}; a multiple of {group} do")
    rows, tokens = -(-global_batch_size // (num_processes // group)), global_batch_size * sequence_length
    steps = -(-rows // max_micro_batch_size)
    return Plan(num_processes, num_processes // group, global_batch_size, -(-rows // steps), steps, tokens)

def plan_table(plans: list[Plan]) -> str:
    return pd.DataFrame([{name: f"{value:,}" for name, value in asdict(plan).items()} | {
        "idle": f"{plan.idle_share():.1%}", "nearest_even": plan.even_neighbours() if plan.idle_share() else "is even"}
        for plan in plans]).rename(columns=lambda name: re.sub("^num_|_size$|_steps$", "", name)).to_string(index=False)

# 3. Data --------------------------------------------------------------------------------------------------------------
@contextmanager
def explained(what: str, name: str | None = None):
    """Turns what a library raises (of a dozen types) over something the user named into one message."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetsError) and error.__cause__ else error
        cause = next((failure for failure, _ in getattr(error, "failures", {}).values()), cause)  # A checkpoint's.
        hint = "; without network access, give a local folder" if name and not os.path.exists(name) else ""
        raise UserError(f"{what}: {type(cause).__name__}: {' '.join(str(cause).split())[:9000]}{hint}") from error

def list_files(patterns: list[str]) -> list[str]:
    """The files that the patterns name, less those of !patterns; a folder stands for all in it."""
    found, excluded = [], [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    for pattern in (pattern for pattern in patterns if not pattern.startswith("!")):
        pattern = pattern.replace("{stdlib}", sysconfig.get_path("stdlib"))
        pattern = os.path.join(pattern, "**") if os.path.isdir(pattern) else pattern
        files = [pattern] if "://" in pattern else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
        found += (kept := [file for file in files if not any(fnmatch.fnmatch(file, x) for x in excluded)])
        require(kept, f"data.files: nothing matches {pattern!r} less {excluded} in {os.getcwd()}")
    require(found or not patterns, f"data.files: {patterns} only leave out; name what to take, too")
    return found

def load_source(source: Source) -> datasets.Dataset:
    require(bool(source.path) != bool(source.files), "data.eval_source: give exactly one of path and files")
    files, path = list_files(source.files), source.path
    builders = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
    kinds = {builders.get(Path(file).suffix, "text"): Path(file).suffix for file in files}
    require(len(kinds) < 2, f"data.files: {' and '.join(kinds.values())} files do not mix; choose by a pattern")
    with explained(f"data: cannot load {path or files[0]}" + f" or {len(files) - 1} others" * bool(files[1:]), path):
        for builder in kinds:
            options = {"sample_by": "document"} if builder == "text" else {}  # Otherwise a document per line.
            return datasets.load_dataset(builder, data_files=files, split="train", **options)
        if os.path.isfile(os.path.join(path, "state.json")):
            return datasets.load_from_disk(path)
        return datasets.load_dataset(path, source.name, split=source.split)

FORMATS = {"text": ("text", "(large_)?string", "text"),  # The column, its Arrow type's pattern, and that in words.
           "chat": ("messages", r"(large_)?list<(?=.*\brole: ).*\bcontent: ", "lists of role and content"),
           "tokens": ("input_ids", r"(large_)?list<\w+: u?int", "lists of integers (token ids)")}

def tokenize_text(batch: dict, column: str, tokenizer) -> dict:
    """Token ids of each document, ending in the tokenizer's end-of-text token where it has one."""
    ids, end = tokenizer(batch[column])["input_ids"], tokenizer.eos_token_id
    return {"input_ids": [x if end is None or x[-1:] == [end] else x + [end] for x in ids]}

def tokenize_chat(batch: dict, column: str, tokenizer) -> dict:
    """Token ids of each conversation, and labels that are -100 except for what the assistant says."""
    render = partial(tokenizer.apply_chat_template, return_dict=True, return_assistant_tokens_mask=True)
    rows = [render(messages) for messages in batch[column]]
    labels = [[x if said else -100 for x, said in zip(row["input_ids"], row["assistant_masks"])] for row in rows]
    return {"input_ids": [row["input_ids"] for row in rows], "labels": labels}

def tokenize(documents: datasets.Dataset, config: Data, tokenizer) -> datasets.Dataset:
    """Documents as lists of token ids (and labels): in parallel, cached by the content of data and tokenizer."""
    default, kind, wanted = FORMATS[config.format]
    columns, column = documents.column_names, config.column or default
    require(column in columns, f"data.column: no column {column!r}; the data has {', '.join(columns)}")
    kept = documents.select_columns([column] + ["labels"] * (config.format == "tokens" and "labels" in columns))
    for name, values in zip(kept.column_names, kept.data.columns):
        require(re.match(kind, str(values.type)), f"data.column: {name!r} holds {values.type}, not {wanted}")
        nulls = values.null_count or config.format == "tokens" and pc.list_flatten(values).null_count
        require(not nulls, f"data.column: {name!r} holds null; leave such rows out")
    if config.format == "tokens":
        return (kept.flatten_indices() if kept._indices else kept).rename_columns({column: "input_ids"})
    told = config.format != "chat" or tokenizer.is_fast and re.search(r"generation -?%}", str(tokenizer.chat_template))
    require(told, f"data.tokenizer {config.tokenizer}: not fast, or no chat template that marks the assistant's turns "
                  "by {% generation %} and {% endgeneration %}; see data.chat_template")
    # The arguments are plain values because they key the cache: a config object differs between launches.
    with explained(f"data: cannot use column {column!r} as {config.format}"):
        return documents.map(tokenize_chat if config.format == "chat" else tokenize_text, batched=True, batch_size=64,
                             fn_kwargs={"column": column, "tokenizer": tokenizer}, remove_columns=columns,
                             num_proc=min(CORES, len(documents) // 64) or None, desc="Tokenize")

class Dataset:
    """Rows of tokens, and the endless stream of shuffled epochs over them. Row r is pieces first[r] to first[r + 1] - 1
    of the stream of all documents' tokens (memory-mapped files), piece p its tokens edges[p] to edges[p + 1] - 1."""
    def __init__(self, documents: datasets.Dataset, packing: str, length: int, seed: int):
        if packing == "best_fit":  # Its documents are rows.
            from trl import pack_dataset  # Not at the top, as it takes two seconds.
            documents = pack_dataset(documents, length, "bfd_split", {"batch_size": 10_000})
        columns = {name: documents.data.column(name) for name in documents.column_names}
        lengths = {name: pc.list_value_length(column).to_numpy() for name, column in columns.items()}
        equal = all((lengths[name] == lengths["input_ids"]).all() for name in lengths.keys() - {"seq_lengths"})
        require(equal and lengths["input_ids"].any(), "data: no tokens, or input_ids and labels differ in length")
        self.streams = {name: pc.list_flatten(column) for name, column in columns.items()}  # Views of the mapped files.
        offsets = np.append(0, np.cumsum(lengths["input_ids"], dtype=np.int64))
        if packing == "concat":  # Cut the stream at multiples of the row length.
            cuts = np.append(np.arange(0, offsets[-1], length), offsets[-1])
        elif packing == "best_fit":
            cuts, offsets = offsets, np.cumsum(self.streams.pop("seq_lengths"))
        else:  # Cut every document, from its start.
            counts = -(-np.diff(offsets) // length)
            starts = np.repeat(offsets[:-1] - length * (np.cumsum(counts) - counts), counts)
            cuts = np.append(starts + length * np.arange(len(starts)), offsets[-1])
        edges = np.sort(np.concatenate((offsets, cuts)), kind="stable")  # Merges; np.union1d hashes, 60 times as slow.
        self.edges = edges[np.diff(edges, prepend=-1) > 0]  # Empty documents are gone.
        self.first, self.lengths = np.searchsorted(self.edges, cuts), np.diff(cuts).astype(np.int32)
        # A permutation is as large as the data: keep the two that a step may straddle.
        self.permutation = lru_cache(2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(len(self)))
    def __len__(self) -> int:
        return len(self.lengths)
    def rows_at(self, start: int, count: int) -> np.ndarray:
        """Row numbers at positions start to start + count - 1 of the shuffled stream."""
        epoch, offset = divmod(start, len(self))
        rows = self.permutation(epoch)[offset : offset + count]
        return rows if len(rows) == count else np.append(rows, self.rows_at(start + len(rows), count - len(rows)))
    def read(self, row: int) -> np.ndarray:
        """int64 [3, tokens]: input_ids; targets, the token that follows each, or -100 for none; position in a piece."""
        edges = self.edges[self.first[row] : self.first[row + 1] + 1].tolist()  # Python's integers: twice as fast.
        start, length = edges[0], edges[-1] - edges[0]
        spans = {name: stream.slice(start, length).to_numpy() for name, stream in self.streams.items()}
        tokens = np.empty((3, length), np.int64)
        tokens[0], tokens[1, :-1] = spans["input_ids"], spans.get("labels", spans["input_ids"])[1:]
        for edge in edges[:-1]:  # What comes before a piece, the last one for the first, has no target.
            tokens[1, edge - start - 1], tokens[2, edge - start :] = -100, np.arange(start + length - edge)
        return tokens
    def sizes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, target tokens) of each row. A piece's first token is no target: nothing comes before it."""
        if "labels" in self.streams:
            return self.lengths[rows], np.array([(self.read(row)[1] != -100).sum() for row in rows], int)
        return self.lengths[rows], self.lengths[rows] - (self.first[rows + 1] - self.first[rows])
    def fingerprint(self) -> int:
        """Tells whether a checkpoint was trained on these rows, in the order in which this numpy shuffles them."""
        few = np.random.default_rng([0, 0]).permutation(len(self))[:100]
        return zlib.crc32(b"".join(self.read(row).tobytes() for row in few), zlib.crc32(self.lengths, zlib.crc32(few)))

def load_data(config: Data, tokenizer, seed: int) -> tuple[Dataset, Dataset | None]:
    train, held_out = load_source(config), load_source(config.eval_source) if config.eval_source else None
    if config.eval_fraction:
        with explained(f"data.eval_fraction: {config.eval_fraction} of {len(train)} documents; use data.eval_source"):
            train, held_out = train.train_test_split(config.eval_fraction, seed=seed).values()
    parts = [part and tokenize(part, config, tokenizer) for part in (train, held_out)]
    return tuple(part and Dataset(part, config.packing, config.sequence_length, seed) for part in parts)

def collate(rows: list[np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Rows as tensors [rows, width], padded on the right, which needs no mask: it comes after every real token. Packed
    rows have position_ids, which keep documents apart. No rows make one without targets: all ranks must take part."""
    batch = np.zeros((3, max(1, len(rows)), max((row.shape[1] for row in rows), default=1)), np.int64)
    batch[1] = -100
    for r, row in enumerate(rows):
        batch[:, r, : row.shape[1]] = row
    packed = any(row[2, -1] < row.shape[1] - 1 for row in rows)
    tensors = torch.from_numpy(batch if packed else batch[:2])
    tensors = tensors.pin_memory() if device.type == "cuda" else tensors  # Nobody waits for its copy.
    return dict(zip(("input_ids", "targets", "position_ids"), tensors.to(device, non_blocking=True)))

def load_step(step: int, data: Dataset, plan: Plan, rank: int, vocab_size: int, device) -> tuple[list, dict]:
    """A step's micro-batches of this rank, and what all ranks process. Raises UserError for rows that are of no use."""
    rows = data.rows_at((step - 1) * plan.global_batch_size, plan.global_batch_size)
    lengths, targets = data.sizes(rows)
    split = plan.split(np.argsort(lengths, kind="stable"))
    micro_batches = [[data.read(row) for row in rows[ranks[rank]]] for ranks in split]
    ids = np.concatenate([np.zeros((2, 1), int), *(row[:2] for batch in micro_batches for row in batch)], axis=1)
    low, high = ids[ids != -100].min(), ids.max()
    require(0 <= low and high < vocab_size, f"data: step {step} has token ids {low} to {high}, the model's vocabulary "
            f"is 0 to {vocab_size - 1}; data.tokenizer must be the model's")
    # Every rank works out what the others process: no count ever needs communication.
    tokens = sum(max(1, len(piece)) * lengths[piece].max(initial=1) for ranks in split for piece in ranks)
    counts = dict(step=1, rows=len(rows), tokens=tokens, real_tokens=lengths.sum(), target_tokens=targets.sum())
    require(counts["target_tokens"], f"data: no target token in step {step}, rows {rows.tolist()}; check the labels")
    return [collate(batch, device) for batch in micro_batches], {name: int(count) for name, count in counts.items()}

# 4. Model -------------------------------------------------------------------------------------------------------------
def load_tokenizer(config: Data, model: Model) -> transformers.PreTrainedTokenizerBase:
    name, template = config.tokenizer or model.pretrained or "bytes", config.chat_template
    with explained(f"data.tokenizer (null: model.pretrained) or data.chat_template: cannot load {name}", name):
        tokenizer = transformers.ByT5Tokenizer() if name == "bytes" else transformers.AutoTokenizer.from_pretrained(
            name, trust_remote_code=model.trust_remote_code)
        tokenizer.chat_template = Path(template).read_text() if template else tokenizer.chat_template
        return tokenizer

def model_config(config: Config, vocab_size: int) -> transformers.PreTrainedConfig:
    """The transformers config of the model. Raises UserError for a model that does not exist or fit the data."""
    length, name, architecture = config.data.sequence_length, config.model.pretrained, config.model.architecture or {}
    given = {"vocab_size": vocab_size, "max_position_embeddings": length, "use_cache": False} | architecture
    with explained(f"model.pretrained or model.architecture: cannot configure {name or architecture}", name):
        load = partial(transformers.AutoConfig.from_pretrained, trust_remote_code=config.model.trust_remote_code)
        found = load(name) if name else transformers.AutoConfig.for_model(**given)
    if unknown := architecture.keys() & found.to_dict().keys() - type(found)().to_dict().keys():
        near = difflib.get_close_matches(min(unknown), type(found)().to_dict(), cutoff=0.4)
        raise UserError(f"model.architecture: {found.model_type} has no setting {', '.join(unknown)}; near are {near}")
    positions = getattr(found, "max_position_embeddings", None) or length
    require(length <= positions, f"data.sequence_length {length} exceeds the model's {positions} positions")
    return found

def build_model(config: Model, found: transformers.PreTrainedConfig, vocab_size: int, seed: int) -> torch.nn.Module:
    """The model on the CPU, the same on every rank: from its seed, or from its files."""
    torch.manual_seed(seed)
    auto, name = transformers.AutoModelForCausalLM, config.pretrained
    options = {"dtype": getattr(torch, config.dtype), "attn_implementation": config.attention,
               "trust_remote_code": config.trust_remote_code}
    with explained(f"model: cannot build {name or found.model_type}", name):
        if name:
            model, report = auto.from_pretrained(name, config=found, output_loading_info=True, **options)
            require(not report["missing_keys"], f"its files lack {', '.join(sorted(report['missing_keys']))}")
        else:
            model = auto.from_config(found, **options)
        if vocab_size > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(vocab_size)
        kinds = {*(getattr(found, "layer_types", None) or ["full_attention"]),
                 *(getattr(found, limit, None) for limit in ("sliding_window", "index_topk"))}
        if config.attention == "sdpa" and model._supports_attention_backend and kinds == {"full_attention", None}:
            # For an unknown name transformers makes no masks, for which a GPU would wait. Packed rows get theirs below.
            transformers.AttentionInterface.register(CAUSAL, transformers.AttentionInterface()["sdpa"])
            model.set_attn_implementation(CAUSAL)
        model = add_lora(model, config.lora) if config.lora else model
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or [])]
    for module in {"none": [], "full": [model], "regional": layers}[config.compile]:
        module.compile()  # In place: names stay as they are.
    return model

def add_lora(model: torch.nn.Module, lora: dict[str, Any]) -> torch.nn.Module:
    import peft  # Here, as who trains without it need not wait for it at every start.
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora))

def compute_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the cross-entropy over a micro-batch's targets, in float32."""
    inputs, targets = {name: batch[name] for name in batch.keys() - {"targets"}}, batch["targets"].flatten()
    bare = getattr(model, "module", model)
    if "position_ids" in batch and bare.config._attn_implementation == CAUSAL:
        document = (batch["position_ids"] == 0).cumsum(1)
        inputs["attention_mask"] = (document[:, None, :, None] == document[:, None, None]).tril()
    if not (autocast := getattr(bare, "chunked_loss", None)):  # A cache would hide where documents end.
        return F.cross_entropy(model(**inputs, use_cache=False).logits.float().flatten(0, 1), targets, reduction="sum")
    def chunk_loss(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with autocast():
            return F.cross_entropy(bare.get_output_embeddings()(states).float(), targets, reduction="sum")
    states = model(**inputs, use_cache=False, output_hidden_states=[-1], logits_to_keep=1).hidden_states[-1]
    chunks = zip(states.flatten(0, 1).split(1024), targets.split(1024))  # Their logits are made again in backward().
    return sum(torch.utils.checkpoint.checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks)

def check_loss(model: torch.nn.Module, packing: str, chunked: bool) -> None:
    """Raises UserError for a model whose loss packing or chunks would change: tries two documents of 4 tokens."""
    rows = [np.stack([row, np.append(row[1:], -100), np.arange(4)]) for row in np.arange(8).reshape(2, 4)]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        apart = compute_loss(model.eval(), collate(rows, model.device))
        model.chunked_loss = chunked and nullcontext
        joint = compute_loss(model, collate(rows if packing == "none" else [np.hstack(rows)], model.device))
    require(abs(joint / apart - 1) < max(1e-5, torch.finfo(model.dtype).eps / 10), f"{model.config.model_type}: "
            "by data.packing documents see each other, use none; or model.chunked_loss misses scaled logits, use false")

def flops_per_token(found: transformers.PreTrainedConfig, lora: dict[str, Any] | None, length: int) -> float:
    """Forward and backward matrix FLOPs per token of a full row, counted by torch on a model without storage; in eager
    attention, as it does not see into fused kernels. For a Llama: 6 N + 12 L H Q T (PaLM, arXiv:2204.02311, app. B)."""
    with torch.device("meta"):  # peft cannot move fake tensors.
        kinds = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}  # These work without storage.
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(found), **kinds)
        model = add_lora(model, lora) if lora else model
    fails = explained(f"model.architecture: no pass is possible with {found.to_diff_dict()}")
    with fails, torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
        model.to_empty(device="cpu")(input_ids=torch.ones(1, length).long(), use_cache=False).logits.sum().backward()
    return counter.get_total_flops() / length

# 5. Optimizer ---------------------------------------------------------------------------------------------------------
def build_optimizer(model: torch.nn.Module, config: Optim) -> torch.optim.Optimizer:
    """AdamW. Matrices decay, norms and biases do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
              {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
    betas = config.adam_beta1, config.adam_beta2
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_eps, fused=True)

def learning_rate_at(config: Optim, step: int, max_steps: int) -> float:
    """Learning rate of a step, 1 to max_steps. A function: a scheduler's state is there to be lost or skewed."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    span = min(max(1, round(max_steps * config.decay_fraction)), max_steps - config.warmup_steps)
    done = max(0, step - (max_steps - span)) / max(1, span)  # Share of the decay: 0 on the plateau, 1 at the last step.
    shape = {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * done))}.get(config.schedule, 1 - done)
    return config.learning_rate * (config.min_learning_rate_ratio + (1 - config.min_learning_rate_ratio) * shape)

def guard(optimizer, step: int, value: torch.Tensor, last_good: torch.Tensor, limit: int) -> torch.Tensor:
    """Tells a fused optimizer by `found_inf`, on the device, to make no update where `value` is not finite, and none at
    all after `limit` steps in a row without one. Returns the number of the last good step, a tensor."""
    bad = (value * 0 != 0) | (last_good < step - limit - 1)  # Infinity times 0 is NaN, and NaN differs from 0.
    optimizer.found_inf = bad.float()
    return torch.where(bad, last_good, step)

# 6. Throughput --------------------------------------------------------------------------------------------------------
TRAINING = ("data", "micro_steps", "optimizer")  # The phases that rates are about.
# Dense peak TFLOP/s by device and precision ("no" is float32), from the vendors' datasheets, without sparsity.
PEAK_TFLOPS = {"H200": {"fp8": 1979, "bf16": 989, "no": 67}, "H100 80GB HBM3": {"fp8": 1979, "bf16": 989, "no": 67},
               "B200": {"fp8": 4500, "bf16": 2250, "no": 75}, "A100": {"bf16": 312, "no": 19.5},
               "L40S": {"fp8": 733, "bf16": 362, "no": 91.6}, "L4": {"fp8": 242, "bf16": 121, "no": 30.3}}

def peak_flops(device: torch.device, precision: str, config: Perf) -> float | None:
    """Peak FLOP/s of one device in the precision of this run, None where it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = next((peaks for known, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{known}\b", name)), {})
    return (peak := config.peak_tflops or peaks.get(precision.replace("fp16", "bf16"))) and peak * 1e12

class Meter:
    """Books every second, by the host's clock, to exactly one phase; a launch's first step (memory pools, caches) to
    warmup. Rates are over a window between log lines, where a device value is read: what a GPU has queued is inside."""
    def __init__(self, clock=time.perf_counter, started: float | None = None):
        self.clock, self.phase, self.since = clock, "startup", clock() if started is None else started
        self.event, self.events = None, []  # On a GPU event() records one, where a phase ends and another begins.
        self.seconds, self.counts, self.window, self.warm = Counter(), Counter(), (Counter(), Counter()), False
    def enter(self, phase: str) -> None:
        """Book the time since the last call to the phase that ends here."""
        now, cold = self.clock(), not self.warm and self.phase in TRAINING
        self.seconds["warmup" if cold else self.phase] += now - self.since
        self.phase, self.since = phase, now
        if self.event and self.warm:
            self.events.append((phase, self.event()))
    def count(self, step: dict[str, int]) -> None:
        self.enter(self.phase)
        self.counts.update(step if self.warm else {})
        self.warm = True
    def rates(self, num_processes: int, flops: float, peak: float | None) -> dict[str, float | None]:
        """The perf/ metrics since the last call, None where no whole step lies in between."""
        self.enter(self.phase)
        seconds, count, device = self.seconds - self.window[0], self.counts - self.window[1], Counter()
        busy, tokens = sum(seconds[phase] for phase in TRAINING), count["tokens"]
        for (phase, start), (_, end) in itertools.pairwise(self.events):
            end.synchronize()
            device[phase] += start.elapsed_time(end) * (phase in TRAINING)
        for phase in TRAINING if device.total() else ():  # The host's clock knows the sum.
            seconds[phase] = busy * device[phase] / device.total()
            self.seconds[phase] = self.window[0][phase] + seconds[phase]
        self.window, self.events = (self.seconds.copy(), self.counts.copy()), self.events[-1:]
        ratios = {"tokens_per_second": (tokens, busy), "tokens_per_second_per_device": (tokens, busy * num_processes),
                  "micro_step_tokens_per_second_per_device": (tokens, seconds["micro_steps"] * num_processes),
                  "real_tokens_per_second": (count["real_tokens"], busy), "rows_per_second": (count["rows"], busy),
                  "step_seconds": (busy, count["step"]), "data_seconds": (seconds["data"], count["step"]),
                  "mfu": (count["real_tokens"] * flops, busy * num_processes * (peak or 0))}  # Padding is no use.
        return {f"perf/{name}": a / b if count["step"] and b > 0 else None for name, (a, b) in ratios.items()}
    def summary(self) -> dict[str, float]:
        self.enter(self.phase)
        total, busy = sum(self.seconds.values()), sum(self.seconds[phase] for phase in TRAINING)
        return {f"summary/{phase}_seconds": spent for phase, spent in self.seconds.items()} | {
            "summary/wall_seconds": total, "summary/tokens_per_second": self.counts["tokens"] / busy if busy else None,
            "summary/goodput_tokens_per_second": self.counts["tokens"] / total}

def profile(profiler: torch.profiler.profile, steps: list[int], step: int, folder: Path, gpu: bool) -> None:
    """Call after each step: profiles steps[0] to steps[1] (unless a launch begins in between), and a GPU's memory."""
    if step == steps[0] - 1:
        gpu and torch.cuda.memory._record_memory_history()
        profiler.start()
    elif step == steps[1] and profiler.profiler:
        profiler.stop()
        profiler.export_chrome_trace(str(folder / "profile.json.gz"))
        gpu and torch.cuda.memory._dump_snapshot(folder / "memory.pickle")
        say(f"Open {folder}/profile.json.gz in ui.perfetto.dev" + gpu * "; memory.pickle: docs.pytorch.org/memory_viz")

# 7. Checkpoints and the run folder ------------------------------------------------------------------------------------
def replace_file(path: Path, text: str) -> None:
    """A reader sees the old content or the new, never half of it."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(text if text.endswith("\n") or not text else text + "\n")
    os.replace(draft, path)

def trained_state(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """The very tensors that are trained, by the bare model's names. What is no tensor (betas, ...) is the config's."""
    options = dcp_state.StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True)
    weights, moments = dcp_state.get_state_dict(model, optimizers, options=options)
    tied = getattr(model, "module", model).all_tied_weights_keys  # Saved once, under the name of what they are tied to.
    tensors = {f"optimizer.{name}": value for name, value in moments.items() if isinstance(value, torch.Tensor)}
    return tensors | {f"model.{name}": value for name, value in weights.items() if name not in tied}

def save_checkpoint(folder: Path, keep: int, state: dict, manifest: dict, group: dist.ProcessGroup | None) -> None:
    """Training goes on meanwhile: the state is a copy, and the ranks agree in a group of their own."""
    final = folder / f"step-{manifest['step']:08d}"
    draft = folder / f".{final.name}.tmp"
    writer = dcp.HuggingFaceStorageWriter(str(draft), save_distributed=True)
    dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)
    if not group or dist.get_rank() == 0:
        files = {path.name: [path.stat().st_size, zlib.crc32(np.memmap(path))] for path in sorted(draft.iterdir())}
        replace_file(draft / "manifest.json", json.dumps(manifest | {"files": files}, indent=2))
        shutil.rmtree(final, ignore_errors=True)  # A damaged one of the same step, which resume passed over.
        os.replace(draft, final)
        for old in {*sorted(folder.glob("step-*"))[:-keep]} - {folder / manifest["best"][1]}:
            shutil.rmtree(old.rename(folder / ".old.tmp"))  # What is half removed has a hidden name.

def verify_checkpoint(folder: Path) -> dict:
    """The manifest. Raises UserError that names the file that is missing, cut short or altered."""
    with explained(f"no complete checkpoint of this script: {folder / 'manifest.json'}"):
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, (size, crc) in manifest["files"].items():
            if (folder / name).stat().st_size != size or zlib.crc32(np.memmap(folder / name)) != crc:
                raise OSError(f"{folder / name} is not as it was written: its size or checksum differs")
        return manifest

def find_checkpoint(resume: str, folder: Path) -> tuple[Path, dict] | None:
    """The checkpoint to continue from and its manifest: the newest undamaged one; None to start at step 0."""
    found, damage = sorted(folder.glob("step-*"), reverse=True), None
    require(resume != "never" or not found, f"run.resume is never, but {folder} exists; choose another run.output_dir")
    require(not found or folder not in Path(resume).parents, "run.resume: to go back, choose another run.output_dir")
    for checkpoint in found if found or resume in ("auto", "never") else [Path(resume)]:
        try:
            return checkpoint, verify_checkpoint(checkpoint)
        except UserError as error:
            say(f"Checkpoint passed over: {error}")
            damage = error
    require(not damage, str(damage))

def load_checkpoint(folder: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Load into the model and optimizers, whatever strategy and process count wrote the checkpoint."""
    tensors, reader = trained_state(model, optimizers), dcp.HuggingFaceStorageReader(str(folder))
    saved = {name for name in reader.read_metadata().state_dict_metadata if name.startswith("model.")}
    with explained(f"{folder} is of another model"):
        require(saved <= tensors.keys(), f"it also has {min(saved - tensors.keys(), default='')}")
        dcp.load(tensors, storage_reader=reader)  # In place.

def export_model(bare: torch.nn.Module, accelerator: Accelerator, tokenizer, folder: Path) -> None:
    """Write what from_pretrained() loads. Every rank takes part: sharded weights are gathered."""
    weights, draft = accelerator.get_state_dict(bare), folder.with_name(".model.tmp")
    if accelerator.is_main_process:
        bare.save_pretrained(draft, state_dict=weights)
        tokenizer.save_pretrained(draft)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(draft, folder)

class Stop:
    """Lets a signal to any rank stop all ranks after the same step."""
    def __init__(self, group: dist.ProcessGroup | None):
        self.requested, self.since, self.group, self.launcher = "", 0.0, group, os.getppid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)
    def on_signal(self, number: int, frame) -> None:
        # Launchers repeat signals, and a terminal signals launcher and ranks alike: only a later one insists.
        if self.requested and time.monotonic() - self.since > 2:
            os._exit(1)
        if os.getppid() != self.launcher:
            signal.alarm(20)  # Enough to save while all ranks live; where one does not, the others wait in vain.
        self.requested, self.since = signal.Signals(number).name, self.since or time.monotonic()
    def agreed(self) -> bool:
        """Whether to stop now, the same answer on every rank; call it once per step. No device waits for gloo."""
        if not self.group:
            return bool(self.requested)
        dist.all_reduce(wish := torch.tensor(float(bool(self.requested))), dist.ReduceOp.MAX, group=self.group)
        return bool(wish)

# 8. Evaluation --------------------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(model, data: Dataset, plan: Plan, accelerator: Accelerator, max_rows: int | None) -> dict[str, float]:
    """The mean loss over all target tokens of the evaluation rows, split as if they were one step."""
    model.eval()
    rows = np.arange(min(len(data), max_rows or len(data)))
    lengths, targets = data.sizes(rows)
    plan = plan_batch(len(rows), plan.micro_batch_size, plan.num_processes, 1)
    own = ([data.read(row) for row in ranks[accelerator.process_index]] for ranks in plan.split(np.argsort(lengths)))
    losses = torch.stack([compute_loss(model, collate(batch, accelerator.device)) for batch in own]).double()
    loss = accelerator.reduce(losses.sum(), "sum").item() / int(targets.sum())
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700))}

def sample(bare, accelerator: Accelerator, tokenizer, config: Eval, chat: bool, seed: int) -> dict[str, str]:
    """Continuations of the prompts. All ranks make the same ones: sharded weights need that and whole ones allow it."""
    samples = {}
    torch.manual_seed(seed)
    for i, text in enumerate(config.prompts):
        turns = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) if chat else text
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(accelerator.device)
        with accelerator.autocast(), torch.compiler.set_stance("force_eager"):  # Each length would be compiled.
            ids = bare.generate(**prompt, use_cache=True, synced_gpus=accelerator.num_processes > 1,
                                do_sample=config.temperature > 0, temperature=config.temperature or None,
                                max_new_tokens=config.max_new_tokens, pad_token_id=tokenizer.pad_token_id or 0)
        samples[f"eval/sample_{i}"] = tokenizer.decode(ids[0], skip_special_tokens=True)
        say(f"--- sample {i}\n{samples[f'eval/sample_{i}']}\n---")
    return samples

def draw_curves(folder: Path) -> None:
    """curves.png from metrics.jsonl: loss and throughput against tokens."""
    from matplotlib.figure import Figure  # Here, as only the end of a run needs it.
    lines, figure = pd.read_json(folder / "metrics.jsonl", lines=True), Figure(figsize=(12, 4.5), layout="constrained")
    loss, speed = figure.subplots(1, 2, width_ratios=(3, 2))
    for key, axes, style in ("train/loss", loss, "-"), ("eval/loss", loss, "o-"), (SHOWN[-1], speed, "-"):
        points = lines.reindex(columns=["train/tokens", key]).dropna().astype(float) / [1e6, 1]
        points.plot("train/tokens", key, ax=axes, style=style, xlabel="tokens (millions)")
    loss.set(title="Loss", ylabel="nats per token")
    speed.set(title="Throughput while training", ylabel="tokens per second", ylim=(0, None))
    figure.savefig(folder / "curves.png", dpi=110)

# 9. train() and the loop ----------------------------------------------------------------------------------------------
def say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0" and text:  # The main process; without tearing the progress bar.
        tqdm.write(text)

def start_accelerator(config: Config) -> Accelerator:
    """The Accelerator of this launch. Raises UserError where the processes do not form one run."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled|.is_gradient_check")  # By one process; by peft.
    for library in (transformers, datasets) if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0" else ():
        library.utils.logging.disable_progress_bar()
    cpu = not torch.accelerator.is_available()
    if cpu and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # Whatever the machine has, accelerate launch says 1.
        torch.set_num_threads(max(1, CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    launched, spread = int(os.environ.get("WORLD_SIZE", 1)), DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    plugin = GradientAccumulationPlugin(1, None, False, sync_each_batch=config.batch.sync_each_micro_step)
    with explained(f"launch of {launched} processes (see accelerate_configs/), or run.trackers"):
        accelerator = Accelerator(cpu=cpu, log_with=config.run.trackers or None, gradient_accumulation_plugin=plugin,
                                  kwargs_handlers=[spread], project_dir=config.run.output_dir + "/tensorboard")
        require(launched == accelerator.num_processes, "they do not see each other; use a file of accelerate_configs/")
    missing = {*config.run.trackers} - {"all", *map(str, accelerator.log_with)}
    require(not missing, f"run.trackers: {', '.join(missing)} is not there; pip install it, or leave it out")
    if accelerator.is_fsdp2 and accelerator.mixed_precision == "bf16":  # Accelerate's policy adds up gradients in bf16.
        policy = dist.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    require(not (config.model.chunked_loss and accelerator.is_fsdp2), "model.chunked_loss: not together with FSDP2")
    require(getattr(accelerator.parallelism_config, "non_data_parallel_size", 1) == 1, "launch: data parallelism only")
    return accelerator

def largest_micro_batch(size: int, row: np.ndarray, bare, optimizer, accelerator: Accelerator) -> int:
    """The most rows for which all ranks have memory, each try a tenth smaller. (Under FSDP devices must be equal.)"""
    trained_state(bare, [optimizer])  # Makes the optimizer's state.
    @memory.find_executable_batch_size(starting_batch_size=size)
    def largest(size: int) -> int:
        with accelerator.no_sync(bare):
            for _ in range(2):  # The second pass has the first one's gradients beside it.
                accelerator.backward(compute_loss(bare, collate([row] * size, accelerator.device)) * 0)
        return size
    with explained("batch.max_micro_batch_size: no pass fits, even of one row; lower data.sequence_length or shard"):
        found = torch.tensor([largest()], device=accelerator.device)
    bare.zero_grad()
    optimizer.state.clear()
    return int(accelerator.gather(found).min())

def train(argv: list[str]) -> int | None:
    if {"--help", "-h"} & {*argv}:
        return print(help_text())
    config, process_counts = load_config(argv)
    run, length, limit = config.run, config.data.sequence_length, config.batch.max_micro_batch_size
    if process_counts:
        group, rows = int(os.environ.get("PARALLELISM_CONFIG_TP_SIZE", 1)), config.global_batch_size
        limit = rows if limit == "auto" else limit  # As if each device could hold all its rows at once.
        return print(plan_table([plan_batch(rows, limit, n, length, group) for n in process_counts]))
    meter = Meter(started=STARTED)
    folder, accelerator = Path(run.output_dir), start_accelerator(config)
    device, ranks, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    if gpu := device.type == "cuda":
        meter.event = lambda: torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
    with explained(f"run.output_dir {folder}: not writable, or in use by another run; choose another"):
        _lock = rank == 0 and FileLock(folder / ".lock", timeout=45).acquire()  # A killed one's ranks may be saving.
    [found] = broadcast_object_list([find_checkpoint(run.resume, folder / "checkpoints") if rank == 0 else None])
    require((folder / ".lock").exists(), f"run.output_dir {folder} is another folder on this machine; share one")
    # The data, tokenized once per machine by the process that gets the lock; the others wait outside any collective.
    tokenizer = load_tokenizer(config.data, config.model)
    with FileLock(os.path.join(datasets.config.HF_DATASETS_CACHE, "train.lock")):
        train_data, eval_data = load_data(config.data, tokenizer, run.seed)
    # The model, wrapped as the launcher file says.
    needed = len(tokenizer) if config.data.format != "tokens" else 0  # Pre-tokenized data came with its vocabulary.
    bare = build_model(config.model, model_config(config, len(tokenizer)), needed, run.seed)
    flops = flops_per_token(bare.config, config.model.lora, length)
    peak = peak_flops(device, accelerator.mixed_precision, config.perf)
    tried = ("sdpa", "eager") * (config.data.packing != "none") + ("sdpa", "eager", CAUSAL) * config.model.chunked_loss
    if rank == 0 and bare.config._attn_implementation in tried:  # Flash and flex attention need a GPU.
        check_loss(bare, config.data.packing, config.model.chunked_loss)
    bare.chunked_loss = config.model.chunked_loss and accelerator.autocast
    model, optimizer = accelerator.prepare(bare.train(), build_optimizer(bare, config.optim))
    parameters = [*model.parameters()]  # Once: to walk through the modules takes longer than to clip.
    # The batch plan.
    if limit == "auto":
        row = np.outer([0, 0, 1], np.arange(length) % (length if config.data.packing == "none" else length // 2))
        limit = largest_micro_batch(-(-config.global_batch_size // ranks), row, bare, optimizer.optimizer, accelerator)
    plan = plan_batch(config.global_batch_size, limit, ranks, length)
    accelerator.gradient_accumulation_steps = plan.grad_accum_steps
    steps_per_epoch = len(train_data) / plan.global_batch_size
    require(steps_per_epoch >= 1, f"data: {len(train_data)} rows; lower the global batch of {plan.global_batch_size}")
    max_steps = run.max_steps or math.ceil(run.max_tokens / plan.tokens_per_step if run.max_tokens else
                                           run.max_epochs * steps_per_epoch - 1e-9)  # Rounding adds no step.
    require(config.optim.warmup_steps <= max_steps, f"optim.warmup_steps exceeds run.max_steps; at most {max_steps}")
    targets = eval_data and eval_data.sizes(np.arange(len(eval_data))[: config.eval.max_rows])[1]
    require(not eval_data or targets.any(), "data.eval_source or data.eval_fraction: no target token: roles, labels")
    # Where to start.
    seen, best = Counter(step=0, rows=0, tokens=0, real_tokens=0, target_tokens=0), [sys.float_info.max, "last step"]
    versions = {x.__name__: str(x.__version__) for x in (torch, accelerate, transformers, datasets)} | {
        "python": sys.version.split()[0], "git": subprocess.getoutput("git describe --always --dirty 2> /dev/null")}
    ours = pd.json_normalize(config.model_dump() | {"data fingerprint": train_data.fingerprint()}).to_dict("records")[0]
    record = {"config": ours, "max_steps": max_steps, "plan": asdict(plan), "versions": versions}
    if found:
        checkpoint, manifest = found
        seen = Counter({name: manifest[name] for name in seen})
        best = manifest["best"] if run.keep_best and (folder / "checkpoints" / manifest["best"][1]).exists() else best
        theirs = manifest["config"]
        changed = [f"  {name}: {theirs.get(name)!r} in the checkpoint, {ours.get(name)!r} now" for name in ours | theirs
                   if ours.get(name) != theirs.get(name) and not HARMLESS.fullmatch(name)]
        require(run.allow_changes or not changed, "\n".join([f"{checkpoint} is of another config:", *changed,
            "Choose a new run.output_dir, or continue with these changes: --run.allow_changes true"]))
        if seen["step"] >= max_steps and any('"finished"' in file.read_text() for file in folder.glob("status.json")):
            return say(f"Finished already: {folder} holds all {max_steps:,} steps. Add steps, or a new run.output_dir.")
        load_checkpoint(checkpoint, model, [optimizer.optimizer])
        say(f"Continuing after step {seen['step']:,} from {checkpoint}, on the schedule of {max_steps:,} steps.")
    elif run.init_from:
        verify_checkpoint(Path(run.init_from))
        load_checkpoint(Path(run.init_from), model, [])
    last_good = torch.tensor(float(step := seen["step"]), device=device)
    groups = [dist.new_group(backend="gloo") if ranks > 1 else None for _ in ("stop", "save")]
    stop, saving, saved, pool = Stop(groups[0]), None, step, ThreadPoolExecutor(1)
    stager = dcp.staging.DefaultStager(dcp.staging.StagingOptions(gpu, False, False, gpu))  # To pinned memory.
    def write(values: dict[str, Any]) -> None:
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        if rank == 0:
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        accelerator.log({name: value for name, value in values.items() if value is not None}, step=step)
    def check_skipped() -> None:
        first = int(last_good) + 1
        if first + run.max_skipped_steps <= step:
            saving and saving.result()
            rows = train_data.rows_at((first - 1) * plan.global_batch_size, plan.global_batch_size).tolist()
            good = max((folder / "checkpoints").glob("step-*"), default="none")
            raise ArithmeticError(f"the loss or gradient norm of step {first} is not finite; that update was not made. "
                                  f"Rows: {rows}. Last good checkpoint: {good}")
    def save() -> Future:
        check_skipped()  # Nothing poisoned is saved.
        meter.enter("checkpoint")
        saving and saving.result()  # One at a time; raises what went wrong with it.
        state, manifest = stager.stage(trained_state(model, [optimizer.optimizer])), {**record, **seen, "best": best}
        return pool.submit(save_checkpoint, folder / "checkpoints", run.keep_checkpoints, state, manifest, groups[1])
    vocab_size = bare.get_input_embeddings().num_embeddings
    load = partial(load_step, data=train_data, plan=plan, rank=rank, vocab_size=vocab_size, device=device)
    upcoming = [load(step + 1)]  # Before anything is written: rows of no use end the run here.
    first_targets = upcoming[0][0][-1]["targets"][-1][:120]
    if rank == 0:
        for leftover in folder.glob("**/.*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        (metrics := folder / "metrics.jsonl").touch()
        lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("}\n")]
        replace_file(metrics, "".join(line for line in lines if json.loads(line)["step"] <= step))  # Later ones recur.
        replace_file(folder / "config.yaml", yaml.safe_dump(config.model_dump()) + f"# {json.dumps(versions)}\n")
        replace_file(folder / "status.json", json.dumps({"status": "running", "step": step}))
    accelerator.init_trackers(Path(__file__).resolve().parent.name, {name: str(value) for name, value in ours.items()})
    write({f"plan/{name}": value for name, value in asdict(plan).items()})
    say(f"{plan_table([plan])}\nData: {len(train_data):,} rows, {train_data.lengths.mean() / length:.1%} full; "
        f"{steps_per_epoch:,.1f} steps per epoch\nModel: {bare.num_parameters():,} parameters, {flops / 1e6:,.1f} "
        f"MFLOPs per token\nIn the loss is, for example: {tokenizer.decode(first_targets[first_targets >= 0])!r}")
    rates = [getattr(bare.config, name, 0) for name in ("attention_dropout", "activation_dropout", "dropout")]
    if any(rates) or any(module.p for module in bare.modules() if isinstance(module, torch.nn.Dropout)):
        say("Dropout is on: this run is the same only on the same number of processes.")
    bar, stopped = tqdm(total=max_steps, initial=step, disable=rank > 0 or not sys.stderr.isatty(), unit="step"), False
    reseed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed  # Faster.
    profiler, profiled = torch.profiler.profile(), sorted(config.perf.profile_steps or [0, 0]) if rank == 0 else [0, 0]
    profile(profiler, profiled, step, folder, gpu)
    while step < max_steps and not (stopped := stop.agreed()):
        step, loss, (micro_batches, counts) = step + 1, 0.0, upcoming.pop(0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(config.optim, step, max_steps)
        reseed(zlib.crc32(f"{run.seed} {step} {rank}".encode()))
        meter.enter("micro_steps")
        try:
            for batch in micro_batches:
                with accelerator.accumulate(model):
                    micro_loss = compute_loss(model, batch)
                    loss = loss + micro_loss.detach()
                    # Wanted is the gradient of the sum of micro_loss over all ranks and micro-steps, / target_tokens.
                    # backward() divides by grad_accum_steps and the wrapper averages over ranks, so both multiply here.
                    accelerator.backward(micro_loss * (plan.grad_accum_steps * ranks / counts["target_tokens"]))
            meter.enter("optimizer")
            if ranks > 1:
                dist.all_reduce(loss)
            grad_norm = accelerator.clip_grad_norm_(parameters, config.optim.max_grad_norm or math.inf)
            grad_norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm  # Sharded by FSDP2.
            last_good = guard(optimizer.optimizer, step, loss + grad_norm, last_good, run.max_skipped_steps)
            optimizer.step()
        except RuntimeError as error:
            if not memory.should_reduce_batch_size(error):
                raise
            raise MemoryError(f"out of memory in step {step}: set batch.max_micro_batch_size to "
                              f"{max(1, plan.micro_batch_size // 2)} or less; the result will be the same") from error
        optimizer.optimizer.zero_grad(set_to_none=model is bare)  # DDP's are views of its buckets, which stay.
        meter.count(counts)
        seen.update(counts)
        line, last = {}, step == max_steps
        meter.enter("data")
        # While a GPU does most of the above. Several at once: one by one, each would find a CPU's caches cold.
        upcoming = upcoming or [load(s) for s in range(step + 1, min(step + 8, max_steps) + 1)]
        if last or step % run.log_every == 0:
            line = {"train/loss": loss.item() / counts["target_tokens"], "train/grad_norm": grad_norm.item()}
            meter.enter("logging")
            check_skipped()
            line |= {"train/learning_rate": group["lr"], "train/epoch": step / steps_per_epoch,
                     "train/skipped_steps": step - int(next(iter(optimizer.state.values()))["step"]), "train/rows":
                     seen["rows"], "train/target_tokens": seen["target_tokens"], **meter.rates(ranks, flops, peak)}
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            line["perf/peak_memory_gib"] = (torch.cuda.max_memory_allocated(device) if gpu else peak_bytes) / 2**30
        if eval_data and (last or run.eval_every and step % run.eval_every == 0):
            meter.enter("evaluation")
            line |= evaluate(model, eval_data, plan, accelerator, config.eval.max_rows)
            if run.keep_best and line["eval/loss"] < best[0]:
                best = [line["eval/loss"], f"step-{step:08d}"]
            meter.enter("sampling")
            line |= sample(bare, accelerator, tokenizer, config.eval, config.data.format == "chat", run.seed)
            model.train()
        meter.enter("logging")
        profile(profiler, profiled, step, folder, gpu)
        if line:
            write({"train/tokens": seen["tokens"]} | line)
            shown = [(name, line[name]) for name in SHOWN if line.get(name) is not None]
            say(f"step {step:,}/{max_steps:,}" + "".join(f"  {k} {v:{',.0f' if v > 999 else '.4g'}}" for k, v in shown))
        if last or run.save_every and step % run.save_every == 0 or f"step-{step:08d}" in best:
            saving, saved = save(), step
        meter.enter("data")
        bar.update()
    if step < profiled[1]:  # What there is so far: a process that ends while it is profiled crashes.
        profile(profiler, [0, step], step, folder, gpu)
    saving = save() if stopped and step > saved else saving
    meter.enter("checkpoint")
    saving and saving.result()
    accelerator.wait_for_everyone()  # The main process may still be naming it.
    if not stopped:
        if (chosen := folder / "checkpoints" / best[1]).exists():
            load_checkpoint(chosen, model, [])
        export_model(bare, accelerator, tokenizer, folder / "model")
    write(summary := meter.summary())
    say("Seconds: " + ", ".join(f"{key[8:-8]} {spent:.1f}" for key, spent in summary.items() if key[-7:] == "seconds"))
    if rank == 0:
        stopped or draw_curves(folder)
        replace_file(folder / "status.json", json.dumps({"status": "stopped" if stopped else "finished", "step": step}))
    say(f"Stopped by {stop.requested or 'a signal to another rank'} after step {step:,}; the same command continues."
        if stopped else f"Finished: {folder}/model ({best[1]}) loads with from_pretrained().")
    accelerator.end_training()
    time.sleep(0.1)  # Gloo's threads may need Python's lock to end, and torch, waiting for them, would not release it.
    # Where another node was told to leave, torchrun starts those that stay anew if this rank fails, not if it succeeds.
    return int(stopped and not stop.requested and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0")

def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0; after one message 2 for a UserError, 1 for what else may happen; a bug is raised."""
    try:
        return train(sys.argv[1:] if argv is None else argv) or 0
    except BaseException as error:
        error = next((failure for failure, _ in getattr(error, "failures", {}).values()), error)  # A checkpoint's.
        lost = isinstance(error, RuntimeError) and "onnection" in str(error)  # To a rank that says why it ended.
        if lost or os.environ.get("RANK", "0") != "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(15 if lost else 5)  # The launcher ends this rank before it says the same, or less.
        disk = isinstance(error, (OSError, SafetensorError))
        if not (disk or lost or isinstance(error, (UserError, ArithmeticError, MemoryError, KeyboardInterrupt))):
            raise
        note = "; the run folder's checkpoints are complete, and the same command continues" if disk else ""
        print(f"error: {str(error) or type(error).__name__}{note}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1
    finally:  # What accelerate keeps per process, so that main() can be called again.
        accelerate.state.AcceleratorState._reset_state(True)
        gc.collect()  # Of the error, which holds the folder's lock.
if __name__ == "__main__":
    sys.exit(main())
