"""One request and its answer, without IO: takes the bytes of the answer with their stamps, makes a `Completion`.

This module uses no socket and no clock.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import msgspec

from ..compiled import module as _compiled
from ..request import NEVER, Completion, Failure
from ..wire_formats.event_fields import ERROR_TEXT_CHARS, UsageFields, error_text
from ..wire_formats.event_timeline import EventOrCount, count_events, split_last_event
from ..wire_formats.response_reader import ENDINGS, NOT_STREAMED, UNKNOWN_OUTPUTS, ResponseReader
from ..wire_formats.server_timing import HEADER
from ..wire_formats.sse import EventTooLargeError, SseDecoder
from .chunk_size import CHUNK_SIZES, MalformedResponseError, chunk_size
from .http1 import HEADS, ResponseParser
from .implementation import ExchangeState, whole_chunks
from .response_state import LAST_EVENTS, Bundle

MAX_WHOLE_BYTES = 64 << 20  # an answer that is not a stream is kept until it is complete
MAX_ERROR_BYTES = 64 << 10
MAX_INCOMPLETE_CHUNK_BYTES = 4096
UNKNOWN_EVENTS = 1 << 40
EVENT_STREAM = "text/event-stream"
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


class Exchange(ExchangeState):
    """One request and its response, from sending to the completion.

    The pool sets `ready`, `sent` and `bytes_sent`, calls `arrived` with the reads, calls `ended` if the connection
    ends, and then calls `tell` once. All times are monotonic, in ns.
    """

    __slots__ = ()
    response_class = ResponseParser
    decoder_class = SseDecoder
    reading_class = ResponseReader

    @property
    def events_until_urgent(self) -> int:
        """The number of events that may come before one is urgent."""
        if not self.may_batch or self.template is None or self.splits_chunks:
            return 0
        if self.asked_output <= 0:
            return UNKNOWN_EVENTS - LAST_EVENTS
        return self.asked_output - self.reading.output_events - LAST_EVENTS

    def _feed_run(self, reads: list[int | Bundle], size: int, read_at: int) -> None:
        """Process consecutive reads of plain events."""
        self.bytes_received += size
        alone: list[int] = []
        for read in reads:
            if isinstance(read, int):
                alone.append(read)
                continue
            if alone:
                self.reading.count_plain_events_at(alone)
                alone = []
            stamp, events, error = read
            if error < 0:
                self.reading.count_plain_events(events, stamp)
            else:
                self.reading.feed_with_uncertainty([events - 1], [1], stamp, error)
        if alone:
            self.reading.count_plain_events_at(alone)
        self.progress = read_at

    def _feed_read(
        self, data: bytes, stamp: int, read_at: int, empty_at: int, from_kernel: bool
    ) -> bool:
        """Process one read. Return True when the response is over."""
        response, reading = self.response, self.reading
        self.bytes_received += len(data)
        try:
            chunks, events = self._events_of(data, stamp, from_kernel)
        except (MalformedResponseError, EventTooLargeError) as error:
            self._close(stamp, Failure("malformed", str(error), response.status))
            return True
        if events:
            if reading.first_token < 0:
                earliest = empty_at if empty_at > self.sent else self.sent  # not before it was sent
                self._feed_with_uncertainty(events, stamp, earliest, chunks == 1)
                if reading.first_token >= 0:
                    self.client_lag = read_at - stamp
                    if self.on_first is not None:
                        self.on_first(reading.first_token)
            elif chunks == 1 and (
                response.chunked or count_events(events) == 1
            ):  # one write of the server
                reading.feed(events, stamp)
            else:
                self._feed_with_uncertainty(events, stamp, empty_at, chunks == 1)
            self.progress = read_at
        if response.complete:
            self._complete(stamp, read_at)
            return True
        return False

    def _events_of(
        self, data: bytes, stamp: int, from_kernel: bool
    ) -> tuple[int, list[EventOrCount]]:
        """How many chunks (or parts of one) and which events there are in `data`. Keeps a body that is no stream.

        Chunks of usual events are found in one pass, where that is compiled, and plain events without decoding.
        """
        response = self.response
        if not response.status:
            data = response.take_head(data)
            if not response.status:
                return 0, []
            self.first_byte = stamp
            self.kernel_stamp = from_kernel
            self.is_event_stream = is_event_stream(response.status, response.headers)
            encoding = unsupported_encoding(response.headers) if response.status < 300 else ""
            if encoding:
                raise MalformedResponseError(compression_error_text(encoding))
            self.at_chunk_start = response.chunked
        if not (self.is_event_stream and response.chunked):
            return self._decode(data)
        chunks = 0
        events: list[EventOrCount] = []
        if self.incomplete_chunk:
            data = self.incomplete_chunk + data
            self.incomplete_chunk = b""
            self.at_chunk_start = True
        if not self.at_chunk_start and 0 < (missing := response.missing) < len(
            data
        ):  # the rest of an earlier read's chunk
            chunks, events = self._decode(data[:missing])
            data = data[missing:]
        if self.at_chunk_start:
            found, whole, used = whole_chunks(data, *(self.reading.template or (b"", b"")))
            if found:
                self.decoder.started = True
                chunks += found
                events += whole
                data = data[used:]
            if is_part_of_event(data):
                self.incomplete_chunk = data
                self.at_chunk_start = False
                return chunks + 1, events
        if data:
            more, others = self._decode(data)
            return chunks + more, events + others
        return chunks, events

    def _decode(self, data: bytes) -> tuple[int, list[EventOrCount]]:
        """The same, chunk by chunk and event by event, as HTTP and server-sent events are defined."""
        body_parts = self.response.feed(data) if data else []
        events: list[EventOrCount] = []
        if self.is_event_stream:
            if body_parts:
                events += self.decoder.feed(
                    body_parts[0] if len(body_parts) == 1 else b"".join(body_parts)
                )
            response = self.response
            self.at_chunk_start = (
                response.chunked and response.between_chunks and self.decoder.between_events
            )
            return len(body_parts), events
        if not body_parts:
            return 0, events
        body_part = b"".join(body_parts)
        self._keep_body(body_part)
        return len(body_parts), []

    def _feed_with_uncertainty(
        self, events: list[EventOrCount], stamp: int, earliest: int, single: bool
    ) -> None:
        """Pass on the events of a read with the number of those whose stamp, the newest packet's, may be too late.

        One chunk of the body (`single`) is taken as one write of the server, whatever it holds. With several chunks, or
        in a body without chunks, only the last event is certain to have come with the last packet; if bytes of a
        further event follow it, none is. `earliest`: before that instant, none of them can have arrived.
        """
        one_write = single and self.response.chunked
        if self.incomplete_chunk or self.decoder.pending or not self.response.between_chunks:
            unsure, sure = events, []
            one_write = one_write and self.response.complete
        elif one_write:
            unsure, sure = [], events
        else:
            unsure, sure = split_last_event(events)
        self.reading.feed_with_uncertainty(
            unsure, sure, stamp, stamp - earliest, one_write=one_write
        )

    def connection_ended(self, stamp: int, reset: str) -> None:
        """The connection ended, and so does the request. `reset`: the error's text, "" after a regular close."""
        response = self.response
        if not reset and response.end_of_file():
            self._complete(stamp, stamp)
        elif response.status >= 300:  # an error status of the server, even if its body is cut short
            self._close(stamp, self._http_failure())
        elif self.reading.error:  # the server sent an error event before it closed
            self._close(
                stamp,
                Failure("error_event", self.reading.error[:ERROR_TEXT_CHARS], response.status),
            )
        elif response.status and not reset:
            self._close(stamp, Failure("truncated", self._where_it_ended(), response.status))
        elif response.status:
            self._close(
                stamp, Failure("reset", f"{reset}, {self._where_it_ended()}", response.status)
            )
        elif self.bytes_received and not reset:
            self._close(
                stamp, Failure("truncated", "the connection ended within the response head")
            )
        else:
            self._close(stamp, Failure("reset", reset or "closed before any byte of an answer"))

    def _where_it_ended(self) -> str:
        return f"the body ended early, after {self.reading.output_events} output events"

    def _keep_body(self, body_part: bytes) -> None:
        refused = self.response.status >= 300
        self.body_bytes += len(body_part)
        if self.body_bytes <= (MAX_ERROR_BYTES if refused else MAX_WHOLE_BYTES):
            self.body_parts.append(body_part)
        elif not refused:  # of an error body, the beginning is enough
            raise MalformedResponseError(f"a body of more than {MAX_WHOLE_BYTES} bytes")

    def _complete(self, stamp: int, read_at: int) -> None:
        response, reading = self.response, self.reading
        status = response.status
        if status >= 300:
            self._close(stamp, self._http_failure())
            return
        if self.is_event_stream:
            last_events = self.decoder.end()
            if last_events:
                reading.feed(last_events, stamp)
        elif self.body_parts:
            feed_whole_body(reading, b"".join(self.body_parts), stamp, self.stream)
            if reading.first_token >= 0:
                self.client_lag = read_at - stamp
        failure = reading.judge(True, response.until_close, self.is_event_stream)
        self._close(stamp, failure)

    def _http_failure(self) -> Failure:
        response = self.response
        return http_failure(response.status, response.headers, b"".join(self.body_parts))

    def _close(self, stamp: int, failure: Failure | None) -> None:
        self.done = stamp
        self.failure = failure

    def report_completion(self) -> None:
        """Pass the Completion to `on_done`, only once. The caller has freed the connection before."""
        if not self.is_reported:
            self.is_reported = True
            self.on_done(self.completion())

    def completion(self) -> Completion:
        """What was observed, once it is over."""
        reading, response = self.reading, self.response
        texts, reasoning_texts = reading.pieces, reading.reasoning_pieces
        server_timing = reading.server_timing  # of its events, and of the head of the answer
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
            first_event=reading.first_event,
            first_token=(
                reading.first_token if reading.unknown_outputs < UNKNOWN_OUTPUTS else NEVER
            ),
            first_answer=reading.first_answer,
            last_token=reading.last_token,
            end=reading.end,
            done=self.done,
            output_events=reading.output_events,
            first_event_tokens=reading.first_event_tokens,
            max_gap=reading.max_gap,
            max_gap_error=reading.max_gap_error,
            client_lag=self.client_lag,
            stamp_error=reading.stamp_error,
            last_token_error=reading.last_token_error,
            kernel_stamp=self.kernel_stamp,
            reused=self.reused,
            resent=self.resent,
            http_status=response.status,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            finish_reason=reading.finish_reason,
            usage=reading.usage(),
            text="".join(texts) if texts is not None else None,
            tool_calls=reading.tool_calls() if reading.tool_deltas else (),
            response_id=reading.response_id,
            remark=reading.remark,
            reasoning_text="".join(reasoning_texts) if reasoning_texts is not None else None,
            headers=dict(response.headers) if self.keep_headers else None,
            server_timing=server_timing,
            failure=self.failure,
        )


