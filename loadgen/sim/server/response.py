"""The state of one response: which bytes come next and how it ends, with injected failures.

The server passes the tokens that are due and writes the bytes that it gets back. Every change that
an injected failure makes to the bytes is decided here.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loadgen.sim.server.error_responses import format_error, format_error_event
from loadgen.sim.server.fault_injection import InjectedFailure
from loadgen.sim.server.http_messages import (
    JSON,
    BodyFraming,
    Headers,
    HttpRequest,
    format_response_head,
)
from loadgen.sim.server.server_timing import (
    RequestTiming,
    build_trtllm_timing_headers,
    format_trtllm_timing_event,
)
from loadgen.sim.server.wire_format import (
    DONE_EVENT,
    LAST_CHUNK,
    ParsedRequest,
    ResponseFormatter,
    format_chunk,
    token_word,
    token_words,
)

if TYPE_CHECKING:
    from loadgen.sim.engine.implementation import SimRequest

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
"""Failures that cut a response, so that the rest of it is never sent, and what follows the cut."""

_ENGINE_FAILURES = ("error_event", "engine_error")
"""Failures that replace the rest of a response by the report of an error."""

_FAILURES_ENDING_STREAM = frozenset((*_CONTINUATION_AFTER_CUT, *_ENGINE_FAILURES))


class ResponseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a response is written.

    Attributes:
        formatter: Formats the response in the wire format of its API.
        request_number: The number of the request, counted by arrival.
        tokens_per_event: Tokens of each event after the first.
        can_report_timing: Whether the version of the server reports timings in responses.
        failure: The injected failure, if any.
    """

    formatter: ResponseFormatter
    request_number: int
    tokens_per_event: int = 1
    can_report_timing: bool = True
    failure: InjectedFailure | None = None


class PrefillSequence:
    """One of several sequences that a non-generative response waits for.

    It is the key of the sequence in the engine, where a SimResponse is the key of all other
    requests.
    """

    def __init__(self, response: SimResponse) -> None:
        self.response = response
        self.connection = response.connection


def _has_plain_events(
    formatter: ResponseFormatter, request: ParsedRequest, failure: InjectedFailure | None
) -> bool:
    """Return whether the token events in the middle of a response are plain.

    Plain events differ from each other only in their word, so they consist of that word between
    bytes that were encoded once (`chunk_prefix`). Five things prevent this: an API that numbers its
    events, so that there is no such prefix, token ids instead of words, a usage in each event, an
    injected failure, and a right answer, whose words have different lengths. The first and the last
    event of a response are never plain.
    """
    has_constant_bytes = formatter.chunk_prefix != b""
    has_only_words = request.detokenize and not request.continuous_usage
    has_equal_lengths = has_only_words and not request.answer_tokens
    return request.stream and has_constant_bytes and has_equal_lengths and failure is None


def _keeps_connection(http_request: HttpRequest, failure_name: str) -> bool:
    """Return whether the connection stays open after the response.

    Two injected failures close it, although the client wants to go on.
    """
    return http_request.keep_alive and failure_name not in ("close_delimited", "connection_close")


