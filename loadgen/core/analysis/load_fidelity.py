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

    The requested mean gap is 1 / rate: at 10 requests/s, a gap of 0.3 s is 3 mean gaps. Later turns
    of conversations are left out, because they wait for a response.
    """
    gaps_of_stages = []
    for stage_index, stage in enumerate(manifest.stages):
        # The arrival is described as, for example, "poisson 10/s".
        is_poisson = stage.arrival.startswith("poisson")
        if not is_poisson or not stage.rate:
            continue

        is_in_stage = columns["stage"] == stage_index
        is_first_turn = columns["turn"] == 0
        was_sent = columns.is_known("sent_ns")
        is_selected = is_in_stage & is_first_turn & was_sent
        sent_ns = np.sort(columns["sent_ns"][as_selection(is_selected)])

        gaps_ns = np.diff(sent_ns)
        gaps_of_stages.append(gaps_ns * stage.rate / 1e9)

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
    """Yield the check that as many requests as requested were in flight at the same time.

    The concurrency of a closed loop is its number of virtual users. There is no check if it is not
    known, or if the requests in flight are not.
    """
    in_flight_max = summary.load.in_flight_max
    if not stage.concurrency or in_flight_max is None:
        return

    yield StimulusCheck(
        code="lanes",  # virtual users, in the format of the summary
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
    """Check the request class whose share of all starts differs most from its requested share.

    A start is a single request, a conversation or a task, whose class is drawn at random. So the
    starts of a class have a binomial distribution, and with n starts in total, the standard
    deviation of a share p is sqrt(p (1 - p) / n).
    """
    all_starts = sum(request_class.starts for request_class in summary.classes)
    if not all_starts:
        return

    differences = [
        abs(request_class.starts / all_starts - request_class.share)
        for request_class in summary.classes
    ]
    largest_difference = max(differences)
    worst_class = summary.classes[differences.index(largest_difference)]

    # Starts are whole numbers, so a further difference of one start is accepted.
    requested_share = worst_class.share
    standard_deviation = math.sqrt(requested_share * (1 - requested_share) / all_starts)
    share_of_one_start = 1 / all_starts
    tolerance = SIGMAS * standard_deviation + share_of_one_start

    yield StimulusCheck(
        code="classes",
        requested=requested_share,
        delivered=worst_class.starts / all_starts,
        ok=largest_difference <= tolerance,
        n=all_starts,
    )


def _check_output_tokens(summary: Summary, inputs: VerdictInputs) -> Iterator[StimulusCheck]:
    """Check that responses have as many output tokens as requested.

    The check fails if the responses together lack more than a share SHORTENED of the tokens, or if
    more than a share LENGTH_MISMATCH of the responses has a wrong length.
    """
    requested_tokens = float(inputs.requested_tokens)
    received_tokens = float(inputs.received_tokens)
    if not requested_tokens:
        return

    min_tokens = requested_tokens * (1 - SHORTENED)
    are_enough_tokens = received_tokens >= min_tokens

    # The share of the responses that have a wrong length, None if the lengths are not known.
    mismatch_share = summary.tokens.length_mismatch_share
    have_requested_length = mismatch_share is None or mismatch_share <= LENGTH_MISMATCH

    yield StimulusCheck(
        code="outputs",
        requested=requested_tokens,
        delivered=received_tokens,
        ok=are_enough_tokens and have_requested_length,
        n=summary.requests.ok,
    )


def _check_prompt_tokens(summary: Summary, inputs: VerdictInputs) -> Iterator[StimulusCheck]:
    """Check that the server counts about as many prompt tokens as the client does.

    What is checked is the relative difference of both counts, for which 0 is requested. It is 0.02
    if the server counts 2 % more. Nothing is checked if the difference is not known.
    """
    relative_difference = inputs.prompt_count_difference
    if relative_difference is None:
        return

    yield StimulusCheck(
        code="prompts",
        requested=0.0,
        delivered=relative_difference,
        ok=abs(relative_difference) <= COUNT_DISAGREEMENT,
        n=summary.requests.ok,
    )


def _check_cache(
    manifest: RunManifest, summary: Summary, inputs: VerdictInputs
) -> Iterator[StimulusCheck]:
    """Check the share of the prompt tokens that the servers had in their caches.

    - If the workload specifies this share, the share must be about the specified one.
    - If prompts share prefixes, any share is possible, so the check is undecided (`ok` is None).
    - Otherwise the prompts differ, so no prompt may have been sent twice, and the share must be
      about 0.
    """
    ok_count = summary.requests.ok
    cached_share = summary.tokens.cached_share  # None if the servers do not report it
    specified_share = manifest.requested_cache_share  # None if the workload specifies none

    if specified_share is not None:
        yield _compare_cached_share(cached_share, specified_share, ok_count)
    elif manifest.shares_prompts:
        yield StimulusCheck(code="cache", delivered=cached_share, ok=None, n=ok_count)
    else:
        yield _check_that_prompts_differ(inputs)
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


def _check_that_prompts_differ(inputs: VerdictInputs) -> StimulusCheck:
    """Return the check that no prompt was sent more than once."""
    repeated_count = inputs.repeated_prompts
    return StimulusCheck(
        code="repeats",
        requested=0.0,
        delivered=float(repeated_count),
        ok=repeated_count == 0,
        n=inputs.sends,
    )


def _is_near(cached_share: float | None, requested_share: float) -> bool | None:
    """Return True if a share of cached tokens is near the requested one, None if not known."""
    if cached_share is None:
        return None
    return abs(cached_share - requested_share) <= CACHED_SHARE
