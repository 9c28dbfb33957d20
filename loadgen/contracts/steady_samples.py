"""Select the steady-state values of the runs of a level.

`steady_state.py` finds the end of the start-up and how long queueing keeps requests correlated.
`load_checks.py` checks whether a load is long enough. This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.contracts import load_checks, steady_state
from loadgen.contracts.load_checks import EstimateError, LoadCheck, LoadLength, QueueSeries
from loadgen.contracts.quantile_interval import RunSeries
from loadgen.contracts.recorded_run import (
    QUEUEING_METRICS,
    RecordedRun,
    has_negligible_queueing,
    has_queueing_time,
    measure_load_length,
)
from loadgen.contracts.steady_state import SteadyRange, TimedValues
from loadgen.contracts.terms import NS_PER_S
from loadgen.core import format
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import CANCELLED, OK, UNFINISHED, Columns
from loadgen.core.slo import Slo, Term, why_missing
from loadgen.core.stats import intervals
from loadgen.core.stats.quantiles import needed_samples

QUEUE_METRIC = "ttft"
"""The metric that shows the state of the queue: TTFT includes all the time in it."""

SAMPLES_PER_BATCH = 2.0
"""Independent states of the queue per batch that a metric needs if it is mostly queueing time.

Queueing time is near zero or long, so one state per batch does not show how batches vary. With
fewer, benchmarks/contract_power.py finds PASS verdicts near saturation on servers that miss the
limit.
"""

E2E_SAMPLES_PER_BATCH = 1.25
"""The same for E2E latency, of which the generation of tokens is the larger and steadier part."""

REQUIRED_QUEUE_SAMPLES = {
    **dict.fromkeys(QUEUEING_METRICS, round(SAMPLES_PER_BATCH * intervals.BATCHES)),
    "e2e": round(E2E_SAMPLES_PER_BATCH * intervals.BATCHES),
}
"""Metric -> the independent states of the queue from which batch means are independent."""

WORST_INTERVAL_SAMPLE_FRACTION = 0.75
"""The fraction of the required states of the queue from which the worst one is an upper bound.

With fewer, a load may easily have missed a worse state.
"""


class QuantileQuery(NamedTuple):
    """A quantile of a metric that is to be estimated for a term of a contract.

    Attributes:
        metric: The metric of requests.
        p: The quantile, such as 0.99. For goodput it is the fraction of good requests.
        confidence: The confidence of its interval.
        horizon_s: The recurrence horizon of the contract: see `load_checks.check_horizon`.
        label: The metric as messages name it, such as "ttft p99".
    """

    metric: str
    p: float
    confidence: float
    horizon_s: float
    label: str


class SteadySample(NamedTuple):
    """The steady-state values of each run.

    Attributes:
        values: The values of each run, in order of time.
        request_count: The number of values before the start-up was removed.
        load_check: Whether the load is long enough for an upper bound from the sample.
        upper_bound: The least upper end of an interval if the load is too short: the quantile in
            the worst state of the queue that occurred, or infinity.
        load_description: The part of the load that was used, as text. "" for all of it.
        load_s: The length of the load of all runs.
        effective_size: The effective sample size, counted in independent states of the server.
            None if it is not known.
    """

    values: list[NDArray[np.float64]]
    request_count: int
    load_check: LoadCheck = LoadCheck()
    upper_bound: float = math.inf
    load_description: str = ""
    load_s: float = 0.0
    effective_size: float | None = None


# -- values of a metric ---------------------------------------------------------------------------


def collect_timed_values(
    columns: Columns,
    metric: str,
    mask: NDArray[np.bool_] | None = None,
    limit_ns: int | None = None,
) -> TimedValues:
    """Return the values of a metric in ns, one per request, in order of scheduled time.

    A request that failed or was dropped has an infinite value, so that it exceeds every limit. Left
    out are requests for which the metric is not defined (a response of one token has no TPOT), and
    requests that do not count: see `find_counted_requests`.

    Args:
        columns: The records of a run.
        metric: The name of the metric.
        mask: Selects the requests. None for all.
        limit_ns: The limit of the term. Unfinished requests that already exceed it count. None if
            the term has no such limit.

    Raises:
        EstimateError: The package of the metric is not installed, or too many requests are
            unfinished.
    """
    missing_package = why_missing(metric)
    if missing_package:
        raise EstimateError(missing_package)
    slo = None
    if limit_ns is not None:
        slo = Slo(terms=(Term(metric=metric, limit_ns=limit_ns),))
    values = columns.measure(metric)
    is_ok = columns.where(OK)
    is_defined = values != metrics.UNDEFINED
    is_selected = find_counted_requests(columns, slo) & (is_defined | ~is_ok)
    if mask is not None:
        is_selected &= mask
    values_or_inf = np.where(is_ok, values, np.inf)
    return order_by_due_time(columns, is_selected, values_or_inf)


def collect_values(
    columns: Columns, metric: str, mask: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Return the values of `collect_timed_values` without the scheduled times."""
    return collect_timed_values(columns, metric, mask).values


