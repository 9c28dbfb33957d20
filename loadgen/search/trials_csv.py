"""The results of a search or a sweep as a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from loadgen.runs.sweep_analysis import pareto_front
from loadgen.runs.sweep_curve import SweepCurve
from loadgen.runs.table_metrics import TABLE_METRICS
from loadgen.search.search_results import TrialResult

CURVE_FILE = "curve.csv"

CsvCell = float | int | str | None

COLUMNS = ("load", "offered", "outcome", "early", "seconds", *TABLE_METRICS)
GROUP_COLUMNS = ("isl", "osl", "target")


def render_trials_csv(trials: Sequence[TrialResult]) -> bytes:
    """Return the trials of a search as CSV, in order of load.

    The column `pareto` is 1 if no other valid trial has both more tokens/s per GPU (or in all, if
    the number of GPUs is not known) and more tokens/s per user.
    """
    points = {
        trial.number: (_throughput(trial), trial.metrics.get("tokens_per_s_per_user"))
        for trial in trials
        if trial.is_valid
    }
    front = pareto_front(points)
    rows = [
        (*_trial_cells(trial), int(trial.number in front))
        for trial in sorted(trials, key=lambda trial: trial.load)
    ]

    return _render_csv((*COLUMNS, "pareto"), rows)


def render_curve_csv(trials: Sequence[TrialResult], curve: SweepCurve) -> bytes:
    """Return the load points of a sweep as CSV, in the order of its table.

    The columns are those of GROUP_COLUMNS, those of COLUMNS, and `pareto`:

    - `isl` and `osl` are the lengths of input and output. They are empty if the sweep does not vary
      them.
    - `target` is empty if the sweep has only one target.
    - `pareto` is 1 if no other load point of the same lengths and target has both more tokens/s per
      GPU and more tokens/s per user.

    Args:
        trials: The results of the runs, with the outcome and the metrics of each.
        curve: The load points. One without a result in `trials` is left out.
    """
    trial_by_run = {trial.run_name: trial for trial in trials}
    rows = [
        (
            point.isl,
            point.osl,
            point.target,
            *_trial_cells(trial_by_run[point.name]),
            int(point.on_pareto_front),
        )
        for point in curve.load_points
        if point.name in trial_by_run
    ]
    return _render_csv((*GROUP_COLUMNS, *COLUMNS, "pareto"), rows)


def _throughput(trial: TrialResult) -> float | None:
    """Return the output tokens per second of a trial, per GPU if the number of GPUs is known."""
    per_gpu = trial.metrics.get("output_tokens_per_s_per_gpu")
    return per_gpu or trial.metrics.get("output_tokens_per_s")


def _trial_cells(trial: TrialResult) -> tuple[CsvCell, ...]:
    """Return the cells of a trial for COLUMNS. A metric that is not known is None."""
    return (
        trial.load,
        trial.offered_load,
        trial.outcome,
        int(trial.ended_early),
        trial.duration_s,
        *(trial.metrics.get(name) for name in TABLE_METRICS),
    )


def _render_csv(header: Sequence[str], rows: Iterable[Sequence[CsvCell]]) -> bytes:
    """Return the rows as CSV with lines that end in a line feed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([_format_cell(cell) for cell in row])
    return text.getvalue().encode()


def _format_cell(cell: CsvCell) -> str:
    """Return a value as it stands in the file: empty if not known, numbers with 6 digits."""
    if cell is None:
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)
