"""Read a price file: the keys of a price by the token, what each may be, and which prices apply.

`loadgen cost` uses the same keys, checks and rules. It adds the lines of errors in the file, and
machines that are rented or owned.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from .errors import WrongUse
from .prices import ByTokenKind, TokenPrice

Entry = TypeVar("Entry")
ParsedT = TypeVar("ParsedT")

UNDATED = "undated"
"""The value of `as_of` for a price whose date is not known."""

EARLIEST_YEAR = 2015
_MAX_AMOUNT = 10**15

DUPLICATE_HINT = "keep one of them, or give them different regions, commitments or dates (as_of)"
_EXAMPLE_HINT = (
    "see docs/prices.example.yaml: currency:, and per_token: with model, "
    "per_million_..., as_of and source"
)
_DATE = re.compile(r"(\d{4})(?:-(\d\d)(?:-(\d\d))?)?")


class Offer(NamedTuple):
    """What a price is for, in lower case. Prices of different days may be for the same offer."""

    provider: str
    model: str
    url: str
    region: str
    commitment: str


class PerToken(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint that is paid by the token; amounts are per million."""

    synonyms: ClassVar[Mapping[str, str]] = {
        "input": "per_million_input",
        "output": "per_million_output",
        "cached": "per_million_cached",
        "model_class": "model",
        "date": "as_of",
    }

    # The name in `--price DIR=NAME` and in reports. By default made from provider and model.
    name: str = ""
    provider: str
    # None for the currency of the file
    currency: str | None = None
    as_of: str
    source: str
    quality: str = ""
    # pay as you go, 1 year, ...
    commitment: str = ""
    region: str = ""
    # of 1e9 bytes that leave the provider
    egress_per_gb: Decimal | None = None
    # as the endpoint calls it
    model: str
    # the beginning of the target's URL, if several providers serve a model of this name
    url: str = ""
    per_million_input: Decimal
    per_million_output: Decimal
    # prompt tokens from the provider's prefix cache
    per_million_cached: Decimal | None = None
    # prompt tokens that are written to it; all others if the number is not known
    per_million_cache_write: Decimal | None = None
    # A request with a longer prompt, cached tokens included, costs the prices below.
    above_prompt_tokens: int | None = None
    per_million_input_above: Decimal | None = None
    per_million_output_above: Decimal | None = None
    per_million_cached_above: Decimal | None = None
    per_million_cache_write_above: Decimal | None = None

    @property
    def per_million(self) -> ByTokenKind[Decimal]:
        """Return the prices of a million tokens of each kind.

        Prompt tokens are of three kinds: plain, written to the provider's prefix cache, and read
        from it (`cached`). If the file states no price for writing, it costs as much as plain
        input. If it states none for reading, that is free.
        """
        write_price = self.per_million_cache_write
        if write_price is None:
            write_price = self.per_million_input

        return ByTokenKind(
            plain=self.per_million_input,
            written=write_price,
            cached=self.per_million_cached or Decimal(0),
            output=self.per_million_output,
        )

    @property
    def long_prompt_price(self) -> PerToken | None:
        """Return the price of a request with more than `above_prompt_tokens` prompt tokens.

        Return None if the length of the prompt does not matter. If the file states no amount for
        long prompts for a kind of tokens, these cost the same as in a short prompt.
        """
        if self.above_prompt_tokens is None:
            return None

        input_amount = _first_amount(self.per_million_input_above, self.per_million_input)
        output_amount = _first_amount(self.per_million_output_above, self.per_million_output)
        cached_amount = _first_amount(self.per_million_cached_above, self.per_million_cached)
        cache_write_amount = _first_amount(
            self.per_million_cache_write_above, self.per_million_cache_write
        )

        return msgspec.structs.replace(
            self,
            per_million_input=input_amount,
            per_million_output=output_amount,
            per_million_cached=cached_amount,
            per_million_cache_write=cache_write_amount,
            # The result does not depend on the length of the prompt any more.
            above_prompt_tokens=None,
            per_million_input_above=None,
            per_million_output_above=None,
            per_million_cached_above=None,
            per_million_cache_write_above=None,
        )

    @property
    def offer(self) -> Offer:
        """Return what the price is for: two prices of one offer differ only by their date.

        Upper and lower case do not matter, so that all texts are in lower case.
        """
        return Offer(
            self.provider.lower(),
            self.model.lower(),
            self.url.lower(),
            self.region.lower(),
            self.commitment.lower(),
        )


