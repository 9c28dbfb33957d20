"""The code of both packages, read and parsed once for all tests of a process that look at it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from make_rooms import FOLDERS


@cache
def trees() -> dict[Path, ast.Module]:
    """Every module of the generator, then of the SDK."""
    files = (file for folder in FOLDERS.values() for file in sorted(folder.rglob("*.py")))
    return {file: ast.parse(file.read_bytes(), str(file)) for file in files}


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """What stands in each module, at any depth."""
    return {file: [*ast.walk(tree)] for file, tree in trees().items()}
