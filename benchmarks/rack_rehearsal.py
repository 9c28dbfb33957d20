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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import rig

LOADGEN = [sys.executable, "-P", "-m", "loadgen"]
PORT = 18080  # of every endpoint; each has its own address
GPUS_PER_ENDPOINT = 4
SLOW_ENDPOINT = 7  # the number of the endpoint that is slower than the others
KILLED_ENDPOINT = 3  # the number of the endpoint that is killed during a load
USUAL_TTFT = "normal:300ms,10ms"
SLOW_TTFT = "900ms"

# The paths of Ray's sockets must not be longer than about 100 characters, so the folders for
# temporary files are directly in /tmp.
SHORT_TEMP_DIR = "/tmp"
RAY_OBJECT_STORE_BYTES = 80_000_000  # about the smallest size that Ray accepts

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 180.0
POLL_INTERVAL_S = 0.05
MAX_PRINTED_LINE = 230

# Exit codes of loadgen: 0 valid, 1 objective missed, 2 error, 3 invalid
COMPLETED = (0, 1, 3)
INVALID = (3,)
NOT_REACHABLE = (2, 3)
SUCCEEDED = (0,)


def endpoint_address(number: int) -> str:
    """Return the loopback address of an endpoint, whose number starts at 1."""
    return f"127.0.2.{number}"


def endpoint_url(number: int) -> str:
    """Return the URL of an endpoint, whose number starts at 1."""
    return f"http://{endpoint_address(number)}:{PORT}"


