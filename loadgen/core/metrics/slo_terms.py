"""Judges each term of an SLO at its quantile: met, missed, or undecided with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadgen.core import format
from loadgen.core.metrics.accumulator import term_sum
from loadgen.core.metrics.uncertainty import Range, uncertainty_limit
from loadgen.core.slo import promise
from loadgen.core.stats.quantiles import (
    SUPPORT,
    milliseconds,
    needed_samples,
    quantile_index,
    quantile_name,
)
from loadgen.figures import metric_label, needs, pooled_metrics

if TYPE_CHECKING:
    from loadgen.core.metrics.slo_sample import SloSample
    from loadgen.core.slo import Slo, Term


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
        """The term as users write it, such as `TTFT p99 at most 2,000 ms`."""
        return promise(self.metric, self.quantile, self.limit_ms)


class _SampleCounts(NamedTuple):
    """How many samples a term is judged by. A sample is a request, or a gap between events.

    Attributes:
        total: All samples: those with a value, and requests that count as over the limit although
            they have no value, because they failed.
        with_value: Samples that have a value.
        over_limit: Samples over the limit, those without a value included.
        unfinished: Unfinished requests that are not part of `total`.
        without_tpot: Responses that are left out because they lack a TPOT.
    """

    total: int
    with_value: int
    over_limit: int
    unfinished: int = 0
    without_tpot: int = 0


class _TermOutcome(NamedTuple):
    """Whether a term is met, or None with the reason why that is undecided."""

    is_met: bool | None
    undecided_reason: str = ""


def judge_terms(sample: SloSample, slo: Slo) -> tuple[TermResult, ...]:
    """Judge each term of an SLO. Terms on pooled gaps are judged by the gaps of all requests."""
    names_of_pooled = pooled_metrics()
    return tuple(
        _judge_gap_term(sample, term)
        if term.metric in names_of_pooled
        else _judge_request_term(sample, term, term_number)
        for term_number, term in enumerate(slo.terms)
    )


def _judge_gap_term(sample: SloSample, term: Term) -> TermResult:
    """Judge a term on the gaps between events of all requests together."""
    gaps = sample.gaps
    counts = _SampleCounts(
        total=gaps.count, with_value=gaps.count, over_limit=gaps.count_over(term.limit_ns)
    )
    if term.metric in sample.undecidable_metrics:
        return _undecided_term(term, counts, sample.undecidable_metrics[term.metric])
    if not gaps.count:
        return _undecided_term(term, counts, _no_value_reason(term.metric))
    value_ns = gaps.quantile(term.quantile)
    if sample.has_too_many_unfinished:
        outcome = _TermOutcome(None, _TOO_MANY_UNFINISHED)
    else:
        outcome = _TermOutcome(value_ns <= term.limit_ns)
    return _term_result(term, counts, outcome, value_ns)


# -- terms on requests -----------------------------------------------------------------------------


def _judge_request_term(sample: SloSample, term: Term, term_number: int) -> TermResult:
    """Judge a term on a metric that has one value per request.

    Requests without a value come last in the order of values, because they are over the limit. If
    the quantile falls on one of them, it has no value.
    """
    counts = _count_request_values(sample, term, term_number)
    value_index = _quantile_index(counts, term)
    value_ns = None
    value_range = None
    if value_index < counts.with_value:
        value_ns = sample.accumulator.nth_value(term.metric, value_index)
        value_range = _range_if_uncertain(sample, term.metric, value_index, value_ns)
    reason = _reason_against_judgement(sample, term, counts)
    if reason:
        return _undecided_term(term, counts, reason, value_range)
    outcome = _decide_request_term(sample, term, counts, value_range)
    shown_value_ns = value_ns if value_range is None else None
    return _term_result(term, counts, outcome, shown_value_ns, value_range)


def _quantile_index(counts: _SampleCounts, term: Term) -> int:
    """Return the index of the quantile of a term in the order of samples, 0 without samples."""
    return quantile_index(counts.total, term.quantile) if counts.total else 0


def _count_request_values(sample: SloSample, term: Term, term_number: int) -> _SampleCounts:
    """Count the samples of a term, with every failed request as one over the limit."""
    accumulator = sample.accumulator
    with_value = accumulator.sum(term_sum(term_number, "values"))
    # An unfinished request is surely over the limit if it was already when the drain ended.
    surely_over = accumulator.sum(term_sum(term_number, "unfinished_over"))
    unfinished = accumulator.sum("unfinished") - surely_over
    without_value = sample.not_cancelled - unfinished - accumulator.sum("ok")
    return _SampleCounts(
        total=with_value + without_value,
        with_value=with_value,
        over_limit=accumulator.sum(term_sum(term_number, "over")) + without_value,
        unfinished=unfinished,
        without_tpot=sample.responses_without_tpot(term),
    )


def _range_if_uncertain(
    sample: SloSample, metric: str, value_index: int, value_ns: float
) -> Range | None:
    """Return the range of the value at an index if the value is too uncertain to be shown.

    A value is uncertain by the errors of the timestamps it is computed from.
    """
    value_range = sample.accumulator.nth_range(metric, value_index)
    if value_range is None:
        return None
    limit = uncertainty_limit(metric, sample.limits)
    return value_range if value_range.exceeds(value_ns, limit) else None


def _decide_request_term(
    sample: SloSample, term: Term, counts: _SampleCounts, value_range: Range | None
) -> _TermOutcome:
    """Return whether a term is met, or why it is undecided.

    An uncertain value still decides the term if its whole range is on one side of the limit.
    """
    is_met = _is_request_term_met(sample, term, counts)
    if value_range is not None:
        if value_range.lower <= term.limit_ns < value_range.upper:
            return _TermOutcome(None, _limit_in_range_reason(term.metric, value_range))
        return _TermOutcome(is_met)
    if is_met is not None:
        return _TermOutcome(is_met)
    if counts.without_tpot:
        return _TermOutcome(None, _no_time_span_reason(counts.without_tpot))
    return _TermOutcome(None, _TOO_MANY_UNFINISHED)


def _is_request_term_met(sample: SloSample, term: Term, counts: _SampleCounts) -> bool | None:
    """Return whether a term is met, or None if requests that are left out would decide it.

    If many requests are left out, a term is missed only if it were missed with all of them within
    the limit.
    """
    if sample.has_too_many_unfinished or counts.without_tpot:
        all_requests = counts.total + counts.unfinished + counts.without_tpot
        if not all_requests:
            return None
        allowed_over_limit = all_requests - 1 - quantile_index(all_requests, term.quantile)
        if counts.over_limit <= allowed_over_limit:
            return None
    within_limit = min(counts.with_value, counts.total - counts.over_limit)
    return _quantile_index(counts, term) < within_limit


# -- reasons why a term is undecided ---------------------------------------------------------------


_TOO_MANY_UNFINISHED = (
    "too many requests were unfinished when the drain ended: give a longer --grace, or none"
)


def _reason_against_judgement(sample: SloSample, term: Term, counts: _SampleCounts) -> str:
    """Return why a term on requests can be neither met nor missed, or "" if it can.

    It can be judged if any request has a value, and also if all requests failed, which miss it. If
    there are ok requests and none can have a value, the term is not missed.
    """
    if term.metric in sample.undecidable_metrics:
        return sample.undecidable_metrics[term.metric]
    have_all_failed = counts.total > 0 and not sample.accumulator.sum("ok")
    if counts.with_value or have_all_failed:
        return ""
    if counts.without_tpot:
        return _no_time_span_reason(counts.without_tpot)
    return _no_value_reason(term.metric)


def _no_value_reason(metric: str) -> str:
    """Return why no request has a value of a metric, as a sentence."""
    if metric in ("tpot", "tpot_mlperf"):
        return "no answer had the two tokens of a TPOT"
    if needs(metric) in ("tokens", "stream"):
        return "no answer had two output events"
    return "no request has this figure"


def _no_time_span_reason(responses: int) -> str:
    """Return why so many responses have no TPOT although they have enough tokens for one."""
    answers = format.counted(responses, "answer")
    return f"{answers} with tokens for a TPOT came in one event, or without text: no span to divide"


def _limit_in_range_reason(metric: str, value_range: Range) -> str:
    """Return that the value of a metric is too uncertain to compare it with the limit."""
    low = format.milliseconds(milliseconds(value_range.lower))
    high = format.milliseconds(milliseconds(value_range.upper))
    return f"the limit lies within the range of {metric_label(metric)}, {low} to {high} ms"


# -- results ---------------------------------------------------------------------------------------


def _undecided_term(
    term: Term, counts: _SampleCounts, reason: str, value_range: Range | None = None
) -> TermResult:
    """Return the result of a term that cannot be judged, without its value or samples over it."""
    outcome = _TermOutcome(None, reason)
    counts = counts._replace(over_limit=0)
    return _term_result(term, counts, outcome, value_ns=None, value_range=value_range)


def _term_result(
    term: Term,
    counts: _SampleCounts,
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
        met=outcome.is_met,
        over=counts.over_limit,
        count=counts.total,
        needed=needed,
        supported=counts.total >= needed,
        undecided=outcome.undecided_reason,
        unfinished=counts.unfinished,
        low_ms=None if value_range is None else milliseconds(value_range.lower),
        high_ms=None if value_range is None else milliseconds(value_range.upper),
    )
