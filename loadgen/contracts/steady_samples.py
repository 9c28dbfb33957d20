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
    includes_queueing,
    load_in_residences,
    never_queued,
)
from loadgen.contracts.steady_state import SteadyPart, TimedValues
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

ENOUGH_FOR_WORST_CASE = 0.75
"""The fraction of the required states from which the worst state that was met is an upper bound."""


class QuantileQuery(NamedTuple):
    """The quantile that a steady sample has to support.

    Attributes:
        metric: The metric of requests.
        p: The quantile, or the fraction of requests.
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
        upper_bound: The least upper end of an interval if the load is too short: the worst state
            of the queue that the load met, or infinity.
        load_part: The part of the load that was used, as text. "" for all of it.
        load_s: The length of the load of all runs.
        effective_size: The effective sample size, counted in independent states of the server.
            None if it is not known.
    """

    values: list[NDArray[np.float64]]
    request_count: int
    load_check: LoadCheck = LoadCheck()
    upper_bound: float = math.inf
    load_part: str = ""
    load_s: float = 0.0
    effective_size: float | None = None


# -- values of a metric ---------------------------------------------------------------------------


def timed_values(
    columns: Columns,
    metric: str,
    mask: NDArray[np.bool_] | None = None,
    limit_ns: int | None = None,
) -> TimedValues:
    """Return a metric in ns of every counted request that has it, in order of scheduled time.

    The metric is infinite for requests that are not ok. A response of one token, for example, is ok
    and has no TPOT, so its request is left out.

    Args:
        columns: The records of a run.
        metric: The name of the metric.
        mask: The requests to select from, or None for all.
        limit_ns: The limit of the term, if it has one: see `counted_requests`.

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
    is_selected = counted_requests(columns, slo) & (is_defined | ~is_ok)
    if mask is not None:
        is_selected &= mask
    values_or_inf = np.where(is_ok, values, np.inf)
    return order_by_due_time(columns, is_selected, values_or_inf)


def metric_values(
    columns: Columns, metric: str, mask: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Return the values of `timed_values` without the scheduled times."""
    return timed_values(columns, metric, mask).values


def order_by_due_time(
    columns: Columns, mask: NDArray[np.bool_], values: NDArray[np.float64]
) -> TimedValues:
    """Return the values of the selected requests in order of their scheduled times."""
    due_ns: NDArray[np.int64] = columns["due_ns"][mask]
    order = np.argsort(due_ns, kind="stable")
    return TimedValues(due_ns[order], values[mask][order])


def counted_requests(columns: Columns, slo: Slo | None = None) -> NDArray[np.bool_]:
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


def require_supported(values: RunSeries, p: float, metric: str, load_s: float) -> None:
    """Raise EstimateError if a load of this length gave fewer values than a quantile needs."""
    count = count_values(values)
    required = needed_samples(p)
    if count == 0:
        raise EstimateError(f"no request has {metric}")
    if count < required:
        reason = f"only {format.counted(count, 'request')}, {required:,} needed for p{p * 100:g}"
        sufficient_load_s = load_checks.scale_load_s(load_s, required, count)
        raise EstimateError(reason, sufficient_load_s - load_s)


def load_length_s(timed_samples: Sequence[TimedValues]) -> float:
    """Return the time from the first to the last scheduled request, summed over the runs."""
    return sum(_run_length_s(samples) for samples in timed_samples)


def _run_length_s(samples: TimedValues) -> float:
    """Return the time from the first to the last scheduled request of a run."""
    if len(samples.due_ns) == 0:
        return 0.0
    return float(samples.due_ns[-1] - samples.due_ns[0]) / NS_PER_S


def server_sample_size(
    runs: Sequence[RecordedRun], timed_samples: Sequence[TimedValues]
) -> float | None:
    """Return the effective sample size of values, counted in independent states of the server.

    Return None if a run has no ok request, so that its residence time is not known.
    """
    if not all(run.mean_residence_ns for run in runs):
        return None
    return sum(
        steady_state.slow_effective_sample_size(samples, run.mean_residence_ns)
        for samples, run in zip(timed_samples, runs, strict=True)
    )


# -- the steady state -----------------------------------------------------------------------------


def select_steady_sample(
    runs: Sequence[RecordedRun], timed_samples: Sequence[TimedValues], query: QuantileQuery
) -> SteadySample:
    """Return the steady-state values of the runs, and whether the load was long enough.

    The steady state is a run without its start-up, during which the server fills, and without its
    end, during which the server empties.

    Args:
        runs: The runs of a level.
        timed_samples: The values of each run.
        query: The quantile that is estimated from the sample.
    """
    parts = [
        steady_state.find_steady_part(samples, run.mean_residence_ns)
        for run, samples in zip(runs, timed_samples, strict=True)
    ]
    steady_values = [
        samples.slice(part.start, part.end)
        for samples, part in zip(timed_samples, parts, strict=True)
    ]
    sample = SteadySample(
        values=[samples.values for samples in steady_values],
        request_count=sum(len(samples.values) for samples in timed_samples),
        load_s=load_length_s(timed_samples),
        effective_size=server_sample_size(runs, steady_values),
    )
    if not all(part.is_settled for part in parts):
        longest_run_s = max(map(_run_length_s, timed_samples), default=0.0)
        return sample._replace(load_check=load_checks.describe_unfinished_startup(longest_run_s))
    sample = sample._replace(load_part=_describe_part(timed_samples, parts))
    return _with_load_check(sample, runs, steady_values, query)


