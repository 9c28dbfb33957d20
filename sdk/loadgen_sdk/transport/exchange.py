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
from .chunk_size import MalformedResponseError, chunk_size_of_line
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

HEAD_INCOMPLETE = 0
"""The status of a response before its head is complete."""

FIRST_ERROR_STATUS = 300
"""A status of this or more means that the request has failed. Redirects are not followed."""

_ENCODING_CHARS = 40
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib detects which of both it is


class DecodedRead(NamedTuple):
    """What a read of a response, or a part of a read, holds.

    Attributes:
        chunks: The number of chunks of the body, of which the first and last may be incomplete.
        events: The events. A number stands for that many plain events (see `plain_events.py`).
    """

    chunks: int
    events: Sequence[EventOrCount]


NOTHING_DECODED = DecodedRead(chunks=0, events=())
"""A read, or a part of one, that completes no event and has no byte of the body."""


class EventsByCertainty(NamedTuple):
    """The events of a read by what is known about the time of their arrival.

    Attributes:
        uncertain: Events that may have arrived before the newest packet of the read.
        certain: The events after them, which arrived with the newest packet.
    """

    uncertain: Sequence[EventOrCount]
    certain: Sequence[EventOrCount]


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
    def deferrable_events(self) -> int:
        """How many of the next events of this response the receiver may read late.

        Late means several events at a time, which saves work. Their times stay exact, because the
        kernel timestamps packets when they arrive. The result is 0 in three cases, in which the
        next event is urgent:

        - The response has no output yet, or an application waits for each event.
        - The receiver has no template, the bytes around the text of an event, by which it
          recognises the events that may be late.
        - The server writes a chunk in several parts, and may send a part only after the one before
          was read.

        The last LAST_EVENTS of the requested output are urgent too, because the next request may
        wait for the end of this response.
        """
        if not self.can_batch_reads or self.template is None or self.has_split_chunks:
            return 0

        is_length_known = self.requested_output_tokens > 0
        if not is_length_known:
            return MANY_EVENTS - LAST_EVENTS

        # A token is usually one event.
        events_to_come = self.requested_output_tokens - self.reader.output_events
        return max(0, events_to_come - LAST_EVENTS)

    # -- reads ---------------------------------------------------------------------------------

    def _feed_plain_run(
        self, arrivals: list[int | EventBatch], size_bytes: int, read_at: int
    ) -> None:
        """Count the plain events of consecutive reads, of which the receiver kept only the times.

        A *plain event* differs from an earlier event of the response in its text alone. Events that
        came alone are counted together, which saves a call per event. For example, the arrivals
        [10, 20, batch, 30] are counted in three calls: [10, 20], the batch, and [30].

        Args:
            arrivals: A timestamp for each event that came alone, and an `EventBatch` for several
                events that came in one read.
            size_bytes: The number of bytes of the reads.
            read_at: When the last of them was made.
        """
        self.bytes_received += size_bytes
        single_timestamps: list[int] = []  # not counted yet
        for arrival in arrivals:
            if isinstance(arrival, int):
                single_timestamps.append(arrival)
            else:
                if single_timestamps:
                    self.reader.count_plain_events_at(single_timestamps)
                    single_timestamps = []
                self._feed_event_batch(*arrival)

        if single_timestamps:
            self.reader.count_plain_events_at(single_timestamps)

        self.last_event_read_at = read_at

    def _feed_event_batch(
        self, timestamp: int, event_count: int, uncertainty_ns: int | None
    ) -> None:
        """Count several plain events that came in one read. The arguments are an EventBatch.

        Args:
            timestamp: When the last of the events arrived for certain, monotonic in ns.
            event_count: The number of events, at least 2.
            uncertainty_ns: By how much the events before the last one may have arrived earlier.
                None if all of them arrived together.
        """
        if uncertainty_ns is None:  # All of them arrived together.
            self.reader.count_plain_events(event_count, timestamp)
            return

        # The reader takes lists of events. A number in them stands for that many plain events.
        events_before_last = event_count - 1
        self.reader.feed_with_uncertainty(
            uncertain=[events_before_last],
            certain=[1],
            timestamp=timestamp,
            uncertainty=uncertainty_ns,
        )

    def _feed_read(
        self, data: bytes, timestamp: int, read_at: int, empty_at: int, from_kernel: bool
    ) -> bool:
        """Process one read of the response. The arguments are the fields of a `Read`, in order.

        All times are monotonic, in ns.

        Args:
            data: The bytes.
            timestamp: When the newest packet of the data arrived.
            read_at: When the process had read the data, which is `timestamp` or later.
            empty_at: When the socket was last known to be empty. All the data arrived after that.
            from_kernel: The kernel made the timestamp. Otherwise it is `read_at`.

        Returns:
            Whether the response is over, because it is complete or malformed.
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

        All events of a read have the timestamp of its newest packet. There are three cases:

        1. The response had no output before this read. The uncertainty matters most, because it is
           that of the time to first token.
        2. The server wrote all events of the read at once. The timestamp is that of all of them.
        3. Otherwise, the events before the last one may have arrived earlier, but not before the
           socket was last known to be empty.

        Args:
            decoded: The events of the read.
            timestamp: When the newest packet of the read arrived.
            read_at: When the process had read it.
            empty_at: When the socket was last known to be empty.
        """
        has_first_output = self.reader.first_token != NEVER
        if not has_first_output:
            self._feed_until_first_output(decoded, timestamp, read_at, empty_at)
            return

        if decoded.chunks != 1:
            is_one_write = False
        else:
            # A server writes a chunk at once. A body without chunks counts as a single one, of
            # which only a single event is certain to be one write.
            is_one_write = self.response.is_chunked or count_events(decoded.events) == 1

        if is_one_write:
            self.reader.feed(decoded.events, timestamp)
        else:
            self._feed_with_uncertainty(decoded, timestamp, earliest=empty_at)

    def _feed_until_first_output(
        self, decoded: DecodedRead, timestamp: int, read_at: int, empty_at: int
    ) -> None:
        """Pass the events of a read to the reader of a response that had no output before it.

        If the read has the first output, `on_first_output` is called with its time. `client_lag`
        becomes the delay from the arrival of that output to its reading. A long delay means that
        this process was too busy to measure.

        Args:
            decoded: The events of the read.
            timestamp: When the newest packet of the read arrived.
            read_at: When the process had read it.
            empty_at: When the socket was last known to be empty.
        """
        # The events arrived after the socket was empty and after the request was sent.
        earliest_arrival = max(empty_at, self.sent_at)
        self._feed_with_uncertainty(decoded, timestamp, earliest_arrival)
        has_first_output = self.reader.first_token != NEVER
        if not has_first_output:
            return

        self.client_lag = read_at - timestamp
        if self.on_first_output is not None:
            self.on_first_output(self.reader.first_token)

    def _feed_with_uncertainty(self, decoded: DecodedRead, timestamp: int, earliest: int) -> None:
        """Pass the events of a read to the reader, and which of them may have arrived earlier.

        The reader also learns whether the server sent all of them in one write, which is usually
        one chunk of the body. Then their times are equal, even if they are uncertain.

        Args:
            decoded: The events of the read.
            timestamp: When the newest packet of the read arrived, in ns.
            earliest: No event can have arrived before this time, in ns.
        """
        by_certainty = self._split_by_certainty(decoded)
        is_single_chunk = decoded.chunks == 1 and self.response.is_chunked

        # After the end of the response, nothing of another write can be in the read.
        has_part_of_next_write = not self.response.is_complete and self._has_incomplete_event()
        self.reader.feed_with_uncertainty(
            by_certainty.uncertain,
            by_certainty.certain,
            timestamp,
            uncertainty=timestamp - earliest,
            is_one_write=is_single_chunk and not has_part_of_next_write,
        )

    def _split_by_certainty(self, decoded: DecodedRead) -> EventsByCertainty:
        """Split the events of a read by whether they arrived at its timestamp for certain.

        The timestamp is the arrival of the newest packet of the read. Three cases, in which A and B
        are events:

        1. `A B` and a part of the next event, or the end of the response. The newest packet may
           have only these last bytes, so A and B are uncertain.
        2. `A B` in a single chunk, which a server writes at once. Both are certain.
        3. `A B` in two chunks, or without chunks. B ends with the newest packet and is certain. A
           may have come in an earlier packet and is uncertain.
        """
        if self._has_incomplete_event():
            return EventsByCertainty(uncertain=decoded.events, certain=())
        is_single_chunk = decoded.chunks == 1 and self.response.is_chunked
        if is_single_chunk:
            return EventsByCertainty(uncertain=(), certain=decoded.events)
        before_last, last = split_last_event(list(decoded.events))
        return EventsByCertainty(uncertain=before_last, certain=last)

    def _has_incomplete_event(self) -> bool:
        """Return True if the bytes so far do not end between two events and two chunks.

        This is also true after the end of the response, which follows the last event.
        """
        if self.incomplete_chunk or self.decoder.pending:
            return True
        return not self.response.between_chunks

    # -- decoding ------------------------------------------------------------------------------

    def _decode_read(self, data: bytes, timestamp: int, from_kernel: bool) -> DecodedRead:
        """Decode a read of the response, from its head on, and return the events in it.

        A body that is not a stream of events has none. It is stored in `response_body_parts`.

        Args:
            data: The bytes of the read.
            timestamp: When its newest packet arrived. It is noted with the head of the response.
            from_kernel: The kernel made the timestamp. This is noted with the head, too.

        Raises:
            MalformedResponseError: The bytes are not a response that this client accepts.
            EventTooLargeError: An event exceeds the limit of the decoder.
        """
        body_data = data
        if self.response.status == HEAD_INCOMPLETE:
            body_data = self._feed_head(data, timestamp, from_kernel)
            if self.response.status == HEAD_INCOMPLETE:
                return NOTHING_DECODED

        if self.is_event_stream and self.response.is_chunked:
            return self._decode_chunked_stream(body_data)

        return self._decode_body(body_data)

    def _feed_head(self, data: bytes, timestamp: int, from_kernel: bool) -> bytes:
        """Parse the head of the response, or a part of it, and return the bytes of the body.

        They are b"" while the head is incomplete. When it is complete, note its timestamp, whether
        the body is a stream of events, and that the body, if it is chunked, begins with a chunk.

        Args:
            data: The bytes of a read.
            timestamp: When the newest packet of the read arrived.
            from_kernel: The kernel made the timestamp.

        Raises:
            MalformedResponseError: The head is invalid, or it announces a compressed body.
        """
        response = self.response
        body_start = response.feed_head(data)
        is_head_incomplete = response.status == HEAD_INCOMPLETE
        if is_head_incomplete:
            return b""

        self.head_received_at = timestamp
        self.has_kernel_timestamp = from_kernel
        self.is_event_stream = is_event_stream(response.status, response.headers)
        self.is_at_chunk_start = response.is_chunked

        if response.status < FIRST_ERROR_STATUS:
            _refuse_compression(response.headers)

        return body_start

    def _decode_chunked_stream(self, data: bytes) -> DecodedRead:
        """Return the events in a part of the body, which is a stream of events in chunks.

        The part begins in one of three places:

        1. At the start of a chunk, which is usual. Whole chunks are recognised in one pass.
        2. Within a chunk whose first bytes were kept undecoded in `incomplete_chunk`. They are put
           before the data, which then begin with a chunk as in the first case.
        3. Within a chunk whose first bytes were decoded already.
        """
        if self.is_at_chunk_start:
            return self._decode_from_chunk_start(data)

        if self.incomplete_chunk:
            data_from_chunk_start = self.incomplete_chunk + data
            self.incomplete_chunk = b""
            self.is_at_chunk_start = True
            return self._decode_from_chunk_start(data_from_chunk_start)

        return self._decode_from_within_chunk(data)

    def _decode_from_within_chunk(self, data: bytes) -> DecodedRead:
        """Return the events in data that begin within a chunk whose beginning was decoded before.

        Data of the end of a chunk and of further chunks are decoded in two parts: the end of the
        chunk by itself, and then the further chunks, which can be recognised in one pass. If an
        event continues from the first chunk into the next one, they cannot, and are decoded step by
        step.
        """
        bytes_to_chunk_end = self.response.missing_chunk_bytes
        has_further_chunks = 0 < bytes_to_chunk_end < len(data)
        if not has_further_chunks:
            return self._decode_body(data)

        end_of_chunk = self._decode_body(data[:bytes_to_chunk_end])
        further_data = data[bytes_to_chunk_end:]

        does_event_continue = not self.is_at_chunk_start  # `_decode_body` has updated this field.
        if does_event_continue:
            further_chunks = self._decode_body(further_data)
        else:
            further_chunks = self._decode_from_chunk_start(further_data)

        return _join_decoded(end_of_chunk, further_chunks)

    def _decode_from_chunk_start(self, data: bytes) -> DecodedRead:
        """Return the events in data that begin with a chunk.

        Most data are whole chunks of whole events, which `parse_whole_chunks` recognises in one
        pass. Events that differ from an earlier one in their text alone are only counted. If other
        data follow, there are two cases. The first bytes of a chunk that has not arrived completely
        are kept in `incomplete_chunk`, undecoded, to recognise the whole chunk later. Anything else
        is decoded step by step.
        """
        before_text, after_text = self.reader.template or NO_TEMPLATE
        chunks, events, parsed_bytes = parse_whole_chunks(data, before_text, after_text)
        whole_chunks = DecodedRead(chunks, events)

        if chunks:
            # A byte order mark is possible at the start of the body only, which is now past.
            self.decoder.has_started = True

        rest = data[parsed_bytes:]
        if not rest:
            return whole_chunks

        if is_incomplete_event(rest):
            self.incomplete_chunk = rest
            self.is_at_chunk_start = False
            # The number of chunks of a read includes one that is incomplete.
            return whole_chunks._replace(chunks=chunks + 1)

        return _join_decoded(whole_chunks, self._decode_body(rest))

    def _decode_body(self, data: bytes) -> DecodedRead:
        """Decode a part of the body, and return the events in it.

        A body that is not a stream of events has no events, and is stored until it is complete.

        In a stream, `is_at_chunk_start` becomes true if the part ends both with a whole chunk and
        with a whole event, so that the next read begins with both.
        """
        if not data:
            return NOTHING_DECODED

        # A body that is not sent in chunks counts as a single one.
        chunk_contents = self.response.feed(data)
        chunk_count = len(chunk_contents)

        # The usual read has one chunk, which need not be copied.
        content = chunk_contents[0] if chunk_count == 1 else b"".join(chunk_contents)
        if not self.is_event_stream:
            if chunk_count:
                self._store_body_part(content)
            return DecodedRead(chunk_count, events=())

        events = self.decoder.feed(content) if chunk_count else []
        ends_with_whole_chunk = self.response.is_chunked and self.response.between_chunks
        ends_with_whole_event = self.decoder.between_events
        self.is_at_chunk_start = ends_with_whole_chunk and ends_with_whole_event

        return DecodedRead(chunk_count, events)

    def _store_body_part(self, body_part: bytes) -> None:
        """Store a part of a body that is not a stream. Of an error body, the beginning is enough.

        Raises:
            MalformedResponseError: The body is too large.
        """
        is_error = self.response.status >= FIRST_ERROR_STATUS
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
        3. `reset`: the system reports an error of the connection.
        4. `truncated`: the connection was closed regularly within the response.

        Args:
            error: The text of the system's error, or "" after a regular close.
        """
        status = self.response.status
        if status == HEAD_INCOMPLETE:
            return self._failure_without_head(error)
        if status >= FIRST_ERROR_STATUS:
            return self._http_failure()
        if self.reader.error:
            return Failure("error_event", self.reader.error[:ERROR_TEXT_CHARS], status)

        position = f"the body ended early, after {self.reader.output_events} output events"
        if error:
            return Failure("reset", f"{error}, {position}", status)

        return Failure("truncated", position, status)

    def _failure_without_head(self, error: str) -> Failure:
        """Return the failure of a response whose connection ended before its head was complete.

        Args:
            error: The text of the system's error, or "" after a regular close.
        """
        if error:
            return Failure("reset", error)
        if self.bytes_received:
            return Failure("truncated", "the connection ended within the response head")
        return Failure("reset", "the connection was closed before the first byte of a response")

    def _finish_response(self, timestamp: int, read_at: int) -> None:
        """End the exchange after a complete response, with or without a failure.

        Args:
            timestamp: When the end of the response arrived.
            read_at: When the process had read it.
        """
        if self.response.status >= FIRST_ERROR_STATUS:
            self._finish(timestamp, self._http_failure())
            return

        if self.is_event_stream:
            self._feed_last_events(timestamp)
        else:
            self._feed_stored_body(timestamp, read_at)

        failure = self.reader.find_failure(
            is_framing_complete=True,
            ends_with_connection=self.response.ends_with_connection,
            is_stream=self.is_event_stream,
        )
        self._finish(timestamp, failure)

    def _feed_last_events(self, timestamp: int) -> None:
        """Pass on the last event of a stream if no blank line ended it before the body ended."""
        last_events = self.decoder.end()
        if last_events:
            self.reader.feed(last_events, timestamp)

    def _feed_stored_body(self, timestamp: int, read_at: int) -> None:
        """Pass on a body that is not a stream, now that it is complete.

        If the end of the body counts as the first output, `client_lag` becomes the delay from the
        arrival of the body to its reading, as for the first event of a stream.
        """
        if not self.response_body_parts:
            return
        body = b"".join(self.response_body_parts)
        feed_whole_body(self.reader, body, timestamp, self.is_stream_requested)
        has_first_output = self.reader.first_token != NEVER
        if has_first_output:
            self.client_lag = read_at - timestamp

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
        """Return what was observed of the request and its response. Times are monotonic, in ns.

        `first_token` is NEVER if several events before the first known output had a text in a field
        that this client does not know. One of them was probably the first output, for example
        reasoning under a server's own name, so that the time to first token is not known.
        """
        reader = self.reader
        response = self.response
        first_token = reader.first_token

        has_unknown_output = reader.unknown_output_events >= UNKNOWN_OUTPUTS
        if has_unknown_output:
            first_token = NEVER

        # The server's own timing is in events, in the head of the response, or in both.
        server_timing = reader.server_timing
        if HEADER in response.headers:
            server_timing = {HEADER: response.headers[HEADER], **(server_timing or {})}

        # The texts are None unless the caller asked for them.
        text = None
        reasoning_text = None
        if reader.text_pieces is not None and reader.reasoning_pieces is not None:
            text = "".join(reader.text_pieces)
            reasoning_text = "".join(reader.reasoning_pieces)

        return Completion(
            request=self.request,
            failure=self.failure,
            # The connection and the sending of the request
            due=self.due_at,
            ready=self.ready_at,
            tcp=self.tcp_connect_ns,
            tls=self.tls_handshake_ns,
            sent=self.sent_at,
            reused=self.is_connection_reused,
            resent=self.resend_count,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            # The times of the response
            first_byte=self.head_received_at,
            first_event=reader.first_event,
            first_token=first_token,
            first_answer=reader.first_answer,
            last_token=reader.last_token,
            end=reader.end,
            done=self.done_at,
            max_gap=reader.max_gap,
            # How wrong these times may be: an "error" is an uncertainty in ns
            stamp_error=reader.first_token_uncertainty,
            last_token_error=reader.last_token_uncertainty,
            max_gap_error=reader.max_gap_uncertainty,
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
            text=text,
            reasoning_text=reasoning_text,
            tool_calls=reader.tool_calls() if reader.tool_deltas else (),
            response_id=reader.response_id,
            remark=reader.remark,
        )


def is_incomplete_event(data: bytes) -> bool:
    """Return True if the data are the beginning of a chunk whose first event has not ended yet.

    An example is `3c CRLF data: {"id":`, of a chunk of 60 (hexadecimal 3c) bytes. Such data are
    kept until the rest of the chunk arrives, so that the whole chunk can be recognised in one pass.
    Data with another line end than LF, and data of MAX_INCOMPLETE_CHUNK_BYTES or more, are decoded
    at once instead: for them, the result is False.

    Raises:
        MalformedResponseError: The size of the chunk is invalid.
    """
    if not data or len(data) >= MAX_INCOMPLETE_CHUNK_BYTES:
        return False

    size_line, _, content = data.partition(b"\r\n")
    has_event_end = b"\n\n" in content
    has_unusual_line_end = b"\r" in content
    if not content or has_event_end or has_unusual_line_end:
        return False

    return len(content) < chunk_size_of_line(size_line)


def _join_decoded(first: DecodedRead, second: DecodedRead) -> DecodedRead:
    """Return what two consecutive parts of a read hold together."""
    return DecodedRead(chunks=first.chunks + second.chunks, events=[*first.events, *second.events])


def is_event_stream(status: int, headers: Mapping[str, str]) -> bool:
    """Return True if a response is a stream of events. Upper and lower case are the same."""
    content_type = headers.get("content-type", "")[: len(EVENT_STREAM)]
    return status < 300 and content_type.lower() == EVENT_STREAM


def unsupported_encoding(headers: Mapping[str, str]) -> str:
    """Return the name of the compression of a body, or "" if it is not compressed.

    The client requests no compression, and reads no compressed body of a successful response. The
    name is in Content-Encoding, or before `chunked` in Transfer-Encoding, as in `gzip, chunked`.
    "identity" means no compression.
    """
    transfer = headers.get("transfer-encoding", "").lower().removesuffix("chunked").strip(" ,")
    for encoding in (headers.get("content-encoding", ""), transfer):
        is_compression = encoding.lower() not in ("", "identity")
        if is_compression:
            return encoding[:_ENCODING_CHARS]
    return ""


def _refuse_compression(headers: Mapping[str, str]) -> None:
    """Raise MalformedResponseError if the headers of a response announce a compressed body."""
    encoding = unsupported_encoding(headers)
    if encoding:
        raise MalformedResponseError(compression_error_text(encoding))


def compression_error_text(encoding: str) -> str:
    """Return the error message for a body that is compressed."""
    return f"the body has the Content-Encoding {encoding}, which was not requested"


def feed_whole_body(
    reader: ResponseReader, body: bytes, timestamp: int, stream_requested: bool
) -> None:
    """Pass the body of a successful response that is not a stream of events to its reader.

    There are three cases:

    1. The body is a stream after all, which the server has labelled as something else. This is an
       error of the server.
    2. A stream was requested, but the server sent one body. It generated the output earlier, at a
       time that is not known, so the response has no time to first token.
    3. No stream was requested. The body is the first output, with all output tokens.

    Args:
        reader: The reader of the response.
        body: The whole body.
        timestamp: When its end arrived, monotonic in ns.
        stream_requested: The request asked for a stream.
    """
    is_mislabelled_stream = stream_requested and body.lstrip().startswith((b"data:", b"event:"))
    if is_mislabelled_stream:
        reader.first_event = timestamp
        reader.parse_error = (
            "the response is a stream of events, but its Content-Type is not text/event-stream"
        )
        return

    reader.feed([body], timestamp)
    has_output = reader.first_token != NEVER
    if not has_output:
        return

    reader.first_event_tokens = reader.usage().output or 0
    if stream_requested:
        # The reader has taken the end of the body for the first token.
        reader.first_token = NEVER
        reader.remark = NOT_STREAMED


def http_failure(status: int, headers: Mapping[str, str], body: bytes) -> Failure:
    """Return the failure of a response with a status of 300 or more.

    A redirect is not followed, because the requests would then load another server.
    """
    is_redirect = 300 <= status < 400
    if is_redirect:
        text = f"HTTP {status}, a redirect, which a load test does not follow"
        return Failure("malformed", text, status)

    text = _error_body_text(status, headers, body)
    if status == 429:
        return Failure("http_429", text, status)

    return Failure("http_5xx" if status >= 500 else "http_4xx", text, status)


def _error_body_text(status: int, headers: Mapping[str, str], body: bytes) -> str:
    """Return the error message in the body of an error response, for the user.

    The client does not accept compressed bodies, but some servers compress their error messages
    nevertheless. They are decompressed, because they say why the request failed. If there is no
    message, the text states only the status.
    """
    compression = unsupported_encoding(headers)  # such as "gzip", or "" if there is none
    if not compression:
        return error_text(body) or f"HTTP {status} without a body"

    decompressed_body = _decompress(body)
    if not decompressed_body:
        return (
            f"HTTP {status}, with a body in the Content-Encoding {compression}, "
            "which was not requested"
        )

    return error_text(decompressed_body) or f"HTTP {status} without a body"


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
