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
_FREE_TEMPLATES = 4
_EVENTS_PER_TEMPLATE = 4
"""The first four templates of a response are learned in any case. After that, each further one is
learned only after four more plain events were recognised."""

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
        """Process the events of a read of which some may have arrived before its timestamp.

        The timestamp of a read is the arrival of its newest packet. An example: a socket was empty
        at 70, and a read of the events A and B has the timestamp 100. B arrived at 100, and A at
        any time from 70 to 100. So A is uncertain by 30. The uncertainty is recorded in the event
        timeline, for the last output event, and for the longest gap between output events.

        Args:
            uncertain: The events that may have arrived earlier than `timestamp`.
            certain: The events that arrived at `timestamp`. They follow the uncertain ones.
            timestamp: The timestamp of the read.
            uncertainty: How much earlier the uncertain events may have arrived, in ns.
            is_one_write: All events came in one write of the server, so that they arrived together.
                Their times in the timeline, and the longest gap, are exact then.
        """
        longest_gap_before_read = self.max_gap
        uncertain_outputs = self._feed_and_count_outputs(uncertain, timestamp, uncertainty)
        certain_outputs = self._feed_and_count_outputs(certain, timestamp, uncertainty=0)

        is_last_output_certain = certain_outputs > 0
        if is_last_output_certain:
            self.uncertain_timestamp = NEVER  # The timestamp of the last output is exact.
        elif uncertain_outputs:
            self._note_uncertain_last_output(timestamp, uncertainty)

        if is_one_write:
            inexact_outputs = 0
        elif self.finish_reason and not is_last_output_certain:
            # The last output does not count: servers send the finish reason so soon after it that
            # both often share a read, even if the client reads without delay.
            inexact_outputs = max(0, uncertain_outputs - 1)
        else:
            inexact_outputs = uncertain_outputs

        has_new_longest_gap = self.max_gap > longest_gap_before_read
        if inexact_outputs:
            self.timeline.uncertainties.append((uncertainty, inexact_outputs))
        elif has_new_longest_gap:
            # The gap ends with an output of this read, and all outputs of this read are exact.
            self.max_gap_uncertainty = 0

    def _feed_and_count_outputs(
        self, events: Sequence[EventOrCount], timestamp: int, uncertainty: int
    ) -> int:
        """Process events as `feed` does, and return how many of them are output events."""
        if not events:
            return 0
        outputs_before = self.output_events
        self.feed(events, timestamp, uncertainty)
        return self.output_events - outputs_before

    def _note_uncertain_last_output(self, timestamp: int, uncertainty: int) -> None:
        """Note by how much the last output event may have arrived before its timestamp, in ns.

        If the finish reason came in the same read, the uncertainty is at most about one gap between
        output events. Servers send the end of a response together with the last output or one step
        later, so the two often share a read even if the client reads without delay. Reporting the
        full uncertainty would blame the client for how servers end their responses.
        """
        self.uncertain_timestamp = timestamp
        self.timestamp_uncertainty = uncertainty
        if self.finish_reason:
            self.timestamp_uncertainty = self._uncertainty_before_end(timestamp, uncertainty)

    def feed(self, events: Sequence[EventOrCount], timestamp: int, uncertainty: int = 0) -> None:
        """Process events that came at `timestamp`, or earlier by at most `uncertainty` ns.

        A plain event differs from an earlier event of the response in its text alone. Plain events
        are only counted, and every other event is decoded. There are two ways to recognise them:
        the caller has already replaced them by a number, or their payload matches the template, the
        bytes around the text. For example, `[b'{"error": ...}', 3, b"[DONE]"]` is an event to
        decode, three plain events, and the mark of the end, which says nothing.

        Args:
            events: Payloads of events, and numbers, each of which stands for that many plain
                events. There is no number before the template is known.
            timestamp: When the newest of the events arrived, monotonic in ns.
            uncertainty: By how much they may have arrived earlier, in ns.
        """
        if events and self.first_event == NEVER:
            self.first_event = timestamp

        index = 0
        while index < len(events):
            plain_items = 0  # how many of the next items of the list are plain events
            plain_events = 0  # how many plain events these items stand for
            if self.template is not None:
                before_text, after_text = self.template
                plain_items, plain_events = count_leading_plain_events(
                    events, index, before_text, after_text
                )

            if plain_items:
                self.count_plain_events(plain_events, timestamp, uncertainty)
                index += plain_items
            else:
                payload = events[index]
                assert not isinstance(payload, int), "numbers come only after the template is known"
                if payload != b"[DONE]":
                    self._feed_payload(payload, timestamp, uncertainty)
                index += 1

    def count_plain_events(self, count: int, timestamp: int, uncertainty: int = 0) -> None:
        """Count plain events that came together. Nothing is done if `count` is 0.

        A plain event differs from an earlier event of the response in its text alone. That earlier
        event had output, so the time of the last output is known. The first of the plain events
        ends the gap since then, and each further one has a gap of 0. An example: the last output
        came at 10, and three plain events come at 30. They have the gaps 20, 0 and 0. Only the
        first one is stored in `gaps` and `timestamps`, and the other two as the pair (30, 2) in
        `simultaneous_counts`.

        Args:
            count: The number of events.
            timestamp: When they arrived, monotonic in ns.
            uncertainty: By how much they may have arrived earlier, in ns.
        """
        if not count:
            return

        gap = timestamp - self.last_token
        if gap > self.max_gap:
            self.max_gap = gap
            self.max_gap_uncertainty = uncertainty

        self.timeline.gaps.append(gap)
        self.timeline.timestamps.append(timestamp)

        if count > 1:
            events_without_gap = count - 1
            self.timeline.simultaneous_counts.append((timestamp, events_without_gap))

        self.output_events += count
        self.plain_events += count
        self.last_token = timestamp
        self.end = timestamp

    def count_plain_events_at(self, timestamps: list[int]) -> None:
        """Count plain events, each of which arrived at an exact time of its own.

        The gap of an event is the time since the one before it: after an event at 10, those at
        [30, 60] have the gaps [20, 30]. The gaps are computed by `map`, because a loop in Python
        would cost more than the rest of the work per event.

        Args:
            timestamps: When the events arrived, in order, monotonic in ns. There is at least one.
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
        """Return the token counts of the response. It is empty if the server has sent none.

        They are those of the last usage with output tokens, or else of the first usage.
        """
        return self.usage_counts.usage() if self.usage_counts is not None else Usage()

    @property
    def has_impossible_usage(self) -> bool:
        """Whether the server sent a number of output tokens that no response can have.

        Such a number is negative, has a fraction, or needs more than 31 bits. It is not used, and
        the first request to a server, which checks what it supports, warns about it.
        """
        counts = self.usage_counts
        if counts is None:
            return False

        # The chat API names the number `completion_tokens`, and other APIs `output_tokens`.
        sent_number = counts.completion_tokens
        if sent_number is msgspec.UNSET:
            sent_number = counts.output_tokens

        if sent_number is None:
            return False

        usable_number = counts.output()  # None if the number that was sent is impossible
        return usable_number is None

    @property
    def has_hidden_output(self) -> bool:
        """Whether the server sent output in fields that this client does not know.

        There are two signs of it: several events whose delta has a text in an unknown field, or a
        usage of several output tokens without any output event. A single token is no sign, because
        that may be the end-of-sequence token, which has no text.
        """
        has_unknown_texts = self.unknown_output_events >= UNKNOWN_OUTPUTS
        if has_unknown_texts:
            return True
        output_tokens = self.usage().output or 0
        return output_tokens > 1 and not self.output_events

    def find_failure(
        self, is_framing_complete: bool, ends_with_connection: bool, is_stream: bool
    ) -> Failure | None:
        """Return the failure of a response that has ended, or None if the request is ok.

        The rules are those of metrics.md. If several apply, the first one is the cause: an error
        event explains why the body ended early, and an early end explains why the last event cannot
        be parsed. The last rules are those of `_finish_failure`.

        Args:
            is_framing_complete: The body ended as its HTTP framing announced.
            ends_with_connection: The server announced neither a length nor chunks, so the body
                ended when the connection was closed.
            is_stream: The response is a stream of events.
        """
        if self.error:
            return Failure("error_event", self.error[:ERROR_TEXT_CHARS])

        # If the end of the connection is the end of the body, a broken connection looks the same.
        # Only the finish reason in the last events of a stream tells that it is complete.
        is_stream_cut_off = ends_with_connection and is_stream and not self.finish_reason
        if not is_framing_complete or is_stream_cut_off:
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
        """Decode one event and process its fields. Nothing is done if it has no fields.

        Nearly every event is that of a chat: its JSON has a list of choices. An event of another
        API or of an unexpected form is converted to the same fields first.

        The event may also become the template of the response. A template is the bytes before and
        after the text of an event. Later events with the same bytes around their text are only
        counted, without being decoded. So there is no template if the texts are needed.

        Args:
            payload: The data of the event, with its name if it has one.
            timestamp: When the event arrived, monotonic in ns.
            uncertainty: By how much it may have arrived earlier, in ns.
        """
        decoded: EventFields | None = None
        if isinstance(payload, bytes):
            try:
                decoded = decode_event(payload)
            except NOT_JSON:
                decoded = None  # `_read_unusual_event` decodes it leniently.

        is_chat_event = decoded is not None and decoded.choices is not None
        event = decoded if is_chat_event else self._read_unusual_event(payload, decoded)
        if event is None:
            return

        keeps_text = self.text_pieces is not None
        if keeps_text and not self.response_id:
            self.response_id = id_of(payload)

        if event.choices:
            has_output = self._feed_choices(event.choices, payload, timestamp, uncertainty)
            needs_each_text = keeps_text or self.on_output is not None
            may_be_template = is_chat_event and has_output and not needs_each_text
            if may_be_template:
                self._learn_template(event, payload)

        self._read_other_fields(event, payload)

    def _read_other_fields(self, event: EventFields, payload: bytes | NamedEvent) -> None:
        """Read the usage, the error and the server's own timing of an event.

        The usual event has none of them. It is recognised here, because that costs no further call.
        """
        has_error = (
            event.error is not ABSENT or event.message is not ABSENT or event.detail is not ABSENT
        )
        has_timing = (
            event.timings is not ABSENT or event.nvext is not ABSENT or event.metrics is not ABSENT
        )

        if event.usage is not None:
            self._read_usage(event.usage)

        if has_error:
            self._read_error(event, payload)

        if has_timing:
            self._read_timing(event)

    def _feed_choices(
        self,
        choices: list[ChoiceFields],
        payload: bytes | NamedEvent,
        timestamp: int,
        uncertainty: int,
    ) -> bool:
        """Process the choices of an event and return whether the event has output.

        An event with several choices, as a request with `n: 2` gets, is still one output event,
        because its choices arrived together.

        Args:
            choices: The choices.
            payload: The event, in which unknown fields are looked for if no output has come so far.
            timestamp: When the event arrived, monotonic in ns.
            uncertainty: By how much it may have arrived earlier, in ns.
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

        The output of a chat is in an object with several fields, which is named `delta` in a stream
        and `message` in a whole response. A completion, which is not a chat, has only a `text`.

        Args:
            choice: The choice.
            timestamp: When the event arrived, monotonic in ns.
        """
        delta = choice.message if choice.delta is None else choice.delta
        text = choice.text if delta is None else delta.content
        if self.text_pieces is not None:
            self._keep_output(self.text_pieces, text, delta)

        output_kind = "answer" if text else _kind_of_output_without_text(choice, delta)
        if output_kind == "answer" and self.first_answer == NEVER:
            self.first_answer = timestamp

        if choice.finish_reason:
            self._record_finish(choice, choice.finish_reason, timestamp)

        return output_kind is not None

    def _keep_output(
        self, text_pieces: list[str], text: str | None, delta: DeltaFields | None
    ) -> None:
        """Add the output of a choice to the texts and tool calls of the response.

        A choice usually has one kind of output. The first of these is added: the text, together
        with tool calls that come with it, the reasoning, or tool calls alone.

        Args:
            text_pieces: The list `self.text_pieces`, which is not None here.
            text: The text of the choice, or None or "" if it has none.
            delta: Its delta or its message, or None for a completion, which has only a text.
        """
        if text:
            text_pieces.append(text)
            # The usual text has no tool calls. The first comparison saves it a call of `is_set`.
            if delta is not None and delta.tool_calls is not ABSENT and is_set(delta.tool_calls):
                self.tool_deltas.append(delta.tool_calls)
            return

        if delta is None:
            return

        reasoning = delta.reasoning_content or delta.reasoning
        if reasoning and self.reasoning_pieces is not None:
            self.reasoning_pieces.append(reasoning)
            return

        tool_calls = _tool_calls_of(delta)
        if tool_calls is not None:
            self.tool_deltas.append(tool_calls)

    def _record_finish(self, choice: ChoiceFields, finish_reason: str, timestamp: int) -> None:
        """Store the finish reason of a choice, and the server's own timing that comes with it.

        SGLang has its timing in the field `meta_info` of the choice, and TensorRT-LLM its
        statistics of speculative decoding. Other servers have them elsewhere (`_read_timing`).
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
        """Count an event without known output if its delta has a text in an unknown field.

        Such a text is probably output, for example reasoning under a name of the server's own. If
        UNKNOWN_OUTPUTS events before the first known output have one, the time of the first token
        is not known, and the remark about the response names the field.
        """
        field_name = unknown_text_field(_json_of(payload))
        if not field_name:
            return
        self.unknown_output_events += 1
        if self.unknown_output_events == UNKNOWN_OUTPUTS:
            self.remark = HIDDEN_OUTPUT.format(field_name[:_MAX_FIELD_NAME_CHARS])

    def _is_learning_worthwhile(self) -> bool:
        """Return False if the templates learned so far recognised too few events.

        The events of such a stream differ in more than their text, for example in a time or a
        usage, so that learning another template would cost more than it saves.
        """
        earned_templates = self.plain_events // _EVENTS_PER_TEMPLATE
        return self.learned_templates < _FREE_TEMPLATES + earned_templates

    def _learn_template(self, event: EventFields, payload: bytes | NamedEvent) -> None:
        """Learn from an event how the plain events of this response look, if that is worthwhile.

        A plain event differs from this one in its text alone. The template is the pair of the bytes
        before and after the text: for the payload `{"text":"Hi","n":1}` it is `{"text":"` and
        `","n":1}`. Events with the same bytes around their text are counted without being decoded.

        No template is learned if the event has more than a text, from a payload with escapes or
        line ends, or if the text is in the payload twice, so that its place is not certain.
        """
        if not self._is_learning_worthwhile():
            return

        json_text = _json_of(payload)
        text = _sole_text(event)
        has_escapes_or_line_ends = b"\\" in json_text or b"\n" in json_text
        if not text or has_escapes_or_line_ends:
            return

        json_string = b'"%s"' % text.encode()
        if json_text.count(json_string) != 1:
            return

        before_string, after_string = json_text.split(json_string)
        self.template = (before_string + b'"', b'"' + after_string)
        self.learned_templates += 1

    def _read_usage(self, counts: UsageFields) -> None:
        """Store the token counts of an event, or leave those of an earlier event in place.

        A server sends token counts once at the end, or with each event the counts so far. In both
        cases the latest counts with output tokens are right. Counts without output tokens are
        stored only as long as there are no others. If the new counts lack the prompt tokens, which
        some servers send only at the start, those of the earlier counts are added.
        """
        # Chat names the prompt tokens `prompt_tokens`, and other APIs `input_tokens`. A missing
        # field is UNSET under the first name and None under the second one.
        has_prompt_tokens = (
            counts.prompt_tokens is not msgspec.UNSET or counts.input_tokens is not None
        )
        if not has_prompt_tokens and self.usage_counts is not None:
            counts = _with_prompt_counts(counts, self.usage_counts)

        output_tokens = counts.output()
        if output_tokens:
            self.usage_counts = counts
            self._note_first_event_tokens(output_tokens)
        elif self.usage_counts is None:
            self.usage_counts = counts

    def _note_first_event_tokens(self, output_tokens: int) -> None:
        """Note how many tokens the first output event has, if a usage with this count states it.

        It does if it comes with the first output event, because it then counts the tokens so far.
        With a finish reason, it counts those of the complete response.
        """
        is_at_first_output = self.output_events == 1 and not self.finish_reason
        if is_at_first_output and not self.first_event_tokens:
            self.first_event_tokens = output_tokens

    def _read_unusual_event(
        self, payload: bytes | NamedEvent, event: EventFields | None
    ) -> EventFields | None:
        """Return the fields of an event that is not a usual event of a chat, which has choices.

        An event of another API is converted to the fields of a chat event. Return None if the event
        has no fields, such as `[DONE]`.

        Args:
            payload: The data of the event, with its name if it has one.
            event: Its fields, if it was decoded in one step and has no choices. None if it could
                not be decoded in this way, because a field has an unexpected type.
        """
        if event is None:
            event = self._read_refused_event(payload)
        if event is None or event.choices is not None:
            return event
        converted_event = convert_to_chat_event(event, payload, self._decode_leniently)
        return event if converted_event is None else converted_event

    def _read_refused_event(self, payload: bytes | NamedEvent) -> EventFields | None:
        """Return the fields of an event that msgspec refuses to decode, or None if it has none.

        msgspec refuses an event with a name, the end mark `[DONE]`, a JSON value that is no object,
        such as `null`, and an object in which a field has an unexpected type. Only the first and
        the last of these can have fields.
        """
        if isinstance(payload, NamedEvent) and self._read_named_event(payload):
            return None

        json_text = _json_of(payload).strip()
        if json_text == b"[DONE]":
            return None

        try:
            value = self._decode_leniently(json_text)
        except NOT_JSON:
            # A named event is an extension of the server, which need not be JSON.
            if not isinstance(payload, NamedEvent):
                self._note_parse_error(json_text)
            return None

        if not isinstance(value, dict):
            return None

        event_of_other_api = read_other_api(value)
        return read_event(value) if event_of_other_api is None else event_of_other_api

    def _note_parse_error(self, json_text: bytes) -> None:
        """Note that an event is not JSON. Only the first such event of a response is noted."""
        if not self.parse_error:
            text_start = json_text[:_MAX_SHOWN_EVENT_BYTES]
            self.parse_error = f"an event is not JSON: {text_start!r}"

    def _read_named_event(self, event: NamedEvent) -> bool:
        """Store a named event that is an error or the server's own timing.

        Returns:
            Whether it is one of these. Otherwise its data may be a usual event.
        """
        if event.event == b"error":
            self.error = self.error or error_text(event.data)
            return True
        if event.event.endswith(b"metrics"):  # `trtllm.perf_metrics` of trtllm-serve
            self._keep_timing(event.event.decode("latin-1"), event.data)
            return True
        return False

    def _decode_leniently(self, text: bytes) -> Any:
        """Return the value of JSON and note bytes that are not UTF-8. Raises one of NOT_JSON."""
        value = decode_leniently(text)
        try:
            text.decode()
        except UnicodeDecodeError:
            self.remark = NOT_UTF8
        return value

    def _read_error(self, event: EventFields, payload: bytes | NamedEvent) -> None:
        """Store the text of an error in an event, unless an earlier event had one.

        Servers send errors in the field `error`, `message` or `detail`. A non-empty `error` is
        always an error. Some servers send an empty one (`{}`), a `message` or a `detail` with usual
        events too. These are errors only if the event has no choices and no usage.
        """
        has_error_field = is_set(event.error) or is_set(event.message) or is_set(event.detail)
        if not has_error_field:
            return

        has_nonempty_error = bytes(event.error) not in EMPTY
        is_usual_event = bool(event.choices) or event.usage is not None

        is_error = has_nonempty_error or not is_usual_event
        if is_error and not self.error:
            self.error = error_text(_json_of(payload))

    def _read_timing(self, event: EventFields) -> None:
        """Store how long the server itself says that it worked on the request, if the event has it.

        Three servers send such a timing with an event, each in a field of its own: llama-server in
        `timings`, Dynamo in `nvext`, and vLLM in `metrics`.
        """
        timing_by_field = {
            "timings": event.timings,
            "nvext": event.nvext,
            "metrics": event.metrics,
        }
        for field_name, timing in timing_by_field.items():
            if is_set(timing):
                self._keep_timing(field_name, bytes(timing))

    def _keep_timing(self, name: str, json_text: bytes) -> None:
        """Store the server's own timing under the name of its format, unless it is damaged.

        Only the JSON is decoded here. What it means is parsed when the record of the request is
        made (`server_timing_lookup.py`).
        """
        try:
            value = decode_any(json_text)
        except NOT_JSON:
            return

        if value is None:
            return

        if self.server_timing is None:
            self.server_timing = {}

        self.server_timing[name] = value


