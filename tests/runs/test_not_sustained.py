"""A run that was not sustained says so to a build server and in the list of results."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import exits

from loadgen.core.run_folder import read_summary
from loadgen.runs import outcome
from loadgen.ui import results_list

pytestmark = pytest.mark.commands


@pytest.fixture
def overloaded(tmp_path: Path) -> Path:
    """Return the folder of a run at twice what the server completes, under an SLO on TPOT alone."""
    folder = tmp_path / "r"
    load = ("--request-rate", "60", "-d", "120s", "--timeout", "3600s", "--seed", "1")
    target = ("--url", "sim:gb300-vm", "--slo", "tpot:500ms:p95", "-o", str(folder))
    assert exits("run", "rag", *load, *target) == 0
    return folder


def test_junit_and_the_list_of_results_mark_a_run_that_was_not_sustained(
    overloaded: Path,
) -> None:
    summary = read_summary(overloaded)
    assert summary.sustainable.sustained is False
    cases = {case.name: case for case in outcome.build_cases([("r", summary)])}
    case = cases["the load is sustained"]
    assert (case.outcome, case.text) == ("skipped", f"NOT SUSTAINED: {summary.sustainable.reason}")

    (stored_result,) = results_list.results_in(overloaded.parent)
    assert stored_result.outcome == "VALID, SLO met, NOT SUSTAINED"
