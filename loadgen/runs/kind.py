"""A run: its summary from its records, and what other kinds of results in its folder add to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from loadgen.core import run_folder
from loadgen.core.errors import most_severe
from loadgen.core.metrics.summary import NamedSummary, Summary, dump_summary, exit_code
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest
from loadgen.render.additions import ExtraSections
from loadgen.render.section import Report
from loadgen.repeated import capacity
from loadgen.result_kinds import (
    RECORDS,
    CapacityFacts,
    ListRow,
    RegeneratedFile,
    ResultFunctions,
    additions_to,
)
from loadgen.runs import headline as run_headline
from loadgen.runs import page_data
from loadgen.runs import text as words
from loadgen.runs.comparison_side import ComparedRun, Side
from loadgen.runs.page_data import Figures


class StoredRun(NamedTuple):
    """A run as far as it was recorded; `stored` None: only its summary was kept."""

    folder: Path
    summary: Summary
    stored: store.Stored | None
    additions: tuple[ExtraSections, ...]


def load(folder: Path) -> StoredRun:
    opened = run_folder.open_run(folder)
    return StoredRun(folder, *opened, additions_to(folder, opened))


def headline(run: StoredRun) -> str:
    own = (addition.verdict_text for addition in run.additions if addition.verdict_text)
    return next(own, run_headline.sentence(run.summary))


def report(run: StoredRun) -> Report:
    if run.stored is None:
        return words.report(run.summary, additions=run.additions)
    manifest, rows, gaps, timeline, seconds, *_ = run.stored

    @cache
    def drawing() -> Figures:
        return page_data.figures(manifest, rows, gaps, timeline, seconds, store.heat(run.folder))

    return words.report(run.summary, manifest, drawing, store.server(run.folder), run.additions)


def document(run: StoredRun) -> bytes:
    of_others = (addition.document for addition in run.additions if addition.document is not None)
    return next(of_others, dump_summary(run.summary))


def code(run: StoredRun, strict: bool) -> int:
    of_additions = [one.exit_code(strict) for one in run.additions if one.exit_code]
    return most_severe([exit_code(run.summary, strict=strict, reported=True), *of_additions])


def runs(folder: Path) -> list[Path]:
    return [folder]


def list_row(folder: Path) -> ListRow:
    held = capacity_in(folder)
    return ListRow(
        outcome="" if held is None else held.description,
        runs=stored_summaries(folder.parent, [folder]),
    )


def capacity_facts(folder: Path) -> CapacityFacts:
    """Return the capacity in a directory, if there is one. Raises UserError for a damaged one."""
    return CapacityFacts(capacity_in(folder))


def capacity_in(folder: Path) -> capacity.Capacity | None:
    """Return the capacity that is stored in a results directory, or None if there is none."""
    file = folder / capacity.CAPACITY_FILE
    return capacity.load_capacity(file.read_bytes(), str(file)) if file.is_file() else None


def stored_summaries(root: Path, folders: Iterable[Path]) -> tuple[NamedSummary, ...]:
    """Return the summaries that runs have stored, named by their path below `root`.

    Runs without a summary are left out.
    """
    return tuple(
        NamedSummary(folder.relative_to(root).as_posix(), run_folder.kept_summary(folder))
        for folder in folders
        if (folder / run_folder.SUMMARY).is_file()
    )


def compare_side(folder: Path) -> Side:
    """Return the run as one side of a comparison."""
    return Side(name="", runs=(compared(folder),))


def compared(folder: Path) -> ComparedRun:
    """Return a run as far as it was recorded: its records, or its summary alone.

    Raises UserError for a folder that cannot be read and for one part of a divided run.
    """
    run_folder.refuse_shard(folder)
    summary, stored = run_folder.open_run(folder)
    if stored is None:
        return ComparedRun(name=folder.name, summary=summary)
    return ComparedRun(
        name=folder.name, summary=summary, manifest=stored.manifest, rows=stored.rows
    )


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    if not (folder / run_folder.SUMMARY).is_file():
        yield RegeneratedFile(
            run_folder.SUMMARY, None, "the run has none: it did not come to its end"
        )
        return
    yield RegeneratedFile(run_folder.SUMMARY, dump_summary(run_folder.summary(folder)), RECORDS)


FUNCTIONS = ResultFunctions(
    load=load,
    headline=headline,
    report=report,
    document=document,
    code=code,
    runs=runs,
    list_row=list_row,
    compare_side=compare_side,
    regenerate=regenerate,
    schema=RunManifest,
    capacity=capacity_facts,
)
