"""A worker process and what is said to it: a share of a job comes in by standard input, a `Share` goes out by standard
output. The same process works on this machine (`local.py`) and on a node of a cluster (`courier.py`).

    in   the job, its share; then the start instant on this machine's monotonic clock; then STOPPING, should it stop
    out  READY, or a fault as JSON; STOPPING when a target is gone and the run ends for it; at the end the Share as JSON

It ends with the process that started it, as the end of standard input tells. IO; what a worker does is `run.work`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import subprocess
import sys
from dataclasses import asdict
from time import monotonic_ns

from loadgen.errors import Fault, TargetError
from loadgen.execution.backends.single import Share, work
from loadgen.execution.driver import Driver
from loadgen.execution.plan import Job
from loadgen.execution.shared_counters import SharedCounters

BOARD = "board"
SHOW_S = 1.0
READY = b"ready\n"
STOPPING = b"stopping\n"
HEAD_START_NS = 200_000_000  # from the last `ready` to instant 0: enough for every worker to read it


def start(job: bytes, i: int, workers: int) -> subprocess.Popen[bytes]:
    """A process for share `i` of a pickled Job, which writes into the job's folder."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "loadgen.execution.backends.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # the terminal's Ctrl-C comes through us, once
    )
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is dead already, as its first line will show
        worker.stdin.write(len(job).to_bytes(8, "little") + job + bytes(f"{i} {workers}\n", "ascii"))
        worker.stdin.flush()
    return worker


def tell(worker: subprocess.Popen[bytes], line: bytes) -> None:
    """A line to a worker, if it is still there."""
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError, ValueError):
        os.write(worker.stdin.fileno(), line)


def expect_ready(said: bytes) -> None:
    """Of a worker's first line. Raises TargetError with what kept it from beginning."""
    if said != READY:
        fault = json.loads(said) if said.startswith(b"{") else {"what": "a worker process did not start"}
        raise TargetError(fault["what"], fault.get("where", ""), fault.get("hint", ""))


def read_share(said: bytes) -> Share:
    """Of a worker's last line."""
    told = json.loads(said)
    return Share(**{**told, "down": {int(target): at_s for target, at_s in told["down"].items()}, "notes": ()})


def _worker() -> None:
    import uvloop

    source = sys.stdin.buffer
    job: Job = pickle.loads(source.read(int.from_bytes(source.read(8), "little")))
    i, workers = map(int, source.readline().split())

    async def gate() -> int:
        _say(READY)
        line = source.readline()
        if not line:  # another worker could not begin
            raise ConnectionAbortedError
        start_ns = int(line)
        await asyncio.sleep(max(0, start_ns - monotonic_ns() - HEAD_START_NS // 2) / 1e9)
        return start_ns

    def begun(drive: Driver) -> None:
        """Counters go to the board; and the load ends with the process that asked for it, as the end of stdin tells."""
        loop = asyncio.get_running_loop()
        board = SharedCounters(job.folder / "spool" / BOARD, workers)
        said = False

        def show() -> None:
            nonlocal said
            board.write(i, drive.counters)
            if drive.stopped and not said:
                said = True
                _say(STOPPING)
            loop.call_later(SHOW_S, show)

        def told() -> None:
            if os.read(0, 64):
                drive.give_up()
                return
            loop.remove_reader(0)
            drive.stop()
            drive.stop()

        loop.add_reader(0, told)
        show()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            share = runner.run(work(job, i, workers, gate, begun))
        except Fault as fault:
            _say(json.dumps({"what": fault.what, "where": fault.where, "hint": fault.hint}).encode() + b"\n")
            sys.exit(fault.exit_code)
        except ConnectionAbortedError:
            return
    _say(json.dumps(asdict(share)).encode() + b"\n")


def _say(line: bytes) -> None:
    """To the process that started this one, if it is still there."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, line)


if __name__ == "__main__":
    _worker()
