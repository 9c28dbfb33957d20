"""Systems other than Linux can read results; commands that send load say what they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.cli.app import main
from loadgen.sim.server.embedded import start
from loadgen.sim.server.options import Options

ROOT = Path(__file__).parent.parent
ELSEWHERE = """
import os, select, socket, sys
for module, names in (
    (select, ["epoll", "EPOLLIN", "EPOLLOUT", "EPOLLERR", "EPOLLHUP", "EPOLLET"]),
    (os, ["sched_getaffinity", "eventfd", "timerfd_create"]),
    (socket, ["SO_TIMESTAMPNS", "TCP_QUICKACK"]),
):
    for name in filter(module.__dict__.get, names):
        delattr(module, name)
from loadgen.cli.app import main
main(sys.argv[1:])
"""


def on_macos(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the modules and functions that Linux has and macOS lacks."""
    return subprocess.run(
        [sys.executable, "-P", "-c", ELSEWHERE, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.processes
def test_load_takes_linux_and_says_so(tmp_path: Path) -> None:
    with start(Options(ttft="1ms", itl="0")) as endpoint:
        done = on_macos("run", "qa", "--url", endpoint.url, "-n", "3", "-o", str(tmp_path / "out"))
    assert (done.returncode, "sending load needs Linux" in done.stderr, "bug" in done.stderr) == (
        3,
        True,
        False,
    ), done.stderr


@pytest.mark.processes
def test_what_is_stored_can_be_read_on_macos(tmp_path: Path) -> None:
    summary = (ROOT / "tests/data/summary_example_rag_gpus.json").read_bytes()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_bytes(summary)
    for command in (("report", "a"), ("compare", "a", "b")):
        done = on_macos(command[0], *(str(tmp_path / name) for name in command[1:]))
        assert done.returncode in (0, 1, 3), done.stderr
        assert "TTFT" in done.stdout.upper()
    virtual = on_macos(
        "run", "qa", "--url", "sim:gb300-vm", "-n", "20", "-o", str(tmp_path / "out")
    )
    assert "Measurement  valid" in virtual.stdout, virtual.stderr


def test_windows_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as left:
        main(["report", "x"])
    assert left.value.code == 2
    assert "WSL2" in capsys.readouterr().err
