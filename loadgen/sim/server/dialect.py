"""The bytes that a simulated server sends, by dialect: responses, errors and small pages. Pure: no sockets, no clock.

Keys and their order are those of trtllm-serve (its protocol, post-processing and metrics sources); for `openai` they
are those of the public API. `request_parser.py` reads the requests.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Dialect = Literal["trtllm", "openai"]
Api = Literal["chat", "completions"]


WORDS: tuple[bytes, ...] = tuple(
    b" " + word
    for word in b"""
    this that with from have will your else more they data name time over type part work when been were file year
    some said like also than just them into what list case only back need user then test make long read form want
    comp size look know hand most text show find used play help pass down even item last high line cons here very
    call well view pres many good post such much open next game path each sign best same made mark main take free
    real head must week prop code team fact home left page both fore life book base node care full turn body keep
    come mill disc hard port link feel less sure prom says rest mult site prof cell cost load done args days cent
    stop love give copy lead step four room once talk grow mass mean area kind side camp miss plan away near dest
    sent past move city tell font late hold para meet task word host role deal ever info face save food comb send
    diff news fail came card root pick girl pack wait fund mode took seen live hope went fire anim mind bill draw
    larg easy vari circ walk five land half cook rate fall foot push idea film sell icon term trad loss stay serv
    exit pour tree byte ball fast unit blog menu cout soon join fill hash flag note upon risk gets lock arch tool
    feed vers song drug ways plus deep lost dead road held uses flex goal
