"""What a call's prompt consists of, for every API: its texts, and an estimate of its tokens. Pure.

Pictures, sounds and files have tokens, and a short text in their place: their base64 is neither
counted as text nor hashed into a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from .media_tokens import UNKNOWN_SIZE, file_tokens, picture_size, picture_tokens, sound_tokens

CHARS_PER_TOKEN = (
    4  # for English in common vocabularies; an estimate that the answer's usage corrects
)
EXPECTED_OUTPUT = 256  # tokens, when the call sets no limit
_PROMPT = (
    "instructions",
    "system",
    "messages",
    "prompt",
    "input",
)  # arguments, in the order of the prompt
_SCHEMAS = (
    "tools",
    "functions",
    "response_format",
    "text",
    "text_format",
)  # sent as JSON; they count, as text
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
    """A part of a prompt. tokens: of what is no text; None: its characters count."""

    text: str
    tokens: int | None = None


class Prompt(NamedTuple):
    """parts: by argument, the texts of each message. tokens: an estimate of all of them."""

    parts: dict[str, list[tuple[str, ...]]]
    tokens: int

    @property
    def texts(self) -> dict[str, list[str]]:
        """By argument, one for each message. Made when asked for: they are as long as the prompt."""
        return {name: ["\n".join(one) for one in several] for name, several in self.parts.items()}


def estimated_tokens(arguments: Mapping[str, Any], *, writes: bool = True) -> tuple[int, int]:
    """Estimated tokens of a call, by its prompt and output limit, until the server counts: (all,
    output).

    writes: False for embeddings, which have no output tokens.
    """
    output = 0
    if writes:
        limits = (
            arguments[name] for name in _OUTPUT_LIMITS if isinstance(arguments.get(name), int)
        )
        output = int(next(limits, EXPECTED_OUTPUT))
    return read_prompt(arguments).tokens + output, output


def read_prompt(arguments: Mapping[str, Any]) -> Prompt:
    """The prompt of a call with these arguments: instructions or system, messages, prompt, input,
    and schemas.
    """
    model = str(arguments.get("model") or "")
    chars, tokens = (
        sum(_schema_chars(arguments[name]) for name in _SCHEMAS if arguments.get(name)),
        0,
    )
    parts: dict[str, list[tuple[str, ...]]] = {}
    for name in _PROMPT:
        if (value := argument_of(arguments, name)) is None:
            continue
        is_list = isinstance(value, list | tuple) and not _are_ids(value)
        parts[name] = []
        for item in value if is_list else (value,):
            if (plain := _plain_text(item)) is not None:
                parts[name].append(plain)
                chars += sum(map(len, plain))
                continue
            pieces = [*_pieces(item, model)]
            parts[name].append(tuple(piece.text for piece in pieces))
            for piece in pieces:
                chars += len(piece.text) if piece.tokens is None else 0
                tokens += piece.tokens or 0
    return Prompt(parts, chars // CHARS_PER_TOKEN + tokens)


def argument_of(arguments: Mapping[str, Any], name: str) -> Any:
    """An argument, None where there is none: `stream` and `parse` of openai pass on all, with a
    mark for each other.
    """
    value = arguments.get(name)
    return None if type(value).__name__ in ("Omit", "NotGiven") else value


def _plain_text(value: Any) -> tuple[str, ...] | None:
    """The texts of what most prompts consist of, a text or a message with a role and a text,
    without the walk of `_pieces`, which finds the same; None for what is more.
    """
    text: Any = value
    role: Any = "-"
    if type(value) is dict and len(value) == 2:
        text, role = value.get("content"), value.get("role")
    if (
        type(text) is not str
        or type(role) is not str
        or not text
        or not role
        or text.startswith("data:")
    ):
        return None
    return (text,) if text is value else (role, text)


def _pieces(value: Any, model: str) -> Iterator[Piece]:
    """The pieces of a message, of a part of one, or of a value in it."""
    if isinstance(value, str):
        yield _data_url(value, model) if value.startswith("data:") else Piece(value)
    elif isinstance(value, list | tuple):
        if _are_ids(value):
            yield Piece(" ".join(map(str, value)), len(value))
        else:
            for item in value:
                yield from _pieces(item, model)
    elif isinstance(value, Mapping):
        kind = str(value.get("type", ""))
        if (medium := _MEDIA.get(kind)) is not None:
            yield from medium(value, model)
        else:
            if label := value.get("role") or ("" if kind.endswith("text") else kind):
                yield Piece(str(label))
            for name in _TEXT_FIELDS:
                if inner := value.get(name):
                    plain = name in ("input", "arguments") and isinstance(
                        inner, Mapping
                    )  # of a tool: any JSON
                    yield from (Piece(str(inner)),) if plain else _pieces(inner, model)
    elif (dump := getattr(value, "model_dump", None)) is not None or (
        dump := getattr(value, "dict", None)
    ) is not None:
        yield from _pieces(dump(), model)
    else:
        yield Piece(str(value))


def _are_ids(value: Any) -> bool:
    return bool(value) and isinstance(value, list | tuple) and type(value[0]) is int


def _data_url(url: str, model: str, detail: str = "") -> Piece:
    """What a data URL holds, by the type that it names."""
    kind, _, data = url.partition(",")
    if kind.startswith("data:audio"):
        return Piece(f"[sound: {len(data)}]", sound_tokens(data))
    if kind.startswith("data:image"):
        return _picture_piece(data, model, detail)
    return Piece(f"[file: {len(data)}]", file_tokens(data))


def _picture_piece(base64: str, model: str, detail: str) -> Piece:
    size = picture_size(base64) or UNKNOWN_SIZE
    return Piece(
        f"[picture: {size[0]} x {size[1]}, {len(base64)}]", picture_tokens(model, size, detail)
    )


def _picture(part: Mapping[str, Any], model: str) -> Iterator[Piece]:
    """`image_url` of chat, `input_image` of responses, `image` of Anthropic."""
    inner = part.get("image_url") or part.get("source") or part.get("file_id") or ""
    fields: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {"url": inner}
    detail = str(fields.get("detail") or part.get("detail") or "")
    url, data = str(fields.get("url") or fields.get("file_id") or ""), fields.get("data")
    if isinstance(data, str):
        yield _picture_piece(data, model, detail)
    elif url.startswith("data:"):
        yield _picture_piece(url.partition(",")[2], model, detail)
    else:
        yield Piece(url, picture_tokens(model, UNKNOWN_SIZE, detail))


def _sound(part: Mapping[str, Any], model: str) -> Iterator[Piece]:
    inner = part.get("input_audio")
    data = str(inner.get("data") or "") if isinstance(inner, Mapping) else ""
    yield Piece(f"[sound: {len(data)}]", sound_tokens(data))


def _file(part: Mapping[str, Any], model: str) -> Iterator[Piece]:
    """`file` of chat, `input_file` of responses, `document` of Anthropic."""
    fields = next(
        (part[name] for name in ("file", "source") if isinstance(part.get(name), Mapping)), part
    )
    data = fields.get("file_data") or fields.get("data")
    if fields.get("type") == "text" or fields.get("content"):
        yield from _pieces(data or fields.get("content"), model)
    elif isinstance(data, str):
        yield Piece(f"[file: {len(data)}]", file_tokens(data))
    else:
        names = (fields.get(name) for name in ("file_id", "file_url", "url", "filename"))
        yield Piece(str(next(filter(None, names), "")), file_tokens(""))


_MEDIA: dict[str, Callable[[Mapping[str, Any], str], Iterator[Piece]]] = {
    "image_url": _picture,
    "input_image": _picture,
    "image": _picture,
    "computer_screenshot": _picture,
    "input_audio": _sound,
    "file": _file,
    "input_file": _file,
    "document": _file,
}
"""What reads a part of a message that is no text, by its type."""


def _schema_chars(value: Any) -> int:
    """Characters of tools, or of the schema of an answer, as JSON."""
    if isinstance(value, type):
        return _class_chars(value)
    try:
        return len(msgspec.json.encode(value, enc_hook=_plain))
    except (TypeError, ValueError):
        return 0


@functools.lru_cache(maxsize=256)
def _class_chars(model: type) -> int:
    """Of an answer's class (pydantic's): the size of its JSON schema, which takes long to make."""
    make_schema = getattr(model, "model_json_schema", None)
    return 0 if make_schema is None else len(msgspec.json.encode(make_schema(), enc_hook=str))


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return str(value) if dump is None else dump()
