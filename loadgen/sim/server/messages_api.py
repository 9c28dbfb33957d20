"""Anthropic's messages at the simulated server: request bodies, events and answers as the public API has them. Pure."""

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
from loadgen.sim.server.wire_format import MARK, WORDS, Dialect, ParsedRequest, Refusal, words


class _Block(msgspec.Struct):
    """A block of a message: what of it the model reads. Input of tools and results stay as they are sent."""

    type: str = ""
    text: str = ""
    content: Any = None
    input: Any = None


class _Said(msgspec.Struct):
    role: str
    content: str | list[_Block] = ""

    @property
    def texts(self) -> list[str]:
        if isinstance(self.content, str):
            return [self.content]
        return [
            text
            for block in self.content
            for text in (block.text, _text(block.content), _text(block.input))
            if text
        ]


class _Tool(msgspec.Struct):
    name: str
    description: str = ""


class _Choice(msgspec.Struct):
    type: str
    name: str = ""


class _Message(msgspec.Struct, kw_only=True):
    model: str
    messages: list[_Said]
    max_tokens: int
    system: str | list[_Block] = ""
    tools: list[_Tool] = []
    tool_choice: _Choice | None = None
    stream: bool = False


_IGNORED = "container context_management metadata service_tier stop_sequences temperature thinking top_k top_p"
_read = reader(_Message, {Any: _IGNORED})
_KINDS = {404: "not_found_error", 429: "rate_limit_error", 529: "overloaded_error"}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_text(one.get("text")) for one in value if isinstance(one, dict))
    return (
        value
        if isinstance(value, str)
        else ""
        if value is None
        else msgspec.json.encode(value).decode()
    )


def _error(status: int, text: str) -> dict[str, Any]:
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": text}}


def _refusal(text: str, status: int = 400) -> Refusal:
    return Refusal(status, msgspec.json.encode(_error(status, text)))


def parse_message(body: bytes, rules: RequestRules) -> ParsedRequest:
    """The request in `body`. Raises Refusal for everything that this server refuses, as the public API words it."""
    try:
        request = _read(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise _refusal(str(wrong)) from None
    if request.max_tokens < 1:
        raise _refusal("max_tokens: Input should be greater than or equal to 1")
    if not any(said.texts for said in request.messages):
        raise _refusal("messages: at least one message is required")
    said = [_Said(role="system", content=request.system), *request.messages]
    described = [tool.description for tool in request.tools if tool.description]
    tokens = TEMPLATE_TOKENS + sum(
        map(count_tokens, (*described, *(text for one in said for text in one.texts)))
    )
    content = "".join((*described, *("".join((*one.texts, one.role)) for one in said))).encode(
        "utf-8", "surrogatepass"
    )
    digest = hashlib.blake2b(rules.seed.to_bytes(8, "little") + content, digest_size=64).digest()
    try:
        check_model(request.model, rules)
        output_tokens, finish_reason = length_of(request, request.max_tokens, tokens, digest, rules)
    except Refusal as refused:
        found = msgspec.json.decode(refused.body)
        inner = found.get("error", found)
        raise _refusal(
            inner["message"] if isinstance(inner, dict) else str(inner), refused.status
        ) from None
    tool = _called_tool(request)
    return ParsedRequest(
        api="messages",
        model=request.model,
        stream=request.stream,
        input_tokens=tokens,
        output_tokens=output_tokens,
        finish_reason="tool_calls" if tool else finish_reason,
        digest=digest,
        include_usage=True,
        continuous_usage=False,
        detokenize=True,
        blocks=blocks_of(content, tokens, rules.tokens_per_block),
        tool=tool,
    )


def _called_tool(request: Any) -> str:
    """The tool that the answer has to call, because the request says so; "" where the answer is text."""
    choice = request.tool_choice
    if choice is None or choice.type not in ("any", "tool"):
        return ""
    return str(choice.name or (request.tools[0].name if request.tools else ""))


class MessageScript:
    """All bytes of the answer to one request. `head + WORD + tail` is a complete HTTP chunk of a plain token event."""

    done = b""

    def __init__(self, ask: ParsedRequest, dialect: Dialect, number: int, created: int) -> None:
        self._ask, self.dialect = ask, dialect
        self._id = f"msg_{number}_{ask.digest[:6].hex()}"
        kind, name = ("input_json_delta", "partial_json") if ask.tool else ("text_delta", "text")
        delta = _event("content_block_delta", index=0, delta={"type": kind, name: MARK})
        self._before, self._after = delta.split(MARK.encode())
        self._around = (b'{\\"input\\": \\"', b'\\"}') if ask.tool else (b"", b"")
        self.head = b"%x\r\n%b" % (
            len(self._before) + len(WORDS[0]) + len(self._after),
            self._before,
        )
        self.tail = self._after + b"\r\n"

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        """Tokens of the prompt from the cache are counted beside the others; none is written on demand."""
        cached = self._ask.cached_tokens
        return {
            "input_tokens": self._ask.input_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }

    def _message(self, content: list[Any], stop: str | None, output_tokens: int) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._ask.model,
            "content": content,
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": self._usage(output_tokens),
        }

    def _block(self, text: str) -> dict[str, Any]:
        """The block of the answer: `text` is its text, or what the tool is given."""
        if not self._ask.tool:
            return {"type": "text", "text": text}
        given = {"input": text} if text else {}
        return {
            "type": "tool_use",
            "id": f"toolu_{self._id}",
            "name": self._ask.tool,
            "input": given,
        }

    @property
    def _stop(self) -> str:
        return _STOPS.get(self._ask.finish_reason, self._ask.finish_reason)

    def opening(self) -> list[bytes]:
        """Events before the first text."""
        return [
            _event("message_start", message=self._message([], None, 1)),
            _event("content_block_start", index=0, content_block=self._block("")),
            _event("ping"),
        ]

    def event(self, start: int, stop: int, last: bool, filler: bytes = b"") -> bytes:
        """The event with tokens `start` to `stop`; `filler`: additional text."""
        opens, closes = self._around[0] * (start == 0), self._around[1] * last
        return (
            self._before
            + opens
            + words(self._ask.digest, start, stop)
            + filler
            + closes
            + self._after
        )

    def closing(self, output_tokens: int, finish: bool = True, metrics: Any = None) -> list[bytes]:
        """Events after the last text; without `finish` the message does not say why it has ended."""
        delta = {"stop_reason": self._stop if finish else None, "stop_sequence": None}
        return [
            _event("content_block_stop", index=0),
            _event("message_delta", delta=delta, usage=self._usage(output_tokens)),
            _event("message_stop"),
        ]

    def whole(
        self, counted: int, finish: bool = True, metrics: Any = None, meta_info: Any = None
    ) -> bytes:
        """The JSON body of a message that is not streamed; its usage reports `counted` output tokens."""
        text = words(self._ask.digest, 0, self._ask.output_tokens).decode()
        return msgspec.json.encode(
            self._message([self._block(text)], self._stop if finish else None, counted)
        )

    def failure(self) -> tuple[list[bytes], bool]:
        """The events that end a stream when the engine fails, and whether the body still ends properly."""
        return [_event(**_error(529, "Overloaded"))], True


def _event(type: str, **fields: Any) -> bytes:
    return (
        b"event: "
        + type.encode()
        + b"\ndata: "
        + msgspec.json.encode({"type": type, **fields})
        + b"\n\n"
    )
