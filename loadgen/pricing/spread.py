"""A rate or an amount of money with the ends of its interval, as files and pages say it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Generic, TypeVar

from msgspec import Struct

from loadgen.core import format
from loadgen.core.stats.intervals import replications
from loadgen.repeated.capacity import CONFIDENCE

T = TypeVar("T", float, Decimal)


class Spread(Struct, Generic[T], frozen=True, kw_only=True):
    """A value with its 95 % interval; both ends are None where nothing was repeated. Keys of `size.json`."""

    mid: T
    low: T | None = None
    high: T | None = None

    def each(self, change: Callable[[T], T]) -> Spread[T]:
        """Value and ends changed alike, by a function that rises."""
        low, high = (None if end is None else change(end) for end in (self.low, self.high))
        return Spread(mid=change(self.mid), low=low, high=high)


def rate_of_repeats(values: Sequence[float]) -> Spread[float]:
    """Mean of independent repeats with Student's 95 % interval; one value has no interval.

    A low end that is not positive is replaced by the smallest value: a rate is positive.
    """
    mean, low, high = replications(values, CONFIDENCE)
    if len(values) < 2:
        return Spread(mid=mean)
    return Spread(mid=mean, low=low if low > 0 else min(values), high=high)


def spanned(mid: Any, low: Any, high: Any, text: Callable[[Any], str] = format.quantity) -> str:
    """A value as this text with the ends of its interval, where they print as something else: 4.57 [4.41, 4.80]."""
    if mid is None:
        return format.NONE
    if low is None or high is None or text(low) == text(high):
        return text(mid)
    return f"{text(mid)} [{text(low)}, {text(high)}]"
