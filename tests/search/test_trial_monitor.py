"""The monitor of a trial: its early decisions against full runs of a small queue."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from synthetic_searches import GOAL, TTFT, S, queue_rows

from loadgen.core.results.record import ROW, STATUS
from loadgen.core.slo import Slo, Term
from loadgen.core.stats.early_stopping import allowed_over
from loadgen.search.goal import Goal
from loadgen.search.trial_monitor import PlannedLoad, TrialMonitor
from loadgen.search.trial_outcome import _describe_exceeded_terms

pytestmark = pytest.mark.commands


def decide(rows: Any, *, early_under: bool = True) -> tuple[str | None, int]:
    """How a monitor that looks every 5 s decides, and when (s)."""
    monitor = TrialMonitor(GOAL, PlannedLoad(rows["due_ns"]), may_pass_early=early_under)
    rows = rows[np.argsort(rows["done_ns"], kind="stable")]
    for now in range(5, int(rows["done_ns"].max() / S) + 1, 5):
        begin, end = np.searchsorted(rows["done_ns"], ((now - 5) * S, now * S), "right")
        if decision := monitor.add_rows(now * S, rows[begin:end]):
            return decision.outcome, now
    return None, 0


def meets_slo(rows: Any) -> bool:
    return bool(GOAL.find_misses(rows).sum() <= GOAL.allowed_misses(len(rows))[0])


def with_quantile(term: Term, quantile: float) -> Term:
    return Term(metric=term.metric, limit_ns=term.limit_ns, quantile=quantile)


def test_a_monitor_judges_each_request_once() -> None:
    class Counting(Goal, frozen=True):
        def find_misses(self, rows: Any) -> Any:
            judged.append(len(rows))
            return super().find_misses(rows)

    judged: list[int] = []
    rows = queue_rows(rate=80, seed=1)
    monitor = TrialMonitor(Counting(slo=GOAL.slo), PlannedLoad(rows["due_ns"]))
    order = np.argsort(rows["done_ns"])
    for some in np.array_split(order, 100):
        monitor.add_rows(int(rows["done_ns"][some[-1]]), rows[some])
    assert sum(judged) == len(rows)


@given(st.integers(1, 3000), st.sampled_from([0.5, 0.9, 0.99, 0.999]), st.data())
def test_allowed_misses_keep_the_quantile_within_its_limit(
    n: int, p: float, data: st.DataObject
) -> None:
    """The same as sorted[floor(n * p)] <= limit."""
    over = data.draw(st.integers(0, n))
    values = np.sort(np.array([1] * (n - over) + [3] * over))
    goal = Goal(slo=Slo(terms=(with_quantile(TTFT, p),)))
    assert (over <= goal.allowed_misses(n)[0]) == (values[min(int(n * p), n - 1)] <= 2)


def test_early_stopping_and_a_joint_share_limit_the_misses() -> None:
    assert Goal(slo=Slo(terms=(TTFT,)), mlperf=True).allowed_misses(24576) == (allowed_over(24576),)
    assert Goal(slo=Slo(terms=(TTFT,)), mlperf=True).allowed_misses(400) == (-1,)
    assert Goal(slo=Slo(terms=(TTFT,), goodput_share=0.95)).allowed_misses(1000) == (9, 50)


def test_failed_and_dropped_requests_miss_every_term() -> None:
    rows = queue_rows(50, 1, 2)
    rows["status"][:3] = STATUS["failed"]
    rows["status"][3] = STATUS["dropped"]
    goal = Goal(slo=Slo(terms=(TTFT,), goodput_share=0.9))
    assert goal.find_misses(rows)[:, :4].all()
    assert goal.find_misses(rows).sum(axis=1).tolist() == [4, 4]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.floats(70, 140))
def test_a_trial_that_fails_early_would_fail_at_full_length(seed: int, rate: float) -> None:
    rows = queue_rows(rate, seed)
    outcome, _ = decide(rows, early_under=False)
    assert outcome in (None, "over")
    if outcome == "over":
        assert not meets_slo(rows)


def test_a_trial_far_above_the_capacity_fails_early() -> None:
    for seed in range(5):
        outcome, at = decide(queue_rows(150, seed))
        assert (outcome, at < 40) == ("over", True)


def test_a_trial_far_below_the_capacity_passes_early_and_at_full_length() -> None:
    for seed in range(3):
        rows = queue_rows(60, seed, 300)
        outcome, at = decide(rows)
        assert (outcome, meets_slo(rows)) == ("under", True)
        assert at < 280


def test_a_growing_queue_does_not_pass_early() -> None:
    """At 4 % above the capacity no request misses for a minute, so a naive bound would pass."""
    wrong = 0
    for seed in range(10):
        rows = queue_rows(104, seed, 240)
        outcome, _ = decide(rows)
        wrong += outcome == "under" and not meets_slo(rows)
    assert wrong == 0


def test_unresolved_requests_count_as_misses() -> None:
    rows = queue_rows(60, 3, 300)
    stuck = rows["due_ns"] > 60 * S
    rows["done_ns"][stuck & (rows["slot"] % 50 == 0)] = (
        400 * S
    )  # one in fifty never comes back in time
    assert decide(rows)[0] != "under"


def test_a_monitor_applies_the_limits_of_mlperf() -> None:
    """tpot_mlperf is a metric like any other."""
    goal = replace(GOAL, slo=Slo(terms=(Term(metric="tpot_mlperf", limit_ns=99_000_000),)))
    rows = queue_rows(50, 1, 5)
    assert goal.find_misses(rows).all()  # a second over ten tokens is 100 ms


def test_misses_are_described_with_the_numbers_that_the_allowed_number_follows_from() -> None:
    goal = Goal(slo=Slo(terms=(with_quantile(TTFT, 0.75),), goodput_share=0.9))
    ttft_allowed, goodput_allowed = goal.allowed_misses(3181)

    ttft_text = goal.describe_misses(0, 954, 3181, ttft_allowed)
    assert "954 of 3,181" in ttft_text and "25 %: 795" in ttft_text

    goodput_text = goal.describe_misses(1, 954, 3181, goodput_allowed)
    assert "10 %" in goodput_text and "318" in goodput_text


def test_requests_whose_outcome_is_open_are_in_neither_number_of_a_missed_term() -> None:
    goal = Goal(slo=Slo(terms=(with_quantile(TTFT, 0.5),)))
    rows = np.zeros(1000, ROW)
    rows["due_ns"] = 0
    rows["done_ns"] = 10 * S
    rows["first_token_ns"] = 10 * S
    rows["last_token_ns"] = 10 * S
    rows["status"] = STATUS["ok"]
    rows["status"][:8] = STATUS["unfinished"]
    rows["first_token_ns"][:8] = -1
    rows["done_ns"][:8] = 1

    (sentence,) = _describe_exceeded_terms(goal, rows, assumes_unfinished_met=False)
    assert "992 of 992 requests" in sentence and "50 %: 495" in sentence
