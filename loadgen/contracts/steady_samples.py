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
    depends_on_queueing,
    has_negligible_queueing,
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
"""The metric that shows best how long the queue is: TTFT includes all the time in it."""

SAMPLES_PER_BATCH = 2.0
"""Independent observations of the queue per batch, for a metric that is mostly queueing time.

Queueing time is near zero or long, so one observation per batch does not show how batches vary.
With fewer, benchmarks/contract_power.py finds PASS verdicts near saturation on servers that miss
the limit.
"""

E2E_SAMPLES_PER_BATCH = 1.25
"""The same for E2E latency, of which the generation of tokens is the larger and steadier part."""

REQUIRED_QUEUE_SAMPLES = {
    **dict.fromkeys(QUEUEING_METRICS, round(SAMPLES_PER_BATCH * intervals.BATCHES)),
    "e2e": round(E2E_SAMPLES_PER_BATCH * intervals.BATCHES),
}
"""Metric -> the number of independent observations of the queue that batch means need."""

WORST_INTERVAL_SAMPLE_FRACTION = 0.75
"""The fraction of `REQUIRED_QUEUE_SAMPLES` from which the slowest interval is an upper bound.

With fewer, a load may easily have missed a longer queue.
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
            the slowest interval of the load, or infinity.
        load_description: The part of the load that was used, as text. "" for all of it.
        load_s: The length of the load of all runs.
        effective_size: The effective sample size: how many independent observations of the server
            would give an equally precise estimate. None if it is not known.
    """

    values: list[NDArray[np.float64]]
    request_count: int
    load_check: LoadCheck
    upper_bound: float
    load_description: str
    load_s: float
    effective_size: float | None


class CheckedLoad(NamedTuple):
    """The result of all checks whether a load is long enough for a quantile.

    Attributes:
        load_check: Whether it is long enough, with the reason if it is not.
        upper_bound: An upper bound of the quantile that holds although the load is too short, or
            infinity if there is none.
    """

    load_check: LoadCheck
    upper_bound: float = math.inf


class SteadyRun(NamedTuple):
    """A run, the values of its requests, and the part of these values in steady state.

    Attributes:
        run: The run.
        all_values: The values of all its requests, in order of time.
        steady_range: The indexes of the values in steady state.
    """

    run: RecordedRun
    all_values: TimedValues
    steady_range: SteadyRange

    @property
    def steady_values(self) -> TimedValues:
        """The values in steady state."""
        return self.all_values.slice(self.steady_range.start, self.steady_range.end)

    @property
    def startup_s(self) -> float:
        """How long the start-up lasted, in seconds: 0 if the run began in steady state."""
        if self.steady_range.start == 0:
            return 0.0
        due_ns = self.all_values.due_ns
        return float(due_ns[self.steady_range.start] - due_ns[0]) / NS_PER_S


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

    slo = None if limit_ns is None else _create_slo(metric, limit_ns)
    is_counted = find_counted_requests(columns, slo)
    values = columns.measure(metric)
    is_ok = columns.has_status(OK)
    is_undefined = is_ok & (values == metrics.UNDEFINED)

    is_selected = is_counted & ~is_undefined
    if mask is not None:
        is_selected &= mask

    values_or_infinity = np.where(is_ok, values, np.inf)
    return order_by_due_time(columns, is_selected, values_or_infinity)


