"""Data sets in text files that are not JSONL: JSON lists and CSV. Rows of `loadgen.formats`.

Each reader yields the rows with their location. `core/workload/dataset_rows.py` parses the rows.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadgen.core.errors import UserError
from loadgen.core.workload.data_files import LocatedRow
from loadgen.core.workload.dataset_rows import wrap_conversation

MAX_CELL_CHARACTERS = 1 << 30
"""The default of `csv` is too small for long prompts."""
WHOLE_NUMBER = re.compile(r"[0-9]{1,9}(\.0{1,3})?")
"""A cell that is read as a number. Longer digits may be an id, and pandas writes 12 as 12.0."""


def read_json_list(file: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a file with one JSON list. A list of messages is a row, too.

    Raises:
        UserError: The file is no JSON list, or a row is no object.
    """
    for row_number, encoded_row in enumerate(_split_json_list(file), 1):
        location = f"{file}: row {row_number}"
        yield location, _decode_json_row(encoded_row, location)


def _split_json_list(file: Path) -> list[msgspec.Raw]:
    """Return the items of the JSON list in a file, still encoded.

    Rows are decoded one by one later, so that an error names the row.

    Raises:
        UserError: The file is no JSON list.
    """
    data = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        return msgspec.json.decode(data, type=list[msgspec.Raw])
    except (ValueError, RecursionError) as error:
        line_suffix = _line_of_json_error(error, data)
        raise UserError(
            "invalid_syntax",
            "the file begins like a JSON list, but is not valid JSON",
            f"{file}{line_suffix}",
            (
                "write one list of objects in the file, or JSONL: an object or a list of "
                "messages per line"
            ),
        ) from None


def _decode_json_row(encoded_row: msgspec.Raw, location: str) -> dict[str, Any]:
    """Return a row as an object. Raises UserError, with `location` as its place, if it is none."""
    try:
        row = wrap_conversation(msgspec.json.decode(encoded_row))
    except (ValueError, RecursionError) as error:
        raise UserError("invalid_syntax", f"not JSON: {error}", location) from None

    if not isinstance(row, dict):
        hint = 'write objects like {"prompt": "..."}'
        raise UserError("wrong_type", "the row is not a JSON object", location, hint)

    return row


def _line_of_json_error(error: Exception, data: bytes) -> str:
    """Return the line of an error in JSON as ":12", or "" if msgspec does not name the byte."""
    offset = re.search(r"\(byte (\d+)\)", str(error))
    if offset is None:
        return ""
    lines_before = data.count(b"\n", 0, int(offset[1]))
    return f":{lines_before + 1}"


def read_csv(file: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a CSV file, or of a TSV file, by the names in its first line.

    Empty cells are left out. Cells that contain JSON or a whole number are decoded.

    Raises:
        UserError: The file is no CSV in UTF-8, or a row has more cells than the first line.
    """
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            yield from _read_csv_rows(file, opened)
    except UnicodeDecodeError:
        raise UserError(
            "wrong_encoding", "not UTF-8", str(file), "save the file as UTF-8"
        ) from None


def _read_csv_rows(file: Path, lines: Iterable[str]) -> Iterator[LocatedRow]:
    """Yield the rows in the lines of a CSV file. The location of a row is its first line."""
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        _check_separator(file, reader.fieldnames or ())
        first_line = 2
        for row in reader:
            location = f"{file}:{first_line}"
            _check_cell_count(row, location)
            yield location, {name: _parse_cell(text) for name, text in row.items() if text}
            # A row may span several lines.
            first_line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            "invalid_syntax",
            f"not CSV: {error}",
            f"{file}:{reader.line_num}",
            "put cells with commas, quotes or line breaks in quotes",
        ) from None


def _check_cell_count(row: Mapping[str | object, object], location: str) -> None:
    """Raise UserError if a row has more cells than names. DictReader stores these under None."""
    if None in row:
        raise UserError(
            "invalid_syntax",
            "the row has more cells than the header line",
            location,
            "put cells that contain commas in quotes",
        )


def _check_separator(file: Path, names: Sequence[str]) -> None:
    """Raise UserError if the names in the first line are separated by semicolons or tabs."""
    if len(names) != 1:
        return
    for separator, word in ((";", "semicolons"), ("\t", "tabs")):
        if separator in names[0]:
            problem = f"the columns are separated by {word} instead of commas"
            hint = "save the file with commas, or name a file with tabs .tsv"
            raise UserError("wrong_format", problem, f"{file}:1", hint)


def _parse_cell(text: str) -> Any:
    """Return the value in a cell: an object, a list, a whole number, or else the text itself."""
    is_json = text.startswith(("[", "{")) or WHOLE_NUMBER.fullmatch(text) is not None
    if not is_json:
        return text
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text
