"""What tokens cost: the value of a price, and its arithmetic, which `loadgen cost` uses too."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Generic, NamedTuple, TypeVar

import msgspec

from .errors import WrongUse, warn

Amount = TypeVar("Amount", float, Decimal)
MILLION = 1_000_000


class ByTokenKind(NamedTuple, Generic[Amount]):
    """A number for each kind of tokens that has a price: tokens, prices per million, or costs.

    Attributes:
        plain: Prompt tokens that neither came from a cache nor were written to one.
        written: Prompt tokens that were written to a cache.
        cached: Prompt tokens that came from a cache.
        output: Output tokens.
    """

    plain: Amount
    written: Amount
    cached: Amount
    output: Amount


def token_costs(tokens: ByTokenKind[Amount], prices: ByTokenKind[Amount]) -> ByTokenKind[Amount]:
    """Return what each kind of tokens costs. Prices are per million tokens."""
    return ByTokenKind(
        plain=tokens.plain * prices.plain / MILLION,
        written=tokens.written * prices.written / MILLION,
        cached=tokens.cached * prices.cached / MILLION,
        output=tokens.output * prices.output / MILLION,
    )


class TokenPrice(msgspec.Struct, frozen=True):
    """The price of a million tokens of a model.

    Attributes:
        input: The price of prompt tokens.
        output: The price of output tokens.
        cached: The price of prompt tokens from a cache, or None if it is that of `input`.
        currency: The currency, or "" if it is not stated.
        cache_write: The price of prompt tokens written to a cache, or None if it is that of
            `input`.
        above_prompt_tokens: The length of prompts, cached tokens included, above which a call costs
            the price `above`.
        above: The price of calls with longer prompts.

    Raises:
        WrongUse: A price is negative or not a finite number.
    """

    input: float
    output: float
    cached: float | None = None
    currency: str = ""
    cache_write: float | None = None
    above_prompt_tokens: int | None = None
    above: TokenPrice | None = None

    def __post_init__(self) -> None:
        """Check the prices."""
        _check_price("input", self.input)
        _check_price("output", self.output)
        if self.cached is not None:
            _check_price("cached", self.cached)
        if self.cache_write is not None:
            _check_price("cache_write", self.cache_write)

    def cost(self, input: int, output: int, cached: int = 0, written: int = 0) -> float:
        """Return the cost of one call, in the currency of the price.

        Args:
            input: The prompt tokens, including `cached` and `written`.
            output: The output tokens.
            cached: The prompt tokens that came from the cache of the server.
            written: The prompt tokens that were written to it.
        """
        prompt_tokens = input
        is_long_prompt = prompt_tokens > (self.above_prompt_tokens or 0)
        if self.above is not None and is_long_prompt:
            return self.above.cost(prompt_tokens, output, cached, written)

        # A server may report more cached or written tokens than the prompt has.
        cached_tokens = min(cached, prompt_tokens)
        written_tokens = min(written, prompt_tokens - cached_tokens)
        tokens = ByTokenKind[float](
            plain=prompt_tokens - cached_tokens - written_tokens,
            written=written_tokens,
            cached=cached_tokens,
            output=output,
        )
        costs = token_costs(tokens, self._prices_by_kind())

        return costs.plain + costs.written + costs.cached + costs.output

    def _prices_by_kind(self) -> ByTokenKind[float]:
        """Return the price of a million tokens of each kind."""
        return ByTokenKind(
            plain=self.input,
            written=self.input if self.cache_write is None else self.cache_write,
            cached=self.input if self.cached is None else self.cached,
            output=self.output,
        )


Prices = TokenPrice | Mapping[str, TokenPrice] | None
"""One price for all models, or prices by model name.

The name of the model that responded is looked up first, then that of the requested model.
"""


def validate_prices(prices: Prices) -> Prices:
    """Return the prices that an application has passed, if they are valid.

    Raises:
        WrongUse: They are neither a TokenPrice nor a mapping of names to prices.
    """
    if prices is None or isinstance(prices, TokenPrice):
        return prices

    hint = "give TokenPrice(input=..., output=...), or a mapping from model names to them"
    if not isinstance(prices, Mapping):
        raise WrongUse(
            "wrong_type",
            f"prices must be a TokenPrice or a mapping, not a {type(prices).__name__}",
            hint,
        )

    for model, price in prices.items():
        if not isinstance(model, str) or not isinstance(price, TokenPrice):
            message = f"the price of {model!r} must be a TokenPrice, not a {type(price).__name__}"
            raise WrongUse("wrong_type", message, hint)

    return prices


def find_price(prices: Prices, *models: str) -> TokenPrice | None:
    """Return the price of a model, or None if there is none.

    If there are prices, but none for the model, the application is warned once per process and
    model.

    Args:
        prices: One price for all models, or prices by model name.
        models: The names of the model in the order in which they are looked up. Usually the first
            is the name in the response, such as "gpt-4o-2024-11-20", and the second the name in the
            request, such as "gpt-4o".
    """
    if prices is None or isinstance(prices, TokenPrice):
        return prices

    for model in models:
        if model in prices:
            return prices[model]

    known_models = ", ".join(sorted(prices)) or "none"
    warn_once(
        f"there is no price for the model {models[-1]!r}, so its cost is None "
        f"(prices are known for {known_models})"
    )
    return None


@functools.cache
def warn_once(text: str) -> None:
    """Warn the application, but only once per process and text."""
    warn(text, stacklevel=5)


def _check_price(name: str, value: object) -> None:
    """Raise WrongUse if a price is not a finite number of at least 0. A bool is no number here."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:  # type: ignore[operator]  # It is a number.
        raise WrongUse(
            "out_of_range",
            f"the {name} price is {value!r}",
            "give the price of a million tokens, 0 or more",
        )
