"""How many trials a search still needs, and how long they take."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from synthetic_searches import add_outcome

from loadgen.search.forecast import describe_forecast, forecast_search
from loadgen.search.load_search import LoadSearch
from loadgen.search.progress_estimate import MEAN_LOWERING_TRIALS, estimate_trials_left
from loadgen.search.search_settings import (
    ENOUGH_TRIALS,
    ESTIMATE_STEP,
    SearchSettings,
)

pytestmark = pytest.mark.commands


def forecast_text(
    search: LoadSearch, trial_s: float, *, virtual: bool, runs_to_end: bool = False
) -> str:
    """Return the forecast of a search as text, or "" if nothing is left of it."""
    forecast = forecast_search(search, trial_s, runs_to_end=runs_to_end)
    return "" if forecast is None else describe_forecast(forecast, virtual=virtual)


def test_trials_with_few_requests_need_more_trials() -> None:
    """Chance varies one late task of 540 by more than the precision, so all trials are used."""
    agents, chat = (
        LoadSearch(SearchSettings(low=1e-3, high=1e6, start=start, first_step=ESTIMATE_STEP))
        for start in (0.9, 100.0)
    )

    assert (
        estimate_trials_left(agents, trial_s=600).trials
        >= ENOUGH_TRIALS
        > 2 * estimate_trials_left(chat, trial_s=600).trials
    )
    assert estimate_trials_left(agents).trials == estimate_trials_left(chat).trials


def test_a_forecast_states_trials_and_time() -> None:
    search = LoadSearch(SearchSettings(low=1, high=1000, start=1, sustain_length_factor=2))
    forecast = forecast_text(search, 600, virtual=True)

    assert forecast.startswith("27 trials, 3 h 36 min ")
    assert forecast.endswith("(at most 50 trials, 10 h 00 min)")
    assert "4 h 48 min" in forecast_text(search, 600, virtual=True, runs_to_end=True)

    real = forecast_text(
        LoadSearch(SearchSettings(low=1, high=1000, start=1, run_spread=None)), 600, virtual=False
    )

    assert real.startswith("24 trials, 2 h 51 min of load ")
    assert real.endswith("(at most 40 trials, 6 h 40 min)")
    short = LoadSearch(SearchSettings(low=1, high=1000, start=1, max_time_s=1800))
    assert forecast_text(short, 600, virtual=False) == "at most 30 min 00 s"
    add_outcome(search, "under")
    assert forecast_text(search, 600, virtual=True).startswith("12 trials")
    search.settings = replace(search.settings, max_trials=1)
    assert forecast_text(search, 600, virtual=True) == ""


def test_the_trials_left_include_those_at_lower_loads() -> None:
    """A growing queue in a search without longer trials once caused a division by zero."""
    search = LoadSearch(SearchSettings(low=1, high=1000, start=50))
    while (trial := search.next_trial()) is not None and trial.kind != "sustain":
        add_outcome(search, "under" if trial.load < 100 else "over", sustained=False)

    assert trial is not None and not search.settings.has_longer_trials
    expected = estimate_trials_left(search)
    assert (expected.trials, expected.full_length_trials) == (
        MEAN_LOWERING_TRIALS,
        MEAN_LOWERING_TRIALS,
    )


@pytest.mark.parametrize(
    "limits",
    [
        {
            "start": 28.0,
            "first_step": ESTIMATE_STEP,
            "sustain_length_factor": 2.0,
        },  # a simulated target
        {"start": 1.0, "sustain_length_factor": 2.0},
        {"start": None, "low": 10.0, "high": 100.0},
        {"start": 1.0, "run_spread": None},  # a real server
        {"start": 1.0, "run_spread": 0.02},
    ],
)
def test_estimates_of_the_trials_left_are_within_a_factor_of_two(limits: dict[str, Any]) -> None:
    """At each point: before the first trial always, later of most."""
    within = []
    for seed, true_load in enumerate((22.0, 31.0)):
        chance = Random(seed)
        search = LoadSearch(SearchSettings(**{"low": 1e-3, "high": 1e6, **limits}))
        spread = 0.015 if search.settings.run_spread is None else search.settings.run_spread
        foretold = []
        while (trial := search.next_trial()) is not None:
            foretold.append(estimate_trials_left(search))
            passes = trial.load <= true_load * math.exp(chance.gauss(0, math.hypot(spread, 0.005)))
            early = not passes or trial.may_pass_early
            spent_s = 600 * trial.length_factor * (0.6 if early else 1.05)
            add_outcome(
                search,
                "under" if passes else "over",
                ended_early=early,
                duration_s=spent_s,
                sustained=True,
            )
        assert search.result.stop_reason in ("found", "coarse")
        for number, trial_effort in enumerate(foretold):
            lengths = sum(result.duration_s for result in search.results[number:]) / 600
            ratios = (
                trial_effort.trials / (len(foretold) - number),
                trial_effort.full_length_trials / lengths,
            )
            within.append(all(0.5 <= ratio <= 2 for ratio in ratios))
            assert number or within[-1], (ratios, limits)

    assert sum(within) >= 0.85 * len(within), (within, limits)


def test_estimates_of_longer_trials_follow_from_those_that_failed() -> None:
    """`search agentic`: five longer trials, told as one and a half before each of them."""
    search, holds = (
        LoadSearch(
            SearchSettings(
                low=1e-3, high=1e6, start=12.64, first_step=ESTIMATE_STEP, sustain_length_factor=2.0
            )
        ),
        11.9,
    )
    foretold = []
    while (trial := search.next_trial()) is not None:
        if trial.kind in ("confirm", "sustain"):
            expected = estimate_trials_left(search)
            foretold.append((search.results[-1].number, expected.full_length_trials))
        passes = trial.load <= (holds if trial.kind == "sustain" else 12.8)
        add_outcome(search, "under" if passes else "over", sustained=True)
    left = [
        sum(trial_result.length_factor for trial_result in search.results[number + 1 :])
        for number, _ in foretold
    ]

    assert len(left) >= 5 and left[0] >= 9, "one confirmation, and longer ones at ever lower loads"
    ratios = [there / estimate for there, (_, estimate) in zip(left, foretold, strict=True)]
    assert all(0.5 <= ratio <= 2 for ratio in ratios[2:]), "from the first that failed on"


def test_a_first_load_far_from_the_capacity_is_bracketed_in_few_trials() -> None:
    """Steps grow while all loads held, or all missed: one three times too high took seven."""
    for true_load, most in ((33.0, 5), (300.0, 5), (95.0, 2)):
        search = LoadSearch(
            SearchSettings(low=1e-3, high=1e6, start=100.0, first_step=ESTIMATE_STEP)
        )
        while (trial := search.next_trial()) is not None and trial.kind == "bracket":
            add_outcome(search, "under" if trial.load < true_load else "over")
        assert len(search.results) <= most, (
            true_load,
            [trial_result.load for trial_result in search.results],
        )
