"""Latencies by blocks of time, and what drifts from one block to the next."""

from __future__ import annotations

import numpy as np
import pytest
from make_examples import blank, stream

from loadgen.core.metrics import drift
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import RunManifest, StagePlan
from loadgen.core.results.record import SOURCES
from loadgen.core.run_summary import summarize
from loadgen.runs import text

MS, S = 1_000_000, 1_000_000_000


def summary_with_change(change: float, seconds: int) -> Summary:
    """Summarize a run whose TTFT grows by the fraction `change` while TPOT stays the same."""
    rows = blank(seconds * 100)
    rows["due_ns"] = rows["slot"] * 10 * MS
    rows["output_events"] = rows["output_tokens"] = 5
    rows["output_source"] = SOURCES.index("server")
    growth = 1 + change * np.arange(len(rows)) / len(rows)
    stream(
        rows,
        (100 * MS * growth).astype(np.int64),
        np.full(len(rows), 10 * MS),
        np.full(len(rows), 20_000),
    )
    return summarize(RunManifest(state="finished", stages=(StagePlan(name="load"),)), rows)


def test_drift_is_reported_for_the_metric_that_changes_only() -> None:
    reported_drift = summary_with_change(0.5, 60).drift

    assert reported_drift.block_s == 2
    assert len(reported_drift.blocks) == 30
    assert reported_drift.ttft_p99 == pytest.approx((1 + 0.5 * 5 / 6) / (1 + 0.5 / 6) - 1, abs=0.02)
    assert reported_drift.output_per_s == pytest.approx(0, abs=0.01)
    assert reported_drift.blocks[3].output_per_s == pytest.approx(500, rel=0.01)

    text_line = next(
        line
        for line in text.render(summary_with_change(0.5, 60)).splitlines()
        if line.startswith("Trend")
    )

    assert f"TTFT p50 {(reported_drift.ttft_p50 or 0) * 100:+.1f} %" in text_line
    steady = summary_with_change(0.0, 60).drift
    assert (steady.ttft_p50, steady.ttft_p99, steady.tpot_p99) == (0, 0, 0)
    assert "Trend" not in text.render(summary_with_change(0.5, 5))
    short = summary_with_change(0.5, 5).drift
    assert short.ttft_p99 is None
    assert len(short.blocks) == 5


@pytest.mark.parametrize("last_s", [0, 31, 32, 63, 64, 40_000])
def test_blocks_have_the_shortest_length_that_covers_the_run(last_s: int) -> None:
    rows = blank(1)
    rows["due_ns"] = last_s * S
    length = drift.sample_blocks([Columns(rows)]).block_ns
    assert last_s * S < length * drift.MAX_BLOCKS
    assert length == S or last_s * S >= length // 2 * drift.MAX_BLOCKS


def test_blocks_of_several_stages_equal_those_of_all_records() -> None:
    rows = blank(500)
    rows["due_ns"] = rows["slot"] * S // 10
    rows["stage"] = rows["slot"] % 3
    stream(rows, 50 * MS + rows["slot"] * 1000, np.full(500, 10 * MS), np.full(500, 20_000))
    time_blocks = drift.sample_blocks([Columns(rows)])
    stages = drift.sample_blocks([Columns(rows, rows["stage"] == stage) for stage in range(3)])

    assert stages.block_ns == time_blocks.block_ns == 2 * S
    for block_samples, other in zip(time_blocks.samples, stages.samples, strict=True):
        assert block_samples.requests == other.requests
        for metric in drift.LATENCIES:
            assert (
                block_samples.values[metric].distribution() == other.values[metric].distribution()
            )
