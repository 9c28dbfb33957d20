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
from .response_state import LAST_EVENTS, Bundle

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
    `connection_ended` if the connection ends, and then calls `report_completion` once. All times
    are monotonic, in ns.
    """

    __slots__ = ()
    response_class = ResponseParser
    decoder_class = SseDecoder
    reader_class = ResponseReader

    @property
    def events_until_urgent(self) -> int:
        """The number of events that may arrive before one is urgent.

        It is 0 if every event is urgent: before the first output, while no template for plain
        events is known, and if the server writes chunks in parts (see `splits_chunks`). Otherwise
        all but the last LAST_EVENTS of the requested output may be read late.
        """
        if not self.may_batch or self.template is None or self.splits_chunks:
            return 0
        if self.requested_output <= 0:
            return MANY_EVENTS - LAST_EVENTS
        return self.requested_output - self.reader.output_events - LAST_EVENTS

    # -- reads ---------------------------------------------------------------------------------

    def _feed_run(self, arrivals: list[int | Bundle], size_bytes: int, read_at: int) -> None:
        """Process consecutive reads of plain events.

        The timestamps between two bundles are passed on with one call, which saves a call per
        event. Of the events in a bundle, only the last has an exact timestamp, unless all came in
        one write of the server (its `uncertainty` is None).

        Args:
            arrivals: A timestamp for each event that came alone, and a Bundle for several events.
            size_bytes: The number of bytes of the reads.
            read_at: When the last of them was made.
        """
        self.bytes_received += size_bytes
        timestamps: list[int] = []  # of consecutive events that came alone
        for arrival in arrivals:
            if isinstance(arrival, int):
                timestamps.append(arrival)
                continue
            if timestamps:
                self.reader.count_plain_events_at(timestamps)
                timestamps = []
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
        if timestamps:
            self.reader.count_plain_events_at(timestamps)
        self.progress = read_at

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
            self.progress = read_at
        if not self.response.complete:
            return False
        self._complete(timestamp, read_at)
        return True

    def _feed_events(
        self, decoded: DecodedRead, timestamp: int, read_at: int, empty_at: int
    ) -> None:
        """Pass the events of a read to the reader, with the uncertainty of their timestamp.

        After the first output, a read that is one write of the server is exact. Before it, the
        uncertainty is always passed on, because it is a part of the result.

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
        is_one_write = chunks == 1 and (self.response.chunked or count_events(events) == 1)
        if is_one_write:
            reader.feed(events, timestamp)
        else:
            self._feed_with_uncertainty(decoded, timestamp, earliest=empty_at)

    def _feed_before_first_output(
        self, decoded: DecodedRead, timestamp: int, read_at: int, empty_at: int
    ) -> None:
        """Pass on the events of a read that may have the first output, and call `on_first` then.

        The arguments are those of `_feed_events`. `client_lag`, the delay between the arrival of
        the first output and its reading, shows whether this process was too busy to measure.
        """
        # The response cannot have begun before the request was sent.
        self._feed_with_uncertainty(decoded, timestamp, earliest=max(empty_at, self.sent))
        has_first_output = self.reader.first_token != NEVER
        if not has_first_output:
            return
        self.client_lag = read_at - timestamp
        if self.on_first is not None:
            self.on_first(self.reader.first_token)

    def _feed_with_uncertainty(self, decoded: DecodedRead, timestamp: int, earliest: int) -> None:
        """Pass on events, separating those that may have arrived before the timestamp.

        A single chunk is taken as one write of the server, whatever it holds. With several chunks,
        or in a body without chunks, only the last event is certain to have come with the newest
        packet, which made the timestamp. If bytes of a further event follow, none of them is.

        Args:
            decoded: The events of the read.
            timestamp: When the newest packet of the read arrived.
            earliest: No event can have arrived before this time.
        """
        chunks, events = decoded
        is_one_write = chunks == 1 and self.response.chunked
        has_bytes_of_next_event = bool(
            self.incomplete_chunk or self.decoder.pending or not self.response.between_chunks
        )
        uncertain: Sequence[EventOrCount] = []
        certain: Sequence[EventOrCount] = []
        if has_bytes_of_next_event:
            uncertain = events
            # The end of the response is not between chunks either, but its last chunk is one write.
            is_one_write = is_one_write and self.response.complete
        elif is_one_write:
            certain = events
        else:
            uncertain, certain = split_last_event(list(events))
        self.reader.feed_with_uncertainty(
            uncertain, certain, timestamp, timestamp - earliest, one_write=is_one_write
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
        if self.is_event_stream and self.response.chunked:
            return self._decode_chunked_stream(data)
        return self._decode_body(data)

    def _feed_head(self, data: bytes, timestamp: int, from_kernel: bool) -> bytes:
        """Parse the head of the response, or a part of it, and return what follows it.

        Raises:
            MalformedResponseError: The head is invalid, or it announces a compressed body.
        """
        response = self.response
        body_start = response.feed_head(data)
        if not response.status:
            return b""
        self.first_byte = timestamp
        self.kernel_stamp = from_kernel
        self.is_event_stream = is_event_stream(response.status, response.headers)
        encoding = unsupported_encoding(response.headers) if response.status < 300 else ""
        if encoding:
            raise MalformedResponseError(compression_error_text(encoding))
        self.at_chunk_start = response.chunked
        return body_start

    def _decode_chunked_stream(self, data: bytes) -> DecodedRead:
        """Return the events in a part of a chunked stream.

        This has three steps:

        1. Make the data begin with a chunk. Bytes that were kept of an incomplete chunk are put
           before it, or the rest of a chunk that was decoded in part is decoded first.
        2. Recognise whole chunks in one pass, in which plain events are counted without being
           decoded. The beginning of an event that may follow is kept for the next read.
        3. Decode what is left as HTTP and server-sent events are defined.
        """
        chunks = 0
        events: list[EventOrCount] = []
        if self.incomplete_chunk:
            data = self.incomplete_chunk + data
            self.incomplete_chunk = b""
            self.at_chunk_start = True
        elif not self.at_chunk_start:
            missing_bytes = self.response.missing_chunk_bytes
            if 0 < missing_bytes < len(data):
                chunks, first_events = self._decode_body(data[:missing_bytes])
                events.extend(first_events)
                data = data[missing_bytes:]

        if self.at_chunk_start:
            before_text, after_text = self.reader.template or NO_TEMPLATE
            whole_chunks, whole_events, size_bytes = parse_whole_chunks(
                data, before_text, after_text
            )
            if whole_chunks:
                self.decoder.started = True  # A byte order mark is looked for at the start only.
                chunks += whole_chunks
                events += whole_events
                data = data[size_bytes:]
            if is_part_of_event(data):
                self.incomplete_chunk = data
                self.at_chunk_start = False
                return DecodedRead(chunks + 1, events)

        if data:
            more_chunks, more_events = self._decode_body(data)
            chunks += more_chunks
            events += more_events
        return DecodedRead(chunks, events)

    def _decode_body(self, data: bytes) -> DecodedRead:
        """Return the events in a part of the body, decoded chunk by chunk and event by event.

        Keep the part if the response is not a stream of events. Of a stream, note whether the part
        ends with a whole chunk and a whole event, so that the next read may be recognised without
        decoding.
        """
        response = self.response
        chunk_contents = response.feed(data) if data else []
        chunks = len(chunk_contents)
        # The usual read has one chunk, which need not be copied.
        content = chunk_contents[0] if chunks == 1 else b"".join(chunk_contents)
        if not self.is_event_stream:
            if chunks:
                self._keep_body(content)
            return DecodedRead(chunks, [])
        events = self.decoder.feed(content) if chunks else []
        self.at_chunk_start = (
            response.chunked and response.between_chunks and self.decoder.between_events
        )
        return DecodedRead(chunks, events)

    def _keep_body(self, body_part: bytes) -> None:
        """Keep a part of a body that is not a stream. Of an error body, the beginning is enough.

        Raises:
            MalformedResponseError: The body is too large.
        """
        is_error = self.response.status >= 300
        max_bytes = MAX_ERROR_BYTES if is_error else MAX_WHOLE_BYTES
        self.body_bytes += len(body_part)
        if self.body_bytes <= max_bytes:
            self.body_parts.append(body_part)
        elif not is_error:
            raise MalformedResponseError(f"a body of more than {MAX_WHOLE_BYTES} bytes")

    # -- the end -------------------------------------------------------------------------------

    def connection_ended(self, timestamp: int, error: str) -> None:
        """End the exchange because its connection has ended.

        Args:
            timestamp: When it ended.
            error: The text of the system's error, or "" after a regular close.
        """
        if not error and self.response.feed_end():
            # The end of the connection has no delay between arrival and reading.
            self._complete(timestamp, read_at=timestamp)
        else:
            self._finish(timestamp, self._early_end_failure(error))

    def _early_end_failure(self, error: str) -> Failure:
        """Return the failure of a response whose connection ended before the response did.

        What the server has said about an error comes first. A connection that was reset gives the
        kind `reset`, and one that was closed within the response gives `truncated`.

        Args:
            error: The text of the system's error, or "" after a regular close.
        """
        status = self.response.status
        if status >= 300:  # an error response of the server, even if its body is cut short
            return self._http_failure()
        if self.reader.error:  # the server sent an error event before it closed
            return Failure("error_event", self.reader.error[:ERROR_TEXT_CHARS], status)
        if status:
            position = f"the body ended early, after {self.reader.output_events} output events"
            if error:
                return Failure("reset", f"{error}, {position}", status)
            return Failure("truncated", position, status)
        if self.bytes_received and not error:
            return Failure("truncated", "the connection ended within the response head")
        return Failure("reset", error or "closed before any byte of an answer")

    def _complete(self, timestamp: int, read_at: int) -> None:
        """End the exchange after a complete response.

        The last events of a stream and a whole body can be read only now, when nothing follows.

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
        elif self.body_parts:
            feed_whole_body(reader, b"".join(self.body_parts), timestamp, self.stream)
            if reader.first_token != NEVER:
                self.client_lag = read_at - timestamp
        failure = reader.judge(
            framing_ended=True,
            until_close=self.response.until_close,
            streamed=self.is_event_stream,
        )
        self._finish(timestamp, failure)

    def _http_failure(self) -> Failure:
        """Return the failure that a status of 300 or more means."""
        response = self.response
        return http_failure(response.status, response.headers, b"".join(self.body_parts))

    def _finish(self, timestamp: int, failure: Failure | None) -> None:
        """Note when the exchange ended, and why it failed, or None if it succeeded."""
        self.done = timestamp
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
        texts = reader.pieces
        reasoning_texts = reader.reasoning_pieces
        server_timing = reader.server_timing  # from events; the head of the response may have more
        if HEADER in response.headers:
            server_timing = {HEADER: response.headers[HEADER], **(server_timing or {})}
        return Completion(
            request=self.request,
            due=self.due,
            ready=self.ready,
            tcp=self.tcp,
            tls=self.tls,
            sent=self.sent,
            first_byte=self.first_byte,
            first_event=reader.first_event,
            first_token=(reader.first_token if reader.unknown_outputs < UNKNOWN_OUTPUTS else NEVER),
            first_answer=reader.first_answer,
            last_token=reader.last_token,
            end=reader.end,
            done=self.done,
            output_events=reader.output_events,
            first_event_tokens=reader.first_event_tokens,
            max_gap=reader.max_gap,
            max_gap_error=reader.max_gap_error,
            client_lag=self.client_lag,
            stamp_error=reader.stamp_error,
            last_token_error=reader.last_token_error,
            kernel_stamp=self.kernel_stamp,
            reused=self.reused,
            resent=self.resent,
            http_status=response.status,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            finish_reason=reader.finish_reason,
            usage=reader.usage(),
            text="".join(texts) if texts is not None else None,
            tool_calls=reader.tool_calls() if reader.tool_deltas else (),
            response_id=reader.response_id,
            remark=reader.remark,
            reasoning_text="".join(reasoning_texts) if reasoning_texts is not None else None,
            headers=dict(response.headers) if self.keep_headers else None,
            server_timing=server_timing,
            failure=self.failure,
        )


def is_part_of_event(data: bytes) -> bool:
    """Return True if a chunk begins with these bytes and the first event in it has not ended yet.

    Such bytes are kept until the rest of the chunk arrives, so that the whole chunk can be
    recognised in one pass. Return False as well if that is not certain, or if the bytes are many.
    An example is `3c CRLF data: {"id":` of a chunk of 60 (hexadecimal 3c) bytes.
    """
    if not 0 < len(data) < MAX_INCOMPLETE_CHUNK_BYTES:
        return False
    size_line, _, content = data.partition(b"\r\n")
    if not content or b"\n\n" in content or b"\r" in content:
        return False
    size = CHUNK_SIZES.get(size_line) or parse_chunk_size(size_line)
    return len(content) < size


def is_event_stream(status: int, headers: Mapping[str, str]) -> bool:
    """Return True if a response is a stream of events. Upper and lower case are the same."""
    content_type = headers.get("content-type", "")[: len(EVENT_STREAM)]
    return status < 300 and content_type.lower() == EVENT_STREAM


def unsupported_encoding(headers: Mapping[str, str]) -> str:
    """Return the compression of a body, which this client does not request, or "" for none.

    It is in Content-Encoding, or before `chunked` in Transfer-Encoding, as in `gzip, chunked`.
    "identity" means that the body is not compressed.
    """
    transfer = headers.get("transfer-encoding", "").lower().removesuffix("chunked").strip(" ,")
    for encoding in (headers.get("content-encoding", ""), transfer):
        if encoding.lower() not in ("", "identity"):
            return encoding[:_ENCODING_CHARS]
    return ""


def compression_error_text(encoding: str) -> str:
    """Return the error message for a body that is compressed."""
    return f"a body in Content-Encoding {encoding}, which was not asked for"


def feed_whole_body(
    reader: ResponseReader, body: bytes, timestamp: int, stream_requested: bool
) -> None:
    """Read a body that is not a stream of events.

    The time of its first token is known only if no stream was requested: then it is the time of
    the whole response. All its output tokens come with its first event, which is the only one.

    Args:
        reader: The reader of the response.
        body: The whole body.
        timestamp: When its end arrived.
        stream_requested: The request asked for a stream.
    """
    if stream_requested and body.lstrip().startswith((b"data:", b"event:")):
        reader.malformed = "a stream of events whose Content-Type is not text/event-stream"
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
                f"HTTP {status}, its body in Content-Encoding {encoding}, which was not asked for"
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
