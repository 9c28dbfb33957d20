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


def test_easy_deadlines_pass_and_hard_ones_fail(tmp_path: Path) -> None:
    easy = verdict_of(tmp_path, tpot="100ms")
    assert (easy["verdict"], easy["value"]) == ("PASS", 100.0)
    hard = verdict_of(tmp_path, tpot="2ms")
    assert hard["verdict"] == "FAIL"
    assert isinstance(hard["value"], float) and hard["value"] < 50


def test_the_term_needs_deadlines(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    contract = tmp_path / "contract.yaml"
    contract.write_text(CONTRACT.format(tpot="100ms").replace("tpot: 100ms", "e2e: 9s"))
    assert exits("validate", contract, "--url", "sim:gb300-vm", "--dry-run") == 2
