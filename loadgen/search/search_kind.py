"""The result kind of a search. In a comparison, the run that shows its capacity stands for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen.core.errors import INTERRUPTED, UNSOUND, UserError
from loadgen.core.metrics.summary import NamedSummary
from loadgen.core.run_folder import OpenedRun
from loadgen.render.additions import ExtraSections
from loadgen.render.section import Notice, Paragraph, Quoted, Report, Section, section
from loadgen.repeated import capacity
from loadgen.result_kinds import SUMMARIES, ListRow, RegeneratedFile, ResultFunctions, additions_to
from loadgen.runs import run_directory_kind
from loadgen.runs.comparison_side import Side
from loadgen.runs.kind import capacity_facts, capacity_in, load_compared_run, stored_summaries
from loadgen.search import agent_capacity, capacity_files, experiment, search_text
from loadgen.search.capacity_files import ExperimentOutcome
from loadgen.search.experiment import ExperimentPlan, StoredSearch
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_report import SearchReportInput, render_search_report
from loadgen.search.search_results import SearchResult, TrialResult, exit_code
from loadgen.search.trial_outcome import recompute_result

STORED_ONLY_KEYS = ("ask*", "early", "offered", "noise", "folder")
"""The JSON keys of a trial whose values cannot be computed again from the records of its run.

