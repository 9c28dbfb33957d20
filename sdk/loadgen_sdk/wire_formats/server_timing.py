"""Parse what a server states about its own time for one request. Pure.

Each kind of server has a format of its own. All formats are read to the same few durations and
token counts. Only durations on the server's clock are used, and never its timestamps, because the
clocks of server and client do not agree. Damaged values are skipped, and no parser raises an
exception.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

HEADER = "server-timing"
"""The name of the response header with the timing."""

_NS_PER_MS = 1_000_000
_MS_PER_S = 1_000.0
_MAX_MS = 1e12
"""Above this, some 30 years, a number is no duration. It also fits into a column of records."""
_MAX_TOKENS = 2**31 - 1
"""Above this, a number is no count of tokens. It also fits into a column of records."""


class ServerTiming(NamedTuple):
    """The server's own timing of one request. A field is None if the server does not state it.

    Attributes:
        queue_ns: The time from the arrival of the request until the server began to work on it.
        prefill_ns: The time from there to the first token.
        transfer_ns: The time to transfer the KV cache from the prefill server to the decode server.
        decode_ns: The time from the first token to the last one.
        cached_tokens: The prompt tokens that were found in the cache.
        drafted_tokens: The tokens that speculative decoding proposed.
        accepted_tokens: The proposed tokens that were accepted.
    """

    queue_ns: int | None = None
    prefill_ns: int | None = None
    transfer_ns: int | None = None
    decode_ns: int | None = None
    cached_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None

    @property
    def has_durations(self) -> bool:
        """Return True if the server states any duration, and not only token counts."""
        durations = (self.queue_ns, self.prefill_ns, self.transfer_ns, self.decode_ns)
        return any(duration is not None for duration in durations)


NO_SERVER_TIMING = ServerTiming()
"""The server states nothing about its own time."""

TimingParser = Callable[[Mapping[str, Any] | str], ServerTiming]
"""Parses one format: a JSON object of a response, or the text of a header.

