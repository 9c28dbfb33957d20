"""Read the events of a response: text, finish reason, usage, errors and the time of each event.

Pure.

One reader serves all APIs, streamed or not, because the events of the others are converted to those
of a chat. A request is `ok` if the framing of HTTP has ended, if there is a finish reason that is
not one of ERROR_ENDINGS, and if there was no error event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import sub
from typing import Any, Literal

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
from .implementation import ResponseReaderState, count_leading_plain_events
from .lenient_decoding import decode_leniently, read_event
from .other_apis import convert_to_chat_event, read_other_api
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

HIDDEN_OUTPUT = "have output in the field {!r} of a delta, which loadgen does not know"
NOT_UTF8 = "contain bytes that are not UTF-8; each of them is read as U+FFFD"
NOT_STREAMED = "were not streamed: one JSON object was returned although a stream was requested"
"""Remarks about responses that are ok. The subject of each sentence is "N responses"."""

_MAX_FIELD_NAME_CHARS = 60
_MAX_SHOWN_EVENT_BYTES = 120
_FREE_TEMPLATES = 3
_EVENTS_PER_TEMPLATE = 4
"""Templates are learned as long as each one after the first three recognises four plain events."""

_OutputKind = Literal["answer", "reasoning"]
"""The answer is everything that is not reasoning: text, tool calls, refusals and token ids."""


class ResponseReader(ResponseReaderState):
    """Reads one response while it arrives.

    A *read* is what one call of `recv` returned. It may hold several packets of the network, and so
    several events. Timestamps are monotonic and in ns. All events of a read have the same
    timestamp, which is the arrival of its newest bytes. An event in an earlier packet of the read
    may have arrived at any time since the socket was last known to be empty. The time from there
    to the timestamp is the *uncertainty* of the timestamp.

    An *output event* is an event with a piece of the output, which is usually one token. A *plain
    event* is an output event that differs from an earlier one in its text alone. It is recognised
    by a *template*, the bytes before and after that text, and is counted without being decoded.
    """

    __slots__ = ()

    def feed_with_uncertainty(
        self,
        uncertain: Sequence[EventOrCount],
        certain: Sequence[EventOrCount],
        timestamp: int,
        uncertainty: int,
        *,
        is_one_write: bool = False,
    ) -> None:
        """Process the events of a read of which some may have arrived earlier.

        The last output event is a special case if nothing but the end of the response (finish
        reason, usage, `[DONE]`) came after it. Servers send this end together with the last output
        or one step later, so the two often share a read even if the client reads without delay.
        The last output is therefore at most about one gap older than its timestamp, and the
        timeline and the largest gap count it as exact. Reporting the full uncertainty would blame
        the client for how servers end their responses.

        Args:
            uncertain: The events that may have arrived earlier than `timestamp`.
            certain: The events that arrived at `timestamp`. They follow the uncertain ones.
            timestamp: The timestamp of the read.
            uncertainty: How much earlier the uncertain events may have arrived, in ns.
            is_one_write: All events came in one write of the server, so that they arrived together.
                The timeline and the largest gap are exact then.
        """
        outputs_before_read = self.output_events
        max_gap_before_read = self.max_gap
        if uncertain:
            self.feed(uncertain, timestamp, uncertainty)
        uncertain_outputs = self.output_events - outputs_before_read
        if certain:
            self.feed(certain, timestamp)
        certain_outputs = self.output_events - outputs_before_read - uncertain_outputs

        # The uncertainty of the last output event
        if certain_outputs:
            self.uncertain_timestamp = NEVER
        elif uncertain_outputs:
            self.uncertain_timestamp = timestamp
            self.timestamp_uncertainty = uncertainty
            if self.finish_reason:  # the special case: the timeline counts this event as exact
                uncertain_outputs -= 1
                self.timestamp_uncertainty = self._uncertainty_before_end(timestamp, uncertainty)

        # Those of the timeline and of the largest gap
        if uncertain_outputs and not is_one_write:
            self.timeline.uncertainties.append((uncertainty, uncertain_outputs))
        are_gaps_exact = is_one_write or not uncertain_outputs
        if are_gaps_exact and self.max_gap > max_gap_before_read:
            self.max_gap_uncertainty = 0

    def feed(self, events: Sequence[EventOrCount], timestamp: int, uncertainty: int = 0) -> None:
        """Process events that came at `timestamp`, or earlier by at most `uncertainty` ns.

        Runs of plain events are counted together. Every other event is decoded.
        """
        if events and self.first_event == NEVER:
            self.first_event = timestamp
        position = 0
        while position < len(events):
            if self.template is not None:
                plain_items, plain_events = count_leading_plain_events(
                    events, position, *self.template
                )
                if plain_items:
                    self.count_plain_events(plain_events, timestamp, uncertainty)
                    position += plain_items
                    continue
            # This item is no count: counts come only once there is a template, and the template
            # recognises every count.
            payload: bytes | NamedEvent = events[position]  # type: ignore[assignment]
            position += 1
            if payload != b"[DONE]":
                self._feed_payload(payload, timestamp, uncertainty)

    def count_plain_events(self, count: int, timestamp: int, uncertainty: int = 0) -> None:
        """Count plain events that came together at `timestamp`.

        They may have arrived earlier by at most `uncertainty` ns. There always is an earlier output
        event, from which the template was learned.
        """
        if not count:
            return
        gap = timestamp - self.last_token
        if gap > self.max_gap:
            self.max_gap = gap
            self.max_gap_uncertainty = uncertainty
        self.timeline.gaps.append(gap)
        self.timeline.timestamps.append(timestamp)
        if count > 1:  # the events after the first one have a gap of 0
            self.timeline.simultaneous_counts.append((timestamp, count - 1))
        self.output_events += count
        self.plain_events += count
        self.last_token = timestamp
        self.end = timestamp

    def count_plain_events_at(self, timestamps: list[int]) -> None:
        """Count plain events that each have an exact timestamp of their own.

        `timestamps` has at least one item. Its gaps are computed by `map`, because a loop in
        Python would cost more than the rest of the work per event.
        """
        previous_timestamps = [self.last_token, *timestamps]
        gaps = list(map(sub, timestamps, previous_timestamps))
        longest_gap = max(gaps)
        if longest_gap > self.max_gap:
            self.max_gap = longest_gap
            self.max_gap_uncertainty = 0
        self.timeline.gaps.extend(gaps)
        self.timeline.timestamps.extend(timestamps)
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
    def has_impossible_usage(self) -> bool:
        """Whether the server sent a number of output tokens that no response can have.

        Such a number is negative, has a fraction, or needs more than 31 bits. It is not used,
        and the probe warns of it.
        """
        counts = self.usage_counts
        if counts is None:
            return False
        sent_tokens = counts.completion_tokens
        if sent_tokens is msgspec.UNSET:
            sent_tokens = counts.output_tokens
        return sent_tokens is not None and counts.output() is None

    @property
    def has_hidden_output(self) -> bool:
        """Whether output of several tokens came in fields of events that are not known here.

        There are two signs of it: events with a text in such a field, or a usage of several output
        tokens without any output event. A single token is no sign, because that may be the
        end-of-sequence token, which has no text.
        """
        if self.unknown_output_events >= UNKNOWN_OUTPUTS:
            return True
        output_tokens = self.usage().output or 0
        return not self.output_events and output_tokens > 1

    def find_failure(
        self, is_framing_complete: bool, ends_with_connection: bool, is_stream: bool
    ) -> Failure | None:
        """Return the failure of a response that has ended, or None if the request is ok.

        The rules are those of metrics.md. If several apply, the first one is the cause: an error
        event explains why the body ended early, and an early end explains why the last event cannot
        be parsed. The last rules are those of `_finish_failure`.

        Args:
            is_framing_complete: The body ended as its HTTP framing announced.
            ends_with_connection: The framing announced no end, so that the body ended with the
                connection. For a stream of events, only a finish reason tells this from a broken
                connection.
            is_stream: The response is a stream of events.
        """
        is_end_doubtful = ends_with_connection and is_stream and not self.finish_reason
        if self.error:
            return Failure("error_event", self.error[:ERROR_TEXT_CHARS])
        if not is_framing_complete or is_end_doubtful:
            text = f"the body ended early, after {self.output_events} output events"
            return Failure("truncated", text)
        if self.parse_error:
            return Failure("malformed", self.parse_error[:ERROR_TEXT_CHARS])
        if self.first_event == NEVER:
            return Failure("empty", "the response has no event")
        return self._finish_failure()

    def _finish_failure(self) -> Failure | None:
        """Return the failure if there is no finish reason or one that states an error, else None.

        Every other finish reason is a normal end, because servers have many of their own.
        """
        position = f"after {self.output_events} output events"
        if not self.finish_reason:
            return Failure("no_finish_reason", f"there is no finish reason {position}")
        if self.finish_reason.lower() in ERROR_ENDINGS:
            return Failure("error_event", f"finish reason {self.finish_reason!r} {position}")
        return None

    def _uncertainty_before_end(self, timestamp: int, uncertainty: int) -> int:
        """Return the uncertainty of the last output event if only the end of the response follows.

        It is limited to the mean gap between output events, because a server sends the end at most
        one step after the last output. With a single output event there is no gap to compare with.
        """
        if self.output_events <= 1:
            return uncertainty
        mean_gap = (timestamp - self.first_token) // (self.output_events - 1)
        return min(uncertainty, mean_gap)

    def _feed_payload(self, payload: bytes | NamedEvent, timestamp: int, uncertainty: int) -> None:
        """Process one event that is not known to be plain.

        Most events are decoded in one step by msgspec. Those that it refuses, and those of other
        APIs, are converted to the same fields first. Only an event of the first kind can become a
        template, and only if no text is kept or passed on, because plain events are not decoded.
        """
        can_be_template = False
        try:
            # A NamedEvent raises TypeError, which is cheaper than a test of each event.
            event: EventFields | None = decode_event(payload)  # type: ignore[arg-type]
            can_be_template = self.text_pieces is None and self.on_output is None
        except (*NOT_JSON, TypeError):
            event = self._read_unusual_event(payload)
        if event is None:
            return
        if event.choices is None:
            event_with_choices = convert_to_chat_event(event, payload, self._decode_leniently)
            if event_with_choices is not None:
                event = event_with_choices
                can_be_template = False
        if self.text_pieces is not None and not self.response_id:
            self.response_id = id_of(payload)
        if event.choices:
            has_output = self._feed_choices(event.choices, payload, timestamp, uncertainty)
            if has_output and can_be_template and self._may_learn_template():
                self._learn_template(event, payload)  # type: ignore[arg-type]
        self._read_other_fields(event, payload)

    def _read_other_fields(self, event: EventFields, payload: bytes | NamedEvent) -> None:
        """Read the usage, the error and the server's own timing of an event.

        The fields are compared with ABSENT here, so that the usual event, which has none of them,
        costs no further call.
        """
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
        """Process the choices of an event and return whether the event has output.

        An event with several choices, as with `n: 2`, is still one output event, because its
        choices arrived together.
        """
        has_output = False
        for choice in choices:
            if self._feed_choice(choice, timestamp):
                has_output = True
        if has_output:
            self._count_output_event(timestamp, uncertainty)
            if self.on_output is not None:
                _pass_on_texts(self.on_output, choices, timestamp)
        elif self.last_token == NEVER:
            self._count_unknown_output(payload)
        return has_output

    def _feed_choice(self, choice: ChoiceFields, timestamp: int) -> bool:
        """Process one choice of an event and return whether the choice has output.

        Its text is kept if the texts of the response are kept. Streams have a `delta`, other chats
        a `message`, and completions a `text`.
        """
        delta = choice.message if choice.delta is None else choice.delta
        text = choice.text if delta is None else delta.content
        output_kind: _OutputKind | None = "answer"
        if not text:
            output_kind = self._read_output_without_text(choice, delta)
        elif self.text_pieces is not None:
            self.text_pieces.append(text)
            if delta is not None and is_set(delta.tool_calls):
                self.tool_deltas.append(delta.tool_calls)
        if output_kind == "answer" and self.first_answer == NEVER:
            self.first_answer = timestamp
        if choice.finish_reason:
            self._finish(choice, choice.finish_reason, timestamp)
        return output_kind is not None

    def _read_output_without_text(
        self, choice: ChoiceFields, delta: DeltaFields | None
    ) -> _OutputKind | None:
        """Return the kind of output of a choice without text, or None if it has no output.

        Output without text is reasoning, a tool call, a refusal or token ids. Reasoning and tool
        calls are kept if the texts of the response are kept.
        """
        if delta is not None:
            reasoning = delta.reasoning_content or delta.reasoning
            if reasoning:
                if self.reasoning_pieces is not None:
                    self.reasoning_pieces.append(reasoning)
                return "reasoning"
            for call in (delta.tool_calls, delta.function_call):
                if call is not ABSENT and bytes(call) not in EMPTY:
                    if self.text_pieces is not None:
                        self.tool_deltas.append(call)
                    return "answer"
            if delta.refusal or delta.token_ids:
                return "answer"
        return "answer" if choice.token_ids else None

    def _finish(self, choice: ChoiceFields, finish_reason: str, timestamp: int) -> None:
        """Keep the finish reason of a choice and the server's timing that comes with it.

        Only SGLang and TensorRT-LLM put timing into the choice itself.
        """
        self.finish_reason = finish_reason
        self.end = timestamp
        if choice.meta_info is not ABSENT:
            self._keep_timing("meta_info", bytes(choice.meta_info))
        if choice.speculative_decoding is not ABSENT:
            self._keep_timing("speculative_decoding", bytes(choice.speculative_decoding))

    def _count_output_event(self, timestamp: int, uncertainty: int) -> None:
        """Count an event with output and the gap before it.

        The first output event is the first token, and has no gap.
        """
        if self.last_token == NEVER:
            self.first_token = timestamp
            self.first_token_uncertainty = uncertainty
        else:
            gap = timestamp - self.last_token
            self.timeline.gaps.append(gap)
            if gap > self.max_gap:
                self.max_gap = gap
                self.max_gap_uncertainty = uncertainty
        self.timeline.timestamps.append(timestamp)
        self.output_events += 1
        self.last_token = timestamp
        self.end = timestamp

    def _count_unknown_output(self, payload: bytes | NamedEvent) -> None:
        """Count an event without known output if a field that is not known has a text.

        A server that streams its reasoning under a name that is not known here sends such events
        before the first known output. If there are UNKNOWN_OUTPUTS of them, the time of the first
        token is not known (`has_hidden_output`), and the remark of the response names the field.
        """
        field_name = unknown_text_field(_data_of(payload))
        if not field_name:
            return
        self.unknown_output_events += 1
        if self.unknown_output_events == UNKNOWN_OUTPUTS:
            self.remark = HIDDEN_OUTPUT.format(field_name[:_MAX_FIELD_NAME_CHARS])

    def _may_learn_template(self) -> bool:
        """Return False if earlier templates recognised too few events.

        The events of such a stream differ in more than their text, for example in a time or a
        usage, so that learning costs more than it saves.
        """
        earned_templates = self.plain_events // _EVENTS_PER_TEMPLATE
        return self.learned_templates <= _FREE_TEMPLATES + earned_templates

    def _learn_template(self, event: EventFields, payload: bytes) -> None:
        """Make the template of plain events from an event that was decoded.

        A plain event differs from it in its text alone, so that it need not be decoded: it has the
        same bytes before and after its text, is the same JSON, and says only that output came. For
        the payload `{"text":"Hi","n":1}` the template is `{"text":"` and `","n":1}`.

        No template is learned from a payload with escapes or line ends, or if the text is in the
        payload twice, because the place of the text would not be certain.
        """
        text = _only_text_of(event)
        if not text or b"\\" in payload or b"\n" in payload:
            return
        json_string = b'"%s"' % text.encode()
        string_start = payload.find(json_string)
        is_in_payload_once = string_start >= 0 and payload.rfind(json_string) == string_start
        if is_in_payload_once:
            self.learned_templates += 1
            text_start = string_start + len(b'"')
            text_end = string_start + len(json_string) - len(b'"')
            self.template = payload[:text_start], payload[text_end:]

    def _read_usage(self, counts: UsageFields) -> None:
        """Keep the last usage with output tokens, or else the first one.

        With continuous usage, each event has the counts so far. A usage that comes with the first
        output event, and is not that of the complete response, therefore states how many tokens
        this event has.
        """
        has_prompt_count = (
            counts.input_tokens is not None or counts.prompt_tokens is not msgspec.UNSET
        )
        if not has_prompt_count and self.usage_counts is not None:
            counts = _with_prompt_counts(counts, self.usage_counts)
        output_tokens = counts.output()
        if not output_tokens:
            self.usage_counts = self.usage_counts or counts
            return
        self.usage_counts = counts
        is_at_first_output = self.output_events == 1 and not self.finish_reason
        if is_at_first_output and not self.first_event_tokens:
            self.first_event_tokens = output_tokens

    def _read_unusual_event(self, payload: bytes | NamedEvent) -> EventFields | None:
        """Return the fields of an event that `decode_event` refuses.

        Such an event is named, `[DONE]`, `null`, or JSON of an unexpected shape. Return None if it
        has no fields to process. Errors, timings and text that is not JSON are kept here at once.
        """
        if isinstance(payload, NamedEvent):
            if payload.event == b"error":
                self.error = self.error or error_text(payload.data)
                return None
            if payload.event.endswith(b"metrics"):  # `trtllm.perf_metrics` of trtllm-serve
                self._keep_timing(payload.event.decode("latin-1"), payload.data)
                return None
        json_text = _data_of(payload).strip()
        if json_text == b"[DONE]":
            return None
        try:
            value = self._decode_leniently(json_text)
        except NOT_JSON:
            # Named events are extensions of a server, which need not be JSON.
            if not isinstance(payload, NamedEvent) and not self.parse_error:
                shown_text = json_text[:_MAX_SHOWN_EVENT_BYTES]
                self.parse_error = f"an event is not JSON: {shown_text!r}"
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
        """Keep the first error of the response.

        `message` and `detail` are errors only if the event has neither choices nor a usage, and an
        empty `error`, such as `{}`, is one only in that case.
        """
        if not (is_set(event.error) or is_set(event.message) or is_set(event.detail)):
            return
        has_content = bool(event.choices) or event.usage is not None
        if bytes(event.error) not in EMPTY or not has_content:
            self.error = self.error or error_text(_data_of(payload))

    def _read_timing(self, event: EventFields) -> None:
        """Keep the server's own timing of llama-server, Dynamo or vLLM."""
        for name in ("timings", "nvext", "metrics"):
            timing = getattr(event, name)
            if is_set(timing):
                self._keep_timing(name, bytes(timing))

    def _keep_timing(self, name: str, json_text: bytes) -> None:
        """Keep the server's own timing under the name of its format, unless it is damaged.

        It is parsed only when the record of the request is made (`server_timing_lookup.py`).
        """
        try:
            value = decode_any(json_text)
        except NOT_JSON:
            return
        if value is not None:
            self.server_timing = {**(self.server_timing or {}), name: value}


def _data_of(payload: bytes | NamedEvent) -> bytes:
    return payload if isinstance(payload, bytes) else payload.data


def _only_text_of(event: EventFields) -> str | None:
    """Return the text of an event that has a text and nothing else, or None.

    Only such an event can be a template: the other fields of an event may change with each event,
    and must be read each time.
    """
    if event.choices is None or len(event.choices) != 1 or event.usage is not None:
        return None
    choice = event.choices[0]
    if choice.finish_reason:
        return None
    for raw_value in (
        event.error,
        event.message,
        event.detail,
        event.timings,
        event.nvext,
        event.metrics,
    ):
        # The identity is tested first, because it spares the usual event a call per field.
        if raw_value is not ABSENT and is_set(raw_value):
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
    on_output: Callable[[str, str, int], None], choices: list[ChoiceFields], timestamp: int
) -> None:
    """Pass the text and the reasoning of each choice on to an application.

    `on_output` is called with (text, reasoning, timestamp). A missing text is passed as "".
    """
    for choice in choices:
        delta = choice.delta or choice.message
        if delta is None:
            on_output(choice.text or "", "", timestamp)
        else:
            reasoning = delta.reasoning_content or delta.reasoning or ""
            on_output(delta.content or "", reasoning, timestamp)
