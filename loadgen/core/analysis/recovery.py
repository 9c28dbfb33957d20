"""Measure how long it took to meet the SLO again after a spike or a change of the replicas.

Pure. A spike is a measured stage whose load is higher than that of the measured stage after it. The
servers' metrics pages tell the number of replicas (see `series.count_replicas`), and a target that
stopped responding counts as lost.

The requests after an event are examined in groups of GROUP_SIZE by scheduled time, up to the next
spike or loss (a new replica belongs to the recovery), and after a spike at most to the end of the
next stage. A group meets the SLO if each objective holds for its share of the group: all requests
for a p99. The SLO is met again at the first request after the last group that misses it, so one
late miss counts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core import format
from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import join_selected
from loadgen.core.metrics.sections import Recovery
from loadgen.core.server_metrics import series
from loadgen.core.slo import Slo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.results.manifest import RunManifest, StagePlan
    from loadgen.core.server_metrics.series import MetricSample

GROUP_SIZE = 20
ROUNDING = 1e-9
"""Added to the number of allowed misses, because 20 * (1 - 0.9) is 1.9999999999999996 and not 2."""
_NEVER_NS = 1 << 62
"""A time after all requests."""
_BEFORE_RUN_NS = -1
"""A time before the start of the run, and so before all requests."""


class _TimedEvent(NamedTuple):
    """An event, with the times before and after the event at which requests are examined.

    Requests that are scheduled from `start_ns` to before `at_ns` are before the event, and those
    from `at_ns` to before `end_ns` are after the event.

    Attributes:
        unmeasured: What the event was and when, as a recovery of which nothing is measured yet.
        start_ns: The start of the time before the event.
        at_ns: The time of the event.
        end_ns: The end of the time after the event.
    """

    unmeasured: Recovery
    start_ns: int
    at_ns: int
    end_ns: int

    @property
    def disturbance_ns(self) -> int | None:
        """From when on the event makes the SLO harder to meet, or None for a new replica.

        A spike does so from its start, although as an event it is the end of the spike.
        """
        if self.unmeasured.event == "scale_up":
            return None
        return self.start_ns if self.unmeasured.event == "spike" else self.at_ns


class _Groups(NamedTuple):
    """Requests that the SLO counts, in groups of GROUP_SIZE by scheduled time.

    Group `i` begins with request `i * GROUP_SIZE`. The last group also has the remaining requests.

    Attributes:
        due_ns: The scheduled times of the requests, in ascending order.
        meets_slo: Which groups meet the SLO.
    """

    due_ns: NDArray[np.int64]
    meets_slo: NDArray[np.bool_]

    @property
    def group_count(self) -> int:
        """The number of groups, 0 for fewer than GROUP_SIZE requests."""
        return len(self.meets_slo)


def measure_recoveries(
    measured_stages: Sequence[Columns], manifest: RunManifest, samples: Sequence[MetricSample] = ()
) -> tuple[Recovery, ...]:
    """Return how long the run took to meet its SLO again after each event, in order of time.

    Events are ends of load spikes, and changes of the number of replicas or targets. The result is
    empty without an SLO for single requests.

    Args:
        measured_stages: The records of each measured stage.
        manifest: The manifest of the run.
        samples: The samples of the servers' metrics pages.
    """
    slo = manifest.slo
    if slo is None:
        return ()
    limits_single_requests = bool(slo.terms) or slo.goodput_share is not None
    if not limits_single_requests:
        return ()

    events = [
        *_find_spikes(manifest.stages),
        *_find_capacity_changes(measured_stages, manifest, samples),
    ]
    events.sort(key=lambda event: event.at_ns)

    return tuple(
        _measure_recovery(measured_stages, slo, _end_at_next_disturbance(event, events))
        for event in events
    )


def _end_at_next_disturbance(event: _TimedEvent, events: Sequence[_TimedEvent]) -> _TimedEvent:
    """Return an event, after which requests are examined at most until the next disturbance.

    A disturbance, such as a spike or the loss of a replica, can miss the SLO again, which must not
    count against the recovery from an earlier event.

    Args:
        event: The event.
        events: All events of the run.
    """
    disturbances_ns = [other.disturbance_ns for other in events if other.disturbance_ns is not None]
    later_disturbances_ns = [time_ns for time_ns in disturbances_ns if time_ns > event.at_ns]
    return event._replace(end_ns=min([event.end_ns, *later_disturbances_ns]))


def _find_spikes(stages: Sequence[StagePlan]) -> Iterator[_TimedEvent]:
    """Yield an event for each time at which the load drops from one stage to the next.

    The stage before the drop is called a spike.
    """
    for index_after_spike in find_stages_after_spikes(stages):
        spike = stages[index_after_spike - 1]
        stage_after = stages[index_after_spike]
        drop = Recovery(
            load_before=spike.arrival,
            load_after=stage_after.arrival,
            at_s=stage_after.start_ns / 1e9,
        )

        yield _TimedEvent(
            drop,
            start_ns=spike.start_ns,
            at_ns=stage_after.start_ns,
            end_ns=_stage_end_ns(stages, index_after_spike),
        )


def _stage_end_ns(stages: Sequence[StagePlan], index: int) -> int:
    """Return when a stage ends: at the start of the next one, and never for the last stage."""
    is_last = index == len(stages) - 1
    return _NEVER_NS if is_last else stages[index + 1].start_ns


def find_stages_after_spikes(stages: Sequence[StagePlan]) -> Iterator[int]:
    """Yield the index of each stage that has a lower load than the stage before.

    Only measured stages with the same kind of load, concurrency or rate, are compared.
    """
    for index, (before, after) in enumerate(pairwise(stages), start=1):
        are_both_measured = before.measured and after.measured
        have_same_kind = before.closed == after.closed
        if not are_both_measured or not have_same_kind:
            continue

        load_before = _load_of_stage(before)
        load_after = _load_of_stage(after)
        if load_before is None or load_after is None:
            continue

        if load_before > load_after:
            yield index


def _load_of_stage(stage: StagePlan) -> float | None:
    """Return the load of a stage: its concurrency in a closed loop, else its rate if it has one."""
    return stage.concurrency if stage.closed else stage.rate


def _find_capacity_changes(
    measured_stages: Sequence[Columns], manifest: RunManifest, samples: Sequence[MetricSample]
) -> Iterator[_TimedEvent]:
    """Yield the changes of the number of replicas or targets during the load, as events.

    The time before such an event begins with the run, and the time after it ends with the last
    request. A change before the first request, or after the last one, is left out.

    Args:
        measured_stages: The records of each measured stage.
        manifest: The manifest of the run.
        samples: The samples of the servers' metrics pages.
    """
    due_ns_of_stages = [columns["due_ns"] for columns in measured_stages if len(columns["due_ns"])]
    if not due_ns_of_stages:
        return

    first_due_ns = min(int(due_ns.min()) for due_ns in due_ns_of_stages)
    last_due_ns = max(int(due_ns.max()) for due_ns in due_ns_of_stages)

    for change in _list_capacity_changes(manifest, samples):
        at_ns = round(change.at_s * 1e9)
        is_during_load = first_due_ns < at_ns <= last_due_ns
        if is_during_load:
            yield _TimedEvent(
                change,
                start_ns=_BEFORE_RUN_NS,
                at_ns=at_ns,
                end_ns=last_due_ns + 1,  # which includes the last request
            )


def _list_capacity_changes(
    manifest: RunManifest, samples: Sequence[MetricSample]
) -> list[Recovery]:
    """Return the changes of the number of replicas, or else the losses of targets.

    A lost target also changes the number of replicas, and must not count twice.
    """
    changes = list(_changes_of_replica_count(samples))
    return changes or list(_lost_targets(manifest))


def _changes_of_replica_count(samples: Sequence[MetricSample]) -> Iterator[Recovery]:
    """Yield each change of the number of replicas that the servers' metrics pages show.

    An example is a loss from "3 replicas" to "2 replicas". These texts are in the fields
    `load_before` and `load_after`, which have the load before and after other events. The recovery
    from the change is not measured yet.
    """
    for before, after in pairwise(series.count_replicas(samples)):
        if before.value == after.value:
            continue

        is_loss = after.value < before.value
        yield Recovery(
            event="loss" if is_loss else "scale_up",
            load_before=_describe_replicas(before.value),
            load_after=_describe_replicas(after.value),
            at_s=_round_to_ns(after.t_s),
        )


def _describe_replicas(count: float) -> str:
    """Return a number of replicas as a text, such as "3 replicas"."""
    return format.counted(round(count), "replica")


def _round_to_ns(seconds: float) -> float:
    """Return a time in seconds rounded to whole nanoseconds, as all recorded times are."""
    return round(seconds * 1e9) / 1e9


def _lost_targets(manifest: RunManifest) -> Iterator[Recovery]:
    """Yield the loss of each target that stopped responding, from the warnings of the run.

    Reports print a loss as a change from the name of the target, such as "gpu1", to "gone".
    """
    for warning in manifest.warning_codes.values():
        if warning.code != "target_gone":
            continue

        yield Recovery(
            event="loss",
            load_before=str(warning.values["target"]),
            load_after="gone",
            at_s=_round_to_ns(warning.values["at_s"]),
        )


def _measure_recovery(measured_stages: Sequence[Columns], slo: Slo, event: _TimedEvent) -> Recovery:
    """Return whether the SLO was missed around an event, and when the SLO was met again.

    The requests before and after the event are divided into groups of GROUP_SIZE requests, each of
    which meets or misses the SLO. With fewer requests after the event, nothing is measured.

    Args:
        measured_stages: The records of each measured stage.
        slo: The SLO of the run.
        event: The event, with the start and the end of the time that is examined.
    """
    groups_after = _group_requests(measured_stages, event.at_ns, event.end_ns, slo)
    if groups_after.group_count == 0:
        reason = f"fewer than {GROUP_SIZE} requests came after it"
        return msgspec.structs.replace(event.unmeasured, reason=reason)

    groups_before = _group_requests(measured_stages, event.start_ns, event.at_ns, slo)
    if event.unmeasured.event == "spike":
        was_missed_before = not groups_before.meets_slo.all()  # during the spike
    else:
        was_missed_before = _misses_at_end(groups_before)
    was_missed_after = not groups_after.meets_slo.all()

    last_due_ns = groups_after.due_ns[-1]
    observed_s = float(last_due_ns - event.at_ns) / 1e9
    mean_group_s = observed_s / groups_after.group_count

    return msgspec.structs.replace(
        event.unmeasured,
        observed_s=observed_s,
        resolution_s=mean_group_s,
        slo_missed=bool(was_missed_before or was_missed_after),
        recovered_after_s=_recovery_time_s(groups_after, event.at_ns),
    )


def _misses_at_end(groups: _Groups) -> bool:
    """Return True if the last group misses the SLO, and False if there is no group."""
    has_groups = groups.group_count > 0
    return has_groups and not groups.meets_slo[-1]


def _recovery_time_s(after: _Groups, at_ns: int) -> float | None:
    """Return the time in seconds from an event until all groups of requests meet the SLO again.

    The result is None if the last group misses the SLO.

    Args:
        after: The groups of GROUP_SIZE requests after the event, in order of time.
        at_ns: The time of the event.
    """
    groups_with_miss = np.flatnonzero(~after.meets_slo)
    if not len(groups_with_miss):
        return 0.0
    if _misses_at_end(after):
        return None

    last_group_with_miss = int(groups_with_miss[-1])
    first_recovered_group = last_group_with_miss + 1

    first_recovered_request = first_recovered_group * GROUP_SIZE
    recovered_at_ns = after.due_ns[first_recovered_request]
    return float(recovered_at_ns - at_ns) / 1e9


def _group_requests(
    measured_stages: Sequence[Columns], start_ns: int, end_ns: int, slo: Slo
) -> _Groups:
    """Return which groups of GROUP_SIZE requests meet the SLO, in a part of the run.

    The requests are grouped in the order of their scheduled times. Requests that the SLO does not
    count are left out.

    Args:
        measured_stages: The records of each measured stage.
        start_ns: The first scheduled time of the part.
        end_ns: The end of the part, which is not included.
        slo: The SLO of the run.
    """
    # For each stage, which of its requests are examined; then these of all stages, by time.
    is_examined_of_stages = [
        _is_counted_within(columns, start_ns, end_ns, slo) for columns in measured_stages
    ]
    due_ns_of_stages = (columns["due_ns"] for columns in measured_stages)
    due_ns = join_selected(due_ns_of_stages, is_examined_of_stages)
    time_order = np.argsort(due_ns, kind="stable")

    # A group meets the SLO if enough of its requests are good by each objective.
    group_count = len(due_ns) // GROUP_SIZE
    meets_slo = np.ones(group_count, bool)
    for objective in _objectives(slo):
        is_good_of_stages = (
            outcomes.meets_slo(columns, objective.limits) for columns in measured_stages
        )
        is_good = join_selected(is_good_of_stages, is_examined_of_stages)
        meets_slo &= _have_enough_good(is_good[time_order], objective.min_share)

    return _Groups(due_ns[time_order], meets_slo)


def _have_enough_good(is_good: NDArray[np.bool_], min_share: float) -> NDArray[np.bool_]:
    """Return for each group of requests whether enough of its requests are good.

    A group has GROUP_SIZE requests, see `_sum_by_group`. For a `min_share` of 0.9, up to 2 of its
    20 requests may be bad.

    Args:
        is_good: Whether each request is good, in order of time.
        min_share: The share of the requests of a group that must be good.
    """
    bad_counts = _sum_by_group(np.logical_not(is_good))
    group_sizes = _sum_by_group(np.ones(len(is_good), np.int64))

    # 20 * (1 - 0.9) is a little less than 2, because floats are rounded.
    max_bad_counts = group_sizes * (1 - min_share) + ROUNDING
    are_enough_good: NDArray[np.bool_] = bad_counts <= max_bad_counts
    return are_enough_good


def _is_counted_within(columns: Columns, start_ns: int, end_ns: int, slo: Slo) -> NDArray[np.bool_]:
    """Return which requests the SLO counts and are scheduled from `start_ns` to before `end_ns`."""
    due_ns = columns["due_ns"]
    is_within = (due_ns >= start_ns) & (due_ns < end_ns)
    mask: NDArray[np.bool_] = is_within & outcomes.is_counted(columns, slo)
    return mask


def _sum_by_group(values: NDArray[np.int64] | NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the sum of each GROUP_SIZE values. The last group also has the remaining values.

    With 47 values, the first group has 20 values and the last one 27.
    """
    group_count = len(values) // GROUP_SIZE
    grouped_length = group_count * GROUP_SIZE
    groups = values[:grouped_length].reshape(group_count, GROUP_SIZE)
    sums: NDArray[np.int64] = groups.sum(axis=1, dtype=np.int64)

    if group_count:
        sums[-1] += values[grouped_length:].sum(dtype=np.int64)
    return sums


class _Objective(NamedTuple):
    """The limits for a single request, as an SLO, and the share of the requests to meet them."""

    limits: Slo
    min_share: float


def _objectives(slo: Slo) -> Iterator[_Objective]:
    """Yield the objectives of an SLO, each of which a group of requests must meet.

    A term such as "p99 of TTFT <= 500 ms" needs 99 % of the requests within 500 ms. A goodput share
    is the share of the requests that must be within the limits of all terms.
    """
    for term in slo.terms:
        yield _Objective(limits=Slo(terms=(term,)), min_share=term.quantile)
    if slo.goodput_share is not None:
        yield _Objective(limits=slo, min_share=slo.goodput_share)
