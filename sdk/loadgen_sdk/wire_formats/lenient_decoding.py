"""Reads events that a strict decoder refuses: keeps what can be read and drops the rest. Pure.

A single field of an unexpected type makes msgspec refuse the whole event. The functions here read
each field by itself, and take one of another type for missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .event_fields import (
    ABSENT,
    ChoiceFields,
    CountDetails,
    DeltaFields,
    EventFields,
    UsageFields,
    decode_any,
)
from .implementation import token_count

_INVALID_COUNT = -1
"""Stands for output tokens that are no count, so that they are not taken for missing ones."""

_OUTPUT_COUNTS = ("completion_tokens", "output_tokens")
"""The fields of a usage that state the output tokens, in the chat API and in the other APIs."""


def decode_leniently(text: bytes) -> Any:
    """Return the value of JSON that a strict decoder may refuse.

    Bytes that are not UTF-8 and half of a surrogate pair (one of the two code units of an emoji)
    become U+FFFD. Numbers may be larger than a double holds, and a byte order mark may stand first.
    Raises one of NOT_JSON.
    """
    try:
        return decode_any(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # msgspec 0.21 raises UnicodeDecodeError.
        valid_text = text.decode("utf-8-sig", "replace")
        return _replace_half_surrogates(json.loads(valid_text))


def _replace_half_surrogates(value: object) -> Any:
    """Return a JSON value in which halves of surrogate pairs are replaced by U+FFFD.

    A server that cuts an emoji between two tokens sends such a half, such as U+D83D. Python
    accepts it in a `str`, which could then not be encoded as UTF-8.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {
            _replace_half_surrogates(key): _replace_half_surrogates(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_replace_half_surrogates(item) for item in value]

    return value


def read_event(event: Mapping[str, object]) -> EventFields:
    """Return the fields of an event that `decode_event` refuses because a field has a wrong type.

    Such a field counts as missing, and all others are read, so that a server with a small mistake
    can be measured. Errors and timings may be of any type. They are returned as JSON, as
    `decode_event` does.
    """
    choices = event.get("choices")
    usage = event.get("usage")
    return EventFields(
        choices=_read_choices(choices) if isinstance(choices, list) else None,
        usage=None if usage is None else _read_counts(usage),
        error=_raw(event.get("error")),
        message=_raw(event.get("message")),
        detail=_raw(event.get("detail")),
        timings=_raw(event.get("timings")),
        nvext=_raw(event.get("nvext")),
        metrics=_raw(event.get("metrics")),
    )


def _read_choices(choices: Sequence[object]) -> list[ChoiceFields]:
    return [_read_choice(choice) for choice in choices if isinstance(choice, dict)]


def _read_choice(choice: Mapping[str, object]) -> ChoiceFields:
    """Return the fields of a choice, each of which may have another type than usual."""
    return ChoiceFields(
        delta=_read_delta(choice.get("delta")),
        text=_read_text(choice.get("text")),
        finish_reason=_read_text(choice.get("finish_reason")),
        token_ids=_read_token_ids(choice.get("token_ids")),
        message=_read_delta(choice.get("message")),
    )


def _read_delta(delta: object) -> DeltaFields | None:
    """Return the fields of a delta or of a message, or None if it is not an object."""
    if not isinstance(delta, dict):
        return None
    return DeltaFields(
        content=_read_text(delta.get("content")),
        reasoning_content=_read_text(delta.get("reasoning_content")),
        reasoning=_read_text(delta.get("reasoning")),
        tool_calls=_raw(delta.get("tool_calls")),
        function_call=_raw(delta.get("function_call")),
        refusal=_read_text(delta.get("refusal")),
        token_ids=_read_token_ids(delta.get("token_ids")),
    )


def _read_text(content: object) -> str | None:
    """Return a text, or the joined texts of a list of content parts, or None if there is none."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    part_texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(text for text in part_texts if isinstance(text, str)) or None


def _read_token_ids(token_ids: object) -> list[int] | None:
    if not isinstance(token_ids, list):
        return None
    return [token_id for token_id in token_ids if isinstance(token_id, int)]


def _raw(value: object) -> msgspec.Raw:
    """Return a value as JSON, as msgspec decodes a field of the type `Raw`."""
    return ABSENT if value is None else msgspec.Raw(msgspec.json.encode(value))


def read_counts(usage: Mapping[str, object]) -> UsageFields:
    """Return the counts of a usage object."""
    try:
        return msgspec.convert(usage, UsageFields)
    except msgspec.ValidationError:
        return _read_counts(usage)


def _read_counts(usage: object) -> UsageFields:
    """Return the token counts of a usage object in which some counts may be of a wrong type.

    A count of a wrong type, such as "12" or 1.5, is None, as if it were missing. Output tokens of a
    wrong type are _INVALID_COUNT instead, so that the probe can warn of a server that sends
    impossible numbers.
    """
    if not isinstance(usage, dict):
        return UsageFields()

    counts: dict[str, Any] = {}
    for name in UsageFields.__struct_fields__:
        if name not in usage:
            continue

        value = usage[name]
        is_object = name.endswith("_details")  # such as `prompt_tokens_details`
        if is_object:
            counts[name] = _read_details(value)
            continue

        counts[name] = token_count(value)
        is_invalid = value is not None and counts[name] is None
        if is_invalid and name in _OUTPUT_COUNTS:
            counts[name] = _INVALID_COUNT

    return UsageFields(**counts)


def _read_details(details: object) -> CountDetails | None:
    """Return the parts of a token count, or None if they are not in an object."""
    if not isinstance(details, dict):
        return None
    names = CountDetails.__struct_fields__
    return CountDetails(**{name: token_count(details.get(name)) for name in names})
