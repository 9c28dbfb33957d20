"""The workload: what is sent, when, and what was promised. Every check that a workload file can fail lives here.

Pure after reading: `load` reads the file (and the files it names), everything else is values. Nothing is drawn here, no
prompt is made and no clock is looked at. What the words mean is in docs/workloads.md; units and YAML have rooms of
their own (`units`, `yamlpos`, `written`), flags are read by `overrides`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Strict, Tag, ValidationError, ValidationInfo

from loadgen import units
from loadgen.errors import Fault, Faults, UserError
from loadgen.overrides import METRIC_ALIASES, METRICS, Flags, Overrides, parse
from loadgen.written import (
    NOTHING_FITS,
    Amount,
    Duration,
    Empirical,
    Fixed,
    LogNormal,
    Normal,
    Part,
    Positive,
    Quantile,
    Rate,
    Seed,
    Share,
    Source,
    Tagged,
    Tokens,
    Uniform,
    Whole,
    choice,
    meant,
)
from loadgen.yamlpos import Map, Seq, Spot, child, read, where

__all__ = [
    "Arrival",
    "Closed",
    "Constant",
    "Delay",
    "Empirical",
    "Fixed",
    "FromFile",
    "Gamma",
    "Length",
    "Limits",
    "LogNormal",
    "Normal",
    "Overrides",
    "Poisson",
    "Ramp",
    "Slo",
    "Stage",
    "Synthetic",
    "Term",
    "Turns",
    "Uniform",
    "Workload",
    "json_schema",
    "load",
    "packaged",
    "recipe_fingerprint",
]

# Validity limits of metrics.md: beyond one of them a run is INVALID.
SEND_LAG_SHARE = 0.05  # p99 send lag, of TTFT p50
STAMP_ERROR_SHARE = 0.05  # p99 stamp error, of TTFT p50
CPU_SHARE = 0.90  # of one core, of a worker, over any full second of the measured window
FAILURE_SHARE = 0.01  # failed + lost, of all that were to be sent

GRACE_NS = 30 * units.NS_PER_S  # three times a 1,000-token answer at 10 ms a token
TIMEOUT_NS = 600 * units.NS_PER_S  # the openai client's own default
STALL_TIMEOUT_NS = 120 * units.NS_PER_S  # longest silence inside a stream; a cold prefill of a long prompt takes a minute

# ------------------------------------------------------------------------------------------------- lengths and delays

OneTokenOrMore = Annotated[Tokens, Field(ge=1)]
_SPREADS: dict[str, type[Tagged]] = {
    "fixed": Fixed,
    "uniform": Uniform,
    "normal": Normal,
    "lognormal": LogNormal,
    "empirical": Empirical,
}

Length = Annotated[
    Annotated[Fixed[OneTokenOrMore], Tag("fixed")]
    | Annotated[Uniform[OneTokenOrMore], Tag("uniform")]
    | Annotated[Normal[OneTokenOrMore, Amount], Tag("normal")]
    | Annotated[LogNormal[OneTokenOrMore, Amount], Tag("lognormal")]
    | Annotated[Empirical[OneTokenOrMore], Tag("empirical")],
    choice("length", _SPREADS, bare=(int, float)),
]
"""How many tokens: at least one. A bare int in YAML is `Fixed`."""

Delay = Annotated[
    Annotated[Fixed[Duration], Tag("fixed")]
    | Annotated[Uniform[Duration], Tag("uniform")]
    | Annotated[Normal[Duration, Duration], Tag("normal")]
    | Annotated[LogNormal[Duration, Duration], Tag("lognormal")]
    | Annotated[Empirical[Duration], Tag("empirical")],
    choice("delay", _SPREADS, bare=(int, float, str)),
]
"""How long, in ns: the same shapes in durations."""

# ----------------------------------------------------------------------------------------------------------- requests


class Turns(Part):
    """Conversations: `count` requests each, every one re-sending what was said before it."""

    count: Annotated[int, Strict(), Field(ge=1, le=10_000)]
    tool_result_tokens: Length  # what each later turn adds: a tool's result, or the user's next message
    tool_time: Delay = Fixed[Duration](value=0)  # from the end of a turn to the start of the next
    history: Literal["scripted", "server"] = "scripted"  # assistant's turns: made from the seed, or the real replies


class Synthetic(Part):
    """Prompts made of exactly so many tokens."""

    synonyms = {
        "isl": "input_tokens",
        "osl": "output_tokens",
        "input": "input_tokens",
        "output": "output_tokens",
        "prompt_tokens": "input_tokens",
        "max_tokens": "output_tokens",
        "random_input_len": "input_tokens",
        "random_output_len": "output_tokens",
    }
    input_tokens: Length  # content of the (first) prompt, shared prefix included
    output_tokens: Length  # of each answer
    shared_prefix_tokens: Tokens = 0  # the first so many of them are the same within a prefix group
    prefixes: Whole = 1  # how many such groups
    system_tokens: Tokens = 0  # a system message of so many tokens, the same for all, beside the prompt
    turns: Turns | None = None


class FromFile(Part):
    """The user's own prompts or messages, one JSON object per line (read by `prompts`)."""

    synonyms = {"path": "from", "file": "from"}
    path: Annotated[Path, BeforeValidator(lambda value, info: _existing(value, info))] = Field(alias="from")
    output_tokens: Length | None = None  # where the row itself does not say
    order: Literal["sequential", "shuffled"] = "sequential"


