"""Parse and check request bodies of the chat and completions APIs of the simulated server.

The fields that an API flavor accepts are listed one by one, because it answers 400 to any other
field. The tokenizer counts one token per piece that begins at a space, plus some for the template.
The other APIs use the common checks of this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from loadgen.sim.engine.latency_model import draw_uniform
from loadgen.sim.server.error_responses import malformed_body, refusal
from loadgen.sim.server.wire_format import ApiFlavor, ParsedRequest

TEMPLATE_TOKENS = 8  # tokens that the simulated chat template adds to every prompt
NATURAL_TOKENS = 256  # typical output length if the request sets no limit
MAX_OUTPUT_TOKENS = 1_000_000  # a longer output is refused, whatever the context length
SPACE = ord(" ")
# An output that ends by itself has 0.6 to 1.6 times the requested tokens (evenly distributed), so
# about 40 % of them end before the limit.
MIN_NATURAL_FRACTION = 0.6
# XORed to the index of a word, which chooses a different one of the 256 words. Any number from 1 to
# 255 would do.
CHANGED_WORD_MASK = 0x55
BYTE_VALUES = 256
CORRUPT_WORD_STREAM = 8  # of random numbers; fault_injection.py and simulated_answers.py use others

CompletionsApi = Literal["chat", "completions"]
BodyDecoder = Callable[[bytes], Any]


class RequestRules(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the server that decide which requests are accepted."""

    flavor: ApiFlavor = "trtllm"
    model: str = "sim"
    max_seq_len: int = 131_072
    # Longest prompt without chunked prefill; 0: prefill is chunked, and only max_seq_len limits it.
    max_num_tokens: int = 0
    seed: int = 0
    worse: float = 0.0  # share of the words of a text that differ from those of a server without it
    tokens_per_block: int = 0  # block size of the prefix cache; 0: no prefix cache


# The types of the request bodies. Their fields and default values are those of trtllm-serve's
# protocol and of OpenAI's API reference.


class _TrtllmStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class _OpenAIStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = False
    include_obfuscation: bool | None = True
    continuous_usage_stats: bool | None = None  # not in the public API: refused with its own error


class _ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class _Function(msgspec.Struct):
    name: str
    description: str = ""
    arguments: str = ""


class _Tool(msgspec.Struct):
    """A tool call in a message, or the definition of a tool."""

    function: _Function


class _Message(msgspec.Struct):
    role: str
    content: str | list[_ContentPart] | None = None
    tool_calls: list[_Tool] | None = None

    def texts(self) -> list[str]:
        """Return the texts that the model reads, without empty ones."""
        if isinstance(self.content, str):
            texts: list[str | None] = [self.content]
        else:
            texts = [part.text for part in self.content or ()]
        texts += [call.function.arguments for call in self.tool_calls or ()]
        return [text for text in texts if text]


class _CommonBody(msgspec.Struct, kw_only=True):
    """The fields with an effect here that both flavors and both APIs have."""

    model: str
    max_tokens: int | None = None
    stream: bool | None = False
    n: int | None = 1


class _TrtllmBody(_CommonBody, kw_only=True):
    stream_options: _TrtllmStreamOptions | None = None
    ignore_eos: bool = False
    min_tokens: int = 0


class _TrtllmChatBody(_TrtllmBody, kw_only=True):
    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: str | _Tool | None = None
    prompt_token_ids: list[int] | None = None
    max_completion_tokens: int | None = None


class _TrtllmCompletionBody(_TrtllmBody, kw_only=True):
    prompt: str | list[int | str | list[int]]
    detokenize: bool = True


class _OpenAIBody(_CommonBody, kw_only=True):
    stream_options: _OpenAIStreamOptions | None = None
    # These two are fields of vLLM and SGLang. The public API has neither.
    include_metrics: bool = False
    return_meta_info: bool = False


class _OpenAIChatBody(_OpenAIBody, kw_only=True):
    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: str | _Tool | None = None
    max_completion_tokens: int | None = None


class _OpenAICompletionBody(_OpenAIBody, kw_only=True):
    prompt: str | list[int | str | list[int]]


IgnoredFields = Mapping[Any, str]
"""Names of fields that are accepted without an effect, separated by spaces, by their type."""

