"""The sentences about a verdict: what it covers, and how certain it is.

This module is pure.
"""

from __future__ import annotations

import math

from loadgen.contracts.verdict import TermVerdict, Validation
from loadgen.core import format
from loadgen.core.stats.intervals import Interval
from loadgen.repeated.capacity import HORIZON_S

MIN_SHOWN_PERCENT = 1e-4
"""Percentages below this, of either sign, are written as 0."""


def describe_extensions(validation: Validation) -> str:
    """Return how often an extended validation was judged, or "" if it was not extended."""
    extensions = validation.analyses - 1
    if extensions == 0:
        return ""

    times = "once" if extensions == 1 else f"{extensions} times"
    error_rate = f"{(1 - validation.confidence) * 100:g} %"
    return (
        f"Extended {times}; confidence raised to {_last_confidence(validation) * 100:g} % to keep "
        f"the overall error rate at {error_rate}. Terms that were decided before stay decided."
    )


def describe_short_horizon(validation: Validation) -> str:
    """Return a warning if the recurrence horizon of a contract is shorter than the default."""
    if validation.horizon_s >= HORIZON_S:
        return ""
    return (
        f"Horizon {format.duration(validation.horizon_s)} (default {format.duration(HORIZON_S)}): "
        "slowdowns that recur less often may have been missed."
    )


def format_confidence(validation: Validation) -> str:
    """Return the confidence of the intervals of a validation, after the last extension if any."""
    overall = f"{validation.confidence * 100:g} %"
    if validation.analyses == 1:
        return f"{overall}, two-sided"
    last = f"{_last_confidence(validation) * 100:g} %"
    return f"{last}, two-sided ({overall} over all {validation.analyses} analyses)"


def _last_confidence(validation: Validation) -> float:
    """Return the confidence of the last interim analysis."""
    return _compute_confidence(validation, validation.analyses)


def _compute_confidence(validation: Validation, analysis: int) -> float:
    """Return the confidence of an interim analysis: see `judge.judge_interim_analyses`."""
    return 1 - (1 - validation.confidence) * 0.5 ** (analysis - 1)


def compute_term_confidence(validation: Validation, term: TermVerdict) -> float:
    """Return the confidence of the interval of a term.

    It is that of the interim analysis which the interval is from. A term about scored responses is
    judged only once, with the confidence of the contract.
    """
    analysis = 1 if term.analysis is None else term.analysis
    return _compute_confidence(validation, analysis)


def find_common_confidence(validation: Validation) -> float | None:
    """Return the confidence of all intervals of a validation, or None if they have several.

    Without any interval it is the confidence of the contract.
    """
    confidences = {
        compute_term_confidence(validation, term)
        for level in validation.levels
        for term in level.terms
        if term.low is not None or term.high is not None
    }
    if len(confidences) > 1:
        return None
    return next(iter(confidences), validation.confidence)


def format_coverage(term: TermVerdict) -> str:
    """Return which slowdowns of the server a PASS covers, and its sample. "" for other verdicts."""
    if term.code != "kept" or term.horizon_s is None:
        return ""
    text = f"covers slowdowns that come at least every {format.duration(term.horizon_s)}"
    if term.effective_size is not None:
        text += f"; effective sample size {term.effective_size:,}"
    return text


def format_metric(value: float, unit: str) -> str:
    """Return a metric with its unit, such as "180 ms", "99.5 %" or "12.5/s".

    A time of 1,000 ms or more is written in seconds, minutes or hours.
    """
    if unit == "ms":
        return format.duration(value / 1e3) if value >= 1e3 else f"{format.quantity(value)} ms"
    if unit == "%":
        return _format_percentage(value)

    is_per_time = unit.startswith("/")  # as in 12.5/s, without a space
    if is_per_time:
        return f"{format.quantity(value)}{unit}"

    return f"{format.quantity(value)} {unit}".strip()


def _format_percentage(percentage: float) -> str:
    """Return a percentage with its sign, such as "-1.2 %".

    One that is negligible, for example because of a rounding error, is written as 0 %.
    """
    is_shown = abs(percentage) > MIN_SHOWN_PERCENT
    if not is_shown:
        return format.percent(0.0)
    sign = "-" if percentage < 0 else ""
    return f"{sign}{format.percent(abs(percentage) / 100)}"


def format_interval(interval: Interval, unit: str) -> str:
    """Return the ends of an interval with their unit, such as "180 ms to 210 ms".

    An interval with one end is written as "180 ms or more" or "210 ms or less". An infinite lower
    end means that even in the best case the metric is that of a failed request.
    """
    if interval.low == math.inf:
        return "only failed requests"

    has_low = math.isfinite(interval.low)
    has_high = math.isfinite(interval.high)
    if has_low and has_high:
        return f"{format_metric(interval.low, unit)} to {format_metric(interval.high, unit)}"
    if has_low:
        return f"{format_metric(interval.low, unit)} or more"
    if has_high:
        return f"{format_metric(interval.high, unit)} or less"

    return "unbounded"


def format_term_interval(term: TermVerdict) -> str:
    """Return the confidence interval of a judged term, or a dash without a metric."""
    if term.low is None and term.high is None:
        return format.NONE
    low = -math.inf if term.low is None else term.low
    high = math.inf if term.high is None else term.high
    return format_interval(Interval(math.nan, low, high), term.unit)


def format_term_value(term: TermVerdict) -> str:
    """Return the metric of a judged term with its unit, or a dash if it is not known."""
    return format.NONE if term.value is None else format_metric(term.value, term.unit)
