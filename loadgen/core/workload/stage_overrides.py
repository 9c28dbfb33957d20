"""Apply the options of the command line to the stages of a workload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loadgen.core import format
from loadgen.core.errors import collecting
from loadgen.core.units import NS_PER_S
from loadgen.core.workload.diagnostics import DocumentErrors
from loadgen.core.workload.flags import Overrides, describe_option
from loadgen.core.workload.request_kinds import FromFile, FromTrace
from loadgen.core.workload.stage_checks import check_stages
from loadgen.core.workload.stages import (
    Arrival,
    Closed,
    Constant,
    Gamma,
    Poisson,
    Ramp,
    Replay,
    Stage,
)
from loadgen.core.workload.trajectories import Trajectories
from loadgen.core.workload.trajectory_overrides import (
    check_trajectory_stages,
    override_trajectories,
)

if TYPE_CHECKING:
    from pathlib import Path

    from loadgen.core.workload.request_classes import Requests
    from loadgen.core.workload.schema import WorkloadFile

MAX_STAGES = 1_000
MAX_RATE_PER_S = 1e6

FIELDS_OF_TRACE_OPTIONS = {
    "trace_slice": "slice_ns",
    "on_bad_row": "on_bad_row",
    "trace_replay": "replay",
    "trace_unit": "unit",
}
"""Maps the options about a trace to the fields that they set, in the requests and the arrivals.

The keys are the names of fields of `Overrides`.
"""
FIELDS_OF_REPLAY_OPTIONS = {"trace_speed": "speed", "trace_loop": "loop"}
"""Maps the options about the arrival times of a trace to the fields of `Replay` that they set."""

ArrivalOption = Constant | Poisson | Gamma | Closed
"""The arrival processes that options of the command line can describe."""


def override_stages(
    workload: WorkloadFile, overrides: Overrides, errors: DocumentErrors
) -> tuple[Stage, ...]:
    """Return the stages as changed by the options of the command line.

    Each stage of the result has a name and a limit (a duration, a count or minimums). Mistakes are
    added to `errors`.
    """
    arrival = _arrival_of_options(overrides, errors)
    if errors.errors and not workload.stages:
        # The options describe a load, but with mistakes. It would be misleading to report in
        # addition that there is no load.
        return ()

    if len(workload.stages) > MAX_STAGES:
        errors.add_at(
            ("stages",),
            "too_large",
            format.counted(len(workload.stages), "stage"),
            f"use at most {MAX_STAGES:,} stages, or a trace (--trace) for a load "
            "that changes all the time",
        )
        return ()

    stages = _with_names(workload.stages, errors)
    stages = _with_options(stages, arrival, overrides, errors)
    _refuse_trace_options_without_trace(workload.requests, stages, overrides, errors)
    stages = _with_limits_of_data(stages, workload.requests, overrides, errors)
    check_stages(stages, workload.requests, errors)
    if stages and isinstance(workload.requests, Trajectories):
        requests = override_trajectories(workload.requests, overrides, errors)
        check_trajectory_stages(requests, stages, errors)

    return tuple(stages)


def _with_options(
    stages: list[Stage], arrival: ArrivalOption | None, overrides: Overrides, errors: DocumentErrors
) -> list[Stage]:
    """Return the stages as changed by the options for traces, the load, limits and the warm-up.

    The order matters: an option for the load can replace stages, options for limits apply to the
    new stages, and a warm-up gets the arrival process that the measured stages then have.

    Args:
        stages: The stages of the file.
        arrival: The arrival process that the options describe, or None if they describe none.
        overrides: The options.
        errors: Mistakes are added here.
    """
    stages = [_with_trace_options(stage, overrides) for stage in stages]
    stages = _with_load_options(stages, arrival, overrides, errors)
    if overrides.duration is not None or overrides.num_requests is not None:
        stages = [_with_limit_options(stage, overrides) for stage in stages]
    if overrides.warmup_ns is not None or overrides.warmup_count is not None:
        stages = _with_warmup(stages, overrides)
    return stages


def changed_trace_fields(overrides: Overrides) -> dict[str, Any]:
    """Return the fields that options change in all models which read a trace, with their values.

    A workload can take its requests from a trace (the model `FromTrace`), its arrival times (the
    model `Replay`), or both. These fields exist in both models. For example, the option for the
    slice of a trace gives `{"slice_ns": ...}`.
    """
    return _changed_fields(overrides, FIELDS_OF_TRACE_OPTIONS)


def _changed_fields(overrides: Overrides, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that options change, with their values.

    `fields` maps the name of each option to the field that it sets. Options that are not specified
    are left out.
    """
    return {
        field: getattr(overrides, option)
        for option, field in fields.items()
        if getattr(overrides, option) is not None
    }


