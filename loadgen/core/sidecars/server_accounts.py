"""Adds the timing breakdowns that a server has on a page of its own to the records of a run.

IO, after the run. `account_join.py` finds the request of each breakdown. Here the columns
`server_*_ns` and those of speculative decoding are replaced in `requests.parquet`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import OK
from loadgen.core.results import parquet, store
from loadgen.core.results.json_files import decode_json_lines
from loadgen.core.results.record import ROW
from loadgen.core.server_metrics import account_join, request_accounts
from loadgen.core.server_metrics.request_accounts import TimingBreakdown

if TYPE_CHECKING:
    import pyarrow as pa

COLUMN_BY_FIELD = {
    "queue": "server_queue_ns",
    "prefill": "server_prefill_ns",
    "transfer": "server_transfer_ns",
    "decode": "server_decode_ns",
    "drafted": "draft_tokens",
    "accepted": "accepted_tokens",
}
"""The column of the records for each field of a TimingBreakdown that is added to them."""

TIME_COLUMNS = ("sent_ns", "first_token_ns", "last_token_ns")
"""The columns that are compared with the arrival, first and last token of a breakdown."""

_NO_RECORD = -1
"""The row index of a breakdown that belongs to no record."""


def add_breakdowns_to_records(folder: Path) -> dict[str, int] | None:
    """Write the timing breakdowns that servers published into the records of a run.

    A breakdown says how long one request waited and was processed on the server. A server publishes
    a list of them that does not name the requests, so the record of each is found by its times. The
    list also has requests of other clients, which have no record here.

    Returns:
        The values of a warning for the user if some breakdowns have no record. For 3 of 120
        breakdowns they are `{"unjoined": 3, "accounts": 120}`. Otherwise None.
    """
    with (folder / request_accounts.FILE).open("rb") as lines:
        breakdowns = list(decode_json_lines(lines, TimingBreakdown))

    records_of_all_workers = folder / "requests" / store.MERGED
    if not breakdowns or not records_of_all_workers.exists():
        return None

    row_of_breakdown = _find_rows(records_of_all_workers, breakdowns)
    _write_breakdowns(records_of_all_workers, breakdowns, row_of_breakdown)
    unmatched_count = int(np.count_nonzero(row_of_breakdown == _NO_RECORD))
    if unmatched_count == 0:
        return None

    return {"unjoined": unmatched_count, "accounts": len(breakdowns)}


def _write_breakdowns(
    records_file: Path,
    breakdowns: Sequence[TimingBreakdown],
    row_of_breakdown: NDArray[np.int64],
) -> None:
    """Replace the columns of a file of records that come from timing breakdowns.

    If no breakdown has a record, the file is not written again.

    Args:
        records_file: The file of the records.
        breakdowns: The timing breakdowns of requests.
        row_of_breakdown: The index of the record of each breakdown, or _NO_RECORD.
    """
    has_any_match = bool(np.any(row_of_breakdown != _NO_RECORD))
    if has_any_match:
        columns = _breakdown_columns(records_file, breakdowns, row_of_breakdown)
        parquet.write_tables(records_file, _replace_columns(records_file, columns))


def _breakdown_columns(
    records_file: Path,
    breakdowns: Sequence[TimingBreakdown],
    row_of_breakdown: NDArray[np.int64],
) -> dict[str, NDArray[np.int64]]:
    """Return the columns of the records that come from timing breakdowns.

    A record without a breakdown has UNKNOWN in all of them.

    Args:
        records_file: The file of the records.
        breakdowns: How long each request waited and was processed, as the servers published it.
        row_of_breakdown: The index of the record of each breakdown, or _NO_RECORD.
    """
    row_count = len(parquet.Frame([records_file], []))
    is_matched = row_of_breakdown != _NO_RECORD
    matched_rows = row_of_breakdown[is_matched]

    columns = {}
    for field, column_name in COLUMN_BY_FIELD.items():
        field_values = np.array([getattr(breakdown, field) for breakdown in breakdowns])
        column = np.full(row_count, request_accounts.UNKNOWN, np.int64)
        column[matched_rows] = field_values[is_matched]
        columns[column_name] = column

    return columns


def _find_rows(records_file: Path, breakdowns: Sequence[TimingBreakdown]) -> NDArray[np.int64]:
    """Return the index of the record of each breakdown, or _NO_RECORD.

    A breakdown is what a server reports of one request. Each target is matched separately, because
    it has a clock of its own. Only successful requests that have all of TIME_COLUMNS can have a
    breakdown.
    """
    records = parquet.Frame([records_file], ["status", "target", *TIME_COLUMNS])
    request_times = np.stack([records[name] for name in TIME_COLUMNS], axis=1)
    has_all_times = request_times.min(axis=1) >= 0  # -1 stands for a time that is not known.
    can_have_breakdown = (records["status"] == OK) & has_all_times
    breakdown_times = np.array(
        [(breakdown.arrival, breakdown.first, breakdown.last) for breakdown in breakdowns], np.int64
    )
    target_of_breakdown = np.array([breakdown.target for breakdown in breakdowns])

    row_of_breakdown = np.full(len(breakdowns), _NO_RECORD, np.int64)
    for target in np.unique(target_of_breakdown).tolist():
        breakdown_indexes = np.flatnonzero(target_of_breakdown == target)
        candidate_rows = np.flatnonzero(can_have_breakdown & (records["target"] == target))

        # For each breakdown of this target, a position in `candidate_rows`, or -1.
        candidate_of_breakdown = account_join.match_breakdowns(
            breakdown_times[breakdown_indexes], request_times[candidate_rows]
        )
        if candidate_of_breakdown is None:
            continue

        is_matched = candidate_of_breakdown >= 0
        matched_rows = candidate_rows[candidate_of_breakdown[is_matched]]
        row_of_breakdown[breakdown_indexes[is_matched]] = matched_rows

    return row_of_breakdown


def _replace_columns(file: Path, columns: Mapping[str, NDArray[np.int64]]) -> Iterator[pa.Table]:
    """Yield the row groups of a file with new values in some columns; -1 becomes null."""
    import pyarrow.parquet as pq

    first_row = 0
    with pq.ParquetFile(file) as records:
        for group in range(records.num_row_groups):
            table = records.read_row_group(group)
            end_row = first_row + len(table)
            for name, values in columns.items():
                table = _replace_column(table, name, values[first_row:end_row])
            first_row = end_row
            yield table


def _replace_column(table: pa.Table, name: str, values: NDArray[np.int64]) -> pa.Table:
    """Return a table with other values in a column, which keeps its place and its metadata."""
    index = table.schema.get_field_index(name)
    field = table.schema.field(index)
    column = parquet.nullable(values.astype(ROW[name]), values >= 0)
    return table.set_column(index, field, column)
