"""Computes the summary of a stored run from its folder. Does IO; the computation is in `metrics/`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadgen.metrics import validity
from loadgen.metrics.accumulator import Accumulator
from loadgen.metrics.summary import Summary, build, summarize
from loadgen.results.store import LEDGER, read_lightly, server
from loadgen.server_metrics import series


def summary(folder: Path) -> Summary:
    """The summary of a run, from its rows or from its accumulator file. Raises UserError as `store.read_run` does."""
    stored = read_lightly(folder)
    path = folder / "flows" / LEDGER
    if stored.header.keep == "raw" or not path.exists():
        return with_server(folder, summarize(*stored))
    accumulator = Accumulator.from_bytes(path.read_bytes(), stored.header)
    header, _, gaps, timeline, seconds, _, event_errors = stored
    return with_server(folder, build(header, accumulator, gaps, timeline, seconds, event_errors))


def with_server(folder: Path, summary: Summary) -> Summary:
    """The summary with the servers' own metrics and a warning about them; unchanged when no page was read."""
    duration_s = summary.window.whole.duration_s
    output_per_s = summary.tokens.whole_output_per_s
    server_summary = series.summarize(
        server(folder), None if duration_s is None or output_per_s is None else round(duration_s * output_per_s)
    )
    if server_summary is None:
        return summary
    verdict = summary.verdict
    if disputed := series.disputed(server_summary):
        verdict = validity.warned(verdict, "server_counts", disputed)
    return msgspec.structs.replace(summary, server=server_summary, verdict=verdict)
