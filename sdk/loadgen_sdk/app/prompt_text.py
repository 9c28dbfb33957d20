"""The texts of a call's prompt, whichever API it is for, and how many tokens they may be. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CHARS_PER_TOKEN = 4  # of English in the vocabularies in use; an estimate that the answer's usage corrects


EXPECTED_OUTPUT = 256  # tokens, where a call names no limit


_FURTHER = ("tool_calls", "function_call", "output", "arguments", "name")


_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def estimated_tokens(arguments: Mapping[str, Any]) -> int:
    """Tokens that a call may take, judged by its texts' length and its limit; the server's count replaces it later."""
    chars = sum(map(len, texts(arguments)))
    asked = next((arguments[name] for name in _LIMITS if isinstance(arguments.get(name), int)), EXPECTED_OUTPUT)
    return chars // CHARS_PER_TOKEN + int(asked)


def texts(arguments: Mapping[str, Any]) -> Iterable[str]:
    """Every text of a call's prompt, in order: messages, prompt or input, as the three APIs take them."""
    if isinstance(instructions := arguments.get("instructions"), str):
        yield instructions
    for name in ("messages", "prompt", "input"):
        value = arguments.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                yield message_text(item)


def message_text(message: Any) -> str:
    """The text of one message (or of one prompt of several), its role in front; pictures count by their reference."""
    if isinstance(message, str):
        return message
    if not isinstance(message, Mapping):
        get = getattr(message, "model_dump", None)
        if get is None:
            return str(message)
        message = get()
    content = message.get("content")
    said = [str(message.get("role", message.get("type", "")))]
    if isinstance(content, str):
        said.append(content)
    elif isinstance(content, list | tuple):
        parts = (part for part in content if isinstance(part, Mapping))
        said += (str(part.get("text") or part.get("image_url") or part.get("refusal") or "") for part in parts)
    said += (str(message[name]) for name in _FURTHER if message.get(name))
    return "\n".join(said)
