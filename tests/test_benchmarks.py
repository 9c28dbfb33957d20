"""The scripts of benchmarks/: that each of them starts. CI runs them (.ci/benchmarks)."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize("script", sorted(file.stem for file in FOLDER.glob("*.py")))
def test_everything_that_a_script_imports_is_there(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    importlib.import_module(script)
