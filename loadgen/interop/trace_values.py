"""Values that the rows of several trace formats have in common.

A mistake is raised as `InvalidValueError`. It gets the line of the row where the file is read.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from loadgen.core.format import shortened
from loadgen.core.units import NS_PER_S, UNIT_NS, InvalidValueError
from loadgen.core.workload.dataset_rows import BODY_FIELDS, FieldType, is_finish_reason
from loadgen.core.workload.trace_formats import (
    MAX_TIME_NS,
    UNKNOWN_NS,
    TraceRow,
    parse_duration_ns,
    parse_number,
    parse_time_ns,
    parse_token_count,
)

REQUEST_FIELDS = ("model", *BODY_FIELDS)
"""Fields of a row that become fields of its request."""
MAX_HASH_ID = (1 << 48) - 1
"""Larger ids of blocks are hashed to 48 bits, so that an id and a session fit into 64 bits."""

_UNIX_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_DATE_HINT = "write a date like 2023-11-16 18:15:46.6805900"
_SECONDS_PER_DAY = 86_400
_FRACTION_DIGITS = 9
"""The digits of a fraction of a second in ns."""


def parse_seconds(text: str) -> int:
    """Return the ns of a time in seconds, as it is written in a table."""
    return parse_time_ns(parse_number(text), float(NS_PER_S))


class _SplitDate(NamedTuple):
    """A date whose fraction of a second was removed.

    Attributes:
        whole_seconds: The text without the fraction.
        fraction_ns: The fraction.
    """

    whole_seconds: str
    fraction_ns: int


def parse_utc_date(text: str) -> int:
    """Return a date such as `2023-11-16 18:15:46.6805900` in ns since 1970.

    The date is in UTC unless the text has an offset such as +01:00.

    Raises:
        InvalidValueError: The text is no date, or the date is too far from 1970.
    """
    split_date = _split_fraction(text)
    try:
        date = datetime.datetime.fromisoformat(split_date.whole_seconds)
    except ValueError:
        raise _date_error(text) from None

    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)

    since_epoch = date - _UNIX_EPOCH
    seconds = since_epoch.days * _SECONDS_PER_DAY + since_epoch.seconds
    time_ns = seconds * NS_PER_S + split_date.fraction_ns
    if abs(time_ns) > MAX_TIME_NS:
        raise _date_error(text)

    return time_ns


def _split_fraction(text: str) -> _SplitDate:
    """Remove the fraction of a second from the text of a date.

    `datetime` has microseconds only, while traces have up to nanoseconds. For example,
    "2023-11-16 18:15:46.68059Z" is split into "2023-11-16 18:15:46Z" and 680,590,000 ns.
    """
    to_seconds, _, after_point = text.partition(".")
    offset = after_point.lstrip(string.digits)
    fraction_digits = after_point.removesuffix(offset)
    nanosecond_digits = fraction_digits[:_FRACTION_DIGITS].ljust(_FRACTION_DIGITS, "0")
    return _SplitDate(to_seconds + offset, int(nanosecond_digits))


def _date_error(text: str) -> InvalidValueError:
    return InvalidValueError("invalid_value", f"timestamp is {text!r}", _DATE_HINT, "timestamp")


def parse_duration(row: Mapping[str, object], field: str, unit_ns: int) -> int:
    """Return the ns of an optional duration of a row, UNKNOWN_NS if the row does not have it.

    Args:
        row: The row.
        field: The name of the field.
        unit_ns: The unit of the duration in the trace, in ns.

    Raises:
        InvalidValueError: It is no duration.
    """
    value = row.get(field)
    return UNKNOWN_NS if value is None else parse_duration_ns(value, field, float(unit_ns))


def parse_request(row: Mapping[str, object], at_ns: int) -> TraceRow:
    """Return the request of a row with the field names of Mooncake, which several formats share.

    Args:
        row: The row, with `input_length`, `output_length` and optional `hash_ids`.
        at_ns: When the request was sent.

    Raises:
        InvalidValueError: A field has a wrong value.
    """
    return TraceRow(
        at_ns=at_ns,
        input_tokens=parse_token_count(row.get("input_length"), "input_length", minimum=1),
        output_tokens=parse_token_count(row.get("output_length"), "output_length", minimum=0),
        hashes=parse_hash_ids(row),
        fields=parse_request_fields(row),
    )


def parse_session(row: Mapping[str, object]) -> str:
    """Return the name of the session of a row, "" if it has none."""
    return str(row.get("session_id") or "")


def parse_delay(row: Mapping[str, object]) -> int:
    """Return the ns of the pause before a request, written in ms, or UNKNOWN_NS."""
    return parse_duration(row, "delay", UNIT_NS["ms"])


def parse_request_fields(row: Mapping[str, object], fields: Sequence[str] = REQUEST_FIELDS) -> str:
    """Return the request parameters of a row, such as `temperature`, as the text of a JSON object.

    The result is "" if the row has none. A `stop` that is the name of a finish reason was recorded
    with the response and is no parameter.

    Raises:
        InvalidValueError: A parameter has a wrong type.
    """
    parameters = {field: row[field] for field in fields if row.get(field) is not None}
    if is_finish_reason(parameters.get("stop")):
        del parameters["stop"]

    for field, value in parameters.items():
        field_type = BODY_FIELDS.get(field, FieldType("a text", str))
        try:
            msgspec.convert(value, field_type.type)
        except msgspec.ValidationError:
            raise InvalidValueError(
                "wrong_type", f"{field} is {shortened(value)}", field_type.description, field
            ) from None

    return json.dumps(parameters, sort_keys=True) if parameters else ""


def parse_hash_ids(row: Mapping[str, object]) -> list[int]:
    """Return the ids of the blocks of a prompt as integers of at most 48 bits.

    Whole numbers up to MAX_HASH_ID stay as they are. Texts and larger numbers are hashed, because
    ids are kept in arrays of 64-bit integers.

    Raises:
        InvalidValueError: `hash_ids` is no list.
    """
    ids = row.get("hash_ids") or []
    if not isinstance(ids, list):
        raise InvalidValueError("wrong_type", f"hash_ids is {shortened(ids)}", "a list", "hash_ids")
    return [block_id if _is_small_id(block_id) else hash_to_id(block_id) for block_id in ids]


def _is_small_id(block_id: Any) -> bool:
    is_whole = isinstance(block_id, int) and not isinstance(block_id, bool)
    return is_whole and 0 <= block_id <= MAX_HASH_ID


def hash_to_id(value: object) -> int:
    """Return an id of 48 bits for a text or a large number. The same value has the same id."""
    digest = hashlib.blake2b(str(value).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


def dicts_in(value: object) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list. Other items, and a value that is no list, are skipped."""
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))
