"""What a worker uses itself, once a second: CPU, memory, and how long it waited for a core. IO: reads `/proc`."""

from __future__ import annotations

import os
import resource
from time import process_time_ns

from loadgen.core.execution.events import Counters
from loadgen.core.results.manifest import WorkerSample

SECOND_NS = 1_000_000_000


class Waiting:
    """How long this thread was ready to run but had no core, in ns. Linux counts it; None on other systems."""

    __slots__ = ("_fd", "_last_ns")

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._fd = -1
        self._last_ns = self.ns()

    def ns(self) -> int | None:
        """Total so far, ns."""
        return int(os.pread(self._fd, 64, 0).split()[1]) if self._fd >= 0 else None

    def since(self) -> int | None:
        """Since the last call, or since the object was created, ns."""
        previous, self._last_ns = self._last_ns, self.ns()
        return None if previous is None or self._last_ns is None else self._last_ns - previous

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SelfSampling:
    """Makes the `WorkerSample`s of one worker. Create it in the thread that sends. `written_ns`: time spent in writes."""

    def __init__(self, worker: int, start_ns: int) -> None:
        self._worker, self._start_ns, self._last_ns = worker, start_ns, start_ns
        self._cpu_start_ns = self._cpu_ns = process_time_ns()
        self._waiting, self.written_ns = Waiting(), 0

    def is_due(self, now: int) -> bool:
        """Whether a second has passed since the last one."""
        return now >= self._last_ns + SECOND_NS

    def second(self, now: int, counters: Counters) -> WorkerSample:
        """What was used since the last call."""
        cpu, waited, span = process_time_ns(), self._waiting.since(), now - self._last_ns
        second = WorkerSample(
            t_s=round((now - self._start_ns) / SECOND_NS, 3),
            worker=self._worker,
            span_s=round(span / SECOND_NS, 3),
            cpu_share=round((cpu - self._cpu_ns) / span, 4) if span else 0.0,
            waited_share=round(waited / span, 4) if span and waited is not None else None,
            write_share=round(self.written_ns / span, 4) if span else 0.0,
            cpu_s=round((cpu - self._cpu_start_ns) / SECOND_NS, 4),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            in_flight=counters.in_flight,
            sent=counters.sent,
            done=counters.ok + counters.failed,
            failed=counters.failed,
        )
        self._last_ns, self._cpu_ns, self.written_ns = now, cpu, 0
        return second

    def close(self) -> None:
        self._waiting.close()
