"""Reads tables from pickles without running their code: pandas 1 to 3 frames, mappings of columns, lists of rows.

A pickle is a program. This reader knows some twenty names of numpy and pandas, replaces each with an inert stand-in
class, and refuses all other names. Nothing that the file names is ever called, not even numpy's own reconstruction (a
damaged dtype crashes it). Arrays are built here from the arguments of the stand-ins. Reads one file, nothing else.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from loadgen.core import format
from loadgen.core.errors import UserError

MOST_BYTES = 2_000_000_000  # of a gzipped pickle once it is unpacked


class _Inert:
    """Replaces a class or function of the pickle: stores its arguments and its state, and does nothing."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Manager(_Inert):
    """A frame's blocks and axes: (blocks, axes), or the state of pandas before 1.3."""


class _Frame(_Inert):
    """State: a mapping with the manager."""


class _Block(_Inert):
    """(values, places among the columns, dimensions)."""


class _Index(_Inert):
    """Labels, in a mapping under "data"; made by pandas as (class, mapping)."""


class _Texts(_Inert):
    """An array type of pandas (texts in pandas 3). Its state contains the array."""


class _Encoded(_Inert):
    """(text, encoding): bytes, as pickle protocols before 3 write them."""


class _Slice(_Inert):
    """(start, stop, step)."""


class _Dtype(_Inert):
    """(code, align, copy). The second item of its state is the byte order."""


class _Rebuilt(_Inert):
    """An array to build: (class, shape, code), then state (version, shape, dtype, Fortran order, bytes or list)."""


class _Buffer(_Inert):
    """An array over bytes: (bytes, dtype, shape, order)."""


class _Scalar(_Inert):
    """(dtype, bytes)."""


STAND_INS: dict[tuple[str, str], type[_Inert]] = {
    ("_codecs", "encode"): _Encoded,
    ("builtins", "slice"): _Slice,
    ("__builtin__", "slice"): _Slice,
    ("numpy", "ndarray"): _Inert,
    ("numpy", "dtype"): _Dtype,
    ("pandas._libs.internals", "_unpickle_block"): _Block,
    ("pandas.core.internals.blocks", "new_block"): _Block,
    ("pandas.core.internals.managers", "BlockManager"): _Manager,
    ("pandas.core.internals", "BlockManager"): _Manager,
    ("pandas.core.frame", "DataFrame"): _Frame,
    ("pandas", "DataFrame"): _Frame,  # pandas 3 calls itself so
    ("pandas.core.indexes.base", "_new_Index"): _Index,
    ("pandas.core.indexes.base", "Index"): _Inert,
    ("pandas.core.indexes.range", "RangeIndex"): _Inert,
    ("pandas.core.indexes.numeric", "Int64Index"): _Inert,
    ("pandas", "Index"): _Inert,
    ("pandas", "RangeIndex"): _Inert,
    ("pandas", "StringDtype"): _Inert,
    ("pandas.arrays", "StringArray"): _Inert,
    ("pandas._libs.arrays", "__pyx_unpickle_NDArrayBacked"): _Texts,
}
for module in ("numpy.core", "numpy._core"):
    STAND_INS[f"{module}.multiarray", "_reconstruct"] = _Rebuilt
    STAND_INS[f"{module}.multiarray", "scalar"] = _Scalar
    STAND_INS[f"{module}.numeric", "_frombuffer"] = _Buffer
"""Every name that a pickle may use, as (module, name), and its stand-in class."""


def _load_bytearray(reader: Any) -> None:
    size = int.from_bytes(reader.read(8), "little")
    data = bytearray(reader.read(size))
    if len(data) < size:
        raise EOFError("a bytearray that is cut off")
    reader.append(data)


class _Reader(pickle._Unpickler):
    """An unpickler that can build only lists, mappings, texts, numbers and stand-ins.

    Based on the pure Python unpickler. It is five times slower than the C one, but the C one allocates as much memory
    as a damaged length byte asks for; so does this one for a bytearray alone.
    """

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BYTEARRAY8[0]: _load_bytearray,
    }

    def find_class(self, module: str, name: str) -> Any:
        stand_in = STAND_INS.get((module, name))
        if stand_in is None:
            what = f"the pickle wants to load {module}.{name}: only plain tables are read, no code is ever run"
            raise UserError(
                "unsafe_file",
                what,
                str(self._path),
                "convert it: pandas.read_pickle(...).to_parquet(...)",
            )
        # a new class per lookup: changes that a file makes to it do not outlive the file
        return type(stand_in.__name__, (stand_in,), {})


