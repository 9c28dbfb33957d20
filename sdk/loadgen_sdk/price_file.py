"""What a price file says of a price by the token: its keys, what each may be, which of them hold; and the SDK's reader.

`loadgen cost` takes the value, the checks and the rules from here, and adds what it needs: the places of faults, and
the machines that are rented or owned.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from .errors import WrongUse
from .prices import TokenPrice

Entry = TypeVar("Entry")
UNDATED = "undated"  # as_of: of a price
EARLIEST_YEAR = 2015


class PerToken(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint that is paid by the token; amounts are per million."""

    synonyms: ClassVar[Mapping[str, str]] = {
        "input": "per_million_input",
        "output": "per_million_output",
        "cached": "per_million_cached",
        "model_class": "model",
        "date": "as_of",
    }

    name: str = ""  # by which `--price DIR=NAME` and the reports call it; made from provider and model when left out
    provider: str
    currency: str | None = None  # of the file when left out
    as_of: str
    source: str
    quality: str = ""
    commitment: str = ""  # pay as you go, 1 year, ...
    region: str = ""
    egress_per_gb: Decimal | None = None  # per 1e9 bytes that leave the provider
    model: str  # as the endpoint calls it
    url: str = ""  # how the target's URL starts, where several providers serve a model of this name
    per_million_input: Decimal
    per_million_output: Decimal
    per_million_cached: Decimal | None = None  # prompt tokens from the provider's prefix cache
    per_million_cache_write: Decimal | None = None  # those written to it; nobody says: all others
    # a request with a longer prompt, cached tokens included, is paid at the prices below
    above_prompt_tokens: int | None = None
    per_million_input_above: Decimal | None = None
    per_million_output_above: Decimal | None = None
    per_million_cached_above: Decimal | None = None
    per_million_cache_write_above: Decimal | None = None

    @property
    def per_million(self) -> tuple[Decimal, Decimal, Decimal, Decimal]:
        """Return the prices as `token_costs` takes them.

        Without a price of its own, writing to the cache costs as much as plain input, and reading
        from it nothing.
        """
        write = self.per_million_cache_write
        if write is None:
            write = self.per_million_input
        return (
            self.per_million_input,
            write,
            self.per_million_cached or Decimal(0),
            self.per_million_output,
        )

    @property
    def above(self) -> PerToken | None:
        """Return the price of a request with a long prompt, or None if the length does not matter.

        What has no price of its own above the length costs the same below and above it.
        """
        if self.above_prompt_tokens is None:
            return None
        changed: dict[str, Any] = dict.fromkeys(MONEY_ABOVE)
        for key in MONEY:
            price_above = getattr(self, f"{key}_above")
            changed[key] = getattr(self, key) if price_above is None else price_above
        return msgspec.structs.replace(self, above_prompt_tokens=None, **changed)

    @property
    def offer(self) -> tuple[str, str, str, str, str]:
        """What it is a price of: prices of other days may be of the same offer."""
        names = self.provider, self.model, self.url, self.region, self.commitment
        provider, model, url, region, commitment = (name.lower() for name in names)
        return provider, model, url, region, commitment


def text(value: object) -> str:
    """A text of a price file; a number or a day is one. Raises WrongUse."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | date):
        raise WrongUse("wrong_type", "must be text", "put it in quotes")
    return str(value)


def filled(value: object) -> str:
    """A text that is not empty."""
    if not (words := text(value)):
        raise WrongUse("missing_value", "must not be empty")
    return words


def currency(value: object) -> str:
    if not re.fullmatch(r"[A-Z]{3}", words := text(value)):
        raise WrongUse(
            "invalid_value", "is not a currency", "three capital letters of ISO 4217, like USD"
        )
    return words


def as_of(value: object) -> str:
    """The day, month or year at which a price was valid, or `undated`."""
    words = text(value)
    try:
        early = words != UNDATED and first_day(words).year < EARLIEST_YEAR
    except ValueError:
        hint = f"2026-11-21, 2026-11 or 2026; {UNDATED} where nobody knows"
        raise WrongUse("invalid_value", "is not a date", hint) from None
    if early:
        hint = "the day, month or year at which the price was valid"
        raise WrongUse("out_of_range", "is before any of these prices", hint)
    return words


def number(value: object) -> Decimal:
    """A number as Decimal. The shortest text of a float equals what was written, up to 15 digits."""
    if isinstance(value, Decimal):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = "without quotes, unit, currency sign or thousands separator, like 10.50"
        raise WrongUse("invalid_value", "is not a number", hint)
    if not math.isfinite(value):
        raise WrongUse("out_of_range", "is not a number that can be paid", "an amount, like 10.50")
    return Decimal(str(value))


def amount(value: object) -> Decimal:
    """Return an amount of money above zero. Raises WrongUse for any other value."""
    money = amount_or_zero(value)
    if money == 0:
        hint = "the price you pay; leave the key out where nothing is paid"
        raise WrongUse("out_of_range", "is zero: nothing is free by default", hint)
    return money


def amount_or_zero(value: object) -> Decimal:
    """Return an amount of money, which may be zero: some tokens are free. Raises WrongUse."""
    money = number(value)
    if money < 0:
        raise WrongUse("out_of_range", "is negative", "an amount like 10.50")
    if money > 10**15:
        raise WrongUse("out_of_range", "is more money than there is", "an amount, like 10.50")
    return money


def token_threshold(value: object) -> int:
    """Return a number of prompt tokens above which other prices apply. Raises WrongUse."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WrongUse("invalid_value", "is no number of tokens", "a whole number like 200000")
    return value


