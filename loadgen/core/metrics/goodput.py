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
        """Whether there is an SLO: `met` is None without one, and also if it is undecided."""
        return self.counted is not None

    @property
    def undecided(self) -> bool:
        """Whether there is an SLO that this run, a valid one, can neither call met nor missed."""
        return self.has_slo and self.met is None and not self.not_judged


def combine_outcomes(outcomes: Iterable[bool | None]) -> bool | None:
    """Return whether all outcomes are True, or None if an undecided one decides that.

    One False outcome is enough for False, also if others are undecided.
    """
    all_outcomes = list(outcomes)
    if False in all_outcomes:
        return False
    return None if None in all_outcomes else True


def combine_class_goodput(classes: Sequence[Goodput]) -> Goodput:
    """Combine the goodput of request classes that each have their own SLO.

    A request counts as good if it meets the SLO of its class. The combined SLO is met if that of
    every class is. The result has no terms of its own, because they belong to the classes.
    """
    is_met = _combine_class_outcomes(classes)

    # Good requests are counted only in a class with an SLO on requests, not on whole tasks alone.
    with_counts = [goodput for goodput in classes if goodput.has_slo]
    if not with_counts:
        return Goodput(met=is_met)

    good = _sum_unless_withheld(goodput.good for goodput in with_counts)
    counted = _sum_unless_withheld(goodput.counted for goodput in with_counts)
    return Goodput(
        rps=_sum_unless_withheld(goodput.rps for goodput in with_counts),
        steady_rps=_sum_unless_withheld(goodput.steady_rps for goodput in with_counts),
        share=good / counted if counted and good is not None else None,
        good=good,
        counted=counted,
        unfinished=_sum_unless_withheld(goodput.unfinished for goodput in with_counts),
        met=is_met,
    )


def _combine_class_outcomes(classes: Sequence[Goodput]) -> bool | None:
    """Return whether every class with an SLO meets it, None if undecided or without any SLO.

    A class with an SLO on whole tasks alone has an outcome, although it has no SLO on requests.
    """
    outcomes = [goodput.met for goodput in classes if goodput.has_slo or goodput.met is not None]
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
    """Return the goodput of requests, whose SLO is met only if that of whole tasks is met too.

    An agent's task is a sequence of requests, and an SLO may limit its duration. If the SLO has no
    term on single requests, its part about tasks alone decides.

    Args:
        goodput: The goodput of single requests.
        tasks: The summary of the tasks that they belong to, None if there are none.
    """
    if tasks is None or tasks.goodput is None:
        return goodput

    is_met = tasks.goodput.met
    if goodput.has_slo:
        is_met = combine_outcomes([goodput.met, is_met])
    return msgspec.structs.replace(goodput, met=is_met)


def without_slo_outcomes(summary: SummaryT) -> SummaryT:
    """Return a summary that does not say whether SLOs are met, for a run that is not valid.

    The field `met` becomes None everywhere: in the goodput of the requests, in each of its terms,
    and in the goodput of conversations and tasks, which the summary calls sessions. The measured
    values stay.

    Args:
        summary: The summary of a run or of a part of it. Only those of the run and of its classes
            have sessions.
    """
    changes: dict[str, Goodput | Sessions] = {"goodput": _not_judged_goodput(summary.goodput)}
    sessions: Sessions | None = getattr(summary, "sessions", None)
    if sessions is not None:
        changes["sessions"] = _not_judged_sessions(sessions)

    return msgspec.structs.replace(summary, **changes)


def _not_judged_sessions(sessions: Sessions) -> Sessions:
    """Return the sessions of an invalid run: the same counts, but an SLO is not met or missed."""
    if sessions.goodput is None:  # the SLO has no part about whole tasks
        return sessions
    goodput = msgspec.structs.replace(sessions.goodput, met=None)
    return msgspec.structs.replace(sessions, goodput=goodput)


def _not_judged_goodput(goodput: Goodput) -> Goodput:
    """Return the goodput of an invalid run: the same counts, but no SLO or term is met or missed.

    If there is an SLO, `not_judged` says that it is not judged because the run is not valid.
    """
    has_request_slo = goodput.has_slo
    has_task_slo = goodput.met is not None  # has an outcome without any SLO on single requests
    not_judged = goodput.not_judged
    if has_request_slo or has_task_slo:
        not_judged = "the run is not valid; verdict.reasons says why"

    terms = tuple(msgspec.structs.replace(term, met=None) for term in goodput.slo)
    return msgspec.structs.replace(goodput, met=None, slo=terms, not_judged=not_judged)


