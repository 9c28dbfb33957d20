"""Read the prompt of a call for every API: its texts, and an estimate of its tokens. Pure.

Pictures, sounds and files have a number of tokens, and a short text stands in for them: their
base64 is neither counted as text nor hashed into a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import msgspec

from .media_tokens import (
    UNKNOWN_SIZE,
    estimate_audio_tokens,
    estimate_file_tokens,
    estimate_image_tokens,
    read_image_size,
)

CHARS_PER_TOKEN = 4
"""An estimate for English in common vocabularies, which the usage of the response corrects."""

EXPECTED_OUTPUT_TOKENS = 256
"""The estimated output of a call without an output limit."""

_MAX_CACHED_SCHEMAS = 256

_PROMPT_ARGUMENTS = ("instructions", "system", "messages", "prompt", "input")
"""The arguments with the prompt, in its order."""

_SCHEMA_ARGUMENTS = ("tools", "functions", "response_format", "text", "text_format")
"""The arguments that are sent as JSON. They count as text."""

_TEXT_FIELDS = (
    "name",
    "text",
    "thinking",
    "content",
    "output",
    "refusal",
    "arguments",
    "input",
    "summary",
    "tool_calls",
    "function_call",
    "function",
)
_IMAGE_TYPES = ("image_url", "input_image", "image", "computer_screenshot")
_AUDIO_TYPES = ("input_audio",)
_FILE_TYPES = ("file", "input_file", "document")
"""The types of content parts with an image, audio or a file."""

_OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class PromptPart(NamedTuple):
    """A text, image, audio or file in a prompt.

    Attributes:
        text: The text, or a short description of an image, audio or file.
        tokens: The estimated tokens of an image, audio or file. None for a text, whose tokens are
            estimated by its characters.
    """

    text: str
    tokens: int | None = None


class Prompt(NamedTuple):
    """The prompt of a call.

    Attributes:
        message_texts: The texts of each message, by the name of the argument of the call.
        tokens: The estimated tokens of the prompt.
    """

    message_texts: dict[str, list[tuple[str, ...]]]
    tokens: int

    @property
    def joined_texts(self) -> dict[str, list[str]]:
        r"""One string for each message, by the name of the argument that has the message.

        For example `{"messages": ["user\nHello", "assistant\nHi"]}`. It is a copy of the whole
        prompt, so that it is created only by callers that need it.
        """
        return {
            name: ["\n".join(texts) for texts in messages]
            for name, messages in self.message_texts.items()
        }


class _EstimatedTokens(NamedTuple):
    """The estimated tokens of a call, and the output tokens among them."""

    total: int
    output: int


def estimate_tokens(
    arguments: Mapping[str, object], *, has_output: bool = True
) -> _EstimatedTokens:
    """Estimate the tokens of a call by its prompt and its output limit, before it is sent.

    `has_output` is False for APIs such as embeddings, which have no output tokens.
    """
    output_tokens = _output_limit(arguments) if has_output else 0
    return _EstimatedTokens(read_prompt(arguments).tokens + output_tokens, output_tokens)


def _output_limit(arguments: Mapping[str, object]) -> int:
    """Return the most output tokens that a call allows, or EXPECTED_OUTPUT_TOKENS without a limit.

    The APIs have different names for the limit.
    """
    for name in _OUTPUT_LIMITS:
        limit = arguments.get(name)
        if isinstance(limit, int):
            return int(limit)
    return EXPECTED_OUTPUT_TOKENS


def read_prompt(arguments: Mapping[str, object]) -> Prompt:
    """Return the texts in the arguments of a call, and estimate the tokens of its prompt.

    The tokens of texts and of the schemas of tools are estimated by the number of characters. Those
    of images, audio and files (the media) are estimated one by one. Schemas are not among the
    returned texts.

    Args:
        arguments: The arguments of the call, such as `messages`, `tools` and `model`.
    """
    model = str(arguments.get("model") or "")
    char_count = 0
    for name in _SCHEMA_ARGUMENTS:
        schema = arguments.get(name)
        if schema:
            char_count += _schema_chars(schema)

    media_tokens = 0
    message_texts: dict[str, list[tuple[str, ...]]] = {}
    for name in _PROMPT_ARGUMENTS:
        prompt_argument = passed_argument(arguments, name)
        if prompt_argument is None:
            continue

        messages = [_read_message(message, model) for message in _messages_in(prompt_argument)]
        message_texts[name] = [message.texts for message in messages]

        for message in messages:
            char_count += message.char_count
            media_tokens += message.media_tokens

    return Prompt(message_texts, char_count // CHARS_PER_TOKEN + media_tokens)


class _ReadMessage(NamedTuple):
    """What was read from a message of a prompt.

    Attributes:
        texts: Its texts, and a short description of each image, audio or file.
        char_count: The length of its texts, without these descriptions.
        media_tokens: The estimated tokens of its images, audio and files.
    """

    texts: tuple[str, ...]
    char_count: int
    media_tokens: int


def _read_message(message: object, model: str) -> _ReadMessage:
    """Return the texts of a message, and what is needed to estimate its tokens.

    Texts are counted in characters, and images, audio and files in tokens.

    Args:
        message: The message, in any form that the APIs accept.
        model: The model, which decides how many tokens an image has.
    """
    plain_texts = _texts_of_plain_message(message)
    if plain_texts is not None:
        return _ReadMessage(plain_texts, sum(map(len, plain_texts)), media_tokens=0)

    char_count = 0
    media_tokens = 0

    texts = []
    for part in _find_parts(message, model):
        texts.append(part.text)
        if part.tokens is None:
            char_count += len(part.text)
        else:
            media_tokens += part.tokens

    return _ReadMessage(tuple(texts), char_count, media_tokens)


def _messages_in(value: object) -> Sequence[Any]:
    """Return the messages in an argument. A text, or a list of token ids, is one message."""
    if isinstance(value, list | tuple) and not _are_token_ids(value):
        return value
    return (value,)


def passed_argument(arguments: Mapping[str, object], name: str) -> Any:
    """Return an argument of a call, or None if the application did not pass it.

    The methods `stream` and `parse` of openai pass all of their arguments on to `create`. One that
    the application did not pass then has a sentinel, an `Omit` or a `NotGiven`.
    """
    value = arguments.get(name)
    return None if type(value).__name__ in ("Omit", "NotGiven") else value


def _texts_of_plain_message(message: object) -> tuple[str, ...] | None:
    """Return the texts of a message in one of the two usual forms, or None for any other message.

    The usual forms are a string, and a mapping with exactly a role and a string. `_find_parts`
    would find the same texts, but takes longer, and this runs in each call. The types are compared
    exactly, because that is faster than `isinstance`.
    """
    if _is_plain_text(message):
        return (message,)
    if type(message) is not dict or len(message) != 2:
        return None

    role = message.get("role")
    content = message.get("content")
    if type(role) is str and role and _is_plain_text(content):
        return (role, content)

    return None


def _is_plain_text(value: object) -> TypeGuard[str]:
    """Return True for a string that is not empty and not a data URL, which contains a medium."""
    return type(value) is str and value != "" and not value.startswith("data:")


def _find_parts(value: object, model: str) -> Iterator[PromptPart]:
    """Yield the texts, images, audio and files in a message, or in any value inside it.

    Args:
        value: A mapping, an object of a package, a text (also a data URL, which contains an image,
            audio or a file), a list of token ids, or a list of any of these.
        model: The model, which decides how many tokens an image has.
    """
    if isinstance(value, str):
        if value.startswith("data:"):
            yield _data_url_part(value, model)
        else:
            yield PromptPart(value)
    elif isinstance(value, list | tuple):
        if _are_token_ids(value):
            # Recorded traces contain a hash of this text. It must differ for different token ids.
            ids_text = " ".join(map(str, value))
            yield PromptPart(ids_text, tokens=len(value))
        else:
            for item in value:
                yield from _find_parts(item, model)
    elif isinstance(value, Mapping):
        yield from _find_parts_of_mapping(value, model)
    else:
        yield from _find_parts_of_object(value, model)


def _find_parts_of_mapping(value: Mapping[str, object], model: str) -> Iterator[PromptPart]:
    """Yield the texts and media in a message, or in a content part of one.

    A content part has a `type`, and a message has a `role`. For example, the first of these yields
    the image, and the second one "user" and "Hello":

        {"type": "image_url", "image_url": {"url": "https://…"}}
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    """
    part_type = str(value.get("type", ""))
    if part_type in _IMAGE_TYPES:
        yield _read_image(value, model)
    elif part_type in _AUDIO_TYPES:
        yield _read_audio(value)
    elif part_type in _FILE_TYPES:
        yield from _read_file(value, model)
    else:
        yield from _find_parts_of_fields(value, part_type, model)


def _find_parts_of_fields(
    value: Mapping[str, object], part_type: str, model: str
) -> Iterator[PromptPart]:
    """Yield the texts and media in the fields of a message, or of a content part of a text type."""
    label = _label_of(value, part_type)
    if label:
        yield PromptPart(label)

    for name in _TEXT_FIELDS:
        field = value.get(name)
        if not field:
            continue

        is_tool_argument = name in ("input", "arguments") and isinstance(field, Mapping)
        if is_tool_argument:
            # The arguments of a tool may be any JSON, which is one text.
            yield PromptPart(str(field))
        else:
            yield from _find_parts(field, model)


def _label_of(value: Mapping[str, object], part_type: str) -> str:
    """Return the role of a message, or the type of a content part such as "tool_result".

    Models see both as text. A plain text part, such as "text" or "input_text", has no label.
    """
    role = value.get("role")
    if role:
        return str(role)
    return "" if part_type.endswith("text") else part_type


def _find_parts_of_object(value: object, model: str) -> Iterator[PromptPart]:
    """Yield the texts and media in an object of pydantic. Any other object is one text."""
    # pydantic 2 has `model_dump`, and pydantic 1 has `dict`.
    dump = getattr(value, "model_dump", None) or getattr(value, "dict", None)
    if dump is None:
        yield PromptPart(str(value))
    else:
        yield from _find_parts(dump(), model)


def _are_token_ids(value: object) -> bool:
    """Return True for a list of integers, which is a prompt that was tokenized by the caller."""
    return bool(value) and isinstance(value, list | tuple) and type(value[0]) is int


def _data_url_part(url: str, model: str, detail: str = "") -> PromptPart:
    """Return the image, audio or file in a data URL such as "data:image/png;base64,iVBO…"."""
    prefix, _, data = url.partition(",")
    if prefix.startswith("data:audio"):
        return _audio_part(data)
    if prefix.startswith("data:image"):
        return _image_part(data, model, detail)
    return _file_part(data)


def _audio_part(data: str) -> PromptPart:
    """Return the part for audio in base64. Its text has the length of the base64."""
    return PromptPart(f"[sound: {len(data)}]", estimate_audio_tokens(data))


def _file_part(data: str) -> PromptPart:
    """Return the part for a file in base64. Its text has the length of the base64."""
    return PromptPart(f"[file: {len(data)}]", estimate_file_tokens(data))


def _image_part(data: str, model: str, detail: str) -> PromptPart:
    """Return the part for an image in base64, with the tokens that the model counts for it."""
    size = read_image_size(data) or UNKNOWN_SIZE
    # The text is hashed by `record_shape`. Another one would change the hashes of recorded traces.
    text = f"[picture: {size.width} x {size.height}, {len(data)}]"
    return PromptPart(text, estimate_image_tokens(model, size, detail))


def _fields_of_image(part: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the fields of an image in a content part: `url`, `data`, `file_id` or `detail`.

    The part may have a URL or a file id in place of the fields. It is then returned as `url`.
    """
    source = part.get("image_url") or part.get("source") or part.get("file_id") or ""
    return source if isinstance(source, Mapping) else {"url": source}


