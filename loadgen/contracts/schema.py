"""The contract file: its terms, levels and types, parsed from YAML and validated. All faults are reported at once.

`lint.py` finds contradictions and terms that no run could show; `verdict.py` judges what runs have shown. The keywords
of the file are documented in docs/validate.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union

from msgspec import Struct
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    Strict,
    TypeAdapter,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)

from loadgen.core import format
from loadgen.core.errors import CombinedError, LoadgenError, UserError
from loadgen.core.slo import Slo
from loadgen.core.stats.quantiles import name as percentile
from loadgen.core.units import Wrong
from loadgen.core.workload import Workload
from loadgen.core.workload.diagnostics import sort_errors, validate_document
from loadgen.core.workload.fields import Duration, FiniteRate, Quantile, Share, Whole
from loadgen.core.workload.file_models import FileContext, Part, Tagged, TaggedUnion
from loadgen.core.workload.loading import packaged_files, read_yaml_text
from loadgen.core.workload.slo_fields import SloField
from loadgen.core.workload.stages import Concurrency
from loadgen.core.workload.yaml_marks import Map, read_yaml
from loadgen.figures import FIGURES, pooled_figures
from loadgen.repeated.capacity import HORIZON_S

OfAnswers = Literal["rouge1", "rouge2", "rougeL", "exact", "choice", "json"]
_EXAMPLE = "the smallest contract: name, and levels: [{name: load, workload: qa, rate: 10/s, requests: 700, must: [...]}]"

# --------------------------------------------------------------------------------------------------------------- terms


class Promise(NamedTuple):
    """One promise: its keyword, and the parameters that this keyword takes."""

    kind: str
    limit: Any  # ns, a share, a rate per second, or an amount of money: as KINDS says
    quantile: float = 0.0  # 0.99 is p99; 0: the keyword takes none
    of: str = ""  # the latency that is compared, or what an energy is for: token, request
    window_ns: int = 0
    level: str = ""
    currency: str = ""
    class_name: str = ""  # of the requests or prompts that the term is about; "": all

    @property
    def at(self) -> str:
        """The percentile in words: p99.9."""
        return percentile(self.quantile).replace("_", ".")

    @property
    def unit(self) -> str:
        return self.currency or kind_of(self.kind).limit.unit

    @property
    def limit_in_unit(self) -> float:
        return kind_of(self.kind).limit.in_unit(self.limit)

    @property
    def is_at_most(self) -> bool:
        return kind_of(self.kind).limit.at_most


class Limit(NamedTuple):
    """A kind of limit: its key in the file, its type, how it is compared, and how it is written."""

    key: str
    type: Any
    at_most: bool
    unit: str
    in_unit: Callable[[Any], float]
    words: Callable[[Any], str]


class Kind(NamedTuple):
    """What a keyword means: its limit, its words, the default of `at`, and what it takes and needs beside them."""

    limit: Limit
    words: str
    at: float | None = None
    takes: tuple[str, ...] = ()
    needs: tuple[
        str, ...
    ] = ()  # slo, task_slo, gpus, prices, level, tenants; of answers: reference, choice, json, against

    @property
    def short(self) -> str | None:
        """The key that may stand alone: `ttft: 2s`."""
        return None if self.takes else self.limit.key


def _above_zero(value: float) -> float:
    if value == 0:
        raise Wrong(
            "out_of_range",
            "can be shown by no sample, however large",
            "allow a small share, like 0.1%",
        )
    return value


def _between_zero_and_one(value: float) -> float:
    if value == 1:
        raise Wrong(
            "out_of_range",
            "can be shown by no sample, however large",
            "ask for a little less, like 99.9%",
        )
    if value == 0:
        raise Wrong("out_of_range", "promises nothing", "a share above zero, like 99%")
    return value


def _amount_and_currency(value: Any) -> Any:
    match = re.fullmatch(
        r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([A-Z]{3})",
        value.strip() if isinstance(value, str) else "",
    )
    if match is None or not Decimal(match[1]):
        raise Wrong(
            "invalid_value",
            "is not an amount of money",
            "a number above zero and a currency, like 0.45 USD",
        )
    return Decimal(match[1]), match[2]


def _times(value: Any) -> Any:
    match = re.fullmatch(
        r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?x", value.strip() if isinstance(value, str) else ""
    )
    if match is None or float(match[1]) < 1:
        raise Wrong(
            "invalid_value",
            "is not how many times as long",
            "a number of at least 1 and x, like 1.5x",
        )
    return float(match[1])


def _joules(value: Any) -> Any:
    match = re.fullmatch(
        r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?J/(token|request)",
        value.strip() if isinstance(value, str) else "",
    )
    if match is None or not float(match[1]):
        raise Wrong(
            "invalid_value",
            "is not an energy for a piece of work",
            "J for each output token or ok request, like 0.5 J/token",
        )
    return float(match[1]), match[2]


def time_words(ns: float) -> str:
    return format.duration(ns / 1e9) if ns >= 1e9 else f"{format.quantity(ns / 1e6)} ms"


_Time = Annotated[Duration, Field(gt=0)]
_Money = Annotated[tuple[Decimal, str], BeforeValidator(_amount_and_currency)]
_AtMost, _AtLeast = (
    Annotated[Share, AfterValidator(check)] for check in (_above_zero, _between_zero_and_one)
)
_TIME = Limit("limit", _Time, True, "ms", lambda ns: ns / 1e6, time_words)
_WITHIN = Limit("limit", _Time, True, "ms", lambda ns: ns / 1e6, time_words)  # no percentile
_AT_MOST = Limit("limit", _AtMost, True, "%", lambda share: share * 100, format.percent)
_AT_LEAST = Limit("share", _AtLeast, False, "%", lambda share: share * 100, format.percent)
_RATE = Limit("rate", FiniteRate, False, "/s", float, format.quantity)
_TOKENS = Limit("tokens", Whole, False, "tokens", float, format.count)
_MONEY = Limit("limit", _Money, True, "", float, str)
_Times = Annotated[
    float, BeforeValidator(_times), WithJsonSchema({"type": "string", "examples": ["1.5x"]})
]
_TIMES = Limit("limit", _Times, True, "x", float, lambda times: f"{times:g}x")
_ENERGY = Limit(
    "limit",
    Annotated[tuple[float, str], BeforeValidator(_joules)],
    True,
    "J",
    float,
    format.quantity,
)


def latencies(*, foreign: bool = True) -> tuple[str, ...]:
    """The figures of requests that a term may be about, those of other packages behind ours."""
    return tuple(row.name for row in FIGURES.at("contract") if foreign or row in FIGURES.own)


OF_TASKS = {
    "task_time": "e2e",
    "task_wait": "ttft",
    "task_longest_wait": "ttft_from_sent",
    "task_goodput": "goodput",
    "tasks": "requests",
    "good_tasks": "good_requests",
    "task_cost": "cost",
}
"""Term about conversations and tasks as a whole -> what it is of their row (`steady_samples.as_rows`)."""
_NOT_OF_CLASS = {*pooled_figures(), "task_cost"}
"""Times, shares and terms of tasks may be about one class alone, but for these: which part of the machines a class pays
is not known."""

# a time is at most `limit` at a percentile; failed and dropped requests are over every limit
_LATENCY = Kind(_TIME, "{kind} at {at} within {limit}", at=0.99)
KINDS = {
    # share of requests that are not ok (failed, dropped at a cap, lost)
    "errors": Kind(_AT_MOST, "{kind} at most {limit}"),
    # share of requests that meet every limit of the `slo`
    "goodput": Kind(_AT_LEAST, "{kind} at least {limit}", needs=("slo",)),
    # per second, steady (metrics.md): ok requests; good ones; output tokens and all tokens of each GPU
    "requests": Kind(_RATE, "{kind} at least {limit}/s"),
    "good_requests": Kind(_RATE, "{kind} at least {limit}/s", needs=("slo",)),
    "output_per_gpu": Kind(_RATE, "{kind} at least {limit}/s", needs=("gpus",)),
    "tokens_per_gpu": Kind(_RATE, "{kind} at least {limit}/s", needs=("gpus",)),
    # of a thousand good requests, by the contract's `prices`
    "cost": Kind(
        _MONEY,
        "cost per thousand good requests at most {limit} {currency}",
        needs=("slo", "prices"),
    ),
    # of conversations and tasks as a whole: from the first due instant to the last end; all waits for first tokens; the
    # longest of them; the share within the `task` limits of the `slo`; tasks, and good ones, per second, steady
    "task_time": Kind(_TIME, "task time at {at} within {limit}", at=0.99),
    "task_wait": Kind(_TIME, "waits of a task at {at} within {limit}", at=0.99),
    "task_longest_wait": Kind(_TIME, "longest wait of a task at {at} within {limit}", at=0.99),
    "task_goodput": Kind(_AT_LEAST, "tasks within the SLO at least {limit}", needs=("task_slo",)),
    "tasks": Kind(_RATE, "tasks at least {limit}/s"),
    "good_tasks": Kind(_RATE, "tasks within the SLO at least {limit}/s", needs=("task_slo",)),
    "task_cost": Kind(
        _MONEY,
        "cost per thousand good tasks at most {limit} {currency}",
        needs=("task_slo", "prices"),
    ),
    # of each output token, or of each ok request, while the load was steady: measured by what --energy reads
    "energy": Kind(_ENERGY, "energy at most {limit} J/{of}"),
    # the last `window` of the measured load against the first: a latency, and ok requests per second
    "drift": Kind(
        _AT_MOST,
        "{of} at {at} in the last {window} at most {limit} above the first",
        0.99,
        ("window_ns", "of"),
    ),
    "sustained": Kind(
        _AT_LEAST,
        "throughput of the last {window} at least {limit} of the first",
        None,
        ("window_ns",),
    ),
    # a latency of any two nodes, as a share of the smaller
    "between_nodes": Kind(
        _AT_MOST, "{of} at {at} differs between nodes by at most {limit}", 0.5, ("of",)
    ),
    # after each spike, loss and scale-up of the level: the longest time until the SLO held again
    "recovery": Kind(
        _WITHIN,
        "back within the SLO at most {limit} after a spike, loss or scale-up",
        needs=("slo",),
    ),
    # Jain's index over the tenants of the share of their requests within the SLO
    "fairness": Kind(_AT_LEAST, "Jain's index over tenants at least {limit}", needs=("tenants",)),
    # a latency over that at another level: of a quiet tenant beside a noisy one, and alone
    "slowdown": Kind(
        _TIMES, "{of} at {at} at most {limit} that of {level}", 0.5, ("level", "of"), ("level",)
    ),
    # a latency as a share of that at another level: a warm cache against a cold one
    "against": Kind(
        _AT_MOST,
        "{of} at {at} at most {limit} of that of {level}",
        0.5,
        ("level", "of"),
        ("level",),
    ),
}
"""Keyword of a term, beside the figures of requests (`latencies`) -> what it means. `evaluate.FIGURES` computes it."""

_REFERENCE, _AGAINST = (
    Kind(_AT_LEAST, "{kind} at least {limit}", needs=(need,)) for need in ("reference", "against")
)
ANSWER_KINDS = {
    # mean scores against references
    **dict.fromkeys(("rouge1", "rouge2", "rougeL", "exact"), _REFERENCE),
    **{
        name: Kind(_AT_LEAST, "{kind} at least {limit}", needs=(name,))
        for name in ("choice", "json")
    },
    # one of these scores, against that of the other endpoint for the same prompts
    "within": Kind(
        _AT_MOST,
        "{of} at most {limit} below that of the other endpoint",
        None,
        ("of",),
        ("against",),
    ),
    # how alike the answers of the two are
    **dict.fromkeys(("equal", "agreement_share", "similarity"), _AGAINST),
    "agreement": Kind(_TOKENS, "{kind} at least {limit} tokens", needs=("against",)),
}
"""Keyword of a term about answers -> what it means. The names, but for `within`, are those of docs/answers.md."""

SHARES_OF_ANSWERS = ("exact", "choice", "json", "equal")  # each answer is one or not


def kind_of(name: str) -> Kind:
    """What a keyword means: a figure of requests, of another package too, is a time at a percentile."""
    return KINDS.get(name) or ANSWER_KINDS.get(name) or _LATENCY


def is_time(name: str) -> bool:
    """Whether a term is a time at a percentile."""
    return kind_of(name).limit is _TIME


def _may_be_of_class(name: str) -> bool:
    return name in ANSWER_KINDS or (
        name not in _NOT_OF_CLASS
        and (name not in KINDS or name in (*OF_TASKS, "errors", "goodput", "slowdown"))
    )


def words(term: Promise) -> str:
    """A term in words: `ttft at p99 within 2.0 s`."""
    kind = kind_of(term.kind)
    written = {
        "limit": kind.limit.words(term.limit),
        "window": format.duration(term.window_ns / 1e9),
        "at": term.at,
    }
    of_class = f" for class {term.class_name}" if term.class_name else ""
    return kind.words.format(**term._asdict() | written) + of_class


def _model(name: str, kind: Kind, of: Any) -> type[Tagged]:
    """The shape of a term in the file. `of`: the type of what it compares."""
    parts: dict[str, Any] = {
        "of": (of, ...),
        "level": (str, ...),
        "window_ns": (_Time, Field(validation_alias="window")),
        "quantile": (Quantile, Field(kind.at, validation_alias="at")),
        "limit": (kind.limit.type, Field(validation_alias=kind.limit.key)),
    }
    at = () if kind.at is None else ("quantile",)
    order = (*kind.takes, *at, "limit") if kind.takes else ("limit", *at)
    if _may_be_of_class(name):
        parts["class_name"] = (str, Field("", validation_alias="class"))
        order = (*order, "class_name")
    model = create_model(
        name,
        __base__=Tagged,
        __doc__=f"The term `{name}` of a contract.",
        **{part: parts[part] for part in order},
    )
    model.tag, model.short = name, kind.short
    return model


def _to_promise(written: Tagged) -> Promise:
    """Return the promise that a term of the file means."""
    values = dict(written)
    if written.tag in ("cost", "task_cost"):
        values["limit"], values["currency"] = values["limit"]
    elif written.tag == "energy":
        values["limit"], values["of"] = values["limit"]
    return Promise(kind=written.tag, **values)


def _union_of_terms(noun: str, kinds: Mapping[str, Kind], of: Any) -> Any:
    """Return the type of a term with one of these keywords. `of` is the type of what a term compares."""
    models = tuple(_model(name, kind, of) for name, kind in kinds.items())
    return Annotated[Union[models], TaggedUnion(noun), AfterValidator(_to_promise)]  # noqa: UP007


@cache
def _terms_about(metrics: tuple[str, ...]) -> Any:
    """Return the type of a term in a file where these metrics of requests can be promised."""
    of: Any = Literal[tuple(name for name in metrics if name not in pooled_figures())]
    return _union_of_terms("term", dict.fromkeys(metrics, _LATENCY) | KINDS, of)


@cache
def _adapter_of_terms(metrics: tuple[str, ...]) -> TypeAdapter[Promise]:
    return TypeAdapter(_terms_about(metrics))


def validate_term(value: Any, info: ValidationInfo) -> Promise:
    """Return the promise that a term of a file means.

    The metrics of other packages are looked up here, because these packages may not be loaded when this module is
    imported.
    """
    stored = info.context.extra_metrics if isinstance(info.context, FileContext) else ()
    metrics = tuple(dict.fromkeys((*latencies(), *stored)))
    return _adapter_of_terms(metrics).validate_python(value, context=info.context)


WrittenPromise = Annotated[
    Promise,
    PlainValidator(validate_term, json_schema_input_type=_terms_about(latencies(foreign=False))),
]
_ANSWER_TERMS = _union_of_terms("term about answers", ANSWER_KINDS, OfAnswers)


@cache
def _adapter_of_answer_terms() -> TypeAdapter[Promise]:
    return TypeAdapter(_ANSWER_TERMS)


def validate_answer_term(value: Any, info: ValidationInfo) -> Promise:
    """Return the promise that a term about answers means."""
    return _adapter_of_answer_terms().validate_python(value, context=info.context)


WrittenOfAnswers = Annotated[
    Promise,
    PlainValidator(validate_answer_term, json_schema_input_type=_ANSWER_TERMS),
]

# -------------------------------------------------------------------------------------------------------------- levels


Name = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def _is_left_to_the_terms(value: Any) -> Any:
    """Return None for `auto`, and any other value as it is."""
    return None if value == "auto" else value


WrittenDuration = Annotated[
    Annotated[Duration, Field(gt=0)] | None,
    BeforeValidator(_is_left_to_the_terms, json_schema_input_type=Duration | Literal["auto"]),
]
"""The length of a level's load. None, written as `auto` or left out, leaves it to the terms."""


