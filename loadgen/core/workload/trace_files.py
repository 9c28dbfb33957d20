"""Open trace files: plain, gzip or zstd, as numbered lines."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from loadgen.core.errors import UserError, of_reading
from loadgen.core.workload.trace_formats import known_formats

MAX_LINE_CHARACTERS = 100_000_000
PARQUET_MARK = b"PAR1"
COMPRESSION_OF_MARK = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""Maps the first bytes of a file to its compression."""
MARK_BYTES = 4

NumberedLine = tuple[int, str]
"""The number of a line, counted from 1, and the line."""


def is_parquet(path: Path) -> bool:
    """Return True if a file is in Parquet. Raises UserError if it cannot be read."""
    return _read_mark(path) == PARQUET_MARK


@contextlib.contextmanager
def open_lines(path: Path, longest: int = MAX_LINE_CHARACTERS) -> Iterator[Iterator[NumberedLine]]:
    """Open a text file and return its lines that are not blank, with their numbers.

    Lines have at most `longest` characters, because a few compressed kilobytes may be one line of
    any size. Raises UserError if the file cannot be read.
    """
    compression = _find_compression(_read_mark(path))
    try:
        stream = _open_stream(path, compression)
        with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
            yield _number_lines(text, path, longest)
    except UnicodeDecodeError:
        problem = "not a UTF-8 text file"
        raise UserError("wrong_encoding", problem, str(path), known_formats()) from None
    except OSError as error:
        # Libraries of compression raise OSError without a number for damaged files.
        if compression is not None and error.errno is None:
            problem = f"the {compression} file is truncated or damaged"
            hint = "copy it again, or decompress it first"
            raise UserError("damaged_file", problem, str(path), hint) from None
        problem = f"cannot read the trace: {error.strerror or error}"
        raise UserError(of_reading(error), problem, str(path)) from None


def split_documents(lines: Iterator[NumberedLine]) -> Iterator[NumberedLine]:
    """Yield the lines of a JSONL file, or the objects of a JSON document as one line each.

    A file may be one JSON document that extends over several lines: an object, or a list of
    objects. To find out, its first line is decoded, and then all lines together. If the file is no
    such document, these lines are yielded as they are.
    """
    first = next(lines, None)
    if first is None:
        return
    _, first_line = first
    if not first_line.lstrip().startswith(("{", "[")):
        yield first
        yield from lines
        return
    lines_read = [first]
    document = _decode_document(lines_read, lines)
    extends_over_lines = len(lines_read) > 1
    if isinstance(document, list):
        yield from (_as_line(item) for item in document)
    elif document is not None and extends_over_lines:
        yield _as_line(document)
    else:
        yield from lines_read
    yield from lines


def _decode_document(lines_read: list[NumberedLine], lines: Iterator[NumberedLine]) -> Any:
    """Return the JSON value of the first line, or of all lines together, or None if it is no JSON.

    Args:
        lines_read: Contains the first line. All further lines that are read are appended to it, so
            that the caller can still use them.
        lines: The lines after the first one. At most MAX_LINE_CHARACTERS are read.
    """
    _, first_line = lines_read[0]
    document = _decode_json(first_line)
    if document is not None:
        return document
    size = 0
    for number, line in lines:
        lines_read.append((number, line))
        size += len(line)
        if size >= MAX_LINE_CHARACTERS:
            break
    return _decode_json("".join(line for _, line in lines_read))


def _decode_json(text: str) -> Any:
    """Return a JSON value, or None if the text is no JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _as_line(value: Any) -> NumberedLine:
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


def _read_mark(path: Path) -> bytes:
    """Return the first bytes of a file. Raises UserError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MARK_BYTES)
    except OSError as error:
        problem = f"cannot read the trace: {error.strerror}"
        raise UserError(of_reading(error), problem, str(path)) from None


def _number_lines(text: io.TextIOWrapper, path: Path, longest: int) -> Iterator[NumberedLine]:
    """Yield the lines that are not blank. Raises UserError for a line that is too long.

    One character more than allowed is read of a line, so that a longer one is noticed without
    reading all of it.
    """
    read_line = partial(text.readline, longest + 1)
    for number, line in enumerate(iter(read_line, ""), 1):
        if len(line) > longest:
            problem = f"a line has more than {longest:,} characters"
            raise UserError("too_large", problem, f"{path}:{number}", known_formats())
        if not line.isspace():
            yield number, line
