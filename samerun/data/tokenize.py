"""From documents to token ids and labels."""

import math
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from tqdm.auto import tqdm

from samerun.config import Data
from samerun.data.chat import tokenize_chat
from samerun.data.documents import kept_rows
from samerun.data.encode import Encoder, common_length, number_of_ids
from samerun.data.sources import place_of_row
from samerun.data.text_files import exact_json
from samerun.early import CORES
from samerun.errors import UserError, as_user_error, require, say
from samerun.files import are_as_noted, delete, note_files

# Of a launch that is killed, the parts before are kept. Their number does not depend on the machine: one may prepare
# what another reads.
PART = 2**22  # Bytes of documents in a part: on average at most these, but for long documents and MOST_PARTS.
MOST_PARTS = 1000  # Each is a file.
LINE_SECONDS = 10  # From one line about the progress to the next.


def tokenize(documents: datasets.Dataset, config: Data, tokenizer, folder: Path) -> datasets.Dataset:
    """The documents as lists of token ids (and labels). The parts that the folder has already are not made again."""
    if config.format == "tokens":
        return documents
    if config.format == "chat":
        name = tokenizer.name_or_path or "bytes"
        advice = "only fast ones tell the assistant's tokens; name another one"
        require(tokenizer.is_fast, f"data.tokenizer: {name} is not a fast tokenizer; {advice}")
        template = f"data.chat_template: null, and {name} has none"
        require(tokenizer.chat_template, f"{template}; name a file, such as configs/chat_template.jinja")
    for leftover in folder.glob("tmp*"):  # Of datasets, in a launch that was killed.
        leftover.unlink()
    size = documents.data.nbytes * len(documents) / documents.data.num_rows  # The table also has rows left out.
    count = max(1, min(math.ceil(size / PART), MOST_PARTS, len(documents)))
    files = [folder / f"{number}-of-{count}.arrow" for number in range(1, count + 1)]
    missing = [number for number, file in enumerate(files) if not are_as_noted(file.with_suffix(".json"))]
    for number in missing:
        clear(files[number])
    if missing:
        in_parts = f"; {len(missing)} of {count} parts are left to do" if len(missing) < count else ""
        say(f"Tokenizing {len(documents):,} documents{in_parts}.")
        tokenize_parts(documents, missing, config, Encoder(tokenizer, config.parse_special_tokens), files)
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])


def clear(part: Path) -> None:
    """Delete what there is of a part that is not complete."""
    if part.with_suffix(".json").exists():
        say(f"Data: {part} is not as it was written, and is made anew.")
    for file in part.parent.glob(f"{part.stem}.*"):
        delete(file)


def tokenize_parts(
    documents: datasets.Dataset, missing: list[int], config: Data, encoder: Encoder, files: list[Path]
) -> None:
    """Tokenize the parts with these numbers into their files, on all cores, and tell how far it is."""
    edges = np.linspace(0, len(documents), len(files) + 1).astype(int).tolist()
    made, left = 0, sum(edges[number + 1] - edges[number] for number in missing)
    started = told = time.monotonic()
    with map_on_cores(partial(tokenize_part, documents, edges, config, encoder, files), missing) as sizes:
        for size in sizes:
            made += size
            left -= size
            now = time.monotonic()
            if now - told >= LINE_SECONDS and left:
                told = now
                rate = made / (now - started)
                done, seconds = len(documents) - left, tqdm.format_interval(left / rate)
                say(f"Tokenized {done:,} of {len(documents):,} documents; {rate:,.0f} per second, {seconds} left")


@contextmanager
def map_on_cores(function: Callable, values: list[int]) -> Iterator[Iterator]:
    """What the function gives for each value, in order, by as many processes as there are cores and values.

    They are gone when this ends, also by an error.
    """
    count = min(CORES, len(values))
    if count == 1:
        yield map(function, values)
        return
    # Each process gets the function once. With each value it would take long, and more than fits into the pipe to a
    # dead process would make this one wait forever at its end.
    way = multiprocessing.get_context("fork" if sys.platform == "linux" else None)  # macOS's libraries do not bear it.
    with ProcessPoolExecutor(count, way, keep, (function,)) as pool:
        try:
            with signals_blocked():
                results = [pool.submit(call_kept, value) for value in values]
            yield (result.result() for result in results)
        except BaseException as error:
            for process in multiprocessing.active_children():  # What they have begun may take minutes.
                process.kill()
            if isinstance(error, BrokenProcessPool):  # The data are not to blame.
                why = "as the system does when memory is short; the same command continues with the parts that are left"
                raise MemoryError(f"data: a process that tokenized was killed, {why}") from error
            raise


