"""How long after each spike the SLO held again, in words: a section of the report of a run. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.core import format
from loadgen.core.metrics.recovery import Recovery
from loadgen.present.section import Section, Table, section


def spikes(found: Sequence[Recovery]) -> Section:
    """A row for each spike: the two loads, when it ended, and the way back."""
    rows = [(each.spike, each.after, format.duration(each.at_s), back(each)) for each in found]
    return section("After a spike", Table(("spike", "then", "ended at", "the SLO"), rows, "words"), small=True)


def back(found: Recovery) -> str:
    """When the SLO held again."""
    if found.why:
        return f"cannot be told: {found.why}"
    if not found.broken:
        return "held all the time"
    if found.back_s is None:
        return f"NOT BACK within {format.duration(found.seen_s)}"
    return f"held again after {format.duration(found.back_s)}" if found.back_s else "held again at once"