def _first_amount(preferred: Decimal | None, other: Decimal | None) -> Decimal | None:
    """Return the preferred amount, or the other one if the file does not state it."""
    return other if preferred is None else preferred


class PlausibleRange(NamedTuple):
    """The range in which an amount of money is plausible, in dollars or similar currencies.

    An amount outside it is a mistake, such as cents instead of dollars.

    Attributes:
        low: The lowest amount.
        high: The highest amount.
        unit: The unit of the amount, for the hint.
        noun: What costs this amount, for the message.
    """

    low: Decimal
    high: Decimal
    unit: str
    noun: str


def parse_text(value: object) -> str:
    """Return a text of a price file. A number or a date counts as one. Raises WrongUse."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | date):
        raise WrongUse("wrong_type", "must be text", "put it in quotes")
    return str(value)


def parse_nonempty_text(value: object) -> str:
    """Return a text that is not empty. Raises WrongUse."""
    text = parse_text(value)
    if not text:
        raise WrongUse("missing_value", "must not be empty")
    return text


def parse_currency(value: object) -> str:
    """Return the code of a currency. Raises WrongUse."""
    text = parse_text(value)
    if not re.fullmatch(r"[A-Z]{3}", text):
        raise WrongUse(
            "invalid_value",
            "is not a currency code",
            "write three capital letters (ISO 4217), like USD",
        )

    return text


def parse_as_of(value: object) -> str:
    """Return the value of the key `as_of`: the day, month or year when a price was valid.

    It is the text "undated" (UNDATED) for a price whose date nobody knows.

    Raises:
        WrongUse: The text is no date, or is before any of these prices.
    """
    text = parse_text(value)
    if text == UNDATED:
        return text

    try:
        day = first_day(text)
    except ValueError:
        hint = f"write 2026-11-21, 2026-11 or 2026, or {UNDATED} if the date is not known"
        raise WrongUse("invalid_value", "is not a date", hint) from None

    if day.year < EARLIEST_YEAR:
        hint = "write the day, month or year at which the price was valid"
        raise WrongUse("out_of_range", "is older than any of these prices", hint)

    return text


def parse_number(value: object) -> Decimal:
    """Return a number as Decimal, with the digits that were written. Raises WrongUse.

    The shortest text of a float equals what was written, up to 15 digits.
    """
    if isinstance(value, Decimal):
        return value

    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = "write it without quotes, unit, currency sign or thousands separator, like 10.50"
        raise WrongUse("invalid_value", "is not a number", hint)

    if not math.isfinite(value):
        raise WrongUse("out_of_range", "must be a finite number", "write an amount like 10.50")

    return Decimal(str(value))


def parse_positive_amount(value: object) -> Decimal:
    """Return an amount of money above zero. Raises WrongUse."""
    amount = parse_amount(value)
    if amount == 0:
        hint = "write the price you pay; leave the key out if nothing is paid"
        raise WrongUse("out_of_range", "is zero, but a price of zero must not be written", hint)
    return amount


def parse_amount(value: object) -> Decimal:
    """Return an amount of money, which may be zero: some tokens are free. Raises WrongUse."""
    amount = parse_number(value)
    if amount < 0:
        raise WrongUse("out_of_range", "is negative", "write an amount like 10.50")
    if amount > _MAX_AMOUNT:
        raise WrongUse("out_of_range", "is too large", "write an amount like 10.50")
    return amount


def parse_token_threshold(value: object) -> int:
    """Return a number of prompt tokens above which other prices apply. Raises WrongUse."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WrongUse(
            "invalid_value", "must be a number of tokens", "write an integer such as 200000"
        )
    return value


