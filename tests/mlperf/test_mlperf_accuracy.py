"""Accuracy mode: the accuracy targets, LoadGen's accuracy log compared with ours, and TEST06."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expected_errors import refused
from servers import start
from tiny_tokenizer import train

from loadgen.cli.app import run_command_line
from loadgen.core.errors import CombinedError, UserError
from loadgen.mlperf import accuracy, rules
from loadgen.mlperf.accuracy import AccuracyMean
from loadgen.mlperf.result import Test06
from loadgen.sim.server.options import Options

REFERENCE = {"rouge1": 44.4312, "rouge2": 22.0352, "rougeL": 28.6162, "tokens_per_sample": 294.45}


def _met(**changed: float) -> dict[float, bool]:
    means = [
        AccuracyMean(metric=name, mean=value) for name, value in {**REFERENCE, **changed}.items()
    ]
    targets = accuracy.check_targets(REFERENCE, means)
    return {
        tier: all(target.met for target in targets if target.tier == tier)
        for tier in accuracy.TIERS
    }


def test_accuracy_targets_equal_those_of_the_rules() -> None:
    """The targets are those of the submission checker.

    ROUGE must reach 0.99 or 0.999 of the reference, and the tokens 0.9 to 1.1 of it.
    """
    assert accuracy.reference_accuracy("llama2-70b") == REFERENCE

    least = {
        (target.tier, target.metric): target.least
        for target in accuracy.check_targets(REFERENCE, [])
    }

    assert least[0.999, "rouge1"] == pytest.approx(44.3867688) and least[
        0.999, "rouge2"
    ] == pytest.approx(22.0131648)
    assert (
        least[0.999, "rougeL"] == pytest.approx(28.5875838)
        and least[0.99, "tokens_per_sample"] == 265.005
    )
    assert _met() == {0.99: True, 0.999: True}
    assert _met(rouge2=22.0352 * 0.995) == {0.99: True, 0.999: False}
    assert _met(rougeL=28.6162 * 0.98) == {0.99: False, 0.999: False}
    assert _met(tokens_per_sample=294.45 * 1.11) == {0.99: False, 0.999: False}


def test_compliance_tests_equal_those_of_the_rules() -> None:
    """compliance/README.md, "Tests Required for each Benchmark"."""
    compliance_tests = {
        name: spec.compliance for name, spec in rules.load_rules().benchmarks.items()
    }
    assert compliance_tests.pop("gpt-oss-120b") == ("TEST07", "TEST09")
    assert set(compliance_tests.values()) == {("TEST06",)}


def test_the_log_is_written_as_loadgen_writes_it(tmp_path: Path) -> None:
    """Both logs of the same responses are equal except for the order, which LoadGen shuffles."""
    lg = pytest.importorskip(
        "mlperf_loadgen", reason="needs the optional package mlcommons-loadgen"
    )
    answers = [np.array([5, 6 + i, 2], np.int64) for i in range(4)]

    def issue(queries: Any) -> None:
        for query in queries:
            data = answers[query.index]
            lg.QuerySamplesComplete(
                [lg.QuerySampleResponse(query.id, data.ctypes.data, data.nbytes, len(data))]
            )

    test_settings, where = lg.TestSettings(), lg.LogSettings()
    test_settings.scenario, test_settings.mode, test_settings.use_token_latencies = (
        lg.TestScenario.Offline,
        lg.TestMode.AccuracyOnly,
        True,
    )
    where.log_output.outdir, where.log_output.copy_summary_to_stdout = str(tmp_path), False
    sut, samples = (
        lg.ConstructSUT(issue, lambda: None),
        lg.ConstructQSL(4, 4, lambda _: None, lambda _: None),
    )
    lg.StartTestWithLogSettings(sut, samples, test_settings, where, "audit.config")
    lg.DestroySUT(sut)
    lg.DestroyQSL(samples)
    official = (tmp_path / accuracy.LOG_FILE).read_text()
    ours = "".join(accuracy.format_accuracy_log([answer.tolist() for answer in answers], [3] * 4))

    def rows(text: str) -> set[str]:
        return {line.split('"qsl_idx"')[1].rstrip(",") for line in text.splitlines()[1:-1]}

    assert rows(ours) == rows(official)
    assert ours.splitlines()[1].startswith('{ "seq_id" : 0, "qsl_idx" : 0, "data" : "0500')
    assert [line[-1] for line in ours.splitlines()] == [line[-1] for line in official.splitlines()]
    assert json.loads(ours)[2]["token_count"] == 3


def test_test06_agrees_with_the_official_script() -> None:
    sound = Test06(replies=2, wrong_first_tokens=None, repeated_end_tokens=0, wrong_lengths=0)
    assert accuracy.format_verification(sound) == (
        "First token check pass: Skipped\nEOS check pass: True\nSample length check pass: True\n"
        "TEST06 verification complete\n"
    )
    assert accuracy.format_verification(
        Test06(replies=2, wrong_first_tokens=None, repeated_end_tokens=1, wrong_lengths=0)
    ).endswith("failed\n")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with start(Options(ttft="1ms", itl="0", seed=3)) as server:
        yield server.url


def _call(*arguments: str) -> int:
    return run_command_line(["mlperf", "accuracy", *arguments])


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.processes
def test_accuracy_mode_scores_the_data_set_and_writes_the_logs(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded server's text matches no reference of the data set; all files are written."""
    tokenizer = str(train(tmp_path / "tokenizer.json"))
    rows = [
        {"input": f"[INST] question {i} [/INST]", "output": "an answer of five words"}
        for i in range(12)
    ]
    data, out = _write(tmp_path / "set.jsonl", rows), tmp_path / "out"

    assert (
        _call(
            "-b",
            "llama2-70b",
            "--dataset",
            str(data),
            "--url",
            url,
            "-o",
            str(out),
            "--tokenizer",
            tokenizer,
        )
        == 1
    )
    printed = capsys.readouterr().out
    assert "MISSED by ROUGE-1, ROUGE-2, ROUGE-L" in printed
    assert "12 of the rules' 24,576 samples" in printed
    assert sorted(path.name for path in out.iterdir()) == [
        "mlperf_accuracy.json",
        accuracy.LOG_FILE,
        accuracy.VERIFICATION_FILE,
    ]
    logged = json.loads((out / accuracy.LOG_FILE).read_text())
    assert [row["qsl_idx"] for row in logged] == list(range(12))
    assert all(len(bytes.fromhex(row["data"])) % 8 == 0 and row["data"] for row in logged)
    stored = json.loads((out / "mlperf_accuracy.json").read_text())
    assert stored["answered"] == 12 and {mean["metric"] for mean in stored["means"]} == set(
        REFERENCE
    )


def test_data_and_targets_that_cannot_be_scored_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # its results/
    data = str(_write(tmp_path / "set.jsonl", [{"input": "question"}]))
    with refused((UserError, CombinedError), "missing_key", "--dataset"):
        _call("-b", "llama2-70b", "--dataset", data, "--url", "http://127.0.0.1:9")
    with refused(UserError, "unsupported", "--benchmark"):
        _call("-b", "deepseek-r1", "--dataset", data)
    with refused(UserError, "unsupported", "--url"):
        _call("-b", "llama2-70b", "--dataset", data, "--url", "sim:gb300-vm")
