"""Writes the outcome of runs for a build server: a JUnit file, and a GitHub step summary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from loadgen.cli.output import write_file
from loadgen.core.errors import UserError

if TYPE_CHECKING:
    from loadgen.render.junit import Case
    from loadgen.runs.outcome import NamedRun


class BuildReport(Struct, frozen=True):
    """Where the outcome of a command is written for a build server.

    Attributes:
        junit: The JUnit file, or None.
        step_summary: The file of the GitHub step summary, or None.
        strict: Whether an objective that a run cannot decide is an error.
    """

    junit: Path | None
    step_summary: Path | None
    strict: bool

    def begin(self, command: str) -> None:
        """Write a JUnit file which says that the command has not finished.

        If the command is killed, this file and not that of an earlier command is found.

        Raises UserError if the file cannot be written.
        """
        if self.junit is None:
            return
        from loadgen.render.junit import render
        from loadgen.runs import outcome

        write_file(self.junit, render(command, [outcome.unfinished_case(command)]), "--junit")

    def write(
        self,
        command: str,
        runs: Sequence[NamedRun],
        *,
        is_complete: bool = True,
        other_cases: Sequence[Case] = (),
    ) -> None:
        """Write the outcome of the runs of a command.

        Args:
            command: The command, which names the test suite.
            runs: The runs with their names.
            is_complete: Whether the command finished.
            other_cases: Cases that do not belong to a run.

        Raises UserError if a file cannot be written.
        """
        if self.junit is None and self.step_summary is None:
            return
        from loadgen.render.junit import render
        from loadgen.runs import outcome

        added_cases = list(other_cases)
        if not is_complete:
            added_cases.append(outcome.unfinished_case(command))
        if self.junit is not None:
            cases = [*outcome.cases(runs, strict=self.strict), *added_cases]
            write_file(self.junit, render(command, cases), "--junit")
        if self.step_summary is not None:
            markdown = outcome.markdown(runs, added_cases)
            write_file(self.step_summary, markdown, "--github", append=True)


def build_report(junit: Path | None, *, github: bool, strict: bool) -> BuildReport:
    """Return where --junit and --github write the outcome of a command.

    Raises UserError if --github is used outside a step of a GitHub workflow.
    """
    step_summary = os.environ.get("GITHUB_STEP_SUMMARY") if github else None
    if github and not step_summary:
        raise UserError(
            "unset_variable",
            "this is not a step of a GitHub workflow",
            "--github",
            "GITHUB_STEP_SUMMARY is not set",
            key="GITHUB_STEP_SUMMARY",
        )
    return BuildReport(junit, Path(step_summary) if step_summary else None, strict)
