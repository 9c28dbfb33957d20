"""The result file of another tool, or a folder with one, under that tool's own definitions."""

from __future__ import annotations

from pathlib import Path

from loadgen.core import format
from loadgen.core.run_folder import OpenedRun
from loadgen.formats import ForeignResult
from loadgen.interop import other_definitions, reader
from loadgen.interop import text as words
from loadgen.render.additions import ExtraSections
from loadgen.result_kinds import ResultFunctions
from loadgen.runs.comparison_side import Side, SideFacts


def fits(path: Path) -> bool:
    return file_of(path) is not None


def file_of(path: Path) -> Path | None:
    """The result file of another tool that a path names, directly or by its folder."""
    if path.is_file():
        return path
    return reader.left_by_tools(path)


def load(path: Path) -> ForeignResult:
    """Raises UserError for a file of no known tool."""
    return reader.read_result(file_of(path) or path)


def headline(result: ForeignResult) -> str:
    load = f", {result.load}" if result.load else ""
    return f"A result of {result.tool}, under its definitions{load}: {result.file}."


def additions(folder: Path, run: OpenedRun) -> ExtraSections | None:
    """What other tools would have reported of a run of ours; None without its records."""
    if run.stored is None:
        return None
    manifest, rows, gaps, *_ = run.stored

    return ExtraSections(
        appendix=lambda: words.of_our_run(
            other_definitions.reported(run.summary, manifest, rows, gaps)
        )
    )


def compare_side(path: Path) -> Side:
    reported = load(path)
    notes = (f"figures of {reported.tool}: {reported.counts}", *reported.notes)
    described = SideFacts(
        tool=" ".join(filter(None, (reported.tool, reported.version))),
        load=reported.load,
        model=reported.model,
        url=reported.target,
        started=reported.started,
    )
    return Side(
        name="", reported_metrics=dict(reported.metrics), notes=notes, reported_facts=described
    )


FUNCTIONS = ResultFunctions(
    fits=fits,
    load=load,
    headline=headline,
    compare_side=compare_side,
    report=words.report,
    document=format.document,
)
