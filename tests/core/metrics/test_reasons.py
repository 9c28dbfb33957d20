"""The sentences of verdicts, and how those of several reasons are joined."""

from __future__ import annotations

from loadgen.core.metrics.reasons import format_reason, join_reasons
from loadgen.core.results.manifest import ReasonCode


def test_joined_reasons_have_all_findings_before_each_different_advice() -> None:
    joined = join_reasons(
        [
            "Sent late. Lower the load. Or wait",
            "Uncertain. Lower the load. Or wait",
            "Worker 3 died",
            "Worker 3 died",
            "Busy. Use more --workers",
        ]
    )

    assert joined == (
        "Sent late. Uncertain. Worker 3 died. Busy. Lower the load. Or wait. Use more --workers"
    )
    assert join_reasons([]) == ""


def test_only_single_statistics_are_called_inexact() -> None:
    def describe_withheld(statistics: list[str]) -> str:
        values = {"statistics": {"ttft": statistics}, "why": "late"}
        return format_reason(ReasonCode(code="withheld", values=values))

    assert describe_withheld(["p95"]) == "TTFT (p95) not reported exactly: late"
    assert describe_withheld([]) == "TTFT not reported: late"
