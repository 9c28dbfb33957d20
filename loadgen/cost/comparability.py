"""Decides whether the costs of two results may be compared, and what differs between them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen_sdk.price_file import PerToken

from loadgen.core.limits import CACHED_SHARE, SHORTENED
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.verdict import delivered_output_share
from loadgen.core.results.manifest import ReasonCode
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.reasons import note
from loadgen.runs.headline import promises

CONNECT_DIFFERENCE_MS = 5
"""Difference of connect times above which it is noted, because TTFT includes them."""

FINGERPRINT_DIGITS = 8


def find_differences(first: PricedResult, second: PricedResult) -> tuple[ReasonCode, ...]:
    """Return the differences that forbid comparing the costs of two results."""
    if first.evidence is second.evidence:
        return ()
    return (*_load_differences(first, second), *_measurement_differences(first, second))


def find_remarks(first: PricedResult, second: PricedResult) -> tuple[ReasonCode, ...]:
    """Return the differences to note beside a comparison of two results."""
    if first.evidence is second.evidence:
        return ()
    return tuple(_remarks(first, second))


def has_lower_bound(result: PricedResult) -> bool:
    """Return True if the cost depends on a capacity of which only a lower bound is known."""
    capacity = result.evidence.capacity
    return capacity is not None and capacity.lower_bound and not is_per_token(result)


def is_per_token(result: PricedResult) -> bool:
    """Return True if the price is per token."""
    return isinstance(result.price, PerToken)


def slo_words(summary: Summary) -> str:
    """Return the SLO as text, such as "TTFT p99 at most 2,000 ms", or "none"."""
    return ", ".join(promises(summary)) or "none"


def _load_differences(first: PricedResult, second: PricedResult) -> Iterator[ReasonCode]:
    """Yield the differences in what was sent and what came back."""
    summary_a = first.evidence.summary
    summary_b = second.evidence.summary
    recipe_a, recipe_b = _recipes(first, second)
    if recipe_a != recipe_b or not recipe_a:
        yield note("recipe_differs", a=_short(recipe_a), b=_short(recipe_b))
    if sorted(promises(summary_a)) != sorted(promises(summary_b)):
        yield note("slo_differs", a=slo_words(summary_a), b=slo_words(summary_b))
    length_a = delivered_output_share(summary_a.verdict)
    length_b = delivered_output_share(summary_b.verdict)
    if abs(length_a - length_b) > SHORTENED:
        yield note("answers_differ", a=length_a, b=length_b)
    sources_a = summary_a.tokens.sources
    sources_b = summary_b.tokens.sources
    for kind in ("input", "output"):
        source_a = "+".join(sorted(getattr(sources_a, kind)))
        source_b = "+".join(sorted(getattr(sources_b, kind)))
        if source_a != source_b:
            yield note("count_differs", tokens=kind, a=source_a, b=source_b)
    if not _is_same_cache(summary_a.tokens.cached_share, summary_b.tokens.cached_share):
        yield note(
            "cache_differs", a=summary_a.tokens.cached_share, b=summary_b.tokens.cached_share
        )


def _measurement_differences(first: PricedResult, second: PricedResult) -> Iterator[ReasonCode]:
    """Yield the differences in how the results were measured."""
    if first.evidence.simulated != second.evidence.simulated:
        yield note("one_simulated")
    # Tokens cost the same at any load.
    is_by_the_hour = not is_per_token(first) and not is_per_token(second)
    if is_by_the_hour and first.basis.is_capacity != second.basis.is_capacity:
        yield note("one_at_capacity")
    if is_by_the_hour and first.evidence.at_once != second.evidence.at_once:
        yield note("one_at_once")
    bounded = [result.name for result in (first, second) if has_lower_bound(result)]
    if bounded:
        yield note("one_lower_bound", offers=bounded)
    confidence_a = first.basis.confidence
    confidence_b = second.basis.confidence
    if confidence_a is not None and confidence_b is not None and confidence_a != confidence_b:
        yield note("confidence_differs", a=confidence_a, b=confidence_b)


def _remarks(first: PricedResult, second: PricedResult) -> Iterator[ReasonCode]:
    for result in (first, second):
        if not result.evidence.valid:
            yield note("offer_invalid", offer=result.name)
    summary_a = first.evidence.summary
    summary_b = second.evidence.summary
    if summary_a.run.seed != summary_b.run.seed:
        yield note("seed_differs")
    if summary_a.target.model != summary_b.target.model:
        yield note("model_differs", a=summary_a.target.model, b=summary_b.target.model)
    if summary_a.target.region != summary_b.target.region:
        yield note("region_differs", a=summary_a.target.region, b=summary_b.target.region)
    rtt_a = summary_a.rtt_ms
    rtt_b = summary_b.rtt_ms
    if rtt_a is not None and rtt_b is not None and abs(rtt_a - rtt_b) > CONNECT_DIFFERENCE_MS:
        yield note("connect_differs", a_ms=rtt_a, b_ms=rtt_b)


def _recipes(first: PricedResult, second: PricedResult) -> tuple[str, str]:
    """Return the fingerprints of both searches, or those of both runs if one was not searched."""
    capacity_a = first.evidence.capacity
    capacity_b = second.evidence.capacity
    if capacity_a and capacity_b and capacity_a.recipe and capacity_b.recipe:
        return capacity_a.recipe, capacity_b.recipe
    return (
        first.evidence.summary.fingerprints.recipe,
        second.evidence.summary.fingerprints.recipe,
    )


def _short(fingerprint: str) -> str:
    return fingerprint[:FINGERPRINT_DIGITS] or "unknown"


def _is_same_cache(share_a: float | None, share_b: float | None) -> bool:
    """Return True if cached fractions agree.

    They agree if both are unknown, both cold, or both warm and at most CACHED_SHARE apart.
    """
    if share_a is None or share_b is None:
        return share_a is share_b
    lower, higher = sorted((share_a, share_b))
    if higher <= CACHED_SHARE:
        return True
    return lower > CACHED_SHARE and higher - lower <= CACHED_SHARE
