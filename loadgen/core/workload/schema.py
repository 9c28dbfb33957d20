"""The types of a checked workload and the values each field accepts. Durations are integer ns, rates floats per second.

This module reads no file. How an SLO is written is in `slo_fields.py`, what makes two workloads equal in
`fingerprints.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import msgspec
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Strict,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)

from loadgen.core import units
from loadgen.core.limits import ValidityLimits
from loadgen.core.workload import spikes
from loadgen.core.workload.distributions import (
    Delay,
    Empirical,
    Fixed,
    FixedDuration,
    Length,
    Listed,
)
from loadgen.core.workload.fields import (
    Duration,
    FiniteRate,
    OneTokenOrMore,
    Positive,
    Rate,
    Salt,
    Seed,
    Share,
    Tokens,
    Whole,
)
from loadgen.core.workload.file_models import FileContext, Part, Tagged, TaggedUnion
from loadgen.core.workload.slo_fields import WorkloadSlo, WrittenStopRule
from loadgen.core.workload.tasks import Task
from loadgen.core.workload.yaml_marks import Map, Seq

TIMEOUT_NS = 600 * units.NS_PER_S  # the default of the openai client
MOST_LANES = 1_000_000
STALL_TIMEOUT_NS = (
    120 * units.NS_PER_S
)  # longest silence in a stream: a cold prefill of a long prompt takes a minute
Lanes = Annotated[int, Strict(), Field(ge=1, le=MOST_LANES)]
TENANT_HEADERS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
"""By which gateways share capacity among tenants: the inference extension of the Gateway API; llm-d from 0.8 on."""
_OF_THE_CLIENT = {
    "host",
    "content-length",
    "transfer-encoding",
    "content-type",
    "accept",
    "connection",
    "x-request-id",
}
_SECRETS = {"authorization", "proxy-authorization", "cookie", "api-key", "x-api-key"}


def _header_of_a_class(name: str) -> str:
    if name.lower() in _SECRETS:
        raise units.Wrong(
            "unsupported", "is a secret, and a workload is kept with its results", "--api-key-file"
        )
    if name.lower() in _OF_THE_CLIENT:
        raise units.Wrong("unsupported", "is written by the client", "leave it out")
    return name


HeaderName = Annotated[
    str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}$"), AfterValidator(_header_of_a_class)
]
HeaderText = Annotated[str, Field(pattern=r"^[!-~](?:[ -~]{0,500}[!-~])?$")]

# ----------------------------------------------------------------------------------------------------------- requests


class Turns(Part):
    """Conversations: `count` requests each, every one re-sending what was said before it."""

    # requests of each conversation
    count: Annotated[int, Strict(), Field(ge=1, le=10_000)]
    # what each later turn adds
    tool_result_tokens: Length
    # from the end of a turn to the start of the next
    tool_time: Delay = FixedDuration.model_construct(value=0)
    # earlier answers: from the seed, the same everywhere, or what the server said
    history: Literal["scripted", "server"] = "scripted"


def _cache(value: Any, info: ValidationInfo) -> float:
    """The share of prompt tokens that the server's cache is to know: cold is 0, warm is 1."""
    if not isinstance(info.context, FileContext) and isinstance(value, float):
        return value
    if value in ("cold", "warm"):
        return float(value == "warm")
    if (
        isinstance(value, dict)
        and list(value) == ["hit_rate"]
        and isinstance(value["hit_rate"], str)
    ):
        return units.share(value["hit_rate"])
    raise units.Wrong(
        "unknown_name",
        "is no state of a cache",
        "cache: cold, cache: warm, or cache: {hit_rate: 60%}",
    )


