"""Reference implementation, in Python, of what `_compiled.c` does for the decoding of events.

The two state classes hold the fields of a response while it arrives. The functions recognise plain
events, which are events that differ from an earlier event of the same response in their text alone.
The tests compare the compiled versions with these, and `implementation.py` chooses between them.
This module must not import that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..request import NEVER

if TYPE_CHECKING:
    from .event_fields import UsageFields
    from .event_timeline import EventOrCount, EventTimeline

NO_MORE_TEMPLATES = 1 << 60
"""A value of `ResponseReaderState.learned_templates` with which no template is learned."""

_MAX_TOKEN_COUNT = (1 << 31) - 1

_BYTES_OF_PLAIN_TEXT = bytes(byte for byte in range(0x20, 0x100) if byte not in b'"\\')
"""The bytes that stand for themselves in a JSON string."""


class DecoderState:
    """The fields of a decoder of server-sent events (see `sse.SseDecoder`).

    Attributes:
        has_started: The first event has begun, so that no byte order mark can come any more.
    """

    __slots__ = ("_earlier_bytes", "_earlier_reads", "_is_after_cr", "_unparsed", "has_started")

    def __init__(self) -> None:
        """Start before the first byte."""
        self._unparsed = b""  # the newest bytes of an incomplete event
        self._earlier_reads: list[bytes] = []  # the reads of that event before `_unparsed`
        self._earlier_bytes = 0  # the size of the reads in `_earlier_reads`
        self._is_after_cr = False  # the last byte was a CR, which an LF may follow
        self.has_started = False


class ResponseReaderState:
    """The fields of a reader of events (see `response_reader.ResponseReader`).

    Timestamps are monotonic, in ns, and NEVER for events that have not happened. The compiled code
    reads and writes these fields by their names.

    Attributes:
        first_event: The timestamp of the first event of any kind.
        first_token: The timestamp of the first output event.
        first_answer: The timestamp of the first output event that is not reasoning.
        last_token: The timestamp of the last output event.
        end: The timestamp of the last output event or finish reason.
        output_events: How many events with output came.
        max_gap: The largest gap between consecutive output events, in ns.
        max_gap_uncertainty: The uncertainty of `max_gap`, in ns.
        first_token_uncertainty: The uncertainty of `first_token`, in ns.
        first_event_tokens: The output tokens of the first output event by the server's usage, or 0
            if that is not known.
        uncertain_timestamp: The newest timestamp of an output event that is uncertain. It says
            something of the last output event only if it is that of this event
            (see `last_token_uncertainty`).
        timestamp_uncertainty: The uncertainty of `uncertain_timestamp`, in ns.
        unknown_output_events: How many events before the first known output had a text in a field
            of the delta that is not known.
        finish_reason: The finish reason, or "" if none came yet.
        error: The text of the first error event, or "".
        parse_error: What is wrong with the first event that cannot be parsed, or "".
        remark: What is unusual about a response that is read all the same; "" for nothing.
        response_id: The id of the response, if the text is kept.
        usage_counts: The last usage with output tokens that came, or else the first usage.
        text_pieces: The pieces of the text, or None if the text is not kept.
        reasoning_pieces: The pieces of the reasoning, or None if the text is not kept.
        server_timing: The name of each format of the server's own timing with its value.
        tool_deltas: The pieces of tool calls, if the text is kept.
        template: The bytes before and after the text of a plain event, once one was learned.
        plain_events: How many events were recognised by a template.
        learned_templates: How many templates were learned, or NO_MORE_TEMPLATES.
        on_output: A function called with (text, reasoning, timestamp) for each output event.
    """

    __slots__ = (
        "end",
        "error",
        "finish_reason",
        "first_answer",
        "first_event",
        "first_event_tokens",
        "first_token",
        "first_token_uncertainty",
        "last_token",
        "learned_templates",
        "max_gap",
        "max_gap_uncertainty",
        "on_output",
        "output_events",
        "parse_error",
        "plain_events",
        "reasoning_pieces",
        "remark",
        "response_id",
        "server_timing",
        "template",
        "text_pieces",
        "timeline",
        "timestamp_uncertainty",
        "tool_deltas",
        "uncertain_timestamp",
        "unknown_output_events",
        "usage_counts",
    )

    def __init__(
        self,
        timeline: EventTimeline,
        keep_text: bool = False,
        on_output: Callable[[str, str, int], None] | None = None,
        *,
        expects_few_events: bool = False,
    ) -> None:
        """Start with an empty response.

        The class docstring describes each attribute. "" stands for a text that has not come.

        Args:
            timeline: The event timeline that gets the time of each output event.
            keep_text: Keep the text, the tool calls and the id of the response.
            on_output: A function called with (text, reasoning, timestamp) for each output event.
            expects_few_events: So few events will come that learning a template costs more than it
                saves.
        """
        self.timeline = timeline
        self.on_output = on_output

        # Timestamps of events, in ns. They are NEVER until the event has come.
        self.first_event = NEVER  # of any kind
        self.first_token = NEVER  # the first output, reasoning included
        self.first_answer = NEVER  # the first output that is not reasoning
        self.last_token = NEVER
        self.end = NEVER  # the last output or finish reason

        # The largest gap between output events, in ns
        self.max_gap = 0

        # By how much these timestamps and this gap may be wrong, in ns
        self.first_token_uncertainty = 0
        self.max_gap_uncertainty = 0
        self.uncertain_timestamp = NEVER
        self.timestamp_uncertainty = 0

        # The number of events, and the token counts of the server
        self.output_events = 0
        self.unknown_output_events = 0
        self.first_event_tokens = 0
        self.usage_counts: UsageFields | None = None

        # What else the response says
        self.finish_reason = ""
        self.error = ""
        self.parse_error = ""
        self.remark = ""  # what is unusual about a response that is read all the same
        self.response_id = ""
        self.server_timing: dict[str, Any] | None = None

        # Texts, if they are kept
        self.text_pieces: list[str] | None = [] if keep_text else None
        self.reasoning_pieces: list[str] | None = [] if keep_text else None
        self.tool_deltas: list[msgspec.Raw] = []

        # Plain events differ from an earlier one in their text alone. They are recognised by a
        # template, the bytes before and after the text, and are not decoded. With the count
        # NO_MORE_TEMPLATES, learning a template is never worthwhile.
        self.template: tuple[bytes, bytes] | None = None
        self.plain_events = 0
        self.learned_templates = NO_MORE_TEMPLATES if expects_few_events else 0

    @property
    def last_token_uncertainty(self) -> int:
        """The uncertainty of the timestamp of the last output event, in ns."""
        return self.timestamp_uncertainty if self.uncertain_timestamp == self.last_token else 0


def is_plain_text(text: bytes) -> bool:
    """Return True if the content of a JSON string is a non-empty text without escapes.

    The text must also be UTF-8 and without control characters, so that a JSON decoder would accept
    it as it is.
    """
    if not text:
        return False

    special_bytes = text.translate(None, _BYTES_OF_PLAIN_TEXT)
    if special_bytes:
        return False
    if text.isascii():
        return True

    try:
        text.decode()
    except UnicodeDecodeError:
        return False

    return True


def count_leading_plain_events(
    events: Sequence[EventOrCount], start: int, before: bytes, after: bytes
) -> tuple[int, int]:
    """Count the plain events at the index `start` and after it, up to the first other event.

    A plain event differs from an earlier one in its text alone. For example, [plain, 3, other] has
    two items before the first other event. They stand for four plain events: the first item is one
    event, and the number 3 stands for three. From index 0, the result is therefore (2, 4).

    Args:
        events: Payloads of events. A number stands for that many plain events, which were counted
            by the receiver and whose payloads are gone.
        start: The index of the first item to look at.
        before: The bytes before the text of a plain event.
        after: The bytes after its text.

    Returns:
        The number of items that are plain events, and the number of events that they stand for. It
        is a plain tuple, because that of the compiled version is one, too.
    """
    plain_items = 0
    plain_events = 0
    for event_or_count in events[start:]:
        if isinstance(event_or_count, int):
            plain_events += event_or_count
        elif isinstance(event_or_count, bytes) and _is_plain_event(event_or_count, before, after):
            plain_events += 1
        else:
            break
        plain_items += 1

    return plain_items, plain_events


def _is_plain_event(payload: bytes, before: bytes, after: bytes) -> bool:
    """Return True if a payload differs from the template in its text alone."""
    if not payload.startswith(before) or not payload.endswith(after):
        return False
    return is_plain_text(payload[len(before) : -len(after)])


def token_count(value: object) -> int | None:
    """Return `value` as an integer if it is a count of tokens, else None.

    A count is a whole number of at most 31 bits, which is what the columns of the results can
    hold. Some servers write it as 8.0. A bool is no count, although it is an int in Python.
    """
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and 0 <= value <= _MAX_TOKEN_COUNT:
        return value
    return None
