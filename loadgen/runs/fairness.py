"""How fairly the tenants of a load were served, as a section of the report of a run. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.render.section import Paragraph, Section, Table, section

if TYPE_CHECKING:
    from loadgen.core.metrics.sections import Fairness

HEAD = ("tenant", "classes", "requests", "succeeded", "met the SLO", "output tok/s")


def fairness_section(fairness: Fairness | None) -> Section:
    """Return a row for each tenant, and Jain's fairness index over the tenants."""
    if fairness is None:
        return section("Fairness")

    rows = [
        (
            tenant.name,
            ", ".join(tenant.classes),
            format.count(tenant.decided),
            format.percent(tenant.ok_share),
            format.percent(tenant.good_share),
            format.quantity(tenant.output_per_s),
        )
        for tenant in fairness.tenants
    ]
    text = Paragraph(_describe_indices(fairness))
    return section("Fairness", Table(HEAD, rows), text, id="fairness")


def _describe_indices(fairness: Fairness) -> str:
    """Return Jain's index by the requests that succeeded, and by those that met the SLO."""
    indices = []
    if fairness.ok_index is not None:
        indices.append(f"{fairness.ok_index:.3f} for successful requests")

    if fairness.good_index is not None:
        indices.append(f"{fairness.good_index:.3f} for requests that met the SLO")

    if not indices:
        return ""

    text = f"Jain's fairness index (1: all tenants are served equally): {'; '.join(indices)}."
    return f"{text} Served worst: {fairness.worst}." if fairness.worst else text
