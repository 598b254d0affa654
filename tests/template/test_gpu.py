"""tests/benchmarks/gpu.py, on a CPU at tiny size: that it runs, so that on a GPU one command is all.

Nothing is compiled, which takes most of a minute here; that it can be, test_finetune.py checks."""

import json
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
        [
            *command,
            "--minutes",
            "25",
            "--steps",
            "5",
            "--part",
            "attention",
            "resume",
            "host",
            "memory",
            "float8",
            "lora",
            "packed",
            "profile",
            "overhead",
            "others",
            "save",
        ],
        capture_output=True,
        text=True,
        timeout=1600,
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        r"\| flash, heads of 128, 4 to a key, window 100 \| [\d.e-]+ \|",
        r"\| killed and continued \| [\d.]+ \| [\d.e+-]+ \| 1e-03 \|",
        r"The host waits 0 times in a step",
        r"\| LoRA on 8B, compile \| 1 x 4 \| [\d,]+ \| unknown peak \|",
        r"\| compile \| 2 x 4 \| [\d,]+ \| unknown peak \|",
        r"checkpointing: the plan's [\d.]+ GiB, to what was measured: [\d.]+",
        r"Overhead of train.py: [+-]",
        r"Real tokens per second with packing concat, to full rows: [\d.]+",
        r"\| kernel, of 0.0 ms in one step \|",
        r"\| Trainer \| [\d,]+ \| [\d,]+ \| [\d.]+ \|",
        r"\| TRL \| [\d,]+ \| [\d,]+ \| [\d.]+ \|",
        r"3 saves of \d layers: training waited [\d.]+ s, a step takes [\d.]+ s",
        r"\| Accelerate \| [\d,]+ \| [\d,]+ \| [\d.]+ \|",
        "Left out: 12 layers of 8B, compile, float8, which needs torchao and a GPU",
    ):
        assert re.search(f"^{line}", done.stdout, re.MULTILINE), done.stdout
    cases = [json.loads(line)["case"] for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert cases[0] == "machine" and {"host", "compile", "bare", "Trainer", "TRL", "save"} < set(cases)
    draw = [sys.executable, helpers.ROOT / "tests" / "benchmarks" / "gpu_picture.py"]
    subprocess.run([*draw, tmp_path / "results.jsonl", tmp_path / "gpu.png"], check=True)
    assert (tmp_path / "gpu.png").stat().st_size > 10_000
