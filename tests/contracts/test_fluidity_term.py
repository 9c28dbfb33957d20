"""The contract term `fluidity` judges the share of token deadlines that requests met."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import exits

CONTRACT = """name: c
horizon: 2s
levels:
  - name: steady
    workload: w.yaml
    rate: 20/s
    requests: 4000
    slo: {{ttft: 300ms, tpot: {tpot}}}
    must:
      - fluidity: {{share: 90%, at: p95}}
"""
WORKLOAD = "name: w\nrequests: {input_tokens: 60, output_tokens: 40}\n"


def verdict_of(tmp_path: Path, tpot: str) -> dict[str, object]:
    """Return the verdict on the only term of a contract with this TPOT deadline."""
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    contract = tmp_path / "contract.yaml"
    contract.write_text(CONTRACT.format(tpot=tpot))
    out = tmp_path / f"validation-{tpot}"
    exits("validate", contract, "--url", "sim:gb300-vm", "--seed", "1", "-o", out)
    verdict = json.loads((out / "verdict.json").read_text())
    terms: list[dict[str, object]] = verdict["levels"][0]["terms"]
    return terms[0]


def test_a_fluidity_term_passes_with_long_and_fails_with_short_deadlines(tmp_path: Path) -> None:
    easy = verdict_of(tmp_path, tpot="100ms")
    assert (easy["verdict"], easy["value"]) == ("PASS", 100.0)
    hard = verdict_of(tmp_path, tpot="2ms")
    assert hard["verdict"] == "FAIL"
    assert isinstance(hard["value"], float) and hard["value"] < 50


def test_a_fluidity_term_without_deadlines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    contract = tmp_path / "contract.yaml"
    contract.write_text(CONTRACT.format(tpot="100ms").replace("tpot: 100ms", "e2e: 9s"))
    assert exits("validate", contract, "--url", "sim:gb300-vm", "--dry-run") == 2


MIX = """name: w
requests:
  classes:
    chat: {weight: 1, requests: {input_tokens: 60, output_tokens: 40}, slo: {ttft: 300ms, tpot: 1s}}
    batch: {weight: 1, requests: {input_tokens: 60, output_tokens: 40}BATCH}
"""
CLASS_CONTRACT = """name: c
horizon: 2s
levels:
  - name: steady
    workload: w.yaml
    rate: 20/s
    requests: 4000
    must:
      - fluidity: {share: 90%, at: p95, class: chat}
      - fluidity: {share: 90%, at: p95, class: batch}
"""


def validate_classes(tmp_path: Path, batch: str, *options: str, contract: str) -> int:
    """Validate a contract about two classes, and return the exit code. `batch` has this SLO."""
    (tmp_path / "w.yaml").write_text(MIX.replace("BATCH", batch))
    file = tmp_path / "contract.yaml"
    file.write_text(contract)
    return exits("validate", file, "--url", "sim:gb300-vm", "--seed", "1", *options)


def test_a_term_about_a_class_uses_the_deadlines_of_the_class(tmp_path: Path) -> None:
    hard = ", slo: {ttft: 300ms, tpot: 2ms}"
    out = tmp_path / "validation"
    code = validate_classes(tmp_path, hard, "-o", str(out), contract=CLASS_CONTRACT)
    terms = json.loads((out / "verdict.json").read_text())["levels"][0]["terms"]
    assert [term["verdict"] for term in terms] == ["PASS", "FAIL"]
    assert terms[0]["value"] == 100.0 and terms[1]["value"] < 50
    assert code == 1


def test_a_term_about_all_classes_needs_common_deadlines(tmp_path: Path) -> None:
    for_all = CLASS_CONTRACT.replace(", class: chat", "")
    different = ", slo: {ttft: 300ms, tpot: 2ms}"
    common = ", slo: {ttft: 300ms, tpot: 1s}"
    assert validate_classes(tmp_path, different, "--dry-run", contract=for_all) == 2
    assert validate_classes(tmp_path, common, "--dry-run", contract=for_all) == 0
    without_deadlines = ", slo: {e2e: 9s}"
    assert validate_classes(tmp_path, without_deadlines, "--dry-run", contract=CLASS_CONTRACT) == 2
