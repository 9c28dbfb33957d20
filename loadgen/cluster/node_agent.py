"""Runs one worker on a node of a cluster and copies its files to the run's folder. IO.

`NodeAgent` runs on the node, `Copy` on the driver's machine. Neither uses Ray itself; Ray actors only carry the calls.

The worker is the same process as a local one and writes the same files, to a temporary folder on the node. The driver
calls `take` repeatedly with the file sizes it has and gets what is new. So it can repeat a call whose answer was lost;
and if a node is lost, the driver has what the worker had written about a second before. The load ends with its driver:
an agent that gets no call for SILENCE_S stops its worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import tempfile
import threading
from collections.abc import Mapping, Sequence
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
from loadgen.core.results.spool import GROWING_BINS, Spool, segments

TAKE_BYTES = 4 << 20  # rows in one answer
SILENCE_S = 15.0  # without a call from the driver: it has ended, or this node is disconnected
APPENDED = ("texts", "seconds")
TAIL_BYTES = 2 * GROWING_BINS * 8  # end of a timeline: bins that a worker may still change


class GoneError(Exception):
    """An agent that was called is gone."""


class AwayError(Exception):
    """An agent that was called cannot be reached now."""


class Piece(NamedTuple):
    """Bytes of a file of the run from offset `start`. `version`: -1, or `data` is the whole file in this version."""

    name: str
    start: int
    data: bytes
    version: int = -1


class Taken(NamedTuple):
    """New data of a worker.

    `lines`: its new output lines; `board`: its block of `SharedCounters`; `more`: there is more, call again at once;
    `ended`: the worker has ended and these are its last pieces.
    """

    pieces: list[Piece]
    lines: list[bytes]
    board: bytes
    more: bool
    ended: bool


class NodeAgent:
    """One worker on a node. The driver calls all its methods; none of them waits for the worker."""

    def __init__(self, take_bytes: int = TAKE_BYTES) -> None:
        self._take_bytes = take_bytes
        self._lines: list[bytes] = []
        self._called_at = monotonic()
        self._folder = Path()
        self._ended = False

    async def clock(self) -> int:
        """This machine's monotonic clock, ns."""
        return monotonic_ns()

    async def facts(self, paths: Sequence[str], packages: Sequence[str] = ()) -> dict[str, Any]:
        """Facts about this machine in plain types, so that a driver with another version of loadgen can read them."""
        here = own_facts(paths, packages)
        return here._asdict() | {"room": (here.room.files, here.room.ports)}

    async def start(self, i: int, workers: int, *job: bytes) -> None:
        """Start the worker for share `i`; `job` is a pickled Job in pieces. READY appears in the lines of `take`."""
        received: Job = pickle.loads(b"".join(job))
        self._folder = Path(tempfile.mkdtemp(prefix=f"loadgen-{received.run_id}-w{i}-"))
        (self._folder / "spool").mkdir()
        self._i, self._workers = i, workers
        self._counters = SharedCounters(self._folder / "spool" / worker.BOARD, workers)
        self._process = worker.start()
        with contextlib.suppress(OSError):  # Ray starts its processes with a niceness of 15
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 0)
        data = pickle.dumps(msgspec.structs.replace(received, folder=self._folder))
        threading.Thread(target=self._listen, args=(data, i, workers), daemon=True).start()
        self._watch_task = asyncio.create_task(self._watch())
        self._called_at = monotonic()

    def _listen(self, job: bytes, i: int, workers: int) -> None:
        worker.give(self._process, job, i, workers)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
        self._process.wait()
        self._ended = True

    async def _watch(self) -> None:
        while not self._ended:
            await asyncio.sleep(1.0)
            if monotonic() > self._called_at + SILENCE_S:
                await self.end()
                return

    async def niceness(self) -> int:
        """Niceness of the worker process."""
        return os.getpriority(os.PRIO_PROCESS, self._process.pid)

    async def tell(self, line: bytes) -> None:
        """Send a line to the worker."""
        worker.tell(self._process, line)

    async def signal(self, number: int) -> None:
        """Send a signal to the worker."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    async def take(self, have: Mapping[str, int], lines: int) -> Taken:
        """What is new for the driver, which has `have` of each file (its size or its version) and `lines` lines.

        Rows are read before texts and sent after them, so no row arrives before its text.
        """
        self._called_at = monotonic()
        ended = self._ended
        new_lines = self._lines[lines:]
        room = self._take_bytes
        rows: list[Piece] = []
        segment_names = [segment.path.name for segment in segments(self._folder, self._i)]
        for name in (f"spool/{name}" for name in (f"w{self._i}.events", *segment_names)):
            known_size = have.get(name, 0)
            if piece := self._new_bytes(name, known_size, room):
                rows.append(piece)
                room -= len(piece.data)
            if room <= 0:
                break
        other_pieces = [
            self._new_bytes(name, have.get(name, 0))
            for name in (f"spool/w{self._i}.{kind}" for kind in APPENDED)
        ]
        for path in sorted((self._folder / "flows").glob("w*")):
            name = f"flows/{path.name}"
            known_size = have.get(name, 0)
            if ".timeline." in name:
                other_pieces.append(self._new_bytes(name, known_size, tail=TAIL_BYTES))
            elif path.suffix == ".heat":
                other_pieces.append(self._new_bytes(name, known_size))
            elif path.suffix != ".new" and (version := path.stat().st_mtime_ns) != known_size:
                other_pieces.append(Piece(name, 0, path.read_bytes(), version))
        self._delete_copied(have)
        pieces = [*filter(None, other_pieces), *rows]
        return Taken(
            pieces, new_lines, self._counters.block(self._i), room <= 0, ended and room > 0
        )

    def _new_bytes(
        self, name: str, known_size: int, max_bytes: int = -1, tail: int = 0
    ) -> Piece | None:
        """Bytes of a file after the first `known_size`, and `tail` bytes before those; None if there is nothing new."""
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
            for _ in range(2):  # the first signal: stop; the second: end at once
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.2)
            self._process.kill()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Copy:
    """Writes the files of one worker into the run's folder. `have`: file -> its size or version so far."""

    def __init__(self, folder: Path, i: int) -> None:
        self._folder = folder
        Spool(folder, i).close()
        self.have: dict[str, int] = {}

    def add(self, pieces: Sequence[Piece]) -> None:
        """Write the pieces in order."""
        for name, start, data, version in pieces:
            path = self._folder / name
            if version >= 0:
                store.replace(path, data)
                self.have[name] = version
                continue
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
            try:
                os.pwrite(descriptor, data, start)
            finally:
                os.close(descriptor)
            self.have[name] = start + len(data)