def _read_image(part: Mapping[str, object], model: str) -> PromptPart:
    """Return the image in a content part of one of three APIs.

    - chat: `{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}`
    - Responses: `{"type": "input_image", "image_url": URL}`, or with a `file_id`
    - Anthropic: `{"type": "image", "source": {"data": BASE64}}`, or with a `url` or `file_id`

    A URL may be a data URL, which contains the image. The size of an image behind any other URL, or
    behind a file id, is not known.
    """
    fields = _fields_of_image(part)
    detail = str(fields.get("detail") or part.get("detail") or "")
    data = fields.get("data")
    if isinstance(data, str):
        return _image_part(data, model, detail)

    reference = str(fields.get("url") or fields.get("file_id") or "")
    if reference.startswith("data:"):
        data_of_url = reference.partition(",")[2]
        return _image_part(data_of_url, model, detail)

    return PromptPart(reference, estimate_image_tokens(model, UNKNOWN_SIZE, detail))


def _read_audio(part: Mapping[str, object]) -> PromptPart:
    """Return the audio in a content part `{"type": "input_audio", "input_audio": {"data": …}}`."""
    audio = part.get("input_audio")
    data = str(audio.get("data") or "") if isinstance(audio, Mapping) else ""
    return _audio_part(data)


def _read_file(part: Mapping[str, object], model: str) -> Iterator[PromptPart]:
    """Yield the file in a content part, or the texts and media inside it if they can be read.

    The APIs have different forms:

    - chat: `{"type": "file", "file": {"file_data": BASE64}}`, or with a `file_id`
    - Responses: `{"type": "input_file", "file_data": BASE64}`, or with a `file_id` or `file_url`
    - Anthropic: `{"type": "document", "source": {"data": BASE64}}`, or with a `url` or `file_id`.
      A source of the type "text" has a text as `data`, and one of the type "content" has content
      parts as `content`.
    """
    fields = _fields_of_file(part)
    data = fields.get("file_data") or fields.get("data")
    content_parts = fields.get("content")

    has_text_as_data = fields.get("type") == "text"
    if has_text_as_data or content_parts:
        yield from _find_parts(data or content_parts, model)
    elif isinstance(data, str):
        yield _file_part(data)
    else:
        # The request only refers to the file, so that its number of pages is not known.
        tokens_of_empty_file = estimate_file_tokens("")
        yield PromptPart(_file_reference(fields), tokens_of_empty_file)


def _fields_of_file(part: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the fields of a file: those in `file` or `source`, or those of the part itself."""
    for name in ("file", "source"):
        fields = part.get(name)
        if isinstance(fields, Mapping):
            return fields
    return part


def _file_reference(fields: Mapping[str, object]) -> str:
    """Return the id, the URL or the name of a file, or an empty string."""
    for name in ("file_id", "file_url", "url", "filename"):
        if fields.get(name):
            return str(fields[name])
    return ""


def _schema_chars(value: object) -> int:
    """Return the length of tools, or of the schema of a response, as JSON."""
    if isinstance(value, type):
        return _class_chars(value)
    try:
        return len(msgspec.json.encode(value, enc_hook=_to_plain_value))
    except (TypeError, ValueError):
        return 0


@functools.lru_cache(maxsize=_MAX_CACHED_SCHEMAS)
def _class_chars(model: type) -> int:
    """Return the length of the JSON schema of a pydantic class, which is slow to generate."""
    make_schema = getattr(model, "model_json_schema", None)
    return 0 if make_schema is None else len(msgspec.json.encode(make_schema(), enc_hook=str))


def _to_plain_value(value: object) -> Any:
    dump = getattr(value, "model_dump", None)
    return str(value) if dump is None else dump()
