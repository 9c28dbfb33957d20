"""The folder of searches at several tiers: the highest number of agents at each of them.

tiers.json          what was requested, and the result of each tier (StoredTiers)
tier-20-10s/, ...   the search at one tier, in the layout of `loadgen search`
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from loadgen.cli.resume import arguments_to_type_again
from loadgen.core import format
from loadgen.core.errors import UserError, missing_result
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.json_files import decode_json
from loadgen.repeated.capacity import State
from loadgen.runs.kind import stored_summaries
from loadgen.runs.slo_text import judge_objectives
from loadgen.search import capacity_files, experiment
from loadgen.search.agent_capacity import AgentCapacity, find_agent_capacity, tier_objectives
from loadgen.search.experiment import StoredSearch
from loadgen.search.search_results import (
    TrialResult,
    capacity_and_state,
    exit_code,
    find_best_trial,
)

SCHEMA = 1
TIERS_FILE = "tiers.json"


class TierResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the search at one tier.

    Attributes:
        tier: The tier as it was typed, for example "20:10s".
        folder: The name of the folder of its search.
        stop_reason: Why the search ended, as in `search.json`. "" if it has not ended.
        state: How far the number of sessions was shown. None if the search has not ended.
        lower_bound: Whether the highest number that was allowed met the tier.
        code: The exit code of the search. None if it has not ended.
        agents: The sessions per accelerator and per megawatt. None if the search has not ended.
    """

    tier: str
    folder: str
    stop_reason: str = ""
    state: State | None = None
    lower_bound: bool = False
    code: int | None = None
    agents: AgentCapacity | None = None


