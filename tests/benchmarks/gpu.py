"""Is train.py right on this GPU, and how fast? Prints a table in Markdown.

    python tests/benchmarks/gpu.py [--part PART ...] [--minutes 8.5] [--folder FOLDER] [--tiny]

attention  torch's flash attention for documents, forward and backward, against one document after the other in float64
check      losses of a small model on the GPU, in float32 and bf16, split otherwise, compiled, against those on the CPU
resume     the same run killed by SIGKILL and continued
host       how often the host waits for the GPU in a step without a log line, and copies memory that is not pinned
launchers  each file of accelerate_configs/ as it is, with one process
speed      configs/pretrain_1b.yaml from scratch on generated tokens, rows of 4,096, bf16: with and without compile,
           gradient checkpointing and chunked loss
memory     the peak of a step's tensors, with and without gradient checkpointing, to what --plan calculates
events     the compiled run's times with a log line every fifth step, when CUDA events divide them
packed     the same model on documents of log-normal lengths: packed, and each in a row of its own
auto       with compile and checkpointing, the largest micro-batch that batch.max_micro_batch_size: auto finds
float8     four layers as wide as those of Llama 3.1 8B, compiled, in bf16 and in float8 (needs torchao)
overhead   the compiled run's step time against that of a bare torch loop on the same model and tokens
others     transformers' Trainer, and TRL with its packing if it is installed, on the same model and documents
save       how long a save of four layers holds up training

It runs the real command with the versions that are installed, without any network, and reads metrics.jsonl; timed runs
are killed after the steps they are for, before they would save. What does not fit into the minutes is left out, and
named; give --part for the next slice. FOLDER/results.jsonl gets one line for each case. Exit status 1 if a check fails
or, on a GPU whose peak is known, if a goal is missed: MFU of 50 % with compile, memory within 10 % of the plan, an
overhead of 1 %, float8 1.25 times as fast as bf16, packed rows as fast as full ones, and faster than Trainer and TRL; 2
if a library is missing. --tiny shrinks everything, so that it also runs on a CPU, where it shows no speed.
"""

import argparse
import ast
import gzip
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

CONTENDERS = ROOT / "tests" / "benchmarks" / "gpu_contenders.py"
PARTS = (
    *("attention", "check", "resume", "host", "launchers", "speed", "memory", "events"),
    *("packed", "auto", "float8", "overhead", "others", "save"),
)
SKIPPED_STEPS = 3  # At the start of a run: compilation, memory pools.
WORST = {"no": 1e-4, "bf16": 5e-3}  # Largest relative difference of a loss from the CPU's, by precision.
LAUNCHERS = "single", "fp8", "multi_gpu", "fsdp2"  # The others need several processes.
SMALL_STEPS = 20


def missing_libraries() -> list[str]:
    """What train.py imports in any case, and this file, and this Python does not have."""
    files = [ROOT / "train.py", *(ROOT / "samerun").rglob("*.py")]
    statements = [node for file in files for node in ast.parse(file.read_text()).body]
    names = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in statements if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in names} | {"psutil"} - {"samerun"}
    return sorted(name for name in roots if importlib.util.find_spec(name) is None)


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
WIDE = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
COMPILE, CHECKPOINTING = ("--model.compile", "regional"), ("--model.gradient_checkpointing", "true")
SPEED = {
    "eager": (),
    "compile": COMPILE,
    "compile full": ("--model.compile", "full"),
    "checkpointing": CHECKPOINTING,
    "compile, checkpointing": (*COMPILE, *CHECKPOINTING),
    "compile, chunked loss": (*COMPILE, "--model.chunked_loss", "true"),
}


