"""The kind of a rehearsed curve of MLPerf Endpoints: a directory with a run for each point."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loadgen.core import format, run_folder
from loadgen.core.errors import OK, UNSOUND
from loadgen.core.metrics.summary import NamedSummary
from loadgen.mlperf.endpoints import curve_report
from loadgen.mlperf.endpoints.curve_result import (
    RESULT_FILE,
    CurveResult,
    StoredCurve,
    read_curve,
    read_result,
)
from loadgen.mlperf.endpoints.curve_run import has_finished, measure_curve, render_page
from loadgen.result_kinds import PAGE, RECORDS, ListRow, RegeneratedFile, ResultFunctions


def load(folder: Path) -> CurveResult:
    """Return the stored result of a curve, without points if the first run was interrupted.

    Raises:
        UserError: The directory has no curve, or a file is damaged.
    """
    if (folder / RESULT_FILE).is_file():
        return read_result(folder)
    return CurveResult(curve=read_curve(folder), points=())


def code(result: CurveResult, strict: bool) -> int:
    """Return the exit code of `loadgen report`: 3 if a point is missing or not valid."""
    del strict
    return exit_code(result)


def exit_code(result: CurveResult) -> int:
    """Return 0 if every point has a valid measurement, and 3 otherwise."""
    is_invalid = any(point.measurement_errors for point in result.points)
    return UNSOUND if is_invalid or result.missing_points else OK


def runs(folder: Path) -> list[Path]:
    """Return the directories of the runs, in the order of concurrency."""
    curve = read_curve(folder)
    directories = (folder / point.name for point in curve.curve.points)
    return [directory for directory in directories if run_folder.is_run(directory)]


def list_row(folder: Path) -> ListRow:
    """Return the row that describes a curve in the list of all results.

    The row says how many points of the curve were measured, and how many of them have a steady
    window that the rules accept.
    """
    result = load(folder)
    planned_points = result.curve.curve.points
    window_count = sum(1 for point in result.fixed_results if point.has_official_window)

    measured = f"{len(result.points)} of {len(planned_points)} points"
    return ListRow(
        outcome=f"rehearsal: {measured}, {window_count} steady windows",
        description=f"MLPerf Endpoints (unofficial) {result.curve.benchmark}",
        target=result.curve.target,
        simulated=result.curve.is_simulated,
        runs=tuple(_summaries(folder, result.curve)),
    )


def _summaries(folder: Path, curve: StoredCurve) -> Iterator[NamedSummary]:
    """Yield the stored summaries of the finished runs."""
    for point in curve.curve.points:
        run_dir = folder / point.name
        if has_finished(run_dir):
            yield NamedSummary(point.name, run_folder.read_summary(run_dir))


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    """Yield the result and the page, computed again from the records of the runs."""
    result = measure_curve(folder, read_curve(folder))
    yield RegeneratedFile(RESULT_FILE, format.document(result), basis=RECORDS)
    yield RegeneratedFile(PAGE, render_page(result), basis=RECORDS)


FUNCTIONS = ResultFunctions(
    load=load,
    headline=curve_report.describe_result,
    report=curve_report.create_report,
    document=format.document,
    code=code,
    runs=runs,
    list_row=list_row,
    regenerate=regenerate,
    schema=StoredCurve,
)
