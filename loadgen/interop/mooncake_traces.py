"""Traces in Mooncake's format, which vLLM, GuideLLM and AIPerf write too.

A row has the lengths of a request and ids of the blocks of its prompt. Most files consist of plain
rows, which are decoded many at a time. Any other row is parsed field by field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.units import MOST_TOKENS, UNIT_NS, TimeUnit
from loadgen.core.workload.trace_formats import (
    MAX_TIME_NS,
    UNKNOWN_NS,
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
        block_tokens: The tokens of a block.
        last_time_ns: The time of the last row.
        conversation_tokens: The tokens of all prompts and responses so far.
        block_ids: The ids of the blocks of the last prompt.
    """

    block_tokens: float
    last_time_ns: int = 0
    conversation_tokens: int = 0
    block_ids: Sequence[int] = ()


class _DeltaSessions:
    """Completes the prompts of AIPerf's sessions, whose rows contain only what a turn adds.

    A session is a conversation. The model is sent the conversation so far and the tokens of the
    row, so the full prompt is longer than the row says.
    """

    def __init__(self) -> None:
        self._states: dict[str, _SessionState] = {}
        self._new_id_count = 0

    def last_time_ns(self, session: str) -> int:
        """Return the time of the last row of a session, 0 before its first row."""
        state = self._states.get(session)
        return 0 if state is None else state.last_time_ns

    def append_turn(self, row: TraceRow) -> TraceRow:
        """Append a row to its session and return it with the length and blocks of its full prompt.

        The full prompt is divided into blocks of `block_tokens` tokens, and blocks with the same
        text have the same id. For example, after a prompt of 300 tokens and a response of 100, a
        row that adds 200 tokens has a full prompt of 600 tokens.
        """
        state = self._states.get(row.session)
        if state is None:
            state = _SessionState(block_tokens=_infer_block_tokens(row))

        prompt_tokens = state.conversation_tokens + row.input_tokens
        block_ids = self._join_block_ids(state, row, prompt_tokens)
        self._states[row.session] = state._replace(
            last_time_ns=row.at_ns,
            conversation_tokens=prompt_tokens + row.output_tokens,
            block_ids=block_ids,
        )

        return row._replace(
            input_tokens=prompt_tokens, hashes=block_ids, block_tokens=state.block_tokens
        )

    def _join_block_ids(self, state: _SessionState, row: TraceRow, prompt_tokens: int) -> list[int]:
        """Return the block ids of a full prompt: last prompt, response to it, and new row.

        The trace has no ids for the blocks of the response, so these get new ids. For example, a
        prompt of 600 tokens has 6 blocks of 100 tokens. If the last prompt has 3 ids and the row
        has 2, the response gets 1 new id.

        Args:
            state: The session before the row, with the ids of the last prompt.
            row: The row, with the ids of the tokens that it adds.
            prompt_tokens: The length of the full prompt.
        """
        full_block_count = int(prompt_tokens // state.block_tokens)
        known_id_count = len(state.block_ids) + len(row.hashes)
        missing_id_count = max(full_block_count - known_id_count, 0)
        response_ids = self._create_ids(row.session, missing_id_count)
        block_ids = [*state.block_ids, *response_ids, *row.hashes]

        # The last prompt and the row may each end with an incomplete block that has an id. Joined,
        # their tokens can fill fewer blocks than there are ids, so the ids at the end are dropped.
        block_count = math.ceil(prompt_tokens / state.block_tokens)
        return block_ids[:block_count]

    def _create_ids(self, session: str, count: int) -> list[int]:
        """Return ids that no other block of the trace has."""
        first = self._new_id_count
        self._new_id_count += count
        return [hash_to_id(f"{session} {number}") for number in range(first, first + count)]


class _MooncakeParser:
    """Parses the lines of one file in Mooncake's format.

    Args:
        unit_ns: The unit of its timestamps, in ns.
    """

    def __init__(self, unit_ns: int) -> None:
        self._unit_ns = unit_ns
        self._sessions = _DeltaSessions()

    def parse_row(self, row: dict[str, Any]) -> TraceRow:
        """Return the request of a row. If the row has a session, it is the next turn of it.

        Raises:
            InvalidValueError: A field has a wrong value.
        """
        session = parse_session(row)
        pause_ns = parse_delay(row)
        is_untimed_turn = bool(session) and row.get("timestamp") is None
        if is_untimed_turn:
            return self._parse_untimed_turn(row, session, pause_ns)

        sent_ns = parse_time_ns(row.get("timestamp"), float(self._unit_ns))
        request = parse_request(row, sent_ns)._replace(session=session, pause_ns=pause_ns)
        return self._sessions.append_turn(request) if session else request

    def _parse_untimed_turn(
        self, row: Mapping[str, object], session: str, pause_ns: int
    ) -> TraceRow:
        """Return the request of a row that has a session but no timestamp.

        Such a request is sent as soon as the response to the previous request of its session has
        ended and the pause has passed, so its time is not known before the run. As a placeholder it
        gets the time of the previous request.

        Args:
            row: The row, as it is in the file.
            session: The name of its session.
            pause_ns: The pause that the row specifies, or UNKNOWN_NS, which means no pause.
        """
        previous_time_ns = self._sessions.last_time_ns(session)
        known_pause_ns = 0 if pause_ns == UNKNOWN_NS else pause_ns
        request = parse_request(row, previous_time_ns)._replace(
            session=session, pause_ns=known_pause_ns, has_time=False
        )
        return self._sessions.append_turn(request)

    def parse_plain_lines(self, lines: Sequence[str]) -> TraceColumns | None:
        """Return the requests of many plain lines, which is much faster than one by one.

        Return None if a line is not plain, for example because it has a session.
        """
        return _parse_plain_lines(lines, self._unit_ns)


def mooncake_format(*, has_sessions: bool, unit: TimeUnit) -> TraceFormat:
    """Return Mooncake's format for a file whose times have a unit.

    Args:
        has_sessions: Whether its rows have a session. Such rows need not be in order of time,
            because a file may list one session after the other.
        unit: The unit of the times.
    """

    def with_other_unit(other_unit: TimeUnit) -> TraceFormat:
        return mooncake_format(has_sessions=has_sessions, unit=other_unit)

    parser = _MooncakeParser(UNIT_NS[unit])
    return TraceFormat(
        "Mooncake",
        parse_line=one_request_per_line(parser.parse_row),
        parse_lines=parser.parse_plain_lines,
        must_be_ordered=not has_sessions,
        with_unit=with_other_unit,
    )


def _infer_block_tokens(first_row: TraceRow) -> float:
    """Return the number of tokens per block in a session, inferred from its first row.

    A block size fits if it divides the prompt into as many blocks as the row has block ids.
    AIPerf's default is tried first, and is also used if no usual size fits. The size is a float
    because other formats have sizes that are not whole.
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
    rows = _decode_plain_rows(lines)
    if rows is None:
        return None

    try:
        times = np.array([row.timestamp for row in rows])
        input_tokens = np.array([row.input_length for row in rows], np.int64)
        output_tokens = np.array([row.output_length for row in rows], np.int64)
    except OverflowError:  # a number is too large for an array
        return None

    blocks = _collect_block_ids(rows)
    is_valid = (
        _are_times_valid(times, unit_ns)
        and _are_counts_valid(input_tokens, minimum=1)
        and _are_counts_valid(output_tokens, minimum=0)
        and _are_ids_valid(blocks.ids)
    )
    if not is_valid:
        return None

    at_ns = _convert_to_ns(times, unit_ns)
    return TraceColumns(at_ns, input_tokens, output_tokens, blocks.ids, blocks.counts)


def _decode_plain_rows(lines: Sequence[str]) -> list[Any] | None:
    """Return one `_PlainRow` for each line, or None if a line is not a plain row."""
    try:
        rows = _PLAIN_ROWS.decode("[" + ",".join(lines) + "]")
    except (msgspec.DecodeError, RecursionError):
        return None
    # A line with a comma between two objects is more than one row.
    has_one_row_per_line = len(rows) == len(lines)
    return rows if has_one_row_per_line else None


class _BlockIds(NamedTuple):
    """The block ids of many prompts, one prompt after the other, and how many each prompt has.

    Both lists are empty if no prompt has ids.
    """

    ids: list[int]
    counts: list[int]


def _collect_block_ids(rows: Sequence[Any]) -> _BlockIds:
    """Return the block ids of `_PlainRow` objects. A row without `hash_ids` has none."""
    if not any(row.hash_ids for row in rows):
        return _BlockIds([], [])

    block_ids: list[int] = []
    counts: list[int] = []
    for row in rows:
        row_ids = row.hash_ids or ()
        block_ids += row_ids
        counts.append(len(row_ids))

    return _BlockIds(block_ids, counts)


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
