"""Which statistics of a run are withheld, because they rest on values that are too uncertain. Pure.

Each statistic is judged by itself: it is withheld if moving all values to their bounds changes it
by more than the limit of its metric. So the p99 of a metric can be withheld while its p50 is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.limits import STALL_NS
from loadgen.core.metrics import bounds, outcomes
from loadgen.core.metrics.bounds import Bounds
from loadgen.core.metrics.columns import OK, UNDEFINED, Columns
from loadgen.core.stats.quantiles import QUANTILES, Distribution, index, milliseconds
from loadgen.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from loadgen.core.limits import ValidityLimits
    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.slo import Slo
    from loadgen.core.stats.quantiles import Histogram, Values
    from loadgen.figures import MetricDefinition

STATISTICS = ("mean", *(name for name, _ in QUANTILES), "max")
ERROR_STEPS = 200
"""So many sizes of the errors of events are tried for the bounds of the gaps."""


Ranges = dict[str, tuple[float, float]]
"""The smallest and the largest value, in ms, of each statistic of a metric that is withheld."""


class Range(NamedTuple):
    """The smallest and the largest value that a statistic may have, in ns."""

    lower: float
    upper: float

    def exceeds(self, value: float, limit: float) -> bool:
        """Return True if the statistic may be off by more than `limit`, a share of its value."""
        return max(value - self.lower, self.upper - value) > limit * value


class WithheldStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of one metric that are withheld, with the range of each in its unit."""

    ranges: Ranges
    why: str


class ValueBounds:
    """The bounds of all values of a metric that has one value per request."""

    def __init__(self, lower: NDArray[np.int64], upper: NDArray[np.int64]) -> None:
        self._lower = np.sort(lower)
        self._upper = np.sort(upper)

    def nth(self, place: int) -> Range:
        """Return the bounds of the value at a place of the ordered sample, from 0."""
        return Range(float(self._lower[place]), float(self._upper[place]))

    def quantile(self, p: float) -> Range:
        """Return the bounds of a quantile; there is at least one value."""
        return self.nth(index(len(self._lower), p))

    def over(self, limit_ns: int) -> tuple[int, int]:
        """Return how many values are over a limit at least, and at most."""
        counts = (
            len(values) - int(np.searchsorted(values, limit_ns, side="right"))
            for values in (self._lower, self._upper)
        )
        return next(counts), next(counts)

    def statistics(self) -> Iterator[tuple[str, Range]]:
        """Yield the bounds of each statistic."""
        yield "mean", Range(float(self._lower.mean()), float(self._upper.mean()))
        yield from ((name, self.quantile(p)) for name, p in QUANTILES)
        yield "max", self.nth(len(self._lower) - 1)


