"""Traces of real traffic as columns: arrival times, lengths and shared prefixes of requests.

The whole file is checked and indexed in one pass; faults name file:line. Only numbers of a trace are kept, 16 bytes for
each request without hashes. This module draws no random numbers and makes no text; `requests.trace_prompts` does that.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core import format
from loadgen.core.errors import CombinedError, LoadgenError, UserError, enough, of_reading
from loadgen.core.units import LONGEST_NS, TimeUnit, Wrong
from loadgen.core.workload import trace_files, trace_formats
from loadgen.core.workload.request_kinds import FromTrace
from loadgen.core.workload.stages import Replay
from loadgen.core.workload.trace_formats import TraceColumns, TraceFormat, TraceRow
from loadgen.core.workload.trace_units import TRIAL_UNIT, UNIT_NAMES, decide_unit

MOST_ROWS = 20_000_000
BLOCKS = (
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
)  # possible tokens per hash, for formats that do not define it
LOOKED_AT = 2_000  # rows used to infer the tokens per hash
TOGETHER = 4_096  # lines read at a time

Ints = NDArray[np.int64]
_COLUMNS = (
    "input_tokens",
    "output_tokens",
    "session",
    "group",
    "took_ns",
    "pause_ns",
    "label",
    "asked",
)
Slice = tuple[int, int | None]  # ns from the first arrival; None: to the end


class Trace(Struct, frozen=True, kw_only=True, eq=False):
    """One trace, in order of arrival. `blocks(i)` are the hashes of the prompt of request i, in order of the text.

    Two prompts with an equal hash share all text from the beginning to the end of that block.
    """

    path: Path
    format: str
    due_ns: Ints  # from the first arrival
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    session: Ints  # number of the conversation, -1 if the trace does not name one
    hashes: Ints
    starts: Ints  # index into `hashes` where each request begins; one extra entry at the end
    tokens_of: dict[int, int]  # tokens that each hash covers
    group: Ints  # number of the session that it belongs to with its sub-agents, -1 if none
    took_ns: Ints  # from the request to the end of its answer; -1 if not told, as is the next
    pause_ns: Ints  # from the end of the answer before in its session
    label: Ints  # number of the kind of request in `labels`, -1 if the trace does not name one
    asked: (
        Ints  # number of the further fields of its body in `fields`, -1 if the trace asks for none
    )
    labels: tuple[str, ...] = ()
    fields: tuple[dict[str, Any], ...] = ()
    untimed: int = 0  # rows that only say what they wait for
    skipped: int = 0  # rows without output tokens, which are left out
    time_unit: str = (
        ""  # of times whose unit the format leaves open: what they were read as, and why
    )
    bad_rows: int = 0  # rows left out because something is wrong with them
    first_bad: str = ""  # what is wrong with the first of them, and where

    def __len__(self) -> int:
        return len(self.due_ns)

    def blocks(self, index: int) -> Sequence[int]:
        found: list[int] = self.hashes[
            int(self.starts[index]) : int(self.starts[index + 1])
        ].tolist()
        return found

    def reused_share(self, first: int | None = None) -> float | None:
        """Share of the prompt tokens of the first requests (None: of all) that earlier ones of them have, by hashes.

        That is what a prefix cache without end would know. None without hashes.
        """
        last = len(self) if first is None else min(first, len(self))
        known, counts = np.unique(
            self.hashes[int(self.starts[0]) : int(self.starts[last])], return_counts=True
        )
        if not len(known):
            return None
        tokens = np.array([self.tokens_of[number] for number in known.tolist()])
        return min(
            1.0,
            float((tokens * (counts - 1)).sum())
            / float(self.input_tokens[:last].sum(dtype=np.int64)),
        )

    @property
    def end_ns(self) -> int:
        """End of the trace in ns: one mean gap after the last arrival; 0 for an empty trace."""
        n = len(self)
        return int(self.due_ns[-1]) + (int(self.due_ns[-1]) // (n - 1) if n > 1 else 0) if n else 0

    @property
    def rate(self) -> float:
        """Mean requests per second of the whole trace; infinite if all requests arrive at once."""
        return len(self) * 1e9 / self.end_ns if self.end_ns else math.inf

    def select(self, order: Ints) -> Trace:
        """Some of the requests, by their numbers, at their instants."""
        hashes, starts = _reordered(self.hashes, self.starts, order)
        columns = {name: getattr(self, name)[order] for name in ("due_ns", *_COLUMNS)}
        return replace(self, hashes=hashes, starts=starts, **columns)

    def within(self, begin_ns: int, end_ns: int | None) -> Trace:
        """The requests that came in this time, counted from the first arrival. Raises UserError if there are none."""
        first = int(np.searchsorted(self.due_ns, begin_ns))
        last = len(self) if end_ns is None else int(np.searchsorted(self.due_ns, end_ns))
        if first >= last:
            problem = f"no requests in this part of the trace, which is {self.due_ns[-1] / 1e9:,.1f} s long"
            raise UserError(
                "empty_file",
                problem,
                str(self.path),
                "trace_slice 10m..20m is counted from its first request",
            )
        columns = {name: getattr(self, name)[first:last] for name in _COLUMNS}
        due_ns, starts = self.due_ns[first:last] - self.due_ns[first], self.starts[first : last + 1]
        return replace(self, due_ns=due_ns, starts=starts, **columns)


def read_trace(
    path: str | Path,
    *,
    part: Slice | None = None,
    skip_bad: bool = False,
    unit: TimeUnit | None = None,
) -> Trace:
    """Read a trace file, or a part of it.

    Args:
        path: The file.
        part: The time that the part came in; None for the whole trace.
        skip_bad: Leave out rows with mistakes, and count them.
        unit: The unit of the times, for formats that leave it open; None to decide it.

    Raises:
        Faults: Rows have mistakes; these are the first FAULTS_SHOWN of them.
        UserError: The file as a whole cannot be read, or its format defines another unit.
    """
    path = Path(path)
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(
            of_reading(error), f"cannot read the trace: {error.strerror}", str(path)
        ) from None
    trace = _read_cached(path, state.st_size, state.st_mtime_ns, skip_bad, unit)
    return trace if part is None else trace.within(*part)


def read_replayed_trace(by: FromTrace | Replay) -> Trace:
    """The trace that requests or arrivals replay."""
    path = by.trace if isinstance(by, FromTrace) else by.file
    trace = read_trace(path, skip_bad=by.on_bad_row == "skip", unit=by.unit)
    return _part(trace, by.slice_ns)


@functools.lru_cache(maxsize=4)
def _part(trace: Trace, part: Slice | None) -> Trace:
    return trace if part is None else trace.within(*part)


@functools.lru_cache(maxsize=4)
def _read_cached(
    path: Path, size: int, changed_ns: int, skip_bad: bool, unit: TimeUnit | None
) -> Trace:
    """Read a file whose size and time of change are these."""
    index, opened = _read_file(path, skip_bad, unit or TRIAL_UNIT)
    trace = index.trace(opened.name)
    if not opened.has_open_unit:
        if unit is not None:
            problem = f"the format {opened.name} defines the unit of its times"
            raise UserError("no_effect", problem, f"trace_unit {unit}", "leave trace_unit out")
        return trace
    if unit is not None:
        return replace(trace, time_unit=f"{UNIT_NAMES[unit]}, as specified")
    decision = decide_unit(index.times_ns(), opened.default_unit)
    if decision.unit != TRIAL_UNIT:
        index, _ = _read_file(path, skip_bad, decision.unit)
        trace = index.trace(opened.name)
    return replace(trace, time_unit=f"{UNIT_NAMES[decision.unit]}, because {decision.reason}")


class _OpenedFormat(NamedTuple):
    """The format of a file, whether it leaves the unit of its times open, and its default unit."""

    name: str
    has_open_unit: bool
    default_unit: TimeUnit | None = None


def _read_file(path: Path, skip_bad: bool, unit: TimeUnit) -> tuple[_Index, _OpenedFormat]:
    """Read all rows of a file. `unit` is that of times whose unit the format leaves open."""
    if trace_files.is_parquet(path):
        from loadgen.core.workload import trace_columns

        index = _Index(path, skip_bad, in_order=True)
        table = trace_columns.read_parquet_trace(path, index.add_checked, unit)
        return index, _OpenedFormat(table.name, table.has_open_unit)
    with trace_files.open_lines(path) as lines:
        return _read_lines(path, _limited(trace_files.split_documents(lines)), skip_bad, unit)


def _read_lines(
    path: Path, lines: Iterator[tuple[int, str]], skip_bad: bool, unit: TimeUnit
) -> tuple[_Index, _OpenedFormat]:
    first = next(lines, None)
    if first is None:
        raise UserError(
            "empty_file", "no requests in the trace", str(path), trace_formats.known_formats()
        )
    line = first[1]
    is_json = line.lstrip().startswith("{")
    try:
        found = (
            trace_formats.find_json_format(trace_formats.json_object(line))
            if is_json
            else trace_formats.find_csv_format(line)
        )
    except Wrong as wrong:
        raise UserError(wrong.code, str(wrong), f"{path}:1", wrong.hint) from None
    if found is None:
        raise UserError(
            "wrong_format",
            "not a trace that is known here",
            f"{path}:1",
            trace_formats.hint_for(line),
        )
    opened = _OpenedFormat(found.name, found.in_unit is not None, found.default_unit)
    if found.in_unit is not None:
        found = found.in_unit(unit)
    index = _Index(path, skip_bad, in_order=found.in_order)
    _add_rows(index, found, itertools.chain([first], lines) if is_json else lines)
    return index, opened


def _limited(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for number, line in lines:
        if number > MOST_ROWS:
            raise UserError(
                "too_large", f"more than {MOST_ROWS:,} lines", "the trace", "cut it into parts"
            )
        yield number, line


def _add_rows(index: _Index, found: TraceFormat, lines: Iterator[tuple[int, str]]) -> None:
    while numbered := list(itertools.islice(lines, TOGETHER)):
        columns = found.together([line for _, line in numbered]) if found.together else None
        if columns is not None and index.follows(columns.at_ns):
            index.add_columns(columns)
            continue
        for number, line in numbered:
            try:
                for row in found.rows(line):
                    index.add(row)
            except Wrong as wrong:
                if index.is_enough(wrong, f"{index.path}:{number}"):
                    return


class _Told:
    """A column that few traces have: it takes no memory until a row fills it."""

    def __init__(self, unknown: int, typecode: str = "q") -> None:
        self._unknown, self._typecode = unknown, typecode
        self._values: array[Any] | None = None

    def add(self, value: Any, rows: int) -> None:
        """Add the value of one row, after so many others."""
        if self._values is None:
            if value == self._unknown:
                return
            self._values = array(self._typecode, [self._unknown]) * rows
        self._values.append(value)

    def skip(self, rows: int) -> None:
        """Add rows of which nothing is told."""
        if self._values is not None:
            self._values.extend([self._unknown] * rows)

    def of(self, rows: int) -> NDArray[Any]:
        """The column of all rows."""
        return (
            np.broadcast_to(np.int64(self._unknown), rows)
            if self._values is None
            else _view(self._values)
        )


class _Index:
    """The columns of a trace while it is read."""

    def __init__(self, path: Path, skip_bad: bool, *, in_order: bool) -> None:
        self.path, self._skip_bad, self._in_order = path, skip_bad, in_order
        self._at, self._read, self._write = array("q"), array("i"), array("i")
        self._session, self._group, self._took, self._pause, self._label, self._asked = (
            _Told(-1) for _ in range(6)
        )
        self._block = _Told(0, "d")
        self._told = (
            self._session,
            self._group,
            self._block,
            self._took,
            self._pause,
            self._label,
            self._asked,
        )
        self._sessions: dict[str, int] = {}
        self._labels: dict[str, int] = {}
        self._fields: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._starts: array[int] | None = None
        self._hashes = array("q")
        self._first_ns: int | None = None
        self._latest_ns = 0
        self._skipped = self._bad = self._untimed = 0
        self._faults: list[LoadgenError] = []

    def add(self, row: TraceRow) -> None:
        """Add a row that was checked by itself. Raises Wrong where its time does not fit those before it."""
        (
            at_ns,
            input_tokens,
            output_tokens,
            hashes,
            block,
            session,
            group,
            took_ns,
            pause_ns,
            label,
            fields,
            timed,
        ) = row
        group = group or session
        if self._first_ns is None:
            self._first_ns = self._latest_ns = at_ns
        if at_ns < self._latest_ns and self._in_order:
            problem = f"the time goes back by {(self._latest_ns - at_ns) / 1e9:,.6g} s"
            raise Wrong(
                "unordered",
                problem,
                "sort the rows by time, or leave such rows out: on_bad_row skip",
            )
        if abs(at_ns - self._first_ns) > LONGEST_NS:
            problem = f"the time is {abs(at_ns - self._first_ns) / 86_400e9:,.0f} days from that of the first row"
            raise Wrong(
                "out_of_range",
                problem,
                "a trace lasts at most a year; trace_unit states the unit: s, ms, us or ns",
            )
        self._latest_ns = at_ns
        if output_tokens < 1:  # BurstGPT marks failures this way; there is no output to request
            self._skipped += 1
            return
        before = len(self._at)
        self._untimed += not timed
        self._at.append(at_ns)
        self._read.append(input_tokens)
        self._write.append(output_tokens)
        self._session.add(self._number(session), before)
        self._group.add(self._groups.setdefault(group, len(self._groups)) if group else -1, before)
        self._block.add(block, before)
        self._took.add(took_ns, before)
        self._pause.add(pause_ns, before)
        self._label.add(self._labels.setdefault(label, len(self._labels)) if label else -1, before)
        self._asked.add(
            self._fields.setdefault(fields, len(self._fields)) if fields else -1, before
        )
        if hashes and self._starts is None:
            self._starts = array("q", [0]) * (before + 1)
        if self._starts is not None:
            self._hashes.extend(hashes)
            self._starts.append(len(self._hashes))

    def _number(self, session: str) -> int:
        """Of a session by its name, -1 without one."""
        return self._sessions.setdefault(session, len(self._sessions)) if session else -1

    def follows(self, at_ns: Ints) -> bool:
        """Whether these times go on from those so far, so that `add_columns` may take them."""
        first_ns = int(at_ns[0]) if self._first_ns is None else self._first_ns
        ascend = bool(
            (np.diff(at_ns, prepend=self._latest_ns if self._at else at_ns[0]) >= 0).all()
        )
        return ascend and int(at_ns[-1]) - first_ns <= LONGEST_NS

    def add_columns(self, columns: TraceColumns) -> None:
        """Add rows that were checked, and that follow those so far."""
        at_ns, read, write, hashes, hash_counts, sessions, took_ns = columns
        if not len(at_ns):
            return
        answered = write > 0
        if not answered.all():
            counts = np.array(hash_counts, np.int64) if hashes else np.zeros(len(at_ns), np.int64)
            hashes = (
                np.array(hashes, np.int64)[np.repeat(answered, counts)].tolist() if hashes else ()
            )
            hash_counts = counts[answered].tolist() if hashes else ()
        before = len(self._at)
        self._first_ns = int(at_ns[0]) if self._first_ns is None else self._first_ns
        self._latest_ns = int(at_ns[-1])
        self._skipped += int((~answered).sum())
        for column, values in ((self._at, at_ns), (self._read, read), (self._write, write)):
            column.frombytes(values[answered].astype(np.dtype(column.typecode)).tobytes())
        added = len(self._at) - before
        named = {
            column: [value for value, kept in zip(values, answered.tolist(), strict=True) if kept]
            for column, values in (
                (self._session, [self._number(name) for name in sessions]),
                (self._took, took_ns),
            )
            if len(values)
        }
        if self._session in named:
            named[self._group] = named[self._session]
        for told in self._told:
            if told not in named:
                told.skip(added)
            for place, value in enumerate(named.get(told, ())):
                told.add(value, before + place)
        if hashes and self._starts is None:
            self._starts = array("q", [0]) * (before + 1)
        if self._starts is not None:
            ends = np.cumsum(hash_counts) if hashes else np.zeros(added, np.int64)
            self._starts.frombytes((len(self._hashes) + ends).astype(np.int64).tobytes())
            self._hashes.extend(hashes)

    def add_checked(
        self, columns: TraceColumns, bad: int, faults: Sequence[tuple[int, Wrong]]
    ) -> bool:
        """Add rows of a table. `faults`: of the first of the `bad` rows, by row number. Returns whether to go on."""
        for number, wrong in faults:
            if self.is_enough(wrong, f"{self.path}, row {number:,}"):
                return False
        self._bad += bad - len(faults)
        self.add_columns(columns)
        return True

    def is_enough(self, wrong: Wrong, where: str) -> bool:
        """Note a row with a fault. Returns whether to read no further."""
        self._bad += 1
        if not self._skip_bad or not self._faults:
            self._faults.append(UserError(wrong.code, str(wrong), where, wrong.hint, key=wrong.key))
        return not self._skip_bad and enough(self._faults, str(self.path))

    def times_ns(self) -> Ints:
        """Return the times of the rows so far, in the order of the file."""
        return _view(self._at)

    def trace(self, name: str) -> Trace:
        """All rows, in order of arrival. Raises Faults, or UserError if there are none."""
        if self._faults and not self._skip_bad:
            raise CombinedError(self._faults)
        if not self._at:
            reason = (
                f": {format.counted(self._skipped, 'row')} without an answer"
                if self._skipped
                else ""
            )
            reason = (
                f": {format.counted(self._bad, 'bad row')}, and no other"
                if self._bad and not self._skipped
                else reason
            )
            raise UserError(
                "empty_file",
                f"no requests in the trace{reason}",
                str(self.path),
                trace_formats.known_formats(),
            )
        n = len(self._at)
        at_ns, read, write = (_view(column) for column in (self._at, self._read, self._write))
        session, group, block, took, pause, label, asked = (told.of(n) for told in self._told)
        starts = (
            np.broadcast_to(np.int64(0), n + 1) if self._starts is None else _view(self._starts)
        )
        hashes = _view(self._hashes)
        if (at_ns[1:] < at_ns[:-1]).any():
            order = np.argsort(at_ns, kind="stable")
            columns = (at_ns, read, write, session, block, group, took, pause, label, asked)
            at_ns, read, write, session, block, group, took, pause, label, asked = (
                one[order] for one in columns
            )
            hashes, starts = _reordered(hashes, starts, order)
        at_ns = at_ns - at_ns[0]
        return Trace(
            path=self.path,
            format=name,
            due_ns=at_ns,
            input_tokens=read,
            output_tokens=write,
            session=session,
            group=group,
            took_ns=took,
            pause_ns=pause,
            label=label,
            labels=tuple(self._labels),
            asked=asked,
            fields=tuple(map(json.loads, self._fields)),
            hashes=hashes,
            starts=starts,
            tokens_of=_tokens_of(hashes, starts, read, block),
            untimed=self._untimed,
            skipped=self._skipped,
            bad_rows=self._bad,
            first_bad=f"{self._faults[0].where}: {self._faults[0].what}" if self._faults else "",
        )


def _view(column: array[Any]) -> NDArray[Any]:
    return np.frombuffer(column, column.typecode) if column else np.zeros(0, np.int64)


def _reordered(hashes: Ints, starts: Ints, order: Ints) -> tuple[Ints, Ints]:
    """Hashes and their starts for the rows in another order."""
    counts = np.diff(starts)[order]
    ends = np.cumsum(counts)
    from_start = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    return hashes[np.repeat(starts[:-1][order], counts) + from_start], np.concatenate(
        [np.zeros(1, np.int64), ends]
    )


def _tokens_of(
    hashes: Ints, starts: Ints, input_tokens: NDArray[np.int32], block: NDArray[Any]
) -> dict[int, int]:
    """Tokens that each hash covers, by the request that has it first: a block, or what is left of the prompt."""
    if not len(hashes):
        return {}
    known, first = np.unique(hashes, return_index=True)
    row = np.searchsorted(starts, first, side="right") - 1
    size = np.where(block[row] > 0, block[row], _infer_block_tokens(np.diff(starts), input_tokens))
    position = first - starts[row]
    begin, end = (
        np.minimum(input_tokens[row], np.rint(place * size)) for place in (position, position + 1)
    )
    covered = np.maximum(1, end - begin).astype(np.int64)
    return dict(zip(known.tolist(), covered.tolist(), strict=True))


def _infer_block_tokens(counts: Ints, input_tokens: NDArray[np.int32]) -> int:
    """Infer the tokens per hash: the size in BLOCKS for which most prompts have the expected number of hashes.

    If no size fits half of the prompts, the mean of tokens per hash.
    """
    (sample,) = np.nonzero(counts[:LOOKED_AT])
    if not len(sample):
        return BLOCKS[0]
    hashes, tokens = counts[sample], input_tokens[sample].astype(np.int64)
    fitting = [int((hashes == -(-tokens // size)).sum()) for size in BLOCKS]
    best = max(range(len(BLOCKS)), key=fitting.__getitem__)
    if fitting[best] * 2 >= len(sample):
        return BLOCKS[best]
    return max(1, round(float(tokens.sum() / hashes.sum())))
