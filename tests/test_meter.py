"""Time and throughput by a fake clock. Every duration is another power of two, so that a sum tells which are in it."""

import gzip
import json
import re
import time
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from helpers import launch, run, tiny_config

import train
from samerun.config import Perf
from samerun.data.batches import Prefetcher
from samerun.optim import Guard
from samerun.parallel import mesh
from samerun.parallel.mesh import Parallelism
from samerun.run import setup as setup_room
from samerun.run.logs import show
from samerun.run.meter import Meter, Profiler, peak_flops

TRAINING = "data", "micro_steps", "optimizer"
STEP = {"rows": 8, "tokens": 1024, "real_tokens": 768, "target_tokens": 500}


class Clock:
    """A meter's clock that moves only when told to."""

    def __init__(self, now=0.0):
        self.now = now
        self.meter = Meter(clock=lambda: self.now, started=now)

    def spend(self, **seconds):
        """Enter each phase in turn and stay for so long."""
        for phase, duration in seconds.items():
            self.meter.enter(phase)
            self.now += duration

    def step(self, data=1.0, micro_steps=1.0, optimizer=1.0, step=STEP):
        self.spend(data=data, micro_steps=micro_steps, optimizer=optimizer)
        self.meter.count(step)

    def rates(self, num_processes=1, flops_per_token=6.0, peak_flops=None):
        return {
            key.removeprefix("perf/"): value
            for key, value in self.meter.rates(num_processes, flops_per_token, peak_flops).items()
        }

    def seconds(self):
        return {key[8:-8]: value for key, value in self.meter.summary().items() if key.endswith("_seconds")}


def test_every_second_is_booked_to_exactly_one_phase():
    clock = Clock()
    clock.now += 1  # Starting up.
    clock.step(2, 4, 8)  # The first step of a launch is warmup.
    clock.spend(logging=16)
    clock.step(32, 64, 128)
    clock.spend(evaluation=256, sampling=512, checkpoint=1024)
    clock.step(2048, 4096, 8192)
    clock.spend(logging=16384)
    assert clock.seconds() == {
        "startup": 1,
        "warmup": 2 + 4 + 8,
        "data": 32 + 2048,
        "micro_steps": 64 + 4096,
        "optimizer": 128 + 8192,
        "evaluation": 256,
        "sampling": 512,
        "checkpoint": 1024,
        "logging": 16 + 16384,
        "wall": 32767,
    }
    # Two steps were timed; what the user gets and pays also has the first step and the rest of the wall clock in it.
    summary = clock.meter.summary()
    assert summary["summary/tokens_per_second"] == 2 * 1024 / (32 + 64 + 128 + 2048 + 4096 + 8192)
    assert summary["summary/goodput_tokens_per_second"] == 3 * 1024 / 32767


def test_parts_sum_to_the_wall_clock_at_any_moment():
    """Inside a phase, after rates() and summary(), for phases entered twice or for no time."""
    clock, rng = Clock(5.0), np.random.default_rng(0)
    for _ in range(200):
        clock.spend(**{rng.choice(["logging", "checkpoint", *TRAINING]): float(rng.integers(0, 9))})
        if rng.random() < 0.3:
            clock.meter.count(STEP)
        if rng.random() < 0.3:
            clock.rates()
        *parts, wall = clock.seconds().values()
        assert sum(parts) == wall == clock.now - 5.0


def test_time_before_main_is_no_startup_of_a_launch(tmp_path):
    """A program that imports train.py, such as a sweep, calls main() when it likes, and again."""
    began = time.perf_counter()
    done = run(tmp_path, tiny_config(tmp_path))
    assert 0 < done.metrics[-1]["summary/wall_seconds"] <= time.perf_counter() - began


def test_time_before_the_meter_existed_is_startup():
    """Importing the libraries takes seconds of the user's time."""
    meter = Meter(clock=lambda: 100.0, started=90.0)
    assert meter.summary()["summary/startup_seconds"] == meter.summary()["summary/wall_seconds"] == 10.0


