"""Builders for `datasets` that leave each text as it is written.

A builder needs a room of its own: `datasets` replaces `os`, `open` and others in the module where one is defined.
"""

import io
import itertools
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, TextIO
from unittest import mock

import datasets
import pandas as pd
import pyarrow as pa
from datasets.builder import Key
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.text.text import Text


class TextFiles(Text):
    """Each text file is one document. The ends of its lines stay as they are."""

    def _generate_tables(self, base_files: list[str], files_iterables: list) -> Iterator[tuple[Key, pa.Table]]:
        for shard, file in enumerate(itertools.chain(*files_iterables)):
            with open_text(file, newline="") as opened:
                table = pa.table({"text": pa.array([opened.read()], pa.string())})
            yield Key(shard, 0), table


class TableFiles(Csv):
    """Every cell is text. pandas would guess anew for each 10,000 rows, and make 7 of 007 if all look like numbers."""

    def _generate_tables(self, base_files: list[str], files_iterables: list) -> Iterator[tuple[Key, pa.Table]]:
        for shard, file in enumerate(itertools.chain(*files_iterables)):
            with pd.read_csv(file, iterator=True, dtype=str, **self.config.pd_read_csv_kwargs) as parts:
                for number, rows in enumerate(parts):
                    schema = pa.schema({name: pa.large_string() for name in rows.columns})
                    yield Key(shard, number), pa.Table.from_pandas(rows, schema, preserve_index=False)


JSON = pa.json_()  # In a text.
INTEGERS, BOOLEANS, EMPTY = (pa.list_(kind) for kind in (pa.int64(), pa.bool_(), pa.null()))
ROWS_AT_ONCE = 1000  # Of a list.
PARQUET_ROWS_AT_ONCE = 10_000


class OtherTypes(datasets.exceptions.DatasetGenerationError):
    """Columns have other types than in the rows before."""


class JsonFiles(Json):
    """Texts, and lists of integers or of booleans, get these types. Anything else stays JSON, each value by itself.

    datasets would make times of texts that are all dates, round numbers such as 1e-12, read texts that look like JSON,
    and make texts of numbers that come after texts. Arrow would give each message the keys of all.
    """

    def download_and_prepare(self, *args, **options) -> None:
        self.types: dict[str, pa.DataType] = {}  # Of each column.
        while True:
            try:
                return super().download_and_prepare(*args, **options)
            except OtherTypes:  # All rows are read again, with the types that are known now.
                self.info.features = None

    def _generate_tables(self, base_files: list, files_iterables: list, **_) -> Iterator[tuple[Key, pa.Table]]:
        is_same = True
        for shard, file in enumerate(itertools.chain(*files_iterables)):
            first = 0
            for number, rows in enumerate(parts_of(file, self.config)):
                columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}
                before = self.types
                self.note_types(columns)
                # The features are those of the first table. If they were wrong, the others are only looked at.
                is_same = is_same and (self.info.features is None or self.types == before)
                if is_same:
                    yield Key(shard, number), self.table_of(columns, len(rows), first)
                first += len(rows)
        if not is_same:
            raise OtherTypes
        if not self.types:
            raise ValueError("it has no rows")

    def note_types(self, columns: dict[str, list]) -> None:
        """Raises ValueError if nothing is as in the rows before, as in a file that is there by accident."""
        if self.types and columns and self.types.keys().isdisjoint(columns):
            raise ValueError(f"the columns are {', '.join(columns)}, and before they were {', '.join(self.types)}")
        found = {name: type_of(values, self.types.get(name)) for name, values in columns.items()}
        self.types = self.types | found

    def table_of(self, columns: dict[str, list], length: int, first: int) -> pa.Table:
        """`first`: the number of the first row."""
        nulls = [None] * length
        arrays = {name: array_of(columns.get(name, nulls), kind, name, first) for name, kind in self.types.items()}
        return pa.table(arrays)


def parts_of(file: str, config: datasets.BuilderConfig) -> Iterator[list[dict[str, Any]]]:
    """The rows of a file, some at a time: its lines, or what is in the list that the file, or a field of it, is."""
    with open_json(file, config) as lines:
        first = next((line for line in lines if line.strip()), "{}")
    if config.field is None and first.lstrip().startswith("{") and is_json(first):
        yield from parts_of_lines(file, config)
        return
    with open_json(file, config) as opened:
        values = list(values_of(opened.read()))
    if config.field is not None:
        if not (values and isinstance(values[0], dict) and config.field in values[0]):
            raise ValueError(f"it has no field {config.field!r}")
        values = [values[0][config.field]]
    if len(values) == 1 and isinstance(values[0], list):
        [values] = values
    rows = [row_of(value, f"row {number}, counted from 0,") for number, value in enumerate(values)]
    for start in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[start : start + ROWS_AT_ONCE]


def parts_of_lines(file: str, config: datasets.BuilderConfig) -> Iterator[list[dict[str, Any]]]:
    before = 0
    with open_json(file, config) as opened:
        while lines := opened.readlines(config.chunksize):
            rows = [row for number, line in enumerate(lines, before + 1) for row in rows_of_line(line, number)]
            if rows:
                yield rows
            before += len(lines)