""".split()
)
"""256 words of five bytes, each one token of cl100k: all token events have the same size."""


class Refusal(Exception):
    """A response with a status other than 200: `status`, `body` (JSON bytes) and additional headers."""

    def __init__(self, status: int, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(status, body)
        self.status, self.body, self.headers = status, body, headers


class ParsedRequest(msgspec.Struct, kw_only=True, gc=False):
    """One request, parsed and checked."""

    api: Api
    model: str
    stream: bool
    input_tokens: int
    output_tokens: int
    finish_reason: str
    digest: bytes  # 64 bytes that determine the output text: equal prompts get equal texts
    include_usage: bool
    continuous_usage: bool
    detokenize: bool
    blocks: tuple[int, ...] = ()  # hashes of the prompt's blocks, for the prefix cache
    cached_tokens: int = 0  # prompt tokens found in the cache; known with the first token


# Errors ---------------------------------------------------------------------------------------------------------------


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def malformed(dialect: Dialect, text: str) -> Refusal:
    """400 for a body that is not JSON or does not match the schema: trtllm-serve answers with a bare string."""
    if dialect == "trtllm":
        return Refusal(400, _json({"error": text}))
    return refused(dialect, text, "")


def refused(dialect: Dialect, text: str, param: str, status: int = 400) -> Refusal:
    """An error of the server itself: trtllm-serve puts it at the top level, the public API inside `error`."""
    return Refusal(status, error(dialect, text, status, param))


def error(dialect: Dialect, text: str, status: int, param: str = "") -> bytes:
    """The JSON body of an error answer."""
    if dialect == "trtllm":
        names = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError"}
        kind = names.get(status, "InternalServerError")
        return _json({"object": "error", "message": text, "type": kind, "param": None, "code": status})
    kind = {429: "rate_limit_error"}.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = {401: "invalid_api_key", 429: "rate_limit_exceeded"}.get(status)
    return _json({"error": {"message": text, "type": kind, "param": param or None, "code": code}})


def no_route(dialect: Dialect, status: int, allowed: str = "") -> Refusal:
    """404 for an unknown path, 405 for a wrong method. In trtllm-serve its web framework writes this response."""
    text = {404: "Not Found", 405: "Method Not Allowed"}[status]
    headers = (("allow", allowed),) if allowed else ()
    return Refusal(status, _json({"detail": text}) if dialect == "trtllm" else error(dialect, text, status), headers)


def wrong_key() -> Refusal:
    """401 of the public API."""
    return refused(
        "openai", "Incorrect API key provided. You can obtain a key from whoever runs this endpoint.", "", 401
    )


def unknown_model(model: str) -> Refusal:
    text = f"The model `{model}` does not exist or you do not have access to it."
    value = {"message": text, "type": "invalid_request_error", "param": None, "code": "model_not_found"}
    return Refusal(404, _json({"error": value}))


def too_long(context: int, input_tokens: int, limit: int | None) -> Refusal:
    text = (
        f"This model's maximum context length is {context} tokens. However, you requested"
        f" {input_tokens + (limit or 0)} tokens ({input_tokens} in the messages, {limit or 0} in the completion)."
    )
    value = {"message": text, "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}
    return Refusal(400, _json({"error": value}))


# Answering ------------------------------------------------------------------------------------------------------------

DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def chunk(event: bytes) -> bytes:
    """`event` as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def usage(input_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The usage object. It always contains `cached_tokens`, as in trtllm-serve."""
    return {
        "prompt_tokens": input_tokens,
        "total_tokens": input_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Script:
    """All bytes of the response to one request.

    `head + WORD + tail` is a complete HTTP chunk of a plain token event. The slower methods are for events with more
    than one token, with usage, or with an ending.
    """

    __slots__ = (
        "_after",
        "_ask",
        "_before",
        "_dialect",
        "_finish",
        "_id",
        "_object",
        "_separate_finish",
        "created",
        "head",
        "tail",
        "trtllm",
    )

    def __init__(self, ask: ParsedRequest, dialect: Dialect, number: int, created: int) -> None:
        self._ask, self._dialect, self.created, self.trtllm = ask, dialect, created, dialect == "trtllm"
        chat = ask.api == "chat"
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{number}"
        self._object = "chat.completion.chunk" if chat else "text_completion"
        # The public API sends the finish reason of a chat in a separate event.
        self._separate_finish = dialect == "openai" and chat
        mark = "\ue000"
        before, after = _split(self._token(mark, None), mark)
        _, finish = _split(self._token(mark, ask.finish_reason), mark)
        self._before, self._after = b"data: " + before, after + b"\n\n"
        self._finish = self._after if self._separate_finish else finish + b"\n\n"
        size = len(self._before) + len(WORDS[0]) + len(self._after)
        self.head = b"%x\r\n%b" % (size, self._before)
        self.tail = self._after + b"\r\n"

    def _token(self, text: str, finish: str | None) -> dict[str, Any]:
        """A token event as a value, with keys, order and nulls as the dialect writes them."""
        ask, trtllm = self._ask, self._dialect == "trtllm"
        value: dict[str, Any] = {"id": self._id, "object": self._object, "created": self.created, "model": ask.model}
        if ask.api == "chat":
            if trtllm:  # without nulls
                choice: dict[str, Any] = {"index": 0, "delta": {"content": text, "reasoning_content": ""}}
                if finish:
                    choice["finish_reason"] = finish
                choice["avg_decoded_tokens_per_iter"] = 1.0
            else:
                choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        elif trtllm:  # with every key
            choice = {"index": 0, "text": text, "token_ids": None, "logprobs": None, "finish_reason": finish}
            if not ask.detokenize:
                choice["text"], choice["token_ids"] = "", [text]
            choice |= {"stop_reason": None, "avg_decoded_tokens_per_iter": 1.0}
        else:
            choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
        value["choices"] = [choice]
        if ask.api == "completions" and trtllm:
            value["usage"] = None
        elif not trtllm and ask.include_usage:
            value["usage"] = None
        return value

    def word(self, index: int) -> bytes:
        """The text of token `index`, five bytes: a function of prompt, server seed and index only."""
        return WORDS[self._ask.digest[index & 63] ^ (index >> 6 & 255)]

    def words(self, start: int, stop: int) -> bytes:
        """The content of tokens `start` to `stop`: text, or token ids if the request has `detokenize` false."""
        digest = self._ask.digest
        numbers = [digest[i & 63] ^ (i >> 6 & 255) for i in range(start, stop)]
        if self._ask.detokenize:
            return b"".join([WORDS[number] for number in numbers])
        return b",".join([b"%d" % number for number in numbers])

    def event(self, start: int, stop: int, last: bool, filler: bytes = b"") -> bytes:
        """The SSE event (not yet a chunk) with tokens `start` to `stop`.

        `last` adds the finish reason, `filler` additional text.
        """
        event = self._before + self.words(start, stop) + filler + (self._finish if last else self._after)
        if self._ask.continuous_usage:
            event = self._with_usage(event, stop)
        return event

    def _with_usage(self, event: bytes, tokens: int) -> bytes:
        """`event` with cumulative usage added."""
        value = b'"usage":' + _json(usage(self._ask.input_tokens, tokens, self._ask.cached_tokens))
        if event.endswith(b'"usage":null}\n\n'):
            return event[: -len(b'"usage":null}\n\n')] + value + b"}\n\n"
        return event[: -len(b"}\n\n")] + b"," + value + b"}\n\n"

    def opening(self) -> list[bytes]:
        """Events before the first token event: the role, in chat.

        trtllm-serve creates it together with the first token and writes a space before its end.
        """
        ask = self._ask
        if ask.api != "chat":
            return []
        value: dict[str, Any] = {"id": self._id, "object": self._object, "created": self.created, "model": ask.model}
        if self._dialect == "trtllm":
            value["choices"] = [{"index": 0, "delta": {"role": "assistant"}}]
            if ask.continuous_usage:
                value["usage"] = usage(ask.input_tokens, 0, ask.cached_tokens)
            return [b"data: " + _json(value) + b" \n\n"]
        delta = {"role": "assistant", "content": "", "refusal": None}
        value["choices"] = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]
        if ask.include_usage:
            value["usage"] = None
        return [b"data: " + _json(value) + b"\n\n"]

    def closing(self, output_tokens: int, finish: bool = True) -> list[bytes]:
        """Events after the last token event, without `[DONE]`: a separate finish reason, usage."""
        ask, events = self._ask, []
        value: dict[str, Any] = {"id": self._id, "object": self._object, "created": self.created, "model": ask.model}
        if self._separate_finish and finish:
            choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": ask.finish_reason}
            ending = value | {"choices": [choice]}
            events.append(b"data: " + _json(ending | {"usage": None} if ask.include_usage else ending) + b"\n\n")
        if ask.include_usage:
            value |= {"choices": [], "usage": usage(ask.input_tokens, output_tokens, ask.cached_tokens)}
            events.append(b"data: " + _json(value) + b"\n\n")
        return events

    def whole(self, counted: int, finish: bool = True) -> bytes:
        """The JSON body of a response that is not streamed; its usage reports `counted` output tokens."""
        ask, trtllm = self._ask, self._dialect == "trtllm"
        text = self.words(0, ask.output_tokens).decode() if ask.detokenize else ""
        if ask.api == "chat":
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if trtllm:
                message |= {"reasoning_content": "", "reasoning": None, "tool_calls": []}
            else:
                message["refusal"] = None
            choice: dict[str, Any] = {"index": 0, "message": message}
        else:
            choice = {"index": 0, "text": text}
            if not ask.detokenize:
                choice["token_ids"] = [int(number) for number in self.words(0, ask.output_tokens).split(b",")]
        choice |= {"logprobs": None, "finish_reason": ask.finish_reason if finish else None}
        if trtllm:
            choice |= {"stop_reason": None, "disaggregated_params": None, "avg_decoded_tokens_per_iter": 1.0}
        value = {
            "id": self._id,
            "object": "chat.completion" if ask.api == "chat" else "text_completion",
            "created": self.created,
            "model": ask.model,
            "choices": [choice],
            "usage": usage(ask.input_tokens, counted, ask.cached_tokens),
        }
        return _json(value)

    def error(self) -> bytes:
        """The JSON body of the 500 when the engine fails before a whole answer is there."""
        return error(self._dialect, "the simulated engine failed", 500)

    def failure(self) -> tuple[list[bytes], bool]:
        """The events that end a stream when the engine fails, and whether the body still ends properly.

        trtllm-serve cuts a chat stream. After the error event of a completion it sends `[DONE]` twice.
        """
        if self._dialect == "trtllm" and self._ask.api == "chat":
            return [], False
        return [error_event("the simulated engine failed"), DONE, *([DONE] if self._dialect == "trtllm" else [])], True


def error_event(text: str) -> bytes:
    """An error inside a stream, as most servers write it."""
    value = {"error": {"message": text, "type": "server_error", "code": None, "param": None}}
    return b"data: " + _json(value) + b"\n\n"


def _split(value: dict[str, Any], mark: str) -> tuple[bytes, bytes]:
    """The JSON of `value` before and after `mark`. For a list of token ids the quotes are removed too."""
    whole = _json(value)
    quoted = b'["' + mark.encode() + b'"]'
    # search from the right: the model's name comes first and may contain anything
    before, _, after = whole.replace(quoted, b"[" + mark.encode() + b"]").rpartition(mark.encode())
    return before, after


# Other paths ----------------------------------------------------------------------------------------------------------


def models(dialect: Dialect, model: str, created: int) -> bytes:
    """`GET /v1/models`."""
    owner = "tensorrt_llm" if dialect == "trtllm" else "loadgen-sim"
    return _json({"object": "list", "data": [{"id": model, "object": "model", "created": created, "owned_by": owner}]})


def perf_headers(arrival_ns: int, first_ns: int, done_ns: int, queue_ns: int = 0) -> dict[str, str]:
    """The server's own timing of a request, as trtllm-serve returns it for `X-TRTLLM-return-metrics: 1`."""
    ms = [(at - arrival_ns) / 1e6 for at in (first_ns, done_ns)]
    return {
        "Server-Timing": f"server_queue;dur={queue_ns / 1e6:.6f}, server_ttft;dur={ms[0]:.6f},"
        f" server_e2e;dur={ms[1]:.6f}",
        "X-TRTLLM-Start-End-Time": f"server-start;ts={arrival_ns / 1e9:.6f}, server-end;ts={done_ns / 1e9:.6f}",
    }


def perf_event(headers: dict[str, str]) -> bytes:
    """The same timing in a stream: a named event after `[DONE]`."""
    return b"event: trtllm.perf_metrics\ndata: " + _json(headers) + b"\n\n"


def iteration_stats(iteration: int, active: int, queued: int, completed: int) -> dict[str, Any]:
    """One row of the JSON at `GET /metrics`, which each read empties. Values not modelled are left out."""
    return {
        "iter": iteration,
        "numActiveRequests": active,
        "numQueuedRequests": queued,
        "numCompletedRequests": completed,
        "inflightBatchingStats": {
            "numContextRequests": 0,
            "numGenRequests": active,
            "numPausedRequests": 0,
            "numScheduledRequests": active,
            "avgNumDecodedTokensPerIter": 1.0,
        },
    }
