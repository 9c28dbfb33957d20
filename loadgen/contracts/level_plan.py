"""Plan the load of each level of a contract: how many requests are expected, and for how long.

A start is what an arrival begins: a single request, a conversation, or a task of several requests.
This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from loadgen.contracts.schema import AnswerCheck, Contract, ContractLevel
from loadgen.contracts.terms import NS_PER_S, ContractTerm
from loadgen.core import format
from loadgen.core.schedule.sessions import build_sessions
from loadgen.core.slo import ANSWERS, Slo
from loadgen.core.workload import (
    Closed,
    FromFile,
    FromTrace,
    Mix,
    Ramp,
    Replay,
    Stage,
    Synthetic,
    Task,
    Trajectories,
    Workload,
)
from loadgen.core.workload.request_classes import list_question_classes

LIMITS_JUDGED_BY_CONTRACT = ("not_offered_share",)
"""The limits on a VALID run that a contract lifts, because it judges the same thing itself.

A run in which the client dropped many requests is INVALID by itself. In a contract its terms are
INCONCLUSIVE, unless they fail without the dropped requests too.
"""

SAMPLED_STARTS = 200
"""The number of starts that are built to estimate how many requests a start has on average."""


RequestKind = Synthetic | FromFile | FromTrace | Trajectories | Task | Mix
"""What the requests of a workload are: generated, read from a file or a trace, tasks, or a mix."""


class RequestClassPlan(NamedTuple):
    """A class of requests in the load of a level.

    A workload without classes has one without a name.
    """

    name: str
    share: float  # the fraction of all starts that are of this class
    slo: Slo | None
    requests_per_start: float  # on average
    is_session: bool  # whether a start is a task or a conversation


class LevelPlan(Struct, frozen=True, kw_only=True):
    """The planned load of a level of a contract.

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
        longest_load_term: The term, as text, that needs the longest load. "" if none does.
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
    longest_load_term: str = ""

    @property
    def is_shortened(self) -> bool:
        """Whether the load is shorter than in the contract."""
        return self.original_duration_ns is not None

    def classes_of(self, term: ContractTerm) -> list[RequestClassPlan]:
        """Return the classes of requests that a term is about.

        A term about answers is about the classes with known answers only.
        """
        if term.kind == ANSWERS:
            question_classes = list_question_classes(self.workload.requests)
            return [plan for plan in self.classes if plan.name in question_classes]

        return [
            class_plan for class_plan in self.classes if term.class_name in ("", class_plan.name)
        ]

    def samples_per_start(self, term: ContractTerm) -> float:
        """Return how many values a term gets from one start of the load, on average.

        A start is a single request, a conversation or a task of several requests. A term about
        requests gets a value from each of them, a term about tasks one from each task.
        """
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
        """Return whether a measured stage has virtual users, which wait for their responses."""
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
    """What is expected of the measured stages of one run, before the run.

    Attributes:
        starts: The mean number of arrivals, each of which starts a request, a conversation or a
            task. None if only the run can show it.
        duration_ns: How long the measured stages last together. None if only the run can show it.
    """

    starts: float | None
    duration_ns: int | None


def plan_level(level: ContractLevel, workload: Workload) -> LevelPlan:
    """Return the plan of a level: how many requests are expected, and for how long.

    What is not known before the run is None in the plan, such as the number of requests of a closed
    loop that is limited by time.

    Args:
        level: The level of the contract.
        workload: Its workload, to which the rate and the length of the level are already applied.
    """
    load = compute_expected_load(workload)
    classes = _plan_classes(workload)
    requests = None

    rate = None
    if load.starts is not None:
        requests_per_start = sum(
            class_plan.share * class_plan.requests_per_start for class_plan in classes
        )
        requests = load.starts * requests_per_start
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
    """Return the plan of a level with a load of at most this length (`--duration`)."""
    if plan.duration_ns is not None and plan.duration_ns <= max_duration_ns:
        return plan
    short_workload = set_measured_duration(plan.workload, max_duration_ns)
    short_plan = plan_level(plan.level, short_workload)
    return replace(short_plan, original_duration_ns=plan.duration_ns or 0)


