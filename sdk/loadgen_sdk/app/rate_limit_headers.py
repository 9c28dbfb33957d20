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

_NOT_NEEDED = ""
"""Stands for the name of a header that this package does not use."""

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


def read_useful_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that this package needs, by their names in lower case.

    They are the request id, the timing of the server, Retry-After and the server's rate limits. All
    are found in one pass over the headers, because a single lookup in the headers of httpx takes as
    long as the pass.

    Args:
        headers: A mapping of texts, or the `Headers` object of httpx, whose attribute `raw` is a
            list of pairs of a name and a value as bytes.
    """
    raw_headers = getattr(headers, "raw", None)
    names_and_values = headers.items() if raw_headers is None else raw_headers

    useful_headers: dict[str, str] = {}
    for raw_name, value in names_and_values:
        # This lookup never fails: `_UsefulNames.__missing__` adds a name that is not in the cache.
        useful_name = _useful_name_cache[raw_name]
        if useful_name != _NOT_NEEDED:
            text = value if isinstance(value, str) else value.decode("latin-1")
            useful_headers[useful_name] = text

    return useful_headers


def timing_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the headers with the server's own timing.

    `headers` is the result of `read_useful_headers`.
    """
    if not headers or headers.keys() == {REQUEST_ID}:
        return {}  # the usual case
    return {name: value for name, value in headers.items() if _is_timing(name)}


class _UsefulNames(dict[bytes | str, str]):
    """A cache from the name of a header as received to its common name in lower case.

    The common name is _NOT_NEEDED if this package does not use the header. Every response has the
    same few names, so that they are decoded once.
    """

    def __missing__(self, raw_name: bytes | str) -> str:
        """Decide about a name that was not seen before."""
        name = (raw_name if isinstance(raw_name, str) else raw_name.decode("latin-1")).lower()
        name = _COMMON_NAMES.get(name, name)
        if not _is_useful(name):
            name = _NOT_NEEDED
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


_useful_name_cache = _UsefulNames()


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds the server asks to wait, or None if it does not ask.

    The header `retry-after-ms` has priority over `Retry-After`, which is a number of seconds or a
    date (RFC 9110). Some servers send the date as seconds since 1970. A value that cannot be read
    is ignored.
    """
    milliseconds = headers.get("retry-after-ms")
    if milliseconds:
        has_number = _is_finite_number(milliseconds)
        return _seconds_from_now(float(milliseconds) / _MS_PER_S) if has_number else None

    seconds_or_date = headers.get("retry-after")
    if not seconds_or_date:
        return None
    if _is_finite_number(seconds_or_date):
        return _seconds_from_now(float(seconds_or_date))

    date_s = _parse_http_date_s(seconds_or_date)
    return None if date_s is None else _seconds_from_now(date_s)


def _parse_http_date_s(text: str) -> float | None:
    """Return a date such as "Wed, 21 Oct 2026 07:28:00 GMT" in seconds since 1970.

    Return None for any other text.
    """
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def should_retry(headers: Mapping[str, str]) -> bool | None:
    """Return whether the server says that a retry may help, or None if it says nothing."""
    return {"true": True, "false": False}.get(headers.get(SHOULD_RETRY, "").lower())


def read_server_limit(headers: Mapping[str, str], unit: str) -> ServerLimit | None:
    """Return the server's limit of a unit ("requests" or "tokens"), or None if it states none.

    It is read from the headers `x-ratelimit-remaining-UNIT`, `-reset-UNIT` and `-limit-UNIT`. The
    limit is only used to know how fast the used part (limit minus remaining) comes back. If nothing
    was used, or if more remains than the limit allows, it is returned as 0 (not stated).
    """
    remaining_text = headers.get(f"x-ratelimit-remaining-{unit}", "")
    reset = headers.get(f"x-ratelimit-reset-{unit}")
    if reset is None or not _is_finite_number(remaining_text):
        return None

    remaining = float(remaining_text)
    limit = parse_number(headers.get(f"x-ratelimit-limit-{unit}", ""), 0.0)

    is_refill_known = limit > remaining
    if not is_refill_known:
        limit = 0.0

    return ServerLimit(limit=limit, remaining=max(0.0, remaining), reset_ns=parse_reset_ns(reset))


def parse_reset_ns(text: str) -> int:
    """Parse the time until a limit is reset, in ns. Return 0 if the text cannot be parsed.

    Servers write it as a duration (`6m0s`, `20ms`, `1.5s`), as a number of seconds, or as a date:
    seconds or milliseconds since 1970, or ISO 8601.
    """
    text = text.strip()
    duration_ns = _parse_duration_ns(text)
    if duration_ns is not None:
        return duration_ns
    duration_or_date_s = _parse_seconds_or_date(text)
    return round(_seconds_from_now(duration_or_date_s) * 1e9)


def _parse_duration_ns(text: str) -> int | None:
    """Return a duration such as `6m0s` in ns, or None for any other text."""
    match = _DURATION.fullmatch(text)
    if match is None or not any(match.groups()):
        return None
    hours, minutes, seconds, milliseconds = (float(group or 0) for group in match.groups())
    total_seconds = hours * 3600 + minutes * 60 + seconds
    return round(total_seconds * 1e9 + milliseconds * 1e6)


def _parse_seconds_or_date(text: str) -> float:
    """Return the seconds in a text that has a duration or a date. Return 0 for any other text.

    A duration is a number of seconds, and is returned as it is. A date is returned in seconds since
    1970, which `_seconds_from_now` tells from a duration by their size. In the text, a date is a
    number of seconds or milliseconds since 1970, or it is written as in ISO 8601.
    """
    if _is_finite_number(text):
        number = float(text)
        is_date_in_ms = number >= _MIN_EPOCH_S * _MS_PER_S
        return number / _MS_PER_S if is_date_in_ms else number

    may_be_iso_8601_time = "T" in text
    if not may_be_iso_8601_time:
        return 0.0

    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def parse_number(text: str, default: float) -> float:
    """Return the number in a header, or the default for what is not a finite number."""
    return float(text) if _is_finite_number(text) else default


def _is_finite_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _seconds_from_now(duration_or_date_s: float) -> float:
    """Return how many seconds from now a server means.

    A number below _MIN_EPOCH_S is a duration, and is returned as it is. A larger one is a date in
    seconds since 1970. A date in the past is 0 seconds from now.
    """
    is_date = duration_or_date_s >= _MIN_EPOCH_S
    duration_s = duration_or_date_s - time() if is_date else duration_or_date_s
    return max(0.0, duration_s)