def _create_slo(metric: str, limit_ns: int) -> Slo:
    """Return an SLO that limits one metric, for `find_counted_requests`."""
    return Slo(terms=(Term(metric=metric, limit_ns=limit_ns),))


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

    Cancelled requests do not count. When the load ends, the run waits some time (the drain) for
    requests in flight. The final latency of a request that is still unfinished after it is not
    known. Such a request counts only if it already exceeds the SLO.

    Raises:
        EstimateError: So many requests are unfinished that the metric could be wrong.
    """
    unfinished_count = int(columns.has_status(UNFINISHED).sum())
    request_count = int((~columns.has_status(CANCELLED)).sum())
    if outcomes.is_undecided(unfinished_count, request_count):
        raise EstimateError(
            f"{unfinished_count:,} of {request_count:,} requests were unfinished when the drain "
            "ended; set a longer grace for the level (grace: 10m), or none to drain for as long as "
            "timeout"
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
    empties, are removed: they would make the server look faster than under a load that continues.
    The load is too short if the start-up did not end in the first half of a run, or if it fails one
    of the checks in `load_checks.py`.

    Args:
        runs: The runs of a level.
        timed_samples: The values of each run.
        query: The quantile that is estimated from the sample.
    """
    steady_runs = [
        SteadyRun(run, samples, steady_state.find_steady_range(samples, run.mean_residence_ns))
        for run, samples in zip(runs, timed_samples, strict=True)
    ]
    steady_samples = [steady_run.steady_values for steady_run in steady_runs]
    load_s = compute_load_length_s(timed_samples)

    effective_size = sum_server_sample_sizes(runs, steady_samples)
    if all(steady_run.steady_range.has_steady_state for steady_run in steady_runs):
        checked_load = _check_steady_load(steady_runs, load_s, effective_size, query)
        load_description = _format_steady_start(steady_runs)
    else:
        longest_run_s = max(map(_compute_run_length_s, timed_samples))
        checked_load = CheckedLoad(load_checks.create_failed_startup_check(longest_run_s))
        load_description = ""

    return SteadySample(
        values=[samples.values for samples in steady_samples],
        request_count=sum(len(samples.values) for samples in timed_samples),
        load_check=checked_load.load_check,
        upper_bound=checked_load.upper_bound,
        load_description=load_description,
        load_s=load_s,
        effective_size=effective_size,
    )


def _check_steady_load(
    steady_runs: Sequence[SteadyRun],
    load_s: float,
    effective_size: float | None,
    query: QuantileQuery,
) -> CheckedLoad:
    """Check whether the steady state of a load is long enough to estimate a quantile.

    Two groups of checks are made: whether the load is long enough for rare slowdowns and for slow
    changes of the server, and whether the queue changed often enough during it. If only the queue
    changed too rarely, but often enough to show one of the longest queues, the quantile in the
    slowest interval of the load is still an upper bound.

    Args:
        steady_runs: The runs of a level with their steady state.
        load_s: The length of the load of all runs.
        effective_size: The number of independent observations of the server's speed. None if it is
            not known.
        query: The quantile that is estimated.
    """
    server_checks = [
        load_checks.check_horizon(load_s, query.confidence, query.horizon_s, query.label),
        load_checks.check_server_samples(effective_size, load_s),
    ]
    is_too_short_for_server = any(load_check.is_short for load_check in server_checks)
    queue_checks = _check_queue(steady_runs, load_s, query)

    load_check = load_checks.combine_load_checks(queue_checks.load_checks, server_checks)
    if queue_checks.has_worst_interval_bound and not is_too_short_for_server:
        upper_bound = _compute_worst_interval_quantile(steady_runs, query.p)
        return CheckedLoad(load_check, upper_bound)

    return CheckedLoad(load_check)


def _format_steady_start(steady_runs: Sequence[SteadyRun]) -> str:
    """Return when the steady state begins, such as "steady state from 1 min 29 s".

    If there are several runs, it is the latest beginning. Return "" if no run had a start-up.
    """
    if all(steady_run.steady_range.start == 0 for steady_run in steady_runs):
        return ""
    longest_startup_s = max(steady_run.startup_s for steady_run in steady_runs)
    return f"steady state from {format.duration(longest_startup_s)}"


class QueueChecks(NamedTuple):
    """The checks whether the queue of a server changed often enough during a load.

    Attributes:
        load_checks: The check for a tail quantile and the check for batch means. Empty if the
            metric does not depend on the queue.
        has_worst_interval_bound: Whether the quantile in the slowest interval of the load is an
            upper bound of the metric. This is so if only the check for batch means failed, and not
            by much.
    """

    load_checks: list[LoadCheck]
    has_worst_interval_bound: bool


