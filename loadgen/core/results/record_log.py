"""The record log: the files that a worker appends to while it runs, and how to read them.

IO. A worker only appends to files and renames them, so everything it wrote is readable after
`kill -9`. `store.py` lists the files; `record.py` defines the rows.
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

from loadgen.core.results.answer_files import RESPONSES, RecordedResponse
from loadgen.core.results.files import PRIVATE, open_private, replace
from loadgen.core.results.json_files import encode_json_lines
from loadgen.core.results.manifest import WorkerSample, decode_worker_samples
from loadgen.core.results.parquet import read_records
from loadgen.core.results.record import BIN_NS, ROW, concatenate_rows
from loadgen.core.server_metrics import series
from loadgen.core.stats.histogram import Histogram, bucket_numbers

SEGMENT_ROWS = 100_000
"""Rows in one file of the record log, about 20 MB."""

MAX_TEXTS = 10_000
"""Error texts that a worker stores. Later ones are counted without their text."""

NO_TEXT = -1
"""What a record has in place of the number of an error text if there is none."""

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
_FIRST_BUCKETS = np.concatenate(([0], bucket_numbers(HEAT_EDGES_NS)))
"""For each length of HEAT, the first bucket of a `Histogram` that has gaps of this length."""


class Timeline:
    """Counts the output events of one stage.

    Attributes:
        events: Where the clients add output events that are not counted yet.
        gaps: The times between output events of a request.
        uncertainties: The timestamp uncertainties of output events: by how much an event may have
            arrived before its timestamp.
        bins: Numbers of output events per BIN_NS, for the bins that are in memory.
        first_bin: The number of the bin in `bins[0]`. Earlier bins are stored and final.
        bin_count: How many of `bins` are in use.
    """

    __slots__ = ("_start_ns", "bin_count", "bins", "events", "first_bin", "gaps", "uncertainties")

    def __init__(self, start_ns: int) -> None:
        """Start without events. `start_ns` is the start of the run on the monotonic clock."""
        self.events = EventTimeline()
        self.gaps = Histogram()
        self.uncertainties = Histogram()
        self.bins: NDArray[np.int64] = np.zeros(_INITIAL_BINS, np.int64)
        self.first_bin = 0
        self.bin_count = 0
        self._start_ns = start_ns

    def count_new_events(self) -> int:
        """Count the output events since the last call, and return how many there were.

        Clients append each output event (token) to lists in `events`, which is fast. Several times
        per second, this method adds the lists to the histograms and bins, and empties them.

        If several events of a request arrive together, only the first of them is in `timestamps`.
        The others are in `simultaneous_counts`, as a pair of their time and their number. Example:
        one event at 5 ns and three at 9 ns are

            timestamps           [5, 9]
            gaps                 [4]        the gaps 9 - 9 = 0 of the other two are added here
            simultaneous_counts  [(9, 2)]
        """
        events = self.events
        times_ns = np.array(events.timestamps, np.int64)
        later_times_ns, later_counts = _split_pairs(events.simultaneous_counts)
        later_event_count = int(later_counts.sum())

        if events.gaps:
            self.gaps.add(np.array(events.gaps, np.int64))
            self.gaps.add_zeros(later_event_count)
            events.gaps.clear()

        if not events.timestamps:
            return 0

        event_count = len(events.timestamps) + later_event_count
        self._add_uncertainties(events.uncertainties, event_count)
        self._add_to_bins(
            times_ns=np.concatenate((times_ns, later_times_ns)),
            counts=np.concatenate((np.ones_like(times_ns), later_counts)),
        )
        events.timestamps.clear()
        events.simultaneous_counts.clear()
        events.uncertainties.clear()

        return event_count

    def _add_uncertainties(self, uncertainties: list[tuple[int, int]], event_count: int) -> None:
        """Count the timestamp uncertainties of new output events in their histogram.

        An uncertainty is by how much an event may have arrived before its timestamp. Only those
        above 0 are listed, so all other events are counted with an uncertainty of 0.

        Args:
            uncertainties: Pairs of an uncertainty in ns and the number of events that have it.
            event_count: The number of all new events.
        """
        uncertainties_ns, counts = _split_pairs(uncertainties)
        exact_event_count = event_count - int(counts.sum())
        self.uncertainties.add_repeated(uncertainties_ns, counts)
        self.uncertainties.add_zeros(exact_event_count)

    def _add_to_bins(self, times_ns: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Add events to the bins of their times.

        The time from the start of the run is divided into bins of BIN_NS, numbered from 0. The
        array `bins` begins with bin number `first_bin`. The bins before it have been written to
        disk and are final. An event whose time is in one of those is counted in `first_bin`.

        Args:
            times_ns: Times on the monotonic clock.
            counts: The number of events at each time.
        """
        bin_numbers = (times_ns - self._start_ns) // BIN_NS
        bin_indexes = np.maximum(bin_numbers - self.first_bin, 0)
        new_counts = np.bincount(bin_indexes, weights=counts).astype(np.int64)

        needed_length = len(new_counts)
        if needed_length > len(self.bins):
            self._enlarge_bins(2 * needed_length)  # The factor makes this a rare event.

        self.bins[:needed_length] += new_counts
        self.bin_count = max(self.bin_count, needed_length)

    def _enlarge_bins(self, length: int) -> None:
        """Replace the array of bins by a longer one with the same counts."""
        larger_bins = np.zeros(length, np.int64)
        larger_bins[: len(self.bins)] = self.bins
        self.bins = larger_bins

    def discard_final_bins(self) -> None:
        """Drop the bins that will not change any more, after all bins have been written to disk.

        The last GROWING_BINS bins in use may still change. They move to the start of the array, in
        place of the final bins before them. If there are too few final bins to make room for them,
        nothing is done yet.
        """
        final_count = self.bin_count - GROWING_BINS
        has_room_for_growing_bins = final_count > GROWING_BINS
        if not has_room_for_growing_bins:
            return

        growing_bins = self.bins[final_count : self.bin_count]
        self.bins[:GROWING_BINS] = growing_bins
        self.bins[GROWING_BINS:] = 0
        self.first_bin += final_count
        self.bin_count = GROWING_BINS


