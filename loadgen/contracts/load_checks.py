"""Check whether a load is long enough to judge a term, and compute the length that would be.

A sample can be too small for an upper bound although it has many requests: requests close together
in time meet the same state of the server, and a load sees only what happens during it.

Three words of this module: `load_s` is the length of the measured load of all runs together, in
seconds. The residence time of a request is the time from when it is due to its end. A number of
independent samples says how many unrelated observations would show as much as the correlated
requests of the load do (their effective sample size). This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from loadgen.contracts import quantile_interval, steady_state
from loadgen.contracts.quantile_interval import RunSeries
from loadgen.contracts.steady_state import TimedValues
from loadgen.core import format
from loadgen.core.stats import intervals

MIN_SERVER_SAMPLES = 6
"""Independent samples of the server that any latency needs.

With fewer, batches of time do not represent a load that continues: benchmarks/trust.py finds wrong
PASS verdicts.
"""

PLANNING_MARGIN = 1.1
"""Factor on the load that is estimated to be enough, because the estimate itself varies."""

NEARLY_FULL_LENGTH = 0.9
"""Share of a length that counts as that length: a load ends with its last request, not at its
planned end.
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


class LoadCheck(NamedTuple):
    """The result of a check whether a load is long enough for an estimate.

    Attributes:
        reason: Why the load is too short, or "" if it is long enough.
        sufficient_load_s: The load of all runs that is enough if the server continues as it did.
            It is for the confidence of the next interim analysis, and is also set if this load was
            long enough. Infinite if it is not known.
    """

    reason: str = ""
    sufficient_load_s: float = 0.0

    @property
    def is_short(self) -> bool:
        """Whether the load is too short."""
        return bool(self.reason)

    @property
    def known_sufficient_load_s(self) -> float:
        """The load that is enough, or 0 if it is not known."""
        return self.sufficient_load_s if math.isfinite(self.sufficient_load_s) else 0.0

    def sentence(self) -> str:
        """Return the reason and the load that would be enough, or "" if the load is long enough."""
        if not self.is_short:
            return ""
        load = "a longer load"
        if math.isfinite(self.sufficient_load_s):
            load = f"about {format.duration(self.sufficient_load_s)} of load"
        return f"{self.reason}: {load}"

    def with_prefix(self, prefix: str) -> LoadCheck:
        """Return the check with a prefix before its reason, if it has a reason."""
        if not self.is_short:
            return self
        return self._replace(reason=f"{prefix}: {self.reason}")


class LoadLength(NamedTuple):
    """The length of the load of all runs, in mean residence times of a request and in seconds."""

    residences: float
    seconds: float


def combine_load_checks(*groups: Sequence[LoadCheck]) -> LoadCheck:
    """Return one check that stands for several.

    Its reason joins the first reason of each group, because the reasons of one group have the same
    cause. Its sufficient load is the largest, which is enough for all.
    """
    reasons = []
    sufficient_load_s = 0.0
    for group in groups:
        group_reasons = [load_check.reason for load_check in group if load_check.is_short]
        reasons.extend(group_reasons[:1])
        sufficient_load_s = max(
            [sufficient_load_s, *(load_check.sufficient_load_s for load_check in group)]
        )
    return LoadCheck("; and ".join(reasons), sufficient_load_s)


def scale_load_s(load_s: float, required: float, seen: float) -> float:
    """Return the load that gives a required number of samples, in seconds.

    The number of samples is taken to grow in proportion to the load. The result has a margin.
    Return infinity if no sample was seen.

    Args:
        load_s: The load that was measured.
        required: The number of samples that are required.
        seen: The number of samples in the measured load.
    """
    if not seen:
        return math.inf
    return PLANNING_MARGIN * load_s * required / seen


def describe_unfinished_startup(load_s: float) -> LoadCheck:
    """Return the failed check of a load whose start-up did not end in its first half.

    A server begins empty and therefore fast. How much longer the start-up would have taken is not
    known, so no sufficient load is given.
    """
    reason = (
        f"after {format.duration(load_s / 2)} of load the start-up was not over, so what a "
        "steady load gives was not seen (a warm-up stage longer than that before it helps too)"
    )
    return LoadCheck(reason, math.inf)


def check_horizon(
    load_s: float, confidence: float, horizon_s: float, metric_text: str
) -> LoadCheck:
    """Check whether a load is long enough to meet events that recur within the horizon.

    The horizon of a contract, such as 12 minutes, is the longest mean time between two events, such
    as slow phases of the server, that a PASS takes into account. A load that is shorter than the
    events are apart can miss them all.

    Args:
        load_s: The length of the load.
        confidence: The confidence with which an event has to be met.
        horizon_s: The horizon of the contract.
        metric_text: The metric for people, such as "ttft p99".
    """
    sufficient_load_s = intervals.length_to_meet_s(
        horizon_s, intervals.next_interim_level(confidence)
    )
    if load_s >= NEARLY_FULL_LENGTH * intervals.length_to_meet_s(horizon_s, confidence):
        return LoadCheck(sufficient_load_s=sufficient_load_s)
    covered_s = intervals.longest_recurrence_s(load_s, confidence)
    reason = (
        f"a load of {format.duration(load_s)} sees what comes back within "
        f"{format.duration(covered_s)}; {metric_text} needs {format.duration(horizon_s)}"
    )
    return LoadCheck(reason, sufficient_load_s)


