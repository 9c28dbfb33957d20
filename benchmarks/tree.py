"""Watch a command from outside: CPU and memory of its process tree, sampled from /proc.

Sampling costs CPU of the watching process only. Linux only.
"""

from __future__ import annotations

import contextlib
import itertools
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
    """What was seen of a command. Times are monotonic ns.

    `samples` has the time of each sample and the CPU ns of the whole process tree so far. `peaks`
    holds the largest resident size in bytes of the processes "run", "recorder" and "worker".
    """

    code: int
    begun_ns: int
    ended_ns: int
    samples: list[tuple[int, int]]
    peaks: dict[str, int]
    output: str

    def cpu_s_at(self, time_ns: int) -> float:
        """Return the CPU-seconds of the process tree up to the first sample after a time.

        If there is no later sample, it is the CPU time of the last one.
        """
        for sampled_ns, cpu_ns in self.samples:
            if sampled_ns >= time_ns:
                return cpu_ns / 1e9
        _, last_cpu_ns = self.samples[-1]
        return last_cpu_ns / 1e9


class ProcessTreeSampler:
    """Samples CPU time and memory of a process and its descendants.

    `samples` and `peaks` are those of `WatchedCommand`. A process that has ended keeps the CPU time
    that was seen last.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_ns_by_pid: dict[int, int] = {}
        self.samples: list[tuple[int, int]] = []
        self.peaks: dict[str, int] = {}

    def sample(self, now_ns: int, *, with_memory: bool) -> None:
        """Read the CPU time of all processes and, `with_memory`, their peak resident sizes."""
        for pid in list_process_tree(self._pid):
            # A process may end while it is read.
            with contextlib.suppress(OSError, IndexError, ValueError):
                self._sample_cpu(pid)
                if with_memory:
                    self._sample_memory(pid)
        self.samples.append((now_ns, sum(self._cpu_ns_by_pid.values())))

    def _sample_cpu(self, pid: int) -> None:
        """Update the CPU time of a process: the sum over its threads, which may have ended."""
        threads = os.listdir(f"/proc/{pid}/task")
        # /proc/.../schedstat: ns on a core, ns waiting for one, number of time slices
        cpu_ns = sum(
            int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
            for thread in threads
        )
        self._cpu_ns_by_pid[pid] = max(self._cpu_ns_by_pid.get(pid, 0), cpu_ns)

    def _sample_memory(self, pid: int) -> None:
        """Update the peak resident size of the processes with the name of this one."""
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        names = [name for module, name in PROCESS_NAMES.items() if module in arguments]
        name = names[0] if names else "run"
        self.peaks[name] = max(self.peaks.get(name, 0), _read_peak_bytes(pid))


def _read_peak_bytes(pid: int) -> int:
    """Return the peak resident size of a process, 0 if it is a zombie and has none."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            kib = int(line.split()[1])
            return kib * 1024
    return 0


SPARSE_STEP = 10  # every tenth sample reads the memory, and is the only one after the start


def watch_command(
    command: Sequence[str], folder: Path, *, is_pinned: bool = True
) -> WatchedCommand:
    """Run a command in `folder` until it ends, and sample its process tree.

    The samples are SAMPLE_INTERVAL_S apart at first, so that the start is seen in detail, and ten
    times as far after FINE_SAMPLING_S. With `is_pinned`, the command runs on the client's core.
    """
    output = folder / "output.txt"
    client_cores = rig.assign_cores().client

    cores = client_cores if is_pinned else os.sched_getaffinity(0)
    with output.open("w") as file:
        begun_ns = time.monotonic_ns()
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509
        )

        sampler = ProcessTreeSampler(process.pid)
        for step in itertools.count():
            has_ended = process.poll() is not None
            now_ns = time.monotonic_ns()
            if has_ended:
                break

            is_start = now_ns - begun_ns < FINE_SAMPLING_S * 1e9
            is_sparse_step = step % SPARSE_STEP == 0
            if is_start or is_sparse_step:
                sampler.sample(now_ns, with_memory=is_sparse_step)

            time.sleep(SAMPLE_INTERVAL_S)

    return WatchedCommand(
        process.returncode, begun_ns, now_ns, sampler.samples, sampler.peaks, output.read_text()
    )


def list_process_tree(root_pid: int) -> list[int]:
    """Return a process and all its descendants."""
    pids = []
    to_visit = [root_pid]
    while to_visit:
        pid = to_visit.pop()
        pids.append(pid)
        to_visit += _child_processes(pid)
    return pids


def _child_processes(pid: int) -> list[int]:
    """Return the children of a process, which each of its threads may have started."""
    children = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            children += [int(child) for child in text.split()]
    except OSError:  # the process has just ended
        return children

    return children


PROCESS_NAMES = {
    b"loadgen.core.sidecars.compactor_process": "recorder",
    b"loadgen.core.execution.backends.worker": "worker",
}
