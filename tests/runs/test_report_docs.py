"""The Python examples of docs/report.md run on a stored run and a search, each where its library is installed."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import places
import pytest
import runs

from loadgen.core.results import store
from loadgen.core.server_metrics.series import FILE
from loadgen.core.sidecars.compactor_process import Compactor

PAGE = places.ROOT / "docs" / "report.md"
EXAMPLES = re.findall(r"(?m)^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL)
LIBRARIES = ["loadgen", "polars", "pandas", "duckdb"]


def test_there_is_an_example_of_each_library() -> None:
    assert [text.split()[1] for text in EXAMPLES] == LIBRARIES


@pytest.mark.processes
@pytest.mark.filterwarnings(
    "default"
)  # what a library of others says of itself is not ours to mend
@pytest.mark.parametrize("example", EXAMPLES, ids=LIBRARIES)
def test_the_examples_run(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(example.split()[1])
    folder = runs.write(tmp_path / "results" / "RUN")
    recorder = Compactor(folder)
    assert recorder.finish()
    store.drop_spool(folder)
    sample = {
        "t_s": 0.0,
        "target": 0,
        "page": "http://h/metrics",
        "name": "up",
        "labels": "",
        "value": 1.0,
    }
    (folder / FILE).write_text(json.dumps(sample) + "\n")
    places.unpack("search", tmp_path / "results")
    (tmp_path / "results" / "search").rename(tmp_path / "results" / "SEARCH")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    *statements, last = ast.parse(example).body
    exec(compile(ast.Module(statements, []), str(PAGE), "exec"), names)
    assert isinstance(last, ast.Expr)
    shown = repr(
        eval(compile(ast.Expression(last.value), str(PAGE), "eval"), names)
    )  # as a notebook's cell shows it
    assert len(shown) > 40
