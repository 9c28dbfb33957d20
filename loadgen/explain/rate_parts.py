"""Splits the difference of a rate into definitions, and into how the two runs differ.

Pure. First, our rate is computed over the time that the other tool divides by. What remains is how
the runs differ. By Little's law, the rate of requests is the mean number of requests in flight
divided by their mean latency, so both factors explain it completely.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import FAILED, LOST, Columns
from loadgen.core.metrics.windows import (
    Span,
    estimate_tokens_within,
    is_within,
    per_second,
    span,
)
from loadgen.explain.other_result import OtherResult
from loadgen.explain.our_run import DefinedLatency, OurRun
from loadgen.explain.parts import ExplainedMetric, MetricName, MetricStep, split_difference
from loadgen.explain.token_ratio import find_token_ratio
from loadgen.interop import benchmark_windows
from loadgen.interop.tool_definitions import RateWindow
from loadgen.interop.tool_samples import SuccessfulRequests
from loadgen.runs.rates import select_headline_rates

NS_PER_S = 1e9

REQUEST_RATE = MetricName("load.completed_rps", "requests/s")
TOKEN_RATE = MetricName("tokens.output_per_s", "output tokens/s")


class _Rates(NamedTuple):
    """The rates of successful requests and of their output tokens in a window. None if unknown."""

    requests_per_s: float | None
    tokens_per_s: float | None


class _RunFactors(NamedTuple):
    """What determines the rate of a run.

    Attributes:
        ok_share: The share of its requests that succeeded.
        e2e_ms: The mean E2E latency.
    """

    ok_share: float
    e2e_ms: float


def explain_rates(ours: OurRun, theirs: OtherResult) -> Iterator[ExplainedMetric]:
    """Yield the rate of requests and that of output tokens, as far as both results have them."""
    headline = select_headline_rates(ours.summary)
    windows = list(_list_windows(ours, theirs))
    rates_by_window = [_compute_rates(window) for window in windows]

    for name, our_value in (
        (REQUEST_RATE, headline.requests),
        (TOKEN_RATE, headline.output),
    ):
        their_value = theirs.metrics.get(name.path)
        if our_value is None or their_value is None:
            continue

        is_tokens = name is TOKEN_RATE
        steps = []
        for window, rates in zip(windows, rates_by_window, strict=True):
            value = rates.tokens_per_s if is_tokens else rates.requests_per_s
            if value is not None:
                steps.append(MetricStep(window.step_name, value))

        definition_count = len(steps)
        if steps:
            steps += _list_run_steps(ours, theirs, steps[-1].value, is_tokens=is_tokens)
        yield split_difference(
            name, our_value, steps, their_value, redefinition_steps=definition_count
        )


class _CountedWindow(NamedTuple):
    """A window of time with the requests that count in it.

    Attributes:
        step_name: The part that the change to this window is named after.
        window: The window.
        requests: The requests.
        counts_failed: Whether failed requests count as requests.
    """

    step_name: Literal["start_up", "tail", "warm_up", "failures"]
    window: Span
    requests: SuccessfulRequests
    counts_failed: bool = False


def _list_windows(ours: OurRun, theirs: OtherResult) -> Iterator[_CountedWindow]:
    """Yield the windows from ours, the steady state, to that of the other tool.

    The start-up is added first, and then the tail: the time after the last request was started.
    """
    steady = ours.summary.window.steady
    start_s = ours.summary.window.start_s
    if steady.end_s is not None and start_s is not None:
        until_tail = span(start_s * NS_PER_S, steady.end_s * NS_PER_S)
        yield _CountedWindow("start_up", until_tail, ours.measured)

    rate_window = theirs.definitions.rate_window
    yield _CountedWindow("tail", _find_window(ours.measured, rate_window), ours.measured)

    requests = ours.measured
    if theirs.sent_no_warm_up and ours.has_warm_up:
        requests = ours.all_requests
        yield _CountedWindow("warm_up", _find_window(requests, rate_window), requests)

    if theirs.definitions.counts_failed_requests:
        window = _find_window(requests, rate_window)
        yield _CountedWindow("failures", window, requests, counts_failed=True)


def _find_window(requests: SuccessfulRequests, rate_window: RateWindow) -> Span:
    """Return the time that the other tool divides by, of our requests."""
    columns = requests.columns
    if rate_window == "successful_requests":
        return benchmark_windows.span_of_successful_requests(columns, requests.is_successful)
    return benchmark_windows.span_of_sent_requests(columns)


def _compute_rates(counted: _CountedWindow) -> _Rates:
    """Return the rates in a window: requests that ended in it, and tokens that came in it."""
    columns = counted.requests.columns
    counts = counted.requests.is_successful
    if counted.counts_failed:
        counts = counts | _has_failed(columns)

    ended_ns = columns["done_ns"] if counted.counts_failed else columns["end_ns"]
    ended = int((counts & is_within(ended_ns, counted.window)).sum())
    tokens = estimate_tokens_within(columns, counted.window)
    return _Rates(per_second(ended, counted.window), per_second(tokens, counted.window))


def _has_failed(columns: Columns) -> NDArray[np.bool_]:
    """Return which requests failed or were lost."""
    return columns.where(FAILED) | columns.where(LOST)


def _list_run_steps(
    ours: OurRun, theirs: OtherResult, value: float, *, is_tokens: bool
) -> list[MetricStep]:
    """Return how the rest of the difference follows from how the two runs differ.

    Args:
        ours: Our run.
        theirs: The other result.
        value: Our rate by the definition of the other tool.
        is_tokens: Whether it is a rate of tokens.
    """
    name = TOKEN_RATE if is_tokens else REQUEST_RATE
    our_factors = _find_our_factors(ours, theirs)
    their_factors = _find_their_factors(theirs)
    if our_factors is None or their_factors is None:
        return []

    steps = []
    counts_failed = theirs.definitions.counts_failed_requests and not is_tokens
    if our_factors.ok_share and not counts_failed:
        value *= their_factors.ok_share / our_factors.ok_share
        steps.append(MetricStep("failures", value))

    if is_tokens:
        tokens = find_token_ratio(ours, theirs)
        value *= tokens.counting
        steps.append(MetricStep("token_counts", value))
        value *= tokens.length
        steps.append(MetricStep("response_lengths", value))

    # The rate is the mean number in flight divided by the latency, so what is left after the ratio
    # of the latencies is the ratio of the numbers in flight.
    latency_ratio = our_factors.e2e_ms / their_factors.e2e_ms
    in_flight_ratio = theirs.metrics[name.path] / (value * latency_ratio) if value else 1.0
    value *= in_flight_ratio
    steps.append(MetricStep("in_flight", value))
    value *= latency_ratio
    steps.append(MetricStep("latency", value))

    return steps


def _find_our_factors(ours: OurRun, theirs: OtherResult) -> _RunFactors | None:
    """Return the factors of our rate by the definition of the other tool, or None."""
    latency = theirs.definitions.find_latency("e2e")
    if latency is None:
        return None
    counts_warm_up = theirs.sent_no_warm_up and ours.has_warm_up
    e2e_ms = ours.compute_statistic(
        DefinedLatency(latency.definition, includes_warm_up=counts_warm_up), "mean"
    )
    if not e2e_ms:
        return None

    requests = ours.requests(includes_warm_up=counts_warm_up)
    ok = int(requests.is_successful.sum())
    failed = int(_has_failed(requests.columns).sum())
    return _RunFactors(ok / (ok + failed), e2e_ms)


def _find_their_factors(theirs: OtherResult) -> _RunFactors | None:
    """Return the factors of the other rate, or None if its file has no mean latency.

    A tool that does not count failed requests is taken to have none.
    """
    e2e_ms = theirs.metrics.get("e2e_ms.mean") or _compute_their_e2e_ms(theirs)
    return _RunFactors(theirs.metrics.get("ok_share", 1.0), e2e_ms) if e2e_ms else None


def _compute_their_e2e_ms(theirs: OtherResult) -> float | None:
    """Return the mean E2E latency of a file that has only TTFT and TPOT, or None.

    A response takes its TTFT, and then its TPOT for each further token.
    """
    tpot = theirs.definitions.find_latency("tpot")
    if tpot is None or tpot.definition.start == "sent_ns":
        return None

    ttft_ms = theirs.metrics.get("ttft_ms.mean")
    tpot_ms = theirs.metrics.get(f"{tpot.metric}.mean")
    tokens = theirs.output_tokens_per_request
    if ttft_ms is None or tpot_ms is None or tokens is None:
        return None
    return ttft_ms + tpot_ms * (tokens - 1)
