"""Estimates a metric of one side of a comparison, with its standard error. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from loadgen.compare.answer_difference import compute_answer_score
from loadgen.compare.block_errors import (
    EstimateOrReason,
    describe_missing_samples,
    estimate_error_within_runs,
    estimate_latency,
    estimate_token_rate,
)
from loadgen.compare.fluidity_estimate import estimate_fluidity_index
from loadgen.core.analysis.within_run_variance import (
    ScaledEstimate,
    agresti_coull_error,
    build_indicators,
    estimate_fraction,
)
from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import OK, Columns
from loadgen.repeated.comparable_metrics import ANSWER_SCORE, SHARE_PATHS, Metric, metric_value
from loadgen.runs.comparison_side import Side

FLUIDITY_INDEX = "fluidity.index"
"""The path of the fraction of token deadlines that were met."""

NO_KNOWN_INTERVAL = "no confidence interval for this metric"
ZERO_VALUE = "the value is 0"
"""Reasons why a metric has no estimate. Estimates are logarithms, and 0 has none."""


def compute_side_value(side: Side, metric: Metric) -> float | None:
    """Return the value of a metric of a side, which is the mean over repeats.

    The answer score is that of the answers of all repeats together.

    Return None if the side has no value, or if one of its runs has none.
    """
    if side.reported_metrics:
        return side.reported_metrics.get(metric.path)
    if metric.path == ANSWER_SCORE:
        return compute_answer_score(side)
    values = [metric_value(run.summary, metric.path) for run in side.runs]
    known_values = [value for value in values if value is not None]
    if not known_values or len(known_values) < len(values):
        return None
    return float(np.mean(known_values))


def estimate_side(side: Side, metric: Metric, *, is_repeated: bool) -> EstimateOrReason:
    """Return a metric of a side with its standard error, or why it cannot be estimated.

    A metric cannot be estimated without records of single requests, if a run does not report it, or
    if it is zero although its logarithm is needed.

    Args:
        side: The side.
        metric: The metric.
        is_repeated: True to estimate the error between repeats, False to estimate it within one
            run.
    """
    if side.reported_metrics or not side.runs:
        return EstimateOrReason(None, f"{side.name} has no records")

    omission_reasons = describe_omission(side, metric)
    if omission_reasons:
        return EstimateOrReason(None, f"not reported by {side.name}: {omission_reasons}")

    value = compute_side_value(side, metric)
    if value is None:
        return EstimateOrReason(None, f"{side.name} has no value")
    if metric.path not in SHARE_PATHS and value <= 0:
        return EstimateOrReason(None, ZERO_VALUE)
    if is_repeated:
        return _estimate_between_repeats(side, metric, value)

    return _estimate_within_run(side, metric, value)


def list_measured_records(side: Side) -> list[Columns]:
    """Return the measured records of the runs of a side that have records."""
    records = [run.measured() for run in side.runs]
    return [columns for columns in records if columns is not None]


def describe_omission(side: Side, metric: Metric) -> str:
    """Return why runs of a side omit a metric as unreliable, or "" if all of them report it.

    A summary stores the reason by the names of the distribution and of the statistic: for the path
    "classes.chat.ttft_ms.p99", these are "ttft" and "p99".
    """
    distribution_path, _dot, statistic = metric.path.rpartition(".")
    distribution_field = distribution_path.rpartition(".")[2]  # such as "ttft_ms"
    distribution = distribution_field.removesuffix("_ms")

    reasons = []
    for run in side.runs:
        if metric_value(run.summary, metric.path) is None:
            reason = run.summary.withheld_reason(distribution, statistic)
            fluidity = run.summary.fluidity
            if metric.path == FLUIDITY_INDEX and fluidity is not None:
                reason = fluidity.absent
            if reason and reason not in reasons:
                reasons.append(reason)

    return "; ".join(reasons)


def _estimate_between_repeats(side: Side, metric: Metric, mean: float) -> EstimateOrReason:
    """Return the mean of a metric over repeats, with the standard error of that mean.

    A few repeats may agree by chance. So the error of a latency is at least what blocks of time
    within the runs show, and that of a fraction at least what its number of requests allows.
    """
    values = [metric_value(run.summary, metric.path) or 0.0 for run in side.runs]
    is_fraction = metric.path in SHARE_PATHS
    if not is_fraction and min(values) <= 0:
        return EstimateOrReason(None, ZERO_VALUE)

    scaled_values = np.array(values) if is_fraction else np.log(values)
    error = float(scaled_values.std(ddof=1)) / math.sqrt(len(values))
    if is_fraction:
        # Three runs without a failure do not show that failures never happen.
        request_count = sum(run.summary.requests.scheduled for run in side.runs)
        error = max(error, agresti_coull_error(mean * request_count, request_count))

    estimate = ScaledEstimate(
        value=float(scaled_values.mean()), error=error, degrees_of_freedom=len(values) - 1
    )

    records = list_measured_records(side)
    has_all_records = len(records) == len(side.runs)
    if not metric.request_metric or not has_all_records:
        return EstimateOrReason(estimate)

    reason = describe_missing_samples(records, metric)
    if reason:
        return EstimateOrReason(None, reason)

    within_runs = estimate_error_within_runs(records, metric)
    if within_runs.error > estimate.error:
        estimate = ScaledEstimate(estimate.value, within_runs.error, within_runs.degrees_of_freedom)

    return EstimateOrReason(estimate)


def _estimate_within_run(side: Side, metric: Metric, value: float) -> EstimateOrReason:
    """Return a metric with the error by blocks of time, for a side that has no repeats.

    It needs the records of the requests. Metrics other than latencies, shares of requests, the
    fluidity index and the rate of output tokens have no known interval.
    """
    records = list_measured_records(side)
    if len(records) < len(side.runs):
        return EstimateOrReason(None, f"{side.name} has no records")
    if metric.request_metric:
        return estimate_latency(records, metric, value)

    estimator = _ESTIMATORS_BY_PATH.get(metric.path)
    if estimator is None:
        return EstimateOrReason(None, NO_KNOWN_INTERVAL)
    return estimator(side, records, value)


def _estimate_ok_share(_side: Side, records: Sequence[Columns], value: float) -> EstimateOrReason:
    """Return the share of requests that were ok, with its error by blocks of time."""
    ok_indicators = [build_indicators(columns, columns.has_status(OK)) for columns in records]
    return EstimateOrReason(estimate_fraction(ok_indicators, value))


def _estimate_goodput(side: Side, records: Sequence[Columns], value: float) -> EstimateOrReason:
    """Return the share of requests that met the SLO, with its error by blocks of time."""
    slo = next((run.manifest.slo for run in side.runs if run.manifest is not None), None)
    if slo is None:
        return EstimateOrReason(None, "the request classes have different SLOs")
    good_indicators = [
        build_indicators(columns, outcomes.meets_slo(columns, slo), slo) for columns in records
    ]
    return EstimateOrReason(estimate_fraction(good_indicators, value))


def _estimate_output_rate(side: Side, records: Sequence[Columns], value: float) -> EstimateOrReason:
    """Return the rate of output tokens in the steady state, with its error by intervals of time."""
    windows = [run.summary.window.steady for run in side.runs]
    return estimate_token_rate(windows, records, value)


_ESTIMATORS_BY_PATH: dict[str, Callable[[Side, Sequence[Columns], float], EstimateOrReason]] = {
    "ok_share": _estimate_ok_share,
    "goodput.share": _estimate_goodput,
    FLUIDITY_INDEX: estimate_fluidity_index,
    "tokens.steady_output_per_s": _estimate_output_rate,
}
"""The metrics other than latencies that have an error within one run, by their path.

Each function gets the side, the measured records of its runs, and the value in the summary.
"""
