"""Format numbers, differences and names as text, for every report.

Pure. An unknown value (None) becomes a dash, never a zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

NONE = "-"
SYSTEM = "system."
"""The prefix of the keys of metadata that describe the system under test."""


def quantity(value: float | None, digits: int = 3) -> str:
    """Format a number with at least `digits` significant digits: "0.0123", "4.57", "24,070".

    Thousands are separated, and there is no exponent. The number of decimals is limited to
    `digits` + 1, which is 4 by default. A number that would be rounded to 0 becomes a bound:
    0.00001 becomes "<0.0001" and -0.00001 becomes ">-0.0001".
    """
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)

    # Rounded first, because 9.999 with three digits is 10.0, which needs a decimal less.
    rounded = abs(float(f"{value:.{digits}g}"))
    decimals = _decimals_for_digits(rounded, digits)
    last_decimal = 10**-decimals  # 0.01 with two decimals

    rounds_to_zero = rounded < last_decimal / 2
    if rounds_to_zero:
        bound = f"{last_decimal:.{decimals}f}"
        return f"<{bound}" if value > 0 else f">-{bound}"

    return f"{value:,.{decimals}f}"


def _decimals_for_digits(value: float, digits: int) -> int:
    """Return how many decimals show a positive number with `digits` significant digits.

    There are at most `digits` + 1 decimals. Examples with 3 digits: 24070 has 0 decimals, 4.57 has
    2, and 0.0123 has 4.
    """
    # 3 for 123, 1 for 4.57, 0 for 0.5, and -1 for 0.0123, which has a zero after the point.
    digits_before_point = math.floor(math.log10(value)) + 1
    return min(max(digits - digits_before_point, 0), digits + 1)


def milliseconds(value: float | None) -> str:
    """Return a time in ms as text: 0.095, 12.3, 1,234.

    The unit is always ms, so that the values of a column can be compared.
    """
    return quantity(value)


def count(value: int | None) -> str:
    """Return an integer with separated thousands: 1,234,567."""
    return NONE if value is None else f"{value:,}"


def value_range(low: str, high: str, joint: str = " to ") -> str:
    """Return a range of two formatted numbers: "5 to 25", or "5" if both are the same text."""
    return low if low == high else f"{low}{joint}{high}"


def shares(limits: tuple[float, float]) -> str:
    """Return a range of fractions as percentages: `5 to 25 %`."""
    low, high = limits
    return f"{value_range(f'{100 * low:g}', f'{100 * high:g}')} %"


def counted(number: int | float | None, noun: str, plural: str = "") -> str:
    """Return a number with its noun, and its verb if one follows: 1 GPU, 2 GPUs, 1 body was.

    `plural` is needed if it is not the noun with an s.
    """
    text = NONE
    if number is not None:
        text = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{text} {noun}" if number == 1 else f"{text} {plural or noun + 's'}"


def rate(value: float | None, unit: str = "/s") -> str:
    """Return a rate with its unit: 19.9/s, 24,070/s."""
    return NONE if value is None else quantity(value) + unit


def percent(share: float | None) -> str:
    """Return a fraction as a percentage: 0.0123 is 1.2 %.

    Only a fraction of exactly 0 or 1 is shown as 0 % or 100 %. A fraction close to 0 or 1 gets more
    decimals, so that it is not rounded to these: 0.99996 is 99.996 %. If four decimals are too few
    for that, the text is a bound: "< 0.0001 %" or "> 99.9999 %". A fraction above 1 always has one
    decimal and may be shown as 100.0 %.
    """
    if share is None:
        return NONE

    value = share * 100
    if value in (0, 100):
        return f"{value:.0f} %"
    if value > 100:
        return f"{value:.1f} %"

    for decimals in (1, 2, 3, 4):
        text = f"{value:.{decimals}f}"
        is_rounded_to_limit = float(text) <= 0 or float(text) == 100
        if not is_rounded_to_limit:
            return f"{text} %"

    is_close_to_all = value > 50
    return "> 99.9999 %" if is_close_to_all else "< 0.0001 %"


def duration(seconds: float | None) -> str:
    """Return a duration as text: 350 ms, 12.3 s, 4 min 05 s, 2 h 03 min."""
    if seconds is None:
        return NONE
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"

    whole_seconds = round(seconds)
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"

    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


_ROUNDS_TO_1000 = 999.5
"""The smallest number that is 1,000 when it is rounded to three digits."""


def size(number: int | None) -> str:
    """Return a number of bytes with a decimal unit: 512 B, 9.63 MB.

    The unit is chosen so that the number is below 1,000, except for terabytes, the largest unit.
    """
    if number is None:
        return NONE
    if number < _ROUNDS_TO_1000:
        return f"{number} B"

    value = number / 1000
    unit = "kB"
    for larger_unit in ("MB", "GB", "TB"):
        if value < _ROUNDS_TO_1000:
            break
        value /= 1000
        unit = larger_unit

    return f"{quantity(value)} {unit}"


def difference(before: float | None, after: float | None) -> str:
    """Return the relative difference of two numbers: +12.3 %, -0.4 %, = if they are equal.

    From a factor of 2 on, the factor is returned: 2.5x.
    """
    if before is None or after is None:
        return NONE
    if before == after:
        return "="
    if before == 0:
        return f"from 0 to {quantity(after)}"

    ratio = after / before
    if ratio >= 2:
        return f"{quantity(ratio)}x"

    return f"{(ratio - 1) * 100:+z.1f} %"


def metadata_by_heading(metadata: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the metadata of the user as texts `key=value`, by the heading of a report.

    The description of the system under test (`--system`) has the heading System, and other
    metadata Metadata. A heading without metadata is left out.
    """
    texts_by_heading: dict[str, list[str]] = {"System": [], "Metadata": []}
    for key, value in metadata.items():
        if key.startswith(SYSTEM):
            texts_by_heading["System"].append(f"{key.removeprefix(SYSTEM)}={value}")
        else:
            texts_by_heading["Metadata"].append(f"{key}={value}")
    return {heading: texts for heading, texts in texts_by_heading.items() if texts}


