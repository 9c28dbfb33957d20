"""Records the shape of an application's traffic, without its text, in a file that `loadgen run --trace` replays.

The file has one JSON object per call: when the call began, its input and output tokens, its conversation, and salted
hashes of the blocks of its prompt. Equal hashes show which prompts have a common beginning. No text, no key and no user
name is written. A fault of the file never stops the application.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import secrets
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec

from ..errors import WrongUse, warn
from .backlog import Backlog
from .finishing import flush, later
from .measurement import Measurement
from .prompt_text import Prompt, read_prompt

BLOCK_BYTES = 512  # prompt text per hash: about 128 tokens
REMEMBERED = 65_536  # number of recent turns for which a next turn is recognised
KEPT_ROWS = 100_000  # rows held in memory while the file cannot be written
FLUSH_NS = 500_000_000
WRITE_RETRY_NS = 1_000_000_000  # wait after a failed write before the next try
_MESSAGE_SEPARATOR = b"\n\x00"  # separates two messages in the hashed text


class _Turn:
    """A call, stored so that the next turn of its conversation can be found. `ended`: monotonic ns, -1: not yet."""

    __slots__ = ("ended", "session", "turn")

    def __init__(self, session: str, turn: int) -> None:
        self.session, self.turn, self.ended = session, turn, -1


class CallShape:
    """A call between `begin` and `end`: first its prompt, then, in the background, what is kept of it.

    messages: the argument whose messages are those of a conversation; "" : none, None: a bare prompt, which continues
    nothing.
    """

    __slots__ = (
        "delay_ns",
        "hashes",
        "messages",
        "previous_id",
        "prompt",
        "started",
        "tokens",
        "turn",
    )

    def __init__(
        self, started: int, prompt: Prompt, messages: str | None, previous_id: str
    ) -> None:
        self.started = started
        self.prompt: Prompt | None = prompt  # given up as soon as it is hashed
        self.messages = messages
        self.previous_id = previous_id
        self.turn: _Turn | None = None
        self.delay_ns: int | None = None  # since the end of the previous turn; None: no such turn
        self.hashes: list[int] = []
        self.tokens = prompt.tokens  # as estimated


class ShapeRecorder:
    """Writes a shape-only trace. Use: `instrument(client, record=record_shape("traffic.jsonl"))`; close it at the end.

    Threads and tasks may share one recorder. Several processes may append to one file; with the same salt, their common
    prompts have the same hashes. Rows that cannot be written (a full disk) are kept in memory, up to KEPT_ROWS, and
    written later. This is warned of once. `lost` counts rows that were given up. Hashing and writing are done by a
    background thread, in the order of the calls; `flush` and `close` wait for it. A process that is forked goes on with
    the file, and with sessions of its own.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        salt: str | bytes | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        self.path = Path(path)
        if isinstance(labels, str) or not all(isinstance(name, str) for name in labels):
            raise WrongUse(
                "wrong_type",
                f"labels={labels!r}",
                'give the names of labels to write: labels=("feature",)',
            )
        self._labels = tuple(labels)
        secret = (
            secrets.token_bytes(16)
            if salt is None
            else salt.encode()
            if isinstance(salt, str)
            else bytes(salt)
        )
        if not secret:
            raise WrongUse(
                "out_of_range",
                "an empty salt hides nothing",
                "leave it out, or give the same secret to every process",
            )
        self._key = hashlib.blake2b(secret, digest_size=32).digest()
        try:
            self._fd = os.open(
                self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            what = f"cannot record to {self.path}: {error.strerror}"
            raise WrongUse("unwritable_file", what, "give a file that can be written") from None
        self._backlog: Backlog[Callable[[], None]] = Backlog(_do)
        self._begin()
        _recorders.add(self)
        atexit.register(self.close)

    def _begin(self) -> None:
        """Sessions and rows of this process: of a child after a fork, none of the parent's."""
        self.lost = self.written = 0
        self._session_prefix, self._sessions = secrets.token_hex(3), 0
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()
        self._rows: deque[bytes] = deque()
        self._flushed = self._retry_at = self._handed_over = 0
        self._warned = False
        self._lock = threading.RLock()

    def begin(self, started: int, arguments: Mapping[str, Any]) -> CallShape:
        """A call begins at `started` (monotonic ns) with these arguments (messages, prompt or input)."""
        prompt = read_prompt(arguments)
        name = "input" if arguments.get("messages") is None else "messages"
        messages = arguments.get(name)
        previous_id = str(arguments.get("previous_response_id") or "")
        by_message = "" if isinstance(messages, str) or previous_id else None
        if isinstance(messages, list | tuple):
            by_message = name
        shape = CallShape(started, prompt, by_message, previous_id)
        self._backlog.add(partial(self._hash, shape))
        return shape

    def end(self, sighting: CallShape, measurement: Measurement) -> None:
        """The call has ended: its row is queued, and written when it is time. `sighting`: what `begin` returned."""
        self._backlog.add(partial(self._add_row, sighting, measurement))
        if (
            measurement.done >= self._handed_over + FLUSH_NS
        ):  # to wake a thread takes longer than all else here
            self._handed_over = measurement.done
            later(self._backlog.count_all)

    def _hash(self, shape: CallShape) -> None:
        assert shape.prompt is not None
        texts, shape.prompt = shape.prompt.texts, None
        encoded = [
            text.encode("utf-8", "surrogatepass") for several in texts.values() for text in several
        ]
        shape.hashes = self._blocks(_MESSAGE_SEPARATOR.join(encoded))
        if shape.messages is not None:
            messages = texts.get(shape.messages, [])
            shape.turn, shape.delay_ns = self._find_turn(shape.started, messages, shape.previous_id)

    def _add_row(self, sighting: CallShape, measurement: Measurement) -> None:
        turn = sighting.turn
        server_counted = measurement.input_tokens is not None
        tokens = measurement.input_tokens if server_counted else max(1, sighting.tokens)
        row: dict[str, Any] = {
            "timestamp": round(measurement.started_unix_ns / 1e6, 3),
            "input_length": tokens,
            "output_length": measurement.output_tokens or 0,
            "hash_ids": sighting.hashes,
            "block_size": round((tokens or 0) / len(sighting.hashes), 3) if sighting.hashes else 0,
            "input_source": "server" if server_counted else "estimate",
            "output_source": measurement.token_source,
            "status": measurement.status,
            "stream": measurement.streamed,
        }
        for name in self._labels:
            if name in measurement.labels:
                row.setdefault("labels", {})[name] = measurement.labels[name]
        if turn is not None:
            turn.ended = measurement.done
            row |= {"session_id": turn.session, "turn": turn.turn}
            if sighting.delay_ns is not None:
                row["delay"] = round(sighting.delay_ns / 1e6, 3)
        with self._lock:
            if turn is not None and measurement.response_id:
                self._remember(self._digest(b"id" + measurement.response_id.encode()), turn)
            if (
                len(self._rows) >= KEPT_ROWS
            ):  # the newest row is dropped: the oldest may be partly written
                self.lost += 1
            else:
                self._rows.append(msgspec.json.encode(row) + b"\n")
            now = monotonic_ns()
            if now >= max(self._retry_at, self._flushed + FLUSH_NS):
                self._write(now)

    def flush(self) -> None:
        """Write all waiting rows now."""
        self._catch_up()
        with self._lock:
            self._write(monotonic_ns())

    def close(self) -> None:
        """Write all waiting rows and close the file. Rows that cannot be written count as `lost`, with a warning."""
        self._catch_up()
        with self._lock:
            if self._fd < 0:
                return
            self._write(monotonic_ns())
            unwritten = len(self._rows)
            if unwritten:
                self.lost += unwritten
                self._rows.clear()
                warn(
                    f"{unwritten} calls are missing in {self.path}: it could not be written",
                    stacklevel=3,
                )
            os.close(self._fd)
            self._fd = -1
            atexit.unregister(self.close)

    def __enter__(self) -> ShapeRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        flush()  # calls that are being ended in the background
        self._backlog.count_all()

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16, key=self._key).digest()

    def _blocks(self, text: bytes) -> list[int]:
        """One number per block of the text. Equal numbers mean equal text from the start to the end of that block."""
        block_hashes, chain, key = [], b"", self._key
        for offset in range(0, len(text), BLOCK_BYTES):
            block = text[offset : offset + BLOCK_BYTES]
            chain = hashlib.blake2b(
                chain + len(block).to_bytes(2, "little") + block, digest_size=16, key=key
            ).digest()
            block_hashes.append(
                int.from_bytes(chain[:6], "little")
            )  # 48 bits: exact in every JSON reader
        return block_hashes

    def _find_turn(
        self, started: int, messages: list[str], previous_id: str
    ) -> tuple[_Turn, int | None]:
        """The turn that this call is in its conversation, and the ns since the previous turn ended (None: unknown).

        The previous turn is the one named by `previous_response_id`, else the longest earlier call that is a beginning
        of this one. Without any, a new conversation starts.
        """
        prefix_hashes: list[bytes] = []
        previous_hash = b""
        for message in messages:
            previous_hash = self._digest(previous_hash + message.encode("utf-8", "surrogatepass"))
            prefix_hashes.append(previous_hash)
        candidates = prefix_hashes[-2::-1]
        if previous_id:
            candidates.insert(0, self._digest(b"id" + previous_id.encode()))
        with self._lock:
            parent = next((self._turns[key] for key in candidates if key in self._turns), None)
            if parent is None:
                self._sessions += 1
                turn = _Turn(f"{self._session_prefix}-{self._sessions}", 0)
            else:
                turn = _Turn(parent.session, parent.turn + 1)
            if prefix_hashes:
                self._remember(prefix_hashes[-1], turn)
        delay_ns = (
            started - parent.ended if parent is not None and 0 <= parent.ended <= started else None
        )
        return turn, delay_ns

    def _remember(self, prefix_hash: bytes, turn: _Turn) -> None:
        self._turns[prefix_hash] = turn
        self._turns.move_to_end(prefix_hash)
        if len(self._turns) > REMEMBERED:
            self._turns.popitem(last=False)

    def _write(self, now: int) -> None:
        """Write as many rows as the file takes. A row cut by a full disk is continued at the next write."""
        self._flushed = now
        if self._fd < 0:  # the call ended after the recorder was closed
            self.lost += len(self._rows)
            self._rows.clear()
            return
        rows = self._rows
        try:
            while rows:
                rows[0] = rows[0][os.write(self._fd, rows[0]) :]
                if not rows[0]:
                    rows.popleft()
                    self.written += 1
        except OSError as error:
            self._retry_at = now + WRITE_RETRY_NS
            if not self._warned:
                self._warned = True
                why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
                kept = f"up to {KEPT_ROWS:,} calls are kept in memory until it can be"
                text = f"cannot write to {self.path}: {why}; {kept}"
                warn(text, RuntimeWarning, stacklevel=4)
        else:
            self._warned = False


def _do(work: Callable[[], None]) -> None:
    work()


def _after_fork() -> None:
    for recorder in _recorders:
        recorder._begin()


_recorders: weakref.WeakSet[ShapeRecorder] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def record_shape(
    path: str | os.PathLike[str], *, salt: str | bytes | None = None, labels: Sequence[str] = ()
) -> ShapeRecorder:
    """A recorder that appends to `path`.

    salt: a secret; hashes can be compared between files that use the same one. By default it is random and not stored.
    labels: names of labels of calls (see `labelled`) that are written, as they are; others are not.
    Raises WrongUse when the file cannot be opened.
    """
    return ShapeRecorder(path, salt=salt, labels=labels)
