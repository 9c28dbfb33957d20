"""The definitions of TTFT, TPOT, gaps and E2E latency of a request, one function each. Pure.

All of them use integer arithmetic on nanoseconds, which can be checked by hand. Timestamps are of
one monotonic clock, and NEVER means that the event did not happen. A value that is not defined is
None.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from loadgen_sdk.request import NEVER


def ttft(due: int, first_token: int) -> int | None:
    """Return the time to first token from the time when the request was due.

    A request that is sent late counts as slow. MLPerf LoadGen defines latency like this. wrk2 calls
    the alternative, to measure from the time of sending, coordinated omission.
    """
    return _duration(due, first_token)


def ttft_from_sent(sent: int, first_token: int) -> int | None:
    """Return the time to first token from the time of sending, as most other tools define it."""
    return _duration(sent, first_token)


def first_answer(due: int, answer: int) -> int | None:
    """Return the time to the first output that is not reasoning, for which a reader waits."""
    return _duration(due, answer)


def streamed_tokens(
    output_tokens: int, reasoning_tokens: int, first_token: int, first_answer: int
) -> int:
    """Return how many output tokens were streamed, for TPOT.

    Reasoning comes before the answer. If the first output event is already part of the answer, then
    the reasoning tokens were generated but not streamed.

    Args:
        output_tokens: The output tokens by the server's count.
        reasoning_tokens: The reasoning tokens among them. It is not positive if there are none, or
            if their number is not known.
        first_token: The timestamp of the first output event.
        first_answer: The timestamp of the first output event that is not reasoning.
    """
    has_hidden_reasoning = reasoning_tokens > 0 and first_token == first_answer
    if has_hidden_reasoning:
        return output_tokens - reasoning_tokens
    return output_tokens


def tpot(
    first_token: int, last_token: int, tokens: float, first_event_tokens: int = 1
) -> int | None:
    """Return the time per output token (TPOT) after the first event, in ns, rounded down.

    It is the time from the first to the last output event, divided by the tokens after the first
    event. It is not defined (None) in two cases: no token follows the first event, or all output
    came at the same time. A value of 0 would say that the tokens took no time.

    Args:
        first_token: The timestamp of the first output event, or NEVER.
        last_token: The timestamp of the last output event, or NEVER.
        tokens: The streamed tokens (`streamed_tokens`). They are a mean, which may have a fraction,
            if the response has several choices.
        first_event_tokens: The tokens of the first output event if the server reports them, else 1.
    """
    if NEVER in (first_token, last_token):
        return None
    tokens_after_first_event = tokens - first_event_tokens
    duration_ns = last_token - first_token
    if tokens_after_first_event <= 0 or duration_ns == 0:
        return None
    return int(duration_ns // tokens_after_first_event)


def tpot_mlperf(due: int, first_token: int, end: int, tokens: int) -> int | None:
    """Return the TPOT of MLPerf LoadGen, `(latency - ttft) // (tokens - 1)`.

    It is not defined (None) for a single token.

    The source is loadgen/results.cc of mlcommons/inference. The value differs from `tpot` if the
    request ends after its last token.
    """
    if NEVER in (due, first_token, end) or tokens <= 1:
        return None
    latency = end - due
    ttft_ns = first_token - due
    return (latency - ttft_ns) // (tokens - 1)


def e2e(due: int, end: int) -> int | None:
    """Return the time from due to the last output or finish event.

    The end of the body does not count, because metrics of the server may follow the output.
    """
    return _duration(due, end)


def send_lag(due: int, sent: int) -> int | None:
    """Return how late the load generator sent a request, the time to connect included."""
    return _duration(due, sent)


def gaps(events: Sequence[int]) -> list[int]:
    """Return the gaps between successive output events.

    Pooled over requests, they are the metric `inter_chunk`. If every event has one token, they are
    inter-token latencies, too.
    """
    return [later - earlier for earlier, later in pairwise(events)]


def _duration(start: int, end: int) -> int | None:
    """Return the time between two timestamps, or None if one of them is NEVER."""
    return None if NEVER in (start, end) else end - start
