"""What the load points of a sweep show: the best one within the SLO, the knee, the Pareto front.

Pure. Load points are always in order of load.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.runs.load_point_results import LoadPointResult

SloOutcome = Literal["under", "over", "invalid"]
"""What a load point shows of the capacity, as result files store it.

- under: it met the SLO, so that its load is under the capacity.
- over: it missed the SLO.
- invalid: it shows nothing.
"""
MIN_POINTS_FOR_KNEE = 3
"""With two load points, one of them would always be the knee."""
Name = TypeVar("Name")


# The SLO


def slo_outcome(point: LoadPointResult) -> SloOutcome:
    """Return whether a load point met or missed the SLO, or shows neither."""
    is_complete = point.state == "finished" and point.reached_concurrency
    if not point.valid or not is_complete or point.slo_met is None:
        return "invalid"
    return "under" if point.slo_met else "over"


def points_within_slo(points: Sequence[LoadPointResult]) -> list[LoadPointResult]:
    """Return the load points that met the SLO."""
    return [point for point in points if slo_outcome(point) == "under"]


def lowest_missed(points: Sequence[LoadPointResult]) -> LoadPointResult | None:
    """Return the load point of least load that missed the SLO."""
    return next((point for point in points if slo_outcome(point) == "over"), None)


def lowest_growing(points: Sequence[LoadPointResult]) -> LoadPointResult | None:
    """Return the load point of least load at which the queue grew although it met the SLO.

    A queue that grows until the end of a run shows that the server cannot sustain the load: in a
    longer run, it would miss the SLO.
    """
    return next((point for point in points_within_slo(points) if point.sustained is False), None)


def best_load_point(points: Sequence[LoadPointResult]) -> LoadPointResult | None:
    """Return the load point with the highest load that the server sustained, or None.

    It met the SLO, and so did every load point with a lower load: a server that fails at one load
    does not have the capacity of a higher one. A load point also fails if the queue grew until the
    end of its run.

    In an open loop, the highest load is the highest offered rate. In a closed loop, the server
    decides the rate, and the highest load is the one with most completed requests per second.
    """
    failed_points = (lowest_missed(points), lowest_growing(points))
    failed_loads = [_load(point) for point in failed_points if point is not None]
    lowest_failed_load = min(failed_loads, default=math.inf)
    candidates = [point for point in points_within_slo(points) if _load(point) < lowest_failed_load]
    return max(candidates, key=_sustained_rate, default=None)


def _load(point: LoadPointResult) -> float:
    """Return the rate or the concurrency of a load point. A load that is not known counts as 0."""
    return point.load_value or 0.0


def _sustained_rate(point: LoadPointResult) -> float:
    """Return the offered rate of an open loop, or the rate that a closed loop completed."""
    rate = point.requests_per_s if point.is_closed_loop else point.load_value
    return rate or 0.0


# Throughput against latency


def find_knee(points: Sequence[LoadPointResult]) -> str:
    """Return the name of the load point from which more load costs more latency than it gains.

    It is the one with the largest ratio of throughput to latency (output tokens/s divided by E2E
    p50), which Kleinrock (1979) calls the power of a system. Return "" if fewer than
    MIN_POINTS_FOR_KNEE load points can be compared, and if it is the last of them, because a higher
    load may have a larger ratio still.
    """
    comparable_points = points_for_knee(points)
    if len(comparable_points) < MIN_POINTS_FOR_KNEE:
        return ""
    knee = max(comparable_points, key=_power)
    return "" if knee is comparable_points[-1] else knee.name


def points_for_knee(points: Sequence[LoadPointResult]) -> list[LoadPointResult]:
    """Return the load points whose ratios of throughput to latency can be compared.

    A load point without a steady state is left out: its throughput includes the ramp-up and the
    drain, so it is lower than that of the same load over a longer time.
    """
    return [
        point
        for point in points
        if point.is_usable and point.has_steady_state and point.output_per_s and point.e2e_p50
    ]


def _power(point: LoadPointResult) -> float:
    """Return the ratio of throughput to latency of a load point that has both."""
    return (point.output_per_s or 0.0) / (point.e2e_p50 or 1.0)


def pareto_front(points: Mapping[Name, tuple[float | None, float | None]]) -> set[Name]:
    """Return the names of the points that no other point dominates.

    A point dominates another one if it is at least as high in both values and higher in one. A
    point with an unknown value is not on the front.
    """
    known = {name: (x, y) for name, (x, y) in points.items() if x is not None and y is not None}
    return {
        name
        for name, point in known.items()
        if not any(_dominates(other, point) for other in known.values())
    }


def _dominates(point: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether `point` is at least as high as `other` in both values, and higher in one."""
    return point[0] >= other[0] and point[1] >= other[1] and point != other
