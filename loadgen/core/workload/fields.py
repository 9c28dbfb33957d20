"""The types of single values in a file, each with its unit and its bounds.

In a file a duration, rate or share has its unit (`30s`, `10/s`, `99%`) and is parsed to integer
nanoseconds, a number per second or a number from 0 to 1. In Python the parsed value is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, Strict, ValidationInfo, WithJsonSchema

from loadgen.core import units
from loadgen.core.workload.file_models import FileContext


@dataclass(frozen=True)
class _UnitParser:
    """Parses a value with a unit, such as a duration, from a workload file or from Python.

    Attributes:
        parse_text: Parses a text such as `30s`. Raises `InvalidValueError`.
        number_types: The types of the numbers that are accepted.
        hint: An example for the message if the value has another type.
    """

    parse_text: Callable[[str], int | float]
    number_types: tuple[type, ...]
    hint: str

    def parse(self, value: Any, info: ValidationInfo) -> Any:
        """Return the number that a value stands for. Pydantic calls this for a field.

        In Python, a number is the value itself, for example a duration in ns. In a file, a number
        is parsed like a text without a unit, which is an error unless it is 0. Raises
        `InvalidValueError` for a value of another type.
        """
        if isinstance(value, str):
            return self.parse_text(value)

        # In Python, True and False are integers.
        is_number = isinstance(value, self.number_types) and not isinstance(value, bool)
        if not is_number:
            raise units.InvalidValueError("wrong_type", "is not an allowed value", self.hint)

        is_from_file = isinstance(info.context, FileContext)
        return self.parse_text(str(value)) if is_from_file else value


def _validator_of_unit(
    parse_text: Callable[[str], int | float], number_types: tuple[type, ...], hint: str
) -> BeforeValidator:
    """Return a pydantic validator for a value with a unit. `_UnitParser` explains the arguments."""
    return BeforeValidator(_UnitParser(parse_text, number_types, hint).parse)


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
