"""How many requests and windows a term of a contract needs at least before it can pass. Pure."""

from __future__ import annotations

import math

from loadgen.contracts.schema import Promise
from loadgen.core.stats import intervals
from loadgen.core.stats.quantiles import support

RATES_NEED = 30  # requests, for a rate with an interval
WINDOWS = 2  # a drift compares the first window with the last


def required_requests(term: Promise, confidence: float) -> int:
    """Return the least number of requests with which a term can pass.

    For a percentile it is the minimum of LoadGen's early stopping. For a share it is the number
    that shows it when no request misses.
    """
    if term.kind in ("errors", "goodput", "task_goodput"):
        return requests_without_miss(
            term.limit if term.kind == "errors" else 1 - term.limit, confidence
        )
    return support(term.quantile) if term.quantile else RATES_NEED


def requests_without_miss(limit: float, confidence: float = intervals.LEVEL) -> int:
    """Return from how many requests on, none of which misses, Wilson's interval is below `limit`."""
    z = intervals.z_quantile(confidence)
    return math.ceil(z * z * (1 - limit) / limit)


def requests_for_ratio(share: float, confidence: float) -> int:
    """Return the requests needed in each of two windows to show that their ratio is above `share`.

    The true ratio is taken to be 1. Poisson arrivals alone make the two counts differ:
    z * sqrt(2 / n) must be below 1 - share.
    """
    return math.ceil(2 * (intervals.z_quantile(confidence) / (1 - share)) ** 2)
