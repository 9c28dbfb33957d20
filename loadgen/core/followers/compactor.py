"""Reads the spool of the workers, during a run (`compactor_process.py`) or after it, and makes of it what is kept.

IO. With `--keep raw`, it writes rows to Parquet: small files during the run and one file at the end. Otherwise it adds
them to a `metrics.accumulator.Accumulator` and may keep a sample of them. In both cases it deletes a complete file of
the spool after reading it, so neither memory nor the spool grows with the run.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.accumulator import Accumulator
from loadgen.core.results import manifest, parquet, slot_ranges, store
from loadgen.core.results.record import ROW, joined, picked
from loadgen.core.results.spool import Segment, segments, worker_texts

PART_SECONDS = 1.5  # between two reads of the spool, at the start of a run
PARTS = 200  # the wait is the run time so far divided by this: the number of small files stays low
LONGEST_S = 60.0  # longest wait between two reads
SAVE_SECONDS = 20.0  # between two writes of the accumulator to disk
MERGE_ROWS = 1_000_000  # rows per row group of the merged file
SAMPLE_ROWS = (
    100_000  # most rows of --keep sample; at least half as many once a run has had this many
)
_SCATTER = np.uint64(
    0x9E3779B97F4A7C15
)  # 2^64 / golden ratio: its multiples are evenly distributed modulo 2^64


class Keeping(Protocol):
    """What is done with the rows of the spool."""

    def take(self, segment: Segment, start: int, rows: NDArray[np.void]) -> None:
        """Take new rows of a segment. `start`: index of the first one among all rows of the worker."""

    def done(self, segment: Segment) -> bool:
        """All rows of a segment have been taken. True when its file may be deleted."""

    def end(self) -> None:
        """There are no more rows: finish the output."""


class Raw:
    """--keep raw: writes all rows to Parquet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: dict[Path, int] = {}  # file -> index of its first row
        (folder / "requests").mkdir(exist_ok=True)

    def take(self, segment: Segment, start: int, rows: NDArray[np.void]) -> None:
        self._write(segment.worker, start, rows)

    def done(self, segment: Segment) -> bool:
        parts = [path for path in self._parts if _is_part_of(path, segment)]
        rows = np.fromfile(segment.path, ROW)
        self._write(segment.worker, segment.first, rows)  # replaces the first small file
        complete = self._path(segment.worker, segment.first)
        for path in parts:
            if path != complete:
                path.unlink()
                del self._parts[path]
        return True

    def _path(self, worker: int, start: int) -> Path:
        return self._folder / "requests" / f"w{worker}-{start:012d}.parquet"

    def _write(self, worker: int, start: int, rows: NDArray[np.void]) -> None:
        path = self._path(worker, start)
        parquet.write(path, [parquet.to_table(rows, worker_texts(self._folder, worker))])
        self._parts[path] = start

    def end(self) -> None:
        """Merge all parts into one file, one row group at a time, so that they are never all in memory."""
        if not self._parts:
            return
        if len(self._parts) == 1:
            next(iter(self._parts)).replace(self._folder / "requests" / store.MERGED)
            return
        parquet.write(self._folder / "requests" / store.MERGED, self._row_groups())
        for path in self._parts:
            path.unlink()

    def _row_groups(self) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables: list[Any] = []
        last = list(self._parts)[-1]
        for part in self._parts:
            with pq.ParquetFile(part) as file:
                tables.append(file.read())
            if part == last or sum(map(len, tables)) >= MERGE_ROWS:
                yield pa.concat_tables(tables).unify_dictionaries().combine_chunks()
                tables.clear()


