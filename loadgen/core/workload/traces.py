"""Read traces of real traffic: arrival times, lengths and shared prefixes of requests.

The whole file is checked in one pass, and errors name file:line. Only numbers are kept of a trace,
16 bytes for each request without hashes. `requests/trace_prompts.py` makes the texts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from loadgen.core.errors import UserError, of_reading
from loadgen.core.units import InvalidValueError, TimeUnit
from loadgen.core.workload import trace_files, trace_formats
from loadgen.core.workload.request_kinds import FromTrace
from loadgen.core.workload.stages import Replay
from loadgen.core.workload.trace import Trace
from loadgen.core.workload.trace_builder import TraceBuilder
from loadgen.core.workload.trace_files import NumberedLine
from loadgen.core.workload.trace_formats import TraceFormat
from loadgen.core.workload.trace_units import TRIAL_UNIT, UNIT_NAMES, decide_unit

if TYPE_CHECKING:
    from loadgen.core.workload.trace_columns import CheckedBatch

MAX_LINES = 20_000_000
LINES_PER_BATCH = 4_096
TRACES_CACHED = 4

TimeSlice = tuple[int, int | None]
"""Begin and end in ns from the first request on. An end of None is the end of the trace."""


class _FileFormat(NamedTuple):
    """The format of a file.

    Attributes:
        name: Its name in reports.
        needs_time_unit: Whether it does not define the unit of its times.
        default_unit: The unit of whole numbers then, or None for milliseconds.
    """

    name: str
    needs_time_unit: bool
    default_unit: TimeUnit | None = None


class _FileContent(NamedTuple):
    """The rows of a file, as they were read, and the format of the file."""

    rows: TraceBuilder
    format: _FileFormat

    def build_trace(self) -> Trace:
        """Return the trace. Raises CombinedError if rows have mistakes, UserError for no rows."""
        return self.rows.build(self.format.name)


class _FileVersion(NamedTuple):
    """A file as it is at a time. Another size or time of modification is another version."""

    path: Path
    size_bytes: int
    changed_ns: int


def read_trace(
    path: str | Path,
    *,
    time_slice: TimeSlice | None = None,
    skip_bad: bool = False,
    unit: TimeUnit | None = None,
) -> Trace:
    """Read a trace file, or the part of it in a slice of time. An unchanged file is read once.

    Args:
        path: The file.
        time_slice: The begin and end of the part to return, in ns from the first request; None for
            the complete trace.
        skip_bad: Leave out rows with mistakes, and count them.
        unit: The unit of the times, for formats that leave it open; None to infer it from the
            times.

    Raises:
        CombinedError: Rows have mistakes; these are the first MAX_ERRORS of them.
        UserError: The file as a whole cannot be read, or its format defines another unit.
    """
    path = Path(path)
    try:
        file_status = path.stat()
    except OSError as error:
        problem = f"cannot read the trace: {error.strerror}"
        error_code = of_reading(error)
        raise UserError(error_code, problem, str(path)) from None

    version = _FileVersion(path, file_status.st_size, file_status.st_mtime_ns)
    trace = _read_cached(version, skip_bad=skip_bad, unit=unit)
    return trace if time_slice is None else _select_times_cached(trace, time_slice)


def read_replayed_trace(replay: FromTrace | Replay) -> Trace:
    """Return the trace, or the part of it, that requests or arrivals replay."""
    path = replay.trace if isinstance(replay, FromTrace) else replay.file
    skip_bad = replay.on_bad_row == "skip"
    return read_trace(path, time_slice=replay.slice_ns, skip_bad=skip_bad, unit=replay.unit)


@functools.lru_cache(TRACES_CACHED)
def _select_times_cached(trace: Trace, time_slice: TimeSlice) -> Trace:
    """Return a part of a trace, the same object for the same part."""
    begin_ns, end_ns = time_slice
    return trace.select_times(begin_ns, end_ns)


@functools.lru_cache(TRACES_CACHED)
def _read_cached(version: _FileVersion, *, skip_bad: bool, unit: TimeUnit | None) -> Trace:
    """Read a trace, or return it from the cache if the file has not changed.

    `unit` is the unit of its times if the user specified it. Raises UserError if the format already
    defines the unit.
    """
    if unit is None:
        return _read_and_infer_unit(version.path, skip_bad=skip_bad)
    return _read_with_unit(version.path, unit, skip_bad=skip_bad)


def _read_with_unit(path: Path, unit: TimeUnit, *, skip_bad: bool) -> Trace:
    """Read a trace whose times are numbers of `unit`, as the user specified.

    Mistakes in the rows are raised first. If there are none, a UserError is raised if the format
    already defines the unit.
    """
    content = _read_file(path, unit, skip_bad=skip_bad)
    trace = content.build_trace()
    if not content.format.needs_time_unit:
        problem = f"the format {content.format.name} already defines the unit of its times"
        raise UserError("no_effect", problem, f"trace_unit {unit}", "leave trace_unit out")
    return replace(trace, time_unit=f"{UNIT_NAMES[unit]}, as specified")


def _read_and_infer_unit(path: Path, *, skip_bad: bool) -> Trace:
    """Read a trace, and infer the unit of its times if the format does not define it.

    The file is first read with the unit TRIAL_UNIT. The times of all its rows show which unit is
    plausible, and the file is read again if that is another one.
    """
    content = _read_file(path, TRIAL_UNIT, skip_bad=skip_bad)
    trace = content.build_trace()
    if not content.format.needs_time_unit:
        return trace

    decision = decide_unit(content.rows.times_ns(), content.format.default_unit)
    if decision.unit != TRIAL_UNIT:
        trace = _read_file(path, decision.unit, skip_bad=skip_bad).build_trace()

    return replace(trace, time_unit=f"{UNIT_NAMES[decision.unit]}, because {decision.reason}")


def _read_file(path: Path, unit: TimeUnit, *, skip_bad: bool) -> _FileContent:
    """Read all rows of a file, in Parquet or in lines.

    `unit` is the unit of its times if the format does not define one.
    """
    if trace_files.is_parquet(path):
        return _read_parquet(path, unit, skip_bad=skip_bad)
    with trace_files.open_lines(path) as lines:
        documents = _refuse_too_many(trace_files.split_documents(lines))
        return _read_lines(path, documents, unit, skip_bad=skip_bad)


def _read_parquet(path: Path, unit: TimeUnit, *, skip_bad: bool) -> _FileContent:
    """Read the rows of a file in Parquet.

    Reading stops as soon as the builder has as many mistakes as are reported. A batch describes
    only its first mistakes, and the others are counted.
    """
    # Runs without a Parquet file do not need this module, which imports pyarrow.
    from loadgen.core.workload.trace_columns import open_parquet_trace

    builder = TraceBuilder(path, skip_bad=skip_bad, must_be_ordered=True)
    with open_parquet_trace(path, unit) as table:
        file_format = _FileFormat(table.format.name, table.format.needs_time_unit)
        for batch in table.batches:
            _add_batch(builder, batch)
            if builder.has_enough_errors:
                break

    return _FileContent(builder, file_format)


def _add_batch(builder: TraceBuilder, batch: CheckedBatch) -> None:
    """Add the rows of a Parquet file in one batch, or only mistakes if there are too many."""
    for bad_row in batch.first_bad_rows:
        builder.add_bad_row(bad_row.error, f"{builder.path}, row {bad_row.row_number:,}")
        if builder.has_enough_errors:
            return
    undescribed_rows = batch.bad_row_count - len(batch.first_bad_rows)
    builder.count_bad_rows(undescribed_rows)
    builder.add_columns(batch.columns)


def _refuse_too_many(lines: Iterator[NumberedLine]) -> Iterator[NumberedLine]:
    """Yield the lines of a file. Raises UserError if there are more than MAX_LINES."""
    for number, line in lines:
        if number > MAX_LINES:
            problem = f"the trace has more than {MAX_LINES:,} lines"
            raise UserError("too_large", problem, "the trace", "split it into several files")
        yield number, line


def _read_lines(
    path: Path, lines: Iterator[NumberedLine], unit: TimeUnit, *, skip_bad: bool
) -> _FileContent:
    """Read the rows of a text file (CSV or JSON), whose first line shows its format.

    Args:
        path: The file, for error messages.
        lines: Its lines with their numbers.
        unit: The unit of its times, if the format does not define one.
        skip_bad: Leave out rows with mistakes, and count them.

    Raises:
        UserError: The file is empty or its format is not known.
    """
    first = next(lines, None)
    if first is None:
        hint = trace_formats.describe_known_formats()
        raise UserError("empty_file", "the trace has no requests", str(path), hint)

    _, first_line = first
    trace_format = _find_format(path, first_line)
    row_format = _format_in_unit(trace_format, unit)
    builder = TraceBuilder(path, skip_bad=skip_bad, must_be_ordered=row_format.must_be_ordered)

    # The first line of a CSV file only names the columns.
    rows = itertools.chain([first], lines) if _is_json(first_line) else lines
    add_lines(builder, row_format, rows)

    file_format = _FileFormat(
        name=trace_format.name,
        needs_time_unit=trace_format.with_unit is not None,
        default_unit=trace_format.default_unit,
    )
    return _FileContent(builder, file_format)


def _format_in_unit(trace_format: TraceFormat, unit: TimeUnit) -> TraceFormat:
    """Return a format with its times in a unit, or unchanged if it defines the unit itself."""
    if trace_format.with_unit is None:
        return trace_format
    return trace_format.with_unit(unit)


def _is_json(line: str) -> bool:
    """Return True if a line is a JSON object and not the first line of a CSV file."""
    return line.lstrip().startswith("{")


def _find_format(path: Path, first_line: str) -> TraceFormat:
    """Return the format of a file by its first line. Raises UserError if it is not known."""
    try:
        if _is_json(first_line):
            first_row = trace_formats.parse_json_object(first_line)
            trace_format = trace_formats.find_json_format(first_row)
        else:
            trace_format = trace_formats.find_csv_format(first_line)
    except InvalidValueError as error:
        raise UserError(error.code, str(error), f"{path}:1", error.hint) from None

    if trace_format is None:
        problem = "the format of the trace is unknown"
        hint = trace_formats.hint_for(first_line)
        raise UserError("wrong_format", problem, f"{path}:1", hint)

    return trace_format


def add_lines(
    builder: TraceBuilder, trace_format: TraceFormat, lines: Iterator[NumberedLine]
) -> None:
    """Add the requests in the lines of a file to a trace.

    Lines are parsed in batches. Most formats can parse a whole batch at once (`parse_lines`), which
    is faster, if all its lines have the most common form. Otherwise, or if a time is out of order,
    its lines are parsed one by one, which finds the mistakes. Reading stops early if so many lines
    have mistakes that no more are reported.
    """
    while batch := list(itertools.islice(lines, LINES_PER_BATCH)):
        columns = None
        if trace_format.parse_lines is not None:
            columns = trace_format.parse_lines([line for _, line in batch])

        if columns is not None and builder.can_continue_with(columns.at_ns):
            builder.add_columns(columns)
        else:
            _add_lines_one_by_one(builder, trace_format, batch)

        if builder.has_enough_errors:
            return


def _add_lines_one_by_one(
    builder: TraceBuilder, trace_format: TraceFormat, lines: Iterable[NumberedLine]
) -> None:
    """Add the requests in some lines. Stop when there are as many mistakes as are reported."""
    for number, line in lines:
        try:
            for row in trace_format.parse_line(line):
                builder.add(row)
        except InvalidValueError as error:
            builder.add_bad_row(error, f"{builder.path}:{number}")
            if builder.has_enough_errors:
                return
