"""The log of what the endpoint really sent: the planned and the actual time of each send. Kept in memory, written once.

Format of the file and of `GET /_log`, which empties the log: one line of JSON, `{"schema": 1, "columns": [...],
"events": n, "requests": [...]}`, then n rows of four little-endian int64. A row has the request number, the event index
within the response, the planned time, and the time just before the send, both in ns of `time.monotonic_ns`. A request
has number, id (`X-Request-Id`), arrival time in ns, tokens and fault.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np

COLUMNS = ("request", "event", "planned_ns", "sent_ns")


class LoggedRequest(msgspec.Struct):
    """One request as the endpoint received it. `input_tokens` 0: refused before the tokens were counted."""

    number: int
    id: str  # X-Request-Id, "" without one
    arrival_ns: int  # time when its last byte was read
    path: str
    status: int
    input_tokens: int = 0
    output_tokens: int = 0
    fault: str = ""
    body_sha256: str = ""  # with --log-bodies


class _Head(msgspec.Struct):
    schema: int
    columns: tuple[str, ...]
    events: int
    requests: list[LoggedRequest]


class SendLog:
    """Rows and requests of one server. `events`: "none", "ends" (first and last token event), "all"."""

    def __init__(self, events: str) -> None:
        self.all = events == "all"
        self.on = events != "none"
        self.rows: array[int] = array("q")
        self.requests: list[LoggedRequest] = []

    def drain(self) -> bytes:
        """Everything in the log, in the file's format. Empties the log."""
        rows, requests = self.rows, self.requests
        self.rows, self.requests = array("q"), []
        if sys.byteorder == "big":
            rows.byteswap()
        head = msgspec.json.encode(_Head(1, COLUMNS, len(rows) // len(COLUMNS), requests))
        return head + b"\n" + rows.tobytes()


class SentRequests(msgspec.Struct):
    """A parsed log: requests by number, and columns as int64 arrays of equal length, in order of sending."""

    requests: list[LoggedRequest]
    request: np.ndarray[Any, np.dtype[np.int64]]
    event: np.ndarray[Any, np.dtype[np.int64]]
    planned_ns: np.ndarray[Any, np.dtype[np.int64]]
    sent_ns: np.ndarray[Any, np.dtype[np.int64]]


def parse_log(data: bytes) -> SentRequests:
    """The inverse of `drain`. Raises ValueError or msgspec.MsgspecError if `data` is not such a log."""
    import numpy as np

    line, _, rest = data.partition(b"\n")
    head = msgspec.json.decode(line, type=_Head)
    table = np.frombuffer(rest, "<i8").reshape(-1, len(COLUMNS))
    if len(table) != head.events:
        raise ValueError(f"the log should have {head.events} events and has {len(table)}")
    return SentRequests(
        head.requests, *(np.ascontiguousarray(table[:, i]) for i in range(len(COLUMNS)))
    )
