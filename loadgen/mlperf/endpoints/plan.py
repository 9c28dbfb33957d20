"""The time, the cost and the expected steady window of each point of a curve. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from loadgen.mlperf.endpoints import rules
from loadgen.mlperf.endpoints.points import Curve, CurvePoint, find_structure_problems
from loadgen.mlperf.endpoints.rates import ConcurrencyRate, interpolate_rate

SECONDS_PER_HOUR = 3600

RAMP_PASSES = 1
"""Passes for the start of a run, which the detector of the steady window leaves out.

A run needs more than the 4 super-passes that the window spans (section 4.4).
"""

WINDOW_RESERVE = 1.1
"""How much longer than the minimum the window is planned.

A run that just reaches the minimum can miss it, because the detector may leave out further passes.
"""

Outlook = Literal["window expected", "too few passes", "less than one pass", "not needed"]
"""What a plan expects of the steady window of a point.

- "window expected": the run is long enough.
- "too few passes": the limit on time leaves fewer passes than a window needs. The official result
  is then that of the complete run (status `insufficient_passes`).
- "less than one pass": the limit leaves no room for the data set (status `partial_dataset`), which
  section 6.4 does not allow.
- "not needed": an Offline run, whose result is that of the complete run (section 4.4, scope).
"""


class PointPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One point with its expected time.

    Attributes:
        point: The point.
        requests_per_s: The expected rate of completed requests.
        pass_s: The time of one pass of the data set, in seconds.
        passes: The passes that the run sends.
        needed_passes: The passes that a steady window needs, without a limit on time.
        requests: The requests that the run sends.
        duration_s: The expected time of the run, in seconds.
        accuracy_s: The expected time of the accuracy run after it, in seconds. 0 without one.
        cost: The expected cost of both. None without a price.
        outlook: What is expected of the steady window.
    """

    point: CurvePoint
    requests_per_s: float
    pass_s: float
    passes: int
    needed_passes: int
    requests: int
    duration_s: float
    accuracy_s: float
    cost: float | None
    outlook: Outlook

    @property
    def total_s(self) -> float:
        """The expected time of the run and of its accuracy run, in seconds."""
        return self.duration_s + self.accuracy_s

    @property
    def needed_s(self) -> float:
        """The time of a run with enough passes for a steady window, in seconds."""
        return self.needed_passes * self.pass_s

    @property
    def misses_window(self) -> bool:
        """Whether the run will not reach a steady window within the limit on time."""
        return self.outlook in ("too few passes", "less than one pass")


class CurvePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a curve.

    Attributes:
        benchmark: The name of the benchmark.
        dataset_size: The samples of its data set.
        seed_set: The identifier of the seed set.
        target_cohort: The cohort that the curve is planned for.
        rate_source: Where the expected rates come from.
        is_simulated: Whether they come from a simulated server.
        curve: The points and regions.
        points: The plan of each point.
        max_point_s: The limit on the time of one run, in seconds. None without a limit.
        price_per_hour: The price of the system. None if it is not specified.
        currency: The currency of the price.
        problems: The rules that the points miss.
        lowest_concurrency_in_limit: The lowest concurrency whose steady window fits the limit.
            None if every point fits.
        disclosure: That the result is unofficial.
    """

    benchmark: str
    dataset_size: int
    seed_set: str
    target_cohort: str
    rate_source: str
    is_simulated: bool
    curve: Curve
    points: tuple[PointPlan, ...]
    max_point_s: float | None
    price_per_hour: float | None
    currency: str
    problems: tuple[str, ...]
    lowest_concurrency_in_limit: int | None = None
    disclosure: str = rules.DISCLOSURE

    @property
    def total_s(self) -> float:
        """The expected time of all points, one after the other, in seconds."""
        return sum(plan.total_s for plan in self.points)

    @property
    def total_cost(self) -> float | None:
        """The expected cost of all points, or None without a price."""
        if self.price_per_hour is None:
            return None
        return self.total_s / SECONDS_PER_HOUR * self.price_per_hour


def plan_point(
    point: CurvePoint,
    rate: ConcurrencyRate,
    *,
    dataset_size: int,
    accuracy_samples: int,
    max_point_s: float | None,
    price_per_hour: float | None,
) -> PointPlan:
    """Return how long the run of one measurement point takes, and what it costs.

    A pass sends each sample of the data set once. The run has as many passes as a steady window
    needs, or as many as fit the limit on time, but at least one (section 6.4 of the rules).

    Args:
        point: The measurement point.
        rate: The expected speed of the system at the concurrency of the point.
        dataset_size: The number of samples of the data set.
        accuracy_samples: The number of queries of an accuracy run.
        max_point_s: The limit on the time of the run, in seconds. None without a limit.
        price_per_hour: The price of the system. None if it is not known.
    """
    # The number of passes, which may be 0 within the limit.
    pass_s = dataset_size / rate.requests_per_s
    needed_passes = _count_needed_passes(point, pass_s)
    possible_passes = needed_passes
    if max_point_s is not None:
        possible_passes = min(needed_passes, math.floor(max_point_s / pass_s))
    planned_passes = max(possible_passes, 1)

    # The time. The last responses arrive one response time after the last requests.
    duration_s = planned_passes * pass_s + rate.response_s
    accuracy_s = accuracy_samples / rate.requests_per_s if point.needs_accuracy else 0.0

    cost = None
    if price_per_hour is not None:
        total_hours = (duration_s + accuracy_s) / SECONDS_PER_HOUR
        cost = total_hours * price_per_hour

    return PointPlan(
        point=point,
        requests_per_s=rate.requests_per_s,
        pass_s=pass_s,
        passes=planned_passes,
        needed_passes=needed_passes,
        requests=planned_passes * dataset_size,
        duration_s=duration_s,
        accuracy_s=accuracy_s,
        cost=cost,
        outlook=_predict_window(point, possible_passes, needed_passes),
    )


def _count_needed_passes(point: CurvePoint, pass_s: float) -> int:
    """Return how many passes over the data set a run at a measurement point needs.

    The run needs a steady window of a minimum duration and of some passes. It is planned 10 %
    longer, with a pass before the window in which the load builds up. An Offline run, which sends
    all queries at once, has no window, but it has to last as long (sections 5.7.3 and 6.2 of the
    rules).

    Args:
        point: The measurement point.
        pass_s: The expected time of a pass, in seconds.
    """
    planned_window_s = WINDOW_RESERVE * point.min_window_s
    passes_for_time = math.ceil(planned_window_s / pass_s)
    if point.is_offline_run:
        return max(passes_for_time, 1)
    return RAMP_PASSES + max(passes_for_time, rules.MIN_SUPER_PASSES)


def _predict_window(point: CurvePoint, possible_passes: int, needed_passes: int) -> Outlook:
    """Return whether a run is expected to reach its steady window within the limit on time.

    Args:
        point: The measurement point.
        possible_passes: The passes over the data set that fit the limit.
        needed_passes: The passes that a steady window needs.
    """
    if possible_passes < 1:
        return "less than one pass"
    if possible_passes < needed_passes:
        return "too few passes"
    return "not needed" if point.is_offline_run else "window expected"


def find_lowest_concurrency_in_limit(
    rates: Sequence[ConcurrencyRate], *, dataset_size: int, max_point_s: float | None
) -> int | None:
    """Return the lowest concurrency with which a run fits the limit on time.

    A run has at least one pass over the data set in which the load builds up, and the passes of its
    steady window. Return None without a limit, or if no concurrency from 1 to 32 fits it, which are
    those that the rules allow as the lowest one of a curve.

    Args:
        rates: The measured speed at some concurrencies.
        dataset_size: The number of samples of the data set.
        max_point_s: The limit on the time of a run, in seconds.
    """
    if max_point_s is None:
        return None

    fewest_passes = RAMP_PASSES + rules.MIN_SUPER_PASSES
    fewest_requests = fewest_passes * dataset_size
    for concurrency in range(1, rules.MAX_LOWEST_CONCURRENCY + 1):
        rate = interpolate_rate(rates, concurrency)
        duration_s = fewest_requests / rate.requests_per_s
        if duration_s <= max_point_s:
            return concurrency
    return None


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan depends on besides the points and the rates.

    Attributes:
        benchmark: The name of the benchmark.
        dataset_size: The samples of its data set.
        accuracy_samples: The queries of an accuracy run.
        seed_set: The identifier of the seed set.
        target_cohort: The cohort that the curve is planned for.
        max_point_s: The limit on the time of one run, in seconds. None without a limit.
        price_per_hour: The price of the system. None if it is not specified.
        currency: The currency of the price.
    """

    benchmark: str
    dataset_size: int
    accuracy_samples: int
    seed_set: str
    target_cohort: str
    max_point_s: float | None
    price_per_hour: float | None
    currency: str


def plan_curve(
    curve: Curve,
    rates: Sequence[ConcurrencyRate],
    settings: PlanSettings,
    *,
    rate_source: str,
    is_simulated: bool,
) -> CurvePlan:
    """Return how long the measurement of a curve takes, point by point, and what it costs.

    Args:
        curve: The measurement points.
        rates: The measured speed of the system at some concurrencies. The speed at other
            concurrencies is interpolated.
        settings: The benchmark, the limit on time and the price.
        rate_source: Where the rates come from, as text for the plan.
        is_simulated: Whether the rates come from a simulated server.
    """
    points = tuple(_plan_points(curve, rates, settings))

    # Advice for a curve with points that take too long.
    lowest_in_limit = None
    if any(plan.misses_window for plan in points):
        lowest_in_limit = find_lowest_concurrency_in_limit(
            rates, dataset_size=settings.dataset_size, max_point_s=settings.max_point_s
        )

    return CurvePlan(
        # The plan.
        curve=curve,
        points=points,
        problems=tuple(find_structure_problems(curve)),
        lowest_concurrency_in_limit=lowest_in_limit,
        # The rates on which it rests.
        rate_source=rate_source,
        is_simulated=is_simulated,
        # The settings.
        benchmark=settings.benchmark,
        dataset_size=settings.dataset_size,
        seed_set=settings.seed_set,
        target_cohort=settings.target_cohort,
        max_point_s=settings.max_point_s,
        price_per_hour=settings.price_per_hour,
        currency=settings.currency,
    )


def _plan_points(
    curve: Curve, rates: Sequence[ConcurrencyRate], settings: PlanSettings
) -> Iterator[PointPlan]:
    """Yield the plan of each measurement point, at the speed interpolated for its concurrency."""
    for point in curve.points:
        yield plan_point(
            point,
            interpolate_rate(rates, point.concurrency),
            dataset_size=settings.dataset_size,
            accuracy_samples=settings.accuracy_samples,
            max_point_s=settings.max_point_s,
            price_per_hour=settings.price_per_hour,
        )