def _check_queue(
    steady_runs: Sequence[SteadyRun], load_s: float, query: QuantileQuery
) -> QueueChecks:
    """Check whether the queue of the server changed often enough during the steady state.

    Requests that are sent close together wait in the same queue, so they count as one observation
    of it. There are two requirements on the number of independent observations:

    - A tail quantile such as p99 needs so many that the rare long queues are among them.
    - A confidence interval from batches of time (batch means) needs so many that neighbouring
      batches do not show the same queue.

    Both are met without a check if the metric does not depend on the queue, and in a closed loop,
    whose queue is limited by its concurrency.

    Args:
        steady_runs: The runs of a level with their steady state.
        load_s: The length of the load of all runs.
        query: The quantile that is estimated.
    """
    runs = [steady_run.run for steady_run in steady_runs]
    open_loop_length = measure_load_length(runs)
    if open_loop_length is None or not depends_on_queueing(runs, query.metric):
        return QueueChecks([], has_worst_interval_bound=False)

    tail_check = _check_queue_for_tail(runs, open_loop_length, query)
    queue_series = [
        QueueSeries(steady_run.steady_values, steady_run.run.mean_residence_ns)
        for steady_run in steady_runs
    ]
    required_samples = _get_required_queue_samples(query.metric)
    batch_check = load_checks.check_queue_samples(queue_series, required_samples, load_s)
    is_short_for_batches_only = batch_check.is_short and not tail_check.is_short
    has_bound = is_short_for_batches_only and _has_worst_interval_bound(runs, queue_series, query)

    return QueueChecks([tail_check, batch_check], has_worst_interval_bound=has_bound)


def _get_required_queue_samples(metric: str) -> int:
    """Return how many independent observations of the queue an interval from batch means needs.

    A metric of a plug-in has no requirement of its own and gets that of TTFT.
    """
    return REQUIRED_QUEUE_SAMPLES.get(metric, REQUIRED_QUEUE_SAMPLES[QUEUE_METRIC])


def _has_worst_interval_bound(
    runs: Sequence[RecordedRun], queue_series: Sequence[QueueSeries], query: QuantileQuery
) -> bool:
    """Return whether the quantile in the slowest interval of a load is an upper bound.

    This matters for a load that is too short for a confidence interval. The slowest interval of
    time gives a bound if the load is long enough to probably include one of the longest queues.

    Args:
        runs: The runs of a level.
        queue_series: The steady-state values of each run, from which the number of independent
            observations of the queue is estimated.
        query: The quantile that is estimated.
    """
    sample_size = sum(series.estimate_sample_size() for series in queue_series)
    return sample_size >= _compute_samples_for_worst_interval(runs, query)


def _compute_samples_for_worst_interval(runs: Sequence[RecordedRun], query: QuantileQuery) -> float:
    """Return the effective sample size from which the slowest interval is an upper bound.

    The effective sample size is the number of independent observations of the queue. All requests
    that are sent close together wait in the same queue and count as one observation.

    Args:
        runs: The runs of a level.
        query: The quantile that is estimated.
    """
    # With this many observations, at least one is expected to be beyond the quantile.
    samples_for_tail = float(intervals.observations_to_see(query.p, query.confidence))
    if has_negligible_queueing(runs):
        return samples_for_tail  # intervals of time then differ only by chance
    # With queueing, a fixed fraction of what a confidence interval would need is required too.
    samples_for_interval = _get_required_queue_samples(query.metric)
    samples_with_queueing = samples_for_interval * WORST_INTERVAL_SAMPLE_FRACTION
    return max(samples_for_tail, samples_with_queueing)


def _check_queue_for_tail(
    runs: Sequence[RecordedRun], load: LoadLength, query: QuantileQuery
) -> LoadCheck:
    """Check whether a load contains enough different queues for a tail quantile such as p99.

    A p99 depends on the longest queues, which are rare. The number of different queues is the
    effective sample size of TTFT, also for a query about another metric, because TTFT consists
    mostly of the time in the queue. Requests within one residence time (from scheduled start to
    end) wait in the same queue, so there are at most as many queues as residence times.

    Args:
        runs: The runs of a level.
        load: The length of the load of all runs.
        query: The quantile that is estimated.
    """
    queue_count = sum(_estimate_queue_count(run) for run in runs)
    sample_size = min(queue_count, load.residence_times)
    return load_checks.check_queue_tail(sample_size, load, query.p, query.confidence, query.label)


def _estimate_queue_count(run: RecordedRun) -> float:
    """Return how many independent queues a run shows: the effective sample size of its TTFT."""
    ttft_values = collect_timed_values(run.columns(), QUEUE_METRIC)
    return steady_state.estimate_queue_sample_size(
        ttft_values, run.mean_residence_ns, is_cautious=False
    )


def _compute_worst_interval_quantile(steady_runs: Sequence[SteadyRun], p: float) -> float:
    """Return the largest p quantile of any interval of one residence time in any run."""
    return max(
        steady_state.compute_worst_interval_quantile(
            steady_run.steady_values, steady_run.run.mean_residence_ns, p
        )
        for steady_run in steady_runs
    )
