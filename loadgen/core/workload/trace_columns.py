"""Read traces in Parquet, with the columns of a format of `loadgen.formats`.

Rows are read in batches, and every row is checked. A time is a date or a number. `trace_units.py`
decides the unit of a number if the format leaves it open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from loadgen.core.errors import MAX_ERRORS, Code, UserError
from loadgen.core.units import (
    LONGEST_NS,
    MOST_TOKENS,
    NS_PER_S,
    UNIT_NS,
    InvalidValueError,
    TimeUnit,
)
from loadgen.core.workload import trace_formats
from loadgen.core.workload.trace_formats import MAX_TIME_NS, UNKNOWN_NS, TraceColumns
from loadgen.core.workload.trace_units import TRIAL_UNIT
from loadgen.formats import FormatRow

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS_PER_BATCH = 262_144
MAX_COLUMNS_IN_MESSAGE = 12
EARLIEST_NS = -(2**63)
"""The smallest time that 64 bits can store. It stands for "no time yet"."""

Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]
"""Whether a condition holds, for each row of a batch."""


class TableFormat(NamedTuple):
    """The format of a table: its name, and whether it does not define the unit of its times."""

    name: str
    needs_time_unit: bool


class BadRow(NamedTuple):
    """The number of a row, counted from 1, and the mistake in it."""

    row_number: int
    error: InvalidValueError


class CheckedBatch(NamedTuple):
    """The rows of a batch that are valid, and the mistakes in the others.

    Attributes:
        columns: The valid rows.
        bad_row_count: The number of rows with a mistake.
        first_bad_rows: The first of them.
    """

    columns: TraceColumns
    bad_row_count: int
    first_bad_rows: list[BadRow]


class ParquetTrace(NamedTuple):
    """An open trace in Parquet: its format and its rows."""

    format: TableFormat
    batches: Iterator[CheckedBatch]


class _Columns(NamedTuple):
    """The names of the columns in a file. The last two are None if the file does not have them."""

    time: str
    input_tokens: str
    output_tokens: str
    session: str | None
    duration: str | None

    @property
    def names(self) -> list[str]:
        """The names of the columns that the file has."""
        return [name for name in self if name is not None]


@contextlib.contextmanager
def open_parquet_trace(path: Path, unit: TimeUnit = TRIAL_UNIT) -> Iterator[ParquetTrace]:
    """Open a trace in Parquet, whose rows are checked in batches while they are read.

    The file stays open during the `with` block. A damaged file may be found only while its rows are
    read, so errors of reading that are raised inside the block become a UserError, too.

    Args:
        path: The file.
        unit: The unit of times that are numbers, for formats that do not define it. A caller that
            does not know the unit yet reads the times with TRIAL_UNIT and decides by them.

    Raises:
        UserError: The file cannot be read, or it has no columns of a trace.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield _open_table(file, path, unit)
    # Of a damaged file, even the names of the columns may not be valid UTF-8.
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        problem = f"the Parquet file is truncated or damaged: {str(error).splitlines()[0]}"
        raise UserError("damaged_file", problem, str(path), "copy it again") from None


def _open_table(file: pq.ParquetFile, path: Path, unit: TimeUnit) -> ParquetTrace:
    """Return the format of a Parquet file and its batches, which are read one at a time.

    `unit` is the unit of times that are numbers, if the format does not define it. Raises UserError
    if the file has no columns of a trace.
    """
    import pyarrow as pa

    schema = file.schema_arrow
    table_format = _find_format(schema, path)
    columns = _find_columns(schema, table_format)
    _check_column_types(schema, columns, path)

    # Numbers without a defined unit have `unit`. All formats that define one define seconds. Dates
    # need no unit.
    has_dates = pa.types.is_timestamp(schema.field(columns.time).type)
    needs_time_unit = table_format.any_unit and not has_dates
    time_unit_ns = UNIT_NS[unit] if needs_time_unit else UNIT_NS["s"]

    checker = _BatchChecker(columns, time_unit_ns)
    batches = file.iter_batches(ROWS_PER_BATCH, columns=columns.names)
    checked_batches = (checker.check(batch) for batch in batches)

    return ParquetTrace(TableFormat(table_format.tool, needs_time_unit), checked_batches)


