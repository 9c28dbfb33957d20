"""The command line: wrong usage is an error and never a bug; flags are spread as the field writes them."""

import subprocess
import sys

import pytest

from loadgen import cli
from loadgen.errors import OK, USAGE


def ends(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ending:
        cli.main(arguments)
    return int(ending.value.code or 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "qa", "--nope"],
        ["run", "qa", "--gpus", "none"],
        ["nonsense"],
        ["report"],
        ["run", "no-such-workload"],
        ["run", "qa", "--slo", "ttft:2x", "--server", "unknown", "--workers", "0"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(arguments) == USAGE
    said = capsys.readouterr().err
    assert "bug" not in said and "Traceback" not in said and said


def test_all_faults_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    ends(["run", "qa", "--slo", "ttft:2x", "--server", "unknown", "--workers", "0", "--extra-body", "[1]"])
    said = capsys.readouterr().err
    for flag in ("--slo ttft:2x", "--server unknown", "--workers 0", "--extra-body"):
        assert flag in said


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(["--help"]) == OK
    assert "run" in capsys.readouterr().out
    assert ends(["--version"]) == OK
    assert capsys.readouterr().out.startswith("loadgen ")
    assert ends(["run", "--help"]) == OK
    text = capsys.readouterr().out
    for flag in ("--url", "--request-rate", "--concurrency", "--slo", "--goodput", "--api-key-file", "--dry-run"):
        assert flag in text


@pytest.mark.processes
def test_the_command_without_its_script() -> None:
    done = subprocess.run([sys.executable, "-m", "loadgen", "run", "nope"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert "--> nope" in done.stderr


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        (["run", "--goodput", "ttft:2000", "tpot:200"], ["run", "--goodput", "ttft:2000", "--goodput", "tpot:200"]),
        (["run", "--slo", "ttft:2s", "qa"], ["run", "--slo", "ttft:2s", "qa"]),
        (["run", "qa", "--url", "http://h:1"], ["run", "qa", "--url", "http://h:1"]),
    ],
)  # fmt: skip
def test_spread(given: list[str], spread: list[str]) -> None:
    assert cli.spread(given) == spread


@pytest.mark.processes
def test_one_endpoint_is_not_silently_chosen_of_two() -> None:
    given = ["doctor", "--url", "http://127.0.0.1:1", "-u", "http://127.0.0.1:2"]
    code = "from loadgen.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "takes one endpoint" in ended.stderr


def test_dry_run_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(["run", "rag", "--dry-run", "--url", "http://127.0.0.1:9", "--seed", "1"]) == OK
    text = capsys.readouterr().out
    assert "220 requests" in text and "1,302" in text
