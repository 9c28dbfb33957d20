"""Reads the events of OpenAI's Responses API as events of a chat. Pure.

The output of a response is a list of items: messages, reasoning, and function calls. A stream has
events such as `response.output_text.delta` with pieces of an item, and ends with an event that has
the complete response in its field `response`. The `event` of the functions here is the decoded JSON
of one event.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .event_fields import ABSENT, ChoiceFields, DeltaFields, EventFields, nested_value
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


def is_response_event(event: dict[str, Any]) -> bool:
    """Return True for an event of the Responses API, and for a response that was not streamed."""
    event_type = event.get("type")
    if isinstance(event_type, str) and event_type.startswith("response."):
        return True
    return event.get("object") == "response"


def read_response_event(event: dict[str, Any]) -> EventFields:
    """Return an event, or a response that was not streamed, as an event of a chat.

    An event without output, such as `response.created`, has no choices.
    """
    delta = event.get("delta")
    event_type = str(event.get("type"))
    if isinstance(delta, str) and event_type.endswith(".delta"):
        return EventFields(choices=[ChoiceFields(delta=_read_delta(event, event_type, delta))])
    if event.get("object") == "response":
        return _read_end(event, is_streamed=False)
    response = event.get("response")
    if isinstance(response, dict):
        return _read_end(response, is_streamed=True)
    return EventFields()


def _read_delta(event: dict[str, Any], event_type: str, text: str) -> DeltaFields:
    """Return a piece of output. One that chat has no field for is a piece of a tool call."""
    chat_field = _DELTA_FIELDS.get(event_type)
    if chat_field is not None:
        fields: dict[str, Any] = {chat_field: text}
        return DeltaFields(**fields)
    call = {"index": event.get("output_index"), "function": {"arguments": text}}
    return DeltaFields(tool_calls=msgspec.Raw(msgspec.json.encode([call])))


def _read_end(response: dict[str, Any], *, is_streamed: bool) -> EventFields:
    """Return the finish reason, the usage and the error of a complete response.

    The output of a response that was not streamed is returned too. That of a stream came before,
    in its deltas. Events of an incomplete response, such as `response.in_progress`, have nothing
    that is read.
    """
    status = response.get("status")
    if status not in _END_STATES:
        return EventFields()
    if status == "failed":
        error = response.get("error") or {"message": "the response failed"}
        return EventFields(error=msgspec.Raw(msgspec.json.encode(error)))
    items = [item for item in response.get("output") or () if isinstance(item, dict)]
    choice = ChoiceFields(
        message=None if is_streamed else _read_output(items),
        finish_reason=_finish_reason(response, items),
    )
    usage = response.get("usage")
    counts = read_counts(usage) if isinstance(usage, dict) else None
    return EventFields(choices=[choice], usage=counts)


def _finish_reason(response: dict[str, Any], items: list[dict[str, Any]]) -> str:
    """Return the finish reason that a chat would have for the status of a complete response.

    `items` is the output of the response. A chat that ends with function calls says `tool_calls`,
    while the status here is "completed" as for any other output.
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
    """Return the text, the reasoning and the tool calls of a response that was not streamed.

    `items` is its output. A function call is an item of its own here, and a field of the message in
    a chat.
    """
    calls = [
        {
            "id": item.get("call_id"),
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        for item in items
        if item.get("type") == "function_call"
    ]
    return DeltaFields(
        content=_joined_texts(items, "message"),
        reasoning=_joined_texts(items, "reasoning"),
        tool_calls=msgspec.Raw(msgspec.json.encode(calls)) if calls else ABSENT,
    )


def _joined_texts(items: list[dict[str, Any]], item_type: str) -> str | None:
    """Return the texts of all items of a type, or None if there are none."""
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
