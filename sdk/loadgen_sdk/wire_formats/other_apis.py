"""Reads events and responses of APIs other than chat as if they were those of chat. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .event_fields import ABSENT, EMPTY, NOT_JSON, ChoiceFields, EventFields
from .messages_events import is_message_event, read_message_event
from .responses_events import is_response_event, read_response_event
from .sse import NamedEvent


def convert_to_chat_event(
    event: EventFields, payload: bytes | NamedEvent, decode: Callable[[bytes], Any]
) -> EventFields | None:
    """Return the event of another API as one with choices, or None if its API is not known.

    Embeddings have their numbers in `data` and rerank has them in `results`. Such a response is
    complete and has no output tokens, so it becomes a choice with a finish reason alone. The
    Responses API and Anthropic's messages are recognised by the fields `output` and `type`.

    Args:
        event: The fields of an event without choices.
        payload: The event itself.
        decode: Decodes JSON, and raises one of NOT_JSON.
    """
    for numbers in (event.data, event.results):
        if numbers is not ABSENT:
            has_numbers = bytes(numbers) not in EMPTY
            choices = [ChoiceFields(finish_reason="stop")] if has_numbers else []
            return EventFields(choices=choices, usage=event.usage, error=event.error)
    if event.output is ABSENT and not event.type:
        return None
    try:
        value = decode(payload if isinstance(payload, bytes) else payload.data)
    except NOT_JSON:
        # `event` was decoded all the same, because its decoder skips fields that it does not know.
        return None
    return read_other_api(value) if isinstance(value, dict) else None


def read_other_api(event: dict[str, Any]) -> EventFields | None:
    """Return an event or response of the Responses API or of Anthropic's messages as one of chat.

    Return None if it is an event of neither API.
    """
    if is_response_event(event):
        return read_response_event(event)
    if is_message_event(event):
        return read_message_event(event)
    return None
