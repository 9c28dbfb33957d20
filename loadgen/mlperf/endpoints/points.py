"""The measurement points of a curve: their concurrencies, regions and roles. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from loadgen.core import format
from loadgen.core.errors import UserError
from loadgen.mlperf.endpoints import rules
from loadgen.mlperf.endpoints.regions import REGION_NAMES, Regions, compute_regions

OfflineChoice = Literal["dedicated", "elected"]
"""How a curve gets its Offline result: by a run, or from the point at C_max (section 5.7.2)."""

OFFLINE_NAME = "offline"


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement point.

    Attributes:
        name: The name of its directory: "r8" for a concurrency of 8, or "offline".
        concurrency: The requests in flight. For an Offline run, the size of the data set.
        region: The region that it counts for. None for an Offline run and in the margin.
        offline: Whether it is an Offline run ("dedicated"), the Offline result as well
            ("elected"), or neither ("none").
        is_mandatory: Whether it is the point that its region requires, or the Offline run.
        min_window_s: How long its steady window lasts at least, in seconds.
    """

    name: str
    concurrency: int
    region: str | None
    offline: Literal["none", "dedicated", "elected"] = "none"
    is_mandatory: bool
    min_window_s: int

    @property
    def needs_accuracy(self) -> bool:
        """Whether the rules require an accuracy run (section 4.3): the mandatory points only."""
        return self.is_mandatory

    @property
    def is_offline_run(self) -> bool:
        """Whether all queries are sent at once, in a run of its own."""
        return self.offline == "dedicated"


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """The points of a curve in the order of concurrency, an Offline run last.

    Attributes:
        c_min: The lowest concurrency.
        c_max: The Maximum Supported Concurrency.
        regions: The regions between the two.
        points: The points.
    """

    c_min: int
    c_max: int
    regions: Regions
    points: tuple[CurvePoint, ...]

    @property
    def fixed_points(self) -> tuple[CurvePoint, ...]:
        """The points with a fixed concurrency, which form the curve."""
        return tuple(point for point in self.points if not point.is_offline_run)


def spread_concurrencies(c_min: int, c_max: int, count: int) -> list[int]:
    """Return `count` concurrencies from `c_min` to `c_max`, at equal distances on a log scale.

    With `c_min` 1, `c_max` 1025 and 6 points, the concurrencies are 1, 5, 17, 65, 257 and 1025.

    Args:
        c_min: The lowest concurrency.
        c_max: The highest concurrency.
        count: The number of concurrencies, `c_min` and `c_max` included.

    Raises:
        UserError: A concurrency is not allowed, or there are not as many different ones.
    """
    compute_regions(c_min, c_max)  # raises UserError for a concurrency that is not allowed

    octaves = math.log2(c_max - c_min)
    steps = count - 1
    exponents = [octaves * step / steps for step in range(1, steps + 1)]
    spread = [round(c_min + 2**exponent) for exponent in exponents]
    concurrencies = sorted({c_min, *spread})
    if len(concurrencies) < count:
        raise UserError(
            "out_of_range",
            f"{count} different points do not fit between {c_min} and {c_max}",
            "--points",
            f"use --points {len(concurrencies) + 1} or a larger --c-max",
        )
    return concurrencies


def build_curve(
    concurrencies: Sequence[int], *, c_max: int, dataset_size: int, offline: OfflineChoice
) -> Curve:
    """Return a curve with a measurement point at each concurrency, and with an Offline result.

    The rules require an accuracy run at one point of each region (a range of concurrencies). This
    is the point with the highest concurrency, where the run is fastest.

    Args:
        concurrencies: The concurrencies of the points, in any order.
        c_max: The highest concurrency that the system supports.
        dataset_size: The number of samples of the data set.
        offline: "dedicated" for a run that sends all samples at once, or "elected" for the point
            at `c_max` as the Offline result.

    Raises:
        UserError: A concurrency is outside the range of the rules, or no point is at `c_max`
            although that point is to be the Offline result.
    """
    ordered = sorted(set(concurrencies))
    c_min = ordered[0]
    regions = compute_regions(c_min, c_max)
    _check_elected_point(ordered, c_max, offline)

    mandatory_concurrencies = _find_highest_by_region(ordered, regions).values()
    points = []
    for concurrency in ordered:
        region = regions.find(concurrency)
        is_elected = offline == "elected" and concurrency == c_max
        point = CurvePoint(
            name=f"r{concurrency}",
            concurrency=concurrency,
            region=None if region is None else region.name,
            offline="elected" if is_elected else "none",
            is_mandatory=concurrency in mandatory_concurrencies,
            min_window_s=rules.minimum_window_s(concurrency),
        )
        points.append(point)

    if offline == "dedicated":
        points.append(_offline_run(dataset_size))
    return Curve(c_min=c_min, c_max=c_max, regions=regions, points=tuple(points))


