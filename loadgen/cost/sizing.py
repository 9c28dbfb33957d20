"""Computes how many machines a number of users needs, with spare ones, and what they cost a month.

Pure. `capacity_planning` scales rates, and `loadgen.pricing` computes the hourly cost of a machine.
"""

from __future__ import annotations

from decimal import Decimal
from typing import NamedTuple

import msgspec
from loadgen_sdk.price_file import PerToken
from msgspec import Struct
from msgspec.structs import replace

from loadgen.core.errors import UserError
from loadgen.cost.capacity_planning import (
    MeasuredRate,
    compute_interactions_per_s,
    count_needed_machines,
    scale_rate,
)
from loadgen.pricing.cost_basis import find_task_sessions
from loadgen.pricing.estimate import Estimate
from loadgen.pricing.evidence import Evidence, count_interactions
from loadgen.pricing.machine_cost import compute_hourly_cost, compute_load_energy_cost_per_hour
from loadgen.pricing.priced_result import compute_basis_for_price
from loadgen.pricing.prices import Owned, Price, Rented
from loadgen.pricing.unit_cost import compute_unit_cost
from loadgen.pricing.units import PARTS_BY_TIME, REQUEST, SECONDS_PER_HOUR, TASK, to_decimal

HOURS_PER_MONTH = Decimal(730)  # 8,760 / 12
HOURS_PER_DAY = 24
THOUSAND = Decimal(1000)


class Demand(Struct, frozen=True, kw_only=True):
    """The load that the machines must serve: concurrent users, or a rate of interactions.

    It is stored in `size.json`, where `response_s` and `spare_machines` have shorter keys.

    Attributes:
        users: Concurrent users, or None if the demand is a rate.
        think_s: Time between a response and the next request of the same user.
        rate_per_s: Interactions per second, or None if the demand is in users.
        response_s: Mean response time that the user states, for a source that has none.
        spare_machines: How many machines may fail while the others still serve the demand.
        hours_per_day: How long the demand lasts. Machines are paid around the clock.
        machines_per_rack: Machines in a rack, or None if racks are not counted.
    """

    users: int | None = None
    think_s: float = 0.0
    rate_per_s: float | None = None
    response_s: float | None = msgspec.field(default=None, name="answer_s")
    spare_machines: int = msgspec.field(default=1, name="spare")
    hours_per_day: float = 24.0
    machines_per_rack: int | None = None


class Size(Struct, frozen=True, kw_only=True):
    """The machines that a demand needs from one source, and what they cost under one price.

    Attributes:
        source: The measured rate of the source.
        price: The price, or None without prices.
        gpus_per_machine: GPUs of one machine.
        machine_rate: Interactions per second that one machine serves.
        demand_per_s: Interactions per second of the demand.
        response_s: How long a response takes, or None if it is not known.
        interactions_per_month: Interactions per month.
        serving_machines: Machines that serve the demand, without spare ones. This and the following
            four fields are None for a price per token, which has no machines.
        machines: All machines, with spare ones.
        machines_low: All machines if one serves the rate at the upper end of its interval.
        machines_high: All machines if one serves the rate at the lower end of its interval.
        utilization: The demand as a fraction of the capacity of all machines.
        cost_per_month: Cost per month, or None without a price.
    """

    source: MeasuredRate
    price: Price | None
    gpus_per_machine: int
    machine_rate: Estimate[float]
    demand_per_s: float
    response_s: float | None
    interactions_per_month: Decimal
    serving_machines: int | None = None
    machines: int | None = None
    machines_low: int | None = None
    machines_high: int | None = None
    utilization: float | None = None
    cost_per_month: Estimate[Decimal] | None = None

    @property
    def cost_per_thousand(self) -> Estimate[Decimal] | None:
        """The cost of a thousand interactions, idle hours and spare machines included."""
        if self.cost_per_month is None:
            return None
        return self.cost_per_month.map(
            lambda amount: amount / self.interactions_per_month * THOUSAND
        )


def convert_published_rate(
    name: str,
    tokens_per_s: float | None,
    *,
    gpus: int,
    output_tokens: float,
    workload: str,
    publication: str,
) -> MeasuredRate:
    """Convert a published token rate to requests per second of a workload.

    Only rates of the Server scenario of MLPerf are usable, because it limits latency. The rate is
    divided by the mean output tokens of the workload. That is a rough estimate without an interval:
    the published load has other lengths and other latency limits.

    Args:
        name: The name of the published system.
        tokens_per_s: Its Server rate in output tokens per second, or None if it has none.
        gpus: The number of GPUs of the system.
        output_tokens: The mean output tokens of a request of the workload.
        workload: The name of the workload.
        publication: Where the rate was published.

    Raises:
        UserError: The system has no Server rate.
    """
    if tokens_per_s is None:
        raise UserError(
            "no_figure",
            f"{name} has no published Server rate, and an Offline rate has no latency limit",
            "published",
            "docs/evidence/published.md lists the systems",
        )
    return MeasuredRate(
        name=name,
        folder=publication,
        basis="published Server rate, by output tokens",
        rate=Estimate(mid=tokens_per_s / output_tokens),
        unit="requests",
        gpus=gpus,
        response_s=0.0,
        workload=workload,
    )


