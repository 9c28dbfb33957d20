"""The times between output events of each request, which `--keep gaps` stores.

IO. There are two files:

    spool/w0.events        appended by worker 0 during the run. For each request that has ended with
                           two output events or more it holds the slot, the number of events, and
                           their times in ns, each as int64
    gaps/requests.parquet  written after the run. It has a row for each of these requests, with its
                           slot and `inter_chunk_ns`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results import parquet

if TYPE_CHECKING:
    import pyarrow as pa

FILE = Path("gaps") / "requests.parquet"
GROUP_BYTES = 1 << 23
"""Bytes of times that are in memory at once and become a row group of the Parquet file."""
_NUMBER_BYTES = 8


class RequestGaps(NamedTuple):
    """The times between output events of some requests.

    Attributes:
        slots: The slot of each request.
        counts: The number of values of each request.
        values: The values of all requests in ns, request by request.
    """

    slots: NDArray[np.int64]
    counts: NDArray[np.int64]
    values: NDArray[np.int64]

    def each(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Return the slot and the values of each request."""
        values_of_requests = np.split(self.values, np.cumsum(self.counts)[:-1])
        return zip(self.slots.tolist(), values_of_requests, strict=False)


def read_event_files(folder: Path, part_bytes: int = GROUP_BYTES) -> Iterator[RequestGaps]:
    """Yield the times between output events from the files that the workers appended to.

    A request that a killed worker has not written completely is left out.

    Args:
        folder: The folder of the run.
        part_bytes: How much of a file is read at once.
    """
    for path in sorted(folder.glob("spool/w*.events")):
        unread = b""
        with path.open("rb") as file:
            while data := file.read(part_bytes):
                unread += data
                parsed = _parse_complete_requests(unread)
                unread = unread[parsed.size_bytes :]
                yield parsed.gaps


class _ParsedRequests(NamedTuple):
    """The requests at the start of some data, and the number of bytes that they take there."""

    gaps: RequestGaps
    size_bytes: int


def _parse_complete_requests(data: bytes) -> _ParsedRequests:
    """Parse the requests that are complete in a part of a file of event times.

    Each request is a row of int64 numbers: its slot, the number n of its events, and n times. The
    differences of successive numbers are computed for the whole part at once, and those that are no
    difference of two times of the same request are dropped: at the slot, at n, and at the first
    time.
    """
    numbers = np.frombuffer(data, "<i8", len(data) // _NUMBER_BYTES)
    starts: list[int] = []
    position = 0
    while position + 2 <= len(numbers):
        event_count = int(numbers[position + 1])
        end = position + 2 + event_count
        if end > len(numbers):
            break
        starts.append(position)
        position = end

    slot_indexes = np.array(starts, np.int64)
    count_indexes = slot_indexes + 1
    first_time_indexes = slot_indexes + 2
    differences = np.diff(numbers[:position], prepend=0)
    no_gaps = np.concatenate((slot_indexes, count_indexes, first_time_indexes))
    gaps = RequestGaps(
        slots=numbers[slot_indexes],
        counts=numbers[count_indexes] - 1,
        values=np.delete(differences, no_gaps),
    )
    return _ParsedRequests(gaps, position * _NUMBER_BYTES)


def write(folder: Path, groups: Iterable[RequestGaps]) -> None:
    """Write the Parquet file of a run that is over, with a row group for each of the groups.

    Without groups, the file has an empty row group.
    """
    (folder / FILE).parent.mkdir(exist_ok=True)
    remaining = iter(groups)
    no_values = np.zeros(0, np.int64)
    first = next(remaining, RequestGaps(no_values, no_values, no_values))
    parquet.write_tables(folder / FILE, map(_to_table, chain((first,), remaining)))


def _to_table(gaps: RequestGaps) -> pa.Table:
    """Return a table with the slot of each request and the list of its gaps."""
    import pyarrow as pa

    offsets = np.concatenate(([0], np.cumsum(gaps.counts))).astype(np.int32)
    lists = pa.ListArray.from_arrays(parquet.nullable(offsets), parquet.nullable(gaps.values))
    return pa.table({"slot": parquet.nullable(gaps.slots), "inter_chunk_ns": lists})
