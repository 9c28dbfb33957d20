"""Checked answers of a sweep: whether their score depends on the load. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from loadgen.core.metrics.answer_scores import ALARM_LEVEL, ScorePart, score_counts
from loadgen.core.stats.excess_test import Stratum, excess_p_value
from loadgen.runs.answers_text import format_p_value, format_score

if TYPE_CHECKING:
    from loadgen.runs.load_point_results import LoadPointResult


class AnswersUnderLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Whether responses are worse at higher load points.

    Attributes:
        is_worse: Whether they are, with a probability of a false alarm of at most 1 %.
        p_value: The probability of so clear a difference without any, for all compared load points
            together.
        up_to: The load point up to which the score is better, as text.
        below: The score of this and of all lower load points.
        above: The score of all higher load points.
    """

    is_worse: bool
    p_value: float
    up_to: str
    below: ScorePart
    above: ScorePart


def compare_load_points(points: Sequence[LoadPointResult]) -> AnswersUnderLoad | None:
    """Return whether responses are worse at higher load points than at lower ones.

    Every division of the load points into lower and higher ones is tested (Fisher's exact test),
    and the probability of a false alarm is divided among these tests (Bonferroni). All load points
    ask the same questions about equally often. Return None if fewer than two load points have
    checked answers.

    Args:
        points: The load points of one curve, in order of load.
    """
    checked_points = [point for point in points if point.answers is not None and point.valid]
    divisions = [
        _compare_parts(checked_points[:count], checked_points[count:])
        for count in range(1, len(checked_points))
    ]
    if not divisions:
        return None

    clearest = min(divisions, key=lambda division: division.p_value)
    p_value = min(1.0, clearest.p_value * len(divisions))
    return msgspec.structs.replace(clearest, p_value=p_value, is_worse=p_value < ALARM_LEVEL)


def _compare_parts(
    lower: Sequence[LoadPointResult], higher: Sequence[LoadPointResult]
) -> AnswersUnderLoad:
    """Return the comparison of lower load points with higher ones, not yet corrected for others."""
    below = _add_scores(lower)
    above = _add_scores(higher)
    stratum = Stratum(
        trials=below.checked + above.checked,
        failures=below.checked - below.correct + above.checked - above.correct,
        suspect_trials=above.checked,
        suspect_failures=above.checked - above.correct,
    )
    return AnswersUnderLoad(
        is_worse=False,
        p_value=excess_p_value([stratum]),
        up_to=lower[-1].short_label,
        below=below,
        above=above,
    )


def _add_scores(points: Sequence[LoadPointResult]) -> ScorePart:
    """Return the score of the checked answers of several load points together."""
    scores = [point.answers for point in points if point.answers is not None]
    return score_counts(
        checked=sum(score.checked for score in scores),
        correct=sum(score.correct for score in scores),
    )


def describe_answers_under_load(answers: AnswersUnderLoad) -> str:
    """Return whether responses are worse at higher load points, as a sentence."""
    p_value = format_p_value(answers.p_value)
    if answers.is_worse:
        return (
            f"Responses are worse under load: {format_score(answers.above)} right above "
            f"{answers.up_to}, and {format_score(answers.below)} up to it ({p_value})."
        )
    checked = answers.below.checked + answers.above.checked
    return (
        "Checked answers: no dependence of the score on the load was found "
        f"({checked:,} responses, {p_value})."
    )
