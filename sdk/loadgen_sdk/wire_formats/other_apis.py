"""Reads events and responses of APIs other than chat as if they were those of chat. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .event_fields import ABSENT, EMPTY, NOT_JSON, ChoiceFields, EventFields
from .messages_events import is_message_event, read_message_event
from .responses_events import is_response_event, read_response_event
from .sse import NamedEvent


def convert_to_chat_event(
    event: EventFields, payload: bytes | NamedEvent, decode: Callable[[bytes], Any]
) -> EventFields | None:
    """Return the event of another API in the form of a chat event, or None if its API is not known.

    The reader of responses knows chat events only, which have `choices`. The other APIs are
    recognised by their fields: embeddings by `data`, rerank by `results`, the Responses API by
    `output` or `type`, and Anthropic's messages by `type`.

    Args:
        event: The fields of an event without choices.
        payload: The event itself.
        decode: Decodes JSON, and raises one of NOT_JSON.
    """
    if event.data is not ABSENT:
        return _complete_response(event, numbers=event.data)
    if event.results is not ABSENT:
        return _complete_response(event, numbers=event.results)

    may_be_other_api = event.output is not ABSENT or event.type != ""
    if not may_be_other_api:
        return None

    json_text = payload if isinstance(payload, bytes) else payload.data
    try:
        value = decode(json_text)
    except NOT_JSON:
        # The decoder of `event` skips fields that it does not know without checking them. This one
        # checks every field.
        return None

    return read_other_api(value) if isinstance(value, dict) else None


def _complete_response(event: EventFields, numbers: msgspec.Raw) -> EventFields:
    """Return a response of embeddings or rerank in the form of a chat event.

    Such a response comes as a whole and has numbers instead of output tokens. It becomes a choice
    with nothing but a finish reason, or no choice if there are no numbers.

    Args:
        event: The fields of the response.
        numbers: Its embeddings or scores, as JSON.
    """
    is_empty = bytes(numbers) in EMPTY
    choices = [] if is_empty else [ChoiceFields(finish_reason="stop")]
    return EventFields(choices=choices, usage=event.usage, error=event.error)


def read_other_api(event: dict[str, Any]) -> EventFields | None:
    """Return an event or response of the Responses API or of Anthropic's messages as one of chat.

    Return None if it is an event of neither API.
    """
    if is_response_event(event):
        return read_response_event(event)
    if is_message_event(event):
        return read_message_event(event)
    return None
