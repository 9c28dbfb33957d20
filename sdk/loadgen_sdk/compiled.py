"""Which twin runs: the functions in C of `_compiled.c`, built on installation where a compiler is, or those in Python.

`LOADGEN_PURE=1` in the environment chooses Python. The tests are run both ways.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, TypeVar

PURE = "LOADGEN_PURE"
VERSION = 10
"""Of the functions, raised with each change of what they take or give: what was built from older source is not used."""


def load(name: str, version: int) -> tuple[Any, str]:
    """A compiled module whose VERSION is this one, or None; and why it is None, in words."""
    if os.environ.get(PURE):
        return None, f"{PURE} is set"
    try:
        found = import_module(name)
    except ModuleNotFoundError:
        return None, "it was not built: there was no C compiler on installation, or it failed"
    except ImportError as error:
        return None, f"it was built for another Python or machine: {error}"
    if getattr(found, "VERSION", 0) != version:
        return None, "it was built from older source"
    return found, ""


module, MISSING = load("loadgen_sdk._compiled", VERSION)
"""The compiled module, or None; and why it is None, in words."""

RUNS = "compiled" if module is not None else "python"
T = TypeVar("T")


def twin(python: type[T]) -> type[T]:
    """A class with the methods of this one, whose fields, and some of whose methods, are those of its namesake in C."""
    if module is None:
        return python
    base = getattr(module, python.__name__)
    own = {name: value for name, value in vars(python).items() if name not in vars(base)}
    return type(python.__name__, (base,), own | {"__module__": python.__module__, "__slots__": ()})
