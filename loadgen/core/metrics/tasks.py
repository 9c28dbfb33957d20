"""Conversations and agentic tasks: when each began and ended, how it went, how long it waited.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loadgen.core.metrics.columns import CANCELLED, OK, UNDEFINED, UNFINISHED
from loadgen.core.metrics.windows import ends_chain
from loadgen.core.results.record import KIND
from loadgen.core.units import LONGEST_NS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.slo import TaskTerm


class TaskColumns(NamedTuple):
    """Tasks as columns, with one value for each task.

    Attributes:
        due_ns: The due time of the first request.
        end_ns: The end of the last request.
        ok: 1 if all requests are ok, else 0.
        cancelled: 1 if a request was cancelled, else 0.
        unfinished: 1 if a request was unfinished when the drain ended, else 0.
        abandoned: 1 if the user went away in the middle of a response, else 0.
        stage: The stage of the task.
        wait_ns: The time waited for first tokens, all requests together.
        longest_wait_ns: The longest time waited for a first token.
        requests: The number of requests.
        input_tokens: Tokens of all prompts.
        cached_tokens: Prompt tokens that came from the cache of the server.
        output_tokens: Tokens of all responses.
    """

    due_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    ok: NDArray[np.int64]
    cancelled: NDArray[np.int64]
    unfinished: NDArray[np.int64]
    abandoned: NDArray[np.int64]
    stage: NDArray[np.int64]
    wait_ns: NDArray[np.int64]
    longest_wait_ns: NDArray[np.int64]
    requests: NDArray[np.int64]
    input_tokens: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    def select(self, chosen: NDArray[np.bool_]) -> TaskColumns:
        """Return the columns of some of the tasks."""
        return TaskColumns(*(column[chosen] for column in self))


class TaskTable(NamedTuple):
    """What some requests say about their tasks.

    Attributes:
        numbers: The number of each task.
        columns: What is known of each task.
        has_ended: Whether the last request of the task is among the requests.
    """

    numbers: NDArray[np.int64]
    columns: TaskColumns
    has_ended: NDArray[np.bool_]


def meets_task_term(ended: TaskColumns, term: TaskTerm) -> NDArray[np.bool_]:
    """Return which of these tasks, which have all ended, are within the limits of an SLO."""
    max_duration_ns = term.within_ns or LONGEST_NS
    max_wait_ns = term.wait_ns or LONGEST_NS
    is_in_time = ended.end_ns - ended.due_ns <= max_duration_ns
    return (ended.ok > 0) & is_in_time & (ended.longest_wait_ns <= max_wait_ns)


def tabulate_tasks(columns: Columns, turns: int) -> TaskTable:
    """Return the tasks that these requests belong to.

    Requests that stand alone are left out. `turns` is the number of requests of the longest task,
    from the manifest of the run.
    """
    task_rows = np.flatnonzero(columns["session"] >= 0)
    if not len(task_rows):
        empty = np.zeros(0, np.int64)
        columns_of_none = TaskColumns(*[empty] * len(TaskColumns._fields))
        return TaskTable(empty, columns_of_none, np.zeros(0, bool))
    order = task_rows[np.argsort(columns.take("session", task_rows), kind="stable")]
    sessions = columns.take("session", order)
    starts = np.flatnonzero(np.diff(sessions, prepend=-1))

    def combine(operation: np.ufunc, values: NDArray[Any]) -> NDArray[np.int64]:
        """Combine the values of all requests of each task into one."""
        return operation.reduceat(values, starts).astype(np.int64)

    def total_tokens(field: str) -> NDArray[np.int64]:
        return combine(np.add, np.maximum(columns.take(field, order).astype(np.int64), 0))

    status = columns.take("status", order)
    wait_ns = _wait_ns(columns, order)
    task_columns = TaskColumns(
        due_ns=combine(np.minimum, columns.take("due_ns", order)),
        end_ns=combine(np.maximum, columns.take("end_ns", order)),
        ok=combine(np.logical_and, status == OK),
        cancelled=combine(np.logical_or, status == CANCELLED),
        unfinished=combine(np.logical_or, status == UNFINISHED),
        abandoned=combine(np.logical_or, columns.take("kind", order) == KIND["abandoned"]),
        stage=combine(np.maximum, columns.take("stage", order)),
        wait_ns=combine(np.add, wait_ns),
        longest_wait_ns=combine(np.maximum, wait_ns),
        requests=np.diff(starts, append=len(order)),
        input_tokens=total_tokens("input_tokens"),
        cached_tokens=total_tokens("cached_tokens"),
        output_tokens=total_tokens("output_tokens"),
    )
    has_ended = ends_chain(combine(np.maximum, columns.take("slot", order)), turns)
    return TaskTable(sessions[starts].astype(np.int64), task_columns, has_ended)


def _wait_ns(columns: Columns, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how long each request waited for its first token.

    A response that is not streamed is waited for to its end.
    """
    ttft_ns = columns.measure("ttft")[order]
    e2e_ns = columns.measure("e2e")[order]
    return np.maximum(np.where(ttft_ns == UNDEFINED, e2e_ns, ttft_ns), 0)
