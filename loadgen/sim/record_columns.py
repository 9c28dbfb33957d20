"""Request records stored by column, in a third of the memory of an array of records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast, overload

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results.record import ROW

Column = NDArray[Any] | int
"""The values of one field, or the one value that all records have."""


class RecordColumns:
    """A sequence of records of the type `record.ROW`, stored by column.

    `records["due_ns"]` is a read-only column. `records[:10]` and `records[mask]` are arrays of
    records. Constant columns take no memory, and fields that have the same array share it.
    """

    def __init__(self, length: int, columns: Mapping[str, Column]) -> None:
        """Convert the columns to the types of `record.ROW`.

        Args:
            length: The number of records.
            columns: The values of each field, by its name in `record.ROW`. A missing field is 0.
        """
        self._length = length
        self._columns: dict[str, NDArray[Any]] = {}
        converter = _ColumnConverter(length)
        for name in ROW.names or ():
            values = columns.get(name, 0)
            self._columns[name] = converter.convert(values, ROW[name])

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, key: str) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, key: slice | NDArray[Any]) -> NDArray[np.void]: ...
    def __getitem__(self, key: str | slice | NDArray[Any]) -> NDArray[Any]:
        if isinstance(key, str):
            return self._columns[key]

        # The key (a slice or a mask) is applied to an array of the same length to count records.
        selected_count = len(np.empty(self._length, np.bool_)[key])
        records = np.zeros(selected_count, ROW)
        for name, column in self._columns.items():
            records[name] = column[key]

        return records

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def slice_records(self, span: slice) -> RecordColumns:
        """Return consecutive records without copying their columns.

        The columns have their final types already, so `__init__`, which converts them, is left out.
        """
        span_records = RecordColumns.__new__(RecordColumns)
        span_records._columns = {name: column[span] for name, column in self._columns.items()}
        span_records._length = len(range(*span.indices(self._length)))
        return span_records


def as_record_array(records: RecordColumns) -> NDArray[np.void]:
    """Return records by column as the type that readers of records declare: a structured array.

    Only the declared type changes. `RecordColumns` has all operations that these readers use: a
    column by its name, a part by a slice or a mask, the length and iteration.
    """
    return cast("NDArray[np.void]", records)


class _ColumnConverter:
    """Converts columns to the types of record fields, and each array once per type.

    Several fields may have the same array, for example the times of a request at which it was due
    and at which it was sent. Such fields share the converted array as well, which saves memory.
    """

    def __init__(self, length: int) -> None:
        """Create a converter for columns of this length."""
        self._length = length
        # Arrays cannot be keys of a dict. So the key is the identity of the array and the type. The
        # caller keeps all arrays during the conversion, so no two of them have the same identity.
        self._converted_arrays: dict[tuple[int, str], NDArray[Any]] = {}

    def convert(self, values: Column, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the values in another type. One number stands for a column of equal values."""
        if isinstance(values, int):
            return np.broadcast_to(np.array(values, dtype), self._length)
        key = (id(values), dtype.str)
        if key not in self._converted_arrays:
            self._converted_arrays[key] = _convert_array(values, dtype)
        return self._converted_arrays[key]


def _convert_array(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the values of a column in another type, in as little memory as possible.

    A column of a small type, such as a status, often has equal values. Then it becomes a read-only
    view of one value. Columns of 64 bits are times and counts, which are rarely equal, so the
    comparison is not worth its time for them.
    """
    is_small_type = dtype.itemsize < np.dtype(np.int64).itemsize
    if is_small_type and len(values) and (values == values[0]).all():
        return np.broadcast_to(values[0].astype(dtype), len(values))
    return values.astype(dtype, copy=False)
