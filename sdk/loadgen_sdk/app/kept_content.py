"""Collect the texts and tool calls of the completions of a call, if the application keeps them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from .measurement import Choice


class _Completion(msgspec.Struct):
    """One completion while it grows. Tool calls are kept by their position in it."""

    texts: list[str] = []
    finish_reason: str = ""
    tool_calls: dict[int, dict[str, str]] = {}

    def add_tool_call(self, position: int, call_id: Any, function: Any) -> None:
        """Add a piece of a tool call."""
        call = self.tool_calls.setdefault(position, {"id": "", "name": "", "arguments": ""})
        call["id"] = call["id"] or str(call_id or "")
        call["name"] = call["name"] or str(getattr(function, "name", "") or "")
        call["arguments"] += str(getattr(function, "arguments", "") or "")


class KeptContent:
    """The completions of one call. It reads the objects of the openai and anthropic packages."""

    def __init__(self) -> None:
        """Start without completions."""
        self._completions: defaultdict[int, _Completion] = defaultdict(_Completion)

    def choices(self, finish_reason: str) -> tuple[Choice, ...]:
        """Return the completions. `finish_reason` is for those without one of their own."""
        completions = [self._completions[index] for index in sorted(self._completions)]
        return tuple(
            Choice(
                text="".join(completion.texts),
                finish_reason=completion.finish_reason or finish_reason,
                tool_calls=tuple(completion.tool_calls.values()),
            )
            for completion in completions
        )

    def add_text(self, text: str) -> None:
        """Add a piece of the only completion of an API without choices."""
        self._completions[0].texts.append(text)

    def add_choices(self, choices: Iterable[Any]) -> None:
        """Add the choices of an event or of a whole response of chat or completions."""
        for position, choice in enumerate(choices):
            index = getattr(choice, "index", position) or 0
            part = getattr(choice, "delta", None) or getattr(choice, "message", None)
            completion = self._completions[index]
            text = choice.text if part is None else part.content
            completion.texts.append(text or "")
            completion.finish_reason = choice.finish_reason or completion.finish_reason
            for tool_position, tool_call in enumerate(getattr(part, "tool_calls", None) or ()):
                tool_index = getattr(tool_call, "index", None)
                completion.add_tool_call(
                    tool_position if tool_index is None else tool_index,
                    tool_call.id,
                    getattr(tool_call, "function", None),
                )

    def add_response(self, response: Any, finish_reason: str, *, with_text: bool) -> None:
        """Add a response of the Responses API. The text of a stream has come in pieces."""
        completion = self._completions[0]
        if with_text:
            completion.texts.append(response.output_text)
        completion.finish_reason = finish_reason
        completion.tool_calls = {}
        for position, item in enumerate(response.output or ()):
            if getattr(item, "type", "") == "function_call":
                completion.add_tool_call(position, item.call_id, item)

    def add_block(self, position: int, block: Any) -> None:
        """Add a block of a message of Anthropic, whole or at its start."""
        if block.type == "tool_use":
            self._completions[0].add_tool_call(position, block.id, block)
            self.add_block_delta(position, block)
        elif block.type == "text":
            self.add_text(block.text)

    def add_block_delta(self, position: int, delta: Any) -> None:
        """Add a piece of a block of a message of Anthropic."""
        text = getattr(delta, "text", None)
        if text:
            self.add_text(text)
        tool_call = self._completions[0].tool_calls.get(position)
        if tool_call is None:
            return
        arguments = getattr(delta, "partial_json", None)
        if not arguments:
            tool_input = getattr(delta, "input", None)
            arguments = json.dumps(tool_input) if tool_input else ""
        tool_call["arguments"] += arguments
