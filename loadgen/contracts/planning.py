"""The load of each level of a contract: how much is expected of it, the same for a shorter time, in words. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from loadgen import format
from loadgen.contracts.schema import ContractLevel, Planned
from loadgen.workload import Closed, Ramp, Replay, Stage, Synthetic, Workload


def planned(level: ContractLevel, workload: Workload) -> Planned:
    """A level with its load, and how much of it is expected."""
    request_count, rate, duration_ns = expected(workload)
    return Planned(level=level, workload=workload, requests=request_count, rate=rate, duration_ns=duration_ns)


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
    _, _, before_ns = expected(workload)
    factor = None if before_ns is None else length_ns / before_ns
    stages = [stage if not stage.measured else _scaled(stage, factor, length_ns) for stage in workload.stages]
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


def expected(workload: Workload) -> tuple[int | None, float | None, int | None]:
    """Expected measured requests, their rate per second and their duration in ns. None where it is not known before."""
    requests, total_requests, length_s = workload.requests, 0.0, 0.0
    turns = requests.turns.count if isinstance(requests, Synthetic) and requests.turns else 1
    for stage in workload.stages:
        if not stage.measured:
            continue
        law = stage.arrival
        if isinstance(law, Closed):
            if stage.count is None:
                return None, None, stage.duration_ns
            total_requests, length_s = total_requests + stage.count * turns, math.nan
            continue
        if isinstance(law, Replay):
            return None, None, stage.duration_ns  # the trace decides
        rate = (law.from_rate + law.to_rate) / 2 if isinstance(law, Ramp) else law.rate
        by_time = math.inf if stage.duration_ns is None else rate * stage.duration_ns / 1e9
        stage_requests = min(by_time, stage.count or math.inf)
        if stage.at_least is not None:
            stage_requests = max(rate * stage.at_least.duration_ns / 1e9, stage.at_least.count)
        total_requests += stage_requests * turns
        length_s += stage_requests / rate if math.isfinite(rate) else 0.0
    known = math.isfinite(length_s) and length_s > 0
    return int(total_requests), total_requests / length_s if known else None, round(length_s * 1e9) if known else None


def planned_words(level_plan: Planned) -> list[str]:
    """A level's load as lines of text, to show before the run."""
    level = level_plan.level
    each = "" if level_plan.requests is None else f", {format.counted(level_plan.requests, 'request')}"
    length = "" if level_plan.duration_ns is None else f", {format.duration(level_plan.duration_ns / 1e9)}"
    lines = [f"level {level.name}: {level.workload}{each}{length}, {format.counted(level.repeats, 'run')}"]
    lines += [f"  {shortened}"] if (shortened := shortened_words(level_plan)) else []
    lines += [f"  can no longer pass: {', '.join(level_plan.undecidable)}"] if level_plan.undecidable else []
    return lines


def shortened_words(level_plan: Planned) -> str:
    """By how much a level's load is shorter than in the contract; "" when it is not."""
    if level_plan.shortened_from_ns is None or level_plan.duration_ns is None:
        return ""
    before = "its own end" if not level_plan.shortened_from_ns else format.duration(level_plan.shortened_from_ns / 1e9)
    return f"{format.duration(level_plan.duration_ns / 1e9)} of load instead of {before} (--duration)"
