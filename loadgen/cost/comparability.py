"""Decides whether the costs of two results may be compared, and what differs between them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen_sdk.price_file import PerToken

from loadgen.core.limits import CACHED_SHARE, SHORTENED
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.verdict import delivered_output_share
from loadgen.core.results.manifest import ReasonCode
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.reasons import make_note
from loadgen.runs.slo_text import list_objectives

CONNECT_DIFFERENCE_MS = 5
"""Difference of connect times above which it is noted, because TTFT includes them."""

OUTPUT_SHARE_TOLERANCE = SHORTENED
"""Difference of the delivered fractions of the requested output up to which work is the same."""

CACHED_SHARE_TOLERANCE = CACHED_SHARE
"""Cached fraction of the prompt tokens up to which a cache counts as cold.

Cached fractions of warm caches are the same if they differ by at most as much.
"""

FINGERPRINT_DIGITS = 8
"""Digits of a fingerprint that a note shows, enough to tell two workloads apart."""


def find_differences(first: PricedResult, second: PricedResult) -> tuple[ReasonCode, ...]:
    """Return the differences that forbid comparing the costs of two results."""
    if first.evidence is second.evidence:
        return ()
    return (*_list_load_differences(first, second), *_list_measurement_differences(first, second))


def find_remarks(first: PricedResult, second: PricedResult) -> tuple[ReasonCode, ...]:
    """Return the differences to note beside a comparison of two results."""
    if first.evidence is second.evidence:
        return ()
    return tuple(_list_remarks(first, second))


def has_lower_bound(result: PricedResult) -> bool:
    """Return True if the cost depends on a capacity of which only a lower bound is known."""
    capacity = result.evidence.capacity
    return capacity is not None and capacity.lower_bound and not is_per_token(result)


def is_per_token(result: PricedResult) -> bool:
    """Return True if the price is per token."""
    return isinstance(result.price, PerToken)


def describe_slo(summary: Summary) -> str:
    """Return the SLO as text, such as "TTFT p99 at most 2,000 ms", or "none"."""
    return ", ".join(list_objectives(summary)) or "none"


def _list_load_differences(first: PricedResult, second: PricedResult) -> Iterator[ReasonCode]:
    """Yield a note for each way in which two results measured different work.

    Each of these differences forbids comparing the costs. A cost per request is comparable only if
    the requests are the same work:

    - the same workload, which its fingerprint shows
    - under the same SLO
    - with responses of the same length
    - with tokens that were counted in the same way
    - with the same fraction of the prompts from a cache
    """
    summary_a = first.evidence.summary
    summary_b = second.evidence.summary

    fingerprint_a, fingerprint_b = _find_comparable_fingerprints(first, second)

    # Two results without fingerprints have equal ones, "", which does not show that their workloads
    # are the same.
    is_same_workload = fingerprint_a == fingerprint_b and fingerprint_a != ""
    if not is_same_workload:
        yield make_note("recipe_differs", a=_shorten(fingerprint_a), b=_shorten(fingerprint_b))

    if sorted(list_objectives(summary_a)) != sorted(list_objectives(summary_b)):
        yield make_note("slo_differs", a=describe_slo(summary_a), b=describe_slo(summary_b))

    # The fractions of the requested output tokens that the responses had, such as 0.9.
    delivered_share_a = delivered_output_share(summary_a.verdict)
    delivered_share_b = delivered_output_share(summary_b.verdict)
    if abs(delivered_share_a - delivered_share_b) > OUTPUT_SHARE_TOLERANCE:
        yield make_note("answers_differ", a=delivered_share_a, b=delivered_share_b)

    yield from _list_token_source_differences(summary_a, summary_b)

    # The fractions of the prompt tokens that came from a cache, or None if they are not known.
    cached_share_a = summary_a.tokens.cached_share
    cached_share_b = summary_b.tokens.cached_share
    if not _has_same_cache_hits(cached_share_a, cached_share_b):
        yield make_note("cache_differs", a=cached_share_a, b=cached_share_b)


def _list_token_source_differences(summary_a: Summary, summary_b: Summary) -> Iterator[ReasonCode]:
    """Yield a note for prompt or output tokens that were counted in different ways.

    Tokens are counted by the server, by a local tokenizer, or by both for parts of a run, which is
    written as "server+tokenizer". Different tokenizers split one text into different numbers.
    """
    sources_by_kind = (
        ("input", summary_a.tokens.sources.input, summary_b.tokens.sources.input),
        ("output", summary_a.tokens.sources.output, summary_b.tokens.sources.output),
    )
    for kind, sources_a, sources_b in sources_by_kind:
        source_a = "+".join(sorted(sources_a))
        source_b = "+".join(sorted(sources_b))
        if source_a != source_b:
            yield make_note("count_differs", tokens=kind, a=source_a, b=source_b)


def _list_measurement_differences(
    first: PricedResult, second: PricedResult
) -> Iterator[ReasonCode]:
    """Yield a note for each difference in how the results were measured that forbids a comparison.

    A simulated and a real server are never comparable, and a capacity of which only a lower bound
    is known gives no cost to compare. Intervals must have the same confidence.

    A price by the hour depends on the measured rate, so both rates must be of the same kind: both
    capacities, or both at a chosen load, and both or neither of Offline runs, which have no latency
    limit. A price per token does not depend on the rate.
    """
    if first.evidence.is_simulated != second.evidence.is_simulated:
        yield make_note("one_simulated")

    is_paid_by_hour = not is_per_token(first) and not is_per_token(second)
    if is_paid_by_hour and first.basis.is_capacity != second.basis.is_capacity:
        yield make_note("one_at_capacity")

    if is_paid_by_hour and first.evidence.is_offline != second.evidence.is_offline:
        yield make_note("one_at_once")

    names_of_bounded = [result.name for result in (first, second) if has_lower_bound(result)]
    if names_of_bounded:
        yield make_note("one_lower_bound", offers=names_of_bounded)

    confidence_a = first.basis.confidence
    confidence_b = second.basis.confidence
    if confidence_a is not None and confidence_b is not None and confidence_a != confidence_b:
        yield make_note("confidence_differs", a=confidence_a, b=confidence_b)


def _list_remarks(first: PricedResult, second: PricedResult) -> Iterator[ReasonCode]:
    """Yield the differences that a reader of a comparison should know, but that do not forbid it.

    Another model or region is often the reason to compare. A longer way to the server adds to its
    TTFT, which says nothing about the server itself.
    """
    for result in (first, second):
        if not result.evidence.is_valid:
            yield make_note("offer_invalid", offer=result.name)

    summary_a = first.evidence.summary
    summary_b = second.evidence.summary
    if summary_a.run.seed != summary_b.run.seed:
        yield make_note("seed_differs")

    if summary_a.target.model != summary_b.target.model:
        yield make_note("model_differs", a=summary_a.target.model, b=summary_b.target.model)

    if summary_a.target.region != summary_b.target.region:
        yield make_note("region_differs", a=summary_a.target.region, b=summary_b.target.region)

    rtt_a_ms = summary_a.rtt_ms
    rtt_b_ms = summary_b.rtt_ms
    if rtt_a_ms is None or rtt_b_ms is None:
        return

    if abs(rtt_a_ms - rtt_b_ms) > CONNECT_DIFFERENCE_MS:
        yield make_note("connect_differs", a_ms=rtt_a_ms, b_ms=rtt_b_ms)


def _find_comparable_fingerprints(first: PricedResult, second: PricedResult) -> tuple[str, str]:
    """Return the fingerprints of the workloads of two results: hashes, equal if the workloads are.

    Summaries and capacities store a fingerprint as `recipe`. It is "" if it is not known.

    The fingerprint of a search can only be compared with that of another search. If one of the
    results is not that of a search, the fingerprints of the runs behind both are used.
    """
    capacity_a = first.evidence.capacity
    capacity_b = second.evidence.capacity
    if capacity_a and capacity_b and capacity_a.recipe and capacity_b.recipe:
        return capacity_a.recipe, capacity_b.recipe

    return (
        first.evidence.summary.fingerprints.recipe,
        second.evidence.summary.fingerprints.recipe,
    )


def _shorten(fingerprint: str) -> str:
    """Return the first digits of a fingerprint, or "unknown" if there is none."""
    return fingerprint[:FINGERPRINT_DIGITS] or "unknown"


def _has_same_cache_hits(cached_share_a: float | None, cached_share_b: float | None) -> bool:
    """Return True if the prompt caches of two runs saved about the same fraction of the tokens.

    Cached prompt tokens cost less time and money. The runs agree if both caches were cold, so that
    they saved next to nothing, or if both were warm and saved nearly the same fraction. They also
    agree if neither server reports cached tokens.

    Args:
        cached_share_a: The fraction of the prompt tokens of one run that came from a cache, or None
            if it is not known.
        cached_share_b: The same of the other run.
    """
    if cached_share_a is None or cached_share_b is None:
        return cached_share_a is None and cached_share_b is None

    lower, higher = sorted((cached_share_a, cached_share_b))
    are_both_cold = higher <= CACHED_SHARE_TOLERANCE
    if are_both_cold:
        return True

    are_both_warm = lower > CACHED_SHARE_TOLERANCE
    return are_both_warm and higher - lower <= CACHED_SHARE_TOLERANCE
