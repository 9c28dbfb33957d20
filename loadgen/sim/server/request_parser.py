"""Request bodies of the simulated server: validated as the dialect does, and converted to `ParsedRequest`. Pure.

The fields that a dialect accepts are listed one by one, because it answers 400 to any other field. The tokenizer: one
token per piece that begins at a space, plus some for the template.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from loadgen.sim.server.wire_format import Api, Dialect, ParsedRequest, malformed, refused

TEMPLATE_TOKENS = 8  # tokens that the simulated chat template adds to every prompt
NATURAL_TOKENS = 256  # typical output length if the request sets no limit
SPACE = ord(" ")
TOO_MANY_TOKENS = 1_000_000  # an output longer than this is refused, whatever the context length


class RequestRules(msgspec.Struct, frozen=True, kw_only=True):
    """The server's options that decide how requests are validated."""

    dialect: Dialect = "trtllm"
    model: str = "sim"
    max_seq_len: int = 131_072
    max_num_tokens: int = (
        0  # longest prompt without chunked prefill; 0: chunked, only max_seq_len limits it
    )
    seed: int = 0
    worse: float = 0.0  # share of the words of a text that differ from those of a server without it
    tokens_per_block: int = 0  # block size of the prefix cache; 0: no prefix cache


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


class _Function(msgspec.Struct):
    name: str
    description: str = ""
    arguments: str = ""


class _Call(msgspec.Struct):
    """A call of a tool in a message, or the definition of a tool."""

    function: _Function


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None


class _Asked(msgspec.Struct, kw_only=True):
    """The fields with an effect here that both dialects and both APIs have."""

    model: str
    max_tokens: int | None = None
    stream: bool | None = False
    n: int | None = 1


class _Trtllm(_Asked, kw_only=True):
    stream_options: _StreamOptions | None = None
    ignore_eos: bool = False
    min_tokens: int = 0


class _TrtllmChat(_Trtllm, kw_only=True):
    messages: list[_Message]
    tools: list[_Call] | None = None
    tool_choice: str | _Call | None = None
    prompt_token_ids: list[int] | None = None
    max_completion_tokens: int | None = None


class _TrtllmCompletion(_Trtllm, kw_only=True):
    prompt: str | list[int | str | list[int]]
    detokenize: bool = True


class _OpenAIChat(_Asked, kw_only=True):
    messages: list[_Message]
    tools: list[_Call] | None = None
    tool_choice: str | _Call | None = None
    stream_options: _OpenAIStreamOptions | None = None
    max_completion_tokens: int | None = None
    include_metrics: bool = False  # vLLM's field, and its answer: the public API has neither
    return_meta_info: bool = False  # SGLang's, of whole answers


class _OpenAICompletion(_Asked, kw_only=True):
    prompt: str | list[int | str | list[int]]
    stream_options: _OpenAIStreamOptions | None = None
    include_metrics: bool = False  # as in chat
    return_meta_info: bool = False


_IGNORED: dict[str, dict[Any, str]] = {
    "": {
        float | None: "frequency_penalty presence_penalty temperature top_p",
        int | None: "best_of seed",
        dict[str, float] | None: "logit_bias",
        str | list[str] | None: "stop",
        str | None: "user",
    },
    "trtllm": {
        bool: "add_special_tokens include_stop_str_in_output skip_special_tokens spaces_between_special_tokens "
        "use_beam_search",
        float: "min_p repetition_penalty top_p_min",
        float | None: "length_penalty priority",
        int: "top_k",
        int | None: "prompt_ignore_length thinking_token_budget truncate_prompt_tokens",
        list[int] | None: "stop_token_ids",
        Any: "conversation_params disaggregated_params early_stopping lora_request response_format",
    },
    "trtllm chat": {
        bool: "add_generation_prompt echo",
        bool | None: "logprobs parallel_tool_calls",
        int | None: "top_logprobs",
        str | None: "cache_salt chat_template prompt_token_ids_b64 reasoning_effort",
        Any: "agent_hierarchy chat_template_kwargs documents injected_chat_template_kwargs media_io_kwargs "
        "mm_processor_kwargs thinking",
    },
    "trtllm completions": {
        bool: "return_context_logits",
        bool | None: "echo",
        int | None: "logprobs",
        str | None: "suffix",
    },
    "openai chat": {
        bool | None: "logprobs parallel_tool_calls store",
        int | None: "top_logprobs",
        str | None: "prompt_cache_key reasoning_effort safety_identifier service_tier verbosity",
        Any: "metadata modalities prediction response_format",
    },
    "openai completions": {bool | None: "echo", int | None: "logprobs", str | None: "suffix"},
}
"""The fields that are accepted and have no effect here, by dialect and API, and by type."""


