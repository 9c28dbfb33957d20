"""Finds the highest load that a server sustains, once a load within the SLO is known.

A load is sustained if the server keeps up with it, so that no queue grows. Within a short trial,
a queue that grows slowly does not yet break the SLO, so that only a longer trial can show this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from loadgen.search.search_results import TrialResult, lowest_growing_load
from loadgen.search.search_settings import (
    MAX_LENGTH_FACTOR,
    MAX_SUSTAIN_TRIALS,
    SearchSettings,
)

LENGTH_MARGIN = 1.1
"""The length of an extended trial, in units of the length that it is expected to need."""
MAX_LOAD_REDUCTION = 0.5
"""The largest share by which a load is lowered below the highest load within the SLO."""
GAP_TOLERANCE = 1.1
"""The gap between two loads that is small enough, in units of the requested precision."""


class SustainedBracket(NamedTuple):
    """The trials on both sides of the highest sustained load. None where there is none yet."""

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

    It lowers the load until a trial shows that no queue grows, and then halves the gap to the
    lowest load that was not sustained.

    Three kinds of trials matter here. A sustained-load check has the kind "sustain", and is usually
    longer than an ordinary trial. A confirmation is an ordinary trial at full length. A doubtful
    confirmation met the SLO without showing that its load is sustained.

    Attributes:
        settings: The settings of the search.
        results: The results of all trials so far, in the order of time.
        highest_within_slo: The highest load that was confirmed, or while none was confirmed the
            highest one that passed.
    """

    settings: SearchSettings
    results: Sequence[TrialResult]
    highest_within_slo: float

    def find_bracket(self) -> SustainedBracket:
        """Return the trials next to the limit of what is sustained, one on each side of it.

        One trial has the highest load that is sustained, and the other the lowest one that is not.
        """
        return SustainedBracket(
            highest_sustained=max(self._sustained_trials(), key=_load_of, default=None),
            lowest_unsustained=min(self._unsustained_trials(), key=_load_of, default=None),
        )

    def _sustained_trials(self) -> list[TrialResult]:
        """Return the trials that show that their load is sustained.

        A load at or above one at which a queue grew never counts as sustained, whatever its own
        trial showed: a queue that grows at some load also grows at a higher one.
        """
        candidates = self._sustainability_trials()
        if self.settings.requires_sustained and not self.settings.has_longer_trials:
            # Confirmations have to show it, because no longer trials are run.
            candidates += self._confirmations()

        growing_load = lowest_growing_load(self.results)
        return [
            result
            for result in candidates
            if self._is_sustained(result) and result.load < growing_load
        ]

    def _unsustained_trials(self) -> list[TrialResult]:
        """Return the trials whose load does not count as sustained, even if they ran for longer."""
        return [
            result
            for result in self._sustainability_trials()
            if not self._is_sustained(result) and not self._needs_longer_trial(result)
        ]

    def next_trial(self) -> LongerTrial | None:
        """Return the next sustained-load check to run, or None if none is needed or allowed.

        If the last trial passed but was too short to show whether anything grows, its load is tried
        again for longer. Otherwise another load is tried, for as long as the longest check so far.
        """
        checks = [result for result in self.results if result.is_sustain_check]
        max_trials = self.settings.max_trials + MAX_SUSTAIN_TRIALS
        if len(checks) >= MAX_SUSTAIN_TRIALS or len(self.results) >= max_trials:
            return None

        judged_trials = self._sustainability_trials()
        if judged_trials and self._needs_longer_trial(judged_trials[-1]):
            return self._extended_trial(judged_trials[-1])

        load = self._next_load()
        if load is None:
            return None

        length_factors = [result.length_factor for result in checks]
        length_factor = max(length_factors, default=self.settings.sustain_length_factor)
        return LongerTrial(load, length_factor)

    def judge_sustainability(self, confirmed_load: float | None) -> Sustainability:
        """Return whether the highest load that was found is sustained, and why.

        Any trial can show that a load is not sustained, because a queue grew in it. Only a trial
        that is longer than an ordinary one can show that a load is sustained.

        Args:
            confirmed_load: The highest load of an ordinary trial at full length that passed as a
                confirmation. None if there is none yet.
        """
        bracket = self.find_bracket()
        sustained_trial = bracket.highest_sustained
        if sustained_trial is not None and sustained_trial.length_factor > 1:
            return _describe_longer_trial(sustained_trial)
        if bracket.lowest_unsustained is not None:
            return self._explain_unsustained(bracket.lowest_unsustained)

        if sustained_trial is None:
            too_short_trials = [
                result
                for result in self._sustainability_trials()
                if self._needs_longer_trial(result)
            ]
            if too_short_trials:
                return Sustainability(None, too_short_trials[-1].sustained_reason)

        if confirmed_load is None:
            return Sustainability(None, "no load was confirmed")

        return Sustainability(None, "no trial was longer than the rules require")

    def failure_stop_reason(self) -> Literal["undecided", "unconfirmed"] | None:
        """Return the stop reason of a search that ends without a sustained load.

        `LoadSearch` calls this when no trial is left to run.

        - "undecided": a trial passed that could not show whether its load is sustained, or no trial
          at all could show it.
        - "unconfirmed": every trial failed or showed that a queue grew.
        - None: a load is sustained, or none has to be.
        """
        if not self.settings.requires_sustained or self._has_sustained_load():
            return None
        judged_trials = self._sustainability_trials()
        if not judged_trials or any(result.has_undecided_growth for result in judged_trials):
            return "undecided"
        return "unconfirmed"

    def _has_sustained_load(self) -> bool:
        """Return whether some load is known to be sustained, by a check or by an ordinary trial."""
        bracket = self.find_bracket()
        if bracket.highest_sustained is not None:
            return True
        return bracket.lowest_unsustained is None and self._is_shown_sustained(self._highest_load())

    @property
    def needed_load_s(self) -> float | None:
        """How long the load of a trial has to last to show whether it is sustained.

        It is the longest time that any trial proposed, or None if no trial proposed one.
        """
        proposed_s = [
            result.needed_load_s
            for result in self._sustainability_trials()
            if result.needed_load_s is not None and result.needed_load_s > 0
        ]
        return max(proposed_s, default=None)

    def _sustainability_trials(self) -> list[TrialResult]:
        """Return the valid trials that may show whether a load is sustained, in the order of time.

        They are the sustained-load checks and the doubtful confirmations.
        """
        return [
            result
            for result in self.results
            if result.is_valid
            and (result.is_sustain_check or self._is_doubtful_confirmation(result))
        ]

    def _is_doubtful_confirmation(self, result: TrialResult) -> bool:
        """Return whether a confirmation met the SLO without showing that its load is sustained."""
        return result.is_confirmation and result.has_passed and not self._is_sustained(result)

    def _confirmations(self) -> list[TrialResult]:
        """Return the valid ordinary trials that had to confirm a load, passed or failed."""
        return [result for result in self.results if result.is_valid and result.is_confirmation]

    def _is_sustained(self, result: TrialResult) -> bool:
        """Return whether a trial passed, and its load counts as sustained.

        By default a load counts as sustained until a trial shows growth. With `requires_sustained`
        the trial has to show that nothing grows.
        """
        if self.settings.requires_sustained:
            return result.has_passed and result.sustained is True
        return result.has_passed and not result.has_growth

    def _needs_longer_trial(self, result: TrialResult) -> bool:
        """Return whether only a longer trial could show that the load of a pass is sustained."""
        return self.settings.requires_sustained and result.has_passed and result.is_too_short

    def _extended_trial(self, result: TrialResult) -> LongerTrial | None:
        """Return a longer trial at the load of `result`, which was too short to decide.

        Return None if trials may not be extended, if `result` was as long as a trial may be, or if
        even the longest trial would be shorter than half of the needed length: it would hardly
        decide either.
        """
        needed_factor = self._needed_length_factor(result)
        is_longest = result.length_factor >= MAX_LENGTH_FACTOR
        is_out_of_reach = needed_factor / 2 > MAX_LENGTH_FACTOR
        if not self.settings.may_extend_trials or is_longest or is_out_of_reach:
            return None
        return LongerTrial(result.load, min(needed_factor, MAX_LENGTH_FACTOR))

    def _needed_length_factor(self, result: TrialResult) -> float:
        """Return how long a trial has to be to show whether the load of `result` is sustained.

        The unit is the length of an ordinary trial. `result` proposed a length, which is only an
        estimate, so a margin is added. The length at least doubles, so that a few extensions are
        enough even if each proposal is too low.
        """
        doubled_factor = 2 * result.length_factor
        if self.settings.trial_load_s is None or result.needed_load_s is None:
            return doubled_factor
        needed_s = LENGTH_MARGIN * result.needed_load_s
        needed_factor = float(math.ceil(needed_s / self.settings.trial_load_s))
        return max(doubled_factor, needed_factor)

    def _highest_load(self) -> float:
        """Return the highest load within the SLO, below any load at which a queue grew."""
        below_growing = lowest_growing_load(self.results) * (1 - self.settings.precision)
        return min(self.highest_within_slo, below_growing)

    def _next_load(self) -> float | None:
        """Return the load of the next sustained-load check, or None if there is none to try.

        The first check runs at the highest load within the SLO. If that load is not sustained, the
        load is lowered until one is. Then the gap between the two is bisected at their geometric
        mean, because loads are compared by their ratio.
        """
        bracket = self.find_bracket()
        if bracket.lowest_unsustained is None:
            return self._first_load() if bracket.highest_sustained is None else None

        unsustained_load = bracket.lowest_unsustained.load
        if bracket.highest_sustained is None:
            return self._untried_load(self._lowered_load(unsustained_load))

        sustained_load = bracket.highest_sustained.load
        if self._are_close(sustained_load, unsustained_load):
            return None

        return self._untried_load(math.sqrt(sustained_load * unsustained_load))

    def _are_close(self, lower_load: float, higher_load: float) -> bool:
        """Return whether two loads are within the precision, or neighbours of integer loads."""
        highest_close_load = lower_load * (1 + GAP_TOLERANCE * self.settings.precision)
        return higher_load <= highest_close_load + self.settings.min_load_gap

    def _first_load(self) -> float | None:
        """Return the highest load within the SLO, or None if no trial has to show it as sustained.

        The confirmation may have shown already that nothing grows at this load.
        """
        highest_load = self._highest_load()
        if self.settings.has_longer_trials or not self._is_shown_sustained(highest_load):
            return highest_load
        return None

    def _lowered_load(self, unsustained_load: float) -> float:
        """Return a lower load to try, while no load is known to be sustained.

        The load lies below the highest one within the SLO. The distance is the precision of the
        search after the first load that was not sustained, and doubles after each further one: 2 %,
        4 %, 8 % and so on. It is small at first because the highest sustained load is most often
        close, and it doubles in order to reach a distant one in a few trials.

        Args:
            unsustained_load: The lowest load so far that was not sustained. The returned load is
                always below it.
        """
        precision = self.settings.precision

        # No load is known to be sustained yet, so every load that was tried was not.
        unsustained_count = len({result.load for result in self._sustainability_trials()})
        doublings = unsustained_count - 1
        reduction = min(precision * 2.0**doublings, MAX_LOAD_REDUCTION)
        lowered_load = self._highest_load() * (1 - reduction)
        if lowered_load < unsustained_load:
            return lowered_load

        return unsustained_load * (1 - precision)

    def _is_shown_sustained(self, load: float) -> bool:
        """Return whether a load counts as sustained without a sustained-load check.

        It does if an ordinary trial at this load or a higher one showed that nothing grows, or if
        the settings do not require that a trial shows this.
        """
        if not self.settings.requires_sustained:
            return True
        return any(
            result.is_valid
            and not result.is_sustain_check
            and result.load >= load
            and self._is_sustained(result)
            for result in self.results
        )

    def _untried_load(self, load: float) -> float | None:
        """Return the load, rounded if loads are integers. Return None if it may not be tried.

        It may not if it was tried before, or is below the lowest load of the search.
        """
        if self.settings.is_integer:
            load = float(round(load))
        tried_loads = {result.load for result in self._sustainability_trials()}
        return None if load < self.settings.low or load in tried_loads else load

    def _explain_unsustained(self, unsustained: TrialResult) -> Sustainability:
        """Return why the load of a trial does not count as sustained.

        - Not known (None): the trial met the SLO, but could not show whether a queue grows, and the
          search requires a trial that shows this.
        - False: a queue grew during the trial, or the trial missed the SLO.
        """
        if self.settings.requires_sustained and unsustained.has_undecided_growth:
            return Sustainability(None, unsustained.sustained_reason)
        if unsustained.has_growth:
            return Sustainability(False, unsustained.sustained_reason)
        return Sustainability(False, unsustained.reason)


def _load_of(result: TrialResult) -> float:
    """Return the load of a trial, as the sort key of trials."""
    return result.load


def _describe_longer_trial(trial: TrialResult) -> Sustainability:
    """Return what a trial that is longer than an ordinary one showed about its load."""
    length = f"passed over {trial.length_factor:g} times the trial length"
    return Sustainability(trial.sustained, f"{length}; {trial.sustained_reason}")
