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
    """Yield how the checked answers of each side differ from those of the first side.

    Sides without checked answers are left out.
    """
    first_score = _score_side(sides[0])
    if first_score is None:
        return
    for side in sides[1:]:
        score = _score_side(side)
        if score is None:
            continue
        p_value = different_p_value(first_score, score)
        yield AnswerDifference(
            side=side.name,
            before=first_score.overall,
            after=score.overall,
            p_value=p_value,
            is_different=p_value < 1 - confidence,
        )


def _score_side(side: Side) -> AnswerScores | None:
    """Return the scores of the checked answers of all runs of a side, or None if it has none."""
    scores = [run.summary.answers for run in side.runs if run.summary.answers is not None]
    merged = merge_scores(scores)
    return merged if merged.overall.checked else None


def build_answer_section(differences: Sequence[AnswerDifference]) -> Section:
    """Return the section with the scores of each side. It disappears without checked answers."""
    rows = [
        (
            difference.side,
            format_score(difference.before),
            format_score(difference.after),
            format.count(difference.after.checked),
            _describe_outcome(difference),
        )
        for difference in differences
    ]
    columns = ("side", "right before", "right", "checked", "outcome")
    return section(HEADING, Table(columns, rows))


def _describe_outcome(difference: AnswerDifference) -> str:
    """Return whether the scores of two sides differ, with the p-value of the test."""
    p_value = format_p_value(difference.p_value)
    if not difference.is_different:
        return f"no significant difference ({p_value})"
    is_better = (difference.after.score or 0.0) > (difference.before.score or 0.0)
    return f"{'better' if is_better else 'worse'} ({p_value})"
