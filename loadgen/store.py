"""The files of a run: append, read, merge, recover. IO; what the files mean is `record.py` and `header.py`.

    run.json                      header
    requests/*.parquet            rows; small complete files while the run goes, one `requests.parquet` after it
    spool/w0.rows                 binary rows (record.ROW) as the worker appends them: the source while the run goes
    spool/w0.texts                error texts, a JSON string per line; a row's `text` is the line's number
    spool/w0.seconds              a JSON line per second (header.Second)
    flows/w0.gaps.S, w0.timeline.S      histogram of gaps and events per 10 ms of stage S
    flows/w0.heat                 gaps of all stages by length, counted about every 2 s: lines of HEAT
    summary.json

A worker only ever appends and renames, so that whatever was written is readable after `kill -9`. The Parquet files are
made by a process of their own (`python -m loadgen.store FOLDER`): converting rows holds the interpreter for tens of ms.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen import header as heads
from loadgen.errors import UserError
from loadgen.metrics import BIN_NS
from loadgen.quantiles import Histogram, bucket
from loadgen.record import FIELDS, FINISH_REASONS, KINDS, ROW, SOURCES, STATUSES

PART_SECONDS = 1.5  # a Parquet file at most this often per worker
MERGE_ROWS = 1_000_000  # rows per row group of the merged file
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

    header: heads.Header
    rows: NDArray[np.void]
    gaps: list[Histogram]
    timeline: list[NDArray[np.int64]]
    seconds: list[heads.Second]
    texts: list[str]


class Spool:
    """One worker's files. Collects in memory; `flush` writes what is new, in one call each."""

    def __init__(self, folder: Path, worker: int) -> None:
        (folder / "spool").mkdir(parents=True, exist_ok=True)
        (folder / "flows").mkdir(exist_ok=True)
        self._folder, self._worker = folder, worker
        self._rows = self._append("rows")
        self._texts = self._append("texts")
        self._seconds = self._append("seconds")
        self._new_rows: list[bytes] = []
        self._new_texts: list[str] = []
        self._new_seconds: list[heads.Second] = []
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
        """The number of an error text; equal texts share one, while there are not too many different ones."""
        number = self._text_numbers.get(text)
        if number is None:
            number = self._texts_written
            self._texts_written += 1
            self._new_texts.append(text)
            if len(self._text_numbers) < 10_000:
                self._text_numbers[text] = number
        return number

    def second(self, second: heads.Second) -> None:
        self._new_seconds.append(second)

    def flush(self) -> None:
        """Texts first: a row never points at a text that is not there."""
        if self._new_texts:
            _write(self._texts, b"".join(msgspec.json.encode(text) + b"\n" for text in self._new_texts))
            self._new_texts.clear()
        if self._new_rows:
            _write(self._rows, b"".join(self._new_rows))
            self._new_rows.clear()
        if self._new_seconds:
            _write(self._seconds, b"".join(msgspec.json.encode(second) + b"\n" for second in self._new_seconds))
            self._new_seconds.clear()

    def flows(self, stage: int, gaps: Histogram, timeline: NDArray[np.int64]) -> None:
        """Replace the stored histogram and timeline of a stage."""
        stem = self._folder / "flows" / f"w{self._worker}"
        replace(Path(f"{stem}.gaps.{stage}"), gaps.to_bytes())
        replace(Path(f"{stem}.timeline.{stage}"), timeline.astype("<i8").tobytes())
        counts = np.add.reduceat(gaps.counts, _HEAT_STARTS)
        new = counts - self._heat.get(stage, 0)
        self._heat[stage] = counts
        if new.any():
            line = np.array((len(timeline) * BIN_NS, new), HEAT)
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


# -- reading back ------------------------------------------------------------------------------------------------


def read(folder: Path) -> Stored:
    """A run as far as it got. Raises UserError for a folder that is no run, or one of a newer schema."""
    path = folder / "run.json"
    if not path.is_file():
        hint = "give the folder that `loadgen run` named in its first lines"
        raise UserError(f"{folder} is not the folder of a run: it has no run.json", str(folder), hint)
    header = heads.decode(path.read_bytes(), str(path))
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
            timeline[stage] = _sum(timeline[stage], np.frombuffer(file.read_bytes(), "<i8"))
    return Stored(header, rows, gaps, timeline, _seconds(folder), texts)


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


def _seconds(folder: Path) -> list[heads.Second]:
    found: list[heads.Second] = []
    for file in [*sorted(folder.glob("spool/w*.seconds")), *sorted(folder.glob("seconds.jsonl"))]:
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(msgspec.MsgspecError):  # the last line of a worker that was killed
                found.append(msgspec.json.decode(line, type=heads.Second))
        if file.name == "seconds.jsonl":
            break
    return found


