"""The files of a run: append, read, merge, recover. IO; what the files mean is `record.py` and `header.py`.

    run.json                      header
    requests/*.parquet            rows; small complete files while the run goes, one `requests.parquet` after it
    sample/requests.parquet       with --keep sample: some of them, in the place of all
    spool/w0.rows                 binary rows (record.ROW) as the worker appends them, then w0.N.rows from row N on; the
                                  recorder takes away those that it has read to the end
    spool/w0.seen                 without --keep raw: which slots were in rows that are gone (seen.RUN)
    spool/w0.texts                error texts, a JSON string per line; a row's `text` is the line's number
    spool/w0.seconds              a JSON line per second (header.Second)
    flows/w0.gaps.S, w0.timeline.S      histogram of gaps and events per 10 ms of stage S
    flows/ledger                  without --keep raw: what rows have been folded into (`ledger.Ledger`)
    flows/w0.heat                 gaps of all stages by length, counted about every 2 s: lines of HEAT
    server.jsonl                 what the servers' metrics pages said (served.Sample), a line whenever a value changed
    summary.json

A worker only ever appends and renames, so that whatever was written is readable after `kill -9`. The Parquet files are
made by a process of their own (`recorder.py`): converting rows holds the interpreter for tens of ms.
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
LAZY_ROWS = 1_000_000  # from here on a summary is made from columns, not from rows in memory
LEDGER = "ledger"
SEGMENT_ROWS = 100_000  # of a file of the spool: 20 MB
DIFFERENT_TEXTS = 10_000  # of errors that a worker writes down; later ones are counted without their words
NAMES = {
    "status": STATUSES,
    "kind": KINDS,
    "finish_reason": FINISH_REASONS,
    "input_source": SOURCES,
    "output_source": SOURCES,
}
"""Columns that are small codes in a row and words in Parquet."""

HEAT_EDGES_NS: NDArray[np.int64] = np.unique(np.logspace(4, 11, 85).astype(np.int64))  # 10 µs to 100 s, 12 a decade
HEAT = np.dtype([("until_ns", "<i8"), ("counts", "<i8", (len(HEAT_EDGES_NS) + 1,))])
"""Gaps between output events that came up to `until_ns` since the line before: below the first edge, between edges,
above the last one."""
_HEAT_STARTS = np.concatenate(([0], bucket(HEAT_EDGES_NS)))


class Stored(NamedTuple):
    """Everything that a summary is made of, as read back from a folder."""

    header: manifest.Header
    rows: NDArray[np.void]
    gaps: list[Histogram]
    timeline: list[NDArray[np.int64]]
    seconds: list[manifest.Second]
    texts: list[str]


class Spool:
    """One worker's files. Collects in memory; `flush` writes what is new, in one call each."""

    def __init__(self, folder: Path, worker: int) -> None:
        (folder / "spool").mkdir(parents=True, exist_ok=True)
        (folder / "flows").mkdir(exist_ok=True)
        self._folder, self._worker = folder, worker
        begun = segments(folder, worker)
        self._first = begun[-1].first if begun else 0
        self._rows = self._append(begun[-1].path.name.partition(".")[2] if begun else "rows")
        self._in_segment = os.fstat(self._rows).st_size // ROW.itemsize
        self._texts = self._append("texts")
        self._seconds = self._append("seconds")
        self._new_rows: list[bytes] = []
        self._new_texts: list[str] = []
        self._new_seconds: list[manifest.Second] = []
        self._text_numbers: dict[str, int] = {}
        self._texts_written = self._mended(self._texts)
        self._heat: dict[int, NDArray[np.int64]] = {}

    def _append(self, name: str) -> int:
        path = self._folder / "spool" / f"w{self._worker}.{name}"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _mended(self, texts: int) -> int:
        """How many texts there are already, of a worker that died: its last line may lack its end."""
        data = (self._folder / "spool" / f"w{self._worker}.texts").read_bytes()
        if data and not data.endswith(b"\n"):
            _write(texts, b"\n")
        return len(data.splitlines())

    def row(self, row: bytes) -> None:
        self._new_rows.append(row)

    def text(self, text: str) -> int:
        """The number of an error text; equal texts share one. -1 once there are DIFFERENT_TEXTS."""
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
        """Texts first: a row never points at a text that is not there."""
        if self._new_texts:
            _write(self._texts, b"".join(msgspec.json.encode(text) + b"\n" for text in self._new_texts))
            self._new_texts.clear()
        if self._new_rows:
            _write(self._rows, b"".join(self._new_rows))
            self._in_segment += len(self._new_rows)
            self._new_rows.clear()
            if self._in_segment >= SEGMENT_ROWS:
                os.close(self._rows)
                self._first += self._in_segment
                self._rows = self._append(f"{self._first:012d}.rows")
                self._in_segment = 0
        if self._new_seconds:
            _write(self._seconds, b"".join(msgspec.json.encode(second) + b"\n" for second in self._new_seconds))
            self._new_seconds.clear()

    def flows(self, stage: int, gaps: Histogram, timeline: NDArray[np.int64], first: int = 0) -> None:
        """Replace the stored histogram of a stage, and its timeline from bin `first` on."""
        stem = self._folder / "flows" / f"w{self._worker}"
        replace(Path(f"{stem}.gaps.{stage}"), gaps.to_bytes())
        descriptor = os.open(f"{stem}.timeline.{stage}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.pwrite(descriptor, timeline.astype("<i8").tobytes(), first * 8)
        os.close(descriptor)
        counts = np.add.reduceat(gaps.counts, _HEAT_STARTS)
        new = counts - self._heat.get(stage, 0)
        self._heat[stage] = counts
        if new.any():
            line = np.array(((first + len(timeline)) * BIN_NS, new), HEAT)
            with Path(f"{stem}.heat").open("ab") as file:
                file.write(line.tobytes())

    def close(self) -> None:
        self.flush()
        for descriptor in (self._rows, self._texts, self._seconds):
            os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of either."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_bytes(data)
    scratch.replace(path)


@contextlib.contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """While inside, a fault that comes before the first run began (a dead target, say) takes what was made in the
    folder with it. What was there before is left alone."""
    there = folder.exists()
    empty = not there or (folder.is_dir() and not any(folder.iterdir()))
    try:
        yield
    except (Fault, Faults):
        if empty and not any(folder.rglob("run.json")):
            shutil.rmtree(folder, ignore_errors=True)
            if there:
                folder.mkdir()
        raise


class Segment(NamedTuple):
    """A file of rows of a worker: from its row `first` on."""

    worker: int
    first: int
    path: Path


def segments(folder: Path, worker: int | None = None) -> list[Segment]:
    """Those of all workers, or of one, in order; the last of each is the one that it may be writing."""
    found = []
    for path in folder.glob("spool/w*.rows"):
        name, *number, _ = path.name.split(".")
        found.append(Segment(int(name[1:]), int(number[0]) if number else 0, path))
    return sorted(one for one in found if worker is None or one.worker == worker)


def recorded(folder: Path, worker: int, header: manifest.Header) -> NDArray[np.void]:
    """Which slots have a row of this worker, in whatever file, as runs (seen.RUN), some of them perhaps twice; it must
    have stopped writing."""
    parts = [np.zeros(0, slot_ranges.RUN)]
    for segment in segments(folder, worker):
        rows = _whole_rows(segment.path)  # read before what holds those that are gone by then
        parts.append(slot_ranges.of(rows, header))
    gone = folder / "spool" / f"w{worker}.seen"
    if gone.exists():
        parts.append(np.frombuffer(gone.read_bytes(), slot_ranges.RUN))
    files = sorted((folder / "requests").glob(f"w{worker}-*.parquet"))
    if files:
        parts.append(slot_ranges.of(from_parquet(files, ("slot", "stage", "lane"))[0], header))
    return np.concatenate(parts)


# -- reading back ------------------------------------------------------------------------------------------------


def read_run(folder: Path, *, lazily: bool = False) -> Stored:
    """A run as far as it got. Raises UserError for a folder that is no run, or one of a newer schema.

    `lazily`: of a finished run, its rows are a `Frame`, which can do what `summarize` asks of rows.
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
        rows, texts = _rows(folder)
    stages = max(len(header.stages), 1)
    gaps = [Histogram() for _ in range(stages)]
    timeline = [np.zeros(0, np.int64) for _ in range(stages)]
    for file in sorted((folder / "flows").glob("w*.*.*")):
        _, what, number = file.name.rsplit(".", 2)
        if not number.isdigit() or int(number) >= stages:
            continue
        stage = int(number)
        if what == "gaps":
            gaps[stage].merge(Histogram.from_bytes(file.read_bytes()))
        else:
            timeline[stage] = _sum(timeline[stage], np.frombuffer(_whole(file.read_bytes(), 8), "<i8"))
    return Stored(header, rows, gaps, timeline, _seconds(folder), texts)


def read_lightly(folder: Path) -> Stored:
    """The same; of millions of rows a `Frame`."""
    merged = folder / "requests" / MERGED
    return read_run(folder, lazily=merged.exists() and _many(merged))


def server(folder: Path) -> list[series.MetricSample]:
    """What the servers said of themselves, in order of time; empty where no page was read."""
    found: list[series.MetricSample] = []
    file = folder / series.FILE
    if file.is_file():
        decoder = msgspec.json.Decoder(series.MetricSample)
        with file.open("rb") as lines, contextlib.suppress(msgspec.MsgspecError):  # a last line that was cut off
            found.extend(map(decoder.decode, lines))
    return found


def server_table(folder: Path) -> Any:
    """The same as a pyarrow table."""
    import pyarrow as pa

    found = server(folder)
    kinds = {"t_s": pa.float64(), "target": pa.int32(), "page": pa.string(), "name": pa.string()}
    kinds |= {"labels": pa.string(), "value": pa.float64()}
    return pa.table({name: pa.array([getattr(one, name) for one in found], kind) for name, kind in kinds.items()})


def heat(folder: Path) -> NDArray[np.void]:
    """Lines of HEAT of all workers, in order of time; none for a run of before they were kept."""
    parts = [
        np.frombuffer(_whole(file.read_bytes(), HEAT.itemsize), HEAT) for file in (folder / "flows").glob("w*.heat")
    ]
    lines = np.concatenate([np.zeros(0, HEAT), *parts])
    return lines[np.argsort(lines["until_ns"], kind="stable")]


def _whole(data: bytes, size: int) -> bytes:
    """Without the half line that a killed worker may leave."""
    return data[: len(data) // size * size]


def _sum(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    total = longer.astype(np.int64)
    total[: len(shorter)] += shorter
    return total


def _seconds(folder: Path) -> list[manifest.Second]:
    found: list[manifest.Second] = []
    for file in [*sorted(folder.glob("spool/w*.seconds")), *sorted(folder.glob("seconds.jsonl"))]:
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(msgspec.MsgspecError):  # the last line of a worker that was killed
                found.append(msgspec.json.decode(line, type=manifest.Second))
        if file.name == "seconds.jsonl":
            break
    return found


def _rows(folder: Path) -> tuple[NDArray[np.void], list[str]]:
    spooled = [] if (folder / "requests" / MERGED).exists() else segments(folder)
    files = sorted((folder / "requests").glob("*.parquet"))
    if not spooled:
        return from_parquet(files) if files else (np.zeros(0, ROW), [])
    parts: list[NDArray[np.void]] = []
    texts: list[str] = []

    def take(part: NDArray[np.void], words: list[str]) -> None:
        if texts and len(part):
            part["text"][part["text"] >= 0] += len(texts)
        parts.append(part)

    for worker in dict.fromkeys(segment.worker for segment in spooled):
        own = [segment for segment in spooled if segment.worker == worker]
        rows = np.concatenate([_whole_rows(segment.path) for segment in own])
        words = worker_texts(folder, worker)
        take(rows, words)
        texts += words
        reached = 0
        for file in sorted((folder / "requests").glob(f"w{worker}-*.parquet")):  # rows of segments that are gone
            first = int(file.stem.partition("-")[2])
            if reached <= first < own[0].first:
                rows, words = from_parquet([file])
                take(rows[: own[0].first - first], words)
                texts += words
                reached = first + len(rows)
    return (np.concatenate(parts) if len(parts) > 1 else parts[0]), texts


def _whole_rows(file: Path) -> NDArray[np.void]:
    data = np.fromfile(file, np.uint8)
    return data[: len(data) // ROW.itemsize * ROW.itemsize].view(ROW)


def worker_texts(folder: Path, worker: int) -> list[str]:
    """The error texts of a worker, by number."""
    texts: list[str] = []
    for line in (folder / "spool" / f"w{worker}.texts").read_bytes().splitlines():
        try:
            texts.append(msgspec.json.decode(line, type=str))
        except msgspec.MsgspecError:
            texts.append("")
    return texts


def has_rows(folder: Path) -> bool:
    """Whether the rows of this run are here; else its `summary.json` is all there is, or its ledger."""
    if (folder / "flows" / LEDGER).exists():
        return False
    return any((folder / "requests").glob("*.parquet")) or any(folder.glob("spool/*.rows"))


def _many(merged: Path) -> bool:
    return len(Frame([merged])) > LAZY_ROWS


# -- Parquet -----------------------------------------------------------------------------------------------------


def to_table(rows: NDArray[np.void], texts: list[str]) -> Any:
    """Rows as a pyarrow Table: the columns of FIELDS, codes as words, instants that never came as null."""
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
    """The inverse of `to_table`, over several files; `only` these columns, the others being unknown."""
    frame = Frame(files, only)
    rows = np.zeros(len(frame), ROW)
    for name in ROW.names or ():
        rows[name] = frame[name]
    return rows, frame.texts


class Frame:
    """Rows in Parquet files, read a column at a time: `frame["due_ns"]` is what an array of rows would give, and
    nothing is kept. A fraction of the memory of the rows, for runs of millions."""

    def __init__(self, files: list[Path], only: Sequence[str] | None = None) -> None:
        import pyarrow.parquet as pq

        self._paths = files
        with self._readable(0):
            self._files = [pq.ParquetFile(file) for file in files]
        self._length: int = sum(file.metadata.num_rows for file in self._files)
        self._names = set(self._files[0].schema_arrow.names if only is None else only)
        self._texts: list[str] | None = None if "text" in self._names else []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: str) -> NDArray[Any]:
        values = np.empty(self._length, ROW[name])
        if name not in self._names:
            values[:] = -1 if ROW[name].kind == "i" else 0
            return values
        texts: dict[str, int] = {}
        at = 0
        for i, file in enumerate(self._files):
            for group in range(file.num_row_groups):
                with self._readable(i):
                    column = file.read_row_group(group, columns=[name]).column(0).combine_chunks()
                values[at : at + len(column)] = _numbers(name, column, texts)
                at += len(column)
        if name == "text":
            self._texts = list(texts)
        return values

    @contextlib.contextmanager
    def _readable(self, first: int) -> Iterator[None]:
        """Raises UserError for a file that is damaged."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError) as error:
            where = self._paths[first] if len(self._paths) == 1 or first else self._paths[0].parent
            said = str(error).partition(".")[0]
            hint = "copy the run's folder again; summary.json, if it is there, still holds its figures"
            raise UserError(f"records that cannot be read: {said}", str(where), hint) from None

    @property
    def texts(self) -> list[str]:
        """The error texts that the column `text` points at."""
        if self._texts is None:
            self["text"]
        assert self._texts is not None
        return self._texts


def _numbers(name: str, column: Any, texts: dict[str, int]) -> NDArray[Any]:
    """A column of Parquet as it is in a row: codes for words, -1 for what never came."""
    import pyarrow as pa

    numbers: NDArray[Any]
    if name == "text" or name in NAMES:
        if not isinstance(column, pa.DictionaryArray):
            column = column.dictionary_encode()
        known = {word: i for i, word in enumerate(NAMES.get(name, ()))}
        words = column.dictionary.to_pylist()
        codes = [texts.setdefault(word, len(texts)) if name == "text" else known.get(word, 0) for word in words]
        places = column.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
        numbers = np.array([*codes, -1 if name == "text" else 0], np.int64)[places]
    elif name in _BOOLEANS:
        numbers = column.to_numpy(zero_copy_only=False)
    else:
        numbers = (column.fill_null(-1) if column.null_count else column).to_numpy(zero_copy_only=False)
    return numbers


def drop_spool(folder: Path) -> None:
    """After a clean end: the samples are kept in one file, the rest of the spool is in Parquet."""
    seconds = sorted(_seconds(folder), key=lambda second: (second.t_s, second.worker))
    replace(folder / "seconds.jsonl", b"".join(msgspec.json.encode(second) + b"\n" for second in seconds))
    for file in (folder / "spool").iterdir():
        file.unlink()
    (folder / "spool").rmdir()
