"""Read the prompt of a call for every API: its texts, and an estimate of its tokens. Pure.

Pictures, sounds and files have a number of tokens, and a short text stands in for them: their
base64 is neither counted as text nor hashed into a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from .media_tokens import UNKNOWN_SIZE, file_tokens, picture_size, picture_tokens, sound_tokens

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


class Piece(NamedTuple):
    """A part of a prompt.

    Attributes:
        text: The text, or a short text that stands in for a medium.
        tokens: The estimated tokens of a medium, or None for a text, whose characters count.
    """

    text: str
    tokens: int | None = None


class Prompt(NamedTuple):
    """The prompt of a call.

    Attributes:
        parts: The texts of each message, by argument.
        tokens: The estimated tokens of all of them.
    """

    parts: dict[str, list[tuple[str, ...]]]
    tokens: int

    @property
    def texts(self) -> dict[str, list[str]]:
        """One text per message, by argument. It is as long as the prompt, so it is not kept."""
        return {
            name: ["\n".join(texts) for texts in messages] for name, messages in self.parts.items()
        }


class _EstimatedTokens(NamedTuple):
    """The estimated tokens of a call, and the output tokens among them."""

    total: int
    output: int


def estimated_tokens(arguments: Mapping[str, Any], *, writes: bool = True) -> _EstimatedTokens:
    """Estimate the tokens of a call by its prompt and its output limit.

    `writes` is False for embeddings, which have no output tokens.
    """
    output_tokens = _output_limit(arguments) if writes else 0
    return _EstimatedTokens(read_prompt(arguments).tokens + output_tokens, output_tokens)


def _output_limit(arguments: Mapping[str, Any]) -> int:
    for name in _OUTPUT_LIMITS:
        limit = arguments.get(name)
        if isinstance(limit, int):
            return int(limit)
    return EXPECTED_OUTPUT_TOKENS


def read_prompt(arguments: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a call with these arguments, schemas included."""
    model = str(arguments.get("model") or "")
    char_count = sum(
        _schema_chars(arguments[name]) for name in _SCHEMA_ARGUMENTS if arguments.get(name)
    )
    media_tokens = 0
    parts: dict[str, list[tuple[str, ...]]] = {}
    for name in _PROMPT_ARGUMENTS:
        value = argument_of(arguments, name)
        if value is None:
            continue
        is_list = isinstance(value, list | tuple) and not _are_token_ids(value)
        parts[name] = []
        for message in value if is_list else (value,):
            plain_texts = _plain_texts(message)
            if plain_texts is not None:
                parts[name].append(plain_texts)
                char_count += sum(map(len, plain_texts))
                continue
            pieces = list(_pieces(message, model))
            parts[name].append(tuple(piece.text for piece in pieces))
            char_count += sum(len(piece.text) for piece in pieces if piece.tokens is None)
            media_tokens += sum(piece.tokens or 0 for piece in pieces)
    return Prompt(parts, char_count // CHARS_PER_TOKEN + media_tokens)


def argument_of(arguments: Mapping[str, Any], name: str) -> Any:
    """Return an argument, or None if it was not passed.

    `stream` and `parse` of openai pass all arguments on, and a mark for those that were not passed.
    """
    value = arguments.get(name)
    return None if type(value).__name__ in ("Omit", "NotGiven") else value


def _plain_texts(value: Any) -> tuple[str, ...] | None:
    """Return the texts of a text, or of a message that has only a role and a text.

    Most prompts consist of these. `_pieces` would find the same, but takes longer. Return None for
    anything else.
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


def _pieces(value: Any, model: str) -> Iterator[Piece]:
    """Yield the pieces of a message, of a part of one, or of a value in it."""
    if isinstance(value, str):
        yield _data_url(value, model) if value.startswith("data:") else Piece(value)
    elif isinstance(value, list | tuple):
        if _are_token_ids(value):
            yield Piece(" ".join(map(str, value)), len(value))
        else:
            for item in value:
                yield from _pieces(item, model)
    elif isinstance(value, Mapping):
        yield from _pieces_of_mapping(value, model)
    else:
        yield from _pieces_of_object(value, model)


def _pieces_of_mapping(value: Mapping[str, Any], model: str) -> Iterator[Piece]:
    """Yield the pieces of a message or of a part of one, medium or text."""
    part_type = str(value.get("type", ""))
    read_medium = _MEDIA_READERS.get(part_type)
    if read_medium is not None:
        yield from read_medium(value, model)
        return
    label = value.get("role") or ("" if part_type.endswith("text") else part_type)
    if label:
        yield Piece(str(label))
    for name in _TEXT_FIELDS:
        field = value.get(name)
        if not field:
            continue
        # The arguments of a tool may be any JSON.
        if name in ("input", "arguments") and isinstance(field, Mapping):
            yield Piece(str(field))
        else:
            yield from _pieces(field, model)


def _pieces_of_object(value: Any, model: str) -> Iterator[Piece]:
    """Yield the pieces of an object of pydantic 2 or 1, or the text of any other object."""
    dump = getattr(value, "model_dump", None) or getattr(value, "dict", None)
    if dump is None:
        yield Piece(str(value))
    else:
        yield from _pieces(dump(), model)


def _are_token_ids(value: Any) -> bool:
    return bool(value) and isinstance(value, list | tuple) and type(value[0]) is int


def _data_url(url: str, model: str, detail: str = "") -> Piece:
    """Return the piece for a data URL, by the media type that it names."""
    prefix, _, data = url.partition(",")
    if prefix.startswith("data:audio"):
        return Piece(f"[sound: {len(data)}]", sound_tokens(data))
    if prefix.startswith("data:image"):
        return _picture_piece(data, model, detail)
    return Piece(f"[file: {len(data)}]", file_tokens(data))


def _picture_piece(base64: str, model: str, detail: str) -> Piece:
    size = picture_size(base64) or UNKNOWN_SIZE
    return Piece(
        f"[picture: {size[0]} x {size[1]}, {len(base64)}]", picture_tokens(model, size, detail)
    )


def _picture(part: Mapping[str, Any], model: str) -> Iterator[Piece]:
    """Yield the piece of a picture of chat, of the Responses API or of Anthropic."""
    source = part.get("image_url") or part.get("source") or part.get("file_id") or ""
    fields: Mapping[str, Any] = source if isinstance(source, Mapping) else {"url": source}
    detail = str(fields.get("detail") or part.get("detail") or "")
    url = str(fields.get("url") or fields.get("file_id") or "")
    data = fields.get("data")
    if isinstance(data, str):
        yield _picture_piece(data, model, detail)
    elif url.startswith("data:"):
        yield _picture_piece(url.partition(",")[2], model, detail)
    else:
        yield Piece(url, picture_tokens(model, UNKNOWN_SIZE, detail))


def _sound(part: Mapping[str, Any], _model: str) -> Iterator[Piece]:
    """Yield the piece of `input_audio`."""
    audio = part.get("input_audio")
    data = str(audio.get("data") or "") if isinstance(audio, Mapping) else ""
    yield Piece(f"[sound: {len(data)}]", sound_tokens(data))


def _file(part: Mapping[str, Any], model: str) -> Iterator[Piece]:
    """Yield the pieces of `file` of chat, `input_file` of responses, or `document` of Anthropic."""
    fields = part
    for name in ("file", "source"):
        if isinstance(part.get(name), Mapping):
            fields = part[name]
            break
    data = fields.get("file_data") or fields.get("data")
    if fields.get("type") == "text" or fields.get("content"):
        yield from _pieces(data or fields.get("content"), model)
    elif isinstance(data, str):
        yield Piece(f"[file: {len(data)}]", file_tokens(data))
    else:
        yield Piece(_file_name(fields), file_tokens(""))


def _file_name(fields: Mapping[str, Any]) -> str:
    """Return the id, the URL or the name of a file, or an empty string."""
    for name in ("file_id", "file_url", "url", "filename"):
        if fields.get(name):
            return str(fields[name])
    return ""


_MEDIA_READERS: dict[str, Callable[[Mapping[str, Any], str], Iterator[Piece]]] = {
    "image_url": _picture,
    "input_image": _picture,
    "image": _picture,
    "computer_screenshot": _picture,
    "input_audio": _sound,
    "file": _file,
    "input_file": _file,
    "document": _file,
}
"""The type of a part of a message that is no text -> the function that reads it."""


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