def _column_names(schema: pa.Schema) -> dict[str, str]:
    """Map the lower-case name of each column to its name in the file."""
    return {name.strip().lower(): name for name in schema.names}


def _find_format(schema: pa.Schema, path: Path) -> FormatRow:
    """Return the format of a table. Raises UserError if it is not known or not supported."""
    names = list(_column_names(schema))
    table_format = trace_formats.find_table_format(names)
    if table_format is None:
        columns = ", ".join(names[:MAX_COLUMNS_IN_MESSAGE])
        problem = f"the format of the trace is unknown: its columns are {columns}"
        raise UserError("wrong_format", problem, str(path), trace_formats.describe_known_formats())

    if "hash_ids" in names:
        hint = "write the trace as JSONL, which keeps its shared prefixes"
        raise UserError("unsupported", "hash_ids in Parquet files cannot be read", str(path), hint)

    return table_format


def _find_columns(schema: pa.Schema, table_format: FormatRow) -> _Columns:
    """Return the names of the columns of a format as they are written in the file.

    A format has lower-case names, such as `timestamp`, and the file may have `Timestamp`.
    """
    names_in_file = _column_names(schema)
    required = trace_formats.required_columns(table_format)
    return _Columns(
        time=names_in_file[required.time],
        input_tokens=names_in_file[required.input_tokens],
        output_tokens=names_in_file[required.output_tokens],
        session=names_in_file.get(table_format.session),
        duration=names_in_file.get(table_format.duration),
    )


def _check_column_types(schema: pa.Schema, columns: _Columns, path: Path) -> None:
    """Raise UserError unless a column has numbers. The type "timestamp" is also accepted.

    The names of sessions may have any type. A duration must be a number.
    """
    import pyarrow as pa

    for name in columns.names:
        if name == columns.session:
            continue

        column_type = schema.field(name).type
        is_number = pa.types.is_integer(column_type) or pa.types.is_floating(column_type)

        may_be_date = name != columns.duration
        is_accepted_date = may_be_date and pa.types.is_timestamp(column_type)
        if not is_number and not is_accepted_date:
            problem = f"the column {name} has the type {column_type}"
            hint = "use numbers, or dates for the time"
            raise UserError("wrong_type", problem, str(path), hint, key=name)


class _Integers(NamedTuple):
    """A column of a batch: the value of each row, 0 if it is not valid, and whether it is valid."""

    values: Integers
    is_valid: Mask


class _BatchValues(NamedTuple):
    """The values of a batch, and which rows have a valid value in each column."""

    times_ns: _Integers
    input_tokens: _Integers
    output_tokens: _Integers
    has_valid_duration: Mask

    @property
    def is_readable(self) -> Mask:
        """Whether all values of a row are valid."""
        has_valid_tokens = self.input_tokens.is_valid & self.output_tokens.is_valid
        return self.times_ns.is_valid & has_valid_tokens & self.has_valid_duration


@dataclass(frozen=True)
class _RowCheck:
    """A condition that each row must meet, and the mistake of a row that does not.

    Attributes:
        is_met: Whether each row meets the condition.
        code: The code of the error of a row that does not.
        column: The column with the mistake.
        problem: What is wrong with such a row.
    """

    is_met: Mask
    code: Code
    column: str
    problem: str

    def describe_mistake(self, row: int) -> str:  # noqa: ARG002 - a subclass names the row's value
        """Return what is wrong with a row that does not meet the condition."""
        return self.problem


@dataclass(frozen=True)
class _OrderCheck(_RowCheck):
    """The check that the time of a row is not before that of an earlier row.

    Attributes:
        at_ns: The time of each row.
        latest_before_rows: The latest time before each row.
    """

    at_ns: Integers
    latest_before_rows: Integers

    @override
    def describe_mistake(self, row: int) -> str:
        back_ns = int(self.latest_before_rows[row]) - int(self.at_ns[row])
        return f"the time is {back_ns / NS_PER_S:,.6g} s before that of the previous row"


