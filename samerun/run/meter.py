"""Time, throughput, MFU with the peak FLOP/s of devices; profiles."""

import atexit
import itertools
import re
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from samerun.config import Perf
from samerun.errors import is_main_process, say

TRAINING = ("data", "micro_steps", "optimizer")  # The phases whose time counts in tokens per second.

# Dense peak TFLOP/s by device and precision ("no" is float32), from the vendors' datasheets, without sparsity.
PEAK_TFLOPS = {
    "H100 80GB HBM3": {"fp8": 1979, "bf16": 989, "fp16": 989, "no": 67},
    "H200": {"fp8": 1979, "bf16": 989, "fp16": 989, "no": 67},
    "B200": {"fp8": 4500, "bf16": 2250, "fp16": 2250, "no": 75},
    "A100": {"bf16": 312, "fp16": 312, "no": 19.5},
    "L40S": {"fp8": 733, "bf16": 362, "fp16": 362, "no": 91.6},
    "L4": {"fp8": 242, "bf16": 121, "fp16": 121, "no": 30.3},
    "T4": {"fp16": 65, "no": 8.1},
    "V100-SXM2": {"fp16": 125, "no": 15.7},
    "V100-PCIE": {"fp16": 112, "no": 14},
}


def peak_flops(device: torch.device, precision: str, config: Perf) -> float | None:
    """Peak FLOP/s of one device in the precision of this run, None where it is not known."""
    tflops = config.peak_tflops
    if tflops is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        is_variant = re.search(r"\b(MIG|NVL)\b", name)  # A part of the device, or a slower one.
        for known, peaks in PEAK_TFLOPS.items():
            if re.search(rf"\b{known}\b", name) and not is_variant:
                tflops = peaks.get(precision)
    return tflops * 1e12 if tflops else None


