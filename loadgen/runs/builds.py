"""What a build server keeps of runs: a JUnit file, and a summary on the page of a GitHub step. IO."""

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
    from loadgen.runs.outcome import Named


class KeptByBuild(Struct, frozen=True):
    """Where the outcome of runs is written besides. `strict`: a term that is not decided is an error."""

    junit: Path | None
    page: Path | None
    strict: bool

    def begin(self, command: str) -> None:
        """Write that there is no outcome yet: that of an earlier command is not taken for the one of a killed command.

        Raises UserError for a file that cannot be written.
        """
        if self.junit is not None:
            from loadgen.render.junit import render
            from loadgen.runs import outcome

            write_file(self.junit, render(command, [outcome.broken_off(command)]), "--junit")

    def write(
        self, command: str, named: Named, *, whole: bool = True, more: Sequence[Case] = ()
    ) -> None:
        """`whole`: the command came to its end. `more`: cases beside those of the runs. Raises UserError for a file
        that cannot be written.
        """
        if self.junit is None and self.page is None:
            return
        from loadgen.render.junit import render
        from loadgen.runs import outcome

        added = [*more, *([] if whole else [outcome.broken_off(command)])]
        if self.junit is not None:
            cases = [*outcome.cases(named, strict=self.strict), *added]
            write_file(self.junit, render(command, cases), "--junit")
        if self.page is not None:
            write_file(self.page, outcome.markdown(named, added), "--github", add=True)


def kept_by_build(junit: Path | None, *, github: bool, strict: bool) -> KeptByBuild:
    """What the flags ask for. Raises UserError where this is no step of a GitHub workflow."""
    page = os.environ.get("GITHUB_STEP_SUMMARY") if github else None
    if github and not page:
        what, hint = "this is no step of a GitHub workflow", "GITHUB_STEP_SUMMARY is not set"
        raise UserError("unset_variable", what, "--github", hint, key="GITHUB_STEP_SUMMARY")
    return KeptByBuild(junit, Path(page) if page else None, strict)
