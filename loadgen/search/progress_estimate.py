"""Estimates how many trials a search still needs, and how long they send load.

The estimate was checked with searches of synthetic servers, with and without bounds, some of which
varied from run to run. Before the first trial it was always within a factor of two, and before
later trials in 85 of 100 cases, which is the limit of the test.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from loadgen.search.load_search import LoadSearch
from loadgen.search.search_settings import (
    BRACKET_STEP,
    ENOUGH_TRIALS,
    ESTIMATE_STEP,
    SIGMA_PER_NOISE,
    SearchSettings,
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
MEAN_SUSTAIN_TRIALS = 1.9
"""The mean number of longer trials: of nine packaged workloads, six took one, two took two and one
took five.
"""
MEAN_LOWERING_TRIALS = 2.5
"""The mean number of longer trials that are left while no load was sustained. Each lower load is
sustained about half of the time.
"""
MEAN_TRIAL_LENGTH = 0.7
"""The part of its full length that a trial lasts on average: most are decided before."""
MIN_RELATIVE_WIDTH = 1e-9
"""Keeps the width of an interval above zero, so that its logarithm can be taken."""


class TrialEffort(NamedTuple):
    """A number of trials, and the load that they send together.

    Attributes:
        trials: The number of trials. An expected number may be a fraction, for example 7.5.
        full_length_trials: The number of ordinary trials of full length that send as much load. A
            trial that is decided early counts less than 1, and a longer trial more.
    """

    trials: float
    full_length_trials: float

    def load_duration_s(self, trial_s: float, warmup_s: float) -> float:
        """Return how long these trials send load, each with its warm-up, in seconds.

        Args:
            trial_s: The full length of an ordinary trial, without its warm-up.
            warmup_s: The length of the warm-up before each trial.
        """
        return self.full_length_trials * trial_s + self.trials * warmup_s


class _TrialsByKind(NamedTuple):
    """The expected number of trials of each kind that are left of a search."""

    narrowing: float
    confirming: float
    longer: float

    @property
    def total(self) -> float:
        """The expected number of all trials that are left."""
        return self.narrowing + self.confirming + self.longer


def estimate_trials_left(
    search: LoadSearch, *, runs_to_end: bool = False, trial_s: float = math.inf
) -> TrialEffort:
    """Return how many trials are expected until a running search ends, and how much load they send.

    The number is limited to the trials that the settings of the search still allow.

    Args:
        search: The search, with the results of its trials so far.
        runs_to_end: Whether every trial runs to its end, even if it is decided before.
        trial_s: The full length of a trial. With few requests in a trial its outcome varies more,
            so that more trials are needed.
    """
    settings = search.settings
    left = _count_trials_left(search, trial_s)
    mean_narrowing_length = 1.0 if runs_to_end else MEAN_TRIAL_LENGTH
    full_length_trials = (
        left.narrowing * mean_narrowing_length
        + left.confirming
        + left.longer * settings.sustain_length_factor
    )
    max_trials_left = max(settings.max_trials - len(search.results), 1)
    if left.total <= max_trials_left:
        return TrialEffort(left.total, full_length_trials)

    executed_share = max_trials_left / left.total
    return TrialEffort(max_trials_left, full_length_trials * executed_share)


def _count_trials_left(search: LoadSearch, trial_s: float) -> _TrialsByKind:
    """Return how many trials of each kind are expected until a search ends.

    A search runs three kinds of trials one after the other: narrowing trials that bring the
    interval of the capacity to the requested width, one confirmation, and longer trials that show
    whether the load is sustained. It never returns to an earlier kind, so the kind of the next
    trial shows which kinds are left.
    """
    next_trial = search.next_trial()
    next_kind = None if next_trial is None else next_trial.kind
    if next_kind == "sustain":
        return _TrialsByKind(narrowing=0.0, confirming=0.0, longer=_longer_trials_left(search))

    has_longer_trials = search.settings.has_longer_trials
    return _TrialsByKind(
        narrowing=0.0 if next_kind == "confirm" else _narrowing_trials_left(search, trial_s),
        confirming=CONFIRMATION_TRIALS,
        longer=_longer_trials_left(search) if has_longer_trials else 0.0,
    )


def _narrowing_trials_left(search: LoadSearch, trial_s: float) -> float:
    """Return the expected number of trials before the confirmation, for example 7.5.

    It is the sum of three parts:

    1. The trials that find a bracket, one load that passes and one that fails.
    2. The trials that narrow the interval to the requested precision. As in a bisection, each of
       them halves the interval. EXTRA_TRIALS more are needed for unclear outcomes near the end.
    3. The trials that make up for outcomes that vary by chance.

    A search never runs more of them than ENOUGH_TRIALS, after which it confirms a load in any case.
    """
    settings = search.settings
    trials_until_enough = ENOUGH_TRIALS - len(search.results)
    if settings.run_spread is None:
        # While the variation from run to run has to be learned, the interval stays wide, and most
        # searches go on until ENOUGH_TRIALS. The last of those trials is the confirmation.
        return max(trials_until_enough - CONFIRMATION_TRIALS, 1.0)

    bracket_trials = 0.0
    relative_width = search.relative_width  # in units of the requested precision
    if relative_width is None:
        bracket_trials = _bracket_trials_left(search)
        relative_width = _width_of_next_bracket(settings)

    halvings = math.log2(max(relative_width, MIN_RELATIVE_WIDTH))
    narrowing_trials = max(halvings + EXTRA_TRIALS, 1.0)

    noise_trials = _noise_trials(search, settings.run_spread, trial_s)
    if halvings < 1:
        # The interval is less than one halving away from its goal, so only a part is left.
        noise_trials *= max(halvings, 0.0)

    trials = bracket_trials + narrowing_trials + noise_trials
    return min(trials, max(trials_until_enough, 1.0))


def _width_of_next_bracket(settings: SearchSettings) -> float:
    """Return the relative half-width of a bracket that is still to be found.

    Its two loads will be one step apart, as a factor. The unit is the requested precision, as in
    `LoadSearch.relative_width`.
    """
    half_width = math.log(settings.first_step) / 2
    return half_width / settings.precision


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
    """Return the expected number of sustained-load checks that are left.

    A sustained-load check is a trial, longer than an ordinary one, that shows whether a queue grows
    at its load. The checks look for the limit between the highest sustained load and the lowest
    unsustained one. Once both are known, each check halves the gap between them, measured as the
    logarithm of their ratio. Before that, the number is an average over past searches.
    """
    result = search.result
    if result.unsustained_load is None:
        return MEAN_SUSTAIN_TRIALS
    if result.sustained_load is None:
        return MEAN_LOWERING_TRIALS
    if result.sustained_load >= result.unsustained_load:
        # Trials contradict each other, so the search goes on with lower loads.
        return MEAN_LOWERING_TRIALS

    gap = math.log(result.unsustained_load / result.sustained_load)
    smallest_gap = math.log1p(GAP_TOLERANCE * search.settings.precision)
    halvings = math.log2(max(gap / smallest_gap, 1.0))

    return float(max(math.ceil(halvings), 1))


def _sampling_noise(search: LoadSearch, trial_s: float) -> float:
    """Return the relative standard error of the rate at which the requests of a trial arrive.

    Arrivals are random, as in a Poisson process, so the error is 1 / sqrt(n) for n requests: 0.02
    for 2500 requests. The noise of the most recent trial is returned. Before the first trial, n is
    the expected number of requests of the next one.

    Return 0 if n is not known, because the loads are numbers of virtual users.
    """
    known_noises = [result.sampling_noise for result in search.results if result.sampling_noise > 0]
    if known_noises:
        return known_noises[-1]

    next_trial = search.next_trial()
    if next_trial is None or search.settings.is_integer:
        return 0.0

    expected_requests = max(next_trial.load * trial_s, 1.0)
    return 1 / math.sqrt(expected_requests)
