"""The SDK is read by people: signatures, functions and files have a length."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import places
import pytest

FILES = sorted((places.ROOT / "sdk" / "loadgen_sdk").rglob("*.py"))
PARAMETERS, FUNCTION_LINES, CODE_LINES = 12, 80, 500
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
           tokenize.ENDMARKER)  # fmt: skip


def functions(file: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(file.read_text("utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def code_lines(file: Path) -> int:
    """Lines with code: no comments, no docstrings, no empty ones."""
    text = file.read_text("utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text:
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_signatures_functions_and_files_are_short(file: Path) -> None:
    for function in functions(file):
        given = function.args
        names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        assert len({*names} - {"self", "cls"}) <= PARAMETERS, function.name
        assert (function.end_lineno or 0) - function.lineno < FUNCTION_LINES, function.name
    assert code_lines(file) <= CODE_LINES