def _rows(folder: Path) -> tuple[NDArray[np.void], list[str]]:
    spooled = sorted(folder.glob("spool/w*.rows"))
    if spooled:
        parts: list[NDArray[np.void]] = []
        texts: list[str] = []
        for file in spooled:
            part = _whole_rows(file)
            words = _texts(file.with_suffix(".texts"))
            if texts and len(part):
                part["text"][part["text"] >= 0] += len(texts)
            texts += words
            parts.append(part)
        return (np.concatenate(parts) if len(parts) > 1 else parts[0]), texts
    files = sorted((folder / "requests").glob("*.parquet"))
    if not files:
        return np.zeros(0, ROW), []
    return from_parquet(files)


def _whole_rows(file: Path) -> NDArray[np.void]:
    data = np.fromfile(file, np.uint8)
    return data[: len(data) // ROW.itemsize * ROW.itemsize].view(ROW)


def _texts(file: Path) -> list[str]:
    texts: list[str] = []
    for line in file.read_bytes().splitlines():
        try:
            texts.append(msgspec.json.decode(line, type=str))
        except msgspec.MsgspecError:
            texts.append("")
    return texts


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


def from_parquet(files: list[Path]) -> tuple[NDArray[np.void], list[str]]:
    """The inverse of `to_table`, over several files."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pa.concat_tables([pq.read_table(file) for file in files])
    rows = np.zeros(len(table), ROW)
    texts: dict[str, int] = {}
    for name, code, _ in FIELDS:
        if name not in table.column_names:
            rows[name] = -1 if code[0] == "i" else 0
            continue
        column = table.column(name)
        if name == "text":
            rows[name] = [-1 if word is None else texts.setdefault(word, len(texts)) for word in column.to_pylist()]
        elif name in NAMES:
            numbers = {word: i for i, word in enumerate(NAMES[name])}
            for word in column.unique().to_pylist():
                rows[name][pc.equal(column, word).to_numpy()] = numbers.get(word, 0)
        elif name in _BOOLEANS:
            rows[name] = column.to_numpy()
        else:
            rows[name] = (column.fill_null(-1) if column.null_count else column).to_numpy()
    return rows, list(texts)


class Recorder:
    """The process that turns rows into Parquet while a run goes. `finish` waits until the merged file is there."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadgen.store", str(folder)], stdin=subprocess.PIPE, start_new_session=True
        )

    def finish(self) -> bool:
        """True when every row is in Parquet; the caller may then drop the spool."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait() == 0


def drop_spool(folder: Path) -> None:
    """After a clean end: the samples are kept in one file, the rest of the spool is in Parquet."""
    seconds = sorted(_seconds(folder), key=lambda second: (second.t_s, second.worker))
    replace(folder / "seconds.jsonl", b"".join(msgspec.json.encode(second) + b"\n" for second in seconds))
    for file in (folder / "spool").iterdir():
        file.unlink()
    (folder / "spool").rmdir()


def _record(folder: Path) -> None:
    """Until stdin ends: every PART_SECONDS what came since, as one small file per worker; then merge them all."""
    import select

    os.nice(5)  # behind the load, but not behind every neighbour when the run waits for the merged file
    done: dict[Path, int] = {}
    parts: list[Path] = []
    (folder / "requests").mkdir(exist_ok=True)
    while True:
        ended = bool(select.select([sys.stdin], [], [], PART_SECONDS)[0])
        for file in sorted(folder.glob("spool/w*.rows")):
            parts += _part(folder, file, done)
        if ended:
            break
    _merge(folder, parts)


def _part(folder: Path, file: Path, done: dict[Path, int]) -> list[Path]:
    import pyarrow.parquet as pq

    start = done.get(file, 0)
    count = file.stat().st_size // ROW.itemsize - start
    if count <= 0:
        return []
    rows = np.fromfile(file, ROW, count, offset=start * ROW.itemsize)
    done[file] = start + count
    path = folder / "requests" / f"{file.stem}-{start:012d}.parquet"
    scratch = path.with_suffix(".new")
    pq.write_table(to_table(rows, _texts(file.with_suffix(".texts"))), scratch, compression="zstd")
    scratch.replace(path)
    return [path]


def _merge(folder: Path, parts: list[Path]) -> None:
    """One file of all parts, in row groups, without holding them all in memory."""
    if not parts:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    scratch = folder / "requests" / "requests.new"
    writer = None
    held: list[Any] = []
    for part in [*parts, None]:
        if part is not None:
            held.append(pq.read_table(part))
        if held and (part is None or sum(map(len, held)) >= MERGE_ROWS):
            table = pa.concat_tables(held).unify_dictionaries().combine_chunks()
            held.clear()
            writer = writer or pq.ParquetWriter(scratch, table.schema, compression="zstd")
            writer.write_table(table)
    assert writer is not None
    writer.close()
    scratch.replace(folder / "requests" / "requests.parquet")
    for part in parts:
        part.unlink()


if __name__ == "__main__":
    _record(Path(sys.argv[1]))