class SimResponse:
    """The state of one response.

    Tokens are counted from 0 over the whole response, and an event contains the tokens `start` to
    `stop` (exclusive).

    Attributes:
        connection: The connection of the client. It is stored for the server, and has no type here
            because this module does not depend on sockets.
        http_request: The request on the level of HTTP.
        request: The parsed request.
        request_number: The number of the request, counted by arrival.
        digest: Determines the words of the completion. See `wire_format.token_ids`.
        tokens_sent: How many tokens have been sent.
        events_sent: How many token events have been sent.
        first_token_ns: When the first token was sent; 0 if none was.
        keep_alive: Whether the connection stays open after the response.
        failure_name: A name of `fault_injection.FAILURE_EFFECTS`, or "" without a failure.
        sequences: If the response waits for several sequences, those that are not finished.
        engine_request: The request in the engine, with the time of admission and the cached tokens.
            None if the engine is no physical model.
        has_plain_events: Whether all token events but the first and the last are plain: they differ
            only in their word. The server sends them by `build_plain_event` instead of
            `build_next_output`, because this runs once per token.
    """

    def __init__(
        self,
        connection: Any,
        http_request: HttpRequest,
        request: ParsedRequest,
        settings: ResponseSettings,
    ) -> None:
        """Create a response of which nothing has been sent.

        Args:
            connection: The connection of the client.
            http_request: The request on the level of HTTP.
            request: The parsed request.
            settings: How the response is written, and its injected failure.
        """
        # The request that is answered.
        self.connection = connection
        self.http_request = http_request
        self.request = request
        self.request_number = settings.request_number
        self.digest = request.digest

        # What has been sent so far, and what the response waits for in the engine.
        self.tokens_sent = 0
        self.events_sent = 0
        self.first_token_ns = 0
        self.sequences: list[PrefillSequence] = []
        self.engine_request: SimRequest | None = None

        # The injected failure. Most failures happen at a token, whose index is the argument. For
        # `wrong_count`, the argument is the number of tokens to report.
        failure = settings.failure
        self.failure_name = failure.name if failure else ""
        self._failure_argument = failure.argument if failure else None
        self._is_close_delimited = self.failure_name == "close_delimited"
        self.keep_alive = _keeps_connection(http_request, self.failure_name)

        # How the bytes are formatted.
        self._formatter = settings.formatter
        self._tokens_per_event = settings.tokens_per_event
        self._chunk_prefix = self._formatter.chunk_prefix
        self._chunk_suffix = self._formatter.chunk_suffix
        self.has_plain_events = _has_plain_events(self._formatter, request, failure)
        wants_timing = http_request.headers.get(b"x-trtllm-return-metrics") == b"1"
        self._reports_timing = settings.can_report_timing and wants_timing

    def build_opening_output(self) -> Output:
        """Return what is sent as soon as the request is accepted, before any token.

        A stream begins with its head. A response that is not streamed sends nothing yet, as in
        trtllm-serve, because its head has the length of the whole body. The injected failures
        `empty` and `reset_before` send the head of a stream in any case, and end the response.
        """
        if self.failure_name == "empty":
            return Output(self._format_stream_head() + LAST_CHUNK, Continuation.NEXT_REQUEST)
        if self.failure_name == "reset_before":
            return Output(self._format_stream_head(), Continuation.RESET)
        if self.request.stream:
            return Output(self._format_stream_head(), Continuation.MORE_BYTES)
        return Output(b"", Continuation.MORE_BYTES)

    def _format_stream_head(self) -> bytes:
        """Return the status line and the headers of a stream."""
        framing: BodyFraming = "until_close" if self._is_close_delimited else "chunked"
        return format_response_head(200, SSE, framing, keep_alive=self.keep_alive)

    def build_next_output(self, tokens: int, is_last: bool, now_ns: int) -> Output:
        """Return the bytes to send after the engine has generated some tokens.

        A stream sends these tokens, and after the last one its end. A response that is not streamed
        sends nothing before its last token, and then everything.

        Args:
            tokens: How many tokens the engine has just generated.
            is_last: Whether the last token of the response is among them.
            now_ns: The time at which they are sent.
        """
        if not self.first_token_ns:
            self.first_token_ns = now_ns
        if self.request.stream:
            return self._build_stream_output(tokens, is_last, now_ns)
        if is_last:
            return self._build_whole_output(now_ns)
        return Output(b"", Continuation.MORE_BYTES)

    def _build_stream_output(self, tokens: int, is_last: bool, now_ns: int) -> Output:
        """Return the bytes of a stream after the engine has generated some tokens.

        In most streams, all events but the first and the last are plain: they have one token each
        (a word), and only this word differs. Such events are formatted in a faster way.

        Args:
            tokens: How many tokens the engine has just generated.
            is_last: Whether the last token of the response is among them.
            now_ns: The time at which they are sent.
        """
        start = self.tokens_sent
        self.tokens_sent += tokens

        # The first event has the role and the last one the finish reason.
        is_in_middle = start > 0 and not is_last
        are_plain = self.has_plain_events and self._tokens_per_event == 1 and is_in_middle
        if are_plain:
            self.events_sent += tokens  # one event per token
            return Output(self._format_plain_events(start), Continuation.MORE_BYTES)

        events, continuation = self._build_stream_events(start, is_last, now_ns)
        return self._format_output(events, continuation)

    def build_plain_event(self) -> bytes:
        """Return the next token as an HTTP chunk, and count the token and its event.

        This does the same as `build_next_output`, in less time. It may only be called if
        `has_plain_events` is true: the events between the first and the last one differ only in
        their word. The token must be neither the first nor the last one of the response.
        """
        word = token_word(self.digest, self.tokens_sent)
        self.tokens_sent += 1
        self.events_sent += 1
        return self._chunk_prefix + word + self._chunk_suffix

    def _format_output(self, events: list[bytes], continuation: Continuation) -> Output:
        """Return events of a stream as bytes on the connection: each one as an HTTP chunk.

        With the injected failure `close_delimited`, the events are sent without chunks. The server
        then closes the connection after the last one, which marks the end of the body.

        Args:
            events: The events that are due.
            continuation: What follows them. MORE_BYTES means that more events follow.
        """
        if self._is_close_delimited:
            data = b"".join(events)
            has_more_events = continuation is Continuation.MORE_BYTES
            if has_more_events:
                return Output(data, Continuation.MORE_BYTES)
            return Output(data, Continuation.CLOSE)

        chunks = [format_chunk(event) for event in events]
        if continuation is Continuation.NEXT_REQUEST:
            chunks.append(LAST_CHUNK)

        return Output(b"".join(chunks), continuation)

    def build_timing(self, now_ns: int) -> RequestTiming:
        """Return the server timing breakdown of a response that is complete at `now_ns`.

        Only a physical engine knows when it admitted the request. With another engine, the time in
        the queue is reported as 0.
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

    def _format_plain_events(self, start: int) -> bytes:
        """Return the HTTP chunks of the tokens from number `start` to `tokens_sent`.

        Each token has an event of its own, which differs from the others only in its word. So it
        needs no JSON encoding.
        """
        token_texts = token_words(self.digest, start, self.tokens_sent)
        between_words = self._chunk_suffix + self._chunk_prefix
        return self._chunk_prefix + between_words.join(token_texts) + self._chunk_suffix

    def _build_stream_events(self, start: int, is_last: bool, now_ns: int) -> _Events:
        """Return the events of the tokens that have just been generated, and what follows them.

        The first token comes after the opening events of the API, such as the role. The last one is
        followed by closing events, such as the usage. An injected failure can end the stream after
        one of the tokens.

        Args:
            start: The number of the first of these tokens; 0 is the first of the response. The
                number after the last of them is `tokens_sent`.
            is_last: Whether the last token of the response is among them.
            now_ns: The current time.
        """
        events = self._formatter.format_opening() if start == 0 else []
        events += self._build_token_events(start, is_last)

        if self._is_stream_ended_by_failure(start, self.tokens_sent):
            end_of_stream = self._build_end_after_failure()
            return _Events(events + end_of_stream.events, end_of_stream.continuation)

        if is_last:
            closing_events = self._format_closing_events(now_ns)
            return _Events(events + closing_events, Continuation.NEXT_REQUEST)

        return _Events(events, Continuation.MORE_BYTES)

    def _build_token_events(self, start: int, is_last: bool) -> list[bytes]:
        """Return the events with the newly generated tokens, and count them in `events_sent`.

        Two kinds of injected failures change the events:

        - `one_event` and `no_text` leave out the text. Events without text are not sent. Only the
          last event of the response is always sent, because it has the finish reason.
        - Others end the stream at a certain token, so that no event follows.

        Args:
            start: The index of the first new token in the response. The index after the last one is
                `tokens_sent`.
            is_last: Whether the new tokens include the last one of the response.
        """
        events = []
        for event_start in range(start, self.tokens_sent, self._tokens_per_event):
            event_stop = min(event_start + self._tokens_per_event, self.tokens_sent)
            is_last_event = is_last and event_stop == self.tokens_sent

            if self._is_text_withheld(event_start):
                if is_last_event:
                    # `events_sent` counts events with tokens, and this one has none.
                    events.append(self._format_event_without_text(event_stop))
            else:
                events.append(self._format_token_event(event_start, event_stop, is_last_event))
                self.events_sent += 1

            if self._is_stream_ended_by_failure(event_start, event_stop):
                break

        return events

    def _is_text_withheld(self, event_start: int) -> bool:
        """Return whether an injected failure leaves out the text of the event at this token.

        `one_event` sends the text of the first event only, and `no_text` no text.
        """
        if self.failure_name == "one_event":
            return event_start > 0
        return self.failure_name == "no_text"

    def _format_event_without_text(self, tokens_sent: int) -> bytes:
        """Return the last token event of a response, with its finish reason but without a token."""
        return self._formatter.format_event(start=tokens_sent, stop=tokens_sent, is_last=True)

    def _contains_failing_token(self, start: int, stop: int) -> bool:
        """Return whether the injected failure happens at one of the tokens `start` to `stop`."""
        return self._failure_argument is not None and start <= self._failure_argument < stop

    def _is_stream_ended_by_failure(self, start: int, stop: int) -> bool:
        """Return whether the injected failure ends the stream after the event with these tokens.

        Other failures that happen at a token, such as `malformed`, change only its event.
        """
        if self.failure_name not in _FAILURES_ENDING_STREAM:
            return False
        return self._contains_failing_token(start, stop)

    def _format_token_event(self, start: int, stop: int, is_last: bool) -> bytes:
        """Return the event with tokens `start` to `stop`, changed by an injected failure if any.

        `oversized` adds text, `malformed` cuts off the end of the JSON, and `no_finish` formats the
        last event like all others, so that it has no finish reason.
        """
        has_failure = self._contains_failing_token(start, stop)
        is_oversized = has_failure and self.failure_name == "oversized"
        is_malformed = has_failure and self.failure_name == "malformed"
        event = self._formatter.format_event(
            start,
            stop,
            is_last=is_last and self.failure_name != "no_finish",
            filler=b"a" * OVERSIZED_BYTES if is_oversized else b"",
        )
        if is_malformed:
            return event[:-MALFORMED_CUT] + b"\n\n"

        return event

    def _build_end_after_failure(self) -> _Events:
        """Return the last events of a stream that an injected failure ends, and what follows them.

        What follows concerns the connection: it serves the next request, is closed or reset, or
        stays silent. There are three kinds of failures:

        - Cuts (`truncate`, `reset_after`, `stall`): no more events are sent.
        - `error_event`: an error is sent, and the stream ends as usual.
        - `engine_error`: what is sent depends on the API. Some servers close the connection when
          their engine fails, without the end of the body.
        """
        is_cut = self.failure_name in _CONTINUATION_AFTER_CUT
        if is_cut:
            return _Events([], _CONTINUATION_AFTER_CUT[self.failure_name])

        if self.failure_name == "error_event":
            events = [format_error_event("simulated error"), DONE_EVENT]
            return _Events(events, Continuation.NEXT_REQUEST)

        events, has_end_of_body = self._formatter.format_engine_failure()
        if has_end_of_body:
            return _Events(events, Continuation.NEXT_REQUEST)

        return _Events(events, Continuation.CLOSE)

    def _format_closing_events(self, now_ns: int) -> list[bytes]:
        """Return the events after the last token.

        They are the finish reason and the usage, the end marker `[DONE]`, and the server timing
        breakdown if the client asked for it.
        """
        timing = self.build_timing(now_ns)
        has_finish_reason = self.failure_name != "no_finish"

        events = self._formatter.format_closing(
            self._count_reported_tokens(), timing, has_finish_reason=has_finish_reason
        )
        if self.failure_name != "no_done" and self._formatter.end_marker:
            events.append(self._formatter.end_marker)

        if self._reports_timing:
            events.append(format_trtllm_timing_event(timing))

        return events

    def _count_reported_tokens(self) -> int:
        """Return the number of output tokens that the usage reports.

        It is wrong with the injected failure `wrong_count`. The user can specify the number, as in
        `wrong_count@20`. Otherwise it is WRONG_COUNT_EXCESS more than were sent.
        """
        if self.failure_name != "wrong_count":
            return self.tokens_sent
        specified_count = self._failure_argument
        if specified_count is None:
            return self.tokens_sent + WRONG_COUNT_EXCESS
        return specified_count

    def _build_whole_output(self, now_ns: int) -> Output:
        """Return a complete response that is not streamed, and count its tokens as sent.

        It consists of the head and the JSON body. An injected failure can replace it by an error
        response, or cut the body in the middle. The head then still has the full length.
        """
        self.tokens_sent = self.request.output_tokens
        self.events_sent = 1  # the whole response counts as one event
        if self.failure_name in _ENGINE_FAILURES:
            return self._build_engine_error_output()

        timing = self.build_timing(now_ns)
        body = self._format_whole_body(timing)
        head = self._format_whole_head(len(body), timing)

        is_cut = self.failure_name in _CONTINUATION_AFTER_CUT
        if is_cut:
            body = body[: len(body) // 2]

        return Output(head + body, self._find_continuation_after_body())

    def _find_continuation_after_body(self) -> Continuation:
        """Return what follows the body of a response that is not streamed, on its connection."""
        if self.failure_name in _CONTINUATION_AFTER_CUT:
            return _CONTINUATION_AFTER_CUT[self.failure_name]
        if self._is_close_delimited:
            return Continuation.CLOSE
        return Continuation.NEXT_REQUEST

    def _format_whole_head(self, body_size: int, timing: RequestTiming) -> bytes:
        """Return the head of a response that is not streamed.

        It has the server timing breakdown if the client asked for it.
        """
        framing: BodyFraming = "until_close" if self._is_close_delimited else body_size
        timing_headers: Headers = ()
        if self._reports_timing:
            timing_headers = tuple(build_trtllm_timing_headers(timing).items())
        return format_response_head(
            200, JSON, framing, headers=timing_headers, keep_alive=self.keep_alive
        )

    def _build_engine_error_output(self) -> Output:
        """Return the error response of an engine that fails before a response is complete."""
        body = format_error(self._formatter.flavor, "the simulated engine failed", 500)
        head = format_response_head(500, JSON, len(body), keep_alive=self.keep_alive)
        return Output(head + body, Continuation.NEXT_REQUEST)

    def _format_whole_body(self, timing: RequestTiming) -> bytes:
        """Return the JSON body of a response that is not streamed, changed by a failure if any.

        `malformed` cuts off its end, and `oversized` makes one of its texts very long.
        """
        body = self._formatter.format_body(
            self._count_reported_tokens(),
            timing,
            has_finish_reason=self.failure_name != "no_finish",
        )
        if self.failure_name == "malformed":
            return body[:-MALFORMED_CUT]
        if self.failure_name == "oversized":
            return _lengthen_first_text(body, OVERSIZED_BYTES)

        return body


def _lengthen_first_text(json_body: bytes, added_bytes: int) -> bytes:
    """Return a JSON object in which the first text is longer: `{"id":"x"` becomes `{"id":"aax"`.

    The JSON has no spaces. So the first `":"` in it is the end of a key and the start of its text.
    """
    before_text, text_start, rest = json_body.partition(b'":"')
    return before_text + text_start + b"a" * added_bytes + rest
