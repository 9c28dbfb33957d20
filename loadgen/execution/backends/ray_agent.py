"""One worker on a node of a cluster, and its files on their way to the run's folder: this side on the node, `Copy` on
the driver's machine. Knows nothing of Ray, whose actors carry the calls.

The worker is the same process as a local one and writes the same files, into a scratch folder of the node. The driver
asks again and again for what is new since the sizes it has (`take`), so an answer that got lost is simply asked for
again, and what the driver has written when a node is lost is what the worker had written a second before. The load
ends with its driver: a courier that nobody asks for SILENCE_S stops its worker. IO.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pickle
import platform
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any, NamedTuple

import loadgen_sdk

import loadgen
from loadgen.execution import plan, resource_limits
from loadgen.execution.backends import worker
from loadgen.execution.driver import GROWING_BINS
from loadgen.execution.shared_counters import SharedCounters
from loadgen.results import store

TAKE_BYTES = 4 << 20  # of one answer
SILENCE_S = 15.0  # without a question from the driver: it is gone, or this node is cut off
APPENDED = ("texts", "seconds")
TAIL_BYTES = 2 * GROWING_BINS * 8  # of a timeline: bins that a worker may still change


class Facts(NamedTuple):
    """What a node says of itself. `same`: what must be the same on every node, by name; `loopback`: equal on machines
    that share a loopback interface; `files`: path -> digest of those asked for, "" for one that is not there."""

    host: str
    same: dict[str, str]
    loopback: str
    room: resource_limits.Room
    files: dict[str, str]


class Piece(NamedTuple):
    """Bytes of a file of the run, from an offset on. `version` -1, or they are all of the file in that version."""

    name: str
    start: int
    data: bytes
    version: int = -1


class Taken(NamedTuple):
    """What is new. `lines`: what the worker has said since; `board`: its counters; `more`: ask again at once; `ended`:
    the worker has ended, and these are its last pieces."""

    pieces: list[Piece]
    lines: list[bytes]
    board: bytes
    more: bool
    ended: bool


def facts(paths: Sequence[str]) -> Facts:
    """Of this machine, and of the files at these paths on it."""
    return Facts(
        host=socket.gethostname(),
        same={
            "loadgen": f"{plan.version()} (source {_source()})",
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "numpy": metadata.version("numpy"),
        },
        loopback=_loopback(),
        room=resource_limits.room(),
        files={path: _digest(Path(path)) for path in paths},
    )


def _loopback() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _source() -> str:
    digest = hashlib.blake2b(digest_size=4)
    for package in (loadgen, loadgen_sdk):
        root = Path(package.__file__ or "").parent
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            with file.open("rb") as data:
                while block := data.read(1 << 20):
                    digest.update(block)
    except OSError:
        return ""
    return digest.hexdigest()


class RayAgent:
    """One worker of a node. All its methods are calls from the driver; none waits for the worker."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._asked_at = monotonic()
        self._folder = Path()
        self._ended = False

    async def clock(self) -> int:
        """This machine's monotonic clock, ns."""
        return monotonic_ns()

    async def facts(self, paths: Sequence[str]) -> dict[str, Any]:
        """Of this machine, in plain types: the driver's loadgen may be another one, and is to find that out."""
        found = facts(paths)
        return found._asdict() | {"room": (found.room.files, found.room.ports)}

    async def start(self, i: int, workers: int, *job: bytes) -> None:
        """Start the worker: its share, and the pickled job in pieces. It says READY in `take` when it is."""
        told: plan.Job = pickle.loads(b"".join(job))
        self._folder = Path(tempfile.mkdtemp(prefix=f"loadgen-{told.run_id}-w{i}-"))
        (self._folder / "spool").mkdir()
        self._i, self._workers = i, workers
        self._board = SharedCounters(self._folder / "spool" / worker.BOARD, workers)
        self._process = worker.start(pickle.dumps(replace(told, folder=self._folder)), i, workers)
        with contextlib.suppress(OSError):  # Ray starts its processes with a niceness of 15
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 0)
        threading.Thread(target=self._listen, daemon=True).start()
        self._watching = asyncio.create_task(self._watch())
        self._asked_at = monotonic()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
        self._process.wait()
        self._ended = True

    async def _watch(self) -> None:
        while not self._ended:
            await asyncio.sleep(1.0)
            if monotonic() > self._asked_at + SILENCE_S:
                await self.end()
                return

    async def niceness(self) -> int:
        """Of the worker."""
        return os.getpriority(os.PRIO_PROCESS, self._process.pid)

    async def tell(self, line: bytes) -> None:
        """A line to the worker."""
        worker.tell(self._process, line)

    async def signal(self, number: int) -> None:
        """A signal to the worker."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    async def take(self, have: Mapping[str, int], lines: int) -> Taken:
        """What is new, given what the driver has of each file (its size, or its version) and how many lines it has
        heard. Rows are read before texts and given after them: none arrives before its text."""
        self._asked_at = monotonic()
        ended = self._ended
        said = self._lines[lines:]
        room = TAKE_BYTES
        rows: list[Piece] = []
        for segment in store.segments(self._folder, self._i):
            name = f"spool/{segment.path.name}"
            held = have.get(name, 0)
            if piece := self._from(name, held, room):
                rows.append(piece)
                room -= len(piece.data)
            if room <= 0:
                break
        others = [self._from(name, have.get(name, 0)) for name in (f"spool/w{self._i}.{kind}" for kind in APPENDED)]
        for path in sorted((self._folder / "flows").glob("w*")):
            name = f"flows/{path.name}"
            held = have.get(name, 0)
            if ".timeline." in name:
                others.append(self._from(name, held, tail=TAIL_BYTES))
            elif path.suffix == ".heat":
                others.append(self._from(name, held))
            elif path.suffix != ".new" and (version := path.stat().st_mtime_ns) != held:
                others.append(Piece(name, 0, path.read_bytes(), version))
        self._forget(have)
        pieces = [*filter(None, others), *rows]
        return Taken(pieces, said, self._board.block(self._i), room <= 0, ended and room > 0)

    def _from(self, name: str, held: int, most: int = -1, tail: int = 0) -> Piece | None:
        """What a file has beyond what the driver holds, and the `tail` before that; None when that is nothing."""
        try:
            with (self._folder / name).open("rb") as file:
                if os.fstat(file.fileno()).st_size <= held and not tail:
                    return None
                start = max(0, held - tail)
                file.seek(start)
                return Piece(name, start, file.read(most))
        except FileNotFoundError:  # the worker has not got that far
            return None

    def _forget(self, have: Mapping[str, int]) -> None:
        """Segments that the driver has and the worker is done with."""
        for segment in store.segments(self._folder, self._i)[:-1]:
            if have.get(f"spool/{segment.path.name}") == segment.path.stat().st_size:
                segment.path.unlink()

    async def end(self) -> None:
        """The worker has ended, or is to end now; its files go."""
        if self._process.poll() is None:
            for _ in range(2):  # stop, and leave at once
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.2)
            self._process.kill()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Copy:
    """The files of one worker in the run's folder, as they come."""

    def __init__(self, folder: Path, i: int) -> None:
        self._folder = folder
        store.Spool(folder, i).close()
        self.have: dict[str, int] = {}

    def add(self, pieces: Sequence[Piece]) -> None:
        """Write what has come, in order."""
        for name, start, data, version in pieces:
            path = self._folder / name
            if version >= 0:
                store.replace(path, data)
                self.have[name] = version
                continue
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(descriptor, data, start)
            finally:
                os.close(descriptor)
            self.have[name] = start + len(data)
