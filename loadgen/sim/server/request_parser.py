"""Request bodies of the simulated server: validated as the dialect does, and converted to `ParsedRequest`. Pure.

The fields that trtllm-serve accepts are listed one by one, because it answers 400 to any other field. Fields without
effect on a simulated model are accepted and ignored. The tokenizer: one token per piece that begins at a space, plus
some for the template.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from loadgen.sim.server.dialect import Api, Dialect, ParsedRequest, malformed, refused, too_long, unknown_model

TEMPLATE_TOKENS = 8  # tokens that the simulated chat template adds to every prompt
NATURAL_TOKENS = 256  # typical output length if the request sets no limit
BLOCK_BYTES = 6  # prompt bytes per token when a prompt is cut into blocks: about one word
TOO_MANY_TOKENS = 1_000_000  # an output longer than this is refused, whatever the context length


class RequestRules(msgspec.Struct, frozen=True, kw_only=True):
    """The server's options that decide how requests are validated."""

    dialect: Dialect = "trtllm"
    model: str = "sim"
    max_seq_len: int = 131_072
    max_num_tokens: int = 0  # longest prompt without chunked prefill; 0: chunked, only max_seq_len limits it
    seed: int = 0
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


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields common to both APIs and both dialects."""

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
    """Fields that trtllm-serve adds to both APIs, from its protocol source; some have no effect here."""

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
            raise malformed(rules.dialect, "max_tokens and max_completion_tokens are one field: send one of them")
        limit = request.max_completion_tokens
    if (request.n or 1) != 1:
        raise refused(rules.dialect, "n > 1 is not simulated", "n")
    if limit is not None and limit < 1:
        raise refused(rules.dialect, f"max_tokens must be at least 1, got {limit}", "max_tokens")
    if rules.dialect == "openai":
        if options is not None and options.continuous_usage_stats is not None:
            raise refused("openai", "Unknown parameter: 'stream_options.continuous_usage_stats'.", "stream_options")
        if request.model != rules.model:
            raise unknown_model(request.model)
    input_tokens, digest, blocks = _prompt(request, api, rules)
    output_tokens, finish_reason = _length(request, limit, input_tokens, digest, rules)
    return ParsedRequest(
        api=api,
        model=request.model,
        stream=bool(request.stream),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        finish_reason=finish_reason,
        digest=digest,
        include_usage=bool(options is not None and options.include_usage),
        continuous_usage=bool(options is not None and options.include_usage and options.continuous_usage_stats),
        detokenize=getattr(request, "detokenize", True),
        blocks=blocks,
    )


def _blocks(content: bytes, tokens: int, rules: RequestRules) -> tuple[int, ...]:
    """One hash per full block of a prompt, covering the prompt up to the block's end.

    Blocks are cut by bytes (BLOCK_BYTES per token). This needs no splitting into tokens, and prompts with equal
    prefixes get equal blocks.
    """
    per_block = rules.tokens_per_block
    if not per_block:
        return ()
    size = per_block * BLOCK_BYTES
    prefix_hash, hashes = 0, []
    for at in range(0, min(len(content) // size, tokens // per_block) * size, size):
        prefix_hash = hash((prefix_hash, content[at : at + size]))
        hashes.append(prefix_hash)
    return tuple(hashes)


def _prompt(request: Any, api: Api, rules: RequestRules) -> tuple[int, bytes, tuple[int, ...]]:
    """Token count of the prompt, a 64-byte digest of its content, and its blocks for the prefix cache."""
    digest = hashlib.blake2b(rules.seed.to_bytes(8, "little"), digest_size=64)
    if api == "completions":
        prompt = request.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise refused(rules.dialect, "several prompts in one request are not simulated", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            content = prompt.encode("utf-8", "surrogatepass")
            digest.update(content)
            tokens = max(1, count_tokens(prompt))
            return tokens, digest.digest(), _blocks(content, tokens, rules)
        if not prompt or not all(isinstance(token, int) for token in prompt):
            raise malformed(rules.dialect, "prompt must be a text or a list of token ids")
        content = msgspec.msgpack.encode(prompt)
        digest.update(content)
        return len(prompt), digest.digest(), _blocks(content, len(prompt), rules)
    if not request.messages:
        raise malformed(rules.dialect, "messages must not be empty")
    tokens = TEMPLATE_TOKENS
    pieces = []
    for message in request.messages:
        content = message.content
        for text in (content,) if isinstance(content, str) else [part.text for part in content or ()]:
            if text:
                pieces.append(text.encode("utf-8", "surrogatepass"))
                tokens += count_tokens(text)
        pieces.append(message.role.encode("utf-8", "surrogatepass"))
    content = b"".join(pieces)
    digest.update(content)
    ids = getattr(request, "prompt_token_ids", None)
    tokens = len(ids) if ids else tokens
    return tokens, digest.digest(), _blocks(content, tokens, rules)


def _length(request: Any, limit: int | None, input_tokens: int, digest: bytes, rules: RequestRules) -> tuple[int, str]:
    """Output length and finish reason.

    Without `ignore_eos` an output ends by itself somewhere around the requested length. Raises Refusal if the prompt is
    too long, or if the output would be.
    """
    room = rules.max_seq_len - input_tokens
    if rules.dialect == "openai":
        if input_tokens + (limit or 1) > rules.max_seq_len:
            raise too_long(rules.max_seq_len, input_tokens, limit)
    elif room < 1 or 0 < rules.max_num_tokens < input_tokens:
        longest = rules.max_num_tokens or rules.max_seq_len
        raise refused(
            "trtllm",
            f"The sum of prompt length ({input_tokens}.0), query length (0) should not exceed"
            f" max_num_tokens ({longest})",
            "",
        )
    max_tokens = min(room if limit is None else limit, room)  # trtllm-serve clamps without an error
    if getattr(request, "ignore_eos", False):
        if max_tokens > TOO_MANY_TOKENS:
            raise refused(rules.dialect, f"an answer of {max_tokens} tokens is not simulated", "max_tokens")
        return max_tokens, "length"
    share = 0.6 + int.from_bytes(digest[:4], "little") / 2**32  # 0.6 to 1.6: about 40 % end before the limit
    natural = max(1, round(share * (limit or NATURAL_TOKENS)), getattr(request, "min_tokens", 0))
    return (natural, "stop") if natural < max_tokens else (min(max_tokens, TOO_MANY_TOKENS), "length")
