"""Reference implementation, in Python, of the state of a response that `_compiled.c` keeps in C.

`ResponseState` and `ExchangeState` are the base classes of `http1.Response` and
`exchange.Exchange`. The tests compare the compiled versions with these, and `implementation.py`
chooses between them. This module must not import that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

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
        data: The bytes that were read.
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


class EventBatch(NamedTuple):
    """Several plain events that came in one read.

    `uncertainty` is by how many ns all events but the last may have arrived before the timestamp.
    It is None if the events came in one chunk, which is one write of the server.
    """

    timestamp: int
    events: int
    uncertainty: int | None


class PlainRun(NamedTuple):
    """Consecutive reads that held nothing but plain events (see `plain_events.py`).

    Attributes:
        arrivals: A timestamp for each event that came alone, and an `EventBatch` for several events
            that came in one read.
        size_bytes: The number of bytes of these reads.
        read_at: When the process made the last of them.
    """

    arrivals: list[int | EventBatch]
    size_bytes: int
    read_at: int


def is_plain_run(read: Read | PlainRun) -> TypeGuard[PlainRun]:
    """Return True for a PlainRun, which has 3 fields, and False for a Read, which has 5.

    The compiled receiver makes plain tuples of both, so their types do not tell them apart.
    """
    return len(read) == len(PlainRun._fields)


class ResponseState:
    """The fields of a reader of one HTTP/1.1 response (see `http1.Response`).

    Attributes:
        status: The status code, or 0 until the head is complete.
        headers: The headers, with names in lower case.
        is_complete: The body has ended by its framing.
        is_reusable: Once the response is complete, the connection can carry another request.
        surplus: Bytes after the end.
        is_chunked: The body comes in chunks.
        ends_with_connection: The body ends with the connection.
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
        "ends_with_connection",
        "headers",
        "idle_limit_s",
        "is_chunked",
        "is_complete",
        "is_reusable",
        "status",
        "surplus",
        "uses_left",
    )

    def __init__(self) -> None:
        """Start before the first byte of a response, so that the next bytes are its head."""
        # What the head says. `_mode` and `_bytes_left` describe the framing of the body.
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_chunked = False
        self.ends_with_connection = False
        self._mode = "head"
        self._bytes_left = 0

        # How far the response has come.
        self.is_complete = False
        self.surplus = b""
        self._unparsed = b""

        # Whether the connection can carry another request, and the limits of a Keep-Alive header.
        self.is_reusable = True
        self.uses_left: int | None = None
        self.idle_limit_s: float | None = None


