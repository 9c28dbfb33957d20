"""The Responses API of the simulated server: parses requests, stores responses and formats them.

Stored responses let a later request continue a conversation (`previous_response_id`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from loadgen.sim.server.error_responses import malformed_body, refusal
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
    ParsedRequest,
    ResponseContext,
    ResponseFormatter,
    format_sse_event,
    token_text,
)

MAX_STORED_BYTES = 256 << 20  # of the texts of stored responses; the oldest are removed

JsonObject = dict[str, Any]


class _ContentPart(msgspec.Struct):
    type: str = ""
    text: str = ""


class _InputItem(msgspec.Struct):
    """The parts of a message, a function call or its result that the model reads."""

    role: str = ""
    content: str | list[_ContentPart] = ""
    arguments: str = ""
    output: str = ""

    def texts(self) -> list[str]:
        """Return the texts that the model reads, without empty ones."""
        if isinstance(self.content, str):
            texts = [self.content]
        else:
            texts = [part.text for part in self.content]
        texts += [self.arguments, self.output]
        return [text for text in texts if text]


class _ResponsesBody(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[_InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    stream: bool | None = False


_IGNORED_FIELDS = (
    "background conversation include max_tool_calls metadata parallel_tool_calls prompt "
    "prompt_cache_key reasoning safety_identifier service_tier stream_options temperature text "
    "tool_choice tools top_logprobs top_p truncation user"
)
_decode_body = create_body_decoder(_ResponsesBody, {Any: _IGNORED_FIELDS})


class StoredConversation(msgspec.Struct, frozen=True):
    """All messages of a conversation so far, as bytes, and their number of tokens."""

    content: bytes
    tokens: int


class StoredResponses:
    """The conversations of earlier responses by response id, within a limit of memory."""

    def __init__(self) -> None:
        self._conversations: dict[str, StoredConversation] = {}
        self._stored_bytes = 0

    def find(self, response_id: str) -> StoredConversation | None:
        """Return the conversation that ends with a response, or None if it is not stored."""
        return self._conversations.get(response_id)

    def add(self, response_id: str, request: ParsedRequest) -> None:
        """Store the conversation of a request together with its response.

        A later request can continue it by the id of the response. If all conversations exceed
        MAX_STORED_BYTES, the oldest ones are removed: a dict keeps the order in which its entries
        were added.
        """
        text = token_text(request.digest, 0, request.output_tokens)
        role = b"assistant"  # after the text, as in the prompts that `_read_conversation` builds
        content = request.conversation + text + role
        tokens = request.input_tokens + request.output_tokens
        self._conversations[response_id] = StoredConversation(content, tokens)
        self._stored_bytes += len(content)

        while self._stored_bytes > MAX_STORED_BYTES:
            oldest_id = next(iter(self._conversations))
            oldest_conversation = self._conversations.pop(oldest_id)
            self._stored_bytes -= len(oldest_conversation.content)


def parse_responses_request(
    body: bytes, rules: RequestRules, stored: StoredResponses
) -> ParsedRequest:
    """Parse and check a request to OpenAI's Responses API. Raises RefusalError.

    Args:
        body: The body of the request.
        rules: The options of the server that decide which requests are accepted.
        stored: The stored conversations, one of which the request may continue.
    """
    request = _decode_responses_body(body, rules)
    conversation = _read_conversation(request, rules, stored)
    input_tokens = conversation.tokens

    # The completion is a function of the prompt, which is the conversation, and of the seed.
    digest = digest_prompt(conversation.content, rules.seed)
    output_tokens, finish_reason = choose_output_length(
        request.max_output_tokens, input_tokens, digest, rules
    )
    return ParsedRequest(
        api="responses",
        model=request.model,
        stream=bool(request.stream),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        finish_reason=finish_reason,
        digest=digest,
        include_usage=True,
        continuous_usage=False,
        detokenize=True,
        blocks=hash_blocks(conversation.content, input_tokens, rules.tokens_per_block),
        decoded_body=request,
        conversation=conversation.content,
    )


def _decode_responses_body(body: bytes, rules: RequestRules) -> Any:
    """Return the decoded body of a request.

    Raises RefusalError if the body is malformed, if the model does not exist, or if the limit of
    output tokens is not positive.
    """
    try:
        request = _decode_body(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed_body(rules.flavor, str(error)) from None

    check_model(request.model, rules)
    max_tokens = request.max_output_tokens
    if max_tokens is not None and max_tokens < 1:
        text = f"max_output_tokens must be at least 1, got {max_tokens}"
        raise refusal(rules.flavor, text, "max_output_tokens")

    return request


def _read_conversation(
    request: Any, rules: RequestRules, stored: StoredResponses
) -> StoredConversation:
    """Return the prompt of a request: the whole conversation that the model has to continue.

    It consists of the stored conversation that the request refers to, if any, of its instructions
    (the system prompt) and of its input. Raises RefusalError if there is no input, or if the stored
    conversation does not exist.
    """
    items = _list_input_items(request)
    if not any(item.texts() for item in items):
        raise malformed_body(rules.flavor, "input must not be empty")
    previous = _find_previous_conversation(request.previous_response_id, rules, stored)
    if request.instructions:
        items = [_InputItem(role="system", content=request.instructions), *items]
    return _append_items(previous, items)


def _list_input_items(request: Any) -> list[_InputItem]:
    """Return the input of a request as items. A text stands for one message of the user."""
    if isinstance(request.input, str):
        return [_InputItem(role="user", content=request.input)]
    items: list[_InputItem] = request.input
    return items


def _append_items(
    conversation: StoredConversation, items: Sequence[_InputItem]
) -> StoredConversation:
    """Return a conversation that is continued by some items.

    The content of an item is its texts and then its role. The order does not matter, because the
    content is only hashed, but it has to be the same in all prompts.
    """
    tokens = conversation.tokens
    pieces = []
    for item in items:
        texts = item.texts()
        tokens += sum(map(count_tokens, texts))
        pieces += [*texts, item.role]

    content = conversation.content + "".join(pieces).encode("utf-8", "surrogatepass")
    return StoredConversation(content, tokens)


def _find_previous_conversation(
    response_id: str | None, rules: RequestRules, stored: StoredResponses
) -> StoredConversation:
    """Return the stored conversation that ends with this response.

    Without a response id, return an empty conversation, which has only the tokens of the chat
    template. Raises RefusalError if there is no such response.
    """
    if not response_id:
        return StoredConversation(b"", TEMPLATE_TOKENS)

    previous = stored.find(response_id)
    if previous is None:
        text = f"Previous response with id '{response_id}' not found."
        param = "previous_response_id"
        raise refusal(rules.flavor, text, param, code="previous_response_not_found")

    return previous


class ResponsesFormatter(ResponseFormatter):
    """Formats the response to one request to the Responses API.

    Every event has a sequence number of its own, so there are no plain events (`chunk_prefix`).
    """

    def __init__(self, request: ParsedRequest, context: ResponseContext) -> None:
        self.flavor = context.flavor
        self.response_id = f"resp_{context.request_number}_{request.digest[:6].hex()}"
        self._request = request
        self._created_s = context.created_s
        self._item_id = f"msg_{context.request_number}"
        self._part_position = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._events_sent = 0

    @property
    def is_stored(self) -> bool:
        """Whether a later request may continue the response. `store` is true by default."""
        return self._request.decoded_body.store is not False

    def format_opening(self) -> list[bytes]:
        """Return the events before the first text.

        They announce the response, its only output item (a message), and the only content part of
        this item (a text). Events about the part have fields with its position: the id of the item,
        the index of the item and the index of the part.
        """
        response = self._build_response("in_progress")
        item = self._build_message_item("in_progress", [])
        part = _build_text_part("")

        return [
            self._format_numbered_event("response.created", response=response),
            self._format_numbered_event("response.in_progress", response=response),
            self._format_numbered_event("response.output_item.added", output_index=0, item=item),
            self._format_numbered_event(
                "response.content_part.added", **self._part_position, part=part
            ),
        ]

    def format_event(
        self,
        start: int,
        stop: int,
        *,
        is_last: bool,  # noqa: ARG002 - the last text looks like any other
        filler: bytes = b"",
    ) -> bytes:
        """Return the event that adds the tokens `start` to `stop` (exclusive) to the text.

        Args:
            start: The index of the first token in the completion.
            stop: The index after the last token.
            is_last: Whether this is the last token event, which makes no difference in this API.
            filler: Additional text after the tokens, for the injected failure `oversized`.
        """
        text = token_text(self._request.digest, start, stop) + filler
        return self._format_numbered_event(
            "response.output_text.delta", **self._part_position, delta=text.decode(), logprobs=[]
        )

    def format_closing(
        self, reported_tokens: int, _timing: RequestTiming, *, has_finish_reason: bool = True
    ) -> list[bytes]:
        """Return the events after the last text: the complete part, item and response.

        Without `has_finish_reason` the response never ends, so its last event is missing.
        """
        position = self._part_position
        text = self._build_text()
        part = _build_text_part(text)
        item = self._build_message_item(self._get_final_status(), [part])

        events = [
            self._format_numbered_event(
                "response.output_text.done", **position, text=text, logprobs=[]
            ),
            self._format_numbered_event("response.content_part.done", **position, part=part),
            self._format_numbered_event("response.output_item.done", output_index=0, item=item),
        ]
        if has_finish_reason:
            response = self._build_final_response(reported_tokens)
            events.append(
                self._format_numbered_event(
                    f"response.{self._get_final_status()}", response=response
                )
            )

        return events

    def format_body(
        self, reported_tokens: int, _timing: RequestTiming, *, has_finish_reason: bool = True
    ) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        if has_finish_reason:
            return msgspec.json.encode(self._build_final_response(reported_tokens))
        return msgspec.json.encode(self._build_response("in_progress", reported_tokens))

    def format_engine_failure(self) -> tuple[list[bytes], bool]:
        """Return the events after a failure of the engine, and whether the body ends properly."""
        error = {"code": "server_error", "message": "the simulated engine failed"}
        response = self._build_response("failed", error=error)
        return [self._format_numbered_event("response.failed", response=response)], True

    def _format_numbered_event(self, event_type: str, **fields: Any) -> bytes:
        """Return the next event of the stream, with its sequence number."""
        value = {"type": event_type, "sequence_number": self._events_sent, **fields}
        self._events_sent += 1
        return format_sse_event(value, name=event_type)

    def _build_text(self) -> str:
        return token_text(self._request.digest, 0, self._request.output_tokens).decode()

    def _get_final_status(self) -> str:
        return "incomplete" if self._request.finish_reason == "length" else "completed"

    def _build_final_response(self, reported_tokens: int) -> JsonObject:
        """Return the object of a complete response, with the whole text and the usage.

        A response that was cut off by the limit of output tokens is incomplete.
        """
        status = self._get_final_status()
        text_part = _build_text_part(self._build_text())
        message_item = self._build_message_item(status, [text_part])
        fields: JsonObject = {"output": [message_item]}
        if status == "incomplete":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._build_response(status, reported_tokens, **fields)

    def _build_response(
        self, status: str, reported_tokens: int | None = None, **fields: Any
    ) -> JsonObject:
        """Return the response object; without `reported_tokens` it has no usage yet.

        The object repeats some fields of the request. It appears in the first and last events of a
        stream, and is the body of a response that is not streamed.
        """
        body = self._request.decoded_body
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._request.model,
            "output": [],
            "previous_response_id": body.previous_response_id,
            "max_output_tokens": body.max_output_tokens,
            "store": self.is_stored,
            "usage": None if reported_tokens is None else self._build_usage(reported_tokens),
            **fields,
        }

    def _build_usage(self, output_tokens: int) -> JsonObject:
        """Return the usage object of a finished response.

        The simulated model does not reason, so there are no reasoning tokens.
        """
        input_tokens = self._request.input_tokens
        return {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": self._request.cached_tokens},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input_tokens + output_tokens,
        }

    def _build_message_item(self, status: str, content: list[JsonObject]) -> JsonObject:
        """Return the only output item of the response: a message of the assistant."""
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }


def _build_text_part(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
