"""Reads the events of OpenAI's Responses API as events of a chat. Pure."""

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


def is_response_event(value: dict[str, Any]) -> bool:
    """Return True for an event of the Responses API, and for a response that was not streamed."""
    event_type = value.get("type")
    if isinstance(event_type, str) and event_type.startswith("response."):
        return True
    return value.get("object") == "response"


def read_response_event(value: dict[str, Any]) -> EventFields:
    """Return an event, or a response that was not streamed, as an event of a chat.

    An event without output, such as `response.created`, has no choices.
    """
    delta = value.get("delta")
    event_type = str(value.get("type"))
    if isinstance(delta, str) and event_type.endswith(".delta"):
        return EventFields(choices=[ChoiceFields(delta=_read_delta(value, event_type, delta))])
    if value.get("object") == "response":
        return _read_end(value, is_streamed=False)
    response = value.get("response")
    return _read_end(response, is_streamed=True) if isinstance(response, dict) else EventFields()


def _read_delta(value: dict[str, Any], event_type: str, text: str) -> DeltaFields:
    """Return a piece of output. One that chat has no field for is a piece of a tool call."""
    if event_type in _DELTA_FIELDS:
        fields: dict[str, Any] = {_DELTA_FIELDS[event_type]: text}
        return DeltaFields(**fields)
    call = {"index": value.get("output_index"), "function": {"arguments": text}}
    return DeltaFields(tool_calls=msgspec.Raw(msgspec.json.encode([call])))


def _read_end(response: dict[str, Any], *, is_streamed: bool) -> EventFields:
    """Return the end of a response, and its output if it was not streamed."""
    status = response.get("status")
    if status not in _END_STATES:
        return EventFields()
    if status == "failed":
        error = response.get("error") or {"message": "the response failed"}
        return EventFields(error=msgspec.Raw(msgspec.json.encode(error)))
    items = [item for item in response.get("output") or () if isinstance(item, dict)]
    usage = response.get("usage")
    choice = ChoiceFields(
        message=None if is_streamed else _read_output(items),
        finish_reason=_finish_reason(response, items),
    )
    return EventFields(
        choices=[choice], usage=read_counts(usage) if isinstance(usage, dict) else None
    )


def _finish_reason(response: dict[str, Any], items: list[dict[str, Any]]) -> str:
    status = str(response["status"])
    if status == "incomplete":
        reason = nested_value(response, "incomplete_details", "reason")
        return _FINISH_REASONS.get(reason, reason) if isinstance(reason, str) else status
    if status == "cancelled":
        return status
    has_calls = any(item.get("type") == "function_call" for item in items)
    return "tool_calls" if has_calls else "stop"


def _read_output(items: list[dict[str, Any]]) -> DeltaFields:
    """Return the text, the reasoning and the tool calls of a response that was not streamed."""
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
    parts: list[Any] = []
    for item in items:
        if item.get("type") == item_type:
            parts.extend(item.get("content") or ())
    texts = [str(part["text"]) for part in parts if isinstance(part, dict) and part.get("text")]
    return "".join(texts) or None
