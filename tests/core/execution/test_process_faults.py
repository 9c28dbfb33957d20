"""Processes that die or freeze, signals, and concurrent runs lose no record and are reported."""

from __future__ import annotations

import asyncio
import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from expected_errors import refused
from msgspec.structs import replace
from processes import children
from run_fixtures import NO_PAGES, frozen_at_birth, says, when_started
from test_run import cli, ended, gone, outcomes, rows_written

from loadgen.core import run_folder
from loadgen.core.errors import TargetError
from loadgen.core.execution import run
from loadgen.core.execution.backends import worker
from loadgen.core.execution.folder_names import new_run_folder
from loadgen.core.execution.plan import Settings, Tuning
from loadgen.core.results import store
from loadgen.core.results.manifest import decode_manifest
from loadgen.core.workload import load, read_flags
from loadgen.runs import request_gaps
from loadgen.sim.server.embedded import EmbeddedServer, start
from loadgen.sim.server.options import Options

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EmbeddedServer]:
    with start(Options(ttft="5ms", itl="0.2ms")) as server:
        yield server


def to(endpoint: EmbeddedServer, folder: Path) -> Settings:
    return Settings(url=endpoint.url, model="sim", server="trtllm", out=folder / "out", **NO_PAGES)


def of(module: str, parent: int) -> int:
    """Return the process id of the child that runs a module."""
    (pid,) = (pid for pid in children(parent) if module in Path(f"/proc/{pid}/cmdline").read_text())
    return pid


@pytest.mark.processes
def test_a_killed_compactor_loses_no_record(tmp_path: Path, endpoint: EmbeddedServer) -> None:
    process = cli(tmp_path, "--url", endpoint.url, "--concurrency", "4", "--duration", "2s")
    rows_written(tmp_path, 100)
    os.kill(of("sidecars.compactor_process", process.pid), signal.SIGKILL)
    code, out, err = ended(process)

    assert code in (0, 3), err
    summary = run_folder.read_summary(tmp_path / "out")
    assert summary.requests.scheduled == summary.requests.ok >= 100
    assert says(summary.verdict.warning_codes, "store_died"), out
    second_summary = run_folder.summary(tmp_path / "out")
    assert (second_summary.requests, second_summary.ttft_ms) == (summary.requests, summary.ttft_ms)


@pytest.mark.processes
def test_a_run_whose_processes_are_all_killed_keeps_its_records(
    tmp_path: Path, endpoint: EmbeddedServer
) -> None:
    flags = ("--request-rate", "300", "-n", "3000", "--workers", "2", "--keep", "gaps")
    process = cli(tmp_path, "--url", endpoint.url, *flags)
    rows_written(tmp_path, 700)
    for pid in (process.pid, *(child_pids := children(process.pid))):
        os.kill(pid, signal.SIGKILL)
    ended(process)
    for pid in child_pids:
        gone(pid)
    written = rows_written(tmp_path, 1)  # no file of the spool is full: all are there
    requests = run_folder.summary(tmp_path / "out").requests
    last = {
        second_worker_sample.worker: second_worker_sample.sent
        for second_worker_sample in store.read_run(tmp_path / "out").seconds
    }

    assert (requests.ok, requests.lost) == (written, max(0, sum(last.values()) - written))

    stored = request_gaps.read_run_with_gaps(tmp_path / "out")
    several = stored.rows["slot"][stored.rows["output_events"] > 1].tolist()
    assert set(several) <= set(stored.gaps_ns_by_slot or {}), "what was recorded has its gaps"
    assert requests.scheduled < 3000, "what was due after the kill was never asked for"
    assert decode_manifest((tmp_path / "out" / "run.json").read_bytes()).state == "running"


