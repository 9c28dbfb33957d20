"""What an answer says while it arrives: instants, finish reason, token counts, texts if asked.

It depends on no package, only on the attributes of the objects of openai and anthropic.
`wire_formats/response_reader.py` has the same rules for bytes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from ..request import NEVER, Usage
from ..wire_formats.implementation import token_count
from ..wire_formats.usage import check_usage
from .measurement import WRITING_APIS, Api, Choice


class OutputTracker:
    """The state of one answer.

    `observe` takes the events of a stream, `whole` an answer in one piece.

    Neither raises: the application is waiting for its event, and what has an unexpected shape is
    left to it.
    """

    first_answer = NEVER
    finished = NEVER  # the last event that ends an answer; output may come after it
    first_event_tokens = 0
    finish_reason = response_model = response_id = error = ""
    _usage: Any = None
    _part_ended = False
    _unknown_outputs = 0  # events with a text in an unknown field, before the first known output
    _is_going_on = False  # an answer has begun, and of most of its pieces only the instant matters

    def __init__(self, api: Api, streamed: bool, keep_content: bool) -> None:
        self._api, self._streamed, self._is_chat = api, streamed, api == "chat"
        self.instants: list[int] = []  # of the events with output
        self.contents = Contents() if keep_content else None

    @property
    def observe(self) -> Callable[[Any, int], None]:
        """Takes one event of a stream, and the instant of its arrival."""
        observers = {
            "responses": self._observe_event,
            "messages": self._observe_block,
            "images": self._observe_media,
            "transcriptions": self._observe_media,
            "chat": self._observe_usual,
        }
        return observers.get(self._api, self._observe_chunk)

    @property
    def is_near_its_end(self) -> bool:
        """A text is whole: of a short answer all that is left to come are the last events, with
        the counts.
        """
        return self._part_ended or bool(self.finish_reason)

    @property
    def is_first_output_known(self) -> bool:
        """Whether no output may have come before the first event of `instants`, unread."""
        return self._unknown_outputs < UNKNOWN_OUTPUTS

    def whole(self, answer: Any, at: int) -> None:
        """An answer that is not streamed has arrived."""
        api, self.finished = self._api, at
        try:
            if api in WRITING_APIS:
                self.instants.append(at)
                self.first_answer = at
            self._usage = getattr(answer, "usage", None)
            self.response_model = getattr(answer, "model", "") or ""
            self.response_id = getattr(answer, "id", "") or ""
            if api == "chat" or api == "completions":
                for choice in answer.choices:
                    if choice.finish_reason:
                        self.finish_reason = choice.finish_reason
                if self.contents is not None:
                    self.contents.add(answer.choices)
            elif api == "responses":
                self._read_response(answer)
            elif api == "messages":
                self._read_message(answer)
            elif api == "batches":
                self._read_batch(answer)
        except Exception:
            pass

    def _observe_usual(self, chunk: Any, at: int) -> None:
        """One event of chat.

        Most are a piece of one answer's text, and no more: the fields of those are read past
        pydantic, whose every look-up takes as long as all of this.
        """
        try:
            fields = chunk.__dict__
            (choice,) = fields["choices"]
            parts = choice.__dict__
            goes_on = parts["finish_reason"] is None and fields["usage"] is None
            if goes_on and self._is_going_on and parts["delta"].content:
                self.instants.append(at)
                return
        except Exception:
            pass
        self._observe_chunk(chunk, at)

    def _observe_chunk(self, chunk: Any, at: int) -> None:
        """One event of chat or completions."""
        try:
            output = answer = False
            for choice in chunk.choices:
                if self._is_chat:
                    delta = choice.delta
                    text = delta.content
                else:
                    delta, text = choice, choice.text
                if text:
                    output = answer = True
                elif text is None or self._is_chat:
                    if delta.tool_calls or delta.function_call or getattr(delta, "refusal", None):
                        output = answer = True
                    elif getattr(delta, "reasoning_content", None) or getattr(
                        delta, "reasoning", None
                    ):
                        output = True
                if reason := choice.finish_reason:
                    self.finish_reason = reason
                    self.finished = at
            if self.contents is not None:
                self.contents.add(chunk.choices)
            if output:
                self.instants.append(at)
                if answer and self.first_answer < 0:
                    self.first_answer = at
            elif self._is_chat and not self.instants:
                self._unknown_outputs += any(map(_has_unknown_text, chunk.choices))
            try:
                usage = chunk.usage
            except AttributeError:
                usage = None
            if usage is not None:
                self._usage = usage
                if output and len(self.instants) == 1 and not self.finish_reason:
                    self.first_event_tokens = usage.completion_tokens or 0
            if not self.response_id:
                self.response_id, self.response_model = chunk.id or "", chunk.model or ""
            self._is_going_on = (
                self.first_answer >= 0 and bool(self.response_id) and self.contents is None
            )
        except Exception:
            pass

    def _observe_event(self, event: Any, at: int) -> None:
        """One event of the responses API."""
        try:
            kind = event.type
            if kind.endswith(".delta"):
                self.instants.append(at)
                if self.first_answer < 0 and "reasoning" not in kind:
                    self.first_answer = at
                if self.contents is not None and kind == "response.output_text.delta":
                    self.contents.add_text(event.delta)
            elif kind in (
                "response.completed",
                "response.incomplete",
                "response.failed",
                "response.created",
            ):
                self._read_response(event.response)
                if kind != "response.created":
                    self.finished = at
            elif kind == "response.output_text.done":
                self._part_ended = True
            elif kind == "error":
                self.error = str(event.message)
        except Exception:
            pass

    def _observe_media(self, event: Any, at: int) -> None:
        """One event of images (partial pictures, then the whole one) or of transcriptions (pieces
        of text).
        """
        try:
            self.instants.append(at)
            if self.first_answer < 0:
                self.first_answer = at
            self._usage = getattr(event, "usage", None) or self._usage
            if event.type.endswith((".completed", ".done")):
                self.finish_reason = "completed"
        except Exception:
            pass

    def _observe_block(self, event: Any, at: int) -> None:
        """One event of Anthropic's messages."""
        try:
            kind = event.type
            if kind == "content_block_delta" and event.delta.type != "signature_delta":
                self.instants.append(at)
                if self.first_answer < 0 and event.delta.type != "thinking_delta":
                    self.first_answer = at
                if self.contents is not None:
                    self.contents.add_block_delta(event.index, event.delta)
            elif kind == "content_block_start" and self.contents is not None:
                self.contents.add_block(event.index, event.content_block)
            elif kind == "content_block_stop":
                self._part_ended = True
            elif kind == "message_start":
                self._usage = event.message.usage
                self._read_message(event.message)
            elif kind == "message_delta":
                for name in (*_MESSAGES_INPUT, "output_tokens"):  # the last word on each count
                    if (count := getattr(event.usage, name, None)) is not None:
                        setattr(self._usage, name, count)
                self.finish_reason = event.delta.stop_reason or self.finish_reason
                self.finished = at
        except Exception:
            pass

    def _read_message(self, message: Any) -> None:
        self.response_id, self.response_model = message.id or "", message.model or ""
        self.finish_reason = message.stop_reason or ""
        if self.contents is not None:
            for index, block in enumerate(message.content):
                self.contents.add_block(index, block)

    def _read_batch(self, batch: Any) -> None:
        """A batch of files: its status, and its tokens when it is first seen to be complete."""
        self.finish_reason = getattr(batch, "status", None) or batch.processing_status
        if self.finish_reason != "completed" or batch.id in _counted_batches:
            self._usage = None
        else:
            _counted_batches.add(batch.id)

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
        api = self._api
        if api == "messages":
            parts = [token_count(getattr(usage, name, None)) for name in _MESSAGES_INPUT]
            prompt_tokens = None if parts[0] is None else sum(part or 0 for part in parts)
            output_tokens = token_count(getattr(usage, "output_tokens", None))
            _, cached, written = parts
            return check_usage(Usage(prompt_tokens, output_tokens, cached, None, written))
        prompt, answer, prompt_details, answer_details = _USAGE.get(api, _CHAT_USAGE)
        counts = _fields(usage)
        inputs = _fields(counts.get(prompt_details))
        outputs = _fields(counts.get(answer_details))
        written = inputs.get("cache_write_tokens")
        if written is None:  # OpenAI says it of the input, gateways in front of Anthropic beside it
            written = counts.get("cache_creation_input_tokens")
        checked = Usage(
            input=token_count(counts.get(prompt)),
            output=0 if api == "embeddings" else token_count(counts.get(answer)),
            cached=token_count(_cached_tokens(inputs, counts)),
            reasoning=token_count(outputs.get("reasoning_tokens")),
            cache_written=token_count(written),
        )
        return check_usage(checked, token_count(counts.get("total_tokens")))


