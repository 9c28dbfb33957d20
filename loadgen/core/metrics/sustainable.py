"""Judges whether a load was sustained: the server kept up with it, and nothing grew.

Pure. A run that meets every limit may still be a queue that had no time to grow beyond them. Two
tests look at the second half of the measured load, `shortfall` and `growth`. The first half is left
out because a server fills in it and its queue grows for that reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from loadgen.core import format
from loadgen.core.limits import FAILURE_SHARE
from loadgen.core.metrics.columns import FAILED, LOST, drop_undefined, join_arrays
from loadgen.core.metrics.growth import TestedTime, find_growth, measure_replicas
from loadgen.core.metrics.shortfall import (
    MIN_DELIVERED_SHARE,
    MIN_DURATIONS,
    MIN_GROWTH_SHARE,
    find_shortfall,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.metrics.growth import Growth, GrowthTest, ReplicaSeries
    from loadgen.core.metrics.shortfall import Shortfall
    from loadgen.core.metrics.windows import Window
    from loadgen.core.results.manifest import RunManifest, StagePlan

MIN_REQUESTS = 64
"""So many requests must be due in the second half of a load, at each target or replica."""

MAX_DETECTABLE_SHARE = 1.0
"""Nothing is said of a load in which not even a growth by its own mean would be detected."""

MAX_PROPOSED_FACTOR = 4.0
"""A load that was too noisy is proposed to be repeated at most so many times as long."""

CONFIRMATION_FACTOR = 2.0
"""The confirmation of a sustained load lasts so many times as long as a run by the rules."""

SustainedCode = Literal[
    "not_judged",  # the kind of load or the state of the run does not allow a judgement
    "too_short",
    "too_few",
    "too_noisy",
    "may_grow",
    "failures",
    "falls_behind",
    "grows",
    "steady",
]


class Sustainable(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the load was sustained, and why.

    Growth is over the time tested, as a share of the mean.

    Attributes:
        sustained: None if it is not known.
        code: The reason, for programs.
        reason: The reason, as a sentence.
        start_s: Start of the time tested.
        end_s: End of the time tested.
        parts: Number of targets or replicas tested.
        growing: The names of those that grew, the one that grew most first.
        growth_share: The growth of the one that grew most, of the series named in `reason`.
        visible_share: The smallest growth that would have been seen in each of them.
        needed_s: The length of the load that would decide, where a longer one would.
        work_growth_share: How much longer prompts or responses became over the time tested. None
            if not beyond chance.
    """

    sustained: bool | None = None
    code: SustainedCode = "not_judged"
    reason: str = msgspec.field(default="not judged", name="why")
    start_s: float | None = None
    end_s: float | None = None
    parts: int = 0
    growing: tuple[str, ...] = ()
    growth_share: float | None = None
    visible_share: float | None = None
    needed_s: float | None = None
    work_growth_share: float | None = None


def judge_load(
    measured_stages: Sequence[Columns],
    warmup_stages: Sequence[Columns],
    window: Window,
    manifest: RunManifest,
) -> Sustainable:
    """Judge whether the servers kept up with the measured load of a run.

    A server does not keep up if latencies or queues grew over time, or if it delivered fewer
    responses than the arrivals required.

    Args:
        measured_stages: The records of each measured stage.
        warmup_stages: The records of each other stage, whose requests may still be in flight.
        window: The measurement window.
        manifest: The manifest of the run.
    """
    stages = [stage for stage in manifest.stages if stage.measured]
    reason = _reason_not_to_judge(stages, manifest)
    if reason:
        return Sustainable(reason=reason)

    judgement = _judge_by_growth(measured_stages, warmup_stages, window, manifest)
    has_grown = judgement.sustained is False
    if has_grown:
        return judgement

    # In a closed loop, requests wait for responses, so no number of responses is required.
    is_open_loop = not any(stage.closed for stage in stages)
    shortfall = find_shortfall(measured_stages) if is_open_loop else None
    if shortfall is not None:
        return _with_shortfall(judgement, shortfall)

    if judgement.sustained:
        return _undecided_if_many_failed(judgement, measured_stages)
    return judgement


def _with_shortfall(judgement: Sustainable, shortfall: Shortfall) -> Sustainable:
    """Return a judgement with the outcome that the server fell behind the arrivals.

    Args:
        judgement: The judgement of whether latencies or queues grew.
        shortfall: How many fewer responses than required the server delivered.
    """
    return msgspec.structs.replace(
        judgement, sustained=False, code="falls_behind", reason=shortfall.text, needed_s=None
    )


