"""What is true of a stored run: its folder read back, and its summary made again. IO; the arithmetic is `metrics/`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadgen.metrics import folded_summary
from loadgen.metrics.accumulator import Accumulator
from loadgen.metrics.summary import Summary, summarize
from loadgen.results.store import LEDGER, read_lightly, server
from loadgen.server_metrics import series


def summary(folder: Path) -> Summary:
    """What is true of a run, from its rows or from what they were folded into. Raises UserError as `read` does."""

    stored = read_lightly(folder)
    ledger = folder / "flows" / LEDGER
    if stored.header.keep == "raw" or not ledger.exists():
        return with_server(folder, summarize(*stored))
    kept = Accumulator.from_bytes(ledger.read_bytes(), stored.header)
    return with_server(
        folder, folded_summary.summarize(stored.header, kept, stored.gaps, stored.timeline, stored.seconds)
    )


def with_server(folder: Path, summary: Summary) -> Summary:
    """The summary beside what the servers said, when they said anything."""
    whole = summary.window.whole.duration_s
    rate = summary.tokens.whole_output_per_s
    said = series.summarize(server(folder), None if whole is None or rate is None else round(whole * rate))
    if said is None:
        return summary
    judged = summary.verdict
    if warning := series.warning(said):
        judged = msgspec.structs.replace(judged, warnings=(*judged.warnings, warning))
    return msgspec.structs.replace(summary, server=said, verdict=judged)