_HIT_RATE = {"type": "string", "pattern": units.SHARE_PATTERN}
CacheState = Annotated[
    float,
    PlainValidator(_cache),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["cold", "warm"]},
                {
                    "type": "object",
                    "properties": {"hit_rate": _HIT_RATE},
                    "required": ["hit_rate"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


class Chunks(Part):
    """Retrieval: each prompt begins with some chunks of a corpus, drawn by popularity (Zipf), no chunk twice."""

    synonyms: ClassVar[dict[str, str]] = {
        "size": "tokens",
        "documents": "count",
        "exponent": "zipf",
    }
    count: Annotated[int, Strict(), Field(ge=1, le=1_000)] = 3
    tokens: OneTokenOrMore = 384  # of each
    corpus: Annotated[int, Strict(), Field(ge=1, le=10_000_000)] = 10_000  # chunks in it
    zipf: Annotated[float, Strict(), Field(ge=0, le=10)] = (
        1.0  # chunk k is drawn as 1 / k^zipf; 0: evenly
    )

    @model_validator(mode="after")
    def _drawable(self) -> Chunks:
        if self.count > self.corpus:
            raise units.Wrong(
                "out_of_range",
                f"draws {self.count} different chunks from {self.corpus}",
                "a larger corpus",
            )
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
    # of the (first) prompt, as the server counts them, with shared prefix and chunks
    input_tokens: Length
    # of each answer
    output_tokens: Length
    # equal at the start within a prefix group
    shared_prefix_tokens: Tokens = 0
    # prefix groups
    prefixes: Whole = 1
    # of a system message, equal for all, on top
    system_tokens: Tokens = 0
    # conversations
    turns: Turns | None = None
    # retrieved ones at the start of the prompt
    chunks: Chunks | None = None
    # PNG images in each first message, on top
    images: Images | None = None
    # random words, or passages of a book behind a few of them
    prompts: Literal["random", "natural"] = "random"
    # or `{hit_rate: 60%}`: the share of a prompt that the server's cache knows
    cache: CacheState | None = None

    @model_validator(mode="after")
    def _cache_alone(self) -> Synthetic:
        others = (
            ("shared_prefix_tokens", self.shared_prefix_tokens),
            ("turns", self.turns),
            ("chunks", self.chunks),
        )
        if self.cache is not None and (what := next((name for name, value in others if value), "")):
            raise units.Wrong(
                "conflict",
                f"has both cache and {what}",
                "cache makes the shared beginnings; keep one of the two",
            )
        return self

    @model_validator(mode="after")
    def _prefix_fits(self) -> Synthetic:
        length = self.input_tokens
        shortest = length.value if isinstance(length, Fixed) else getattr(length, "min", None) or 0
        shortest = min(length.values) if isinstance(length, Empirical | Listed) else shortest
        if self.chunks is not None:
            taken = self.chunks.count * self.chunks.tokens
            if self.shared_prefix_tokens or self.turns:
                raise units.Wrong(
                    "conflict",
                    "has chunks beside shared_prefix_tokens or turns",
                    "keep one of them",
                )
            if shortest <= taken:
                problem = f"has {self.chunks.count} chunks of {self.chunks.tokens} tokens in prompts of {shortest or 1}"
                hint = f"input_tokens: more than {taken}, as a number or with a min: the rest asks"
                raise units.Wrong("out_of_range", problem, hint)
        if shortest and self.shared_prefix_tokens > shortest:
            problem = (
                f"shares a prefix of {self.shared_prefix_tokens} tokens in prompts of {shortest}"
            )
            raise units.Wrong(
                "out_of_range", problem, "shared_prefix_tokens is a part of input_tokens"
            )
        return self


def _existing_file(value: Any, info: ValidationInfo) -> Any:
    """Resolve a path relative to the workload file; it must be an existing file. Raises `Wrong`."""
    if not isinstance(info.context, FileContext):
        return value
    if not isinstance(value, str) or not value:
        raise units.Wrong(
            "wrong_type", "is not the name of a file", "requests: {from: prompts.jsonl}"
        )
    if value.startswith("hf:"):  # a data set of Hugging Face: found when it is read
        return Path(value)
    path = info.context.directory / value
    hint = f"a file, named relative to the folder of the workload ({info.context.directory})"
    if path.is_dir():
        raise units.Wrong("unreadable_file", "is a folder", hint)
    if not path.is_file():
        raise units.Wrong("missing_file", "does not exist", hint)
    return path


class FromFile(Part):
    """The user's own prompts or messages, a row each: a file, or a data set of Hugging Face (`dataset.py`)."""

    synonyms: ClassVar[dict[str, str]] = dict.fromkeys(("path", "file", "dataset"), "from")
    path: Annotated[Path, BeforeValidator(_existing_file)] = Field(validation_alias="from")
    output_tokens: Length | None = None  # for rows that do not set it
    order: Literal["sequential", "shuffled"] = "sequential"


def _time_slice(value: Any, info: ValidationInfo) -> tuple[int, int | None]:
    if not isinstance(info.context, FileContext) and isinstance(value, tuple | list):
        begin, end = value
        return begin, end
    if not isinstance(value, str):
        raise units.Wrong(
            "wrong_type",
            "is no part of a time",
            "slice: 10m..20m, counted from the first request of the trace",
        )
    return units.time_slice(value)


TimeSlice = Annotated[
    tuple[int, int | None],
    PlainValidator(_time_slice),
    PlainSerializer(list),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^[^.]*(\.[0-9]+)?[a-z]*\.\.[^.]*(\.[0-9]+)?[a-z]*$",
            "examples": ["10m..20m", "..1h"],
        }
    ),
]
OnBadRow = Literal["fail", "skip"]
TraceReplay = Literal["instants", "sessions"]


