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
        """Return the amount that came after `start_s` and up to `end_s`; 0 if either is None.

        Args:
            start_s: The start of the interval, in seconds since the start of the run.
            end_s: The end of the interval.
            includes_start: Whether an amount that came exactly at `start_s` counts as well.
        """
        if start_s is None or end_s is None:
            return 0.0

        start_ns = round(start_s * 1e9)
        end_ns = round(end_s * 1e9)

        # Amounts after this time count. Times are whole nanoseconds, so an amount at the start is
        # later than one nanosecond before the start.
        after_ns = start_ns - 1 if includes_start else start_ns

        total = 0.0
        for part in self._parts:
            if part.are_at_instants:
                total += _sum_at_instants(part, after_ns, end_ns)
            else:
                total += _sum_overlapping(part, after_ns, end_ns)

        return total

    def curve(self) -> TimeCurve:
        """Return the same amounts as a curve, which answers for many intervals."""
        curve = TimeCurve()
        for part in self._parts:
            curve.add(part.start_ns, part.end_ns, part.amounts)
        return curve


def _sum_at_instants(part: TimedAmounts, after_ns: int, until_ns: int) -> float:
    """Return the sum of the amounts that came after `after_ns` and up to `until_ns`.

    Args:
        part: The amounts, each of which came at one instant.
        after_ns: The time after which amounts count.
        until_ns: The last time at which an amount counts.
    """
    total = 0  # an integer, so that the sum of many amounts is exact
    for rows in block_slices(len(part.end_ns)):
        instants_ns = part.end_ns[rows]
        is_inside = (instants_ns > after_ns) & (instants_ns <= until_ns)
        amounts_inside = part.amounts[rows][is_inside]
        total += int(amounts_inside.sum(dtype=np.int64))

    return float(total)


def _sum_overlapping(part: TimedAmounts, after_ns: int, until_ns: int) -> float:
    """Return how much of all amounts came after `after_ns` and up to `until_ns`.

    Each amount came evenly from its start to its end: if 10 tokens came from second 0 to second 4,
    5 tokens came from 1 s to 3 s.
    """
    amounts_inside = np.empty(len(part.end_ns))
    for block in block_slices(len(part.end_ns)):
        start_ns = part.start_ns[block]
        end_ns = part.end_ns[block]
        fraction_inside = _fractions_inside(start_ns, end_ns, after_ns, until_ns)
        amounts_inside[block] = fraction_inside * part.amounts[block]

    return float(amounts_inside.sum())


def _fractions_inside(
    start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], after_ns: int, until_ns: int
) -> NDArray[np.float64]:
    """Return which fraction of each span of time is inside the window (`after_ns`, `until_ns`].

    For a window from 1 s to 3 s, a span from 0 s to 4 s is inside by 0.5. A span whose start is its
    end is either inside (1) or not (0).

    Args:
        start_ns: The start of each span.
        end_ns: The end of each span.
        after_ns: The start of the window, which is not part of it.
        until_ns: The end of the window, which is part of it.
    """
    # The part of a span inside the window, which is negative if they do not overlap.
    inside_start_ns = np.maximum(start_ns, after_ns)
    inside_end_ns = np.minimum(end_ns, until_ns)
    inside_ns = np.maximum(inside_end_ns - inside_start_ns, 0)

    duration_ns = end_ns - start_ns
    divisor_ns = np.maximum(duration_ns, 1)  # not 0
    fraction_of_span = inside_ns / divisor_ns

    is_instant = duration_ns <= 0
    is_instant_inside = (end_ns > after_ns) & (end_ns <= until_ns)
    fraction_of_instant = is_instant_inside.astype(np.float64)
    return np.where(is_instant, fraction_of_instant, fraction_of_span)