def check_server_samples(sample_size: float | None, load_s: float) -> LoadCheck:
    """Check whether a load saw enough independent states of a server that changes slowly.

    A server whose speed drifts over minutes shows few of its states in a short load, however many
    requests there are.

    Args:
        sample_size: The independent samples of the server in the load. None if they are not known,
            which passes the check.
        load_s: The length of the load.
    """
    if sample_size is None:
        return LoadCheck()
    # A size of 0 could not be estimated from so few values: the load counts as one sample.
    seen_samples = sample_size or 1
    sufficient_load_s = scale_load_s(load_s, MIN_SERVER_SAMPLES, seen_samples)
    if sample_size >= MIN_SERVER_SAMPLES:
        return LoadCheck(sufficient_load_s=sufficient_load_s)
    reason = (
        "a server that changes slowly: this load is worth some "
        f"{math.floor(sample_size)} independent samples of it; {MIN_SERVER_SAMPLES} needed"
    )
    return LoadCheck(reason, sufficient_load_s)


def check_queue_samples(
    sample_size: float,
    required: int,
    load_s: float,
    timed_samples: Sequence[TimedValues],
    residences_ns: Sequence[float],
) -> LoadCheck:
    """Check whether a load saw enough independent states of its queue for batch means.

    The interval of a mean treats batches of time as independent. A long queue can last for several
    batches, so that neighbouring ones are alike and the interval would be too narrow.

    Args:
        sample_size: The independent samples of the queue in the load.
        required: The samples that are needed.
        load_s: The length of the load.
        timed_samples: The values of each run.
        residences_ns: The mean residence time of each run.
    """
    if sample_size >= required:
        return LoadCheck()
    runs = zip(timed_samples, residences_ns, strict=True)
    longest_samples, residence_ns = max(runs, key=_count_samples)
    additional_ns = steady_state.load_for_sample_size_ns(
        required - sample_size, longest_samples, residence_ns
    )
    reason = (
        "a queue that lasts: requests that came one after another fared alike, so this load is "
        f"worth some {sample_size:.0f} independent samples of it; {required} needed"
    )
    return LoadCheck(reason, load_s + PLANNING_MARGIN * additional_ns / 1e9)


def _count_samples(run: tuple[TimedValues, float]) -> int:
    """Return the number of values of a run that is given with its residence time."""
    samples, _ = run
    return len(samples.values)


def check_queue_tail(
    sample_size: float, load: LoadLength, p: float, confidence: float, metric_text: str
) -> LoadCheck:
    """Check whether a load saw its queue often enough for a tail quantile such as p99.

    Requests close together see the same queue, so more requests do not help: a bad state that
    lasts the share 1 - p of the time stays unseen with probability p ** sample_size.

    Args:
        sample_size: The independent samples of the queue in the load.
        load: The length of the load.
        p: The quantile.
        confidence: The confidence with which the bad state has to be seen.
        metric_text: The metric for people, such as "ttft p99".
    """
    required = intervals.observations_to_see(p, confidence)
    required_at_next = intervals.observations_to_see(p, intervals.next_interim_level(confidence))
    # A size of 0 means that it could not be estimated: then each residence time counts as a sample.
    seen_samples = sample_size or load.residences
    sufficient_load_s = scale_load_s(load.seconds, required_at_next, seen_samples)
    if sample_size >= required:
        return LoadCheck(sufficient_load_s=sufficient_load_s)
    residence = format.duration(load.seconds / load.residences)
    reason = (
        f"requests stay {residence} on average, so this load saw the queue some {sample_size:.0f} "
        f"times; {metric_text} needs {required}"
    )
    return LoadCheck(reason, sufficient_load_s)


def check_tail_clusters(values: RunSeries, p: float, confidence: float, load_s: float) -> LoadCheck:
    """Check whether the slowest requests of a load came at enough different times.

    If they came in a few clusters, such as one bad minute, the quantile rests on few independent
    events. A quantile near the median needs no such check: few samples are enough for it.

    Args:
        values: The values of each run, in order of time.
        p: The quantile.
        confidence: The confidence of its interval.
        load_s: The length of the load.
    """
    required = intervals.observations_to_see(p, confidence)
    if required <= quantile_interval.MIN_EFFECTIVE_SIZE:
        return LoadCheck()
    sample_size = quantile_interval.quantile_sample_size(values, p, confidence)
    required_at_next = intervals.observations_to_see(p, intervals.next_interim_level(confidence))
    sufficient_load_s = scale_load_s(load_s, required_at_next, sample_size)
    if sample_size >= required:
        return LoadCheck(sufficient_load_s=sufficient_load_s)
    request_count = sum(map(len, values))
    reason = (
        f"the slowest came together, in a few stretches of the {format.duration(load_s)}: "
        f"{request_count:,} requests are worth some {sample_size:.0f} that do not share their "
        f"fate; p{p * 100:g} needs {required}"
    )
    return LoadCheck(reason, sufficient_load_s)