def is_listening(number: int) -> bool:
    """Return whether an endpoint accepts TCP connections."""
    try:
        with socket.create_connection((endpoint_address(number), PORT), timeout=1.0):
            return True
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], timeout_message: str) -> None:
    """Wait until a condition is true.

    Raises TimeoutError with `timeout_message` after START_TIMEOUT_S.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(timeout_message)
        time.sleep(POLL_INTERVAL_S)


# -- the rack and the load machines ----------------------------------------------------------------


class Rack:
    """Simulated endpoints, each of which is a process with its own loopback address.

    A `with` block starts endpoints 1 to `endpoint_count` and stops them at its end.
    """

    def __init__(self, endpoint_count: int) -> None:
        self.endpoint_count = endpoint_count
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Rack:
        """Start all endpoints at the same time, and wait until each of them listens."""
        try:
            for number in range(1, self.endpoint_count + 1):
                self._processes[number] = start_endpoint_process(number)
            for number in self._processes:
                wait_until_listening(number)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop all endpoints."""
        self._stop()

    def _stop(self) -> None:
        """Terminate all endpoints, and kill those that do not end in time."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            process.kill()  # does nothing to a process that has ended

    def kill_endpoint(self, number: int) -> None:
        """Kill an endpoint, so that its connections break."""
        process = self._processes[number]
        process.kill()
        process.wait()

    def restart_endpoint(self, number: int) -> None:
        """Start an endpoint that was killed, and wait until it listens."""
        self._processes[number] = start_endpoint_process(number)
        wait_until_listening(number)

    def write_target_file(self, path: Path) -> None:
        """Write a YAML file that lists the endpoints as targets of loadgen."""
        lines = [
            f"- {{name: n{number:02}, url: '{endpoint_url(number)}', gpus: {GPUS_PER_ENDPOINT}}}"
            for number in range(1, self.endpoint_count + 1)
        ]
        path.write_text("\n".join(lines) + "\n")


def start_endpoint_process(number: int) -> subprocess.Popen[bytes]:
    """Start the simulated server of an endpoint, without waiting until it listens."""
    ttft = SLOW_TTFT if number == SLOW_ENDPOINT else USUAL_TTFT
    command = [
        *LOADGEN,
        "sim",
        *("--host", endpoint_address(number)),
        *("--port", str(PORT)),
        *("--ttft", ttft),
        *("--itl", "1ms"),
        *("--stream-interval", "16"),  # tokens per event: cheaper for a machine with two cores
    ]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_until_listening(number: int) -> None:
    """Wait until an endpoint accepts connections; raise TimeoutError if it does not."""
    wait_until(lambda: is_listening(number), f"endpoint {number} does not listen")


@contextlib.contextmanager
def start_ray_cluster(load_machines: int) -> Iterator[Any]:
    """Run a Ray cluster inside the `with` block, whose nodes stand for load machines.

    The head node has no CPUs, so that no load is sent from it. Each of the other nodes has one CPU
    and its own loopback address.

    Yields:
        The cluster, a `ray.cluster_utils.Cluster`.
    """
    with prepare_ray_environment() as ray_dir:
        from ray.cluster_utils import Cluster

        node_options: dict[str, Any] = {
            "include_dashboard": False,
            "object_store_memory": RAY_OBJECT_STORE_BYTES,
        }
        head_options = {
            "num_cpus": 0,
            "temp_dir": str(ray_dir),
            "no_monitor": True,  # without the process that adds and removes nodes
        }
        cluster = Cluster(initialize_head=True, head_node_args=node_options | head_options)
        try:
            for number in range(1, load_machines + 1):
                address = f"127.0.3.{number}"
                cluster.add_node(num_cpus=1, node_ip_address=address, **node_options)
            yield cluster
        finally:
            cluster.shutdown()


@contextlib.contextmanager
def prepare_ray_environment() -> Iterator[Path]:
    """Set the environment variables of Ray inside the `with` block.

    Ray and the processes that it starts read their settings from the environment.

    Yields:
        A folder for the files of the cluster. It is deleted at the end.
    """
    with tempfile.TemporaryDirectory(
        prefix="lg", dir=SHORT_TEMP_DIR, ignore_cleanup_errors=True
    ) as scratch:
        ray_dir = Path(scratch) / "ray"
        ray_dir.mkdir()
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "TMPDIR": scratch}
        with mock.patch.dict(os.environ, settings):
            yield ray_dir


def kill_last_node(cluster: Any) -> None:
    """Remove the last node of a Ray cluster at once, as if the machine had lost its power."""
    last_node = list(cluster.worker_nodes)[-1]
    cluster.remove_node(last_node, allow_graceful=False)


# -- running commands ------------------------------------------------------------------------------


class Command(NamedTuple):
    """A loadgen command of the rehearsal.

    Attributes:
        arguments: The arguments of `loadgen`.
        expected_codes: The exit codes with which it may end.
        printed_markers: A line of its output is printed if it contains one of these texts.
        inject_failure: A function that is called while the command sends its load, or None.
    """

    arguments: Sequence[str]
    expected_codes: Sequence[int]
    printed_markers: Sequence[str]
    inject_failure: Callable[[], object] | None = None


class CommandResult(NamedTuple):
    """How a command ended, and what it wrote to stdout and stderr."""

    exit_code: int
    output: str

    @property
    def has_crash(self) -> bool:
        """Whether the output has a Python traceback or an error of a Ray node."""
        return "Traceback" in self.output or "(raylet)" in self.output


@dataclass
class CommandRunner:
    """Runs loadgen commands in a folder and counts those that end unexpectedly.

    Attributes:
        folder: The working directory of the commands.
        failure_delay_s: The time from the first record of a load to the injected failure.
        unexpected_count: The commands so far that ended unexpectedly.
    """

    folder: Path
    failure_delay_s: float
    unexpected_count: int = field(default=0, init=False)

    def run(self, command: Command) -> None:
        """Run a command, and print it with the lines of its output that matter.

        If the exit code is not expected or the command crashed, the whole output is printed.
        """
        print(f"$ loadgen {' '.join(command.arguments)}", flush=True)
        result = self._execute(command)
        for line in result.output.splitlines():
            if any(marker in line for marker in command.printed_markers):
                print(f"  {line.strip()[:MAX_PRINTED_LINE]}")

        if result.exit_code in command.expected_codes and not result.has_crash:
            print(f"  exit {result.exit_code}", flush=True)
            return

        self.unexpected_count += 1
        print(f"  exit {result.exit_code}, EXPECTED {command.expected_codes}:\n{result.output}")

    def _execute(self, command: Command) -> CommandResult:
        """Run a command to its end, and inject its failure meanwhile.

        Raises subprocess.TimeoutExpired, and kills the command, after COMMAND_TIMEOUT_S.
        """
        process = subprocess.Popen(
            [*LOADGEN, *command.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )
        try:
            if command.inject_failure is not None:
                self._wait_for_load(process, find_output_dir(command.arguments))
                command.inject_failure()
            output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()

        return CommandResult(process.returncode, output)

    def _wait_for_load(self, process: subprocess.Popen[str], output_dir: str) -> None:
        """Wait until a command has written its first request records, then `failure_delay_s` more.

        Records show that the load has begun. The file `w0.rows` has those of the first worker. If
        the command ends earlier, there is nothing to wait for.
        """
        run_dir = self.folder / output_dir

        def has_begun_or_ended() -> bool:
            has_records = any(path.stat().st_size for path in run_dir.rglob("w0.rows"))
            return has_records or process.poll() is not None

        wait_until(has_begun_or_ended, "the command sends no load")
        time.sleep(self.failure_delay_s)


def find_output_dir(arguments: Sequence[str]) -> str:
    """Return the value of the option `--out`."""
    return arguments[arguments.index("--out") + 1]


# -- the rehearsal ---------------------------------------------------------------------------------

LOAD_MARKERS = (
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
DOCTOR_MARKERS = ("fail", "warn", "not ")
FAILED_DOCTOR_MARKERS = ("fail", "error", "not ")
ALL_LINES = ("",)  # every line contains the empty text
DOCTOR = ("doctor", "--url", endpoint_url(KILLED_ENDPOINT))  # checks an endpoint


class RackOptions(NamedTuple):
    """The size of a rehearsal.

    Attributes:
        endpoints: The number of endpoints.
        load_machines: The number of Ray nodes that send the load.
        min_duration_s: The minimum duration of each load.
        rate: The queries per second of each load.
        skip_undisturbed_load: Whether to leave out the load without a failure.
    """

    endpoints: int
    load_machines: int
    min_duration_s: int
    rate: float
    skip_undisturbed_load: bool


def rehearse(folder: Path, options: RackOptions) -> int:
    """Run all commands in a folder, and return how many of them ended unexpectedly.

    The failures happen in the first half of a load, so that requests are affected by them.
    """
    runner = CommandRunner(folder, failure_delay_s=options.min_duration_s / 4)
    with Rack(options.endpoints) as rack, start_ray_cluster(options.load_machines) as cluster:
        rack.write_target_file(folder / "rack.yaml")
        write_dataset(folder / "data.jsonl")
        load = build_load_arguments(options, cluster.address)

        runner.run(Command(DOCTOR, COMPLETED, DOCTOR_MARKERS))
        if not options.skip_undisturbed_load:
            runner.run(Command([*load, "--out", "whole"], COMPLETED, LOAD_MARKERS))
        rehearse_endpoint_failure(runner, rack, load)
        rehearse_node_failure(runner, cluster, load)

        fewer_workers = ["--workers", str(options.load_machines - 1)]  # the last `--workers` counts
        repeated_load = [*load, "--out", "again", *fewer_workers]
        runner.run(Command(repeated_load, COMPLETED, LOAD_MARKERS))
        runner.run(Command(["bundle", "again", "-o", "rack.zip"], SUCCEEDED, ("rack.zip",)))
        runner.run(Command(["verify", "rack.zip"], SUCCEEDED, ALL_LINES))

    return runner.unexpected_count


def rehearse_endpoint_failure(runner: CommandRunner, rack: Rack, load: Sequence[str]) -> None:
    """Kill an endpoint during a load, check that `doctor` notices it, and start it again.

    `load` are the arguments of `loadgen` for the load, without the folder of its results.
    """
    kill_endpoint = partial(rack.kill_endpoint, KILLED_ENDPOINT)
    runner.run(Command([*load, "--out", "endpoint"], INVALID, LOAD_MARKERS, kill_endpoint))
    runner.run(Command(DOCTOR, NOT_REACHABLE, FAILED_DOCTOR_MARKERS))
    rack.restart_endpoint(KILLED_ENDPOINT)


def rehearse_node_failure(runner: CommandRunner, cluster: Any, load: Sequence[str]) -> None:
    """Kill a node of the Ray cluster, which stands for a load machine, during a load.

    `load` are the arguments of `loadgen` for the load, without the folder of its results.
    """
    kill_node = partial(kill_last_node, cluster)
    runner.run(Command([*load, "--out", "node"], INVALID, LOAD_MARKERS, kill_node))


def write_dataset(path: Path) -> None:
    """Write a data set of 100 short prompts in the JSON Lines format."""
    prompts = [f"{number} " * 40 for number in range(100)]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def build_load_arguments(options: RackOptions, ray_address: str) -> list[str]:
    """Return the arguments of `loadgen` for a Server run of MLPerf on all endpoints of the rack."""
    return [
        *("mlperf", "server"),
        *("-b", "llama2-70b"),
        *("--targets", "rack.yaml"),
        *("--dataset", "data.jsonl"),
        *("--target-qps", f"{options.rate:g}"),
        *("--min-duration", str(options.min_duration_s)),
        *("--ray", ray_address),
        *("--workers", str(options.load_machines)),
    ]


def main() -> int:
    """Run the rehearsal, and return 1 if a command ended unexpectedly."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--endpoints", type=int, default=18)
    parser.add_argument("--machines", type=int, default=3, help="that send the load")
    parser.add_argument("--seconds", type=int, default=16, help="minimum duration of each load")
    parser.add_argument("--rate", type=float, default=12.0, help="queries/s")
    args = rig.parse_arguments(parser, endpoints=4, machines=2, seconds=4, rate=25.0)

    if find_spec("ray") is None:
        rig.skip_script("it needs Ray: pip install 'loadgen[ray]'")

    options = RackOptions(
        endpoints=args.endpoints,
        load_machines=args.machines,
        min_duration_s=args.seconds,
        rate=args.rate,
        skip_undisturbed_load=args.smoke,
    )
    with tempfile.TemporaryDirectory(prefix="rack-", dir=SHORT_TEMP_DIR) as folder:
        unexpected_count = rehearse(Path(folder), options)

    print(f"{unexpected_count} commands ended unexpectedly")
    return 1 if unexpected_count else 0


if __name__ == "__main__":
    sys.exit(main())
