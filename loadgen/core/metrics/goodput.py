"""Counts the requests that meet every term of an SLO, and judges whether the SLO is met.

Pure. An SLO is missed if a term is missed; otherwise it is undecided if a term is undecided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

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
    from loadgen.core.metrics.windows import Window
    from loadgen.core.slo import Slo

SummaryT = TypeVar("SummaryT", bound="Summary | SummaryWithSlo")

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

    A request counts as good if it meets the SLO of its class. Counts and rates are sums over the
    classes that have an SLO. The result has no terms of its own, because they belong to the
    classes.
    """
    # A class with an SLO of its tasks alone has an outcome and no counts of requests.
    with_outcome = [goodput for goodput in classes if goodput.has_slo or goodput.met is not None]
    is_met = combine_outcomes(goodput.met for goodput in with_outcome) if with_outcome else None
    with_slo = [goodput for goodput in classes if goodput.has_slo]
    if not with_slo:
        return Goodput(met=is_met)
    good = _sum_field(with_slo, "good")
    counted = _sum_field(with_slo, "counted")
    return Goodput(
        rps=_sum_field(with_slo, "rps"),
        steady_rps=_sum_field(with_slo, "steady_rps"),
        share=good / counted if counted and good is not None else None,
        good=good,
        counted=counted,
        unfinished=_sum_field(with_slo, "unfinished"),
        met=is_met,
    )


def _sum_field(parts: Sequence[Goodput], field: str) -> Any:
    """Return the sum of a field over several classes, or None if it is withheld in any of them."""
    values = [getattr(goodput, field) for goodput in parts]
    return None if None in values else sum(values)


def include_task_outcome(requests: Goodput, tasks: Sessions | None) -> Goodput:
    """Return the goodput of requests, met only if the SLO of whole tasks is met too.

    An agent's task is a sequence of requests, and an SLO may limit its duration. If no term is on
    single requests, the SLO of tasks alone decides.
    """
    if tasks is None or tasks.goodput is None:
        return requests
    if not requests.has_slo:
        return msgspec.structs.replace(requests, met=tasks.goodput.met)
    met = combine_outcomes([requests.met, tasks.goodput.met])
    return msgspec.structs.replace(requests, met=met)


def without_slo_outcomes(summary: SummaryT) -> SummaryT:
    """Return the summary of an invalid run, or of a part of it, without the outcomes of its SLO.

    Whether the SLO, its terms and the SLO of whole tasks are met becomes None. The values of the
    terms stay, since they were measured.
    """
    changes: dict[str, Goodput | Sessions] = {"goodput": _without_outcomes(summary.goodput)}
    # Only the run and its classes have tasks.
    tasks: Sessions | None = getattr(summary, "sessions", None)
    if tasks is not None and tasks.goodput is not None:
        task_goodput = msgspec.structs.replace(tasks.goodput, met=None)
        changes["sessions"] = msgspec.structs.replace(tasks, goodput=task_goodput)
    return msgspec.structs.replace(summary, **changes)


def _without_outcomes(goodput: Goodput) -> Goodput:
    """Return goodput that is not judged, with the reason if there was an SLO to judge it by."""
    has_any_slo = goodput.has_slo or goodput.met is not None
    reason = "the run is not valid; verdict.reasons says why"
    return msgspec.structs.replace(
        goodput,
        met=None,
        slo=tuple(msgspec.structs.replace(term, met=None) for term in goodput.slo),
        not_judged=reason if has_any_slo else goodput.not_judged,
    )