def test_rates_of_a_window():
    """Two steps of 8 rows, 1,024 slots and 768 real tokens in 4 + 16 + 12 = 32 s on 4 devices."""
    clock = Clock()
    clock.step(999, 999, 999)
    clock.rates()
    clock.step(1, 6, 5)
    clock.step(3, 10, 7)
    assert clock.rates(num_processes=4, flops_per_token=1e9, peak_flops=48e9) == {
        "tokens_per_second": 2048 / 32,
        "tokens_per_second_per_device": 2048 / 32 / 4,
        "micro_step_tokens_per_second_per_device": 2048 / 16 / 4,  # XTuner's TGS: while the device computes.
        "real_tokens_per_second": 1536 / 32,
        "rows_per_second": 16 / 32,
        "step_seconds": 16.0,
        "data_seconds": 2.0,
        "mfu": 0.25,  # 1536 x 1e9 / 32 s = 48e9 FLOP/s, a quarter of 4 x 48e9: padding is no useful work.
    }


def test_mfu_is_unknown_where_the_peak_is():
    clock = Clock()
    clock.step()
    clock.step()
    assert clock.rates(peak_flops=None)["mfu"] is None


def test_windows_do_not_overlap():
    clock = Clock()
    clock.step()
    for seconds in 1.0, 4.0:
        clock.step(seconds, seconds, 2 * seconds)
        assert clock.rates()["tokens_per_second"] == 1024 / (4 * seconds)
    assert clock.meter.summary()["summary/tokens_per_second"] == 2 * 1024 / (4 + 16)


def test_a_window_without_a_step_has_no_rates():
    clock = Clock()
    assert set(clock.rates(peak_flops=1e12).values()) == {None}  # Before any step.
    clock.step()
    assert set(clock.rates(peak_flops=1e12).values()) == {None}  # Only the warmup step.
    clock.spend(data=1)  # And less than another one.
    assert clock.meter.summary()["summary/tokens_per_second"] is None
    clock.step()
    assert None not in clock.rates(peak_flops=1e12).values()
    clock.spend(data=64)
    assert set(clock.rates(peak_flops=1e12).values()) == {None}  # Nothing since.


def test_the_time_left_is_that_of_the_rows_left():
    """Steps of 8 rows that take 4 s, after a slow first one. Whatever comes between steps will come again."""
    clock = Clock()
    clock.now += 7200  # Starting up.
    clock.step(3600, 3600, 3600)
    assert clock.meter.seconds_left(800) is None
    clock.step(1, 2, 1)
    assert clock.meter.seconds_left(800) == 400
    clock.spend(evaluation=4, data=0)
    clock.step(1, 2, 1)
    assert clock.meter.seconds_left(800) == 800 / 16 * 12


def test_warmup_is_the_first_step_only_and_in_no_rate():
    """It compiles and fills memory pools: an hour of it must not show in the rates after it."""
    slow, fast = Clock(), Clock()
    slow.step(3600, 3600, 3600)
    fast.step(1, 1, 1)
    for clock in slow, fast:
        clock.step(1, 2, 1)
    assert slow.rates() == fast.rates() and slow.rates()["step_seconds"] is None
    assert slow.seconds()["warmup"] == 3 * 3600


@pytest.mark.parametrize("phase", ["evaluation", "sampling", "checkpoint", "logging", "startup"])
def test_other_work_changes_no_rate(phase):
    """The same steps, with an hour of something else after each and in the middle of one."""
    plain, broken = Clock(), Clock()
    for clock in plain, broken:
        for _ in range(3):
            clock.spend(data=1, micro_steps=2)
            if clock is broken:
                before = clock.meter.enter(phase)
                clock.now += 3600
                clock.meter.enter(before)
            clock.step(1, 2, 4)
            if clock is broken:
                clock.spend(**{phase: 3600})
    assert plain.rates(2, 6.0, 1e12) == broken.rates(2, 6.0, 1e12)
    assert broken.seconds()[phase] - plain.seconds().get(phase, 0) == 6 * 3600


def test_the_line_of_a_step(capsys, monkeypatch):
    """What has no value is left out. A progress bar tells itself how far the run is."""
    metrics = {"a": 998.6, "b": None, "c": 1000.0, "d": 0.0, "e": 0.00123456, "f": 1.0, "train/epoch": 0.25}
    for seconds, left in (0.0, "  00:00 left"), (None, ""), (3661.0, "  1:01:01 left"):
        show(1000, 20000, metrics, ("a", "b", "c", "d", "e", "missing"), seconds)
        line = "step 1,000/20,000  a 998.6  c 1,000  d 0  e 0.001235"
        assert capsys.readouterr().out == f"{line}  epoch 0.25{left}\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show(1000, 20000, metrics, ("a",), 1.0)
    assert capsys.readouterr().out == "step 1,000/20,000  a 998.6\n"


