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
    from loadgen.core.results.manifest import RunManifest, StagePlan

FALSE_ALARM_RATE = 0.001
"""The probability that a check of a correct run fails by chance."""
SIGMAS = 3.29
"""The two-sided quantile of the normal distribution for FALSE_ALARM_RATE."""
POISSON_CV = 1.0
"""The coefficient of variation of the gaps between Poisson arrivals."""
KS_SERIES_START = 0.2
"""For a smaller x, the series of the Kolmogorov distribution converges slowly, and its sum is 1."""
KS_SERIES_TERMS = 100
"""So many terms of that series are added. The later ones are too small to change the sum."""
MIN_GAPS = 30
"""Fewer gaps do not show their distribution."""
RATE_TOLERANCE = 0.01
"""A rate this close to the requested one is always accepted."""


def check_load(
    manifest: RunManifest,
    summary: Summary,
    inputs: VerdictInputs,
    measured_stages: Sequence[Columns],
) -> tuple[StimulusCheck, ...]:
    """Return the checks that the load was as requested, or none if nothing was sent.

    Args:
        manifest: The manifest of the run, with the requested load.
        summary: The summary of the run.
        inputs: Further counts, such as the number of sent requests.
        measured_stages: The records of each measured stage.
    """
    if not inputs.sends:
        return ()
    return (
        *_check_arrival_process(manifest, measured_stages),
        *_check_gap_variation(summary),
        *_check_concurrency_or_rate(manifest, summary),
        *_check_classes(summary),
        *_check_output_tokens(summary, inputs),
        *_check_prompt_tokens(summary, inputs),
        *_check_cache(manifest, summary, inputs),
    )


def _check_arrival_process(
    manifest: RunManifest, measured_stages: Sequence[Columns]
) -> Iterator[StimulusCheck]:
    """Check that the gaps between Poisson arrivals are exponentially distributed."""
    gaps = join_arrays([_scaled_gaps(columns, manifest) for columns in measured_stages])
    if len(gaps) < MIN_GAPS:
        return

    # The test of Kolmogorov and Smirnov compares the distribution of the gaps with an exponential
    # one, whose probability below a value is the same as that up to the value.
    gaps.sort()
    distance = ks_distance(gaps, cdf=_exponential_cdf, cdf_below=_exponential_cdf)
    p_value = _kolmogorov_p_value(distance, len(gaps))
    is_ok = p_value >= FALSE_ALARM_RATE
    yield StimulusCheck(code="arrivals", delivered=distance, ok=is_ok, n=len(gaps), p=p_value)


def _scaled_gaps(columns: Columns, manifest: RunManifest) -> NDArray[np.float64]:
    """Return the gaps between sends in Poisson stages, as multiples of the requested mean gap.

    Later turns of conversations are left out, because they wait for a response.
    """
    gaps_of_stages = []
    for index, stage in enumerate(manifest.stages):
        is_poisson = stage.arrival.startswith("poisson")
        if not stage.rate or not is_poisson:
            continue

        is_in_stage = columns["stage"] == index
        is_first_turn = columns["turn"] == 0
        was_sent = columns.is_known("sent_ns")
        selected = as_selection(is_in_stage & is_first_turn & was_sent)

        # The requested mean gap is 1 / rate, in seconds.
        sent_ns = np.sort(columns["sent_ns"][selected])
        gaps_of_stages.append(np.diff(sent_ns) * stage.rate / 1e9)

    return join_arrays(gaps_of_stages)


def _kolmogorov_p_value(distance: float, count: int) -> float:
    """Return the p-value of a Kolmogorov-Smirnov test.

    With n values, the p-value is about

        2 * (exp(-2 x^2) - exp(-2 (2x)^2) + exp(-2 (3x)^2) - ...)

    with x = (sqrt(n) + 0.12 + 0.11 / sqrt(n)) * distance (Stephens 1970; Numerical Recipes, section
    14.3).

    Args:
        distance: The Kolmogorov-Smirnov distance of the values from a distribution.
        count: The number of values.
    """
    root_of_count = math.sqrt(count)
    x = (root_of_count + 0.12 + 0.11 / root_of_count) * distance
    if x < KS_SERIES_START:
        return 1.0  # nearly exact for so small an x, for which the series would need many terms

    series_sum = 0.0
    sign = 1
    for k in range(1, KS_SERIES_TERMS + 1):
        series_sum += sign * math.exp(-2 * (k * x) ** 2)
        sign = -sign

    return min(max(2 * series_sum, 0.0), 1.0)


