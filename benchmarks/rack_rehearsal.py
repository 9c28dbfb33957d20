"""A rack, rehearsed: what a team types at eighteen endpoints and three load machines, until the bundle verifies.

`python benchmarks/rack_rehearsal.py`. Eighteen simulated endpoints, each a process with an address of its own in
127.0.0.0/8, one of them slower than the others; load from three nodes of a Ray cluster. The commands are those of
docs/guides/many-machines.md, "A rack, rehearsed": doctor, `mlperf server` as it should be, with one endpoint killed, with one node
lost, with the two nodes that are left, then the bundle. Prints the log; ends with 1 where an exit code is another one
than expected.
Some three minutes at a rate that two cores carry; the smallest form has four endpoints, two load machines and
three loads. It ends what it started, by process id.
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

import rig

PORT = 18080
SLOW = 7  # the number of the endpoint that is slower than the others
KILLED = 3
BEGIN_S, COMMAND_S = 60.0, 180.0
LOADGEN = [sys.executable, "-P", "-m", "loadgen"]


def address(number: int) -> str:
    return f"127.0.2.{number}"


def endpoint(number: int) -> subprocess.Popen[bytes]:
    """`loadgen sim` of one endpoint of the rack, in a process of its own."""
    times = ["--ttft", "900ms"] if number == SLOW else ["--ttft", "normal:300ms,10ms"]
    words = [
        "sim",
        "--host",
        address(number),
        "--port",
        str(PORT),
        *times,
        "--itl",
        "1ms",
        "--stream-interval",
        "16",
    ]
    none = subprocess.DEVNULL
    return subprocess.Popen([*LOADGEN, *words], stdin=none, stdout=none, stderr=none)


def listening(number: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address(number), PORT), 1.0):
        return True
    return False


def wait(over: Callable[[], bool], what: str, at_most_s: float = BEGIN_S) -> None:
    given_up_at = time.monotonic() + at_most_s
    while not over():
        if time.monotonic() > given_up_at:
            raise TimeoutError(what)
        time.sleep(0.05)


@contextlib.contextmanager
def rack(endpoints: int) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """The endpoints, number -> process."""
    started: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for number in range(1, endpoints + 1):
            started[number] = endpoint(number)
        for number in started:
            wait(partial(listening, number), f"endpoint {number} does not listen")
        yield started
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


@contextlib.contextmanager
def load_machines(count: int) -> Iterator[Any]:
    """A Ray cluster: a head without a CPU for workers, and nodes of one CPU, each with an address of its own."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    from ray.cluster_utils import Cluster

    scratch = tempfile.mkdtemp(prefix="lg", dir="/tmp")  # short: sockets lie in it
    os.environ["TMPDIR"] = scratch
    (Path(scratch) / "ray").mkdir()
    small: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 80_000_000}
    head = {
        "num_cpus": 0,
        "temp_dir": f"{scratch}/ray",
        "no_monitor": True,
    }  # nothing grows or shrinks by itself
    made = Cluster(initialize_head=True, head_node_args=small | head)
    try:
        for number in range(1, count + 1):
            made.add_node(num_cpus=1, node_ip_address=f"127.0.3.{number}", **small)
        yield made
    finally:
        made.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


class Typist:
    """Types commands in a folder, prints what they say that matters, and counts surprises."""

    def __init__(self, folder: Path, fault_s: float) -> None:
        self.folder, self.fault_s, self.surprises = folder, fault_s, 0

    def type(
        self,
        words: Sequence[str],
        expected: Sequence[int],
        shown: Sequence[str],
        fault: Callable[[], object] | None = None,
    ) -> None:
        """Carry out `loadgen WORDS`. `shown`: what the printed lines have in them; `fault`: done in its load."""
        print(f"$ loadgen {' '.join(words)}", flush=True)
        process = subprocess.Popen(
            [*LOADGEN, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )
        try:
            if fault is not None:
                self._wait_for_load(process, words)
                fault()
            said, _ = process.communicate(timeout=COMMAND_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        lines = said.splitlines()
        for line in lines:
            if any(word in line for word in shown):
                print(f"  {line.strip()[:230]}")
        right = (
            process.returncode in expected and "Traceback" not in said and "(raylet)" not in said
        )
        print(
            f"  exit {process.returncode}" + ("" if right else f", EXPECTED {expected}:\n{said}"),
            flush=True,
        )
        self.surprises += not right

    def _wait_for_load(self, process: subprocess.Popen[str], words: Sequence[str]) -> None:
        out = self.folder / words[words.index("--out") + 1]

        def begun() -> bool:
            return (
                any(path.stat().st_size for path in out.rglob("w0.rows"))
                or process.poll() is not None
            )

        wait(begun, f"{words[0]} sends nothing")
        time.sleep(self.fault_s)


def rehearse(
    folder: Path, endpoints: int, machines: int, seconds: int, rate: float, *, smoke: bool
) -> int:
    """The rehearsal in a folder; the number of surprises. `smoke`: without the load to which nothing happens."""
    rows = [
        f"- {{name: n{i:02}, url: 'http://{address(i)}:{PORT}', gpus: 4}}"
        for i in range(1, endpoints + 1)
    ]
    (folder / "rack.yaml").write_text("\n".join(rows) + "\n")
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i} " * 40}) + "\n" for i in range(100))
    )
    typist = Typist(folder, fault_s=seconds / 4)
    with rack(endpoints) as started, load_machines(machines) as cluster:
        ray = ["--ray", cluster.address, "--workers", str(machines)]
        load = [
            "mlperf",
            "server",
            "-b",
            "llama2-70b",
            "--targets",
            "rack.yaml",
            "--dataset",
            "data.jsonl",
            "--target-qps",
            f"{rate:g}",
            "--min-duration",
            str(seconds),
            *ray,
        ]
        heard = (
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
        doctored = ("doctor", "--url", f"http://{address(KILLED)}:{PORT}")
        typist.type(doctored, (0, 1, 3), ("fail", "warn", "not "))
        if not smoke:
            typist.type([*load, "--out", "whole"], (0, 1, 3), heard)

        def kill_endpoint() -> None:
            started[KILLED].kill()
            started[KILLED].wait()

        typist.type([*load, "--out", "endpoint"], (3,), heard, kill_endpoint)
        typist.type(doctored, (2, 3), ("fail", "error", "not "))
        started[KILLED] = endpoint(KILLED)
        wait(lambda: listening(KILLED), "the endpoint does not come back")

        def kill_node() -> None:
            cluster.remove_node(list(cluster.worker_nodes)[-1], allow_graceful=False)

        typist.type([*load, "--out", "node"], (3,), heard, kill_node)
        typist.type([*load, "--out", "again", "--workers", str(machines - 1)], (0, 1, 3), heard)
        typist.type(["bundle", "again", "-o", "rack.zip"], (0,), ("rack.zip",))
        typist.type(["verify", "rack.zip"], (0,), ("",))
    return typist.surprises


def main() -> int:
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
