"""Do the commands for a rack work from the first check to a verified bundle, failures included?

`python benchmarks/rack_rehearsal.py`. Eighteen simulated endpoints run as processes with their own
addresses in 127.0.0.0/8, and one of them is slower than the others. Three nodes of a Ray cluster
send the load. The commands are those of docs/guides/many-machines.md, "A rack, rehearsed": doctor;
`mlperf server` without a failure, with one endpoint killed, with one node lost, and with the two
nodes that are left; then the bundle. The script prints the log. Exit code 1 if a command ends with
an unexpected exit code.

It takes about three minutes at a rate that two cores sustain. The smallest form has four endpoints,
two load machines and three loads. The script ends what it started, by process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import rig

PORT = 18080
SLOW_ENDPOINT = 7  # the number of the endpoint that is slower than the others
KILLED_ENDPOINT = 3
START_TIMEOUT_S, COMMAND_TIMEOUT_S = 60.0, 180.0
LOADGEN = [sys.executable, "-P", "-m", "loadgen"]


def endpoint_address(number: int) -> str:
    """Return the loopback address of an endpoint."""
    return f"127.0.2.{number}"


def start_endpoint(number: int) -> subprocess.Popen[bytes]:
    """Start `loadgen sim` as one endpoint of the rack, in its own process."""
    latencies = ["--ttft", "900ms"] if number == SLOW_ENDPOINT else ["--ttft", "normal:300ms,10ms"]
    arguments = [
        "sim",
        "--host",
        endpoint_address(number),
        "--port",
        str(PORT),
        *latencies,
        "--itl",
        "1ms",
        "--stream-interval",
        "16",
    ]
    devnull = subprocess.DEVNULL

    return subprocess.Popen([*LOADGEN, *arguments], stdin=devnull, stdout=devnull, stderr=devnull)


def is_listening(number: int) -> bool:
    """Return whether an endpoint accepts connections."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((endpoint_address(number), PORT), 1.0),
    ):
        return True
    return False


def wait_until(
    condition: Callable[[], bool], message: str, timeout_s: float = START_TIMEOUT_S
) -> None:
    """Wait until a condition holds; raise TimeoutError with `message` if it takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(message)
        time.sleep(0.05)


@contextlib.contextmanager
def start_rack(endpoints: int) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Run so many endpoints inside the `with` block, numbered from 1.

    Yields:
        The process of each endpoint by its number. The caller may replace one that it has ended.
    """
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for number in range(1, endpoints + 1):
            processes[number] = start_endpoint(number)
        for number in processes:
            wait_until(partial(is_listening, number), f"endpoint {number} does not listen")
        yield processes
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()  # does nothing if the process has ended


@contextlib.contextmanager
def start_load_machines(count: int) -> Iterator[Any]:
    """Run a Ray cluster of a head without CPUs and `count` nodes of one CPU each.

    Each node has an address of its own. Ray and its nodes read their settings from the environment
    of this process.
    """
    # The paths of Ray's sockets must not be longer than about 100 characters.
    scratch = tempfile.mkdtemp(prefix="lg", dir="/tmp")
    (Path(scratch) / "ray").mkdir()

    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "TMPDIR": scratch}
    with mock.patch.dict(os.environ, settings):
        from ray.cluster_utils import Cluster

        node_options: dict[str, Any] = {
            "include_dashboard": False,
            "object_store_memory": 80_000_000,
        }
        head_options = {
            "num_cpus": 0,
            "temp_dir": f"{scratch}/ray",
            "no_monitor": True,  # no process that adds or removes nodes
        }

        cluster = Cluster(initialize_head=True, head_node_args=node_options | head_options)
        try:
            for number in range(1, count + 1):
                cluster.add_node(num_cpus=1, node_ip_address=f"127.0.3.{number}", **node_options)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(scratch, ignore_errors=True)


class CommandRunner:
    """Runs commands in a folder, prints the lines that matter and counts unexpected results."""

    def __init__(self, folder: Path, failure_delay_s: float) -> None:
        self.folder = folder
        self.failure_delay_s = failure_delay_s
        self.unexpected_results = 0

    def run_command(
        self,
        arguments: Sequence[str],
        expected_codes: Sequence[int],
        markers: Sequence[str],
        inject_failure: Callable[[], object] | None = None,
    ) -> None:
        """Run a command of loadgen, print it with a part of its output, and check how it ended.

        Args:
            arguments: The arguments of `loadgen`.
            expected_codes: The exit codes that are no surprise.
            markers: Lines of the output that contain one of these texts are printed.
            inject_failure: Is called while the command sends its load.
        """
        print(f"$ loadgen {' '.join(arguments)}", flush=True)
        code, output = self._run(arguments, inject_failure)
        for line in output.splitlines():
            if any(marker in line for marker in markers):
                print(f"  {line.strip()[:230]}")

        has_crash = "Traceback" in output or "(raylet)" in output
        if code in expected_codes and not has_crash:
            print(f"  exit {code}", flush=True)
        else:
            print(f"  exit {code}, EXPECTED {expected_codes}:\n{output}", flush=True)
            self.unexpected_results += 1

    def _run(
        self, arguments: Sequence[str], inject_failure: Callable[[], object] | None
    ) -> tuple[int, str]:
        """Run a command; return its exit code and its output."""
        process = subprocess.Popen(
            [*LOADGEN, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )
        try:
            if inject_failure is not None:
                self._wait_for_load(process, arguments)
                inject_failure()
            output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)

        return process.returncode, output

    def _wait_for_load(self, process: subprocess.Popen[str], arguments: Sequence[str]) -> None:
        """Wait until a command has written its first records, then for `failure_delay_s`."""
        run_dir = self.folder / arguments[arguments.index("--out") + 1]

        def has_started() -> bool:
            has_ended = process.poll() is not None
            return has_ended or any(path.stat().st_size for path in run_dir.rglob("w0.rows"))

        wait_until(has_started, f"{arguments[0]} sends nothing")
        time.sleep(self.failure_delay_s)


