"""Field types of a workload file: the base class of every part, single values with units, and distributions.

`plain_reading` reads, and pydantic says what is wrong. This module adds errors for unknown keys with their position and
the known keys, unions selected by their only key (`{poisson: 10/s}`), and units. It defines no field of a workload.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar, Union

from msgspec import Struct, field

from loadgen.core import units
from loadgen.core.errors import Fault, UserError, closest, meant, of_reading
from loadgen.core.workload.yaml_marks import Map, child, where
from loadgen.plain_reading import (
    BeforeValidator,
    Discriminator,
    Field,
    Plain,
    Strict,
    Tag,
    ValidationInfo,
    model_validator,
)


class Source(Struct, frozen=True, kw_only=True):
    """The validation context of a file: its name, its folder, and the faults that pydantic cannot express.

    `figures`: of a stored file, those of other packages that it may name though their packages are not here.
    Values built in Python have no such context: their durations are integer ns and their rates floats.
    """

    file: str
    folder: Path
    faults: list[Fault] = field(default_factory=list)
    figures: tuple[str, ...] = ()


class Part(Plain):
    """A part of a workload: frozen, and without unknown keys."""

    synonyms: ClassVar[dict[str, str]] = {}  # name of a key in other tools → our key, for hints

    @classmethod
    def keys(cls) -> list[str]:
        """The keys as they are written in YAML."""
        return [str(info.validation_alias or name) for name, info in cls.model_fields.items()]

    @classmethod
    def unwrap(cls, data: Any) -> Any:
        """Convert any accepted spelling to a mapping of this part's fields."""
        return data

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any, info: ValidationInfo) -> Any:
        source = info.context
        if not isinstance(source, Source):
            return cls.unwrap(data)
        data = cls.unwrap(data)
        if not isinstance(data, Map):
            return data
        known = cls.keys()
        unknown = [key for key in data if key not in known]
        for key in unknown:
            position = where(source.file, data.keys_at[key], child(data.path, key))
            hint, intended = meant(key, known, cls.synonyms), closest(key, known, cls.synonyms)
            values = {"meant": child(data.path, intended)} if intended else {}
            source.faults.append(
                UserError("unknown_key", f'unknown key "{key}"', position, hint, values=values)
            )
        return {key: value for key, value in data.items() if key in known} if unknown else data

    @classmethod
    def as_written(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """The JSON Schema of every accepted spelling, from that of the fields."""
        return schema


class Tagged(Part):
    """One member of a union, written as a mapping with one key: `{tag: value of the field short}` or `{tag: {...}}`."""

    tag: ClassVar[str]
    short: ClassVar[str | None] = None

    @classmethod
    def unwrap(cls, data: Any) -> Any:
        if not isinstance(data, dict) or list(data) != [cls.tag]:
            return data
        inner = data[cls.tag]
        return inner if isinstance(inner, dict) or cls.short is None else {cls.short: inner}

    @classmethod
    def as_written(cls, schema: dict[str, Any]) -> dict[str, Any]:
        schema.pop("title", None)
        short = [schema["properties"][cls.short]] if cls.short else []
        return {
            "title": cls.__name__,
            "type": "object",
            "properties": {cls.tag: {"anyOf": [*short, schema]}},
            "required": [cls.tag],
            "additionalProperties": False,
            "description": inspect.cleandoc((cls._of or cls).__doc__ or ""),
        }


class Called(Struct, frozen=True):
    """Metadata of a quantity: the suffix in the name of its distributions (`FixedTokens`), in schemas and on screen."""

    for_schemas_only: ClassVar[bool] = True
    name: str


class Picked(Struct, frozen=True):
    """Metadata of a union of parts, for `loadgen.plain_reading`: `member` is the one that reads a value, or None."""

    member: Callable[[Any], type[Part] | None]


NOTHING_FITS = "none_of"  # the error type of a union; its message is "noun: known, known"


def one_of(noun: str, *members: type[Tagged], bare: tuple[type, ...] = ()) -> Any:
    """The union of these members: the only key of a mapping selects the member.

    A value of one of the types in `bare` has no key and means `fixed`.
    """
    tags = [member.tag for member in members]

    def selected_tag(value: Any) -> str | None:
        tag = (
            value.tag
            if isinstance(value, Tagged)
            else next(iter(value), None)
            if isinstance(value, dict)
            else None
        )
        if tag in tags and not (isinstance(value, dict) and len(value) > 1):
            return tag
        return "fixed" if isinstance(value, bare) and not isinstance(value, bool) else None

    # the members are part of the message: pydantic hashes the discriminator, so no dict as custom context
    known = f"{noun}: {', '.join(tag for tag in tags if tag != 'fixed')}"
    union: Any = Union[tuple(Annotated[member, Tag(member.tag)] for member in members)]  # noqa: UP007
    by_tag = {member.tag: member for member in members}
    member = Picked(lambda value: by_tag.get(selected_tag(value) or ""))
    return Annotated[union, Discriminator(selected_tag, NOTHING_FITS, known), member]


def _value_with_unit(
    parse: Callable[[str], Any], kinds: tuple[type, ...], hint: str
) -> BeforeValidator:
    """Return a validator of a value with a unit. A text is parsed by `parse`.

    A value of another type in `kinds`: in a file it is parsed as text, so only 0 passes; from Python it is kept.
    """

    def read(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            return parse(value)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise units.Wrong("wrong_type", "is not what belongs here", hint)
        if isinstance(info.context, Source):
            return parse(str(value))
        return value

    return BeforeValidator(read)


class JsonSchema:
    """Sets the JSON Schema of a single value. (`WithJsonSchema` is not hashable; unions on Python 3.11 need that.)"""

    for_schemas_only = True

    def __init__(self, **schema: Any) -> None:
        self.schema = schema

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return dict(self.schema)


def _text_schema(pattern: str, *examples: str) -> JsonSchema:
    return JsonSchema(type="string", pattern=pattern, examples=list(examples))


Duration = Annotated[
    int,
    Called("Duration"),
    Strict(),
    Field(ge=0),
    _value_with_unit(units.duration_ns, (int, float), units.DURATION_HINT),
    JsonSchema(
        anyOf=[
            {"type": "string", "pattern": units.DURATION_PATTERN, "examples": ["30s", "250ms"]},
            {"const": 0},
        ]
    ),
]
_PER_S = _value_with_unit(units.rate_per_s, (int, float), units.RATE_HINT)
_FINITE = _text_schema(units.RATE_PATTERN.replace("|inf", ""), "10/s")
Rate = Annotated[float, Field(gt=0), _PER_S, _text_schema(units.RATE_PATTERN, "10/s")]
FiniteRate = Annotated[float, Field(gt=0, allow_inf_nan=False), _PER_S, _FINITE]
Share = Annotated[
    float,
    Field(ge=0, le=1),
    _value_with_unit(units.share, (float, int), units.SHARE_HINT),
    _text_schema(units.SHARE_PATTERN, "99%"),
]
Quantile = Annotated[
    float,
    Field(gt=0, lt=1),
    _value_with_unit(units.quantile, (float, int), units.QUANTILE_HINT),
    _text_schema(units.QUANTILE_PATTERN, "p99"),
]
Tokens = Annotated[int, Called("Tokens"), Strict(), Field(ge=0, le=units.MOST_TOKENS)]
# Mean or standard deviation of a token count.
Amount = Annotated[float, Strict(), Field(ge=0, le=units.MOST_TOKENS, allow_inf_nan=False)]
Whole = Annotated[int, Strict(), Field(ge=1, le=2**40)]  # a count
Positive = Annotated[float, Strict(), Field(gt=0, le=1e6)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**64)]
SALT_PATTERN = "[A-Za-z0-9._-]{1,200}"
Salt = Annotated[str, Strict(), Field(pattern=f"^{SALT_PATTERN}$")]  # a word, or fresh

Q = TypeVar("Q")  # the quantity: Tokens, Duration
M = TypeVar("M")  # its mean and standard deviation: Amount, Duration


class Fixed(Tagged, Generic[Q]):
    """Always the same."""

    tag = "fixed"
    short = "value"
    value: Q

    @classmethod
    def unwrap(cls, data: Any) -> Any:
        return super().unwrap(data) if isinstance(data, dict) else {"value": data}

    @classmethod
    def as_written(cls, schema: dict[str, Any]) -> dict[str, Any]:
        tagged = super().as_written(schema)
        bare = tagged["properties"][cls.tag]["anyOf"][0]
        return {
            "title": tagged.pop("title"),
            "description": tagged.pop("description"),
            "anyOf": [bare, tagged],
        }


class _Range(Tagged):
    """A distribution with `min` and `max`."""

    @model_validator(mode="after")
    def _ordered(self) -> _Range:
        low, high = getattr(self, "min"), getattr(self, "max")  # noqa: B009
        if low is not None and high is not None and low > high:
            raise units.Wrong("out_of_range", "has its min above its max", "swap min and max")
        return self


class Uniform(_Range, Generic[Q]):
    """Every whole value from min to max, both included, equally likely."""

    tag = "uniform"
    min: Q
    max: Q


class Normal(_Range, Generic[Q, M]):
    """Normal, rounded, then held inside [min, max] by drawing again; min defaults to 1 token, or no time."""

    tag = "normal"
    mean: M
    stddev: M
    min: Q | None = None
    max: Q | None = None


class LogNormal(_Range, Generic[Q, M]):
    """exp(N(ln median, sigma)), rounded and held like `normal`. Written with `median` or with `mean` (of the unheld
    law: median = mean / exp(sigma^2 / 2)).
    """

    tag = "lognormal"
    median: M | None = None
    mean: M | None = None
    sigma: Annotated[float, Strict(), Field(gt=0, le=10)]
    min: Q | None = None
    max: Q | None = None

    @model_validator(mode="after")
    def _one_center(self) -> LogNormal[Q, M]:
        if (self.median is None) == (self.mean is None):
            raise units.Wrong(
                "conflict",
                "needs exactly one of median and mean",
                "lognormal: {median: 300, sigma: 0.8}",
            )
        if not (self.median or self.mean):
            raise units.Wrong(
                "out_of_range",
                "needs a median or mean above zero",
                "lognormal: {median: 300, sigma: 0.8}",
            )
        return self


class _Values(Tagged, Generic[Q]):
    """A list of values. They may stand in a file, one per line, named relative to the workload."""

    short = "values"
    values: tuple[Q, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _file(cls, data: Any, info: ValidationInfo) -> Any:
        body = cls.unwrap(data)
        if (
            isinstance(body, dict)
            and isinstance(body.get("values"), str)
            and isinstance(info.context, Source)
        ):
            replacement = {"values": _read_column(info.context.folder / body["values"])}
            if isinstance(
                body, Map
            ):  # keep the positions of the keys, so that unknown keys are still reported
                body.update(replacement)
                return data
            return {**body, **replacement}
        return data

    @classmethod
    def as_written(cls, schema: dict[str, Any]) -> dict[str, Any]:
        tagged = super().as_written(schema)
        choices = tagged["properties"][cls.tag]["anyOf"]
        file = {"type": "string", "description": "a file with one value per line"}
        properties = choices[1]["properties"]
        properties["values"] = {"anyOf": [properties["values"], file]}
        choices.append(file)
        return tagged


class Empirical(_Values[Q], Generic[Q]):
    """One of the values, drawn with its weight (equal weights if none are given). Values may stand in a file, one per
    line, named relative to the workload.
    """

    tag = "empirical"
    weights: tuple[Annotated[float, Strict(), Field(ge=0, le=1e12)], ...] | None = None

    @model_validator(mode="after")
    def _weights_fit(self) -> Empirical[Q]:
        if self.weights is None:
            return self
        if len(self.weights) != len(self.values):
            problem = f"has {len(self.values)} values but {len(self.weights)} weights"
            raise units.Wrong("mismatch", problem, "one weight per value")
        if not sum(self.weights):
            raise units.Wrong("out_of_range", "has no weight above zero", "one weight per value")
        return self


class Listed(_Values[Q], Generic[Q]):
    """The values one after the other, request by request, and from the first again: a data set's lengths in its order.
    Values may stand in a file, as with `empirical`.
    """

    tag = "listed"


def _read_column(path: Path) -> list[Any]:
    """The lines of a one-column file, whole numbers as int. Skips blank lines and `#` lines. Raises `Wrong`."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        hint = "a text file with one value per line, named relative to the workload"
        raise units.Wrong(of_reading(error), f"cannot be read: {reason}", hint) from None
    entries = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return [int(text) if text.isdecimal() else text for text in entries]


# ------------------------------------------------------------------------------------------------- lengths and delays

OneTokenOrMore = Annotated[Tokens, Field(ge=1)]  # keeps the name `Tokens` in the schema
if TYPE_CHECKING:
    Length = (
        Fixed[int]
        | Uniform[int]
        | Normal[int, float]
        | LogNormal[int, float]
        | Empirical[int]
        | Listed[int]
    )
    """A distribution of token counts, each at least 1. A plain number in YAML is `Fixed`."""
    Delay = Fixed[int] | Uniform[int] | Normal[int, int] | LogNormal[int, int] | Empirical[int]
    """A distribution of durations in ns, with the same shapes except `listed`."""
else:
    _N = OneTokenOrMore
    Length = one_of(
        "length",
        Fixed[_N],
        Uniform[_N],
        Normal[_N, Amount],
        LogNormal[_N, Amount],
        Empirical[_N],
        Listed[_N],
        bare=(int, float),
    )
    _D = Duration
    Delay = one_of(
        "delay",
        Fixed[_D],
        Uniform[_D],
        Normal[_D, _D],
        LogNormal[_D, _D],
        Empirical[_D],
        bare=(int, float, str),
    )