_IGNORED_BY_ALL: IgnoredFields = {
    float | None: "frequency_penalty presence_penalty temperature top_p",
    int | None: "best_of seed",
    dict[str, float] | None: "logit_bias",
    str | list[str] | None: "stop",
    str | None: "user",
}
_IGNORED_BY_TRTLLM: IgnoredFields = {
    bool: "add_special_tokens include_stop_str_in_output skip_special_tokens "
    "spaces_between_special_tokens use_beam_search",
    float: "min_p repetition_penalty top_p_min",
    float | None: "length_penalty priority",
    int: "top_k",
    int | None: "prompt_ignore_length thinking_token_budget truncate_prompt_tokens",
    list[int] | None: "stop_token_ids",
    Any: "conversation_params disaggregated_params early_stopping lora_request response_format",
}
_IGNORED_BY_TRTLLM_CHAT: IgnoredFields = {
    bool: "add_generation_prompt echo",
    bool | None: "logprobs parallel_tool_calls",
    int | None: "top_logprobs",
    str | None: "cache_salt chat_template prompt_token_ids_b64 reasoning_effort",
    Any: "agent_hierarchy chat_template_kwargs documents injected_chat_template_kwargs "
    "media_io_kwargs mm_processor_kwargs thinking",
}
_IGNORED_BY_TRTLLM_COMPLETIONS: IgnoredFields = {
    bool: "return_context_logits",
    bool | None: "echo",
    int | None: "logprobs",
    str | None: "suffix",
}
_IGNORED_BY_OPENAI_CHAT: IgnoredFields = {
    bool | None: "logprobs parallel_tool_calls store",
    int | None: "top_logprobs",
    str | None: "prompt_cache_key reasoning_effort safety_identifier service_tier verbosity",
    Any: "metadata modalities prediction response_format",
}
_IGNORED_BY_OPENAI_COMPLETIONS: IgnoredFields = {
    bool | None: "echo",
    int | None: "logprobs",
    str | None: "suffix",
}


def create_body_decoder(
    body_type: type[msgspec.Struct], *ignored_fields: IgnoredFields
) -> BodyDecoder:
    """Return a decoder of JSON bodies that accepts known fields only.

    Like a real server, the decoder rejects unknown fields and values of a wrong type. So it has to
    know all fields of the API. `body_type` has only the fields that this server reads. A subclass
    is created here, which also has the ignored fields.

    Args:
        body_type: The type with the fields that this server reads.
        ignored_fields: The other fields, all optional, as mappings from a type to the names of the
            fields of that type. For example, `{bool: "echo logprobs"}` stands for two fields.

    Returns:
        A function that raises msgspec.MsgspecError, UnicodeDecodeError or RecursionError.
    """
    added_fields: list[tuple[str, Any, None]] = []
    for names_by_type in ignored_fields:
        added_fields += _iterate_optional_fields(names_by_type)

    # `defstruct` creates a class at run time, as a class statement would.
    complete_type = msgspec.defstruct(
        "Body", added_fields, bases=(body_type,), kw_only=True, forbid_unknown_fields=True
    )
    return msgspec.json.Decoder(complete_type).decode


def _iterate_optional_fields(names_by_type: IgnoredFields) -> Iterator[tuple[str, Any, None]]:
    """Yield the name, the type and the default of each field, as `msgspec.defstruct` takes them."""
    default = None
    for field_type, names in names_by_type.items():
        for name in names.split():
            yield name, field_type, default


_DECODERS: dict[tuple[ApiFlavor, CompletionsApi], BodyDecoder] = {
    ("trtllm", "chat"): create_body_decoder(
        _TrtllmChatBody, _IGNORED_BY_ALL, _IGNORED_BY_TRTLLM, _IGNORED_BY_TRTLLM_CHAT
    ),
    ("trtllm", "completions"): create_body_decoder(
        _TrtllmCompletionBody, _IGNORED_BY_ALL, _IGNORED_BY_TRTLLM, _IGNORED_BY_TRTLLM_COMPLETIONS
    ),
    ("openai", "chat"): create_body_decoder(
        _OpenAIChatBody, _IGNORED_BY_ALL, _IGNORED_BY_OPENAI_CHAT
    ),
    ("openai", "completions"): create_body_decoder(
        _OpenAICompletionBody, _IGNORED_BY_ALL, _IGNORED_BY_OPENAI_COMPLETIONS
    ),
}


