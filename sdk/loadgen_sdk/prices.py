"""What tokens cost: the value of a price, its arithmetic, and its reader. `loadgen cost` uses the same arithmetic."""

from __future__ import annotations

import functools
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from .errors import WrongUse

Amount = TypeVar("Amount", float, Decimal)
MILLION = 1_000_000


def token_costs(
    tokens: tuple[Amount, Amount, Amount], prices: tuple[Amount, Amount, Amount]
) -> tuple[Amount, Amount, Amount]:
    """What each kind of tokens costs: input without the cached, cached input, output. `prices`: of a million."""
    fresh, cached, output = (count * price / MILLION for count, price in zip(tokens, prices, strict=True))
    return fresh, cached, output


class TokenPrice(msgspec.Struct, frozen=True):
    """The price of a million tokens. `cached` None: the same as `input`. `currency`: "" where nobody says.

    Raises WrongUse for a price that is negative or not a finite number.
    """

    input: float
    output: float
    cached: float | None = None
    currency: str = ""

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 <= value < math.inf) and not (name == "cached" and value is None):
                raise WrongUse(
                    "out_of_range", f"the {name} price is {value!r}", "give the price of a million tokens, 0 or more"
                )

    def cost(self, input: int, output: int, cached: int = 0) -> float:
        """The cost of one call; `cached` of the `input` tokens came from the server's cache."""
        cached_price = self.input if self.cached is None else self.cached
        return sum(token_costs((input - cached, cached, output), (self.input, cached_price, self.output)))


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
            raise WrongUse("wrong_type", f"the price of {model!r} is a {type(price).__name__}", hint)
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
    warnings.warn(text, stacklevel=4)


UNDATED = "undated"  # as_of: of a price


def fresh_price(input: Amount, cache_write: Amount | None) -> Amount:
    """The price of prompt tokens that came from no cache: where writing to it has a price, all of them pay it."""
    return cache_write or input


def first_day(as_of: str) -> date:
    """The first day that `2026`, `2026-11` or `2026-11-21` can mean. Raises ValueError for what is none of these."""
    match = re.fullmatch(r"(\d{4})(?:-(\d\d)(?:-(\d\d))?)?", as_of)
    if match is None:
        raise ValueError(f"as_of: {as_of} is no day")
    return date(int(match[1]), int(match[2] or 1), int(match[3] or 1))


def since(as_of: str) -> date:
    """From when a price is valid: one without a date is older than any other."""
    return date.min if as_of == UNDATED else first_day(as_of)


class _PerToken(msgspec.Struct):
    """An entry of `per_token:` in a price file, as far as a call's cost needs it. The generator checks the rest."""

    model: str
    per_million_input: float
    per_million_output: float
    per_million_cached: float | None = None
    per_million_cache_write: float | None = None
    provider: str = ""
    region: str = ""
    currency: str = ""
    as_of: Any = UNDATED  # a year is a number, a day a date


class _PriceFile(msgspec.Struct):
    currency: str = ""
    per_token: tuple[_PerToken, ...] = ()


class _Offer(NamedTuple):
    provider: str
    region: str
    since: date
    price: TokenPrice


def read_prices(path: str | os.PathLike[str], *, provider: str | None = None) -> dict[str, TokenPrice]:
    """The prices by model of a price file, the one that `loadgen cost --prices` reads: its `per_token:` entries.

    provider: whose, where several sell a model of one name. Of one offer the latest `as_of` counts. A file that does
    not end in .json needs PyYAML. Raises WrongUse for a file that cannot be read, that has no such price, or two for
    one model.
    """
    found: dict[str, _Offer] = {}
    hint = "a file as for `loadgen cost --prices`: currency:, and per_token: with model and per_million_…"
    for model, offer in _offers(Path(path), hint):
        if provider is not None and offer.provider != provider:
            continue
        if (other := found.get(model)) is not None:
            alike = (other.provider, other.region) == (offer.provider, offer.region)
            if alike and other.since > offer.since:
                continue
            if not alike or other.since == offer.since:
                raise WrongUse(
                    "conflict", f"{path}: two prices for {model}, of {other.provider} and {offer.provider}",
                    f"read_prices({str(path)!r}, provider={offer.provider!r})",
                )  # fmt: skip
        found[model] = offer
    if not found:
        of = f" of {provider}" if provider is not None else ""
        raise WrongUse("missing_option", f"{path}: there is no price by the token{of}", hint)
    return {model: offer.price for model, offer in found.items()}


def _offers(path: Path, hint: str) -> Iterator[tuple[str, _Offer]]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise WrongUse("unreadable_file", f"{path}: {error.strerror}", hint) from None
    decode: Any = msgspec.json.decode if path.suffix == ".json" else msgspec.yaml.decode
    try:
        written: _PriceFile = decode(text, type=_PriceFile)
        for entry in written.per_token:
            price = TokenPrice(
                fresh_price(entry.per_million_input, entry.per_million_cache_write),
                entry.per_million_output,
                entry.per_million_cached,
                entry.currency or written.currency,
            )
            yield entry.model, _Offer(entry.provider, entry.region, since(str(entry.as_of)), price)
    except ImportError:
        raise WrongUse("not_installed", f"{path}: YAML needs the package PyYAML", "pip install pyyaml") from None
    except (msgspec.MsgspecError, ValueError) as error:
        if isinstance(error, WrongUse):
            raise
        raise WrongUse("invalid_value", f"{path}: {error}", hint) from None
