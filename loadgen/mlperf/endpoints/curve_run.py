"""Runs the points of a curve one after the other, where the same command resumes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from loadgen.cli.output import print_status
from loadgen.core import format, run_folder
from loadgen.core.errors import UserError
from loadgen.core.execution.folder_names import locked_folder, move_to_unfinished
from loadgen.core.results import checksums, store
from loadgen.mlperf.endpoints import curve_report
from loadgen.mlperf.endpoints.curve_result import (
    RESULT_FILE,
    CurveResult,
    PointResult,
    StoredCurve,
    begin_curve,
)
from loadgen.mlperf.endpoints.point_metrics import measure_point
from loadgen.mlperf.endpoints.rules import find_seed_set
from loadgen.mlperf.endpoints.workloads import CurveData, build_workload
from loadgen.result_kinds import PAGE

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.execution.run import Execute
    from loadgen.mlperf.endpoints.points import CurvePoint
    from loadgen.runs.run_display import RunDisplay

FINISHED = "finished"
"""The state of a run that has sent all its requests."""


class CurveRun(NamedTuple):
    """A curve that is carried out in a directory.

    Attributes:
        curve: The curve as it was requested.
        data: The samples.
        settings: The server, and how requests are sent.
        output_dir: The directory of the results.
        execute: Carries out a run.
        display: Shows the progress.
    """

    curve: StoredCurve
    data: CurveData
    settings: Settings
    output_dir: Path
    execute: Execute
    display: RunDisplay

    @property
    def planned_points(self) -> tuple[CurvePoint, ...]:
        """All measurement points of the curve, also those that have run already."""
        return self.curve.curve.points


class CurveOutcome(NamedTuple):
    """The results of the points that have run, and whether the user interrupted one."""

    result: CurveResult
    is_interrupted: bool


def run_curve(curve_run: CurveRun) -> CurveOutcome:
    """Run the measurement points of a curve that have no finished run yet, and write the results.

    The result files are written after each point, so a killed process loses only its last point.

    Raises:
        TargetError: The server is lost.
    """
    points = _begin_curve(curve_run)
    result = measure_curve(curve_run.output_dir, curve_run.curve)
    is_interrupted = False
    for point in points:
        curve_run.display.begin_step(f"Point {point.name}")
        measured = _run_and_measure_point(curve_run, point)
        if measured is None:
            is_interrupted = True
            break

        result = _add_point(result, measured)
        write_result(curve_run.output_dir, result)
        _print_point(measured)

    write_result(curve_run.output_dir, result)
    checksums.write(curve_run.output_dir)
    return CurveOutcome(result, is_interrupted)


def _begin_curve(curve_run: CurveRun) -> list[CurvePoint]:
    """Prepare the output directory and the display, and return the points that are left to run.

    Some points are done already if an earlier command with this directory was interrupted.
    """
    begin_curve(curve_run.output_dir, curve_run.curve)
    points = points_to_run(curve_run.curve, curve_run.output_dir)
    done_count = len(curve_run.planned_points) - len(points)
    if done_count:
        done = format.counted(done_count, "point is", "points are")
        print_status(f"Resuming {curve_run.output_dir}: {done} done")

    checksums.begin(curve_run.output_dir)
    curve_run.display.begin_steps(len(points), weights=_relative_durations(curve_run, points))
    return points


def _add_point(result: CurveResult, measured: PointResult) -> CurveResult:
    """Return the curve with one more point, with the points in the order of the plan."""
    result_by_name = {point.point.name: point for point in (*result.points, measured)}
    planned_names = [point.name for point in result.curve.curve.points]
    points = tuple(result_by_name[name] for name in planned_names if name in result_by_name)
    return CurveResult(curve=result.curve, points=points)


def _print_point(measured: PointResult) -> None:
    """Print what a point measured."""
    throughput = format.quantity(measured.metrics.system_tps)
    print_status(f"{measured.point.name}: {throughput} tokens/s, {measured.verdict}")


def _relative_durations(curve_run: CurveRun, points: list[CurvePoint]) -> list[float]:
    """Return how many requests each point sends, to forecast the time left."""
    return [float(curve_run.curve.requests[point.name]) for point in points]


def points_to_run(curve: StoredCurve, output_dir: Path) -> list[CurvePoint]:
    """Return the points without a finished run in the directory, in the order of concurrency."""
    return [point for point in curve.curve.points if not has_finished(output_dir / point.name)]


def has_finished(run_dir: Path) -> bool:
    """Return whether a directory has a run that has sent all its requests."""
    has_summary = (run_dir / run_folder.SUMMARY).is_file()
    if not has_summary:
        return False

    return run_folder.read_summary(run_dir).run.state == FINISHED


def _run_and_measure_point(curve_run: CurveRun, point: CurvePoint) -> PointResult | None:
    """Run one measurement point and return its result, or None if the user interrupted the run.

    While requests are sent to a real server, an interruption ends the run in order, in the state
    "interrupted". At all other times, as on a simulated server, it raises KeyboardInterrupt.
    """
    try:
        is_finished = _run_point(curve_run, point)
        if not is_finished:
            return None
        return _measure_stored_point(point, curve_run.output_dir, curve_run.curve)
    except KeyboardInterrupt:
        return None


def _run_point(curve_run: CurveRun, point: CurvePoint) -> bool:
    """Run one measurement point and return whether it finished, or else was interrupted.

    The results are in a directory with the name of the point. A file with the requests, if the data
    set is a file, is next to this directory, because it is no result.
    """
    run_dir = curve_run.output_dir / point.name
    _move_unfinished_run(run_dir)

    workload = build_workload(
        point,
        curve_run.data,
        find_seed_set(curve_run.curve.seed_set),
        request_count=curve_run.curve.requests[point.name],
        output_dir=curve_run.output_dir,
    )
    settings_of_point = replace(curve_run.settings, out=run_dir)
    with locked_folder(run_dir):
        summary, _ = curve_run.execute(workload, settings_of_point, folder=run_dir)
    return summary.run.state == FINISHED


def _move_unfinished_run(run_dir: Path) -> None:
    """Move the files of a stopped run to the directory `unfinished/`, so that it can run again.

    Raises:
        UserError: The directory has files that are not those of a run.
    """
    is_absent_or_empty = not run_dir.exists() or not any(run_dir.iterdir())
    if is_absent_or_empty:
        return

    if not run_folder.is_run(run_dir):
        raise UserError(
            "file_exists",
            "the folder of a point has other files",
            str(run_dir),
            "use another folder with --out",
        )
    move_to_unfinished(run_dir)


def measure_curve(output_dir: Path, curve: StoredCurve) -> CurveResult:
    """Return the results of the finished points, computed from their records."""
    results = tuple(
        _measure_stored_point(point, output_dir, curve)
        for point in curve.curve.points
        if has_finished(output_dir / point.name)
    )
    return CurveResult(curve=curve, points=results)


def _measure_stored_point(point: CurvePoint, output_dir: Path, curve: StoredCurve) -> PointResult:
    """Return the result of a finished point, computed from its records."""
    return measure_point(point, output_dir / point.name, dataset_size=curve.dataset_size)


def write_result(output_dir: Path, result: CurveResult) -> None:
    """Write `endpoints.json` and the page of a curve."""
    store.replace(output_dir / RESULT_FILE, format.document(result))
    page = render_page(result)
    store.replace(output_dir / PAGE, page, shared=True)


def render_page(result: CurveResult) -> bytes:
    """Return the page of a curve."""
    from loadgen.render import html

    return html.render(curve_report.create_report(result)).encode()
