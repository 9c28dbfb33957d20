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
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from loadgen.core import format
from loadgen.core.metrics import outcomes
from loadgen.core.metrics.sections import Event, Recovery
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
"""Keeps a number of allowed misses that is an integer from being rounded down."""
_NEVER_NS = 1 << 62
_BEFORE_ALL_NS = -1


class _EventSpan(NamedTuple):
    """An event, with the times that are examined before and after it.

    `recovery` describes the event. From `before_ns` to `at_ns` is before it, and until `end_ns` is
    after it.
    """

    recovery: Recovery
    before_ns: int
    at_ns: int
    end_ns: int

    @property
    def trouble_ns(self) -> int | None:
        """Return from when on the event makes the load harder, or None for a new replica."""
        if self.recovery.event == "scale_up":
            return None
        return self.before_ns if self.recovery.event == "spike" else self.at_ns


class _Groups(NamedTuple):
    """The counted requests of a time: their sorted scheduled times, and which groups meet the SLO.

    Group `i` begins with request `i * GROUP_SIZE`. The last group also has the remaining requests.
    """

    due_ns: NDArray[np.int64]
    is_met: NDArray[np.bool_]


def measure_recoveries(
    measured: Sequence[Columns], manifest: RunManifest, samples: Sequence[MetricSample] = ()
) -> tuple[Recovery, ...]:
    """Return the recovery from each event of a run, in the order of the events.

    Each recovery is examined until the next event that makes the load harder. There are none
    without an SLO of the run that limits single requests.

    Args:
        measured: The measured records, by stage.
        manifest: The manifest of the run.
        samples: The samples of the servers' metrics pages.
    """
    slo = manifest.slo
    if slo is None or not (slo.terms or slo.goodput_share is not None):
        return ()
    spans = [*_find_spikes(manifest.stages), *_find_replica_changes(measured, manifest, samples)]
    spans.sort(key=lambda span: span.at_ns)
    return tuple(
        _measure_recovery(measured, slo, _end_before_next_trouble(span, spans)) for span in spans
    )


def _end_before_next_trouble(span: _EventSpan, spans: Sequence[_EventSpan]) -> _EventSpan:
    """Return an event whose examined time ends at the next event that makes the load harder."""
    trouble_times_ns = [other.trouble_ns for other in spans]
    later_troubles_ns = [
        time_ns for time_ns in trouble_times_ns if time_ns is not None and time_ns > span.at_ns
    ]
    return span._replace(end_ns=min([span.end_ns, *later_troubles_ns]))


def _find_spikes(stages: Sequence[StagePlan]) -> Iterator[_EventSpan]:
    """Yield each spike of the load as an event at its end.

    A spike is a stage with a higher load than the next one. Its recovery is examined until the end
    of that next stage.
    """
    stage_ends_ns = [*(stage.start_ns for stage in stages[1:]), _NEVER_NS]
    for index in find_stages_after_spikes(stages):
        spike = stages[index - 1]
        next_stage = stages[index]
        recovery = Recovery(
            load_before=spike.arrival,
            load_after=next_stage.arrival,
            at_s=next_stage.start_ns / 1e9,
        )
        yield _EventSpan(
            recovery,
            before_ns=spike.start_ns,
            at_ns=next_stage.start_ns,
            end_ns=stage_ends_ns[index],
        )


def find_stages_after_spikes(stages: Sequence[StagePlan]) -> Iterator[int]:
    """Yield the index of each measured stage that has a lower load than the one before it."""
    for index, (before, after) in enumerate(pairwise(stages), start=1):
        if not before.measured or not after.measured or before.closed != after.closed:
            continue
        load_before = before.concurrency if before.closed else before.rate
        load_after = after.concurrency if after.closed else after.rate
        if load_before is not None and load_after is not None and load_before > load_after:
            yield index


def _find_replica_changes(
    measured: Sequence[Columns], manifest: RunManifest, samples: Sequence[MetricSample]
) -> Iterator[_EventSpan]:
    """Yield the changes of the number of replicas or targets during the measured load, as events.

    Targets that stopped responding are only used if no metrics page shows a change. Otherwise the
    same loss would count twice.
    """
    due_ns_of_stages = [columns["due_ns"] for columns in measured if len(columns["due_ns"])]
    if not due_ns_of_stages:
        return
    first_ns = min(int(due_ns.min()) for due_ns in due_ns_of_stages)
    last_ns = max(int(due_ns.max()) for due_ns in due_ns_of_stages)
    recoveries = list(_changes_of_replica_count(samples)) or list(_lost_targets(manifest))
    for recovery in recoveries:
        at_ns = round(recovery.at_s * 1e9)
        if first_ns < at_ns <= last_ns:
            yield _EventSpan(recovery, _BEFORE_ALL_NS, at_ns, end_ns=last_ns + 1)


