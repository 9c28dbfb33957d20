"""The page of a run, from its parts."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import RunManifest
from loadgen.core.server_metrics.series import MetricSample
from loadgen.render import html
from loadgen.render.additions import ExtraSections
from loadgen.runs import text
from loadgen.runs.page_data import ChartData


def render(
    summary: Summary,
    manifest: RunManifest | None = None,
    chart_data: ChartData | None = None,
    samples: Sequence[MetricSample] = (),
    additions: Sequence[ExtraSections] = (),
) -> str:
    data = chart_data
    return html.render(
        text.report(summary, manifest, None if data is None else lambda: data, samples, additions)
    )
