"""What the benchmarks that compare training loops share: contenders that take turns on the same core.

Work of others on the machine, and the machine's own clock, make numbers of different minutes incomparable. So all
contenders are processes that live at the same time, each pinned to the same core; one runs for so many steps while the
others wait, then the next. Each time another one is the first. What counts is the ratio of two contenders within one
round, in which each has one or more turns: its median over the rounds, and the middle half of the rounds as its spread.
Processor time is reported beside the wall clock: where the two differ, something else ran on the core.

A contender calls `turn(count)` after so many steps, in which it processed `count` of whatever is compared.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]


def contend(loop: Callable[[Callable], dict]) -> None:
    """The contender's side: runs loop(turn), whose result is told at its end. What it prints goes to stderr."""
    told, since = os.fdopen(os.dup(1), "w"), [0.0, 0.0]
    sys.stdout = sys.stderr

    def turn(count: float = 0) -> None:
        wall, cpu = time.perf_counter() - since[0], time.process_time() - since[1]
        print(json.dumps({"wall": wall, "cpu": cpu, "count": count}), file=told, flush=True)
        sys.stdin.readline()  # Until it is this contender's turn again.
        since[:] = time.perf_counter(), time.process_time()

    print(json.dumps(loop(turn)), file=told, flush=True)


@contextlib.contextmanager
def started(script: str, names: list[str], folder: Path, core: int, arguments: tuple) -> Iterator[dict]:
    """A process per contender, each in its own folder. Offline, and with one thread, as many as a core can run."""
    environment = os.environ | {
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with contextlib.ExitStack() as stack:
        processes = {}
        for i, name in enumerate(names):
            (home := folder / str(i)).mkdir()
            command = [sys.executable, script, "--contender", name, "--folder", str(home), *map(str, arguments)]
            log = stack.enter_context(open(home / "output.txt", "w"))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            pin = {"preexec_fn": lambda: os.sched_setaffinity(0, {core})}
            process = subprocess.Popen(command, env=environment, **pipes, **pin)
            stack.callback(process.kill)
            processes[name] = process, home / "output.txt"
        yield processes


def compete(
    script: str, names: list[str], rounds: int, warmup: int, turns: int, folder: Path, core: int, *arguments
) -> tuple:
    """Run `script --contender NAME --folder FOLDER` for all contenders in turn. They must take so many `turns` in each
    of `warmup + rounds` rounds, of which the first ones do not count. Returns [{name: {wall, cpu, count}} for each
    round], {name: result}."""
    loads, taken = [os.getloadavg()[0]], []
    with started(script, names, folder, core, arguments) as processes:

        def listen(name: str) -> dict:
            process, log = processes[name]
            line = process.stdout.readline()
            assert line, f"{name} ended:\n{log.read_text()[-5000:]}"
            return json.loads(line)

        def step(name: str) -> dict:
            processes[name][0].stdin.write("go\n")
            processes[name][0].stdin.flush()
            return listen(name)

        for name in names:  # Start-up and the first turn, which is of the warm-up.
            listen(name)
        for _ in range((warmup + rounds) * turns - 1):
            names = [*names[1:], names[0]]
            taken.append({name: step(name) for name in names})
        taken = taken[warmup * turns - 1 :]
        results = {name: step(name) for name in names}
    loads.append(os.getloadavg()[0])
    print(f"{rounds} rounds on core {core}; load {loads[0]:.1f} before, {loads[1]:.1f} after; median [middle half]")
    return [added_up(taken[first : first + turns]) for first in range(0, len(taken), turns)], results


def added_up(turns: list[dict]) -> dict:
    """The turns of a round as one."""
    return {
        name: {unit: sum(turn[name][unit] for turn in turns) for unit in measured}
        for name, measured in turns[0].items()
    }


def spread(values: list[float], form: str = ".3f") -> str:
    """The median and the quartiles."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"
