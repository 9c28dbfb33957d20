"""Every error has a code from the table, every code is used, and no decision depends on a text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import get_args

import loadgen_sdk.errors
import make_codes
import parsed_modules
import pytest
from make_codes import ROOT

from loadgen.core import errors

FAULTS = {
    "UserError",
    "TargetError",
    "UnsoundEvidenceError",
    "WrongUse",
    "TargetUnusable",
    "TransientFailure",
    "InvalidValueError",
    "BadRowError",
}
MAKERS = {"add_error", "add_option", "fault", "report", "Explanation"}
"""Functions that make an error with their first argument as its code."""
MESSAGES = {
    "caveat",
    "error",
    "exc",
    "hint",
    "message",
    "msg",
    "note",
    "problem",
    "reason",
    "said",
    "sentence",
    "trouble",
    "undecided",
    "warning",
    "what",
    "why",
}
LOOKING = {
    "startswith",
    "endswith",
    "partition",
    "rpartition",
    "find",
    "index",
    "removeprefix",
    "removesuffix",
}
MATCHING = {"match", "fullmatch", "search", "findall", "finditer", "sub", "split"}

FOREIGN = {
    "loadgen/cli/usage_errors.py": "click says in its message alone which word or value was wrong",
    "loadgen/core/workload/dataset_rows.py": "msgspec names the byte only in its text",
    "loadgen/interop/columnar_data_sets.py": "pyarrow: as below",
    "loadgen/interop/text_data_sets.py": "as dataset_rows.py",
    "loadgen/core/results/parquet.py": "pyarrow: the first sentence of its message is shown",
    "loadgen/core/workload/yaml_marks.py": "PyYAML has one class for all syntax errors",
    "sdk/loadgen_sdk/probe/fetch.py": "OpenSSL's reason, and refused connections",
    "sdk/loadgen_sdk/wire_formats/library_errors.py": "httpx names the disconnect only in its text",
}
"""Files that read messages of a server or a library, and why they have to."""


def is_message(node: ast.AST) -> bool:
    """Return whether the name of an expression says that it is a message.

    Examples are `reason`, `error.message`, `str(error)` and `notes`.
    """
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "str"
        and node.args
    ):
        return is_message(node.args[0])
    match node:
        case (
            ast.Name(id=name)
            | ast.Attribute(attr=name)
            | ast.Subscript(slice=ast.Constant(value=str(name)))
        ):
            pass
        case _:
            return False
    return name in MESSAGES or (name.endswith("s") and name[:-1] in MESSAGES)


def find_text_searches(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Return the lines that search a message for text."""
    for node in nodes:
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            text = isinstance(node.left, ast.JoinedStr) or (
                isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
            )
            if text and is_message(node.comparators[0]):
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_text = node.func.attr in LOOKING and is_message(node.func.value)
            if of_text or (node.func.attr in MATCHING and any(map(is_message, node.args))):
                yield node.lineno


def modules() -> dict[str, list[ast.AST]]:
    """Return the nodes of every module by its path."""
    return {
        file.relative_to(ROOT).as_posix(): nodes for file, nodes in parsed_modules.nodes().items()
    }


def test_no_code_searches_for_text_in_a_message() -> None:
    lines_by_module = {
        name: lines
        for name, nodes in modules().items()
        if (lines := sorted(find_text_searches(nodes)))
    }
    assert {name: lines for name, lines in lines_by_module.items() if name not in FOREIGN} == {}
    assert set(FOREIGN) <= set(lines_by_module), "an exception that is no longer one"


def test_searches_for_text_in_a_message_are_detected() -> None:
    seen = """
reason.startswith("not one of ")
"no load:" in problem.message
any("not valid" in note for note in notes)
PATTERN.fullmatch(fault.hint)
re.search("x", str(error))
summary.verdict.reasons.index("y")
"""

    assert len(set(find_text_searches(ast.walk(ast.parse(seen))))) == 6
    assert not list(
        find_text_searches(
            ast.walk(ast.parse('code.startswith("a"), reason in reasons, "a" in text'))
        )
    )