The keys are patterns: "ask*" is the key `ask` with all keys below it.
"""
STORED_ONLY_KEYS_OF_EARLY_DECISION = ("outcome", "why", "code")
"""Further such keys of a trial that was decided before its end: how it was decided."""
STORED_ONLY_KEYS_OF_SEARCH = ("goal*", "simulated", "seed", "metadata*", "settings*")
"""Such keys of `search.json`, apart from those of its trials."""
STORED_ONLY_KEYS_OF_CAPACITY = ("recipe", "go_on")
"""Such keys of `capacity.json`: the fingerprint of the requests, and the command that resumes."""


class OpenedSearch(NamedTuple):
    """A search that was read from its directory.

    Attributes:
        output_dir: Its directory.
        runs: The summaries of its trials, with the names of their runs.
        stored: Its result. None if the search has not ended.
        additions: The sections that other results in the same directory, such as that of MLPerf,
            add to the report.
    """

    output_dir: Path
    runs: tuple[NamedSummary, ...]
    stored: StoredSearch | None
    additions: tuple[ExtraSections, ...]

    @property
    def result(self) -> SearchResult | None:
        """What the search found, or None if it has not ended."""
        return None if self.stored is None else self.stored.result

    @property
    def unit(self) -> str:
        """The unit of its loads, as it is written after a number."""
        # All trials send the same workload. If any of their runs has conversations, the loads are
        # rates of conversations, and those of single requests only if no run has any.
        counted_units = {capacity.rate_unit(summary) for _, summary in self.runs} - {"requests"}
        plan = experiment.read_plan(self.output_dir)
        return experiment.load_unit(plan, min(counted_units, default="requests"))

    @property
    def as_runs(self) -> run_directory_kind.StoredRuns:
        """The trials in the form of a directory of runs, for a search without a result.

        The functions of `run_directory_kind` then show them as load points of one workload.
        """
        return run_directory_kind.StoredRuns(self.output_dir, self.runs, are_load_points=True)


def load(output_dir: Path) -> OpenedSearch:
    """Read a search with the summaries of its trials, computed from their records.

    Raises UserError if its result is damaged, or if it has no trial.
    """
    stored = experiment.read_search(output_dir)
    runs = _read_runs(output_dir, has_result=stored is not None)
    if not runs:
        raise UserError(
            "no_records",
            "the search has no trial",
            str(output_dir),
            "copy the whole directory, with the directories of the trials",
        )

    first_summary = runs[0].summary
    first_run = OpenedRun(first_summary, stored=None)
    return OpenedSearch(output_dir, runs, stored, additions_to(output_dir, first_run))


def _read_runs(output_dir: Path, *, has_result: bool) -> tuple[NamedSummary, ...]:
    """Return the summaries of the trials of a search, computed from their records.

    A search without a result is shown as a directory of runs. Its runs are therefore read with the
    checks of that kind, which raise UserError for an empty directory or different workloads.
    """
    if not has_result:
        return run_directory_kind.load(output_dir).runs
    run_dirs = run_directory_kind.run_dirs(output_dir)
    return run_directory_kind.computed_summaries(output_dir, run_dirs)


def headline(search: OpenedSearch) -> str:
    """Return the result in one sentence or two."""
    if search.stored is None:
        so_far = run_directory_kind.headline(search.as_runs)
        return f"{_describe_unfinished(search.output_dir)} {so_far}"
    stored = search.stored
    return search_text.describe_result(stored.result, stored.trials, stored.term_names, search.unit)


def report(search: OpenedSearch) -> Report:
    """Return the report of a search, with the command that resumes it if it has not ended."""
    resume_command = _resume_command(search.output_dir, search.stored)
    if search.stored is None:
        return _report_without_result(search, resume_command)
    return _report_result(search, search.stored, resume_command)


def _report_result(search: OpenedSearch, stored: StoredSearch, resume_command: str) -> Report:
    """Return the report of a search that has written its result.

    The warnings of the run that shows the capacity are repeated in it. A search that was stopped
    has a result too; its report ends with the command that resumes it.
    """
    found_capacity = capacity_in(search.output_dir)
    capacity_run_name = ""

    warnings: list[Notice] = []
    if found_capacity is not None:
        warnings = [Notice("WARNING", text) for text in found_capacity.warnings]
        if not found_capacity.is_unfinished:  # Otherwise the capacity is only a lower bound.
            capacity_run_name = found_capacity.evidence

    result_report = render_search_report(
        SearchReportInput(
            stored,
            search.runs,
            search.unit,
            capacity_run_name=capacity_run_name,
            additions=search.additions,
            agents=_find_agents(search, stored),
        )
    )
    resume_sections = [_resume_section(resume_command)] if resume_command else []
    return msgspec.structs.replace(
        result_report,
        notices=[*result_report.notices, *warnings],
        sections=[*result_report.sections, *resume_sections],
        brief=[*result_report.brief, *resume_sections],
    )


def _find_agents(search: OpenedSearch, stored: StoredSearch) -> agent_capacity.AgentCapacity | None:
    """Return the sessions per accelerator and per megawatt, or None for another kind of load."""
    if not agent_capacity.counts_sessions(experiment.read_plan(search.output_dir)):
        return None
    return agent_capacity.find_agent_capacity(stored, search.runs)


def add_agents(output_dir: Path) -> None:
    """Add the sessions per accelerator and per megawatt to the result of a search over sessions."""
    stored = experiment.read_search(output_dir)
    if stored is not None:
        runs = stored_summaries(output_dir, run_directory_kind.run_dirs(output_dir))
        agent_capacity.add_agents_to_result(output_dir, stored, runs)


def _resume_section(resume_command: str) -> Section:
    """Return the section with the command that resumes a search."""
    return section("Resume with", Quoted(resume_command))


def _report_without_result(search: OpenedSearch, resume_command: str) -> Report:
    """Return the report of a search that was killed before it wrote its result.

    It shows the trials as load points of one workload, as the report of a directory of runs does.
    A warning at the top states that the search has not ended, and the last section is the command
    that resumes it. Other results in the same directory, such as MLPerf's, add their sections.
    """
    runs_report = run_directory_kind.report(search.as_runs)
    notices = list(runs_report.notices)

    sections = list(runs_report.sections)
    for extra_sections in search.additions:
        notices += extra_sections.notices
        sections += extra_sections.sections

    warning = Paragraph(_describe_unfinished(search.output_dir), "warn", large=True)
    resume_section = _resume_section(resume_command)
    return msgspec.structs.replace(
        runs_report,
        notices=notices,
        headline=[warning, *runs_report.headline],
        sections=[*sections, resume_section],
        # A terminal shows these few sections instead of the headline and all sections.
        brief=[section("", warning), *runs_report.brief, resume_section],
    )


def _describe_unfinished(output_dir: Path) -> str:
    """Return what is known of a search that was killed, as `cost` and `size` state it."""
    found_capacity = capacity_in(output_dir)
    known = "" if found_capacity is None else f" ({found_capacity.description})"
    return f"The search has not ended{known}. These are its trials so far."


def _resume_command(output_dir: Path, stored: StoredSearch | None) -> str:
    """Return the command that resumes a search, or "" if nothing is left to do."""
    command = experiment.resume_command(output_dir, experiment.read_plan(output_dir))
    if stored is None:
        return command
    return capacity_files.usable_resume_command(stored.result, stored.trials, command)


def document(search: OpenedSearch) -> bytes:
    """Return the summaries of the trials as a JSON list."""
    return run_directory_kind.document(search.as_runs)


def report_ended_search(output_dir: Path) -> Report:
    """Return the report of a search that has just ended, from the summaries that its runs wrote."""
    stored = experiment.read_search(output_dir)
    runs = stored_summaries(output_dir, run_directory_kind.run_dirs(output_dir))
    return report(OpenedSearch(output_dir, runs, stored, additions=()))


def code(search: OpenedSearch, _strict: bool) -> int:
    """Return the exit code of a search when its directory is read.

    A search that was interrupted or killed showed nothing, so no SLO was missed.
    """
    if search.stored is None:
        return UNSOUND
    stored_code = exit_code(search.stored.result)
    return UNSOUND if stored_code == INTERRUPTED else stored_code


def list_row(output_dir: Path) -> ListRow:
    """Return the row of a search in the list of results."""
    stored = experiment.read_search(output_dir)
    return run_directory_kind.list_row_of_runs(
        stored_summaries(output_dir, run_directory_kind.run_dirs(output_dir)),
        output_dir,
        "" if stored is None else stored.result.stop_reason,
    )


def compare_side(output_dir: Path) -> Side:
    """Return the run that shows the capacity, which stands for the search in `loadgen compare`.

    Raises NoCapacityError if there is none.
    """
    found_capacity = capacity_in(output_dir)
    if found_capacity is None or found_capacity.is_unfinished:
        raise _no_capacity_error(output_dir, found_capacity)
    run = load_compared_run(output_dir / found_capacity.evidence)
    return Side(name="", runs=(run,), notes=(found_capacity.comparison_note,))


def _no_capacity_error(
    output_dir: Path, found_capacity: capacity.Capacity | None
) -> capacity.NoCapacityError:
    """Return the error of a comparison with a search whose capacity is not known.

    Its hint names the runs that may be compared instead, and the command that resumes the search if
    it was stopped. `found_capacity` is a lower bound of the capacity, or None without any.
    """
    problem = "the search has no capacity"
    if found_capacity is not None and found_capacity.lower_bound_reason:
        problem = f"{problem}: {found_capacity.lower_bound_reason}"

    run_names = ", ".join(run.name for run in run_directory_kind.run_dirs(output_dir)) or "none yet"
    hint = f"give the directory of one of its runs: {run_names}"

    command = _resume_command(output_dir, experiment.read_search(output_dir))
    if command:
        hint = f"resume with: {command}; or {hint}"

    return capacity.NoCapacityError("no_figure", problem, str(output_dir), hint)


# Regenerating the derived files of a search, to check a bundle


def regenerate(output_dir: Path) -> Iterator[RegeneratedFile]:
    """Yield the derived files of a search, computed again from its runs.

    `loadgen verify` compares them with the stored files. Each comes with the paths of the values
    that it must take from the stored file, because they record what was decided while the search
    ran and cannot be computed again.
    """
    trials = experiment.read_results(output_dir, include_invalid=True)
    recomputed = _recompute_results(output_dir, trials)
    yield _trials_file(trials, recomputed)

    stored = experiment.read_search(output_dir)
    if stored is None:
        yield RegeneratedFile(experiment.RESULT_FILE, None, "the search has not ended")
        return

    # The settings and the results of the trials determine the result of a search.
    result = LoadSearch(stored.settings, trials).result
    recomputed_search = msgspec.structs.replace(stored, result=result, trials=tuple(recomputed))
    if agent_capacity.counts_sessions(experiment.read_plan(output_dir)):
        runs = _read_runs(output_dir, has_result=True)
        recomputed_search = agent_capacity.with_agents(recomputed_search, runs)
    yield _result_file(recomputed_search)
    yield from regenerate_outputs(ExperimentOutcome(output_dir, trials, result))


def _result_file(recomputed_search: StoredSearch) -> RegeneratedFile:
    """Return `search.json` with the recomputed result of a search."""
    # The trials are the list `told` in this file, so that a path is "told[3].offered".
    trial_paths = _stored_only_paths(recomputed_search.trials, "told[{}].", first_number=0)
    return RegeneratedFile(
        experiment.RESULT_FILE,
        msgspec.json.encode(recomputed_search),
        "the results of the trials",
        leave=(*trial_paths, *STORED_ONLY_KEYS_OF_SEARCH),
    )


def regenerate_trials(output_dir: Path, trials: Sequence[TrialResult]) -> RegeneratedFile:
    """Return the file of the results of a search or sweep, computed again from its runs."""
    return _trials_file(trials, _recompute_results(output_dir, trials))


def regenerate_outputs(outcome: ExperimentOutcome) -> Iterator[RegeneratedFile]:
    """Yield the curve and the capacity of a search or a sweep, computed again from its trials.

    If there is a stored capacity but the trials show none, the regenerated file is `null`, so that
    `loadgen verify` reports the difference.
    """
    files = capacity_files.render_outputs(outcome)
    if (outcome.output_dir / capacity.CAPACITY_FILE).is_file():
        files.setdefault(capacity.CAPACITY_FILE, b"null\n")
    for name, content in files.items():
        yield RegeneratedFile(name, content, SUMMARIES, leave=STORED_ONLY_KEYS_OF_CAPACITY)


def _recompute_results(output_dir: Path, trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the results of the trials, computed again from the records of their runs."""
    plan = experiment.read_plan(output_dir)
    return [recompute_result(output_dir, trial, mlperf=plan.is_by_mlperf_rules) for trial in trials]