def reader(asked: type[msgspec.Struct], *ignored: Mapping[Any, str]) -> Any:
    """The decoder of the bodies of one API: it accepts the fields of `asked` and the ignored ones, by their types, and
    no other.
    """
    fields = [
        (name, kind, None)
        for kinds in ignored
        for kind, names in kinds.items()
        for name in names.split()
    ]
    accepted = msgspec.defstruct(
        "Body", fields, bases=(asked,), kw_only=True, forbid_unknown_fields=True
    )
    return msgspec.json.Decoder(accepted).decode


def _reader(dialect: Dialect, api: Api, asked: type[_Asked]) -> Any:
    return reader(
        asked,
        *(kinds for key, kinds in _IGNORED.items() if key in ("", dialect, f"{dialect} {api}")),
    )


_READERS = {
    ("trtllm", "chat"): _reader("trtllm", "chat", _TrtllmChat),
    ("trtllm", "completions"): _reader("trtllm", "completions", _TrtllmCompletion),
    ("openai", "chat"): _reader("openai", "chat", _OpenAIChat),
    ("openai", "completions"): _reader("openai", "completions", _OpenAICompletion),
}


def check_model(model: str, rules: RequestRules) -> None:
    """Raises Refusal for another model than the one that is served: trtllm-serve takes any name."""
    if rules.dialect == "openai" and model != rules.model:
        text = f"The model `{model}` does not exist or you do not have access to it."
        raise refused("openai", text, status=404, code="model_not_found")


def count_tokens(text: str) -> int:
    """Tokens of `text` in the simulated model's vocabulary: pieces that begin at a space.

    Equals `len(text.split())` if all spaces are single. Counted without splitting, because 10,000 pieces would block
    the loop for 0.3 ms.
    """
    return text.count(" ") + (0 if text[:1] in ("", " ") else 1)


