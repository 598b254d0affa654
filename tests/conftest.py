"""Environment of every test and of every command that a test starts. Shared functions are in helpers.py."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that `import train` finds the script.

# Libraries read these when they are imported, so they are set before any test module is. Caches start empty and are not
# the user's: neither an old cache entry nor a personal accelerate config can decide a test.
CACHE = tempfile.mkdtemp(prefix="train-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ |= {
    "HF_HOME": CACHE,
    "HF_DATASETS_CACHE": f"{CACHE}/datasets",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor",  # What one test has compiled, the others need not.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # A pool of processes to compile in takes longer to start than it saves.
    "OMP_NUM_THREADS": "1",  # Several processes share few cores; train.py itself divides them.
    "OMP_WAIT_POLICY": "PASSIVE",  # Threads that spin while they wait took ten times the processor where others work.
    "PYTHONUNBUFFERED": "1",
}
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # The suite tests the mathematics on CPU processes.

import pytest


def pytest_runtest_setup():
    gc.freeze()  # Every run through main() ends with a collection. What was there before need not be looked at again.


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.get_closest_marker("slow"))  # First, so that nobody waits for the last one.


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # A shell has started the tests in the background. What they
    signal.signal(signal.SIGINT, signal.default_int_handler)  # start would ignore Ctrl-C, too.

HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}


def restore_handlers() -> None:
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def undo_main():
    """What train.main() leaves in this process: RANK and the like that Accelerate sets. And what a test has changed."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ |= environment
    restore_handlers()
