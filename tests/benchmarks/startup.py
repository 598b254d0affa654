"""Where does the time from launch to the first step go? Against the time that importing the same libraries takes.

    python tests/benchmarks/startup.py [--rounds 5] [--config configs/small.yaml]

The tokens are in the cache and the files of the libraries in memory: a launch before the first round sees to that.
Launches and bare imports alternate; the first step begins where train_step() is called. Two more tables say
what in train.py, and which libraries' modules, the time goes to.
"""

import argparse
import ast
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
# Functions on the way to the first step, and where they are called; the rest is in "other".
PARTS = {
    "load_config": "train",
    "start_accelerator": "train",
    "load_tokenizer": "train",
    "load_data": "train",
    "build_model": "train",
    "flops_per_token": "train",
    "check_model": "train",
    "build_optimizer": "train",
    "load_step": "samerun.run.setup",
    "find_checkpoint": "train",
}


def imports(modules: list[str]) -> str:
    """A program that imports what train.py imports at its top, and then the libraries' modules that a launch had loaded
    by its first step, in that order: transformers, for one, loads the most of itself when a model is asked for."""
    files = [ROOT / "train.py", *(ROOT / "samerun").rglob("*.py")]
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    lines = {ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)}
    lines = sorted(line for line in lines if "samerun" not in line)
    lines += [
        "import contextlib, importlib",
        f"for name in {modules}:",
        "    with contextlib.suppress(Exception):",
        "        importlib.import_module(name)",
    ]
    return "\n".join([*lines, "os._exit(0)"])  # As the watched launch ends: taking all down again is not start-up.


def watched(launched: float, arguments: list[str]) -> None:
    """Run train.py up to its first forward pass, and tell the seconds of its parts. `launched`: when, by the clock."""
    spent, began = Counter(), time.time()
    sys.path.insert(0, str(ROOT))
    import train

    spent["interpreter"], spent["imports"] = began - launched, time.time() - began

    def timed(function, name: str):

        def call(*args, **options):
            before = time.time()
            try:
                return function(*args, **options)
            finally:
                spent[name] += time.time() - before

        return call

    def first_step(*_):
        spent["total"] = time.time() - launched
        spent["other"] = spent["total"] * 2 - spent.total()
        files = {name: getattr(module, "__file__", None) or "" for name, module in [*sys.modules.items()]}
        print(json.dumps([spent, [name for name, file in files.items() if "site-packages" in file]]), flush=True)
        os._exit(0)

    for name, place in PARTS.items():
        room = sys.modules[place]
        setattr(room, name, timed(getattr(room, name), name))
    train.train_step = first_step
    train.main(arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--config", default=str(ROOT / "configs" / "small.yaml"))
    parser.add_argument("--launched", type=float, help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.launched:
        watched(args.launched, ["--config", args.config, *rest])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/cache"}

        def run(*command: str) -> subprocess.CompletedProcess:
            done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, cwd=ROOT)
            assert done.returncode == 0, done.stderr[-4000:]
            return done

        def timed(function) -> tuple[float, float, dict | None]:
            """Wall and processor seconds of what it runs, and its result."""
            before, used = time.time(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
            result = function()
            return time.time() - before, sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - used, result

        def launch() -> tuple[dict, list[str]]:
            done = run(
                __file__,
                "--config",
                args.config,
                "--launched",
                str(time.time()),
                "--run.output_dir",
                tempfile.mkdtemp(dir=folder),
            )
            return json.loads(done.stdout.splitlines()[-1])

        _, modules = launch()
        rounds = [(timed(lambda: run("-c", imports(modules))), timed(launch)) for _ in range(args.rounds)]
        trace = run("-X", "importtime", "-c", imports(modules)).stderr
    print(f"{args.rounds} rounds, load {os.getloadavg()[0]:.1f}; medians, of the ratio also the least and the greatest")
    print(f"{'':16}{'imports alone':>16}{'to first step':>16}{'ratio':>24}")
    for i, clock in enumerate(("wall", "processor")):
        bare, launched = (np.array([one[which][i] for one in rounds]) for which in (0, 1))
        ratio = launched / bare
        print(
            f"{clock + ', seconds':16}{np.median(bare):16.2f}{np.median(launched):16.2f}"
            f"{f'{np.median(ratio):.2f} [{min(ratio):.2f}, {max(ratio):.2f}]':>24}"
        )
    rounds = [parts for _, (_, _, (parts, _)) in rounds]
    medians = {name: np.median([parts[name] for parts in rounds]) for name in rounds[0] if name != "total"}
    print("launch to first step, by part, wall seconds")
    for name, seconds in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"  {name:32}{seconds:8.2f}")
    own = Counter()  # Seconds in a package's own modules, without what they import.
    for microseconds, name in re.findall(r"import time: +(\d+) \| +\d+ \| +(\S+)", trace):
        own[name.split(".")[0]] += int(microseconds) / 1e6
    print("imports by package, without what they import (one run, with the tracer's cost)")
    for name, seconds in own.most_common(12):
        print(f"  {name:32}{seconds:8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
