"""Judges the terms of an SLO at their quantiles, and counts the requests that meet all of them.

Pure. An SLO is missed if a term is missed; otherwise it is undecided if a term is undecided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loadgen.core import format
from loadgen.core.limits import NO_SPAN_SHARE
from loadgen.core.metrics.accumulator import term_sum
from loadgen.core.metrics.outcomes import is_undecided
from loadgen.core.metrics.uncertainty import Range, bound_good_requests, uncertainty_limit
from loadgen.core.metrics.windows import per_second
from loadgen.core.slo import promise
from loadgen.core.stats.quantiles import (
    SUPPORT,
    milliseconds,
    needed_samples,
    quantile_index,
    quantile_name,
)
from loadgen.figures import needs, pooled_figures, words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from loadgen.core.limits import ValidityLimits
    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.task_summary import Sessions
    from loadgen.core.metrics.windows import Window
    from loadgen.core.slo import Slo, Term
    from loadgen.core.stats.histogram import Histogram

MAX_UNCERTAIN_GOOD_SHARE = 0.05
"""If a larger share of the good requests is uncertain, their number is withheld."""


class TermResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one SLO term.

    Attributes:
        metric: The metric that the term limits.
        quantile: The quantile that the term is about.
        limit_ms: The limit.
        value_ms: The value at the quantile. None if no request has a value, or if the quantile
            falls on a failed request.
        margin_ms: The limit less the value. It is negative if the term is missed.
        met: None if the run cannot decide the term; `undecided` says why.
        over: Samples over the limit, failed requests included.
        count: Samples, failed requests included.
        needed: The number of samples from which the quantile is supported.
        supported: Whether there are so many.
        undecided: Why the term is undecided.
        unfinished: Unfinished requests that are not known to be over the limit. They are not part
            of `count`.
        low_ms: The lower end of the range of a value that is too uncertain to be shown.
        high_ms: The upper end of this range.
    """

    metric: str
    quantile: float
    limit_ms: float
    value_ms: float | None
    margin_ms: float | None
    met: bool | None
    over: int
    count: int
    needed: int
    supported: bool
    undecided: str = ""
    unfinished: int = 0
    low_ms: float | None = None
    high_ms: float | None = None

    @property
    def promise(self) -> str:
        """`TTFT p99 at most 2,000 ms`."""
        return promise(self.metric, self.quantile, self.limit_ms)


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
    """Return False if an outcome is False, else None if one is undecided, else True."""
    known = list(outcomes)
    if False in known:
        return False
    return None if None in known else True


def combine_class_goodput(classes: Sequence[Goodput]) -> Goodput:
    """Combine the goodput of request classes that each have their own SLO.

    A request counts as good if it meets the SLO of its class. Counts and rates are sums over the
    classes that have an SLO. The result has no terms of its own, because they belong to the
    classes.
    """
    judged = [goodput for goodput in classes if goodput.has_slo or goodput.met is not None]
    met = combine_outcomes(goodput.met for goodput in judged) if judged else None
    with_slo = [goodput for goodput in classes if goodput.has_slo]
    if not with_slo:
        return Goodput(met=met)

    def total(field: str) -> Any:
        values = [getattr(goodput, field) for goodput in with_slo]
        return None if None in values else sum(values)

    good = total("good")
    counted = total("counted")
    return Goodput(
        rps=total("rps"),
        steady_rps=total("steady_rps"),
        share=good / counted if counted and good is not None else None,
        good=good,
        counted=counted,
        unfinished=total("unfinished"),
        met=met,
    )


def include_task_outcome(requests: Goodput, tasks: Sessions | None) -> Goodput:
    """Return the goodput of requests, met only if the SLO of whole tasks is met too."""
    if tasks is None or tasks.goodput is None:
        return requests
    met = tasks.goodput.met
    if requests.has_slo:
        met = combine_outcomes([requests.met, met])
    return msgspec.structs.replace(requests, met=met)


