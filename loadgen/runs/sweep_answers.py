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
    """Return whether more responses are wrong at higher loads than at lower loads.

    Each way to divide the load points into lower and higher loads is tested. Of loads 1, 2 and 3,
    the higher loads are 2 and 3, or only 3. The smallest p-value is multiplied by the number of
    tests (Bonferroni), so that many load points do not cause more false alarms.

    Args:
        points: The load points, in order of load.

    Returns:
        The division with the smallest p-value, or None with fewer than two checked load points.
    """
    checked_points = [
        _CheckedPoint(point.short_label, point.answers)
        for point in points
        if point.answers is not None and point.valid
    ]

    divisions = []
    for lower_count in range(1, len(checked_points)):
        lower_points = checked_points[:lower_count]
        higher_points = checked_points[lower_count:]
        divisions.append(_compare_parts(lower_points, higher_points))

    if not divisions:
        return None

    clearest = min(divisions, key=lambda division: division.p_value)
    corrected_p_value = min(1.0, clearest.p_value * len(divisions))
    is_worse = corrected_p_value < ALARM_LEVEL
    return msgspec.structs.replace(clearest, p_value=corrected_p_value, is_worse=is_worse)


class _CheckedPoint(NamedTuple):
    """A load point with checked answers: its load as text, and their scores."""

    label: str
    answers: AnswerScores


def _compare_parts(
    lower: Sequence[_CheckedPoint], higher: Sequence[_CheckedPoint]
) -> AnswersUnderLoad:
    """Return the score at lower loads and at higher loads, with the p-value of one exact test.

    The verdict `is_worse` is not yet known: it depends on how many tests are done.
    """
    below = merge_scores([point.answers for point in lower])
    above = merge_scores([point.answers for point in higher])
    p_value = more_wrong_p_value(below, above)
    highest_lower_point = lower[-1]

    return AnswersUnderLoad(
        is_worse=False,
        p_value=p_value,
        up_to=highest_lower_point.label,
        below=below.overall,
        above=above.overall,
    )


def describe_answers_under_load(answers: AnswersUnderLoad) -> str:
    """Return whether more responses are wrong at higher loads, as a sentence for a report."""
    p_value = format_p_value(answers.p_value)
    if answers.is_worse:
        score_above = format_score(answers.above)
        score_below = format_score(answers.below)
        return (
            f"Responses are worse under load: {score_above} right above "
            f"{answers.up_to}, and {score_below} up to it ({p_value})."
        )

    checked = answers.below.checked + answers.above.checked
    return (
        "Checked answers: no dependence of the score on the load was found "
        f"({checked:,} responses, {p_value})."
    )
