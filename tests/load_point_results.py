"""Load points of sweeps, for tests of the analysis of a sweep."""

from __future__ import annotations

from typing import Any

from loadgen.runs.load_point_results import LoadPointResult


def make_load_point_result(**fields: Any) -> LoadPointResult:
    """Return a valid load point of a finished run, with these fields in place of the defaults."""
    defaults: dict[str, Any] = {
        "ok": 1,
        "failed": 0,
        "requests_per_s": 1.0,
        "per_gpu": None,
        "ttft_p50": 1.0,
        "ttft_p99": 2.0,
        "tpot_p50": 1.0,
        "tpot_p99": 2.0,
        "e2e_p50": 9.0,
        "unsupported": (),
        "slo_attainment": None,
        "slo_met": None,
        "valid": True,
        "state": "finished",
        "simulated": False,
    }
    return LoadPointResult(**(defaults | fields))
