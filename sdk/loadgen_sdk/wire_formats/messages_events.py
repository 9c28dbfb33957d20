"""Reads the events of Anthropic's Messages API as events of a chat. Pure.

A message of this API is a list of content blocks: texts, thinking, and tool uses. A stream has the
events `message_start`, then `content_block_start`, `content_block_delta` and `content_block_stop`
for each block, and at last `message_delta` (stop reason and usage) and `message_stop`. The `event`
of the functions here is the decoded JSON of one event, whose field `type` has its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .event_fields import ChoiceFields, CountDetails, DeltaFields, EventFields, UsageFields
from .implementation import token_count

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


def is_message_event(event: Mapping[str, object]) -> bool:
    """Return True for an event of the Messages API, and for a message that was not streamed."""
    event_type = event.get("type")
    return isinstance(event_type, str) and event_type in _READERS


def read_message_event(event: dict[str, Any]) -> EventFields:
    """Convert an event, or a message that was not streamed, to the form of a chat event.

    An event without output, such as `ping`, has no choices. A tool call is output from its name on,
    as in a chat. `event` is one of which `is_message_event` is true.
    """
    read = _READERS[event["type"]]
    return read(event)


def _read_nothing(_event: Mapping[str, object]) -> EventFields:
    return EventFields()


def _read_error(event: Mapping[str, object]) -> EventFields:
    error = event.get("error") or {"message": "an error event"}
    return EventFields(error=msgspec.Raw(msgspec.json.encode(error)))


def _read_message_start(event: Mapping[str, object]) -> EventFields:
    """Return the usage of the message that begins, which has the number of prompt tokens."""
    message = event.get("message")
    if not isinstance(message, dict):
        return EventFields()
    return EventFields(usage=_read_usage(message))


def _read_block_start(event: Mapping[str, object]) -> EventFields:
    """Return the name of a tool call. The start of any other block has no output."""
    block = event.get("content_block")
    if not isinstance(block, dict) or not _is_tool_use(block):
        return EventFields()
    return _tool_call_event(event.get("index"), _convert_tool_use(block, arguments=""))


def _read_block_delta(event: Mapping[str, object]) -> EventFields:
    """Return a piece of a content block: text, thinking, or arguments of a tool call.

    Other deltas, such as the signature of the thinking, are not output.
    """
    delta = event.get("delta")
    if not isinstance(delta, dict):
        return EventFields()

    text_delta = _read_text_delta(delta)
    if text_delta is not None:
        return EventFields(choices=[ChoiceFields(delta=text_delta)])

    arguments = delta.get("partial_json")
    if arguments:
        return _tool_call_event(event.get("index"), {"function": {"arguments": arguments}})

    return EventFields()


def _read_text_delta(delta: Mapping[str, object]) -> DeltaFields | None:
    """Return a piece of text or of thinking in the form of a chat, or None of any other delta.

    Thinking is what a chat calls reasoning.
    """
    text = delta.get("text")
    if delta.get("type") == "text_delta" and isinstance(text, str):
        return DeltaFields(content=text)
    thinking = delta.get("thinking")
    if delta.get("type") == "thinking_delta" and isinstance(thinking, str):
        return DeltaFields(reasoning=thinking)
    return None


def _read_message_delta(event: Mapping[str, object]) -> EventFields:
    """Return the finish reason and the usage, which come when all blocks are complete."""
    delta = event.get("delta")
    stop_reason = delta.get("stop_reason") if isinstance(delta, dict) else None
    choice = ChoiceFields(finish_reason=_finish_reason(stop_reason))
    return EventFields(choices=[choice], usage=_read_usage(event))


def _read_message(message: Mapping[str, object]) -> EventFields:
    """Convert a message that was not streamed: its content, the reason of its end, its usage.

    The reader of responses looks at one kind of output per choice. So each kind of content (text,
    thinking, tool calls) becomes a choice of its own.
    """
    pieces = _read_complete_blocks(message.get("content"))
    choices = [ChoiceFields(message=piece) for piece in pieces]
    choices.append(ChoiceFields(finish_reason=_finish_reason(message.get("stop_reason"))))
    return EventFields(choices=choices, usage=_read_usage(message))


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
    """Return the finish reason of a chat, or None if there is no stop reason yet."""
    if not isinstance(stop_reason, str):
        return None
    return _FINISH_REASONS.get(stop_reason, stop_reason)


def _is_tool_use(block: Mapping[str, object]) -> bool:
    """Return True for `tool_use` and for the tools of the server, such as `server_tool_use`."""
    return str(block.get("type")).endswith("tool_use")


def _convert_tool_use(block: Mapping[str, object], arguments: str) -> dict[str, Any]:
    """Return a tool use as a tool call of a chat. `arguments` is JSON, as text."""
    return {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": arguments}}


def _tool_call_event(index: object, call: Mapping[str, object]) -> EventFields:
    """Return a piece of a tool call in the form of a chat event.

    Args:
        index: The index of the content block, which tells the calls of a message apart.
        call: The piece, such as `{"function": {"arguments": "[1, 2"}}`.
    """
    tool_calls = msgspec.Raw(msgspec.json.encode([{"index": index, **call}]))
    return EventFields(choices=[ChoiceFields(delta=DeltaFields(tool_calls=tool_calls))])


def _read_complete_blocks(content: object) -> list[DeltaFields]:
    """Convert the content blocks of a message that was not streamed to messages of a chat.

    The result has one item with all thinking, one with all text and, if there are any, one with all
    tool calls. The first two are there even if they have no text, and count as no output then.

    Args:
        content: The field `content` of the message. Anything but a list has no blocks.
    """
    if not isinstance(content, list):
        return []

    blocks = [block for block in content if isinstance(block, dict)]
    messages = [
        DeltaFields(reasoning=_joined_texts(blocks, "thinking")),
        DeltaFields(content=_joined_texts(blocks, "text")),
    ]

    tool_calls = [_convert_complete_tool_use(block) for block in blocks if _is_tool_use(block)]
    if tool_calls:
        messages.append(DeltaFields(tool_calls=msgspec.Raw(msgspec.json.encode(tool_calls))))

    return messages


def _convert_complete_tool_use(block: Mapping[str, object]) -> dict[str, Any]:
    """Return a tool use that was not streamed as a tool call of a chat.

    Its arguments are an object in the Messages API, and a text with JSON in a chat.
    """
    json_arguments = msgspec.json.encode(block.get("input")).decode()
    return _convert_tool_use(block, json_arguments)


def _joined_texts(blocks: list[dict[str, Any]], field: str) -> str | None:
    """Return the texts in a field of all blocks, or None if there are none."""
    texts = [block[field] for block in blocks if isinstance(block.get(field), str)]
    return "".join(texts) or None


def _read_usage(message: Mapping[str, object]) -> UsageFields | None:
    """Return the usage of a message or of a `message_delta`, or None if it has none.

    The prompt is the sum of three counts, because `input_tokens` does not include the tokens that
    were read from the prompt cache or written to it. Every other API includes them.
    """
    usage = message.get("usage")
    if not isinstance(usage, dict):
        return None

    uncached = token_count(usage.get("input_tokens"))
    cached = token_count(usage.get("cache_read_input_tokens"))
    written = token_count(usage.get("cache_creation_input_tokens"))

    prompt_tokens = None
    if uncached is not None:
        prompt_tokens = uncached + (cached or 0) + (written or 0)

    return UsageFields(
        input_tokens=prompt_tokens,
        output_tokens=token_count(usage.get("output_tokens")),
        input_tokens_details=None if cached is None else CountDetails(cached_tokens=cached),
        cache_creation_input_tokens=written,
    )
