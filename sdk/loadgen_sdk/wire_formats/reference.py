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
"""A value of `ReadingState.learned` with which no template of plain events is learned."""

_BYTES_OF_PLAIN_TEXT = bytes(byte for byte in range(0x20, 0x100) if byte not in b'"\\')
"""The bytes that stand for themselves in a JSON string."""


class DecoderState:
    """The fields of a decoder of server-sent events (see `sse.SseDecoder`).

    Attributes:
        started: The first event has begun, so that no byte order mark can come any more.
    """

    __slots__ = ("_after_cr", "_earlier", "_earlier_bytes", "_unparsed", "started")

    def __init__(self) -> None:
        self._unparsed = b""
        self._earlier: list[bytes] = []  # reads before `_unparsed` that belong to the same event
        self._earlier_bytes = 0
        self._after_cr = False
        self.started = False


class ResponseReaderState:
    """The fields of a reader of events (see `response_reader.ResponseReader`).

    Times are monotonic, in ns.

    Attributes:
        template: The bytes before and after the text of a plain event, once one was learned.
        learned: How many templates were learned.
        plain_events: How many events were recognised by a template.
        unsure_at: The timestamp of the last output event, if it is uncertain by `unsure_error`.
        usage_counts: The last usage with output tokens that came, or else the first usage.
        remark: What is unusual about a response that is read all the same; "" for nothing.
        unknown_outputs: How many events before the first known output had a text in a field of
            the delta that is not known.
        sink: A function called with (text, reasoning, timestamp) for each output event.
    """

    __slots__ = (
        "end",
        "error",
        "finish_reason",
        "first_answer",
        "first_event",
        "first_event_tokens",
        "first_token",
        "timeline",
        "last_token",
        "learned",
        "malformed",
        "max_gap",
        "max_gap_error",
        "output_events",
        "pieces",
        "plain_events",
        "reasoning_pieces",
        "remark",
        "response_id",
        "server_timing",
        "sink",
        "stamp_error",
        "template",
        "tool_deltas",
        "unknown_outputs",
        "unsure_at",
        "unsure_error",
        "usage_counts",
    )

    def __init__(
        self,
        timeline: EventTimeline,
        keep_text: bool = False,
        sink: Callable[[str, str, int], None] | None = None,
        *,
        few: bool = False,
    ) -> None:
        """Start with an empty response.

        Args:
            timeline: The event timeline that gets the time of each output event.
            keep_text: Keep the text, the tool calls and the id of the response.
            sink: A function called with (text, reasoning, timestamp) for each output event.
            few: So few events will come that learning a template costs more than it saves.
        """
        self.timeline = timeline
        self.sink = sink
        self.first_event = NEVER
        self.first_token = NEVER
        self.first_answer = NEVER
        self.last_token = NEVER
        self.end = NEVER
        self.output_events = 0
        self.max_gap = 0
        self.max_gap_error = 0
        self.stamp_error = 0
        self.first_event_tokens = 0
        self.unsure_at = NEVER
        self.unsure_error = 0
        self.unknown_outputs = 0
        self.finish_reason = ""
        self.error = ""
        self.malformed = ""
        self.remark = ""
        self.response_id = ""
        self.usage_counts: UsageFields | None = None
        self.pieces: list[str] | None = [] if keep_text else None
        self.reasoning_pieces: list[str] | None = [] if keep_text else None
        self.server_timing: dict[str, Any] | None = None
        self.tool_deltas: list[msgspec.Raw] = []
        self.template: tuple[bytes, bytes] | None = None
        self.plain_events = 0
        self.learned = NO_MORE_TEMPLATES if few else 0

    @property
    def last_token_error(self) -> int:
        """The uncertainty of the timestamp of the last output event, in ns."""
        return self.unsure_error if self.unsure_at == self.last_token else 0


def is_plain_text(text: bytes) -> bool:
    """Return True if the content of a JSON string is a non-empty text without escapes."""
    if not text or text.translate(None, _BYTES_OF_PLAIN_TEXT):
        return False
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def plain_run(
    events: Sequence[EventOrCount], start: int, before: bytes, after: bytes
) -> tuple[int, int]:
    """Count the plain events at the beginning of `events[start:]`.

    Args:
        events: Payloads of events. A number stands for that many plain events.
        start: The index of the first item to look at.
        before: The bytes before the text of a plain event.
        after: The bytes after its text.

    Returns:
        The number of items that are plain events, and the number of events that they stand for.
    """
    items = 0
    plain_events = 0
    for payload in events[start:]:
        if isinstance(payload, int):
            plain_events += payload
        elif isinstance(payload, bytes) and _is_plain_event(payload, before, after):
            plain_events += 1
        else:
            break
        items += 1
    return items, plain_events


def _is_plain_event(payload: bytes, before: bytes, after: bytes) -> bool:
    if not payload.startswith(before) or not payload.endswith(after):
        return False
    return is_plain_text(payload[len(before) : -len(after)])


def token_count(value: object) -> int | None:
    """Return `value` as an integer if it is a count of tokens, else None.

    A count is a whole number of at most 31 bits. Some servers write it as 8.0.
    """
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and 0 <= value < 1 << 31:
        return value
    return None
