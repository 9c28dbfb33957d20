"""The structure of the code in figures: rooms, arrows between them, code lines, what a run needs, the command line.

    python benchmarks/structure.py [FOLDER]      another checkout, to compare with; older trees have rooms, no wings

A room is a folder right below `loadgen/` (of `core/` each folder in it), with the modules in it; a module beside the
folders is a room of its own. An arrow: a room imports another, at the top of a module or in a function. A code line
holds a token that is neither comment nor docstring. The command line is asked as a user would: `loadgen run --help`.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import rig

EMPTY = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
RUN = (
    ("loadgen.runs.command", "loadgen.runs.text"),
    ("loadgen.cli.run", "loadgen.report.text"),
)  # today's, and before


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
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (ast.get_docstring(node, clean=False) is not None):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def modules(root: Path) -> dict[str, Path]:
    """Every module of the generator by its name."""
    found = {}
    for file in sorted((root / "loadgen").rglob("*.py")):
        found[".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = (
            file
        )
    return found


def room(name: str) -> str:
    parts = name.split(".")
    return "/".join(parts[1:3] if parts[1:2] == ["core"] else parts[1:2]) or "loadgen"


def imported(name: str, files: dict[str, Path]) -> Iterator[str]:
    """The modules of the generator that a module imports itself, also inside functions."""
    package = name.split(".") if files[name].name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(files[name].read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield from (
                    one
                    for one in (whole if whole in files else base,)
                    if one in files and one != name
                )


def needed(begin: tuple[str, ...], arrows: dict[str, set[str]]) -> set[str]:
    """The modules that are reached from some, those themselves with them."""
    found: set[str] = set()
    todo = [name for name in begin if name in arrows]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += arrows[name]
    return found


def helps(root: Path) -> tuple[int, int, int]:
    """Lines and options of `run --help`, with `--help-all` where there is one, and the commands of `--help`."""
    path = os.pathsep.join((str(root), str(root / "sdk")))

    def asked(*words: str) -> str:
        command = [sys.executable, "-m", "loadgen", *words]
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "120", "NO_COLOR": "1"}
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=root, check=False
        ).stdout

    short = asked("run", "--help")
    whole = asked("run", "--help-all") or short
    options = {
        line.split()[0].rstrip(",")
        for line in whole.splitlines()
        if re.match("  -{1,2}[a-z]", line, re.I)
    }
    options -= {"-h", "--help-all"}  # of every command
    listed = asked("--help").partition("Start:")[2]
    commands = [line for line in listed.splitlines() if line[:2] == "  " and line[2:3].isalpha()]
    return len(short.splitlines()), len(options), len(commands)


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=rig.HERE.parent)
    parser.add_argument("--rooms", type=int, help="the first so many; all of them count")
    given = rig.given(parser, rooms=8)
    root: Path = given.folder.resolve()
    files = modules(root)
    arrows = {name: set(imported(name, files)) for name in files}
    lines = {name: code_lines(file) for name, file in files.items()}
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, count in lines.items():
        sizes[room(name)] += count
        counts[room(name)] += 1
    between = {(room(name), room(other)) for name, others in arrows.items() for other in others}
    between = {(one, other) for one, other in between if one != other}
    for name, count in sorted(sizes.items())[: given.rooms]:
        out = sum(one == name for one, _ in between)
        print(f"{count:7,} lines {counts[name]:4} files {out:4} arrows out  {name}")
    sdk = sum(map(code_lines, (root / "sdk").rglob("*.py")))
    core = sum(count for name, count in sizes.items() if name.startswith("core"))
    begin = next((names for names in RUN if names[0] in files), RUN[0])
    print(
        f"{sum(sizes.values()):7,} lines in {len(files)} files of the generator, {sdk:,} of the SDK"
    )
    print(f"{core:7,} lines of core")
    print(
        f"{sum(lines[name] for name in needed(begin, arrows)):7,} lines that `run` with its text needs"
    )
    print(f"{len(sizes):7} rooms, {len(between)} arrows between them")
    short, options, commands = helps(root)
    print(f"{short:7} lines of `run --help`, {options} options of `run`, {commands} commands")


if __name__ == "__main__":
    main()
