"""The trials of a search, their results, and what the search found, as they are stored as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from loadgen.core.errors import INTERRUPTED, OK, SLO_MISSED, UNSOUND
from loadgen.core.stats.intervals import Interval
from loadgen.repeated.capacity import State
from loadgen.search.goal import FAILED, INVALID, PASSED, Outcome

TrialKind = Literal["bracket", "probe", "confirm", "sustain", "level"]
"""Why a load is tried.

- bracket: to find one load that passes and one that fails.
- probe: to narrow the interval between them.
- confirm: to confirm the load at full length.
- sustain: as confirm, usually longer, to show that nothing grows.
- level: because it is a load point of a sweep.
"""
CONFIRMING_KINDS = ("confirm", "sustain")
"""The kinds of trials that always run at full length and confirm a load."""

PASSED_ONLY: Final = "held"
"""The state of a capacity whose run met the SLO but was not confirmed, as result files store it."""

RunSpreadSource = Literal["", "told", "learned", "simulated"]


class PlannedTrial(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"may_pass_early": "early_under", "length_factor": "lengths"},
):
    """A load that is to be tried.

    Attributes:
        number: The number of the trial, from 0.
        load: The rate per second, or the number of virtual users.
        kind: Why the load is tried.
        may_pass_early: Whether the trial may end as passed before its full length.
        length_factor: The duration, as a multiple of the full length of a trial.
        warmup_load: The load to which the warm-up before the trial rises. None without a warm-up.
    """

    number: int
    load: float
    kind: TrialKind
    may_pass_early: bool
    length_factor: float = 1.0
    warmup_load: float | None = None

    @property
    def is_load_point(self) -> bool:
        """Whether it is a load point of a sweep, and not a trial of a search."""
        return self.kind == "level"


class TrialResult(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "trial": "ask",
        "ended_early": "early",
        "duration_s": "spent_s",
        "offered_load": "offered",
        "sampling_noise": "noise",
        "reason": "why",
        "reason_code": "code",
        "run_name": "folder",
        "metrics": "figures",
        "sustained_reason": "sustained_why",
        "needed_load_s": "needed_s",
    },
):
    """The result of a trial.

    Attributes:
        trial: What was tried.
        outcome: "under" if it passed, "over" if it failed, "invalid" if it says nothing.
        ended_early: Whether the outcome was decided before the full length.
        duration_s: How long the trial took, with the time of the last responses.
        offered_load: The load that the arrivals of this trial offered until it was decided. It
            differs by chance from the requested load, so the outcome counts at this load.
        sampling_noise: How much the outcome varies by chance because the requests of a trial are
            a sample: 1 / sqrt(n) for the n requests of a full-length trial.
        reason: Why the trial has this outcome, as text.
        reason_code: The same for programs, for example "misses", "steady" or "refused".
        run_name: The name of the directory of the run.
        metrics: The metrics of the run by name.
        sustained: Whether the load was sustained. None if it is not known, as of every trial that
            ended early.
        sustained_reason: Why it is known to be sustained or not, or why it is not known.
        needed_load_s: How long the load would have to last to show whether it is sustained.
    """

    trial: PlannedTrial
    outcome: Outcome
    ended_early: bool
    duration_s: float
    offered_load: float
    sampling_noise: float
    reason: str = ""
    reason_code: str = ""
    run_name: str = ""
    metrics: dict[str, float | None] = {}
    sustained: bool | None = None
    sustained_reason: str = ""
    needed_load_s: float | None = None

    @property
    def number(self) -> int:
        """The number of the trial, from 0."""
        return self.trial.number

    @property
    def load(self) -> float:
        """The requested load."""
        return self.trial.load

    @property
    def kind(self) -> TrialKind:
        """Why the load was tried."""
        return self.trial.kind

    @property
    def length_factor(self) -> float:
        """The duration of the trial, as a multiple of its full length."""
        return self.trial.length_factor

    @property
    def is_load_point(self) -> bool:
        """Whether it is a load point of a sweep, and not a trial of a search."""
        return self.trial.is_load_point

    @property
    def is_confirmation(self) -> bool:
        """Whether it is an ordinary trial at full length that has to confirm the capacity."""
        return self.kind == "confirm"

    @property
    def is_sustain_check(self) -> bool:
        """Whether it has to show that its load is sustained, for which it is usually longer."""
        return self.kind == "sustain"

    @property
    def is_confirming(self) -> bool:
        """Whether it is a confirmation or a sustained-load check."""
        return self.kind in CONFIRMING_KINDS

    @property
    def is_valid(self) -> bool:
        """Whether the outcome says something about the load."""
        return self.outcome != INVALID

    @property
    def has_passed(self) -> bool:
        """Whether the trial met the SLO."""
        return self.outcome == PASSED

    @property
    def has_failed(self) -> bool:
        """Whether the trial missed the SLO."""
        return self.outcome == FAILED

    @property
    def has_growth(self) -> bool:
        """Whether a queue grew during the trial, so that its load is not sustained."""
        return self.sustained is False

    @property
    def has_undecided_growth(self) -> bool:
        """Whether the trial met the SLO, but could not show whether a queue grows."""
        return self.has_passed and self.sustained is None

    @property
    def is_too_short(self) -> bool:
        """Whether the trial could not show if its load is sustained, but a longer one could."""
        return self.sustained is None and self.needed_load_s is not None


class SearchResult(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "confirmed_load": "confirmed",
        "highest_passed": "held",
        "lowest_failed": "missed",
        "stop_reason": "reason",
        "trial_count": "probes",
        "duration_s": "spent_s",
        "confirmation_s": "confirming_s",
        "sustained_reason": "sustained_why",
        "sustained_load": "steady",
        "unsustained_load": "not_steady",
        "length_factor": "lengths",
        "sustained_for_s": "steady_s",
        "needed_load_s": "needed_s",
        "run_spread_source": "run_spread_from",
    },
):
    """What a search has found so far.

    Attributes:
        load: The load that half of all full-length runs pass, or while no load has failed the
            highest one that passed. None if nothing is known yet, or even the lowest load failed.
        interval: The credible interval of `load`.
        confirmed_load: The highest load of a confirmation that passed.
        highest_passed: The highest load of a trial that passed.
        lowest_failed: The lowest load of a trial that failed.
        stop_reason: Why the search ended, "" while it goes on. "found": precise and confirmed;
            "coarse": confirmed, but less precise than requested; "none": even the lowest load
            failed; "highest": the highest allowed load passed; "unconfirmed": the confirmations
            failed; "undecided": loads met the SLO, but no trial could show whether they are
            sustained. The search was stopped for "probes" (number of trials), "time", "invalid"
            (two invalid trials in a row), "refused" (a quota or rate limit), "gone" (no endpoint
            left), "nodes" (no load generator left) or "interrupted".
        trial_count: The number of trials.
        duration_s: How long the trials took together.
        confirmation_s: The part of `duration_s` that was spent on confirmations and sustained-load
            checks.
        sustained: Whether `sustained_load` was shown to be sustained over `length_factor` lengths
            of a trial. None if it is not known.
        sustained_reason: Why it is known to be sustained or not, or why it is not known.
        sustained_load: The highest load that passed without growth.
        unsustained_load: The lowest load that passed and grew, or that failed in a longer trial.
        length_factor: The duration of the trials behind `sustained_load`, in lengths of a trial.
        sustained_for_s: How long the load of the trial behind `sustained_load` lasted.
        needed_load_s: How long a trial has to be to decide an "undecided" search.
        horizon_s: `interval` covers changes of the server that recur within this time. None if the
            server does not change.
        run_spread: The variation from run to run that `interval` includes, as a share.
        run_spread_source: How it is known: "told" by the user, "learned" from the trials, or
            "simulated" for a simulation, which does not vary.
        warmup_s: The length of the warm-up before each trial; 0 if the trials start with an empty
            server.
    """

    load: float | None
    interval: Interval | None
    confirmed_load: float | None
    highest_passed: float | None
    lowest_failed: float | None
    stop_reason: str
    trial_count: int
    duration_s: float
    confirmation_s: float
    sustained: bool | None = None
    sustained_reason: str = ""
    sustained_load: float | None = None
    unsustained_load: float | None = None
    length_factor: float = 1.0
    sustained_for_s: float | None = None
    needed_load_s: float | None = None
    horizon_s: float | None = None
    run_spread: float | None = None
    run_spread_source: RunSpreadSource = ""
    warmup_s: float = 0.0

    @property
    def is_lower_bound(self) -> bool:
        """Whether the highest allowed load passed, so that the capacity may be higher."""
        return self.stop_reason == "highest" and self.lowest_failed is None

    @property
    def is_by_rules_only(self) -> bool:
        """Whether a load was confirmed by the SLO, but not shown to be sustained."""
        return self.confirmed_load is not None and self.sustained is not True

    @property
    def has_ended(self) -> bool:
        """Whether the search ended by its own rules, rather than being stopped before."""
        return self.stop_reason in ENDED


CONFIRMED_STOPS = ("found", "coarse")
"""The stop reasons of searches that confirmed a load."""
ENDED = (*CONFIRMED_STOPS, "highest", "none", "unconfirmed", "undecided")
"""The stop reasons of searches that ended by their own rules, rather than being stopped before."""
UNSOUND_STOPS = ("invalid", "refused", "gone", "nodes", "probes", "time")
"""The stop reasons for which a search exits as unsound."""


def exit_code(result: SearchResult) -> int:
    """Return the exit code of a search.

    - OK (0): a load was found.
    - UNSOUND (3): the search was stopped without a sound result.
    - INTERRUPTED (130): the user interrupted it.
    - SLO_MISSED (1): no load meets the SLO, or none could be confirmed.
    """
    if result.stop_reason in (*CONFIRMED_STOPS, "highest"):
        return OK
    if result.stop_reason in UNSOUND_STOPS:
        return UNSOUND
    return INTERRUPTED if result.stop_reason == "interrupted" else SLO_MISSED


def lowest_growing_load(results: Iterable[TrialResult]) -> float:
    """Return the lowest load at which a queue grew during a valid trial.

    Return infinity if there is none, so that every load is below the returned one.
    """
    growing = [result.load for result in results if result.is_valid and result.has_growth]
    return min(growing, default=math.inf)


def lowest_load_failed_longer(results: Iterable[TrialResult]) -> float:
    """Return the lowest load that failed in a sustained-load check, a trial longer than usual.

    Return infinity if none failed, so that every load is below the returned one.
    """
    failed = [result.load for result in results if result.is_sustain_check and result.has_failed]
    return min(failed, default=math.inf)


def _uncontradicted_full_passes(results: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials that passed at full length and that no other trial contradicts.

    A pass is contradicted if a queue grew at its load or at a lower one. The pass of an ordinary
    trial is also contradicted if a longer trial failed at its load or at a lower one.
    """
    growing_load = lowest_growing_load(results)
    load_failed_longer = lowest_load_failed_longer(results)
    passes = [result for result in results if result.has_passed and not result.ended_early]

    return [
        result
        for result in passes
        if result.load < growing_load
        and (result.is_sustain_check or result.load < load_failed_longer)
    ]


