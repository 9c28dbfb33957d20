"""Decides what a difference means: better, worse, different, equivalent or inconclusive. Pure.

Latencies and rates are compared as ratios, because a change of 10 ms means little at 5 s and much
at 50 ms. Their estimates are therefore logarithms, whose difference is the logarithm of the ratio,
and which have symmetric intervals. Fractions, such as the share of requests that succeeded, are
compared as they are.
"""

from __future__ import annotations

import math

import msgspec

from loadgen.compare.difference import DIFFER, DetailedOutcome, Difference
from loadgen.compare.significance import load_needed
from loadgen.core.analysis.within_run_variance import ScaledEstimate
from loadgen.core.stats import students_t

POWER = 0.9
"""Probability with which the smallest detectable change is found."""

EQUIVALENT_CHANGE = 0.10
"""A relative change below this is small enough to call two sides equivalent."""

EQUIVALENT_POINTS = 0.01
"""The same for the difference of two fractions: one percentage point."""

MOST_LOG_CHANGE = 50.0
"""Bound of a logarithm, so that its exponential does not overflow."""


def judge(
    difference: Difference,
    estimate: ScaledEstimate,
    better: int,
    level: float,
    family_level: float,
) -> Difference:
    """Return a difference with its confidence interval, outcome and smallest detectable change.

    The interval is that of Student's t. The sides differ if it does not contain zero. They are
    equivalent if the whole interval is so close to zero that nobody would act on it. Otherwise the
    outcome is inconclusive.

    Args:
        difference: The difference.
        estimate: The difference of the estimates of both sides, with its standard error.
        better: -1 if a lower metric is better, 1 if a higher one is, and 0 if neither is.
        level: The significance level for the interval and the outcome.
        family_level: The significance level for the smallest detectable change. It is that of the
            strictest test among all metrics that are judged together, so the change would be
            detected whatever the other metrics show.
    """
    t_quantile = students_t.t_quantile(1 - level / 2, estimate.degrees_of_freedom)
    half_width = t_quantile * estimate.error
    low = _to_change(difference, estimate.value - half_width)
    high = _to_change(difference, estimate.value + half_width)
    excludes_zero = low > 0 or high < 0  # decided before the ends are clipped
    if difference.is_fraction and difference.before is not None:
        # A fraction cannot fall below 0 or rise above 1.
        low = max(low, -difference.before)
        high = min(high, 1 - difference.before)
    judged = msgspec.structs.replace(
        difference,
        low=low,
        high=high,
        detectable=_compute_detectable_change(difference, estimate, family_level),
        reason="",
    )
    if excludes_zero:
        outcome = _classify_significant(judged, estimate, better)
        return msgspec.structs.replace(judged, detailed_outcome=outcome)
    return _classify_insignificant(judged, estimate, half_width)


def _compute_detectable_change(
    difference: Difference, estimate: ScaledEstimate, level: float
) -> float | None:
    """Return the minimum detectable change: what a test at a level finds with probability POWER.

    It is (t(1 - level / 2) + t(POWER)) standard errors, as in sample size formulas. The measured
    change must be so large that chance alone does not explain it, and the true change so much
    larger that the measured one seldom falls short of that.

    Returns None if a fraction, which is between 0 and 1, cannot change by so much.
    """
    significance_quantile = students_t.t_quantile(1 - level / 2, estimate.degrees_of_freedom)
    power_quantile = students_t.t_quantile(POWER, estimate.degrees_of_freedom)
    detectable = (significance_quantile + power_quantile) * estimate.error
    if difference.is_fraction and difference.before is not None:
        largest_possible = max(difference.before, 1 - difference.before)
        if detectable > largest_possible:
            return None
    return _to_change(difference, detectable)


def _to_change(difference: Difference, value: float) -> float:
    """Convert a value on the scale of the estimate to a change, such as 0.1 for +10 %.

    That scale is the logarithm of a ratio, or for a fraction the difference itself.
    """
    if difference.is_fraction:
        return value
    return math.expm1(min(value, MOST_LOG_CHANGE))


def _classify_significant(
    difference: Difference, estimate: ScaledEstimate, better: int
) -> DetailedOutcome:
    """Return the outcome of a significant change, whose interval does not contain zero.

    A single run per side shows that these two runs differ, but not that the two systems do: the
    next start of the same server may be as different. So only repeats are called better or worse.

    Args:
        difference: The difference.
        estimate: Its estimate, whose sign says whether the metric has risen.
        better: -1 if a lower metric is better, 1 if a higher one is, and 0 if neither is.
    """
    if not difference.is_repeated:
        return DIFFER
    if not better:
        return "different"
    has_risen = estimate.value > 0
    is_higher_better = better > 0
    return "better" if has_risen == is_higher_better else "worse"


def _classify_insignificant(
    difference: Difference, estimate: ScaledEstimate, half_width: float
) -> Difference:
    """Return a difference whose interval contains zero, as equivalent or as inconclusive.

    It is equivalent if the whole interval is within a margin around zero. Otherwise it says how
    much more load would decide it: so much that the interval, if the estimate stays where it is,
    becomes narrow enough either to leave out zero or to fit into the margin.

    Args:
        difference: The difference, with its interval.
        estimate: Its estimate.
        half_width: The half width of the interval, on the scale of the estimate.
    """
    assert difference.low is not None and difference.high is not None
    largest_change = max(abs(difference.low), abs(difference.high))
    margin = EQUIVALENT_POINTS if difference.is_fraction else EQUIVALENT_CHANGE
    if largest_change <= margin:
        return msgspec.structs.replace(
            difference, detailed_outcome="equivalent", equivalent_within=largest_change
        )
    scaled_margin = margin if difference.is_fraction else math.log1p(margin)
    half_width_to_differ = abs(estimate.value)
    half_width_to_be_equivalent = scaled_margin - abs(estimate.value)
    sufficient_half_width = max(half_width_to_differ, half_width_to_be_equivalent)
    return msgspec.structs.replace(
        difference,
        detailed_outcome="inconclusive",
        reason="the interval is too wide",
        needed_load_factor=load_needed(sufficient_half_width, half_width),
    )
