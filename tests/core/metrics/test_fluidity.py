"""The fluidity index agrees with Etalon's rule, applied token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.token_deadlines import count_token_deadlines
from loadgen.core.results.gaps import RequestGaps
from loadgen.core.results.record import FINISH, ROW, STATUS
from loadgen.core.slo import TokenDeadlines

MS = 1_000_000


def naive_deadlines(
    waits_ns: Sequence[int], ttft_deadline_ns: int, token_deadline_ns: int
) -> tuple[int, int]:
    """Return all deadlines and the missed ones of a response, one token after the other.

    `waits_ns` has the time to the first token, and then the time between any two tokens. The rule
    is that of arXiv 2507.09019v1, algorithm "fluidity-index Computation", in whole ns.
    """
    total = missed = slack = 0
    for number, wait in enumerate(waits_ns):
        deadline = ttft_deadline_ns if number == 0 else token_deadline_ns
        if wait <= deadline + slack:
            slack += deadline - wait
            total += 1
        else:
            misses = (wait - slack - deadline) // token_deadline_ns + 1
            missed += misses
            total += misses
            slack = 0
    return total, missed


def records_of(events: Sequence[Sequence[int]], tokens: Sequence[int]) -> np.ndarray:
    """Return one ok record per response, which has its first token after the first of its waits."""
    rows = np.zeros(len(events), ROW)
    for slot, waits_ns in enumerate(events):
        rows[slot]["slot"] = slot
        rows[slot]["status"] = STATUS["ok"]
        rows[slot]["finish_reason"] = FINISH["length"]
        rows[slot]["due_ns"] = 1000
        rows[slot]["first_token_ns"] = 1000 + waits_ns[0]
        rows[slot]["last_token_ns"] = rows[slot]["end_ns"] = 1000 + sum(waits_ns)
        rows[slot]["first_answer_ns"] = rows[slot]["first_token_ns"]
        rows[slot]["output_events"] = len(waits_ns)
        rows[slot]["output_tokens"] = tokens[slot]
        rows[slot]["reasoning_tokens"] = -1
    return rows


def gaps_of(events: Sequence[Sequence[int]]) -> list[RequestGaps]:
    """Return the gaps of all responses in two blocks, the last responses first."""
    slots = [slot for slot, waits in enumerate(events) if len(waits) > 1]
    half = len(slots) // 2
    return [
        RequestGaps(
            slots=np.array(part, np.int64),
            counts=np.array([len(events[slot]) - 1 for slot in part], np.int64),
            values=np.array([gap for slot in part for gap in events[slot][1:]], np.int64),
        )
        for part in (slots[half:], slots[:half])
    ]


WAITS = st.lists(st.integers(0, 400), min_size=1, max_size=30)
DEADLINES = st.builds(TokenDeadlines, st.integers(1, 900), st.integers(1, 90))


@given(st.lists(WAITS, min_size=1, max_size=12), DEADLINES)
def test_deadlines_of_single_tokens_are_those_of_the_naive_rule(
    events: list[list[int]], deadlines: TokenDeadlines
) -> None:
    rows = records_of(events, [len(waits) for waits in events])
    counts = count_token_deadlines([Columns(rows)], gaps_of(events), deadlines)
    naive = [naive_deadlines(waits, *deadlines) for waits in events]
    assert counts.slots.tolist() == list(range(len(events)))
    assert list(zip(counts.deadlines.tolist(), counts.missed.tolist(), strict=True)) == naive


@given(st.lists(WAITS, min_size=1, max_size=6), st.integers(2, 5), DEADLINES)
def test_tokens_of_one_event_arrive_at_the_same_time(
    events: list[list[int]], tokens_per_event: int, deadlines: TokenDeadlines
) -> None:
    events = [waits for waits in events if len(waits) > 1] or [[1, 1]]
    token_counts = [1 + tokens_per_event * (len(waits) - 1) for waits in events]
    rows = records_of(events, token_counts)
    counts = count_token_deadlines([Columns(rows)], gaps_of(events), deadlines)

    same_time = [0] * (tokens_per_event - 1)
    for position, waits in enumerate(events):
        waits_of_tokens = [waits[0]]
        for gap in waits[1:]:
            waits_of_tokens += [gap, *same_time]
        total, missed = naive_deadlines(waits_of_tokens, *deadlines)
        assert (counts.deadlines[position], counts.missed[position]) == (total, missed)


@pytest.mark.parametrize(
    ("waits_ms", "expected"),
    [
        ([100, 50, 50], (3, 0)),  # every token on time
        ([40, 110, 50], (3, 0)),  # the slack of the first token absorbs a pause
        ([100, 110, 10], (4, 2)),  # a late token misses two deadlines, and the next one is on time
        ([160, 50], (3, 2)),  # the first token misses its deadline and that of the next token
    ],
)
def test_slack_and_misses_of_examples(waits_ms: list[int], expected: tuple[int, int]) -> None:
    events = [[wait * MS for wait in waits_ms]]
    rows = records_of(events, [len(waits_ms)])
    deadlines = TokenDeadlines(100 * MS, 50 * MS)
    counts = count_token_deadlines([Columns(rows)], gaps_of(events), deadlines)
    assert (counts.deadlines[0], counts.missed[0]) == expected


def test_responses_without_token_times_have_no_index() -> None:
    events = [[100], [100, 20], [100, 20], [100]]
    rows = records_of(events, [8, 2, 2, 1])
    rows[2]["status"] = STATUS["failed"]
    gaps = gaps_of(events)
    counts = count_token_deadlines([Columns(rows)], gaps, TokenDeadlines(100, 50))
    assert counts.slots.tolist() == [1, 3]
    without_gaps = count_token_deadlines([Columns(rows)], [], TokenDeadlines(100, 50))
    assert without_gaps.slots.tolist() == [3]
    assert np.isnan(counts.look_up_indices(np.array([0, 2]))).all()
    assert counts.look_up_indices(np.array([3, 1])).tolist() == [1.0, 1.0]
