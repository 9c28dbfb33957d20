"""Several workers on this machine: one process and one share each; they coordinate nothing while the clock runs.

A worker builds its share, reports `ready`, gets the common start instant, works, and reports a `WorkerResult`. Each has its
own sockets and its own files. IO; `worker.py` defines the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic_ns

from loadgen.core import child_process
from loadgen.core.errors import TargetError
from loadgen.core.execution import driver, stop_signals
from loadgen.core.execution.backend import Backend
from loadgen.core.execution.backends import merge, worker
from loadgen.core.execution.events import Emit, LoadStarted, RunningLoad
from loadgen.core.execution.plan import Plan, Settings
from loadgen.core.execution.shard import (
    NS_PER_S,
    Shard,
    sleep_until_before_start,
    start_instant_ns,
)
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.execution.worker_resources import WorkerResult


class ThisMachine:
    """This process, where one worker is enough, else processes of their own."""

    cores = None

    async def place(self, plan: Plan, tell: Emit) -> list[str]:
        return []

    async def run(self, plan: Plan, tell: Emit) -> WorkerResult:
        return await (run if plan.job.settings.workers > 1 else driver.run)(plan, tell)


@contextlib.contextmanager
def use_this_machine(settings: Settings) -> Iterator[ThisMachine]:  # noqa: ARG001 - of a Backend
    """Give the senders of a run that is sent from this machine alone."""
    yield ThisMachine()


HTTP = Backend(senders=use_this_machine)
"""A server that is loaded over HTTP from this machine."""


async def run(plan: Plan, tell: Emit) -> WorkerResult:
    """Carry out a plan on its worker processes and return the merged shares.

    Unfinished slots of a worker that dies are recorded as `lost`. A worker that publishes nothing
    for `frozen_s` hangs, and is killed. Signals are passed on to all workers: after the first they
    stop and drain, after the second they end at once.

    Raises TargetError if a worker could not start, OSError if an error of this host ended one (a
    full disk), and KeyboardInterrupt if a signal came before all had started.
    """
    job, workers, frozen_s = plan.job, plan.job.settings.workers, plan.job.settings.tuning.frozen_s
    (job.folder / "spool").mkdir(exist_ok=True)
    processes = [worker.start() for _ in range(workers)]
    threads = ThreadPoolExecutor(workers)  # one each: all are heard at once
    counters = SharedCounters(job.folder / "spool" / worker.BOARD, workers)

    def pass_on(number: int) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    try:
        with stop_signals.ending_start(lambda: pass_on(signal.SIGKILL)):
            await _all_ready(processes, pickle.dumps(job), threads, frozen_s)
            await _wait_for_start(processes, job.settings.shard)
        with stop_signals.calling(pass_on):
            await stop_signals.heard()
            start_ns = start_instant_ns(job.settings.shard, lead_ns=worker.HEAD_START_NS)
            tell(LoadStarted(start_ns, RunningLoad(counters.sum, lambda: pass_on(signal.SIGINT))))
            for process in processes:
                worker.tell(process, f"{start_ns}\n".encode())
            loop = asyncio.get_running_loop()
            reports = asyncio.gather(
                *(
                    loop.run_in_executor(threads, _report, process, processes)
                    for process in processes
                )
            )
            reasons = [f"worker {i} died" for i in range(workers)]
            while not (await asyncio.wait([reports], timeout=1))[0]:
                for i, process in enumerate(processes):
                    moved_ns = max(counters.updated_ns(i), start_ns)
                    if process.poll() is None and monotonic_ns() > moved_ns + frozen_s * 1e9:
                        reasons[i] = f"worker {i} did not move for {frozen_s:g} s and was killed"
                        process.kill()
            return merge.total(plan, reports.result(), reasons)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # all of them before the first is waited for
        for process in processes:
            child_process.end(process)
        threads.shutdown()
        counters.close()  # whoever heard of this load may keep them for longer


async def _all_ready(
    processes: list[subprocess.Popen[bytes]],
    job: bytes,
    threads: ThreadPoolExecutor,
    frozen_s: float,
) -> None:
    """Give every worker its share, and wait until all are ready. Raises TargetError for one that could not start.

    One that uses no CPU time for `frozen_s` does not move any more: connections are opened in less.
    """

    def ready(i: int) -> None:
        worker.give(processes[i], job, i, len(processes))
        stdout = processes[i].stdout
        assert stdout is not None
        worker.expect_ready(stdout.readline())

    loop = asyncio.get_running_loop()
    starts = [loop.run_in_executor(threads, ready, i) for i in range(len(processes))]
    for start in starts:
        start.add_done_callback(
            lambda done: done.exception()
        )  # the first fault is raised, the others are its effects
    used_s = [-1.0] * len(processes)
    frozen: set[int] = set()
    while not all(start.done() for start in starts):
        done, _ = await asyncio.wait(starts, timeout=frozen_s, return_when=asyncio.FIRST_EXCEPTION)
        if any(start.exception() for start in done):
            break
        for i, start in enumerate(starts):
            before_s, used_s[i] = used_s[i], child_process.cpu_s(processes[i].pid)
            if not start.done() and used_s[i] == before_s:
                frozen.add(i)
                processes[i].kill()
    if frozen:
        what = (
            f"worker {min(frozen)} did not move for {frozen_s:g} s before the load, and was killed"
        )
        raise TargetError(
            "process_failed",
            what,
            f"--workers {len(processes)}",
            "is this host out of memory, or its disk stuck?",
        )
    for start in starts:
        if start.done():
            start.result()


async def _wait_for_start(
    processes: Sequence[subprocess.Popen[bytes]], shard: Shard | None
) -> None:
    """Wait until the workers have to be told the common start of a shard, or until one of them has ended."""
    if shard is None:
        return
    lead_s = worker.HEAD_START_NS / NS_PER_S
    waiting = asyncio.create_task(sleep_until_before_start(shard, lead_s))
    while not waiting.done() and all(process.poll() is None for process in processes):
        await asyncio.wait([waiting], timeout=0.2)
    waiting.cancel()


def _report(
    process: subprocess.Popen[bytes], all_processes: list[subprocess.Popen[bytes]]
) -> WorkerResult | None:
    """Return the share that a worker reports at its end, or None if it died.

    Raises OSError if an error of this host ended the worker, for example a full disk.
    """

    def stop_others() -> None:
        for other in all_processes:
            worker.tell(other, worker.STOPPING)

    assert process.stdout is not None
    share = None
    for line in process.stdout:
        share = worker.read_share(line, stop_others)
    process.wait()
    return share
