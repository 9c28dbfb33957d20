"""How long after a spike, a loss or a scale-up the SLO held again: a section of the report of a run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from loadgen.core import format
from loadgen.core.metrics.sections import Event, Recovery
from loadgen.render.section import Charts, PageOnly, Section, Table, section
from loadgen.runs import charts
from loadgen.runs.page_data import Figures

EVENTS: dict[Event, str] = {"spike": "spike", "loss": "loss", "scale_up": "scale-up"}


def sections(
    found: Sequence[Recovery], figures: Callable[[], Figures] | None
) -> Iterator[Section | PageOnly]:
    """A row for each event, and on a page the share of requests within the SLO over time with the events in it."""
    rows = [
        (
            EVENTS[each.event],
            each.load_before,
            each.load_after,
            format.duration(each.at_s),
            back(each),
        )
        for each in found
    ]
    head = "Back within the SLO"
    yield section(
        head, Table(("after", "before it", "then", "at", "the SLO"), rows, "prose"), small=True
    )
    if found and figures is not None:
        yield lambda: [
            section("", Charts(tuple(charts.recovery(figures(), found))), page_only=True)
        ]


def back(found: Recovery) -> str:
    """When the SLO held again."""
    if found.why:
        return f"cannot be told: {found.why}"
    if not found.slo_missed:
        return "held all the time"
    if found.recovered_after_s is None:
        return f"NOT BACK within {format.duration(found.observed_s)}"
    return (
        f"held again after {format.duration(found.recovered_after_s)}"
        if found.recovered_after_s
        else "held again at once"
    )
