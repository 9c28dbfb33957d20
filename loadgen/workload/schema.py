"""The types of a checked workload and the values each field accepts. Durations are integer ns, rates floats per second.

This module reads no file, except to hash the prompt and trace files that are part of a fingerprint.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Strict,
    Tag,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from loadgen import units
from loadgen.limits import ValidityLimits
from loadgen.slo import METRIC_ALIASES, METRICS, Slo, StopRule, TaskTerm, Term
from loadgen.workload.fields import (
    Delay,
    Duration,
    Empirical,
    FiniteRate,
    Fixed,
    JsonSchema,
    Length,
    Listed,
    OneTokenOrMore,
    Part,
    Positive,
    Quantile,
    Rate,
    Salt,
    Seed,
    Share,
    Source,
    Tagged,
    Tokens,
    Whole,
    one_of,
)
from loadgen.workload.tasks import Task
from loadgen.workload.yaml_marks import Map

TIMEOUT_NS = 600 * units.NS_PER_S  # the default of the openai client
MOST_LANES = 1_000_000
STALL_TIMEOUT_NS = 120 * units.NS_PER_S  # longest silence in a stream: a cold prefill of a long prompt takes a minute

# ----------------------------------------------------------------------------------------------------------- requests


class Turns(Part):
    """Conversations: `count` requests each, every one re-sending what was said before it."""

    count: Annotated[int, Strict(), Field(ge=1, le=10_000)]
    tool_result_tokens: Length  # what each later turn adds: the result of a tool, or the next message of the user
    tool_time: Delay = Fixed[Duration](value=0)  # from the end of a turn to the start of the next
    history: Literal["scripted", "server"] = "scripted"  # assistant turns: generated from the seed, or real replies


def _cache(value: Any, info: ValidationInfo) -> float:
    """The share of prompt tokens that the server's cache is to know: cold is 0, warm is 1."""
    if not isinstance(info.context, Source) and isinstance(value, float):
        return value
    if value in ("cold", "warm"):
        return float(value == "warm")
    if isinstance(value, dict) and list(value) == ["hit_rate"] and isinstance(value["hit_rate"], str):
        return units.share(value["hit_rate"])
    raise units.Wrong("is no state of a cache", "cache: cold, cache: warm, or cache: {hit_rate: 60%}")


_HIT_RATE = {"type": "string", "pattern": units.SHARE_PATTERN}
CacheState = Annotated[
    float,
    PlainValidator(_cache),
    JsonSchema(
        anyOf=[
            {"enum": ["cold", "warm"]},
            {
                "type": "object",
                "properties": {"hit_rate": _HIT_RATE},
                "required": ["hit_rate"],
                "additionalProperties": False,
            },
        ]
    ),
]


class Chunks(Part):
    """Retrieval: each prompt begins with some chunks of a corpus, drawn by popularity (Zipf), no chunk twice."""

    synonyms: ClassVar[dict[str, str]] = {"size": "tokens", "documents": "count", "exponent": "zipf"}
    count: Annotated[int, Strict(), Field(ge=1, le=1_000)] = 3
    tokens: OneTokenOrMore = 384  # of each
    corpus: Annotated[int, Strict(), Field(ge=1, le=10_000_000)] = 10_000  # chunks in it
    zipf: Annotated[float, Strict(), Field(ge=0, le=10)] = (
        1.0  # chunk k is drawn in proportion to 1 / k^zipf; 0: evenly
    )

    @model_validator(mode="after")
    def _drawable(self) -> Chunks:
        if self.count > self.corpus:
            raise units.Wrong(f"draws {self.count} different chunks from {self.corpus}", "a larger corpus")
        return self


Pixels = Annotated[int, Strict(), Field(ge=1, le=8192)]


class Images(Part):
    """Images in each (first) message, drawn from the seed; their tokens come on top of `input_tokens`."""

    count: Annotated[int, Strict(), Field(ge=1, le=100)] = 1
    width: Pixels = 512
    height: Pixels = 512