def check_tiers(price: PerToken) -> None:
    """Raise WrongUse if a price has only one of a threshold and the prices above it."""
    keys_above = [key for key in AMOUNT_KEYS_ABOVE if getattr(price, key) is not None]
    if price.above_prompt_tokens is None and keys_above:
        hint = "above_prompt_tokens: 200000"
        raise WrongUse("missing_key", f"{keys_above[0]} without above_prompt_tokens", hint)
    if price.above_prompt_tokens is not None and not keys_above:
        hint = "per_million_input_above, per_million_output_above"
        raise WrongUse("missing_key", "above_prompt_tokens is set, but no price above it", hint)


AMOUNT_KEYS = (
    "per_million_input",
    "per_million_output",
    "per_million_cached",
    "per_million_cache_write",
)
AMOUNT_KEYS_ABOVE = tuple(f"{key}_above" for key in AMOUNT_KEYS)

FIELD_PARSERS: dict[str, Callable[[object], object]] = {
    **dict.fromkeys((field.name for field in msgspec.structs.fields(PerToken)), parse_text),
    **dict.fromkeys(("provider", "source", "model"), parse_nonempty_text),
    **dict.fromkeys((*AMOUNT_KEYS, *AMOUNT_KEYS_ABOVE, "egress_per_gb"), parse_amount),
    "above_prompt_tokens": parse_token_threshold,
    "as_of": parse_as_of,
    "currency": parse_currency,
}
"""The function that parses the value of each key of an entry."""

DOLLAR_LIKE = frozenset(("USD", "EUR", "GBP", "CHF", "CAD", "AUD"))
"""Currencies of the dollar's order of magnitude. Plausible ranges apply only to them."""

_TOKEN_PRICE_RANGE = PlausibleRange(
    Decimal("0.001"), Decimal(2000), "per_million", "a million tokens"
)
PLAUSIBLE_RANGES = {
    **dict.fromkeys((*AMOUNT_KEYS, *AMOUNT_KEYS_ABOVE), _TOKEN_PRICE_RANGE),
    "egress_per_gb": PlausibleRange(
        Decimal("0.0001"), Decimal(5), "egress_per_gb", "a gigabyte of egress"
    ),
}
"""The plausible range of each amount of an entry."""


def find_implausible_amount(
    amount: Decimal, plausible_range: PlausibleRange, currency: str
) -> WrongUse | None:
    """Return an error if an amount is probably a mistake, such as cents instead of dollars.

    Zero is plausible, because some tokens are free. Amounts in a currency whose value is far from
    that of a dollar (not in DOLLAR_LIKE) are not checked.
    """
    is_checked_currency = currency in DOLLAR_LIKE
    if not is_checked_currency or amount == 0:
        return None

    lowest = plausible_range.low
    highest = plausible_range.high
    if lowest <= amount <= highest:
        return None

    amount_text = f"{plausible_range.noun} of {amount.normalize():,f} {currency}"
    return WrongUse(
        "out_of_range",
        f"{amount_text} is implausible",
        f"expected {lowest} to {highest:,} {currency}; check the unit ({plausible_range.unit})",
    )


def find_future_date(as_of: str, today: date) -> WrongUse | None:
    """Return what is wrong with the date of a price that is not valid yet, or None."""
    if as_of == UNDATED or first_day(as_of) <= today:
        return None
    hint = "write the day at which the price was valid"
    return WrongUse("out_of_range", f"the date {as_of} is in the future (today is {today})", hint)


def first_day(as_of: str) -> date:
    """Return the first day that `2026`, `2026-11` or `2026-11-21` can mean.

    Raises:
        ValueError: The text is none of these.
    """
    match = _DATE.fullmatch(as_of)
    if match is None:
        raise ValueError(f"as_of: {as_of} is not a date")
    year, month, day = match.groups(default="1")
    return date(int(year), int(month), int(day))


def valid_since(as_of: str) -> date:
    """Return the day since when a price is valid. One without a date is older than any other."""
    return date.min if as_of == UNDATED else first_day(as_of)