class _TimeComparison(NamedTuple):
    """How the times of a batch compare with those of earlier rows.

    Attributes:
        first_ns: The first time of the file, or None if no row has had a time yet.
        latest_ns: The latest time of all rows up to the end of the batch.
        latest_before_rows: The latest time before each row.
        is_within_a_year: Whether the time of each row is within a year of the first.
    """

    first_ns: int | None
    latest_ns: int
    latest_before_rows: Integers
    is_within_a_year: Mask


class _BatchChecker:
    """Checks the batches of a table in their order.

    Args:
        columns: The names of the columns.
        time_unit_ns: The nanoseconds of 1 in a column of times that holds numbers.
    """

    def __init__(self, columns: _Columns, time_unit_ns: int) -> None:
        self._columns = columns
        self._time_unit_ns = time_unit_ns
        # The first and the latest time of the batches so far, and their number of rows.
        self._first_ns: int | None = None
        self._latest_ns = EARLIEST_NS
        self._rows_read = 0

    def check(self, batch: pa.RecordBatch) -> CheckedBatch:
        """Return the valid rows of the next batch and the first mistakes in it.

        The batches must be checked in the order of the file, because times are compared with those
        of the rows before.
        """
        values = self._read_values(batch)
        times = self._compare_times(values)
        checks = [*self._value_checks(values), *self._time_checks(values, times)]

        # A row is valid if it meets all checks.
        is_valid = np.logical_and.reduce([check.is_met for check in checks])
        valid_columns = TraceColumns(
            at_ns=values.times_ns.values[is_valid],
            input_tokens=values.input_tokens.values[is_valid],
            output_tokens=values.output_tokens.values[is_valid],
            sessions=self._sessions(batch, is_valid),
            duration_ns=self._durations_ns(batch, is_valid),
        )
        bad_row_count = int((~is_valid).sum())
        checked_batch = CheckedBatch(
            valid_columns, bad_row_count, self._first_bad_rows(checks, is_valid)
        )

        self._remember(times, row_count=len(is_valid))
        return checked_batch

    def _remember(self, times: _TimeComparison, row_count: int) -> None:
        """Store what the next batch is compared with, and count the rows of this one."""
        self._first_ns = times.first_ns
        self._latest_ns = times.latest_ns
        self._rows_read += row_count

    def _read_values(self, batch: pa.RecordBatch) -> _BatchValues:
        """Return the values of a batch, and which of them are valid."""
        columns = self._columns
        return _BatchValues(
            times_ns=_read_times(batch.column(columns.time), self._time_unit_ns),
            input_tokens=_read_counts(batch.column(columns.input_tokens), minimum=1),
            output_tokens=_read_counts(batch.column(columns.output_tokens), minimum=0),
            has_valid_duration=self._has_valid_duration(batch),
        )

    def _value_checks(self, values: _BatchValues) -> list[_RowCheck]:
        """Return the checks of the single values of each row."""
        time = self._columns.time
        duration = self._columns.duration or ""
        return [
            _RowCheck(
                is_met=values.times_ns.is_valid,
                code="invalid_value",
                column=time,
                problem=f"{time} is missing or not a number",
            ),
            _count_check(values.input_tokens.is_valid, self._columns.input_tokens, minimum=1),
            _count_check(values.output_tokens.is_valid, self._columns.output_tokens, minimum=0),
            _RowCheck(
                is_met=values.has_valid_duration,
                code="invalid_value",
                column=duration,
                problem=f"{duration} is not a duration",
            ),
        ]

    def _compare_times(self, values: _BatchValues) -> _TimeComparison:
        """Compare the times of a batch with those of earlier rows, also of earlier batches.

        Each time is compared with two others: with the first time of the file, from which it must
        not differ by more than a year, and with the latest time of all rows before it. One bad time
        must not make all later rows bad, so only rows without a mistake count as rows before.
        """
        times_ns = values.times_ns.values
        first_ns = self._first_ns
        if first_ns is None:
            first_ns = _first_readable_time(values)
        is_within_a_year = _is_within_a_year(times_ns, first_ns)

        # A row with a mistake does not count: it gets a time before all others, which is never the
        # latest one.
        is_without_mistake = values.is_readable & is_within_a_year
        counted_times_ns = np.where(is_without_mistake, times_ns, EARLIEST_NS)
        latest_of_batch_ns = int(counted_times_ns.max(initial=EARLIEST_NS))

        return _TimeComparison(
            first_ns=first_ns,
            latest_ns=max(self._latest_ns, latest_of_batch_ns),
            latest_before_rows=_latest_before_rows(counted_times_ns, self._latest_ns),
            is_within_a_year=is_within_a_year,
        )

    def _time_checks(self, values: _BatchValues, times: _TimeComparison) -> list[_RowCheck]:
        """Return two checks of a time: its distance to the first row, and the order of rows."""
        distance_check = _RowCheck(
            is_met=times.is_within_a_year,
            code="out_of_range",
            column=self._columns.time,
            problem="the time is more than a year after that of the first row",
        )

        order_check = _OrderCheck(
            is_met=values.times_ns.values >= times.latest_before_rows,
            code="unordered",
            column=self._columns.time,
            problem="the time is before that of the previous row",
            at_ns=values.times_ns.values,
            latest_before_rows=times.latest_before_rows,
        )
        return [distance_check, order_check]

    def _first_bad_rows(self, checks: list[_RowCheck], is_valid: Mask) -> list[BadRow]:
        """Return the first rows of a batch with a mistake, at most MAX_ERRORS of them.

        Only the first check that a row fails is reported.
        """
        first_bad_rows = []
        for row in np.flatnonzero(~is_valid)[:MAX_ERRORS].tolist():
            failed_check = next(check for check in checks if not check.is_met[row])
            problem = failed_check.describe_mistake(row)
            error = InvalidValueError(failed_check.code, problem, "", failed_check.column)
            first_bad_rows.append(BadRow(self._rows_read + 1 + row, error))
        return first_bad_rows

    def _has_valid_duration(self, batch: pa.RecordBatch) -> Mask:
        """Return whether each row has no length of time, or one of zero or more."""
        if self._columns.duration is None:
            return np.ones(batch.num_rows, bool)
        column = batch.column(self._columns.duration)
        seconds = column.cast("double").fill_null(0).to_numpy(zero_copy_only=False)
        return np.asarray((seconds >= 0) & (seconds * NS_PER_S < MAX_TIME_NS))

    def _sessions(self, batch: pa.RecordBatch, is_valid: Mask) -> list[str]:
        """Return the session of each valid row, "" if it has none; [] without such a column."""
        if self._columns.session is None:
            return []
        names = _take(batch.column(self._columns.session), is_valid)
        return ["" if name is None else str(name) for name in names]

    def _durations_ns(self, batch: pa.RecordBatch, is_valid: Mask) -> list[int]:
        """Return how long each valid row took; [] without such a column."""
        if self._columns.duration is None:
            return []
        seconds = _take(batch.column(self._columns.duration), is_valid)
        return [UNKNOWN_NS if value is None else round(value * NS_PER_S) for value in seconds]