class Synthetic(Part):
    """Prompts made of exactly so many tokens."""

    synonyms: ClassVar[dict[str, str]] = {
        "isl": "input_tokens",
        "osl": "output_tokens",
        "input": "input_tokens",
        "output": "output_tokens",
        "prompt_tokens": "input_tokens",
        "max_tokens": "output_tokens",
        "random_input_len": "input_tokens",
        "random_output_len": "output_tokens",
    }
    input_tokens: Length  # content tokens of the (first) prompt, including the shared prefix
    output_tokens: Length  # tokens of each answer
    shared_prefix_tokens: Tokens = 0  # this many tokens at the start are equal within a prefix group
    prefixes: Whole = 1  # number of prefix groups
    system_tokens: Tokens = 0  # length of a system message, equal for all requests, in addition to the prompt
    turns: Turns | None = None
    chunks: Chunks | None = None  # retrieved ones, at the start of the prompt: a part of input_tokens
    images: Images | None = None
    cache: CacheState | None = None  # the share of its prompt tokens that the server knows; None: as prefixes have it

    @model_validator(mode="after")
    def _cache_alone(self) -> Synthetic:
        others = (("shared_prefix_tokens", self.shared_prefix_tokens), ("turns", self.turns), ("chunks", self.chunks))
        if self.cache is not None and (what := next((name for name, value in others if value), "")):
            raise units.Wrong(f"has both cache and {what}", "cache makes the shared beginnings; keep one of the two")
        return self

    @model_validator(mode="after")
    def _prefix_fits(self) -> Synthetic:
        length = self.input_tokens
        shortest = length.value if isinstance(length, Fixed) else getattr(length, "min", None) or 0
        shortest = min(length.values) if isinstance(length, Empirical | Listed) else shortest
        if self.chunks is not None:
            taken = self.chunks.count * self.chunks.tokens
            if self.shared_prefix_tokens or self.turns:
                raise units.Wrong("has chunks beside shared_prefix_tokens or turns", "keep one of them")
            if shortest <= taken:
                problem = f"has {self.chunks.count} chunks of {self.chunks.tokens} tokens in prompts of {shortest or 1}"
                raise units.Wrong(problem, f"input_tokens: more than {taken}, as a number or with a min: the rest asks")
        if shortest and self.shared_prefix_tokens > shortest:
            problem = f"shares a prefix of {self.shared_prefix_tokens} tokens in prompts of {shortest}"
            raise units.Wrong(problem, "shared_prefix_tokens is a part of input_tokens")
        return self


def _existing_file(value: Any, info: ValidationInfo) -> Any:
    """Resolve a path relative to the workload file; it must be an existing file. Raises `Wrong`."""
    if not isinstance(info.context, Source):
        return value
    if not isinstance(value, str) or not value:
        raise units.Wrong("is not the name of a file", "requests: {from: prompts.jsonl}")
    if value.startswith("hf:"):  # a data set of Hugging Face: found when it is read
        return Path(value)
    path = info.context.folder / value
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise units.Wrong(problem, f"a file, named relative to the folder of the workload ({info.context.folder})")
    return path


class FromFile(Part):
    """The user's own prompts or messages, a row each: a file, or a data set of Hugging Face (`dataset.py`)."""

    synonyms: ClassVar[dict[str, str]] = dict.fromkeys(("path", "file", "dataset", "prompts"), "from")
    path: Annotated[Path, BeforeValidator(_existing_file)] = Field(validation_alias="from")
    output_tokens: Length | None = None  # for rows that do not set it
    order: Literal["sequential", "shuffled"] = "sequential"


def _time_slice(value: Any, info: ValidationInfo) -> tuple[int, int | None]:
    if not isinstance(info.context, Source) and isinstance(value, tuple | list):
        begin, end = value
        return begin, end
    if not isinstance(value, str):
        raise units.Wrong("is no part of a time", "slice: 10m..20m, counted from the first request of the trace")
    return units.time_slice(value)


TimeSlice = Annotated[
    tuple[int, int | None],
    PlainValidator(_time_slice),
    PlainSerializer(list),
    JsonSchema(
        type="string", pattern=r"^[^.]*(\.[0-9]+)?[a-z]*\.\.[^.]*(\.[0-9]+)?[a-z]*$", examples=["10m..20m", "..1h"]
    ),
]
OnBadRow = Literal["fail", "skip"]
TraceReplay = Literal["instants", "sessions"]


class FromTrace(Part):
    """Prompts as long as a trace's, sharing the beginnings that its prompts share; their text is fresh in every run."""

    synonyms: ClassVar[dict[str, str]] = {"path": "trace", "file": "trace"}
    trace: Annotated[Path, BeforeValidator(_existing_file)]
    slice_ns: TimeSlice | None = Field(None, validation_alias="slice")  # only what came in this time
    on_bad_row: OnBadRow = "fail"  # skip: rows with faults are left out and counted
    replay: TraceReplay = "instants"  # sessions: a request waits for those of its session that it waited for


