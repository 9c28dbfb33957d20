"""Computes how many machines a number of users needs, with spare ones, and what they cost a month.

Pure. `capacity_planning` scales rates, and `loadgen.pricing` computes the hourly cost of a machine.
"""

from __future__ import annotations

from decimal import Decimal

from loadgen_sdk.price_file import PerToken
from msgspec import Struct
from msgspec.structs import replace

from loadgen.core.errors import UserError
from loadgen.cost.capacity_planning import (
    MeasuredRate,
    interactions_per_s,
    machines_needed,
    scale_rate,
)
from loadgen.pricing.cost_basis import tasks_of
from loadgen.pricing.estimate import Estimate
from loadgen.pricing.evidence import Evidence, count_interactions
from loadgen.pricing.machine_cost import hourly_cost, load_energy_cost_per_hour
from loadgen.pricing.priced_result import compute_basis_for_price
from loadgen.pricing.prices import Owned, Price, Rented
from loadgen.pricing.unit_cost import compute_unit_cost
from loadgen.pricing.units import PARTS_BY_TIME, REQUEST, SECONDS_PER_HOUR, TASK, to_decimal

HOURS_PER_MONTH = Decimal(730)  # 8,760 / 12
HOURS_PER_DAY = 24
THOUSAND = Decimal(1000)


class Need(Struct, frozen=True, kw_only=True):
    """The demand: users who think between their interactions, or a rate of interactions.

    The field names are keys of `size.json`.

    Attributes:
        users: Concurrent users, or None for a rate.
        think_s: Time between a response and the next request of a user.
        rate_per_s: Interactions per second, or None for users.
        answer_s: How long a response takes, if the source does not say.
        spare: How many machines may fail while the others still serve the demand.
        hours_per_day: How long the demand lasts. Machines are paid around the clock.
        machines_per_rack: Machines in a rack, or None if racks are not counted.
    """

    users: int | None = None
    think_s: float = 0.0
    rate_per_s: float | None = None
    answer_s: float | None = None
    spare: int = 1
    hours_per_day: float = 24.0
    machines_per_rack: int | None = None


class Size(Struct, frozen=True, kw_only=True):
    """The machines that a demand needs from one source, and what they cost under one price.

    The field names are keys of `size.json`.

    Attributes:
        source: The measured rate of the source.
        price: The price, or None without prices.
        gpus_per_machine: GPUs of one machine.
        per_machine: Interactions per second that one machine serves.
        demand_per_s: Interactions per second of the demand.
        response_s: How long a response takes, or None if it is not known.
        carrying: Machines that serve the demand, without spare ones. This and the following fields
            are None for a price per token.
        machines: All machines, with spare ones.
        low: All machines at the upper end of the interval of the rate.
        high: All machines at the lower end of the interval of the rate.
        used: The demand as a fraction of the capacity of all machines.
        per_month: Cost per month, or None without a price.
        interactions_per_month: Interactions per month.
    """

    source: MeasuredRate
    price: Price | None
    gpus_per_machine: int
    per_machine: Estimate[float]
    demand_per_s: float
    response_s: float | None
    carrying: int | None = None
    machines: int | None = None
    low: int | None = None
    high: int | None = None
    used: float | None = None
    per_month: Estimate[Decimal] | None = None
    interactions_per_month: Decimal = Decimal(0)

    @property
    def per_thousand(self) -> Estimate[Decimal] | None:
        """The cost of a thousand interactions, idle hours and spare machines included."""
        if self.per_month is None:
            return None
        return self.per_month.map(lambda amount: amount / self.interactions_per_month * THOUSAND)


