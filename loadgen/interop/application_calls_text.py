"""Renders the calls of an application: all of them, and one table for each label."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from loadgen.core.format import count, quantity
from loadgen.interop.application_calls import Calls
from loadgen.render.section import Paragraph, Report, Table, section
from loadgen.runs.cells import quantile_ms

HEAD = (
    "calls",
    "succeeded",
    "TTFT p50",
    "p99",
    "TPOT p50",
    "E2E p50",
    "p99",
    "input tokens",
    "output tokens",
    "cost",
)
LEGEND = "Latencies in ms, of successful calls. ~: too few calls for this percentile."


def report(groups: Sequence[Calls]) -> Report:
    """Return the report with one table for all calls and one for each label."""
    sections = []
    for label, label_groups in groupby(groups, _label_of):
        table = Table((label, *HEAD), [_table_row(group) for group in label_groups])
        sections.append(section(f"By {label}" if label else "All calls", table))

    return Report(
        title="Calls of an application",
        generated_by="loadgen report of calls",
        sections=[*sections, section("", Paragraph(LEGEND, "soft"))],
    )


def _label_of(group: Calls) -> str:
    return group.label


def _table_row(group: Calls) -> tuple[str, ...]:
    """Return the value of the label, and the cells in the order of HEAD."""
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
        "" if group.cost is None else quantity(group.cost),
    )