def _change_arrival(stage: Stage, changes: Mapping[str, object]) -> Stage:
    """Return the stage with other values of some fields of its arrival process."""
    return stage.model_copy(update={"arrival": stage.arrival.model_copy(update=changes)})


# -- names ---------------------------------------------------------------------------------------


def _with_names(stages: tuple[Stage, ...], errors: DocumentErrors) -> list[Stage]:
    """Return the stages with unique names. Two stages with the same name are an error.

    A stage without a name is called `load` or `warm-up`, with a number from the second on
    (`load-2`).
    """
    _refuse_repeated_names(stages, errors)

    # They include the names of later stages, so that no generated name equals one of them.
    used_names = {stage.name for stage in stages}
    named_stages = []
    for stage in stages:
        name = stage.name or _unused_name("load" if stage.measured else "warm-up", used_names)
        used_names.add(name)
        named_stages.append(stage.model_copy(update={"name": name}))

    return named_stages


def _refuse_repeated_names(stages: tuple[Stage, ...], errors: DocumentErrors) -> None:
    """Add an error for each stage with the name of an earlier one. A stage may have no name."""
    earlier_names: set[str] = set()
    for index, stage in enumerate(stages):
        if stage.name and stage.name in earlier_names:
            problem = f'two stages have the name "{stage.name}"'
            hint = "give each stage a unique name, because results refer to stages by name"
            errors.add_at(("stages", index, "name"), "duplicate", problem, hint)
        earlier_names.add(stage.name)


def _unused_name(base_name: str, used_names: set[str]) -> str:
    """Return a name such as `load`, or with a number such as `load-2` if it is used."""
    if base_name not in used_names:
        return base_name
    number = 2
    while f"{base_name}-{number}" in used_names:
        number += 1
    return f"{base_name}-{number}"


# -- the load ------------------------------------------------------------------------------------


def _arrival_of_options(overrides: Overrides, errors: DocumentErrors) -> ArrivalOption | None:
    """Return the arrival process that the options describe, or None if they describe none.

    - `--concurrency` describes a closed loop: virtual users that each send one request after the
      other. `--stagger` is the time over which these users start.
    - `--request-rate` describes an open loop: requests at random times. `burstiness` is how
      irregular these times are.

    An error is added if the options describe both.
    """
    rate_per_s = overrides.request_rate
    has_open_loop_options = rate_per_s is not None or overrides.burstiness is not None
    if overrides.concurrency is not None and has_open_loop_options:
        _add_error_for_two_loops(overrides, errors)
        return None

    if overrides.concurrency is not None:
        # `model_construct` skips the validation, because the values of options are valid already.
        return Closed.model_construct(concurrency=overrides.concurrency, ramp_ns=overrides.stagger)
    if rate_per_s is not None:
        return _open_loop_arrival(rate_per_s, overrides, errors)

    return None


def _add_error_for_two_loops(overrides: Overrides, errors: DocumentErrors) -> None:
    """Add an error for options that describe a closed loop and an open loop."""
    has_rate = overrides.request_rate is not None
    open_loop_option = "--request-rate" if has_rate else "--set burstiness"
    problem = (
        f"--concurrency is a closed loop and {open_loop_option} an open loop, "
        "so they cannot be combined"
    )
    options = f"--concurrency {overrides.concurrency} {open_loop_option}"
    errors.add_option("conflict", problem, options, "use --max-in-flight to limit an open loop")


def _open_loop_arrival(
    rate_per_s: float, overrides: Overrides, errors: DocumentErrors
) -> ArrivalOption:
    """Return the arrival process of a rate: Poisson arrivals, or gamma arrivals if bursty.

    With an infinite rate everything is sent at once. An error is added if it has a burstiness.
    """
    burstiness = overrides.burstiness
    if math.isinf(rate_per_s):
        if burstiness is not None:
            problem = "with everything sent at once there are no inter-arrival times to vary"
            options = "--request-rate inf --set burstiness"
            errors.add_option("conflict", problem, options, "give a finite rate")
        return Constant.model_construct(rate=rate_per_s)

    if burstiness is None or burstiness == 1:  # A gamma process of shape 1 is a Poisson process.
        return Poisson.model_construct(rate=rate_per_s)

    return Gamma.model_construct(rate=rate_per_s, burstiness=burstiness)