def pairs(values: Mapping[str, str]) -> str:
    """Return metadata as text: `driver=580.65, rack=7`."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def document(value: Any) -> bytes:
    """Return a value as an indented JSON document that ends with a newline."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


_CONTROL_CHARACTER = re.compile(
    rb'("source_text"\s*:\s*"(?:[^"\\]|\\.)*")'  # a text of several lines
    rb"|\\(?:(u00[01][0-9a-fA-F]|u007[fF]|u00[89][0-9a-fA-F]|[nrbf])|.)",
    re.DOTALL,
)
_CONTROL_CHARACTER_IN_LINES = re.compile(
    rb"\\(?:(u00[01][0-9a-fA-F]|u007[fF]|u00[89][0-9a-fA-F]|[bf])|.)", re.DOTALL
)


def escape_control_characters(data: bytes) -> bytes:
    r"""Return JSON whose texts cannot control a terminal or forge a line.

    JSON contains control characters only as escapes. They become text: `\u001b` becomes `\\u001b`.
    """
    return _CONTROL_CHARACTER.sub(_escape_match, data) if b"\\" in data else data


def _escape_match(match: re.Match[bytes]) -> bytes:
    """Return an escape as text. In a text of several lines, line breaks stay."""
    if match.lastindex == 1:
        return _CONTROL_CHARACTER_IN_LINES.sub(_escape_group, match.group())
    return b"\\" + match.group() if match.lastindex else match.group()


def _escape_group(match: re.Match[bytes]) -> bytes:
    return b"\\" + match.group() if match.group(1) else match.group()


def shortened(value: object) -> str:
    """Return a value of a file as JSON, shortened to 40 characters."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as are needed to make the names unique."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, 20):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
