"""Nothing that a user sees has changed: rows, summaries, helps, faults, stored folders, against `data/oracle/`.

`make_oracle.py` says what is frozen and what is not, and writes it again where a change is meant.
"""

from __future__ import annotations

import json
from pathlib import Path

import make_oracle
import pytest
from make_oracle import DATA, FROZEN


@pytest.mark.processes
@pytest.mark.parametrize("name", FROZEN)
def test_as_it_was(name: str, tmp_path: Path) -> None:
    found = json.loads(make_oracle.written(FROZEN[name](tmp_path)))
    assert found == json.loads((DATA / f"{name}.json").read_text("utf-8"))


@pytest.mark.processes
def test_every_command_explains_itself_as_before() -> None:
    stored = {file.stem: file.read_text("utf-8") for file in (DATA / "help").glob("*.txt")}
    found = make_oracle.helps()
    assert sorted(found) == sorted(stored)
    for name, text in found.items():
        assert text == stored[name], name


@pytest.mark.processes
def test_the_form_of_a_workload_file() -> None:
    stored = (DATA / "schema.json").read_text("utf-8")
    assert make_oracle.schema() == stored
    assert json.loads((make_oracle.ROOT / "workloads" / "schema.json").read_text("utf-8")) == json.loads(stored)