def _with_load_options(
    stages: list[Stage], arrival: ArrivalOption | None, overrides: Overrides, errors: DocumentErrors
) -> list[Stage]:
    """Return the stages with the load of the options: arrival process, burstiness and stagger.

    A new arrival process replaces the measured stages of the file, and already contains the
    burstiness or the stagger. Without one, a burstiness changes the open loops of the file.

    A stagger is the time over which the virtual users of a closed loop start. Without
    `--concurrency` it changes the closed loops of the file.

    Args:
        stages: The stages of the file.
        arrival: The new arrival process, or None if the options describe none.
        overrides: The options.
        errors: Mistakes are added here.
    """
    if arrival is not None:
        stages = _replace_measured_stages(arrival, stages)
    elif overrides.burstiness is not None:
        stages = [_with_burstiness(stage, overrides.burstiness, errors) for stage in stages]

    if overrides.stagger is not None and overrides.concurrency is None:
        stages = _with_staggered_users(stages, overrides.stagger, errors)

    return stages


def _replace_measured_stages(arrival: ArrivalOption, stages: list[Stage]) -> list[Stage]:
    """Replace all measured stages by one stage with the arrival process of the options.

    The new stage has the total length of the measured stages and the position of the first one, or
    is the last stage if there is none. Warm-up stages keep their limits.
    """
    measured_stages = [stage for stage in stages if stage.measured]
    load_stage = _merge_stages(arrival, measured_stages)

    new_stages = []
    for stage in stages:
        if not stage.measured:
            new_stages.append(_with_warmup_arrival(stage, arrival))
        elif stage is measured_stages[0]:
            new_stages.append(load_stage)

    if not measured_stages:
        new_stages.append(load_stage)
    return new_stages


def _with_warmup_arrival(stage: Stage, arrival: ArrivalOption) -> Stage:
    """Return a warm-up stage with the arrival process of the measured load.

    A warm-up must bring the server into the state that is then measured. An infinite rate is the
    exception: a duration does not end it, so the stage keeps its own process.
    """
    sends_all_at_once = isinstance(arrival, Constant) and math.isinf(arrival.rate)
    return stage if sends_all_at_once else stage.model_copy(update={"arrival": arrival})


def _merge_stages(arrival: ArrivalOption, stages: list[Stage]) -> Stage:
    """Return one measured stage that is as long as the measured stages of a file together.

    It has a duration or a count only if all of them have one. A single stage also keeps its name
    and, with Poisson arrivals, its minimums (`at_least`), which no other arrivals can meet.
    """
    name = "load"
    minimums = None
    if len(stages) == 1:
        name = stages[0].name
        if isinstance(arrival, Poisson):
            minimums = stages[0].at_least

    return Stage.model_construct(
        name=name,
        arrival=arrival,
        duration_ns=_sum_if_all_set([stage.duration_ns for stage in stages]),
        count=_sum_if_all_set([stage.count for stage in stages]),
        at_least=minimums,
    )


def _sum_if_all_set(values: list[int | None]) -> int | None:
    """Return the sum of the values, or None if there are none or one of them is None or 0."""
    if not values or not all(values):
        return None
    return sum(value for value in values if value)


def _with_staggered_users(
    stages: list[Stage], stagger_ns: int, errors: DocumentErrors
) -> list[Stage]:
    """Return the stages with the users of every closed loop started evenly over `stagger_ns`.

    Other stages do not change. An error is added if there is no closed loop.
    """
    if not any(isinstance(stage.arrival, Closed) for stage in stages):
        problem = "only the virtual users of a closed loop can start staggered"
        option = describe_option("stagger", f"{stagger_ns / NS_PER_S:g}s")
        errors.add_option("no_effect", problem, option, "add --concurrency 8")
    return [
        _change_arrival(stage, {"ramp_ns": stagger_ns})
        if isinstance(stage.arrival, Closed)
        else stage
        for stage in stages
    ]


