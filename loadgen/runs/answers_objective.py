"""Texts about the objective of an SLO on checked answers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.metrics.summary import Summary

if TYPE_CHECKING:
    from loadgen.core.metrics.answer_objective import AnswersObjective
    from loadgen.core.metrics.part_summaries import ClassSummary


def find_answers_objective(scope: Summary | ClassSummary) -> AnswersObjective | None:
    """Return the result of the objective on the share of right answers, or None if there is none.

    Answers are scored for the run as a whole, so a request class has no such objective.
    """
    if isinstance(scope, Summary) and scope.answers is not None:
        return scope.answers.objective
    return None


def format_measured_answers(objective: AnswersObjective) -> str:
    """Return the share of right answers as a percentage, or "not measured" if none was checked."""
    if objective.value is None:
        return "not measured"
    return _format_against_limit(objective.value, objective.limit)


def _format_against_limit(share: float, limit: float) -> str:
    """Return a share as a percentage with enough digits to show that it is below a limit.

    For example, 94.97 % misses a limit of 95 %, but "95.0 %" would look as if the limit were met.
    """
    rounded_share = format.percent(share)
    looks_like_limit = rounded_share == format.percent(limit)
    if share < limit and looks_like_limit:
        return f"{share * 100:.6g} %"
    return rounded_share


def format_answers_limit(objective: AnswersObjective) -> str:
    """Return the limit of the objective as users wrote it: `95 %`."""
    return f"{objective.limit * 100:.6g} %"


def count_wrong_answers(objective: AnswersObjective) -> str:
    """Return how many of the checked answers are wrong: `3 of 150`."""
    return f"{format.count(objective.wrong)} of {format.count(objective.count)}"


def describe_missed_answers(objective: AnswersObjective) -> str:
    """Return a missed objective: `93 % of the answers are right, limit 95 % (7 of 100 wrong)`."""
    share = format_measured_answers(objective)
    limit = format_answers_limit(objective)
    return (
        f"{share} of the answers are right, limit {limit} ({count_wrong_answers(objective)} wrong)"
    )


def describe_answers_result(objective: AnswersObjective) -> str:
    """Return whether an SLO is met whose only objective is the share of right answers.

    The result is a sentence with the numbers, or with the reason if it is undecided.
    """
    if objective.met is None:
        return f"SLO undecided: {objective.text}: {objective.undecided}."
    if not objective.met:
        return f"SLO missed: {describe_missed_answers(objective)}."
    share = format_measured_answers(objective)
    checked = format.counted(objective.count, "answer")
    return f"SLO met: {objective.text}, and {share} of {checked} are right."
