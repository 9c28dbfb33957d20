"""Collect the texts and tool calls of the completions of a call, if the application keeps them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from .measurement import Choice


class _Completion(msgspec.Struct):
    """One completion while it arrives.

    Attributes:
        texts: Its pieces of text.
        finish_reason: Its finish reason, or "".
        tool_calls: Its tool calls by position, each with the fields id, name and arguments.
    """

    texts: list[str] = []
    finish_reason: str = ""
    tool_calls: dict[int, dict[str, str]] = {}

    def add_tool_calls(self, tool_calls: Iterable[Any]) -> None:
        """Add the tool calls of an event, or of a whole response, of chat."""
        for position, tool_call in enumerate(tool_calls):
            # Only a tool call of an event has an index, because events may come in any order.
            index = getattr(tool_call, "index", None)
            if index is None:
                index = position
            self.add_tool_call(index, tool_call.id, getattr(tool_call, "function", None))

    def add_tool_call(self, position: int, call_id: object, function: object) -> None:
        """Add a piece of the tool call at a position, or the whole of it.

        Only the first piece has the id and the name. The arguments of all pieces are joined.
        """
        call = self.tool_calls.setdefault(position, {"id": "", "name": "", "arguments": ""})
        call["id"] = call["id"] or str(call_id or "")
        call["name"] = call["name"] or str(getattr(function, "name", "") or "")
        call["arguments"] += str(getattr(function, "arguments", "") or "")


class ContentCollector:
    """Collects the completions of one call from the objects of openai and anthropic."""

    def __init__(self) -> None:
        """Start without completions."""
        self._completions: defaultdict[int, _Completion] = defaultdict(_Completion)

    def choices(self, finish_reason: str) -> tuple[Choice, ...]:
        """Return the completions in the order of their index.

        `finish_reason` is that of the call. It is used for a completion that has none itself.
        """
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
        """Add the choices of an event, or of a whole response, of chat or completions."""
        for position, choice in enumerate(choices):
            # A server may leave out the index, or send null for a single choice.
            index = getattr(choice, "index", position) or 0
            completion = self._completions[index]
            if choice.finish_reason:
                completion.finish_reason = choice.finish_reason

            message = _message_of(choice)
            if message is None:
                completion.texts.append(choice.text or "")
            else:
                completion.texts.append(message.content or "")
                completion.add_tool_calls(getattr(message, "tool_calls", None) or ())

    def add_response(self, response: Any, finish_reason: str, *, with_text: bool) -> None:
        """Add a response of the Responses API, at the end of a stream or as a whole.

        Its tool calls replace those collected before. `with_text` is False for a stream, whose text
        was added in pieces (`add_text`).
        """
        completion = self._completions[0]
        if with_text:
            completion.texts.append(response.output_text)

        completion.finish_reason = finish_reason
        completion.tool_calls = {}
        for position, item in enumerate(response.output or ()):
            if getattr(item, "type", "") == "function_call":
                completion.add_tool_call(position, item.call_id, item)

    def add_block(self, position: int, block: Any) -> None:
        """Add a content block of a message of Anthropic: a text or a tool call.

        The block of a stream is empty, and `add_block_delta` adds its pieces. The block of a
        response that is not streamed is complete.
        """
        if block.type == "text":
            self.add_text(block.text)
        elif block.type == "tool_use":
            self._completions[0].add_tool_call(position, block.id, block)
            tool_input = getattr(block, "input", None)
            if tool_input:
                self._add_tool_arguments(position, json.dumps(tool_input))

    def add_block_delta(self, position: int, delta: object) -> None:
        """Add a piece of the content block at a position in a streamed message of Anthropic.

        The piece has either text (`text`) or a part of the arguments of a tool call, which are
        JSON (`partial_json`).
        """
        text = getattr(delta, "text", None)
        if text:
            self.add_text(text)
        arguments = getattr(delta, "partial_json", None)
        if arguments:
            self._add_tool_arguments(position, arguments)

    def _add_tool_arguments(self, position: int, arguments: str) -> None:
        """Append arguments, as JSON, to the tool call at a position, if there is one."""
        # A message of Anthropic is a single completion.
        tool_call = self._completions[0].tool_calls.get(position)
        if tool_call is not None:
            tool_call["arguments"] += arguments


def _message_of(choice: Any) -> Any:
    """Return the message of a choice of chat: `delta` of an event, or `message` of a response.

    Return None for a choice of completions, which has only a field `text`.
    """
    return getattr(choice, "delta", None) or getattr(choice, "message", None)
