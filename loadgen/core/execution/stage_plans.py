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

    A stage is one phase of the load, such as the warm-up. If several machines send the run, each of
    them sends one shard of it and records the rate, the virtual users and the requests of its
    shard, so that the results of the shard can be judged without the others.

    Args:
        workload: The workload of the complete run.
        schedule: The schedule of the run, or of one shard of it.
        index: The index of the stage in both.
        start: How its virtual users start, or None if that is not decided yet.
    """
    scheduled_stage = schedule.stages[index]
    request_count = schedule.slot_count_of(scheduled_stage)
    user_count = len(schedule.virtual_users_of(scheduled_stage))

    # Each request has a slot. Every session (conversation) occupies as many slots as the longest
    # one has requests.
    first_slot = scheduled_stage.first_session * scheduled_stage.max_turns
    user_start = UserStart() if start is None else start
    ramp_ns = user_start.ramp_ns

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
        first_slot=first_slot,
        sessions=_session_count_to_record(schedule, scheduled_stage, request_count),
        ramp_s=None if ramp_ns is None else ramp_ns / _NS_PER_S,
        ramp_from=user_start.source,
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

    If requests belong to sessions (conversations or tasks), the number of sessions comes first:
    ["40 conversations", "200 requests"]. What is not known before the run is left out.

    Args:
        stage_plan: What the manifest records of the stage. Each of its slots is one request.
        schedule: The schedule of the run, which has the number of sessions.
        index: The index of the stage in the schedule.
        workload: The workload, which decides whether sessions are called conversations or tasks.
    """
    bounds = []
    session_count = schedule.stages[index].session_count
    request_count = stage_plan.slots

    has_several_turns = schedule.max_turns > 1
    if has_several_turns and session_count is not None:
        bounds.append(format.counted(session_count, _session_noun(workload)))

    if request_count is not None:
        bounds.append(format.counted(request_count, "request"))

    if stage_plan.end_ns is not None:
        duration_s = (stage_plan.end_ns - stage_plan.start_ns) / _NS_PER_S
        bounds.append(f"{duration_s:g} s")

    return bounds


def _describe_stage(
    workload: Workload, schedule: Schedule, index: int, start: UserStart | None
) -> str:
    """Return how the requests of a stage arrive, as text for the manifest.

    An example is "poisson 10/s, at most 8 in prefill". If several machines send the run, the text
    begins with the part that this one sends: "part 1 of 4: poisson 10/s". The time over which
    virtual users start is in the text only if the workload sets it.

    Args:
        workload: The workload of the complete run.
        schedule: The schedule of the run, or of one part (shard) of it.
        index: The index of the stage in both.
        start: How its virtual users start, or None if that is not decided yet.
    """
    text = describe_arrival(_without_computed_ramp(workload.stages[index], start))
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


def _without_computed_ramp(stage: Stage, start: UserStart | None) -> Arrival:
    """Return the arrival process of a stage without a ramp that was computed by loadgen.

    A ramp is the time over which virtual users start. Unless the workload sets it, it depends on
    how fast the server responds, and the text of a stage must be equal for all servers.
    """
    if isinstance(stage.arrival, Closed) and start is not None and start.source != "asked":
        return stage.arrival.model_copy(update={"ramp_ns": None})
    return stage.arrival


def _planned_end_ns(stage: ScheduledStage) -> int | None:
    """Return the planned end of a stage, or None if only its last response ends it."""
    if stage.length_ns is None or stage.start_ns is None:
        return None
    return stage.start_ns + stage.length_ns


def _session_count_to_record(
    schedule: Schedule, stage: ScheduledStage, request_count: int | None
) -> int | None:
    """Return the number of sessions of a stage, or None if the manifest does not record it.

    A session is one conversation or task of several requests. The manifest records the number of
    requests, and also the number of sessions if it does not follow from that by a division: 7
    requests in sessions of at most 3 can be 3 sessions or more. A stage that only a duration limits
    has no known number of sessions before the run.
    """
    is_count_known = stage.session_count is not None and request_count is not None
    if not is_count_known:
        return None
    session_count = schedule.session_count_in_shard(stage)
    follows_from_requests = request_count == session_count * stage.max_turns
    return None if follows_from_requests else session_count


def _session_noun(workload: Workload) -> str:
    """Return what the sessions of a workload are called."""
    if isinstance(workload.requests, Task):
        return "task"
    if isinstance(workload.requests, Mix):
        return "start"
    return "conversation"
