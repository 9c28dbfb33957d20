"""Computes what a result costs in each year: money when it is paid, not written off. Pure.

The measured rate is served all year, times the utilization. Machines that were bought are paid in
the first year, and again whenever their depreciation period is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from math import floor

from loadgen_sdk.price_file import PerToken
from msgspec import Struct

from loadgen.pricing.machine_cost import (
    compute_hourly_cost_parts,
    compute_load_energy_cost_per_hour,
    count_paid_machines,
)
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Owned, Rented
from loadgen.pricing.unit_cost import UnitCost
from loadgen.pricing.units import EGRESS, HOURS_PER_YEAR, REQUEST, SECONDS_PER_HOUR

YEARS = 5


class YearlyCost(Struct, frozen=True, kw_only=True):
    """What is paid in each year.

    Attributes:
        paid: The amounts of the first year, the second, and so on.
        present: Their present value, or None if the price has no discount rate.
    """

    paid: tuple[Decimal, ...]
    present: Decimal | None

    @property
    def total(self) -> Decimal:
        """The sum over all years."""
        return sum(self.paid, Decimal(0))


def compute_yearly_cost(result: PricedResult, years: int = YEARS) -> YearlyCost | None:
    """Return what it costs to use a result's machines or tokens for some years.

    Returns None if the rate of requests is not known.

    Tokens and rented machines cost the same in every year. Only owned machines have years in which
    they are bought, and so a present value.
    """
    requests_per_s = result.basis.rates[REQUEST]
    request_cost = result.costs[REQUEST]
    if not requests_per_s or request_cost is None:
        return None

    requests_per_year = requests_per_s * SECONDS_PER_HOUR * HOURS_PER_YEAR * result.utilization
    price = result.price
    if isinstance(price, PerToken):
        return YearlyCost(paid=(request_cost.total * requests_per_year,) * years, present=None)

    running_cost = _compute_running_cost_per_year(result, price, request_cost, requests_per_year)
    if isinstance(price, Rented):
        return YearlyCost(paid=(running_cost,) * years, present=None)

    return _compute_owned_yearly_cost(result, price, running_cost, years)


def _compute_running_cost_per_year(
    result: PricedResult, price: Rented | Owned, request_cost: UnitCost, requests_per_year: Decimal
) -> Decimal:
    """Return the cost of a year without the capital.

    Hourly costs are paid for all hours. The energy that load adds is paid for the hours in which
    the machines are used, and egress for each request.
    """
    assert result.gpus is not None, "a result priced by machines has GPUs"
    hourly_parts = compute_hourly_cost_parts(price)
    hourly_parts.pop("capital", None)
    load_energy = compute_load_energy_cost_per_hour(price.energy) * result.utilization
    cost_per_machine_hour = sum(hourly_parts.values(), Decimal(0)) + load_energy
    machines = count_paid_machines(price, result.gpus)
    egress_cost = request_cost.parts.get(EGRESS, Decimal(0)) * requests_per_year

    return cost_per_machine_hour * machines * HOURS_PER_YEAR + egress_cost


def _compute_owned_yearly_cost(
    result: PricedResult, price: Owned, running_cost: Decimal, years: int
) -> YearlyCost:
    """Return what owned machines cost in each year, and the present value with a discount rate.

    The capital is paid in the years in which the machines are bought or replaced. An amount that is
    paid n years from now is worth amount / (1 + discount) ** n today.

    Args:
        result: The result that is priced by these machines.
        price: The price of the machines.
        running_cost: What a year costs without the capital.
        years: How many years are computed.
    """
    assert result.gpus is not None, "a result priced by machines has GPUs"
    capital = price.capital * count_paid_machines(price, result.gpus)  # of one purchase
    purchase_years = list(_list_purchase_years(price.years, years))
    paid = tuple(
        running_cost + capital * purchase_years.count(year) for year in range(1, years + 1)
    )
    if price.discount is None:
        return YearlyCost(paid=paid, present=None)

    # Running costs are paid at the end of a year, so those of the first year are one year from now.
    # Capital is paid at the start of a year, so that of the first year is paid now.
    yearly_factor = 1 + price.discount
    present_values = [running_cost / yearly_factor**year for year in range(1, years + 1)]
    present_values += [capital / yearly_factor ** (year - 1) for year in purchase_years]

    return YearlyCost(paid=paid, present=sum(present_values, Decimal(0)))


def _list_purchase_years(lifetime_years: Decimal, years: int) -> Iterator[int]:
    """Yield the years, counted from 1, in which machines are bought or replaced.

    A year is yielded twice if machines are bought twice in it.

    Args:
        lifetime_years: After how many years the machines are replaced. It may be a fraction.
        years: How many years are looked at.
    """
    elapsed_years = Decimal(0)
    while elapsed_years < years:
        yield floor(elapsed_years) + 1
        elapsed_years += lifetime_years
