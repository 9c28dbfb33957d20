"""What an offer costs year by year: money that is paid, not written off. Pure.

A unit of work costs what `pricing.unit_cost` says; here is what leaves the till when, at the measured rate all year
times the utilization. Machines that were bought are paid in the first year, and again when their years are over.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from math import floor

from loadgen_sdk.price_file import PerToken
from msgspec import Struct

from loadgen.pricing.machine_cost import hourly_cost_parts, load_energy_cost_per_hour, machines_paid
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Owned
from loadgen.pricing.units import EGRESS, HOURS_PER_YEAR, REQUEST, SECONDS_PER_HOUR

YEARS = 5


class ByYear(Struct, frozen=True, kw_only=True):
    """The amounts of the years 1, 2, ... `present`: their worth at the start, where the price has a discount."""

    paid: tuple[Decimal, ...]
    present: Decimal | None

    @property
    def total(self) -> Decimal:
        return sum(self.paid, Decimal(0))


def by_year(offer: PricedResult, years: int = YEARS) -> ByYear | None:
    """None where the offer has no rate of requests."""
    price, rate, request = offer.price, offer.basis.rates[REQUEST], offer.costs[REQUEST]
    if not rate or request is None:
        return None
    requests = rate * SECONDS_PER_HOUR * HOURS_PER_YEAR * offer.utilization
    if isinstance(price, PerToken):
        paid = (request.total * requests,) * years
        return ByYear(paid=paid, present=None)
    assert offer.gpus is not None  # an offer of machines has them
    count = machines_paid(price, offer.gpus)
    running = {
        part: amount for part, amount in hourly_cost_parts(price).items() if part != "capital"
    }
    load = load_energy_cost_per_hour(price.energy) * offer.utilization
    each = (sum(running.values(), Decimal(0)) + load) * count * HOURS_PER_YEAR
    each += request.parts.get(EGRESS, Decimal(0)) * requests
    bought = list(_bought(price.years, years)) if isinstance(price, Owned) else []
    capital = price.capital * count if isinstance(price, Owned) else Decimal(0)
    paid = tuple(each + capital * bought.count(year) for year in range(1, years + 1))
    discount = price.discount if isinstance(price, Owned) else None
    if discount is None:
        return ByYear(paid=paid, present=None)
    # capital at the start of its year, what runs at its end
    worth = [each / (1 + discount) ** year for year in range(1, years + 1)]
    worth += [capital / (1 + discount) ** (year - 1) for year in bought]
    return ByYear(paid=paid, present=sum(worth, Decimal(0)))


def _bought(lasts: Decimal, years: int) -> Iterator[int]:
    """The years in which machines that last so long are bought."""
    at = Decimal(0)
    while at < years:
        yield floor(at) + 1
        at += lasts