@contextmanager
def signals_blocked() -> Iterator[None]:
    """They come after this, and not in the middle of a fork, where an exception is lost. To forks they never come: a
    terminal, or a launcher, signals all processes, and the parent is the one to answer."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


kept: list[Callable] = []  # The function of map_on_cores() in its processes.


def keep(function: Callable) -> None:
    datasets.disable_progress_bars()
    kept.append(function)


def call_kept(value: int) -> Any:
    return kept[0](value)


def tokenize_part(
    documents: datasets.Dataset, edges: list[int], config: Data, encoder: Encoder, files: list[Path], number: int
) -> int:
    """Tokenize a part, from one of the edges to the next, into its file. Returns how many documents it has."""
    file, part = files[number], documents.select(range(edges[number], edges[number + 1]))
    columns, is_chat = documents.column_names, config.format == "chat"
    settings = {"columns": columns, "encoder": encoder}
    if is_chat:
        settings["train_on"] = config.train_on
    with as_user_error(f"data: cannot use {' and '.join(columns)} as {config.format}"), exact_json():
        try:
            part.map(
                tokenize_chat if is_chat else tokenize_text,
                fn_kwargs=settings,
                with_indices=is_chat,
                batched=True,
                batch_size=64,
                remove_columns=columns,
                features=smallest_types(encoder.tokenizer, has_labels=is_chat or len(columns) == 2),
                cache_file_name=str(file),
                new_fingerprint=f"{file.parent.name}-{file.stem}",
                desc=f"Tokenize {file.stem}",
            )
        except LookupError as error:  # From tokenize_chat(): the number of a document, and why it cannot be used.
            at, *why = error.args
            if not why:
                raise
            rows = kept_rows(part)
            row = edges[number] + at if rows is None else rows[at]
            raise UserError(f"{place_of_row(documents, config, row)}: {why[0]}") from error
    note_files(file.with_suffix(".json"), [file])
    return len(part)


def smallest_types(tokenizer, has_labels: bool) -> datasets.Features:
    """Types in which all ids fit, because tokens are most of what is on the disk. Labels may also be -100."""
    end = max(number_of_ids(tokenizer), 128)
    types = {"input_ids": np.min_scalar_type(end - 1)}
    if has_labels:
        types["labels"] = np.min_scalar_type(-end)
    return datasets.Features({name: datasets.List(datasets.Value(kind.name)) for name, kind in types.items()})


def tokenize_text(batch: dict, columns: list[str], encoder: Encoder) -> dict:
    """Token ids of each text, ending in the tokenizer's end-of-text token where it has one.

    A prompt and its completion are one text, and get labels, which are -100 in the prompt.
    """
    texts = ["".join(parts) for parts in zip(*(batch[name] for name in columns))]
    documents, end = encoder.texts(texts), encoder.tokenizer.eos_token_id
    starts = starts_of_completions(texts, documents, batch[columns[0]], encoder) if len(columns) == 2 else []
    if end is not None:
        documents = [ids if ids[-1:] == [end] else ids + [end] for ids in documents]
    if len(columns) == 1:
        return {"input_ids": documents}
    labels = [[-100] * start + ids[start:] for ids, start in zip(documents, starts)]
    return {"input_ids": documents, "labels": labels}


def starts_of_completions(
    texts: list[str], documents: list[list[int]], prompts: list[str], encoder: Encoder
) -> list[int]:
    """The first token of each document that has a character of the completion.

    Some tokenizers end each text by themselves. That end is not of the prompt, also if the completion is empty.
    """
    end = encoder.tokenizer.eos_token_id
    whole = [ids[:-1] if ids[-1:] == [end] else ids for ids in documents]
    if not encoder.tokenizer.is_fast:  # It does not say where a token ends.
        return [common_length(ids, prompt) for ids, prompt in zip(whole, encoder.texts(prompts))]
    starts = []
    for ids, prompt, ends in zip(whole, prompts, encoder.ends(texts)):
        is_after = [last > len(prompt) for last in ends[: len(ids)]]
        starts.append(is_after.index(True) if True in is_after else len(ids))
    return starts
