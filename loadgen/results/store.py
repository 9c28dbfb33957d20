"""The files of a run: append to them and read them back, also after a crash.

Does IO. `record.py` defines the rows and `manifest.py` defines `run.json`.

    run.json                      the header (manifest.Header)
    requests/*.parquet            rows: small complete files during the run, one `requests.parquet` after it
    sample/requests.parquet       with --keep sample: a sample of the rows, instead of all of them
    spool/w0.rows                 binary rows (record.ROW), appended by worker 0; w0.N.rows continues from row N.
                                  The compactor deletes a file that is complete and that it has read to the end
    spool/w0.seen                 without --keep raw: the slots of rows that are deleted (slot_ranges.RUN)
    spool/w0.texts                error texts, one JSON string per line; a row's `text` is the line number, from 0
    spool/w0.seconds              one JSON line per second (manifest.Second)
    flows/w0.gaps.S               histogram of the gaps between output events of stage S
    flows/w0.timeline.S           output events of stage S, counted per 10 ms
    flows/ledger                  without --keep raw: the sums of the deleted rows (metrics.accumulator.Accumulator)
    flows/w0.heat                 gaps of all stages counted by length, about every 2 s: records of HEAT
    server.jsonl                  values from the servers' metrics pages (server_metrics.series.MetricSample), one line
                                  for each change of a value
    summary.json

A worker only appends to files and renames them, so everything it wrote is readable after `kill -9`. A separate process
(`execution/compactor.py`) writes the Parquet files, because converting rows blocks the interpreter for tens of ms.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.errors import Fault, Faults, UserError
from loadgen.results import manifest, slot_ranges
from loadgen.results.record import BIN_NS, FIELDS, FINISH_REASONS, KINDS, ROW, SOURCES, STATUSES
from loadgen.server_metrics import series
from loadgen.stats.quantiles import Histogram, bucket

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


MERGED = "requests.parquet"
LAZY_ROWS = 1_000_000  # above this, a summary is computed from columns on disk instead of rows in memory
LEDGER = "ledger"
SEGMENT_ROWS = 100_000  # rows in one file of the spool: 20 MB
DIFFERENT_TEXTS = 10_000  # error texts that a worker stores; later ones are counted without their text
NAMES = {
    "status": STATUSES,
    "kind": KINDS,
    "finish_reason": FINISH_REASONS,
    "input_source": SOURCES,
    "output_source": SOURCES,
}
"""Columns that are integer codes in a row and strings in Parquet; the code is the index in the tuple."""

HEAT_EDGES_NS: NDArray[np.int64] = np.unique(np.logspace(4, 11, 85).astype(np.int64))  # 10 µs to 100 s, 12 per decade
HEAT = np.dtype([("until_ns", "<i8"), ("counts", "<i8", (len(HEAT_EDGES_NS) + 1,))])
"""Gaps between output events, counted by length, since the previous record. `until_ns`: from the start of the run.

`counts`: below the first edge of HEAT_EDGES_NS, between two edges, above the last edge.
"""
_HEAT_STARTS = np.concatenate(([0], bucket(HEAT_EDGES_NS)))


class Stored(NamedTuple):
    """Everything that a summary is computed from, read back from a run's folder."""

    header: manifest.Header
    rows: NDArray[np.void]
    gaps: list[Histogram]
    timeline: list[NDArray[np.int64]]
    seconds: list[manifest.Second]
    texts: list[str]