A server may send either under any name. A parser of objects returns NO_SERVER_TIMING for a text.
"""


def parse_trtllm(timing: Mapping[str, object] | str) -> ServerTiming:
    """Parse `Server-Timing` of trtllm-serve: `server_queue;dur=1.25, server_ttft;dur=8.5, ...`.

    It is a header, or a field of the event after `[DONE]`. A disaggregated server runs the prefill
    and the decoding on two servers, and states each duration per phase: `ctx_` (context) for the
    prefill and `gen_` (generation) for the decoding. TTFT and E2E latency begin with the arrival of
    the request, so the prefill is TTFT without the queue, and the decoding is E2E latency without
    TTFT.
    """
    text = timing if isinstance(timing, str) else timing.get("Server-Timing", "")
    durations = _read_durations(text) if isinstance(text, str) else {}

    def prefill_duration(name: str) -> int | None:
        return _first_known(durations.get(f"server_{name}"), durations.get(f"ctx_{name}"))

    def decode_duration(name: str) -> int | None:
        return _first_known(durations.get(f"server_{name}"), durations.get(f"gen_{name}"))

    queue_ns = prefill_duration("queue")
    return ServerTiming(
        queue_ns=queue_ns,
        prefill_ns=_difference(prefill_duration("ttft"), queue_ns),
        transfer_ns=decode_duration("kv_transfer"),
        decode_ns=_difference(decode_duration("e2e"), decode_duration("ttft")),
    )


def parse_trtllm_drafts(timing: Mapping[str, object] | str) -> ServerTiming:
    """Parse `speculative_decoding` of trtllm-serve 1.4, in the choice with the finish reason."""
    if isinstance(timing, str):
        return NO_SERVER_TIMING
    return ServerTiming(
        drafted_tokens=_token_count(timing.get("total_draft_tokens")),
        accepted_tokens=_token_count(timing.get("total_accepted_draft_tokens")),
    )


def parse_vllm(timing: Mapping[str, object] | str) -> ServerTiming:
    """Parse `metrics` of vLLM, which come with the usage.

    Its time to first token begins when the request leaves the queue. Drafts are stated since 0.29
    if the server runs with --per-request-spec-decode-metrics.
    """
    if isinstance(timing, str):
        return NO_SERVER_TIMING

    drafts = timing.get("speculative_decoding")
    if not isinstance(drafts, Mapping):
        drafts = {}

    return ServerTiming(
        queue_ns=_milliseconds_to_ns(timing.get("queue_time_ms")),
        prefill_ns=_milliseconds_to_ns(timing.get("time_to_first_token_ms")),
        decode_ns=_milliseconds_to_ns(timing.get("generation_time_ms")),
        drafted_tokens=_token_count(drafts.get("num_draft_tokens")),
        accepted_tokens=_token_count(drafts.get("num_accepted_draft_tokens")),
    )


def parse_dynamo(timing: Mapping[str, object] | str) -> ServerTiming:
    """Parse `nvext` of Dynamo, which comes with the finish reason and has the timing in a field."""
    fields = timing.get("timing") if isinstance(timing, Mapping) else None
    if not isinstance(fields, Mapping):
        return NO_SERVER_TIMING

    ttft_ns = _milliseconds_to_ns(fields.get("ttft_ms"))
    total_ns = _milliseconds_to_ns(fields.get("total_time_ms"))
    return ServerTiming(
        queue_ns=_milliseconds_to_ns(fields.get("prefill_wait_time_ms")),
        prefill_ns=_milliseconds_to_ns(fields.get("prefill_time_ms")),
        decode_ns=_difference(total_ns, ttft_ns),
    )


def parse_llamacpp(timing: Mapping[str, object] | str) -> ServerTiming:
    """Parse `timings` of llama-server, which every response has.

    The server does not state how long a request waited for a slot.
    """
    if isinstance(timing, str):
        return NO_SERVER_TIMING
    return ServerTiming(
        prefill_ns=_milliseconds_to_ns(timing.get("prompt_ms")),
        decode_ns=_milliseconds_to_ns(timing.get("predicted_ms")),
        cached_tokens=_token_count(timing.get("cache_n")),
        drafted_tokens=_token_count(timing.get("draft_n")),
        accepted_tokens=_token_count(timing.get("draft_n_accepted")),
    )


def parse_sglang(timing: Mapping[str, object] | str) -> ServerTiming:
    """Parse `meta_info` of SGLang, which only responses that are not streamed have.

    It has durations and timestamps in seconds. All timestamps are of one clock of the server, so
    that their differences are durations: the prefill is the time from the arrival to the first
    token, without the queue. Older versions have no timestamp of the first token, and state only
    how long the launch of the prefill took. A value that the server does not state is None.

    Args:
        timing: The object `meta_info`. A text is not in this format and gives no timing.
    """
    if isinstance(timing, str):
        return NO_SERVER_TIMING

    # Timestamps
    arrival_ns = _seconds_to_ns(timing.get("request_sent_to_scheduler_ts"))
    first_token_ns = _seconds_to_ns(timing.get("prefill_finished_ts"))
    last_token_ns = _seconds_to_ns(timing.get("decode_finished_ts"))

    # Durations
    queue_ns = _seconds_to_ns(timing.get("queue_time"))
    time_to_first_token_ns = _difference(first_token_ns, arrival_ns)

    prefill_ns = _difference(time_to_first_token_ns, queue_ns)
    if prefill_ns is None:  # an older version
        prefill_ns = _sum(
            _seconds_to_ns(timing.get("prefill_launch_delay")),
            _seconds_to_ns(timing.get("prefill_launch_latency")),
        )

    return ServerTiming(
        queue_ns=queue_ns,
        prefill_ns=prefill_ns,
        decode_ns=_difference(last_token_ns, first_token_ns),
        cached_tokens=_token_count(timing.get("cached_tokens")),
        drafted_tokens=_token_count(timing.get("spec_draft_token_num")),
        accepted_tokens=_token_count(timing.get("spec_accept_token_num")),
    )


def _read_durations(header: str) -> dict[str, int | None]:
    """Return the durations of a `Server-Timing` header by their names, in ns.

    The header is a list such as `server_queue;dur=1.25, server_ttft;dur=8.5`, in milliseconds. An
    item without a number is skipped. A number that is no duration, such as -1, gives None.
    """
    durations: dict[str, int | None] = {}
    for item in header.split(","):
        name, _, milliseconds = item.strip().partition(";dur=")
        try:
            durations[name] = _milliseconds_to_ns(float(milliseconds))
        except ValueError:
            continue

    return durations


def _milliseconds_to_ns(value: object) -> int | None:
    """Return a number of milliseconds in ns.

    Return None if it is no duration: not a number, negative, or too large.
    """
    return round(value * _NS_PER_MS) if _is_number_up_to(value, _MAX_MS) else None


def _seconds_to_ns(value: object) -> int | None:
    """Return a number of seconds in ns, or None if it is no duration."""
    # The limit is checked before the product, because an int may be too large for a float.
    if not _is_number_up_to(value, _MAX_MS / _MS_PER_S):
        return None
    return _milliseconds_to_ns(value * _MS_PER_S)


def _is_number_up_to(value: object, limit: float) -> TypeGuard[int | float]:
    """Return True for a number from 0 to a limit. A bool is an int in Python, but no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= limit  # also false for NaN


def _token_count(value: object) -> int | None:
    """Return a number of tokens, or None if it is no such number."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= _MAX_TOKENS else None


def _difference(total_ns: int | None, part_ns: int | None) -> int | None:
    """Return what remains of a duration without a part of it.

    Return None if one of them is not known, or if the part is longer than the total, so that one
    of them must be wrong.
    """
    if total_ns is None or part_ns is None or total_ns < part_ns:
        return None
    return total_ns - part_ns


def _sum(first_ns: int | None, second_ns: int | None) -> int | None:
    """Return the sum of two durations, or None if one of them is not known."""
    if first_ns is None or second_ns is None:
        return None
    return first_ns + second_ns


def _first_known(*durations_ns: int | None) -> int | None:
    """Return the first duration that is known, or None if none is."""
    for duration_ns in durations_ns:
        if duration_ns is not None:
            return duration_ns
    return None