def test_a_resumed_run_counts_its_own_steps_only(tmp_path):
    """Through main(), where totals of the whole run are at hand: 10 rows of 24 slots in every window of one step, in
    the second launch as in the first, and none in the window of a launch's first step."""
    config = tiny_config(tmp_path)
    config["data"]["packing"] = "concat"  # All rows are full, but for the last one, which is padded to its neighbours.
    config["model"]["attention"] = "eager"
    config["optim"]["warmup_steps"] = 0
    for first, last in (1, 3), (4, 6):
        done = run(tmp_path, config, "--run.max_steps", last)
        logged = {line["step"]: line for line in done.metrics if "perf/step_seconds" in line}
        assert list(logged) == list(range(1, last + 1)) and logged[last]["train/rows"] == 10 * last
        rates = [
            (
                logged[step]["perf/tokens_per_second"],
                logged[step]["perf/rows_per_second"],
                logged[step]["perf/step_seconds"],
            )
            for step in range(first, last + 1)
        ]
        assert rates[0] == (None, None, None)
        for tokens, rows, seconds in rates[1:]:
            assert (tokens * seconds, rows * seconds) == pytest.approx((240, 10))
        summary = {key[8:]: value for key, value in done.metrics[-1].items() if key.startswith("summary/")}
        busy = sum(summary[f"{phase}_seconds"] for phase in TRAINING)
        assert summary["tokens_per_second"] * busy == pytest.approx(2 * 240) and "bubble" not in summary
        parts = sum(value for key, value in summary.items() if key.endswith("_seconds")) - summary["wall_seconds"]
        assert parts == pytest.approx(summary["wall_seconds"])


def test_what_is_measured_of_two_devices(tmp_path):
    """The same FLOPs in a second are half of the MFU. The memory is in GiB: Python with torch takes some tenths.

    A token costs 6 FLOPs per parameter of a matrix, forward and backward, and 12 per dimension and token that attention
    lets it see, which is as many as its own document has: on average over the tokens, not over the documents."""
    config, parts = tiny_config(tmp_path), []
    config["optim"]["warmup_steps"] = 0
    lengths = np.array([len(row["input_ids"]) for row in datasets.load_from_disk(config["data"]["path"])])
    seen = (lengths**2).sum() / lengths.sum()
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64  # q and o; k and v of 2 of the 4 heads; the three of the MLP.
    flops = 6 * (2 * layer + 384 * 32) + 12 * 2 * 32 * seen
    for processes in 1, 2:
        settings = "--perf.peak_tflops", 1, "--run.max_steps", 2, "--run.output_dir", tmp_path / str(processes)
        done = launch(tmp_path, config, *settings, processes=processes, warm=True)
        [_, last] = [line for line in done.metrics if "perf/mfu" in line]
        parts.append(last["perf/mfu"] * last["perf/step_seconds"])
        per_second = last["perf/mfu"] * processes * 1e12
        assert per_second / last["perf/real_tokens_per_second"] == pytest.approx(flops, rel=0.01)
        assert 0.05 < last["perf/peak_memory_gib"] < 50
    assert parts[0] == pytest.approx(2 * parts[1])


