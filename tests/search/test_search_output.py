"""The text that a search, a sweep and repeats print by default."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import exits
from golden import check_golden, normalize
from synthetic_searches import planned_trial

from loadgen.search import experiment
from loadgen.search.goal import FAILED, PASSED, Outcome
from loadgen.search.search_results import TrialResult, capacity_and_state, find_higher_pass

pytestmark = pytest.mark.commands

QA = ("qa", "--url", "sim:gb300-vm", "--seed", "1")
SEARCH = ("search", *QA, "--slo", "ttft:2s:p95", "-d", "60s", "--precision", "5%")
MAX_LINES_OF_SEARCH = 10


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("search", SEARCH),
        ("sweep", ("sweep", *QA, "-d", "20s", "-c", "8,64,512,1024")),
        ("repeats", ("run", *QA, "-d", "20s", "--request-rate", "20", "--repeat", "3")),
        ("repeated_sweep", ("sweep", *QA, "-d", "20s", "-c", "8,64", "--repeat", "2")),
    ],
)
def test_the_default_output_of_several_runs_is_short(
    name: str, command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exits(*command, "-o", tmp_path / "results")

    printed = capsys.readouterr().out

    check_golden(f"{name}_brief", normalize(printed, tmp_path))
    if name == "search":
        filled_lines = [line for line in printed.splitlines() if line]
        assert len(filled_lines) <= MAX_LINES_OF_SEARCH


def test_the_full_output_of_a_search_has_every_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exits(*SEARCH, "--full", "-o", tmp_path / "results")

    printed = capsys.readouterr().out

    check_golden("search_full", normalize(printed, tmp_path))


def test_a_capacity_below_a_load_that_passed_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exits(*SEARCH, "-o", tmp_path / "results")
    printed = " ".join(capsys.readouterr().out.split())

    search = experiment.read_search(tmp_path / "results")
    assert search is not None
    load, state = capacity_and_state(search.result, search.trials)
    higher_load = find_higher_pass(load or 0, search.trials)

    assert state == "sustained" and higher_load is not None
    assert f"; {higher_load:.4g} passed only a shorter trial" in printed


def make_trial(load: float, outcome: Outcome, sustained: bool | None = None) -> TrialResult:
    return TrialResult(
        trial=planned_trial(load),
        outcome=outcome,
        ended_early=False,
        duration_s=100,
        offered_load=load,
        sampling_noise=0.01,
        sustained=sustained,
    )


def test_a_load_that_passed_once_can_be_above_the_confirmed_capacity() -> None:
    trials = [
        make_trial(124, PASSED),
        make_trial(128, PASSED),
        make_trial(140, PASSED, sustained=False),
        make_trial(145, PASSED),
        make_trial(152, FAILED),
    ]

    assert find_higher_pass(124, trials) == 128
    assert find_higher_pass(128, trials) is None
