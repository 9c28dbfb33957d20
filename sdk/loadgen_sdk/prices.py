"""What tokens cost: the value of a price, its arithmetic, the rules of a price file, and the SDK's reader of one.

`loadgen cost` computes by this arithmetic, and takes by these rules the prices that are valid. Its own reader checks
more of the file, and says where in it a fault is.
"""

from __future__ import annotations

import functools
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from .errors import WrongUse

Amount = TypeVar("Amount", float, Decimal)
Entry = TypeVar("Entry")
MILLION = 1_000_000


def token_costs(
    tokens: tuple[Amount, Amount, Amount, Amount], prices: tuple[Amount, Amount, Amount, Amount]
) -> tuple[Amount, Amount, Amount, Amount]:
    """What each kind of tokens costs. `prices`: of a million.

    The kinds: input that neither came from a cache nor was written to one; written to a cache; from a cache; output.
    """
    plain, written, cached, output = (count * price / MILLION for count, price in zip(tokens, prices, strict=True))
    return plain, written, cached, output


class TokenPrice(msgspec.Struct, frozen=True):
    """The price of a million tokens. `cached`, `cache_write` None: as `input`. `currency`: "" where nobody says.

    Raises WrongUse for a price that is negative or not a finite number.
    """

    input: float
    output: float
    cached: float | None = None
    currency: str = ""
    cache_write: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached", "cache_write"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 <= value < math.inf) and not (name.startswith("cache") and value is None):
                raise WrongUse(
                    "out_of_range", f"the {name} price is {value!r}", "give the price of a million tokens, 0 or more"
                )

    def cost(self, input: int, output: int, cached: int = 0, written: int = 0) -> float:
        """The cost of one call. Of its `input` tokens `cached` came from the server's cache, `written` went into it."""
        cached_price = self.input if self.cached is None else self.cached
        write_price = self.input if self.cache_write is None else self.cache_write
        fresh = input - cached
        written = min(written, fresh)  # a server may say more than there is
        tokens = fresh - written, written, cached, output
        return sum(token_costs(tokens, (self.input, write_price, cached_price, self.output)))


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


def first_day(as_of: str) -> date:
    """The first day that `2026`, `2026-11` or `2026-11-21` can mean. Raises ValueError for what is none of these."""
    match = re.fullmatch(r"(\d{4})(?:-(\d\d)(?:-(\d\d))?)?", as_of)
    if match is None:
        raise ValueError(f"as_of: {as_of} is no day")
    return date(int(match[1]), int(match[2] or 1), int(match[3] or 1))


def since(as_of: str) -> date:
    """From when a price is valid: one without a date is older than any other."""
    return date.min if as_of == UNDATED else first_day(as_of)


def latest(
    entries: Sequence[Entry], offer: Callable[[Entry], object], as_of: Callable[[Entry], str], day: date | None = None
) -> list[Entry]:
    """Of each offer what is valid at a day (None: today and later): its latest price up to it. In the order given.

    More than one of an offer where they are of the same day.
    """
    days = [since(as_of(entry)) for entry in entries]
    valid = [one for one in zip(entries, days, strict=True) if day is None or one[1] <= day]
    last: dict[object, date] = {}
    for entry, since_day in valid:
        last[offer(entry)] = max(since_day, last.get(offer(entry), since_day))
    return [entry for entry, since_day in valid if since_day == last[offer(entry)]]


class PerTokenEntry(Protocol):
    """What tells the offers of a price file's `per_token:` apart."""

    @property
    def provider(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def region(self) -> str: ...
    @property
    def commitment(self) -> str: ...


def per_token_offer(entry: PerTokenEntry) -> tuple[str, str, str, str, str]:
    """The offer that an entry is a price of: entries of other days may be of the same one."""
    names = entry.provider, entry.model, entry.url, entry.region, entry.commitment
    provider, model, url, region, commitment = (name.lower() for name in names)
    return provider, model, url, region, commitment


class _PerToken(msgspec.Struct):
    """An entry of `per_token:` in a price file, as far as a call's cost needs it. The generator checks the rest."""

    model: str
    per_million_input: float
    per_million_output: float
    per_million_cached: float | None = None
    per_million_cache_write: float | None = None
    provider: str = ""
    url: str = ""
    region: str = ""
    commitment: str = ""
    currency: str = ""
    as_of: Any = UNDATED  # a year is a number, a day a date


class _PriceFile(msgspec.Struct):
    currency: str = ""
    per_token: tuple[_PerToken, ...] = ()


def read_prices(path: str | os.PathLike[str], *, provider: str | None = None) -> dict[str, TokenPrice]:
    """The prices by model of a price file, the one that `loadgen cost --prices` reads: its `per_token:` entries.

    provider: whose, where several sell a model of one name. Of one offer the latest `as_of` counts. A file that does
    not end in .json needs PyYAML. Raises WrongUse for a file that cannot be read, that has no such price, or two for
    one model.
    """
    hint = "a file as for `loadgen cost --prices`: currency:, and per_token: with model and per_million_…"
    try:
        written = _read(Path(path), hint)
        own = [entry for entry in written.per_token if provider in (None, entry.provider)]
        valid = latest(own, per_token_offer, lambda entry: str(entry.as_of))
        prices = [(entry, _price(entry, written.currency)) for entry in valid]
    except WrongUse:
        raise
    except (msgspec.MsgspecError, ValueError) as error:
        raise WrongUse("invalid_value", f"{path}: {error}", hint) from None
    found: dict[str, _PerToken] = {}
    for entry, _ in prices:
        other = found.setdefault(entry.model, entry)
        if other is not entry:
            problem = f"{path}: two prices for {entry.model}, of {other.provider} and {entry.provider}"
            advice = f"read_prices({str(path)!r}, provider={entry.provider!r})"
            if other.provider == entry.provider:
                advice = "keep one: a call does not say which url, region or commitment it pays"
            raise WrongUse("conflict", problem, advice)
    if not found:
        of = f" of {provider}" if provider is not None else ""
        raise WrongUse("missing_option", f"{path}: there is no price by the token{of}", hint)
    return {entry.model: price for entry, price in prices}


def _price(entry: _PerToken, currency: str) -> TokenPrice:
    return TokenPrice(
        entry.per_million_input,
        entry.per_million_output,
        entry.per_million_cached,
        entry.currency or currency,
        entry.per_million_cache_write,
    )


def _read(path: Path, hint: str) -> _PriceFile:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise WrongUse("unreadable_file", f"{path}: {error.strerror}", hint) from None
    decode: Any = msgspec.json.decode if path.suffix == ".json" else msgspec.yaml.decode
    try:
        written: _PriceFile = decode(text, type=_PriceFile)
    except ImportError:
        raise WrongUse("not_installed", f"{path}: YAML needs the package PyYAML", "pip install pyyaml") from None
    return written