UNKNOWN_OUTPUTS = 2
"""As in `wire_formats.response_reader`: so many events with a text in an unknown field are output.
"""

_REASONING = ("reasoning_content", "reasoning")


def _has_unknown_text(choice: Any) -> bool:
    """Return True if the delta of a choice has a text in a field that is not known."""
    extra = getattr(choice.delta, "__pydantic_extra__", None) or _NONE
    return any(
        text and isinstance(text, str) for name, text in extra.items() if name not in _REASONING
    )


_CHAT_USAGE = (
    "prompt_tokens",
    "completion_tokens",
    "prompt_tokens_details",
    "completion_tokens_details",
)
_RESPONSE_USAGE = ("input_tokens", "output_tokens", "input_tokens_details", "output_tokens_details")
_USAGE = dict.fromkeys(("responses", "batches", "images", "transcriptions"), _RESPONSE_USAGE)
_MESSAGES_INPUT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_counted_batches: set[str] = (
    set()
)  # whose tokens have been told: an application asks again and again


def _fields(counts: Any) -> Mapping[str, Any]:
    """The fields of an object by name, those that pydantic keeps apart too. pydantic takes 1 µs to
    say by `getattr` that it has none of this name.
    """
    if isinstance(counts, dict):
        return counts
    fields: Mapping[str, Any] = getattr(counts, "__dict__", _NONE)
    extra = getattr(counts, "__pydantic_extra__", None)
    return {**extra, **fields} if extra else fields