@pytest.mark.processes
def test_a_frozen_worker_is_ended_and_reported(tmp_path: Path, endpoint: EmbeddedServer) -> None:
    (tmp_path / "w.yaml").write_text("name: t\nrequests: {input_tokens: 20, output_tokens: 8}\n")

    def freeze(_: Any) -> None:
        (pid,) = (
            pid for pid in children(os.getpid()) if b"backends.worker\x00" in worker_of(pid, 0)
        )
        asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGSTOP)

    def worker_of(pid: int, number: int) -> bytes:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        holds = (os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
        return line if any(name.endswith(f"w{number}.rows") for name in holds) else b""

    workload = load(
        str(tmp_path / "w.yaml"),
        read_flags(seed="7", warmup="0", request_rate="200", num_requests="300"),
    )
    settings = replace(to(endpoint, tmp_path), workers=2, tuning=Tuning(frozen_s=3.0))
    summary, out = run.execute(workload, settings, when_started(freeze))
    counts = outcomes(store.read_run(out).rows)
    assert counts["ok", ""] + counts["lost", "worker_died"] == 300
    assert counts["lost", "worker_died"] > 20
    assert "worker 0 did not respond" in summary.requests.by_error["worker_died"].first_text


@pytest.mark.processes
def test_a_worker_frozen_before_it_is_ready_is_ended_and_reported(
    tmp_path: Path, endpoint: EmbeddedServer
) -> None:
    """Frozen before it has read its job, which is longer than a pipe holds."""
    (tmp_path / "w.yaml").write_text(
        f"name: t\ndescription: {'x' * 100_000}\nrequests: {{input_tokens: 20, output_tokens: 8}}\n"
    )
    workload = load(
        str(tmp_path / "w.yaml"),
        read_flags(seed="7", warmup="0", request_rate="200", num_requests="300"),
    )
    settings = replace(to(endpoint, tmp_path), workers=2, tuning=Tuning(frozen_s=0.5))
    with (
        frozen_at_birth("backends.worker", 2) as pids,
        refused(TargetError, "process_failed", "--workers"),
    ):
        run.execute(workload, settings)

    assert [Path(f"/proc/{pid}").exists() for pid in pids] == [False, False]
    assert not (tmp_path / "out").exists(), "nothing was sent: the same command can be given again"


@pytest.mark.processes
def test_a_frozen_compactor_is_ended_and_reported(tmp_path: Path, endpoint: EmbeddedServer) -> None:
    (tmp_path / "w.yaml").write_text("name: t\nrequests: {input_tokens: 20, output_tokens: 8}\n")
    workload = load(
        str(tmp_path / "w.yaml"),
        read_flags(seed="7", warmup="0", request_rate="200", num_requests="100"),
    )
    settings = replace(
        to(endpoint, tmp_path),
        tuning=Tuning(helper_frozen_s=0.5, compacted_rows=0),
    )
    freeze = when_started(
        lambda _: os.kill(of("sidecars.compactor_process", os.getpid()), signal.SIGSTOP)
    )
    summary, _ = run.execute(workload, settings, freeze)

    assert summary.requests.ok == 100
    assert [
        code.values["why"].partition(" and ")[0]
        for code in summary.verdict.warning_codes
        if code.code == "store_died"
    ] == ["did not respond for 0.5 s"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGTERM, "1"), (signal.SIGHUP, "2")]
)  # SIGINT: test_run.py
def test_sigterm_and_sighup_interrupt_a_run_like_ctrl_c(
    tmp_path: Path, endpoint: EmbeddedServer, number: int, workers: str
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        process = cli(
            tmp_path,
            "--url",
            endpoint.url,
            "--request-rate",
            "200",
            "-n",
            "4000",
            "--workers",
            workers,
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    rows_written(tmp_path, 20)
    process.send_signal(number)
    code, _, err = ended(process)

    assert (code, "Traceback" in err) == (130, False), err
    stored = store.read_run(tmp_path / "out")
    assert stored.manifest.state == "interrupted"
    assert set(outcomes(stored.rows)) == {("ok", ""), ("cancelled", "interrupted")}
    assert (tmp_path / "out" / "summary.json").exists()


@pytest.mark.processes
def test_signals_after_the_load_disturb_no_worker(tmp_path: Path, endpoint: EmbeddedServer) -> None:
    """A worker that is interrupted repeatedly while it ends still returns its result."""
    process = cli(
        tmp_path, "--url", endpoint.url, "--request-rate", "100", "-n", "4000", "--workers", "2"
    )
    rows_written(tmp_path, 10)
    pids = [
        pid
        for pid in children(process.pid)
        if "backends.worker" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    while process.poll() is None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        select.select([], [], [], 0.0005)
    code, _, err = ended(process)

    assert (code, "Traceback" in err, "died" in err) == (130, False, False), err


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_interrupt_before_the_load_leaves_no_run_folder(
    tmp_path: Path, endpoint: EmbeddedServer, workers: str
) -> None:
    process = cli(
        tmp_path, "--url", endpoint.url, "--request-rate", "50", "-n", "4000", "--workers", workers
    )
    while (
        not (tmp_path / "out" / "run.json").exists() and process.poll() is None
    ):  # before the first worker starts
        select.select([], [], [], 0.001)
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)

    assert (code, "interrupted" in err, "Traceback" in err) == (130, True, False), err

    begun = (
        tmp_path / "out" / "summary.json"
    ).exists()  # a busy host delivers the signal after the load has begun

    assert begun == (tmp_path / "out").exists()


INTERRUPTED_AS_THE_LOAD_BEGINS = """
import os, signal
from loadgen.core.execution import shard

clock = shard.monotonic_ns
def interrupted_clock():  # first read for the instant at which the load is to begin
    shard.monotonic_ns = clock
    os.kill(os.getpid(), signal.SIGTERM)
    return clock()
shard.monotonic_ns = interrupted_clock

from loadgen.__main__ import main
main()
"""


@pytest.mark.processes
def test_an_interrupt_as_the_load_begins_leaves_no_run_folder(
    tmp_path: Path, endpoint: EmbeddedServer
) -> None:
    """It was heard when the load was said to have begun: a folder without a summary stayed."""
    command = [
        sys.executable,
        "-P",
        "-c",
        INTERRUPTED_AS_THE_LOAD_BEGINS,
        "run",
        "qa",
        "--url",
        endpoint.url,
    ]
    process = subprocess.Popen(
        [*command, "-n", "400", "-o", "out"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    code, _, err = ended(process)

    assert (code, "interrupted" in err, "Traceback" in err) == (130, True, False), err
    assert not (tmp_path / "out").exists()


@pytest.mark.processes
def test_sighup_stays_ignored_under_nohup(tmp_path: Path, endpoint: EmbeddedServer) -> None:
    process = cli(
        tmp_path, "--url", endpoint.url, "--request-rate", "100", "-n", "100", before=("nohup",)
    )
    rows_written(tmp_path, 10)
    process.send_signal(signal.SIGHUP)
    code, out, err = ended(process)
    assert (code in (0, 3), "100 succeeded" in out) == (True, True), err
    are_for_their_user_alone(tmp_path)


@pytest.mark.processes
def test_two_simultaneous_runs_with_one_output_folder_get_separate_folders(
    tmp_path: Path, endpoint: EmbeddedServer
) -> None:
    """The second begins while the first has not even probed its target."""
    with new_run_folder(tmp_path / "out", "first", datetime.now()) as first:
        code, _, err = ended(
            cli(tmp_path, "--url", endpoint.url, "--request-rate", "200", "-n", "100")
        )
        assert code in (0, 3), err
        assert (first, [*first.iterdir()]) == (tmp_path / "out", [])
    (second_parent,) = (path.parent for path in tmp_path.glob("out-*/summary.json"))
    assert len(store.read_run(second_parent).rows) == 100


def are_for_their_user_alone(folder: Path) -> None:
    files = [path for path in (folder / "out").rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert [path for path in files if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize(
    "input_bytes", [b"", b"\x09", (100).to_bytes(8, "little") + b"cut", bytes(8), bytes(8) + b"0 2"]
)
def test_a_worker_whose_command_ended_before_assigning_work_prints_nothing(
    input_bytes: bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A traceback of it stood below "interrupted"."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input_bytes)))
    worker._main()
    assert capfd.readouterr() == ("", "")
