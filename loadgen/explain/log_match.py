"""Checks whether the log of a server is that of the run of the other tool. Pure.

A log of another run would turn the difference between two runs into a delay of the client. The log
and the result file have no common name of a request, so their sizes and times are compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loadgen.core import format
from loadgen.explain.comparability import MAX_TOKEN_RATIO
from loadgen.explain.other_result import OtherResult
from loadgen.explain.our_run import NS_PER_MS, OurRun
from loadgen.explain.server_log import ServerTimes

CLOCK_TOLERANCE = 0.02
"""A server cannot take longer than its client measures. The clocks of two hosts, and a request that
only one side counts, may make it appear longer by this share."""

LARGEST_CLIENT_SHARE = 0.5
"""The largest share of the duration of a tool in which its server has nothing to do.

It is the time before the first request and after the last response. A busy genai-bench needed 30 %
of a load of 6.6 s (tests/data/rivals/genai_bench_concurrency.json).
"""

NS_PER_S = 1e9


def list_log_differences(ours: OurRun, theirs: OtherResult) -> list[str]:
    """Return why a log cannot be that of the other run, or [] if nothing contradicts it.

    Return [] for a result without a log, too. A log of another run of the same load is not
    recognised, if its requests are as long and its responses as fast.
    """
    log = theirs.server_times
    if log is None or len(log.tokens) == 0:
        return []
    return [
        *_compare_request_ids(log, ours),
        *_compare_tokens("prompt", log.mean_input_tokens, theirs.input_tokens_per_request),
        *_compare_tokens("output", log.mean_output_tokens, theirs.output_tokens_per_request),
        *_compare_response_times(log, theirs),
        *_compare_durations(log, theirs),
    ]


def _compare_request_ids(log: ServerTimes, ours: OurRun) -> Iterator[str]:
    """Yield a difference if the log has requests of our run, whose ids begin with its name."""
    prefix = f"{ours.manifest.run}-"
    if any(request_id.startswith(prefix) for request_id in log.request_ids):
        yield "its requests are those of our own run"


def _compare_tokens(
    kind: str, logged_tokens: float, reported_tokens: float | None
) -> Iterator[str]:
    """Yield a difference if the lengths of requests differ more than two ways to count tokens.

    Args:
        kind: The tokens that are counted: "prompt" or "output".
        logged_tokens: The tokens per response in the log.
        reported_tokens: The tokens per response in the other result. None if it does not say.
    """
    if not logged_tokens or not reported_tokens:
        return
    shorter, longer = sorted((logged_tokens, reported_tokens))
    if longer > MAX_TOKEN_RATIO * shorter:
        yield (
            f"it has {logged_tokens:.4g} {kind} tokens per response, and the other result "
            f"{reported_tokens:.4g}"
        )


def _compare_response_times(log: ServerTimes, theirs: OtherResult) -> Iterator[str]:
    """Yield a difference if the server took longer for a response than the other tool measured."""
    measured_ms = theirs.metrics.get("e2e_ms.mean")
    server_ms = float(np.mean(log.last_send_ns - log.arrival_ns)) / NS_PER_MS
    if measured_ms is not None and server_ms > measured_ms * (1 + CLOCK_TOLERANCE):
        yield (
            f"its responses took {format.milliseconds(server_ms)} ms on average, which is longer "
            f"than the {format.milliseconds(measured_ms)} ms that the other tool measured"
        )


def _compare_durations(log: ServerTimes, theirs: OtherResult) -> Iterator[str]:
    """Yield a difference if the responses cannot fill the duration of the other run.

    They do not fit into a shorter one, and of a longer one they leave too much time unexplained.
    """
    tool_s = theirs.duration_s
    if tool_s is None:
        return

    log_s = float(log.last_send_ns.max() - log.arrival_ns.min()) / NS_PER_S
    is_too_long = log_s > tool_s * (1 + CLOCK_TOLERANCE)
    is_too_short = log_s < tool_s * (1 - LARGEST_CLIENT_SHARE)
    if is_too_long or is_too_short:
        yield (
            f"its responses lasted {format.duration(log_s)}, and the other run "
            f"{format.duration(tool_s)}"
        )
