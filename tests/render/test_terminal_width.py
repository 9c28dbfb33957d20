"""Text follows the width of the terminal, from 60 columns on."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path
from struct import pack

import pytest
import repository_paths
from command_line import exits
from msgspec.structs import replace

from loadgen.cli.output import MAX_COLUMNS, MIN_COLUMNS, text_width
from loadgen.core.metrics.summary import load_summary
from loadgen.render import text as as_text
from loadgen.render.section import Report, Table, section
from loadgen.runs import text
from loadgen.runs.progress import ProgressFacts, describe_progress

SUMMARIES = ("summary_example_qa_api.json", "summary_example_rag_gpus.json")
FACTS = ProgressFacts(
    elapsed_s=1.0,
    done=123_456,
    planned=1_234_567,
    in_flight=12_345,
    events_per_s=123_456.0,
    ttft_p50_ms=1_234.5,
    ttft_p99_ms=12_345.6,
    failed=12,
    cancelled=0,
    dropped=13,
    left_s=1_234.0,
    drain_left_s=None,
)


@pytest.mark.parametrize("width", [60, 72, 100, 140])
@pytest.mark.parametrize("name", SUMMARIES)
def test_no_line_of_a_report_is_wider_than_the_terminal(name: str, width: int) -> None:
    report = text.report(load_summary((repository_paths.DATA / name).read_bytes()))
    lines = as_text.render(report, width=width).splitlines()
    too_wide = [line for line in lines if len(line) > width and " " in line.strip()]
    assert too_wide == []
    assert max(map(len, lines)) > width * 0.8


def test_a_table_that_is_too_wide_continues_below_with_its_labels() -> None:
    head = ("metric", *(f"column {number}" for number in range(9)))
    rows = [("TTFT", *("1,234.5" for _ in range(9))), ("TPOT", *("6.7" for _ in range(9)))]
    report = Report(title="t", generated_by="", sections=[section("", Table(head, rows))])
    lines = as_text.render(report, width=60).splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert sum(line.startswith("TTFT") for line in lines) > 1
    split_text = " ".join(lines).split()
    assert split_text.count("1,234.5") == split_text.count("6.7") == 9


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 200])
def test_a_status_line_never_wraps(columns: int) -> None:
    for left_s in (1_234.0, -1.0, None):
        line = describe_progress(replace(FACTS, left_s=left_s), columns)
        assert len(line) < columns


def test_text_for_a_pipe_has_a_fixed_width_and_for_a_terminal_its_width() -> None:
    assert text_width(io.StringIO()) == 100

    leader, follower_fd = pty.openpty()
    try:
        with open(follower_fd, "w", closefd=False) as terminal:
            for requested_columns, expected in ((40, MIN_COLUMNS), (72, 72), (900, MAX_COLUMNS)):
                fcntl.ioctl(
                    follower_fd, termios.TIOCSWINSZ, pack("HHHH", 30, requested_columns, 0, 0)
                )
                assert text_width(terminal) == expected
    finally:
        os.close(leader)
        os.close(follower_fd)


@pytest.mark.processes
def test_the_output_of_a_command_fits_its_terminal(tmp_path: Path) -> None:
    run = ("run", "qa", "--url", "sim:gb300-vm", "-c", "2", "-n", "20", "-o", tmp_path / "run")

    assert exits(*run) == 0

    leader, follower_fd = pty.openpty()
    fcntl.ioctl(follower_fd, termios.TIOCSWINSZ, pack("HHHH", 30, 64, 0, 0))
    command = [sys.executable, "-m", "loadgen", "report", str(tmp_path / "run"), "--no-html"]
    with subprocess.Popen(command, stdout=follower_fd, stderr=subprocess.DEVNULL) as process:
        os.close(follower_fd)
        output = b""
        while True:
            try:
                data = os.read(leader, 65_536)
            except OSError:
                break
            if not data:
                break
            output += data
    os.close(leader)

    assert process.returncode == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", output.decode()).splitlines()
    assert max(len(line) for line in lines if " " in line.strip()) <= 64