def parse_completions_request(
    body: bytes, api: CompletionsApi, rules: RequestRules
) -> ParsedRequest:
    """Parse and check a request to the chat or completions API.

    The simulated model has no output of its own. The length of the completion is chosen here. Its
    words are computed when it is sent, from the digest: a hash of the prompt and the server's seed.

    Args:
        body: The JSON body of the request.
        api: The API that the request was sent to.
        rules: The options of the server. They decide what is accepted, and the length.

    Raises:
        RefusalError: The server does not accept the request.
    """
    request = _decode_completions_body(body, api, rules)
    max_tokens = _read_output_limit(request, api, rules)
    if rules.flavor == "openai":
        _check_openai_fields(request)
        check_model(request.model, rules)

    # The prompt. A tool call is generated only if the request forces the model to call a tool.
    if api == "chat":
        input_tokens, content = _read_chat_prompt(request, rules.flavor)
        called_tool = _find_forced_tool(request)
    else:
        input_tokens, content = _read_completion_prompt(request.prompt, rules.flavor)
        called_tool = ""

    # The completion.
    digest = digest_prompt(content, rules.seed)
    output_tokens, finish_reason = choose_output_length(
        max_tokens, input_tokens, digest, rules, _read_stop_options(request)
    )
    if called_tool:
        finish_reason = "tool_calls"

    if rules.worse:  # the server imitates one with other outputs
        digest = _change_some_words(digest, fraction=rules.worse)

    # Whether the token counts are reported at the end of a stream, and also in each event.
    stream_options = request.stream_options
    include_usage = stream_options is not None and bool(stream_options.include_usage)
    return ParsedRequest(
        api=api,
        model=request.model,
        stream=bool(request.stream),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        finish_reason=finish_reason,
        digest=digest,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(stream_options.continuous_usage_stats),
        blocks=hash_blocks(content, input_tokens, rules.tokens_per_block),
        called_tool=called_tool,
        # Only some APIs and flavors have these fields. The defaults are for all others.
        detokenize=getattr(request, "detokenize", True),
        include_metrics=getattr(request, "include_metrics", False),
        return_meta_info=getattr(request, "return_meta_info", False),
        max_tokens=max_tokens,
    )


