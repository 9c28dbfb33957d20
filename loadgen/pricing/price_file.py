"""Reads and checks a price file (prices.yaml): all faults are reported at once, each with file:line:column.

The only module that reads price files. Nothing is guessed: no default price, no exchange rate, no date.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

from loadgen_sdk.price_file import RANGES, TELL_APART, PerToken, absurd, latest, to_come, twice
from msgspec.structs import replace

from loadgen.core.errors import Code, CombinedError, LoadgenError, Place, UserError
from loadgen.core.workload.diagnostics import locate, sort_errors, validate_document
from loadgen.core.workload.file_models import FileContext
from loadgen.core.workload.loading import read_yaml_text
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

Loc = tuple[str | int, ...]
Located = tuple[tuple[str, int], Price]
_Report = Callable[[Code, str, Loc, str], None]  # of a fault: its problem, where, and the hint

SAMPLE = Path(__file__).parent.parent / "data" / "prices_sample.yaml"
EXAMPLE = "docs/prices.example.yaml"

# As the SDK's `RANGES`, of what is derived, or lies deeper in an entry.
GPU_HOUR = (Decimal("0.05"), Decimal(200), "per_gpu_hour", "a GPU-hour")
CAPITAL = (Decimal(500), Decimal(1_000_000), "capital_per_gpu", "a GPU's part of the capital")
KILOWATT_HOUR = (Decimal("0.001"), Decimal(5), "per_kwh", "a kilowatt-hour")


def load_prices(
    path: Path | None,
    *,
    accept_sample: bool = False,
    currency: str | None = None,
    today: date | None = None,
    as_of: date | None = None,
    env: Mapping[str, str] = os.environ,
) -> Prices:
    """The prices of a source (None: the packaged sample), in its own currency or converted to `currency`.

    as_of: those that were valid at this day: of one offer the latest up to it. None: the latest.
    Raises Faults with everything that is wrong, by line, and UserError for a sample that was not accepted.
    """
    file = SAMPLE if path is None else path
    label = "prices_sample.yaml (shipped)" if path is None else str(path)
    if path is None and not accept_sample:
        hint = f"--prices FILE, written like {EXAMPLE}; to see figures from list prices that others have copied: "
        raise UserError(
            "missing_option", "no prices were given", "--prices", hint + "--accept-sample-prices"
        )
    text = parse_price_option(str(file)).read()
    return parse(
        text,
        label,
        accept_sample=accept_sample,
        currency=currency,
        today=today,
        as_of=as_of,
        env=env,
    )


def read_price_file(file: str) -> str:
    """Return the text of a price file. Raises UserError."""
    return read_yaml_text(
        Path(file), file, "price file", lambda: f"written like {EXAMPLE}", f"like {EXAMPLE}"
    )


def parse(
    text: str,
    label: str,
    *,
    accept_sample: bool = False,
    currency: str | None = None,
    today: date | None = None,
    as_of: date | None = None,
    env: Mapping[str, str] = os.environ,
) -> Prices:
    """The prices in the text of a price file, as `load_prices`. Pure but for the defaults of `today` and `env`."""
    document, faults = read_yaml(text, label, env, kind="price file", smallest=f"like {EXAMPLE}")
    source = FileContext(file=label, directory=Path(), faults=faults)
    written = validate_document(WrittenPrices, document, source)
    if written is None:
        raise CombinedError(sort_errors([_with_hint(one) for one in source.faults]))
    faults = source.faults
    if written.sample and not accept_sample:
        hint = "write down what you pay; or --accept-sample-prices, and every figure will say that it rests on a sample"
        faults.append(
            UserError(
                "sample_prices",
                "these prices are a sample, not an offer",
                _place(document, label, ("sample",)),
                hint,
            )
        )
    faults += _consistency_faults(written, document, label, today or date.today())
    if faults:
        raise CombinedError(sort_errors(faults))
    target_currency = currency or written.currency
    if not re.fullmatch(r"[A-Z]{3}", target_currency):
        raise UserError(
            "invalid_value",
            f'"{target_currency}" is not a currency',
            "--currency",
            "three capital letters, like USD",
        )
    located = list(_located_prices(written))
    valid = latest(located, lambda one: _identity(one[1]), lambda one: one[1].as_of, as_of)
    if not valid and as_of is not None and located:
        hint = "an earlier price with its as_of, or a later day"
        raise UserError(
            "no_price", f"no price in the file was valid on {as_of}", f"--as-of {as_of}", hint
        )
    entries, exchange_words, faults = _exchanged(written, valid, document, label, target_currency)
    faults += list(_implausible(entries, document, label, target_currency))
    if faults:
        raise CombinedError(sort_errors(faults))
    names = _names([entry for _, entry in entries])
    named_entries = [
        _with(entry, name=name) for (_, entry), name in zip(entries, names, strict=True)
    ]
    places = {
        name: str(_place(document, label, loc))
        for (loc, _), name in zip(entries, names, strict=True)
    }
    if not named_entries:
        hint = f"rented:, owned: or per_token:, like {EXAMPLE}"
        raise UserError(
            "no_price", "there is no price in the file", place_at(label, document.at, ""), hint
        )
    return Prices(
        file=label,
        currency=target_currency,
        sample=written.sample,
        notes=" ".join(written.notes.split()),
        entries=tuple(named_entries),
        at=places,
        exchanged=exchange_words,
    )


def _with_hint(problem: LoadgenError) -> LoadgenError:
    if problem.hint:
        return problem
    return UserError(
        problem.code,
        problem.what,
        problem.place or problem.where,
        f"like {EXAMPLE}",
        key=problem.key,
    )


def _place(document: Map, label: str, loc: Loc) -> Place:
    position, path, _ = locate(document, loc)
    return place_at(label, position, path)


def _located_prices(written: WrittenPrices) -> Iterator[tuple[tuple[str, int], Price]]:
    for key in ("rented", "owned", "per_token"):
        for index, price in enumerate(getattr(written, key)):
            yield (key, index), price


def _consistency_faults(
    written: WrittenPrices, document: Map, label: str, today: date
) -> list[LoadgenError]:
    """Faults that pydantic cannot see: future dates, keys that exclude each other, one offer priced twice."""
    faults: list[LoadgenError] = []

    def report(code: Code, problem: str, loc: Loc, hint: str) -> None:
        faults.append(UserError(code, problem, _place(document, label, loc), hint))

    dates = [(("exchange", i), rate.as_of) for i, rate in enumerate(written.exchange)]
    for loc, as_of in [*dates, *((loc, price.as_of) for loc, price in _located_prices(written))]:
        if (wrong := to_come(as_of, today)) is not None:
            report(wrong.code, wrong.what, (*loc, "as_of"), wrong.hint)
    for loc, price in _located_prices(written):
        if isinstance(price, Rented):
            _check_rented(price, loc, report)
        if isinstance(price, (Rented, Owned)) and price.energy is not None:
            _check_energy(price, price.energy, loc, report)
    located = list(_located_prices(written))
    for (loc, price), (first, _) in twice(
        located, lambda one: _identity(one[1]), lambda one: one[1].as_of
    ):
        line = locate(document, first)[0].line
        problem = f"two prices for {_identity(price)[2] or _identity(price)[1]}"
        report(
            "duplicate",
            f"{problem} of {price.provider}",
            loc,
            f"the first is on line {line}; {TELL_APART}",
        )
    first_by_name: dict[str, tuple[tuple[str, int], tuple[str, ...]]] = {}
    for loc, price in _located_prices(written):
        first_named, offer = first_by_name.setdefault(price.name, (loc, _identity(price)))
        if price.name and offer != _identity(price):
            line = locate(document, first_named)[0].line
            report(
                "duplicate",
                f'the name "{price.name}" is given twice',
                (*loc, "name"),
                f"the first is on line {line}",
            )
    return faults


def _check_rented(price: Rented, loc: tuple[str, int], report: _Report) -> None:
    if price.per_hour is not None and price.per_gpu_hour is not None:
        report(
            "conflict",
            "per_hour and per_gpu_hour are both given",
            (*loc, "per_gpu_hour"),
            "keep the one that the source says",
        )
    if price.per_hour is None and price.per_gpu_hour is None and price.quality != NOT_VERIFIED:
        hint = "per_hour: of the whole machine, or per_gpu_hour: of one GPU; nothing is guessed"
        report("no_price", f"no price for {price.shape or price.gpu}", loc, hint)
    if price.per_hour is not None and price.gpus is None:
        report(
            "missing_key",
            "per_hour without gpus",
            (*loc, "per_hour"),
            "gpus: how many GPUs the machine has",
        )
    if price.energy is not None and price.gpus is None:
        report(
            "missing_key",
            "energy without gpus",
            (*loc, "energy"),
            "watts are a machine's: gpus: says how many GPUs it has",
        )


def _check_energy(
    price: Rented | Owned, energy: Energy, loc: tuple[str, int], report: _Report
) -> None:
    loc_energy = (*loc, "energy")
    if isinstance(price, Owned) and energy.counted == "included":
        hint = "counted: hourly (all hours at watts), or by_load (idle_watts at all hours, the rest with the load)"
        report("conflict", "capital does not include power", (*loc_energy, "counted"), hint)
    if energy.counted == "included" and energy.per_kwh is not None:
        hint = "leave per_kwh out; or counted: hourly or by_load where power is billed apart"
        report(
            "conflict",
            "power that the price includes would be paid twice",
            (*loc_energy, "per_kwh"),
            hint,
        )
    if energy.counted != "included" and energy.per_kwh is None:
        report(
            "missing_key",
            "power is paid, and per_kwh is missing",
            loc_energy,
            "per_kwh: what a kilowatt-hour costs",
        )
    if energy.counted == "by_load" and energy.idle_watts is None:
        hint = "idle_watts: what the machine draws while it waits"
        report("missing_key", "counted by_load, and idle_watts is missing", loc_energy, hint)
    if energy.idle_watts is not None and energy.idle_watts > energy.watts:
        hint = "watts: under load, idle_watts: while it waits"
        report("out_of_range", "idle_watts is more than watts", (*loc_energy, "idle_watts"), hint)


def _identity(price: Price) -> tuple[str, ...]:
    """The key that must be unique among prices: provider, product, region, commitment."""
    if isinstance(price, PerToken):
        return price.offer
    product = price.gpu.lower(), price.shape
    return (price.provider.lower(), *product, price.region.lower(), price.commitment.lower())


_MONEY = (*RANGES, "per_hour", "per_gpu_hour", "capital", "storage_per_month", "support_per_month")


def _exchanged(
    written: WrittenPrices, located: Sequence[Located], document: Map, label: str, currency: str
) -> tuple[list[Located], tuple[str, ...], list[LoadgenError]]:
    """Every price in `currency`, the rates used in words, and a fault for each price without a rate."""
    faults: list[LoadgenError] = []
    rates: dict[tuple[str, str], ExchangeRate] = {}
    for i, rate in enumerate(written.exchange):
        if rates.setdefault((rate.from_, rate.to), rate) is not rate:
            what, at = (
                f"two rates from {rate.from_} to {rate.to}",
                _place(document, label, ("exchange", i)),
            )
            faults.append(UserError("duplicate", what, at, "keep one"))
    entries: list[Located] = []
    used_rates: dict[str, None] = {}
    for loc, price in located:
        own = price.currency or written.currency
        if own == currency:
            entries.append((loc, price))
            continue
        exchange = rates.get((own, currency))
        if exchange is None:
            at = _place(document, label, (*loc, "currency"))
            hint = f"exchange: [{{from: {own}, to: {currency}, rate: ..., as_of: ..., source: ...}}]; none is invented"
            faults.append(
                UserError(
                    "no_exchange_rate", f"no exchange rate from {own} to {currency}", at, hint
                )
            )
            continue
        used_rates[
            f"1 {own} = {exchange.rate} {currency} (as of {exchange.as_of}, {exchange.source})"
        ] = None
        entries.append((loc, _multiplied(price, exchange.rate)))
    return entries, tuple(used_rates), faults


def _with(price: Price, **changed: Any) -> Price:
    return (
        replace(price, **changed)
        if isinstance(price, PerToken)
        else price.model_copy(update=changed)
    )


def _multiplied(price: Price, rate: Decimal) -> Price:
    changed: dict[str, Any] = {key: getattr(price, key, None) for key in _MONEY}
    changed = {key: value * rate for key, value in changed.items() if value is not None}
    energy = getattr(price, "energy", None)
    if energy is not None and energy.per_kwh is not None:
        changed["energy"] = energy.model_copy(update={"per_kwh": energy.per_kwh * rate})
    return _with(price, **changed)


def _implausible(
    entries: Sequence[Located], document: Map, label: str, currency: str
) -> Iterator[LoadgenError]:
    for loc, price in entries:
        for steps, amount, low, high, unit, noun in _amounts_to_check(price):
            if (wrong := absurd(amount, low, high, unit, noun, currency)) is not None:
                yield UserError(
                    wrong.code, wrong.what, _place(document, label, (*loc, *steps)), wrong.hint
                )


def _amounts_to_check(
    price: Price,
) -> Iterator[tuple[tuple[str, ...], Decimal, Decimal, Decimal, str, str]]:
    if isinstance(price, Rented):
        if price.per_gpu_hour is not None:
            yield ("per_gpu_hour",), price.per_gpu_hour, *GPU_HOUR
        if price.per_hour is not None and price.gpus is not None:
            yield ("per_hour",), round(price.per_hour / price.gpus, 6), *GPU_HOUR
    if isinstance(price, Owned):
        yield ("capital",), round(price.capital / price.gpus, 2), *CAPITAL
    if (
        not isinstance(price, PerToken)
        and price.energy is not None
        and price.energy.per_kwh is not None
    ):
        yield ("energy", "per_kwh"), price.energy.per_kwh, *KILOWATT_HOUR
    for key, limits in RANGES.items():
        if (amount := getattr(price, key, None)) is not None:
            yield (key,), amount, *limits


def _names(prices: Sequence[Price]) -> list[str]:
    """Unique names: the given one, else provider, shape (GPU, model), region, commitment, and a number if needed."""
    names: list[str] = []
    for price in prices:
        product = price.model if isinstance(price, PerToken) else price.shape or price.gpu
        name = price.name or " ".join(
            filter(None, (price.provider, product, price.region, price.commitment))
        )
        names.append(name if name not in names else child_path(name, len(names)))
    return names
