"""Rows of a run as columns, in a third of the memory of an array of them: a column of one value takes none. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results.record import ROW

Column = NDArray[Any] | int


class RecordColumns:
    """What an array of `record.ROW` says, by column. `rows["due_ns"]` is a column, read only; `rows[:10]` are rows.

    Fields that are one value for all rows are stored once, and so are fields that are given as the same array.
    """

    def __init__(self, length: int, columns: Mapping[str, Column]) -> None:
        self._length = length
        self._columns: dict[str, NDArray[Any]] = {}
        made: dict[tuple[int, str], NDArray[Any]] = {}  # of each array that was given, in each type
        for name in ROW.names or ():
            given, dtype = columns.get(name, 0), ROW[name]
            if isinstance(given, int):
                self._columns[name] = np.broadcast_to(np.array(given, dtype), length)
                continue
            key = id(given), dtype.str
            if key not in made:
                made[key] = _narrow(given, dtype)
            self._columns[name] = made[key]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, which: str) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, which: slice | NDArray[Any]) -> NDArray[np.void]: ...
    def __getitem__(self, which: str | slice | NDArray[Any]) -> NDArray[Any]:
        if isinstance(which, str):
            return self._columns[which]
        rows = np.zeros(len(np.empty(self._length, np.bool_)[which]), ROW)
        for name, column in self._columns.items():
            rows[name] = column[which]
        return rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def part(self, which: slice) -> RecordColumns:
        """Neighbouring rows, in the memory of these."""
        found = RecordColumns.__new__(RecordColumns)
        found._columns = {name: column[which] for name, column in self._columns.items()}
        found._length = len(range(*which.indices(self._length)))
        return found


def _narrow(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(values) and dtype.itemsize < 8 and (values == values[0]).all():
        return np.broadcast_to(values[0].astype(dtype), len(values))
    return values.astype(dtype, copy=False)