def measure_goodput(sample: SloSample, window: Window) -> Goodput:
    """Count the good requests, which meet every SLO term, and judge the SLO.

    Requests that failed, were dropped or were lost count as misses. Cancelled requests do not
    count, and unfinished ones only if they had exceeded a limit by the end (`outcomes.is_counted`).
    If errors of timestamps leave open which requests are good, their number, their share and their
    rates are None.

    Args:
        sample: The requests, with what is needed to judge their SLO.
        window: The measurement window and the steady state, for the rates of good requests.
    """
    slo = sample.slo
    if slo is None:
        return Goodput()

    terms = judge_terms(sample, slo)

    share = None
    good_in_steady_state = None
    good = _certain_good_requests(sample, slo)
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
    return sample.accumulator.amount("good").between(interval.start_s, interval.end_s)


def is_slo_missed(sample: SloSample) -> bool:
    """Return True if these requests miss their SLO for certain."""
    slo = sample.slo
    return slo is not None and _is_slo_met(sample, slo, judge_terms(sample, slo)) is False


def _is_slo_met(sample: SloSample, slo: Slo, terms: Sequence[TermResult]) -> bool | None:
    """Return whether an SLO is met, or None if that is undecided.

    Each of its terms limits a quantile of a metric. It may also require a share of good requests.
    The SLO is met if all of that is.
    """
    outcomes = [term.met for term in terms]
    if slo.goodput_share is not None:
        outcomes.append(_is_required_share_good(sample, slo, slo.goodput_share))
    return combine_outcomes(outcomes)


# -- good requests ---------------------------------------------------------------------------------


def _has_undecidable_requests(sample: SloSample, slo: Slo) -> bool:
    """Return True if a term on single requests rests on a metric that is withheld.

    It is not known then which requests are good. Terms on pooled gaps do not judge requests.
    """
    pooled = pooled_metrics()
    request_metrics = [term.metric for term in slo.terms if term.metric not in pooled]
    return any(metric in sample.undecidable_metrics for metric in request_metrics)


def _lacks_tpot(sample: SloSample, slo: Slo) -> bool:
    """Return True if the SLO limits TPOT and many responses have none although they are long."""
    return any(sample.count_without_tpot(term) for term in slo.terms)


def _certain_good_requests(sample: SloSample, slo: Slo) -> int | None:
    """Return the number of requests that meet every term, or None if it is too uncertain.

    Timestamps have errors, so latencies near a limit may be on its other side. The number is too
    uncertain if it could be off by more than the share MAX_UNCERTAIN_GOOD_SHARE.
    """
    if _has_undecidable_requests(sample, slo) or _lacks_tpot(sample, slo):
        return None

    good = sample.accumulator.sum("good")
    possible_good = bound_good_requests(sample.accumulator, slo)
    if possible_good is None:  # no metric of the SLO is uncertain
        return good
    return None if possible_good.exceeds(good, MAX_UNCERTAIN_GOOD_SHARE) else good


def _is_required_share_good(sample: SloSample, slo: Slo, share_limit: float) -> bool | None:
    """Return whether the required share of requests is good, or None if it is undecided.

    Timestamps have errors, so the number of good requests is known only within bounds. The answer
    is decided if it is the same at both bounds.

    Args:
        sample: The requests.
        slo: Their SLO.
        share_limit: The share of good requests that it requires.
    """
    if _has_undecidable_requests(sample, slo):
        return None

    fewest_good, most_good = _possible_good_counts(sample, slo)
    outcome = _reaches_share(sample, fewest_good, share_limit)
    if outcome is not _reaches_share(sample, most_good, share_limit):
        return None

    # Long responses without a TPOT count as good, although their true TPOT may be over the limit.
    is_outcome_unsure = outcome is True and _lacks_tpot(sample, slo)
    return None if is_outcome_unsure else outcome


def _possible_good_counts(sample: SloSample, slo: Slo) -> tuple[int, int]:
    """Return the fewest and the most requests that may be good, by the errors of timestamps."""
    good_range = bound_good_requests(sample.accumulator, slo)
    if good_range is None:  # all timestamps are certain
        good = sample.accumulator.sum("good")
        return good, good
    return int(good_range.lower), int(good_range.upper)


def _reaches_share(sample: SloSample, good: int, share_limit: float) -> bool | None:
    """Return whether `good` requests are at least a share of all counted requests.

    Requests that the end of the run cut off are unfinished and not counted. Return None if there
    are many of them and the share would be reached if all of them were good.

    Args:
        sample: The requests.
        good: How many of them are good.
        share_limit: The required share, such as 0.95.
    """
    counted = sample.counted
    unfinished = sample.unfinished
    is_reached_if_all_are_good = good + unfinished >= share_limit * (counted + unfinished)
    if sample.has_too_many_unfinished and is_reached_if_all_are_good:
        return None
    return counted > 0 and good / counted >= share_limit
