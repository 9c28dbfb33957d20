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
    """Return the expected speed at a concurrency.

    Between two measured concurrencies the logarithm of the response time is linear in the
    logarithm of the concurrency. Below the lowest one the response time stays the same. Above the
    highest one the rate stays the same, as on a saturated server.

    Args:
        rates: At least one measured speed.
        concurrency: The requests in flight.
    """
    ordered = sorted(rates, key=lambda rate: rate.concurrency)
    if concurrency <= ordered[0].concurrency:
        return ConcurrencyRate(concurrency, ordered[0].response_s)
    if concurrency >= ordered[-1].concurrency:
        growth = concurrency / ordered[-1].concurrency
        return ConcurrencyRate(concurrency, ordered[-1].response_s * growth)

    upper_index = next(
        index for index, rate in enumerate(ordered) if rate.concurrency >= concurrency
    )
    lower = ordered[upper_index - 1]
    upper = ordered[upper_index]
    octaves = math.log(upper.concurrency / lower.concurrency)
    position = math.log(concurrency / lower.concurrency) / octaves
    growth_exponent = position * math.log(upper.response_s / lower.response_s)
    return ConcurrencyRate(concurrency, lower.response_s * math.exp(growth_exponent))
