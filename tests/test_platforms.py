"""A client runs on macOS, and says what it cannot measure there. Windows is refused.

The commands run in processes that lack what Linux has and macOS does not. See
`macos/sitecustomize.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.cli.app import main
from loadgen.core.metrics.reasons import SENTENCES
from loadgen.sim.server.embedded import start
from loadgen.sim.server.options import Options

ROOT = Path(__file__).parent.parent
MACOS = Path(__file__).parent / "macos"
SLOW_ENOUGH = Options(ttft="20ms", itl="5ms")

CALL_WITH_SDK = """
import asyncio, select, sys
from loadgen_sdk import Client
async def call(url):
    async with Client(url) as client:
        response = await client.complete("Hello")
    return response
assert sys.platform == "darwin" and not hasattr(select, "epoll")
print(asyncio.run(call(sys.argv[1])).text)
"""


def run_on_macos(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a process that resembles one on macOS."""
    search_path = os.pathsep.join([str(MACOS), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env=os.environ | {"PYTHONPATH": search_path.rstrip(os.pathsep)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def loadgen_on_macos(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of loadgen in a process that resembles one on macOS."""
    return run_on_macos("-m", "loadgen", *arguments)


@pytest.mark.processes
def test_the_simulated_macos_process_has_neither_proc_nor_epoll() -> None:
    program = "import fcntl, os, select, sys; os.listdir('/proc/self')"
    process = run_on_macos("-c", program)
    assert "FileNotFoundError" in process.stderr
    program = "import select, sys; print(sys.platform, hasattr(select, 'epoll'))"
    assert run_on_macos("-c", program).stdout.split() == ["darwin", "False"]


@pytest.mark.processes
@pytest.mark.parametrize(
    "load",
    [
        ("--request-rate", "20"),
        ("--concurrency", "4"),
        ("--concurrency", "4", "--workers", "2"),
    ],
    ids=" ".join,
)
def test_a_load_is_sent_on_macos(tmp_path: Path, load: tuple[str, ...]) -> None:
    with start(SLOW_ENOUGH) as endpoint:
        process = loadgen_on_macos(
            "run",
            "--url",
            endpoint.url,
            "--isl",
            "50",
            "--osl",
            "20",
            *load,
            "-n",
            "60",
            "-o",
            str(tmp_path / "out"),
        )
    summary = json.loads((tmp_path / "out/summary.json").read_text("utf-8"))

    assert summary["requests"]["ok"] >= 60, process.stderr
    assert summary["requests"]["failed"] == 0
    assert summary["client"]["kernel_stamp_share"] == 0
    assert summary["unsound"] == dict.fromkeys(
        ("client_lag", "stalls"), SENTENCES["no_kernel_times"]
    )
    assert summary["client_lag_ms"]["p50"] is None
    assert summary["stalls"]["requests"] is None
    assert summary["ttft_ms"]["min"] >= 20
    caveat = " ".join(process.stdout.split())
    assert "Receive delay, stalls not reported" in caveat


@pytest.mark.processes
def test_doctor_reports_on_macos_that_kernel_timestamps_are_missing() -> None:
    with start(SLOW_ENOUGH) as endpoint:
        process = loadgen_on_macos("doctor", "--url", endpoint.url, "--full")
    assert "timestamps responses when" in " ".join(process.stdout.split()), process


@pytest.mark.processes
def test_the_sdk_calls_a_server_on_macos() -> None:
    with start(SLOW_ENOUGH) as endpoint:
        process = run_on_macos("-c", CALL_WITH_SDK, endpoint.url)
    assert process.stdout.strip(), process.stderr


@pytest.mark.processes
def test_stored_results_can_be_read_on_macos(tmp_path: Path) -> None:
    summary = (ROOT / "tests/data/summary_example_rag_gpus.json").read_bytes()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_bytes(summary)
    for command in (("report", "a"), ("compare", "a", "b")):
        process = loadgen_on_macos(command[0], *(str(tmp_path / name) for name in command[1:]))
        assert process.returncode in (0, 1, 3), process.stderr
        assert "TTFT" in process.stdout.upper()
    virtual = loadgen_on_macos(
        "run", "qa", "--url", "sim:gb300-vm", "-n", "20", "-o", str(tmp_path / "out")
    )

    assert "Measurement  valid" in virtual.stdout, virtual.stderr


def test_windows_is_refused_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as exc_info:
        main(["report", "x"])
    assert exc_info.value.code == 2
    assert "WSL2" in capsys.readouterr().err
