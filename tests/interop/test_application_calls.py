"""Calls of an application, written by the SDK, as a table by label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import exits
from loadgen_sdk import Measurement

MS = 1_000_000


def report(*arguments: str) -> int:
    return exits("report", *arguments)


def call(ttft_ms: int, labels: dict[str, str], **more: Any) -> str:
    fields: dict[str, Any] = {
        "api": "chat",
        "streamed": True,
        "status": "ok",
        "started": 0,
        "started_unix_ns": 1,
        "sent": 0,
        "first_token": ttft_ms * MS,
        "last_token": (ttft_ms + 90) * MS,
        "end": (ttft_ms + 90) * MS,
        "done": (ttft_ms + 90) * MS,
        "instants": (ttft_ms * MS, (ttft_ms + 90) * MS),
        "input_tokens": 5,
        "output_tokens": 10,
        "token_source": "server",
        "cost": 0.5,
        "labels": labels,
    }
    return Measurement(**{**fields, **more}).to_json()


def test_the_report_groups_application_calls_by_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "calls.jsonl"
    lines = [call(ttft, {"feature": "search"}) for ttft in range(10, 30)]
    lines += [call(100, {"feature": "chat", "user": f"u{n}"}) for n in range(25)]
    lines.append(
        call(1, {}, status="failed", first_token=-1, last_token=-1, end=-1, instants=(), cost=None)
    )
    file.write_text("\n".join(lines) + "\n")

    assert report(str(file)) == 0

    stdout_lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line.split() for line in stdout_lines if line}
    assert rows["all calls"][2:6] == ["46", "45", "100", "~100"]
    assert rows["chat"][1:] == [
        "25",
        "25",
        "100",
        "~100",
        "10.0",
        "190",
        "~190",
        "125",
        "250",
        "12.5",
    ]
    assert rows["search"][1:4] == ["20", "20", "20.0"] and rows["(none)"][1:3] == ["21", "20"]
    assert (
        rows["(others)"][1] == "6"
        and sum(line.startswith("u") and "  1  " in line for line in stdout_lines) == 19
    )
    assert report(str(file), "--json") == 0
    (groups,) = [json.loads(capsys.readouterr().out)]
    assert groups[1]["label"] == "feature" and groups[1]["ttft_ms"]["p50"] == 100.0


def test_an_invalid_application_call_is_reported_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "calls.jsonl"
    file.write_text(call(1, {}) + '\n{"api": 1}\n')
    assert report(str(file)) == 2
    assert "calls.jsonl:2" in capsys.readouterr().err
