"""The text that a search, a sweep and repeats print by default."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import exits
from golden import check_golden, normalize

pytestmark = pytest.mark.commands

QA = ("qa", "--url", "sim:gb300-vm", "--seed", "1")
SEARCH = ("search", *QA, "--slo", "ttft:2s:p95", "-d", "60s", "--precision", "5%")
MAX_LINES_OF_SEARCH = 10


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("search", SEARCH),
        ("sweep", ("sweep", *QA, "-d", "20s", "-c", "8,64,512,1024")),
        ("repeats", ("run", *QA, "-d", "20s", "--request-rate", "20", "--repeat", "3")),
        ("repeated_sweep", ("sweep", *QA, "-d", "20s", "-c", "8,64", "--repeat", "2")),
    ],
)
def test_default_output_is_short(
    name: str, command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exits(*command, "-o", tmp_path / "results")

    printed = capsys.readouterr().out

    check_golden(f"{name}_brief", normalize(printed, tmp_path))
    if name == "search":
        filled_lines = [line for line in printed.splitlines() if line]
        assert len(filled_lines) <= MAX_LINES_OF_SEARCH


def test_full_output_has_every_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exits(*SEARCH, "--full", "-o", tmp_path / "results")

    printed = capsys.readouterr().out

    check_golden("search_full", normalize(printed, tmp_path))
