"""Check whether the delivered load is the requested one, with one check for each of its properties.

Pure. Each check has the requested value, the delivered value, and whether they agree within chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from loadgen.core.limits import (
    CACHED_SHARE,
    COUNT_DISAGREEMENT,
    GAP_VARIATION,
    LENGTH_MISMATCH,
    SHORTENED,
)
from loadgen.core.metrics.columns import Columns, as_selection, join_arrays
from loadgen.core.metrics.sections import StimulusCheck
from loadgen.core.stats.quantiles import ks_distance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.metrics.part_summaries import ClassSummary
    from loadgen.core.metrics.run_evidence import VerdictInputs
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.results.manifest import RunManifest

FALSE_ALARM_RATE = 0.001
"""The probability that a check of a correct run fails by chance."""
SIGMAS = 3.29
"""The two-sided quantile of the normal distribution for FALSE_ALARM_RATE."""
KS_SERIES_START = 0.2
"""Below this, the series of the Kolmogorov distribution converges slowly, and its sum is 1."""
KS_SERIES_TERMS = 100
MIN_GAPS = 30
"""Fewer gaps do not show their distribution."""
RATE_TOLERANCE = 0.01
"""A rate this close to the requested one is always accepted."""


def check_load(
    manifest: RunManifest,
    summary: Summary,
    inputs: VerdictInputs,
    measured: Sequence[Columns],
) -> tuple[StimulusCheck, ...]:
    """Return the checks that apply to a load. `measured` has the records of each stage."""
    if not inputs.sends:
        return ()
    return (
        *_check_arrival_process(manifest, measured),
        *_check_rate(manifest, summary),
        *_check_classes(summary),
        *_check_lengths(summary, inputs),
        *_check_cache(manifest, summary, inputs),
    )


def _check_arrival_process(
    manifest: RunManifest, measured: Sequence[Columns]
) -> Iterator[StimulusCheck]:
    """Check that the gaps between Poisson arrivals are exponentially distributed."""
    gaps = join_arrays([_scaled_gaps(columns, manifest) for columns in measured])
    if len(gaps) < MIN_GAPS:
        return
    distance, p_value = _compare_with_exponential(gaps)
    is_ok = p_value >= FALSE_ALARM_RATE
    yield StimulusCheck(code="arrivals", seen=distance, ok=is_ok, n=len(gaps), p=p_value)


def _scaled_gaps(columns: Columns, manifest: RunManifest) -> NDArray[np.float64]:
    """Return the gaps between sends in Poisson stages, divided by the mean gap of their rate.

    Only first turns count, because later turns wait for a response.
    """
    gaps_of_stages = []
    for index, stage in enumerate(manifest.stages):
        if not stage.rate or not stage.arrival.startswith("poisson"):
            continue
        is_sent = columns["sent_ns"] >= 0
        is_first_turn = (columns["stage"] == index) & (columns["turn"] == 0)
        sent_ns = columns["sent_ns"][as_selection(is_first_turn & is_sent)]
        gaps_of_stages.append(np.diff(np.sort(sent_ns)) * stage.rate / 1e9)
    return join_arrays(gaps_of_stages)


def _compare_with_exponential(gaps: NDArray[np.float64]) -> tuple[float, float]:
    """Test by Kolmogorov and Smirnov whether gaps are exponential with mean 1, as of Poisson.

    The p-value is that of the asymptotic distribution, Q(x) = 2 * sum((-1)^(k-1) exp(-2 k^2 x^2)),
    with x from the distance by the approximation of Stephens (1970). Both formulas are in
    Numerical Recipes, section 14.3.

    Args:
        gaps: The gaps, which are sorted in place.

    Returns:
        The Kolmogorov-Smirnov distance and its p-value.
    """
    count = len(gaps)
    gaps.sort()
    distance = ks_distance(gaps, _exponential_cdf, _exponential_cdf)
    x = (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)) * distance
    if x < KS_SERIES_START:
        return distance, 1.0
    terms = range(1, KS_SERIES_TERMS + 1)
    p_value = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in terms)
    return distance, min(max(p_value, 0.0), 1.0)


def _exponential_cdf(gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    probabilities: NDArray[np.float64] = -np.expm1(-gaps)
    return probabilities


def _check_rate(manifest: RunManifest, summary: Summary) -> Iterator[StimulusCheck]:
    """Check the variation of gaps, and the concurrency or the rate of a load of one stage.

    The number of arrivals has a relative standard error of cv / sqrt(n), where cv is the
    coefficient of variation of the gaps, so that a rate of few requests has a wide tolerance.
    """
    load = summary.load
    sent = summary.requests.scheduled - summary.requests.dropped
    planned_cv = load.gap_variation_planned
    if load.gap_variation is not None and planned_cv is not None:
        is_ok = abs(load.gap_variation - planned_cv) <= GAP_VARIATION
        yield StimulusCheck(
            code="spacing", asked=planned_cv, seen=load.gap_variation, ok=is_ok, n=sent
        )
    measured_stages = [stage for stage in manifest.stages if stage.measured]
    if len(measured_stages) != 1 or summary.sessions is not None:
        return
    stage = measured_stages[0]
    if stage.closed and stage.concurrency and load.in_flight_max is not None:
        yield StimulusCheck(
            code="lanes",
            asked=float(stage.concurrency),
            seen=float(load.in_flight_max),
            ok=load.in_flight_max >= stage.concurrency,
            n=sent,
        )
    elif not stage.closed and stage.rate and load.achieved_rps is not None and sent > 0:
        cv = 1.0 if planned_cv is None else planned_cv
        tolerance = max(RATE_TOLERANCE, SIGMAS * cv / math.sqrt(sent))
        is_ok = abs(load.achieved_rps / stage.rate - 1) <= tolerance
        yield StimulusCheck(code="rate", asked=stage.rate, seen=load.achieved_rps, ok=is_ok, n=sent)


def _check_classes(summary: Summary) -> Iterator[StimulusCheck]:
    """Check the request class whose fraction of the starts differs most from the requested one.

    The tolerance is SIGMAS standard deviations of a binomial fraction, and one request.
    """
    starts = sum(request_class.starts for request_class in summary.classes)
    if not starts:
        return

    def difference(request_class: ClassSummary) -> float:
        return abs(request_class.starts / starts - request_class.share)

    worst = max(summary.classes, key=difference)
    standard_deviation = math.sqrt(worst.share * (1 - worst.share) / starts)
    tolerance = SIGMAS * standard_deviation + 1 / starts
    is_ok = difference(worst) <= tolerance
    delivered = worst.starts / starts
    yield StimulusCheck(code="classes", asked=worst.share, seen=delivered, ok=is_ok, n=starts)


def _check_lengths(summary: Summary, inputs: VerdictInputs) -> Iterator[StimulusCheck]:
    """Check the output tokens and the prompt tokens."""
    ok_count = summary.requests.ok
    requested = float(inputs.requested_tokens)
    received = float(inputs.received_tokens)
    if requested:
        mismatch = summary.tokens.length_mismatch_share
        is_long_enough = received >= requested * (1 - SHORTENED)
        is_ok = is_long_enough and (mismatch is None or mismatch <= LENGTH_MISMATCH)
        yield StimulusCheck(code="outputs", asked=requested, seen=received, ok=is_ok, n=ok_count)
    difference = inputs.prompt_count_difference
    if difference is not None:
        is_ok = abs(difference) <= COUNT_DISAGREEMENT
        yield StimulusCheck(code="prompts", asked=0.0, seen=difference, ok=is_ok, n=ok_count)


def _check_cache(
    manifest: RunManifest, summary: Summary, inputs: VerdictInputs
) -> Iterator[StimulusCheck]:
    """Check the fraction of cached prompt tokens, and that prompts do not repeat."""
    ok_count = summary.requests.ok
    cached = summary.tokens.cached_share
    requested = manifest.requested_cache_share
    if requested is not None:
        is_ok = None if cached is None else abs(cached - requested) <= CACHED_SHARE
        yield StimulusCheck(code="cache", asked=requested, seen=cached, ok=is_ok, n=ok_count)
        return
    if manifest.shares_prompts:
        yield StimulusCheck(code="cache", seen=cached, ok=None, n=ok_count)
        return
    repeated = inputs.repeated_prompts
    yield StimulusCheck(
        code="repeats", asked=0.0, seen=float(repeated), ok=not repeated, n=inputs.sends
    )
    is_cold = None if cached is None else cached <= CACHED_SHARE
    yield StimulusCheck(code="cache", asked=0.0, seen=cached, ok=is_cold, n=ok_count)