class Fold:
    """--keep sample or histogram: adds rows to an accumulator, and keeps a sample of them."""

    def __init__(
        self, folder: Path, header: manifest.Header, sample_rows: int = SAMPLE_ROWS
    ) -> None:
        self._folder, self._header, self._accumulator = folder, header, Accumulator(header)
        self._sample_rows = sample_rows
        self._recorded: dict[
            int, NDArray[np.void]
        ] = {}  # worker -> ranges of slots that have a row
        self._keep_sample = header.keep == "sample"
        self._sample: list[tuple[int, NDArray[np.void]]] = []  # worker, rows
        self._one_in = 1
        self._saved_at = monotonic()

    def take(self, segment: Segment, start: int, rows: NDArray[np.void]) -> None:
        self._accumulator.add(rows, worker_texts(self._folder, segment.worker))
        self._accumulator.taken[segment.worker] = start + len(rows)
        self._mark_recorded(segment.worker, rows)
        if self._keep_sample:
            self._sample.append((segment.worker, self._in_sample(rows)))
            while sum(len(sampled_rows) for _, sampled_rows in self._sample) > self._sample_rows:
                self._one_in *= 2
                self._sample = [
                    (worker, self._in_sample(sampled_rows)) for worker, sampled_rows in self._sample
                ]
        if monotonic() > self._saved_at + SAVE_SECONDS:
            self._save()

    def _mark_recorded(self, worker: int, rows: NDArray[np.void]) -> None:
        """Store which slots have a row, in case the worker dies: see `results/slot_ranges.py`."""
        known, added = (
            self._recorded.get(worker, np.zeros(0, slot_ranges.RUN)),
            slot_ranges.of(rows, self._header),
        )
        self._recorded[worker] = slot_ranges.joined(
            np.concatenate((known, added)), self._header.turns
        )
        store.replace(self._folder / "spool" / f"w{worker}.seen", self._recorded[worker].tobytes())

    def _in_sample(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        """The rows of the sample: one in `_one_in`, chosen by slot number only, so that no outcome is favoured."""
        scattered = rows["slot"].astype(np.uint64) * _SCATTER >> np.uint64(40)
        return picked(rows, scattered % np.uint64(self._one_in) == 0)

    def done(self, segment: Segment) -> bool:
        self._save()
        return True

    def _save(self) -> None:
        store.replace(self._folder / "flows" / store.LEDGER, self._accumulator.to_bytes())
        self._saved_at = monotonic()

    def end(self) -> None:
        self._save()
        if not self._keep_sample:
            return
        import pyarrow as pa

        tables = []
        for worker in sorted({worker for worker, _ in self._sample}):
            rows = joined(
                sampled_rows for of_worker, sampled_rows in self._sample if of_worker == worker
            )
            tables.append(parquet.to_table(rows, worker_texts(self._folder, worker)))
        if tables:
            (self._folder / "sample").mkdir(exist_ok=True)
            parquet.write(
                self._folder / "sample" / store.MERGED,
                [pa.concat_tables(tables).unify_dictionaries()],
            )


def _is_part_of(path: Path, segment: Segment) -> bool:
    """Whether the Parquet file `path` holds rows of the complete segment."""
    worker, first = path.stem[1:].split("-")
    size = segment.path.stat().st_size // ROW.itemsize
    return int(worker) == segment.worker and segment.first <= int(first) < segment.first + size


def record(folder: Path, ended: Any = None) -> None:
    """Take new rows until `ended` (a file) is readable or at its end; then take the remaining rows and finish.

    Without `ended`, the run is over.
    """
    path = folder / "run.json"
    header = manifest.decode(path.read_bytes(), str(path)) if path.exists() else manifest.Header()
    keeping: Keeping = Raw(folder) if header.keep == "raw" else Fold(folder, header)
    taken: dict[int, int] = {}  # worker -> number of rows taken
    started_at = monotonic()
    last_pass = False
    while not last_pass:
        wait = max(PART_SECONDS, min(LONGEST_S, (monotonic() - started_at) / PARTS))
        last_pass = ended is None or bool(select.select([ended], [], [], wait)[0])
        for segment in (spooled := segments(folder)):
            start = taken.get(segment.worker, 0)
            is_open = segment == max(other for other in spooled if other.worker == segment.worker)
            count = segment.path.stat().st_size // ROW.itemsize - (start - segment.first)
            if count > 0:
                offset = (start - segment.first) * ROW.itemsize
                keeping.take(segment, start, np.fromfile(segment.path, ROW, count, offset=offset))
                taken[segment.worker] = start + count
            if not is_open and keeping.done(segment):
                segment.path.unlink()
    keeping.end()
