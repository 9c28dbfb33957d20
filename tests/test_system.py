"""`--system FILE`: what is described is stored and shown, what others ask for and nobody says is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.errors import Faults
from loadgen.execution import system_file
from loadgen.results.manifest import TargetFacts

EXAMPLE = Path(__file__).parent.parent / "docs" / "system.example.yaml"
SIM = ("qa", "--url", "sim:gb300-vm", "--request-rate", "5", "--duration", "10s", "--seed", "1")


def exits(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


def test_the_example_has_every_key_and_nothing_is_missing_then() -> None:
    told = system_file.load(EXAMPLE)
    keys = {key.removeprefix("system.") for key in told}
    parts = {
        "host": system_file.HostsOfServers, "accelerator": system_file.Accelerator, "engine": system_file.Engine,
        "model": system_file.ServedModel, "parallelism": system_file.Parallelism,
    }  # fmt: skip
    every = {f"{name}.{key}" for name, part in parts.items() for key in part.model_fields}
    every |= system_file.SystemUnderTest.model_fields.keys() - parts.keys()
    assert every - keys == {"parallelism.prefill_accelerators", "parallelism.decode_accelerators"}
    assert {key for asked in system_file.ASKED.values() for key in asked} <= every
    assert told["system.accelerator.driver"] == "580.65" and told["system.parallelism.data_attention"] == "no"
    assert system_file.missing(told, TargetFacts()) == {}


def test_what_nobody_says_is_named_and_what_the_server_says_counts(tmp_path: Path) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("name: node-7\naccelerator: {model: NVIDIA H200}\n")
    missing = system_file.missing(system_file.load(file), TargetFacts(server="vllm", version="0.12", precision="fp8"))
    assert "status" in missing["MLPerf"] and "host.memory" in missing["MLPerf"]
    assert "parallelism.tensor" in missing["InferenceX"]
    everything = {key for keys in missing.values() for key in keys}
    assert everything.isdisjoint({"name", "accelerator.model", "engine.name", "engine.version", "model.precision"})


@pytest.mark.parametrize(
    ("text", "what", "place"),
    [
        ("accelerators: {model: x}\n", 'unknown key "accelerators"', "1:1"),
        ("name: x\naccelerator: {modle: x}\n", 'unknown key "modle"', "2:15"),
        ("nodes: many\n", "nodes", "1:8"),
        ("status: fast\n", "status", "1:9"),
        ("name: [a]\n", "name", "1:7"),
        ("name: ${SYSTEM_NAME_NOT_SET}\n", "SYSTEM_NAME_NOT_SET is not set", "1:7"),
        ("- a\n", "must be a mapping", "1:1"),
        ("", "is empty", "1:1"),
    ],
)
def test_a_wrong_file_is_told_with_its_place(tmp_path: Path, text: str, what: str, place: str) -> None:
    file = tmp_path / "system.yaml"
    file.write_text(text)
    with pytest.raises(Faults) as found:
        system_file.load(file)
    (fault,) = found.value.faults
    assert what in f"{fault.what} {fault.where}" and f"system.yaml:{place}" in fault.where


def test_a_run_stores_and_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("name: node-7\naccelerator: {model: NVIDIA H200, per_node: 8}\n")
    exits("run", *SIM, "--system", file, "--metadata", "ticket=7", "--out", tmp_path / "run")
    told = capsys.readouterr().out
    assert "System     name=node-7, accelerator.model=NVIDIA H200, accelerator.per_node=8" in told
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["run"]["metadata"] == {
        "system.name": "node-7", "system.accelerator.model": "NVIDIA H200", "system.accelerator.per_node": "8",
        "ticket": "7",
    }  # fmt: skip
    (named,) = (code for code in summary["verdict"]["warning_codes"] if code["code"] == "undisclosed")
    assert "host.processor" in named["values"]["missing"]["MLPerf"]
    assert any("MLPerf asks for" in warning for warning in summary["verdict"]["warnings"])


def test_a_secret_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("engine: {arguments: --api-key sk-abcdefghijklmnop}\n")
    assert exits("run", *SIM, "--system", file, "--out", tmp_path / "run") == 2
    told = capsys.readouterr().err
    assert "secret" in told and "sk-abcdefghijklmnop" not in told
    assert exits("run", *SIM, "--system", tmp_path / "none.yaml") == 2
    assert "no such system file" in capsys.readouterr().err
