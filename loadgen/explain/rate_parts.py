"""Splits the difference of a rate into definitions, and into how the two runs differ.

Pure. First, our rate is computed over the time that the other tool divides by. What remains is how
the runs differ. By Little's law, the rate of requests is the mean number of requests in flight
divided by their mean latency, so both factors explain it completely.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import FAILED, LOST, Columns
from loadgen.core.metrics.windows import (
    Span,
    estimate_tokens_within,
    is_within,
    make_span,
    per_second,
)
from loadgen.explain.other_result import OtherResult
from loadgen.explain.our_run import DefinedLatency, OurRun
from loadgen.explain.parts import (
    ExplainedMetric,
    MetricName,
    MetricStep,
    PartName,
    split_difference,
)
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


class _RateRatio(NamedTuple):
    """The factor by which a difference between the two runs changes a rate."""

    part: PartName
    factor: float


def explain_rates(ours: OurRun, theirs: OtherResult) -> Iterator[ExplainedMetric]:
    """Yield why the request rates and the rates of output tokens differ.

    A rate that one of the results does not have is left out.
    """
    headline = select_headline_rates(ours.summary)
    request_steps = []
    token_steps = []
    for window in _list_windows(ours, theirs):
        rates = _compute_rates(window)
        if rates.requests_per_s is not None:
            request_steps.append(MetricStep(window.step_name, rates.requests_per_s))
        if rates.tokens_per_s is not None:
            token_steps.append(MetricStep(window.step_name, rates.tokens_per_s))

    if headline.requests is not None and REQUEST_RATE.path in theirs.metrics:
        yield _explain_rate(ours, theirs, REQUEST_RATE, headline.requests, request_steps)
    if headline.output is not None and TOKEN_RATE.path in theirs.metrics:
        yield _explain_rate(ours, theirs, TOKEN_RATE, headline.output, token_steps)


def _explain_rate(
    ours: OurRun,
    theirs: OtherResult,
    name: MetricName,
    our_rate: float,
    window_steps: list[MetricStep],
) -> ExplainedMetric:
    """Return why a rate differs: first the time that it is divided by, then the two runs.

    Args:
        ours: Our run.
        theirs: The other result, which has this rate.
        name: REQUEST_RATE or TOKEN_RATE.
        our_rate: The rate that our run reports.
        window_steps: Our rate in each window of time, of which the last one is that of the other
            tool.
    """
    run_steps = []
    if window_steps:
        rate = window_steps[-1].value
        run_steps = _list_run_steps(ours, theirs, rate, is_tokens=name is TOKEN_RATE)
    return split_difference(
        name,
        our_rate,
        [*window_steps, *run_steps],
        theirs.metrics[name.path],
        redefinition_steps=len(window_steps),
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
    """Yield windows of time that change step by step from ours to that of the other tool.

    Our rate is that of the steady state. First the start-up is added, and then the tail, which is
    the time after the last request was started. Then more requests may count.
    """
    steady = ours.summary.window.steady
    start_s = ours.summary.window.start_s
    if steady.end_s is not None and start_s is not None:
        until_tail = make_span(start_s * NS_PER_S, steady.end_s * NS_PER_S)
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
    """Return the requests that ended in a window and the tokens received in it, per second."""
    columns = counted.requests.columns
    is_counted = counted.requests.is_successful
    end_ns = columns["end_ns"]
    if counted.counts_failed:
        is_counted = is_counted | _has_failed(columns)
        end_ns = columns["done_ns"]  # failed requests have no end of a response

    request_count = int((is_counted & is_within(end_ns, counted.window)).sum())
    token_count = estimate_tokens_within(columns, counted.window)
    return _Rates(
        requests_per_s=per_second(request_count, counted.window),
        tokens_per_s=per_second(token_count, counted.window),
    )


def _has_failed(columns: Columns) -> NDArray[np.bool_]:
    """Return which requests failed or were lost."""
    return columns.has_status(FAILED) | columns.has_status(LOST)


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
    our_factors = _find_our_factors(ours, theirs)
    their_factors = _find_their_factors(theirs)
    if our_factors is None or their_factors is None:
        return []

    ratios = []
    counts_failed = theirs.definitions.counts_failed_requests and not is_tokens
    if our_factors.ok_share and not counts_failed:
        ratios.append(_RateRatio("failures", their_factors.ok_share / our_factors.ok_share))

    if is_tokens:
        tokens = find_token_ratio(ours, theirs)
        ratios.append(_RateRatio("token_counts", tokens.counting))
        ratios.append(_RateRatio("response_lengths", tokens.length))

    steps = _multiply_steps(value, ratios)
    rate = steps[-1].value if steps else value
    their_rate = theirs.metrics[TOKEN_RATE.path if is_tokens else REQUEST_RATE.path]
    latency_ratio = our_factors.e2e_ms / their_factors.e2e_ms
    return steps + _multiply_steps(rate, _apply_littles_law(rate, their_rate, latency_ratio))


def _apply_littles_law(rate: float, their_rate: float, latency_ratio: float) -> list[_RateRatio]:
    """Return the ratios of requests in flight and of latencies, which lead to the other rate.

    By Little's law, a rate is the mean number of requests in flight divided by their latency.

    Args:
        rate: Our rate after all other steps.
        their_rate: The rate of the other tool.
        latency_ratio: Our mean latency divided by that of the other tool.
    """
    in_flight_ratio = their_rate / (rate * latency_ratio) if rate else 1.0
    return [_RateRatio("in_flight", in_flight_ratio), _RateRatio("latency", latency_ratio)]


def _multiply_steps(rate: float, ratios: Iterable[_RateRatio]) -> list[MetricStep]:
    """Return the rate after it was multiplied by each ratio, one after the other."""
    steps = []
    for ratio in ratios:
        rate *= ratio.factor
        steps.append(MetricStep(ratio.part, rate))
    return steps


def _find_our_factors(ours: OurRun, theirs: OtherResult) -> _RunFactors | None:
    """Return the success rate and mean E2E latency of our run as the other tool defines them.

    Return None if the tool does not define E2E latency, or our run has no such latency.
    """
    latency = theirs.definitions.find_latency("e2e")
    if latency is None:
        return None
    includes_warm_up = theirs.sent_no_warm_up and ours.has_warm_up
    our_latency = DefinedLatency(latency.definition, includes_warm_up=includes_warm_up)
    e2e_ms = ours.compute_statistic(our_latency, "mean")
    if not e2e_ms:
        return None

    requests = ours.select_requests(includes_warm_up=includes_warm_up)
    ok_count = int(requests.is_successful.sum())
    failed_count = int(_has_failed(requests.columns).sum())
    return _RunFactors(ok_share=ok_count / (ok_count + failed_count), e2e_ms=e2e_ms)


def _find_their_factors(theirs: OtherResult) -> _RunFactors | None:
    """Return the factors of the other rate, or None if its file has no mean latency.

    A tool that does not count failed requests is taken to have none.
    """
    e2e_ms = theirs.metrics.get("e2e_ms.mean") or _compute_their_e2e_ms(theirs)
    return _RunFactors(theirs.metrics.get("ok_share", 1.0), e2e_ms) if e2e_ms else None


def _compute_their_e2e_ms(theirs: OtherResult) -> float | None:
    """Return the mean E2E latency in ms, computed from the means of TTFT and TPOT, or None.

    A response takes its TTFT, and then its TPOT for each further token. This does not hold for a
    tool whose TPOT includes the time before the first token.
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