def size_machines(
    source: MeasuredRate,
    demand: Demand,
    *,
    gpus_per_machine: int,
    price: Price | None,
    evidence: Evidence | None,
) -> Size:
    """Compute how many machines a demand needs from one source, and what they cost per month.

    A price per token gives a cost but no machines, and machines without a price have no cost.

    Args:
        source: The measured or published rate.
        demand: The load that the machines must serve.
        gpus_per_machine: GPUs that are rented, and fail, as one machine.
        price: The price, or None to compute no cost.
        evidence: The measurements of the source, or None for a published rate.

    Raises:
        UserError: The demand is in users and the response time is not known, or the price is per
            token and the source has no token counts.
    """
    demand_rate = _compute_demand_rate(source, demand)
    active_fraction = to_decimal(demand.hours_per_day) / HOURS_PER_DAY
    interactions_per_hour = to_decimal(demand_rate.interactions_per_s) * SECONDS_PER_HOUR
    interactions_per_month = interactions_per_hour * HOURS_PER_MONTH * active_fraction
    size = Size(
        source=source,
        price=price,
        gpus_per_machine=gpus_per_machine,
        machine_rate=scale_rate(source.rate, gpus_per_machine / source.gpus),
        demand_per_s=demand_rate.interactions_per_s,
        response_s=demand_rate.response_s,
        interactions_per_month=interactions_per_month,
    )
    if price is None:
        return _with_machine_counts(size, demand.spare_machines)

    interaction_cost = _compute_usage_cost_per_interaction(price, evidence, source)
    usage_cost = interaction_cost * interactions_per_month
    if isinstance(price, PerToken):
        return replace(size, cost_per_month=Estimate(mid=usage_cost))

    size = _with_machine_counts(size, demand.spare_machines)
    cost = _estimate_cost_per_month(size, price, active_fraction, usage_cost)
    return replace(size, cost_per_month=cost)


class _DemandRate(NamedTuple):
    """A demand in interactions per second, and the response time, which may not be known."""

    interactions_per_s: float
    response_s: float | None


def _compute_demand_rate(source: MeasuredRate, demand: Demand) -> _DemandRate:
    """Return the demand as a rate, with the response time of the source or of `--answer`.

    The rate of a number of users follows from the response time: a user who waits longer asks less
    often. A demand that is already a rate needs no response time.

    Raises:
        UserError: The demand is in users and the response time is not known.
    """
    # A source without a response time has 0.
    response_s = source.response_s or demand.response_s
    if demand.rate_per_s:
        return _DemandRate(demand.rate_per_s, response_s)

    if not response_s:
        raise UserError(
            "no_figure",
            f"{source.name} has no response time, which users wait for",
            "--answer",
            "--answer 20s, or --rate instead of --users",
        )

    users = demand.users or 0
    return _DemandRate(compute_interactions_per_s(users, demand.think_s, response_s), response_s)


def _with_machine_counts(size: Size, spare_machines: int) -> Size:
    """Return a copy of the size with its numbers of machines and their interval filled in.

    The faster one machine is, the fewer are needed. So the upper end of the rate gives the lower
    end of the number of machines.
    """
    rate = size.machine_rate
    serving_machines = count_needed_machines(size.demand_per_s, rate.mid)
    machines = serving_machines + spare_machines

    machines_low = None
    if rate.high is not None:
        machines_low = count_needed_machines(size.demand_per_s, rate.high) + spare_machines

    machines_high = None
    if rate.low is not None:
        machines_high = count_needed_machines(size.demand_per_s, rate.low) + spare_machines

    return replace(
        size,
        serving_machines=serving_machines,
        machines=machines,
        machines_low=machines_low,
        machines_high=machines_high,
        utilization=size.demand_per_s / (machines * rate.mid),
    )


