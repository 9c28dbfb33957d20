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


class TimingBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """The server's own timing breakdown of one request, as one line of `accounts.jsonl`.

    Times are on the server's clock.

    Attributes:
        target: The index of the target that reports it.
        arrival: When the request arrived, in ns.
        first: When the first token was generated, in ns.
        last: When the last token was generated, in ns.
        queue: How long it waited before its prefill, in ns.
        prefill: How long its prefill took, in ns.
        transfer: How long the KV cache was transferred from prefill to decode, in ns.
        decode: The time from the first to the last token of the decode, in ns.
        drafted: Draft tokens of speculative decoding.
        accepted: How many of them were accepted.
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


def parse_breakdowns(data: bytes, target: int) -> list[TimingBreakdown]:
    """Return the breakdowns on a page that have arrival, first and last token.

    Without these times the request of a breakdown could not be found.

    Args:
        data: The page, a JSON list of requests.
        target: The index of the target that serves the page.

    Raises:
        ValueError: The page is not a list of requests.
    """
    try:
        records = msgspec.json.decode(data, type=list[dict[str, Any]])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a list of requests: {error}") from None

    breakdowns = [_parse_breakdown(record, target) for record in records]
    return [
        breakdown
        for breakdown in breakdowns
        if UNKNOWN not in (breakdown.arrival, breakdown.first, breakdown.last)
    ]


def _parse_breakdown(record: Mapping[str, object], target: int) -> TimingBreakdown:
    """Return the breakdown in the JSON record of one request, with UNKNOWN for missing values.

    A server that runs prefill and decode on different machines nests a record of each phase in that
    of the request: `ctx_perf_metrics` for prefill, which TensorRT-LLM calls context, and
    `gen_perf_metrics` for decode, its generation phase. The machines may have different clocks, so
    a duration is always the difference of two times of the same phase. Other servers have one
    record for both phases.
    """
    prefill_record = _phase_record(record, "ctx_perf_metrics")
    decode_record = _phase_record(record, "gen_perf_metrics")
    prefill_times = _nested_object(prefill_record, "perf_metrics", "timing_metrics")
    decode_times = _nested_object(decode_record, "perf_metrics", "timing_metrics")
    speculation = _nested_object(decode_record, "perf_metrics", "speculative_decoding")

    return TimingBreakdown(
        target=target,
        arrival=_arrival_ns(record, prefill_times),
        first=_time_ns(prefill_times, "first_token_time"),
        last=_time_ns(decode_times, "last_token_time"),
        queue=_duration_ns(prefill_times, "arrival_time", "first_scheduled_time"),
        prefill=_duration_ns(prefill_times, "first_scheduled_time", "first_token_time"),
        transfer=_duration_ns(decode_times, "kv_cache_transfer_start", "kv_cache_transfer_end"),
        decode=_duration_ns(decode_times, "first_token_time", "last_token_time"),
        drafted=_token_count(speculation, "total_draft_tokens"),
        accepted=_token_count(speculation, "total_accepted_draft_tokens"),
    )


def _phase_record(record: Mapping[str, object], phase_key: str) -> Mapping[str, Any]:
    """Return the record of one phase, or that of the complete request if it has none nested."""
    nested_record = _nested_object(record, phase_key)
    return nested_record if nested_record else record


def _arrival_ns(record: Mapping[str, object], prefill_times: Mapping[str, object]) -> int:
    """Return when a request arrived at the server, in ns, or UNKNOWN.

    A server can report several times: of the front end for disaggregated machines, of the front end
    of a single machine, and of the engine. The first of them that it reports is the nearest to the
    client.
    """
    arrival_times_ns = (
        _time_ns(record, "disagg_server_arrival_time"),
        _time_ns(prefill_times, "server_arrival_time"),
        _time_ns(prefill_times, "arrival_time"),
    )
    for arrival_ns in arrival_times_ns:
        if arrival_ns != UNKNOWN:
            return arrival_ns

    return UNKNOWN


def _nested_object(value: object, *path: str) -> dict[str, Any]:
    """Return the object at a path of keys, or an empty one if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _time_ns(record: Mapping[str, object], key: str) -> int:
    """Return a time that a record has in seconds as ns, or UNKNOWN if it has no valid one."""
    seconds = record.get(key)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
        return UNKNOWN
    return round(seconds * 1e9)


def _token_count(record: Mapping[str, object], key: str) -> int:
    """Return the number of tokens that a record has under a key, or UNKNOWN."""
    tokens = record.get(key)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        return UNKNOWN
    return tokens


def _duration_ns(times: Mapping[str, Any], start_name: str, end_name: str) -> int:
    """Return the duration between two times of a record, or UNKNOWN if one of them is not known."""
    start_ns = _time_ns(times, start_name)
    end_ns = _time_ns(times, end_name)
    return end_ns - start_ns if end_ns >= start_ns >= 0 else UNKNOWN
