"""Checks whether the log of a server is that of the run of the other tool. Pure.

A log of another run would turn the difference between two runs into a delay of the client. The log
and the result file have no common name of a request, so their sizes and times are compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loadgen.core import format, units
from loadgen.explain.comparability import MAX_TOKEN_RATIO
from loadgen.explain.other_result import OtherResult
from loadgen.explain.our_run import NS_PER_MS, LoadgenRun
from loadgen.explain.server_log import ServerTimes

CLOCK_TOLERANCE = 0.02
"""A server cannot take longer than its client measures. The clocks of two hosts, and a request that
only one side counts, may make it appear longer by this share."""

LARGEST_CLIENT_SHARE = 0.5
"""The largest share of the duration of a tool in which its server has nothing to do.

It is the time before the first request and after the last response. A busy genai-bench needed 30 %
of a load of 6.6 s (tests/data/rivals/genai_bench_concurrency.json).
"""


def list_log_differences(loadgen_run: LoadgenRun, other_result: OtherResult) -> list[str]:
    """Return why a server log cannot be from the run of the other tool, or [] if it can.

    A result without a log has no differences. The check compares numbers and times of requests, so
    the log of another run of the same load may pass.
    """
    log = other_result.server_times
    if log is None or len(log.tokens) == 0:
        return []
    return [
        *_compare_request_ids(log, loadgen_run),
        *_compare_tokens("prompt", log.mean_input_tokens, other_result.input_tokens_per_request),
        *_compare_tokens("output", log.mean_output_tokens, other_result.output_tokens_per_request),
        *_compare_response_times(log, other_result),
        *_compare_durations(log, other_result),
    ]


def _compare_request_ids(log: ServerTimes, loadgen_run: LoadgenRun) -> Iterator[str]:
    """Yield a difference if the log has requests of loadgen's run, such as "run7-12" of "run7"."""
    prefix = f"{loadgen_run.manifest.run}-"
    if any(request_id.startswith(prefix) for request_id in log.request_ids):
        yield "its requests are those of our own run"


def _compare_tokens(
    kind: str, logged_tokens: float, reported_tokens: float | None
) -> Iterator[str]:
    """Yield a difference if the tokens per response differ by more than MAX_TOKEN_RATIO.

    Smaller differences may come from two ways to count tokens.

    Args:
        kind: The tokens that are counted: "prompt" or "output".
        logged_tokens: The mean number in the server log.
        reported_tokens: The mean number in the result of the other tool. None if unknown.
    """
    if not logged_tokens or not reported_tokens:
        return

    shorter, longer = sorted((logged_tokens, reported_tokens))
    if longer > MAX_TOKEN_RATIO * shorter:
        yield (
            f"it has {logged_tokens:.4g} {kind} tokens per response, and the other result "
            f"{reported_tokens:.4g}"
        )


def _compare_response_times(log: ServerTimes, other_result: OtherResult) -> Iterator[str]:
    """Yield a difference if the server took longer for a response than its client measured.

    This is impossible but for CLOCK_TOLERANCE, so the log is from another run.
    """
    measured_ms = other_result.metrics.get("e2e_ms.mean")
    if measured_ms is None:
        return

    server_ms = float(np.mean(log.last_send_ns - log.arrival_ns)) / NS_PER_MS
    if server_ms > measured_ms * (1 + CLOCK_TOLERANCE):
        yield (
            f"its responses took {format.milliseconds(server_ms)} ms on average, which is longer "
            f"than the {format.milliseconds(measured_ms)} ms that the other tool measured"
        )


def _compare_durations(log: ServerTimes, other_result: OtherResult) -> Iterator[str]:
    """Yield a difference if the log covers a much longer or shorter time than the other run.

    A log may be shorter, because a client needs time before its first request and after its last
    response, but not by more than LARGEST_CLIENT_SHARE.
    """
    run_s = other_result.duration_s
    if run_s is None:
        return

    log_s = float(log.last_send_ns.max() - log.arrival_ns.min()) / units.NS_PER_S
    is_too_long = log_s > run_s * (1 + CLOCK_TOLERANCE)
    is_too_short = log_s < run_s * (1 - LARGEST_CLIENT_SHARE)
    if is_too_long or is_too_short:
        yield (
            f"its responses lasted {format.duration(log_s)}, and the other run "
            f"{format.duration(run_s)}"
        )
