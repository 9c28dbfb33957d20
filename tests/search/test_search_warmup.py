"""A search whose trials start after a warm-up, for a server that scales out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import exits
from synthetic_searches import queue_rows

from loadgen.core.results.record import ROW
from loadgen.core.slo import Slo, Term
from loadgen.search.goal import Goal
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import PlannedTrial, TrialResult
from loadgen.search.search_settings import SearchSettings
from loadgen.search.trial_monitor import PlannedLoad, TrialMonitor

pytestmark = pytest.mark.commands

NS_PER_S = 1_000_000_000
SCALES_OUT = """
extends: gb300-vm
vms: 4
gpus_per_vm: 1
replicas_at: {1s: 1, 180s: 2, 360s: 4}
"""
ONE_REPLICA_PER_S = 7.8
FOUR_REPLICAS_PER_S = 31.0


def search_arguments(directory: Path, *options: str) -> list[str]:
    """Return the command line of a search on a server that scales out."""
    (directory / "scales_out.yaml").write_text(SCALES_OUT)
    url = f"sim:{directory / 'scales_out.yaml'}"
    slo = ["--slo", "ttft:2s:p95", "--slo", "tpot:60ms:p95"]
    return ["search", "rag", "--url", url, *slo, "--seed", "1", "-d", "300s", *options]


def test_after_a_warmup_a_search_finds_the_capacity_of_a_server_that_scales_out(
    tmp_path: Path,
) -> None:
    output_dir = tmp_path / "s"
    options = ["--warmup", "10m", "--precision", "5%", "--no-sustain", "-o", str(output_dir)]
    exits(*search_arguments(tmp_path, *options))
    capacity = json.loads((output_dir / "capacity.json").read_text())
    assert 0.95 * FOUR_REPLICAS_PER_S < capacity["rate_per_s"] < 1.05 * FOUR_REPLICAS_PER_S
    stored = json.loads((output_dir / "search.json").read_text())
    assert (stored["answer"]["warmup_s"], stored["settings"]["warmup_s"]) == (600, 600)
    assert all(result["spent_s"] > 600 for result in stored["told"])


def test_without_a_warmup_trials_measure_the_server_before_it_scales_out(tmp_path: Path) -> None:
    output_dir = tmp_path / "s"
    options = ["--precision", "5%", "--no-sustain", "--max-probes", "8", "-o", str(output_dir)]
    exits(*search_arguments(tmp_path, *options))
    capacity = json.loads((output_dir / "capacity.json").read_text())
    assert capacity["rate_per_s"] < 1.05 * ONE_REPLICA_PER_S


def test_a_warmup_rises_to_the_highest_load_that_passed_and_never_above_the_trial() -> None:
    search = LoadSearch(SearchSettings(low=1, high=100, start=10, warmup_s=60))
    warmup_loads = []
    for outcome in ("under", "under", "over"):
        trial = search.next_trial()
        assert trial is not None
        warmup_loads.append((trial.load, trial.warmup_load))
        search.add_result(
            TrialResult(
                trial=trial,
                outcome=outcome,  # type: ignore[arg-type]
                ended_early=False,
                duration_s=1,
                offered_load=trial.load,
                sampling_noise=0.01,
            )
        )
    last_trial = search.next_trial()

    assert warmup_loads == [(10, 10), (20, 10), (40, 20)]
    assert last_trial is not None and last_trial.warmup_load == 20


def test_a_trial_without_a_warmup_has_no_warmup_load() -> None:
    trial = LoadSearch(SearchSettings(low=1, high=100, start=10)).next_trial()
    assert trial == PlannedTrial(number=0, load=10, kind="bracket", may_pass_early=True)


def test_a_warmup_delays_the_decision_of_a_trial_by_its_length() -> None:
    goal = Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=2 * NS_PER_S),)))
    warmup_ns = 600 * NS_PER_S
    rows = np.sort(queue_rows(60, seed=1, length_s=300), order="done_ns")
    later_rows = rows.copy()
    for column in ROW.names or ():
        if column.endswith("_ns"):
            later_rows[column] += warmup_ns
    monitor = TrialMonitor(goal, PlannedLoad(rows["due_ns"]))
    later_monitor = TrialMonitor(goal, PlannedLoad(later_rows["due_ns"], start_ns=warmup_ns))
    decision = monitor.find_first_decision(rows, 5 * NS_PER_S)
    later_decision = later_monitor.find_first_decision(later_rows, 5 * NS_PER_S)

    assert decision is not None and later_decision is not None
    assert decision.outcome == "under"
    later_by_ns = later_decision.decided_at_ns - decision.decided_at_ns
    assert later_by_ns == warmup_ns
    assert later_decision.reason == decision.reason


def test_a_dry_run_counts_the_time_of_the_warmups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-probes", "2", "--no-sustain", "--dry-run"]
    assert exits(*search_arguments(tmp_path, *options)) == 0
    assert "at most 2 trials, 10 min 00 s" in " ".join(capsys.readouterr().out.split())
    assert exits(*search_arguments(tmp_path, *options, "--warmup", "10m")) == 0
    assert "at most 2 trials, 30 min 00 s" in " ".join(capsys.readouterr().out.split())


def test_a_resumed_search_uses_its_stored_warmup(tmp_path: Path) -> None:
    output_dir = tmp_path / "s"
    options = ["--warmup", "2m", "--no-sustain", "--max-probes", "1", "-o", str(output_dir)]
    exits(*search_arguments(tmp_path, *options))
    exits("search", "--resume", str(output_dir), "--max-probes", "2")
    results = [json.loads(line) for line in (output_dir / "probes.jsonl").read_text().splitlines()]
    assert len(results) == 2
    assert all(result["ask"]["warmup_load"] > 0 for result in results)


@pytest.mark.parametrize(
    "options",
    [("--warmup", "20req"), ("--warmup", "1m", "--over", "concurrency")],
)
def test_a_warmup_by_requests_or_for_a_closed_loop_is_refused(
    tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(*search_arguments(tmp_path, *options, "-o", str(tmp_path / "s"))) == 2
    assert "--warmup" in capsys.readouterr().err
