"""Reads the folder of a run, finished or not.

IO. `record.py` defines the rows, `manifest.py` defines `run.json`, and `record_log.py` writes the
files of a worker. The files of a run are:

    run.json                the manifest (manifest.RunManifest) requests/*.parquet      rows: small
    complete files during the run, one `requests.parquet` after it spool/w0.rows           binary
    rows (record.ROW), appended by worker 0; w0.N.rows continues from
                            row N. The compactor deletes a complete file that it has read to the end
    spool/w0.texts          error texts, one JSON string per line; the `text` of a row is the number
                            of the line, from 0
    spool/w0.seconds        one JSON line per second (manifest.WorkerSample)
    spool/w0.events, gaps/  with --keep gaps: see `gaps.py`
    flows/w0.gaps.S         histogram of the times between output events of stage S
    flows/w0.stamps-S       histogram of the timestamp uncertainties of the output events of stage S
    flows/w0.timeline.S     output events of stage S, counted per 10 ms
    flows/w0.heat           times between output events of all stages, counted by length about
                            every 2 s: records of HEAT
    server.jsonl            values from the servers' metrics pages (server_metrics.series), one line
                            for each change of a value
    summary.json            the summary

A worker only appends to files and renames them, so everything it wrote is readable after `kill -9`.
Parquet files are written at the end or, during a long run, by a process of their own
(`sidecars/compactor_process.py`), because converting rows blocks the interpreter for tens of ms.
"""

from __future__ import annotations

import contextlib
import shutil
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.errors import UserError, missing_result
from loadgen.core.results.files import refuse_links

# Other packages call this as `store.replace`.
from loadgen.core.results.files import replace as replace  # noqa: PLC0414
from loadgen.core.results.json_files import decode_json_lines
from loadgen.core.results.manifest import (
    RunManifest,
    WorkerSample,
    decode_manifest,
    decode_worker_samples,
)
from loadgen.core.results.parquet import Frame, read_records
from loadgen.core.results.record import ROW, check_rows, check_scheduled_times, concatenate_rows
from loadgen.core.results.record_log import (
    HEAT,
    UNCERTAINTY_PREFIX,
    Segment,
    complete_rows,
    segments,
    worker_texts,
)
from loadgen.core.server_metrics import series
from loadgen.core.stats.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterator

MERGED = "requests.parquet"
LAZY_ROWS = 1_000_000
"""A finished run with more rows is summarized from columns on disk instead of rows in memory."""


class Stored(NamedTuple):
    """Everything that was recorded of a run, from which its summary is computed.

    Attributes:
        manifest: The manifest of the run.
        rows: The records, or a `Frame` of them on disk.
        gaps: For each stage, the times between output events.
        timeline: For each stage, the numbers of output events per BIN_NS.
        seconds: The samples that the workers took of themselves, one per second.
        texts: The error texts that the column `text` refers to.
        event_errors: For each stage, the timestamp uncertainties of output events.
    """

    manifest: RunManifest
    rows: NDArray[np.void]
    gaps: list[Histogram]
    timeline: list[NDArray[np.int64]]
    seconds: list[WorkerSample]
    texts: list[str]
    event_errors: list[Histogram]


def read_run(folder: Path, *, max_rows: float = inf, by_stage: bool = True) -> Stored:
    """Read everything that was recorded of a run, finished or not.

    Args:
        folder: The folder of the run.
        max_rows: The largest number of records to hold in memory, by default unlimited. If a
            finished run has more, `rows` is a `Frame`, which reads columns from disk on demand.
        by_stage: Whether the rows of a `Frame` are ordered by stage, or as in the file.

    Raises:
        UserError: There is no run in the folder, a file is damaged, or the run has a newer schema.
    """
    refuse_links(folder)
    manifest = _read_manifest(folder)

    stage_count = max(len(manifest.stages), 1)
    with _translate_read_errors(folder):
        rows, texts = _read_checked_records(folder, max_rows, by_stage=by_stage)
        return Stored(
            manifest=manifest,
            rows=rows,
            gaps=_read_histograms(folder, "gaps.", stage_count),
            timeline=_read_timelines(folder, stage_count),
            seconds=_read_worker_samples(folder),
            texts=texts,
            event_errors=_read_histograms(folder, UNCERTAINTY_PREFIX, stage_count),
        )


def _read_checked_records(
    folder: Path, max_rows: float, *, by_stage: bool
) -> tuple[NDArray[np.void], list[str]]:
    """Return the records of a run and their error texts, after a check of their values.

    The records of a run with more than `max_rows` are not loaded into memory. The result is then a
    `Frame`, which reads a column from disk when it is used. Only the column of the scheduled times
    is checked in it, because a check of all columns would read all of them.

    Args:
        folder: The folder of the run.
        max_rows: The largest number of records to load.
        by_stage: Whether the records of a `Frame` are ordered by stage, rather than as in the file.

    Raises:
        ValueError: A record has an impossible value, so a file is damaged.
    """
    frame = _open_frame(folder, max_rows, by_stage=by_stage)
    if frame is None:
        rows, texts = _read_rows(folder)
        check_rows(rows)
        return rows, texts

    # Callers index the records only by column and by slice, which a Frame supports like an array.
    # The cast lets them declare a single type for both.
    frame_as_array = cast("NDArray[np.void]", frame)
    check_scheduled_times(frame_as_array)
    return frame_as_array, frame.texts


