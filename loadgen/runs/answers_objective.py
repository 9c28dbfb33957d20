"""Texts about the objective of an SLO on checked answers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.metrics.summary import Summary

if TYPE_CHECKING:
    from loadgen.core.metrics.answer_objective import AnswersObjective
    from loadgen.core.metrics.part_summaries import ClassSummary


def find_answers_objective(scope: Summary | ClassSummary) -> AnswersObjective | None:
    """Return the result of the objective on checked answers, or None if there is none.

    A class of requests, which is a part of a run, never has one.
    """
    if not isinstance(scope, Summary) or scope.answers is None:
        return None
    return scope.answers.objective


def format_measured_answers(objective: AnswersObjective) -> str:
    """Return the share of right answers, with as many digits as show that a limit was missed."""
    if objective.value is None:
        return "not measured"
    return _format_against_limit(objective.value, objective.limit)


def _format_against_limit(share: float, limit: float) -> str:
    """Return a share in percent, with more digits if it would look like the limit it is below.

    For example, 94.97 % is below a limit of 95 %, and "95.0 %" would look as if it reached it.
    """
    text = format.percent(share)
    if share < limit and text == format.percent(limit):
        return f"{share * 100:.6g} %"
    return text


def format_answers_limit(objective: AnswersObjective) -> str:
    """Return the limit of the objective as users wrote it: `95 %`."""
    return f"{objective.limit * 100:.6g} %"


def count_wrong_answers(objective: AnswersObjective) -> str:
    """Return how many of the checked answers are wrong: `3 of 150`."""
    return f"{format.count(objective.wrong)} of {format.count(objective.count)}"


def describe_missed_answers(objective: AnswersObjective) -> str:
    """Return a missed objective with its numbers."""
    share = format_measured_answers(objective)
    limit = format_answers_limit(objective)
    return (
        f"{share} of the answers are right, limit {limit} ({count_wrong_answers(objective)} wrong)"
    )


def describe_answers_result(objective: AnswersObjective) -> str:
    """Return the result of an SLO that has no other objective, as a sentence."""
    if objective.met is None:
        return f"SLO undecided: {objective.text}: {objective.undecided}."
    if not objective.met:
        return f"SLO missed: {describe_missed_answers(objective)}."
    share = format_measured_answers(objective)
    checked = format.counted(objective.count, "answer")
    return f"SLO met: {objective.text}, and {share} of {checked} are right."
