"""Read the token counts in the objects of the openai and anthropic packages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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

_NO_FIELDS: dict[str, Any] = {}


class _UsageNames(NamedTuple):
    """The names of the fields of a usage."""

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
_APIS_WITH_RESPONSE_NAMES = ("responses", "batches", "images", "transcriptions")


def read_usage(api: Api, usage: Any) -> Usage:
    """Return the token counts in the `usage` of a response, which may be None.

    Counts that contradict each other are marked (`check_usage`).
    """
    if usage is None:
        return Usage()
    if api == "messages":
        return _read_messages_usage(usage)
    names = _RESPONSE_NAMES if api in _APIS_WITH_RESPONSE_NAMES else _CHAT_NAMES
    counts = _fields_of(usage)
    prompt_details = _fields_of(counts.get(names.prompt_details))
    output_details = _fields_of(counts.get(names.output_details))
    # OpenAI has this count in the details, and gateways in front of Anthropic have it outside.
    cache_written = prompt_details.get("cache_write_tokens")
    if cache_written is None:
        cache_written = counts.get("cache_creation_input_tokens")
    server_usage = Usage(
        input=token_count(counts.get(names.prompt)),
        output=0 if api == "embeddings" else token_count(counts.get(names.output)),
        cached=token_count(_cached_tokens(prompt_details, counts)),
        reasoning=token_count(output_details.get("reasoning_tokens")),
        cache_written=token_count(cache_written),
    )
    return check_usage(server_usage, token_count(counts.get("total_tokens")))


def _read_messages_usage(usage: Any) -> Usage:
    """Return the counts of a message of Anthropic.

    Its prompt is the sum of three counts: tokens from the cache, tokens written to the cache, and
    all others.
    """
    uncached, cached, written = (
        token_count(getattr(usage, name, None)) for name in MESSAGES_INPUT_FIELDS
    )
    prompt_tokens = None
    if uncached is not None:
        prompt_tokens = uncached + (cached or 0) + (written or 0)
    return check_usage(
        Usage(
            input=prompt_tokens,
            output=token_count(getattr(usage, "output_tokens", None)),
            cached=cached,
            cache_written=written,
        )
    )


def _cached_tokens(prompt_details: Mapping[str, Any], counts: Mapping[str, Any]) -> Any:
    """Return the prompt tokens from a cache, under any of the names in `UsageFields`."""
    cached = prompt_details.get("cached_tokens")
    for name in ("cache_read_input_tokens", "prompt_cache_hit_tokens", "cached_tokens"):
        if cached is None:
            cached = counts.get(name)
    return cached


def _fields_of(counts: Any) -> Mapping[str, Any]:
    """Return the fields of a usage object or of its details, by their names. None has no fields.

    Pydantic keeps fields that its class does not declare in `__pydantic_extra__`. `getattr` is not
    used for each field, because pydantic takes 1 us for a field that an object does not have.
    """
    if isinstance(counts, dict):
        return counts
    fields: Mapping[str, Any] = getattr(counts, "__dict__", _NO_FIELDS)
    extra_fields = getattr(counts, "__pydantic_extra__", None)
    return {**extra_fields, **fields} if extra_fields else fields
