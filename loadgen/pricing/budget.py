"""Forecasts what a run costs, adds up what runs have cost, and enforces `--max-cost`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from loadgen_sdk.price_file import PerToken
from msgspec import Struct

from loadgen.core.errors import UserError
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.schedule.forecast import Forecast
from loadgen.pricing.cost_basis import CostBasis
from loadgen.pricing.prices import Owned, Price, Prices, Rented, find_prices
from loadgen.pricing.unit_cost import compute_unit_cost
from loadgen.pricing.units import REQUEST, to_decimal


class Budget(Struct):
    """The money of a command, over all its runs.

    Attributes:
        prices: The prices that costs are computed from.
        limit: The most that the command may cost, or None for no limit.
        spent: What the runs so far have cost.
    """

    prices: Prices
    limit: Decimal | None = None
    spent: Decimal = Decimal(0)

    def format_amount(self, amount: Decimal) -> str:
        """Return an amount with its currency, such as "12.50 USD"."""
        return f"{amount:,.2f} {self.prices.currency}"

    def check_limit(self, cost: Decimal, subject: str = "this run") -> None:
        """Check that the limit allows another cost.

        Args:
            cost: The cost of one run or of several runs together.
            subject: What the cost is for, as the error message names it.

        Raises:
            UserError: The cost would exceed the limit.
        """
        if self.limit is None or self.spent + cost <= self.limit:
            return

        so_far = f" (spent so far: {self.format_amount(self.spent)})" if self.spent else ""
        raise UserError(
            "over_budget",
            f"{subject} would cost about {self.format_amount(cost)}{so_far}",
            f"--max-cost {self.limit}",
            "use a shorter or lower load, or raise the limit",
        )

    def forecast_cost(self, load: Forecast, targets: Sequence[TargetFacts]) -> Decimal | None:
        """Return what a load is expected to cost, before it is sent.

        If several prices apply, which differ only in commitment, the highest cost counts.

        Args:
            load: The expected length, requests and tokens of the load.
            targets: The servers that the load is sent to. The first one decides the price.

        Returns:
            The cost, or None if it cannot be known: the length of the load is open, or the number
            of its requests is and the price is per token.

        Raises:
            UserError: No price is found, or the price is by the hour and the number of GPUs is not
                known.
        """
        if load.seconds is None:
            return None

        is_request_count_open = load.requests is None

        # A target without an instance type has a price per token, for which the number of requests
        # is needed. No price has to be found to know that.
        has_token_price = not targets[0].shape
        if is_request_count_open and has_token_price:
            return None

        prices = find_prices(self.prices, targets[0])
        is_paid_by_hour = all(isinstance(price, Rented | Owned) for price in prices)
        if is_request_count_open and not is_paid_by_hour:
            return None

        # `compute_unit_cost` returns the cost of one request, which is multiplied by their number.
        # If that is not known, the price is by the hour. An hour costs as much with any number of
        # requests, so the load counts as a single one.
        request_count = to_decimal(1.0 if load.requests is None else load.requests)
        seconds = to_decimal(load.seconds)
        if not request_count or not seconds:
            return Decimal(0)

        basis = _forecast_basis(load, request_count, seconds)

        # Targets that do not name their GPUs count as 0. A sum of 0 means that none of them does.
        gpus = sum(target.gpus or 0 for target in targets) or None
        costs_per_request = [
            _forecast_request_cost(price, basis, load.input_tokens, gpus) for price in prices
        ]
        return max(costs_per_request) * request_count


def _forecast_request_cost(
    price: Price, basis: CostBasis, mean_prompt_tokens: float, gpus: int | None
) -> Decimal:
    """Return the expected cost of one request under a price.

    Args:
        price: The price.
        basis: The expected quantities of the load.
        mean_prompt_tokens: The mean prompt length, on which the price may depend.
        gpus: The GPUs of all targets, or None if they are not known.

    Raises:
        UserError: The price is by the hour and the number of GPUs is not known.
    """
    price_for_length = _select_price_for_prompt(price, mean_prompt_tokens)
    unit_cost = compute_unit_cost(basis, price_for_length, gpus, REQUEST)
    if unit_cost is None:
        raise UserError(
            "missing_option",
            "the price is per hour, and the number of GPUs is not known",
            "--gpus",
            "--gpus 4",
        )

    return unit_cost.total


def _forecast_basis(load: Forecast, request_count: Decimal, seconds: Decimal) -> CostBasis:
    """Return the expected quantities of a load, in the form in which measured ones are priced.

    Nothing is expected to come from a cache, which makes the forecast rather too high than too low.
    """
    return CostBasis(
        label="forecast",
        is_capacity=False,
        rates={REQUEST: request_count / seconds},
        counts={REQUEST: request_count},
        uncached_input_tokens=request_count * to_decimal(load.input_tokens),
        cached_tokens=Decimal(0),
        cache_written_tokens=None,
        is_cached_known=False,
        output_tokens=request_count * to_decimal(load.output_tokens),
        bytes_out=Decimal(0),
    )


def _select_price_for_prompt(price: Price, mean_prompt_tokens: float) -> Price:
    """Return the price that applies to prompts of a length, if the price depends on it.

    A forecast has only the mean length. If some prompts are shorter than the length at which the
    price changes and others are longer, its cost is only an estimate.
    """
    if not isinstance(price, PerToken) or price.above_prompt_tokens is None:
        return price
    if mean_prompt_tokens > price.above_prompt_tokens:
        return price.long_prompt_price or price
    return price