def _request_kind(value: Any) -> str:
    keys = set(value) if isinstance(value, dict) else set()
    if isinstance(value, Mix) or "classes" in keys:
        return "Mix"
    if isinstance(value, FromTrace) or "trace" in keys:
        return "FromTrace"
    if isinstance(value, Task) or "steps" in keys:
        return "Task"
    file_keys = keys & {"from", "order", *FromFile.synonyms}
    return "FromFile" if isinstance(value, FromFile) or file_keys else "Synthetic"


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
    rate: FiniteRate


class Gamma(Tagged):
    """Gamma gaps of shape `burstiness`: below 1 burstier than Poisson, above 1 more even."""

    tag = "gamma"
    rate: FiniteRate
    burstiness: Positive


class Ramp(Tagged):
    """Poisson whose rate goes linearly from one to the other over the stage's duration."""

    tag = "ramp"
    from_rate: FiniteRate = Field(validation_alias="from")
    to_rate: FiniteRate = Field(validation_alias="to")


class Closed(Tagged):
    """`concurrency` lanes, each sending its next request when its last one is done; lanes begin one after the other,
    evenly over `ramp`: by default the length of an answer, `0s`: all at once."""

    tag = "closed"
    short = "concurrency"
    concurrency: Annotated[int, Strict(), Field(ge=1, le=MOST_LANES)]
    ramp_ns: Annotated[Duration | None, Field(validation_alias="ramp")] = None  # None: an answer's length


class Replay(Tagged):
    """When the requests of a trace came, `speed` times as fast. Without duration and count: all of it, `loop` times."""

    tag = "trace"
    short = "file"
    file: Annotated[Path, BeforeValidator(_existing_file)]
    speed: Positive = 1.0
    slice_ns: TimeSlice | None = Field(None, validation_alias="slice")  # only what came in this time
    loop: Annotated[int, Strict(), Field(ge=1, le=1_000_000)] = 1  # how often it is played, one after the other
    on_bad_row: OnBadRow = "fail"
    replay: TraceReplay = "instants"  # sessions: when its sessions began; of requests from a trace, as these have it


if TYPE_CHECKING:
    Arrival = Constant | Poisson | Gamma | Ramp | Closed | Replay
else:
    Arrival = one_of("arrival", Constant, Poisson, Gamma, Ramp, Closed, Replay)


class AtLeast(Part):
    """Minimums in place of bounds, as MLPerf has them: the stage goes on until the last arrival is at or after the
    duration *and* there are so many, then up to a whole multiple of `passes_of` (the size of a data set)."""

    synonyms: ClassVar[dict[str, str]] = {"num_requests": "count", "requests": "count", "time": "duration"}
    duration_ns: Duration = Field(0, validation_alias="duration")
    count: Whole = 1
    passes_of: Whole = 1


class Stage(Part):
    """A part of the run with one arrival law. It ends after its duration or after `count` requests (conversations,
    where there are turns), whichever comes first, or by the minimums of `at_least` (Poisson only); once a workload is
    loaded, at least one of the three is set."""

    synonyms: ClassVar[dict[str, str]] = {
        "rate": "arrival",
        "request_rate": "arrival",
        "concurrency": "arrival",
        "num_requests": "count",
        "requests": "count",
        "time": "duration",
    }
    name: str = ""
    arrival: Arrival
    duration_ns: Annotated[Duration, Field(gt=0)] | None = Field(None, validation_alias="duration")
    count: Whole | None = None
    at_least: AtLeast | None = None
    measured: Annotated[bool, Strict()] = True

    @model_validator(mode="after")
    def _minimums_alone(self) -> Stage:
        if self.at_least is not None:
            hint = "at_least: {duration: 600s, passes_of: 24576} stands alone, under arrival: {poisson: ...}"
            if not isinstance(self.arrival, Poisson):
                raise units.Wrong("has minimums (at_least), but its arrivals are not poisson", hint)
            if self.duration_ns is not None or self.count is not None:
                raise units.Wrong("has both minimums (at_least) and bounds", hint)
        return self

    @classmethod
    def keys(cls) -> list[str]:
        return [*super().keys(), "warmup"]

    @classmethod
    def unwrap(cls, data: Any) -> Any:
        """Accept `warmup: true` as another spelling of `measured: false`."""
        if not isinstance(data, Map) or "warmup" not in data:
            return data
        if "measured" in data:
            raise units.Wrong("says both measured and warmup", "keep one: warmup: true is measured: false")
        warmup = data["warmup"]
        stage = data.renamed({"warmup": "measured"})
        stage["measured"] = not warmup if isinstance(warmup, bool) else warmup
        return stage

    @classmethod
    def as_written(cls, schema: dict[str, Any]) -> dict[str, Any]:
        schema["properties"]["warmup"] = {"type": "boolean", "description": "true: the same as measured: false"}
        return {**schema, "not": {"required": ["measured", "warmup"]}}


