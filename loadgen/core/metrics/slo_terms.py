"""Judges each term of an SLO at its quantile: met, missed, or undecided with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadgen.core import format
from loadgen.core.metrics.accumulator import term_sum_name
from loadgen.core.metrics.sample_bounds import Range
from loadgen.core.metrics.uncertainty import max_error_share
from loadgen.core.slo import describe_term
from loadgen.core.stats.quantiles import (
    NEEDED_SAMPLES,
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
    def objective(self) -> str:
        """The term as users write it, such as `TTFT p99 at most 2,000 ms`."""
        return describe_term(self.metric, self.quantile, self.limit_ms)


class _SampleCounts(NamedTuple):
    """How many samples a term is judged by. A sample is a request, or a gap between events.

    Attributes:
        total: All samples: those with a value, and requests that count as over the limit although
            they have no value, because they failed.
        with_value: Samples that have a value.
        over_limit: Samples over the limit, those without a value included.
        unfinished: Unfinished requests that are not part of `total`, because it is not known if
            they would have exceeded the limit.
        without_tpot: Responses that are not part of `total`, because they have no time per output
            token (TPOT). This is 0 if they are too few to matter.
    """

    total: int
    with_value: int
    over_limit: int
    unfinished: int = 0
    without_tpot: int = 0


class _TermValue(NamedTuple):
    """The value of a metric at the quantile of a term.

    Attributes:
        value_ns: The value. None if there is none, or if it is too uncertain to be shown.
        uncertain_range: The range of a value that is too uncertain to be shown, else None.
    """

    value_ns: float | None = None
    uncertain_range: Range | None = None


_NO_VALUE = _TermValue()


class _TermOutcome(NamedTuple):
    """Whether a term is met, or None with the reason why that is undecided."""

    is_met: bool | None
    undecided_reason: str = ""


def _undecided_outcome(reason: str) -> _TermOutcome:
    """Return the outcome of a term that is undecided for a reason."""
    return _TermOutcome(is_met=None, undecided_reason=reason)


def judge_terms(sample: SloSample, slo: Slo) -> tuple[TermResult, ...]:
    """Judge each term of an SLO, such as "TTFT p99 at most 2 s", as met, missed or undecided."""
    gap_metrics = pooled_metrics()
    results = []
    for term_number, term in enumerate(slo.terms):
        if term.metric in gap_metrics:
            results.append(_judge_gap_term(sample, term))
        else:
            results.append(_judge_request_term(sample, term, term_number))

    return tuple(results)


def _judge_gap_term(sample: SloSample, term: Term) -> TermResult:
    """Judge a term on the gaps between output events of all requests, such as the p99 of ITL."""
    gaps = sample.gaps
    counts = _SampleCounts(
        total=gaps.count, with_value=gaps.count, over_limit=gaps.count_over(term.limit_ns)
    )

    if term.metric in sample.withheld_metrics:
        return _undecided_term(term, counts, sample.withheld_metrics[term.metric])
    if not gaps.count:
        return _undecided_term(term, counts, _no_value_reason(term.metric))

    value_ns = gaps.quantile(term.quantile)
    outcome = _TermOutcome(is_met=value_ns <= term.limit_ns)
    if sample.has_too_many_unfinished:
        outcome = _undecided_outcome(_TOO_MANY_UNFINISHED)

    return _term_result(term, counts, outcome, _TermValue(value_ns))


# -- terms on requests -----------------------------------------------------------------------------


def _judge_request_term(sample: SloSample, term: Term, term_number: int) -> TermResult:
    """Judge a term on a metric that has one value per request, such as the p99 of TTFT.

    Args:
        sample: The requests.
        term: The term.
        term_number: The index of the term in the SLO.
    """
    counts = _count_request_values(sample, term, term_number)
    value = _value_at_quantile(sample, term, counts)

    reason = _reason_not_to_judge(sample, term, counts)
    if reason:
        return _undecided_term(term, counts, reason, value.uncertain_range)

    outcome = _decide_request_term(sample, term, counts, value.uncertain_range)
    return _term_result(term, counts, outcome, value)


def _value_at_quantile(sample: SloSample, term: Term, counts: _SampleCounts) -> _TermValue:
    """Return the value of a metric at the quantile of a term, or a range if it is uncertain."""
    if counts.with_value == 0:
        return _NO_VALUE

    # Requests without a value, such as failed requests, come last in the order of values.
    value_index = quantile_index(counts.total, term.quantile)
    is_at_request_without_value = value_index >= counts.with_value
    if is_at_request_without_value:
        return _NO_VALUE

    value_ns = sample.accumulator.nth_value(term.metric, value_index)
    uncertain_range = _find_uncertain_range(sample, term.metric, value_index, value_ns)
    if uncertain_range is not None:
        return _TermValue(uncertain_range=uncertain_range)

    return _TermValue(value_ns)


def _count_request_values(sample: SloSample, term: Term, term_number: int) -> _SampleCounts:
    """Count the requests that a term is judged by.

    - An ok request counts if it has a value of the metric.
    - A failed, dropped or lost request counts as over the limit.
    - A request that the end of the run cut off counts as over the limit if it already was then.
      Otherwise it does not count.
    - A cancelled request does not count.

    Args:
        sample: The requests.
        term: The term.
        term_number: The index of the term in the SLO.
    """
    sum_of = sample.accumulator.sum
    ok_with_value = sum_of(term_sum_name(term_number, "values"))
    ok_over_limit = sum_of(term_sum_name(term_number, "over"))

    # Unfinished requests are those that the end of the run cut off.
    unfinished = sum_of("unfinished")
    unfinished_over_limit = sum_of(term_sum_name(term_number, "unfinished_over"))

    # Requests that count as over the limit without a value.
    failed_dropped_or_lost = sample.not_cancelled - sum_of("ok") - unfinished
    over_without_value = failed_dropped_or_lost + unfinished_over_limit

    return _SampleCounts(
        total=ok_with_value + over_without_value,
        with_value=ok_with_value,
        over_limit=ok_over_limit + over_without_value,
        unfinished=unfinished - unfinished_over_limit,
        without_tpot=sample.count_without_tpot(term),
    )


def _find_uncertain_range(
    sample: SloSample, metric: str, value_index: int, value_ns: float
) -> Range | None:
    """Return the range of a latency that is too uncertain to be shown, None if it is certain.

    Timestamps have errors, so the latency of a request is in a range around the measured value.

    Args:
        sample: The requests.
        metric: The name of the latency.
        value_index: The index of the value in the ordered sample of the metric.
        value_ns: The measured value.
    """
    value_range = sample.accumulator.nth_range(metric, value_index)
    if value_range is None:
        return None

    accepted_error_share = max_error_share(metric, sample.limits)
    is_too_uncertain = value_range.exceeds(value_ns, accepted_error_share)
    return value_range if is_too_uncertain else None


def _decide_request_term(
    sample: SloSample, term: Term, counts: _SampleCounts, uncertain_range: Range | None
) -> _TermOutcome:
    """Return whether a term on requests is met, or why it is undecided.

    Args:
        sample: The requests.
        term: The term.
        counts: The requests that the term is judged by, at least one.
        uncertain_range: The range of an uncertain value at the quantile, None if it is certain.
    """
    # The value may be below or above the limit.
    if uncertain_range is not None and _is_in_range(term.limit_ns, uncertain_range):
        return _undecided_outcome(_limit_in_range_reason(term.metric, uncertain_range))

    # Even if all requests without a known value were within the limit, the term would be missed.
    all_requests = counts.total + counts.unfinished + counts.without_tpot
    if counts.over_limit > _allowed_over_limit(all_requests, term.quantile):
        return _TermOutcome(is_met=False)

    # So many requests have no known value that they could decide the term.
    if sample.has_too_many_unfinished or counts.without_tpot > 0:
        return _undecided_outcome(_unknown_values_reason(counts, uncertain_range))

    is_met = counts.over_limit <= _allowed_over_limit(counts.total, term.quantile)
    return _TermOutcome(is_met)


def _is_in_range(limit_ns: float, value_range: Range) -> bool:
    """Return True if a limit lies within a range of values."""
    return value_range.lower <= limit_ns < value_range.upper


def _allowed_over_limit(requests: int, quantile: float) -> int:
    """Return how many of the requests may be over a limit if a quantile has to be within it.

    In ascending order, 200 requests have the indexes 0 to 199, and their p99 has the index 198. So
    only the request at index 199 may be over the limit, and the result is 1.
    """
    index_of_last = requests - 1
    return index_of_last - quantile_index(requests, quantile)


# -- reasons why a term is undecided ---------------------------------------------------------------


_TOO_MANY_UNFINISHED = (
    "too many requests were unfinished when the drain ended. Use a longer --grace, or none"
)


def _reason_not_to_judge(sample: SloSample, term: Term, counts: _SampleCounts) -> str:
    """Return why no value of the requests can be compared with the limit of a term.

    Return "" if the term can be judged. If all requests failed, it is missed, although no request
    has a value.
    """
    if term.metric in sample.withheld_metrics:
        return sample.withheld_metrics[term.metric]

    has_values = counts.with_value > 0
    have_all_failed = counts.total > 0 and sample.accumulator.sum("ok") == 0
    if has_values or have_all_failed:
        return ""

    if counts.without_tpot:
        return _no_tpot_reason(counts.without_tpot)

    return _no_value_reason(term.metric)


def _unknown_values_reason(counts: _SampleCounts, uncertain_range: Range | None) -> str:
    """Return why so many requests have no known value that they could decide a term.

    Return "" if the result of the term has a range instead of a value, which explains it.
    """
    if uncertain_range is not None:
        return ""
    if counts.without_tpot:
        return _no_tpot_reason(counts.without_tpot)
    return _TOO_MANY_UNFINISHED


def _no_value_reason(metric: str) -> str:
    """Return why no request has a value of a metric, as a sentence."""
    if metric in ("tpot", "tpot_mlperf"):
        return "no response had two tokens, which a TPOT needs"
    if needs(metric) in ("tokens", "stream"):
        return "no response had two output events"
    return "no request has a value of this metric"


def _no_tpot_reason(responses: int) -> str:
    """Return why responses with enough tokens have no time per output token (TPOT)."""
    answers = format.counted(responses, "answer")
    return (
        f"{answers} with enough tokens for a TPOT arrived in one event or without "
        "text, so there is no time span to measure"
    )


def _limit_in_range_reason(metric: str, value_range: Range) -> str:
    """Return that the value of a metric is too uncertain to compare it with the limit."""
    low = format.milliseconds(milliseconds(value_range.lower))
    high = format.milliseconds(milliseconds(value_range.upper))
    return f"the limit lies within the range of {metric_label(metric)}, {low} to {high} ms"


# -- results ---------------------------------------------------------------------------------------


def _undecided_term(
    term: Term, counts: _SampleCounts, reason: str, uncertain_range: Range | None = None
) -> TermResult:
    """Return the result of a term that cannot be judged, without its value.

    It counts no samples over the limit, because their values cannot be compared with it.
    """
    outcome = _undecided_outcome(reason)
    value = _TermValue(uncertain_range=uncertain_range)
    counts_without_over = counts._replace(over_limit=0)
    return _term_result(term, counts_without_over, outcome, value)


def _term_result(
    term: Term, counts: _SampleCounts, outcome: _TermOutcome, value: _TermValue
) -> TermResult:
    """Return the result of a term in the units of summary.json, which has times in ms.

    Args:
        term: The term.
        counts: The samples that the term is judged by.
        outcome: Whether the term is met.
        value: The value at the quantile, or its range.
    """
    # The value at the quantile, and by how much it is below the limit.
    value_ms = None
    margin_ms = None
    if value.value_ns is not None:
        value_ms = milliseconds(value.value_ns)
        margin_ms = milliseconds(term.limit_ns - value.value_ns)

    # A value that is too uncertain has a range instead.
    low_ms = None
    high_ms = None
    if value.uncertain_range is not None:
        low_ms = milliseconds(value.uncertain_range.lower)
        high_ms = milliseconds(value.uncertain_range.upper)

    needed_count = _needed_samples(term.quantile)
    return TermResult(
        # The term.
        metric=term.metric,
        quantile=term.quantile,
        limit_ms=milliseconds(term.limit_ns),
        # The value.
        value_ms=value_ms,
        margin_ms=margin_ms,
        low_ms=low_ms,
        high_ms=high_ms,
        # The samples.
        over=counts.over_limit,
        count=counts.total,
        unfinished=counts.unfinished,
        needed=needed_count,
        supported=counts.total >= needed_count,
        # The outcome.
        met=outcome.is_met,
        undecided=outcome.undecided_reason,
    )


def _needed_samples(quantile: float) -> int:
    """Return how many samples a quantile needs to be supported, such as 662 for a p99."""
    name = quantile_name(quantile)
    is_common_quantile = name in NEEDED_SAMPLES
    return NEEDED_SAMPLES[name] if is_common_quantile else needed_samples(quantile)
