"""A cluster node is killed in each phase of each command.

The command names the lost node, and goes on without it where the result stays sound. Every case
runs on one cluster of three nodes with one CPU each; a new node then replaces the killed one. Run
`pytest -m kills -n 0 tests/cluster/test_lost_nodes.py`; it takes a quarter of an hour.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import pytest
from ray_nodes import add_node, kill, started

from loadgen.core import run_folder
from loadgen.sim.server.embedded import EmbeddedServer, start
from loadgen.sim.server.options import Options

pytestmark = [pytest.mark.optional, pytest.mark.kills, pytest.mark.processes]

WORKLOAD = """
name: lost
requests: {input_tokens: 60, output_tokens: 30}
"""
CONTRACT = """
name: lost
horizon: 1s
levels:
  - name: a
    workload: w.yaml
    rate: 40/s
    duration: 6s
    warmup: 0
    grace: 1s
    must: [{ttft: {limit: 5s, at: p90}}]
  - name: b
    workload: w.yaml
    rate: 60/s
    duration: 6s
    warmup: 0
    grace: 1s
    must: [{ttft: {limit: 5s, at: p90}}]
"""
COMMANDS = {
    "run": "run w.yaml --request-rate 40/s -d 6s --warmup 0 --grace 1s --repeat 2",
    "sweep": "sweep w.yaml --request-rate 40,60 -d 6s --warmup 0 --grace 1s",
    "search": "search w.yaml --slo ttft:1s:p90 --low 40 --high 60 --max-probes 3 -d 6s --grace 1s",
    "validate": "validate c.yaml --repeat 1",
    "mlperf": "mlperf server -b llama2-70b --target-qps 20 --min-duration 8 --dataset data.jsonl",
}


def has_agents() -> bool:
    """Whether an actor has been started for a worker, on whatever node."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::NodeAgent"):
                return True
    return False


class Case(NamedTuple):
    """Where a command is when the node is killed, and whether it goes on without it."""

    begun: Callable[[Path], bool]
    sound: bool


PHASES = {
    "placing": Case(lambda _: has_agents(), True),  # actors start
    "starting": Case(lambda out: any(out.rglob("run.json")), True),  # workers start
    "load": Case(lambda out: any(path.stat().st_size for path in out.rglob("w0.rows")), False),
    "between": Case(
        lambda out: any(out.rglob("summary.json")), True
    ),  # after the first of several runs
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with started({}, {}, {}, head_cpus=0) as started_nodes:
        yield started_nodes


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EmbeddedServer]:
    with start(Options(ttft="300ms", itl="1ms")) as server:
        yield server


def begin(
    folder: Path, endpoint: EmbeddedServer, address: str, command_line: str
) -> subprocess.Popen[str]:
    (folder / "w.yaml").write_text(WORKLOAD)
    (folder / "c.yaml").write_text(CONTRACT)
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i} " * 20}) + "\n" for i in range(100))
    )
    flags = [
        "--url",
        endpoint.url,
        "--out",
        str(folder / "out"),
        "--server-metrics",
        "off",
        "--energy",
        "off",
    ]
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "loadgen",
            *command_line.split(),
            *flags,
            "--ray",
            address,
            "--workers",
            "3",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )


def wait(over: Callable[[], bool], at_most_s: float) -> None:
    deadline = monotonic() + at_most_s
    while not over() and monotonic() < deadline:
        select.select([], [], [], 0.02)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_with_its_records_if_a_node_is_killed(
    tmp_path: Path, cluster: Any, endpoint: EmbeddedServer, command: str, phase: str
) -> None:
    if (command, phase) == ("mlperf", "between"):
        return  # of one run; its search is that of `search`
    process = begin(tmp_path, endpoint, cluster.address, COMMANDS[command])
    wait(lambda: PHASES[phase].begun(tmp_path / "out") or process.poll() is not None, 60.0)
    try:
        gone = kill(cluster)
        stdout, _ = process.communicate(timeout=180)
    finally:
        process.kill()
        add_node(cluster, {})
    print(stdout)  # for the table of docs/reference/reliability.md
    print(f"{command}, {phase}: exit {process.returncode}")

    assert "Traceback" not in stdout and "raylet" not in stdout and "bug" not in stdout, stdout
    loss_lines = [line for line in stdout.splitlines() if "lost" in line or "died" in line]
    assert any(f"#{gone[:6]}" in line for line in loss_lines), stdout
    assert "the same loadgen" not in stdout

    runs = [
        run_folder.open_run(path.parent).summary for path in (tmp_path / "out").rglob("run.json")
    ]
    lost = [summary.requests.lost for summary in runs]

    if PHASES[phase].sound:
        assert not any(lost)
        assert "lost before the load" in stdout
        assert process.returncode in (0, 1, 3), stdout  # 1, 3: a busy host's senders are late
    else:
        assert any(lost)
        assert process.returncode == (0 if command == "sweep" else 3), (
            stdout
        )  # another level of the sweep is valid


