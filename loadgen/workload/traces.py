"""Traces of real traffic: when requests came, how long they were, which beginnings they shared.

Readers of the formats in use, told apart by their fields, checked as a whole with file:line. Of a trace only numbers
are kept. Nothing here waits, draws, or makes a text: that is `replay`.
"""

from __future__ import annotations

import csv
import datetime
import functools
import hashlib
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.errors import Faults, UserError

FAULTS_SHOWN = 20
MOST_TOKENS = 10_000_000
MOST_ROWS = 20_000_000
BLOCKS = (16, 32, 64, 128, 256, 512, 1024)  # tokens of a hash, where a format leaves it open
LOOKED_AT = 2_000  # rows by which that is told
BAILIAN_BLOCK = 16
_ID_BITS = (1 << 48) - 1

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """One trace, in order of arrival. `blocks(i)` are the hashes of request i's prompt, in order; equal numbers stand
    for equal text from the beginning up to there."""

    path: Path
    sha256: str
    format: str
    due_ns: Ints  # from the first arrival
    input_tokens: Ints
    output_tokens: Ints
    session: Ints  # conversation, -1 where the trace says nothing of it
    turn: Ints
    hashes: array[int]
    starts: Ints  # of each request's hashes; one more at the end
    tokens_of: dict[int, int]  # tokens under each hash
    skipped: int  # rows without an answer

    def __len__(self) -> int:
        return len(self.due_ns)

    def blocks(self, index: int) -> Sequence[int]:
        return self.hashes[int(self.starts[index]) : int(self.starts[index + 1])]

    @property
    def end_ns(self) -> int:
        """Where the request after the last one would have come, at the mean gap."""
        n = len(self)
        return int(self.due_ns[-1]) + (int(self.due_ns[-1]) // (n - 1) if n > 1 else 0) if n else 0

    @property
    def rate(self) -> float:
        """Requests per second, over the whole of it."""
        return len(self) * 1e9 / self.end_ns if self.end_ns else math.inf


class TraceRow(NamedTuple):
    """One line, as its format's reader understands it; instants in ns of whatever clock."""

    at_ns: int
    input_tokens: int
    output_tokens: int
    hashes: Sequence[int] = ()
    block: float = 0.0  # tokens under one hash, 0: as inferred for the whole file
    session: str = ""
    turn: int = 0


class BadTraceLine(ValueError):
    """What is wrong with a line."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


def read_trace(path: str | Path) -> Trace:
    """The trace in a file. Raises Faults with the first FAULTS_SHOWN faults, or UserError for the file as a whole."""
    path = Path(path)
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"cannot read the trace: {error.strerror}", str(path)) from None
    return _read(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(path: Path, size: int, changed_ns: int) -> Trace:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with path.open(encoding="utf-8-sig", newline="") as text:
            return _parsed(path, text, digest)
    except OSError as error:
        raise UserError(f"cannot read the trace: {error.strerror}", str(path)) from None
    except UnicodeDecodeError:
        raise UserError("not a text file (UTF-8)", str(path), _KNOWN) from None


_KNOWN = (
    "known: shape traces of loadgen_sdk, Mooncake, vLLM timed and Bailian (JSONL), "
    "Azure LLM inference, BurstGPT and timestamp,input_length,output_length (CSV)"
)


def _parsed(path: Path, text: Any, digest: str) -> Trace:
    lines = _lines(text)
    first = next(lines, None)
    if first is None:
        raise UserError("no requests in the trace", str(path), _KNOWN)
    if first[1].lstrip().startswith("{"):
        name, parse = _json_format(first[1], path)
        rows = _each(path, _chained(first, lines), lambda line: parse(_object(line)))
    else:
        name, parse_row, columns = _csv_format(first[1], path)
        rows = _each(path, lines, lambda line: parse_row(_fields(line, columns)))
    found, skipped = [], 0
    for row in rows:
        if row.output_tokens < 1:  # a failure, as BurstGPT marks it: nothing to ask for
            skipped += 1
            continue
        found.append(row)
    if not found:
        why = f": none of its {skipped} rows has an answer" if skipped else ""
        raise UserError(f"no requests in the trace{why}", str(path), _KNOWN)
    found.sort(key=lambda row: row.at_ns)
    return _trace(path, digest, name, found, skipped)


def _trace(path: Path, digest: str, name: str, rows: list[TraceRow], skipped: int) -> Trace:
    block = _block_of(rows)
    hashes, starts, tokens_of = array("q"), [0], dict[int, int]()
    sessions: dict[str, int] = {}
    for row in rows:
        size = row.block or block
        before = 0
        for place, number in enumerate(row.hashes, 1):
            end = min(row.input_tokens, round(place * size))
            tokens_of.setdefault(number, max(1, end - before))
            before = end
        hashes.extend(row.hashes)
        starts.append(len(hashes))
        if row.session:
            sessions.setdefault(row.session, len(sessions))
    start = rows[0].at_ns
    column = functools.partial(np.array, dtype=np.int64)
    return Trace(
        path=path,
        sha256=digest,
        format=name,
        due_ns=column([row.at_ns - start for row in rows]),
        input_tokens=column([row.input_tokens for row in rows]),
        output_tokens=column([row.output_tokens for row in rows]),
        session=column([sessions.get(row.session, -1) for row in rows]),
        turn=column([row.turn for row in rows]),
        hashes=hashes,
        starts=column(starts),
        tokens_of=tokens_of,
        skipped=skipped,
    )


def _block_of(rows: Sequence[TraceRow]) -> int:
    """Tokens of one hash: the size by which most prompts have as many hashes as they should."""
    hashed = [row for row in rows[:LOOKED_AT] if row.hashes and not row.block]
    if not hashed:
        return BLOCKS[0]

    def fitting(size: int) -> int:
        return sum(len(row.hashes) == -(-row.input_tokens // size) for row in hashed)

    best = max(BLOCKS, key=fitting)
    if fitting(best) * 2 >= len(hashed):
        return best
    return max(1, round(sum(row.input_tokens for row in hashed) / sum(len(row.hashes) for row in hashed)))


# ------------------------------------------------------------------------------------------------------------ formats


def _json_format(line: str, path: Path) -> tuple[str, Callable[[dict[str, Any]], TraceRow]]:
    try:
        first = _object(line)
    except BadTraceLine as wrong:
        raise UserError(str(wrong), f"{path}:1", wrong.hint) from None
    if {"block_size", "input_source"} <= first.keys():
        return "shape trace", _shape
    if "chat_id" in first:
        chats: dict[str, tuple[str, int]] = {}
        return "Bailian", functools.partial(_bailian, chats)
    if {"timestamp", "input_length", "output_length"} <= first.keys():
        # Mooncake counts whole milliseconds, the seconds of others have a fraction.
        scale = 1e9 if isinstance(first["timestamp"], float) and not first["timestamp"].is_integer() else 1e6
        return "Mooncake", functools.partial(_mooncake, scale)
    if "messages" in first or "prompt" in first:
        hint = f"prompts of your own go into the workload: requests: {{from: {path.name}}}"
        raise UserError("these are prompts, not a trace", str(path), hint)
    raise UserError("not a trace that is known here", f"{path}:1", _KNOWN)


def _shape(row: dict[str, Any]) -> TraceRow:
    microseconds = (_instant(row, "timestamp", 1e6) + 500) // 1000  # what it was written with; floats hold no more
    return TraceRow(
        at_ns=microseconds * 1000,
        input_tokens=_count(row, "input_length", 1),
        output_tokens=_count(row, "output_length", 0),
        hashes=_hashes(row),
        block=float(row["block_size"]) if _is_number(row.get("block_size")) else 0.0,
        session=str(row.get("session_id") or ""),
        turn=_count(row, "turn", 0) if "turn" in row else 0,
    )


def _mooncake(scale: float, row: dict[str, Any]) -> TraceRow:
    return TraceRow(
        at_ns=_instant(row, "timestamp", scale),
        input_tokens=_count(row, "input_length", 1),
        output_tokens=_count(row, "output_length", 0),
        hashes=_hashes(row),
        session=str(row.get("session_id") or ""),
    )


def _bailian(chats: dict[str, tuple[str, int]], row: dict[str, Any]) -> TraceRow:
    """A turn names its parent; the conversation is called by its first turn."""
    own, parent = str(row.get("chat_id")), str(row.get("parent_chat_id"))
    session, turn = chats.get(parent, (own, -1))
    chats[own] = session, turn + 1
    return TraceRow(
        at_ns=_instant(row, "timestamp", 1e9),
        input_tokens=_count(row, "input_length", 1),
        output_tokens=_count(row, "output_length", 0),
        hashes=_hashes(row),
        block=float(BAILIAN_BLOCK),
        session=session,
        turn=turn + 1,
    )


def _csv_format(line: str, path: Path) -> tuple[str, Callable[[dict[str, str]], TraceRow], list[str]]:
    columns = [name.strip() for name in next(csv.reader([line]), [])]
    have = {name.lower() for name in columns}
    lower = [name.lower() for name in columns]
    for name, needed, at in (
        ("Azure LLM inference", ("timestamp", "contexttokens", "generatedtokens"), _date_ns),
        ("BurstGPT", ("timestamp", "request tokens", "response tokens"), _seconds_ns),
        ("timestamp,input_length,output_length", ("timestamp", "input_length", "output_length"), _seconds_ns),
    ):
        if set(needed) <= have:
            return name, functools.partial(_csv_row, needed, at), lower
    raise UserError("not a trace that is known here", f"{path}:1", _KNOWN)


def _csv_row(names: tuple[str, str, str], at: Callable[[str], int], row: dict[str, str]) -> TraceRow:
    when, read_tokens, written = (row[name] for name in names)
    return TraceRow(
        at_ns=at(when), input_tokens=_whole(read_tokens, names[1], 1), output_tokens=_whole(written, names[2], 0)
    )


# -------------------------------------------------------------------------------------------------------------- parts


def _lines(text: Any) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text, 1):
        if line.strip():
            if number > MOST_ROWS:
                raise UserError(f"more than {MOST_ROWS:,} lines", "the trace", "cut it into parts")
            yield number, line


def _chained(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _each(path: Path, lines: Iterator[tuple[int, str]], parse: Callable[[str], TraceRow]) -> Iterator[TraceRow]:
    faults = []
    for number, line in lines:
        try:
            row = parse(line)
        except BadTraceLine as wrong:
            faults.append(UserError(str(wrong), f"{path}:{number}", wrong.hint))
            if len(faults) == FAULTS_SHOWN:
                faults.append(UserError(f"checking stopped after {FAULTS_SHOWN} faults", str(path)))
                break
        else:
            if not faults:
                yield row
    if faults:
        raise Faults(faults)


def _object(line: str) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadTraceLine(f"not JSON: {error}", "one JSON object per line") from None
    if not isinstance(row, dict):
        raise BadTraceLine("not a JSON object", "one JSON object per line")
    return row


def _fields(line: str, columns: list[str]) -> dict[str, str]:
    try:
        values = next(csv.reader([line]))
    except (csv.Error, StopIteration) as error:
        raise BadTraceLine(f"not CSV: {error}") from None
    if len(values) < len(columns):
        raise BadTraceLine(f"{len(values)} fields, the first line names {len(columns)}")
    return dict(zip(columns, (value.strip() for value in values), strict=False))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _instant(row: dict[str, Any], name: str, scale: float) -> int:
    value = row.get(name)
    if not isinstance(value, int | float) or not _is_number(value) or abs(value) > 1e15:
        raise BadTraceLine(f"{name} is {_shown(value)}", "a number")
    return int(value) * int(scale) + round((value - int(value)) * scale)


def _count(row: dict[str, Any], name: str, least: int) -> int:
    value = row.get(name)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value <= MOST_TOKENS:  # type: ignore[operator]
        raise BadTraceLine(f"{name} is {_shown(value)}", f"a whole number from {least} to {MOST_TOKENS:,}")
    return int(value)  # type: ignore[arg-type]


def _whole(text: str, name: str, least: int) -> int:
    try:
        value = float(text)
    except ValueError:
        raise BadTraceLine(f"{name} is {text!r}", "a whole number") from None
    if not value.is_integer() or not least <= value <= MOST_TOKENS:
        raise BadTraceLine(f"{name} is {text}", f"a whole number from {least} to {MOST_TOKENS:,}")
    return int(value)


def _hashes(row: dict[str, Any]) -> list[int]:
    value = row.get("hash_ids") or []
    if not isinstance(value, list):
        raise BadTraceLine(f"hash_ids is {_shown(value)}", "a list")
    found = []
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= _ID_BITS:  # large or named: folded
            item = int.from_bytes(hashlib.blake2b(str(item).encode(), digest_size=6).digest(), "little")
        found.append(item)
    return found


def _seconds_ns(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        raise BadTraceLine(f"timestamp is {text!r}", "seconds") from None
    if not math.isfinite(value) or abs(value) > 1e12:
        raise BadTraceLine(f"timestamp is {text}", "seconds")
    return int(value) * 10**9 + round((value - int(value)) * 1e9)


def _date_ns(text: str) -> int:
    """`2023-11-16 18:15:46.6805900`, with or without an offset; as UTC without."""
    whole, _, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        date = datetime.datetime.fromisoformat(whole + rest[len(digits) :])
    except ValueError:
        raise BadTraceLine(f"timestamp is {text!r}", "a date like 2023-11-16 18:15:46.6805900") from None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    since = date - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return (since.days * 86_400 + since.seconds) * 10**9 + int((digits + "000000000")[:9])


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."
