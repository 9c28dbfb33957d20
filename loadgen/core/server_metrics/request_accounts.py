"""Parse the timing breakdowns of requests on TensorRT-LLM's page `/perf_metrics`.

Pure, and without numpy, because the scraper uses it. `account_join.py` finds the request of each
breakdown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

FILE = "accounts.jsonl"
"""The file in the folder of a run."""
UNKNOWN = -1
"""Stands for a value that the server does not report."""


class RequestAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The timing breakdown of one request, as one line of `accounts.jsonl`.

    `arrival`, `first` (token) and `last` (token) are times on the server's clock in ns. `queue`,
    `prefill`, `transfer` and `decode` are durations in ns. `drafted` and `accepted` are tokens.
    """

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
    """Return the breakdowns on a page that have all three times.

    Raises ValueError if the page is not a list of requests.
    """
    try:
        records = msgspec.json.decode(data, type=list[dict[str, Any]])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no list of requests: {error}") from None
    parsed = (_account(record, target) for record in records)
    return [account for account in parsed if min(account.arrival, account.first, account.last) >= 0]


def _account(record: Mapping[str, Any], target: int) -> RequestAccount:
    """Return the breakdown in one record.

    A disaggregated server nests one record of the prefill and one of the decode. They may have
    different clocks, so that only differences within one of them are durations. The arrival at the
    front end is preferred to that at the engine.
    """
    prefill_record = _at(record, "ctx_perf_metrics") or record
    decode_record = _at(record, "gen_perf_metrics") or record
    prefill = _at(prefill_record, "perf_metrics", "timing_metrics")
    decode = _at(decode_record, "perf_metrics", "timing_metrics")
    speculation = _at(decode_record, "perf_metrics", "speculative_decoding")
    arrival = _ns(prefill, "arrival_time")
    scheduled = _ns(prefill, "first_scheduled_time")
    first = _ns(prefill, "first_token_time")
    front_end_arrival = _ns(record, "disagg_server_arrival_time")
    if front_end_arrival < 0:
        front_end_arrival = _ns(prefill, "server_arrival_time")
    return RequestAccount(
        target=target,
        arrival=arrival if front_end_arrival < 0 else front_end_arrival,
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
    """Return the object at a path of keys, or an empty one if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _ns(value: Mapping[str, Any], name: str) -> int:
    """Return a time in seconds as ns, or UNKNOWN."""
    seconds = value.get(name)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
        return UNKNOWN
    return round(seconds * 1e9)


def _count(value: Mapping[str, Any], name: str) -> int:
    """Return a number of tokens, or UNKNOWN."""
    tokens = value.get(name)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        return UNKNOWN
    return tokens


def _less(end: int, start: int) -> int:
    """Return the duration between two times, or UNKNOWN."""
    return end - start if end >= start >= 0 else UNKNOWN