def latest_prices(
    entries: Sequence[Entry],
    get_offer: Callable[[Entry], object],
    get_as_of: Callable[[Entry], str],
    day: date | None = None,
) -> list[Entry]:
    """Return the prices that were in force on a day: of each offer, the latest one until that day.

    An offer is what a price is for, such as a model of a provider in a region. A file may keep old
    prices of an offer, so that old results can be priced as they were. Of prices of one offer from
    January, March and June, for example, the one from March was in force in April.

    The order of the prices stays. Several prices of one offer and date are all returned.

    Args:
        entries: The prices.
        get_offer: Returns the offer of a price.
        get_as_of: Returns the date of a price, as its file states it.
        day: The day. None stands for the latest price of all.
    """

    def start_of(entry: Entry) -> date:
        return valid_since(get_as_of(entry))

    started = [entry for entry in entries if day is None or start_of(entry) <= day]
    latest_start_by_offer: dict[object, date] = {}
    for entry in sorted(started, key=start_of):
        # A later price of the offer replaces this date.
        latest_start_by_offer[get_offer(entry)] = start_of(entry)

    return [
        entry for entry in started if start_of(entry) == latest_start_by_offer[get_offer(entry)]
    ]


def find_duplicates(
    entries: Sequence[Entry],
    get_offer: Callable[[Entry], object],
    get_as_of: Callable[[Entry], str],
) -> Iterator[tuple[Entry, Entry]]:
    """Find the prices that contradict an earlier one, because offer and day are the same.

    Args:
        entries: The prices in the order of their file.
        get_offer: Returns the offer of a price, which is what it is for.
        get_as_of: Returns the date of a price, as its file states it.

    Yields:
        Each such price, together with the first one of the same offer and day.
    """
    first_by_offer_and_day: dict[tuple[object, date], Entry] = {}
    for entry in entries:
        offer_and_day = (get_offer(entry), valid_since(get_as_of(entry)))
        if offer_and_day in first_by_offer_and_day:
            yield entry, first_by_offer_and_day[offer_and_day]
        else:
            first_by_offer_and_day[offer_and_day] = entry


def read_prices(
    path: str | os.PathLike[str], *, provider: str | None = None
) -> dict[str, TokenPrice]:
    """Return the price of each model in a price file, such as the one for `loadgen cost --prices`.

    Only the entries of `per_token:` are read. If the file has prices of several dates for the same
    provider, model and conditions, the latest is used. A file whose name does not end in .json
    needs PyYAML.

    Args:
        path: The file.
        provider: The provider whose prices are used if several sell a model of one name.

    Raises:
        WrongUse: The file cannot be read, `loadgen cost` would refuse it, it has no such price, or
            it has two for one model. The message names the key.
    """
    path_text = f"{path}"
    prices = [entry.price for entry in _read_entries(Path(path), path_text)]
    if provider is not None:
        prices = [price for price in prices if price.provider == provider]

    current_prices = latest_prices(
        prices, get_offer=lambda price: price.offer, get_as_of=lambda price: price.as_of
    )
    if not current_prices:
        of_provider = f" of {provider}" if provider is not None else ""
        message = f"{path_text} has no price per token{of_provider}"
        raise WrongUse("no_price", message, _EXAMPLE_HINT)

    price_by_model = _index_by_model(current_prices, path_text)

    # An application computes with floats, and the file has decimal numbers.
    return {model: _token_price(price) for model, price in price_by_model.items()}


def _index_by_model(prices: Sequence[PerToken], path_text: str) -> dict[str, PerToken]:
    """Return the prices by the name of their model.

    Args:
        prices: The prices.
        path_text: The path of their file, with which the message of an error begins.

    Raises:
        WrongUse: Two prices are for models of the same name.
    """
    price_by_model: dict[str, PerToken] = {}
    for price in prices:
        if price.model in price_by_model:
            raise _ambiguous_model(path_text, first=price_by_model[price.model], second=price)
        price_by_model[price.model] = price
    return price_by_model


class _FileEntry(NamedTuple):
    """A price and its position in the list of the file, from 0."""

    position: int
    price: PerToken


