"""Searches for the highest number of agents at several tiers, one after the other."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from loadgen.cli.invocation import Invocation
from loadgen.cli.options import default_output_folder
from loadgen.cli.output import print_report, print_status
from loadgen.cli.resume import remove_options
from loadgen.core import format
from loadgen.core.errors import INTERRUPTED, TargetError, UserError
from loadgen.core.execution.folder_names import check_no_results, locked_folder
from loadgen.search import agent_tiers, agent_tiers_text
from loadgen.search.agent_capacity import SESSIONS
from loadgen.search.agent_tiers import StoredTiers, TierResult
from loadgen.search.search_plan import (
    CheckedOptions,
    PlannedSearch,
    SearchOptions,
    check_options,
    plan_search,
)
from loadgen.search.search_run import run_planned_search

OPTIONS_OF_ALL_TIERS = frozenset({"--tier", "--out", "-o", "--resume"})
"""Options with a value of the whole command, in place of which each search has its own."""
SWITCHES_OF_ALL_TIERS = frozenset({"--force"})


@dataclass(frozen=True)
class TierSearches:
    """The searches at several tiers that one command requests.

    Attributes:
        invocation: The options that all commands have in common.
        workload_name: The workload as it was typed, or None.
        options: The options of each search, apart from its tier.
        tiers: The tiers in their order.
        resume_dir: The folder to continue, or None.
    """

    invocation: Invocation
    workload_name: str | None
    options: SearchOptions
    tiers: tuple[str, ...]
    resume_dir: Path | None

    def plan(self) -> Iterator[PlannedSearch]:
        """Yield the search at each tier.

        Raises:
            UserError: An option is wrong.
            CombinedError: Several options are wrong.
        """
        output_dir = self.choose_output_dir()
        for tier in self.tiers:
            yield self._plan_tier(tier, output_dir)

    def run(self, *, as_json: bool, full: bool) -> int:
        """Run the searches, print their results and return the exit code.

        A search that was finished earlier is not run again. If the user interrupts a search, or if
        the target fails, the results so far are printed all the same.

        Args:
            as_json: Whether JSON is printed.
            full: Whether every section is printed.

        Raises:
            UserError: An option is wrong, or the folder has other results.
            CombinedError: Several options are wrong.
            KeyboardInterrupt: The user interrupted the searches before the first result.
            TargetError: The target failed before the first result.
        """
        output_dir = self.choose_output_dir()
        planned = [self._plan_tier(tier, output_dir) for tier in self.tiers]
        self._check_folder(output_dir)

        with locked_folder(output_dir):
            stored = self._begin(output_dir, planned[0])
            try:
                exit_code = self._run_searches(planned)
            except (KeyboardInterrupt, TargetError) as error:
                stored = _save(output_dir, stored)
                has_result = any(result.agents is not None for result in stored.tiers)
                if not has_result:
                    raise
                exit_code = _report_stop(error)
            stored = _save(output_dir, stored)

        _print_result(output_dir, stored, as_json=as_json, full=full)
        return exit_code

    def choose_output_dir(self) -> Path:
        """Return the folder to continue, else the folder of --out, else a new folder.

        Raises:
            UserError: An option is wrong.
            CombinedError: Several options are wrong.
        """
        _check_over_sessions(self.options)
        agent_tiers.check_tiers(self.tiers)
        checked = self._check_tier(self.tiers[0], self.invocation)
        if self.resume_dir is not None:
            return self.resume_dir
        return checked.settings.out or default_output_folder(f"tiers-{checked.workload.name}")

    def _check_tier(self, tier: str, invocation: Invocation) -> CheckedOptions:
        """Return the checked options of the search at a tier.

        Raises:
            UserError: An option is wrong.
            CombinedError: Several options are wrong.
        """
        options = dataclasses.replace(self.options, tier=tier)
        return check_options(invocation, self.workload_name, options, None)

    def _plan_tier(self, tier: str, output_dir: Path) -> PlannedSearch:
        """Return the search at a tier, as if it had been requested by a command of its own."""
        folder = output_dir / agent_tiers.name_tier_folder(tier)
        arguments = remove_options(
            self.invocation.arguments, OPTIONS_OF_ALL_TIERS, SWITCHES_OF_ALL_TIERS
        )
        invocation = dataclasses.replace(
            self.invocation.with_options(out=str(folder), force=False),
            arguments=[*arguments, "--tier", tier, "--out", str(folder)],
        )
        return plan_search(invocation, self._check_tier(tier, invocation))

    def _check_folder(self, output_dir: Path) -> None:
        """Check that the folder has no other results, after moving them away with --force.

        Raises:
            UserError: The folder has other results.
        """
        if self.resume_dir is None:
            self.invocation.move_existing_results(output_dir)

        if not agent_tiers.has_tiers(output_dir):
            check_no_results(output_dir)
            return

        stored_tiers = tuple(result.tier for result in agent_tiers.read_tiers(output_dir).tiers)
        if stored_tiers != self.tiers:
            problem = f"the folder has the tiers {', '.join(stored_tiers)}"
            hint = "repeat the same command, or use another --out"
            raise UserError("mismatch", problem, str(output_dir), hint)

    def _begin(self, output_dir: Path, first_search: PlannedSearch) -> StoredTiers:
        """Return the tiers stored in a folder. A folder without tiers gets the requested ones."""
        if agent_tiers.has_tiers(output_dir):
            return agent_tiers.read_tiers(output_dir)

        stored = StoredTiers(
            workload=first_search.plan.workload,
            target=first_search.plan.target,
            simulated=first_search.runner.settings.backend.simulated,
            version=version("loadgen"),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self.invocation.settings().command,
            tiers=tuple(
                TierResult(tier=tier, folder=agent_tiers.name_tier_folder(tier))
                for tier in self.tiers
            ),
        )
        agent_tiers.write_tiers(output_dir, stored)
        return stored

    def _run_searches(self, planned: list[PlannedSearch]) -> int:
        """Run one search after the other and return the highest exit code.

        The searches after one that the user interrupts are not begun.
        """
        highest_code = 0
        for number, (tier, search) in enumerate(zip(self.tiers, planned, strict=True), 1):
            print_status(f"Tier {tier} ({number} of {len(self.tiers)})")
            code = run_planned_search(search, self.invocation, "none", full=False)
            highest_code = max(highest_code, code)
            if code == INTERRUPTED:
                break
        return highest_code


def _check_over_sessions(options: SearchOptions) -> None:
    """Raise UserError unless the searches are over sessions, which the table of tiers counts."""
    if options.over != SESSIONS:
        problem = "several tiers need a search over sessions"
        raise UserError("unsupported", problem, f"--over {options.over}", f"--over {SESSIONS}")


def _report_stop(error: KeyboardInterrupt | TargetError) -> int:
    """Print the error that ended the searches, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    print_status(str(error))
    return error.exit_code


def _save(output_dir: Path, stored: StoredTiers) -> StoredTiers:
    """Write the results that the searches have by now to `tiers.json`, and return them."""
    updated = agent_tiers.update_tiers(output_dir, stored)
    agent_tiers.write_tiers(output_dir, updated)
    return updated


def _print_result(output_dir: Path, stored: StoredTiers, *, as_json: bool, full: bool) -> None:
    """Print the content of `tiers.json`, or the table of tiers and where the files are."""
    if as_json:
        sys.stdout.write(format.document(stored).decode())
        return
    print_report(agent_tiers_text.create_report(stored), full=full)
    folder = shlex.quote(str(output_dir))
    first_search = shlex.quote(str(output_dir / stored.tiers[0].folder))
    print_status(f"Results: {folder}. Details of a tier: loadgen report {first_search}")
