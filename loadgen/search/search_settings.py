"""The settings of a search, as `search.json` stores them, and the constants of its method."""

from __future__ import annotations

import msgspec

DEFAULT_PRECISION = 0.02
DEFAULT_MAX_TRIALS = 40
PRECISION_CONFIDENCE = 0.90
"""The probability that the capacity lies within the precision, before a load is confirmed."""
INTERVAL_CONFIDENCE = 0.95
"""The probability that the reported interval covers the capacity."""
BRACKET_STEP = 2.0
"""The factor between loads while no load has passed, or none has failed."""
ESTIMATE_STEP = 1.2
"""The same around a first load that is an estimate: the capacity most often lies within it."""
CONFIRMATION_PROBABILITY = 0.80
"""A confirmation runs at the load that passes with this probability."""
ENOUGH_TRIALS = 24
"""After so many trials a load is confirmed, even if the interval is wider than requested."""
MAX_CONFIRMATIONS = 4
"""Failed confirmations after which the search ends."""
FULL_LENGTH_LAPSE = 0.01
"""The probability that the outcome of a full-length trial says nothing about its load."""
EARLY_PASS_LAPSE = 0.05
"""The same for a trial that passed before its full length."""
SIGMA_PER_NOISE = 1.5
"""The expected sigma in units of 1 / sqrt(n): lengths and their order add to the noise of arrivals.
"""
DEFAULT_SIGMA = 0.01
"""The expected sigma before a trial shows how many requests it has."""
MAX_SUSTAIN_TRIALS = 10
"""Trials that look for the highest sustained load."""
MAX_LENGTH_FACTOR = 8.0
"""The longest trial to which a search extends itself, in full lengths."""


class SearchSettings(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "max_trials": "most_probes",
        "max_time_s": "most_s",
        "is_integer": "whole",
        "sustain_length_factor": "longer",
        "stop_reason": "stopped",
        "real_trial_s": "trial_s",
        "first_step": "step",
        "requires_sustained": "requires_steady",
        "may_extend_trials": "may_extend",
        "trial_load_s": "load_s",
    },
):
    """What determines the result of a search, apart from the results of its trials.

    Attributes:
        low: The lowest load to try, as a rate per second or a number of virtual users.
        high: The highest load to try.
        start: The first load. None if `low` and `high` enclose the capacity: then the search begins
            at their geometric mean.
        precision: The relative precision of the result.
        max_trials: The largest number of trials, without those of the highest sustained load.
        max_time_s: The longest time that all trials may take together. None without a limit.
        is_integer: Whether loads are whole numbers, as numbers of virtual users are.
        sustain_length_factor: The duration of the trials that show that a load is sustained, in
            full lengths of a trial; 1 without such trials.
        run_spread: The variation of the server from run to run, as a share. None if it has to be
            learned from the trials.
        stop_reason: Why the search was stopped; see `SearchResult.stop_reason`.
        real_trial_s: The full length of a trial on a real server. None for a server that does not
            change over time, such as a simulation.
        first_step: The factor between the first two loads. The later ones grow to BRACKET_STEP
            until both a load that passes and one that fails are known.
        requires_sustained: Whether a load is only confirmed by a trial that showed that nothing
            grows. False if the SLO alone decides, as by the rules of MLPerf, and as is enough for a
            closed loop, in which requests cannot pile up.
        may_extend_trials: Whether a confirmation that cannot show whether its load is sustained is
            repeated for as long as that takes.
        trial_load_s: The full length of the load of a trial. None if it is not known.
        warmup_s: The length of the warm-up before each trial, in which the load rises to the
            highest one that has passed; 0 if the trials start with an empty server.
    """

    low: float
    high: float
    start: float | None = None
    precision: float = DEFAULT_PRECISION
    max_trials: int = DEFAULT_MAX_TRIALS
    max_time_s: float | None = None
    is_integer: bool = False
    sustain_length_factor: float = 1.0
    run_spread: float | None = 0.0
    stop_reason: str = ""
    real_trial_s: float | None = None
    first_step: float = BRACKET_STEP
    requires_sustained: bool = False
    may_extend_trials: bool = True
    trial_load_s: float | None = None
    warmup_s: float = 0.0

    @property
    def min_load_gap(self) -> float:
        """Loads that are no further apart than this are not told apart: neighbours, if integers."""
        return 1.5 if self.is_integer else 0.0

    @property
    def has_longer_trials(self) -> bool:
        """Whether trials longer than the ordinary ones show that a load is sustained."""
        return self.sustain_length_factor > 1
