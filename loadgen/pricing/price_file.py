"""Reads and checks a price file (prices.yaml).

All errors are reported at once, each with file:line:column.

Nothing is guessed: there is no default price, exchange rate or date.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from loadgen_sdk.price_file import (
    DUPLICATE_HINT,
    PLAUSIBLE_RANGES,
    PerToken,
    PlausibleRange,
    find_duplicates,
    find_future_date,
    find_implausible_amount,
    latest_prices,
)
from msgspec.structs import replace

from loadgen.core.errors import Code, CombinedError, LoadgenError, Place, UserError
from loadgen.core.workload.diagnostics import locate, sort_errors, validate_document
from loadgen.core.workload.file_models import FileContext
from loadgen.core.workload.workload_files import read_yaml_text
from loadgen.core.workload.yaml_marks import Map, child_path, read_yaml
from loadgen.prices import parse_price_option
from loadgen.pricing.prices import (
    NOT_VERIFIED,
    Energy,
    ExchangeRate,
    Owned,
    Price,
    PriceDocument,
    Prices,
    Rented,
)

KeyPath = tuple[str | int, ...]
"""The keys and indexes that lead to a value of the file, such as ("rented", 0, "per_hour")."""

SAMPLE = Path(__file__).parent.parent / "data" / "prices_sample.yaml"
EXAMPLE = "docs/prices.example.yaml"

GPU_HOUR_RANGE = PlausibleRange(Decimal("0.05"), Decimal(200), "per_gpu_hour", "a GPU-hour")
CAPITAL_RANGE = PlausibleRange(
    Decimal(500), Decimal(1_000_000), "capital_per_gpu", "a GPU's part of the capital"
)
KILOWATT_HOUR_RANGE = PlausibleRange(Decimal("0.001"), Decimal(5), "per_kwh", "a kilowatt-hour")
"""Plausible amounts in dollars and similar currencies."""

_MONEY_KEYS = (
    *PLAUSIBLE_RANGES,
    "per_hour",
    "per_gpu_hour",
    "capital",
    "storage_per_month",
    "support_per_month",
)


def load_prices(
    path: Path | None,
    *,
    accept_sample: bool = False,
    currency: str | None = None,
    today: date | None = None,
    as_of: date | None = None,
    env: Mapping[str, str] = os.environ,
) -> Prices:
    """Return the prices of a price file or another source of `--prices`.

    Args:
        path: The file, or NAME:WHAT of a plug-in. None for the packaged sample.
        accept_sample: True to accept prices that are a sample, not an offer.
        currency: The currency to convert all amounts to, by default that of the file.
        today: The day after which dates are in the future, by default today.
        as_of: The day at which prices must have been valid. Of several prices of one offer the
            latest up to this day counts, or without a day the latest.
        env: The environment, for variables that the file names.

    Raises:
        CombinedError: The file has errors.
        UserError: A sample was not accepted, or no price is left.
    """
    if path is None and not accept_sample:
        raise UserError(
            "missing_option",
            "no prices are given",
            "--prices",
            f"--prices FILE, like {EXAMPLE}, or --accept-sample-prices for example prices",
        )

    label = "prices_sample.yaml (shipped)" if path is None else str(path)
    text = parse_price_option(str(path or SAMPLE)).read()
    return parse_prices(
        text,
        label,
        accept_sample=accept_sample,
        currency=currency,
        today=today,
        as_of=as_of,
        env=env,
    )


def read_price_file(file: str) -> str:
    """Return the text of a price file.

    Raises:
        UserError: The file cannot be read.
    """
    return read_yaml_text(
        Path(file), file, "price file", lambda: f"written like {EXAMPLE}", f"like {EXAMPLE}"
    )


def parse_prices(
    text: str,
    label: str,
    *,
    accept_sample: bool = False,
    currency: str | None = None,
    today: date | None = None,
    as_of: date | None = None,
    env: Mapping[str, str] = os.environ,
) -> Prices:
    """Parse and check the text of a price file, and return its prices in one currency.

    All errors of the file are reported at once, each with its line. `label` names the file in
    messages. See `load_prices` for the other arguments and for the errors that are raised.
    """
    document, errors = _parse_document(text, label, env)
    if document.sample and not accept_sample:
        errors.add_error(
            "sample_prices",
            "the prices are examples, not an offer",
            ("sample",),
            "enter your own prices, or use --accept-sample-prices",
        )

    _check_consistency(document, errors, today or date.today())
    errors.raise_if_any()

    target_currency = currency or document.currency
    _check_currency_code(target_currency)
    latest = _select_latest_prices(_locate_prices(document), as_of)
    conversion = _convert_prices(document, latest, errors, target_currency)
    _check_plausibility(conversion.prices, errors, target_currency)
    errors.raise_if_any()

    if not conversion.prices:
        raise UserError(
            "no_price",
            "the file has no prices",
            errors.locate(()),
            f"rented:, owned: or per_token:, like {EXAMPLE}",
        )

    names = _create_unique_names([located.price for located in conversion.prices])
    entries: list[Price] = []

    locations: dict[str, str] = {}
    exchange_rate_by_price: dict[str, str] = {}
    for located, name in zip(conversion.prices, names, strict=True):
        entries.append(_replace_fields(located.price, name=name))
        locations[name] = str(errors.locate(located.key_path))
        rate_text = conversion.rate_text_by_key_path.get(located.key_path)
        if rate_text is not None:
            exchange_rate_by_price[name] = rate_text

    return Prices(
        file=label,
        currency=target_currency,
        sample=document.sample,
        notes=" ".join(document.notes.split()),
        entries=tuple(entries),
        locations=locations,
        exchanged=tuple(dict.fromkeys(conversion.rate_text_by_key_path.values())),
        exchange_rate_by_price=exchange_rate_by_price,
    )


def _check_currency_code(currency: str) -> None:
    """Raise UserError for a value of `--currency` that cannot be an ISO 4217 code."""
    if not re.fullmatch(r"[A-Z]{3}", currency):
        raise UserError(
            "invalid_value",
            f'"{currency}" must be a currency code',
            "--currency",
            "three capital letters, like USD",
        )


class LocatedPrice(NamedTuple):
    """A price and the keys that lead to it in the file, such as ("rented", 0)."""

    key_path: tuple[str, int]
    price: Price

    @property
    def offer(self) -> tuple[str, ...]:
        """What identifies an offer: provider, product, region and commitment.

        A file may have several prices of one offer, but only one for each day.
        """
        price = self.price
        if isinstance(price, PerToken):
            return price.offer

        return (
            price.provider.lower(),
            price.gpu.lower(),
            price.shape,
            price.region.lower(),
            price.commitment.lower(),
        )

    @property
    def product(self) -> str:
        """The product, as error messages name it."""
        return self.offer[2] or self.offer[1]

    @property
    def as_of(self) -> str:
        """The day, month or year at which the price was valid."""
        return self.price.as_of


class _DocumentErrors:
    """Collects the errors of a price file, each with the line and column of its key.

    Args:
        document: The file as parsed YAML, which knows where each key stands.
        label: The file, as messages name it.
        errors: The errors that were found before.
    """

    def __init__(self, document: Map, label: str, errors: list[LoadgenError]) -> None:
        self._document = document
        self._label = label
        self._errors = errors

    def add_error(self, code: Code, problem: str, key_path: KeyPath, hint: str) -> None:
        """Add an error at the place that the keys lead to."""
        self._errors.append(UserError(code, problem, self.locate(key_path), hint))

    def locate(self, key_path: KeyPath) -> Place:
        """Return the place that the keys lead to: file, line and column."""
        return locate(self._document, key_path).place(self._label)

    def find_line(self, key_path: KeyPath) -> int:
        """Return the line that the keys lead to."""
        return self.locate(key_path).line

    def raise_if_any(self) -> None:
        """Raise CombinedError if there are errors."""
        if self._errors:
            raise CombinedError(sort_errors(self._errors))


def _parse_document(
    text: str, label: str, env: Mapping[str, str]
) -> tuple[PriceDocument, _DocumentErrors]:
    """Parse the YAML of a price file and validate each of its keys.

    Returns the document, and the errors that did not prevent its validation, to which later checks
    add theirs.

    Raises CombinedError if the document does not have the form of a price file.
    """
    yaml_document, yaml_errors = read_yaml(
        text, label, env, kind="price file", example=f"like {EXAMPLE}"
    )
    context = FileContext(file=label, directory=Path(), errors=yaml_errors)
    document = validate_document(PriceDocument, yaml_document, context)
    if document is None:
        raise CombinedError(sort_errors([_with_example(error) for error in context.errors]))

    return document, _DocumentErrors(yaml_document, label, context.errors)


def _with_example(error: LoadgenError) -> LoadgenError:
    """Return the error with a hint at the example, if it has no hint of its own."""
    if error.hint:
        return error
    return UserError(
        error.code, error.message, error.place or error.where, f"like {EXAMPLE}", key=error.key
    )


def _locate_prices(document: PriceDocument) -> list[LocatedPrice]:
    """Return all prices of a document with the keys that lead to them, such as ("rented", 0)."""
    prices_by_key: dict[str, Sequence[Price]] = {
        "rented": document.rented,
        "owned": document.owned,
        "per_token": document.per_token,
    }
    return [
        LocatedPrice((key, index), price)
        for key, prices in prices_by_key.items()
        for index, price in enumerate(prices)
    ]


def _select_latest_prices(
    located_prices: Sequence[LocatedPrice], as_of: date | None
) -> list[LocatedPrice]:
    """Return the one price of each offer that applies: the latest, or the latest up to a day.

    A file may keep old prices of an offer, such as 2.10 per hour since January and 1.95 since June,
    so that old results can be priced as they were.

    Args:
        located_prices: All prices of the file.
        as_of: The day of `--as-of`, or None to use the latest prices.

    Raises:
        UserError: There are prices, but none was valid at that day.
    """
    latest = latest_prices(
        located_prices,
        lambda located: located.offer,
        lambda located: located.as_of,
        as_of,
    )
    if not latest and as_of is not None and located_prices:
        raise UserError(
            "no_price",
            f"no price in the file was valid on {as_of}",
            f"--as-of {as_of}",
            "add a price with an earlier as_of, or use a later day",
        )

    return latest


def _check_consistency(document: PriceDocument, errors: _DocumentErrors, today: date) -> None:
    """Add errors that concern several keys or several prices.

    The validation of single keys cannot find them. They are dates in the future, keys that exclude
    or need each other, and repeated offers and names.
    """
    located_prices = _locate_prices(document)
    _check_dates(document, located_prices, errors, today)

    for located in located_prices:
        price = located.price
        if isinstance(price, Rented):
            _check_rented_price(price, located.key_path, errors)
        if isinstance(price, Rented | Owned) and price.energy is not None:
            _check_energy(price, price.energy, (*located.key_path, "energy"), errors)

    _check_repeated_offers(located_prices, errors)
    _check_repeated_names(located_prices, errors)


def _check_dates(
    document: PriceDocument,
    located_prices: Sequence[LocatedPrice],
    errors: _DocumentErrors,
    today: date,
) -> None:
    """Add an error for each exchange rate and each price with a date in the future."""
    dates: list[tuple[KeyPath, str]] = []
    for index, exchange_rate in enumerate(document.exchange):
        dates.append((("exchange", index), exchange_rate.as_of))

    dates += [(located.key_path, located.as_of) for located in located_prices]
    for key_path, as_of in dates:
        error = find_future_date(as_of, today)
        if error is not None:
            errors.add_error(error.code, error.message, (*key_path, "as_of"), error.hint)


def _check_repeated_offers(located_prices: Sequence[LocatedPrice], errors: _DocumentErrors) -> None:
    """Add an error for each price whose offer already has a price of the same day.

    Which of them is right cannot be known, so the user has to remove one.
    """
    duplicates = find_duplicates(
        located_prices, lambda located: located.offer, lambda located: located.as_of
    )
    for repeated, first in duplicates:
        errors.add_error(
            "duplicate",
            f"two prices for {repeated.product} of {repeated.price.provider}",
            repeated.key_path,
            f"the first is on line {errors.find_line(first.key_path)}; {DUPLICATE_HINT}",
        )


def _check_repeated_names(located_prices: Sequence[LocatedPrice], errors: _DocumentErrors) -> None:
    """Add an error for each price whose name an earlier price of another offer has.

    `--price DIR=NAME` could mean both of them. Prices of one offer at different days may share a
    name, because only the latest of them is used.
    """
    first_by_name: dict[str, LocatedPrice] = {}
    for located in located_prices:
        name = located.price.name
        if not name:
            continue

        first = first_by_name.get(name)
        if first is None:
            first_by_name[name] = located
        elif first.offer != located.offer:
            errors.add_error(
                "duplicate",
                f'two prices have the name "{name}"',
                (*located.key_path, "name"),
                f"the first is on line {errors.find_line(first.key_path)}",
            )


def _check_rented_price(price: Rented, key_path: KeyPath, errors: _DocumentErrors) -> None:
    """Add errors for keys of a rented machine that exclude or need each other.

    The hourly price must be clear: either of a machine with a known number of GPUs, or of one GPU.
    An entry of the quality "not verified" may lack it, because its purpose is to record that no
    price could be verified.
    """
    if price.per_hour is not None and price.per_gpu_hour is not None:
        errors.add_error(
            "conflict",
            "per_hour and per_gpu_hour are both given",
            (*key_path, "per_gpu_hour"),
            "keep the one in the source",
        )

    if price.per_hour is None and price.per_gpu_hour is None and price.quality != NOT_VERIFIED:
        errors.add_error(
            "no_price",
            f"no price for {price.shape or price.gpu}",
            key_path,
            "add per_hour (whole machine) or per_gpu_hour (one GPU)",
        )

    if price.per_hour is not None and price.gpus is None:
        errors.add_error(
            "missing_key",
            "per_hour without gpus",
            (*key_path, "per_hour"),
            "add gpus, the number of GPUs of the machine",
        )

    if price.energy is not None and price.gpus is None:
        errors.add_error(
            "missing_key",
            "energy without gpus",
            (*key_path, "energy"),
            "add gpus, the number of GPUs of the machine, because watts are per machine",
        )


def _check_energy(
    price: Rented | Owned, energy: Energy, key_path: KeyPath, errors: _DocumentErrors
) -> None:
    """Add errors for keys of `energy` by which power would be paid twice or not at all.

    The key `counted` says who pays for power: "included" in the price, "hourly" at full power, or
    "by_load" as much as the load needs. The other keys have to fit this choice.
    """
    if isinstance(price, Owned) and energy.counted == "included":
        errors.add_error(
            "conflict",
            "capital does not include power",
            (*key_path, "counted"),
            "use counted: hourly (watts at all hours) or by_load (idle_watts at all hours, the "
            "rest with the load)",
        )

    if energy.counted == "included" and energy.per_kwh is not None:
        errors.add_error(
            "conflict",
            "power that the price includes would be paid twice",
            (*key_path, "per_kwh"),
            "remove per_kwh, or use counted: hourly or by_load if power is billed separately",
        )

    if energy.counted != "included" and energy.per_kwh is None:
        errors.add_error(
            "missing_key",
            "power is paid, but per_kwh is missing",
            key_path,
            "add per_kwh, the price of a kilowatt-hour",
        )

    if energy.counted == "by_load" and energy.idle_watts is None:
        errors.add_error(
            "missing_key",
            "power is counted by load, but idle_watts is missing",
            key_path,
            "add idle_watts, the power of an idle machine",
        )

    if energy.idle_watts is not None and energy.idle_watts > energy.watts:
        errors.add_error(
            "out_of_range",
            "idle_watts is more than watts",
            (*key_path, "idle_watts"),
            "watts is the power under load, idle_watts that of an idle machine",
        )


class _Conversion(NamedTuple):
    """Prices in one currency, and the exchange rates that they were converted with.

    Attributes:
        prices: The prices.
        rate_text_by_key_path: The exchange rate of each converted price, as text.
    """

    prices: list[LocatedPrice]
    rate_text_by_key_path: dict[tuple[str, int], str]


def _convert_prices(
    document: PriceDocument,
    located_prices: Sequence[LocatedPrice],
    errors: _DocumentErrors,
    currency: str,
) -> _Conversion:
    """Return the prices with all amounts in one currency.

    The document must have an exchange rate for each other currency. If one is missing, an error is
    added and the price is left out.
    """
    exchange_rates = _collect_exchange_rates(document, errors)
    converted: list[LocatedPrice] = []

    rate_text_by_key_path: dict[tuple[str, int], str] = {}
    for located in located_prices:
        price_currency = located.price.currency or document.currency
        if price_currency == currency:
            converted.append(located)
            continue

        exchange = exchange_rates.get((price_currency, currency))
        if exchange is None:
            errors.add_error(
                "no_exchange_rate",
                f"no exchange rate from {price_currency} to {currency}",
                (*located.key_path, "currency"),
                f"exchange: [{{from: {price_currency}, to: {currency}, rate: ..., as_of: ..., "
                "source: ...}]",
            )
            continue

        rate_text_by_key_path[located.key_path] = (
            f"1 {price_currency} = {exchange.rate} {currency} "
            f"(as of {exchange.as_of}, {exchange.source})"
        )
        converted_price = _multiply_amounts(located.price, exchange.rate)
        converted.append(LocatedPrice(located.key_path, converted_price))

    return _Conversion(converted, rate_text_by_key_path)


def _collect_exchange_rates(
    document: PriceDocument, errors: _DocumentErrors
) -> dict[tuple[str, str], ExchangeRate]:
    """Return the exchange rates by the pair of currencies that they convert from and to.

    An error is added for each further rate between the same currencies.
    """
    rates: dict[tuple[str, str], ExchangeRate] = {}
    for index, rate in enumerate(document.exchange):
        currencies = (rate.from_, rate.to)
        if currencies in rates:
            problem = f"two rates from {rate.from_} to {rate.to}"
            errors.add_error("duplicate", problem, ("exchange", index), "keep one")
        else:
            rates[currencies] = rate

    return rates


def _multiply_amounts(price: Price, rate: Decimal) -> Price:
    """Return the price with every amount of money multiplied by an exchange rate."""
    changes: dict[str, Any] = {}
    for key in _MONEY_KEYS:
        amount = getattr(price, key, None)
        if amount is not None:
            changes[key] = amount * rate

    energy = None if isinstance(price, PerToken) else price.energy
    if energy is not None and energy.per_kwh is not None:
        changes["energy"] = energy.model_copy(update={"per_kwh": energy.per_kwh * rate})

    return _replace_fields(price, **changes)


def _replace_fields(price: Price, **changes: Any) -> Price:
    """Return a copy of a price with other values. Prices are msgspec or pydantic models."""
    if isinstance(price, PerToken):
        return replace(price, **changes)
    return price.model_copy(update=changes)


class _Amount(NamedTuple):
    """An amount of money of a price, its keys, and the range in which it is plausible."""

    key_path: tuple[str, ...]
    value: Decimal
    plausible_range: PlausibleRange


def _check_plausibility(
    located_prices: Sequence[LocatedPrice], errors: _DocumentErrors, currency: str
) -> None:
    """Add an error for each amount that is probably a mistake, such as cents instead of dollars."""
    for located in located_prices:
        for amount in _list_amounts_to_check(located.price):
            error = find_implausible_amount(amount.value, amount.plausible_range, currency)
            if error is not None:
                key_path: KeyPath = (*located.key_path, *amount.key_path)
                errors.add_error(error.code, error.message, key_path, error.hint)


def _list_amounts_to_check(price: Price) -> Iterator[_Amount]:
    """Yield the amounts of a price whose plausibility can be checked.

    The ranges for machines are per GPU, so amounts of whole machines are divided by their GPUs. The
    quotient is rounded because error messages show it.
    """
    if isinstance(price, Rented):
        yield from _list_rental_amounts_to_check(price)

    if isinstance(price, Owned):
        capital_per_gpu = round(price.capital / price.gpus, 2)
        yield _Amount(("capital",), capital_per_gpu, CAPITAL_RANGE)

    energy = None if isinstance(price, PerToken) else price.energy
    if energy is not None and energy.per_kwh is not None:
        yield _Amount(("energy", "per_kwh"), energy.per_kwh, KILOWATT_HOUR_RANGE)

    for key, plausible_range in PLAUSIBLE_RANGES.items():
        # The SDK has ranges for keys of all kinds of price. This price may lack some of them.
        amount = getattr(price, key, None)
        if amount is not None:
            yield _Amount((key,), amount, plausible_range)


def _list_rental_amounts_to_check(price: Rented) -> Iterator[_Amount]:
    """Yield the hourly price of a rented machine, per GPU."""
    if price.per_gpu_hour is not None:
        yield _Amount(("per_gpu_hour",), price.per_gpu_hour, GPU_HOUR_RANGE)
    if price.per_hour is not None and price.gpus is not None:
        cost_per_gpu_hour = round(price.per_hour / price.gpus, 6)
        yield _Amount(("per_hour",), cost_per_gpu_hour, GPU_HOUR_RANGE)


def _create_unique_names(prices: Sequence[Price]) -> list[str]:
    """Return a unique name for each price, by which `--price DIR=NAME` can choose it.

    A price without a name in the file gets one from its provider, product, region and commitment.
    A repeated name gets the index of the price as a suffix.
    """
    names: list[str] = []
    for index, price in enumerate(prices):
        name = price.name
        if not name:
            product = price.model if isinstance(price, PerToken) else price.shape or price.gpu
            parts = (price.provider, product, price.region, price.commitment)
            name = " ".join(part for part in parts if part)

        if name in names:
            name = child_path(name, index)

        names.append(name)

    return names
