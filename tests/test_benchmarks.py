"""The scripts of benchmarks/: each of them starts and has a smallest form, and pages name those that are there. CI runs
the smallest forms (.ci/benchmarks)."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
PARTS = {"contenders", "ours", "rig", "scale_ray", "tree"}  # what scripts share
SCRIPTS = {file.stem for file in FOLDER.glob("*.py")} - PARTS
PAGES = [*ROOT.glob("*.md"), *ROOT.glob(".ci/*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/*/*.md")]


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_script_starts_and_has_a_smallest_form(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--smoke" in said and f"benchmarks/{script}.py" in said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_scripts_that_are_there(page: Path) -> None:
    named = set(re.findall(r"benchmarks/(\w+)\.py", page.read_text("utf-8")))
    assert named <= SCRIPTS, f"{page.name} names what is not in benchmarks/: {named - SCRIPTS}"


def test_the_table_of_the_benchmarks_has_every_script() -> None:
    text = (FOLDER / "README.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(\w+)\.py`", text, re.MULTILINE)) == SCRIPTS
    assert {name for name in PARTS if f"`{name}.py`" in text} == PARTS
