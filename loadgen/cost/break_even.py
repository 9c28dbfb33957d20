"""Computes from how many requests a day machines cost less than paying per token. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import product

from msgspec import Struct

from loadgen.cost.comparability import find_differences, has_lower_bound, is_per_token
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.units import GOOD, MACHINES, REQUEST, SECONDS_PER_HOUR, TASK

HOURS_PER_DAY = 24
_NOUNS = {REQUEST: "requests", GOOD: "good requests", TASK: "successful tasks"}


class BreakEven(Struct, frozen=True, kw_only=True):
    """The break-even of machines that are paid by the hour and a price per token.

    Attributes:
        machines: Name of the result under the price of machines.
        per_token: Name of the result under the price per token.
        units_per_day: Units per day above which the machines cost less, or None if they never do.
        capacity_per_day: Units per day that the machines serve at the rate of their basis.
        judgment: The comparison as a sentence.
    """

    machines: str
    per_token: str
    units_per_day: Decimal | None
    capacity_per_day: Decimal
    judgment: str


def find_break_evens(results: Sequence[PricedResult], unit: str) -> Iterator[BreakEven]:
    """Yield the break-even of each result by the hour with each comparable result by the token."""
    for machines, per_token in product(results, results):
        if is_per_token(machines) or not is_per_token(per_token):
            continue
        if find_differences(machines, per_token):
            continue
        break_even = _find_break_even(machines, per_token, unit)
        if break_even is not None:
            yield break_even


def _find_break_even(
    machines: PricedResult, per_token: PricedResult, unit: str
) -> BreakEven | None:
    """Return at how many units a day machines cost as much as tokens.

    Machines have a fixed cost of 24 hours a day. Each unit on them also has a marginal cost, such
    as energy: all parts of its cost but the machines. Both ways cost the same at
    fixed cost / (token cost of a unit - marginal cost of a unit) units a day.

    Args:
        machines: A result that is priced by the hour.
        per_token: A comparable result that is priced by the token.
        unit: The unit that is compared, such as `units.REQUEST`.

    Returns:
        The break-even, or None if one of the costs or the rate of the machines is not known.
    """
    machine_cost = machines.costs[unit]
    token_cost = per_token.costs[unit]
    units_per_s = machines.basis.rates[unit]
    if machine_cost is None or token_cost is None or not units_per_s:
        return None

    fixed_cost_per_day = sum(machines.hourly_cost_parts.values(), Decimal(0)) * HOURS_PER_DAY
    marginal_parts = [amount for part, amount in machine_cost.parts.items() if part != MACHINES]
    marginal_cost = sum(marginal_parts, Decimal(0))

    units_per_day = None
    if token_cost.total > marginal_cost:
        saving_per_unit = token_cost.total - marginal_cost
        units_per_day = fixed_cost_per_day / saving_per_unit

    capacity_per_day = units_per_s * SECONDS_PER_HOUR * HOURS_PER_DAY
    return BreakEven(
        machines=machines.name,
        per_token=per_token.name,
        units_per_day=units_per_day,
        capacity_per_day=capacity_per_day,
        judgment=_describe_break_even(machines, _NOUNS[unit], units_per_day, capacity_per_day),
    )


def _describe_break_even(
    machines: PricedResult, noun: str, units_per_day: Decimal | None, capacity_per_day: Decimal
) -> str:
    """Return the break-even as a sentence, compared with what the machines can serve.

    A break-even above the capacity of the machines cannot be reached with them.

    Args:
        machines: The result that is priced by the hour.
        noun: The units in the plural, such as "requests".
        units_per_day: The break-even, or None if a unit on machines always costs more.
        capacity_per_day: Units per day that the machines can serve.
    """
    if units_per_day is None:
        return (
            f"never, because the marginal cost of {noun} on the machines is above the price per "
            "token"
        )

    at_least = "at least " if has_lower_bound(machines) else ""
    load = "at the measured load, which is not their capacity"
    if machines.basis.is_capacity:
        load = "at capacity"

    capacity = f"the machines serve {at_least}{capacity_per_day:,.0f} per day {load}"
    if units_per_day > capacity_per_day:
        return (
            f"not with these machines: it would take {units_per_day:,.0f} {noun} per day, "
            f"and {capacity}"
        )

    utilization = f"{units_per_day / capacity_per_day:.1%} utilization"
    return (
        f"the machines cost less from {units_per_day:,.0f} {noun} per day ({utilization}); "
        f"{capacity}"
    )
