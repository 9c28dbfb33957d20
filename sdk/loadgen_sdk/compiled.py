"""Load the compiled modules, which are built on installation where there is a C compiler.

With `LOADGEN_PURE=1` in the environment they are not loaded. Then, and where they were not built,
the implementations in Python are used (see `wire_formats/implementation.py` and
`transport/implementation.py`). The tests run with both.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

PURE = "LOADGEN_PURE"
VERSION = 18
"""Raised with each change of the interface of `_compiled.c`. A module built from another version is
not used."""


def load_compiled(name: str, version: int) -> tuple[ModuleType | None, str]:
    """Load a compiled module, if there is one that fits this source.

    Args:
        name: The name of the module.
        version: The version of its interface that the Python code expects.

    Returns:
        The module and an empty text, or None and the reason why there is none. The caller then uses
        an implementation in Python.
    """
    if os.environ.get(PURE):
        return None, f"{PURE} is set"

    try:
        module = import_module(name)
    except ModuleNotFoundError:
        return None, (
            "it was not built: there was no C compiler during installation, or the compiler failed"
        )
    except ImportError as error:
        return None, f"it was built for another Python or another machine: {error}"

    if getattr(module, "VERSION", 0) != version:
        return None, "it was built from older source code"

    return module, ""


module, MISSING = load_compiled("loadgen_sdk._compiled", VERSION)
"""The compiled module, or None and the reason why there is none."""

RUNS = "compiled" if module is not None else "python"
