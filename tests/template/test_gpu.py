"""tests/benchmarks/gpu.py, on a CPU at tiny size: that it runs, so that on a GPU one command is all.

Nothing is compiled, which takes most of a minute here; that it can be, test_finetune.py checks."""

import os
import re
import subprocess
import sys

import helpers
import pytest


@pytest.mark.slow
def test_the_gpu_benchmark_runs(tmp_path):
    command = [sys.executable, helpers.ROOT / "tests" / "benchmarks" / "gpu.py", "--tiny", "--folder", tmp_path]
    done = subprocess.run(
        [*command, "--part", "float8", "overhead"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\| compile \| 2 x 4 \| [\d,]+ \| unknown peak \|", done.stdout, re.MULTILINE)
    assert re.search(r"^Overhead of train.py: [+-]", done.stdout, re.MULTILINE)
    assert "Left out: float8, which needs torchao and a GPU" in done.stdout
