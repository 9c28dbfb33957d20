"""Compares prices with a commitment with prices that are paid only while a machine is used. Pure.

The same result is priced under both. What decides is the fraction of hours in which it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import product

from msgspec import Struct

from loadgen.core import format
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Rented

ON_DEMAND_PREFIXES = (
    "on demand",
    "on-demand",
    "spot",
    "preemptible",
    "low priority",
    "pay as you go",
)
"""Beginnings of a `commitment` whose hours are paid only while a machine is used."""


class CommitmentComparison(Struct, frozen=True, kw_only=True):
    """A price with a commitment against one without, for the same machine of one provider.

    Attributes:
        committed: Name of the result under the price with a commitment.
        on_demand: Name of the result under the other price.
        hours_share: The fraction of all hours above which the commitment costs less, or None if it
            never does.
        judgment: The comparison as a sentence.
    """

    committed: str
    on_demand: str
    hours_share: Decimal | None
    judgment: str


def compare_commitments(results: Sequence[PricedResult]) -> Iterator[CommitmentComparison]:
    """Yield the comparison of each price with a commitment with each without one."""
    for committed, on_demand in product(results, results):
        if _is_on_demand(committed) or not _is_on_demand(on_demand):
            continue
        if _is_same_machine(committed, on_demand):
            yield _compare_hourly_costs(committed, on_demand)


def _is_on_demand(result: PricedResult) -> bool:
    """Return True if the hours of a price are paid only while a machine is used."""
    return result.price.commitment.lower().startswith(ON_DEMAND_PREFIXES)


def _is_same_machine(first: PricedResult, second: PricedResult) -> bool:
    """Return True if both are prices per hour of one machine, provider and measurement."""
    if first.evidence.folder != second.evidence.folder:
        return False
    if not isinstance(first.price, Rented) or not isinstance(second.price, Rented):
        return False
    if not first.hourly_cost_parts or not second.hourly_cost_parts:
        return False
    return _identify_machine(first.price) == _identify_machine(second.price)


def _identify_machine(price: Rented) -> tuple[str, str, str]:
    """Return what identifies the machine of a price: provider, instance type and GPU."""
    return price.provider.lower(), price.shape, price.gpu


def _compare_hourly_costs(committed: PricedResult, on_demand: PricedResult) -> CommitmentComparison:
    """Return above which fraction of all hours a commitment costs less than paying on demand.

    A commitment is paid at all hours, and the other price only in the hours in which the machines
    are needed. Both cost the same if that fraction is the ratio of their hourly costs.
    """
    committed_per_hour = sum(committed.hourly_cost_parts.values(), Decimal(0))
    on_demand_per_hour = sum(on_demand.hourly_cost_parts.values(), Decimal(0))
    hours_share = None

    judgment = "never costs less, because its hours are not cheaper and all of them are paid"
    if committed_per_hour < on_demand_per_hour:
        hours_share = committed_per_hour / on_demand_per_hour
        judgment = (
            "costs less if the machines are needed for more than "
            f"{format.percent(float(hours_share))} of all hours"
        )

    return CommitmentComparison(
        committed=committed.name,
        on_demand=on_demand.name,
        hours_share=hours_share,
        judgment=judgment,
    )
