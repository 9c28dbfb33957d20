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
    """Where the time of the ok tasks of a class went, in ns. A turn is a request of a task.

    Attributes:
        total_ns: The durations of all tasks together.
        request_ns: For each turn, the time by which its requests made the tasks longer.
        pause_ns: For each turn, the time by which the pauses before it made the tasks longer.
        pauses_ns: The pause before each request: a row per task, a column per turn.
    """

    total_ns: float
    request_ns: NDArray[np.float64]
    pause_ns: NDArray[np.float64]
    pauses_ns: NDArray[np.int64]


def measure_step_times(measured_stages: Sequence[Columns], manifest: RunManifest) -> list[StepTime]:
    """Return, for each step of agentic tasks, its share of the time of the tasks that ended ok.

    A task is a series of requests by an agent. A step is a named group of these requests. All tasks
    of a request class have the same steps.
    """
    if not manifest.steps:
        return []

    requests = JoinedColumns(measured_stages, only_ok=False)
    step_of_request = step_indices(manifest, requests["request"], requests["turn"])

    times_by_class: dict[str, _TurnTimes | None] = {}
    for class_name in {step.of_class for step in manifest.steps}:
        step_numbers = [
            number for number, step in enumerate(manifest.steps) if step.of_class == class_name
        ]
        steps = [manifest.steps[number] for number in step_numbers]
        is_of_class = np.isin(step_of_request, step_numbers)
        times_by_class[class_name] = _measure_class(requests, is_of_class, steps)

    return [_step_time(step, times_by_class[step.of_class]) for step in manifest.steps]


def _measure_class(
    requests: JoinedColumns, is_of_class: NDArray[np.bool_], steps: Sequence[StepPlan]
) -> _TurnTimes | None:
    """Return where the time of the ok tasks of a request class went, or None without ok tasks.

    Args:
        requests: The requests of all classes.
        is_of_class: Which requests belong to the class.
        steps: All steps of the tasks of the class.
    """
    preceding_turns = _find_preceding_turns(steps)
    tasks = _select_ok_tasks(requests, is_of_class, turns=len(preceding_turns))
    task_count = len(tasks.due_ns)
    if task_count == 0:
        return None
    return _measure_turn_times(tasks, preceding_turns)


def _total_duration_ns(tasks: _TaskTimes) -> float:
    """Return the sum of the durations of all tasks, from the first turn to the end of the last."""
    first_due_ns = tasks.due_ns[:, 0]
    last_end_ns = tasks.end_ns[:, -1]
    return float((last_end_ns - first_due_ns).sum())


def _find_preceding_turns(steps: Sequence[StepPlan]) -> dict[int, list[int]]:
    """Return, for each turn of the steps, the turns that have to end before it is due."""
    preceding_turns: dict[int, list[int]] = {}
    for step in steps:
        for turn, awaited_turns in zip(step.turns, step.after, strict=True):
            preceding_turns[turn] = list(awaited_turns)
    return preceding_turns


