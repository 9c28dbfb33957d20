"""Decides which load a search tries next, from the results of the trials so far.

`LoadSearch` runs no load and reads no clock, so a search is resumed by adding the same results
again.

It estimates the load at which half of all full-length runs pass (`posterior.py`). A trial at the
median of that estimate is a bisection where outcomes are clear, and stays calibrated where they are
not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from loadgen.core.stats.intervals import longest_recurrence_s
from loadgen.search.failures import REFUSED
from loadgen.search.posterior import CapacityPosterior, TrialOutcome
from loadgen.search.search_results import (
    CONFIRMED_STOPS,
    CONFIRMING_KINDS,
    PlannedTrial,
    RunSpreadSource,
    SearchResult,
    TrialKind,
    TrialResult,
    lowest_growing_load,
)
from loadgen.search.search_settings import (
    BRACKET_STEP,
    CONFIRMATION_PROBABILITY,
    DEFAULT_SIGMA,
    EARLY_PASS_LAPSE,
    ENOUGH_TRIALS,
    FULL_LENGTH_LAPSE,
    INTERVAL_CONFIDENCE,
    MAX_CONFIRMATIONS,
    PRECISION_CONFIDENCE,
    SIGMA_PER_NOISE,
    SearchSettings,
)
from loadgen.search.sustained_search import SustainedSearch

STOPS_WITH_LOAD_WITHIN_SLO = (*CONFIRMED_STOPS, "highest")
"""The stop reasons after which it is still to be shown that the load is sustained."""
BOUNDS_MARGIN = 1.1  # by which the bounds of the capacity lie outside of the tried loads


class CapacityBounds(NamedTuple):
    """The loads between which the capacity is looked for."""

    low: float
    high: float


class _CachedPosterior(NamedTuple):
    """A posterior, with the number of results and the bounds that it was computed from."""

    result_count: int
    bounds: CapacityBounds
    posterior: CapacityPosterior

    def is_of(self, result_count: int, bounds: CapacityBounds) -> bool:
        """Return whether the posterior was computed from these bounds and so many results."""
        return self.result_count == result_count and self.bounds == bounds


class LoadSearch:
    """A search for the highest load under an SLO.

    Run the trial that `next_trial` returns, pass its result to `add_result`, and repeat this until
    `next_trial` returns None. `result` is what the search has found at any time.
    """

    def __init__(self, settings: SearchSettings, results: Iterable[TrialResult] = ()) -> None:
        """Start a search, or resume one after these results."""
        self.settings = settings
        self.results: list[TrialResult] = []
        self.stop_reason = settings.stop_reason
        self._cached_posterior: _CachedPosterior | None = None
        for result in results:
            self.add_result(result)

    @property
    def final_settings(self) -> SearchSettings:
        """The settings with the reason for which the search was stopped.

        Together with the results of the trials they determine the result of the search.
        """
        return msgspec.structs.replace(self.settings, stop_reason=self.stop_reason)

    def add_result(self, result: TrialResult) -> None:
        """Add the result of the trial that `next_trial` returned.

        An invalid trial says nothing about its load, which is tried again; a second one in a row
        ends the search. A refusal for a quota or a rate limit ends it at once, because every
        further trial would be refused too.
        """
        follows_invalid = bool(self.results) and not self.results[-1].is_valid
        self.results.append(result)
        if result.reason_code == REFUSED:
            self.stop_reason = "refused"
        elif follows_invalid and not result.is_valid:
            self.stop_reason = self._reason_of_repeated_invalidity(result)

    def _reason_of_repeated_invalidity(self, result: TrialResult) -> str:
        """Return the stop reason after two invalid trials in a row, the second being `result`.

        If every valid trial failed and this one sends too few requests to be judged, no load passes
        at all, because lower loads would send even fewer.
        """
        has_only_failed = self._highest_passed is None and self._lowest_failed is not None
        return "none" if has_only_failed and result.reason_code == "too_few" else "invalid"

    def stop(self, reason: str) -> None:
        """End the search for a reason from outside. The first reason stands."""
        self.stop_reason = self.stop_reason or reason

    def next_trial(self) -> PlannedTrial | None:
        """Return the next trial, or None if the search has ended.

        The search has two phases. Trials of the ordinary length find the highest load within the
        SLO. If they find one, usually longer trials (sustained-load checks) find the highest load
        that is also sustained. The same trial is returned until its result is added.
        """
        ordinary_stop_reason = self._ordinary_stop_reason()
        if not ordinary_stop_reason:
            return self._next_ordinary_trial()
        has_load_within_slo = ordinary_stop_reason in STOPS_WITH_LOAD_WITHIN_SLO
        if has_load_within_slo and not self._is_out_of_time():
            return self._next_sustain_check()
        return None

    def _next_sustain_check(self) -> PlannedTrial | None:
        """Return the next trial that has to show that a load is sustained, if one is left."""
        longer_trial = self._sustained_search().next_trial()
        if longer_trial is None:
            return None
        return self._plan_trial(longer_trial.load, "sustain", longer_trial.length_factor)

    def _next_ordinary_trial(self) -> PlannedTrial:
        """Return the next trial that looks for the highest load within the SLO.

        1. Bracketing trials find one load that passes and one that fails. Bounds that the user gave
           are only tried if the capacity seems to lie beyond them.
        2. Narrowing trials (kind "probe") run at the median of the posterior of the capacity, which
           is a bisection where outcomes are clear.
        3. Once the interval is narrow enough, or after many trials, a confirmation at full length
           tries a load that most likely passes.
        """
        bounds = self._bounds()
        if bounds is None:
            return self._plan_trial(self._bracketing_load(), "bracket")

        posterior = self._posterior(bounds)
        untried_bound = self._untried_bound_near_capacity(posterior)
        if untried_bound is not None:
            return self._plan_trial(untried_bound, "bracket")
        if self._is_precise(posterior) or len(self.results) >= ENOUGH_TRIALS:
            return self._plan_trial(self._confirmation_load(posterior), "confirm")

        return self._plan_trial(posterior.quantile(0.5), "probe")

    @property
    def relative_width(self) -> float | None:
        """The half-width of the interval of the capacity, in units of the requested precision.

        It is above 1 while the interval is wider than requested, for example 4.0. None until one
        load has passed and one has failed.
        """
        bounds = self._bounds()
        if bounds is None:
            return None
        interval = self._posterior(bounds).interval(PRECISION_CONFIDENCE)
        relative_half_width = interval.half_width / interval.value
        return relative_half_width / self.settings.precision

    @property
    def result(self) -> SearchResult:
        """What the search has found so far, or at its end.

        It is computed from the results of all trials in three steps, each of which returns a copy
        with more fields: what the outcomes of the trials show, then the credible interval of the
        highest load within the SLO, and then the highest load that is also sustained.
        """
        confirming_trials = [result for result in self.results if result.is_confirming]
        found_by_outcomes = SearchResult(
            load=self._highest_passed,
            interval=None,
            confirmed_load=self._confirmed_load,
            highest_passed=self._highest_passed,
            lowest_failed=self._lowest_failed,
            stop_reason=self._stop_reason(),
            trial_count=len(self.results),
            duration_s=sum(result.duration_s for result in self.results),
            confirmation_s=sum(result.duration_s for result in confirming_trials),
            # The relative variation of the server from run to run. None if it is not specified: the
            # next step then takes the one that was learned from the trials.
            run_spread=self.settings.run_spread,
            run_spread_source=self._run_spread_source(),
            warmup_s=self.settings.warmup_s,
        )
        with_interval = self._with_capacity_interval(found_by_outcomes)

        return self._with_sustained_load(with_interval)

    def _with_capacity_interval(self, result: SearchResult) -> SearchResult:
        """Return a copy of the result with the estimated capacity and its credible interval.

        The estimate is the load that half of all full-length runs pass. Two further fields state
        what the interval covers: the variation of the server from run to run (`run_spread`), and
        the longest time after which a slowdown may recur so that the trials have met it
        (`horizon_s`).

        Without a load that failed, nothing bounds the capacity from above, so that there is no
        interval. If even the lowest load failed (stop reason "none"), there is no load either.
        """
        if result.stop_reason == "none":
            return msgspec.structs.replace(result, load=None)

        bounds = self._bounds()
        if bounds is None or result.lowest_failed is None:
            return result

        posterior = self._posterior(bounds)
        interval = posterior.interval(INTERVAL_CONFIDENCE)

        run_spread = self.settings.run_spread
        if run_spread is None:  # The user did not specify it, so the trials have to show it.
            run_spread = posterior.run_spread

        return msgspec.structs.replace(
            result,
            load=interval.value,
            interval=interval,
            run_spread=run_spread,
            horizon_s=self._recurrence_horizon_s(),
        )

    def _recurrence_horizon_s(self) -> float | None:
        """Return the longest time after which a slowdown may recur so that the interval covers it.

        A trial most likely meets an event that recurs, on average, within this time. Return None
        for a server that does not change over time, such as a simulation.
        """
        if self.settings.real_trial_s is None:
            return None
        return longest_recurrence_s(self.settings.real_trial_s, INTERVAL_CONFIDENCE)

    def _with_sustained_load(self, result: SearchResult) -> SearchResult:
        """Return a copy of the result with the highest load that is known to be sustained.

        A load is sustained if no queue grows at it. The copy also states why it is known to be
        sustained or not, the lowest load that was not sustained, and how long the trials behind
        this are. A load that no trial has shown stays None.
        """
        sustained_search = self._sustained_search()
        sustained_trial, unsustained_trial = sustained_search.find_bracket()
        sustainability = sustained_search.judge_sustainability(self._confirmed_load)

        judged = msgspec.structs.replace(
            result,
            sustained=sustainability.sustained,
            sustained_reason=sustainability.reason,
            length_factor=self.settings.sustain_length_factor,
            needed_load_s=sustained_search.needed_load_s,
        )
        if unsustained_trial is not None:
            judged = msgspec.structs.replace(judged, unsustained_load=unsustained_trial.load)

        if sustained_trial is None:
            return judged

        return msgspec.structs.replace(
            judged,
            sustained_load=sustained_trial.load,
            length_factor=sustained_trial.length_factor,
            sustained_for_s=self._planned_load_s(sustained_trial),
        )

    def _planned_load_s(self, trial: TrialResult) -> float | None:
        """Return how long a trial of full length sends load, or None if it is not known."""
        if self.settings.trial_load_s is None:
            return None
        return trial.length_factor * self.settings.trial_load_s

    def _run_spread_source(self) -> RunSpreadSource:
        """Return how the variation from run to run is known. Only a simulation has none at all."""
        if self.settings.run_spread is None:
            return "learned"
        return "told" if self.settings.run_spread else "simulated"

    def _sustained_search(self) -> SustainedSearch:
        """Return the search for the highest sustained load, after the results so far.

        It starts from the confirmed load, or while none is confirmed from the best one known.
        """
        highest = self._confirmed_load or self._highest_passed or self.settings.low
        return SustainedSearch(self.settings, self.results, highest)

    def _plan_trial(self, load: float, kind: TrialKind, length_factor: float = 1.0) -> PlannedTrial:
        """Return a trial at the allowed load that is nearest to `load`.

        `length_factor` is its duration, as a multiple of the ordinary one. To save time, the trial
        may pass early, unless it has to confirm its load or its outcome is not clear: close to a
        load that failed, only a trial at full length shows whether a load passes.
        """
        allowed_load = self._nearest_allowed_load(load, kind)
        lowest_failed = math.inf if self._lowest_failed is None else self._lowest_failed
        is_clearly_lower = allowed_load * (1 + self.settings.precision) <= lowest_failed

        # Not the number of results: a resumed search lacks those of trials that were not valid.
        last_number = max((result.number for result in self.results), default=-1)
        return PlannedTrial(
            number=last_number + 1,
            load=allowed_load,
            kind=kind,
            may_pass_early=kind not in CONFIRMING_KINDS and is_clearly_lower,
            length_factor=length_factor,
            warmup_load=self._warmup_load(allowed_load),
        )

    def _nearest_allowed_load(self, load: float, kind: TrialKind) -> float:
        """Return `load`, limited to the range of the search and, if loads are integers, rounded.

        Trials that narrow the interval do not repeat an integer load. They try its neighbour on the
        side on which the capacity lies.
        """
        allowed_load = min(max(load, self.settings.low), self.settings.high)
        if not self.settings.is_integer:
            return allowed_load

        rounded_load = float(round(allowed_load))
        tried_loads = [result.load for result in self._ordinary_results()]
        if kind != "probe" or rounded_load not in tried_loads:
            return rounded_load

        has_passed = self._highest_passed == rounded_load
        return rounded_load + 1 if has_passed else rounded_load - 1

    def _warmup_load(self, load: float) -> float | None:
        """Return the load to which the warm-up before a trial rises, or None without a warm-up.

        It is the highest load that has passed, so that the warm-up itself does not overload the
        server, and never more than the load of the trial.
        """
        if not self.settings.warmup_s:
            return None
        return min(load, self._highest_passed or load)

    def _ordinary_results(self) -> list[TrialResult]:
        """Return the valid results of the trials that are not longer than usual."""
        return [
            result for result in self.results if result.is_valid and not result.is_sustain_check
        ]

    @property
    def _highest_passed(self) -> float | None:
        """The highest load that passed in an ordinary trial, or None."""
        passed = [result.load for result in self._ordinary_results() if result.has_passed]
        return max(passed, default=None)

    @property
    def _lowest_failed(self) -> float | None:
        """The lowest load that failed in an ordinary trial, or None."""
        failed = [result.load for result in self._ordinary_results() if result.has_failed]
        return min(failed, default=None)

    def _confirmations(self) -> list[TrialResult]:
        """Return the valid ordinary trials that had to confirm a load, passed or failed."""
        return [result for result in self._ordinary_results() if result.is_confirmation]

    @property
    def _confirmed_load(self) -> float | None:
        """The highest load of a confirmation that passed, or None."""
        passed = [result.load for result in self._confirmations() if result.has_passed]
        return max(passed, default=None)

    def _bounds(self) -> CapacityBounds | None:
        """Return bounds of the capacity, or None until one load has passed and one has failed.

        They lie somewhat outside of the tried loads, because the outcomes near the capacity are
        partly due to chance. If the user gave both bounds, those apply from the beginning.
        """
        low = self.settings.low
        high = self.settings.high
        if self.settings.start is None:
            return CapacityBounds(low, high)

        passed = self._highest_passed
        failed = self._lowest_failed
        if passed is None or failed is None:
            return None

        return CapacityBounds(
            max(min(passed, failed) / BOUNDS_MARGIN, low),
            min(max(passed, failed) * BOUNDS_MARGIN, high),
        )

    def _bracketing_load(self) -> float:
        """Return the load to try while no load has passed, or none has failed.

        The load rises from the highest one that passed, or falls from the lowest one that failed,
        by a factor. If the first load is an estimate of the capacity, the factor is small at first
        because the estimate is most often good. It grows with each trial, for example 1.2, 1.44,
        1.73, and stays at 2, so that a bad estimate costs few trials. Without an estimate the
        factor is 2 from the beginning.
        """
        start = self.settings.start
        assert start is not None, "without a first load the bounds are known"
        first_step = self.settings.first_step
        grown_step = first_step ** len(self._ordinary_results())
        step = max(first_step, min(grown_step, BRACKET_STEP))
        if self._highest_passed is not None:
            return min(self._highest_passed * step, self.settings.high)
        if self._lowest_failed is not None:
            return max(self._lowest_failed / step, self.settings.low)

        return start

    def _posterior(self, bounds: CapacityBounds) -> CapacityPosterior:
        """Return the posterior of the capacity, given the outcomes of all ordinary trials.

        It takes milliseconds to compute and is needed several times per trial, so that the one
        after the last result is kept.
        """
        cached = self._cached_posterior
        if cached is not None and cached.is_of(len(self.results), bounds):
            return cached.posterior
        posterior = self._compute_posterior(bounds)
        self._cached_posterior = _CachedPosterior(len(self.results), bounds, posterior)
        return posterior

    def _compute_posterior(self, bounds: CapacityBounds) -> CapacityPosterior:
        """Return the probability distribution of the capacity after all ordinary trials.

        It begins with a prior distribution between the bounds. Each trial then updates it by Bayes'
        rule with whether the trial passed or failed at the load that it offered.
        """
        posterior = CapacityPosterior(
            bounds.low,
            bounds.high,
            sampling_sigma=self._sampling_sigma(),
            run_spread=self.settings.run_spread,
        )
        for result in self._ordinary_results():
            outcome = TrialOutcome(result.offered_load, result.has_passed, _lapse_of(result))
            posterior.update(outcome)

        return posterior

    def _sampling_sigma(self) -> float:
        """Return how much the load that a run just passes varies because requests are random.

        It is a standard deviation, as a share of the load: for example 0.03 for trials of 2500
        requests. It follows from the number of requests of the most recent trial.
        """
        noises = [
            result.sampling_noise
            for result in self._ordinary_results()
            if result.sampling_noise > 0
        ]
        return SIGMA_PER_NOISE * noises[-1] if noises else DEFAULT_SIGMA

    def _untried_bound_near_capacity(self, posterior: CapacityPosterior) -> float | None:
        """Return the bound of the search, --low or --high, near which the capacity seems to lie.

        The posterior cannot show a capacity outside of the bounds: its median only comes close to
        one of them. A trial at the bound itself then shows whether that load passes. Return None if
        the median is not close to a bound. Also return None if the capacity is known to lie on the
        inner side of the bound: a load below the upper bound failed, or one above the lower bound
        passed.
        """
        median = posterior.quantile(0.5)
        margin = max(self.settings.precision * median, self.settings.min_load_gap)
        is_near_high = median + margin >= self.settings.high
        is_near_low = median - margin <= self.settings.low
        if is_near_high and self._lowest_failed is None:
            return self.settings.high
        if is_near_low and self._highest_passed is None:
            return self.settings.low

        return None

    def _is_precise(self, posterior: CapacityPosterior) -> bool:
        """Return whether the interval of the capacity is as narrow as requested.

        An interval between two neighbouring integer loads cannot be narrowed any further.
        """
        interval = posterior.interval(PRECISION_CONFIDENCE)
        if interval.high - interval.low < self.settings.min_load_gap:
            return True
        return interval.half_width <= self.settings.precision * interval.value

    def _confirmation_load(self, posterior: CapacityPosterior) -> float:
        """Return the load at which a trial at full length has to confirm the capacity.

        A confirmation at the median of the capacity would fail every other time. Three rules give
        a load that most likely passes but is not needlessly low:

        1. It passes with CONFIRMATION_PROBABILITY according to the posterior.
        2. It is not below the reported interval.
        3. It is below any load at which a queue grew, even if rule 2 is then broken.
        """
        likely_load = posterior.highest_load_passing(CONFIRMATION_PROBABILITY)
        interval_low = posterior.quantile((1 - INTERVAL_CONFIDENCE) / 2)
        below_growing = lowest_growing_load(self.results) * (1 - self.settings.precision)
        load = min(max(likely_load, interval_low), below_growing)
        return math.floor(load) if self.settings.is_integer else load

    def _is_out_of_time(self) -> bool:
        """Return whether the trials took as long as they may take together."""
        max_time_s = self.settings.max_time_s
        duration_s = sum(result.duration_s for result in self.results)
        return max_time_s is not None and duration_s >= max_time_s

    def _stop_reason(self) -> str:
        """Return why the search has ended, or "" while it goes on.

        A search that found a load within the SLO goes on until it is known whether the load is
        sustained. The reasons are those of `SearchResult.stop_reason`.
        """
        ordinary_reason = self._ordinary_stop_reason()
        if ordinary_reason not in STOPS_WITH_LOAD_WITHIN_SLO:
            return ordinary_reason
        sustained_search = self._sustained_search()
        if sustained_search.next_trial() is not None:
            return "time" if self._is_out_of_time() else ""
        return sustained_search.failure_stop_reason() or ordinary_reason

    def _ordinary_stop_reason(self) -> str:
        """Return why no more trials of the ordinary length are needed, or "" while some are.

        A reason from outside, such as an interruption, comes first, then one that the outcomes of
        the trials give, and then the limits on the number and the time of trials.
        """
        reason = (
            self.stop_reason or self._stop_reason_at_bound() or self._stop_reason_of_confirmations()
        )
        if reason:
            return reason
        if len(self.results) >= self.settings.max_trials:
            return "probes"

        return "time" if self._is_out_of_time() else ""

    def _stop_reason_at_bound(self) -> str:
        """Return the stop reason if the capacity lies beyond a bound of the search, or "".

        - "none": the lowest allowed load failed, so that no allowed load passes.
        - "highest": the highest allowed load passed, so that the capacity may be higher.
        """
        passed = self._highest_passed
        failed = self._lowest_failed
        if passed is None and failed is not None and failed <= self.settings.low:
            return "none"
        if failed is None and passed is not None and passed >= self.settings.high:
            return "highest"
        return ""

    def _stop_reason_of_confirmations(self) -> str:
        """Return the stop reason that the confirmations give, or "" if more trials are needed.

        A confirmation is a trial at full length at a load that most likely passes.

        - "found": a load is confirmed, and the capacity is known to the requested precision.
        - "coarse": a load is confirmed, and many trials did not reach that precision.
        - "unconfirmed": too many confirmations failed.
        """
        if self._confirmed_load is None:
            has_tried_enough = len(self._confirmations()) >= MAX_CONFIRMATIONS
            return "unconfirmed" if has_tried_enough else ""
        bounds = self._bounds()
        if bounds is not None and self._is_precise(self._posterior(bounds)):
            return "found"
        return "coarse" if len(self.results) >= ENOUGH_TRIALS else ""


def _lapse_of(result: TrialResult) -> float:
    """Return the probability that the outcome of a trial says nothing about its load.

    It is larger for a trial that passed early, because only a part of its load was observed.
    """
    has_passed_early = result.ended_early and result.has_passed
    return EARLY_PASS_LAPSE if has_passed_early else FULL_LENGTH_LAPSE
