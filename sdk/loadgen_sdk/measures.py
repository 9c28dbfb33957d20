"""The definitions of TTFT, TPOT, gaps and E2E of a request: one function each, used everywhere.

Integer arithmetic on nanoseconds, which can be checked by hand. Instants are on one monotonic clock; NEVER (-1) means
that the event did not happen. A value that is not defined is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from loadgen_sdk.request import NEVER


def ttft(due: int, first_token: int) -> int | None:
    """Time to first token: `first_token - due`, from the planned instant, so that a late send counts.

    Source: MLPerf LoadGen counts latency from the scheduled instant; wrk2 calls the alternative coordinated omission.
    """
    return None if NEVER in (due, first_token) else first_token - due


def ttft_from_sent(sent: int, first_token: int) -> int | None:
    """`first_token - sent`: the TTFT of most other tools; printed beside ours."""
    return None if NEVER in (sent, first_token) else first_token - sent


def first_answer(due: int, answer: int) -> int | None:
    """`answer - due`: time to the first output that is not reasoning, the output that a reader waits for."""
    return None if NEVER in (due, answer) else answer - due


def streamed_tokens(output: int, reasoning: int, first_token: int, answer: int) -> int:
    """The n of TPOT: output tokens by the server's count, without reasoning tokens that were not streamed.

    Reasoning comes before the answer: if the first output event is already answer, no reasoning was streamed.
    `reasoning` <= 0: none or unknown.
    """
    return output - reasoning if reasoning > 0 and first_token == answer else output


def tpot(first_token: int, last_token: int, n: float, n1: int = 1) -> int | None:
    """Time per output token after the first event: `(last_token - first_token) // (n - n1)`, floored to the nanosecond.

    n: tokens streamed (`streamed_tokens`), of one choice where there are several; n1: tokens of the
    first output event if the server reports them, else 1.
    None when n <= n1, because there is nothing to divide by, and when all output came at one instant, in one event or
    one write: there is no span, and 0 would say that its tokens took no time.
    """
    if NEVER in (first_token, last_token) or n <= n1 or last_token == first_token:
        return None
    return int((last_token - first_token) // (n - n1))


def tpot_mlperf(due: int, first_token: int, end: int, n: int) -> int | None:
    """LoadGen's TPOT: `(latency - ttft) // (n - 1)`, with latency and ttft from `due`; None when n <= 1.

    Source: mlcommons/inference, loadgen/results.cc. It differs from `tpot` if latency ends after the last token.
    """
    if NEVER in (due, first_token, end) or n <= 1:
        return None
    return ((end - due) - (first_token - due)) // (n - 1)


def e2e(due: int, end: int) -> int | None:
    """End to end: last output or finish event - `due`. Not the end of the body, which may have metrics after it."""
    return None if NEVER in (due, end) else end - due


def send_lag(due: int, sent: int) -> int | None:
    """`sent - due`: the delay by the generator itself, with the time to connect."""
    return None if NEVER in (due, sent) else sent - due


def gaps(events: Sequence[int]) -> list[int]:
    """The gaps between successive output events. Pooled over requests they are `inter_chunk`.

    If every event carries one token they are also ITL.
    """
    return [later - earlier for earlier, later in pairwise(events)]
