"""Lines of code of each room: lines that hold a Python token, without comments and docstrings.

python benchmarks/lines.py [FOLDER]      FOLDER: another checkout, to compare with
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path

EMPTY = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
ROOMS = {"loadgen": 2, "sdk": 3}  # how many parts of a path name its room


def code_lines(path: Path) -> int:
    """How many lines of a file hold code."""
    with path.open("rb") as file:
        lines = {
            line
            for token in tokenize.tokenize(file.readline)
            if token.type not in EMPTY
            for line in range(token.start[0], token.end[0] + 1)
        }
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)
    rooms: Counter[str] = Counter()
    for base, parts in ROOMS.items():
        for path in sorted((root / base).rglob("*.py")):
            rooms["/".join(path.relative_to(root).parts[:parts])] += code_lines(path)
    for room, lines in rooms.items():
        print(f"{lines:7,}  {room}")
    print(f"{rooms.total():7,}  in all")


if __name__ == "__main__":
    main()
