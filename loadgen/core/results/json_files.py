"""Decode JSON files that loadgen wrote.

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

    Args:
        data: The bytes of the file.
        content_type: The type of the content.
        where: The name of the file, for errors.
        description: What the file should contain, for errors, such as "the manifest of a run".
        hint: What the user can do about a damaged file.
        schema: The newest version of the schema that can be read. None if the file has no version.
        verbatim: Keep texts as they are. By default, control characters become visible text, so
            that a text cannot control the terminal on which it is printed.

    Raises UserError if the content is of another type, or is newer than `schema`.
    """
    if not verbatim:
        data = format.harmless(data)
    if schema is not None:
        _check_version(data, schema, where, description, hint)
    try:
        return msgspec.json.decode(data, type=content_type)
    except (ValueError, RecursionError) as error:
        raise UserError("damaged_file", f"not {description}: {error}", where, hint) from None


def decode_json_lines(lines: Iterable[bytes], content_type: type[ContentT]) -> Iterator[ContentT]:
    """Yield the values of JSON lines up to the first damaged one.

    The last line of a file may be incomplete, because its writer was killed.
    """
    decoder = msgspec.json.Decoder(content_type)
    with contextlib.suppress(ValueError, RecursionError):
        for line in lines:
            yield decoder.decode(format.harmless(line))


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
