"""What a worker appends while it runs, and how to read it. Does IO.

A worker only appends to files and renames them, so everything it wrote is readable after `kill -9`. `store.py` lists
the files; `record.py` defines the rows.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from numpy.typing import NDArray

from loadgen.core.results.files import PRIVATE, private, replace
from loadgen.core.results.manifest import WorkerSample, decode_worker_samples
from loadgen.core.results.parquet import from_parquet
from loadgen.core.results.record import BIN_NS, ROW, joined
from loadgen.core.server_metrics import series
from loadgen.core.stats.histogram import Histogram, bucket_numbers

SEGMENT_ROWS = 100_000  # rows in one file of the spool: 20 MB
DIFFERENT_TEXTS = (
    10_000  # error texts that a worker stores; later ones are counted without their text
)
HEAT_EDGES_NS: NDArray[np.int64] = np.logspace(4, 11, 85).astype(
    np.int64
)  # 10 µs to 100 s, 12 per decade
HEAT = np.dtype([("until_ns", "<i8"), ("counts", "<i8", (len(HEAT_EDGES_NS) + 1,))])
"""Gaps between output events, counted by length, since the previous record. `until_ns`: from the start of the run.

`counts`: below the first edge of HEAT_EDGES_NS, between two edges, above the last edge.
"""
GROWING_BINS = (
    1_000  # last bins of a timeline, which may still change: an event is counted within 10 s
)
STAMPS = "stamps-"  # with the stage's number: no dot, since readers of schema 1.0 take w0.NAME.S for a timeline
_HEAT_STARTS = np.concatenate(([0], bucket_numbers(HEAT_EDGES_NS)))


class Timeline:
    """Output events of one stage: histograms of the gaps between them and of their stamp errors, counts per BIN_NS."""

    __slots__ = ("_start_ns", "bins", "errors", "events", "first", "gaps", "used")

    def __init__(self, start_ns: int) -> None:
        self.events = EventTimeline()
        self.gaps = Histogram()
        self.errors = Histogram()
        self.bins: NDArray[np.int64] = np.zeros(1024, np.int64)
        self.first = 0  # number of the bin in `bins[0]`; earlier bins are stored and final
        self.used = 0
        self._start_ns = start_ns

    def fold(self) -> int:
        """Count what `events` has collected, then clear it; returns how many output events it was."""
        flow = self.events
        together = np.array(flow.together, np.int64).reshape(-1, 2)
        further = int(together[:, 1].sum())
        if flow.gaps:
            self.gaps.add(np.array(flow.gaps, np.int64))
            self.gaps.add_zeros(further)
            flow.gaps.clear()
        if not flow.instants:
            return 0
        errors = np.array(flow.errors, np.int64).reshape(-1, 2)
        events = len(flow.instants) + further
        self.errors.add_zeros(events - int(errors[:, 1].sum()))
        self.errors.add(errors[:, 0], errors[:, 1])
        instants = np.concatenate((np.array(flow.instants, np.int64), together[:, 0]))
        times = np.concatenate((np.ones(len(flow.instants), np.int64), together[:, 1]))
        for collected in (flow.instants, flow.together, flow.errors):
            collected.clear()
        bin_numbers = (instants - self._start_ns) // BIN_NS - self.first
        counts = np.bincount(np.maximum(bin_numbers, 0), weights=times).astype(np.int64)
        if len(counts) > len(self.bins):
            larger = np.zeros(len(counts) * 2, np.int64)
            larger[: len(self.bins)] = self.bins
            self.bins = larger
        self.bins[: len(counts)] += counts
        self.used = max(self.used, len(counts))
        return events

    def stored(self) -> None:
        """Everything so far is on disk: keep only the bins that may still change."""
        final = self.used - GROWING_BINS
        if final > GROWING_BINS:
            self.bins[:GROWING_BINS] = self.bins[final : self.used]
            self.bins[GROWING_BINS:] = 0
            self.first += final
            self.used = GROWING_BINS


class RecordLog:
    """The files that one worker appends to. It collects in memory; `flush` writes the new data, one call per file."""

    def __init__(self, folder: Path, worker: int, segment_rows: int = SEGMENT_ROWS) -> None:
        (folder / "spool").mkdir(parents=True, exist_ok=True)
        (folder / "flows").mkdir(exist_ok=True)
        self._folder, self._worker, self._segment_rows = folder, worker, segment_rows
        existing = segments(folder, worker)
        self._segment_start = existing[-1].first if existing else 0
        self._row_fd = self._open(existing[-1].path.name.partition(".")[2] if existing else "rows")
        self._rows_in_segment = os.fstat(self._row_fd).st_size // ROW.itemsize
        self._text_fd = self._open("texts")
        self._second_fd = self._open("seconds")
        self._new_rows: list[bytes] = []
        self.row = self._new_rows.append
        self._new_events: list[array[int]] = []
        self._new_texts: list[str] = []
        self._new_seconds: list[WorkerSample] = []
        self._text_numbers: dict[str, int] = {}
        self._texts_written = self._count_texts(self._text_fd)
        self._heat_totals: dict[int, NDArray[np.int64]] = {}

    def _open(self, name: str) -> int:
        path = self._folder / "spool" / f"w{self._worker}.{name}"
        return os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE
        )

    def _count_texts(self, descriptor: int) -> int:
        """Number of error texts already in the file. Ends a last line that a killed worker left unfinished."""
        data = (self._folder / "spool" / f"w{self._worker}.texts").read_bytes()
        if data and not data.endswith(b"\n"):
            _write(descriptor, b"\n")
        return len(data.splitlines())

    def events(self, name: str, instants: array[int]) -> None:
        """The output events of a request (see `gaps.py`). Its name ends with its slot."""
        if len(instants) > 1:
            self._new_events += (
                array("q", (int(name.rpartition("-")[2]), len(instants))),
                instants,
            )

    def text(self, text: str) -> int:
        """The number of an error text; equal texts share a number. -1 for a new text after DIFFERENT_TEXTS texts."""
        number = self._text_numbers.get(text)
        if number is None:
            if self._texts_written >= DIFFERENT_TEXTS:
                return -1
            number = self._text_numbers[text] = self._texts_written
            self._texts_written += 1
            self._new_texts.append(text)
        return number

    def second(self, second: WorkerSample) -> None:
        self._new_seconds.append(second)

    def flush(self) -> None:
        """Write the collected data. Rows go last, so that the text and the events of a stored row are stored."""
        if self._new_texts:
            _write(
                self._text_fd,
                b"".join(msgspec.json.encode(text) + b"\n" for text in self._new_texts),
            )
            self._new_texts.clear()
        if self._new_events:
            with open(
                self._folder / "spool" / f"w{self._worker}.events", "ab", opener=private
            ) as file:
                file.writelines(self._new_events)
            self._new_events.clear()
        if self._new_rows:
            _write(self._row_fd, b"".join(self._new_rows))
            self._rows_in_segment += len(self._new_rows)
            self._new_rows.clear()
            if self._rows_in_segment >= self._segment_rows:
                os.close(self._row_fd)
                self._segment_start += self._rows_in_segment
                self._row_fd = self._open(f"{self._segment_start:012d}.rows")
                self._rows_in_segment = 0
        if self._new_seconds:
            _write(
                self._second_fd,
                b"".join(msgspec.json.encode(second) + b"\n" for second in self._new_seconds),
            )
            self._new_seconds.clear()

    def flows(
        self,
        stage: int,
        gaps: Histogram,
        timeline: NDArray[np.int64],
        first: int = 0,
        *,
        errors: Histogram | None = None,
    ) -> None:
        """Replace the stored histograms of a stage (gaps, stamp errors), and its timeline from bin `first` on."""
        stem = self._folder / "flows" / f"w{self._worker}"
        replace(Path(f"{stem}.gaps.{stage}"), gaps.to_bytes())
        if errors is not None:
            replace(Path(f"{stem}.{STAMPS}{stage}"), errors.to_bytes())
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(f"{stem}.timeline.{stage}", flags, PRIVATE)
        os.pwrite(descriptor, timeline.astype("<i8").tobytes(), first * 8)
        os.close(descriptor)
        counts = np.add.reduceat(gaps.counts, _HEAT_STARTS)
        new_counts = counts - self._heat_totals.get(stage, 0)
        self._heat_totals[stage] = counts
        if new_counts.any():
            record = np.array(((first + len(timeline)) * BIN_NS, new_counts), HEAT)
            with open(f"{stem}.heat", "ab", opener=private) as file:
                file.write(record.tobytes())

    def close(self) -> None:
        self.flush()
        for descriptor in (self._row_fd, self._text_fd, self._second_fd):
            os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Segment(NamedTuple):
    """One file of rows of a worker. `first`: index of its first row among all rows of the worker."""

    worker: int
    first: int
    path: Path


def segments(folder: Path, worker: int | None = None) -> list[Segment]:
    """Segments of all workers or of one, sorted by worker and row. A worker may still be writing its last segment."""
    result = []
    for path in folder.glob("spool/w*.rows"):
        name, *number, _ = path.name.split(".")
        result.append(Segment(int(name[1:]), int(number[0]) if number else 0, path))
    return sorted(segment for segment in result if worker is None or segment.worker == worker)


RECORDED_SLOT = np.dtype([("slot", "<i8"), ("stage", "<i2"), ("virtual_user", "<i4")])
"""A slot that has a record, with the stage and the virtual user (-1 in an open loop) that it belongs to."""


def recorded_slots(folder: Path, worker: int) -> NDArray[np.void]:
    """Return the slots that have a record of this worker in any file, as RECORDED_SLOT. A slot may occur twice.

    The worker must have stopped writing.
    """
    # A segment is read before the Parquet files: the compactor writes those first and deletes the segment after it.
    parts = [complete_rows(segment.path) for segment in segments(folder, worker)]
    files = sorted((folder / "requests").glob(f"w{worker}-*.parquet"))
    if files:
        rows, _ = from_parquet(files, RECORDED_SLOT.names)
        parts.append(rows)
    slots = np.zeros(sum(map(len, parts)), RECORDED_SLOT)
    for name in RECORDED_SLOT.names or ():
        slots[name] = np.concatenate([np.zeros(0, ROW[name]), *(part[name] for part in parts)])
    return slots


def complete_rows(file: Path) -> NDArray[np.void]:
    """The rows of a segment, without an incomplete row at the end, which a killed worker may leave."""
    data = np.fromfile(file, np.uint8)
    return data[: len(data) // ROW.itemsize * ROW.itemsize].view(ROW)


def worker_texts(folder: Path, worker: int) -> list[str]:
    """The error texts of a worker; the index is the number that rows refer to. "" for a damaged line."""
    texts: list[str] = []
    path = folder / "spool" / f"w{worker}.texts"
    for line in (
        path.read_bytes().splitlines() if path.is_file() else ()
    ):  # killed before it was made
        try:
            texts.append(msgspec.json.decode(line, type=str))
        except (ValueError, RecursionError):
            texts.append("")
    return texts


_ROWS, _SECONDS = "spool/w*.rows", "spool/w*.seconds"


class Tail:
    """Reads what was appended to the spool of a run since the last read; half a row or line is left for the next.

    The files stay open, because the compactor removes those that are full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, dict[Path, BinaryIO]] = {_ROWS: {}, _SECONDS: {}, series.FILE: {}}

    def rows(self) -> NDArray[np.void]:
        """New rows; those of one worker are in the order in which the requests ended."""
        return joined(np.frombuffer(data, ROW) for data in self._new(_ROWS, ROW.itemsize))

    def seconds(self) -> list[WorkerSample]:
        return [second for data in self._new(_SECONDS) for second in decode_worker_samples(data)]

    def server(self) -> list[series.MetricSample]:
        """New samples from the servers' own metrics pages."""
        decode = msgspec.json.Decoder(series.MetricSample).decode
        return [decode(line) for data in self._new(series.FILE) for line in data.splitlines()]

    def _new(self, pattern: str, row_size: int | None = None) -> Iterator[bytes]:
        """What is new in these files: whole rows of this size, or whole lines."""
        files = self._open[pattern]
        for path in sorted(self._folder.glob(pattern)):
            if path not in files:
                with contextlib.suppress(FileNotFoundError):  # the run ended after the glob
                    files[path] = path.open("rb")
        for file in files.values():
            data = file.read()
            end = data.rfind(b"\n") + 1 if row_size is None else len(data) // row_size * row_size
            file.seek(end - len(data), os.SEEK_CUR)
            if end:
                yield data[:end]

    def close(self) -> None:
        for files in self._open.values():
            for file in files.values():
                file.close()