def read_run_lazily(folder: Path, *, by_stage: bool = True) -> Stored:
    """Read a run like `read_run`, with a `Frame` as `rows` if it has more than LAZY_ROWS rows."""
    return read_run(folder, max_rows=LAZY_ROWS, by_stage=by_stage)


def _read_manifest(folder: Path) -> RunManifest:
    """Return the manifest of a run. Raises UserError if the folder has none."""
    path = folder / "run.json"
    if path.is_file():
        return decode_manifest(path.read_bytes(), str(path))

    hint = "give the folder that `loadgen run` printed when it started"
    if not folder.is_dir():
        raise missing_result(folder, hint)

    raise UserError(
        "no_result", "not the folder of a run, because it has no run.json", str(folder), hint
    )


@contextlib.contextmanager
def _translate_read_errors(folder: Path) -> Iterator[None]:
    """Turn the exceptions that a damaged file of a run causes into a UserError."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        message = f"a file of this run is damaged: {error}"
        hint = "the run's summary.json still has the metrics that were printed"
        raise UserError("damaged_file", message, str(folder), hint) from None


def _open_frame(folder: Path, max_rows: float, *, by_stage: bool) -> Frame | None:
    """Return the records of a finished run on disk, or None if they fit into memory."""
    merged = folder / "requests" / MERGED
    if max_rows == inf or not merged.exists():
        return None
    frame = Frame([merged], by_stage=by_stage)
    return frame if len(frame) > max_rows else None


def _read_histograms(folder: Path, prefix: str, stage_count: int) -> list[Histogram]:
    """Return for each stage a histogram that the workers stored as `w0.PREFIX` and the stage."""
    histograms = [Histogram() for _ in range(stage_count)]
    for stage, file in _files_of_stages(folder, prefix, stage_count):
        histograms[stage].merge(Histogram.from_bytes(file.read_bytes()))
    return histograms


def _read_timelines(folder: Path, stage_count: int) -> list[NDArray[np.int64]]:
    """Return for each stage the number of output events of all workers per BIN_NS."""
    timelines = [np.zeros(0, np.int64) for _ in range(stage_count)]
    for stage, file in _files_of_stages(folder, "timeline.", stage_count):
        counts = np.frombuffer(_complete_records(file.read_bytes(), 8), "<i8")
        timelines[stage] = _add_padded(timelines[stage], counts)
    return timelines


def _files_of_stages(folder: Path, prefix: str, stage_count: int) -> Iterator[tuple[int, Path]]:
    """Yield the files `w0.PREFIX` and stage of all workers with the index of the stage."""
    for file in sorted((folder / "flows").glob(f"w*.{prefix}*")):
        number = file.name.partition(f".{prefix}")[2]
        if number.isdigit() and int(number) < stage_count:
            yield int(number), file


def read_server_samples(folder: Path) -> list[series.MetricSample]:
    """Return samples from the servers' own metrics pages, in order of time.

    The list is empty if no page was read.
    """
    file = folder / series.FILE
    if not file.is_file():
        return []
    with file.open("rb") as lines:
        return list(decode_json_lines(lines, series.MetricSample))


def read_heat(folder: Path) -> NDArray[np.void]:
    """Return the records of HEAT of all workers in order of time; empty without output events."""
    parts = [
        np.frombuffer(_complete_records(file.read_bytes(), HEAT.itemsize), HEAT)
        for file in sorted((folder / "flows").glob("w*.heat"))
    ]
    records = np.concatenate([np.zeros(0, HEAT), *parts])
    return records[np.argsort(records["until_ns"], kind="stable")]


def _complete_records(data: bytes, size: int) -> bytes:
    """Return data without an incomplete record at the end, which a killed worker may leave."""
    return data[: len(data) // size * size]


def _add_padded(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of two arrays, the shorter of which is filled up with zeros."""
    total = np.zeros(max(len(left), len(right)), np.int64)
    total[: len(left)] += left
    total[: len(right)] += right
    return total


def _read_worker_samples(folder: Path) -> list[WorkerSample]:
    """Return the samples that the workers took of themselves, one per second.

    A finished run has them in one file, a running one in a file per worker.
    """
    merged = folder / "seconds.jsonl"
    files = [merged] if merged.exists() else sorted(folder.glob("spool/w*.seconds"))
    return [sample for file in files for sample in decode_worker_samples(file.read_bytes())]


