"""The stages of a load and their arrival processes, as a workload file describes them.

The comments at the fields are the descriptions of the keys in docs/reference/workload-file.md.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, Strict, model_validator
from pydantic.json_schema import JsonSchemaValue

from loadgen.core import units
from loadgen.core.workload import spikes
from loadgen.core.workload.fields import (
    Count,
    Duration,
    FiniteRate,
    FiniteRateOrZero,
    Positive,
    Rate,
)
from loadgen.core.workload.file_models import Part, Tagged, TaggedUnion
from loadgen.core.workload.request_kinds import ExistingFile, OnBadRow, TimeSlice, TraceReplay
from loadgen.core.workload.yaml_marks import Map

MAX_CONCURRENCY = 1_000_000
Concurrency = Annotated[int, Strict(), Field(ge=1, le=MAX_CONCURRENCY)]


class Constant(Tagged):
    """Requests at even distances, `rate` per second.

    With an infinite rate all requests are due at once.
    """

    tag = "constant"
    short = "rate"
    rate: Rate


class Poisson(Tagged):
    """Independent arrivals, `rate` per second.

    The gaps are exponential and drawn as MLPerf LoadGen draws them.
    """

    tag = "poisson"
    short = "rate"
    rate: FiniteRate


class Gamma(Tagged):
    """Gaps with a gamma distribution of shape `burstiness`.

    Arrivals are burstier than Poisson below 1 and more even above 1.
    """

    tag = "gamma"
    rate: FiniteRate
    burstiness: Positive


class Ramp(Tagged):
    """Poisson arrivals whose rate changes linearly over the duration of the stage.

    One of the two rates may be zero.
    """

    tag = "ramp"
    from_rate: FiniteRateOrZero = Field(validation_alias="from")
    to_rate: FiniteRateOrZero = Field(validation_alias="to")

    @property
    def mean_rate(self) -> float:
        """The mean of the rate over the stage, per second."""
        return (self.from_rate + self.to_rate) / 2

    @model_validator(mode="after")
    def _check_sends_something(self) -> Self:
        if not self.from_rate and not self.to_rate:
            hint = "use a rate above zero for one of them: {ramp: {from: 0/s, to: 20/s}}"
            raise units.InvalidValueError("out_of_range", "is a ramp from zero to zero", hint)
        return self


class Closed(Tagged):
    """Virtual users, each of which sends its next request when its last one has ended.

    The users start one after the other, evenly over `ramp`. `0s` means all at once, and without
    `ramp` they start over the length of a response.
    """

    tag = "closed"
    short = "concurrency"
    concurrency: Concurrency
    ramp_ns: Duration | None = Field(default=None, validation_alias="ramp")


class Replay(Tagged):
    """The times at which the requests of a trace came, `speed` times as fast.

    Without duration and count the whole trace is replayed, `loop` times.
    """

    tag = "trace"
    short = "file"
    # The file of the trace. It can be left out if `--trace` names the file.
    file: ExistingFile
    # The factor by which arrivals are faster than in the trace. Pauses within a session stay as
    # they are.
    speed: Positive = 1.0
    # The part of the trace that is replayed: `10m..20m`, `10m..` or `..20m`, from its first request
    # on.
    slice_ns: TimeSlice | None = Field(default=None, validation_alias="slice")
    # How many times the trace is replayed, with new texts each time. `--duration` may end it
    # earlier.
    loop: Annotated[int, Strict(), Field(ge=1, le=1_000_000)] = 1
    # With `skip`, rows with mistakes are left out and counted.
    on_bad_row: OnBadRow = "fail"
    # With `instants`, each request starts at its time in the trace. With `sessions`, a request
    # waits for the responses that it followed in the trace, and then for the recorded pause.
    # Sessions are counted and reported as tasks are.
    replay: TraceReplay = "instants"
    # The unit of the times, for formats that do not define it. By default it is decided from all
    # rows.
    unit: units.TimeUnit | None = None


Arrival = Annotated[
    Constant | Poisson | Gamma | Ramp | Closed | Replay,
    TaggedUnion("arrival"),
]


class AtLeast(Part):
    """Minimums in place of bounds, as in MLPerf.

    The stage goes on until the last arrival is at or after the duration and there are at least
    `count` requests. Then it goes on up to a multiple of `passes_of`, the size of a data set.
    """

    synonyms: ClassVar[dict[str, str]] = {
        "num_requests": "count",
        "requests": "count",
        "time": "duration",
    }
    duration_ns: Duration = Field(default=0, validation_alias="duration")
    count: Count = 1
    passes_of: Count = 1


class Stage(Part):
    """A part of the run with one arrival process.

    It ends after its duration or after `count` requests (conversations or tasks, where there are
    any), whichever comes first, or by the minimums of `at_least`, with Poisson arrivals only. A
    loaded workload sets at least one of them.
    """

    synonyms: ClassVar[dict[str, str]] = {
        "rate": "arrival",
        "request_rate": "arrival",
        "concurrency": "arrival",
        "num_requests": "count",
        "requests": "count",
        "time": "duration",
    }
    # The name of the stage in results.
    name: str = ""
    # When requests start. `spike: 3x for 60s` can take its place.
    arrival: Arrival
    # The length of the stage.
    duration_ns: Annotated[Duration, Field(gt=0)] | None = Field(
        default=None, validation_alias="duration"
    )
    # The number of requests, conversations or tasks after which the stage ends, if its duration has
    # not ended it before.
    count: Count | None = None
    # Minimums in place of `duration` and `count`, for Poisson arrivals only. As in MLPerf, the
    # stage goes on until the duration is over and there are `count` requests, and then up to a
    # multiple of `passes_of` requests.
    at_least: AtLeast | None = None
    # With `false`, or with `warmup: true`, requests are sent and recorded but left out of the
    # results.
    measured: Annotated[bool, Strict()] = True

    @model_validator(mode="after")
    def _check_minimums_stand_alone(self) -> Self:
        """Refuse minimums (`at_least`) with a duration or count, and without Poisson arrivals.

        Minimums are MLPerf's way to end a stage: it lasts at least so long and has at least so many
        requests.
        """
        if self.at_least is None:
            return self

        hint = (
            "write at_least: {duration: 600s, passes_of: 24576} without other "
            "bounds, in a stage with arrival: {poisson: ...}"
        )
        if not isinstance(self.arrival, Poisson):
            problem = "has minimums (at_least), but its arrivals are not poisson"
            raise units.InvalidValueError("unsupported", problem, hint)

        if self.duration_ns is not None or self.count is not None:
            raise units.InvalidValueError(
                "conflict", "has both minimums (at_least) and other bounds", hint
            )

        return self

    @classmethod
    def yaml_keys(cls) -> list[str]:
        """Return the keys of the fields and the two other spellings."""
        return [*super().yaml_keys(), "warmup", "spike"]

    @classmethod
    def convert_to_fields(cls, data: Any) -> Any:
        """Return the stage as it is written with `measured` in place of the key `warmup`.

        `warmup: true` has the same meaning as `measured: false`. Pydantic calls this before it
        validates a stage. Raises `InvalidValueError` for a stage with both keys, and for an invalid
        spike.
        """
        if not isinstance(data, Map):
            return data
        _refuse_invalid_spike(data)
        return _with_warmup_as_measured(data) if "warmup" in data else data

    @classmethod
    def extend_json_schema(cls, schema: JsonSchemaValue) -> JsonSchemaValue:
        """Return a JSON Schema that accepts the other spellings, `warmup` and `spike`."""
        schema["properties"]["warmup"] = {
            "type": "boolean",
            "description": "true has the same meaning as measured: false",
        }
        schema["properties"]["spike"] = {
            "type": "string",
            "pattern": spikes.SPIKE_PATTERN,
            "description": (
                "a multiple of the load in the stage before, instead of arrival, duration and count"
            ),
        }
        schema["required"].remove("arrival")
        schema["not"] = {"required": ["measured", "warmup"]}
        schema["oneOf"] = [{"required": ["arrival"]}, {"required": ["spike"]}]

        return schema


def _refuse_invalid_spike(stage: Map) -> None:
    """Raise the error of a stage whose `spike` is not valid.

    Valid spikes such as `spike: 3x for 60s` have been replaced by an arrival process when the list
    of stages was read, because they depend on the stage before. An invalid one has been replaced by
    its error. It is raised only here, so that pydantic reports it with the position of the stage.
    """
    spike = stage.get("spike")
    if isinstance(spike, spikes.InvalidSpike):
        raise spike.error


def _with_warmup_as_measured(stage: Map) -> Map:
    """Return a stage in which `warmup: true` is written as `measured: false`.

    Raises `InvalidValueError` for a stage with both keys. A value that is not a boolean is kept, so
    that pydantic reports it.
    """
    if "measured" in stage:
        hint = "keep one of them: warmup: true means measured: false"
        raise units.InvalidValueError("conflict", "has both measured and warmup", hint)

    warmup = stage["warmup"]
    converted = stage.with_renamed_keys({"warmup": "measured"})
    if isinstance(warmup, bool):
        converted["measured"] = not warmup

    return converted
