"""A search: its answer and its trials; its confirming run stands for it in a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen.core.errors import INTERRUPTED, UNSOUND, UserError
from loadgen.core.metrics.summary import NamedSummary
from loadgen.core.run_folder import OpenedRun
from loadgen.render.additions import ExtraSections
from loadgen.render.section import Paragraph, Quoted, Report, Warned, section
from loadgen.repeated import capacity
from loadgen.result_kinds import SUMMARIES, ListRow, RegeneratedFile, ResultFunctions, additions_to
from loadgen.runs import levels_kind
from loadgen.runs.compared import Side
from loadgen.runs.kind import capacity_facts, capacity_in, compared, stored_summaries
from loadgen.runs.levels import SweepCurve
from loadgen.search import experiment, trials
from loadgen.search import sections as search_report
from loadgen.search import text as words
from loadgen.search.experiment import ExperimentPlan, StoredSearch
from loadgen.search.load_search import LoadSearch, SearchAnswer, TrialResult, exit_code, resume


class StoredTrials(NamedTuple):
    """The trials of a search, and its answer. The answer is None if the search has not ended."""

    folder: Path
    runs: tuple[NamedSummary, ...]
    search: StoredSearch | None
    additions: tuple[ExtraSections, ...]

    @property
    def unit(self) -> str:
        of_runs = {capacity.rate_unit(summary) for _, summary in self.runs} - {"requests"}
        return experiment.unit_of(experiment.plan_of(self.folder), min(of_runs, default="requests"))

    @property
    def as_runs(self) -> levels_kind.StoredRuns:
        """The trials as load points of one workload, for a search without an answer."""
        return levels_kind.StoredRuns(self.folder, self.runs, levels=True)


def load(folder: Path) -> StoredTrials:
    """Raises UserError for a damaged answer, and where there is neither an answer nor a trial."""
    search = experiment.stored_search(folder)
    named = (
        levels_kind.load(folder).runs
        if search is None
        else levels_kind.computed_summaries(folder, levels_kind.runs(folder))
    )
    if not named:
        raise UserError(
            "no_records",
            "no trial is in this folder",
            str(folder),
            "take the folder as it was handed over",
        )
    return StoredTrials(folder, named, search, additions_to(folder, OpenedRun(named[0][1], None)))


def headline(found: StoredTrials) -> str:
    if found.search is None:
        return f"{_not_ended_text(found.folder)} {levels_kind.headline(found.as_runs)}"
    return words.headline(found.search.answer, found.search.told, found.search.goal, found.unit)


def report(found: StoredTrials) -> Report:
    go_on = _go_on(found.folder, found.search)
    if found.search is None:
        so_far = levels_kind.report(found.as_runs)
        none = Paragraph(_not_ended_text(found.folder), "warn", large=True)
        added = [one for addition in found.additions for one in addition.sections]
        sections = [*so_far.sections, *added, section("Go on with", Quoted(go_on))]
        warned = [*so_far.warned, *(one for addition in found.additions for one in addition.warned)]
        return msgspec.structs.replace(
            so_far, warned=warned, answer=[none, *so_far.answer], sections=sections
        )
    held = capacity_in(found.folder)
    whole = search_report.report(
        found.search,
        found.runs,
        unit=found.unit,
        evidence="" if held is None or held.unfinished else held.evidence,
        additions=found.additions,
    )
    left = [section("Go on with", Quoted(go_on))] if go_on else []
    warnings = () if held is None else held.warnings
    return msgspec.structs.replace(
        whole,
        warned=[*whole.warned, *(Warned("WARNING", text) for text in warnings)],
        sections=[*whole.sections, *left],
    )


def _not_ended_text(folder: Path) -> str:
    """Return what is known of a search that was killed, as `cost` and `size` state it."""
    so_far = capacity_in(folder)
    known = "" if so_far is None else f" ({so_far.words})"
    return f"The search has not ended{known}: these are its trials so far."


def _go_on(folder: Path, search: StoredSearch | None) -> str:
    """The command that goes on with the search; "" where nothing is left to be done."""
    resuming = experiment.resuming(folder, experiment.plan_of(folder))
    return resuming if search is None else experiment.going_on(search.answer, search.told, resuming)


def document(found: StoredTrials) -> bytes:
    """Return the summaries of the trials as a JSON list."""
    return levels_kind.document(found.as_runs)


def ended(folder: Path) -> Report:
    """The report of a search that its command has just ended: of the summaries that its runs have left."""
    search = experiment.stored_search(folder)
    return report(
        StoredTrials(folder, stored_summaries(folder, levels_kind.runs(folder)), search, ())
    )


def code(found: StoredTrials, strict: bool) -> int:
    if found.search is None:
        return UNSOUND  # it was ended before it could say anything: no SLO was missed
    left = exit_code(found.search.answer)
    return UNSOUND if left == INTERRUPTED else left


def list_row(folder: Path) -> ListRow:
    search = experiment.stored_search(folder)
    return levels_kind.list_row_of_runs(
        stored_summaries(folder, levels_kind.runs(folder)),
        folder,
        "" if search is None else search.answer.reason,
    )


def compare_side(folder: Path) -> Side:
    """The run that shows the capacity: sustained, else confirmed. Raises NoCapacityError where there is none."""
    held = capacity_in(folder)
    if held is None or held.unfinished:
        names = ", ".join(run.name for run in levels_kind.runs(folder)) or "none yet"
        why = f": {held.lower_bound_reason}" if held is not None and held.lower_bound_reason else ""
        what = f"a search without a capacity{why}; no run of it stands for a load that holds"
        go_on = _go_on(folder, experiment.stored_search(folder))
        hint = f"go on with: {go_on}; or name" if go_on else "name"
        raise capacity.NoCapacityError(
            "no_figure", what, str(folder), f"{hint} one of its runs: {names}"
        )
    run = folder / held.evidence
    return Side(name="", runs=(compared(run),), notes=(held.comparison_note,))


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    told = experiment.told(folder, invalid_too=True)
    again = _again(folder, told)
    yield _retold(told, again)
    stored = experiment.stored_search(folder)
    if stored is None:
        yield RegeneratedFile(experiment.ANSWER, None, "the search has not ended")
        return
    answer = resume(LoadSearch(**msgspec.structs.asdict(stored.settings)), told).answer
    document = msgspec.structs.replace(stored, answer=answer, told=tuple(again))
    given = (
        *_given(told, "told[{}].", first=0),
        "goal*",
        "simulated",
        "seed",
        "metadata*",
        "settings*",
    )
    yield RegeneratedFile(
        experiment.ANSWER, msgspec.json.encode(document), "the results of the trials", given
    )
    yield from of_trials(folder, told, answer)


def retold(folder: Path, told: Sequence[TrialResult]) -> RegeneratedFile:
    """The results of the trials of a search or sweep, made again of their runs."""
    return _retold(told, _again(folder, told))


def _again(folder: Path, told: Sequence[TrialResult]) -> list[TrialResult]:
    is_mlperf = experiment.is_mlperf(experiment.plan_of(folder))
    return [trials.retold(folder, result, mlperf=is_mlperf) for result in told]


def _retold(told: Sequence[TrialResult], again: Sequence[TrialResult]) -> RegeneratedFile:
    return RegeneratedFile(
        experiment.TOLD,
        b"\n".join(map(msgspec.json.encode, again)),
        SUMMARIES,
        _given(told, "line {}."),
    )


def of_trials(
    folder: Path, told: Sequence[TrialResult], answer: SearchAnswer, table: SweepCurve | None = None
) -> Iterator[RegeneratedFile]:
    """The files that a search and a sweep make of their trials. `table`: of a sweep."""
    files = experiment.outputs(folder, told, answer, table=table)
    if (folder / capacity.CAPACITY_FILE).is_file():
        files.setdefault(capacity.CAPACITY_FILE, b"null\n")
    for name, data in files.items():
        yield RegeneratedFile(name, data, SUMMARIES, leave=("recipe", "go_on"))


def _given(told: Sequence[TrialResult], place: str, first: int = 1) -> tuple[str, ...]:
    """Where trials hold what no record gives: what was asked for, and how one was decided before its end."""
    leave = []
    for number, result in enumerate(told, first):
        names = ["ask*", "early", "offered", "noise", "folder"]
        names += ["outcome", "why", "code"] if result.early else []
        leave += [place.format(number) + name for name in names]
    return tuple(leave)


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
    runs=levels_kind.runs,
    capacity=capacity_facts,
)
