"""Conversations and agentic tasks: when each began and ended, how it went, how long it waited.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loadgen.core.metrics.columns import CANCELLED, OK, UNDEFINED, UNFINISHED
from loadgen.core.metrics.windows import is_last_slot_of_task
from loadgen.core.results.record import KIND
from loadgen.core.units import LONGEST_NS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.slo import TaskTerm

NO_SESSION = -1
"""The session of a request that stands alone."""


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
    """Return which of the ended tasks are ok and within the limits of an SLO."""
    # A limit that the SLO does not have is longer than any time of a run.
    max_duration_ns = term.within_ns or LONGEST_NS
    max_wait_ns = term.wait_ns or LONGEST_NS

    is_ok = ended.ok > 0
    is_in_time = ended.end_ns - ended.due_ns <= max_duration_ns
    is_wait_short = ended.longest_wait_ns <= max_wait_ns
    return is_ok & is_in_time & is_wait_short


class _TaskRequests:
    """The requests of conversations and tasks, those of each task one after the other.

    Attributes:
        columns: The records of a stage.
        order: The indices of the requests among these records, in order of their tasks.
    """

    def __init__(self, columns: Columns) -> None:
        """Order the requests by session, so that the requests of each task are adjacent."""
        session_of_record = columns["session"]
        rows = np.flatnonzero(session_of_record != NO_SESSION)
        rows_by_session = np.argsort(session_of_record[rows], kind="stable")

        self.columns = columns
        self.order = rows[rows_by_session]
        self._sessions = session_of_record[self.order]

        # The position of the first request of each task, where the session number changes.
        self._task_starts = np.flatnonzero(np.diff(self._sessions, prepend=NO_SESSION))

    def __len__(self) -> int:
        """Return the number of requests of tasks."""
        return len(self.order)

    def column(self, field: str) -> NDArray[np.int64]:
        """Return a field of the requests."""
        return self.columns.take(field, self.order)

    def smallest(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each task, the smallest of the values of its requests."""
        return self._combine(np.minimum, values)

    def largest(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each task, the largest of the values of its requests."""
        return self._combine(np.maximum, values)

    def total(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each task, the sum of the values of its requests."""
        return self._combine(np.add, values)

    def are_all(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return, for each task, 1 if the mask is True for all of its requests, else 0."""
        return self._combine(np.logical_and, mask)

    def is_any(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return, for each task, 1 if the mask is True for any of its requests, else 0."""
        return self._combine(np.logical_or, mask)

    def _combine(self, operation: np.ufunc, values: NDArray[Any]) -> NDArray[np.int64]:
        """Combine the values of the requests of each task by a binary operation.

        With np.add, the values 1, 2 and 3 and the task starts 0 and 2 give 3 (1 + 2) and 3.
        """
        return operation.reduceat(values, self._task_starts).astype(np.int64)

    def total_tokens(self, field: str) -> NDArray[np.int64]:
        """Return, for each task, the sum of a token count; counts that are not known (-1) are 0."""
        return self.total(np.maximum(self.column(field).astype(np.int64), 0))

    def count_by_task(self) -> NDArray[np.int64]:
        """Return the number of requests of each task."""
        return np.diff(self._task_starts, append=len(self.order))

    def task_numbers(self) -> NDArray[np.int64]:
        """Return the session number of each task."""
        return self._sessions[self._task_starts].astype(np.int64)

    def wait_ns(self) -> NDArray[np.int64]:
        """Return how long each request waited for its first token.

        A response that is not streamed is waited for to its end.
        """
        ttft_ns = self.columns.measure("ttft")[self.order]
        e2e_ns = self.columns.measure("e2e")[self.order]
        has_first_token = ttft_ns != UNDEFINED
        return np.maximum(np.where(has_first_token, ttft_ns, e2e_ns), 0)


def tabulate_tasks(columns: Columns, turns: int) -> TaskTable:
    """Return a table with a row for each task of a stage: a conversation, or a task of an agent.

    A task consists of several requests, which have adjacent numbers in the schedule, their slots. A
    task has ended if the request in its last slot has a record.

    Args:
        columns: The records of the stage.
        turns: The number of slots of each task.
    """
    requests = _TaskRequests(columns)
    if len(requests) == 0:
        return _empty_table()

    last_recorded_slots = requests.largest(requests.column("slot"))
    return TaskTable(
        numbers=requests.task_numbers(),
        columns=_combine_by_task(requests),
        has_ended=is_last_slot_of_task(last_recorded_slots, turns),
    )


def _combine_by_task(requests: _TaskRequests) -> TaskColumns:
    """Return the values of each task, combined from the values of its requests.

    For example, a task begins when its first request is due, and it is ok if all requests are.
    """
    statuses = requests.column("status")
    failure_kinds = requests.column("kind")
    waits_for_first_token_ns = requests.wait_ns()

    return TaskColumns(
        # When the task began and ended. All of its requests belong to the same stage.
        due_ns=requests.smallest(requests.column("due_ns")),
        end_ns=requests.largest(requests.column("end_ns")),
        stage=requests.largest(requests.column("stage")),
        # How it ended.
        ok=requests.are_all(statuses == OK),
        cancelled=requests.is_any(statuses == CANCELLED),
        unfinished=requests.is_any(statuses == UNFINISHED),
        abandoned=requests.is_any(failure_kinds == KIND["abandoned"]),
        # How long it waited, and what it requested.
        wait_ns=requests.total(waits_for_first_token_ns),
        longest_wait_ns=requests.largest(waits_for_first_token_ns),
        requests=requests.count_by_task(),
        input_tokens=requests.total_tokens("input_tokens"),
        cached_tokens=requests.total_tokens("cached_tokens"),
        output_tokens=requests.total_tokens("output_tokens"),
    )


def _empty_table() -> TaskTable:
    """Return a table without tasks."""
    no_values = np.zeros(0, np.int64)
    no_tasks = TaskColumns(*[no_values] * len(TaskColumns._fields))
    return TaskTable(no_values, no_tasks, has_ended=np.zeros(0, bool))
