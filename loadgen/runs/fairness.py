"""What each tenant got of what it asked for, in words: a section of the report of a run. Pure."""

from __future__ import annotations

from loadgen.core import format
from loadgen.core.metrics.sections import Fairness
from loadgen.render.section import Paragraph, Section, Table, section


def tenants(found: Fairness | None) -> Section:
    """A row for each tenant, and Jain's index over them."""
    if found is None:
        return section("Fairness")
    rows = [
        (
            each.name,
            ", ".join(each.classes),
            format.count(each.decided),
            format.percent(each.ok_share),
            format.percent(each.good_share),
            format.quantity(each.output_per_s),
        )
        for each in found.tenants
    ]
    indices = [("answered", found.ok_index), ("within the SLO", found.good_index)]
    told = [f"{index:.3f} by the share {name}" for name, index in indices if index is not None]
    said = (
        "Jain's index over the tenants (1: all get alike of what they asked for): "
        + "; ".join(told)
        + "."
    )
    worst = f" Least got {found.worst}." if found.worst else ""
    head = ("tenant", "classes", "requests", "answered", "within the SLO", "tokens/s")
    return section(
        "Fairness", Table(head, rows), Paragraph(said + worst if told else ""), id="fairness"
    )
