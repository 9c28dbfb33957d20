"""Amounts that come over time, and how much of them came in an interval.

Pure. Each amount is spread evenly over an interval of time; what begins and ends in one instant came in that instant.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.core.stats.quantiles import in_parts

BINS = 4096  # most bins of a curve; when a curve needs more, neighbouring bins are joined
AT_ONCE_S = 0.001  # a curve treats a shorter interval as an instant


class Amounts:
    """All amounts with their instants: exact where a `TimeCurve` is linear between the edges of its bins."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]] = []

    def add(
        self, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], amount: NDArray[Any]
    ) -> None:
        """Add amounts, each spread evenly from its start to its end; instants may give one array for both."""
        self._parts.append((start_ns, end_ns, amount))

    def merge(self, other: Amounts) -> None:
        """Add the amounts of another; the order of merging does not matter."""
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
        low, high = round(start_s * 1e9), round(end_s * 1e9)
        if includes_start:
            low -= 1
        total = 0.0
        for start, end, amount in self._parts:
            if start is end:
                inside = (
                    amount[at][(end[at] > low) & (end[at] <= high)] for at in in_parts(len(end))
                )
                total += float(sum(int(each.sum(dtype=np.int64)) for each in inside))
            else:
                came = np.empty(len(end))
                for part in in_parts(len(end)):
                    came[part] = _came(start[part], end[part], amount[part], low, high)
                total += float(came.sum())
        return total

    def curve(self) -> TimeCurve:
        """The same as a curve, which many intervals may be asked of."""
        curve = TimeCurve()
        for part in self._parts:
            curve.add(*part)
        return curve


def _came(
    start: NDArray[np.int64], end: NDArray[np.int64], amount: NDArray[Any], low: int, high: int
) -> Any:
    length = end - start
    inside = np.clip(np.minimum(end, high) - np.maximum(start, low), 0, None)
    at_once = (end > low) & (end <= high)
    return np.where(length > 0, inside / np.maximum(length, 1), at_once) * amount


class TimeCurve:
    """The cumulative amount up to any instant, where each amount is spread evenly over an interval of time.

    Exact at the edges of the bins, linear between them. The bins are as long as needed for BINS of them to reach the
    latest instant: 0.1 s for a run of minutes, 9 s for one of ten hours.
    """

    __slots__ = ("bin_s", "level", "lumps", "slope")

    def __init__(self, bin_s: float = 0.1) -> None:
        self.bin_s = bin_s
        self.slope = np.zeros(BINS)  # sum of the changes of slope in each bin
        self.level = np.zeros(BINS)  # sum of each change of slope times its instant
        self.lumps = np.zeros(BINS)  # amounts that came at one instant

    def add(
        self, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], amount: NDArray[Any]
    ) -> None:
        """Add amounts, each spread evenly from its start to its end; an interval too short counts at its end."""
        if len(start_ns) == 0:
            return
        start = np.maximum(start_ns, 0) / 1e9
        end = np.maximum(end_ns / 1e9, start)
        while float(end.max()) >= self.bin_s * BINS:
            self._double()
        is_instant = end - start < AT_ONCE_S
        self.lumps += np.bincount(self._places(end[is_instant]), amount[is_instant], BINS)
        start, end = start[~is_instant], end[~is_instant]
        slopes = amount[~is_instant] / (end - start)
        for at_s, change in ((start, slopes), (end, -slopes)):
            self.slope += np.bincount(self._places(at_s), change, BINS)
            self.level += np.bincount(self._places(at_s), change * at_s, BINS)

    def _places(self, at_s: NDArray[np.float64]) -> NDArray[np.int64]:
        return (at_s / self.bin_s).astype(np.int64)

    def _double(self) -> None:
        self.bin_s *= 2
        for values in self._arrays():
            values[: BINS // 2] = values.reshape(-1, 2).sum(axis=1)
            values[BINS // 2 :] = 0

    def _arrays(self) -> tuple[NDArray[np.float64], ...]:
        return self.slope, self.level, self.lumps

    def between(self, start_s: float | None, end_s: float | None) -> float:
        """The amount that came in an interval, ends included; 0 when an end is None."""
        if start_s is None or end_s is None:
            return 0.0
        edges = np.arange(BINS + 1) * self.bin_s
        slope, level, lumps = (
            np.concatenate(([0.0], np.cumsum(values))) for values in self._arrays()
        )
        cumulative = edges * slope - level + lumps
        low, high = np.interp([start_s, end_s], edges, cumulative)
        return float(high - low)
