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

from loadgen.requests.prompts import Digest, Prompts
from loadgen.results.record import Built

BLOCK_BYTES = 1 << 20
UNKNOWN = Built(-1, "", -1)


class _Shelf:
    """Where the bodies of one stage lie in the file, and what is known of them. Numbers come in ascending order."""

    __slots__ = ("asked", "lengths", "numbers", "offsets", "tokens")

    def __init__(self) -> None:
        self.numbers, self.offsets = array("q"), array("q")
        self.lengths, self.tokens, self.asked = array("i"), array("i"), array("i")

    def place(self, number: int) -> int:
        """Index of a number, or -1."""
        place = bisect_left(self.numbers, number)
        return place if place < len(self.numbers) and self.numbers[place] == number else -1


class Bodies:
    """`build` ahead, each stage in ascending order; then `body` and `built` of any, `answered` for each reply."""

    def __init__(
        self, prompts: Prompts, prepare: Callable[[Request], bytes], stages: int, folder: Path | None = None
    ) -> None:
        self._prompts, self._prepare = prompts, prepare
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by close()
        self._fd = self._file.fileno()
        self._end = 0
        self._shelves = [_Shelf() for _ in range(stages)]
        self._source = ""
        self._real_history = prompts.history == "server"
        self._replies: dict[int, list[str]] = {}
        self._late: dict[int, Built] = {}
        self.digest = Digest(replies=not self._real_history)
        self.late = 0

    def build(self, stage: int, numbers: Iterator[int], *, most: int | None = None, cpu_s: float | None = None) -> int:
        """Build these, at most `most` of them and for at most `cpu_s` of CPU time; returns how many."""
        shelf = self._shelves[stage]
        pending: list[bytes] = []
        held = count = 0
        until = None if cpu_s is None else process_time() + cpu_s
        while (most is None or count < most) and (until is None or count & 63 or process_time() < until):
            number = next(numbers, None)
            if number is None:
                break
            request = self._prompts[number]
            body = self._prepare(request)
            self.digest.add(number, request)
            pending.append(body)
            held += len(body)
            shelf.numbers.append(number)
            shelf.offsets.append(self._end)
            shelf.lengths.append(len(body))
            shelf.tokens.append(-1 if request.input_tokens is None else request.input_tokens)
            shelf.asked.append(-1 if request.max_tokens is None else request.max_tokens)
            self._source = request.input_source or self._source
            self._end += len(body)
            count += 1
            if held >= BLOCK_BYTES:
                self._write(pending)
                held = 0
        self._write(pending)
        return count

    def ahead(self, stage: int) -> int:
        """How many of a stage have been built ahead, sent or not."""
        return len(self._shelves[stage].numbers)

    def _write(self, pending: list[bytes]) -> None:
        view = memoryview(b"".join(pending))
        pending.clear()
        while view:
            view = view[os.write(self._fd, view) :]

    def body(self, stage: int, number: int) -> bytes:
        """The bytes to send for this request."""
        if self._real_history and number % self._prompts.turns:
            return self._with_replies(number)
        shelf = self._shelves[stage]
        place = shelf.place(number)
        if place < 0:
            self.late += 1
            return self._now(number, self._prompts[number])
        return os.pread(self._fd, shelf.lengths[place], shelf.offsets[place])

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

    def built(self, stage: int, number: int) -> Built:
        """What is known of this request without its answer."""
        late = self._late.pop(number, None)
        if late is not None:
            return late
        shelf = self._shelves[stage]
        place = shelf.place(number)
        return UNKNOWN if place < 0 else Built(shelf.tokens[place], self._source, shelf.asked[place])

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
