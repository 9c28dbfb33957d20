"""The process beside a run that takes what its workers append to the spool: `python -m loadgen.recorder FOLDER`.

IO. With `--keep raw` rows become Parquet, small files while the run goes and one at its end; else they are folded into
a `ledger.Ledger`, and a sample of them may be kept. Either way a file of the spool goes once it is read to its end, so
that neither memory nor the spool grows with the run. It lives until its standard input ends.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loadgen.metrics.accumulator import Accumulator
from loadgen.results import manifest, slot_ranges, store
from loadgen.results.record import ROW
from loadgen.results.store import Segment

PART_SECONDS = 1.5  # between two looks at the spool, at first
PARTS = 200  # looks in as long as the run has taken so far: small files are few, however long it takes
LONGEST_S = 60.0
SAVE_SECONDS = 20.0  # between two copies of the ledger on disk
MERGE_ROWS = 1_000_000  # rows per row group of the merged file
SAMPLE_ROWS = 100_000  # of --keep sample: at least half as many, once there were that many
_SCATTER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: multiples of it lie evenly


class Compactor:
    """The process that turns rows into Parquet, or folds them, while a run goes. `finish` waits until all is done."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadgen.execution.compactor", str(folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def finish(self) -> bool:
        """True when every row is in Parquet, or folded; the caller may then drop the spool."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait() == 0


class Keeping(Protocol):
    """What becomes of rows."""

    def take(self, segment: Segment, start: int, rows: NDArray[np.void]) -> None:
        """Some rows, the first of them row `start` of the worker."""

    def done(self, segment: Segment) -> bool:
        """All rows of a segment have been taken; True when its file may go."""

    def end(self) -> None:
        """There is nothing more to come."""


class Raw:
    """Rows into Parquet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: dict[Path, int] = {}  # with the row that each begins with
        (folder / "requests").mkdir(exist_ok=True)

    def take(self, segment: Segment, start: int, rows: NDArray[np.void]) -> None:
        self._write(segment.worker, start, rows)

    def done(self, segment: Segment) -> bool:
        small = [path for path in self._parts if _inside(path, segment)]
        rows = np.fromfile(segment.path, ROW)
        self._write(segment.worker, segment.first, rows)  # in the place of the first small one
        whole = self._path(segment.worker, segment.first)
        for path in small:
            if path != whole:
                path.unlink()
                del self._parts[path]
        return True

    def _path(self, worker: int, start: int) -> Path:
        return self._folder / "requests" / f"w{worker}-{start:012d}.parquet"

    def _write(self, worker: int, start: int, rows: NDArray[np.void]) -> None:
        import pyarrow.parquet as pq

        path = self._path(worker, start)
        scratch = path.with_suffix(".new")
        pq.write_table(store.to_table(rows, store.worker_texts(self._folder, worker)), scratch, compression="zstd")
        scratch.replace(path)
        self._parts[path] = start

    def end(self) -> None:
        """One file of all parts, in row groups, without holding them all in memory."""
        if not self._parts:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        scratch = self._folder / "requests" / "requests.new"
        writer = None
        held: list[Any] = []
        for part in [*self._parts, None]:
            if part is not None:
                held.append(pq.read_table(part))
            if held and (part is None or sum(map(len, held)) >= MERGE_ROWS):
                table = pa.concat_tables(held).unify_dictionaries().combine_chunks()
                held.clear()
                writer = writer or pq.ParquetWriter(scratch, table.schema, compression="zstd")
                writer.write_table(table)
        assert writer is not None
        writer.close()
        scratch.replace(self._folder / "requests" / store.MERGED)
        for path in self._parts:
            path.unlink()


class Fold:
    """Rows into a ledger, and some of them into a sample."""

    def __init__(self, folder: Path, header: manifest.Header) -> None:
        self._folder, self._header, self._ledger = folder, header, Accumulator(header)
        self._seen: dict[int, NDArray[np.void]] = {}  # by worker
        self._sampled = header.keep == "sample"
        self._sample: list[tuple[int, NDArray[np.void]]] = []  # worker, rows
        self._one_in = 1
        self._saved = monotonic()

    def take(self, segment: Segment, start: int, rows: NDArray[np.void]) -> None:
        self._ledger.add(rows, store.worker_texts(self._folder, segment.worker))
        self._see(segment.worker, rows)
        if self._sampled:
            self._sample.append((segment.worker, self._chosen(rows)))
            while sum(len(some) for _, some in self._sample) > SAMPLE_ROWS:
                self._one_in *= 2
                self._sample = [(worker, self._chosen(some)) for worker, some in self._sample]
        if monotonic() > self._saved + SAVE_SECONDS:
            self._save()

    def _see(self, worker: int, rows: NDArray[np.void]) -> None:
        """Which slots these are of stays, should the worker die: see `seen.py`."""
        known, new = self._seen.get(worker, np.zeros(0, slot_ranges.RUN)), slot_ranges.of(rows, self._header)
        self._seen[worker] = slot_ranges.joined(np.concatenate((known, new)), self._header.turns)
        store.replace(self._folder / "spool" / f"w{worker}.seen", self._seen[worker].tobytes())

    def _chosen(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        """One in so many, by the number of the slot alone: whatever happened to it has no say."""
        scattered = rows["slot"].astype(np.uint64) * _SCATTER >> np.uint64(40)
        chosen: NDArray[np.void] = rows[scattered % np.uint64(self._one_in) == 0]
        return chosen

    def done(self, segment: Segment) -> bool:
        self._save()
        return True

    def _save(self) -> None:
        store.replace(self._folder / "flows" / store.LEDGER, self._ledger.to_bytes())
        self._saved = monotonic()

    def end(self) -> None:
        self._save()
        if not self._sampled:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables = [
            store.to_table(np.concatenate([some for of, some in self._sample if of == worker]), texts)
            for worker in sorted({worker for worker, _ in self._sample})
            for texts in [store.worker_texts(self._folder, worker)]
        ]
        if tables:
            (self._folder / "sample").mkdir(exist_ok=True)
            whole = pa.concat_tables(tables).unify_dictionaries()
            pq.write_table(whole, self._folder / "sample" / store.MERGED, compression="zstd")


def _inside(path: Path, segment: Segment) -> bool:
    """Whether a part holds rows of a segment that is complete."""
    worker, first = path.stem[1:].split("-")
    size = segment.path.stat().st_size // ROW.itemsize
    return int(worker) == segment.worker and segment.first <= int(first) < segment.first + size


def record(folder: Path, ended: Any) -> None:
    """Until `ended` has something to read, or ends: take what comes; then what is left, and finish."""
    path = folder / "run.json"
    header = manifest.decode(path.read_bytes(), str(path)) if path.exists() else manifest.Header()
    keeping: Keeping = Raw(folder) if header.keep == "raw" else Fold(folder, header)
    taken: dict[int, int] = {}  # rows of each worker
    began = monotonic()
    over = False
    while not over:
        wait = max(PART_SECONDS, min(LONGEST_S, (monotonic() - began) / PARTS))
        over = bool(select.select([ended], [], [], wait)[0])
        for segment in (spooled := store.segments(folder)):
            start = taken.get(segment.worker, 0)
            last = segment == max(one for one in spooled if one.worker == segment.worker)
            count = segment.path.stat().st_size // ROW.itemsize - (start - segment.first)
            if count > 0:
                offset = (start - segment.first) * ROW.itemsize
                keeping.take(segment, start, np.fromfile(segment.path, ROW, count, offset=offset))
                taken[segment.worker] = start + count
            if not last and keeping.done(segment):
                segment.path.unlink()
    keeping.end()


if __name__ == "__main__":
    os.nice(5)  # behind the load, but not behind every neighbour when the run waits for the merged file
    record(Path(sys.argv[1]), sys.stdin)
