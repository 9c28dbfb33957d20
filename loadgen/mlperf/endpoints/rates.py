"""The expected rate of a system at a concurrency, interpolated between measured ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class ConcurrencyRate(msgspec.Struct, frozen=True):
    """The expected speed of a system with a fixed number of requests in flight.

    Attributes:
        concurrency: The requests in flight.
        response_s: The mean time of a request from its start to its end, in seconds.
    """

    concurrency: int
    response_s: float

    @property
    def requests_per_s(self) -> float:
        """The completed requests per second, by Little's law: in flight / mean response time."""
        return self.concurrency / self.response_s


def interpolate_rate(rates: Sequence[ConcurrencyRate], concurrency: int) -> ConcurrencyRate:
    """Return the expected response time with a number of requests in flight (concurrency).

    - Below the lowest measured concurrency, the response time stays the same.
    - Above the highest one, it grows in proportion, as on a saturated server.
    - Between two of them, it is interpolated on logarithmic axes: 2 s at 10 and 8 s at 40 requests
      in flight give 4 s at 20.

    Args:
        rates: The measured response times, at least one.
        concurrency: The number of requests in flight.
    """
    ordered = sorted(rates, key=lambda rate: rate.concurrency)
    lowest = ordered[0]
    highest = ordered[-1]

    if concurrency <= lowest.concurrency:
        return ConcurrencyRate(concurrency, lowest.response_s)
    if concurrency >= highest.concurrency:
        growth = concurrency / highest.concurrency
        return ConcurrencyRate(concurrency, highest.response_s * growth)

    # The measured concurrencies below and above.
    upper_index = next(
        index for index, rate in enumerate(ordered) if rate.concurrency >= concurrency
    )
    lower = ordered[upper_index - 1]
    upper = ordered[upper_index]

    log_distance = math.log(concurrency / lower.concurrency)
    log_interval = math.log(upper.concurrency / lower.concurrency)
    position = log_distance / log_interval
    log_growth = position * math.log(upper.response_s / lower.response_s)
    return ConcurrencyRate(concurrency, lower.response_s * math.exp(log_growth))
