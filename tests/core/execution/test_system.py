"""`--system FILE`: descriptions are stored and shown, and missing ones are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import queueing
import repository_paths
import run_fixtures
from command_line import exits
from expected_errors import refused

from loadgen.core.errors import CombinedError
from loadgen.core.execution import system_file
from loadgen.core.metrics import reasons
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.run_summary import summarize
from loadgen.core.server_metrics import hardware, series
from loadgen.runs import text

EXAMPLE = repository_paths.ROOT / "docs" / "system.example.yaml"
SIM = ("qa", "--url", "sim:gb300-vm", "--request-rate", "5", "--duration", "10s", "--seed", "1")


def test_the_example_describes_a_complete_system() -> None:
    description, target = system_file.read_system_file(EXAMPLE)
    keys = {key.removeprefix("system.") for key in description} | target.keys()
    parts = {
        "host": system_file.HostsOfServers,
        "accelerator": system_file.Accelerator,
        "engine": system_file.Engine,
        "model": system_file.ServedModel,
        "parallelism": system_file.Parallelism,
    }
    every = {f"{name}.{key}" for name, part in parts.items() for key in part.model_fields}
    every |= system_file.SystemUnderTest.model_fields.keys() - parts.keys() - {"metadata"}

    assert description["ticket"] == "PERF-42" and target == {
        "gpus": 8,
        "shape": "hgx-h200-8",
        "region": "eu-west",
    }
    assert every - keys == {
        "model.accepted_length",
        "parallelism.prefill_accelerators",
        "parallelism.decode_accelerators",
    }, "the example has no speculation, and does prefill and decode on the same accelerators"
    assert {
        key for required_keys in system_file.REQUIRED_KEYS_BY_USE.values() for key in required_keys
    } <= every
    assert (
        description["system.accelerator.driver"] == "580.65"
        and description["system.parallelism.data_attention"] == "no"
    )
    assert system_file.missing_facts(description, TargetFacts()) == {}


def test_missing_descriptions_are_named_unless_the_server_supplies_them(tmp_path: Path) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("name: node-7\naccelerator: {model: NVIDIA H200}\n")
    missing = system_file.missing_facts(
        system_file.read_system_file(file).metadata,
        TargetFacts(server="vllm", version="0.12", precision="fp8"),
    )

    assert "status" in missing["MLPerf"] and "host.memory" in missing["MLPerf"]
    assert "parallelism.tensor" in missing["InferenceX"]
    everything = {key for keys in missing.values() for key in keys}
    assert everything.isdisjoint(
        {"name", "accelerator.model", "engine.name", "engine.version", "model.precision"}
    )


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("accelerators: {model: x}\n", "unknown_key", "1:1"),
        ("name: x\naccelerator: {modle: x}\n", "unknown_key", "2:15"),
        ("nodes: many\n", "wrong_type", "1:8"),
        ("status: fast\n", "unknown_name", "1:9"),
        ("name: [a]\n", "wrong_type", "1:7"),
        ("name: ${SYSTEM_NAME_NOT_SET}\n", "unset_variable", "1:7"),
        ("- a\n", "wrong_type", "1:1"),
        ("", "empty_file", "1:1"),
    ],
)
def test_an_invalid_system_file_is_reported_with_its_location(
    tmp_path: Path, text: str, code: str, place: str
) -> None:
    file = tmp_path / "system.yaml"
    file.write_text(text)
    with refused(CombinedError, code, where=f"system.yaml:{place}") as exc_info:
        system_file.read_system_file(file)
    assert len(exc_info.value.errors) == 1


def test_a_run_stores_and_prints_its_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("name: node-7\naccelerator: {model: NVIDIA H200, per_node: 8}\n")
    exits("run", *SIM, "--system", file, "--metadata", "ticket=7", "--full", "-o", tmp_path / "run")
    stdout = " ".join(capsys.readouterr().out.split())

    assert "name=node-7, accelerator.model=NVIDIA H200, accelerator.per_node=8" in stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["run"]["metadata"] == {
        "system.name": "node-7",
        "system.accelerator.model": "NVIDIA H200",
        "system.accelerator.per_node": "8",
        "ticket": "7",
    }

    (named,) = (
        code for code in summary["verdict"]["warning_codes"] if code["code"] == "undisclosed"
    )

    assert "host.processor" in named["values"]["missing"]["MLPerf"]


def test_a_secret_in_a_system_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("engine: {arguments: --api-key sk-abcdefghijklmnop}\n")
    assert exits("run", *SIM, "--system", file, "--out", tmp_path / "run") == 2
    stderr = capsys.readouterr().err
    assert "secret" in stderr and "sk-abcdefghijklmnop" not in stderr
    assert exits("run", *SIM, "--system", tmp_path / "none.yaml") == 2
    assert "no such system file" in capsys.readouterr().err


DCGM = """\
# HELP DCGM_FI_DEV_POWER_MGMT_LIMIT Current power limit (in W).
# TYPE DCGM_FI_DEV_POWER_MGMT_LIMIT gauge
""" + "".join(
    f'{name}{{gpu="{gpu}",UUID="GPU-{gpu}",device="nvidia{gpu}",modelName="NVIDIA H200",'
    f'Hostname="node-7",DCGM_FI_DRIVER_VERSION="580.65.06"}} {value}\n'
    for name, value in (("DCGM_FI_DEV_POWER_MGMT_LIMIT", 700), ("DCGM_FI_DEV_GPU_TEMP", 41))
    for gpu in range(8)
)
SMI = 'nvidia_smi_gpu_info{driver_version="570.1",name="NVIDIA B200",uuid="a"} 1\n'


def _samples(page: str, text: str) -> list[series.MetricSample]:
    return [
        series.MetricSample(t_s=0.0, target=None, page=page, name=name, labels=labels, value=value)
        for (name, labels), value in series.parse_page(text).items()
    ]


def test_accelerators_driver_and_power_limit_are_read_from_a_dcgm_page() -> None:
    finding = hardware.find_hardware(_samples("http://node-7:9400/metrics", DCGM))

    assert finding is not None
    assert finding.descriptions == ["8 x NVIDIA H200", "driver 580.65.06", "power limit 700 W each"]

    samples = [
        *_samples("http://a/metrics", DCGM),
        *_samples("http://b/metrics", DCGM.replace("} 700", "} 600")),
    ]
    both = hardware.find_hardware(samples)

    assert (
        both is not None
        and both.accelerators == 16
        and both.descriptions[2] == "power limit 600 to 700 W"
    )
    other = hardware.find_hardware(_samples("http://c/metrics", SMI))
    assert other is not None and other.descriptions == ["1 x NVIDIA B200", "driver 570.1"]
    assert (
        hardware.find_hardware(_samples("http://d/metrics", "vllm:num_requests_running 3\n"))
        is None
    )


def test_hardware_metrics_fill_gaps_of_a_system_file_and_contradictions_warn() -> None:
    """DCGM supplies the missing driver and contradicts the 500 W of the file with 700 W."""
    missing = {
        "a second measurement": [
            "accelerator.driver",
            "accelerator.power_limit_w",
            "model.kv_cache",
        ]
    }
    coded = reasons.make_note("undisclosed", {"missing": missing})
    description = {"system.accelerator.power_limit_w": "500", "system.accelerator.driver": "580.65"}
    manifest = run_fixtures.manifest(
        "r", 200, warnings=tuple(coded), warning_codes=coded, metadata=description
    )
    rows = queueing.rows(1, 200)
    plain = summarize(manifest, rows)
    summary = summarize(manifest, rows, server_samples=_samples("http://node-7:9400/metrics", DCGM))
    by_code = {code.code: code.values for code in summary.verdict.warning_codes}

    assert by_code["undisclosed"]["missing"] == {"a second measurement": ["model.kv_cache"]}
    assert by_code["hardware_differs"] == {
        "key": "accelerator.power_limit_w",
        "said": "500",
        "seen": "700",
    }
    before = {code.code: code.values for code in plain.verdict.warning_codes}
    assert before["undisclosed"]["missing"] == missing and "hardware_differs" not in before
    assert "8 x NVIDIA H200, driver 580.65.06" in text.render(summary)
