"""Is train.py right on this GPU, and how fast? Prints a table in Markdown.

    python tests/benchmarks/gpu.py [--part PART ...] [--minutes 8.5] [--folder FOLDER] [--tiny]

check     losses of a small model on the GPU, in float32 and bf16, split otherwise, compiled, against those on the CPU
speed     configs/pretrain_1b.yaml from scratch on generated tokens, rows of 4,096, bf16: with and without compile,
          gradient checkpointing and chunked loss
auto      the same with both, and the largest micro-batch that batch.max_micro_batch_size: auto finds
float8    four layers as wide as those of Llama 3.1 8B, compiled, in bf16 and in float8 (needs torchao)
overhead  the compiled run's step time against that of a bare torch loop on the same model and tokens

It runs the real command with the versions that are installed, without any network, and reads metrics.jsonl; timed runs
are killed after the steps they are for, before they would save. What does not fit into the minutes is left out, and
named. Exit status 1 if a check fails or, on a GPU whose peak is known, if MFU is below 50 % with compile, the overhead
above 1 %, or float8 less than 1.25 times as fast; 2 if a library is missing. --tiny shrinks everything, so that it also
runs on a CPU, where it shows no speed.
"""

import argparse
import ast
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

PARTS = "check", "speed", "auto", "float8", "overhead"
SKIPPED_STEPS = 3  # At the start of a run: compilation, memory pools.
WORST = {"no": 1e-4, "bf16": 5e-3}  # Largest relative difference of a loss from the CPU's, by precision.