# ---------------------------------------------------------------------------------------------------------------- slo


class WrittenTerm(Part):
    """`2s`, or `{limit: 2s, at: p95}`."""

    limit_ns: Annotated[Duration, Field(gt=0)] = Field(validation_alias="limit")
    quantile: Quantile | None = Field(None, validation_alias="at")

    @classmethod
    def unwrap(cls, data: Any) -> Any:
        return data if isinstance(data, dict) else {"limit": data}

    @classmethod
    def as_written(cls, schema: dict[str, Any]) -> dict[str, Any]:
        return {"anyOf": [schema["properties"]["limit"], schema]}


class WrittenTaskTerm(Part):
    """What was promised of tasks and conversations as a whole."""

    within_ns: Annotated[Duration, Field(gt=0)] | None = Field(None, validation_alias="within")
    wait_ns: Annotated[Duration, Field(gt=0)] | None = Field(None, validation_alias="wait")  # for each first token
    goodput: Share = 0.99  # of the tasks that keep both

    @model_validator(mode="after")
    def _has_a_limit(self) -> WrittenTaskTerm:
        if self.within_ns is None and self.wait_ns is None:
            raise units.Wrong("has no limit", "task: {within: 90s, wait: 2s, goodput: 95%}")
        return self


def stop_rule(text: str) -> StopRule:
    """`errors:20%`, `ttft:p50:30s`. Raises `Wrong`."""
    known = f"errors:20%, or a latency at a percentile, ttft:p50:30s; known: errors, {', '.join(METRICS)}"
    name, *parts = text.strip().split(":")
    metric = METRIC_ALIASES.get(name, name)
    if name == "errors" and len(parts) == 1:
        limit, quantile = units.share(parts[0]), None
    elif metric in METRICS and len(parts) == 2:
        quantile, limit = units.quantile(parts[0]), float(units.duration_ns(parts[1], bare="s"))
    else:
        raise units.Wrong("is no rule to stop by", known)
    if not limit:
        raise units.Wrong("stops every run", known)
    return StopRule(metric=metric, limit=limit, quantile=quantile)


def _stop_rule(value: Any) -> StopRule:
    if isinstance(value, StopRule):
        return value
    if not isinstance(value, str):
        raise units.Wrong("is no rule to stop by", "errors:20%, or ttft:p50:30s")
    return stop_rule(value)


WrittenStopRule = Annotated[
    StopRule,
    PlainValidator(_stop_rule),
    PlainSerializer(msgspec.to_builtins),
    JsonSchema(type="string", examples=["errors:20%", "ttft:p50:30s"]),
]


class WrittenSlo(Part):
    """The terms as they are written, one key each."""

    synonyms: ClassVar[dict[str, str]] = METRIC_ALIASES
    ttft: WrittenTerm | None = None
    ttft_from_sent: WrittenTerm | None = None
    first_answer: WrittenTerm | None = None
    tpot: WrittenTerm | None = None
    e2e: WrittenTerm | None = None
    at: Quantile = 0.99
    goodput: Share | None = None
    task: WrittenTaskTerm | None = None

    @classmethod
    def unwrap(cls, data: Any) -> Any:
        if not isinstance(data, Map):
            return data
        seen = set[str]()
        for key in data:
            if (name := METRIC_ALIASES.get(key, key)) in seen:
                raise units.Wrong(f"has {name} twice", f"{key} is another name of {name}")
            seen.add(name)
        return data.renamed(METRIC_ALIASES)

    @classmethod
    def as_written(cls, schema: dict[str, Any]) -> dict[str, Any]:
        terms = schema["properties"]
        terms |= {alias: terms[metric] for alias, metric in METRIC_ALIASES.items()}
        return schema

    def checked(self) -> Slo:
        written = {name: term for name in METRICS if (term := getattr(self, name))}
        terms = [Term(metric=m, limit_ns=t.limit_ns, quantile=t.quantile or self.at) for m, t in written.items()]
        task = None
        if self.task is not None:
            task = TaskTerm(within_ns=self.task.within_ns, wait_ns=self.task.wait_ns, share=self.task.goodput)
        if not terms and (task is None or self.goodput is not None):
            raise units.Wrong("has no term", "slo: {ttft: 2s, tpot: 200ms, at: p99}")
        return Slo(terms=tuple(terms), goodput_share=self.goodput, task=task)


