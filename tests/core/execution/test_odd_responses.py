"""Runs against servers whose responses are right and unusual, from the socket to the summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scripted_server

import loadgen

pytestmark = pytest.mark.processes

LOAD: dict[str, Any] = {
    "server_metrics": "off",
    "energy": "off",
    "model": "m",
    "num_requests": 12,
    "concurrency": 2,
    "input_tokens": 16,
    "output_tokens": 2,
    "warmup": 0,
    "seed": 1,
    # The server answers at once, so that a busy host would withhold its latencies.
    "limit": ["stamp_error_share:100%"],
}
COUNTS = {"prompt_tokens": 16, "completion_tokens": 2, "total_tokens": 18}


def piece(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def stream(*pieces: dict[str, Any], finish: str = "length", **counts: Any) -> bytes:
    usage = {"choices": [], "usage": COUNTS | counts}
    return scripted_server.events(*pieces, piece(finish), usage)


def summary_of(response: bytes, out: Path, **options: Any) -> Any:
    with scripted_server.serving(response) as server:
        return loadgen.run(url=server.url, out=str(out), **LOAD | options).summary


def warnings_of(summary: Any) -> dict[str, dict[str, Any]]:
    return {code.code: code.values for code in summary.verdict.warning_codes}


TEXT = (piece(content="a"), piece(content="b"))


@pytest.mark.parametrize("reason", ["eos", "end_turn", "STOP", "x" * 100])
def test_an_unknown_finish_reason_is_counted_under_its_name(tmp_path: Path, reason: str) -> None:
    summary = summary_of(stream(*TEXT, finish=reason), tmp_path / "r")
    assert summary.requests.ok == 12
    assert summary.requests.by_finish == {reason[:60]: 12}


def test_cached_tokens_above_prompt_tokens_are_reported_and_not_used(tmp_path: Path) -> None:
    response = stream(*TEXT, prompt_tokens_details={"cached_tokens": 2455})
    summary = summary_of(response, tmp_path / "r")
    assert summary.tokens.cached_share is None
    assert "server" not in summary.tokens.sources.input
    assert summary.tokens.sources.output == {"server": 12}
    assert warnings_of(summary)["responses_remarked"]["responses"] == 12


def test_usage_whose_total_is_not_its_sum_is_not_used(tmp_path: Path) -> None:
    summary = summary_of(stream(*TEXT, total_tokens=400), tmp_path / "r")
    assert "server" not in summary.tokens.sources.input | summary.tokens.sources.output
    assert {"usage_missing", "responses_remarked"} <= warnings_of(summary).keys()


def test_output_in_unknown_fields_leaves_ttft_undecided(tmp_path: Path) -> None:
    thoughts = [piece(thinking="hm") for _ in range(4)]
    for name, pieces in (("hidden", thoughts), ("partly", [*thoughts, *TEXT])):
        response = stream(*pieces, completion_tokens=6, total_tokens=22)
        summary = summary_of(response, tmp_path / name, output_tokens=6, slo=["ttft:10s:p50"])
        assert summary.requests.ok == 12
        assert summary.ttft_ms.p50 is None and summary.goodput.met is None
        assert "ttft" in summary.withheld_metrics
        assert "thinking" in warnings_of(summary)["responses_remarked"]["remark"]


def test_one_object_where_a_stream_was_requested_leaves_ttft_undecided(tmp_path: Path) -> None:
    message = {"message": {"content": "ab"}, "finish_reason": "stop"}
    response = scripted_server.answer({"choices": [message], "usage": COUNTS})
    summary = summary_of(response, tmp_path / "r", slo=["ttft:10s:p50"])
    assert summary.requests.ok == 12 and summary.ttft_ms.p50 is None
    assert summary.e2e_ms.p50 is not None
    assert summary.goodput.met is None and "ttft" in summary.withheld_metrics
    assert warnings_of(summary)["responses_remarked"]["responses"] == 12


def test_bytes_that_are_not_utf_8_are_counted(tmp_path: Path) -> None:
    response = stream(*TEXT).replace(b'"a"', b'"\xff"')
    summary = summary_of(response, tmp_path / "r")
    assert summary.requests.ok == 12
    assert warnings_of(summary)["responses_remarked"]["responses"] == 12
