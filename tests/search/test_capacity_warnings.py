"""Warnings about the run behind a capacity: they appear wherever the capacity is shown."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from command_line import exits

pytestmark = pytest.mark.commands

SCALES_OUT = """
extends: gb300-vm
server: {max_batch_size: 256}
replicas_at: {1s: 1, 60s: 2, 100s: 4}
"""


def search(folder: Path, *options: str) -> int:
    slo = ("--slo", "ttft:2s:p95", "--slo", "tpot:60ms:p95")
    searched = ("--precision", "20%", "--seed", "1", "--gpus", "4", "-o", str(folder))
    return exits("search", *options, *slo, *searched)


def test_capacity_cost_and_size_warn_of_repeated_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 3,000 rows 170.7/s were sustained with 88 % of the prompts cached; shuffled 66.3/s."""
    rng = random.Random(1)
    texts = [
        " ".join(rng.choice(("alpha", "beta", "gamma")) for _ in range(300)) for _ in range(20)
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": text, "output_tokens": 20}) + "\n" for text in texts)
    )
    folder = tmp_path / "s"
    data = ("--dataset", str(rows), "--url", "sim:gb300-vm", "-d", "40s", "--high", "200")
    assert search(folder, *data) == 0
    printed = capsys.readouterr().out
    warnings = json.loads((folder / "capacity.json").read_text())["warnings"]
    assert len(warnings) == 2
    assert "20 rows" in warnings[0] and "cache" in warnings[1]
    assert printed.count("WARNING") == 2
    assert exits("report", str(folder)) == 0
    assert "20 rows" in (folder / "report.html").read_text()
    capsys.readouterr()

    prices = ("--accept-sample-prices", "--price", "s=oracle-gb300", "--json")
    assert exits("cost", str(folder), *prices) == 0
    (offer,) = json.loads(capsys.readouterr().out)["offers"]
    (note,) = [code for code in offer["note_codes"] if code["code"] == "other_work"]
    assert note["values"]["warnings"] == warnings

    work = tmp_path / "work.yaml"
    work.write_text(f"name: rows\nrequests: {{from: {rows}}}\n")
    demand = ("--request-rate", "100", "--json")
    assert exits("size", str(work), str(folder), *demand, "-o", str(tmp_path / "z")) == 0
    (size,) = json.loads(capsys.readouterr().out)["sizes"]
    assert "other_work" in [code["code"] for code in size["note_codes"]]


def test_a_replica_that_is_added_during_a_trial_causes_a_warning(tmp_path: Path) -> None:
    (tmp_path / "scales_out.yaml").write_text(SCALES_OUT)
    folder = tmp_path / "s"
    url = ("--url", f"sim:{tmp_path / 'scales_out.yaml'}")
    search(folder, "rag", *url, "-d", "120s", "--start", "4", "--max-probes", "6")
    trials = [json.loads(line) for line in (folder / "probes.jsonl").read_text().splitlines()]
    summary = json.loads((folder / trials[-1]["folder"] / "summary.json").read_text())
    codes = [code["code"] for code in summary["verdict"]["warning_codes"]]
    assert "replicas_changed" in codes
