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
from loadgen.repeated.comparable_metrics import HIGHER_IS_BETTER, NO_DIRECTION

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
        better: LOWER_IS_BETTER, HIGHER_IS_BETTER or NO_DIRECTION, as in `Metric.better`.
        level: The significance level for the interval and the outcome, such as 0.05.
        family_level: The significance level for the smallest detectable change. It is that of the
            strictest test among all metrics that are judged together, so the change would be
            detected whatever the other metrics show.
    """
    # The number of standard errors from the middle of the interval to each of its ends.
    t_quantile = students_t.t_quantile(1 - level / 2, estimate.degrees_of_freedom)
    half_width = t_quantile * estimate.error
    low = to_change(difference, estimate.value - half_width)
    high = to_change(difference, estimate.value + half_width)

    # This is decided before the ends are clipped, because a clipped end may be zero.
    excludes_zero = low > 0 or high < 0
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
    """Return the minimum detectable change: how large a change must be to be found reliably.

    A measured change varies around the true change by chance. A change of the returned size is
    called significant in 90 % (POWER) of comparisons like this one; smaller changes are often
    missed. It is the sum of two distances, as in the usual formula for sample sizes:

    - How large a measured change must be to be called significant.
    - How much the measured change may fall below the true one by chance. Only one in ten
      comparisons (1 - POWER) falls below by more.

    Each distance is a quantile of Student's t distribution times the standard error.

    Args:
        difference: The difference.
        estimate: Its estimate, with the standard error.
        level: The significance level of the test, such as 0.05.

    Returns:
        The change, such as 0.1 for 10 %. None for a fraction that cannot change by so much, because
        it is between 0 and 1.
    """
    # Both distances are in standard errors.
    distance_to_significance = students_t.t_quantile(1 - level / 2, estimate.degrees_of_freedom)
    shortfall_by_chance = students_t.t_quantile(POWER, estimate.degrees_of_freedom)

    detectable = (distance_to_significance + shortfall_by_chance) * estimate.error
    if difference.is_fraction and difference.before is not None:
        largest_possible = max(difference.before, 1 - difference.before)
        if detectable > largest_possible:
            return None

    return to_change(difference, detectable)


def to_change(difference: Difference, value: float) -> float:
    """Convert a value on the scale of the estimate to a change, such as 0.1 for +10 %.

    The estimate of a fraction is the change itself, in parts of one. That of any other metric is
    the logarithm of the ratio of both sides.
    """
    if difference.is_fraction:
        return value
    # expm1 is exp(x) - 1, which turns the logarithm of a ratio into a relative change.
    return math.expm1(min(value, MOST_LOG_CHANGE))


def _classify_significant(
    difference: Difference, estimate: ScaledEstimate, better_direction: int
) -> DetailedOutcome:
    """Return the outcome of a significant change, whose interval does not contain zero.

    It is one of these:

    - "these two runs differ" (DIFFER) for single runs. They show that these two runs differ, but
      not that the two systems do: the next start of the same server may be as different.
    - "different" for repeats, if neither a rise nor a fall of the metric is better.
    - "better" or "worse" for repeats otherwise.

    Args:
        difference: The difference.
        estimate: Its estimate, which is positive if the metric has risen.
        better_direction: LOWER_IS_BETTER, HIGHER_IS_BETTER or NO_DIRECTION.
    """
    if not difference.is_repeated:
        return DIFFER
    if better_direction == NO_DIRECTION:
        return "different"

    has_risen = estimate.value > 0
    is_rise_better = better_direction == HIGHER_IS_BETTER

    # The side is better if the metric rose and a rise is better, or fell and a fall is better.
    is_better = has_risen == is_rise_better
    return "better" if is_better else "worse"


def _classify_insignificant(
    difference: Difference, estimate: ScaledEstimate, half_width: float
) -> Difference:
    """Return a difference whose interval contains zero, as equivalent or as inconclusive.

    It is equivalent if the whole interval is within a margin around zero. Otherwise it is
    inconclusive, and states how much more load would decide it. More load makes the interval
    narrower. Provided that its middle stays where it is, it becomes so narrow that it no longer
    contains zero, or that it fits into the margin. The first of the two to happen decides.

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

    # The following lengths are on the scale of the estimate: logarithms, except for fractions.
    scaled_margin = margin if difference.is_fraction else math.log1p(margin)
    distance_from_zero = abs(estimate.value)
    half_width_to_differ = distance_from_zero
    half_width_to_be_equivalent = scaled_margin - distance_from_zero
    sufficient_half_width = max(half_width_to_differ, half_width_to_be_equivalent)

    return msgspec.structs.replace(
        difference,
        detailed_outcome="inconclusive",
        reason="the interval is too wide",
        needed_load_factor=load_needed(sufficient_half_width, half_width),
    )