def _first_readable_time(values: _BatchValues) -> int | None:
    """Return the time in ns of the first row whose values are all valid, or None without such."""
    readable_times_ns = values.times_ns.values[values.is_readable]
    return int(readable_times_ns[0]) if len(readable_times_ns) else None


def _is_within_a_year(times_ns: Integers, first_ns: int | None) -> Mask:
    """Return for each time whether it is at most a year before or after the first time.

    Without a first time (None), there is nothing to compare with, and all times pass.
    """
    if first_ns is None:
        return np.ones(len(times_ns), bool)

    # As floats, because the difference of two integers of 64 bits can exceed 64 bits.
    distances_ns = np.abs(times_ns - float(first_ns))
    is_within_a_year: Mask = distances_ns <= LONGEST_NS
    return is_within_a_year


def _latest_before_rows(times_ns: Integers, latest_before_batch_ns: int) -> Integers:
    """Return for each row of a batch the latest time of all rows before it.

    For example, the times 5, 9, 7 after a batch with the latest time 6 give 6, 6, 9.
    """
    # The time before row 0, that of row 0, ..., that of the row before the last one.
    times_before_rows = np.concatenate([[latest_before_batch_ns], times_ns[:-1]])
    latest_ns: Integers = np.maximum.accumulate(times_before_rows)
    return latest_ns[: len(times_ns)]