def order_by_due_time(
    columns: Columns, mask: NDArray[np.bool_], values: NDArray[np.float64]
) -> TimedValues:
    """Return the values of the selected requests in order of their scheduled times."""
    due_ns: NDArray[np.int64] = columns["due_ns"][mask]
    order = np.argsort(due_ns, kind="stable")
    return TimedValues(due_ns[order], values[mask][order])


def find_counted_requests(columns: Columns, slo: Slo | None = None) -> NDArray[np.bool_]:
    """Return a mask of the requests that count in a metric.

    Cancelled requests do not count. An unfinished request, which was still in flight when the drain
    ended, counts only if it already exceeds the SLO.

    Raises:
        EstimateError: Too many requests are unfinished to compute a metric.
    """
    unfinished = int(columns.where(UNFINISHED).sum())
    total = int((~columns.where(CANCELLED)).sum())
    if outcomes.is_undecided(unfinished, total):
        raise EstimateError(
            f"{unfinished:,} of {total:,} requests were unfinished when the drain ended; set a "
            "longer grace for the level (grace: 10m), or none to drain for as long as timeout"
        )
    return outcomes.is_counted(columns, slo)


def count_values(values: RunSeries) -> int:
    """Return the number of values of all runs."""
    return sum(map(len, values))


def require_enough_values(values: RunSeries, p: float, metric: str, load_s: float) -> None:
    """Raise EstimateError if a load gave fewer values than a quantile needs.

    The required number is that of MLPerf LoadGen's early stopping rule. The error says how much
    additional load would give that many values.

    Args:
        values: The values of each run.
        p: The quantile.
        metric: The name of the metric in messages.
        load_s: The length of the load that gave the values.
    """
    count = count_values(values)
    required = needed_samples(p)
    if count == 0:
        raise EstimateError(f"no request has {metric}")
    if count < required:
        reason = f"only {format.counted(count, 'request')}, {required:,} needed for p{p * 100:g}"
        sufficient_load_s = load_checks.scale_load_s(load_s, required, count)
        raise EstimateError(reason, additional_load_s=sufficient_load_s - load_s)


def compute_load_length_s(timed_samples: Sequence[TimedValues]) -> float:
    """Return the time from the first to the last scheduled request, summed over the runs."""
    return sum(_compute_run_length_s(samples) for samples in timed_samples)


def _compute_run_length_s(samples: TimedValues) -> float:
    """Return the time from the first to the last scheduled request of a run."""
    if len(samples.due_ns) == 0:
        return 0.0
    return float(samples.due_ns[-1] - samples.due_ns[0]) / NS_PER_S


def sum_server_sample_sizes(
    runs: Sequence[RecordedRun], timed_samples: Sequence[TimedValues]
) -> float | None:
    """Return how many independent observations of the server's speed the runs have together.

    This is the effective sample size that reports show. The runs are independent of each other, so
    their sizes are added. Return None if a run has no ok request, because its residence time, the
    unit of time of the estimate, is then not known.

    Args:
        runs: The runs of a level.
        timed_samples: The values of each run.
    """
    if not all(run.mean_residence_ns for run in runs):
        return None
    return sum(
        steady_state.estimate_server_sample_size(samples, run.mean_residence_ns)
        for samples, run in zip(timed_samples, runs, strict=True)
    )


