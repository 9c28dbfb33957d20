"""Scatter plots with counts, which numpy counts the same, and the spans of stages."""

from __future__ import annotations

import numpy as np
import pytest
import run_fixtures
from queueing import rows as queueing_rows

from loadgen.core.metrics.columns import UNDEFINED
from loadgen.core.results.manifest import StagePlan
from loadgen.core.stats.quantiles import BLOCK_ROWS
from loadgen.runs.page_data import (
    CELL_COLUMNS,
    CELL_ROWS,
    MAX_POINTS,
    compute_chart_data,
    scatter_plot,
)
from loadgen.runs.percentile_curves import round_all


@pytest.mark.parametrize(
    ("steps", "spread", "rows"),
    [
        *(
            (steps, spread, 2 * MAX_POINTS)
            for steps in (7, 64, 10**9)
            for spread in (0.0, 0.5, 3.0)
        ),
        (10**9, 0.5, BLOCK_ROWS + 999),
    ],  # counted a part after the other
)
def test_pairs_are_counted_like_numpy_histogram2d(steps: int, spread: float, rows: int) -> None:
    """Also where values lie on the edges of cells, as whole numbers do, and where all are one."""
    rng = np.random.default_rng(steps)
    x = rng.integers(0, steps, rows)
    y = (1e8 * np.exp(rng.normal(0, spread, len(x)))).astype(np.int64)
    x[::17], y[::19] = -1, UNDEFINED
    chosen = rng.random(len(x)) < 0.9
    plot = scatter_plot(x, y, chosen)
    known = chosen & (x >= 0) & (y != UNDEFINED)
    xs, ys = x[known].astype(float), y[known] / 1e6
    counts, x_edges, y_edges = np.histogram2d(
        xs, np.log10(ys) if plot.log_y else ys, (CELL_COLUMNS, CELL_ROWS)
    )
    lefts, lows = round_all(x_edges, 5), round_all(10**y_edges if plot.log_y else y_edges, 5)

    assert plot.count == len(xs) and plot.log_y == (ys.max() > 20 * ys.min())
    assert (plot.x_range, plot.y_range) == ((xs.min(), xs.max()), (ys.min(), ys.max()))
    assert list(plot.cells) == [
        (lefts[i], lefts[i + 1], lows[j], lows[j + 1], counts[i, j])
        for i, j in zip(*np.nonzero(counts), strict=True)
    ]


def test_a_stage_without_a_planned_start_spans_its_requests() -> None:
    """A stage after one that ends by a number of requests has no planned start and end."""
    records = queueing_rows(1, 40)
    records["stage"][20:] = 1
    stages = (StagePlan(name="first"), StagePlan(name="second"))
    manifest = run_fixtures.manifest("r", 40, stages=stages)
    first_stage_span, second_stage_span = compute_chart_data(manifest, records).stages
    due_s = records["due_ns"] / 1e9

    assert (first_stage_span.start_s, first_stage_span.end_s) == (
        0,
        pytest.approx(due_s[19], rel=1e-4),
    )
    assert (second_stage_span.start_s, second_stage_span.end_s) == (
        pytest.approx(due_s[20], rel=1e-4),
        pytest.approx(due_s[39], rel=1e-4),
    )