def _count_check(is_met: Mask, column: str, *, minimum: int) -> _RowCheck:
    """Return the check of a column with numbers of tokens."""
    problem = f"{column} is missing or not from {minimum} to {MOST_TOKENS:,}"
    return _RowCheck(is_met, "invalid_value", column, problem)


def _take(column: pa.Array, is_valid: Mask) -> list[Any]:
    """Return the values of the valid rows."""
    values: list[Any] = column.take(np.flatnonzero(is_valid)).to_pylist()
    return values


def _read_times(column: pa.Array, time_unit_ns: int) -> _Integers:
    """Return the time of each row in ns.

    The column has dates, or numbers of `time_unit_ns`. A number that is missing, not finite or too
    large for 64 bits is not valid.
    """
    import pyarrow as pa

    is_present = _is_present(column)
    if pa.types.is_timestamp(column.type):
        return _Integers(_dates_to_ns(column), is_present)

    numbers = column.fill_null(0).to_numpy(zero_copy_only=False)
    is_in_range = _is_in_time_range(numbers, time_unit_ns)
    valid_numbers = np.where(is_in_range, numbers, 0)
    times_ns = _numbers_to_ns(valid_numbers, time_unit_ns)
    return _Integers(times_ns, is_valid=is_present & is_in_range)


def _is_in_time_range(numbers: NDArray[Any], time_unit_ns: int) -> Mask:
    """Return whether each number, as a time in ns, fits into 64 bits. NaN and infinity do not.

    The product is computed with floats, because that of two integers of 64 bits can overflow.
    """
    magnitudes_ns = np.abs(numbers.astype(np.float64)) * time_unit_ns
    is_in_range: Mask = magnitudes_ns < MAX_TIME_NS  # A comparison with NaN is False.
    return is_in_range


def _dates_to_ns(column: pa.Array) -> Integers:
    """Return a column of dates as ns since 1970, with 0 for a missing date.

    Each column of dates has a unit such as milliseconds, and may have a time zone, which is kept.
    """
    import pyarrow as pa

    type_in_ns = pa.timestamp("ns", tz=column.type.tz)
    nanoseconds = column.cast(type_in_ns).cast(pa.int64())
    dates_ns: Integers = nanoseconds.fill_null(0).to_numpy(zero_copy_only=False)
    return dates_ns


def _numbers_to_ns(numbers: NDArray[Any], unit_ns: int) -> Integers:
    """Convert numbers of a unit to ns. Integers are converted exactly, and floats are rounded."""
    is_float = numbers.dtype.kind == "f"
    times_ns: Integers
    if is_float:
        times_ns = np.rint(numbers * unit_ns).astype(np.int64)
    else:
        times_ns = numbers.astype(np.int64) * unit_ns
    return times_ns


def _read_counts(column: pa.Array, *, minimum: int) -> _Integers:
    """Return the token count of each row.

    A count is a whole number from `minimum` to MOST_TOKENS. A float such as 12.0 is the number 12.
    """
    values = column.fill_null(-1).to_numpy(zero_copy_only=False)
    is_valid = _is_present(column) & (values >= minimum) & (values <= MOST_TOKENS)
    if values.dtype.kind == "f":
        is_valid &= values == np.floor(values)
    return _Integers(np.where(is_valid, values, 0).astype(np.int64), is_valid)


def _is_present(column: pa.Array) -> Mask:
    """Return whether each row has a value, that is, whether it is not null."""
    is_present: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return is_present
