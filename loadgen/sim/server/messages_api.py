"""The Messages API (Anthropic's) of the simulated server: parses requests and formats responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from loadgen.sim.server.error_responses import RefusalError
from loadgen.sim.server.request_parser import (
    TEMPLATE_TOKENS,
    RequestRules,
    check_model,
    choose_output_length,
    count_tokens,
    create_body_decoder,
    digest_prompt,
    hash_blocks,
)
from loadgen.sim.server.server_timing import RequestTiming
from loadgen.sim.server.wire_format import (
    TEXT_PLACEHOLDER,
    TOOL_ARGUMENTS_END,
    TOOL_ARGUMENTS_START,
    ParsedRequest,
    ResponseContext,
    ResponseFormatter,
    format_chunk_around_word,
    format_sse_event,
    split_at_placeholder,
    token_text,
)

OVERLOADED_STATUS = 529
_ERROR_TYPES = {
    404: "not_found_error",
    429: "rate_limit_error",
    OVERLOADED_STATUS: "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _ContentBlock(msgspec.Struct):
    """The parts of a content block that the model reads."""

    type: str = ""
    text: str = ""
    content: Any = None  # of a tool's result
    input: Any = None  # of a tool call


class _MessageParam(msgspec.Struct):
    role: str
    content: str | list[_ContentBlock] = ""

    def texts(self) -> list[str]:
        """Return the texts that the model reads, without empty ones."""
        if isinstance(self.content, str):
            return [self.content]
        texts = []
        for block in self.content:
            texts += [block.text, _extract_text(block.content), _extract_text(block.input)]
        return [text for text in texts if text]


class _Tool(msgspec.Struct):
    name: str
    description: str = ""


class _ToolChoice(msgspec.Struct):
    type: str
    name: str = ""


class _MessagesBody(msgspec.Struct, kw_only=True):
    model: str
    messages: list[_MessageParam]
    max_tokens: int
    system: str | list[_ContentBlock] = ""
    tools: list[_Tool] = []
    tool_choice: _ToolChoice | None = None
    stream: bool = False


_IGNORED_FIELDS = (
    "container context_management metadata service_tier stop_sequences temperature thinking top_k "
    "top_p"
)
_decode_body = create_body_decoder(_MessagesBody, {Any: _IGNORED_FIELDS})


def _extract_text(value: object) -> str:
    """Return the text of a tool's input or result.

    The value is None, a string, a list of content blocks or another JSON value, whose text is its
    JSON. Content blocks without text, such as images, are left out.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " ".join(
            _extract_text(block.get("text")) for block in value if isinstance(block, dict)
        )

    return msgspec.json.encode(value).decode()


def _error_object(status: int, text: str) -> dict[str, Any]:
    """Return an error in the form of this API, whose type depends on the HTTP status."""
    default_type = "api_error" if status >= 500 else "invalid_request_error"
    error_type = _ERROR_TYPES.get(status, default_type)
    return {"type": "error", "error": {"type": error_type, "message": text}}


def _refusal(text: str, status: int = 400) -> RefusalError:
    return RefusalError(status, msgspec.json.encode(_error_object(status, text)))


def _convert_refusal(refusal: RefusalError) -> RefusalError:
    """Convert a refusal of the common checks to the form of this API."""
    body = msgspec.json.decode(refusal.body)
    error = body.get("error", body)
    text = error["message"] if isinstance(error, dict) else str(error)
    return _refusal(text, refusal.status)


def parse_messages_request(body: bytes, rules: RequestRules) -> ParsedRequest:
    """Parse and check a request to Anthropic's Messages API. Raises RefusalError."""
    request = _decode_messages_body(body)
    input_tokens, content = _read_prompt(request)

    digest = digest_prompt(content, rules.seed)
    with _converted_refusals():
        check_model(request.model, rules)
        output_tokens, finish_reason = choose_output_length(
            request.max_tokens, input_tokens, digest, rules
        )

    called_tool = _find_forced_tool(request)
    return ParsedRequest(
        api="messages",
        model=request.model,
        stream=request.stream,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        finish_reason="tool_calls" if called_tool else finish_reason,
        digest=digest,
        include_usage=True,
        continuous_usage=False,
        detokenize=True,
        blocks=hash_blocks(content, input_tokens, rules.tokens_per_block),
        called_tool=called_tool,
    )


