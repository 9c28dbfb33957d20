"""Read data sets of the user.

The whole data set is checked when it is read, and errors name file:line:column. Only the offset
of each row stays in memory, so a file can be larger than memory. A row is read again when its
request is built. Files that are not JSONL are first converted to a temporary JSONL file.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import itertools
import os
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgen.core import format
from loadgen.core.errors import (
    CombinedError,
    LoadgenError,
    UserError,
    has_too_many,
)
from loadgen.core.workload import data_files
from loadgen.core.workload.data_files import DataSetVersion
from loadgen.core.workload.dataset_rows import DatasetRow, parse_row, wrap_conversation
from loadgen.core.workload.row_errors import BadRowError, EmptyConversationError

COPY_BYTES = 1 << 20
DATASETS_CACHED = 4


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a data set: `len(rows)`, `rows[index]`.

    Attributes:
        path: The file, or the name of a data set of Hugging Face.
        sha256: The hash of the bytes of the files.
        offsets: The byte offset of each row. The last entry is the size of the file.
        ignored_fields: Fields in some row that are not sent.
        rows_without_length: The number of rows that do not say how long their response should be.
        notes: Sentences about what was read, if it is not simply the file.
        converted: The rows as JSONL, if the file has another format.
    """

    path: Path
    sha256: str
    offsets: array[int]
    ignored_fields: tuple[str, ...]
    rows_without_length: int = 0
    notes: tuple[str, ...] = ()
    converted: TemporaryFile | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def byte_count(self) -> int:
        """The size of the rows in bytes."""
        return self.offsets[-1]

    def __getitem__(self, index: int) -> DatasetRow:
        return self.read(index)

    def read(self, index: int) -> DatasetRow:
        """Read a row from the file.

        Raises UserError if the file has changed since it was checked.
        """
        try:
            return parse_row(self.line(index))
        except (OSError, BadRowError) as error:
            problem = f"the file changed during the run: {error}"
            raise UserError("changed_file", problem, str(self.path)) from None

    def line(self, index: int) -> bytes:
        """Return the bytes of a row. Raises OSError if the file cannot be read.

        The rows of a converted data set are in a temporary file without a name, which must stay
        open. A JSONL file has a name, so it is only opened while a row is read. Between two of its
        rows there may be blank lines, which are cut off.
        """
        start = self.offsets[index]
        size = self.offsets[index + 1] - start
        if self.converted is not None:
            return os.pread(self.converted.descriptor, size, start)

        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            line_and_blank_lines = os.pread(descriptor, size, start)
        finally:
            os.close(descriptor)

        return line_and_blank_lines.split(b"\n", 1)[0]


