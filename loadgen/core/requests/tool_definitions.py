"""Definitions of tools, as they are sent in the field `tools`, with a given number of tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from loadgen.core.requests.text_generator import TextGenerator
from loadgen.core.requests.tokenizer import Tokenizer

MAX_FITTING_ATTEMPTS = 8
"""The lengths of a description that are tried before the closest definition is used."""


class _FittingAttempt(NamedTuple):
    """A definition, and how many tokens it lacks. The number is negative if it has too many."""

    definition: dict[str, Any]
    missing_tokens: int


def build_tool_definition(
    name: str, tokens: int, tokenizer: Tokenizer, texts: TextGenerator
) -> dict[str, Any]:
    """Return the definition of a tool that has `tokens` tokens as compact JSON.

    Only the length of the description can be chosen. The tokens of the other parts are not known
    exactly, because a tokenizer may merge the ends of the description with the JSON around it. So
    a definition is built, its tokens are counted, and the length of the description is corrected by
    the difference, until the definition has exactly `tokens` tokens. If no attempt succeeds, the
    closest definition is returned.
    """
    shortest_definition = _tool_definition(name, description="x")
    description_tokens = tokens - _count_json_tokens(shortest_definition, tokenizer)

    attempts: list[_FittingAttempt] = []
    for _ in range(MAX_FITTING_ATTEMPTS):
        description = texts.exact_text(f"definition {name}", 0, max(1, description_tokens)).text
        definition = _tool_definition(name, description)
        missing_tokens = tokens - _count_json_tokens(definition, tokenizer)
        attempts.append(_FittingAttempt(definition, missing_tokens))
        if missing_tokens == 0:
            break
        description_tokens += missing_tokens

    closest_attempt = min(attempts, key=lambda attempt: abs(attempt.missing_tokens))
    return closest_attempt.definition


def _count_json_tokens(definition: Mapping[str, object], tokenizer: Tokenizer) -> int:
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