def without_slo_result(part: Any) -> Any:
    """Return the summary of a run that is not valid, or of a part of it, without SLO outcomes."""
    goodput: Goodput = part.goodput
    had_outcome = goodput.has_slo or goodput.met is not None
    terms = tuple(msgspec.structs.replace(term, met=None) for term in goodput.slo)
    changes: dict[str, Any] = {"met": None, "slo": terms}
    if had_outcome:
        changes["not_judged"] = "the run is not valid: see verdict.reasons"
    part = msgspec.structs.replace(part, goodput=msgspec.structs.replace(goodput, **changes))
    tasks: Sessions | None = getattr(part, "sessions", None)
    if tasks is None or tasks.goodput is None:
        return part
    task_goodput = msgspec.structs.replace(tasks.goodput, met=None)
    return msgspec.structs.replace(
        part, sessions=msgspec.structs.replace(tasks, goodput=task_goodput)
    )


@dataclass(frozen=True)
class SloSample:
    """The requests that an SLO is judged by.

    Attributes:
        accumulator: The requests, with their SLO.
        gaps: The gaps between output events of these requests.
        unrecorded: Requests that have no record. They count as misses.
        unsound: Metrics that are withheld, with the reason. Terms on them are undecided.
        limits: The limits of a valid run.
        counts_dropped: Whether requests that the client dropped at a cap count, as misses.
    """

    accumulator: MetricAccumulator
    gaps: Histogram
    unrecorded: int
    unsound: Mapping[str, str]
    limits: ValidityLimits
    counts_dropped: bool = True

    @property
    def slo(self) -> Slo | None:
        """The SLO of these requests, or None if it has no terms on requests."""
        slo = self.accumulator.slo
        if slo is None or (not slo.terms and slo.goodput_share is None):
            return None
        return slo

    @property
    def everyone(self) -> int:
        """All requests but cancelled ones."""
        requests = self.accumulator.sum("recorded") - self.accumulator.sum("cancelled")
        if not self.counts_dropped:
            requests -= self.accumulator.sum("dropped")
        return requests + self.unrecorded

    @property
    def unfinished(self) -> int:
        """Unfinished requests that are not known to be over the limit of a term."""
        return self.accumulator.sum("unfinished") - self.accumulator.sum("unfinished_misses")

    @property
    def counted(self) -> int:
        """The requests that the SLO counts, as good or as a miss."""
        return self.everyone - self.unfinished

    @property
    def has_too_many_unfinished(self) -> bool:
        """Whether more requests are unfinished than leave a term decided."""
        return is_undecided(self.accumulator.sum("unfinished"), self.everyone)

    def responses_without_span(self, term: Term) -> int:
        """Return how many responses lack a TPOT though they have enough tokens for one.

        Their output came at one instant, or had no text. They are left out of a term on TPOT.
        Returns 0 if they are too few to matter.
        """
        if term.metric != "tpot":
            return 0
        accumulator = self.accumulator
        without = accumulator.sum("tpot_no_span") + accumulator.sum("tpot_no_output")
        return without if without > NO_SPAN_SHARE * accumulator.sum("ok") else 0


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
    terms = _judge_terms(sample, slo)
    good = _certain_good_requests(sample, slo)
    good_in_steady_state = None
    if good is not None:
        steady = window.steady
        amounts = sample.accumulator.amount("good")
        good_in_steady_state = amounts.between(steady.start_s, steady.end_s)
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
    return slo is not None and _is_slo_met(sample, slo, _judge_terms(sample, slo)) is False


def _is_slo_met(sample: SloSample, slo: Slo, terms: Sequence[TermResult]) -> bool | None:
    share_met = True if slo.goodput_share is None else _is_share_met(sample, slo, slo.goodput_share)
    return combine_outcomes([share_met, *(term.met for term in terms)])


def _rests_on_withheld_metrics(sample: SloSample, slo: Slo) -> bool:
    pooled = pooled_figures()
    return any(term.metric in sample.unsound and term.metric not in pooled for term in slo.terms)


def _lacks_tpot(sample: SloSample, slo: Slo) -> bool:
    return any(sample.responses_without_span(term) for term in slo.terms)


def _certain_good_requests(sample: SloSample, slo: Slo) -> int | None:
    """Return the number of requests that meet every term, or None if it is too uncertain."""
    if _rests_on_withheld_metrics(sample, slo) or _lacks_tpot(sample, slo):
        return None
    good = sample.accumulator.sum("good")
    good_range = bound_good_requests(sample.accumulator, slo)
    if good_range is not None and good_range.exceeds(good, MAX_UNCERTAIN_GOOD_SHARE):
        return None
    return good


