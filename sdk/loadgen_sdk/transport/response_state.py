"""Reference implementation, in Python, of the state of a response that `_compiled.c` keeps in C.

`ResponseState` and `ExchangeState` are the base classes of `http1.Response` and
`exchange.Exchange`. The tests compare the compiled versions with these, and `implementation.py`
chooses between them. This module must not import that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..request import NEVER, Completion, Failure, Request

if TYPE_CHECKING:
    from ..wire_formats.event_timeline import EventTimeline
    from ..wire_formats.response_reader import ResponseReader
    from ..wire_formats.sse import SseDecoder
    from .http1 import ResponseParser

LAST_EVENTS = 4
"""This many events before the expected end, a response becomes urgent again, because the next
request waits for it."""

OnDone = Callable[[Completion], None]


class Read(NamedTuple):
    """One read of a socket. All times are monotonic, in ns.

    The data arrived between `empty_at` and `timestamp`. The compiled receiver makes plain tuples of
    the same items, so users of a read unpack it.

    Attributes:
        data: What was read.
        timestamp: When the newest packet arrived, or `read_at` if the kernel made no timestamp.
        read_at: When the process had read the data.
        empty_at: The last time at which the socket was known to be empty.
        from_kernel: The kernel made the timestamp.
    """

    data: bytes
    timestamp: int
    read_at: int
    empty_at: int
    from_kernel: bool


class Bundle(NamedTuple):
    """A read of several plain events.

    `uncertainty` is by how many ns all events but the last may have arrived before the timestamp.
    It is None if the events came in one chunk, which is one write of the server.
    """

    timestamp: int
    events: int
    uncertainty: int | None


class Run(NamedTuple):
    """Consecutive reads of plain events only (see `plain_events.py`).

    Attributes:
        arrivals: A timestamp for each event that came alone, and a Bundle for several events that
            came in one read.
        size_bytes: The number of bytes of these reads.
        read_at: When the process made the last of them.
    """

    arrivals: list[int | Bundle]
    size_bytes: int
    read_at: int


FIELDS_OF_RUN = len(Run._fields)
"""Distinguishes a Run (3 fields) from a Read (5 fields). The compiled receiver makes plain tuples
of both, so their types are the same."""


class ResponseState:
    """The fields of a reader of one HTTP/1.1 response (see `http1.Response`).

    Attributes:
        status: The status code, or 0 until the head is complete.
        headers: The headers, with names in lower case.
        complete: The body has ended by its framing.
        reusable: Once the response is complete, the connection can carry another request.
        surplus: Bytes after the end.
        chunked: The body comes in chunks.
        until_close: The body ends with the connection.
        uses_left: The value of `max` in the Keep-Alive header, or None without it.
        idle_limit_s: The value of `timeout` in the Keep-Alive header, or None without it.
        _unparsed: Bytes that cannot be parsed before more arrive, such as a part of the head.
        _mode: What the next bytes are: "head", "chunked", "length" or "close" (a body, see
            `http1.ResponseHead`), "trailer" (lines after the last chunk) or "end" (surplus).
        _bytes_left: How many bytes of the body, or of its current chunk, are still to come.
    """

    __slots__ = (
        "_bytes_left",
        "_mode",
        "_unparsed",
        "chunked",
        "complete",
        "headers",
        "idle_limit_s",
        "reusable",
        "status",
        "surplus",
        "until_close",
        "uses_left",
    )

    def __init__(self) -> None:
        """Start with the head of a response, of which nothing has arrived yet."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.reusable = True
        self.surplus = b""
        self.chunked = False
        self.until_close = False
        self.uses_left: int | None = None
        self.idle_limit_s: float | None = None
        self._unparsed = b""
        self._mode = "head"
        self._bytes_left = 0


