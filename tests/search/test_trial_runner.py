"""Trials: how they are run, judged, ended early and stored."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from command_line import exits
from run_fixtures import NO_PAGES
from servers import start
from synthetic_searches import S, make_runner, planned_trial, workload_at

from loadgen.core import run_folder
from loadgen.core.execution import run
from loadgen.core.execution.plan import Settings
from loadgen.core.metrics.summary import NamedSummary, Summary
from loadgen.core.results import store
from loadgen.core.results.manifest import decode_manifest
from loadgen.core.results.record import KIND, ROW, STATUS
from loadgen.core.results.record_log import Tail
from loadgen.core.slo import Slo, TaskTerm, Term
from loadgen.core.workload import Closed, Stage, Workload
from loadgen.search import (
    experiment,
    trials_csv,
)
from loadgen.search.goal import Goal
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_settings import (
    SearchSettings,
)
from loadgen.search.trial_workload import as_trial_workload, with_load
from loadgen.sim.server.options import Options

pytestmark = pytest.mark.commands

CLASSES = ["class qa", "class rag", "class summarization", "class agentic"]


def test_trials_in_virtual_time_are_stored_and_read_back(tmp_path: Path) -> None:
    written: list[Path] = []

    def execute(*arguments: Any, **named: Any) -> tuple[Summary, Path]:
        summary, folder = run.execute(*arguments, **named)
        written.append(folder)
        return summary, folder

    runs = make_runner(tmp_path, execute=execute)
    trial_results = [runs.run(planned_trial(20.0)), runs.run(planned_trial(2000.0, 1))]
    assert [trial_result.outcome for trial_result in trial_results] == ["under", "over"]
    assert trial_results[1].ended_early and trial_results[1].duration_s < 60
    assert [folder.name for folder in written] == [
        trial_result.run_name for trial_result in trial_results
    ]  # each once, also what ended early
    stored = store.read_run(written[1])
    assert stored.manifest.state == "decided"
    assert 0 < stored.rows["due_ns"][stored.rows["sent_ns"] >= 0].max() < 60 * S
    assert experiment.read_results(tmp_path) == trial_results
    assert (tmp_path / trial_results[0].run_name / "summary.json").is_file()
    with (tmp_path / experiment.TRIALS_FILE).open("ab") as file:
        file.write(b'{"ask": {"numb')  # cut off
    assert experiment.read_results(tmp_path) == trial_results
    experiment.append_result(tmp_path, trial_results[0])  # on a line of its own
    assert experiment.read_results(tmp_path) == trial_results
    search = LoadSearch(SearchSettings(low=1, high=10_000, start=20), trial_results)
    answer = runs.save_result(search)
    assert answer.highest_passed == 20
    lines = (tmp_path / trials_csv.CURVE_FILE).read_text().splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("20,")


def test_the_load_of_conversations_is_the_rate_at_which_they_begin(tmp_path: Path) -> None:
    from loadgen.core.workload import load

    workload = as_trial_workload(load("agentic"), 60 * S)
    runs = make_runner(tmp_path)
    runs.goal, runs.make_workload = (
        Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=1),))),
        lambda trial: with_load(workload, trial.load),
    )
    runs.may_end_early = False
    trial_result = runs.run(planned_trial(4.0))
    assert trial_result.outcome == "over" and not trial_result.ended_early
    assert trial_result.offered_load == pytest.approx(4.0, rel=0.4)
    assert trial_result.metrics["offered_rps"] > 1.9 * 4.0  # type: ignore[operator]


@pytest.mark.commands
@pytest.mark.parametrize(
    ("workload", "slo", "promised", "missed"),
    [
        ("rag-pipeline", ["--slo", "+ttft:30s:p95"], ["ttft p95", "tasks"], "tasks missed"),
        ("mixed", [], CLASSES, "qa: TPOT p95"),
    ],
)
def test_a_trial_is_judged_by_the_same_objectives_as_a_run(
    workload: str, slo: list[str], promised: list[str], missed: str, tmp_path: Path
) -> None:
    """The SLOs of tasks and classes limit the load, too, in run, search and sweep alike."""
    from loadgen.runs.sweep_curve import build_curve

    folder = tmp_path / "search"
    arguments = [
        "search",
        workload,
        "--url",
        "sim:gb300-vm",
        *slo,
        "-d",
        "20s",
        "--start",
        "16",
        "--seed",
        "3",
        "--json",
    ]
    exits(*arguments, "--max-probes", "5", "-o", str(folder))
    trials_of_it = experiment.read_results(folder)
    summaries = {
        trial.run_name: run_folder.read_summary(folder / trial.run_name) for trial in trials_of_it
    }
    full = [trial for trial in trials_of_it if not trial.ended_early]
    assert [trial.outcome == "under" for trial in full] == [
        summaries[trial.run_name].goodput.met for trial in full
    ]
    assert {trial.outcome for trial in trials_of_it} == {"under", "over"}
    assert any(missed in trial.reason for trial in trials_of_it)
    assert json.loads((folder / "search.json").read_bytes())["goal"] == promised
    runs = [NamedSummary(trial.run_name, summaries[trial.run_name]) for trial in full]
    objectives = build_curve(runs).slo
    assert "of tasks within" in objectives
    assert ("qa: TTFT p95" in objectives) == (workload == "mixed")


def test_a_simulation_ends_once_too_many_tasks_are_late(tmp_path: Path) -> None:
    """Late tasks stay late, so the trial ends early with the outcome of its full length."""
    from loadgen.core.workload import load

    workload = as_trial_workload(load("rag-pipeline"), 20 * S)
    runs, trial = make_runner(tmp_path, check_interval_s=1.0), planned_trial(8.0)
    runs.make_workload = lambda trial: with_load(workload, trial.load)
    for within_s, outcome in ((2, "over"), (600, "under")):
        runs.goal = Goal(
            slo=Slo(task=TaskTerm(within_ns=within_s * S, share=0.9)), full_run_terms=("tasks",)
        )
        workload = workload.model_copy(update={"slo": runs.goal.slo})
        runs.may_end_early = True
        watched = runs.run(trial)
        runs.may_end_early = False
        full_trial = runs.run(trial)
        assert watched.outcome == full_trial.outcome == outcome
        assert watched.ended_early == (outcome == "over") and not full_trial.ended_early
        if watched.ended_early:
            assert (
                watched.duration_s < 0.8 * full_trial.duration_s
                and "tasks missed" in watched.reason
            )


def test_a_simulation_of_conversations_ends_once_too_many_requests_miss(tmp_path: Path) -> None:
    """The number of requests is known, so too many misses decide the trial early.

    The offered load is that of the time in which conversations begin, even if the last requests
    come later.
    """
    from loadgen.core.workload import load

    workload = as_trial_workload(load("agentic"), 60 * S)
    runs, trial = make_runner(tmp_path, check_interval_s=1.0), planned_trial(4.0)
    runs.make_workload = lambda trial: with_load(workload, trial.load)
    runs.goal = Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=1, quantile=0.2),)))
    late_trial_result = runs.run(trial)
    runs.may_end_early = False
    full_trial = runs.run(trial)
    assert (late_trial_result.outcome, late_trial_result.ended_early, full_trial.ended_early) == (
        "over",
        True,
        False,
    ) and 60 < late_trial_result.duration_s < full_trial.duration_s
    assert late_trial_result.offered_load == full_trial.offered_load
    runs.may_end_early, runs.goal = True, Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=1),)))
    for kind in ("bracket", "sustain"):
        lost_trial_result = runs.run(msgspec.structs.replace(trial, kind=kind))
        assert (
            lost_trial_result.outcome,
            lost_trial_result.ended_early,
            lost_trial_result.reason_code,
        ) == (
            "over",
            True,
            "misses",
        ) and lost_trial_result.duration_s < full_trial.duration_s / 2
    probe = runs.run(trial)
    assert (probe.outcome, probe.ended_early, probe.reason_code) == ("over", True, "misses")
    summary = run_folder.read_summary(tmp_path / probe.run_name)
    assert summary.run.state == "decided"
    assert (
        summary.requests.scheduled
        == summary.requests.ok + summary.requests.cancelled + summary.requests.dropped
    )


def test_a_trial_of_a_server_that_dies_is_invalid(tmp_path: Path) -> None:
    def dying(workload: Workload, settings: Any, _handlers: Any) -> Any:
        # Like a run over HTTP, this one reports no records: they are in the folder only.
        summary, folder = run.execute(workload, settings)
        rows = store.read_run(folder).rows
        rows["status"][-200:], rows["kind"][-200:] = STATUS["failed"], KIND["connect"]
        for file in (folder / "requests").iterdir():
            file.unlink()
        (folder / "spool").mkdir()
        (folder / "spool" / "w0.rows").write_bytes(rows.tobytes())
        (folder / "spool" / "w0.texts").write_bytes(b"")
        return summary, folder

    trial_result = make_runner(tmp_path, execute=dying).run(planned_trial(20.0))
    assert trial_result.outcome == "invalid"
    assert trial_result.reason_code == "server_gone"


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_a_trial_over_sockets_ends_early_in_all_workers(tmp_path: Path, workers: int) -> None:
    with start(Options(ttft="50ms", itl="1ms")) as server:
        runs = make_runner(tmp_path, check_interval_s=0.2)
        runs.goal = Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=1_000_000),)))
        runs.settings = Settings(url=server.url, workers=workers, **NO_PAGES)
        trial_result = runs.run(planned_trial(40.0))

    assert trial_result.metrics["simulated"]
    assert (trial_result.outcome, trial_result.ended_early) == (
        "over",
        True,
    ) or trial_result.outcome == "invalid"  # a busy host's sender is late
    if (
        trial_result.outcome == "over"
    ):  # the search ended it, not the user: what it stored is no interrupted run
        assert trial_result.duration_s < 20  # of 60
        assert (
            decode_manifest(
                (runs.output_dir / trial_result.run_name / "run.json").read_bytes()
            ).state
            == "decided"
        )


def test_remaining_records_are_read_after_their_file_was_replaced(tmp_path: Path) -> None:
    """The recorder takes away a full file, perhaps before its last rows were looked at."""
    (tmp_path / "spool").mkdir()
    rows = np.zeros(5, ROW)
    rows["slot"] = np.arange(5)
    data, first = rows.tobytes(), tmp_path / "spool" / "w0.rows"
    with first.open("wb", buffering=0) as file, contextlib.closing(Tail(tmp_path)) as tail:
        assert len(tail.rows()) == 0
        file.write(data[: 2 * ROW.itemsize + 7])
        assert tail.rows()["slot"].tolist() == [0, 1]
        file.write(data[2 * ROW.itemsize + 7 : 4 * ROW.itemsize])
        first.unlink()
        (tmp_path / "spool" / "w0.4.rows").write_bytes(data[4 * ROW.itemsize :])
        assert tail.rows()["slot"].tolist() == [2, 3, 4]


def test_the_load_of_a_trial_changes_measured_and_closed_stages() -> None:
    closed = workload_at(1.0).model_copy(
        update={"stages": (Stage(name="l", arrival=Closed(concurrency=1), count=9),)}
    )

    assert with_load(closed, 7.0).stages[0].arrival == Closed(concurrency=7)

    warm = workload_at(1.0)
    warm = warm.model_copy(
        update={"stages": (warm.stages[0].model_copy(update={"measured": False}), *warm.stages)}
    )
    changed_workload = with_load(warm, 5.0)

    assert [stage.arrival.rate for stage in changed_workload.stages] == [1.0, 5.0]  # type: ignore[union-attr]
    assert len(as_trial_workload(warm, 9 * S).stages) == 1
