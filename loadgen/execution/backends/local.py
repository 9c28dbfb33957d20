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

from loadgen.execution.backends import merge, worker
from loadgen.execution.backends.single import Share
from loadgen.execution.events import LoadStarted, RunningLoad, Tell
from loadgen.execution.plan import Plan
from loadgen.execution.shared_counters import SharedCounters


async def run(plan: Plan, tell: Tell) -> Share:
    """Carry out a plan on its worker processes. Unfinished slots of a worker that dies are recorded as `lost`.

    Raises TargetError if a worker could not start. SIGINT and SIGTERM are passed on to all workers: after the first
    they stop and drain, after the second they end at once.
    """
    job, workers = plan.job, plan.job.settings.workers
    (job.folder / "spool").mkdir(exist_ok=True)
    data = pickle.dumps(job)
    processes = [worker.start(data, i, workers) for i in range(workers)]
    counters = SharedCounters(job.folder / "spool" / worker.BOARD, workers)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _pass_on, processes, number)
    try:
        await asyncio.gather(*(asyncio.to_thread(_expect_ready, process) for process in processes))
        start_ns = monotonic_ns() + worker.HEAD_START_NS
        tell(LoadStarted(start_ns, RunningLoad(counters.sum, lambda: _pass_on(processes, signal.SIGINT))))
        for process in processes:
            worker.tell(process, f"{start_ns}\n".encode())
        shares = await asyncio.gather(*(asyncio.to_thread(_report, process, processes) for process in processes))
        total = merge.NOTHING
        for i, share in enumerate(shares):
            total = merge.add(total, share or merge.lost(plan, i, f"worker {i} died"))
        return total
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        for process in processes:
            if process.poll() is None:
                process.terminate()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()
            process.wait()


def _pass_on(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _expect_ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    worker.expect_ready(process.stdout.readline())


def _report(process: subprocess.Popen[bytes], all_processes: list[subprocess.Popen[bytes]]) -> Share | None:
    """The Share that a worker reports at its end; None if it died.

    If it reports earlier that it stops because a target is down, or if it dies, all other workers are told to stop.
    """
    assert process.stdout is not None
    share = None
    for line in process.stdout:
        if line != worker.STOPPING:
            share = worker.read_share(line)
        if share is None or share.stopped:
            for other in all_processes:
                worker.tell(other, worker.STOPPING)
    process.wait()
    return share
