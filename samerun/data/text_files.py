"""Builders for `datasets` that leave each text as it is written.

A builder needs a room of its own: `datasets` replaces `os`, `open` and others in the module where one is defined.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any, TextIO

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
            with open(file, encoding="utf-8-sig", newline="") as opened:  # Without the mark by which Windows begins.
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
json_of = json.JSONEncoder(ensure_ascii=False).encode
ROWS_AT_ONCE = 1000  # Of a list.


class OtherTypes(datasets.exceptions.DatasetGenerationError):
    """A column has another type than in the rows before."""


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
        for shard, file in enumerate(itertools.chain(*files_iterables)):
            first = 0
            for number, rows in enumerate(parts_of(file, self.config)):
                columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}
                yield Key(shard, number), self.table_of(columns, len(rows), first)
                first += len(rows)
        if not (self.types or self.config.features):
            raise ValueError("it has no rows")

    def table_of(self, columns: dict[str, list], length: int, first: int) -> pa.Table:
        """Raises OtherTypes unless they are those of the tables before. `first`: the number of the first row."""
        if self.config.features:  # The README of a folder tells the types.
            return self._cast_table(pa.table(columns))
        before = self.types
        self.types = before | {name: type_of(values, before.get(name)) for name, values in columns.items()}
        if self.info.features is not None and self.types != before:
            raise OtherTypes
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
        whole = json.load(opened)
    if config.field is not None:
        whole = whole[config.field]
    values = whole if isinstance(whole, list) else [whole]
    rows = [row_of(value, f"row {number}, counted from 0,") for number, value in enumerate(values)]
    for start in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[start : start + ROWS_AT_ONCE]


def parts_of_lines(file: str, config: datasets.BuilderConfig) -> Iterator[list[dict[str, Any]]]:
    before = 0
    with open_json(file, config) as opened:
        while lines := opened.readlines(config.chunksize):
            rows = [row_of_line(line, number) for number, line in enumerate(lines, before + 1) if line.strip()]
            if rows:
                yield rows
            before += len(lines)


def open_json(file: str, config: datasets.BuilderConfig) -> TextIO:
    """Bytes that are no text of the encoding are found later, where the row is known."""
    encoding = "utf-8-sig" if config.encoding == "utf-8" else config.encoding
    return open(file, encoding=encoding, errors=config.encoding_errors or "surrogateescape")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def row_of_line(line: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is no JSON: {error.msg}: character {error.colno}") from error
    return row_of(value, f"line {number}")


def row_of(value: Any, where: str) -> dict[str, Any]:
    """A row as its columns. A text alone is a document."""
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r}, and no object with columns")
    return value


def type_of(values: list, before: pa.DataType | None) -> pa.DataType:
    """The type of a column with these values that had another type before; null if it has no value yet."""
    present = [value for value in values if value is not None]
    kinds = {type(value) for value in present}
    parts = {type(part) for value in present for part in value} - {type(None)} if kinds == {list} else set()
    if not kinds:
        return before or pa.null()
    if kinds == {str}:
        found = pa.string()
    elif kinds == {list} and parts <= {int}:
        found = pa.list_(pa.int64())
    elif parts == {bool}:
        found = pa.list_(pa.bool_())
    else:
        found = JSON
    return found if before in (None, pa.null(), found) else JSON


def array_of(values: list, kind: pa.DataType, name: str, first: int) -> pa.Array:
    if kind == JSON:
        values = [None if value is None else json_of(value) for value in values]
        return pa.ExtensionArray.from_storage(JSON, texts_of(values, name, first))
    return texts_of(values, name, first) if kind == pa.string() else pa.array(values, kind)


def texts_of(values: list[str | None], name: str, first: int) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError as error:
        row = first + values.index(error.object)
        raise ValueError(f"{name!r} of row {row}, counted from 0, is not UTF-8, or half of a surrogate pair") from error


READERS = {"text": TextFiles, "csv": TableFiles, "json": JsonFiles}

# By default, datasets takes words such as None and NA in a .csv for empty cells, and if rows have a cell more than the
# header, it shifts the columns. Local conversations with some other columns it would take for traces of agents.
READING = {
    "csv": {"keep_default_na": False, "na_values": [""], "index_col": False},
    "json": {"parse_agent_traces": False},
}


def leaving_texts(found: datasets.DatasetBuilder, cache: str | None) -> datasets.DatasetBuilder:
    """The builder from above for the files that datasets has found, or what it has found if they are of other kinds."""
    if found.name not in READERS:
        return found
    options = options_of(found.config)
    if found.name == "text" and options:  # The README of a folder asks for its paragraphs, for example.
        return found
    options |= READING.get(found.name, {})
    if found.name == "json" and found.info.features:  # The README tells the types of the columns.
        options["features"] = found.info.features
    files = found.config.data_files
    return READERS[found.name](hash=found.hash, data_files=files, cache_dir=cache, **options)


def options_of(config: datasets.BuilderConfig) -> dict[str, Any]:
    """How the files are to be read, where it is not the default, such as the tabs of a .tsv."""
    default, not_reading = vars(type(config)()), vars(datasets.BuilderConfig())
    return {name: value for name, value in vars(config).items() if name not in not_reading and value != default[name]}
