"""Measure every second what a worker uses: CPU, memory, and the time it waited for a core."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from time import process_time_ns

from loadgen.core.execution.events import Counters
from loadgen.core.results.manifest import WorkerSample

SECOND_NS = 1_000_000_000

_SCHEDSTAT = "/proc/thread-self/schedstat"
_MAX_SCHEDSTAT_BYTES = 64
_BYTES_PER_KIB = 1024


def peak_memory_bytes() -> int:
    """Return the largest resident memory that this process has had.

    Linux reports it in KiB, and macOS in bytes.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _BYTES_PER_KIB


class RunQueueWait:
    """How long this thread was ready to run but had no core. Only Linux counts this time."""

    __slots__ = ("_descriptor", "_last_ns")

    def __init__(self) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(_SCHEDSTAT, os.O_RDONLY)
        self._last_ns = self.total_ns()

    def total_ns(self) -> int | None:
        """Return the time since the thread started, or None if it is not known."""
        if self._descriptor is None:
            return None
        fields = os.pread(self._descriptor, _MAX_SCHEDSTAT_BYTES, 0).split()
        return int(fields[1])

    def since_last_call_ns(self) -> int | None:
        """Return the time since the last call, or since the object was created."""
        previous_ns = self._last_ns
        self._last_ns = self.total_ns()
        if previous_ns is None or self._last_ns is None:
            return None
        return self._last_ns - previous_ns

    def close(self) -> None:
        """Close the file of the system. Afterwards the time is not known."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class SelfSampling:
    """Creates the `WorkerSample`s of one worker. Create it in the thread that sends.

    The caller adds the time that it spends in writes to `written_ns`.
    """

    def __init__(self, worker: int, start_ns: int) -> None:
        self.written_ns = 0
        self._worker = worker
        self._start_ns = start_ns
        self._last_ns = start_ns
        self._start_cpu_ns = process_time_ns()
        self._last_cpu_ns = self._start_cpu_ns
        self._run_queue_wait = RunQueueWait()

    def is_due(self, now_ns: int) -> bool:
        """Return True if a second has passed since the last sample."""
        return now_ns >= self._last_ns + SECOND_NS

    def take_sample(self, now_ns: int, counters: Counters) -> WorkerSample:
        """Return what this worker has used since the last sample, and begin the next interval.

        A sample shows whether the load generator is the bottleneck of its own measurement. Values
        that end with `_share` are fractions of the time since the last sample: the CPU time, the
        time of waiting for a core, and the time of writes to disk. CPU seconds and counters are
        totals since the start.

        Args:
            now_ns: The time on the monotonic clock.
            counters: The counters of the load.
        """
        cpu_ns = process_time_ns()
        interval_ns = now_ns - self._last_ns
        sample = WorkerSample(
            t_s=round((now_ns - self._start_ns) / SECOND_NS, 3),
            worker=self._worker,
            span_s=round(interval_ns / SECOND_NS, 3),
            cpu_share=_share(cpu_ns - self._last_cpu_ns, interval_ns),
            waited_share=self._share_of_waiting(interval_ns),
            write_share=_share(self.written_ns, interval_ns),
            cpu_s=round((cpu_ns - self._start_cpu_ns) / SECOND_NS, 4),
            peak_rss_bytes=peak_memory_bytes(),
            in_flight=counters.in_flight,
            sent=counters.sent,
            done=counters.ok + counters.failed,
            failed=counters.failed,
        )
        self._last_ns = now_ns
        self._last_cpu_ns = cpu_ns
        self.written_ns = 0  # The caller adds the writes of the next interval.

        return sample

    def _share_of_waiting(self, interval_ns: int) -> float | None:
        """Return the fraction of the last interval for which the thread was ready but had no core.

        Return None if the operating system does not report it.
        """
        waited_ns = self._run_queue_wait.since_last_call_ns()
        if waited_ns is None or interval_ns <= 0:
            return None
        return _share(waited_ns, interval_ns)

    def close(self) -> None:
        """Close the file of the system."""
        self._run_queue_wait.close()


def _share(part_ns: int, span_ns: int) -> float:
    """Return which share of a time span a part of it is, or 0 if the span is empty."""
    return round(part_ns / span_ns, 4) if span_ns else 0.0
