"""Every file of a simulated run says that no real server was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import exits

from loadgen.formats import FORMATS

SIM = ("--url", "sim:gb300-vm", "--gpus", "4", "--seed", "3")
SHORT = ("-c", "2", "-n", "20", "--warmup", "0")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a simulated run."""
    folder: Path = tmp_path_factory.mktemp("simulated") / "run"
    assert exits("run", "qa", *SIM, *SHORT, "--slo", "ttft:60s:p50", "-o", folder) == 0
    return folder


def test_junit_of_a_simulated_run_is_marked_as_simulated(tmp_path: Path) -> None:
    junit = tmp_path / "j.xml"
    assert exits("run", "qa", *SIM, *SHORT, "--junit", junit, "-o", tmp_path / "run") == 0
    assert "SIMULATED" in junit.read_text("utf-8")


def test_the_github_step_summary_of_a_simulated_run_is_marked_as_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "step.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    assert exits("run", "qa", *SIM, *SHORT, "--github", "-o", tmp_path / "run") == 0
    headline = page.read_text("utf-8").partition("<details>")[0]
    assert "SIMULATED" in headline


@pytest.mark.parametrize("form", [row.name for row in FORMATS.builtin_rows if row.write])
def test_an_export_of_a_simulated_run_is_marked_as_simulated(
    form: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "export"
    assert exits("export", run_dir, "--as", form, "-o", file) == 0
    text = file.read_text("utf-8")
    assert "simulated" in text.lower()

    (mark,) = re.findall(r"SIMULATED, .*: see its \w+ `(?:\w+\.)*(\w+)`", capsys.readouterr().err)
    assert mark in text


def test_the_capacity_of_a_simulated_search_is_marked_as_simulated(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    arguments = ("search", "qa", *SIM, "--slo", "ttft:2s:p90", "-d", "30s", "-o", folder)
    assert exits(*arguments, "--max-probes", "2") in (0, 1, 3)
    assert json.loads((folder / "capacity.json").read_bytes())["simulated"] is True


def test_junit_of_a_simulated_validation_is_marked_as_simulated(tmp_path: Path) -> None:
    contract = tmp_path / "contract.yaml"
    contract.write_text(
        "name: short\nhorizon: 5s\ngpus: 4\nlevels:\n  - {name: load, workload: qa, rate: 1/s,"
        " duration: 20s, must: [{ttft: {limit: 60s, at: p50}}]}\n"
    )
    folder = tmp_path / "out"
    assert exits("validate", contract, "--url", "sim:gb300-vm", "-o", folder) in (0, 1, 3, 4)
    assert "SIMULATED" in (folder / "junit.xml").read_text("utf-8")
