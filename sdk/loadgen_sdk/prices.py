"""What tokens cost: the value of a price, and its arithmetic, by which `loadgen cost` computes too."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import TypeVar

import msgspec

from .errors import WrongUse, warn

Amount = TypeVar("Amount", float, Decimal)
MILLION = 1_000_000


def token_costs(
    tokens: tuple[Amount, Amount, Amount, Amount], prices: tuple[Amount, Amount, Amount, Amount]
) -> tuple[Amount, Amount, Amount, Amount]:
    """What each kind of tokens costs. `prices`: of a million.

    The kinds: input that neither came from a cache nor was written to one; written to a cache; from a cache; output.
    """
    (plain, written, cached, output), (input_price, write_price, cached_price, output_price) = (
        tokens,
        prices,
    )
    return (
        plain * input_price / MILLION,
        written * write_price / MILLION,
        cached * cached_price / MILLION,
        output * output_price / MILLION,
    )


class TokenPrice(msgspec.Struct, frozen=True):
    """The price of a million tokens. `cached`, `cache_write` None: as `input`. `currency`: "" where nobody says.

    A call whose prompt, cached tokens included, has more than `above_prompt_tokens` tokens is paid
    at the price `above` as a whole.

    Raises WrongUse for a price that is negative or not a finite number.
    """

    input: float
    output: float
    cached: float | None = None
    currency: str = ""
    cache_write: float | None = None
    above_prompt_tokens: int | None = None
    above: TokenPrice | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached", "cache_write"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 <= value < math.inf) and not (
                name.startswith("cache") and value is None
            ):
                raise WrongUse(
                    "out_of_range",
                    f"the {name} price is {value!r}",
                    "give the price of a million tokens, 0 or more",
                )

    def cost(self, input: int, output: int, cached: int = 0, written: int = 0) -> float:
        """The cost of one call. Of its `input` tokens `cached` came from the server's cache, `written` went into it."""
        if self.above is not None and input > (self.above_prompt_tokens or 0):
            return self.above.cost(input, output, cached, written)
        if not (cached or written):
            return (
                input * self.input / MILLION + output * self.output / MILLION
            )  # most calls: the same, less the zeros
        cached_price = self.input if self.cached is None else self.cached
        write_price = self.input if self.cache_write is None else self.cache_write
        cached = min(cached, input)  # a server may say more than there is
        fresh = input - cached
        written = min(written, fresh)
        prices = self.input, write_price, cached_price, self.output
        plain, stored, found, answer = token_costs(
            (fresh - written, written, cached, output), prices
        )
        return plain + stored + found + answer


Prices = TokenPrice | Mapping[str, TokenPrice] | None
"""One price for all models, or prices by model name. The answering model comes first, then the requested one."""


def checked_prices(prices: Prices) -> Prices:
    """`prices`, checked. Raises WrongUse when they are neither a TokenPrice nor a mapping of names to them."""
    if prices is None or isinstance(prices, TokenPrice):
        return prices
    hint = "give TokenPrice(input=…, output=…), or a mapping of model names to them"
    if not isinstance(prices, Mapping):
        raise WrongUse("wrong_type", f"prices is a {type(prices).__name__}", hint)
    for model, price in prices.items():
        if not isinstance(model, str) or not isinstance(price, TokenPrice):
            raise WrongUse(
                "wrong_type", f"the price of {model!r} is a {type(price).__name__}", hint
            )
    return prices


def price_of(prices: Prices, *models: str) -> TokenPrice | None:
    """The price of the first of `models` that has one, else None with a warning, once per process and model."""
    if prices is None or isinstance(prices, TokenPrice):
        return prices
    for model in models:
        if model in prices:
            return prices[model]
    known = ", ".join(sorted(prices)) or "none"
    warn_once(f"no price for the model {models[-1]!r}: its cost is None (known: {known})")
    return None


@functools.cache
def warn_once(text: str) -> None:
    warn(text, stacklevel=5)
