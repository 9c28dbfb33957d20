"""Read the prompt of a call for every API: its texts, and an estimate of its tokens. Pure.

Pictures, sounds and files have a number of tokens, and a short text stands in for them: their
base64 is neither counted as text nor hashed into a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
        """One text per message, by the name of the argument.

        It is as long as the prompt, so that it is made only when it is needed.
        """
        return {
            name: ["\n".join(texts) for texts in messages]
            for name, messages in self.message_texts.items()
        }


class _EstimatedTokens(NamedTuple):
    """The estimated tokens of a call, and the output tokens among them."""

    total: int
    output: int


def estimate_tokens(arguments: Mapping[str, Any], *, has_output: bool = True) -> _EstimatedTokens:
    """Estimate the tokens of a call by its prompt and its output limit, before it is sent.

    `has_output` is False for APIs such as embeddings, which have no output tokens.
    """
    output_tokens = _output_limit(arguments) if has_output else 0
    return _EstimatedTokens(read_prompt(arguments).tokens + output_tokens, output_tokens)


def _output_limit(arguments: Mapping[str, Any]) -> int:
    for name in _OUTPUT_LIMITS:
        limit = arguments.get(name)
        if isinstance(limit, int):
            return int(limit)
    return EXPECTED_OUTPUT_TOKENS


def read_prompt(arguments: Mapping[str, Any]) -> Prompt:
    """Return the texts in the arguments of a call, and estimate the tokens of its prompt.

    The schemas of tools and of the response count as tokens too, but are not among the texts.
    """
    model = str(arguments.get("model") or "")
    char_count = sum(
        _schema_chars(arguments[name]) for name in _SCHEMA_ARGUMENTS if arguments.get(name)
    )
    media_tokens = 0
    message_texts: dict[str, list[tuple[str, ...]]] = {}
    for name in _PROMPT_ARGUMENTS:
        value = passed_argument(arguments, name)
        if value is None:
            continue
        message_texts[name] = []
        for message in _messages_in(value):
            plain_texts = _plain_texts(message)
            if plain_texts is not None:
                message_texts[name].append(plain_texts)
                char_count += sum(map(len, plain_texts))
                continue
            parts = list(_find_parts(message, model))
            message_texts[name].append(tuple(part.text for part in parts))
            char_count += sum(len(part.text) for part in parts if part.tokens is None)
            media_tokens += sum(part.tokens or 0 for part in parts)
    return Prompt(message_texts, char_count // CHARS_PER_TOKEN + media_tokens)


def _messages_in(value: Any) -> Sequence[Any]:
    """Return the messages in an argument. A text, or a list of token ids, is one message."""
    if isinstance(value, list | tuple) and not _are_token_ids(value):
        return value
    return (value,)


def passed_argument(arguments: Mapping[str, Any], name: str) -> Any:
    """Return an argument of a call, or None if the application did not pass it.

    `stream` and `parse` of openai pass all arguments on to `create`, with a sentinel for those that
    were not passed.
    """
    value = arguments.get(name)
    return None if type(value).__name__ in ("Omit", "NotGiven") else value


def _plain_texts(value: Any) -> tuple[str, ...] | None:
    """Return the texts of a message that is a text, or has only a role and a text.

    Return None for any other message. Most messages have one of these two forms. `_find_parts`
    would find the same in them, but takes longer, and this runs in each call.
    """
    text: Any = value
    role: Any = None
    if type(value) is dict and len(value) == 2:
        text = value.get("content")
        role = value.get("role")
        if type(role) is not str or not role:
            return None
    if type(text) is not str or not text or text.startswith("data:"):
        return None
    return (text,) if role is None else (role, text)


def _find_parts(value: Any, model: str) -> Iterator[PromptPart]:
    """Yield the texts, images, audio and files in a message, or in any value inside it.

    The message is a mapping, an object of a package, a text (also a data URL), or a list of these.
    `model` decides how many tokens an image has.
    """
    if isinstance(value, str):
        is_data_url = value.startswith("data:")
        yield _data_url_part(value, model) if is_data_url else PromptPart(value)
    elif isinstance(value, list | tuple):
        if _are_token_ids(value):
            yield PromptPart(" ".join(map(str, value)), len(value))
        else:
            for item in value:
                yield from _find_parts(item, model)
    elif isinstance(value, Mapping):
        yield from _find_parts_of_mapping(value, model)
    else:
        yield from _find_parts_of_object(value, model)


def _find_parts_of_mapping(value: Mapping[str, Any], model: str) -> Iterator[PromptPart]:
    """Yield what is in a message, or in a content part of one, that is given as a mapping.

    The `type` of a content part says whether it is a medium. A role, or the type of a part that is
    not a plain text (such as "tool_result"), counts as a text itself, since models see it.
    """
    part_type = str(value.get("type", ""))
    read_medium = _MEDIA_READERS.get(part_type)
    if read_medium is not None:
        yield from read_medium(value, model)
        return
    label = value.get("role")
    is_text_part = part_type.endswith("text")  # "text", "input_text", "output_text"
    if not label and not is_text_part:
        label = part_type
    if label:
        yield PromptPart(str(label))
    for name in _TEXT_FIELDS:
        field = value.get(name)
        if not field:
            continue
        # The arguments of a tool may be any JSON.
        if name in ("input", "arguments") and isinstance(field, Mapping):
            yield PromptPart(str(field))
        else:
            yield from _find_parts(field, model)


def _find_parts_of_object(value: Any, model: str) -> Iterator[PromptPart]:
    """Yield what is in an object of pydantic 2 or 1. Any other object counts as its text."""
    dump = getattr(value, "model_dump", None) or getattr(value, "dict", None)
    if dump is None:
        yield PromptPart(str(value))
    else:
        yield from _find_parts(dump(), model)


def _are_token_ids(value: Any) -> bool:
    return bool(value) and isinstance(value, list | tuple) and type(value[0]) is int


def _data_url_part(url: str, model: str, detail: str = "") -> PromptPart:
    """Return the image, audio or file in a data URL, by the media type that it names."""
    prefix, _, data = url.partition(",")
    if prefix.startswith("data:audio"):
        return PromptPart(f"[sound: {len(data)}]", estimate_audio_tokens(data))
    if prefix.startswith("data:image"):
        return _image_part(data, model, detail)
    return PromptPart(f"[file: {len(data)}]", estimate_file_tokens(data))


def _image_part(base64: str, model: str, detail: str) -> PromptPart:
    """Return the part for an image in base64, with the tokens that the model counts for it."""
    size = read_image_size(base64) or UNKNOWN_SIZE
    # The text is hashed by `record_shape`. Another one would change the hashes of recorded traces.
    text = f"[picture: {size.width} x {size.height}, {len(base64)}]"
    return PromptPart(text, estimate_image_tokens(model, size, detail))


def _read_image(part: Mapping[str, Any], model: str) -> Iterator[PromptPart]:
    """Yield the image in a content part of chat, of the Responses API or of Anthropic.

    The image is base64 in `data`, a data URL, or outside of the request: a URL or a file id. The
    size of the latter is not known.
    """
    source = part.get("image_url") or part.get("source") or part.get("file_id") or ""
    fields: Mapping[str, Any] = source if isinstance(source, Mapping) else {"url": source}
    detail = str(fields.get("detail") or part.get("detail") or "")
    url = str(fields.get("url") or fields.get("file_id") or "")
    data = fields.get("data")
    if isinstance(data, str):
        yield _image_part(data, model, detail)
    elif url.startswith("data:"):
        yield _image_part(url.partition(",")[2], model, detail)
    else:
        yield PromptPart(url, estimate_image_tokens(model, UNKNOWN_SIZE, detail))


def _read_audio(part: Mapping[str, Any], _model: str) -> Iterator[PromptPart]:
    """Yield the audio in a content part of the type `input_audio`."""
    audio = part.get("input_audio")
    data = str(audio.get("data") or "") if isinstance(audio, Mapping) else ""
    yield PromptPart(f"[sound: {len(data)}]", estimate_audio_tokens(data))


def _read_file(part: Mapping[str, Any], model: str) -> Iterator[PromptPart]:
    """Yield what is in a file: `file` of chat, `input_file` of responses, `document` of Anthropic.

    The fields are in the part itself, or in its field `file` (chat) or `source` (Anthropic). The
    file is a text, content parts, base64, or outside of the request: an id or a URL.
    """
    fields = part
    for name in ("file", "source"):
        if isinstance(part.get(name), Mapping):
            fields = part[name]
            break
    data = fields.get("file_data") or fields.get("data")
    content = fields.get("content")
    if fields.get("type") == "text" or content:
        yield from _find_parts(data or content, model)
    elif isinstance(data, str):
        yield PromptPart(f"[file: {len(data)}]", estimate_file_tokens(data))
    else:
        yield PromptPart(_file_reference(fields), estimate_file_tokens(""))


def _file_reference(fields: Mapping[str, Any]) -> str:
    """Return the id, the URL or the name of a file, or an empty string."""
    for name in ("file_id", "file_url", "url", "filename"):
        if fields.get(name):
            return str(fields[name])
    return ""


_MEDIA_READERS: dict[str, Callable[[Mapping[str, Any], str], Iterator[PromptPart]]] = {
    "image_url": _read_image,
    "input_image": _read_image,
    "image": _read_image,
    "computer_screenshot": _read_image,
    "input_audio": _read_audio,
    "file": _read_file,
    "input_file": _read_file,
    "document": _read_file,
}
"""The type of a content part that is no text -> the function that yields what is in it."""


def _schema_chars(value: Any) -> int:
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


def _to_plain_value(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return str(value) if dump is None else dump()
