"""The Responses API of the simulated server: its request bodies, and the events and answers as the public API has them.

Pure, but for the responses that are kept so that a later request can go on from them (`previous_response_id`).
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from loadgen.sim.server.request_parser import (
    TEMPLATE_TOKENS,
    RequestRules,
    blocks_of,
    check_model,
    count_tokens,
    length_of,
    reader,
)
from loadgen.sim.server.wire_format import Dialect, ParsedRequest, malformed, refused, words

KEPT_BYTES = 256 << 20  # of the texts of earlier responses; the oldest are forgotten


class _Part(msgspec.Struct):
    type: str = ""
    text: str = ""


class _Item(msgspec.Struct):
    """A message, a call of a function, or its result: what of it the model reads."""

    role: str = ""
    content: str | list[_Part] = ""
    arguments: str = ""
    output: str = ""

    @property
    def texts(self) -> list[str]:
        said = (
            [self.content]
            if isinstance(self.content, str)
            else [part.text for part in self.content]
        )
        return [text for text in (*said, self.arguments, self.output) if text]


class _Response(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[_Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    stream: bool | None = False


_IGNORED = (
    "background conversation include max_tool_calls metadata parallel_tool_calls prompt prompt_cache_key reasoning "
    "safety_identifier service_tier stream_options temperature text tool_choice tools top_logprobs top_p truncation "
    "user"
)
_reader = reader(_Response, {Any: _IGNORED})


class KeptResponses:
    """The prompt and the answer of earlier responses, by their ids."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[bytes, int]] = {}
        self._bytes = 0

    def __getitem__(self, response_id: str) -> tuple[bytes, int]:
        """What was said up to the end of a response, and its tokens. Raises KeyError."""
        return self._kept[response_id]

    def keep(self, response_id: str, ask: ParsedRequest) -> None:
        said = ask.content + words(ask.digest, 0, ask.output_tokens) + b"assistant"
        self._kept[response_id] = said, ask.input_tokens + ask.output_tokens
        self._bytes += len(said)
        while self._bytes > KEPT_BYTES:
            self._bytes -= len(self._kept.pop(next(iter(self._kept)))[0])


def parse_response(body: bytes, rules: RequestRules, kept: KeptResponses) -> ParsedRequest:
    """The request in `body`. Raises Refusal for everything that this server refuses."""
    try:
        request = _reader(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise malformed(rules.dialect, str(wrong)) from None
    check_model(request.model, rules)
    limit = request.max_output_tokens
    if limit is not None and limit < 1:
        raise refused(
            rules.dialect, f"max_output_tokens must be at least 1, got {limit}", "max_output_tokens"
        )
    items = (
        [_Item(role="user", content=request.input)]
        if isinstance(request.input, str)
        else request.input
    )
    if not any(item.texts for item in items):
        raise malformed(rules.dialect, "input must not be empty")
    before, tokens = b"", TEMPLATE_TOKENS
    if request.previous_response_id:
        try:
            before, tokens = kept[request.previous_response_id]
        except KeyError:
            text = f"Previous response with id '{request.previous_response_id}' not found."
            raise refused(
                rules.dialect, text, "previous_response_id", code="previous_response_not_found"
            ) from None
    if request.instructions:
        items = [_Item(role="system", content=request.instructions), *items]
    said = "".join("".join((*item.texts, item.role)) for item in items)
    tokens += sum(count_tokens(text) for item in items for text in item.texts)
    content = before + said.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(rules.seed.to_bytes(8, "little") + content, digest_size=64).digest()
    output_tokens, finish_reason = length_of(request, limit, tokens, digest, rules)
    return ParsedRequest(
        api="responses",
        model=request.model,
        stream=bool(request.stream),
        input_tokens=tokens,
        output_tokens=output_tokens,
        finish_reason=finish_reason,
        digest=digest,
        include_usage=True,
        continuous_usage=False,
        detokenize=True,
        blocks=blocks_of(content, tokens, rules.tokens_per_block),
        asked=request,
        content=content,
    )


class ResponseScript:
    """All bytes of the answer to one request. Every event has a number of its own, so that no two are alike."""

    head = tail = done = b""

    def __init__(self, ask: ParsedRequest, dialect: Dialect, number: int, created: int) -> None:
        self._ask, self.dialect, self._created = ask, dialect, created
        self.id = f"resp_{number}_{ask.digest[:6].hex()}"
        self._item = f"msg_{number}"
        self._events = 0

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"

    def _response(
        self, status: str, output_tokens: int | None = None, **fields: Any
    ) -> dict[str, Any]:
        """The object of the response; `output_tokens`: as its usage has them, None before the end."""
        asked = self._ask.asked
        usage = None
        if output_tokens is not None:
            usage = {
                "input_tokens": self._ask.input_tokens,
                "input_tokens_details": {"cached_tokens": self._ask.cached_tokens},
                "output_tokens": output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._ask.input_tokens + output_tokens,
            }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._ask.model,
            "output": [],
            "previous_response_id": asked.previous_response_id,
            "max_output_tokens": asked.max_output_tokens,
            "store": asked.store is not False,
            "usage": usage,
            **fields,
        }

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [self._part(text)]
        return {
            "id": self._item,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def opening(self) -> list[bytes]:
        """Events before the first text."""
        begun = self._response("in_progress")
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event(
                "response.output_item.added",
                output_index=0,
                item=self._message("in_progress", None),
            ),
            self._event("response.content_part.added", **self._place, part=self._part("")),
        ]

    def event(self, start: int, stop: int, last: bool, filler: bytes = b"") -> bytes:
        """The event with tokens `start` to `stop`; `filler`: additional text."""
        delta = (words(self._ask.digest, start, stop) + filler).decode()
        return self._event("response.output_text.delta", **self._place, delta=delta, logprobs=[])

    def closing(self, output_tokens: int, finish: bool = True, metrics: Any = None) -> list[bytes]:
        """Events after the last text; without `finish` the response does not say that it has ended."""
        text = words(self._ask.digest, 0, self._ask.output_tokens).decode()
        ended = [
            self._event("response.output_text.done", **self._place, text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place, part=self._part(text)),
            self._event(
                "response.output_item.done", output_index=0, item=self._message(self._status, text)
            ),
        ]
        if finish:
            kind = f"response.{self._status}"
            ended.append(self._event(kind, response=self._ended(output_tokens, text)))
        return ended

    @property
    def _status(self) -> str:
        return "incomplete" if self._ask.finish_reason == "length" else "completed"

    def _ended(self, output_tokens: int, text: str) -> dict[str, Any]:
        why = (
            {"incomplete_details": {"reason": "max_output_tokens"}}
            if self._status == "incomplete"
            else {}
        )
        return self._response(
            self._status, output_tokens, output=[self._message(self._status, text)], **why
        )

    def whole(
        self, counted: int, finish: bool = True, metrics: Any = None, meta_info: Any = None
    ) -> bytes:
        """The JSON body of a response that is not streamed; its usage reports `counted` output tokens."""
        text = words(self._ask.digest, 0, self._ask.output_tokens).decode()
        if not finish:
            return msgspec.json.encode(self._response("in_progress", counted))
        return msgspec.json.encode(self._ended(counted, text))

    def failure(self) -> tuple[list[bytes], bool]:
        """The events that end a stream when the engine fails, and whether the body still ends properly."""
        what = {"code": "server_error", "message": "the simulated engine failed"}
        return [self._event("response.failed", response=self._response("failed", error=what))], True