def _check_elected_point(concurrencies: Sequence[int], c_max: int, offline: OfflineChoice) -> None:
    """Check that a curve has the point that is elected as the Offline result, if one is.

    Raises:
        UserError: The point at `c_max` is elected, but no point is there.
    """
    if offline == "elected" and c_max not in concurrencies:
        raise UserError(
            "missing_value",
            f"the Offline result should be that of C_max, but no point is at {c_max}",
            "--offline elected",
            f"add {c_max} to --concurrency",
        )


def _offline_run(dataset_size: int) -> CurvePoint:
    """Return the point of a run that has all samples of the data set in flight (section 5.7.1)."""
    return CurvePoint(
        name=OFFLINE_NAME,
        concurrency=dataset_size,
        region=None,
        offline="dedicated",
        is_mandatory=True,
        min_window_s=rules.MIN_WINDOW_S,
    )


def _find_highest_by_region(concurrencies: Sequence[int], regions: Regions) -> dict[str, int]:
    """Return the highest concurrency in each region, by the name of the region.

    Regions without any of the concurrencies are left out.
    """
    highest_by_region: dict[str, int] = {}
    for concurrency in sorted(concurrencies):
        region = regions.find(concurrency)
        if region is not None:
            highest_by_region[region.name] = concurrency
    return highest_by_region


def required_points(offline: OfflineChoice) -> int:
    """Return how many points a curve has at least (section 5.3)."""
    if offline == "elected":
        return rules.MIN_POINTS_WITH_ELECTED_OFFLINE
    return rules.MIN_POINTS


def find_structure_problems(curve: Curve) -> Iterator[str]:
    """Yield a sentence for each rule that the measurement points of a curve do not meet.

    These rules are about the number of points, and about their concurrencies. A curve may end with
    an Offline run, which has all samples of the data set in flight.
    """
    yield from _find_count_problems(curve)
    yield from _find_concurrency_problems(curve)

    last_point = curve.points[-1]
    if last_point.is_offline_run and last_point.concurrency < curve.c_max:
        yield (
            f"the data set has {last_point.concurrency:,} samples, fewer than C_max, so an "
            "Offline run cannot reach that concurrency (section 5.7.2); use --offline elected"
        )


def _find_count_problems(curve: Curve) -> Iterator[str]:
    """Yield a sentence if a curve has too few or too many points."""
    has_offline_run = curve.points[-1].is_offline_run
    least_count = required_points("dedicated" if has_offline_run else "elected")
    count = len(curve.points)
    if count < least_count:
        yield f"{count} points, but a curve has at least {least_count} (section 5.3)"
    if count > rules.MAX_POINTS:
        yield f"{count} points, but a curve has at most {rules.MAX_POINTS} (section 5.6)"


def _find_concurrency_problems(curve: Curve) -> Iterator[str]:
    """Yield a sentence for each region without a point, and for each concurrency that is too high.

    A region is a range of concurrencies up to C_max. Points may exceed C_max only by a margin.
    """
    covered_regions = {point.region for point in curve.points}
    for region in curve.regions.regions:
        needs_point = region.name in REGION_NAMES
        if needs_point and region.name not in covered_regions:
            concurrencies = format.value_range(str(region.start), str(region.end))
            yield f"no point in the {region.label} region, {concurrencies} (section 5.3)"

    for point in curve.fixed_points:
        is_in_range = point.region is not None or curve.regions.is_in_margin(point.concurrency)
        if not is_in_range:
            yield (
                f"{point.concurrency} is above C_max and its margin, {curve.regions.margin_end} "
                "(section 5.4)"
            )
