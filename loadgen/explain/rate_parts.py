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
from loadgen.explain.our_run import DefinedLatency, LoadgenRun
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
    """The rates of requests and of output tokens over a window of time. None if unknown."""

    requests_per_s: float | None
    tokens_per_s: float | None


class _RunFactors(NamedTuple):
    """Two properties of a run that its rate depends on.

    Attributes:
        ok_share: The share of requests that succeeded, such as 0.98.
        e2e_ms: The mean E2E latency in ms.
    """

    ok_share: float
    e2e_ms: float


class _RateRatio(NamedTuple):
    """A difference between two runs, and the factor by which it changes a rate."""

    part: PartName
    factor: float


def explain_rates(loadgen_run: LoadgenRun, other_result: OtherResult) -> Iterator[ExplainedMetric]:
    """Yield why requests/s and output tokens/s differ between loadgen and another tool.

    A rate that one of the results does not have is left out.
    """
    reported = select_headline_rates(loadgen_run.summary)

    # The rates of loadgen over windows of time that become that of the other tool.
    request_steps = []
    token_steps = []
    for window in _list_windows(loadgen_run, other_result):
        rates = _compute_rates(window)
        if rates.requests_per_s is not None:
            request_steps.append(MetricStep(window.step_name, rates.requests_per_s))
        if rates.tokens_per_s is not None:
            token_steps.append(MetricStep(window.step_name, rates.tokens_per_s))

    if reported.requests is not None and REQUEST_RATE.path in other_result.metrics:
        yield _explain_rate(
            loadgen_run, other_result, REQUEST_RATE, reported.requests, request_steps
        )
    if reported.output is not None and TOKEN_RATE.path in other_result.metrics:
        yield _explain_rate(loadgen_run, other_result, TOKEN_RATE, reported.output, token_steps)


def _explain_rate(
    loadgen_run: LoadgenRun,
    other_result: OtherResult,
    name: MetricName,
    loadgen_rate: float,
    window_steps: list[MetricStep],
) -> ExplainedMetric:
    """Return why a rate differs between loadgen and another tool, in parts.

    The first parts come from the time over which the rate is computed. The later parts come from
    the runs, such as a larger share of failed requests.

    Args:
        loadgen_run: The run of loadgen.
        other_result: The result of the other tool, which has this rate.
        name: REQUEST_RATE or TOKEN_RATE.
        loadgen_rate: The rate that loadgen reports.
        window_steps: The rate of loadgen in each window of time. The last window is the one that
            the other tool uses. Empty if loadgen's rate is unknown in all of them.
    """
    run_steps = []
    if window_steps:
        rate_in_other_window = window_steps[-1].value
        run_steps = _list_run_steps(
            loadgen_run, other_result, rate_in_other_window, is_token_rate=name == TOKEN_RATE
        )

    other_rate = other_result.metrics[name.path]
    return split_difference(name, loadgen_rate, window_steps, other_rate, run_steps=run_steps)


class _CountedWindow(NamedTuple):
    """A window of time, and the requests of loadgen's run that count in it.

    Attributes:
        step_name: The name of the change from the previous window to this one.
        window: The window.
        requests: The requests.
        counts_failed: Whether failed requests count as requests.
    """

    step_name: Literal["start_up", "tail", "warm_up", "failures"]
    window: Span
    requests: SuccessfulRequests
    counts_failed: bool = False


