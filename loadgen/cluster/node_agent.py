"""Runs one worker on a node of a cluster and copies its files to the folder of the run. IO.

`NodeAgent` runs on the node, `WorkerFileCopy` on the machine of the driver. Neither uses Ray
itself: Ray actors only carry the calls.

The worker is the same process as a local one and writes the same files, to a temporary folder on
the node. The driver calls `read_update` again and again with the versions of the files that it has,
and gets what is new. So it can repeat a call whose result was lost, and if a node is lost, the
driver has what the worker had written about a second before. The load ends with its driver: an
agent that gets no call for SILENCE_S ends its worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any, NamedTuple

import msgspec

from loadgen.cluster.node_facts import read_local_facts
from loadgen.core.execution.backends import worker
from loadgen.core.execution.plan import Job
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.results import store
from loadgen.core.results.files import PRIVATE
from loadgen.core.results.record_log import GROWING_BINS, RecordLog, segments

MAX_RECORD_BYTES = 4 << 20
"""Most bytes of records in the result of one call of `read_update`."""
SILENCE_S = 15.0
"""Time without a call after which the driver has ended, or this node is disconnected."""
SILENCE_CHECK_S = 1.0
"""Time between two checks for silence."""
SIGNAL_GRACE_S = 0.2
"""Time that a worker has to end after each signal."""
APPENDED_FILES = ("texts", "seconds")
"""Other files of the record log: error texts, and the resource samples of each second."""
TIMELINE_TAIL_BYTES = 2 * GROWING_BINS * 8
"""End of a timeline that is always sent again: a worker may still change these bins."""


class AgentLostError(Exception):
    """An agent that was called does not exist any more: it, or its node, has ended."""


class AgentUnreachableError(Exception):
    """An agent that was called cannot be reached now, but a later call may succeed."""


class FileChunk(NamedTuple):
    """Bytes of a file of the run.

    Attributes:
        name: The file, relative to the folder of the run.
        start: Offset of the bytes in the file.
        data: The bytes.
        modified_ns: If `data` is the whole file, its time of modification in ns. Else None.
    """

    name: str
    start: int
    data: bytes
    modified_ns: int | None = None


class CopiedFiles(NamedTuple):
    """What the driver has of the files of a worker, by the names of the files.

    Attributes:
        sizes: Of each file that grows, the number of bytes from its start.
        modified_ns: Of each file that is replaced as a whole, the time at which the copied version
            was modified on the node, in ns.
    """

    sizes: dict[str, int]
    modified_ns: dict[str, int]


class WorkerUpdate(NamedTuple):
    """New data of a worker, which an agent sends to the driver.

    Attributes:
        chunks: New bytes of its files.
        lines: Its new output lines.
        counters: Its block of `SharedCounters`.
        has_more: There are more records, so `read_update` should be called again at once.
        has_ended: The worker has ended, and these are its last data.
    """

    chunks: list[FileChunk]
    lines: list[bytes]
    counters: bytes
    has_more: bool
    has_ended: bool


class NodeAgent:
    """One worker on a node. The driver calls all methods; none of them waits for the worker."""

    def __init__(self, max_record_bytes: int = MAX_RECORD_BYTES) -> None:
        self._max_record_bytes = max_record_bytes
        self._lines: list[bytes] = []
        self._last_call_s = monotonic()
        self._folder = Path()
        self._has_ended = False

    async def read_clock(self) -> int:
        """Return the monotonic clock of this machine in nanoseconds."""
        return monotonic_ns()

    async def facts(self, paths: Sequence[str], packages: Sequence[str] = ()) -> dict[str, Any]:
        """Return facts about this machine in plain types.

        The name of this method and the keys of the result never change, so that a driver with
        another version of loadgen can say that the versions differ.
        """
        return read_local_facts(paths, packages).to_message()

    async def start(self, worker_index: int, worker_count: int, *job_pieces: bytes) -> None:
        """Start a worker process, which sends a part of the load, in a temporary folder.

        This does not wait until the worker is ready. When it is, the line READY is in the output
        that `read_update` returns.

        Args:
            worker_index: The number of the worker, from 0.
            worker_count: The number of workers of the run.
            *job_pieces: The pickled Job of the run, which says what to send, in pieces. Ray sends
                only small arguments with the call itself.
        """
        job: Job = pickle.loads(b"".join(job_pieces))
        self._worker_index = worker_index
        self._folder = _create_worker_folder(job.run_id, worker_index)
        counters_path = self._folder / "spool" / worker.COUNTERS_FILE
        self._counters = SharedCounters(counters_path, worker_count)
        self._process = worker.start_process()
        self._reset_priority()
        self._start_communication(job, worker_count)

        # The task is stored, because asyncio keeps only a weak reference to it.
        self._silence_task = asyncio.create_task(self._end_after_silence())
        self._last_call_s = monotonic()

    def _start_communication(self, job: Job, worker_count: int) -> None:
        """Send the job to the worker and collect its output, in a thread that may wait for it."""
        local_job = msgspec.structs.replace(job, folder=self._folder)
        thread = threading.Thread(
            target=self._communicate, args=(pickle.dumps(local_job), worker_count), daemon=True
        )
        thread.start()

    def _reset_priority(self) -> None:
        """Give the worker the normal priority, if this user may raise it.

        It inherits a niceness of 15 from the processes of Ray, with which it would send late on a
        busy node.
        """
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 0)

    def _communicate(self, pickled_job: bytes, worker_count: int) -> None:
        """Send the job to the worker process and collect its output until it ends."""
        worker.send_job(self._process, pickled_job, self._worker_index, worker_count)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
        self._process.wait()
        self._has_ended = True

    async def _end_after_silence(self) -> None:
        """End the worker if the driver makes no call for SILENCE_S, because it has ended too."""
        while not self._has_ended:
            await asyncio.sleep(SILENCE_CHECK_S)
            if monotonic() > self._last_call_s + SILENCE_S:
                await self.end()
                return

    async def niceness(self) -> int:
        """Return the niceness of the worker process."""
        return os.getpriority(os.PRIO_PROCESS, self._process.pid)

    async def send_line(self, line: bytes) -> None:
        """Send a line to the standard input of the worker."""
        worker.send_line(self._process, line)

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the worker, if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(signum)

    async def read_update(self, copied: CopiedFiles, copied_lines: int) -> WorkerUpdate:
        """Return the files and output of the worker that the driver does not have yet.

        The order of the reads matters, because the worker goes on writing. A request record can
        refer to an error text in another file, and the worker writes the text before the record. So
        the records are read first: the texts that are read later include those of all records. The
        driver writes the chunks in the order of the list, so the texts come first in it.

        Args:
            copied: What the driver has of each file.
            copied_lines: Number of output lines that the driver has.
        """
        self._last_call_s = monotonic()

        # Read before the files: if it has ended now, they have their final size.
        has_worker_ended = self._has_ended
        new_lines = self._lines[copied_lines:]
        record_chunks = self._read_records(copied.sizes)
        record_bytes = sum(len(chunk.data) for chunk in record_chunks)

        # Chunks that fill the message were probably cut off, so the driver has to ask again.
        has_more = record_bytes >= self._max_record_bytes
        text_and_resource_chunks = self._read_appended_files(copied.sizes)
        output_event_chunks = self._read_histograms_and_timelines(copied)
        chunks = [*text_and_resource_chunks, *output_event_chunks, *record_chunks]
        self._delete_copied_segments(copied.sizes)

        return WorkerUpdate(
            chunks=chunks,
            lines=new_lines,
            counters=self._counters.block(self._worker_index),
            has_more=has_more,
            has_ended=has_worker_ended and not has_more,
        )

    def _read_records(self, copied_sizes: Mapping[str, int]) -> list[FileChunk]:
        """Return what the worker has added to its files of request records and event times.

        The chunks have at most `max_record_bytes` together, so that one message to the driver stays
        small.

        Args:
            copied_sizes: How many bytes of each file the driver has, by the name of the file.
        """
        record_files = [segment.path.name for segment in segments(self._folder, self._worker_index)]
        event_file = f"w{self._worker_index}.events"

        remaining_bytes = self._max_record_bytes
        chunks: list[FileChunk] = []
        for file_name in [event_file, *record_files]:
            name = f"spool/{file_name}"
            chunk = self._read_new_bytes(name, copied_sizes.get(name, 0), remaining_bytes)
            if chunk is None:
                continue

            chunks.append(chunk)
            remaining_bytes -= len(chunk.data)
            if remaining_bytes <= 0:
                break

        return chunks

    def _read_appended_files(self, copied_sizes: Mapping[str, int]) -> Iterator[FileChunk]:
        """Yield what the worker has added to its error texts and its resource samples.

        Args:
            copied_sizes: How many bytes of each file the driver has, by the name of the file.
        """
        for kind in APPENDED_FILES:
            name = f"spool/w{self._worker_index}.{kind}"
            chunk = self._read_new_bytes(name, copied_sizes.get(name, 0))
            if chunk is not None:
                yield chunk

    def _read_histograms_and_timelines(self, copied: CopiedFiles) -> Iterator[FileChunk]:
        """Yield what is new in the files of output events: timelines, heat maps and histograms.

        Output events are the tokens or chunks of a response that arrive together. The files of the
        worker about them are in the folder `flows`, and their names begin with `w`.
        """
        for path in sorted((self._folder / "flows").glob("w*")):
            chunk = self._read_output_event_file(path, copied)
            if chunk is not None:
                yield chunk

    def _read_output_event_file(self, path: Path, copied: CopiedFiles) -> FileChunk | None:
        """Return what is new in one file of output events, or None if nothing is.

        Args:
            path: The file, whose name shows which of the kinds below it is.
            copied: What the driver has of each file.
        """
        name = f"flows/{path.name}"
        copied_size = copied.sizes.get(name, 0)
        if ".timeline." in path.name:
            # Counts of events by time. The last counts may still change, so they are sent again.
            return self._read_new_bytes(name, copied_size, overlap_bytes=TIMELINE_TAIL_BYTES)
        if path.suffix == ".heat":
            # A heat map. The worker only appends to it.
            return self._read_new_bytes(name, copied_size)
        if path.suffix == ".new":
            # An incomplete histogram. The worker renames it when it is complete.
            return None

        # A histogram. The worker replaces it as a whole.
        return _read_if_modified(path, name, copied.modified_ns.get(name))

    def _read_new_bytes(
        self, name: str, copied_size: int, max_bytes: int = -1, overlap_bytes: int = 0
    ) -> FileChunk | None:
        """Return the bytes of a file that the driver does not have, or None if there are none.

        Args:
            name: The file, relative to the folder of the run.
            copied_size: Number of bytes from the start of the file that the driver has.
            max_bytes: Most bytes to return, or -1 for all.
            overlap_bytes: Number of bytes before `copied_size` that are returned again, because
                they may have changed.
        """
        try:
            with (self._folder / name).open("rb") as file:
                if os.fstat(file.fileno()).st_size <= copied_size and not overlap_bytes:
                    return None
                start = max(0, copied_size - overlap_bytes)
                file.seek(start)
                return FileChunk(name, start, file.read(max_bytes))
        except FileNotFoundError:  # the worker has not created it yet
            return None

    def _delete_copied_segments(self, copied_sizes: Mapping[str, int]) -> None:
        """Delete files of records that the driver has completely, so that long runs need no space.

        The records of a worker are in several files, its segments. The last one is never deleted,
        because the worker still writes it.
        """
        for segment in segments(self._folder, self._worker_index)[:-1]:
            copied_size = copied_sizes.get(f"spool/{segment.path.name}")
            if copied_size == segment.path.stat().st_size:
                segment.path.unlink()

    async def end(self) -> None:
        """End the worker if it still runs, and delete its files on the node."""
        if self._process.poll() is None:
            await self._terminate(self._process)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _terminate(self, process: subprocess.Popen[bytes]) -> None:
        """Let the worker stop with a first signal and end with a second one, then kill it."""
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await asyncio.sleep(SIGNAL_GRACE_S)
        process.kill()


def _create_worker_folder(run_id: str, worker_index: int) -> Path:
    """Create a temporary folder for the files of a worker on this node, and return its path."""
    folder = Path(tempfile.mkdtemp(prefix=f"loadgen-{run_id}-w{worker_index}-"))
    (folder / "spool").mkdir()
    return folder


def _read_if_modified(path: Path, name: str, copied_modified_ns: int | None) -> FileChunk | None:
    """Return a whole file if it was modified since it was copied, else None.

    Args:
        path: The file on this node.
        name: Its name relative to the folder of the run.
        copied_modified_ns: When the copied version was modified, or None if there is no copy.
    """
    modified_ns = path.stat().st_mtime_ns
    if modified_ns == copied_modified_ns:
        return None
    return FileChunk(name, 0, path.read_bytes(), modified_ns=modified_ns)


class WorkerFileCopy:
    """Writes the files of one remote worker into the folder of the run."""

    def __init__(self, run_dir: Path, worker_index: int) -> None:
        """Create the folders and the empty record log of a worker."""
        self._run_dir = run_dir
        self._sizes: dict[str, int] = {}
        self._modified_ns: dict[str, int] = {}
        RecordLog(run_dir, worker_index).close()

    @property
    def copied(self) -> CopiedFiles:
        """What was copied of each file so far."""
        return CopiedFiles(dict(self._sizes), dict(self._modified_ns))

    def write_chunks(self, chunks: Sequence[FileChunk]) -> None:
        """Write new bytes of files in the given order, and remember what was copied.

        A chunk with a time of modification replaces the whole file. Any other chunk is written at
        its offset, which may overwrite bytes that were copied before.
        """
        for chunk in chunks:
            path = self._run_dir / chunk.name
            if chunk.modified_ns is not None:
                store.replace(path, chunk.data)
                self._modified_ns[chunk.name] = chunk.modified_ns
            else:
                _write_at(path, chunk.start, chunk.data)
                self._sizes[chunk.name] = chunk.start + len(chunk.data)


def _write_at(path: Path, start: int, data: bytes) -> None:
    """Write bytes at an offset of a file, which is created if it does not exist."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        os.pwrite(descriptor, data, start)
    finally:
        os.close(descriptor)