class Spool:
    """The files that one worker appends to. It collects in memory; `flush` writes the new data, one call per file."""

    def __init__(self, folder: Path, worker: int) -> None:
        (folder / "spool").mkdir(parents=True, exist_ok=True)
        (folder / "flows").mkdir(exist_ok=True)
        self._folder, self._worker = folder, worker
        existing = segments(folder, worker)
        self._segment_start = existing[-1].first if existing else 0
        self._row_fd = self._open(existing[-1].path.name.partition(".")[2] if existing else "rows")
        self._rows_in_segment = os.fstat(self._row_fd).st_size // ROW.itemsize
        self._text_fd = self._open("texts")
        self._second_fd = self._open("seconds")
        self._new_rows: list[bytes] = []
        self._new_texts: list[str] = []
        self._new_seconds: list[manifest.Second] = []
        self._text_numbers: dict[str, int] = {}
        self._texts_written = self._count_texts(self._text_fd)
        self._heat_totals: dict[int, NDArray[np.int64]] = {}

    def _open(self, name: str) -> int:
        path = self._folder / "spool" / f"w{self._worker}.{name}"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _count_texts(self, descriptor: int) -> int:
        """Number of error texts already in the file. Ends a last line that a killed worker left unfinished."""
        data = (self._folder / "spool" / f"w{self._worker}.texts").read_bytes()
        if data and not data.endswith(b"\n"):
            _write(descriptor, b"\n")
        return len(data.splitlines())

    def row(self, row: bytes) -> None:
        self._new_rows.append(row)

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

    def second(self, second: manifest.Second) -> None:
        self._new_seconds.append(second)

    def flush(self) -> None:
        """Write the collected data. Texts go first, so that a stored row never refers to a text that is not stored."""
        if self._new_texts:
            _write(self._text_fd, b"".join(msgspec.json.encode(text) + b"\n" for text in self._new_texts))
            self._new_texts.clear()
        if self._new_rows:
            _write(self._row_fd, b"".join(self._new_rows))
            self._rows_in_segment += len(self._new_rows)
            self._new_rows.clear()
            if self._rows_in_segment >= SEGMENT_ROWS:
                os.close(self._row_fd)
                self._segment_start += self._rows_in_segment
                self._row_fd = self._open(f"{self._segment_start:012d}.rows")
                self._rows_in_segment = 0
        if self._new_seconds:
            _write(self._second_fd, b"".join(msgspec.json.encode(second) + b"\n" for second in self._new_seconds))
            self._new_seconds.clear()

    def flows(self, stage: int, gaps: Histogram, timeline: NDArray[np.int64], first: int = 0) -> None:
        """Replace the stored histogram of a stage, and its timeline from bin `first` on."""
        stem = self._folder / "flows" / f"w{self._worker}"
        replace(Path(f"{stem}.gaps.{stage}"), gaps.to_bytes())
        descriptor = os.open(f"{stem}.timeline.{stage}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.pwrite(descriptor, timeline.astype("<i8").tobytes(), first * 8)
        os.close(descriptor)
        counts = np.add.reduceat(gaps.counts, _HEAT_STARTS)
        new_counts = counts - self._heat_totals.get(stage, 0)
        self._heat_totals[stage] = counts
        if new_counts.any():
            record = np.array(((first + len(timeline)) * BIN_NS, new_counts), HEAT)
            with Path(f"{stem}.heat").open("ab") as file:
                file.write(record.tobytes())

    def close(self) -> None:
        self.flush()
        for descriptor in (self._row_fd, self._text_fd, self._second_fd):
            os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees the old content or the new content, never a part of either."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_bytes(data)
    scratch.replace(path)


@contextlib.contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """While inside, a Fault raised before any run has started (for example: target down) removes what was created.

    A folder that had content before is left as it is.
    """
    existed = folder.exists()
    was_empty = not existed or (folder.is_dir() and not any(folder.iterdir()))
    try:
        yield
    except (Fault, Faults):
        if was_empty and not any(folder.rglob("run.json")):
            shutil.rmtree(folder, ignore_errors=True)
            if existed:
                folder.mkdir()
        raise


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


def recorded(folder: Path, worker: int, header: manifest.Header) -> NDArray[np.void]:
    """The slots that have a row of this worker in any file, as slot_ranges.RUN; a slot may be there twice.

    The worker must have stopped writing.
    """
    ranges = [np.zeros(0, slot_ranges.RUN)]
    for segment in segments(folder, worker):
        # read before `.seen`: the compactor writes that file first and deletes the segment after it
        rows = _complete_rows(segment.path)
        ranges.append(slot_ranges.of(rows, header))
    deleted = folder / "spool" / f"w{worker}.seen"
    if deleted.exists():
        ranges.append(np.frombuffer(deleted.read_bytes(), slot_ranges.RUN))
    files = sorted((folder / "requests").glob(f"w{worker}-*.parquet"))
    if files:
        ranges.append(slot_ranges.of(from_parquet(files, ("slot", "stage", "lane"))[0], header))
    return np.concatenate(ranges)


# -- reading back ------------------------------------------------------------------------------------------------


def read_run(folder: Path, *, lazily: bool = False) -> Stored:
    """Read a run, finished or not. Raises UserError for a folder without a run, or with a newer schema.

    `lazily`: `rows` is a `Frame`, which supports what `summarize` needs of rows. Only for a finished run.
    """
    path = folder / "run.json"
    if not path.is_file():
        hint = "give the folder that `loadgen run` named in its first lines"
        raise UserError(f"{folder} is not the folder of a run: it has no run.json", str(folder), hint)
    header = manifest.decode(path.read_bytes(), str(path))
    if lazily:
        frame = Frame([folder / "requests" / MERGED])
        rows, texts = cast("NDArray[np.void]", frame), frame.texts
    else:
        rows, texts = _read_rows(folder)
    stages = max(len(header.stages), 1)
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
            timeline[stage] = _add_padded(timeline[stage], np.frombuffer(_whole_records(file.read_bytes(), 8), "<i8"))
    return Stored(header, rows, gaps, timeline, _read_seconds(folder), texts)


def read_lightly(folder: Path) -> Stored:
    """As `read_run`; above LAZY_ROWS rows of a finished run, `rows` is a `Frame`."""
    merged = folder / "requests" / MERGED
    return read_run(folder, lazily=merged.exists() and _is_large(merged))


def server(folder: Path) -> list[series.MetricSample]:
    """Samples from the servers' own metrics pages, in order of time; empty when no page was read."""
    samples: list[series.MetricSample] = []
    file = folder / series.FILE
    if file.is_file():
        decoder = msgspec.json.Decoder(series.MetricSample)
        with file.open("rb") as lines, contextlib.suppress(msgspec.MsgspecError):  # a last line that was cut off
            samples.extend(map(decoder.decode, lines))
    return samples


def server_table(folder: Path) -> Any:
    """The samples of `server` as a pyarrow table; times in seconds from the start of the run."""
    import pyarrow as pa

    samples = server(folder)
    types = {"t_s": pa.float64(), "target": pa.int32(), "page": pa.string(), "name": pa.string()}
    types |= {"labels": pa.string(), "value": pa.float64()}
    return pa.table(
        {name: pa.array([getattr(sample, name) for sample in samples], type_) for name, type_ in types.items()}
    )


def heat(folder: Path) -> NDArray[np.void]:
    """Records of HEAT of all workers, in order of time; empty for runs of older versions, which did not write them."""
    parts = [
        np.frombuffer(_whole_records(file.read_bytes(), HEAT.itemsize), HEAT)
        for file in (folder / "flows").glob("w*.heat")
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


def _read_seconds(folder: Path) -> list[manifest.Second]:
    seconds: list[manifest.Second] = []
    for file in [*sorted(folder.glob("spool/w*.seconds")), *sorted(folder.glob("seconds.jsonl"))]:
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(msgspec.MsgspecError):  # the last line of a worker that was killed
                seconds.append(msgspec.json.decode(line, type=manifest.Second))
        if file.name == "seconds.jsonl":
            break
    return seconds


def _read_rows(folder: Path) -> tuple[NDArray[np.void], list[str]]:
    """Rows of all workers and their error texts: of the spool, and of Parquet where segments are deleted."""
    spooled = [] if (folder / "requests" / MERGED).exists() else segments(folder)
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
        rows = np.concatenate([_complete_rows(segment.path) for segment in own])
        own_texts = worker_texts(folder, worker)
        append(rows, own_texts)
        texts += own_texts
        end = 0  # of the rows of deleted segments found so far
        for file in sorted((folder / "requests").glob(f"w{worker}-*.parquet")):  # rows of deleted segments
            first = int(file.stem.partition("-")[2])
            if end <= first < own[0].first:
                rows, file_texts = from_parquet([file])
                append(rows[: own[0].first - first], file_texts)
                texts += file_texts
                end = first + len(rows)
    return (np.concatenate(parts) if len(parts) > 1 else parts[0]), texts


def _complete_rows(file: Path) -> NDArray[np.void]:
    data = np.fromfile(file, np.uint8)
    return data[: len(data) // ROW.itemsize * ROW.itemsize].view(ROW)


def worker_texts(folder: Path, worker: int) -> list[str]:
    """The error texts of a worker; the index is the number that rows refer to. "" for a damaged line."""
    texts: list[str] = []
    for line in (folder / "spool" / f"w{worker}.texts").read_bytes().splitlines():
        try:
            texts.append(msgspec.json.decode(line, type=str))
        except msgspec.MsgspecError:
            texts.append("")
    return texts


def has_rows(folder: Path) -> bool:
    """Whether the rows of this run are stored. If not, there is only its `summary.json`, or `flows/ledger`."""
    if (folder / "flows" / LEDGER).exists():
        return False
    return any((folder / "requests").glob("*.parquet")) or any(folder.glob("spool/*.rows"))


def _is_large(merged: Path) -> bool:
    return len(Frame([merged])) > LAZY_ROWS


# -- Parquet -----------------------------------------------------------------------------------------------------


def to_table(rows: NDArray[np.void], texts: list[str]) -> Any:
    """Rows as a pyarrow Table with the columns of FIELDS. Codes become strings; -1 (never, unknown) becomes null."""
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for name, _, meaning in FIELDS:
        values = np.ascontiguousarray(rows[name])
        if name == "text":
            column: Any = pa.array([texts[i] if 0 <= i < len(texts) else None for i in values.tolist()], pa.string())
        elif name in NAMES:
            column = pa.DictionaryArray.from_arrays(pa.array(values.view(np.int8)), pa.array(NAMES[name], pa.string()))
        elif name in _BOOLEANS:
            column = pa.array(values.astype(bool))
        elif (name.endswith("_ns") and name != "due_ns") or "-1" in meaning:
            column = pa.array(values, mask=values < 0)
        else:
            column = pa.array(values)
        columns[name] = column
    fields = [pa.field(name, columns[name].type, metadata={"meaning": meaning}) for name, _, meaning in FIELDS]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


_BOOLEANS = ("reused", "kernel_stamp")


def from_parquet(files: list[Path], only: Sequence[str] | None = None) -> tuple[NDArray[np.void], list[str]]:
    """The inverse of `to_table`, over several files: rows and error texts.

    With `only`, reads these columns; all others have their value for unknown (-1 or 0).
    """
    frame = Frame(files, only)
    rows = np.zeros(len(frame), ROW)
    for name in ROW.names or ():
        rows[name] = frame[name]
    return rows, frame.texts


class Frame:
    """Rows in Parquet files, read one column at a time.

    `frame["due_ns"]` returns the same array as rows in memory would. No column is cached, so a run of millions of rows
    needs a fraction of the memory of its rows.
    """

    def __init__(self, files: list[Path], only: Sequence[str] | None = None) -> None:
        import pyarrow.parquet as pq

        self._paths = files
        with self._readable(0):
            self._files = [pq.ParquetFile(file) for file in files]
        self._length: int = sum(file.metadata.num_rows for file in self._files)
        self._columns = set(self._files[0].schema_arrow.names if only is None else only)
        self._texts: list[str] | None = None if "text" in self._columns else []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: str) -> NDArray[Any]:
        values = np.empty(self._length, ROW[name])
        if name not in self._columns:
            values[:] = -1 if ROW[name].kind == "i" else 0
            return values
        texts: dict[str, int] = {}
        at = 0
        for i, file in enumerate(self._files):
            for group in range(file.num_row_groups):
                with self._readable(i):
                    column = file.read_row_group(group, columns=[name]).column(0).combine_chunks()
                values[at : at + len(column)] = _to_row_values(name, column, texts)
                at += len(column)
        if name == "text":
            self._texts = list(texts)
        return values

    @contextlib.contextmanager
    def _readable(self, first: int) -> Iterator[None]:
        """While inside, errors of a damaged file become UserError. `first`: index of the file that is read."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError) as error:
            where = self._paths[first] if len(self._paths) == 1 or first else self._paths[0].parent
            reason = str(error).partition(".")[0]
            hint = "copy the run's folder again; summary.json, if it is there, still holds its figures"
            raise UserError(f"records that cannot be read: {reason}", str(where), hint) from None

    @property
    def texts(self) -> list[str]:
        """The error texts that the column `text` refers to by index."""
        if self._texts is None:
            self["text"]
        assert self._texts is not None
        return self._texts


def _to_row_values(name: str, column: Any, texts: dict[str, int]) -> NDArray[Any]:
    """A Parquet column as it is in a row: codes instead of strings, -1 for null. Adds new error texts to `texts`."""
    import pyarrow as pa

    numbers: NDArray[Any]
    if name == "text" or name in NAMES:
        if not isinstance(column, pa.DictionaryArray):
            column = column.dictionary_encode()
        code_of = {word: i for i, word in enumerate(NAMES.get(name, ()))}
        strings = column.dictionary.to_pylist()
        codes = [texts.setdefault(word, len(texts)) if name == "text" else code_of.get(word, 0) for word in strings]
        positions = column.indices.fill_null(len(strings)).to_numpy(zero_copy_only=False)
        numbers = np.array([*codes, -1 if name == "text" else 0], np.int64)[positions]
    elif name in _BOOLEANS:
        numbers = column.to_numpy(zero_copy_only=False)
    else:
        numbers = (column.fill_null(-1) if column.null_count else column).to_numpy(zero_copy_only=False)
    return numbers


def drop_spool(folder: Path) -> None:
    """Delete the spool after a clean end. Its seconds go to `seconds.jsonl`; its rows are in Parquet already."""
    seconds = sorted(_read_seconds(folder), key=lambda second: (second.t_s, second.worker))
    replace(folder / "seconds.jsonl", b"".join(msgspec.json.encode(second) + b"\n" for second in seconds))
    for file in (folder / "spool").iterdir():
        file.unlink()
    (folder / "spool").rmdir()
