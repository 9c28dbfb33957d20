"""Finds the highest load that a server sustains, once a load within the SLO is known.

A load is sustained if the server keeps up with it, so that no queue grows. Within a short trial,
a queue that grows slowly does not yet break the SLO, so that only a longer trial can show this.
"""

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

LENGTH_MARGIN = 1.1
"""The length of an extended trial, in units of the length that it is expected to need."""
MAX_LOAD_REDUCTION = 0.5
"""The largest share by which the load is lowered from one trial to the next."""
GAP_TOLERANCE = 1.1
"""A gap between two loads is not halved again below so many times the requested precision."""


class SustainedBracket(NamedTuple):
    """The trials at the highest sustained load and at the lowest load that is not."""

    highest_sustained: TrialResult | None
    lowest_unsustained: TrialResult | None


class LongerTrial(NamedTuple):
    """The load and the length of a trial that has to show whether a load is sustained."""

    load: float
    length_factor: float


class Sustainability(NamedTuple):
    """Whether a load is sustained, and the reason. `sustained` is None if it is not known."""

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
        """Return whether the highest load found is sustained, and why.

        Only a longer trial can show that it is. Any trial can show that it is not.
        """
        highest_sustained, lowest_unsustained = self.bracket()
        if highest_sustained is not None and highest_sustained.length_factor > 1:
            length = f"passed over {highest_sustained.length_factor:g} times the trial length"
            reason = f"{length}; {highest_sustained.sustained_reason}"
            return Sustainability(highest_sustained.sustained, reason)
        if lowest_unsustained is not None:
            return self._explain_unsustained(lowest_unsustained)
        too_short_trials = [
            result for result in self._growth_trials() if self._needs_longer_trial(result)
        ]
        if highest_sustained is None and too_short_trials:
            return Sustainability(None, too_short_trials[-1].sustained_reason)
        if confirmed_load is None:
            return Sustainability(None, "no load was confirmed")
        return Sustainability(None, "no trial was longer than the rules require")

    def failure_reason(self) -> str:
        """Return why no load could be confirmed, as a stop reason, or "" if one is or may be.

        It is "undecided" if a trial passed that could not show whether its load is sustained, and
        "unconfirmed" if every trial failed or showed growth.
        """
        if not self.settings.requires_sustained:
            return ""
        highest_sustained, lowest_unsustained = self.bracket()
        if highest_sustained is not None:
            return ""
        if lowest_unsustained is None and not self._is_untested(self._highest_load()):
            return ""
        growth_trials = self._growth_trials()
        has_unknown_growth = any(
            result.has_passed and result.sustained is None for result in growth_trials
        )
        return "undecided" if has_unknown_growth or not growth_trials else "unconfirmed"

    @property
    def needed_load_s(self) -> float | None:
        """How long the load of a trial has to last to show whether it is sustained.

        It is the longest time that any trial proposed, or None if no trial proposed one.
        """
        proposed_s = [
            result.needed_load_s
            for result in self._growth_trials()
            if result.needed_load_s is not None and result.needed_load_s > 0
        ]
        return max(proposed_s, default=None)

    def _growth_trials(self) -> list[TrialResult]:
        """Return the longer trials, and the confirmations whose load may not be sustained."""
        return [
            result
            for result in self.results
            if result.is_valid
            and (result.kind == "sustain" or self._is_doubtful_confirmation(result))
        ]

    def _is_doubtful_confirmation(self, result: TrialResult) -> bool:
        """Return whether a confirmation met the SLO without showing that its load is sustained."""
        is_confirmation = result.kind == "confirm" and result.has_passed
        return is_confirmation and not self._is_sustained(result)

    def _confirmations(self) -> list[TrialResult]:
        return [result for result in self.results if result.is_valid and result.kind == "confirm"]

    def _is_sustained(self, result: TrialResult) -> bool:
        """Return whether a trial passed, and its load counts as sustained.

        By default a load counts as sustained until a trial shows growth. With `requires_sustained`
        the trial has to show that nothing grows.
        """
        if self.settings.requires_sustained:
            return result.has_passed and result.sustained is True
        return result.has_passed and result.sustained is not False

    def _needs_longer_trial(self, result: TrialResult) -> bool:
        """Return whether only a longer trial could show that the load of a pass is sustained."""
        return self.settings.requires_sustained and result.has_passed and result.is_too_short

    def _extended_trial(self, result: TrialResult) -> LongerTrial | None:
        """Return a longer trial at the load of `result`.

        Return None if trials may not be extended, or if even the longest one would be shorter than
        half of the needed length, and so would hardly decide either.
        """
        needed_factor = self._needed_length_factor(result)
        is_longest = result.length_factor >= MAX_LENGTH_FACTOR
        is_out_of_reach = needed_factor > 2 * MAX_LENGTH_FACTOR
        if not self.settings.may_extend_trials or is_longest or is_out_of_reach:
            return None
        return LongerTrial(result.load, min(needed_factor, MAX_LENGTH_FACTOR))

    def _needed_length_factor(self, result: TrialResult) -> float:
        """Return how long a trial has to be to decide, in lengths of an ordinary trial.

        It is at least twice as long as `result` was, so that a few extensions are enough.
        """
        doubled_factor = 2 * result.length_factor
        if self.settings.trial_load_s is None or result.needed_load_s is None:
            return doubled_factor
        needed_s = LENGTH_MARGIN * result.needed_load_s
        needed_factor = float(math.ceil(needed_s / self.settings.trial_load_s))
        return max(doubled_factor, needed_factor)

    def _highest_load(self) -> float:
        """Return the highest load within the SLO, below any load that grew."""
        below_growing = lowest_growing_load(self.results) * (1 - self.settings.precision)
        return min(self.highest_within_slo, below_growing)

    def _next_load(self) -> float | None:
        """Return the load of the next longer trial, or None if there is none to try.

        The first trial runs at the highest load within the SLO. If that load is not sustained, the
        load is lowered until one is, and then the gap between the two is halved.
        """
        sustained_trial, unsustained_trial = self.bracket()
        if unsustained_trial is None:
            return self._first_load() if sustained_trial is None else None
        if sustained_trial is None:
            return self._untried_load(self._lowered_load(unsustained_trial.load))
        smallest_gap_end = sustained_trial.load * (1 + GAP_TOLERANCE * self.settings.precision)
        if unsustained_trial.load <= smallest_gap_end + self.settings.min_load_gap:
            return None
        return self._untried_load(math.sqrt(sustained_trial.load * unsustained_trial.load))

    def _first_load(self) -> float | None:
        """Return the highest load within the SLO, or None if no trial has to show it as sustained.

        The confirmation may have shown already that nothing grows at this load.
        """
        highest_load = self._highest_load()
        needs_trial = self.settings.has_longer_trials or self._is_untested(highest_load)
        return highest_load if needs_trial else None

    def _lowered_load(self, unsustained_load: float) -> float:
        """Return a lower load than all that were not sustained.

        It lies below the highest load within the SLO by the precision, and by twice as much with
        each further load that was not sustained: 2 %, 4 %, 8 % and so on.
        """
        precision = self.settings.precision
        unsustained_count = len({result.load for result in self._growth_trials()})
        reduction = min(precision * 2.0 ** (unsustained_count - 1), MAX_LOAD_REDUCTION)
        load = self._highest_load() * (1 - reduction)
        if load >= unsustained_load:
            return unsustained_load * (1 - precision)
        return load

    def _is_untested(self, load: float) -> bool:
        """Return whether no ordinary trial has shown yet that this load is sustained.

        A trial at a higher load shows it too.
        """
        if not self.settings.requires_sustained:
            return False
        ordinary_results = [
            result
            for result in self.results
            if result.is_valid and result.kind != "sustain" and result.load >= load
        ]
        return not any(self._is_sustained(result) for result in ordinary_results)

    def _untried_load(self, load: float) -> float | None:
        """Return the load, or None if it was tried before or is too low."""
        if self.settings.is_integer:
            load = float(round(load))
        tried_loads = {result.load for result in self._growth_trials()}
        return None if load < self.settings.low or load in tried_loads else load

    def _explain_unsustained(self, unsustained: TrialResult) -> Sustainability:
        """Return why the lowest load of an unsustained trial is not sustained, or may not be.

        Such a trial showed growth, or missed the SLO, or left open whether anything grows although
        the settings require that it shows this.
        """
        is_left_open = unsustained.has_passed and unsustained.sustained is None
        if self.settings.requires_sustained and is_left_open:
            return Sustainability(None, unsustained.sustained_reason)
        if unsustained.sustained is False:
            return Sustainability(False, unsustained.sustained_reason)
        return Sustainability(False, unsustained.reason)