_NONE: dict[str, Any] = {}


def _cached_tokens(inputs: Mapping[str, Any], counts: Mapping[str, Any]) -> Any:
    """Return the prompt tokens from a cache, under any of the names in `UsageFields`."""
    cached = inputs.get("cached_tokens")
    for name in ("cache_read_input_tokens", "prompt_cache_hit_tokens", "cached_tokens"):
        if cached is None:
            cached = counts.get(name)
    return cached


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
                answer.add_tool(
                    number if place is None else place, tool.id, getattr(tool, "function", None)
                )

    def add_response(self, response: Any, finish_reason: str, *, with_text: bool) -> None:
        """An answer of the responses API."""
        answer = self._answers[0]
        if with_text:
            answer.texts.append(response.output_text)
        answer.finish_reason, answer.tools = finish_reason, {}
        for number, item in enumerate(response.output or ()):
            if getattr(item, "type", "") == "function_call":
                answer.add_tool(number, item.call_id, item)

    def add_block(self, place: int, block: Any) -> None:
        """A block of a message of Anthropic's, at its start or whole."""
        if block.type == "tool_use":
            self._answers[0].add_tool(place, block.id, block)
            self.add_block_delta(place, block)
        elif block.type == "text":
            self.add_text(block.text)

    def add_block_delta(self, place: int, delta: Any) -> None:
        if text := getattr(delta, "text", None):
            self.add_text(text)
        tool = self._answers[0].tools.get(place)
        if tool is not None:
            arguments = getattr(delta, "input", None)
            tool["arguments"] += getattr(delta, "partial_json", None) or (
                json.dumps(arguments) if arguments else ""
            )

    def choices(self, finish_reason: str) -> tuple[Choice, ...]:
        answers = (self._answers[index] for index in sorted(self._answers))
        return tuple(
            Choice(
                text="".join(one.texts),
                finish_reason=one.finish_reason or finish_reason,
                tool_calls=tuple(one.tools.values()),
            )
            for one in answers
        )
