"""What the fluidity index shows that other metrics do not, and what it costs.

    python benchmarks/fluidity.py

The first table has responses of 200 tokens with a planted pause of one second: at the start, at the
end, and spread over short pauses. TPOT is the same for all three, and the longest pause is the
same for two of them. The index tells them apart. The second table has the CPU time of computing the
index after a run, per output event, next to the rule of Etalon applied token by token in Python.
Exit 1 if the two disagree about any deadline, or if an event costs more than the limit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.token_deadlines import DeadlineCounts, count_token_deadlines
from loadgen.core.results.gaps import RequestGaps
from loadgen.core.results.record import FINISH, ROW, STATUS
from loadgen.core.slo import TokenDeadlines

MS = 1_000_000
TOKENS = 200
DEADLINES = TokenDeadlines(first_token_ns=300 * MS, per_token_ns=40 * MS)
ORDINARY_GAP_NS = 30 * MS
PAUSE_NS = 1_000 * MS
FIRST_TOKEN_NS = 250 * MS
LIMIT_NS_PER_EVENT = 250.0
"""An event costs the client about 8.5 µs while it is received (benchmarks/events.py). The index
must cost less than 3 % of that."""


class Recorded(NamedTuple):
    """Recorded responses: their records, and the gaps between their events."""

    rows: NDArray[np.void]
    gaps: RequestGaps


def record(gaps_of_responses: Sequence[NDArray[np.int64]]) -> Recorded:
    """Return what a run records of responses with one token per event and these gaps."""
    rows = np.zeros(len(gaps_of_responses), ROW)
    counts = np.array([len(gaps) for gaps in gaps_of_responses], np.int64)
    totals = np.array([gaps.sum() for gaps in gaps_of_responses], np.int64)
    rows["slot"] = np.arange(len(rows))
    rows["status"] = STATUS["ok"]
    rows["finish_reason"] = FINISH["length"]
    rows["first_token_ns"] = rows["first_answer_ns"] = FIRST_TOKEN_NS
    rows["last_token_ns"] = rows["end_ns"] = FIRST_TOKEN_NS + totals
    rows["output_events"] = rows["output_tokens"] = counts + 1
    rows["reasoning_tokens"] = -1
    return Recorded(rows, RequestGaps(rows["slot"], counts, np.concatenate(gaps_of_responses)))


def count_vectorized(recorded: Recorded) -> DeadlineCounts:
    """Return the deadlines as a run counts them."""
    return count_token_deadlines([Columns(recorded.rows)], [recorded.gaps], DEADLINES)


def count_token_by_token(recorded: Recorded) -> list[tuple[int, int]]:
    """Return the deadlines and the missed ones of each response, by a loop over its tokens."""
    results = []
    for _, gaps in recorded.gaps.each():
        deadlines = missed = slack = 0
        for number, wait in enumerate([FIRST_TOKEN_NS, *gaps.tolist()]):
            allowed = DEADLINES.first_token_ns if number == 0 else DEADLINES.per_token_ns
            if wait <= allowed + slack:
                slack += allowed - wait
                deadlines += 1
                continue
            misses = (wait - slack - allowed) // DEADLINES.per_token_ns + 1
            missed += misses
            deadlines += misses
            slack = 0
        results.append((deadlines, missed))
    return results


def plant_pauses() -> dict[str, NDArray[np.int64]]:
    """Return the gaps of one response for each kind of pause, all with the same sum."""
    ordinary = np.full(TOKENS - 1, ORDINARY_GAP_NS, np.int64)
    extra_ns = PAUSE_NS - ORDINARY_GAP_NS
    at_start = ordinary.copy()
    at_start[0] += extra_ns
    at_end = ordinary.copy()
    at_end[-10] += extra_ns
    spread = ordinary.copy()
    spread[19::20] += extra_ns // len(spread[19::20])
    spread[-1] += at_start.sum() - spread.sum()
    return {"after the first token": at_start, "near the end": at_end, "short ones": spread}


def print_planted_pauses() -> None:
    """Print TPOT, the longest pause and the index of the responses with planted pauses."""
    rows = []
    for name, gaps in plant_pauses().items():
        counts = count_vectorized(record([gaps]))
        tpot_ms = gaps.sum() / len(gaps) / MS
        rows.append(
            [
                name,
                f"{tpot_ms:.1f}",
                f"{gaps.max() / MS:,.0f}",
                f"{counts.missed[0]} of {counts.deadlines[0]}",
                f"{counts.indices[0]:.1%}",
            ]
        )
    print(rig.format_table(["pause", "TPOT, ms", "longest, ms", "missed", "index"], rows) + "\n")


def main() -> int:
    """Print both tables; return 1 if the results disagree or the cost is above its limit."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--responses", type=int, default=2_000, help="responses of 500 events")
    args = rig.parse_arguments(parser, responses=20)
    print_planted_pauses()

    random = np.random.default_rng(1)
    lengths = random.integers(100, 900, args.responses)
    recorded = record([random.exponential(38 * MS, length).astype(np.int64) for length in lengths])
    counts = count_vectorized(recorded)
    expected = count_token_by_token(recorded)
    agrees = list(zip(counts.deadlines.tolist(), counts.missed.tolist(), strict=True)) == expected

    events = len(recorded.gaps.values)
    fast_ns = rig.measure_cpu_s(lambda: count_vectorized(recorded)) / events * 1e9
    slow_ns = rig.measure_cpu_s(lambda: count_token_by_token(recorded), rounds=3) / events * 1e9
    rows = [
        ["as a run counts", f"{fast_ns:,.0f}", f"{LIMIT_NS_PER_EVENT:,.0f}"],
        ["token by token in Python", f"{slow_ns:,.0f}", "-"],
    ]
    print(f"{events:,} events of {args.responses:,} responses, index {counts.indices.mean():.3f}")
    print(rig.format_table(["deadlines", "ns CPU per event", "limit"], rows))
    print("every response agrees" if agrees else "responses DISAGREE")

    is_within_limit = fast_ns <= LIMIT_NS_PER_EVENT
    return 0 if agrees and (is_within_limit or args.smoke) else 1


if __name__ == "__main__":
    sys.exit(main())
