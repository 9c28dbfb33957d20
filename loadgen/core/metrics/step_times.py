"""Divides the time of tasks among their steps.

Pure. Each instant of a task belongs to one step, or to the pause before one. It belongs to the
request that the last request waited for, and so on back to the first request. Requests beside these
that ended earlier take no time of the task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics.columns import OK, JoinedColumns, step_indices
from loadgen.core.stats.quantiles import Distribution, distribution_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.results.manifest import RunManifest, StepPlan


class StepTime(msgspec.Struct, frozen=True):
    """Where the time of tasks went: to the requests of a step, and to the pauses before them.

    The shares are of the time of all tasks of a class that ended ok, None without any.
    """

    time_share: float | None
    pause_ms: Distribution
    pause_share: float | None


UNKNOWN = StepTime(None, Distribution(), None)


class _TaskTimes(NamedTuple):
    """The due times and ends of the requests of tasks, one row for each task, in ns."""

    due_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]


class _TurnTimes(NamedTuple):
    """The time of all tasks that went to each turn, and the pauses before it, in ns."""

    spent_ns: NDArray[np.float64]
    paused_ns: NDArray[np.float64]
    pauses_ns: NDArray[np.int64]  # one row for each task


def measure_step_times(measured: Sequence[Columns], manifest: RunManifest) -> list[StepTime]:
    """Return, for each step, the share of the time of the measured tasks that ended ok.

    A task is a sequence of requests, its turns, by an agent. A step is a named group of its turns.
    """
    times = [UNKNOWN] * len(manifest.steps)
    if not manifest.steps:
        return times
    requests = JoinedColumns(measured, only_ok=False)
    step_of_request = step_indices(manifest, requests["request"], requests["turn"])
    for class_name in dict.fromkeys(step.of_class for step in manifest.steps):
        indices = [i for i, step in enumerate(manifest.steps) if step.of_class == class_name]
        steps = [manifest.steps[i] for i in indices]
        is_of_class = np.isin(step_of_request, indices)
        times_of_steps = _measure_class(requests, is_of_class, steps)
        for step_index, step_time in zip(indices, times_of_steps, strict=True):
            times[step_index] = step_time
    return times


def _measure_class(
    requests: JoinedColumns, is_of_class: NDArray[np.bool_], steps: Sequence[StepPlan]
) -> list[StepTime]:
    """Return the times of the steps of one class."""
    preceding_turns = {
        turn: list(waits_for)
        for step in steps
        for turn, waits_for in zip(step.turns, step.after, strict=True)
    }
    tasks = _ok_tasks(requests, is_of_class, turns=len(preceding_turns))
    if not len(tasks.due_ns):
        return [UNKNOWN] * len(steps)
    turn_times = _divide_time(tasks, preceding_turns)
    total_ns = float((tasks.end_ns[:, -1] - tasks.due_ns[:, 0]).sum())
    return [_step_time(step, turn_times, total_ns) for step in steps]


def _ok_tasks(requests: JoinedColumns, is_of_class: NDArray[np.bool_], turns: int) -> _TaskTimes:
    """Return the times of the tasks whose requests are all recorded and ok.

    The requests are ordered by task and turn, so that each task is a run of adjacent rows, which
    begins at an entry of `first_rows`.
    """
    session = requests["session"][is_of_class]
    order = np.lexsort((requests["turn"][is_of_class], session))
    is_ok = (requests["status"][is_of_class] == OK)[order]
    _, first_rows, counts = np.unique(session[order], return_index=True, return_counts=True)
    if not len(first_rows):
        no_tasks = np.zeros((0, turns), np.int64)
        return _TaskTimes(no_tasks, no_tasks)
    is_complete = (counts == turns) & np.logical_and.reduceat(is_ok, first_rows)
    rows = (first_rows[is_complete][:, None] + np.arange(turns)).reshape(-1)
    due_ns, end_ns = (
        requests[field][is_of_class][order][rows].reshape(-1, turns)
        for field in ("due_ns", "end_ns")
    )
    return _TaskTimes(due_ns, end_ns)


def _divide_time(tasks: _TaskTimes, preceding_turns: dict[int, list[int]]) -> _TurnTimes:
    """Follow each task back from its last request to the requests that it waited for.

    This is the critical path of the task: only its requests, and the pauses between them, take time
    of the task. Of the turns that a turn waits for, the one that ended last is on the path.

    Args:
        tasks: The times of the requests of each task.
        preceding_turns: For each turn, the turns that it waits for. It is due a pause after the
            last of them has ended.
    """
    turns = tasks.due_ns.shape[1]
    is_waited_for = np.zeros(tasks.due_ns.shape, bool)
    is_waited_for[:, -1] = True
    spent_ns = np.zeros(turns)
    paused_ns = np.zeros(turns)
    pauses_ns = np.zeros(tasks.due_ns.shape, np.int64)
    for turn in reversed(range(turns)):
        is_on_path = is_waited_for[:, turn]
        spent_ns[turn] = (tasks.end_ns[:, turn] - tasks.due_ns[:, turn])[is_on_path].sum()
        preceding = preceding_turns[turn]
        if not preceding:
            continue
        preceding_ends_ns = tasks.end_ns[:, preceding]
        latest = np.argmax(preceding_ends_ns, axis=1)
        latest_end_ns = np.take_along_axis(preceding_ends_ns, latest[:, None], axis=1)[:, 0]
        pauses_ns[:, turn] = tasks.due_ns[:, turn] - latest_end_ns
        paused_ns[turn] = pauses_ns[:, turn][is_on_path].sum()
        latest_turn = np.array(preceding)[latest[is_on_path]]
        is_waited_for[np.flatnonzero(is_on_path), latest_turn] = True
    return _TurnTimes(spent_ns, paused_ns, pauses_ns)


def _step_time(step: StepPlan, times: _TurnTimes, total_ns: float) -> StepTime:
    """Return the share of the time of all tasks that a step and the pauses before it took."""
    turns = list(step.turns)
    pauses_ns = times.pauses_ns[:, turns].reshape(-1) if step.pause else np.zeros(0, np.int64)
    return StepTime(
        time_share=float(times.spent_ns[turns].sum()) / total_ns,
        pause_ms=distribution_of(pauses_ns),
        pause_share=float(times.paused_ns[turns].sum()) / total_ns,
    )
