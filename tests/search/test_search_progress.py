"""What a search prints on stderr while it runs."""

from __future__ import annotations

import os
import pty
import re
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from command_line import exits

from loadgen.runs.run_display import RunDisplay
from loadgen.telemetry.reader_process import SidecarStarter

SEARCH = ("search", "qa", "--url", "sim:gb300-vm", "--slo", "ttft:2s:p90", "--seed", "1")


def _count_trials(folder: Path) -> int:
    return len((folder / "probes.jsonl").read_bytes().splitlines())


def test_progress_in_a_pipe_has_one_line_for_each_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    exits(*SEARCH, "-d", "20s", "--no-sustain", "--max-probes", "4", "-o", out)
    lines = capsys.readouterr().err.splitlines()
    of_trials = [line for line in lines if re.match(r"Trial at ", line)]
    assert len(of_trials) == _count_trials(out)
    assert all(re.search(r"\d of (about|at most) \d", line) for line in of_trials)
    assert not [line for line in lines if line.startswith("  ")]


def test_plain_progress_also_reports_the_start_of_a_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    arguments = (*SEARCH, "-d", "20s", "--no-sustain", "--max-probes", "2", "--progress", "plain")
    exits(*arguments, "-o", out)
    lines = capsys.readouterr().err.splitlines()
    outcomes = [line for line in lines if line.startswith("  ")]
    assert len(outcomes) == _count_trials(out)


@pytest.mark.parametrize("command", ["run", "search"])
def test_progress_on_a_terminal_is_the_live_view(command: str) -> None:
    is_search = command == "search"
    leader, follower_fd = pty.openpty()
    with open(follower_fd, "w", encoding="utf-8") as terminal, redirect_stderr(terminal):
        show = RunDisplay("auto", quiet=is_search, has_line_per_step=is_search)
        assert any(isinstance(listener, SidecarStarter) for listener in show.event_handlers)
    os.close(leader)
