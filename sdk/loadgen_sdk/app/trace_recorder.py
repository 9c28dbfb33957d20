"""The shape of an application's traffic, without its text: a file that `loadgen run --trace` replays.

One JSON object per line: when a call came, how many tokens went in and out, which conversation it belongs to, and
salted hashes of its prompt's blocks, by which calls with a common beginning are known. No text, no key, no name of a
user is written. Whatever happens to the file, the application goes on.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import secrets
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Mapping
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec

from ..errors import WrongUse
from .measurement import Measurement
from .prompt_text import CHARS_PER_TOKEN, message_text, texts

BLOCK_BYTES = 512  # of prompt text under one hash: some 128 tokens
REMEMBERED = 65_536  # calls whose next turn is recognised
KEPT_ROWS = 100_000  # rows held in memory while the file cannot be written
FLUSH_NS = 500_000_000
AGAIN_NS = 1_000_000_000  # between two tries to write to a file that refused
_BREAK = b"\n\x00"  # between two messages


class _Turn:
    """One call as the next turn will look for it."""

    __slots__ = ("ended", "session", "turn")

    def __init__(self, session: str, turn: int) -> None:
        self.session, self.turn, self.ended = session, turn, -1


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A call as it looked when it began: what `end` needs, and no text."""

    link: Any
    delay_ns: int | None  # from the end of the turn before
    hashes: list[int]
    bytes: int  # of prompt text


