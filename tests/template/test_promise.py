"""tests/benchmarks/promise.py at tiny size: one run is killed and continued, and the picture is drawn."""

import re
import subprocess
import sys

import helpers
import pytest


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path):
    command = [sys.executable, helpers.ROOT / "tests" / "benchmarks" / "promise.py", "--tiny"]
    done = subprocess.run(
        [*command, "--picture", tmp_path / "promise.png"], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    differences = [float(number) for number in re.findall(r" (\d\.\de\S+)$", done.stdout, re.M)]
    assert len(differences) == 4 and differences[0] == 0 and max(differences) < 1e-3
    assert (tmp_path / "promise.png").read_bytes().startswith(b"\x89PNG")
