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


class TimedAmounts(NamedTuple):
    """Amounts, such as tokens, with the time over which each of them came.

    Attributes:
        start_ns: When each amount began to come.
        end_ns: When it had come. For amounts that came at instants, it is the same array as
            `start_ns`, which saves memory and is computed faster.
        amounts: How much came.
    """

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    amounts: NDArray[Any]

    @property
    def are_at_instants(self) -> bool:
        """Whether each amount came at an instant and not over an interval."""
        return self.start_ns is self.end_ns


class Amounts:
    """All amounts with their times, so that results are exact, unlike those of a `TimeCurve`."""

    def __init__(self) -> None:
        self._parts: list[TimedAmounts] = []

    def add(
        self, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], amounts: NDArray[Any]
    ) -> None:
        """Add amounts. The parameters are the fields of `TimedAmounts`."""
        self._parts.append(TimedAmounts(start_ns, end_ns, amounts))

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
            if part.are_at_instants:
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


def _sum_at_instants(part: TimedAmounts, low_ns: int, high_ns: int) -> float:
    """Return the sum of the amounts that came after `low_ns` and up to `high_ns`."""
    total = 0
    for rows in block_slices(len(part.end_ns)):
        end_ns = part.end_ns[rows]
        is_inside = (end_ns > low_ns) & (end_ns <= high_ns)
        total += int(part.amounts[rows][is_inside].sum(dtype=np.int64))
    return float(total)


def _sum_spread(part: TimedAmounts, low_ns: int, high_ns: int) -> float:
    """Return the sum of amounts, each in proportion to its time between `low_ns` and `high_ns`.

    An amount whose start is its end counts in full if that instant is after `low_ns` and up to
    `high_ns`, and else not at all. The amounts are processed in slices, which takes little memory.
    """
    counted_amounts = np.empty(len(part.end_ns))
    for rows in block_slices(len(part.end_ns)):
        start_ns = part.start_ns[rows]
        end_ns = part.end_ns[rows]
        length_ns = end_ns - start_ns
        overlap_ns = np.minimum(end_ns, high_ns) - np.maximum(start_ns, low_ns)
        overlap_share = np.maximum(overlap_ns, 0) / np.maximum(length_ns, 1)
        is_instant_inside = (end_ns > low_ns) & (end_ns <= high_ns)
        share = np.where(length_ns > 0, overlap_share, is_instant_inside)
        counted_amounts[rows] = share * part.amounts[rows]
    return float(counted_amounts.sum())


class TimeCurve:
    """The cumulative amount up to any time, if each amount is spread evenly over an interval.

    It answers for many intervals without looking at all amounts again. It is exact at the edges of
    its bins and linear between them. The bins are as long as needed for BINS of them to reach the
    latest time: 0.1 s for a run of minutes, 9 s for one of ten hours.

    The slope of the curve rises by the rate of each amount where the amount starts, and falls by it
    where the amount ends. A change of slope c at time s adds c * (t - s) to the curve at a later
    time t. So two sums are kept for each bin, from which the curve at any edge t follows as
    t * (sum of c) - (sum of c * s), over all earlier bins.
    """

    def __init__(self, bin_s: float = 0.1) -> None:
        self.bin_s = bin_s
        self._slope_changes = np.zeros(BINS)  # the sum of c in each bin
        self._slope_change_moments = np.zeros(BINS)  # the sum of c * s in each bin
        self._instant_amounts = np.zeros(BINS)

    def add(
        self, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], amounts: NDArray[Any]
    ) -> None:
        """Add amounts. The parameters are the fields of `TimedAmounts`.

        An amount over an interval shorter than INSTANT_S counts at its end, because its rate would
        be too high for exact sums.
        """
        if len(start_ns) == 0:
            return
        start_s = np.maximum(start_ns, 0) / 1e9
        end_s = np.maximum(end_ns / 1e9, start_s)
        while float(end_s.max()) >= self.bin_s * BINS:
            self._double_bins()
        is_instant = end_s - start_s < INSTANT_S
        instant_bins = self._bin_numbers(end_s[is_instant])
        self._instant_amounts += np.bincount(instant_bins, amounts[is_instant], BINS)
        start_s = start_s[~is_instant]
        end_s = end_s[~is_instant]
        rates = amounts[~is_instant] / (end_s - start_s)
        self._change_slope(start_s, rates)
        self._change_slope(end_s, -rates)

    def _change_slope(self, times_s: NDArray[np.float64], changes: NDArray[np.float64]) -> None:
        """Record that the slope of the curve changes at these times by these amounts per second."""
        bins = self._bin_numbers(times_s)
        self._slope_changes += np.bincount(bins, changes, BINS)
        self._slope_change_moments += np.bincount(bins, changes * times_s, BINS)

    def _bin_numbers(self, times_s: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the bin of each time."""
        return (times_s / self.bin_s).astype(np.int64)

    def _double_bins(self) -> None:
        """Join each two neighbouring bins, so that the bins reach twice as far."""
        self.bin_s *= 2
        for values in (self._slope_changes, self._slope_change_moments, self._instant_amounts):
            values[: BINS // 2] = values.reshape(-1, 2).sum(axis=1)
            values[BINS // 2 :] = 0

    def between(self, start_s: float | None, end_s: float | None) -> float:
        """Return the amount that came in an interval, ends included; 0 if an end is None."""
        if start_s is None or end_s is None:
            return 0.0
        edges_s = np.arange(BINS + 1) * self.bin_s
        slopes = _cumulative(self._slope_changes)
        moments = _cumulative(self._slope_change_moments)
        amounts_until_edges = edges_s * slopes - moments + _cumulative(self._instant_amounts)
        low, high = np.interp([start_s, end_s], edges_s, amounts_until_edges)
        return float(high - low)


def _cumulative(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of the values before each edge of the bins, from 0 to the sum of all."""
    return np.concatenate(([0.0], np.cumsum(values)))