def _existing(value: Any, info: ValidationInfo) -> Any:
    """The path relative to the workload file, which must be a readable file."""
    if not isinstance(info.context, Source):
        return value
    if not isinstance(value, str) or not value:
        raise units.Wrong("is not the name of a file", "requests: {from: prompts.jsonl}")
    path = info.context.folder / value
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise units.Wrong(what, f"a JSONL file, named relative to the folder of the workload ({info.context.folder})")
    return path


def _which_requests(value: Any) -> str:
    keys = set(value) if isinstance(value, dict) else set()
    return "FromFile" if isinstance(value, FromFile) or keys & {"from", "order"} else "Synthetic"


# ------------------------------------------------------------------------------------------------------------ arrival


class Constant(Tagged):
    """Evenly, `rate` per second. An infinite rate is everything at once: every request due at the stage's start."""

    tag = "constant"
    short = "rate"
    rate: Rate


class Poisson(Tagged):
    """Independent arrivals, `rate` per second: exponential gaps, drawn as MLPerf LoadGen draws them."""

    tag = "poisson"
    short = "rate"
    rate: Annotated[Rate, Field(allow_inf_nan=False)]


class Gamma(Tagged):
    """Gamma gaps of shape `burstiness`: below 1 burstier than Poisson, above 1 more even."""

    tag = "gamma"
    rate: Annotated[Rate, Field(allow_inf_nan=False)]
    burstiness: Positive


class Ramp(Tagged):
    """Poisson whose rate goes linearly from one to the other over the stage's duration."""

    tag = "ramp"
    from_rate: Annotated[Rate, Field(allow_inf_nan=False)] = Field(alias="from")
    to_rate: Annotated[Rate, Field(allow_inf_nan=False)] = Field(alias="to")


class Closed(Tagged):
    """`concurrency` lanes, each sending its next request when its last one is done."""

    tag = "closed"
    short = "concurrency"
    concurrency: Annotated[int, Strict(), Field(ge=1, le=1_000_000)]


_LAWS: dict[str, type[Tagged]] = {
    "constant": Constant,
    "poisson": Poisson,
    "gamma": Gamma,
    "ramp": Ramp,
    "closed": Closed,
}
Arrival = Annotated[
    Annotated[Constant, Tag("constant")]
    | Annotated[Poisson, Tag("poisson")]
    | Annotated[Gamma, Tag("gamma")]
    | Annotated[Ramp, Tag("ramp")]
    | Annotated[Closed, Tag("closed")],
    choice("arrival", _LAWS),
]


class Stage(Part):
    """A part of the run with one arrival law. It ends at `duration_ns` or after `count` requests (conversations, where
    there are turns), whichever comes first; at least one of them is set once a workload is loaded."""

    synonyms = {
        "rate": "arrival",
        "request_rate": "arrival",
        "concurrency": "arrival",
        "num_requests": "count",
        "requests": "count",
        "time": "duration",
    }
    name: str = ""
    arrival: Arrival
    duration_ns: Annotated[Duration, Field(gt=0)] | None = Field(None, alias="duration")
    count: Whole | None = None
    measured: Annotated[bool, Strict()] = True

    @classmethod
    def keys(cls) -> list[str]:
        return [*super().keys(), "warmup"]

    @classmethod
    def unwrap(cls, data: Any) -> Any:
        """`warmup: true` is another way to write `measured: false`."""
        if not isinstance(data, Map) or "warmup" not in data:
            return data
        if "measured" in data:
            raise units.Wrong("says both measured and warmup", "keep one: warmup: true is measured: false")
        stage = Map(data.at)
        stage.path, stage.keys_at, stage.values_at = data.path, data.keys_at, data.values_at
        stage.update(data)
        warmup = stage.pop("warmup")
        stage["measured"] = not warmup if isinstance(warmup, bool) else warmup
        return stage

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        reference: dict[str, Any] = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        schema["properties"]["warmup"] = {"type": "boolean", "description": "true: the same as measured: false"}
        schema["not"] = {"required": ["measured", "warmup"]}
        return reference