def _read_entries(path: Path, path_text: str) -> list[_FileEntry]:
    """Return the prices in a file, after all checks that `loadgen cost` makes.

    Args:
        path: The file.
        path_text: The path as the caller has written it. The message of each error begins with it.

    Raises:
        WrongUse: The file cannot be read, or has a mistake. The message names the key.
    """
    content = _decode_file(path, path_text)
    if not isinstance(content, Mapping):
        message = f"{path_text}: the top level must be a mapping (key: value)"
        raise WrongUse("wrong_type", message, _EXAMPLE_HINT)

    raw_entries = _raw_entries(content, path_text)
    if "currency" not in content:
        raise WrongUse("missing_key", f'{path_text}: missing "currency"', _EXAMPLE_HINT)

    currency = _parse_value(f"{path_text}: currency", parse_currency, content["currency"])
    entries = []
    for index, raw_entry in enumerate(raw_entries):
        price = _parse_entry(f"{path_text}: per_token[{index}]", raw_entry, currency)
        entries.append(_FileEntry(index, price))

    _check_duplicates(path_text, entries)
    return entries


def _raw_entries(content: Mapping[str, object], path_text: str) -> Sequence[object]:
    """Return the list `per_token` of a price file as it is, or an empty one if it is missing.

    Raises:
        WrongUse: `per_token` is not a list.
    """
    raw_entries = content.get("per_token") or ()
    if not isinstance(raw_entries, Sequence) or isinstance(raw_entries, str):
        message = f"{path_text}: per_token must be a list"
        raise WrongUse("wrong_type", message, "start each item with a dash")
    return raw_entries


def _check_duplicates(path_text: str, entries: Sequence[_FileEntry]) -> None:
    """Raise WrongUse if two prices are for the same offer and day, since only one can apply."""
    duplicates = find_duplicates(
        entries,
        get_offer=lambda entry: entry.price.offer,
        get_as_of=lambda entry: entry.price.as_of,
    )
    first_pair = next(duplicates, None)
    if first_pair is None:
        return

    duplicate, earlier = first_pair
    price = duplicate.price
    raise WrongUse(
        "duplicate",
        f"{path_text}: per_token[{duplicate.position}]: two prices for {price.model} of "
        f"{price.provider}",
        f"the first is per_token[{earlier.position}]; {DUPLICATE_HINT}",
    )


def _ambiguous_model(path_text: str, first: PerToken, second: PerToken) -> WrongUse:
    """Return the error for two prices of one model, in the order of the file.

    A caller can choose between two providers, but not between two offers of one provider.
    """
    message = (
        f"{path_text} has two prices for {first.model}, of {first.provider} and {second.provider}"
    )
    if first.provider == second.provider:
        hint = (
            "keep one of them, because a call does not state which URL, region or "
            "commitment it pays for"
        )
    else:
        hint = f"read_prices({path_text!r}, provider={second.provider!r})"

    return WrongUse("conflict", message, hint)


def _token_price(price: PerToken) -> TokenPrice:
    """Convert the price of an entry to the one that an application computes with, in floats."""
    long_prompt_price = price.long_prompt_price
    return TokenPrice(
        input=float(price.per_million_input),
        output=float(price.per_million_output),
        cached=_float_or_none(price.per_million_cached),
        currency=price.currency or "",
        cache_write=_float_or_none(price.per_million_cache_write),
        above_prompt_tokens=price.above_prompt_tokens,
        above=None if long_prompt_price is None else _token_price(long_prompt_price),
    )


def _float_or_none(amount: Decimal | None) -> float | None:
    return None if amount is None else float(amount)


