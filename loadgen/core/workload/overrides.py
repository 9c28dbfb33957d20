"""The flags of the command line over a workload file: what they say, and the workload as changed by them.

The rules for users are in docs/workloads.md: a load flag replaces the measured stages, a duration or count replaces
their bounds, and an SLO term replaces the term on the same metric. A time without a unit is in seconds (for `goodput`
in milliseconds, as in other tools). Works on values only; every fault names its flag, and all faults are collected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from loadgen.core import format, seeds, units
from loadgen.core.errors import Fault, UserError, closest, collecting
from loadgen.core.slo import METRIC_ALIASES, METRICS, Slo, StopRule, Term
from loadgen.core.workload.fields import SALT_PATTERN, Fixed, OneTokenOrMore
from loadgen.core.workload.messages import locate
from loadgen.core.workload.schema import (
    MOST_LANES,
    Closed,
    Constant,
    FromFile,
    FromTrace,
    Gamma,
    Limits,
    Mix,
    Poisson,
    Ramp,
    Replay,
    Stage,
    Synthetic,
    Workload,
    Written,
    parts,
)
from loadgen.core.workload.slo_fields import stop_rule
from loadgen.core.workload.tasks import Task
from loadgen.core.workload.yaml_marks import Map, where

if TYPE_CHECKING:
    from pathlib import Path

    from loadgen.core.workload.trace_sessions import TraceSessions
    from loadgen.core.workload.traces import Trace

_LOAD_HINT = "give --request-rate 10 (open loop) or --concurrency 8 (closed loop), or write stages into the file"
MOST_STAGES = 1_000
MOST_PLANNED = 200_000_000  # starts of an open loop: 1.6 GB, and some more while they are drawn
MOST_TASKS = 500_000  # tasks, also among classes: each is drawn before the start, some 7 µs for each of its requests
_BOUND_HINT = "give --duration 30s or --num-requests 200, or write duration: or count: into the stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What flags say: times in ns, rates per second, shares from 0 to 1; None: not given.

    `faults`: of the flags that could not be read, which count as not given.
    """

    request_rate: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    concurrency_ramp: int | None = None
    max_in_flight: int | None = None
    num_requests: int | None = None
    duration: int | None = None
    warmup_ns: int | None = None
    warmup_count: int | None = None
    grace: int | None = None
    timeout: int | None = None
    stall_timeout: int | None = None
    terms: Mapping[str, tuple[int, float | None]] = field(default_factory=dict)  # metric → limit in ns, quantile
    goodput_share: float | None = None
    seed: int | None = None
    schedule_seed: int | None = None
    salt: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    trace_speed: float | None = None
    trace_slice: tuple[int, int | None] | None = None
    trace_loop: int | None = None
    on_bad_row: Literal["fail", "skip"] | None = None
    trace_replay: Literal["instants", "sessions"] | None = None
    stop_when: tuple[StopRule, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


BY_KEY = frozenset({
    "burstiness", "concurrency_ramp", "limit", "on_bad_row", "schedule_seed", "stall_timeout", "trace_loop",
    "trace_replay", "trace_slice", "trace_speed",
})  # fmt: skip
"""What a command line gives as `--set NAME=VALUE`."""


PYTHON_ONLY = {"goodput": "goodput", "num_warmups": "num_warmups"}


def place(name: str, value: object) -> str:
    """How a fault names what was given, by its keyword."""
    if name in BY_KEY:
        return f"--set {name}={value}"
    return f"{name} {value}" if name in PYTHON_ONLY else f"--{name.replace('_', '-')} {value}"


def of_the_load(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run's options that are flags over its workload, as far as they are given."""
    return {name: value for name in FLAGS if (value := options.get(name)) is not None}


def read_flags(**options: Any) -> Overrides:
    """The flags as typed, `x_y` for `--x-y` (a sequence of texts where a flag can be repeated), or numbers.

    A run's other options, and what is None, say nothing here.
    """
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, given in of_the_load(options).items():
        for text in (given,) if isinstance(given, str) or not isinstance(given, Sequence) else given:
            try:
                values |= _read_flag(name, str(text).strip(), values)
            except units.Wrong as wrong:
                faults.append(
                    UserError(
                        wrong.code, f'"{text}" {wrong}', place(name, text), wrong.hint, key=PYTHON_ONLY.get(name, "")
                    )
                )
    return Overrides(**values, faults=tuple(faults))


def _read_flag(name: str, text: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Overrides` that a flag gives. `values`: those that the flags before it gave."""
    if name == "warmup":
        return _warmup(text)
    if name == "num_warmups":
        return {"warmup_count": _count(0)(text)}
    if name in ("slo", "goodput"):
        metric, limit, quantile = _term(text, "ms" if name == "goodput" else None)
        if metric == "goodput":
            return {"goodput_share": limit}
        return {"terms": {**values.get("terms", {}), metric: (limit, quantile)}}
    if name == "stop_when":
        return {"stop_when": (*values.get("stop_when", ()), stop_rule(text))}
    if name == "limit":
        return {"limits": {**values.get("limits", {}), **_limit(text)}}
    return {name: _PARSERS[name](text)}


def levels(text: str) -> tuple[int, ...]:
    """The numbers of `--concurrency 1,2,4,8`, in the given order. Raises UserError."""
    try:
        return tuple(_count(1)(part.strip()) for part in text.split(","))
    except units.Wrong as wrong:
        hint = "one number, or several: 1,2,4,8" if "," in text else wrong.hint
        raise UserError(wrong.code, f'"{text}" {wrong}', f"--concurrency {text}", hint) from None


def _count(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def parse_count(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < minimum:
            raise units.Wrong("invalid_value", "is not a number of that kind", f"a whole number, {minimum} or more")
        if maximum is not None and int(text) > maximum:
            raise units.Wrong("out_of_range", "is too many", f"a whole number from {minimum} to {maximum:,}")
        return int(text)

    return parse_count


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,20}", text) or int(text) >= 2**64:
        raise units.Wrong("invalid_value", "is not a seed", "a whole number from 0 to 2^64 - 1")
    return int(text)


def _salt(text: str) -> str:
    if not re.fullmatch(SALT_PATTERN, text):
        raise units.Wrong(
            "invalid_value", "is not a salt", "a word of letters, digits, . _ -, or fresh: a new one in every run"
        )
    return text


def _positive(hint: str) -> Callable[[str], float]:
    def parse_positive(text: str) -> float:
        if not re.fullmatch(units.NUMBER, text) or not 0 < float(text) <= 1e6:
            raise units.Wrong("invalid_value", "is not a number above zero", hint)
        return float(text)

    return parse_positive


def _word(meanings: Mapping[str, str]) -> Callable[[str], str]:
    def parse_word(text: str) -> str:
        if text not in meanings:
            known = ", ".join(f"{word} ({meaning})" if meaning else word for word, meaning in meanings.items())
            raise units.Wrong("unknown_name", "is not known", f"known: {known}")
        return text

    return parse_word


def _seconds(text: str) -> int:
    return units.duration_ns(text, bare="s")


def _seconds_above_zero(text: str) -> int:
    ns = _seconds(text)
    if ns == 0:
        raise units.Wrong("out_of_range", "is no time at all", "a duration above zero, like 30s")
    return ns


def _warmup(text: str) -> dict[str, int]:
    count = re.fullmatch(r"([0-9]{1,12}) ?(req|reqs|requests)", text)
    if count:
        return {"warmup_count": int(count[1])}
    try:
        return {"warmup_ns": _seconds(text)}
    except units.Wrong as wrong:
        raise units.Wrong(
            wrong.code, str(wrong), "10 or 10s is ten seconds, 10req is ten requests, 0 is none"
        ) from None


def _term(text: str, bare: str | None) -> tuple[str, Any, float | None]:
    """A term of an SLO. `bare`: the unit of a limit without one, as of `goodput`; one of `--slo` needs its unit."""
    example = "ttft:2000 tpot:200 (milliseconds)" if bare else "ttft:2s, ttft:2s:p95, goodput:99%"
    known = f"known: {', '.join((*METRICS, 'goodput'))}; {example}"
    name, colon, limit_text = text.partition(":")
    metric = METRIC_ALIASES.get(name, name)
    if not colon:
        raise units.Wrong("invalid_value", "is not a promise", f"metric:limit, like {example}")
    if metric == "goodput":
        return metric, units.share(limit_text), None
    if metric not in METRICS:
        similar = closest(name, (*METRICS, *METRIC_ALIASES, "goodput"))
        raise units.Wrong(
            "unknown_name", f'names no metric: "{name}"', (f'did you mean "{similar}"? ' if similar else "") + known
        )
    limit, colon, quantile_text = limit_text.partition(":")
    quantile = units.quantile(quantile_text) if colon else None
    ns = units.duration_ns(limit, bare)
    if ns == 0:
        raise units.Wrong("out_of_range", "promises no time at all", known)
    return metric, ns, quantile


def _limit(text: str) -> dict[str, float]:
    name, _, value = text.partition(":")
    if name not in Limits.model_fields:
        known = ", ".join(Limits.model_fields)
        raise units.Wrong("unknown_name", f'names no limit: "{name}"', f"known: {known}; like send_lag_share:10%")
    return {name: units.share(value)}


_PARSERS: dict[str, Callable[[str], Any]] = {
    "request_rate": lambda text: units.rate_per_s(text, bare=True),
    "burstiness": _positive("below 1 is burstier than Poisson, 1 is Poisson, above 1 more even"),
    "concurrency": _count(1, MOST_LANES),
    "concurrency_ramp": _seconds,
    "max_in_flight": _count(1),
    "num_requests": _count(1),
    "duration": _seconds_above_zero,
    "grace": _seconds,
    "timeout": _seconds_above_zero,
    "stall_timeout": _seconds_above_zero,
    "seed": _seed,
    "schedule_seed": _seed,
    "salt": _salt,
    "trace_speed": _positive("2 is twice as fast as it was, 0.5 half as fast"),
    "trace_slice": lambda text: units.time_slice(text, bare="s"),
    "trace_loop": _count(1, 1_000_000),
    "on_bad_row": _word({"fail": "", "skip": "leave the row out, and count it"}),
    "trace_replay": _word(
        {
            "instants": "each request when it came",
            "sessions": "after what it waited for, and the recorded pause",
        }
    ),
    "input_tokens": _count(1, units.MOST_TOKENS),
    "output_tokens": _count(1, units.MOST_TOKENS),
}
FLAGS = (*_PARSERS, "warmup", "num_warmups", "slo", "goodput", "stop_when", "limit")


def apply(workload: Workload, flags: Overrides, faults: list[Fault], file: str, top: Map) -> Workload:
    """Return the workload as changed by the flags. Conflicts are appended to `faults`. Rules: docs/workloads.md."""
    changes: dict[str, Any] = {
        "requests": _requests(workload.requests, flags, faults),
        "stages": _stages(workload, flags, faults, file, top),
        "slo": _merged_slo(workload.slo, flags, faults),
        "limits": workload.limits.model_copy(update=dict(flags.limits)),
    }
    scalars = {
        "grace_ns": flags.grace,
        "timeout_ns": flags.timeout,
        "stall_timeout_ns": flags.stall_timeout,
        "stop_when": flags.stop_when or None,
        "max_in_flight": flags.max_in_flight,
        "seed": flags.seed,
        "schedule_seed": flags.schedule_seed,
        "salt": flags.salt,
    }
    changes |= {field: value for field, value in scalars.items() if value is not None}
    if isinstance(workload.requests, Synthetic) and workload.requests.cache is not None and workload.salt is None:
        changes.setdefault("salt", seeds.FRESH)  # a server must not know the prompts from an earlier run
    if flags.salt is not None and isinstance(workload.requests, FromFile):
        problem = "a salt changes generated prompts; those of a file are sent as they stand"
        faults.append(UserError("conflict", problem, f"--salt {flags.salt}", "leave the flag out"))
    return workload.model_copy(update=changes)


def placed(workload: Workload, place: str) -> Workload:
    """The workload for one run among several of the same seed: its salt is that of the place (`c8`, `r2`).

    So no run sends the prompts of another one, which a server's prefix cache would remember. Without a seed every run
    draws its own, and nothing changes.
    """
    if workload.seed is None:
        return workload
    return workload.model_copy(update={"salt": seeds.salt_at(workload.seed, workload.salt, place)})


def _requests(
    requests: Synthetic | FromFile | FromTrace | Task | Mix, flags: Overrides, faults: list[Fault]
) -> Synthetic | FromFile | FromTrace | Task | Mix:
    changes: dict[str, Any] = {}
    if isinstance(requests, FromTrace):
        requests = requests.model_copy(update=_of_trace(flags))
    if isinstance(requests, FromTrace | Task | Mix):
        owner = {FromTrace: "trace", Task: "steps", Mix: "classes"}[type(requests)]
        for name, tokens in (("input", flags.input_tokens), ("output", flags.output_tokens)):
            if tokens is not None:
                problem = f"the lengths are those of the {owner}"
                faults.append(UserError("conflict", problem, f"--{name}-tokens {tokens}", "leave the flag out"))
        return requests
    if flags.input_tokens is not None:
        if isinstance(requests, FromFile):
            problem = "the prompts come from a file: their length is what it is"
            faults.append(UserError("conflict", problem, f"--input-tokens {flags.input_tokens}", "leave the flag out"))
        changes["input_tokens"] = Fixed[OneTokenOrMore](value=flags.input_tokens)
    if flags.output_tokens is not None:
        changes["output_tokens"] = Fixed[OneTokenOrMore](value=flags.output_tokens)
    return requests.model_copy(update=changes)


def _of_trace(flags: Overrides) -> dict[str, Any]:
    """What the flags say of a trace, for its requests and for its arrivals."""
    said = {"slice_ns": flags.trace_slice, "on_bad_row": flags.on_bad_row, "replay": flags.trace_replay}
    return {name: value for name, value in said.items() if value is not None}


def _faults_without_a_trace(requests: Any, stages: Sequence[Stage], flags: Overrides) -> list[Fault]:
    arrivals = any(isinstance(stage.arrival, Replay) for stage in stages)
    replays = arrivals or isinstance(requests, FromTrace)
    given = {"speed": flags.trace_speed, "loop": flags.trace_loop} | ({} if replays else _of_trace(flags))
    problem = "the arrivals are not those of a trace" if replays else "no trace is replayed"
    hint = "give --trace FILE, and neither --request-rate nor --concurrency"
    key_of = {"slice_ns": "trace_slice", "replay": "trace_replay", "speed": "trace_speed", "loop": "trace_loop"}
    return [
        UserError("no_effect", problem, f"--set {key_of.get(name, name)}", hint)
        for name, value in given.items()
        if value is not None and not arrivals
    ]


def _merged_slo(slo: Slo | None, flags: Overrides, faults: list[Fault]) -> Slo | None:
    """Merge SLO terms by metric: a term of a flag replaces the term of the file, the other terms stay."""
    if not flags.terms and flags.goodput_share is None:
        return slo
    terms = {term.metric: term for term in slo.terms} if slo else {}
    for name, (ns, quantile) in flags.terms.items():
        file_term = terms.get(name)
        quantile_of_term = quantile or (file_term.quantile if file_term else 0.99)
        terms[name] = Term(metric=name, limit_ns=ns, quantile=quantile_of_term)
    if not terms:
        problem = "a share of good requests, and nothing that says when one is good"
        faults.append(
            UserError("no_slo", problem, f"--slo goodput:{flags.goodput_share}", "add --slo ttft:2s --slo tpot:200ms")
        )
    goodput = flags.goodput_share if flags.goodput_share is not None else slo.goodput_share if slo else None
    return Slo(
        terms=tuple(terms[name] for name in METRICS if name in terms),
        goodput_share=goodput,
        task=slo.task if slo else None,
    )


def _stages(workload: Written, flags: Overrides, faults: list[Fault], file: str, top: Map) -> tuple[Stage, ...]:
    law = _arrival_of_flags(flags, faults)
    if faults and not workload.stages:  # the flags ask for a load but are faulty
        return ()
    if len(workload.stages) > MOST_STAGES:
        spot, path, _ = locate(top, ("stages",))
        hint = f"at most {MOST_STAGES:,}; a load that changes all the time is a trace (--trace)"
        faults.append(
            UserError("too_large", format.counted(len(workload.stages), "stage"), where(file, spot, path), hint)
        )
        return ()
    stages = [_replaying(stage, flags) for stage in _with_names(workload.stages, faults, file, top)]
    if law is not None:
        stages = _replace_measured(law, stages)
    elif flags.burstiness is not None:
        stages = [_with_burstiness(stage, flags.burstiness, faults) for stage in stages]
    if flags.concurrency_ramp is not None and flags.concurrency is None:
        stages = _with_ramp(stages, flags.concurrency_ramp, faults)
    faults.extend(_faults_without_a_trace(workload.requests, stages, flags))
    if flags.duration is not None or flags.num_requests is not None:
        bounds = {"duration_ns": flags.duration, "count": flags.num_requests, "at_least": None}
        stages = [stage.model_copy(update=bounds) if stage.measured else stage for stage in stages]
    if flags.warmup_ns is not None or flags.warmup_count is not None:
        stages = _with_warmup(stages, flags)
    requests = workload.requests
    if isinstance(requests, FromFile | FromTrace) or any(isinstance(s.arrival, Replay) for s in stages):
        if isinstance(requests, FromTrace):
            requests = requests.model_copy(update=_of_trace(flags))
            stages = [_as_the_requests(stage, requests) for stage in stages]
        stages = _with_missing_counts(stages, requests, faults)
    faults.extend(_faults_of_stages(stages, _draws_tasks(requests), file, top))
    return tuple(stages)


def _arrival_of_flags(flags: Overrides, faults: list[Fault]) -> Constant | Poisson | Gamma | Closed | None:
    rate, burstiness, concurrency = flags.request_rate, flags.burstiness, flags.concurrency
    if concurrency is not None and (rate is not None or burstiness is not None):
        other_flag = "--request-rate" if rate is not None else "--set burstiness"
        problem = f"--concurrency is a closed loop, {other_flag} an open one: not both"
        faults.append(
            UserError(
                "conflict", problem, f"--concurrency {concurrency} {other_flag}", "to cap an open loop: --max-in-flight"
            )
        )
        return None
    if concurrency is not None:
        return Closed(concurrency=concurrency, ramp_ns=flags.concurrency_ramp)
    if rate is None:
        return None
    if math.isinf(rate):
        if burstiness is not None:
            problem = "everything at once has no gaps to be bursty"
            faults.append(UserError("conflict", problem, "--request-rate inf --set burstiness", "give a finite rate"))
        return Constant(rate=rate)
    return Poisson(rate=rate) if burstiness in (None, 1.0) else Gamma(rate=rate, burstiness=burstiness or 1.0)


def _replace_measured(law: Constant | Poisson | Gamma | Closed, stages: list[Stage]) -> list[Stage]:
    """Replace the measured stages by one stage with the arrival law `law` and their total length.

    It stands at the position of the first measured stage. Warm-up stages keep their bounds and get the same law,
    because they must create the state that is then measured. An infinite rate is the exception: a duration does not
    bound it, so warm-up stages keep their own law.
    """
    measured = [stage for stage in stages if stage.measured]
    durations = [stage.duration_ns for stage in measured]
    counts = [stage.count for stage in measured]
    load_stage = Stage(
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


def _with_ramp(stages: list[Stage], ramp_ns: int, faults: list[Fault]) -> list[Stage]:
    """Give every closed loop the ramp of the flag; a fault if there is none."""
    if not any(isinstance(stage.arrival, Closed) for stage in stages):
        problem = "only the lanes of a closed loop begin one after the other"
        faults.append(
            UserError("no_effect", problem, place("concurrency_ramp", f"{ramp_ns / 1e9:g}s"), "add --concurrency 8")
        )
    return [
        stage.model_copy(update={"arrival": stage.arrival.model_copy(update={"ramp_ns": ramp_ns})})
        if isinstance(stage.arrival, Closed) else stage
        for stage in stages
    ]  # fmt: skip


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
    return stage.model_copy(update={"arrival": stage.arrival.model_copy(update={"replay": requests.replay})})


def _with_burstiness(stage: Stage, burstiness: float, faults: list[Fault]) -> Stage:
    law = stage.arrival
    if isinstance(law, Poisson | Gamma | Constant) and not math.isinf(law.rate):
        if stage.at_least is None:
            return stage.model_copy(update={"arrival": Gamma(rate=law.rate, burstiness=burstiness)})
        problem = f'stage "{stage.name}" has minimums (at_least), which only Poisson arrivals can meet'
        faults.append(
            UserError("conflict", problem, place("burstiness", f"{burstiness:g}"), "add --duration or --num-requests")
        )
    elif stage.measured:
        problem = f'stage "{stage.name}" has no steady rate to be bursty'
        faults.append(UserError("no_effect", problem, place("burstiness", f"{burstiness:g}"), "add --request-rate"))
    return stage


def _with_warmup(stages: list[Stage], flags: Overrides) -> list[Stage]:
    """Put one warm-up stage of the flag's length before the measured stages and drop the warm-up stages of the file.

    Its law is that of the first measured stage; a ramp becomes Poisson at its first rate, a trace Poisson at its mean
    rate. A length of 0 means no warm-up.
    """
    measured = [stage for stage in stages if stage.measured]
    ns, count = flags.warmup_ns or None, flags.warmup_count or None
    if not measured or (ns is None and count is None):
        return measured
    law = measured[0].arrival
    if isinstance(law, Ramp):
        law = Poisson(rate=law.from_rate)
    if isinstance(law, Replay):
        law = Poisson(rate=min(1e6, _trace_of(law).rate * law.speed))
    return [Stage(name="warm-up", arrival=law, duration_ns=ns, count=count, measured=False), *measured]


def _with_missing_counts(
    stages: list[Stage], requests: Synthetic | FromFile | FromTrace | Task | Mix, faults: list[Fault]
) -> list[Stage]:
    """Set the missing count: the rows of the file for a single measured stage, all of the trace for a replay stage."""
    measured = [stage for stage in stages if stage.measured]
    rows: int | None = None
    with collecting(faults):
        if isinstance(requests, FromTrace):
            rows = len(_starts_of(requests))
        elif isinstance(requests, FromFile):
            rows = _rows_of(requests.path) if any(one.duration_ns is None for one in measured) else None
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
    return [stage if stage.duration_ns or stage.count else stage.model_copy(update={"count": 1}) for stage in stages]


def _rows_of(path: Path) -> int:
    from loadgen.core.workload.dataset import read_rows

    return len(read_rows(path))


def _trace_of(by: FromTrace | Replay) -> Trace:
    from loadgen.core.workload.traces import replayed

    return replayed(by)


def _starts_of(by: FromTrace | Replay) -> Trace | TraceSessions:
    from loadgen.core.workload.trace_sessions import starts_of

    return starts_of(by)


def _with_names(stages: tuple[Stage, ...], faults: list[Fault], file: str, top: Map) -> list[Stage]:
    """Give every stage a unique name: as written, else `warm-up` or `load`, numbered from the second (`load-2`)."""
    used_names: dict[str, int] = {}
    for index, stage in enumerate(stages):
        if stage.name and stage.name in used_names:
            spot, path, _ = locate(top, ("stages", index, "name"))
            problem = f'two stages are called "{stage.name}"'
            faults.append(
                UserError(
                    "duplicate", problem, where(file, spot, path), "rows refer to stages by name: give each its own"
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
    """How many starts of an open loop the timetable holds; 0 for a closed loop, which is planned as it goes."""
    law = stage.arrival
    if isinstance(law, Closed):
        return 0
    if stage.count is None and isinstance(law, Replay):
        trace, starts = _trace_of(law), len(_starts_of(law))
        return min(starts * law.loop, trace.rate * law.speed * (stage.duration_ns or 0) / 1e9 + starts)
    if stage.count is not None or stage.duration_ns is None:
        return stage.count or 0
    assert not isinstance(law, Replay)
    rate = (law.from_rate + law.to_rate) / 2 if isinstance(law, Ramp) else law.rate
    return rate * stage.duration_ns / 1e9 if math.isfinite(rate) else 0


def _draws_tasks(requests: Any) -> bool:
    of_classes = parts(requests).values()
    return any(isinstance(part, Task) or getattr(part, "replay", "") == "sessions" for part in of_classes)


def _faults_of_stages(stages: list[Stage], of_tasks: bool, file: str, top: Map) -> list[Fault]:
    """The faults of stages that are no load, never end, or end before all lanes have started."""
    if not any(stage.measured for stage in stages):
        if not stages:
            problem = "no load: no stages in the file, and no flag gives one"
            return [UserError("no_load", problem, file, _LOAD_HINT)]
        spot, path, _ = locate(top, ("stages",))
        return [UserError("no_load", "no load: no stage is measured", where(file, spot, path), _LOAD_HINT)]
    planned = sum(map(_planned_starts, stages))
    if of_tasks and (tasks := sum(max(stage.count or 0, _planned_starts(stage)) for stage in stages)) > MOST_TASKS:
        problem = f"{tasks:,.0f} tasks to draw before the start, at most {MOST_TASKS:,}"
        hint = "a lower count, or a closed loop with a duration alone, which draws as it goes"
        return [UserError("too_large", problem, file, hint)]
    if planned > MOST_PLANNED:
        problem = f"{planned:,.0f} requests to plan: their instants alone take {planned * 8 / 1e9:,.1f} GB"
        hint = (
            f"a lower rate or a shorter duration (at most {MOST_PLANNED:,}); a closed loop (--concurrency) plans none"
        )
        return [UserError("too_large", problem, file, hint)]
    faults: list[Fault] = []
    index_of_name = {stage.get("name"): index for index, stage in enumerate(top.get("stages") or ())}
    for number, stage in enumerate(stages):
        spot, path, _ = locate(top, ("stages", index_of_name.get(stage.name, number)))
        at_once = isinstance(stage.arrival, Constant) and math.isinf(stage.arrival.rate)
        if at_once and stage.count is None:
            problem = f'stage "{stage.name}" sends everything at once, and does not say how many'
            faults.append(
                UserError(
                    "endless", problem, where(file, spot, path), "give --num-requests 200 (--warmup 20req), or count:"
                )
            )
        elif stage.duration_ns is None and stage.count is None and stage.at_least is None:
            problem = f'stage "{stage.name}" never ends: it has neither duration nor count'
            faults.append(UserError("endless", problem, where(file, spot, path), _BOUND_HINT))
        elif isinstance(law := stage.arrival, Closed) and stage.duration_ns and (law.ramp_ns or 0) >= stage.duration_ns:
            problem = f'stage "{stage.name}" ends after {stage.duration_ns / 1e9:g} s, before all its lanes have begun'
            hint = f"a ramp (--set concurrency_ramp) of less than that; it is {(law.ramp_ns or 0) / 1e9:g} s"
            faults.append(UserError("out_of_range", problem, where(file, spot, path), hint))
    return faults
