"""The record log: the files that a worker appends to while it runs, and how to read them.

IO. A worker only appends to files and renames them, so everything it wrote is readable after
`kill -9`. `store.py` lists the files; `record.py` defines the rows.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from numpy.typing import NDArray

from loadgen.core.results.files import PRIVATE, private, replace
from loadgen.core.results.manifest import WorkerSample, decode_worker_samples
from loadgen.core.results.parquet import read_records
from loadgen.core.results.record import BIN_NS, ROW, concatenate_rows
from loadgen.core.server_metrics import series
from loadgen.core.stats.histogram import Histogram, bucket_numbers

SEGMENT_ROWS = 100_000
"""Rows in one file of the record log, about 20 MB."""

DIFFERENT_TEXTS = 10_000
"""Error texts that a worker stores. Later ones are counted without their text."""

HEAT_EDGES_NS: NDArray[np.int64] = np.logspace(4, 11, 85).astype(np.int64)
"""Edges of the lengths in HEAT: 10 µs to 100 s, 12 per decade."""

HEAT = np.dtype([("until_ns", "<i8"), ("counts", "<i8", (len(HEAT_EDGES_NS) + 1,))])
"""Times between output events, counted by length, since the previous record of this type.

`until_ns` counts from the start of the run. `counts` holds the number below the first edge of
HEAT_EDGES_NS, the numbers between two edges, and the number above the last edge.
"""

GROWING_BINS = 1_000
"""Last bins of a timeline, which may still change: an event is counted within 10 s."""

STAMPS = "stamps-"
"""The kind of a file of timestamp uncertainties; the number of the stage follows.

