"""Track a response of a package while it arrives: times, finish reason, token counts and texts.

It depends on no package, only on the attributes of the objects of openai and anthropic. The rules
are those of `wire_formats/response_reader.py`, which reads bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..request import NEVER, Usage
from .kept_content import KeptContent
from .measurement import WRITING_APIS, Api
from .package_usage import MESSAGES_INPUT_FIELDS, read_usage

UNKNOWN_OUTPUTS = 2
"""So many events with a text in an unknown field are output, as in `response_reader`."""

_REASONING_FIELDS = ("reasoning_content", "reasoning")
_RESPONSE_EVENTS = (
    "response.created",
    "response.completed",
    "response.incomplete",
    "response.failed",
)
_END_STATES = ("completed", "incomplete", "failed", "cancelled")

_counted_batches: set[str] = set()
"""The batches whose tokens were reported. An application polls a batch again and again."""


class OutputTracker:
    """Tracks one response.

    `observe` gets the events of a stream, and `whole` a response that is not streamed. Neither
    raises: the application is waiting for its event, and gets what has an unexpected shape
    unchanged.

    Attributes:
        instants: The timestamps of the events with output.
        contents: The texts and tool calls, if they are kept.
        first_answer: The timestamp of the first output that is not reasoning.
        finished: The timestamp of the last event that ends a completion. Output may come after it.
        first_event_tokens: The tokens of the first output event, or 0.
        finish_reason: The finish reason, or "".
        response_model: The model that the response names, or "".
        response_id: The id of the response, or "".
        error: The text of an error event, or "".
    """

    # Defaults are attributes of the class, because most responses need few of them.
    first_answer = NEVER
    finished = NEVER
    first_event_tokens = 0
    finish_reason = ""
    response_model = ""
    response_id = ""
    error = ""
    _usage: Any = None
    _has_part_ended = False
    _unknown_outputs = 0  # before the first known output
    _is_in_text = False  # of most further events only the timestamp matters

    def __init__(self, api: Api, streamed: bool, keep_content: bool) -> None:
        """Start with an empty response."""
        self._api = api
        self._streamed = streamed
        self._is_chat = api == "chat"
        self.instants: list[int] = []
        self.contents = KeptContent() if keep_content else None

    @property
    def observe(self) -> Callable[[Any, int], None]:
        """The function that gets each event of a stream, with its time of arrival."""
        observers: dict[str, Callable[[Any, int], None]] = {
            "responses": self._observe_response_event,
            "messages": self._observe_message_event,
            "images": self._observe_media_event,
            "transcriptions": self._observe_media_event,
            "chat": self._observe_chat_event,
        }
        return observers.get(self._api, self._observe_choices_event)

    @property
    def is_near_its_end(self) -> bool:
        """Whether a text is complete, so that only the last events with the counts are to come."""
        return self._has_part_ended or bool(self.finish_reason)

    @property
    def is_first_output_known(self) -> bool:
        """Whether no output in unknown fields came before the first event of `instants`."""
        return self._unknown_outputs < UNKNOWN_OUTPUTS

    def usage(self) -> Usage:
        """Return the token counts by the server."""
        return read_usage(self._api, self._usage)

    def read_response(self, answer: Any, at: int) -> None:
        """Read a response that is not streamed."""
        self.finished = at
        with suppress(Exception):
            if self._api in WRITING_APIS:
                self.instants.append(at)
                self.first_answer = at
            self._usage = getattr(answer, "usage", None)
            self.response_model = getattr(answer, "model", "") or ""
            self.response_id = getattr(answer, "id", "") or ""
            if self._api in ("chat", "completions"):
                self._read_choices(answer.choices)
            elif self._api == "responses":
                self._read_response(answer)
            elif self._api == "messages":
                self._read_message(answer)
            elif self._api == "batches":
                self._read_batch(answer)

    def _observe_chat_event(self, chunk: Any, at: int) -> None:
        """Observe one event of chat.

        Most events are a piece of the text of one completion and nothing else. Their fields are
        read past pydantic, of which each lookup takes as long as all the rest.
        """
        # `contextlib.suppress` would cost more than all the rest.
        try:
            if self._is_in_text and _is_piece_of_text(chunk.__dict__):
                self.instants.append(at)
                return
        except Exception:
            pass
        self._observe_choices_event(chunk, at)

    def _observe_choices_event(self, chunk: Any, at: int) -> None:
        """Observe one event of chat or completions."""
        with suppress(Exception):
            has_output = False
            for choice in chunk.choices:
                output = self._output_of(choice)
                has_output = has_output or output != _NO_OUTPUT
                if output == _ANSWER and self.first_answer < 0:
                    self.first_answer = at
                if choice.finish_reason:
                    self.finish_reason = choice.finish_reason
                    self.finished = at
            if self.contents is not None:
                self.contents.add_choices(chunk.choices)
            if has_output:
                self.instants.append(at)
            elif self._is_chat and not self.instants:
                self._unknown_outputs += any(map(_has_unknown_text, chunk.choices))
            self._read_chunk_usage(getattr(chunk, "usage", None), has_output)
            if not self.response_id:
                self.response_id = chunk.id or ""
                self.response_model = chunk.model or ""
            self._is_in_text = (
                self.first_answer >= 0 and bool(self.response_id) and self.contents is None
            )

    def _output_of(self, choice: Any) -> str:
        """Return whether a choice of an event has a part of the answer, reasoning or no output."""
        delta = choice.delta if self._is_chat else choice
        text = delta.content if self._is_chat else choice.text
        if text:
            return _ANSWER
        if text is not None and not self._is_chat:
            return _NO_OUTPUT
        if delta.tool_calls or delta.function_call or getattr(delta, "refusal", None):
            return _ANSWER
        if any(getattr(delta, name, None) for name in _REASONING_FIELDS):
            return _REASONING
        return _NO_OUTPUT

    def _read_chunk_usage(self, usage: Any, has_output: bool) -> None:
        """Keep the usage of an event. With the first output, it states the tokens of that event."""
        if usage is None:
            return
        self._usage = usage
        if has_output and len(self.instants) == 1 and not self.finish_reason:
            self.first_event_tokens = usage.completion_tokens or 0

    def _observe_response_event(self, event: Any, at: int) -> None:
        """Observe one event of the Responses API."""
        with suppress(Exception):
            event_type = event.type
            if event_type.endswith(".delta"):
                self.instants.append(at)
                if self.first_answer < 0 and "reasoning" not in event_type:
                    self.first_answer = at
                if self.contents is not None and event_type == "response.output_text.delta":
                    self.contents.add_text(event.delta)
            elif event_type in _RESPONSE_EVENTS:
                self._read_response(event.response)
                if event_type != "response.created":
                    self.finished = at
            elif event_type == "response.output_text.done":
                self._has_part_ended = True
            elif event_type == "error":
                self.error = str(event.message)

    def _observe_media_event(self, event: Any, at: int) -> None:
        """Observe one event of images (partial ones, then the whole one) or of transcriptions."""
        with suppress(Exception):
            self.instants.append(at)
            if self.first_answer < 0:
                self.first_answer = at
            self._usage = getattr(event, "usage", None) or self._usage
            if event.type.endswith((".completed", ".done")):
                self.finish_reason = "completed"

    def _observe_message_event(self, event: Any, at: int) -> None:
        """Observe one event of Anthropic's messages."""
        with suppress(Exception):
            event_type = event.type
            if event_type == "content_block_delta":
                self._observe_block_delta(event, at)
            elif event_type == "content_block_start" and self.contents is not None:
                self.contents.add_block(event.index, event.content_block)
            elif event_type == "content_block_stop":
                self._has_part_ended = True
            elif event_type == "message_start":
                self._usage = event.message.usage
                self._read_message(event.message)
            elif event_type == "message_delta":
                self._update_message_usage(event.usage)
                self.finish_reason = event.delta.stop_reason or self.finish_reason
                self.finished = at

    def _observe_block_delta(self, event: Any, at: int) -> None:
        if event.delta.type == "signature_delta":
            return
        self.instants.append(at)
        if self.first_answer < 0 and event.delta.type != "thinking_delta":
            self.first_answer = at
        if self.contents is not None:
            self.contents.add_block_delta(event.index, event.delta)

    def _update_message_usage(self, usage: Any) -> None:
        """Replace the counts from the start of a message by those from its end."""
        for name in (*MESSAGES_INPUT_FIELDS, "output_tokens"):
            count = getattr(usage, name, None)
            if count is not None:
                setattr(self._usage, name, count)

    def _read_choices(self, choices: Any) -> None:
        for choice in choices:
            if choice.finish_reason:
                self.finish_reason = choice.finish_reason
        if self.contents is not None:
            self.contents.add_choices(choices)

    def _read_message(self, message: Any) -> None:
        self.response_id = message.id or ""
        self.response_model = message.model or ""
        self.finish_reason = message.stop_reason or ""
        if self.contents is not None:
            for position, block in enumerate(message.content):
                self.contents.add_block(position, block)

    def _read_batch(self, batch: Any) -> None:
        """Read the status of a batch of files. Its tokens count when it is first complete."""
        self.finish_reason = getattr(batch, "status", None) or batch.processing_status
        if self.finish_reason != "completed" or batch.id in _counted_batches:
            self._usage = None
        else:
            _counted_batches.add(batch.id)

    def _read_response(self, response: Any) -> None:
        """Read an object of the Responses API, at the start or at the end of a response."""
        self._usage = response.usage or self._usage
        self.response_id = response.id or ""
        self.response_model = response.model or ""
        if response.status in _END_STATES:
            self.finish_reason = response.status
        if response.status == "incomplete" and response.incomplete_details is not None:
            self.finish_reason = response.incomplete_details.reason or "incomplete"
        if response.status == "failed":
            self.error = str(getattr(response.error, "message", "") or "the response failed")
        if self.contents is not None:
            self.contents.add_response(response, self.finish_reason, with_text=not self._streamed)


_NO_OUTPUT = "no output"
_ANSWER = "answer"
_REASONING = "reasoning"


def _is_piece_of_text(fields: dict[str, Any]) -> bool:
    """Return True if an event of chat has one piece of text, and no end and no usage.

    Raises an exception if it has another number of choices.
    """
    (choice,) = fields["choices"]
    parts = choice.__dict__
    if parts["finish_reason"] is not None or fields["usage"] is not None:
        return False
    return bool(parts["delta"].content)


def _has_unknown_text(choice: Any) -> bool:
    """Return True if the delta of a choice has a text in a field that is not known."""
    extra_fields = getattr(choice.delta, "__pydantic_extra__", None) or {}
    return any(
        bool(text) and isinstance(text, str)
        for name, text in extra_fields.items()
        if name not in _REASONING_FIELDS
    )
