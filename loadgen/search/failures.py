"""Tells apart why requests of a trial failed: the endpoint refused, or the server was at its limit.

A spent quota and a rate limit say nothing about the load that a server sustains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core.limits import FAILURE_SHARE

if TYPE_CHECKING:
    from loadgen.core.metrics.request_counts import ErrorKind, RequestCounts

REFUSED = "refused"  # the code of a trial whose requests were refused
RATE_LIMIT = "http_429"
SERVER_FAILURES = (
    "dns",
    "connect",
    "tls",
    "reset",
    "timeout_total",
    "timeout_stall",
    "http_4xx",
    "http_429",
    "http_5xx",
    "error_event",
    "truncated",
    "empty",
    "no_finish_reason",
    "malformed",
)
"""Kinds of failure that the server causes. The others are what this tool dropped, cut or lost."""
OVERLOAD_WORDS = ("overload", "queue", "capacity", "busy")  # a 429 of a server that is full
QUOTA_WORDS = ("quota", "billing", "credit")  # of other statuses, like 402 and 403
QUOTED_CHARACTERS = 200
MAX_KINDS_SHOWN = 3


def describe_refusals(requests: RequestCounts) -> str:
    """Return what an endpoint said when it refused requests for a quota or a rate limit.

    Return "" if these were 1 % of the requests or fewer.
    """
    for name, error in requests.by_error.items():
        if _is_refusal(name, error.first_text) and _are_many(error.count, requests):
            return (
                f"{error.count:,} of {_count_finished(requests):,} requests were refused for a "
                f"quota or a rate limit: {_quote(error)}"
            )
    return ""


def describe_failures(requests: RequestCounts) -> str:
    """Return how many requests failed and of what, the most frequent kind first.

    Return "" if 1 % of them failed or fewer.
    """
    errors = {name: error for name, error in requests.by_error.items() if name in SERVER_FAILURES}
    failed_count = sum(error.count for error in errors.values())
    if not _are_many(failed_count, requests):
        return ""
    most_frequent = sorted(errors, key=lambda name: errors[name].count, reverse=True)
    kinds = "; ".join(
        f"{errors[name].count:,} {name}: {_quote(errors[name])}"
        for name in most_frequent[:MAX_KINDS_SHOWN]
    )
    return f"{failed_count:,} of {_count_finished(requests):,} requests failed ({kinds})"


def _is_refusal(error_kind: str, text: str) -> bool:
    """Return whether an error response refuses a request for a quota or a rate limit."""
    lower_text = text.lower()
    if error_kind == RATE_LIMIT:
        return not any(word in lower_text for word in OVERLOAD_WORDS)
    return error_kind == "http_4xx" and any(word in lower_text for word in QUOTA_WORDS)


def _are_many(count: int, requests: RequestCounts) -> bool:
    """Return whether so many requests are more than a trial may lose."""
    return count > FAILURE_SHARE * max(_count_finished(requests), 1)


def _count_finished(requests: RequestCounts) -> int:
    """Return how many requests came to an end, in success or failure."""
    return requests.ok + requests.failed + requests.lost


def _quote(error: ErrorKind) -> str:
    text = " ".join(error.first_text.split())
    is_long = len(text) > QUOTED_CHARACTERS
    return f'"{text[:QUOTED_CHARACTERS]}..."' if is_long else f'"{text}"'
