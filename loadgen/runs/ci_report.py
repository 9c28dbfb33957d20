"""Writes the outcome of a command for a CI system: a JUnit file, and a GitHub step summary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from loadgen.cli.output import write_file
from loadgen.core.errors import UserError

if TYPE_CHECKING:
    from loadgen.render.junit import JUnitCase
    from loadgen.runs.outcome import NamedRun

STEP_SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


class CiReport(Struct, frozen=True):
    """The files that tell a CI system the outcome of a command.

    Attributes:
        junit: The JUnit file, or None.
        step_summary: The file of the GitHub step summary, or None.
        strict: Whether an objective that a run cannot decide is an error in the JUnit file.
    """

    junit: Path | None
    step_summary: Path | None
    strict: bool

    def begin(self, command: str) -> None:
        """Write a JUnit file that reports the command as failed because it has not finished.

        `write` replaces it at the end of the command. If the command is killed before that, a CI
        system reads this file, and not that of an earlier command.

        Raises:
            UserError: If the file cannot be written.
        """
        if self.junit is not None:
            self._write_junit(command, [_unfinished_case(command)])

    def write(
        self,
        command: str,
        runs: Sequence[NamedRun],
        *,
        is_complete: bool = True,
        other_cases: Sequence[JUnitCase] = (),
    ) -> None:
        """Write the outcome of the runs of a command to the files that the user requested.

        Args:
            command: The command, which names the test suite.
            runs: The runs with their names.
            is_complete: Whether the command finished.
            other_cases: Cases that do not belong to a run.

        Raises:
            UserError: If a file cannot be written.
        """
        if self.junit is None and self.step_summary is None:
            return

        # Without these files, a command need not wait for the import.
        from loadgen.runs import outcome

        added_cases = list(other_cases)
        if not is_complete:
            added_cases.append(_unfinished_case(command))

        if self.junit is not None:
            cases_of_runs = outcome.build_cases(runs, strict=self.strict)
            self._write_junit(command, [*cases_of_runs, *added_cases])

        if self.step_summary is not None:
            markdown = outcome.render_markdown(runs, added_cases)
            write_file(self.step_summary, markdown, "--github", append=True)

    def _write_junit(self, command: str, cases: Sequence[JUnitCase]) -> None:
        """Write the JUnit file. Raises UserError if it cannot be written."""
        from loadgen.render.junit import render

        assert self.junit is not None
        write_file(self.junit, render(command, cases), "--junit")


def _unfinished_case(command: str) -> JUnitCase:
    from loadgen.runs import outcome

    return outcome.unfinished_case(command)


def create_ci_report(junit: Path | None, *, github: bool, strict: bool) -> CiReport:
    """Return the files that the options --junit and --github request.

    Raises UserError if --github is used outside a step of a GitHub workflow.
    """
    step_summary = _github_step_summary() if github else None
    return CiReport(junit=junit, step_summary=step_summary, strict=strict)


def _github_step_summary() -> Path:
    """Return the file that GitHub shows on the page of a workflow run.

    GitHub names it in an environment variable of each step. Raises UserError if that is not set.
    """
    path = os.environ.get(STEP_SUMMARY_VARIABLE)
    if path:
        return Path(path)

    raise UserError(
        "unset_variable",
        "this is not a step of a GitHub workflow",
        where="--github",
        hint=f"{STEP_SUMMARY_VARIABLE} is not set",
        key=STEP_SUMMARY_VARIABLE,
    )