def _with_load_check(
    sample: SteadySample,
    runs: Sequence[RecordedRun],
    steady_values: Sequence[TimedValues],
    query: QuantileQuery,
) -> SteadySample:
    """Return the sample with the check whether its load is long enough for a quantile.

    Two groups of checks are made: whether the load met rare slowdowns and slow changes of the
    server, and whether it met enough states of the queue. If only the queue is short, the worst
    state that the load met can still be an upper bound.
    """
    time_checks = [
        load_checks.check_horizon(sample.load_s, query.confidence, query.horizon_s, query.label),
        load_checks.check_server_samples(sample.effective_size, sample.load_s),
    ]
    queue = _examine_queue(runs, steady_values, sample.load_s, query)
    is_time_short = any(load_check.is_short for load_check in time_checks)
    if queue.can_use_worst_state and not is_time_short:
        worst_state = _worst_state(runs, steady_values, query.p)
        sample = sample._replace(upper_bound=worst_state)
    load_check = load_checks.combine_load_checks(queue.load_checks, time_checks)
    return sample._replace(load_check=load_check)


def _describe_part(timed_samples: Sequence[TimedValues], parts: Sequence[SteadyPart]) -> str:
    """Return where the steady state of the runs begins, as text. "" if no run had a start-up."""
    startups_ns = [
        float(samples.due_ns[part.start] - samples.due_ns[0])
        for samples, part in zip(timed_samples, parts, strict=True)
        if part.start > 0
    ]
    if not startups_ns:
        return ""
    return f"steady state from {format.duration(max(startups_ns) / NS_PER_S)}"


class QueueExamination(NamedTuple):
    """Whether a load met enough states of its queue.

    Attributes:
        load_checks: Whether it did, for a tail quantile and for batch means. Empty if the metric
            does not include queueing time.
        can_use_worst_state: Whether the worst state that the load met is an upper bound of the
            quantile. This is so if only the batch means are short of states, and not by much.
    """

    load_checks: list[LoadCheck]
    can_use_worst_state: bool


def _examine_queue(
    runs: Sequence[RecordedRun],
    steady_values: Sequence[TimedValues],
    load_s: float,
    query: QuantileQuery,
) -> QueueExamination:
    """Return whether the steady state of a load met enough states of its queue for a quantile.

    There are two requirements. The tail of a quantile is seen only if enough states were met. The
    interval holds only if batches of time are independent, which they are not while a queue lasts.
    A metric without queueing time has neither requirement.
    """
    load = load_in_residences(runs) if includes_queueing(runs, query.metric) else None
    if load is None:
        return QueueExamination([], can_use_worst_state=False)
    queue_series = [
        QueueSeries(samples, run.mean_residence_ns)
        for samples, run in zip(steady_values, runs, strict=True)
    ]
    # A metric of another package has no requirement of its own and gets that of TTFT.
    required = REQUIRED_QUEUE_SAMPLES.get(query.metric, REQUIRED_QUEUE_SAMPLES[QUEUE_METRIC])
    tail_check = _check_queue_tail(runs, load, query)
    batch_check = load_checks.check_queue_samples(queue_series, required, load_s)
    can_use_worst_state = (
        batch_check.is_short
        and not tail_check.is_short
        and _has_enough_for_worst_state(runs, queue_series, required, query)
    )
    return QueueExamination([tail_check, batch_check], can_use_worst_state)


def _has_enough_for_worst_state(
    runs: Sequence[RecordedRun],
    queue_series: Sequence[QueueSeries],
    required: int,
    query: QuantileQuery,
) -> bool:
    """Return whether the worst state of the queue that a load met bounds the quantile from above.

    `required` is the number of states that batch means need. Without queueing the batches only vary
    by chance, so the states that the tail of the quantile needs are enough.
    """
    minimum = float(intervals.observations_to_see(query.p, query.confidence))
    if not never_queued(runs):
        minimum = max(minimum, required * ENOUGH_FOR_WORST_CASE)
    return sum(series.effective_size() for series in queue_series) >= minimum


def _check_queue_tail(
    runs: Sequence[RecordedRun], load: LoadLength, query: QuantileQuery
) -> LoadCheck:
    """Check whether the load met its queue often enough for the quantile.

    The states are counted in TTFT, which shows the state of the queue best. There are no more of
    them than residence times, because requests in the same residence time meet the same queue.
    """
    sample_size = sum(
        steady_state.effective_sample_size(
            timed_values(run.columns(), QUEUE_METRIC), run.mean_residence_ns, correlation_z=0.0
        )
        for run in runs
    )
    return load_checks.check_queue_tail(
        min(sample_size, load.residences), load, query.p, query.confidence, query.label
    )


def _worst_state(
    runs: Sequence[RecordedRun], steady_values: Sequence[TimedValues], p: float
) -> float:
    """Return the largest p quantile of any interval of one residence time in any run."""
    return max(
        steady_state.worst_interval_quantile(samples, run.mean_residence_ns, p)
        for samples, run in zip(steady_values, runs, strict=True)
    )
