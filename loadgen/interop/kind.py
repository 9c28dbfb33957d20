"""The kind of a result file of another tool, or of a directory with one."""

from __future__ import annotations

from pathlib import Path

from loadgen.core import format
from loadgen.core.run_folder import OpenedRun
from loadgen.formats import ForeignResult
from loadgen.interop import reader, text
from loadgen.interop.tool_metrics import compute_tool_metrics
from loadgen.render.additions import ExtraSections
from loadgen.render.section import Section
from loadgen.result_kinds import ResultFunctions
from loadgen.runs.comparison_side import Side, SideFacts


def fits(path: Path) -> bool:
    """Return True if a path is a file, or a directory with a result file of another tool."""
    return find_result_file(path) is not None


def find_result_file(path: Path) -> Path | None:
    """Return the file at a path, or the result file of another tool in a directory."""
    if path.is_file():
        return path
    return reader.find_tool_file(path)


def load(path: Path) -> ForeignResult:
    """Return the result. Raises UserError for a file of no known tool."""
    return reader.read_result(find_result_file(path) or path)


def headline(result: ForeignResult) -> str:
    """Return what the result is, in one sentence."""
    load_text = f", {result.load}" if result.load else ""
    return f"A result of {result.tool}, by its definitions{load_text}: {result.file}."


def create_tool_comparison(run: OpenedRun) -> ExtraSections | None:
    """Return the appendix of a run's report that shows its metrics as other tools define them.

    TTFT or TPOT mean different times in different tools, so the appendix lets a user compare the
    run with their results. The metrics need every record of the run, so they are computed only when
    a page is rendered. Return None for a run whose records were not stored.
    """
    stored_records = run.stored
    if stored_records is None:
        return None

    def render_appendix() -> tuple[Section, ...]:
        metrics = compute_tool_metrics(
            run.summary, stored_records.manifest, stored_records.rows, stored_records.gaps
        )
        return text.comparison_sections(metrics)

    return ExtraSections(appendix=render_appendix)


def compare_side(path: Path) -> Side:
    """Load a result of another tool as one of the two sides that `loadgen compare` compares.

    Its notes say how the tool defines its metrics, because the other side may define them
    differently.
    """
    result = load(path)
    definitions = result.counts
    facts = SideFacts(
        tool=f"{result.tool} {result.version}".strip(),
        load=result.load,
        model=result.model,
        url=result.target,
        started=result.started,
    )
    notes = (f"metrics of {result.tool}: {definitions}", *result.notes)

    return Side(name="", reported_metrics=dict(result.metrics), notes=notes, reported_facts=facts)


FUNCTIONS = ResultFunctions(
    fits=fits,
    load=load,
    headline=headline,
    compare_side=compare_side,
    report=text.report,
    document=format.document,
)
