"""What a server says of its own time for one request: waiting, prefill, transfer of the KV cache, decoding. Pure.

Each kind of server has its own form; all are read to the same few durations. Only durations on the server's own clock
are used, never its instants: the two clocks do not agree. A damaged form says nothing, and raises nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

UNKNOWN = -1
_MS = 1_000_000


class ServerTiming(NamedTuple):
    """The server's account of one request: durations in ns, and counts of tokens. UNKNOWN: the server does not say."""

    queue: int = UNKNOWN  # from its arrival until the server began to work on it
    prefill: int = UNKNOWN  # from there to the first token
    transfer: int = (
        UNKNOWN  # of the KV cache, from the server of the prefill to that of the decoding
    )
    decode: int = UNKNOWN  # from the first token to the last one
    cached: int = UNKNOWN  # prompt tokens found in its cache
    drafted: int = UNKNOWN  # tokens that speculation proposed
    accepted: int = UNKNOWN  # of those, the ones that were right

    @property
    def timed(self) -> bool:
        """Whether it says where time went, not only what was counted."""
        return max(self.queue, self.prefill, self.transfer, self.decode) >= 0


NO_SERVER_TIMING = ServerTiming()


TimingParser = Callable[[Mapping[str, Any] | str], ServerTiming]
"""Reads one form of an account: a JSON object of the response, or the text of a header."""


def _ns(milliseconds: Any) -> int:
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float):
        return UNKNOWN
    return (
        round(milliseconds * _MS) if math.isfinite(milliseconds) and milliseconds >= 0 else UNKNOWN
    )


def _count(tokens: Any) -> int:
    return (
        tokens
        if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0
        else UNKNOWN
    )


def _less(whole: int, part: int) -> int:
    return whole - part if whole >= part >= 0 else UNKNOWN


def _first_known(*values: int) -> int:
    return next((value for value in values if value >= 0), UNKNOWN)


def trtllm(form: Mapping[str, Any] | str) -> ServerTiming:
    """`Server-Timing` of trtllm-serve, as a header or in its event after `[DONE]`: `server_queue;dur=1.25, ...`.

    A disaggregated server has an entry of each kind per phase: `ctx_` for the prefill, `gen_` for the decoding.
    """
    text = form if isinstance(form, str) else form.get("Server-Timing", "")
    duration: dict[str, int] = {}
    for item in text.split(",") if isinstance(text, str) else ():
        name, _, number = item.strip().partition(";dur=")
        try:
            duration[name] = _ns(float(number))
        except ValueError:
            continue

    def of(kind: str, *phases: str) -> int:
        return _first_known(*(duration.get(f"{phase}_{kind}", UNKNOWN) for phase in phases))

    queue, first = of("queue", "server", "ctx"), of("ttft", "server", "ctx")
    return ServerTiming(
        queue=queue,
        prefill=_less(first, queue),
        transfer=of("kv_transfer", "server", "gen"),
        decode=_less(of("e2e", "server", "gen"), of("ttft", "server", "gen")),
    )


def trtllm_drafts(form: Mapping[str, Any] | str) -> ServerTiming:
    """`speculative_decoding` of trtllm-serve since 1.4, in the choice that has the finish reason."""
    if isinstance(form, str):
        return NO_SERVER_TIMING
    return ServerTiming(
        drafted=_count(form.get("total_draft_tokens")),
        accepted=_count(form.get("total_accepted_draft_tokens")),
    )


def vllm(form: Mapping[str, Any] | str) -> ServerTiming:
    """`metrics` of vLLM, with the usage. Its time to first token begins when the request leaves the queue."""
    if isinstance(form, str):
        return NO_SERVER_TIMING
    names = ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
    queue, prefill, decode = (_ns(form.get(name)) for name in names)
    drafts = form.get("speculative_decoding")  # of 0.29 on, with --per-request-spec-decode-metrics
    drafts = drafts if isinstance(drafts, Mapping) else {}
    drafted, accepted = (
        _count(drafts.get(f"num_{name}_tokens")) for name in ("draft", "accepted_draft")
    )
    return ServerTiming(
        queue=queue, prefill=prefill, decode=decode, drafted=drafted, accepted=accepted
    )


def dynamo(form: Mapping[str, Any] | str) -> ServerTiming:
    """`nvext.timing` of Dynamo, with the finish reason."""
    timing = form.get("timing") if isinstance(form, Mapping) else None
    if not isinstance(timing, Mapping):
        return NO_SERVER_TIMING
    names = ("prefill_wait_time_ms", "prefill_time_ms", "ttft_ms", "total_time_ms")
    queue, prefill, first, total = (_ns(timing.get(name)) for name in names)
    return ServerTiming(queue=queue, prefill=prefill, decode=_less(total, first))


def llamacpp(form: Mapping[str, Any] | str) -> ServerTiming:
    """`timings` of llama-server, in every answer. It does not say how long a request waited for a slot."""
    if isinstance(form, str):
        return NO_SERVER_TIMING
    return ServerTiming(
        prefill=_ns(form.get("prompt_ms")),
        decode=_ns(form.get("predicted_ms")),
        cached=_count(form.get("cache_n")),
        drafted=_count(form.get("draft_n")),
        accepted=_count(form.get("draft_n_accepted")),
    )


def sglang(form: Mapping[str, Any] | str) -> ServerTiming:
    """`meta_info` of SGLang, in whole answers only, in seconds. Its instants are all on one clock of the server."""
    if isinstance(form, str):
        return NO_SERVER_TIMING
    queue = _of_seconds(form.get("queue_time"))
    names = ("request_sent_to_scheduler_ts", "prefill_finished_ts", "decode_finished_ts")
    arrival, first, last = (_of_seconds(form.get(name)) for name in names)
    launch = [_of_seconds(form.get(f"prefill_launch_{part}")) for part in ("delay", "latency")]
    launched = sum(launch) if min(launch) >= 0 else UNKNOWN  # all that older versions say of it
    return ServerTiming(
        queue=queue,
        prefill=_first_known(_less(_less(first, arrival), queue), launched),
        decode=_less(last, first),
        cached=_count(form.get("cached_tokens")),
        drafted=_count(form.get("spec_draft_token_num")),
        accepted=_count(form.get("spec_accept_token_num")),
    )


def _of_seconds(seconds: Any) -> int:
    return (
        _ns(seconds * 1e3)
        if isinstance(seconds, int | float) and not isinstance(seconds, bool)
        else UNKNOWN
    )


HEADER = "server-timing"
