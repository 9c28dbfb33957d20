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

MAX_TEXTS = 10_000
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

UNCERTAINTY_PREFIX = "stamps-"
"""The name of a file of timestamp uncertainties, before the number of the stage.

It has no dot, because readers of schema 1.0 take w0.NAME.S for a timeline.
"""

_INITIAL_BINS = 1024
_BIN_BYTES = 8
"""The size of a number of events in the file of a timeline."""
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

        This is done several times per second, so that nothing is counted when an event is read.
        Several events that are read at the same time are one entry of `events.timestamps`, and
        those after the first are counted in `events.simultaneous_counts`. The time between them is
        zero.
        """
        events = self.events
        first_times_ns = np.array(events.timestamps, np.int64)
        # Flat arrays of pairs: a time and the number of further events that were read then, and an
        # uncertainty and the number of events that have it.
        further_times_ns, further_counts = (
            np.array(events.simultaneous_counts, np.int64).reshape(-1, 2).T
        )
        errors_ns, error_counts = np.array(events.uncertainties, np.int64).reshape(-1, 2).T
        further_count = int(further_counts.sum())

        if events.gaps:
            self.gaps.add(np.array(events.gaps, np.int64))
            self.gaps.add_zeros(further_count)
            events.gaps.clear()
        if not events.timestamps:
            return 0

        event_count = len(events.timestamps) + further_count
        exact_count = event_count - int(error_counts.sum())
        self.errors.add_zeros(exact_count)
        self.errors.add(errors_ns, error_counts)
        self._add_to_bins(
            times_ns=np.concatenate((first_times_ns, further_times_ns)),
            counts=np.concatenate((np.ones_like(first_times_ns), further_counts)),
        )
        events.timestamps.clear()
        events.simultaneous_counts.clear()
        events.uncertainties.clear()
        return event_count

    def _add_to_bins(self, times_ns: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Add events to the bins of their times.

        An event before the first bin in memory is counted in that one, because earlier bins have
        been written to disk and are not changed any more.

        Args:
            times_ns: Times on the monotonic clock.
            counts: The number of events at each time.
        """
        bin_indexes = (times_ns - self._start_ns) // BIN_NS - self.first
        new_counts = np.bincount(np.maximum(bin_indexes, 0), weights=counts).astype(np.int64)
        if len(new_counts) > len(self.bins):
            # Twice the length that is needed, so that it rarely grows.
            larger_bins = np.zeros(len(new_counts) * 2, np.int64)
            larger_bins[: len(self.bins)] = self.bins
            self.bins = larger_bins
        self.bins[: len(new_counts)] += new_counts
        self.used = max(self.used, len(new_counts))

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
        add_record: Adds the bytes of a record. It is the `append` of a list, because it is called
            for each request.
    """

    def __init__(self, folder: Path, worker: int, segment_rows: int = SEGMENT_ROWS) -> None:
        """Open the files of a worker, or create them.

        If the worker has files already, as one that died and was started again, they are continued.

        Args:
            folder: The folder of the run.
            worker: The number of the worker.
            segment_rows: The number of records after which a new file of records is begun.
        """
        (folder / "spool").mkdir(parents=True, exist_ok=True)
        (folder / "flows").mkdir(exist_ok=True)
        self._folder = folder
        self._worker = worker
        self._segment_rows = segment_rows

        # What was added since the last flush.
        self._new_rows: list[bytes] = []
        self.add_record = self._new_rows.append
        self._new_event_times: list[array[int]] = []
        self._new_texts: list[str] = []
        self._new_samples: list[WorkerSample] = []

        row_file = "rows"
        self._segment_start = 0
        earlier_segments = segments(folder, worker)
        if earlier_segments:
            last_segment = earlier_segments[-1]
            row_file = last_segment.path.name.removeprefix(f"w{worker}.")
            self._segment_start = last_segment.first
        self._row_fd = self._open(row_file)
        self._rows_in_segment = os.fstat(self._row_fd).st_size // ROW.itemsize
        self._text_fd = self._open("texts")
        self._sample_fd = self._open("seconds")
        self._text_numbers: dict[str, int] = {}
        self._text_count = self._finish_last_text()
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

    def add_event_times(self, name: str, times_ns: array[int]) -> None:
        """Add the times of the output events of a request, for `--keep gaps`.

        A request with fewer than two output events is left out. `gaps.py` describes the file.

        Args:
            name: The name of the request, which ends with the number of its slot.
            times_ns: The times of its output events.
        """
        if len(times_ns) > 1:
            slot = int(name.rpartition("-")[2])
            self._new_event_times.append(array("q", (slot, len(times_ns))))
            self._new_event_times.append(times_ns)

    def number_text(self, text: str) -> int:
        """Store an error text if it is new, and return its number, which a record refers to.

        Return -1 for a new text if MAX_TEXTS texts are stored already.
        """
        number = self._text_numbers.get(text)
        if number is not None:
            return number
        if self._text_count >= MAX_TEXTS:
            return -1
        number = self._text_count
        self._text_numbers[text] = number
        self._text_count += 1
        self._new_texts.append(text)
        return number

    def add_sample(self, sample: WorkerSample) -> None:
        """Add the sample that a worker takes of itself once a second."""
        self._new_samples.append(sample)

    def flush(self) -> None:
        """Append the data that was added since the last flush to the files.

        Rows are written after texts and events, so that whatever a stored row refers to is stored.
        """
        if self._new_texts:
            _write_all(self._text_fd, _json_lines(self._new_texts))
            self._new_texts.clear()
        if self._new_event_times:
            with open(self._path("events"), "ab", opener=private) as file:
                file.writelines(self._new_event_times)
            self._new_event_times.clear()
        if self._new_rows:
            self._flush_rows()
        if self._new_samples:
            _write_all(self._sample_fd, _json_lines(self._new_samples))
            self._new_samples.clear()

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
        """Store what was counted of the output events of a stage up to now.

        The histograms replace those of the last call. Of the timeline, only the bins from `first`
        on are written, since earlier ones do not change any more.

        Args:
            stage: The index of the stage.
            gaps: The times between output events of a request.
            timeline: The numbers of output events per BIN_NS.
            first: The number of the bin in `timeline[0]`.
            errors: The timestamp uncertainties of output events, or None if they are not known.
        """
        replace(self._event_count_path(f"gaps.{stage}"), gaps.to_bytes())
        if errors is not None:
            replace(self._event_count_path(f"{UNCERTAINTY_PREFIX}{stage}"), errors.to_bytes())
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._event_count_path(f"timeline.{stage}"), flags, PRIVATE)
        os.pwrite(descriptor, timeline.astype("<i8").tobytes(), first * _BIN_BYTES)
        os.close(descriptor)
        self._append_heat(stage, gaps, until_ns=(first + len(timeline)) * BIN_NS)

    def _event_count_path(self, name: str) -> Path:
        return self._folder / "flows" / f"w{self._worker}.{name}"

    def _append_heat(self, stage: int, gaps: Histogram, until_ns: int) -> None:
        """Append a record of HEAT, from which the heat map of a report is drawn.

        It has the number of gaps by length since the last call. Nothing is written without any.

        Args:
            stage: The index of the stage.
            gaps: All times between output events of the stage up to now.
            until_ns: The end of the time that they cover, from the start of the run.
        """
        total_counts = np.add.reduceat(gaps.counts, _HEAT_STARTS)
        new_counts = total_counts - self._heat_totals.get(stage, 0)
        self._heat_totals[stage] = total_counts
        if new_counts.any():
            record = np.array((until_ns, new_counts), HEAT)
            with open(self._event_count_path("heat"), "ab", opener=private) as file:
                file.write(record.tobytes())

    def close(self) -> None:
        """Write the collected data and close the files."""
        self.flush()
        os.close(self._row_fd)
        os.close(self._text_fd)
        os.close(self._sample_fd)


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

    The slots of a worker that died and are not among these were lost. The worker must have stopped
    writing. A slot may occur twice, if the compactor has stored its record and has not yet deleted
    the segment.
    """
    # The segments are read before the Parquet files. The compactor writes a Parquet file before it
    # deletes the segment, so no record is missed in between.
    parts = [complete_rows(segment.path) for segment in segments(folder, worker)]
    files = sorted((folder / "requests").glob(f"w{worker}-*.parquet"))
    if files:
        rows, _ = read_records(files, RECORDED_SLOT.names)
        parts.append(rows)

    slots = np.zeros(sum(len(part) for part in parts), RECORDED_SLOT)
    start = 0
    for part in parts:
        end = start + len(part)
        for name in RECORDED_SLOT.names or ():
            slots[name][start:end] = part[name]
        start = end
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