def _json_of(payload: bytes | NamedEvent) -> bytes:
    """Return the data of an event, which should be JSON, without the name of the event."""
    return payload if isinstance(payload, bytes) else payload.data


def _kind_of_output_without_text(
    choice: ChoiceFields, delta: DeltaFields | None
) -> _OutputKind | None:
    """Return which kind of output a choice without text has, or None if it has no output.

    Everything that is not reasoning belongs to the answer: tool calls, refusals, and the ids of
    tokens, which some servers send instead of their text.

    Args:
        choice: The choice, whose text is empty.
        delta: Its delta or its message, or None for a completion, which has neither.
    """
    if delta is None:
        return "answer" if choice.token_ids else None

    has_reasoning = bool(delta.reasoning_content or delta.reasoning)
    if has_reasoning:
        return "reasoning"

    has_tool_calls = _tool_calls_of(delta) is not None
    has_token_ids = bool(delta.token_ids or choice.token_ids)
    has_answer = has_tool_calls or bool(delta.refusal) or has_token_ids

    return "answer" if has_answer else None


def _tool_calls_of(delta: DeltaFields) -> msgspec.Raw | None:
    """Return the tool calls in a delta as JSON, or None if it has none.

    They are in `tool_calls` or in the older field `function_call`. Some servers send an empty list
    with each text.
    """
    for calls in (delta.tool_calls, delta.function_call):
        if calls is not ABSENT and bytes(calls) not in EMPTY:
            return calls
    return None


