"""Commands that send a load need a URL, and one that is empty never means a simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import exits

import loadgen
from loadgen.core.errors import CombinedError, UserError

CONTRACT = Path(__file__).parents[2] / "contracts" / "chatbot.yaml"
SENDING = (
    ("run", "qa", "-c", "2", "-n", "12"),
    ("sweep", "qa", "-c", "1,2", "-n", "12"),
    ("search", "qa", "--slo", "ttft:2s"),
    ("validate", CONTRACT),
    ("mlperf", "server", "-b", "llama2-70b", "--target-qps", "1", "--min-duration", "1"),
)


@pytest.mark.parametrize("command", SENDING, ids=lambda command: command[0])
@pytest.mark.parametrize("url", [(), ("--url", ""), ("--url", "  ")], ids=["no", "empty", "blank"])
def test_a_command_that_sends_a_load_needs_a_url(
    command: tuple[object, ...],
    url: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exits(*command, *url) == 2
    assert "--url sim:gb300-vm" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_an_empty_url_fails_the_gate_and_writes_no_result(tmp_path: Path) -> None:
    junit = tmp_path / "j.xml"
    arguments = ("run", "qa", "--url", "", "--strict", "--junit", junit, "-o", tmp_path / "out")
    assert exits(*arguments) == 2
    assert not (tmp_path / "out").exists()
    assert not junit.exists()


@pytest.mark.parametrize("url", [None, "", []])
def test_a_run_in_python_needs_a_url(url: object) -> None:
    with pytest.raises((UserError, CombinedError)) as exc_info:
        loadgen.run("qa", url=url, concurrency=1, num_requests=1)  # type: ignore[arg-type]
    assert "sim:gb300-vm" in str(exc_info.value)


@pytest.mark.parametrize("option", ["--model", "--tokenizer", "--shape", "--slo", "--prices"])
def test_empty_values_of_options_are_refused(option: str, tmp_path: Path) -> None:
    arguments = ("run", "qa", "--url", "sim:gb300-vm", "-c", "1", "-n", "12", option, "")
    assert exits(*arguments, "-o", tmp_path / "out") == 2


def test_an_empty_url_together_with_another_one_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exits("run", "qa", "--url", "http://127.0.0.1:9", "--url", "") == 2
    assert "--url" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "answers"])
def test_commands_that_send_single_requests_refuse_an_empty_url(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    options = ["--dataset", str(dataset)] if command == "answers" else []
    assert exits(command, *options, "--url", "") == 2