def find_higher_pass(load: float, results: Sequence[TrialResult]) -> float | None:
    """Return the highest load above a capacity that passed a trial, or None if there is none.

    A search confirms a load that passes nearly every time, and a higher one may pass by chance.
    Loads that another trial contradicts are left out, because a queue grew there.

    Args:
        load: The capacity that the search found.
        results: The results of its trials.
    """
    contradicted_load = min(lowest_growing_load(results), lowest_load_failed_longer(results))
    higher_passes = [
        result.load
        for result in results
        if result.has_passed and load < result.load < contradicted_load
    ]
    return max(higher_passes, default=None)


def find_best_trial(results: Sequence[TrialResult]) -> TrialResult | None:
    """Return the trial that shows the capacity best, or None if no trial does."""
    return max(_uncontradicted_full_passes(results), key=_rank_evidence, default=None)


def _rank_evidence(result: TrialResult) -> tuple[bool, bool, bool, float]:
    """Return a sort key for trials that passed, from the weakest evidence to the strongest.

    The criteria, the most important one first: the trial showed that nothing grows; it is longer
    than usual; it is a confirmation; its load is high.
    """
    has_shown_no_growth = result.is_confirming and result.sustained is True
    return has_shown_no_growth, result.is_sustain_check, result.is_confirming, result.load