class ExchangeState:
    """The fields of a request and its response (see `exchange.Exchange`).

    All times are monotonic, in ns. A time that has not come yet is NEVER (-1).

    The arguments of the constructor are fields too. `Exchange` owns the fields of the response. The
    pool owns those of the connection and of sending: it sets them when it connects, sends, cancels
    and reports.

    Attributes of sending, set by the pool:
        connection: The connection that carries the request, or None.
        connect_attempts: How many addresses of the server were tried for the request.
        resend_count: How many times the request was sent again, because the server had closed the
            idle connection.
        is_connection_reused: The connection has carried a response before.
        ready_at: When the connection was ready for the request.
        tcp_connect_ns: How long TCP took to connect, or NEVER on a connection that was used before.
        tls_handshake_ns: How long the TLS handshake took, or NEVER on such a connection.
        sent_at: When the first byte was written.
        bytes_sent: The number of bytes of the request that were written.
        deadline: When the request times out, or 0 before the pool has set it.

    Attributes of the end:
        done_at: When the response ended.
        failure: Why the request failed, or None.
        is_reported: The completion was passed to `on_done`.

    Attributes of the response:
        response: The parser of the HTTP response.
        decoder: The decoder of its server-sent events.
        reader: Reads what the events say.
        is_event_stream: The response is a stream of events.
        bytes_received: The number of bytes of the response so far.
        response_body_parts: The body so far, if it is not a stream of events.
        response_body_bytes: The number of bytes of that body.
        head_received_at: When the head of the response was complete.
        has_kernel_timestamp: The kernel made the timestamp `head_received_at`.
        last_event_read_at: When the last read with events was made, or 0 before the first event.
        client_lag: How long after its arrival the first output was read, in ns, or 0 before it.

    Attributes of the next read:
        can_batch_reads: No event is urgent, so reads may be kept for a while, and plain events be
            counted without being passed on (see `SocketBuffer`).
        template: The bytes before and after the text of a plain event (see `plain_events.py`) if
            the next byte may begin such an event, else None.
        is_at_chunk_start: The next byte is the first one of a chunk and of an event.
        incomplete_chunk: The first bytes of a chunk that has not ended yet. They hold no complete
            event and were not decoded.
        has_split_chunks: The server writes a chunk in parts, and may send a part only after the one
            before was acknowledged, which a read does.
    """

    __slots__ = (
        "body",
        "bytes_received",
        "bytes_sent",
        "can_batch_reads",
        "client_lag",
        "connect_attempts",
        "connection",
        "deadline",
        "decoder",
        "done_at",
        "due_at",
        "failure",
        "has_kernel_timestamp",
        "has_split_chunks",
        "head",
        "head_received_at",
        "incomplete_chunk",
        "is_at_chunk_start",
        "is_connection_reused",
        "is_event_stream",
        "is_reported",
        "is_stream_requested",
        "keep_headers",
        "keep_text",
        "last_event_read_at",
        "on_done",
        "on_first_output",
        "on_output",
        "reader",
        "ready_at",
        "request",
        "requested_output_tokens",
        "resend_count",
        "response",
        "response_body_bytes",
        "response_body_parts",
        "sent_at",
        "tcp_connect_ns",
        "template",
        "timeline",
        "tls_handshake_ns",
    )

    response_class: type[ResponseParser]
    decoder_class: type[SseDecoder]
    reader_class: type[ResponseReader]

    def __init__(  # noqa: PLR0913 - one argument for each property of a request
        self,
        request: Request | None,
        head: bytes,
        body: bytes | memoryview,
        due_at: int,
        on_done: OnDone,
        timeline: EventTimeline,
        *,
        is_stream_requested: bool,
        requested_output_tokens: int = 0,
        keep_text: bool = False,
        keep_headers: bool = False,
        on_output: Callable[[str, str, int], None] | None = None,
        on_first_output: Callable[[int], None] | None = None,
    ) -> None:
        """Start an exchange whose request was not sent yet.

        Args:
            request: The request as the caller described it, for the completion.
            head: The head of the HTTP request.
            body: Its body.
            due_at: The planned start of the request.
            on_done: A function called with the completion.
            timeline: The event timeline that gets the time of each output event.
            is_stream_requested: The body asks for the response as an event stream.
            requested_output_tokens: The number of output tokens that the body requests, or 0 if
                unknown.
            keep_text: Keep the text of the response for the completion.
            keep_headers: Keep the headers of the response for the completion.
            on_output: A function called with (text, reasoning, timestamp) for each output event.
            on_first_output: A function called with the time of the first output, before anything
                later is processed.
        """
        # What is sent, and what the caller wants to know of the response.
        self.request = request
        self.head = head
        self.body = body
        self.due_at = due_at
        self.is_stream_requested = is_stream_requested
        self.requested_output_tokens = requested_output_tokens
        self.keep_text = keep_text
        self.keep_headers = keep_headers
        self.timeline = timeline
        self.on_output = on_output
        self.on_first_output = on_first_output
        self.on_done = on_done

        # Connecting and sending, which the pool records.
        self.connection: object | None = None
        self.connect_attempts = 0
        self.resend_count = 0
        self.is_connection_reused = False
        self.ready_at = NEVER
        self.tcp_connect_ns = NEVER
        self.tls_handshake_ns = NEVER
        self.bytes_sent = 0
        self.bytes_received = 0
        self.deadline = 0

        # The end of the exchange.
        self.done_at = NEVER
        self.failure: Failure | None = None
        self.is_reported = False

        self.reset_response()

    def reset_response(self) -> None:
        """Start with an empty response, before the request is sent or sent again.

        The class docstring describes each field.
        """
        self.sent_at = NEVER

        # The three parsers of the response: of HTTP, of the stream of events in the body, and of
        # the JSON of each event.
        self.response = self.response_class()
        self.decoder = self.decoder_class()

        # From a long response the third one, the reader, learns the bytes around the text of an
        # event (the template), by which it recognises later events without decoding them. That
        # does not pay off if only a few output tokens are requested.
        is_length_known = self.requested_output_tokens > 0
        expects_few_events = is_length_known and self.requested_output_tokens <= LAST_EVENTS
        self.reader = self.reader_class(
            self.timeline, self.keep_text, self.on_output, expects_few_events=expects_few_events
        )

        # The head of the response, and a body that is not a stream of events.
        self.head_received_at = NEVER
        self.has_kernel_timestamp = False
        self.is_event_stream = False
        self.response_body_parts: list[bytes] = []
        self.response_body_bytes = 0

        # How soon the process has read what arrived, in ns.
        self.last_event_read_at = 0
        self.client_lag = 0

        # Whether the next read may wait, and where in a chunk of the body it begins.
        self.can_batch_reads = False
        self.template: tuple[bytes, bytes] | None = None
        self.is_at_chunk_start = False
        self.incomplete_chunk = b""  # the first bytes of a chunk whose rest has not arrived
        self.has_split_chunks = False  # becomes true when the server sends a chunk in parts

    def feed_reads(self, reads: Sequence[Read | PlainRun]) -> bool:
        """Process reads in their order. Return True when the response is over.

        A `PlainRun` among them stands for consecutive reads that held nothing but plain events,
        which never end a response. Bytes after the end of the response make the connection
        unusable for another request.
        """
        for index, read in enumerate(reads):
            if is_plain_run(read):
                self._feed_plain_run(*read)
                continue

            is_over = self._feed_read(*read)
            if is_over:
                has_bytes_after_end = index + 1 < len(reads)
                if has_bytes_after_end:
                    self.response.is_reusable = False
                return True

        update_read_urgency(self)
        return False

    def _feed_read(
        self, data: bytes, timestamp: int, read_at: int, empty_at: int, from_kernel: bool
    ) -> bool:
        """Process one read, given by its fields. Return True when the response is over."""
        raise NotImplementedError

    def _feed_plain_run(
        self, arrivals: list[int | EventBatch], size_bytes: int, read_at: int
    ) -> None:
        """Process consecutive reads of plain events, given by the fields of their `PlainRun`."""
        raise NotImplementedError


def update_read_urgency(exchange: ExchangeState) -> None:
    """Note how the receiver may treat the next reads of a response that goes on.

    Three fields of the exchange are updated:

    - `can_batch_reads`: Nothing waits for single events after the first output, so the receiver may
      collect reads before it passes them on. An application with `on_output` wants each event at
      once.
    - `template`: The receiver may count events that differ from an earlier one in their text alone,
      if the next byte begins a chunk.
    - `has_split_chunks`: This server writes a chunk in several parts. It becomes true when a read
      ends within a chunk after the first output, and stays true until the end of the response.
    """
    has_first_output = exchange.reader.first_token != NEVER
    is_chunked_stream = exchange.is_event_stream and exchange.response.is_chunked
    exchange.can_batch_reads = is_chunked_stream and has_first_output and exchange.on_output is None
    exchange.template = exchange.reader.template if exchange.is_at_chunk_start else None
    is_within_chunk = not exchange.is_at_chunk_start
    if exchange.can_batch_reads and is_within_chunk:
        exchange.has_split_chunks = True
