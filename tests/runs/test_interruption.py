"""What a command says when Ctrl-C ends it before or after the load."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer

from loadgen.cli.app import LazyGroup
from loadgen.cli.output import add_resume_hint
from loadgen.core.execution import events
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.workload.loading import workload_from_mapping
from loadgen.runs.run_display import RunDisplay

WORKLOAD = workload_from_mapping(
    {
        "name": "short",
        "requests": {"input_tokens": 20, "output_tokens": 2},
        "stages": [{"arrival": {"closed": 2}, "count": 12}],
    }
)


def interrupt_plan(event: events.RunEvent) -> None:
    """Raise KeyboardInterrupt, as Ctrl-C does, before the load of a run begins."""
    if isinstance(event, events.RunPlanned):
        raise KeyboardInterrupt


def test_an_interruption_before_the_load_reports_that_nothing_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(url="sim:gb300-vm", out=tmp_path / "run")
    display = RunDisplay("off", quiet=True, listeners=(interrupt_plan,))

    with pytest.raises(KeyboardInterrupt), display.explain_interruption():
        execute(WORKLOAD, settings, display.event_handlers)

    assert "Nothing was measured" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_interruption_after_the_load_names_the_command_that_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    settings = Settings(url="sim:gb300-vm", out=run_dir)
    display = RunDisplay("off", quiet=True)

    with pytest.raises(KeyboardInterrupt), display.explain_interruption():
        execute(WORKLOAD, settings, display.event_handlers)
        raise KeyboardInterrupt  # while the report is printed

    assert f"loadgen report {shlex.quote(str(run_dir))}" in capsys.readouterr().err
    assert (run_dir / "run.json").is_file()


@pytest.mark.parametrize(
    ("has_finished_run", "text"), [(True, "the same command resumes it"), (False, "Nothing was")]
)
def test_an_interrupted_command_of_several_runs_states_whether_any_has_finished(
    has_finished_run: bool, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if has_finished_run:
        (tmp_path / "c8").mkdir()
        (tmp_path / "c8" / "summary.json").touch()

    hint = "the same command resumes it"
    with pytest.raises(KeyboardInterrupt), add_resume_hint(tmp_path, hint):
        raise KeyboardInterrupt

    assert text in capsys.readouterr().err


INTERRUPTED_IMPORT = """
import signal, sys

class InterruptImport:
    def find_spec(self, name, path, target=None):
        if name == "loadgen.runs.command":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, InterruptImport())
from loadgen.cli.app import main
main(["run", "qa", "--url", "sim:gb300-vm"])
"""


@pytest.mark.processes
def test_interruption_while_a_command_is_imported_says_that_nothing_was_sent() -> None:
    command = [sys.executable, "-P", "-c", INTERRUPTED_IMPORT]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert process.returncode == 130
    assert "Nothing was sent or stored" in process.stderr
    assert process.stderr.endswith("interrupted\n")


def interrupt_parser(_value: str) -> str:
    raise KeyboardInterrupt


def test_interruption_while_the_command_line_is_parsed_is_not_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = typer.Typer(cls=LazyGroup)

    @app.callback()
    def parse(word: Annotated[str, typer.Option(parser=interrupt_parser)] = "") -> None:
        pass

    command = typer.main.get_command(app)
    with pytest.raises(typer.Abort):
        command.main(["--word", "x", "run"], standalone_mode=False)
    assert capsys.readouterr().out == ""
