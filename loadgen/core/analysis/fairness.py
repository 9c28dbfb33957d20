"""Do all tenants get alike what they ask for? Jain's index over them, and the worst of them. Pure, on classes.

A tenant is the classes of one `tenant`; a class without one is a tenant of its own. R. Jain, D. Chiu, W. Hawe, "A
Quantitative Measure of Fairness and Discrimination", DEC-TR-301 (1984): (sum x)^2 / (n * sum x^2), 1 where all are
alike, 1/n where one has everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loadgen.core.metrics.sections import Fairness, TenantShare

if TYPE_CHECKING:
    from loadgen.core.metrics.part_summaries import ClassSummary


def jain(values: Sequence[float]) -> float | None:
    """Jain's index of values of at least 0; None where all are 0, or there are none."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def tenants_of(tenants: Mapping[str, str | None]) -> dict[str, tuple[str, ...]]:
    """The tenants, each with the names of its classes; {} where there are no two. `tenants`: that of each class."""
    found: dict[str, tuple[str, ...]] = {}
    for name, tenant in tenants.items():
        found[tenant or name] = (*found.get(tenant or name, ()), name)
    return found if len(found) > 1 else {}


def of_classes(classes: Sequence[ClassSummary]) -> Fairness | None:
    """The block `fairness`; None for a single tenant."""
    by_name = {part.name: part for part in classes}
    found = tenants_of({part.name: part.tenant for part in classes})
    tenants = tuple(
        _tenant(name, [by_name[each] for each in names]) for name, names in found.items()
    )
    if not tenants:
        return None
    ok, good = (
        [getattr(tenant, name) for tenant in tenants] for name in ("ok_share", "good_share")
    )
    shares = ok if None in good else good
    uneven = None not in shares and len(set(shares)) > 1
    return Fairness(
        tenants=tenants,
        ok_index=None if None in ok else jain(ok),
        good_index=None if None in good else jain(good),
        worst=tenants[shares.index(min(shares))].name if uneven else "",
    )


def _headline_output_per_s(part: ClassSummary) -> float | None:
    """Return the output tokens per second in the steady-state window.

    A part without such a window has the rate of its measurement window.
    """
    tokens = part.tokens
    if part.load.steady_completed_rps is None:
        return tokens.output_per_s
    return tokens.steady_output_per_s


def _tenant(name: str, parts: Sequence[ClassSummary]) -> TenantShare:
    decided = sum(part.requests.decided for part in parts)
    good, counted = (
        [getattr(part.goodput, field) for part in parts] for field in ("good", "counted")
    )
    rates = [_headline_output_per_s(part) for part in parts]
    known = None not in good and any(counted)
    return TenantShare(
        name=name,
        classes=tuple(part.name for part in parts),
        decided=decided,
        ok_share=sum(part.requests.ok for part in parts) / decided if decided else None,
        good_share=sum(filter(None, good)) / sum(filter(None, counted)) if known else None,
        output_per_s=None if None in rates else sum(filter(None, rates)),
    )
