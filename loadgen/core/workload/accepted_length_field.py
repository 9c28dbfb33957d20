"""How a file states the accepted length of speculative decoding."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from loadgen.core.accepted_lengths import AcceptedLengthTarget, parse_target


def _parse_field_value(value: object) -> AcceptedLengthTarget | None:
    """Return the accepted length that a file states, or None if it states none.

    A workload file of a user has a number of tokens per step of the model, or the name of a
    published length. A workload that was stored with a run has an object with both.

    Raises:
        units.InvalidValueError: The number is out of range, or the name is unknown.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        return msgspec.convert(value, AcceptedLengthTarget)
    return parse_target(value)


AcceptedLengthField = Annotated[
    AcceptedLengthTarget | None,
    PlainValidator(_parse_field_value),
    PlainSerializer(msgspec.to_builtins),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 1}, {"type": "string"}]}),
]
