"""The objective on checked answers: met, missed or undecided by the interval of the score."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.metrics.answer_objective import (
    count_needed_answers,
    include_answers_outcome,
    judge_answers_objective,
)
from loadgen.core.metrics.answer_scores import score_counts
from loadgen.core.metrics.goodput import Goodput
from loadgen.core.slo import FluidityTerm, Slo, Term, describe_slo, merge_slos
from loadgen.core.stats.intervals import wilson_interval

SLO = Slo(answers_share=0.95)


@pytest.mark.parametrize(
    ("checked", "correct", "is_met"),
    [
        (72, 72, None),  # 94.9 to 100 %
        (73, 73, True),  # 95.0 to 100 %
        (1000, 950, None),  # on the limit
        (1000, 970, True),
        (1000, 937, None),
        (1000, 936, False),
        (0, 0, None),
    ],
)
def test_an_answers_objective_is_decided_only_if_the_interval_excludes_its_limit(
    checked: int, correct: int, is_met: bool | None
) -> None:
    objective = judge_answers_objective(SLO, score_counts(checked, correct))
    assert objective is not None
    assert objective.met is is_met
    assert (objective.undecided == "") is (is_met is not None)
    assert (objective.count, objective.wrong) == (checked, checked - correct)


@given(
    limit=st.floats(0.01, 0.99),
    share=st.floats(0, 1),
)
def test_the_needed_number_of_answers_is_the_smallest_that_decides(
    limit: float, share: float
) -> None:
    needed = count_needed_answers(limit, share)
    if needed is None or needed > 10**9:
        return  # so close to the limit that rounding decides

    def contains_limit(count: int) -> bool:
        low, high = wilson_interval(share, count)
        return low < limit < high

    tolerance = 1 + needed // 10**6
    assert not contains_limit(needed + tolerance)
    assert needed <= tolerance or contains_limit(needed - tolerance)


def test_the_needed_number_of_answers_assumes_correct_ones_if_none_was_checked() -> None:
    assert count_needed_answers(0.95, None) == 73
    assert count_needed_answers(0.95, 0.95) is None


def test_an_slo_without_an_answers_objective_has_no_result_of_it() -> None:
    part = score_counts(10, 10)
    assert judge_answers_objective(None, part) is None
    assert judge_answers_objective(Slo(), part) is None
    assert include_answers_outcome(Goodput(met=True), None, Slo()).met is True


@pytest.mark.parametrize(
    ("is_rest_met", "checked", "is_met"),
    [
        (True, 1000, True),
        (None, 1000, None),
        (False, 1000, False),
        (True, 10, None),
        (False, 10, False),
    ],
)
def test_the_slo_is_met_if_all_its_objectives_are(
    is_rest_met: bool | None, checked: int, is_met: bool | None
) -> None:
    slo = Slo(terms=(Term(metric="ttft", limit_ns=10**9),), answers_share=0.95)
    objective = judge_answers_objective(slo, score_counts(checked, checked))
    assert include_answers_outcome(Goodput(met=is_rest_met), objective, slo).met is is_met


def test_an_undecided_fluidity_objective_makes_the_slo_undecided() -> None:
    slo = Slo(fluidity=FluidityTerm(least_index=0.9), answers_share=0.95)
    objective = judge_answers_objective(slo, score_counts(1000, 1000))
    assert include_answers_outcome(Goodput(), objective, slo).met is None
    assert include_answers_outcome(Goodput(), objective, SLO).met is True


def test_an_added_answers_objective_replaces_the_one_before() -> None:
    merged = merge_slos(SLO, Slo(answers_share=0.9))
    assert merged.answers_share == 0.9
    assert merge_slos(SLO, Slo()).answers_share == 0.95
    assert "95 %" in describe_slo(SLO)
