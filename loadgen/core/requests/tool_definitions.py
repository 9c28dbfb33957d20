"""Definitions of tools, as they are sent in the field `tools`, with a given number of tokens."""

from __future__ import annotations

import json
from typing import Any

from loadgen.core.requests.text_generator import TextGenerator
from loadgen.core.requests.tokenizer import Tokenizer

MAX_FITTING_ATTEMPTS = 8


def build_tool_definition(
    name: str, tokens: int, tokenizer: Tokenizer, texts: TextGenerator
) -> dict[str, Any]:
    """Return the definition of a tool that has so many tokens as compact JSON.

    The description has the tokens that the other parts leave. If no length of it gives exactly the
    requested number, the closest one is used.
    """

    def definition_with(description_tokens: int) -> dict[str, Any]:
        purpose = f"definition {name}"
        description = texts.exact_text(purpose, 0, max(1, description_tokens))
        return _tool_definition(name, description.text)

    def count_tokens(definition: dict[str, Any]) -> int:
        return tokenizer.count(json.dumps(definition, separators=(",", ":")))

    description_tokens = tokens - count_tokens(_tool_definition(name, "x"))
    best_description_tokens = description_tokens
    smallest_difference = tokens
    for _ in range(MAX_FITTING_ATTEMPTS):
        difference = tokens - count_tokens(definition_with(description_tokens))
        if abs(difference) < smallest_difference:
            best_description_tokens = description_tokens
            smallest_difference = abs(difference)
        if difference == 0:
            break
        description_tokens += difference
    return definition_with(best_description_tokens)


def _tool_definition(name: str, description: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
