"""Track a response of a package while it arrives: times, finish reason, token counts and texts.

It depends on no package, only on the attributes of the objects of openai and anthropic. The rules
are those of `wire_formats/response_reader.py`, which reads bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ..request import NEVER, Usage
from .content_collector import ContentCollector
from .measurement import WRITING_APIS, Api
from .package_usage import MESSAGES_INPUT_FIELDS, read_usage

UNKNOWN_OUTPUTS = 2
"""From this number of events with a text in an unknown field on, such a text counts as output. A
single one may be a name next to the role. `response_reader` has the same rule."""

_REASONING_FIELDS = ("reasoning_content", "reasoning")
_END_EVENTS = ("response.completed", "response.incomplete", "response.failed")
_END_STATES = ("completed", "incomplete", "failed", "cancelled")

_counted_batches: set[str] = set()
"""The batches whose tokens were reported. An application polls a batch again and again."""


class OutputTracker:
    """Tracks one response.

    `event_observer` gets the events of a stream, and `read_response` a response that is not
    streamed. Neither raises: the application waits for its event, and gets one of an unexpected
    form unchanged.

    Attributes:
        instants: The timestamps of the events with output.
        content: The texts and tool calls, if they are kept.
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
    _is_text_complete = False
    _unknown_outputs = 0  # events with a text in an unknown field, before the first known output
    # Of most further events of chat, only the timestamp is needed.
    _needs_only_timestamps = False

    def __init__(self, api: Api, *, is_streamed: bool, keep_content: bool) -> None:
        """Start with an empty response. Texts and tool calls are stored if `keep_content`."""
        self._api = api
        self._is_streamed = is_streamed
        self._is_chat = api == "chat"
        self.instants: list[int] = []
        self.content = ContentCollector() if keep_content else None

    @property
    def event_observer(self) -> Callable[[Any, int], None]:
        """The function to call for each event of a stream, with the event and its arrival time.

        It depends on the API. A caller gets it once and calls it for all events.
        """
        observers: dict[str, Callable[[Any, int], None]] = {
            "responses": self._observe_responses_event,
            "messages": self._observe_message_event,
            "images": self._observe_media_event,
            "transcriptions": self._observe_media_event,
            "chat": self._observe_chat_event,
        }
        return observers.get(self._api, self._observe_choices_event)

    @property
    def is_near_its_end(self) -> bool:
        """Whether a text is complete, so that only the last events with the counts are to come."""
        return self._is_text_complete or bool(self.finish_reason)

    @property
    def is_first_output_known(self) -> bool:
        """Whether no output in unknown fields came before the first event of `instants`."""
        return self._unknown_outputs < UNKNOWN_OUTPUTS

    def usage(self) -> Usage:
        """Return the token counts by the server."""
        return read_usage(self._api, self._usage)

    def read_response(self, response: Any, arrived_at: int) -> None:
        """Read a response that is not streamed: its model, id, token counts and finish reason.

        If the API generates text, the whole output counts as one event at the arrival.

        Args:
            response: The object that the package of the client has returned, such as a
                `ChatCompletion`.
            arrived_at: When the method of the client returned, in monotonic ns.
        """
        self.finished = arrived_at
        # A response of an unexpected form must not fail the call of the application. The fields
        # after the first one that cannot be read are then left out of the measurement.
        with suppress(Exception):
            generates_text = self._api in WRITING_APIS
            if generates_text:
                self.instants.append(arrived_at)
                self.first_answer = arrived_at

            self._usage = getattr(response, "usage", None)
            self.response_model = getattr(response, "model", "") or ""

            self.response_id = getattr(response, "id", "") or ""
            match self._api:
                case "chat" | "completions":
                    self._read_choices(response.choices)
                case "responses":
                    self._read_responses_object(response)
                case "messages":
                    self._read_message(response)
                case "batches":
                    self._read_batch(response)

    def _observe_chat_event(self, chunk: object, arrived_at: int) -> None:
        """Observe one event of a chat stream.

        Most events contain a piece of text and nothing else. Once the id, the model and the start
        of the answer are known, only the timestamp of such an event is needed.
        """
        if self._needs_only_timestamps and _has_only_text(chunk):
            self.instants.append(arrived_at)
        else:
            self._observe_choices_event(chunk, arrived_at)

    def _observe_choices_event(self, chunk: Any, arrived_at: int) -> None:
        """Observe one event of a stream of chat or completions.

        An event (a chunk) may contain output, finish reasons, token counts, and the id and model of
        the response.

        Args:
            chunk: The event, such as a `ChatCompletionChunk`.
            arrived_at: When it arrived, in monotonic ns.
        """
        # A server may send events of any form. One that cannot be read must not fail the call of
        # the application, so that the rest of its fields is skipped.
        with suppress(Exception):
            choices = chunk.choices
            has_output = self._observe_choices(choices, arrived_at)

            if self.content is not None:
                self.content.add_choices(choices)

            if has_output:
                self.instants.append(arrived_at)
            elif self._is_chat and not self.instants:
                # The event may be the first output, in a field that is not part of the API.
                self._count_event_with_unknown_text(choices)

            self._read_chunk_usage(getattr(chunk, "usage", None), has_output=has_output)
            if not self.response_id:
                self.response_id = chunk.id or ""
                self.response_model = chunk.model or ""

            if not self._needs_only_timestamps:
                self._needs_only_timestamps = self._has_all_but_timestamps()

    def _count_event_with_unknown_text(self, choices: Iterable[object]) -> None:
        """Count an event if a choice has a text in a field that this package does not know.

        This is called for events before the first known output. Such a text may have been output,
        so that the time of the first token is not certain.
        """
        if any(_has_unknown_text(choice) for choice in choices):
            self._unknown_outputs += 1

    def _has_all_but_timestamps(self) -> bool:
        """Return whether an event with a piece of text would only add a timestamp.

        The texts of events are needed if the application keeps them.
        """
        has_answer_begun = self.first_answer != NEVER
        return has_answer_begun and bool(self.response_id) and self.content is None

    def _observe_choices(self, choices: Any, arrived_at: int) -> bool:
        """Record the start of the answer and the finish reasons in the choices of an event.

        Return True if a choice contains output.
        """
        has_output = False
        for choice in choices:
            output_kind = self._output_kind(choice)
            if output_kind != _NO_OUTPUT:
                has_output = True

            if output_kind == _ANSWER and self.first_answer == NEVER:
                self.first_answer = arrived_at

            if choice.finish_reason:
                self.finish_reason = choice.finish_reason
                self.finished = arrived_at

        return has_output

    def _output_kind(self, choice: Any) -> str:
        """Return what a choice of an event contains: _ANSWER, _REASONING or _NO_OUTPUT.

        A choice of chat has its output in `delta`, and a choice of completions has a field `text`.
        """
        if self._is_chat:
            return _ANSWER if choice.delta.content else _output_kind_without_text(choice.delta)
        if choice.text is None:
            # LiteLLM may put the fields of a chat delta into a choice of completions.
            return _output_kind_without_text(choice)
        return _ANSWER if choice.text else _NO_OUTPUT

    def _read_chunk_usage(self, usage: Any, *, has_output: bool) -> None:
        """Keep the token counts of an event of chat or completions.

        Some servers send the counts up to now with every event. In the first output event, the
        number of output tokens is then the number of tokens in that event. If the first output
        event is also the last one, its number is not used, because it is that of the whole
        response.

        Args:
            usage: The token counts, or None if the event has none.
            has_output: Whether the event contains output. Its timestamp is then the last one of
                `instants` already.
        """
        if usage is None:
            return
        self._usage = usage
        is_first_output_event = has_output and len(self.instants) == 1
        is_last_event = bool(self.finish_reason)
        if is_first_output_event and not is_last_event:
            self.first_event_tokens = usage.completion_tokens or 0

    def _observe_responses_event(self, event: Any, arrived_at: int) -> None:
        """Observe one event of the Responses API. An event whose type ends in `.delta` is output.

        Reasoning comes in events such as `response.reasoning_text.delta`. Any other output belongs
        to the answer.
        """
        # An event that cannot be read must not fail the call of the application.
        with suppress(Exception):
            event_type = event.type
            if not event_type.endswith(".delta"):
                self._observe_response_state(event, arrived_at)
                return

            self.instants.append(arrived_at)
            if self.first_answer == NEVER and "reasoning" not in event_type:
                self.first_answer = arrived_at

            if self.content is not None and event_type == "response.output_text.delta":
                self.content.add_text(event.delta)

    def _observe_response_state(self, event: Any, arrived_at: int) -> None:
        """Observe an event of the Responses API that contains no output.

        Such events report that the response begins, that its text is complete, that it ends, or an
        error. All others are ignored.

        Args:
            event: The event.
            arrived_at: When it arrived, in monotonic ns.
        """
        event_type = event.type
        if event_type == "response.created":
            self._read_responses_object(event.response)
        elif event_type in _END_EVENTS:
            self._read_responses_object(event.response)
            self.finished = arrived_at
        elif event_type == "response.output_text.done":
            self._is_text_complete = True
        elif event_type == "error":
            self.error = str(event.message)

    def _observe_media_event(self, event: Any, arrived_at: int) -> None:
        """Observe one event of images (partial ones, then the whole one) or of transcriptions."""
        with suppress(Exception):
            self.instants.append(arrived_at)
            if self.first_answer == NEVER:
                self.first_answer = arrived_at
            self._usage = getattr(event, "usage", None) or self._usage
            if event.type.endswith((".completed", ".done")):
                self.finish_reason = "completed"

    def _observe_message_event(self, event: Any, arrived_at: int) -> None:
        """Observe one event of a message of Anthropic.

        The output comes in content blocks, such as a text. The last event of the message,
        `message_delta`, has the final token counts.

        Args:
            event: The event.
            arrived_at: When it arrived, in monotonic ns.
        """
        # An event that cannot be read must not fail the call of the application.
        with suppress(Exception):
            match event.type:
                case "message_start":
                    self._usage = event.message.usage
                    self._read_message(event.message)
                case "content_block_start":
                    if self.content is not None:
                        self.content.add_block(event.index, event.content_block)
                case "content_block_delta":
                    self._observe_block_delta(event, arrived_at)
                case "content_block_stop":
                    # Perhaps there is another block. If not, only `message_delta` follows.
                    self._is_text_complete = True
                case "message_delta":
                    self._update_message_usage(event.usage)
                    self.finish_reason = event.delta.stop_reason or self.finish_reason
                    self.finished = arrived_at

    def _observe_block_delta(self, event: Any, arrived_at: int) -> None:
        """Observe a piece of a content block. A signature of reasoning does not count as output."""
        if event.delta.type == "signature_delta":
            return
        self.instants.append(arrived_at)
        if self.first_answer == NEVER and event.delta.type != "thinking_delta":
            self.first_answer = arrived_at
        if self.content is not None:
            self.content.add_block_delta(event.index, event.delta)

    def _update_message_usage(self, usage: object) -> None:
        """Replace the counts from the start of a message by those from its end."""
        for name in (*MESSAGES_INPUT_FIELDS, "output_tokens"):
            count = getattr(usage, name, None)
            if count is not None:
                setattr(self._usage, name, count)

    def _read_choices(self, choices: Any) -> None:
        """Read the choices of a response of chat or completions that is not streamed."""
        for choice in choices:
            if choice.finish_reason:
                self.finish_reason = choice.finish_reason
        if self.content is not None:
            self.content.add_choices(choices)

    def _read_message(self, message: Any) -> None:
        """Read a message of Anthropic: the whole response, or the one at the start of a stream."""
        self.response_id = message.id or ""
        self.response_model = message.model or ""
        self.finish_reason = message.stop_reason or ""
        if self.content is not None:
            for position, block in enumerate(message.content):
                self.content.add_block(position, block)

    def _read_batch(self, batch: Any) -> None:
        """Read the status of a batch of files. Its tokens count when it is first complete."""
        self.finish_reason = getattr(batch, "status", None) or batch.processing_status
        if self.finish_reason != "completed" or batch.id in _counted_batches:
            self._usage = None
        else:
            _counted_batches.add(batch.id)

    def _read_responses_object(self, response: Any) -> None:
        """Read a `Response` object of the Responses API.

        A call that is not streamed returns such an object. A stream contains one in its first
        event, still without token counts and a final status, and a complete one in its last event.
        """
        if response.usage:
            self._usage = response.usage

        self.response_id = response.id or ""
        self.response_model = response.model or ""
        if response.status in _END_STATES:
            self.finish_reason = _finish_reason_of(response)

        if response.status == "failed":
            self.error = str(getattr(response.error, "message", "") or "the response failed")

        if self.content is not None:
            self.content.add_response(response, self.finish_reason, with_text=not self._is_streamed)


