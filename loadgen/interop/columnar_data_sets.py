"""Data sets in Parquet files, and in Arrow files as the package `datasets` stores them.

Their columns are compressed, so a small file can unpack to any size. The size of the rows is
therefore estimated before they become Python objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from loadgen.core import format
from loadgen.core.errors import UserError
from loadgen.core.workload.data_files import LocatedRow

BATCH_ROWS = 100
"""The rows that become Python objects at once."""
ALWAYS_ALLOWED_BYTES = 1 << 30
MAX_EXPANSION = 200
"""The rows of a file may have 1 GiB, or so many times the size of the file."""
VALUE_BYTES = 32
"""The memory of a value that is no text, approximately."""

FileFormat = Literal["Parquet", "Arrow"]


class _SizeLimit:
    """Refuses a file whose rows would need much more memory than the file has bytes.

    Args:
        file: The file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._file_bytes = file.stat().st_size
        self._max_bytes = max(ALWAYS_ALLOWED_BYTES, MAX_EXPANSION * self._file_bytes)

    def check(self, unpacked_bytes: int, row_number: int) -> None:
        """Raise UserError at a row if the rows so far have too many bytes."""
        if unpacked_bytes > self._max_bytes:
            expansion = unpacked_bytes / self._file_bytes
            raise UserError(
                "too_large",
                (
                    f"its rows expand to more than {format.size(unpacked_bytes)}, "
                    f"{expansion:,.0f} times the size of the file"
                ),
                f"{self._file}: row {row_number}",
                "use another file; no data set compresses like this",
            )


def read_parquet(file: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a Parquet file. Raises UserError if it is damaged or too large."""
    return _read_rows(file, "Parquet")


def read_arrow(file: Path) -> Iterator[LocatedRow]:
    """Yield the rows of an Arrow file. Raises UserError if it is damaged or too large."""
    return _read_rows(file, "Arrow")


def _read_rows(file: Path, file_format: FileFormat) -> Iterator[LocatedRow]:
    """Yield the rows of a file with their location. Null values are left out.

    Raises:
        UserError: The file is damaged, or its rows are too large.
        OSError: The disk reports an error.
    """
    import pyarrow as pa

    try:
        for row_number, row in enumerate(_read_limited_rows(file, file_format), start=1):
            yield f"{file}: row {row_number}", _to_json_value(row)
    # Damaged files raise various errors, for example OverflowError for a date after the year 9999.
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
        # Arrow raises OSError without an error number for a file that is damaged.
        is_disk_error = isinstance(error, OSError) and error.errno is not None
        if is_disk_error:
            raise

        raise UserError(
            "damaged_file",
            f"not {file_format}: {_first_sentence(error)}",
            str(file),
            "check that the file is complete",
        ) from None


def _read_limited_rows(file: Path, file_format: FileFormat) -> Iterator[Any]:
    """Yield the rows of a file as Python objects, as long as they do not need too much memory.

    The size of a batch is estimated before its rows become Python objects, and that of each row
    before it is passed on.

    Raises:
        UserError: The rows are too large.
    """
    size_limit = _SizeLimit(file)
    unpacked_bytes = 0

    row_number = 1
    for batch in _read_batches(file, file_format, size_limit):
        value_count = sum(_count_values(column) for column in batch.columns)
        size_limit.check(unpacked_bytes + VALUE_BYTES * value_count, row_number)
        for row in batch.to_pylist():
            unpacked_bytes += _estimate_bytes(row)
            size_limit.check(unpacked_bytes, row_number)
            yield row
            row_number += 1


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error message, or the type of an error without one."""
    first_line = str(error).partition("\n")[0]
    return first_line.partition(".")[0] or type(error).__name__


def _read_batches(file: Path, file_format: FileFormat, size_limit: _SizeLimit) -> Iterator[Any]:
    """Yield the rows of a file in record batches (tables of pyarrow) of at most BATCH_ROWS rows.

    Raises:
        UserError: The metadata of a Parquet file declare too many values.
        pa.ArrowException: A batch is damaged.
    """
    import pyarrow.parquet as pq

    if file_format == "Parquet":
        parquet_file = pq.ParquetFile(file)
        # This check needs no rows. The caller estimates the size of each batch more exactly.
        declared_bytes = VALUE_BYTES * _declared_values(parquet_file.metadata)
        size_limit.check(declared_bytes, row_number=1)
        batches = parquet_file.iter_batches(BATCH_ROWS)
    else:
        batches = _read_arrow_batches(file)

    for batch in batches:
        # Reading a value of a damaged batch can access invalid memory, which kills the process.
        # This check raises an exception for such a batch.
        batch.validate(full=True)
        yield from _split_batch(batch)


def _split_batch(batch: Any) -> Iterator[Any]:
    """Yield the rows of a record batch in batches of at most BATCH_ROWS.

    The writer of an Arrow file decides how many rows a batch has, which may be millions.
    """
    for first_row in range(0, batch.num_rows, BATCH_ROWS):
        yield batch.slice(first_row, BATCH_ROWS)


def _read_arrow_batches(file: Path) -> Iterator[Any]:
    """Yield the record batches of an Arrow file, in the file format or in the stream format."""
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        has_file_format = source.read(6) == b"ARROW1"
        if has_file_format:
            reader = pa.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
        else:
            source.seek(0)
            yield from pa.ipc.open_stream(source)


def _declared_values(metadata: Any) -> int:
    """Return the number of values in a Parquet file according to its metadata.

    Damaged or malicious metadata can declare 2^31 values of one list in a few bytes.
    """
    value_count = 0
    for group_index in range(metadata.num_row_groups):
        row_group = metadata.row_group(group_index)
        for column_index in range(row_group.num_columns):
            value_count += row_group.column(column_index).num_values
    return value_count


def _count_values(column: Any) -> int:
    """Return the number of values in an Arrow array, including those in lists, structs and maps.

    A key or a value of a map counts as one, even if it is a list or a struct.
    """
    from pyarrow import types

    if types.is_map(column.type):
        first_offset = column.offsets[0].as_py()
        last_offset = column.offsets[-1].as_py()
        entries = int(last_offset - first_offset)
        return len(column) + 2 * entries  # a key and a value

    if types.is_struct(column.type):
        return len(column) + sum(_count_values(child) for child in column.flatten())

    # Arrow has several types of lists, and only their arrays have this method.
    is_list = hasattr(column, "value_lengths")
    if is_list:
        return len(column) + _count_values(column.flatten())

    return len(column)


def _estimate_bytes(value: Any) -> int:
    """Return about how many bytes a value has in memory.

    The size of the file says nothing about it: a dictionary of Parquet gives one long text to any
    number of rows.
    """
    if isinstance(value, dict):
        return sum(_estimate_bytes(item) for item in value.values())
    if isinstance(value, list):
        return sum(_estimate_bytes(item) for item in value)
    if isinstance(value, str | bytes):
        return len(value)
    return VALUE_BYTES


def _to_json_value(value: Any) -> Any:
    """Return a value as JSON has it, without null values.

    Some writers store text as bytes. Bytes that are no text, such as images, become None.
    """
    if isinstance(value, dict):
        items = {key: _to_json_value(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not None}

    if isinstance(value, list):
        return [_to_json_value(item) for item in value]

    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None

    return value
