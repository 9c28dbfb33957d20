"""What the fluidity index shows that other metrics do not, and what it costs.

    python benchmarks/fluidity.py

The first table has responses of 200 tokens with a planted pause of one second: at the start, at the
end, and spread over short pauses. TPOT is the same for all three, and the longest pause is the same
for two of them, which the index tells apart. The second table has the CPU time of computing the
index after a run, per output event, next to the rule of Etalon applied token by token in Python.
Exit 1 if the two disagree about any deadline, or if an event costs more than the limit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.token_deadlines import DeadlineCounts, count_token_deadlines
from loadgen.core.results.gaps import RequestGaps
from loadgen.core.results.record import FINISH, ROW, STATUS
from loadgen.core.slo import TokenDeadlines

NS_PER_MS = 1_000_000

DEADLINES = TokenDeadlines(first_token_ns=300 * NS_PER_MS, per_token_ns=40 * NS_PER_MS)
FIRST_TOKEN_NS = 250 * NS_PER_MS  # of every response

# The responses with a planted pause
TOKENS = 200
ORDINARY_GAP_NS = 30 * NS_PER_MS
PAUSE_NS = 1_000 * NS_PER_MS
TOKENS_AFTER_LATE_PAUSE = 10
TOKENS_BETWEEN_SHORT_PAUSES = 20

# The random responses whose index is timed. Their mean gap is a little below the deadline of a
# token, so that some deadlines are met and some are missed.
MIN_RANDOM_GAPS, MAX_RANDOM_GAPS = 100, 900
MEAN_RANDOM_GAP_NS = 38 * NS_PER_MS

# An event costs the client about 8.5 µs while it is received (benchmarks/events.py). The index must
# cost less than 3 % of that.
MAX_NS_PER_EVENT = 250.0

PAUSE_COLUMNS = ("pause", "TPOT, ms", "longest, ms", "missed", "index")
COST_COLUMNS = ("deadlines", "ns CPU per event", "limit")


class RecordedResponses(NamedTuple):
    """Responses as a run stores them: one record per request, and the gaps between their events."""

    records: NDArray[np.void]
    gaps: RequestGaps


def record_responses(gaps_by_response: Sequence[NDArray[np.int64]]) -> RecordedResponses:
    """Return what a run would store of successful responses with these gaps between their tokens.

    Each array has the gaps of one response in ns. Every event has one token, and the first token
    comes FIRST_TOKEN_NS after the request.
    """
    gap_counts = np.array([len(gaps) for gaps in gaps_by_response], np.int64)
    gap_sums_ns = np.array([gaps.sum() for gaps in gaps_by_response], np.int64)
    last_token_ns = FIRST_TOKEN_NS + gap_sums_ns
    tokens = gap_counts + 1

    records = np.zeros(len(gaps_by_response), ROW)
    records["slot"] = np.arange(len(records))
    records["status"] = STATUS["ok"]
    records["finish_reason"] = FINISH["length"]
    records["first_token_ns"] = FIRST_TOKEN_NS
    records["first_answer_ns"] = FIRST_TOKEN_NS
    records["last_token_ns"] = last_token_ns
    records["end_ns"] = last_token_ns
    records["output_events"] = tokens
    records["output_tokens"] = tokens
    records["reasoning_tokens"] = -1  # unknown, as for a server that does not report them

    gaps = RequestGaps(records["slot"], gap_counts, np.concatenate(gaps_by_response))
    return RecordedResponses(records, gaps)


def count_vectorized(responses: RecordedResponses) -> DeadlineCounts:
    """Count the token deadlines of all responses as a run counts them, with NumPy."""
    return count_token_deadlines([Columns(responses.records)], [responses.gaps], DEADLINES)


class ResponseDeadlines(NamedTuple):
    """The number of token deadlines of one response, and how many of them were missed."""

    deadlines: int
    missed: int


def count_token_by_token(responses: RecordedResponses) -> list[ResponseDeadlines]:
    """Count the token deadlines of each response by a loop over its tokens, as a reference."""
    return [
        count_response_deadlines([FIRST_TOKEN_NS, *gaps_ns.tolist()])
        for _, gaps_ns in responses.gaps.each()
    ]


def count_response_deadlines(waits_ns: Sequence[int]) -> ResponseDeadlines:
    """Count the token deadlines of one response by the rule of Etalon.

    `waits_ns` has the wait for the first token, and then the gap before each further token. A token
    that comes early leaves its spare time (the slack) to the tokens after it. A token that comes
    too late misses its own deadline, and a further one for each `per_token_ns` that it is late. The
    deadlines then start anew at this token, without slack.
    """
    deadlines = 0
    missed = 0
    slack_ns = 0
    allowed_ns = DEADLINES.first_token_ns
    for wait_ns in waits_ns:
        late_ns = wait_ns - (allowed_ns + slack_ns)
        if late_ns <= 0:
            deadlines += 1
            slack_ns = -late_ns
        else:
            missed_by_token = 1 + late_ns // DEADLINES.per_token_ns
            deadlines += missed_by_token
            missed += missed_by_token
            slack_ns = 0
        allowed_ns = DEADLINES.per_token_ns  # of every token after the first

    return ResponseDeadlines(deadlines, missed)


def plant_pauses() -> dict[str, NDArray[np.int64]]:
    """Return the gaps in ns of three responses that paused for one second, by the kind of pause.

    The pause is one long gap after the first token, one near the end, or several shorter gaps. All
    three responses have the same sum of gaps, so that they have the same TPOT.
    """
    ordinary_gaps = np.full(TOKENS - 1, ORDINARY_GAP_NS, np.int64)
    added_ns = PAUSE_NS - ORDINARY_GAP_NS

    pause_at_start = ordinary_gaps.copy()
    pause_at_start[0] += added_ns

    pause_near_end = ordinary_gaps.copy()
    pause_near_end[-TOKENS_AFTER_LATE_PAUSE] += added_ns

    short_pauses = ordinary_gaps.copy()
    pause_indexes = range(
        TOKENS_BETWEEN_SHORT_PAUSES - 1, len(short_pauses), TOKENS_BETWEEN_SHORT_PAUSES
    )
    short_pauses[pause_indexes] += added_ns // len(pause_indexes)
    short_pauses[-1] += pause_at_start.sum() - short_pauses.sum()  # the remainder of the division

    return {
        "after the first token": pause_at_start,
        "near the end": pause_near_end,
        "short ones": short_pauses,
    }


def format_planted_pause(description: str, gaps_ns: NDArray[np.int64]) -> list[str]:
    """Return the row of a response with a planted pause: TPOT, longest gap and fluidity index."""
    counts = count_vectorized(record_responses([gaps_ns]))
    return [
        description,
        f"{gaps_ns.mean() / NS_PER_MS:.1f}",
        f"{gaps_ns.max() / NS_PER_MS:,.0f}",
        f"{counts.missed[0]} of {counts.deadlines[0]}",
        f"{counts.indices[0]:.1%}",
    ]


def draw_responses(count: int) -> RecordedResponses:
    """Return responses with random lengths and exponential gaps, the same in every call."""
    random = np.random.default_rng(1)
    gap_counts = random.integers(MIN_RANDOM_GAPS, MAX_RANDOM_GAPS, count)
    return record_responses(
        [
            random.exponential(MEAN_RANDOM_GAP_NS, gap_count).astype(np.int64)
            for gap_count in gap_counts
        ]
    )


def have_equal_counts(vectorized: DeadlineCounts, reference: Sequence[ResponseDeadlines]) -> bool:
    """Return whether both ways of counting agree about every response."""
    expected_deadlines = [response.deadlines for response in reference]
    expected_missed = [response.missed for response in reference]
    has_equal_deadlines = np.array_equal(vectorized.deadlines, expected_deadlines)
    has_equal_missed = np.array_equal(vectorized.missed, expected_missed)
    return has_equal_deadlines and has_equal_missed


def main() -> int:
    """Print both tables; return 1 if the results disagree or the cost is above its limit."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--responses", type=int, default=2_000, help="responses of 500 events")
    smoke_defaults = {"responses": 20}
    args = rig.parse_arguments(parser, **smoke_defaults)

    pause_rows = [format_planted_pause(name, gaps_ns) for name, gaps_ns in plant_pauses().items()]
    print(rig.format_table(PAUSE_COLUMNS, pause_rows) + "\n")

    responses = draw_responses(args.responses)
    counts = count_vectorized(responses)
    is_equal = have_equal_counts(counts, count_token_by_token(responses))

    events = len(responses.gaps.values)
    vectorized_s = rig.measure_cpu_s(partial(count_vectorized, responses))
    reference_s = rig.measure_cpu_s(partial(count_token_by_token, responses), rounds=3)
    vectorized_ns_per_event = vectorized_s / events * 1e9
    reference_ns_per_event = reference_s / events * 1e9

    cost_rows = [
        ["as a run counts", f"{vectorized_ns_per_event:,.0f}", f"{MAX_NS_PER_EVENT:,.0f}"],
        ["token by token in Python", f"{reference_ns_per_event:,.0f}", "-"],
    ]
    print(f"{events:,} events of {args.responses:,} responses, index {counts.indices.mean():.3f}")
    print(rig.format_table(COST_COLUMNS, cost_rows))
    print("Both ways agree about every response" if is_equal else "The two ways DISAGREE")

    # The cost per event of the smallest form is mostly fixed cost, so it has no limit.
    is_within_limit = vectorized_ns_per_event <= MAX_NS_PER_EVENT or args.smoke
    return 0 if is_equal and is_within_limit else 1


if __name__ == "__main__":
    sys.exit(main())
