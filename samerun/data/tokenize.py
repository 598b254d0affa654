"""From documents to token ids and labels."""

import itertools
import math
import re
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from tqdm.auto import tqdm
from transformers.utils.chat_template_utils import render_jinja_template

from samerun.config import Data
from samerun.data.encode import Encoder
from samerun.data.order import running_sum
from samerun.early import CORES
from samerun.errors import UserError, explained, require, say

# The roles of chat templates, and what they are called in ShareGPT's messages of from and value.
ROLES = {"human": "user", "gpt": "assistant", "function": "tool"}


ROLES |= {role: role for role in ("user", "assistant", "system", "tool")}


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
        marks = re.search(r"generation -?%}", str(tokenizer.chat_template))
        template = config.chat_template or f"null, that of {name}"
        advice = "it must mark the assistant's turns by {% generation %} and {% endgeneration %}"
        require(marks, f"data.chat_template: {template}: {advice}")
    for leftover in folder.glob("tmp*"):  # Of datasets, in a launch that was killed.
        leftover.unlink()
    size = documents.data.nbytes * len(documents) / documents.data.num_rows  # The table also has rows left out.
    count = max(1, min(math.ceil(size / PART), MOST_FILES // CORES, len(documents)))
    encoder = Encoder(tokenizer, config.parse_special_tokens)
    parts = [documents.shard(count, number, contiguous=True) for number in range(count)]
    files = [folder / f"{number}-of-{count}.arrow" for number in range(1, count + 1)]
    missing = [file for file in files if not is_complete(file)]
    if missing:
        in_parts = f"; {len(missing)} of {count} parts are left to do" if count > 1 else ""
        say(f"Tokenizing {len(documents):,} documents{in_parts}.")
    tokenized, done, new, started = [], 0, 0, time.monotonic()
    with explained(f"data: cannot use {' and '.join(documents.column_names)} as {config.format}"):
        for part, file in zip(parts, files):
            tokenized.append(tokenize_part(part, done, config, encoder, file))
            done += len(part)
            if file in missing and done < len(documents):
                new += len(part)
                rate = new / (time.monotonic() - started)
                left = tqdm.format_interval((len(documents) - done) / rate)
                say(f"Tokenized {done:,} of {len(documents):,} documents; {rate:,.0f} per second, {left} left")
    return datasets.concatenate_datasets(tokenized)


def is_complete(part: Path) -> bool:
    """Whether datasets has written all files of a part: one, or one from each of several processes."""
    written = list(part.parent.glob(f"{part.stem}_*_of_*.arrow"))
    return part.exists() or any(int(file.stem.split("_")[-1]) == len(written) for file in written)


def tokenize_part(
    documents: datasets.Dataset, first: int, config: Data, encoder: Encoder, cache_file: Path
) -> datasets.Dataset:
    """As tokenize(). The first document has the number `first`. Works in parallel, and leaves the result in files."""
    columns = documents.column_names
    try:
        return documents.map(
            tokenize_chat if config.format == "chat" else tokenize_text,
            fn_kwargs={"columns": columns, "encoder": encoder},
            with_indices=True,
            batched=True,
            batch_size=64,
            remove_columns=columns,
            features=smallest_types(encoder.tokenizer, has_labels=config.format == "chat" or len(columns) == 2),
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
    end = max(len(tokenizer), *(number + 1 for number in tokenizer.get_vocab().values()), 128)
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
        start = common_length(ids, prompt)
        labels.append([-100] * start + ids[start:])
    return {"input_ids": documents, "labels": labels}


def common_length(ids: list[int], prompt: list[int]) -> int:
    """The tokens with which both begin. A token may reach over the end of the prompt, which then ends differently."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, prompt))
    return sum(1 for _ in same)


def tokenize_chat(batch: dict, numbers: list[int], columns: list[str], encoder: Encoder) -> dict:
    """Token ids of each conversation, and labels that are -100 except for what the assistant says.

    Of a prompt and its completion, only what the assistant says in the completion is learned.
    """
    rows = {"input_ids": [], "labels": []}
    for number, *parts in zip(numbers, *(batch[name] for name in columns)):
        try:
            turns = [turns_of(messages) for messages in parts]
            ids, said_by_assistant = tokenize_turns(list(itertools.chain(*turns)), encoder)
            prompt = tokenize_turns(turns[0], encoder)[0] if len(parts) == 2 else []
            start = common_length(ids, prompt)
            if start < len(prompt) - 1:  # Some templates leave out the thinking of earlier turns.
                raise ValueError("the chat template changes the prompt if more follows; end it with the user")
        except Exception as error:  # A chat template may refuse a conversation.
            raise LookupError(number, f"{type(error).__name__}: {error}") from error
        labels = [token if said else -100 for token, said in zip(ids, said_by_assistant)]
        rows["input_ids"].append(ids)
        rows["labels"].append([-100] * start + labels[start:])
    return rows


def tokenize_turns(turns: list[dict[str, Any]], encoder: Encoder) -> tuple[list[int], np.ndarray]:
    """Token ids of a conversation, and which of them have a character of what the assistant says.

    apply_chat_template() tells the latter, too. But if the last character of a turn has no token of its own, such as a
    space that the tokenizer leaves out, then it takes the rest of the conversation for the assistant's.
    """
    if not turns:
        raise ValueError("it has no messages")
    text, spans = render(turns, encoder, return_assistant_tokens_mask=True)
    is_said = np.zeros(len(text), bool)
    for begin, end in spans:
        is_said[begin:end] = True
    said_before = running_sum(is_said)
    ids, begins, ends = encoder.conversation(text)
    return ids, said_before[begins] < said_before[ends]


def render(turns: list[dict[str, Any]], encoder: Encoder, **options: Any) -> tuple[str, list[tuple[int, int]]]:
    """What the chat template makes of turns, for Encoder.conversation(), and where its generation blocks are."""
    [text], spans = render_jinja_template(
        [encoder.said_by_message(turns)],
        chat_template=encoder.tokenizer.get_chat_template(),
        **encoder.tokenizer.special_tokens_map,
        **options,
    )
    return text, spans[0] if spans else []


def turns_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates know them: role, content, and what else they have."""
    turns = []
    for message in messages:
        turn = present(message) or {}
        if "from" in turn:
            role = turn.pop("from")
            if role not in ROLES:
                raise ValueError(f"a message is from {role!r}, which is none of {', '.join(ROLES)}")
            turn = present(turn | {"role": ROLES[role], "content": turn.pop("value", None)})
        if "role" not in turn:
            raise ValueError(f"a message has {', '.join(turn) or 'nothing'}, and no role")
        if isinstance(turn.get("content"), list):
            turn["content"] = "".join(map(text_of, turn["content"]))
        turns.append(turn)
    return turns


def text_of(part: Any) -> str:
    """The text of a part, for contents in parts. Many templates would print a list as Python writes it."""
    is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    if not is_text:
        raise ValueError(f"a content has the part {part}; a model of language alone reads only type text with its text")
    return part["text"]


def present(value: Any) -> Any:
    """Without the keys that are null: Arrow gives each message the keys that any of them has."""
    if isinstance(value, dict):
        return {name: present(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [present(part) for part in value]
    return value
