"""Does anything drift in a long run? 20,000 tiny steps with frequent saves, evaluations and samples.

    python tests/benchmarks/long_haul.py [--steps 20000] [--look-every 1] [--folder FOLDER]

The real command runs with its memory, file descriptors and threads watched from outside. Prints a table, and ends with
exit status 1 if memory or descriptors grow, or if the last thousand steps are more than 5 % slower than the first
thousand after the warm-up.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
from helpers import ROOT, VOCABULARY, Done, kill_tree, make_rows, write_config, write_rows

ROWS, LENGTH = 8, 32  # Of a step. What one step reads is 8 rows x 32 tokens x (input + target) x 8 bytes = 4 KiB.
BYTES_PER_STEP = ROWS * LENGTH * 2 * 8


@dataclass(frozen=True)
class Haul:
    """A finished run, and what was seen of its process between the warm-up and the last step."""

    done: Done
    warmup: int
    steps: np.ndarray  # The last step logged at the time of each look.
    rss: np.ndarray  # Resident memory in bytes.
    handles: np.ndarray  # Open file descriptors.
    threads: np.ndarray
    cpu_seconds: np.ndarray  # Since the start of the process: no other work on the machine shows in it.

    def slope(self) -> float:
        """Bytes of resident memory gained per step, by least squares."""
        return float(np.polyfit(self.steps, self.rss, 1)[0])

    def floors(self, counts: np.ndarray) -> tuple[int, int]:
        """The least of each half of the looks: what a save opens for a moment is in neither, a leak in the second."""
        half = len(counts) // 2
        return int(counts[:half].min()), int(counts[half:].min())

    def cpu_seconds_per_step(self, span: int = 1000) -> tuple[float, float]:
        """Processor time per step, saves and evaluations included, of the same two spans as step_seconds()."""
        edges = self.warmup, self.warmup + span, self.steps[-1] - span, self.steps[-1]
        times = np.interp(edges, self.steps, self.cpu_seconds)
        return (times[1] - times[0]) / span, (times[3] - times[2]) / span

    def step_seconds(self, span: int = 1000) -> tuple[np.ndarray, np.ndarray]:
        """perf/step_seconds of the log lines of the first so many steps after the warm-up, and of the last."""
        lines = [(line["step"], line["perf/step_seconds"]) for line in self.done.metrics if "perf/step_seconds" in line]
        steps, seconds = map(np.array, zip(*lines))
        first = (steps > self.warmup) & (steps <= self.warmup + span)
        return seconds[first], seconds[steps > steps[-1] - span]


def tiny_run(folder: Path, steps: int) -> dict:
    """A model of 6,808 parameters on 100 rows, with all that a run does in a while done often."""
    lengths = np.random.default_rng(0).integers(2, LENGTH + 1, 100).tolist()
    rows = write_rows(folder / "rows", make_rows(lengths))
    held_out = write_rows(folder / "held-out", make_rows([LENGTH] * 8))
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {
        "run": {"max_steps": steps, "log_every": 10, "eval_every": 20, "save_every": 20},
        "batch": {"global_batch_size": ROWS, "max_micro_batch_size": ROWS // 2},
        "data": {
            "path": str(rows),
            "format": "tokens",
            "tokenizer": "bytes",
            "packing": "none",
            "sequence_length": LENGTH,
            "eval_source": {"path": str(held_out)},
        },
        "model": {"architecture": {"model_type": "llama", "vocab_size": VOCABULARY, **shape}},
        "optim": {"schedule": "constant"},
        "eval": {"prompts": ["a"], "max_new_tokens": 2},
    }


def last_step(metrics: Path) -> int:
    """The step of the last whole line of metrics.jsonl, without reading all of it; 0 before there is one."""
    with contextlib.suppress(FileNotFoundError, IndexError, json.JSONDecodeError), open(metrics, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        return json.loads(file.read().splitlines()[-1])["step"]
    return 0


def haul(folder: Path, steps: int, warmup: int, look_every: float = 1.0, timeout: float = 3600, env=None) -> Haul:
    """Run `python train.py` for so many steps, looking at the process every so many seconds."""
    config, looks, deadline = write_config(folder, tiny_run(folder, steps)), [], time.monotonic() + timeout
    # Into a file: a pipe that nobody reads would stop the run once it is full.
    with open(folder / "output.txt", "w") as output:
        command = [sys.executable, ROOT / "train.py", "--config", config]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | (env or {}))
    try:
        seen = psutil.Process(process.pid)
        seen.cpu_affinity(seen.cpu_affinity()[-1:])  # Threads that wait for each other suffer most from other work.
        while process.poll() is None and time.monotonic() < deadline:
            step = last_step(folder / "run" / "metrics.jsonl")
            # The export and the curves after the last step are done once; they are no part of the loop.
            if warmup <= step < steps:
                with contextlib.suppress(psutil.Error), seen.oneshot():
                    times = seen.cpu_times()
                    looks.append((step, seen.memory_info().rss, seen.num_fds(), seen.num_threads(), sum(times[:2])))
            time.sleep(look_every)
    finally:
        kill_tree(process)
    text = (folder / "output.txt").read_text()
    assert process.wait() == 0, f"exit status {process.returncode}:\n{text[-5000:]}"
    return Haul(Done(0, text, folder / "run"), warmup, *np.array(looks).T)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--look-every", type=float, default=1.0, help="seconds")
    parser.add_argument("--folder", type=Path, help="kept afterwards; by default a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        offline = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        span = min(1000, args.steps // 4)  # That of the warm-up, too.
        seen = haul(folder, args.steps, span, args.look_every, env=offline)
        first, last = seen.step_seconds(span)
    slower, (cpu, cpu_later) = np.median(last) / np.median(first) - 1, seen.cpu_seconds_per_step(span)
    (handles, handles_later), (threads, threads_later) = seen.floors(seen.handles), seen.floors(seen.threads)
    mib = 2**20
    table = [  # What, first, later, bound, whether it holds.
        ("memory, MiB", f"{seen.rss[0] / mib:.1f}", f"{seen.rss[-1] / mib:.1f}", "", True),
        ("memory slope, bytes per step", "", f"{seen.slope():.1f}", "below 100", seen.slope() < 100),
        ("file descriptors", handles, handles_later, "equal", handles == handles_later),
        ("threads", threads, threads_later, "equal", threads == threads_later),
        ("step time, ms, median", *(f"{np.median(x) * 1e3:.2f}" for x in (first, last)), "within 5 %", slower < 0.05),
        ("  difference", "", f"{slower:+.1%}", "", True),
        # Where the step time drifts and these do not, it was other work on the machine.
        ("  its quickest tenth", *(f"{np.quantile(x, 0.1) * 1e3:.2f}" for x in (first, last)), "", True),
        ("processor time per step, ms", f"{cpu * 1e3:.2f}", f"{cpu_later * 1e3:.2f}", "", True),
    ]
    print(f"{args.steps:,} steps, {len(seen.rss):,} looks after step {seen.warmup:,}")
    for name, before, after, bound, good in table:
        print(f"{name:30}{before!s:>10}{after!s:>10}   {bound:12}{'' if good else 'BROKEN'}".rstrip())
    return 0 if all(good for *_, good in table) else 1


if __name__ == "__main__":
    sys.exit(main())
