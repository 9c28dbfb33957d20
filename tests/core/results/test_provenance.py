"""Provenance of a results folder: software, metadata, region and the hash of every file."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import run_page
from command_line import exits

import loadgen
from loadgen.cli.user_metadata import collect_secrets, parse_metadata
from loadgen.core.errors import CombinedError
from loadgen.core.metrics.summary import load_summary
from loadgen.core.results import checksums
from loadgen.core.results.manifest import decode_manifest
from loadgen.runs import text

SIM = "sim:gb300-vm"
FLAGS = ["qa", "--url", SIM, "--input-tokens", "60", "--output-tokens", "4"]


def sound(folder: Path) -> bool:
    """Return True if sha256sum verifies every listed file and no file is missing from the list."""
    process = subprocess.run(
        ["sha256sum", "--quiet", "-c", checksums.FILE], cwd=folder, capture_output=True, check=False
    )
    return process.returncode == 0 and not checksums.unlisted(folder)


def run(folder: Path, **flags: Any) -> loadgen.Result:
    small = {
        "url": SIM,
        "num_requests": 20,
        "input_tokens": 60,
        "output_tokens": 4,
        "concurrency": 2,
        "warmup": "0",
    }
    return loadgen.run("qa", **(small | {"out": folder, "seed": 3} | flags))


# -- hashes ----------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        ["run", *FLAGS, "-c", "2", "-n", "20"],
        ["run", *FLAGS, "-c", "1,2", "-n", "20"],
        ["sweep", *FLAGS, "-c", "1,2", "-n", "20"],
        [
            "search",
            "qa",
            "--url",
            SIM,
            "--slo",
            "ttft:2s",
            "--max-probes",
            "2",
            "-d",
            "5s",
            "--start",
            "2",
        ],
    ],
)
def test_every_results_folder_has_its_hashes(
    command: list[str], tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "out"
    exits(*command, "-o", str(folder))

    assert sound(folder)
    runs = [file.parent for file in folder.rglob("run.json")]
    assert runs and all(sound(run_dir) for run_dir in runs)
    if command[0] != "search":
        assert exits("report", str(folder)) == 0  # writes or renews a page
        assert checksums.find_changes(folder) == {}
        assert "was modified" not in capsys.readouterr().err


@pytest.mark.processes
def test_an_mlperf_run_and_a_real_run_have_hashes(tmp_path: Path) -> None:
    flags = [
        "-b",
        "llama2-70b",
        "--url",
        SIM,
        "--target-qps",
        "20",
        "--min-duration",
        "1",
        "--mean-output",
        "8",
    ]
    exits("mlperf", "server", *flags, "--metadata", "rack=7", "-o", str(tmp_path / "m"))

    assert sound(tmp_path / "m")
    assert "mlperf.json" in (checksums.read_checksums(tmp_path / "m") or {})
    notes = json.loads((tmp_path / "m" / "mlperf.json").read_bytes())["notes"]
    assert "metadata: rack=7" in notes
    assert "software: engine simulated, precision nvfp4, KV cache fp8" in notes


def test_a_changed_file_is_reported_with_the_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", seed=4)
    stored = (tmp_path / "a" / "summary.json").read_text()
    (tmp_path / "a" / "summary.json").write_text(stored.replace('"schema": 1', '"schema":  1', 1))
    (tmp_path / "a" / "seconds.jsonl").unlink()

    assert checksums.find_changes(tmp_path / "a") == {
        "seconds.jsonl": "gone",
        "summary.json": "changed",
    }
    assert exits("report", str(tmp_path / "a"), "--no-html") == 0
    captured = capsys.readouterr()
    assert "seconds.jsonl (gone), summary.json (changed)" in captured.err
    assert "sha256sum -c SHA256SUMS" in captured.err
    assert "Measurement  valid" in captured.out
    exits("compare", str(tmp_path / "b"), str(tmp_path / "a"))
    assert "summary.json (changed)" in capsys.readouterr().err


def test_a_folder_without_hashes_is_read_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a")
    (tmp_path / "a" / checksums.FILE).unlink()
    assert exits("report", str(tmp_path / "a"), "--no-html") == 0
    assert "was modified" not in capsys.readouterr().err


@pytest.mark.processes
def test_an_unfinished_sweep_has_no_hashes(tmp_path: Path) -> None:
    exits("sweep", *FLAGS, "-c", "1", "-n", "20", "--seed", "3", "-o", str(tmp_path / "s"))
    assert sound(tmp_path / "s")
    shutil.copytree(tmp_path / "s", tmp_path / "before")
    exits("sweep", *FLAGS, "-c", "1,2", "-n", "20", "--seed", "3", "-o", str(tmp_path / "s"))
    assert sound(tmp_path / "s")
    assert set(checksums.read_checksums(tmp_path / "before") or {}) < set(
        checksums.read_checksums(tmp_path / "s") or {}
    )


# -- metadata --------------------------------------------------------------------------------------


def test_metadata_are_stored_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = ["--metadata", "driver=580.65", "--metadata", "note=two words, and = too"]
    folder = str(tmp_path / "a")

    assert exits("run", *FLAGS, "-c", "2", "-n", "20", *pairs, "--full", "-o", folder) == 0
    expected = {"driver": "580.65", "note": "two words, and = too"}
    assert decode_manifest((tmp_path / "a" / "run.json").read_bytes()).metadata == expected
    summary = load_summary((tmp_path / "a" / "summary.json").read_bytes(), "")
    assert summary.run.metadata == expected
    captured = capsys.readouterr()
    assert "driver=580.65" in captured.out
    assert "driver=580.65" in run_page.render(summary)
    assert run(tmp_path / "b", metadata={"driver": "580.65"}).summary.run.metadata == {
        "driver": "580.65"
    }
    exits("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--full")
    assert "driver=580.65, note=two words" in capsys.readouterr().out
    exits("sweep", *FLAGS, "-c", "1,2", "-n", "20", *pairs, "-o", str(tmp_path / "s"))
    assert json.loads((tmp_path / "s" / "plan.json").read_bytes())["metadata"] == expected


@pytest.mark.parametrize(
    "text",
    [
        "api_key=abc",
        "api-key=abc",
        "X-API-Key=abc",
        "OPENAI_API_KEY=abc",
        "hf_token=abc",
        "password=abc",
        "client_secret=abc",
        "Authorization=abc",
        "note=sk-abcdefghijklmnop",
        "note=Bearer abcdefghijkl",
        "note=hidden-in-it-KEY-OF-MINE",
    ],
)
def test_no_secret_reaches_metadata(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "KEY-OF-MINE")
    pairs, faults = parse_metadata([text], ["KEY-OF-MINE"])

    assert pairs == () and len(faults) == 1
    secret = text.partition("=")[2]
    assert secret not in str(faults[0])
    assert (
        exits(
            "run",
            "qa",
            "--url",
            "http://127.0.0.1:9",
            "--metadata",
            text,
            "-o",
            str(tmp_path / "x"),
        )
        == 2
    )
    assert secret not in capsys.readouterr().err
    with pytest.raises(CombinedError):
        run(tmp_path / "x", metadata=[text], api_key="KEY-OF-MINE")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "key", ["tokens", "max_tokens", "tokenizer", "monkey", "keyboard", "author"]
)
def test_metadata_that_only_resembles_a_secret_is_accepted(key: str) -> None:
    assert parse_metadata([f"{key}=1"]) == (((key, "1"),), [])


def test_only_credentials_in_headers_are_secrets() -> None:
    secrets = collect_secrets(
        [None, "KEY-OF-MINE"], [("X-Env", "prod"), ("X-Auth", "Bearer hush-hush")]
    )
    assert parse_metadata(["env=production"], secrets) == ((("env", "production"),), [])
    for value in ("KEY-OF-MINE", "it is hush-hush"):
        assert parse_metadata([f"note={value}"], secrets)[0] == ()


@pytest.mark.parametrize(
    "text", ["", "novalue", "=x", "two words=x", "a=", "a=line\nbreak", "a=" + "x" * 501]
)
def test_metadata_without_a_value_is_refused(text: str) -> None:
    pairs, faults = parse_metadata([text])
    assert pairs == () and len(faults) == 1
    assert parse_metadata(["a=1", "a=2"])[1]


# -- software, GPUs, region ------------------------------------------------------------------------


def test_every_output_format_has_tokens_per_gpu(tmp_path: Path) -> None:
    summary = run(tmp_path / "a", gpus=4).summary
    tokens = summary.tokens

    assert tokens.output_per_s is not None and tokens.steady_output_per_s is not None
    assert tokens.output_per_s_per_gpu == tokens.output_per_s / 4
    assert tokens.steady_output_per_s_per_gpu == tokens.steady_output_per_s / 4
    assert tokens.steady_total_per_s_per_gpu == (tokens.steady_total_per_s or 0) / 4
    assert "output tok/s per GPU" in text.render(summary)
    assert "per GPU" in run_page.render(summary)
    stored = json.loads((tmp_path / "a" / "summary.json").read_bytes())
    assert stored["tokens"]["output_per_s_per_gpu"] == tokens.output_per_s_per_gpu


@pytest.mark.processes
def test_the_embedded_endpoint_reports_version_engine_and_precision(tmp_path: Path) -> None:
    flags = {"url": None, "num_requests": 5, "embedded": {"preset": "gb300-vm"}}
    target = run(tmp_path / "a", **flags).summary.target

    assert (target.server, target.version, target.engine, target.precision) == (
        "trtllm",
        "1.3.0",
        "simulated",
        "nvfp4, KV cache fp8",
    )
    assert sound(tmp_path / "a")

    timed = run(
        tmp_path / "b", **(flags | {"embedded": {"ttft": "3ms", "itl": "1ms"}})
    ).summary.target

    assert (timed.version, timed.engine, timed.precision) == ("1.3.0", "simulated", "")


@pytest.mark.processes
def test_regions_are_compared_within_one_run_and_between_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from servers import start

    from loadgen.sim.server.options import Options

    fast = {"ttft": "3ms", "itl": "1ms"}
    with (
        start(Options(**fast)) as server,
        start(Options(**fast)) as second_server,
        start(Options(**fast)) as third_server,
    ):
        places = zip(
            (server, second_server, third_server),
            ("eastus", "eastus", "westus"),
            (4, 4, 8),
            strict=True,
        )
        (tmp_path / "t.yaml").write_text(
            "".join(
                f"- {{name: vm-{i}, url: '{vm.url}', region: {region}, gpus: {gpus}}}\n"
                for i, (vm, region, gpus) in enumerate(places)
            )
        )
        flags = [
            "qa",
            "--targets",
            str(tmp_path / "t.yaml"),
            "-c",
            "6",
            "-n",
            "60",
            "--warmup",
            "0",
        ]
        flags += ["--input-tokens", "20", "--output-tokens", "4", "--seed", "3"]
        flags += ["--server-metrics", "off", "--energy", "off"]
        exits("run", *flags, "-o", str(tmp_path / "run"))
        summary = loadgen.load(tmp_path / "run").summary
        assert [(part.target.region, part.target.gpus) for part in summary.regions] == [
            ("eastus", 8),
            ("westus", 8),
        ]
        assert [part.requests.ok for part in summary.regions] == [40, 20]
        assert sum(part.tokens.output or 0 for part in summary.regions) == summary.tokens.output
        assert "\nregion " in text.render(summary) and "vm-0 (eastus)" in text.render(summary)
    for name, region in (("e", "eastus"), ("w", "westus")):
        run(tmp_path / name, region=region)
    capsys.readouterr()
    exits("compare", str(tmp_path / "e"), str(tmp_path / "w"), "--full")
    assert "eastus vs. westus" in capsys.readouterr().out
