"""What a simulated server says: request bodies checked and read, answers as bytes, by dialect. Pure: no sockets.

Shapes and order are those of trtllm-serve (its protocol, post-processing and metrics sources), for `openai` those of
the public API. The simulated tokenizer: one token per piece that begins at a space, plus a constant for the template.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

Dialect = Literal["trtllm", "openai"]
Api = Literal["chat", "completions"]

TEMPLATE_TOKENS = 8  # what the simulated chat template adds to every prompt
NATURAL_TOKENS = 256  # length around which an answer ends when no limit was asked for
TOO_MANY_TOKENS = 1_000_000  # an answer longer than this is refused, whatever the context

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
"""256 pieces of five bytes, each one token of cl100k: a token event has the same size whatever it says."""


class Refusal(Exception):
    """An answer other than 200: `status`, `body` (JSON bytes), and headers beside it."""

    def __init__(self, status: int, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(status, body)
        self.status, self.body, self.headers = status, body, headers


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulated server was started with, as far as requests are judged by it."""

    dialect: Dialect = "trtllm"
    model: str = "sim"
    max_seq_len: int = 131_072
    max_num_tokens: int = 0  # longest prompt, as without chunked prefill; 0: chunked, only max_seq_len bounds it
    version: str = "1.2.0"
    seed: int = 0


class Ask(msgspec.Struct, kw_only=True, gc=False):
    """One request, read and checked."""

    api: Api
    model: str
    stream: bool
    input_tokens: int
    output_tokens: int
    finish_reason: str
    digest: bytes  # 64 bytes that decide the text: equal prompts get equal texts
    include_usage: bool
    continuous_usage: bool
    detokenize: bool


# Reading --------------------------------------------------------------------------------------------------------------


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class _OpenAIStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = False
    include_obfuscation: bool | None = True
    continuous_usage_stats: bool | None = None  # refused below: it is not in the public API


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that both requests of both dialects know."""

    model: str
    max_tokens: int | None = None
    stream: bool | None = False
    n: int | None = 1
    best_of: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None


class _Trtllm(_Sampling, kw_only=True, forbid_unknown_fields=True):
    """What trtllm-serve adds to both, from its protocol's source; those without effect here are let pass."""

    stream_options: _StreamOptions | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    add_special_tokens: bool = True
    conversation_params: Any = None
    disaggregated_params: Any = None
    early_stopping: Any = None
    include_stop_str_in_output: bool = False
    length_penalty: float | None = None
    lora_request: Any = None
    min_p: float = 0.0
    priority: float | None = None
    prompt_ignore_length: int | None = 0
    repetition_penalty: float = 1.0
    response_format: Any = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stop_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    top_k: int = 0
    top_p_min: float = 0.0
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool = False


class _TrtllmChat(_Trtllm, kw_only=True, forbid_unknown_fields=True):
    messages: list[_Message]
    prompt_token_ids: list[int] | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    agent_hierarchy: Any = None
    cache_salt: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: Any = None
    documents: Any = None
    echo: bool = False
    injected_chat_template_kwargs: Any = None
    logprobs: bool | None = False
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    parallel_tool_calls: bool | None = None
    prompt_token_ids_b64: str | None = None
    reasoning_effort: str | None = None
    thinking: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: int | None = 0


