"""How many machines some users (or requests per second) need, one to spare, and what they cost a month.

Pure. What one machine carries is a `MeasuredRate`; the scaling of rates is `capacity_planning`'s, the hourly price and
the parts of a cost are `unit_cost`'s.
"""

from __future__ import annotations

from decimal import Decimal

from loadgen_sdk.price_file import PerToken
from msgspec import Struct
from msgspec.structs import replace

from loadgen.core.errors import UserError
from loadgen.cost.capacity_planning import MeasuredRate, demand, needed, scaled
from loadgen.pricing.cost_basis import tasks_of
from loadgen.pricing.estimate import Estimate
from loadgen.pricing.evidence import Evidence, count_arrivals
from loadgen.pricing.machine_cost import hourly_cost_parts, load_energy_cost_per_hour
from loadgen.pricing.priced_result import compute_basis_for_price
from loadgen.pricing.prices import Price
from loadgen.pricing.unit_cost import compute_unit_cost
from loadgen.pricing.units import PARTS_BY_TIME, REQUEST, SECONDS_PER_HOUR, TASK, to_decimal

HOURS_PER_MONTH = Decimal(730)  # 8,760 / 12
THOUSAND = Decimal(1000)


class Need(Struct, frozen=True, kw_only=True):
    """What is to be carried: users who think between their interactions, or a rate of interactions.

    `hours_per_day`: how long this load is there; machines are paid around the clock.
    """

    users: int | None = None
    think_s: float = 0.0
    rate_per_s: float | None = None
    answer_s: float | None = None  # where the source does not say how long an answer takes
    spare: int = 1  # machines that may be lost while all is still carried
    hours_per_day: float = 24.0
    machines_per_rack: int | None = None  # None: racks are not counted


class Size(Struct, frozen=True, kw_only=True):
    """The machines of one source under one price. Machines are whole; `machines` has the spare ones in it.

    Of an endpoint that is paid by the token there are no machines: None.
    """

    source: MeasuredRate
    price: Price | None
    gpus_per_machine: int
    per_machine: Estimate[float]  # interactions per second
    demand_per_s: float
    response_s: float | None
    carrying: int | None = None  # machines that the load needs
    machines: int | None = None
    low: int | None = None  # machines, spare ones too, at the ends of the rate's interval
    high: int | None = None
    used: float | None = None  # the demand as a share of what all machines carry
    per_month: Estimate[Decimal] | None = None
    interactions_per_month: Decimal = Decimal(0)

    @property
    def per_thousand(self) -> Estimate[Decimal] | None:
        """What a thousand interactions cost: idle hours and spare machines are paid by them too."""
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
    said_by: str,
) -> MeasuredRate:
    """A published Server rate in output tokens per second, as interactions of a workload by their output tokens.

    An estimate: another mix of lengths, other limits, no interval. Raises UserError where there is no such rate.
    """
    if tokens_per_s is None:
        what = f"{name} has no published Server rate, and an Offline rate says nothing about users"
        raise UserError("no_figure", what, "published", "docs/published.md lists them")
    return MeasuredRate(
        name=name,
        folder=said_by,
        basis="published Server rate, by output tokens",
        rate=Estimate(mid=tokens_per_s / output_tokens),
        noun="requests",
        gpus=gpus,
        response_s=0.0,
        workload=workload,
    )


def size(
    source: MeasuredRate,
    need: Need,
    *,
    gpus_per_machine: int,
    price: Price | None,
    evidence: Evidence | None,
) -> Size:
    """The machines for a need. Raises UserError where the length of an answer is not known and users are asked for."""
    response_s = source.response_s or need.answer_s
    if need.users is not None and not response_s:
        what = f"how long an answer takes is not known of {source.name}, and users wait for it"
        raise UserError(
            "no_figure", what, "--answer", "--answer 20s, or --rate in the place of --users"
        )
    demand_per_s = need.rate_per_s or demand(need.users or 0, need.think_s, response_s or 0.0)
    per_machine = scaled(source.rate, gpus_per_machine / source.gpus)
    active = to_decimal(need.hours_per_day) / 24
    per_month = (
        to_decimal(demand_per_s) * SECONDS_PER_HOUR * HOURS_PER_MONTH * active
    )  # interactions
    sized = Size(
        source=source,
        price=price,
        gpus_per_machine=gpus_per_machine,
        per_machine=per_machine,
        demand_per_s=demand_per_s,
        response_s=response_s,
        interactions_per_month=per_month,
    )
    by_count = Decimal(0) if price is None else _by_count(price, evidence, source) * per_month
    if isinstance(price, PerToken):
        return replace(sized, per_month=Estimate(mid=by_count))

    def machines(rate: float | None) -> int | None:
        return None if rate is None else needed(demand_per_s, rate) + need.spare

    mid, low, high = (
        machines(rate) for rate in (per_machine.mid, per_machine.high, per_machine.low)
    )
    assert mid is not None  # the rate is known
    used = demand_per_s / (mid * per_machine.mid)
    sized = replace(sized, carrying=mid - need.spare, machines=mid, low=low, high=high, used=used)
    if price is None:
        return sized
    units = 1 if price.gpus is not None else gpus_per_machine  # else the price is one GPU's
    per_hour, by_load = (
        sum(hourly_cost_parts(price).values(), Decimal(0)) * units,
        load_energy_cost_per_hour(price.energy) * units,
    )

    def month(count: int | None, rate: float | None) -> Decimal | None:
        if count is None or rate is None:
            return None
        return (
            count * per_hour + to_decimal(demand_per_s / rate) * active * by_load
        ) * HOURS_PER_MONTH + by_count

    middle = month(mid, per_machine.mid)
    assert middle is not None
    ends = {"low": month(low, per_machine.high), "high": month(high, per_machine.low)}
    return replace(sized, per_month=Estimate(mid=middle, **ends))


def _by_count(price: Price, evidence: Evidence | None, source: MeasuredRate) -> Decimal:
    """What an interaction costs whatever the machines do: tokens of an API, egress."""
    if evidence is None:
        if isinstance(price, PerToken):
            what = f"{price.name} is paid by the token, and {source.name} is no run whose tokens could be counted"
            raise UserError(
                "unsupported", what, "--price", "a price of machines, or a folder of a run"
            )
        return Decimal(0)
    summary, unit, each = evidence.summary, REQUEST, Decimal(1)
    if tasks_of(summary) is not None:
        unit = TASK
    elif summary.sessions is not None:  # an interaction is a request or a conversation of several
        each = Decimal(summary.requests.decided) / count_arrivals(summary)
    found = compute_unit_cost(compute_basis_for_price(evidence, price), price, source.gpus, unit)
    if found is None:
        return Decimal(0)
    return each * sum((found.parts[p] for p in found.parts if p not in PARTS_BY_TIME), Decimal(0))