def check_tiers(price: PerToken) -> None:
    """Raise WrongUse if only one of a threshold and the prices above it is there."""
    named = [key for key in MONEY_ABOVE if getattr(price, key) is not None]
    if price.above_prompt_tokens is None and named:
        hint = "above_prompt_tokens: 200000"
        raise WrongUse("missing_key", f"{named[0]} without above_prompt_tokens", hint)
    if price.above_prompt_tokens is not None and not named:
        hint = "per_million_input_above, per_million_output_above"
        raise WrongUse("missing_key", "above_prompt_tokens without a price above it", hint)


MONEY = ("per_million_input", "per_million_output", "per_million_cached", "per_million_cache_write")
MONEY_ABOVE = tuple(f"{key}_above" for key in MONEY)
CHECKS: dict[str, Callable[[object], object]] = {
    **dict.fromkeys((field.name for field in msgspec.structs.fields(PerToken)), text),
    **dict.fromkeys(("provider", "source", "model"), filled),
    **dict.fromkeys((*MONEY, *MONEY_ABOVE, "egress_per_gb"), amount_or_zero),
    "above_prompt_tokens": token_threshold,
    "as_of": as_of,
    "currency": currency,
}
"""What the value of each key of an entry has to be."""

# A price outside its range is a mistake: cents instead of dollars. Only for currencies of the dollar's order of
# magnitude; in others only the sign of a price is checked.
DOLLAR_LIKE = frozenset(("USD", "EUR", "GBP", "CHF", "CAD", "AUD"))
RANGES = {
    **dict.fromkeys(
        (*MONEY, *MONEY_ABOVE),
        (Decimal("0.001"), Decimal(2000), "per_million", "a million tokens"),
    ),
    "egress_per_gb": (Decimal("0.0001"), Decimal(5), "egress_per_gb", "a gigabyte of egress"),
}
"""Of each amount the least, the most, its unit, and what costs that much."""


def absurd(
    amount: Decimal, low: Decimal, high: Decimal, unit: str, noun: str, currency: str
) -> WrongUse | None:
    """Return what is wrong with an amount of this currency, or None. A price of zero is right."""
    if currency not in DOLLAR_LIKE or not amount or low <= amount <= high:
        return None
    hint = f"between {low} and {high:,} {currency}; check the unit ({unit})"
    return WrongUse("out_of_range", f"{noun} of {amount.normalize():,f} {currency} is absurd", hint)


def to_come(as_of: str, today: date) -> WrongUse | None:
    """What is wrong with a price of a day that is still to come; None: nothing."""
    if as_of == UNDATED or first_day(as_of) <= today:
        return None
    hint = "the day at which the price was valid"
    return WrongUse("out_of_range", f"{as_of} is in the future (today is {today})", hint)


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
    entries: Sequence[Entry],
    offer: Callable[[Entry], object],
    as_of: Callable[[Entry], str],
    day: date | None = None,
) -> list[Entry]:
    """Of each offer what is valid at a day (None: today and later): its latest price up to it. In the order given."""
    days = [since(as_of(entry)) for entry in entries]
    valid = [one for one in zip(entries, days, strict=True) if day is None or one[1] <= day]
    last: dict[object, date] = {}
    for entry, since_day in valid:
        last[offer(entry)] = max(since_day, last.get(offer(entry), since_day))
    return [entry for entry, since_day in valid if since_day == last[offer(entry)]]


def twice(
    entries: Sequence[Entry], offer: Callable[[Entry], object], as_of: Callable[[Entry], str]
) -> Iterator[tuple[Entry, Entry]]:
    """Each price whose offer has one of the same day already, with that one."""
    first_of: dict[object, Entry] = {}
    for entry in entries:
        first = first_of.setdefault((offer(entry), since(as_of(entry))), entry)
        if first is not entry:
            yield entry, first


TELL_APART = "keep one, or tell them apart by region, commitment or as_of"


