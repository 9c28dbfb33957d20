"""Reads the folder of a run back, finished or not. This is the list of its files.

Does IO. `record.py` defines the rows, `manifest.py` defines `run.json`, and `record_log.py` writes the files of a worker.

    run.json                      the manifest (manifest.RunManifest)
    requests/*.parquet            rows: small complete files during the run, one `requests.parquet` after it
    spool/w0.rows                 binary rows (record.ROW), appended by worker 0; w0.N.rows continues from row N.
                                  The compactor deletes a file that is complete and that it has read to the end
    spool/w0.texts                error texts, one JSON string per line; a row's `text` is the line number, from 0
    spool/w0.seconds              one JSON line per second (manifest.WorkerSample)
    spool/w0.events, gaps/        with --keep gaps: see `gaps.py`
    flows/w0.gaps.S               histogram of the gaps between output events of stage S
    flows/w0.stamps-S             histogram of the stamp errors of the output events of stage S
    flows/w0.timeline.S           output events of stage S, counted per 10 ms
    flows/w0.heat                 gaps of all stages counted by length, about every 2 s: records of HEAT
    server.jsonl                  values from the servers' metrics pages (server_metrics.series.MetricSample), one line
                                  for each change of a value
    summary.json

A worker only appends to files and renames them, so everything it wrote is readable after `kill -9`. Parquet files are
written at the end or, while a long run goes, by a process (`execution/compactor_process.py`), since to convert
rows blocks the interpreter for tens of ms.
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
from loadgen.core.results.files import replace as replace  # noqa: PLC0414 - other rooms call `store.replace`
from loadgen.core.results.json_files import decode_json_lines
from loadgen.core.results.manifest import (
    RunManifest,
    WorkerSample,
    decode_manifest,
    decode_worker_samples,
)
from loadgen.core.results.parquet import Frame, from_parquet
from loadgen.core.results.record import ROW, check, check_due, joined
from loadgen.core.results.record_log import HEAT, STAMPS, complete_rows, segments, worker_texts
from loadgen.core.server_metrics import series
from loadgen.core.stats.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterator

MERGED = "requests.parquet"
LAZY_ROWS = (
    1_000_000  # above this, a summary is computed from columns on disk instead of rows in memory
)


class Stored(NamedTuple):
    """Everything that a summary is computed from, read back from a run's folder."""

    manifest: RunManifest
    rows: NDArray[np.void]
    gaps: list[Histogram]
    timeline: list[NDArray[np.int64]]
    seconds: list[WorkerSample]
    texts: list[str]
    event_errors: list[Histogram]  # per stage, stamp errors of output events


def read_run(folder: Path, *, most: float = inf, by_stage: bool = True) -> Stored:
    """Read a run, finished or not. Raises UserError for a folder without a run, or with a newer schema.

    `most`: where a finished run has more rows, `rows` is a `Frame`, which supports what `summarize` needs of rows,
    `by_stage` or in the order of the file.
    """
    path = folder / "run.json"
    refuse_links(folder)
    if not path.is_file():
        hint = "give the folder that `loadgen run` named in its first lines"
        if not folder.is_dir():
            raise missing_result(folder, hint)
        raise UserError(
            "no_result", "not the folder of a run: it has no run.json", str(folder), hint
        )
    manifest = decode_manifest(path.read_bytes(), str(path))
    with undamaged(folder):
        merged = folder / "requests" / MERGED
        if (
            most < inf
            and merged.exists()
            and len(frame := Frame([merged], by_stage=by_stage)) > most
        ):
            check_due(rows := cast("NDArray[np.void]", frame))
            texts = frame.texts
        else:
            rows, texts = _read_rows(folder)
            check(rows)
        stages = max(len(manifest.stages), 1)
        gaps = [Histogram() for _ in range(stages)]
        timeline = [np.zeros(0, np.int64) for _ in range(stages)]
        for file in sorted((folder / "flows").glob("w*.*.*")):
            _, kind, number = file.name.rsplit(".", 2)
            if not number.isdigit() or int(number) >= stages:
                continue
            stage = int(number)
            if kind == "gaps":
                gaps[stage].merge(Histogram.from_bytes(file.read_bytes()))
            else:
                timeline[stage] = _add_padded(
                    timeline[stage], np.frombuffer(_whole_records(file.read_bytes(), 8), "<i8")
                )
        event_errors = [Histogram() for _ in range(stages)]
        for file in (folder / "flows").glob(f"w*.{STAMPS}*"):
            number = file.name.partition(STAMPS)[2]
            if number.isdigit() and int(number) < stages:
                event_errors[int(number)].merge(Histogram.from_bytes(file.read_bytes()))
        return Stored(manifest, rows, gaps, timeline, _read_seconds(folder), texts, event_errors)