class _MonthlyCostModel(NamedTuple):
    """Computes the cost of a month from the number of machines and the rate that one can serve.

    Attributes:
        demand_per_s: Interactions per second while the demand lasts.
        active_fraction: The fraction of the month in which the demand lasts.
        cost_per_machine_hour: What a machine costs per hour, whether it is used or not.
        full_load_energy_per_hour: What the energy costs per hour that full load adds to a machine.
        usage_cost_per_month: What the interactions of a month cost in addition, such as egress.
    """

    demand_per_s: float
    active_fraction: Decimal
    cost_per_machine_hour: Decimal
    full_load_energy_per_hour: Decimal
    usage_cost_per_month: Decimal

    def compute_cost(self, machines: int, machine_rate_per_s: float) -> Decimal:
        """Return the cost of a month.

        All machines are paid at all hours. The energy that load adds follows the demand, not the
        number of machines: a demand of 25/s on machines that can serve 10/s each adds as much as
        2.5 fully loaded machines, even if it is spread over four.

        Args:
            machines: The number of machines that are paid for, with spare ones.
            machine_rate_per_s: Interactions per second that one machine can serve.
        """
        fully_loaded_machines = to_decimal(self.demand_per_s / machine_rate_per_s)
        mean_fully_loaded_machines = fully_loaded_machines * self.active_fraction
        machine_cost_per_hour = machines * self.cost_per_machine_hour
        energy_cost_per_hour = mean_fully_loaded_machines * self.full_load_energy_per_hour
        cost_per_hour = machine_cost_per_hour + energy_cost_per_hour
        return cost_per_hour * HOURS_PER_MONTH + self.usage_cost_per_month


def _estimate_cost_per_month(
    size: Size, price: Rented | Owned, active_fraction: Decimal, usage_cost: Decimal
) -> Estimate[Decimal]:
    """Return the cost per month of machines that are paid by the hour, with its interval.

    The interval follows from that of the measured rate. If a machine is faster than measured, fewer
    machines serve the demand, so the upper end of the rate gives the lower end of the cost.

    Args:
        size: The machines. Their numbers are known.
        price: The price of one machine, or of one GPU.
        active_fraction: The fraction of the time in which the demand lasts.
        usage_cost: What all interactions of a month cost in addition to machines, such as egress.
    """
    assert size.machines is not None, "`_with_machine_counts` counted the machines"

    # If the price does not say how many GPUs a machine has, its hourly cost and its energy are for
    # one GPU, and a machine costs that for each of its GPUs.
    is_price_per_gpu = price.gpus is None
    price_multiple = size.gpus_per_machine if is_price_per_gpu else 1
    model = _MonthlyCostModel(
        demand_per_s=size.demand_per_s,
        active_fraction=active_fraction,
        cost_per_machine_hour=compute_hourly_cost(price) * price_multiple,
        full_load_energy_per_hour=compute_load_energy_cost_per_hour(price.energy) * price_multiple,
        usage_cost_per_month=usage_cost,
    )
    rate = size.machine_rate

    cost_of_fast_machines = None
    if size.machines_low is not None and rate.high is not None:
        cost_of_fast_machines = model.compute_cost(size.machines_low, rate.high)

    cost_of_slow_machines = None
    if size.machines_high is not None and rate.low is not None:
        cost_of_slow_machines = model.compute_cost(size.machines_high, rate.low)

    return Estimate(
        mid=model.compute_cost(size.machines, rate.mid),
        low=cost_of_fast_machines,
        high=cost_of_slow_machines,
    )


def _compute_usage_cost_per_interaction(
    price: Price, evidence: Evidence | None, source: MeasuredRate
) -> Decimal:
    """Return what an interaction costs by count: the tokens of an API, and egress.

    An interaction is what the demand counts: a task, a single request or a conversation. What is
    paid by time, which are machines and their energy, is left out. A published rate has no measured
    bytes, so its machines have no such cost.

    Raises:
        UserError: The price is per token and the source is a published rate, without any tokens.
    """
    if evidence is None:
        _refuse_token_price(price, source)
        return Decimal(0)

    basis = compute_basis_for_price(evidence, price)
    priced_unit = REQUEST if find_task_sessions(evidence.summary) is None else TASK
    unit_cost = compute_unit_cost(basis, price, source.gpus, priced_unit)
    if unit_cost is None:
        return Decimal(0)

    usage_amounts = [
        amount for part, amount in unit_cost.parts.items() if part not in PARTS_BY_TIME
    ]
    return _count_units_per_interaction(evidence) * sum(usage_amounts, Decimal(0))


def _refuse_token_price(price: Price, source: MeasuredRate) -> None:
    """Raise UserError for a price per token: a published rate has no tokens to price."""
    if isinstance(price, PerToken):
        raise UserError(
            "unsupported",
            f"{price.name} is a price per token, and {source.name} has no token counts",
            "--price",
            "use a price of machines, or a folder of a run",
        )


def _count_units_per_interaction(evidence: Evidence) -> Decimal:
    """Return how many priced units, which are tasks or requests, an interaction consists of.

    It is 1 for tasks and for single requests. In a mix of conversations and single requests, whose
    cost is per request, it is the mean number of requests of an interaction.
    """
    summary = evidence.summary
    if summary.sessions is None or find_task_sessions(summary) is not None:
        return Decimal(1)
    return Decimal(summary.requests.decided) / count_interactions(summary)
