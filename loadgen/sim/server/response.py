"""The state of one response: which bytes come next and how it ends, with injected failures.

The server passes the tokens that are due and writes the bytes that it gets back. Every change that
an injected failure makes to the bytes is decided here.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

from loadgen.sim.server.error_responses import format_error, format_error_event
from loadgen.sim.server.fault_injection import InjectedFailure
from loadgen.sim.server.http_messages import JSON, BodyFraming, HttpRequest, format_response_head
from loadgen.sim.server.server_timing import (
    RequestTiming,
    trtllm_timing_event,
    trtllm_timing_headers,
)
from loadgen.sim.server.wire_format import (
    DONE_EVENT,
    LAST_CHUNK,
    TOKEN_WORDS,
    ParsedRequest,
    ResponseFormatter,
    format_chunk,
)

WRONG_COUNT_EXCESS = 7  # tokens that the usage reports too many with the failure `wrong_count`
OVERSIZED_BYTES = 1 << 20  # text that the failure `oversized` adds to an event or body
MALFORMED_CUT = 5  # bytes that are missing at the end of a `malformed` event or body
SSE = "text/event-stream; charset=utf-8"


class Continuation(Enum):
    """What happens on the connection after the bytes of a response that are due are sent."""

    MORE_BYTES = auto()  # the response is not complete: more of it follows when tokens are due
    NEXT_REQUEST = auto()  # the response is complete, and the connection may be used again
    CLOSE = auto()  # the server closes the connection
    RESET = auto()  # the server resets the connection (TCP RST)
    SILENCE = auto()  # nothing more is sent, and the connection stays open


class Output(NamedTuple):
    """The bytes of a response that are due, and what follows them."""

    data: bytes
    continuation: Continuation


class _Events(NamedTuple):
    """The server-sent events of a stream that are due, and what follows them."""

    events: list[bytes]
    continuation: Continuation


_CONTINUATION_AFTER_CUT = {
    "truncate": Continuation.CLOSE,
    "reset_after": Continuation.RESET,
    "stall": Continuation.SILENCE,
}
"""Failures that end a response in the middle, and what follows the end."""


class ResponseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a response is written."""

    formatter: ResponseFormatter
    request_number: int  # counted by arrival
    tokens_per_event: int = 1
    can_report_timing: bool = True
    failure: InjectedFailure | None = None


class PrefillSequence:
    """One of several sequences that a response waits for. It is their key in the engine."""

    # The server handles it like a SimResponse that sends nothing for its tokens.
    is_plain = False
    tokens_sent = 0

    def __init__(self, response: SimResponse) -> None:
        self.response = response
        self.connection = response.connection


