"""The request bodies of one worker, built before they are sent and stored in an unnamed temporary file.

IO, but only with that temporary file. A body is built from `prompts` and the client's `prepare`, and read back when it
is sent, so the sending loop spends no time on building and the bodies use no memory. A body that was not built in
advance (a load without end, a conversation with real replies) is built when it is needed and counted in `late`.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from time import process_time
from typing import Any

import msgspec
from loadgen_sdk.request import Completion, Request

from loadgen.core.requests.prompts import AssistantTurn, Digest, Prompts
from loadgen.core.results.record import Built

BLOCK_BYTES = 1 << 20
READ_BYTES = 32 << 10  # short bodies are read from the file in blocks of this size; each holds many
SHORT_BYTES = 4 << 10
MOST_BLOCKS = 64  # kept: the lanes of a closed loop are at different places of the file
UNKNOWN = Built(-1, "", -1)


def built_of(request: Request) -> Built:
    """What is known of a request without its answer."""
    tokens = -1 if request.input_tokens is None else request.input_tokens
    return Built(tokens, request.input_source or "", -1 if request.max_tokens is None else request.max_tokens)


def _calls(done: Completion) -> tuple[dict[str, Any], ...]:
    """The calls of tools in an answer, as the messages of later requests have them."""
    return tuple(
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in done.tool_calls
    )


class _StoredBodies:
    """The bodies of one stage: request numbers in ascending order, their places in the file and token counts."""

    __slots__ = ("asked_output", "lengths", "numbers", "offsets", "tokens")

    def __init__(self) -> None:
        self.numbers, self.offsets = array("q"), array("q")
        self.lengths, self.tokens, self.asked_output = array("i"), array("i"), array("i")

    def find(self, number: int) -> int:
        """Index of the body of a request number, or -1 if it was not built in advance."""
        numbers = self.numbers
        if len(numbers) > 1:  # the usual case: they follow each other evenly
            position = (number - numbers[0]) // (numbers[1] - numbers[0])
            if 0 <= position < len(numbers) and numbers[position] == number:
                return position
        position = bisect_left(numbers, number)
        return position if position < len(numbers) and numbers[position] == number else -1


class Bodies:
    """First `build` in ascending order, stage by stage. Then `take` (or `built`) and `answered` for each request."""

    def __init__(
        self,
        prompts: Prompts,
        prepare: Callable[[int, Request], bytes],
        stages: int,
        *,
        linked: bool = False,
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        """`linked`: a later turn names the answer before it by its id, and sends only what is new."""
        self._prompts, self._prepare, self._linked = prompts, prepare, linked
        self._answer_ids: dict[int, str] = {}
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._fd = self._file.fileno()
        self._end = 0
        self._blocks: dict[int, bytes] = {}  # of the file, by number
        self._most_blocks = most_blocks
        self._stored = [_StoredBodies() for _ in range(stages)]
        self._input_source = ""
        self._real_history = prompts.history == "server"
        self._replies: dict[int, dict[int, AssistantTurn]] = {}  # conversation -> place of a turn -> its answer
        self._last_built = UNKNOWN
        self.digest = Digest(replies=not self._real_history)
        self.sent_bytes = Digest()  # of the bodies themselves
        self.late = 0

    def build(self, stage: int, numbers: Iterator[int], *, most: int | None = None, cpu_s: float | None = None) -> int:
        """Build the bodies of `numbers`, at most `most` and for at most `cpu_s` of CPU time; returns how many."""
        stored = self._stored[stage]
        pending: list[bytes] = []
        pending_bytes = count = 0
        deadline = None if cpu_s is None else process_time() + cpu_s
        while (most is None or count < most) and (deadline is None or count & 63 or process_time() < deadline):
            number = next(numbers, None)
            if number is None:
                break
            request = self._prompts[number]
            body = self._prepare(number, request)
            self.digest.add(number, request)
            self.sent_bytes.add_body(number, body)
            pending.append(body)
            pending_bytes += len(body)
            stored.numbers.append(number)
            stored.offsets.append(self._end)
            stored.lengths.append(len(body))
            built = built_of(request)
            stored.tokens.append(built.tokens)
            stored.asked_output.append(built.asked_output)
            self._input_source = built.source or self._input_source
            self._end += len(body)
            count += 1
            if pending_bytes >= BLOCK_BYTES:
                self._write(pending)
                pending_bytes = 0
        self._write(pending)
        return count

    def ahead(self, stage: int) -> int:
        """How many bodies of a stage were built in advance, sent or not."""
        return len(self._stored[stage].numbers)

    def _write(self, pending: list[bytes]) -> None:
        view = memoryview(b"".join(pending))
        pending.clear()
        while view:
            view = view[os.write(self._fd, view) :]

    def take(self, stage: int, number: int) -> tuple[bytes, Built]:
        """The bytes to send for this request, and what is known of it without its answer."""
        if self._real_history and self._prompts.follows_replies(number):
            return self._with_replies(number)
        stored = self._stored[stage]
        position = stored.find(number)
        if position < 0:
            self.late += 1
            return self._build_now(number, self._prompts[number])
        built, tokens, asked = self._last_built, stored.tokens[position], stored.asked_output[position]
        if built.tokens != tokens or built.asked_output != asked or built.source != self._input_source:
            built = self._last_built = Built(tokens, self._input_source, asked)  # else the same as before it
        return self._stored_bytes(stored.offsets[position], stored.lengths[position]), built

    def _stored_bytes(self, offset: int, length: int) -> bytes:
        number, at = divmod(offset, READ_BYTES)
        if length > SHORT_BYTES or at + length > READ_BYTES:
            return os.pread(self._fd, length, offset)
        block = self._blocks.get(number, b"")
        if at + length > len(block):  # not read yet, or before this part of it was written
            if len(self._blocks) >= self._most_blocks:
                del self._blocks[next(iter(self._blocks))]
            block = self._blocks[number] = os.pread(self._fd, READ_BYTES, number * READ_BYTES)
        return block[at : at + length]

    def _build_now(self, number: int, request: Request) -> tuple[bytes, Built]:
        return self._prepare(number, request), built_of(request)

    def _with_replies(self, number: int) -> tuple[bytes, Built]:
        turns = self._prompts.turns
        conversation = number // turns
        request = self._prompts.turn_with(number, self._replies.get(conversation, {}))
        if (answer_id := self._answer_ids.get(conversation)) and request.messages:
            extra = request.extra | {"previous_response_id": answer_id}
            request = msgspec.structs.replace(request, messages=request.messages[-1:], extra=extra)
        return self._build_now(number, request)

    def built(self, stage: int, number: int) -> Built:
        """What is known of a request that is never sent."""
        stored = self._stored[stage]
        if (position := stored.find(number)) < 0:
            return UNKNOWN
        return Built(stored.tokens[position], self._input_source, stored.asked_output[position])

    def answered(self, number: int, done: Completion) -> None:
        """Keep the answer if later turns of the conversation have to send it."""
        if self._real_history:
            conversation, place = divmod(number, turns := self._prompts.turns)
            if place == 0 and turns > 1:
                self._replies[conversation] = {}
            if place + 1 == turns or done.failure is not None:
                self._replies.pop(conversation, None)
                self._answer_ids.pop(conversation, None)
            elif (replies := self._replies.get(conversation)) is not None:
                replies[place] = AssistantTurn(done.text or "", _calls(done))
                if self._linked and done.response_id:
                    self._answer_ids[conversation] = done.response_id

    def close(self) -> None:
        self._file.close()
