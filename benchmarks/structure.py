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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import rig

# The modules that `loadgen run` needs: its command and the text that it prints. Older checkouts
# have the names of the second line.
RUN_MODULES = ("loadgen.runs.command", "loadgen.runs.text")
FORMER_RUN_MODULES = ("loadgen.cli.run", "loadgen.report.text")

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
    line_numbers: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in NON_CODE_TOKENS:
                first_line, _ = token.start
                last_line, _ = token.end
                line_numbers.update(range(first_line, last_line + 1))
    return line_numbers


def find_docstring_lines(path: Path) -> set[int]:
    """Return the numbers of the lines of all docstrings in a Python file."""
    line_numbers: set[int] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            line_numbers.update(range(docstring.lineno, docstring.end_lineno + 1))

    return line_numbers


def find_modules(root: Path) -> dict[str, Path]:
    """Return the path of each module of the package `loadgen` in a checkout, by dotted name."""
    paths = {}
    for file in sorted((root / "loadgen").rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        paths[name] = file
    return paths


def package_of(module: str) -> str:
    """Return the package of a module.

    It is "search" for loadgen.search.goal, "core/stats" for loadgen.core.stats.trend, and "loadgen"
    for the top level itself.
    """
    _, *parts = module.split(".")
    is_in_core = parts[:1] == ["core"]
    package_parts = parts[:2] if is_in_core else parts[:1]
    return "/".join(package_parts) or "loadgen"


def list_imports(module: str, paths: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of `loadgen` that a module imports, also inside functions.

    `paths` has the path of each module of `loadgen` by its dotted name.
    """
    for node in ast.walk(ast.parse(paths[module].read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in paths)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_import(node, module, paths)
            for alias in node.names:
                # "from base import alias" imports a module, or a name of the module base.
                submodule = f"{base}.{alias.name}"
                imported = submodule if submodule in paths else base
                if imported in paths and imported != module:
                    yield imported


def resolve_import(node: ast.ImportFrom, module: str, paths: Mapping[str, Path]) -> str:
    """Return the absolute name of the module in a statement "from ... import" inside a module.

    In the module loadgen.search.goal, "from . import x" gives "loadgen.search", and "from ..core
    import x" gives "loadgen.core". `paths` has the path of each module by its dotted name.
    """
    if not node.level:
        return node.module or ""

    package_parts = module.split(".")
    is_package = paths[module].name == "__init__.py"
    if not is_package:
        package_parts.pop()

    # The first dot is the package of the module, and each further dot goes up by one package.
    base_parts = package_parts[: len(package_parts) - node.level + 1]
    if node.module:
        base_parts.append(node.module)
    return ".".join(base_parts)


def find_reachable_modules(
    start_modules: Iterable[str], imports: Mapping[str, set[str]]
) -> set[str]:
    """Return some modules and all modules that they import, directly or through others.

    `imports` has the imported modules of each module. Start modules that are not in it are ignored.
    """
    reachable: set[str] = set()
    to_visit = [module for module in start_modules if module in imports]
    while to_visit:
        module = to_visit.pop()
        if module not in reachable:
            reachable.add(module)
            to_visit += imports[module]

    return reachable


@dataclass(frozen=True)
class PackageSize:
    """The size of a package: its name, its code lines and its files."""

    name: str
    lines: int
    files: int


class PackageImport(NamedTuple):
    """An import of one package by another one."""

    importing: str
    imported: str


@dataclass(frozen=True)
class Codebase:
    """The modules of the package `loadgen` in a checkout.

    Attributes:
        lines: The code lines of each module, by its dotted name.
        imports: The modules of `loadgen` that each module imports, by its dotted name.
    """

    lines: dict[str, int]
    imports: dict[str, set[str]]

    def list_packages(self) -> list[PackageSize]:
        """Return the size of each package, in the order of the names."""
        lines_of_modules = defaultdict(list)
        for module, line_count in self.lines.items():
            lines_of_modules[package_of(module)].append(line_count)

        return [
            PackageSize(package, sum(line_counts), len(line_counts))
            for package, line_counts in sorted(lines_of_modules.items())
        ]

    def find_package_imports(self) -> set[PackageImport]:
        """Return which packages import which other packages."""
        package_imports = set()
        for module, imported_modules in self.imports.items():
            importing = package_of(module)
            for imported in map(package_of, imported_modules):
                if imported != importing:
                    package_imports.add(PackageImport(importing, imported))
        return package_imports

    def count_core_lines(self) -> int:
        """Return the code lines of all packages below `core/`."""
        return sum(
            line_count
            for module, line_count in self.lines.items()
            if package_of(module).startswith("core")
        )

    def count_run_lines(self) -> int:
        """Return the code lines that `loadgen run` needs to measure and to print its result."""
        command_module, _ = RUN_MODULES
        start_modules = RUN_MODULES if command_module in self.lines else FORMER_RUN_MODULES
        reachable = find_reachable_modules(start_modules, self.imports)
        return sum(self.lines[module] for module in reachable)


def read_codebase(root: Path) -> Codebase:
    """Return the modules of a checkout with their code lines and imports."""
    paths = find_modules(root)
    return Codebase(
        lines={module: count_code_lines(path) for module, path in paths.items()},
        imports={module: set(list_imports(module, paths)) for module in paths},
    )


class HelpSize(NamedTuple):
    """The size of the command-line help.

    Attributes:
        lines: The lines of `loadgen run --help`.
        options: The options of `loadgen run --help-all`, or of `--help` if there is no such option.
        commands: The commands in `loadgen --help`.
    """

    lines: int
    options: int
    commands: int


def read_help(root: Path, *arguments: str) -> str:
    """Return what `loadgen` of a checkout prints, on 120 columns and without colours."""
    packages = os.pathsep.join((str(root), str(root / "sdk")))
    environment = {**os.environ, "PYTHONPATH": packages, "COLUMNS": "120", "NO_COLOR": "1"}
    completed = subprocess.run(
        [sys.executable, "-m", "loadgen", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
        check=False,
    )
    return completed.stdout


def list_options(help_text: str) -> set[str]:
    """Return the first word of each line with an option, such as "  -o, --out PATH"."""
    option_line = re.compile(r"  -{1,2}[a-z]", re.IGNORECASE)
    return {
        line.split()[0].rstrip(",") for line in help_text.splitlines() if option_line.match(line)
    }


def list_commands(help_text: str) -> list[str]:
    """Return the lines with a command, such as "  run  ...", after the title "Start:"."""
    command_line = re.compile(r"  [^\W\d_]")
    _, _, command_section = help_text.partition("Start:")
    return [line for line in command_section.splitlines() if command_line.match(line)]


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


def print_packages(codebase: Codebase, max_packages: int | None) -> None:
    """Print the lines, the files and the imported packages of each package, a line per package.

    `max_packages` limits how many packages are printed; None prints all of them.
    """
    package_imports = codebase.find_package_imports()
    for package in codebase.list_packages()[:max_packages]:
        imported_count = sum(
            package_import.importing == package.name for package_import in package_imports
        )
        print(
            f"{package.lines:7,} lines {package.files:4} files {imported_count:4} imported packages"
            f"  {package.name}"
        )


def print_totals(codebase: Codebase, root: Path) -> None:
    """Print the lines of `loadgen`, of the SDK and of core, and the number of packages."""
    sdk_lines = sum(count_code_lines(path) for path in (root / "sdk").rglob("*.py"))
    print(
        f"{sum(codebase.lines.values()):7,} lines in {len(codebase.lines)} files of the generator, "
        f"{sdk_lines:,} of the SDK"
    )
    print(f"{codebase.count_core_lines():7,} lines of core")
    print(f"{codebase.count_run_lines():7,} lines that `run` with its text needs")

    import_count = len(codebase.find_package_imports())
    print(f"{len(codebase.list_packages()):7} packages, {import_count} imports between them")


def print_help_size(size: HelpSize) -> None:
    """Print the size of the command-line help."""
    print(
        f"{size.lines:7} lines of `run --help`, {size.options} options of `run`, "
        f"{size.commands} commands"
    )


def main() -> None:
    """Print the size and the imports of each package, the totals, and the size of the help."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=rig.BENCHMARKS_DIR.parent)
    parser.add_argument(
        "--rooms",
        dest="max_packages",
        metavar="N",
        type=int,
        help="print only the first N packages; the totals count all of them",
    )
    args = rig.parse_arguments(parser, max_packages=8)
    root: Path = args.folder.resolve()

    codebase = read_codebase(root)
    print_packages(codebase, args.max_packages)
    print_totals(codebase, root)
    print_help_size(measure_help(root))


if __name__ == "__main__":
    main()