_NO_OUTPUT = "no output"
_ANSWER = "answer"
_REASONING = "reasoning"


def _output_kind_without_text(fields: Any) -> str:
    """Return what a chat delta without text contains: _ANSWER, _REASONING or _NO_OUTPUT.

    Tool calls and refusals belong to the answer.
    """
    if fields.tool_calls or fields.function_call or getattr(fields, "refusal", None):
        return _ANSWER
    if any(getattr(fields, name, None) for name in _REASONING_FIELDS):
        return _REASONING
    return _NO_OUTPUT


def _finish_reason_of(response: Any) -> str:
    """Return why a response of the Responses API ended: its status, or why it is incomplete."""
    if response.status == "incomplete" and response.incomplete_details is not None:
        return response.incomplete_details.reason or "incomplete"
    status: str = response.status
    return status


def _has_only_text(chunk: object) -> bool:
    """Return True if an event of chat contains a piece of text, but no finish reason and no usage.

    Return False as well for an event that does not have exactly one choice, or that lacks one of
    the fields. This runs for each token. The fields are therefore read from `__dict__`: to read an
    attribute of a pydantic object would take as long as the rest of the work for an event.
    """
    try:
        chunk_fields = chunk.__dict__
        (only_choice,) = chunk_fields["choices"]  # ValueError if there are several or none
        choice_fields = only_choice.__dict__
        has_finish_reason = choice_fields["finish_reason"] is not None
        if has_finish_reason or chunk_fields["usage"] is not None:
            return False
        return bool(choice_fields["delta"].content)
    except Exception:
        return False


def _has_unknown_text(choice: Any) -> bool:
    """Return True if the delta of a choice has a text in a field that this package does not know.

    pydantic keeps such fields in `__pydantic_extra__`.
    """
    extra_fields = getattr(choice.delta, "__pydantic_extra__", None) or {}
    return any(
        bool(text) and isinstance(text, str)
        for name, text in extra_fields.items()
        if name not in _REASONING_FIELDS
    )
