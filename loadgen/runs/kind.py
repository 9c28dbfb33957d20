"""A run as a kind of result: it is loaded, reported, listed, compared and verified here."""

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
from loadgen.runs import page_data, text
from loadgen.runs.comparison_side import ComparedRun, Side
from loadgen.runs.page_data import ChartData
from loadgen.runs.slo_text import describe_result


class StoredRun(NamedTuple):
    """A run as it was stored.

    Attributes:
        folder: The directory of the run.
        summary: Its summary.
        stored: Its manifest and records. None if only the summary was kept.
        additions: What other kinds of results in the directory add to its report.
    """

    folder: Path
    summary: Summary
    stored: store.Stored | None
    additions: tuple[ExtraSections, ...]


def load(folder: Path) -> StoredRun:
    """Return a stored run. Raises UserError if it cannot be read."""
    opened = run_folder.open_run(folder)
    return StoredRun(folder, *opened, additions_to(folder, opened))


def headline(run: StoredRun) -> str:
    """Return the result of a run in one sentence, or that of a result which adds to it."""
    sentences = (addition.verdict_text for addition in run.additions if addition.verdict_text)
    return next(sentences, describe_result(run.summary))


def report(run: StoredRun) -> Report:
    """Return the report of a run. Without records it has no charts."""
    if run.stored is None:
        return text.report(run.summary, additions=run.additions, run_dir=run.folder)
    manifest, rows, gaps, timeline, samples, *_ = run.stored

    @cache
    def chart_data() -> ChartData:
        heat = store.read_heat(run.folder)
        return page_data.compute_chart_data(manifest, rows, gaps, timeline, samples, heat)

    return text.report(
        run.summary,
        manifest,
        chart_data,
        server_samples=store.read_server_samples(run.folder),
        additions=run.additions,
        run_dir=run.folder,
    )


def document(run: StoredRun) -> bytes:
    """Return what `--json` prints: the summary, or the document of a result that adds to it."""
    documents = (addition.document for addition in run.additions if addition.document is not None)
    return next(documents, dump_summary(run.summary))


def code(run: StoredRun, strict: bool) -> int:
    """Return the exit code of `loadgen report`: the most severe of the run and its additions."""
    codes = [addition.exit_code(strict) for addition in run.additions if addition.exit_code]
    return most_severe([exit_code(run.summary, strict=strict, reported=True), *codes])


def runs(folder: Path) -> list[Path]:
    """Return the directories of the runs of this result: its own."""
    return [folder]


def list_row(folder: Path) -> ListRow:
    """Return the row of a run in a list of results, with the capacity that it confirmed."""
    stored_capacity = capacity_in(folder)
    return ListRow(
        outcome="" if stored_capacity is None else stored_capacity.description,
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
    """Return a run with its records if they were kept, else with its summary alone.

    Raises UserError for a directory that cannot be read and for one part of a divided run.
    """
    run_folder.refuse_shard(folder)
    summary, stored = run_folder.open_run(folder)
    if stored is None:
        return ComparedRun(name=folder.name, summary=summary)
    return ComparedRun(
        name=folder.name, summary=summary, manifest=stored.manifest, rows=stored.rows
    )


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    """Yield summary.json as it follows from the records, to verify the stored one."""
    if not (folder / run_folder.SUMMARY).is_file():
        reason = "the run has none, because it did not finish"
        yield RegeneratedFile(run_folder.SUMMARY, None, reason)
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
