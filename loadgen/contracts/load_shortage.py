"""Reasons why a load is too short to judge a term, and the length of load that would be enough.

A sample can be too small for an upper bound although it has many requests: requests close together
in time fare alike, and a load sees only what happens during it. This module is pure.
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


class LoadShortage(NamedTuple):
    """The reason why a load is too short for an estimate, if it is.

    Attributes:
        reason: The reason, or "" if the load is long enough.
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

    def with_prefix(self, prefix: str) -> LoadShortage:
        """Return the shortage with a prefix before its reason, if it has one."""
        if not self.is_short:
            return self
        return self._replace(reason=f"{prefix}: {self.reason}")


class LoadLength(NamedTuple):
    """The length of the load of all runs, in mean residence times of a request and in seconds."""

    residences: float
    seconds: float


def combine_shortages(*groups: Sequence[LoadShortage]) -> LoadShortage:
    """Return the first reason of each group, and the load that is enough for all."""
    reasons = []
    sufficient_load_s = 0.0
    for group in groups:
        group_reasons = [shortage.reason for shortage in group if shortage.is_short]
        reasons.extend(group_reasons[:1])
        sufficient_load_s = max(
            [sufficient_load_s, *(shortage.sufficient_load_s for shortage in group)]
        )
    return LoadShortage("; and ".join(reasons), sufficient_load_s)


def scale_load_s(load_s: float, required: float, seen: float) -> float:
    """Return the load that contains `required` of what a load contained `seen` of."""
    return PLANNING_MARGIN * load_s * required / seen if seen else math.inf


def find_startup_shortage(load_s: float) -> LoadShortage:
    """Return the shortage of a load whose start-up did not end in its first half."""
    reason = (
        f"after {format.duration(load_s / 2)} of load the start-up was not over, so what a "
        "steady load gives was not seen (a warm-up stage longer than that before it helps too)"
    )
    return LoadShortage(reason, math.inf)


def find_horizon_shortage(
    load_s: float, confidence: float, horizon_s: float, metric_text: str
) -> LoadShortage:
    """Return the shortage of a load that is too short for events that recur rarely."""
    sufficient_load_s = intervals.length_to_meet_s(
        horizon_s, intervals.next_interim_level(confidence)
    )
    if load_s >= NEARLY_FULL_LENGTH * intervals.length_to_meet_s(horizon_s, confidence):
        return LoadShortage(sufficient_load_s=sufficient_load_s)
    covered_s = intervals.longest_recurrence_s(load_s, confidence)
    reason = (
        f"a load of {format.duration(load_s)} sees what comes back within "
        f"{format.duration(covered_s)}; {metric_text} needs {format.duration(horizon_s)}"
    )
    return LoadShortage(reason, sufficient_load_s)


def find_server_shortage(sample_size: float | None, load_s: float) -> LoadShortage:
    """Return the shortage of a load with too few samples of a slowly changing server."""
    if sample_size is None:
        return LoadShortage()
    sufficient_load_s = scale_load_s(load_s, MIN_SERVER_SAMPLES, sample_size or 1)
    if sample_size >= MIN_SERVER_SAMPLES:
        return LoadShortage(sufficient_load_s=sufficient_load_s)
    reason = (
        "a server that changes slowly: this load is worth some "
        f"{math.floor(sample_size)} independent samples of it; {MIN_SERVER_SAMPLES} needed"
    )
    return LoadShortage(reason, sufficient_load_s)


def find_queue_shortage(
    sample_size: float,
    required: int,
    load_s: float,
    timed_samples: Sequence[TimedValues],
    residences_ns: Sequence[float],
) -> LoadShortage:
    """Return the shortage of a load whose batches do not represent its queue.

    Queue states may last so long that neighbouring batches fare alike.

    Args:
        sample_size: The independent samples of the queue in the load.
        required: The samples that are needed.
        load_s: The length of the load.
        timed_samples: The values of each run.
        residences_ns: The mean residence time of each run.
    """
    if sample_size >= required:
        return LoadShortage()
    runs = zip(timed_samples, residences_ns, strict=True)
    longest_samples, residence_ns = max(runs, key=_count_samples)
    additional_ns = steady_state.load_for_sample_size_ns(
        required - sample_size, longest_samples, residence_ns
    )
    reason = (
        "a queue that lasts: requests that came one after another fared alike, so this load is "
        f"worth some {sample_size:.0f} independent samples of it; {required} needed"
    )
    return LoadShortage(reason, load_s + PLANNING_MARGIN * additional_ns / 1e9)


def _count_samples(run: tuple[TimedValues, float]) -> int:
    """Return the number of values of a run that is given with its residence time."""
    samples, _ = run
    return len(samples.values)


def find_queue_tail_shortage(
    sample_size: float, load: LoadLength, p: float, confidence: float, metric_text: str
) -> LoadShortage:
    """Return the shortage of a load that saw its queue too rarely for a tail quantile.

    Requests close together see the same queue, so more requests do not help: a bad state that
    lasts the share 1 - p of the time stays unseen with probability p ** sample_size.
    """
    required = intervals.observations_to_see(p, confidence)
    required_at_next = intervals.observations_to_see(p, intervals.next_interim_level(confidence))
    sufficient_load_s = scale_load_s(load.seconds, required_at_next, sample_size or load.residences)
    if sample_size >= required:
        return LoadShortage(sufficient_load_s=sufficient_load_s)
    residence = format.duration(load.seconds / load.residences)
    reason = (
        f"requests stay {residence} on average, so this load saw the queue some {sample_size:.0f} "
        f"times; {metric_text} needs {required}"
    )
    return LoadShortage(reason, sufficient_load_s)


def find_cluster_shortage(
    values: RunSeries, p: float, confidence: float, load_s: float
) -> LoadShortage:
    """Return the shortage of a load whose slowest requests came in a few clusters of time."""
    required = intervals.observations_to_see(p, confidence)
    if required <= quantile_interval.MIN_EFFECTIVE_SIZE:
        return LoadShortage()
    sample_size = quantile_interval.quantile_sample_size(values, p, confidence)
    required_at_next = intervals.observations_to_see(p, intervals.next_interim_level(confidence))
    sufficient_load_s = scale_load_s(load_s, required_at_next, sample_size)
    if sample_size >= required:
        return LoadShortage(sufficient_load_s=sufficient_load_s)
    request_count = sum(map(len, values))
    reason = (
        f"the slowest came together, in a few stretches of the {format.duration(load_s)}: "
        f"{request_count:,} requests are worth some {sample_size:.0f} that do not share their "
        f"fate; p{p * 100:g} needs {required}"
    )
    return LoadShortage(reason, sufficient_load_s)