def checked_slo(value: Any, info: ValidationInfo) -> Slo | None:
    """An SLO from what a file says; None where that is wrong, as the faults of the source say then."""
    if value is None or isinstance(value, Slo):
        return value
    if not isinstance(info.context, Source):  # of a checked workload, dumped
        return msgspec.convert(value, Slo)
    faults_before = len(info.context.faults)
    written = WrittenSlo.model_validate(value, context=info.context)
    return written.checked() if len(info.context.faults) == faults_before else None  # the fault is in the list already


class _SloSchema:
    """For the JSON Schema: an SLO is written as `WrittenSlo` says."""

    @staticmethod
    def __get_pydantic_json_schema__(core_schema: Any, handler: Any) -> Any:
        return {"anyOf": [handler(WrittenSlo.__pydantic_core_schema__), {"type": "null"}]}


WorkloadSlo = Annotated[Slo | None, PlainValidator(checked_slo), PlainSerializer(msgspec.to_builtins), _SloSchema()]

# -------------------------------------------------------------------------------------------------------------- classes

MOST_CLASSES = 100
Requests = Annotated[
    Annotated[Synthetic, Tag("Synthetic")]
    | Annotated[FromFile, Tag("FromFile")]
    | Annotated[FromTrace, Tag("FromTrace")]
    | Annotated[Task, Tag("Task")],
    Discriminator(_request_kind),
]


def _weight(value: Any) -> float | str:
    """A relative weight as a number; a percentage stays a text until all of them are seen."""
    if isinstance(value, str):
        units.share(value)
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise units.Wrong("is not a weight", "a number above zero, or a percentage: weight: 60%")
    return float(value)


