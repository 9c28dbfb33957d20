"""Check that the stages of a workload describe a load that ends and can be planned."""

from __future__ import annotations

import math
from typing import NamedTuple

from loadgen.core.errors import Code
from loadgen.core.units import NS_PER_S
from loadgen.core.workload.diagnostics import DocumentErrors
from loadgen.core.workload.request_classes import Requests, requests_by_class
from loadgen.core.workload.stages import Closed, Constant, Ramp, Replay, Stage
from loadgen.core.workload.tasks import Task

MAX_PLANNED_ARRIVALS = 200_000_000
"""Arrivals of open loops. Their times alone take 1.6 GB of memory."""
BYTES_PER_ARRIVAL = 8
MAX_TASKS = 500_000
"""Tasks are drawn before the start, which takes about 7 us for each of their requests."""

LOAD_HINT = (
    "use --request-rate 10 (open loop) or --concurrency 8 (closed loop), or write "
    "stages in the file"
)
END_HINT = "use --duration 30s or --num-requests 200, or write duration: or count: in the stage"


def check_stages(stages: list[Stage], requests: Requests, errors: DocumentErrors) -> None:
    """Add an error for each reason why a run with these stages could not start or would never end.

    Either there is nothing to measure, or there are too many requests to plan before the run, or a
    stage has no end.
    """
    if not stages:
        problem = "no load is specified: the file has no stages, and no option sets a load"
        errors.add_file_error("no_load", problem, LOAD_HINT)
        return

    if not any(stage.measured for stage in stages):
        problem = "there is no load to measure: no stage is measured"
        errors.add_at(("stages",), "no_load", problem, LOAD_HINT)
        return

    size_error = _find_task_count_error(stages, requests) or _find_arrival_count_error(stages)
    if size_error is not None:
        errors.add_file_error(size_error.code, size_error.problem, size_error.hint)
        return

    _check_each_stage(stages, errors)


def _check_each_stage(stages: list[Stage], errors: DocumentErrors) -> None:
    """Add an error for each stage that never ends, or that ends before all of its users start.

    The error refers to the stage in the file. Options can add and remove stages, so the stage in
    the file is found by its name. A stage that has no name in the file is found by its index.
    """
    stages_of_file = errors.document.get("stages") or ()
    index_by_name = {stage.get("name"): index for index, stage in enumerate(stages_of_file)}
    for index, stage in enumerate(stages):
        error = _find_endless_stage_error(stage) or _find_late_users_error(stage)
        if error is not None:
            index_in_file = index_by_name.get(stage.name, index)
            errors.add_at(("stages", index_in_file), error.code, error.problem, error.hint)


class _StageError(NamedTuple):
    """What is wrong with stages, and what the user can do."""

    code: Code
    problem: str
    hint: str


def _find_task_count_error(stages: list[Stage], requests: Requests) -> _StageError | None:
    """Return an error if too many tasks have to be drawn before the run, else None.

    The graphs of tasks are drawn before a run, so that sending does not wait for them. That takes
    time for each task.
    """
    if not _draws_tasks(requests):
        return None

    task_count = sum(max(stage.count or 0, _count_planned_arrivals(stage)) for stage in stages)
    if task_count <= MAX_TASKS:
        return None

    return _StageError(
        "too_large",
        f"{task_count:,.0f} tasks would have to be drawn before the "
        f"start, at most {MAX_TASKS:,} are allowed",
        "use a lower count, or a closed loop with only a duration, which "
        "draws tasks during the run",
    )


def _find_arrival_count_error(stages: list[Stage]) -> _StageError | None:
    """Return an error if the arrival times of open loops would need too much memory, else None."""
    planned_arrivals = sum(_count_planned_arrivals(stage) for stage in stages)
    if planned_arrivals <= MAX_PLANNED_ARRIVALS:
        return None

    gigabytes = planned_arrivals * BYTES_PER_ARRIVAL / 1e9
    return _StageError(
        "too_large",
        f"{planned_arrivals:,.0f} requests to plan: "
        f"their scheduled times alone need {gigabytes:,.1f} GB",
        "use a lower rate or a shorter duration (at most "
        f"{MAX_PLANNED_ARRIVALS:,} requests), or a closed loop (--concurrency), "
        "which plans none",
    )


def _count_planned_arrivals(stage: Stage) -> float:
    """Return how many arrival times the schedule of a stage is expected to contain.

    A closed loop has none, because it decides during the run when a request is sent. A stage that
    nothing limits, such as one with an infinite rate and only a duration, is reported by
    `_find_endless_stage_error`. It counts as 0 here.
    """
    arrival = stage.arrival
    if isinstance(arrival, Closed):
        return 0
    if stage.count is not None:
        return stage.count
    if isinstance(arrival, Replay):
        return _count_replayed_arrivals(arrival, stage.duration_ns or 0)

    mean_rate_per_s = arrival.mean_rate if isinstance(arrival, Ramp) else arrival.rate
    if stage.duration_ns is None or not math.isfinite(mean_rate_per_s):
        return 0

    return mean_rate_per_s * stage.duration_ns / NS_PER_S


def _count_replayed_arrivals(arrival: Replay, duration_ns: int) -> float:
    """Return at most how many requests or sessions of a trace arrive in a duration."""
    from loadgen.core.workload.trace_sessions import read_replay_source
    from loadgen.core.workload.traces import read_replayed_trace

    arrivals_per_loop = len(read_replay_source(arrival))
    rate_per_s = read_replayed_trace(arrival).rate * arrival.speed
    arrivals_in_duration = rate_per_s * duration_ns / NS_PER_S + arrivals_per_loop
    return min(arrivals_per_loop * arrival.loop, arrivals_in_duration)


def _draws_tasks(requests: Requests) -> bool:
    """Return True if requests of a class are tasks or sessions of a trace."""
    return any(
        isinstance(class_requests, Task) or getattr(class_requests, "replay", "") == "sessions"
        for class_requests in requests_by_class(requests).values()
    )


def _find_endless_stage_error(stage: Stage) -> _StageError | None:
    """Return an error for a stage that never ends, else None.

    A stage ends after a duration, after a number of requests (`count`), or when its minimums
    (`at_least`) are reached. With an infinite rate a duration is not enough, because without a
    count endlessly many requests are due at once.
    """
    sends_all_at_once = isinstance(stage.arrival, Constant) and math.isinf(stage.arrival.rate)
    if sends_all_at_once and stage.count is None:
        return _StageError(
            "endless",
            f'stage "{stage.name}" sends everything at once, but does not state how many requests',
            "use --num-requests 200 (--warmup 20req), or count: in the stage",
        )

    has_end = stage.duration_ns is not None or stage.count is not None or stage.at_least is not None
    if not has_end:
        problem = f'stage "{stage.name}" never ends: it has neither duration nor count'
        return _StageError("endless", problem, END_HINT)

    return None


def _find_late_users_error(stage: Stage) -> _StageError | None:
    """Return an error for a closed loop that ends before all its users have started, else None."""
    if not isinstance(stage.arrival, Closed) or not stage.duration_ns:
        return None

    ramp_ns = stage.arrival.ramp_ns or 0
    if ramp_ns < stage.duration_ns:
        return None

    return _StageError(
        "out_of_range",
        f'stage "{stage.name}" ends after {stage.duration_ns / NS_PER_S:g} s, '
        "before all its virtual users have started",
        f"use a shorter ramp (--stagger); it is {ramp_ns / NS_PER_S:g} s now",
    )
