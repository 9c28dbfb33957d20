"""The fields of a request for Anthropic's messages, from one that is written as a chat. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..errors import TargetUnusable
from ..request import Request

NO_LIMIT_TOKENS = 4096  # `max_tokens` is required: sent where nobody gave a limit


def message_fields(request: Request, stream: bool, max_tokens: int | None) -> dict[str, Any]:
    """`messages`, `system`, `max_tokens`, `stream`. The API has no field that forces a length; texts, no token ids."""
    if isinstance(request.prompt, list):
        raise TargetUnusable(
            "unsupported", "a prompt of token ids cannot be sent as a message", "--api completions"
        )
    said = (
        [{"role": "user", "content": request.prompt}]
        if request.messages is None
        else request.messages
    )
    system = [
        text
        for one in said
        if one.get("role") in ("system", "developer")
        for text in _texts(one.get("content"))
    ]
    messages: list[dict[str, Any]] = []
    for one in said:
        if one.get("role") in ("system", "developer"):
            continue
        role, content = _message(one)
        if messages and messages[-1]["role"] == role and isinstance(content, list):
            last = messages[-1]  # results of several calls are one message
            before = last["content"]
            last["content"] = [*(before if isinstance(before, list) else _blocks(before)), *content]
        else:
            messages.append({"role": role, "content": content})
    return {
        "max_tokens": NO_LIMIT_TOKENS if max_tokens is None else max_tokens,
        "messages": messages,
        "stream": stream,
        **({"system": "\n".join(system)} if system else {}),
    }


def message_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the user adds, with those of chat that have another form here in that form."""
    made = {name: value for name, value in extra.items() if name != "max_completion_tokens"}
    if isinstance(made.get("tools"), list):
        made["tools"] = [_tool(tool) for tool in made["tools"]]
    if (choice := made.get("tool_choice")) is not None:
        made["tool_choice"] = _tool_choice(choice)
    if (stop := made.pop("stop", None)) is not None:
        made["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    return made


def _message(message: Mapping[str, Any]) -> tuple[str, Any]:
    """Role and content of a message of a chat: calls of tools and their results are blocks."""
    content, role = message.get("content"), str(message.get("role"))
    if role == "tool":
        result = {
            "type": "tool_result",
            "tool_use_id": message.get("tool_call_id"),
            "content": content,
        }
        return "user", [result]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        return role, [*_blocks(content), *(_tool_use(call) for call in calls)]
    return role, content if isinstance(content, str) else list(_blocks(content))


def _blocks(content: Any) -> Iterator[dict[str, Any]]:
    if isinstance(content, str) and content:
        yield {"type": "text", "text": content}
    for part in content if isinstance(content, list) else ():
        url = part["image_url"]["url"] if part.get("type") == "image_url" else ""
        kind, _, data = url.removeprefix("data:").partition(";base64,")
        if url.startswith("data:"):
            yield {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
        else:
            yield {"type": "image", "source": {"type": "url", "url": url}} if url else part


def _texts(content: Any) -> list[str]:
    return [str(block.get("text", "")) for block in _blocks(content)]


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        given = msgspec.json.decode(function.get("arguments") or "{}")
    except msgspec.DecodeError:
        given = None
    given = given if isinstance(given, dict) else {"input": function.get("arguments")}
    return {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": given}


def _tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or "function" not in tool:
        return tool
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    described = {"description": function["description"]} if function.get("description") else {}
    return {"name": function.get("name"), **described, "input_schema": schema}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return {"type": "any" if choice == "required" else choice}
    named = choice.get("function") if isinstance(choice, Mapping) else None
    return {"type": "tool", "name": named.get("name")} if isinstance(named, Mapping) else choice
