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
    """What one thread has used since its start, in ns: on a core, and ready without a core."""

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
    """Read the times of all threads of a process and its descendants."""
    times_by_thread: dict[int, ThreadTimes] = {}
    for pid in list_process_tree(root_pid):
        # A process or a thread may end while it is read.
        with contextlib.suppress(OSError, ValueError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                times_by_thread[int(thread)] = _read_thread_times(pid, thread)
    return UsageSample(time.monotonic_ns(), times_by_thread)


def _read_thread_times(pid: int, thread: str) -> ThreadTimes:
    # /proc/.../schedstat: ns on a core, ns waiting for one, number of time slices
    cpu_ns, waited_ns, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
    return ThreadTimes(int(cpu_ns), int(waited_ns))


def measure_usage(samples: Sequence[UsageSample], begin_ns: int, end_ns: int) -> Usage | None:
    """Return the usage between the first and the last sample in an interval.

    Threads that began or ended in between are left out. Return None with fewer than two samples in
    the interval.
    """
    inside = [sample for sample in samples if begin_ns <= sample.monotonic_ns <= end_ns]
    if len(inside) < 2:
        return None

    first, last = inside[0], inside[-1]
    elapsed_ns = last.monotonic_ns - first.monotonic_ns
    threads = first.times_by_thread.keys() & last.times_by_thread.keys()
    cpu_shares = [
        (last.times_by_thread[thread].cpu_ns - first.times_by_thread[thread].cpu_ns) / elapsed_ns
        for thread in threads
    ]
    waited_shares = [
        (last.times_by_thread[thread].waited_ns - first.times_by_thread[thread].waited_ns)
        / elapsed_ns
        for thread in threads
    ]
    return Usage(
        cores=sum(cpu_shares),
        busiest_share=max(cpu_shares, default=0.0),
        waited_share=max(waited_shares, default=0.0),
    )
