"""Decode JSON files that loadgen wrote, and encode JSON lines.

A file may come from a stranger, so its texts are made harmless for a terminal and for pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from loadgen.core import format
from loadgen.core.errors import UserError

ContentT = TypeVar("ContentT")

DAMAGED_HINT = "use the original file: this one was changed or damaged"


class _Version(msgspec.Struct):
    """The version of the schema of a file."""

    schema: int


def decode_json(
    data: bytes,
    content_type: type[ContentT],
    where: str,
    description: str,
    hint: str = DAMAGED_HINT,
    *,
    schema: int | None = None,
    verbatim: bool = False,
) -> ContentT:
    """Return the decoded content of a JSON file.

    By default, control characters in its texts become visible text, so that a file of a stranger
    cannot control the terminal on which the texts are printed.

    Args:
        data: The bytes of the file.
        content_type: The type of the content, which msgspec checks.
        where: The name of the file, for error messages.
        description: What the file should contain, for error messages, such as "the manifest of a
            run".
        hint: What the user can do about a damaged file, for error messages.
        schema: The number of the newest version of the file format that can be read. None if the
            file has no version.
        verbatim: Whether control characters in texts stay as they are.

    Raises:
        UserError: The content is of another type, or the file has a newer version than `schema`.
    """
    json_text = data if verbatim else format.escape_control_characters(data)
    if schema is not None:
        _check_version(json_text, schema, where, description, hint)

    try:
        return msgspec.json.decode(json_text, type=content_type)
    except (ValueError, RecursionError) as error:
        raise UserError(
            "damaged_file", message=f"not {description}: {error}", where=where, hint=hint
        ) from None


def encode_json_lines(values: Iterable[object]) -> bytes:
    """Return one line of JSON per value."""
    return b"".join(msgspec.json.encode(value) + b"\n" for value in values)


def decode_json_lines(lines: Iterable[bytes], content_type: type[ContentT]) -> Iterator[ContentT]:
    """Yield the values of JSON lines up to the first damaged one.

    The last line of a file may be incomplete, because its writer was killed.
    """
    decoder = msgspec.json.Decoder(content_type)
    with contextlib.suppress(ValueError, RecursionError):
        for line in lines:
            yield decoder.decode(format.escape_control_characters(line))


def _check_version(data: bytes, newest: int, where: str, description: str, hint: str) -> None:
    """Raise UserError unless `data` is a JSON object with a version from 1 to `newest`."""
    try:
        version = msgspec.json.decode(data, type=_Version).schema
    except (ValueError, RecursionError) as error:
        raise UserError("wrong_format", f"not {description}: {error}", where, hint) from None

    if version > newest:
        message = (
            f"written by a newer loadgen (schema {version}, this version reads up to {newest})"
        )
        raise UserError("newer_version", message, where, "update loadgen: pip install -U loadgen")

    if version < 1:
        raise UserError("damaged_file", f"schema {version} does not exist", where, DAMAGED_HINT)
