"""Counts the requests that meet every term of an SLO, and judges whether the SLO is met.

Pure. An SLO is missed if a term is missed; otherwise it is undecided if a term is undecided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from loadgen.core.metrics.slo_terms import TermResult, judge_terms
from loadgen.core.metrics.uncertainty import bound_good_requests
from loadgen.core.metrics.windows import per_second
from loadgen.figures import pooled_metrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from loadgen.core.metrics.answer_scores import AnswerScores
    from loadgen.core.metrics.fluidity import Fluidity
    from loadgen.core.metrics.part_summaries import ClassSummary, SummaryWithSlo
    from loadgen.core.metrics.slo_sample import SloSample
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.task_summary import Sessions
    from loadgen.core.metrics.windows import Span, Window
    from loadgen.core.slo import Slo

PartT = TypeVar("PartT", bound="SummaryWithSlo")

_Number = TypeVar("_Number", int, float)

MAX_UNCERTAIN_GOOD_SHARE = 0.05
"""If a larger share of the good requests is uncertain, their number is withheld."""


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that meet every SLO term. All fields are None without an SLO.

    `good`, `share` and the rates are None if a term on a value of each request rests on metrics
    that are withheld.

    Attributes:
        rps: Good requests per second of the measurement window.
        steady_rps: Good requests that ended in the steady-state window, per second of it. They are
            a part of the requests of `Load.steady_completed_rps` over the same time.
        share: The SLO attainment, `good` / `counted`.
        good: The number of requests that meet every term.
        counted: All requests but cancelled ones and `unfinished`.
        unfinished: Unfinished requests that are not known to be over the limit of a term.
        slo: The result of each term.
        share_limit: The share of good requests that the SLO requires.
        met: Whether the SLO is met. None if no term is missed but one is undecided, and if
            `not_judged` says why.
        not_judged: Why `met` is None in a run that is not valid, also that of each term.
    """

    rps: float | None = None
    steady_rps: float | None = None
    share: float | None = None
    good: int | None = None
    counted: int | None = None
    unfinished: int | None = None
    slo: tuple[TermResult, ...] = ()
    share_limit: float | None = None
    met: bool | None = None
    not_judged: str = ""

    @property
    def has_slo(self) -> bool:
        """Whether there is an SLO on single requests. `met` is None if it is undecided."""
        return self.counted is not None

    @property
    def has_any_slo(self) -> bool:
        """Whether there is an SLO on single requests, or one on whole tasks that has an outcome."""
        return self.has_slo or self.met is not None

    @property
    def undecided(self) -> bool:
        """Whether there is an SLO that this run, a valid one, can neither call met nor missed."""
        return self.has_slo and self.met is None and not self.not_judged


def combine_outcomes(outcomes: Iterable[bool | None]) -> bool | None:
    """Return whether all outcomes are True, where None is an undecided outcome.

    A False outcome makes the result False. Otherwise an undecided outcome makes it None.
    """
    all_outcomes = list(outcomes)
    if False in all_outcomes:
        return False
    if None in all_outcomes:
        return None
    return True


def combine_class_goodput(classes: Sequence[Goodput]) -> Goodput:
    """Combine the goodput of request classes that each have their own SLO.

    The combined SLO is met if every class meets its SLO. Numbers are added up. A sum is None if the
    number of one of the classes is None, because it is too uncertain.
    """
    is_met = _combine_class_outcomes(classes)

    # A class whose SLO limits only whole tasks counts no good requests.
    with_counts = [goodput for goodput in classes if goodput.has_slo]
    if not with_counts:
        return Goodput(met=is_met)

    good_requests = _sum_if_all_known(goodput.good for goodput in with_counts)
    counted_requests = _sum_if_all_known(goodput.counted for goodput in with_counts)

    return Goodput(
        # Numbers of requests.
        good=good_requests,
        counted=counted_requests,
        unfinished=_sum_if_all_known(goodput.unfinished for goodput in with_counts),
        share=_good_share(good_requests, counted_requests),
        # Good requests per second.
        rps=_sum_if_all_known(goodput.rps for goodput in with_counts),
        steady_rps=_sum_if_all_known(goodput.steady_rps for goodput in with_counts),
        # Whether the SLO of every class is met.
        met=is_met,
    )


def _combine_class_outcomes(classes: Sequence[Goodput]) -> bool | None:
    """Return whether every class with an SLO meets it, None if undecided or without any SLO."""
    outcomes = [goodput.met for goodput in classes if goodput.has_any_slo]
    return combine_outcomes(outcomes) if outcomes else None


def _good_share(good_requests: int | None, counted_requests: int | None) -> float | None:
    """Return the share of good requests, or None if it is not known or no request counts."""
    if good_requests is None or not counted_requests:
        return None
    return good_requests / counted_requests


