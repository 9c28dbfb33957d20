"""What the calls of an application say: all together, and by each label. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from loadgen.core.format import count, quantity
from loadgen.interop.application_calls import Calls
from loadgen.render.section import Paragraph, Report, Table, section
from loadgen.runs.cells import quantile_ms

HEAD = ("calls", "ok", "TTFT p50", "p99", "TPOT p50", "E2E p50", "p99", "tokens in", "out", "cost")


def report(groups: Sequence[Calls]) -> Report:
    """One table for each label. `~`: more calls are needed for this quantile."""
    tables = []
    for label, theirs in groupby(groups, lambda group: group.label):
        rows = [_row(group) for group in theirs]
        tables.append(
            section(f"By {label}" if label else "All together", Table((label, *HEAD), rows))
        )
    legend = "Milliseconds, of the calls that are ok. ~: too few of them for this quantile."
    return Report(
        title="Calls of an application",
        generated_by="loadgen report of calls",
        sections=[*tables, section("", Paragraph(legend, "soft"))],
    )


def _row(group: Calls) -> tuple[str, ...]:
    return (
        group.value,
        count(group.calls),
        count(group.ok),
        quantile_ms(group.ttft_ms, "p50"),
        quantile_ms(group.ttft_ms, "p99"),
        quantile_ms(group.tpot_ms, "p50"),
        quantile_ms(group.e2e_ms, "p50"),
        quantile_ms(group.e2e_ms, "p99"),
        count(group.input_tokens),
        count(group.output_tokens),
        quantity(group.cost) if group.cost is not None else "",
    )