def is_part_of_event(data: bytes) -> bool:
    """Return True if a chunk begins with these bytes and the first event in it has not ended yet.

    Such bytes are kept until the rest of the chunk arrives, so that the whole chunk can be
    recognised in one pass. Return False as well if that is not certain, or if the bytes are many.
    """
    if not 0 < len(data) < MAX_INCOMPLETE_CHUNK_BYTES:
        return False
    size_line, _, content = data.partition(b"\r\n")
    if not content or b"\n\n" in content or b"\r" in content:
        return False
    size = CHUNK_SIZES.get(size_line) or chunk_size(size_line)
    return len(content) < size


def is_event_stream(status: int, headers: Mapping[str, str]) -> bool:
    """Return True if a response is a stream of events. Upper and lower case are the same."""
    return status < 300 and headers.get("content-type", "")[:17].lower() == EVENT_STREAM


def unsupported_encoding(headers: Mapping[str, str]) -> str:
    """Return the compression of a body, which this client does not request, or "" for none.

    It is in Content-Encoding, or before `chunked` in Transfer-Encoding.
    """
    transfer = headers.get("transfer-encoding", "").lower().removesuffix("chunked").strip(" ,")
    for encoding in (headers.get("content-encoding", ""), transfer):
        if encoding.lower() not in ("", "identity"):
            return encoding[:40]
    return ""


