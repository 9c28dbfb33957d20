"""Structure and figures equal the stored ones: names, flags, exit codes, JSON, files, results.

`make_oracle.py` describes what is stored and renews it after an intended change.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from make_oracle import DATA, ENDPOINT_COMMANDS, FROZEN, TYPED
from oracle_values import differences, over, shape
from public_names import commands, flags

MARKS = {
    "asked": pytest.mark.processes,
    "sent": pytest.mark.processes,
    "typed": pytest.mark.commands,
}
ENTRIES = [
    pytest.param(file, entry, id=f"{file}/{entry}", marks=MARKS.get(entry, ()))
    for file, entries in FROZEN.items()
    for entry in entries
]


@cache
def stored(file: str) -> Any:
    return json.loads((DATA / f"{file}.json").read_text("utf-8"))


@pytest.mark.parametrize(("file", "entry"), ENTRIES)
def test_each_stored_document_equals_the_current_output(
    file: str, entry: str, tmp_path: Path
) -> None:
    current = json.loads(json.dumps(FROZEN[file][entry](tmp_path)))
    differing_paths = list(differences(current, stored(file)[entry]))
    assert not differing_paths, "\n".join(differing_paths)


def test_every_stored_document_has_a_function_that_generates_it() -> None:
    assert {file.stem for file in DATA.glob("*.json")} == FROZEN.keys()
    assert {file: set(stored(file)) for file in FROZEN} == {
        file: set(entries) for file, entries in FROZEN.items()
    }


def test_the_json_of_every_command_is_stored() -> None:
    calls = [" ".join(call) for call in (*TYPED, *ENDPOINT_COMMANDS) if "--json" in call]
    with_json = [name for name, command in commands().items() if "--json" in flags(command)]
    assert [
        name for name in with_json if not any(call.startswith(f"{name} ") for call in calls)
    ] == []
    printed = stored("commands")["typed"] | stored("commands")["asked"]
    assert [call for call in calls if "json" not in printed[call]] == [], "a fault is no JSON"


@pytest.mark.parametrize(
    ("current", "stored", "expected_paths"),
    [
        ({"a": 1.0, "b": None}, {"a": 1.0 + 1e-13, "b": None}, []),
        ({"a": 1.0}, {"a": 1.0 + 1e-9}, [".a: 1.0 in place of 1.000000001"]),
        ({"a": [{"b": 1}]}, {"a": [{"c": 1}]}, [".a[0].b: new", ".a[0].c: gone"]),
        ({"a": ["x", "y"]}, {"a": ["x"]}, [".a: 2 in place of 1, new ['y'], gone []"]),
        ({"a": True}, {"a": 1}, [".a: True in place of 1"]),
        ({"a": None}, {"a": 0.0}, [".a: None in place of 0.0"]),
    ],
)
def test_a_difference_from_a_stored_document_is_reported_with_its_path(
    current: Any, stored: Any, expected_paths: list[str]
) -> None:
    assert list(differences(current, stored)) == expected_paths


def test_shapes_of_list_elements_are_merged() -> None:
    rows = [
        {"a": 1, "b": []},
        {"a": None, "b": [{"x": 2.5}]},
        {"a": 3, "c": "d", "b": [{"x": None, "y": True}]},
    ]

    assert shape(rows) == [
        {"a": "null|number", "b": [{"x": "null|number", "y": "bool"}], "c": "text"}
    ]
    assert over("null", {"a": "text"}) == over({"a": "text"}, "null") == {"a": "text"}
