"""The change of the fluidity index has an interval, also between two single runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import run_fixtures
from numpy.typing import NDArray
from queueing import TOKENS, fail, rows

from loadgen.compare import comparison
from loadgen.compare.difference import Difference
from loadgen.compare.estimates import estimate_side
from loadgen.compare.exit_code import comparison_exit_code
from loadgen.compare.fluidity_estimate import estimate_fluidity_index
from loadgen.compare.thresholds import check_thresholds, parse_thresholds
from loadgen.core.errors import INCONCLUSIVE, SLO_MISSED
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.fluidity import NO_TOKEN_TIMES
from loadgen.core.metrics.token_deadlines import count_deadlines_of_run, count_token_deadlines
from loadgen.core.results.gaps import RequestGaps
from loadgen.core.results.record import STATUS
from loadgen.core.run_summary import summarize
from loadgen.core.slo import FluidityTerm, Slo, TokenDeadlines
from loadgen.core.workload import load, read_flags
from loadgen.repeated.comparable_metrics import find_metric
from loadgen.runs.comparison_side import ComparedRun, Side
from loadgen.runs.kind import compare_side

MS = 1_000_000
DEADLINES = TokenDeadlines(150 * MS, 12 * MS)
SLO = Slo(
    fluidity=FluidityTerm(
        least_index=0.5,
        quantile=0.5,
        first_token_ns=DEADLINES.first_token_ns,
        per_token_ns=DEADLINES.per_token_ns,
    )
)
INDEX = find_metric("fluidity.index")


def gaps_of(records: NDArray[np.void]) -> list[RequestGaps]:
    """Return the gaps of records whose responses have equal gaps."""
    ok = records[records["status"] == STATUS["ok"]]
    counts = np.full(len(ok), TOKENS - 1)
    return [RequestGaps(ok["slot"], counts, np.repeat(ok["max_gap_ns"], TOKENS - 1))]


def side(records: NDArray[np.void], name: str, *, has_gaps: bool = True) -> Side:
    """Return a side of one run with these records, whose SLO has token deadlines."""
    manifest = run_fixtures.manifest(name, len(records), slo=SLO)
    gaps = gaps_of(records) if has_gaps else None
    run = ComparedRun(
        name=name,
        summary=summarize(manifest, records, request_gaps=gaps),
        manifest=manifest,
        rows=records,
        deadline_counts=count_deadlines_of_run(manifest, records, gaps),
    )
    return Side(name=name, runs=(run,))


def change_of_index(first: Side, other: Side) -> Difference:
    """Return how the fluidity index of two sides differs, judged with no other metric."""
    result = comparison.compare([first, other])
    (difference,) = [part for part in result.differences if part.metric == "fluidity.index"]
    return difference


def test_the_fluidity_change_of_two_equal_servers_has_an_interval_around_zero() -> None:
    difference = change_of_index(side(rows(1, 1500), "a"), side(rows(2, 1500), "b"))
    assert difference.change is not None
    assert difference.low is not None and difference.high is not None
    assert difference.low < 0 < difference.high
    assert difference.low < difference.change < difference.high
    assert difference.outcome in ("equivalent", "inconclusive")


def test_a_slower_server_has_a_lower_fluidity_index() -> None:
    difference = change_of_index(side(rows(1, 1500), "a"), side(rows(2, 1500, slower=1.3), "b"))
    assert difference.outcome == "different"
    assert difference.high is not None and difference.high < 0


def test_the_standard_error_of_the_fluidity_index_equals_its_variation_between_runs() -> None:
    run_count = 60
    indices = []
    estimates = []
    template = side(rows(1, 200), "a").runs[0]
    for seed in range(run_count):
        records = rows(1000 + seed, 800, rate=7.0)
        counts = count_token_deadlines([Columns(records)], gaps_of(records), DEADLINES)
        index = 1 - counts.missed.sum() / counts.deadlines.sum()
        run = ComparedRun(name="a", summary=template.summary, deadline_counts=counts)
        estimate = estimate_fluidity_index(
            Side(name="a", runs=(run,)), [Columns(records)], index
        ).estimate
        assert estimate is not None
        indices.append(index)
        estimates.append(estimate)

    true_index = float(np.mean(indices))
    intervals = [estimate.interval(float) for estimate in estimates]
    covering = [interval for interval in intervals if interval.low <= true_index <= interval.high]
    assert len(covering) >= 0.88 * run_count
    mean_error = float(np.mean([estimate.error for estimate in estimates]))
    assert 0.7 < mean_error / np.std(indices, ddof=1) < 1.6


def test_failed_requests_have_no_token_deadlines() -> None:
    records = rows(3, 600)
    fail(records, 0.2)
    failed_side = side(records, "b")
    difference = change_of_index(side(rows(1, 600), "a"), failed_side)
    fluidity = failed_side.runs[0].summary.fluidity
    assert fluidity is not None and fluidity.requests < 500
    assert difference.after == fluidity.index and difference.low is not None


def test_the_fluidity_index_of_a_run_without_a_missed_deadline_has_an_error_above_zero() -> None:
    records = rows(3, 200)
    never_missed = TokenDeadlines(10**12, 10**12)
    counts = count_token_deadlines([Columns(records)], gaps_of(records), never_missed)
    template = side(rows(1, 200), "a").runs[0]
    run = ComparedRun(name="a", summary=template.summary, deadline_counts=counts)
    estimate = estimate_fluidity_index(Side(name="a", runs=(run,)), [Columns(records)], 1.0)
    assert estimate.estimate is not None
    assert 0.005 < estimate.estimate.error < 0.01


@pytest.mark.parametrize(
    ("records", "has_gaps", "reason"),
    [(rows(3, 70), True, "only 70 samples"), (rows(3, 300), False, NO_TOKEN_TIMES)],
)
def test_a_fluidity_index_without_enough_responses_has_a_reason_and_no_interval(
    records: NDArray[np.void], has_gaps: bool, reason: str
) -> None:
    assert INDEX is not None
    result = estimate_side(side(records, "b", has_gaps=has_gaps), INDEX, is_repeated=False)
    assert result.estimate is None and reason in result.reason


MIX = """name: mix
requests:
  classes:
    chat: {weight: 1, requests: {input_tokens: 60, output_tokens: 5},
           slo: {fluidity: {index: 50%, at: p50, ttft: 30ms, tpot: 30ms}}}
    batch: {weight: 1, requests: {input_tokens: 60, output_tokens: 5}, slo: {e2e: 9s, at: p50}}
