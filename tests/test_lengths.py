"""Files, functions and signatures have a length, so that whoever carries on can read them; so has the core of a run."""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

import places
import pytest

from loadgen.commands import COMMANDS

FILES = sorted([*(places.ROOT / "loadgen").rglob("*.py"), *(places.ROOT / "sdk" / "loadgen_sdk").rglob("*.py")])
PARAMETERS, FUNCTION_LINES, CODE_LINES, CORE_LINES = 12, 80, 500, 19_000
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
           tokenize.ENDMARKER)  # fmt: skip
OPTIONS = {row.function for row in COMMANDS.own}
"""Of a command the parameters are its options. tests/shell counts those of `run`, and the lines of every help."""


@cache
def code_lines(file: Path) -> int:
    """Lines with code: no comments, no docstrings, no empty ones."""
    text = file.read_text("utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(places.ROOT)))
def test_files_functions_and_signatures_are_short(file: Path) -> None:
    """Of a function the lines behind its docstring are counted."""
    assert code_lines(file) <= CODE_LINES
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
    assert len(core) > 100 and sum(map(code_lines, core)) <= CORE_LINES
