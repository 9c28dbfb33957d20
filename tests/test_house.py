"""What a compiler would guard: imports point one way, there are no cycles, pure rooms stay pure."""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"loadgen": ROOT / "loadgen", "loadgen_sdk": ROOT / "sdk" / "loadgen_sdk"}

PURE = {
    "loadgen.metrics.drift",
    "loadgen.metrics.accumulator",
    "loadgen.metrics.folded_summary",
    "loadgen.schedule.dispatcher",
    "loadgen.compare.comparison",
    "loadgen.compare.thresholds",
    "loadgen.schedule.arrivals",
    "loadgen.execution.backends.clock_sync",
    "loadgen.preflight.target_checks",
    "loadgen.preflight.host_checks",
    "loadgen.results.manifest",
    "loadgen.contracts.verdict",
    "loadgen.requests.laws",
    "loadgen.search.sweep",
    "loadgen.metrics.columns",
    "loadgen.requests.prompts",
    "loadgen.stats.quantiles",
    "loadgen.results.record",
    "loadgen.metrics.summary_json",
    "loadgen.format",
    "loadgen.report.text",
    "loadgen.report.validation",
    "loadgen.contracts.steady_samples",
    "loadgen.schedule.timetable",
    "loadgen.results.slot_ranges",
    "loadgen.stats.steady_state",
    "loadgen.stats.quantile_interval",
    "loadgen.sim.server.response",
    "loadgen.sim.server.request_parser",
    "loadgen.sim.server.dialect",
    "loadgen.sim.engine.replica",
    "loadgen.sim.server.faults",
    "loadgen.sim.engine.fleet",
    "loadgen.sim.server.message",
    "loadgen.sim.server.options",
    "loadgen.sim.virtual_rows",
    "loadgen.sim.engine.latency_model",
    "loadgen.sim.server.metrics_pages",
    "loadgen.sim.engine.routing",
    "loadgen.sim.request_lengths",
    "loadgen.metrics.summary",
    "loadgen.metrics.blocks",
    "loadgen.units",
    "loadgen.metrics.validity",
    "loadgen.contracts.evaluate",
    "loadgen_sdk.dialects.body",
    "loadgen_sdk.dialects.quirks",
    "loadgen_sdk.dialects.reader",
    "loadgen_sdk.transport.exchange",
    "loadgen_sdk.transport.http1",
    "loadgen_sdk.measures",
    "loadgen_sdk.probe.probe",
    "loadgen_sdk.request",
    "loadgen_sdk.dialects.sse",
    "loadgen_sdk.transport.target",
}
"""Rooms that touch no file, socket, clock or process. `probe` asks through functions it is given."""

IO_MODULES = {
    "socket",
    "ssl",
    "select",
    "selectors",
    "subprocess",
    "threading",
    "multiprocessing",
    "tempfile",
    "shutil",
}
CLOCKS = {"time", "monotonic", "monotonic_ns", "time_ns", "perf_counter", "sleep"}
ONLY = {  # heavy module -> who may import it
    "tiktoken": {"loadgen.requests.tokenizer"},
    "tokenizers": {"loadgen.requests.tokenizer"},
    "ray": {"loadgen.execution.backends.ray"},
    "httptools": {"loadgen.sim"},
}
AT_THE_TOP_OF_NOTHING = {"openai", "pyarrow", "tokenizers", "tiktoken", "ray", "rich", "uvloop"}
"""Imported inside the function that needs them, so that `--help` is instant."""


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(), str(path))
    return found


def imports(name: str, *, top_only: bool = False) -> set[str]:
    """Modules that `name` imports, relative ones resolved; those for type checking alone are left out."""
    found: set[str] = set()
    path_is_package = any(other.startswith(name + ".") for other in modules())

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    up = name.split(".") if path_is_package else name.split(".")[:-1]
                    up = up[: len(up) - child.level + 1]
                    base = ".".join([*up, base] if base else up)
                found.add(base)
                found.update(f"{base}.{alias.name}" for alias in child.names)
            if not (top_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))):
                visit(child)

    visit(modules()[name])
    return found


def ours(name: str, *, top_only: bool = False) -> set[str]:
    return {found for found in imports(name, top_only=top_only) if found in modules() and found != name}


def test_pure_rooms_exist() -> None:
    assert set(modules()) >= PURE


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_rooms_import_no_io(name: str) -> None:
    roots = {found.split(".")[0] for found in imports(name)}
    assert not roots & IO_MODULES
    assert not {f"time.{clock}" for clock in CLOCKS} & imports(name)
    impure = {
        "loadgen.execution.driver",
        "loadgen.execution.run",
        "loadgen.results.parquet",
        "loadgen.results.spool",
        "loadgen.results.store",
        "loadgen.execution.bodies",
        "loadgen.report.progress",
    }
    impure |= {
        "loadgen.sim.server.process",
        "loadgen.sim.server.endpoint",
        "loadgen.sim.server.embedded",
        "loadgen_sdk.transport.wire",
        "loadgen_sdk.app.client",
        "loadgen_sdk.probe.fetch",
    }
    assert not ours(name) & impure


def test_the_sdk_never_imports_the_generator() -> None:
    for name in modules():
        if name.startswith("loadgen_sdk"):
            assert not {found for found in imports(name) if found == "loadgen" or found.startswith("loadgen.")}, name


def test_nobody_imports_the_command_line() -> None:
    for name in modules():
        if not name.startswith("loadgen.cli") and name != "loadgen.__main__":
            assert not {found for found in ours(name) if found.startswith("loadgen.cli")}, name


@pytest.mark.parametrize(("heavy", "allowed"), sorted(ONLY.items()))
def test_heavy_modules_have_one_importer(heavy: str, allowed: set[str]) -> None:
    users = {name for name in modules() if heavy in {found.split(".")[0] for found in imports(name)}}
    assert {name for name in users if not any(name == one or name.startswith(one + ".") for one in allowed)} == set()


def test_only_the_wire_touches_sockets_in_the_client() -> None:
    users = {name for name in modules() if name.startswith("loadgen_sdk") and "socket" in imports(name)}
    # clock: a socket pair stands in where there is no timerfd; direct: the probe's few requests before the load
    assert users <= {"loadgen_sdk.transport.wire", "loadgen_sdk.transport.clock", "loadgen_sdk.probe.fetch"}


def test_heavy_imports_are_inside_functions() -> None:
    for name in modules():
        top = {found.split(".")[0] for found in imports(name, top_only=True)}
        assert not top & AT_THE_TOP_OF_NOTHING, name


def test_no_cycles() -> None:
    graph = {name: ours(name, top_only=True) for name in modules()}
    for name, found in graph.items():  # `from . import x` names the package as well; that is no cycle of its own
        found -= {name.rpartition(".")[0]}
    TopologicalSorter(graph).prepare()


def test_each_room_says_what_it_is() -> None:
    for name, tree in modules().items():
        if tree.body:
            assert ast.get_docstring(tree), name


def test_help_imports_nothing_heavy() -> None:
    import subprocess

    code = "import sys, loadgen.cli; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "pyarrow", "openai", "pydantic", "tiktoken", "uvloop", "rich"} & set(loaded)
