"""The contract term `answers` judges the share of right answers under the load of a level."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import exits

CONTRACT = """name: c
horizon: 2s
levels:
  - name: steady
    workload: w.yaml
    rate: 20/s
    requests: REQUESTS
    must:
      - answers: 95%
"""
WORKLOAD = """name: w
requests:
  classes:
    chat: {weight: 80%, requests: {input_tokens: 60, output_tokens: 40}}
    questions: {weight: 20%, requests: {from: questions.jsonl, check_answers: CHECK}}
"""


def write_contract(folder: Path, requests: int = 1000, check: str = "true") -> Path:
    rows = [{"prompt": f"What is {number} + 1?", "answer": number + 1} for number in range(50)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "w.yaml").write_text(WORKLOAD.replace("CHECK", check))
    contract = folder / "contract.yaml"
    contract.write_text(CONTRACT.replace("REQUESTS", str(requests)))
    return contract


@pytest.mark.parametrize(
    ("wrong", "verdict", "exit_code"),
    [("0%", "PASS", 0), ("5%", "INCONCLUSIVE", 4), ("30%", "FAIL", 1)],
)
def test_an_answers_term_is_decided_by_the_interval_of_the_score(
    tmp_path: Path, wrong: str, verdict: str, exit_code: int
) -> None:
    contract = write_contract(tmp_path)
    preset = tmp_path / "defect.yaml"
    preset.write_text(f"extends: gb300-vm\nanswers: {{wrong: {wrong}}}\n")
    command = ("validate", contract, "--url", f"sim:{preset}", "--seed", "1")
    assert exits(*command, "-o", tmp_path / "validation") == exit_code
    document = json.loads((tmp_path / "validation" / "verdict.json").read_text())
    (term,) = document["levels"][0]["terms"]
    assert term["verdict"] == verdict
    assert 150 < term["sample"] < 250
    assert term["low"] <= term["value"] <= term["high"]


@pytest.mark.parametrize(("requests", "check"), [(300, "true"), (1000, "false")])
def test_a_load_without_enough_questions_is_refused(
    tmp_path: Path, requests: int, check: str
) -> None:
    """73 right answers are needed for 95 %, and 300 requests have 60 questions."""
    contract = write_contract(tmp_path, requests, check)
    assert exits("validate", contract, "--url", "sim:gb300-vm", "--dry-run") == 2


def test_a_forecast_counts_the_answers_of_the_simulated_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contract = write_contract(tmp_path)
    assert exits("validate", contract, "--url", "sim:gb300-vm", "--dry-run") == 0
    forecast = capsys.readouterr().out
    assert "pass" in forecast
    assert "inconclusive" not in forecast


OBJECTIVE = "slo: {ttft: 9s, answers: 95%}\n"


@pytest.mark.parametrize("place", ["contract", "level", "workload"])
@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_an_answers_objective_beside_class_slos_is_refused_at_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, dry_run: tuple[str, ...]
) -> None:
    """`loadgen run` refuses it, because the objective is judged for the whole load."""
    contract = write_contract(tmp_path)
    workload = tmp_path / "w.yaml"
    workload_text = workload.read_text().replace("40}}", "40}, slo: {e2e: 90s}}")
    contract_text = contract.read_text()
    workload.write_text(workload_text)
    line_by_place = {"contract": 1, "level": 5, "workload": 5}
    if place == "contract":
        contract.write_text(OBJECTIVE + contract_text)
    elif place == "level":
        contract.write_text(contract_text.replace("    workload:", f"    {OBJECTIVE}    workload:"))
    else:
        workload.write_text(workload_text + OBJECTIVE)

    assert exits("validate", contract, "--url", "sim:gb300-vm", *dry_run) == 2
    assert f"{contract}:{line_by_place[place]}:" in capsys.readouterr().err


def test_an_answers_objective_without_questions_is_refused(tmp_path: Path) -> None:
    contract = write_contract(tmp_path, check="false")
    text = contract.read_text().replace("answers: 95%", "errors: 5%")
    contract.write_text(OBJECTIVE + text)
    assert exits("validate", contract, "--url", "sim:gb300-vm", "--dry-run") == 2


def test_a_contract_that_needs_streamed_responses_is_refused_without_them(tmp_path: Path) -> None:
    contract = write_contract(tmp_path)
    workload = tmp_path / "w.yaml"
    workload.write_text(f"{workload.read_text()}max_in_prefill: 4\n")
    command = ("validate", contract, "--url", "sim:gb300-vm", "--dry-run")
    assert exits(*command) == 0
    assert exits(*command, "--no-stream") == 2
