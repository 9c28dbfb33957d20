"""One request and its answer, sans IO: arrived bytes with their stamps in, a `Completion` out. No socket here."""

from __future__ import annotations

from collections.abc import Callable

from ..dialects.reader import ERROR_TEXT_CHARS, Flow, Reading, error_text
from ..dialects.sse import Decoder, EventTooLarge
from ..request import NEVER, Completion, Failure, Request
from .http1 import Malformed, Response

MAX_WHOLE_BYTES = 64 << 20  # an answer that is not a stream is kept until it is whole
MAX_ERROR_BYTES = 64 << 10

OnDone = Callable[[Completion], None]


class Exchange:
    """One request's life. The client sets `ready`, `sent`, `bytes_sent`, calls `arrived` and `ended`, then `tell`."""

    __slots__ = (
        "awaited",
        "bytes_received",
        "bytes_sent",
        "client_lag",
        "deadline",
        "decoder",
        "done",
        "due",
        "failure",
        "first_byte",
        "flow",
        "head",
        "is_events",
        "keep_headers",
        "keep_text",
        "kernel",
        "line",
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
        "whole",
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
        self.line: object | None = None  # the connection, while it has one
        self.awaited: set[object] | None = None  # where it stands while it is without its first output
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
        """Forget what was heard of it: it is about to be sent (again)."""
        self.sent = self.first_byte = NEVER
        self.client_lag = 0
        self.kernel = False
        self.progress = 0
        self.is_events = False
        self.response = Response()
        self.decoder = Decoder()
        self.reading = Reading(self.flow, self.keep_text, self.sink)
        self.whole: list[bytes] = []

    def arrived(self, data: bytes, stamp: int, read: int, base: int, kernel: bool) -> bool:
        """Bytes stamped `stamp` and read at `read`; at `base` the socket was empty. True: the answer is over."""
        response = self.response
        self.bytes_received += len(data)
        try:
            pieces = response.feed(data)
            if self.first_byte < 0 and response.status:
                self.first_byte = stamp
                self.kernel = kernel
                kind = response.headers.get("content-type", "")
                self.is_events = response.status < 300 and kind.startswith("text/event-stream")
            if pieces:
                piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                if self.is_events:
                    events = self.decoder.feed(piece)
                    if events:
                        reading = self.reading
                        if reading.first_token < 0:
                            since = base if base > self.sent else self.sent  # nothing of it came before it was sent
                            reading.take(events, stamp, since, self._unsure(len(events), len(pieces)))
                            if reading.first_token >= 0:
                                self.client_lag = read - stamp
                                if self.awaited is not None:
                                    self.awaited.discard(self)
                        else:
                            reading.take(events, stamp, base)
                        self.progress = read
                else:
                    self._keep(piece)
        except (Malformed, EventTooLarge) as error:
            self._close(stamp, Failure("malformed", str(error), response.status))
            return True
        if response.complete:
            self._complete(stamp, read, base)
            return True
        return False

    def _unsure(self, events: int, pieces: int) -> int:
        """How many of a read's events the stamp may be too late for: it is that of the newest packet.

        One chunk of the body is one write of the server, whatever it holds. Of several chunks only the last event is
        sure to have come with the last packet, and not even that when bytes of a further one follow it.
        """
        if self.decoder.pending or not self.response.between_chunks:
            return events
        return 0 if pieces == 1 else events - 1

    def ended(self, stamp: int, reset: str) -> None:
        """The connection is gone; `reset` says how unless it was closed in good order. It is over."""
        response = self.response
        if not reset and response.end_of_file():
            self._complete(stamp, stamp, stamp)
        elif response.status >= 300:  # the server's word, whole or not
            self._close(stamp, _refusal(response.status, b"".join(self.whole)))
        elif self.reading.error:  # the server said why before it cut the line
            self._close(stamp, Failure("error_event", self.reading.error[:ERROR_TEXT_CHARS], response.status))
        elif response.status and not reset:
            self._close(stamp, Failure("truncated", self._where(), response.status))
        elif response.status:
            self._close(stamp, Failure("reset", f"{reset}, {self._where()}", response.status))
        else:
            self._close(stamp, Failure("reset", reset or "closed before any byte of an answer"))

    def _where(self) -> str:
        return f"the body ended early, after {self.reading.output_events} output events"

    def _keep(self, piece: bytes) -> None:
        refused = self.response.status >= 300
        if sum(map(len, self.whole)) + len(piece) <= (MAX_ERROR_BYTES if refused else MAX_WHOLE_BYTES):
            self.whole.append(piece)
        elif not refused:  # of an error the first words are enough
            raise Malformed(f"a body of more than {MAX_WHOLE_BYTES} bytes")

    def _complete(self, stamp: int, read: int, base: int) -> None:
        response, reading = self.response, self.reading
        status = response.status
        if status >= 300:
            self._close(stamp, _refusal(status, b"".join(self.whole)))
            return
        if self.is_events:
            tail = self.decoder.end()
            if tail:
                reading.take(tail, stamp, base)
        elif self.whole:
            reading.take([b"".join(self.whole)], stamp, base)
            if reading.first_token >= 0:
                self.client_lag = read - stamp
                reading.first_event_tokens = reading.usage().output or 0  # all of it came at once
        failure = reading.judge(True, response.until_close, self.is_events)
        self._close(stamp, failure)

    def _close(self, stamp: int, failure: Failure | None) -> None:
        self.done = stamp
        self.failure = failure

    def tell(self) -> None:
        """Give the Completion to whoever sent it. Once; whoever calls this has already freed the connection."""
        if self.over:
            return
        self.over = True
        reading, response = self.reading, self.response
        pieces, reasons = reading.pieces, reading.reasoning_pieces
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
                kernel_stamp=self.kernel,
                reused=self.reused,
                resent=self.resent,
                http_status=response.status,
                bytes_sent=self.bytes_sent,
                bytes_received=self.bytes_received,
                finish_reason=reading.finish_reason,
                usage=reading.usage(),
                text="".join(pieces) if pieces is not None else None,
                reasoning_text="".join(reasons) if reasons is not None else None,
                headers=response.headers if self.keep_headers else None,
                server_timing=reading.server_timing,
                failure=self.failure,
            )
        )


def _refusal(status: int, body: bytes) -> Failure:
    text = error_text(body) or f"HTTP {status} without a body"
    if status == 429:
        return Failure("http_429", text, status)
    if status >= 500:
        return Failure("http_5xx", text, status)
    if status >= 400:
        return Failure("http_4xx", text, status)
    return Failure("malformed", f"HTTP {status}, a redirect, which a load test does not follow", status)