def string_values(node: ast.AST) -> set[str]:
    """Return the strings that an expression can evaluate to, without those in conditions."""
    if isinstance(node, ast.IfExp):
        return string_values(node.body) | string_values(node.orelse)
    if isinstance(node, ast.Subscript):  # of a mapping: the code of another process
        return set()
    return {
        child.value
        for child in ast.walk(node)
        if isinstance(child, ast.Constant) and isinstance(child.value, str)
    }


def codes_in(nodes: Iterable[ast.AST]) -> Iterator[set[str]]:
    """Return the strings used as a code: passed to an error, or returned or stored as `Code`."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[code, *_]) if (
                name in FAULTS | MAKERS
            ):
                yield string_values(code)
            case ast.Call(func=ast.Attribute(attr="add_at"), args=[_, code, *_]):
                yield string_values(code)
            case ast.FunctionDef(returns=ast.Name(id="Code")):
                yield {
                    word
                    for child in ast.walk(node)
                    if isinstance(child, ast.Return)
                    for word in string_values(child)
                }
            case ast.AnnAssign(annotation=kind, value=ast.AST() as value) if "Code" in ast.dump(
                kind
            ):
                yield string_values(value)
            case ast.Assign(targets=[target], value=value) if "code" in {
                name_node.id for name_node in _names(target)
            }:
                yield string_values(value)


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (child for child in ast.walk(node) if isinstance(child, ast.Name))


def test_every_error_code_is_used() -> None:
    used = {
        name: {word for code in codes_in(nodes) for word in code}
        for name, nodes in modules().items()
    }
    assert set(get_args(errors.Code)) - set().union(*used.values()) == set()
    of_sdk = set().union(*(codes for name, codes in used.items() if name.startswith("sdk/")))
    assert set(get_args(loadgen_sdk.errors.Code)) - of_sdk == set()


def test_every_diagnostic_is_constructed_with_a_code() -> None:
    """What mypy sees too, also where it is not run: no sentence stands in the place of a code."""
    known = set(get_args(errors.Code))
    for name, nodes in modules().items():
        for node in nodes:
            match node:
                case ast.Call(func=ast.Name(id=cls) | ast.Attribute(attr=cls), args=[code, *_]) if (
                    cls in FAULTS
                ):
                    assert string_values(code) <= known, (
                        f"{name}:{node.lineno}: {string_values(code) - known}"
                    )


def test_error_codes_are_at_most_80_lowercase_words() -> None:
    codes = get_args(errors.Code)
    assert len(codes) == len(set(codes)) <= 80
    assert all(re.fullmatch("[a-z0-9]+(_[a-z0-9]+)*", code) for code in codes)


def test_the_page_of_codes_equals_its_generated_text() -> None:
    assert make_codes.PAGE.read_text("utf-8") == make_codes.page(), "python tests/make_codes.py"
    meanings = {
        code: meaning
        for file in make_codes.FILES.values()
        for code, meaning in make_codes.meanings(file).items()
    }
    assert set(meanings) == set(get_args(errors.Code)), "each code with its meaning behind it"


def test_the_example_of_the_page_of_codes_prints_the_documented_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (example,) = re.findall(
        r"(?m)^```python\n(.*?)^```", make_codes.PAGE.read_text("utf-8"), re.DOTALL
    )
    exec(compile(example, str(make_codes.PAGE), "exec"), {})
    assert capsys.readouterr().out.strip() == example.strip().rpartition("# ")[2]


@pytest.mark.parametrize(
    ("where", "key"),
    [
        ("--slo tttft:2s", "--slo"),
        ("--window, --high, --max-time", "--window"),
        (errors.Place("w.yaml", 3, 1, "requests.input_token"), "requests.input_token"),
        ("out/capacity.json (rate_per_s)", "rate_per_s"),
        ("out/run (1)/r", ""),
        ("http://h:1", ""),
    ],
)
def test_a_diagnostic_names_its_subject(where: str | errors.Place, key: str) -> None:
    assert errors.UserError("conflict", "", where).key == key
    assert errors.UserError("conflict", "", where, key="mine").key == "mine"
