"""What an answer of the openai package says while it arrives: instants, finish reason, token counts, texts if asked.

It depends on no package, only on the attributes of its objects. `dialects/reader.py` has the same rules for bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ..request import NEVER, Usage
from .measurement import Api, Choice


class OutputTracker:
    """The state of one answer. `observe` takes the events of a stream, `whole` an answer in one piece.

    Neither raises: the application is waiting for its event, and what has an unexpected shape is left to it.
    """

    def __init__(self, api: Api, streamed: bool, keep_content: bool) -> None:
        self._api, self._streamed = api, streamed
        self.instants: list[int] = []  # of the events with output
        self.first_answer = self.end = NEVER
        self.first_event_tokens = 0
        self.finish_reason = self.response_model = self.response_id = self.error = ""
        self._usage: Any = None
        self.contents = Contents() if keep_content else None

    @property
    def observe(self) -> Callable[[Any, int], None]:
        """Takes one event of a stream, and the instant of its arrival."""
        return self._observe_event if self._api == "responses" else self._observe_chunk

    def whole(self, answer: Any, at: int) -> None:
        """An answer that is not streamed has arrived."""
        self.end = at
        try:
            if self._api != "embeddings":  # they have no first token
                self.instants.append(at)
                self.first_answer = at
            self._usage = getattr(answer, "usage", None)
            self.response_model = getattr(answer, "model", "") or ""
            self.response_id = getattr(answer, "id", "") or ""
            if self._api == "responses":
                self._read_response(answer)
            elif self._api != "embeddings":
                for choice in answer.choices:
                    self.finish_reason = choice.finish_reason or self.finish_reason
                if self.contents is not None:
                    self.contents.add(answer.choices)
        except Exception:
            pass

    def _observe_chunk(self, chunk: Any, at: int) -> None:
        """One event of chat or completions."""
        try:
            output = answer = False
            for choice in chunk.choices:
                delta = choice.delta if self._api == "chat" else choice
                text = delta.content if self._api == "chat" else choice.text
                if text:
                    output = answer = True
                elif text is None or self._api == "chat":
                    if delta.tool_calls or delta.function_call or delta.refusal:
                        output = answer = True
                    elif getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None):
                        output = True
                if choice.finish_reason:
                    self.finish_reason = choice.finish_reason
                    self.end = at
            if self.contents is not None:
                self.contents.add(chunk.choices)
            if output:
                self.instants.append(at)
                self.end = at
                if answer and self.first_answer < 0:
                    self.first_answer = at
            if chunk.usage is not None:
                self._usage = chunk.usage
                if output and len(self.instants) == 1 and not self.finish_reason:
                    self.first_event_tokens = chunk.usage.completion_tokens or 0
            if not self.response_id:
                self.response_id, self.response_model = chunk.id or "", chunk.model or ""
        except Exception:
            pass

    def _observe_event(self, event: Any, at: int) -> None:
        """One event of the responses API."""
        try:
            kind = event.type
            if kind.endswith(".delta"):
                self.instants.append(at)
                self.end = at
                if self.first_answer < 0 and "reasoning" not in kind:
                    self.first_answer = at
                if self.contents is not None and kind == "response.output_text.delta":
                    self.contents.add_text(event.delta)
            elif kind in ("response.completed", "response.incomplete", "response.failed", "response.created"):
                self._read_response(event.response)
                if kind != "response.created":
                    self.end = at
            elif kind == "error":
                self.error = str(event.message)
        except Exception:
            pass

    def _read_response(self, response: Any) -> None:
        self._usage = response.usage or self._usage
        self.response_id, self.response_model = response.id or "", response.model or ""
        if response.status in ("completed", "incomplete", "failed", "cancelled"):
            self.finish_reason = response.status
            if response.status == "incomplete" and response.incomplete_details is not None:
                self.finish_reason = response.incomplete_details.reason or "incomplete"
            if response.status == "failed":
                self.error = str(getattr(response.error, "message", "") or "the response failed")
        if self.contents is not None:
            self.contents.add_response(response, self.finish_reason, with_text=not self._streamed)

    def usage(self) -> Usage:
        """The token counts as reported by the server; None where missing."""
        usage = self._usage
        if usage is None:
            return Usage()
        names = _RESPONSES_USAGE if self._api == "responses" else _CHAT_USAGE
        prompt, answer, prompt_details, answer_details = [getattr(usage, name, None) for name in names]
        return Usage(
            input=_count(prompt),
            output=0 if self._api == "embeddings" else _count(answer),
            cached=_count(getattr(prompt_details, "cached_tokens", None)),
            reasoning=_count(getattr(answer_details, "reasoning_tokens", None)),
        )


_CHAT_USAGE = ("prompt_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details")
_RESPONSES_USAGE = ("input_tokens", "output_tokens", "input_tokens_details", "output_tokens_details")


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


class _Answer(msgspec.Struct):
    """One of the answers of a call, while it grows. `tools`: by their place in the answer."""

    texts: list[str] = []
    finish_reason: str = ""
    tools: dict[int, dict[str, str]] = {}

    def add_tool(self, place: int, tool_id: Any, function: Any) -> None:
        call = self.tools.setdefault(place, {"id": "", "name": "", "arguments": ""})
        call["id"] = call["id"] or str(tool_id or "")
        call["name"] = call["name"] or str(getattr(function, "name", "") or "")
        call["arguments"] += str(getattr(function, "arguments", "") or "")


class Contents:
    """The texts and tool calls of one call's answers, kept only on request."""

    def __init__(self) -> None:
        self._answers: defaultdict[int, _Answer] = defaultdict(_Answer)

    def add_text(self, text: str) -> None:
        """A piece of the answer of the responses API."""
        self._answers[0].texts.append(text)

    def add(self, choices: Iterable[Any]) -> None:
        """The choices of a chunk or of a whole answer, of chat or completions."""
        for position, choice in enumerate(choices):
            index = getattr(choice, "index", position) or 0
            part = getattr(choice, "delta", None) or getattr(choice, "message", None)
            answer = self._answers[index]
            answer.texts.append((choice.text if part is None else part.content) or "")
            answer.finish_reason = choice.finish_reason or answer.finish_reason
            for number, tool in enumerate(getattr(part, "tool_calls", None) or ()):
                place = getattr(tool, "index", None)
                answer.add_tool(number if place is None else place, tool.id, getattr(tool, "function", None))

    def add_response(self, response: Any, finish_reason: str, *, with_text: bool) -> None:
        """An answer of the responses API."""
        answer = self._answers[0]
        if with_text:
            answer.texts.append(response.output_text)
        answer.finish_reason, answer.tools = finish_reason, {}
        for number, item in enumerate(response.output or ()):
            if getattr(item, "type", "") == "function_call":
                answer.add_tool(number, item.call_id, item)

    def choices(self) -> tuple[Choice, ...]:
        answers = (self._answers[index] for index in sorted(self._answers))
        return tuple(
            Choice(text="".join(one.texts), finish_reason=one.finish_reason, tool_calls=tuple(one.tools.values()))
            for one in answers
        )
