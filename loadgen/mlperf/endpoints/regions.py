"""The regions of a curve on the axis of concurrency. Pure.

Source: section 5.5 of `endpoints_rules.md` in mlcommons/endpoints_policies, v1.0.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from loadgen.core.errors import UserError
from loadgen.mlperf.endpoints import rules

RegionName = Literal["low_latency", "low_concurrency", "med_concurrency", "high_concurrency"]
"""The names of the four regions in `point.yaml` (section 8.3)."""

REGION_LABELS: dict[RegionName, str] = {
    "low_latency": "Ultra Low Concurrency",
    "low_concurrency": "Low Concurrency",
    "med_concurrency": "Medium Concurrency",
    "high_concurrency": "High Concurrency",
}
REGION_NAMES = tuple(REGION_LABELS)
MARGIN_LABEL = "margin above C_max"


class Region(msgspec.Struct, frozen=True):
    """A region, from its lowest to its highest concurrency, both included."""

    name: RegionName
    start: int
    end: int

    @property
    def label(self) -> str:
        """The name of the region in texts."""
        return REGION_LABELS[self.name]


class Regions(msgspec.Struct, frozen=True):
    """The regions of a curve in the order of concurrency, and the end of the margin above them.

    A point in the margin, up to 10 % above the highest concurrency, still belongs to the curve.
    """

    regions: tuple[Region, ...]
    margin_end: int

    def find(self, concurrency: int) -> Region | None:
        """Return the region that contains a concurrency, or None if it is above all regions.

        Rounding may make two regions end at the same concurrency. Then the later region is empty.
        """
        for region in self.regions:
            if region.start <= concurrency <= region.end:
                return region
        return None

    def is_in_margin(self, concurrency: int) -> bool:
        """Return whether a concurrency is above C_max, but by at most 10 %."""
        return self.regions[-1].end < concurrency <= self.margin_end


def compute_regions(c_min: int, c_max: int) -> Regions:
    """Divide the range of concurrencies of a curve into the four regions of the rules.

    The first region ends at `c_min`. The range above it is divided into three equal parts on a
    logarithmic scale: with `c_min` 1 and `c_max` 1025, the parts end at about 11, 103 and 1025.
    Source: section 5.5 of the rules of MLPerf Endpoints, which round half to even, like `round`.

    Args:
        c_min: The lowest concurrency of all points.
        c_max: The highest concurrency, which the submitter chooses.

    Raises:
        UserError: A concurrency is outside the range of the rules.
    """
    _check_range(c_min, c_max)

    # A third of the range above c_min, as a base 2 logarithm: 10 / 3 for a range of 1024.
    third_of_range = math.log2(c_max - c_min) / 3
    low_end = round(c_min + 2**third_of_range)
    medium_end = round(c_min + 2 ** (2 * third_of_range))
    regions = (
        Region("low_latency", 1, c_min),
        Region("low_concurrency", c_min + 1, low_end),
        Region("med_concurrency", low_end + 1, medium_end),
        Region("high_concurrency", medium_end + 1, c_max),
    )
    margin_end = math.ceil(rules.HIGH_REGION_MARGIN * c_max)
    return Regions(regions, margin_end=margin_end)


def _check_range(c_min: int, c_max: int) -> None:
    """Check that the rules allow the lowest and the highest concurrency of a curve.

    Raises:
        UserError: The rules do not allow one of them.
    """
    if not 1 <= c_min <= rules.MAX_LOWEST_CONCURRENCY:
        raise UserError(
            "out_of_range",
            f"the lowest concurrency of a curve is 1 to {rules.MAX_LOWEST_CONCURRENCY}, "
            f"not {c_min}",
            "--concurrency",
            "add a point at 1 (section 5.4 of the rules)",
        )
    if c_max <= rules.MAX_LOWEST_CONCURRENCY:
        raise UserError(
            "out_of_range",
            f"C_max is above {rules.MAX_LOWEST_CONCURRENCY}, not {c_max}",
            "--c-max",
            "give the highest concurrency that the system serves, such as --c-max 1024",
        )
