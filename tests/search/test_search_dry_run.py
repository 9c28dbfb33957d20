"""`loadgen search --dry-run` says how long a search takes and what it costs, and sends nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import repository_paths
from command_line import exits

SLO = ("--slo", "ttft:2s:p95", "--slo", "tpot:60ms:p95", "--seed", "1")
PRICES = (
    "--prices",
    repository_paths.ROOT / "docs/prices.example.yaml",
    "--shape",
    "ND128isr_GB300_v6",
)


def test_a_dry_run_states_trials_and_time_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search"
    arguments = ("search", "rag", "--url", "sim:gb300-vm", *SLO, "-o", out, "--dry-run")
    assert exits(*arguments) == 0
    text = capsys.readouterr().out
    trials = re.search(r"(\d+) trials, ", text)
    assert trials is not None and 5 <= int(trials[1]) <= 20
    assert "at most 50 trials" in text
    assert not out.exists()


def test_a_dry_run_states_the_cost_of_a_real_server(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("search", "rag", "--url", "http://127.0.0.1:9", *SLO, "--gpus", "4", *PRICES)
    assert exits(*arguments, "-d", "5m", "--dry-run") == 0
    costs = re.findall(r"([\d.]+) USD", capsys.readouterr().out)
    assert len(costs) == 2 and 0 < float(costs[0]) < float(costs[1])
    assert exits(*arguments, "-d", "5m", "--dry-run", "--max-cost", "1") == 2


def test_a_dry_run_does_not_move_earlier_results(tmp_path: Path) -> None:
    out = tmp_path / "search"
    out.mkdir()
    (out / "run.json").write_text("{}")
    arguments = ("search", "qa", "--url", "sim:gb300-vm", *SLO, "-o", out, "--force", "--dry-run")
    assert exits(*arguments) == 0
    assert (out / "run.json").exists()


def test_a_dry_run_states_the_remaining_trials_of_a_stopped_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search"
    arguments = (
        "search",
        "qa",
        "--url",
        "sim:gb300-vm",
        *SLO,
        "-d",
        "30s",
        "--no-sustain",
        "-o",
        out,
    )
    assert exits(*arguments, "--max-probes", "2") in (1, 3)
    capsys.readouterr()
    assert exits(*arguments, "--max-probes", "9", "--dry-run") == 0
    assert "at most 7 trials" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["http:/h", "foo", "sim:nope", "http://h:99999"])
@pytest.mark.parametrize("command", ["run", "search", "sweep"])
def test_a_dry_run_refuses_the_url_that_a_run_refuses(command: str, url: str) -> None:
    load = {"run": ("-c", "1"), "sweep": ("-c", "1,2"), "search": SLO}[command]
    arguments = (command, "qa", "--url", url, *load)
    assert exits(*arguments, "--dry-run") == exits(*arguments) == 2
