"""Readers of traces of real traffic: arrival times, lengths and shared prefixes of requests.

The format of a file is recognised by its fields. The whole file is checked, and faults name file:line. Only numbers of
a trace are kept. This module draws no random numbers and makes no text; `requests.trace_prompts` does that.
"""

from __future__ import annotations

import csv
import datetime
import functools
import hashlib
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.errors import Fault, Faults, UserError, enough
from loadgen.format import shortened
from loadgen.units import MOST_TOKENS, Wrong

MOST_ROWS = 20_000_000
BLOCKS = (16, 32, 64, 128, 256, 512, 1024)  # possible tokens per hash, for formats that do not define it
LOOKED_AT = 2_000  # rows used to infer the tokens per hash
BAILIAN_BLOCK = 16
_ID_BITS = (1 << 48) - 1

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """One trace, in order of arrival. `blocks(i)` are the hashes of the prompt of request i, in order of the text.

    Two prompts with an equal hash share all text from the beginning to the end of that block.
    """

    path: Path
    sha256: str
    format: str
    due_ns: Ints  # from the first arrival
    input_tokens: Ints
    output_tokens: Ints
    session: Ints  # number of the conversation, -1 if the trace does not name one
    turn: Ints
    hashes: array[int]
    starts: Ints  # index into `hashes` where each request begins; one extra entry at the end
    tokens_of: dict[int, int]  # tokens that each hash covers
    skipped: int  # rows without output tokens, which are left out

    def __len__(self) -> int:
        return len(self.due_ns)

    def blocks(self, index: int) -> Sequence[int]:
        return self.hashes[int(self.starts[index]) : int(self.starts[index + 1])]

    @property
    def end_ns(self) -> int:
        """End of the trace in ns: one mean gap after the last arrival; 0 for an empty trace."""
        n = len(self)
        return int(self.due_ns[-1]) + (int(self.due_ns[-1]) // (n - 1) if n > 1 else 0) if n else 0

    @property
    def rate(self) -> float:
        """Mean requests per second of the whole trace; infinite if all requests arrive at once."""
        return len(self) * 1e9 / self.end_ns if self.end_ns else math.inf


class TraceRow(NamedTuple):
    """One parsed line of a trace; times in ns, relative to any origin."""

    at_ns: int
    input_tokens: int
    output_tokens: int
    hashes: Sequence[int] = ()
    block: float = 0.0  # tokens per hash; 0: use the size inferred for the whole file
    session: str = ""
    turn: int = 0


def read_trace(path: str | Path) -> Trace:
    """Read a trace file. Raises Faults with the first FAULTS_SHOWN faults, or UserError for the file as a whole."""
    path = Path(path)
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"cannot read the trace: {error.strerror}", str(path)) from None
    return _read_cached(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_cached(path: Path, size: int, changed_ns: int) -> Trace:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with path.open(encoding="utf-8-sig", newline="") as text:
            return _parse_file(path, text, digest)
    except OSError as error:
        raise UserError(f"cannot read the trace: {error.strerror}", str(path)) from None
    except UnicodeDecodeError:
        raise UserError("not a text file (UTF-8)", str(path), _KNOWN_FORMATS) from None


_KNOWN_FORMATS = (
    "known: shape traces of loadgen_sdk, Mooncake, vLLM timed and Bailian (JSONL), "
    "Azure LLM inference, BurstGPT and timestamp,input_length,output_length (CSV)"
)


def _parse_file(path: Path, text: Any, digest: str) -> Trace:
    lines = _numbered_lines(text)
    first_line = next(lines, None)
    if first_line is None:
        raise UserError("no requests in the trace", str(path), _KNOWN_FORMATS)
    if first_line[1].lstrip().startswith("{"):
        name, parse = _json_format(first_line[1], path)
        rows = _parse_lines(path, itertools.chain([first_line], lines), lambda line: parse(_json_object(line)))
    else:
        name, parse_row, columns = _csv_format(first_line[1], path)
        rows = _parse_lines(path, lines, lambda line: parse_row(_csv_fields(line, columns)))
    kept, skipped = [], 0
    for row in rows:
        if row.output_tokens < 1:  # BurstGPT marks failures this way; there is no output to request
            skipped += 1
            continue
        kept.append(row)
    if not kept:
        reason = f": none of its {skipped} rows has an answer" if skipped else ""
        raise UserError(f"no requests in the trace{reason}", str(path), _KNOWN_FORMATS)
    kept.sort(key=lambda row: row.at_ns)
    return _to_trace(path, digest, name, kept, skipped)


def _to_trace(path: Path, digest: str, name: str, rows: list[TraceRow], skipped: int) -> Trace:
    inferred_tokens = _infer_block_tokens(rows)
    hashes, starts, tokens_of = array("q"), [0], dict[int, int]()
    sessions: dict[str, int] = {}
    for row in rows:
        block_tokens = row.block or inferred_tokens
        previous_end = 0
        for position, hash_id in enumerate(row.hashes, 1):
            end = min(row.input_tokens, round(position * block_tokens))
            tokens_of.setdefault(hash_id, max(1, end - previous_end))
            previous_end = end
        hashes.extend(row.hashes)
        starts.append(len(hashes))
        if row.session:
            sessions.setdefault(row.session, len(sessions))
    start = rows[0].at_ns
    int_column = functools.partial(np.array, dtype=np.int64)
    return Trace(
        path=path,
        sha256=digest,
        format=name,
        due_ns=int_column([row.at_ns - start for row in rows]),
        input_tokens=int_column([row.input_tokens for row in rows]),
        output_tokens=int_column([row.output_tokens for row in rows]),
        session=int_column([sessions.get(row.session, -1) for row in rows]),
        turn=int_column([row.turn for row in rows]),
        hashes=hashes,
        starts=int_column(starts),
        tokens_of=tokens_of,
        skipped=skipped,
    )


def _infer_block_tokens(rows: Sequence[TraceRow]) -> int:
    """Infer the tokens per hash: the size in BLOCKS for which most prompts have the expected number of hashes.

    If no size fits half of the prompts, the mean of tokens per hash.
    """
    sample = [row for row in rows[:LOOKED_AT] if row.hashes and not row.block]
    if not sample:
        return BLOCKS[0]

    def fitting_rows(size: int) -> int:
        return sum(len(row.hashes) == -(-row.input_tokens // size) for row in sample)

    best_size = max(BLOCKS, key=fitting_rows)
    if fitting_rows(best_size) * 2 >= len(sample):
        return best_size
    return max(1, round(sum(row.input_tokens for row in sample) / sum(len(row.hashes) for row in sample)))


# ------------------------------------------------------------------------------------------------------------ formats


def _json_format(line: str, path: Path) -> tuple[str, Callable[[dict[str, Any]], TraceRow]]:
    try:
        first = _json_object(line)
    except Wrong as wrong:
        raise UserError(str(wrong), f"{path}:1", wrong.hint) from None
    if {"block_size", "input_source"} <= first.keys():
        return "shape trace", _sdk_shape_row
    if "chat_id" in first:
        chats: dict[str, tuple[str, int]] = {}
        return "Bailian", functools.partial(_bailian_row, chats)
    if {"timestamp", "input_length", "output_length"} <= first.keys():
        # Mooncake uses whole milliseconds; a fraction means seconds.
        scale = 1e9 if isinstance(first["timestamp"], float) and not first["timestamp"].is_integer() else 1e6
        return "Mooncake", functools.partial(_mooncake_row, scale)
    if "messages" in first or "prompt" in first:
        hint = f"prompts of your own: --dataset {path}"
        raise UserError("these are prompts, not a trace", str(path), hint)
    raise UserError("not a trace that is known here", f"{path}:1", _KNOWN_FORMATS)


def _row(row: dict[str, Any], at_ns: int, **more: Any) -> TraceRow:
    return TraceRow(
        at_ns=at_ns,
        input_tokens=_token_count(row.get("input_length"), "input_length", 1),
        output_tokens=_token_count(row.get("output_length"), "output_length", 0),
        hashes=_hash_ids(row),
        **more,
    )


def _sdk_shape_row(row: dict[str, Any]) -> TraceRow:
    # The precision it was written with: a float cannot hold more.
    microseconds = (_time_ns(row.get("timestamp"), 1e6) + 500) // 1000
    block = float(row["block_size"]) if _is_number(row.get("block_size")) else 0.0
    turn = _token_count(row["turn"], "turn", 0) if "turn" in row else 0
    return _row(row, microseconds * 1000, block=block, session=str(row.get("session_id") or ""), turn=turn)


def _mooncake_row(scale: float, row: dict[str, Any]) -> TraceRow:
    return _row(row, _time_ns(row.get("timestamp"), scale), session=str(row.get("session_id") or ""))


def _bailian_row(chats: dict[str, tuple[str, int]], row: dict[str, Any]) -> TraceRow:
    """Each turn names its parent turn; the id of the first turn becomes the name of the conversation."""
    own, parent = str(row.get("chat_id")), str(row.get("parent_chat_id"))
    session, turn = chats.get(parent, (own, -1))
    chats[own] = session, turn + 1
    at_ns = _time_ns(row.get("timestamp"), 1e9)
    return _row(row, at_ns, block=float(BAILIAN_BLOCK), session=session, turn=turn + 1)


def _csv_format(line: str, path: Path) -> tuple[str, Callable[[dict[str, str]], TraceRow], list[str]]:
    columns = [name.strip().lower() for name in next(csv.reader([line]), [])]
    for name, required, parse_time in (
        ("Azure LLM inference", ("timestamp", "contexttokens", "generatedtokens"), _utc_date_ns),
        ("BurstGPT", ("timestamp", "request tokens", "response tokens"), _seconds_ns),
        ("timestamp,input_length,output_length", ("timestamp", "input_length", "output_length"), _seconds_ns),
    ):
        if set(required) <= set(columns):
            return name, functools.partial(_csv_row, required, parse_time), columns
    raise UserError("not a trace that is known here", f"{path}:1", _KNOWN_FORMATS)


def _csv_row(names: tuple[str, str, str], parse_time: Callable[[str], int], row: dict[str, str]) -> TraceRow:
    time_name, input_name, output_name = names
    return TraceRow(
        at_ns=parse_time(row[time_name]),
        input_tokens=_token_count(_number(row[input_name]), input_name, 1),
        output_tokens=_token_count(_number(row[output_name]), output_name, 0),
    )


# -------------------------------------------------------------------------------------------------------------- parts


def _numbered_lines(text: Any) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text, 1):
        if line.strip():
            if number > MOST_ROWS:
                raise UserError(f"more than {MOST_ROWS:,} lines", "the trace", "cut it into parts")
            yield number, line


def _parse_lines(path: Path, lines: Iterator[tuple[int, str]], parse: Callable[[str], TraceRow]) -> Iterator[TraceRow]:
    faults: list[Fault] = []
    for number, line in lines:
        try:
            row = parse(line)
        except Wrong as wrong:
            faults.append(UserError(str(wrong), f"{path}:{number}", wrong.hint))
            if enough(faults, str(path)):
                break
        else:
            if not faults:
                yield row
    if faults:
        raise Faults(faults)


def _json_object(line: str) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Wrong(f"not JSON: {error}", "one JSON object per line") from None
    if not isinstance(row, dict):
        raise Wrong("not a JSON object", "one JSON object per line")
    return row


def _csv_fields(line: str, columns: list[str]) -> dict[str, str]:
    try:
        values = next(csv.reader([line]))
    except (csv.Error, StopIteration) as error:
        raise Wrong(f"not CSV: {error}", "") from None
    if len(values) < len(columns):
        raise Wrong(f"{len(values)} fields, the first line names {len(columns)}", "")
    return dict(zip(columns, (value.strip() for value in values), strict=False))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(text: str) -> int | float | str:
    """The number that a field of a CSV file holds; a text that is no finite number as it stands."""
    try:
        value = float(text)
    except ValueError:
        return text
    return text if not math.isfinite(value) else int(value) if value.is_integer() else value


def _time_ns(value: Any, scale: float) -> int:
    if not isinstance(value, int | float) or not _is_number(value) or abs(value) > 1e15:
        raise Wrong(f"timestamp is {shortened(value)}", "a number")
    return int(value) * int(scale) + round((value - int(value)) * scale)


def _seconds_ns(text: str) -> int:
    return _time_ns(_number(text), 1e9)


def _token_count(value: Any, name: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_TOKENS:
        raise Wrong(f"{name} is {shortened(value)}", f"a whole number from {least} to {MOST_TOKENS:,}")
    return value


def _hash_ids(row: dict[str, Any]) -> list[int]:
    value = row.get("hash_ids") or []
    if not isinstance(value, list):
        raise Wrong(f"hash_ids is {shortened(value)}", "a list")
    hash_ids = []
    for item in value:
        # A large number or a text is reduced to 48 bits.
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= _ID_BITS:
            item = int.from_bytes(hashlib.blake2b(str(item).encode(), digest_size=6).digest(), "little")
        hash_ids.append(item)
    return hash_ids


def _utc_date_ns(text: str) -> int:
    """ns since 1970 of `2023-11-16 18:15:46.6805900`; UTC unless the text has an offset. Raises Wrong."""
    to_seconds, _, fraction_and_offset = text.partition(".")
    digits = fraction_and_offset[: len(fraction_and_offset) - len(fraction_and_offset.lstrip("0123456789"))]
    try:
        date = datetime.datetime.fromisoformat(to_seconds + fraction_and_offset[len(digits) :])
    except ValueError:
        raise Wrong(f"timestamp is {text!r}", "a date like 2023-11-16 18:15:46.6805900") from None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    since_epoch = date - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return (since_epoch.days * 86_400 + since_epoch.seconds) * 10**9 + int((digits + "000000000")[:9])