def find_capacity_trial(result: SearchResult, trials: Sequence[TrialResult]) -> TrialResult | None:
    """Return the trial whose load is the capacity of a search, or a lower bound of it.

    - A search that came to its end (`result.has_ended`): the best trial. If even this one was too
      short to show whether its load is sustained, `result` states that this is not known.
    - A search that was stopped before: the best trial only if it was long enough. In a short trial
      a queue that grows slowly does not break the SLO yet, so that the load may be above the
      capacity. Instead of such a trial, the highest load of a long enough one is returned.

    Return None if there is no such trial.
    """
    best_trial = find_best_trial(trials)
    if best_trial is None or result.has_ended or not best_trial.is_too_short:
        return best_trial
    passed_trials = _uncontradicted_full_passes(trials)
    long_enough_trials = [trial for trial in passed_trials if not trial.is_too_short]
    return max(long_enough_trials, key=lambda trial: trial.load, default=None)


class LoadInterval(NamedTuple):
    """The lowest and the highest load that the capacity may have."""

    low: float
    high: float


def capacity_interval(load: float, result: SearchResult) -> LoadInterval | None:
    """Return the interval of the capacity: that of the search, widened to include `load`.

    A load that was not sustained bounds it from above. Return None if the search has no interval.
    """
    if result.interval is None:
        return None
    high = result.interval.high
    if result.unsustained_load is not None:
        high = min(high, result.unsustained_load)
    return LoadInterval(min(result.interval.low, load), max(high, load))