def published_rate(
    name: str,
    tokens_per_s: float | None,
    *,
    gpus: int,
    output_tokens: float,
    workload: str,
    publication: str,
) -> MeasuredRate:
    """Return a published Server rate as interactions of a workload, by their output tokens.

    The result is an estimate: the published load has other lengths and limits, and no interval.

    Args:
        name: The name of the published system.
        tokens_per_s: The published rate in output tokens per second, or None if there is none.
        gpus: The number of GPUs of the system.
        output_tokens: The mean output tokens of the workload.
        workload: The name of the workload.
        publication: Where the rate was published.

    Raises:
        UserError: There is no Server rate.
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
        noun="requests",
        gpus=gpus,
        response_s=0.0,
        workload=workload,
    )


def size_machines(
    source: MeasuredRate,
    need: Need,
    *,
    gpus_per_machine: int,
    price: Price | None,
    evidence: Evidence | None,
) -> Size:
    """Return the machines that a demand needs from one source, and what they cost.

    Args:
        source: The measured or published rate.
        need: The demand.
        gpus_per_machine: GPUs that are rented, and fail, as one machine.
        price: The price, or None to compute no cost.
        evidence: The measurements of the source, or None for a published rate.

    Raises:
        UserError: The demand is in users and the length of a response is not known.
    """
    demand_per_s, response_s = _demand(source, need)
    active_fraction = to_decimal(need.hours_per_day) / HOURS_PER_DAY
    interactions_per_hour = to_decimal(demand_per_s) * SECONDS_PER_HOUR
    interactions_per_month = interactions_per_hour * HOURS_PER_MONTH * active_fraction
    size = Size(
        source=source,
        price=price,
        gpus_per_machine=gpus_per_machine,
        per_machine=scale_rate(source.rate, gpus_per_machine / source.gpus),
        demand_per_s=demand_per_s,
        response_s=response_s,
        interactions_per_month=interactions_per_month,
    )
    usage_cost = Decimal(0)
    if price is not None:
        usage_cost_per_interaction = _usage_cost_per_interaction(price, evidence, source)
        usage_cost = usage_cost_per_interaction * interactions_per_month
    if isinstance(price, PerToken):
        return replace(size, per_month=Estimate(mid=usage_cost))
    size = _with_machine_counts(size, need.spare)
    if price is None:
        return size
    return replace(size, per_month=_machine_cost(size, price, active_fraction, usage_cost))


def _demand(source: MeasuredRate, need: Need) -> tuple[float, float | None]:
    """Return the interactions per second, and how long a response takes if it is known.

    A demand in users depends on the response time: a user who waits longer asks less often. The
    user's `--answer` replaces a response time that the source does not have.

    Raises:
        UserError: The demand is in users and the response time is not known.
    """
    response_s = source.response_s or need.answer_s
    if need.rate_per_s:
        return need.rate_per_s, response_s
    if not response_s:
        raise UserError(
            "no_figure",
            f"{source.name} has no response time, which users wait for",
            "--answer",
            "--answer 20s, or --rate instead of --users",
        )
    return interactions_per_s(need.users or 0, need.think_s, response_s), response_s


def _with_machine_counts(size: Size, spare: int) -> Size:
    """Return the size with the machines for the demand and the spare ones, and their interval.

    The faster one machine is, the fewer are needed. So the upper end of the rate gives the lower
    end of the number of machines.
    """
    rate = size.per_machine
    serving = machines_needed(size.demand_per_s, rate.mid)
    machines = serving + spare
    low = None
    high = None
    if rate.high is not None:
        low = machines_needed(size.demand_per_s, rate.high) + spare
    if rate.low is not None:
        high = machines_needed(size.demand_per_s, rate.low) + spare
    return replace(
        size,
        carrying=serving,
        machines=machines,
        low=low,
        high=high,
        used=size.demand_per_s / (machines * rate.mid),
    )


def _machine_cost(
    size: Size, price: Rented | Owned, active_fraction: Decimal, usage_cost: Decimal
) -> Estimate[Decimal]:
    """Return the cost per month of the machines and of the interactions, with its interval.

    Machines are paid around the clock. The energy that load adds is paid in proportion to the load,
    which is counted in fully loaded machines: 2.5 means the energy of two and a half of them.

    Args:
        size: The machines. Their numbers are known.
        price: The price of one machine, or of one GPU.
        active_fraction: The fraction of the time in which the demand lasts.
        usage_cost: What all interactions of a month cost beside the time of machines.
    """
    # A price that does not say how many GPUs a machine has is the price of one GPU.
    priced_units = 1 if price.gpus is not None else size.gpus_per_machine
    per_hour = hourly_cost(price) * priced_units
    load_energy = load_energy_cost_per_hour(price.energy) * priced_units

    def cost_per_month(machines: int, machine_rate_per_s: float) -> Decimal:
        loaded_machines = to_decimal(size.demand_per_s / machine_rate_per_s) * active_fraction
        per_hour_with_load = machines * per_hour + loaded_machines * load_energy
        return per_hour_with_load * HOURS_PER_MONTH + usage_cost

    assert size.machines is not None
    rate = size.per_machine
    low = None if size.low is None or rate.high is None else cost_per_month(size.low, rate.high)
    high = None if size.high is None or rate.low is None else cost_per_month(size.high, rate.low)
    return Estimate(mid=cost_per_month(size.machines, rate.mid), low=low, high=high)


def _usage_cost_per_interaction(
    price: Price, evidence: Evidence | None, source: MeasuredRate
) -> Decimal:
    """Return what an interaction costs beside the time of machines: tokens of an API, and egress.

    An interaction is what the demand counts: a task, a single request or a conversation.

    Raises:
        UserError: The price is per token and the source is a published rate, without any tokens.
    """
    if evidence is None:
        _check_price_of_published(price, source)
        return Decimal(0)
    basis = compute_basis_for_price(evidence, price)
    unit = TASK if tasks_of(evidence.summary) is not None else REQUEST
    unit_cost = compute_unit_cost(basis, price, source.gpus, unit)
    if unit_cost is None:
        return Decimal(0)
    usage_amounts = [
        amount for part, amount in unit_cost.parts.items() if part not in PARTS_BY_TIME
    ]
    return _units_per_interaction(evidence) * sum(usage_amounts, Decimal(0))


def _check_price_of_published(price: Price, source: MeasuredRate) -> None:
    """Raise UserError for a price per token: a published rate has no tokens to price."""
    if isinstance(price, PerToken):
        raise UserError(
            "unsupported",
            f"{price.name} is a price per token, and {source.name} has no token counts",
            "--price",
            "use a price of machines, or a folder of a run",
        )


def _units_per_interaction(evidence: Evidence) -> Decimal:
    """Return how many priced units, which are tasks or requests, an interaction consists of.

    It is 1 for tasks and for single requests. In a mix of conversations and single requests, whose
    cost is per request, it is the mean number of requests of an interaction.
    """
    summary = evidence.summary
    if summary.sessions is None or tasks_of(summary) is not None:
        return Decimal(1)
    return Decimal(summary.requests.decided) / count_interactions(summary)
