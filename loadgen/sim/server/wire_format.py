"""The bytes that a simulated server sends, by dialect: responses, errors and small pages. Pure: no sockets, no clock.

Keys and their order are those of trtllm-serve (its protocol, post-processing and metrics sources); for `openai` they
are those of the public API. `request_parser.py` reads the requests.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Dialect = Literal["trtllm", "openai"]
Api = Literal["chat", "completions", "responses", "messages", "embeddings", "rerank"]


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
    include_metrics: bool = False  # answer with the server's own timing, in vLLM's form
    return_meta_info: bool = False  # the same in SGLang's, which streams do not have
    blocks: tuple[int, ...] = ()  # hashes of the prompt's blocks, for the prefix cache
    cached_tokens: int = 0  # prompt tokens found in the cache; known with the first token
    tool: str = ""  # the tool that the answer calls; "": it is text
    sequences: tuple[
        int, ...
    ] = ()  # tokens of each sequence that is prefilled, where no token is generated
    asked: Any = None  # the decoded body, where more of it is needed for the answer
    content: bytes = b""  # of a response: its prompt, with what was said before it


# Errors ---------------------------------------------------------------------------------------------------------------


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def malformed(dialect: Dialect, text: str) -> Refusal:
    """400 for a body that is not JSON or does not match the schema: trtllm-serve answers with a bare string."""
    return Refusal(400, _json({"error": text})) if dialect == "trtllm" else refused(dialect, text)


def refused(
    dialect: Dialect, text: str, param: str = "", status: int = 400, code: str = ""
) -> Refusal:
    """An error of the server itself. `param` and `code` are of the public API."""
    return Refusal(status, error(dialect, text, status, param, code))


def error(dialect: Dialect, text: str, status: int, param: str = "", code: str = "") -> bytes:
    """The JSON body of an error answer: trtllm-serve puts it at the top level, the public API inside `error`."""
    if dialect == "trtllm":
        names = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError"}
        kind = names.get(status, "InternalServerError")
        return _json(
            {"object": "error", "message": text, "type": kind, "param": None, "code": status}
        )
    kind = {429: "rate_limit_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    code = code or {401: "invalid_api_key", 429: "rate_limit_exceeded"}.get(status, "")
    return _json(
        {"error": {"message": text, "type": kind, "param": param or None, "code": code or None}}
    )


def no_route(dialect: Dialect, status: int, allowed: str = "") -> Refusal:
    """404 for an unknown path, 405 for a wrong method. In trtllm-serve its web framework writes this response."""
    text = {404: "Not Found", 405: "Method Not Allowed"}[status]
    headers = (("allow", allowed),) if allowed else ()
    return Refusal(
        status,
        _json({"detail": text}) if dialect == "trtllm" else error(dialect, text, status),
        headers,
    )


# Answering ------------------------------------------------------------------------------------------------------------

DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
MARK = "\ue000"  # stands for the text of a token while the bytes around it are made


def chunk(event: bytes) -> bytes:
    """`event` as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def words(digest: bytes, start: int, stop: int) -> bytes:
    """The text of tokens `start` to `stop`: words of five bytes, a function of prompt, server seed and index only."""
    return b"".join([WORDS[number] for number in _numbers(digest, start, stop)])


def _numbers(digest: bytes, start: int, stop: int) -> list[int]:
    return [digest[i & 63] ^ (i >> 6 & 255) for i in range(start, stop)]


