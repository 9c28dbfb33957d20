"""Compute how many requests a term of a contract needs before it can pass. This module is pure."""

from __future__ import annotations

import math

from loadgen.contracts.terms import ContractTerm
from loadgen.core.slo import ANSWERS
from loadgen.core.stats import intervals, students_t
from loadgen.core.stats.quantiles import needed_samples

MIN_REQUESTS_FOR_RATE = 30
"""The number of requests from which a rate has a usable confidence interval."""

MIN_WINDOWS = 2
"""The number of windows that a load needs to compare its first window with its last."""


def compute_required_requests(term: ContractTerm, confidence: float) -> int:
    """Return the least number of requests with which a term can pass.

    - A term about a fraction, such as `errors: 1%`, passes if the confidence interval of the
      fraction is below 1 %. The interval is narrowest if no request fails, so this is the number
      of requests that would show it without a failure.
    - A percentile, such as p99, needs the minimum of MLPerf LoadGen's early stopping rule, which is
      what `needed_samples` computes.
    - Anything else is a rate, which needs `MIN_REQUESTS_FOR_RATE`.

    Args:
        term: The term.
        confidence: The confidence of the interval.
    """
    if term.kind == "errors":
        return compute_requests_without_miss(term.limit, confidence)

    if term.kind in ("goodput", "task_goodput", ANSWERS):
        max_missed_fraction = 1 - term.limit
        return compute_requests_without_miss(max_missed_fraction, confidence)

    is_about_percentile = term.quantile > 0
    if is_about_percentile:
        return needed_samples(term.quantile)

    return MIN_REQUESTS_FOR_RATE


def compute_requests_without_miss(limit: float, confidence: float = intervals.LEVEL) -> int:
    """Return how many requests without a miss show that the fraction of misses is at most `limit`.

    The upper end of Wilson's interval for 0 misses in n requests is z^2 / (n + z^2), where z is the
    normal quantile of the confidence. The result is the least n with which it is at most the limit.
    For a limit of 1 % and a confidence of 95 % that is 381.
    """
    z = students_t.z_quantile(confidence)
    return math.ceil(z * z * (1 - limit) / limit)


def compute_requests_for_ratio(minimum: float, confidence: float) -> int:
    """Return the requests needed in each of two windows to show that their ratio has a minimum.

    The two windows are the first and the last hour of a load, for example, and the true ratio is
    assumed to be 1. The count n of Poisson arrivals has a standard deviation of sqrt(n), so the
    ratio of two counts has about sqrt(2 / n). The interval of the ratio then begins at
    1 - z * sqrt(2 / n), which must be at least the minimum. Solved for n, that is
    n >= 2 * (z / (1 - minimum)) ** 2.
    """
    z = students_t.z_quantile(confidence)
    largest_half_width = 1 - minimum
    return math.ceil(2 * (z / largest_half_width) ** 2)
