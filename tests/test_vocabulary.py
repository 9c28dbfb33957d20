"""Names and texts use the terms of the glossary, and words that were replaced do not come back.

The names in tests follow the same list as those of the packages. Texts in tests are not checked:
many of them are input that users write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from parsed_modules import nodes

ROOT = Path(__file__).parent.parent

REPLACED_NAMES = frozenset(
    [
        "again",
        "ahead",
        "asked",
        "beside",
        "dialect",
        "drawn",
        "figure",
        "figures",
        "follower",
        "followers",
        "found",
        "given",
        "held",
        "kept",
        "lane",
        "lanes",
        "ledger",
        "look",
        "looks",
        "made",
        "one",
        "others",
        "own",
        "placed",
        "promise",
        "promises",
        "quirk",
        "said",
        "shown",
        "spool",
        "stamp",
        "tally",
        "timetable",
        "told",
        "twin",
        "what",
        "whole",
        "why",
        "words",
    ]
)
"""Words that do not say what a value is, and words for which the field has a standard term."""

REPLACED_TERMS = {
    "came out": "measured",
    "client lag": "receive delay",
    "gap variation": "inter-arrival CV",
    "half pass": "50 % pass load",
    "lane": "virtual user",
    "lanes": "virtual users",
    "largest gap": "max ITL",
    "promise": "objective or term",
    "promises": "objectives or terms",
    "send lag": "send delay",
    "stamp error": "timestamp uncertainty",
    "stamps": "timestamps",
    "timetable": "schedule",
}
"""Words of earlier texts, and the terms of the glossary that replace them."""

PLACEHOLDER = re.compile(r"\{[^{}]*\}")
"""A value that is inserted into a text: its name is no word that users read."""


@cache
def nodes_of_modules() -> dict[Path, list[ast.AST]]:
    """Return the nodes of every module of the two packages and of the benchmarks."""
    benchmarks = {
        path: [*ast.walk(ast.parse(path.read_text("utf-8")))]
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    }
    return nodes() | benchmarks


@cache
def nodes_of_tests() -> dict[Path, list[ast.AST]]:
    """Return the nodes of every module of the tests."""
    return {
        path: [*ast.walk(ast.parse(path.read_text("utf-8")))]
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }


def defined_names(nodes_of_module: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every function, class, parameter and variable."""
    for node in nodes_of_module:
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name


def texts(nodes_of_module: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and the value of every string with a space that is not a docstring."""
    docstrings = {id(node.value) for node in nodes_of_module if isinstance(node, ast.Expr)}
    for node in nodes_of_module:
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        if isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, PLACEHOLDER.sub("", node.value)


def test_no_name_in_the_code_is_a_replaced_word() -> None:
    uses = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, module in (nodes_of_modules() | nodes_of_tests()).items()
        for line, name in defined_names(module)
        if name.strip("_").lower() in REPLACED_NAMES
    ]
    assert not uses


@pytest.mark.parametrize("term", REPLACED_TERMS)
def test_no_text_uses_a_replaced_term(term: str) -> None:
    pattern = re.compile(rf"\b{term}\b", re.IGNORECASE)
    uses = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, module in nodes_of_modules().items()
        for line, text in texts(module)
        if pattern.search(text)
    ]
    assert uses == []