def _is_share_met(sample: SloSample, slo: Slo, share_limit: float) -> bool | None:
    """Return whether the required share of requests is good, or None if it is undecided."""
    if _rests_on_withheld_metrics(sample, slo):
        return None
    good_range = bound_good_requests(sample.accumulator, slo)
    good = sample.accumulator.sum("good")
    possible_counts = [good] if good_range is None else [int(end) for end in good_range]
    outcomes = {_judge_share(sample, count, share_limit) for count in possible_counts}
    met = outcomes.pop() if len(outcomes) == 1 else None
    return None if met and _lacks_tpot(sample, slo) else met


def _judge_share(sample: SloSample, good: int, share_limit: float) -> bool | None:
    """Return whether so many good requests are enough, or None if the unfinished ones decide."""
    counted = sample.counted
    unfinished = sample.unfinished
    if sample.has_too_many_unfinished and good + unfinished >= share_limit * (counted + unfinished):
        return None
    return bool(counted) and good / counted >= share_limit


# -- terms -----------------------------------------------------------------------------------------


class _TermCounts(NamedTuple):
    """How many samples a term is judged by.

    Attributes:
        with_value: Samples that have a value.
        samples: These and the requests that count as over the limit without a value.
        over: Samples over the limit, those without a value included.
        unfinished: Unfinished requests that are not part of `samples`.
        without_span: Responses that are left out because they lack a TPOT.
    """

    with_value: int
    samples: int
    over: int
    unfinished: int = 0
    without_span: int = 0


class _TermOutcome(NamedTuple):
    met: bool | None
    undecided: str = ""


def _judge_terms(sample: SloSample, slo: Slo) -> tuple[TermResult, ...]:
    """Judge each term of an SLO, those on pooled gaps by the gaps of all requests."""
    pooled = pooled_figures()
    return tuple(
        _judge_gap_term(sample, term)
        if term.metric in pooled
        else _judge_request_term(sample, term, term_number)
        for term_number, term in enumerate(slo.terms)
    )


def _judge_gap_term(sample: SloSample, term: Term) -> TermResult:
    """Judge a term on the gaps between events of all requests together."""
    gaps = sample.gaps
    counts = _TermCounts(gaps.count, gaps.count, gaps.over(term.limit_ns))
    reason = sample.unsound.get(term.metric, "")
    if not reason and not gaps.count:
        reason = _no_value_reason(term.metric)
    value_ns = gaps.quantile(term.quantile) if gaps.count else None
    met = value_ns is not None and value_ns <= term.limit_ns
    if reason:
        return _undecided_term(term, counts, reason)
    if sample.has_too_many_unfinished:
        return _term_result(term, counts, _TermOutcome(None, _TOO_MANY_UNFINISHED), value_ns)
    return _term_result(term, counts, _TermOutcome(met), value_ns)


def _judge_request_term(sample: SloSample, term: Term, term_number: int) -> TermResult:
    """Judge a term on a metric that has one value per request."""
    accumulator = sample.accumulator
    counts = _count_request_values(sample, term, term_number)
    value_index = quantile_index(counts.samples, term.quantile) if counts.samples else 0
    value_ns = None
    value_range = None
    if value_index < counts.with_value:
        value_ns = accumulator.nth_value(term.metric, value_index)
        value_range = _range_if_uncertain(sample, term.metric, value_index, value_ns)
    reason = _undecided_reason(sample, term, counts)
    if reason:
        return _undecided_term(term, counts, reason, value_range)
    outcome = _decide_request_term(sample, term, counts, value_range)
    return _term_result(
        term, counts, outcome, value_ns if value_range is None else None, value_range
    )


def _count_request_values(sample: SloSample, term: Term, term_number: int) -> _TermCounts:
    """Count the samples of a term, with every failed request as one over the limit."""
    accumulator = sample.accumulator
    with_value = accumulator.sum(term_sum(term_number, "values"))
    surely_over = accumulator.sum(term_sum(term_number, "unfinished_over"))
    unfinished = accumulator.sum("unfinished") - surely_over
    without_value = sample.everyone - unfinished - accumulator.sum("ok")
    return _TermCounts(
        with_value=with_value,
        samples=with_value + without_value,
        over=accumulator.sum(term_sum(term_number, "over")) + without_value,
        unfinished=unfinished,
        without_span=sample.responses_without_span(term),
    )


