"""Events and whole answers of other APIs as those of chat: the Responses API, Anthropic's messages, numbers. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .events import (
    ABSENT,
    EMPTY,
    NOT_JSON,
    ChoiceFields,
    CountDetails,
    DeltaFields,
    EventFields,
    UsageFields,
    counts_of,
    nested_value,
)
from .implementation import token_count
from .sse import Named


def with_choices(
    event: EventFields, payload: bytes | Named, decode: Callable[[bytes], Any]
) -> EventFields | None:
    """Return the event of another API as one with choices, or None if its API is not known.

    These are the numbers of embeddings or rerank, and what `of_other_api` knows. `decode` decodes
    JSON, and raises one of NOT_JSON.
    """
    if event.data is not ABSENT or event.results is not ABSENT:
        values = event.data if event.data is not ABSENT else event.results
        ended = [] if bytes(values) in EMPTY else [ChoiceFields(finish_reason="stop")]
        return EventFields(choices=ended, usage=event.usage, error=event.error)
    if event.output is ABSENT and not event.type:
        return None
    try:
        value = decode(payload if isinstance(payload, bytes) else payload.data)
    except NOT_JSON:  # a name that the decoder above had no need to look at
        return None
    return of_other_api(value) if isinstance(value, dict) else None


def of_other_api(value: dict[str, Any]) -> EventFields | None:
    """An event, or a whole answer, of the Responses API or of messages as one of chat; None: it is of neither."""
    if is_response(value):
        return of_response(value)
    return of_message(value) if value.get("type") in _OF_MESSAGES else None


def is_response(value: dict[str, Any]) -> bool:
    kind = value.get("type")
    return value.get("object") == "response" or (
        isinstance(kind, str) and kind.startswith("response.")
    )


_RESPONSE_DELTAS = {
    "response.output_text.delta": "content",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.refusal.delta": "refusal",
}
_RESPONSE_STATES = ("completed", "incomplete", "failed", "cancelled")
_RESPONSE_ENDS = {"max_output_tokens": "length", "content_filter": "content_filter"}


def of_response(value: dict[str, Any]) -> EventFields:
    """An event of the Responses API, or its whole answer, as one of chat. Events that only announce have no choices."""
    kind, delta = value.get("type"), value.get("delta")
    if kind in _RESPONSE_DELTAS and isinstance(delta, str):
        part: dict[str, Any] = {_RESPONSE_DELTAS[kind]: delta}
        return EventFields(choices=[ChoiceFields(delta=DeltaFields(**part))])
    if isinstance(kind, str) and kind.endswith(".delta") and isinstance(delta, str):
        call = {"index": value.get("output_index"), "function": {"arguments": delta}}
        calls = DeltaFields(tool_calls=msgspec.Raw(msgspec.json.encode([call])))
        return EventFields(choices=[ChoiceFields(delta=calls)])
    whole = value.get("object") == "response"
    response = value if whole else value.get("response")
    status = response.get("status") if isinstance(response, dict) else None
    if not isinstance(response, dict) or status not in _RESPONSE_STATES:
        return EventFields()
    if status == "failed":
        return EventFields(
            error=msgspec.Raw(
                msgspec.json.encode(response.get("error") or {"message": "the response failed"})
            )
        )
    items = [item for item in response.get("output") or () if isinstance(item, dict)]
    finish = "tool_calls" if any(item.get("type") == "function_call" for item in items) else "stop"
    if status == "cancelled":
        finish = "cancelled"
    if status == "incomplete":
        reason = str(nested_value(response, "incomplete_details", "reason"))
        finish = _RESPONSE_ENDS.get(reason, reason)
    message = _whole_message(items) if whole else None
    usage = response.get("usage")
    counts = counts_of(usage) if isinstance(usage, dict) else None
    return EventFields(choices=[ChoiceFields(message=message, finish_reason=finish)], usage=counts)


def _whole_message(items: list[dict[str, Any]]) -> DeltaFields:
    """What an answer that was not streamed says: its text, its reasoning, and its tool calls."""

    def texts(kind: str) -> str | None:
        parts = [
            part for item in items if item.get("type") == kind for part in item.get("content") or ()
        ]
        return (
            "".join(
                str(part["text"]) for part in parts if isinstance(part, dict) and part.get("text")
            )
            or None
        )

    calls = [
        {
            "id": item.get("call_id"),
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        for item in items
        if item.get("type") == "function_call"
    ]
    raw = msgspec.Raw(msgspec.json.encode(calls)) if calls else ABSENT
    return DeltaFields(content=texts("message"), reasoning=texts("reasoning"), tool_calls=raw)


_OF_MESSAGES = {
    "message",
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "ping",
    "error",
}
_MESSAGE_DELTAS = {"text_delta": ("text", "content"), "thinking_delta": ("thinking", "reasoning")}
_STOPS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def of_message(value: dict[str, Any]) -> EventFields:
    """An event of Anthropic's messages, or a whole message, as one of chat. Those that only announce have no choices.

    The call of a tool is output from its name on, as in chat. An unknown stop reason stays as it is.
    """
    kind, delta = value["type"], value.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    if kind == "error":
        return EventFields(
            error=msgspec.Raw(
                msgspec.json.encode(value.get("error") or {"message": "an error event"})
            )
        )
    if kind == "message_start":
        message = value.get("message")
        return (
            EventFields(usage=_message_counts(message))
            if isinstance(message, dict)
            else EventFields()
        )
    if kind == "content_block_start":
        block = value.get("content_block")
        if isinstance(block, dict) and str(block.get("type")).endswith("tool_use"):
            return _call_piece(value.get("index"), _call(block, ""))
        return EventFields()
    if kind == "content_block_delta":
        name, field = _MESSAGE_DELTAS.get(delta.get("type") or "", ("", ""))
        if isinstance(delta.get(name), str):
            part: dict[str, Any] = {field: delta[name]}
            return EventFields(choices=[ChoiceFields(delta=DeltaFields(**part))])
        arguments = delta.get("partial_json")
        return (
            _call_piece(value.get("index"), {"function": {"arguments": arguments}})
            if arguments
            else EventFields()
        )
    if kind == "message_delta" or kind == "message":
        whole = kind == "message"
        reason = (value if whole else delta).get("stop_reason")
        finish = _STOPS.get(reason, reason) if isinstance(reason, str) else None
        said = _content_of_message(value) if whole else []
        choices = [
            *(ChoiceFields(message=part) for part in said),
            ChoiceFields(finish_reason=finish),
        ]
        return EventFields(choices=choices, usage=_message_counts(value))
    return EventFields()


def _call(block: dict[str, Any], arguments: str) -> dict[str, Any]:
    return {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": arguments}}


def _call_piece(index: Any, call: dict[str, Any]) -> EventFields:
    calls = DeltaFields(tool_calls=msgspec.Raw(msgspec.json.encode([{"index": index, **call}])))
    return EventFields(choices=[ChoiceFields(delta=calls)])


def _content_of_message(value: dict[str, Any]) -> list[DeltaFields]:
    """What a message that was not streamed says: its thinking, its text, and its tool calls."""
    content = value.get("content")
    blocks = (
        [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    )

    def texts(name: str) -> str | None:
        return "".join(block[name] for block in blocks if isinstance(block.get(name), str)) or None

    calls = [
        _call(block, msgspec.json.encode(block.get("input")).decode())
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    called = [DeltaFields(tool_calls=msgspec.Raw(msgspec.json.encode(calls)))] if calls else []
    return [DeltaFields(reasoning=texts("thinking")), DeltaFields(content=texts("text")), *called]


def _message_counts(value: dict[str, Any]) -> UsageFields | None:
    """The usage of a message. Its `input_tokens` are those beside the cache: the prompt is the sum of the three."""
    usage = value.get("usage")
    if not isinstance(usage, dict):
        return None
    fresh, read, written = (
        token_count(usage.get(name))
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )
    return UsageFields(
        input_tokens=None if fresh is None else fresh + (read or 0) + (written or 0),
        output_tokens=token_count(usage.get("output_tokens")),
        input_tokens_details=None if read is None else CountDetails(cached_tokens=read),
        cache_creation_input_tokens=written,
    )
