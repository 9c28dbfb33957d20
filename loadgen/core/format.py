"""Formats numbers, differences and names as text, for every report.

Pure: a number in, a short string out. An unknown value (None) becomes a dash, never a zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

NONE = "-"
SYSTEM = "system."  # of the keys of metadata that describe the system under test


def quantity(value: float | None, digits: int = 3) -> str:
    """At least `digits` significant digits, thousands separated, no exponent: 0.0123, 4.57, 24,070."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    rounded = abs(float(f"{value:.{digits}g}"))
    decimals = min(max(digits - 1 - math.floor(math.log10(rounded)), 0), digits + 1)
    least = 10**-decimals
    if rounded < least / 2:
        return f"<{least:.{decimals}f}" if value > 0 else f">-{least:.{decimals}f}"
    return f"{value:,.{decimals}f}"


def milliseconds(value: float | None) -> str:
    """A time in ms, always in ms so that the values of a column can be compared: 0.095, 12.3, 1,234."""
    return quantity(value)


def count(value: int | None) -> str:
    """An integer with thousands separated: 1,234,567."""
    return NONE if value is None else f"{value:,}"


def shares(span: tuple[float, float]) -> str:
    """A span of shares: `5 to 25 %`."""
    return f"{100 * span[0]:g} to {100 * span[1]:g} %"


def counted(number: int | float | None, noun: str, plural: str = "") -> str:
    """A number of things with its noun, and its verb where one follows: 1 GPU, 2 GPUs, 1 body was, 2 bodies were.

    `plural`: where it is not the noun and an s.
    """
    shown = NONE if number is None else f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{shown} {noun if number == 1 else plural or noun + 's'}"


def rate(value: float | None, unit: str = "/s") -> str:
    """A rate with its unit: 19.9/s, 24,070/s."""
    return NONE if value is None else quantity(value) + unit


def percent(share: float | None) -> str:
    """A share as a percentage: 0.0123 is 1.23 %. Rounding never gives 0 % or 100 % unless the share is exactly that."""
    if share is None:
        return NONE
    value = share * 100
    if value in (0, 100):
        return f"{value:.0f} %"
    for decimals in (1, 2, 3, 4):
        text = f"{value:.{decimals}f}"
        if 0 < float(text) < 100 or value > 100:
            return f"{text} %"
    return "> 99.9999 %" if value > 50 else "< 0.0001 %"


def duration(seconds: float | None) -> str:
    """A duration given in seconds: 350 ms, 12.3 s, 4 min 05 s, 2 h 03 min."""
    if seconds is None:
        return NONE
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(number: int | None) -> str:
    """A number of bytes, in powers of 1,000: 512 B, 9.63 MB."""
    if number is None:
        return NONE
    value = float(number)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{number} B" if unit == "B" else f"{quantity(value)} {unit}"
        value /= 1000
    raise AssertionError


def difference(before: float | None, after: float | None) -> str:
    """The relative difference of two numbers, signed: +12.3 %, -0.4 %; 2.5x from a factor of 2; = if equal."""
    if before is None or after is None:
        return NONE
    if before == after:
        return "="
    if before == 0:
        return f"from 0 to {quantity(after)}"
    ratio = after / before
    if ratio >= 2:
        return f"{quantity(ratio)}x"
    return f"{(ratio - 1) * 100:+.1f} %"


def said(metadata: Mapping[str, str]) -> dict[str, list[str]]:
    """What the user said, under a head each: the system under test (of `--system`), and all else. None, no head."""
    system = [
        f"{key.removeprefix(SYSTEM)}={metadata[key]}" for key in metadata if key.startswith(SYSTEM)
    ]
    others = [f"{key}={metadata[key]}" for key in metadata if not key.startswith(SYSTEM)]
    return {head: texts for head, texts in (("System", system), ("Metadata", others)) if texts}


def pairs(values: Mapping[str, str]) -> str:
    """Metadata as text: `driver=580.65, rack=7`; "" for none."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def document(value: Any) -> bytes:
    """A value as a JSON document that people read too: indented, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


_STEERING = re.compile(
    rb'("source_text"\s*:\s*"(?:[^"\\]|\\.)*")'  # what has lines of its own
    rb"|\\(?:(u00[01][0-9a-fA-F]|u007[fF]|u00[89][0-9a-fA-F]|[nrbf])|.)",
    re.DOTALL,
)
_STEERING_IN_LINES = re.compile(
    rb"\\(?:(u00[01][0-9a-fA-F]|u007[fF]|u00[89][0-9a-fA-F]|[bf])|.)", re.DOTALL
)


def harmless(data: bytes) -> bytes:
    """JSON of which no text steers a terminal or forges a line: a control character in it becomes its escape, as text.

    A string in JSON cannot hold one but as an escape, so `\\u001b` becomes `\\\\u001b`.
    """
    return _STEERING.sub(_told, data) if b"\\" in data else data


def _told(match: re.Match[bytes]) -> bytes:
    if match.lastindex == 1:
        return _STEERING_IN_LINES.sub(
            lambda one: b"\\" + one.group() if one.group(1) else one.group(), match.group()
        )
    return b"\\" + match.group() if match.lastindex else match.group()


def shortened(value: Any) -> str:
    """A value of a file as JSON, at most 40 characters of it."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as are needed to make the names unique."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, 20):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
