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
from loadgen.core.workload.yaml_marks import Map, child_path, place_at, read_yaml
from loadgen.prices import parse_price_option
from loadgen.pricing.prices import (
    NOT_VERIFIED,
    Energy,
    ExchangeRate,
    Owned,
    Price,
    Prices,
    Rented,
    WrittenPrices,
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
    """Return the prices in the text of a price file. `label` names the file in messages.

    See `load_prices` for the other arguments and for the errors that are raised.
    """
    written, file = _parse_document(text, label, env)
    if written.sample and not accept_sample:
        file.add_error(
            "sample_prices",
            "the prices are examples, not an offer",
            ("sample",),
            "enter your own prices, or use --accept-sample-prices",
        )
    _check_consistency(written, file, today or date.today())
    file.raise_errors()
    target_currency = currency or written.currency
    if not re.fullmatch(r"[A-Z]{3}", target_currency):
        raise UserError(
            "invalid_value",
            f'"{target_currency}" must be a currency code',
            "--currency",
            "three capital letters, like USD",
        )
    latest = _latest_prices(_located_prices(written), as_of)
    converted, exchange_texts = _convert_prices(written, latest, file, target_currency)
    _check_plausibility(converted, file, target_currency)
    file.raise_errors()
    if not converted:
        raise UserError(
            "no_price",
            "the file has no prices",
            file.place(()),
            f"rented:, owned: or per_token:, like {EXAMPLE}",
        )
    names = _unique_names([located.price for located in converted])
    return Prices(
        file=label,
        currency=target_currency,
        sample=written.sample,
        notes=" ".join(written.notes.split()),
        entries=tuple(
            _replace_fields(located.price, name=name)
            for located, name in zip(converted, names, strict=True)
        ),
        locations={
            name: str(file.place(located.keys))
            for located, name in zip(converted, names, strict=True)
        },
        exchanged=exchange_texts,
    )


class LocatedPrice(NamedTuple):
    """A price and the keys that lead to it in the file."""

    keys: tuple[str, int]
    price: Price

    @property
    def offer(self) -> tuple[str, ...]:
        """What must be unique among prices of one day: provider, product, region and commitment."""
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


class _CheckedFile:
    """The document of a price file and the errors found in it so far."""

    def __init__(self, document: Map, label: str, errors: list[LoadgenError]) -> None:
        self._document = document
        self._label = label
        self._errors = errors

    def add_error(self, code: Code, problem: str, keys: KeyPath, hint: str) -> None:
        """Remember an error at the place that the keys lead to."""
        self._errors.append(UserError(code, problem, self.place(keys), hint))

    def place(self, keys: KeyPath) -> Place:
        """Return the place that the keys lead to."""
        location = locate(self._document, keys)
        return place_at(self._label, location[0], location[1])

    def line(self, keys: KeyPath) -> int:
        """Return the line that the keys lead to."""
        return self.place(keys).line

    def raise_errors(self) -> None:
        """Raise CombinedError if there are errors."""
        if self._errors:
            raise CombinedError(sort_errors(self._errors))


def _parse_document(
    text: str, label: str, env: Mapping[str, str]
) -> tuple[WrittenPrices, _CheckedFile]:
    """Return the validated document and the file with the errors that did not prevent validation.

    Raises CombinedError if the document does not have the form of a price file.
    """
    document, errors = read_yaml(text, label, env, kind="price file", smallest=f"like {EXAMPLE}")
    context = FileContext(file=label, directory=Path(), errors=errors)
    written = validate_document(WrittenPrices, document, context)
    if written is None:
        raise CombinedError(sort_errors([_with_example(error) for error in context.errors]))
    return written, _CheckedFile(document, label, context.errors)


def _with_example(error: LoadgenError) -> LoadgenError:
    """Return the error with a hint at the example, if it has no hint of its own."""
    if error.hint:
        return error
    return UserError(
        error.code, error.what, error.place or error.where, f"like {EXAMPLE}", key=error.key
    )


def _located_prices(written: WrittenPrices) -> list[LocatedPrice]:
    """Return all prices of a file, each with its place, such as ("rented", 0)."""
    prices_by_key: dict[str, Sequence[Price]] = {
        "rented": written.rented,
        "owned": written.owned,
        "per_token": written.per_token,
    }
    return [
        LocatedPrice((key, index), price)
        for key, prices in prices_by_key.items()
        for index, price in enumerate(prices)
    ]


def _latest_prices(
    located_prices: Sequence[LocatedPrice], as_of: date | None
) -> list[LocatedPrice]:
    """Return the latest price of each offer, of those that were valid at a day if one is given.

    A file may keep old prices of an offer, such as 2.10 per hour since January and 1.95 since June,
    so that old results can be priced as they were.

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


def _check_consistency(written: WrittenPrices, file: _CheckedFile, today: date) -> None:
    """Add errors that concern several keys, which the check of single keys cannot find.

    They are dates in the future, keys that exclude or need each other, and repeated offers
    and names.
    """
    located = _located_prices(written)
    dates: list[tuple[KeyPath, str]] = [
        (("exchange", index), rate.as_of) for index, rate in enumerate(written.exchange)
    ]
    dates += [(entry.keys, entry.as_of) for entry in located]
    for keys, as_of in dates:
        date_error = find_future_date(as_of, today)
        if date_error is not None:
            file.add_error(date_error.code, date_error.message, (*keys, "as_of"), date_error.hint)
    for keys, price in located:
        if isinstance(price, Rented):
            _check_rented(price, keys, file)
        if isinstance(price, Rented | Owned) and price.energy is not None:
            _check_energy(price, price.energy, (*keys, "energy"), file)
    _check_repeated_offers(located, file)
    _check_repeated_names(located, file)


def _check_repeated_offers(located: Sequence[LocatedPrice], file: _CheckedFile) -> None:
    """Add an error for each price whose offer already has a price of the same day.

    Which of them is right cannot be known, so the user has to remove one.
    """
    repeated = find_duplicates(located, lambda entry: entry.offer, lambda entry: entry.as_of)
    for entry, first in repeated:
        file.add_error(
            "duplicate",
            f"two prices for {entry.product} of {entry.price.provider}",
            entry.keys,
            f"the first is on line {file.line(first.keys)}; {DUPLICATE_HINT}",
        )


def _check_repeated_names(located: Sequence[LocatedPrice], file: _CheckedFile) -> None:
    """Add an error for each name that more than one offer has.

    `--price DIR=NAME` could mean both of them. Prices of one offer at different days may share a
    name, because only the latest of them is used.
    """
    first_by_name: dict[str, LocatedPrice] = {}
    for entry in located:
        name = entry.price.name
        if not name:
            continue
        first = first_by_name.setdefault(name, entry)
        if first.offer != entry.offer:
            file.add_error(
                "duplicate",
                f'two prices have the name "{name}"',
                (*entry.keys, "name"),
                f"the first is on line {file.line(first.keys)}",
            )


def _check_rented(price: Rented, keys: KeyPath, file: _CheckedFile) -> None:
    """Add errors for keys of a rented machine that exclude or need each other.

    The hourly price must be clear: either of a machine with a known number of GPUs, or of one GPU.
    An entry of the quality "not verified" may lack it, because it records that nobody has verified
    one.
    """
    if price.per_hour is not None and price.per_gpu_hour is not None:
        file.add_error(
            "conflict",
            "per_hour and per_gpu_hour are both given",
            (*keys, "per_gpu_hour"),
            "keep the one in the source",
        )
    if price.per_hour is None and price.per_gpu_hour is None and price.quality != NOT_VERIFIED:
        file.add_error(
            "no_price",
            f"no price for {price.shape or price.gpu}",
            keys,
            "add per_hour (whole machine) or per_gpu_hour (one GPU)",
        )
    if price.per_hour is not None and price.gpus is None:
        file.add_error(
            "missing_key",
            "per_hour without gpus",
            (*keys, "per_hour"),
            "add gpus, the number of GPUs of the machine",
        )
    if price.energy is not None and price.gpus is None:
        file.add_error(
            "missing_key",
            "energy without gpus",
            (*keys, "energy"),
            "add gpus, the number of GPUs of the machine, because watts are per machine",
        )


def _check_energy(price: Rented | Owned, energy: Energy, keys: KeyPath, file: _CheckedFile) -> None:
    """Add errors for keys of `energy` by which power would be paid twice or not at all."""
    if isinstance(price, Owned) and energy.counted == "included":
        file.add_error(
            "conflict",
            "capital does not include power",
            (*keys, "counted"),
            "use counted: hourly (watts at all hours) or by_load (idle_watts at all hours, the "
            "rest with the load)",
        )
    if energy.counted == "included" and energy.per_kwh is not None:
        file.add_error(
            "conflict",
            "power that the price includes would be paid twice",
            (*keys, "per_kwh"),
            "remove per_kwh, or use counted: hourly or by_load if power is billed separately",
        )
    if energy.counted != "included" and energy.per_kwh is None:
        file.add_error(
            "missing_key",
            "power is paid, but per_kwh is missing",
            keys,
            "add per_kwh, the price of a kilowatt-hour",
        )
    if energy.counted == "by_load" and energy.idle_watts is None:
        file.add_error(
            "missing_key",
            "counted: by_load needs idle_watts",
            keys,
            "add idle_watts, the power of an idle machine",
        )
    if energy.idle_watts is not None and energy.idle_watts > energy.watts:
        file.add_error(
            "out_of_range",
            "idle_watts is more than watts",
            (*keys, "idle_watts"),
            "watts is the power under load, idle_watts that of an idle machine",
        )


def _convert_prices(
    written: WrittenPrices, located: Sequence[LocatedPrice], file: _CheckedFile, currency: str
) -> tuple[list[LocatedPrice], tuple[str, ...]]:
    """Return the prices in one currency, and the exchange rates that were used as text.

    Each price in another currency needs its own exchange rate in the file. If the rate is missing,
    an error is added and the price is left out.
    """
    rates = _exchange_rates(written, file)
    converted: list[LocatedPrice] = []
    rate_texts: list[str] = []
    for entry in located:
        price_currency = entry.price.currency or written.currency
        if price_currency == currency:
            converted.append(entry)
            continue
        exchange = rates.get((price_currency, currency))
        if exchange is None:
            file.add_error(
                "no_exchange_rate",
                f"no exchange rate from {price_currency} to {currency}",
                (*entry.keys, "currency"),
                f"exchange: [{{from: {price_currency}, to: {currency}, rate: ..., as_of: ..., "
                "source: ...}]",
            )
            continue
        rate_text = (
            f"1 {price_currency} = {exchange.rate} {currency} "
            f"(as of {exchange.as_of}, {exchange.source})"
        )
        if rate_text not in rate_texts:
            rate_texts.append(rate_text)
        converted.append(LocatedPrice(entry.keys, _multiply_amounts(entry.price, exchange.rate)))
    return converted, tuple(rate_texts)


def _exchange_rates(
    written: WrittenPrices, file: _CheckedFile
) -> dict[tuple[str, str], ExchangeRate]:
    """Return the exchange rates by the currencies they convert from and to."""
    rates: dict[tuple[str, str], ExchangeRate] = {}
    for index, rate in enumerate(written.exchange):
        first = rates.setdefault((rate.from_, rate.to), rate)
        if first is not rate:
            problem = f"two rates from {rate.from_} to {rate.to}"
            file.add_error("duplicate", problem, ("exchange", index), "keep one")
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
    """An amount of money of a price, and the range in which it is plausible."""

    keys: tuple[str, ...]
    value: Decimal
    plausible_range: PlausibleRange


def _check_plausibility(located: Sequence[LocatedPrice], file: _CheckedFile, currency: str) -> None:
    """Find amounts that are probably a mistake, such as cents instead of dollars."""
    for keys, price in located:
        for amount in _amounts_to_check(price):
            error = find_implausible_amount(amount.value, amount.plausible_range, currency)
            if error is not None:
                file.add_error(error.code, error.message, (*keys, *amount.keys), error.hint)


def _amounts_to_check(price: Price) -> Iterator[_Amount]:
    """Yield the amounts of a price for which a plausible range is known, per GPU where needed.

    The ranges for machines are per GPU, so amounts of whole machines are divided by their GPUs. The
    quotient is rounded because error messages show it.
    """
    if isinstance(price, Rented):
        yield from _rental_amounts_to_check(price)
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


def _rental_amounts_to_check(price: Rented) -> Iterator[_Amount]:
    if price.per_gpu_hour is not None:
        yield _Amount(("per_gpu_hour",), price.per_gpu_hour, GPU_HOUR_RANGE)
    if price.per_hour is not None and price.gpus is not None:
        cost_per_gpu_hour = round(price.per_hour / price.gpus, 6)
        yield _Amount(("per_hour",), cost_per_gpu_hour, GPU_HOUR_RANGE)


def _unique_names(prices: Sequence[Price]) -> list[str]:
    """Return a unique name for each price.

    A price without a name gets one from its provider, product, region and commitment. A repeated
    name gets the index of the price as a suffix.
    """
    names: list[str] = []
    for price in prices:
        product = price.model if isinstance(price, PerToken) else price.shape or price.gpu
        parts = (price.provider, product, price.region, price.commitment)
        name = price.name or " ".join(filter(None, parts))
        names.append(name if name not in names else child_path(name, len(names)))
    return names
