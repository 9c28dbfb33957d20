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
from loadgen.core.results.files import open_private
from loadgen.core.results.record import FIELDS, NAMES, NULLABLE_COLUMNS, ROW, STATUSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyarrow.parquet import ColumnChunkMetaData, Statistics

_BOOLEANS = ("reused", "kernel_stamp")
_NULL = -1
"""What a row has in a signed column for a time that never was or a number that is not known."""
_ALL_ROWS = slice(None)
"""Selects all rows of an array."""
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
        array = _to_arrow_column(column.name, values, texts)
        arrays.append(array)
        fields.append(pa.field(column.name, array.type, metadata={"meaning": column.meaning}))

    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _to_arrow_column(name: str, values: NDArray[Any], texts: list[str]) -> pa.Array:
    """Return one column of records as the pyarrow array that a Parquet file stores.

    Records have only numbers. In a Parquet file, the column `text` has the error texts themselves,
    columns of codes have the names of the codes (see NAMES), and flags are booleans.

    Args:
        name: The name of the column.
        values: Its values in the records.
        texts: The error texts, by their index.
    """
    if name == "text":
        return _string_array(texts, values)
    if name in NAMES:
        return _dictionary_array(values, NAMES[name])
    if name in _BOOLEANS:
        return _boolean_array(values != 0)

    if name in NULLABLE_COLUMNS:
        is_known = values >= 0  # -1 means never or unknown
        return nullable(values, is_known)

    return nullable(values)


def _dictionary_array(codes: NDArray[np.uint8], names: Sequence[str]) -> pa.Array:
    """Return an Arrow array of names in which each distinct name is stored once.

    A code is the index of its name. pyarrow requires signed indexes, so the bytes of the codes,
    which are below 128, are read as signed numbers.
    """
    import pyarrow as pa

    dictionary = _string_array(names, np.arange(len(names)))
    signed_codes = codes.view(np.int8)
    return pa.DictionaryArray.from_arrays(nullable(signed_codes), dictionary)


def _boolean_array(flags: NDArray[np.bool_]) -> pa.Array:
    """Return an Arrow array of booleans without nulls."""
    import pyarrow as pa

    no_null_bitmap = None
    return pa.Array.from_buffers(pa.bool_(), len(flags), [no_null_bitmap, _pack_bits(flags)])


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

    `pa.array` would do this too, but it imports pandas, which takes longer than all the rest. So
    the three buffers of Arrow's format for strings are built here. For "ab", null and "c" they are:

        validity  1 0 1    a bit for each entry: 0 for null
        offsets   0 2 2 3  entry n consists of the bytes from offsets[n] to before offsets[n + 1]
        data      abc      all strings in UTF-8, one after the other

    The strings may have 2 GiB together, because offsets have 32 bits.
    """
    import pyarrow as pa

    encoded_texts = [text.encode() for text in texts]
    bytes_of_text = np.array([len(text) for text in encoded_texts], np.int64)
    is_valid = (indexes >= 0) & (indexes < len(encoded_texts))
    valid_indexes = indexes[is_valid]

    bytes_of_entry = np.zeros(len(indexes), np.int64)  # A null has no bytes.
    bytes_of_entry[is_valid] = bytes_of_text[valid_indexes]

    # The first offset is 0, and each further one is the number of bytes up to there.
    offsets = np.zeros(len(indexes) + 1, np.int32)
    offsets[1:] = np.cumsum(bytes_of_entry)
    data = b"".join([encoded_texts[index] for index in valid_indexes.tolist()])

    # Arrow allows leaving out the validity if nothing is null.
    validity = None if is_valid.all() else _pack_bits(is_valid)

    return pa.StringArray.from_buffers(
        len(indexes), pa.py_buffer(offsets), pa.py_buffer(data), validity
    )


def write_tables(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write tables (at least one) as the row groups of a file, which appears when it is complete.

    A file of that name is replaced. Only its owner may read the new one. The tables are taken one
    by one, so that only one of them needs to be in memory.
    """
    import pyarrow.parquet as pq

    remaining_tables = iter(tables)
    table = next(remaining_tables)
    scratch_path = path.with_suffix(".new")
    scratch_path.unlink(missing_ok=True)

    with (
        open(scratch_path, "xb", opener=open_private) as file,
        pq.ParquetWriter(
            file,
            table.schema,
            compression="zstd",
            use_dictionary=_repetitive_columns(table.schema),
        ) as writer,
    ):
        writer.write_table(table)
        for table in remaining_tables:
            writer.write_table(table)

    scratch_path.replace(path)