def _with_burstiness(stage: Stage, burstiness: float, errors: DocumentErrors) -> Stage:
    """Return a stage with gamma arrivals of a burstiness, at the rate that the stage has.

    Two kinds of stages cannot have it and do not change:

    - One without a steady rate: a ramp, a closed loop, a trace, or everything sent at once. This is
      an error unless it is a warm-up, to which the option need not apply.
    - One with minimums (`at_least`), which only Poisson arrivals can meet. This is an error.
    """
    option = describe_option("burstiness", f"{burstiness:g}")
    rate_per_s = _steady_rate_per_s(stage.arrival)
    if rate_per_s is None:
        if stage.measured:
            problem = f'stage "{stage.name}" has no steady rate that burstiness could change'
            errors.add_option("no_effect", problem, option, "add --request-rate")
        return stage

    if stage.at_least is not None:
        problem = (
            f'stage "{stage.name}" has minimums (at_least), which only work with Poisson arrivals'
        )
        errors.add_option("conflict", problem, option, "add --duration or --num-requests")
        return stage

    bursty_arrival = Gamma.model_construct(rate=rate_per_s, burstiness=burstiness)
    return stage.model_copy(update={"arrival": bursty_arrival})


def _steady_rate_per_s(arrival: Arrival) -> float | None:
    """Return the finite rate that an arrival process has all the time, or None if it has none."""
    if isinstance(arrival, Poisson | Gamma | Constant) and math.isfinite(arrival.rate):
        return arrival.rate
    return None


def _with_limit_options(stage: Stage, overrides: Overrides) -> Stage:
    """Return a stage with the duration and the count of the options, unless it is a warm-up.

    One of the two options replaces all limits of the stage, also those that it does not set.
    """
    if not stage.measured:
        return stage
    limits = {"duration_ns": overrides.duration, "count": overrides.num_requests, "at_least": None}
    return stage.model_copy(update=limits)


def _with_warmup(stages: list[Stage], overrides: Overrides) -> list[Stage]:
    """Replace the warm-up stages by one of the specified length, or by none if that is 0."""
    measured = [stage for stage in stages if stage.measured]
    has_warmup = bool(overrides.warmup_ns or overrides.warmup_count)
    if not measured or not has_warmup:
        return measured

    warmup = Stage.model_construct(
        name="warm-up",
        arrival=_warmup_arrival(measured[0].arrival),
        duration_ns=overrides.warmup_ns or None,
        count=overrides.warmup_count or None,
        measured=False,
    )
    return [warmup, *measured]


def _warmup_arrival(arrival: Arrival) -> Arrival:
    """Return the arrival process of a warm-up before a stage with this arrival process.

    It is the same process, so that the warm-up brings the server into the state that is then
    measured. A ramp and a trace have nothing that comes before them. A ramp becomes Poisson
    arrivals at its first rate, or at its mean rate if it starts at zero. A trace becomes Poisson
    arrivals at its mean rate.
    """
    if isinstance(arrival, Ramp):
        return Poisson.model_construct(rate=arrival.from_rate or arrival.mean_rate)

    if isinstance(arrival, Replay):
        from loadgen.core.workload.traces import read_replayed_trace

        trace_rate = read_replayed_trace(arrival).rate * arrival.speed
        # The rate of a trace is infinite if all of its requests have the same time.
        return Poisson.model_construct(rate=min(MAX_RATE_PER_S, trace_rate))

    return arrival


# -- traces and data sets ------------------------------------------------------------------------


def _with_trace_options(stage: Stage, overrides: Overrides) -> Stage:
    """Return the stage with the options for a trace, if it replays one."""
    if not isinstance(stage.arrival, Replay):
        return stage
    fields_of_options = FIELDS_OF_TRACE_OPTIONS | FIELDS_OF_REPLAY_OPTIONS
    return _change_arrival(stage, _changed_fields(overrides, fields_of_options))


def _refuse_trace_options_without_trace(
    requests: Requests, stages: list[Stage], overrides: Overrides, errors: DocumentErrors
) -> None:
    """Add an error for each option for traces that has no effect.

    A workload can replay the arrival times of a trace, its requests, or both. With the arrival
    times, all options have an effect. With the requests alone, the options about arrival times,
    such as the speed, have none.
    """
    if any(isinstance(stage.arrival, Replay) for stage in stages):
        return

    if isinstance(requests, FromTrace):
        problem = "the arrivals are not replayed from a trace"
        options_without_effect = [*FIELDS_OF_REPLAY_OPTIONS]
    else:
        problem = "no trace is replayed"
        options_without_effect = [*FIELDS_OF_REPLAY_OPTIONS, *FIELDS_OF_TRACE_OPTIONS]

    hint = "use --trace FILE, without --request-rate and --concurrency"
    for option in options_without_effect:
        is_specified = getattr(overrides, option) is not None
        if is_specified:
            errors.add_option("no_effect", problem, f"--set {option}", hint)


