"""Record the shape of an application's traffic, without its text, for `loadgen run --trace`.

The file has a JSON object per call: when the call began, its input and output tokens, its
conversation, and salted hashes of the blocks of its prompt. Equal hashes show which prompts have a
common beginning. No text, no key and no user name is written. An error of the file never stops the
application.
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
from .background import flush, run_in_background
from .backlog import Backlog
from .measurement import Measurement
from .prompt_text import Prompt, read_prompt

BLOCK_BYTES = 512
"""The bytes of prompt text per hash, which are about 128 tokens."""

MAX_REMEMBERED_TURNS = 65_536
"""The number of recent turns whose next turn is recognised."""

MAX_WAITING_ROWS = 100_000
"""The number of rows that are kept in memory while the file cannot be written."""

_FLUSH_INTERVAL_NS = 500_000_000
_WRITE_RETRY_NS = 1_000_000_000
_MESSAGE_SEPARATOR = b"\n\x00"
_RESPONSE_ID_PREFIX = b"id"

_HASH_VALUE_BYTES = 6
"""48 bits are exact in every JSON reader."""


class _Turn(msgspec.Struct):
    """The place of a call in its conversation. It is kept to recognise the next turn.

    Attributes:
        session: The id of the conversation.
        number: The number of the turn, from 0.
        ended: When the call ended, in monotonic ns, or None if it has not ended.
    """

    session: str
    number: int
    ended: int | None = None


class CallShape(msgspec.Struct):
    """What a recorder keeps of a call between its start and its end.

    Attributes:
        started: When the call began, in monotonic ns.
        prompt: The prompt, until it is hashed in the background.
        prompt_tokens: The estimated tokens of the prompt.
        conversation: Where the call has its conversation, or None for a prompt without one.
        turn: The turn of the call in its conversation, or None if it has none.
        delay_ns: The time since the end of the previous turn, or None if there is none.
        block_hashes: The hashes of the blocks of the prompt.
    """

    started: int
    prompt: Prompt | None
    prompt_tokens: int
    conversation: _ConversationFields | None
    turn: _Turn | None = None
    delay_ns: int | None = None
    block_hashes: list[int] = []


class _ConversationFields(msgspec.Struct, frozen=True):
    """The fields of a request that say to which conversation it belongs.

    Attributes:
        messages_argument: The name of the argument with a list of messages, or None if there is
            none.
        previous_response_id: The id of the response that the request continues, or "".
    """

    messages_argument: str | None
    previous_response_id: str


class ShapeRecorder:
    """Writes a trace of shapes: `instrument(client, record=record_shape("traffic.jsonl"))`.

    Close it at the end. Threads and tasks may share one recorder. Several processes may append to
    one file. With the same salt, prompts that they have in common have the same hashes. A process
    that is forked continues with the file, and with sessions of its own.

    Rows that cannot be written (a full disk) are kept in memory, up to MAX_WAITING_ROWS, and
    written later. A warning says so once. A background thread hashes and writes in the order of
    the calls, and `flush` and `close` wait for it.

    Attributes:
        path: The file.
        written: The number of rows that were written.
        lost: The number of rows that were given up.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        salt: str | bytes | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        """Open the file to which the recorder appends. The arguments are those of `record_shape`.

        If the application does not close the recorder, it is closed when the process exits.
        """
        if isinstance(labels, str) or not all(isinstance(name, str) for name in labels):
            raise WrongUse(
                "wrong_type",
                f"labels={labels!r}",
                'give the names of the labels to write: labels=("feature",)',
            )

        self.path = Path(path)
        self._labels = tuple(labels)
        self._hash_key = _derive_hash_key(salt)
        self._file_descriptor: int | None = _open_for_append(self.path)

        # The work for the background thread, as functions without arguments. Each of them hashes a
        # prompt or adds a row, and the thread calls them in order.
        self._backlog: Backlog[Callable[[], None]] = Backlog(_call_function)
        self._reset()

        # Every recorder of this set is reset in a forked child (`_reset_after_fork`).
        _recorders.add(self)
        atexit.register(self.close)

    def _reset(self) -> None:
        """Forget all conversations and rows.

        This runs at the creation of the recorder, and in a forked child, whose parent writes the
        rows that were there before. Times are in monotonic ns.
        """
        self.lost = 0  # rows
        self.written = 0  # rows

        # Session ids have to be unique among the processes that append to the file.
        self._session_prefix = secrets.token_hex(3)
        self._session_count = 0

        # The recent turns, oldest first. A turn has two keys: the hash of its messages, and the
        # hash of the id of its response.
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()
        self._rows: deque[bytes] = deque()  # not written yet; the first one may be partly written
        self._flushed_at = 0  # the last write
        self._retry_at = 0  # the earliest next write after one that has failed
        self._scheduled_at = 0  # the last time that the background thread was woken
        self._has_warned = False
        self._lock = threading.RLock()

    def begin(self, started: int, arguments: Mapping[str, object]) -> CallShape:
        """Return the shape of a call that begins. Its prompt is hashed in the background.

        Args:
            started: When the call began, in monotonic ns.
            arguments: The fields of the request, such as messages, prompt or input.
        """
        prompt = read_prompt(arguments)
        shape = CallShape(started, prompt, prompt.tokens, _conversation_fields(arguments))
        self._backlog.add(partial(self._hash_prompt_and_find_turn, shape))
        return shape

    def end(self, shape: CallShape, measurement: Measurement) -> None:
        """Queue the row of a call that has ended. It is written in the background.

        Waking the background thread takes longer than everything else here. It is therefore woken
        at most once in _FLUSH_INTERVAL_NS.

        Args:
            shape: The result of `begin` for this call.
            measurement: The measurement of the call. Its end (`done`, in monotonic ns) serves as
                the current time.
        """
        self._backlog.add(partial(self._add_row, shape, measurement))
        now = measurement.done
        is_time_to_wake_thread = now >= self._scheduled_at + _FLUSH_INTERVAL_NS
        if is_time_to_wake_thread:
            self._scheduled_at = now
            run_in_background(self._backlog.process_all)

    def flush(self) -> None:
        """Write all waiting rows now."""
        self._process_ended_calls()
        with self._lock:
            self._write(monotonic_ns())

    def close(self) -> None:
        """Write all waiting rows and close the file.

        Rows that cannot be written count as lost, and a warning says so.
        """
        self._process_ended_calls()
        with self._lock:
            if self._file_descriptor is None:
                return

            self._write(monotonic_ns())
            unwritten_count = len(self._rows)
            if unwritten_count:
                self.lost += unwritten_count
                self._rows.clear()
                warn(
                    (
                        f"{unwritten_count} calls are missing in {self.path}, because it "
                        "could not be written"
                    ),
                    stacklevel=3,  # the caller of this method
                )

            os.close(self._file_descriptor)
            self._file_descriptor = None
            atexit.unregister(self.close)

    def __enter__(self) -> ShapeRecorder:
        """Return the recorder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def _process_ended_calls(self) -> None:
        """Process all calls that have ended, also those that are being ended in the background."""
        flush()
        self._backlog.process_all()

    def _hash_prompt_and_find_turn(self, shape: CallShape) -> None:
        """Set the hashes of the prompt of a call, and its turn in its conversation.

        This runs once for each call, in the background, and before the row of the call is added.
        Calls are processed in the order in which they began. The previous turn of a conversation is
        therefore known when the next one is processed.
        """
        assert shape.prompt is not None
        texts_by_argument = shape.prompt.joined_texts
        shape.prompt = None  # It may be large and is not needed any more.

        encoded_texts = []
        for texts in texts_by_argument.values():
            encoded_texts += [text.encode("utf-8", "surrogatepass") for text in texts]

        shape.block_hashes = self._hash_blocks(_MESSAGE_SEPARATOR.join(encoded_texts))
        conversation = shape.conversation
        if conversation is not None:
            messages: list[str] = []
            if conversation.messages_argument is not None:
                messages = texts_by_argument.get(conversation.messages_argument, [])
            self._find_turn(shape, messages, conversation.previous_response_id)

    def _add_row(self, shape: CallShape, measurement: Measurement) -> None:
        """Queue the row of a call that has ended, and write all queued rows if it is time.

        If the file cannot be written and MAX_WAITING_ROWS rows wait, the row is lost.
        """
        row = msgspec.json.encode(self._make_row(shape, measurement)) + b"\n"
        with self._lock:
            if shape.turn is not None:
                self._end_turn(shape.turn, measurement)

            self._queue_row(row)
            now = monotonic_ns()

            # `_retry_at` is later than the usual time if the last write has failed.
            next_write_at = max(self._retry_at, self._flushed_at + _FLUSH_INTERVAL_NS)
            if now >= next_write_at:
                self._write(now)

    def _queue_row(self, row: bytes) -> None:
        """Add a row to those that wait to be written, or drop it if there are too many.

        The newest row is dropped, because the oldest one may be partly written.
        """
        if len(self._rows) >= MAX_WAITING_ROWS:
            self.lost += 1
        else:
            self._rows.append(row)

    def _end_turn(self, turn: _Turn, measurement: Measurement) -> None:
        """Record the end of a turn, and the id of its response, by which the next turn is found."""
        turn.ended = measurement.done
        if measurement.response_id:
            self._remember_turn(self._response_id_key(measurement.response_id), turn)

    def _make_row(self, shape: CallShape, measurement: Measurement) -> dict[str, Any]:
        """Return the row of a call in the format of `loadgen run --trace`. Times are in ms.

        The input tokens are counted by the server, or else estimated; `input_source` says which.
        Each hash in `hash_ids` stands for a block of the prompt, and `block_size` is the mean
        number of tokens in a block.
        """
        if measurement.input_tokens is None:
            input_tokens = max(1, shape.prompt_tokens)
            input_source = "estimate"
        else:
            input_tokens = measurement.input_tokens
            input_source = "server"

        tokens_per_block = 0.0
        if shape.block_hashes:
            tokens_per_block = input_tokens / len(shape.block_hashes)

        row: dict[str, Any] = {
            "timestamp": round(measurement.started_unix_ns / 1e6, 3),
            "input_length": input_tokens,
            "output_length": measurement.output_tokens or 0,
            "hash_ids": shape.block_hashes,
            "block_size": round(tokens_per_block, 3),
            "input_source": input_source,
            "output_source": measurement.token_source,
            "status": measurement.status,
            "stream": measurement.streamed,
        }
        row.update(self._optional_fields(shape, measurement))
        return row

    def _optional_fields(self, shape: CallShape, measurement: Measurement) -> dict[str, Any]:
        """Return the fields of a row that only some calls have: labels, and the conversation."""
        fields: dict[str, Any] = {}
        labels = {
            name: measurement.labels[name] for name in self._labels if name in measurement.labels
        }
        if labels:
            fields["labels"] = labels

        if shape.turn is not None:
            fields["session_id"] = shape.turn.session
            fields["turn"] = shape.turn.number

        if shape.delay_ns is not None:
            fields["delay"] = round(shape.delay_ns / 1e6, 3)

        return fields

    def _digest(self, data: bytes) -> bytes:
        """Return the keyed hash of some bytes, which nobody can guess without the salt."""
        return hashlib.blake2b(data, digest_size=16, key=self._hash_key).digest()

    def _hash_blocks(self, text: bytes) -> list[int]:
        """Return a hash for each block of BLOCK_BYTES of a prompt.

        A hash covers all text from the start of the prompt to the end of its block, so that equal
        hashes mean an equal prefix, which a server's prefix cache can reuse. Each hash includes the
        one before, and the length of its block, because the last block may be shorter.
        """
        block_hashes = []
        digest = b""
        for offset in range(0, len(text), BLOCK_BYTES):
            block = text[offset : offset + BLOCK_BYTES]
            digest = self._digest(digest + len(block).to_bytes(2, "little") + block)
            block_hashes.append(int.from_bytes(digest[:_HASH_VALUE_BYTES], "little"))
        return block_hashes

    def _find_turn(self, shape: CallShape, messages: list[str], previous_id: str) -> None:
        """Set the turn of a call in its conversation, and the delay since the previous turn.

        A conversation is a chain of calls, each of which repeats or refers to the one before. A
        call without a previous turn starts a new conversation.

        Args:
            shape: The call, which is changed.
            messages: Its messages, or [] if it has none.
            previous_id: The id of the response that the call continues, or "".
        """
        prefix_keys = self._hash_prefixes(messages)
        with self._lock:
            previous_turn = self._find_previous_turn(prefix_keys, previous_id)
            if previous_turn is None:
                self._session_count += 1
                session_id = f"{self._session_prefix}-{self._session_count}"
                shape.turn = _Turn(session_id, number=0)
            else:
                shape.turn = _Turn(previous_turn.session, number=previous_turn.number + 1)
                shape.delay_ns = _delay_since(previous_turn, shape.started)

            if prefix_keys:
                # The next turn repeats all of these messages and is found by their hash.
                key_of_all_messages = prefix_keys[-1]
                self._remember_turn(key_of_all_messages, shape.turn)

    def _find_previous_turn(self, prefix_keys: list[bytes], previous_id: str) -> _Turn | None:
        """Return the turn that a call continues, or None.

        It is the turn whose response the call names, or else the remembered turn with the most
        messages in common. For example, a call with the messages A, B and C continues the call with
        A and B, or else the one with A.

        Args:
            prefix_keys: The hash of the first message, of the first two messages, and so on.
            previous_id: The id of the response that the call continues, or "".
        """
        if previous_id:
            turn = self._turns.get(self._response_id_key(previous_id))
            if turn is not None:
                return turn

        keys_of_earlier_messages = prefix_keys[:-1]
        for key in reversed(keys_of_earlier_messages):
            turn = self._turns.get(key)
            if turn is not None:
                return turn

        return None

    def _hash_prefixes(self, messages: list[str]) -> list[bytes]:
        """Return a hash of the first message, of the first two messages, and so on."""
        hashes: list[bytes] = []
        digest = b""
        for message in messages:
            digest = self._digest(digest + message.encode("utf-8", "surrogatepass"))
            hashes.append(digest)
        return hashes

    def _response_id_key(self, response_id: str) -> bytes:
        """Return the key under which the turn of a response is remembered."""
        return self._digest(_RESPONSE_ID_PREFIX + response_id.encode())

    def _remember_turn(self, key: bytes, turn: _Turn) -> None:
        """Remember a turn by a key, and forget the oldest one if there are too many."""
        self._turns[key] = turn
        self._turns.move_to_end(key)
        if len(self._turns) > MAX_REMEMBERED_TURNS:
            self._turns.popitem(last=False)

    def _write(self, now: int) -> None:
        """Write the queued rows to the file.

        If writing fails, for example on a full disk, the rest of the rows stays in the queue for a
        later try, and a warning says so. Rows of calls that ended after the recorder was closed
        count as lost.

        Args:
            now: The current time in monotonic ns.
        """
        self._flushed_at = now
        if self._file_descriptor is None:
            self.lost += len(self._rows)
            self._rows.clear()
            return

        try:
            self._write_rows(self._file_descriptor)
        except OSError as error:
            self._retry_at = now + _WRITE_RETRY_NS
            self._warn_unwritable(error)
        else:
            self._has_warned = False

    def _write_rows(self, file_descriptor: int) -> None:
        """Write all queued rows. Raises OSError if the file takes no more.

        The operating system may write only a part of a row, for example on a full disk. The rest of
        the row stays first in the queue, and the next write continues it.
        """
        rows = self._rows
        while rows:
            written_bytes = os.write(file_descriptor, rows[0])
            rows[0] = rows[0][written_bytes:]
            is_complete = not rows[0]
            if is_complete:
                rows.popleft()
                self.written += 1

    def _warn_unwritable(self, error: OSError) -> None:
        """Warn once that rows are kept in memory because the file cannot be written."""
        if self._has_warned:
            return

        self._has_warned = True
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        consequence = (
            f"up to {MAX_WAITING_ROWS:,} calls are kept in memory until the file can be written"
        )
        warn(f"cannot write to {self.path}: {reason}; {consequence}", RuntimeWarning, stacklevel=5)


def record_shape(
    path: str | os.PathLike[str], *, salt: str | bytes | None = None, labels: Sequence[str] = ()
) -> ShapeRecorder:
    """Return a recorder that appends to a file.

    Args:
        path: The file.
        salt: A secret. Hashes can be compared between files with the same one. By default it is
            random and not stored.
        labels: The names of labels of calls (see `labelled`) that are written as they are. Others
            are not written.

    Raises:
        WrongUse: The file cannot be opened, or an argument is not valid.
    """
    return ShapeRecorder(path, salt=salt, labels=labels)


def _derive_hash_key(salt: str | bytes | None) -> bytes:
    """Return the key of the hashes for a salt. Raises WrongUse for an empty one."""
    if salt is None:
        secret = secrets.token_bytes(16)
    else:
        secret = salt.encode() if isinstance(salt, str) else bytes(salt)

    if not secret:
        raise WrongUse(
            "out_of_range",
            "the salt is empty, so it would hide nothing",
            "leave it out, or give every process the same secret",
        )

    return hashlib.blake2b(secret, digest_size=32).digest()


def _open_for_append(path: Path) -> int:
    """Return the descriptor of a file, which is created if it does not exist. Raises WrongUse."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"cannot record to {path}: {error.strerror}"
        raise WrongUse("unwritable_file", message, "use a file that can be written") from None


