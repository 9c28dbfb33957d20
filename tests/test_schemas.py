"""The JSON Schemas that `loadgen export --schema` prints describe the files that are shipped."""

from __future__ import annotations

import contextlib
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadgen.cli import app as cli

jsonschema = pytest.importorskip("jsonschema")
ROOT = Path(__file__).parent.parent
SHIPPED = [
    *(("workload", file) for file in sorted((ROOT / "workloads").glob("*.yaml"))),
    *(("contract", file) for file in sorted((ROOT / "contracts").glob("*.yaml"))),
    ("prices", ROOT / "docs" / "prices.example.yaml"),
    ("prices", ROOT / "loadgen" / "data" / "prices_sample.yaml"),
]


@cache
def schema(kind: str) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ending:
        cli.main(["export", "--schema", kind])
    assert ending.value.code == 0
    printed: dict[str, Any] = json.loads(out.getvalue())
    return printed


def test_the_stored_schema_equals_the_printed_schema() -> None:
    assert json.loads((ROOT / "workloads" / "schema.json").read_text("utf-8")) == schema("workload")


@pytest.mark.parametrize(("kind", "file"), SHIPPED, ids=lambda value: getattr(value, "name", value))
def test_packaged_files_conform_to_their_schema(kind: str, file: Path) -> None:
    written_document = json.loads(json.dumps(yaml.safe_load(file.read_text()), default=str))
    jsonschema.Draft202012Validator(schema(kind)).validate(written_document)


@pytest.mark.parametrize(
    ("kind", "written", "good"),
    [
        ("targets", [{"url": "http://a:1", "gpus": 4}], True),
        ("targets", {"targets": [{"url": "http://a:1"}]}, True),
        ("targets", [{"name": "a"}], False),
        ("targets", [{"url": "http://a:1", "gpu": 4}], False),
        ("targets", [], False),
        (
            "contract",
            {"name": "c", "levels": [{"name": "a", "workload": "qa", "must": [{"ttft": "2s"}]}]},
            True,
        ),
        ("contract", {"name": "c", "levels": [{"name": "a", "workload": "qa", "most": []}]}, False),
        ("contract", {"levels": []}, False),
        ("prices", {"currency": "USD", "rentd": {}}, False),
    ],
)
def test_schemas_accept_valid_and_refuse_invalid_documents(
    kind: str, written: Any, good: bool
) -> None:
    assert jsonschema.Draft202012Validator(schema(kind)).is_valid(written) is good


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        (["export"], "the directory of a run is missing"),
        (["export", "r"], "--as is missing"),
        (["export", "--schema", "workloads"], "known: workload, contract, prices, targets"),
        (["export", "r", "--schema", "workload"], "--schema does not export a run"),
    ],
)
def test_an_export_without_its_format_or_with_an_unknown_schema_is_refused(
    arguments: list[str], expected_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        cli.main(arguments)
    assert ending.value.code == 2 and expected_text in capsys.readouterr().err
