"""Sample how much CPU time the threads of a process use, and how long they wait for a core."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tree import list_process_tree


class ThreadTimes(NamedTuple):
    """What one thread has used since its start, in ns.

    Attributes:
        cpu_ns: The time for which it ran on a core.
        waited_ns: The time for which it was ready to run but had no core.
    """

    cpu_ns: int
    waited_ns: int


class UsageSample(NamedTuple):
    """The times of all threads of a process and its descendants, by thread ID, at one time."""

    monotonic_ns: int
    times_by_thread: dict[int, ThreadTimes]


class Usage(NamedTuple):
    """How busy a process and its descendants were over an interval.

    Attributes:
        cores: The CPU time of all threads as a multiple of the interval.
        busiest_share: The share of the interval that the busiest thread was on a core. A thread
            near 1 is saturated.
        waited_share: The largest share of the interval that a thread was ready but had no core.
    """

    cores: float
    busiest_share: float
    waited_share: float


def sample_usage(root_pid: int) -> UsageSample:
    """Read the times of all threads of a process and its descendants.

    A process or a thread that ends while it is read is left out.
    """
    times_by_thread: dict[int, ThreadTimes] = {}
    for pid in list_process_tree(root_pid):
        with contextlib.suppress(OSError, ValueError):
            for thread_id in os.listdir(f"/proc/{pid}/task"):
                times_by_thread[int(thread_id)] = read_thread_times(pid, thread_id)
    return UsageSample(time.monotonic_ns(), times_by_thread)


def read_thread_times(pid: int, thread_id: str) -> ThreadTimes:
    """Return what a thread has used so far, by the scheduler statistics of the kernel."""
    schedstat = Path(f"/proc/{pid}/task/{thread_id}/schedstat").read_text()
    cpu_ns, waited_ns, _time_slices = schedstat.split()
    return ThreadTimes(int(cpu_ns), int(waited_ns))


def measure_usage(samples: Sequence[UsageSample], begin_ns: int, end_ns: int) -> Usage | None:
    """Return the usage between the first and the last sample in an interval.

    Threads that began or ended in between are left out. Return None with fewer than two samples in
    the interval.
    """
    samples_inside = [sample for sample in samples if begin_ns <= sample.monotonic_ns <= end_ns]
    if len(samples_inside) < 2:
        return None

    first = samples_inside[0]
    last = samples_inside[-1]
    elapsed_ns = last.monotonic_ns - first.monotonic_ns

    cpu_shares = []
    waited_shares = []
    for thread_id in first.times_by_thread.keys() & last.times_by_thread.keys():
        times_before = first.times_by_thread[thread_id]
        times_after = last.times_by_thread[thread_id]
        cpu_shares.append((times_after.cpu_ns - times_before.cpu_ns) / elapsed_ns)
        waited_shares.append((times_after.waited_ns - times_before.waited_ns) / elapsed_ns)

    return Usage(
        cores=sum(cpu_shares),
        busiest_share=max(cpu_shares, default=0.0),
        waited_share=max(waited_shares, default=0.0),
    )