class ContractLevel(Part):
    """One load, and what was promised under it. What is left out is as in the workload."""

    synonyms: ClassVar[dict[str, str]] = {
        "request_rate": "rate",
        "count": "requests",
        "num_requests": "requests",
        "runs": "repeats",
        "terms": "must",
    }
    name: Name
    description: str = ""
    workload: Annotated[
        str, Field(min_length=1)
    ]  # name of a packaged workload, or a path relative to the contract
    rate: FiniteRate | None = None
    concurrency: Concurrency | None = None
    duration_ns: WrittenDuration = Field(None, validation_alias="duration")  # None: auto
    requests: Whole | None = None
    warmup_ns: Duration | None = Field(None, validation_alias="warmup")
    grace_ns: Duration | None = Field(None, validation_alias="grace")
    repeats: Annotated[int, Strict(), Field(ge=1, le=100)] = 1
    apart_ns: Annotated[Duration, Field(gt=0)] | None = Field(None, validation_alias="apart")
    cache: Literal["cold", "warm"] | None = None
    slo: SloField = None
    must: tuple[WrittenPromise, ...] = ()
    should: tuple[WrittenPromise, ...] = ()


class AnswerCheck(Part):
    """The prompts whose answers are scored, and what was promised of the scores. Asked after the load."""

    synonyms: ClassVar[dict[str, str]] = {"output_tokens": "max_tokens", "terms": "must"}
    dataset: Annotated[str, Field(min_length=1)]  # JSONL, relative to the contract
    rows: Whole | None = None  # only the first so many
    max_tokens: Whole | None = None
    against: Annotated[str, Field(min_length=1)] | None = (
        None  # URL of the other endpoint; or --against
    )
    against_model: str | None = None
    must: tuple[WrittenOfAnswers, ...] = ()
    should: tuple[WrittenOfAnswers, ...] = ()