def _decode_completions_body(body: bytes, api: CompletionsApi, rules: RequestRules) -> Any:
    """Return the decoded body, whose type depends on the API and the flavor.

    Raises RefusalError if the body is malformed, or if it has options for a stream without one.
    """
    try:
        request = _DECODERS[rules.flavor, api](body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed_body(rules.flavor, str(error)) from None

    if request.stream_options is not None and not request.stream:
        text = "stream_options can only be set if stream is true"
        raise malformed_body(rules.flavor, text)

    return request


def _read_stop_options(request: Any) -> StopOptions:
    """Return when a completion may end by itself. Only trtllm-serve has fields for this."""
    if isinstance(request, _TrtllmBody):
        return StopOptions(request.ignore_eos, request.min_tokens)
    return NO_STOP_OPTIONS


def _read_output_limit(request: Any, api: CompletionsApi, rules: RequestRules) -> int | None:
    """Return the limit of output tokens that a request sets, or None.

    The chat API has two names for the limit: `max_tokens` and its successor
    `max_completion_tokens`.

    Raises RefusalError for an invalid limit, and for more than one completion (`n`), which this
    server does not simulate.
    """
    max_tokens: int | None = request.max_tokens
    if api == "chat" and request.max_completion_tokens is not None:
        if max_tokens is not None:
            text = "max_tokens and max_completion_tokens are one field: send one of them"
            raise malformed_body(rules.flavor, text)
        max_tokens = request.max_completion_tokens

    if (request.n or 1) != 1:
        raise refusal(rules.flavor, "n > 1 is not simulated", "n")

    if max_tokens is not None and max_tokens < 1:
        text = f"max_tokens must be at least 1, got {max_tokens}"
        raise refusal(rules.flavor, text, "max_tokens")

    return max_tokens


def _check_openai_fields(request: Any) -> None:
    """Raise RefusalError for fields that the API flavor `openai` does not support.

    `continuous_usage_stats` is an extension of trtllm-serve and vLLM, which OpenAI's API lacks.
    `return_meta_info` is one of SGLang, which does not support it in streams.
    """
    stream_options = request.stream_options
    if stream_options is not None and stream_options.continuous_usage_stats is not None:
        text = "Unknown parameter: 'stream_options.continuous_usage_stats'."
        raise refusal("openai", text, "stream_options")
    if request.return_meta_info and request.stream:
        text = "return_meta_info is not supported with streaming."
        raise refusal("openai", text, "return_meta_info")


def _read_completion_prompt(
    prompt: str | list[int | str | list[int]], flavor: ApiFlavor
) -> tuple[int, bytes]:
    """Return the number of tokens of a completions prompt, and its content as bytes.

    The content is only hashed. So it needs no certain format, but equal prompts have to have equal
    contents.

    Args:
        prompt: The field of the request. It is a text such as `"Hi"`, the token ids of a text such
            as `[5, 7]`, or a list with a single prompt in one of these forms, such as `["Hi"]` or
            `[[5, 7]]`.
        flavor: The flavor of the API, which decides the form of an error.

    Raises:
        RefusalError: There are several prompts, none, or a token id that is no 64-bit integer.
    """
    text_or_ids = _unwrap_single_prompt(prompt, flavor)
    if isinstance(text_or_ids, str):
        # JSON may contain half of a surrogate pair, which UTF-8 has no bytes for.
        content = text_or_ids.encode("utf-8", "surrogatepass")
        return max(1, count_tokens(text_or_ids)), content

    try:
        return len(text_or_ids), msgspec.msgpack.encode(text_or_ids)
    except OverflowError:  # msgpack has no integers of more than 64 bits
        text = "prompt has a token id of more than 64 bits"
        raise malformed_body(flavor, text) from None


def _unwrap_single_prompt(
    prompt: str | list[int | str | list[int]], flavor: ApiFlavor
) -> str | list[int]:
    """Return the only prompt of a completions request: a text or a list of token ids.

    The field `prompt` has one of four forms: a text, the token ids of a text, a list of texts, or a
    list of lists of token ids. This server accepts the two kinds of lists only with one entry.

    Raises RefusalError for several prompts, and for an empty or mixed list.
    """
    if isinstance(prompt, str):
        return prompt
    if not prompt or isinstance(prompt[0], int):
        return _check_token_ids(prompt, flavor)

    single_prompt = prompt[0]
    if len(prompt) > 1:
        raise refusal(flavor, "several prompts in one request are not simulated", "prompt")
    if isinstance(single_prompt, str):
        return single_prompt

    return _check_token_ids(single_prompt, flavor)


def _check_token_ids(items: Sequence[int | str | list[int]], flavor: ApiFlavor) -> list[int]:
    """Return the token ids of a prompt. Raises RefusalError if there is none, or another item."""
    ids = [item for item in items if isinstance(item, int)]
    has_other_items = len(ids) < len(items)
    if not ids or has_other_items:
        raise malformed_body(flavor, "prompt must be a text or a list of token ids")
    return ids


def _read_chat_prompt(request: Any, flavor: ApiFlavor) -> tuple[int, bytes]:
    """Return the number of tokens of a chat prompt, and its content as bytes.

    The content consists of all texts that the model reads, one after the other, and is hashed. It
    has the descriptions of tools, the texts of the messages and their roles. Roles count no tokens,
    because the chat template adds a fixed number for them.

    Raises RefusalError if there are no messages.
    """
    if not request.messages:
        raise malformed_body(flavor, "messages must not be empty")

    tool_descriptions = [tool.function.description for tool in request.tools or ()]
    pieces = [description for description in tool_descriptions if description]

    text_tokens = sum(map(count_tokens, pieces))
    for message in request.messages:
        texts = message.texts()
        text_tokens += sum(map(count_tokens, texts))
        pieces += [*texts, message.role]

    content = "".join(pieces).encode("utf-8", "surrogatepass")  # may have half a surrogate pair

    # The token ids of the whole prompt, an extension of trtllm-serve, replace the count.
    prompt_token_ids = getattr(request, "prompt_token_ids", None)
    if prompt_token_ids:
        return len(prompt_token_ids), content

    return TEMPLATE_TOKENS + text_tokens, content


def _find_forced_tool(request: Any) -> str:
    """Return the tool that the request forces the completion to call, or "" if it is text.

    A request forces a call by naming a tool, or with "required", which calls the first tool.
    """
    choice = request.tool_choice
    if isinstance(choice, _Tool):
        return choice.function.name
    if choice == "required" and request.tools:
        return str(request.tools[0].function.name)
    return ""


def _change_some_words(digest: bytes, fraction: float) -> bytes:
    """Return the digest of a text in which about this fraction of the words is changed.

    The option `--worse` imitates a server whose outputs differ from those of another one, for
    example because its model is quantized, so that a comparison of outputs has something to find.

    The words of a text follow from the 64 bytes of its digest: byte 0 decides words 0, 64, 128 and
    so on, byte 1 decides words 1, 65, 129. So a changed byte changes these words. Each byte is
    changed with the probability `fraction`. The decision is a hash of the digest and not a random
    number, so that the same prompt always gets the same text.
    """
    random_bytes = hashlib.blake2b(digest, digest_size=len(digest)).digest()
    threshold = fraction * BYTE_VALUES

    changed_digest = bytearray(digest)
    for position, random_byte in enumerate(random_bytes):
        is_changed = random_byte < threshold
        if is_changed:
            changed_digest[position] ^= CHANGED_WORD_MASK

    return bytes(changed_digest)


# Common to all APIs


def change_one_word(digest: bytes, output_tokens: int, seed: int, request_number: int) -> bytes:
    """Return the digest of a text in which one word is wrong, as the failure `corrupt` does.

    The word is drawn from the number of the request, so that equal prompts get different errors. In
    a text longer than the digest, the words that the same byte decides are wrong, too.
    """
    word_count = min(output_tokens, len(digest))
    position = int(draw_uniform(seed, CORRUPT_WORD_STREAM, request_number) * word_count)
    changed_digest = bytearray(digest)
    changed_digest[position] ^= CHANGED_WORD_MASK
    return bytes(changed_digest)


def check_model(model: str, rules: RequestRules) -> None:
    """Raise RefusalError for a model that is not served. trtllm-serve accepts any name."""
    if rules.flavor == "openai" and model != rules.model:
        text = f"The model `{model}` does not exist or you do not have access to it."
        raise refusal("openai", text, status=404, code="model_not_found")


def digest_prompt(content: bytes, seed: int) -> bytes:
    """Return the 64 bytes that determine the completion of a prompt: its words and its length.

    Equal prompts get equal completions from a server, as from a model without sampling. Servers
    with different seeds give different ones.
    """
    return hashlib.blake2b(seed.to_bytes(8, "little") + content, digest_size=64).digest()


def count_tokens(text: str) -> int:
    """Return the number of tokens of `text`: pieces that begin at a space.

    Equals `len(text.split())` if all spaces are single. The text is not split, because 10,000
    pieces would block the event loop for 0.3 ms.
    """
    starts_with_word = text[:1] not in ("", " ")
    return text.count(" ") + starts_with_word


def hash_blocks(content: bytes, tokens: int, tokens_per_block: int) -> tuple[int, ...]:
    """Return one hash per full block of a prompt, for the prefix cache.

    A hash covers the prompt from its beginning to the end of the block. So if two prompts have the
    same first 100 tokens, the hashes of all blocks in these tokens are equal. Without a prefix
    cache (`tokens_per_block` 0) there are no blocks.

    Args:
        content: The prompt as bytes. Tokens begin at spaces.
        tokens: The number of tokens of the prompt.
        tokens_per_block: The block size of the prefix cache.
    """
    if not tokens_per_block:
        return ()

    full_block_count = tokens // tokens_per_block

    # Prompts of token ids may contain more spaces than tokens, so surplus ends are dropped.
    block_ends = _find_block_ends(content, tokens_per_block)[:full_block_count]
    hashes = []
    prefix_hash = 0

    block_start = 0
    for block_end in block_ends:
        prefix_hash = hash((prefix_hash, content[block_start:block_end]))
        hashes.append(prefix_hash)
        block_start = block_end

    return tuple(hashes)


def _find_block_ends(content: bytes, tokens_per_block: int) -> list[int]:
    """Return the byte positions in a prompt at which its blocks end.

    The n-th space ends the n-th token, so every `tokens_per_block`-th space ends a block. With 2
    tokens per block, the blocks of b"a b c d e" end at the spaces before "c" and before "e".
    """
    # Imported here, because the import would double the start-up time of a server without a cache.
    import numpy as np

    space_positions = np.flatnonzero(np.frombuffer(content, np.uint8) == SPACE)
    first_end_index = tokens_per_block - 1
    block_ends: list[int] = space_positions[first_end_index::tokens_per_block].tolist()
    return block_ends


class StopOptions(NamedTuple):
    """When a completion may end by itself, before the limit of output tokens.

    Attributes:
        ignore_eos: Whether it never ends by itself. EOS is the token that ends a text.
        min_tokens: The least output tokens before it ends.
    """

    ignore_eos: bool = False
    min_tokens: int = 0


NO_STOP_OPTIONS = StopOptions()


def choose_output_length(
    max_tokens: int | None,
    input_tokens: int,
    digest: bytes,
    rules: RequestRules,
    stop_options: StopOptions = NO_STOP_OPTIONS,
) -> tuple[int, str]:
    """Return the number of output tokens and the finish reason of a completion.

    The simulated model ends a text by itself ("stop") unless the limit comes first ("length"). With
    `ignore_eos` it never ends a text by itself, so the completion is as long as the limit.

    Args:
        max_tokens: The limit that the request sets, or None.
        input_tokens: The length of the prompt.
        digest: The digest of the prompt and the seed.
        rules: The options of the server.
        stop_options: When the completion may end by itself.

    Raises:
        RefusalError: The prompt is too long, or the completion would be.
    """
    _check_context_length(max_tokens, input_tokens, rules)

    # The limit of the output. trtllm-serve reduces one that does not fit into the context, without
    # an error.
    limit_tokens = rules.max_seq_len - input_tokens
    if max_tokens is not None:
        limit_tokens = min(max_tokens, limit_tokens)

    if stop_options.ignore_eos:
        _check_output_length(limit_tokens, rules)
        return limit_tokens, "length"

    # The length at which the text would end without a limit.
    typical_tokens = NATURAL_TOKENS if max_tokens is None else max_tokens
    natural_tokens = _choose_natural_length(typical_tokens, digest)
    natural_tokens = max(natural_tokens, stop_options.min_tokens)
    ends_by_itself = natural_tokens < limit_tokens
    if ends_by_itself:
        return natural_tokens, "stop"

    return min(limit_tokens, MAX_OUTPUT_TOKENS), "length"


def _check_output_length(output_tokens: int, rules: RequestRules) -> None:
    """Raise RefusalError if a completion would be longer than this server simulates."""
    if output_tokens > MAX_OUTPUT_TOKENS:
        text = f"an answer of {output_tokens} tokens is not simulated"
        raise refusal(rules.flavor, text, "max_tokens")


def _choose_natural_length(typical_tokens: int, digest: bytes) -> int:
    """Return after how many tokens the simulated model ends a text by itself, at least 1.

    The length is spread evenly from 0.6 to 1.6 times the typical one. It is a function of the
    digest, so that equal prompts get equal completions.
    """
    uniform = int.from_bytes(digest[:4], "little") / 2**32  # from 0 to 1
    fraction_of_typical = MIN_NATURAL_FRACTION + uniform
    return max(1, round(fraction_of_typical * typical_tokens))


def _check_context_length(max_tokens: int | None, input_tokens: int, rules: RequestRules) -> None:
    """Raise RefusalError if a request does not fit into the context, as its API flavor defines."""
    if rules.flavor == "openai":
        _check_openai_context(max_tokens, input_tokens, rules.max_seq_len)
    else:
        _check_trtllm_context(input_tokens, rules)


def _check_openai_context(max_tokens: int | None, input_tokens: int, max_seq_len: int) -> None:
    """Raise RefusalError if the prompt and the limit of output tokens exceed the context.

    Without a limit, the prompt must leave room for one token. The text of the error is that of
    vLLM, because clients recognize the error by it. It reports a missing limit as 0.
    """
    required_output_tokens = 1 if max_tokens is None else max_tokens
    if input_tokens + required_output_tokens <= max_seq_len:
        return

    reported_output_tokens = 0 if max_tokens is None else max_tokens
    text = (
        f"This model's maximum context length is {max_seq_len} tokens. However, you "
        f"requested {input_tokens + reported_output_tokens} tokens ({input_tokens} in the "
        f"messages, {reported_output_tokens} in the completion)."
    )
    raise refusal("openai", text, "messages", code="context_length_exceeded")


def _check_trtllm_context(input_tokens: int, rules: RequestRules) -> None:
    """Raise RefusalError if the prompt is too long for the context or for one iteration.

    The text is that of trtllm-serve, because clients recognize the error by it.
    """
    exceeds_context = input_tokens >= rules.max_seq_len

    # 0 means that a prompt can be spread over several iterations.
    exceeds_iteration = 0 < rules.max_num_tokens < input_tokens
    if not exceeds_context and not exceeds_iteration:
        return

    limit = rules.max_num_tokens or rules.max_seq_len
    text = (
        f"The sum of prompt length ({input_tokens}.0), query length (0) should not exceed "
        f"max_num_tokens ({limit})"
    )
    raise refusal("trtllm", text)
