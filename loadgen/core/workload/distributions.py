"""Distributions of numbers of tokens and of durations, as a workload file writes them.

`Length` and `Delay` are the types of fields. A plain value (`150`, `2s`) means that the value is
always the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, Strict, ValidationInfo, model_validator
from pydantic.json_schema import JsonSchemaValue

from loadgen.core import units
from loadgen.core.errors import of_reading
from loadgen.core.workload.fields import Duration, MeanTokens, OneTokenOrMore
from loadgen.core.workload.file_models import FileContext, Tagged, TaggedUnion


class Fixed(Tagged):
    """Always the same."""

    tag = "fixed"
    short = "value"
    value: int

    @classmethod
    def convert_to_fields(cls, data: Any) -> Any:
        """Accept the bare value, too."""
        return super().convert_to_fields(data) if isinstance(data, dict) else {"value": data}

    @classmethod
    def extend_json_schema(cls, schema: JsonSchemaValue) -> JsonSchemaValue:
        """Return a JSON Schema that accepts `300` as well as `{fixed: 300}`."""
        bare_value_schema = cls.short_form_schema(schema)
        tagged_value_schema = super().extend_json_schema(schema)

        # Title and description belong to both alternatives.
        title = tagged_value_schema.pop("title")
        description = tagged_value_schema.pop("description")
        return {
            "title": title,
            "description": description,
            "anyOf": [bare_value_schema, tagged_value_schema],
        }


class Uniform(Tagged):
    """Every whole value from min to max, both included, equally likely."""

    tag = "uniform"
    min: int
    max: int

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        _check_order(self.min, self.max)
        return self


class Normal(Tagged):
    """A normal distribution, rounded to whole values. A value outside [min, max] is drawn again.

    `min` defaults to 1 token or to no time.
    """

    tag = "normal"
    mean: float
    stddev: float
    min: int | None = None
    max: int | None = None

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        _check_order(self.min, self.max)
        return self


class LogNormal(Tagged):
    """A log-normal distribution, rounded and kept inside [min, max] like `Normal`.

    It is exp(N(ln median, sigma)). It is written with `median` or with `mean`. The mean is that of
    the distribution without `min` and `max`, so that median = mean / exp(sigma^2 / 2).
    """

    tag = "lognormal"
    median: float | None = None
    mean: float | None = None
    sigma: Annotated[float, Strict(), Field(gt=0, le=10)]
    min: int | None = None
    max: int | None = None

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        _check_order(self.min, self.max)
        return self

    @model_validator(mode="after")
    def _check_one_center(self) -> Self:
        """Refuse a distribution with both or neither of median and mean, or with a value of 0.

        The fields of each kind of value have refused negative numbers already.
        """
        example = "lognormal: {median: 300, sigma: 0.8}"
        if (self.median is None) == (self.mean is None):
            raise units.InvalidValueError(
                "conflict", "needs exactly one of median and mean", example
            )
        if not self.median and not self.mean:
            raise units.InvalidValueError(
                "out_of_range", "needs a median or mean above zero", example
            )

        return self


class ListOfValues(Tagged):
    """The base class of distributions with a list of values, which may be in a file."""

    short = "values"
    values: tuple[int, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _read_values_from_file(cls, data: Any, info: ValidationInfo) -> Any:
        """Replace the name of a file under `values` by the values in that file.

        For example, `{empirical: {values: a.txt}}` and its short form `{empirical: a.txt}` both
        become `{values: [100, 200]}` if the file `a.txt` has these two lines. The name is relative
        to the directory of the workload file. A distribution that is built in Python has no such
        file, so it stays as it is.
        """
        if not isinstance(info.context, FileContext):
            return data

        fields = cls.convert_to_fields(data)
        file_name = fields.get("values") if isinstance(fields, dict) else None
        if not isinstance(file_name, str):
            return data

        # A mapping of a workload file also copies the positions of its keys, for error messages.
        fields_with_values = fields.copy()
        fields_with_values["values"] = _read_column(info.context.directory / file_name)
        return fields_with_values

    @classmethod
    def extend_json_schema(cls, schema: JsonSchemaValue) -> JsonSchemaValue:
        """Return a JSON Schema that accepts the name of a file in place of a list of values.

        A list can be written in two ways, `{empirical: LIST}` and `{empirical: {values: LIST}}`.
        The result accepts `{empirical: FILE}` and `{empirical: {values: FILE}}` as well.
        """
        tagged_schema = super().extend_json_schema(schema)

        # `Tagged.extend_json_schema` returns the schemas of LIST and {values: LIST} in this order.
        list_schema, fields_schema = tagged_schema["properties"][cls.tag]["anyOf"]
        file_schema = {"type": "string", "description": "give a file with one value per line"}

        fields_schema_with_file = _with_property(
            fields_schema, "values", {"anyOf": [list_schema, file_schema]}
        )
        accepted_schemas = [list_schema, fields_schema_with_file, file_schema]
        return _with_property(tagged_schema, cls.tag, {"anyOf": accepted_schemas})


def _with_property(
    object_schema: JsonSchemaValue, name: str, property_schema: JsonSchemaValue
) -> JsonSchemaValue:
    """Return the JSON Schema of an object, with another schema for one of its properties."""
    properties = object_schema["properties"] | {name: property_schema}
    return object_schema | {"properties": properties}


class Empirical(ListOfValues):
    """One of the values, drawn with its weight. Without weights all values are equally likely."""

    tag = "empirical"
    weights: tuple[Annotated[float, Strict(), Field(ge=0, le=1e12)], ...] | None = None

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        """Refuse weights that do not belong to the values, or that are all zero."""
        if self.weights is None:
            return self

        if len(self.weights) != len(self.values):
            problem = f"has {len(self.values)} values but {len(self.weights)} weights"
            raise units.InvalidValueError("mismatch", problem, "give one weight per value")

        if not sum(self.weights):
            raise units.InvalidValueError(
                "out_of_range", "has no weight above zero", "give one weight per value"
            )

        return self


class Listed(ListOfValues):
    """The values one after the other, request by request, and then from the first again."""

    tag = "listed"


def _check_order(low: Any, high: Any) -> None:
    """Raise `InvalidValueError` if both bounds are set and the lower one is above the upper one."""
    if low is not None and high is not None and low > high:
        raise units.InvalidValueError("out_of_range", "has a min above its max", "swap min and max")


def _read_column(path: Path) -> list[int | str]:
    """Return the lines of a file with one column. Whole numbers become int.

    Blank lines and lines that begin with `#` are skipped. Raises `InvalidValueError` if the file
    cannot be read.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        hint = "give a text file with one value per line; its path is relative to the workload"
        raise units.InvalidValueError(
            of_reading(error), f"cannot be read: {reason}", hint
        ) from None

    entries = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return [int(text) if text.isdecimal() else text for text in entries]


