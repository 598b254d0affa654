"""Each benchmark starts as a user starts it, at a size at which it measures nothing.

gpu.py, long_haul.py, promise.py and scaling.py have tests of their own besides.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

FOLDER = ROOT / "tests" / "benchmarks"
SCALING = "--config configs/small.yaml --devices 2 --tflops 1 --gb-per-second 1"
STARTS = {  # Of each benchmark its options, and a pattern of what it prints.
    "big_data --megatron": (
        "--rows 20000 --eval_fraction 0.01",
        r"^a row is read in [\d.]+ times the time, and again in ",
    ),
    "big_data --hashes": ("", r"^10,000,000 hashes against 100,000: [\d.]+ s$"),
    "big_data --shuffle": ("", r"^ *1,000,000,000 "),
    "checkpoint": ("--rounds 1 --tiny", r"^training waits +[\d.]+ +[\d.]+ \["),
    "chunked_loss": (
        "--rounds 1 --vocab-size 500 --tokens 128 --width 32",
        r"^model\.chunked_loss .* memory [\d.]+, time [\d.]+$",
    ),
    "chunked_loss --launch": ("DDP --rounds 1 --vocab-size 500 --tokens 64", r"^DDP +memory [\d.]+, time [\d.]+$"),
    "data_wait": ("--config configs/small.yaml --devices 1 --steps 2", r"^ +1 +[\d.]+ +[\d.]+ +[\d.]+%$"),
    "documents": (
        "--rounds 1 --rows 1 --lengths 64",
        r"^ +64 +[\d.]+ MiB [\d.]+ s +[\d.]+ MiB [\d.]+ s +[\d.]+, [\d.]+$",
    ),
    "host_memory": ("--processes 2 --layers 2 --only FSDP2..new", r"^FSDP2, new( +[\d.]+){5}$"),
    "long_haul": ("--steps 600 --look-every 0.02", r"^memory slope, bytes per step +-?[\d.]+ "),
    "memory": ("--width 64 --only ^DDP.2$", r"^DDP 2( +[\d.]+){4}$"),
    "overhead --against": (
        "HEAD --launches 1 --rounds 1",
        r"^train\.py to that of HEAD: [\d.]+ \[.*\nloss of the trained model [\d.]+, greatest",
    ),
    "precision": ("--tiny --steps 3", r"^bf16, FSDP2 +[\d.]+( +-?\d\.\de[+-]\d\d){4}$"),
    "scaling": (SCALING, r"^ +2 +1 +[\d.]+ +1 +DDP "),
    "startup": ("--rounds 1", r"^processor, seconds +[\d.]+ +[\d.]+ +[\d.]+ \["),
    "try_out": ("--layers 2 --width 64 --only ^TP$", r"^TP +[\d.]+ +[\d.]+ +[\d.]+$"),
    "useful_tokens": ("--rounds 1 --tiny", r"^train\.py, best_fit +[\d,]+ "),
}


def repository(folder: Path) -> dict[str, str]:
    """The environment by which git finds a repository whose only commit is the files as they are."""
    place = {"GIT_DIR": str(folder), "GIT_WORK_TREE": str(ROOT)}
    me = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for words in (["init", "-q"], ["add", "--all"], [*me, "commit", "-qm", "as they are"]):
        subprocess.run(["git", *words], cwd=ROOT, check=True, env=os.environ | place)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_it_starts(tmp_path, name):
    options, printed = STARTS[name]
    file, *option = name.split()
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    if option == ["--against"]:  # This copy of the files may have no repository.
        environment |= repository(tmp_path / "git")
    done = subprocess.run(
        [sys.executable, f"tests/benchmarks/{file}.py", *option, *options.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
    )
    assert re.search(printed, done.stdout, re.M), done.stdout + done.stderr
    # What is measured at this size may well break a bound, which is exit status 1, but then there is no traceback.
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr


def test_none_is_forgotten():
    elsewhere = {"contest", "promise"}  # What others share; test_promise.py.
    elsewhere |= {"gpu", "gpu_contenders", "gpu_picture"}  # test_gpu.py.
    assert {name.split()[0] for name in STARTS} | elsewhere == {Path(file).stem for file in FOLDER.glob("*.py")}
