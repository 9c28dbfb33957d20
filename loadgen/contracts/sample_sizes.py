"""Compute how many requests a term of a contract needs before it can pass. This module is pure."""

from __future__ import annotations

import math

from loadgen.contracts.terms import ContractTerm
from loadgen.core.stats import intervals, students_t
from loadgen.core.stats.quantiles import needed_samples

MIN_REQUESTS_FOR_RATE = 30
"""Requests from which a rate has a confidence interval."""

MIN_WINDOWS = 2
"""Windows that a load needs for a comparison of its first window with its last."""


def required_requests(term: ContractTerm, confidence: float) -> int:
    """Return the least number of requests with which a term can pass.

    For a percentile it is the minimum of MLPerf LoadGen's early stopping. For a share it is the
    number that shows it when no request misses.
    """
    if term.kind == "errors":
        return requests_without_miss(term.limit, confidence)
    if term.kind in ("goodput", "task_goodput"):
        return requests_without_miss(1 - term.limit, confidence)
    return needed_samples(term.quantile) if term.quantile else MIN_REQUESTS_FOR_RATE


def requests_without_miss(limit: float, confidence: float = intervals.LEVEL) -> int:
    """Return how many requests without a miss show that the share of misses is at most `limit`.

    It is the number from which the upper end of Wilson's interval around 0 is below the limit.
    """
    z = students_t.z_quantile(confidence)
    return math.ceil(z * z * (1 - limit) / limit)


def requests_for_ratio(share: float, confidence: float) -> int:
    """Return the requests needed in each of two windows to show that their ratio is above `share`.

    The true ratio is taken to be 1. Poisson arrivals alone make the two counts differ:
    z * sqrt(2 / n) must be below 1 - share.
    """
    return math.ceil(2 * (students_t.z_quantile(confidence) / (1 - share)) ** 2)
