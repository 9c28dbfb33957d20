"""Computes confidence intervals of the metrics of one run from blocks of its time.

Pure. Requests of a run are correlated, because they share a queue and a batch, so a standard error
that took them as independent would be too small. All errors here are therefore by the method of
batch means: the run is cut into blocks of time, which are nearly independent of each other.

- A percentile gets the error of the fraction of values above it, converted to a latency (Woodruff
  1952, Confidence intervals for medians and other position measures).
- A rate gets the error of the rates in equal intervals of the steady state.
- A fraction of requests gets the error of an indicator that is 1 or 0 for each request.

The formula of batch means is in `core.stats.intervals`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import UNDEFINED, Columns, as_selection
from loadgen.core.metrics.windows import Span, make_span
from loadgen.core.slo import Slo
from loadgen.core.stats import intervals, students_t
from loadgen.core.stats.intervals import LEVEL, Interval
from loadgen.core.stats.quantiles import NEEDED_SAMPLES, QUANTILES, Distribution, quantile_index
from loadgen.figures import METRICS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.metrics.summary import Summary
    from loadgen.figures import MetricDefinition

BLOCK_COUNTS = (20, 10)
"""Numbers of blocks that a run is cut into.

Short blocks miss disturbances that last longer than a block, and few blocks estimate the variance
badly. So the error is computed with both numbers, and the larger one is used.
"""

MIN_SAMPLES = 4 * max(BLOCK_COUNTS)
"""The fewest values that are cut into blocks: four in each block."""

RATE_INTERVALS = 20
"""The number of intervals of the steady state whose rates give the error of a rate."""

MAX_SAMPLES = 100_000
"""The most values that an interval is computed from. Of a larger sample, every second, third or
k-th value is used, which saves sorting millions of values and hardly changes an interval."""

PLUS_FOUR = 2
"""The successes, and also the failures, that are added to a sample (Agresti and Coull 1998)."""

_FEWEST_DEGREES_OF_FREEDOM = min(BLOCK_COUNTS) - 1
"""The degrees of freedom of the variance of the means of the fewest blocks."""

METHOD = "blocks of time"

FRACTION_OF_PERCENTILE = dict(QUANTILES)
"""The fraction of each percentile by its field name: 0.99 for `p99`."""


class ScaledEstimate(Struct, frozen=True):
    """An estimate with its standard error, on the scale on which it is compared.

    Latencies and rates are compared as logarithms, and fractions as they are.

    Attributes:
        value: The estimate.
        error: Its standard error.
        degrees_of_freedom: The degrees of freedom of the standard error.
    """

    value: float
    error: float
    degrees_of_freedom: float

    def interval(self, to_metric: Callable[[float], float]) -> Interval:
        """Return the confidence interval of the metric, by Student's t at level LEVEL.

        Args:
            to_metric: Converts the estimate to the metric, such as `math.exp` for a logarithm.
        """
        t = students_t.t_quantile(0.5 + LEVEL / 2, self.degrees_of_freedom)
        half_width = t * self.error
        return Interval(
            value=to_metric(self.value),
            low=to_metric(self.value - half_width),
            high=to_metric(self.value + half_width),
            level=LEVEL,
            count=round(self.degrees_of_freedom) + 1,
            method=METHOD,
        )


def sort_by_due_time(
    columns: Columns, values: NDArray[Any], is_selected: NDArray[np.bool_]
) -> NDArray[Any]:
    """Return the values of the selected requests, ordered by the scheduled time of the requests."""
    indexes = as_selection(is_selected)
    order = np.argsort(columns["due_ns"][indexes], kind="stable")
    ordered: NDArray[Any] = values[indexes][order]
    return ordered


def estimate_log_percentile_error(
    values: NDArray[np.float64],
    sorted_values: NDArray[np.float64],
    fraction: float,
    block_count: int,
) -> float:
    """Return the standard error of the logarithm of a percentile, by the method of Woodruff (1952).

    The fraction of the values above the percentile has a standard error, which follows from the
    means of blocks of time. Half of the distance between the percentiles that are one such error
    below and above the percentile is the standard error of the percentile.

    For example, 1 % of the values are above the p99, with a standard error of 0.2 %. If the p98.8
    is 480 ms and the p99.2 is 520 ms, the result is log(520 / 480) / 2 = 0.04.

    Args:
        values: The values in order of time, all above 0.
        sorted_values: The same values in ascending order.
        fraction: The percentile as a fraction, such as 0.99.
        block_count: The number of blocks of time.
    """
    count = len(values)
    percentile = sorted_values[quantile_index(count, fraction)]
    is_above = (values > percentile).astype(np.float64)
    fraction_above = intervals.batch_means(is_above, batches=block_count)
    error_of_fraction = fraction_above.standard_error

    lower_fraction = max(fraction - error_of_fraction, 0.0)
    upper_fraction = min(fraction + error_of_fraction, 1.0)
    lower_percentile = sorted_values[quantile_index(count, lower_fraction)]
    upper_percentile = sorted_values[quantile_index(count, upper_fraction)]

    log_distance = float(math.log(upper_percentile) - math.log(lower_percentile))
    return log_distance / 2


def count_blocks_above(
    values: NDArray[np.float64], sorted_values: NDArray[np.float64], fraction: float
) -> int:
    """Return in how many blocks of time of a run at least one value is above a percentile.

    For example, all values above a p99 may come from a single long queue, in 3 of 20 blocks. The
    run is divided into the largest of BLOCK_COUNTS. As many of the first values are left out as
    remain if all blocks have the same number of values.

    Args:
        values: The values in order of time.
        sorted_values: The same values in ascending order.
        fraction: The percentile as a fraction, such as 0.99.
    """
    percentile_value = sorted_values[quantile_index(len(values), fraction)]
    is_above = values > percentile_value

    block_count = max(BLOCK_COUNTS)
    values_per_block = len(values) // block_count
    remaining_count = len(values) - block_count * values_per_block

    # One row of this table is one block.
    is_above_by_block = is_above[remaining_count:].reshape(block_count, values_per_block)
    has_value_above = is_above_by_block.any(axis=1)
    return int(has_value_above.sum())


def estimate_mean(values: NDArray[np.float64]) -> ScaledEstimate | None:
    """Return the mean of values in order of time, with its standard error.

    The error follows from the means of blocks of time. It is computed with each of BLOCK_COUNTS,
    and that of the widest interval counts, because blocks that are too short make it too small.
    Return None for too few values, whose interval has no bounds.
    """
    candidates = [intervals.batch_means(values, batches=count) for count in BLOCK_COUNTS]
    widest = max(candidates, key=lambda interval: interval.half_width)
    if not math.isfinite(widest.half_width):
        return None

    return ScaledEstimate(
        value=float(values.mean()),
        error=widest.standard_error,
        degrees_of_freedom=widest.count - 1,
    )


def build_indicators(
    columns: Columns, is_good: NDArray[np.bool_], slo: Slo | None = None
) -> NDArray[np.float64]:
    """Return 1 for each good request and 0 for each bad one, ordered by scheduled time.

    The mean of these indicators is the fraction of good requests. Requests that the SLO does not
    count, such as cancelled ones, are left out.

    Args:
        columns: The requests.
        is_good: Which requests are good.
        slo: The SLO, or None.
    """
    is_counted = outcomes.is_counted(columns, slo)
    return sort_by_due_time(columns, is_good, is_counted).astype(np.float64)


def estimate_fraction(
    indicators_of_runs: Sequence[NDArray[np.float64]], value: float
) -> ScaledEstimate | None:
    """Return a fraction of good requests with its standard error, or None for too few requests.

    Requests that are close in time are often good or bad together, which makes the error larger. It
    is therefore that of the means of blocks of time. But if all requests are good, all blocks are
    equal, and this error is 0. So the result has at least the error of independent requests.

    Args:
        indicators_of_runs: For each run, 1 for each good request and 0 for each bad one, in order
            of time.
        value: The fraction of good requests, which the result has as its value.
    """
    indicators = np.concatenate(indicators_of_runs)
    request_count = len(indicators)
    if request_count < MIN_SAMPLES:
        return None

    good_count = float(indicators.sum())
    error_if_independent = agresti_coull_error(good_count, request_count)
    mean_of_blocks = estimate_mean(indicators)
    if mean_of_blocks is None:
        return ScaledEstimate(value, error_if_independent, _FEWEST_DEGREES_OF_FREEDOM)

    return ScaledEstimate(
        value,
        error=max(mean_of_blocks.error, error_if_independent),
        degrees_of_freedom=mean_of_blocks.degrees_of_freedom,
    )


def agresti_coull_error(good_count: float, count: int) -> float:
    """Return the standard error of a fraction of independent requests, above 0 also for 0 or 1.

    As Agresti and Coull (1998) propose, two good and two other requests are added to the sample.
    """
    adjusted_count = count + 2 * PLUS_FOUR
    fraction = (good_count + PLUS_FOUR) / adjusted_count
    return math.sqrt(fraction * (1 - fraction) / adjusted_count)


def estimate_log_rate(
    rates_of_intervals: Sequence[float], total_rate: float
) -> ScaledEstimate | None:
    """Return the logarithm of a rate with its standard error, or None if that is not known.

    The error follows from the rates in parts of the time. The error of a logarithm is a relative
    error: if the mean of these rates is 100/s with an error of 5/s, it is about 5 / 100 = 0.05.

    Args:
        rates_of_intervals: The rates in equal intervals of time, in order of time.
        total_rate: The rate in the whole time, above 0, as the summary of the run has it. It can
            differ from the mean of the intervals in the last digits.
    """
    mean_of_intervals = estimate_mean(np.array(rates_of_intervals))
    if mean_of_intervals is None or mean_of_intervals.value <= 0:
        return None

    relative_error = mean_of_intervals.error / mean_of_intervals.value
    return ScaledEstimate(
        value=math.log(total_rate),
        error=relative_error,
        degrees_of_freedom=mean_of_intervals.degrees_of_freedom,
    )


def divide_steady_state(steady: Span) -> list[Span]:
    """Return RATE_INTERVALS equal intervals of the steady state, or an empty list without one."""
    if steady.start_s is None or steady.end_s is None:
        return []
    edges_ns = np.linspace(steady.start_s * 1e9, steady.end_s * 1e9, RATE_INTERVALS + 1)
    return [make_span(float(start_ns), float(end_ns)) for start_ns, end_ns in pairwise(edges_ns)]


def metric_intervals(
    stages: Sequence[Columns],
    summary: Summary,
    slo: Slo | None,
    tokens_in: Callable[[Span], float | None],
) -> dict[str, Interval]:
    """Return the confidence intervals of the metrics of a run, by names such as `ttft_ms.p99`.

    The intervals follow from the differences between blocks of time. The result is empty for a run
    with too few requests, or whose blocks are too short.

    Args:
        stages: The measured records, by stage.
        summary: The summary of the run.
        slo: The SLO of the run, or None.
        tokens_in: Returns the output tokens that arrived within a span, or None if not known.
    """
    has_enough_requests = summary.requests.ok >= MIN_SAMPLES
    if not has_enough_requests or _are_blocks_too_short(summary):
        return {}

    # Names such as "goodput.share" are paths in the summary.
    interval_by_path = dict(_percentile_intervals(stages, summary))

    token_rate_interval = _token_rate_interval(summary, tokens_in)
    if token_rate_interval is not None:
        interval_by_path["tokens.steady_output_per_s"] = token_rate_interval

    goodput_interval = _goodput_interval(stages, summary, slo)
    if goodput_interval is not None:
        interval_by_path["goodput.share"] = goodput_interval

    return interval_by_path


def _are_blocks_too_short(summary: Summary) -> bool:
    """Return True if a block of time would be shorter than the median response time, or unknown."""
    response_ms = summary.e2e_ms.p50
    if response_ms is None:
        return True
    steady_ms = (summary.window.steady.duration_s or 0.0) * 1e3
    return steady_ms < min(BLOCK_COUNTS) * response_ms


def _percentile_intervals(
    stages: Sequence[Columns], summary: Summary
) -> Iterator[tuple[str, Interval]]:
    """Yield the confidence interval of each percentile of the run, with its path in the summary.

    An example is the interval of the p99 of TTFT, with the path "ttft_ms.p99".
    """
    # For each stage, the indexes that put its requests in order of their scheduled times.
    time_orders = [np.argsort(columns["due_ns"], kind="stable") for columns in stages]

    for metric in METRICS.available():
        percentiles_ms = _percentiles_in_summary(metric, summary)
        if not percentiles_ms:
            continue

        # `metric.name` is the name in the records, `metric.path` that in the summary.
        values_ns = _sample_values(stages, time_orders, metric.name).astype(np.float64)
        interval_by_percentile = _intervals_of_percentiles(values_ns, percentiles_ms)
        for percentile, interval in interval_by_percentile.items():
            yield f"{metric.path}.{percentile}", interval


def _intervals_of_percentiles(
    values_ns: NDArray[np.float64], percentiles_ms: dict[str, float]
) -> dict[str, Interval]:
    """Return the interval of each percentile that has enough values, by the name of the percentile.

    Intervals are computed from logarithms, because errors of latencies are relative.

    Args:
        values_ns: The values in order of time.
        percentiles_ms: The percentiles in the summary by name, such as `p99`, in ms.
    """
    positive_values_ns = np.maximum(values_ns, 1.0)  # 0 has no logarithm
    sorted_values_ns = np.sort(positive_values_ns)

    interval_by_name = {}
    for name, percentile_ms in percentiles_ms.items():
        needed_values = max(MIN_SAMPLES, NEEDED_SAMPLES[name])
        if len(values_ns) < needed_values:
            continue

        log_estimate = _estimate_log_percentile(
            positive_values_ns, sorted_values_ns, name, percentile_ms
        )
        interval_by_name[name] = log_estimate.interval(to_metric=math.exp)

    return interval_by_name


def _estimate_log_percentile(
    values: NDArray[np.float64],
    sorted_values: NDArray[np.float64],
    name: str,
    percentile_ms: float,
) -> ScaledEstimate:
    """Return the logarithm of a percentile with its standard error, from blocks of time.

    The error is the largest one of all numbers of blocks, BLOCK_COUNTS. It follows from differences
    between blocks. Blocks without any value above the percentile do not differ. So if only 3 blocks
    have such values, as in a run with a single long queue, the error has 3 - 1 degrees of freedom.

    Args:
        values: The values in order of time, all above 0.
        sorted_values: The same values in ascending order.
        name: The name of the percentile, such as `p99`.
        percentile_ms: The percentile in the summary.
    """
    fraction = FRACTION_OF_PERCENTILE[name]
    errors = [
        estimate_log_percentile_error(values, sorted_values, fraction, block_count)
        for block_count in BLOCK_COUNTS
    ]

    blocks_above = count_blocks_above(values, sorted_values, fraction)
    effective_blocks = min(*BLOCK_COUNTS, blocks_above)
    degrees_of_freedom = max(effective_blocks - 1.0, 1.0)

    return ScaledEstimate(math.log(percentile_ms), max(errors), degrees_of_freedom)


def _percentiles_in_summary(metric: MetricDefinition, summary: Summary) -> dict[str, float]:
    """Return the percentiles of a metric in ms, such as {"p50": 120.0, "p99": 480.0}.

    Percentiles that are 0 or not known are left out. The result is empty for a metric that is not
    measured for each request, such as the gap between tokens.
    """
    is_measured_per_request = metric.values is not None
    distribution = _distribution_in_summary(metric, summary)
    if not is_measured_per_request or distribution is None:
        return {}

    names = metric.compared  # the percentiles that comparisons of runs use
    value_by_name_ms = {name: getattr(distribution, name) for name in names}
    return {
        name: value_ms
        for name, value_ms in value_by_name_ms.items()
        if value_ms is not None and value_ms > 0
    }


def _distribution_in_summary(metric: MetricDefinition, summary: Summary) -> Distribution | None:
    """Return the distribution of a metric in a summary, or None if the summary does not have it.

    The common metrics are fields of the summary, such as `summary.ttft_ms`. The others, whose
    definitions name a `block`, are in the dictionary `summary.other_metrics`.
    """
    is_in_dictionary = metric.block != ""
    if is_in_dictionary:
        return summary.other_metrics.get(metric.field)
    return getattr(summary, metric.field, None)


def _sample_values(
    stages: Sequence[Columns], time_orders: Sequence[NDArray[np.int64]], metric: str
) -> NDArray[np.int64]:
    """Return at most MAX_SAMPLES values of a metric of successful requests, in order of time.

    Args:
        stages: The measured records, by stage.
        time_orders: For each stage, the indexes that put its records in order of scheduled time.
        metric: The name of the metric.
    """
    values_of_stages = []
    for columns, time_order in zip(stages, time_orders, strict=True):
        values = columns.measure(metric)
        has_value = columns.is_ok & (values != UNDEFINED)

        # Sort by time, and then drop the requests without a value.
        has_value_by_time = has_value[time_order]
        indexes_by_time = time_order[has_value_by_time]
        values_of_stages.append(values[indexes_by_time])

    # If there are too many values, only every second or third one is returned, and so on.
    all_values = np.concatenate(values_of_stages)
    stride = max(math.ceil(len(all_values) / MAX_SAMPLES), 1)
    return all_values[::stride]


def _token_rate_interval(
    summary: Summary, tokens_in: Callable[[Span], float | None]
) -> Interval | None:
    """Return the interval of the output tokens per second in the steady state, None if not known.

    Args:
        summary: The summary of the run.
        tokens_in: Returns the output tokens that arrived within a span, or None if not known.
    """
    tokens_per_s = summary.tokens.steady_output_per_s
    steady = summary.window.steady
    if not tokens_per_s or not steady.duration_s:
        return None

    # The interval follows from the rates in equal parts of the steady state.
    part_s = steady.duration_s / RATE_INTERVALS
    rates_of_parts = []
    for part in divide_steady_state(steady):
        tokens = tokens_in(part)
        if tokens is None:
            return None
        rates_of_parts.append(tokens / part_s)

    estimate = estimate_log_rate(rates_of_parts, tokens_per_s)
    return None if estimate is None else estimate.interval(to_metric=math.exp)


def _goodput_interval(
    stages: Sequence[Columns], summary: Summary, slo: Slo | None
) -> Interval | None:
    """Return the interval of the fraction of requests that meet the SLO, or None if not known.

    The goodput is not known without an SLO, and its interval is not known for too few requests.
    """
    good_fraction = summary.goodput.share
    if slo is None or good_fraction is None:
        return None

    # For each stage, 1 for each request that meets the SLO and 0 for each other one.
    indicators_of_stages = [
        build_indicators(columns, outcomes.meets_slo(columns, slo), slo) for columns in stages
    ]
    estimate = estimate_fraction(indicators_of_stages, good_fraction)
    if estimate is None:
        return None

    # The ends of the interval may be outside of 0 to 1, where no fraction is.
    return estimate.interval(to_metric=_clamp_fraction)


def _clamp_fraction(value: float) -> float:
    """Return the nearest number from 0 to 1."""
    return min(max(value, 0.0), 1.0)
