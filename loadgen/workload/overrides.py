"""How flags change a workload: a load flag stands in for the measured stages, a bound for their bounds, a promise for
the promise about the same metric. The rules, for users: docs/workloads.md.

Values to values; what cannot be goes to `faults`, so that all of it is told at once.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.errors import Fault, Faults, UserError
from loadgen.workload.fields import Fixed
from loadgen.workload.flags import METRICS, Flags
from loadgen.workload.messages import locate
from loadgen.workload.schema import (
    Closed,
    Constant,
    FromFile,
    FromTrace,
    Gamma,
    OneTokenOrMore,
    Poisson,
    Ramp,
    Replay,
    Slo,
    Stage,
    Synthetic,
    Term,
    Workload,
    Written,
)
from loadgen.workload.yaml_marks import Map, where

if TYPE_CHECKING:
    from loadgen.workload.traces import Trace

_LOAD_HINT = "give --request-rate 10 (open loop) or --concurrency 8 (closed loop), or write stages into the file"
_BOUND_HINT = "give --duration 30s or --num-requests 200, or write duration: or count: into the stage"


def apply(workload: Workload, flags: Flags, faults: list[Fault], file: str, top: Map) -> Workload:
    """The workload as the flags change it; what cannot be, they say, goes to `faults`. The rules: docs/workloads.md."""
    changed: dict[str, Any] = {
        "requests": _requests(workload.requests, flags, faults),
        "stages": _stages(workload, flags, faults, file, top),
        "slo": _promises(workload.slo, flags, faults),
        "limits": workload.limits.model_copy(update=dict(flags.limits)),
    }
    plain = {
        "grace_ns": flags.grace,
        "timeout_ns": flags.timeout,
        "stall_timeout_ns": flags.stall_timeout,
        "max_in_flight": flags.max_in_flight,
        "seed": flags.seed,
        "schedule_seed": flags.schedule_seed,
    }
    changed |= {field: value for field, value in plain.items() if value is not None}
    return workload.model_copy(update=changed)


def _requests(
    requests: Synthetic | FromFile | FromTrace, flags: Flags, faults: list[Fault]
) -> Synthetic | FromFile | FromTrace:
    changed: dict[str, Any] = {}
    if isinstance(requests, FromTrace):
        for name, tokens in (("input", flags.input_tokens), ("output", flags.output_tokens)):
            if tokens is not None:
                what = "the lengths are those of the trace"
                faults.append(UserError(what, f"--{name}-tokens {tokens}", "leave the flag out"))
        return requests
    if flags.input_tokens is not None:
        if isinstance(requests, FromFile):
            what = "the prompts come from a file: their length is what it is"
            faults.append(UserError(what, f"--input-tokens {flags.input_tokens}", "leave the flag out"))
        changed["input_tokens"] = Fixed[OneTokenOrMore](value=flags.input_tokens)
    if flags.output_tokens is not None:
        changed["output_tokens"] = Fixed[OneTokenOrMore](value=flags.output_tokens)
    return requests.model_copy(update=changed)


def _promises(slo: Slo | None, flags: Flags, faults: list[Fault]) -> Slo | None:
    """Metric by metric: a flag's promise stands in for the file's about the same metric, the others stay."""
    if not flags.terms and flags.goodput_share is None:
        return slo
    terms = {term.metric: term for term in slo.terms} if slo else {}
    for name, (ns, quantile) in flags.terms.items():
        before = terms.get(name)
        at = quantile or (before.quantile if before else 0.99)
        terms[name] = Term(metric=name, limit_ns=ns, quantile=at)
    if not terms:
        what = "a share of good requests, and nothing that says when one is good"
        faults.append(UserError(what, f"--slo goodput:{flags.goodput_share}", "add --slo ttft:2s --slo tpot:200ms"))
    goodput = flags.goodput_share if flags.goodput_share is not None else slo.goodput_share if slo else None
    return Slo(terms=tuple(terms[name] for name in METRICS if name in terms), goodput_share=goodput)


def _stages(workload: Written, flags: Flags, faults: list[Fault], file: str, top: Map) -> tuple[Stage, ...]:
    law = _law(flags, faults)
    if faults and not workload.stages:  # a load was asked for, and its flags are at fault
        return ()
    stages = _named(workload.stages, faults, file, top)
    if law is not None:
        stages = _under(law, stages)
    elif flags.burstiness is not None:
        stages = [_burstier(stage, flags.burstiness, faults) for stage in stages]
    if flags.concurrency_ramp is not None and flags.concurrency is None:
        stages = _ramped(stages, flags.concurrency_ramp, faults)
    if flags.duration is not None or flags.num_requests is not None:
        bounds = {"duration_ns": flags.duration, "count": flags.num_requests, "at_least": None}
        stages = [stage.model_copy(update=bounds) if stage.measured else stage for stage in stages]
    if flags.warmup_ns is not None or flags.warmup_count is not None:
        stages = _warmed(stages, flags)
    if isinstance(workload.requests, FromFile | FromTrace) or any(isinstance(s.arrival, Replay) for s in stages):
        stages = _once_through(stages, workload.requests, faults)
    faults.extend(_boundless(stages, file, top))
    return tuple(stages)


def _law(flags: Flags, faults: list[Fault]) -> Constant | Poisson | Gamma | Closed | None:
    rate, burstiness, lanes = flags.request_rate, flags.burstiness, flags.concurrency
    if lanes is not None and (rate is not None or burstiness is not None):
        other = "--request-rate" if rate is not None else "--burstiness"
        what = f"--concurrency is a closed loop, {other} an open one: not both"
        faults.append(UserError(what, f"--concurrency {lanes} {other}", "to cap an open loop: --max-in-flight"))
        return None
    if lanes is not None:
        return Closed(concurrency=lanes, ramp_ns=flags.concurrency_ramp or 0)
    if rate is None:
        return None
    if math.isinf(rate):
        if burstiness is not None:
            what = "everything at once has no gaps to be bursty"
            faults.append(UserError(what, "--request-rate inf --burstiness", "give a finite rate"))
        return Constant(rate=rate)
    return Poisson(rate=rate) if burstiness in (None, 1.0) else Gamma(rate=rate, burstiness=burstiness or 1.0)


def _under(law: Constant | Poisson | Gamma | Closed, stages: list[Stage]) -> list[Stage]:
    """One measured stage under `law`, as long as all measured stages together, in the place of the first of them.

    Warm-up stages keep their bounds and go under the same law, since they are to bring about the state that is then
    measured; but not under an infinite rate, which a duration would not bound.
    """
    measured = [stage for stage in stages if stage.measured]
    durations = [stage.duration_ns for stage in measured]
    counts = [stage.count for stage in measured]
    one = Stage(
        name=measured[0].name if len(measured) == 1 else "load",
        arrival=law,
        duration_ns=sum(d for d in durations if d) if durations and all(durations) else None,
        count=sum(c for c in counts if c) if counts and all(counts) else None,
        at_least=measured[0].at_least if len(measured) == 1 and isinstance(law, Poisson) else None,
    )
    calm = not (isinstance(law, Constant) and math.isinf(law.rate))
    result: list[Stage] = []
    for stage in stages:
        if not stage.measured:
            result.append(stage.model_copy(update={"arrival": law}) if calm else stage)
        elif stage is measured[0]:
            result.append(one)
    return result if measured else [*result, one]


def _ramped(stages: list[Stage], ramp_ns: int, faults: list[Fault]) -> list[Stage]:
    """The closed loops of the file with another ramp."""
    if not any(isinstance(stage.arrival, Closed) for stage in stages):
        what = "only the lanes of a closed loop begin one after the other"
        faults.append(UserError(what, f"--concurrency-ramp {ramp_ns / 1e9:g}s", "give --concurrency 8 as well"))
    return [
        stage.model_copy(update={"arrival": stage.arrival.model_copy(update={"ramp_ns": ramp_ns})})
        if isinstance(stage.arrival, Closed) else stage
        for stage in stages
    ]  # fmt: skip


def _burstier(stage: Stage, burstiness: float, faults: list[Fault]) -> Stage:
    law = stage.arrival
    if isinstance(law, Poisson | Gamma | Constant) and not math.isinf(law.rate):
        if stage.at_least is None:
            return stage.model_copy(update={"arrival": Gamma(rate=law.rate, burstiness=burstiness)})
        what = f'stage "{stage.name}" has minimums (at_least), which only Poisson arrivals can meet'
        faults.append(UserError(what, f"--burstiness {burstiness:g}", "give --duration or --num-requests as well"))
    elif stage.measured:
        what = f'stage "{stage.name}" has no steady rate to be bursty'
        faults.append(UserError(what, f"--burstiness {burstiness:g}", "give --request-rate as well"))
    return stage


def _warmed(stages: list[Stage], flags: Flags) -> list[Stage]:
    """The measured stages behind one warm-up stage of the flag's length, under the first one's law; 0 is none."""
    measured = [stage for stage in stages if stage.measured]
    ns, count = flags.warmup_ns or None, flags.warmup_count or None
    if not measured or (ns is None and count is None):
        return measured
    law = measured[0].arrival
    if isinstance(law, Ramp):
        law = Poisson(rate=law.from_rate)
    if isinstance(law, Replay):
        law = Poisson(rate=min(1e6, _trace(law.file).rate * law.speed))
    return [Stage(name="warm-up", arrival=law, duration_ns=ns, count=count, measured=False), *measured]


def _once_through(stages: list[Stage], requests: Synthetic | FromFile | FromTrace, faults: list[Fault]) -> list[Stage]:
    """A single measured stage without bounds sends each row of its file once; a stage of a trace all of the trace."""
    measured = [stage for stage in stages if stage.measured]
    rows: int | None = None
    try:
        if isinstance(requests, FromTrace):
            rows = len(_trace(requests.trace))
        elif isinstance(requests, FromFile):
            with requests.path.open("rb") as lines:
                rows = sum(1 for line in lines if line.strip())
        result = []
        for stage in stages:
            count = None
            if stage.duration_ns is None and stage.count is None:
                if isinstance(stage.arrival, Replay):
                    count = len(_trace(stage.arrival.file))
                elif stage.measured and len(measured) == 1:
                    count = rows
            result.append(stage.model_copy(update={"count": count}) if count else stage)
        return result
    except Fault as fault:
        faults.append(fault)
    except Faults as found:
        faults.extend(found.faults)
    return stages


def _trace(path: Path) -> Trace:
    from loadgen.workload.traces import read_trace

    return read_trace(path)


def _named(stages: tuple[Stage, ...], faults: list[Fault], file: str, top: Map) -> list[Stage]:
    """Every stage with a name of its own: as written, else `warm-up`, `load`, and `load-2` where there are more."""
    taken: dict[str, int] = {}
    for index, stage in enumerate(stages):
        if stage.name and stage.name in taken:
            spot, path, _ = locate(top, ("stages", index, "name"))
            what = f'two stages are called "{stage.name}"'
            faults.append(UserError(what, where(file, spot, path), "rows refer to stages by name: give each its own"))
        taken.setdefault(stage.name, index)
    named = []
    for stage in stages:
        plain = "load" if stage.measured else "warm-up"
        name, number = stage.name or plain, 2
        while not stage.name and name in taken:
            name, number = f"{plain}-{number}", number + 1
        taken.setdefault(name, -1)
        named.append(stage.model_copy(update={"name": name}))
    return named


def _boundless(stages: list[Stage], file: str, top: Map) -> list[Fault]:
    """What keeps the stages from being a load that ends."""
    if not any(stage.measured for stage in stages):
        if not stages:
            return [UserError("no load: no stages in the file, and no flag gives one", file, _LOAD_HINT)]
        spot, path, _ = locate(top, ("stages",))
        return [UserError("no load: no stage is measured", where(file, spot, path), _LOAD_HINT)]
    faults: list[Fault] = []
    written = {stage.get("name"): index for index, stage in enumerate(top.get("stages") or ())}
    for number, stage in enumerate(stages):
        spot, path, _ = locate(top, ("stages", written.get(stage.name, number)))
        at_once = isinstance(stage.arrival, Constant) and math.isinf(stage.arrival.rate)
        if at_once and stage.count is None:
            what = f'stage "{stage.name}" sends everything at once, and does not say how many'
            faults.append(
                UserError(what, where(file, spot, path), "give --num-requests 200 (--warmup 20req), or count:")
            )
        elif stage.duration_ns is None and stage.count is None and stage.at_least is None:
            what = f'stage "{stage.name}" never ends: it has neither duration nor count'
            faults.append(UserError(what, where(file, spot, path), _BOUND_HINT))
        elif isinstance(law := stage.arrival, Closed) and stage.duration_ns and law.ramp_ns >= stage.duration_ns:
            what = f'stage "{stage.name}" ends after {stage.duration_ns / 1e9:g} s, before all its lanes have begun'
            hint = f"a ramp (--concurrency-ramp) of less than that; it is {law.ramp_ns / 1e9:g} s"
            faults.append(UserError(what, where(file, spot, path), hint))
    return faults
