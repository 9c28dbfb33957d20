"""After a spike, a replica that went away, or one that came: how long until the SLO held again. Pure, on columns.

A spike is a measured stage whose load is above that of the measured stage right after it. Replicas are counted by the
servers' pages (`series.REPLICAS`, else the pages that answer), and a target that stopped answering is one that went.
The requests due from then to the next spike or loss (a scale-up is part of the way back), after a spike at most in that
next stage, are taken in groups of GROUP by their due instants, the rest with the last; a group holds the SLO where each
term is kept by its share of the group (p99 of 20: by all), and the goodput share too. The SLO is back at the first
request after the last group that does not hold it, so one late miss counts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

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

GROUP = 20
FOREVER_NS = 1 << 62


class _Cut(NamedTuple):
    """One event: from `before_ns` to `at_ns` is what was before it, and until `end_ns` what is seen of the way back."""

    found: Recovery
    before_ns: int
    at_ns: int
    end_ns: int


def of_rows(
    measured: Sequence[Columns], manifest: RunManifest, server_samples: Sequence[MetricSample] = ()
) -> tuple[Recovery, ...]:
    """One for each event, in their order; none without an SLO of the whole run that limits values of requests."""
    slo = manifest.slo
    if slo is None or not (slo.terms or slo.goodput_share is not None):
        return ()
    cuts = sorted(
        [*_spikes(manifest.stages), *_of_replicas(measured, manifest, server_samples)],
        key=lambda cut: cut.at_ns,
    )
    worse = [
        c.before_ns if c.found.event == "spike" else c.at_ns
        for c in cuts
        if c.found.event != "scale_up"
    ]
    return tuple(
        _recovery(
            measured,
            slo,
            cut._replace(end_ns=min([cut.end_ns, *(at for at in worse if at > cut.at_ns)])),
        )
        for cut in cuts
    )


def _spikes(stages: Sequence[StagePlan]) -> Iterator[_Cut]:
    ends = [*(stage.start_ns for stage in stages[1:]), FOREVER_NS]
    for i in _after_spikes(stages):
        before, after = stages[i - 1], stages[i]
        found = Recovery(
            load_before=before.arrival, load_after=after.arrival, at_s=after.start_ns / 1e9
        )
        yield _Cut(found, before.start_ns, after.start_ns, ends[i])


def _after_spikes(stages: Sequence[StagePlan]) -> Iterator[int]:
    for i, (one, after) in enumerate(pairwise(stages), start=1):
        loads = (one.concurrency, after.concurrency) if one.closed else (one.rate, after.rate)
        if one.measured and after.measured and one.closed == after.closed and None not in loads:
            before, then = (load or 0.0 for load in loads)
            if before > then:
                yield i


def _of_replicas(
    measured: Sequence[Columns], manifest: RunManifest, server_samples: Sequence[MetricSample]
) -> Iterator[_Cut]:
    """The events of replicas and targets within the measured load."""
    due = [part["due_ns"] for part in measured if len(part["due_ns"])]
    if not due:
        return
    first, last = min(int(one.min()) for one in due), max(int(one.max()) for one in due)
    events: list[tuple[int, Event, str, str]] = [
        (
            round(t_s * 1e9),
            "loss" if now < before else "scale_up",
            _replicas(before),
            _replicas(now),
        )
        for (_, before), (t_s, now) in pairwise(series.replicas(server_samples))
        if before != now
    ]
    if not events:  # else it would be told twice
        gone = [
            code.values for code in manifest.warning_codes.values() if code.code == "target_gone"
        ]
        events = [(round(one["at_s"] * 1e9), "loss", str(one["target"]), "gone") for one in gone]
    for at_ns, event, before, after in sorted(one for one in events if first < one[0] <= last):
        yield _Cut(
            Recovery(event=event, load_before=before, load_after=after, at_s=at_ns / 1e9),
            -1,
            at_ns,
            last + 1,
        )


def _replicas(count: float) -> str:
    return format.counted(round(count), "replica")


def _recovery(measured: Sequence[Columns], slo: Slo, cut: _Cut) -> Recovery:
    due, held = _groups(measured, cut.at_ns, cut.end_ns, slo)
    if not len(held):
        return msgspec.structs.replace(cut.found, why=f"fewer than {GROUP} requests after it")
    seen_s = float(due[-1] - cut.at_ns) / 1e9
    missed = np.flatnonzero(~held)
    earlier = _groups(measured, cut.before_ns, cut.at_ns, slo)[1]
    in_trouble = not (earlier if cut.found.event == "spike" else earlier[-1:]).all()
    found = msgspec.structs.replace(
        cut.found,
        observed_s=seen_s,
        resolution_s=seen_s / len(held),
        slo_missed=bool(in_trouble or len(missed)),
    )
    if not len(missed):
        return msgspec.structs.replace(found, recovered_after_s=0.0)
    first_good = int(missed[-1]) + 1
    if first_good == len(held):
        return found
    return msgspec.structs.replace(
        found, recovered_after_s=float(due[first_good * GROUP] - cut.at_ns) / 1e9
    )


def _groups(
    measured: Sequence[Columns], start_ns: int, end_ns: int, slo: Slo
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Due instants of the counted requests of a time, sorted, and whether each group of them holds the SLO."""
    chosen = [
        (
            part,
            (part["due_ns"] >= start_ns)
            & (part["due_ns"] < end_ns)
            & outcomes.is_counted(part, slo),
        )
        for part in measured
    ]
    due = np.concatenate([part["due_ns"][mask] for part, mask in chosen] or [np.zeros(0, np.int64)])
    order = np.argsort(due, kind="stable")
    starts = np.arange(len(due) // GROUP) * GROUP
    held = np.ones(len(starts), bool)
    if not len(starts):
        return due[order], held
    sizes = np.diff([*starts, len(due)])
    terms = [(Slo(terms=(term,)), term.quantile) for term in slo.terms]
    for part_of, share in [
        *terms,
        *([(slo, slo.goodput_share)] if slo.goodput_share is not None else []),
    ]:
        good = np.concatenate([outcomes.meets(part, part_of)[mask] for part, mask in chosen])[order]
        held &= np.add.reduceat(~good, starts, dtype=np.int64) <= sizes * (1 - share) + 1e-9
    return due[order], held
