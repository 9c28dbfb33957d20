"""Opens trace files: plain, gzip or zstd, as numbered lines. Faults of the file itself are UserErrors."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from loadgen.core.errors import UserError, of_reading
from loadgen.core.workload.trace_formats import known_formats

LONGEST_LINE = 100_000_000
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


def is_parquet(path: Path) -> bool:
    return _beginning(path) == b"PAR1"


@contextlib.contextmanager
def open_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[Iterator[tuple[int, str]]]:
    """The lines of a text file that are not empty, with their numbers. Compression is told by the first bytes.

    `longest`: characters of a line, since a few compressed kB may be one line of any size. Raises UserError.
    """
    head = _beginning(path)
    compression = next((name for mark, name in _COMPRESSED.items() if head.startswith(mark)), None)
    try:
        with io.TextIOWrapper(_stream(path, compression), encoding="utf-8-sig", newline="") as text:
            yield _numbered(text, path, longest)
    except UnicodeDecodeError:
        raise UserError(
            "wrong_encoding", "not a text file (UTF-8)", str(path), known_formats()
        ) from None
    except OSError as error:
        if compression is None or error.errno is not None:
            raise UserError(
                of_reading(error), f"cannot read the trace: {error.strerror or error}", str(path)
            ) from None
        problem = f"the {compression} file is cut short or damaged"
        raise UserError(
            "damaged_file", problem, str(path), "copy it again, or unpack it by hand"
        ) from None


def split_documents(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Lines as they are; of a file that is one JSON document over several, its object or each of its list as a line."""
    read = list(itertools.islice(lines, 1))
    if read and read[0][1].lstrip()[:1] in ("{", "["):
        whole, size = _whole(read[0][1]), 0
        while whole is None and size < LONGEST_LINE and (line := next(lines, None)) is not None:
            read.append(line)
            size += len(line[1])
        whole = _whole("".join(line for _, line in read)) if whole is None else whole
        if isinstance(whole, list) or (whole is not None and len(read) > 1):
            found = whole if isinstance(whole, list) else [whole]
            read = [(1, msgspec.json.encode(one).decode()) for one in found]
    yield from itertools.chain(read, lines)


def _whole(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _stream(path: Path, compression: str | None) -> Any:
    if compression is None:
        return path.open("rb")
    import pyarrow as pa

    return pa.input_stream(str(path), compression=compression)


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise UserError(
            of_reading(error), f"cannot read the trace: {error.strerror}", str(path)
        ) from None


def _numbered(text: io.TextIOWrapper, path: Path, longest: int) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(iter(partial(text.readline, longest + 1), ""), 1):
        if len(line) > longest:
            raise UserError(
                "too_large",
                f"a line of more than {longest:,} characters",
                f"{path}:{number}",
                known_formats(),
            )
        if not line.isspace():
            yield number, line
