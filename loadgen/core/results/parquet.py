"""Converts records to Parquet, and reads them back, all columns at once or one at a time.

IO. Columns are made from the memory of NumPy arrays, and read as such. `pa.array`, `to_numpy` and
`fill_null` do the same, but they import pandas wherever it is installed, which takes longer than
writing all records of a run of a minute.
"""

from __future__ import annotations

import contextlib
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core.errors import UserError
from loadgen.core.results.files import private
from loadgen.core.results.record import FIELDS, NAMES, ROW, STATUSES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_BOOLEANS = ("reused", "kernel_stamp")
# of a frame: a group, first row, row after the last, which rows of the group they are
_Piece = tuple[int, int, int, Any]
KEPT_BYTES = 48  # a row, at most, of the columns that a `Frame` keeps: six instants


def to_table(rows: NDArray[np.void], texts: list[str]) -> Any:
    """Return rows as a pyarrow Table with the columns of FIELDS.

    Codes become strings, and -1 (never, unknown) becomes null.
    """
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for name, _, meaning, _ in FIELDS:
        values = np.ascontiguousarray(rows[name])
        if name == "text":
            column = _strings(texts, values)
        elif name in NAMES:
            words = _strings(NAMES[name], np.arange(len(NAMES[name])))
            column = pa.DictionaryArray.from_arrays(nullable(values.view(np.int8)), words)
        elif name in _BOOLEANS:
            column = pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values != 0)])
        elif (name.endswith("_ns") and name != "due_ns") or "-1" in meaning:
            column = nullable(values, values >= 0)
        else:
            column = nullable(values)
        columns[name] = column
    fields = [
        pa.field(name, columns[name].type, metadata={"meaning": meaning})
        for name, _, meaning, _ in FIELDS
    ]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


def _bits(flags: NDArray[np.bool_]) -> Any:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def nullable(values: NDArray[Any], valid: NDArray[np.bool_] | None = None) -> Any:
    """Return the values as a pyarrow array, null where they are not `valid`."""
    import pyarrow as pa

    bitmap = None if valid is None or valid.all() else _bits(valid)
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [bitmap, pa.py_buffer(values)]
    )


