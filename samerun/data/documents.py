"""Which columns of which types are documents, and which documents are held out."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from samerun.config import Data
from samerun.data.order import shuffle
from samerun.data.sources import load_source, place_of_row
from samerun.data.text_files import JSON
from samerun.errors import UserError, as_user_error, require, say


@dataclass(frozen=True)
class Format:
    """What a data.format expects: which columns, of which type.

    `columns` lists alternatives; the first whose columns are all there is taken. `arrow_type` is a regular expression
    for the name of the type in Arrow, `json` one for values that are JSON, and `words` says the same to the user.
    """

    columns: list[list[str]]
    arrow_type: str
    json: str
    words: str


PAIR = ["prompt", "completion"]  # As TRL calls them. Only the completion is learned.
TOOLS = "tools"  # The functions that a conversation may call, for its chat template.

# A message in Arrow: JSON, or a struct with the fields role and content, or from and value, in any order.
MESSAGE = r"(extension<arrow\.json>|(?=.*\brole: ).*\bcontent: (?!timestamp)|(?=.*\bfrom: ).*\bvalue: (?!timestamp))"

FORMATS = {
    "text": Format([["text"], PAIR], r"(large_)?string", r'^"', "text"),
    "chat": Format(
        [["messages"], ["conversations"], PAIR],
        rf"(large_|fixed_size_)?list<\w+: {MESSAGE}",
        r"^\[(\{|\]|null)",
        "lists of role and content, or of from and value",
    ),
    "tokens": Format(
        [["input_ids"]],
        r"(large_|fixed_size_)?list<\w+: u?int",
        r"^\[((-?\d{1,18}, )*-?\d{1,18})?\]$",
        "lists of integers (token ids)",
    ),
}

# Columns beside input_ids in which other programs put 0 for a token, and what that means.
MARKS = {
    "attention_mask": "for padding; leave it out of the rows",
    "assistant_masks": "for what is not to be learned; give the rows labels, with -100 there",
    "completion_mask": "for what is not to be learned; give the rows labels, with -100 there",
}


def load_documents(config: Data, note: Callable[[str], None] = say) -> datasets.Dataset:
    """The columns that hold the documents, without the rows that are to be left out. `note` gets what to tell of it."""
    documents = load_source(config, note)
    if config.format == "tokens":
        check_marks(documents)
    columns = choose_columns(documents.column_names, config)
    unread = [name for name in documents.column_names if name not in columns]
    if unread:  # Among them may be one that somebody counts on.
        note(f"columns read: {', '.join(columns)}; not read: {', '.join(unread)}.")
    documents = documents.select_columns(columns)
    check_types(documents, config)
    if config.format != "tokens":
        check_encoding(documents)
    elif "labels" in columns:
        check_labels(documents, config)
    documents = without_nulls(documents, config, note)
    require(len(documents), "data: there are no documents")
    return documents


def check_marks(documents: datasets.Dataset) -> None:
    """Raises UserError if a column that is not read marks tokens that are not to be learned."""
    marks = ["attention_mask"] if "labels" in documents.column_names else MARKS
    for name in set(marks) & set(documents.column_names):
        values = documents.data.column(name)
        if re.match(rf"{FORMATS['tokens'].arrow_type}|.*list<\w+: bool", str(values.type)):
            lowest = pc.min(pc.list_flatten(values)).as_py()
            require(lowest != 0, f"data: {name!r} has 0 {MARKS[name]}")


def choose_columns(found: list[str], config: Data) -> list[str]:
    """data.column, or those of the format; also the labels of tokens, or the tools of a chat, if there are any."""
    choices = [config.column] if config.column else FORMATS[config.format].columns
    for names in choices:
        is_one = config.format != "tokens" or len(names) == 1
        require(is_one, "data.column: tokens have one column, and labels beside it if there are any")
        if set(names) <= set(found):
            more = {"tokens": "labels", "chat": TOOLS}.get(config.format)
            names = [*names, more] if more in found else names
            require(len({*names}) == len(names), f"data.column: {', '.join(names)} are not different columns")
            return names
    known = ", nor ".join(" and ".join(map(repr, names)) for names in choices)
    raise UserError(f"data.column: no column {known}; the data has {', '.join(found)}")


def check_types(documents: datasets.Dataset, config: Data) -> None:
    names = [name for name in documents.column_names if name != TOOLS]
    # A prompt and its completion may be a text each.
    wanted = ["chat", "text"] if config.format == "chat" and len(names) == 2 else [config.format]
    for name in names:
        values = documents.data.column(name)
        held, formats = kind_of(values, wanted, partial(place_of_row, documents, config))
        advice = f"; that is data.format {formats[0]}" if formats else ""
        if "timestamp" in held:
            advice = "; datasets takes texts of the Hub's .jsonl for times if all are dates: save them as .parquet"
        of_type = any(kind in wanted for kind in formats)
        require(of_type, f"data.column: {name!r} holds {held}, not {FORMATS[config.format].words}{advice}")
        whole = config.format != "tokens" or pc.list_flatten(values).null_count == 0
        require(whole, f"data.column: {name!r} holds null among the tokens of a row")


def kind_of(values: pa.ChunkedArray, wanted: list[str], place_of: Callable[[int], str]) -> tuple[str, list[str]]:
    """What a column holds, and the formats that take it. Of JSON, the first value that no wanted one takes."""
    if values.type != JSON:
        held = str(values.type)
        return held, [format for format, known in FORMATS.items() if re.match(known.arrow_type, held)]
    texts = pa.chunked_array([part.storage for part in values.chunks])
    fits = pc.match_substring_regex(texts, "|".join(FORMATS[format].json for format in wanted))
    row = pc.index(fits, False).as_py()
    if row == -1:
        return "", wanted
    text = texts[row].as_py()
    formats = [format for format, known in FORMATS.items() if re.match(known.json, text)]
    return f"{text:.60} in {place_of(row)}", formats


def check_encoding(documents: datasets.Dataset) -> None:
    """Raises UserError for a text that is not UTF-8, which datasets takes from a .jsonl of the Hub."""
    for name, values in zip(documents.column_names, documents.data.columns):
        first = 0
        for part in values.chunks:
            with as_user_error(f"data.column: {name!r}, in the part from row {first} on, counted from 0"):
                part.validate(full=True)
            first += len(part)


def check_labels(documents: datasets.Dataset, config: Data) -> None:
    """Raises UserError unless each token has a label."""
    lengths = [pc.list_value_length(values) for values in documents.data.columns]
    differ = pc.fill_null(pc.not_equal(*lengths), False).to_numpy()
    if differ.any():
        place = place_of_row(documents, config, differ.argmax())
        raise UserError(f"data: input_ids and labels differ in length in {place}")


def without_nulls(documents: datasets.Dataset, config: Data, note: Callable[[str], None]) -> datasets.Dataset:
    """The documents that are not null, such as an empty cell of a .csv. Raises UserError unless they are to go."""
    names = [name for name in documents.column_names if name != TOOLS]
    columns = [documents.data.column(name) for name in names]
    if not any(values.null_count for values in columns):
        return documents
    is_null = np.any([pc.is_null(values) for values in columns], axis=0)
    found = f"{is_null.sum():,} of {len(documents):,} rows are null in {' or '.join(map(repr, names))}"
    first = f"the first is {place_of_row(documents, config, is_null.argmax())}"
    require(config.drop_nulls, f"data.column: {found}; {first}. To leave them out: data.drop_nulls: true")
    note(f"{found}, and left out.")
    return take(documents, np.flatnonzero(~is_null))


def hold_out(documents: datasets.Dataset, fraction: float, seed: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The documents to train on, and a random share of them to evaluate on."""
    size = max(1, math.ceil(fraction * len(documents) - 1e-9))  # An error of rounding must not add a document.
    some_left = size < len(documents)
    require(some_left, f"data.eval_fraction: {fraction} of {len(documents)} documents are all; use data.eval_source")
    held_out = shuffle(np.arange(size), len(documents), seed)
    kept = np.delete(np.arange(len(documents)), held_out)
    return take(documents, kept), take(documents, held_out)


def take(documents: datasets.Dataset, numbers: np.ndarray) -> datasets.Dataset:
    """The documents with these numbers, which kept_rows() can tell.

    select() does not note the numbers of neighbours: it cuts them out of the table.
    """
    return documents._select_with_indices_mapping(numbers)


def kept_rows(documents: datasets.Dataset) -> np.ndarray | None:
    """The numbers that the documents have as rows of their table; None for all rows."""
    return None if documents._indices is None else documents._indices.column(0).to_numpy().astype(np.int64)
