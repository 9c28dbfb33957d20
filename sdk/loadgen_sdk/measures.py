"""The per-request definitions of TTFT, TPOT, gaps and E2E: the only ones, one function each.

Plain integer arithmetic on nanoseconds, so that anybody can check it with a pencil. Instants are on one monotonic
clock; NEVER (-1) means that it did not happen, and what cannot be said is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from loadgen_sdk.request import NEVER


def ttft(due: int, first_token: int) -> int | None:
    """Time to first token: `first_token - due`, from the planned instant, so that a late send is not hidden.

    Source: MLPerf LoadGen counts latency from the scheduled instant; wrk2 calls the alternative coordinated omission.
    """
    return None if NEVER in (due, first_token) else first_token - due


def ttft_from_sent(sent: int, first_token: int) -> int | None:
    """`first_token - sent`: what most other tools call TTFT; printed beside it."""
    return None if NEVER in (sent, first_token) else first_token - sent


def first_answer(due: int, answer: int) -> int | None:
    """`first_answer - due`: the first output that is not reasoning, which is what a reader waits for."""
    return None if NEVER in (due, answer) else answer - due


def streamed_tokens(output: int, reasoning: int, first_token: int, answer: int) -> int:
    """n of TPOT: output tokens as the server counts them, less reasoning tokens that were never streamed.

    Reasoning comes before the answer, so when the first output event is already answer none of it was streamed.
    `reasoning` <= 0 is none or unknown.
    """
    return output - reasoning if reasoning > 0 and first_token == answer else output


def tpot(first_token: int, last_token: int, n: int, n1: int = 1) -> int | None:
    """Time per output token after the first event: `(last_token - first_token) // (n - n1)`, floored to the nanosecond.

    n: tokens streamed (`streamed_tokens`); n1: tokens of the first output event when the server says, else 1. None when
    n <= n1: there is nothing to divide by, and the request is counted but left out.
    """
    if NEVER in (first_token, last_token) or n <= n1:
        return None
    return (last_token - first_token) // (n - n1)


def tpot_mlperf(due: int, first_token: int, end: int, n: int) -> int | None:
    """LoadGen's TPOT: `(latency - ttft) // (n - 1)`, latency and ttft both from `due`; None when n <= 1.

    Source: mlcommons/inference, loadgen/results.cc. It differs from `tpot` where latency ends after the last token.
    """
    if NEVER in (due, first_token, end) or n <= 1:
        return None
    return ((end - due) - (first_token - due)) // (n - 1)


def e2e(due: int, end: int) -> int | None:
    """End to end: last output or finish event - `due`; never the end of the body, which may carry metrics after it."""
    return None if NEVER in (due, end) else end - due


def send_lag(due: int, sent: int) -> int | None:
    """`sent - due`: the generator's own lateness, connection set-up included."""
    return None if NEVER in (due, sent) else sent - due


def gaps(events: Sequence[int]) -> list[int]:
    """Every gap between successive output events. Pooled over requests they are `inter_chunk`, and ITL where every
    event carries one token.
    """
    return [later - earlier for earlier, later in pairwise(events)]
