"""Select the values of the steady part of a level's runs.

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
from loadgen.contracts.load_checks import EstimateError, LoadCheck, LoadLength
from loadgen.contracts.quantile_interval import RunSeries
from loadgen.contracts.recorded_run import (
    QUEUEING_METRICS,
    RecordedRun,
    includes_queueing,
    load_in_residences,
    never_queued,
)
from loadgen.contracts.steady_state import SteadyPart, TimedValues
from loadgen.core import format
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import CANCELLED, OK, UNFINISHED, Columns
from loadgen.core.slo import Slo, Term, why_missing
from loadgen.core.stats import intervals
from loadgen.core.stats.quantiles import needed_samples

QUEUE_METRIC = "ttft"
"""The metric that shows the state of the queue."""

REQUIRED_QUEUE_SAMPLES = dict.fromkeys(QUEUEING_METRICS, 2 * intervals.BATCHES) | {
    "e2e": intervals.BATCHES * 5 // 4
}
"""Independent samples of the queue that are needed before batches represent a load that continues.

It is more than one sample per batch, and two where the metric is mostly queueing time, which is
near zero or long. With fewer, benchmarks/contract_power.py finds wrong PASS verdicts near
saturation.
"""

ENOUGH_FOR_WORST_CASE = 0.75
"""Share of the required queue samples from which the worst state that was seen is an upper bound.
"""


class QuantileQuery(NamedTuple):
    """The quantile that a steady sample has to support.

    Attributes:
        metric: The metric of requests.
        p: The quantile, or the share of requests.
        confidence: The confidence of its interval.
        horizon_s: The horizon of the contract.
        text: The metric for people, such as "ttft p99".
    """

    metric: str
    p: float
    confidence: float
    horizon_s: float
    text: str


class SteadySample(NamedTuple):
    """The values of the steady part of each run.

    Attributes:
        values: The values of each run, in order of time.
        request_count: The number of values before the start-up was removed.
        load_check: Whether the load is long enough for an upper bound from the sample.
        upper_bound: The least upper end of an interval if the load is too short: the worst state
            of the queue that was seen, or inf.
        load_part: The part of the load, as text. "" for all of it.
        load_s: The length of the load of all runs.
        effective_size: The independent samples of the server, or None if they are not known.
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
    """Return a metric in ns of every counted request that has it.

    It is infinite for requests that are not ok.

    Args:
        columns: The records of a run.
        metric: The name of the metric.
        mask: The requests to select from, or None for all.
        limit_ns: The limit of the term, if it has one: see `counted_requests`.

    Raises:
        EstimateError: The package of the metric is not installed, or too many requests are
            unfinished.
    """
    reason = why_missing(metric)
    if reason:
        raise EstimateError(reason)
    is_ok = columns.where(OK)
    values = columns.measure(metric)
    slo = None
    if limit_ns is not None:
        slo = Slo(terms=(Term(metric=metric, limit_ns=limit_ns),))
    selected = counted_requests(columns, slo) & (~is_ok | (values != metrics.UNDEFINED))
    if mask is not None:
        selected &= mask
    return order_by_due_time(columns, selected, np.where(is_ok, values, np.inf))


def metric_values(
    columns: Columns, metric: str, mask: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Return the values of `timed_values` without their due times."""
    return timed_values(columns, metric, mask).values


def order_by_due_time(
    columns: Columns, mask: NDArray[np.bool_], values: NDArray[np.float64]
) -> TimedValues:
    """Return the values of the selected requests in order of their due times."""
    due_ns: NDArray[np.int64] = columns["due_ns"][mask]
    order = np.argsort(due_ns, kind="stable")
    return TimedValues(due_ns[order], values[mask][order])


def counted_requests(columns: Columns, slo: Slo | None = None) -> NDArray[np.bool_]:
    """Return which requests count in a metric.

    All count but cancelled ones. An unfinished one counts if it already exceeds the SLO.

    Raises:
        EstimateError: So many requests are unfinished that nothing can be said.
    """
    unfinished = int(columns.where(UNFINISHED).sum())
    total = int((~columns.where(CANCELLED)).sum())
    if outcomes.is_undecided(unfinished, total):
        raise EstimateError(
            f"{unfinished:,} of {total:,} requests were unfinished when the drain ended: give the "
            "level a longer grace (`grace: 10m`), or none: then the drain lasts as long as a "
            "request may (`timeout`)"
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
        raise EstimateError(f"no request has a {metric}")
    if count < required:
        reason = f"{format.counted(count, 'sample')}; p{p * 100:g} is supported from {required:,}"
        sufficient_load_s = load_checks.scale_load_s(load_s, required, count)
        raise EstimateError(reason, sufficient_load_s - load_s)


def load_length_s(timed_samples: Sequence[TimedValues]) -> float:
    """Return the time from the first to the last due time of each run, summed over the runs."""
    return sum(_run_length_s(samples) for samples in timed_samples)


def _run_length_s(samples: TimedValues) -> float:
    if len(samples.due_ns) == 0:
        return 0.0
    return float(samples.due_ns[-1] - samples.due_ns[0]) / 1e9


def server_sample_size(
    runs: Sequence[RecordedRun], timed_samples: Sequence[TimedValues]
) -> float | None:
    """Return how many independent samples of the server these values are worth.

    Return None if a run has no ok request, so that its residence time is not known.
    """
    if not all(run.mean_residence_ns for run in runs):
        return None
    return sum(
        steady_state.slow_effective_sample_size(samples, run.mean_residence_ns)
        for samples, run in zip(timed_samples, runs, strict=True)
    )


# -- the steady part ------------------------------------------------------------------------------


def select_steady_sample(
    runs: Sequence[RecordedRun], timed_samples: Sequence[TimedValues], query: QuantileQuery
) -> SteadySample:
    """Return the values of the steady part of the runs, and whether the load was long enough.

    The steady part is a run without its start-up, in which the server fills, and without its end,
    at which it empties.

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
        TimedValues(samples.due_ns[part.start : part.end], samples.values[part.start : part.end])
        for samples, part in zip(timed_samples, parts, strict=True)
    ]
    load_s = load_length_s(timed_samples)
    sample = SteadySample(
        values=[samples.values for samples in steady_values],
        request_count=sum(len(samples.values) for samples in timed_samples),
        load_s=load_s,
        effective_size=server_sample_size(runs, steady_values),
    )
    if not all(part.is_settled for part in parts):
        longest_run_s = max(map(_run_length_s, timed_samples), default=0.0)
        return sample._replace(load_check=load_checks.describe_unfinished_startup(longest_run_s))
    time_checks = [
        load_checks.check_horizon(load_s, query.confidence, query.horizon_s, query.text),
        load_checks.check_server_samples(sample.effective_size, load_s),
    ]
    queue = _examine_queue(runs, steady_values, load_s, query)
    if queue.can_use_worst_state and not any(load_check.is_short for load_check in time_checks):
        sample = sample._replace(upper_bound=_worst_state(runs, steady_values, query.p))
    return sample._replace(
        load_check=load_checks.combine_load_checks(queue.queue_checks, time_checks),
        load_part=_describe_part(timed_samples, parts),
    )


