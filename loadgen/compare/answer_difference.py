"""Compare the scores of checked answers of two sides (`loadgen run --check-answers`). Pure.

Both sides ask the same questions, so responses to the same question are compared, with an exact
test. It has a risk of its own, apart from that of the other metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

import msgspec

from loadgen.compare.difference import DetailedOutcome, Difference
from loadgen.compare.judgement import POWER
from loadgen.core import format
from loadgen.core.metrics.answer_comparison import different_p_value, merge_scores
from loadgen.core.metrics.answer_scores import AnswerScores, ScorePart
from loadgen.render.section import Section, Table, section
from loadgen.repeated.comparable_metrics import ANSWER_SCORE
from loadgen.runs.answers_text import HEADING, format_p_value, format_score

if TYPE_CHECKING:
    from loadgen.runs.comparison_side import Side


NOTICEABLE_CHANGE = 0.03
"""A comparison that would miss a change of so many percentage points has too few answers."""

EXACT_TEST = "answers are compared by an exact test, which has no interval"
"""Why the difference of the answer score has no confidence interval."""


class AnswerDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of the checked answers of a side and of the first side.

    Attributes:
        side: The name of the side.
        before: The score of all runs of the first side.
        after: The score of all runs of this side.
        p_value: The probability of so different scores if the servers do not differ.
        is_different: Whether the scores differ with the confidence of the comparison.
        needed: About how many checked answers each side needs, so that a change of the score by
            NOTICEABLE_CHANGE is found in 90 % of such comparisons.
        reason_not_judged: Why no metric of these sides is judged, such as "b is INVALID", or "".
    """

    side: str
    before: ScorePart
    after: ScorePart
    p_value: float
    is_different: bool
    needed: int = 0
    reason_not_judged: str = ""

    @property
    def outcome(self) -> DetailedOutcome:
        """Whether this side is better or worse.

        Without a difference, the outcome is inconclusive if too few answers were checked to find a
        change of a few percentage points, or if the sides may not be judged.
        """
        if self.is_different:
            score_before = self.before.score or 0.0
            score_after = self.after.score or 0.0
            return "better" if score_after > score_before else "worse"
        if self.reason_not_judged or self.has_too_few_answers:
            return "inconclusive"
        return "equivalent"

    @property
    def has_too_few_answers(self) -> bool:
        """Whether a change by NOTICEABLE_CHANGE may remain unnoticed, because answers are few.

        If the sides have different numbers of answers, their harmonic mean counts, because the
        variance of the difference is the sum of the variances of both sides.
        """
        mean_checked = 2 / (1 / self.before.checked + 1 / self.after.checked)
        return mean_checked < self.needed


def compare_answers(
    first: Side, other: Side, confidence: float, reason_not_judged: str = ""
) -> AnswerDifference | None:
    """Return how the share of right answers differs between two sides.

    A side is a server with all its runs. Return None if a side has no checked answers.

    Args:
        first: The side to compare with.
        other: The side to compare.
        confidence: For example, 0.99 reports a difference if its p-value is below 0.01.
        reason_not_judged: Why no metric of these sides may be judged, or "".
    """
    first_scores = _score_side(first)
    scores = _score_side(other)
    if first_scores is None or scores is None:
        return None

    largest_p_value = 1 - confidence
    p_value = different_p_value(first_scores, scores)
    return AnswerDifference(
        side=other.name,
        before=first_scores.overall,
        after=scores.overall,
        p_value=p_value,
        is_different=not reason_not_judged and p_value < largest_p_value,
        needed=count_needed_answers(_pool_scores(first_scores, scores), largest_p_value),
        reason_not_judged=reason_not_judged,
    )


def judge_answer_score(difference: Difference, answers: AnswerDifference | None) -> Difference:
    """Return a difference with the outcome of the exact test if it is that of the answer score.

    Any other difference, and one that may not be judged, is returned unchanged.
    """
    is_answer_score = difference.metric == ANSWER_SCORE
    if not is_answer_score or answers is None or answers.reason_not_judged:
        return difference
    reason = EXACT_TEST
    if answers.outcome == "inconclusive":
        needed = format.count(answers.needed)
        reason = f"too few answers: about {needed} per side needed"
    return msgspec.structs.replace(difference, detailed_outcome=answers.outcome, reason=reason)