def _levels(value: Any) -> Any:
    if value == []:
        raise Wrong(
            "missing_value",
            "is empty: nothing was promised",
            "levels: [{name: load, workload: qa, must: [{ttft: 2s}]}]",
        )
    return value


HORIZON_NS = round(HORIZON_S * 1e9)
"""A PASS of a latency holds for what comes back within this time, unless the contract signs another `horizon`.

A server that changes for minutes moves its median too, and no record of a load that never met its slow state shows that
there is one. Of loads that are long enough for 12 minutes, benchmarks/trust.py finds few enough wrong PASS verdicts
where levels last 400 s.
"""


class Contract(Part):
    """All that a contract file may say."""

    synonyms: ClassVar[dict[str, str]] = {"loads": "levels", "level": "levels"}
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str = ""
    confidence: Annotated[Share, Field(ge=0.5, le=0.999)] = 0.95
    horizon_ns: Annotated[Duration, Field(gt=0)] = Field(HORIZON_NS, validation_alias="horizon")
    gpus: Whole | None = None
    prices: str | None = None
    slo: SloField = None
    levels: Annotated[tuple[ContractLevel, ...], BeforeValidator(_levels)]
    answers: AnswerCheck | None = None


class PlannedClass(NamedTuple):
    """A class of a workload, or all of it, and what a start of it is."""

    name: str
    share: float  # of all starts
    slo: Slo | None
    requests_each: float  # mean of a start
    is_session: bool  # whether a start is a task or a conversation


