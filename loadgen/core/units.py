"""Parse values with units, such as `30s`, `250ms`, `10/s`, `99%` and `p95`.

Pure, and shared by workload files and options. Every function raises `InvalidValueError`, whose
text is the predicate of a sentence such as '"30 sekunds" must be a duration', with a hint what to
write.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Literal, TypeAlias

from loadgen.core.errors import Code

NS_PER_S = 1_000_000_000
UNIT_NS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": NS_PER_S,
    "m": 60 * NS_PER_S,
    "min": 60 * NS_PER_S,
    "h": 3_600 * NS_PER_S,
    "d": 24 * 3_600 * NS_PER_S,
}
TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns"]
"""A unit of the times in a file; a key of `UNIT_NS`."""
SECONDS_PER_UNIT = {"s": 1, "min": 60, "m": 60, "h": 3_600}
"""The units of time of a rate, such as the `min` of `600/min`."""
MOST_TOKENS = 10_000_000  # of a prompt or an answer: ten times the longest known context
LONGEST_NS = 366 * 24 * UNIT_NS["h"]  # one year, so that sums of durations fit easily into 64 bits

NUMBER = r"[0-9]{1,18}(\.[0-9]{1,18})?"
DURATION_PATTERN = rf"^({NUMBER} ?(ns|us|µs|ms|s|m|min|h|d)|([0-9]+[dhms])+|0)$"
RATE_PATTERN = rf"^({NUMBER} ?/ ?(s|min|m|h)|inf)$"
SHARE_PATTERN = r"^(100(\.0{1,18})?|[0-9]{1,2}(\.[0-9]{1,18})?) ?%$"
QUANTILE_PATTERN = r"^p[0-9]{1,2}(\.[0-9]{1,4})?$"

_SEVERAL_UNITS = re.compile(
    r"((?P<d>[0-9]{1,9})d)?((?P<h>[0-9]{1,9})h)?((?P<m>[0-9]{1,9})m)?((?P<s>[0-9]{1,9})s)?"
)
_UNITS_BY_OTHER_NAMES = {
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("day", "days"), "d"),
    **dict.fromkeys(("msec", "msecs", "millisecond", "milliseconds"), "ms"),
}
"""Maps what people also call a unit of time to the unit, for hints."""
_QUANTITY = re.compile(rf"(?P<number>{NUMBER}) ?(?P<unit>[A-Za-zµ]*)")
_RATE = re.compile(rf"(?P<number>{NUMBER}) ?/ ?(?P<unit>[A-Za-z]+)")

DURATION_HINT = (
    "write a number and its unit, like 250ms, 30s, 2m, 1m30s or 1h (units: ns, us, ms, s, m, h, d)"
)
RATE_HINT = "write a number per unit of time, like 10/s or 600/min (units: s, min, h)"
SHARE_HINT = "write a percentage, like 99% or 0.5%"
QUANTILE_HINT = "write a percentile, like p50, p99 or p99.9"


class InvalidValueError(ValueError):
    """A text is not valid.

    `str()` of it is a predicate "must be a duration", `hint` tells what to write instead, and
    `key` is the column or key of the text in a row with several.
    """

    def __init__(self, code: Code, predicate: str, hint: str, key: str = "") -> None:
        super().__init__(predicate)
        self.code = code
        self.hint = hint
        self.key = key


def seconds(text: str) -> float:
    """Return the seconds of `30s`, `2m` or a bare `30`. Raises `InvalidValueError`."""
    return duration_ns(text, default_unit="s") / 1e9


def duration_ns(text: str, default_unit: str | None = None) -> int:
    """Return the nanoseconds of `30s`, `250ms`, `2m`, `1m30s` or `1h`; at most one year.

    Args:
        text: The duration.
        default_unit: The unit of a number without one: "s" for options, "ms" for `goodput`. If it
            is None, every number but 0 needs a unit.

    Raises:
        InvalidValueError: The text is no duration, or it is out of range.
    """
    text = text.strip()
    several_units = _SEVERAL_UNITS.fullmatch(text)
    # All units of the pattern are optional, so it also matches an empty text.
    if text and several_units is not None:
        # The groups of the pattern are named after the units: `1m30s` gives {"m": "1", "s": "30"}.
        number_by_unit = several_units.groupdict(default="0")
        return _within_a_year(
            sum(int(number) * UNIT_NS[unit] for unit, number in number_by_unit.items())
        )

    one_unit = _QUANTITY.fullmatch(text)
    if one_unit is None:
        raise InvalidValueError("invalid_value", "must be a duration", DURATION_HINT)
    return _quantity_ns(one_unit["number"], one_unit["unit"] or default_unit)


def _quantity_ns(number_text: str, unit: str | None) -> int:
    """Return the nanoseconds of a number of units. Only the number 0 needs no unit.

    Raises `InvalidValueError`.
    """
    number = Decimal(number_text)
    if number == 0 and unit is None:
        return 0
    if unit is None:
        raise InvalidValueError(
            "invalid_value", "needs a unit", f"write {number_text}s or {number_text}ms"
        )
    if unit not in UNIT_NS:
        raise _unknown_unit_error(number_text, unit)
    ns = _within_a_year(round(number * UNIT_NS[unit]))
    if ns == 0 and number > 0:
        raise InvalidValueError("out_of_range", "must be at least 1 ns", DURATION_HINT)
    return ns


def _unknown_unit_error(number_text: str, unit: str) -> InvalidValueError:
    """Return the error of an unknown unit, with a hint such as `did you mean "5s"?`."""
    hint = DURATION_HINT
    suggested_unit = _suggest_unit(unit)
    if suggested_unit:
        hint = f'did you mean "{number_text}{suggested_unit}"? {DURATION_HINT}'
    return InvalidValueError("invalid_value", f'has the unknown unit "{unit}"', hint)


def _within_a_year(ns: int) -> int:
    """Return a duration in ns. Raises `InvalidValueError` if it is longer than a year."""
    if ns > LONGEST_NS:
        raise InvalidValueError("out_of_range", "must be at most a year", DURATION_HINT)
    return ns


def _suggest_unit(written: str) -> str:
    """Return the unit of time that was probably meant, or "" if there is none."""
    lowered = written.lower()
    if lowered in UNIT_NS and written != "M":  # M may be a month
        return lowered
    return _UNITS_BY_OTHER_NAMES.get(lowered, "")


def time_slice(text: str, default_unit: str | None = None) -> tuple[int, int | None]:
    """Parse a range of time: return the begin and the end of `10m..20m`, `10m..` or `..20m` in ns.

    The begin defaults to 0, and an end of None means no end. A number without a unit has the
    `default_unit`. Raises `InvalidValueError` if the text is no such range, if a duration in it is
    not valid, or if the end is not after the begin.
    """
    hint = "write 10m..20m, 10m.. (to the end) or ..20m (from the beginning)"
    begin, dots, end = text.strip().partition("..")
    if not dots or not (begin or end):
        raise InvalidValueError("invalid_value", "must be a time range", hint)
    begin_ns = duration_ns(begin, default_unit) if begin else 0
    end_ns = duration_ns(end, default_unit) if end else None
    if end_ns is not None and end_ns <= begin_ns:
        raise InvalidValueError("out_of_range", "must end after it starts", hint)
    return begin_ns, end_ns


_COUNT = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<suffix>[kM]?)")
_COUNT_FACTORS = {"": 1, "k": 1_000, "M": 1_000_000}


def count(text: str) -> int:
    """Return the integer of `5000`, `5,000` or `5k`, at least 1. Raises `InvalidValueError`."""
    match = _COUNT.fullmatch(text.strip().replace(",", "").replace("_", ""))
    number = float(match["number"]) * _COUNT_FACTORS[match["suffix"]] if match else 0.0
    is_integer = number == int(number)
    if not is_integer or not 1 <= number < 1e12:
        raise InvalidValueError("invalid_value", "must be an integer", "for example 5000 or 5k")
    return int(number)


_LOWEST_RATE_PER_S = 1e-6
"""One event in a million seconds, which is between eleven and twelve days."""


def rate_per_s(text: str, default_unit: str | None = None) -> float:
    """Return the events per second of `10/s` or `600/min`, always above zero.

    The text `inf` is an infinite rate: all events are at once.

    Args:
        text: The rate.
        default_unit: The unit of time of a number without one, such as "s" for options. Without it
            the text needs a unit.

    Raises:
        InvalidValueError: The text is no rate, or it is below one event in eleven days.
    """
    text = text.strip()
    if text == "inf":
        return math.inf
    match = _RATE.fullmatch(_add_unit_of_rate(text, default_unit))
    if match is None:
        raise InvalidValueError("invalid_value", "must be a rate", RATE_HINT)
    if match["unit"] not in SECONDS_PER_UNIT:
        raise InvalidValueError(
            "invalid_value", f'has the unknown unit "/{match["unit"]}"', RATE_HINT
        )
    rate = float(Decimal(match["number"]) / SECONDS_PER_UNIT[match["unit"]])
    if rate < _LOWEST_RATE_PER_S:
        raise InvalidValueError(
            "out_of_range",
            "must be at least one event in eleven days",
            "to pause, leave the stage out",
        )
    return rate


def _add_unit_of_rate(text: str, default_unit: str | None) -> str:
    """Return the text of a rate with a unit of time: `10` becomes `10/s` with the default "s".

    Raises `InvalidValueError` for a number without a unit if there is no default.
    """
    is_number_without_unit = re.fullmatch(NUMBER, text) is not None
    if not is_number_without_unit:
        return text
    if default_unit is None:
        raise InvalidValueError("invalid_value", "needs a unit", f"write {text}/s or {text}/min")
    return f"{text}/{default_unit}"


def rate_or_zero_per_s(text: str) -> float:
    """Return a rate as `rate_per_s` does, or zero for `0/s` or `0`.

    Raises `InvalidValueError`.
    """
    match = re.fullmatch(rf"(?P<number>{NUMBER}) ?(/ ?(s|min|m|h))?", text.strip())
    if match is not None and float(match["number"]) == 0:
        return 0.0
    return rate_per_s(text)


def share(text: str) -> float:
    """Return `99%` as 0.99; from 0 to 1. Raises `InvalidValueError`."""
    match = re.fullmatch(rf"({NUMBER}) ?%", text.strip())
    if match is None:
        raise InvalidValueError("invalid_value", "must be a percentage", SHARE_HINT)
    value = Decimal(match[1]) / 100
    if value > 1:
        raise InvalidValueError("out_of_range", "must be at most 100%", SHARE_HINT)
    return float(value)


def quantile(text: str) -> float:
    """Return `p99.9` as 0.999; above 0 and below 1. Raises `InvalidValueError`."""
    if not re.fullmatch(QUANTILE_PATTERN, text.strip()):
        raise InvalidValueError("invalid_value", "must be a percentile", QUANTILE_HINT)
    value = Decimal(text.strip()[1:]) / 100
    if value == 0:
        raise InvalidValueError("invalid_value", "must be a percentile", QUANTILE_HINT)
    return float(value)
