"""The sentences about a verdict: what it holds for, and how certain it is.

This module is pure.
"""

from __future__ import annotations

import math

from loadgen.contracts.verdict import TermVerdict, Validation
from loadgen.core import format
from loadgen.core.stats.intervals import Interval
from loadgen.repeated.capacity import HORIZON_S, describe_horizon

MIN_SHOWN_PERCENT = 1e-4
"""Percentages below this, of either sign, are written as 0."""


def analyses_text(validation: Validation) -> str:
    """Return how often an extended validation was judged, or "" if it was not extended."""
    if validation.analyses == 1:
        return ""
    last = f"{_last_confidence(validation) * 100:g} %"
    return (
        f"extended: judged {validation.analyses} times, and a term that was decided stays so. "
        f"This time {last} of confidence were asked for, so that all looks together err in no "
        f"more than {(1 - validation.confidence) * 100:g} %"
    )


def short_horizon_text(validation: Validation) -> str:
    """Return the horizon of a contract if it is shorter than the default, else ""."""
    if validation.horizon_s >= HORIZON_S:
        return ""
    return f"signed: {describe_horizon(validation.horizon_s)}"


def confidence_text(validation: Validation) -> str:
    """Return the confidence of the intervals of a validation."""
    if validation.analyses == 1:
        return f"{validation.confidence * 100:g} %, two-sided, of every interval"
    last = f"{_last_confidence(validation) * 100:g} %, two-sided, of every interval of this look"
    return f"{last}; {validation.confidence * 100:g} % of all {validation.analyses} looks together"


def _last_confidence(validation: Validation) -> float:
    """Return the confidence of the last interim analysis: see `judge.judge_interim_analyses`."""
    return 1 - (1 - validation.confidence) * 0.5 ** (validation.analyses - 1)


def validity_text(term: TermVerdict) -> str:
    """Return what a PASS holds for: its horizon and its sample. "" for other verdicts."""
    if term.code != "kept" or term.horizon_s is None:
        return ""
    samples = ""
    if term.effective_size is not None:
        samples = f"; the load is worth {term.effective_size:,} independent samples"
    return f"for what comes back within {format.duration(term.horizon_s)}{samples}"


def format_metric(value: float, unit: str) -> str:
    """Return a metric with its unit.

    Times become seconds, minutes or hours where that is shorter, such as "1.5 s" for 1,500 ms. A
    percentage that rounding errors made slightly negative is written as 0.
    """
    if unit == "ms":
        return format.duration(value / 1e3) if value >= 1e3 else f"{format.quantity(value)} ms"
    if unit == "%":
        sign = "-" if value < -MIN_SHOWN_PERCENT else ""
        magnitude = abs(value) if abs(value) > MIN_SHOWN_PERCENT else 0.0
        return f"{sign}{format.percent(magnitude / 100)}"
    if unit.startswith("/"):
        return f"{format.quantity(value)}{unit}"
    return f"{format.quantity(value)} {unit}".strip()


def format_interval(interval: Interval, unit: str) -> str:
    """Return the ends of an interval with their unit, such as "180 ms to 210 ms".

    An end without a bound is "any". An infinite lower end means that even the best case of the
    metric is a failed request.
    """
    if interval.low == math.inf:
        return "failed requests throughout"
    low = format_metric(interval.low, unit) if math.isfinite(interval.low) else "any"
    high = format_metric(interval.high, unit) if math.isfinite(interval.high) else "any"
    return f"{low} to {high}"
