"""A comparison of checked answers is inconclusive if it would miss a change of a few percent."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest
import run_fixtures
from queueing import rows, send_late

from loadgen.compare import compare_text, comparison, thresholds
from loadgen.compare.answer_difference import (
    NOTICEABLE_CHANGE,
    AnswerDifference,
    build_answer_section,
    count_needed_answers,
)
from loadgen.compare.judgement import POWER
from loadgen.core.errors import CombinedError
from loadgen.core.metrics.answer_comparison import different_p_value
from loadgen.core.metrics.answer_objective import AnswersObjective
from loadgen.core.metrics.answer_scores import AnswerScores, score_counts
from loadgen.core.run_summary import summarize
from loadgen.core.slo import Slo, Term
from loadgen.render import text
from loadgen.repeated.comparable_metrics import ANSWER_SCORE
from loadgen.runs.comparison_side import ComparedRun, Side

RISK = 0.05
LIMIT = Term(metric="e2e", limit_ns=2_000_000_000)


def difference_of(checked_before: int, checked: int) -> AnswerDifference:
    return AnswerDifference(
        side="after",
        before=score_counts(checked_before, checked_before),
        after=score_counts(checked, checked),
        p_value=1.0,
        is_different=False,
        needed=count_needed_answers(1.0, RISK),
    )


def test_the_needed_number_is_that_of_two_proportions() -> None:
    """By hand: (1.960 sqrt(2 0.985 0.015) + 1.2816 sqrt(0.97 0.03))^2 / 0.03^2 = 342.1."""
    assert count_needed_answers(1.0, 0.05) == 343
    assert count_needed_answers(1.0, 0.01) > 343
    assert count_needed_answers(0.9, 0.05) > count_needed_answers(1.0, 0.05)
    assert count_needed_answers(0.0, 0.05) == 343


@pytest.mark.parametrize("score", [1.0, 0.9])
def test_the_needed_number_finds_the_change_with_the_stated_power(score: float) -> None:
    """Both sides have the needed number of answers, to questions that are equally difficult."""
    needed = count_needed_answers(score, RISK)
    rng = np.random.default_rng(1)

    def draw_scores(share: float) -> AnswerScores:
        correct = int(rng.binomial(needed, share))
        wrong = needed - correct
        return AnswerScores(
            overall=score_counts(needed, correct),
            questions=1,
            checked_by_question=f"{needed}",
            wrong_by_question=f"{wrong}",
        )

    trials = 400
    detected_count = sum(
        different_p_value(draw_scores(score), draw_scores(score - NOTICEABLE_CHANGE)) < RISK
        for _ in range(trials)
    )
    # The exact test is a little stricter than the normal distribution of the formula.
    assert POWER - 0.1 < detected_count / trials < POWER + 0.06


@pytest.mark.parametrize(
    ("checked_before", "checked", "has_too_few"),
    [
        (14, 10, True),
        (342, 343, True),
        (343, 343, False),
        (200, 10_000, False),
        (150, 10_000, True),
    ],
)
def test_few_answers_are_inconclusive(checked_before: int, checked: int, has_too_few: bool) -> None:
    difference = difference_of(checked_before, checked)
    assert difference.has_too_few_answers is has_too_few
    report = text.render_sections([build_answer_section([difference])])
    assert ("inconclusive" in report) is has_too_few
    assert ("about 343" in " ".join(report.split())) is has_too_few
    assert ("no significant difference" in report) is not has_too_few


def side_with_answers(name: str, seed: int, wrong: int, *, is_late: bool = False) -> Side:
    """Return a side of one run with 400 checked answers to four questions, some of them wrong."""
    records = rows(seed, 600)
    if is_late:
        send_late(records)
    manifest = run_fixtures.manifest(name, len(records), slo=Slo(terms=(LIMIT,)))
    answers = AnswerScores(
        overall=score_counts(400, 400 - wrong),
        questions=4,
        checked_by_question="100 100 100 100",
        wrong_by_question=f"{wrong} 0 0 0",
    )
    summary = msgspec.structs.replace(summarize(manifest, records), answers=answers)
    run = ComparedRun(name=name, summary=summary, manifest=manifest, rows=records)
    return Side(name=name, runs=(run,))


def with_objective(compared_side: Side, limit: float) -> Side:
    """Return a side whose SLO also requires this share of right answers."""
    (run,) = compared_side.runs
    assert run.summary.answers is not None
    objective = AnswersObjective(limit=limit, value=1.0, met=True, count=400)
    answers = msgspec.structs.replace(run.summary.answers, objective=objective)
    summary = msgspec.structs.replace(run.summary, answers=answers)
    return Side(name=compared_side.name, runs=(msgspec.structs.replace(run, summary=summary),))


def test_the_headline_names_worse_answers() -> None:
    result = comparison.compare([side_with_answers("a", 1, 0), side_with_answers("b", 2, 40)])
    (row,) = [part for part in result.differences if part.metric == ANSWER_SCORE]
    assert (row.detailed_outcome, row.before, row.after) == ("worse", 1.0, 0.9)
    assert "worse in right answers" in compare_text.summarize_differences(result, "b")
    assert result.answers[0].outcome == "worse"
    cases = {case.name: case for case in compare_text.list_junit_cases(result, [])}
    assert "worse" in cases["right answers"].text


def test_answers_of_an_invalid_run_are_not_judged() -> None:
    result = comparison.compare(
        [side_with_answers("a", 1, 0), side_with_answers("b", 2, 40, is_late=True)]
    )
    (answers,) = result.answers
    assert not result.valid and not answers.is_different
    assert answers.reason_not_judged == "b is INVALID"
    (row,) = [part for part in result.differences if part.metric == ANSWER_SCORE]
    assert (row.outcome, row.reason) == ("inconclusive", "b is INVALID")
    assert "p =" not in text.render_sections([build_answer_section(result.answers)])


@pytest.mark.parametrize(
    ("condition", "has_failed"),
    [
        ("answers.overall.score < 95%", True),
        ("answers.overall.score < 85%", False),
        ("answers.overall.score < -2%", None),
    ],
)
def test_a_condition_limits_the_share_of_right_answers(
    condition: str, has_failed: bool | None
) -> None:
    conditions = thresholds.parse_thresholds([condition])
    result = comparison.compare(
        [side_with_answers("a", 1, 0), side_with_answers("b", 2, 40)],
        extra_metrics=[ANSWER_SCORE],
    )
    (outcome,) = thresholds.check_thresholds(conditions, result)
    assert outcome.failed is has_failed


def test_a_condition_on_answers_that_no_run_checked_is_undecided() -> None:
    sides = []
    for number, name in enumerate("ab"):
        (run,) = side_with_answers(name, number, 0).runs
        summary = msgspec.structs.replace(run.summary, answers=None)
        sides.append(Side(name=name, runs=(msgspec.structs.replace(run, summary=summary),)))

    conditions = thresholds.parse_thresholds(["answers.overall.score < 95%"])
    result = comparison.compare(sides, extra_metrics=[ANSWER_SCORE])
    (outcome,) = thresholds.check_thresholds(conditions, result)
    assert outcome.failed is None
    assert not [part for part in comparison.compare(sides).differences if "answers" in part.metric]


def test_an_unknown_metric_of_answers_names_the_known_one() -> None:
    with pytest.raises(CombinedError, match=re.escape(ANSWER_SCORE)):
        thresholds.parse_thresholds(["answers.share < 99%"])


@pytest.mark.parametrize("has_other_limit", [False, True])
def test_slo_attainment_is_compared_if_only_the_limit_of_answers_differs(
    has_other_limit: bool,
) -> None:
    first = with_objective(side_with_answers("a", 1, 0), 0.9)
    other = with_objective(side_with_answers("b", 2, 0), 0.95)
    if has_other_limit:
        (run,) = other.runs
        goodput = msgspec.structs.replace(run.summary.goodput, share_limit=0.5)
        summary = msgspec.structs.replace(run.summary, goodput=goodput)
        other = Side(name="b", runs=(msgspec.structs.replace(run, summary=summary),))

    result = comparison.compare([first, other])
    (row,) = [part for part in result.differences if part.metric == "goodput.share"]
    assert row.is_compared is not has_other_limit
    assert (row.low is not None) is not has_other_limit

    report = text.render(compare_text.build_report(result), full=False)
    assert ("not compared" in report) is has_other_limit
    assert ("Not compared: SLO attainment" in report) is has_other_limit
    counted = sum(part.outcome == "inconclusive" for part in result.differences)
    headline = compare_text.summarize_differences(result, "b")
    assert (f"inconclusive in {counted} " in headline) is not has_other_limit
