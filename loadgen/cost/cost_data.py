"""What requests cost, as CSV and JSON for other programs; the formats are documented in docs/cost.md.

Pure: takes an `OfferComparison`, returns a string. Amounts are for one unit, in decimal digits (strings in JSON), and
never pass through a binary float.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from loadgen.core import format
from loadgen.core.results.manifest import ReasonCode
from loadgen.cost.by_year import by_year
from loadgen.cost.comparison import OfferComparison, has_lower_bound
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Owned, Rented
from loadgen.pricing.reasons import texts
from loadgen.pricing.units import UNITS

CSV_HEAD = (
    *(
        "offer",
        "unit",
        "part",
        "amount",
        "currency",
        "low",
        "high",
        "basis",
        "comparable",
        "valid",
        "simulated",
    ),
    *("sample_prices", "price", "as_of", "source", "region", "notes"),
)

OF_A_PAIR = (
    "a",
    "b",
    "differences",
    "difference_codes",
    "notes",
    "note_codes",
    "ratio",
    "low",
    "high",
)


def render_csv(comparison: OfferComparison) -> str:
    """CSV with one line per offer, unit and part, and one for the total. Amounts are for one unit and not rounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for offer, differences in zip(comparison.offers, comparison.against_first, strict=True):
        shared = (
            offer.basis.label,
            _yes(not differences),
            _yes(offer.evidence.valid),
            _yes(offer.evidence.simulated),
        )
        dated = (offer.price.name, offer.price.as_of, offer.price.source)
        price = (
            _yes(comparison.prices.sample),
            *dated,
            offer.evidence.summary.target.region,
            "; ".join(offer.notes),
        )
        for unit in UNITS:
            cost = offer.costs[unit]
            if cost is None:
                continue
            bounds = ("" if bound is None else f"{bound:f}" for bound in (cost.low, cost.high))
            total = ("total", f"{cost.total:f}", comparison.prices.currency, *bounds)
            writer.writerow((offer.name, unit, *total, *shared, *price))
            for part, amount in cost.parts.items():
                part_cells = (part, f"{amount:f}", comparison.prices.currency, "", "")
                writer.writerow((offer.name, unit, *part_cells, *shared, *price))
    return out.getvalue()


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def render_json(comparison: OfferComparison) -> str:
    """The whole comparison as JSON (see docs/cost.md). Amounts are for one unit, as strings of decimal digits."""
    prices = comparison.prices
    document = {
        "schema": 1,
        "currency": prices.currency,
        "prices": {
            "file": prices.file,
            "sample": prices.sample,
            "exchanged": list(prices.exchanged),
        },
        "compared_by": comparison.unit,
        "offers": [
            _offer_json(offer, differences)
            for offer, differences in zip(comparison.offers, comparison.against_first, strict=True)
        ],
        "pairs": [_fields(pair, *OF_A_PAIR, judgement="word") for pair in comparison.pairs],
        "sensitivity": [
            _fields(swing, "offer", "input", "change", "down", "up") for swing in comparison.swings
        ],
        "break_even": [
            _fields(
                break_even,
                "rent",
                "by_token",
                "per_day",
                carries_per_day="carries",
                judgement="word",
            )
            for break_even in comparison.break_evens
        ],
        "commitments": [
            _fields(one, "committed", "given_back", "hours_share", judgement="word")
            for one in comparison.commitments
        ],
    }
    return format.document(document).decode()


def _fields(value: object, *names: str, **renamed: str) -> dict[str, Any]:
    """Fields of a value as JSON, amounts as digits; `renamed`: name in the document -> name of the field."""
    sources = {name: name for name in names} | renamed
    return {name: _plain(getattr(value, source)) for name, source in sources.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(
        value, Decimal
    ):  # 12 decimal places, of a small number 12 digits, without an exponent
        return f"{round(value, max(12, 11 - value.adjusted())).normalize():f}"
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def _offer_json(offer: PricedResult, differences: Sequence[ReasonCode]) -> dict[str, Any]:
    price, power = offer.price, offer.power
    kind = (
        "rented"
        if isinstance(price, Rented)
        else "owned"
        if isinstance(price, Owned)
        else "per_token"
    )
    return {
        "name": offer.name,
        "folder": offer.evidence.folder,
        "basis": offer.basis.label,
        "confidence": offer.basis.confidence,
        "valid": offer.evidence.valid,
        "simulated": offer.evidence.simulated,
        "region": offer.evidence.summary.target.region,
        "not_comparable_with_first": texts(differences),
        "not_comparable_codes": differences,
        **_fields(offer, "notes", "note_codes"),
        "lower_bound": has_lower_bound(
            offer
        ),  # then costs are at most these; why is among the notes
        "price": {
            "name": price.name,
            "kind": kind,
            **_fields(
                price,
                "provider",
                "as_of",
                "source",
                "quality",
                "commitment",
                "region",
                "egress_per_gb",
            ),
        },
        **_fields(offer, "gpus", "gpus_paid", "utilization", "hourly"),
        "rates_per_s": _plain(offer.basis.rates),
        "costs": {
            unit: None if cost is None else _fields(cost, "total", "low", "high", "parts")
            for unit, cost in offer.costs.items()
        },
        "classes": {
            name: {
                **_fields(part, "tokens_share"),
                "costs": {
                    unit: None if cost is None else _fields(cost, "total", "low", "high", "parts")
                    for unit, cost in part.costs.items()
                },
            }
            for name, part in offer.classes.items()
        },
        "steps": {
            name: {
                **_fields(step, "per_task", "why", "code"),
                "price": None if step.price is None else step.price.name,
            }
            for name, step in offer.steps.items()
        },
        "power": None
        if power is None
        else _fields(
            power, "watts", "joules_per_output_token", "output_tokens_per_s_per_mw", "kwh"
        ),
        "by_year": None
        if (years := by_year(offer)) is None
        else _fields(years, "paid", "total", "present"),
        "measured_energy": None
        if offer.measured is None
        else _fields(
            offer.measured,
            "watts",
            "joules_per_output_token",
            "joules_per_request",
            "error",
            "money",
        ),
    }
