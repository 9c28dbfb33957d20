"""Readers of data sets that are not JSONL: JSON lists, CSV, Parquet and Arrow. Each yields its rows with their places.

Reads files, and is asked by the rows of `loadgen.formats`; what a row means is for `core/workload/dataset.py`.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadgen.core import format
from loadgen.core.errors import UserError
from loadgen.core.workload.data_files import LocatedRow, is_conversation

TOGETHER = 100  # rows of a table that are taken at once
FREE_GROWTH, MOST_GROWTH = (
    1 << 30,
    200,
)  # the texts of a table may be 1 GiB, or so many times the size of its file
VALUE = 32  # bytes of one that is no text, as a row holds it
_CELL_LIMIT = 1 << 30


def json_list(file: Path) -> Iterator[LocatedRow]:
    data = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        rows = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (ValueError, RecursionError) as error:
        offset = re.search(r"\(byte (\d+)\)", str(error))
        line = "" if offset is None else f":{data.count(bytes([10]), 0, int(offset[1])) + 1}"
        raise UserError(
            "invalid_syntax",
            "begins like a JSON list and is none",
            f"{file}{line}",
            "one list of objects in the file, or JSONL: an object or a list of messages per line",
        ) from None
    for number, raw in enumerate(rows, 1):
        try:
            row = msgspec.json.decode(raw)
        except (ValueError, RecursionError) as error:
            raise UserError(
                "invalid_syntax", f"not JSON: {error}", f"{file}: row {number}"
            ) from None
        if is_conversation(row):
            row = {"messages": row}
        if not isinstance(row, dict):
            raise UserError(
                "wrong_type",
                "not a JSON object",
                f"{file}: row {number}",
                'objects like {"prompt": "..."}',
            )
        yield f"{file}: row {number}", row


def cells(file: Path) -> Iterator[LocatedRow]:
    """Rows of a CSV file under the names of its first line; empty cells are left out, and JSON in a cell is read."""
    csv.field_size_limit(_CELL_LIMIT)
    reader = None
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(
                opened, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True
            )
            line = 2
            _check_separator(file, reader.fieldnames or ())
            for row in reader:
                if None in row:
                    what = "more cells than the first line has names"
                    raise UserError(
                        "invalid_syntax", what, f"{file}:{line}", "quote cells with commas"
                    )
                yield f"{file}:{line}", {name: _cell(text) for name, text in row.items() if text}
                line = reader.line_num + 1
    except UnicodeDecodeError:
        raise UserError(
            "wrong_encoding", "not UTF-8", str(file), "save the file as UTF-8"
        ) from None
    except csv.Error as error:
        where = f"{file}:{reader.line_num}" if reader else str(file)
        raise UserError(
            "invalid_syntax",
            f"not CSV: {error}",
            where,
            "cells with commas, quotes or line ends stand in quotes",
        ) from None


def _check_separator(file: Path, names: Sequence[str]) -> None:
    """Raise UserError if the names in the first line are separated by semicolons or tabs."""
    if len(names) != 1:
        return
    for separator, word in ((";", "semicolons"), ("\t", "tabs")):
        if separator in names[0]:
            problem = f"the columns are separated by {word}, not by commas"
            hint = "save the file with commas; a file with tabs may be called .tsv"
            raise UserError("wrong_format", problem, f"{file}:1", hint)


def _cell(text: str) -> Any:
    if text[0] in "[{" or re.fullmatch(r"[0-9]{1,9}(\.0{1,3})?", text):
        try:
            return msgspec.json.decode(text)
        except (ValueError, RecursionError):
            return text
    return text


def parquet(file: Path) -> Iterator[LocatedRow]:
    return _tables(file, "Parquet")


def arrow(file: Path) -> Iterator[LocatedRow]:
    return _tables(file, "Arrow")


def _tables(file: Path, form: str) -> Iterator[LocatedRow]:
    """Rows of a Parquet file, or of an Arrow file as the package `datasets` keeps them. Nulls are left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number, size, own = 0, 0, file.stat().st_size

    def check(size: int) -> None:
        if size > max(FREE_GROWTH, MOST_GROWTH * own):
            what = f"its rows unpack to more than {format.size(size)}, {size / own:,.0f} times its size"
            raise UserError(
                "too_large", what, f"{file}: row {number + 1}", "no data set is like that"
            )

    try:
        if form == "Parquet":
            opened = pq.ParquetFile(file)
            check(VALUE * _said(opened.metadata))
        for batch in opened.iter_batches(TOGETHER) if form == "Parquet" else _arrow_batches(file):
            batch.validate(full=True)  # reading a damaged Arrow file would end the process
            for first in range(0, batch.num_rows, TOGETHER):
                rows = batch.slice(first, TOGETHER)
                check(size + VALUE * sum(map(_values, rows.columns)))
                for row in rows.to_pylist():
                    size += _size(row)
                    check(size)
                    number += 1
                    yield f"{file}: row {number}", _plain(row)
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        KeyError,
        OverflowError,
    ) as error:  # the last: dates of no year
        if (
            isinstance(error, OSError) and error.errno is not None
        ):  # of the disk; those of Arrow have no number
            raise
        what = str(error).splitlines()[0].partition(".")[0] if str(error) else type(error).__name__
        raise UserError(
            "damaged_file", f"not {form}: {what}", str(file), "is the file whole?"
        ) from None


def _arrow_batches(file: Path) -> Iterator[Any]:
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            opened = pa.ipc.open_file(source)
            yield from (opened.get_batch(number) for number in range(opened.num_record_batches))
        else:
            source.seek(0)
            yield from pa.ipc.open_stream(source)


def _said(metadata: Any) -> int:
    """How many values the columns of a Parquet file have, as it says: those of one list may be 2^31 in a few bytes."""
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return sum(group.column(i).num_values for group in groups for i in range(group.num_columns))


def _values(column: Any) -> int:
    """How many values a column has, those of its lists and structs too."""
    from pyarrow import types

    if types.is_map(column.type):
        ends = column.offsets
        return len(column) + 2 * int(ends[-1].as_py() - ends[0].as_py())
    if types.is_struct(column.type):
        return len(column) + sum(map(_values, column.flatten()))
    return len(column) + (_values(column.flatten()) if hasattr(column, "value_lengths") else 0)


def _size(value: Any) -> int:
    """About the bytes of a value: a dictionary of Parquet gives one long text to any number of rows."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return (
        sum(map(_size, value))
        if isinstance(value, list)
        else len(value)
        if isinstance(value, str | bytes)
        else VALUE
    )


def _plain(value: Any) -> Any:
    """A row as JSON has it: text that is stored as bytes is text; nulls and bytes that are no text are left out."""
    if isinstance(value, dict):
        return {key: part for key, raw in value.items() if (part := _plain(raw)) is not None}
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return [_plain(part) for part in value] if isinstance(value, list) else value