def parse_request(body: bytes, api: Api, rules: RequestRules) -> ParsedRequest:
    """The request in `body`.

    Raises Refusal with the dialect's own error for everything that this server refuses.
    """
    try:
        request = _READERS[rules.dialect, api](body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise malformed(rules.dialect, str(wrong)) from None
    options = request.stream_options
    if options is not None and not request.stream:
        raise malformed(rules.dialect, "stream_options can only be set if stream is true")
    limit = request.max_tokens
    if api == "chat" and request.max_completion_tokens is not None:
        if limit is not None:
            raise malformed(
                rules.dialect,
                "max_tokens and max_completion_tokens are one field: send one of them",
            )
        limit = request.max_completion_tokens
    if (request.n or 1) != 1:
        raise refused(rules.dialect, "n > 1 is not simulated", "n")
    if limit is not None and limit < 1:
        raise refused(rules.dialect, f"max_tokens must be at least 1, got {limit}", "max_tokens")
    if rules.dialect == "openai":
        if options is not None and options.continuous_usage_stats is not None:
            raise refused(
                "openai",
                "Unknown parameter: 'stream_options.continuous_usage_stats'.",
                "stream_options",
            )
        if request.return_meta_info and request.stream:
            raise refused(
                "openai", "return_meta_info is not supported with streaming.", "return_meta_info"
            )
        check_model(request.model, rules)
    input_tokens, content = _prompt(request, api, rules.dialect)
    hasher = hashlib.blake2b(rules.seed.to_bytes(8, "little"), digest_size=64)
    hasher.update(content)
    digest = hasher.digest()
    output_tokens, finish_reason = length_of(request, limit, input_tokens, digest, rules)
    tool = _called_tool(request) if api == "chat" else ""
    if rules.worse:
        digest = _other_words(digest, rules.worse)
    include_usage = bool(options is not None and options.include_usage)
    return ParsedRequest(
        api=api,
        model=request.model,
        stream=bool(request.stream),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        finish_reason="tool_calls" if tool else finish_reason,
        digest=digest,
        include_usage=include_usage,
        continuous_usage=bool(include_usage and options.continuous_usage_stats),
        detokenize=getattr(request, "detokenize", True),
        include_metrics=getattr(request, "include_metrics", False),
        return_meta_info=getattr(request, "return_meta_info", False),
        blocks=blocks_of(content, input_tokens, rules.tokens_per_block),
        tool=tool,
    )


def _called_tool(request: Any) -> str:
    """The tool that the answer has to call, because the request says so; "" where the answer is text."""
    choice = request.tool_choice
    if isinstance(choice, _Call):
        return choice.function.name
    return request.tools[0].function.name if choice == "required" and request.tools else ""


def blocks_of(content: bytes, tokens: int, per_block: int) -> tuple[int, ...]:
    """One hash per full block of a prompt, covering the prompt up to the block's end. None with `per_block` 0.

    Tokens begin at spaces, which are found without splitting the prompt.
    """
    if not per_block:
        return ()
    import numpy as np  # half of what starting a server costs; one without a prefix cache needs none of it

    spaces = np.flatnonzero(np.frombuffer(content, np.uint8) == SPACE)
    prefix_hash, start, hashes = 0, 0, []
    for end in spaces[per_block - 1 :: per_block][: tokens // per_block].tolist():
        prefix_hash = hash((prefix_hash, content[start:end]))
        hashes.append(prefix_hash)
        start = end
    return tuple(hashes)


def _prompt(request: Any, api: Api, dialect: Dialect) -> tuple[int, bytes]:
    """Token count of the prompt, and its content as bytes."""
    if api == "completions":
        prompt = request.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise refused(dialect, "several prompts in one request are not simulated", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return max(1, count_tokens(prompt)), prompt.encode("utf-8", "surrogatepass")
        if not prompt or not all(isinstance(token, int) for token in prompt):
            raise malformed(dialect, "prompt must be a text or a list of token ids")
        try:
            return len(prompt), msgspec.msgpack.encode(prompt)
        except OverflowError:
            raise malformed(dialect, "prompt has a token id of more than 64 bits") from None
    if not request.messages:
        raise malformed(dialect, "messages must not be empty")
    tokens, pieces = TEMPLATE_TOKENS, []

    def add(text: str | None) -> None:
        nonlocal tokens
        if text:
            pieces.append(text)
            tokens += count_tokens(text)

    for tool in request.tools or ():
        add(tool.function.description)
    for message in request.messages:
        content = message.content
        for text in (
            (content,) if isinstance(content, str) else [part.text for part in content or ()]
        ):
            add(text)
        for call in message.tool_calls or ():
            add(call.function.arguments)
        pieces.append(message.role)
    ids = getattr(request, "prompt_token_ids", None)
    return len(ids) if ids else tokens, "".join(pieces).encode("utf-8", "surrogatepass")


def _other_words(digest: bytes, share: float) -> bytes:
    """The digest of the same text with this share of its words exchanged; the text decides which."""
    draws = hashlib.blake2b(digest, digest_size=64).digest()
    return bytes(
        word ^ 0x55 if draw < share * 256 else word
        for word, draw in zip(digest, draws, strict=True)
    )


def length_of(
    request: Any, limit: int | None, input_tokens: int, digest: bytes, rules: RequestRules
) -> tuple[int, str]:
    """Output length and finish reason.

    Without `ignore_eos` an output ends by itself somewhere around the requested length. Raises Refusal if the prompt is
    too long, or if the output would be.
    """
    room = rules.max_seq_len - input_tokens
    if rules.dialect == "openai":
        if input_tokens + (limit or 1) > rules.max_seq_len:
            text = (
                f"This model's maximum context length is {rules.max_seq_len} tokens. However, you requested "
                f"{input_tokens + (limit or 0)} tokens ({input_tokens} in the messages, {limit or 0} in the "
                "completion)."
            )
            raise refused("openai", text, "messages", code="context_length_exceeded")
    elif room < 1 or 0 < rules.max_num_tokens < input_tokens:
        longest = rules.max_num_tokens or rules.max_seq_len
        text = f"The sum of prompt length ({input_tokens}.0), query length (0) should not exceed max_num_tokens"
        raise refused("trtllm", f"{text} ({longest})")
    max_tokens = min(room if limit is None else limit, room)  # trtllm-serve clamps without an error
    if getattr(request, "ignore_eos", False):
        if max_tokens > TOO_MANY_TOKENS:
            raise refused(
                rules.dialect, f"an answer of {max_tokens} tokens is not simulated", "max_tokens"
            )
        return max_tokens, "length"
    share = (
        0.6 + int.from_bytes(digest[:4], "little") / 2**32
    )  # 0.6 to 1.6: about 40 % end before the limit
    natural = max(1, round(share * (limit or NATURAL_TOKENS)), getattr(request, "min_tokens", 0))
    return (
        (natural, "stop") if natural < max_tokens else (min(max_tokens, TOO_MANY_TOKENS), "length")
    )
