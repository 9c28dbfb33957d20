"""What a search may confirm: no load that the server does not sustain, and none that is unknown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import pytest
from command_line import exits

from loadgen.repeated.capacity import Capacity, State
from loadgen.search.load_search import (
    MOST_LENGTHS,
    LoadSearch,
    NextTrial,
    TrialResult,
    capacity_of,
    evidence,
    exit_code,
)

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
    trial: NextTrial,
    outcome: Literal["under", "over", "invalid"],
    *,
    sustained: bool | None = None,
    needed_s: float | None = None,
) -> TrialResult:
    return TrialResult(
        ask=trial,
        outcome=outcome,
        early=False,
        spent_s=600 * trial.lengths,
        offered=trial.load,
        noise=0.003,
        sustained=sustained,
        sustained_why="too short" if needed_s else "may grow" if sustained is None else "",
        needed_s=needed_s,
    )


def steady_search(*, longer: float = 1.0, may_extend: bool = True) -> LoadSearch:
    return LoadSearch(
        low=1,
        high=1000,
        start=50,
        precision=0.02,
        requires_steady=True,
        longer=longer,
        may_extend=may_extend,
        load_s=600,
    )


def run_search(search: LoadSearch, server: object) -> LoadSearch:
    """Run a search against a function from a trial to its result."""
    assert callable(server)
    while (trial := search.ask()) is not None:
        search.tell(server(trial))
    return search


def test_an_overloaded_server_is_no_capacity_where_no_objective_limits_the_wait(
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


def test_a_load_above_one_that_grew_is_never_the_capacity() -> None:
    """A trial at 90/s grows. Later trials up to 100/s pass, and do not count."""

    def server(trial: NextTrial) -> TrialResult:
        if trial.load > 100:
            return trial_result(trial, "over")
        grows = (
            trial.kind == "confirm"
            and trial.load > 90
            and not any(one.sustained is False for one in search.told)
        )
        return trial_result(trial, "over" if grows else "under", sustained=not grows)

    search = steady_search()
    run_search(search, server)
    growing = min(one.ask.load for one in search.told if one.sustained is False)
    load, state = capacity_of(search.answer, search.told)
    assert state == "confirmed" and load is not None and load < growing
    best = evidence(search.told)
    assert best is not None and best.ask.load == load


def test_a_load_is_not_confirmed_where_growth_is_unknown() -> None:
    def server(trial: NextTrial) -> TrialResult:
        return trial_result(trial, "under" if trial.load < 100 else "over")

    search = run_search(steady_search(), server)
    assert search.answer.reason == "undecided"
    assert exit_code(search.answer) == 1
    assert capacity_of(search.answer, search.told)[1] == "held"
    assert (search.answer.sustained, search.answer.sustained_why) == (None, "may grow")
    unconditional = LoadSearch(low=1, high=1000, start=50, precision=0.02)
    assert run_search(unconditional, server).answer.reason == "found", "by MLPerf's rules it counts"


@pytest.mark.parametrize("longer", [1.0, 2.0])
def test_a_trial_that_is_too_short_is_repeated_as_long_as_it_has_to_be(longer: float) -> None:
    """Requests last so long that 1,500 s of load show whether it is sustained."""

    def server(trial: NextTrial) -> TrialResult:
        outcome: Literal["under", "over"] = "under" if trial.load < 100 else "over"
        is_known = 600 * trial.lengths >= 1500
        return trial_result(
            trial,
            outcome,
            sustained=True if is_known else None,
            needed_s=None if is_known else 1500,
        )

    search = run_search(steady_search(longer=longer), server)
    answer = search.answer
    longer_trials = [one.ask for one in search.told if one.ask.kind == "sustain"]
    assert [one.lengths for one in longer_trials] == [3.0]
    assert (answer.reason, answer.sustained, answer.steady) == ("found", True, answer.confirmed)
    assert answer.not_steady is None
    assert capacity_of(answer, search.told) == (longer_trials[0].load, "sustained")


def test_where_no_trial_may_be_longer_a_load_that_is_too_short_to_judge_stays_undecided() -> None:
    def server(trial: NextTrial) -> TrialResult:
        return trial_result(trial, "under" if trial.load < 100 else "over", needed_s=1500)

    search = run_search(steady_search(may_extend=False), server)
    assert search.answer.reason == "undecided"
    assert search.answer.needed_s == 1500
    assert (search.answer.sustained, search.answer.sustained_why) == (None, "too short")
    assert not any(one.ask.kind == "sustain" for one in search.told)


def test_a_search_does_not_extend_its_trials_without_end() -> None:
    def server(trial: NextTrial) -> TrialResult:
        needed_s = 2000 * trial.lengths
        return trial_result(trial, "under" if trial.load < 100 else "over", needed_s=needed_s)

    search = run_search(steady_search(longer=2.0), server)
    assert search.answer.reason == "undecided"
    assert max(one.ask.lengths for one in search.told) <= MOST_LENGTHS


def test_an_invalid_trial_confirms_nothing() -> None:
    def server(trial: NextTrial) -> TrialResult:
        if trial.kind == "confirm":
            return trial_result(trial, "invalid", sustained=True)
        return trial_result(trial, "under" if trial.load < 100 else "over", sustained=True)

    search = run_search(steady_search(), server)
    assert search.answer.confirmed is None
    assert capacity_of(search.answer, search.told)[1] == "stopped"
    assert exit_code(search.answer) == 3


def test_the_highest_load_that_is_allowed_is_confirmed_at_full_length() -> None:
    def server(trial: NextTrial) -> TrialResult:
        result = trial_result(trial, "under", sustained=True)
        if trial.early_under:
            return TrialResult(
                ask=trial, outcome="under", early=True, spent_s=60, offered=trial.load, noise=0.003
            )
        return result

    search = LoadSearch(low=1, high=80, start=50, requires_steady=True, load_s=600)
    run_search(search, server)
    assert search.answer.reason == "highest"
    assert capacity_of(search.answer, search.told) == (80, "confirmed")
    assert search.answer.only_allowed
    assert math.isclose(search.told[-1].ask.load, 80) and not search.told[-1].early


@pytest.mark.parametrize("state", ["sustained", "confirmed", "held"])
def test_the_time_that_sustained_covers_stands_behind_it(state: State) -> None:
    """A server that leaks and restarts each hour was called sustained, without a limit of time."""
    capacity = Capacity(rate_per_s=30, method="search", state=state, sustained_s=1200)
    assert ("20 min" in capacity.words) is (state == "sustained")
