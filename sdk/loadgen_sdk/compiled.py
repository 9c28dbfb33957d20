"""Which twin runs: the functions in C of `_compiled.c`, built on installation where a compiler is, or those in Python.

`LOADGEN_PURE=1` in the environment chooses Python. The tests are run both ways.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

PURE = "LOADGEN_PURE"
VERSION = 4
"""Of the functions, raised with each change of what they take or give: what was built from older source is not used."""


def _module() -> Any:
    if os.environ.get(PURE):
        return None
    try:
        found = import_module("loadgen_sdk._compiled")
    except ImportError:  # not built, or built for another Python
        return None
    return found if getattr(found, "VERSION", 0) == VERSION else None


module = _module()
"""The compiled module, or None."""

RUNS = "compiled" if module is not None else "python"
