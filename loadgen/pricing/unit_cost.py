"""Computes what one unit costs: a request, a good request, a task, or a million tokens. Pure.

Amounts are `decimal.Decimal`. Each part is rounded once, to 1e-12 of the currency, and the total
is the sum of the rounded parts. docs/reference/costs.md has the formulas and their limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Decimal

import msgspec
from loadgen_sdk.price_file import PerToken
from loadgen_sdk.prices import ByTokenKind, token_costs

from loadgen.pricing.cost_basis import CostBasis
from loadgen.pricing.machine_cost import hourly_cost, load_energy_cost_per_hour, machines_paid
from loadgen.pricing.prices import Price
from loadgen.pricing.prompt_lengths import TokenAmounts
from loadgen.pricing.units import (
    CACHE_WRITE,
    CACHED,
    EGRESS,
    ENERGY,
    GIGA,
    INPUT,
    MACHINES,
    OUTPUT_TOKENS,
    PARTS,
    PARTS_BY_TIME,
    SECONDS_PER_HOUR,
)

SMALLEST_AMOUNT = Decimal("1e-12")


class UnitCost(msgspec.Struct, frozen=True, kw_only=True):
    """An amount of money per unit.

    Attributes:
        parts: The parts of the cost, by the names in `units.PARTS`.
        total: Exactly the sum of the parts.
        low: Lower end of the interval. It follows from the interval of the rate, is None if the
            rate has no interval, and equals the total if the cost does not depend on a rate.
        high: Upper end of the interval, like `low`.
    """

    parts: Mapping[str, Decimal]
    total: Decimal
    low: Decimal | None
    high: Decimal | None


def compute_unit_cost(
    basis: CostBasis,
    price: Price,
    gpus: int | None,
    unit: str,
    utilization: Decimal = Decimal(1),
    machine_share: Decimal = Decimal(1),
) -> UnitCost | None:
    """Return what one unit costs, or None if no unit was measured.

    Only the cost of the machines is divided by the utilization, because energy, tokens and egress
    are not paid for idle time.

    Args:
        basis: The measured quantities.
        price: The price of the machines or of the tokens.
        gpus: The number of GPUs that the run used, or None if it is not known.
        unit: One of `units.UNITS`.
        utilization: The fraction of the paid time in which the machines serve the measured load.
        machine_share: The fraction of the machines that the units use, for the units of one class.
    """
    count = basis.counts[unit]
    if not count:
        return None
    amounts: dict[str, Decimal] = {}
    if isinstance(price, PerToken):
        amounts = {part: amount / count for part, amount in _token_parts(basis, price).items()}
    else:
        # Machines are paid by the hour, so a unit costs an hour divided by the units of an hour.
        rate = basis.rates[unit]
        if not rate or gpus is None:
            return None
        machines = machines_paid(price, gpus) * machine_share
        units_per_hour = SECONDS_PER_HOUR * rate
        amounts[MACHINES] = hourly_cost(price) * machines / units_per_hour / utilization
        load_energy = load_energy_cost_per_hour(price.energy)
        if load_energy:
            amounts[ENERGY] = load_energy * machines / units_per_hour
    if price.egress_per_gb is not None:
        amounts[EGRESS] = basis.bytes_out * price.egress_per_gb / GIGA / count
    return _with_interval(amounts, basis)


def _with_interval(amounts: Mapping[str, Decimal], basis: CostBasis) -> UnitCost:
    """Return the rounded parts with their total and the interval that follows from the rate's.

    Only parts that are paid by time depend on the rate: at 0.9 times the rate they cost 1/0.9 times
    as much. So the upper end of the rate gives the lower end of the cost. Parts that were counted,
    such as tokens, have no interval.
    """
    parts = {part: round_amount(amounts[part]) for part in PARTS if part in amounts}
    by_time = sum((parts[part] for part in PARTS_BY_TIME if part in parts), Decimal(0))
    by_count = sum(parts.values(), Decimal(0)) - by_time
    total = by_time + by_count
    if not by_time:
        return UnitCost(parts=parts, total=total, low=by_count, high=by_count)
    if basis.low is None or basis.high is None:
        return UnitCost(parts=parts, total=total, low=None, high=None)
    return UnitCost(
        parts=parts,
        total=total,
        low=round_amount(by_time / basis.high + by_count),
        high=round_amount(by_time / basis.low + by_count),
    )


def round_amount(amount: Decimal) -> Decimal:
    """Return the amount rounded to 1e-12 of the currency."""
    return amount.quantize(SMALLEST_AMOUNT, rounding=ROUND_HALF_EVEN)


def _token_parts(basis: CostBasis, price: PerToken) -> dict[str, Decimal]:
    """Return what the tokens of a basis cost, by part, each prompt at the price for its length.

    If the price changes above a length, requests with longer prompts are priced separately. Without
    such a length, or without the tokens of long prompts, all tokens have one price.
    """
    tokens = TokenAmounts(
        fresh=basis.input_tokens,
        written=basis.written_tokens,
        cached=basis.cached_tokens,
        output=basis.output_tokens,
    )
    if price.above is None or basis.long_prompts is None:
        return compute_token_parts(price, tokens)
    short_parts = compute_token_parts(price, tokens.without(basis.long_prompts))
    long_parts = compute_token_parts(price.above, basis.long_prompts)
    return {
        part: short_parts.get(part, Decimal(0)) + long_parts.get(part, Decimal(0))
        for part in (*short_parts, *long_parts)
    }


def compute_token_parts(price: PerToken, tokens: TokenAmounts) -> dict[str, Decimal]:
    """Return what the tokens cost, by part. A part without a price of its own is left out.

    If the server does not say how many tokens were written to its cache, and writing has a price,
    all prompt tokens that did not come from the cache are priced as written.
    """
    has_write_price = price.per_million_cache_write is not None
    written = Decimal(0)
    if has_write_price:
        written = tokens.fresh if tokens.written is None else tokens.written
    # Tokens that were written to a cache are among the fresh ones, and each is paid only once.
    amounts = ByTokenKind(tokens.fresh - written, written, tokens.cached, tokens.output)
    costs = token_costs(amounts, price.per_million)
    parts: dict[str, Decimal] = {}
    if not has_write_price or tokens.written is not None:
        parts[INPUT] = costs.plain
    if has_write_price:
        parts[CACHE_WRITE] = costs.written
    if tokens.cached and price.per_million_cached is not None:
        parts[CACHED] = costs.cached
    parts[OUTPUT_TOKENS] = costs.output
    return parts
