"""Build the request bodies of one worker before they are sent, in an unnamed temporary file.

A body is read back when it is sent, so the sending loop spends no time on building, and the bodies
use no memory. A body that could not be built in advance, as in a load without end or in a
conversation with the replies of the server, is built when it is needed and counted as late.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from time import process_time
from typing import Any, BinaryIO

import msgspec
from loadgen_sdk.hashing import sum_of_hashes
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.request import Completion, Request
from loadgen_sdk.wire_formats.request_body import BodyEncoder, BodyFormat

from loadgen.core.execution import step_targets
from loadgen.core.execution.plan import Endpoint, Job
from loadgen.core.execution.probing import client_options
from loadgen.core.requests.digest import REQUESTS_HASHED_TOGETHER, Digest
from loadgen.core.requests.prompts import AssistantTurn, Prompts
from loadgen.core.requests.synthetic_prompts import iter_requests
from loadgen.core.results.record import RequestFacts

EncodeBody = Callable[[int, Request], bytes]
"""Returns the body of a request; the first argument is the id of the request."""

_UNKNOWN_TOKENS = -1  # as the columns of records store an unknown number of tokens

UNKNOWN = RequestFacts(tokens=_UNKNOWN_TOKENS, source="", requested_output=_UNKNOWN_TOKENS)
"""The facts about a request that was never built."""

_WRITE_BUFFER_BYTES = 1 << 20
# Short bodies are read from the file in blocks, each of which holds many.
_BLOCK_BYTES = 32 << 10
_MAX_SHORT_BODY_BYTES = 4 << 10
# A longer body is mapped into memory when it is sent: copying a body of 2 MB takes 1 ms.
_MAX_COPIED_BODY_BYTES = 128 << 10
# The virtual users of a closed loop are at different positions of the file.
_MAX_BLOCKS = 64


def facts_of_request(request: Request) -> RequestFacts:
    """Return what is known of a request before its response, as records store it."""
    return RequestFacts(
        tokens=_UNKNOWN_TOKENS if request.input_tokens is None else request.input_tokens,
        source=request.input_source or "",
        requested_output=_UNKNOWN_TOKENS if request.max_tokens is None else request.max_tokens,
    )


def links_responses(job: Job) -> bool:
    """Return True if a later turn names the previous response by its id and sends only new text.

    The Responses API allows that: the server keeps the earlier messages of a conversation.
    """
    has_turns = getattr(job.workload.requests, "turns", None) is not None
    return job.settings.api == "responses" and has_turns


def body_encoder(job: Job, prompts: Prompts) -> EncodeBody:
    """Return a function that builds the body of a request: the bytes that the client sends.

    The body depends on the endpoint, because endpoints may have different APIs and models. In a
    run with tasks, each step of a task may have endpoints of its own. All endpoints of a step need
    the same body, so that of the first one is built.
    """
    encoders = [
        _endpoint_encoder(job, endpoint, result)
        for endpoint, result in zip(job.settings.endpoints, job.probe_results, strict=True)
    ]
    endpoint_indexes_of_request = step_targets.targets_by_request(job.settings, prompts)

    def encode_for_any_endpoint(_request_id: int, request: Request) -> bytes:
        return encoders[0].encode(request)

    if endpoint_indexes_of_request is None:
        return encode_for_any_endpoint

    def encode_for_step(request_id: int, request: Request) -> bytes:
        first_endpoint_index = endpoint_indexes_of_request(request_id)[0]
        return encoders[first_endpoint_index].encode(request)

    return encode_for_step


def _endpoint_encoder(job: Job, endpoint: Endpoint, result: ProbeResult) -> BodyEncoder:
    """Return the encoder of bodies for one endpoint, whose API and model the probe has found."""
    settings = job.settings.for_endpoint(endpoint)
    body_format = BodyFormat(
        result.server_profile,
        result.target.api,
        result.model,
        settings.stream,
        extra_body=client_options(settings, result)["extra_body"],
    )
    return BodyEncoder(body_format)


class _StoredBody(msgspec.Struct, frozen=True, gc=False):
    """The position of a body in the file, and what is known of its request."""

    request_id: int
    offset: int
    length: int
    input_tokens: int
    output_tokens: int


class _BodyIndex:
    """The stored bodies of one stage, in ascending order of their requests.

    A load may have millions of bodies. Their fields are therefore stored one after the other in a
    flat array of integers, which needs less memory than an object for each body: the fields of
    body 0, then those of body 1, and so on. Each body is a row of _FIELD_COUNT numbers, of which
    the first one is the id of its request.
    """

    _FIELD_COUNT = len(_StoredBody.__struct_fields__)

    def __init__(self) -> None:
        """Begin without bodies."""
        self._values = array("q")

    def __len__(self) -> int:
        return len(self._values) // self._FIELD_COUNT

    def append(self, body: _StoredBody) -> None:
        """Add a body, whose request has a higher id than those before it."""
        self._values.extend(msgspec.structs.astuple(body))

    def find(self, request_id: int) -> _StoredBody | None:
        """Return the body of a request, or None if it was not built in advance.

        The fields of all bodies are in one flat array, in rows of _FIELD_COUNT numbers, and the
        first number of a row is the id of the request. Ids are usually evenly spaced, such as 5, 8,
        11, so the row can be guessed from the first two ids: id 11 is in row
        (11 - 5) // (8 - 5) = 2. Only if that row has another id, a slower binary search follows.
        """
        values = self._values
        guessed_row = 0

        has_two_rows = len(values) > self._FIELD_COUNT
        if has_two_rows:
            first_id = values[0]
            id_step = values[self._FIELD_COUNT] - first_id
            guessed_row = (request_id - first_id) // id_step

        row_start = guessed_row * self._FIELD_COUNT
        is_guess_right = 0 <= row_start < len(values) and values[row_start] == request_id
        if not is_guess_right:
            row = self._search_row(request_id)
            if row is None:
                return None
            row_start = row * self._FIELD_COUNT

        return _StoredBody(*values[row_start : row_start + self._FIELD_COUNT])

    def _search_row(self, request_id: int) -> int | None:
        """Return the row of a request by a binary search, or None if there is none."""
        row = bisect_left(range(len(self)), request_id, key=self._request_id)
        has_row = row < len(self) and self._request_id(row) == request_id
        return row if has_row else None

    def _request_id(self, row: int) -> int:
        """Return the id of the request in a row."""
        return self._values[row * self._FIELD_COUNT]


class _BodyFile:
    """The temporary file with the bodies that were built in advance, one after the other.

    It has no name, so the system deletes it when it is closed.

    Attributes:
        size: The number of bytes of all bodies, of which the last ones may not be written yet.
    """

    def __init__(self, max_blocks: int) -> None:
        """Create an empty file.

        Args:
            max_blocks: The number of blocks of the file that are kept in memory.
        """
        self.size = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._fd = self._file.fileno()
        self._max_blocks = max_blocks
        self._block_by_number: dict[int, bytes] = {}

    def open_for_appending(self) -> BinaryIO:
        """Return a buffered writer, which must be closed before what it has written is read."""
        return open(self._fd, "wb", _WRITE_BUFFER_BYTES, closefd=False)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def read(self, offset: int, length: int) -> bytes | memoryview:
        """Return the `length` bytes of the body that begins at `offset`, as fast as possible.

        A very long body is mapped into memory, so that it is not copied. A short body is taken from
        a block: the file is divided into blocks of _BLOCK_BYTES, each of which has many short
        bodies and stays in memory after it was read. Any other body is read on its own.
        """
        if length > _MAX_COPIED_BODY_BYTES:
            return self._map(offset, length)

        block_number, start_in_block = divmod(offset, _BLOCK_BYTES)
        end_in_block = start_in_block + length
        is_in_one_block = end_in_block <= _BLOCK_BYTES
        if length > _MAX_SHORT_BODY_BYTES or not is_in_one_block:
            return os.pread(self._fd, length, offset)

        block = self._block_by_number.get(block_number, b"")

        # The last block may have been read before this body was written.
        is_body_missing = len(block) < end_in_block
        if is_body_missing:
            block = self._read_block(block_number)

        return block[start_in_block:end_in_block]

    def _read_block(self, block_number: int) -> bytes:
        """Read a block of the file and keep it in memory, in place of the oldest one."""
        if len(self._block_by_number) >= self._max_blocks:
            # A dictionary yields its keys in the order in which they were added.
            oldest_number = next(iter(self._block_by_number))
            del self._block_by_number[oldest_number]
        block = os.pread(self._fd, _BLOCK_BYTES, block_number * _BLOCK_BYTES)
        self._block_by_number[block_number] = block
        return block

    def _map(self, offset: int, length: int) -> memoryview:
        """Map a part of the file into memory without reading it.

        A map must start at a multiple of the page size, so it may begin before the part.
        """
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        end = offset + length
        mapping = mmap.mmap(self._fd, end - start, access=mmap.ACCESS_READ, offset=start)
        return memoryview(mapping)[offset - start :]


class Bodies:
    """The bodies of one worker.

    First `build` them in ascending order, stage by stage. Then call `take_body` (or
    `facts_of_unsent`) and `record_response` for each request.

    Attributes:
        digest: A hash of all requests, which does not depend on their order.
        body_digest: A hash of the bytes of all bodies, which does not depend on their order.
        late_bodies: How many bodies were built in the sending loop.
    """

    def __init__(
        self,
        prompts: Prompts,
        encode_body: EncodeBody,
        stages: int,
        *,
        links_responses: bool = False,
        max_blocks: int = _MAX_BLOCKS,
    ) -> None:
        """Begin without bodies, and create the temporary file that will hold them.

        Args:
            prompts: The requests, from which bodies are built.
            encode_body: Builds the body of a request.
            stages: The number of stages (phases) of the load, each of which has its own bodies.
            links_responses: Whether a later turn of a conversation names the previous response by
                its id and sends only the new message.
            max_blocks: The number of blocks of the file that are kept in memory.
        """
        self._prompts = prompts
        self._encode_body = encode_body
        self._links_responses = links_responses

        # Whether later turns of a conversation contain the replies of the server. Their bodies
        # cannot be built in advance.
        self._uses_real_replies = prompts.history == "server"

        self._file = _BodyFile(max_blocks)

        # Where each body is in the file.
        self._index_by_stage = [_BodyIndex() for _ in range(stages)]

        # How the tokens of prompts were counted, one of SOURCES. It is the same for all prompts.
        self._input_source = ""

        # For each conversation in progress: its replies by turn, and the id of the last response.
        self._replies: dict[int, dict[int, AssistantTurn]] = {}
        self._response_ids: dict[int, str] = {}

        self.digest = Digest(includes_replies=not self._uses_real_replies)
        self.body_digest = Digest()
        self.late_bodies = 0

    def build(
        self,
        stage: int,
        request_ids: Iterator[int],
        *,
        max_bodies: int | None = None,
        max_cpu_s: float | None = None,
    ) -> int:
        """Build bodies in advance, append them to the temporary file, and return their number.

        Args:
            stage: The stage that sends them.
            request_ids: The ids of the requests, in ascending order. Only the ids of the bodies
                that are built are taken from the iterator, so a later call continues with the rest.
            max_bodies: The largest number of bodies to build.
            max_cpu_s: The CPU time after which no further batch is started.
        """
        deadline_s = math.inf if max_cpu_s is None else process_time() + max_cpu_s
        limited_ids = itertools.islice(request_ids, max_bodies)

        built_count = 0
        with self._file.open_for_appending() as file:
            while process_time() < deadline_s:
                batch = list(itertools.islice(limited_ids, REQUESTS_HASHED_TOGETHER))
                if not batch:
                    break
                file.write(self._build_batch(stage, batch))
                built_count += len(batch)

        return built_count

    def built_count(self, stage: int) -> int:
        """Return how many bodies of a stage were built in advance, sent or not."""
        return len(self._index_by_stage[stage])

    def take_body(self, stage: int, request_id: int) -> tuple[bytes | memoryview, RequestFacts]:
        """Return the body of a request to send now, and the request's token counts for its record.

        The body is read from the temporary file if it was built in advance. A turn of a
        conversation that contains replies of the server can only be built now. Any other body that
        has to be built now counts as late, because that delays the sending loop.
        """
        if self._uses_real_replies and self._prompts.needs_replies(request_id):
            return self._build_with_replies(request_id)

        stored_body = self._index_by_stage[stage].find(request_id)
        if stored_body is None:
            self.late_bodies += 1
            return self._build_in_sending_loop(request_id, self._prompts[request_id])

        facts = RequestFacts(
            tokens=stored_body.input_tokens,
            source=self._input_source,
            requested_output=stored_body.output_tokens,
        )
        return self._file.read(stored_body.offset, stored_body.length), facts

    def facts_of_unsent(self, stage: int, request_id: int) -> RequestFacts:
        """Return what is known of a request that is never sent."""
        body = self._index_by_stage[stage].find(request_id)
        if body is None:
            return UNKNOWN
        return RequestFacts(body.input_tokens, self._input_source, body.output_tokens)

    def record_response(self, request_id: int, completion: Completion) -> None:
        """Keep the response to a request if later turns of its conversation have to send it.

        Requests are numbered by conversation: turn t of conversation c is request
        `c * turns + t`. A conversation ends with its last turn, or earlier with a turn that fails.
        Its replies are deleted then. If the load uses no replies of the server, nothing is kept.
        """
        if not self._uses_real_replies:
            return

        turns_per_conversation = self._prompts.turns
        conversation, turn = divmod(request_id, turns_per_conversation)
        is_last_turn = turn == turns_per_conversation - 1

        has_conversation_ended = is_last_turn or completion.failure is not None
        if has_conversation_ended:
            self._replies.pop(conversation, None)
            self._response_ids.pop(conversation, None)
            return

        if turn == 0:
            self._replies[conversation] = {}

        replies = self._replies.get(conversation)
        if replies is None:  # A parallel turn of the conversation has failed.
            return

        replies[turn] = AssistantTurn(completion.text or "", _tool_call_messages(completion))
        if self._links_responses and completion.response_id:
            self._response_ids[conversation] = completion.response_id

    def close(self) -> None:
        """Delete the temporary file."""
        self._file.close()

    def _build_batch(self, stage: int, request_ids: list[int]) -> bytes:
        """Build the bodies of requests, and return their bytes joined, in the order of the ids.

        The caller must append these bytes to the temporary file, because the index of the stage
        already gets the position that each body will have there. The hashes of all requests and of
        all bodies are updated.
        """
        requests = list(zip(request_ids, iter_requests(self._prompts, request_ids), strict=True))
        bodies = [self._encode_body(request_id, request) for request_id, request in requests]
        self.digest.add(requests)
        self.body_digest.add_sum(len(bodies), sum_of_hashes(zip(request_ids, bodies, strict=True)))
        self._add_to_index(stage, requests, bodies)
        return b"".join(bodies)

    def _add_to_index(
        self, stage: int, requests: Sequence[tuple[int, Request]], bodies: Sequence[bytes]
    ) -> None:
        """Add the next bodies of the file to the index of a stage.

        Args:
            stage: The index of the stage.
            requests: The id and the request of each body.
            bodies: The bodies, in the order in which they are appended to the file.
        """
        index = self._index_by_stage[stage]
        for (request_id, request), body in zip(requests, bodies, strict=True):
            facts = facts_of_request(request)
            stored_body = _StoredBody(
                request_id=request_id,
                offset=self._file.size,
                length=len(body),
                input_tokens=facts.tokens,
                output_tokens=facts.requested_output,
            )
            index.append(stored_body)
            self._file.size += len(body)

            # The source of the input token count is stored once, as all requests have the same.
            if facts.source:
                self._input_source = facts.source

    def _build_in_sending_loop(
        self, request_id: int, request: Request
    ) -> tuple[bytes, RequestFacts]:
        """Build the body of a request when it is sent. See `take_body` for the result."""
        return self._encode_body(request_id, request), facts_of_request(request)

    def _build_with_replies(self, request_id: int) -> tuple[bytes, RequestFacts]:
        """Build the body of a later turn of a conversation, with the replies that the server gave.

        The body contains the whole conversation so far. If responses are linked (an option of the
        Responses API), it contains only the new message and the id of the last response, from
        which the server knows the rest.
        """
        # A conversation has `turns` successive ids: with 3 turns, conversation 1 has 3, 4 and 5.
        conversation = request_id // self._prompts.turns
        request = self._prompts.with_replies(request_id, self._replies.get(conversation, {}))
        last_response_id = self._response_ids.get(conversation)
        if last_response_id and request.messages:
            extra = request.extra | {"previous_response_id": last_response_id}
            request = msgspec.structs.replace(request, messages=request.messages[-1:], extra=extra)
        return self._build_in_sending_loop(request_id, request)


def _tool_call_messages(completion: Completion) -> tuple[dict[str, Any], ...]:
    """Return the tool calls of a response as later requests send them."""
    return tuple(
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in completion.tool_calls
    )
