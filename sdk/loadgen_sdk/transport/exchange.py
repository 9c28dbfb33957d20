"""One HTTP request and its response, without I/O.

An `Exchange` takes the reads of a response with their timestamps and makes a `Completion`. This
module uses no socket and no clock.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..compiled import module as _compiled
from ..request import NEVER, Completion, Failure
from ..wire_formats.event_fields import ERROR_TEXT_CHARS, UsageFields, error_text
from ..wire_formats.event_timeline import EventOrCount, count_events, split_last_event
from ..wire_formats.response_reader import ENDINGS, NOT_STREAMED, UNKNOWN_OUTPUTS, ResponseReader
from ..wire_formats.server_timing import HEADER
from ..wire_formats.sse import EventTooLargeError, SseDecoder
from .chunk_size import CHUNK_SIZES, MalformedResponseError, parse_chunk_size
from .http1 import PARSED_HEADS, ResponseParser
from .implementation import ExchangeState, parse_whole_chunks
from .response_state import LAST_EVENTS, EventBatch

EVENT_STREAM = "text/event-stream"

MAX_WHOLE_BYTES = 64 << 20
"""The largest response that is not a stream. It is kept until it is complete."""

MAX_ERROR_BYTES = 64 << 10
"""How much of the body of an error response is kept."""

MAX_INCOMPLETE_CHUNK_BYTES = 4096
"""The first bytes of a chunk are kept undecoded until the rest arrives, unless they are as many."""

NO_TEMPLATE = (b"", b"")
"""Stands for the template of plain events before one is known. The Python implementation then
recognises no events, and the compiled one only those that it can decode."""

MANY_EVENTS = 1 << 40
"""Stands for the number of events of a response whose length was not requested."""

_ENCODING_CHARS = 40
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib detects which of both it is


class DecodedRead(NamedTuple):
    """What a read of a response holds.

    Attributes:
        chunks: The number of chunks of the body, of which the first and last may be incomplete.
        events: The events. A number stands for that many plain events (see `plain_events.py`).
    """

    chunks: int
    events: Sequence[EventOrCount]


class Exchange(ExchangeState):
    """One request and its response, from sending to the completion.

    The pool sets `ready`, `sent` and `bytes_sent`, calls `feed_reads` with the reads and
    `end_with_connection` if the connection ends, and then calls `report_completion` once. All times
    are monotonic, in ns.
    """

    __slots__ = ()
    response_class = ResponseParser
    decoder_class = SseDecoder
    reader_class = ResponseReader

    @property
    def events_until_urgent(self) -> int:
        """The number of further events of which none need be read at once.

        The receiver reads a socket late while this is above 0 (see `receiver.py`). It is 0 before
        the first output, while no template for plain events is known, and if the server writes
        chunks in parts (see `has_split_chunks`). Otherwise it is the rest of the requested output
        without the last LAST_EVENTS, because the next request may wait for the end of the response.
        """
        if not self.can_batch_reads or self.template is None or self.has_split_chunks:
            return 0
        if self.requested_output_tokens <= 0:
            return MANY_EVENTS - LAST_EVENTS
        return self.requested_output_tokens - self.reader.output_events - LAST_EVENTS

    # -- reads ---------------------------------------------------------------------------------

    def _feed_plain_run(
        self, arrivals: list[int | EventBatch], size_bytes: int, read_at: int
    ) -> None:
        """Count the plain events of consecutive reads, which the receiver has not kept.

        A plain event differs from an earlier one in its text alone. Events that came alone are
        counted together up to the next batch, which saves a call per event. Of the events in a
        batch, only the last has an exact timestamp, unless all came in one write of the server
        (its `uncertainty` is None).

        Args:
            arrivals: A timestamp for each event that came alone, and an EventBatch for several
                events that came in one read.
            size_bytes: The number of bytes of the reads.
            read_at: When the last of them was made.
        """
        self.bytes_received += size_bytes
        single_timestamps: list[int] = []  # of consecutive events that came alone
        for arrival in arrivals:
            if isinstance(arrival, int):
                single_timestamps.append(arrival)
                continue
            if single_timestamps:
                self.reader.count_plain_events_at(single_timestamps)
                single_timestamps = []
            timestamp, events, uncertainty = arrival
            if uncertainty is None:
                self.reader.count_plain_events(events, timestamp)
            else:
                # In these lists, a number stands for that many plain events.
                self.reader.feed_with_uncertainty(
                    uncertain=[events - 1],
                    certain=[1],
                    timestamp=timestamp,
                    uncertainty=uncertainty,
                )
        if single_timestamps:
            self.reader.count_plain_events_at(single_timestamps)
        self.last_event_read_at = read_at

    def _feed_read(
        self, data: bytes, timestamp: int, read_at: int, empty_at: int, from_kernel: bool
    ) -> bool:
        """Process one read. Return True when the response is over.

        Args:
            data: The bytes.
            timestamp: When the newest packet of the data arrived.
            read_at: When the process had read the data, which is `timestamp` or later.
            empty_at: When the socket was last known to be empty. No byte has arrived before.
            from_kernel: The kernel made the timestamp.
        """
        self.bytes_received += len(data)
        try:
            decoded = self._decode_read(data, timestamp, from_kernel)
        except (MalformedResponseError, EventTooLargeError) as error:
            self._finish(timestamp, Failure("malformed", str(error), self.response.status))
            return True
        if decoded.events:
            self._feed_events(decoded, timestamp, read_at, empty_at)
            self.last_event_read_at = read_at
        if not self.response.is_complete:
            return False
        self._finish_response(timestamp, read_at)
        return True

    def _feed_events(
        self, decoded: DecodedRead, timestamp: int, read_at: int, empty_at: int
    ) -> None:
        """Pass the events of a read to the reader, with the uncertainty of their timestamp.

        After the first output, a read that is one write of the server is exact. Before it, the
        uncertainty is always passed on, because it is a part of the measured time to first token.

        Args:
            decoded: The events of the read.
            timestamp: When the newest packet of the read arrived.
            read_at: When the process had read it.
            empty_at: When the socket was last known to be empty.
        """
        reader = self.reader
        if reader.first_token == NEVER:
            self._feed_before_first_output(decoded, timestamp, read_at, empty_at)
            return
        chunks, events = decoded
        # Without chunks, the data of a read may be several writes, unless it is a single event.
        is_one_write = chunks == 1 and (self.response.is_chunked or count_events(events) == 1)
        if is_one_write:
            reader.feed(events, timestamp)
        else:
            self._feed_with_uncertainty(decoded, timestamp, earliest=empty_at)

    def _feed_before_first_output(
        self, decoded: DecodedRead, timestamp: int, read_at: int, empty_at: int
    ) -> None:
        """Pass on the events of a read that may have the first output. Call `on_first_output` then.

        The arguments are those of `_feed_events`. `client_lag` becomes the delay between the
        arrival of the first output and its reading. If it is long, this process was too busy to
        measure.
        """
        # The response cannot have begun before the request was sent.
        self._feed_with_uncertainty(decoded, timestamp, earliest=max(empty_at, self.sent_at))
        has_first_output = self.reader.first_token != NEVER
        if not has_first_output:
            return
        self.client_lag = read_at - timestamp
        if self.on_first_output is not None:
            self.on_first_output(self.reader.first_token)

    def _feed_with_uncertainty(self, decoded: DecodedRead, timestamp: int, earliest: int) -> None:
        """Pass on the events of a read, those that may have arrived before its timestamp apart.

        The timestamp is that of the newest packet in the read. Which events came with it?

        1. Bytes of a further event follow: none is certain to, because the newest packet may hold
           only those bytes.
        2. The read is a single chunk: all of them, because a chunk is taken as one write.
        3. Otherwise, with several chunks or in a body without chunks: only the last event.

        Args:
            decoded: The events of the read.
            timestamp: When the newest packet of the read arrived.
            earliest: No event can have arrived before this time.
        """
        chunks, events = decoded
        is_one_write = chunks == 1 and self.response.is_chunked
        has_bytes_after_events = bool(
            self.incomplete_chunk or self.decoder.pending or not self.response.between_chunks
        )
        uncertain: Sequence[EventOrCount] = []
        certain: Sequence[EventOrCount] = []
        if has_bytes_after_events:
            uncertain = events
            # The end of the response is not between chunks either, but its last chunk is one write.
            is_one_write = is_one_write and self.response.is_complete
        elif is_one_write:
            certain = events
        else:
            uncertain, certain = split_last_event(list(events))
        self.reader.feed_with_uncertainty(
            uncertain,
            certain,
            timestamp,
            uncertainty=timestamp - earliest,
            is_one_write=is_one_write,
        )

    # -- decoding ------------------------------------------------------------------------------

    def _decode_read(self, data: bytes, timestamp: int, from_kernel: bool) -> DecodedRead:
        """Return the events in a read. Keep the body of a response that is not a stream.

        The head of the response comes first. `timestamp` and `from_kernel`, which belong to the
        read, are stored when the head is complete.

        Raises:
            MalformedResponseError: The bytes are not a response that this client accepts.
            EventTooLargeError: An event exceeds the limit of the decoder.
        """
        if not self.response.status:
            data = self._feed_head(data, timestamp, from_kernel)
            if not self.response.status:
                return DecodedRead(0, [])
        if self.is_event_stream and self.response.is_chunked:
            return self._decode_chunked_stream(data)
        return self._decode_body(data)

    def _feed_head(self, data: bytes, timestamp: int, from_kernel: bool) -> bytes:
        """Parse the head of the response, or a part of it, and return what follows it.

        When the head is complete, note its timestamp and whether the body is a stream of events.

        Args:
            data: The bytes of a read.
            timestamp: When the newest packet of the read arrived.
            from_kernel: The kernel made the timestamp.

        Raises:
            MalformedResponseError: The head is invalid, or it announces a compressed body.
        """
        response = self.response
        body_start = response.feed_head(data)
        is_head_complete = response.status != 0
        if not is_head_complete:
            return b""
        self.head_received_at = timestamp
        self.has_kernel_timestamp = from_kernel
        self.is_event_stream = is_event_stream(response.status, response.headers)
        is_success = response.status < 300
        encoding = unsupported_encoding(response.headers) if is_success else ""
        if encoding:
            raise MalformedResponseError(compression_error_text(encoding))
        self.is_at_chunk_start = response.is_chunked
        return body_start

    def _decode_chunked_stream(self, data: bytes) -> DecodedRead:
        """Return the events in a part of a stream of events in chunks.

        Most data are whole chunks of whole events. They are recognised in one pass, in which plain
        events (which differ from an earlier one in their text alone) are counted without being
        decoded. Only the rest is decoded as HTTP and server-sent events are defined.
        """
        chunks = 0
        events: list[EventOrCount] = []

        # Step 1: make the data begin with a chunk, if that is possible.
        if self.incomplete_chunk:
            data = self.incomplete_chunk + data
            self.incomplete_chunk = b""
            self.is_at_chunk_start = True
        elif not self.is_at_chunk_start:
            missing_bytes = self.response.missing_chunk_bytes
            has_end_of_chunk = 0 < missing_bytes < len(data)
            if has_end_of_chunk:
                chunks, first_events = self._decode_body(data[:missing_bytes])
                events.extend(first_events)
                data = data[missing_bytes:]

        # Step 2: recognise whole chunks, and keep the beginning of an event for the next read.
        if self.is_at_chunk_start:
            before_text, after_text = self.reader.template or NO_TEMPLATE
            whole_chunks, whole_events, size_bytes = parse_whole_chunks(
                data, before_text, after_text
            )
            if whole_chunks:
                self.decoder.has_started = (
                    True  # A byte order mark is looked for at the start only.
                )
                chunks += whole_chunks
                events += whole_events
                data = data[size_bytes:]
            if is_incomplete_event(data):
                self.incomplete_chunk = data
                self.is_at_chunk_start = False
                return DecodedRead(chunks + 1, events)

        # Step 3: decode the rest.
        if data:
            more_chunks, more_events = self._decode_body(data)
            chunks += more_chunks
            events += more_events
        return DecodedRead(chunks, events)

    def _decode_body(self, data: bytes) -> DecodedRead:
        """Return the events in a part of the body, decoded chunk by chunk and event by event.

        Of a stream of events, note whether the part ends with a whole chunk and a whole event, so
        that the next read may be recognised without decoding. The body of any other response has no
        events. It is kept until it is complete.
        """
        response = self.response
        body_parts = response.feed(data) if data else []
        chunks = len(body_parts)
        # The usual read has one chunk, which need not be copied.
        content = body_parts[0] if chunks == 1 else b"".join(body_parts)
        if not self.is_event_stream:
            if chunks:
                self._keep_body(content)
            return DecodedRead(chunks, [])
        events = self.decoder.feed(content) if chunks else []
        self.is_at_chunk_start = (
            response.is_chunked and response.between_chunks and self.decoder.between_events
        )
        return DecodedRead(chunks, events)

    def _keep_body(self, body_part: bytes) -> None:
        """Keep a part of a body that is not a stream. Of an error body, the beginning is enough.

        Raises:
            MalformedResponseError: The body is too large.
        """
        is_error = self.response.status >= 300
        max_bytes = MAX_ERROR_BYTES if is_error else MAX_WHOLE_BYTES
        self.response_body_bytes += len(body_part)
        if self.response_body_bytes <= max_bytes:
            self.response_body_parts.append(body_part)
        elif not is_error:
            raise MalformedResponseError(f"the body is longer than {MAX_WHOLE_BYTES} bytes")

    # -- the end -------------------------------------------------------------------------------

    def end_with_connection(self, timestamp: int, error: str) -> None:
        """End the exchange because its connection has ended.

        The response is complete if its body ends with the connection. Otherwise the request fails.

        Args:
            timestamp: When the connection ended.
            error: The text of the system's error, or "" after a regular close.
        """
        is_complete = not error and self.response.feed_end()
        if is_complete:
            # The end of the connection has no delay between arrival and reading.
            self._finish_response(timestamp, read_at=timestamp)
        else:
            self._finish(timestamp, self._early_end_failure(error))

    def _early_end_failure(self, error: str) -> Failure:
        """Return the failure of a response whose connection ended before the response did.

        The first of these that applies is the cause:

        1. An error response of the server, even if its body is cut short.
        2. An error event that the server sent before it closed the connection.
        3. `reset`: the connection failed, or it was closed before any byte of a response.
        4. `truncated`: the connection was closed regularly within the response.

        Args:
            error: The text of the system's error, or "" after a regular close.
        """
        status = self.response.status
        if status >= 300:
            return self._http_failure()
        if self.reader.error:
            return Failure("error_event", self.reader.error[:ERROR_TEXT_CHARS], status)
        if status:
            position = f"the body ended early, after {self.reader.output_events} output events"
            if error:
                return Failure("reset", f"{error}, {position}", status)
            return Failure("truncated", position, status)
        if self.bytes_received and not error:
            return Failure("truncated", "the connection ended within the response head")
        return Failure(
            "reset", error or "the connection was closed before the first byte of a response"
        )

    def _finish_response(self, timestamp: int, read_at: int) -> None:
        """End the exchange after a complete response, with or without a failure.

        What can be read only when nothing follows is read first: the last event of a stream, or a
        whole body.

        Args:
            timestamp: When the end of the response arrived.
            read_at: When the process had read it.
        """
        reader = self.reader
        if self.response.status >= 300:
            self._finish(timestamp, self._http_failure())
            return
        if self.is_event_stream:
            last_events = self.decoder.end()
            if last_events:
                reader.feed(last_events, timestamp)
        elif self.response_body_parts:
            body = b"".join(self.response_body_parts)
            feed_whole_body(reader, body, timestamp, self.is_stream_requested)
            if reader.first_token != NEVER:
                self.client_lag = read_at - timestamp
        failure = reader.find_failure(
            is_framing_complete=True,
            ends_with_connection=self.response.ends_with_connection,
            is_stream=self.is_event_stream,
        )
        self._finish(timestamp, failure)

    def _http_failure(self) -> Failure:
        """Return the failure that a status of 300 or more means."""
        response = self.response
        return http_failure(response.status, response.headers, b"".join(self.response_body_parts))

    def _finish(self, timestamp: int, failure: Failure | None) -> None:
        """Note when the exchange ended, and why it failed, or None if it succeeded."""
        self.done_at = timestamp
        self.failure = failure

    def report_completion(self) -> None:
        """Call `on_done` with the completion, once. The connection must be free by then."""
        if not self.is_reported:
            self.is_reported = True
            self.on_done(self.completion())

    def completion(self) -> Completion:
        """Return what was observed of the request and its response.

        The time of the first token is left out if several events before it had a text in an unknown
        field, because one of them was probably the first output.
        """
        reader = self.reader
        response = self.response
        texts = reader.text_pieces
        reasoning_texts = reader.reasoning_pieces
        # The server's own timing is in events, in the head of the response, or in both.
        server_timing = reader.server_timing
        if HEADER in response.headers:
            server_timing = {HEADER: response.headers[HEADER], **(server_timing or {})}
        is_first_token_known = reader.unknown_output_events < UNKNOWN_OUTPUTS
        return Completion(
            request=self.request,
            # The request on its connection
            due=self.due_at,
            ready=self.ready_at,
            tcp=self.tcp_connect_ns,
            tls=self.tls_handshake_ns,
            sent=self.sent_at,
            reused=self.is_connection_reused,
            resent=self.resend_count,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            # The times of the response and their uncertainties
            first_byte=self.head_received_at,
            first_event=reader.first_event,
            first_token=reader.first_token if is_first_token_known else NEVER,
            first_answer=reader.first_answer,
            last_token=reader.last_token,
            end=reader.end,
            done=self.done_at,
            max_gap=reader.max_gap,
            max_gap_error=reader.max_gap_uncertainty,
            stamp_error=reader.first_token_uncertainty,
            last_token_error=reader.last_token_uncertainty,
            kernel_stamp=self.has_kernel_timestamp,
            client_lag=self.client_lag,
            # What the response says
            http_status=response.status,
            headers=dict(response.headers) if self.keep_headers else None,
            output_events=reader.output_events,
            first_event_tokens=reader.first_event_tokens,
            finish_reason=reader.finish_reason,
            usage=reader.usage(),
            server_timing=server_timing,
            text="".join(texts) if texts is not None else None,
            reasoning_text="".join(reasoning_texts) if reasoning_texts is not None else None,
            tool_calls=reader.tool_calls() if reader.tool_deltas else (),
            response_id=reader.response_id,
            remark=reader.remark,
            failure=self.failure,
        )


def is_incomplete_event(data: bytes) -> bool:
    """Return True if the data begin with a chunk whose first event has not ended yet.

    Such data are kept until the rest of the chunk arrives, so that the whole chunk can be
    recognised in one pass. An example is `3c CRLF data: {"id":` of a chunk of 60 (hexadecimal 3c)
    bytes. Return False as well if that is not certain, or if the data are too many to keep.

    Raises:
        MalformedResponseError: The size of the chunk is invalid.
    """
    if not 0 < len(data) < MAX_INCOMPLETE_CHUNK_BYTES:
        return False
    size_line, _, content = data.partition(b"\r\n")
    has_event_end = b"\n\n" in content or b"\r" in content
    if not content or has_event_end:
        return False
    chunk_bytes = CHUNK_SIZES.get(size_line)
    if chunk_bytes is None:
        chunk_bytes = parse_chunk_size(size_line)
    return len(content) < chunk_bytes


def is_event_stream(status: int, headers: Mapping[str, str]) -> bool:
    """Return True if a response is a stream of events. Upper and lower case are the same."""
    content_type = headers.get("content-type", "")[: len(EVENT_STREAM)]
    return status < 300 and content_type.lower() == EVENT_STREAM


def unsupported_encoding(headers: Mapping[str, str]) -> str:
    """Return the name of the compression of a body, or "" if it is not compressed.

    The client requests no compression and reads no compressed body. The name is in
    Content-Encoding, or before `chunked` in Transfer-Encoding, as in `gzip, chunked`. "identity"
    means no compression.
    """
    transfer = headers.get("transfer-encoding", "").lower().removesuffix("chunked").strip(" ,")
    for encoding in (headers.get("content-encoding", ""), transfer):
        if encoding.lower() not in ("", "identity"):
            return encoding[:_ENCODING_CHARS]
    return ""


def compression_error_text(encoding: str) -> str:
    """Return the error message for a body that is compressed."""
    return f"the body has the Content-Encoding {encoding}, which was not requested"


def feed_whole_body(
    reader: ResponseReader, body: bytes, timestamp: int, stream_requested: bool
) -> None:
    """Read the body of a successful response that is not a stream of events.

    Without a requested stream, the time of the first token is that of the whole response, and all
    output tokens come with its first event, which is the only one. If a stream was requested, the
    time of the first token is not known.

    Args:
        reader: The reader of the response.
        body: The whole body.
        timestamp: When its end arrived.
        stream_requested: The request asked for a stream.
    """
    if stream_requested and body.lstrip().startswith((b"data:", b"event:")):
        reader.parse_error = (
            "the response is a stream of events, but its Content-Type is not text/event-stream"
        )
        reader.first_event = timestamp
        return
    reader.feed([body], timestamp)
    if reader.first_token == NEVER:
        return
    reader.first_event_tokens = reader.usage().output or 0
    if stream_requested:
        reader.remark = NOT_STREAMED
        reader.first_token = NEVER


def http_failure(status: int, headers: Mapping[str, str], body: bytes) -> Failure:
    """Return the failure of a response with a status of 300 or more.

    A redirect is not followed, because the requests would then load another server.
    """
    if 300 <= status < 400:
        text = f"HTTP {status}, a redirect, which a load test does not follow"
        return Failure("malformed", text, status)
    text = _error_body_text(status, headers, body)
    if status == 429:
        return Failure("http_429", text, status)
    return Failure("http_5xx" if status >= 500 else "http_4xx", text, status)


def _error_body_text(status: int, headers: Mapping[str, str], body: bytes) -> str:
    """Return what the body of an error response says, or a text that states only the status.

    A compressed body is decompressed, because the text of an error is worth it.
    """
    encoding = unsupported_encoding(headers)
    if encoding:
        body = _decompress(body)
        if not body:
            return (
                f"HTTP {status}, with a body in the Content-Encoding {encoding}, "
                "which was not requested"
            )
    return error_text(body) or f"HTTP {status} without a body"


def _decompress(body: bytes) -> bytes:
    """Return the text of an error body in gzip or deflate, or b"" for any other or damaged body."""
    try:
        return zlib.decompressobj(_GZIP_OR_ZLIB).decompress(body, MAX_ERROR_BYTES)
    except zlib.error:
        return b""


if _compiled is not None:
    decode_usage = msgspec.json.Decoder(UsageFields).decode
    _compiled.register_classes(
        Exchange, ResponseParser, SseDecoder, ResponseReader, PARSED_HEADS, decode_usage, ENDINGS
    )
