"""Convert chat requests to the fields of Anthropic's Messages API. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ..errors import TargetUnusable
from ..request import Request

DEFAULT_MAX_TOKENS = 4096
"""The output limit of requests without one. The API requires a limit."""

_SYSTEM_ROLES = ("system", "developer")
_EMPTY_SCHEMA = {"type": "object", "properties": {}}


class _Message(NamedTuple):
    """A message of the Messages API. The content is a text or a list of blocks."""

    role: str
    content: str | list[dict[str, Any]]


def build_messages_fields(request: Request, stream: bool, max_tokens: int | None) -> dict[str, Any]:
    """Return the fields `max_tokens`, `messages`, `stream` and, if there is one, `system`.

    The API has no field that forces an output length. `max_tokens` is the output limit of the
    request, or None for DEFAULT_MAX_TOKENS.

    Raises:
        TargetUnusable: The prompt consists of token ids.
    """
    if isinstance(request.prompt, list):
        raise TargetUnusable(
            "unsupported",
            "a prompt of token IDs cannot be sent to the messages API",
            "--api completions",
        )
    chat_messages = request.messages
    if chat_messages is None:
        chat_messages = [{"role": "user", "content": request.prompt}]
    fields: dict[str, Any] = {
        "max_tokens": DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        "messages": _convert_messages(chat_messages),
        "stream": stream,
    }
    system_texts = _system_texts(chat_messages)
    if system_texts:
        fields["system"] = "\n".join(system_texts)
    return fields


def convert_chat_fields(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's body fields with those of a chat in the form of the Messages API.

    `max_completion_tokens` is left out, because `build_messages_fields` got it as the output limit.
    """
    fields = {name: value for name, value in extra.items() if name != "max_completion_tokens"}
    tools = fields.get("tools")
    if isinstance(tools, list):
        fields["tools"] = [_convert_tool(tool) for tool in tools]
    if fields.get("tool_choice") is not None:
        fields["tool_choice"] = _convert_tool_choice(fields["tool_choice"])
    stop = fields.pop("stop", None)
    if stop is not None:
        fields["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    return fields


def _system_texts(chat_messages: list[dict[str, Any]]) -> list[str]:
    """Return the texts of the system messages, which the API has in a field of their own."""
    texts: list[str] = []
    for message in chat_messages:
        if message.get("role") in _SYSTEM_ROLES:
            blocks = _convert_content(message.get("content"))
            texts.extend(str(block.get("text", "")) for block in blocks)
    return texts


def _convert_messages(chat_messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without system messages.

    The results of several tool calls follow each other in a chat. They become one message, because
    the roles of the API alternate.
    """
    messages: list[dict[str, Any]] = []
    for chat_message in chat_messages:
        if chat_message.get("role") in _SYSTEM_ROLES:
            continue
        role, content = _convert_message(chat_message)
        previous_message = messages[-1] if messages else None
        if (
            previous_message is not None
            and previous_message["role"] == role
            and isinstance(content, list)
        ):
            previous_message["content"] = [*_as_blocks(previous_message["content"]), *content]
        else:
            messages.append({"role": role, "content": content})
    return messages


def _convert_message(message: Mapping[str, Any]) -> _Message:
    """Return a message with its tool calls or its tool result as blocks.

    A chat has tool results in messages of the role "tool" and tool calls in a field of their own.
    The Messages API has both as blocks of content: results from the user, calls from the assistant.
    """
    content = message.get("content")
    role = str(message.get("role"))
    if role == "tool":
        result = {
            "type": "tool_result",
            "tool_use_id": message.get("tool_call_id"),
            "content": content,
        }
        return _Message("user", [result])
    tool_calls = message.get("tool_calls")
    if isinstance(tool_calls, list) and tool_calls:
        calls = [_convert_tool_call(call) for call in tool_calls]
        return _Message(role, [*_convert_content(content), *calls])
    if isinstance(content, str):
        return _Message(role, content)
    return _Message(role, _convert_content(content))


def _as_blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return _convert_content(content) if isinstance(content, str) else content


def _convert_content(content: Any) -> list[dict[str, Any]]:
    """Return the content of a chat message as blocks. An empty text has no block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        return []
    return [_convert_part(part) for part in content]


def _convert_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a chat message as a block. Only images have another form.

    A chat has an image as a URL, which may be a data URL such as `data:image/png;base64,iVBOR...`.
    The Messages API has the media type and the data of a data URL in fields of their own.
    """
    if part.get("type") != "image_url" or not part["image_url"]["url"]:
        return part
    url = part["image_url"]["url"]
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    media_type, _, data = url.removeprefix("data:").partition(";base64,")
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": media_type, "data": data},
    }


def _convert_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call as a block.

    The arguments are JSON as text in a chat and an object here. Arguments that are no object, for
    example because a model wrote invalid JSON, become the object `{"input": arguments}`.
    """
    function = call.get("function") or {}
    arguments = function.get("arguments")
    try:
        tool_input = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        tool_input = None
    if not isinstance(tool_input, dict):
        tool_input = {"input": arguments}
    return {
        "type": "tool_use",
        "id": call.get("id"),
        "name": function.get("name"),
        "input": tool_input,
    }


def _convert_tool(tool: Any) -> Any:
    """Return the definition of a tool. One that is not in the form of a chat is kept.

    A chat has `{"type": "function", "function": {"name": ..., "parameters": ...}}`, and the
    Messages API `{"name": ..., "input_schema": ...}`. The schema is required there.
    """
    if not isinstance(tool, Mapping) or "function" not in tool:
        return tool
    function = tool["function"]
    converted = {"name": function.get("name")}
    if function.get("description"):
        converted["description"] = function["description"]
    converted["input_schema"] = function.get("parameters") or _EMPTY_SCHEMA
    return converted


def _convert_tool_choice(choice: Any) -> Any:
    """Return the choice of a tool. One that is not in the form of a chat is kept.

    The text "required" of a chat means `{"type": "any"}`: the model must call one of the tools.
    """
    if isinstance(choice, str):
        return {"type": "any" if choice == "required" else choice}
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping):
        return choice
    return {"type": "tool", "name": function.get("name")}