RUN_MARKERS = (
    "cluster:",
    "note:",
    "INVALID",
    "VALID",
    "stands out",
    "lost",
    "stopped answering",
    "warning",
    "error",
)


def write_inputs(folder: Path, endpoints: int) -> None:
    """Write rack.yaml, which lists the endpoints as targets, and data.jsonl with 100 prompts."""
    target_lines = [
        f"- {{name: n{number:02}, url: 'http://{endpoint_address(number)}:{PORT}', gpus: 4}}\n"
        for number in range(1, endpoints + 1)
    ]
    (folder / "rack.yaml").write_text("".join(target_lines))
    prompt_lines = [json.dumps({"prompt": f"{number} " * 40}) + "\n" for number in range(100)]
    (folder / "data.jsonl").write_text("".join(prompt_lines))


def rehearse(
    folder: Path, endpoints: int, machines: int, seconds: int, rate: float, *, smoke: bool
) -> int:
    """Run the rehearsal in a folder and return the number of unexpected results.

    Args:
        folder: Where inputs and results go.
        endpoints: Number of endpoints of the rack.
        machines: Number of nodes that send the load.
        seconds: Minimum duration of each load.
        rate: Queries per second.
        smoke: Leave out the load without a failure.
    """
    write_inputs(folder, endpoints)
    runner = CommandRunner(folder, failure_delay_s=seconds / 4)
    with start_rack(endpoints) as processes, start_load_machines(machines) as cluster:
        target = ["-b", "llama2-70b", "--targets", "rack.yaml", "--dataset", "data.jsonl"]
        rate_options = ["--target-qps", f"{rate:g}", "--min-duration", str(seconds)]
        ray = ["--ray", cluster.address, "--workers", str(machines)]
        load = ["mlperf", "server", *target, *rate_options, *ray]
        doctor = ["doctor", "--url", f"http://{endpoint_address(KILLED_ENDPOINT)}:{PORT}"]

        def kill_endpoint() -> None:
            """Kill one endpoint."""
            processes[KILLED_ENDPOINT].kill()
            processes[KILLED_ENDPOINT].wait()

        def kill_node() -> None:
            """Remove the last node of the cluster."""
            cluster.remove_node(list(cluster.worker_nodes)[-1], allow_graceful=False)

        runner.run_command(doctor, (0, 1, 3), ("fail", "warn", "not "))
        if not smoke:
            runner.run_command([*load, "--out", "whole"], (0, 1, 3), RUN_MARKERS)

        runner.run_command([*load, "--out", "endpoint"], (3,), RUN_MARKERS, kill_endpoint)
        runner.run_command(doctor, (2, 3), ("fail", "error", "not "))
        processes[KILLED_ENDPOINT] = start_endpoint(KILLED_ENDPOINT)
        wait_until(lambda: is_listening(KILLED_ENDPOINT), "the endpoint does not come back")
        runner.run_command([*load, "--out", "node"], (3,), RUN_MARKERS, kill_node)
        fewer_workers = ["--workers", str(machines - 1)]
        runner.run_command([*load, "--out", "again", *fewer_workers], (0, 1, 3), RUN_MARKERS)
        runner.run_command(["bundle", "again", "-o", "rack.zip"], (0,), ("rack.zip",))
        runner.run_command(["verify", "rack.zip"], (0,), ("",))

    return runner.unexpected_results


def main() -> int:
    """Run the rehearsal; return 1 if an exit code was not the expected one."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--endpoints", type=int, default=18)
    parser.add_argument("--machines", type=int, default=3, help="that send the load")
    parser.add_argument("--seconds", type=int, default=16, help="minimum duration of each load")
    parser.add_argument("--rate", type=float, default=12.0, help="queries/s")
    args = rig.parse_arguments(parser, endpoints=4, machines=2, seconds=4, rate=25.0)

    if find_spec("ray") is None:
        print("Ray is not installed: pip install 'loadgen[ray]'")
        return rig.SKIP_EXIT_CODE

    with tempfile.TemporaryDirectory(prefix="rack-", dir="/tmp") as folder:
        surprises = rehearse(
            Path(folder),
            args.endpoints,
            args.machines,
            args.seconds,
            args.rate,
            smoke=args.smoke,
        )

    print(f"{surprises} surprises")
    return min(surprises, 1)


if __name__ == "__main__":
    sys.exit(main())
