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
LENGTH_OF_PROBE = 0.7
"""The part of its full length that a trial lasts on average: most are decided before."""


class TrialsLeft(NamedTuple):
    """The number of trials that are left, and the full lengths of load that they send together."""

    trials: float
    lengths: float


def estimate_trials_left(
    search: LoadSearch, *, runs_to_end: bool = False, trial_s: float = math.inf
) -> TrialsLeft:
    """Return what is left of a search that has not ended.

    Args:
        search: The search, with the results of its trials so far.
        runs_to_end: Whether every trial runs to its end, even if it is decided before.
        trial_s: The full length of a trial. With few requests in a trial its outcome varies more,
            so that more trials are needed.
    """
    trial = search.next_trial()
    kind = "" if trial is None else trial.kind
    settings = search.settings
    probes = 0.0 if kind in CONFIRMING_KINDS else _probes_left(search, trial_s)
    confirmations = 0.0 if kind == "sustain" else CONFIRMATION_TRIALS
    has_longer_trials = settings.has_longer_trials or kind == "sustain"
    longer_trials = _longer_trials_left(search) if has_longer_trials else 0.0
    trials = probes + confirmations + longer_trials
    probe_length = 1.0 if runs_to_end else LENGTH_OF_PROBE
    lengths = probes * probe_length + confirmations + longer_trials * settings.sustain_length_factor
    most_trials = max(settings.max_trials - len(search.results), 1)
    return TrialsLeft(min(trials, most_trials), lengths * min(most_trials / trials, 1.0))


def _probes_left(search: LoadSearch, trial_s: float) -> float:
    """Return the number of trials until a load can be confirmed."""
    settings = search.settings
    until_enough = max(ENOUGH_TRIALS - len(search.results), 1.0)
    if settings.run_spread is None:
        # The variation has to be learned: most such searches end by their number of trials.
        return max(ENOUGH_TRIALS - len(search.results) - CONFIRMATION_TRIALS, 1.0)
    width = search.relative_width
    bracket_trials = 0.0
    if width is None:
        width = math.log(settings.first_step) / 2 / settings.precision
        bracket_trials = BRACKET_TRIALS.get(settings.first_step, BRACKET_TRIALS[BRACKET_STEP])
        if search.results:
            bracket_trials /= 2
    halvings = math.log2(max(width, 1e-9))
    outcome_sigma = math.hypot(settings.run_spread, SIGMA_PER_NOISE * _noise(search, trial_s))
    noise_trials = NOISE_TRIALS * (outcome_sigma / settings.precision) ** 2
    noise_trials *= min(max(halvings, 0.0), 1.0)
    trials = bracket_trials + max(halvings + EXTRA_TRIALS, 1.0) + noise_trials
    return min(trials, until_enough)


def _longer_trials_left(search: LoadSearch) -> float:
    """Return the number of trials until the highest sustained load is known."""
    result = search.result
    if result.unsustained_load is None:
        return SUSTAIN_TRIALS
    if result.sustained_load is None or result.sustained_load >= result.unsustained_load:
        return LOWERING_TRIALS
    gap = math.log(result.unsustained_load / result.sustained_load)
    smallest_gap = math.log1p(GAP_TOLERANCE * search.settings.precision)
    halvings = math.log2(max(gap / smallest_gap, 1.0))
    return float(max(math.ceil(halvings), 1))


def _noise(search: LoadSearch, trial_s: float) -> float:
    """Return the share by which the outcome of a trial varies by chance.

    It is 1 / sqrt(n) for n requests.
    """
    known = [result.sampling_noise for result in search.results if result.sampling_noise > 0]
    if known:
        return known[-1]
    trial = search.next_trial()
    if trial is None or search.settings.is_integer:
        return 0.0
    return 1 / math.sqrt(max(trial.load * trial_s, 1.0))