def _sole_text(event: EventFields) -> str | None:
    """Return the text of an event that has nothing else to read, or None for any other event.

    A finish reason, a usage, an error or a timing may change with each event and must be read each
    time. So an event with one of them cannot show how later events look.
    """
    if event.choices is None or len(event.choices) != 1 or event.usage is not None:
        return None

    choice = event.choices[0]
    if choice.finish_reason or _has_error_or_timing(event):
        return None

    delta = choice.delta or choice.message
    if delta is None:
        return choice.text

    return delta.content or delta.reasoning_content or delta.reasoning


def _has_error_or_timing(event: EventFields) -> bool:
    """Return True if a field of an event that has an error or the server's own timing is set."""
    raw_values = (
        event.error,
        event.message,
        event.detail,
        event.timings,
        event.nvext,
        event.metrics,
    )
    return any(is_set(raw_value) for raw_value in raw_values)


def _with_prompt_counts(counts: UsageFields, earlier: UsageFields) -> UsageFields:
    """Return token counts without prompt tokens, completed by the prompt tokens of earlier counts.

    Anthropic's messages state the prompt tokens when they start and the output tokens at their end.
    Both may have details of the prompt, such as how many tokens were cached. Then those of the
    later counts are used.

    Args:
        counts: The later counts, without prompt tokens.
        earlier: The counts of an earlier event of the same response.
    """
    cache_written = counts.cache_creation_input_tokens or earlier.cache_creation_input_tokens
    return msgspec.structs.replace(
        counts,
        prompt_tokens=earlier.prompt_tokens,
        input_tokens=earlier.input_tokens,
        input_tokens_details=counts.input_tokens_details or earlier.input_tokens_details,
        cache_creation_input_tokens=cache_written,
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
