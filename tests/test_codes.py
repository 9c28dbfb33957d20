"""No outcome hangs on the wording of a message: nothing looks for words in one, except where it is not ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MESSAGES = {
    "caveat", "error", "exc", "hint", "message", "msg", "note", "problem", "reason", "said", "sentence", "trouble",
    "undecided", "warning", "what", "why",
}  # fmt: skip
LOOKING = {"startswith", "endswith", "partition", "rpartition", "find", "index", "removeprefix", "removesuffix"}
MATCHING = {"match", "fullmatch", "search", "findall", "finditer", "sub", "split"}

FOREIGN = {
    "loadgen/workload/dataset.py": "msgspec says the byte of a JSON error in its message only",
    "loadgen/workload/data_files.py": "msgspec says the byte of a JSON error in its message only; pyarrow: as below",
    "loadgen/results/parquet.py": "pyarrow: the first sentence of its message is shown",
    "loadgen/sim/presets/preset.py": "msgspec says the path of a wrong value in its message only",
    "loadgen/workload/messages.py": "pydantic: the noun and the known keys of a union travel as its message",
    "loadgen/workload/yaml_marks.py": "PyYAML has one class of syntax errors, and says which in its message",
    "sdk/loadgen_sdk/probe/fetch.py": "Python: OpenSSL's reason, and several refused connections in one OSError",
    "sdk/loadgen_sdk/probe/probe.py": "what a server says of a model that it does not have",
    "sdk/loadgen_sdk/transport/openai_client.py": "httpx tells ends of a connection apart in its message only",
}
"""Files that read messages of a server or a library, and why they have to."""


def is_message(node: ast.AST) -> bool:
    """Whether an expression is a message by its name: `reason`, `fault.what`, `str(error)`, `notes`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        return is_message(node.args[0])
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            pass
        case _:
            return False
    return name in MESSAGES or (name.endswith("s") and name[:-1] in MESSAGES)


def looks(tree: ast.AST) -> Iterator[int]:
    """The lines that look for text in a message."""
    for node in ast.walk(tree):
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


def test_nothing_looks_for_words_in_a_message() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for folder in ("loadgen", "sdk/loadgen_sdk")
        for path in (ROOT / folder).rglob("*.py")
        if (lines := sorted(looks(ast.parse(path.read_bytes()))))
    }
    assert {name: lines for name, lines in found.items() if name not in FOREIGN} == {}
    assert set(FOREIGN) <= set(found), "an exception that is no longer one"


def test_the_test_sees_what_it_is_for() -> None:
    seen = """
reason.startswith("not one of ")
"no load:" in problem.what
any("not valid" in note for note in notes)
PATTERN.fullmatch(fault.hint)
re.search("x", str(error))
summary.verdict.reasons.index("y")
"""
    assert list(looks(ast.parse(seen))) and len(set(looks(ast.parse(seen)))) == 6
    assert not list(looks(ast.parse('code.startswith("a"), reason in reasons, "a" in text')))
