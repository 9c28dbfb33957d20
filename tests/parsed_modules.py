"""The code of both packages, read and parsed once for all tests of a process that look at it."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from make_packages import FOLDERS


@contextmanager
def _collector_off() -> Iterator[None]:
    """Parse every module with the garbage collector switched off.

    The trees live as long as the process, and collecting among a million nodes would take as long
    as parsing.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@cache
def trees() -> dict[Path, ast.Module]:
    """Every module of the generator, then of the SDK."""
    files = (file for folder in FOLDERS.values() for file in sorted(folder.rglob("*.py")))
    with _collector_off():
        return {file: ast.parse(file.read_bytes(), str(file)) for file in files}


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Return all nodes of each module, at any depth."""
    with _collector_off():
        return {file: [*ast.walk(tree)] for file, tree in trees().items()}
