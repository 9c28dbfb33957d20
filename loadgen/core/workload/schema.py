"""The workload file as a whole, and the checked workload.

Durations are integer ns, and rates are floats per second. The kinds of requests are in
`request_kinds.py`, `tasks.py` and `request_classes.py`, the stages in `stages.py`, and the SLO in
`slo_fields.py`. The comments at the fields are the descriptions of the keys in docs/workloads.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, create_model
from pydantic.json_schema import SkipJsonSchema

from loadgen.core import units
from loadgen.core.limits import ValidityLimits
from loadgen.core.workload import spikes
from loadgen.core.workload.fields import Duration, Salt, Seed, Share, Whole
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.request_classes import Mix, RequestsOfOneKind, request_kind
from loadgen.core.workload.request_kinds import Synthetic
from loadgen.core.workload.slo_fields import SloField, StopRuleField
from loadgen.core.workload.stages import Stage
from loadgen.core.workload.yaml_marks import Map, Seq

DEFAULT_TIMEOUT_NS = 600 * units.NS_PER_S  # the default of the openai client
DEFAULT_STALL_TIMEOUT_NS = 120 * units.NS_PER_S  # a cold prefill of a long prompt takes a minute

TRACE_KEYS_OF_REQUESTS = ("slice", "on_bad_row", "replay", "unit")
TRACE_KEYS_OF_ARRIVALS = ("slice", "on_bad_row", "speed", "loop", "unit")
TRACE_KEYS = list(dict.fromkeys(("file", *TRACE_KEYS_OF_REQUESTS, *TRACE_KEYS_OF_ARRIVALS)))
"""The keys of a `trace:` block."""

if TYPE_CHECKING:
    Limits = Any
else:
    Limits = create_model(
        "Limits",
        __base__=Part,
        __module__=__name__,
        __doc__="The limits of the verdict (metrics.md), as shares.",
        **{limit.name: (Share, limit.default) for limit in msgspec.structs.fields(ValidityLimits)},
    )


def _refuse_null(value: Any, info: ValidationInfo) -> Any:
    if value is None and isinstance(info.context, FileContext):
        raise units.Wrong("wrong_type", "is not what belongs here", units.DURATION_HINT)
    return value


# A file may omit the grace period, but a key without a value is probably a mistake.
GracePeriod = Annotated[Duration | SkipJsonSchema[None], BeforeValidator(_refuse_null)]


class WorkloadFile(Part):
    """All keys of a workload file."""

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
    requests: Annotated[RequestsOfOneKind | Annotated[Mix, Tag("Mix")], Discriminator(request_kind)]
    # when; else flags say
    stages: tuple[Stage, ...] = ()
    # what was promised
    slo: SloField = None
    # longest drain after the load; else `timeout`. What it cuts is `unfinished`; Ctrl-C ends it
    # (`cancelled`, not valid). A closed loop by `count` ends with its last answer
    grace_ns: GracePeriod = Field(default=None, validation_alias="grace")
    # of a request, from due to the end of its body
    timeout_ns: Annotated[Duration, Field(gt=0)] = Field(
        default=DEFAULT_TIMEOUT_NS, validation_alias="timeout"
    )
    # longest silence inside a response
    stall_timeout_ns: Annotated[Duration, Field(gt=0)] = Field(
        default=DEFAULT_STALL_TIMEOUT_NS, validation_alias="stall_timeout"
    )
    # open loop: a start above it is `dropped`, never sent late; above 5 % the run is not valid
    # unless the SLO is missed without them too
    max_in_flight: Whole | None = None
    # sent, without output yet: a lane waits for its place, which makes its request due; an open
    # loop drops what finds none. Streams only
    max_in_prefill: Whole | None = None
    # rules that end the run early
    stop_when: tuple[StopRuleField, ...] = ()
    # below 2^64; else fresh
    seed: Seed | None = None
    # of arrivals, LoadGen's Poisson draw bit for bit; else from `seed`
    schedule_seed: Seed | None = None
    # a word, or `fresh`: changes generated texts, not lengths or arrivals; else from the seed
    salt: Salt | None = None
    # beyond them: INVALID; beyond `event_` and `tpot_error_share` ITL and gaps, or TPOT, are
    # withheld
    limits: Limits = Limits.model_construct()

    @classmethod
    def yaml_keys(cls) -> list[str]:
        """Return the keys of the fields and the two keys that stand for several fields."""
        return [*super().yaml_keys(), "classes", "trace"]

    @classmethod
    def normalize(cls, data: Any) -> Any:
        """Convert `classes`, `trace` and spikes to the fields that they stand for."""
        if not isinstance(data, Map):
            return data
        _refuse_keys_of_parts(data)
        if "trace" in data:
            return _with_expanded_trace(data)
        if isinstance(data.get("stages"), Seq):
            data = data.renamed({})
            data["stages"] = spikes.expand_spikes(data["stages"])
        if "classes" not in data:
            return data
        if "requests" in data:
            hint = "each class has requests of its own"
            raise units.Wrong("conflict", "has both requests and classes", hint)
        workload = data.renamed({"classes": "requests"})
        workload["requests"] = {"classes": data["classes"]}
        return workload


class Workload(WorkloadFile):
    """A checked workload. If `seed` is None, each run draws a seed."""

    # the file as written, variables unexpanded
    source_text: str = ""
    # the measured stages of the file that a stage of the command line replaced
    replaced: tuple[str, ...] = ()

    @property
    def drain_ns(self) -> int:
        """The longest time that requests in flight may take after the end of the load."""
        return self.timeout_ns if self.grace_ns is None else self.grace_ns


def _refuse_keys_of_parts(data: Map) -> None:
    """Raise an error for keys at the top that belong under `requests` or `stages`."""
    keys_at_top = {*WorkloadFile.yaml_keys(), *WorkloadFile.synonyms}
    arrival_keys = ("rate", "request_rate", "concurrency", "poisson", "closed")
    _refuse_misplaced_keys(
        [key for key in data if key in set(Synthetic.yaml_keys()) - keys_at_top],
        part="requests",
        example="requests: {{{keys}}}",
    )
    _refuse_misplaced_keys(
        [key for key in data if key in {*Stage.yaml_keys(), *arrival_keys} - keys_at_top],
        part="stages",
        example=(
            "stages: [{{arrival: {{poisson: 10/s}}, duration: 60s}}], or arrival: {{closed: 8}}"
        ),
    )


def _refuse_misplaced_keys(keys: list[str], part: str, example: str) -> None:
    if not keys:
        return
    verb = "stand" if len(keys) > 1 else "stands"
    shown_keys = ", ".join(f"{key}: ..." for key in keys)
    problem = f"{', '.join(keys)}: {verb} under {part}:"
    raise units.Wrong("unknown_key", problem, f"write {example.format(keys=shown_keys)}")


def _with_expanded_trace(data: Map) -> Map:
    """Return a workload in which a `trace:` is written as requests and stages.

    The trace is the name of a file or a block: `trace: {file: FILE, ...}`.
    """
    block = data["trace"]
    if isinstance(block, str):
        block = {"file": block}
    _check_trace_block(block)
    for key in ("requests", "classes", "stages"):
        if key in data:
            hint = (
                "a trace brings its own; apart they are written as requests: {trace: ...} "
                "and arrival: {trace: ...}"
            )
            raise units.Wrong("conflict", f"has both trace and {key}", hint)
    workload = data.renamed({"trace": "requests"})
    workload["requests"] = {
        "trace": block["file"],
        **{key: block[key] for key in TRACE_KEYS_OF_REQUESTS if key in block},
    }
    replay = {
        "file": block["file"],
        **{key: block[key] for key in TRACE_KEYS_OF_ARRIVALS if key in block},
    }
    workload["stages"] = [{"arrival": {"trace": replay}}]
    workload.keys_at["stages"] = data.keys_at["trace"]
    workload.values_at["stages"] = data.values_at["trace"]
    return workload


def _check_trace_block(block: Any) -> None:
    if not isinstance(block, dict) or "file" not in block:
        hint = "trace: {file: traffic.jsonl}, or --trace FILE"
        raise units.Wrong("missing_key", "the trace has no file", hint)
    for key in block:
        if key not in TRACE_KEYS:
            hint = f"known: {', '.join(TRACE_KEYS)}"
            raise units.Wrong("unknown_key", f"trace has no key {key}", hint)
