"""What --prepare does: the data of a launch, without a device."""

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import transformers

from samerun.config import Config
from samerun.data.encode import number_of_ids
from samerun.data.load import data_lock, evaluation_title, load_data, take_at_once
from samerun.data.rows import Dataset
from samerun.errors import require, say
from samerun.model.architecture import model_config
from samerun.model.build import download_weights
from samerun.model.tokenizer import load_tokenizer
from samerun.run.launch import StopSignal, go_offline_without_network, silence_libraries


def prepare(config: Config, rows: list[int], loss_function: Callable) -> None:
    """All of a launch that needs the network or much time, without the model's weights. And show these training rows.

    Raises UserError.
    """
    StopSignal().raise_at_signals()
    silence_libraries()
    go_offline_without_network(config)
    tokenizer = load_tokenizer(config.data, config.model)
    lock = data_lock()
    with take_at_once(lock), lock or nullcontext():
        train_data, eval_data = load_data(config.data, tokenizer, config.run.seed)
    found = model_config(config, number_of_ids(tokenizer) if tokenizer else None)
    if config.model.pretrained:
        download_weights(config.model, found)
    loss_function(config)  # That of a fork may load a teacher.
    say(f"Data: {len(train_data):,} rows to train on")
    for name, data in eval_data.items():
        say(f"{evaluation_title(name)}: {len(data):,} rows")
    for row in rows:
        last = len(train_data) - 1
        require(0 <= row <= last, f"--prepare {row}: the rows are 0 to {last}")
        say(f"--- row {row}\n{describe_row(train_data, row, tokenizer)}\n---")
    say("Prepared: a launch finds all of it in the caches. On machines without network, set HF_HUB_OFFLINE=1 for it.")


def describe_row(data: Dataset, row: int, tokenizer: transformers.PreTrainedTokenizerBase | None) -> str:
    """The text of a row, in which « and » enclose what is learned. Without a tokenizer, its token ids."""

    def decode(some: np.ndarray) -> str:
        return tokenizer.decode(some.tolist()) if tokenizer else "".join(f" {token}" for token in some)

    ids, targets, positions = data.read(row)
    is_learned = np.concatenate(([False], targets[:-1] != -100))  # A target is the token that follows.
    begins = positions == 0
    changes = begins[1:] | (is_learned[1:] != is_learned[:-1])
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(ids)]
    text, document, before = "", 0, ""
    for begin, end in zip(edges, edges[1:]):
        if begins[begin]:
            document, before = begin, ""
            text += "\n--- next document\n" if begin else ""
        whole = decode(ids[document:end])  # A tokenizer may drop the space before the first token that it decodes.
        if end < len(ids) and not begins[end]:
            whole = whole.rstrip("\N{REPLACEMENT CHARACTER}")  # Part of a character, which goes with its last token.
        part = whole[len(before) :]
        text += f"«{part}»" if is_learned[begin] else part
        before = whole
    return text
