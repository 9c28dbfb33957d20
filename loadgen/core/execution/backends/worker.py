"""A worker process and its messages.

The same process runs on this machine (see `local`) and on a node of a cluster (see
`cluster.node_agent`). It receives on standard input:

1. the job and the index of the worker,
2. the start time on the monotonic clock of this machine,
3. STOPPING, if it must stop because a target is down.

It sends on standard output:

1. READY, or an error as JSON,
2. STOPPING, if a target is down and the run ends for that reason,
3. at the end a WorkerResult as JSON, or a HostError as JSON.

It ends when the process that started it ends, because that closes standard input.
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
from collections.abc import Callable, Mapping
from time import monotonic_ns
from types import FrameType
from typing import BinaryIO, NamedTuple

import msgspec
from msgspec.structs import asdict

from loadgen.core import child_process
from loadgen.core.errors import LoadgenError, TargetError
from loadgen.core.execution import stop_signals
from loadgen.core.execution.driver import Driver, run_worker
from loadgen.core.execution.plan import Job, build_plan
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.execution.worker_resources import WorkerResult

COUNTERS_FILE = "board"
READY = b"ready\n"
STOPPING = b"stopping\n"
HEAD_START_NS = 200_000_000
"""The time from the last READY to the start of the load, enough for every worker to read it."""

_PUBLISH_INTERVAL_S = 1.0
_JOB_SIZE_BYTES = 8
_STDIN_FD = 0


class HostError(msgspec.Struct, frozen=True):
    """The error of the operating system that ended a worker, for example a full disk."""

    errno: int
    strerror: str
    filename: str


def start_process() -> subprocess.Popen[bytes]:
    """Start a worker process, which waits for its job (see `send_job`)."""
    return subprocess.Popen(
        child_process.command("loadgen.core.execution.backends.worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C in the terminal reaches only this process, which passes it on once.
        start_new_session=True,
    )


def send_job(
    process: subprocess.Popen[bytes], pickled_job: bytes, worker: int, workers: int
) -> None:
    """Send a job to a process, which becomes worker number `worker` of `workers`.

    This may block, because the process has to read a long job.
    """
    assert process.stdin is not None
    size = len(pickled_job).to_bytes(_JOB_SIZE_BYTES, "little")
    # If the process has died already, reading its first line shows that.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(size + pickled_job + f"{worker} {workers}\n".encode("ascii"))
        process.stdin.flush()


def send_line(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Send a line to a worker, if it is still running."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ValueError):
        os.write(process.stdin.fileno(), line)


def check_is_ready(line: bytes) -> None:
    """Raise the error of a worker that could not start, according to its first line.

    The line is READY, or JSON with an error, or empty if the process has died.

    Raises:
        TargetError: The worker could not start.
        OSError: An error of its host is the reason, for example a full disk.
    """
    if line == READY:
        return
    if not line.startswith(b"{"):
        raise TargetError("process_failed", "a worker process did not start")
    fields = json.loads(line)
    _raise_if_host_error(fields)
    raise TargetError(**fields)


def handle_result_line(line: bytes, stop_others: Callable[[], None]) -> WorkerResult | None:
    """Handle a line that a worker prints after its first one. Return its result if it contains it.

    The last line has the result. It may follow the line STOPPING, by which the worker reports that
    it has ended its load because a target is down. The result has the same information in
    `stopped`, in case the line STOPPING is missing.

    Args:
        line: The line.
        stop_others: Called if the load ends because a target is down, to stop the other workers.

    Raises:
        OSError: An error of its host ended the worker, for example a full disk.
    """
    if line == STOPPING:
        stop_others()
        return None
    result = _parse_result(line)
    if result.stopped:
        stop_others()
    return result


def _parse_result(line: bytes) -> WorkerResult:
    """Return the result in the last line of a worker's output.

    Raises:
        OSError: The line reports an error of the operating system instead, for example a full
            disk. It happened on the machine of the worker and ended it.
    """
    fields = json.loads(line)
    _raise_if_host_error(fields)

    # JSON has only strings as keys.
    fields["down_since_s"] = {
        int(target): down_since_s for target, down_since_s in fields["down_since_s"].items()
    }

    # `notes` is a tuple, which JSON does not have. It is always empty here, because notes are only
    # added when the results of several machines are merged.
    fields["notes"] = ()
    return WorkerResult(**fields)


def _raise_if_host_error(fields: Mapping[str, object]) -> None:
    """Raise OSError if the fields of a line are those of a HostError."""
    if "errno" not in fields:
        return
    error = msgspec.convert(fields, HostError)
    raise OSError(error.errno, error.strerror, error.filename or None)


class _ParentConnection:
    """Connects the load of this worker with the process that started the worker."""

    def __init__(self, driver: Driver, counters: SharedCounters, worker: int) -> None:
        """Create a connection, which `open` activates.

        Args:
            driver: The driver of the load.
            counters: The counters that all workers of the run share.
            worker: The number of this worker.
        """
        self._driver = driver
        self._counters = counters
        self._worker = worker
        self._has_reported_stop = False
        self._loop = asyncio.get_running_loop()

    def open(self) -> None:
        """Begin to publish counters, and to react to signals and to the parent process.

        From now on, SIGINT, SIGTERM and SIGHUP only stop the load, so that the process can still
        report its result. A signal that the parent has set to be ignored stays ignored.
        """
        for signum in stop_signals.STOP_SIGNALS:
            is_ignored = signal.getsignal(signum) is signal.SIG_IGN
            if not is_ignored:
                signal.signal(signum, self._on_stop_signal)
        self._loop.add_reader(_STDIN_FD, self._on_input)
        self._publish()

    def _on_stop_signal(self, _signum: int, _frame: FrameType | None) -> None:
        """Stop the load. A second signal ends it at once (see `Driver.stop`)."""
        self._driver.stop()

    def _publish(self) -> None:
        """Publish the counters now and every second, and report a stop because of a target."""
        self._counters.write(self._worker, self._driver.counters)
        if self._driver.was_stopped_by_target and not self._has_reported_stop:
            self._has_reported_stop = True
            _write_line(STOPPING)
        self._loop.call_later(_PUBLISH_INTERVAL_S, self._publish)

    def _on_input(self) -> None:
        """React to standard input, which comes from the parent process.

        The parent only ever sends the line STOPPING, after another worker has found that a target
        is down. The load then stops, and requests in flight may end. If the input has ended, the
        parent has died, and the load ends at once.
        """
        has_parent_died = os.read(_STDIN_FD, len(STOPPING)) == b""
        if not has_parent_died:
            self._driver.stop_after_failure()
            return

        self._loop.remove_reader(_STDIN_FD)
        self._driver.stop()

        # A second call of `stop` does not wait for requests in flight.
        self._driver.stop()


async def _wait_for_start() -> int:
    """Report that this worker is ready, and return the start time shortly before it.

    It blocks until the parent process sends the start time, since nothing else has to be done until
    then. It returns in the middle of HEAD_START_NS, to leave time for the last preparations.

    Raises:
        ConnectionAbortedError: The parent has closed the pipe, because another worker could not
            start.
    """
    _write_line(READY)
    line = sys.stdin.buffer.readline()
    if not line:
        raise ConnectionAbortedError("no start time, because another worker could not start")

    start_ns = int(line)
    wake_up_ns = start_ns - HEAD_START_NS // 2
    await asyncio.sleep(max(0, wake_up_ns - monotonic_ns()) / 1e9)

    return start_ns


class _WorkerJob(NamedTuple):
    """The job of a run, and which of its workers this process is."""

    job: Job
    worker: int
    workers: int


def _read_job(source: BinaryIO) -> _WorkerJob | None:
    """Read what `send_job` has sent. Return None if the command was ended while it sent it."""
    job_size = int.from_bytes(source.read(_JOB_SIZE_BYTES), "little")
    pickled_job = source.read(job_size)
    index_line = source.readline()
    if not index_line.endswith(b"\n"):
        return None
    worker, workers = (int(number) for number in index_line.split())
    return _WorkerJob(pickle.loads(pickled_job), worker, workers)


def _main() -> None:
    """Read a job from standard input, carry it out, and report the result.

    If the load cannot start or the host has an error, that is reported in place of the result, and
    the process exits with a code for it.
    """
    # Ray starts processes with these signals blocked, so that they would not stop the load.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    worker_job = _read_job(sys.stdin.buffer)
    if worker_job is None:
        return

    try:
        result = _carry_out_job(worker_job)
    except LoadgenError as error:
        _report_error(error)
        sys.exit(error.exit_code)
    except (ConnectionAbortedError, KeyboardInterrupt):
        # Another worker could not start, or the run was stopped before its load began.
        return
    except OSError as error:
        _report_host_error(error)
        sys.exit(f"worker {worker_job.worker}: {error}")

    _write_line(json.dumps(asdict(result)).encode() + b"\n")


def _carry_out_job(worker_job: _WorkerJob) -> WorkerResult:
    """Send this worker's share of the requests of a load, and return its result.

    When the load starts, `connect_to_parent` lets the parent process watch and stop it.
    """
    # Runs in virtual time do not need this module.
    import uvloop

    job = worker_job.job

    def connect_to_parent(driver: Driver) -> None:
        counters_path = job.folder / "spool" / COUNTERS_FILE
        counters = SharedCounters(counters_path, worker_job.workers)
        _ParentConnection(driver, counters, worker_job.worker).open()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        load = run_worker(
            build_plan(job),
            worker=worker_job.worker,
            workers=worker_job.workers,
            wait_for_start=_wait_for_start,
            on_started=connect_to_parent,
        )
        return runner.run(load)


def _report_error(error: LoadgenError) -> None:
    """Report why this worker could not start. `check_is_ready` reads it."""
    fields = {
        "code": error.code,
        "message": error.message,
        "where": error.where,
        "hint": error.hint,
        "key": error.key,
    }
    _write_line(json.dumps(fields).encode() + b"\n")


def _report_host_error(error: OSError) -> None:
    """Report which error of the host ends the load.

    The process that started this one may still have room for its own small files, and would
    otherwise report a worker that died and requests that failed.
    """
    filename = error.filename if isinstance(error.filename, str) else ""
    report = HostError(errno=error.errno or 0, strerror=error.strerror or "", filename=filename)
    _write_line(msgspec.json.encode(report) + b"\n")


def _write_line(line: bytes) -> None:
    """Write a line to the process that started this one, if it is still running."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, line)


if __name__ == "__main__":
    _main()
