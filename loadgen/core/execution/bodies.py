"""The request bodies of one worker, built before they are sent and stored in an unnamed temporary file.

IO, but only with that temporary file. A body is built from `prompts` and the client's `prepare`, and read back when it
is sent, so the sending loop spends no time on building and the bodies use no memory. A body that was not built in
advance (a load without end, a conversation with real replies) is built when it is needed and counted in `late`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from time import process_time
from typing import Any

import msgspec
from loadgen_sdk.hashing import sum_of_hashes
from loadgen_sdk.request import Completion, Request

from loadgen.core.requests.digest import REQUESTS_HASHED_TOGETHER, Digest
from loadgen.core.requests.prompts import AssistantTurn, Prompts
from loadgen.core.requests.synthetic_prompts import iter_requests
from loadgen.core.results.record import Built

BLOCK_BYTES = 1 << 20
READ_BYTES = 32 << 10  # short bodies are read from the file in blocks of this size; each holds many
SHORT_BYTES = 4 << 10
MAPPED_BYTES = 128 << 10  # a longer body is mapped into memory when it is sent, not read
MOST_BLOCKS = 64  # kept: the lanes of a closed loop are at different places of the file
_ROW = 5  # numbers that are kept of a body: its request's, its place in the file, length, tokens, asked output
UNKNOWN = Built(-1, "", -1)


def built_of(request: Request) -> Built:
    """What is known of a request without its answer."""
    tokens = -1 if request.input_tokens is None else request.input_tokens
    return Built(
        tokens, request.input_source or "", -1 if request.max_tokens is None else request.max_tokens
    )


def _calls(done: Completion) -> tuple[dict[str, Any], ...]:
    """The calls of tools in an answer, as the messages of later requests have them."""
    return tuple(
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in done.tool_calls
    )


def _find(stored: array[int], number: int) -> int:
    """Where what is known of a request's body begins, or -1 if it was not built in advance."""
    # usually the numbers follow each other evenly
    at = (number - stored[0]) // (stored[_ROW] - stored[0]) * _ROW if len(stored) > _ROW else -1
    if 0 <= at < len(stored) and stored[at] == number:
        return at
    at = _ROW * bisect_left(range(len(stored) // _ROW), number, key=lambda row: stored[row * _ROW])
    return at if at < len(stored) and stored[at] == number else -1


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
        """Create the temporary file.

        Args:
            prompts: The requests.
            prepare: A function that makes the body of a request, by its number.
            stages: The number of stages of the load.
            linked: A later turn names the response before it by its id and sends only what is new.
            most_blocks: The number of blocks of the file that are kept in memory.
        """
        self._prompts, self._prepare, self._linked = prompts, prepare, linked
        self._input_source = ""
        self._answer_ids: dict[int, str] = {}
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._fd = self._file.fileno()
        self._end = 0
        self._blocks: dict[int, bytes] = {}  # of the file, by number
        self._most_blocks = most_blocks
        self._stored = [
            array("q") for _ in range(stages)
        ]  # rows of _ROW numbers, of ascending requests
        self._real_history = prompts.history == "server"
        self._replies: dict[
            int, dict[int, AssistantTurn]
        ] = {}  # conversation -> place of a turn -> its answer
        self.digest = Digest(replies=not self._real_history)
        self.sent_bytes = Digest()  # of the bodies themselves
        self.late = 0

    def build(
        self,
        stage: int,
        numbers: Iterator[int],
        *,
        most: int | None = None,
        cpu_s: float | None = None,
    ) -> int:
        """Build the bodies of requests and return how many were built.

        Args:
            stage: The stage that sends them.
            numbers: The numbers of the requests, in ascending order.
            most: The largest number of bodies to build.
            cpu_s: The CPU time after which no further batch is started.
        """
        built_before = self.ahead(stage)
        deadline = None if cpu_s is None else process_time() + cpu_s
        numbers = itertools.islice(numbers, most)
        with open(self._fd, "wb", BLOCK_BYTES, closefd=False) as file:
            while deadline is None or process_time() < deadline:
                batch = list(itertools.islice(numbers, REQUESTS_HASHED_TOGETHER))
                if not batch:
                    break
                file.write(self._build_batch(stage, batch))
        return self.ahead(stage) - built_before

    def _build_batch(self, stage: int, numbers: list[int]) -> bytes:
        """Return the bodies of requests, and record where each is in the file."""
        requests = list(zip(numbers, iter_requests(self._prompts, numbers), strict=True))
        bodies = list(itertools.starmap(self._prepare, requests))
        stored = self._stored[stage]
        for (number, request), body in zip(requests, bodies, strict=True):
            built = built_of(request)
            stored.extend((number, self._end, len(body), built.tokens, built.asked_output))
            self._input_source = built.source or self._input_source
            self._end += len(body)
        self.digest.add(requests)
        self.sent_bytes.add_sum(len(bodies), sum_of_hashes(zip(numbers, bodies, strict=True)))
        return b"".join(bodies)

    def ahead(self, stage: int) -> int:
        """How many bodies of a stage were built in advance, sent or not."""
        return len(self._stored[stage]) // _ROW

    def take(self, stage: int, number: int) -> tuple[bytes | memoryview, Built]:
        """The bytes to send for this request, and what is known of it without its answer."""
        if self._real_history and self._prompts.needs_replies(number):
            return self._with_replies(number)
        stored = self._stored[stage]
        if (at := _find(stored, number)) < 0:
            self.late += 1
            return self._build_now(number, self._prompts[number])
        _, offset, length, tokens, asked = stored[at : at + _ROW]
        built = Built(tokens, self._input_source, asked)
        of_file, at = divmod(offset, READ_BYTES)
        if length > MAPPED_BYTES:
            return self._map(offset, length), built
        if length > SHORT_BYTES or at + length > READ_BYTES:
            return os.pread(self._fd, length, offset), built
        block = self._blocks.get(of_file, b"")
        if at + length > len(block):  # not read yet, or before this part of it was written
            if len(self._blocks) >= self._most_blocks:
                del self._blocks[next(iter(self._blocks))]
            block = self._blocks[of_file] = os.pread(self._fd, READ_BYTES, of_file * READ_BYTES)
        return block[at : at + length], built

    def _map(self, offset: int, length: int) -> memoryview:
        """Return a part of the file without reading it. To copy a body of 2 MB would delay its request by 1 ms."""
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        end = offset + length
        mapping = mmap.mmap(self._fd, end - start, access=mmap.ACCESS_READ, offset=start)
        return memoryview(mapping)[offset - start :]

    def _build_now(self, number: int, request: Request) -> tuple[bytes, Built]:
        return self._prepare(number, request), built_of(request)

    def _with_replies(self, number: int) -> tuple[bytes, Built]:
        turns = self._prompts.turns
        conversation = number // turns
        request = self._prompts.with_replies(number, self._replies.get(conversation, {}))
        if (answer_id := self._answer_ids.get(conversation)) and request.messages:
            extra = request.extra | {"previous_response_id": answer_id}
            request = msgspec.structs.replace(request, messages=request.messages[-1:], extra=extra)
        return self._build_now(number, request)

    def built(self, stage: int, number: int) -> Built:
        """What is known of a request that is never sent."""
        stored = self._stored[stage]
        at = _find(stored, number)
        return UNKNOWN if at < 0 else Built(stored[at + 3], self._input_source, stored[at + 4])

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
