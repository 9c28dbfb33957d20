"""Collect what happens to the requests of a simulated run, as integer columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core.results.record import KIND
from loadgen.sim.engine.implementation import SimRequest
from loadgen.sim.engine.replica import REQUEST_FIELDS

Ints = NDArray[np.signedinteger[Any]]

BATCH_SIZE = 8192
"""Ended requests that are held as objects before their fields are copied to the columns."""


class SentColumns(Struct, frozen=True, kw_only=True):
    """The requests that were sent, one array per field, in the order in which they ended.

    The fields are those of `replica.REQUEST_FIELDS`. Iterations are indexes into the replica's list
    of iterations, -1 where there was none.
    """

    slot: Ints  # the index in the schedule
    due_ns: Ints
    replica: Ints
    first_iteration: Ints  # of the first token
    resumed_iteration: Ints  # of the first token since the last admission
    last_iteration: Ints  # of the last token
    input_tokens: Ints
    requested_tokens: Ints  # 0: a non-generative request (embeddings, rerank)
    output_tokens: Ints
    cached_tokens: Ints  # -1: never admitted
    failure: Ints  # a code of `record.KIND`; 0: the request succeeded
    failed_ns: Ints  # -1: the request succeeded
    admitted_ns: Ints  # time of the first admission; -1: never admitted

    def __len__(self) -> int:
        return len(self.slot)


class UnsentColumns(Struct, frozen=True, kw_only=True):
    """The requests that were never sent, one array per field."""

    slot: Ints  # the index in the schedule
    due_ns: Ints
    reason: Ints  # a code of `record.KIND`

    def __len__(self) -> int:
        return len(self.slot)


class PauseColumns(Struct, frozen=True, kw_only=True):
    """The iterations in which requests got tokens before they were paused, one array per field."""

    slot: Ints  # the index in the schedule
    replica: Ints
    first_iteration: Ints
    last_iteration: Ints

    def __len__(self) -> int:
        return len(self.slot)


_RENAMED_FIELDS = {"key": "slot", "replica_index": "replica"}
"""Fields of a request that have another name in SentColumns."""

_FIELDS_OF_64_BITS = ("slot", "due_ns", "failed_ns", "admitted_ns")
"""Fields of SentColumns that need 64 bits.

The others are below 2**31, and 32 bits halve the memory of a long run.
"""

_SENT_DTYPES = {
    name: np.dtype(np.int64 if name in _FIELDS_OF_64_BITS else np.int32)
    for name in SentColumns.__struct_fields__
}


class SimulatedRequests:
    """The requests of a simulation that have ended, were never sent, or were paused."""

    def __init__(self) -> None:
        self._ended: list[SimRequest] = []  # not copied to the columns yet
        self._sent = {name: array(dtype.char) for name, dtype in _SENT_DTYPES.items()}
        self._unsent = {name: array("q") for name in UnsentColumns.__struct_fields__}
        self._pauses = {name: array("q") for name in PauseColumns.__struct_fields__}

    def add_sent(self, requests: Sequence[SimRequest]) -> None:
        """Add requests that have ended. Their fields must not change any more."""
        self._ended += requests
        if len(self._ended) >= BATCH_SIZE:
            self._move_ended_to_columns()

    def add_unsent(self, slot: int, due_ns: int, reason: str) -> None:
        """Add a request that is never sent; `reason` is a name of `record.KIND`."""
        _append_row(self._unsent, (slot, due_ns, KIND[reason]))

    def add_pauses(self, paused: Iterable[tuple[SimRequest, int, int]]) -> None:
        """Add the iterations in which paused requests got tokens before their pause.

        Args:
            paused: The value of `Replica.recent_pauses`: (request, first iteration, last iteration)
                of each paused request. A request without tokens has an empty range.
        """
        for request, first_iteration, last_iteration in paused:
            if last_iteration >= first_iteration:
                row = (request.key, request.replica_index, first_iteration, last_iteration)
                _append_row(self._pauses, row)

    def count_sent(self) -> int:
        """Return the number of requests that were sent and have ended."""
        return len(self._ended) + len(self._sent["slot"])

    def copy_sent_columns(self, skip_count: int) -> SentColumns:
        """Return a copy of the columns of sent requests, without the first `skip_count` of them.

        The copy stays as it is when more requests are added.
        """
        self._move_ended_to_columns()
        return SentColumns(
            **{name: np.array(column[skip_count:]) for name, column in self._sent.items()}
        )

    def sent_columns(self) -> SentColumns:
        """Return the columns of the sent requests, without a copy. Then no more can be added."""
        self._move_ended_to_columns()
        return SentColumns(**_as_arrays(self._sent))

    def unsent_columns(self) -> UnsentColumns:
        """Return the columns of the requests that were never sent, without a copy."""
        return UnsentColumns(**_as_arrays(self._unsent))

    def pause_columns(self) -> PauseColumns:
        """Return the columns of the paused requests, without a copy."""
        return PauseColumns(**_as_arrays(self._pauses))

    def _move_ended_to_columns(self) -> None:
        """Append the fields of the ended requests to the columns, and drop the requests.

        This is done for many requests at once: one conversion of a table is much faster than one
        append per field and request.
        """
        if not self._ended:
            return
        values_by_field = _read_fields(self._ended)
        for name, column in self._sent.items():
            values = values_by_field[name].astype(_SENT_DTYPES[name])
            column.frombytes(values.tobytes())  # appends the values without a loop over them
        self._ended.clear()


def _read_fields(requests: Sequence[SimRequest]) -> dict[str, NDArray[np.int64]]:
    """Return the values of each field of `SentColumns`, in the order of the requests.

    The fields of all requests are read with one call, which is fast: it fills a table with one row
    per request and one column per name in REQUEST_FIELDS.
    """
    table = np.empty((len(requests), len(REQUEST_FIELDS)), np.int64)
    # There is a compiled class of requests and one in Python. Each writes only its own requests.
    request_class = type(requests[0])
    request_class.pack(requests, table)

    values_by_field = {}
    for request_field, values in zip(REQUEST_FIELDS, table.T, strict=True):
        field = _RENAMED_FIELDS.get(request_field, request_field)
        values_by_field[field] = values

    return values_by_field


def _append_row(columns: dict[str, array[int]], row: tuple[int, ...]) -> None:
    """Append one value to each of the columns."""
    for column, value in zip(columns.values(), row, strict=True):
        column.append(value)


def _as_arrays(columns: dict[str, array[int]]) -> dict[str, Ints]:
    """Return the columns as numpy arrays that use the same memory."""
    return {name: np.frombuffer(column, column.typecode) for name, column in columns.items()}
