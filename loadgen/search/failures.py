"""Tells apart why requests of a trial failed: the endpoint refused, or the server was at its limit.

A spent quota and a rate limit say nothing about the load that a server sustains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core.limits import FAILURE_SHARE

if TYPE_CHECKING:
    from loadgen.core.metrics.request_counts import ErrorKind, RequestCounts

REFUSED = "refused"
"""The reason code of a trial whose requests were refused for a quota or a rate limit."""
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
OVERLOAD_WORDS = ("overload", "queue", "capacity", "busy")
"""Words in the text of a status 429 by which a server states that it is full, not a rate limit."""
QUOTA_WORDS = ("quota", "billing", "credit")
"""Words in the text of other statuses, such as 402 and 403, that refuse a request for a quota."""
QUOTED_CHARACTERS = 200
MAX_KINDS_SHOWN = 3


def describe_refusals(requests: RequestCounts) -> str:
    """Return a sentence that the endpoint refused requests for a quota or a rate limit.

    It quotes the first such response. Return "" if these were 1 % of the requests or fewer. A trial
    with more of them says nothing about the load that the server sustains.
    """
    for error_kind, error in requests.by_error.items():
        if _is_refusal(error_kind, error.first_text) and _are_many(error.count, requests):
            return (
                f"{error.count:,} of {_count_finished(requests):,} requests were refused for a "
                f"quota or a rate limit: {_quote(error)}"
            )
    return ""


def describe_failures(requests: RequestCounts) -> str:
    """Return a sentence that states how many requests failed by the server's fault, and how.

    The kinds of failure are listed with the most frequent first, at most MAX_KINDS_SHOWN. Return ""
    if 1 % of the requests failed or fewer.
    """
    errors = {kind: error for kind, error in requests.by_error.items() if kind in SERVER_FAILURES}
    failed_count = sum(error.count for error in errors.values())
    if not _are_many(failed_count, requests):
        return ""

    by_frequency = sorted(errors.items(), key=lambda item: item[1].count, reverse=True)
    kinds = "; ".join(
        f"{error.count:,} {kind}: {_quote(error)}" for kind, error in by_frequency[:MAX_KINDS_SHOWN]
    )
    return f"{failed_count:,} of {_count_finished(requests):,} requests failed ({kinds})"


def _is_refusal(error_kind: str, text: str) -> bool:
    """Return whether an error response refuses a request for a quota or a rate limit."""
    lower_text = text.lower()
    if error_kind == RATE_LIMIT:
        return not any(word in lower_text for word in OVERLOAD_WORDS)
    return error_kind == "http_4xx" and any(word in lower_text for word in QUOTA_WORDS)


def _are_many(count: int, requests: RequestCounts) -> bool:
    """Return whether `count` is more than the share FAILURE_SHARE of the requests, which is 1 %."""
    return count > FAILURE_SHARE * max(_count_finished(requests), 1)


def _count_finished(requests: RequestCounts) -> int:
    """Return how many requests came to an end, in success or failure."""
    return requests.ok + requests.failed + requests.lost


def _quote(error: ErrorKind) -> str:
    """Return the text of the first such error in quotation marks, on one line and shortened."""
    text = " ".join(error.first_text.split())
    is_long = len(text) > QUOTED_CHARACTERS
    return f'"{text[:QUOTED_CHARACTERS]}..."' if is_long else f'"{text}"'
