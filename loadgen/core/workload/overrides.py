"""The flags of the command line over a workload file: the workload as changed by them. `flags.py` reads the flags.

The rules for users are in docs/workloads.md: a load flag replaces the measured stages, a duration or count replaces
their bounds, and SLO terms replace the SLO of the workload or are added to it. Works on values only; every fault names its flag,
and all faults are collected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loadgen.core import format, seeds
from loadgen.core.errors import LoadgenError, UserError, collecting
from loadgen.core.slo import ATTAINMENT, Slo, merge_slos
from loadgen.core.workload.diagnostics import locate
from loadgen.core.workload.distributions import FixedTokens
from loadgen.core.workload.flags import Overrides, describe_option
from loadgen.core.workload.request_classes import Mix, requests_by_class
from loadgen.core.workload.request_kinds import FromFile, FromTrace, Synthetic
from loadgen.core.workload.schema import Workload, WorkloadFile
from loadgen.core.workload.stages import (
    Closed,
    Constant,
    Gamma,
    Poisson,
    Ramp,
    Replay,
    Stage,
)
from loadgen.core.workload.tasks import Task
from loadgen.core.workload.yaml_marks import Map, place_at

if TYPE_CHECKING:
    from pathlib import Path

    from loadgen.core.workload.trace_sessions import TraceSessions
    from loadgen.core.workload.traces import Trace

_LOAD_HINT = "give --request-rate 10 (open loop) or --concurrency 8 (closed loop), or write stages into the file"
MOST_STAGES = 1_000
MOST_PLANNED = 200_000_000  # starts of an open loop: 1.6 GB, and some more while they are drawn
MOST_TASKS = 500_000  # tasks, also among classes: each is drawn before the start, some 7 µs for each of its requests
_BOUND_HINT = (
    "give --duration 30s or --num-requests 200, or write duration: or count: into the stage"
)


def apply(
    workload: Workload, flags: Overrides, faults: list[LoadgenError], file: str, top: Map
) -> Workload:
    """Return the workload as changed by the flags. Conflicts are appended to `faults`. Rules: docs/workloads.md."""
    changes: dict[str, Any] = {
        "requests": _requests(workload.requests, flags, faults),
        "stages": _stages(workload, flags, faults, file, top),
        "slo": _slo_in_force(workload, flags, faults),
        "limits": workload.limits.model_copy(update=dict(flags.limits)),
    }
    scalars = {
        "grace_ns": flags.grace,
        "timeout_ns": flags.timeout,
        "stall_timeout_ns": flags.stall_timeout,
        "stop_when": flags.stop_when or None,
        "max_in_flight": flags.max_in_flight,
        "max_in_prefill": flags.max_in_prefill,
        "seed": flags.seed,
        "schedule_seed": flags.schedule_seed,
        "salt": flags.salt,
    }
    changes |= {field: value for field, value in scalars.items() if value is not None}
    measured = [stage.name or "load" for stage in workload.stages if stage.measured]
    if len(measured) > 1 and (flags.request_rate is not None or flags.concurrency is not None):
        changes["replaced"] = tuple(measured)
    if (
        isinstance(workload.requests, Synthetic)
        and workload.requests.cache is not None
        and workload.salt is None
    ):
        changes.setdefault(
            "salt", seeds.FRESH
        )  # a server must not know the prompts from an earlier run
    if flags.salt is not None and isinstance(workload.requests, FromFile):
        problem = "a salt changes generated prompts; those of a file are sent as they stand"
        faults.append(UserError("conflict", problem, f"--salt {flags.salt}", "leave the flag out"))
    return workload.model_copy(update=changes)


def with_unique_prompts(workload: Workload, describe_option: str) -> Workload:
    """The workload for one run among several of the same seed: its salt is that of the place (`c8`, `r2`).

    So no run sends the prompts of another one, which a server's prefix cache would remember. Without a seed every run
    draws its own, and nothing changes.
    """
    if workload.seed is None:
        return workload
    return workload.model_copy(
        update={"salt": seeds.salt_at(workload.seed, workload.salt, describe_option)}
    )


def _requests(
    requests: Synthetic | FromFile | FromTrace | Task | Mix,
    flags: Overrides,
    faults: list[LoadgenError],
) -> Synthetic | FromFile | FromTrace | Task | Mix:
    changes: dict[str, Any] = {}
    if isinstance(requests, FromTrace):
        requests = requests.model_copy(update=_of_trace(flags))
    if isinstance(requests, FromTrace | Task | Mix):
        owner = {FromTrace: "trace", Task: "steps", Mix: "classes"}[type(requests)]
        for name, tokens in (("input", flags.input_tokens), ("output", flags.output_tokens)):
            if tokens is not None:
                problem = f"the lengths are those of the {owner}"
                faults.append(
                    UserError(
                        "conflict", problem, f"--{name}-tokens {tokens}", "leave the flag out"
                    )
                )
        return requests
    if flags.input_tokens is not None:
        if isinstance(requests, FromFile):
            problem = "the prompts come from a file: their length is what it is"
            faults.append(
                UserError(
                    "conflict",
                    problem,
                    f"--input-tokens {flags.input_tokens}",
                    "leave the flag out",
                )
            )
        changes["input_tokens"] = FixedTokens.model_construct(value=flags.input_tokens)
    if flags.output_tokens == "unlimited":
        if not isinstance(requests, FromFile):
            problem = "only rows of a data set can be sent without a limit"
            hint = "a number of tokens: --output-tokens 200"
            faults.append(UserError("conflict", problem, "--output-tokens unlimited", hint))
        changes["output_tokens"] = "unlimited"
    elif flags.output_tokens is not None:
        changes["output_tokens"] = FixedTokens.model_construct(value=flags.output_tokens)
    return requests.model_copy(update=changes)


def _of_trace(flags: Overrides) -> dict[str, Any]:
    """What the flags say of a trace, for its requests and for its arrivals."""
    said = {
        "slice_ns": flags.trace_slice,
        "on_bad_row": flags.on_bad_row,
        "replay": flags.trace_replay,
        "unit": flags.trace_unit,
    }
    return {name: value for name, value in said.items() if value is not None}


def _faults_without_a_trace(
    requests: Any, stages: Sequence[Stage], flags: Overrides
) -> list[LoadgenError]:
    arrivals = any(isinstance(stage.arrival, Replay) for stage in stages)
    replays = arrivals or isinstance(requests, FromTrace)
    given = {"speed": flags.trace_speed, "loop": flags.trace_loop} | (
        {} if replays else _of_trace(flags)
    )
    problem = "the arrivals are not those of a trace" if replays else "no trace is replayed"
    hint = "give --trace FILE, and neither --request-rate nor --concurrency"
    key_of = {
        "slice_ns": "trace_slice",
        "replay": "trace_replay",
        "unit": "trace_unit",
        "speed": "trace_speed",
        "loop": "trace_loop",
    }
    return [
        UserError("no_effect", problem, f"--set {key_of.get(name, name)}", hint)
        for name, value in given.items()
        if value is not None and not arrivals
    ]


def _slo_in_force(workload: Workload, flags: Overrides, faults: list[LoadgenError]) -> Slo | None:
    """Return the SLO of the options, with what they add, or the SLO of the workload.

    Options that no class would be judged by, and an attainment without a limit to attain, are
    appended to `faults`.
    """
    if flags.replacement_slo is None and flags.added_slo is None:
        return workload.slo
    classes = getattr(workload.requests, "classes", {}).values()
    if classes and all(one.slo for one in classes):
        hint = "write the limits of the classes in a file of your own, which may extend this one"
        faults.append(UserError("no_effect", "each class has an SLO of its own", "--slo", hint))
    slo = merge_slos(flags.replacement_slo or workload.slo or Slo(), flags.added_slo or Slo())
    if not slo.terms and slo.goodput_share is not None:
        share = f"{slo.goodput_share * 100:g}%"
        hint = "add --slo ttft:2s"
        if workload.slo is not None and workload.slo.terms:
            hint = f"--slo +{ATTAINMENT}:{share} keeps the limits of the workload; or add --slo ttft:2s"
        problem = "an attainment needs a latency limit that requests can meet"
        faults.append(UserError("no_slo", problem, f"--slo {ATTAINMENT}:{share}", hint))
    return slo


def _stages(
    workload: WorkloadFile, flags: Overrides, faults: list[LoadgenError], file: str, top: Map
) -> tuple[Stage, ...]:
    law = _arrival_of_flags(flags, faults)
    if faults and not workload.stages:  # the flags ask for a load but are faulty
        return ()
    if len(workload.stages) > MOST_STAGES:
        spot, path, _ = locate(top, ("stages",))
        hint = f"at most {MOST_STAGES:,}; a load that changes all the time is a trace (--trace)"
        faults.append(
            UserError(
                "too_large",
                format.counted(len(workload.stages), "stage"),
                place_at(file, spot, path),
                hint,
            )
        )
        return ()
    stages = [_replaying(stage, flags) for stage in _with_names(workload.stages, faults, file, top)]
    if law is not None:
        stages = _replace_measured(law, stages)
    elif flags.burstiness is not None:
        stages = [_with_burstiness(stage, flags.burstiness, faults) for stage in stages]
    if flags.stagger is not None and flags.concurrency is None:
        stages = _with_ramp(stages, flags.stagger, faults)
    faults.extend(_faults_without_a_trace(workload.requests, stages, flags))
    if flags.duration is not None or flags.num_requests is not None:
        bounds = {"duration_ns": flags.duration, "count": flags.num_requests, "at_least": None}
        stages = [stage.model_copy(update=bounds) if stage.measured else stage for stage in stages]
    if flags.warmup_ns is not None or flags.warmup_count is not None:
        stages = _with_warmup(stages, flags)
    requests = workload.requests
    if isinstance(requests, FromFile | FromTrace) or any(
        isinstance(s.arrival, Replay) for s in stages
    ):
        if isinstance(requests, FromTrace):
            requests = requests.model_copy(update=_of_trace(flags))
            stages = [_as_the_requests(stage, requests) for stage in stages]
        stages = _with_missing_counts(stages, requests, faults)
    faults.extend(_faults_of_stages(stages, _draws_tasks(requests), file, top))
    return tuple(stages)


def _arrival_of_flags(
    flags: Overrides, faults: list[LoadgenError]
) -> Constant | Poisson | Gamma | Closed | None:
    rate, burstiness, concurrency = flags.request_rate, flags.burstiness, flags.concurrency
    if concurrency is not None and (rate is not None or burstiness is not None):
        other_flag = "--request-rate" if rate is not None else "--set burstiness"
        problem = f"--concurrency is a closed loop, {other_flag} an open one: not both"
        faults.append(
            UserError(
                "conflict",
                problem,
                f"--concurrency {concurrency} {other_flag}",
                "to cap an open loop: --max-in-flight",
            )
        )
        return None
    if concurrency is not None:
        return Closed.model_construct(concurrency=concurrency, ramp_ns=flags.stagger)
    if rate is None:
        return None
    if math.isinf(rate):
        if burstiness is not None:
            problem = "everything at once has no gaps to be bursty"
            faults.append(
                UserError(
                    "conflict", problem, "--request-rate inf --set burstiness", "give a finite rate"
                )
            )
        return Constant.model_construct(rate=rate)
    if burstiness is None or burstiness == 1:
        return Poisson.model_construct(rate=rate)
    return Gamma.model_construct(rate=rate, burstiness=burstiness)


def _replace_measured(law: Constant | Poisson | Gamma | Closed, stages: list[Stage]) -> list[Stage]:
    """Replace the measured stages by one stage with the arrival law `law` and their total length.

    It stands at the position of the first measured stage. Warm-up stages keep their bounds and get the same law,
    because they must create the state that is then measured. An infinite rate is the exception: a duration does not
    bound it, so warm-up stages keep their own law.
    """
    measured = [stage for stage in stages if stage.measured]
    durations = [stage.duration_ns for stage in measured]
    counts = [stage.count for stage in measured]
    load_stage = Stage.model_construct(
        name=measured[0].name if len(measured) == 1 else "load",
        arrival=law,
        duration_ns=sum(d for d in durations if d) if durations and all(durations) else None,
        count=sum(c for c in counts if c) if counts and all(counts) else None,
        at_least=measured[0].at_least if len(measured) == 1 and isinstance(law, Poisson) else None,
    )
    finite = not (isinstance(law, Constant) and math.isinf(law.rate))
    result: list[Stage] = []
    for stage in stages:
        if not stage.measured:
            result.append(stage.model_copy(update={"arrival": law}) if finite else stage)
        elif stage is measured[0]:
            result.append(load_stage)
    return result if measured else [*result, load_stage]


def _with_ramp(stages: list[Stage], ramp_ns: int, faults: list[LoadgenError]) -> list[Stage]:
    """Return the stages with the starts of every closed loop staggered over `ramp_ns`.

    Adds an error if there is no closed loop.
    """
    if not any(isinstance(stage.arrival, Closed) for stage in stages):
        problem = "only the virtual users of a closed loop start together or one after the other"
        option = describe_option("stagger", f"{ramp_ns / 1e9:g}s")
        faults.append(UserError("no_effect", problem, option, "add --concurrency 8"))
    return [
        stage.model_copy(update={"arrival": stage.arrival.model_copy(update={"ramp_ns": ramp_ns})})
        if isinstance(stage.arrival, Closed)
        else stage
        for stage in stages
    ]


def _replaying(stage: Stage, flags: Overrides) -> Stage:
    """A stage with what the flags say of the trace that it replays; any other stage as it is."""
    if not isinstance(stage.arrival, Replay):
        return stage
    own = {"speed": flags.trace_speed, "loop": flags.trace_loop}
    changes = _of_trace(flags) | {name: value for name, value in own.items() if value is not None}
    return stage.model_copy(update={"arrival": stage.arrival.model_copy(update=changes)})


def _as_the_requests(stage: Stage, requests: FromTrace) -> Stage:
    """A stage whose arrivals are those of the sessions of a trace, where the requests are."""
    if not isinstance(stage.arrival, Replay):
        return stage
    return stage.model_copy(
        update={"arrival": stage.arrival.model_copy(update={"replay": requests.replay})}
    )


def _with_burstiness(stage: Stage, burstiness: float, faults: list[LoadgenError]) -> Stage:
    law = stage.arrival
    if isinstance(law, Poisson | Gamma | Constant) and not math.isinf(law.rate):
        if stage.at_least is None:
            return stage.model_copy(
                update={"arrival": Gamma.model_construct(rate=law.rate, burstiness=burstiness)}
            )
        problem = (
            f'stage "{stage.name}" has minimums (at_least), which only Poisson arrivals can meet'
        )
        faults.append(
            UserError(
                "conflict",
                problem,
                describe_option("burstiness", f"{burstiness:g}"),
                "add --duration or --num-requests",
            )
        )
    elif stage.measured:
        problem = f'stage "{stage.name}" has no steady rate to be bursty'
        faults.append(
            UserError(
                "no_effect",
                problem,
                describe_option("burstiness", f"{burstiness:g}"),
                "add --request-rate",
            )
        )
    return stage


def _with_warmup(stages: list[Stage], flags: Overrides) -> list[Stage]:
    """Put one warm-up stage of the flag's length before the measured stages and drop the warm-up stages of the file.

    Its law is that of the first measured stage. A ramp becomes Poisson at its first rate, or at its mean rate if it
    starts at zero; a trace becomes Poisson at its mean rate. A length of 0 means no warm-up.
    """
    measured = [stage for stage in stages if stage.measured]
    ns, count = flags.warmup_ns or None, flags.warmup_count or None
    if not measured or (ns is None and count is None):
        return measured
    law = measured[0].arrival
    if isinstance(law, Ramp):
        law = Poisson.model_construct(rate=law.from_rate or law.mean_rate)
    if isinstance(law, Replay):
        law = Poisson.model_construct(rate=min(1e6, _trace_of(law).rate * law.speed))
    return [
        Stage.model_construct(
            name="warm-up", arrival=law, duration_ns=ns, count=count, measured=False
        ),
        *measured,
    ]


def _with_missing_counts(
    stages: list[Stage],
    requests: Synthetic | FromFile | FromTrace | Task | Mix,
    faults: list[LoadgenError],
) -> list[Stage]:
    """Set the missing count: the rows of the file for a single measured stage, all of the trace for a replay stage."""
    measured = [stage for stage in stages if stage.measured]
    rows: int | None = None
    with collecting(faults):
        if isinstance(requests, FromTrace):
            rows = len(_starts_of(requests))
        elif isinstance(requests, FromFile):
            rows = (
                _rows_of(requests.path)
                if any(one.duration_ns is None for one in measured)
                else None
            )
        result = []
        for stage in stages:
            count = None
            if stage.duration_ns is None and stage.count is None:
                if isinstance(stage.arrival, Replay):
                    count = len(_starts_of(stage.arrival)) * stage.arrival.loop
                elif stage.measured and len(measured) == 1:
                    count = rows
            result.append(stage.model_copy(update={"count": count}) if count else stage)
        return result
    # the file is at fault, and not a stage that has no end without it
    return [
        stage if stage.duration_ns or stage.count else stage.model_copy(update={"count": 1})
        for stage in stages
    ]


def _rows_of(path: Path) -> int:
    from loadgen.core.workload.dataset import read_rows

    return len(read_rows(path))


def _trace_of(by: FromTrace | Replay) -> Trace:
    from loadgen.core.workload.traces import read_replayed_trace

    return read_replayed_trace(by)


def _starts_of(by: FromTrace | Replay) -> Trace | TraceSessions:
    from loadgen.core.workload.trace_sessions import replay_starts

    return replay_starts(by)


def _with_names(
    stages: tuple[Stage, ...], faults: list[LoadgenError], file: str, top: Map
) -> list[Stage]:
    """Give every stage a unique name: as written, else `warm-up` or `load`, numbered from the second (`load-2`)."""
    used_names: dict[str, int] = {}
    for index, stage in enumerate(stages):
        if stage.name and stage.name in used_names:
            spot, path, _ = locate(top, ("stages", index, "name"))
            problem = f'two stages are called "{stage.name}"'
            faults.append(
                UserError(
                    "duplicate",
                    problem,
                    place_at(file, spot, path),
                    "rows refer to stages by name: give each its own",
                )
            )
        used_names.setdefault(stage.name, index)
    named = []
    for stage in stages:
        base_name = "load" if stage.measured else "warm-up"
        name, number = stage.name or base_name, 2
        while not stage.name and name in used_names:
            name, number = f"{base_name}-{number}", number + 1
        used_names.setdefault(name, -1)
        named.append(stage.model_copy(update={"name": name}))
    return named


def _planned_starts(stage: Stage) -> float:
    """How many starts of an open loop the schedule holds; 0 for a closed loop, which is planned as it goes."""
    law = stage.arrival
    if isinstance(law, Closed):
        return 0
    if stage.count is None and isinstance(law, Replay):
        trace, starts = _trace_of(law), len(_starts_of(law))
        return min(
            starts * law.loop, trace.rate * law.speed * (stage.duration_ns or 0) / 1e9 + starts
        )
    if stage.count is not None or stage.duration_ns is None:
        return stage.count or 0
    assert not isinstance(law, Replay)
    rate = law.mean_rate if isinstance(law, Ramp) else law.rate
    return rate * stage.duration_ns / 1e9 if math.isfinite(rate) else 0


def _draws_tasks(requests: Any) -> bool:
    of_classes = requests_by_class(requests).values()
    return any(
        isinstance(part, Task) or getattr(part, "replay", "") == "sessions" for part in of_classes
    )


def _faults_of_stages(
    stages: list[Stage], of_tasks: bool, file: str, top: Map
) -> list[LoadgenError]:
    """The faults of stages that are no load, never end, or end before all lanes have started."""
    if not any(stage.measured for stage in stages):
        if not stages:
            problem = "no load: no stages in the file, and no flag gives one"
            return [UserError("no_load", problem, file, _LOAD_HINT)]
        spot, path, _ = locate(top, ("stages",))
        return [
            UserError(
                "no_load", "no load: no stage is measured", place_at(file, spot, path), _LOAD_HINT
            )
        ]
    planned = sum(map(_planned_starts, stages))
    if (
        of_tasks
        and (tasks := sum(max(stage.count or 0, _planned_starts(stage)) for stage in stages))
        > MOST_TASKS
    ):
        problem = f"{tasks:,.0f} tasks to draw before the start, at most {MOST_TASKS:,}"
        hint = "a lower count, or a closed loop with a duration alone, which draws as it goes"
        return [UserError("too_large", problem, file, hint)]
    if planned > MOST_PLANNED:
        problem = f"{planned:,.0f} requests to plan: their instants alone take {planned * 8 / 1e9:,.1f} GB"
        hint = f"a lower rate or a shorter duration (at most {MOST_PLANNED:,}); a closed loop (--concurrency) plans none"
        return [UserError("too_large", problem, file, hint)]
    faults: list[LoadgenError] = []
    index_of_name = {
        stage.get("name"): index for index, stage in enumerate(top.get("stages") or ())
    }
    for number, stage in enumerate(stages):
        spot, path, _ = locate(top, ("stages", index_of_name.get(stage.name, number)))
        at_once = isinstance(stage.arrival, Constant) and math.isinf(stage.arrival.rate)
        if at_once and stage.count is None:
            problem = f'stage "{stage.name}" sends everything at once, and does not say how many'
            faults.append(
                UserError(
                    "endless",
                    problem,
                    place_at(file, spot, path),
                    "give --num-requests 200 (--warmup 20req), or count:",
                )
            )
        elif stage.duration_ns is None and stage.count is None and stage.at_least is None:
            problem = f'stage "{stage.name}" never ends: it has neither duration nor count'
            faults.append(UserError("endless", problem, place_at(file, spot, path), _BOUND_HINT))
        elif (
            isinstance(law := stage.arrival, Closed)
            and stage.duration_ns
            and (law.ramp_ns or 0) >= stage.duration_ns
        ):
            problem = f'stage "{stage.name}" ends after {stage.duration_ns / 1e9:g} s, before all its lanes have begun'
            hint = f"a ramp (--stagger) of less than that; it is {(law.ramp_ns or 0) / 1e9:g} s"
            faults.append(UserError("out_of_range", problem, place_at(file, spot, path), hint))
    return faults