def test_seconds_show_up_under_their_own_names(tmp_path, monkeypatch):
    """Through main(): 18 steps, the first of a launch being warmup, 3 evaluations and 3 saves. Time passes nowhere but
    in what is named here, so that the sums are exact however busy the machine is."""
    assert Meter().clock is time.perf_counter
    now = [0.0]

    def takes(seconds, where, name):
        function = getattr(where, name)

        def slower(*args, **options):
            now[0] += seconds
            return function(*args, **options)

        monkeypatch.setattr(where, name, slower)

    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 18, "eval_every": 8, "save_every": 8, "log_every": 1}
    monkeypatch.setattr(train, "STARTED", 0.0)
    monkeypatch.setattr(train, "Meter", partial(Meter, lambda: now[0]))
    monkeypatch.setattr(Prefetcher, "AHEAD", 1)  # So that each step is loaded alone.
    takes(1, train, "forward_backward")
    takes(2, Parallelism, "clip_gradients")
    takes(4, setup_room, "load_step")
    takes(64, train, "evaluate")
    takes(512, Prefetcher, "take")
    takes(1024, mesh, "trained_state")  # What a save does before it goes on in the background.
    takes(16384, train, "build_setup")
    takes(32768, train, "export_best")
    takes(65536, train, "log")
    done = run(tmp_path, config)
    seconds = {key[8:-8]: value for key, value in done.metrics[-1].items() if key.endswith("_seconds")}
    assert {phase: value for phase, value in seconds.items() if value} == {
        "startup": 16384 + 4 + 512,  # With the rows of the first step.
        "warmup": 1 + 2,
        "micro_steps": 17 * 1,
        "optimizer": 17 * 2,
        "data": 17 * (4 + 512),
        "evaluation": 3 * 64,
        "checkpoint": 3 * 1024 + 32768,
        "logging": (18 + 3) * 65536,  # Of steps and of evaluations.
        "wall": now[0],
    }
    assert re.search(r"^Seconds: startup 16900\.0, .*evaluation 192\.0, .*wall [\d.]+$", done.output, re.M)
    steps = [line for line in done.metrics if line.get("perf/step_seconds")]
    assert len(steps) == 17
    data, whole = (sum(line[f"perf/{name}_seconds"] for line in steps) for name in ("data", "step"))
    # Rows are read at the end of the step before: those of step 2 in the warmup's window.
    assert data == 16 * 4 + 17 * 512 and whole == data + 17 * (1 + 2)
    assert all(line["perf/rows_per_second"] == pytest.approx(10 / line["perf/step_seconds"]) for line in steps)


def test_what_a_device_has_left_to_do_is_training(tmp_path, monkeypatch):
    """Whatever makes the host wait for it: a log line, an evaluation or a save. A step takes the device a second, which
    passes when something waits."""
    now, left = [0.0], [0.0]

    def changed(where, name, before):
        function = getattr(where, name)

        def longer(*args, **options):
            before()
            return function(*args, **options)

        monkeypatch.setattr(where, name, longer)

    def queue():
        left[0] += 1

    def wait():
        now[0] += left[0]
        left[0] = 0

    changed(train, "forward_backward", queue)
    for where, name in (Guard, "read"), (train, "mean_per_target"), (train, "evaluate"), (mesh, "trained_state"):
        changed(where, name, wait)
    config = tiny_config(tmp_path)
    config["run"] |= {"max_steps": 18, "eval_every": 4, "save_every": 3, "log_every": 7}
    monkeypatch.setattr(train, "Meter", partial(Meter, lambda: now[0]))
    monkeypatch.setattr(train, "STARTED", 0.0)
    done = run(tmp_path, config)
    seconds = {key[8:-8]: value for key, value in done.metrics[-1].items() if key.endswith("_seconds")}
    assert sum(seconds[phase] for phase in TRAINING) == seconds["wall"] == 18
    rates = [line["perf/step_seconds"] for line in done.metrics if line.get("perf/step_seconds")]
    assert rates == [pytest.approx(7 / 6), 1, 1]  # The first window has the second of the first step, not its number.


def test_a_gpu_divides_the_training_time():
    """A host that queues a step in no time and waits for 3 s where it reads a value; a device that spent half a second
    on waiting for data, 2 on passes, half on the update, and a minute on an evaluation; in another window a second on
    each. What it did in the warmup is no part of the first window."""

    class Event:
        """One in a stream, which has its own clock."""

        def __init__(self, now):
            self.now, self.waited = now, False

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, end):
            assert end.waited  # Otherwise CUDA raises an error.
            return (end.now - self.now) * 1000

    clock, device = Clock(), SimpleNamespace(now=0.0)
    clock.meter.event = lambda: Event(device.now)

    def spend(phase, host, stream):
        clock.spend(**{phase: host})
        device.now += stream

    for phase in TRAINING:
        spend(phase, 1, 100)
    clock.meter.count(STEP)
    for data, passes, update in (0.5, 2, 0.5), (1, 1, 1):
        spend("data", 0, data)
        spend("micro_steps", 0, passes)
        spend("optimizer", 3, update)
        clock.meter.count(STEP)
        spend("evaluation", 60, 60)
        rates = clock.rates()
        assert rates["step_seconds"] == 3 and rates["data_seconds"] == pytest.approx(data)
        assert rates["micro_step_tokens_per_second_per_device"] == pytest.approx(STEP["tokens"] / passes)
    seconds, expected = clock.seconds(), {"data": 1.5, "micro_steps": 3, "optimizer": 1.5}
    assert {phase: seconds[phase] for phase in TRAINING} == pytest.approx(expected)
    assert seconds["evaluation"] == 120 and seconds["wall"] == clock.now


