"""Draws one-line changes of rules at random, so that no one picks only those that tests notice.

`PYTHONPATH=tests python -m mutations.draw --seed 54 --count 40` prints entries for `table.toml`.
Their rule and their tests are to be filled in by hand.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

RULE_FILES = (
    "loadgen/core/schedule/*.py",
    "loadgen/core/results/record.py",
    "loadgen/core/metrics/request_metrics.py",
    "loadgen/core/metrics/goodput.py",
    "loadgen/core/metrics/slo_sample.py",
    "loadgen/core/metrics/slo_terms.py",
    "loadgen/core/metrics/load.py",
    "loadgen/core/metrics/outcomes.py",
    "loadgen/core/metrics/stop_rules.py",
    "loadgen/core/metrics/measurement.py",
    "loadgen/core/metrics/shortfall.py",
    "loadgen/core/metrics/sustainable.py",
    "loadgen/core/metrics/run_evidence.py",
    "loadgen/core/metrics/validity.py",
    "loadgen/core/metrics/validity_warnings.py",
    "loadgen/core/metrics/windows.py",
    "loadgen/core/execution/driver.py",
    "loadgen/core/execution/target_selection.py",
    "loadgen/core/stats/early_stopping.py",
    "loadgen/core/stats/histogram.py",
    "loadgen/core/stats/quantiles.py",
    "sdk/loadgen_sdk/app/retry.py",
)
"""The modules that hold rules of schedule, records, metrics, verdict and retry."""

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
}
OTHER_EXTREME = {"min": "max", "max": "min"}


@dataclass(frozen=True)
class Change:
    """A change of one line. `old_text` is the stripped line and occurs once in the file."""

    file: str
    line_number: int
    old_text: str
    new_text: str


def find_changes(file: str, source: str) -> list[Change]:
    """Return every change of one operator, constant or extreme that the draw chooses from."""
    lines = source.splitlines()
    changes = []
    for edit in _find_edits(ast.parse(source), lines):
        line = lines[edit.line_index]
        old_text = line.strip()
        new_text = (line[: edit.begin] + edit.replacement + line[edit.end :]).strip()
        if source.count(old_text) == 1:
            changes.append(Change(file, edit.line_index + 1, old_text, new_text))
    return changes


def draw_changes(seed: int, count: int, patterns: Sequence[str] = RULE_FILES) -> list[Change]:
    """Draw changes from the files that match the patterns: first a file, then one of its changes.

    Every file has the same chance, so that long modules do not displace short ones.
    """
    files = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    changes_by_file = []
    for path in files:
        changes = find_changes(str(path.relative_to(ROOT)), path.read_text("utf-8"))
        if changes:
            changes_by_file.append(changes)
    generator = random.Random(seed)
    chosen_changes: list[Change] = []
    while len(chosen_changes) < count:
        change = generator.choice(generator.choice(changes_by_file))
        if change not in chosen_changes:
            chosen_changes.append(change)
    return chosen_changes


@dataclass(frozen=True)
class _Edit:
    """A replacement of the characters from `begin` to `end` of one line."""

    line_index: int
    begin: int
    end: int
    replacement: str


def _find_edits(tree: ast.AST, lines: list[str]) -> Iterator[_Edit]:
    for node in ast.walk(tree):
        edit = None
        if isinstance(node, ast.Compare):
            names = COMPARISONS.get(type(node.ops[0]))
            edit = _swap_operator(lines, node.left, node.comparators[0], names)
        elif isinstance(node, ast.BinOp):
            edit = _swap_operator(lines, node.left, node.right, ARITHMETIC.get(type(node.op)))
        elif isinstance(node, ast.BoolOp):
            names = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            edit = _swap_operator(lines, node.values[0], node.values[1], names)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            begin = node.col_offset
            edit = _Edit(node.lineno - 1, begin, begin + len("not "), "")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            edit = _swap_extreme(node.func)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            edit = _add_one(node, node.value)
        if edit is not None:
            yield edit


def _swap_operator(
    lines: list[str], left: ast.expr, right: ast.expr, names: tuple[str, str] | None
) -> _Edit | None:
    """Return the edit of the operator between two expressions of the same line, if it is one."""
    if names is None or left.end_col_offset is None or left.end_lineno != right.lineno:
        return None
    line_index = right.lineno - 1
    begin = lines[line_index].find(names[0], left.end_col_offset, right.col_offset)
    if begin < 0:
        return None
    return _Edit(line_index, begin, begin + len(names[0]), names[1])


def _swap_extreme(function: ast.Name) -> _Edit | None:
    if function.id not in OTHER_EXTREME:
        return None
    begin = function.col_offset
    end = begin + len(function.id)
    return _Edit(function.lineno - 1, begin, end, OTHER_EXTREME[function.id])


def _add_one(node: ast.Constant, value: int) -> _Edit | None:
    if node.end_col_offset is None:
        return None
    return _Edit(node.lineno - 1, node.col_offset, node.end_col_offset, str(value + 1))


def main() -> None:
    """Print the drawn changes as entries of the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--files", nargs="+", default=RULE_FILES, help="patterns of files")
    arguments = parser.parse_args()
    for change in draw_changes(arguments.seed, arguments.count, arguments.files):
        print(f"# line {change.line_number}")
        print("[[mutation]]")
        print('name = ""\nrule = ""')
        print(f"file = {json.dumps(change.file)}")
        print(f"old = {json.dumps(change.old_text, ensure_ascii=False)}")
        print(f"new = {json.dumps(change.new_text, ensure_ascii=False)}")
        print(f"tests = []\nseed = {arguments.seed}\n")


if __name__ == "__main__":
    main()
