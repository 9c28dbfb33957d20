"""Computes how many machines a run pays for, and what one machine costs per hour. Pure."""

from __future__ import annotations

import math
from decimal import Decimal

from loadgen.pricing.prices import Energy, Owned, Rented
from loadgen.pricing.units import HOURS_PER_YEAR, KILO, MONTHS_PER_YEAR


def count_paid_machines(price: Rented | Owned, gpus: int) -> Decimal:
    """Return the number of machines that a run on `gpus` GPUs pays for.

    Rented machines are paid whole: a run on 6 GPUs pays for one machine of 8. Of machines that were
    bought, it pays the fraction 6/8. A price per GPU, without the number of GPUs of a machine,
    counts each GPU as a machine.
    """
    if price.gpus is None:
        return Decimal(gpus)
    if isinstance(price, Owned):
        return Decimal(gpus) / price.gpus
    return Decimal(math.ceil(gpus / price.gpus))


def compute_hourly_cost_parts(price: Rented | Owned) -> dict[str, Decimal]:
    """Return the parts of the hourly cost of one machine, such as "rent", without zero parts.

    Power is a part as far as it is paid at all hours: `counted: hourly` pays the power under load,
    and `counted: by_load` that of an idle machine.

    If the price is per GPU and does not say how many GPUs a machine has, the parts are for one GPU.
    """
    parts = (
        _compute_ownership_parts(price)
        if isinstance(price, Owned)
        else _compute_rental_parts(price)
    )
    parts["storage"] = _convert_to_hourly(price.storage_per_month)
    parts["support"] = _convert_to_hourly(price.support_per_month)

    energy = price.energy
    if energy is not None and energy.per_kwh is not None:
        if energy.counted == "hourly":
            parts["power"] = _compute_energy_cost_per_hour(energy, energy.watts)
        elif energy.counted == "by_load" and energy.idle_watts is not None:
            parts["idle power"] = _compute_energy_cost_per_hour(energy, energy.idle_watts)

    return {part: amount for part, amount in parts.items() if amount}


def compute_hourly_cost(price: Rented | Owned) -> Decimal:
    """Return what one machine costs per hour, without the energy that load adds."""
    return sum(compute_hourly_cost_parts(price).values(), Decimal(0))


def compute_load_energy_cost_per_hour(energy: Energy | None) -> Decimal:
    """Return what the power that load adds on one machine costs per hour.

    Returns 0 unless energy is counted `by_load`.
    """
    if energy is None or energy.counted != "by_load":
        return Decimal(0)
    if energy.per_kwh is None or energy.idle_watts is None:
        return Decimal(0)
    return _compute_energy_cost_per_hour(energy, energy.watts - energy.idle_watts)


def _compute_ownership_parts(price: Owned) -> dict[str, Decimal]:
    """Return what owned machines cost per hour: their capital and the people who run them."""
    return {
        "capital": _compute_capital_per_year(price) / HOURS_PER_YEAR,
        "staff": price.capital * price.staff_share / HOURS_PER_YEAR,
    }


def _compute_rental_parts(price: Rented) -> dict[str, Decimal]:
    """Return what a rented machine costs per hour: the rent, and what interruptions add to it."""
    parts: dict[str, Decimal] = {}
    if price.per_hour is not None:
        parts["rent"] = price.per_hour
    elif price.per_gpu_hour is not None:
        parts["rent"] = price.per_gpu_hour * (price.gpus or 1)

    if price.lost_share is not None:
        # Interruptions of spot machines waste this fraction of the paid time, so that a useful hour
        # costs rent / (1 - lost_share). What they add is the difference to the rent.
        parts["interruptions"] = parts["rent"] * price.lost_share / (1 - price.lost_share)

    return parts


def _compute_capital_per_year(price: Owned) -> Decimal:
    """Return the yearly cost of the capital.

    Without a discount rate the capital is written off evenly. With a rate r it is an annuity:
    capital x r / (1 - (1 + r) ^ -years).
    """
    if price.discount is None:
        return price.capital / price.years
    # At this rate, the present value of `years` yearly payments of this amount is the capital.
    return price.capital * price.discount / (1 - (1 + price.discount) ** -price.years)


def _convert_to_hourly(per_month: Decimal | None) -> Decimal:
    """Return a monthly amount per hour of a year of 8,760 hours. No amount costs nothing."""
    return (per_month or Decimal(0)) * MONTHS_PER_YEAR / HOURS_PER_YEAR


def _compute_energy_cost_per_hour(energy: Energy, watts: Decimal) -> Decimal:
    """Return what some watts at the plug of a machine cost per hour, with the PUE."""
    assert energy.per_kwh is not None
    return watts / KILO * energy.pue * energy.per_kwh
