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

    from loadgen.core.metrics.fluidity import Fluidity
    from loadgen.core.metrics.part_summaries import SummaryWithSlo
    from loadgen.core.metrics.slo_sample import SloSample
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.task_summary import Sessions
    from loadgen.core.metrics.windows import Span, Window
    from loadgen.core.slo import Slo

SummaryT = TypeVar("SummaryT", bound="Summary | SummaryWithSlo")

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

    The combined SLO is met if every class meets its SLO.
    """
    is_met = _combine_class_outcomes(classes)

    # A class may have an SLO on whole tasks alone, and then counts no good requests.
    with_counts = [goodput for goodput in classes if goodput.has_slo]
    if not with_counts:
        return Goodput(met=is_met)

    good = _sum_unless_withheld(goodput.good for goodput in with_counts)
    counted = _sum_unless_withheld(goodput.counted for goodput in with_counts)
    share = good / counted if counted and good is not None else None

    return Goodput(
        rps=_sum_unless_withheld(goodput.rps for goodput in with_counts),
        steady_rps=_sum_unless_withheld(goodput.steady_rps for goodput in with_counts),
        share=share,
        good=good,
        counted=counted,
        unfinished=_sum_unless_withheld(goodput.unfinished for goodput in with_counts),
        met=is_met,
    )


def _combine_class_outcomes(classes: Sequence[Goodput]) -> bool | None:
    """Return whether every class with an SLO meets it, None if undecided or without any SLO."""
    outcomes = [goodput.met for goodput in classes if goodput.has_any_slo]
    return combine_outcomes(outcomes) if outcomes else None


def _sum_unless_withheld(values: Iterable[_Number | None]) -> _Number | None:
    """Return the sum of values, or None if one of them is None because it is withheld."""
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


_PART_FIELDS_WITH_SLO = ("stages", "targets", "regions", "nodes", "classes", "models")
"""The fields of a summary with the summaries of those parts of the run that may have an SLO."""


def without_outcomes_if_invalid(summary: Summary) -> Summary:
    """Return the summary, without the outcomes of SLOs if the measurement is not valid.

    The outcomes of the stages, targets and other parts of the run are removed too.
    """
    if summary.verdict.valid:
        return summary

    for field in _PART_FIELDS_WITH_SLO:
        parts: tuple[SummaryWithSlo, ...] = getattr(summary, field)
        parts_without_outcomes = tuple(_without_outcomes(part) for part in parts)
        summary = msgspec.structs.replace(summary, **{field: parts_without_outcomes})

    summary = _without_outcomes(summary)
    return msgspec.structs.replace(summary, fluidity=_without_fluidity_outcome(summary.fluidity))


def _without_fluidity_outcome(fluidity: Fluidity | None) -> Fluidity | None:
    """Return a fluidity index whose objective is neither met nor missed."""
    if fluidity is None or fluidity.objective is None:
        return fluidity
    objective = msgspec.structs.replace(fluidity.objective, met=None)
    return msgspec.structs.replace(fluidity, objective=objective)


def _without_outcomes(summary: SummaryT) -> SummaryT:
    """Return a summary that does not say whether SLOs are met, for requests and for tasks."""
    request_goodput = _without_outcome(summary.goodput)
    summary = msgspec.structs.replace(summary, goodput=request_goodput)

    # Tasks are called sessions here. Summaries of stages and targets have none.
    sessions: Sessions | None = getattr(summary, "sessions", None)
    if sessions is None or sessions.goodput is None:
        return summary

    task_goodput = msgspec.structs.replace(sessions.goodput, met=None)
    sessions = msgspec.structs.replace(sessions, goodput=task_goodput)
    return msgspec.structs.replace(summary, sessions=sessions)


def _without_outcome(goodput: Goodput) -> Goodput:
    """Return a goodput whose SLO and terms are neither met nor missed, because a run is invalid."""
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

    good = _certain_good_requests(sample, slo)
    share = None
    good_in_steady_state = None
    if good is not None:
        share = good / sample.counted if sample.counted else None
        good_in_steady_state = _good_requests_within(sample, window.steady)

    return Goodput(
        rps=per_second(good, window),
        steady_rps=per_second(good_in_steady_state, window.steady),
        share=share,
        good=good,
        counted=sample.counted,
        unfinished=sample.unfinished,
        slo=terms,
        share_limit=slo.goodput_share,
        met=_is_slo_met(sample, slo, terms),
    )


def _good_requests_within(sample: SloSample, interval: Span) -> float:
    """Return the number of good requests that ended in an interval."""
    return sample.accumulator.amounts("good").between(interval.start_s, interval.end_s)


def is_slo_missed(sample: SloSample) -> bool:
    """Return True if these requests miss their SLO for certain."""
    slo = sample.slo
    if slo is None:
        return False

    terms = judge_terms(sample, slo)
    return _is_slo_met(sample, slo, terms) is False


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
    """Return the number of requests that meet every term, or None if it is too uncertain.

    Timestamps have errors, so that a latency just below a limit may in truth be above it.
    """
    if _is_request_metric_withheld(sample, slo) or _is_tpot_missing(sample, slo):
        return None

    good_requests = sample.accumulator.sum("good")
    good_range = bound_good_requests(sample.accumulator, slo)
    is_too_uncertain = good_range.exceeds(good_requests, MAX_UNCERTAIN_GOOD_SHARE)
    return None if is_too_uncertain else good_requests


def _is_required_share_good(sample: SloSample, slo: Slo, share_limit: float) -> bool | None:
    """Return whether the required share of requests is good, or None if it is undecided.

    Args:
        sample: The requests.
        slo: The SLO that decides which requests are good.
        share_limit: The required share of good requests, such as 0.95.
    """
    if _is_request_metric_withheld(sample, slo):
        return None

    # Timestamps have errors, so the number of good requests is only known to lie in a range.
    good_range = bound_good_requests(sample.accumulator, slo)
    is_reached_by_fewest = _is_share_reached(sample, good_range.lower, share_limit)
    is_reached_by_most = _is_share_reached(sample, good_range.upper, share_limit)

    is_undecided = is_reached_by_fewest is None or is_reached_by_most is None
    if is_undecided or is_reached_by_fewest != is_reached_by_most:
        return None

    # Responses without a TPOT count as good, so the share may be reached only because of them.
    if is_reached_by_most and _is_tpot_missing(sample, slo):
        return None

    return is_reached_by_most


def _is_share_reached(sample: SloSample, good: float, share_limit: float) -> bool | None:
    """Return whether a number of good requests is at least a share of all counted requests.

    Return None if unfinished requests, which the end of the run cut off, could decide that.

    Args:
        sample: The requests.
        good: The number of good requests.
        share_limit: The required share, such as 0.95.
    """
    counted = sample.counted
    unfinished = sample.unfinished
    is_reached_if_all_are_good = good + unfinished >= share_limit * (counted + unfinished)
    if sample.has_too_many_unfinished and is_reached_if_all_are_good:
        return None

    return counted > 0 and good / counted >= share_limit