class FixedTokens(Fixed):
    """Always the same number of tokens."""

    value: OneTokenOrMore


class UniformTokens(Uniform):
    """Every number of tokens from min to max, both included, equally likely."""

    min: OneTokenOrMore
    max: OneTokenOrMore


class NormalTokens(Normal):
    """Normally distributed and rounded.

    A number outside [min, max] is drawn again; min defaults to 1.
    """

    mean: MeanTokens
    stddev: MeanTokens
    min: OneTokenOrMore | None = None
    max: OneTokenOrMore | None = None


class LogNormalTokens(LogNormal):
    """Log-normally distributed, exp(N(ln median, sigma)), and rounded.

    A number outside [min, max] is drawn again; min defaults to 1. Written with `median`, or with
    `mean`, where median = mean / exp(sigma^2 / 2).
    """

    median: MeanTokens | None = None
    mean: MeanTokens | None = None
    min: OneTokenOrMore | None = None
    max: OneTokenOrMore | None = None


class EmpiricalTokens(Empirical):
    """One of the values, drawn with its weight.

    The values may be in a file, one per line.
    """

    values: tuple[OneTokenOrMore, ...] = Field(min_length=1)


class ListedTokens(Listed):
    """The values in their order, and then from the first again.

    The values may be in a file, one per line.
    """

    values: tuple[OneTokenOrMore, ...] = Field(min_length=1)


Length = Annotated[
    FixedTokens | UniformTokens | NormalTokens | LogNormalTokens | EmpiricalTokens | ListedTokens,
    TaggedUnion("length", bare_types=(int, float)),
]
"""A distribution of numbers of tokens, each at least 1."""


class FixedDuration(Fixed):
    """Always the same duration."""

    value: Duration


class UniformDuration(Uniform):
    """Every duration from min to max, equally likely."""

    min: Duration
    max: Duration


class NormalDuration(Normal):
    """Normally distributed.

    A duration outside [min, max] is drawn again; min defaults to 0.
    """

    mean: Duration
    stddev: Duration
    min: Duration | None = None
    max: Duration | None = None


class LogNormalDuration(LogNormal):
    """Log-normally distributed, exp(N(ln median, sigma)).

    A duration outside [min, max] is drawn again; min defaults to 0. Written with `median`, or with
    `mean`, where median = mean / exp(sigma^2 / 2).
    """

    median: Duration | None = None
    mean: Duration | None = None
    min: Duration | None = None
    max: Duration | None = None


class EmpiricalDuration(Empirical):
    """One of the values, drawn with its weight.

    The values may be in a file, one per line.
    """

    values: tuple[Duration, ...] = Field(min_length=1)


Delay = Annotated[
    FixedDuration | UniformDuration | NormalDuration | LogNormalDuration | EmpiricalDuration,
    TaggedUnion("delay", bare_types=(int, float, str)),
]
"""A distribution of durations in nanoseconds."""
