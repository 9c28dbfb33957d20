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
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core.errors import UserError
from loadgen.core.results.files import private
from loadgen.core.results.record import FIELDS, NAMES, ROW, STATUSES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyarrow.parquet import ColumnChunkMetaData

_BOOLEANS = ("reused", "kernel_stamp")
_NULL = -1
"""What a row has in a signed column for a time that never was or a number that is not known."""
CACHED_BYTES_PER_ROW = 48
"""The size of the cached columns of a `Frame`, per row: room for six times."""


def to_table(rows: NDArray[np.void], texts: list[str]) -> pa.Table:
    """Return rows as a pyarrow Table with the columns of FIELDS.

    Codes become strings, and -1 (never, unknown) becomes null.

    Args:
        rows: The records, as an array of `record.ROW`.
        texts: The error texts, which the column `text` refers to by index.
    """
    import pyarrow as pa

    arrays = []
    fields = []
    for column in FIELDS:
        values = np.ascontiguousarray(rows[column.name])
        if column.name == "text":
            array = _string_array(texts, values)
        elif column.name in NAMES:
            names = NAMES[column.name]
            dictionary = _string_array(names, np.arange(len(names)))
            array = pa.DictionaryArray.from_arrays(nullable(values.view(np.int8)), dictionary)
        elif column.name in _BOOLEANS:
            array = pa.Array.from_buffers(pa.bool_(), len(values), [None, _pack_bits(values != 0)])
        elif (column.name.endswith("_ns") and column.name != "due_ns") or "-1" in column.meaning:
            array = nullable(values, values >= 0)
        else:
            array = nullable(values)
        arrays.append(array)
        fields.append(pa.field(column.name, array.type, metadata={"meaning": column.meaning}))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _pack_bits(flags: NDArray[np.bool_]) -> pa.Buffer:
    """Return flags as an Arrow bitmap, with eight flags in a byte."""
    import pyarrow as pa

    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def nullable(values: NDArray[Any], valid: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return the values as a pyarrow array, null where they are not `valid`."""
    import pyarrow as pa

    bitmap = None if valid is None or valid.all() else _pack_bits(valid)
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [bitmap, pa.py_buffer(values)]
    )


def _string_array(texts: Sequence[str], indexes: NDArray[Any]) -> pa.StringArray:
    """Return the pyarrow array of `texts[index]` for each index, null for an index without a text.

    An Arrow array of strings has three buffers: the bits of the valid entries, the end of each
    string in the data (after a first 0), and the data, which are all strings in UTF-8 without
    separators.
    """
    import pyarrow as pa

    encoded_texts = [text.encode() for text in texts]
    text_sizes = np.array([len(text) for text in encoded_texts], np.int64)
    is_valid = (indexes >= 0) & (indexes < len(encoded_texts))
    valid_indexes = indexes[is_valid]

    sizes = np.zeros(len(indexes), np.int64)
    sizes[is_valid] = text_sizes[valid_indexes]
    offsets = np.zeros(len(indexes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    data = b"".join([encoded_texts[index] for index in valid_indexes.tolist()])

    return pa.StringArray.from_buffers(
        len(indexes),
        pa.py_buffer(offsets),
        pa.py_buffer(data),
        None if is_valid.all() else _pack_bits(is_valid),
    )


def write_tables(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write tables (at least one) as the row groups of a file, which appears when it is complete.

    A file of that name is replaced. Only its owner may read the new one.
    """
    import pyarrow.parquet as pq

    scratch = path.with_suffix(".new")
    scratch.unlink(missing_ok=True)
    with open(scratch, "xb", opener=private) as file:
        writer = None
        for table in tables:
            if writer is None:
                # Times and numbers hardly repeat. A dictionary of them would double the writing
                # time and enlarge the file.
                repetitive_columns = [
                    field.name for field in table.schema if str(field.type) != "int64"
                ]
                writer = pq.ParquetWriter(
                    file, table.schema, compression="zstd", use_dictionary=repetitive_columns
                )
            writer.write_table(table)
        assert writer is not None
        writer.close()
    scratch.replace(path)


def read_records(
    files: list[Path], only: Sequence[str] | None = None
) -> tuple[NDArray[np.void], list[str]]:
    """Return the records in files, as an array of `record.ROW`, and their error texts.

    This is the inverse of `to_table`.

    Args:
        files: Parquet files of records, at least one.
        only: The columns to read. All others have their value for unknown (-1 or 0). None reads
            all columns.

    Raises:
        UserError: A file is damaged.
    """
    with contextlib.closing(Frame(files, only)) as frame:
        rows = np.zeros(len(frame), ROW)
        for name in ROW.names or ():
            rows[name] = frame[name]
        return rows, frame.texts


def unreadable(content: str, error: Exception, path: Path, hint: str) -> UserError:
    """Return the error for a damaged file, with the first sentence of pyarrow's message.

    Args:
        content: What the file contains, for the message, such as "records".
        error: The exception of pyarrow.
        path: The file, or a folder if it is not known which of its files is damaged.
        hint: What the user can do.
    """
    reason = str(error).partition(".")[0].strip()
    return UserError("damaged_file", f"{content} cannot be read: {reason}", str(path), hint)


class _GroupLocation(NamedTuple):
    """Where a row group is: the index of its file, and its number within the file."""

    file_index: int
    number: int


class _GroupMetadata(NamedTuple):
    """The number of rows of a row group, and the metadata of its columns by their names."""

    row_count: int
    chunks: dict[str, ColumnChunkMetaData]


class _Bounds(NamedTuple):
    """The smallest and the largest value of a column in a row group."""

    smallest: int
    largest: int


class _Span(NamedTuple):
    """Rows of one row group that are adjacent in a frame.

    Attributes:
        group: The index of the row group.
        first: The index of the first of these rows in the frame.
        end: The index after the last of them.
        selection: Which rows of the group they are.
    """

    group: int
    first: int
    end: int
    selection: slice | NDArray[np.bool_]


class _CachedColumn(Struct, frozen=True):
    """The values of a column in all rows of a frame, as far as they were read.

    Attributes:
        values: The values. Those of row groups that were not read are undefined.
        loaded_groups: The indexes of the row groups that were read.
    """

    values: NDArray[Any]
    loaded_groups: set[int]


class Frame:
    """Records in Parquet files, which are read one column at a time, and only where needed.

    `frame["due_ns"]` returns the same array as records in memory would, but read-only, and
    `frame[100:200]` a part of the records. They are in the order of the files. With `by_stage` they
    are ordered by stage first, so that the records of a stage are adjacent.

    A run of millions of records takes a fraction of the memory of its records:

    - A cache keeps the columns that were used last, with CACHED_BYTES_PER_ROW, in the smallest type
      that holds their values.
    - A row group in which a column has only one value is neither read nor kept.
    - Columns with the same bytes in the file are read and kept once.
    """

    def __init__(
        self, files: list[Path], only: Sequence[str] | None = None, *, by_stage: bool = False
    ) -> None:
        """Open the files, of which only the metadata are read.

        Args:
            files: Parquet files of records, at least one.
            only: The columns to read. All others have their value for unknown. None means all.
            by_stage: Whether the rows are ordered by stage.

        Raises:
            UserError: A file is damaged.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        # The default pool of pyarrow keeps freed memory, and this one returns it to the system.
        pa.set_memory_pool(pa.system_memory_pool())
        self._paths = files
        with self._damage_as_user_error(file_index=None):
            # Files that pyarrow opens by their path, or reads in advance (`pre_buffer`), use the
            # pool that was the default when pyarrow was imported.
            self._sources = [pa.OSFile(str(file)) for file in files]
            self._files = [
                pq.ParquetFile(source, read_dictionary=["text"], pre_buffer=False)
                for source in self._sources
            ]
        self._groups = [
            _GroupLocation(file_index, number)
            for file_index, file in enumerate(self._files)
            for number in range(file.num_row_groups)
        ]
        self._length: int = sum(file.metadata.num_rows for file in self._files)
        self._columns = set(self._files[0].schema_arrow.names if only is None else only)
        self._by_stage = by_stage

        self._metadata_by_group: dict[int, _GroupMetadata] = {}
        self._known_bounds: dict[tuple[str, int], _Bounds | None] = {}
        """By column and row group, as far as they were looked up."""
        self._cache: dict[str, _CachedColumn] = {}
        """The columns in memory. The one that was used last is the last one."""
        self._stored_as: dict[str, str] = {}
        """For each column that was read, the first column with the same bytes in the files."""
        self._text_numbers: dict[str, int] = {}
        """The index of each error text in `texts`, for the texts that were read so far."""

    def close(self) -> None:
        """Close the files at once. Threads of pyarrow may otherwise keep them open for a while."""
        for source in self._sources:
            source.close()

    def release_memory(self) -> None:
        """Return unused memory to the system.

        Reading columns leaves holes in the heap, which the allocator would keep.
        """
        import pyarrow as pa

        pa.system_memory_pool().release_unused()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: Any) -> Any:
        """Return a column for its name, or a part of the records for a slice."""
        if isinstance(name, slice):
            first, end, _ = name.indices(self._length)
            return FrameSlice(self, first, end)
        return self.read_range(name, 0, self._length)

    @cached_property
    def texts(self) -> list[str]:
        """The error texts that the column `text` refers to by index."""
        if "text" in self._columns:
            self._read_stored_range("text", 0, len(self))
        return list(self._text_numbers)

    def read_range(self, name: str, first: int, end: int) -> NDArray[Any]:
        """Return the values of a column in the rows from `first` to before `end`.

        If all values are equal, they take the memory of one.
        """
        if name not in self._columns:
            unknown = _NULL if ROW[name].kind == "i" else 0
            return _repeat(unknown, name, end - first)
        if name == "text":
            # Texts are numbered as they are read, so all are read first, in the order of the rows.
            _ = self.texts
        return self._read_stored_range(name, first, end)

    def _read_stored_range(self, name: str, first: int, end: int) -> NDArray[Any]:
        """Return the values of a column that the files have, from the cache or the files."""
        groups = {span.group for span in self._spans if max(span.first, first) < min(span.end, end)}
        constants = {self._constant_value(name, group) for group in groups}
        if len(constants) == 1:
            constant = constants.pop()
            if constant is not None:
                return _repeat(constant, name, end - first)

        column = self._cached_column(self._find_equal_column(name))
        for group in sorted(groups - column.loaded_groups):
            self._load_group(column, self._stored_as[name], group)
        values = column.values[first:end]
        values.flags.writeable = False  # They are a view of the cache.
        return values.astype(ROW[name], copy=False)

    @cached_property
    def _spans(self) -> list[_Span]:
        """The rows of each row group in the order of the frame.

        Ordered by stage, a row group with several stages has a span for each of them.
        """
        spans_by_stage: dict[int, list[_Span]] = {}
        for group in range(len(self._groups)):
            only_stage = self._constant_value("stage", group) if self._by_stage else 0
            if only_stage is not None:
                row_count = self._metadata(group).row_count
                span = _Span(group, 0, row_count, slice(None))
                spans_by_stage.setdefault(only_stage, []).append(span)
                continue
            stages = self._read_group("stage", group)
            for stage, row_count in enumerate(np.bincount(stages).tolist()):
                span = _Span(group, 0, row_count, stages == stage)
                spans_by_stage.setdefault(stage, []).append(span)

        # The spans above begin at 0. Here each gets its position after the one before it.
        spans = []
        position = 0
        for stage in sorted(spans_by_stage):
            for span in spans_by_stage[stage]:
                next_position = position + span.end
                spans.append(span._replace(first=position, end=next_position))
                position = next_position
        return spans

    def _cached_column(self, name: str) -> _CachedColumn:
        """Return the cached values of a column, with an empty cache if it has none yet.

        If the cache is then too large, the columns that were not used for longest are dropped.
        """
        column = self._cache.pop(name, None)
        if column is None:
            column = _CachedColumn(np.empty(self._length, self._smallest_type(name)), set())
        self._cache[name] = column  # At the end, because it is the one that was used last.
        max_bytes = CACHED_BYTES_PER_ROW * len(self)
        while len(self._cache) > 1 and self._cached_bytes() > max_bytes:
            least_recently_used = next(iter(self._cache))
            del self._cache[least_recently_used]
        return column

    def _cached_bytes(self) -> int:
        return sum(column.values.nbytes for column in self._cache.values())

    def _load_group(self, column: _CachedColumn, name: str, group: int) -> None:
        """Put the values of a row group into the cache of a column."""
        constant = self._constant_value(name, group)
        if constant is None:
            values = self._read_group(name, group)
        else:
            values = np.broadcast_to(constant, self._metadata(group).row_count)
        for span in self._spans:
            if span.group == group:
                column.values[span.first : span.end] = values[span.selection]
        column.loaded_groups.add(group)

    def _metadata(self, group: int) -> _GroupMetadata:
        """Return the metadata of a row group, which are read from its file at the first call."""
        if group not in self._metadata_by_group:
            file_index, number = self._groups[group]
            with self._damage_as_user_error(file_index):
                metadata = self._files[file_index].metadata.row_group(number)
                chunks = [metadata.column(index) for index in range(metadata.num_columns)]
                chunk_by_name = {chunk.path_in_schema: chunk for chunk in chunks}
                self._metadata_by_group[group] = _GroupMetadata(metadata.num_rows, chunk_by_name)
        return self._metadata_by_group[group]

    def _smallest_type(self, name: str) -> np.dtype[Any]:
        """Return the smallest integer type that holds a column according to its bounds.

        Without bounds, and for a column with unsigned numbers, it is the type of `record.ROW`.
        """
        if ROW[name].kind != "i":
            return ROW[name]
        lowest = -1
        for group in range(len(self._groups)):
            bounds = self._bounds(name, group)
            if bounds is None:
                return ROW[name]
            # A signed type holds a number n of at least 0 if it holds -1 - n.
            lowest = min(lowest, bounds.smallest, -1 - bounds.largest)
        return np.min_scalar_type(lowest)

    def _find_equal_column(self, name: str) -> str:
        """Return the first column that was read and has the same bytes in the files as this one.

        In a simulated run every request is sent at its scheduled time and ends with its last token,
        so a third of the columns are equal to others. Only columns of 64-bit numbers are compared.
        """
        if name not in self._stored_as:
            self._stored_as[name] = next(self._equal_columns(name), name)
        return self._stored_as[name]

    def _equal_columns(self, name: str) -> Iterator[str]:
        """Yield the columns that were read and have the same bytes in every row group."""
        if ROW[name] != np.int64:
            return
        candidates = [
            candidate
            for candidate in dict.fromkeys(self._stored_as.values())
            if ROW[candidate] == np.int64
        ]
        for group, location in enumerate(self._groups):
            if not candidates:
                return
            path = self._paths[location.file_index]
            with self._damage_as_user_error(location.file_index), path.open("rb") as file:
                chunks = self._metadata(group).chunks
                candidates = [
                    candidate
                    for candidate in candidates
                    if _have_same_bytes(file, chunks.get(name), chunks.get(candidate))
                ]
        yield from candidates

    def _read_group(self, name: str, group: int) -> NDArray[Any]:
        """Read a column of a row group from its file, as the values of `record.ROW`.

        Raises UserError if the file is damaged or has values outside of its own statistics.
        """
        file_index, number = self._groups[group]
        with self._damage_as_user_error(file_index):
            # A single column offers no work for several threads.
            table = self._files[file_index].read_row_group(number, [name], use_threads=False)
            array = table.column(0).combine_chunks()
            values = _to_row_values(name, array, self._text_numbers)
            # The type of the cached column was chosen by these bounds.
            bounds = self._bounds(name, group) if ROW[name].kind == "i" else None
            if bounds is not None and (
                values.min() < bounds.smallest or values.max() > bounds.largest
            ):
                raise KeyError(
                    f"{name} has values outside the range {bounds.smallest} to "
                    f"{bounds.largest} that the file states"
                )
        if name != "text" and len(values) and (values == values[0]).all():
            self._known_bounds[name, group] = _Bounds(int(values[0]), int(values[0]))
        return values

    def _bounds(self, name: str, group: int) -> _Bounds | None:
        """Return the smallest and the largest value of a row group, or None if they are not known.

        They come from the statistics in the file, or from an earlier read of the group.
        """
        if (name, group) not in self._known_bounds:
            self._known_bounds[name, group] = _bounds_by_statistics(name, self._metadata(group))
        return self._known_bounds[name, group]

    def _constant_value(self, name: str, group: int) -> int | None:
        """Return the value that all rows of a row group have in a column.

        Return None if they differ, or if that is not known without reading them.
        """
        bounds = self._bounds(name, group)
        if bounds is None or bounds.smallest != bounds.largest:
            return None
        return bounds.smallest

    @contextlib.contextmanager
    def _damage_as_user_error(self, file_index: int | None) -> Iterator[None]:
        """Raise UserError for the errors within the context that a damaged file causes.

        Args:
            file_index: The file that is read, or None while all are opened.
        """
        import pyarrow as pa

        try:
            yield
        # The last two are raised for damaged names of columns.
        except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
            if len(self._paths) == 1:
                path = self._paths[0]
            elif file_index is None:
                path = self._paths[0].parent
            else:
                path = self._paths[file_index]
            hint = (
                "copy the run's folder again. If summary.json exists, it still has "
                "the metrics of the run"
            )
            raise unreadable("records", error, path, hint) from None


class FrameSlice(Struct):
    """Adjacent records of a frame, which are read as those of the frame.

    Attributes:
        frame: The frame.
        first: The index of the first record in the frame.
        end: The index after the last record.
    """

    frame: Frame
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, name: Any) -> Any:
        """Return a column for its name, or a part of the records for a slice."""
        if isinstance(name, slice):
            first, end, _ = name.indices(len(self))
            return FrameSlice(self.frame, self.first + first, self.first + end)
        return self.read_range(name, 0, len(self))

    def read_range(self, name: str, first: int, end: int) -> NDArray[Any]:
        """Return the values of a column in a range of these records. See `Frame.read_range`."""
        return self.frame.read_range(name, self.first + first, self.first + end)


def _repeat(value: int, name: str, count: int) -> NDArray[Any]:
    """Return an array with `count` times the same value of a column, in the memory of one."""
    return np.broadcast_to(np.array(value, ROW[name]), count)


def _have_same_bytes(
    file: BinaryIO, first: ColumnChunkMetaData | None, second: ColumnChunkMetaData | None
) -> bool:
    """Return True if two columns of a row group have the same bytes in a file.

    The metadata of a column are None if the file does not have it.
    """
    if first is None or second is None:
        return False
    size = first.total_compressed_size
    if second.total_compressed_size != size:
        return False
    first_bytes = os.pread(file.fileno(), size, _chunk_offset(first))
    return first_bytes == os.pread(file.fileno(), size, _chunk_offset(second))


def _chunk_offset(chunk: ColumnChunkMetaData) -> int:
    """Return where the bytes of a column chunk begin: with its dictionary, if it has one."""
    offset: int = chunk.dictionary_page_offset or chunk.data_page_offset
    return offset


def _bounds_by_statistics(name: str, group: _GroupMetadata) -> _Bounds | None:
    """Return the bounds of a column in a row group according to the statistics in the file.

    Return None if they are not known. Codes are stored as names, whose order is another one, so
    their bounds are known only if all rows have the same name. The bounds of texts are known only
    if no row has one.
    """
    chunk = group.chunks.get(name)
    statistics = None if chunk is None else chunk.statistics
    if statistics is None or not statistics.has_null_count:
        return None
    if statistics.null_count == group.row_count:
        return _Bounds(_NULL, _NULL) if ROW[name].kind == "i" else None
    if name == "text" or not statistics.has_min_max:
        return None
    if name in NAMES:
        if statistics.null_count or statistics.min != statistics.max:
            return None
        code = _code_of_name(name, statistics.min)
        return _Bounds(code, code)
    smallest = int(statistics.min)
    if statistics.null_count:
        smallest = min(smallest, _NULL)
    return _Bounds(smallest, int(statistics.max))


def _to_row_values(name: str, array: pa.Array, text_numbers: dict[str, int]) -> NDArray[Any]:
    """Return a Parquet column as the values of `record.ROW`.

    Strings become codes, error texts become their number, and null becomes -1.

    Args:
        name: The name of the column.
        array: The values in the file.
        text_numbers: The number of each error text. New texts are added to it.
    """
    import pyarrow as pa

    if name == "text" or name in NAMES:
        if not isinstance(array, pa.DictionaryArray):
            array = array.dictionary_encode()
        # The array has an index into its own dictionary of strings for each row.
        strings = array.dictionary.to_pylist()
        if name == "text":
            codes = [text_numbers.setdefault(text, len(text_numbers)) for text in strings]
            codes.append(_NULL)
        else:
            codes = [_code_of_name(name, string) for string in strings]
            codes.append(_unknown_code(name))
        null_index = len(strings)
        indexes = np.where(_valid_mask(array), _read_numbers(array.indices), null_index)
        return np.array(codes, np.int64)[indexes]
    if name in _BOOLEANS:
        return _unpack_bits(array.buffers()[1], array)
    numbers = _read_numbers(array)
    if not array.null_count:
        return numbers
    return np.where(_valid_mask(array), numbers, _NULL)


def _code_of_name(column: str, name: str) -> int:
    """Return the code of a name in a column of NAMES, or the code for an unknown name."""
    names: tuple[str, ...] = NAMES[column]
    return names.index(name) if name in names else _unknown_code(column)


def _unknown_code(column: str) -> int:
    """Return the code in a column of NAMES for a missing name, or one of a later version.

    The status 0 means ok, so an unknown status reads as `lost` instead.
    """
    return STATUSES.index("lost") if column == "status" else 0


def _read_numbers(array: pa.Array) -> NDArray[Any]:
    """Return the numbers of a pyarrow array, which are arbitrary where it is null."""
    # Not by `to_pandas_dtype`, for which older versions of pyarrow import pandas.
    arrow_name = str(array.type)
    numpy_name = {"double": "f8", "float": "f4"}.get(arrow_name, arrow_name)
    numbers = np.frombuffer(array.buffers()[1], numpy_name)
    return numbers[array.offset : array.offset + len(array)]


def _valid_mask(array: pa.Array) -> NDArray[np.bool_]:
    """Return a mask of the entries of a pyarrow array that are not null."""
    bitmap = array.buffers()[0]
    if bitmap is None:
        return np.ones(len(array), bool)
    return _unpack_bits(bitmap, array)


def _unpack_bits(bitmap: pa.Buffer, array: pa.Array) -> NDArray[np.bool_]:
    """Return the flags of a bitmap that belong to the entries of a pyarrow array."""
    flags = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    return flags[array.offset : array.offset + len(array)].astype(bool)
