"""The load of each level of a contract: how much is expected of it, the same for a shorter time, in words. Pure."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from loadgen.contracts.schema import OF_TASKS, ContractLevel, Planned, PlannedClass, Promise
from loadgen.core import format
from loadgen.core.schedule.sessions import build_sessions
from loadgen.core.workload import Closed, Mix, Ramp, Replay, Stage, Synthetic, Workload

JUDGED_HERE = ("not_offered_share",)  # limits of a valid run that the contract judges itself
DRAWN = 200  # starts of a class, to know how many requests one has on average


def planned(level: ContractLevel, workload: Workload) -> Planned:
    """A level with its load, and how much of it is expected."""
    starts, duration_ns = expected(workload)
    classes = _classes(workload)
    requests = (
        None if starts is None else starts * sum(one.share * one.requests_each for one in classes)
    )
    rate = None if requests is None or duration_ns is None else requests / (duration_ns / 1e9)
    return Planned(
        level=level,
        workload=workload,
        classes=classes,
        starts=starts,
        requests=None if requests is None else round(requests),
        rate=rate,
        duration_ns=duration_ns,
    )


def shortened(plan: Planned, longest_ns: int) -> Planned:
    """The level with a load of at most this length."""
    if plan.duration_ns is not None and plan.duration_ns <= longest_ns:
        return plan
    shorter = planned(plan.level, lasting(plan.workload, longest_ns))
    return replace(shorter, shortened_from_ns=plan.duration_ns or 0)


def lasting(workload: Workload, length_ns: int) -> Workload:
    """The workload with measured stages of this length together, in their old proportion.

    Where the length was not known before, each measured stage ends after it, or earlier by its count.
    """
    _, before_ns = expected(workload)
    factor = None if before_ns is None else length_ns / before_ns
    stages = [
        stage if not stage.measured else _scaled(stage, factor, length_ns)
        for stage in workload.stages
    ]
    return workload.model_copy(update={"stages": tuple(stages)})


def _scaled(stage: Stage, factor: float | None, length_ns: int) -> Stage:
    if factor is None or isinstance(stage.arrival, Replay):
        return stage.model_copy(update={"duration_ns": length_ns})
    changed: dict[str, Any] = {}
    if stage.duration_ns is not None:
        changed["duration_ns"] = max(round(stage.duration_ns * factor), 1)
    if stage.count is not None:
        changed["count"] = max(round(stage.count * factor), 1)
    if least := stage.at_least:
        scaled = {
            "duration_ns": max(round(least.duration_ns * factor), 1),
            "count": max(round(least.count * factor), 1),
        }
        changed["at_least"] = least.model_copy(update=scaled)
    return stage.model_copy(update=changed)


def expected(workload: Workload) -> tuple[float | None, int | None]:
    """Expected measured starts (tasks, conversations, single requests), and their duration in ns; None where it is not
    known before.
    """
    starts, length_s = 0.0, 0.0
    for stage in workload.stages:
        if not stage.measured:
            continue
        law = stage.arrival
        if isinstance(law, Closed):
            if stage.count is None:
                return None, stage.duration_ns
            starts, length_s = starts + stage.count, math.nan
            continue
        if isinstance(law, Replay):
            return None, stage.duration_ns  # the trace decides
        rate = law.mean_rate if isinstance(law, Ramp) else law.rate
        by_time = math.inf if stage.duration_ns is None else rate * stage.duration_ns / 1e9
        of_stage = min(by_time, stage.count or math.inf)
        if stage.at_least is not None:
            of_stage = max(rate * stage.at_least.duration_ns / 1e9, stage.at_least.count)
        starts += of_stage
        length_s += of_stage / rate if math.isfinite(rate) else 0.0
    return starts, round(length_s * 1e9) if math.isfinite(length_s) and length_s > 0 else None


def _classes(workload: Workload) -> tuple[PlannedClass, ...]:
    """The classes of a workload; one without a name for a workload that has none."""
    requests = workload.requests
    classes = (
        [
            (name, float(one.weight), one.slo or workload.slo, one.requests)
            for name, one in requests.classes.items()
        ]
        if isinstance(requests, Mix)
        else [("", 1.0, workload.slo, requests)]
    )
    classes_planned = []
    for name, share, slo, of_class in classes:
        sessions = build_sessions(of_class, 0)
        classes_planned.append(
            PlannedClass(
                name, share, slo, sessions.total_turns(0, DRAWN) / DRAWN, sessions.max_turns > 1
            )
        )
    return tuple(classes_planned)


def of_term(term: Promise, plan: Planned) -> list[PlannedClass]:
    """The classes that a term is about."""
    return [one for one in plan.classes if not term.class_name or one.name == term.class_name]


def each(term: Promise, plan: Planned) -> float:
    """How many of what a term is about, requests or tasks, a start brings on average."""
    if term.kind in OF_TASKS:
        return sum(one.share for one in of_term(term, plan) if one.is_session)
    return sum(one.share * one.requests_each for one in of_term(term, plan))


def planned_words(level_plan: Planned) -> list[str]:
    """A level's load as lines of text, to show before the run."""
    level = level_plan.level
    each = (
        "" if level_plan.requests is None else f", {format.counted(level_plan.requests, 'request')}"
    )
    tasks = sum(one.share for one in level_plan.classes if one.is_session) * (
        level_plan.starts or 0
    )
    of = (
        "conversations" if isinstance(level_plan.workload.requests, Synthetic) else "tasks"
    )  # as its run says
    each = f", {tasks:,.0f} {of}{each}" if tasks else each
    length = (
        ""
        if level_plan.duration_ns is None
        else f", {format.duration(level_plan.duration_ns / 1e9)}"
    )
    lines = [
        f"level {level.name}: {level.workload}{each}{length}, {format.counted(level.repeats, 'run')}"
    ]
    if level_plan.is_auto:
        reason = f": {level_plan.decided_by} needs it" if level_plan.decided_by else ""
        lines.append(f"  duration auto{reason}; extended while the level is undecided")
    lines += [f"  {shortened}"] if (shortened := shortened_words(level_plan)) else []
    lines += (
        [f"  can no longer pass: {', '.join(level_plan.undecidable)}"]
        if level_plan.undecidable
        else []
    )
    return lines


def shortened_words(level_plan: Planned) -> str:
    """By how much a level's load is shorter than in the contract; "" when it is not."""
    if level_plan.shortened_from_ns is None or level_plan.duration_ns is None:
        return ""
    before = (
        "its own end"
        if not level_plan.shortened_from_ns
        else format.duration(level_plan.shortened_from_ns / 1e9)
    )
    return (
        f"{format.duration(level_plan.duration_ns / 1e9)} of load instead of {before} (--duration)"
    )
