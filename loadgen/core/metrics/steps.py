"""Which step the time of a task goes to. Pure.

Of the time of a task, each instant belongs to one step, or to the pause before one: to the request that the last one
waited for, and so on back to the first. Requests beside it that ended earlier took no time of the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from loadgen.core.metrics.columns import OK, Columns, JoinedColumns, step_of
from loadgen.core.stats.quantiles import Distribution, Values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest, StepPlan


class StepTime(Struct, frozen=True):
    """Where the time of tasks went: to the requests of a step, and to the pauses before them."""

    time_share: float | None
    pause_ms: Distribution
    pause_share: float | None


UNKNOWN = StepTime(None, Distribution(), None)


def times(measured: Sequence[Columns], header: RunManifest) -> list[StepTime]:
    """Where the time of the measured tasks that ended ok went, for each step of the header."""
    made = [UNKNOWN] * len(header.steps)
    if not header.steps:
        return made
    rows = JoinedColumns(measured, ok=False)
    of_row = step_of(header, rows["request"], rows["turn"])
    for of_class in dict.fromkeys(step.of_class for step in header.steps):
        own = [index for index, step in enumerate(header.steps) if step.of_class == of_class]
        found = _of_class(rows, np.isin(of_row, own), [header.steps[index] for index in own])
        for index, time in zip(own, found, strict=False):
            made[index] = time
    return made


def _of_class(
    rows: JoinedColumns, chosen: NDArray[np.bool_], steps: Sequence[StepPlan]
) -> list[StepTime]:
    """The same of the steps of one class, whose rows are `chosen`."""
    after = {
        turn: waits for step in steps for turn, waits in zip(step.turns, step.after, strict=True)
    }
    turns = len(after)
    session, turn = rows["session"][chosen], rows["turn"][chosen]
    order = np.lexsort((turn, session))
    ok = (rows["status"][chosen] == OK)[order]
    _, starts, counts = np.unique(session[order], return_index=True, return_counts=True)
    whole = (
        (counts == turns) & np.logical_and.reduceat(ok, starts)
        if len(starts)
        else np.zeros(0, bool)
    )
    places = (starts[whole][:, None] + np.arange(turns)).reshape(-1)
    if not len(places):
        return []
    due, end = (
        rows[name][chosen][order][places].reshape(-1, turns) for name in ("due_ns", "end_ns")
    )
    everything = float((end[:, -1] - due[:, 0]).sum())
    waited_for = np.zeros(due.shape, bool)  # whether the task waited for this request
    waited_for[:, -1] = True
    spent, paused = np.zeros(turns), np.zeros(turns)
    pauses = np.zeros(due.shape, np.int64)
    for one in reversed(range(turns)):
        on_it = waited_for[:, one]
        spent[one] = (end[:, one] - due[:, one])[on_it].sum()
        if waits := list(after[one]):
            latest = np.argmax(end[:, waits], axis=1)
            pauses[:, one] = (
                due[:, one] - np.take_along_axis(end[:, waits], latest[:, None], axis=1)[:, 0]
            )
            paused[one] = pauses[:, one][on_it].sum()
            waited_for[np.flatnonzero(on_it), np.array(waits)[latest[on_it]]] = True
    made = []
    for step in steps:
        own, values = list(step.turns), Values()
        if step.pause:
            values.add(pauses[:, own].reshape(-1))
        of_step, of_pause = float(spent[own].sum()), float(paused[own].sum())
        made.append(StepTime(of_step / everything, values.distribution(), of_pause / everything))
    return made
