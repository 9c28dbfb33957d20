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
    """Where the time of tasks went, by turn, in ns.

    Attributes:
        request_ns: For each turn, the time on the critical paths that its requests took.
        pause_ns: For each turn, the time on the critical paths that the pauses before it took.
        all_pauses_ns: The pause before each request, one row for each task, also off the path.
    """

    request_ns: NDArray[np.float64]
    pause_ns: NDArray[np.float64]
    all_pauses_ns: NDArray[np.int64]


def measure_step_times(measured: Sequence[Columns], manifest: RunManifest) -> list[StepTime]:
    """Return, for each step of agentic tasks, the share of the time of the tasks that it took.

    A task is a sequence of requests, its turns, by an agent. A step is a named group of its turns.
    Only tasks that ended ok are measured.
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
        times_of_steps = _measure_steps_of_class(requests, is_of_class, steps)
        for step_index, step_time in zip(indices, times_of_steps, strict=True):
            times[step_index] = step_time
    return times


def _measure_steps_of_class(
    requests: JoinedColumns, is_of_class: NDArray[np.bool_], steps: Sequence[StepPlan]
) -> list[StepTime]:
    """Return the times of the steps of one request class, all of whose tasks have the same turns.

    Args:
        requests: The requests of all classes.
        is_of_class: Which of them belong to the class.
        steps: The steps of its tasks.
    """
    # For each turn, the turns that have to end before it is due.
    preceding_turns: dict[int, list[int]] = {}
    for step in steps:
        for turn, waits_for in zip(step.turns, step.after, strict=True):
            preceding_turns[turn] = list(waits_for)
    tasks = _select_ok_tasks(requests, is_of_class, turns=len(preceding_turns))
    if not len(tasks.due_ns):
        return [UNKNOWN] * len(steps)
    turn_times = _follow_critical_paths(tasks, preceding_turns)
    total_ns = float((tasks.end_ns[:, -1] - tasks.due_ns[:, 0]).sum())
    return [_step_time(step, turn_times, total_ns) for step in steps]


def _select_ok_tasks(
    requests: JoinedColumns, is_of_class: NDArray[np.bool_], turns: int
) -> _TaskTimes:
    """Return the times of the tasks whose requests are all recorded and ok.

    The requests are ordered by task and turn. Each task then is a run of adjacent rows, and those
    of complete tasks form a table with a row for each task and a column for each turn.

    Args:
        requests: The requests of all classes.
        is_of_class: Which of them belong to the class whose tasks are selected.
        turns: The number of turns of a complete task.
    """
    session = requests["session"][is_of_class]
    order = np.lexsort((requests["turn"][is_of_class], session))
    is_ok = (requests["status"][is_of_class] == OK)[order]
    _, first_rows, counts = np.unique(session[order], return_index=True, return_counts=True)
    if not len(first_rows):
        no_tasks = np.zeros((0, turns), np.int64)
        return _TaskTimes(no_tasks, no_tasks)
    is_complete = (counts == turns) & np.logical_and.reduceat(is_ok, first_rows)
    rows_of_tasks = first_rows[is_complete][:, None] + np.arange(turns)

    def tabulate(field: str) -> NDArray[np.int64]:
        values: NDArray[np.int64] = requests[field][is_of_class][order][rows_of_tasks]
        return values

    return _TaskTimes(due_ns=tabulate("due_ns"), end_ns=tabulate("end_ns"))


def _follow_critical_paths(tasks: _TaskTimes, preceding_turns: dict[int, list[int]]) -> _TurnTimes:
    """Return the time of tasks that each turn, and the pause before it, took on the critical path.

    The critical path leads from the last request of a task back to the first: from each request to
    the one that it waited for, which is the last one to end of those that precede it. Requests
    beside the path ended earlier and took no time of the task. All tasks are followed at once.

    Args:
        tasks: The times of the requests of each task.
        preceding_turns: For each turn, the turns that it waits for. It is due a pause after the
            last of them has ended.
    """
    task_count, turns = tasks.due_ns.shape
    is_on_path = np.zeros((task_count, turns), bool)
    is_on_path[:, -1] = True
    request_ns = np.zeros(turns)
    pause_ns = np.zeros(turns)
    all_pauses_ns = np.zeros((task_count, turns), np.int64)
    for turn in reversed(range(turns)):
        # All later turns are done, so it is known by now which tasks have this turn on their path.
        path_tasks = np.flatnonzero(is_on_path[:, turn])
        durations_ns = tasks.end_ns[:, turn] - tasks.due_ns[:, turn]
        request_ns[turn] = durations_ns[path_tasks].sum()
        preceding = preceding_turns[turn]
        if not preceding:
            continue
        preceding_ends_ns = tasks.end_ns[:, preceding]
        all_pauses_ns[:, turn] = tasks.due_ns[:, turn] - preceding_ends_ns.max(axis=1)
        pause_ns[turn] = all_pauses_ns[path_tasks, turn].sum()
        latest_turns = np.array(preceding)[preceding_ends_ns.argmax(axis=1)]
        is_on_path[path_tasks, latest_turns[path_tasks]] = True
    return _TurnTimes(request_ns, pause_ns, all_pauses_ns)


def _step_time(step: StepPlan, times: _TurnTimes, total_ns: float) -> StepTime:
    """Return the share of the time of all tasks that a step and the pauses before it took."""
    turns = list(step.turns)
    pauses_ns = times.all_pauses_ns[:, turns].reshape(-1) if step.pause else np.zeros(0, np.int64)
    return StepTime(
        time_share=float(times.request_ns[turns].sum()) / total_ns,
        pause_ms=distribution_of(pauses_ns),
        pause_share=float(times.pause_ns[turns].sum()) / total_ns,
    )
