"""How sure the figures of one run are by what happened within it, as a table. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.core import format
from loadgen.core.metrics.summary import Summary
from loadgen.render.section import Paragraph, Section, Table, section
from loadgen.repeated.comparable_metrics import SHARE_PATHS, find_metric

COVERS = (
    "95 %, by blocks of the time of this run: what changes within it. What another start of the server or another day "
    "would show, they do not cover: --repeat 3 does."
)


def sections(summary: Summary) -> Iterator[Section]:
    """The intervals that a run has by itself; nothing of a short one."""
    rows = []
    for path, found in summary.within.items():
        known = find_metric(path)
        shown = (
            format.percent
            if path in SHARE_PATHS
            else format.milliseconds
            if path.endswith(_TIMES)
            else format.quantity
        )
        rows.append(
            (
                path if known is None else f"{known.name}{known.unit and f', {known.unit}'}",
                *map(shown, found),
            )
        )
    if rows:
        table = Table(("figure", "value", "from", "to"), rows)
        yield section(
            "How sure these figures are", table, Paragraph(COVERS, "soft"), folded=True, id="within"
        )


_TIMES = (".p50", ".p90", ".p95", ".p99", ".p99_9", ".mean")