def _strings(words: Sequence[str], index: NDArray[Any]) -> Any:
    """Return `words[i]` for each i of the index as a pyarrow array, or null without such a text."""
    import pyarrow as pa

    data = [word.encode() for word in words]
    valid = (index >= 0) & (index < len(data))
    chosen = index[valid]
    lengths = np.zeros(len(index), np.int64)
    lengths[valid] = np.array([len(word) for word in data], np.int64)[chosen]
    ends = np.zeros(len(index) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    text = b"".join([data[i] for i in chosen.tolist()])
    buffers = (pa.py_buffer(ends), pa.py_buffer(text), None if valid.all() else _bits(valid))
    return pa.StringArray.from_buffers(len(index), *buffers)


def write(path: Path, tables: Iterable[Any]) -> None:
    """Write tables (at least one) as the row groups of a file, which appears when complete."""
    import pyarrow.parquet as pq

    scratch = path.with_suffix(".new")
    scratch.unlink(missing_ok=True)
    with open(scratch, "xb", opener=private) as file:
        writer = None
        for table in tables:
            # no dictionary of instants and numbers, of which hardly two are alike: it takes as long
            # as all else
            few = [field.name for field in table.schema if str(field.type) != "int64"]
            writer = writer or pq.ParquetWriter(
                file, table.schema, compression="zstd", use_dictionary=few
            )
            writer.write_table(table)
        assert writer is not None
        writer.close()
    scratch.replace(path)


def from_parquet(
    files: list[Path], only: Sequence[str] | None = None
) -> tuple[NDArray[np.void], list[str]]:
    """Return the rows and error texts of several files, as the inverse of `to_table`.

    With `only`, reads these columns; all others have their value for unknown (-1 or 0).
    """
    with contextlib.closing(Frame(files, only)) as frame:
        rows = np.zeros(len(frame), ROW)
        for name in ROW.names or ():
            rows[name] = frame[name]
        return rows, frame.texts


def unreadable(what: str, error: Exception, where: Path, hint: str) -> UserError:
    """Return the error for a damaged file, with the first sentence of pyarrow's message."""
    said = str(error).partition(".")[0].strip()
    return UserError("damaged_file", f"{what} that cannot be read: {said}", str(where), hint)


class Frame:
    """Rows in Parquet files, read one column at a time, and of that the groups that are asked for.

    `frame["due_ns"]` returns the same array as rows in memory would, but read-only;
    `frame[100:200]` are some of the rows. They are in the order of the files, or `by_stage`, so
    that those of a stage stand side by side, in that order. Of the columns read, those asked for
    last are kept, KEPT_BYTES a row, in the smallest type that holds them; groups of one value take
    no memory, and columns that are the same in the file are read and kept as one. So a run of
    millions of rows needs a fraction of the memory of its rows.
    """

    def __init__(
        self, files: list[Path], only: Sequence[str] | None = None, *, by_stage: bool = False
    ) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pa.set_memory_pool(pa.system_memory_pool())  # which gives back what is no longer needed
        self._paths = files
        with self._readable(0):
            # not by a path, nor ahead: that is read with the pool that pyarrow began with, which
            # keeps it
            self._sources = [pa.OSFile(str(file)) for file in files]
            self._files = [
                pq.ParquetFile(file, read_dictionary=["text"], pre_buffer=False)
                for file in self._sources
            ]
        self._groups = [
            (i, group) for i, file in enumerate(self._files) for group in range(file.num_row_groups)
        ]
        # Rows of a group, and metadata of its columns.
        self._said: dict[int, tuple[int, dict[str, Any]]] = {}
        self._known: dict[
            tuple[str, int], tuple[int, int] | None
        ] = {}  # column, group -> its least and largest value
        self._kept: dict[str, _Column] = {}  # the one asked for last at the end
        self._like: dict[
            str, str
        ] = {}  # column -> the first one that was read of those that are the same in the file
        self._columns = set(self._files[0].schema_arrow.names if only is None else only)
        self._codes: dict[str, int] = {}  # of the error texts found so far
        self._texts: list[str] | None = None if "text" in self._columns else []
        self._by_stage = by_stage
        self._length: int = sum(file.metadata.num_rows for file in self._files)

    @cached_property
    def _pieces(self) -> list[_Piece]:
        """Where the rows of each group stand, in the order of the frame."""
        found: list[tuple[int, int, int, Any]] = []
        for group in range(len(self._groups)):
            only = self._only_value("stage", group) if self._by_stage else 0
            if only is not None:
                found.append((only, group, self._metadata(group)[0], slice(None)))
            else:
                stages = self._read("stage", group)
                found += [
                    (one, group, count, stages == one)
                    for one, count in enumerate(np.bincount(stages).tolist())
                ]
        pieces, end = [], 0
        for _, group, count, own in sorted(found, key=lambda one: one[:2]):
            pieces.append((group, end, end := end + count, own))
        return pieces

    def give_back(self) -> None:
        """Give memory back that nothing uses: what is read and worked out leaves holes in the heap between columns."""
        import pyarrow as pa

        pa.system_memory_pool().release_unused()

    def close(self) -> None:
        """Close the files now: threads of pyarrow may hold what they have read for a while longer."""
        for file in self._sources:
            file.close()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: Any) -> Any:
        """Return a column for its name, or some of the rows for a slice."""
        if isinstance(name, slice):
            return FramePart(self, *name.indices(self._length)[:2])
        return self.within(name, 0, self._length)

    def within(self, name: str, first: int, end: int) -> NDArray[Any]:
        """Return the values of a column in a range of rows.

        If all values are equal, they take the memory of one.
        """
        if name not in self._columns:
            return np.broadcast_to(
                np.array(-1 if ROW[name].kind == "i" else 0, ROW[name]), end - first
            )
        if name == "text":
            _ = self.texts  # which numbers them in the order of the rows
        groups = {
            group for group, at, until, _ in self._pieces if at < min(end, until) and until > first
        }
        same = {self._only_value(name, group) for group in groups}
        if len(same) == 1 and None not in same:
            return np.broadcast_to(np.array(same.pop(), ROW[name]), end - first)
        name = self._like.get(name) or self._like.setdefault(name, self._first_like(name))
        kept = self._kept.pop(name, None) or _Column(
            np.empty(self._length, self._smallest(name)), set()
        )
        self._kept[name] = kept
        while len(self._kept) > 1 and sum(
            one.values.nbytes for one in self._kept.values()
        ) > KEPT_BYTES * len(self):
            del self._kept[next(iter(self._kept))]
        for group in sorted(groups - kept.filled):
            only = self._only_value(name, group)
            found = (
                self._read(name, group)
                if only is None
                else np.broadcast_to(only, self._metadata(group)[0])
            )
            for at, until, own in (piece[1:] for piece in self._pieces if piece[0] == group):
                kept.values[at:until] = found[own]
            kept.filled.add(group)
        values = kept.values[first:end]
        values.flags.writeable = False  # it is kept
        return values.astype(ROW[name], copy=False)

    def _metadata(self, group: int) -> tuple[int, dict[str, Any]]:
        """Return the number of rows of a group, and the metadata of its columns by their names."""
        if group not in self._said:
            file, number = self._groups[group]
            with self._readable(file):
                said = self._files[file].metadata.row_group(number)
                columns = map(said.column, range(said.num_columns))
                self._said[group] = (
                    said.num_rows,
                    {column.path_in_schema: column for column in columns},
                )
        return self._said[group]

    def _smallest(self, name: str) -> np.dtype[Any]:
        """Return the smallest type that holds a column according to its statistics."""
        ends = [self._ends(name, group) for group in range(len(self._groups))]
        least = [min(one[0], -1 - one[1]) for one in ends if one is not None]
        return (
            np.min_scalar_type(min(least))
            if len(least) == len(ends) and ROW[name].kind == "i"
            else ROW[name]
        )

    def _first_like(self, name: str) -> str:
        """Return a column that was read before and has the same bytes in the file, or this one.

        In a simulated run every request is sent at its scheduled time and ends with its last token,
        so a third of the columns are equal to others.
        """
        known = [
            one for one in dict.fromkeys(self._like.values()) if ROW[one] == ROW[name] == np.int64
        ]
        for group, (file, _) in enumerate(self._groups if known else ()):
            with self._readable(file), open(self._paths[file], "rb") as stored:
                chunks = self._metadata(group)[1]
                known = [
                    one for one in known if _is_same(stored, chunks.get(name), chunks.get(one))
                ]
        return known[0] if known else name

    def _read(self, name: str, group: int) -> NDArray[Any]:
        file, number = self._groups[group]
        with self._readable(file):
            # without threads: of one column there is nothing to share out
            column = (
                self._files[file]
                .read_row_group(number, [name], use_threads=False)
                .column(0)
                .combine_chunks()
            )
            found = _to_row_values(name, column, self._codes)
            said = (
                self._ends(name, group) if ROW[name].kind == "i" else None
            )  # by which the rows were given their type
            if said is not None and not said[0] <= int(found.min()) <= int(found.max()) <= said[1]:
                raise KeyError(
                    f"{name}: values beyond {said[0]} to {said[1]}, which the file says of them"
                )
        if name != "text" and len(found) and (found == found[0]).all():
            self._known[name, group] = int(found[0]), int(found[0])
        return found

    def _ends(self, name: str, group: int) -> tuple[int, int] | None:
        """Return the smallest and the largest value of a group, or None if they are not known.

        They come from the statistics in the file, or from an earlier read of the group.
        """
        if (name, group) not in self._known:
            self._known[name, group] = _by_statistics(name, *self._metadata(group))
        return self._known[name, group]

    def _only_value(self, name: str, group: int) -> int | None:
        """Return the value that all rows of a group have, or None."""
        ends = self._ends(name, group)
        return ends[0] if ends is not None and ends[0] == ends[1] else None

    @contextlib.contextmanager
    def _readable(self, first: int) -> Iterator[None]:
        """While inside, errors of a damaged file become UserError. `first`: index of the file that is read."""
        import pyarrow as pa

        try:
            yield
        except (
            pa.ArrowException,
            OSError,
            UnicodeDecodeError,
            KeyError,
        ) as error:  # two: damaged names of columns
            where = self._paths[first] if len(self._paths) == 1 or first else self._paths[0].parent
            hint = (
                "copy the run's folder again; summary.json, if it is there, still holds its figures"
            )
            raise unreadable("records", error, where, hint) from None

    @property
    def texts(self) -> list[str]:
        """The error texts that the column `text` refers to by index."""
        if self._texts is None:
            self._texts = []  # from here on numbered in the order of the rows
            self.within("text", 0, len(self))
            self._texts = list(self._codes)
        return self._texts


