"""Read the useful headers of a response: ids, the server's own timing, and limits.

Pure but for the wall clock, which is read where a server states a date.
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

REQUEST_ID = "x-request-id"
SHOULD_RETRY = "x-should-retry"

TIMING_HEADERS = (
    "server-timing",
    "openai-processing-ms",
    "x-ms-region",
    "x-envoy-upstream-service-time",
)
"""Headers with the server's own timing. Headers of the form `x-…-time` and `x-…-ms` count as well.
"""

_MIN_EPOCH_S = 1e9
"""A number of seconds as large as this is a date (after 2001), and not a duration."""

_MAX_CACHED_NAMES = 1024
"""A server that sends ever new names of headers must not fill the memory."""

_MS_PER_S = 1000
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")


def _common_names_by_anthropic_name() -> dict[str, str]:
    """Return the names that other servers use for headers that Anthropic names differently."""
    names = {"request-id": REQUEST_ID}
    for unit in ("requests", "tokens"):
        for field in ("limit", "remaining", "reset"):
            names[f"anthropic-ratelimit-{unit}-{field}"] = f"x-ratelimit-{field}-{unit}"
    return names


_COMMON_NAMES = _common_names_by_anthropic_name()


class ServerLimit(NamedTuple):
    """A rate limit of the server and how much of it is left, as the server counts it.

    Attributes:
        limit: The limit, or 0 if it is not stated.
        remaining: How much is left.
        reset_ns: After how many ns the whole limit is available again.
    """

    limit: float
    remaining: float
    reset_ns: int


def read_useful_headers(headers: Any) -> dict[str, str]:
    """Return the headers that this package uses, by their names in lower case.

    They are the request id, the timing of the server and its rate limits. All are found in one pass
    over the headers, because a single lookup in the headers of httpx costs as much as the pass.

    Args:
        headers: A mapping of texts, or an `httpx.Headers`, whose `raw` has names and values as
            bytes.
    """
    raw_headers = getattr(headers, "raw", None)
    items = headers.items() if raw_headers is None else raw_headers
    useful_headers: dict[str, str] = {}
    for raw_name, value in items:
        name = _useful_names[raw_name]
        if name:
            text = value if isinstance(value, str) else value.decode("latin-1")
            useful_headers[name] = text
    return useful_headers


def timing_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return those of the useful headers that have the server's own timing."""
    has_only_id = len(headers) == (REQUEST_ID in headers)
    if has_only_id:
        return {}
    return {name: value for name, value in headers.items() if _is_timing(name)}


class _UsefulNames(dict[bytes | str, str]):
    """A cache from the name of a header as received to its common name in lower case.

    The common name is "" if this package does not use the header. Every response has the same few
    names, so that they are decoded once.
    """

    def __missing__(self, raw_name: bytes | str) -> str:
        """Decide about a name that was not seen before."""
        name = (raw_name if isinstance(raw_name, str) else raw_name.decode("latin-1")).lower()
        name = _COMMON_NAMES.get(name, name)
        if not _is_useful(name):
            name = ""
        if len(self) < _MAX_CACHED_NAMES:
            self[raw_name] = name
        return name


def _is_useful(name: str) -> bool:
    if name in (REQUEST_ID, SHOULD_RETRY) or name.startswith(("retry-after", "x-ratelimit-")):
        return True
    return _is_timing(name)


@functools.lru_cache(_MAX_CACHED_NAMES)
def _is_timing(name: str) -> bool:
    return name in TIMING_HEADERS or (name.startswith("x-") and name.endswith(("-time", "-ms")))


_useful_names = _UsefulNames()


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return how long the server asks to wait, or None if it does not ask.

    `retry-after-ms` is read first, then `Retry-After`, which is a number of seconds or a date (RFC
    9110). Some servers send the date as seconds since 1970. What is not a finite number is ignored.
    """
    try:
        seconds = _read_retry_after(headers)
    except (ValueError, TypeError, OverflowError):
        return None
    if seconds is None or not math.isfinite(seconds):
        return None
    return _from_now_s(seconds)


def _read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the requested wait: a number of seconds from now, or a date in seconds since 1970.

    Return None without such a header. An exception says that it is neither a number nor a date.
    """
    milliseconds = headers.get("retry-after-ms")
    if milliseconds:
        return float(milliseconds) / 1000
    value = headers.get("retry-after")
    if not value:
        return None
    seconds = parse_number(value, math.nan)
    if math.isnan(seconds):
        return parsedate_to_datetime(value).timestamp()
    return seconds


def should_retry(headers: Mapping[str, str]) -> bool | None:
    """Return whether the server says that a retry may help, or None if it says nothing."""
    return {"true": True, "false": False}.get(headers.get(SHOULD_RETRY, "").lower())


def read_server_limit(headers: Mapping[str, str], unit: str) -> ServerLimit | None:
    """Return the server's limit of a unit ("requests" or "tokens"), or None if it states none.

    It is read from the headers `x-ratelimit-remaining-UNIT`, `-reset-UNIT` and `-limit-UNIT`.
    """
    remaining = parse_number(headers.get(f"x-ratelimit-remaining-{unit}", ""), math.nan)
    reset = headers.get(f"x-ratelimit-reset-{unit}")
    if reset is None or math.isnan(remaining):
        return None
    limit = parse_number(headers.get(f"x-ratelimit-limit-{unit}", ""), 0.0)
    return ServerLimit(
        limit=limit if limit > remaining else 0.0,
        remaining=max(0.0, remaining),
        reset_ns=parse_reset_ns(reset),
    )


def parse_reset_ns(text: str) -> int:
    """Return in how many ns a limit is reset, or 0 if the text cannot be parsed.

    Servers write it as a duration (`6m0s`, `20ms`, `1.5s`), as a number of seconds, or as a date:
    seconds or milliseconds since 1970, or ISO 8601.
    """
    text = text.strip()
    match = _DURATION.fullmatch(text)
    if match and any(match.groups()):
        hours, minutes, seconds, milliseconds = (float(group or 0) for group in match.groups())
        whole_seconds = hours * 3600 + minutes * 60 + seconds
        return round(whole_seconds * 1e9 + milliseconds * 1e6)

    seconds = parse_number(text, 0)
    if not seconds and "T" in text:
        try:
            seconds = datetime.fromisoformat(text).timestamp()
        except ValueError:
            return 0
    is_date_in_ms = seconds >= _MIN_EPOCH_S * _MS_PER_S
    if is_date_in_ms:
        seconds /= _MS_PER_S
    return round(_from_now_s(seconds) * 1e9)


def parse_number(text: str, default: float) -> float:
    """Return the number in a header, or the default for what is not a finite number."""
    try:
        value = float(text)
    except ValueError:
        return default
    return value if math.isfinite(value) else default


def _from_now_s(seconds: float) -> float:
    """Return a duration unchanged, and how long it is until a date. A past date is now."""
    if seconds >= _MIN_EPOCH_S:
        seconds -= time()
    return max(0.0, seconds)
