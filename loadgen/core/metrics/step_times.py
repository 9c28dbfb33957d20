"""Divides the time of tasks among their steps.

Pure. Each instant of a task belongs to one step, or to the pause before one. It belongs to the
request that the last request waited for, and so on back to the first request. Requests beside these
that ended earlier take no time of the task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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
    """The due times and ends of the requests of tasks, in ns: a row per task, a column per turn."""

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
    The tasks of a request class have the same steps. Only tasks that ended ok are measured.

    Returns:
        The times of each step of `manifest.steps`, in their order.
    """
    if not manifest.steps:
        return []

    requests = JoinedColumns(measured, only_ok=False)
    step_of_request = step_indices(manifest, requests["request"], requests["turn"])
    time_of_step: dict[int, StepTime] = {}  # by the index of the step in the manifest

    class_names = {step.of_class for step in manifest.steps}
    for class_name in class_names:
        indices = [i for i, step in enumerate(manifest.steps) if step.of_class == class_name]
        steps = [manifest.steps[i] for i in indices]
        is_of_class = np.isin(step_of_request, indices)
        step_times = _measure_steps_of_class(requests, is_of_class, steps)
        time_of_step.update(zip(indices, step_times, strict=True))

    return [time_of_step[i] for i in range(len(manifest.steps))]


def _measure_steps_of_class(
    requests: JoinedColumns, is_of_class: NDArray[np.bool_], steps: Sequence[StepPlan]
) -> list[StepTime]:
    """Return the times of the steps of one request class, all of whose tasks have the same turns.

    A task begins with its first turn and ends with its last one. Its time is divided among the
    requests and pauses on its critical path, which are those that delayed its end.

    Args:
        requests: The requests of all classes.
        is_of_class: Which of them belong to the class.
        steps: The steps of its tasks, which together have all turns.
    """
    preceding_turns = _find_preceding_turns(steps)
    tasks = _select_ok_tasks(requests, is_of_class, turns=len(preceding_turns))
    if not len(tasks.due_ns):
        return [UNKNOWN] * len(steps)

    turn_times = _measure_turn_times(tasks, preceding_turns)
    task_start_ns = tasks.due_ns[:, 0]
    task_end_ns = tasks.end_ns[:, -1]
    total_ns = float((task_end_ns - task_start_ns).sum())

    return [_step_time(step, turn_times, total_ns) for step in steps]


def _find_preceding_turns(steps: Sequence[StepPlan]) -> dict[int, list[int]]:
    """Return, for each turn of the steps, the turns that have to end before it is due."""
    preceding_turns: dict[int, list[int]] = {}
    for step in steps:
        for turn, awaited_turns in zip(step.turns, step.after, strict=True):
            preceding_turns[turn] = list(awaited_turns)
    return preceding_turns


