"""Files, functions and signatures have a length, so that whoever carries on can read them; so has the core of a run."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import parsed
import places

from loadgen.commands import COMMANDS

sys.path.append(str(places.ROOT / "benchmarks"))
STRUCTURE = importlib.import_module("structure")

PARAMETERS, FUNCTION_LINES, CODE_LINES, CORE_LINES = 12, 80, 500, 17_500
OPTIONS = {row.function for row in COMMANDS.own}
"""Of a command the parameters are its options. tests/shell counts those of `run`, and the lines of every help."""


def too_long(file: Path) -> Iterator[str]:
    """The functions of a file that are too long, or take too much. The lines behind its docstring are counted."""
    module = ".".join(file.relative_to(places.ROOT).with_suffix("").parts)
    for function in parsed.nodes()[file]:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = function.body[ast.get_docstring(function) is not None :] or function.body
        if (function.end_lineno or 0) - body[0].lineno >= FUNCTION_LINES:
            yield f"{module}:{function.name} is long"
        given = function.args
        names = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}
        if len(names) > PARAMETERS and f"{module}:{function.name}" not in OPTIONS:
            yield f"{module}:{function.name} has {len(names)} parameters"


def test_functions_and_signatures_are_short() -> None:
    assert [told for file in parsed.nodes() for told in too_long(file)] == []


def test_files_are_short_and_what_one_run_needs_stays_small() -> None:
    core = places.ROOT / "loadgen" / "core"
    long = {file for file in parsed.nodes() if file.read_bytes().count(b"\n") > CODE_LINES}
    lines = {file: STRUCTURE.code_lines(file) for file in parsed.nodes() if file in long or core in file.parents}
    assert {str(file): count for file, count in lines.items() if count > CODE_LINES} == {}
    of_core = [count for file, count in lines.items() if core in file.parents]
    assert len(of_core) > 100 and sum(of_core) <= CORE_LINES
