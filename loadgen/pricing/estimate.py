"""An estimated rate or amount of money with its interval, and how it is printed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Generic, TypeVar

from msgspec import Struct

from loadgen.core import format
from loadgen.core.stats.intervals import mean_of_runs
from loadgen.repeated.capacity import CONFIDENCE

T = TypeVar("T", float, Decimal)


class Estimate(Struct, Generic[T], frozen=True, kw_only=True):
    """A value with its 95 % confidence interval, from `low` to `high`.

    Both ends are None if nothing was repeated. The field names are keys of `size.json`.
    """

    mid: T
    low: T | None = None
    high: T | None = None

    def map(self, increasing_function: Callable[[T], T]) -> Estimate[T]:
        """Return the estimate of a function of the value. The function must be increasing."""
        return Estimate(
            mid=increasing_function(self.mid),
            low=None if self.low is None else increasing_function(self.low),
            high=None if self.high is None else increasing_function(self.high),
        )


def estimate_rate(rates: Sequence[float]) -> Estimate[float]:
    """Return the mean of the rates of independent repeats, with a confidence interval.

    The interval is Student's t interval of a mean. A single rate has none. With few, scattered
    rates the interval may reach below zero, which no rate can be, so its lower end is then the
    smallest measured rate.
    """
    interval = mean_of_runs(rates, CONFIDENCE)
    if len(rates) < 2:
        return Estimate(mid=interval.value)
    low = interval.low if interval.low > 0 else min(rates)
    return Estimate(mid=interval.value, low=low, high=interval.high)


def format_interval(
    mid: float | Decimal | None,
    low: float | Decimal | None,
    high: float | Decimal | None,
    format_number: Callable[[Any], str] = format.quantity,
) -> str:
    """Return a value with the ends of its interval, such as "4.57 [4.41, 4.80]".

    The ends are left out if they are not known or print as the same text.
    """
    if mid is None:
        return format.NONE
    if low is None or high is None or format_number(low) == format_number(high):
        return format_number(mid)
    return f"{format_number(mid)} [{format_number(low)}, {format_number(high)}]"


def describe_interval(
    mid: float | Decimal,
    low: float | Decimal | None,
    high: float | Decimal | None,
    format_number: Callable[[Any], str] = format.quantity,
) -> str:
    """Return a value and its interval for a sentence, such as "4.57 (95 % CI 4.41 to 4.80)".

    The interval is left out if it is not known or if its ends print as the same text.
    """
    if low is None or high is None or format_number(low) == format_number(high):
        return format_number(mid)
    confidence = f"{CONFIDENCE * 100:g} %"
    interval = f"{confidence} CI {format_number(low)} to {format_number(high)}"
    return f"{format_number(mid)} ({interval})"
