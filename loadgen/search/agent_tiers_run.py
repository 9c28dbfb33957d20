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
from typing import NamedTuple

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


class _SearchesEnd(NamedTuple):
    """How the searches ended: with an exit code, and with an error or None."""

    exit_code: int
    stop_error: KeyboardInterrupt | TargetError | None


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
        self._prepare_folder(output_dir)

        with locked_folder(output_dir):
            initial = self._read_or_write_tiers(output_dir, planned[0])
            exit_code, stop_error = self._run_until_error(planned)
            stored = _save(output_dir, initial)
            has_result = any(result.agents is not None for result in stored.tiers)
            if stop_error is not None and not has_result:
                raise stop_error

        if isinstance(stop_error, TargetError):
            print_status(str(stop_error))
        _print_result(output_dir, stored, as_json=as_json, full=full)
        return exit_code

    def choose_output_dir(self) -> Path:
        """Check the tiers and the options, and return the folder of all searches.

        This is the folder to continue, else the folder of --out, else a new one with the name of
        the workload.

        Raises:
            UserError: An option is wrong.
            CombinedError: Several options are wrong.
        """
        _check_over_sessions(self.options)
        agent_tiers.check_tiers(self.tiers)
        # All searches have the same options, so those of the first one stand for all.
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
        """Return the search at a tier, planned like the command of a user for this tier only.

        The search stores the arguments of this command, which can continue it. So they have the
        tier and the folder of the search in place of those of the whole command: with the arguments
        `--tier 20:10s --tier 60:5s --out r`, the first search has `--tier 20:10s --out
        r/tier-20-10s`.
        """
        search_dir = output_dir / agent_tiers.name_tier_folder(tier)
        common_arguments = remove_options(
            self.invocation.arguments, OPTIONS_OF_ALL_TIERS, SWITCHES_OF_ALL_TIERS
        )
        invocation_of_tier = dataclasses.replace(
            self.invocation.with_options(out=str(search_dir), force=False),
            arguments=[*common_arguments, "--tier", tier, "--out", str(search_dir)],
        )
        return plan_search(invocation_of_tier, self._check_tier(tier, invocation_of_tier))

    def _prepare_folder(self, output_dir: Path) -> None:
        """Move results away if --force is used, and check that no other results are in the folder.

        A folder that is continued keeps its results. They must be of the same tiers.

        Raises:
            UserError: The folder has other results.
        """
        is_resumed = self.resume_dir is not None
        if not is_resumed:
            self.invocation.move_existing_results(output_dir)

        if agent_tiers.has_tiers(output_dir):
            self._check_same_tiers(output_dir)
        else:
            check_no_results(output_dir)

    def _check_same_tiers(self, output_dir: Path) -> None:
        """Check that the folder has searches at the requested tiers, in the same order.

        Raises:
            UserError: The tiers differ.
        """
        stored_tiers = tuple(result.tier for result in agent_tiers.read_tiers(output_dir).tiers)
        if stored_tiers != self.tiers:
            problem = f"the folder has the tiers {', '.join(stored_tiers)}"
            hint = "repeat the same command, or use another --out"
            raise UserError("mismatch", problem, str(output_dir), hint)

    def _read_or_write_tiers(self, output_dir: Path, first_search: PlannedSearch) -> StoredTiers:
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

    def _run_until_error(self, planned: list[PlannedSearch]) -> _SearchesEnd:
        """Run the searches, and return the exit code with the error that ended them, if any."""
        try:
            return _SearchesEnd(self._run_searches(planned), stop_error=None)
        except KeyboardInterrupt as interrupt:
            return _SearchesEnd(INTERRUPTED, stop_error=interrupt)
        except TargetError as error:
            return _SearchesEnd(error.exit_code, stop_error=error)

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
    described = agent_tiers.add_trial_facts(output_dir, stored)
    print_report(agent_tiers_text.create_report(described), full=full)
    folder = shlex.quote(str(output_dir))
    first_search = shlex.quote(str(output_dir / stored.tiers[0].folder))
    print_status(f"Results: {folder}. Details of a tier: loadgen report {first_search}")
