"""Watch a command from outside: CPU and memory of its process tree, sampled from /proc.

Sampling costs CPU of the watching process only. Linux only.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import rig

SAMPLE_INTERVAL_S = 0.003
FINE_SAMPLING_S = 3.0  # finely at first, where the start is; every tenth sample later


class WatchedCommand(NamedTuple):
    """What was seen of a command. Instants are monotonic ns.

    `peaks` holds the largest resident size in bytes of the processes "run", "recorder" and
    "worker".
    """

    code: int
    begun_ns: int
    ended_ns: int
    samples: list[tuple[int, int]]  # instant, CPU ns of the whole tree so far
    peaks: dict[str, int]
    output: str

    def cpu_s_at(self, instant_ns: int) -> float:
        """Return the CPU-seconds of the process tree up to the first sample after an instant."""
        return (
            next(
                (cpu_ns for sampled_ns, cpu_ns in self.samples if sampled_ns >= instant_ns),
                self.samples[-1][1],
            )
            / 1e9
        )


def watch_command(command: Sequence[str], folder: Path, *, core: bool = True) -> WatchedCommand:
    """Run a command in `folder` until it ends, and sample its process tree.

    `core` pins it to the client's core.
    """
    output = folder / "output.txt"
    cpu_ns_by_pid: dict[
        int, int
    ] = {}  # CPU ns by process; of those that are gone, the last that was seen
    peaks: dict[str, int] = {}
    samples: list[tuple[int, int]] = []
    cores = rig.client_and_server_cores()[0] if core else os.sched_getaffinity(0)
    with output.open("w") as file:
        begun_ns = time.monotonic_ns()
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509
        )
        sample_count = 0
        while True:
            ended = process.poll() is not None
            now_ns = time.monotonic_ns()
            if ended:
                break
            if now_ns - begun_ns < FINE_SAMPLING_S * 1e9 or not sample_count % 10:
                for pid in _process_tree(process.pid):
                    _sample_process(
                        pid, cpu_ns_by_pid, peaks, memory=not sample_count % 10
                    )  # with the first look
                samples.append((now_ns, sum(cpu_ns_by_pid.values())))
            sample_count += 1
            time.sleep(SAMPLE_INTERVAL_S)
    return WatchedCommand(process.returncode, begun_ns, now_ns, samples, peaks, output.read_text())


def _process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    pids = [pid]
    for parent in pids:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                pids += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return pids


PROCESS_NAMES = {
    b"loadgen.core.sidecars.compactor_process": "recorder",
    b"loadgen.core.execution.backends.worker": "worker",
}


def _sample_process(
    pid: int, cpu_ns_by_pid: dict[int, int], peaks: dict[str, int], *, memory: bool
) -> None:
    """Update the CPU time of a process and, with `memory`, its peak resident size."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        cpu_ns = sum(
            int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0]) for task in tasks
        )
        cpu_ns_by_pid[pid] = max(cpu_ns_by_pid.get(pid, 0), cpu_ns)
        if memory:
            status = Path(f"/proc/{pid}/status").read_text()
            peak = (
                next(
                    (
                        int(line.split()[1])
                        for line in status.splitlines()
                        if line.startswith("VmHWM")
                    ),
                    0,
                )
                * 1024
            )
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            name = next(
                (name for module, name in PROCESS_NAMES.items() if module in arguments), "run"
            )
            peaks[name] = max(peaks.get(name, 0), peak)
    except (OSError, IndexError, ValueError):
        return  # it has just ended