class GapBounds:
    """The bounds of the gaps between events, from the gaps and the errors of the timestamps.

    Which gap has which error is not known. An event that came earlier than its timestamp makes one
    gap shorter and the next one longer. So of all gaps at most as many as there are events with an
    error above e become shorter, or longer, by more than e (Makarov's bounds).
    """

    def __init__(self, gaps: Histogram, event_errors: Histogram, mean: Range, least_max: float):
        """Take the histograms of gaps and of errors, and the bounds of the mean and of the maximum.

        Args:
            gaps: The gaps between events of all requests.
            event_errors: The error of the timestamp of each event.
            mean: The bounds of the mean, which follows from the first and the last token.
            least_max: The largest gap, less the errors at the ends of the largest gaps.
        """
        self._gaps = gaps
        self._mean = mean
        self._least_max = least_max
        self._error_counts = _error_counts(event_errors)
        self._errors = np.array([error for error, _ in self._error_counts])
        self._events_above = np.array([above for _, above in self._error_counts])
        self._up_to = np.cumsum(gaps.counts)

    def _gaps_at(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the gaps at places of the ordered sample."""
        buckets = np.searchsorted(self._up_to, places, side="right").astype(np.int64)
        return self._gaps.middles(buckets)

    def quantile(self, p: float) -> Range:
        """Return the bounds of a quantile."""
        return self.nth(index(self._gaps.count, p))

    def nth(self, place: int) -> Range:
        """Return the bounds of the value at a place of the ordered gaps, from 0."""
        last = int(self._up_to[-1]) - 1
        is_below = self._events_above <= place
        is_above = place + self._events_above <= last
        lowers = self._gaps_at(place - self._events_above[is_below]) - self._errors[is_below]
        uppers = self._gaps_at(place + self._events_above[is_above]) + self._errors[is_above]
        return Range(float(lowers.max(initial=0.0)), float(uppers.min()))

    def over(self, limit_ns: int) -> tuple[int, int]:
        """Return how many gaps are over a limit at least, and at most."""
        counts = [
            (
                self._gaps.over(limit_ns + int(error)) - events_above,
                self._gaps.over(max(limit_ns - int(error), 0)) + events_above,
            )
            for error, events_above in self._error_counts
        ]
        least = max(0, *(at_least for at_least, _ in counts))
        return least, min(self._gaps.count, *(at_most for _, at_most in counts))

    def statistics(self) -> Iterator[tuple[str, Range]]:
        """Yield the bounds of each statistic."""
        yield "mean", self._mean
        yield from ((name, self.quantile(p)) for name, p in QUANTILES)
        yield "max", Range(self._least_max, float(self._gaps.largest_ns))


def _error_counts(event_errors: Histogram) -> list[tuple[float, int]]:
    """Return sizes of errors from 0 to the largest, each with the number of events above it."""
    total = event_errors.count
    up_to = np.cumsum(event_errors.counts)
    places = np.flatnonzero(event_errors.counts[1:]) + 1
    chosen = places[:: max(len(places) // ERROR_STEPS, 1)].tolist()
    sizes = [(0.0, total - int(up_to[0]))]
    sizes += [(event_errors.middle(place), total - int(up_to[place])) for place in chosen]
    if len(places):
        sizes.append((float(event_errors.largest_ns), 0))
    return sizes


SampleBounds = ValueBounds | GapBounds


def bound_values(rows: Sequence[Columns], bound: Callable[[Columns], Bounds]) -> ValueBounds | None:
    """Return the bounds of a metric of the ok requests; None if all values are sure."""
    lowers: list[NDArray[np.int64]] = []
    uppers: list[NDArray[np.int64]] = []
    is_certain = True
    for columns in rows:
        for block in columns.blocks():
            is_ok = block.where(OK)
            found = bound(block)
            is_certain = is_certain and found.lower is found.upper
            is_defined = is_ok & (found.lower != UNDEFINED)
            lowers.append(found.lower[is_defined])
            uppers.append(found.upper[is_defined])
    if is_certain or not sum(map(len, lowers)):
        return None
    lower, upper = np.concatenate(lowers), np.concatenate(uppers)
    return None if np.array_equal(lower, upper) else ValueBounds(lower, upper)


def bound_metric(rows: Sequence[Columns], metric: str) -> ValueBounds | None:
    """Return the bounds of a metric by its row in the table of figures; None if it has none."""
    row = FIGURES.called(metric)
    if row is None or row.bounds is None:
        return None
    return bound_values(rows, row.bounds)


def bound_gaps(
    rows: Sequence[Columns], gaps: Histogram, event_errors: Histogram
) -> GapBounds | None:
    """Return the bounds of the gaps between events; None if all of them are sure."""
    if not gaps.count or not event_errors.count or event_errors.largest_ns <= 0:
        return None
    first_errors = last_errors = 0
    largest = 0
    for columns in rows:
        has_gaps = columns["output_events"] > 1
        first_errors += int(np.maximum(columns["stamp_error_ns"], 0)[has_gaps].sum())
        last_errors += int(np.maximum(columns["last_token_error_ns"], 0)[has_gaps].sum())
        shortest = columns["max_gap_ns"] - np.maximum(columns["max_gap_error_ns"], 0)
        largest = max(largest, int(shortest[has_gaps].max(initial=0)))
    mean = Range(
        max(gaps.total_ns - last_errors, 0) / gaps.count,
        (gaps.total_ns + first_errors) / gaps.count,
    )
    return GapBounds(gaps, event_errors, mean, float(largest))


def withheld_ranges(
    distribution: Distribution, sample: SampleBounds | None, limit: float
) -> Ranges:
    """Return the statistics that may be off by more than `limit`, with their ranges in ms."""
    if sample is None:
        return {}
    ranges: Ranges = {}
    for name, found in sample.statistics():
        value = getattr(distribution, name)
        if value is not None and found.exceeds(value * 1e6, limit):
            ranges[name] = (milliseconds(found.lower), milliseconds(found.upper))
    return ranges


def find_withheld(
    samples: Mapping[str, Distribution],
    rows: Sequence[Columns],
    gap_bounds: GapBounds | None,
    limits: ValidityLimits,
) -> dict[str, Ranges]:
    """Return the statistics of each metric that are too uncertain, with their ranges."""
    found = {}
    for row in FIGURES.here():
        sample_bounds: SampleBounds | None = gap_bounds if row.name == "inter_chunk" else None
        if row.bounds is not None:
            sample_bounds = bound_values(rows, row.bounds)
        if sample_bounds is not None:
            limit = _limit_of(row, limits)
            if ranges := withheld_ranges(samples[row.name], sample_bounds, limit):
                found[row.name] = ranges
    return found


def guard_metric(
    rows: Sequence[Columns], metric: str, distribution: Distribution, limits: ValidityLimits
) -> Distribution:
    """Return the distribution of a metric without the statistics that are too uncertain."""
    row = FIGURES.called(metric)
    if row is None or row.bounds is None:
        return distribution
    sample_bounds = bound_values(rows, row.bounds)
    return distribution.without(
        withheld_ranges(distribution, sample_bounds, _limit_of(row, limits))
    )


def guard_gaps(
    rows: Sequence[Columns], gaps: Histogram, event_errors: Histogram, limits: ValidityLimits
) -> Distribution:
    """Return the distribution of the gaps without the statistics that are too uncertain."""
    distribution = gaps.distribution()
    gap_bounds = bound_gaps(rows, gaps, event_errors)
    return distribution.without(withheld_ranges(distribution, gap_bounds, limits.event_error_share))


def certain_quantiles(
    sample: Values | Histogram,
    sample_bounds: SampleBounds | None,
    row: MetricDefinition,
    header: RunManifest,
) -> tuple[float, ...]:
    """Return the percentiles that the user asked for and that are certain enough."""
    if sample_bounds is None or not sample.count:
        return header.percentiles
    limit = _limit_of(row, header.limits)
    return tuple(
        p
        for p in header.percentiles
        if not sample_bounds.quantile(p).exceeds(sample.quantile(p), limit)
    )


def limit_of(metric: str, limits: ValidityLimits) -> float:
    """Return by how much, as a share, a statistic of a metric may be off."""
    row = FIGURES.called(metric)
    return 0.0 if row is None else _limit_of(row, limits)


def _limit_of(row: MetricDefinition, limits: ValidityLimits) -> float:
    return float(getattr(limits, row.uncertainty_limit)) if row.uncertainty_limit else 0.0


def limited_by_first_event(
    rows: Sequence[Columns], tpot: Distribution, limits: ValidityLimits
) -> tuple[str, ...]:
    """Return TPOT if it would be shown, did the server say how many tokens the first event has."""
    by_times = bound_values(rows, bounds.bound_tpot_times)
    return () if withheld_ranges(tpot, by_times, limits.tpot_error_share) else ("tpot",)


def are_stalls_uncertain(rows: Sequence[Columns], stalls: int, limits: ValidityLimits) -> bool:
    """Return True if the number of stalls may be off by more than the limit of the gaps."""
    sample_bounds = bound_metric(rows, "max_gap")
    if sample_bounds is None:
        return False
    least, most = sample_bounds.over(STALL_NS)
    return Range(least, most).exceeds(stalls, limits.event_error_share)


def good_range(rows: Sequence[Columns], slo: Slo) -> tuple[int, int] | None:
    """Return how many requests meet every term at least, and at most; None if all are certain."""
    bounded = [
        row
        for term in slo.terms
        if (row := FIGURES.called(term.metric)) is not None and row.bounds is not None
    ]
    least = most = 0
    is_certain = True
    for columns in rows:
        for block in columns.blocks():
            is_ok = block.where(OK)
            found = {row.name: row.bounds(block) for row in bounded if row.bounds is not None}
            is_certain = is_certain and all(
                each.lower is each.upper or np.array_equal(each.lower[is_ok], each.upper[is_ok])
                for each in found.values()
            )
            highest = {name: each.upper for name, each in found.items()}
            lowest = {name: each.lower for name, each in found.items()}
            least += int(outcomes.meets(block, slo, highest).sum())
            most += int(outcomes.meets(block, slo, lowest).sum())
    return None if is_certain else (least, most)
