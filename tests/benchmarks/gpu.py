"""Is train.py right on this GPU, and how fast? Prints a table in Markdown.

    python tests/benchmarks/gpu.py [--part PART ...] [--minutes 8.5] [--steps 15] [--folder FOLDER] [--tiny]

attention  flash attention of documents and cuDNN's of rows, forward and backward, against the formula in float64
check      losses of a small model on the GPU, in float32 and bf16, split otherwise, compiled, against those on the CPU
resume     the same run killed by SIGKILL and continued
host       how often the host waits for the GPU in a step without a log line, and copies memory that is not pinned
launchers  each file of accelerate_configs/ as it is, with one process
speed      configs/pretrain_1b.yaml from scratch on generated tokens, rows of 4,096, bf16: with and without compile,
           gradient checkpointing, chunked loss and 8-bit AdamW (needs bitsandbytes)
memory     the peak of a step's tensors, with and without gradient checkpointing, to what --plan calculates
events     the compiled run's times with a log line every fifth step, when CUDA events divide them
packed     the same model on documents of log-normal lengths: packed, and each in a row of its own
float8     twelve layers as wide as those of Llama 3.1 8B, compiled, in bf16 and in float8 (needs torchao)
lora       LoRA adapters of a model of the shape of Llama 3.1 8B, with random weights, in bf16 and in 4 bits
profile    one compiled step: the kernels that take most of it
overhead   the compiled run's step time against that of a bare torch loop on the same model and tokens
others     transformers' Trainer and, if it is installed, TRL with its packing, on the same model and documents, all
           without compile; and a loop on Accelerate's FSDP2, as in its examples, against fsdp2.yaml on full rows
save       how long a save of four layers holds up training
auto       with compile and checkpointing, the largest micro-batch that batch.max_micro_batch_size: auto finds

It runs the real command with the versions that are installed, without any network, and reads metrics.jsonl; timed runs
are killed after the steps they are for, before they would save. GPU time costs money, so the next runs start up while
one is timed, and wait with their steps until it has ended (gpu_contenders.py). Those that check losses share the GPU.
What does not fit into the minutes is left out, and named; give --part for the next slice. FOLDER/results.jsonl gets one
line for each case. Exit status 1 if a check fails or, on a GPU whose peak is known, if a goal is missed: MFU of 50 %
with compile, memory within 10 % of the plan, an overhead of 1 %, float8 1.25 times as fast as bf16, 12,500 tokens/s
with LoRA, packed rows as fast as full ones, and faster than Trainer, TRL and Accelerate's loop; 2 if a library is
missing. --tiny shrinks everything, so that it also runs on a CPU, where it shows no speed.
"""

import argparse
import ast
import fcntl
import gzip
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

CONTENDERS = ROOT / "tests" / "benchmarks" / "gpu_contenders.py"
UNTIMED = "attention", "check", "resume", "host", "launchers"
PARTS = (
    *(*UNTIMED, "speed", "memory", "events", "packed"),
    *("float8", "lora", "profile", "overhead", "others", "save", "auto"),
)
SKIPPED_STEPS = 3  # At the start of a run: compilation, memory pools.
WORST = {"no": 1e-4, "bf16": 5e-3, "fp16": 1e-3}  # Largest relative difference of a loss from the CPU's, by precision.
LAUNCHERS = "single.yaml", "fp8.yaml", "multi_gpu.yaml", "fsdp2.yaml"  # The others need several processes.
SMALL_STEPS = 20


def missing_libraries() -> list[str]:
    """What train.py imports in any case, and this file, and this Python does not have."""
    files = [ROOT / "train.py", *(ROOT / "samerun").rglob("*.py")]
    statements = [node for file in files for node in ast.parse(file.read_text()).body]
    names = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in statements if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in names} | {"psutil"} - {"samerun"}
    return sorted(name for name in roots if importlib.util.find_spec(name) is None)


def lacking_libraries() -> dict[str, str]:
    """What runs that cannot take place here would need."""
    import torch

    lacking = {}
    if importlib.util.find_spec("torchao") is None or not torch.cuda.is_available():
        lacking |= dict.fromkeys(("fp8.yaml", *FLOAT8), "torchao and a GPU")
    if not torch.cuda.is_available():
        lacking |= {name: "a GPU" for name, (precision, _) in CHECKS.items() if precision == "fp16"}
    if importlib.util.find_spec("bitsandbytes") is None:
        with_8bit = [name for name in (*CHECKS, *SPEED) if "adamw_8bit" in name]
        lacking |= dict.fromkeys((*with_8bit, QLORA), "bitsandbytes")
    if importlib.util.find_spec("trl") is None:
        lacking["TRL"] = "trl"
    return lacking


@dataclass(frozen=True)
class Size:
    """What --tiny changes, and nothing else."""

    length: int
    rows: int  # Of a step.
    micro_batch: int
    most: int  # Rows of a step from which `auto` starts.
    steps: int
    vocab: int
    small: int  # Width of the small model.
    architecture: dict  # Laid over that of configs/pretrain_1b.yaml.
    documents: tuple[int, ...]  # Their lengths, of which attention is computed.