def set_measured_duration(workload: Workload, duration_ns: int) -> Workload:
    """Return the workload with measured stages that last this long together.

    A workload consists of stages, such as a warm-up and a steady load, of which some are measured.
    The measured ones keep their proportions. If their length is not known before the run, each of
    them ends after this time, or earlier by its number of requests.
    """
    old_duration_ns = compute_expected_load(workload).duration_ns
    factor = None if old_duration_ns is None else duration_ns / old_duration_ns
    stages = tuple(
        _scale_stage(stage, factor, duration_ns) if stage.measured else stage
        for stage in workload.stages
    )
    return workload.model_copy(update={"stages": stages})


def _scale_stage(stage: Stage, factor: float | None, duration_ns: int) -> Stage:
    """Return the stage with its limits multiplied by a factor, or limited to a duration.

    A trace that is replayed cannot be stretched, so it only ends after the duration. The same
    applies if there is no factor.

    Args:
        stage: A measured stage.
        factor: The ratio of the new length of all measured stages to the old one. None if the old
            length is not known.
        duration_ns: The new length of all measured stages.
    """
    if factor is None or isinstance(stage.arrival, Replay):
        return stage.model_copy(update={"duration_ns": duration_ns})

    scaled_limits: dict[str, object] = {}
    if stage.duration_ns is not None:
        scaled_limits["duration_ns"] = _scale_limit(stage.duration_ns, factor)

    if stage.count is not None:
        scaled_limits["count"] = _scale_limit(stage.count, factor)

    if stage.at_least is not None:
        scaled_minimum = {
            "duration_ns": _scale_limit(stage.at_least.duration_ns, factor),
            "count": _scale_limit(stage.at_least.count, factor),
        }
        scaled_limits["at_least"] = stage.at_least.model_copy(update=scaled_minimum)

    return stage.model_copy(update=scaled_limits)


def _scale_limit(limit: int, factor: float) -> int:
    """Return a limit multiplied by a factor, at least 1: a workload refuses a limit of 0."""
    return max(round(limit * factor), 1)


def compute_expected_load(workload: Workload) -> ExpectedLoad:
    """Return how many arrivals are expected in the measured stages, and how long these last.

    - In an open loop, requests arrive at a rate such as 12.5/s, so both are known.
    - In a closed loop, virtual users send a number of requests as fast as the server responds, so
      only the number of arrivals is known. If the stage ends after a time, only the time is known.
    - A trace is read when the run begins, so nothing is known but a time limit.
    """
    stages = [stage for stage in workload.stages if stage.measured]
    for stage in stages:
        if _has_unknown_starts(stage):
            return ExpectedLoad(starts=None, duration_ns=stage.duration_ns)

    stage_starts = [_compute_expected_starts(stage) for stage in stages]
    has_closed_loop = any(isinstance(stage.arrival, Closed) for stage in stages)
    if has_closed_loop:
        return ExpectedLoad(math.fsum(stage_starts), duration_ns=None)

    duration_ns = _compute_expected_duration_ns(stages, stage_starts)
    return ExpectedLoad(math.fsum(stage_starts), duration_ns)


def _has_unknown_starts(stage: Stage) -> bool:
    """Return whether the number of starts of a stage is only known after a run.

    A trace is read when the run begins. A closed loop that is limited by time starts as many
    requests as the server completes.
    """
    if isinstance(stage.arrival, Replay):
        return True
    return isinstance(stage.arrival, Closed) and stage.count is None


def _compute_expected_duration_ns(
    stages: Sequence[Stage], stage_starts: Sequence[float]
) -> int | None:
    """Return how long these stages of an open loop last together, or None if that is 0.

    Requests that are all sent at once have an infinite rate and take no time.
    """
    duration_s = 0.0
    for stage, starts in zip(stages, stage_starts, strict=True):
        rate = _get_mean_rate(stage)
        if math.isfinite(rate):
            duration_s += starts / rate
    return round(duration_s * NS_PER_S) if duration_s > 0 else None


def _get_mean_rate(stage: Stage) -> float:
    """Return the mean starts per second of a stage with a rate."""
    arrival = stage.arrival
    assert not isinstance(arrival, Closed | Replay)
    return arrival.mean_rate if isinstance(arrival, Ramp) else arrival.rate


def _compute_expected_starts(stage: Stage) -> float:
    """Return the expected number of arrivals in a stage.

    A stage ends after its number of requests (`count`) or after its duration, whichever comes
    first. With `at_least` it ends when both minimums are reached.
    """
    if isinstance(stage.arrival, Closed):
        assert stage.count is not None
        return stage.count

    rate = _get_mean_rate(stage)
    if stage.at_least is not None:
        return max(rate * stage.at_least.duration_ns / NS_PER_S, stage.at_least.count)

    starts_by_time = math.inf
    if stage.duration_ns is not None:
        starts_by_time = rate * stage.duration_ns / NS_PER_S

    starts_by_count = math.inf if stage.count is None else stage.count
    return min(starts_by_time, starts_by_count)