def _trials_file(
    trials: Sequence[TrialResult], recomputed: Sequence[TrialResult]
) -> RegeneratedFile:
    """Return `probes.jsonl` with the recomputed results of the stored trials."""
    lines = b"\n".join(map(msgspec.json.encode, recomputed))
    stored_only_paths = _stored_only_paths(trials, "line {}.", first_number=1)
    return RegeneratedFile(experiment.TRIALS_FILE, lines, SUMMARIES, leave=stored_only_paths)


def _stored_only_paths(
    trials: Sequence[TrialResult], path_template: str, *, first_number: int
) -> tuple[str, ...]:
    """Return the paths of the values of trials that cannot be computed again from their records.

    `loadgen verify` compares a stored file with a regenerated one, and takes the values at these
    paths from the stored file. They record what was decided while the search ran, such as which
    load a trial tried. An example of a path is "line 3.offered".

    Args:
        trials: The stored results of the trials, in their order in the file.
        path_template: The path of one trial, with "{}" in place of its number: "line {}.".
        first_number: The number of the first trial in these paths.
    """
    paths: list[str] = []
    for number, trial in enumerate(trials, first_number):
        trial_path = path_template.format(number)
        keys = list(STORED_ONLY_KEYS)
        if trial.ended_early:
            keys += STORED_ONLY_KEYS_OF_EARLY_DECISION
        paths += [trial_path + key for key in keys]

    return tuple(paths)


FUNCTIONS = ResultFunctions(
    load=load,
    headline=headline,
    report=report,
    code=code,
    list_row=list_row,
    compare_side=compare_side,
    regenerate=regenerate,
    fits=experiment.is_search,
    schema=ExperimentPlan,
    document=document,
    runs=run_directory_kind.run_dirs,
    capacity=capacity_facts,
)