class Script:
    """All bytes of the response to one request.

    `head + WORD + tail` is a complete HTTP chunk of a plain token event. The slower methods are for events with more
    than one token, with usage, or with an ending.
    """

    done = DONE  # the last event of a stream

    def __init__(self, ask: ParsedRequest, dialect: Dialect, number: int, created: int) -> None:
        chat, trtllm = ask.api == "chat", dialect == "trtllm"
        self._ask, self.dialect, self._chat, self._trtllm = ask, dialect, chat, trtllm
        self._start = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": ask.model,
        }
        # The public API announces the usage that comes at the end; trtllm-serve writes the key in completions only.
        self._no_usage = {"usage": None} if (not chat if trtllm else ask.include_usage) else {}
        # The public API sends the finish reason of a chat in a separate event.
        self._separate_finish = chat and not trtllm
        self._call_start, self._call_end = (
            _json('{"input": "')[1:-1],
            _json('"}')[1:-1],
        )  # around the words, escaped
        before, after = _split(self._token(MARK, None))
        self._before, self._after = b"data: " + before, after + b"\n\n"
        self._finish = self._after
        if not self._separate_finish:
            self._finish = _split(self._token(MARK, ask.finish_reason))[1] + b"\n\n"
        size = len(self._before) + len(WORDS[0]) + len(self._after)
        self.head = b"%x\r\n%b" % (size, self._before)
        self.tail = self._after + b"\r\n"

    def _token(self, text: str, finish: str | None) -> dict[str, Any]:
        """A token event as a value, with keys, order and nulls as the dialect writes them."""
        choice: dict[str, Any]
        if self._ask.tool:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
        elif self._chat and self._trtllm:  # without nulls
            choice = {"index": 0, "delta": {"content": text, "reasoning_content": ""}}
            choice |= {"finish_reason": finish} if finish else {}
            choice["avg_decoded_tokens_per_iter"] = 1.0
        elif self._chat:
            choice = {
                "index": 0,
                "delta": {"content": text},
                "logprobs": None,
                "finish_reason": None,
            }
        elif self._trtllm:  # with every key
            choice = {
                "index": 0,
                "text": text,
                "token_ids": None,
                "logprobs": None,
                "finish_reason": finish,
            }
            if not self._ask.detokenize:
                choice["text"], choice["token_ids"] = "", [text]
            choice |= {"stop_reason": None, "avg_decoded_tokens_per_iter": 1.0}
        else:
            choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
        return {**self._start, "choices": [choice], **self._no_usage}

    def words(self, start: int, stop: int) -> bytes:
        """The content of tokens `start` to `stop`: text, or token ids if the request has `detokenize` false."""
        if self._ask.detokenize:
            return words(self._ask.digest, start, stop)
        return b",".join([b"%d" % number for number in _numbers(self._ask.digest, start, stop)])

    def event(self, start: int, stop: int, last: bool, filler: bytes = b"") -> bytes:
        """The SSE event (not yet a chunk) with tokens `start` to `stop`.

        `last` adds the finish reason, `filler` additional text.
        """
        words = self.words(start, stop)
        if self._ask.tool:
            words = (
                (self._call_start if start == 0 else b"")
                + words
                + (self._call_end if last else b"")
            )
        event = self._before + words + filler + (self._finish if last else self._after)
        if not self._ask.continuous_usage:
            return event
        value = b'"usage":' + _json(self._usage(stop)) + b"}\n\n"
        if event.endswith(b'"usage":null}\n\n'):
            return event.removesuffix(b'"usage":null}\n\n') + value
        return event.removesuffix(b"}\n\n") + b"," + value

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        """The usage object. It always contains `cached_tokens`, as in trtllm-serve."""
        input_tokens = self._ask.input_tokens
        return {
            "prompt_tokens": input_tokens,
            "total_tokens": input_tokens + output_tokens,
            "completion_tokens": output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._ask.cached_tokens},
        }

    def opening(self) -> list[bytes]:
        """Events before the first token event: the role, in chat.

        trtllm-serve creates it together with the first token and writes a space before its end.
        """
        if not self._chat:
            return []
        if self._trtllm:
            usage = {"usage": self._usage(0)} if self._ask.continuous_usage else {}
            value = {
                **self._start,
                "choices": [{"index": 0, "delta": self._opens({"role": "assistant"})}],
                **usage,
            }
            return [b"data: " + _json(value) + b" \n\n"]
        delta = self._opens({"role": "assistant", "content": "", "refusal": None})
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return [_event({**self._start, "choices": [choice], **self._no_usage})]

    def _opens(self, delta: dict[str, Any]) -> dict[str, Any]:
        """The first delta of an answer, with the id and the name of the tool if it calls one."""
        if not self._ask.tool:
            return delta
        call = {
            "index": 0,
            "id": self._call_id,
            "type": "function",
            "function": {"name": self._ask.tool},
        }
        return {**delta, "content": None, "tool_calls": [call]}

    @property
    def _call_id(self) -> str:
        return f"call_{self._ask.digest[:8].hex()}"

    def closing(
        self, output_tokens: int, finish: bool = True, metrics: dict[str, float] | None = None
    ) -> list[bytes]:
        """Events after the last token event, without `[DONE]`: a separate finish reason, usage (with `metrics`)."""
        events = []
        if self._separate_finish and finish:
            choice = {
                "index": 0,
                "delta": {},
                "logprobs": None,
                "finish_reason": self._ask.finish_reason,
            }
            events.append(_event({**self._start, "choices": [choice], **self._no_usage}))
        if self._ask.include_usage:
            timed = {"metrics": metrics} if metrics else {}
            events.append(
                _event({**self._start, "choices": [], "usage": self._usage(output_tokens), **timed})
            )
        return events

    def whole(
        self,
        counted: int,
        finish: bool = True,
        metrics: dict[str, float] | None = None,
        meta_info: dict[str, float] | None = None,
    ) -> bytes:
        """The JSON body of a response that is not streamed; its usage reports `counted` output tokens."""
        ask, words = self._ask, self.words(0, self._ask.output_tokens)
        text = words.decode() if ask.detokenize else ""
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            trtllm: dict[str, Any] = {"reasoning_content": "", "reasoning": None, "tool_calls": []}
            choice |= {"message": {"role": "assistant", "content": text}}
            choice["message"] |= trtllm if self._trtllm else {"refusal": None}
            if ask.tool:
                function = {"name": ask.tool, "arguments": _json({"input": text}).decode()}
                calls = [{"id": self._call_id, "type": "function", "function": function}]
                choice["message"] |= {"content": None, "tool_calls": calls}
        else:
            choice["text"] = text
            choice |= (
                {}
                if ask.detokenize
                else {"token_ids": [int(number) for number in words.split(b",")]}
            )
        choice |= {"logprobs": None, "finish_reason": ask.finish_reason if finish else None}
        if self._trtllm:
            choice |= {
                "stop_reason": None,
                "disaggregated_params": None,
                "avg_decoded_tokens_per_iter": 1.0,
            }
        choice |= (
            {"meta_info": {**meta_info, "cached_tokens": ask.cached_tokens}} if meta_info else {}
        )
        value = {**self._start, "choices": [choice], "usage": self._usage(counted)}
        value |= {"metrics": metrics} if metrics else {}
        return _json(value | {"object": "chat.completion"} if self._chat else value)

    def failure(self) -> tuple[list[bytes], bool]:
        """The events that end a stream when the engine fails, and whether the body still ends properly.

        trtllm-serve cuts a chat stream. After the error event of a completion it sends `[DONE]` twice.
        """
        if self._trtllm and self._chat:
            return [], False
        return [
            error_event("the simulated engine failed"),
            *([DONE, DONE] if self._trtllm else [DONE]),
        ], True


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


