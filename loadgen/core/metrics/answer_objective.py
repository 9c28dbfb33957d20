"""Judge the objective of an SLO on checked answers: a share of them has to be right. Pure.

The objective is met if the whole 95 % confidence interval of the score is at or above the limit,
and missed if the whole interval is below it. Otherwise too few answers were checked to decide.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from loadgen.core import format
from loadgen.core.metrics.goodput import combine_outcomes
from loadgen.core.slo import describe_answers_share
from loadgen.core.stats.intervals import LEVEL
from loadgen.core.stats.students_t import z_quantile

if TYPE_CHECKING:
    from loadgen.core.metrics.answer_scores import ScorePart
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.slo import Slo

HOW_TO_CHECK_MORE = "Send more requests, or set a larger --check-share"


class AnswersObjective(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the objective `answers` of an SLO.

    Attributes:
        limit: The smallest share of right answers.
        value: The share of right answers. None if no answer was checked.
        met: Whether the objective is met. None if that is undecided, or the run is not valid.
        wrong: The number of wrong answers.
        count: The number of checked answers. Failed requests have none.
        needed: About how many checked answers decide the objective, if the share of right ones
            stays the same. None if the share is equal to the limit.
        undecided: Why it is undecided, else "".
    """

    limit: float
    value: float | None = None
    met: bool | None = None
    wrong: int = 0
    count: int = 0
    needed: int | None = None
    undecided: str = ""

    @property
    def text(self) -> str:
        """The objective as users read it, such as `Right answers at least 95 %`."""
        return describe_answers_share(self.limit)


def judge_answers_objective(slo: Slo | None, overall: ScorePart) -> AnswersObjective | None:
    """Return the result of the objective of an SLO on the share of right answers.

    Return None if there is no SLO, or if it has no objective on answers.

    Args:
        slo: The SLO of the run.
        overall: The score of all checked answers of the run, with its 95 % interval.
    """
    if slo is None or slo.answers_share is None:
        return None

    limit = slo.answers_share
    is_met = _is_limit_reached(limit, overall)
    undecided_reason = _explain_undecided(limit, overall) if is_met is None else ""
    return AnswersObjective(
        limit=limit,
        value=overall.score,
        met=is_met,
        wrong=overall.checked - overall.correct,
        count=overall.checked,
        needed=count_needed_answers(limit, overall.score),
        undecided=undecided_reason,
    )


def _is_limit_reached(limit: float, overall: ScorePart) -> bool | None:
    """Return whether the share of right answers is at or above a limit, or None if undecided.

    It is decided if the whole 95 % interval of the share is on one side of the limit.
    """
    if overall.low is None or overall.high is None:
        return None
    if overall.low >= limit:
        return True
    if overall.high < limit:
        return False
    return None


def count_needed_answers(limit: float, score: float | None) -> int | None:
    """Return how many checked answers decide whether a share of right answers reaches a limit.

    The ends of Wilson's interval are the limits L at which the score p of n answers differs from L
    by z standard errors: (p - L)^2 = z^2 L (1 - L) / n. Solved for n, this is the smallest number
    of answers whose interval does not contain L.

    Args:
        limit: The smallest share of right answers.
        score: The share of right answers that is expected. Without one, all answers are expected to
            be right, which needs the fewest answers.

    Returns:
        The number. None if the score is equal to the limit, which no number of answers can decide.
    """
    expected_score = 1.0 if score is None else score
    distance = expected_score - limit
    if distance == 0:
        return None

    z = z_quantile(LEVEL)
    variance_at_limit = limit * (1 - limit)
    return math.ceil(z * z * variance_at_limit / (distance * distance))


def _explain_undecided(limit: float, overall: ScorePart) -> str:
    """Return why it is not decided whether a score reaches a limit, and what the user can do.

    The interval of the score contains the limit, or no answer was checked.
    """
    needed = count_needed_answers(limit, overall.score)
    if overall.score is None or overall.low is None:
        return f"no answer was checked, and at least {format.count(needed)} are needed"

    low = format.percent(overall.low).removesuffix(" %")
    high = format.percent(overall.high)
    too_few = (
        f"too few checked answers: the 95 % interval of the score of "
        f"{format.counted(overall.checked, 'answer')} is {low} to {high}"
    )
    if needed is None:
        return f"{too_few}. {HOW_TO_CHECK_MORE}"
    return f"{too_few}, and about {format.count(needed)} are needed. {HOW_TO_CHECK_MORE}"


def include_answers_outcome(
    goodput: Goodput, objective: AnswersObjective | None, slo: Slo | None
) -> Goodput:
    """Return the goodput of a run with a verdict that includes the objective on right answers.

    The SLO is met if all of its objectives are met. If it has no other objective, the one on right
    answers alone decides. The goodput is returned unchanged if there is no such objective.
    """
    if objective is None or slo is None:
        return goodput

    outcomes = [objective.met]
    if goodput.has_any_slo or _has_other_objective(slo):
        outcomes.append(goodput.met)
    return msgspec.structs.replace(goodput, met=combine_outcomes(outcomes))


def _has_other_objective(slo: Slo) -> bool:
    """Return whether an SLO has an objective besides the one on answers."""
    other_objectives = (slo.goodput_share, slo.task, slo.fluidity)
    return bool(slo.terms) or any(objective is not None for objective in other_objectives)