class FromTrace(Part):
    """Prompts as long as a trace's, sharing the beginnings that its prompts share; their text is fresh in every run."""

    synonyms: ClassVar[dict[str, str]] = {"path": "trace", "file": "trace"}
    trace: Annotated[Path, BeforeValidator(_existing_file)]
    slice_ns: TimeSlice | None = Field(
        None, validation_alias="slice"
    )  # only what came in this time
    on_bad_row: OnBadRow = "fail"  # skip: rows with faults are left out and counted
    replay: TraceReplay = (
        "instants"  # sessions: a request waits for those of its session that it waited for
    )


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
    evenly over `ramp`: by default the length of an answer, `0s`: all at once.
    """

    tag = "closed"
    short = "concurrency"
    concurrency: Lanes
    ramp_ns: Annotated[Duration | None, Field(validation_alias="ramp")] = (
        None  # None: an answer's length
    )


class Replay(Tagged):
    """When the requests of a trace came, `speed` times as fast. Without duration and count: all of it, `loop` times."""

    tag = "trace"
    short = "file"
    # its file; not needed beside `--trace`
    file: Annotated[Path, BeforeValidator(_existing_file)]
    # 2: twice as fast; sessions begin faster, pauses stay
    speed: Positive = 1.0
    # `10m..20m`, `10m..`, `..20m`: only what came then
    slice_ns: TimeSlice | None = Field(None, validation_alias="slice")
    # how often, with new text; `--duration` may end it first
    loop: Annotated[int, Strict(), Field(ge=1, le=1_000_000)] = 1
    # skip: faulty rows are left out and counted
    on_bad_row: OnBadRow = "fail"
    # sessions: requests wait for the answers as in the trace, then for the recorded pause; they count as tasks do
    replay: TraceReplay = "instants"


Arrival = Annotated[
    Constant | Poisson | Gamma | Ramp | Closed | Replay,
    TaggedUnion("arrival"),
]


class AtLeast(Part):
    """Minimums in place of bounds, as MLPerf has them: the stage goes on until the last arrival is at or after the
    duration *and* there are so many, then up to a whole multiple of `passes_of` (the size of a data set).
    """

    synonyms: ClassVar[dict[str, str]] = {
        "num_requests": "count",
        "requests": "count",
        "time": "duration",
    }
    duration_ns: Duration = Field(0, validation_alias="duration")
    count: Whole = 1
    passes_of: Whole = 1


class Stage(Part):
    """A part of the run with one arrival law. It ends after its duration or after `count` requests (conversations,
    where there are turns), whichever comes first, or by the minimums of `at_least` (Poisson only); once a workload is
    loaded, at least one of the three is set.
    """

    synonyms: ClassVar[dict[str, str]] = {
        "rate": "arrival",
        "request_rate": "arrival",
        "concurrency": "arrival",
        "num_requests": "count",
        "requests": "count",
        "time": "duration",
    }
    # shown in results
    name: str = ""
    # when requests start; or `spike: 3x for 60s`
    arrival: Arrival
    # ends it
    duration_ns: Annotated[Duration, Field(gt=0)] | None = Field(None, validation_alias="duration")
    # ends it, whichever comes first: requests, conversations or tasks
    count: Whole | None = None
    # Poisson, in their place: until the duration is over and there are so many, then up to a whole multiple of
    # `passes_of`, as MLPerf has it
    at_least: AtLeast | None = None
    # false, or `warmup: true`: sent and recorded, left out of the results
    measured: Annotated[bool, Strict()] = True

    @model_validator(mode="after")
    def _minimums_alone(self) -> Stage:
        if self.at_least is not None:
            hint = "at_least: {duration: 600s, passes_of: 24576} stands alone, under arrival: {poisson: ...}"
            if not isinstance(self.arrival, Poisson):
                raise units.Wrong(
                    "unsupported", "has minimums (at_least), but its arrivals are not poisson", hint
                )
            if self.duration_ns is not None or self.count is not None:
                raise units.Wrong("conflict", "has both minimums (at_least) and bounds", hint)
        return self

    @classmethod
    def yaml_keys(cls) -> list[str]:
        return [*super().yaml_keys(), "warmup", "spike"]

    @classmethod
    def normalize(cls, data: Any) -> Any:
        """Accept `warmup: true` as another spelling of `measured: false`."""
        if isinstance(data, Map) and isinstance(data.get("spike"), units.Wrong):
            raise data["spike"]
        if not isinstance(data, Map) or "warmup" not in data:
            return data
        if "measured" in data:
            raise units.Wrong(
                "conflict",
                "says both measured and warmup",
                "keep one: warmup: true is measured: false",
            )
        warmup = data["warmup"]
        stage = data.renamed({"warmup": "measured"})
        stage["measured"] = not warmup if isinstance(warmup, bool) else warmup
        return stage

    @classmethod
    def extend_json_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        schema["properties"]["warmup"] = {
            "type": "boolean",
            "description": "true: the same as measured: false",
        }
        words = (
            "so many times the load of the stage before: in place of arrival, duration and count"
        )
        schema["properties"]["spike"] = {
            "type": "string",
            "pattern": spikes.SPIKE_PATTERN,
            "description": words,
        }
        schema["required"].remove("arrival")
        one = [{"required": [key]} for key in ("arrival", "spike")]
        return {**schema, "not": {"required": ["measured", "warmup"]}, "oneOf": one}


# -------------------------------------------------------------------------------------------------------------- classes

MOST_CLASSES = 100
_OfOneKind = (
    Annotated[Synthetic, Tag("Synthetic")]
    | Annotated[FromFile, Tag("FromFile")]
    | Annotated[FromTrace, Tag("FromTrace")]
    | Annotated[Task, Tag("Task")]
)


def _weight(value: Any) -> float | str:
    """A relative weight as a number; a percentage stays a text until all of them are seen."""
    if isinstance(value, str):
        units.share(value)
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise units.Wrong(
            "invalid_value", "is not a weight", "a number above zero, or a percentage: weight: 60%"
        )
    return float(value)


class RequestClass(Part):
    """One class of what a run sends: single requests, conversations or tasks, and what was promised for them."""

    # of all starts: percentages that add up to 100, or relative weights (`6`)
    weight: Annotated[
        float | str,
        PlainValidator(_weight),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "number", "exclusiveMinimum": 0},
                    {"type": "string", "pattern": units.SHARE_PATTERN},
                ]
            }
        ),
    ]
    # as above: generated, conversations, tasks, a file or a trace
    requests: Annotated[_OfOneKind, Discriminator(_request_kind)]
    # its own promise; else the workload's
    slo: WorkloadSlo = None

    @field_validator("requests")
    @classmethod
    def _no_sessions_of_a_trace(cls, requests: Any) -> Any:
        if isinstance(requests, FromTrace) and requests.replay == "sessions":
            raise units.Wrong(
                "unsupported",
                "replays the sessions of a trace as one class of several",
                "replay: instants",
            )
        return requests

    # or a LoRA adapter by the server's name; else the target's
    model: Annotated[str, Field(min_length=1)] | None = None
    # sent as `priority` (vLLM: lower is served first)
    priority: Annotated[int, Strict()] | None = None
    # sent as `x-gateway-inference-fairness-id` and, for llm-d from 0.8 on, `x-llm-d-inference-fairness-id`
    tenant: HeaderText | None = None
    # like `{x-gateway-inference-objective: premium}`; no keys: workloads are kept with results
    headers: dict[HeaderName, HeaderText] = Field(default_factory=dict)

    def sent_headers(self) -> dict[str, str]:
        """The headers of its requests: by names in lower case, those of the file over those of the tenant."""
        of_tenant = {} if self.tenant is None else dict.fromkeys(TENANT_HEADERS, self.tenant)
        return of_tenant | {name.lower(): value for name, value in self.headers.items()}


class Mix(Part):
    """Several classes in one run. Of which class the n-th start (a request, a conversation, a task) is, is a pure
    function of the seed and n.
    """

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
            raise units.Wrong(
                "conflict",
                "mix percentages and relative weights",
                "weight: 60% in each class, or weight: 6 in each",
            )
        if percentages and abs(math.fsum(percentages) - 1) > 1e-9:
            problem = f"have weights that add up to {math.fsum(percentages) * 100:g} %, not 100 %"
            raise units.Wrong("out_of_range", problem, "or relative weights, without %: weight: 6")
        numbers = percentages or [float(weight) for weight in weights]
        shares = [number / math.fsum(numbers) for number in numbers]
        return {
            name: one.model_copy(update={"weight": share})
            for (name, one), share in zip(classes.items(), shares, strict=True)
        }


def parts(requests: Any) -> dict[str, Any]:
    """The requests of each class, by its name; all of them, as "", where there are no classes."""
    classes = requests.classes if isinstance(requests, Mix) else {}
    return {name: one.requests for name, one in classes.items()} or {"": requests}


Limits: Any = create_model(
    "Limits",
    __base__=Part,
    __module__=__name__,
    __doc__="The limits of the verdict (metrics.md), as shares.",
    **cast(
        Any,
        {limit.name: (Share, limit.default) for limit in msgspec.structs.fields(ValidityLimits)},
    ),
)


# ----------------------------------------------------------------------------------------------------------- workload


if TYPE_CHECKING:
    Grace = int | None
else:
    Grace = Duration  # may be left out, but not be null


def _no_part_outside(data: Map) -> None:
    """Refuse keys that stand beside the part that they belong to, all in one fault. Raises `Wrong`."""
    laws = ("rate", "request_rate", "concurrency", "poisson", "closed")
    for part, of in (("requests", Synthetic.yaml_keys()), ("stages", [*Stage.yaml_keys(), *laws])):
        if outside := [
            key for key in data if key in {*of} - {*Written.yaml_keys(), *Written.synonyms}
        ]:
            example = "stages: [{arrival: {poisson: 10/s}, duration: 60s}], or arrival: {closed: 8}"
            example = (
                f"requests: {{{', '.join(f'{key}: ...' for key in outside)}}}"
                if part == "requests"
                else example
            )
            what = (
                f"{', '.join(outside)}: {'stand' if len(outside) > 1 else 'stands'} under {part}:"
            )
            raise units.Wrong("unknown_key", what, f"write {example}")


OF_ITS_REQUESTS = ("slice", "on_bad_row", "replay")
OF_ITS_ARRIVALS = ("slice", "on_bad_row", "speed", "loop")
IN_TRACE = dict.fromkeys(
    ("file", *OF_ITS_REQUESTS, *OF_ITS_ARRIVALS)
)  # the keys of a `trace:` block


def _with_trace(data: Map) -> Map:
    """A workload whose `trace: FILE` or `trace: {file: FILE, speed: 2, ...}` is written as requests and stages."""
    block = {"file": data["trace"]} if isinstance(data["trace"], str) else data["trace"]
    if not isinstance(block, dict) or "file" not in block:
        raise units.Wrong(
            "missing_key", "the trace has no file", "trace: {file: traffic.jsonl}, or --trace FILE"
        )
    if unknown := [key for key in block if key not in IN_TRACE]:
        raise units.Wrong(
            "unknown_key", f"trace has no key {unknown[0]}", f"known: {', '.join(IN_TRACE)}"
        )
    for other in ("requests", "classes", "stages"):
        if other in data:
            hint = "a trace brings its own; apart they are written as requests: {trace: ...} and arrival: {trace: ...}"
            raise units.Wrong("conflict", f"has both trace and {other}", hint)
    written = data.renamed({"trace": "requests"})
    written["requests"] = {
        "trace": block["file"],
        **{key: block[key] for key in OF_ITS_REQUESTS if key in block},
    }
    arrival = {
        "file": block["file"],
        **{key: block[key] for key in OF_ITS_ARRIVALS if key in block},
    }
    written["stages"] = [{"arrival": {"trace": arrival}}]
    written.keys_at["stages"], written.values_at["stages"] = (
        data.keys_at["trace"],
        data.values_at["trace"],
    )
    return written


_Requests = _OfOneKind | Annotated[Mix, Tag("Mix")]


class Written(Part):
    """All that a workload file may say."""

    synonyms: ClassVar[dict[str, str]] = {
        "stage": "stages",
        "load": "stages",
        "data": "requests",
        "dataset": "requests",
        "slos": "slo",
    }
    # what results are called
    name: Annotated[str, Field(min_length=1, max_length=200)]
    # free text
    description: str = ""
    # what is sent; or `classes`: several kinds of it, or `trace`
    requests: Annotated[_Requests, Discriminator(_request_kind)]
    # when; else flags say
    stages: tuple[Stage, ...] = ()
    # what was promised
    slo: WorkloadSlo = None
    # longest drain after the load; else `timeout`. What it cuts is `unfinished`; Ctrl-C ends it (`cancelled`, not
    # valid). A closed loop by `count` ends with its last answer
    grace_ns: Grace = Field(default=cast(Any, None), validation_alias="grace")
    # of a request, from due to the end of its body
    timeout_ns: Annotated[Duration, Field(gt=0)] = Field(
        default=TIMEOUT_NS, validation_alias="timeout"
    )
    # longest silence inside a response
    stall_timeout_ns: Annotated[Duration, Field(gt=0)] = Field(
        default=STALL_TIMEOUT_NS, validation_alias="stall_timeout"
    )
    # open loop: a start above it is `dropped`, never sent late; above 5 % the run is not valid unless the SLO is
    # missed without them too
    max_in_flight: Whole | None = None
    # sent, without output yet: a lane waits for its place, which makes its request due; an open loop drops what finds
    # none. Streams only
    max_in_prefill: Whole | None = None
    # rules that end the run early
    stop_when: tuple[WrittenStopRule, ...] = ()
    # below 2^64; else fresh
    seed: Seed | None = None
    # of arrivals, LoadGen's Poisson draw bit for bit; else from `seed`
    schedule_seed: Seed | None = None
    # a word, or `fresh`: changes generated texts, not lengths or arrivals; else from the seed
    salt: Salt | None = None
    # beyond them: INVALID; beyond `event_` and `tpot_error_share` ITL and gaps, or TPOT, are withheld
    limits: Limits = Limits.model_construct()

    @classmethod
    def yaml_keys(cls) -> list[str]:
        return [*super().yaml_keys(), "classes", "trace"]

    @classmethod
    def normalize(cls, data: Any) -> Any:
        """Accept `classes: ...` in place of `requests`, and `trace: ...` in place of requests and stages."""
        if isinstance(data, Map):
            _no_part_outside(data)
            if "trace" in data:
                return _with_trace(data)
            if isinstance(data.get("stages"), Seq):
                data = data.renamed({})
                data["stages"] = spikes.written_out(data["stages"])
        if not isinstance(data, Map) or "classes" not in data:
            return data
        if "requests" in data:
            raise units.Wrong(
                "conflict", "has both requests and classes", "each class has requests of its own"
            )
        written = data.renamed({"classes": "requests"})
        written["requests"] = {"classes": data["classes"]}
        return written


class Workload(Written):
    """A checked workload. Durations are integer ns, rates floats per second; `seed` None: draw a fresh one."""

    source_text: str = ""  # the file as written, variables unexpanded
    replaced: tuple[
        str, ...
    ] = ()  # measured stages of the file, in whose place one of the command line stands

    @property
    def drain_ns(self) -> int:
        """How long requests in flight may go on after the end of the load: `grace`, or as long as a request may."""
        return self.timeout_ns if self.grace_ns is None else self.grace_ns
