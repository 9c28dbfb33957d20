"""Adds the timing breakdowns that a server has on a page of its own to the records of a run.

IO, after the run. `account_join.py` finds the request of each account. Here the columns
`server_*_ns` and those of speculative decoding are replaced in `requests.parquet`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import OK
from loadgen.core.results import parquet, store
from loadgen.core.results.json_files import decode_json_lines
from loadgen.core.results.record import ROW
from loadgen.core.server_metrics import account_join, request_accounts
from loadgen.core.server_metrics.request_accounts import RequestAccount

COLUMNS = {
    "queue": "server_queue_ns",
    "prefill": "server_prefill_ns",
    "transfer": "server_transfer_ns",
    "decode": "server_decode_ns",
    "drafted": "draft_tokens",
    "accepted": "accepted_tokens",
}
"""The column of the records for each field of a RequestAccount."""


TIMES = ("sent_ns", "first_token_ns", "last_token_ns")
"""The columns that are compared with the arrival, first and last token of an account."""


def join(folder: Path) -> dict[str, int] | None:
    """Write the accounts of a server into the records of a run.

    Returns the numbers of accounts and of those without a request (`unjoined`), or None if there
    are no accounts or all of them have a request.
    """
    file = folder / "requests" / store.MERGED
    with (folder / request_accounts.FILE).open("rb") as lines:
        accounts = list(decode_json_lines(lines, RequestAccount))
    if not accounts or not file.exists():
        return None
    columns = parquet.Frame([file], ["status", "target", *TIMES])
    request_times = np.stack([columns[name] for name in TIMES], axis=1)
    has_times = (columns["status"] == OK) & (request_times.min(axis=1) >= 0)
    values = {name: np.full(len(columns), -1, np.int64) for name in COLUMNS}
    joined_count = 0
    for target in sorted({account.target for account in accounts}):
        target_accounts = [account for account in accounts if account.target == target]
        row_indexes = np.flatnonzero(has_times & (columns["target"] == target))
        request_of_account = account_join.match_accounts(
            _times_of(target_accounts), request_times[row_indexes]
        )
        if request_of_account is None:
            continue
        has_request = request_of_account >= 0
        joined_count += int(has_request.sum())
        account_rows = row_indexes[request_of_account[has_request]]
        for name, column in values.items():
            account_values = np.array([getattr(account, name) for account in target_accounts])
            column[account_rows] = account_values[has_request]
    if joined_count:
        new_columns = {COLUMNS[name]: column for name, column in values.items()}
        parquet.write_tables(file, _with_columns(file, new_columns))
    if joined_count == len(accounts):
        return None
    return {"unjoined": len(accounts) - joined_count, "accounts": len(accounts)}


def _times_of(accounts: Sequence[RequestAccount]) -> NDArray[np.int64]:
    """Return the arrival, first and last token of each account, on the clock of the server."""
    times = [(account.arrival, account.first, account.last) for account in accounts]
    return np.array(times, np.int64)


def _with_columns(file: Path, columns: dict[str, NDArray[np.int64]]) -> Iterator[Any]:
    """Yield the row groups of a file with other values in some columns; -1 becomes null."""
    import pyarrow.parquet as pq

    first_row = 0
    with pq.ParquetFile(file) as old:
        for group in range(old.num_row_groups):
            table = old.read_row_group(group)
            for name, values in columns.items():
                table = _with_column(table, name, values[first_row : first_row + len(table)])
            first_row += len(table)
            yield table


def _with_column(table: Any, name: str, values: NDArray[np.int64]) -> Any:
    index = table.schema.get_field_index(name)
    field = table.schema.field(index)
    column = parquet.nullable(values.astype(ROW[name]), values >= 0)
    return table.set_column(index, field, column)