FULL = Size(4096, 16, 4, 64, 15, 49_152, 256, {}, (1, 700, 64, 64, 3, 1000, 216))
TINY = Size(
    64,
    8,
    2,
    16,
    9,
    384,
    32,
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    (1, 70, 6, 6, 3, 150, 20),
)
COMPILE, CHECKPOINTING = ("--model.compile", "regional"), ("--model.gradient_checkpointing", "true")
SELECTIVE = "--model.gradient_checkpointing", "selective"
EIGHT_BIT = "--optim.name", "adamw_8bit"
CHUNKED, AT_ONCE = ("--model.chunked_loss", "true"), ("--model.chunked_loss", "false")


@dataclass(frozen=True)
class Variant:
    """A timed run of configs/pretrain_1b.yaml."""

    settings: tuple[str, ...] = COMPILE
    documents: bool = False  # Of many lengths. Otherwise each is as long as a row.
    architecture: dict | None = None  # Laid over that of the config.
    precision: str = "bf16"
    is_large: bool = False  # With less than 100 GiB, it makes half the rows at once.
    launcher: str | None = None


EIGHT_B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
WIDE = {name: EIGHT_B[name] for name in EIGHT_B if name not in ("model_type", "vocab_size", "tie_word_embeddings")}
WIDE["num_hidden_layers"] = 12  # With the vocabulary of this model, the output layer has the same share as in all 32.
SPEED = {
    "eager": Variant(()),
    "compile": Variant(),
    "compile full": Variant(("--model.compile", "full")),
    "checkpointing": Variant(CHECKPOINTING),
    "compile, checkpointing": Variant((*COMPILE, *CHECKPOINTING)),
    "compile, selective checkpointing": Variant((*COMPILE, *SELECTIVE)),
    "compile, all logits at once": Variant((*COMPILE, *AT_ONCE)),
    "compile, packing none": Variant((*COMPILE, "--data.packing", "none")),
    "compile, adamw_8bit": Variant((*COMPILE, *EIGHT_BIT)),
}
SELDOM = "compile, a log line every fifth step"
PACKED, PADDED = "compile, documents, packing concat", "compile, documents, packing none"
EAGER_PACKED, EAGER_PADDED, FSDP2 = "documents, packing concat", "documents, packing none", "compile, fsdp2.yaml"
FLOAT8 = "12 layers of 8B, compile, bf16", "12 layers of 8B, compile, float8"
QLORA = "LoRA on 8B in 4 bits, compile"
LORA, PROFILED, AUTO = "LoRA on 8B, compile", "compile, profiled", "compile, checkpointing, auto"
VARIANTS = SPEED | {
    SELDOM: Variant((*COMPILE, "--run.log_every", "5")),
    PACKED: Variant(documents=True),
    PADDED: Variant((*COMPILE, "--data.packing", "none"), documents=True),
    EAGER_PACKED: Variant((), documents=True),
    EAGER_PADDED: Variant(("--data.packing", "none"), documents=True),
    FSDP2: Variant(launcher="fsdp2.yaml"),
    FLOAT8[0]: Variant(architecture=WIDE, is_large=True),
    FLOAT8[1]: Variant(architecture=WIDE, is_large=True, precision="fp8"),
    PROFILED: Variant((*COMPILE, "--perf.profile_steps", "[5, 5]")),
    AUTO: Variant((*COMPILE, *CHECKPOINTING)),
}
CONTESTANTS = {"bare": False, "Accelerate": False, "Trainer": True, "TRL": True}  # Whether on documents.
CHECKS = {
    "check CPU": ("no", ()),
    "check bf16": ("bf16", ()),
    "check bf16, compile": ("bf16", COMPILE),
    "check fp16": ("fp16", ()),
    "check fp16, compile": ("fp16", COMPILE),
    "check float32": ("no", ()),
    "check float32, 3 rows at a time": ("no", ("--batch.max_micro_batch_size", 3)),
    "check bf16, checkpointing": ("bf16", CHECKPOINTING),
    "check bf16, selective checkpointing": ("bf16", SELECTIVE),
    "check bf16, chunked loss": ("bf16", CHUNKED),
    "check bf16, compile, chunked loss": ("bf16", (*COMPILE, *CHUNKED)),
    "check CPU, full rows": ("no", ()),
    "check bf16, full rows": ("bf16", ()),
    "check bf16, full rows, compile, checkpointing": ("bf16", (*COMPILE, *CHECKPOINTING)),
    "check bf16, full rows, compile, selective checkpointing": ("bf16", (*COMPILE, *SELECTIVE)),
    "check CPU, adamw_8bit": ("no", EIGHT_BIT),
    "check float32, adamw_8bit": ("no", EIGHT_BIT),
    "check bf16, adamw_8bit": ("bf16", EIGHT_BIT),
}
FAST = *CHECKS, *LAUNCHERS, "resume", "host"  # Not timed.
NEEDS = {
    "check": tuple(CHECKS),
    "resume": ("check bf16", "resume"),
    "host": ("host",),
    "launchers": ("check bf16", *LAUNCHERS),
    "speed": tuple(SPEED),
    "memory": ("eager", "checkpointing"),
    "events": ("compile", SELDOM),
    "packed": ("compile", PACKED, PADDED),
    "float8": FLOAT8,
    "lora": (LORA,),
    "profile": (PROFILED,),
    "overhead": ("compile", "bare"),
    "others": (FSDP2, "Accelerate", EAGER_PADDED, "Trainer", EAGER_PACKED, "TRL"),
    "save": ("save",),
}


