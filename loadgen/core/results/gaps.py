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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results import parquet

FILE = Path("gaps") / "requests.parquet"
GROUP_BYTES = 1 << 23
"""Bytes of times that are in memory at once and become a row group of the Parquet file."""


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
    """Yield what the workers have appended, also if one was killed while it wrote."""
    for path in sorted(folder.glob("spool/w*.events")):
        unread = b""
        with path.open("rb") as file:
            while data := file.read(part_bytes):
                unread += data
                gaps, used_bytes = _parse_events(unread)
                unread = unread[used_bytes:]
                yield gaps


def _parse_events(data: bytes) -> tuple[RequestGaps, int]:
    """Return the requests that are complete in this part of a file, and their size in bytes."""
    numbers = np.frombuffer(data, "<i8", len(data) // 8)
    starts: list[int] = []
    position = 0
    while position + 2 <= len(numbers):
        end = position + 2 + int(numbers[position + 1])
        if end > len(numbers):
            break
        starts.append(position)
        position = end
    slot_indexes = np.array(starts, np.int64)
    # Of each request, the differences at its slot, at its count and at its first time are dropped.
    differences = np.diff(numbers[:position], prepend=0)
    dropped = np.concatenate((slot_indexes, slot_indexes + 1, slot_indexes + 2))
    values = np.delete(differences, dropped)
    gaps = RequestGaps(numbers[slot_indexes], numbers[slot_indexes + 1] - 1, values)
    return gaps, position * 8


def write(folder: Path, groups: Iterable[RequestGaps]) -> None:
    """Write the Parquet file of a run that is over, with a row group for each of the groups."""
    (folder / FILE).parent.mkdir(exist_ok=True)
    remaining = iter(groups)
    nothing = np.zeros(0, np.int64)
    first = next(remaining, RequestGaps(nothing, nothing, nothing))
    parquet.write_tables(folder / FILE, map(_to_table, chain((first,), remaining)))


def _to_table(gaps: RequestGaps) -> Any:
    import pyarrow as pa

    offsets = np.concatenate(([0], np.cumsum(gaps.counts))).astype(np.int32)
    lists = pa.ListArray.from_arrays(parquet.nullable(offsets), parquet.nullable(gaps.values))
    return pa.table({"slot": parquet.nullable(gaps.slots), "inter_chunk_ns": lists})
