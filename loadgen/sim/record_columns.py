"""Request records stored by column, in a third of the memory of an array of records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results.record import ROW

Column = NDArray[Any] | int
"""The values of one field, or the one value that all records have."""


class RecordColumns:
    """A sequence of records of the type `record.ROW`, stored by column.

    `records["due_ns"]` is a read-only column. `records[:10]` is an array of records, as
    `records[mask]` is. Constant columns take no memory, and fields that are given as the same array
    share it. Missing fields are 0.
    """

    def __init__(self, length: int, columns: Mapping[str, Column]) -> None:
        self._length = length
        self._columns: dict[str, NDArray[Any]] = {}
        # Arrays that were converted already, by the identity of the given array and by type.
        converted: dict[tuple[int, str], NDArray[Any]] = {}
        for name in ROW.names or ():
            values = columns.get(name, 0)
            dtype = ROW[name]
            if isinstance(values, int):
                self._columns[name] = np.broadcast_to(np.array(values, dtype), length)
                continue
            key = (id(values), dtype.str)
            if key not in converted:
                converted[key] = _convert(values, dtype)
            self._columns[name] = converted[key]

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

    def part(self, span: slice) -> RecordColumns:
        """Return consecutive records without copying their columns.

        The columns have their final types already, so `__init__`, which converts them, is left out.
        """
        span_records = RecordColumns.__new__(RecordColumns)
        span_records._columns = {name: column[span] for name, column in self._columns.items()}
        span_records._length = len(range(*span.indices(self._length)))
        return span_records


def _convert(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the values in another type.

    A column of a small type in which all values are equal takes no memory, such as a status. Larger
    types are times and counts, which are rarely equal, so that the comparison is not worth it.
    """
    is_small_type = dtype.itemsize < np.dtype(np.int64).itemsize
    if is_small_type and len(values) and (values == values[0]).all():
        return np.broadcast_to(values[0].astype(dtype), len(values))
    return values.astype(dtype, copy=False)
