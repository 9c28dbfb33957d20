"""Describe the stages of a run as its manifest and the command line show them."""

from __future__ import annotations

import math

from loadgen.core import format
from loadgen.core.execution.staggered_start import UserStart
from loadgen.core.results.manifest import StagePlan
from loadgen.core.schedule.schedule import Schedule, ScheduledStage
from loadgen.core.workload import (
    Arrival,
    Closed,
    Gamma,
    Mix,
    Ramp,
    Replay,
    Stage,
    Task,
    Workload,
)

_NS_PER_S = 1e9


def create_stage_plan(
    workload: Workload, schedule: Schedule, index: int, start: UserStart | None = None
) -> StagePlan:
    """Return the description of one stage of the load for the manifest of a run.

    If the schedule is a shard of a run, rate, virtual users and requests are those of the shard, so
    that its results can be judged on their own.

    Args:
        workload: The workload.
        schedule: The schedule, or a shard of it.
        index: The index of the stage in both.
        start: How its virtual users start, or None if that is not decided yet.
    """
    scheduled_stage = schedule.stages[index]
    request_count = schedule.slot_count_of(scheduled_stage)
    user_count = len(schedule.virtual_users_of(scheduled_stage))
    ramp_ns = None if start is None else start.ramp_ns
    return StagePlan(
        name=scheduled_stage.name,
        arrival=_describe_stage(workload, schedule, index, start),
        closed=scheduled_stage.is_closed_loop,
        measured=scheduled_stage.measured,
        start_ns=scheduled_stage.start_ns or 0,
        end_ns=_planned_end_ns(scheduled_stage),
        slots=request_count,
        rate=_shard_rate(workload.stages[index].arrival, schedule),
        concurrency=user_count if user_count else None,
        # Slots are numbered by session: each session has room for as many turns as the longest.
        first_slot=scheduled_stage.first_session * scheduled_stage.max_turns,
        sessions=_irregular_session_count(schedule, scheduled_stage, request_count),
        ramp_s=None if ramp_ns is None else ramp_ns / _NS_PER_S,
        ramp_from="" if start is None else start.source,
    )


def _shard_rate(arrival: Arrival, schedule: Schedule) -> float | None:
    """Return the requests per second of a shard, or None for an arrival process without a rate.

    A closed loop has no rate, and those of a ramp and of a recorded trace change.
    """
    if isinstance(arrival, Closed | Ramp | Replay):
        return None
    return arrival.rate / schedule.shard_count


def describe_arrival(arrival: Arrival) -> str:
    """Return an arrival process as text, for example "poisson 10/s"."""
    if isinstance(arrival, Closed):
        return f"{arrival.concurrency} in flight (closed loop{_describe_ramp(arrival)})"
    if isinstance(arrival, Ramp):
        return f"ramp {arrival.from_rate:g}/s to {arrival.to_rate:g}/s"
    if isinstance(arrival, Gamma):
        return f"gamma {arrival.rate:g}/s, burstiness {arrival.burstiness:g}"
    if isinstance(arrival, Replay):
        speed = "" if arrival.speed == 1 else f", at {arrival.speed:g} times the recorded speed"
        return f"trace {arrival.file.name}{speed}"
    if arrival.rate == math.inf:
        return "everything at once"
    return f"{arrival.tag} {arrival.rate:g}/s"


def describe_bounds(
    stage_plan: StagePlan, schedule: Schedule, index: int, workload: Workload
) -> list[str]:
    """Return how much a stage sends and for how long, for example ["4,308 requests", "180 s"].

    If requests belong to conversations or tasks, their number comes first.

    Args:
        stage_plan: What the manifest records of the stage.
        schedule: The schedule of the run.
        index: The index of the stage in the schedule.
        workload: The workload, which decides what its sessions are called.
    """
    bounds = []
    session_count = schedule.stages[index].session_count
    has_several_turns = schedule.max_turns > 1
    if has_several_turns and session_count is not None:
        bounds.append(format.counted(session_count, _session_noun(workload)))
    if stage_plan.slots is not None:
        bounds.append(format.counted(stage_plan.slots, "request"))
    if stage_plan.end_ns is not None:
        duration_s = (stage_plan.end_ns - stage_plan.start_ns) / _NS_PER_S
        bounds.append(f"{duration_s:g} s")
    return bounds


def _describe_stage(
    workload: Workload, schedule: Schedule, index: int, start: UserStart | None
) -> str:
    """Return the arrival process of a stage with its limits as text for the manifest.

    Example: "part 1 of 4: poisson 10/s, at most 8 in prefill" for the first of four shards of a
    run, which send a part each.

    Args:
        workload: The workload.
        schedule: The schedule, or a shard of it.
        index: The index of the stage in both.
        start: How its virtual users start, or None if that is not decided yet.
    """
    text = describe_arrival(_requested_arrival(workload.stages[index], start))
    if schedule.shard_count > 1:
        text = f"part {schedule.shard_index + 1} of {schedule.shard_count}: {text}"
    if workload.max_in_prefill is not None:
        text = f"{text}, at most {workload.max_in_prefill:,} in prefill"
    return text


def _describe_ramp(arrival: Closed) -> str:
    """Return how a closed loop begins as the workload says; empty if it says nothing."""
    if arrival.ramp_ns is None:
        return ""
    if arrival.ramp_ns == 0:
        return ", all started at once"
    return f", started over {arrival.ramp_ns / _NS_PER_S:g} s"


def _requested_arrival(stage: Stage, start: UserStart | None) -> Arrival:
    """Return the arrival process as the workload requests it.

    A ramp that was decided later is left out, so that the text of a stage is equal for all servers.
    """
    if isinstance(stage.arrival, Closed) and start is not None and start.source != "asked":
        return stage.arrival.model_copy(update={"ramp_ns": None})
    return stage.arrival


def _planned_end_ns(stage: ScheduledStage) -> int | None:
    """Return the planned end of a stage, or None if only its last response ends it."""
    if stage.length_ns is None or stage.start_ns is None:
        return None
    return stage.start_ns + stage.length_ns


def _irregular_session_count(
    schedule: Schedule, stage: ScheduledStage, request_count: int | None
) -> int | None:
    """Return the number of sessions of a stage if the manifest must record it, or else None.

    A session is one conversation or task of several requests. If all sessions have the same number
    of requests, readers of the manifest compute the number of sessions from that of requests. A
    stage that only a duration limits has no known number of either.
    """
    has_unknown_length = stage.session_count is None or request_count is None
    if has_unknown_length:
        return None
    session_count = schedule.session_count_in_shard(stage)
    has_equal_sessions = request_count == session_count * stage.max_turns
    return None if has_equal_sessions else session_count


def _session_noun(workload: Workload) -> str:
    """Return what the sessions of a workload are called."""
    if isinstance(workload.requests, Task):
        return "task"
    if isinstance(workload.requests, Mix):
        return "start"
    return "conversation"