class Meter:
    """Books every second of the launch to exactly one phase.

    The first step, which compiles and fills memory pools, is booked to warmup. Rates are those of a window between two
    log lines: there the host reads a value, so that all the work it has queued on a GPU is inside the window.
    """

    def __init__(self, clock=time.perf_counter, started: float | None = None):
        self.clock = clock
        self.phase = "startup"
        self.since = clock() if started is None else started
        self.warm = False  # Whether the first step is over.
        self.seconds = Counter()  # By phase.
        self.counts = Counter()  # Steps, rows and tokens after the first step.
        self.tokens = 0  # With those of the first step.
        self.seconds_at_window, self.counts_at_window = Counter(), Counter()
        self.event = None  # On a GPU, a function that records an event in its stream.
        self.events = []  # Pairs of a phase and the event at its begin.

    def watch(self, device: torch.device) -> None:
        """Take the times of a GPU by events in its stream: the host does not wait for what it computes."""
        if device.type == "cuda":
            self.event = lambda: torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def enter(self, phase: str) -> None:
        """End the current phase, book its time, and begin another."""
        now = self.clock()
        is_warmup = self.phase in TRAINING and not self.warm
        self.seconds["warmup" if is_warmup else self.phase] += now - self.since
        self.phase, self.since = phase, now
        if self.event and self.warm:
            self.events.append((phase, self.event()))

    def count(self, counts: dict[str, int]) -> None:
        """Note a complete step, with its rows and tokens."""
        self.enter(self.phase)
        if self.warm:
            self.counts.update(counts, steps=1)  # A Counter adds.
        self.tokens += counts["tokens"]
        self.warm = True

    def rates(self, num_processes: int, flops: float, peak: float | None) -> dict[str, float | None]:
        """The perf/ metrics since the last call. They are None if there was no whole step in between."""
        self.enter(self.phase)
        seconds = self.seconds - self.seconds_at_window
        count = self.counts - self.counts_at_window
        busy = sum(seconds[phase] for phase in TRAINING)
        if self.event:
            self.divide_by_device(seconds, busy)
        self.seconds_at_window, self.counts_at_window = self.seconds.copy(), self.counts.copy()

        def ratio(amount: float, per: float) -> float | None:
            return amount / per if count["steps"] and per > 0 else None

        flops_possible = busy * num_processes * (peak or 0)
        rates = {
            "tokens_per_second": ratio(count["tokens"], busy),
            "tokens_per_second_per_device": ratio(count["tokens"], busy * num_processes),
            "micro_step_tokens_per_second_per_device": ratio(count["tokens"], seconds["micro_steps"] * num_processes),
            "real_tokens_per_second": ratio(count["real_tokens"], busy),
            "rows_per_second": ratio(count["rows"], busy),
            "step_seconds": ratio(busy, count["steps"]),
            "data_seconds": ratio(seconds["data"], count["steps"]),
            "mfu": ratio(count["real_tokens"] * flops, flops_possible),  # Padding is no useful work.
        }
        return {f"perf/{name}": rate for name, rate in rates.items()}

    def seconds_left(self, rows: int) -> float | None:
        """How long the steps of so many rows will take, with all that has come between steps so far. None before the
        second step."""
        seconds = sum(self.seconds.values()) - self.seconds["startup"] - self.seconds["warmup"]
        return rows * seconds / self.counts["rows"] if self.counts["steps"] else None

    def divide_by_device(self, seconds: Counter, busy: float) -> None:
        """Divide the training time of the window among its phases as the device did.

        The host only queues the work and waits for all of it in a single phase, so that it knows nothing but the sum.
        """
        device = Counter()
        for (phase, begin), (_, end) in itertools.pairwise(self.events):
            end.synchronize()
            if phase in TRAINING:
                device[phase] += begin.elapsed_time(end)
        self.events = self.events[-1:]
        if not device.total():
            return
        for phase in TRAINING:
            seconds[phase] = busy * device[phase] / device.total()
            self.seconds[phase] = self.seconds_at_window[phase] + seconds[phase]

    def summary(self) -> dict[str, float]:
        """The seconds of all phases, which add up to the wall clock, and the tokens per second of the launch."""
        self.enter(self.phase)
        wall = sum(self.seconds.values())
        busy = sum(self.seconds[phase] for phase in TRAINING)
        summary = {f"summary/{phase}_seconds": seconds for phase, seconds in self.seconds.items()}
        summary["summary/wall_seconds"] = wall
        summary["summary/tokens_per_second"] = self.counts["tokens"] / busy if self.counts["steps"] else None
        summary["summary/goodput_tokens_per_second"] = self.tokens / wall
        return summary


class Profiler:
    """Profiles the steps of perf.profile_steps on the main process, unless the launch begins in their middle."""

    def __init__(self, steps: list[int] | None, folder: Path, device: torch.device):
        self.first, self.last = sorted(steps) if steps and is_main_process() else (0, 0)
        self.folder = folder
        self.gpu = device.type == "cuda"
        self.profiler = None

    def after_step(self, step: int) -> None:
        if step == self.first - 1:
            if self.gpu:
                torch.cuda.memory._record_memory_history()
            self.profiler = torch.profiler.profile()
            self.profiler.start()
            atexit.register(self.stop)  # A process that ends while it is profiled crashes.
        elif step == self.last:
            self.stop()

    def stop(self) -> None:
        """Write what there is so far."""
        if self.profiler is None:
            return
        self.profiler.stop()
        self.profiler.export_chrome_trace(str(self.folder / "profile.json.gz"))
        self.profiler = None
        hint = ""
        if self.gpu:
            torch.cuda.memory._dump_snapshot(self.folder / "memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
            hint = "; memory.pickle: docs.pytorch.org/memory_viz"
        say(f"Open {self.folder}/profile.json.gz in ui.perfetto.dev{hint}")


def peak_memory(device: torch.device) -> int:
    """The most bytes so far that were in use on the GPU or, without one, by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
