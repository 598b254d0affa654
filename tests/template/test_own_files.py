"""A fork's own files beside the shipped ones fail no test. Without tests/template the rest of the suite is whole."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

CONFIG = """run: {max_tokens: 1e5, save_every: 7}
batch: {global_batch_tokens: 96}
data: {files: mine.csv, column: words, sequence_length: 48}
model: {architecture: {model_type: gpt2}}
"""
LAUNCHER = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmy_note: without a head\n"


@pytest.fixture
def fork(tmp_path):
    """A copy of the repository with a config and a launcher file of its own, and other values in a shipped one."""
    for name in "train.py", "pyproject.toml", "requirements.txt", "README.md", "LICENSE":
        shutil.copy(ROOT / name, tmp_path)
    for name in "samerun", "configs", "accelerate_configs", "tests", ".github", ".ci":
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "configs" / "mine.yaml").write_text(CONFIG)
    (tmp_path / "accelerate_configs" / "mine.yaml").write_text(LAUNCHER)
    return tmp_path


def pytest_in(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_own_files_fail_no_test(fork):
    """Tests that are about no certain file: those of the pages and of the shipped files, and of the config."""
    files = "tests/template/test_readme.py", "tests/template/test_configs.py", "tests/test_config.py"
    about_files = "pages or files or parse or plan or settings or understands or head or schema or named"
    output = pytest_in(fork, *files, "-k", f"({about_files}) and not runs", "-vv")
    assert "mine" not in output and " passed" in output


@pytest.mark.slow
def test_the_rest_is_whole_without_the_template(fork):
    """Nothing else imports from tests/template, or lists the files of a folder that a fork may change."""
    shutil.rmtree(fork / "tests" / "template")
    (fork / "configs" / "small.yaml").write_text(CONFIG)
    collected = pytest_in(fork, "tests", "--collect-only")
    kept = {path.name for path in (ROOT / "tests").glob("test_*.py")}
    found = {line.split("::")[0].removeprefix("tests/") for line in collected.splitlines() if "::" in line}
    assert kept - found <= {"test_deepspeed.py"}  # Which is skipped without the package.
    assert "mine" not in collected
    pytest_in(fork, "tests/test_config.py")


def test_nothing_else_names_the_template():
    """Only pages do, and a benchmark may say where its test is."""
    for path in [*(ROOT / "tests").glob("*.py"), ROOT / "train.py", ROOT / "pyproject.toml"]:
        text = path.read_text()
        assert "tests/template" not in text and "from template" not in text, path
