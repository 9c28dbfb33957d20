"""The process that builds request bodies for a worker while the worker sends.

The process reads request ids from standard input, each as 8 bytes, and writes one frame per
body to standard output: a header (see `FRAME`) and the body. It ends when its input ends.
"""

from __future__ import annotations

import os
import pickle
import struct

from loadgen.core.execution.bodies import EncodeBody, body_encoder, facts_of_request
from loadgen.core.execution.plan import build_plan
from loadgen.core.requests.prompts import Prompts
from loadgen.core.requests.synthetic_prompts import iter_requests
from loadgen.core.results.record import SOURCES, RequestFacts

FRAME = struct.Struct("<qiiiB")
"""Header of a frame: request id, bytes of the body, input tokens, requested output tokens, and
the index of the source of the input tokens in SOURCES."""

REQUEST_ID = struct.Struct("<q")
JOB_SIZE_BYTES = 8
"""A process that is not a fork reads its pickled job first, after the size of the pickle."""

_STDIN_FD = 0
_STDOUT_FD = 1
_READ_BYTES = 1 << 20
_NICENESS = 5


def serve_bodies(prompts: Prompts, encode_body: EncodeBody) -> None:
    """Build the bodies of the request ids on standard input, until the input ends.

    An id is 8 bytes long. For each one, a header (see FRAME) and the body are written to standard
    output.

    Args:
        prompts: The requests.
        encode_body: Builds the body of a request.
    """
    # A lower priority than that of the process that sends the requests.
    os.nice(_NICENESS)
    received = bytearray()
    while data := os.read(_STDIN_FD, _READ_BYTES):
        received += data
        request_ids = _take_complete_ids(received)
        requests = iter_requests(prompts, request_ids)
        for request_id, request in zip(request_ids, requests, strict=True):
            body = encode_body(request_id, request)
            _write_all(_pack_frame(request_id, body, facts_of_request(request)))


def _take_complete_ids(received: bytearray) -> list[int]:
    """Remove all complete request ids from the start of the received bytes, and return them.

    With ids of 8 bytes, 20 bytes are two ids and 4 bytes of the next one, which stay.
    """
    complete_length = len(received) - len(received) % REQUEST_ID.size
    complete_bytes = received[:complete_length]
    del received[:complete_length]
    return [request_id for (request_id,) in REQUEST_ID.iter_unpack(complete_bytes)]


def _pack_frame(request_id: int, body: bytes, facts: RequestFacts) -> bytes:
    """Return the header of a body and the body."""
    source_index = SOURCES.index(facts.source)
    header = FRAME.pack(request_id, len(body), facts.tokens, facts.requested_output, source_index)
    return header + body


def _run_builder() -> None:
    """Read a job from standard input and build its bodies."""
    job_size = int.from_bytes(_read_exactly(JOB_SIZE_BYTES), "little")
    job = pickle.loads(_read_exactly(job_size))
    prompts = build_plan(job).requests
    serve_bodies(prompts, body_encoder(job, prompts))


def _read_exactly(size: int) -> bytes:
    """Return the next `size` bytes of standard input, or end the process if there are fewer."""
    data = b""
    while len(data) < size:
        chunk = os.read(_STDIN_FD, size - len(data))
        if not chunk:
            raise SystemExit(0)
        data += chunk
    return data


def _write_all(data: bytes) -> None:
    """Write data to standard output, or end the process if nobody reads it."""
    unwritten = memoryview(data)
    while unwritten:
        try:
            written_bytes = os.write(_STDOUT_FD, unwritten)
        except BrokenPipeError:
            os._exit(0)
        unwritten = unwritten[written_bytes:]


if __name__ == "__main__":
    _run_builder()
