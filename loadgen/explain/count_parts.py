"""Splits the differences of counts: requests, failures and tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from loadgen.explain.other_result import OtherResult
from loadgen.explain.our_run import OurRun
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
    """How many requests of a run ended.

    Attributes:
        ok: The successful ones.
        failed: The failed ones. None if the tool does not count them.
    """

    ok: float
    failed: float | None

    @property
    def total(self) -> float:
        """All of them."""
        return self.ok + (self.failed or 0.0)


def explain_counts(ours: OurRun, theirs: OtherResult) -> Iterator[ExplainedMetric]:
    """Yield the counts of requests and of tokens that both results have."""
    our_requests = _count_our_requests(ours)
    their_requests = _count_their_requests(theirs)
    if their_requests is None:
        return

    yield _explain_successes(our_requests, their_requests)
    if their_requests.failed is not None:
        yield _explain_failures(our_requests, their_requests)

    yield from _explain_tokens(ours, theirs, our_requests, their_requests)


def _count_our_requests(ours: OurRun) -> _Requests:
    """Return the requests of our run as other tools count them."""
    counts = ours.summary.requests
    return _Requests(counts.ok, counts.failed + counts.lost)


def _count_their_requests(theirs: OtherResult) -> _Requests | None:
    """Return the requests of the other tool, or None if its file does not say."""
    ok = theirs.metrics.get("requests.ok")
    if ok is None:
        return None
    failed = theirs.metrics.get("requests.failed")
    planned = theirs.find_fact(theirs.definitions.facts.requests)
    if failed is None and planned is not None:
        failed = planned - ok
    return _Requests(ok, failed)


def _explain_successes(ours: _Requests, theirs: _Requests) -> ExplainedMetric:
    """Return the difference of successful requests: more requests, and more failures."""
    after_requests = ours.ok + theirs.total - ours.total
    steps = [MetricStep("requests", after_requests), MetricStep("failures", theirs.ok)]
    return split_difference(
        MetricName("requests.ok", "successful requests"), ours.ok, steps, theirs.ok
    )


def _explain_failures(ours: _Requests, theirs: _Requests) -> ExplainedMetric:
    """Return the difference of failed requests: more requests, and another share that fails.

    With more requests, more of them fail at the failure rate of our run.
    """
    our_failed = ours.failed or 0.0
    their_failed = theirs.failed or 0.0
    failure_rate = our_failed / ours.total if ours.total else 0.0
    steps = [
        MetricStep("requests", failure_rate * theirs.total),
        MetricStep("failures", their_failed),
    ]
    return split_difference(
        MetricName("requests.failed", "failed requests"), our_failed, steps, their_failed
    )


def _explain_tokens(
    ours: OurRun, theirs: OtherResult, our_requests: _Requests, their_requests: _Requests
) -> Iterator[ExplainedMetric]:
    """Yield why the total numbers of input and output tokens differ.

    A number that one of the results does not have is left out.
    """
    if not our_requests.ok:
        return

    our_tokens = ours.summary.tokens
    their_input = theirs.metrics.get(INPUT_TOKENS.path)
    if our_tokens.input is not None and their_input is not None:
        ratio = TokenRatio(counting=_find_prompt_scale(ours, theirs))
        after_requests = our_tokens.input * their_requests.ok / our_requests.ok
        steps = _list_token_steps(after_requests, ratio)
        yield split_difference(INPUT_TOKENS, our_tokens.input, steps, their_input)

    their_output = theirs.metrics.get(OUTPUT_TOKENS.path)
    if our_tokens.output is not None and their_output is not None:
        ratio = find_token_ratio(ours, theirs)
        after_requests = our_tokens.output * their_requests.ok / our_requests.ok
        steps = _list_token_steps(after_requests, ratio)
        yield split_difference(OUTPUT_TOKENS, our_tokens.output, steps, their_output)


def _list_token_steps(after_requests: float, ratio: TokenRatio) -> list[MetricStep]:
    """Return our number of tokens after each step towards the number of the other tool.

    Args:
        after_requests: Our number, scaled to the number of requests of the other tool.
        ratio: How the tokens per request differ.
    """
    after_counting = after_requests * ratio.counting
    return [
        MetricStep("requests", after_requests),
        MetricStep("token_counts", after_counting),
        MetricStep("response_lengths", after_counting * ratio.length),
    ]


def _find_prompt_scale(ours: OurRun, theirs: OtherResult) -> float:
    """Return the prompt tokens per request that the other tool counted, divided by ours."""
    our_tokens = ours.compute_mean_tokens("input_tokens")
    their_tokens = theirs.input_tokens_per_request
    if not our_tokens or their_tokens is None:
        return 1.0
    return their_tokens / our_tokens