def updates(events: list[dict]) -> int:
    """Of any optimizer. That of a fork may call torch's within its own, which is no other update."""
    steps = [event for event in events if str(event.get("name")).startswith("Optimizer.step#")]
    count, end = 0, 0
    for event in sorted(steps, key=lambda event: event["ts"]):
        if event["ts"] >= end:
            count, end = count + 1, event["ts"] + event["dur"]
    return count


def test_profile(tmp_path):
    """Of the steps that are named and no others, with the work done in them."""
    done = run(tmp_path, tiny_config(tmp_path), "--run.max_steps", 5, "--perf.profile_steps", "[2, 3]")
    assert "profile.json.gz in ui.perfetto.dev" in done.output
    with gzip.open(done.folder / "profile.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert updates(events) == 2 and sum(event.get("name") == "aten::linear" for event in events) > 2
    again = run(tmp_path, tiny_config(tmp_path), "--run.max_steps", 8, "--perf.profile_steps", "[3, 7]")
    assert "perfetto" not in again.output  # It began after step 5: half a profile would mislead.


def test_profile_of_a_launch_that_fails(tmp_path):
    """Where one needs it most, it is written, and the process ends with the error."""
    settings = "--perf.profile_steps", "[2, 4]", "--optim.learning_rate", "1e30", "--optim.warmup_steps", "0"
    done = launch(
        tmp_path, tiny_config(tmp_path), "--optim.max_grad_norm", "null", *settings, processes=None, warm=True, expect=1
    )
    assert "error: the loss or gradient norm of step 2 is not finite" in done.output
    with gzip.open(done.folder / "profile.json.gz") as file:
        assert json.load(file)["traceEvents"]


def test_profile_of_more_steps_than_there_are(tmp_path):
    """Given the wrong way round, too: what there is. A process that is still profiled when it ends would crash."""
    done = launch(tmp_path, tiny_config(tmp_path), "--run.max_steps", 6, "--perf.profile_steps", "[9, 5]", warm=True)
    assert done.status["status"] == "finished"
    with gzip.open(done.folder / "profile.json.gz") as file:
        assert updates(json.load(file)["traceEvents"]) == 2


def test_memory_is_recorded_in_the_profiled_steps_only(tmp_path, monkeypatch):
    """To record every allocation costs time and memory as long as it goes on. Here functions stand in for those of a
    GPU."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled="all": calls.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path.name))
    profiler, calls_after = Profiler([2, 3], tmp_path, torch.device("cuda")), []
    for step in range(5):
        profiler.after_step(step)
        calls_after.append(list(calls))
    done = ["all", "memory.pickle", None]
    assert calls_after == [[], ["all"], ["all"], done, done]
    for steps, rank in ([2, 3], 1), (None, 0):  # The main process profiles alone: all would write the same file.
        monkeypatch.setenv("RANK", str(rank))
        profiler = Profiler(steps, tmp_path, torch.device("cuda"))
        for step in range(5):
            profiler.after_step(step)
    assert calls == done


# Peak FLOP/s ---------------------------------------------------------------------------------------------------------


def test_no_peak_is_guessed_for_a_cpu():
    for precision in "no", "bf16", "fp16", "fp8":
        assert peak_flops(torch.device("cpu"), precision, Perf()) is None


def test_peak_of_the_config_overrides_the_table(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    for device in "cpu", "cuda":
        assert peak_flops(torch.device(device), "bf16", Perf(peak_tflops=123)) == 123e12


@pytest.mark.parametrize(
    "name, precision, tflops",
    [  # From the datasheets, without sparsity.
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200", "fp8", 1979),
        ("NVIDIA H200", "no", 67),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Some Future Device", "bf16", None),
    ],
)
def test_known_peaks(monkeypatch, name, precision, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    assert peak_flops(torch.device("cuda"), precision, Perf()) == (tflops and tflops * 1e12)


@pytest.mark.parametrize(
    "name, precision, tflops",
    [
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA T400 4GB", "fp16", None),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", 989 / 7),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", 312 * 3 / 7),
        ("NVIDIA T4G", "fp16", None),
    ],
)
def test_a_device_is_not_taken_for_one_of_a_like_name(monkeypatch, name, precision, tflops):
    """Part of each of these names is in the table. Its own number or none is right, a neighbour's is a guess."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    assert peak_flops(torch.device("cuda"), precision, Perf()) in (None, tflops and tflops * 1e12)