class Bench:
    """The folder, the size and the deadline of this invocation."""

    def __init__(self, folder: Path, size: Size, minutes: float):
        self.folder, self.size, self.deadline = folder, size, time.monotonic() + 60 * minutes
        self.left_out, self.failed = [], []
        self.lacking = lacking_libraries()  # By run.
        self.runs: dict[str, Future] = {}
        self.checks, self.timed = ThreadPoolExecutor(min(16, os.cpu_count())), ThreadPoolExecutor(3)
        self.gate = os.open(folder / "gate", os.O_CREAT | os.O_RDWR)  # Whoever has locked it has the GPU alone.
        self.environment = os.environ | {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        self.environment["GPU_GATE"] = str(folder / "gate")

    def start(self, parts: list[str]) -> None:
        """Start what these parts need, in the background: checks as many as there are cores, timed runs in turn."""
        fcntl.flock(self.gate, fcntl.LOCK_EX)
        self.small_config(), self.small_config(full=True), self.tokens(), self.tokens(documents=True)
        own = {"resume": self.killed_and_continued, "host": self.count_waits, LORA: self.adapters, "save": self.saves}
        for name in dict.fromkeys(name for part in parts for name in NEEDS.get(part, ())):
            pool = self.checks if name in FAST else self.timed
            if name in self.lacking:
                self.left_out.append(f"{name}, which needs {self.lacking[name]}")
                self.runs[name] = pool.submit(lambda: None)
            elif name in own:
                self.runs[name] = pool.submit(own[name])
            elif name in CHECKS:
                self.runs[name] = pool.submit(self.losses, name, *CHECKS[name])
            elif name in LAUNCHERS:
                self.runs[name] = pool.submit(self.losses, name, launcher=ROOT / "accelerate_configs" / name)
            else:
                self.runs[name] = pool.submit(self.measure if name in VARIANTS else self.contender, name)

    def result(self, name: str) -> Any:
        """What a run that start() has started has brought; None, and a note the first time, if it has failed."""
        error = self.runs[name].exception()
        if error is None:
            return self.runs[name].result()
        if not any(one.startswith(f"{name}: ") for one in self.failed):
            self.failed.append(f"{name}: {error!r}")
        return None

    def release(self) -> None:
        """Let the timed runs have the GPU."""
        fcntl.flock(self.gate, fcntl.LOCK_UN)

    def note(self, case: str, **figures) -> None:
        """One line of results.jsonl."""
        with open(self.folder / "results.jsonl", "a") as file:
            file.write(json.dumps({"case": case} | figures) + "\n")

    def train(
        self,
        name: str,
        config: Path,
        *overrides,
        precision: str = "bf16",
        steps: int | None = None,
        env: dict | None = None,
        script: tuple = (ROOT / "train.py",),
        launcher: Path | None = None,
    ) -> list[dict] | None:
        """The metrics of one `accelerate launch`: to its end, or killed once it has logged so many steps.

        None, and a note, if it fails or the time is up before.
        """
        from helpers import kill_tree

        run = self.folder / name.replace(", ", "-").replace(" ", "-")
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            *(("--config_file", launcher) if launcher else ("--num_machines", "1", "--dynamo_backend", "no")),
            "--main_process_port",
            "0",  # A free one: some runs start at the same time.
            "--num_processes",
            "1",
            *(() if launcher else ("--mixed_precision", precision)),
            *(("--fp8_backend", "ao") if precision == "fp8" and not launcher else ()),
            *script,
            "--config",
            config,
            "--run.output_dir",
            run,
            "--run.trackers",
            "[]",
            *overrides,
        ]
        began, done = time.monotonic(), False
        if began > self.deadline:
            return self.left_out.append(name)
        with open(self.folder / f"{run.name}.log", "w") as log:
            process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=self.environment | (env or {})
            )
        try:
            while process.poll() is None and not done and time.monotonic() < self.deadline:
                time.sleep(0.1)
                done = steps is not None and len(self.metrics(run, "train/loss")) >= steps
        finally:
            ended = process.poll()
            kill_tree(process)
            process.wait()
        if ended or (ended == 0 and steps):  # A run for so many steps does not end by itself.
            text = (self.folder / f"{run.name}.log").read_text()
            self.failed.append(f"{name}: exit status {ended}")
            return print(f"{name}: exit status {ended}\n{text[-3000:]}", file=sys.stderr)
        if ended is None and not done:
            return self.left_out.append(name)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return self.metrics(run)

    @staticmethod
    def metrics(run: Path, key: str = "step") -> list[dict]:
        """The whole lines of metrics.jsonl that have this key."""
        file = run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in map(json.loads, (line for line in lines if line.endswith("}"))) if key in line]

    # Right or wrong -------------------------------------------------------------------------------------------

    def attention(self) -> None:
        """Errors relative to the largest number, beside those of plain 16-bit attention of each document."""
        import torch

        from samerun.data.batches import Documents
        from samerun.model.attention import attention_of_rows, flash_attention, piece_of

        device = "cuda" if torch.cuda.is_available() else "cpu"
        kernel = flash_attention if device == "cuda" else plain_attention
        lengths = self.size.documents
        ends = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        documents = Documents(lengths, max(lengths), ends)
        print("\n| attention of documents | largest error | of plain attention in bf16 |\n|---|---|---|")
        tokens = sum(lengths)
        piece = piece_of(documents, tokens // 5, tokens * 3 // 4)  # What a rank has of a row with context parallelism.
        whole, part = (documents, documents), (piece.own, piece.seen)
        cases = [(64, 8, None, whole), (128, 2, None, whole), (128, 2, 100, whole), (256, 4, None, whole)]
        for head, key_heads, window, (own, seen) in [*cases, (128, 2, None, part), (128, 2, 100, part)]:
            case = f"flash, heads of {head}, {8 // key_heads} to a key, window {window}"
            if own is not seen:
                case += ", a piece of a row"
            self.compare_attention(case, kernel, head, key_heads, own, seen, window)
        rows = Documents((640, 640), 640, torch.tensor([0, 640, 1280], dtype=torch.int32, device=device), are_rows=True)

        def of_rows(query, key, value, own, seen, sliding_window=None):
            rows = (states[0].unflatten(1, (-1, own.longest)).transpose(0, 1) for states in (query, key, value))
            return attention_of_rows(*rows, own).flatten(0, 1)[None]

        if device == "cuda" and torch.cuda.get_device_capability() in ((9, 0), (10, 0)):
            for head, key_heads in (64, 8), (128, 2):
                case = f"cuDNN, heads of {head}, {8 // key_heads} to a key"
                self.compare_attention(case, of_rows, head, key_heads, rows, rows, None)

    def compare_attention(
        self, case: str, kernel: Callable, head: int, key_heads: int, own: Any, seen: Any, window: int | None
    ) -> None:
        """A line of the table; a failure if the error is more than twice that of plain attention in bf16."""
        import torch

        torch.manual_seed(0)
        counts = (8, own), (key_heads, seen), (key_heads, seen)
        shapes = [(1, sum(of.lengths), heads, head) for heads, of in counts]
        device = own.ends.device
        states = [torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for shape in shapes]
        states = [one.requires_grad_() for one in states]
        exact = [one.detach().double().requires_grad_() for one in states]
        truth = results(plain_attention, exact, own, seen, window)
        errors = {}
        for name, function in ("kernel", kernel), ("plain", plain_attention):
            pairs = zip(results(function, states, own, seen, window), truth)
            errors[name] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        print(f"| {case} | {errors['kernel']:.1e} | {errors['plain']:.1e} |", flush=True)
        self.note(case, **errors)
        if not errors["kernel"] <= 2 * errors["plain"]:
            self.failed.append(f"{case}: {errors['kernel']:.1e}")

    def small_config(self, full: bool = False) -> Path:
        """A small model, and documents of many lengths that share rows, so that positions are checked, too. With
        `full`, each is as long as a row."""
        from helpers import VOCABULARY, make_rows, write_config, write_rows

        folder, lengths = self.folder / "small", [128 if full else 3 + 7 * i % 300 for i in range(200)]
        if full:
            folder = self.folder / "small, full"
        if folder.exists():
            return folder / "config.yaml"
        folder.mkdir()
        width = self.size.small
        shape = {"hidden_size": width, "intermediate_size": 2 * width}
        shape |= {"num_hidden_layers": 4, "num_attention_heads": width // 32}
        return write_config(
            folder,
            {
                "run": {"max_steps": SMALL_STEPS, "log_every": 1, "eval_every": 0, "save_every": 0},
                "batch": {"global_batch_size": 10, "max_micro_batch_size": 10},
                "data": {
                    "path": str(write_rows(folder / "rows", make_rows(lengths))),
                    "format": "tokens",
                    "sequence_length": 128,
                },
                "model": {"architecture": {"model_type": "llama", "vocab_size": VOCABULARY, **shape}},
                "optim": {"learning_rate": 1e-3, "warmup_steps": 5, "adam_eps": 1e-5},
            },
        )

    def losses(self, name: str, precision: str = "bf16", overrides: tuple = (), **how) -> list[float] | None:
        """Of the small model."""
        env = {"CUDA_VISIBLE_DEVICES": ""} if "CPU" in name else {}
        config = self.small_config("full rows" in name)
        lines = self.train(name, config, *overrides, precision=precision, env=env, **how)
        return lines and [line["train/loss"] for line in lines if "train/loss" in line]

    def compare(self, name: str, values: list[float] | None, truth: list[float] | None, bound: float) -> None:
        """A line of a table; a failure if a loss is missing or too far away."""
        if not values or not truth:
            return
        worst = max(abs(a - b) / b for a, b in zip(values, truth))
        print(f"| {name} | {values[-1]:.4f} | {worst:.1e} | {bound:.0e} |", flush=True)
        self.note(name, losses=values, worst=worst, bound=bound)
        if not worst <= bound or len(values) != len(truth):  # So that nan fails, too.
            self.failed.append(f"{name}: {worst:.1e}")

    def check(self) -> None:
        print(f"\n| {SMALL_STEPS} steps of a small model | last loss | difference from the CPU's | bound |")
        print("|---|---|---|---|")
        for name, (precision, _) in CHECKS.items():
            if "CPU" not in name:
                kinds = [kind for kind in ("full rows", "adamw_8bit") if kind in name]
                truth = self.result(", ".join(["check CPU", *kinds]))
                self.compare(name, self.result(name), truth, WORST[precision])

    def resume(self) -> None:
        print("\n| | last loss | difference from the run that was not killed | bound |\n|---|---|---|---|")
        self.compare("killed and continued", self.result("resume"), self.result("check bf16"), 1e-3)

    def killed_and_continued(self) -> list[float] | None:
        often = "--run.save_every", 5
        if self.train("resume", self.small_config(), *often, steps=SMALL_STEPS * 3 // 5):
            return self.losses("resume", overrides=often)

    def host(self) -> None:
        """Of steps without a log line. The profile tells from where the GPU has copied."""
        if not self.result("host"):
            return
        log = (self.folder / "host.log").read_text().splitlines()
        [counted] = [json.loads(line) for line in log if line.startswith('{"waits"')]
        waits = counted["waits"][8:12]  # Not those of the profiler.
        names = [event.get("name", "") for event in profile_of(self.folder / "host")]
        copies = {kind: sum(f"HtoD ({kind}" in name for name in names) for kind in ("Pinned", "Pageable")}
        print(f"\nThe host waits {max(waits)} times in a step; copies to the GPU in 4 steps: {copies}", flush=True)
        self.note("host", waits=waits, where=counted["where"], copies=copies)
        if max(waits) > 0 or copies["Pageable"]:
            self.failed.append(f"host: waits {waits}, {copies}")

    def count_waits(self) -> list[dict] | None:
        settings = "--run.log_every", 1000, "--perf.profile_steps", "[12, 15]"
        return self.train("host", self.small_config(), *settings, script=(CONTENDERS, "count"))

    def launchers(self) -> None:
        """The losses under each file: in bf16 or float8, as the file says."""
        truth = self.result("check bf16")
        print("\n| launcher file | last loss | difference from bf16 without one | bound |\n|---|---|---|---|")
        for name in LAUNCHERS:
            self.compare(name, self.result(name), truth, 2e-2)

    # How fast -------------------------------------------------------------------------------------------------

    def tokens(self, documents: bool = False) -> Path:
        """Rows of random tokens, each a document, as in most pretraining benchmarks; or documents of many lengths."""
        import datasets
        import numpy as np

        folder, size = self.folder / ("documents" if documents else "tokens"), self.size
        if not folder.exists():
            rng, count = np.random.default_rng(0), size.most * 4
            lengths = [size.length] * count
            if documents:
                lengths = np.clip(rng.lognormal(np.log(size.length / 8), 0.8, 8 * count).astype(int), 2, size.length)
            rows = [rng.integers(0, size.vocab, length, dtype=np.int32) for length in lengths]
            datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(folder)
        return folder

    def overrides(self, rows: int, micro_batch: int | str, tokens: Path) -> list:
        """configs/pretrain_1b.yaml on these tokens, for longer than it will be let run."""
        size = self.size
        settings = {
            "run.max_tokens": "null",
            "run.max_steps": 10_000,
            "run.log_every": 1,
            "run.eval_every": 0,
            "run.save_every": 0,
            "batch.global_batch_tokens": rows * size.length,
            "batch.max_micro_batch_size": micro_batch,
            "data.path": tokens,
            "data.name": "null",
            "data.format": "tokens",
            "data.tokenizer": "bytes",
            "data.sequence_length": size.length,
            "data.eval_fraction": 0.0,
            "eval.prompts": "[]",
        }
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    def shape(self, architecture: dict | None) -> list:
        """Of the model: that of the config, but for what this size and the variant change."""
        settings = {"vocab_size": self.size.vocab} | self.size.architecture | (architecture or {})
        return [word for name, value in settings.items() for word in (f"--model.architecture.{name}", value)]

    def measure(self, name: str) -> dict | None:
        """What a variant reached, from its own metrics."""
        size, variant = self.size, VARIANTS[name]
        rows, micro_batch = (size.most, "auto") if name == AUTO else (size.rows, size.micro_batch)
        if variant.is_large and self.memory_gib() < 100:
            micro_batch //= 2
        lines = self.train(
            name,
            ROOT / "configs" / "pretrain_1b.yaml",
            *self.overrides(rows, micro_batch, self.tokens(variant.documents)),
            *self.shape(variant.architecture),
            *variant.settings,
            precision=variant.precision,
            launcher=variant.launcher and ROOT / "accelerate_configs" / variant.launcher,
            script=(CONTENDERS, "alone"),
            steps={SELDOM: 3, PROFILED: 6}.get(name, size.steps),  # The profile of step 5 is written before step 6.
        )
        return lines and self.noted(name, summarize(lines))

    @staticmethod
    def memory_gib() -> float:
        import torch

        return torch.cuda.get_device_properties(0).total_memory / 2**30

    def noted(self, name: str, figures: dict) -> dict:
        self.note(name, **figures)
        return figures

    def speed(self) -> None:
        for name in SPEED:
            self.result(name)

    def memory(self) -> None:
        """Without compile, whose code holds less than the plan knows of."""
        for name in "eager", "checkpointing":
            one = self.result(name)
            planned = one and self.planned_memory(*SPEED[name].settings)
            if planned:
                ratio = planned / one["memory"]
                print(f"\n{name}: the plan's {planned:.3f} GiB, to what was measured: {ratio:.2f}", flush=True)
                self.note(f"memory, {name}", planned=planned, measured=one["memory"])
                if one["mfu"] and abs(ratio - 1) > 0.1:
                    self.failed.append(f"memory, {name}: the plan is {ratio:.2f} times what was measured")

    def planned_memory(self, *settings) -> float | None:
        """GiB of one device in bf16. None, and a note, if the plan does not know."""
        config, size = ROOT / "configs" / "pretrain_1b.yaml", self.size
        overrides = *self.overrides(size.rows, size.micro_batch, self.tokens()), *self.shape(None)
        words = [*overrides, *settings, "--perf.device_memory_gib", 1000, "--plan", 1]
        command = [sys.executable, ROOT / "train.py", "--config", config, *words]
        environment = self.environment | {"ACCELERATE_MIXED_PRECISION": "bf16"}
        said = subprocess.run(list(map(str, command)), env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)
        found = re.search(r"all\n\s*1 .* ([\d.]+)", said.stdout)
        if not found:
            return self.failed.append(f"the plan's memory: {said.stdout[-300:]}")
        return float(found.group(1))

    def events(self) -> None:
        """A line per step makes the host wait in each. With fewer, CUDA events have to tell the phases apart."""
        often, seldom = self.result("compile"), self.result(SELDOM)
        if not often or not seldom:
            return
        for key in "rate", "micro_step_rate":
            ratio = seldom[key] / often[key]
            print(f"\n{key} with a log line every fifth step, to one in each: {ratio:.3f}", flush=True)
            if often["mfu"] and not 0.95 <= ratio <= 1.1:
                self.failed.append(f"events: {key} {ratio:.3f}")

    def packed(self) -> None:
        """Real tokens per second, to those of rows that are full."""
        full = self.result("compile")
        for packing, name in ("concat", PACKED), ("none", PADDED):
            one = self.result(name)
            if full and one:
                ratio = one["real_rate"] / full["real_rate"]
                print(f"\nReal tokens per second with packing {packing}, to full rows: {ratio:.3f}", flush=True)
                if packing == "concat" and full["mfu"] and ratio < 0.98:
                    self.failed.append(f"packed rows {ratio:.3f} times as fast as full ones")

    def auto(self) -> None:
        """After all others, because it looks how much memory is free."""
        self.runs[AUTO] = self.timed.submit(self.measure, AUTO)
        self.result(AUTO)

    def float8(self) -> None:
        runs = [self.result(name) for name in FLOAT8]
        if all(runs):
            ratio = runs[1]["rate"] / runs[0]["rate"]
            print(f"\nfloat8 is {ratio:.2f} times as fast as bf16", flush=True)
            if ratio < 1.25:
                self.failed.append(f"float8 {ratio:.2f} times bf16, goal 1.25")

    def lora(self) -> None:
        one = self.result(LORA)
        if one and one["mfu"] and one["rate"] < 12_500:
            self.failed.append(f"LoRA {one['rate']:,.0f} tokens/s, goal 12,500")
        if QLORA in self.lacking:
            self.left_out.append(f"{QLORA}, which needs {self.lacking[QLORA]}")
        else:
            self.runs[QLORA] = self.timed.submit(self.adapters, QLORA, "--model.load_in_4bit", "true")
            self.result(QLORA)

    def adapters(self, name: str = LORA, *more: str) -> dict | None:
        """One row at a time: at this size, its activations take as much memory as the weights or more."""
        model, size = self.folder / "8B", self.size
        if not model.exists():
            given = {"architecture": EIGHT_B | size.architecture, "length": size.length, "folder": str(model)}
            subprocess.run([sys.executable, CONTENDERS, "model", json.dumps(given)], check=True, env=self.environment)
        settings = {
            "model.architecture": "null",
            "model.pretrained": model,
            "model.dtype": "bfloat16",
            "model.lora": json.dumps({"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}),
        }
        lines = self.train(
            name,
            ROOT / "configs" / "pretrain_1b.yaml",
            *self.overrides(size.rows // 2, 1, self.tokens()),
            *(word for name, value in settings.items() for word in (f"--{name}", value)),
            *COMPILE,
            *more,
            script=(CONTENDERS, "alone"),
            steps=size.steps,
        )
        return lines and self.noted(name, summarize(lines))

    def profile(self) -> None:
        """Milliseconds of each kernel, summed over the step."""
        if not self.result(PROFILED):
            return
        kernels = Counter()
        for event in profile_of(self.folder / PROFILED.replace(", ", "-")):
            if event.get("cat") == "kernel":
                kernels[event["name"][:90]] += event["dur"] / 1000
        total = sum(kernels.values())
        print(f"\n| kernel, of {total:,.1f} ms in one step | ms | share |\n|---|---|---|")
        for name, milliseconds in kernels.most_common(25):
            print(f"| {name} | {milliseconds:.2f} | {milliseconds / total:.1%} |")

    def overhead(self) -> None:
        size, ours, bare = self.size, self.result("compile"), self.result("bare")
        if not ours or not bare:
            return
        seconds, over = median(bare["seconds"]), ours["seconds"] / median(bare["seconds"]) - 1
        print(f"\n| compiled, {size.rows} rows of {size.length:,} per step | median step, s | tokens/s |")
        print("|---|---|---|")
        print(f"| bare torch loop | {seconds:.4f} | {size.rows * size.length / seconds:,.0f} |")
        print(f"| train.py | {ours['seconds']:.4f} | {size.rows * size.length / ours['seconds']:,.0f} |")
        print(f"\nOverhead of train.py: {over:+.2%}", flush=True)
        if ours["mfu"] and over > 0.01:
            self.failed.append(f"overhead {over:.2%}, goal 1 %")

    def contender(self, name: str) -> dict | None:
        """The seconds and the real tokens of its steps, as it tells them."""
        import yaml

        size = self.size
        architecture = yaml.safe_load((ROOT / "configs" / "pretrain_1b.yaml").read_text())["model"]["architecture"]
        given = {
            "architecture": architecture | size.architecture | {"vocab_size": size.vocab},
            "rows": size.rows,
            "micro_batch": size.micro_batch,
            "length": size.length,
            "steps": size.steps,
            "tokens": str(self.tokens(CONTESTANTS[name])),
        }
        began = time.monotonic()
        if began > self.deadline:
            return self.left_out.append(name)
        try:
            done = subprocess.run(
                [sys.executable, CONTENDERS, name, json.dumps(given)],
                text=True,
                stdout=subprocess.PIPE,
                env=self.environment,
                timeout=self.deadline - began,
            )
        except subprocess.TimeoutExpired:
            return self.left_out.append(name)
        if done.returncode:
            return self.failed.append(f"{name}: exit status {done.returncode}")
        steps = json.loads(done.stdout.splitlines()[-1])
        steps = {key: values[SKIPPED_STEPS:] for key, values in steps.items()}
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        rates = [tokens / seconds for tokens, seconds in zip(steps["tokens"], steps["seconds"])]
        return self.noted(name, steps | {"real_rate": median(rates)})

    def others(self) -> None:
        """Real tokens per second: padded as Trainer does, packed by TRL, all of one length, and ours on the same."""
        print("\n| on the same documents | real tokens/s | of train.py | train.py is faster by |\n|---|---|---|---|")
        for name, mine in ("Trainer", EAGER_PADDED), ("TRL", EAGER_PACKED), ("Accelerate", FSDP2):
            theirs, ours = self.result(name), self.result(mine)
            if theirs and ours:
                rate, own = theirs["real_rate"], ours["real_rate"]
                print(f"| {name} | {rate:,.0f} | {own:,.0f} | {own / rate:.2f} |", flush=True)
                if ours["mfu"] and own < rate:
                    self.failed.append(f"{name} is {rate / own:.2f} times as fast")

    def save(self) -> None:
        """Seconds that training waits for a save, beside those of a step."""
        lines = self.result("save")
        if lines:
            waited, step = lines[-1]["summary/checkpoint_seconds"], summarize(lines)["seconds"]
            print(f"\n3 saves of 4 layers: training waited {waited:.2f} s, a step takes {step:.3f} s", flush=True)
            self.note("save", waited=waited, step=step)

    def saves(self) -> list[dict] | None:
        settings = "--run.save_every", 5, "--run.keep_checkpoints", 1, "--run.max_steps", 15, "--optim.warmup_steps", 0
        few = {"num_hidden_layers": min(4, self.size.architecture.get("num_hidden_layers", 4))}
        words = *self.overrides(self.size.rows, self.size.micro_batch, self.tokens()), *self.shape(few), *settings
        return self.train("save", ROOT / "configs" / "pretrain_1b.yaml", *words, script=(CONTENDERS, "alone"))

    def table(self) -> None:
        """The variants that were measured."""
        seen = {name: self.result(name) for name in (*VARIANTS, LORA, QLORA) if name in self.runs}
        seen = {name: run for name, run in seen.items() if run and name != PROFILED}
        if not seen:
            return
        print(f"\n{self.size.length:,} tokens per row, bf16 where nothing else is said\n")
        print("| | rows at once x accumulated | tokens/s | MFU | peak memory, GiB | step, s: median (least to most) |")
        print("|---|---|---|---|---|---|")
        for name, run in seen.items():
            mfu = f"{run['mfu']:.1%}" if run["mfu"] else "unknown peak"
            print(
                f"| {name} | {run['plan/micro_batch_size']} x {run['plan/grad_accum_steps']} | {run['rate']:,.0f} | "
                f"{mfu} | {run['memory']:.1f} | {run['seconds']:.4f} ({run['least']:.4f} to {run['most']:.4f}) |"
            )
        compiled = [run["mfu"] for name, run in seen.items() if name.startswith("compile") and run["mfu"]]
        if compiled and max(compiled) < 0.5:
            self.failed.append(f"MFU {max(compiled):.1%}, goal 50 %")


def commit_of(folder: Path) -> str | None:
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    return said.stdout.strip() or None


def profile_of(run: Path) -> list[dict]:
    """The events of a profile of torch."""
    with gzip.open(run / "profile.json.gz") as file:
        return json.load(file)["traceEvents"]


def median(values: list[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return (ordered[half] + ordered[-half - 1]) / 2


def summarize(lines: list[dict]) -> dict:
    steps = [line for line in lines if line["step"] > SKIPPED_STEPS and line.get("perf/step_seconds")]
    seconds = [line["perf/step_seconds"] for line in steps]
    of = {
        key: median([line[f"perf/{key}"] for line in steps if line[f"perf/{key}"] is not None] or [0])
        for key in (
            "tokens_per_second",
            "real_tokens_per_second",
            "micro_step_tokens_per_second_per_device",
            "mfu",
        )
    }
    return lines[0] | {
        "rate": of["tokens_per_second"],
        "real_rate": of["real_tokens_per_second"],
        "micro_step_rate": of["micro_step_tokens_per_second_per_device"],
        "mfu": of["mfu"],
        "memory": steps[-1]["perf/peak_memory_gib"],
        "seconds": median(seconds),
        "least": min(seconds),
        "most": max(seconds),
    }


def plain_attention(query, key, value, own, seen, sliding_window=None):
    """[1, tokens, heads, head size], one document after the other, by the formula. `own` are the last of those seen."""
    import torch

    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    outputs = []
    parts = query.split(own.lengths, dim=2), key.split(seen.lengths, dim=2), value.split(seen.lengths, dim=2)
    for queries, keys, values in zip(*parts):
        length, before = queries.shape[2], keys.shape[2] - queries.shape[2]
        visible = torch.ones(length, before + length, dtype=torch.bool, device=query.device).tril(before)
        if sliding_window:
            visible = visible.triu(before + 1 - sliding_window)
        scores = (queries @ keys.transpose(2, 3)) * query.shape[-1] ** -0.5
        outputs.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values)
    return torch.cat(outputs, 2).transpose(1, 2)


def results(function, states: list, own, seen, window: int | None) -> list:
    """What it computes, and the gradients of its sum with weights."""
    import torch

    output = function(*states, own, seen, sliding_window=window)
    weights = torch.linspace(0.5, 1.5, output.numel(), device=output.device).view_as(output)
    gradients = torch.autograd.grad((output * weights).sum(), states)
    return [result.double() for result in (output.detach(), *gradients)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--minutes", type=float, default=8.5, help="no run starts or goes on after these")
    parser.add_argument("--folder", type=Path, help="kept afterwards, with all output; by default a temporary one")
    parser.add_argument("--micro-batch", type=int, help="rows at once in timed runs; by default 4")
    parser.add_argument("--steps", type=int, help="of a timed run, the first 3 of which do not count; by default 15")
    parser.add_argument("--without", nargs="+", default=(), metavar="RUN", help="runs of these parts to leave out")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if missing := missing_libraries():
        print(f"missing here: {', '.join(missing)}; train.py needs them", file=sys.stderr)
        return 2
    import accelerate
    import torch
    import transformers

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if name == "CPU" and not args.tiny:
        parser.error("no GPU is here; --tiny runs on a CPU")
    versions = (
        f"{name}, {sys.platform}, Python {sys.version.split()[0]}, torch {torch.__version__}, accelerate "
        f"{accelerate.__version__}, transformers {transformers.__version__}"
    )
    if importlib.util.find_spec("trl"):
        versions += f", trl {importlib.metadata.version('trl')}"
    print(versions, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        size = TINY if args.tiny else FULL
        size = replace(size, micro_batch=args.micro_batch or size.micro_batch, steps=args.steps or size.steps)
        bench = Bench(folder.resolve(), size, args.minutes)
        bench.note("machine", versions=versions, date=time.strftime("%Y-%m-%d"), commit=commit_of(ROOT))
        parts = sorted(args.part, key=lambda part: part not in UNTIMED)
        bench.lacking |= dict.fromkeys(args.without, "to be asked for")
        bench.start(parts)
        for part in parts:
            if part not in UNTIMED:
                bench.release()
            getattr(bench, part)()
        bench.table()
    for what in bench.left_out:
        print(f"Left out: {what}")
    for what in bench.failed:
        print(f"FAILED: {what}")
    return int(bool(bench.failed))


if __name__ == "__main__":
    sys.exit(main())