class Bench:
    """The folder, the size and the deadline of this invocation."""

    def __init__(self, folder: Path, size: Size, minutes: float):
        self.folder, self.size, self.deadline = folder, size, time.monotonic() + 60 * minutes
        self.left_out, self.failed, self.runs = [], [], {}
        self.environment = os.environ | {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}

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
        script: Path = ROOT / "train.py",
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
            "--num_processes",
            "1",
            *(() if launcher else ("--mixed_precision", precision)),
            *(("--fp8_backend", "ao") if precision == "fp8" and not launcher else ()),
            script,
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
        from samerun.model.attention import flash_attention, piece_of

        device = "cuda" if torch.cuda.is_available() else "cpu"
        kernel = flash_attention if device == "cuda" else plain_attention
        lengths = self.size.documents
        ends = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        documents = Documents(lengths, max(lengths), ends)
        print("\n| flash attention of documents | largest error | of plain attention in bf16 |\n|---|---|---|")
        tokens = sum(lengths)
        piece = piece_of(documents, tokens // 5, tokens * 3 // 4)  # What a rank has of a row with context parallelism.
        whole, part = (documents, documents), (piece.own, piece.seen)
        cases = [(64, 8, None, whole), (128, 2, None, whole), (128, 2, 100, whole), (256, 4, None, whole)]
        for head, key_heads, window, (own, seen) in [*cases, (128, 2, None, part), (128, 2, 100, part)]:
            torch.manual_seed(0)
            counts = (8, own), (key_heads, seen), (key_heads, seen)
            shapes = [(1, heads, sum(of.lengths), head) for heads, of in counts]
            states = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
            exact = [one.detach().double().requires_grad_() for one in states]
            truth = results(plain_attention, exact, own, seen, window)
            errors = {}
            for name, function in ("flash", kernel), ("plain", plain_attention):
                pairs = zip(results(function, states, own, seen, window), truth)
                errors[name] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
            case = f"attention, heads of {head}, {8 // key_heads} to a key, window {window}"
            if own is not seen:
                case += ", a piece of a row"
            print(f"| {case} | {errors['flash']:.1e} | {errors['plain']:.1e} |", flush=True)
            self.note(case, **errors)
            if not errors["flash"] <= 2 * errors["plain"]:
                self.failed.append(f"{case}: {errors['flash']:.1e}")

    def small_config(self) -> Path:
        """A small model, and documents of many lengths that share rows, so that positions are checked, too."""
        from helpers import VOCABULARY, make_rows, write_config, write_rows

        folder = self.folder / "small"
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
                    "path": str(write_rows(folder / "rows", make_rows([3 + 7 * i % 300 for i in range(200)]))),
                    "format": "tokens",
                    "sequence_length": 128,
                },
                "model": {"architecture": {"model_type": "llama", "vocab_size": VOCABULARY, **shape}},
                "optim": {"learning_rate": 1e-3, "warmup_steps": 5, "adam_eps": 1e-5},
            },
        )

    def losses(self, name: str, *overrides, **how) -> list[float] | None:
        """Of the small model."""
        if name not in self.runs:
            lines = self.train(name, self.small_config(), *overrides, **how)
            self.runs[name] = lines and [line["train/loss"] for line in lines if "train/loss" in line]
        return self.runs[name]

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
        truth = self.losses("check CPU", precision="no", env={"CUDA_VISIBLE_DEVICES": ""})
        cases = {
            "check float32": ("no", ()),
            "check float32, 3 rows at a time": ("no", ("--batch.max_micro_batch_size", 3)),
            "check bf16": ("bf16", ()),
            "check bf16, compile": ("bf16", COMPILE),
            "check bf16, checkpointing": ("bf16", CHECKPOINTING),
            "check bf16, chunked loss": ("bf16", ("--model.chunked_loss", "true")),
        }
        print(f"\n| {SMALL_STEPS} steps of a small model | last loss | difference from the CPU's | bound |")
        print("|---|---|---|---|")
        for name, (precision, overrides) in cases.items():
            self.compare(name, self.losses(name, *overrides, precision=precision), truth, WORST[precision])

    def resume(self) -> None:
        whole = self.losses("check bf16")
        often, name = ("--run.save_every", 5), "resume"
        if self.train(name, self.small_config(), *often, steps=SMALL_STEPS * 3 // 5):
            print("\n| | last loss | difference from the run that was not killed | bound |\n|---|---|---|---|")
            self.compare("killed and continued", self.losses(name, *often), whole, 1e-3)

    def host(self) -> None:
        """Of steps without a log line. The profile tells from where the GPU has copied."""
        settings = "--run.log_every", 1000, "--perf.profile_steps", "[12, 15]"
        if not self.train("host", self.small_config(), *settings, script=CONTENDERS):
            return
        log = (self.folder / "host.log").read_text().splitlines()
        [counted] = [json.loads(line) for line in log if line.startswith('{"waits"')]
        waits = counted["waits"][8:12]  # Not those of the profiler.
        with gzip.open(self.folder / "host" / "profile.json.gz") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        copies = {kind: sum(f"HtoD ({kind}" in name for name in names) for kind in ("Pinned", "Pageable")}
        print(f"\nThe host waits {max(waits)} times in a step; copies to the GPU in 4 steps: {copies}", flush=True)
        self.note("host", waits=waits, where=counted["where"], copies=copies)
        if max(waits) > 0 or copies["Pageable"]:
            self.failed.append(f"host: waits {waits}, {copies}")

    def launchers(self) -> None:
        """The losses under each file: in bf16 or float8, as the file says."""
        truth = self.losses("check bf16")
        print("\n| launcher file | last loss | difference from bf16 without one | bound |\n|---|---|---|---|")
        for name in LAUNCHERS:
            if name == "fp8" and importlib.util.find_spec("torchao") is None:
                self.left_out.append("fp8.yaml, which needs torchao")
                continue
            losses = self.losses(name, launcher=ROOT / "accelerate_configs" / f"{name}.yaml")
            self.compare(f"{name}.yaml", losses, truth, 2e-2)

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

    def overrides(self, rows: int, micro_batch: int | str) -> list:
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
            "data.path": self.tokens(),
            "data.name": "null",
            "data.format": "tokens",
            "data.tokenizer": "bytes",
            "data.sequence_length": size.length,
            "data.packing": "none",
            "data.eval_fraction": 0.0,
            "model.architecture.vocab_size": size.vocab,
            "eval.prompts": "[]",
        } | {f"model.architecture.{name}": value for name, value in size.architecture.items()}
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    def measure(self, name: str, rows: int, micro_batch: int | str, *settings, precision: str = "bf16") -> dict | None:
        """What a variant reached, from its own metrics."""
        if name not in self.runs:
            config = ROOT / "configs" / "pretrain_1b.yaml"
            lines = self.train(
                name, config, *self.overrides(rows, micro_batch), *settings, precision=precision, steps=self.size.steps
            )
            self.runs[name] = lines and summarize(lines)
            if lines:
                self.note(name, **self.runs[name])
        return self.runs[name]

    def speed(self) -> None:
        for name, settings in SPEED.items():
            self.measure(name, self.size.rows, self.size.micro_batch, *settings)

    def memory(self) -> None:
        """Without compile, whose code holds less than the plan knows of."""
        for name in "eager", "checkpointing":
            one = self.measure(name, self.size.rows, self.size.micro_batch, *SPEED[name])
            planned = one and self.planned_memory(*SPEED[name])
            if planned:
                ratio = planned / one["memory"]
                print(f"\n{name}: the plan's {planned:.3f} GiB, to what was measured: {ratio:.2f}", flush=True)
                self.note(f"memory, {name}", planned=planned, measured=one["memory"])
                if one["mfu"] and abs(ratio - 1) > 0.1:
                    self.failed.append(f"memory, {name}: the plan is {ratio:.2f} times what was measured")

    def planned_memory(self, *settings) -> float | None:
        """GiB of one device in bf16. None, and a note, if the plan does not know."""
        config, overrides = ROOT / "configs" / "pretrain_1b.yaml", self.overrides(self.size.rows, self.size.micro_batch)
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
        often = self.measure("compile", self.size.rows, self.size.micro_batch, *COMPILE)
        name = "compile, a log line every fifth step"
        seldom = self.measure(name, self.size.rows, self.size.micro_batch, *COMPILE, "--run.log_every", 5)
        if not often or not seldom:
            return
        for key in "rate", "micro_step_rate":
            ratio = seldom[key] / often[key]
            print(f"\n{key} with a log line every fifth step, to one in each: {ratio:.3f}", flush=True)
            if often["mfu"] and not 0.95 <= ratio <= 1.1:
                self.failed.append(f"events: {key} {ratio:.3f}")

    def packed(self) -> None:
        """Real tokens per second, to those of rows that are full."""
        documents = "--data.path", self.tokens(documents=True)
        full = self.measure("compile", self.size.rows, self.size.micro_batch, *COMPILE)
        for packing in "concat", "none":
            name = f"compile, documents, packing {packing}"
            settings = *COMPILE, *documents, "--data.packing", packing
            one = self.measure(name, self.size.rows, self.size.micro_batch, *settings)
            if full and one:
                ratio = one["real_rate"] / full["real_rate"]
                print(f"\nReal tokens per second with packing {packing}, to full rows: {ratio:.3f}", flush=True)
                if packing == "concat" and full["mfu"] and ratio < 0.98:
                    self.failed.append(f"packed rows {ratio:.3f} times as fast as full ones")

    def auto(self) -> None:
        self.measure("compile, checkpointing, auto", self.size.most, "auto", *SPEED["compile, checkpointing"])

    def float8(self) -> None:
        import torch

        if importlib.util.find_spec("torchao") is None or not torch.cuda.is_available():
            return self.left_out.append("float8, which needs torchao and a GPU")
        wide = [word for name, value in WIDE.items() for word in (f"--model.architecture.{name}", value)]
        runs = [
            self.measure(
                f"4 layers of 8B, compile, {precision}",
                self.size.rows,
                self.size.micro_batch,
                *COMPILE,
                *wide,
                precision=precision,
            )
            for precision in ("bf16", "fp8")
        ]
        if all(runs):
            ratio = runs[1]["rate"] / runs[0]["rate"]
            print(f"\nfloat8 is {ratio:.2f} times as fast as bf16", flush=True)
            if ratio < 1.25:
                self.failed.append(f"float8 {ratio:.2f} times bf16, goal 1.25")

    def overhead(self) -> None:
        size, ours = self.size, self.measure("compile", self.size.rows, self.size.micro_batch, *COMPILE)
        if not ours or time.monotonic() > self.deadline:
            return self.left_out.append("overhead")
        bare = self.contender("bare", self.tokens())
        if not bare:
            return
        seconds, over = median(bare["seconds"]), ours["seconds"] / median(bare["seconds"]) - 1
        print(f"\n| compiled, {size.rows} rows of {size.length:,} per step | median step, s | tokens/s |")
        print("|---|---|---|")
        print(f"| bare torch loop | {seconds:.4f} | {size.rows * size.length / seconds:,.0f} |")
        print(f"| train.py | {ours['seconds']:.4f} | {size.rows * size.length / ours['seconds']:,.0f} |")
        print(f"\nOverhead of train.py: {over:+.2%}", flush=True)
        if ours["mfu"] and over > 0.01:
            self.failed.append(f"overhead {over:.2%}, goal 1 %")

    def contender(self, name: str, tokens: Path) -> dict | None:
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
            "tokens": str(tokens),
        }
        try:
            done = subprocess.run(
                [sys.executable, CONTENDERS, name, json.dumps(given)],
                text=True,
                stdout=subprocess.PIPE,
                env=self.environment,
                timeout=max(1, self.deadline - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            return self.left_out.append(name)
        if done.returncode:
            return self.failed.append(f"{name}: exit status {done.returncode}")
        steps = json.loads(done.stdout.splitlines()[-1])
        steps = {key: values[SKIPPED_STEPS:] for key, values in steps.items()}
        self.note(name, **steps, real_rate=sum(steps["tokens"]) / sum(steps["seconds"]))
        return steps

    def others(self) -> None:
        """Real tokens per second on documents of many lengths: padded as Trainer does, packed by TRL, and ours."""
        self.packed()
        ours = {packing: self.runs[f"compile, documents, packing {packing}"] for packing in ("none", "concat")}
        names = {"Trainer": "none", "TRL": "concat"}
        if importlib.util.find_spec("trl") is None:
            self.left_out.append("TRL, which is not installed")
            del names["TRL"]
        print("\n| documents | real tokens/s | of train.py | train.py is faster by |\n|---|---|---|---|")
        for name, packing in names.items():
            theirs = self.contender(name, self.tokens(documents=True))
            if theirs and ours[packing]:
                rate, own = sum(theirs["tokens"]) / sum(theirs["seconds"]), ours[packing]["real_rate"]
                print(f"| {name} | {rate:,.0f} | {own:,.0f} | {own / rate:.2f} |", flush=True)
                if ours[packing]["mfu"] and own < rate:
                    self.failed.append(f"{name} is {rate / own:.2f} times as fast")

    def save(self) -> None:
        """Seconds that training waits for a save, beside those of a step."""
        settings = "--run.save_every", 5, "--run.keep_checkpoints", 1, "--run.max_steps", 15, "--optim.warmup_steps", 0
        few = "--model.architecture.num_hidden_layers", min(4, self.size.architecture.get("num_hidden_layers", 4))
        config, rows = ROOT / "configs" / "pretrain_1b.yaml", self.size.rows
        lines = self.train("save", config, *self.overrides(rows, self.size.micro_batch), *few, *settings)
        if lines:
            waited, step = lines[-1]["summary/checkpoint_seconds"], summarize(lines)["seconds"]
            print(f"\n3 saves of 4 layers: training waited {waited:.2f} s, a step takes {step:.3f} s", flush=True)
            self.note("save", waited=waited, step=step)

    def table(self) -> None:
        """The variants that were measured."""
        seen = {name: run for name, run in self.runs.items() if isinstance(run, dict)}
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
    parser.add_argument("--micro-batch", type=int, help="rows at once in speed and overhead; by default 4")
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
    print(versions, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        size = TINY if args.tiny else FULL
        size = replace(size, micro_batch=args.micro_batch or size.micro_batch)
        bench = Bench(folder.resolve(), size, args.minutes)
        bench.note("machine", versions=versions)
        for part in (part for part in PARTS if part in args.part):
            getattr(bench, part)()
        bench.table()
    for what in bench.left_out:
        print(f"Left out: {what}")
    for what in bench.failed:
        print(f"FAILED: {what}")
    return int(bool(bench.failed))


if __name__ == "__main__":
    sys.exit(main())