def _parse_entry(location: str, raw_entry: object, file_currency: str) -> PerToken:
    """Check one entry of `per_token:` and return its price.

    Args:
        location: The place of the entry in the file, for messages: "prices.yaml: per_token[0]".
        raw_entry: The entry as the file has it.
        file_currency: The currency of the file, for an entry that does not name its own.

    Raises:
        WrongUse: The entry has a mistake.
    """
    if not isinstance(raw_entry, Mapping):
        message = f"{location} must be a mapping (key: value)"
        raise WrongUse("wrong_type", message, _EXAMPLE_HINT)

    _check_keys(location, raw_entry)
    values: dict[str, Any] = {"currency": file_currency}
    for field in msgspec.structs.fields(PerToken):
        key = field.name
        if key not in raw_entry:
            if field.required:
                raise WrongUse("missing_key", f'{location}: missing "{key}"', _EXAMPLE_HINT)
            continue

        raw_value = raw_entry[key]
        if not _is_left_empty(field, raw_value):
            values[key] = _parse_value(f"{location}.{key}", FIELD_PARSERS[key], raw_value)

    price = PerToken(**values)
    _check_entry(location, price)
    return price


def _is_left_empty(field: msgspec.structs.FieldInfo, value: object) -> bool:
    """Return True if an optional key has no value in the file, as in `region:`.

    Such a key counts as missing. Without a value, any other key is a mistake.
    """
    return value is None and field.default is None


def _check_keys(location: str, raw_entry: Mapping[str, object]) -> None:
    """Raise WrongUse if an entry has an unknown key. The hint names a known one that is meant."""
    for key in raw_entry:
        if key not in FIELD_PARSERS:
            hint = f"known: {', '.join(FIELD_PARSERS)}"
            synonym = PerToken.synonyms.get(key)
            if synonym:
                hint = f'did you mean "{synonym}"? {hint}'
            raise WrongUse("unknown_key", f'{location}.{key}: unknown key "{key}"', hint)


def _check_entry(location: str, price: PerToken) -> None:
    """Raise WrongUse for keys that do not fit together, future dates and implausible amounts.

    Args:
        location: The place of the entry in the file, for messages: "prices.yaml: per_token[0]".
        price: The price that the entry states.
    """
    try:
        check_tiers(price)
    except WrongUse as error:
        raise _error_at(location, error) from None

    future_date = find_future_date(price.as_of, date.today())
    if future_date is not None:
        raise _error_at(f"{location}.as_of:", future_date)

    for key, plausible_range in PLAUSIBLE_RANGES.items():
        amount = getattr(price, key)
        if amount is None:
            continue
        implausible = find_implausible_amount(amount, plausible_range, price.currency or "")
        if implausible is not None:
            raise _error_at(f"{location}.{key}:", implausible)


def _error_at(location: str, error: WrongUse) -> WrongUse:
    """Return an error whose message begins with its place in the file.

    For example, "is not a date" becomes "prices.yaml: per_token[0].as_of is not a date".
    """
    return WrongUse(error.code, f"{location} {error.message}", error.hint or _EXAMPLE_HINT)


def _parse_value(location: str, parse: Callable[[object], ParsedT], value: object) -> ParsedT:
    """Parse the value of a key of the file.

    Args:
        location: The place of the value in the file, such as "prices.yaml: per_token[0].as_of".
        parse: The parser of the key. Its error says only what is wrong, such as "is not a date".
        value: The value as the file has it.

    Raises:
        WrongUse: The parser refuses the value. The message also has the place and the value.
    """
    try:
        return parse(value)
    except WrongUse as error:
        is_short_value = isinstance(value, str | int | float) and value != ""
        subject = f'{location}: "{value}"' if is_short_value else location
        raise _error_at(subject, error) from None


def _decode_file(path: Path, path_text: str) -> Any:
    """Return the content of a JSON or YAML file. Raises WrongUse."""
    try:
        content = path.read_bytes()
    except OSError as error:
        message = f"{path_text}: {error.strerror}"
        raise WrongUse("unreadable_file", message, _EXAMPLE_HINT) from None
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(content)
        return msgspec.yaml.decode(content)
    except ImportError:
        message = f"reading {path_text} needs the package PyYAML"
        raise WrongUse("not_installed", message, "pip install pyyaml") from None
    except (msgspec.MsgspecError, ValueError) as error:
        message = f"{path_text}: {' '.join(str(error).split())}"
        raise WrongUse("invalid_value", message, _EXAMPLE_HINT) from None