class _TrtllmCompletion(_Trtllm, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[int | str | list[int]]
    detokenize: bool = True
    echo: bool | None = False
    logprobs: int | None = None
    return_context_logits: bool = False
    suffix: str | None = None


class _OpenAIChat(_Sampling, kw_only=True, forbid_unknown_fields=True):
    messages: list[_Message]
    stream_options: _OpenAIStreamOptions | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    metadata: Any = None
    modalities: Any = None
    parallel_tool_calls: bool | None = None
    prediction: Any = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None
    response_format: Any = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: int | None = None
    verbosity: str | None = None


class _OpenAICompletion(_Sampling, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[int | str | list[int]]
    stream_options: _OpenAIStreamOptions | None = None
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None


_READERS: dict[tuple[str, str], Any] = {
    ("trtllm", "chat"): msgspec.json.Decoder(_TrtllmChat).decode,
    ("trtllm", "completions"): msgspec.json.Decoder(_TrtllmCompletion).decode,
    ("openai", "chat"): msgspec.json.Decoder(_OpenAIChat).decode,
    ("openai", "completions"): msgspec.json.Decoder(_OpenAICompletion).decode,
}


def count_tokens(text: str) -> int:
    """Tokens of `text` in the simulated model's vocabulary: pieces that begin at a space, so `len(text.split())` of
    text with single spaces; counted without splitting, because 10,000 pieces would hold the loop for 0.3 ms."""
    return text.count(" ") + (0 if text[:1] in ("", " ") else 1)


def read(body: bytes, api: Api, rules: Rules) -> Ask:
    """The request in `body`; raises Refusal with the dialect's own error for everything that this server refuses."""
    try:
        asked = _READERS[rules.dialect, api](body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise malformed(rules.dialect, str(wrong)) from None
    options = asked.stream_options
    if options is not None and not asked.stream:
        raise malformed(rules.dialect, "stream_options can only be set if stream is true")
    limit = asked.max_tokens
    if api == "chat" and asked.max_completion_tokens is not None:
        if limit is not None:
            raise malformed(rules.dialect, "max_tokens and max_completion_tokens are one field: send one of them")
        limit = asked.max_completion_tokens
    if (asked.n or 1) != 1:
        raise refused(rules.dialect, "n > 1 is not simulated", "n")
    if limit is not None and limit < 1:
        raise refused(rules.dialect, f"max_tokens must be at least 1, got {limit}", "max_tokens")
    if rules.dialect == "openai":
        if options is not None and options.continuous_usage_stats is not None:
            raise refused("openai", "Unknown parameter: 'stream_options.continuous_usage_stats'.", "stream_options")
        if asked.model != rules.model:
            raise _unknown_model(asked.model)
    input_tokens, digest = _prompt(asked, api, rules)
    output_tokens, finish_reason = _length(asked, limit, input_tokens, digest, rules)
    return Ask(
        api=api,
        model=asked.model,
        stream=bool(asked.stream),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        finish_reason=finish_reason,
        digest=digest,
        include_usage=bool(options is not None and options.include_usage),
        continuous_usage=bool(options is not None and options.include_usage and options.continuous_usage_stats),
        detokenize=getattr(asked, "detokenize", True),
    )


def _prompt(asked: Any, api: Api, rules: Rules) -> tuple[int, bytes]:
    """Token count of the prompt and 64 bytes that stand for its content."""
    hash_ = hashlib.blake2b(rules.seed.to_bytes(8, "little"), digest_size=64)
    if api == "completions":
        prompt = asked.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise refused(rules.dialect, "several prompts in one request are not simulated", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            hash_.update(prompt.encode("utf-8", "surrogatepass"))
            return max(1, count_tokens(prompt)), hash_.digest()
        if not prompt or not all(isinstance(token, int) for token in prompt):
            raise malformed(rules.dialect, "prompt must be a text or a list of token ids")
        hash_.update(msgspec.msgpack.encode(prompt))
        return len(prompt), hash_.digest()
    if not asked.messages:
        raise malformed(rules.dialect, "messages must not be empty")
    tokens = TEMPLATE_TOKENS
    for message in asked.messages:
        content = message.content
        for text in (content,) if isinstance(content, str) else [part.text for part in content or ()]:
            if text:
                hash_.update(text.encode("utf-8", "surrogatepass"))
                tokens += count_tokens(text)
        hash_.update(message.role.encode("utf-8", "surrogatepass"))
    ids = getattr(asked, "prompt_token_ids", None)
    return len(ids) if ids else tokens, hash_.digest()


def _length(asked: Any, limit: int | None, input_tokens: int, digest: bytes, rules: Rules) -> tuple[int, str]:
    """Output length and finish reason. Unforced answers end by themselves somewhere around the length asked for."""
    room = rules.max_seq_len - input_tokens
    if rules.dialect == "openai":
        if input_tokens + (limit or 1) > rules.max_seq_len:
            raise _too_long(rules.max_seq_len, input_tokens, limit)
    elif room < 1 or 0 < rules.max_num_tokens < input_tokens:
        longest = rules.max_num_tokens or rules.max_seq_len
        raise refused(
            "trtllm",
            f"The sum of prompt length ({input_tokens}.0), query length (0) should not exceed"
            f" max_num_tokens ({longest})",
            "",
        )
    most = min(room if limit is None else limit, room)  # trtllm-serve clamps in silence
    if getattr(asked, "ignore_eos", False):
        if most > TOO_MANY_TOKENS:
            raise refused(rules.dialect, f"an answer of {most} tokens is not simulated", "max_tokens")
        return most, "length"
    share = 0.6 + int.from_bytes(digest[:4], "little") / 2**32  # 0.6 to 1.6: some 40 % end before the limit
    natural = max(1, round(share * (limit or NATURAL_TOKENS)), getattr(asked, "min_tokens", 0))
    return (natural, "stop") if natural < most else (min(most, TOO_MANY_TOKENS), "length")


# Errors ---------------------------------------------------------------------------------------------------------------


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def malformed(dialect: Dialect, text: str) -> Refusal:
    """400 for a body that is not JSON or not the schema's: trtllm-serve answers with a bare string."""
    if dialect == "trtllm":
        return Refusal(400, _json({"error": text}))
    return refused(dialect, text, "")


def refused(dialect: Dialect, text: str, param: str, status: int = 400) -> Refusal:
    """An error of the server proper; trtllm-serve has it at the top level, the public API inside `error`."""
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
    """404 for a path, 405 for a method: in trtllm-serve its web framework answers, not the server."""
    text = {404: "Not Found", 405: "Method Not Allowed"}[status]
    headers = (("allow", allowed),) if allowed else ()
    return Refusal(status, _json({"detail": text}) if dialect == "trtllm" else error(dialect, text, status), headers)


def wrong_key() -> Refusal:
    """401 of the public API."""
    return refused(
        "openai", "Incorrect API key provided. You can obtain a key from whoever runs this endpoint.", "", 401
    )


def _unknown_model(model: str) -> Refusal:
    text = f"The model `{model}` does not exist or you do not have access to it."
    value = {"message": text, "type": "invalid_request_error", "param": None, "code": "model_not_found"}
    return Refusal(404, _json({"error": value}))


def _too_long(context: int, input_tokens: int, limit: int | None) -> Refusal:
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


def usage(input_tokens: int, output_tokens: int) -> dict[str, Any]:
    """The usage object; `cached_tokens` is always there, as in trtllm-serve. This server has no prefix cache."""
    return {
        "prompt_tokens": input_tokens,
        "total_tokens": input_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


class Script:
    """Everything the answer to one request says, as bytes. `head + WORD + tail` is one finished HTTP chunk of a plain
    token event; the longer ways are for events that carry more than one token, usage or an ending."""

    __slots__ = (
        "_after",
        "_ask",
        "_before",
        "_cut",
        "_dialect",
        "_finish",
        "_id",
        "_object",
        "created",
        "head",
        "tail",
        "trtllm",
    )

    def __init__(self, ask: Ask, dialect: Dialect, number: int, created: int) -> None:
        self._ask, self._dialect, self.created, self.trtllm = ask, dialect, created, dialect == "trtllm"
        chat = ask.api == "chat"
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{number}"
        self._object = "chat.completion.chunk" if chat else "text_completion"
        self._cut = dialect == "openai" and chat  # the public API sends the finish reason in an event of its own
        mark = "\ue000"
        before, after = _split(self._token(mark, None), mark)
        _, finish = _split(self._token(mark, ask.finish_reason), mark)
        self._before, self._after = b"data: " + before, after + b"\n\n"
        self._finish = self._after if self._cut else finish + b"\n\n"
        size = len(self._before) + len(WORDS[0]) + len(self._after)
        self.head = b"%x\r\n%b" % (size, self._before)
        self.tail = self._after + b"\r\n"

    def _token(self, text: str, finish: str | None) -> dict[str, Any]:
        """A token event as a value: keys, order and nulls as the dialect writes them."""
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
        """The text of token `index`, five bytes: a function of prompt, server seed and index alone."""
        return WORDS[self._ask.digest[index & 63] ^ (index >> 6 & 255)]

    def words(self, start: int, stop: int) -> bytes:
        """What stands in the place of the text for tokens `start` to `stop`: text, or numbers of tokens."""
        digest = self._ask.digest
        numbers = [digest[i & 63] ^ (i >> 6 & 255) for i in range(start, stop)]
        if self._ask.detokenize:
            return b"".join([WORDS[number] for number in numbers])
        return b",".join([b"%d" % number for number in numbers])

    def event(self, start: int, stop: int, last: bool, filler: bytes = b"") -> bytes:
        """The SSE event (not yet a chunk) that carries tokens `start` to `stop`; `last` adds the finish reason,
        `filler` more text."""
        event = self._before + self.words(start, stop) + filler + (self._finish if last else self._after)
        if self._ask.continuous_usage:
            event = self._counted(event, stop)
        return event

    def _counted(self, event: bytes, tokens: int) -> bytes:
        """`event` with cumulative usage in it."""
        value = b'"usage":' + _json(usage(self._ask.input_tokens, tokens))
        if event.endswith(b'"usage":null}\n\n'):
            return event[: -len(b'"usage":null}\n\n')] + value + b"}\n\n"
        return event[: -len(b"}\n\n")] + b"," + value + b"}\n\n"

    def opening(self) -> list[bytes]:
        """Events before the first token event: the role, in chat. trtllm-serve makes it together with the first token
        and writes a blank before its end."""
        ask = self._ask
        if ask.api != "chat":
            return []
        value: dict[str, Any] = {"id": self._id, "object": self._object, "created": self.created, "model": ask.model}
        if self._dialect == "trtllm":
            value["choices"] = [{"index": 0, "delta": {"role": "assistant"}}]
            if ask.continuous_usage:
                value["usage"] = usage(ask.input_tokens, 0)
            return [b"data: " + _json(value) + b" \n\n"]
        delta = {"role": "assistant", "content": "", "refusal": None}
        value["choices"] = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]
        if ask.include_usage:
            value["usage"] = None
        return [b"data: " + _json(value) + b"\n\n"]

    def closing(self, output_tokens: int, finish: bool = True) -> list[bytes]:
        """Events after the last token event, `[DONE]` left out: a separate finish, usage."""
        ask, events = self._ask, []
        value: dict[str, Any] = {"id": self._id, "object": self._object, "created": self.created, "model": ask.model}
        if self._cut and finish:
            choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": ask.finish_reason}
            ending = value | {"choices": [choice]}
            events.append(b"data: " + _json(ending | {"usage": None} if ask.include_usage else ending) + b"\n\n")
        if ask.include_usage:
            value |= {"choices": [], "usage": usage(ask.input_tokens, output_tokens)}
            events.append(b"data: " + _json(value) + b"\n\n")
        return events

    def whole(self, counted: int, finish: bool = True) -> bytes:
        """The JSON body of an answer that is not streamed; its usage says `counted`."""
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
            "usage": usage(ask.input_tokens, counted),
        }
        return _json(value)

    def error(self) -> bytes:
        """The JSON body of the 500 when the engine fails before a whole answer is there."""
        return error(self._dialect, "the simulated engine failed", 500)

    def failure(self) -> tuple[list[bytes], bool]:
        """How a stream ends when the engine fails in it, and whether the body still ends properly: trtllm-serve cuts
        a chat stream, and says `[DONE]` twice after the error event of a completion."""
        if self._dialect == "trtllm" and self._ask.api == "chat":
            return [], False
        return [error_event("the simulated engine failed"), DONE, *([DONE] if self._dialect == "trtllm" else [])], True


def error_event(text: str) -> bytes:
    """An error inside a stream, as most servers write it."""
    value = {"error": {"message": text, "type": "server_error", "code": None, "param": None}}
    return b"data: " + _json(value) + b"\n\n"


def _split(value: dict[str, Any], mark: str) -> tuple[bytes, bytes]:
    """The JSON of `value` before and after `mark`; for a list of token ids the quotes go too."""
    whole = _json(value)
    quoted = b'["' + mark.encode() + b'"]'
    # from the right: a model's name may hold anything, and stands before
    before, _, after = whole.replace(quoted, b"[" + mark.encode() + b"]").rpartition(mark.encode())
    return before, after


# Other paths ----------------------------------------------------------------------------------------------------------


def models(rules: Rules, created: int) -> bytes:
    """`GET /v1/models`."""
    owner = "tensorrt_llm" if rules.dialect == "trtllm" else "loadgen-sim"
    return _json(
        {"object": "list", "data": [{"id": rules.model, "object": "model", "created": created, "owned_by": owner}]}
    )


def perf_headers(arrival_ns: int, first_ns: int, done_ns: int, queue_ns: int = 0) -> dict[str, str]:
    """The server's own timing of a request, as trtllm-serve gives it when asked by `X-TRTLLM-return-metrics: 1`."""
    ms = [(at - arrival_ns) / 1e6 for at in (first_ns, done_ns)]
    return {
        "Server-Timing": f"server_queue;dur={queue_ns / 1e6:.6f}, server_ttft;dur={ms[0]:.6f},"
        f" server_e2e;dur={ms[1]:.6f}",
        "X-TRTLLM-Start-End-Time": f"server-start;ts={arrival_ns / 1e9:.6f}, server-end;ts={done_ns / 1e9:.6f}",
    }


def perf_event(headers: dict[str, str]) -> bytes:
    """The same in a stream: a named event after `[DONE]`."""
    return b"event: trtllm.perf_metrics\ndata: " + _json(headers) + b"\n\n"


def iteration_stats(iteration: int, active: int, queued: int, completed: int) -> dict[str, Any]:
    """One row of the JSON that `GET /metrics` drains; what is not modelled is left out."""
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
