"""Read the events of a response: text, finish reason, usage, errors and the time of each event.

Pure.

One reader serves all APIs, streamed or not, because the events of the others are converted to those
of a chat. A request is `ok` if the framing of HTTP has ended, if there is a finish reason that is
not one of ERROR_ENDINGS, and if there was no error event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import sub
from typing import Any, NamedTuple

import msgspec

from ..request import NEVER, Failure, Usage
from .event_fields import (
    ABSENT,
    EMPTY,
    ERROR_TEXT_CHARS,
    NOT_JSON,
    ChoiceFields,
    DeltaFields,
    EventFields,
    UsageFields,
    decode_any,
    decode_event,
    error_text,
    id_of,
    is_set,
    unknown_text_field,
)
from .event_timeline import EventOrCount
from .implementation import ResponseReaderState, plain_run
from .lenient_decoding import decode_leniently, read_event
from .other_apis import read_other_api, with_choices
from .sse import NamedEvent
from .tool_calls import join_tool_calls

ENDINGS = frozenset(("stop", "length", "tool_calls", "function_call", "content_filter"))
"""The finish reasons of OpenAI. Servers have many others, which are normal ends too."""

ERROR_ENDINGS = frozenset(
    (
        "abort",
        "aborted",
        "cancel",
        "canceled",
        "cancelled",
        "engine_error",
        "error",
        "exception",
        "failed",
        "failure",
        "insufficient_system_resource",  # DeepSeek
        "internal_error",
        "network_error",  # Zhipu: the model failed
        "server_error",
        "timed_out",
        "timeout",
    )
)
"""The finish reasons, in lower case, that state an error."""

UNKNOWN_OUTPUTS = 2
"""So many events with a text in an unknown field are output. One may be a name beside the role."""

HIDDEN_OUTPUT = "have output in the field {!r} of a delta, which is not known here"
NOT_UTF8 = "contain bytes that are not UTF-8; each is read as U+FFFD"
NOT_STREAMED = "were not streamed: one JSON object came although a stream was requested"
"""Remarks about responses that are ok. The subject of each sentence is "N responses"."""

_MAX_FIELD_NAME_CHARS = 60
_MAX_SHOWN_EVENT_BYTES = 120
_FREE_TEMPLATES = 3
_EVENTS_PER_TEMPLATE = 4
"""Templates are learned as long as each one after the first three recognises four plain events."""


class _Output(NamedTuple):
    """What an event contains.

    Attributes:
        has_output: The event has output.
        is_answer: The output is part of the answer, and not reasoning.
    """

    has_output: bool
    is_answer: bool


_ANSWER = _Output(has_output=True, is_answer=True)
_REASONING = _Output(has_output=True, is_answer=False)


class ResponseReader(ResponseReaderState):
    """Reads one response while it arrives.

    Timestamps are monotonic and in ns. The timestamp of an event is that of its read, which is the
    arrival of the newest bytes of that read. An event that came in an earlier packet of the read
    may have arrived at any time since the socket was last known to be empty. The time from there
    to the timestamp is the uncertainty of the timestamp.
    """

    __slots__ = ()

    def feed_with_uncertainty(
        self,
        uncertain: Sequence[EventOrCount],
        certain: Sequence[EventOrCount],
        timestamp: int,
        uncertainty: int,
        *,
        one_write: bool = False,
    ) -> None:
        """Process the events of a read of which some may have arrived earlier.

        The end of a response (finish reason, usage, `[DONE]`) is sent right after its last output,
        or with the next step of the server. If only that follows an output event in its read, the
        first token keeps its uncertainty, the last one is wrong by a mean gap at most, and the
        timeline and the largest gap count the event as exact. Otherwise they would state a property
        of servers, and not of this client.

        Args:
            uncertain: The events that may have arrived earlier than `timestamp`.
            certain: The other events.
            timestamp: The timestamp of the read.
            uncertainty: How much earlier the uncertain events may have arrived, in ns.
            one_write: All events came in one write of the server, so that the timeline and the
                largest gap are exact.
        """
        events_before = self.output_events
        max_gap_before = self.max_gap
        if uncertain:
            self.feed(uncertain, timestamp, uncertainty)
        uncertain_outputs = self.output_events - events_before
        if certain:
            self.feed(certain, timestamp)
        if self.output_events > events_before + uncertain_outputs:
            self.unsure_at = NEVER
        elif uncertain_outputs:
            self.unsure_at = timestamp
            self.unsure_error = uncertainty
            if self.finish_reason:
                uncertain_outputs -= 1
                self.unsure_error = min(uncertainty, self._mean_gap_until(timestamp, uncertainty))
        if uncertain_outputs and not one_write:
            self.timeline.errors.append((uncertainty, uncertain_outputs))
        is_exact = one_write or not uncertain_outputs
        if is_exact and self.max_gap > max_gap_before:
            self.max_gap_error = 0

    def feed(self, events: Sequence[EventOrCount], timestamp: int, uncertainty: int = 0) -> None:
        """Process events that came at `timestamp`, or earlier by at most `uncertainty` ns."""
        if events and self.first_event < 0:
            self.first_event = timestamp
        position = 0
        while position < len(events):
            if self.template is not None:
                items, plain_events = plain_run(events, position, *self.template)
                if items:
                    self.count_plain_events(plain_events, timestamp, uncertainty)
                    position += items
                    continue
            # Counts of plain events come only after a template was learned.
            payload: bytes | NamedEvent = events[position]  # type: ignore[assignment]
            position += 1
            if payload != b"[DONE]":
                self._feed_payload(payload, timestamp, uncertainty)

    def count_plain_events(self, count: int, timestamp: int, uncertainty: int = 0) -> None:
        """Count plain events that came together at `timestamp`.

        They may have arrived earlier by at most `uncertainty` ns.
        """
        if not count:
            return
        gap = timestamp - self.last_token
        if gap > self.max_gap:
            self.max_gap = gap
            self.max_gap_error = uncertainty
        self.timeline.gaps.append(gap)
        self.timeline.instants.append(timestamp)
        if count > 1:
            self.timeline.together.append((timestamp, count - 1))
        self.output_events += count
        self.plain_events += count
        self.last_token = timestamp
        self.end = timestamp

    def count_plain_events_at(self, timestamps: list[int]) -> None:
        """Count plain events that each have an exact timestamp of their own."""
        gaps = list(map(sub, timestamps, [self.last_token, *timestamps]))
        longest_gap = max(gaps)
        if longest_gap > self.max_gap:
            self.max_gap = longest_gap
            self.max_gap_error = 0
        self.timeline.gaps.extend(gaps)
        self.timeline.instants.extend(timestamps)
        self.output_events += len(timestamps)
        self.plain_events += len(timestamps)
        self.last_token = timestamps[-1]
        self.end = timestamps[-1]

    def tool_calls(self) -> tuple[dict[str, str], ...]:
        """Return the tool calls of the response: id, name and arguments (JSON, as text)."""
        return join_tool_calls(self.tool_deltas)

    def usage(self) -> Usage:
        """Return the last usage with output tokens, or else the first one. It may be empty."""
        return self.usage_counts.usage() if self.usage_counts is not None else Usage()

    @property
    def usage_is_absurd(self) -> bool:
        """Whether the server sent a number of output tokens that no response can have."""
        counts = self.usage_counts
        if counts is None:
            return False
        output_tokens = counts.completion_tokens
        if output_tokens is msgspec.UNSET:
            output_tokens = counts.output_tokens
        return output_tokens is not None and counts.output() is None

    @property
    def output_is_hidden(self) -> bool:
        """Whether output of several tokens came in fields that are not known."""
        if self.unknown_outputs >= UNKNOWN_OUTPUTS:
            return True
        return not self.output_events and (self.usage().output or 0) > 1

    def judge(self, framing_ended: bool, until_close: bool, streamed: bool) -> Failure | None:
        """Return the failure of the request, or None if it is ok (metrics.md has the rules).

        Args:
            framing_ended: The body ended as its HTTP framing announced.
            until_close: The end of the connection ended the body.
            streamed: The response is an event stream.
        """
        if self.error:
            return Failure("error_event", self.error[:ERROR_TEXT_CHARS])
        if not framing_ended or (until_close and streamed and not self.finish_reason):
            text = f"the body ended early, after {self.output_events} output events"
            return Failure("truncated", text)
        if self.malformed:
            return Failure("malformed", self.malformed[:ERROR_TEXT_CHARS])
        if self.first_event < 0:
            return Failure("empty", "an answer without a single event")
        return self._finish_failure()

    def _finish_failure(self) -> Failure | None:
        """Return the failure of a response without a finish reason, or with one of an error."""
        position = f"after {self.output_events} output events"
        if not self.finish_reason:
            return Failure("no_finish_reason", f"no finish reason {position}")
        if self.finish_reason.lower() in ERROR_ENDINGS:
            return Failure("error_event", f"finish reason {self.finish_reason!r} {position}")
        return None

    def _mean_gap_until(self, timestamp: int, uncertainty: int) -> int:
        """Return the mean gap between output events, or the uncertainty of a single event."""
        if self.output_events <= 1:
            return uncertainty
        return (timestamp - self.first_token) // (self.output_events - 1)

    def _feed_payload(self, payload: bytes | NamedEvent, timestamp: int, uncertainty: int) -> None:
        """Process one event that is not known to be plain."""
        is_usual = False
        try:
            # A NamedEvent raises TypeError, which is cheaper than a test of each event.
            event: EventFields | None = decode_event(payload)  # type: ignore[arg-type]
            is_usual = self.pieces is None and self.sink is None
        except (*NOT_JSON, TypeError):
            event = self._read_unusual_event(payload)
        if event is None:
            return
        if event.choices is None:
            event_with_choices = with_choices(event, payload, self._decode_leniently)
            if event_with_choices is not None:
                event = event_with_choices
                is_usual = False
        if self.pieces is not None and not self.response_id:
            self.response_id = id_of(payload)
        if event.choices:
            has_output = self._feed_choices(event.choices, payload, timestamp, uncertainty)
            if has_output and is_usual and self._may_learn_template():
                self._learn_template(event, payload)  # type: ignore[arg-type]
        self._read_other_fields(event, payload)

    def _read_other_fields(self, event: EventFields, payload: bytes | NamedEvent) -> None:
        """Read the usage, the error and the server's own timing of an event."""
        if event.usage is not None:
            self._read_usage(event.usage)
        if event.error is not ABSENT or event.message is not ABSENT or event.detail is not ABSENT:
            self._read_error(event, payload)
        if event.timings is not ABSENT or event.nvext is not ABSENT or event.metrics is not ABSENT:
            self._read_timing(event)

    def _feed_choices(
        self,
        choices: list[ChoiceFields],
        payload: bytes | NamedEvent,
        timestamp: int,
        uncertainty: int,
    ) -> bool:
        """Process the choices of an event, which together are one output event or none.

        Return True if the event has output.
        """
        has_output = False
        for choice in choices:
            has_output = self._feed_choice(choice, has_output, timestamp, uncertainty)
        if not has_output:
            if self.last_token < 0:
                self._count_unknown_output(payload)
            return False
        self._count_output_event(timestamp, uncertainty)
        if self.sink is not None:
            _pass_on_texts(self.sink, choices, timestamp)
        return True

    def _feed_choice(
        self, choice: ChoiceFields, has_output: bool, timestamp: int, uncertainty: int
    ) -> bool:
        """Process one choice and return whether the event has output so far.

        `has_output` says whether an earlier choice of the event has output.
        """
        delta = choice.message if choice.delta is None else choice.delta
        text = choice.text if delta is None else delta.content
        if text:
            has_output = True
            is_answer = True
            if self.pieces is not None:
                self.pieces.append(text)
                if delta is not None and is_set(delta.tool_calls):
                    self.tool_deltas.append(delta.tool_calls)
        else:
            output = self._read_output_without_text(choice, delta)
            is_answer = output is not None and output.is_answer
            has_output = has_output or output is not None
        if has_output and self.last_token < 0:
            self.first_token = timestamp
            self.stamp_error = uncertainty
        if has_output and is_answer and self.first_answer < 0:
            self.first_answer = timestamp
        if choice.finish_reason:
            self._finish(choice, choice.finish_reason, timestamp)
        return has_output

    def _read_output_without_text(
        self, choice: ChoiceFields, delta: DeltaFields | None
    ) -> _Output | None:
        """Return what a choice without text has as output, or None if it has none.

        Output without text is reasoning, a tool call, a refusal or token ids.
        """
        if delta is not None:
            reasoning = delta.reasoning_content or delta.reasoning
            if reasoning:
                if self.reasoning_pieces is not None:
                    self.reasoning_pieces.append(reasoning)
                return _REASONING
            for call in (delta.tool_calls, delta.function_call):
                if call is not ABSENT and bytes(call) not in EMPTY:
                    if self.pieces is not None:
                        self.tool_deltas.append(call)
                    return _ANSWER
            if delta.refusal or delta.token_ids:
                return _ANSWER
        return _ANSWER if choice.token_ids else None

    def _finish(self, choice: ChoiceFields, finish_reason: str, timestamp: int) -> None:
        """Keep the finish reason of a choice and the server's timing that comes with it."""
        self.finish_reason = finish_reason
        self.end = timestamp
        if choice.meta_info is not ABSENT:
            self._keep_timing("meta_info", bytes(choice.meta_info))
        if choice.speculative_decoding is not ABSENT:
            self._keep_timing("speculative_decoding", bytes(choice.speculative_decoding))

    def _count_output_event(self, timestamp: int, uncertainty: int) -> None:
        """Count an event with output and the gap before it."""
        if self.last_token >= 0:
            gap = timestamp - self.last_token
            self.timeline.gaps.append(gap)
            if gap > self.max_gap:
                self.max_gap = gap
                self.max_gap_error = uncertainty
        self.timeline.instants.append(timestamp)
        self.output_events += 1
        self.last_token = timestamp
        self.end = timestamp

    def _count_unknown_output(self, payload: bytes | NamedEvent) -> None:
        """Count an event before the first known output if an unknown field has a text."""
        field = unknown_text_field(_data_of(payload))
        if not field:
            return
        self.unknown_outputs += 1
        if self.unknown_outputs == UNKNOWN_OUTPUTS:
            self.remark = HIDDEN_OUTPUT.format(field[:_MAX_FIELD_NAME_CHARS])

    def _may_learn_template(self) -> bool:
        """Return False if earlier templates recognised too few events.

        The events of such a stream differ in more than their text, for example in a time or a
        usage.
        """
        return self.learned <= _FREE_TEMPLATES + self.plain_events // _EVENTS_PER_TEMPLATE

    def _learn_template(self, event: EventFields, payload: bytes) -> None:
        """Make the template of plain events from an event that was decoded.

        A plain event differs from it in its text alone, so that it need not be decoded: it has the
        same bytes before and after its text, is the same JSON, and says only that output came.
        """
        text = _only_text_of(event)
        if not text or b"\\" in payload or b"\n" in payload:
            return
        # The text must be in the payload exactly once, and nothing in it may be escaped.
        json_string = b'"%s"' % text.encode()
        start = payload.find(json_string)
        if start >= 0 and payload.rfind(json_string) == start:
            self.learned += 1
            text_end = start + len(json_string) - 1
            self.template = payload[: start + 1], payload[text_end:]

    def _read_usage(self, counts: UsageFields) -> None:
        """Keep the last usage with output tokens, or else the first one.

        A usage that comes with the first output event states how many tokens the event has.
        """
        if (
            counts.input_tokens is None
            and counts.prompt_tokens is msgspec.UNSET
            and self.usage_counts is not None
        ):
            counts = _with_prompt_counts(counts, self.usage_counts)
        output_tokens = counts.output()
        if not output_tokens:
            self.usage_counts = self.usage_counts or counts
            return
        self.usage_counts = counts
        if self.output_events == 1 and not self.first_event_tokens and not self.finish_reason:
            self.first_event_tokens = output_tokens

    def _read_unusual_event(self, payload: bytes | NamedEvent) -> EventFields | None:
        """Read an event that is named, `[DONE]`, `null`, or JSON of an unexpected shape.

        Return None if nothing more is to be read.
        """
        if isinstance(payload, NamedEvent):
            if payload.event == b"error":
                self.error = self.error or error_text(payload.data)
                return None
            if payload.event.endswith(b"metrics"):
                self._keep_timing(payload.event.decode("latin-1"), payload.data)
                return None
        text = _data_of(payload).strip()
        if text == b"[DONE]":
            return None
        try:
            value = self._decode_leniently(text)
        except NOT_JSON:
            if not isinstance(payload, NamedEvent):
                shown_text = text[:_MAX_SHOWN_EVENT_BYTES]
                self.malformed = self.malformed or f"an event that is not JSON: {shown_text!r}"
            return None
        if not isinstance(value, dict):
            return None
        return read_other_api(value) or read_event(value)

    def _decode_leniently(self, text: bytes) -> Any:
        """Return the value of JSON and note bytes that are not UTF-8. Raises one of NOT_JSON."""
        value = decode_leniently(text)
        try:
            text.decode()
        except UnicodeDecodeError:
            self.remark = NOT_UTF8
        return value

    def _read_error(self, event: EventFields, payload: bytes | NamedEvent) -> None:
        """Keep the error of an event.

        `message` and `detail` are errors only if the event has neither choices nor a usage.
        """
        if not (is_set(event.error) or is_set(event.message) or is_set(event.detail)):
            return
        has_content = bool(event.choices) or event.usage is not None
        if bytes(event.error) not in EMPTY or not has_content:
            self.error = self.error or error_text(_data_of(payload))

    def _read_timing(self, event: EventFields) -> None:
        for name in ("timings", "nvext", "metrics"):
            timing = getattr(event, name)
            if is_set(timing):
                self._keep_timing(name, bytes(timing))

    def _keep_timing(self, name: str, json_text: bytes) -> None:
        """Keep the server's own timing under the name of its format."""
        try:
            value = decode_any(json_text)
        except NOT_JSON:
            return
        if value is not None:
            self.server_timing = {**(self.server_timing or {}), name: value}