class CapacityEvidence(NamedTuple):
    """What the trial that shows a capacity has shown.

    Attributes:
        is_confirming: Whether the trial was a confirmation or a sustained-load check.
        sustained: Whether it showed that its load is sustained. None if it did not decide this.
    """

    is_confirming: bool
    sustained: bool | None

    @property
    def state_if_confirmed(self) -> State:
        """The state of a capacity that was confirmed by this evidence."""
        return "sustained" if self.sustained else "confirmed"


def capacity_state(result: SearchResult, evidence: CapacityEvidence | None) -> State:
    """Return how certain the capacity of a search is, for `capacity.json` and the report.

    `capacity.State` defines the states, such as "sustained", "confirmed" and "stopped".

    Args:
        result: What the search found.
        evidence: What the trial that shows the capacity has shown. None if there is no such trial.
    """
    if evidence is None:
        return "none" if result.has_ended else "stopped"
    if result.has_ended:
        return _state_of_ended_search(result, evidence)
    return _state_of_stopped_search(result, evidence)


def _state_of_ended_search(result: SearchResult, evidence: CapacityEvidence) -> State:
    """Return the state of the capacity of a search that came to its end."""
    if result.stop_reason == "undecided":
        # No trial could show whether its load is sustained.
        return PASSED_ONLY
    if evidence.is_confirming:
        return evidence.state_if_confirmed
    if result.stop_reason == "highest":
        # The highest allowed load needs no confirmation, because no search looks beyond it.
        return evidence.state_if_confirmed
    if result.stop_reason in CONFIRMED_STOPS:
        # Another trial contradicted the confirmation, but a lower load passed.
        return PASSED_ONLY

    return "none"


def _state_of_stopped_search(result: SearchResult, evidence: CapacityEvidence) -> State:
    """Return the state of the capacity of a search that was stopped before its end.

    A confirmation counts, unless a longer trial was still needed to show that its load is
    sustained.
    """
    is_longer_trial_missing = _needs_longer_trial(result) and not evidence.sustained
    if evidence.is_confirming and not is_longer_trial_missing:
        return evidence.state_if_confirmed
    return "stopped"


def _needs_longer_trial(result: SearchResult) -> bool:
    """Return whether a search only ends after a trial that is longer than an ordinary one."""
    return result.length_factor > 1 or result.needed_load_s is not None


class StatedCapacity(NamedTuple):
    """The capacity that a search found, and how certain it is.

    The load is None if no trial shows a capacity. `capacity.State` defines the states.
    """

    load: float | None
    state: State


def capacity_and_state(result: SearchResult, trials: Sequence[TrialResult]) -> StatedCapacity:
    """Return the capacity that a search found, as a load, and how certain it is.

    The load is that of a trial, for example (29.82, "sustained"). The text, the page and
    `capacity.json` all state these two.
    """
    capacity_trial = find_capacity_trial(result, trials)
    has_load = result.load is not None and result.stop_reason != "unconfirmed"
    if capacity_trial is None or not has_load:
        return StatedCapacity(None, capacity_state(result, evidence=None))
    evidence = _evidence_of(capacity_trial, result)
    return StatedCapacity(capacity_trial.load, capacity_state(result, evidence))


def _evidence_of(capacity_trial: TrialResult, result: SearchResult) -> CapacityEvidence:
    """Return what the trial at the capacity shows about its load.

    Only a sustained-load check, which is longer than other trials, can show that its load is
    sustained.
    """
    sustained = result.sustained if capacity_trial.is_sustain_check else None
    return CapacityEvidence(capacity_trial.is_confirming, sustained)
