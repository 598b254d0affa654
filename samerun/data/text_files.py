"""Builders for `datasets` that leave each text as it is written.

A builder needs a room of its own: `datasets` replaces `os`, `open` and others in the module where one is defined.
"""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.json
from datasets.builder import Key
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json import json as module_of_json
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


class JsonFiles(Json):
    """Dates are texts. Where all of a part are dates, Arrow would make times of them, and lose how they are written."""

    def download_and_prepare(self, *args, **options) -> None:
        reader = SimpleNamespace(**vars(pyarrow.json) | {"read_json": read_json})
        with mock.patch.object(module_of_json, "paj", reader):  # Json gives Arrow's reader no schema.
            super().download_and_prepare(*args, **options)


def read_json(opened, read_options: pyarrow.json.ReadOptions) -> pa.Table:
    """As that of pyarrow.json, but what it takes for times is read as text."""
    table = pyarrow.json.read_json(opened, read_options)
    schema = pa.schema([with_texts_for_times(field) for field in table.schema])
    if schema == table.schema:
        return table
    opened.seek(0)
    return pyarrow.json.read_json(opened, read_options, pyarrow.json.ParseOptions(explicit_schema=schema))


def with_texts_for_times(field: pa.Field) -> pa.Field:
    kind = field.type
    if pa.types.is_timestamp(kind):
        kind = pa.string()
    elif pa.types.is_list(kind):
        kind = pa.list_(with_texts_for_times(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct(map(with_texts_for_times, kind))
    return field.with_type(kind)


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