def measure_goodput(sample: SloSample, window: Window) -> Goodput:
    """Judge each SLO term at its quantile, and count the requests that meet all terms.

    Failed, dropped and lost requests are over every limit, and so are those without a record.
    Cancelled requests are left out, and so are unfinished ones unless they are over a limit already
    (`is_over_when_cut`). A request too short to have a TPOT is left out of that term and does not
    miss it. Terms on pooled gaps judge the gaps and not the requests.
    """
    slo = sample.slo
    if slo is None:
        return Goodput()
    terms = judge_terms(sample, slo)
    good = _certain_good_requests(sample, slo)
    good_in_steady_state = None
    if good is not None:
        good_over_time = sample.accumulator.amount("good")
        good_in_steady_state = good_over_time.between(window.steady.start_s, window.steady.end_s)
    return Goodput(
        rps=per_second(good, window),
        steady_rps=per_second(good_in_steady_state, window.steady),
        share=good / sample.counted if sample.counted and good is not None else None,
        good=good,
        counted=sample.counted,
        unfinished=sample.unfinished,
        slo=terms,
        share_limit=slo.goodput_share,
        met=_is_slo_met(sample, slo, terms),
    )


def is_slo_missed(sample: SloSample) -> bool:
    """Return True if these requests miss their SLO for certain."""
    slo = sample.slo
    return slo is not None and _is_slo_met(sample, slo, judge_terms(sample, slo)) is False


def _is_slo_met(sample: SloSample, slo: Slo, terms: Sequence[TermResult]) -> bool | None:
    """Return whether every term and the required share of good requests are met, None if undecided.

    An SLO limits either quantiles, by its terms, or the share of good requests, or both.
    """
    outcomes = [term.met for term in terms]
    if slo.goodput_share is not None:
        outcomes.append(_is_share_met(sample, slo, slo.goodput_share))
    return combine_outcomes(outcomes)


# -- good requests ---------------------------------------------------------------------------------


def _has_undecidable_requests(sample: SloSample, slo: Slo) -> bool:
    """Return True if a term on single requests rests on a metric that is withheld.

    It is not known then which requests are good. Terms on pooled gaps do not judge requests.
    """
    names_of_pooled = pooled_metrics()
    request_terms = [term for term in slo.terms if term.metric not in names_of_pooled]
    return any(term.metric in sample.undecidable_metrics for term in request_terms)


def _lacks_tpot(sample: SloSample, slo: Slo) -> bool:
    """Return True if a term is on TPOT and many responses lack one."""
    return any(sample.count_without_tpot(term) for term in slo.terms)


def _certain_good_requests(sample: SloSample, slo: Slo) -> int | None:
    """Return the number of requests that meet every term, or None if it is too uncertain."""
    if _has_undecidable_requests(sample, slo) or _lacks_tpot(sample, slo):
        return None
    good = sample.accumulator.sum("good")
    good_range = bound_good_requests(sample.accumulator, slo)
    if good_range is not None and good_range.exceeds(good, MAX_UNCERTAIN_GOOD_SHARE):
        return None
    return good


def _is_share_met(sample: SloSample, slo: Slo, share_limit: float) -> bool | None:
    """Return whether the required share of requests is good, or None if it is undecided.

    The uncertainty of timestamps leaves a range of possible numbers of good requests. The share is
    decided if both ends of that range have one outcome. If many responses lack a TPOT that the SLO
    limits, they count as good, so that the share can be missed for certain, but not met.

    Args:
        sample: The requests.
        slo: Their SLO.
        share_limit: The share of good requests that it requires.
    """
    if _has_undecidable_requests(sample, slo):
        return None
    good_range = bound_good_requests(sample.accumulator, slo)
    if good_range is None:
        possible_counts = [sample.accumulator.sum("good")]
    else:
        possible_counts = [int(good_range.lower), int(good_range.upper)]
    outcomes = {_is_count_enough(sample, good, share_limit) for good in possible_counts}
    if len(outcomes) > 1:
        return None
    is_met = outcomes.pop()
    return None if is_met and _lacks_tpot(sample, slo) else is_met


def _is_count_enough(sample: SloSample, good: int, share_limit: float) -> bool | None:
    """Return whether a number of good requests is the required share of the counted requests.

    Returns None if many requests were unfinished and it would be enough with all of them as good
    ones: then they decide.
    """
    counted = sample.counted
    unfinished = sample.unfinished
    could_be_enough = good + unfinished >= share_limit * (counted + unfinished)
    if sample.has_too_many_unfinished and could_be_enough:
        return None
    return counted > 0 and good / counted >= share_limit