def _describe_part(timed_samples: Sequence[TimedValues], parts: Sequence[SteadyPart]) -> str:
    """Return where the steady parts of the runs begin, as text. "" if no run had a start-up."""
    startups_ns = [
        float(samples.due_ns[part.start] - samples.due_ns[0])
        for samples, part in zip(timed_samples, parts, strict=True)
        if part.start
    ]
    if not startups_ns:
        return ""
    return f"from {format.duration(max(startups_ns) / 1e9)} on"


class QueueExamination(NamedTuple):
    """Whether a load saw its queue often enough.

    Attributes:
        queue_checks: Whether it did, for a tail quantile and for batch means.
        can_use_worst_state: Whether the worst state that was seen is an upper bound: batches do not
            represent the queue, nothing else is short, and there were enough samples.
    """

    queue_checks: list[LoadCheck]
    can_use_worst_state: bool


def _examine_queue(
    runs: Sequence[RecordedRun],
    steady_values: Sequence[TimedValues],
    load_s: float,
    query: QuantileQuery,
) -> QueueExamination:
    """Return whether the steady part of a load saw its queue often enough for a quantile.

    Two things are checked. The tail of a quantile is seen only if the queue was seen often enough.
    The interval holds only if batches of time are independent, which they are not while a queue
    lasts. A metric without queueing time needs neither.
    """
    load = None
    if includes_queueing(runs, query.metric):
        load = load_in_residences(runs)
    if load is None:
        return QueueExamination([], can_use_worst_state=False)
    residences_ns = [run.mean_residence_ns for run in runs]
    sample_size = sum(
        steady_state.effective_sample_size(samples, residence_ns)
        for samples, residence_ns in zip(steady_values, residences_ns, strict=True)
    )
    required = REQUIRED_QUEUE_SAMPLES.get(query.metric, REQUIRED_QUEUE_SAMPLES[QUEUE_METRIC])
    tail_check = _check_queue_tail(runs, load, query)
    batch_check = load_checks.check_queue_samples(
        sample_size, required, load_s, steady_values, residences_ns
    )
    # Without queueing no least number of samples is needed: the batches only vary by chance.
    required_for_worst = 0.0 if never_queued(runs) else required * ENOUGH_FOR_WORST_CASE
    required_for_tail = intervals.observations_to_see(query.p, query.confidence)
    is_enough_for_worst = sample_size >= max(required_for_tail, required_for_worst)
    return QueueExamination(
        [tail_check, batch_check],
        can_use_worst_state=(
            batch_check.is_short and not tail_check.is_short and is_enough_for_worst
        ),
    )


def _check_queue_tail(
    runs: Sequence[RecordedRun], load: LoadLength, query: QuantileQuery
) -> LoadCheck:
    """Check whether the load saw its queue often enough for the quantile.

    The samples are counted in TTFT, which shows the state of the queue best. There are no more of
    them than residence times, because requests in the same residence time see the same queue.
    """
    sample_size = sum(
        steady_state.effective_sample_size(
            timed_values(run.columns(), QUEUE_METRIC), run.mean_residence_ns, correlation_z=0.0
        )
        for run in runs
    )
    return load_checks.check_queue_tail(
        min(sample_size, load.residences), load, query.p, query.confidence, query.text
    )


def _worst_state(
    runs: Sequence[RecordedRun], steady_values: Sequence[TimedValues], p: float
) -> float:
    """Return the largest p quantile of any interval of one residence time in any run."""
    return max(
        steady_state.worst_interval_quantile(samples, run.mean_residence_ns, p)
        for samples, run in zip(steady_values, runs, strict=True)
    )
