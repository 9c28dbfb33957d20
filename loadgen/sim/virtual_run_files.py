"""The folder of a run in virtual time: the files of any run, from what the simulation left in memory. IO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from loadgen.core.results import gaps, manifest, parquet, store
from loadgen.core.results.manifest import RunManifest, WorkerSample
from loadgen.core.results.spool import STAMPS
from loadgen.core.server_metrics import series
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.stats.quantiles import Histogram
from loadgen.sim import event_gaps
from loadgen.sim.presets.preset import Preset
from loadgen.sim.virtual_records import VirtualRecords

ROWS_PER_GROUP = 250_000  # per row group of the Parquet file, so that conversion needs no second copy of all rows


def replicas_told(preset: Preset) -> list[MetricSample]:
    """How many replicas there were, as the page of a gateway tells it; [] where they stay."""
    if not preset.changes:
        return []
    counts = [
        (0.0, preset.replicas),
        *((change.at_ns / 1e9, change.serving) for change in preset.changes),
    ]
    name, page = series.OURS + series.REPLICAS, series.SIMULATED
    return [
        MetricSample(t_s=t_s, target=0, page=page, name=name, labels="", value=count)
        for t_s, count in counts
    ]


def no_errors(results: VirtualRecords) -> list[Histogram]:
    """The stamp errors of the output events of each stage: in virtual time every stamp is exact."""
    histograms = []
    for timeline in results.timeline:
        histograms.append(Histogram())
        histograms[-1].add_zeros(int(timeline.sum()))
    return histograms


def write(
    folder: Path,
    header: RunManifest,
    results: VirtualRecords,
    seconds: Sequence[WorkerSample],
    texts: Sequence[str],
    counted: Sequence[MetricSample],
) -> None:
    """Write the files of a run as they are after a clean end (see `results/store.py`)."""
    store.replace(folder / "run.json", manifest.encode(header))
    store.replace(
        folder / "seconds.jsonl",
        b"".join(msgspec.json.encode(second) + b"\n" for second in seconds),
    )
    (folder / "flows").mkdir(exist_ok=True)
    for stage, (histogram, timeline, errors) in enumerate(
        zip(results.gaps, results.timeline, no_errors(results), strict=True)
    ):
        store.replace(folder / "flows" / f"w0.{STAMPS}{stage}", errors.to_bytes())
        store.replace(folder / "flows" / f"w0.gaps.{stage}", histogram.to_bytes())
        store.replace(folder / "flows" / f"w0.timeline.{stage}", timeline.astype("<i8").tobytes())
    (folder / "requests").mkdir(exist_ok=True)
    starts = range(0, max(len(results.rows), 1), ROWS_PER_GROUP)
    parts = (results.rows.part(slice(start, start + ROWS_PER_GROUP)) for start in starts)
    tables = (parquet.to_table(cast(Any, part), list(texts)) for part in parts)
    parquet.write(folder / "requests" / store.MERGED, tables)
    if results.emitted is not None:
        gaps.write(folder, event_gaps.gaps(results.emitted))
    if counted:
        store.replace(
            folder / series.FILE, b"".join(msgspec.json.encode(one) + b"\n" for one in counted)
        )