def _with_limits_of_data(
    stages: list[Stage], requests: Requests, overrides: Overrides, errors: DocumentErrors
) -> list[Stage]:
    """Return the stages, limited to the length of a trace or data set if they have no limit.

    If the file of the trace or data set has mistakes, they are added to `errors` and its length is
    not known. The stages then get a placeholder as their limit, which is never used, because the
    command ends with these mistakes.
    """
    if isinstance(requests, FromTrace):
        requests = requests.model_copy(update=changed_trace_fields(overrides))
        stages = [_with_replay_of(requests, stage) for stage in stages]

    reads_requests = isinstance(requests, FromFile | FromTrace | Trajectories)
    reads_arrivals = any(isinstance(stage.arrival, Replay) for stage in stages)
    if not reads_requests and not reads_arrivals:
        return stages

    limited_stages: list[Stage] | None = None

    # If the file has mistakes, `collecting` adds them to `errors` and continues after the block.
    with collecting(errors.errors):
        limited_stages = _with_counts(stages, requests)

    if limited_stages is None:
        return _with_placeholder_counts(stages)

    return limited_stages


def _with_placeholder_counts(stages: list[Stage]) -> list[Stage]:
    """Return the stages with a count of 1 for those without a limit.

    This is for a trace or data set with mistakes, whose length is not known. The command ends with
    these mistakes and never uses the count. It only keeps the missing limit from being reported as
    a mistake, too.
    """
    return [
        stage if stage.duration_ns or stage.count else stage.model_copy(update={"count": 1})
        for stage in stages
    ]


def _with_replay_of(requests: FromTrace, stage: Stage) -> Stage:
    """Return a stage whose arrivals, if they are those of a trace, are replayed like the requests.

    Both are replayed by single requests or by sessions.
    """
    if not isinstance(stage.arrival, Replay):
        return stage
    return _change_arrival(stage, {"replay": requests.replay})


def _with_counts(stages: list[Stage], requests: Requests) -> list[Stage]:
    """Return the stages with a count for those that have neither a duration nor a count.

    A stage that replays a trace gets the number of all arrivals of the trace. If there is only one
    measured stage, it gets the number of rows of the data set or trace that the requests come from.
    Several stages get none, because it is not clear how they share the rows.

    Raises LoadgenError or CombinedError if the file cannot be read.
    """
    measured_stages = [stage for stage in stages if stage.measured]
    recorded_requests = _count_recorded_requests(requests, measured_stages)
    has_one_measured_stage = len(measured_stages) == 1

    new_stages = []
    for stage in stages:
        has_limit = stage.duration_ns is not None or stage.count is not None
        count: int | None = None
        if has_limit:
            count = stage.count
        elif isinstance(stage.arrival, Replay):
            count = _count_replayed_arrivals(stage.arrival)
        elif stage.measured and has_one_measured_stage:
            count = recorded_requests

        new_stages.append(stage.model_copy(update={"count": count}))

    return new_stages


def _count_replayed_arrivals(replay: Replay) -> int:
    """Return the number of arrivals of a trace that is replayed completely, `loop` times."""
    # Runs without a trace do not need this module.
    from loadgen.core.workload.trace_sessions import read_replay_source

    return len(read_replay_source(replay)) * replay.loop


def _count_recorded_requests(requests: Requests, measured_stages: list[Stage]) -> int | None:
    """Return how many requests the trace or data set has from which the requests are taken.

    For a trace that is replayed by sessions, and for recorded sessions, return the number of
    sessions. Return None if there is
    neither a trace nor a data set. Return None also for a data set if all measured stages have a
    duration: nobody needs the count then, and reading a large file takes long.
    """
    if isinstance(requests, FromTrace):
        # Runs without a trace do not need this module.
        from loadgen.core.workload.trace_sessions import read_replay_source

        recorded_arrivals = read_replay_source(requests)
        return len(recorded_arrivals)

    if isinstance(requests, FromFile | Trajectories):
        have_all_a_duration = all(stage.duration_ns is not None for stage in measured_stages)
        if have_all_a_duration:
            return None
        if isinstance(requests, Trajectories):
            return _count_sessions(requests.trajectories)
        return _count_rows(requests)

    return None


def _count_sessions(path: Path) -> int:
    """Return the number of recorded sessions of a data set. Raises UserError or CombinedError."""
    from loadgen.core.workload.trajectory_data import read_trajectories

    return len(read_trajectories(path))


def _count_rows(requests: FromFile) -> int:
    """Return the number of rows of a data set. Raises UserError or CombinedError."""
    from loadgen.core.workload.dataset import read_question_rows, read_rows

    read = read_question_rows if requests.check_answers else read_rows
    return len(read(requests.path))
