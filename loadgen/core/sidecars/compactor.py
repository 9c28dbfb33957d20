"""Converts the records that workers append to the spool into Parquet, during a run or after it.

IO. `compactor_process.py` runs this during a long run. A complete file of the spool is deleted once
its records are in Parquet, so the spool does not grow with the run.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from loadgen.core.results import parquet, store
from loadgen.core.results.record import ROW
from loadgen.core.results.record_log import Segment, segments, worker_texts

if TYPE_CHECKING:
    from typing import TextIO

    import pyarrow as pa
    from numpy.typing import NDArray

SHORTEST_WAIT_S = 1.5  # between two reads of the spool, at the start of a run
# The wait is the time since the start divided by this, so that the number of small files stays low.
READS_PER_RUN = 200
LONGEST_WAIT_S = 60.0
MERGE_ROWS = 1_000_000  # records per row group of the merged file


class ParquetParts:
    """Small Parquet files of the records of a run, which are merged into one file at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: list[Path] = []
        (folder / "requests").mkdir(exist_ok=True)

    def add(self, segment: Segment, start: int, rows: NDArray[np.void]) -> None:
        """Write new records of a segment; the first one has the index `start` at its worker."""
        self._write(segment.worker, start, rows)

    def replace_segment(self, segment: Segment) -> None:
        """Write the records of a complete segment as one file that replaces the small ones."""
        small_files = [path for path in self._parts if _is_part_of(path, segment)]
        # This replaces the first small file, so the records are in Parquet at any time.
        complete = self._write(segment.worker, segment.first, np.fromfile(segment.path, ROW))
        for path in small_files:
            if path != complete:
                path.unlink()
                self._parts.remove(path)

    def _write(self, worker: int, start: int, rows: NDArray[np.void]) -> Path:
        path = self._folder / "requests" / f"w{worker}-{start:012d}.parquet"
        parquet.write_tables(path, [parquet.to_table(rows, worker_texts(self._folder, worker))])
        if path not in self._parts:
            self._parts.append(path)
        return path

    def merge(self) -> None:
        """Merge all parts into one file, with one row group in memory at a time."""
        merged = self._folder / "requests" / store.MERGED
        if len(self._parts) == 1:
            self._parts[0].replace(merged)
        elif self._parts:
            parquet.write_tables(merged, self._row_groups())
            for path in self._parts:
                path.unlink()

    def _row_groups(self) -> Iterator[pa.Table]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables: list[pa.Table] = []
        for part in self._parts:
            with pq.ParquetFile(part) as file:
                tables.append(file.read())
            if part == self._parts[-1] or sum(map(len, tables)) >= MERGE_ROWS:
                yield pa.concat_tables(tables).unify_dictionaries().combine_chunks()
                tables.clear()


def _is_part_of(path: Path, segment: Segment) -> bool:
    """Return whether the Parquet file `path` holds records of the complete segment."""
    worker, first = path.stem[1:].split("-")
    size = segment.path.stat().st_size // ROW.itemsize
    return int(worker) == segment.worker and segment.first <= int(first) < segment.first + size


def compact_records(folder: Path, ended: TextIO | None = None) -> None:
    """Convert the records of a run to Parquet, and merge the files when it is over.

    The run is over when `ended` is readable or at its end. Without `ended`, it is over already.
    """
    parts = ParquetParts(folder)
    rows_written: dict[int, int] = {}  # by worker
    started_at = monotonic()
    is_last_read = False
    while not is_last_read:
        wait_s = (monotonic() - started_at) / READS_PER_RUN
        wait_s = min(LONGEST_WAIT_S, max(SHORTEST_WAIT_S, wait_s))
        is_last_read = ended is None or bool(select.select([ended], [], [], wait_s)[0])
        for segment, is_complete in _with_completeness(segments(folder)):
            start = rows_written.get(segment.worker, 0)
            rows_before = start - segment.first
            count = segment.path.stat().st_size // ROW.itemsize - rows_before
            if count > 0:
                offset = rows_before * ROW.itemsize
                parts.add(segment, start, np.fromfile(segment.path, ROW, count, offset=offset))
                rows_written[segment.worker] = start + count
            if is_complete:
                parts.replace_segment(segment)
                segment.path.unlink()
    parts.merge()


def _with_completeness(spooled: list[Segment]) -> Iterator[tuple[Segment, bool]]:
    """Yield each segment and whether its worker has begun a later one."""
    latest = {segment.worker: segment.first for segment in spooled}
    for segment in spooled:
        yield segment, segment.first < latest[segment.worker]