@pytest.mark.parametrize("joins", [True, False])
def test_a_search_ends_if_every_node_is_killed_between_trials(
    tmp_path: Path, cluster: Any, endpoint: EmbeddedServer, joins: bool
) -> None:
    """A new node is taken in; without one the search ends, and goes on where it was told to."""
    process = begin(tmp_path, endpoint, cluster.address, COMMANDS["search"])
    wait(lambda: PHASES["between"].begun(tmp_path / "out") or process.poll() is not None, 60.0)
    try:
        for _ in range(3):
            kill(cluster)
        if joins:
            add_node(cluster, {})
        stdout, _ = process.communicate(timeout=180)
    finally:
        process.kill()
        for _ in range(3 - len(cluster.worker_nodes)):
            add_node(cluster, {})
    print(stdout)
    print(f"joins {joins}: exit {process.returncode}")

    assert "Traceback" not in stdout and "raylet" not in stdout, stdout

    if joins:
        assert "3 workers on 1 node" in stdout, stdout
        return

    assert process.returncode == 3, stdout
    assert "Lost: vm #" in stdout, stdout

    command = stdout.partition("go on with: ")[2].splitlines()[0].removeprefix("loadgen ")
    resumed = subprocess.run(
        [sys.executable, "-P", "-m", "loadgen", *command.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=180,
    )
    print(resumed.stderr, resumed.stdout)

    assert "going on with" in resumed.stderr and resumed.returncode in (0, 1, 3), resumed.stderr


GOING_ON = {
    "run": (),
    "search": ("go on with: loadgen search --resume",),
    "sweep": ("finished runs are kept, and the same command with --out {out} resumes it",),
    "validate": ("b anew: the same command, with another --out",),
}


@pytest.mark.parametrize(
    ("command", "phase"),
    [
        ("run", "load"),
        ("search", "between"),
        ("sweep", "between"),
        ("validate", "load"),
        ("validate", "between"),
    ],
)
def test_a_run_ends_with_its_records_if_the_head_node_is_killed(
    tmp_path: Path, endpoint: EmbeddedServer, command: str, phase: str
) -> None:
    """The node of the command is lost too: its records stay, and the command says what was lost."""
    with started({}, {}, {}, head_cpus=0) as started_nodes:
        process = begin(tmp_path, endpoint, started_nodes.address, COMMANDS[command])
        wait(lambda: PHASES[phase].begun(tmp_path / "out") or process.poll() is not None, 60.0)
        try:
            started_nodes.head_node.kill_gcs_server(check_alive=False)
            started_nodes.head_node.kill_raylet(check_alive=False)
            stdout, _ = process.communicate(timeout=180)
        finally:
            process.kill()
    print(stdout)

    assert "Traceback" not in stdout and "raylet" not in stdout and "bug" not in stdout, stdout
    assert process.returncode == 3, stdout
    assert "connection to the Ray cluster" in " ".join(stdout.split())

    runs = [
        run_folder.open_run(path.parent).summary for path in (tmp_path / "out").rglob("run.json")
    ]

    assert any(summary.requests.ok for summary in runs)
    assert phase != "load" or any(summary.requests.lost for summary in runs)
    for text in GOING_ON[command]:
        assert text.format(out=tmp_path / "out") in stdout, stdout