@contextlib.contextmanager
def undamaged(folder: Path) -> Iterator[None]:
    """While inside, what a damaged file makes of a reader is told as a UserError."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        what = f"a file of this run is damaged: {error}"
        raise UserError(
            "damaged_file",
            what,
            str(folder),
            "the summary that the run has printed is in its summary.json",
        ) from None


def read_lightly(folder: Path, *, by_stage: bool = True) -> Stored:
    """As `read_run`; above LAZY_ROWS rows of a finished run, `rows` is a `Frame`."""
    return read_run(folder, most=LAZY_ROWS, by_stage=by_stage)


def server(folder: Path) -> list[series.MetricSample]:
    """Samples from the servers' own metrics pages, in order of time; empty when no page was read."""
    file = folder / series.FILE
    if not file.is_file():
        return []
    with file.open("rb") as lines:
        return list(decode_json_lines(lines, series.MetricSample))


def heat(folder: Path) -> NDArray[np.void]:
    """Return the records of HEAT of all workers in order of time; empty without output events."""
    parts = [
        np.frombuffer(_whole_records(file.read_bytes(), HEAT.itemsize), HEAT)
        for file in sorted((folder / "flows").glob("w*.heat"))
    ]
    records = np.concatenate([np.zeros(0, HEAT), *parts])
    return records[np.argsort(records["until_ns"], kind="stable")]


def _whole_records(data: bytes, size: int) -> bytes:
    """The data without an incomplete record at the end, which a killed worker may leave."""
    return data[: len(data) // size * size]


def _add_padded(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    total = longer.astype(np.int64)
    total[: len(shorter)] += shorter
    return total


def _read_seconds(folder: Path) -> list[WorkerSample]:
    kept = folder / "seconds.jsonl"
    files = [kept] if kept.exists() else sorted(folder.glob("spool/w*.seconds"))
    return [second for file in files for second in decode_worker_samples(file.read_bytes())]


def _read_rows(folder: Path) -> tuple[NDArray[np.void], list[str]]:
    """Rows of all workers and their error texts: of the spool, and of Parquet where segments are deleted."""
    merged = folder / "requests" / MERGED
    if (
        merged.exists()
    ):  # it has all rows; beside it may be what a killed process could not remove any more
        return from_parquet([merged])
    spooled = segments(folder)
    files = sorted((folder / "requests").glob("*.parquet"))
    if not spooled:
        return from_parquet(files) if files else (np.zeros(0, ROW), [])
    parts: list[NDArray[np.void]] = []
    texts: list[str] = []

    def append(part: NDArray[np.void], part_texts: list[str]) -> None:
        """Add rows; their text numbers count from the first of `part_texts`, which the caller adds next."""
        if texts and len(part):
            part["text"][part["text"] >= 0] += len(texts)
        parts.append(part)

    for worker in dict.fromkeys(segment.worker for segment in spooled):
        own = [segment for segment in spooled if segment.worker == worker]
        rows = joined(complete_rows(segment.path) for segment in own)
        own_texts = worker_texts(folder, worker)
        append(rows, own_texts)
        texts += own_texts
        end = 0  # of the rows of deleted segments found so far
        for file in sorted(
            (folder / "requests").glob(f"w{worker}-*.parquet")
        ):  # rows of deleted segments
            first = int(file.stem.partition("-")[2])
            if end <= first < own[0].first:
                rows, file_texts = from_parquet([file])
                append(rows[: own[0].first - first], file_texts)
                texts += file_texts
                end = first + len(rows)
    return (joined(parts) if len(parts) > 1 else parts[0]), texts


def has_rows(folder: Path) -> bool:
    """Whether the folder holds records of this run. If not, it has at most a `summary.json`."""
    return any((folder / "requests").glob("*.parquet")) or any(folder.glob("spool/*.rows"))


@contextlib.contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """While inside, whatever ends the command before any run has started removes what was created.

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


def delete_record_log(folder: Path) -> None:
    """Delete the spool after a clean end. Its seconds go to `seconds.jsonl`; its rows are in Parquet already."""
    seconds = sorted(_read_seconds(folder), key=lambda second: (second.t_s, second.worker))
    replace(
        folder / "seconds.jsonl",
        b"".join(msgspec.json.encode(second) + b"\n" for second in seconds),
    )
    for file in (folder / "spool").iterdir():
        file.unlink()
    (folder / "spool").rmdir()
