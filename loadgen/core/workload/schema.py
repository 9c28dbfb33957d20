"""The workload file as a whole, and the checked workload.

Durations are integer ns, and rates are floats per second. The kinds of requests are in
`request_kinds.py`, `tasks.py` and `request_classes.py`, the stages in `stages.py`, and the SLO in
`slo_fields.py`. The comments at the fields are the descriptions of the keys in
docs/reference/workload-file.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, create_model
from pydantic.json_schema import SkipJsonSchema

from loadgen.core import units
from loadgen.core.limits import ValidityLimits
from loadgen.core.workload import spikes
from loadgen.core.workload.accepted_length_field import AcceptedLengthField
from loadgen.core.workload.fields import Count, Duration, Salt, Seed, Share
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.request_classes import Mix, RequestsOfOneKind, select_request_model
from loadgen.core.workload.request_kinds import Synthetic
from loadgen.core.workload.slo_fields import SloField, StopRuleField
from loadgen.core.workload.stages import Stage
from loadgen.core.workload.yaml_marks import Map, Seq

DEFAULT_TIMEOUT_NS = 600 * units.NS_PER_S  # the default of the openai client
DEFAULT_STALL_TIMEOUT_NS = 120 * units.NS_PER_S  # a cold prefill of a long prompt takes a minute

TRACE_KEYS_OF_REQUESTS = ("slice", "on_bad_row", "replay", "unit")
"""The keys of a `trace:` block that `requests: {trace: FILE}` takes as well."""
TRACE_KEYS_OF_ARRIVALS = ("slice", "on_bad_row", "speed", "loop", "unit")
"""The keys of a `trace:` block that `arrival: {trace: {file: FILE}}` takes as well."""
KEYS_OF_ARRIVALS = ("rate", "request_rate", "concurrency", "poisson", "closed")
"""Keys of arrival processes, which users write at the top of a workload by mistake."""
TRACE_KEYS = list(dict.fromkeys(("file", *TRACE_KEYS_OF_REQUESTS, *TRACE_KEYS_OF_ARRIVALS)))
"""All keys of a `trace:` block, each of them once."""

if TYPE_CHECKING:
    Limits = Any
else:
    Limits = create_model(
        "Limits",
        __base__=Part,
        __module__=__name__,
        __doc__="The limits of the validity check (metrics.md), as fractions.",
        **{limit.name: (Share, limit.default) for limit in msgspec.structs.fields(ValidityLimits)},
    )


def _refuse_null(value: object, info: ValidationInfo) -> Any:
    """Return the value of a key. Raises `InvalidValueError` if the key of a file has no value.

    A workload that is built in Python may set the field to None.
    """
    if value is None and isinstance(info.context, FileContext):
        raise units.InvalidValueError("wrong_type", "is not an allowed value", units.DURATION_HINT)
    return value


# A file may omit the grace period, but a key without a value is probably a mistake.
GracePeriod = Annotated[Duration | SkipJsonSchema[None], BeforeValidator(_refuse_null)]


_HINT_FOR_BASE = (
    "a workload file cannot be based on another one. Run the other file and change it with "
    "options: loadgen run BASE.yaml --request-rate 10 --output-tokens 200 --slo +ttft:2s, or copy "
    "the file. "
    "Within a file, YAML anchors (&name, <<: *name) repeat a part"
)
"""Docker Compose, GitLab CI and ESLint have a key `extends`, which users of these try here."""


class WorkloadFile(Part):
    """All keys of a workload file."""

    synonyms: ClassVar[dict[str, str]] = {
        "stage": "stages",
        "load": "stages",
        "data": "requests",
        "dataset": "requests",
        "slos": "slo",
    }
    hints_for_foreign_keys: ClassVar[dict[str, str]] = dict.fromkeys(
        ("extends", "extend", "base", "include", "inherits"), _HINT_FOR_BASE
    )
    # The name of the workload in results.
    name: Annotated[str, Field(min_length=1, max_length=200)]
    # A free text, which is stored with the results.
    description: str = ""
    # The requests that are sent. `classes` (several kinds of requests) or `trace` can take its
    # place.
    requests: Annotated[
        RequestsOfOneKind | Annotated[Mix, Tag("Mix")], Discriminator(select_request_model)
    ]
    # When requests start. Without stages, options of the command line describe the load.
    stages: tuple[Stage, ...] = ()
    # The service level objective that results are judged by.
    slo: SloField = None
    # The number of tokens per step that speculative decoding is to have, as a number or the name of
    # a published length. Results are comparable if they are within 1 % of it.
    accepted_length: AcceptedLengthField = None
    # The longest time to wait for responses after the end of the load, by default `timeout`.
    # Requests that are still in flight then are cut and recorded as `unfinished`. Ctrl-C ends the
    # wait, and the run is then `cancelled` and not valid. A closed loop with a `count` ends with
    # its last response.
    grace_ns: GracePeriod = Field(default=None, validation_alias="grace")
    # The longest time of a request, from its scheduled time to the end of its response.
    timeout_ns: Annotated[Duration, Field(gt=0)] = Field(
        default=DEFAULT_TIMEOUT_NS, validation_alias="timeout"
    )
    # The longest time without data within a response.
    stall_timeout_ns: Annotated[Duration, Field(gt=0)] = Field(
        default=DEFAULT_STALL_TIMEOUT_NS, validation_alias="stall_timeout"
    )
    # The largest number of requests in flight in an open loop. A request whose scheduled time
    # comes when so many are in flight is `dropped` and never sent late. If more than 5 % are
    # dropped, the run is INVALID, unless the other requests miss the SLO as well.
    max_in_flight: Count | None = None
    # The largest number of streamed requests that were sent and have no output yet. A virtual user
    # of a closed loop waits until there is room, and its request is scheduled then. An open loop
    # drops a request for which there is no room.
    max_in_prefill: Count | None = None
    # Rules that end the run early.
    stop_when: tuple[StopRuleField, ...] = ()
    # A number below 2^64 that decides all random choices. Without it, each run draws a new one.
    seed: Seed | None = None
    # A seed for the arrivals alone, with which Poisson arrivals equal those of MLPerf LoadGen bit
    # for bit. By default it is derived from `seed`.
    schedule_seed: Seed | None = None
    # A word that changes the generated texts, but not their lengths or the arrivals. `fresh` draws
    # a new one for each run. By default the texts depend on the seed alone.
    salt: Salt | None = None
    # The limits beyond which a run is INVALID. Beyond `event_error_share`, only
    # inter-token latencies are not reported, and beyond `tpot_error_share` only TPOT is not.
    limits: Limits = Limits.model_construct()

    @classmethod
    def yaml_keys(cls) -> list[str]:
        """Return the keys of the fields and the two keys that stand for several fields."""
        return [*super().yaml_keys(), "classes", "trace"]

    @classmethod
    def convert_to_fields(cls, data: Any) -> Any:
        """Convert `classes`, `trace` and spikes to the fields `requests` and `stages`.

        Other values than a mapping are returned as they are, and pydantic reports them.
        """
        if not isinstance(data, Map):
            return data
        _refuse_misplaced_keys(data)
        if "trace" in data:
            return _with_expanded_trace(data)
        return _with_classes_as_requests(_with_expanded_spikes(data))


class Workload(WorkloadFile):
    """A checked workload. If `seed` is None, each run draws a seed."""

    # The text of the file, in which variables of the environment are not expanded.
    source_text: str = ""
    # The names of the measured stages that one stage of the command line replaced.
    replaced_stages: tuple[str, ...] = ()
    # The keys of the recorded sessions of the file, if other requests replaced these sessions.
    lost_trajectory_keys: tuple[str, ...] = ()

    @classmethod
    def from_file(
        cls, file: WorkloadFile, source_text: str, replaced_fields: Mapping[str, object]
    ) -> Workload:
        """Return the workload of a checked file, in which some fields have other values.

        Args:
            file: The workload file. Its fields are valid, so they are not validated again.
            source_text: The text of the file.
            replaced_fields: Valid values of fields that replace those of the file, by name.
        """
        fields_of_file = {name: getattr(file, name) for name in WorkloadFile.model_fields}
        all_fields = fields_of_file | dict(replaced_fields)
        return cls.model_construct(**all_fields, source_text=source_text)

    @property
    def drain_ns(self) -> int:
        """The longest time that requests in flight may take after the end of the load."""
        return self.timeout_ns if self.grace_ns is None else self.grace_ns


def _with_expanded_spikes(data: Map) -> Map:
    """Return a workload in which each spike is written as a stage with an arrival."""
    if not isinstance(data.get("stages"), Seq):
        return data
    workload = data.copy()
    workload["stages"] = spikes.expand_spikes(data["stages"])
    return workload


def _with_classes_as_requests(data: Map) -> Map:
    """Return a workload in which `classes: ...` is written as `requests: {classes: ...}`.

    Raises `InvalidValueError` if the workload has both keys.
    """
    if "classes" not in data:
        return data

    if "requests" in data:
        hint = "remove the requests of the workload; each class has its own"
        raise units.InvalidValueError("conflict", "has both requests and classes", hint)

    # The new key keeps the position of `classes` in the file, for error messages.
    workload = data.with_renamed_keys({"classes": "requests"})
    workload["requests"] = {"classes": data["classes"]}
    return workload


def _refuse_misplaced_keys(data: Map) -> None:
    """Raise `InvalidValueError` for top-level keys that belong under `requests` or `stages`.

    Without this check, a user who writes `input_tokens: 150` at the top would only learn that the
    key is unknown.
    """
    top_level_keys = {*WorkloadFile.yaml_keys(), *WorkloadFile.synonyms}
    request_keys = set(Synthetic.yaml_keys()) - top_level_keys

    keys_of_requests = [key for key in data if key in request_keys]
    if keys_of_requests:
        example = ", ".join(f"{key}: ..." for key in keys_of_requests)
        raise _misplaced_keys_error(keys_of_requests, "requests", f"requests: {{{example}}}")

    stage_keys = {*Stage.yaml_keys(), *KEYS_OF_ARRIVALS} - top_level_keys
    keys_of_stages = [key for key in data if key in stage_keys]
    if keys_of_stages:
        example = (
            "for example stages: [{arrival: {poisson: 10/s}, duration: 60s}], "
            "or arrival: {closed: 8}"
        )
        raise _misplaced_keys_error(keys_of_stages, "stages", example)


def _misplaced_keys_error(keys: list[str], parent: str, example: str) -> units.InvalidValueError:
    """Return the error for keys at the top that belong under the key `parent`."""
    verb = "stand" if len(keys) > 1 else "stands"
    problem = f"{', '.join(keys)}: {verb} under {parent}:"
    return units.InvalidValueError("unknown_key", problem, f"write {example}")


def _with_expanded_trace(data: Map) -> Map:
    """Return a workload with `requests` and `stages` in place of the short form `trace`.

    A trace says both what is sent and when. It is the name of a file, or a block such as
    `{file: traffic.jsonl, speed: 2, slice: 10m..20m}`. For this block the result is::

        requests: {trace: traffic.jsonl, slice: 10m..20m}
        stages: [{arrival: {trace: {file: traffic.jsonl, slice: 10m..20m, speed: 2}}}]

    Raises `InvalidValueError` if the block is not valid, or if the workload has requests or stages
    as well.
    """
    block = data["trace"]
    if isinstance(block, str):
        block = {"file": block}
    _check_trace_block(block)
    _refuse_keys_beside_trace(data)

    # Some keys of the block, such as the slice, are for both the requests and the arrivals.
    requests = {"trace": block["file"]} | _select_keys(block, TRACE_KEYS_OF_REQUESTS)
    replay = {"file": block["file"]} | _select_keys(block, TRACE_KEYS_OF_ARRIVALS)
    stage = {"arrival": {"trace": replay}}

    workload = data.copy()
    del workload["trace"]

    # Mistakes in the requests or the stages are reported at the position of `trace` in the file.
    trace_positions = {"key_at": data.keys_at["trace"], "value_at": data.values_at["trace"]}
    workload.add("requests", requests, **trace_positions)
    workload.add("stages", [stage], **trace_positions)

    return workload


def _select_keys(mapping: Mapping[str, object], keys: Iterable[str]) -> dict[str, Any]:
    """Return the entries of a mapping with some keys, if it has them."""
    return {key: mapping[key] for key in keys if key in mapping}


def _refuse_keys_beside_trace(data: Map) -> None:
    """Raise `InvalidValueError` if a workload has a trace and also what the trace stands for."""
    for key in ("requests", "classes", "stages"):
        if key in data:
            hint = (
                "a trace has its own requests and arrivals. To use only one of them, "
                "write requests: {trace: ...} or arrival: {trace: ...}"
            )
            raise units.InvalidValueError("conflict", f"has both trace and {key}", hint)


def _check_trace_block(block: object) -> None:
    """Raise `InvalidValueError` unless a block has a file and no unknown keys."""
    if not isinstance(block, dict) or "file" not in block:
        hint = "for example trace: {file: traffic.jsonl}, or --trace FILE"
        raise units.InvalidValueError("missing_key", "the trace has no file", hint)
    for key in block:
        if key not in TRACE_KEYS:
            hint = f"known: {', '.join(TRACE_KEYS)}"
            raise units.InvalidValueError("unknown_key", f"trace has the unknown key {key}", hint)
