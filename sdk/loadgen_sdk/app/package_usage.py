"""Read the token counts in the objects of the openai and anthropic packages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..request import Usage
from ..wire_formats.implementation import token_count
from ..wire_formats.usage import check_usage
from .measurement import Api

MESSAGES_INPUT_FIELDS = (
    "input_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
)
"""The counts of Anthropic's messages whose sum is the prompt."""

_NO_FIELDS: Mapping[str, object] = {}


class _UsageNames(NamedTuple):
    """The names of the fields of an object with token counts (a `usage`) in one API."""

    prompt: str
    output: str
    prompt_details: str
    output_details: str


_CHAT_NAMES = _UsageNames(
    "prompt_tokens",
    "completion_tokens",
    "prompt_tokens_details",
    "completion_tokens_details",
)
_RESPONSE_NAMES = _UsageNames(
    "input_tokens",
    "output_tokens",
    "input_tokens_details",
    "output_tokens_details",
)
_APIS_LIKE_RESPONSES = ("responses", "batches", "images", "transcriptions")
"""The APIs whose usage has the field names of the Responses API. Others have those of chat."""


def read_usage(api: Api, usage: object) -> Usage:
    """Return the token counts in the field `usage` of a response.

    The APIs of OpenAI have the same counts under different names. Chat has `prompt_tokens`, for
    example, and the Responses API has `input_tokens`. Counts that contradict each other are marked
    (`check_usage`).

    Args:
        api: The API of the response.
        usage: The field, or None if the server has sent no counts.
    """
    if usage is None:
        return Usage()
    if api == "messages":
        return _read_messages_usage(usage)

    names = _RESPONSE_NAMES if api in _APIS_LIKE_RESPONSES else _CHAT_NAMES
    counts = _fields_of(usage)
    prompt_details = _fields_of(counts.get(names.prompt_details))
    output_details = _fields_of(counts.get(names.output_details))

    output_tokens = token_count(counts.get(names.output))
    if api == "embeddings":
        output_tokens = 0  # Servers leave out a count that is always 0.

    server_usage = Usage(
        input=token_count(counts.get(names.prompt)),
        output=output_tokens,
        cached=token_count(_cached_tokens(prompt_details, counts)),
        reasoning=token_count(output_details.get("reasoning_tokens")),
        cache_written=token_count(_cache_written_tokens(prompt_details, counts)),
    )
    total_tokens = token_count(counts.get("total_tokens"))
    return check_usage(server_usage, total_tokens)


def _read_messages_usage(usage: object) -> Usage:
    """Return the token counts of a message of Anthropic.

    Its prompt is the sum of three counts: tokens from the cache, tokens written to the cache, and
    all others. The names are those in MESSAGES_INPUT_FIELDS.
    """
    uncached_tokens = token_count(getattr(usage, "input_tokens", None))
    cached_tokens = token_count(getattr(usage, "cache_read_input_tokens", None))
    written_tokens = token_count(getattr(usage, "cache_creation_input_tokens", None))

    prompt_tokens = None
    if uncached_tokens is not None:
        prompt_tokens = uncached_tokens + (cached_tokens or 0) + (written_tokens or 0)

    return check_usage(
        Usage(
            input=prompt_tokens,
            output=token_count(getattr(usage, "output_tokens", None)),
            cached=cached_tokens,
            cache_written=written_tokens,
        )
    )


def _cached_tokens(prompt_details: Mapping[str, object], counts: Mapping[str, object]) -> object:
    """Return the count of prompt tokens that came from a cache, or None.

    OpenAI has it in the details of the prompt. Other servers have it next to the other counts,
    under one of the names below. The first count that exists is returned.
    """
    cached_tokens = prompt_details.get("cached_tokens")
    if cached_tokens is not None:
        return cached_tokens
    for name in ("cache_read_input_tokens", "prompt_cache_hit_tokens", "cached_tokens"):
        if counts.get(name) is not None:
            return counts[name]
    return None


def _cache_written_tokens(
    prompt_details: Mapping[str, object], counts: Mapping[str, object]
) -> object:
    """Return the count of prompt tokens that were written to a cache, or None.

    OpenAI has it in the details of the prompt, and gateways in front of Anthropic have it outside.
    """
    written_tokens = prompt_details.get("cache_write_tokens")
    if written_tokens is None:
        written_tokens = counts.get("cache_creation_input_tokens")
    return written_tokens


def _fields_of(usage_part: object) -> Mapping[str, object]:
    """Return the fields of a usage or of its details, by their names.

    A mapping is returned, because it is read faster: for a field that a pydantic object does not
    have, `getattr` takes about 1 microsecond.

    Args:
        usage_part: A dictionary, an object of pydantic, or None, which has no fields.
    """
    if isinstance(usage_part, dict):
        return usage_part

    declared_fields: Mapping[str, object] = getattr(usage_part, "__dict__", _NO_FIELDS)

    # pydantic stores the fields that its class does not declare in another dictionary.
    undeclared_fields = getattr(usage_part, "__pydantic_extra__", None)
    if not undeclared_fields:
        return declared_fields

    return {**undeclared_fields, **declared_fields}