def _sum_if_all_known(values: Iterable[_Number | None]) -> _Number | None:
    """Return the sum of values, or None if one of the values is not known."""
    known_values = []
    for value in values:
        if value is None:
            return None
        known_values.append(value)
    return sum(known_values)


def include_task_outcome(goodput: Goodput, tasks: Sessions | None) -> Goodput:
    """Return the goodput of requests, with an outcome that takes whole tasks into account.

    A task of an agent is a sequence of requests, and an SLO may limit its duration.

    Args:
        goodput: The goodput of single requests.
        tasks: The summary of the tasks, None if there are no tasks.
    """
    if tasks is None or tasks.goodput is None:
        return goodput

    is_met = tasks.goodput.met
    if goodput.has_slo:
        is_met = combine_outcomes([goodput.met, tasks.goodput.met])

    return msgspec.structs.replace(goodput, met=is_met)


def without_outcomes_if_invalid(summary: Summary) -> Summary:
    """Return the summary, without the outcomes of SLOs if the measurement is not valid.

    The outcome of an SLO is whether the SLO is met. A run and each of its parts, such as a target,
    may have an SLO.
    """
    if summary.verdict.valid:
        return summary

    return msgspec.structs.replace(
        summary,
        # The whole run.
        goodput=_without_outcome(summary.goodput),
        sessions=_without_task_outcome(summary.sessions),
        fluidity=_without_fluidity_outcome(summary.fluidity),
        answers=_without_answers_outcome(summary.answers),
        # The parts of the run.
        stages=_without_request_outcomes(summary.stages),
        targets=_without_request_outcomes(summary.targets),
        regions=_without_request_outcomes(summary.regions),
        nodes=_without_request_outcomes(summary.nodes),
        classes=_without_class_outcomes(summary.classes),
        models=_without_request_outcomes(summary.models),
    )


def _without_fluidity_outcome(fluidity: Fluidity | None) -> Fluidity | None:
    """Return a fluidity index that does not say whether its objective is met (`met` is None).

    The fluidity index is the share of token deadlines that were met.
    """
    if fluidity is None or fluidity.objective is None:
        return fluidity

    objective = msgspec.structs.replace(fluidity.objective, met=None)
    return msgspec.structs.replace(fluidity, objective=objective)


def _without_answers_outcome(answers: AnswerScores | None) -> AnswerScores | None:
    """Return scores of checked answers that do not say whether their objective is met."""
    if answers is None or answers.objective is None:
        return answers

    objective = msgspec.structs.replace(answers.objective, met=None)
    return msgspec.structs.replace(answers, objective=objective)


def _without_request_outcomes(parts: Sequence[PartT]) -> tuple[PartT, ...]:
    """Return the summaries of parts of a run without the outcomes of SLOs on requests."""
    return tuple(
        msgspec.structs.replace(part, goodput=_without_outcome(part.goodput)) for part in parts
    )


def _without_class_outcomes(classes: Sequence[ClassSummary]) -> tuple[ClassSummary, ...]:
    """Return the summaries of request classes without the outcomes of their SLOs.

    A class may have an SLO on its requests (`goodput`) and one on its tasks (`sessions`).
    """
    return tuple(
        msgspec.structs.replace(
            request_class,
            goodput=_without_outcome(request_class.goodput),
            sessions=_without_task_outcome(request_class.sessions),
            fluidity=_without_fluidity_outcome(request_class.fluidity),
        )
        for request_class in classes
    )


def _without_task_outcome(tasks: Sessions | None) -> Sessions | None:
    """Return the summary of tasks without the outcome of their SLO, None if there are no tasks.

    A task is a sequence of requests of an agent.
    """
    if tasks is None or tasks.goodput is None:
        return tasks

    task_goodput = msgspec.structs.replace(tasks.goodput, met=None)
    return msgspec.structs.replace(tasks, goodput=task_goodput)


def _without_outcome(goodput: Goodput) -> Goodput:
    """Return a goodput that does not say whether the SLO and its terms are met (`met` is None).

    It says instead that the run is not valid.
    """
    if not goodput.has_any_slo:
        return goodput

    terms = tuple(msgspec.structs.replace(term, met=None) for term in goodput.slo)
    return msgspec.structs.replace(
        goodput,
        met=None,
        slo=terms,
        not_judged="the run is not valid; verdict.reasons says why",
    )


def measure_goodput(sample: SloSample, window: Window) -> Goodput:
    """Count the good requests, which meet every term of the SLO, and judge the SLO.

    The number of good requests, their share and their rates are None if timestamps are too
    uncertain.

    Args:
        sample: The requests, with the data by which their SLO is judged.
        window: The measurement window and the steady state, for the rates of good requests.
    """
    slo = sample.slo
    if slo is None:
        return Goodput()

    terms = judge_terms(sample, slo)

    good_requests = _certain_good_requests(sample, slo)
    good_in_steady_state = None
    if good_requests is not None:
        good_in_steady_state = _good_requests_within(sample, window.steady)

    return Goodput(
        # Numbers of requests.
        good=good_requests,
        counted=sample.counted,
        unfinished=sample.unfinished,
        share=_good_share(good_requests, sample.counted),
        # Good requests per second.
        rps=per_second(good_requests, window),
        steady_rps=per_second(good_in_steady_state, window.steady),
        # The judgement.
        slo=terms,
        share_limit=slo.goodput_share,
        met=_is_slo_met(sample, slo, terms),
    )


