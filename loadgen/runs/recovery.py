"""How long the SLO was missed after a spike, a lost server or a scale-up. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.metrics.sections import Event, Recovery
from loadgen.render.section import Charts, PageSectionFactory, Section, Table, section
from loadgen.runs import charts, page

if TYPE_CHECKING:
    from loadgen.runs.page import ComputeChartData
    from loadgen.runs.page_data import ChartData

EVENTS: dict[Event, str] = {"spike": "spike", "loss": "lost server", "scale_up": "scale-up"}
"""The label of each kind of event."""

HEAD = ("event", "before", "after", "at", "SLO")


def build_recovery_sections(
    recoveries: Sequence[Recovery], compute_chart_data: ComputeChartData | None
) -> Iterator[Section | PageSectionFactory]:
    """Yield a table of the recoveries, and for a page the SLO attainment over time.

    A recovery is the time after an event, such as a spike of the load or the loss of a server,
    until the SLO is met again. Nothing is yielded without recoveries.
    """
    if not recoveries:
        return

    rows = [_recovery_row(recovery) for recovery in recoveries]
    yield section("Recovery", Table(HEAD, rows, "prose"), is_subsection=True)

    def build_attainment_section(data: ChartData) -> Section:
        attainment_charts = charts.build_recovery_charts(data, recoveries)
        return section("", Charts(tuple(attainment_charts)), page_only=True)

    yield from page.defer_section(build_attainment_section, compute_chart_data)


def _recovery_row(recovery: Recovery) -> tuple[str, ...]:
    """Return the cells of a recovery, in the order of the columns in HEAD."""
    return (
        EVENTS[recovery.event],
        recovery.load_before,
        recovery.load_after,
        format.duration(recovery.at_s),
        describe_recovery(recovery),
    )


def describe_recovery(recovery: Recovery) -> str:
    """Return when the SLO was met again after an event, or why that is not known.

    The outcomes, in this order: it is not known, the SLO was met all the time, it was not met again
    while the run lasted, it was met again in the first window after the event, or later.
    """
    if recovery.reason:
        return f"not known: {recovery.reason}"
    if not recovery.slo_missed:
        return "met all the time"
    if recovery.recovered_after_s is None:
        return f"NOT MET AGAIN within {format.duration(recovery.observed_s)}"
    if not recovery.recovered_after_s:
        return "met again at once"

    return f"met again after {format.duration(recovery.recovered_after_s)}"
