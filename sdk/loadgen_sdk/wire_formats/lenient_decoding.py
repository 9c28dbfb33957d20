"""Reads events that a strict decoder refuses: keeps what can be read and drops the rest. Pure."""

from __future__ import annotations

import json
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

_RAW_FIELDS = ("error", "message", "detail", "timings", "nvext", "metrics")


def decode_leniently(text: bytes) -> Any:
    """Return the value of JSON that a strict decoder may refuse.

    Half of a surrogate pair and bytes that are not UTF-8 become U+FFFD, numbers may be larger than
    a double holds, and a byte order mark may stand first. Raises one of NOT_JSON.
    """
    try:
        return decode_any(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # The latter is raised by msgspec 0.21.
        return _replace_half_surrogates(json.loads(text.decode("utf-8-sig", "replace")))


def _replace_half_surrogates(value: Any) -> Any:
    """Return a JSON value in which halves of surrogate pairs are replaced by U+FFFD."""
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


def read_event(value: dict[str, Any]) -> EventFields:
    """Return an event of which some fields have other types than usual."""
    choices = value.get("choices")
    usage = value.get("usage")
    raw_fields: dict[str, Any] = {name: _raw(value.get(name)) for name in _RAW_FIELDS}
    return EventFields(
        choices=_read_choices(choices) if isinstance(choices, list) else None,
        usage=None if usage is None else _read_counts(usage),
        **raw_fields,
    )


def _read_choices(choices: list[Any]) -> list[ChoiceFields]:
    return [_read_choice(choice) for choice in choices if isinstance(choice, dict)]


def _read_choice(choice: dict[str, Any]) -> ChoiceFields:
    return ChoiceFields(
        delta=_read_delta(choice.get("delta")),
        text=_read_text(choice.get("text")),
        finish_reason=_read_text(choice.get("finish_reason")),
        token_ids=_read_token_ids(choice.get("token_ids")),
        message=_read_delta(choice.get("message")),
    )


def _read_delta(value: Any) -> DeltaFields | None:
    if not isinstance(value, dict):
        return None
    return DeltaFields(
        content=_read_text(value.get("content")),
        reasoning_content=_read_text(value.get("reasoning_content")),
        reasoning=_read_text(value.get("reasoning")),
        tool_calls=_raw(value.get("tool_calls")),
        function_call=_raw(value.get("function_call")),
        refusal=_read_text(value.get("refusal")),
        token_ids=_read_token_ids(value.get("token_ids")),
    )


def _read_text(value: Any) -> str | None:
    """Return a text, or the joined texts of a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    texts = [part.get("text") for part in value if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str)) or None


def _read_token_ids(value: Any) -> list[int] | None:
    if not isinstance(value, list):
        return None
    return [token_id for token_id in value if isinstance(token_id, int)]


def _raw(value: Any) -> msgspec.Raw:
    return ABSENT if value is None else msgspec.Raw(msgspec.json.encode(value))


def read_counts(value: dict[str, Any]) -> UsageFields:
    """Return the counts of a usage object."""
    try:
        return msgspec.convert(value, UsageFields)
    except msgspec.ValidationError:
        return _read_counts(value)


def _read_counts(value: Any) -> UsageFields:
    """Return the counts of a usage of which some are no integers.

    Output tokens that are no count become _INVALID_COUNT.
    """
    if not isinstance(value, dict):
        return UsageFields()
    counts: dict[str, Any] = {}
    for name in UsageFields.__struct_fields__:
        if name not in value:
            continue
        if name.endswith("_details"):
            counts[name] = _read_details(value[name])
        else:
            counts[name] = token_count(value[name])
    for name in ("completion_tokens", "output_tokens"):
        if value.get(name) is not None and counts[name] is None:
            counts[name] = _INVALID_COUNT
    return UsageFields(**counts)


def _read_details(value: Any) -> CountDetails | None:
    if not isinstance(value, dict):
        return None
    names = CountDetails.__struct_fields__
    return CountDetails(**{name: token_count(value.get(name)) for name in names})