class ShapeRecorder:
    """Writes a shape-only trace. Use: `instrument(client, record=record_shape("traffic.jsonl"))`; close it at the end.

    Threads and tasks may share one; several processes may append to one file, and find each other's common prompts if
    they are given the same salt. Rows that the file does not take (a full disk) are kept in memory, up to KEPT_ROWS,
    and written when it does; it is warned of once, and `lost` counts what had to be given up.
    """

    def __init__(self, path: str | os.PathLike[str], *, salt: str | bytes | None = None) -> None:
        self.path = Path(path)
        self.lost = 0
        self.written = 0
        secret = secrets.token_bytes(16) if salt is None else salt.encode() if isinstance(salt, str) else bytes(salt)
        if not secret:
            raise WrongUse("an empty salt hides nothing", "leave it out, or give the same secret to every process")
        self._key = hashlib.blake2b(secret, digest_size=32).digest()
        try:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise WrongUse(
                f"cannot record to {self.path}: {error.strerror}", "give a file that can be written"
            ) from None
        self._name = secrets.token_hex(3)
        self._sessions = 0
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()
        self._rows: deque[bytes] = deque()
        self._rest = b""  # of the rows being written, what the file has not taken yet
        self._joined = 0  # how many rows that is the end of
        self._flushed = self._again = 0
        self._warned = False
        self._lock = threading.RLock()
        atexit.register(self.close)

    def begin(self, started: int, arguments: Mapping[str, Any]) -> Sighting:
        """A call begins at `started` (monotonic ns) with these arguments (messages, prompt or input)."""
        said = [text.encode("utf-8", "surrogatepass") for text in texts(arguments)]
        hashes = self._blocks(_BREAK.join(said))
        link, delay = self._link(started, arguments)
        return Sighting(link=link, delay_ns=delay, hashes=hashes, bytes=sum(map(len, said)))

    def end(self, sighting: Sighting, measurement: Measurement) -> None:
        """It has ended: write its line."""
        link = sighting.link
        counted = measurement.input_tokens is not None
        tokens = measurement.input_tokens if counted else max(1, sighting.bytes // CHARS_PER_TOKEN)
        row: dict[str, Any] = {
            "timestamp": round(measurement.started_unix_ns / 1e6, 3),
            "input_length": tokens,
            "output_length": measurement.output_tokens or 0,
            "hash_ids": sighting.hashes,
            "block_size": round((tokens or 0) / len(sighting.hashes), 3) if sighting.hashes else 0,
            "input_source": "server" if counted else "estimate",
            "output_source": measurement.token_source,
            "status": measurement.status,
            "stream": measurement.streamed,
        }
        if link is not None:
            link.ended = measurement.done
            row |= {"session_id": link.session, "turn": link.turn}
            if sighting.delay_ns is not None:
                row["delay"] = round(sighting.delay_ns / 1e6, 3)
        with self._lock:
            if link is not None and measurement.response_id:
                self._remember(self._digest(b"id" + measurement.response_id.encode()), link)
            if len(self._rows) >= KEPT_ROWS:  # the newest goes: the oldest may be written in part already
                self.lost += 1
            else:
                self._rows.append(msgspec.json.encode(row) + b"\n")
            now = monotonic_ns()
            if now >= max(self._again, self._flushed + FLUSH_NS):
                self._write(now)

    def flush(self) -> None:
        """Write what is held back now."""
        with self._lock:
            self._write(monotonic_ns())

    def close(self) -> None:
        """Write the rest and close the file; what it does not take is counted in `lost` and warned of."""
        with self._lock:
            if self._fd < 0:
                return
            self._write(monotonic_ns())
            left = len(self._rows)
            if left:
                self.lost += left
                self._rows.clear()
                warnings.warn(f"{left} calls are missing in {self.path}: it could not be written", stacklevel=2)
            os.close(self._fd)
            self._fd = -1
            atexit.unregister(self.close)

    def __enter__(self) -> ShapeRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16, key=self._key).digest()

    def _blocks(self, text: bytes) -> list[int]:
        """One number per block; equal numbers mean equal text from the start up to there."""
        found, last, key = [], b"", self._key
        for at in range(0, len(text), BLOCK_BYTES):
            block = text[at : at + BLOCK_BYTES]
            last = hashlib.blake2b(last + len(block).to_bytes(2, "little") + block, digest_size=16, key=key).digest()
            found.append(int.from_bytes(last[:6], "little"))  # 48 bits: whole numbers to every reader of JSON
        return found

    def _link(self, started: int, arguments: Mapping[str, Any]) -> tuple[_Turn | None, int | None]:
        """The conversation this call belongs to: that of the longest earlier call that it begins with."""
        marks: list[bytes] = []
        messages = arguments.get("messages")
        messages = arguments.get("input") if messages is None else messages
        if isinstance(messages, list | tuple):
            last = b""
            for message in messages:
                last = self._digest(last + message_text(message).encode("utf-8", "surrogatepass"))
                marks.append(last)
        before = arguments.get("previous_response_id")
        if not marks and not before and not isinstance(messages, str):
            return None, None  # a bare prompt continues nothing
        with self._lock:
            parent = self._turns.get(self._digest(b"id" + str(before).encode())) if before else None
            for mark in reversed(marks[:-1]):
                if parent is not None:
                    break
                parent = self._turns.get(mark)
            if parent is None:
                self._sessions += 1
                turn = _Turn(f"{self._name}-{self._sessions}", 0)
            else:
                turn = _Turn(parent.session, parent.turn + 1)
            if marks:
                self._remember(marks[-1], turn)
        delay = started - parent.ended if parent is not None and 0 <= parent.ended <= started else None
        return turn, delay

    def _remember(self, mark: bytes, turn: _Turn) -> None:
        self._turns[mark] = turn
        self._turns.move_to_end(mark)
        if len(self._turns) > REMEMBERED:
            self._turns.popitem(last=False)

    def _write(self, now: int) -> None:
        """Give the file what it takes. A line is only ever cut where the disk was full, and then goes on there."""
        self._flushed = now
        if self._fd < 0:  # a call that outlived the recorder
            self.lost += len(self._rows)
            self._rows.clear()
            return
        rows = self._rows
        try:
            while rows:
                if not self._rest:
                    self._rest = rows[0] if len(rows) == 1 else b"".join(rows)
                    self._joined = len(rows)
                self._rest = self._rest[os.write(self._fd, self._rest) :]
                if not self._rest:
                    for _ in range(self._joined):
                        rows.popleft()
                    self.written += self._joined
        except OSError as error:
            self._again = now + AGAIN_NS
            if not self._warned:
                self._warned = True
                why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
                what = (
                    f"cannot write to {self.path}: {why}; up to {KEPT_ROWS:,} calls are kept in memory until it can be"
                )
                warnings.warn(what, RuntimeWarning, stacklevel=3)
        else:
            self._warned = False


def record_shape(path: str | os.PathLike[str], *, salt: str | bytes | None = None) -> ShapeRecorder:
    """A recorder that appends to `path`. salt: a secret by which hashes can be compared between files; by default a
    fresh one that is kept nowhere. Raises WrongUse when the file cannot be opened."""
    return ShapeRecorder(path, salt=salt)