# ---------------------------------------------------------------------------------------------------------------- slo


class Term(Part):
    """`metric` is at most `limit_ns` at `quantile` (0.99 is p99)."""

    metric: str
    limit_ns: int
    quantile: float = 0.99


class Slo(Part):
    """What was promised: every term at its own quantile and, if asked for, the share of requests that meet them all."""

    terms: tuple[Term, ...] = ()
    goodput_share: float | None = None


class WrittenTerm(Part):
    """`2s`, or `{limit: 2s, at: p95}`."""

    limit_ns: Annotated[Duration, Field(gt=0)] = Field(alias="limit")
    quantile: Quantile | None = Field(None, alias="at")

    @classmethod
    def unwrap(cls, data: Any) -> Any:
        return data if isinstance(data, dict) else {"limit": data}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        reference: dict[str, Any] = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        body = dict(schema)
        schema.clear()
        schema["anyOf"] = [body["properties"]["limit"], body]
        return reference


class WrittenSlo(Part):
    """The terms as they are written, one key each."""

    synonyms = METRIC_ALIASES
    ttft: WrittenTerm | None = None
    ttft_from_sent: WrittenTerm | None = None
    first_answer: WrittenTerm | None = None
    tpot: WrittenTerm | None = None
    e2e: WrittenTerm | None = None
    at: Quantile = 0.99
    goodput: Share | None = None

    @classmethod
    def unwrap(cls, data: Any) -> Any:
        if not isinstance(data, Map) or not METRIC_ALIASES.keys() & data.keys():
            return data
        slo = Map(data.at)
        slo.path = data.path
        for key, value in data.items():
            name = METRIC_ALIASES.get(key, key)
            if name in slo:
                raise units.Wrong(f"has {name} twice", f"{key} is another name of {name}")
            slo[name] = value
            slo.keys_at[name], slo.values_at[name] = data.keys_at[key], data.values_at[key]
        return slo

    def checked(self) -> Slo:
        written = [(name, getattr(self, name)) for name in METRICS]
        terms = [
            Term(metric=name, limit_ns=term.limit_ns, quantile=term.quantile or self.at) for name, term in written if term
        ]
        if not terms:
            raise units.Wrong("has no term", "slo: {ttft: 2s, tpot: 200ms, at: p99}")
        return Slo(terms=tuple(terms), goodput_share=self.goodput)