class FramePart(Struct):
    """Some rows of a frame, one after the other."""

    frame: Frame
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, name: Any) -> Any:
        """As those of a `Frame`."""
        if isinstance(name, slice):
            first, end, _ = name.indices(len(self))
            return FramePart(self.frame, self.first + first, self.first + end)
        return self.within(name, 0, len(self))

    def within(self, name: str, first: int, end: int) -> NDArray[Any]:
        """As that of a `Frame`."""
        return self.frame.within(name, self.first + first, self.first + end)


class _Column(Struct, frozen=True):
    """A column as far as it was read: `filled` are the groups."""

    values: NDArray[Any]
    filled: set[int]


def _is_same(file: BinaryIO, one: Any, other: Any) -> bool:
    """Whether two columns of a group are the same bytes."""
    if one is None or other is None or one.total_compressed_size != other.total_compressed_size:
        return False
    first, second = (
        chunk.dictionary_page_offset or chunk.data_page_offset for chunk in (one, other)
    )
    size, descriptor = one.total_compressed_size, file.fileno()
    return os.pread(descriptor, size, first) == os.pread(descriptor, size, second)


def _by_statistics(name: str, rows: int, chunks: dict[str, Any]) -> tuple[int, int] | None:
    """Return the smallest and the largest value of a column in a group, by its statistics.

    Returns None if they are not known. For columns with names they are known only if all rows have
    the same name, and for texts only if no row has one.
    """
    facts = chunks[name].statistics if name in chunks else None
    if facts is None or not facts.has_null_count:
        return None
    if facts.null_count == rows:
        return (-1, -1) if ROW[name].kind == "i" else None
    if (
        name == "text"
        or not facts.has_min_max
        or (name in NAMES and (facts.null_count or facts.min != facts.max))
    ):
        return None
    least, largest = (
        _codes(name, [one], {})[0] if name in NAMES else int(one) for one in (facts.min, facts.max)
    )
    return (min(least, -1) if facts.null_count else least), largest