"""


def test_the_fluidity_index_of_a_request_class_is_compared(tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text(MIX)
    sides = []
    for seed in ("1", "2"):
        flags = read_flags(request_rate="20", num_requests="400", warmup="0", seed=seed)
        out = tmp_path / seed
        execute(load(str(tmp_path / "mix.yaml"), flags), Settings(url="sim:gb300-vm", out=out))
        sides.append(compare_side(out))

    texts = [
        "classes.chat.fluidity.index < 100%",
        "classes.chat.fluidity.index < 1%",
        "classes.chat.tokens.output_per_s > 1",
        "classes.chat.e2e.p50 > 1us",
        "classes.batch.fluidity.index < 1%",
        "classes.other.e2e.p50 > 1us",
        "fluidity.index < 1%",
    ]
    conditions = parse_thresholds(texts)
    result = comparison.compare(sides, extra_metrics=[condition.metric for condition in conditions])
    outcomes = list(check_thresholds(conditions, result))
    assert [outcome.condition for outcome in outcomes] == texts
    assert [outcome.failed for outcome in outcomes] == [True, False, True, True, None, None, None]
    assert "classes.chat.fluidity.index" in outcomes[-1].text
    assert comparison_exit_code(result, outcomes) == SLO_MISSED
    assert comparison_exit_code(result, outcomes[-2:]) == INCONCLUSIVE

    result = comparison.compare(sides)
    by_metric = {difference.metric: difference for difference in result.differences}
    assert "fluidity.index" not in by_metric
    assert "classes.batch.fluidity.index" not in by_metric
    difference = by_metric["classes.chat.fluidity.index"]
    assert difference.before is not None and 0.5 < difference.before < 1
    assert difference.low is not None and difference.high is not None