class TimeCurve:
    """Amounts over time, which quickly answers how much came in any interval.

    An amount comes evenly from its start to its end. Only the changes of the rate are stored: 6
    tokens from second 1 to second 3 raise the rate by 3 tokens/s at second 1, and lower it by 3
    tokens/s at second 3.

    The changes are added up in a fixed number of bins of time, BINS, so the memory does not grow.
    The amount up to a time is exact at the edges of the bins, and interpolated between them. The
    length of the bins grows with the latest time: 0.1 s for minutes, 9 s for ten hours.
    """

    def __init__(self, bin_s: float = 0.1) -> None:
        """Create an empty curve whose bins are `bin_s` seconds long at first."""
        self.bin_s = bin_s

        # A change of the rate by c at time t adds c * (T - t) = T * c - c * t to the amount up to a
        # later time T. So each bin has the sum of c and the sum of c * t of its changes.
        self._sums_of_changes = np.zeros(BINS)
        self._sums_of_change_times_time = np.zeros(BINS)

        # Each bin also has the sum of the amounts that came at an instant.
        self._instant_amounts = np.zeros(BINS)

    def add(
        self, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], amounts: NDArray[Any]
    ) -> None:
        """Add amounts, each of which came evenly from its start to its end.

        Args:
            start_ns: The start of each amount. A time before the run, which is negative, becomes 0.
            end_ns: The end of each amount. An end before the start becomes the start.
            amounts: The amounts.
        """
        if len(start_ns) == 0:
            return

        start_s = np.maximum(start_ns, 0) / 1e9
        end_s = np.maximum(end_ns / 1e9, start_s)
        self._extend_to(float(end_s.max()))

        # Rates over very short times would be so high that their rounding errors would matter.
        is_instant = end_s - start_s < INSTANT_S
        self._add_at_instants(end_s[is_instant], amounts[is_instant])
        self._add_over_time(start_s[~is_instant], end_s[~is_instant], amounts[~is_instant])

    def _add_at_instants(self, times_s: NDArray[np.float64], amounts: NDArray[Any]) -> None:
        """Add amounts that came all at once at these times."""
        self._instant_amounts += np.bincount(self._bin_numbers(times_s), amounts, BINS)

    def _add_over_time(
        self, start_s: NDArray[np.float64], end_s: NDArray[np.float64], amounts: NDArray[Any]
    ) -> None:
        """Add amounts that came evenly: each raises the rate at its start until its end."""
        rates_per_s = amounts / (end_s - start_s)
        self._change_rate(start_s, rates_per_s)
        self._change_rate(end_s, -rates_per_s)

    def _change_rate(
        self, times_s: NDArray[np.float64], changes_per_s: NDArray[np.float64]
    ) -> None:
        """Record that the rate changes at these times by these amounts per second."""
        bins = self._bin_numbers(times_s)
        self._sums_of_changes += np.bincount(bins, changes_per_s, BINS)
        self._sums_of_change_times_time += np.bincount(bins, changes_per_s * times_s, BINS)

    def _bin_numbers(self, times_s: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the number of the bin of each time. Bin 0 begins at the start of the run."""
        return (times_s / self.bin_s).astype(np.int64)

    def _extend_to(self, time_s: float) -> None:
        """Make the bins longer, if necessary, so that the last of the BINS bins reaches a time."""
        while time_s >= self.bin_s * BINS:
            self.bin_s *= 2
            _join_bin_pairs(self._sums_of_changes)
            _join_bin_pairs(self._sums_of_change_times_time)
            _join_bin_pairs(self._instant_amounts)

    def between(self, start_s: float | None, end_s: float | None) -> float:
        """Return the amount that came in an interval, ends included; 0 if an end is None."""
        if start_s is None or end_s is None:
            return 0.0

        edges_s = np.arange(BINS + 1, dtype=np.float64) * self.bin_s
        amounts_until_edges = self._amounts_until_edges(edges_s)
        until_start, until_end = np.interp([start_s, end_s], edges_s, amounts_until_edges)
        return float(until_end - until_start)

    def _amounts_until_edges(self, edges_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the amount that came from the start of the run up to each edge of the bins.

        If the rate changes at time t, the change adds change * (edge - t) to the amount up to an
        edge. All changes before the edge together add

            edge * (sum of change) - (sum of change * t).

        For example, 6 tokens from second 1 to second 3 change the rate by 3 at 1 s and by -3 at
        3 s. Up to an edge at 2 s, only the first change counts: 2 * 3 - 3 * 1 = 3 tokens.

        Args:
            edges_s: The edges: the start of each bin, and the end of the last bin.
        """
        changes_before_edge = _sums_before_edges(self._sums_of_changes)
        changes_times_time_before_edge = _sums_before_edges(self._sums_of_change_times_time)
        amounts_over_time = edges_s * changes_before_edge - changes_times_time_before_edge

        amounts_at_instants = _sums_before_edges(self._instant_amounts)
        return amounts_over_time + amounts_at_instants


def _join_bin_pairs(sums: NDArray[np.float64]) -> None:
    """Add the sums of each two neighbouring bins, in place: [1, 2, 3, 4] becomes [3, 7, 0, 0]."""
    sums[: BINS // 2] = sums.reshape(-1, 2).sum(axis=1)
    sums[BINS // 2 :] = 0


def _sums_before_edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of the values of all bins before each edge: [1, 2, 3] gives [0, 1, 3, 6]."""
    return np.concatenate(([0.0], np.cumsum(values)))