def _reason_not_to_judge(stages: Sequence[StagePlan], manifest: RunManifest) -> str:
    """Return why the load of a run cannot be judged, or "" if it can."""
    if manifest.state not in ("finished", "running"):
        return "the run did not finish"

    if len(stages) > 1:
        return "several loads were measured one after the other"

    if not stages:
        return ""  # without measured requests, there is no steady state to judge

    # An open loop sends requests at planned times. Its rate may change over time.
    stage = stages[0]
    is_open_loop = not stage.closed
    has_constant_rate = stage.rate is not None
    if is_open_loop and not has_constant_rate:
        return f"the load changes over time by design ({stage.arrival})"

    return ""


def _undecided_if_many_failed(
    judgement: Sustainable, measured_stages: Sequence[Columns]
) -> Sustainable:
    """Return the judgement of a sustained load, or an undecided one if many requests failed.

    A server that rejects requests has a short queue although it does not keep up.

    Args:
        judgement: The judgement without regard to failures.
        measured_stages: The records of each measured stage.
    """
    requests = sum(map(len, measured_stages))
    failed = sum(map(_count_failed, measured_stages))
    if failed <= FAILURE_SHARE * requests:
        return judgement

    reason = (
        f"{failed:,} of {requests:,} requests failed, and a queue does not grow if the server "
        "rejects requests"
    )
    return msgspec.structs.replace(judgement, sustained=None, code="failures", reason=reason)


def _count_failed(columns: Columns) -> int:
    """Return the number of failed and lost requests of a stage."""
    has_failed = columns.has_status(FAILED) | columns.has_status(LOST)
    return int(has_failed.sum())


def _judge_by_growth(
    measured_stages: Sequence[Columns],
    warmup_stages: Sequence[Columns],
    window: Window,
    manifest: RunManifest,
) -> Sustainable:
    """Judge whether latencies or queues grow in the second half of the steady state.

    Args:
        measured_stages: The records of each measured stage.
        warmup_stages: The records of each other stage, whose requests may still be in flight.
        window: The measurement window.
        manifest: The manifest of the run.
    """
    steady = window.steady
    if steady.start_s is None or steady.end_s is None:
        return _judge_without_steady_state(measured_stages)

    request_ns = _median_e2e_ns(measured_stages)
    if request_ns is None:
        return Sustainable(reason="no request succeeded")

    middle_s = (steady.start_s + steady.end_s) / 2
    tested_time = TestedTime(start_ns=middle_s * 1e9, end_ns=steady.end_s * 1e9)

    # A queue needs the time of several requests to grow visibly.
    tested_ns = tested_time.end_ns - tested_time.start_ns
    if tested_ns < MIN_DURATIONS * request_ns:
        return _report_short_load(load_s=steady.end_s - steady.start_s, request_s=request_ns / 1e9)

    replicas = measure_replicas(measured_stages, warmup_stages, tested_time, manifest)
    return _judge_series(replicas, tested_time)


def _median_e2e_ns(measured_stages: Sequence[Columns]) -> float | None:
    """Return the median end-to-end latency of the ok requests in ns, None if there are none."""
    e2e_ns_of_stages = []
    for columns in measured_stages:
        e2e_ns = columns.measure("e2e")[columns.is_ok]
        e2e_ns_of_stages.append(drop_undefined(e2e_ns))

    all_e2e_ns = join_arrays(e2e_ns_of_stages)
    return float(np.median(all_e2e_ns)) if len(all_e2e_ns) else None


def _judge_without_steady_state(measured_stages: Sequence[Columns]) -> Sustainable:
    """Return why a load without a steady state cannot be judged.

    Either all measured requests were due at the same time, or there was no time at which only
    measured requests were in flight, because those of the warm-up lasted so long.
    """
    due_ns_of_stages = [columns["due_ns"][columns.reached_due_time] for columns in measured_stages]
    due_ns = join_arrays(due_ns_of_stages)
    are_due_at_once = len(due_ns) == 0 or int(due_ns.max()) == int(due_ns.min())
    if are_due_at_once:
        return Sustainable(
            code="not_judged",
            reason="all requests are scheduled at the same time, so nothing can grow over time",
        )

    return Sustainable(
        code="too_short",
        reason="too short: at no time was the load only that of measured requests",
    )


def _report_short_load(load_s: float, request_s: float) -> Sustainable:
    """Return the judgement of a load that is short compared with the duration of its requests.

    Args:
        load_s: The length of the steady state.
        request_s: The median duration of a request.
    """
    # The second half, which is tested, has to last MIN_DURATIONS requests.
    needed_s = 2 * MIN_DURATIONS * request_s
    reason = (
        f"too short: the steady state lasted {format.duration(load_s)}, but "
        f"{format.duration(needed_s)} are needed because a request takes "
        f"{format.duration(request_s)} (p50)"
    )
    return Sustainable(code="too_short", reason=reason, needed_s=needed_s)


