"""What the format of a trace is, and how the format of a file is found in `loadgen.formats`.

The readers of the formats are in `interop/traces.py`. A mistake in a row is raised as
`InvalidValueError`. It gets its line where the file is read.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.format import shortened
from loadgen.core.units import MOST_TOKENS, NS_PER_S, UNIT_NS, InvalidValueError, TimeUnit
from loadgen.formats import FORMATS, FormatRow

UNKNOWN_NS = -1
"""A duration that the trace does not contain."""
MAX_TIME_NS = 9e18
"""About 285 years, a little less than the largest time in ns that 64 bits hold."""
DATASET_FIELDS = {"messages", "prompt", "conversations"}
"""Fields of data sets, for which a trace may be mistaken: they are prompts without times."""


class TraceRow(NamedTuple):
    """One request of a trace.

    Attributes:
        at_ns: When it was sent, relative to any origin.
        input_tokens: The tokens of its prompt.
        output_tokens: The tokens of its response.
        hashes: The hashes of the blocks of its prompt, in order.
        block_tokens: The tokens per hash. 0 means the size that is inferred for the whole file.
        session: The name of its conversation or agent. A sub-agent has a name of its own.
        group: The name of the whole session with all agents. "" means that of `session`.
        duration_ns: The time from the request to the end of its response.
        pause_ns: The time from the end of the response before it in its session.
        label: The kind of request, as its application named it.
        fields: Further body fields that it requests, as JSON.
        has_time: False if the trace only says what the request waits for. `at_ns` is then the start
            of its session.
    """

    at_ns: int
    input_tokens: int
    output_tokens: int
    hashes: Sequence[int] = ()
    block_tokens: float = 0.0
    session: str = ""
    group: str = ""
    duration_ns: int = UNKNOWN_NS
    pause_ns: int = UNKNOWN_NS
    label: str = ""
    fields: str = ""
    has_time: bool = True


class TraceColumns(NamedTuple):
    """Many requests of a trace at once, with the columns of `TraceRow`.

    Attributes:
        at_ns: When they were sent.
        input_tokens: The tokens of their prompts.
        output_tokens: The tokens of their responses.
        hashes: The hashes of all prompts, one request after the other.
        hash_counts: The number of hashes of each request.
        sessions: The session of each request. Empty if the trace has none.
        duration_ns: How long each request took. Empty if the trace does not say it.
    """

    at_ns: NDArray[np.int64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    hashes: Sequence[int] = ()
    hash_counts: Sequence[int] = ()
    sessions: Sequence[str] = ()
    duration_ns: Sequence[int] = ()


class TraceFormat(NamedTuple):
    """The format of a trace that consists of lines.

    Attributes:
        name: The name of the format in reports.
        parse_line: Returns the requests of one line. Raises InvalidValueError.
        must_be_ordered: Whether lines must be in order of arrival.
        parse_lines: Returns the requests of many lines of the most common form, several times
            faster, or None if one of the lines has another form.
        with_unit: Returns this format with its times in a unit. None if the format defines the
            unit.
        default_unit: The unit of whole numbers where `with_unit` is set, if it is not milliseconds.
    """

    name: str
    parse_line: Callable[[str], Sequence[TraceRow]]
    must_be_ordered: bool = True
    parse_lines: Callable[[Sequence[str]], TraceColumns | None] | None = None
    with_unit: Callable[[TimeUnit], TraceFormat] | None = None
    default_unit: TimeUnit | None = None


# -- finding the format of a file ----------------------------------------------------------------


def describe_known_formats() -> str:
    """Return a text that lists the formats that can be read."""
    line_formats = ", ".join(row.tool for row in FORMATS.builtin_rows if row.trace)
    table_formats = ", ".join(row.tool for row in FORMATS.builtin_rows if row.columns)
    return (
        f"supported: {line_formats} (JSONL), {table_formats} (CSV and Parquet); all "
        "may be compressed with gzip or zstd"
    )


def hint_for(first_line: str) -> str:
    """Return a hint for a file whose first line belongs to no known format.

    It may be a known format of CSV with semicolons, as some spreadsheets write it.
    """
    if ";" in first_line and find_csv_format(first_line.replace(";", ",")) is not None:
        return "the columns are separated by semicolons; separate them by commas"
    return describe_known_formats()


def find_json_format(first_row: Mapping[str, object]) -> TraceFormat | None:
    """Return the format of a JSONL file by its first row, or None if it is not known.

    Built-in formats come first. Then a data set is recognized, so that plug-ins are not imported
    for it, and then the formats of plug-ins. Raises InvalidValueError if the file is a data set.
    """
    builtin_format = _find_matching_format(FORMATS.builtin_rows, first_row)
    if builtin_format is not None:
        return builtin_format

    if first_row.keys() & DATASET_FIELDS:
        problem = "these are prompts, not a trace"
        raise InvalidValueError(
            "wrong_format", problem, "use --dataset FILE to send your own prompts"
        )

    return _find_matching_format(FORMATS.plugin_rows(), first_row)


def _find_matching_format(
    formats: Iterable[FormatRow], first_row: Mapping[str, object]
) -> TraceFormat | None:
    """Return the first of several formats that the first row of a trace belongs to, or None.

    The function `trace` of a format returns None for a row that it does not recognize. It may come
    from a plug-in, so it is called through `guard`, which turns a crash into an error message.
    """
    for known_format in formats:
        if known_format.trace is None:
            continue  # It is no format of traces.
        find_trace_format = FORMATS.guard(known_format, known_format.trace)
        trace_format = find_trace_format(first_row)
        if trace_format is not None:
            return trace_format
    return None


def find_table_format(columns: Sequence[str]) -> FormatRow | None:
    """Return the format of a table by the names of its columns in lower case."""
    for row in FORMATS.rows():
        if row.columns and set(row.columns) <= set(columns):
            return row
    return None


class RequiredColumns(NamedTuple):
    """The names, in lower case, of the columns that every trace with columns has."""

    time: str
    input_tokens: str
    output_tokens: str


def required_columns(table_format: FormatRow) -> RequiredColumns:
    """Return the names of the columns that a file of a format must have."""
    time, input_tokens, output_tokens = table_format.columns
    return RequiredColumns(time, input_tokens, output_tokens)


# -- CSV -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CsvColumns:
    """The positions of the columns in a line, None for those that the file does not have.

    `count` is the number of all columns of the file.
    """

    time: int
    input_tokens: int
    output_tokens: int
    session: int | None
    duration: int | None
    count: int


def find_csv_format(header: str) -> TraceFormat | None:
    """Return the format of a CSV file by its first line, or None if it is not known.

    The first line has the names of the columns, which may be in any order and in any case.

    Some formats do not define the unit of their times. Then the result also has the unit that is
    assumed (seconds), and a function `with_unit` that returns the format for another unit.
    """
    names = [name.strip().lower() for name in next(csv.reader([header]), [])]
    table_format = find_table_format(names)
    if table_format is None:
        return None

    columns = _find_csv_columns(names, table_format)
    assert table_format.time is not None, "a format with columns parses times"

    # The function may come from a plug-in. `guard` turns a crash of it into an error message.
    parse_time = FORMATS.guard(table_format, table_format.time)
    parser = _CsvLineParser(table_format, columns, parse_time)
    if table_format.any_unit:
        return parser.trace_format()._replace(with_unit=parser.format_in_unit, default_unit="s")

    return parser.trace_format()


def _find_csv_columns(names: list[str], table_format: FormatRow) -> _CsvColumns:
    """Return the positions of the columns of a format in a file.

    `names` are the names of all columns of the file in their order, converted to lower case.
    """
    required = required_columns(table_format)
    return _CsvColumns(
        time=names.index(required.time),
        input_tokens=names.index(required.input_tokens),
        output_tokens=names.index(required.output_tokens),
        session=_index_or_none(names, table_format.session),
        duration=_index_or_none(names, table_format.duration),
        count=len(names),
    )


def _index_or_none(names: list[str], name: str) -> int | None:
    """Return the position of an optional column, or None if the file does not have it."""
    return names.index(name) if name in names else None


@dataclass(frozen=True)
class _CsvLineParser:
    """Parses the lines of a CSV file.

    Attributes:
        table_format: The format of the file, for the names of columns in error messages.
        columns: The positions of the columns in a line.
        parse_time: Converts the text of a time to ns. Raises InvalidValueError.
    """

    table_format: FormatRow
    columns: _CsvColumns
    parse_time: Callable[[str], int]

    def trace_format(self) -> TraceFormat:
        """Return the format of a file whose lines this parser reads."""
        return TraceFormat(self.table_format.tool, parse_line=self.parse_line)

    def format_in_unit(self, unit: TimeUnit) -> TraceFormat:
        """Return the format of the same file if its times are numbers of a unit."""

        def parse_time(text: str) -> int:
            return parse_time_ns(parse_number(text), UNIT_NS[unit])

        return replace(self, parse_time=parse_time).trace_format()

    def parse_line(self, line: str) -> Sequence[TraceRow]:
        """Return the request of a line.

        The result is a sequence of one request, because `TraceFormat` allows several in a line.
        Raises InvalidValueError if a value of the line is missing or not valid.
        """
        columns = self.columns
        values = _split_csv_line(line, columns.count)
        names = required_columns(self.table_format)
        input_tokens = parse_token_count(
            parse_number(values[columns.input_tokens]), names.input_tokens, minimum=1
        )

        # A request that failed has no output tokens.
        output_tokens = parse_token_count(
            parse_number(values[columns.output_tokens]), names.output_tokens, minimum=0
        )
        duration_ns = _parse_optional_duration(values, columns.duration, self.table_format.duration)
        request = TraceRow(
            at_ns=self.parse_time(values[columns.time]),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            duration_ns=duration_ns,
            session="" if columns.session is None else values[columns.session],
        )

        return (request,)


def _parse_optional_duration(values: list[str], position: int | None, name: str) -> int:
    """Return the duration of a request in ns, UNKNOWN_NS without the column or without a value.

    Args:
        values: The values in a line of a CSV file.
        position: The position of the duration, or None if the file has no such column.
        name: The name of the column, for the error.

    Raises:
        InvalidValueError: The value is no duration.
    """
    if position is None or not values[position]:
        return UNKNOWN_NS
    return parse_duration_ns(parse_number(values[position]), name)


def _split_csv_line(line: str, column_count: int) -> list[str]:
    """Return the values in a line without blanks around them.

    Raises InvalidValueError if the line is no CSV or has fewer values than there are columns.
    """
    try:
        values = next(csv.reader([line]))
    except (csv.Error, StopIteration) as error:
        raise InvalidValueError("invalid_syntax", f"not CSV: {error}", "") from None

    if len(values) < column_count:
        problem = f"the row has {len(values)} fields, but the first line names {column_count}"
        raise InvalidValueError("missing_value", problem, "")

    return [value.strip() for value in values]


# -- values of rows ------------------------------------------------------------------------------


def parse_json_object(line: str) -> dict[str, Any]:
    """Return the JSON object in a line. Raises InvalidValueError if the line is none."""
    hint = "write one JSON object per line"
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidValueError("invalid_syntax", f"not JSON: {error}", hint) from None

    if not isinstance(row, dict):
        raise InvalidValueError("wrong_type", "the row is not a JSON object", hint)

    return row


def one_request_per_line(
    parse: Callable[[dict[str, Any]], TraceRow],
) -> Callable[[str], Sequence[TraceRow]]:
    """Build the function that parses a line of a JSONL format with one request in each line.

    `TraceFormat.parse_line` takes a line and returns a sequence of requests. A format with one
    request in each line only has to define `parse`, which takes the JSON object of a line and
    returns the request.
    """

    def parse_line(line: str) -> Sequence[TraceRow]:
        return (parse(parse_json_object(line)),)

    return parse_line


def parse_number(text: str) -> int | float | str:
    """Return the number in a field of a CSV file, or the text if it is no finite number."""
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value):
        return text
    return int(value) if value.is_integer() else value


def parse_duration_ns(value: Any, name: str, unit_ns: float = float(NS_PER_S)) -> int:
    """Convert a duration in a row of a trace to ns.

    Args:
        value: The number in the row.
        name: The name of the field, for the error.
        unit_ns: The unit of the number in ns, by default seconds.

    Raises:
        InvalidValueError: The value is no number, negative, or too large for 64 bits.
    """
    if not is_finite_number(value) or not 0 <= value * unit_ns < MAX_TIME_NS:
        problem = f"{name} is {shortened(value)}"
        raise InvalidValueError(
            "invalid_value", problem, "must be a duration of zero or more", name
        )
    ns: int = round(value * unit_ns)
    return ns


def parse_time_ns(value: Any, unit_ns: float) -> int:
    """Convert a time in a row of a trace to ns.

    `unit_ns` is how many ns the unit of the time has, a whole number. Times in ns since 1970 have
    more digits than a float, so only the fraction of a unit is multiplied as a float.

    Raises InvalidValueError if the value is no number, or too large for 64 bits.
    """
    if not is_finite_number(value) or abs(value) * unit_ns > MAX_TIME_NS:
        problem = f"timestamp is {shortened(value)}"
        raise InvalidValueError("invalid_value", problem, "a number", "timestamp")
    whole_units = int(value)
    fraction = value - whole_units
    ns: int = whole_units * int(unit_ns) + round(fraction * unit_ns)
    return ns


def parse_token_count(value: Any, name: str, minimum: int) -> int:
    """Return a number of tokens, at least `minimum`. A float such as 12.0 is the whole number 12.

    `name` is the name of the field. Raises InvalidValueError if the value is no such number.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not minimum <= value <= MOST_TOKENS:
        hint = f"must be an integer from {minimum} to {MOST_TOKENS:,}"
        raise InvalidValueError("invalid_value", f"{name} is {shortened(value)}", hint, name)
    return int(value)


def is_finite_number(value: Any) -> TypeGuard[int | float]:
    """Return True for a finite number that a float can hold.

    JSON may have integers of hundreds of digits, which no float can hold. A boolean, which Python
    counts as an integer, is no number.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