def missing_libraries() -> list[str]:
    """What train.py and this file import and this Python does not have."""
    tree = ast.parse((ROOT / "train.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in names} | {"psutil"}
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
    architecture: dict  # Laid over that of configs/pretrain_1b.yaml.


FULL = Size(4096, 16, 4, 64, 15, 49_152, {})
TINY = Size(
    64,
    8,
    2,
    16,
    9,
    384,
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
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

    def train(self, name: str, config: Path, *overrides, precision: str = "bf16", steps: int | None = None, env=None):
        """The metrics of one `accelerate launch`: to its end, or killed once it has logged so many steps. None, and a
        note, if the time is up before."""
        from helpers import kill_tree

        run = self.folder / name.replace(", ", "-").replace(" ", "-")
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--num_processes",
            "1",
            "--num_machines",
            "1",
            "--dynamo_backend",
            "no",
            "--mixed_precision",
            precision,
            *(("--fp8_backend", "ao") if precision == "fp8" else ()),
            ROOT / "train.py",
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

    # check ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        from helpers import VOCABULARY, make_rows, write_config, write_rows

        folder, steps = self.folder / "check", 20
        folder.mkdir()
        shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
        config = write_config(
            folder,
            {
                "run": {"max_steps": steps, "log_every": 1, "eval_every": 0, "save_every": 0},
                "batch": {"global_batch_size": 10, "max_micro_batch_size": 10},
                # Documents of many lengths share rows, so that masks and positions are checked, too.
                "data": {
                    "path": str(write_rows(folder / "rows", make_rows([3 + 7 * i % 300 for i in range(200)]))),
                    "format": "tokens",
                    "sequence_length": 128,
                },
                "model": {"architecture": {"model_type": "llama", "vocab_size": VOCABULARY, **shape}},
                "optim": {"learning_rate": 1e-3, "warmup_steps": 5, "adam_eps": 1e-5},
            },
        )
        cases = {
            "CPU": ("no", (), {"CUDA_VISIBLE_DEVICES": ""}),
            "float32": ("no", (), {}),
            "float32, 3 rows at a time": ("no", ("--batch.max_micro_batch_size", 3), {}),
            "bf16": ("bf16", (), {}),
            "bf16, compile": ("bf16", COMPILE, {}),
            "bf16, checkpointing": ("bf16", CHECKPOINTING, {}),
        }
        losses = {}
        for name, (precision, overrides, env) in cases.items():
            if lines := self.train(f"check {name}", config, *overrides, precision=precision, env=env):
                losses[name] = [line["train/loss"] for line in lines if "train/loss" in line]
        if "CPU" not in losses:
            return
        truth = losses.pop("CPU")
        print(f"\n| {steps} steps of a small model | last loss | largest relative difference from the CPU's | bound |")
        print(f"|---|---|---|---|\n| CPU, float32 | {truth[-1]:.4f} | | |")
        for name, values in losses.items():
            worst = max(abs(a - b) / b for a, b in zip(values, truth))
            bound = WORST[cases[name][0]]
            print(f"| {name} | {values[-1]:.4f} | {worst:.1e} | {bound:.0e} |", flush=True)
            if not worst <= bound or len(values) != steps:  # So that nan fails, too.
                self.failed.append(f"check {name}: {worst:.1e}")

    # speed, auto, overhead ------------------------------------------------------------------------------------

    def tokens(self) -> Path:
        """Rows of random tokens, each a document: no masks, as in most pretraining benchmarks."""
        import datasets
        import numpy as np

        folder, size = self.folder / "tokens", self.size
        if not folder.exists():
            rows = np.random.default_rng(0).integers(0, size.vocab, (size.most * 4, size.length), dtype=np.int32)
            datasets.Dataset.from_dict({"input_ids": list(rows)}).save_to_disk(folder)
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
        return self.runs[name]

    def speed(self) -> None:
        for name, settings in SPEED.items():
            self.measure(name, self.size.rows, self.size.micro_batch, *settings)

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
        import yaml

        architecture = yaml.safe_load((ROOT / "configs" / "pretrain_1b.yaml").read_text())["model"]["architecture"]
        given = {
            "architecture": architecture | size.architecture | {"vocab_size": size.vocab},
            "rows": size.rows,
            "micro_batch": size.micro_batch,
            "length": size.length,
            "steps": size.steps,
            "tokens": str(self.tokens()),
        }
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--bare", json.dumps(given)],
                check=True,
                text=True,
                stdout=subprocess.PIPE,
                env=self.environment,
                timeout=max(1, self.deadline - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            return self.left_out.append("overhead")
        except subprocess.CalledProcessError as error:
            return self.failed.append(f"bare loop: exit status {error.returncode}")
        bare = json.loads(done.stdout.splitlines()[-1])
        seconds, over = median(bare["seconds"]), ours["seconds"] / median(bare["seconds"]) - 1
        print(f"\n| compiled, {size.rows} rows of {size.length:,} per step | median step, s | tokens/s |")
        print("|---|---|---|")
        print(f"| bare torch loop | {seconds:.4f} | {size.rows * size.length / seconds:,.0f} |")
        print(f"| train.py | {ours['seconds']:.4f} | {size.rows * size.length / ours['seconds']:,.0f} |")
        print(f"\nOverhead of train.py: {over:+.2%}", flush=True)
        if ours["mfu"] and over > 0.01:
            self.failed.append(f"overhead {over:.2%}, goal 1 %")

    def table(self) -> None:
        """The variants that were measured."""
        seen = {name: run for name, run in self.runs.items() if run}
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
        for key in ("tokens_per_second", "mfu")
    }
    return lines[0] | {
        "rate": of["tokens_per_second"],
        "mfu": of["mfu"],
        "memory": steps[-1]["perf/peak_memory_gib"],
        "seconds": median(seconds),
        "least": min(seconds),
        "most": max(seconds),
    }


def bare_loop(architecture: dict, tokens: str, rows: int, micro_batch: int, length: int, steps: int) -> None:
    """The same work without train.py or Accelerate: bf16 autocast, compiled layers, clipping, fused AdamW."""
    import datasets
    import numpy as np
    import torch
    import torch.nn.functional as F
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.from_numpy(np.array(datasets.load_from_disk(tokens).with_format("numpy")["input_ids"], np.int64))
    config = transformers.AutoConfig.for_model(**architecture, max_position_embeddings=length, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device).train()
    for layer in model.model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds = []
    for step in range(steps):
        began = time.perf_counter()
        at = step * rows % (len(ids) - rows + 1)
        for start in range(at, at + rows, micro_batch):
            batch = ids[start : min(start + micro_batch, at + rows)]
            targets = torch.cat([batch[:, 1:], torch.full_like(batch[:, :1], -100)], 1).to(device)
            with torch.autocast(device, torch.bfloat16):
                logits = model(input_ids=batch.to(device), use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / (rows * (length - 1))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # Waits for the device, as reading the loss for a log line does.
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds[SKIPPED_STEPS:]}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--minutes", type=float, default=8.5, help="no run starts or goes on after these")
    parser.add_argument("--folder", type=Path, help="kept afterwards, with all output; by default a temporary one")
    parser.add_argument("--micro-batch", type=int, help="rows at once in speed and overhead; by default 4")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--bare", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if missing := missing_libraries():
        print(f"missing here: {', '.join(missing)}; train.py needs them", file=sys.stderr)
        return 2
    if args.bare:
        return bare_loop(**args.bare) or 0
    import accelerate
    import torch
    import transformers

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if name == "CPU" and not args.tiny:
        parser.error("no GPU is here; --tiny runs on a CPU")
    print(
        f"{name}, {sys.platform}, Python {sys.version.split()[0]}, torch {torch.__version__}, accelerate "
        f"{accelerate.__version__}, transformers {transformers.__version__}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        size = TINY if args.tiny else FULL
        size = replace(size, micro_batch=args.micro_batch or size.micro_batch)
        bench = Bench(folder.resolve(), size, args.minutes)
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
