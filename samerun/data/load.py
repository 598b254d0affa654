"""All sources of a run, those to train on mixed by weight, and the evaluations; prepared by one process per cache."""

import os
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import datasets
from filelock import FileLock, Timeout

from samerun.config import Data, Source, rows_per_block
from samerun.data.index import load_rows
from samerun.data.mixture import Mixture
from samerun.data.rows import Dataset
from samerun.data.sources import cannot_use, data_cache, is_read_only
from samerun.dotted import eval_setting
from samerun.errors import as_user_error, is_main_process, prefix_errors, require, say
from samerun.meeting import Meeting


def load_training_rows(
    config: Data, tokenizer, made_by: str, seed: int, held_out: bool = False, others: list[Dataset] | None = None
) -> Dataset:
    """The rows of all sources, or of the share of them that is held out."""
    if not config.sources:
        return load_rows(config, tokenizer, made_by, seed, held_out, others)
    loaded = {}
    for name, source in config.sources.items():
        with prefix_errors(f"data.sources.{name}"):
            own = {"format": source.format or config.format, "column": source.column or config.column}
            part = of_source(config, source).model_copy(update=own)
            loaded[name] = load_rows(part, tokenizer, made_by, seed, held_out, others)
    _, weights = config.weight_stages()[0]
    return Mixture(loaded, rows_per_block("data.sources", weights), seed)


def of_source(config: Data, source: Source) -> Data:
    """The config with the data of this source."""
    return config.model_copy(update={field: getattr(source, field) for field in Source.model_fields})


def load_data(config: Data, tokenizer, seed: int) -> tuple[Dataset, dict[str, Dataset]]:
    """The rows to train on, and those of each evaluation by its name. The only evaluation has the name ""."""
    made_by = datasets.fingerprint.Hasher.hash(tokenizer)  # Before its first use, which may change it.
    held_out, others = {}, [] if config.eval_sources else None
    if config.eval_fraction:
        held_out[""] = load_training_rows(config, tokenizer, made_by, seed, held_out=True, others=[])
        others = held_out[""].parts()
    train = load_training_rows(config, tokenizer, made_by, seed, others=others)
    for name, source in config.eval_sources.items():
        with prefix_errors(eval_setting(name)):
            part = of_source(config, source)
            held_out[name] = load_rows(part, tokenizer, made_by, seed, others=train.parts())
    for note in train.index["notes"]:
        say(f"Data: {note}")
    for name, data in held_out.items():
        for note in data.index["notes"]:
            if note not in train.index["notes"]:
                say(f"{evaluation_title(name)}: {note}")
    return train, held_out


def evaluation_title(name: str) -> str:
    return f"Evaluation {name}" if name else "Evaluation"


def data_lock() -> FileLock | None:
    """For one process at a time that looks for data in the cache, or puts them there. None where that is read-only."""
    cache = data_cache()
    if is_read_only(cache):
        return None
    with as_user_error(cannot_use(cache)):
        os.makedirs(cache, exist_ok=True)
        lock = cache / "train.lock"
        require(not lock.exists() or os.access(lock, os.W_OK), f"{lock} is another user's")
    return FileLock(lock, mode=0o666)  # For all users who may write into the cache.


def take_at_once(lock: FileLock | None) -> AbstractContextManager:
    """Take a lock if nobody has it, and otherwise say so. Returns what gives it back."""
    if lock is None:
        return nullcontext()
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say("Another launch prepares data in the same cache. Waiting until it has done that.")
        return nullcontext()


@contextmanager
def turn_to_load_data(meeting: Meeting):
    """One process per cache tokenizes. The others wait for the lock, outside any collective, and find the result."""
    with ExitStack() as turn:
        lock = data_lock()
        if is_main_process():  # It goes first, because it alone can tell how far it is.
            turn.enter_context(take_at_once(lock))
        meeting.wait_for_all()
        turn.enter_context(lock or nullcontext())
        yield
