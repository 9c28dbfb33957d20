"""Definitions of tools, as they are sent in the field `tools`, with a given number of tokens."""

from __future__ import annotations

import json
from typing import Any

from loadgen.core.requests.text_generator import TextGenerator
from loadgen.core.requests.tokenizer import Tokenizer

MAX_FITTING_ATTEMPTS = 8
"""The lengths of a description that are tried before the closest definition is used."""


def build_tool_definition(
    name: str, tokens: int, tokenizer: Tokenizer, texts: TextGenerator
) -> dict[str, Any]:
    """Return the definition of a tool that has `tokens` tokens as compact JSON.

    Only the length of the description can be chosen. The tokens of the other parts are not known
    exactly, because a tokenizer may merge the ends of the description with the JSON around it. So
    the description is made longer or shorter by the tokens that are missing, until the definition
    has the requested number. If no attempt gives exactly that, the closest definition is returned.
    """
    shortest_definition = _tool_definition(name, description="x")
    description_tokens = tokens - _count_json_tokens(shortest_definition, tokenizer)
    closest_definition = shortest_definition
    closest_difference: int | None = None
    for _ in range(MAX_FITTING_ATTEMPTS):
        description = texts.exact_text(f"definition {name}", 0, max(1, description_tokens)).text
        definition = _tool_definition(name, description)
        missing_tokens = tokens - _count_json_tokens(definition, tokenizer)
        if closest_difference is None or abs(missing_tokens) < closest_difference:
            closest_definition = definition
            closest_difference = abs(missing_tokens)
        if missing_tokens == 0:
            break
        description_tokens += missing_tokens
    return closest_definition


def _count_json_tokens(definition: dict[str, Any], tokenizer: Tokenizer) -> int:
    """Return the tokens of a definition as compact JSON, which is how it is sent."""
    return tokenizer.count(json.dumps(definition, separators=(",", ":")))


def _tool_definition(name: str, description: str) -> dict[str, Any]:
    """Return the definition of a function with one text argument, as the OpenAI API expects it."""
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
