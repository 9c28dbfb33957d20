"""Brings the accounts that a server keeps on a page of its own into the records of a run, once it is over. IO.

`account_join.py` says which account is of which request; here the columns `server_*_ns` and those
of speculation of `requests.parquet` are written again.
"""

from __future__ import annotations

from collections.abc import Iterator
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
"""Field of an account -> column of the records."""


def join(folder: Path) -> dict[str, int] | None:
    """Write the accounts into the records. Returns how many are of no request, where there are such."""
    file = folder / "requests" / store.MERGED
    with (folder / request_accounts.FILE).open("rb") as lines:
        accounts = list(decode_json_lines(lines, RequestAccount))
    if not accounts or not file.exists():
        return None
    columns = parquet.Frame(
        [file], ["status", "target", "sent_ns", "first_token_ns", "last_token_ns"]
    )
    ours = np.stack(
        [columns[name] for name in ("sent_ns", "first_token_ns", "last_token_ns")], axis=1
    )
    target, known = columns["target"], (columns["status"] == OK) & (ours.min(axis=1) >= 0)
    values = {name: np.full(len(columns), -1, np.int64) for name in COLUMNS}
    joined = 0
    for number in sorted({account.target for account in accounts}):
        own = [account for account in accounts if account.target == number]
        places = np.flatnonzero(known & (target == number))
        theirs = np.array(
            [(account.arrival, account.first, account.last) for account in own], np.int64
        )
        request_of = account_join.join(theirs, ours[places])
        if request_of is None:
            continue
        has_request = request_of >= 0
        joined += int(has_request.sum())
        for name, column in values.items():
            column[places[request_of[has_request]]] = np.array([getattr(a, name) for a in own])[
                has_request
            ]
    if joined:
        parquet.write(
            file, _rewritten(file, {COLUMNS[name]: column for name, column in values.items()})
        )
    return (
        {"unjoined": len(accounts) - joined, "accounts": len(accounts)}
        if joined < len(accounts)
        else None
    )


def _rewritten(file: Path, columns: dict[str, NDArray[np.int64]]) -> Iterator[Any]:
    """The row groups of a file with other values in these columns; -1 is null."""
    import pyarrow.parquet as pq

    at = 0
    with pq.ParquetFile(file) as old:
        for group in range(old.num_row_groups):
            table = old.read_row_group(group)
            for name, values in columns.items():
                table = _with_column(table, name, values[at : at + len(table)])
            at += len(table)
            yield table


def _with_column(table: Any, name: str, values: NDArray[np.int64]) -> Any:
    place = table.schema.get_field_index(name)
    field = table.schema.field(place)
    column = parquet.nullable(values.astype(ROW[name]), values >= 0)
    return table.set_column(place, field, column)
