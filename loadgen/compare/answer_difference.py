"""Compare the scores of checked answers of two sides (`loadgen run --check-answers`). Pure.

Both sides ask the same questions, so responses to the same question are compared, with an exact
test. It has a risk of its own, apart from that of the other metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from loadgen.core import format
from loadgen.core.metrics.answer_comparison import different_p_value, merge_scores
from loadgen.core.metrics.answer_scores import AnswerScores, ScorePart
from loadgen.render.section import Section, Table, section
from loadgen.runs.answers_text import HEADING, format_p_value, format_score

if TYPE_CHECKING:
    from loadgen.runs.comparison_side import Side


class AnswerDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of the checked answers of a side and of the first side.

    Attributes:
        side: The name of the side.
        before: The score of all runs of the first side.
        after: The score of all runs of this side.
        p_value: The probability of so different scores if the servers do not differ.
        is_different: Whether the scores differ with the confidence of the comparison.
    """

    side: str
    before: ScorePart
    after: ScorePart
    p_value: float
    is_different: bool


def compare_answers(sides: Sequence[Side], confidence: float) -> Iterator[AnswerDifference]:
    """Yield how the share of right answers differs between each side and the first side.

    A side is a server with all its runs. Sides without checked answers are left out.

    Args:
        sides: The sides. All others are compared with the first side.
        confidence: For example, 0.99 reports a difference if its p-value is below 0.01.
    """
    first_scores = _score_side(sides[0])
    if first_scores is None:
        return

    largest_p_value = 1 - confidence
    for side in sides[1:]:
        scores = _score_side(side)
        if scores is None:
            continue

        p_value = different_p_value(first_scores, scores)
        yield AnswerDifference(
            side=side.name,
            before=first_scores.overall,
            after=scores.overall,
            p_value=p_value,
            is_different=p_value < largest_p_value,
        )


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
    return section(HEADING, Table(headings, rows))


def _describe_outcome(difference: AnswerDifference) -> str:
    """Return whether a side is better or worse, with the p-value: "worse (p = 0.002)"."""
    p_value = format_p_value(difference.p_value)
    if not difference.is_different:
        return f"no significant difference ({p_value})"

    score_before = difference.before.score or 0.0
    score_after = difference.after.score or 0.0
    direction = "better" if score_after > score_before else "worse"
    return f"{direction} ({p_value})"
