"""What a run will cost before it starts, what it has cost while it goes, and the limit of both (`--max-cost`). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from loadgen_sdk.price_file import PerToken
from msgspec import Struct

from loadgen.core.errors import UserError
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.schedule.forecast import Forecast
from loadgen.pricing import unit_cost
from loadgen.pricing.prices import Owned, Price, Prices, Rented, find
from loadgen.pricing.unit_cost import REQUEST, Basis

NOTHING = Decimal(0)


class Budget(Struct):
    """The money of a command, over all its runs. `limit` None: there is none. `spent`: by the runs so far."""

    prices: Prices
    limit: Decimal | None = None
    spent: Decimal = NOTHING

    def words(self, amount: Decimal) -> str:
        """An amount with its currency."""
        return f"{amount:,.2f} {self.prices.currency}"

    def admit(self, cost: Decimal, what: str = "this run") -> None:
        """Raises UserError for `what`, a run or several together, that would go over the limit."""
        if self.limit is not None and self.spent + cost > self.limit:
            before = f", after {self.words(self.spent)} so far" if self.spent else ""
            hint = "a shorter or lighter load, or a higher limit"
            raise UserError(
                "over_budget",
                f"{what} will cost about {self.words(cost)}{before}",
                f"--max-cost {self.limit}",
                hint,
            )

    def cost(self, load: Forecast, targets: Sequence[TargetFacts]) -> Decimal | None:
        """What a load costs; None where its length, or for prices by the token its requests, are not known. The highest
        of several commitments.

        Raises UserError where no price is found, and where it is by the hour and nobody says how many GPUs there are.
        """
        if load.seconds is None or (load.requests is None and not targets[0].shape):
            return None
        found = find(self.prices, targets[0])
        if load.requests is None and not all(isinstance(price, Rented | Owned) for price in found):
            return None
        requests = (
            1.0 if load.requests is None else load.requests
        )  # an hour costs as much with any number of them
        count, seconds = Decimal(repr(requests)), Decimal(repr(load.seconds))
        if not count or not seconds:
            return NOTHING
        basis = Basis(
            label="forecast",
            is_capacity=False,
            rates={REQUEST: count / seconds},
            counts={REQUEST: count},
            input_tokens=count * Decimal(repr(load.input_tokens)),
            cached_tokens=NOTHING,
            written_tokens=None,
            cached_known=False,
            output_tokens=count * Decimal(repr(load.output_tokens)),
            bytes_out=NOTHING,
        )
        prices = [_price_of_mean_prompt(price, load.input_tokens) for price in found]
        gpus = sum(target.gpus or 0 for target in targets) or None
        costs = [unit_cost.cost(basis, price, gpus, REQUEST) for price in prices]
        if None in costs:
            raise UserError(
                "missing_option",
                "its price is by the hour, and nobody says how many GPUs it has",
                "--gpus",
                "--gpus 4",
            )
        return max(cost.total for cost in costs if cost is not None) * count


def _price_of_mean_prompt(price: Price, mean_prompt_tokens: float) -> Price:
    """Return the price for prompts of a mean length, where a price changes with the length.

    A forecast has only the mean, so that it is an estimate for prompts on both sides of the change.
    """
    if not isinstance(price, PerToken) or price.above_prompt_tokens is None:
        return price
    return (price.above or price) if mean_prompt_tokens > price.above_prompt_tokens else price
