"""Finds the highest load that a server sustains, once the SLO alone allows a load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loadgen.search.search_results import TrialResult, lowest_growing_load
from loadgen.search.search_settings import (
    MAX_LENGTH_FACTOR,
    MAX_SUSTAIN_TRIALS,
    SearchSettings,
)

LENGTH_MARGIN = 1.1  # times the length that a trial is expected to need
MAX_REDUCTION = 0.5  # of the load from one trial to the next
GAP_TOLERANCE = 1.1  # times the precision: a smaller gap between two loads is not halved again


class SustainedBracket(NamedTuple):
    """The trials at the highest sustained load and at the lowest load that is not."""

    highest_sustained: TrialResult | None
    lowest_unsustained: TrialResult | None


class LongerTrial(NamedTuple):
    """The load and the length of a trial that has to show whether a load is sustained."""

    load: float
    length_factor: float


class Sustainability(NamedTuple):
    """Whether a load is sustained, None if it is not known, and the reason."""

    sustained: bool | None
    reason: str


@dataclass(frozen=True)
class SustainedSearch:
    """The search for the highest sustained load, at one point of a `LoadSearch`.

    It lowers the load until a trial shows that nothing grows, and then halves the gap to the lowest
    load that was not sustained.
    """

    settings: SearchSettings
    results: Sequence[TrialResult]
    highest_within_slo: float  # confirmed, or if none was confirmed passed

    def bracket(self) -> SustainedBracket:
        """Return the trials that enclose the highest sustained load.

        No load at or above one that grew is sustained, whatever another trial showed.
        """
        growing_load = lowest_growing_load(self.results)
        candidates = self._growth_trials()
        unsustained = [
            result
            for result in candidates
            if not self._is_sustained(result) and not self._needs_longer_trial(result)
        ]
        if self.settings.requires_sustained and not self.settings.has_longer_trials:
            candidates = candidates + self._confirmations()
        sustained = [
            result
            for result in candidates
            if self._is_sustained(result) and result.load < growing_load
        ]
        return SustainedBracket(
            max(sustained, key=lambda result: result.load, default=None),
            min(unsustained, key=lambda result: result.load, default=None),
        )

    def next_trial(self) -> LongerTrial | None:
        """Return the next trial to run, or None if no further trial is needed or allowed."""
        longer_trials = [result for result in self.results if result.kind == "sustain"]
        max_trials = self.settings.max_trials + MAX_SUSTAIN_TRIALS
        if len(longer_trials) >= MAX_SUSTAIN_TRIALS or len(self.results) >= max_trials:
            return None
        growth_trials = self._growth_trials()
        if growth_trials and self._needs_longer_trial(growth_trials[-1]):
            return self._extended_trial(growth_trials[-1])
        load = self._next_load()
        if load is None:
            return None
        factors = [result.length_factor for result in longer_trials]
        return LongerTrial(load, max(factors, default=self.settings.sustain_length_factor))

    def sustainability(self, confirmed_load: float | None) -> Sustainability:
        """Return whether the highest load is sustained. Only a longer trial can show that it is."""
        bracket = self.bracket()
        highest = bracket.highest_sustained
        if highest is not None and highest.length_factor > 1:
            length = f"held over {highest.length_factor:g} times the length of a trial"
            return Sustainability(highest.sustained, f"{length}; {highest.sustained_reason}")
        if bracket.lowest_unsustained is not None:
            return self._explain_unsustained(bracket.lowest_unsustained)
        too_short = [result for result in self._growth_trials() if self._needs_longer_trial(result)]
        if highest is None and too_short:
            return Sustainability(None, too_short[-1].sustained_reason)
        if confirmed_load is None:
            return Sustainability(None, "no load was confirmed")
        return Sustainability(None, "no trial was longer than the rules ask for")

    def failure_reason(self) -> str:
        """Return why no load is confirmed, as a stop reason, or "" if one is or may be."""
        if not self.settings.requires_sustained:
            return ""
        bracket = self.bracket()
        is_open = bracket.lowest_unsustained is None and not self._is_untested(self._highest_load())
        if bracket.highest_sustained is not None or is_open:
            return ""
        growth_trials = self._growth_trials()
        is_unknown = any(result.has_passed and result.sustained is None for result in growth_trials)
        return "undecided" if is_unknown or not growth_trials else "unconfirmed"

    @property
    def needed_load_s(self) -> float | None:
        """How long the load of a trial has to last to show whether it is sustained, if known."""
        needed = [result.needed_load_s or 0.0 for result in self._growth_trials()]
        return max(needed, default=0.0) or None

    def _growth_trials(self) -> list[TrialResult]:
        """Return the longer trials, and the confirmations whose load may not be sustained."""
        return [
            result
            for result in self.results
            if result.is_valid
            and (result.kind == "sustain" or self._is_doubtful_confirmation(result))
        ]

    def _is_doubtful_confirmation(self, result: TrialResult) -> bool:
        is_confirmation = result.kind == "confirm" and result.has_passed
        return is_confirmation and not self._is_sustained(result)

    def _confirmations(self) -> list[TrialResult]:
        return [result for result in self.results if result.is_valid and result.kind == "confirm"]

    def _is_sustained(self, result: TrialResult) -> bool:
        """Return whether a trial passed and showed of growth what the settings require."""
        if self.settings.requires_sustained:
            return result.has_passed and result.sustained is True
        return result.has_passed and result.sustained is not False

    def _needs_longer_trial(self, result: TrialResult) -> bool:
        """Return whether only a longer trial could show that the load of a pass is sustained."""
        return self.settings.requires_sustained and result.has_passed and result.is_too_short

    def _extended_trial(self, result: TrialResult) -> LongerTrial | None:
        """Return a longer trial at the load of `result`.

        Return None if trials may not be extended, or if the longest one would hardly decide either.
        """
        needed_factor = self._needed_length_factor(result)
        is_longest = result.length_factor >= MAX_LENGTH_FACTOR
        is_hopeless = needed_factor > 2 * MAX_LENGTH_FACTOR
        if not self.settings.may_extend_trials or is_longest or is_hopeless:
            return None
        return LongerTrial(result.load, min(needed_factor, MAX_LENGTH_FACTOR))

    def _needed_length_factor(self, result: TrialResult) -> float:
        """Return how long a trial has to be to decide, at least twice as long as `result` was."""
        doubled = 2 * result.length_factor
        if self.settings.trial_load_s is None or result.needed_load_s is None:
            return doubled
        needed_s = LENGTH_MARGIN * result.needed_load_s
        return max(doubled, float(math.ceil(needed_s / self.settings.trial_load_s)))

    def _highest_load(self) -> float:
        """Return the highest load within the SLO, below any load that grew."""
        below_growing = lowest_growing_load(self.results) * (1 - self.settings.precision)
        return min(self.highest_within_slo, below_growing)

    def _next_load(self) -> float | None:
        """Return the load of the next longer trial, or None if there is none to try."""
        highest_load = self._highest_load()
        precision = self.settings.precision
        sustained, unsustained = self.bracket()
        if sustained is None and unsustained is None:
            is_wanted = self.settings.has_longer_trials or self._is_untested(highest_load)
            return highest_load if is_wanted else None
        if unsustained is None:
            return None  # The highest load within the SLO is sustained.
        if sustained is None:
            failed_count = len({result.load for result in self._growth_trials()})
            reduction = min(precision * 2 ** (failed_count - 1), MAX_REDUCTION)
            load = highest_load * (1 - reduction)
            if load >= unsustained.load:
                load = unsustained.load * (1 - precision)
            return self._untried_load(load)
        closest = sustained.load * (1 + GAP_TOLERANCE * precision) + self.settings.min_load_gap
        if unsustained.load <= closest:
            return None
        return self._untried_load(math.sqrt(sustained.load * unsustained.load))

    def _is_untested(self, load: float) -> bool:
        """Return whether an ordinary trial still has to show that this load is sustained."""
        if not self.settings.requires_sustained:
            return False
        ordinary = [
            result
            for result in self.results
            if result.is_valid and result.kind != "sustain" and result.load >= load
        ]
        return not any(self._is_sustained(result) for result in ordinary)

    def _untried_load(self, load: float) -> float | None:
        """Return the load, or None if it was tried before or is too low."""
        if self.settings.is_integer:
            load = float(round(load))
        tried_loads = {result.load for result in self._growth_trials()}
        return None if load < self.settings.low or load in tried_loads else load

    def _explain_unsustained(self, unsustained: TrialResult) -> Sustainability:
        """Return why the lowest load that is not sustained is not, or may not be."""
        has_passed = self.settings.requires_sustained and unsustained.has_passed
        if has_passed and unsustained.sustained is None:
            return Sustainability(None, unsustained.sustained_reason)
        if unsustained.sustained is False:
            return Sustainability(False, unsustained.sustained_reason)
        return Sustainability(False, unsustained.reason)