def error_event(text: str) -> bytes:
    """An error inside a stream, as most servers write it."""
    return _event({"error": {"message": text, "type": "server_error", "code": None, "param": None}})


def _split(value: dict[str, Any]) -> tuple[bytes, bytes]:
    """The JSON of `value` before and after MARK. For a list of token ids the quotes are removed too."""
    mark = MARK.encode()
    # search from the right: the model's name comes first and may contain anything
    before, _, after = (
        _json(value).replace(b'["' + mark + b'"]', b"[" + mark + b"]").rpartition(mark)
    )
    return before, after


# Other paths ----------------------------------------------------------------------------------------------------------


def models(dialect: Dialect, model: str, created: int, max_context: int) -> bytes:
    """`GET /v1/models`."""
    owner = "tensorrt_llm" if dialect == "trtllm" else "loadgen-sim"
    row = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": owner,
        "max_model_len": max_context,
    }
    return _json({"object": "list", "data": [row]})


def perf_headers(arrival_ns: int, first_ns: int, done_ns: int, queue_ns: int = 0) -> dict[str, str]:
    """The server's own timing of a request, as trtllm-serve returns it for `X-TRTLLM-return-metrics: 1`."""
    ms = [(at - arrival_ns) / 1e6 for at in (first_ns, done_ns)]
    return {
        "Server-Timing": f"server_queue;dur={queue_ns / 1e6:.6f}, server_ttft;dur={ms[0]:.6f},"
        f" server_e2e;dur={ms[1]:.6f}",
        "X-TRTLLM-Start-End-Time": f"server-start;ts={arrival_ns / 1e9:.6f}, server-end;ts={done_ns / 1e9:.6f}",
    }


def metrics(queue_ns: int, arrival_ns: int, first_ns: int, done_ns: int) -> dict[str, float]:
    """The same timing as vLLM writes it beside the usage; its time to first token begins after the queue."""
    return {
        "queue_time_ms": queue_ns / 1e6,
        "time_to_first_token_ms": (first_ns - arrival_ns - queue_ns) / 1e6,
        "generation_time_ms": (done_ns - first_ns) / 1e6,
    }


def meta_info(queue_ns: int, arrival_ns: int, first_ns: int, done_ns: int) -> dict[str, float]:
    """The same timing as SGLang writes it into a choice: durations and instants in seconds."""
    return {
        "request_sent_to_scheduler_ts": arrival_ns / 1e9,
        "queue_time": queue_ns / 1e9,
        "prefill_finished_ts": first_ns / 1e9,
        "decode_finished_ts": done_ns / 1e9,
        "e2e_latency": (done_ns - arrival_ns) / 1e9,
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