def _exponential_cdf(gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 - exp(-gap), the exponential distribution function with a mean of 1.

    It is continuous, so P(X < x) and P(X <= x) are the same.
    """
    probabilities: NDArray[np.float64] = -np.expm1(-gaps)
    return probabilities


def _check_gap_variation(summary: Summary) -> Iterator[StimulusCheck]:
    """Check that the coefficient of variation of the gaps between sends is as planned.

    This coefficient is 1 for Poisson arrivals and 0 for evenly spaced arrivals.
    """
    planned_cv = summary.load.gap_variation_planned
    measured_cv = summary.load.gap_variation
    if planned_cv is None or measured_cv is None:
        return

    difference = abs(measured_cv - planned_cv)
    yield StimulusCheck(
        code="spacing",
        requested=planned_cv,
        delivered=measured_cv,
        ok=difference <= GAP_VARIATION,
        n=_count_sent(summary),
    )


def _count_sent(summary: Summary) -> int:
    """Return how many of the scheduled requests were sent, and not dropped by the client."""
    return summary.requests.scheduled - summary.requests.dropped


def _check_concurrency_or_rate(manifest: RunManifest, summary: Summary) -> Iterator[StimulusCheck]:
    """Check the concurrency of a closed loop, or else the request rate.

    Only runs with a single measured stage, and without conversations, are checked.
    """
    measured_stages = [stage for stage in manifest.stages if stage.measured]
    has_conversations = summary.sessions is not None
    if len(measured_stages) != 1 or has_conversations:
        return

    stage = measured_stages[0]
    if stage.closed:
        yield from _check_concurrency(stage, summary)
    else:
        yield from _check_rate(stage, summary)


def _check_concurrency(stage: StagePlan, summary: Summary) -> Iterator[StimulusCheck]:
    """Check that as many requests as virtual users were in flight at the same time."""
    in_flight_max = summary.load.in_flight_max
    if not stage.concurrency or in_flight_max is None:
        return

    yield StimulusCheck(
        code="lanes",
        requested=float(stage.concurrency),
        delivered=float(in_flight_max),
        ok=in_flight_max >= stage.concurrency,
        n=_count_sent(summary),
    )


def _check_rate(stage: StagePlan, summary: Summary) -> Iterator[StimulusCheck]:
    """Check that the rate of requests is about the requested rate of the stage.

    The relative standard error of the rate of n random arrivals is cv / sqrt(n), where cv is the
    coefficient of variation of the gaps between arrivals. For 100 Poisson arrivals, the error is
    1 / sqrt(100) = 0.1.
    """
    achieved_rps = summary.load.achieved_rps
    sent = _count_sent(summary)
    if not stage.rate or achieved_rps is None or sent <= 0:
        return

    # Unknown gaps are taken as those of Poisson arrivals.
    planned_cv = summary.load.gap_variation_planned
    gap_cv = POISSON_CV if planned_cv is None else planned_cv

    relative_standard_error = gap_cv / math.sqrt(sent)
    tolerance = max(RATE_TOLERANCE, SIGMAS * relative_standard_error)
    relative_difference = abs(achieved_rps / stage.rate - 1)

    yield StimulusCheck(
        code="rate",
        requested=stage.rate,
        delivered=achieved_rps,
        ok=relative_difference <= tolerance,
        n=sent,
    )


def _check_classes(summary: Summary) -> Iterator[StimulusCheck]:
    """Check the request class whose share of the starts differs most from the requested share.

    A start is a single request, a conversation or a task, whose class is drawn at random.
    """
    starts = sum(request_class.starts for request_class in summary.classes)
    if not starts:
        return

    def difference(request_class: ClassSummary) -> float:
        share_of_starts = request_class.starts / starts
        return abs(share_of_starts - request_class.share)

    worst = max(summary.classes, key=difference)

    # The number of starts of a class has a binomial distribution. Starts are whole numbers, so a
    # further difference of one start is accepted.
    standard_deviation = math.sqrt(worst.share * (1 - worst.share) / starts)
    share_of_one_start = 1 / starts
    largest_difference = SIGMAS * standard_deviation + share_of_one_start

    yield StimulusCheck(
        code="classes",
        requested=worst.share,
        delivered=worst.starts / starts,
        ok=difference(worst) <= largest_difference,
        n=starts,
    )


def _check_output_tokens(summary: Summary, inputs: VerdictInputs) -> Iterator[StimulusCheck]:
    """Check that responses have as many output tokens as requested.

    The check fails if too many tokens are missing in total, or if too many responses have a wrong
    length.
    """
    requested = float(inputs.requested_tokens)
    received = float(inputs.received_tokens)
    if not requested:
        return

    # Tokens of all responses together.
    max_missing_share = SHORTENED
    min_received = requested * (1 - max_missing_share)
    has_enough_tokens = received >= min_received

    # The share of the responses that have a wrong length, None if the lengths are not known.
    mismatch_share = summary.tokens.length_mismatch_share
    max_mismatch_share = LENGTH_MISMATCH
    have_requested_length = mismatch_share is None or mismatch_share <= max_mismatch_share

    yield StimulusCheck(
        code="outputs",
        requested=requested,
        delivered=received,
        ok=has_enough_tokens and have_requested_length,
        n=summary.requests.ok,
    )


def _check_prompt_tokens(summary: Summary, inputs: VerdictInputs) -> Iterator[StimulusCheck]:
    """Check that the server counts about as many prompt tokens as the client does."""
    relative_difference = inputs.prompt_count_difference
    if relative_difference is None:
        return

    is_ok = abs(relative_difference) <= COUNT_DISAGREEMENT
    yield StimulusCheck(
        code="prompts",
        requested=0.0,  # a difference of 0
        delivered=relative_difference,
        ok=is_ok,
        n=summary.requests.ok,
    )


def _check_cache(
    manifest: RunManifest, summary: Summary, inputs: VerdictInputs
) -> Iterator[StimulusCheck]:
    """Check the share of the prompt tokens that the servers had in their caches.

    - A workload that requests a share must have about this share.
    - If prompts share prefixes, any share is possible, so the check is undecided (`ok` is None).
    - Otherwise no prompt may repeat, and the share must be about 0.
    """
    ok_count = summary.requests.ok
    cached_share = summary.tokens.cached_share  # None if the servers do not report it

    if manifest.requested_cache_share is not None:
        yield _compare_cached_share(cached_share, manifest.requested_cache_share, ok_count)
        return

    if manifest.shares_prompts:
        yield StimulusCheck(code="cache", delivered=cached_share, ok=None, n=ok_count)
        return

    yield _check_repeated_prompts(inputs)
    yield _compare_cached_share(cached_share, 0.0, ok_count)


def _compare_cached_share(
    cached_share: float | None, expected_share: float, ok_count: int
) -> StimulusCheck:
    """Return the check of a share of cached tokens, undecided if the share is not known."""
    return StimulusCheck(
        code="cache",
        requested=expected_share,
        delivered=cached_share,
        ok=_is_near(cached_share, expected_share),
        n=ok_count,
    )


def _check_repeated_prompts(inputs: VerdictInputs) -> StimulusCheck:
    """Return the check that no prompt was sent more than once."""
    repeated = inputs.repeated_prompts
    return StimulusCheck(
        code="repeats", requested=0.0, delivered=float(repeated), ok=not repeated, n=inputs.sends
    )


def _is_near(cached_share: float | None, requested_share: float) -> bool | None:
    """Return True if a share of cached tokens is near the requested one, None if not known."""
    if cached_share is None:
        return None
    return abs(cached_share - requested_share) <= CACHED_SHARE