# -- the steady state -----------------------------------------------------------------------------


def select_steady_sample(
    runs: Sequence[RecordedRun], timed_samples: Sequence[TimedValues], query: QuantileQuery
) -> SteadySample:
    """Return the steady-state values of the runs, and whether the load was long enough.

    The start-up of a run, during which the server fills, and its end, during which the server
    empties, are removed. The load is too short if the start-up did not end in the first half of a
    run, or if `_add_load_checks` says so.

    Args:
        runs: The runs of a level.
        timed_samples: The values of each run.
        query: The quantile that is estimated from the sample.
    """
    steady_ranges = [
        steady_state.find_steady_range(samples, run.mean_residence_ns)
        for run, samples in zip(runs, timed_samples, strict=True)
    ]
    steady_values = [
        samples.slice(steady_range.start, steady_range.end)
        for samples, steady_range in zip(timed_samples, steady_ranges, strict=True)
    ]
    sample = SteadySample(
        values=[samples.values for samples in steady_values],
        request_count=sum(len(samples.values) for samples in timed_samples),
        load_s=compute_load_length_s(timed_samples),
        effective_size=sum_server_sample_sizes(runs, steady_values),
    )
    if not all(steady_range.has_steady_state for steady_range in steady_ranges):
        longest_run_s = max(map(_compute_run_length_s, timed_samples), default=0.0)
        startup_check = load_checks.create_failed_startup_check(longest_run_s)
        return sample._replace(load_check=startup_check)
    sample = sample._replace(load_description=_format_steady_start(timed_samples, steady_ranges))
    return _add_load_checks(sample, runs, steady_values, query)


def _add_load_checks(
    sample: SteadySample,
    runs: Sequence[RecordedRun],
    steady_values: Sequence[TimedValues],
    query: QuantileQuery,
) -> SteadySample:
    """Return the sample with the result of all checks whether its load is long enough.

    Two groups of checks are made: whether the load is long enough for rare slowdowns and for slow
    changes of the server, and whether the queue changed often enough during it. If only the queue
    did not, the quantile in its worst state can still bound the metric from above.

    Args:
        sample: The sample without the checks.
        runs: The runs of a level.
        steady_values: The steady-state values of each run.
        query: The quantile that is estimated from the sample.
    """
    server_checks = [
        load_checks.check_horizon(sample.load_s, query.confidence, query.horizon_s, query.label),
        load_checks.check_server_samples(sample.effective_size, sample.load_s),
    ]
    queue_checks = _check_queue(runs, steady_values, sample.load_s, query)
    is_too_short_for_server = any(load_check.is_short for load_check in server_checks)
    if queue_checks.has_worst_interval_bound and not is_too_short_for_server:
        worst_quantile = _compute_worst_interval_quantile(runs, steady_values, query.p)
        sample = sample._replace(upper_bound=worst_quantile)
    load_check = load_checks.combine_load_checks(queue_checks.load_checks, server_checks)
    return sample._replace(load_check=load_check)


def _format_steady_start(
    timed_samples: Sequence[TimedValues], steady_ranges: Sequence[SteadyRange]
) -> str:
    """Return when the steady state begins, such as "steady state from 1 min 29 s".

    If there are several runs, it is the latest beginning. Return "" if no run had a start-up.
    """
    startups_ns = [
        float(samples.due_ns[steady_range.start] - samples.due_ns[0])
        for samples, steady_range in zip(timed_samples, steady_ranges, strict=True)
        if steady_range.start > 0
    ]
    if not startups_ns:
        return ""
    return f"steady state from {format.duration(max(startups_ns) / NS_PER_S)}"


class QueueChecks(NamedTuple):
    """The checks whether the queue of a server changed often enough during a load.

    Attributes:
        load_checks: The check for a tail quantile and the check for batch means. Empty if the
            metric does not include queueing time.
        has_worst_interval_bound: Whether the quantile in the worst state of the queue bounds the
            metric from above. This is so if only the check for batch means failed, and not by much.
    """

    load_checks: list[LoadCheck]
    has_worst_interval_bound: bool


