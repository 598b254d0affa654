"""What must happen before torch is imported: variables that libraries read, signals, and the end of orphans."""

import ctypes
import functools
import gc
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # The latter on macOS.
PARENT = os.getppid()
PR_SET_PDEATHSIG = 1  # Of prctl() in Linux.


def begin(is_script: bool) -> float | None:
    """Call it before the libraries are imported. Returns when the launch began, by time.perf_counter(), if this is a
    script; otherwise None, because a program that imports train.py calls main() later, and perhaps several times."""
    started = time.perf_counter()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["DATASETS_VERBOSITY"] = "critical"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # OpenMP's threads spin while they wait for each other. Beside another busy program that would cost most of the
    # speed, so they spin for a tenth of a millisecond only. torch's OpenMP on Linux reads this when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # A fork, as of notebook_launcher, must not end what only its parent has, such as a store's server: that aborts.
    os.register_at_fork(after_in_child=gc.freeze)
    if sys.platform == "linux":
        end_with_launcher()
    if is_script:
        os.environ.pop("MPLBACKEND", None)  # A notebook's, which the environment of this script may lack.
        os.register_at_fork(after_in_child=leave_signals_to_parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:  # As in the background of a script.
                signal.signal(number, while_importing)
    return started if is_script else None


earlier_signals = []  # Answered by StopSignal, which is made later, and by a Meeting to which nobody comes.


def while_importing(number: int, frame) -> None:
    """An exception would not do: some libraries take one in their imports for an error of their own."""
    if number == signal.SIGINT:
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"\nStopped by Ctrl-C before anything was done.\n")
        os._exit(1)
    if os.getppid() != PARENT and os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(1)  # Without a launcher the ranks do not find each other.
    earlier_signals.append(number)


def leave_signals_to_parent() -> None:
    """A fork is ended by its parent. A terminal sends its Ctrl-C to both."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_with_launcher() -> None:
    """Ask Linux for a SIGTERM when the parent of this process dies.

    Otherwise the ranks of a dead launcher live on, and so do the tokenizing workers of a dead rank. A fork does not
    inherit the request and makes its own.
    """
    ask_kernel = ctypes.CDLL(None).prctl
    os.register_at_fork(after_in_child=functools.partial(ask_kernel, PR_SET_PDEATHSIG, signal.SIGKILL))
    # Only for a launcher. What `nohup python train.py &` starts outlives its shell.
    parent = b""
    with suppress(OSError):
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    if "TORCHELASTIC_RUN_ID" in os.environ or re.search(rb"(^|/)accelerate(-launch)?\0|accelerate\.commands", parent):
        ask_kernel(PR_SET_PDEATHSIG, signal.SIGTERM)
