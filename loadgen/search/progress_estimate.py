"""Estimates how many trials a search still needs, and how long they send load.

The estimate was checked with searches of synthetic servers, with and without bounds, some of which
varied from run to run. Before the first trial it was always within a factor of two, and before
later trials in 85 of 100 cases, which is the limit of the test.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import CONFIRMING_KINDS
from loadgen.search.search_settings import (
    BRACKET_STEP,
    ENOUGH_TRIALS,
    ESTIMATE_STEP,
    SIGMA_PER_NOISE,
)
from loadgen.search.sustained_search import GAP_TOLERANCE

BRACKET_TRIALS = {BRACKET_STEP: 6.0, ESTIMATE_STEP: 2.0}
"""Trials until a load has passed and one has failed, by the factor between the first two loads."""
EXTRA_TRIALS = 2.0
"""Trials beyond those that halve the interval to the precision: outcomes near the end are less
clear.
"""
NOISE_TRIALS = 4.0
"""Further trials if outcomes vary as much as the precision; proportional to the square of that
ratio.
"""
CONFIRMATION_TRIALS = 1.0
SUSTAIN_TRIALS = 1.9
"""Longer trials: of nine packaged workloads, six took one, two took two and one took five."""
LOWERING_TRIALS = 2.5
"""Longer trials left while each lower load fails: half of the time the next one is sustained."""
MEAN_TRIAL_LENGTH = 0.7
"""The part of its full length that a trial lasts on average: most are decided before."""
MIN_RELATIVE_WIDTH = 1e-9
"""Keeps the width of an interval above zero, so that its logarithm can be taken."""


class TrialsLeft(NamedTuple):
    """How much of a search is left.

    Attributes:
        trials: The expected number of trials, for example 7.5.
        lengths: The load that they send together, in full lengths of an ordinary trial. A trial
            that is decided early counts less than 1, and a longer trial more.
    """

    trials: float
    lengths: float


def estimate_trials_left(
    search: LoadSearch, *, runs_to_end: bool = False, trial_s: float = math.inf
) -> TrialsLeft:
    """Return how many trials are left of a search that has not ended, and how long they take.

    Three kinds of trials follow each other: those that narrow the interval, a confirmation, and
    longer ones that show whether the load is sustained. A search that has reached one kind needs no
    more of those before. It never runs more trials than it may.

    Args:
        search: The search, with the results of its trials so far.
        runs_to_end: Whether every trial runs to its end, even if it is decided before.
        trial_s: The full length of a trial. With few requests in a trial its outcome varies more,
            so that more trials are needed.
    """
    settings = search.settings
    next_trial = search.next_trial()
    next_kind = None if next_trial is None else next_trial.kind

    narrowing_trials = 0.0
    if next_kind not in CONFIRMING_KINDS:
        narrowing_trials = _trials_until_confirmation(search, trial_s)
    confirmations = 0.0 if next_kind == "sustain" else CONFIRMATION_TRIALS
    longer_trials = 0.0
    if next_kind == "sustain" or settings.has_longer_trials:
        longer_trials = _longer_trials_left(search)

    trials = narrowing_trials + confirmations + longer_trials
    narrowing_length = 1.0 if runs_to_end else MEAN_TRIAL_LENGTH
    lengths = (
        narrowing_trials * narrowing_length
        + confirmations
        + longer_trials * settings.sustain_length_factor
    )
    allowed_trials = max(settings.max_trials - len(search.results), 1)
    allowed_fraction = min(allowed_trials / trials, 1.0)
    return TrialsLeft(min(trials, allowed_trials), lengths * allowed_fraction)


def _trials_until_confirmation(search: LoadSearch, trial_s: float) -> float:
    """Return the number of trials until a load can be confirmed, for example 7.5.

    It is the sum of three parts:

    1. The trials that find a bracket, one load that passes and one that fails.
    2. The trials that narrow the interval to the requested precision. As in a bisection, each of
       them halves the interval. A few more are needed at the end.
    3. The trials that make up for outcomes that vary by chance. Their number is smaller if the
       interval is nearly as narrow as requested.

    After ENOUGH_TRIALS a load is confirmed in any case. If the variation of the server from run to
    run has to be learned, most searches end by this limit.
    """
    settings = search.settings
    trials_until_enough = ENOUGH_TRIALS - len(search.results)
    if settings.run_spread is None:
        return max(trials_until_enough - CONFIRMATION_TRIALS, 1.0)

    bracket_trials = 0.0
    relative_width = search.relative_width
    if relative_width is None:
        bracket_trials = _bracket_trials_left(search)
        # The bracket that is still to be found will be one step wide, as a factor.
        half_width = math.log(settings.first_step) / 2
        relative_width = half_width / settings.precision

    halvings = math.log2(max(relative_width, MIN_RELATIVE_WIDTH))
    narrowing_trials = max(halvings + EXTRA_TRIALS, 1.0)
    remaining_noise_fraction = min(max(halvings, 0.0), 1.0)
    noise_trials = remaining_noise_fraction * _noise_trials(search, settings.run_spread, trial_s)

    trials = bracket_trials + narrowing_trials + noise_trials
    return min(trials, max(trials_until_enough, 1.0))


def _bracket_trials_left(search: LoadSearch) -> float:
    """Return the number of trials until a load has passed and one has failed.

    After the first trial, half of them are taken to be done.
    """
    first_step = search.settings.first_step
    trials = BRACKET_TRIALS.get(first_step, BRACKET_TRIALS[BRACKET_STEP])
    return trials / 2 if search.results else trials


def _noise_trials(search: LoadSearch, run_spread: float, trial_s: float) -> float:
    """Return how many trials more a search needs because outcomes vary by chance.

    The standard deviation of a mean falls with the square root of the number of values. The number
    of trials therefore grows with the square of the standard deviation of the outcomes, in units of
    the precision. The variances from run to run and within a run add up.
    """
    outcome_sigma = math.hypot(run_spread, SIGMA_PER_NOISE * _sampling_noise(search, trial_s))
    return NOISE_TRIALS * (outcome_sigma / search.settings.precision) ** 2


def _longer_trials_left(search: LoadSearch) -> float:
    """Return the number of sustained-load checks until the highest sustained load is known.

    Each check halves the gap between the highest load that is sustained and the lowest one that is
    not, measured as the logarithm of their ratio. While one of the two is not known, the number is
    an average over past searches.
    """
    result = search.result
    if result.unsustained_load is None:
        return SUSTAIN_TRIALS
    if result.sustained_load is None or result.sustained_load >= result.unsustained_load:
        return LOWERING_TRIALS
    gap = math.log(result.unsustained_load / result.sustained_load)
    smallest_gap = math.log1p(GAP_TOLERANCE * search.settings.precision)
    halvings = math.log2(max(gap / smallest_gap, 1.0))
    return float(max(math.ceil(halvings), 1))


def _sampling_noise(search: LoadSearch, trial_s: float) -> float:
    """Return the relative standard error of the rate at which the requests of a trial arrive.

    It is 1 / sqrt(n) for n requests, as of a Poisson process: 0.02 for 2500 requests. The last
    trial that shows it counts. Before the first trial, n is the rate of the next one multiplied by
    its length. For numbers of virtual users n is not known, and the noise is taken to be 0.
    """
    known_noises = [result.sampling_noise for result in search.results if result.sampling_noise > 0]
    if known_noises:
        return known_noises[-1]
    next_trial = search.next_trial()
    if next_trial is None or search.settings.is_integer:
        return 0.0
    expected_requests = max(next_trial.load * trial_s, 1.0)
    return 1 / math.sqrt(expected_requests)