def rows_of_line(line: str, number: int) -> list[dict[str, Any]]:
    """The row of a line. Some programs write several into one."""
    try:
        values = list(values_of(line))
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is no JSON: {error.msg}: character {error.colno}") from error
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error
    return [row_of(value, f"line {number}") for value in values]


def open_json(file: str, config: datasets.BuilderConfig) -> TextIO:
    """Bytes that are no text of the encoding are found later, where the row is known."""
    return open_text(file, config.encoding, config.encoding_errors or "surrogateescape")


def open_text(file: str, encoding: str = "utf-8", errors: str = "strict", newline: str | None = None) -> TextIO:
    """Open a text without the mark (BOM) with which Windows begins one. What datasets puts in the place of open() would
    take compressed files for UTF-8 with the ends of lines of this machine."""
    encoding = "utf-8-sig" if encoding == "utf-8" else encoding
    return io.TextIOWrapper(open(file, "rb"), encoding=encoding, errors=errors, newline=newline)


def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is there twice in one object")
    return found


decode = json.JSONDecoder(object_pairs_hook=as_object).raw_decode
encode = json.JSONEncoder(ensure_ascii=False).encode


def values_of(text: str) -> Iterator[Any]:
    """The values in a JSON text, usually one."""
    text = text.strip()
    at = 0
    while at < len(text):
        value, at = decode(text, at)
        yield value
        while text[at : at + 1].isspace():
            at += 1


def is_json(text: str) -> bool:
    try:
        list(values_of(text))
    except json.JSONDecodeError:
        return False
    except ValueError:  # Told later, with the line.
        pass
    return True


def row_of(value: Any, where: str) -> dict[str, Any]:
    """A row as its columns. A text alone is a document."""
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.60}, and no object with columns")
    return value


def type_of(values: list, before: pa.DataType | None) -> pa.DataType:
    """The type of a column with these values that had another type before; null if it has no value yet."""
    present = [value for value in values if value is not None]
    kinds = {type(value) for value in present}
    if not kinds:
        return before or pa.null()
    found = JSON
    if kinds == {str}:
        found = pa.string()
    elif kinds == {list}:
        found = type_of_lists(present)
    if before in (None, pa.null(), found):
        return found
    if before == EMPTY and found in (INTEGERS, BOOLEANS):
        return found
    if found == EMPTY and before in (INTEGERS, BOOLEANS):
        return before
    return JSON


def type_of_lists(lists: list[list]) -> pa.DataType:
    kinds = {type(part) for value in lists for part in value if part is not None}
    if not kinds:
        return EMPTY
    if kinds == {bool}:
        return BOOLEANS
    if kinds != {int}:
        return JSON
    try:
        pa.array(lists, INTEGERS)
    except OverflowError:  # More than 64 bits.
        return JSON
    return INTEGERS


def array_of(values: list, kind: pa.DataType, name: str, first: int) -> pa.Array:
    if kind == JSON:
        values = [None if value is None else encode(value) for value in values]
        return pa.ExtensionArray.from_storage(JSON, texts_of(values, name, first))
    return texts_of(values, name, first) if kind == pa.string() else pa.array(values, kind)


def texts_of(values: list[str | None], name: str, first: int) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError as error:
        row = first + values.index(error.object)
        raise ValueError(f"{name!r} of row {row}, counted from 0, is not UTF-8, or half of a surrogate pair") from error


def exact_json() -> AbstractContextManager:
    """In it, `datasets` reads and writes JSON as Python does. With pandas, it makes 1.8399999999999999 of 1.84."""
    return mock.patch.multiple(pd.io.json, ujson_loads=json.loads, ujson_dumps=json.dumps)


READERS = {"text": TextFiles, "csv": TableFiles, "json": JsonFiles}

# By default, datasets takes words such as None and NA in a .csv for empty cells, and if rows have a cell more than the
# header, it shifts the columns. Local conversations with some other columns it would take for traces of agents.
READING = {
    "csv": {"keep_default_na": False, "na_values": [""], "index_col": False},
    "json": {"parse_agent_traces": False},
}


def leaving_texts(found: datasets.DatasetBuilder, cache: str | None) -> datasets.DatasetBuilder:
    """The builder from above for the files that datasets has found, or what it has found if they are of other kinds."""
    if found.name == "parquet":  # By default it reads as many rows at once as the first group has, which may be none.
        found.config.batch_size = found.config.batch_size or PARQUET_ROWS_AT_ONCE
    if found.name not in READERS:
        return found
    options = options_of(found.config)
    if found.name == "text" and options:  # The README of a folder asks for its paragraphs, for example.
        return found
    options |= READING.get(found.name, {})
    files = found.config.data_files
    return READERS[found.name](hash=found.hash, data_files=files, cache_dir=cache, **options)


def options_of(config: datasets.BuilderConfig) -> dict[str, Any]:
    """How the files are to be read, where it is not the default, such as the tabs of a .tsv."""
    default, not_reading = vars(type(config)()), vars(datasets.BuilderConfig())
    return {name: value for name, value in vars(config).items() if name not in not_reading and value != default[name]}