It has no dot, because readers of schema 1.0 take w0.NAME.S for a timeline.
"""

_INITIAL_BINS = 1024
_HEAT_STARTS = np.concatenate(([0], bucket_numbers(HEAT_EDGES_NS)))


class Timeline:
    """Counts the output events of one stage.

    Attributes:
        events: Where the clients add output events that are not counted yet.
        gaps: The times between output events of a request.
        errors: The timestamp uncertainties of output events.
        bins: Numbers of output events per BIN_NS.
        first: The number of the bin in `bins[0]`. Earlier bins are stored and final.
        used: How many of `bins` are in use.
    """

    __slots__ = ("_start_ns", "bins", "errors", "events", "first", "gaps", "used")

    def __init__(self, start_ns: int) -> None:
        self.events = EventTimeline()
        self.gaps = Histogram()
        self.errors = Histogram()
        self.bins: NDArray[np.int64] = np.zeros(_INITIAL_BINS, np.int64)
        self.first = 0
        self.used = 0
        self._start_ns = start_ns

    def count_new_events(self) -> int:
        """Count what `events` has collected, clear it, and return the number of output events.

        `events.together` holds pairs of a time and the number of further output events that were
        read at that time. The time between such events is zero.
        """
        events = self.events
        coalesced = np.array(events.together, np.int64).reshape(-1, 2)
        further_count = int(coalesced[:, 1].sum())
        if events.gaps:
            self.gaps.add(np.array(events.gaps, np.int64))
            self.gaps.add_zeros(further_count)
            events.gaps.clear()
        if not events.instants:
            return 0
        event_count = len(events.instants) + further_count
        # Pairs of an uncertainty and how many events have it; all other events are exact.
        errors = np.array(events.errors, np.int64).reshape(-1, 2)
        self.errors.add_zeros(event_count - int(errors[:, 1].sum()))
        self.errors.add(errors[:, 0], errors[:, 1])
        times_ns = np.concatenate((np.array(events.instants, np.int64), coalesced[:, 0]))
        weights = np.concatenate((np.ones(len(events.instants), np.int64), coalesced[:, 1]))
        events.instants.clear()
        events.together.clear()
        events.errors.clear()
        self._add_to_bins(times_ns, weights)
        return event_count

    def _add_to_bins(self, times_ns: NDArray[np.int64], weights: NDArray[np.int64]) -> None:
        """Add events to the bins of their times, or to the first bin if theirs is final."""
        bin_numbers = (times_ns - self._start_ns) // BIN_NS - self.first
        counts = np.bincount(np.maximum(bin_numbers, 0), weights=weights).astype(np.int64)
        if len(counts) > len(self.bins):
            larger = np.zeros(len(counts) * 2, np.int64)
            larger[: len(self.bins)] = self.bins
            self.bins = larger
        self.bins[: len(counts)] += counts
        self.used = max(self.used, len(counts))

    def discard_final_bins(self) -> None:
        """Keep only the bins that may still change, after everything has been written to disk."""
        final = self.used - GROWING_BINS
        if final > GROWING_BINS:
            self.bins[:GROWING_BINS] = self.bins[final : self.used]
            self.bins[GROWING_BINS:] = 0
            self.first += final
            self.used = GROWING_BINS


class RecordLog:
    """The files that one worker appends to.

    Data is collected in memory until `flush` appends it, with one system call per file.

    Attributes:
        row: Adds the bytes of a record. It is the `append` of a list, because it is called for each
            request.
    """

    def __init__(self, folder: Path, worker: int, segment_rows: int = SEGMENT_ROWS) -> None:
        (folder / "spool").mkdir(parents=True, exist_ok=True)
        (folder / "flows").mkdir(exist_ok=True)
        self._folder = folder
        self._worker = worker
        self._segment_rows = segment_rows
        self._segment_start = 0
        row_file = "rows"
        earlier_segments = segments(folder, worker)
        if earlier_segments:  # of a worker that died and continues now
            self._segment_start = earlier_segments[-1].first
            row_file = earlier_segments[-1].path.name.partition(".")[2]
        self._row_fd = self._open(row_file)
        self._rows_in_segment = os.fstat(self._row_fd).st_size // ROW.itemsize
        self._text_fd = self._open("texts")
        self._second_fd = self._open("seconds")
        self._new_rows: list[bytes] = []
        self.row = self._new_rows.append
        self._new_events: list[array[int]] = []
        self._new_texts: list[str] = []
        self._new_seconds: list[WorkerSample] = []
        self._text_numbers: dict[str, int] = {}
        self._texts_written = self._finish_last_text()
        self._heat_totals: dict[int, NDArray[np.int64]] = {}

    def _path(self, name: str) -> Path:
        return self._folder / "spool" / f"w{self._worker}.{name}"

    def _open(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._path(name), flags, PRIVATE)

    def _finish_last_text(self) -> int:
        """End a last line that a killed worker left unfinished, and return the number of texts."""
        data = self._path("texts").read_bytes()
        if data and not data.endswith(b"\n"):
            _write_all(self._text_fd, b"\n")
        return len(data.splitlines())

    def events(self, name: str, instants: array[int]) -> None:
        """Add the times of the output events of a request, whose name ends with its slot.

        A request with fewer than two output events is left out. `gaps.py` describes the file.
        """
        if len(instants) > 1:
            slot = int(name.rpartition("-")[2])
            self._new_events.append(array("q", (slot, len(instants))))
            self._new_events.append(instants)

    def text(self, text: str) -> int:
        """Return the number of an error text. Equal texts share a number.

        Returns -1 for a new text if DIFFERENT_TEXTS texts are stored already.
        """
        number = self._text_numbers.get(text)
        if number is not None:
            return number
        if self._texts_written >= DIFFERENT_TEXTS:
            return -1
        number = self._texts_written
        self._text_numbers[text] = number
        self._texts_written += 1
        self._new_texts.append(text)
        return number

    def second(self, sample: WorkerSample) -> None:
        """Add the sample that a worker takes of itself once a second."""
        self._new_seconds.append(sample)

    def flush(self) -> None:
        """Write the collected data.

        Rows are written after texts and events, so that whatever a stored row refers to is stored.
        """
        if self._new_texts:
            _write_all(self._text_fd, _json_lines(self._new_texts))
            self._new_texts.clear()
        if self._new_events:
            with open(self._path("events"), "ab", opener=private) as file:
                file.writelines(self._new_events)
            self._new_events.clear()
        if self._new_rows:
            self._flush_rows()
        if self._new_seconds:
            _write_all(self._second_fd, _json_lines(self._new_seconds))
            self._new_seconds.clear()

    def _flush_rows(self) -> None:
        """Write the collected rows, and begin a new segment if the current one is full."""
        _write_all(self._row_fd, b"".join(self._new_rows))
        self._rows_in_segment += len(self._new_rows)
        self._new_rows.clear()
        if self._rows_in_segment >= self._segment_rows:
            os.close(self._row_fd)
            self._segment_start += self._rows_in_segment
            self._row_fd = self._open(f"{self._segment_start:012d}.rows")
            self._rows_in_segment = 0

    def write_event_counts(
        self,
        stage: int,
        gaps: Histogram,
        timeline: NDArray[np.int64],
        first: int = 0,
        *,
        errors: Histogram | None = None,
    ) -> None:
        """Replace the stored histograms of a stage, and its timeline from a bin on.

        Args:
            stage: The index of the stage.
            gaps: The times between output events of a request.
            timeline: The numbers of output events per BIN_NS.
            first: The number of the bin in `timeline[0]`.
            errors: The timestamp uncertainties of output events.
        """
        stem = self._folder / "flows" / f"w{self._worker}"
        replace(Path(f"{stem}.gaps.{stage}"), gaps.to_bytes())
        if errors is not None:
            replace(Path(f"{stem}.{STAMPS}{stage}"), errors.to_bytes())
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(f"{stem}.timeline.{stage}", flags, PRIVATE)
        os.pwrite(descriptor, timeline.astype("<i8").tobytes(), first * 8)
        os.close(descriptor)
        self._append_heat(stage, gaps, until_ns=(first + len(timeline)) * BIN_NS)

    def _append_heat(self, stage: int, gaps: Histogram, until_ns: int) -> None:
        """Append how many times between output events were added since the last call, by length."""
        counts = np.add.reduceat(gaps.counts, _HEAT_STARTS)
        new_counts = counts - self._heat_totals.get(stage, 0)
        self._heat_totals[stage] = counts
        if new_counts.any():
            record = np.array((until_ns, new_counts), HEAT)
            path = self._folder / "flows" / f"w{self._worker}.heat"
            with open(path, "ab", opener=private) as file:
                file.write(record.tobytes())

    def close(self) -> None:
        """Write the collected data and close the files."""
        self.flush()
        os.close(self._row_fd)
        os.close(self._text_fd)
        os.close(self._second_fd)


def _json_lines(values: Iterable[object]) -> bytes:
    return b"".join(msgspec.json.encode(value) + b"\n" for value in values)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data, also if the system takes it in parts."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Segment(NamedTuple):
    """One file of rows of a worker. `first` is the index of its first row among all of them."""

    worker: int
    first: int
    path: Path


def segments(folder: Path, worker: int | None = None) -> list[Segment]:
    """Return the segments of all workers or of one, sorted by worker and row.

    A worker may still be writing its last segment.
    """
    all_segments = [_parse_segment(path) for path in folder.glob("spool/w*.rows")]
    return sorted(segment for segment in all_segments if worker is None or segment.worker == worker)


def _parse_segment(path: Path) -> Segment:
    """Return the segment in a file whose name is `w0.rows` or, from row N on, `w0.N.rows`."""
    worker, *first, _ = path.name.split(".")
    return Segment(int(worker.removeprefix("w")), int(first[0]) if first else 0, path)


RECORDED_SLOT = np.dtype([("slot", "<i8"), ("stage", "<i2"), ("virtual_user", "<i4")])
"""A slot that has a record, with its stage and its virtual user (-1 in an open loop)."""


def recorded_slots(folder: Path, worker: int) -> NDArray[np.void]:
    """Return the slots that have a record of this worker in any file, as RECORDED_SLOT.

    A slot may occur twice. The worker must have stopped writing.
    """
    # A segment is read before the Parquet files, because the compactor writes those first and
    # deletes the segment after it.
    parts = [complete_rows(segment.path) for segment in segments(folder, worker)]
    files = sorted((folder / "requests").glob(f"w{worker}-*.parquet"))
    if files:
        rows, _ = read_records(files, RECORDED_SLOT.names)
        parts.append(rows)
    slots = np.zeros(sum(map(len, parts)), RECORDED_SLOT)
    for name in RECORDED_SLOT.names or ():
        slots[name] = np.concatenate([np.zeros(0, ROW[name]), *(part[name] for part in parts)])
    return slots


def complete_rows(file: Path) -> NDArray[np.void]:
    """Return the rows of a segment without an incomplete last row, as a killed worker leaves it."""
    data = np.fromfile(file, np.uint8)
    return data[: len(data) // ROW.itemsize * ROW.itemsize].view(ROW)


def worker_texts(folder: Path, worker: int) -> list[str]:
    """Return the error texts of a worker; the index is the number that rows refer to.

    A damaged line gives "". A worker that was killed early has no texts.
    """
    path = folder / "spool" / f"w{worker}.texts"
    if not path.is_file():
        return []
    texts: list[str] = []
    for line in path.read_bytes().splitlines():
        try:
            texts.append(msgspec.json.decode(line, type=str))
        except (ValueError, RecursionError):
            texts.append("")
    return texts


_ROW_FILES = "spool/w*.rows"
_SECOND_FILES = "spool/w*.seconds"


class Tail:
    """Reads what was appended to the record log of a run since the last read.

    An incomplete row or line is left for the next read. The files stay open, because the compactor
    removes those that are full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_files: dict[str, dict[Path, BinaryIO]] = {
            _ROW_FILES: {},
            _SECOND_FILES: {},
            series.FILE: {},
        }

    def rows(self) -> NDArray[np.void]:
        """Return new rows; those of one worker are in the order in which the requests ended."""
        new_data = self._read_new(_ROW_FILES, ROW.itemsize)
        return concatenate_rows(np.frombuffer(data, ROW) for data in new_data)

    def seconds(self) -> list[WorkerSample]:
        """Return new samples that the workers took of themselves."""
        new_data = self._read_new(_SECOND_FILES)
        return [sample for data in new_data for sample in decode_worker_samples(data)]

    def server(self) -> list[series.MetricSample]:
        """Return new samples from the servers' own metrics pages."""
        decode = msgspec.json.Decoder(series.MetricSample).decode
        new_data = self._read_new(series.FILE)
        return [decode(line) for data in new_data for line in data.splitlines()]

    def _read_new(self, pattern: str, row_size: int | None = None) -> Iterator[bytes]:
        """Yield what is new in each file: complete rows of this size, or else complete lines."""
        files = self._open_files[pattern]
        for path in sorted(self._folder.glob(pattern)):
            if path not in files:
                # The run may have ended, and removed the file, after the glob.
                with contextlib.suppress(FileNotFoundError):
                    files[path] = path.open("rb")
        for file in files.values():
            data = file.read()
            if row_size is None:
                end = data.rfind(b"\n") + 1
            else:
                end = len(data) // row_size * row_size
            file.seek(end - len(data), os.SEEK_CUR)
            if end:
                yield data[:end]

    def close(self) -> None:
        """Close the files."""
        for files in self._open_files.values():
            for file in files.values():
                file.close()
