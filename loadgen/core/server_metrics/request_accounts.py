"""Accounts of requests that a server keeps to itself: TensorRT-LLM's `/perf_metrics`.

Pure, and without numpy, since the scraper reads with it. `account_join.py` finds whose request each account is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

FILE = "accounts.jsonl"  # in the run folder
UNKNOWN = -1


class RequestAccount(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `accounts.jsonl`: instants and durations in ns on the server's clock; -1 where it does not say."""

    target: int
    arrival: int
    first: int
    last: int
    queue: int = UNKNOWN
    prefill: int = UNKNOWN
    transfer: int = UNKNOWN
    decode: int = UNKNOWN
    drafted: int = UNKNOWN
    accepted: int = UNKNOWN


def accounts(data: bytes, target: int) -> list[RequestAccount]:
    """The records of one read of the page; those without the three instants are left out. Raises ValueError."""
    try:
        records = msgspec.json.decode(data, type=list[dict[str, Any]])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no list of requests: {error}") from None
    made = (_account(record, target) for record in records)
    return [account for account in made if min(account.arrival, account.first, account.last) >= 0]


def _account(record: Mapping[str, Any], target: int) -> RequestAccount:
    """One record. A disaggregated server nests one of the prefill and one of the decoding; only differences on one of
    the two clocks are durations.
    """
    before, after = (_at(record, f"{part}_perf_metrics") or record for part in ("ctx", "gen"))
    prefill, decode = (_at(part, "perf_metrics", "timing_metrics") for part in (before, after))
    speculation = _at(after, "perf_metrics", "speculative_decoding")
    arrival, scheduled, first = (
        _ns(prefill, f"{name}_time") for name in ("arrival", "first_scheduled", "first_token")
    )
    heard = _ns(record, "disagg_server_arrival_time")
    heard = _ns(prefill, "server_arrival_time") if heard < 0 else heard
    return RequestAccount(
        target=target,
        arrival=arrival if heard < 0 else heard,
        first=first,
        last=_ns(decode, "last_token_time"),
        queue=_less(scheduled, arrival),
        prefill=_less(first, scheduled),
        transfer=_less(
            _ns(decode, "kv_cache_transfer_end"), _ns(decode, "kv_cache_transfer_start")
        ),
        decode=_less(_ns(decode, "last_token_time"), _ns(decode, "first_token_time")),
        drafted=_count(speculation, "total_draft_tokens"),
        accepted=_count(speculation, "total_accepted_draft_tokens"),
    )


def _at(value: Any, *path: str) -> dict[str, Any]:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _ns(value: Mapping[str, Any], name: str) -> int:
    seconds = value.get(name)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
        return UNKNOWN
    return round(seconds * 1e9)


def _count(value: Mapping[str, Any], name: str) -> int:
    tokens = value.get(name)
    return (
        tokens
        if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0
        else UNKNOWN
    )


def _less(end: int, start: int) -> int:
    return end - start if end >= start >= 0 else UNKNOWN