def _read_rows(folder: Path) -> tuple[NDArray[np.void], list[str]]:
    """Return the records of all workers and their error texts, wherever a run has them now.

    A finished run has one Parquet file of all records. During a run, workers append records to
    segments (files of binary records), and a compactor turns full segments into Parquet files.
    """
    merged = folder / "requests" / MERGED

    # Next to it may be files that a killed process could not remove any more.
    if merged.exists():
        return read_records([merged])

    all_segments = segments(folder)
    if all_segments:
        return _read_unfinished_run(folder, all_segments)

    files = sorted((folder / "requests").glob("*.parquet"))
    if files:
        return read_records(files)

    return np.zeros(0, ROW), []


def _read_unfinished_run(
    folder: Path, all_segments: list[Segment]
) -> tuple[NDArray[np.void], list[str]]:
    """Return the records and error texts of a run whose records are not yet all in Parquet files.

    The records of a worker are numbered. The worker writes them to segments, files of binary
    records, and another process converts the older segments to Parquet files and deletes them. Both
    kinds of files can have the same records. So all segments are read, and of the Parquet files
    only the records with lower numbers. Example: if the first segment begins with record 4,000, the
    records 0 to 3,999 come from Parquet files.
    """
    segments_by_worker: dict[int, list[Segment]] = {}
    for segment in all_segments:
        segments_by_worker.setdefault(segment.worker, []).append(segment)

    records = _RecordCollector()
    for worker, worker_segments in segments_by_worker.items():
        rows = concatenate_rows(complete_rows(segment.path) for segment in worker_segments)
        records.add(rows, worker_texts(folder, worker))
        first_row_in_segments = worker_segments[0].first
        _add_converted_rows(records, folder, worker, first_row_in_segments)

    return records.rows(), records.texts


def _add_converted_rows(
    records: _RecordCollector, folder: Path, worker: int, first_row_in_segments: int
) -> None:
    """Add the records of a worker that only Parquet files have, since their segments are deleted.

    The rows (records) of a worker are numbered from 0. The name of a Parquet file has the number of
    its first row: `w0-000000200000.parquet`. Sorted by name, the files are in the order of their
    rows. The same rows can be in two files, because small files are replaced by a larger one, and a
    process that was killed may have left the small ones too. Such a small file is skipped.

    Args:
        records: Where the records are added.
        folder: The folder of the run.
        worker: The number of the worker.
        first_row_in_segments: The first row of the segments. It and later rows are not added.
    """
    next_row = 0
    for file in sorted((folder / "requests").glob(f"w{worker}-*.parquet")):
        first_row = int(file.stem.partition("-")[2])
        has_rows_of_previous_file = first_row < next_row
        has_only_rows_of_segments = first_row >= first_row_in_segments
        if has_rows_of_previous_file or has_only_rows_of_segments:
            continue

        rows, texts = read_records([file])
        next_row = first_row + len(rows)

        # The last rows of the file may also be in the segments.
        row_count_before_segments = first_row_in_segments - first_row
        records.add(rows[:row_count_before_segments], texts)


class _RecordCollector:
    """Joins rows with error texts of their own into rows that share one list of texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._parts: list[NDArray[np.void]] = []

    def add(self, rows: NDArray[np.void], texts: list[str]) -> None:
        """Add rows whose column `text` refers to `texts`. The column is renumbered in place."""
        if self.texts and len(rows):
            rows["text"][rows["text"] >= 0] += len(self.texts)
        self._parts.append(rows)
        self.texts += texts

    def rows(self) -> NDArray[np.void]:
        """Return all rows that were added."""
        if len(self._parts) == 1:  # no copy
            return self._parts[0]
        return concatenate_rows(self._parts)


def has_rows(folder: Path) -> bool:
    """Return whether the folder has records of a run. If not, it has at most a `summary.json`."""
    return any((folder / "requests").glob("*.parquet")) or any(folder.glob("spool/*.rows"))


@contextlib.contextmanager
def remove_on_failure(folder: Path) -> Iterator[None]:
    """Remove what was created in a folder if the block inside fails before any run has started.

    A folder that had content before is left as it is.
    """
    existed = folder.exists()
    was_empty = not existed or (folder.is_dir() and not any(folder.iterdir()))
    try:
        yield
    except BaseException:
        if was_empty and not any(folder.rglob("run.json")):
            shutil.rmtree(folder, ignore_errors=True)
            if existed:
                folder.mkdir()
        raise


def _store_worker_samples(folder: Path) -> None:
    """Write the samples of all workers to one file, in the order of their times."""
    samples = _read_worker_samples(folder)
    samples.sort(key=lambda sample: (sample.t_s, sample.worker))
    lines = b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)
    replace(folder / "seconds.jsonl", lines)


def delete_record_log(folder: Path) -> None:
    """Delete the record log of a run that has ended without a failure, the folder `spool`.

    Its records are in Parquet files already. It also contains one sample per second of the CPU time
    and memory that each worker has used. These are first copied to `seconds.jsonl`.
    """
    _store_worker_samples(folder)
    for file in (folder / "spool").iterdir():
        file.unlink()
    (folder / "spool").rmdir()
