"""Statistical tests for comparisons. Pure; the distributions are in `core.stats.intervals`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.core.analysis.within_run_variance import ScaledEstimate
from loadgen.core.stats import students_t

MOST_NEEDED = 1000
"""The largest factor by which more load is suggested. Nobody would run more than that."""


def subtract(
    first: ScaledEstimate, second: ScaledEstimate, *, is_pooled: bool = False
) -> ScaledEstimate:
    """Return the difference `second - first` of two independent estimates.

    Its degrees of freedom are those of Welch's t-test, which allows the variances to differ, or of
    Student's t-test, which takes them as equal.

    Args:
        first: The estimate to subtract.
        second: The estimate to subtract from.
        is_pooled: True to use Student's t-test if both have equal degrees of freedom. With three
            runs per side, Welch's degrees of freedom are known poorly themselves, and using them
            halves the power of the test.
    """
    has_equal_degrees = first.degrees_of_freedom == second.degrees_of_freedom
    if is_pooled and has_equal_degrees:
        degrees_of_freedom = first.degrees_of_freedom + second.degrees_of_freedom
    else:
        degrees_of_freedom = students_t.welch_degrees_of_freedom(
            first.error**2, first.degrees_of_freedom, second.error**2, second.degrees_of_freedom
        )

    return ScaledEstimate(
        value=second.value - first.value,
        error=math.hypot(first.error, second.error),
        degrees_of_freedom=degrees_of_freedom,
    )


def p_value(difference: ScaledEstimate) -> float:
    """Return the two-sided p-value: how probable a difference as large is by chance."""
    if difference.value == 0:
        return 1.0
    if difference.error == 0:
        return 0.0
    t = abs(difference.value) / difference.error
    return 2 * (1 - students_t.t_cdf(t, difference.degrees_of_freedom))


def holm_levels(p_values: Sequence[float | None], risk: float) -> list[float]:
    """Return the significance level of each metric by the step-down method of Holm (1979).

    With m metrics, the smallest p-value is tested at risk / m, the next at risk / (m - 1), and so
    on. The first one that is not significant ends the steps: all that follow have its level.

    Args:
        p_values: The p-value of each metric. None for metrics that are not tested.
        risk: The probability of any false alarm among all metrics.
    """
    tested = [(p_value, index) for index, p_value in enumerate(p_values) if p_value is not None]
    levels = [risk] * len(p_values)
    level = risk

    is_previous_significant = True
    for rank, (p_value, index) in enumerate(sorted(tested)):
        if is_previous_significant:
            remaining_count = len(tested) - rank
            level = risk / remaining_count
            is_previous_significant = p_value <= level
        levels[index] = level

    return levels


def fisher_exact(hits_a: int, count_a: int, hits_b: int, count_b: int) -> float:
    """Return the two-sided p-value of Fisher's exact test of two fractions.

    If both fractions are equal, the number of hits in group a has a hypergeometric distribution.
    The p-value is the sum of the probabilities that are at most that of the observed number.

    Args:
        hits_a: The hits in group a.
        count_a: The size of group a.
        hits_b: The hits in group b.
        count_b: The size of group b.
    """
    hits = hits_a + hits_b
    fewest_in_a = max(0, hits - count_b)
    most_in_a = min(count_a, hits)

    # The number of ways to choose the hits, which is proportional to the probability.
    ways = [
        math.comb(count_a, in_a) * math.comb(count_b, hits - in_a)
        for in_a in range(fewest_in_a, most_in_a + 1)
    ]
    observed_ways = math.comb(count_a, hits_a) * math.comb(count_b, hits_b)
    ways_as_extreme = sum(way for way in ways if way <= observed_ways)

    return ways_as_extreme / math.comb(count_a + count_b, hits)


def load_needed(distance: float, half_width: float) -> float | None:
    """Return how many times as much load would narrow an interval to a smaller half width.

    The half width falls with the square root of the load: four times as much load halves it.

    Args:
        distance: The half width to reach.
        half_width: The half width of the interval now.

    Returns:
        The factor, at least 1. None if it would be above MOST_NEEDED.
    """
    if distance <= half_width / math.sqrt(MOST_NEEDED):
        return None
    return max((half_width / distance) ** 2, 1.0)
