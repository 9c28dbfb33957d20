"""Check whether a load is long enough to judge a term, and compute the length that would be.

A sample can be too small for an upper bound although it has many requests. Requests close together
in time meet the same state of the server, and a load shows only what happens during it.

This module uses three terms:

- `load_s` is the length of the measured load of all runs together, in seconds.
- The residence time of a request is the time from its scheduled start to its end, so it includes
  the time in the server's queue.
- The effective sample size of correlated requests is the number of independent observations that
  would give an equally precise estimate.

This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from loadgen.contracts import quantile_interval, steady_state
from loadgen.contracts.quantile_interval import RunSeries
from loadgen.contracts.steady_state import TimedValues
from loadgen.contracts.terms import NS_PER_S
from loadgen.core import format
from loadgen.core.stats import intervals

MIN_SERVER_SAMPLES = 6
"""The effective sample size that any latency needs, counted in independent observations.

With fewer, the measured time does not represent a load that continues: benchmarks/trust.py then
finds PASS verdicts on servers that miss the limit.
"""

PLANNING_MARGIN = 1.1
"""Factor on a load that is estimated to be sufficient.

The estimate varies from run to run. With 10 % more, a recommended load is seldom too short again.
"""

NEARLY_FULL_LENGTH = 0.9
"""The fraction of a required length from which a load counts as long enough.

