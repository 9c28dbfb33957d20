"""Rules of the architecture that import-linter cannot check, and the truth of loadgen/README.md.

Layers, independence of packages and purity are contracts of import-linter in `pyproject.toml`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import make_packages
import parsed_modules
import pytest
from make_packages import FOLDERS, README, ROOT

CONTRIBUTING = ROOT / "CONTRIBUTING.md"

HEAVY = {"openai", "pyarrow", "ray", "rich", "tiktoken", "tokenizers", "uvloop"}
"""Imported inside the function that needs them, so that `--help` is instant."""

ONLY = {  # heavy module -> the one that may import it
    "httptools": "loadgen.sim.server.connection",
    "mlperf_loadgen": "loadgen.mlperf.official_loadgen",
    "ray": "loadgen.cluster.ray_process",
    "rich": "loadgen.runs.dashboard",
    "tiktoken": "loadgen.core.requests.tokenizer",
    "tokenizers": "loadgen.core.requests.tokenizer",
}

TWICE = {  # class -> why two modules have one of this name
}


PATCHED = {  # the only attributes that tests replace -> why
    ("test_process_faults.py", "stdin"): "of sys: what a worker reads of its command",
    ("test_benchmarks.py", "argv"): "of sys: a script is started as one starts it",
    ("test_platforms.py", "platform"): "of sys: there is no Windows to start on",
    ("test_tokenizer.py", "load_tiktoken_bpe"): "of tiktoken: it would use the network",
}

TABLES = ("backends", "commands", "figures", "formats", "prices", "result_kinds")
IMPORTS_OF_TABLES = {"loadgen.core.errors", "loadgen.plugins"}


def named(file: Path) -> str:
    """Return the name of a module."""
    (folder,) = (
        package_dir for package_dir in FOLDERS.values() if file.is_relative_to(package_dir)
    )
    return ".".join(file.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def trees() -> dict[str, ast.Module]:
    """Every module by its name, parsed."""
    return {named(file): tree for file, tree in parsed_modules.trees().items()}


@cache
def graph() -> grimp.ImportGraph:
    """Return the imports of each module: at its top, in functions and for type checking.

    Third-party packages are named as a whole.
    """
    return grimp.build_graph(*FOLDERS, include_external_packages=True, cache_dir=None)


@cache
def sources() -> dict[str, str]:
    """Return the text of every Python file by path, tests and benchmarks included."""
    folders = (*FOLDERS.values(), ROOT / "tests", ROOT / "benchmarks")
    return {
        str(file.relative_to(ROOT)): file.read_text("utf-8")
        for folder in folders
        for file in folder.rglob("*.py")
    }


@pytest.mark.processes
def test_imports_follow_the_contracts() -> None:
    """The contracts on imports hold.

    The linter runs in a process of its own, because it configures logging, which would disable the
    loggers of other tests.
    """
    code = (
        "import sys; from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(no_cache=True, no_logo=True))"
    )
    linted = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_modules_have_no_import_cycles() -> None:
    """Imports for type checkers alone do not count: Python never carries them out."""
    at_run_time = grimp.build_graph(
        *FOLDERS,
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )
    imports = {
        name: set(at_run_time.find_modules_directly_imported_by(name))
        for name in at_run_time.modules
    }
    imports["loadgen"].remove(
        "loadgen.api"
    )  # `loadgen.run` is looked up there when it is first used
    for table in TABLES:  # what they import later is not imported with them: see the test below
        imports[f"loadgen.{table}"] = IMPORTS_OF_TABLES
    TopologicalSorter(imports).prepare()


@pytest.mark.parametrize("table", TABLES)
def test_a_table_imports_its_rows_only_in_functions(table: str) -> None:
    tree = trees()[f"loadgen.{table}"]
    imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}

    assert {name for name in imported if name and name.startswith("loadgen")} <= IMPORTS_OF_TABLES
    assert not any(
        alias.name.startswith("loadgen")
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    )


def test_modules_that_are_started_exist() -> None:
    started = [
        (file, name)
        for file, text in sources().items()
        for name in re.findall(r'(?:"-m",\s*|command\(|beside\(\s*)"(loadgen[\w.]*)"', text)
    ]
    assert len(started) >= 6
    assert [(file, name) for file, name in started if name not in trees()] == []


def test_code_in_strings_imports_existing_names() -> None:
    """Neither mypy nor ordinary tests would find every wrong name in code inside strings."""
    for file, text in sources().items():
        for name, imported in re.findall(
            r"\bfrom (loadgen(?:_sdk)?(?:\.\w+)*) import ([\w, ]*)", text
        ):
            assert name in trees() or name == "loadgen.data", file
            if name == "loadgen":
                names = {
                    entry_name.split()[0]
                    for entry_name in imported.split(",")
                    if entry_name.strip()
                }
                assert names <= {"Result", "load", "run"} or {
                    f"loadgen.{entry_name}" for entry_name in names
                } <= set(trees()), file


@pytest.mark.parametrize("package", FOLDERS)
def test_a_class_name_has_one_meaning(package: str) -> None:
    places = defaultdict(list)
    for name, tree in trees().items():
        for node in tree.body:
            if (
                name.split(".")[0] == package
                and isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
            ):
                places[node.name].append(name)
    allowed = set(TWICE) if package == "loadgen" else set()

    assert {
        name: where for name, where in places.items() if len(where) > 1 and name not in allowed
    } == {}
    assert all(len(places[name]) == 2 for name in allowed), "an excuse that is no longer needed"


def test_heavy_imports_are_inside_functions() -> None:
    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                top.update(alias.name.split(".")[0] for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                top.add((child.module or "").split(".")[0])
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if not typing and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(child)

    for name, tree in trees().items():
        top: set[str] = set()
        visit(tree)
        assert not top & HEAVY, name


@pytest.mark.parametrize("heavy", ONLY)
def test_heavy_modules_have_one_importer(heavy: str) -> None:
    assert graph().find_modules_that_directly_import(heavy) == {ONLY[heavy]}


@pytest.mark.processes
@pytest.mark.parametrize(
    "module", ["cli.app", "core.sidecars.scraper", "core.sidecars.compactor_process"]
)
def test_help_and_sidecar_processes_import_no_heavy_module(module: str) -> None:
    code = f"import sys, loadgen.{module}; print(' '.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not (HEAVY | {"numpy", "pydantic"}) & set(loaded)


def test_each_module_has_a_docstring() -> None:
    for name, tree in trees().items():
        assert ast.get_docstring(tree), name


@pytest.mark.parametrize("package", FOLDERS)
def test_each_package_has_a_docstring(package: str) -> None:
    for folder in FOLDERS[package].iterdir():
        if any(folder.glob("*.py")) and folder.name != "data":
            assert (folder / "__init__.py").exists(), folder
    for path in make_packages.packages(package):
        purpose, _ = make_packages.docstring(FOLDERS[package] / path)
        assert purpose.endswith("."), path


def test_tests_mock_no_code_of_the_project() -> None:
    """Whatever a test has to change is an argument, so that no test patches a module."""
    replacements = {
        (
            file.name,
            str(call.args[-2].value)
            if isinstance(call.args[-2], ast.Constant)
            else ast.unparse(call),
        )
        for file in (ROOT / "tests").rglob("*.py")
        if ".setattr(" in (text := file.read_text("utf-8"))
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "setattr"
    }

    assert replacements == set(PATCHED)


def test_text_files_are_utf_8_on_every_machine() -> None:
    """And not in what the locale of a user has."""
    calls = {
        "open": "'[rwax]'",
        "NamedTemporaryFile": "'[rwax]'",
        "read_text": r"\.read_text",
        "write_text": r"\.write",
    }
    for file, nodes in parsed_modules.nodes().items():
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            text = calls.get(getattr(call.func, "attr", getattr(call.func, "id", "")))
            if (
                text and re.search(text, call_text := ast.unparse(call)) and "zip" not in call_text
            ):  # into a zip go bytes
                assert "utf-8" in call_text, f"{file}:{call.lineno}: {call_text}"


def test_few_modules_lie_outside_packages_and_tables() -> None:
    tables = {"backends", "commands", "figures", "plugins", "result_kinds"}
    assert len({file.stem for file in FOLDERS["loadgen"].glob("*.py")} - tables) <= 12


def test_the_tables_of_packages_match_their_docstrings() -> None:
    assert README.read_text("utf-8") == make_packages.readme(), "python tests/make_packages.py"


def test_files_named_in_the_documents_exist() -> None:
    documents = (ROOT / "README.md", CONTRIBUTING, README, *(ROOT / "docs").rglob("*.md"))
    for document in documents:
        file_names = re.findall(
            r"`((?:loadgen|sdk|tests|benchmarks)/[\w/]+\.\w+)`", document.read_text("utf-8")
        )
        for name in file_names:
            assert (ROOT / name).exists(), f"{document.name}: {name}"


def test_modules_and_tests_named_in_the_recipes_exist() -> None:
    """CONTRIBUTING.md names modules from the package `loadgen` on, and tests by their function."""
    text = CONTRIBUTING.read_text("utf-8")
    module_paths = re.findall(r"`(?:python )?([\w./]+\.py)[^`]*`", text)
    parents = (ROOT, FOLDERS["loadgen"])
    missing_paths = {
        path
        for path in module_paths
        if "/" in path and not any((parent / path).exists() for parent in parents)
    }
    assert missing_paths == set()

    module_names = {file.name for package in FOLDERS.values() for file in package.rglob("*.py")}
    assert {path for path in module_paths if "/" not in path} <= module_names

    test_names = set(re.findall(r"`(test_\w+)`", text))
    sources = [file.read_text("utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    defined_names = set(re.findall(r"(?m)^(?:async )?def (test_\w+)\(", "\n".join(sources)))
    assert test_names
    assert test_names - defined_names == set()