def _judge_series(replicas: Sequence[ReplicaSeries], tested_time: TestedTime) -> Sustainable:
    """Judge whether latencies or queues grew at any replica.

    If a replica got too few requests for a test, the result says so. A replica is one of several
    servers behind an address, or a target.

    Args:
        replicas: The requests in flight and the latencies of each replica over time.
        tested_time: The part of the load that is tested.
    """
    if not replicas:
        return _report_few_requests(
            due_requests=0, replica_name="", tested_time=tested_time, replica_count=0
        )

    for replica in replicas:
        if replica.due_requests < MIN_REQUESTS:
            return _report_few_requests(
                replica.due_requests, replica.name, tested_time, replica_count=len(replicas)
            )

    growth_test = find_growth(replicas)
    return _GrowthReport(replicas, tested_time, growth_test).judge()


def _report_few_requests(
    due_requests: int, replica_name: str, tested_time: TestedTime, replica_count: int
) -> Sustainable:
    """Return the judgement of a load with too few requests at one replica, and a longer length.

    Args:
        due_requests: The requests of the replica that were due in the tested time.
        replica_name: The name of the replica, "" if there is one server.
        tested_time: The part of the load that is tested, which is its second half.
        replica_count: The number of all replicas.
    """
    where = f" at {replica_name}" if replica_name else ""
    reason = (
        f"too few requests: {due_requests} in the second half of the load "
        f"({tested_time.duration_s:,.0f} s){where}, {MIN_REQUESTS} needed"
    )

    # The length of a load with enough requests at the same rate.
    needed_s = None
    if due_requests:
        load_s = 2 * tested_time.duration_s
        needed_s = load_s * MIN_REQUESTS / due_requests

    return Sustainable(code="too_few", reason=reason, parts=replica_count, needed_s=needed_s)


def _has_short_queues(replicas: Sequence[ReplicaSeries]) -> bool:
    """Return True if so few requests were in flight at each replica that all of them kept up.

    A replica keeps up if it delivers at least the share MIN_DELIVERED_SHARE of the due requests.
    The others are in flight at the end: of 1,000 due requests, a replica that delivers less than
    95 % has more than 50 in flight. So a replica that never has 50 in flight keeps up.
    """
    max_undelivered_share = 1 - MIN_DELIVERED_SHARE
    return all(
        float(replica.in_flight.max()) < max_undelivered_share * replica.due_requests
        for replica in replicas
    )


