"""A command watched from outside: CPU and memory of its process and all processes below it, sampled from /proc.

Sampling costs the watcher's own CPU, not the watched one's. Linux only.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import rig

EVERY_S = 0.003
CPU_ONLY_S = 3.0  # finely at first, where the start is; every tenth sample later


class Watched(NamedTuple):
    """What was seen of a command. Instants are monotonic ns; `peaks`: VmHWM bytes of "run", "recorder", "worker"."""

    code: int
    begun_ns: int
    ended_ns: int
    samples: list[tuple[int, int]]  # instant, CPU ns of the whole tree so far
    peaks: dict[str, int]
    output: str

    def cpu_s_at(self, instant_ns: int) -> float:
        """CPU-seconds of the tree up to the first sample after an instant."""
        return (
            next((cpu for at, cpu in self.samples if at >= instant_ns), self.samples[-1][1]) / 1e9
        )


def watch(command: Sequence[str], folder: Path, *, core: bool = True) -> Watched:
    """Run a command in `folder` to its end. `core`: on the client's core."""
    output = folder / "output.txt"
    seen: dict[int, int] = {}  # CPU ns by process; of those that are gone, the last that was seen
    peaks: dict[str, int] = {}
    samples: list[tuple[int, int]] = []
    cores = rig.cores()[0] if core else os.sched_getaffinity(0)
    with output.open("w") as file:
        begun = time.monotonic_ns()
        child = subprocess.Popen(
            command,
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509
        )
        rounds = 0
        while True:
            ended = child.poll() is not None
            now = time.monotonic_ns()
            if ended:
                break
            if now - begun < CPU_ONLY_S * 1e9 or not rounds % 10:
                for pid in _below(child.pid):
                    _look(pid, seen, peaks, memory=not rounds % 10)  # with the first look
                samples.append((now, sum(seen.values())))
            rounds += 1
            time.sleep(EVERY_S)
    return Watched(child.returncode, begun, now, samples, peaks, output.read_text())


def _below(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        try:
            for task in os.listdir(f"/proc/{each}/task"):
                found += map(int, Path(f"/proc/{each}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return found


NAMES = {
    b"loadgen.core.sidecars.compactor_process": "recorder",
    b"loadgen.core.execution.backends.worker": "worker",
}


def _look(pid: int, seen: dict[int, int], peaks: dict[str, int], *, memory: bool) -> None:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        cpu = sum(
            int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0]) for task in tasks
        )
        seen[pid] = max(seen.get(pid, 0), cpu)
        if memory:
            status = Path(f"/proc/{pid}/status").read_text()
            peak = (
                next(
                    (int(row.split()[1]) for row in status.splitlines() if row.startswith("VmHWM")),
                    0,
                )
                * 1024
            )
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            name = next((name for word, name in NAMES.items() if word in words), "run")
            peaks[name] = max(peaks.get(name, 0), peak)
    except (OSError, IndexError, ValueError):
        return  # it has just ended
