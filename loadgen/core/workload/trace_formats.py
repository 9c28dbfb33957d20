"""What a format of traces is, and how the table `loadgen.formats` is asked for one. Pure.

The readers of the formats are in `interop/traces.py`. What is wrong with a row is a `Wrong`, which gets its line where
the file is read.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.format import shortened
from loadgen.core.units import MOST_TOKENS, UNIT_NS, TimeUnit, Wrong
from loadgen.formats import FORMATS, FormatRow


def known_formats() -> str:
    """The formats that are read, for people."""
    lines = ", ".join(row.tool for row in FORMATS.own if row.trace)
    tables = ", ".join(row.tool for row in FORMATS.own if row.columns)
    return f"known: {lines} (JSONL), {tables} (CSV, and Parquet); gzip and zstd of all"


def hint_for(line: str) -> str:
    """Return a hint for a file whose first line is no trace that is known."""
    if ";" in line and find_csv_format(line.replace(";", ",")) is not None:
        return "the columns are separated by semicolons; a CSV file has commas between them"
    return known_formats()


class TraceRow(NamedTuple):
    """One request of a trace; time in ns, relative to any origin."""

    at_ns: int
    input_tokens: int
    output_tokens: int
    hashes: Sequence[int] = ()
    block: float = 0.0  # tokens per hash; 0: use the size inferred for the whole file
    session: str = ""  # of an agent: a sub-agent has its own
    group: str = (
        ""  # the whole session, where the trace names it beside its parts; "": as `session`
    )
    took_ns: int = -1  # from the request to the end of its answer; -1: not told, as is the next
    pause_ns: int = -1  # from the end of the answer before in this session
    label: str = ""  # the kind of request that it is, by what its application called it
    fields: str = ""  # JSON: further fields of the body that it asks for, by name
    timed: bool = True  # False: the trace says only what it waits for in its session, and `at_ns` is its start


class TraceColumns(NamedTuple):
    """Many requests at once. `hashes`: of one request after the other, as many as `hash_counts` says.

    sessions, took_ns: of each request as in `TraceRow`, or empty where the trace does not tell them.
    """

    at_ns: NDArray[np.int64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    hashes: Sequence[int] = ()
    hash_counts: Sequence[int] = ()
    sessions: Sequence[str] = ()
    took_ns: Sequence[int] = ()


class TraceFormat(NamedTuple):
    """A format of a trace in lines.

    Attributes:
        name: The name of the format, as people call it.
        rows: Returns the requests of one line. Raises Wrong.
        in_order: Whether lines must be in order of arrival.
        together: Returns the requests of many plain lines, several times faster, or None if one of
            the lines is not plain.
        in_unit: Returns this format with its times in a unit. None if the format defines the unit.
        default_unit: The unit of whole numbers where `in_unit` is set, if it is not milliseconds.
    """

    name: str
    rows: Callable[[str], Sequence[TraceRow]]
    in_order: bool = True
    together: Callable[[Sequence[str]], TraceColumns | None] | None = None
    in_unit: Callable[[TimeUnit], TraceFormat] | None = None
    default_unit: TimeUnit | None = None


def find_json_format(first: Mapping[str, Any]) -> TraceFormat | None:
    """The format of a JSONL file, by its first line. Raises Wrong for prompts."""
    for row in FORMATS.own:
        if (found := _format_of(row, first)) is not None:
            return found
    if first.keys() & {"messages", "prompt", "conversations"}:
        raise Wrong(
            "wrong_format", "these are prompts, not a trace", "prompts of your own: --dataset FILE"
        )
    others = (_format_of(row, first) for row in FORMATS.plugin_rows())
    return next((found for found in others if found is not None), None)


def _format_of(row: FormatRow, first: Mapping[str, Any]) -> TraceFormat | None:
    """Return the format of a trace with this first line, or None if a row does not know it."""
    return None if row.trace is None else FORMATS.guard(row, row.trace)(first)


def find_table_format(columns: Sequence[str]) -> FormatRow | None:
    """The format of a table, by the names of its columns in small letters."""
    for row in FORMATS.rows():
        if row.columns and set(row.columns) <= set(columns):
            return row
    return None


def find_csv_format(header: str) -> TraceFormat | None:
    """The format of a CSV file, by its first line."""
    columns = [name.strip().lower() for name in next(csv.reader([header]), [])]
    if (found := find_table_format(columns)) is None:
        return None
    places = [columns.index(column) for column in found.columns]
    places += [
        columns.index(column) if column in columns else -1 for column in (found.session, found.took)
    ]
    assert found.time is not None, "a format with columns parses times"
    parse_time = FORMATS.guard(found, found.time)

    def read_times_with(parse_time: Callable[[str], int]) -> TraceFormat:
        rows = functools.partial(_csv_row, found, places, len(columns), parse_time)
        return TraceFormat(found.tool, rows)

    def read_times_in(unit: TimeUnit) -> TraceFormat:
        return read_times_with(lambda text: time_ns(parse_number(text), UNIT_NS[unit]))

    fixed = read_times_with(parse_time)
    if not found.any_unit:
        return fixed
    return fixed._replace(in_unit=read_times_in, default_unit="s")


def json_object(line: str) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Wrong("invalid_syntax", f"not JSON: {error}", "one JSON object per line") from None
    if not isinstance(row, dict):
        raise Wrong("wrong_type", "not a JSON object", "one JSON object per line")
    return row


def one_request_per_line(
    parse: Callable[[dict[str, Any]], TraceRow],
) -> Callable[[str], Sequence[TraceRow]]:
    """For a format with one request in each line."""
    return lambda line: (parse(json_object(line)),)


def _csv_row(
    found: FormatRow, places: list[int], fields: int, parse_time: Callable[[str], int], line: str
) -> Sequence[TraceRow]:
    try:
        values = next(csv.reader([line]))
    except (csv.Error, StopIteration) as error:
        raise Wrong("invalid_syntax", f"not CSV: {error}", "") from None
    if len(values) < fields:
        raise Wrong("missing_value", f"{len(values)} fields, the first line names {fields}", "")
    at, read, write, session, took = (
        values[place].strip() if place >= 0 else "" for place in places
    )
    input_tokens = token_count(parse_number(read), found.columns[1], 1)
    output_tokens = token_count(parse_number(write), found.columns[2], 0)
    took_ns = duration_ns(parse_number(took), found.took) if took else -1
    return (
        TraceRow(parse_time(at), input_tokens, output_tokens, session=session, took_ns=took_ns),
    )


def parse_number(text: str) -> int | float | str:
    """The number that a field of a CSV file holds; a text that is no finite number as it stands."""
    try:
        value = float(text)
    except ValueError:
        return text
    return text if not math.isfinite(value) else int(value) if value.is_integer() else value


def duration_ns(value: Any, name: str, scale: float = 1e9) -> int:
    """Ns of a number in units of `scale` ns. Raises Wrong."""
    is_number = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )
    if not is_number or not 0 <= value * scale < LATEST_NS:
        raise Wrong(
            "invalid_value", f"{name} is {shortened(value)}", "a length of time, zero or more", name
        )
    ns: int = round(value * scale)
    return ns


LATEST_NS = 9e18  # 285 years: what 64 bits hold


def time_ns(value: Any, scale: float) -> int:
    """Return the ns of a time in units of `scale` ns. Raises Wrong."""
    is_number = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )
    if not is_number or abs(value) * scale > LATEST_NS:
        raise Wrong("invalid_value", f"timestamp is {shortened(value)}", "a number", "timestamp")
    ns: int = int(value) * int(scale) + round((value - int(value)) * scale)
    return ns


def token_count(value: Any, name: str, least: int) -> int:
    """Return a number of tokens; 12.0 is the whole number 12. Raises Wrong for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not least <= value <= MOST_TOKENS:
        hint = f"a whole number from {least} to {MOST_TOKENS:,}"
        raise Wrong("invalid_value", f"{name} is {shortened(value)}", hint, name)
    return int(value)
