"""Several workers on this machine: a process each, a share each by arithmetic, nothing shared while the clock runs.

A worker builds its share, says `ready`, gets the common start instant, works, and reports a `Share`. Each has its own
sockets and its own files. IO; what is said to a worker is `worker.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
import subprocess
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from loadgen.execution.backends import merge, worker
from loadgen.execution.backends.single import Share
from loadgen.execution.plan import Job
from loadgen.execution.shared_counters import Counted, SharedCounters
from loadgen.schedule import timetable as schedule


async def run(
    job: Job,
    timetable: schedule.Schedule,
    workers: int,
    on_drive: Callable[[Counted], Any] | None = None,
    begin: Callable[[int], None] = lambda start_ns: None,
) -> Share:
    """Run a job on this many worker processes. A worker that dies leaves its unfinished slots as `lost`. `begin` is
    told the start instant as soon as it is set.

    Raises TargetError when a worker could not begin. The first SIGINT or SIGTERM is passed on to all (they stop and
    drain), so is the second (they leave).
    """
    (job.folder / "spool").mkdir(exist_ok=True)
    data = pickle.dumps(job)
    started = [worker.start(data, i, workers) for i in range(workers)]
    board = SharedCounters(job.folder / "spool" / worker.BOARD, workers, stop=lambda: _pass_on(started, signal.SIGINT))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _pass_on, started, number)
    try:
        await asyncio.gather(*(asyncio.to_thread(_expect_ready, one) for one in started))
        if on_drive is not None:
            on_drive(board)
        start_ns = monotonic_ns() + worker.HEAD_START_NS
        begin(start_ns)
        for one in started:
            worker.tell(one, f"{start_ns}\n".encode())
        told = await asyncio.gather(*(asyncio.to_thread(_report, one, started) for one in started))
        total = merge.NOTHING
        for i, share in enumerate(told):
            total = merge.add(total, share or merge.lost(job, timetable, i, workers, f"worker {i} died"))
        return total
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        for one in started:
            if one.poll() is None:
                one.terminate()
            for pipe in (one.stdin, one.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()
            one.wait()


def _pass_on(workers: list[subprocess.Popen[bytes]], number: int) -> None:
    for one in workers:
        if one.poll() is None:
            one.send_signal(number)


def _expect_ready(one: subprocess.Popen[bytes]) -> None:
    assert one.stdout is not None
    worker.expect_ready(one.stdout.readline())


def _report(one: subprocess.Popen[bytes], all_workers: list[subprocess.Popen[bytes]]) -> Share | None:
    """What a worker says at its end. That it stops because a target is gone it says at once: then the others stop."""
    assert one.stdout is not None
    share = None
    for said in one.stdout:
        if said != worker.STOPPING:
            share = worker.read_share(said)
        if share is None or share.stopped:
            for other in all_workers:
                worker.tell(other, worker.STOPPING)
    one.wait()
    return share
