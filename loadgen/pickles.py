"""Tables out of pickles without running them: frames of pandas 1 to 3, mappings of columns, lists of rows.

A pickle is code. This reader knows some twenty names of numpy and pandas, puts inert stand-ins in their place, and
refuses everything else by name: no function that a file names is ever called. Reads one file, does nothing else.
"""

from __future__ import annotations

import gzip
import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.errors import UserError


class _Inert:
    """Stands in for a class of pandas: keeps what it was made from and given, does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Manager(_Inert):
    pass


class _Frame(_Inert):
    pass


class _Index(_Inert):
    pass


class _Array(_Inert):
    """One of pandas' own arrays (texts of pandas 3): a numpy array and what type it stands for."""

    @property
    def values(self) -> Any:
        return next(part for part in self.state if isinstance(part, np.ndarray))


def _new_array(*_: Any) -> _Array:
    return _Array()


def _new_index(_: Any, data: Any) -> _Index:
    return _Index(data)


def _new_block(values: Any, places: Any = None, ndim: Any = None, **_: Any) -> _Inert:
    return _Inert(values, places)


def _known() -> dict[tuple[str, str], Any]:
    """Everything a pickle may name. numpy's own rebuild plain arrays of plain types; the rest is inert."""
    try:
        from numpy._core import multiarray, numeric
    except ImportError:  # numpy 1
        from numpy.core import multiarray, numeric  # type: ignore[no-redef]

    found: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("builtins", "slice"): slice,
        ("__builtin__", "slice"): slice,
        ("pandas._libs.internals", "_unpickle_block"): _new_block,
        ("pandas.core.internals.blocks", "new_block"): _new_block,
        ("pandas.core.internals.managers", "BlockManager"): _Manager,
        ("pandas.core.internals", "BlockManager"): _Manager,
        ("pandas.core.frame", "DataFrame"): _Frame,
        ("pandas.core.indexes.base", "_new_Index"): _new_index,
        ("pandas", "DataFrame"): _Frame,  # pandas 3 calls itself so
        ("pandas", "Index"): _Index,
        ("pandas", "RangeIndex"): _Index,
        ("pandas", "StringDtype"): _Inert,
        ("pandas.arrays", "StringArray"): _Array,
        ("pandas._libs.arrays", "__pyx_unpickle_NDArrayBacked"): _new_array,
    }
    for name in ("numpy.core", "numpy._core"):
        found[f"{name}.multiarray", "_reconstruct"] = multiarray._reconstruct
        found[f"{name}.multiarray", "scalar"] = multiarray.scalar
        found[f"{name}.numeric", "_frombuffer"] = getattr(numeric, "_frombuffer")  # noqa: B009
    for module, name in (("base", "Index"), ("range", "RangeIndex"), ("numeric", "Int64Index")):
        found[f"pandas.core.indexes.{module}", name] = _Index
    return found


class _Reader(pickle.Unpickler):
    """An unpickler that can build nothing but lists, texts, numbers, arrays and inert frames."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path, self._names = path, _known()

    def find_class(self, module: str, name: str) -> Any:
        known = self._names.get((module, name))
        if known is None:
            what = f"the pickle wants to load {module}.{name}: only plain tables are read, no code is ever run"
            raise UserError(what, str(self._path), "convert it: pandas.read_pickle(...).to_parquet(...)")
        return known


def read(path: Path) -> dict[str, Sequence[Any]]:
    """The columns of the table in a pickle (gzipped or not). Raises UserError for everything else."""
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        value = _Reader(io.BytesIO(data), path).load()
        return _table(value)
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise anything at all
        what = f"a broken pickle: {(str(error) or type(error).__name__).splitlines()[0][:200]}"
        raise UserError(what, str(path), "the file may be cut off; a .parquet file is read as well") from None


def _table(value: Any) -> dict[str, Sequence[Any]]:
    """Columns of a frame, of a mapping of columns, or of a list of rows. Raises ValueError."""
    if isinstance(value, _Frame):
        return _columns(value)
    if isinstance(value, dict) and value and all(isinstance(column, list | np.ndarray) for column in value.values()):
        return {str(name): list(column) for name, column in value.items()}
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        shared = set(value[0]).intersection(*value)
        return {str(name): [row[name] for row in value] for name in value[0] if name in shared}
    raise ValueError(f"it holds {type(value).__name__}, not a table")


def _columns(frame: _Frame) -> dict[str, Sequence[Any]]:
    """A frame's columns out of its blocks, for the layouts of pandas 1 to 3."""
    state = frame.state if isinstance(frame.state, dict) else {}
    manager = state.get("_mgr", state.get("_data"))
    if not isinstance(manager, _Manager):
        raise ValueError("a frame without blocks")
    if len(manager.args) >= 2:  # (blocks, axes)
        blocks, axes = manager.args[0], manager.args[1]
        parts = [(block.args[0], block.args[1]) for block in blocks]
    else:  # the state of pandas before 1.3
        inner = manager.state[3]["0.14.1"]
        axes = inner["axes"]
        parts = [(block["values"], block["mgr_locs"]) for block in inner["blocks"]]
    names = [str(name) for name in _values(axes[0])]
    table: dict[str, Sequence[Any]] = {}
    for values, places in parts:
        spots = range(*places.indices(len(names))) if isinstance(places, slice) else [int(place) for place in places]
        plain = values.values if isinstance(values, _Array) else values
        for spot, column in zip(spots, np.atleast_2d(plain), strict=True):
            table[names[spot]] = column.tolist() if column.dtype != object else list(column)
    return {name: table[name] for name in names if name in table}


def _values(index: _Index) -> Sequence[Any]:
    """An index's labels."""
    made = index.args[0]
    if isinstance(made, dict) and "data" in made:
        data = made["data"]
        return list(data.values if isinstance(data, _Array) else data)
    raise ValueError("column names that are no plain index")
