"""Convert chat requests of OpenAI's form to the fields of Anthropic's Messages API. Pure.

In the comments here, "chat" means the chat API of OpenAI. Content blocks are the parts of a message
in the Messages API, such as `{"type": "text", "text": "Hi"}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def convert_chat_fields(extra_fields: Mapping[str, object]) -> dict[str, Any]:
    """Convert body fields that a user adds to each request, from OpenAI's chat API to Anthropic's.

    For example, `{"stop": "END"}` becomes `{"stop_sequences": ["END"]}`. Tools and the choice of a
    tool are converted, too, and all other fields are returned unchanged. `max_completion_tokens` is
    left out, because `build_messages_fields` gets it as the output limit.
    """
    fields = dict(extra_fields)
    fields.pop("max_completion_tokens", None)

    tools = fields.get("tools")
    if isinstance(tools, list):
        fields["tools"] = [_convert_tool(tool) for tool in tools]

    if fields.get("tool_choice") is not None:
        fields["tool_choice"] = _convert_tool_choice(fields["tool_choice"])

    stop = fields.pop("stop", None)
    if stop is not None:
        fields["stop_sequences"] = [stop] if isinstance(stop, str) else stop

    return fields


def _system_texts(chat_messages: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the texts of the system messages, for which the Messages API has a separate field."""
    texts: list[str] = []
    for message in chat_messages:
        if message.get("role") in _SYSTEM_ROLES:
            blocks = _convert_content(message.get("content"))
            texts.extend(str(block.get("text", "")) for block in blocks)
    return texts


def _convert_messages(chat_messages: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """Convert the messages of a chat, except those of the system, to the Messages API.

    In that API, messages of the user and of the assistant alternate. The results of several tool
    calls are consecutive messages in a chat and become one message of the user here. Two
    consecutive messages of one role with plain texts are not joined.
    """
    messages: list[dict[str, Any]] = []
    for chat_message in chat_messages:
        if chat_message.get("role") in _SYSTEM_ROLES:
            continue

        role, content = _convert_message(chat_message)
        has_blocks = isinstance(content, list)

        follows_same_role = bool(messages) and messages[-1]["role"] == role
        if has_blocks and follows_same_role:
            previous_blocks = _as_blocks(messages[-1]["content"])
            messages[-1]["content"] = [*previous_blocks, *content]
        else:
            messages.append({"role": role, "content": content})

    return messages


def _convert_message(message: Mapping[str, object]) -> _Message:
    """Convert a message of a chat, with its tool calls or its tool result, to the Messages API.

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
    """Return the content of a message of the Messages API as a list of content blocks."""
    return _convert_content(content) if isinstance(content, str) else content


def _convert_content(content: object) -> list[dict[str, Any]]:
    """Return the content of a chat message as content blocks. An empty text has no block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        return []
    return [_convert_part(part) for part in content]


def _convert_part(part: dict[str, Any]) -> dict[str, Any]:
    """Convert a part of a chat message to a content block of the Messages API.

    Only images differ between the two APIs, so any other part is returned unchanged. In a chat, an
    image is a URL, which may contain the image itself, as in `data:image/png;base64,iVBOR...`. The
    Messages API takes the media type and the data of such a URL in two fields.
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
    """Convert a tool call of a chat to a content block of the Messages API.

    The arguments are a text with JSON in a chat, and an object in the Messages API. Arguments that
    are no object, for example because a model wrote invalid JSON, become `{"input": arguments}`.
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


def _convert_tool(tool: object) -> Any:
    """Convert the definition of a tool from the chat API to the Messages API.

    A chat has `{"type": "function", "function": {"name": ..., "parameters": ...}}`, and the
    Messages API `{"name": ..., "input_schema": ...}`, in which the schema is required. A tool in
    any other form is returned unchanged, because the user may have written it for the Messages API.
    """
    if not isinstance(tool, Mapping) or "function" not in tool:
        return tool

    function = tool["function"]
    converted = {"name": function.get("name")}
    if function.get("description"):
        converted["description"] = function["description"]

    converted["input_schema"] = function.get("parameters") or _EMPTY_SCHEMA
    return converted


def _convert_tool_choice(choice: object) -> Any:
    """Convert the field `tool_choice` from the chat API to the Messages API.

    The text "required" becomes `{"type": "any"}` (the model must call one of the tools), any other
    text `{"type": text}`, and a function `{"type": "tool", "name": ...}`. A choice in any other
    form is returned unchanged, because the user may have written it for the Messages API.
    """
    if isinstance(choice, str):
        return {"type": "any" if choice == "required" else choice}
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping):
        return choice
    return {"type": "tool", "name": function.get("name")}