def compute_answer_score(side: Side) -> float | None:
    """Return the share of right answers of all runs of a side, or None without checked answers."""
    scores = _score_side(side)
    return None if scores is None else scores.overall.score


def _pool_scores(first: AnswerScores, other: AnswerScores) -> float:
    """Return the share of right answers of two sides together, both of which have answers."""
    checked_count = first.overall.checked + other.overall.checked
    return (first.overall.correct + other.overall.correct) / checked_count


def count_needed_answers(score: float, largest_p_value: float) -> int:
    """Return how many checked answers each side needs to show a change by NOTICEABLE_CHANGE.

    This is the usual sample size for two shares p1 and p2 (Fleiss, Levin and Paik 2003,
    "Statistical Methods for Rates and Proportions", section 4.2). With their mean p and the
    quantiles z of the normal distribution for the two-sided level and the power, it is

        (z_level sqrt(2 p (1 - p)) + z_power sqrt(p1 (1 - p1) + p2 (1 - p2)))^2 / (p1 - p2)^2.

    Args:
        score: The share of right answers from which it changes. It falls, unless it is too low.
        largest_p_value: A p-value below this one shows a difference.
    """
    can_fall = score >= NOTICEABLE_CHANGE
    changed_score = score - NOTICEABLE_CHANGE if can_fall else score + NOTICEABLE_CHANGE
    mean_score = (score + changed_score) / 2

    z_level = NormalDist().inv_cdf(1 - largest_p_value / 2)
    z_power = NormalDist().inv_cdf(POWER)
    variance_if_equal = 2 * mean_score * (1 - mean_score)
    variance_if_different = score * (1 - score) + changed_score * (1 - changed_score)

    standard_errors = z_level * math.sqrt(variance_if_equal)
    standard_errors += z_power * math.sqrt(variance_if_different)
    return math.ceil((standard_errors / NOTICEABLE_CHANGE) ** 2)


def _score_side(side: Side) -> AnswerScores | None:
    """Return the scores of the checked answers of all runs of a side, or None if it has none."""
    scores = [run.summary.answers for run in side.runs if run.summary.answers is not None]
    merged = merge_scores(scores)
    return merged if merged.overall.checked else None


def build_answer_section(differences: Sequence[AnswerDifference]) -> Section:
    """Return the section with a table of the share of right answers of each side.

    A section without rows is not printed.
    """
    headings = ("side", "right before", "right", "checked", "outcome")
    rows = []
    for difference in differences:
        row = (
            difference.side,
            format_score(difference.before),
            format_score(difference.after),
            format.count(difference.after.checked),
            _describe_outcome(difference),
        )
        rows.append(row)
    return section(HEADING, Table(headings, rows), *_list_needed_answers(differences))


def _describe_outcome(difference: AnswerDifference) -> str:
    """Return whether a side is better or worse, with the p-value: "worse (p = 0.002)"."""
    if difference.reason_not_judged:
        return f"not judged ({difference.reason_not_judged})"

    outcome = difference.outcome
    if outcome == "inconclusive":
        return outcome

    text = "no significant difference" if outcome == "equivalent" else outcome
    return f"{text} ({format_p_value(difference.p_value)})"


def _list_needed_answers(differences: Sequence[AnswerDifference]) -> Iterator[str]:
    """Yield a sentence for each inconclusive side, with the number of answers that is needed."""
    points = f"{NOTICEABLE_CHANGE * 100:g} percentage points"
    for difference in differences:
        is_judged = not difference.reason_not_judged
        if is_judged and difference.outcome == "inconclusive":
            before = format.count(difference.before.checked)
            after = format.count(difference.after.checked)
            yield (
                f"{difference.side}: inconclusive, because only {before} and {after} answers were "
                f"checked. To find a change of {points}, about {format.count(difference.needed)} "
                "per side are needed."
            )