def _data_of(payload: bytes | NamedEvent) -> bytes:
    return payload if isinstance(payload, bytes) else payload.data


def _only_text_of(event: EventFields) -> str | None:
    """Return the text of an event that has a text and nothing else, or None."""
    if event.choices is None or len(event.choices) != 1 or event.usage is not None:
        return None
    choice = event.choices[0]
    if choice.finish_reason:
        return None
    for field in (
        event.error,
        event.message,
        event.detail,
        event.timings,
        event.nvext,
        event.metrics,
    ):
        if field is not ABSENT and is_set(field):
            return None
    delta = choice.delta or choice.message
    if delta is None:
        return choice.text
    return delta.content or delta.reasoning_content or delta.reasoning


def _with_prompt_counts(counts: UsageFields, earlier: UsageFields) -> UsageFields:
    """Return a usage with the prompt tokens of an earlier one.

    Anthropic's messages state the prompt at their start and the output at their end.
    """
    return msgspec.structs.replace(
        counts,
        prompt_tokens=earlier.prompt_tokens,
        input_tokens=earlier.input_tokens,
        input_tokens_details=counts.input_tokens_details or earlier.input_tokens_details,
        cache_creation_input_tokens=(
            counts.cache_creation_input_tokens or earlier.cache_creation_input_tokens
        ),
    )


def _pass_on_texts(
    sink: Callable[[str, str, int], None], choices: list[ChoiceFields], timestamp: int
) -> None:
    """Pass the text and the reasoning of each choice on to an application."""
    for choice in choices:
        delta = choice.delta or choice.message
        if delta is None:
            sink(choice.text or "", "", timestamp)
        else:
            reasoning = delta.reasoning_content or delta.reasoning or ""
            sink(delta.content or "", reasoning, timestamp)