def _plan_classes(workload: Workload) -> tuple[RequestClassPlan, ...]:
    """Return the classes of a workload, or one class without a name if it has none.

    A class of requests, such as "chat" in a mix of chat and agents, has its own share of the
    starts and may have its own SLO.
    """
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


def _plan_class(
    name: str, share: float, slo: Slo | None, requests: RequestKind
) -> RequestClassPlan:
    """Return the plan of a class of requests, with the mean number of requests per start.

    A start of the load begins a single request, or a conversation or task of several requests. How
    many it has may be random, so the numbers of `SAMPLED_STARTS` starts are averaged. They are
    built with a fixed seed, so that the plan is the same each time.

    Args:
        name: The name of the class. "" in a workload without classes.
        share: The fraction of all starts that are of this class.
        slo: The SLO that applies to the class.
        requests: The description of its requests in the workload.
    """
    fixed_seed = 0
    sessions = build_sessions(requests, fixed_seed)
    first_start = 0
    sampled_requests = sessions.total_turns(first_start, SAMPLED_STARTS)
    requests_per_start = sampled_requests / SAMPLED_STARTS
    has_several_turns = sessions.max_turns > 1
    return RequestClassPlan(name, share, slo, requests_per_start, is_session=has_several_turns)


# -- text -----------------------------------------------------------------------------------------


def format_plan(plan: LevelPlan) -> str:
    """Return the lines that a command prints about the load of a level before its run.

    The first line has the sizes, such as "Level steady: qa, 7,200 requests, 12 min, 3 runs". The
    others say which term requires this length, or that the load was shortened and which terms
    cannot pass then.
    """
    level = plan.level
    descriptions = [level.workload, *_format_sizes(plan)]
    if plan.duration_ns is not None:
        descriptions.append(format.duration(plan.duration_ns / NS_PER_S))

    descriptions.append(format.counted(level.repeats, "run"))
    lines = [f"Level {level.name}: {', '.join(descriptions)}"]
    if plan.is_auto:
        cause = f", required by: {plan.longest_load_term}" if plan.longest_load_term else ""
        lines.append(f"  Automatic duration{cause}. Extended while the level is inconclusive.")

    shortening = format_shortening(plan)
    if shortening:
        lines.append(f"  {shortening}")

    if plan.undecidable:
        lines.append(f"  Too short to pass: {', '.join(plan.undecidable)}")

    return "\n".join(lines)


def _format_sizes(plan: LevelPlan) -> list[str]:
    """Return the expected numbers of sessions and requests, such as ["40 tasks", "800 requests"].

    The sessions are conversations or tasks. They are left out if each start is a single request. A
    number that is not known before the run is left out too.
    """
    sizes = []
    session_share = sum(class_plan.share for class_plan in plan.classes if class_plan.is_session)

    session_count = 0.0 if plan.starts is None else session_share * plan.starts
    if session_count > 0:
        # The same word as in the summary of the run.
        noun = "conversations" if isinstance(plan.workload.requests, Synthetic) else "tasks"
        sizes.append(f"{session_count:,.0f} {noun}")

    if plan.requests is not None:
        sizes.append(format.counted(plan.requests, "request"))

    return sizes


def format_shortening(plan: LevelPlan) -> str:
    """Return by how much the load is shorter than in the contract, or "" if it is not."""
    if plan.original_duration_ns is None or plan.duration_ns is None:
        return ""
    length = format.duration(plan.duration_ns / NS_PER_S)
    if plan.original_duration_ns == 0:  # not known before the run
        return f"Shortened to {length} by --duration"
    original = format.duration(plan.original_duration_ns / NS_PER_S)
    return f"Shortened from {original} to {length} by --duration"


def format_answer_check(check: AnswerCheck) -> str:
    """Return the lines that describe the scoring of responses and its terms."""
    rows = "" if check.rows is None else f", first {format.counted(check.rows, 'row')}"
    other = "" if check.against is None else f", compared with {check.against}"
    terms = [
        f"  {requirement:<6} {term.text}" for requirement, term in check.terms_by_requirement()
    ]
    return "\n".join([f"Responses to {check.dataset}{rows}{other}", *terms])