class SimResponse:
    """The state of one response.

    Tokens are counted from 0 over the whole response, and an event contains the tokens `start` to
    `stop` (exclusive).

    Attributes:
        connection: Stored for the server.
        engine_request: Stored for the server; it has the time of admission and the cached tokens.
            None if the engine is no physical model.
        is_plain: Tells the server that most token events are exactly `head + word + tail`, which it
            can send without a call of `next_output`.
        failure_name: A name of `fault_injection.FAILURE_EFFECTS`, or "" without a failure.
        first_token_ns: When the first token was sent; 0 if none was.
        sequences: If the response waits for several sequences, those that are not finished.
    """

    def __init__(
        self,
        connection: Any,
        http_request: HttpRequest,
        request: ParsedRequest,
        settings: ResponseSettings,
    ) -> None:
        formatter = settings.formatter
        failure = settings.failure
        self.connection = connection
        self.http_request = http_request
        self.request = request
        self.request_number = settings.request_number
        self.head = formatter.head
        self.tail = formatter.tail
        self.digest = request.digest
        self.failure_name = failure.name if failure else ""
        self.tokens_sent = 0
        self.events_sent = 0
        self.first_token_ns = 0
        self.sequences: list[PrefillSequence] = []
        self.engine_request: Any = None
        self.keep_alive = http_request.keep_alive and self.failure_name not in (
            "close_delimited",
            "connection_close",
        )
        self.is_plain = (
            bool(formatter.head)
            and request.stream
            and request.detokenize
            and not request.continuous_usage
            and failure is None
        )
        self._failure_at = failure.at if failure else None
        self._formatter = formatter
        self._tokens_per_event = settings.tokens_per_event
        wants_timing = http_request.headers.get(b"x-trtllm-return-metrics") == b"1"
        self._reports_timing = settings.can_report_timing and wants_timing

    def opening_output(self) -> Output:
        """Return what is sent as soon as the request is accepted, before any token.

        trtllm-serve sends the head of a stream then, and nothing of any other response. The
        failures `empty` and `reset_before` send a head in both cases, and end the response.
        """
        if self.failure_name not in ("empty", "reset_before") and not self.request.stream:
            return Output(b"", Continuation.MORE_BYTES)
        is_close_delimited = self.failure_name == "close_delimited"
        framing: BodyFraming = "until_close" if is_close_delimited else "chunked"
        head = format_response_head(200, SSE, framing, keep_alive=self.keep_alive)
        if self.failure_name == "empty":
            return Output(head + LAST_CHUNK, Continuation.NEXT_REQUEST)
        if self.failure_name == "reset_before":
            return Output(head, Continuation.RESET)
        return Output(head, Continuation.MORE_BYTES)

    def next_output(self, tokens: int, is_last: bool, now_ns: int) -> Output:
        """Return the bytes of the next `tokens` tokens and, after the last, everything else.

        A response that is not streamed sends nothing before its last token.

        Args:
            tokens: How many tokens the engine has just generated.
            is_last: Whether the last token of the response is among them.
            now_ns: The time at which they are sent.
        """
        if not self.request.stream:
            self.first_token_ns = self.first_token_ns or now_ns
            if is_last:
                return self._whole_output(now_ns)
            return Output(b"", Continuation.MORE_BYTES)
        start = self.tokens_sent
        self.tokens_sent += tokens
        # The first and the last event are not plain: they carry the role and the finish reason.
        if self.is_plain and start and not is_last and self._tokens_per_event == 1:
            self.events_sent += tokens
            return Output(self._plain_events(start), Continuation.MORE_BYTES)
        self.first_token_ns = self.first_token_ns or now_ns
        events, continuation = self._stream_events(start, is_last, now_ns)
        if self.failure_name == "close_delimited":
            # Without chunked framing, the body ends where the connection is closed.
            if continuation is not Continuation.MORE_BYTES:
                continuation = Continuation.CLOSE
            return Output(b"".join(events), continuation)
        data = b"".join([format_chunk(event) for event in events])
        if continuation is Continuation.NEXT_REQUEST:
            data += LAST_CHUNK
        return Output(data, continuation)

    def timing(self, now_ns: int) -> RequestTiming:
        """Return the server timing breakdown of a response that is complete at `now_ns`.

        Only a physical engine knows when it admitted the request; otherwise no time in the queue is
        reported.
        """
        arrival_ns = self.http_request.arrival_ns
        queue_ns = 0
        if self.engine_request is not None:
            queue_ns = max(0, self.engine_request.admitted_ns - arrival_ns)
        return RequestTiming(
            queue_ns=queue_ns,
            arrival_ns=arrival_ns,
            first_token_ns=self.first_token_ns or now_ns,
            done_ns=now_ns,
        )

    def _plain_events(self, start: int) -> bytes:
        """Return the HTTP chunks of the tokens from number `start` on, one event per token.

        The ids of the tokens are those of `wire_format.token_ids`. Its formula is repeated here,
        because this runs once per token.
        """
        digest = self.digest
        return b"".join(
            [
                self.head + TOKEN_WORDS[digest[index & 63] ^ (index >> 6 & 255)] + self.tail
                for index in range(start, self.tokens_sent)
            ]
        )

    def _stream_events(self, start: int, is_last: bool, now_ns: int) -> _Events:
        """Return the events of the tokens that have just been generated, and what follows them.

        An injected failure may end the stream at one of the tokens. Then the events after it are
        missing.

        Args:
            start: The number of the first of these tokens; 0 is the first of the response.
            is_last: Whether the last token of the response is among them. Then the closing events,
                such as the usage and `[DONE]`, are returned, too.
            now_ns: The current time.
        """
        events = [] if start else self._formatter.format_opening()
        for event_start in range(start, self.tokens_sent, self._tokens_per_event):
            event_stop = min(event_start + self._tokens_per_event, self.tokens_sent)
            has_last_token = is_last and event_stop == self.tokens_sent
            if self._is_text_withheld(event_start):
                if has_last_token:
                    events.append(self._event_without_text(event_stop))
                continue
            events.append(self._token_event(event_start, event_stop, has_last_token))
            self.events_sent += 1
            if self._is_failing_event(event_start, event_stop):
                end_of_stream = self._end_of_failed_stream()
                if end_of_stream is not None:
                    return _Events(events + end_of_stream.events, end_of_stream.continuation)
        if not is_last:
            return _Events(events, Continuation.MORE_BYTES)
        return _Events(events + self._closing_events(now_ns), Continuation.NEXT_REQUEST)

    def _is_text_withheld(self, event_start: int) -> bool:
        """Return whether an injected failure keeps the text of an event from being sent.

        `one_event` sends the first event only, and `no_text` none.
        """
        if self.failure_name == "one_event":
            return event_start > 0
        return self.failure_name == "no_text"

    def _event_without_text(self, tokens_sent: int) -> bytes:
        """Return the last token event of a response, with its finish reason but without a token."""
        return self._formatter.format_event(start=tokens_sent, stop=tokens_sent, is_last=True)

    def _is_failing_event(self, start: int, stop: int) -> bool:
        """Return whether the failure happens at one of the tokens of this event."""
        return self._failure_at is not None and start <= self._failure_at < stop

    def _token_event(self, start: int, stop: int, is_last: bool) -> bytes:
        """Return the event with tokens `start` to `stop`, changed by an injected failure if any.

        `oversized` adds text, `malformed` cuts off the end of the JSON, and `no_finish` leaves out
        the finish reason of the last event.
        """
        failure_name = self.failure_name if self._is_failing_event(start, stop) else ""
        filler = b"a" * OVERSIZED_BYTES if failure_name == "oversized" else b""
        has_finish = is_last and self.failure_name != "no_finish"
        event = self._formatter.format_event(start, stop, is_last=has_finish, filler=filler)
        if failure_name == "malformed":
            return event[:-MALFORMED_CUT] + b"\n\n"
        return event

    def _end_of_failed_stream(self) -> _Events | None:
        """Return how the stream ends after the failing token, or None if it goes on.

        It goes on after a failure that changes only its own event, such as `malformed`.
        """
        if self.failure_name in _CONTINUATION_AFTER_CUT:
            return _Events([], _CONTINUATION_AFTER_CUT[self.failure_name])
        if self.failure_name == "error_event":
            events = [format_error_event("simulated error"), DONE_EVENT]
            return _Events(events, Continuation.NEXT_REQUEST)
        if self.failure_name == "engine_error":
            events, ends_properly = self._formatter.format_engine_failure()
            continuation = Continuation.NEXT_REQUEST if ends_properly else Continuation.CLOSE
            return _Events(events, continuation)
        return None

    def _closing_events(self, now_ns: int) -> list[bytes]:
        """Return the events after the last token.

        They are the finish reason and the usage, the end marker `[DONE]`, and the server timing
        breakdown if the client asked for it.
        """
        timing = self.timing(now_ns)
        with_finish = self.failure_name != "no_finish"
        events = self._formatter.format_closing(
            self._usage_tokens(), timing, with_finish=with_finish
        )
        if self.failure_name != "no_done" and self._formatter.end_marker:
            events.append(self._formatter.end_marker)
        if self._reports_timing:
            events.append(trtllm_timing_event(timing))
        return events

    def _usage_tokens(self) -> int:
        """Return the output tokens that the usage reports.

        With the failure `wrong_count` these are the number that the user specified, or else some
        more than were sent.
        """
        if self.failure_name != "wrong_count":
            return self.tokens_sent
        if self._failure_at is None:
            return self.tokens_sent + WRONG_COUNT_EXCESS
        return self._failure_at

    def _whole_output(self, now_ns: int) -> Output:
        """Return a complete response that is not streamed.

        Failures that are defined for streams are applied in a similar way: a cut, for example, ends
        the response in the middle of its body.
        """
        if self.failure_name in ("error_event", "engine_error"):
            return self._engine_error_output()
        self.tokens_sent = self.request.output_tokens
        self.events_sent = 1
        timing = self.timing(now_ns)
        body = self._whole_body(timing)
        is_close_delimited = self.failure_name == "close_delimited"
        head = format_response_head(
            200,
            JSON,
            "until_close" if is_close_delimited else len(body),
            headers=tuple(trtllm_timing_headers(timing).items()) if self._reports_timing else (),
            keep_alive=self.keep_alive,
        )
        if self.failure_name in _CONTINUATION_AFTER_CUT:
            return Output(head + body[: len(body) // 2], _CONTINUATION_AFTER_CUT[self.failure_name])
        continuation = Continuation.CLOSE if is_close_delimited else Continuation.NEXT_REQUEST
        return Output(head + body, continuation)

    def _engine_error_output(self) -> Output:
        """Return the error response of an engine that fails before a response is complete."""
        self.tokens_sent = self.request.output_tokens
        self.events_sent = 1
        body = format_error(self._formatter.flavor, "the simulated engine failed", 500)
        head = format_response_head(500, JSON, len(body), keep_alive=self.keep_alive)
        return Output(head + body, Continuation.NEXT_REQUEST)

    def _whole_body(self, timing: RequestTiming) -> bytes:
        """Return the JSON body of a response that is not streamed, changed by a failure if any.

        `malformed` cuts off its end, and `oversized` makes its first text very long.
        """
        with_finish = self.failure_name != "no_finish"
        body = self._formatter.format_body(self._usage_tokens(), timing, with_finish=with_finish)
        if self.failure_name == "malformed":
            return body[:-MALFORMED_CUT]
        if self.failure_name == "oversized":
            text_start = b'":"'  # the end of a key and the start of its text
            return body.replace(text_start, text_start + b"a" * OVERSIZED_BYTES, 1)
        return body
