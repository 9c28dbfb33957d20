"""What failed requests say of a trial: an endpoint that refuses to serve, or a server at its limit.

Pure. A quota that is spent and a rate limit say nothing about the load that a server sustains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core.limits import FAILURE_SHARE

if TYPE_CHECKING:
    from loadgen.core.metrics.request_counts import ErrorKind, RequestCounts

REFUSED = "refused"  # the code of a trial whose requests were refused
RATE_LIMIT = "http_429"
SERVER_FAILURES = (
    *("dns", "connect", "tls", "reset", "timeout_total", "timeout_stall"),
    *("http_4xx", "http_429", "http_5xx", "error_event"),
    *("truncated", "empty", "no_finish_reason", "malformed"),
)  # the other kinds are what this tool dropped, cut or lost itself
OVERLOAD_WORDS = ("overload", "queue", "capacity", "busy")  # a 429 of a server that is full
QUOTA_WORDS = ("quota", "billing", "credit")  # of other statuses, like 402 and 403
QUOTED_CHARACTERS = 200


def describe_refusals(requests: RequestCounts) -> str:
    """Return what an endpoint said when it refused requests for a quota or a rate limit.

    Return "" if these were 1 % of the requests or fewer.
    """
    for name, error in requests.by_error.items():
        if _is_refusal(name, error.first_text) and _are_many(error.count, requests):
            return (
                f"{error.count:,} of {_finished(requests):,} requests were refused for a quota or "
                f"a rate limit: {_quote(error)}"
            )
    return ""


def describe_failures(requests: RequestCounts) -> str:
    """Return how many requests failed and of what, the most frequent kind first.

    Return "" if 1 % of them failed or fewer.
    """
    errors = sorted(
        ((name, error) for name, error in requests.by_error.items() if name in SERVER_FAILURES),
        key=lambda item: -item[1].count,
    )
    failed = sum(error.count for _, error in errors)
    if not _are_many(failed, requests):
        return ""
    kinds = "; ".join(f"{error.count:,} {name}: {_quote(error)}" for name, error in errors[:3])
    return f"{failed:,} of {_finished(requests):,} requests failed ({kinds})"


def _is_refusal(name: str, text: str) -> bool:
    words = text.lower()
    if name == RATE_LIMIT:
        return not any(word in words for word in OVERLOAD_WORDS)
    return name == "http_4xx" and any(word in words for word in QUOTA_WORDS)


def _are_many(count: int, requests: RequestCounts) -> bool:
    return count > FAILURE_SHARE * max(_finished(requests), 1)


def _finished(requests: RequestCounts) -> int:
    """Return how many requests came to an end, in success or failure."""
    return requests.ok + requests.failed + requests.lost


def _quote(error: ErrorKind) -> str:
    text = " ".join(error.first_text.split())
    is_long = len(text) > QUOTED_CHARACTERS
    return f'"{text[:QUOTED_CHARACTERS]}..."' if is_long else f'"{text}"'
