"""After a spike: how long until the SLO held again. Pure, on columns.

A spike is a measured stage whose load is above that of the measured stage right after it. The requests due in that
next stage are taken in groups of GROUP by their due instants, the rest with the last; a group holds the SLO where each
term is kept by its share of the group (p99 of 20: by all), and the goodput share too. The SLO is back at the first
request after the last group that does not hold it, so one late miss counts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.core.metrics import outcomes
from loadgen.core.slo import Slo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.results.manifest import Header, StagePlan

GROUP = 20


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """The way back to the SLO after one spike.

    spike, after: the two loads in words. at_s: when the spike ended. broken: whether the SLO was missed in the spike or
    after it. back_s: seconds from `at_s` until it held again, to the spacing of GROUP requests; 0 where it held all the
    time after. Null: it was not back within `seen_s`, or `why` says why nothing can be told.
    """

    spike: str
    after: str
    at_s: float
    seen_s: float = 0.0
    broken: bool | None = None
    back_s: float | None = None
    why: str = ""


def of_rows(measured: Sequence[Columns], header: Header) -> tuple[Recovery, ...]:
    """One for each spike, in their order; none without an SLO of the whole run that limits values of requests."""
    slo = header.slo
    if slo is None or not (slo.terms or slo.goodput_share is not None):
        return ()
    return tuple(_recovery(measured, header, stage, slo) for stage in _after_spikes(header.stages))


def _after_spikes(stages: Sequence[StagePlan]) -> Iterator[int]:
    for i, (one, after) in enumerate(pairwise(stages), start=1):
        loads = (one.concurrency, after.concurrency) if one.closed else (one.rate, after.rate)
        if one.measured and after.measured and one.closed == after.closed and None not in loads:
            before, then = (load or 0.0 for load in loads)
            if before > then:
                yield i


def _recovery(measured: Sequence[Columns], header: Header, stage: int, slo: Slo) -> Recovery:
    before, after = header.stages[stage - 1], header.stages[stage]
    found = Recovery(spike=before.arrival, after=after.arrival, at_s=after.start_ns / 1e9)
    due, held = _groups(measured, stage, slo)
    if not len(held):
        return msgspec.structs.replace(found, why=f"fewer than {GROUP} requests after it")
    seen_s = float(due[-1] - after.start_ns) / 1e9
    missed = np.flatnonzero(~held)
    in_spike = not _groups(measured, stage - 1, slo)[1].all()
    found = msgspec.structs.replace(found, seen_s=seen_s, broken=bool(in_spike or len(missed)))
    if not len(missed):
        return msgspec.structs.replace(found, back_s=0.0)
    first_good = int(missed[-1]) + 1
    if first_good == len(held):
        return found
    return msgspec.structs.replace(found, back_s=float(due[first_good * GROUP] - after.start_ns) / 1e9)


def _groups(measured: Sequence[Columns], stage: int, slo: Slo) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Due instants of a stage's counted requests, sorted, and whether each group of them holds the SLO."""
    chosen = [(part, (part["stage"] == stage) & outcomes.is_counted(part, slo)) for part in measured]
    due = np.concatenate([part["due_ns"][mask] for part, mask in chosen] or [np.zeros(0, np.int64)])
    order = np.argsort(due, kind="stable")
    starts = np.arange(len(due) // GROUP) * GROUP
    held = np.ones(len(starts), bool)
    if not len(starts):
        return due[order], held
    sizes = np.diff([*starts, len(due)])
    terms = [(Slo(terms=(term,)), term.quantile) for term in slo.terms]
    for part_of, share in [*terms, *([(slo, slo.goodput_share)] if slo.goodput_share is not None else [])]:
        good = np.concatenate([outcomes.meets(part, part_of)[mask] for part, mask in chosen])[order]
        held &= np.add.reduceat(~good, starts, dtype=np.int64) <= sizes * (1 - share) + 1e-9
    return due[order], held
