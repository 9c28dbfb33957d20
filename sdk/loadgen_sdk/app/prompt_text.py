"""The texts of a call's prompt, for each of the three APIs, and an estimate of their tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CHARS_PER_TOKEN = 4  # for English in common vocabularies; an estimate that the answer's usage corrects


EXPECTED_OUTPUT = 256  # tokens, when the call sets no limit


_OTHER_TEXT_FIELDS = ("tool_calls", "function_call", "output", "arguments", "name")


_OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def estimated_tokens(arguments: Mapping[str, Any], *, writes: bool = True) -> tuple[int, int]:
    """Estimated tokens of a call, by its text length and output limit, until the server counts: (all, output).

    writes: False for embeddings, which have no output tokens.
    """
    chars = sum(map(len, texts(arguments)))
    output = 0
    if writes:
        limits = (arguments[name] for name in _OUTPUT_LIMITS if isinstance(arguments.get(name), int))
        output = int(next(limits, EXPECTED_OUTPUT))
    return chars // CHARS_PER_TOKEN + output, output


def texts(arguments: Mapping[str, Any]) -> Iterable[str]:
    """Yield every text of a call's prompt in order: instructions or system, messages, prompt, input."""
    for name in ("instructions", "system", "messages", "prompt", "input"):
        value = arguments.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                yield message_text(item)


def message_text(message: Any) -> str:
    """The text of one message (or of one prompt in a list), after its role. An image counts by its reference."""
    if isinstance(message, str):
        return message
    if not isinstance(message, Mapping):
        dump = getattr(message, "model_dump", None)
        if dump is None:
            return str(message)
        message = dump()
    content = message.get("content")
    lines = [str(message.get("role", message.get("type", "")))]
    if isinstance(content, str):
        lines.append(content)
    elif isinstance(content, list | tuple):
        parts = (part for part in content if isinstance(part, Mapping))
        lines += (str(part.get("text") or part.get("image_url") or part.get("refusal") or "") for part in parts)
    lines += (str(message[name]) for name in _OTHER_TEXT_FIELDS if message.get(name))
    return "\n".join(lines)
