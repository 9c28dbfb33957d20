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
    CONFIRMING_KINDS,
    FOUND,
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

HAS_LOAD_WITHIN_SLO = (*FOUND, "highest")
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
        further trial would be refused too. If every load so far failed and the next one sends too
        few requests to be judged, no load passes, because lower ones would send even fewer.
        """
        follows_invalid = bool(self.results) and not self.results[-1].is_valid
        self.results.append(result)
        if result.reason_code == REFUSED:
            self.stop_reason = "refused"
        elif not result.is_valid and follows_invalid:
            has_only_failed = self._highest_passed is None and self._lowest_failed is not None
            no_load_passes = has_only_failed and result.reason_code == "too_few"
            self.stop_reason = "none" if no_load_passes else "invalid"

    def stop(self, reason: str) -> None:
        """End the search for a reason from outside. The first reason stands."""
        self.stop_reason = self.stop_reason or reason

    def next_trial(self) -> PlannedTrial | None:
        """Return the next trial, or None if the search has ended.

        The trial stays the same until its result is added.
        """
        reason = self._ordinary_stop_reason()
        if not reason:
            return self._next_ordinary_trial()
        if reason in HAS_LOAD_WITHIN_SLO and not self._is_out_of_time():
            return self._next_longer_trial()
        return None

    def _next_longer_trial(self) -> PlannedTrial | None:
        """Return the next trial that has to show that a load is sustained, if one is left."""
        longer_trial = self._sustained_search().next_trial()
        if longer_trial is None:
            return None
        return self._plan_trial(longer_trial.load, "sustain", longer_trial.length_factor)

    def _next_ordinary_trial(self) -> PlannedTrial:
        """Return the next trial that looks for the highest load within the SLO."""
        bounds = self._bounds()
        if bounds is None:
            return self._plan_trial(self._bracketing_load(), "bracket")
        posterior = self._posterior(bounds)
        end = self._untried_end(posterior)
        if end is not None:
            return self._plan_trial(end, "bracket")
        if self._is_precise(posterior) or len(self.results) >= ENOUGH_TRIALS:
            return self._plan_trial(self._confirmation_load(posterior), "confirm")
        return self._plan_trial(posterior.quantile(0.5), "probe")

    @property
    def relative_width(self) -> float | None:
        """The half width of the interval, divided by the requested one.

        None while there are no bounds.
        """
        bounds = self._bounds()
        if bounds is None:
            return None
        interval = self._posterior(bounds).interval(PRECISION_CONFIDENCE)
        return interval.half_width / interval.value / self.settings.precision

    @property
    def result(self) -> SearchResult:
        """What the search has found so far."""
        stop_reason = self._stop_reason()
        load = self._highest_passed
        interval = None
        run_spread = self.settings.run_spread
        bounds = self._bounds()
        if bounds is not None and self._lowest_failed is not None and stop_reason != "none":
            posterior = self._posterior(bounds)
            interval = posterior.interval(INTERVAL_CONFIDENCE)
            load = interval.value
            if run_spread is None:
                run_spread = posterior.run_spread
        horizon_s = None
        if interval is not None and self.settings.real_trial_s is not None:
            horizon_s = longest_recurrence_s(self.settings.real_trial_s, INTERVAL_CONFIDENCE)
        found = SearchResult(
            load=None if stop_reason == "none" else load,
            interval=interval,
            confirmed_load=self._confirmed_load,
            highest_passed=self._highest_passed,
            lowest_failed=self._lowest_failed,
            stop_reason=stop_reason,
            trial_count=len(self.results),
            duration_s=sum(result.duration_s for result in self.results),
            confirmation_s=sum(
                result.duration_s for result in self.results if result.kind in CONFIRMING_KINDS
            ),
            horizon_s=horizon_s,
            run_spread=run_spread,
            run_spread_source=self._run_spread_source(),
            warmup_s=self.settings.warmup_s,
        )
        return self._with_sustained_load(found)

    def _with_sustained_load(self, found: SearchResult) -> SearchResult:
        """Return what was found, with the highest load that is sustained."""
        sustained_search = self._sustained_search()
        sustained, unsustained = sustained_search.bracket()
        sustainability = sustained_search.sustainability(self._confirmed_load)
        length_factor = self.settings.sustain_length_factor
        sustained_for_s = None
        if sustained is not None:
            length_factor = sustained.length_factor
            if self.settings.trial_load_s is not None:
                sustained_for_s = length_factor * self.settings.trial_load_s
        return msgspec.structs.replace(
            found,
            sustained=sustainability.sustained,
            sustained_reason=sustainability.reason,
            sustained_load=None if sustained is None else sustained.load,
            unsustained_load=None if unsustained is None else unsustained.load,
            length_factor=length_factor,
            sustained_for_s=sustained_for_s,
            needed_load_s=sustained_search.needed_load_s,
        )

    def _run_spread_source(self) -> RunSpreadSource:
        if self.settings.run_spread is None:
            return "learned"
        return "told" if self.settings.run_spread else "simulated"

    def _sustained_search(self) -> SustainedSearch:
        highest = self._confirmed_load or self._highest_passed or self.settings.low
        return SustainedSearch(self.settings, self.results, highest)

    def _plan_trial(self, load: float, kind: TrialKind, length_factor: float = 1.0) -> PlannedTrial:
        """Return a trial at a load, which is moved to the nearest one that is allowed."""
        load = min(max(load, self.settings.low), self.settings.high)
        if self.settings.is_integer:
            load = float(round(load))
            tried_loads = [result.load for result in self._ordinary_results()]
            if kind == "probe" and load in tried_loads:
                # The neighbour on the side on which the capacity lies.
                load += 1 if self._highest_passed == load else -1
        # Within the precision of a load that failed, only a full-length trial shows the outcome.
        lowest_failed = math.inf if self._lowest_failed is None else self._lowest_failed
        is_clearly_lower = load * (1 + self.settings.precision) <= lowest_failed
        # Not the number of results: a resumed search lacks those of trials that were not valid.
        last_number = max((result.number for result in self.results), default=-1)
        return PlannedTrial(
            number=last_number + 1,
            load=load,
            kind=kind,
            may_pass_early=kind not in CONFIRMING_KINDS and is_clearly_lower,
            length_factor=length_factor,
            warmup_load=self._warmup_load(load),
        )

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
        return [result for result in self.results if result.is_valid and result.kind != "sustain"]

    @property
    def _highest_passed(self) -> float | None:
        passed = [result.load for result in self._ordinary_results() if result.has_passed]
        return max(passed, default=None)

    @property
    def _lowest_failed(self) -> float | None:
        failed = [result.load for result in self._ordinary_results() if result.has_failed]
        return min(failed, default=None)

    def _confirmations(self) -> list[TrialResult]:
        return [result for result in self._ordinary_results() if result.kind == "confirm"]

    @property
    def _confirmed_load(self) -> float | None:
        passed = [result.load for result in self._confirmations() if result.has_passed]
        return max(passed, default=None)

    def _bounds(self) -> CapacityBounds | None:
        """Return bounds of the capacity, or None until one load has passed and one has failed."""
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

        The factor to the next load grows with the number of trials.
        """
        start = self.settings.start
        assert start is not None, "without a first load the bounds are known"
        first_step = self.settings.first_step
        grown_step = min(first_step ** len(self._ordinary_results()), BRACKET_STEP)
        step = max(first_step, grown_step)
        if self._highest_passed is not None:
            return min(self._highest_passed * step, self.settings.high)
        if self._lowest_failed is not None:
            return max(self._lowest_failed / step, self.settings.low)
        return start

    def _posterior(self, bounds: CapacityBounds) -> CapacityPosterior:
        """Return the posterior of the capacity. It is computed once for each new result."""
        cached = self._cached_posterior
        if (
            cached is not None
            and cached.result_count == len(self.results)
            and cached.bounds == bounds
        ):
            return cached.posterior
        results = self._ordinary_results()
        noises = [result.sampling_noise for result in results if result.sampling_noise > 0]
        posterior = CapacityPosterior(
            bounds.low,
            bounds.high,
            sampling_sigma=SIGMA_PER_NOISE * noises[-1] if noises else DEFAULT_SIGMA,
            run_spread=self.settings.run_spread,
        )
        for result in results:
            is_early_pass = result.ended_early and result.has_passed
            lapse = EARLY_PASS_LAPSE if is_early_pass else FULL_LENGTH_LAPSE
            posterior.update(TrialOutcome(result.offered_load, result.has_passed, lapse))
        self._cached_posterior = _CachedPosterior(len(self.results), bounds, posterior)
        return posterior

    def _untried_end(self, posterior: CapacityPosterior) -> float | None:
        """Return the end of the allowed loads that all trials point to, unless it was tried.

        The capacity may lie outside of the bounds that the user gave.
        """
        median = posterior.quantile(0.5)
        margin = max(self.settings.precision * median, self.settings.min_load_gap)
        if self._lowest_failed is None and median + margin >= self.settings.high:
            return self.settings.high
        if self._highest_passed is None and median - margin <= self.settings.low:
            return self.settings.low
        return None

    def _is_precise(self, posterior: CapacityPosterior) -> bool:
        interval = posterior.interval(PRECISION_CONFIDENCE)
        if interval.high - interval.low < self.settings.min_load_gap:
            return True
        return interval.half_width <= self.settings.precision * interval.value

    def _confirmation_load(self, posterior: CapacityPosterior) -> float:
        """Return the load of a confirmation: it most likely passes, and no lower one grew."""
        likely = posterior.highest_load_passing(CONFIRMATION_PROBABILITY)
        interval_low = posterior.quantile((1 - INTERVAL_CONFIDENCE) / 2)
        below_growing = lowest_growing_load(self.results) * (1 - self.settings.precision)
        load = min(max(likely, interval_low), below_growing)
        return math.floor(load) if self.settings.is_integer else load

    def _is_out_of_time(self) -> bool:
        """Return whether the trials took as long as they may take together."""
        max_time_s = self.settings.max_time_s
        duration_s = sum(result.duration_s for result in self.results)
        return max_time_s is not None and duration_s >= max_time_s

    def _stop_reason(self) -> str:
        """Return why the search has ended, or "" while it goes on."""
        reason = self._ordinary_stop_reason()
        if reason not in HAS_LOAD_WITHIN_SLO:
            return reason
        sustained_search = self._sustained_search()
        if sustained_search.next_trial() is not None:
            return "time" if self._is_out_of_time() else ""
        return sustained_search.failure_reason() or reason

    def _ordinary_stop_reason(self) -> str:
        """Return why no more trials of the ordinary length are needed, or "" while some are."""
        reason = self.stop_reason or self._end_of_loads() or self._confirmation_reason()
        if reason:
            return reason
        if len(self.results) >= self.settings.max_trials:
            return "probes"
        return "time" if self._is_out_of_time() else ""

    def _end_of_loads(self) -> str:
        """Return "none" if the lowest load failed, "highest" if the highest passed, else ""."""
        passed = self._highest_passed
        failed = self._lowest_failed
        if passed is None and failed is not None and failed <= self.settings.low:
            return "none"
        if failed is None and passed is not None and passed >= self.settings.high:
            return "highest"
        return ""

    def _confirmation_reason(self) -> str:
        """Return whether a load is confirmed, as a stop reason, or "" if it is still to be."""
        if self._confirmed_load is None:
            has_tried_enough = len(self._confirmations()) >= MAX_CONFIRMATIONS
            return "unconfirmed" if has_tried_enough else ""
        bounds = self._bounds()
        if bounds is not None and self._is_precise(self._posterior(bounds)):
            return "found"
        return "coarse" if len(self.results) >= ENOUGH_TRIALS else ""
