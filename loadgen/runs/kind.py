"""A run as a kind of result: it is loaded, reported, listed, compared and verified here."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from loadgen.core import run_folder
from loadgen.core.errors import most_severe
from loadgen.core.metrics.summary import NamedSummary, Summary, dump_summary, exit_code
from loadgen.core.metrics.token_deadlines import count_deadlines_of_run
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest
from loadgen.core.results.stored_gaps import iterate_stored_gaps
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
        run_dir: The directory of the run.
        summary: Its summary.
        records: Its manifest, the records of its requests and what else was measured. None if only
            the summary was kept.
        additions: What other kinds of results in the directory add to its report.
    """

    run_dir: Path
    summary: Summary
    records: store.Stored | None
    additions: tuple[ExtraSections, ...]


def load(run_dir: Path) -> StoredRun:
    """Return a stored run. Raises UserError if it cannot be read."""
    opened = run_folder.open_run(run_dir)
    return StoredRun(
        run_dir=run_dir,
        summary=opened.summary,
        records=opened.stored,
        additions=additions_to(run_dir, opened),
    )


def headline(run: StoredRun) -> str:
    """Return the result of a run in one sentence, or that of a result which adds to it."""
    sentences = (addition.verdict_text for addition in run.additions if addition.verdict_text)
    return next(sentences, describe_result(run.summary))


def report(run: StoredRun) -> Report:
    """Return the report of a stored run. Without records it has no charts.

    The data of the charts is computed from the records at most once, and only for a page.
    """
    records = run.records
    if records is None:
        return text.report(run.summary, additions=run.additions, run_dir=run.run_dir)

    @cache
    def compute_chart_data_once() -> ChartData:
        return _compute_chart_data(run.run_dir, records)

    return text.report(
        run.summary,
        manifest=records.manifest,
        compute_chart_data=compute_chart_data_once,
        server_samples=store.read_server_samples(run.run_dir),
        additions=run.additions,
        run_dir=run.run_dir,
    )


def _compute_chart_data(run_dir: Path, records: store.Stored) -> ChartData:
    """Return the data of all charts of a run.

    Besides the records of requests, it needs the histograms of the gaps between the chunks of
    responses, the numbers of output events over time, and the samples of the workers.
    """
    return page_data.compute_chart_data(
        records.manifest,
        records.rows,
        inter_chunk_histograms=records.gaps,
        event_counts=records.timeline,
        worker_samples=records.seconds,
        inter_chunk_snapshots=store.read_heat(run_dir),
    )


def document(run: StoredRun) -> bytes:
    """Return what `--json` prints: the summary, or the document of a result that adds to it."""
    documents = (addition.document for addition in run.additions if addition.document is not None)
    return next(documents, dump_summary(run.summary))


def code(run: StoredRun, strict: bool) -> int:
    """Return the exit code of `loadgen report`: the most severe of the run and its additions."""
    codes = [addition.exit_code(strict) for addition in run.additions if addition.exit_code]
    return most_severe([exit_code(run.summary, strict=strict, reported=True), *codes])


def runs(run_dir: Path) -> list[Path]:
    """Return the directories of the runs of this result, which is the run itself."""
    return [run_dir]


def list_row(run_dir: Path) -> ListRow:
    """Return the row of a run in a list of results, with the capacity that it confirmed."""
    stored_capacity = capacity_in(run_dir)
    return ListRow(
        outcome="" if stored_capacity is None else stored_capacity.description,
        runs=stored_summaries(run_dir.parent, [run_dir]),
    )


def capacity_facts(output_dir: Path) -> CapacityFacts:
    """Return the capacity in a directory, if there is one. Raises UserError for a damaged file."""
    return CapacityFacts(capacity_in(output_dir))


def capacity_in(output_dir: Path) -> capacity.Capacity | None:
    """Return the capacity that is stored in a results directory, or None if there is none.

    Raises UserError for a damaged file.
    """
    path = output_dir / capacity.CAPACITY_FILE
    if not path.is_file():
        return None
    return capacity.load_capacity(path.read_bytes(), str(path))


def stored_summaries(root: Path, run_dirs: Iterable[Path]) -> tuple[NamedSummary, ...]:
    """Return the summaries that runs have stored, named by their path below `root`.

    Runs without a summary are left out.
    """
    return tuple(
        NamedSummary(run_dir.relative_to(root).as_posix(), run_folder.read_summary(run_dir))
        for run_dir in run_dirs
        if (run_dir / run_folder.SUMMARY).is_file()
    )


def compare_side(run_dir: Path) -> Side:
    """Return the run as one side of a comparison."""
    return Side(name="", runs=(load_compared_run(run_dir),))


def load_compared_run(run_dir: Path) -> ComparedRun:
    """Return a run with its records if they were kept, else with its summary alone.

    Raises UserError for a directory that cannot be read. A part of a run that was divided between
    machines (`--shard`) is refused too, because it has only some of the requests.
    """
    run_folder.refuse_shard(run_dir)
    opened = run_folder.open_run(run_dir)
    if opened.stored is None:
        return ComparedRun(name=run_dir.name, summary=opened.summary)

    manifest = opened.stored.manifest
    rows = opened.stored.rows
    return ComparedRun(
        name=run_dir.name,
        summary=opened.summary,
        manifest=manifest,
        rows=rows,
        deadline_counts=count_deadlines_of_run(manifest, rows, iterate_stored_gaps(run_dir)),
    )


def regenerate(run_dir: Path) -> list[RegeneratedFile]:
    """Return the derived files of a run, computed again, so that stored files can be verified.

    A run has one derived file: summary.json, which is computed from the records. A run that did not
    finish has none, so the result states why it cannot be compared.
    """
    has_summary = (run_dir / run_folder.SUMMARY).is_file()
    if not has_summary:
        reason = "the run did not finish, so it has none"
        return [RegeneratedFile(run_folder.SUMMARY, data=None, basis=reason)]
    summary = run_folder.summary(run_dir)
    return [RegeneratedFile(run_folder.SUMMARY, dump_summary(summary), basis=RECORDS)]


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
