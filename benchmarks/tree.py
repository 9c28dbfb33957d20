"""Run a command and observe its process tree from outside: CPU time and memory, read from /proc.

Reading costs CPU time of the observing process only. It works on Linux only.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import rig

SAMPLE_INTERVAL_S = 0.003
# The start of a command is sampled at each interval. Later, and for memory, every tenth sample is
# enough, and disturbs other processes less.
DETAILED_SAMPLING_S = 3.0
SPARSE_STEP = 10

# How processes of loadgen are named here, by the module that they run. All others are called
# OTHER_PROCESS: the command itself, which is `loadgen run` in all benchmarks.
PROCESS_NAMES = {
    b"loadgen.core.sidecars.compactor_process": "recorder",
    b"loadgen.core.execution.backends.worker": "worker",
}
OTHER_PROCESS = "run"


class CpuSample(NamedTuple):
    """The CPU time in ns that a process tree had used at one moment of the monotonic clock."""

    monotonic_ns: int
    cpu_ns: int


class WatchedCommand(NamedTuple):
    """What was observed of a command that has ended.

    Attributes:
        code: The exit code.
        begun_ns: When the command was started, on the monotonic clock.
        ended_ns: When it was seen to have ended.
        samples: The CPU time of the whole process tree, in the order of time.
        peaks: The largest resident size in bytes of the processes "run", "recorder" and "worker".
        output: What the command printed to stdout and stderr.
    """

    code: int
    begun_ns: int
    ended_ns: int
    samples: list[CpuSample]
    peaks: dict[str, int]
    output: str

    def cpu_s_at(self, monotonic_ns: int) -> float:
        """Return the CPU-seconds that the process tree had used at a moment.

        It is the value of the first sample at or after that moment, or else of the last sample.
        """
        for sample in self.samples:
            if sample.monotonic_ns >= monotonic_ns:
                return sample.cpu_ns / 1e9
        return self.samples[-1].cpu_ns / 1e9


class ProcessTreeSampler:
    """Samples the CPU time and the memory of a process and its descendants.

    `samples` and `peaks` grow with each sample, and mean the same as those of `WatchedCommand`. A
    process that has ended keeps the CPU time that was seen last.
    """

    def __init__(self, root_pid: int) -> None:
        self._root_pid = root_pid
        self._cpu_ns_by_pid: dict[int, int] = {}
        self.samples: list[CpuSample] = []
        self.peaks: dict[str, int] = {}

    def take_sample(self, monotonic_ns: int, *, with_memory: bool) -> None:
        """Read the CPU time of all processes and, `with_memory`, their peak resident sizes.

        `monotonic_ns` is the present time, which the sample gets.
        """
        for pid in list_process_tree(self._root_pid):
            # A process may end while it is read; then its files are missing, empty or cut short.
            with contextlib.suppress(OSError, IndexError, ValueError):
                self._update_cpu(pid)
                if with_memory:
                    self._update_peak(pid)

        cpu_ns = sum(self._cpu_ns_by_pid.values())
        self.samples.append(CpuSample(monotonic_ns, cpu_ns))

    def _update_cpu(self, pid: int) -> None:
        """Update the CPU time of a process, which is the sum over its threads.

        The sum gets smaller when a thread ends, so the largest sum counts.
        """
        cpu_ns = sum(_read_thread_cpu_ns(pid, thread) for thread in os.listdir(f"/proc/{pid}/task"))
        self._cpu_ns_by_pid[pid] = max(self._cpu_ns_by_pid.get(pid, 0), cpu_ns)

    def _update_peak(self, pid: int) -> None:
        """Update the largest resident size of the processes that have the name of this one."""
        name = _read_process_name(pid)
        self.peaks[name] = max(self.peaks.get(name, 0), _read_peak_bytes(pid))


def _read_thread_cpu_ns(pid: int, thread_id: str) -> int:
    """Return the CPU time in ns of a thread of a process."""
    # The three numbers of this file: ns on a core, ns of waiting for a core, number of time slices
    schedstat = Path(f"/proc/{pid}/task/{thread_id}/schedstat").read_text()
    return int(schedstat.split()[0])


def _read_process_name(pid: int) -> str:
    """Return "recorder" or "worker" if a process runs a module of that name, and else "run"."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    for module, name in PROCESS_NAMES.items():
        if module in arguments:
            return name
    return OTHER_PROCESS


def _read_peak_bytes(pid: int) -> int:
    """Return the peak resident size of a process, or 0 for a zombie, which has no memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            kib = int(line.split()[1])
            return kib * 1024
    return 0


def list_process_tree(root_pid: int) -> list[int]:
    """Return the IDs of a process and of all its descendants."""
    pids = []
    to_visit = [root_pid]
    while to_visit:
        pid = to_visit.pop()
        pids.append(pid)
        to_visit += _list_child_processes(pid)
    return pids


def _list_child_processes(pid: int) -> list[int]:
    """Return the IDs of the child processes of a process, which any of its threads started.

    If the process ends meanwhile, the children that were found until then are returned.
    """
    child_pids = []
    try:
        for thread_id in os.listdir(f"/proc/{pid}/task"):
            children = Path(f"/proc/{pid}/task/{thread_id}/children").read_text()
            child_pids += [int(child) for child in children.split()]
    except OSError:
        return child_pids

    return child_pids


def watch_command(
    command: Sequence[str], folder: Path, *, is_pinned: bool = True
) -> WatchedCommand:
    """Run a command in a folder until it ends, and sample its process tree meanwhile.

    Its output is also written to `output.txt` in the folder.

    Args:
        command: The program and its arguments.
        folder: The working directory of the command.
        is_pinned: Run the command and its descendants on the client's core only.
    """
    cores = rig.assign_cores().client if is_pinned else os.sched_getaffinity(0)
    output_path = folder / "output.txt"

    with output_path.open("w") as output_file:
        begun_ns = time.monotonic_ns()
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=output_file,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509
        )
        sampler = ProcessTreeSampler(process.pid)
        ended_ns = _sample_until_end(process, sampler, begun_ns)

    return WatchedCommand(
        code=process.returncode,
        begun_ns=begun_ns,
        ended_ns=ended_ns,
        samples=sampler.samples,
        peaks=sampler.peaks,
        output=output_path.read_text(),
    )


def _sample_until_end(
    process: subprocess.Popen[bytes], sampler: ProcessTreeSampler, begun_ns: int
) -> int:
    """Sample a process tree until its root process ends, and return when it was seen to have ended.

    Samples are taken every SAMPLE_INTERVAL_S in the first DETAILED_SAMPLING_S, so that the start of
    a command is seen in detail, and less often later. All times are ns of the monotonic clock.
    """
    step = 0
    while process.poll() is None:
        now_ns = time.monotonic_ns()
        is_start = now_ns - begun_ns < DETAILED_SAMPLING_S * 1e9
        is_sparse_step = step % SPARSE_STEP == 0
        if is_start or is_sparse_step:
            sampler.take_sample(now_ns, with_memory=is_sparse_step)

        time.sleep(SAMPLE_INTERVAL_S)
        step += 1

    return time.monotonic_ns()
