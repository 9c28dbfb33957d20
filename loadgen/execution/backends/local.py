"""Several workers on this machine: one process and one share each; they coordinate nothing while the clock runs.

A worker builds its share, reports `ready`, gets the common start instant, works, and reports a `Share`. Each has its
own sockets and its own files. IO; `worker.py` defines the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
import subprocess
from time import monotonic_ns

from loadgen.execution import stop_signals
from loadgen.execution.backends import merge, worker
from loadgen.execution.backends.single import Share
from loadgen.execution.events import LoadStarted, RunningLoad, Tell
from loadgen.execution.plan import Plan
from loadgen.execution.shared_counters import SharedCounters

FROZEN_NS = 30_000_000_000  # a worker publishes its counters once a second


async def run(plan: Plan, tell: Tell) -> Share:
    """Carry out a plan on its worker processes. Unfinished slots of a worker that dies are recorded as `lost`; one that
    publishes nothing for FROZEN_NS does not move any more, and is ended.

    Raises TargetError if a worker could not start. SIGINT and SIGTERM are passed on to all workers: after the first
    they stop and drain, after the second they end at once.
    """
    job, workers = plan.job, plan.job.settings.workers
    (job.folder / "spool").mkdir(exist_ok=True)
    data = pickle.dumps(job)
    processes = [worker.start(data, i, workers) for i in range(workers)]
    counters = SharedCounters(job.folder / "spool" / worker.BOARD, workers)

    def pass_on(number: int) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    try:
        with stop_signals.calling(pass_on):
            await asyncio.gather(*(asyncio.to_thread(_expect_ready, process) for process in processes))
            start_ns = monotonic_ns() + worker.HEAD_START_NS
            tell(LoadStarted(start_ns, RunningLoad(counters.sum, lambda: pass_on(signal.SIGINT))))
            for process in processes:
                worker.tell(process, f"{start_ns}\n".encode())
            reports = asyncio.gather(*(asyncio.to_thread(_report, process, processes) for process in processes))
            reasons = [f"worker {i} died" for i in range(workers)]
            while not (await asyncio.wait([reports], timeout=1))[0]:
                for i, process in enumerate(processes):
                    moved_ns = max(counters.updated_ns(i), start_ns)
                    if process.poll() is None and monotonic_ns() > moved_ns + FROZEN_NS:
                        reasons[i] = f"worker {i} did not move for {FROZEN_NS / 1e9:g} s and was killed"
                        process.kill()
            return merge.total(plan, reports.result(), reasons)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()
            process.wait()


def _expect_ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    worker.expect_ready(process.stdout.readline())


def _report(process: subprocess.Popen[bytes], all_processes: list[subprocess.Popen[bytes]]) -> Share | None:
    """The Share that a worker reports at its end; None if it died."""

    def stop_others() -> None:
        for other in all_processes:
            worker.tell(other, worker.STOPPING)

    assert process.stdout is not None
    share = None
    for line in process.stdout:
        share = worker.read_share(line, stop_others)
    process.wait()
    return share
