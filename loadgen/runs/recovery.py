"""How long the SLO was missed after a spike, a lost server or a scale-up. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.metrics.sections import Event, Recovery
from loadgen.render.section import Charts, PageSectionFactory, Section, Table, section
from loadgen.runs import charts

if TYPE_CHECKING:
    from loadgen.runs.page import ChartSource

EVENTS: dict[Event, str] = {"spike": "spike", "loss": "lost server", "scale_up": "scale-up"}
"""The label of each kind of event."""

HEAD = ("event", "before", "after", "at", "SLO")


def sections(
    recoveries: Sequence[Recovery], chart_data: ChartSource
) -> Iterator[Section | PageSectionFactory]:
    """Yield a row for each event, and on a page the SLO attainment over time with the events."""
    rows = [
        (
            EVENTS[recovery.event],
            recovery.load_before,
            recovery.load_after,
            format.duration(recovery.at_s),
            describe_recovery(recovery),
        )
        for recovery in recoveries
    ]
    yield section("Recovery", Table(HEAD, rows, "prose"), is_subsection=True)
    if not recoveries or chart_data is None:
        return
    make_data = chart_data

    def attainment_chart() -> list[Section]:
        chart = charts.recovery(make_data(), recoveries)
        return [section("", Charts(tuple(chart)), page_only=True)]

    yield attainment_chart


def describe_recovery(recovery: Recovery) -> str:
    """Return when the SLO was met again after an event."""
    if recovery.why:
        return f"not known: {recovery.why}"
    if not recovery.slo_missed:
        return "met all the time"
    if recovery.recovered_after_s is None:
        return f"NOT MET AGAIN within {format.duration(recovery.observed_s)}"
    if not recovery.recovered_after_s:
        return "met again at once"
    return f"met again after {format.duration(recovery.recovered_after_s)}"