def _decode_messages_body(body: bytes) -> Any:
    """Return the decoded body. Raises RefusalError if it is malformed, or has no messages."""
    try:
        request = _decode_body(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(str(error)) from None

    if request.max_tokens < 1:
        raise _refusal("max_tokens: Input should be greater than or equal to 1")
    if not any(message.texts() for message in request.messages):
        raise _refusal("messages: at least one message is required")

    return request


@contextmanager
def _converted_refusals() -> Iterator[None]:
    """Convert refusals within a `with` block to the form of this API.

    The checks that all APIs have in common refuse a request in the form of OpenAI's API.
    """
    try:
        yield
    except RefusalError as refusal:
        raise _convert_refusal(refusal) from None


def _read_prompt(request: Any) -> tuple[int, bytes]:
    """Return the number of tokens of a prompt, and its content as bytes.

    The prompt consists of the descriptions of tools, the system prompt and the messages. The chat
    template adds some tokens. The content is hashed, so it only has to be equal for equal prompts.
    """
    messages = [_MessageParam(role="system", content=request.system), *request.messages]
    pieces = [tool.description for tool in request.tools if tool.description]

    tokens = TEMPLATE_TOKENS + sum(map(count_tokens, pieces))
    for message in messages:
        texts = message.texts()
        tokens += sum(map(count_tokens, texts))
        pieces += [*texts, message.role]

    return tokens, "".join(pieces).encode("utf-8", "surrogatepass")


def _find_forced_tool(request: Any) -> str:
    """Return the tool that the request forces the completion to call, or "" if it is text."""
    choice = request.tool_choice
    if choice is None or choice.type not in ("any", "tool"):
        return ""
    if choice.name:
        return str(choice.name)
    return str(request.tools[0].name) if request.tools else ""


class MessageFormatter(ResponseFormatter):
    """Formats the response to one request to the Messages API."""

    def __init__(self, request: ParsedRequest, context: ResponseContext) -> None:
        """Encode the parts of the response that are the same in all its token events.

        A token event carries the text of one or several tokens. The bytes around this text are
        found by encoding an event whose text is a placeholder. All events of the response are then
        put together from `_before_text`, their text, and `_after_text`.

        Args:
            request: The request that is answered.
            context: The number of the request, and the API flavor of its error responses.
        """
        self.flavor = context.flavor
        self._request = request
        self._message_id = f"msg_{context.request_number}_{request.digest[:6].hex()}"
        placeholder_event = _format_event(
            "content_block_delta", index=0, delta=self._build_delta(TEXT_PLACEHOLDER)
        )
        self._before_text, self._after_text = split_at_placeholder(placeholder_event)

        # Most events are sent as an HTTP chunk with one word. All its other bytes are known now.
        self.chunk_prefix, self.chunk_suffix = format_chunk_around_word(
            self._before_text, self._after_text
        )

    def _build_delta(self, text: str) -> dict[str, str]:
        """Return what an event adds to the message: a text, or a part of a tool's input."""
        if self._request.called_tool:
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": "text_delta", "text": text}

    def format_opening(self) -> list[bytes]:
        """Return the events before the first text.

        They announce the message and its only content block. Anthropic's API then sends a ping.
        """
        return [
            _format_event(
                "message_start",
                message=self._build_message(content=[], stop_reason=None, output_tokens=1),
            ),
            _format_event(
                "content_block_start", index=0, content_block=self._build_content_block("")
            ),
            _format_event("ping"),
        ]

    def format_event(self, start: int, stop: int, *, is_last: bool, filler: bytes = b"") -> bytes:
        """Return the event with tokens `start` to `stop` (exclusive) of the completion.

        The event is put together from bytes that were encoded once per response, which is possible
        because the words need no escapes in JSON.

        Args:
            start: The index of the first token in the completion.
            stop: The index after the last token.
            is_last: Whether this is the last token event. Only tool calls differ then.
            filler: Additional text after the tokens, for the injected failure `oversized`.
        """
        content = token_text(self._request.digest, start, stop) + filler
        if self._request.called_tool:
            # The text is the only argument of a tool call, so JSON surrounds the whole of it.
            if start == 0:
                content = TOOL_ARGUMENTS_START + content
            if is_last:
                content += TOOL_ARGUMENTS_END

        return self._before_text + content + self._after_text

    def format_closing(
        self, reported_tokens: int, _timing: RequestTiming, *, has_finish_reason: bool = True
    ) -> list[bytes]:
        """Return the events after the last text.

        The content block ends, then follow the stop reason and the usage, and the message ends.

        Args:
            reported_tokens: What the usage reports as output tokens.
            has_finish_reason: Whether the stop reason is sent. It is null otherwise.
            _timing: Not used, because this API reports no server timing.
        """
        delta = {"stop_reason": self._stop_reason(has_finish_reason), "stop_sequence": None}
        return [
            _format_event("content_block_stop", index=0),
            _format_event("message_delta", delta=delta, usage=self._build_usage(reported_tokens)),
            _format_event("message_stop"),
        ]

    def format_body(
        self, reported_tokens: int, _timing: RequestTiming, *, has_finish_reason: bool = True
    ) -> bytes:
        """Return the JSON body of a message that is not streamed."""
        text = token_text(self._request.digest, 0, self._request.output_tokens).decode()
        content = [self._build_content_block(text)]
        message = self._build_message(
            content, self._stop_reason(has_finish_reason), reported_tokens
        )
        return msgspec.json.encode(message)

    def format_engine_failure(self) -> tuple[list[bytes], bool]:
        """Return the events after a failure of the engine, and whether the body ends properly."""
        return [_format_event(**_error_object(OVERLOADED_STATUS, "Overloaded"))], True

    def _stop_reason(self, has_finish_reason: bool) -> str | None:
        if not has_finish_reason:
            return None
        return _STOP_REASONS.get(self._request.finish_reason, self._request.finish_reason)

    def _build_usage(self, output_tokens: int) -> dict[str, Any]:
        """Return the usage object for a message with this many output tokens.

        This API reports cached prompt tokens apart: `input_tokens` does not include them, unlike in
        OpenAI's API.
        """
        cached_tokens = self._request.cached_tokens
        return {
            "input_tokens": self._request.input_tokens - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": output_tokens,
        }

    def _build_message(
        self, content: Sequence[object], stop_reason: str | None, output_tokens: int
    ) -> dict[str, Any]:
        """Return the message object.

        The first event of a stream contains it without content and stop reason. It is also the body
        of a response that is not streamed, with everything.
        """
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": self._build_usage(output_tokens),
        }

    def _build_content_block(self, text: str) -> dict[str, Any]:
        """Return the only content block of the message: its text, or a tool call with this input.

        At the start of a stream the block is empty. The text or the input follows in deltas.
        """
        if not self._request.called_tool:
            return {"type": "text", "text": text}
        return {
            "type": "tool_use",
            "id": f"toolu_{self._message_id}",
            "name": self._request.called_tool,
            "input": {"input": text} if text else {},
        }


def _format_event(type: str, **fields: Any) -> bytes:
    """Return an event whose name is also the `type` of its data."""
    return format_sse_event({"type": type, **fields}, name=type)