class Planned(Struct, frozen=True, kw_only=True):
    """A level and its load: `workload` is the level's workload with the level's own rate, bounds and SLO applied.

    `shortened_from_ns`: the contract's own length, where a shorter one was asked for (0: it is not known before); then
    `undecidable` says which of its terms cannot pass in the time that is left.
    """

    level: ContractLevel
    workload: Workload
    classes: tuple[PlannedClass, ...]
    starts: (
        float | None
    )  # expected of one run: tasks, conversations and single requests; None: closed loop by time
    requests: int | None  # expected measured requests of one run
    rate: float | None  # expected measured requests per second
    duration_ns: int | None  # of the measured stages together
    shortened_from_ns: int | None = None
    undecidable: tuple[str, ...] = ()
    is_auto: bool = False  # the terms decide how long the load lasts
    decided_by: str = ""  # the term that needs the longest load, in words


class Checked(Struct, frozen=True, kw_only=True):
    """A contract with its plan. `text` is the file as written; `resolved` with the values of its variables, or ""."""

    contract: Contract
    levels: tuple[Planned, ...]
    text: str
    resolved: str
    file: str
    folder: Path


class Draft(Struct, frozen=True, kw_only=True):
    """The parts of one level that could be parsed, so that `lint` can report faults in the rest.

    `level` has no terms and is None where the level itself is wrong. Each entry of `terms` is the list it is in
    ("must" or "should"), its place in that list, and the term.
    """

    index: int
    name: str
    workload: str | None
    level: ContractLevel | None
    terms: tuple[tuple[str, int, Promise], ...]