def read_prices(
    path: str | os.PathLike[str], *, provider: str | None = None
) -> dict[str, TokenPrice]:
    """The prices by model of a price file, the one that `loadgen cost --prices` reads: its `per_token:` entries.

    provider: whose, where several sell a model of one name. Of one offer the latest `as_of` counts. A file that does
    not end in .json needs PyYAML. Raises WrongUse, with the key, for a file that cannot be read, for what `cost` would
    not take either, and where there is no such price, or are two for one model.
    """
    written = _read(Path(path), f"{path}")
    if not isinstance(written, Mapping):
        raise WrongUse("wrong_type", f"{path}: the top must be a mapping (key: value)", _EXAMPLE)
    entries = written.get("per_token") or ()
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise WrongUse(
            "wrong_type", f"{path}: per_token must be a list", "start each item with a dash"
        )
    if "currency" not in written:
        raise WrongUse("missing_key", f'{path}: missing "currency"', _EXAMPLE)
    of_file = _checked(f"{path}: currency", currency, written["currency"])
    prices = [
        _entry(f"{path}: per_token[{index}]", entry, of_file) for index, entry in enumerate(entries)
    ]
    for (at, price), (other, _) in twice(
        list(enumerate(prices)), lambda one: one[1].offer, lambda one: one[1].as_of
    ):
        problem = f"{path}: per_token[{at}]: two prices for {price.model} of {price.provider}"
        raise WrongUse("duplicate", problem, f"the first is per_token[{other}]; {TELL_APART}")
    found: dict[str, PerToken] = {}
    own = [price for price in prices if provider in (None, price.provider)]
    for price in latest(own, lambda one: one.offer, lambda one: one.as_of):
        other_offer = found.setdefault(price.model, price)
        if other_offer is not price:
            problem = f"{path}: two prices for {price.model}, of {other_offer.provider} and {price.provider}"
            advice = f"read_prices({str(path)!r}, provider={price.provider!r})"
            if other_offer.provider == price.provider:
                advice = "keep one: a call does not say which url, region or commitment it pays"
            raise WrongUse("conflict", problem, advice)
    if not found:
        of = f" of {provider}" if provider is not None else ""
        raise WrongUse("no_price", f"{path}: there is no price by the token{of}", _EXAMPLE)
    return {model: _token_price(price) for model, price in found.items()}


_EXAMPLE = "like docs/prices.example.yaml: currency:, and per_token: with model, per_million_…, as_of and source"


def _token_price(price: PerToken) -> TokenPrice:
    """Return the price of a model as the SDK computes with it."""
    amounts = [getattr(price, key) for key in MONEY]
    into, out, cached, write = (None if amount is None else float(amount) for amount in amounts)
    assert into is not None and out is not None
    flat = TokenPrice(into, out, cached, price.currency or "", write)
    if price.above is None:
        return flat
    return msgspec.structs.replace(
        flat, above_prompt_tokens=price.above_prompt_tokens, above=_token_price(price.above)
    )


def _entry(at: str, written: object, of_file: str) -> PerToken:
    if not isinstance(written, Mapping):
        raise WrongUse("wrong_type", f"{at} must be a mapping (key: value)", _EXAMPLE)
    for key in written:
        if key not in CHECKS:
            similar = PerToken.synonyms.get(key)
            hint = (
                f'did you mean "{similar}"? ' if similar else ""
            ) + f"known: {', '.join(CHECKS)}"
            raise WrongUse("unknown_key", f'{at}.{key}: unknown key "{key}"', hint)
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(PerToken):
        if field.name in written:
            value = written[field.name]
            if value is not None or field.default is not None:
                values[field.name] = _checked(f"{at}.{field.name}", CHECKS[field.name], value)
        elif field.default is msgspec.NODEFAULT:
            raise WrongUse("missing_key", f'{at}: missing "{field.name}"', _EXAMPLE)
    price = PerToken(**{"currency": of_file, **values})
    _checked(at, lambda _: check_tiers(price), "")
    if (fault := to_come(price.as_of, date.today())) is not None:
        raise WrongUse(fault.code, f"{at}.as_of: {fault.what}", fault.hint)
    for key, (low, high, unit, noun) in RANGES.items():
        money = getattr(price, key)
        if (
            money is not None
            and (fault := absurd(money, low, high, unit, noun, price.currency or "")) is not None
        ):
            raise WrongUse(fault.code, f"{at}.{key}: {fault.what}", fault.hint)
    return price


def _checked(at: str, check: Callable[[object], Any], value: object) -> Any:
    try:
        return check(value)
    except WrongUse as wrong:
        shown = f'{at}: "{value}"' if isinstance(value, str | int | float) and value != "" else at
        raise WrongUse(wrong.code, f"{shown} {wrong.what}", wrong.hint or _EXAMPLE) from None


def _read(path: Path, shown: str) -> Any:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise WrongUse("unreadable_file", f"{shown}: {error.strerror}", _EXAMPLE) from None
    decode: Callable[[bytes], Any] = (
        msgspec.json.decode if path.suffix == ".json" else msgspec.yaml.decode
    )
    try:
        return decode(content)
    except ImportError:
        raise WrongUse(
            "not_installed", f"{shown}: YAML needs the package PyYAML", "pip install pyyaml"
        ) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise WrongUse(
            "invalid_value", f"{shown}: {' '.join(str(error).split())}", _EXAMPLE
        ) from None