class RequestClass(Part):
    """One class of what a run sends: single requests, conversations or tasks, and what was promised for them."""

    weight: Annotated[
        float | str,
        PlainValidator(_weight),
        JsonSchema(
            anyOf=[{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": units.SHARE_PATTERN}]
        ),
    ]  # of a checked workload: its share of all starts: single requests, conversations and tasks alike
    requests: Requests
    slo: WorkloadSlo = None  # None: that of the workload

    @field_validator("requests")
    @classmethod
    def _no_sessions_of_a_trace(cls, requests: Any) -> Any:
        if isinstance(requests, FromTrace) and requests.replay == "sessions":
            raise units.Wrong("replays the sessions of a trace as one class of several", "replay: instants")
        return requests

    model: Annotated[str, Field(min_length=1)] | None = None  # or a LoRA adapter; None: the target's model
    priority: Annotated[int, Strict()] | None = None  # sent as `priority`


class Mix(Part):
    """Several classes in one run. Of which class the n-th start (a request, a conversation, a task) is, is a pure
    function of the seed and n."""

    classes: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")], RequestClass],
        Field(min_length=1, max_length=MOST_CLASSES),
    ]

    @field_validator("classes")
    @classmethod
    def _shares(cls, classes: dict[str, RequestClass]) -> dict[str, RequestClass]:
        """Each class with its share of all starts as its weight."""
        weights = [one.weight for one in classes.values()]
        percentages = [units.share(weight) for weight in weights if isinstance(weight, str)]
        if percentages and len(percentages) < len(weights):
            raise units.Wrong("mix percentages and relative weights", "weight: 60% in each class, or weight: 6 in each")
        if percentages and abs(math.fsum(percentages) - 1) > 1e-9:
            problem = f"have weights that add up to {math.fsum(percentages) * 100:g} %, not 100 %"
            raise units.Wrong(problem, "or relative weights, without %: weight: 6")
        numbers = percentages or [float(weight) for weight in weights]
        shares = [number / math.fsum(numbers) for number in numbers]
        return {
            name: one.model_copy(update={"weight": share})
            for (name, one), share in zip(classes.items(), shares, strict=True)
        }


Limits: Any = create_model(
    "Limits",
    __base__=Part,
    __module__=__name__,
    __doc__="The limits of the verdict (metrics.md), as shares.",
    **cast(Any, {limit.name: (Share, limit.default) for limit in msgspec.structs.fields(ValidityLimits)}),
)


# ----------------------------------------------------------------------------------------------------------- workload


if TYPE_CHECKING:
    Grace = int | None
else:
    Grace = Duration  # may be left out, but not be null


class Written(Part):
    """All that a workload file may say."""

    synonyms: ClassVar[dict[str, str]] = {
        "stage": "stages",
        "load": "stages",
        "data": "requests",
        "dataset": "requests",
        "slos": "slo",
    }
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str = ""
    requests: Annotated[
        Annotated[Synthetic, Tag("Synthetic")]
        | Annotated[FromFile, Tag("FromFile")]
        | Annotated[FromTrace, Tag("FromTrace")]
        | Annotated[Task, Tag("Task")]
        | Annotated[Mix, Tag("Mix")],
        Discriminator(_request_kind),
    ]  # several classes are written as `classes`
    stages: tuple[Stage, ...] = ()
    slo: WorkloadSlo = None
    grace_ns: Grace = Field(cast(Any, None), validation_alias="grace")
    timeout_ns: Annotated[Duration, Field(gt=0)] = Field(TIMEOUT_NS, validation_alias="timeout")
    stall_timeout_ns: Annotated[Duration, Field(gt=0)] = Field(STALL_TIMEOUT_NS, validation_alias="stall_timeout")
    max_in_flight: Whole | None = None
    stop_when: tuple[WrittenStopRule, ...] = ()
    seed: Seed | None = None
    schedule_seed: Seed | None = None
    salt: Salt | None = None  # None: derived from the seed; "fresh": a new one in every run
    limits: Limits = Limits()

    @classmethod
    def keys(cls) -> list[str]:
        return [*super().keys(), "classes"]

    @classmethod
    def unwrap(cls, data: Any) -> Any:
        """Accept `classes: ...` in place of `requests`."""
        if not isinstance(data, Map) or "classes" not in data:
            return data
        if "requests" in data:
            raise units.Wrong("has both requests and classes", "each class has requests of its own")
        written = data.renamed({"classes": "requests"})
        written["requests"] = {"classes": data["classes"]}
        return written


class Workload(Written):
    """A checked workload. Durations are integer ns, rates floats per second; `seed` None: draw a fresh one."""

    source_text: str = ""  # the file as written, variables unexpanded

    @property
    def drain_ns(self) -> int:
        """How long requests in flight may go on after the end of the load: `grace`, or as long as a request may."""
        return self.timeout_ns if self.grace_ns is None else self.grace_ns


def recipe_fingerprint(workload: Workload, count_source: str, tokenizer_sha256: str = "") -> str:
    """16 hex digits, equal exactly when two workloads have the same load, SLO and way of counting tokens (metrics.md).

    The fingerprint covers the checked values, so `30s` and `0.5m` are equal. It ignores seeds, salt, names, the
    description and the source text. `count_source` is the tag of the token counts that the results use (server,
    tokenizer, estimate, events). `tokenizer_sha256`: of the tokenizer file; "" for the packaged vocabulary. For prompt
    and trace files the fingerprint covers the bytes of the file, which is read here, not its name.
    """
    return _recipe_hash(_recipe(workload, count_source, tokenizer_sha256))


def request_fingerprint(workload: Workload, count_source: str, tokenizer_sha256: str = "") -> str:
    """Like `recipe_fingerprint`, but without the amount of load: equal for two capacity searches of the same kind.

    Of each measured stage only the arrival law counts (poisson, closed, ...), not its rate, lanes, duration or count.
    """
    recipe = _recipe(workload, count_source, tokenizer_sha256)
    recipe["stages"] = sorted({stage["law"] for stage in recipe["stages"] if stage["measured"]})
    return _recipe_hash(recipe)


def _recipe(workload: Workload, count_source: str, tokenizer_sha256: str) -> dict[str, Any]:
    excluded = {"name", "description", "seed", "schedule_seed", "salt", "source_text", "stop_when"}
    recipe: dict[str, Any] = workload.model_dump(mode="json", exclude=excluded)
    if recipe["grace_ns"] is None:  # so that fingerprints from when 30 s was the default stay equal
        recipe["grace_ns"] = 30 * units.NS_PER_S
    for stage in recipe["stages"]:
        del stage["name"]
        if stage["at_least"] is None:  # so that fingerprints from before `at_least` existed stay equal
            del stage["at_least"]
    for name in ("event_error_share", "tpot_error_share"):  # fingerprints from before these limits existed stay equal
        if recipe["limits"][name] == getattr(ValidityLimits(), name):
            del recipe["limits"][name]
    classes = recipe["requests"].get("classes", {}).values()
    if isinstance(workload.requests, FromTrace):
        _without_defaults(recipe["requests"], workload.requests)
    for requests in (recipe["requests"], *(one["requests"] for one in classes)):
        _hash_file(requests)
        for name in ("cache", "chunks", "images"):  # so that fingerprints from before these existed stay equal
            if requests.get(name, 0) is None:
                del requests[name]
        for step in requests.get("steps", {}).values():
            del step["target"], step["model"]  # where it is sent, as a run's own target
            for name in (
                "documents",
                "best",
            ):  # so that fingerprints from before these and other kinds existed stay equal
                if step[name] is None:
                    del step[name]
            if step["kind"] == "chat":
                del step["kind"]
    for slo in (recipe["slo"], *(one["slo"] for one in classes)):
        if slo is not None and slo["task"] is None:  # so that fingerprints from before `task` existed stay equal
            del slo["task"]
    for stage_recipe, stage in zip(recipe["stages"], workload.stages, strict=True):
        stage_recipe["law"] = stage.arrival.tag
        if isinstance(stage.arrival, Replay):
            replay = stage_recipe["arrival"]["trace"]
            replay["file"] = _file_sha256(stage.arrival.file)
            _without_defaults(replay, stage.arrival)
        # All lanes at once: as before ramps existed, and so is the fingerprint.
        if isinstance(stage.arrival, Closed) and stage.arrival.ramp_ns == 0:
            del stage_recipe["arrival"]["closed"]["ramp_ns"]
    recipe["count_source"] = count_source
    if tokenizer_sha256:  # the packaged vocabulary is left out, as it was before tokenizer files counted
        recipe["tokenizer"] = tokenizer_sha256
    return recipe


def _without_defaults(recipe: dict[str, Any], of: FromTrace | Replay) -> None:
    """Remove what was not asked of a trace, so that fingerprints from before this could be asked stay equal."""
    for name in ("slice_ns", "loop", "on_bad_row", "replay"):
        if name in recipe and getattr(of, name) == type(of).model_fields[name].default:
            del recipe[name]


def _recipe_hash(recipe: dict[str, Any]) -> str:
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hash_file(requests: dict[str, Any]) -> None:
    """Put the hash of a file of prompts, or of a trace, in place of its name."""
    for name in requests.keys() & {"path", "trace"}:
        requests[name] = _file_sha256(Path(requests[name]))


def _file_sha256(path: Path) -> str:
    state = path.stat()
    return _sha256(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=16)  # of a trace: its requests and its arrivals are the same file
def _sha256(path: Path, size: int, changed_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def schema_of(model: type[BaseModel], title: str) -> dict[str, Any]:
    """The JSON Schema of a file that this model describes; values with units are strings with a pattern."""
    schema = model.model_json_schema(by_alias=True)
    for generated_name, definition in list(schema["$defs"].items()):  # generic types are named by repr
        own_title = definition.get("title", generated_name)
        if own_title != generated_name:
            schema = json.loads(json.dumps(schema).replace(json.dumps(generated_name)[1:-1], own_title))
    _remove_defaults(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a workload file, for editors."""
    schema = schema_of(Written, "A workload of loadgen")
    del schema["properties"]["slo"]["title"]  # pydantic gives one to types that are not its own
    schema["properties"]["classes"] = {"$ref": "#/$defs/Mix/properties/classes"}
    schema["required"].remove("requests")
    schema["oneOf"] = [{"required": ["requests"]}, {"required": ["classes"]}]
    return schema


def _remove_defaults(schema: Any) -> None:
    """Remove the defaults: they are in checked units (ns, shares), not as a user writes them. See docs/workloads.md."""
    if isinstance(schema, dict):
        schema.pop("default", None)  # no field of a workload has this name
        for inner in schema.values():
            _remove_defaults(inner)
    elif isinstance(schema, list):
        for inner in schema:
            _remove_defaults(inner)
