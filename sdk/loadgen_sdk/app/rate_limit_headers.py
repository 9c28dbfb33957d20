"""The headers of an answer that are of use: its id, the server's own timing, `Retry-After`, the x-ratelimit-* headers.

Pure but for the wall clock, which is read where a server names an instant.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, NamedTuple

EPOCH_S = 1e9  # a number of seconds as large as this is an instant (after 2001), not a wait
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")


TIMING_HEADERS = (
    "server-timing",
    "openai-processing-ms",
    "x-ms-region",
    "x-envoy-upstream-service-time",
)
"""Response headers with the server's own timing. Headers of the form `x-…-time` and `x-…-ms` count as well."""
_ANTHROPICS = {"request-id": "x-request-id"} | {
    f"anthropic-ratelimit-{of}-{what}": f"x-ratelimit-{what}-{of}"
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
}
"""Anthropic's names of headers, and those of the others."""


def read_once(headers: Any) -> dict[str, str]:
    """The headers that are of use, by lower-case name, of a mapping or of the HTTP library's headers.

    In one pass: a single lookup in that library's headers costs as much as all of this.
    """
    pairs, names, found = getattr(headers, "raw", None), _useful_names, {}
    for raw_name, value in headers.items() if pairs is None else pairs:
        if name := names[raw_name]:
            found[name] = value if isinstance(value, str) else value.decode("latin-1")
    return found


def timings(headers: Mapping[str, str]) -> dict[str, Any]:
    """Those of `read_once` that hold the server's own timing."""
    if len(headers) == (REQUEST_ID in headers):  # most answers have no other
        return {}
    return {name: value for name, value in headers.items() if _is_timing(name)}


class _UsefulNames(dict[bytes | str, str]):
    """By a name as it came: the name in lower case, "" for one that is not of use. Every call has the same few."""

    def __missing__(self, raw_name: bytes | str) -> str:
        name = (raw_name if isinstance(raw_name, str) else raw_name.decode("latin-1")).lower()
        name = _ANTHROPICS.get(name, name)
        used = name in (REQUEST_ID, SHOULD_RETRY) or name.startswith(
            ("retry-after", "x-ratelimit-")
        )
        name = name if used or _is_timing(name) else ""
        if len(self) < MOST_NAMES:
            self[raw_name] = name
        return name


REQUEST_ID = "x-request-id"
SHOULD_RETRY = "x-should-retry"
MOST_NAMES = 1024  # names that are remembered
_useful_names = _UsefulNames()


@functools.lru_cache(MOST_NAMES)
def _is_timing(name: str) -> bool:
    return name in TIMING_HEADERS or (name.startswith("x-") and name.endswith(("-time", "-ms")))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The wait asked for by `retry-after-ms` or `Retry-After` (seconds or a date, RFC 9110); None without either.

    Some servers send the instant as seconds since 1970: understood too. What is no finite number is no wait.
    """
    try:
        if value := headers.get("retry-after-ms"):
            seconds = float(value) / 1000
        elif value := headers.get("retry-after"):
            seconds = number(value, math.nan)
            if math.isnan(seconds):
                seconds = parsedate_to_datetime(value).timestamp()
        else:
            return None
    except (ValueError, TypeError, OverflowError):
        return None
    return _from_now_s(seconds) if math.isfinite(seconds) else None


def should_retry(headers: Mapping[str, str]) -> bool | None:
    """Whether the server says that another try may help (`x-should-retry`); None: it says nothing."""
    return {"true": True, "false": False}.get(headers.get(SHOULD_RETRY, "").lower())


class Level(NamedTuple):
    """A bucket of the server's: `remaining` of `limit` are left, and it is full after `reset_ns`. limit 0: not told."""

    limit: float
    remaining: float
    reset_ns: int


def level(headers: Mapping[str, str], of: str) -> Level | None:
    """The server's bucket of `of`, "requests" or "tokens", by the x-ratelimit-* headers; None: not told."""
    remaining, reset = (headers.get(f"x-ratelimit-{what}-{of}") for what in ("remaining", "reset"))
    left = math.nan if remaining is None else number(remaining, math.nan)
    if reset is None or math.isnan(left):
        return None
    limit = number(headers.get(f"x-ratelimit-limit-{of}", ""), 0.0)
    return Level(limit if limit > left else 0.0, max(0.0, left), duration_ns(reset))


def duration_ns(text: str) -> int:
    """`6m0s`, `20ms`, `1.5s`, a bare number of seconds, or an instant (epoch in s or ms, ISO 8601): ns from now.

    0 when it cannot be parsed.
    """
    text = text.strip()
    match = _DURATION.fullmatch(text)
    if match and any(match.groups()):
        hours, minutes, seconds, millis = (float(group or 0) for group in match.groups())
        return round((hours * 3600 + minutes * 60 + seconds) * 1e9 + millis * 1e6)
    seconds = number(text, 0)
    if not seconds and "T" in text:
        try:
            seconds = datetime.fromisoformat(text).timestamp()
        except ValueError:
            return 0
    return round(_from_now_s(seconds / 1000 if seconds >= EPOCH_S * 1000 else seconds) * 1e9)


def number(text: str, default: float) -> float:
    """A number of a header; `default` for what is none, or not finite."""
    try:
        value = float(text)
    except ValueError:
        return default
    return value if math.isfinite(value) else default


def _from_now_s(seconds: float) -> float:
    return max(0.0, seconds - time() if seconds >= EPOCH_S else seconds)