def _split_pairs(pairs: list[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and the second numbers of pairs: [(7, 1), (9, 2)] gives [7, 9], [1, 2]."""
    table = np.array(pairs, np.int64).reshape(-1, 2)  # The shape is also right without any pair.
    return table[:, 0], table[:, 1]


class RecordLog:
    """The files that one worker appends to.

    Data is collected in memory until `flush` appends it, with one system call per file.

    Attributes:
        add_record: Adds the bytes of a record. It is the `append` of the list `_new_rows`, which
            saves a call for each request. The list is therefore cleared, but never replaced.
    """

    def __init__(self, folder: Path, worker: int, segment_rows: int = SEGMENT_ROWS) -> None:
        """Open the files of a worker, or create them.

        If the worker died and was started again, its files are continued.

        Args:
            folder: The folder of the run.
            worker: The number of the worker.
            segment_rows: The number of records in a file, after which the next file is begun.
        """
        (folder / "spool").mkdir(parents=True, exist_ok=True)
        (folder / "flows").mkdir(exist_ok=True)
        self._folder = folder
        self._worker = worker
        self._segment_rows = segment_rows

        # What was added since the last flush.
        self._new_rows: list[bytes] = []
        self._new_event_times: list[array[int]] = []
        self._new_texts: list[str] = []
        self._new_samples: list[WorkerSample] = []
        self._new_answers: list[RecordedResponse] = []
        self.add_record = self._new_rows.append

        self._open_last_segment()
        self._sample_fd = self._open("seconds")
        self._text_fd = self._open("texts")

        # The number of error texts in the file, including those from before a restart.
        self._text_count = self._finish_last_text()

        # The number of each error text since the start of this process.
        self._text_numbers: dict[str, int] = {}

        # For each stage, its gaps at the last call of `_append_gap_counts`, counted by length.
        self._gap_counts_by_stage: dict[int, NDArray[np.int64]] = {}

    def _open_last_segment(self) -> None:
        """Open the last file of rows of this worker, or its first one if it has none yet.

        The rows (records) of a worker are numbered from 0 and divided into files, its segments. The
        first one is `w0.rows` for worker 0, and one from row 200,000 on `w0.000000200000.rows`.
        `_open` adds the prefix `w0.` to a name.
        """
        segments_of_worker = segments(self._folder, self._worker)
        if segments_of_worker:
            last_segment = segments_of_worker[-1]
            self._segment_start = last_segment.first  # the number of the first row in the file
            self._row_fd = self._open(last_segment.path.name.removeprefix(f"w{self._worker}."))
        else:
            self._segment_start = 0
            self._row_fd = self._open("rows")

        self._rows_in_segment = os.fstat(self._row_fd).st_size // ROW.itemsize

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

    def add_event_times(self, request_name: str, times_ns: array[int]) -> None:
        """Add the times of the output events of one request, which `--keep gaps` stores.

        The file has integers of 64 bits: for each request the number of its slot (its place in the
        schedule), the number of its times, and the times. A request with fewer than two output
        events is left out, because it has no time between events.

        Args:
            request_name: The id of the run, a hyphen, and the number of the slot. Request 17 of the
                run "my-run" is "my-run-17".
            times_ns: The times of its output events, in order.
        """
        if len(times_ns) < 2:
            return
        _run_id, _, slot_text = request_name.rpartition("-")
        slot_number = int(slot_text)
        header = array("q", (slot_number, len(times_ns)))
        self._new_event_times.append(header)
        self._new_event_times.append(times_ns)

    def store_text(self, text: str) -> int:
        """Store an error text if it is new, and return its number, by which a record refers to it.

        The number is the index of the text in the file of the worker. Return NO_TEXT for a new text
        if MAX_TEXTS texts are stored already.
        """
        known_number = self._text_numbers.get(text)
        if known_number is not None:
            return known_number
        if self._text_count >= MAX_TEXTS:
            return NO_TEXT

        new_number = self._text_count
        self._text_numbers[text] = new_number
        self._text_count += 1
        self._new_texts.append(text)

        return new_number

    def add_answer(self, response: RecordedResponse) -> None:
        """Add the response to a question with a known answer."""
        self._new_answers.append(response)

    def add_sample(self, sample: WorkerSample) -> None:
        """Add the sample that a worker takes of itself once a second."""
        self._new_samples.append(sample)

    def flush(self) -> None:
        """Append the data that was added since the last flush to the files.

        Rows are written after texts and events, so that whatever a stored row refers to is stored.
        """
        if self._new_texts:
            _write_all(self._text_fd, encode_json_lines(self._new_texts))
            self._new_texts.clear()

        if self._new_event_times:
            with open(self._path("events"), "ab", opener=open_private) as file:
                file.writelines(self._new_event_times)
            self._new_event_times.clear()

        if self._new_answers:
            with open(self._path(RESPONSES), "ab", opener=open_private) as file:
                file.write(encode_json_lines(self._new_answers))
            self._new_answers.clear()

        if self._new_rows:
            self._flush_rows()

        if self._new_samples:
            _write_all(self._sample_fd, encode_json_lines(self._new_samples))
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
        bins: NDArray[np.int64],
        first_bin: int = 0,
        *,
        uncertainties: Histogram | None = None,
    ) -> None:
        """Write the counts of the output events of a stage, which a worker does every 2 s.

        There are three kinds of files:

        - histograms of gaps and of uncertainties: replaced, since they have all events so far,
        - the timeline, the number of events in each bin of BIN_NS: overwritten from `first_bin` on,
          since earlier bins do not change any more,
        - the heat map, which shows how the gaps change over time: the gaps since the last call are
          appended.

        Args:
            stage: The index of the stage (phase) of the load.
            gaps: The times between output events of a request.
            bins: The last bins of the timeline.
            first_bin: The number of the bin in `bins[0]`.
            uncertainties: The timestamp uncertainties of output events, or None if they are not
                known.
        """
        replace(self._event_count_path(f"gaps.{stage}"), gaps.to_bytes())
        if uncertainties is not None:
            path = self._event_count_path(f"{UNCERTAINTY_PREFIX}{stage}")
            replace(path, uncertainties.to_bytes())
        self._write_bins(stage, bins, first_bin)
        timeline_end_ns = (first_bin + len(bins)) * BIN_NS
        self._append_gap_counts(stage, gaps, end_ns=timeline_end_ns)

    def _write_bins(self, stage: int, bins: NDArray[np.int64], first_bin: int) -> None:
        """Write bins at their place in the timeline file of a stage. Earlier ones are kept."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._event_count_path(f"timeline.{stage}"), flags, PRIVATE)
        try:
            os.pwrite(descriptor, bins.astype("<i8").tobytes(), first_bin * _BIN_BYTES)
        finally:
            os.close(descriptor)

    def _event_count_path(self, name: str) -> Path:
        return self._folder / "flows" / f"w{self._worker}.{name}"

    def _append_gap_counts(self, stage: int, gaps: Histogram, end_ns: int) -> None:
        """Append a column to the heat map that shows the gaps of all stages over time.

        A gap is the time between two output events of a request. The heat map has a column for each
        period between two calls of this method, and a row for each range of lengths, such as 10 to
        20 ms. A column is stored as one record of the type HEAT: the number of gaps of each length
        in the period. If the period has no gaps, nothing is written.

        Args:
            stage: The index of the stage.
            gaps: All gaps of the stage since the start of the run.
            end_ns: The end of the period that the record covers, from the start of the run.
        """
        total_counts = _count_gaps_by_length(gaps)
        previous_counts = self._gap_counts_by_stage.get(stage, np.zeros_like(total_counts))
        new_counts = total_counts - previous_counts
        self._gap_counts_by_stage[stage] = total_counts
        if not new_counts.any():
            return

        heat_map_column = np.array((end_ns, new_counts), HEAT)
        with open(self._event_count_path("heat"), "ab", opener=open_private) as file:
            file.write(heat_map_column.tobytes())

    def close(self) -> None:
        """Write the collected data and close the files."""
        self.flush()
        os.close(self._row_fd)
        os.close(self._text_fd)
        os.close(self._sample_fd)


def _count_gaps_by_length(gaps: Histogram) -> NDArray[np.int64]:
    """Return the number of gaps in each of the classes of lengths of HEAT.

    A class consists of several buckets of a histogram. `reduceat` adds the counts from each first
    bucket to before the next one: counts 1, 2, 3, 4 with the first buckets 0 and 3 give 6 and 4.
    """
    counts: NDArray[np.int64] = np.add.reduceat(gaps.counts, _FIRST_BUCKETS)
    return counts


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data, even if the system accepts only a part of it in one call."""
    unwritten = memoryview(data)
    while unwritten:
        written_bytes = os.write(descriptor, unwritten)
        unwritten = unwritten[written_bytes:]


class Segment(NamedTuple):
    """One file of the rows of a worker, which are spread over several files.

    Attributes:
        worker: The number of the worker.
        first: The index of the first row of the file among all rows of the worker.
        path: The file.
    """

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
    parts = path.name.split(".")
    worker = int(parts[0].removeprefix("w"))
    has_first_row = len(parts) > 2
    return Segment(worker, int(parts[1]) if has_first_row else 0, path)


RECORDED_SLOT = np.dtype([("slot", "<i8"), ("stage", "<i2"), ("virtual_user", "<i4")])
"""A slot that has a record, with its stage and its virtual user (-1 in an open loop)."""


def recorded_slots(folder: Path, worker: int) -> NDArray[np.void]:
    """Return the slots of the schedule that a worker has recorded, as an array of RECORDED_SLOT.

    A slot is the place of one request in the schedule. After a worker died, its slots that are not
    among these count as lost. The worker must have stopped writing.

    The worker has written its records to segments, files of binary records. Another process, the
    compactor, converts segments to Parquet files, perhaps at this time, and deletes a segment when
    its Parquet file is complete. While both exist, the slots of the segment are returned twice.
    """
    # The segments must be read before the Parquet files. In the other order, a segment that is
    # converted and deleted between the two reads would be missed.
    records = [complete_rows(segment.path) for segment in segments(folder, worker)]
    parquet_files = sorted((folder / "requests").glob(f"w{worker}-*.parquet"))
    if parquet_files:
        rows, _ = read_records(parquet_files, RECORDED_SLOT.names)
        records.append(rows)

    if not records:
        return np.zeros(0, RECORDED_SLOT)

    return np.concatenate([_to_recorded_slots(rows) for rows in records])


def _to_recorded_slots(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Return the columns of RECORDED_SLOT of some records."""
    slots = np.zeros(len(rows), RECORDED_SLOT)
    for name in RECORDED_SLOT.names or ():
        slots[name] = rows[name]
    return slots


def complete_rows(file: Path) -> NDArray[np.void]:
    """Return the rows of a segment without an incomplete last row, as a killed worker leaves it."""
    data = np.fromfile(file, np.uint8)
    row_count = len(data) // ROW.itemsize
    return data[: row_count * ROW.itemsize].view(ROW)


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
        """Yield for each file the complete rows or lines that were appended since the last call.

        Args:
            pattern: Which files to read, one of the keys of `_open_files`.
            row_size: The size of a row in bytes, or None for files of lines.
        """
        files = self._open_files[pattern]
        for path in sorted(self._folder.glob(pattern)):
            if path not in files:
                # The run may have ended, and removed the file, after the glob.
                with contextlib.suppress(FileNotFoundError):
                    files[path] = path.open("rb")

        for file in files.values():
            data = _read_complete(file, row_size)
            if data:
                yield data

    def close(self) -> None:
        """Close the files."""
        for files in self._open_files.values():
            for file in files.values():
                file.close()


def _read_complete(file: BinaryIO, row_size: int | None) -> bytes:
    """Read the complete rows or lines that follow in a file to which another process appends.

    An incomplete row or line at the end stays unread, because its writer is about to complete it.

    Args:
        file: The file, at the position up to which it was read.
        row_size: The size of a row in bytes, or None for a file of lines.
    """
    data = file.read()
    if row_size is None:
        complete_bytes = data.rfind(b"\n") + 1
    else:
        complete_bytes = len(data) // row_size * row_size

    incomplete_bytes = len(data) - complete_bytes
    file.seek(-incomplete_bytes, os.SEEK_CUR)
    return data[:complete_bytes]
