"""Reads the events of OpenAI's Responses API as events of a chat. Pure.

The output of a response is a list of items: messages, reasoning, and function calls. A stream has
events such as `response.output_text.delta` with pieces of an item, and ends with an event that has
the complete response in its field `response`. The `event` of the functions here is the decoded JSON
of one event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .event_fields import ChoiceFields, DeltaFields, EventFields, nested_value
from .lenient_decoding import read_counts

_DELTA_FIELDS = {
    "response.output_text.delta": "content",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.refusal.delta": "refusal",
}
"""Type of an event -> the field of a chat's delta that has the same meaning."""

_END_STATES = ("completed", "incomplete", "failed", "cancelled")
_FINISH_REASONS = {"max_output_tokens": "length"}
"""Reasons of incomplete responses that chat has another word for."""


def is_response_event(event: Mapping[str, object]) -> bool:
    """Return True for an event of the Responses API, and for a response that was not streamed."""
    event_type = event.get("type")
    if isinstance(event_type, str) and event_type.startswith("response."):
        return True
    return event.get("object") == "response"


def read_response_event(event: dict[str, Any]) -> EventFields:
    """Convert an event of the Responses API to the form of a chat event.

    There are four cases:

    1. An event with a piece of output, such as `response.output_text.delta`.
    2. A whole response that was not streamed, whose `object` is "response".
    3. The last event of a stream, which has the whole response in its field `response`.
    4. Any other event, such as `response.output_item.done`. It becomes an event without choices.
    """
    delta = event.get("delta")
    event_type = str(event.get("type"))
    if isinstance(delta, str) and event_type.endswith(".delta"):
        return EventFields(choices=[ChoiceFields(delta=_read_delta(event, event_type, delta))])

    is_whole_response = event.get("object") == "response"
    if is_whole_response:
        return _read_ended_response(event, was_output_streamed=False)

    response = event.get("response")
    if isinstance(response, dict):
        return _read_ended_response(response, was_output_streamed=True)

    return EventFields()


def _read_delta(event: Mapping[str, object], event_type: str, text: str) -> DeltaFields:
    """Convert a piece of output to the delta of a chat.

    A piece that is no text, reasoning or refusal is a piece of the arguments of a tool call.

    Args:
        event: The event with the piece.
        event_type: Its type, such as "response.output_text.delta".
        text: The piece.
    """
    chat_field = _DELTA_FIELDS.get(event_type)
    if chat_field is not None:
        fields: dict[str, Any] = {chat_field: text}
        return DeltaFields(**fields)
    call = {"index": event.get("output_index"), "function": {"arguments": text}}
    return DeltaFields(tool_calls=msgspec.Raw(msgspec.json.encode([call])))


def _read_ended_response(response: dict[str, Any], *, was_output_streamed: bool) -> EventFields:
    """Return the output, the finish reason, the usage and the error of a response that has ended.

    The last event of a stream repeats all output of the events before it. That output was counted
    already, so it is left out. A response that has not ended, as in the event
    `response.in_progress`, gives an event without choices.

    Args:
        response: The response object, from a body of its own or from an event of a stream.
        was_output_streamed: Earlier events of a stream have sent the output.
    """
    status = response.get("status")
    has_ended = status in _END_STATES
    if not has_ended:
        return EventFields()

    if status == "failed":
        error = response.get("error") or {"message": "the response failed"}
        return EventFields(error=msgspec.Raw(msgspec.json.encode(error)))

    output_items = [item for item in response.get("output") or () if isinstance(item, dict)]
    choice = ChoiceFields(finish_reason=_finish_reason(response, output_items))
    if not was_output_streamed:
        choice.message = _read_output(output_items)

    usage = response.get("usage")
    counts = read_counts(usage) if isinstance(usage, dict) else None
    return EventFields(choices=[choice], usage=counts)


def _finish_reason(response: Mapping[str, object], items: Sequence[Mapping[str, object]]) -> str:
    """Return the finish reason that a chat would have for a response that has ended.

    For example, an incomplete response that has reached its token limit has "length". A chat that
    ends with function calls has "tool_calls", while the status of the response is "completed" as
    for any other output.

    Args:
        response: The response object, with its status.
        items: Its output.
    """
    status = str(response["status"])
    if status == "incomplete":
        reason = nested_value(response, "incomplete_details", "reason")
        return _FINISH_REASONS.get(reason, reason) if isinstance(reason, str) else status

    if status == "cancelled":
        return status

    has_calls = any(item.get("type") == "function_call" for item in items)
    return "tool_calls" if has_calls else "stop"


def _read_output(items: list[dict[str, Any]]) -> DeltaFields:
    """Convert the output of a response that was not streamed to a message of a chat.

    The output is a list of items: a message with text, reasoning, or a function call, each of which
    is an item of its own. In a chat, one message has all of them in its fields.

    Args:
        items: The output of the response.
    """
    calls = [
        {
            "id": item.get("call_id"),
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        for item in items
        if item.get("type") == "function_call"
    ]
    message = DeltaFields(
        content=_joined_texts(items, "message"), reasoning=_joined_texts(items, "reasoning")
    )
    if calls:
        message.tool_calls = msgspec.Raw(msgspec.json.encode(calls))

    return message


def _joined_texts(items: list[dict[str, Any]], item_type: str) -> str | None:
    """Return the texts of all output items of a type, joined, or None if there are none.

    An item has its texts in a list: `{"type": "message", "content": [{"text": "Hi"}]}`.
    """
    content_parts: list[Any] = []
    for item in items:
        if item.get("type") == item_type:
            content_parts.extend(item.get("content") or ())

    texts = [
        str(content_part["text"])
        for content_part in content_parts
        if isinstance(content_part, dict) and content_part.get("text")
    ]
    return "".join(texts) or None
