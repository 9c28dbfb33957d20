"""What a command says when Ctrl-C ends it before or after the load."""

from __future__ import annotations

from pathlib import Path

import pytest

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

    assert f"loadgen report {run_dir}" in capsys.readouterr().err
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
