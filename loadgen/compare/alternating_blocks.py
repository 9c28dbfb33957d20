"""Estimates differences between two sides that were measured in turn, in alternating blocks. Pure.

A block is a short run of the load against one side. Four blocks are a group, in the order ABBA or
BAAB, and the unit of the analysis is the group: its difference is the mean of its two B blocks
minus the mean of its two A blocks. Suppose that the host becomes slower by the same amount from
block to block. The blocks of A have the places 1 and 4, and those of B the places 2 and 3, so the
drift adds the same to both means, and the difference of the group does not contain it. Only what
changes within a group in another way is left, and the interval is that of Student's t over groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.compare.block_errors import EstimateOrReason, describe_missing_samples
from loadgen.compare.difference import Difference
from loadgen.compare.estimates import ZERO_VALUE, describe_omission, list_measured_records
from loadgen.core import format, seeds
from loadgen.core.analysis.within_run_variance import ScaledEstimate, agresti_coull_error
from loadgen.core.stats import students_t
from loadgen.repeated.comparable_metrics import SHARE_PATHS, Metric, metric_value
from loadgen.runs.comparison_side import Side

SideName = Literal["A", "B"]

FIRST_SIDE: SideName = "A"
OTHER_SIDE: SideName = "B"

GROUP_ORDERS: tuple[tuple[SideName, ...], ...] = (("A", "B", "B", "A"), ("B", "A", "A", "B"))
"""The two orders of the blocks of a group. Groups have them in turn."""

BLOCKS_PER_GROUP = 4
BLOCKS_PER_PAIR = 2

MIN_GROUPS = 3
"""Groups that an interval needs: two agree by chance too often. It is the least number of repeats
of which `loadgen run --repeat auto` computes a precision, too."""

TRIMMED_SHARE = 0.2
"""The share of the groups that is left out at each end of their differences. It is the usual share
(Wilcox 2012, Introduction to Robust Estimation and Hypothesis Testing), and left fewer differences
undetected in benchmarks/live_power.py than the mean of all groups."""

MIN_TRIMMED_GROUPS = 20
"""Of fewer groups none is left out, because the interval would lose too many degrees of freedom."""

FIRST_STAGE_GROUPS = 10
"""Groups from whose variation the number of groups follows that a stated precision needs."""


class LiveBlock(NamedTuple):
    """A short run of the load against one side.

    Attributes:
        number: Its number, from 1, in the order of time.
        side: The side to which it is sent.
        pair: The number of its pair, from 0. The two blocks of a pair follow each other, one on
            each side, and have the same seed: the same arrivals, lengths and prompts.
    """

    number: int
    side: SideName
    pair: int

    @property
    def name(self) -> str:
        """The name of its directory, for example "block-001-a"."""
        return f"block-{self.number:03d}-{self.side.lower()}"


class BlockGroup(NamedTuple):
    """Four blocks in the order ABBA or BAAB, by which drift that is linear in time cancels."""

    blocks: tuple[LiveBlock, ...]

    @property
    def order(self) -> str:
        """The sides in the order of the blocks: "ABBA" or "BAAB"."""
        return "".join(block.side for block in self.blocks)

    def names_of(self, side: SideName) -> list[str]:
        """Return the names of the two blocks of a side."""
        return [block.name for block in self.blocks if block.side == side]


def list_groups(seed: int, count: int) -> tuple[BlockGroup, ...]:
    """Return groups of four blocks in which the orders ABBA and BAAB alternate.

    The seed decides which of the two orders is the first.
    """
    first_order = seeds.derive_seed(seed, "live order")
    groups = []
    for group_index in range(count):
        order_index = (first_order + group_index) % len(GROUP_ORDERS)
        groups.append(_create_group(group_index, GROUP_ORDERS[order_index]))
    return tuple(groups)


def _create_group(group_index: int, sides: Sequence[SideName]) -> BlockGroup:
    """Return a group with a block for each of the sides, such as ("A", "B", "B", "A").

    Blocks are numbered over all groups: the blocks of the second group have the numbers 5 to 8.
    """
    first_block_index = group_index * BLOCKS_PER_GROUP
    blocks = []
    for block_index, side in enumerate(sides, start=first_block_index):
        pair = block_index // BLOCKS_PER_PAIR
        blocks.append(LiveBlock(number=block_index + 1, side=side, pair=pair))
    return BlockGroup(tuple(blocks))


def seed_of_pair(seed: int, pair: int) -> int:
    """Return the random seed of both blocks of a pair. Other pairs have other seeds.

    Both blocks send the same requests, one block to A and the other one to B.
    """
    return seeds.run_seed(seed, "live pair", pair)


class AlternatingBlocks:
    """Estimates the difference between two sides by the groups of their blocks.

    Attributes:
        is_paired: True, because a difference is one within groups.
    """

    is_paired = True

    def __init__(self, groups: Sequence[BlockGroup], *, is_two_stage: bool = False) -> None:
        """Create an estimator.

        Args:
            groups: The groups of four blocks, in the order of time.
            is_two_stage: True if the number of groups was chosen after the first FIRST_STAGE_GROUPS
                groups, from their variation. The interval then uses only their variation.
        """
        self._groups = groups
        self._is_two_stage = is_two_stage

    def is_repeated(self, _first: Side, _other: Side) -> bool:
        """Return True: the groups show how far a difference varies from time to time."""
        return True

    def estimate(self, first: Side, other: Side, metric: Metric) -> EstimateOrReason:
        """Return the mean difference of the groups with its standard error, or why it has none.

        Args:
            first: The side A, whose runs are the blocks sent to A.
            other: The side B.
            metric: The metric whose difference is estimated.
        """
        reason = self._find_reason_without_estimate(first, other, metric)
        if reason:
            return EstimateOrReason(estimate=None, reason=reason)

        differences = self.compute_group_differences(first, other, metric)
        if differences is None:
            return EstimateOrReason(estimate=None, reason=ZERO_VALUE)

        estimate = estimate_difference(differences, is_two_stage=self._is_two_stage)
        least_error = _least_error_of_difference(first, other, metric)
        return EstimateOrReason(replace(estimate, error=max(estimate.error, least_error)))

    def confirm(
        self, difference: Difference, _first: Side, _other: Side, _metric: Metric, _level: float
    ) -> Difference:
        """Return the difference unchanged. Both sides met the same periods of time."""
        return difference

    def _find_reason_without_estimate(self, first: Side, other: Side, metric: Metric) -> str:
        """Return why the difference of a metric cannot be estimated, or "" if it can."""
        if len(self._groups) < MIN_GROUPS:
            groups = format.counted(len(self._groups), "complete group")
            return f"{groups} of blocks, {MIN_GROUPS} needed"

        return _find_reason_of_side(first, metric) or _find_reason_of_side(other, metric)

    def compute_group_differences(
        self, first: Side, other: Side, metric: Metric
    ) -> NDArray[np.float64] | None:
        """Return the difference of each group: mean of its B blocks minus mean of its A blocks.

        The values are logarithms: if B takes 110 ms and A takes 100 ms, the difference is log(1.1).
        Fractions, such as error rates, are subtracted without a logarithm. Return None if a block
        has no value, or a value without a logarithm.
        """
        value_by_block = _compute_values_by_block((first, other), metric)
        if value_by_block is None:
            return None

        differences = []
        for group in self._groups:
            first_values = [value_by_block[name] for name in group.names_of(FIRST_SIDE)]
            other_values = [value_by_block[name] for name in group.names_of(OTHER_SIDE)]
            first_mean = float(np.mean(first_values))
            other_mean = float(np.mean(other_values))
            differences.append(other_mean - first_mean)

        return np.array(differences)


def _find_reason_of_side(side: Side, metric: Metric) -> str:
    """Return why the blocks of one side are not enough to estimate a metric, or "" if they are.

    The reason is, for example, "A has blocks without a value".
    """
    omission_reason = describe_omission(side, metric)
    if omission_reason:
        return f"not reported by {side.name}: {omission_reason}"

    values = [metric_value(run.summary, metric.path) for run in side.runs]
    if None in values:
        return f"{side.name} has blocks without a value"

    is_computed_from_requests = bool(metric.request_metric)
    if not is_computed_from_requests:
        return ""
    return describe_missing_samples(list_measured_records(side), metric)


def estimate_difference(
    group_differences: NDArray[np.float64], *, is_two_stage: bool = False
) -> ScaledEstimate:
    """Return the mean difference between two sides, with its standard error.

    The mean leaves out the groups with the smallest and the largest differences, so that a group in
    which the host suddenly changed has little effect. With few groups, all of them count.

    Args:
        group_differences: The difference of each group, at least two.
        is_two_stage: True if the number of groups was chosen from the variation of the first
            groups. All groups count then, too.
    """
    if is_two_stage:
        return _estimate_two_stage_mean(group_differences)

    group_count = len(group_differences)
    trimmed_count = 0
    if group_count >= MIN_TRIMMED_GROUPS:
        trimmed_count = int(TRIMMED_SHARE * group_count)
    return estimate_trimmed_mean(group_differences, trimmed_count)


def _estimate_two_stage_mean(group_differences: NDArray[np.float64]) -> ScaledEstimate:
    """Return the mean of all groups, with a standard error from the first groups alone.

    This is the two-stage procedure of Stein (1945, A two-sample test for a linear hypothesis whose
    power is independent of the variance). The number of groups was chosen from the variance of the
    first groups, so the variance of all groups would be too small on average.
    """
    first_stage = group_differences[:FIRST_STAGE_GROUPS]
    standard_deviation = float(first_stage.std(ddof=1))
    group_count = len(group_differences)
    return ScaledEstimate(
        value=float(group_differences.mean()),
        error=standard_deviation / math.sqrt(group_count),
        degrees_of_freedom=len(first_stage) - 1,
    )


def estimate_trimmed_mean(values: NDArray[np.float64], trimmed_count: int) -> ScaledEstimate:
    """Return the mean of values without the smallest and the largest ones, with its standard error.

    The error is that of Tukey and McLaughlin (1963, Less vulnerable confidence and significance
    procedures for location based on a single sample). For the error, each trimmed value is replaced
    with the nearest remaining value, which is called winsorizing.

    Args:
        values: The values, at least two more than are trimmed.
        trimmed_count: How many values are left out at each end. With 0, the result is the usual
            mean with its usual error.
    """
    sorted_values = np.sort(values)
    remaining = sorted_values[trimmed_count : len(values) - trimmed_count]
    remaining_count = len(remaining)

    winsorized = np.clip(sorted_values, remaining[0], remaining[-1])
    deviations = winsorized - winsorized.mean()
    sum_of_squares = float((deviations**2).sum())
    variance_of_mean = sum_of_squares / (remaining_count * (remaining_count - 1))
    return ScaledEstimate(
        value=float(remaining.mean()),
        error=math.sqrt(variance_of_mean),
        degrees_of_freedom=remaining_count - 1,
    )


def count_needed_groups(
    first_stage: Sequence[ScaledEstimate], half_width: float, risk: float
) -> int:
    """Return how many groups make the confidence interval of every metric narrow enough.

    Args:
        first_stage: The estimate of each metric after FIRST_STAGE_GROUPS groups.
        half_width: The largest half width of each interval, on the scale of the estimates.
        risk: The probability that any of the intervals does not contain the true value. Each
            metric gets an equal part of it.
    """
    needed_counts = [FIRST_STAGE_GROUPS]
    for estimate in first_stage:
        risk_of_metric = risk / len(first_stage)
        needed_counts.append(_count_groups_for_metric(estimate, half_width, risk_of_metric))
    return max(needed_counts)


def _count_groups_for_metric(first_stage: ScaledEstimate, half_width: float, risk: float) -> int:
    """Return how many groups make the confidence interval of one metric narrow enough.

    The half width of an interval of n groups is t * sqrt(V / n), where V is the variance between
    groups and t is a quantile of Student's t. Solved for n, it is the formula of Stein (1945).

    Args:
        first_stage: The estimate after FIRST_STAGE_GROUPS groups.
        half_width: The largest half width of the interval.
        risk: The probability that the interval does not contain the true value.
    """
    # The squared error of the mean of n groups is V / n.
    variance_between_groups = first_stage.error**2 * FIRST_STAGE_GROUPS

    t_quantile = students_t.t_quantile(1 - risk / 2, first_stage.degrees_of_freedom)
    return math.ceil(variance_between_groups * (t_quantile / half_width) ** 2)


def _compute_values_by_block(sides: Iterable[Side], metric: Metric) -> dict[str, float] | None:
    """Return the value of a metric in each block, on the scale on which values are subtracted.

    Fractions, such as an error rate, are returned unchanged. All other metrics are returned as
    logarithms, whose differences are relative changes. Return None if a block has no value, or a
    value without a logarithm.
    """
    value_by_block = _read_values_by_block(sides, metric)
    if value_by_block is None or _is_fraction(metric):
        return value_by_block

    have_logarithms = all(value > 0 for value in value_by_block.values())
    if not have_logarithms:
        return None
    return {name: math.log(value) for name, value in value_by_block.items()}


def _read_values_by_block(sides: Iterable[Side], metric: Metric) -> dict[str, float] | None:
    """Return the value of a metric in each block, by its name, or None if a block has no value."""
    runs = [run for side in sides for run in side.runs]
    value_by_block: dict[str, float] = {}
    for run in runs:
        value = metric_value(run.summary, metric.path)
        if value is None:
            return None
        value_by_block[run.name] = value
    return value_by_block


def _is_fraction(metric: Metric) -> bool:
    """Return True if a metric is a fraction from 0 to 1, such as an error rate."""
    return metric.path in SHARE_PATHS


def _least_error_of_difference(first: Side, other: Side, metric: Metric) -> float:
    """Return the smallest standard error that the difference of a metric between sides can have.

    If no block has a failure, the error rates of all blocks are equal. The error of their
    difference is not 0 for that reason, because only so many requests were sent. The errors of both
    sides are independent, so their squares add up. The result is 0 for a metric that is no
    fraction.
    """
    if not _is_fraction(metric):
        return 0.0

    first_error = _fraction_error(first, metric)
    other_error = _fraction_error(other, metric)
    return math.hypot(first_error, other_error)


def _fraction_error(side: Side, metric: Metric) -> float:
    """Return the smallest standard error that a fraction can have with so many requests.

    For example, 0 failures of 100 requests do not show that the error rate is exactly 0.
    """
    fractions = [metric_value(run.summary, metric.path) or 0.0 for run in side.runs]
    mean_fraction = float(np.mean(fractions))

    request_count = sum(run.summary.requests.scheduled for run in side.runs)
    failure_count = mean_fraction * request_count
    return agresti_coull_error(failure_count, request_count)