@dataclass(frozen=True)
class _GrowthReport:
    """Turns the growth test of all replicas into a judgement with its sentence.

    Attributes:
        replicas: The series of each replica, or of each target, at least one.
        tested_time: The second half of the load, in which growth was looked for.
        test: The result of the test of all series.
    """

    replicas: Sequence[ReplicaSeries]
    tested_time: TestedTime
    test: GrowthTest

    @property
    def _per_replica_phrase(self) -> str:
        """The phrase " per replica" or " per target", "" for a single one."""
        has_several_replicas = len(self.replicas) > 1
        return f" per {_noun_for(self.replicas[0])}" if has_several_replicas else ""

    @property
    def _time_phrase(self) -> str:
        """A phrase such as "the second half (300 s), corrected for requests that grew 5%".

        Requests that become longer let latencies and queues grow, for which the test corrects.
        """
        phrase = f"the second half ({self.tested_time.duration_s:,.0f} s)"
        if self.test.work_growth_share is None:
            return phrase
        return f"{phrase}, corrected for requests that grew {self.test.work_growth_share:.0%}"

    def judge(self) -> Sustainable:
        """Return whether the load was sustained according to the growth test.

        A load that shows no growth is sustained only if a growth would have been detected, or if
        queues were short anyway.
        """
        if self.test.certain_growths:
            return self._report_growth()
        if self.test.possible_growths:
            return self._report_possible_growth()
        if self.test.detectable_share <= MAX_DETECTABLE_SHARE:
            return self._report_no_growth()
        if _has_short_queues(self.replicas):
            return self._report_short_queues()

        return self._report_noise()

    def _make_judgement(
        self,
        code: SustainedCode,
        reason: str,
        *,
        sustained: bool | None,
        growing: tuple[str, ...] = (),
        growth_share: float | None = None,
        needed_s: float | None = None,
    ) -> Sustainable:
        """Return a judgement with the result of the growth test.

        Args:
            code: The code of the outcome.
            reason: The outcome as a sentence.
            sustained: Whether the server can sustain the load. None if that is not known.
            growing: The names of the replicas at which something certainly grew.
            growth_share: The largest growth, as a share of the mean.
            needed_s: The length of a load that would decide.
        """
        detectable_share = self.test.detectable_share
        return Sustainable(
            sustained=sustained,
            code=code,
            reason=reason,
            start_s=float(self.tested_time.start_ns / 1e9),
            end_s=float(self.tested_time.end_ns / 1e9),
            parts=len(self.replicas),
            growing=growing,
            growth_share=growth_share,
            visible_share=detectable_share if math.isfinite(detectable_share) else None,
            needed_s=needed_s,
            work_growth_share=self.test.work_growth_share,
        )

    def _report_growth(self) -> Sustainable:
        """Return the judgement of a load under which latencies or queues certainly grew."""
        growths = sorted(self.test.certain_growths, reverse=True)
        largest = growths[0]

        # The names of the affected replicas. A dictionary removes repeated names, and preserves
        # the order.
        replicas = [growth.replica for growth in growths if growth.replica]
        affected = tuple(dict.fromkeys(replicas))

        series = _series_of(largest)
        change = _format_change(largest)
        reason = f"upward trend in {series}, {change} in {self._time_phrase}"
        replica_count = len(self.replicas)
        if replica_count > 1:
            plural_noun = f"{_noun_for(self.replicas[0])}s"
            reason += f"; {len(affected)} of {replica_count} {plural_noun} are affected"

        return self._make_judgement(
            "grows", reason, sustained=False, growing=affected, growth_share=largest.share
        )

    def _report_possible_growth(self) -> Sustainable:
        """Return the judgement of a load under which a series may grow."""
        largest = max(self.test.possible_growths)
        reason = (
            f"possible upward trend in {_series_of(largest)}, {_format_change(largest)} in "
            f"{self._time_phrase}, which may be chance. Use a longer --duration"
        )
        return self._make_judgement("may_grow", reason, sustained=None, growth_share=largest.share)

    def _report_no_growth(self) -> Sustainable:
        """Return the judgement of a load under which nothing grows.

        The sentence has the detection threshold, the smallest growth that would be reported.
        """
        threshold = max(self.test.detectable_share, MIN_GROWTH_SHARE)
        reason = (
            f"no upward trend in TTFT or concurrency in {self._time_phrase}; detection threshold "
            f"{threshold:.0%}{self._per_replica_phrase}"
        )
        return self._make_judgement("steady", reason, sustained=True)

    def _report_short_queues(self) -> Sustainable:
        """Return the judgement of a load that had few requests in flight, so the server kept up."""
        most_in_flight = max(float(replica.in_flight.max()) for replica in self.replicas)
        reason = (
            f"the server kept up: at most {most_in_flight:,.0f} requests were in flight"
            f"{self._per_replica_phrase} in {self._time_phrase}, less than "
            f"{1 - MIN_DELIVERED_SHARE:.0%} of the scheduled requests"
        )
        return self._make_judgement("steady", reason, sustained=True)

    def _report_noise(self) -> Sustainable:
        """Return the judgement of a load that is too noisy to detect a growth, and a longer length.

        The detection threshold is the smallest growth that the test would have detected. It is
        infinite if nothing could be tested.
        """
        threshold = self.test.detectable_share
        threshold_text = f"{threshold:.0%}" if math.isfinite(threshold) else "unlimited"
        reason = (
            f"no upward trend in {self._time_phrase}, but the detection threshold is "
            f"{threshold_text}. Use a longer --duration"
        )

        # The threshold of a longer load is smaller. The tested time is half of the load.
        load_s = 2 * self.tested_time.duration_s
        needed_s = load_s * _needed_length_factor(threshold)
        return self._make_judgement("too_noisy", reason, sustained=None, needed_s=needed_s)


def _noun_for(replica: ReplicaSeries) -> str:
    """Return what sentences call one of several servers: "replica" or "target".

    Servers behind one address have names such as "replica 3". Other names are those of targets.
    """
    return "replica" if replica.name.startswith("replica ") else "target"


def _needed_length_factor(threshold_share: float) -> float:
    """Return how many times as long a load has to be to find a growth of MAX_DETECTABLE_SHARE.

    The smallest growth that can be found falls with the square root of the length. To find a growth
    of 1 instead of 1.5, the load has to last (1.5 / 1)^2 = 2.25 times as long.

    Args:
        threshold_share: The smallest growth that could be found, as a share of the mean.
    """
    needed_factor = (threshold_share / MAX_DETECTABLE_SHARE) ** 2
    return min(needed_factor, MAX_PROPOSED_FACTOR)


def _series_of(growth: Growth) -> str:
    """Return the name of the series that grows, such as "TTFT of replica 3"."""
    return f"{growth.series} of {growth.replica}" if growth.replica else growth.series


def _format_change(growth: Growth) -> str:
    """Return the first and the last value of a series that grows, with the unit."""
    if growth.series == "TTFT":
        return f"from {growth.first / 1e6:,.0f} to {growth.last / 1e6:,.0f} ms"
    return f"from {growth.first:,.4g} to {growth.last:,.4g}"
