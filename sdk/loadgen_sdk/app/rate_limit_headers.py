"""What a server asks for in the headers of its answers: `Retry-After` and the x-ratelimit-* headers. Pure but for the
wall clock, which is read where a server names an instant."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from time import time

EPOCH_S = 1e9  # a number of seconds as large as this is an instant (after 2001), not a wait
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")


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