A load is measured from its first to its last scheduled request, which come after its planned start
and before its planned end.
"""


class EstimateError(Exception):
    """A metric cannot be computed from the records. The message says why.

    Attributes:
        additional_load_s: How much more load would be enough. 0 if that is not known.
    """

    def __init__(self, reason: str, additional_load_s: float = 0.0) -> None:
        """Create the error with its reason."""
        super().__init__(reason)
        self.additional_load_s = additional_load_s


class UnmeasurableError(EstimateError):
    """A metric cannot be computed, however long the load is. The message says what it lacks."""


class LoadCheck(NamedTuple):
    """The result of a check whether a load is long enough for an estimate.

    Attributes:
        reason: Why the load is too short, or "" if it is long enough.
        sufficient_load_s: The load of all runs that is sufficient if the server continues as it
            did. It applies to the confidence of the next interim analysis, and is also set if this
            load was long enough. Infinite if it is not known.
    """

    reason: str = ""
    sufficient_load_s: float = 0.0

    @property
    def is_short(self) -> bool:
        """Whether the load is too short."""
        return bool(self.reason)

    @property
    def known_sufficient_load_s(self) -> float:
        """The sufficient load in seconds, or 0 if it is not known."""
        return self.sufficient_load_s if math.isfinite(self.sufficient_load_s) else 0.0

    def sentence(self) -> str:
        """Return the reason and the sufficient load, or "" if the load is long enough."""
        if not self.is_short:
            return ""
        needed_load = "a longer load is needed"
        if math.isfinite(self.sufficient_load_s):
            needed_load = f"about {format.duration(self.sufficient_load_s)} of load needed"
        return f"{self.reason} ({needed_load})"

    def with_prefix(self, prefix: str) -> LoadCheck:
        """Return the check with a prefix before its reason, if it has a reason."""
        if not self.is_short:
            return self
        return self._replace(reason=f"{prefix}: {self.reason}")


class LoadLength(NamedTuple):
    """The length of the load of all runs together.

    Attributes:
        residence_times: The length in mean residence times of a request. Requests in one residence
            time wait in the same queue, so this is about the number of independent observations of
            the queue.
        seconds: The length in seconds.
    """

    residence_times: float
    seconds: float


def combine_load_checks(*groups: Sequence[LoadCheck]) -> LoadCheck:
    """Return one check that stands for several groups of checks.

    The checks of one group have the same cause, such as a long queue, so only the first reason of
    each group is given. The sufficient load is the largest of all checks.
    """
    reasons = []
    sufficient_loads_s = [0.0]
    for group in groups:
        group_reasons = [load_check.reason for load_check in group if load_check.is_short]
        if group_reasons:
            reasons.append(group_reasons[0])
        sufficient_loads_s.extend(load_check.sufficient_load_s for load_check in group)

    return LoadCheck("; ".join(reasons), max(sufficient_loads_s))


def scale_load_s(load_s: float, required_samples: float, measured_samples: float) -> float:
    """Return the load that gives a required number of samples, in seconds.

    The number of samples is assumed to grow in proportion to the load. The result includes
    `PLANNING_MARGIN`. It is infinite if the load had no sample.

    Args:
        load_s: The load that was measured.
        required_samples: The number of samples that are required.
        measured_samples: The number of samples in the measured load.
    """
    if not measured_samples:
        return math.inf
    return PLANNING_MARGIN * load_s * required_samples / measured_samples


def create_failed_startup_check(load_s: float) -> LoadCheck:
    """Return the check of a load that failed, because its start-up did not end in its first half.

    A server begins empty and therefore fast, so the start-up must not be part of an estimate. How
    much longer it would have taken is not known, so the sufficient load is infinite.
    """
    reason = (
        f"no steady state: the start-up lasted longer than {format.duration(load_s / 2)}; use a "
        "longer load or a longer warm-up"
    )
    return LoadCheck(reason, sufficient_load_s=math.inf)


def check_horizon(
    load_s: float, confidence: float, horizon_s: float, metric_label: str
) -> LoadCheck:
    """Check whether a load is long enough to show the rare slowdowns that a contract covers.

    A contract has a recurrence horizon, such as 12 minutes: its PASS covers slowdowns of the server
    that recur at least once in 12 minutes on average. A shorter load could miss all of them by
    chance.

    Args:
        load_s: The length of the load.
        confidence: The probability with which at least one such slowdown falls into the load.
        horizon_s: The recurrence horizon of the contract.
        metric_label: The metric as messages name it, such as "ttft p99".
    """
    required_load_s = intervals.length_to_meet_s(horizon_s, confidence)

    # After this analysis the validation may be extended and judged again, with a higher confidence.
    # The sufficient load is what that next analysis needs.
    next_confidence = intervals.next_interim_level(confidence)
    sufficient_load_s = intervals.length_to_meet_s(horizon_s, next_confidence)
    if load_s >= NEARLY_FULL_LENGTH * required_load_s:
        return LoadCheck(sufficient_load_s=sufficient_load_s)

    covered_s = intervals.longest_recurrence_s(load_s, confidence)
    reason = (
        f"run too short: {format.duration(load_s)} of load covers slowdowns that recur within "
        f"{format.duration(covered_s)}, {metric_label} needs {format.duration(horizon_s)}"
    )
    return LoadCheck(reason, sufficient_load_s)


def check_server_samples(sample_size: float | None, load_s: float) -> LoadCheck:
    """Check whether a load is long enough for a server whose speed changes slowly.

    If the speed drifts over minutes, all requests of a minute are similarly fast. They count as few
    independent observations, however many requests there are.

    Args:
        sample_size: The number of independent observations of the server's speed (the effective
            sample size). None if it is not known, which passes the check.
        load_s: The length of the load.
    """
    if sample_size is None:
        return LoadCheck()

    # A size of 0 means that there were too few values to estimate it. The load then counts as one
    # observation.
    measured_samples = sample_size if sample_size > 0 else 1
    sufficient_load_s = scale_load_s(load_s, MIN_SERVER_SAMPLES, measured_samples)
    if sample_size >= MIN_SERVER_SAMPLES:
        return LoadCheck(sufficient_load_s=sufficient_load_s)

    reason = (
        "run too short: the speed of the server changes slowly, so the effective sample size is "
        f"{math.floor(sample_size)}, {MIN_SERVER_SAMPLES} needed"
    )
    return LoadCheck(reason, sufficient_load_s)


class QueueSeries(NamedTuple):
    """The values of one run whose metric includes queueing, and its mean residence time."""

    samples: TimedValues
    residence_ns: float

    def estimate_sample_size(self) -> float:
        """Return the number of independent observations of the queue that the values give."""
        return steady_state.estimate_queue_sample_size(self.samples, self.residence_ns)


def check_queue_samples(
    runs: Sequence[QueueSeries], required_samples: int, load_s: float
) -> LoadCheck:
    """Check whether the queue of a server changed often enough for a confidence interval.

    The interval comes from batch means: the load is split into intervals of time, whose means are
    treated as independent. A long queue can last for several intervals. Neighbouring means are then
    alike, and the confidence interval would be too narrow.

    Args:
        runs: The values of each run.
        required_samples: The number of independent observations of the queue that are needed.
        load_s: The length of the load.
    """
    sample_size = sum(run.estimate_sample_size() for run in runs)
    if sample_size >= required_samples:
        return LoadCheck()

    # How much more load is needed depends on how strongly its values are correlated over time,
    # which the run with the most values shows best.
    largest_run = max(runs, key=_count_values)
    missing_samples = required_samples - sample_size
    additional_ns = steady_state.compute_load_for_sample_size_ns(
        missing_samples, largest_run.samples, largest_run.residence_ns
    )
    sufficient_load_s = load_s + PLANNING_MARGIN * additional_ns / NS_PER_S
    reason = (
        "run too short: the queue changes slowly, so the effective sample size is "
        f"{sample_size:.0f}, {required_samples} needed"
    )

    return LoadCheck(reason, sufficient_load_s)


def _count_values(run: QueueSeries) -> int:
    """Return the number of values of a run."""
    return len(run.samples.values)


def check_queue_tail(
    sample_size: float, load: LoadLength, p: float, confidence: float, metric_label: str
) -> LoadCheck:
    """Check whether the queue of a server changed often enough for a tail quantile such as p99.

    The slowest 1 % of requests mostly meet the longest queues. Requests that are close together in
    time wait in the same queue, so what counts is not how many requests there are but how often the
    queue was observed independently. With n observations, all of them miss the longest 1 % of
    queues with probability 0.99 ** n, which must be unlikely.

    Args:
        sample_size: The number of independent observations of the queue in the load (the effective
            sample size). 0 if it could not be estimated.
        load: The length of the load.
        p: The quantile.
        confidence: The confidence with which the load must include one of the longest queues.
        metric_label: The metric as messages name it, such as "ttft p99".
    """
    required_samples = intervals.observations_to_see(p, confidence)

    # Without an estimate, a longer load is planned with one observation per residence time.
    planning_samples = sample_size if sample_size > 0 else load.residence_times
    sufficient_load_s = _compute_load_for_next_analysis_s(
        load.seconds, p, confidence, planning_samples
    )
    if sample_size >= required_samples:
        return LoadCheck(sufficient_load_s=sufficient_load_s)

    residence = format.duration(load.seconds / load.residence_times)
    reason = (
        f"run too short: requests take {residence} on average, so the load shows {sample_size:.0f} "
        f"independent states of the queue, {required_samples} needed for {metric_label}"
    )
    return LoadCheck(reason, sufficient_load_s)


def check_tail_clusters(values: RunSeries, p: float, confidence: float, load_s: float) -> LoadCheck:
    """Check whether the slowest requests of a load came at enough different times.

    If they came in a few clusters, such as one bad minute, a tail quantile is based on few
    independent events. A quantile near the median is not checked, because it needs so few events
    that `quantile_interval.estimate_quantile` is safe for any sample.

    Args:
        values: The values of each run, in order of time.
        p: The quantile.
        confidence: The confidence of its interval.
        load_s: The length of the load.
    """
    required_samples = intervals.observations_to_see(p, confidence)
    is_near_median = required_samples <= quantile_interval.MIN_EFFECTIVE_SIZE
    if is_near_median:
        return LoadCheck()

    sample_size = quantile_interval.estimate_quantile_sample_size(values, p, confidence)
    sufficient_load_s = _compute_load_for_next_analysis_s(load_s, p, confidence, sample_size)
    if sample_size >= required_samples:
        return LoadCheck(sufficient_load_s=sufficient_load_s)

    request_count = sum(len(run_values) for run_values in values)
    percentile = f"p{p * 100:g}"
    reason = (
        f"run too short: the slowest of {request_count:,} requests came in a few clusters, so the "
        f"effective sample size is {sample_size:.0f}, {required_samples} needed for {percentile}"
    )

    return LoadCheck(reason, sufficient_load_s)


def _compute_load_for_next_analysis_s(
    load_s: float, p: float, confidence: float, measured_samples: float
) -> float:
    """Return how long a load must be in all, in seconds, to decide a quantile after an extension.

    If a validation is extended by more runs, all its runs are judged again (an interim analysis).
    Each analysis could be wrong by chance. To limit the chance of any wrong verdict, each one has a
    higher confidence than the one before, and needs a larger sample.

    Args:
        load_s: The length of the load so far.
        p: The quantile, such as 0.99.
        confidence: The confidence of the current analysis.
        measured_samples: The number of independent observations in the load so far.
    """
    next_confidence = intervals.next_interim_level(confidence)
    required_samples = intervals.observations_to_see(p, next_confidence)
    # The sample is assumed to grow in proportion to the load.
    return scale_load_s(load_s, required_samples, measured_samples)