def _slo(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(info.context, Source) or value is None:
        return value
    return WrittenSlo.model_validate(value, context=info.context).checked()


class _SloSchema:
    """For the JSON Schema: an SLO is written as `WrittenSlo` says."""

    @staticmethod
    def __get_pydantic_json_schema__(core_schema: Any, handler: Any) -> Any:
        return handler(WrittenSlo.__pydantic_core_schema__)


class Limits(Part):
    """The limits of the verdict (metrics.md), as shares."""

    send_lag_share: Share = SEND_LAG_SHARE
    stamp_error_share: Share = STAMP_ERROR_SHARE
    cpu_share: Share = CPU_SHARE
    failure_share: Share = FAILURE_SHARE


# ----------------------------------------------------------------------------------------------------------- workload


class Written(Part):
    """All that a workload file may say."""

    synonyms = {"stage": "stages", "load": "stages", "data": "requests", "dataset": "requests", "slos": "slo"}
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str = ""
    requests: Annotated[
        Annotated[Synthetic, Tag("Synthetic")] | Annotated[FromFile, Tag("FromFile")],
        Discriminator(_which_requests),
    ]
    stages: tuple[Stage, ...] = ()
    slo: Annotated[Slo | None, BeforeValidator(_slo), _SloSchema()] = None
    grace_ns: Duration = Field(GRACE_NS, alias="grace")
    timeout_ns: Annotated[Duration, Field(gt=0)] = Field(TIMEOUT_NS, alias="timeout")
    stall_timeout_ns: Annotated[Duration, Field(gt=0)] = Field(STALL_TIMEOUT_NS, alias="stall_timeout")
    max_in_flight: Whole | None = None
    seed: Seed | None = None
    schedule_seed: Seed | None = None
    limits: Limits = Limits()


class Workload(Written):
    """A checked workload. Durations are integer ns, rates floats per second; `seed` None: draw a fresh one."""

    source_text: str = ""  # the file as written, variables unexpanded


# --------------------------------------------------------------------------------------------------------------- load

_LOAD_HINT = "give --request-rate 10 (open loop) or --concurrency 8 (closed loop), or write stages into the file"
_BOUND_HINT = "give --duration 30s or --num-requests 200, or write duration: or count: into the stage"
_SUFFIXES = (".yaml", ".yml")


def load(path_or_name: str, overrides: Overrides | None = None, env: Mapping[str, str] = os.environ) -> Workload:
    """The checked workload of a YAML file, or of a packaged workload's bare name (`rag`), changed by the flags.

    Raises `Faults` with everything that is wrong in the file and the flags, in the order of the file's lines.
    """
    flags, faults = parse(overrides or Overrides())
    file = _find(path_or_name)
    text = _text(file, path_or_name)
    label = path_or_name if file == Path(path_or_name) else str(file)
    top, found = read(text, label, env)
    source = Source(file=label, folder=file.parent, faults=found)
    try:
        written = Written.model_validate(top, context=source)
    except ValidationError as error:
        source.faults.extend(_fault(item, top, label) for item in error.errors(include_url=False))
        raise Faults(_in_order(source.faults) + faults) from None
    values = {name: getattr(written, name) for name in Written.model_fields}
    workload = Workload.model_construct(**values, source_text=text)
    workload = _apply(workload, flags, source.faults, label, top)
    if source.faults or faults:
        raise Faults(_in_order(source.faults) + faults)
    return workload


def packaged() -> dict[str, Path]:
    """The shipped workloads by their bare names."""
    inside = Path(__file__).parent / "workloads"  # in a wheel; in a checkout the folder beside the package
    folder = inside if inside.is_dir() else Path(__file__).parent.parent / "workloads"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _find(path_or_name: str) -> Path:
    path = Path(path_or_name)
    known = packaged()
    if path.is_file() or path_or_name not in known:
        return path
    return known[path_or_name]


def _text(file: Path, as_given: str) -> str:
    try:
        data = file.read_bytes() if file.stat().st_size <= 4 << 20 else None
    except OSError as error:
        what = "no such workload" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        beside = [str(other) for suffix in _SUFFIXES for other in file.parent.glob(f"*{suffix}")]
        hint = meant(as_given, [*packaged(), *beside])
        raise Faults([UserError(what, as_given, f"{hint}; or the path of a YAML file")]) from None
    if data is None:
        raise Faults([UserError("more than 4 MiB: not a workload", as_given, "prompts belong into a JSONL file: requests: {from: ...}")])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Faults([UserError("not a text file (UTF-8)", f"{as_given}:{line}", "a workload is plain text in YAML")]) from None
    return text


def _in_order(faults: list[Fault]) -> list[Fault]:
    """By line and column, and one per place: an unset variable makes its value wrong as well, which is no news."""
    by_place: dict[str, Fault] = {}
    for fault in faults:
        by_place.setdefault(fault.where if fault.where else str(len(by_place)), fault)

    def place(fault: Fault) -> tuple[int, int]:
        line, _, rest = fault.where.partition(" (")[0].rpartition(":")[0].rpartition(":")[2], "", fault.where.partition(" (")[0].rpartition(":")[2]
        return (int(line), int(rest)) if line.isdecimal() and rest.isdecimal() else (0, 0)

    return sorted(by_place.values(), key=place)


_KINDS = {
    "model_type": ("must be a mapping (key: value)", ""),
    "model_attributes_type": ("must be a mapping (key: value)", ""),
    "tuple_type": ("must be a list", "start each item with a dash"),
    "int_type": ("must be a whole number", "without quotes and unit"),
    "float_type": ("must be a number", "without quotes and unit"),
    "finite_number": ("must be finite", "only constant may be inf: everything at once"),
    "bool_type": ("must be true or false", ""),
    "string_type": ("must be text", "put it in quotes"),
    "string_too_short": ("must not be empty", ""),
    "too_short": ("must not be empty", ""),
}


def _fault(error: Any, top: Map, file: str) -> Fault:
    """One error of pydantic in our words: what was written, where, what is allowed."""
    kind, loc, context = error["type"], error["loc"], error.get("ctx", {})
    spot, path, holder = _locate(top, loc)
    shown = f'"{spot.text}" ' if spot.text else f"{path} " if path else ""
    if kind == "missing":
        return UserError(f'missing "{loc[-1]}"', where(file, spot, path), _example(str(loc[-1])))
    if kind == NOTHING_FITS:
        noun, _, choices = error["msg"].partition(": ")
        known = choices.split(", ")
        if isinstance(holder, Map) and holder:
            word = next(iter(holder))
            what, at = f'unknown {noun} "{word}"', where(file, holder.keys_at[word], path)
            return UserError(what, at, meant(word, known))
        return UserError(f"{shown}is not {'an' if noun[0] in 'aeiou' else 'a'} {noun}", where(file, spot, path), _example(noun, known))
    if kind == "value_error" and isinstance(context.get("error"), units.Wrong):
        wrong = context["error"]
        return UserError(f"{shown}{wrong}", where(file, spot, path), wrong.hint)
    if kind == "literal_error":
        known = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        return UserError(f"{shown}is not known here", where(file, spot, path), meant(spot.text, known))
    predicate, hint = _KINDS.get(kind, ("", ""))
    if not predicate:
        message = error["msg"]
        predicate = message.replace("Input should", "should").replace("String should", "should")
    return UserError(f"{shown}{predicate}", where(file, spot, path), hint)


def _example(key: str, known: list[str] | None = None) -> str:
    examples = {
        "name": "name: anything",
        "requests": "requests: {input_tokens: 150, output_tokens: 200}, or {from: prompts.jsonl}",
        "input_tokens": "input_tokens: 150",
        "output_tokens": "output_tokens: 200",
        "arrival": "arrival: {poisson: 10/s} or {closed: 8}",
        "length": "150, or {uniform: {min: 100, max: 200}}",
        "delay": "2s, or {uniform: {min: 1s, max: 3s}}",
        "from": "{ramp: {from: 1/s, to: 10/s}}",
        "to": "{ramp: {from: 1/s, to: 10/s}}",
        "burstiness": "{gamma: {rate: 10/s, burstiness: 0.5}}",
        "stddev": "{normal: {mean: 300, stddev: 50}}",
        "sigma": "{lognormal: {median: 300, sigma: 0.8}}",
    }
    example = f"like {examples[key]}" if key in examples else ""
    return f"{example}; known: {', '.join(known)}" if known else example


def _locate(top: Map, loc: tuple[str | int, ...]) -> tuple[Spot, str, Any]:
    """Where pydantic's `loc` stands in the file: the deepest value on its way, that value's path, and the value.

    Steps that are no keys are passed over: tags of unions, and fields that the short form leaves out.
    """
    spot, path, value = top.at, "", top
    holder: Any = value
    for step in loc:
        if isinstance(holder, Map) and isinstance(step, str):
            aliases = [key for key in holder if key == step or METRIC_ALIASES.get(key) == step or (key, step) == ("warmup", "measured")]
            if not aliases:
                continue
            spot, path, holder = holder.values_at[aliases[0]], child(path, aliases[0]), holder[aliases[0]]
        elif isinstance(holder, Seq) and isinstance(step, int) and step < len(holder):
            spot, path, holder = holder.values_at[step], child(path, step), holder[step]
    return spot, path, holder


# --------------------------------------------------------------------------------------------------------- the flags


def _apply(workload: Workload, flags: Flags, faults: list[Fault], file: str, top: Map) -> Workload:
    """The workload as the flags change it; what cannot be, they say, goes to `faults`. The rules: docs/workloads.md."""
    changed: dict[str, Any] = {
        "requests": _requests(workload.requests, flags, faults),
        "stages": _stages(workload, flags, faults, file, top),
        "slo": _promises(workload.slo, flags, faults),
        "limits": workload.limits.model_copy(update=dict(flags.limits)),
    }
    for field, value in (
        ("grace_ns", flags.grace),
        ("timeout_ns", flags.timeout),
        ("stall_timeout_ns", flags.stall_timeout),
        ("max_in_flight", flags.max_in_flight),
        ("seed", flags.seed),
        ("schedule_seed", flags.schedule_seed),
    ):
        if value is not None:
            changed[field] = value
    return workload.model_copy(update=changed)


def _requests(requests: Synthetic | FromFile, flags: Flags, faults: list[Fault]) -> Synthetic | FromFile:
    changed: dict[str, Any] = {}
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
    stages = _named(workload.stages, faults, file, top)
    if law is not None:
        stages = _under(law, stages)
    elif flags.burstiness is not None:
        stages = [_burstier(stage, flags.burstiness, faults) for stage in stages]
    if flags.duration is not None or flags.num_requests is not None:
        bounds = {"duration_ns": flags.duration, "count": flags.num_requests}
        stages = [stage.model_copy(update=bounds) if stage.measured else stage for stage in stages]
    if flags.warmup_ns is not None or flags.warmup_count is not None:
        stages = _warmed(stages, flags)
    if isinstance(workload.requests, FromFile):
        stages = _once_through(stages, workload.requests)
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
        return Closed(concurrency=lanes)
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
    )
    calm = not (isinstance(law, Constant) and math.isinf(law.rate))
    result: list[Stage] = []
    for stage in stages:
        if not stage.measured:
            result.append(stage.model_copy(update={"arrival": law}) if calm else stage)
        elif stage is measured[0]:
            result.append(one)
    return result if measured else [*result, one]


