"""Apply the options of the command line to the stages of a workload."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from loadgen.core import format
from loadgen.core.errors import collecting
from loadgen.core.units import NS_PER_S
from loadgen.core.workload.diagnostics import DocumentErrors
from loadgen.core.workload.flags import Overrides, describe_option
from loadgen.core.workload.request_kinds import FromFile, FromTrace
from loadgen.core.workload.stage_checks import check_stages
from loadgen.core.workload.stages import (
    Closed,
    Constant,
    Gamma,
    Poisson,
    Ramp,
    Replay,
    Stage,
)

if TYPE_CHECKING:
    from pathlib import Path

    from loadgen.core.workload.schema import WorkloadFile

MAX_STAGES = 1_000
MAX_RATE_PER_S = 1e6

ArrivalOption = Constant | Poisson | Gamma | Closed
"""The arrival laws that options of the command line can describe."""


def override_stages(
    workload: WorkloadFile, flags: Overrides, errors: DocumentErrors
) -> tuple[Stage, ...]:
    """Return the stages as changed by the options, with names and ends.

    Mistakes are added to `errors`.
    """
    arrival = _arrival_of_options(flags, errors)
    if errors.errors and not workload.stages:
        # The options describe a load, but with mistakes.
        return ()
    if len(workload.stages) > MAX_STAGES:
        problem = format.counted(len(workload.stages), "stage")
        hint = f"at most {MAX_STAGES:,}; a load that changes all the time is a trace (--trace)"
        errors.add_at(("stages",), "too_large", problem, hint)
        return ()
    stages = _with_names(workload.stages, errors)
    stages = [_with_trace_options(stage, flags) for stage in stages]
    stages = _with_load_options(stages, arrival, flags, errors)
    _refuse_trace_options_without_trace(workload.requests, stages, flags, errors)
    if flags.duration is not None or flags.num_requests is not None:
        ends = {"duration_ns": flags.duration, "count": flags.num_requests, "at_least": None}
        stages = [stage.model_copy(update=ends) if stage.measured else stage for stage in stages]
    if flags.warmup_ns is not None or flags.warmup_count is not None:
        stages = _with_warmup(stages, flags)
    stages = _with_ends_of_data(stages, workload.requests, flags, errors)
    check_stages(stages, workload.requests, errors)
    return tuple(stages)


def trace_changes(flags: Overrides) -> dict[str, Any]:
    """Return the fields that options set for the requests and for the arrivals of a trace."""
    options = {
        "slice_ns": flags.trace_slice,
        "on_bad_row": flags.on_bad_row,
        "replay": flags.trace_replay,
        "unit": flags.trace_unit,
    }
    return {field: value for field, value in options.items() if value is not None}


def _replay_changes(flags: Overrides) -> dict[str, Any]:
    """Return the fields that options set for the arrivals of a trace alone."""
    options = {"speed": flags.trace_speed, "loop": flags.trace_loop}
    return {field: value for field, value in options.items() if value is not None}


def _change_arrival(stage: Stage, changes: dict[str, Any]) -> Stage:
    """Return the stage with other values of some fields of its arrival law."""
    return stage.model_copy(update={"arrival": stage.arrival.model_copy(update=changes)})


# -- names ---------------------------------------------------------------------------------------


def _with_names(stages: tuple[Stage, ...], errors: DocumentErrors) -> list[Stage]:
    """Return the stages with unique names. Two stages with the same name are an error.

    A stage without a name is called `load` or `warm-up`, with a number from the second on
    (`load-2`).
    """
    used_names: set[str] = set()
    for index, stage in enumerate(stages):
        if stage.name and stage.name in used_names:
            problem = f'two stages are called "{stage.name}"'
            hint = "rows refer to stages by name: give each its own"
            errors.add_at(("stages", index, "name"), "duplicate", problem, hint)
        used_names.add(stage.name)
    named_stages = []
    for stage in stages:
        name = stage.name or _unused_name("load" if stage.measured else "warm-up", used_names)
        used_names.add(name)
        named_stages.append(stage.model_copy(update={"name": name}))
    return named_stages


def _unused_name(base_name: str, used_names: set[str]) -> str:
    if base_name not in used_names:
        return base_name
    number = 2
    while f"{base_name}-{number}" in used_names:
        number += 1
    return f"{base_name}-{number}"


# -- the load ------------------------------------------------------------------------------------


def _arrival_of_options(flags: Overrides, errors: DocumentErrors) -> ArrivalOption | None:
    """Return the arrival law that the options describe, or None if they describe none."""
    rate = flags.request_rate
    if flags.concurrency is not None:
        if rate is None and flags.burstiness is None:
            return Closed.model_construct(concurrency=flags.concurrency, ramp_ns=flags.stagger)
        other_option = "--request-rate" if rate is not None else "--set burstiness"
        problem = f"--concurrency is a closed loop, {other_option} an open one: not both"
        options = f"--concurrency {flags.concurrency} {other_option}"
        errors.add_option("conflict", problem, options, "to cap an open loop: --max-in-flight")
        return None
    if rate is None:
        return None
    if math.isinf(rate):
        if flags.burstiness is not None:
            problem = "everything at once has no gaps to be bursty"
            options = "--request-rate inf --set burstiness"
            errors.add_option("conflict", problem, options, "give a finite rate")
        return Constant.model_construct(rate=rate)
    if flags.burstiness is None or flags.burstiness == 1:
        return Poisson.model_construct(rate=rate)
    return Gamma.model_construct(rate=rate, burstiness=flags.burstiness)


def _with_load_options(
    stages: list[Stage], arrival: ArrivalOption | None, flags: Overrides, errors: DocumentErrors
) -> list[Stage]:
    """Return the stages with the arrival law, the burstiness and the ramp of the options."""
    if arrival is not None:
        stages = _replace_measured(arrival, stages)
    elif flags.burstiness is not None:
        stages = [_with_burstiness(stage, flags.burstiness, errors) for stage in stages]
    if flags.stagger is not None and flags.concurrency is None:
        stages = _with_ramp(stages, flags.stagger, errors)
    return stages


def _replace_measured(arrival: ArrivalOption, stages: list[Stage]) -> list[Stage]:
    """Replace the measured stages by one stage with another arrival law and their total length.

    It stands at the position of the first measured stage. Warm-up stages keep their ends and get
    the same law, because they must create the state that is then measured. An infinite rate is the
    exception: a duration does not end it, so warm-up stages keep their own law.
    """
    measured = [stage for stage in stages if stage.measured]
    load_stage = _merge_stages(arrival, measured)
    is_finite = not (isinstance(arrival, Constant) and math.isinf(arrival.rate))
    result: list[Stage] = []
    for stage in stages:
        if not stage.measured:
            result.append(stage.model_copy(update={"arrival": arrival}) if is_finite else stage)
        elif stage is measured[0]:
            result.append(load_stage)
    return result if measured else [*result, load_stage]


def _merge_stages(arrival: ArrivalOption, stages: list[Stage]) -> Stage:
    """Return one stage that is as long as several stages together."""
    durations = [stage.duration_ns for stage in stages if stage.duration_ns]
    counts = [stage.count for stage in stages if stage.count]
    is_single = len(stages) == 1
    # Only Poisson arrivals can meet minimums.
    keeps_minimums = is_single and isinstance(arrival, Poisson)
    return Stage.model_construct(
        name=stages[0].name if is_single else "load",
        arrival=arrival,
        duration_ns=sum(durations) if durations and len(durations) == len(stages) else None,
        count=sum(counts) if counts and len(counts) == len(stages) else None,
        at_least=stages[0].at_least if keeps_minimums else None,
    )


def _with_ramp(stages: list[Stage], ramp_ns: int, errors: DocumentErrors) -> list[Stage]:
    """Return the stages with the starts of every closed loop staggered over `ramp_ns`.

    An error is added if there is no closed loop.
    """
    if not any(isinstance(stage.arrival, Closed) for stage in stages):
        problem = "only the virtual users of a closed loop start together or one after the other"
        option = describe_option("stagger", f"{ramp_ns / NS_PER_S:g}s")
        errors.add_option("no_effect", problem, option, "add --concurrency 8")
    return [
        _change_arrival(stage, {"ramp_ns": ramp_ns}) if isinstance(stage.arrival, Closed) else stage
        for stage in stages
    ]


def _with_burstiness(stage: Stage, burstiness: float, errors: DocumentErrors) -> Stage:
    """Return the stage with gamma arrivals of this burstiness, if it has a steady rate.

    An error is added for a measured stage without a steady rate, and for a stage with minimums.
    """
    option = describe_option("burstiness", f"{burstiness:g}")
    arrival = stage.arrival
    if not isinstance(arrival, Poisson | Gamma | Constant) or math.isinf(arrival.rate):
        if stage.measured:
            problem = f'stage "{stage.name}" has no steady rate to be bursty'
            errors.add_option("no_effect", problem, option, "add --request-rate")
        return stage
    if stage.at_least is not None:
        problem = (
            f'stage "{stage.name}" has minimums (at_least), which only Poisson arrivals can meet'
        )
        errors.add_option("conflict", problem, option, "add --duration or --num-requests")
        return stage
    bursty = Gamma.model_construct(rate=arrival.rate, burstiness=burstiness)
    return stage.model_copy(update={"arrival": bursty})


def _with_warmup(stages: list[Stage], flags: Overrides) -> list[Stage]:
    """Replace the warm-up stages by one of the specified length, or by none if that is 0.

    Its arrival law is that of the first measured stage. A ramp becomes Poisson at its first rate,
    or at its mean rate if it starts at zero. A trace becomes Poisson at its mean rate.
    """
    measured = [stage for stage in stages if stage.measured]
    duration_ns = flags.warmup_ns or None
    count = flags.warmup_count or None
    if not measured or (duration_ns is None and count is None):
        return measured
    arrival = measured[0].arrival
    if isinstance(arrival, Ramp):
        arrival = Poisson.model_construct(rate=arrival.from_rate or arrival.mean_rate)
    if isinstance(arrival, Replay):
        from loadgen.core.workload.traces import read_replayed_trace

        trace_rate = read_replayed_trace(arrival).rate * arrival.speed
        arrival = Poisson.model_construct(rate=min(MAX_RATE_PER_S, trace_rate))
    warmup = Stage.model_construct(
        name="warm-up", arrival=arrival, duration_ns=duration_ns, count=count, measured=False
    )
    return [warmup, *measured]


# -- traces and data sets ------------------------------------------------------------------------


def _with_trace_options(stage: Stage, flags: Overrides) -> Stage:
    """Return the stage with the options for a trace, if it replays one."""
    if not isinstance(stage.arrival, Replay):
        return stage
    return _change_arrival(stage, trace_changes(flags) | _replay_changes(flags))


def _refuse_trace_options_without_trace(
    requests: Any, stages: list[Stage], flags: Overrides, errors: DocumentErrors
) -> None:
    """Add an error for each option for a trace that would have no effect."""
    if any(isinstance(stage.arrival, Replay) for stage in stages):
        return
    problem = "the arrivals are not those of a trace"
    unused = _replay_changes(flags)
    if not isinstance(requests, FromTrace):
        problem = "no trace is replayed"
        unused |= trace_changes(flags)
    option_of_field = {
        "slice_ns": "trace_slice",
        "replay": "trace_replay",
        "unit": "trace_unit",
        "speed": "trace_speed",
        "loop": "trace_loop",
    }
    hint = "give --trace FILE, and neither --request-rate nor --concurrency"
    for field in unused:
        option = f"--set {option_of_field.get(field, field)}"
        errors.add_option("no_effect", problem, option, hint)


def _with_ends_of_data(
    stages: list[Stage], requests: Any, flags: Overrides, errors: DocumentErrors
) -> list[Stage]:
    """Return the stages with the length of a trace or data set where they have no end."""
    if isinstance(requests, FromTrace):
        requests = requests.model_copy(update=trace_changes(flags))
        # Arrivals and requests of a trace are replayed in the same way.
        stages = [
            _change_arrival(stage, {"replay": requests.replay})
            if isinstance(stage.arrival, Replay)
            else stage
            for stage in stages
        ]
    replays_trace = any(isinstance(stage.arrival, Replay) for stage in stages)
    if not isinstance(requests, FromFile | FromTrace) and not replays_trace:
        return stages
    with collecting(errors.errors):
        return _with_counts(stages, requests)
    # The file has mistakes. A stage without an end must not be reported as another one.
    return [
        stage if stage.duration_ns or stage.count else stage.model_copy(update={"count": 1})
        for stage in stages
    ]


def _with_counts(stages: list[Stage], requests: Any) -> list[Stage]:
    """Set the count of stages without an end: a whole trace, or all rows for a single stage.

    Raises LoadgenError or CombinedError if the file cannot be read.
    """
    from loadgen.core.workload.trace_sessions import replay_starts

    measured = [stage for stage in stages if stage.measured]
    row_count: int | None = None
    if isinstance(requests, FromTrace):
        row_count = len(replay_starts(requests))
    elif isinstance(requests, FromFile) and any(stage.duration_ns is None for stage in measured):
        row_count = _count_rows(requests.path)
    result = []
    for stage in stages:
        count: int | None = None
        if stage.duration_ns is None and stage.count is None:
            if isinstance(stage.arrival, Replay):
                count = len(replay_starts(stage.arrival)) * stage.arrival.loop
            elif stage.measured and len(measured) == 1:
                count = row_count
        result.append(stage.model_copy(update={"count": count}) if count else stage)
    return result


def _count_rows(path: Path) -> int:
    from loadgen.core.workload.dataset import read_rows

    return len(read_rows(path))
