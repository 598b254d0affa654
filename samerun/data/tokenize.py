"""From documents to token ids and labels."""

import math
import time
from pathlib import Path

import datasets
import numpy as np
from tqdm.auto import tqdm

from samerun.config import Data
from samerun.data.chat import common_length, tokenize_chat
from samerun.data.encode import Encoder, number_of_ids
from samerun.early import CORES
from samerun.errors import UserError, as_user_error, require, say
from samerun.files import are_as_noted, note_files

PART = 2**27  # Bytes of documents that are tokenized at a time. Of a launch that is killed, the parts before are kept.


MOST_FILES = 1000  # Each part of each process is a file.


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
    count = max(1, min(math.ceil(size / PART), MOST_FILES // CORES, len(documents)))
    encoder = Encoder(tokenizer, config.parse_special_tokens)
    parts = [documents.shard(count, number, contiguous=True) for number in range(count)]
    files = [folder / f"{number}-of-{count}.arrow" for number in range(1, count + 1)]
    missing = [file for file in files if not are_as_noted(file.with_suffix(".json"))]
    for file in missing:
        clear(file)
    if missing:
        in_parts = f"; {len(missing)} of {count} parts are left to do" if count > 1 else ""
        say(f"Tokenizing {len(documents):,} documents{in_parts}.")
    tokenized, done, new, started = [], 0, 0, time.monotonic()
    with as_user_error(f"data: cannot use {' and '.join(documents.column_names)} as {config.format}"):
        for part, file in zip(parts, files):
            tokenized.append(tokenize_part(part, done, config, encoder, file))
            done += len(part)
            if file in missing:
                note_files(file.with_suffix(".json"), [Path(made["filename"]) for made in tokenized[-1].cache_files])
            if file in missing and done < len(documents):
                new += len(part)
                rate = new / (time.monotonic() - started)
                left = tqdm.format_interval((len(documents) - done) / rate)
                say(f"Tokenized {done:,} of {len(documents):,} documents; {rate:,.0f} per second, {left} left")
    return datasets.concatenate_datasets(tokenized)


def clear(part: Path) -> None:
    """Delete what there is of a part that is not complete, and which datasets would take for complete."""
    if part.with_suffix(".json").exists():
        say(f"Data: {part} is not as it was written, and is made anew.")
    for file in part.parent.glob(f"{part.stem}[._]*"):  # datasets gives each of several processes a file of its own.
        file.unlink()


def tokenize_part(
    documents: datasets.Dataset, first: int, config: Data, encoder: Encoder, cache_file: Path
) -> datasets.Dataset:
    """As tokenize(). The first document has the number `first`. Works in parallel, and leaves the result in files."""
    columns, is_chat = documents.column_names, config.format == "chat"
    settings = {"columns": columns, "encoder": encoder}
    if is_chat:
        settings["train_on"] = config.train_on
    try:
        return documents.map(
            tokenize_chat if is_chat else tokenize_text,
            fn_kwargs=settings,
            with_indices=True,
            batched=True,
            batch_size=64,
            remove_columns=columns,
            features=smallest_types(encoder.tokenizer, has_labels=is_chat or len(columns) == 2),
            num_proc=min(CORES, len(documents) // 64) or None,
            load_from_cache_file=True,
            cache_file_name=str(cache_file),
            new_fingerprint=f"{cache_file.parent.name}-{cache_file.stem}",
            desc=f"Tokenize {cache_file.stem}",
        )
    except LookupError as error:  # From tokenize_chat(): the number of a document, and why it cannot be used.
        number, *why = error.args
        if not why:
            raise
        number = documents._indices.column(0)[number].as_py() if documents._indices else first + number
        raise UserError(f"row {number}, counted from 0: {why[0]}") from error


def smallest_types(tokenizer, has_labels: bool) -> datasets.Features:
    """Types in which all ids fit, because tokens are most of what is on the disk. Labels may also be -100."""
    end = max(number_of_ids(tokenizer), 128)
    types = {"input_ids": np.min_scalar_type(end - 1)}
    if has_labels:
        types["labels"] = np.min_scalar_type(-end)
    return datasets.Features({name: datasets.List(datasets.Value(kind.name)) for name, kind in types.items()})


def tokenize_text(batch: dict, numbers: list[int], columns: list[str], encoder: Encoder) -> dict:
    """Token ids of each text, ending in the tokenizer's end-of-text token where it has one.

    A prompt and its completion are one text, and get labels, which are -100 in the prompt.
    """
    documents = encoder.texts(["".join(parts) for parts in zip(*(batch[name] for name in columns))])
    end = encoder.tokenizer.eos_token_id
    if end is not None:
        documents = [ids if ids[-1:] == [end] else ids + [end] for ids in documents]
    if len(columns) == 1:
        return {"input_ids": documents}
    labels = []
    for ids, prompt in zip(documents, encoder.texts(batch[columns[0]])):
        # Some tokenizers end each text by themselves. The end is not of the prompt, also if its completion is empty.
        start = common_length(ids[:-1] if ids[-1:] == [end] else ids, prompt)
        labels.append([-100] * start + ids[start:])
    return {"input_ids": documents, "labels": labels}