def _burstier(stage: Stage, burstiness: float, faults: list[Fault]) -> Stage:
    law = stage.arrival
    if isinstance(law, Poisson | Gamma | Constant) and not math.isinf(law.rate):
        return stage.model_copy(update={"arrival": Gamma(rate=law.rate, burstiness=burstiness)})
    if stage.measured:
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
    return [Stage(name="warm-up", arrival=law, duration_ns=ns, count=count, measured=False), *measured]


def _once_through(stages: list[Stage], requests: FromFile) -> list[Stage]:
    """A single measured stage without bounds sends each row of its JSONL file once."""
    measured = [stage for stage in stages if stage.measured]
    if len(measured) != 1 or measured[0].duration_ns or measured[0].count:
        return stages
    with requests.path.open("rb") as lines:
        rows = sum(1 for line in lines if line.strip())
    return [stage.model_copy(update={"count": rows or None}) if stage.measured else stage for stage in stages]


def _named(stages: tuple[Stage, ...], faults: list[Fault], file: str, top: Map) -> list[Stage]:
    """Every stage with a name of its own: as written, else `warm-up`, `load`, and `load-2` where there are more."""
    taken: dict[str, int] = {}
    for index, stage in enumerate(stages):
        if stage.name and stage.name in taken:
            spot, path, _ = _locate(top, ("stages", index, "name"))
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
        spot, path, _ = _locate(top, ("stages",))
        return [UserError("no load: no stage is measured", where(file, spot, path), _LOAD_HINT)]
    faults: list[Fault] = []
    written = {stage.get("name"): index for index, stage in enumerate(top.get("stages") or ())}
    for number, stage in enumerate(stages):
        spot, path, _ = _locate(top, ("stages", written.get(stage.name, number)))
        at_once = isinstance(stage.arrival, Constant) and math.isinf(stage.arrival.rate)
        if at_once and stage.count is None:
            what = f'stage "{stage.name}" sends everything at once, and does not say how many'
            faults.append(UserError(what, where(file, spot, path), "give --num-requests 200 (--warmup 20req), or count:"))
        elif stage.duration_ns is None and stage.count is None:
            what = f'stage "{stage.name}" never ends: it has neither duration nor count'
            faults.append(UserError(what, where(file, spot, path), _BOUND_HINT))
    return faults


# --------------------------------------------------------------------------------------------- fingerprint and schema


def recipe_fingerprint(workload: Workload, count_source: str) -> str:
    """16 hex digits: equal exactly when two workloads ask for the same load, promise and counting (metrics.md).

    Of the checked workload, so `30s` and `0.5m` are equal; without seeds, names, description and text. `count_source`
    is the tag of the counts that results rest on (server, tokenizer, estimate, events). User's prompts count by the
    bytes of their file, which is read here, not by its name.
    """
    unlike = {"name", "description", "seed", "schedule_seed", "source_text"}
    recipe = workload.model_dump(mode="json", exclude=unlike)
    for stage in recipe["stages"]:
        del stage["name"]
    for stage, law in zip(recipe["stages"], workload.stages, strict=True):
        stage["law"] = law.arrival.tag
    if isinstance(workload.requests, FromFile):
        with workload.requests.path.open("rb") as file:
            recipe["requests"]["path"] = hashlib.file_digest(file, "sha256").hexdigest()
    recipe["count_source"] = count_source
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def json_schema() -> dict[str, Any]:
    """The JSON Schema of what a workload file may say, for editors: written units as patterns."""
    schema = Written.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "loadgen workload"}
