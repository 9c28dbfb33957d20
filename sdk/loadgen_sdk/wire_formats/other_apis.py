"""Reads events and responses of APIs other than chat as if they were those of chat. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .event_fields import ABSENT, EMPTY, NOT_JSON, ChoiceFields, EventFields
from .messages_events import is_message_event, read_message_event
from .responses_events import is_response_event, read_response_event
from .sse import NamedEvent


def with_choices(
    event: EventFields, payload: bytes | NamedEvent, decode: Callable[[bytes], Any]
) -> EventFields | None:
    """Return the event of another API as one with choices, or None if its API is not known.

    Besides the APIs of `read_other_api`, these are embeddings and rerank, which return numbers.
    `decode` decodes JSON, and raises one of NOT_JSON.
    """
    for numbers in (event.data, event.results):
        if numbers is not ABSENT:
            choices = [] if bytes(numbers) in EMPTY else [ChoiceFields(finish_reason="stop")]
            return EventFields(choices=choices, usage=event.usage, error=event.error)
    if event.output is ABSENT and not event.type:
        return None
    try:
        value = decode(payload if isinstance(payload, bytes) else payload.data)
    except NOT_JSON:  # the decoder of `event` does not look at every name
        return None
    return read_other_api(value) if isinstance(value, dict) else None


def read_other_api(value: dict[str, Any]) -> EventFields | None:
    """Return an event or response of the Responses API or of Anthropic's messages as one of chat.

    Return None if it is of neither.
    """
    if is_response_event(value):
        return read_response_event(value)
    if is_message_event(value):
        return read_message_event(value)
    return None
