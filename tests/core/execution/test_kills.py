"""Commands that are killed at a random instant keep all but the last 2 s of their records.

CI kills a few; `pytest -m kills` kills 50 instants of every command and way of keeping rows.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, monotonic_ns

import pytest
from processes import children
from servers import log

from loadgen.core import run_folder
from loadgen.sim.server.embedded import EmbeddedServer, start
from loadgen.sim.server.options import Options
from loadgen.sim.server.send_log import SentRequests

LOST_S = 2.0  # of what was finished before the kill
ORPHANS_S = 15.0
LOAD = ("--request-rate", "150/s", "--warmup", "0", "--workers", "2", "--grace", "1s")
COMMANDS = {
    "run": ("run", "{workload}", *LOAD, "-n", "1500"),
    "soak": (
        "run",
        "{workload}",
        *LOAD,
        "-d",
        "10m",
    ),  # a load without an end in sight, as a soak test is
    "sweep": (
        "sweep",
        "{workload}",
        "--request-rate",
        "50,75,100",
        "-d",
        "2s",
        "--warmup",
        "0",
        "--grace",
        "1s",
        "--seed",
        "5",
    ),
    "search": (
        "search",
        "{workload}",
        "--slo",
        "ttft:1s:p90",
        "--start",
        "50",
        "--max-probes",
        "3",
        "-d",
        "3s",
        "--grace",
        "1s",
        "--seed",
        "5",
    ),
    "validate": ("validate", "{contract}", "--seed", "5"),
}
WORKLOAD = """
name: kills
requests: {input_tokens: 60, output_tokens: 30}
"""
CONTRACT = """
name: kills
horizon: 1s
levels:
  - {name: a, workload: w.yaml, rate: 40/s, duration: 4s, warmup: 0, grace: 1s,
     must: [{ttft: {limit: 5s, at: p90}}]}
  - {name: b, workload: w.yaml, rate: 60/s, duration: 4s, warmup: 0, grace: 1s,
     must: [{ttft: {limit: 5s, at: p90}}]}
"""
KILLED = ("main", "worker", "compactor", "all")
KEEPS = ("raw", "gaps")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EmbeddedServer]:
    with start(Options(ttft="5ms", itl="0.2ms", log_bodies=True, log_events="ends")) as server:
        yield server


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "killed", "keep", "seed"),
    [
        ("run", "all", "gaps", 1),
        ("soak", "main", "raw", 2),
        ("soak", "worker", "raw", 3),
        ("soak", "compactor", "gaps", 4),
        ("sweep", "all", "raw", 5),
        ("search", "main", "raw", 6),
        ("validate", "all", "raw", 7),
    ],
)
def test_killed_commands_keep_their_records(
    tmp_path: Path, endpoint: EmbeddedServer, command: str, killed: str, keep: str, seed: int
) -> None:
    check(tmp_path, endpoint, command, killed, keep, seed)


@pytest.mark.optional
@pytest.mark.processes
@pytest.mark.kills
@pytest.mark.parametrize(
    ("command", "keep"),
    [
        (command, keep)
        for command in COMMANDS
        for keep in (KEEPS if command in ("run", "soak") else ("raw",))
    ],
)
@pytest.mark.parametrize("seed", range(50))
def test_commands_killed_at_any_of_fifty_instants_keep_their_records(
    tmp_path: Path, endpoint: EmbeddedServer, command: str, keep: str, seed: int
) -> None:
    check(tmp_path, endpoint, command, KILLED[seed % len(KILLED)], keep, seed)


def check(
    folder: Path, endpoint: EmbeddedServer, command: str, killed: str, keep: str, seed: int
) -> None:
    draw = random.Random(f"{command} {keep} {seed}")
    out = folder / "out"
    (folder / "c.yaml").write_text(CONTRACT)
    (folder / "w.yaml").write_text(WORKLOAD)
    command_line = [
        word.format(contract=folder / "c.yaml", workload=folder / "w.yaml")
        for word in COMMANDS[command]
    ]
    flags = ["--url", endpoint.url, "--out", str(out), "--server-metrics", "off", "--energy", "off"]
    flags += ["--keep", keep] if command in ("run", "soak") else []
    log(endpoint)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "loadgen", *command_line, *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=folder,
    )
    wait(lambda: any(out.rglob("w0.rows")) or process.poll() is not None)
    pause(draw.uniform(0.2, 25.0 if command == "soak" and seed >= 10 else 4.0))
    family = [process.pid, *children(process.pid)]
    at_ns = monotonic_ns()
    for pid in chosen(killed, process.pid, draw):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if killed in ("worker", "compactor") and command == "soak":
        pause(1.0)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert b"Traceback" not in err or killed in ("main", "all"), err.decode()

    deadline = monotonic() + ORPHANS_S
    wait(lambda: not any(map(alive, family)) or monotonic() > deadline)
    assert not [pid for pid in family if alive(pid)], "a process goes on"

    if (
        not out.exists()
    ):  # killed or broken off before the load: it could not begin, and leaves no folder
        ends = (
            (3, 130) if killed == "worker" else (130,)
        )  # 3: the command saw it before it was broken off
        assert process.returncode in ends and not answered(log(endpoint), at_ns), err.decode()
        return
    assert any(out.rglob("w*.rows")) or any(out.rglob("summary.json")), err.decode()
    sent_requests = log(endpoint)
    runs = [path.parent for path in out.rglob("run.json")]
    for run in runs:
        summary = run_folder.open_run(run).summary  # readable, whatever was killed
        parts = ("ok", "failed", "dropped", "cancelled", "unfinished", "lost")
        assert sum(getattr(summary.requests, part) for part in parts) == summary.requests.scheduled
    if command in ("run", "soak") and runs:
        recorded = summary.requests.ok + summary.warmup.ok
        finished = answered(sent_requests, at_ns - LOST_S * 1e9)
        assert recorded >= finished - 5, f"{finished - recorded} finished requests have no record"
    if command in ("sweep", "search", "validate") and killed in ("main", "all"):
        if command == "validate":  # a verdict has one folder: the next one begins anew
            flags[flags.index("--out") + 1] += "-again"
        resumed = subprocess.run(
            [sys.executable, "-P", "-m", "loadgen", *command_line, *flags],
            capture_output=True,
            text=True,
            cwd=folder,
            check=False,
        )
        assert resumed.returncode in (0, 1, 3), resumed.stderr
        assert "bug" not in resumed.stderr


def answered(sent_requests: SentRequests, before_ns: float) -> int:
    """How many requests of the run had the last token of their answer sent before an instant."""
    early = sent_requests.request[sent_requests.sent_ns < before_ns].tolist()
    both_ends = {number for number, count in Counter(early).items() if count == 2}
    return sum(
        bool(logged_request.id) and logged_request.number in both_ends
        for logged_request in sent_requests.requests
    )


def chosen(killed: str, main: int, draw: random.Random) -> list[int]:
    """Return the process ids to kill."""
    main_children = children(main)
    named = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes()
        for pid in main_children
        if Path(f"/proc/{pid}").exists()
    }
    if killed == "all":
        return [main, *main_children]
    if killed == "main":
        return [main]
    module = b"backends.worker" if killed == "worker" else b"compactor_process"
    pids = [pid for pid, line in named.items() if module in line]
    return [draw.choice(pids)] if pids else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pause(seconds: float) -> None:
    """Sleep until the instant of the kill, which the test chooses and does not wait for."""
    select.select([], [], [], seconds)


def wait(done: object) -> None:
    assert callable(done)
    for _ in range(120_000):
        if done():
            return
        select.select([], [], [], 0.005)
    raise AssertionError("the command did not get so far")
