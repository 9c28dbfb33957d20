"""Runs one worker on a node of a cluster and copies its files to the folder of the run. IO.

`NodeAgent` runs on the node, `Copy` on the machine of the driver. Neither uses Ray itself: Ray
actors only carry the calls.

The worker is the same process as a local one and writes the same files, to a temporary folder on
the node. The driver calls `take` again and again with the sizes of the files that it has, and gets
what is new. So it can repeat a call whose result was lost, and if a node is lost, the driver has
what the worker had written about a second before. The load ends with its driver: an agent that gets
no call for SILENCE_S ends its worker.
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

from loadgen.cluster.node_facts import own_facts
from loadgen.core.execution.backends import worker
from loadgen.core.execution.plan import Job
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.results import store
from loadgen.core.results.files import PRIVATE
from loadgen.core.results.record_log import GROWING_BINS, RecordLog, segments

TAKE_BYTES = 4 << 20
"""Most bytes of records in the result of one call of `take`."""
SILENCE_S = 15.0
"""Time without a call after which the driver has ended, or this node is disconnected."""
WATCH_S = 1.0
"""Time between two checks for silence."""
STOP_S = 0.2
"""Time that a worker has to end after each signal."""
APPENDED_FILES = ("texts", "seconds")
TAIL_BYTES = 2 * GROWING_BINS * 8
"""End of a timeline that is always sent again: a worker may still change these bins."""


class GoneError(Exception):
    """An agent that was called is gone."""


class AwayError(Exception):
    """An agent that was called cannot be reached now."""


class Piece(NamedTuple):
    """Bytes of a file of the run.

    Attributes:
        name: The file, relative to the folder of the run.
        start: Offset of the bytes in the file.
        data: The bytes.
        version: -1, or `data` is the whole file in this version.
    """

    name: str
    start: int
    data: bytes
    version: int = -1


class Taken(NamedTuple):
    """New data of a worker.

    Attributes:
        pieces: New bytes of its files.
        lines: Its new output lines.
        board: Its block of `SharedCounters`.
        more: There is more data, so `take` should be called again at once.
        ended: The worker has ended, and these are its last pieces.
    """

    pieces: list[Piece]
    lines: list[bytes]
    board: bytes
    more: bool
    ended: bool


class NodeAgent:
    """One worker on a node. The driver calls all methods; none of them waits for the worker."""

    def __init__(self, take_bytes: int = TAKE_BYTES) -> None:
        self._take_bytes = take_bytes
        self._lines: list[bytes] = []
        self._last_call_s = monotonic()
        self._folder = Path()
        self._has_ended = False

    async def clock(self) -> int:
        """Return the monotonic clock of this machine in nanoseconds."""
        return monotonic_ns()

    async def facts(self, paths: Sequence[str], packages: Sequence[str] = ()) -> dict[str, Any]:
        """Return facts about this machine in plain types.

        A driver with another version of loadgen can read them.
        """
        facts = own_facts(paths, packages)
        return facts._asdict() | {"room": (facts.room.open_files, facts.room.local_ports)}

    async def start(self, i: int, workers: int, *job_pieces: bytes) -> None:
        """Start the worker for share `i` of `workers` of a pickled Job.

        When it is ready, READY is in the lines that `take` returns.
        """
        job: Job = pickle.loads(b"".join(job_pieces))
        self._folder = Path(tempfile.mkdtemp(prefix=f"loadgen-{job.run_id}-w{i}-"))
        (self._folder / "spool").mkdir()
        self._i = i
        self._counters = SharedCounters(self._folder / "spool" / worker.COUNTERS_FILE, workers)
        self._process = worker.start_process()
        with contextlib.suppress(OSError):  # Ray starts its processes with a niceness of 15
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 0)
        data = pickle.dumps(msgspec.structs.replace(job, folder=self._folder))
        threading.Thread(target=self._communicate, args=(data, workers), daemon=True).start()
        self._watch_task = asyncio.create_task(self._end_after_silence())
        self._last_call_s = monotonic()

    def _communicate(self, job: bytes, workers: int) -> None:
        """Send the job to the worker process and collect its output until it ends."""
        worker.send_job(self._process, job, self._i, workers)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
        self._process.wait()
        self._has_ended = True

    async def _end_after_silence(self) -> None:
        while not self._has_ended:
            await asyncio.sleep(WATCH_S)
            if monotonic() > self._last_call_s + SILENCE_S:
                await self.end()
                return

    async def niceness(self) -> int:
        """Return the niceness of the worker process."""
        return os.getpriority(os.PRIO_PROCESS, self._process.pid)

    async def tell(self, line: bytes) -> None:
        """Send a line to the worker."""
        worker.send_line(self._process, line)

    async def signal(self, number: int) -> None:
        """Send a signal to the worker."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    async def take(self, have: Mapping[str, int], lines: int) -> Taken:
        """Return what is new for the driver.

        Records are read before error texts and sent after them, so no record arrives before its
        text.

        Args:
            have: The size or the version of each file that the driver has.
            lines: Number of output lines that the driver has.
        """
        self._last_call_s = monotonic()
        has_ended = self._has_ended
        new_lines = self._lines[lines:]
        records = self._new_records(have)
        has_more = sum(len(piece.data) for piece in records) >= self._take_bytes
        other_pieces = [*self._new_appended(have), *self._new_flows(have)]
        self._delete_copied(have)
        return Taken(
            pieces=[*other_pieces, *records],
            lines=new_lines,
            board=self._counters.block(self._i),
            more=has_more,
            ended=has_ended and not has_more,
        )

    def _new_records(self, have: Mapping[str, int]) -> list[Piece]:
        """Return new events and records, at most `take_bytes` of them."""
        names = [f"w{self._i}.events"]
        names += [segment.path.name for segment in segments(self._folder, self._i)]
        remaining_bytes = self._take_bytes
        pieces: list[Piece] = []
        for name in (f"spool/{name}" for name in names):
            piece = self._new_bytes(name, have.get(name, 0), remaining_bytes)
            if piece is not None:
                pieces.append(piece)
                remaining_bytes -= len(piece.data)
            if remaining_bytes <= 0:
                break
        return pieces

    def _new_appended(self, have: Mapping[str, int]) -> Iterator[Piece]:
        """Yield new bytes of the other files that a worker appends to."""
        for kind in APPENDED_FILES:
            name = f"spool/w{self._i}.{kind}"
            if (piece := self._new_bytes(name, have.get(name, 0))) is not None:
                yield piece

    def _new_flows(self, have: Mapping[str, int]) -> Iterator[Piece]:
        """Yield new histograms and new bytes of timelines."""
        for path in sorted((self._folder / "flows").glob("w*")):
            name = f"flows/{path.name}"
            known = have.get(name, 0)
            piece = None
            if ".timeline." in name:
                piece = self._new_bytes(name, known, tail=TAIL_BYTES)
            elif path.suffix == ".heat":
                piece = self._new_bytes(name, known)
            elif path.suffix != ".new" and (version := path.stat().st_mtime_ns) != known:
                piece = Piece(name, 0, path.read_bytes(), version)
            if piece is not None:
                yield piece

    def _new_bytes(
        self, name: str, known_size: int, max_bytes: int = -1, tail: int = 0
    ) -> Piece | None:
        """Return the bytes of a file after the first `known_size`, and `tail` bytes before them.

        Returns None if there is nothing new.
        """
        try:
            with (self._folder / name).open("rb") as file:
                if os.fstat(file.fileno()).st_size <= known_size and not tail:
                    return None
                start = max(0, known_size - tail)
                file.seek(start)
                return Piece(name, start, file.read(max_bytes))
        except FileNotFoundError:  # the worker has not created it yet
            return None

    def _delete_copied(self, have: Mapping[str, int]) -> None:
        """Delete complete segments that the driver has."""
        for segment in segments(self._folder, self._i)[:-1]:
            if have.get(f"spool/{segment.path.name}") == segment.path.stat().st_size:
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
            await asyncio.sleep(STOP_S)
        process.kill()


class Copy:
    """Writes the files of one worker into the folder of the run.

    Attributes:
        have: The size or the version of each file so far.
    """

    def __init__(self, folder: Path, i: int) -> None:
        self._folder = folder
        RecordLog(folder, i).close()
        self.have: dict[str, int] = {}

    def add(self, pieces: Sequence[Piece]) -> None:
        """Write the pieces in order."""
        for piece in pieces:
            path = self._folder / piece.name
            if piece.version >= 0:
                store.replace(path, piece.data)
                self.have[piece.name] = piece.version
                continue
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
            try:
                os.pwrite(descriptor, piece.data, piece.start)
            finally:
                os.close(descriptor)
            self.have[piece.name] = piece.start + len(piece.data)
