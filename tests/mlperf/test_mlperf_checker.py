"""The official submission checker accepts our log files.

Set LOADGEN_MLPERF_INFERENCE to a checkout of github.com/mlcommons/inference; without it the tests
are skipped.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loadgen.mlperf import log_files, result, rules, run

CHECKOUT = os.environ.get("LOADGEN_MLPERF_INFERENCE", "")
pytestmark = pytest.mark.skipif(
    not CHECKOUT, reason="needs LOADGEN_MLPERF_INFERENCE, a checkout of mlcommons/inference"
)
MS, S = 1_000_000, 1_000_000_000


def performance_check(folder: Path, scenario: str) -> tuple[bool, list[str]]:
    """Return the checker's verdict on the detail log of a directory, and its errors."""
    sys.path.insert(0, str(Path(CHECKOUT) / "tools" / "submission"))
    try:
        checks = importlib.import_module("submission_checker.checks.performance_check")
        parser = importlib.import_module("submission_checker.parsers.loadgen_parser")
        configuration = importlib.import_module("submission_checker.configuration.configuration")
    finally:
        sys.path.pop(0)
    error_lines: list[str] = []
    logger = logging.Logger("checker")
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: error_lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logs = SimpleNamespace(
        performance_log=parser.LoadgenParser(str(folder / log_files.DETAIL)),
        system_json={"system_type": "datacenter", "is_network": "false"},
        loader_data={
            "benchmark": "llama2-70b-99",
            "scenario": scenario.capitalize(),
            "division": "closed",
            "check_scenarios": True,
        },
    )
    # The checker reads errors only with the option that accepts uncommitted builds.
    config = configuration.Config("v6.0", {}, ignore_uncommited=True)
    return checks.PerformanceCheck(logger, str(folder), config, logs)(), error_lines


def written(folder: Path, scenario: Any, *, ttft_ms: int = 300, failed: int = 0) -> Path:
    """Write the logs of a run of the required size in which all queries are equal."""
    test = rules.create_test("llama2-70b", scenario, "v6.0")
    queries = (
        196_608 if scenario == "offline" else len(rules.create_schedule(test, 300.0).offsets_ns)
    )
    due = (
        np.zeros(queries, np.int64)
        if scenario == "offline"
        else rules.create_schedule(test, 300.0).offsets_ns
    )
    latency = np.full(queries, 800 * S if scenario == "offline" else 10 * S, np.int64)
    ttft = np.full(queries, ttft_ms * MS, np.int64)
    latency[:failed] = ttft[:failed] = result.UNRESOLVED
    tokens = np.full(queries, 295, np.int64)
    mlperf_result = result.judge_trace(
        result.QueryTrace(due, ttft, latency, tokens),
        test,
        result.MlperfRunFacts(dataset="none", target_qps=300.0),
    )
    run.write_result(folder, mlperf_result, test, log_files.LogContext("x", "0", datetime.now(UTC)))
    return folder


@pytest.mark.parametrize("scenario", ["server", "interactive", "offline"])
def test_a_valid_log_passes_every_performance_check(tmp_path: Path, scenario: str) -> None:
    assert performance_check(written(tmp_path, scenario), scenario) == (True, [])


def test_a_missed_limit_and_an_error_fail_the_checks(tmp_path: Path) -> None:
    late, error_lines = performance_check(written(tmp_path, "server", ttft_ms=2000), "server")

    assert not late and any("TTFT" in line for line in error_lines)
    broken, error_lines = performance_check(written(tmp_path, "server", failed=1), "server")
    assert not broken and any(
        "1 of " in line and "did not complete" in line for line in error_lines
    )
    lost, error_lines = performance_check(written(tmp_path, "server", failed=200_000), "server")
    assert not lost and not any(
        "running check" in line for line in error_lines
    )  # it reads every figure, also these