def _range_if_uncertain(
    sample: SloSample, metric: str, index_in_order: int, value_ns: float
) -> Range | None:
    """Return the range of a value of the ordered sample if it is too uncertain to be shown."""
    value_range = sample.accumulator.nth_range(metric, index_in_order)
    if value_range is None:
        return None
    limit = uncertainty_limit(metric, sample.limits)
    return value_range if value_range.exceeds(value_ns, limit) else None


def _decide_request_term(
    sample: SloSample, term: Term, counts: _TermCounts, value_range: Range | None
) -> _TermOutcome:
    """Return whether a term is met, or why it is undecided."""
    met = _is_term_met(sample, term, counts)
    if value_range is not None:
        if value_range.lower <= term.limit_ns < value_range.upper:
            return _TermOutcome(None, _limit_in_range_reason(term.metric, value_range))
        return _TermOutcome(met)
    if met is not None:
        return _TermOutcome(met)
    if counts.without_span:
        return _TermOutcome(None, _came_at_once_reason(counts.without_span))
    return _TermOutcome(None, _TOO_MANY_UNFINISHED)


def _is_term_met(sample: SloSample, term: Term, counts: _TermCounts) -> bool | None:
    """Return whether a term is met, or None if requests that are left out would decide it.

    With too many unfinished requests a term is missed only if it were missed with all of them
    within the limit.
    """
    left_out = counts.unfinished + counts.without_span
    if sample.has_too_many_unfinished or counts.without_span:
        everyone = counts.samples + left_out
        if not everyone or counts.over < everyone - quantile_index(everyone, term.quantile):
            return None
    value_index = quantile_index(counts.samples, term.quantile) if counts.samples else 0
    return value_index < min(counts.with_value, counts.samples - counts.over)


def _undecided_reason(sample: SloSample, term: Term, counts: _TermCounts) -> str:
    """Return why a term on requests can be neither met nor missed, or "" if it can.

    A term that no ok request can have a value for is not missed.
    """
    if term.metric in sample.unsound:
        return sample.unsound[term.metric]
    if counts.with_value or (counts.samples and not sample.accumulator.sum("ok")):
        return ""
    if counts.without_span:
        return _came_at_once_reason(counts.without_span)
    return _no_value_reason(term.metric)


_TOO_MANY_UNFINISHED = (
    "too many requests were unfinished when the drain ended: give a longer --grace, or none"
)


def _no_value_reason(metric: str) -> str:
    """Return why no request has a value of a metric, as a sentence."""
    if metric in ("tpot", "tpot_mlperf"):
        return "no answer had the two tokens of a TPOT"
    if needs(metric) in ("tokens", "stream"):
        return "no answer had two output events"
    return "no request has this figure"


def _came_at_once_reason(responses: int) -> str:
    answers = format.counted(responses, "answer")
    return f"{answers} with tokens for a TPOT came in one event, or without text: no span to divide"


def _limit_in_range_reason(metric: str, value_range: Range) -> str:
    low = format.milliseconds(milliseconds(value_range.lower))
    high = format.milliseconds(milliseconds(value_range.upper))
    return f"the limit lies within the range of {words(metric)}, {low} to {high} ms"


def _undecided_term(
    term: Term, counts: _TermCounts, reason: str, value_range: Range | None = None
) -> TermResult:
    """Return the result of a term that cannot be decided, without its value."""
    outcome = _TermOutcome(None, reason)
    return _term_result(term, counts._replace(over=0), outcome, None, value_range)


def _term_result(
    term: Term,
    counts: _TermCounts,
    outcome: _TermOutcome,
    value_ns: float | None,
    value_range: Range | None = None,
) -> TermResult:
    """Return the result of a term. `value_ns` is None if the value is not shown."""
    needed = SUPPORT.get(quantile_name(term.quantile)) or needed_samples(term.quantile)
    return TermResult(
        metric=term.metric,
        quantile=term.quantile,
        limit_ms=milliseconds(term.limit_ns),
        value_ms=None if value_ns is None else milliseconds(value_ns),
        margin_ms=None if value_ns is None else milliseconds(term.limit_ns - value_ns),
        met=outcome.met,
        over=counts.over,
        count=counts.samples,
        needed=needed,
        supported=counts.samples >= needed,
        undecided=outcome.undecided,
        unfinished=counts.unfinished,
        low_ms=None if value_range is None else milliseconds(value_range.lower),
        high_ms=None if value_range is None else milliseconds(value_range.upper),
    )