def _repetitive_columns(schema: pa.Schema) -> list[str]:
    """Return the columns whose values repeat, so that a dictionary of them makes the file smaller.

    64-bit columns are times and numbers, which hardly repeat. A dictionary of them would double the
    writing time and enlarge the file.
    """
    return [field.name for field in schema if str(field.type) != "int64"]


def read_records(
    files: list[Path], columns: Sequence[str] | None = None
) -> tuple[NDArray[np.void], list[str]]:
    """Return the records in files, as an array of `record.ROW`, and their error texts.

    This is the inverse of `to_table`.

    Args:
        files: Parquet files of records, at least one.
        columns: The columns to read. All others have their value for unknown (-1 or 0). None reads
            all columns.

    Raises:
        UserError: A file is damaged.
    """
    with contextlib.closing(Frame(files, columns)) as frame:
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
    """Where a row group is: the index of its file, and its index within the file."""

    file_index: int
    index_in_file: int


class _GroupMetadata(NamedTuple):
    """The number of rows of a row group, and the metadata of its columns by their names."""

    row_count: int
    chunks: dict[str, ColumnChunkMetaData]


class _Bounds(NamedTuple):
    """The smallest and the largest value of a column in a row group."""

    smallest: int
    largest: int


class _GroupPart(NamedTuple):
    """The rows of a row group that belong to one stage.

    Attributes:
        stage: The index of the stage. All rows have 0 if a frame is not ordered by stage.
        group: The index of the row group.
        row_count: The number of these rows.
        selection: Which rows of the group they are.
    """

    stage: int
    group: int
    row_count: int
    selection: slice | NDArray[np.bool_]


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
        self, files: list[Path], columns: Sequence[str] | None = None, *, by_stage: bool = False
    ) -> None:
        """Open the files and read their metadata. Values are read when a column is used.

        Args:
            files: Parquet files of records, at least one.
            columns: The columns to read. All others have their value for unknown. None means all.
            by_stage: Whether the rows are ordered by stage.

        Raises:
            UserError: A file is damaged.
        """
        self._paths = files
        self._by_stage = by_stage
        self._open_files()

        # A Parquet file consists of row groups. Those of all files are numbered from 0.
        self._groups = [
            _GroupLocation(file_index, index_in_file)
            for file_index, file in enumerate(self._files)
            for index_in_file in range(file.num_row_groups)
        ]
        self._length: int = sum(file.metadata.num_rows for file in self._files)
        self._columns = set(self._files[0].schema_arrow.names if columns is None else columns)

        # Metadata that were read from the files: of row groups, and the smallest and largest values
        # by the name of a column and its row group. They are small and stay in memory.
        self._metadata_by_group: dict[int, _GroupMetadata] = {}
        self._known_bounds: dict[tuple[str, int], _Bounds | None] = {}

        # The values of the columns that were used last. Columns with equal values share an entry:
        # if "end_ns" equals "last_token_ns", `_cache_names["end_ns"]` is "last_token_ns".
        self._cache: dict[str, _CachedColumn] = {}
        self._cache_names: dict[str, str] = {}
        self._text_indexes: dict[str, int] = {}  # the index of each error text in `texts`

    def _open_files(self) -> None:
        """Open the Parquet files, without reading their values.

        pyarrow keeps freed memory in a pool by default. To return it to the system, the memory pool
        of the complete process is changed here. Files that pyarrow opens by their path, or reads in
        advance (`pre_buffer`), would still use the default pool, so neither is done.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        pa.set_memory_pool(pa.system_memory_pool())
        with self._translate_read_errors(file_index=None):
            self._sources = [pa.OSFile(str(path)) for path in self._paths]
            self._files = [
                pq.ParquetFile(source, read_dictionary=["text"], pre_buffer=False)
                for source in self._sources
            ]

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
        """The error texts that the column `text` refers to by index.

        A text gets its index when it is first read, so all are read here, in the order of the rows.
        """
        if "text" in self._columns:
            self._read_stored_range("text", 0, len(self))
        return list(self._text_indexes)

    def read_range(self, name: str, first: int, end: int) -> NDArray[Any]:
        """Return the values of a column in the rows from `first` to before `end`.

        The array is read-only. If all its values are known to be equal, it is a broadcast array,
        which takes the memory of a single value.
        """
        if name not in self._columns:
            return _repeat(_unknown_value(name), name, end - first)
        if name == "text" and not self.texts:
            # Without any error text, no row can refer to one.
            return _repeat(_NULL, name, end - first)
        return self._read_stored_range(name, first, end)

    def _read_stored_range(self, name: str, first: int, end: int) -> NDArray[Any]:
        """Return the values of a column of the files in the rows from `first` to before `end`.

        A Parquet file consists of row groups. If their metadata say that all these values are
        equal, nothing is read. Otherwise the row groups of the range are read into a cache, as far
        as they are not there yet. Columns with equal values share one entry of the cache.
        """
        groups = self._groups_of_range(first, end)
        common_value = self._common_value(name, groups)
        if common_value is not None:
            return _repeat(common_value, name, end - first)

        cache_name = self._cache_name(name)
        cached_column = self._cached_column(cache_name)

        missing_groups = groups - cached_column.loaded_groups
        for group in sorted(missing_groups):
            self._load_group(cached_column, cache_name, group)

        values = cached_column.values[first:end]

        # A caller must not change the cache, of which this is a view.
        values.flags.writeable = False

        # To save memory, the cache may have a smaller type than the records. Only then is a copy
        # made here.
        return values.astype(ROW[name], copy=False)

    def _groups_of_range(self, first: int, end: int) -> set[int]:
        """Return the row groups that have rows from `first` to before `end` of the frame."""
        groups = set()
        for span in self._spans:
            overlaps_range = span.first < end and first < span.end
            if overlaps_range:
                groups.add(span.group)
        return groups

    def _common_value(self, name: str, groups: set[int]) -> int | None:
        """Return the value that a column has in all rows of some row groups.

        Return None if the values differ, or if that is not known without reading them.
        """
        values = {self._constant_value(name, group) for group in groups}
        return values.pop() if len(values) == 1 else None

    @cached_property
    def _spans(self) -> list[_Span]:
        """The row ranges (spans) of the frame, each with the row group that it comes from.

        A Parquet file consists of row groups, in which rows of several stages can be mixed. If the
        frame has the order of the files, each row group is one span. If it is ordered by stage, a
        row group has one span for each stage of its rows. Example:

            row group 0  2 rows of stage 0, 1 row of stage 1
            row group 1  3 rows of stage 0
            spans        rows 0-1 from group 0, rows 2-4 from group 1, row 5 from group 0
        """
        parts: list[_GroupPart] = []
        for group in range(len(self._groups)):
            parts.extend(self._split_by_stage(group))

        # The sort is stable: parts of the same stage stay in the order of the files.
        parts.sort(key=lambda part: part.stage)
        spans = []

        first_row = 0
        for part in parts:
            end_row = first_row + part.row_count
            spans.append(
                _Span(group=part.group, first=first_row, end=end_row, selection=part.selection)
            )
            first_row = end_row

        return spans

    def _split_by_stage(self, group: int) -> list[_GroupPart]:
        """Return the rows of a row group, in one part for each stage (phase of the load).

        If the frame has the order of the files, stages do not matter. All rows are then one part,
        which counts as stage 0.
        """
        row_count = self._group_metadata(group).row_count
        if not self._by_stage:
            return [_GroupPart(0, group, row_count, selection=_ALL_ROWS)]

        common_stage = self._constant_value("stage", group)
        if common_stage is not None:
            return [_GroupPart(common_stage, group, row_count, selection=_ALL_ROWS)]

        stage_of_row = self._read_group("stage", group)
        parts = []
        for stage in np.unique(stage_of_row).tolist():
            is_of_stage = stage_of_row == stage
            rows_of_stage = int(np.count_nonzero(is_of_stage))
            parts.append(_GroupPart(stage, group, rows_of_stage, selection=is_of_stage))

        return parts

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
        """Copy the values of one row group of a file to their places in a cached column.

        Args:
            column: The cached column, which has the order of the rows in the frame.
            name: The name of the column.
            group: The index of the row group.
        """
        constant = self._constant_value(name, group)
        if constant is None:
            group_values = self._read_group(name, group)
        else:
            group_values = np.broadcast_to(constant, self._group_metadata(group).row_count)

        # If the frame is ordered by stage, the rows of a group can be in several places.
        spans_of_group = [span for span in self._spans if span.group == group]
        for span in spans_of_group:
            column.values[span.first : span.end] = group_values[span.selection]

        column.loaded_groups.add(group)

    def _group_metadata(self, group: int) -> _GroupMetadata:
        """Return the number of rows and the column metadata of a row group.

        They are read from the file at the first call for a group, and kept for later ones.

        Raises:
            UserError: The metadata in the file are damaged.
        """
        if group not in self._metadata_by_group:
            file_index, index_in_file = self._groups[group]
            with self._translate_read_errors(file_index):
                metadata = self._files[file_index].metadata.row_group(index_in_file)
                chunks = [metadata.column(index) for index in range(metadata.num_columns)]
                chunk_by_name = {chunk.path_in_schema: chunk for chunk in chunks}
                self._metadata_by_group[group] = _GroupMetadata(metadata.num_rows, chunk_by_name)
        return self._metadata_by_group[group]

    def _smallest_type(self, name: str) -> np.dtype[Any]:
        """Return the smallest signed type that holds all values of a column, to save memory.

        A column whose bounds are not known, or that has unsigned numbers (which are small already),
        keeps its type of `record.ROW`.
        """
        if not _is_signed_integer(name):
            return ROW[name]

        smallest = 0
        largest = 0
        for group in range(len(self._groups)):
            bounds = self._bounds(name, group)
            if bounds is None:
                return ROW[name]
            smallest = min(smallest, bounds.smallest)
            largest = max(largest, bounds.largest)

        for number_type in (np.int8, np.int16, np.int32):
            limits = np.iinfo(number_type)
            if limits.min <= smallest and largest <= limits.max:
                return np.dtype(number_type)

        return np.dtype(np.int64)

    def _cache_name(self, name: str) -> str:
        """Return the name under which the values of a column are in the cache.

        Columns with equal values share one entry of the cache, under the name of the first of them
        that was read. This saves memory: in a simulated run every request is sent at its scheduled
        time and ends with its last token, so a third of the columns equal others. Two columns have
        equal values if their compressed bytes in the files are equal.
        """
        if name in self._cache_names:
            return self._cache_names[name]
        cached_names = list(dict.fromkeys(self._cache_names.values()))  # without duplicates
        identical_names = self._filter_identical(name, cached_names)
        cache_name = identical_names[0] if identical_names else name
        self._cache_names[name] = cache_name
        return cache_name

    def _filter_identical(self, name: str, candidates: Iterable[str]) -> list[str]:
        """Return the candidates that have the same bytes as the column `name` in every row group.

        The compressed bytes in the files are compared, without decoding them. Only 64-bit columns
        are compared, since the others are too small for this to save much.
        """
        if ROW[name] != np.int64:
            return []

        identical_columns = [column for column in candidates if ROW[column] == np.int64]
        for group in range(len(self._groups)):
            if not identical_columns:
                break
            identical_columns = self._filter_identical_in_group(name, identical_columns, group)

        return identical_columns

    def _filter_identical_in_group(
        self, name: str, candidates: Iterable[str], group: int
    ) -> list[str]:
        """Return the candidates that have the same bytes as the column `name` in one row group.

        A chunk is the part of a file with the values of one column in one row group.
        """
        chunk_by_column = self._group_metadata(group).chunks
        chunk = chunk_by_column.get(name)

        file_index = self._groups[group].file_index
        with self._translate_read_errors(file_index), self._paths[file_index].open("rb") as file:
            return [
                candidate
                for candidate in candidates
                if _have_same_bytes(file, chunk, chunk_by_column.get(candidate))
            ]

    def _read_group(self, name: str, group: int) -> NDArray[Any]:
        """Read a column of a row group from its file, as the values of `record.ROW`.

        Raises:
            UserError: The file is damaged, or has values outside of its own statistics.
        """
        file_index, index_in_file = self._groups[group]
        with self._translate_read_errors(file_index):
            # A single column offers no work for several threads.
            table = self._files[file_index].read_row_group(index_in_file, [name], use_threads=False)
            array = table.column(0).combine_chunks()
            values = _to_row_values(name, array, self._text_indexes)
            self._check_bounds(name, group, values)

        self._remember_constant(name, group, values)
        return values

    def _check_bounds(self, name: str, group: int, values: NDArray[Any]) -> None:
        """Raise ArrowInvalid if values are outside the bounds that the file states for them.

        The cached column has the smallest type for these bounds, such as 8-bit integers. A value
        outside of them could not be stored in it correctly. Only columns of signed integers are
        checked, because other columns keep their type in the cache.
        """
        import pyarrow as pa

        if not _is_signed_integer(name):
            return

        bounds = self._bounds(name, group)
        if bounds is None:
            return
        if values.min() < bounds.smallest or values.max() > bounds.largest:
            raise pa.ArrowInvalid(
                f"{name} has values outside the range {bounds.smallest} to "
                f"{bounds.largest} that the file states"
            )

    def _remember_constant(self, name: str, group: int, values: NDArray[Any]) -> None:
        """Note that a row group has only one value in a column, so that it is not read again."""
        if name == "text" or not len(values):
            return
        if (values == values[0]).all():
            self._known_bounds[name, group] = _Bounds(int(values[0]), int(values[0]))

    def _bounds(self, name: str, group: int) -> _Bounds | None:
        """Return the smallest and the largest value of a row group, or None if they are not known.

        They come from the statistics in the file, or from an earlier read of the group.
        """
        if (name, group) not in self._known_bounds:
            metadata = self._group_metadata(group)
            self._known_bounds[name, group] = _bounds_by_statistics(name, metadata)
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
    def _translate_read_errors(self, file_index: int | None) -> Iterator[None]:
        """Turn the exceptions of pyarrow for a damaged file into a UserError that names the file.

        Args:
            file_index: The index of the file that is read inside the context, or None while all
                are opened.
        """
        import pyarrow as pa

        try:
            yield
        # pyarrow raises the last two for damaged names of columns.
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


def _unknown_value(name: str) -> int:
    """Return what a record has in a column that is not known: -1, or 0 in an unsigned column."""
    return _NULL if _is_signed_integer(name) else 0


def _is_signed_integer(name: str) -> bool:
    """Return True if a column of `record.ROW` has signed integers, so that it can have -1."""
    return ROW[name].kind == "i"


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
    """Return the smallest and the largest value of a column in a row group, without reading it.

    Parquet files have statistics of each column: its smallest and its largest value, and how many
    of its values are null. The result is in terms of records, in which null is -1. Return None if
    the statistics do not show the bounds, as for error texts: Parquet has the first and the last of
    them in the alphabet, but records refer to them by indexes.
    """
    chunk = group.chunks.get(name)
    statistics = None if chunk is None else chunk.statistics
    if statistics is None or not statistics.has_null_count:
        return None

    is_all_null = statistics.null_count == group.row_count
    if is_all_null and _is_signed_integer(name):
        return _Bounds(_NULL, _NULL)
    if is_all_null or name == "text" or not statistics.has_min_max:
        return None
    if name in NAMES:
        return _bounds_of_codes(name, statistics)

    return _bounds_of_numbers(statistics)


def _bounds_of_numbers(statistics: Statistics) -> _Bounds:
    """Return the bounds of a column of numbers. In records, -1 (_NULL) stands for null."""
    smallest = int(statistics.min)
    largest = int(statistics.max)
    if statistics.null_count > 0:
        smallest = min(smallest, _NULL)
    return _Bounds(smallest, largest)


def _bounds_of_codes(name: str, statistics: Statistics) -> _Bounds | None:
    """Return the bounds of a column of codes, which are known only if all rows have one name."""
    if statistics.null_count or statistics.min != statistics.max:
        return None
    code = _code_of_name(name, statistics.min)
    return _Bounds(code, code)


def _to_row_values(name: str, array: pa.Array, text_indexes: dict[str, int]) -> NDArray[Any]:
    """Return a Parquet column as the numbers of `record.ROW`.

    Error texts become their index, names become their code (see NAMES), and booleans stay as they
    are. In other columns, null becomes -1.

    Args:
        name: The name of the column.
        array: The values in the file.
        text_indexes: The index of each error text. New texts are added with the next index.
    """

    def index_of_text(text: str) -> int:
        next_index = len(text_indexes)
        return text_indexes.setdefault(text, next_index)

    def code_of_name(code_name: str) -> int:
        return _code_of_name(name, code_name)

    if name == "text":
        return _convert_strings(array, index_of_text, if_null=_NULL)
    if name in NAMES:
        return _convert_strings(array, code_of_name, if_null=_unknown_code(name))

    if name in _BOOLEANS:
        _validity, bits = array.buffers()
        return _unpack_bits(bits, array)

    numbers = _read_numbers(array)
    if array.null_count == 0:
        return numbers

    return np.where(_valid_mask(array), numbers, _NULL)


def _convert_strings(
    array: pa.Array, to_number: Callable[[str], int], if_null: int
) -> NDArray[np.int64]:
    """Return the number that stands for each string of a pyarrow array.

    Many rows have the same string. So the array is dictionary-encoded: each distinct string is
    stored once, in the dictionary, and each row has the index of its string there. Only the strings
    of the dictionary are converted. Example of four rows, with `if_null=-1`:

        rows                "ok"  null  "ok"  "lost"
        dictionary          "ok" is converted to 0, and "lost" to 4
        dictionary indexes  0     -     0     1         (arbitrary for null)
        numbers             0     -1    0     4

    Args:
        array: The strings.
        to_number: Converts one string to its number.
        if_null: The number for a row that is null.
    """
    import pyarrow as pa

    is_encoded = isinstance(array, pa.DictionaryArray)
    encoded_array = array if is_encoded else array.dictionary_encode()
    distinct_strings = encoded_array.dictionary.to_pylist()
    distinct_numbers = np.array([to_number(string) for string in distinct_strings], np.int64)

    is_valid = _valid_mask(encoded_array)
    dictionary_index_of_row = _read_numbers(encoded_array.indices)
    numbers = np.full(len(encoded_array), if_null, np.int64)
    numbers[is_valid] = distinct_numbers[dictionary_index_of_row[is_valid]]

    return numbers


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
