"""Traces in Parquet: the columns of Mooncake, Azure LLM inference, BurstGPT or timestamp, input_length, output_length.

Read batch by batch; every row is checked. A time is a date or a number; `trace_units` decides the
unit of a number that the format leaves open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.errors import FAULTS_SHOWN, Code, UserError
from loadgen.core.units import LONGEST_NS, MOST_TOKENS, UNIT_NS, TimeUnit, Wrong
from loadgen.core.workload import trace_formats
from loadgen.core.workload.trace_formats import TraceColumns
from loadgen.core.workload.trace_units import TRIAL_UNIT

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = 262_144
Ints = NDArray[np.int64]
Take = Callable[[TraceColumns, int, Sequence[tuple[int, Wrong]]], bool]
"""Takes sound rows, the number of bad ones, and the first of these with what is wrong; says whether to go on."""


class TableFormat(NamedTuple):
    """The format of a table: its name, and whether it leaves the unit of its times open."""

    name: str
    has_open_unit: bool


def read_parquet_trace(path: Path, take: Take, unit: TimeUnit = TRIAL_UNIT) -> TableFormat:
    """Give the rows of a file to `take`, batch by batch, and return the format of the file.

    `unit` is that of times whose unit the format leaves open. Raises UserError.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = {column.strip().lower(): column for column in file.schema_arrow.names}
            found = trace_formats.find_table_format(list(names))
            if found is None:
                problem = (
                    f"not a trace that is known here: its columns are {', '.join(list(names)[:12])}"
                )
                raise UserError("wrong_format", problem, str(path), trace_formats.known_formats())
            if "hash_ids" in names:
                problem, hint = (
                    "hash_ids in Parquet are not read",
                    "write the trace as JSONL, which keeps its prefixes",
                )
                raise UserError("unsupported", problem, str(path), hint)
            told = [column for column in (found.session, found.took) if column in names]
            columns = [names[column] for column in (*found.columns, *told)]
            kinds = [file.schema_arrow.field(column).type for column in columns]
            for column, kind in zip(columns, kinds, strict=True):
                if column.strip().lower() == found.session:
                    continue
                is_date = pa.types.is_timestamp(kind) and column.strip().lower() != found.took
                if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or is_date):
                    problem, hint = (
                        f"the column {column} holds {kind}",
                        "numbers, or dates for the time",
                    )
                    raise UserError("wrong_type", problem, str(path), hint, key=column)
            is_number = not pa.types.is_timestamp(kinds[0])
            has_open_unit = found.any_unit and is_number
            time_unit_ns = UNIT_NS[unit] if has_open_unit else UNIT_NS["s"]
            places = [
                columns.index(names[one]) if one in told else -1
                for one in (found.session, found.took)
            ]
            batches = file.iter_batches(BATCH, columns=columns)
            _take_all(batches, columns, time_unit_ns, places, take)
            return TableFormat(found.tool, has_open_unit)
    except (
        OSError,
        pa.ArrowException,
        UnicodeDecodeError,
    ) as error:  # the last: a damaged name of a column
        problem = f"the Parquet file is cut short or damaged: {str(error).splitlines()[0]}"
        raise UserError("damaged_file", problem, str(path), "copy it again") from None