def _changes_of_replica_count(samples: Sequence[MetricSample]) -> Iterator[Recovery]:
    """Yield an event for each change of the number of replicas on the metrics pages."""
    for (_, before), (at_s, after) in pairwise(series.count_replicas(samples)):
        if before == after:
            continue
        event: Event = "loss" if after < before else "scale_up"
        yield Recovery(
            event=event,
            load_before=format.counted(round(before), "replica"),
            load_after=format.counted(round(after), "replica"),
            at_s=round(at_s * 1e9) / 1e9,
        )


def _lost_targets(manifest: RunManifest) -> Iterator[Recovery]:
    """Yield an event for each target that stopped responding."""
    for warning in manifest.warning_codes.values():
        if warning.code == "target_gone":
            yield Recovery(
                event="loss",
                load_before=str(warning.values["target"]),
                load_after="gone",
                at_s=round(warning.values["at_s"] * 1e9) / 1e9,
            )


def _measure_recovery(measured: Sequence[Columns], slo: Slo, span: _EventSpan) -> Recovery:
    """Return when the SLO was met again after an event, and whether it was missed at all.

    Args:
        measured: The measured records, by stage.
        slo: The SLO of the run.
        span: The event, with the times that are examined before and after it.
    """
    after = _group_requests(measured, span.at_ns, span.end_ns, slo)
    if not len(after.is_met):
        return msgspec.structs.replace(
            span.recovery, why=f"fewer than {GROUP_SIZE} requests came after it"
        )
    before = _group_requests(measured, span.before_ns, span.at_ns, slo)
    # The whole spike counts. Before another event only the last group does.
    is_spike = span.recovery.event == "spike"
    is_met_before = before.is_met if is_spike else before.is_met[-1:]
    missed_groups = np.flatnonzero(~after.is_met)
    observed_s = float(after.due_ns[-1] - span.at_ns) / 1e9
    return msgspec.structs.replace(
        span.recovery,
        observed_s=observed_s,
        resolution_s=observed_s / len(after.is_met),
        slo_missed=bool(not is_met_before.all() or len(missed_groups)),
        recovered_after_s=_recovery_time_s(after, missed_groups, span.at_ns),
    )


def _recovery_time_s(after: _Groups, missed: NDArray[np.int64], at_ns: int) -> float | None:
    """Return the time until the first request after the last missed group, or None without one."""
    if not len(missed):
        return 0.0
    first_met = int(missed[-1]) + 1
    if first_met == len(after.is_met):
        return None
    return float(after.due_ns[first_met * GROUP_SIZE] - at_ns) / 1e9


def _group_requests(measured: Sequence[Columns], start_ns: int, end_ns: int, slo: Slo) -> _Groups:
    """Return the requests of a time in groups of GROUP_SIZE, and which groups meet the SLO.

    A group meets an objective if no more of its requests miss it than the objective allows. Only
    requests that the SLO counts are grouped.

    Args:
        measured: The measured records, by stage.
        start_ns: The start of the time, which is included.
        end_ns: The end of the time, which is not included.
        slo: The SLO of the run.
    """
    selections = []
    for columns in measured:
        due_ns = columns["due_ns"]
        is_in_time = (due_ns >= start_ns) & (due_ns < end_ns)
        selections.append(is_in_time & outcomes.is_counted(columns, slo))

    def join_selected(values_of_stages: Sequence[NDArray[Any]]) -> NDArray[Any]:
        selected = zip(values_of_stages, selections, strict=True)
        return np.concatenate([np.zeros(0, np.int64), *(values[mask] for values, mask in selected)])

    all_due_ns = join_selected([columns["due_ns"] for columns in measured])
    order = np.argsort(all_due_ns, kind="stable")
    group_starts = np.arange(len(all_due_ns) // GROUP_SIZE) * GROUP_SIZE
    is_met = np.ones(len(group_starts), bool)
    if not len(group_starts):
        return _Groups(all_due_ns[order], is_met)
    group_sizes = np.diff([*group_starts, len(all_due_ns)])
    for objective, share in _objectives(slo):
        is_good = join_selected([outcomes.meets_slo(columns, objective) for columns in measured])
        is_miss = is_good[order] == 0
        misses = np.add.reduceat(is_miss, group_starts, dtype=np.int64)
        is_met &= misses <= group_sizes * (1 - share) + ROUNDING
    return _Groups(all_due_ns[order], is_met)


def _objectives(slo: Slo) -> Iterator[tuple[Slo, float]]:
    """Yield each objective as an SLO of its own, with the share of requests that must meet it."""
    for term in slo.terms:
        yield Slo(terms=(term,)), term.quantile
    if slo.goodput_share is not None:
        yield slo, slo.goodput_share
