"""The types of single values in a file, each with its unit and its bounds.

In a file a duration, rate or share has its unit (`30s`, `10/s`, `99%`) and is parsed to integer
nanoseconds, a number per second or a number from 0 to 1. In Python the parsed value is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, Strict, ValidationInfo, WithJsonSchema

from loadgen.core import units
from loadgen.core.workload.file_models import FileContext


def _validator_of_unit(
    parse: Callable[[str], int | float], types: tuple[type, ...], hint: str
) -> BeforeValidator:
    """Return a pydantic validator for a value with a unit, such as a duration.

    In a file such a value is text with a unit (`30s`). A number without a unit is parsed as text
    too, so that it is refused unless it is 0. In Python a value may be given as it is stored.

    Args:
        parse: Parses the text. Raises `InvalidValueError`.
        types: The types of a stored value.
        hint: An example for the message if the value has another type.
    """

    def parse_value(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            return parse(value)
        if isinstance(value, bool) or not isinstance(value, types):
            raise units.InvalidValueError("wrong_type", "is not an allowed value", hint)
        if isinstance(info.context, FileContext):
            return parse(str(value))
        return value

    return BeforeValidator(parse_value)


def _text_schema(pattern: str, example: str) -> WithJsonSchema:
    """Return the JSON Schema of a value that is written as a text with its unit."""
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]})


Duration = Annotated[
    int,
    Strict(),
    Field(ge=0),
    _validator_of_unit(units.duration_ns, (int, float), units.DURATION_HINT),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": units.DURATION_PATTERN, "examples": ["30s", "250ms"]},
                {"const": 0},
            ]
        }
    ),
]
_parse_rate = _validator_of_unit(units.rate_per_s, (int, float), units.RATE_HINT)
Rate = Annotated[float, Field(gt=0), _parse_rate, _text_schema(units.RATE_PATTERN, "10/s")]
FiniteRate = Annotated[
    float,
    Field(gt=0, allow_inf_nan=False),
    _parse_rate,
    _text_schema(units.RATE_PATTERN.replace("|inf", ""), "10/s"),
]
FiniteRateOrZero = Annotated[
    float,
    Field(ge=0, allow_inf_nan=False),
    _validator_of_unit(units.rate_or_zero_per_s, (int, float), units.RATE_HINT),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "string",
                    "pattern": units.RATE_PATTERN.replace("|inf", ""),
                    "examples": ["10/s"],
                },
                {"const": 0},
            ]
        }
    ),
]
"""A rate that may be zero, as at one end of a ramp."""
Share = Annotated[
    float,
    Field(ge=0, le=1),
    _validator_of_unit(units.share, (float, int), units.SHARE_HINT),
    _text_schema(units.SHARE_PATTERN, "99%"),
]
Quantile = Annotated[
    float,
    Field(gt=0, lt=1),
    _validator_of_unit(units.quantile, (float, int), units.QUANTILE_HINT),
    _text_schema(units.QUANTILE_PATTERN, "p99"),
]
Tokens = Annotated[int, Strict(), Field(ge=0, le=units.MOST_TOKENS)]
OneTokenOrMore = Annotated[Tokens, Field(ge=1)]
MeanTokens = Annotated[float, Strict(), Field(ge=0, le=units.MOST_TOKENS, allow_inf_nan=False)]
"""The mean or the standard deviation of a number of tokens."""
Count = Annotated[int, Strict(), Field(ge=1, le=2**40)]
"""A number of things, at least 1."""
Positive = Annotated[float, Strict(), Field(gt=0, le=1e6)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**64)]
SALT_PATTERN = "[A-Za-z0-9._-]{1,200}"
Salt = Annotated[str, Strict(), Field(pattern=f"^{SALT_PATTERN}$")]
