"""Convert the records in the record log into Parquet, during a run or after it.

IO. `compactor_process.py` runs this during a long run. A complete file of the record log is deleted
once its records are in Parquet, so the record log does not grow with the run.
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

MIN_WAIT_S = 1.5
"""The time between two reads of the record log at the start of a run."""
READS_PER_RUN = 200
"""The wait is the time since the start divided by this, which limits the number of small files."""
MAX_WAIT_S = 60.0
MERGE_ROWS = 1_000_000
"""The least number of records in a row group of the merged file."""


class ParquetParts:
    """Small Parquet files of the records of a run, which are merged into one file at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: list[Path] = []
        (folder / "requests").mkdir(exist_ok=True)

    def add(self, segment: Segment, first_row: int, rows: NDArray[np.void]) -> None:
        """Write new records of a segment. The first one is record `first_row` of its worker."""
        self._write(segment.worker, first_row, rows)

    def replace_segment(self, segment: Segment) -> None:
        """Write the records of a complete segment as one file that replaces the small ones."""
        small_files = [path for path in self._parts if _is_part_of(path, segment)]
        # This replaces the first small file, so the records are in Parquet at any time.
        complete = self._write(segment.worker, segment.first, np.fromfile(segment.path, ROW))
        for path in small_files:
            if path != complete:
                path.unlink()
                self._parts.remove(path)

    def _write(self, worker: int, first_row: int, rows: NDArray[np.void]) -> Path:
        path = self._folder / "requests" / f"w{worker}-{first_row:012d}.parquet"
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
        """Yield the records of all parts in tables that become the row groups of the merged file.

        A part has few records, and many small row groups would make reading slow. So parts are
        joined until a table has at least MERGE_ROWS records. The last table may have fewer.
        """
        import pyarrow.parquet as pq

        tables: list[pa.Table] = []
        row_count = 0
        for part in self._parts:
            with pq.ParquetFile(part) as file:
                table = file.read()

            tables.append(table)
            row_count += len(table)

            if row_count >= MERGE_ROWS:
                yield _join_tables(tables)
                tables.clear()
                row_count = 0

        if tables:
            yield _join_tables(tables)


def _join_tables(tables: list[pa.Table]) -> pa.Table:
    """Return a table with the rows of all tables.

    Each table has its own dictionaries of names and texts, and a row group needs a common one.
    """
    import pyarrow as pa

    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _is_part_of(path: Path, segment: Segment) -> bool:
    """Return True if a Parquet file has records of a complete segment.

    Its name has the number of the worker and the index of its first record: `w0-000000100000`.
    """
    worker, first_record = path.stem.removeprefix("w").split("-")
    segment_size = segment.path.stat().st_size // ROW.itemsize
    segment_end = segment.first + segment_size
    return int(worker) == segment.worker and segment.first <= int(first_record) < segment_end


def compact_records(folder: Path, end_signal: TextIO | None = None) -> None:
    """Convert the records of a run to Parquet until the run is over, and then merge the files.

    Args:
        folder: The folder of the run.
        end_signal: A pipe that becomes readable, or ends, when the run is over. None if the run is
            over already; its records are then converted at once.
    """
    parts = ParquetParts(folder)
    converted_rows: dict[int, int] = {}
    start_s = monotonic()

    is_run_over = False
    while not is_run_over:
        is_run_over = end_signal is None or _wait_for_end(end_signal, monotonic() - start_s)
        _convert_new_records(folder, parts, converted_rows)

    parts.merge()


def _wait_for_end(end_signal: TextIO, elapsed_s: float) -> bool:
    """Wait until it is time for the next read of the record log. Return True if the run is over.

    The waits become longer with the time that the run has taken, so that a long run has a limited
    number of small files.
    """
    wait_s = min(MAX_WAIT_S, max(MIN_WAIT_S, elapsed_s / READS_PER_RUN))
    readable, _, _ = select.select([end_signal], [], [], wait_s)
    return bool(readable)


def _convert_new_records(folder: Path, parts: ParquetParts, converted_rows: dict[int, int]) -> None:
    """Convert the records that workers have added to the record log since the last call.

    Each worker writes its records to one segment (a file of the record log) after the other. New
    records are first written to small Parquet files. When a segment is complete, a single Parquet
    file of all its records replaces these, and the segment is deleted.

    Args:
        folder: The folder of the run.
        parts: Writes the Parquet files.
        converted_rows: For each worker, how many of its records are in Parquet. It is updated.
    """
    all_segments = segments(folder)

    # The segments of a worker are in order, so a dict keeps the last one.
    last_segment_of_worker = {segment.worker: segment for segment in all_segments}
    for segment in all_segments:
        first_new_row = converted_rows.get(segment.worker, 0)
        new_rows = _read_rows_from(segment, first_new_row)
        if len(new_rows):
            parts.add(segment, first_new_row, new_rows)
            converted_rows[segment.worker] = first_new_row + len(new_rows)

        # A worker begins a segment when the one before it is full.
        is_complete = segment != last_segment_of_worker[segment.worker]
        if is_complete:
            parts.replace_segment(segment)
            segment.path.unlink()


def _read_rows_from(segment: Segment, first_row: int) -> NDArray[np.void]:
    """Return the records of a segment (a file of a worker's records) from a record on.

    A last record that the worker is still writing is left for the next read.

    Args:
        segment: The segment. Its first record is record `segment.first` of its worker.
        first_row: The first record to return, counted from the first record of the worker. Example:
            from a segment with the records 100 to 199 of a worker, 150 returns the second half.
    """
    skipped_rows = first_row - segment.first
    complete_rows = segment.path.stat().st_size // ROW.itemsize
    remaining_rows = complete_rows - skipped_rows
    if remaining_rows <= 0:
        return np.zeros(0, ROW)
    return np.fromfile(segment.path, ROW, remaining_rows, offset=skipped_rows * ROW.itemsize)
