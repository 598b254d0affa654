"""A mistake of the user ends in one message; say() prints on the main process."""

import errno
import os
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import datasets
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tqdm import std
from tqdm.auto import tqdm

# tqdm's own lock is one of all processes. A worker that is killed while it has it would let the others wait for ever.
std.tqdm.set_lock(threading.RLock())

LOST = ("onnection", "Timed out waiting")  # In what gloo says, whose errors are plain RuntimeErrors.


class UserError(ValueError):
    """A mistake in the config, the data, a checkpoint or the launch. It ends in one message and exit status 2."""


class AgreedError(UserError):
    """One that all ranks raise: the main process alone says it."""


class LostRank(RuntimeError):
    """Another rank has ended, or no longer answers."""


class Stopped(KeyboardInterrupt):
    """A signal has come, to this process or to another one, while what goes on is not needed for a checkpoint."""


def require(condition: Any, message: str) -> None:
    if not condition:
        raise UserError(message)


@contextmanager
def as_user_error(what: str, name: str | None = None):
    """Turn any error of a library about something that the user named into one UserError, but not a lost rank."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:
        if interrupt := interruption(error):
            raise interrupt from None
        cause = original(error)
        if is_lost_rank(cause):
            raise
        if is_full(cause) or "temporary directory" in str(cause):
            raise cause from error  # What the user named is not to blame.
        hint = ""
        is_missing = name and not os.path.exists(name) and not isinstance(cause, UserError)  # That says what to do.
        if is_missing and (name.count("/") > 1 or name[0] in "./"):  # No name on the Hub.
            hint = f"; there is no folder {name}, seen from {os.getcwd()}"
        elif is_missing:
            hint = "; check the name, `hf auth login` if it is private or gated, or give a local folder without network"
        raise UserError(f"{what}: {reason(cause)[:9000]}{hint}") from error


def is_full(error: BaseException) -> bool:
    """Whether there is no room left, on a disk or for a file."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def name_place(error: BaseException, place: Path) -> None:
    """Let the error of a full disk say where that is. The error of a write does not."""
    failure = original(error)
    if is_full(failure) and not failure.filename:
        failure.filename = str(place)


def interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The signal that has led to an error: datasets, for one, fails when it ends its processes."""
    while error and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


def original(error: BaseException) -> BaseException:
    """The error that torch's checkpoints or datasets have wrapped into one of theirs."""
    if isinstance(error, dcp.CheckpointException):
        failure, _ = next(iter(error.failures.values()))
        return failure
    if isinstance(error, datasets.exceptions.DatasetsError) and error.__cause__:
        return error.__cause__
    return error


def is_lost_rank(error: BaseException) -> bool:
    """Whether another rank has ended, or no longer answers. That one may know why."""
    if isinstance(error, LostRank | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)


@contextmanager
def prefix_errors(setting: str):
    """Begin a UserError with the setting that it comes from, where the same may be said about several."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{setting}: {error}") from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def reason(error: BaseException) -> str:
    """The message of an error, with its class, because the messages of some libraries say little alone."""
    told, _, _ = one_line(error).partition(" Model type should be one of ")  # transformers then lists some 200.
    return told if isinstance(error, UserError) else f"{type(error).__name__}: {told}"


def is_main_process() -> bool:
    """What the Accelerator answers, which goes by RANK, too; but this is known from the start."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """On the main process, without tearing the progress bar."""
    if is_main_process():
        # A stream may not know all characters of a sample, or nobody reads it any more. That must not end the run.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        with suppress(OSError):
            tqdm.write(text.encode(encoding, "replace").decode(encoding))