class ExchangeState:
    """The fields of a request and its response (see `exchange.Exchange`).

    The arguments of the constructor are fields too. All times are monotonic, in ns. One that has
    not come yet is NEVER, unless 0 is stated here.

    Attributes:
        connection: The connection that carries the request, or None.
        ready: When the connection was ready for the request.
        tcp: How long TCP took to connect, or NEVER on a connection that was used before.
        tls: How long the TLS handshake took, or NEVER as well.
        sent: When the first byte was written.
        first_byte: When the head of the response was complete.
        progress: When the last read with events was made, or 0 before.
        done: When the response ended.
        deadline: When the request times out.
        client_lag: How long after its arrival the first output was read.
        kernel_stamp: The kernel made the timestamp of the head.
        failure: Why the request failed, or None.
        is_reported: The completion was reported.
        tries: How many addresses were tried.
        resent: How many times the request was sent again, because an idle connection had ended.
        reused: The connection has carried a response before.
        bytes_sent: The number of bytes of the request that were written.
        bytes_received: The number of bytes of the response so far.
        is_event_stream: The response is a stream of events.
        response: The parser of the response.
        decoder: The decoder of its events.
        reader: Reads what the events say.
        body_parts: The body so far, if it is not a stream of events.
        body_bytes: The number of bytes of that body.
        template: The bytes before and after the text of a plain event (see `plain_events.py`) if
            the next byte may begin such an event, else None.
        may_batch: Reads may be kept for a while, and plain events counted (see `SocketBuffer`).
        at_chunk_start: The next byte is the first one of a chunk and of an event.
        incomplete_chunk: The first bytes of a chunk that has not ended yet. They hold no complete
            event and were not decoded.
        splits_chunks: The server writes a chunk in parts, and may send a part only after the one
            before was acknowledged, which a read does.
    """

    __slots__ = (
        "at_chunk_start",
        "body_bytes",
        "body_parts",
        "bytes_received",
        "bytes_sent",
        "client_lag",
        "connection",
        "deadline",
        "decoder",
        "done",
        "due",
        "failure",
        "first_byte",
        "head",
        "incomplete_chunk",
        "is_event_stream",
        "is_reported",
        "keep_headers",
        "keep_text",
        "kernel_stamp",
        "may_batch",
        "on_done",
        "on_first",
        "payload",
        "progress",
        "reader",
        "ready",
        "request",
        "requested_output",
        "resent",
        "response",
        "reused",
        "sent",
        "sink",
        "splits_chunks",
        "stream",
        "tcp",
        "template",
        "timeline",
        "tls",
        "tries",
    )

    response_class: type[ResponseParser]
    decoder_class: type[SseDecoder]
    reader_class: type[ResponseReader]

    def __init__(  # noqa: PLR0913 - one argument for each property of a request
        self,
        request: Request | None,
        head: bytes,
        payload: bytes | memoryview,
        due: int,
        on_done: OnDone,
        timeline: EventTimeline,
        *,
        stream: bool,
        requested_output: int = 0,
        keep_text: bool = False,
        keep_headers: bool = False,
        sink: Callable[[str, str, int], None] | None = None,
        on_first: Callable[[int], None] | None = None,
    ) -> None:
        """Prepare a request that was not sent yet.

        Args:
            request: The request, for the completion.
            head: The head of the HTTP request.
            payload: Its body.
            due: The planned start of the request.
            on_done: A function called with the completion.
            timeline: The event timeline that gets the time of each output event.
            stream: The response is requested as an event stream.
            requested_output: The number of output tokens that the body requests, 0 if unknown.
            keep_text: Keep the text of the response.
            keep_headers: Keep its headers.
            sink: A function called with (text, reasoning, timestamp) for each output event.
            on_first: A function called with the time of the first output, before anything later
                is processed.
        """
        self.request = request
        self.requested_output = requested_output
        self.head = head
        self.payload = payload
        self.due = due
        self.on_done = on_done
        self.timeline = timeline
        self.stream = stream
        self.keep_text = keep_text
        self.keep_headers = keep_headers
        self.sink = sink
        self.on_first = on_first
        self.connection: object | None = None
        self.is_reported = False
        self.done = NEVER
        self.failure: Failure | None = None
        self.resent = 0
        self.tries = 0
        self.ready = NEVER
        self.tcp = NEVER
        self.tls = NEVER
        self.deadline = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.reused = False
        self.reset_response()

    def reset_response(self) -> None:
        """Reset what is known of the response, before the request is sent or sent again.

        A response of which few tokens were requested has few events, so that its reader does not
        learn a template of plain events. That would cost more than it saves.
        """
        self.sent = NEVER
        self.first_byte = NEVER
        self.client_lag = 0
        self.kernel_stamp = False
        self.progress = 0
        self.may_batch = False
        self.template: tuple[bytes, bytes] | None = None
        self.at_chunk_start = False
        self.incomplete_chunk = b""
        self.splits_chunks = False
        self.is_event_stream = False
        self.response = self.response_class()
        self.decoder = self.decoder_class()
        expects_few_events = 0 < self.requested_output <= LAST_EVENTS
        self.reader = self.reader_class(
            self.timeline, self.keep_text, self.sink, expects_few_events=expects_few_events
        )
        self.body_parts: list[bytes] = []
        self.body_bytes = 0

    def feed_reads(self, reads: Sequence[Read | Run]) -> bool:
        """Process reads in their order. Return True when the response is over.

        While it goes on, update how the receiver may treat the next reads: `may_batch`, `template`
        and `splits_chunks`. Reads may be batched after the first output, since nothing waits for
        the rest, unless a `sink` wants every event at once. The reads end within a chunk only if
        the server writes chunks in parts.
        """
        for index, read in enumerate(reads):
            if len(read) == FIELDS_OF_RUN:
                self._feed_run(*read)
            elif self._feed_read(*read):
                has_bytes_after_end = index + 1 < len(reads)
                if has_bytes_after_end:
                    self.response.reusable = False
                return True
        has_first_output = self.reader.first_token != NEVER
        is_chunked_stream = self.is_event_stream and self.response.chunked
        self.may_batch = is_chunked_stream and has_first_output and self.sink is None
        self.template = self.reader.template if self.at_chunk_start else None
        if self.may_batch and not self.at_chunk_start:
            self.splits_chunks = True
        return False

    def _feed_read(
        self, data: bytes, timestamp: int, read_at: int, empty_at: int, from_kernel: bool
    ) -> bool:
        """Process one read, given by its fields. Return True when the response is over."""
        raise NotImplementedError

    def _feed_run(self, arrivals: list[int | Bundle], size_bytes: int, read_at: int) -> None:
        """Process consecutive reads of plain events, given by the fields of their `Run`."""
        raise NotImplementedError
