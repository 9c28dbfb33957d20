"""Checked answers of a sweep: whether their score depends on the load. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadgen.core.metrics.answer_comparison import merge_scores, more_wrong_p_value
from loadgen.core.metrics.answer_scores import ALARM_LEVEL, AnswerScores, ScorePart
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

    Every division of the load points into lower and higher ones is tested, and the probability of a
    false alarm is divided among these tests (Bonferroni). Each test is exact and compares responses
    to the same question only. Return None if fewer than two load points have checked answers.

    Args:
        points: The load points of one curve, in order of load.
    """
    checked_points = [
        _CheckedPoint(point.short_label, point.answers)
        for point in points
        if point.answers is not None and point.valid
    ]
    divisions = [
        _compare_parts(checked_points[:count], checked_points[count:])
        for count in range(1, len(checked_points))
    ]
    if not divisions:
        return None

    clearest = min(divisions, key=lambda division: division.p_value)
    p_value = min(1.0, clearest.p_value * len(divisions))
    return msgspec.structs.replace(clearest, p_value=p_value, is_worse=p_value < ALARM_LEVEL)


class _CheckedPoint(NamedTuple):
    """A load point with checked answers: its load as text, and their scores."""

    label: str
    answers: AnswerScores


def _compare_parts(
    lower: Sequence[_CheckedPoint], higher: Sequence[_CheckedPoint]
) -> AnswersUnderLoad:
    """Return the comparison of lower load points with higher ones, not yet corrected for others."""
    below = merge_scores([point.answers for point in lower])
    above = merge_scores([point.answers for point in higher])
    return AnswersUnderLoad(
        is_worse=False,
        p_value=more_wrong_p_value(below, above),
        up_to=lower[-1].label,
        below=below.overall,
        above=above.overall,
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
