"""One request and its answer, without IO: takes the bytes of the answer with their stamps, makes a `Completion`.

This module uses no socket and no clock.
"""

from __future__ import annotations

from collections.abc import Callable

from ..dialects.reader import ERROR_TEXT_CHARS, Flow, Reading, error_text
from ..dialects.sse import Decoder, EventTooLarge
from ..request import NEVER, Completion, Failure, Request
from .http1 import Malformed, Response

MAX_WHOLE_BYTES = 64 << 20  # an answer that is not a stream is kept until it is complete
MAX_ERROR_BYTES = 64 << 10

OnDone = Callable[[Completion], None]


class Exchange:
    """The state of one request, from sending to its Completion.

    The pool sets `ready`, `sent` and `bytes_sent`, calls `arrived` for each read and `ended` if the connection ends,
    and then calls `tell` once. All instants are monotonic ns.
    """

    __slots__ = (
        "awaiting_output",
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
        "flow",
        "head",
        "is_event_stream",
        "keep_headers",
        "keep_text",
        "kernel_stamp",
        "on_done",
        "over",
        "payload",
        "progress",
        "reading",
        "ready",
        "request",
        "resent",
        "response",
        "reused",
        "sent",
        "sink",
        "stream",
        "tries",
    )

    def __init__(
        self,
        request: Request | None,
        head: bytes,
        payload: bytes,
        due: int,
        on_done: OnDone,
        flow: Flow,
        *,
        stream: bool,
        keep_text: bool = False,
        keep_headers: bool = False,
        sink: Callable[[str, str, int], None] | None = None,
    ) -> None:
        self.request = request
        self.head = head
        self.payload = payload
        self.due = due
        self.on_done = on_done
        self.flow = flow
        self.stream = stream
        self.keep_text = keep_text
        self.keep_headers = keep_headers
        self.sink = sink
        self.connection: object | None = None  # the connection that carries it now
        self.awaiting_output: set[object] | None = None  # the wire's set of requests without output, once it is in it
        self.over = False
        self.done = NEVER
        self.failure: Failure | None = None
        self.resent = 0
        self.tries = 0  # addresses tried
        self.ready = NEVER
        self.deadline = 0
        self.bytes_sent = self.bytes_received = 0
        self.reused = False
        self.fresh()

    def fresh(self) -> None:
        """Reset what is known of the answer, before the request is sent (or sent again)."""
        self.sent = self.first_byte = NEVER
        self.client_lag = 0
        self.kernel_stamp = False
        self.progress = 0
        self.is_event_stream = False
        self.response = Response()
        self.decoder = Decoder()
        self.reading = Reading(self.flow, self.keep_text, self.sink)
        self.body_parts: list[bytes] = []

    def arrived(self, data: bytes, stamp: int, read_at: int, empty_at: int, from_kernel: bool) -> bool:
        """Process the bytes of one read. Returns True when the answer is over.

        `stamp`: when they arrived. `read_at`: when they were read. `empty_at`: the last instant at which the socket
        was known to be empty. `from_kernel`: the kernel made the stamp.
        """
        response = self.response
        self.bytes_received += len(data)
        try:
            body_parts = response.feed(data)
            if self.first_byte < 0 and response.status:
                self.first_byte = stamp
                self.kernel_stamp = from_kernel
                content_type = response.headers.get("content-type", "")
                self.is_event_stream = response.status < 300 and content_type.startswith("text/event-stream")
            if body_parts:
                body_part = body_parts[0] if len(body_parts) == 1 else b"".join(body_parts)
                if self.is_event_stream:
                    events = self.decoder.feed(body_part)
                    if events:
                        reading = self.reading
                        if reading.first_token < 0:
                            earliest = empty_at if empty_at > self.sent else self.sent  # not before it was sent
                            reading.take(events, stamp, earliest, self._uncertain_events(len(events), len(body_parts)))
                            if reading.first_token >= 0:
                                self.client_lag = read_at - stamp
                                if self.awaiting_output is not None:
                                    self.awaiting_output.discard(self)
                        else:
                            reading.take(events, stamp, empty_at)
                        self.progress = read_at
                else:
                    self._keep_body(body_part)
        except (Malformed, EventTooLarge) as error:
            self._close(stamp, Failure("malformed", str(error), response.status))
            return True
        if response.complete:
            self._complete(stamp, read_at, empty_at)
            return True
        return False

    def _uncertain_events(self, events: int, body_parts: int) -> int:
        """The number of events in this read for which the stamp may be too late: it is the newest packet's stamp.

        One chunk of the body is taken as one write of the server, whatever it holds. With several chunks, only the
        last event is certain to have come with the last packet; if bytes of a further event follow it, none is.
        """
        if self.decoder.pending or not self.response.between_chunks:
            return events
        return 0 if body_parts == 1 else events - 1

    def ended(self, stamp: int, reset: str) -> None:
        """The connection ended, and so does the request. `reset`: the error's text, "" after a regular close."""
        response = self.response
        if not reset and response.end_of_file():
            self._complete(stamp, stamp, stamp)
        elif response.status >= 300:  # an error status of the server, even if its body is cut short
            self._close(stamp, _http_failure(response.status, b"".join(self.body_parts)))
        elif self.reading.error:  # the server sent an error event before it closed
            self._close(stamp, Failure("error_event", self.reading.error[:ERROR_TEXT_CHARS], response.status))
        elif response.status and not reset:
            self._close(stamp, Failure("truncated", self._where_it_ended(), response.status))
        elif response.status:
            self._close(stamp, Failure("reset", f"{reset}, {self._where_it_ended()}", response.status))
        else:
            self._close(stamp, Failure("reset", reset or "closed before any byte of an answer"))

    def _where_it_ended(self) -> str:
        return f"the body ended early, after {self.reading.output_events} output events"

    def _keep_body(self, body_part: bytes) -> None:
        refused = self.response.status >= 300
        if sum(map(len, self.body_parts)) + len(body_part) <= (MAX_ERROR_BYTES if refused else MAX_WHOLE_BYTES):
            self.body_parts.append(body_part)
        elif not refused:  # of an error body, the beginning is enough
            raise Malformed(f"a body of more than {MAX_WHOLE_BYTES} bytes")

    def _complete(self, stamp: int, read_at: int, empty_at: int) -> None:
        response, reading = self.response, self.reading
        status = response.status
        if status >= 300:
            self._close(stamp, _http_failure(status, b"".join(self.body_parts)))
            return
        if self.is_event_stream:
            last_events = self.decoder.end()
            if last_events:
                reading.take(last_events, stamp, empty_at)
        elif self.body_parts:
            reading.take([b"".join(self.body_parts)], stamp, empty_at)
            if reading.first_token >= 0:
                self.client_lag = read_at - stamp
                reading.first_event_tokens = reading.usage().output or 0  # the whole answer came at once
        failure = reading.judge(True, response.until_close, self.is_event_stream)
        self._close(stamp, failure)

    def _close(self, stamp: int, failure: Failure | None) -> None:
        self.done = stamp
        self.failure = failure

    def tell(self) -> None:
        """Pass the Completion to `on_done`, only once. The caller has freed the connection before."""
        if self.over:
            return
        self.over = True
        reading, response = self.reading, self.response
        texts, reasoning_texts = reading.pieces, reading.reasoning_pieces
        self.on_done(
            Completion(
                request=self.request,
                due=self.due,
                ready=self.ready,
                sent=self.sent,
                first_byte=self.first_byte,
                first_event=reading.first_event,
                first_token=reading.first_token,
                first_answer=reading.first_answer,
                last_token=reading.last_token,
                end=reading.end,
                done=self.done,
                output_events=reading.output_events,
                first_event_tokens=reading.first_event_tokens,
                max_gap=reading.max_gap,
                client_lag=self.client_lag,
                stamp_error=reading.stamp_error,
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
                reasoning_text="".join(reasoning_texts) if reasoning_texts is not None else None,
                headers=response.headers if self.keep_headers else None,
                server_timing=reading.server_timing,
                failure=self.failure,
            )
        )


def _http_failure(status: int, body: bytes) -> Failure:
    text = error_text(body) or f"HTTP {status} without a body"
    if status == 429:
        return Failure("http_429", text, status)
    if status >= 500:
        return Failure("http_5xx", text, status)
    if status >= 400:
        return Failure("http_4xx", text, status)
    return Failure("malformed", f"HTTP {status}, a redirect, which a load test does not follow", status)
