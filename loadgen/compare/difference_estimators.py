"""How the difference of a metric between two sides is estimated. Pure.

A comparison takes one of two estimators:

- `IndependentRuns`, for results that were measured one after the other. The error of each side is
  that between its repeats, or between the blocks of time of its only run.
- `AlternatingBlocks` of `loadgen.compare.alternating_blocks`, for sides that were measured in turn.
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from loadgen.compare.block_errors import EstimateOrReason, count_slow_periods
from loadgen.compare.difference import Difference
from loadgen.compare.estimates import estimate_side, list_measured_records
from loadgen.compare.significance import fisher_exact, subtract
from loadgen.repeated.comparable_metrics import Metric
from loadgen.runs.comparison_side import Side

NS_PER_MS = 1e6


class DifferenceEstimator(Protocol):
    """Estimates the difference of a metric between two sides, with its standard error.

    Attributes:
        is_paired: Whether the change that a reader sees is the estimate, and not the ratio of the
            values of both sides.
    """

    is_paired: bool

    def is_repeated(self, first: Side, other: Side) -> bool:
        """Return True if an outcome holds beyond these runs, so that a side can be better."""
        ...

    def estimate(self, first: Side, other: Side, metric: Metric) -> EstimateOrReason:
        """Return the difference `other - first` of a metric, or why it cannot be estimated.

        The difference is one of logarithms, and for a fraction one of the fractions themselves.
        """
        ...

    def confirm(
        self, difference: Difference, first: Side, other: Side, metric: Metric, level: float
    ) -> Difference:
        """Return a difference that is better or worse, or the same as inconclusive.

        Args:
            difference: The difference.
            first: The side to compare with.
            other: The side to compare.
            metric: The metric of the difference.
            level: The significance level at which the difference was judged.
        """
        ...


class IndependentRuns:
    """Estimates the difference between sides whose runs have nothing in common.

    Attributes:
        is_paired: False, because no run of one side belongs to one of the other.
    """

    is_paired = False

    def is_repeated(self, first: Side, other: Side) -> bool:
        """Return True if both sides have several runs, which show the variation between runs."""
        return len(first.runs) > 1 and len(other.runs) > 1

    def estimate(self, first: Side, other: Side, metric: Metric) -> EstimateOrReason:
        """Return the difference of the estimates of both sides, or why a side has none."""
        is_repeated = self.is_repeated(first, other)
        first_estimate = estimate_side(first, metric, is_repeated=is_repeated)
        other_estimate = estimate_side(other, metric, is_repeated=is_repeated)
        if first_estimate.estimate is None or other_estimate.estimate is None:
            return EstimateOrReason(None, first_estimate.reason or other_estimate.reason)

        difference = subtract(
            first_estimate.estimate, other_estimate.estimate, is_pooled=is_repeated
        )
        return EstimateOrReason(difference)

    def confirm(
        self, difference: Difference, first: Side, other: Side, metric: Metric, level: float
    ) -> Difference:
        """Make a significant difference inconclusive if it comes from few periods of time only.

        Suppose that three runs met one slow period each, and that the three runs of the other side
        met none. The runs of each side agree well, so the difference looks certain, but the
        evidence is only three slow periods. So the runs are cut into periods of time, and slow ones
        must be significantly more frequent on one side, by Fisher's exact test. A period is slow if
        its percentile is above the geometric mean of the percentiles of both sides.

        Args:
            difference: The difference, which is better or worse.
            first: The side to compare with.
            other: The side to compare.
            metric: The metric of the difference. A mean is returned unchanged, and so is a
                percentile of a side that has runs without records.
            level: The significance level for Fisher's exact test.
        """
        if metric.quantile is None or not metric.request_metric:
            return difference
        if not difference.before or not difference.after:
            return difference

        first_runs = list_measured_records(first)
        other_runs = list_measured_records(other)
        if len(first_runs) < len(first.runs) or len(other_runs) < len(other.runs):
            return difference

        geometric_mean_ms = math.sqrt(difference.before * difference.after)
        threshold_ns = geometric_mean_ms * NS_PER_MS
        first_periods = count_slow_periods(first_runs, metric, threshold_ns)
        other_periods = count_slow_periods(other_runs, metric, threshold_ns)
        p_value_of_periods = fisher_exact(
            first_periods.slow, first_periods.total, other_periods.slow, other_periods.total
        )
        if p_value_of_periods <= level:
            return difference

        reason = (
            f"the difference comes from only a few periods of time ({first_periods.slow} "
            f"of {first_periods.total} periods are slow, against {other_periods.slow} of "
            f"{other_periods.total})"
        )
        return msgspec.structs.replace(difference, detailed_outcome="inconclusive", reason=reason)
