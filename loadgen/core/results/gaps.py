"""The gaps between the output events of each request, where `--keep gaps` keeps them. IO.

spool/w0.events           while the run goes, appended by worker 0: of each request that has ended with two output
                          events or more its slot, how many they are, and their instants in ns, each as int64
gaps/requests.parquet     after its end: a row for each of these requests, its slot and `inter_chunk_ns`
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
GROUP_BYTES = 1 << 23  # of instants that are in memory at once, and become a row group


class RequestGaps(NamedTuple):
    """Of some requests: their slots, how many gaps each has, and all gaps one after the other, ns."""

    slots: NDArray[np.int64]
    counts: NDArray[np.int64]
    values: NDArray[np.int64]

    def each(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Slot, and the gaps of its request."""
        return zip(
            self.slots.tolist(), np.split(self.values, np.cumsum(self.counts)[:-1]), strict=False
        )


def spooled(folder: Path, part_bytes: int = GROUP_BYTES) -> Iterator[RequestGaps]:
    """What the workers have appended, also where one was killed in the middle of it."""
    for path in sorted(folder.glob("spool/w*.events")):
        rest = b""
        with path.open("rb") as file:
            while data := file.read(part_bytes):
                found, used = _whole(rest + data)
                rest = (rest + data)[used:]
                yield found


def _whole(data: bytes) -> tuple[RequestGaps, int]:
    """The requests that are whole in this part of a file, and how many bytes they have."""
    numbers = np.frombuffer(data, "<i8", len(data) // 8)
    heads: list[int] = []
    at = 0
    while at + 2 <= len(numbers) and (end := at + 2 + int(numbers[at + 1])) <= len(numbers):
        heads.append(at)
        at = end
    head = np.array(heads, np.int64)
    steps = np.diff(
        numbers[:at], prepend=0
    )  # of each request but its slot, its count, its first instant
    values = np.delete(steps, np.concatenate((head, head + 1, head + 2)))
    return RequestGaps(numbers[head], numbers[head + 1] - 1, values), at * 8


def write(folder: Path, groups: Iterable[RequestGaps]) -> None:
    """Write the file of a run that is over."""
    (folder / FILE).parent.mkdir(exist_ok=True)
    found = iter(groups)
    first = next(found, RequestGaps(*[np.zeros(0, np.int64)] * 3))
    parquet.write(folder / FILE, map(_table, chain((first,), found)))


def _table(found: RequestGaps) -> Any:
    import pyarrow as pa

    ends = np.concatenate(([0], np.cumsum(found.counts))).astype(np.int32)
    gaps = pa.ListArray.from_arrays(parquet.nullable(ends), parquet.nullable(found.values))
    return pa.table({"slot": parquet.nullable(found.slots), "inter_chunk_ns": gaps})