def _list_windows(loadgen_run: LoadgenRun, other_result: OtherResult) -> Iterator[_CountedWindow]:
    """Yield windows of time that change step by step from loadgen's to the other tool's.

    Loadgen computes rates over the steady state, in which the load is constant. The first step adds
    the start-up, and the second adds the tail, in which the last responses end. If the other tool
    counts them, the warm-up and failed requests are added, too.
    """
    steady = loadgen_run.summary.window.steady
    start_s = loadgen_run.summary.window.start_s
    rate_window = other_result.definitions.rate_window
    measured = loadgen_run.measured

    if steady.end_s is not None and start_s is not None:
        until_tail = make_span(start_s * NS_PER_S, steady.end_s * NS_PER_S)
        yield _CountedWindow("start_up", until_tail, measured)

    yield _CountedWindow("tail", _find_window(measured, rate_window), measured)

    requests = measured
    if other_result.sent_no_warm_up and loadgen_run.has_warm_up:
        requests = loadgen_run.all_requests
        yield _CountedWindow("warm_up", _find_window(requests, rate_window), requests)

    if other_result.definitions.counts_failed_requests:
        window = _find_window(requests, rate_window)
        yield _CountedWindow("failures", window, requests, counts_failed=True)


def _find_window(requests: SuccessfulRequests, rate_window: RateWindow) -> Span:
    """Return the time from the first request sent to the end of the last response.

    Only successful requests count if the rate window is "successful_requests".
    """
    columns = requests.columns
    if rate_window == "successful_requests":
        return benchmark_windows.span_of_successful_requests(columns, requests.is_successful)
    return benchmark_windows.span_of_sent_requests(columns)


def _compute_rates(counted: _CountedWindow) -> _Rates:
    """Return the requests that ended in a window and the tokens received in it, per second."""
    request_count = _count_ended_requests(counted)
    token_count = estimate_tokens_within(counted.requests.columns, counted.window)
    return _Rates(
        requests_per_s=per_second(request_count, counted.window),
        tokens_per_s=per_second(token_count, counted.window),
    )


def _count_ended_requests(counted: _CountedWindow) -> int:
    """Return how many requests ended in a window: the successful ones, or also the failed ones.

    A failed request may have no end of its response (`end_ns`), but every request has a time at
    which it was done (`done_ns`).
    """
    columns = counted.requests.columns
    is_successful = counted.requests.is_successful
    if counted.counts_failed:
        has_ended = is_successful | _has_failed(columns)
        is_in_window = is_within(columns["done_ns"], counted.window)
    else:
        has_ended = is_successful
        is_in_window = is_within(columns["end_ns"], counted.window)
    return int((has_ended & is_in_window).sum())


def _has_failed(columns: Columns) -> NDArray[np.bool_]:
    """Return which requests failed or were lost."""
    return columns.has_status(FAILED) | columns.has_status(LOST)


def _list_run_steps(
    loadgen_run: LoadgenRun,
    other_result: OtherResult,
    redefined_rate: float,
    *,
    is_token_rate: bool,
) -> list[MetricStep]:
    """Return a rate of loadgen after each difference between the two runs is removed.

    Example: if 98 % of loadgen's requests succeeded and 95 % of the other tool's, the first step
    multiplies the rate by 0.95 / 0.98. Return [] if a success rate or a mean latency is unknown.

    Args:
        loadgen_run: The run of loadgen.
        other_result: The result of the other tool.
        redefined_rate: The rate of loadgen's run by the definition of the other tool.
        is_token_rate: Whether the rate counts tokens instead of requests.
    """
    loadgen_factors = _find_loadgen_factors(loadgen_run, other_result)
    other_factors = _find_other_factors(other_result)
    if loadgen_factors is None or other_factors is None:
        return []

    # The share of requests that succeeded.
    ratios = []
    counts_failed = other_result.definitions.counts_failed_requests and not is_token_rate
    if loadgen_factors.ok_share and not counts_failed:
        ok_ratio = other_factors.ok_share / loadgen_factors.ok_share
        ratios.append(_RateRatio("failures", ok_ratio))

    # The tokens of a response.
    if is_token_rate:
        tokens = find_token_ratio(loadgen_run, other_result)
        ratios.append(_RateRatio("token_counts", tokens.counting))
        ratios.append(_RateRatio("response_lengths", tokens.length))

    first_steps = _multiply_steps(redefined_rate, ratios)
    rate_after_steps = first_steps[-1].value if first_steps else redefined_rate

    # The requests in flight and their latency, which lead to the rate of the other tool.
    rate_name = TOKEN_RATE if is_token_rate else REQUEST_RATE
    other_rate = other_result.metrics[rate_name.path]
    latency_ratio = loadgen_factors.e2e_ms / other_factors.e2e_ms
    last_ratios = _apply_littles_law(rate_after_steps, other_rate, latency_ratio)
    return first_steps + _multiply_steps(rate_after_steps, last_ratios)