def _take_all(
    batches: Iterator[Any], columns: list[str], time_unit_ns: int, told: Sequence[int], take: Take
) -> None:
    """Check the rows of all batches and give them to `take`.

    `time_unit_ns`: the ns of 1 in a column of time that holds numbers. `told`: the places of session
    and length of time, -1 for none.
    """
    number, first_ns, latest_ns = 1, None, -(2**63)
    for batch in batches:
        at_ns, timed = _times(batch.column(0), time_unit_ns)
        read_parquet_trace, counted = _counts(batch.column(1), 1)
        write, answered = _counts(batch.column(2), 0)
        lasted = _lasted(batch, told[1])
        sound = timed & counted & answered & lasted
        if first_ns is None and sound.any():
            first_ns = int(at_ns[sound][0])
        near = np.abs(at_ns - float(first_ns or 0)) <= LONGEST_NS
        # the latest time of the sound rows before each one
        before = np.maximum.accumulate(
            np.concatenate([[latest_ns], np.where(sound & near, at_ns, -(2**63))])
        )
        forward = at_ns >= before[:-1]
        kept = sound & near & forward
        latest_ns = int(before[-1])
        faults = []
        (bad,) = np.nonzero(~kept)
        for row in bad[:FAULTS_SHOWN].tolist():
            back_s = (int(before[row]) - int(at_ns[row])) / 1e9
            reasons: tuple[tuple[bool, Code, str, str], ...] = (
                (timed[row], "invalid_value", columns[0], f"{columns[0]} is missing or no number"),
                (counted[row], "invalid_value", columns[1], _no_count(columns[1], 1)),
                (answered[row], "invalid_value", columns[2], _no_count(columns[2], 0)),
                (
                    lasted[row],
                    "invalid_value",
                    columns[told[1]],
                    f"{columns[told[1]]} is no length of time",
                ),
                (
                    near[row],
                    "out_of_range",
                    columns[0],
                    "the time is more than a year from that of the first row",
                ),
                (forward[row], "unordered", columns[0], f"the time goes back by {back_s:,.6g} s"),
            )
            _, code, column, problem = next(reason for reason in reasons if not reason[0])
            faults.append((number + row, Wrong(code, problem, "", column)))
        sessions, took_ns = _told(batch, told, kept)
        rows = TraceColumns(
            at_ns[kept], read_parquet_trace[kept], write[kept], sessions=sessions, took_ns=took_ns
        )
        if not take(rows, len(bad), faults):
            return
        number += len(kept)


def _told(
    batch: Any, places: Sequence[int], kept: NDArray[np.bool_]
) -> tuple[list[str], list[int]]:
    """Sessions and lengths of time of the rows that are kept; what a row does not tell is "" or -1."""
    session, took = places
    rows = np.flatnonzero(kept)
    names = [] if session < 0 else batch.column(session).take(rows).to_pylist()
    seconds = [] if took < 0 else batch.column(took).take(rows).to_pylist()
    lengths = [-1 if value is None else round(value * 1e9) for value in seconds]
    return ["" if name is None else str(name) for name in names], lengths


def _lasted(batch: Any, place: int) -> NDArray[np.bool_]:
    """Whether each row tells no length of time, or one: as in the lines of CSV, zero or more."""
    if place < 0:
        return np.ones(batch.num_rows, bool)
    seconds = batch.column(place).cast("double").fill_null(0).to_numpy(zero_copy_only=False)
    return np.asarray((seconds >= 0) & (seconds * 1e9 < trace_formats.LATEST_NS))


def _no_count(column: str, least: int) -> str:
    return f"{column} is missing or not from {least} to {MOST_TOKENS:,}"


def _times(column: pa.Array, time_unit_ns: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the ns of each row, and whether it has a time."""
    import pyarrow as pa

    present = _present(column)
    if pa.types.is_timestamp(column.type):
        ns = column.cast(pa.timestamp("ns", tz=column.type.tz)).cast(pa.int64())
        return ns.fill_null(0).to_numpy(zero_copy_only=False), present
    values = column.fill_null(0).to_numpy(zero_copy_only=False)
    if values.dtype.kind == "f":
        sound = np.isfinite(values) & (np.abs(values) * time_unit_ns < trace_formats.LATEST_NS)
        ns = np.rint(np.where(sound, values, 0) * time_unit_ns)
        return ns.astype(np.int64), present & sound
    sound = np.abs(values.astype(np.float64)) * time_unit_ns < trace_formats.LATEST_NS
    return np.where(sound, values, 0).astype(np.int64) * time_unit_ns, present & sound


def _counts(column: pa.Array, least: int) -> tuple[Ints, NDArray[np.bool_]]:
    """The token counts of each row, and whether each is one."""
    values = column.fill_null(-1).to_numpy(zero_copy_only=False)
    sound = _present(column) & (values >= least) & (values <= MOST_TOKENS)
    if values.dtype.kind == "f":
        sound &= values == np.floor(values)
    return np.where(sound, values, 0).astype(np.int64), sound


def _present(column: pa.Array) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return found