def read_pickle(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Sequence[Any]]:
    """The columns of the table in a pickle, gzipped or not: name -> cells. Raises UserError for everything else.

    `most_bytes`: of a gzipped one once it is unpacked, since a few kB may unpack to any size.
    """
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(most_bytes + 1)
            if len(data) > most_bytes:
                what = f"it unpacks to more than {format.size(most_bytes)}"
                raise UserError(
                    "too_large",
                    what,
                    str(path),
                    "is it a table of prompts? a .parquet file is read as well",
                )
        return _table(_Reader(io.BytesIO(data), path).load())
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise anything at all
        what = f"a broken pickle: {(str(error) or type(error).__name__).splitlines()[0][:200]}"
        raise UserError(
            "damaged_file",
            what,
            str(path),
            "the file may be cut off; a .parquet file is read as well",
        ) from None


def _table(value: Any) -> dict[str, Sequence[Any]]:
    """Columns of a frame, of a mapping of columns, or of a list of rows. Raises ValueError, or anything on damage."""
    if isinstance(value, _Frame):
        return _columns(value)
    if (
        isinstance(value, dict)
        and value
        and all(isinstance(column, list | _Inert) for column in value.values())
    ):
        return {str(name): _plain_value(column) for name, column in value.items()}
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        shared = set(value[0]).intersection(*value)
        return {
            str(name): [_plain_value(row[name]) for row in value]
            for name in value[0]
            if name in shared
        }
    raise ValueError(f"it holds {type(value).__name__.strip('_').lower()}, not a table")


def _columns(frame: _Frame) -> dict[str, Sequence[Any]]:
    """The columns of a frame from its blocks, for the layouts of pandas 1 to 3."""
    state = frame.state if isinstance(frame.state, dict) else {}
    manager = state.get("_mgr", state.get("_data"))
    if not isinstance(manager, _Manager):
        raise ValueError("a frame without blocks")
    if len(manager.args) >= 2:
        blocks, axes = manager.args[0], manager.args[1]
        parts = [(block.args[0], block.args[1]) for block in blocks]
    else:
        old_state = manager.state[3]["0.14.1"]
        axes = old_state["axes"]
        parts = [(block["values"], block["mgr_locs"]) for block in old_state["blocks"]]
    names = [str(name) for name in _labels(axes[0])]
    table: dict[str, Sequence[Any]] = {}
    for values, places in parts:
        slots = slice(*places.args).indices(len(names)) if isinstance(places, _Slice) else None
        positions = range(*slots) if slots else [int(place) for place in _array(places)]
        for position, column in zip(positions, np.atleast_2d(_array(values)), strict=True):
            table[names[position]] = [_plain_value(cell) for cell in column.tolist()]
    return {name: table[name] for name in names if name in table}


def _labels(index: Any) -> list[Any]:
    arguments = index.args[1]
    if isinstance(index, _Index) and isinstance(arguments, dict) and "data" in arguments:
        return list(_array(arguments["data"]))
    raise ValueError("column names that are no plain index")


def _plain_value(value: Any) -> Any:
    """A cell or a column as lists, texts and numbers."""
    if isinstance(value, _Rebuilt | _Buffer | _Texts):
        return [_plain_value(cell) for cell in _array(value).tolist()]
    if isinstance(value, _Scalar):
        return np.frombuffer(_bytes(value.args[1]), _dtype(value.args[0]), 1)[0].item()
    if isinstance(value, _Inert):
        raise ValueError("a cell that is no text, number or list")
    return value


def _array(value: Any) -> np.ndarray[Any, Any]:
    """The array that a stand-in describes. Raises ValueError, or anything that damaged data raises."""
    if isinstance(value, _Texts):
        return _array(next(part for part in value.state if isinstance(part, _Rebuilt | _Buffer)))
    if isinstance(value, _Buffer):
        data, kind, shape, order = value.args[:4]
    elif isinstance(value, _Rebuilt):
        _, shape, kind, fortran, data = value.state
        order = "F" if fortran else "C"
    else:
        raise ValueError("no array where there should be one")
    dtype = _dtype(kind)
    count = math.prod(shape)
    if not dtype.hasobject:
        return np.frombuffer(_bytes(data), dtype, count).reshape(shape, order=order)
    if not isinstance(data, list) or len(data) != count:
        raise ValueError("an array whose cells are missing")
    cells = np.empty(count, object)
    for place, cell in enumerate(
        data
    ):  # one by one: numpy would turn cells that are lists into a matrix
        cells[place] = cell
    return cells.reshape(shape, order=order)


def _dtype(kind: Any) -> np.dtype[Any]:
    """The dtype of a stand-in. Raises ValueError for anything but plain numbers, texts and objects."""
    code, order = str(kind.args[0]), str(kind.state[1])
    if re.fullmatch(r"O8?", code):
        return np.dtype(object)
    if re.fullmatch(r"b1|[iu][1248]|f[248]|[US]\d{1,5}", code) and order in ("<", ">", "|", "="):
        return np.dtype(order + code)
    raise ValueError(f"an array of {code[:20]}")


def _bytes(value: Any) -> bytes | bytearray:
    if isinstance(value, _Encoded):
        return str(value.args[0]).encode("latin-1")
    if isinstance(value, bytes | bytearray):
        return value
    raise ValueError("an array without its bytes")
