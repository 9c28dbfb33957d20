"""Traces in Mooncake's format, which vLLM, GuideLLM and AIPerf write too.

A row has the lengths of a request and ids of the blocks of its prompt. Most files consist of plain
rows, which are decoded many at a time. Any other row is parsed field by field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.units import MOST_TOKENS, UNIT_NS, TimeUnit
from loadgen.core.workload.trace_formats import (
    MAX_TIME_NS,
    TraceColumns,
    TraceFormat,
    TraceRow,
    one_request_per_line,
    parse_time_ns,
)
from loadgen.interop.trace_values import (
    MAX_HASH_ID,
    REQUEST_FIELDS,
    hash_to_id,
    parse_delay,
    parse_request,
    parse_session,
)

AIPERF_BLOCK_TOKENS = 512
"""The block size that AIPerf writes by default."""
OTHER_BLOCK_TOKENS = (16, 32, 64, 128, 256, 512, 1024)
"""Block sizes that other tools use."""
UNKNOWN_BLOCK_TOKENS = 64
"""The block size of a session whose first row has no hashes."""

_PlainRow: Any = msgspec.defstruct(
    "_PlainRow",
    [
        ("timestamp", float),
        ("input_length", int),
        ("output_length", int),
        ("hash_ids", list[int] | None, None),
        # These fields must be null: a row with one of them is not plain.
        *((name, None, None) for name in ("session_id", *REQUEST_FIELDS)),
    ],
    gc=False,
)
"""A row without a session and without request parameters, as most rows are."""

_PLAIN_ROWS: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[_PlainRow])


class _SessionState(NamedTuple):
    """The conversation of a session after its last row.

    Attributes:
        tokens: The tokens of the conversation, with the last response.
        block_tokens: The tokens of a block, 0 before the first row.
        block_ids: The ids of the blocks of the last prompt.
    """

    tokens: int = 0
    block_tokens: float = 0.0
    block_ids: Sequence[int] = ()


class _DeltaSessions:
    """Completes the prompts of AIPerf's sessions, whose rows contain only what a turn adds.

    A prompt consists of the conversation before it and the tokens of its row.
    """

    def __init__(self) -> None:
        self._states: dict[str, _SessionState] = {}
        self._last_timed_ns: dict[str, int] = {}
        self._new_id_count = 0

    def last_time_ns(self, session: str) -> int:
        """Return the last time that a row of a session has, 0 before its first row."""
        return self._last_timed_ns.get(session, 0)

    def complete_prompt(self, row: TraceRow) -> TraceRow:
        """Return a row with the tokens and block ids of its complete prompt.

        The blocks of the prompt are those of the last prompt of the session, then new ones for the
        response to it, which has no ids in the trace, and then those of the row. The state of the
        session is updated.
        """
        self._last_timed_ns[row.session] = row.at_ns
        state = self._states.get(row.session, _SessionState())
        block_tokens = state.block_tokens or _infer_block_tokens(row)
        prompt_tokens = state.tokens + row.input_tokens
        full_blocks = int(prompt_tokens // block_tokens)
        known_ids = len(state.block_ids) + len(row.hashes)
        response_ids = self._create_ids(row.session, count=max(full_blocks - known_ids, 0))
        block_ids = [*state.block_ids, *response_ids, *row.hashes]
        # The last prompt and the row each begin a block of their own, so there may be one too many.
        block_ids = block_ids[: math.ceil(prompt_tokens / block_tokens)]
        self._states[row.session] = _SessionState(
            tokens=prompt_tokens + row.output_tokens,
            block_tokens=block_tokens,
            block_ids=block_ids,
        )
        return row._replace(input_tokens=prompt_tokens, hashes=block_ids, block_tokens=block_tokens)

    def _create_ids(self, session: str, count: int) -> list[int]:
        """Return ids that no other block of the trace has."""
        first = self._new_id_count
        self._new_id_count += count
        return [hash_to_id(f"{session} {number}") for number in range(first, first + count)]


def mooncake_format(*, has_sessions: bool, unit: TimeUnit) -> TraceFormat:
    """Return Mooncake's format with times in a unit.

    Args:
        has_sessions: Whether rows have a session. They are not in order of time then.
        unit: The unit of the times.
    """
    unit_ns = UNIT_NS[unit]
    sessions = _DeltaSessions()

    def parse_row(row: dict[str, Any]) -> TraceRow:
        return _parse_row(row, unit_ns, sessions)

    def parse_lines(lines: Sequence[str]) -> TraceColumns | None:
        return _parse_plain_lines(lines, unit_ns)

    def with_other_unit(other_unit: TimeUnit) -> TraceFormat:
        return mooncake_format(has_sessions=has_sessions, unit=other_unit)

    return TraceFormat(
        "Mooncake",
        one_request_per_line(parse_row),
        must_be_ordered=not has_sessions,
        parse_lines=parse_lines,
        with_unit=with_other_unit,
    )


def _parse_row(row: dict[str, Any], unit_ns: int, sessions: _DeltaSessions) -> TraceRow:
    """Return the request of a row.

    A row of a session may have no timestamp. Its request is then sent after the response to the
    previous request of the session and the pause that the row specifies, 0 by default. It is listed
    at the time of that previous request.
    """
    session = parse_session(row)
    pause_ns = parse_delay(row)  # negative without a pause
    is_timed = not session or row.get("timestamp") is not None
    if is_timed:
        at_ns = parse_time_ns(row.get("timestamp"), float(unit_ns))
    else:
        at_ns = sessions.last_time_ns(session)
        pause_ns = max(pause_ns, 0)
    request = parse_request(row, at_ns)._replace(
        session=session, pause_ns=pause_ns, has_time=is_timed
    )
    return sessions.complete_prompt(request) if session else request


def _infer_block_tokens(first_row: TraceRow) -> float:
    """Return the block size of a session, by the number of blocks of its first prompt.

    It is AIPerf's default if this fits or if no usual size fits.
    """
    if not first_row.hashes:
        return float(UNKNOWN_BLOCK_TOKENS)
    for block_tokens in (AIPERF_BLOCK_TOKENS, *OTHER_BLOCK_TOKENS):
        if math.ceil(first_row.input_tokens / block_tokens) == len(first_row.hashes):
            return float(block_tokens)
    return float(AIPERF_BLOCK_TOKENS)


def _parse_plain_lines(lines: Sequence[str], unit_ns: int) -> TraceColumns | None:
    """Return the requests of many lines, or None if one of them is not plain or has an error.

    This is the fast path: the lines are decoded as one JSON array. If it returns None, the caller
    parses them one by one, which also finds the error.
    """
    text = "[" + ",".join(lines) + "]"
    try:
        rows = _PLAIN_ROWS.decode(text)
        times = np.array([row.timestamp for row in rows])
        input_tokens = np.array([row.input_length for row in rows], np.int64)
        output_tokens = np.array([row.output_length for row in rows], np.int64)
    except (msgspec.DecodeError, RecursionError, OverflowError):
        return None
    block_ids: list[int] = []
    hash_counts: list[int] = []
    if '"hash_ids"' in text:
        for row in rows:
            block_ids += row.hash_ids or ()
            hash_counts.append(len(row.hash_ids or ()))
    # A line with a comma between two objects is more than one row.
    has_one_row_per_line = len(rows) == len(lines)
    if (
        has_one_row_per_line
        and _are_times_valid(times, unit_ns)
        and _are_counts_valid(input_tokens, minimum=1)
        and _are_counts_valid(output_tokens, minimum=0)
        and _are_ids_valid(block_ids)
    ):
        at_ns = _convert_to_ns(times, unit_ns)
        return TraceColumns(at_ns, input_tokens, output_tokens, block_ids, hash_counts)
    return None


def _convert_to_ns(times: NDArray[np.float64], unit_ns: int) -> NDArray[np.int64]:
    """Return times in ns. A float has too few digits for large times, so the units are int64."""
    whole_units = np.trunc(times)
    fractions_ns = np.rint((times - whole_units) * unit_ns).astype(np.int64)
    return whole_units.astype(np.int64) * unit_ns + fractions_ns


def _are_times_valid(times: NDArray[np.float64], unit_ns: int) -> bool:
    # The product of two Python floats is infinite where numpy would warn of an overflow.
    return float(np.abs(times).max()) * float(unit_ns) <= MAX_TIME_NS


def _are_counts_valid(tokens: NDArray[np.int64], minimum: int) -> bool:
    return bool(tokens.min() >= minimum and tokens.max() <= MOST_TOKENS)


def _are_ids_valid(block_ids: Sequence[int]) -> bool:
    return not block_ids or (min(block_ids) >= 0 and max(block_ids) <= MAX_HASH_ID)
