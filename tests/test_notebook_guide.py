"""The Python examples of docs/guides/notebooks.md run, each if its library is installed."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import repository_paths
import run_fixtures

from loadgen.core.results import store
from loadgen.core.server_metrics.series import FILE
from loadgen.core.sidecars.compactor_process import Compactor

PAGE = repository_paths.ROOT / "docs" / "guides" / "notebooks.md"
EXAMPLES = re.findall(r"(?m)^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL)
LIBRARIES = [example.split()[1] for example in EXAMPLES]


def test_each_library_has_an_example_in_the_notebook_guide() -> None:
    assert set(LIBRARIES) == {"loadgen", "polars", "pandas", "duckdb"}


@pytest.mark.processes
@pytest.mark.filterwarnings("default")  # warnings of other libraries about themselves
@pytest.mark.parametrize("example", EXAMPLES, ids=LIBRARIES)
def test_each_example_of_the_notebook_guide_runs(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(example.split()[1])
    _write_run(tmp_path / "results" / "RUN")
    repository_paths.unpack("search", tmp_path / "results")
    (tmp_path / "results" / "search").rename(tmp_path / "results" / "SEARCH")
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {}
    *statements, last = ast.parse(example).body
    _execute(ast.Module(statements, []), variables)
    if not isinstance(last, ast.Expr):
        _execute(ast.Module([last], []), variables)
        return
    value = eval(compile(ast.Expression(last.value), str(PAGE), "eval"), variables)

    assert len(repr(value)) > 40, "a notebook shows the value of the last line"


def _execute(module: ast.Module, variables: dict[str, Any]) -> None:
    """Execute statements as a notebook does, where `await` is allowed outside of functions."""
    code = compile(module, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    coroutine: Coroutine[Any, Any, None] | None = eval(code, variables)
    if coroutine is not None:
        asyncio.run(coroutine)


def _write_run(folder: Path) -> None:
    """Write a finished run with a sample of the metrics page of its server."""
    run_fixtures.write(folder)
    compactor = Compactor(folder)
    assert compactor.finish()
    store.delete_record_log(folder)
    sample = {
        "t_s": 0.0,
        "target": 0,
        "page": "http://h/metrics",
        "name": "up",
        "labels": "",
        "value": 1.0,
    }
    (folder / FILE).write_text(json.dumps(sample) + "\n")