class _TaskLayout(NamedTuple):
    """The place of each request in a table with a row for each task and a column for each turn."""

    row_of_request: NDArray[np.int64]
    turn_of_request: NDArray[np.int64]
    task_count: int
    turns: int

    def tabulate(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return a value of each request as such a table, 0 for a turn that has no request."""
        table = np.zeros((self.task_count, self.turns), np.int64)
        table[self.row_of_request, self.turn_of_request] = values
        return table


def _select_ok_tasks(
    requests: JoinedColumns, is_of_class: NDArray[np.bool_], turns: int
) -> _TaskTimes:
    """Return the times of the tasks whose requests are all recorded and ok.

    Args:
        requests: The requests of all classes.
        is_of_class: Which of them belong to the class whose tasks are selected.
        turns: The number of turns of a complete task.
    """
    # Each task becomes a row of the tables, in the order of the task numbers.
    task_of_request = requests["session"][is_of_class]
    task_numbers, row_of_request = np.unique(task_of_request, return_inverse=True)
    turn_of_request = requests["turn"][is_of_class]
    layout = _TaskLayout(row_of_request, turn_of_request, len(task_numbers), turns)

    request_counts = np.bincount(row_of_request, minlength=len(task_numbers))
    is_request_ok = layout.tabulate(requests["status"][is_of_class] == OK).astype(bool)
    is_task_ok = (request_counts == turns) & is_request_ok.all(axis=1)

    due_ns = layout.tabulate(requests["due_ns"][is_of_class])
    end_ns = layout.tabulate(requests["end_ns"][is_of_class])
    return _TaskTimes(due_ns=due_ns[is_task_ok], end_ns=end_ns[is_task_ok])


def _measure_turn_times(tasks: _TaskTimes, preceding_turns: dict[int, list[int]]) -> _TurnTimes:
    """Return, for each turn, the time that it and the pause before it added to all tasks.

    Only the turns on the critical path of a task count. A turn off that path ran at the same time
    as a longer one, so that it did not delay the end of its task.

    Args:
        tasks: The times of the requests of each task.
        preceding_turns: For each turn, the turns that it waits for.
    """
    is_on_path = _find_critical_paths(tasks, preceding_turns)
    durations_ns = tasks.end_ns - tasks.due_ns
    pauses_ns = _measure_pauses(tasks, preceding_turns)
    request_ns = np.where(is_on_path, durations_ns, 0).sum(axis=0)
    pause_ns = np.where(is_on_path, pauses_ns, 0).sum(axis=0)

    return _TurnTimes(
        request_ns=request_ns.astype(np.float64),
        pause_ns=pause_ns.astype(np.float64),
        all_pauses_ns=pauses_ns,
    )


def _find_critical_paths(
    tasks: _TaskTimes, preceding_turns: dict[int, list[int]]
) -> NDArray[np.bool_]:
    """Return which requests are on the critical path of their task, one row for each task.

    The critical path leads from the last request of a task back to the first: from each request to
    the one that it waited for longest. All tasks are followed at once.

    Args:
        tasks: The times of the requests of each task.
        preceding_turns: For each turn, the turns that it waits for, which are lower ones.
    """
    turns = tasks.due_ns.shape[1]
    is_on_path = np.zeros(tasks.due_ns.shape, bool)

    is_on_path[:, -1] = True
    for turn in reversed(range(turns)):
        # All later turns are done, so it is known by now which tasks have this turn on their path.
        awaited_turns = preceding_turns[turn]
        if not awaited_turns:
            continue

        # For each task, the position in `awaited_turns` of the turn that ended last.
        position_of_last = tasks.end_ns[:, awaited_turns].argmax(axis=1)
        for position, awaited_turn in enumerate(awaited_turns):
            is_last_to_end = position_of_last == position
            leads_to_awaited_turn = is_on_path[:, turn] & is_last_to_end
            is_on_path[leads_to_awaited_turn, awaited_turn] = True

    return is_on_path


def _measure_pauses(tasks: _TaskTimes, preceding_turns: dict[int, list[int]]) -> NDArray[np.int64]:
    """Return the pause before each request, in ns, one row for each task.

    A request is due a pause after the last of those that it waits for has ended. Before a request
    that waits for none, there is no pause.
    """
    pauses_ns = np.zeros(tasks.due_ns.shape, np.int64)
    for turn, awaited_turns in preceding_turns.items():
        if awaited_turns:
            last_end_ns = tasks.end_ns[:, awaited_turns].max(axis=1)
            pauses_ns[:, turn] = tasks.due_ns[:, turn] - last_end_ns
    return pauses_ns


def _step_time(step: StepPlan, times: _TurnTimes, total_ns: float) -> StepTime:
    """Return the share of the time of all tasks that a step and the pauses before it took."""
    turns = list(step.turns)
    pauses_ns = times.all_pauses_ns[:, turns].reshape(-1) if step.pause else np.zeros(0, np.int64)
    return StepTime(
        time_share=float(times.request_ns[turns].sum()) / total_ns,
        pause_ms=distribution_of(pauses_ns),
        pause_share=float(times.pause_ns[turns].sum()) / total_ns,
    )