def _check_queue(
    runs: Sequence[RecordedRun],
    steady_values: Sequence[TimedValues],
    load_s: float,
    query: QuantileQuery,
) -> QueueChecks:
    """Check whether the queue of the server changed often enough during the steady state.

    There are two requirements. A tail quantile needs enough independent states of the queue,
    because the worst of them decide it. A confidence interval needs independent batches of time,
    which they are not while the same queue lasts. A metric without queueing time, and a closed
    loop, whose queue is limited by its concurrency, have neither requirement.

    Args:
        runs: The runs of a level.
        steady_values: The steady-state values of each run.
        load_s: The length of the load of all runs.
        query: The quantile that is estimated.
    """
    load = measure_load_length(runs) if has_queueing_time(runs, query.metric) else None
    if load is None:
        return QueueChecks([], has_worst_interval_bound=False)
    queue_series = [
        QueueSeries(samples, run.mean_residence_ns)
        for samples, run in zip(steady_values, runs, strict=True)
    ]
    # A metric of another package has no requirement of its own and gets that of TTFT.
    required_samples = REQUIRED_QUEUE_SAMPLES.get(
        query.metric, REQUIRED_QUEUE_SAMPLES[QUEUE_METRIC]
    )
    tail_check = _check_queue_tail(runs, load, query)
    batch_check = load_checks.check_queue_samples(queue_series, required_samples, load_s)
    has_worst_interval_bound = (
        batch_check.is_short
        and not tail_check.is_short
        and _has_enough_for_worst_interval(runs, queue_series, required_samples, query)
    )
    return QueueChecks([tail_check, batch_check], has_worst_interval_bound)


def _has_enough_for_worst_interval(
    runs: Sequence[RecordedRun],
    queue_series: Sequence[QueueSeries],
    required_samples: int,
    query: QuantileQuery,
) -> bool:
    """Return whether a load is long enough to take its worst state of the queue as an upper bound.

    That is a weaker requirement than that of batch means, so it can be met by a load that is too
    short for a confidence interval. Without queueing, intervals of time differ only by chance, and
    the states that the tail of the quantile needs are enough.

    Args:
        runs: The runs of a level.
        queue_series: The values of each run with its residence time.
        required_samples: The independent states of the queue that batch means need.
        query: The quantile that is estimated.
    """
    minimum_samples = float(intervals.observations_to_see(query.p, query.confidence))
    if not has_negligible_queueing(runs):
        samples_with_queueing = required_samples * WORST_INTERVAL_SAMPLE_FRACTION
        minimum_samples = max(minimum_samples, samples_with_queueing)
    sample_size = sum(series.estimate_sample_size() for series in queue_series)
    return sample_size >= minimum_samples


def _check_queue_tail(
    runs: Sequence[RecordedRun], load: LoadLength, query: QuantileQuery
) -> LoadCheck:
    """Check whether the queue changed often enough during a load for the tail of a quantile.

    The independent states of the queue are counted in TTFT, which shows the state of the queue
    best, whatever the metric of the query is. There are at most as many of them as residence times,
    because requests in the same residence time meet the same queue.

    Args:
        runs: The runs of a level.
        load: The length of the load of all runs.
        query: The quantile that is estimated.
    """
    sample_size = sum(
        steady_state.estimate_queue_sample_size(
            collect_timed_values(run.columns(), QUEUE_METRIC),
            run.mean_residence_ns,
            correlation_z=0.0,  # the correlation as estimated, without a margin for its error
        )
        for run in runs
    )
    return load_checks.check_queue_tail(
        min(sample_size, load.residences), load, query.p, query.confidence, query.label
    )


def _compute_worst_interval_quantile(
    runs: Sequence[RecordedRun], steady_values: Sequence[TimedValues], p: float
) -> float:
    """Return the largest p quantile of any interval of one residence time in any run."""
    return max(
        steady_state.compute_worst_interval_quantile(samples, run.mean_residence_ns, p)
        for samples, run in zip(steady_values, runs, strict=True)
    )