class StoredTiers(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `tiers.json`.

    Attributes:
        schema: The version of the format.
        workload: The name of the workload.
        target: The target, as it is shown.
        simulated: Whether a simulated server responded.
        version: The version of loadgen.
        started: When the first search started, in ISO 8601 (UTC).
        command: The command line, without its secrets.
        tiers: The results of the tiers, in the order in which they are searched.
        resume_command: The command that continues what was stopped, or "" if nothing is left to do.
    """

    schema: int = SCHEMA
    workload: str
    target: str
    simulated: bool
    version: str
    started: str
    command: tuple[str, ...]
    tiers: tuple[TierResult, ...]
    resume_command: str = ""


class DescribedTiers(StoredTiers, frozen=True, kw_only=True):
    """The content of `tiers.json` and what a report shows in addition, read from the searches.

    Attributes:
        model: The model that was measured. "" if it is not known.
        limited_by: The objectives that the lowest failed load of a tier missed, such as "TPOT p75
            at most 50 ms", by the tier. Tiers of which they are not known are left out.
    """

    model: str = ""
    limited_by: dict[str, tuple[str, ...]] = {}

    def to_stored(self) -> StoredTiers:
        """Return the content of `tiers.json`, without the additions."""
        return StoredTiers(**{name: getattr(self, name) for name in StoredTiers.__struct_fields__})


def name_tier_folder(tier: str) -> str:
    """Return the name of the folder of a search at a tier: "tier-20-10s" for "20:10s"."""
    return f"tier-{tier.strip().replace(':', '-')}"


def check_tiers(tiers: Sequence[str]) -> None:
    """Check that each tier can be read, such as "20:10s", and that no tier is repeated.

    Raises:
        UserError: A tier is wrong or repeated.
    """
    folders: set[str] = set()
    for tier in tiers:
        tier_objectives(tier)  # raises UserError for a wrong tier; the objectives are not needed

        folder = name_tier_folder(tier)
        if folder in folders:
            problem = "the tier is repeated"
            raise UserError("duplicate", problem, f"--tier {tier}", "specify each tier once")
        folders.add(folder)


def has_tiers(output_dir: Path) -> bool:
    """Return whether a folder is that of searches at several tiers."""
    return (output_dir / TIERS_FILE).is_file()


def write_tiers(output_dir: Path, stored: StoredTiers) -> None:
    """Write `tiers.json`."""
    store.replace(output_dir / TIERS_FILE, format.document(stored))


def read_tiers(output_dir: Path) -> StoredTiers:
    """Return the tiers of a folder, with what their searches have found so far.

    The results are read from the searches, which may have been continued one by one.

    Raises:
        UserError: There is no `tiers.json`, or a file is damaged.
    """
    path = output_dir / TIERS_FILE
    if not path.is_file():
        raise missing_result(output_dir, f"a folder with {TIERS_FILE}")
    stored = decode_json(
        path.read_bytes(), StoredTiers, str(path), "a search at several tiers", schema=SCHEMA
    )
    _check_folder_names(stored, path)
    return update_tiers(output_dir, stored)


def load_described_tiers(output_dir: Path) -> DescribedTiers:
    """Return the tiers of a folder as `read_tiers` does, with what a report shows in addition.

    Raises:
        UserError: There is no `tiers.json`, or a file is damaged.
    """
    return add_trial_facts(output_dir, read_tiers(output_dir))


def add_trial_facts(output_dir: Path, stored: StoredTiers) -> DescribedTiers:
    """Return tiers with the model and with what limited each of them, read from their trials."""
    models: list[str] = []
    limited_by: dict[str, tuple[str, ...]] = {}
    for result in stored.tiers:
        search_dir = output_dir / result.folder
        search = _read_search(search_dir)
        if search is None:
            continue

        run_dirs = [search_dir / trial.run_name for trial in search.trials]
        summaries = dict(stored_summaries(search_dir, run_dirs))
        models += [summary.target.model for summary in summaries.values()]
        limits = _find_missed_objectives(search.trials, summaries)
        if limits:
            limited_by[result.tier] = tuple(limits)

    model = models[0] if models else ""
    fields = msgspec.structs.asdict(stored)
    return DescribedTiers(**fields, model=model, limited_by=limited_by)


def _find_missed_objectives(
    trials: Sequence[TrialResult], summaries: Mapping[str, Summary]
) -> list[str]:
    """Return the objectives that the failed trial with the lowest load missed.

    A trial that was stopped before it could judge any objective is passed over.
    """
    failed_trials = [trial for trial in trials if trial.has_failed and trial.run_name in summaries]
    for trial in sorted(failed_trials, key=lambda trial: trial.load):
        objectives = judge_objectives(summaries[trial.run_name])
        missed = [name for name, is_met in objectives if is_met is False]
        if missed:
            return missed
    return []


def _check_folder_names(stored: StoredTiers, path: Path) -> None:
    """Check the names of the folders of searches in `tiers.json`.

    Each name follows from the tier. A file that somebody has changed could name a folder elsewhere
    on the disk, even by a tier with a slash in it.

    Args:
        stored: The content of the file.
        path: The file, for the error message.

    Raises:
        UserError: A folder has another name, or the name has a slash.
    """
    for result in stored.tiers:
        has_name_of_tier = result.folder == name_tier_folder(result.tier)
        has_slash = "/" in result.folder
        if not has_name_of_tier or has_slash:
            problem = f"the folder {result.folder!r} is not that of the tier {result.tier!r}"
            raise UserError("damaged_file", problem, str(path), "search again with another --out")


def update_tiers(output_dir: Path, stored: StoredTiers) -> StoredTiers:
    """Return the content of `tiers.json` with the current results of the searches.

    A tier stands for limits on latency. A search finds how many agents the server can serve within
    these limits, and stores its result in a folder of its own. The result of a tier whose search
    has not ended stays as it is.
    """
    searches = [_read_search(output_dir / result.folder) for result in stored.tiers]
    updated_results = []
    for result, search in zip(stored.tiers, searches, strict=True):
        if search is None:
            updated_results.append(result)
        else:
            updated_results.append(_update_result(output_dir, result, search))

    resume_command = _find_resume_command(output_dir, stored, searches)
    return msgspec.structs.replace(
        stored, tiers=tuple(updated_results), resume_command=resume_command
    )


def _read_search(search_dir: Path) -> StoredSearch | None:
    """Return the result of the search at a tier, or None if it has not ended or begun."""
    return experiment.read_search(search_dir) if search_dir.is_dir() else None


def _update_result(output_dir: Path, result: TierResult, search: StoredSearch) -> TierResult:
    """Return the result of a tier as its search has it now.

    A search runs trials with several numbers of agents. The best trial has the highest number that
    met the tier. Its summary describes the system, so that agents per accelerator can be computed.

    Args:
        output_dir: The folder of all searches.
        result: The result of the tier as stored earlier.
        search: The search at the tier.
    """
    search_dir = output_dir / result.folder
    best_trial = find_best_trial(search.trials)
    run_dirs = [] if best_trial is None else [search_dir / best_trial.run_name]
    summaries = stored_summaries(search_dir, run_dirs)
    capacity = capacity_and_state(search.result, search.trials)

    return msgspec.structs.replace(
        result,
        stop_reason=search.result.stop_reason,
        state=capacity.state,
        lower_bound=search.result.is_lower_bound,
        code=exit_code(search.result),
        agents=find_agent_capacity(search, summaries),
    )


def _find_resume_command(
    output_dir: Path, stored: StoredTiers, searches: Sequence[StoredSearch | None]
) -> str:
    """Return the command that continues the searches, or "" if nothing is left to do.

    Args:
        output_dir: The folder of all searches.
        stored: The content of `tiers.json`, with the command that started the searches.
        searches: The result of each search, None if a search has not ended.
    """
    arguments = ["--resume", str(output_dir), *arguments_to_type_again(stored.command)]
    command = f"loadgen search {shlex.join(arguments)}"
    ended_searches = [search for search in searches if search is not None]
    if len(ended_searches) < len(searches):
        return command

    for search in ended_searches:
        usable_command = capacity_files.usable_resume_command(search.result, search.trials, command)
        if usable_command:
            return usable_command

    return ""
