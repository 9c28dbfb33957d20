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
from loadgen.pricing.machine_cost import (
    compute_hourly_cost,
    compute_load_energy_cost_per_hour,
    count_paid_machines,
)
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
    """Return what one unit costs, such as a request, or None if no unit was measured.

    Tokens and egress are paid by count. Machines and the energy that load adds are paid by the
    hour, so a unit costs an hour divided by the units of an hour. Only the cost of the machines is
    divided by the utilization, because energy, tokens and egress are not paid for idle time.

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
        token_parts = _price_tokens_by_prompt_length(basis, price)
        amounts = {part: amount / count for part, amount in token_parts.items()}
    else:
        units_per_s = basis.rates[unit]
        if not units_per_s or gpus is None:
            return None

        machines = count_paid_machines(price, gpus) * machine_share
        units_per_hour = SECONDS_PER_HOUR * units_per_s
        amounts[MACHINES] = compute_hourly_cost(price) * machines / units_per_hour / utilization

        load_energy = compute_load_energy_cost_per_hour(price.energy)
        if load_energy:
            amounts[ENERGY] = load_energy * machines / units_per_hour

    if price.egress_per_gb is not None:
        amounts[EGRESS] = basis.bytes_out * price.egress_per_gb / GIGA / count

    return _round_with_interval(amounts, basis)


def _round_with_interval(amounts: Mapping[str, Decimal], basis: CostBasis) -> UnitCost:
    """Round the parts of a unit's cost and return them with their total and its interval.

    There are two kinds of parts:

    - Machines and energy are paid by time, so what a unit costs depends on the measured rate: if
      only 0.9 times as many units are served per hour, each costs 1/0.9 times as much.
    - Tokens and egress are paid by count. They were counted, so this cost has no interval.

    Args:
        amounts: The cost of one unit by part, not yet rounded.
        basis: The measured quantities, of which the interval of the rate is used.
    """
    parts = {part: round_amount(amounts[part]) for part in PARTS if part in amounts}
    total = sum(parts.values(), Decimal(0))
    cost_by_time = sum((parts[part] for part in PARTS_BY_TIME if part in parts), Decimal(0))
    cost_by_count = total - cost_by_time
    if not cost_by_time:
        # Nothing depends on the rate, so the interval of the cost is a single point.
        return UnitCost(parts=parts, total=total, low=total, high=total)
    if basis.relative_low is None or basis.relative_high is None:
        return UnitCost(parts=parts, total=total, low=None, high=None)

    # A higher rate means a lower cost, so each end of the cost follows from the other end of the
    # rate.
    cost_at_highest_rate = cost_by_time / basis.relative_high + cost_by_count
    cost_at_lowest_rate = cost_by_time / basis.relative_low + cost_by_count
    return UnitCost(
        parts=parts,
        total=total,
        low=round_amount(cost_at_highest_rate),
        high=round_amount(cost_at_lowest_rate),
    )


def round_amount(amount: Decimal) -> Decimal:
    """Return the amount rounded to 1e-12 of the currency."""
    return amount.quantize(SMALLEST_AMOUNT, rounding=ROUND_HALF_EVEN)


def _price_tokens_by_prompt_length(basis: CostBasis, price: PerToken) -> dict[str, Decimal]:
    """Return what all measured tokens cost, by part of the cost.

    If the price changes above a prompt length, requests with longer prompts are priced separately
    and both costs are added. Otherwise all tokens have one price.
    """
    all_tokens = TokenAmounts(
        uncached=basis.uncached_input_tokens,
        cache_written=basis.cache_written_tokens,
        cached=basis.cached_tokens,
        output=basis.output_tokens,
    )
    long_prompt_tokens = basis.long_prompt_tokens
    if price.long_prompt_price is None or long_prompt_tokens is None:
        return compute_token_parts(price, all_tokens)

    parts = compute_token_parts(price, all_tokens.without(long_prompt_tokens))
    for part, amount in compute_token_parts(price.long_prompt_price, long_prompt_tokens).items():
        parts[part] = parts.get(part, Decimal(0)) + amount

    return parts


def compute_token_parts(price: PerToken, tokens: TokenAmounts) -> dict[str, Decimal]:
    """Return what tokens cost, by part of the cost. Parts without a price are left out.

    A provider may charge another price for prompt tokens that it writes to a cache. If the price
    does, but the server does not report how many tokens were written, all prompt tokens that did
    not come from the cache are priced as written, because that is the most that they can cost.
    """
    has_cache_write_price = price.per_million_cache_write is not None
    is_all_priced_as_written = has_cache_write_price and tokens.cache_written is None

    priced_as_written = Decimal(0)
    if is_all_priced_as_written:
        priced_as_written = tokens.uncached
    elif has_cache_write_price and tokens.cache_written is not None:
        priced_as_written = tokens.cache_written

    # The tokens that were written are among the uncached ones, and each token is paid only once.
    priced_as_plain = tokens.uncached - priced_as_written
    priced_tokens = ByTokenKind(
        plain=priced_as_plain,
        written=priced_as_written,
        cached=tokens.cached,
        output=tokens.output,
    )
    costs = token_costs(priced_tokens, price.per_million)

    parts: dict[str, Decimal] = {}
    if not is_all_priced_as_written:
        parts[INPUT] = costs.plain

    if has_cache_write_price:
        parts[CACHE_WRITE] = costs.written

    if tokens.cached and price.per_million_cached is not None:
        parts[CACHED] = costs.cached

    parts[OUTPUT_TOKENS] = costs.output
    return parts
