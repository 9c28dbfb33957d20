"""What a search may confirm: no load that the server does not sustain, and none that is unknown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import pytest
from command_line import exits

from loadgen.repeated.capacity import Capacity, State
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import (
    PlannedTrial,
    TrialResult,
    capacity_and_state,
    exit_code,
    find_best_trial,
)
from loadgen.search.search_settings import MAX_LENGTH_FACTOR, SearchSettings

pytestmark = pytest.mark.commands

ONE_REPLICA = "extends: gb300-vm\nvms: 1\ngpus_per_vm: 1\n"
DECODE = """
name: decode
requests: {input_tokens: 1302, output_tokens: 1200}
stages:
  - {name: warm, arrival: {poisson: 1/s}, duration: 60s, warmup: true}
  - {name: load, arrival: {poisson: 1/s}, duration: 600s}
slo: {tpot: 200ms, at: p95}
"""


def trial_result(
    trial: PlannedTrial,
    outcome: Literal["under", "over", "invalid"],
    *,
    sustained: bool | None = None,
    needed_load_s: float | None = None,
) -> TrialResult:
    return TrialResult(
        trial=trial,
        outcome=outcome,
        ended_early=False,
        duration_s=600 * trial.length_factor,
        offered_load=trial.load,
        sampling_noise=0.003,
        sustained=sustained,
        sustained_reason="too short" if needed_load_s else "may grow" if sustained is None else "",
        needed_load_s=needed_load_s,
    )


def steady_search(
    *, sustain_length_factor: float = 1.0, may_extend_trials: bool = True
) -> LoadSearch:
    return LoadSearch(
        SearchSettings(
            low=1,
            high=1000,
            start=50,
            precision=0.02,
            requires_sustained=True,
            sustain_length_factor=sustain_length_factor,
            may_extend_trials=may_extend_trials,
            trial_load_s=600,
        )
    )


def run_search(search: LoadSearch, server: object) -> LoadSearch:
    """Run a search against a function from a trial to its result."""
    assert callable(server)
    while (trial := search.next_trial()) is not None:
        search.add_result(server(trial))
    return search


def test_an_overload_is_not_a_capacity_if_no_objective_limits_the_wait(
    tmp_path: Path,
) -> None:
    """The SLO has no TTFT objective. The search confirmed 69.7/s, where 8.1/s is sustained."""
    (tmp_path / "one.yaml").write_text(ONE_REPLICA)
    (tmp_path / "decode.yaml").write_text(DECODE)
    folder = tmp_path / "search"
    options = ["--url", f"sim:{tmp_path / 'one.yaml'}", "--seed", "305", "--timeout", "3600s"]

    assert exits("search", str(tmp_path / "decode.yaml"), *options, "--out", str(folder)) == 0
    capacity = json.loads((folder / "capacity.json").read_text())
    assert capacity["state"] == "sustained"
    assert capacity["sustained_s"] == 1200, "nothing grew within twice the length of a trial"
    assert 0.9 * 8.1 < capacity["rate_per_s"] < 1.05 * 8.1
    trials = [json.loads(line) for line in (folder / "probes.jsonl").read_text().splitlines()]
    assert any(trial["code"] == "not_sustained" for trial in trials)


def test_a_load_above_one_whose_queue_grew_is_never_the_capacity() -> None:
    """A trial at 90/s grows. Later trials up to 100/s pass, and do not count."""

    def server(trial: PlannedTrial) -> TrialResult:
        if trial.load > 100:
            return trial_result(trial, "over")
        grows = (
            trial.kind == "confirm"
            and trial.load > 90
            and not any(result.sustained is False for result in search.results)
        )
        return trial_result(trial, "over" if grows else "under", sustained=not grows)

    search = steady_search()
    run_search(search, server)
    growing = min(result.load for result in search.results if result.sustained is False)
    load, state = capacity_and_state(search.result, search.results)
    assert state == "confirmed" and load is not None and load < growing
    best = find_best_trial(search.results)
    assert best is not None and best.load == load


def test_a_load_is_not_confirmed_while_growth_is_unknown() -> None:
    def server(trial: PlannedTrial) -> TrialResult:
        return trial_result(trial, "under" if trial.load < 100 else "over")

    search = run_search(steady_search(), server)
    assert search.result.stop_reason == "undecided"
    assert exit_code(search.result) == 1
    assert capacity_and_state(search.result, search.results)[1] == "held"
    assert (search.result.sustained, search.result.sustained_reason) == (None, "may grow")
    unconditional = LoadSearch(SearchSettings(low=1, high=1000, start=50, precision=0.02))
    assert run_search(unconditional, server).result.stop_reason == "found", (
        "by MLPerf's rules it counts"
    )


@pytest.mark.parametrize("longer", [1.0, 2.0])
def test_a_confirmation_that_is_too_short_is_repeated_for_as_long_as_needed(longer: float) -> None:
    """Requests last so long that 1,500 s of load show whether it is sustained."""

    def server(trial: PlannedTrial) -> TrialResult:
        outcome: Literal["under", "over"] = "under" if trial.load < 100 else "over"
        is_known = 600 * trial.length_factor >= 1500
        return trial_result(
            trial,
            outcome,
            sustained=True if is_known else None,
            needed_load_s=None if is_known else 1500,
        )

    search = run_search(steady_search(sustain_length_factor=longer), server)
    answer = search.result
    longer_trials = [result.trial for result in search.results if result.kind == "sustain"]
    assert [planned_trial.length_factor for planned_trial in longer_trials] == [3.0]
    assert (answer.stop_reason, answer.sustained, answer.sustained_load) == (
        "found",
        True,
        answer.confirmed_load,
    )
    assert answer.unsustained_load is None
    assert capacity_and_state(answer, search.results) == (longer_trials[0].load, "sustained")


def test_without_longer_trials_a_load_stays_undecided_if_its_trial_is_too_short() -> None:
    def server(trial: PlannedTrial) -> TrialResult:
        return trial_result(trial, "under" if trial.load < 100 else "over", needed_load_s=1500)

    search = run_search(steady_search(may_extend_trials=False), server)
    assert search.result.stop_reason == "undecided"
    assert search.result.needed_load_s == 1500
    assert (search.result.sustained, search.result.sustained_reason) == (None, "too short")
    assert not any(result.kind == "sustain" for result in search.results)


def test_a_search_extends_its_trials_to_a_limit() -> None:
    def server(trial: PlannedTrial) -> TrialResult:
        needed_s = 2000 * trial.length_factor
        return trial_result(trial, "under" if trial.load < 100 else "over", needed_load_s=needed_s)

    search = run_search(steady_search(sustain_length_factor=2.0), server)
    assert search.result.stop_reason == "undecided"
    assert max(result.length_factor for result in search.results) <= MAX_LENGTH_FACTOR


def test_an_invalid_trial_confirms_no_load() -> None:
    def server(trial: PlannedTrial) -> TrialResult:
        if trial.kind == "confirm":
            return trial_result(trial, "invalid", sustained=True)
        return trial_result(trial, "under" if trial.load < 100 else "over", sustained=True)

    search = run_search(steady_search(), server)
    assert search.result.confirmed_load is None
    assert capacity_and_state(search.result, search.results)[1] == "stopped"
    assert exit_code(search.result) == 3


def test_the_highest_allowed_load_is_confirmed_at_full_length() -> None:
    def server(trial: PlannedTrial) -> TrialResult:
        result = trial_result(trial, "under", sustained=True)
        if trial.may_pass_early:
            return TrialResult(
                trial=trial,
                outcome="under",
                ended_early=True,
                duration_s=60,
                offered_load=trial.load,
                sampling_noise=0.003,
            )
        return result

    search = LoadSearch(
        SearchSettings(low=1, high=80, start=50, requires_sustained=True, trial_load_s=600)
    )
    run_search(search, server)
    assert search.result.stop_reason == "highest"
    assert capacity_and_state(search.result, search.results) == (80, "confirmed")
    assert search.result.is_lower_bound
    assert math.isclose(search.results[-1].load, 80) and not search.results[-1].ended_early


@pytest.mark.parametrize("state", ["sustained", "confirmed", "held"])
def test_a_sustained_capacity_states_the_time_that_it_was_observed(state: State) -> None:
    """A server that leaks and restarts each hour was called sustained, without a limit of time."""
    capacity = Capacity(rate_per_s=30, method="search", state=state, sustained_s=1200)
    assert ("20 min" in capacity.description) is (state == "sustained")
