"""Requests that exceed the context length are reported before the load, by task."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from command_line import exits
from loadgen_sdk.probe.http_types import HttpResponse
from loadgen_sdk.probe.model_list import ModelList
from servers import start

from loadgen.contracts import prediction
from loadgen.contracts.loading import load_contract
from loadgen.core.errors import CombinedError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.requests import lengths
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.workload import load, read_flags
from loadgen.doctor import doctor
from loadgen.sim.server.options import Options


def ends(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = exits(*arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    "call",
    [
        ("run", "coding-agent"),
        ("run", "coding-agent", "--dry-run"),
        ("sweep", "research-agent", "--request-rate", "1,2"),
        ("search", "coding-agent", "--slo", "ttft:2s"),
    ],
)
def test_a_load_above_the_context_length_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: tuple[str, ...]
) -> None:
    out = [] if "--dry-run" in call else ["--out", str(tmp_path / "out")]
    code, _, stderr = ends(capsys, *call, "--url", "sim:gb300-vm", "--seed", "1", *out)
    assert code == 2
    assert "context length of llama-2-70b" in stderr
    assert "4,096 allowed" in stderr
    assert "--url sim:gb300-vm-128k" in stderr


def test_the_forecast_of_a_contract_names_a_load_point_above_the_context_length(
    tmp_path: Path,
) -> None:
    (tmp_path / "c.yaml").write_text(
        "name: c\n"
        "horizon: 5s\n"
        "levels:\n"
        "  - {name: agents, workload: coding-agent, rate: 1/s, requests: 30, "
        "must: [{task_time: {limit: 90s, at: p50}}]}\n"
    )
    checked = load_contract(tmp_path / "c.yaml", env={})
    options = prediction.ForecastOptions(execute=execute, seed=1, max_length_factor=1.0)
    (level,) = prediction.forecast_levels(checked, Settings(url="sim:gb300-vm"), options)

    assert level.fault_codes == ("over_context",)
    assert "context length of llama-2-70b" in level.failure_reason
    (level,) = prediction.forecast_levels(checked, Settings(url="sim:gb300-vm-128k"), options)
    assert not level.failure_reason


SHORT = "--isl 40 --osl 8 --request-rate 20 -n 20 --seed 1 --server-metrics off --energy off"


@pytest.mark.processes
def test_the_context_length_is_read_from_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(Options(max_seq_len=512, ttft="1ms", itl="0.1ms")) as server:
        fits = ("run", *SHORT.split(), "--url", server.url, "--out")
        code, _, stderr = ends(capsys, *fits, str(tmp_path / "fits"))

        assert code in (0, 3), "on a busy machine the run is not valid"
        code, _, stderr = ends(capsys, *fits, str(tmp_path / "long"), "--isl", "506")
        assert code == 2
        assert "20 of the 20 requests" in stderr and "512" in stderr

        few = tmp_path / "few.yaml"
        few.write_text(
            "name: few\nlimits: {failure_share: 40%}\nrequests: {output_tokens: 8, input_tokens: "
            "{empirical: {values: [40, 520], weights: [9, 1]}}}\n"
            "stages: [{arrival: {poisson: 50/s}, count: 60}]\n"
        )
        code, out, stderr = ends(
            capsys,
            "run",
            str(few),
            "--url",
            server.url,
            "--out",
            str(tmp_path / "few"),
            "--seed",
            "1",
            "--json",
        )
        failed = json.loads(out)["requests"]["by_error"]["http_4xx"]["count"]

        assert f"Warning: {failed} of the 60 requests" in stderr

        findings_by_name = {
            finding.check: finding
            for finding in asyncio.run(doctor.collect_findings(Settings(url=server.url)))
        }

        assert "512 tokens" in findings_by_name["context"].observed


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        ([{"id": "m", "max_model_len": 8192}], 8192),
        ([{"id": "m", "max_model_len": 8192.0}], 8192),
        ([{"id": "m", "context_window": 32768}], 32768),
        ([{"id": "m", "parent": "base"}, {"id": "base", "max_model_len": 4096}], 4096),
        ([{"id": "m", "max_model_len": None}, {"id": "other", "max_model_len": 5}], None),
        ([{"id": "m", "max_model_len": True, "context_length": 131072}], 131072),
        ("none", None),
    ],
)
def test_the_context_length_is_that_of_the_selected_model(rows: object, tokens: int | None) -> None:
    models = ModelList(HttpResponse(200, {}, json.dumps({"data": rows}).encode()))
    assert models.max_context("m") == tokens


def test_a_dry_run_lists_the_lengths_of_tasks_and_classes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, stdout, _ = ends(
        capsys, "run", "coding-agent", "--dry-run", "--seed", "1", "--url", "sim:gb300-vm-128k"
    )

    assert code == 0
    assert "load: poisson 0.5/s: 60 tasks, 967 requests" in stdout
    assert "a task: 7 to 25 requests" in stdout
    assert "largest context 33,535" in stdout
    _, stdout, _ = ends(capsys, "run", "mixed", "--dry-run", "--seed", "1", "--url", "sim:gb300-vm")
    assert "480 starts, 543 requests" in stdout
    assert "agentic: 5.0 % of all sessions, 15.1 %" in stdout


def test_the_lengths_of_a_load_equal_those_of_its_requests() -> None:
    workload = load("mixed", read_flags(seed="1"))
    prompts = build_prompts(workload, 1, 1, load_tokenizer())
    first = lengths.first_request_lengths(prompts, 100)

    assert len(first) == 100

    for number, requested_lengths in first.items():
        request = prompts[number]
        assert (requested_lengths.input_tokens, requested_lengths.output_tokens) == (
            request.input_tokens,
            request.max_tokens,
        )
    tasks = lengths.task_lengths(prompts, first)

    assert {task.requests for task in tasks} == {4} and {task.input_tokens for task in tasks} == {
        9000
    }
    shares = list(lengths.class_shares(prompts, first))  # type: ignore[arg-type]
    assert sum(class_share.requests for class_share in shares) == pytest.approx(1)
    assert sum(class_share.tokens for class_share in shares) == pytest.approx(1)


def test_a_load_above_the_context_length_leaves_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(CombinedError) as exc_info:
        execute(
            load("coding-agent", read_flags(seed="1")),
            Settings(url="sim:gb300-vm", out=tmp_path / "out"),
        )
    assert [fault.code for fault in exc_info.value.errors] == ["over_context"]
    assert not (tmp_path / "out" / "run.json").exists()