class TemporaryFile:
    """A file without a name that is deleted together with this object.

    Threads can share it, because they read at explicit offsets.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        """Create the file and remove its name, so that it cannot outlive this process."""
        directory = os.environ.get("TMPDIR") or "/tmp"
        name = f"{directory}/loadgen-{os.getpid()}-{next(self._numbers)}.jsonl"
        self.descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(name)
        weakref.finalize(self, os.close, self.descriptor)


class _DataSetContent(NamedTuple):
    """What is known of a data set after all of it was read.

    Attributes:
        size: The size in bytes of the JSONL file that contains its rows.
        sha256: The hash of the bytes of the original files.
        source_note: A sentence for the user about where the files come from, or "".
        converted: The JSONL file, if the data set has another format and was converted.
    """

    size: int
    sha256: str
    source_note: str
    converted: TemporaryFile | None = None


class _RowChecker:
    """Checks the rows of a data set, and collects what is known of those that can be sent."""

    def __init__(self, path: Path) -> None:
        """Prepare to check the rows of the data set `path`, from the first row on."""
        self._path = path
        self._offsets = array("Q")
        self._errors: list[LoadgenError] = []

        # The keys of these dictionaries are used as sets that keep their order.
        self._ignored_fields: dict[str, None] = {}
        self._conversion_notes: dict[str, None] = {}
        self._empty_conversations = 0
        self._rows_without_length = 0

    def accept(self, line: bytes, start: int, where: str) -> bool:
        """Check the next row, and return True if a request can be built from it.

        A row with a mistake and a conversation without a question are not accepted. Mistakes are
        collected, so that the user sees the first MAX_ERRORS of them together.

        Args:
            line: The row as JSON.
            start: The byte offset at which it begins in the JSONL file.
            where: The file and line, for error messages.

        Raises:
            CombinedError: MAX_ERRORS rows have mistakes.
        """
        try:
            row = parse_row(line)
        except EmptyConversationError:
            self._empty_conversations += 1
            return False
        except BadRowError as error:
            self._add_error(error, where)
            return False

        self._add_row(row, start)
        return True

    def _add_error(self, error: BadRowError, where: str) -> None:
        """Collect the mistake of a row. Raises CombinedError if there are MAX_ERRORS of them."""
        place = f"{where}:{error.column}" if error.column else where
        self._errors.append(UserError(error.code, str(error), place, error.hint, key=error.key))
        if has_too_many(self._errors, str(self._path)):
            raise CombinedError(self._errors) from None

    def _add_row(self, row: DatasetRow, start: int) -> None:
        """Collect the offset of a valid row, and what the user is told about its fields."""
        self._offsets.append(start)
        if row.output_tokens is None and not row.recorded_response:
            self._rows_without_length += 1
        self._ignored_fields.update(dict.fromkeys(row.ignored_fields))
        if row.conversion_note:
            self._conversion_notes[row.conversion_note] = None

    def finish(self, content: _DataSetContent) -> Rows:
        """Return the rows of the data set after all of them were added.

        Raises CombinedError if rows have mistakes, or UserError if there are no rows.
        """
        if self._errors:
            raise CombinedError(self._errors)

        if not self._offsets:
            hint = 'write one per line, like {"prompt": "Hello"}'
            raise UserError("empty_file", "the file has no requests", str(self._path), hint)

        # A row ends where the next one starts, so the last row needs one more offset.
        self._offsets.append(content.size)
        return Rows(
            path=self._path,
            sha256=content.sha256,
            offsets=self._offsets,
            ignored_fields=tuple(self._ignored_fields),
            rows_without_length=self._rows_without_length,
            notes=tuple(self._notes(content.source_note)),
            converted=content.converted,
        )

    def _notes(self, source_note: str) -> Iterator[str]:
        """Yield sentences about renamed fields and rows that were left out.

        The first one is `source_note`, which says where the files come from, if it is not empty.
        """
        if source_note:
            yield source_note
        for note in self._conversion_notes:
            yield f"{self._path.name}: {note}"
        if self._empty_conversations:
            conversations = format.counted(self._empty_conversations, "conversation")
            yield f"{self._path.name}: left out {conversations} without a user message"


KNOWN_ANSWER_HINT = 'write one per line, like {"prompt": "What is 1 + 1?", "answer": "2"}'
"""The hint for an empty file of questions with known answers."""


def read_question_rows(path: str | Path) -> Rows:
    """Check every row of a data set of questions with known answers and return its rows.

    The known answers are not checked. Raises CombinedError with the first errors in the rows, or
    UserError for the file.
    """
    try:
        return read_rows(path)
    except UserError as error:
        if error.code != "empty_file":
            raise
        problem = "the file has no questions"
        raise UserError(error.code, problem, error.where, KNOWN_ANSWER_HINT) from None


def read_rows(path: str | Path) -> Rows:
    """Check every row of a data set and return its rows.

    A data set that was read before is read again only if the size or the modification time of one
    of its files has changed.

    Raises CombinedError with the first errors in the rows, or UserError for the file.
    """
    return data_files.read_version(Path(path), _read_cached, content="requests")


@functools.lru_cache(maxsize=DATASETS_CACHED)
def _read_cached(version: DataSetVersion) -> Rows:
    """Read a data set, or return its rows from the cache if no file has changed."""
    files = version.files
    if len(files) == 1 and data_files.is_jsonl(files[0]):
        return _read_jsonl(files[0], version.source_note)
    return _read_converted(version.path, files, version.source_note)


def _read_jsonl(path: Path, source_note: str) -> Rows:
    """Check and hash a JSONL file, and return where its rows are, so that they can be read again.

    The rows themselves are not stored, because the file can be larger than memory. `source_note` is
    a sentence for the user about where the file comes from, or "".
    """
    checker = _RowChecker(path)
    digest = hashlib.sha256()

    line_end = 0
    with path.open("rb") as file:
        for number, raw_line in enumerate(file, 1):
            digest.update(raw_line)
            line_end += len(raw_line)

            line = raw_line
            if number == 1:
                # A byte order mark is no part of the first row.
                line = raw_line.removeprefix(codecs.BOM_UTF8)

            if line.strip():
                line_start = line_end - len(line)
                checker.accept(line, line_start, f"{path}:{number}")

    file_size = line_end
    return checker.finish(_DataSetContent(file_size, digest.hexdigest(), source_note))


def _read_converted(path: Path, files: Iterable[Path], source_note: str) -> Rows:
    """Convert the files of a data set to one temporary JSONL file and return its rows.

    Rows that cannot be sent are not written. The rows follow each other without line ends, because
    they are found by their offsets.

    Args:
        path: The name of the data set in error messages.
        files: Its files, in a format other than JSONL.
        source_note: A sentence for the user about where the files come from, or "".

    Raises:
        CombinedError: Rows have mistakes.
        UserError: A row has a value that JSON cannot represent, such as bytes.
    """
    checker = _RowChecker(path)
    digest = hashlib.sha256()
    converted = TemporaryFile()

    end_offset = 0
    for file in files:
        _update_digest(digest, file)
        for where, row in read_located_rows(file):
            line = _encode_row(row, where)
            is_accepted = checker.accept(line, end_offset, where)
            if is_accepted:
                os.pwrite(converted.descriptor, line, end_offset)
                end_offset += len(line)

    return checker.finish(_DataSetContent(end_offset, digest.hexdigest(), source_note, converted))


def _encode_row(row: Mapping[str, object], where: str) -> bytes:
    """Return a row as JSON. Raises UserError for a value that JSON cannot represent."""
    try:
        return msgspec.json.encode(row)
    except (TypeError, ValueError) as error:
        problem = f"contains a value that JSON cannot represent: {error}"
        raise UserError("unsupported", problem, where) from None


def _update_digest(digest: hashlib._Hash, file: Path) -> None:
    """Add the content of a file to a hash, in pieces that bound the memory."""
    with file.open("rb") as stream:
        while content := stream.read(COPY_BYTES):
            digest.update(content)


def read_located_rows(file: Path) -> Iterator[data_files.LocatedRow]:
    """Yield the rows of a file of any format, each with its place (`FILE:LINE`) for messages.

    Unlike `read_rows`, this does not check what the rows contain. A line that is a list of turns
    becomes a row with a conversation. Raises UserError for a row that is no JSON object.
    """
    if data_files.is_jsonl(file):
        yield from _read_jsonl_objects(file)
    else:
        yield from data_files.read_converted_rows(file)


def _read_jsonl_objects(file: Path) -> Iterator[data_files.LocatedRow]:
    """Yield the JSON object in each line of a file that is not blank. Raises UserError."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                where = f"{file}:{number}"
                yield where, _decode_object(line, where)


def _decode_object(line: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a line. Raises UserError, with the place `where`, if it is none."""
    try:
        row = wrap_conversation(msgspec.json.decode(line))
    except (ValueError, RecursionError) as error:
        hint = "write one JSON object per line"
        raise UserError("invalid_syntax", f"not JSON: {error}", where, hint) from None

    if not isinstance(row, dict):
        hint = 'write objects like {"prompt": "..."}'
        raise UserError("wrong_type", "the row is not a JSON object", where, hint)

    return row
