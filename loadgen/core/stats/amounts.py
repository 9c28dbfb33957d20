"""Amounts that come over time, and how much of them came in an interval.

Pure. Each amount is spread evenly over an interval of time. If the interval is an instant, the
amount came at that instant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.stats.quantiles import block_slices

BINS = 4096
"""The number of bins of a curve. If it needs more, neighbouring bins are joined."""

INSTANT_S = 0.001
"""A curve treats a shorter interval as an instant."""


class _Part(NamedTuple):
    """Amounts with the start and the end of each. Both are one array for instants."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    amounts: NDArray[Any]


class Amounts:
    """All amounts with their times, so that results are exact, unlike those of a `TimeCurve`."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def add(
        self, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], amounts: NDArray[Any]
    ) -> None:
        """Add amounts, each spread evenly from its start to its end.

        Amounts that come at instants may use one array for both.
        """
        self._parts.append(_Part(start_ns, end_ns, amounts))

    def merge(self, other: Amounts) -> None:
        """Add the amounts of another one. The order of merging does not matter."""
        self._parts += other._parts

    def between(
        self, start_s: float | None, end_s: float | None, *, includes_start: bool = False
    ) -> float:
        """Return the amount that came in an interval; 0 if an end is None.

        What came at the start of the interval belongs to the interval before it, unless
        `includes_start`. So virtual users in step, which all start and end together, are counted
        once a round.
        """
        if start_s is None or end_s is None:
            return 0.0
        low_ns = round(start_s * 1e9)
        high_ns = round(end_s * 1e9)
        if includes_start:
            low_ns -= 1
        total = 0.0
        for part in self._parts:
            if part.start_ns is part.end_ns:
                total += _sum_at_instants(part, low_ns, high_ns)
            else:
                total += _sum_spread(part, low_ns, high_ns)
        return total

    def curve(self) -> TimeCurve:
        """Return the same amounts as a curve, which answers for many intervals."""
        curve = TimeCurve()
        for part in self._parts:
            curve.add(part.start_ns, part.end_ns, part.amounts)
        return curve


def _sum_at_instants(part: _Part, low_ns: int, high_ns: int) -> float:
    """Return the sum of the amounts that came after `low_ns` and up to `high_ns`."""
    total = 0
    for rows in block_slices(len(part.end_ns)):
        end_ns = part.end_ns[rows]
        came = part.amounts[rows][(end_ns > low_ns) & (end_ns <= high_ns)]
        total += int(came.sum(dtype=np.int64))
    return float(total)


def _sum_spread(part: _Part, low_ns: int, high_ns: int) -> float:
    """Return the sum of the amounts, each in proportion to its time in the interval.

    Among amounts that are spread over time, some may be at an instant, and count whole or not.
    """
    came = np.empty(len(part.end_ns))
    for rows in block_slices(len(part.end_ns)):
        start_ns = part.start_ns[rows]
        end_ns = part.end_ns[rows]
        length_ns = end_ns - start_ns
        inside_ns = np.clip(np.minimum(end_ns, high_ns) - np.maximum(start_ns, low_ns), 0, None)
        is_at_instant_inside = (end_ns > low_ns) & (end_ns <= high_ns)
        share = np.where(length_ns > 0, inside_ns / np.maximum(length_ns, 1), is_at_instant_inside)
        came[rows] = share * part.amounts[rows]
    return float(came.sum())


class TimeCurve:
    """The cumulative amount up to any time, if each amount is spread evenly over an interval.

    It is exact at the edges of the bins and linear between them. The bins are as long as needed for
    BINS of them to reach the latest time: 0.1 s for a run of minutes, 9 s for one of ten hours.

    Within a bin, the slope of the curve changes by the rate of each amount where the amount starts,
    and back where it ends.
    """

    def __init__(self, bin_s: float = 0.1) -> None:
        self.bin_s = bin_s
        self._slope_changes = np.zeros(BINS)  # the sum of the changes of slope in each bin
        self._level_changes = np.zeros(BINS)  # the sum of each change of slope times its time
        self._instant_amounts = np.zeros(BINS)

    def add(
        self, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], amounts: NDArray[Any]
    ) -> None:
        """Add amounts, each spread evenly from its start to its end.

        An amount over an interval shorter than INSTANT_S counts at its end.
        """
        if len(start_ns) == 0:
            return
        start_s = np.maximum(start_ns, 0) / 1e9
        end_s = np.maximum(end_ns / 1e9, start_s)
        while float(end_s.max()) >= self.bin_s * BINS:
            self._double_bins()
        is_instant = end_s - start_s < INSTANT_S
        self._instant_amounts += np.bincount(
            self._bin_numbers(end_s[is_instant]), amounts[is_instant], BINS
        )
        start_s = start_s[~is_instant]
        end_s = end_s[~is_instant]
        rates = amounts[~is_instant] / (end_s - start_s)
        self._change_slope(start_s, rates)
        self._change_slope(end_s, -rates)

    def _change_slope(self, times_s: NDArray[np.float64], changes: NDArray[np.float64]) -> None:
        """Record that the slope of the curve changes at these times.

        A change c at time s adds c * (t - s) to the curve at each later time t. So the sums of c
        and of c * s are enough.
        """
        bins = self._bin_numbers(times_s)
        self._slope_changes += np.bincount(bins, changes, BINS)
        self._level_changes += np.bincount(bins, changes * times_s, BINS)

    def _bin_numbers(self, times_s: NDArray[np.float64]) -> NDArray[np.int64]:
        return (times_s / self.bin_s).astype(np.int64)

    def _double_bins(self) -> None:
        """Join each two neighbouring bins."""
        self.bin_s *= 2
        for values in (self._slope_changes, self._level_changes, self._instant_amounts):
            values[: BINS // 2] = values.reshape(-1, 2).sum(axis=1)
            values[BINS // 2 :] = 0

    def between(self, start_s: float | None, end_s: float | None) -> float:
        """Return the amount that came in an interval, ends included; 0 if an end is None.

        The curve at an edge t is t times the sum of the changes of slope before it, less the sum of
        each change times its time, plus the amounts that came at instants.
        """
        if start_s is None or end_s is None:
            return 0.0
        edges_s = np.arange(BINS + 1) * self.bin_s
        slope = _cumulative(self._slope_changes)
        level = _cumulative(self._level_changes)
        cumulative_amount = edges_s * slope - level + _cumulative(self._instant_amounts)
        low, high = np.interp([start_s, end_s], edges_s, cumulative_amount)
        return float(high - low)


def _cumulative(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of the values before each edge of the bins, from 0 to the sum of all."""
    return np.concatenate(([0.0], np.cumsum(values)))
