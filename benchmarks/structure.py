"""How large is the code, and how do its packages depend on each other?

    python benchmarks/structure.py [FOLDER]      another checkout, to compare with

A package here is a folder right below `loadgen/` (of `core/`, each folder in it) with the modules
in it; a module next to the folders counts as a package of its own. An import counts at the top of a
module and in functions. A code line holds a token that is neither comment nor docstring. The script
prints lines and imports per package, the lines that a run needs, and the size of the command-line
help. It takes some seconds.
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


def count_code_lines(path: Path) -> int:
    """Return how many lines of a file hold code."""
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


def find_modules(root: Path) -> dict[str, Path]:
    """Return the path of each module of the generator by its dotted name."""
    paths = {}
    for file in sorted((root / "loadgen").rglob("*.py")):
        paths[".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = (
            file
        )
    return paths


def package_of(name: str) -> str:
    """Return the package of a module; of `core`, the package inside it."""
    parts = name.split(".")
    return "/".join(parts[1:3] if parts[1:2] == ["core"] else parts[1:2]) or "loadgen"


def list_imports(name: str, files: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the generator that a module imports, also inside functions."""
    package = name.split(".") if files[name].name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(files[name].read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            parent_parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parent_parts, *([node.module] if node.module else [])])
            for alias in node.names:
                imported_name = f"{base}.{alias.name}"
                yield from (
                    candidate
                    for candidate in (imported_name if imported_name in files else base,)
                    if candidate in files and candidate != name
                )


def reachable_modules(start_modules: tuple[str, ...], imports: dict[str, set[str]]) -> set[str]:
    """Return the modules that are reached from some modules, those included."""
    reached: set[str] = set()
    todo = [name for name in start_modules if name in imports]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += imports[name]
    return reached


def measure_help(root: Path) -> tuple[int, int, int]:
    """Return lines and options of `run --help`, and the number of commands of `--help`.

    Options are those of `--help-all` if there is one.
    """
    path = os.pathsep.join((str(root), str(root / "sdk")))

    def read_output(*arguments: str) -> str:
        """Return what a command of this checkout prints."""
        command = [sys.executable, "-m", "loadgen", *arguments]
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "120", "NO_COLOR": "1"}
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=root, check=False
        ).stdout

    short_help = read_output("run", "--help")
    full_help = read_output("run", "--help-all") or short_help
    options = {
        line.split()[0].rstrip(",")
        for line in full_help.splitlines()
        if re.match("  -{1,2}[a-z]", line, re.I)
    }
    options -= {"-h", "--help-all"}  # of every command
    command_section = read_output("--help").partition("Start:")[2]
    commands = [
        line for line in command_section.splitlines() if line[:2] == "  " and line[2:3].isalpha()
    ]
    return len(short_help.splitlines()), len(options), len(commands)


def main() -> None:
    """Print lines, files and imports of each package, and the totals."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=rig.BENCHMARKS_DIR.parent)
    parser.add_argument("--rooms", type=int, help="the first so many; all of them count")
    args = rig.parse_arguments(parser, rooms=8)
    root: Path = args.folder.resolve()
    files = find_modules(root)
    imports = {name: set(list_imports(name, files)) for name in files}
    lines = {name: count_code_lines(file) for name, file in files.items()}
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, count in lines.items():
        sizes[package_of(name)] += count
        counts[package_of(name)] += 1
    package_imports = {
        (package_of(name), package_of(imported_module))
        for name, imported_modules in imports.items()
        for imported_module in imported_modules
    }
    package_imports = {
        (importing_package, imported_module)
        for importing_package, imported_module in package_imports
        if importing_package != imported_module
    }
    for name, count in sorted(sizes.items())[: args.rooms]:
        outgoing = sum(importing_package == name for importing_package, _ in package_imports)
        print(f"{count:7,} lines {counts[name]:4} files {outgoing:4} arrows out  {name}")
    sdk = sum(map(count_code_lines, (root / "sdk").rglob("*.py")))
    core = sum(count for name, count in sizes.items() if name.startswith("core"))
    run_modules = next((names for names in RUN if names[0] in files), RUN[0])
    print(
        f"{sum(sizes.values()):7,} lines in {len(files)} files of the generator, {sdk:,} of the SDK"
    )
    print(f"{core:7,} lines of core")
    print(
        f"{sum(lines[name] for name in reachable_modules(run_modules, imports)):7,} lines that "
        f"`run` with its text needs"
    )
    print(f"{len(sizes):7} rooms, {len(package_imports)} arrows between them")
    short, options, commands = measure_help(root)
    print(f"{short:7} lines of `run --help`, {options} options of `run`, {commands} commands")


if __name__ == "__main__":
    main()