def _conversation_fields(arguments: Mapping[str, object]) -> _ConversationFields | None:
    """Return the fields of a request that say to which conversation it belongs.

    A request continues a conversation in one of two ways. It repeats the messages of the previous
    turn, in a list `messages` or `input`. Or it names the response of the previous turn as
    `previous_response_id`. A request whose `input` is a string may be the first turn of a
    conversation of the second kind.

    Return None for a request without a conversation, such as one with a plain `prompt`.
    """
    previous_response_id = str(arguments.get("previous_response_id") or "")
    messages_argument = "messages" if arguments.get("messages") is not None else "input"
    messages = arguments.get(messages_argument)
    if isinstance(messages, list | tuple):
        return _ConversationFields(messages_argument, previous_response_id)

    may_be_first_turn = isinstance(messages, str)
    if may_be_first_turn or previous_response_id:
        return _ConversationFields(None, previous_response_id)

    return None


def _delay_since(previous_turn: _Turn, started: int) -> int | None:
    """Return the time in ns from the end of a turn to the start of the next one.

    Return None if the next one began before the end.
    """
    if previous_turn.ended is None or previous_turn.ended > started:
        return None
    return started - previous_turn.ended


def _call_function(function: Callable[[], None]) -> None:
    function()


def _reset_after_fork() -> None:
    for recorder in _recorders:
        recorder._reset()


_recorders: weakref.WeakSet[ShapeRecorder] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
