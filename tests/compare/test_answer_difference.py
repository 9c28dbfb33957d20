"""A comparison of checked answers is inconclusive if it would miss a change of a few percent."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.compare.answer_difference import (
    NOTICEABLE_CHANGE,
    AnswerDifference,
    build_answer_section,
    count_needed_answers,
)
from loadgen.compare.judgement import POWER
from loadgen.core.metrics.answer_comparison import different_p_value
from loadgen.core.metrics.answer_scores import AnswerScores, score_counts
from loadgen.render import text

RISK = 0.05


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
