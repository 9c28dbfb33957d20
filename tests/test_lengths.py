"""Files, functions and signatures have a length, so that whoever carries on can read them; so has the core of a run."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import places
import pytest

from loadgen.commands import COMMANDS

sys.path.append(str(places.ROOT / "benchmarks"))
STRUCTURE = importlib.import_module("structure")

FILES = sorted([*(places.ROOT / "loadgen").rglob("*.py"), *(places.ROOT / "sdk" / "loadgen_sdk").rglob("*.py")])
PARAMETERS, FUNCTION_LINES, CODE_LINES, CORE_LINES = 12, 80, 500, 17_500
OPTIONS = {row.function for row in COMMANDS.own}
"""Of a command the parameters are its options. tests/shell counts those of `run`, and the lines of every help."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(places.ROOT)))
def test_files_functions_and_signatures_are_short(file: Path) -> None:
    """Of a function the lines behind its docstring are counted."""
    assert STRUCTURE.code_lines(file) <= CODE_LINES
    module = ".".join(file.relative_to(places.ROOT).with_suffix("").parts)
    for function in ast.walk(ast.parse(file.read_text("utf-8"))):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = function.body[ast.get_docstring(function) is not None :] or function.body
        assert (function.end_lineno or 0) - body[0].lineno < FUNCTION_LINES, function.name
        given = function.args
        names = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}
        assert len(names) <= PARAMETERS or f"{module}:{function.name}" in OPTIONS, function.name


def test_what_one_run_needs_stays_small() -> None:
    core = [file for file in FILES if file.is_relative_to(places.ROOT / "loadgen" / "core")]
    assert len(core) > 100 and sum(map(STRUCTURE.code_lines, core)) <= CORE_LINES
