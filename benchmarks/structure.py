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
from typing import NamedTuple

import rig

RUN = (
    ("loadgen.runs.command", "loadgen.runs.text"),
    ("loadgen.cli.run", "loadgen.report.text"),
)  # today's, and before


NON_CODE_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count_code_lines(path: Path) -> int:
    """Return how many lines of a Python file hold code: not only comments, docstrings or blanks."""
    return len(find_token_lines(path) - find_docstring_lines(path))


def find_token_lines(path: Path) -> set[int]:
    """Return the numbers of the lines with a token that is no comment and no white space."""
    with path.open("rb") as file:
        return {
            line
            for token in tokenize.tokenize(file.readline)
            if token.type not in NON_CODE_TOKENS
            for line in range(token.start[0], token.end[0] + 1)
        }


def find_docstring_lines(path: Path) -> set[int]:
    """Return the numbers of the lines of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines.update(range(docstring.lineno, docstring.end_lineno + 1))

    return lines


def find_modules(root: Path) -> dict[str, Path]:
    """Return the path of each module of the generator by its dotted name."""
    paths = {}
    for file in sorted((root / "loadgen").rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        paths[".".join(parts).removesuffix(".__init__")] = file
    return paths


def package_of(name: str) -> str:
    """Return the package of a module: "search" for loadgen.search.goal, "core/stats" in core."""
    parts = name.split(".")[1:]
    is_in_core = parts[:1] == ["core"]
    package_parts = parts[:2] if is_in_core else parts[:1]
    return "/".join(package_parts) or "loadgen"


def list_imports(name: str, files: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the generator that a module imports, also inside functions.

    `files` has the path of each module of the generator by its dotted name.
    """
    for node in ast.walk(ast.parse(files[name].read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_import(node, name, files)
            for alias in node.names:
                # "from base import alias" imports a module, or a name of the module base.
                submodule = f"{base}.{alias.name}"
                imported = submodule if submodule in files else base
                if imported in files and imported != name:
                    yield imported


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


def resolve_import(node: ast.ImportFrom, name: str, files: dict[str, Path]) -> str:
    """Return the absolute name of the module in "from ... import" inside the module `name`."""
    if not node.level:
        return node.module or ""
    package_parts = name.split(".")
    if files[name].name != "__init__.py":
        package_parts = package_parts[:-1]
    parent_parts = package_parts[: len(package_parts) - node.level + 1]
    return ".".join([*parent_parts, *([node.module] if node.module else [])])


class HelpSize(NamedTuple):
    """The size of the help: lines and options of `run --help`, and commands of `--help`.

    Options are those of `--help-all` if there is one.
    """

    lines: int
    options: int
    commands: int


def read_help(root: Path, *arguments: str) -> str:
    """Return what `loadgen` of a checkout prints, on 120 columns and without colours."""
    packages = os.pathsep.join((str(root), str(root / "sdk")))
    environment = {**os.environ, "PYTHONPATH": packages, "COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "loadgen", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
        check=False,
    ).stdout


def list_options(help_text: str) -> set[str]:
    """Return the first word of each line with an option, such as "  -o, --out PATH"."""
    option_line = re.compile(r"  -{1,2}[a-z]", re.IGNORECASE)
    return {
        line.split()[0].rstrip(",") for line in help_text.splitlines() if option_line.match(line)
    }


def list_commands(help_text: str) -> list[str]:
    """Return the lines with a command, such as "  run  ...", after the title "Start:"."""
    _, _, command_section = help_text.partition("Start:")
    return [line for line in command_section.splitlines() if re.match(r"  [^\W\d_]", line)]


def measure_help(root: Path) -> HelpSize:
    """Return the size of the command-line help of a checkout."""
    run_help = read_help(root, "run", "--help")
    full_run_help = read_help(root, "run", "--help-all") or run_help
    options_of_every_command = {"-h", "--help-all"}

    return HelpSize(
        lines=len(run_help.splitlines()),
        options=len(list_options(full_run_help) - options_of_every_command),
        commands=len(list_commands(read_help(root, "--help"))),
    )


def find_package_imports(imports: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Return the pairs of different packages of which the first imports the second.

    `imports` has the imported modules of each module.
    """
    pairs = {
        (package_of(name), package_of(imported))
        for name, imported_modules in imports.items()
        for imported in imported_modules
    }
    return {(importing, imported) for importing, imported in pairs if importing != imported}


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
    package_imports = find_package_imports(imports)
    package_lines: Counter[str] = Counter()

    package_files: Counter[str] = Counter()
    for name, count in lines.items():
        package_lines[package_of(name)] += count
        package_files[package_of(name)] += 1

    for package, count in sorted(package_lines.items())[: args.rooms]:
        outgoing = sum(importing == package for importing, _ in package_imports)
        print(
            f"{count:7,} lines {package_files[package]:4} files {outgoing:4} arrows out  {package}"
        )

    print_totals(root, files, lines, imports)
    print(f"{len(package_lines):7} rooms, {len(package_imports)} arrows between them")
    size = measure_help(root)
    print(
        f"{size.lines:7} lines of `run --help`, {size.options} options of `run`, "
        f"{size.commands} commands"
    )


def print_totals(
    root: Path, files: dict[str, Path], lines: dict[str, int], imports: dict[str, set[str]]
) -> None:
    """Print the lines of the generator, of the SDK and of core, and those that a run needs."""
    sdk_lines = sum(map(count_code_lines, (root / "sdk").rglob("*.py")))
    core_lines = sum(count for name, count in lines.items() if package_of(name).startswith("core"))
    run_modules = next((modules for modules in RUN if modules[0] in files), RUN[0])
    run_lines = sum(lines[name] for name in reachable_modules(run_modules, imports))
    print(
        f"{sum(lines.values()):7,} lines in {len(files)} files of the generator, "
        f"{sdk_lines:,} of the SDK"
    )
    print(f"{core_lines:7,} lines of core")
    print(f"{run_lines:7,} lines that `run` with its text needs")


if __name__ == "__main__":
    main()
