"""A contract without a duration lasts as long as its terms need, and ends decided."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import repository_paths
from command_line import exits

from loadgen.contracts.level_plan import LevelPlan
from loadgen.contracts.loading import load_contract
from loadgen.core import format
from loadgen.core.errors import CombinedError

SIM = ("--url", "sim:gb300-vm", "--seed", "1", "--progress", "off")
PRICES = (
    "--prices",
    repository_paths.ROOT / "docs/prices.example.yaml",
    "--shape",
    "ND128isr_GB300_v6",
)


def write_contract(directory: Path, level: str, horizon: str = "12m") -> Path:
    file = directory / "contract.yaml"
    file.write_text(
        f"name: auto\ngpus: 4\nhorizon: {horizon}\nlevels:\n  - {{name: load, {level}}}\n"
    )
    return file


def plan_contract(directory: Path, level: str, **options: Any) -> LevelPlan:
    return load_contract(write_contract(directory, level, **options)).levels[0]


def read_verdict(directory: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads((directory / "verdict.json").read_bytes())
    return verdict


@pytest.mark.parametrize("duration", ["", "duration: auto, "])
def test_a_latency_term_plans_enough_time_for_rare_events(duration: str, tmp_path: Path) -> None:
    terms = "must: [{tpot: {limit: 60ms, at: p95}}]"
    plan = plan_contract(tmp_path, f"workload: qa, rate: 12/s, {duration}{terms}")
    assert plan.duration_ns is not None
    assert 2_656 <= plan.duration_ns / 1e9 <= 3_000
    assert plan.is_auto and "tpot" in plan.longest_load_term


def test_an_error_term_plans_a_number_of_requests(tmp_path: Path) -> None:
    plan = plan_contract(tmp_path, "workload: qa, rate: 2/s, must: [{errors: 0.1%}]")
    assert plan.requests is not None and plan.requests >= 3_838


def test_repeats_of_a_level_share_its_planned_time(tmp_path: Path) -> None:
    terms = "must: [{tpot: {limit: 60ms, at: p95}}]"
    once = plan_contract(tmp_path, f"workload: qa, rate: 12/s, {terms}")
    twice = plan_contract(tmp_path, f"workload: qa, rate: 12/s, repeats: 2, {terms}")
    assert once.duration_ns is not None and twice.duration_ns is not None
    assert twice.duration_ns == pytest.approx(once.duration_ns / 2, rel=0.01)


def test_a_drift_term_plans_time_for_two_windows(tmp_path: Path) -> None:
    terms = "must: [{drift: {of: tpot, at: p50, window: 1h, limit: 10%}}]"
    plan = plan_contract(tmp_path, f"workload: qa, rate: 12/s, {terms}")
    assert plan.duration_ns is not None and plan.duration_ns >= 2 * 3_600e9


def test_a_closed_loop_without_a_number_of_requests_ends_by_time(tmp_path: Path) -> None:
    terms = "must: [{tpot: {limit: 60ms, at: p95}}]"
    plan = plan_contract(tmp_path, f"workload: qa, concurrency: 8, {terms}")
    (stage,) = [stage for stage in plan.workload.stages if stage.measured]
    assert stage.count is None and stage.duration_ns is not None
    assert stage.duration_ns >= 2_656e9


def test_a_specified_number_of_requests_is_refused_if_it_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(CombinedError):
        load_contract(
            write_contract(tmp_path, "workload: qa, rate: 2/s, requests: 9, must: [ttft: 1s]")
        )


def test_the_forecast_of_a_contract_states_hours_and_cost_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terms = "must: [{tpot: {limit: 60ms, at: p95}}]"
    file = write_contract(tmp_path, f"workload: qa, rate: 1/s, {terms}", horizon="30s")
    out = tmp_path / "out"
    assert exits("validate", file, *SIM, *PRICES, "-o", out) == 0
    before, _, _ = capsys.readouterr().err.partition("Level load: run 1 of 1")
    assert re.search(r"1 run, .* min .*USD", before)
    assert exits("validate", file, *SIM, *PRICES, "--dry-run") == 0
    assert "USD" in capsys.readouterr().err


def test_an_undecided_level_is_extended_until_it_is_decided(tmp_path: Path) -> None:
    terms = "must: [{ttft: {limit: 500ms, at: p95}}]"
    file = write_contract(tmp_path, f"workload: rag, rate: 20/s, {terms}", horizon="2m")
    out = tmp_path / "out"
    assert exits("validate", file, *SIM, "-o", out) == 0
    verdict = read_verdict(out)
    assert verdict["verdict"] == "PASS"
    assert verdict["looks"] > 1
    assert len(verdict["levels"][0]["runs"]) == verdict["looks"]


def test_a_level_that_was_shortened_is_not_extended(tmp_path: Path) -> None:
    terms = "must: [{ttft: {limit: 500ms, at: p95}}]"
    file = write_contract(tmp_path, f"workload: rag, rate: 20/s, {terms}", horizon="2m")
    out = tmp_path / "out"
    assert exits("validate", file, *SIM, "-o", out, "--duration", "1m") in (3, 4)
    assert read_verdict(out)["looks"] == 1


@pytest.mark.commands
def test_the_contract_of_the_guide_passes(tmp_path: Path) -> None:
    text = (repository_paths.ROOT / "docs" / "guides" / "proof-of-concept.md").read_text("utf-8")
    (contract,) = re.findall(r"(?m)^```yaml\n(# poc.yaml\n[\s\S]*?)^```", text)
    (tmp_path / "poc.yaml").write_text(contract)
    assert exits("validate", tmp_path / "poc.yaml", *SIM, "-o", tmp_path / "poc") == 0
    assert read_verdict(tmp_path / "poc")["verdict"] == "PASS"


@pytest.mark.commands
def test_the_contract_that_size_writes_has_a_decided_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    slo = ("--slo", "ttft:2s:p90", "--slo", "tpot:60ms:p90")
    search = ("search", "qa", *SIM, *slo, "--gpus", "4", "-d", "60s", "-o", "vm")
    assert exits(*search) == 0
    assert exits("size", "qa", "vm", "--rate", "20", "--contract", "c.yaml") == 0
    assert "SIMULATED" in Path("c.yaml").read_text("utf-8")
    assert exits("validate", "c.yaml", *SIM, "-o", "poc") == 0


def test_the_page_of_a_contract_has_the_throughput_and_names_the_hardware_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The contract is for 8 GPUs, and the simulated machine has 4."""
    file = tmp_path / "contract.yaml"
    file.write_text(
        "name: auto\ngpus: 8\nhorizon: 30s\nlevels:\n  - {name: load, workload: qa, rate: 8/s,"
        " must: [{tpot: {limit: 60ms, at: p95}}]}\n"
    )
    out = tmp_path / "out"

    assert exits("validate", file, *SIM, "-o", out, "--full") == 0

    summary = json.loads(next(out.glob("load/r1/summary.json")).read_bytes())
    tokens = summary["tokens"]
    assert summary["target"]["gpus"] == 4
    assert tokens["steady_output_per_s_per_gpu"] == pytest.approx(tokens["steady_output_per_s"] / 4)

    page = (out / "verdict.html").read_text("utf-8")
    for text in (page, capsys.readouterr().out):
        normalized_text = " ".join(text.split())
        per_gpu = format.quantity(tokens["steady_output_per_s_per_gpu"])
        assert f"{format.rate(tokens['steady_output_per_s'], ' output tok/s')}" in normalized_text
        assert f"({per_gpu} per GPU)" in normalized_text
        assert normalized_text.count("8 GPUs") == 1
        assert "the contract names 8 GPUs" in normalized_text


@pytest.mark.commands
@pytest.mark.parametrize("name", ["chatbot", "rag", "summarization"])
def test_a_packaged_contract_has_a_decided_verdict(name: str, tmp_path: Path) -> None:
    assert exits("validate", name, *SIM, "-o", tmp_path / "out") == 0
    assert read_verdict(tmp_path / "out")["verdict"] == "PASS"
