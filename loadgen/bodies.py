"""The bodies of the requests of one worker, built ahead of their send and kept in a file that has no name.

IO, but only of that scratch file: a body is built from `prompts` and the client's `prepare`, and read back when its
time has come, so that neither building nor memory stands in the sending loop's way. What was not built ahead (a load
without end, a conversation with real replies) is built when asked for, and counted in `late`.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time

from loadgen_sdk.request import Completion, Request

from loadgen.prompts import Digest, Prompts
from loadgen.record import Built

BLOCK_BYTES = 1 << 20
UNKNOWN = Built(-1, "", -1)


class Bodies:
    """`build` first, in ascending order; then `body` and `built` of any number, `answered` for each reply."""

    def __init__(self, prompts: Prompts, prepare: Callable[[Request], bytes], folder: Path | None = None) -> None:
        self._prompts, self._prepare = prompts, prepare
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by close()
        self._fd = self._file.fileno()
        self._numbers = array("q")
        self._offsets = array("q", [0])
        self._tokens = array("i")
        self._asked = array("i")
        self._source = ""
        self._real_history = prompts.history == "server"
        self._replies: dict[int, list[str]] = {}
        self._late: dict[int, Built] = {}
        self.digest = Digest(replies=not self._real_history)
        self.late = 0

    def build(self, numbers: Iterator[int], *, most: int | None = None, cpu_s: float | None = None) -> int:
        """Build these, at most `most` of them and for at most `cpu_s` of CPU time; returns how many."""
        pending: list[bytes] = []
        held = count = 0
        offset = self._offsets[-1]
        until = None if cpu_s is None else process_time() + cpu_s
        for number in numbers:
            request = self._prompts[number]
            body = self._prepare(request)
            self.digest.add(number, request)
            pending.append(body)
            held += len(body)
            offset += len(body)
            self._note(number, offset, request)
            count += 1
            if held >= BLOCK_BYTES:
                self._write(pending)
                held = 0
            if count == most or (until is not None and not count & 63 and process_time() > until):
                break
        self._write(pending)
        return count

    def _note(self, number: int, offset: int, request: Request) -> None:
        self._numbers.append(number)
        self._offsets.append(offset)
        self._tokens.append(-1 if request.input_tokens is None else request.input_tokens)
        self._asked.append(-1 if request.max_tokens is None else request.max_tokens)
        if request.input_source:
            self._source = request.input_source

    def _write(self, pending: list[bytes]) -> None:
        view = memoryview(b"".join(pending))
        pending.clear()
        while view:
            view = view[os.write(self._fd, view) :]

    def _place(self, number: int) -> int:
        numbers = self._numbers
        place = bisect_left(numbers, number)
        return place if place < len(numbers) and numbers[place] == number else -1

    def body(self, number: int) -> bytes:
        """The bytes to send for this request."""
        if self._real_history and number % self._prompts.turns:
            return self._with_replies(number)
        place = self._place(number)
        if place < 0:
            self.late += 1
            return self._now(number, self._prompts[number])
        offset = self._offsets[place]
        return os.pread(self._fd, self._offsets[place + 1] - offset, offset)

    def _now(self, number: int, request: Request) -> bytes:
        tokens = -1 if request.input_tokens is None else request.input_tokens
        self._late[number] = Built(
            tokens, request.input_source, -1 if request.max_tokens is None else request.max_tokens
        )
        return self._prepare(request)

    def _with_replies(self, number: int) -> bytes:
        turns = self._prompts.turns
        replies = self._replies.get(number // turns, [])
        return self._now(number, self._prompts.turn_with(number, replies))

    def built(self, number: int) -> Built:
        """What is known of this request without its answer."""
        late = self._late.pop(number, None)
        if late is not None:
            return late
        place = self._place(number)
        if place < 0:
            return UNKNOWN
        return Built(self._tokens[place], self._source, self._asked[place])

    def answered(self, number: int, done: Completion) -> None:
        """Keep the reply where the next turn sends it back."""
        if self._real_history:
            conversation, turn = divmod(number, self._prompts.turns)
            if turn + 1 < self._prompts.turns and done.failure is None:
                self._replies.setdefault(conversation, []).append(done.text or "")
            else:
                self._replies.pop(conversation, None)

    def close(self) -> None:
        self._file.close()
