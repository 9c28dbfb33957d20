"""Which load a search tries next, and what it has found."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from synthetic_searches import add_outcome, render_confirmation, run_with_chance

from loadgen.core import seeds
from loadgen.search.goal import Outcome
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import (
    TrialResult,
    exit_code,
)
from loadgen.search.search_settings import (
    ENOUGH_TRIALS,
    MAX_CONFIRMATIONS,
    SearchSettings,
)

pytestmark = pytest.mark.commands


def test_the_result_is_precise_and_its_interval_covers_the_capacity() -> None:
    covered = near = 0
    for seed in range(30):  # more of them: benchmarks/search_truth.py coverage
        theta = 100 * 2 ** float(seeds.generator(seed, "theta").uniform(-0.8, 0.8))
        answer = run_with_chance(
            LoadSearch(SearchSettings(low=50, high=200, precision=0.01)), theta, 0.004, seed
        ).result
        assert answer.interval is not None and answer.load is not None
        covered += answer.interval.low <= theta <= answer.interval.high
        near += abs(answer.load / theta - 1) <= 0.01
        assert answer.stop_reason in ("found", "unconfirmed")
        assert answer.trial_count < 25

    assert covered >= 27
    assert near >= 27


def test_a_search_brackets_the_capacity_by_doubling_and_halving() -> None:
    up = LoadSearch(SearchSettings(low=0.1, high=1000, start=10))

    assert [add_outcome(up, outcome).load for outcome in ("under", "under", "over")] == [10, 20, 40]
    assert 20 < up.next_trial().load < 40  # type: ignore[union-attr]
    down = LoadSearch(SearchSettings(low=0.1, high=1000, start=10))
    assert [add_outcome(down, outcome).load for outcome in ("over", "over", "under")] == [
        10,
        5,
        2.5,
    ]


def test_a_search_ends_where_the_lowest_load_fails() -> None:
    search = LoadSearch(SearchSettings(low=2, high=1000, start=4))
    add_outcome(search, "over")
    add_outcome(search, "over")
    assert search.next_trial() is None
    assert (search.result.stop_reason, search.result.load) == ("none", None)


def test_a_search_ends_where_the_highest_load_passes() -> None:
    search = LoadSearch(SearchSettings(low=1, high=16, start=10))
    add_outcome(search, "under")
    add_outcome(search, "under")
    assert (search.next_trial(), search.result.stop_reason, search.result.highest_passed) == (
        None,
        "highest",
        16,
    )


@pytest.mark.parametrize(
    ("outcome", "reason", "load", "last"), [("under", "highest", 20, 20), ("over", "none", None, 5)]
)
@pytest.mark.parametrize("is_integer", [False, True])
def test_a_capacity_outside_the_bounds_has_no_interval_inside_them(
    outcome: str, reason: str, load: float | None, last: float, is_integer: bool
) -> None:
    search = LoadSearch(SearchSettings(low=5, high=20, is_integer=is_integer))
    while (trial := search.next_trial()) is not None:
        assert trial.kind != "confirm"
        add_outcome(search, outcome)
    answer = search.result
    assert (answer.stop_reason, answer.load, answer.interval) == (reason, load, None)
    assert search.results[-1].load == last and len(search.results) < 12


def test_an_invalid_trial_is_repeated_once_and_then_ends_the_search() -> None:
    search = LoadSearch(SearchSettings(low=1, high=1000, start=10))
    add_outcome(search, "under")
    disturbed, repeated_trial = add_outcome(search, "invalid"), add_outcome(search, "under")

    assert (repeated_trial.load, repeated_trial.number) == (disturbed.load, 2)

    trial_results = [
        trial_result for trial_result in search.results if trial_result.outcome != "invalid"
    ]  # what a search that is resumed begins with

    assert (
        LoadSearch(SearchSettings(low=1, high=1000, start=10), trial_results).next_trial()
        == search.next_trial()
    )
    assert (add_outcome(search, "invalid").load, add_outcome(search, "invalid").load) == (40, 40)
    assert (search.next_trial(), search.result.stop_reason, search.result.highest_passed) == (
        None,
        "invalid",
        20,
    )


def test_an_unknown_capacity_differs_from_no_capacity() -> None:
    texts = {}
    for outcome in ("over", "invalid"):
        search = LoadSearch(SearchSettings(low=5, high=10, start=5))
        while search.next_trial() is not None:
            add_outcome(search, outcome)
        lines = render_confirmation(search.result, search.results).splitlines()
        texts[outcome] = next(line for line in lines if line.startswith("Capacity "))
    assert texts == {"over": "Capacity   none", "invalid": "Capacity   not known"}


def test_after_many_trials_a_load_is_confirmed_with_less_precision() -> None:
    """A server whose limit varies by 4 % from trial to trial: 2 % are not reached."""
    random, search = Random(3), LoadSearch(SearchSettings(low=0.1, high=64.0, start=1.0))
    while (trial := search.next_trial()) is not None:
        outcome: Outcome = "under" if trial.load < random.gauss(10.0, 0.4) else "over"
        early = outcome == "under" and trial.may_pass_early
        search.add_result(
            TrialResult(
                trial=trial,
                outcome=outcome,
                ended_early=early,
                duration_s=60.0,
                offered_load=trial.load,
                sampling_noise=0.03,
            )
        )
    kinds = [result.kind for result in search.results]

    assert "confirm" not in kinds[:ENOUGH_TRIALS] and kinds[ENOUGH_TRIALS] == "confirm"
    assert (
        search.result.stop_reason == "coarse"
        and len(search.results) <= ENOUGH_TRIALS + MAX_CONFIRMATIONS
    )
    assert search.result.confirmed_load is not None and exit_code(search.result) == 0


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_trials": 2}, "probes"), ({"max_time_s": 150.0}, "time")]
)
def test_a_search_ends_at_its_limit_of_trials_or_time(limits: dict[str, Any], reason: str) -> None:
    search = LoadSearch(SearchSettings(low=1, high=1000, start=10, **limits))
    add_outcome(search, "under")
    add_outcome(search, "over")
    assert (search.next_trial(), search.result.stop_reason) == (None, reason)
    assert search.result.interval is not None


def test_a_trial_near_a_failed_load_cannot_pass_early() -> None:
    search = LoadSearch(SearchSettings(low=80, high=120, precision=0.03))
    add_outcome(search, "over")
    trial = search.next_trial()
    assert trial is not None
    assert trial.may_pass_early == (trial.load * 1.03 <= 98)


def test_numbers_of_virtual_users_are_integers() -> None:
    search = LoadSearch(SearchSettings(low=1, high=512, start=8, is_integer=True, precision=0.02))
    while (trial := search.next_trial()) is not None:
        assert trial.load == int(trial.load)
        add_outcome(search, "under" if trial.load <= 37 else "over")
    assert search.result.confirmed_load in (36, 37)


def test_a_resumed_search_continues_with_the_same_trial() -> None:
    load_search = run_with_chance(LoadSearch(SearchSettings(low=50, high=200)), 90, 0.004, 5)
    half = LoadSearch(SearchSettings(low=50, high=200), load_search.results[:4])
    assert half.next_trial() == load_search.results[4].trial
