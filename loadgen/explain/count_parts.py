"""Splits the differences of counts: requests, failures and tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from loadgen.explain.other_result import OtherResult
from loadgen.explain.our_run import LoadgenRun
from loadgen.explain.parts import (
    ExplainedMetric,
    MetricName,
    MetricStep,
    split_difference,
)
from loadgen.explain.token_ratio import TokenRatio, find_token_ratio

INPUT_TOKENS = MetricName("tokens.input", "input tokens")
OUTPUT_TOKENS = MetricName("tokens.output", "output tokens")


class _Requests(NamedTuple):
    """How many requests of a run succeeded and failed.

    Attributes:
        ok: The successful requests.
        failed: The failed requests. None if the tool does not count failed requests.
    """

    ok: float
    failed: float | None

    @property
    def total(self) -> float:
        """The successful and the failed requests."""
        return self.ok + (self.failed or 0.0)


def explain_counts(loadgen_run: LoadgenRun, other_result: OtherResult) -> Iterator[ExplainedMetric]:
    """Yield why the counts of requests and tokens differ between loadgen and another tool.

    Yield nothing if the file of the other tool does not say how many requests it sent.
    """
    loadgen_requests = _count_loadgen_requests(loadgen_run)
    other_requests = _count_other_requests(other_result)
    if other_requests is None:
        return

    yield _explain_successes(loadgen_requests, other_requests)
    if other_requests.failed is not None:
        yield _explain_failures(loadgen_requests, other_requests)

    # Token counts are compared per successful request.
    if loadgen_requests.ok:
        request_ratio = other_requests.ok / loadgen_requests.ok
        yield from _explain_tokens(loadgen_run, other_result, request_ratio)


def _count_loadgen_requests(loadgen_run: LoadgenRun) -> _Requests:
    """Return how many requests of loadgen's run succeeded and failed.

    Requests without any response (`lost`) are failed ones for other tools.
    """
    counts = loadgen_run.summary.requests
    return _Requests(ok=counts.ok, failed=counts.failed + counts.lost)


def _count_other_requests(other_result: OtherResult) -> _Requests | None:
    """Return how many requests of another tool succeeded and failed.

    Some files have the number of planned requests instead of the failed ones. With 100 planned and
    98 successful requests, 2 have failed. Return None if the number of successes is unknown.
    """
    ok = other_result.metrics.get("requests.ok")
    if ok is None:
        return None

    failed = other_result.metrics.get("requests.failed")
    planned = other_result.find_fact(other_result.definitions.facts.requests)
    if failed is None and planned is not None:
        failed = planned - ok
    return _Requests(ok, failed)


def _explain_successes(loadgen: _Requests, other: _Requests) -> ExplainedMetric:
    """Return why the number of successful requests differs between loadgen and another tool.

    Example: 98 of 100 requests of loadgen succeeded, and 190 of 200 of the other tool. The
    difference of +92 has two parts: +100 for the additional requests, and -8 because the other tool
    has 10 failed requests instead of 2.
    """
    successes_with_all_requests = loadgen.ok + (other.total - loadgen.total)
    steps = [
        MetricStep("requests", successes_with_all_requests),
        MetricStep("failures", other.ok),
    ]
    name = MetricName("requests.ok", "successful requests")
    return split_difference(name, loadgen.ok, steps, other.ok)


def _explain_failures(loadgen: _Requests, other: _Requests) -> ExplainedMetric:
    """Return why the number of failed requests differs between loadgen and another tool.

    Example: 2 of 100 requests of loadgen failed, and 10 of 200 of the other tool. At loadgen's
    failure rate, 4 of 200 would fail. So 2 of the 8 additional failures come from the number of
    requests, and 6 come from the higher failure rate.
    """
    loadgen_failed = loadgen.failed or 0.0
    other_failed = other.failed or 0.0
    loadgen_failure_rate = loadgen_failed / loadgen.total if loadgen.total else 0.0

    steps = [
        MetricStep("requests", loadgen_failure_rate * other.total),
        MetricStep("failures", other_failed),
    ]
    name = MetricName("requests.failed", "failed requests")
    return split_difference(name, loadgen_failed, steps, other_failed)


def _explain_tokens(
    loadgen_run: LoadgenRun, other_result: OtherResult, request_ratio: float
) -> Iterator[ExplainedMetric]:
    """Yield why the total numbers of input and output tokens differ between loadgen and a tool.

    A total that one of the results does not have is left out.

    Args:
        loadgen_run: The run of loadgen.
        other_result: The result of the other tool.
        request_ratio: The successful requests of the other tool, divided by those of loadgen.
    """
    loadgen_tokens = loadgen_run.summary.tokens

    other_input = other_result.metrics.get(INPUT_TOKENS.path)
    if loadgen_tokens.input is not None and other_input is not None:
        # Both tools sent the same prompts, so a difference comes from how their tokens are counted.
        input_ratio = TokenRatio(counting=_find_prompt_scale(loadgen_run, other_result))
        steps = _list_token_steps(loadgen_tokens.input, request_ratio, input_ratio)
        yield split_difference(INPUT_TOKENS, loadgen_tokens.input, steps, other_input)

    other_output = other_result.metrics.get(OUTPUT_TOKENS.path)
    if loadgen_tokens.output is not None and other_output is not None:
        output_ratio = find_token_ratio(loadgen_run, other_result)
        steps = _list_token_steps(loadgen_tokens.output, request_ratio, output_ratio)
        yield split_difference(OUTPUT_TOKENS, loadgen_tokens.output, steps, other_output)


def _list_token_steps(
    loadgen_tokens: float, request_ratio: float, token_ratio: TokenRatio
) -> list[MetricStep]:
    """Return loadgen's number of tokens after each step towards the other tool's number.

    Example: loadgen has 1,000 tokens. The other tool sent twice as many requests, and it counts 1.1
    tokens where loadgen counts one. Responses are equally long. The steps are 2,000, 2,200 and
    2,200.

    Args:
        loadgen_tokens: The number of tokens in loadgen's run.
        request_ratio: The requests of the other tool, divided by those of loadgen.
        token_ratio: The tokens per request of the other tool, divided by those of loadgen.
    """
    after_requests = loadgen_tokens * request_ratio
    after_counting = after_requests * token_ratio.counting
    after_lengths = after_counting * token_ratio.length
    return [
        MetricStep("requests", after_requests),
        MetricStep("token_counts", after_counting),
        MetricStep("response_lengths", after_lengths),
    ]


def _find_prompt_scale(loadgen_run: LoadgenRun, other_result: OtherResult) -> float:
    """Return the mean prompt tokens of the other tool, divided by the mean of loadgen.

    A tool that counts 110 tokens where loadgen counts 100 has 1.1. Unknown counts have 1.
    """
    loadgen_tokens = loadgen_run.compute_mean_tokens("input_tokens")
    other_tokens = other_result.input_tokens_per_request
    if not loadgen_tokens or other_tokens is None:
        return 1.0
    return other_tokens / loadgen_tokens
