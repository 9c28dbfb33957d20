"""Reads the events of Anthropic's Messages API as events of a chat. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .event_fields import ChoiceFields, CountDetails, DeltaFields, EventFields, UsageFields
from .implementation import token_count

_TEXT_FIELDS = {"text_delta": ("text", "content"), "thinking_delta": ("thinking", "reasoning")}
"""Type of a delta -> its field with the text, and the field of a chat's delta with that meaning."""

_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Stop reason -> finish reason of a chat. Any other stop reason is kept as it is."""


def is_message_event(value: dict[str, Any]) -> bool:
    """Return True for an event of the Messages API, and for a message that was not streamed."""
    event_type = value.get("type")
    return isinstance(event_type, str) and event_type in _READERS


def read_message_event(value: dict[str, Any]) -> EventFields:
    """Return an event, or a message that was not streamed, as an event of a chat.

    An event without output, such as `ping`, has no choices. A tool call is output from its name on,
    as in a chat.
    """
    return _READERS[value["type"]](value)


def _read_nothing(_value: dict[str, Any]) -> EventFields:
    return EventFields()


def _read_error(value: dict[str, Any]) -> EventFields:
    error = value.get("error") or {"message": "an error event"}
    return EventFields(error=msgspec.Raw(msgspec.json.encode(error)))


def _read_message_start(value: dict[str, Any]) -> EventFields:
    message = value.get("message")
    return EventFields(usage=_read_usage(message)) if isinstance(message, dict) else EventFields()


def _read_block_start(value: dict[str, Any]) -> EventFields:
    block = value.get("content_block")
    if isinstance(block, dict) and _is_tool_use(block):
        return _event_of_call(value.get("index"), _read_call(block, ""))
    return EventFields()


def _read_block_delta(value: dict[str, Any]) -> EventFields:
    delta = value.get("delta")
    if not isinstance(delta, dict):
        return EventFields()
    text_field, chat_field = _TEXT_FIELDS.get(str(delta.get("type")), ("", ""))
    text = delta.get(text_field)
    if isinstance(text, str):
        fields: dict[str, Any] = {chat_field: text}
        return EventFields(choices=[ChoiceFields(delta=DeltaFields(**fields))])
    arguments = delta.get("partial_json")
    if arguments:
        return _event_of_call(value.get("index"), {"function": {"arguments": arguments}})
    return EventFields()


def _read_message_delta(value: dict[str, Any]) -> EventFields:
    delta = value.get("delta")
    stop_reason = delta.get("stop_reason") if isinstance(delta, dict) else None
    choice = ChoiceFields(finish_reason=_finish_reason(stop_reason))
    return EventFields(choices=[choice], usage=_read_usage(value))


def _read_message(value: dict[str, Any]) -> EventFields:
    """Return a message that was not streamed: its content, the reason of its end, its usage."""
    choices = [ChoiceFields(message=part) for part in _read_content(value.get("content"))]
    choices.append(ChoiceFields(finish_reason=_finish_reason(value.get("stop_reason"))))
    return EventFields(choices=choices, usage=_read_usage(value))


_READERS: dict[str, Callable[[dict[str, Any]], EventFields]] = {
    "message": _read_message,
    "message_start": _read_message_start,
    "content_block_start": _read_block_start,
    "content_block_delta": _read_block_delta,
    "content_block_stop": _read_nothing,
    "message_delta": _read_message_delta,
    "message_stop": _read_nothing,
    "ping": _read_nothing,
    "error": _read_error,
}
"""Type of an event -> the function that reads it."""


def _finish_reason(stop_reason: object) -> str | None:
    if not isinstance(stop_reason, str):
        return None
    return _FINISH_REASONS.get(stop_reason, stop_reason)


def _is_tool_use(block: dict[str, Any]) -> bool:
    """Return True for `tool_use` and for the tools of the server, such as `server_tool_use`."""
    return str(block.get("type")).endswith("tool_use")


def _read_call(block: dict[str, Any], arguments: str) -> dict[str, Any]:
    return {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": arguments}}


def _event_of_call(index: object, call: dict[str, Any]) -> EventFields:
    tool_calls = msgspec.Raw(msgspec.json.encode([{"index": index, **call}]))
    return EventFields(choices=[ChoiceFields(delta=DeltaFields(tool_calls=tool_calls))])


def _read_content(content: object) -> list[DeltaFields]:
    """Return the thinking, the text and the tool calls of a message that was not streamed."""
    if not isinstance(content, list):
        return []
    blocks = [block for block in content if isinstance(block, dict)]
    parts = [
        DeltaFields(reasoning=_joined_texts(blocks, "thinking")),
        DeltaFields(content=_joined_texts(blocks, "text")),
    ]
    calls = [
        _read_call(block, msgspec.json.encode(block.get("input")).decode())
        for block in blocks
        if _is_tool_use(block)
    ]
    if calls:
        parts.append(DeltaFields(tool_calls=msgspec.Raw(msgspec.json.encode(calls))))
    return parts


def _joined_texts(blocks: list[dict[str, Any]], field: str) -> str | None:
    """Return the texts in a field of all blocks, or None if there are none."""
    return "".join(block[field] for block in blocks if isinstance(block.get(field), str)) or None


def _read_usage(value: dict[str, Any]) -> UsageFields | None:
    """Return the usage of a message.

    `input_tokens` does not include the tokens that were read from a cache or written to one. The
    prompt is the sum of the three.
    """
    usage = value.get("usage")
    if not isinstance(usage, dict):
        return None
    uncached = token_count(usage.get("input_tokens"))
    cached = token_count(usage.get("cache_read_input_tokens"))
    written = token_count(usage.get("cache_creation_input_tokens"))
    return UsageFields(
        input_tokens=None if uncached is None else uncached + (cached or 0) + (written or 0),
        output_tokens=token_count(usage.get("output_tokens")),
        input_tokens_details=None if cached is None else CountDetails(cached_tokens=cached),
        cache_creation_input_tokens=written,
    )