class _TaskTable(NamedTuple):
    """Arranges requests in a table with a row for each task and a column for each turn.

    Attributes:
        row_of_request: The row of each request.
        turn_of_request: The turn of each request, which is its column.
        task_count: The number of rows.
        turns: The number of columns.
    """

    row_of_request: NDArray[np.int64]
    turn_of_request: NDArray[np.int64]
    task_count: int
    turns: int

    @classmethod
    def of_requests(
        cls, task_of_request: NDArray[np.int64], turn_of_request: NDArray[np.int64], turns: int
    ) -> _TaskTable:
        """Return the table for some requests: those of the tasks 7, 9 and 7 get rows 0, 1 and 0."""
        task_ids, row_of_request = np.unique(task_of_request, return_inverse=True)
        return cls(row_of_request, turn_of_request, task_count=len(task_ids), turns=turns)

    def fill(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the table with a value of each request, and 0 for a turn without a request."""
        table = np.zeros((self.task_count, self.turns), np.int64)
        table[self.row_of_request, self.turn_of_request] = values
        return table

    def find_complete_rows(self, is_valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which rows have a request for each turn, all of which are valid."""
        request_counts = np.bincount(self.row_of_request, minlength=self.task_count)
        valid_requests = self.fill(is_valid).sum(axis=1)
        has_all_requests: NDArray[np.bool_] = request_counts == self.turns
        are_all_valid: NDArray[np.bool_] = valid_requests == self.turns
        return has_all_requests & are_all_valid


def _select_ok_tasks(
    requests: JoinedColumns, is_of_class: NDArray[np.bool_], turns: int
) -> _TaskTimes:
    """Return the times of the tasks of one request class whose requests are all ok.

    Args:
        requests: The requests of all classes.
        is_of_class: Which requests belong to the class.
        turns: The number of requests of a complete task.
    """
    task_table = _TaskTable.of_requests(
        task_of_request=requests["session"][is_of_class],
        turn_of_request=requests["turn"][is_of_class],
        turns=turns,
    )
    status_of_request = requests["status"][is_of_class]
    is_task_ok = task_table.find_complete_rows(status_of_request == OK)

    # Each table has a row for each task, and a column for each turn.
    due_ns_by_task = task_table.fill(requests["due_ns"][is_of_class])
    end_ns_by_task = task_table.fill(requests["end_ns"][is_of_class])
    return _TaskTimes(due_ns=due_ns_by_task[is_task_ok], end_ns=end_ns_by_task[is_task_ok])


def _measure_turn_times(tasks: _TaskTimes, preceding_turns: dict[int, list[int]]) -> _TurnTimes:
    """Return by how much each turn, and the pause before it, made the tasks longer.

    Requests of a task may run at the same time. If one takes 4 s and another one 6 s, only the
    second one makes the task longer, so the first one counts as 0 s.

    Args:
        tasks: The times of the requests of each task.
        preceding_turns: For each turn, the turns that it waits for.
    """
    makes_task_longer = _find_critical_paths(tasks, preceding_turns)
    durations_ns = tasks.end_ns - tasks.due_ns
    pauses_ns = _measure_pauses(tasks, preceding_turns)

    # Each row is a task and each column a turn, so the sum of a column is that over all tasks.
    request_ns = np.where(makes_task_longer, durations_ns, 0).sum(axis=0)
    pause_ns = np.where(makes_task_longer, pauses_ns, 0).sum(axis=0)

    return _TurnTimes(
        total_ns=_total_duration_ns(tasks),
        request_ns=request_ns.astype(np.float64),
        pause_ns=pause_ns.astype(np.float64),
        pauses_ns=pauses_ns,
    )


def _find_critical_paths(
    tasks: _TaskTimes, preceding_turns: dict[int, list[int]]
) -> NDArray[np.bool_]:
    """Return which requests delayed the end of their task: a row per task, a column per turn.

    The last turn did. If it waited for the turns 1 and 2, which ended after 4 s and 6 s, turn 2
    delayed the end and turn 1 did not. This goes on with the turns that turn 2 waited for.

    Args:
        tasks: The times of the requests of each task.
        preceding_turns: For each turn, the turns that it waits for, all of which are lower.
    """
    delays_end = np.zeros(tasks.due_ns.shape, bool)
    delays_end[:, -1] = True

    for turn in sorted(preceding_turns, reverse=True):
        awaited_turns = preceding_turns[turn]
        if not awaited_turns:
            continue

        last_awaited_turn = _find_turn_that_ended_last(tasks, awaited_turns)
        for awaited_turn in awaited_turns:
            ended_last = last_awaited_turn == awaited_turn
            delays_end[:, awaited_turn] |= delays_end[:, turn] & ended_last

    return delays_end


def _find_turn_that_ended_last(tasks: _TaskTimes, turns: list[int]) -> NDArray[np.int64]:
    """Return, for each task, which of some turns ended last, the first of them if two did."""
    positions = tasks.end_ns[:, turns].argmax(axis=1)
    last_turns: NDArray[np.int64] = np.array(turns)[positions]
    return last_turns


def _measure_pauses(tasks: _TaskTimes, preceding_turns: dict[int, list[int]]) -> NDArray[np.int64]:
    """Return the pause before each request, in ns: a row per task, a column per turn.

    A request of a task waits for other requests of the task. The pause lasts from the end of the
    last of these until the request is due. A request that waits for no other has no pause.

    Args:
        tasks: The times of the requests of each task.
        preceding_turns: For each turn, the turns that it waits for.
    """
    pauses_ns = np.zeros(tasks.due_ns.shape, np.int64)
    for turn, awaited_turns in preceding_turns.items():
        if awaited_turns:
            end_of_awaited_ns = tasks.end_ns[:, awaited_turns]
            last_end_ns = end_of_awaited_ns.max(axis=1)
            pauses_ns[:, turn] = tasks.due_ns[:, turn] - last_end_ns

    return pauses_ns


def _step_time(step: StepPlan, times: _TurnTimes | None) -> StepTime:
    """Return the share of the time of tasks that the requests of a step took, and its pauses.

    The pauses are those before the requests, in which the agent runs a tool, for example.

    Args:
        step: The plan of the step.
        times: Where the time of the tasks went, None if no task ended ok.
    """
    if times is None:
        return UNKNOWN

    turns = list(step.turns)
    request_ns = float(times.request_ns[turns].sum())
    pause_ns = float(times.pause_ns[turns].sum())

    # A step without planned pauses has no distribution of them.
    planned_pauses_ns = np.zeros(0, np.int64)
    if step.pause:
        planned_pauses_ns = times.pauses_ns[:, turns].reshape(-1)

    return StepTime(
        time_share=request_ns / times.total_ns,
        pause_ms=distribution_of(planned_pauses_ns),
        pause_share=pause_ns / times.total_ns,
    )
