"""The log of what the server really sent: the planned and the actual time of each send.

The log is kept in memory and written once, to a file or as the response to `GET /_log`, which
empties it. The format is one line of JSON, `{"schema": 1, "columns": [...], "events": n,
"requests": [...]}`, then n rows of four little-endian int64. A row has the request number, the
event index within the response, the planned time, and the time just before the send, both in ns of
`time.monotonic_ns`.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np

SCHEMA = 1
COLUMNS = ("request", "event", "planned_ns", "sent_ns")


class LoggedRequest(msgspec.Struct):
    """One request as the server received it."""

    number: int
    id: str  # X-Request-Id, "" without one
    arrival_ns: int  # time when its last byte was read
    path: str
    status: int
    input_tokens: int = 0  # 0: refused before the tokens were counted
    output_tokens: int = 0
    fault: str = ""  # name of the injected failure
    body_sha256: str = ""  # with --log-bodies


class _LogHeader(msgspec.Struct):
    schema: int
    columns: tuple[str, ...]
    events: int
    requests: list[LoggedRequest]


class SendLog:
    """The requests and sends of one server.

    `events` tells which sends are logged: none, the first and last token event of each response
    ("ends"), or all. A send is four numbers in `rows`, in the order of COLUMNS.
    """

    def __init__(self, events: Literal["none", "ends", "all"]) -> None:
        self.logs_all = events == "all"
        self.logs_events = events != "none"
        self.rows: array[int] = array("q")
        self.requests: list[LoggedRequest] = []

    def drain(self) -> bytes:
        """Return everything in the log in the format of its file, and empty the log.

        The format is a line of JSON with the requests, then the rows of the events as int64 in
        little-endian byte order, whatever the byte order of this machine.
        """
        rows = self.rows
        requests = self.requests
        self.rows = array("q")
        self.requests = []

        if sys.byteorder == "big":
            rows.byteswap()

        header = _LogHeader(SCHEMA, COLUMNS, len(rows) // len(COLUMNS), requests)
        return msgspec.json.encode(header) + b"\n" + rows.tobytes()


class SentRequests(msgspec.Struct):
    """A parsed log: the requests, and one int64 array per column, in order of sending."""

    requests: list[LoggedRequest]
    request: np.ndarray[Any, np.dtype[np.int64]]
    event: np.ndarray[Any, np.dtype[np.int64]]
    planned_ns: np.ndarray[Any, np.dtype[np.int64]]
    sent_ns: np.ndarray[Any, np.dtype[np.int64]]


def parse_log(data: bytes) -> SentRequests:
    """Parse what `SendLog.drain` returns: a line of JSON, then one row of numbers per event.

    Raises ValueError or msgspec.MsgspecError if `data` is not such a log.
    """
    # Imported here, because the server only writes the log and does without numpy.
    import numpy as np

    header_line, _, row_bytes = data.partition(b"\n")
    header = msgspec.json.decode(header_line, type=_LogHeader)
    table = np.frombuffer(row_bytes, "<i8").reshape(-1, len(COLUMNS))
    if len(table) != header.events:
        raise ValueError(f"the log should have {header.events} events and has {len(table)}")

    # In the table, the numbers of a column are far apart in memory. In an array of their own they
    # are neighbors, which makes computations with a column faster.
    request_numbers, event_indexes, planned_ns, sent_ns = np.ascontiguousarray(table.T)
    return SentRequests(
        requests=header.requests,
        request=request_numbers,
        event=event_indexes,
        planned_ns=planned_ns,
        sent_ns=sent_ns,
    )
