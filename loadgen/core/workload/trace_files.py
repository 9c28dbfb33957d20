"""Open trace files: plain, gzip or zstd, as numbered lines."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgen.core.errors import UserError, of_reading
from loadgen.core.workload.trace_formats import describe_known_formats

MAX_LINE_CHARACTERS = 100_000_000
PARQUET_MARK = b"PAR1"
COMPRESSION_OF_MARK = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""Maps the first bytes of a file to its compression."""
MARK_BYTES = 4

NumberedLine = tuple[int, str]
"""The number of a line, counted from 1, and the line."""


def is_parquet(path: Path) -> bool:
    """Return True if a file is in Parquet. Raises UserError if it cannot be read."""
    return _read_first_bytes(path) == PARQUET_MARK


@contextlib.contextmanager
def open_lines(
    path: Path, max_characters: int = MAX_LINE_CHARACTERS
) -> Iterator[Iterator[NumberedLine]]:
    """Open a text file and return its lines that are not blank, with their numbers.

    Lines have at most `max_characters`. Without a limit, a small compressed file could contain one
    line that does not fit into memory. Raises UserError if the file cannot be read.
    """
    compression = _find_compression(_read_first_bytes(path))
    try:
        stream = _open_stream(path, compression)
        with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
            yield _number_lines(text, path, max_characters)
    except UnicodeDecodeError:
        problem = "not a UTF-8 text file"
        raise UserError("wrong_encoding", problem, str(path), describe_known_formats()) from None
    except OSError as error:
        raise _describe_read_error(error, path, compression) from None


def _describe_read_error(error: OSError, path: Path, compression: str | None) -> UserError:
    """Return the error of a file that cannot be opened, read or decompressed."""
    # Libraries of compression raise OSError without a number for damaged files.
    if compression is not None and error.errno is None:
        problem = f"the {compression} file is truncated or damaged"
        hint = "copy it again, or decompress it first"
        return UserError("damaged_file", problem, str(path), hint)
    problem = f"cannot read the trace: {error.strerror or error}"
    return UserError(of_reading(error), problem, str(path))


def split_documents(lines: Iterator[NumberedLine]) -> Iterator[NumberedLine]:
    """Yield the lines of a JSONL file, or the objects of a JSON document as one line each.

    A JSONL file has one object per line, and its lines are yielded unchanged. A JSON document is a
    list of objects, or one object that extends over several lines.
    """
    first = next(lines, None)
    if first is None:
        return

    _, first_line = first
    may_begin_document = first_line.lstrip().startswith(("{", "["))
    if may_begin_document:
        # This takes as many lines from `lines` as a document may have. If they are no document,
        # they are yielded unchanged.
        document = _decode_document(first, lines)
        yield from _lines_of_document(document)
    else:
        yield first

    yield from lines  # Those that are left.


def _lines_of_document(decoded: _DecodedDocument) -> Iterable[NumberedLine]:
    """Return the objects of a JSON document as lines, or the lines that are no document."""
    extends_over_lines = len(decoded.lines_read) > 1
    if isinstance(decoded.value, list):
        return [_as_line(item) for item in decoded.value]
    if decoded.value is not None and extends_over_lines:
        return [_as_line(decoded.value)]
    return decoded.lines_read


class _DecodedDocument(NamedTuple):
    """A JSON value, or None if there is none, and the lines that were read to decode it."""

    value: Any
    lines_read: list[NumberedLine]


def _decode_document(first: NumberedLine, lines: Iterator[NumberedLine]) -> _DecodedDocument:
    """Decode the first line of a file as a JSON value. If it is none, decode all lines together.

    The JSON value `null` counts as none.

    Args:
        first: The first line of the file.
        lines: The lines after the first one. The lines that are read are taken from this iterator:
            at most about MAX_LINE_CHARACTERS, which bounds the memory.
    """
    _, first_line = first
    value = _decode_json(first_line)
    if value is not None:
        return _DecodedDocument(value, [first])

    # The document may extend over several lines.
    lines_read = [first]
    characters_read = 0
    for number, line in lines:
        lines_read.append((number, line))
        characters_read += len(line)
        if characters_read >= MAX_LINE_CHARACTERS:
            break

    value = _decode_json("".join(line for _, line in lines_read))
    return _DecodedDocument(value, lines_read)


def _decode_json(text: str) -> Any:
    """Return the JSON value of a text. Return None for the text `null`, and if it is no JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _as_line(value: object) -> NumberedLine:
    """Return a value as a line of JSON with the number 1, as its own line is not known."""
    return 1, msgspec.json.encode(value).decode()


def _find_compression(mark: bytes) -> str | None:
    """Return the compression of a file by its first bytes, or None if it is not compressed."""
    for known_mark, compression in COMPRESSION_OF_MARK.items():
        if mark.startswith(known_mark):
            return compression
    return None


def _open_stream(path: Path, compression: str | None) -> Any:
    """Return a binary stream of the content of a file, which is decompressed while it is read."""
    if compression is None:
        return path.open("rb")
    import pyarrow as pa

    return pa.input_stream(str(path), compression=compression)


def _read_first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file, which show its kind.

    Raises UserError if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(MARK_BYTES)
    except OSError as error:
        problem = f"cannot read the trace: {error.strerror}"
        raise UserError(of_reading(error), problem, str(path)) from None


def _number_lines(
    text: io.TextIOWrapper, path: Path, max_characters: int
) -> Iterator[NumberedLine]:
    """Yield the lines that are not blank, with their numbers from 1 on.

    Raises UserError for a line that is too long, without reading all of it.
    """
    number = 0
    # One character more than allowed shows that a line is too long.
    while line := text.readline(max_characters + 1):
        number += 1
        if len(line) > max_characters:
            problem = f"a line has more than {max_characters:,} characters"
            raise UserError("too_large", problem, f"{path}:{number}", describe_known_formats())
        if not line.isspace():
            yield number, line
