"""Plan the load of each level of a contract: how many requests are expected, and for how long.

This module is pure.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from loadgen.contracts.schema import AnswerCheck, Contract, ContractLevel
from loadgen.contracts.terms import NS_PER_S, ContractTerm
from loadgen.core import format
from loadgen.core.schedule.sessions import build_sessions
from loadgen.core.slo import Slo
from loadgen.core.workload import Closed, Mix, Ramp, Replay, Stage, Synthetic, Workload

JUDGED_HERE = ("not_offered_share",)
"""Limits on a valid run that the contract judges itself."""

SAMPLED_STARTS = 200
"""Starts of a class that are built to estimate how many requests a start has on average."""


class RequestClassPlan(NamedTuple):
    """A class of requests in the load of a level.

    A workload without classes has one without a name.
    """

    name: str
    share: float  # of all starts
    slo: Slo | None
    requests_per_start: float  # mean
    is_session: bool  # whether a start is a task or a conversation


class LevelPlan(Struct, frozen=True, kw_only=True):
    """The planned load of a level of a contract.

    A start is what an arrival begins: a task, a conversation or a single request.

    Attributes:
        level: The level.
        workload: The level's workload, with the level's own rate, length and SLO.
        classes: The classes of requests in it.
        starts: Expected starts of one run. None for a closed loop that is limited by time.
        requests: Expected measured requests of one run, if known before the run.
        rate: Expected measured requests per second, if known before the run.
        duration_ns: Length of the measured stages together, if known before the run.
        original_duration_ns: Length according to the contract if the load was shortened (0 if it
            is not known before the run), else None.
        undecidable: The terms, as text, that cannot pass in the shortened load.
        is_auto: Whether the terms decide how long the load is.
        decisive_term: The term, as text, that needs the longest load.
    """

    level: ContractLevel
    workload: Workload
    classes: tuple[RequestClassPlan, ...]
    starts: float | None
    requests: int | None
    rate: float | None
    duration_ns: int | None
    original_duration_ns: int | None = None
    undecidable: tuple[str, ...] = ()
    is_auto: bool = False
    decisive_term: str = ""

    @property
    def is_shortened(self) -> bool:
        """Whether the load is shorter than in the contract."""
        return self.original_duration_ns is not None

    def classes_of(self, term: ContractTerm) -> list[RequestClassPlan]:
        """Return the classes of requests that a term is about."""
        return [
            class_plan for class_plan in self.classes if term.class_name in ("", class_plan.name)
        ]

    def units_per_start(self, term: ContractTerm) -> float:
        """Return how many requests, or tasks, that a term is about belong to a start on average."""
        classes = self.classes_of(term)
        if term.is_about_tasks:
            return sum(class_plan.share for class_plan in classes if class_plan.is_session)
        return sum(class_plan.share * class_plan.requests_per_start for class_plan in classes)

    def starts_per_s(self) -> float | None:
        """Return the expected starts per second, or None if they are not known before the run."""
        if self.starts is None or self.duration_ns is None:
            return None
        return self.starts / (self.duration_ns / NS_PER_S)

    def is_closed_loop(self) -> bool:
        """Return whether a measured stage keeps a number of requests in flight."""
        return any(
            isinstance(stage.arrival, Closed) for stage in self.workload.stages if stage.measured
        )


class CheckedContract(Struct, frozen=True, kw_only=True):
    """A contract without errors, and the planned load of its levels.

    Attributes:
        contract: The contract.
        levels: The plan of each level, in the order of the contract.
        text: The file as written.
        resolved_text: The file with the values of its environment variables, or "" if it names
            none.
        file: The name of the file in messages.
        directory: The directory of the file. Paths in the contract are relative to it.
    """

    contract: Contract
    levels: tuple[LevelPlan, ...]
    text: str
    resolved_text: str
    file: str
    directory: Path

    @property
    def prices_path(self) -> Path | None:
        """The price file of the contract, or None if it names none."""
        return None if self.contract.prices is None else self.directory / self.contract.prices


class ExpectedLoad(NamedTuple):
    """The expected measured starts of one run and their duration.

    None for what only the run can tell.
    """

    starts: float | None
    duration_ns: int | None


def plan_level(level: ContractLevel, workload: Workload) -> LevelPlan:
    """Return the plan of a level whose own load is already applied to its workload."""
    load = expected_load(workload)
    classes = _plan_classes(workload)
    requests = None
    rate = None
    if load.starts is not None:
        requests = load.starts * sum(
            class_plan.share * class_plan.requests_per_start for class_plan in classes
        )
        if load.duration_ns is not None:
            rate = requests / (load.duration_ns / NS_PER_S)
    return LevelPlan(
        level=level,
        workload=workload,
        classes=classes,
        starts=load.starts,
        requests=None if requests is None else round(requests),
        rate=rate,
        duration_ns=load.duration_ns,
    )


def shorten_plan(plan: LevelPlan, max_duration_ns: int) -> LevelPlan:
    """Return the plan with a load of at most this length."""
    if plan.duration_ns is not None and plan.duration_ns <= max_duration_ns:
        return plan
    shorter = plan_level(plan.level, with_measured_duration(plan.workload, max_duration_ns))
    return replace(shorter, original_duration_ns=plan.duration_ns or 0)


def with_measured_duration(workload: Workload, duration_ns: int) -> Workload:
    """Return the workload with measured stages of this length together, in their old proportions.

    If their length was not known before, each measured stage ends after this time, or earlier by
    its count.
    """
    old_duration_ns = expected_load(workload).duration_ns
    factor = None if old_duration_ns is None else duration_ns / old_duration_ns
    stages = tuple(
        _scale_stage(stage, factor, duration_ns) if stage.measured else stage
        for stage in workload.stages
    )
    return workload.model_copy(update={"stages": stages})


def _scale_stage(stage: Stage, factor: float | None, duration_ns: int) -> Stage:
    """Return the stage with its limits multiplied by a factor, or limited to a duration."""
    if factor is None or isinstance(stage.arrival, Replay):
        return stage.model_copy(update={"duration_ns": duration_ns})
    changes: dict[str, Any] = {}
    if stage.duration_ns is not None:
        changes["duration_ns"] = max(round(stage.duration_ns * factor), 1)
    if stage.count is not None:
        changes["count"] = max(round(stage.count * factor), 1)
    if stage.at_least is not None:
        minimum = {
            "duration_ns": max(round(stage.at_least.duration_ns * factor), 1),
            "count": max(round(stage.at_least.count * factor), 1),
        }
        changes["at_least"] = stage.at_least.model_copy(update=minimum)
    return stage.model_copy(update=changes)


def expected_load(workload: Workload) -> ExpectedLoad:
    """Return the expected measured starts of a workload and their duration."""
    starts = 0.0
    duration_s = 0.0
    for stage in workload.stages:
        if not stage.measured:
            continue
        arrival = stage.arrival
        if isinstance(arrival, Replay):
            return ExpectedLoad(None, stage.duration_ns)  # the trace decides
        if isinstance(arrival, Closed):
            if stage.count is None:
                return ExpectedLoad(None, stage.duration_ns)
            starts += stage.count
            duration_s = math.nan  # the server decides
            continue
        rate = arrival.mean_rate if isinstance(arrival, Ramp) else arrival.rate
        stage_starts = _expected_starts(stage, rate)
        starts += stage_starts
        if math.isfinite(rate):
            duration_s += stage_starts / rate
    is_known = math.isfinite(duration_s) and duration_s > 0
    return ExpectedLoad(starts, round(duration_s * NS_PER_S) if is_known else None)


def _expected_starts(stage: Stage, rate: float) -> float:
    """Return the expected starts of a stage with this rate per second."""
    if stage.at_least is not None:
        return max(rate * stage.at_least.duration_ns / NS_PER_S, stage.at_least.count)
    starts_by_time = math.inf
    if stage.duration_ns is not None:
        starts_by_time = rate * stage.duration_ns / NS_PER_S
    return min(starts_by_time, stage.count or math.inf)


def _plan_classes(workload: Workload) -> tuple[RequestClassPlan, ...]:
    """Return the classes of a workload, or one class without a name if it has none."""
    requests = workload.requests
    if not isinstance(requests, Mix):
        return (_plan_class("", 1.0, workload.slo, requests),)
    return tuple(
        _plan_class(
            name,
            float(request_class.weight),
            request_class.slo or workload.slo,
            request_class.requests,
        )
        for name, request_class in requests.classes.items()
    )


def _plan_class(name: str, share: float, slo: Slo | None, requests: Any) -> RequestClassPlan:
    """Return the plan of a class, with the mean size of a sample of its starts."""
    sessions = build_sessions(requests, 0)
    requests_per_start = sessions.total_turns(0, SAMPLED_STARTS) / SAMPLED_STARTS
    return RequestClassPlan(name, share, slo, requests_per_start, is_session=sessions.max_turns > 1)


# -- text -----------------------------------------------------------------------------------------


def plan_text(plan: LevelPlan) -> str:
    """Return the lines that describe the load of a level before its run."""
    level = plan.level
    parts = [level.workload, *_size_parts(plan)]
    if plan.duration_ns is not None:
        parts.append(format.duration(plan.duration_ns / NS_PER_S))
    parts.append(format.counted(level.repeats, "run"))
    lines = [f"level {level.name}: {', '.join(parts)}"]
    if plan.is_auto:
        reason = f": {plan.decisive_term} needs it" if plan.decisive_term else ""
        lines.append(f"  duration auto{reason}; extended while the level is undecided")
    if shortening := shortening_text(plan):
        lines.append(f"  {shortening}")
    if plan.undecidable:
        lines.append(f"  can no longer pass: {', '.join(plan.undecidable)}")
    return "\n".join(lines)


def _size_parts(plan: LevelPlan) -> list[str]:
    """Return the expected numbers of sessions and of requests as text, as far as they are known."""
    parts = []
    session_share = sum(class_plan.share for class_plan in plan.classes if class_plan.is_session)
    sessions = session_share * (plan.starts or 0)
    if sessions:
        # The same word as in the summary of the run.
        noun = "conversations" if isinstance(plan.workload.requests, Synthetic) else "tasks"
        parts.append(f"{sessions:,.0f} {noun}")
    if plan.requests is not None:
        parts.append(format.counted(plan.requests, "request"))
    return parts


def shortening_text(plan: LevelPlan) -> str:
    """Return by how much the load is shorter than in the contract, or ""."""
    if plan.original_duration_ns is None or plan.duration_ns is None:
        return ""
    original = "its own end"
    if plan.original_duration_ns:
        original = format.duration(plan.original_duration_ns / NS_PER_S)
    length = format.duration(plan.duration_ns / NS_PER_S)
    return f"{length} of load instead of {original} (--duration)"


def answer_check_text(check: AnswerCheck) -> str:
    """Return the lines that describe a check of answers and its terms."""
    rows = "" if check.rows is None else f", the first {format.counted(check.rows, 'row')}"
    other = "" if check.against is None else f", against {check.against}"
    terms = [
        f"  {requirement:<6} {term.text}" for requirement, term in check.terms_by_requirement()
    ]
    return "\n".join([f"answers: {check.dataset}{rows}{other}", *terms])