def _good_requests_within(sample: SloSample, interval: Span) -> float:
    """Return the number of good requests that ended in an interval."""
    return sample.accumulator.amounts("good").between(interval.start_s, interval.end_s)


def is_slo_missed(sample: SloSample) -> bool:
    """Return True if these requests miss their SLO, False if they meet it or it is undecided."""
    slo = sample.slo
    if slo is None:
        return False

    terms = judge_terms(sample, slo)
    is_met = _is_slo_met(sample, slo, terms)  # None if it is undecided
    return is_met is False


def _is_slo_met(sample: SloSample, slo: Slo, terms: Sequence[TermResult]) -> bool | None:
    """Return whether an SLO is met, or None if that is undecided.

    An SLO may limit quantiles of metrics, and may require a share of good requests.
    """
    outcomes = [term.met for term in terms]
    if slo.goodput_share is not None:
        is_share_good = _is_required_share_good(sample, slo, slo.goodput_share)
        outcomes.append(is_share_good)

    return combine_outcomes(outcomes)


# -- good requests ---------------------------------------------------------------------------------


def _is_request_metric_withheld(sample: SloSample, slo: Slo) -> bool:
    """Return True if the SLO limits a metric of single requests that is too uncertain to report.

    It is not known then which requests are good.
    """
    gap_metrics = pooled_metrics()  # metrics of the gaps of all requests together
    request_metrics = [term.metric for term in slo.terms if term.metric not in gap_metrics]
    return any(metric in sample.withheld_metrics for metric in request_metrics)


def _is_tpot_missing(sample: SloSample, slo: Slo) -> bool:
    """Return True if the SLO limits the time per output token, and many responses lack it."""
    return any(sample.count_without_tpot(term) > 0 for term in slo.terms)


def _certain_good_requests(sample: SloSample, slo: Slo) -> int | None:
    """Return the number of requests that meet every term of an SLO, None if it is too uncertain.

    Timestamps have errors, so a latency that was measured just below a limit may in truth be above
    it. The number is too uncertain if such requests are more than MAX_UNCERTAIN_GOOD_SHARE of it.
    """
    if _is_request_metric_withheld(sample, slo) or _is_tpot_missing(sample, slo):
        return None

    good_requests = sample.accumulator.sum("good")
    possible_good_requests = bound_good_requests(sample.accumulator, slo)
    is_too_uncertain = possible_good_requests.exceeds(good_requests, MAX_UNCERTAIN_GOOD_SHARE)
    return None if is_too_uncertain else good_requests


def _is_required_share_good(sample: SloSample, slo: Slo, required_share: float) -> bool | None:
    """Return whether the required share of requests is good, or None if it is undecided.

    It is undecided if requests that are not known to be good or bad could decide it: unfinished
    requests, requests with uncertain latencies, or responses without a time per output token.

    Args:
        sample: The requests.
        slo: The SLO that decides which requests are good.
        required_share: The required share of good requests, such as 0.95.
    """
    if _is_request_metric_withheld(sample, slo):
        return None

    # Latencies are uncertain, so the number of good requests is only known to lie in a range.
    good_requests = bound_good_requests(sample.accumulator, slo)
    if _could_unfinished_decide(sample, good_requests.upper, required_share):
        return None

    is_reached_by_fewest = _is_share_reached(sample, good_requests.lower, required_share)
    is_reached_by_most = _is_share_reached(sample, good_requests.upper, required_share)
    if is_reached_by_fewest != is_reached_by_most:
        return None

    # Responses without a time per output token (TPOT) count as good, although many may be bad.
    is_reached = is_reached_by_fewest
    if is_reached and _is_tpot_missing(sample, slo):
        return None

    return is_reached


def _could_unfinished_decide(sample: SloSample, good: float, required_share: float) -> bool:
    """Return True if the required share could be reached because unfinished requests are good.

    Return False if so few requests are unfinished that they do not matter.

    Args:
        sample: The requests. The end of the run cut off the unfinished ones.
        good: The number of good requests.
        required_share: The required share of good requests.
    """
    if not sample.has_too_many_unfinished:
        return False

    most_good = good + sample.unfinished
    most_counted = sample.counted + sample.unfinished
    return most_good >= required_share * most_counted


def _is_share_reached(sample: SloSample, good: float, required_share: float) -> bool:
    """Return True if so many good requests are the required share of all counted requests."""
    return sample.counted > 0 and good / sample.counted >= required_share
