"""How a file states the accepted length of speculative decoding."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from loadgen.core.accepted_lengths import AcceptedLengthTarget, parse_target


def _validate_target(value: object) -> AcceptedLengthTarget | None:
    """Return the accepted length that a value in a file stands for, or None without a value.

    The value is a number, a name, or an object in a stored workload.

    Raises:
        units.InvalidValueError: The value is no accepted length.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        return msgspec.convert(value, AcceptedLengthTarget)
    return parse_target(value)


AcceptedLengthField = Annotated[
    AcceptedLengthTarget | None,
    PlainValidator(_validate_target),
    PlainSerializer(msgspec.to_builtins),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 1}, {"type": "string"}]}),
]
