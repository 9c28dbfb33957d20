"""Reads the events of an answer: text, finish reason, usage, errors, and the arrival instant of each. Pure.

Each request has one `ResponseReader`. Chat and completions, streamed or not, are so similar that one
reader serves all four. A request is `ok` by the rules of metrics.md: the HTTP framing has ended,
there is a finish reason, which is none of ERROR_ENDINGS, and there was no error event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import sub
from typing import Any

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
from .implementation import ResponseReaderState, plain_run
from .lenient_decoding import decode_leniently, read_event
from .other_apis import read_other_api, with_choices
from .sse import NamedEvent

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

FIELD_CHARS = 60
HIDDEN_OUTPUT = "have output in the field {!r} of a delta, which is not known here"
NOT_UTF8 = "contain bytes that are not UTF-8; each is read as U+FFFD"
NOT_STREAMED = "were not streamed: one JSON object came although a stream was requested"
"""Remarks about responses that are ok. The subject of each sentence is "N responses"."""

EventOrCount = bytes | NamedEvent | int
"""What a read brings: an event, or a number, which stands for so many plain events (`ResponseReader._learn`)."""


def count_events(events: Sequence[EventOrCount]) -> int:
    """How many events these are."""
    return sum([event if isinstance(event, int) else 1 for event in events])


def split_last_event(events: list[EventOrCount]) -> tuple[list[EventOrCount], list[EventOrCount]]:
    """All events but the last one, and that one."""
    last = events[-1]
    if isinstance(last, int) and last > 1:
        return [*events[:-1], last - 1], [1]
    return events[:-1], [last]


class EventTimeline:
    """Arrival instants of the output events of one stage and the gaps between them (ns): histogram, timeline.

    `together`: plain events that came with the last event before them: its instant, and how many,
    each with a gap of 0. They are not in `gaps` and `instants`. `errors`: the stamp errors (ns) of
    the events whose stamp is unsure, and how many have it. Every other event has error 0.
    """

    __slots__ = ("errors", "gaps", "instants", "together")

    def __init__(self) -> None:
        self.gaps: list[int] = []
        self.instants: list[int] = []
        self.together: list[tuple[int, int]] = []
        self.errors: list[tuple[int, int]] = []

    def each_instant(self) -> list[int]:
        """The instant of every output event, in order."""
        return sorted(
            [*self.instants, *(stamp for stamp, many in self.together for _ in range(many))]
        )


class ResponseReader(ResponseReaderState):
    """The state of one answer while it arrives. `feed` is given complete events.

    Instants are monotonic ns. An event's instant is its read's `stamp`: the arrival of the newest
    bytes of that read. An event that came in an earlier packet of the read may have arrived at any
    time since the socket was last known to be empty; the time from there to `stamp` is its stamp
    error.
    """

    __slots__ = ()

    def feed_with_uncertainty(
        self,
        unsure: Sequence[EventOrCount],
        sure: Sequence[EventOrCount],
        stamp: int,
        error: int,
        *,
        one_write: bool = False,
    ) -> None:
        """Process the events of one read. Those that are `unsure` may have come earlier, by at most `error` ns.

        The end of an answer (finish, usage, `[DONE]`) is sent right after its last output, or with
        the next step of the server. Where only that follows an output event in its read, the first
        token keeps the error, the last one is wrong by a mean gap at most, and `EventTimeline.errors` and
        the largest gap count the event as exact: it would judge servers, not this client.
        `one_write`: the same for all events, which came in one write.
        """
        before, largest = self.output_events, self.max_gap
        if unsure:
            self.feed(unsure, stamp, error)
        outputs = self.output_events - before
        if sure:
            self.feed(sure, stamp)
        if self.output_events > before + outputs:
            self.unsure_at = NEVER
        elif outputs:
            self.unsure_at, self.unsure_error = stamp, error
            if self.finish_reason:
                outputs -= 1
                if self.output_events > 1:
                    mean_gap = (stamp - self.first_token) // (self.output_events - 1)
                    self.unsure_error = min(error, mean_gap)
        if outputs and not one_write:
            self.flow.errors.append((error, outputs))
        if (one_write or not outputs) and self.max_gap > largest:
            self.max_gap_error = 0

    def count_plain_events(self, count: int, stamp: int, error: int = 0) -> None:
        """Count plain events (`_learn`) that came together at `stamp`, or earlier by at most `error` ns."""
        if not count:
            return
        gap = stamp - self.last_token
        if gap > self.max_gap:
            self.max_gap = gap
            self.max_gap_error = error
        self.flow.gaps.append(gap)
        self.flow.instants.append(stamp)
        if count > 1:
            self.flow.together.append((stamp, count - 1))
        self.output_events += count
        self.plain_events += count
        self.last_token = self.end = stamp

    def count_plain_events_at(self, stamps: list[int]) -> None:
        """Count plain events, each with its own stamp, which is exact."""
        gaps = list(map(sub, stamps, [self.last_token, *stamps]))
        longest = max(gaps)
        if longest > self.max_gap:
            self.max_gap = longest
            self.max_gap_error = 0
        self.flow.gaps.extend(gaps)
        self.flow.instants.extend(stamps)
        self.output_events += len(stamps)
        self.plain_events += len(stamps)
        self.last_token = self.end = stamps[-1]

    def _learn(self, event: EventFields, payload: bytes) -> None:
        """Make the template of plain events from one that was decoded.

        A plain event differs from it in its text alone, by which it needs no decoding: what stands
        before and after the text is the same, so it is the same JSON, and all that it says is that
        output came. The text must be in the payload exactly once as a string, which then is the
        string that was decoded (nothing in it is escaped).
        """
        choice = event.choices[0] if event.choices and len(event.choices) == 1 else None
        if choice is None or choice.finish_reason or b"\\" in payload or b"\n" in payload:
            return
        part = choice.delta or choice.message
        text = (
            (part.content or part.reasoning_content or part.reasoning)
            if part is not None
            else choice.text
        )
        if not text:
            return
        if event.usage is not None:
            return
        for raw in (
            event.error,
            event.message,
            event.detail,
            event.timings,
            event.nvext,
            event.metrics,
        ):
            if raw is not ABSENT and is_set(raw):
                return
        string = b'"%s"' % text.encode()
        at = payload.find(string)
        if at >= 0 and payload.rfind(string) == at:
            self.learned += 1
            self.template = payload[: at + 1], payload[at + len(string) - 1 :]

    def feed(self, events: Sequence[EventOrCount], stamp: int, error: int = 0) -> None:
        """Process events that came at `stamp`, or earlier by at most `error` ns."""
        if events and self.first_event < 0:
            self.first_event = stamp
        position = 0
        while position < len(events):
            if self.template is not None:
                items, plain = plain_run(events, position, *self.template)
                if items:
                    self.count_plain_events(plain, stamp, error)
                    position += items
                    continue
            payload: bytes | NamedEvent = events[position]  # type: ignore[assignment]  # no number without a template
            position += 1
            if payload != b"[DONE]":
                self._feed_payload(payload, stamp, error)

    def _feed_payload(self, payload: bytes | NamedEvent, stamp: int, error: int) -> None:
        """Process one event that is not known to be plain."""
        is_usual = False
        try:
            event: EventFields | None = decode_event(payload)  # type: ignore[arg-type]  # a Named raises TypeError: cheaper than a test per event
            is_usual = self.pieces is None and self.sink is None
        except (*NOT_JSON, TypeError):
            event = self._unusual_event(payload)
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
            self._take_choices(event, payload, is_usual, stamp, error)
        if event.usage is not None:
            self._read_usage(event.usage)
        if event.error is not ABSENT or event.message is not ABSENT or event.detail is not ABSENT:
            self._read_error(event, payload)
        if event.timings is not ABSENT or event.nvext is not ABSENT or event.metrics is not ABSENT:
            self._read_timing(event)

    def _take_choices(
        self,
        event: EventFields,
        payload: bytes | NamedEvent,
        is_usual: bool,
        stamp: int,
        error: int,
    ) -> None:
        """Process the choices of an event, which together are one output event or none.

        `is_usual`: the payload may become the template of plain events.
        """
        choices = event.choices or []
        has_output = False
        for choice in choices:
            has_output = self._take_choice(choice, has_output, stamp, error)
        if not has_output:
            if self.last_token < 0:
                self._note_unknown_output(payload)
            return
        self._count_output_event(stamp, error)
        if self.sink is not None:
            self._call_sink(self.sink, choices, stamp)
        # A stream whose events differ in more (a time, a usage) is not tried for ever.
        if is_usual and self.learned <= 3 + self.plain_events // 4:
            self._learn(event, payload)  # type: ignore[arg-type]

    def _take_choice(self, choice: ChoiceFields, has_output: bool, stamp: int, error: int) -> bool:
        """Process one choice and return whether the event has output so far.

        `has_output`: an earlier choice of the event has output.
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
            has_output, is_answer = self._classify_without_text(choice, delta, has_output)
        if has_output and self.last_token < 0:
            self.first_token = stamp
            self.stamp_error = error
        if has_output and is_answer and self.first_answer < 0:
            self.first_answer = stamp
        if choice.finish_reason:
            self._finish(choice, choice.finish_reason, stamp)
        return has_output

    def _finish(self, choice: ChoiceFields, finish_reason: str, stamp: int) -> None:
        """Note the end of a choice, and what the server says of its time there."""
        self.finish_reason = finish_reason
        self.end = stamp
        if choice.meta_info is not ABSENT:
            self._keep_timing("meta_info", bytes(choice.meta_info))
        if choice.speculative_decoding is not ABSENT:
            self._keep_timing("speculative_decoding", bytes(choice.speculative_decoding))

    def _count_output_event(self, stamp: int, error: int) -> None:
        """Count an event with output and the gap before it."""
        if self.last_token >= 0:
            gap = stamp - self.last_token
            self.flow.gaps.append(gap)
            if gap > self.max_gap:
                self.max_gap = gap
                self.max_gap_error = error
        self.flow.instants.append(stamp)
        self.output_events += 1
        self.last_token = stamp
        self.end = stamp

    def _note_unknown_output(self, payload: bytes | NamedEvent) -> None:
        """Count an event before the first known output if an unknown field has a text."""
        field = unknown_text_field(payload if isinstance(payload, bytes) else payload.data)
        if not field:
            return
        self.unknown_outputs += 1
        if self.unknown_outputs == UNKNOWN_OUTPUTS:
            self.remark = HIDDEN_OUTPUT.format(field[:FIELD_CHARS])

    @property
    def output_is_hidden(self) -> bool:
        """Whether output of several tokens came in fields that are not known."""
        silent = not self.output_events and (self.usage().output or 0) > 1
        return silent or self.unknown_outputs >= UNKNOWN_OUTPUTS

    def _classify_without_text(
        self, choice: ChoiceFields, delta: DeltaFields | None, output: bool
    ) -> tuple[bool, bool]:
        """Whether a choice without content text is output, and whether that output is answer (not reasoning).

        Output without text: reasoning, a tool call, a refusal, token ids. `output`: what an earlier
        choice was.
        """
        if delta is not None:
            reasoning = delta.reasoning_content or delta.reasoning
            if reasoning:
                if self.reasoning_pieces is not None:
                    self.reasoning_pieces.append(reasoning)
                return True, False
            for raw in (delta.tool_calls, delta.function_call):
                if raw is not ABSENT and bytes(raw) not in EMPTY:
                    if self.pieces is not None:
                        self.tool_deltas.append(raw)
                    return True, True
            if delta.refusal or delta.token_ids:
                return True, True
        if choice.token_ids:
            return True, True
        return output, False

    @staticmethod
    def _call_sink(
        sink: Callable[[str, str, int], None], choices: list[ChoiceFields], stamp: int
    ) -> None:
        """Pass the text and the reasoning of each choice on to an application."""
        for choice in choices:
            delta = choice.delta or choice.message
            text = (delta.content if delta is not None else choice.text) or ""
            reasoning = (
                (delta.reasoning_content or delta.reasoning or "") if delta is not None else ""
            )
            sink(text, reasoning, stamp)

    def _read_usage(self, counts: UsageFields) -> None:
        """Keep the last usage with output tokens, else the first. With the first output event it gives n1 of TPOT."""
        output = counts.output()
        if (
            counts.input_tokens is None
            and counts.prompt_tokens is msgspec.UNSET
            and self.usage_counts is not None
        ):
            before = (
                self.usage_counts
            )  # a message says the prompt at its start, and the output at its end
            counts = msgspec.structs.replace(
                counts,
                prompt_tokens=before.prompt_tokens,
                input_tokens=before.input_tokens,
                input_tokens_details=counts.input_tokens_details or before.input_tokens_details,
                cache_creation_input_tokens=counts.cache_creation_input_tokens
                or before.cache_creation_input_tokens,
            )
        if not output:
            self.usage_counts = self.usage_counts or counts
            return
        self.usage_counts = counts
        if self.output_events == 1 and not self.first_event_tokens and not self.finish_reason:
            self.first_event_tokens = output

    def _unusual_event(self, payload: bytes | NamedEvent) -> EventFields | None:
        """Handle named events, `[DONE]`, `data: null`, and JSON of an unexpected shape; None: nothing more to read."""
        if isinstance(payload, NamedEvent):
            if payload.event == b"error":
                self.error = self.error or error_text(payload.data)
                return None
            if payload.event.endswith(b"metrics"):
                self._keep_timing(payload.event.decode("latin-1"), payload.data)
                return None
        text = (
            payload.data if isinstance(payload, NamedEvent) else payload
        ).strip()  # a named event counts by its data
        if text == b"[DONE]":
            return None
        try:
            value = self._decode_leniently(text)
        except NOT_JSON:
            if not isinstance(payload, NamedEvent):
                self.malformed = self.malformed or f"an event that is not JSON: {text[:120]!r}"
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
        if not (is_set(event.error) or is_set(event.message) or is_set(event.detail)):
            return
        if bytes(event.error) not in EMPTY or not (event.choices or event.usage is not None):
            self.error = self.error or error_text(
                payload if isinstance(payload, bytes) else payload.data
            )

    def _read_timing(self, event: EventFields) -> None:
        for name in ("timings", "nvext", "metrics"):
            raw = getattr(event, name)
            if is_set(raw):
                self._keep_timing(name, bytes(raw))

    def _keep_timing(self, name: str, raw: bytes) -> None:
        try:
            value = decode_any(raw)
        except NOT_JSON:
            return
        if value is not None:
            self.server_timing = {**(self.server_timing or {}), name: value}

    def tool_calls(self) -> tuple[dict[str, str], ...]:
        """The tool calls of the answer, put together from their pieces: id, name, arguments (JSON, as text)."""
        calls: dict[int, dict[str, str]] = {}
        for raw in self.tool_deltas:
            value = decode_any(raw)
            pieces = value if isinstance(value, list) else [{"function": value}]
            for position, piece in enumerate(pieces):
                if not isinstance(piece, dict):
                    continue
                index = piece.get("index")
                call = calls.setdefault(
                    index if isinstance(index, int) else position,
                    {"id": "", "name": "", "arguments": ""},
                )
                function = piece.get("function")
                function = function if isinstance(function, dict) else {}
                call["id"] = call["id"] or str(piece.get("id") or "")
                call["name"] = call["name"] or str(function.get("name") or "")
                call["arguments"] += str(function.get("arguments") or "")
        return tuple(calls[index] for index in sorted(calls))

    def usage(self) -> Usage:
        """The last usage with a count of output tokens that the server sent; empty if it sent none."""
        return self.usage_counts.usage() if self.usage_counts is not None else Usage()

    @property
    def usage_is_absurd(self) -> bool:
        """Whether the server sent a number of output tokens that no answer can have, so that `usage` has none."""
        counts = self.usage_counts
        if counts is None:
            return False
        told = (
            counts.output_tokens
            if counts.completion_tokens is msgspec.UNSET
            else counts.completion_tokens
        )
        return told is not None and counts.output() is None

    def judge(self, framing_ended: bool, until_close: bool, streamed: bool) -> Failure | None:
        """None when the request is ok, else its failure, by the rules of metrics.md.

        `framing_ended`: the body ended as its HTTP framing announced. `until_close`: the end of the
        connection ended it. `streamed`: the answer is an event stream.
        """
        if self.error:
            return Failure("error_event", self.error[:ERROR_TEXT_CHARS])
        if not framing_ended or (until_close and streamed and not self.finish_reason):
            return Failure(
                "truncated", f"the body ended early, after {self.output_events} output events"
            )
        if self.malformed:
            return Failure("malformed", self.malformed[:ERROR_TEXT_CHARS])
        if self.first_event < 0:
            return Failure("empty", "an answer without a single event")
        return self._find_finish_failure()

    def _find_finish_failure(self) -> Failure | None:
        """Return the failure of a response without a reason for its end, or with an error as the reason."""
        where = f"after {self.output_events} output events"
        if not self.finish_reason:
            return Failure("no_finish_reason", f"no finish reason {where}")
        if self.finish_reason.lower() in ERROR_ENDINGS:
            return Failure("error_event", f"finish reason {self.finish_reason!r} {where}")
        return None
