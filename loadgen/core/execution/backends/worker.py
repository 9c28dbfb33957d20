"""A worker process and its messages: it gets a job on standard input and reports a `WorkerResult` on standard output.

The same process runs on this machine (`local.py`) and on a node of a cluster (`cluster/node_agent.py`).

    in   the job and the share; then the start instant on this machine's monotonic clock; then STOPPING, if it must stop
    out  READY, or a fault as JSON; STOPPING if a target is down and the run ends for it; at the
         end the WorkerResult as JSON, or a HostError as JSON

It ends when the process that started it ends, which closes standard input. IO; `driver.work` does the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import msgspec
from msgspec.structs import asdict

from loadgen.core import child_process
from loadgen.core.errors import LoadgenError, TargetError
from loadgen.core.execution import stop_signals
from loadgen.core.execution.driver import Driver, work
from loadgen.core.execution.plan import Job, build_plan
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.execution.worker_resources import WorkerResult

BOARD = "board"
SHOW_S = 1.0
READY = b"ready\n"
STOPPING = b"stopping\n"
HEAD_START_NS = (
    200_000_000  # from the last `ready` to instant 0: enough for every worker to read it
)


class HostError(msgspec.Struct, frozen=True):
    """The error of the operating system that ended a worker, for example a full disk."""

    errno: int
    strerror: str
    filename: str


def start() -> subprocess.Popen[bytes]:
    """Start a process, which waits for its share (`give`)."""
    return subprocess.Popen(
        child_process.command("loadgen.core.execution.backends.worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which passes it on once
    )


def give(worker: subprocess.Popen[bytes], job: bytes, i: int, workers: int) -> None:
    """Give a process share `i` of `workers` of a pickled Job, into whose folder it writes.

    It may wait: a long job is taken only by a process that reads.
    """
    assert worker.stdin is not None
    with contextlib.suppress(
        BrokenPipeError
    ):  # it has died already; reading its first line will show that
        worker.stdin.write(
            len(job).to_bytes(8, "little") + job + bytes(f"{i} {workers}\n", "ascii")
        )
        worker.stdin.flush()


def tell(worker: subprocess.Popen[bytes], line: bytes) -> None:
    """Send a line to a worker, if it is still running."""
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError, ValueError):
        os.write(worker.stdin.fileno(), line)


def expect_ready(line: bytes) -> None:
    """Check the first line of a worker.

    Raises TargetError with the reason if the worker could not start, and OSError if an error of
    its host, for example a full disk, is the reason.
    """
    if line == READY:
        return
    if not line.startswith(b"{"):
        raise TargetError("process_failed", "a worker process did not start")
    fields = json.loads(line)
    _raise_host_error(fields)
    raise TargetError(**fields)


def _raise_host_error(fields: dict[str, Any]) -> None:
    """Raise OSError if the fields of a line are those of a HostError."""
    if "errno" not in fields:
        return
    error = msgspec.convert(fields, HostError)
    raise OSError(error.errno, error.strerror, error.filename or None)


def read_share(line: bytes, stop_others: Callable[[], None]) -> WorkerResult | None:
    """Return the share in a line of a worker, or None for STOPPING, which comes before it.

    `stop_others` is called if the worker ends because a target is down. Raises OSError if the
    worker was ended by an error of its host, for example a full disk.
    """
    if line == STOPPING:
        stop_others()
        return None
    fields = json.loads(line)
    _raise_host_error(fields)
    if fields["stopped"]:
        stop_others()
    return WorkerResult(
        **fields
        | {"down": {int(target): at_s for target, at_s in fields["down"].items()}, "notes": ()}
    )


def _run_worker() -> None:
    import uvloop

    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM)
    )  # Ray starts its threads without them
    source = sys.stdin.buffer
    pickled, which = source.read(int.from_bytes(source.read(8), "little")), source.readline()
    if not which.endswith(b"\n"):  # the command was ended while it wrote this
        return
    job: Job = pickle.loads(pickled)
    i, workers = map(int, which.split())

    async def gate() -> int:
        _write_line(READY)
        line = source.readline()
        if not line:  # another worker could not start
            raise ConnectionAbortedError
        start_ns = int(line)
        await asyncio.sleep(max(0, start_ns - monotonic_ns() - HEAD_START_NS // 2) / 1e9)
        return start_ns

    def begun(driver: Driver) -> None:
        """Publish counters regularly; stop when standard input ends, because the parent process has then ended.

        From here on no signal ends this process before it has said what its share came to, also not behind the load.
        """
        for number in stop_signals.NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: driver.stop())
        loop = asyncio.get_running_loop()
        counters = SharedCounters(job.folder / "spool" / BOARD, workers)
        reported = False

        def publish() -> None:
            nonlocal reported
            counters.write(i, driver.counters)
            if driver.stopped and not reported:
                reported = True
                _write_line(STOPPING)
            loop.call_later(SHOW_S, publish)

        def on_input() -> None:
            if os.read(0, 64):
                driver.stop_after_failure()
                return
            loop.remove_reader(0)
            driver.stop()
            driver.stop()

        loop.add_reader(0, on_input)
        publish()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            share = runner.run(work(build_plan(job), i, workers, gate, begun))
        except LoadgenError as fault:
            said = {name: getattr(fault, name) for name in ("code", "what", "where", "hint", "key")}
            _write_line(json.dumps(said).encode() + b"\n")
            sys.exit(fault.exit_code)
        except (
            ConnectionAbortedError,
            KeyboardInterrupt,
        ):  # the second: stopped before its load had begun
            return
        except OSError as error:
            _report_host_error(error)
            sys.exit(f"worker {i}: {error}")
    _write_line(json.dumps(asdict(share)).encode() + b"\n")


def _report_host_error(error: OSError) -> None:
    """Tell the process that started this one which error of the host ends the load.

    That process may still have room for its own small files, and would otherwise report a worker
    that died and requests that failed.
    """
    filename = error.filename if isinstance(error.filename, str) else ""
    report = HostError(errno=error.errno or 0, strerror=error.strerror or "", filename=filename)
    _write_line(msgspec.json.encode(report) + b"\n")


def _write_line(line: bytes) -> None:
    """Write a line to the process that started this one, if it is still running."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, line)


if __name__ == "__main__":
    _run_worker()