def parse(
    text: str, label: str, env: Mapping[str, str] = os.environ, figures: tuple[str, ...] = ()
) -> Contract:
    """Parse the text of a contract that was checked before its runs. Checks shape and units only. Raises Faults.

    `figures`: of other packages that its runs used; the packages need not be here.
    """
    document, faults = read_document(text, label, env)
    source = FileContext(file=label, directory=Path(), errors=faults, extra_metrics=figures)
    contract = validate_document(Contract, document, source)
    if contract is None or source.errors:
        raise CombinedError(sort_errors(source.errors))
    return contract


def plain(value: Any) -> str | None:
    """A scalar of the file as text; a bare number counts as text. None for anything else."""
    return (
        str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    )


def read_document(text: str, label: str, env: Mapping[str, str]) -> tuple[Map, list[LoadgenError]]:
    return read_yaml(text, label, env, kind="contract", smallest=_EXAMPLE)


def find(path: Path) -> Path:
    return path if path.is_file() else packaged_files("contracts").get(str(path), path)


def text_of(file: Path, as_given: str) -> str:
    """The text of a contract file. Raises UserError for a file that is missing, unreadable, too large or not UTF-8."""
    hint = f"the path of a YAML file, or one of {', '.join(packaged_files('contracts'))}"
    if as_given in packaged_files("workloads"):
        hint = f"{as_given} is a workload: loadgen run {as_given}; {hint}"
    text = read_yaml_text(file, as_given, "contract", lambda: hint, hint)
    if re.search(r"(?m)^(requests|stages):", text) and not re.search(r"(?m)^levels:", text):
        hint = f"loadgen run {as_given}; a contract names it in one of its `levels`"
        raise UserError("wrong_format", "a workload, not a contract", as_given, hint)
    return text