def _to_row_values(name: str, column: Any, texts: dict[str, int]) -> NDArray[Any]:
    """Return a Parquet column as it is in a row: codes instead of strings, -1 for null.

    Adds new error texts to `texts`.
    """
    import pyarrow as pa

    if name == "text" or name in NAMES:
        if not isinstance(column, pa.DictionaryArray):
            column = column.dictionary_encode()
        codes = _codes(name, column.dictionary.to_pylist(), texts)
        positions = np.where(_valid(column), _values(column.indices), len(codes) - 1)
        return np.array(codes, np.int64)[positions]
    if name in _BOOLEANS:
        return _unpacked(column.buffers()[1], column)
    return np.where(_valid(column), _values(column), -1) if column.null_count else _values(column)


def _codes(name: str, words: Sequence[str], texts: dict[str, int]) -> list[int]:
    """Return the codes of texts of a column, and last the code of a row without a text."""
    if name == "text":
        return [*(texts.setdefault(word, len(texts)) for word in words), -1]
    unknown = (
        STATUSES.index("lost") if name == "status" else 0
    )  # a status of a later version must not read as ok
    code_of = {word: i for i, word in enumerate(NAMES[name])}
    return [*(code_of.get(word, unknown) for word in words), unknown]


def _values(column: Any) -> NDArray[Any]:
    """Return the numbers of a pyarrow array, which are arbitrary where it is null."""
    name = str(column.type)  # not `to_pandas_dtype`: older versions of pyarrow import pandas for it
    numbers = np.frombuffer(column.buffers()[1], {"double": "f8", "float": "f4"}.get(name, name))
    return numbers[column.offset : column.offset + len(column)]


def _valid(column: Any) -> NDArray[np.bool_]:
    bitmap = column.buffers()[0]
    return np.ones(len(column), bool) if bitmap is None else _unpacked(bitmap, column)


def _unpacked(bits: Any, column: Any) -> NDArray[np.bool_]:
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[column.offset :]
    return flags[: len(column)].astype(bool)