def _apply_littles_law(rate: float, other_rate: float, latency_ratio: float) -> list[_RateRatio]:
    """Return two factors that lead from a rate of loadgen to the rate of the other tool.

    By Little's law, a rate is the mean number of requests in flight divided by their mean latency.
    So the factors are the ratio of requests in flight and the ratio of latencies.

    Args:
        rate: The rate of loadgen after all other steps.
        other_rate: The rate of the other tool.
        latency_ratio: The mean latency in loadgen's run divided by the latency of the other tool.
    """
    in_flight_ratio = other_rate / (rate * latency_ratio) if rate else 1.0
    return [_RateRatio("in_flight", in_flight_ratio), _RateRatio("latency", latency_ratio)]


def _multiply_steps(rate: float, ratios: Iterable[_RateRatio]) -> list[MetricStep]:
    """Return the rate after multiplication by the first ratio, by the first two, and so on."""
    steps = []
    multiplied_rate = rate
    for ratio in ratios:
        multiplied_rate *= ratio.factor
        steps.append(MetricStep(ratio.part, multiplied_rate))
    return steps


def _find_loadgen_factors(loadgen_run: LoadgenRun, other_result: OtherResult) -> _RunFactors | None:
    """Return the success rate and the mean E2E latency of loadgen's run.

    Both are computed by the definitions of the other tool. If it sent no warm-up, loadgen's warm-up
    counts, too. Return None if the tool does not define an E2E latency, or if no request of
    loadgen's run has one.
    """
    tool_latency = other_result.definitions.find_latency("e2e")
    if tool_latency is None:
        return None

    includes_warm_up = other_result.sent_no_warm_up and loadgen_run.has_warm_up
    latency = DefinedLatency(tool_latency.definition, includes_warm_up=includes_warm_up)
    e2e_ms = loadgen_run.compute_statistic(latency, "mean")
    if not e2e_ms:
        return None

    requests = loadgen_run.select_requests(includes_warm_up=includes_warm_up)
    ok_count = int(requests.is_successful.sum())
    failed_count = int(_has_failed(requests.columns).sum())
    return _RunFactors(ok_share=ok_count / (ok_count + failed_count), e2e_ms=e2e_ms)


def _find_other_factors(other_result: OtherResult) -> _RunFactors | None:
    """Return the success rate and mean E2E latency of another tool, or None without a latency.

    A tool that does not count failed requests has a success rate of 1.
    """
    e2e_ms = other_result.metrics.get("e2e_ms.mean") or _compute_other_e2e_ms(other_result)
    if not e2e_ms:
        return None
    return _RunFactors(ok_share=other_result.metrics.get("ok_share", 1.0), e2e_ms=e2e_ms)


def _compute_other_e2e_ms(other_result: OtherResult) -> float | None:
    """Return the mean E2E latency of another tool in ms, computed from its TTFT and TPOT, or None.

    A response takes its TTFT, and then its TPOT for each further token. A TTFT of 200 ms and 10 ms
    for each of 100 further tokens are 1,200 ms. Return None if a mean is unknown, or if the tool's
    TPOT includes the time before the first token.
    """
    tpot = other_result.definitions.find_latency("tpot")
    if tpot is None or tpot.definition.start == "sent_ns":
        return None

    ttft_ms = other_result.metrics.get("ttft_ms.mean")
    tpot_ms = other_result.metrics.get(f"{tpot.metric}.mean")
    output_tokens = other_result.output_tokens_per_request
    if ttft_ms is None or tpot_ms is None or output_tokens is None:
        return None

    further_tokens = output_tokens - 1
    return ttft_ms + tpot_ms * further_tokens
