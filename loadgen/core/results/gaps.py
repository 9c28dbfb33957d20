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
_NUMBER_TYPE = "<i8"  # int64, little-endian
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
        part_bytes: How much of a file is read at once, to limit the memory.
    """
    for path in sorted(folder.glob("spool/w*.events")):
        unparsed = b""
        with path.open("rb") as file:
            while data := file.read(part_bytes):
                unparsed += data
                parsed = _parse_complete_requests(unparsed)
                unparsed = unparsed[parsed.size_bytes :]
                yield parsed.gaps


class _ParsedRequests(NamedTuple):
    """The requests at the start of some data, and the number of bytes that they take there."""

    gaps: RequestGaps
    size_bytes: int


def _parse_complete_requests(data: bytes) -> _ParsedRequests:
    """Return the gaps of the requests that are complete in a part of a file of event times.

    In the file, each request is a sequence of integers: its slot (the id of its place in the
    schedule), the number of its events, and the time of each event. A gap is the time from one
    event to the next. Example: slot 7 has three events, at 100, 130 and 190, with the gaps 30 and
    60.

        numbers      7    3  100  130  190
        differences  7   -4   97   30   60    each number minus the one before it
        is_gap       no   no   no  yes  yes

    Computing all differences at once, and then leaving out those that are no gaps, is much faster
    than a loop over the requests.
    """
    all_numbers = np.frombuffer(data, _NUMBER_TYPE, len(data) // _NUMBER_BYTES)
    slot_indexes, complete_length = _find_complete_requests(all_numbers)
    numbers = all_numbers[:complete_length]
    event_counts = numbers[slot_indexes + 1]

    differences = np.diff(numbers, prepend=0)
    is_gap = np.ones(complete_length, bool)
    is_gap[slot_indexes] = False
    is_gap[slot_indexes + 1] = False  # the number of events
    is_gap[slot_indexes + 2] = False  # the first time, which has no time before it

    gaps = RequestGaps(
        slots=numbers[slot_indexes],
        counts=event_counts - 1,
        values=differences[is_gap],
    )
    return _ParsedRequests(gaps, complete_length * _NUMBER_BYTES)


def _find_complete_requests(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Find the requests in numbers of a file of event times, of which the last may be incomplete.

    A request consists of its slot, the number n of its events, and n times.

    Returns:
        The index at which each complete request begins, and the index after the last one. Example:
        7, 1, 100, 8, 2, 130, 150, 9 gives [0, 3] and 7. The request of slot 9 is incomplete.
    """
    header_length = 2  # the slot and the number of events
    start_indexes: list[int] = []

    start = 0
    while start + header_length <= len(numbers):
        event_count = int(numbers[start + 1])
        end = start + header_length + event_count
        if end > len(numbers):
            break
        start_indexes.append(start)
        start = end

    return np.array(start_indexes, np.int64), start


def write_request_gaps(folder: Path, groups: Iterable[RequestGaps]) -> None:
    """Write the times between output events of each request to the Parquet file of a finished run.

    Args:
        folder: The folder of the run.
        groups: The values of some requests each, which become a row group of the file. They are
            taken one by one, so that only one of them needs to be in memory.
    """
    (folder / FILE).parent.mkdir(exist_ok=True)
    parquet.write_tables(folder / FILE, _gap_tables(groups))


def _gap_tables(groups: Iterable[RequestGaps]) -> Iterator[pa.Table]:
    """Yield the table of each group, or an empty table if there is no group."""
    has_groups = False
    for gaps in groups:
        has_groups = True
        yield _to_table(gaps)
    if not has_groups:
        no_values = np.zeros(0, np.int64)
        yield _to_table(RequestGaps(no_values, no_values, no_values))


def _to_table(gaps: RequestGaps) -> pa.Table:
    """Return a table with the slot of each request and the list of its gaps.

    Arrow stores lists as one array of all values and the offset at which each list ends.
    """
    import pyarrow as pa

    offsets = np.concatenate(([0], np.cumsum(gaps.counts))).astype(np.int32)
    lists = pa.ListArray.from_arrays(parquet.nullable(offsets), parquet.nullable(gaps.values))
    return pa.table({"slot": parquet.nullable(gaps.slots), "inter_chunk_ns": lists})
