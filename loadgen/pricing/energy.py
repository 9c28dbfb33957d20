"""Computes the power and energy of a result, by the price file and by measurement. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal

import msgspec
from loadgen_sdk.price_file import PerToken

from loadgen.core.metrics.summary import Summary
from loadgen.pricing.cost_basis import CostBasis
from loadgen.pricing.machine_cost import count_paid_machines
from loadgen.pricing.prices import Energy, Price
from loadgen.pricing.unit_cost import round_amount
from loadgen.pricing.units import KILO, MILLION, OUTPUT, REQUEST, SECONDS_PER_HOUR, to_decimal


class DeclaredPower(msgspec.Struct, frozen=True, kw_only=True):
    """Power and energy at the measured rate, by the watts that the price file declares.

    The cost of a result includes this energy.

    Attributes:
        watts: Of all machines that are paid for, with PUE.
        joules_per_output_token: Energy per output token.
        output_tokens_per_s_per_mw: Output tokens per second and megawatt.
        kwh: Energy per unit, by unit. None if the rate of the unit is not known.
    """

    watts: Decimal
    joules_per_output_token: Decimal
    output_tokens_per_s_per_mw: Decimal
    kwh: Mapping[str, Decimal | None]


class MeasuredEnergy(msgspec.Struct, frozen=True, kw_only=True):
    """The energy that the accelerators of the runs used in the steady state.

    It covers the accelerators only, so no cost is computed from it.

    Attributes:
        watts: Mean power.
        joules_per_output_token: Energy per output token.
        joules_per_request: Energy per request, or None if it is not known.
        error: Relative error of the energy, such as 0.02.
        money: What the energy of a unit costs with PUE, by unit. None without a price per kWh.
    """

    watts: Decimal
    joules_per_output_token: Decimal
    joules_per_request: Decimal | None
    error: Decimal
    money: Mapping[str, Decimal | None]


def compute_declared_power(
    basis: CostBasis, price: Price, gpus: int | None
) -> DeclaredPower | None:
    """Return the power of all paid machines, and the energy of each unit, by the price file.

    The price file declares the power of one machine under load. It is multiplied by the PUE, which
    adds the cooling of the data centre, and by the machines that are paid. Returns None if the
    price declares no power, or if the number of GPUs or the rate of output tokens is not known.
    """
    if isinstance(price, PerToken) or price.energy is None or gpus is None:
        return None

    millions_of_tokens_per_s = basis.rates[OUTPUT]
    if not millions_of_tokens_per_s:
        return None

    tokens_per_s = millions_of_tokens_per_s * MILLION
    watts = price.energy.watts * price.energy.pue * count_paid_machines(price, gpus)
    kwh_per_s = watts / KILO / SECONDS_PER_HOUR  # One kilowatt uses a kilowatt-hour per hour.

    kwh_per_unit: dict[str, Decimal | None] = {}
    for unit, units_per_s in basis.rates.items():
        kwh_per_unit[unit] = kwh_per_s / units_per_s if units_per_s else None

    return DeclaredPower(
        watts=watts,
        joules_per_output_token=watts / tokens_per_s,
        output_tokens_per_s_per_mw=tokens_per_s / (watts / MILLION),
        kwh=kwh_per_unit,
    )


def average_measured_energy(
    summaries: Sequence[Summary], energy_price: Energy | None
) -> MeasuredEnergy | None:
    """Return the mean energy that the accelerators of the runs used.

    Returns None if one of the runs has no complete measurement: a mean over some of the runs would
    not match the other numbers of the result, which are over all of them. The relative error of
    the mean is the largest of the runs' relative errors.

    Args:
        summaries: The summaries of the runs.
        energy_price: The price of energy and the PUE, or None if there is none.
    """
    energies = [summary.energy for summary in summaries if summary.energy is not None]
    if not energies or len(energies) < len(summaries):
        return None

    watts = _mean_if_complete([energy.watts for energy in energies])
    joules_per_token = _mean_if_complete([energy.joules_per_output_token for energy in energies])
    joules_per_request = _mean_if_complete([energy.joules_per_request for energy in energies])

    relative_errors = []
    for energy in energies:
        if not energy.joules:
            return None
        relative_errors.append((energy.error_j or 0.0) / energy.joules)

    if watts is None or joules_per_token is None:
        return None

    return MeasuredEnergy(
        watts=watts,
        joules_per_output_token=joules_per_token,
        joules_per_request=joules_per_request,
        error=to_decimal(max(relative_errors)),
        money={
            REQUEST: _price_joules(joules_per_request, energy_price),
            OUTPUT: _price_joules(joules_per_token * MILLION, energy_price),
        },
    )


def compute_lowest_measured_watts(measured: MeasuredEnergy, energy_price: Energy) -> Decimal:
    """Return the measured power less its error, with PUE."""
    return measured.watts * (1 - measured.error) * energy_price.pue


def _mean_if_complete(values: Sequence[float | None]) -> Decimal | None:
    """Return the mean, or None if a value is missing or zero."""
    known = [value for value in values if value]
    if len(known) < len(values):
        return None
    return to_decimal(math.fsum(known) / len(known))


def _price_joules(joules: Decimal | None, energy_price: Energy | None) -> Decimal | None:
    """Return the price of an energy with PUE, or None if the energy or its price is not known."""
    if joules is None or energy_price is None or energy_price.per_kwh is None:
        return None
    # A kilowatt-hour is 1,000 W x 3,600 s = 3.6 million joules.
    price_per_joule = energy_price.per_kwh * energy_price.pue / KILO / SECONDS_PER_HOUR
    return round_amount(joules * price_per_joule)
