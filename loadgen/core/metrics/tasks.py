"""Conversations and agentic tasks, one by one: when each began and ended, how it went, how long it waited. Pure."""

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
    """Tasks as columns; `ok`, `cancelled`, `unfinished` and `abandoned` are 0 or 1."""

    due: NDArray[np.int64]  # of the first request
    ok: NDArray[np.int64]  # all of its requests
    cancelled: NDArray[np.int64]
    unfinished: NDArray[np.int64]
    stage: NDArray[np.int64]
    abandoned: NDArray[np.int64]
    wait: NDArray[np.int64]  # for first tokens, all requests together
    longest_wait: NDArray[np.int64]
    requests: NDArray[np.int64]
    input: NDArray[np.int64]  # tokens
    cached: NDArray[np.int64]
    output: NDArray[np.int64]


class TaskTable(NamedTuple):
    """What some requests say about their tasks. `over`: whether the last request of the task is among them."""

    numbers: NDArray[np.int64]
    columns: TaskColumns
    end: NDArray[np.int64]  # of the last request
    over: NDArray[np.bool_]


def kept(ended: TaskColumns, end: NDArray[np.int64], term: TaskTerm) -> NDArray[np.bool_]:
    """Which of these tasks, that have ended, kept what was promised of them."""
    within, wait = term.within_ns or LONGEST_NS, term.wait_ns or LONGEST_NS
    return (ended.ok > 0) & (end - ended.due <= within) & (ended.longest_wait <= wait)


def of_requests(columns: Columns, turns: int) -> TaskTable:
    """The tasks that these requests belong to; requests that stand alone are left out. `turns`: of the header."""
    inside = np.flatnonzero(columns["session"] >= 0)
    if not len(inside):
        none = np.zeros(0, np.int64)
        return TaskTable(none, TaskColumns(*[none] * len(TaskColumns._fields)), none, none > 0)
    order = inside[np.argsort(columns.take("session", inside), kind="stable")]
    sessions = columns.take("session", order)
    starts = np.flatnonzero(np.diff(sessions, prepend=-1))
    status, wait = columns.take("status", order), columns.measure("ttft")[order]
    # an answer that is not streamed is waited for to its end
    wait = np.maximum(np.where(wait == UNDEFINED, columns.measure("e2e")[order], wait), 0)

    def whole(how: np.ufunc, values: NDArray[Any]) -> NDArray[np.int64]:
        return (
            how.reduceat(values, starts).astype(np.int64) if len(starts) else np.zeros(0, np.int64)
        )

    parts = TaskColumns(
        due=whole(np.minimum, columns.take("due_ns", order)),
        ok=whole(np.logical_and, status == OK),
        cancelled=whole(np.logical_or, status == CANCELLED),
        unfinished=whole(np.logical_or, status == UNFINISHED),
        stage=whole(np.maximum, columns.take("stage", order)),
        abandoned=whole(np.logical_or, columns.take("kind", order) == KIND["abandoned"]),
        wait=whole(np.add, wait),
        longest_wait=whole(np.maximum, wait),
        requests=np.diff(starts, append=len(order)),
        **{
            name: whole(
                np.add, np.maximum(columns.take(f"{name}_tokens", order).astype(np.int64), 0)
            )
            for name in ("input", "cached", "output")
        },
    )
    over = ends_chain(whole(np.maximum, columns.take("slot", order)), turns)
    return TaskTable(
        sessions[starts].astype(np.int64),
        parts,
        whole(np.maximum, columns.take("end_ns", order)),
        over,
    )