def compression_error_text(encoding: str) -> str:
    """Return the error message for a body that is compressed."""
    return f"a body in Content-Encoding {encoding}, which was not asked for"


def feed_whole_body(
    reading: ResponseReader, body: bytes, stamp: int, stream_requested: bool
) -> None:
    """Read a body that is not a stream of events.

    The time of its first token is known only if no stream was requested: then it is the time of
    the whole response.
    """
    if stream_requested and body.lstrip().startswith((b"data:", b"event:")):
        reading.malformed = "a stream of events whose Content-Type is not text/event-stream"
        reading.first_event = stamp
        return
    reading.feed([body], stamp)
    if reading.first_token < 0:
        return
    reading.first_event_tokens = reading.usage().output or 0
    if stream_requested:
        reading.remark = NOT_STREAMED
        reading.first_token = NEVER


def http_failure(status: int, headers: Mapping[str, str], body: bytes) -> Failure:
    """Return the failure of a response with a status of 300 or more."""
    encoding = unsupported_encoding(headers)
    if 300 <= status < 400:
        text = f"HTTP {status}, a redirect, which a load test does not follow"
        return Failure("malformed", text, status)
    if encoding and (body := _decompress(body)) == b"":
        text = f"HTTP {status}, its body in Content-Encoding {encoding}, which was not asked for"
    else:
        text = error_text(body) or f"HTTP {status} without a body"
    if status == 429:
        return Failure("http_429", text, status)
    return Failure("http_5xx" if status >= 500 else "http_4xx", text, status)


def _decompress(body: bytes) -> bytes:
    """Return the text of an error body in gzip or deflate, or b"" for any other or damaged body."""
    try:
        return zlib.decompressobj(_GZIP_OR_ZLIB).decompress(body, MAX_ERROR_BYTES)
    except zlib.error:
        return b""


if _compiled is not None:
    decode_usage = msgspec.json.Decoder(UsageFields).decode
    _compiled.register_classes(
        Exchange, ResponseParser, SseDecoder, ResponseReader, HEADS, decode_usage, ENDINGS
    )
