"""What requests cost, for machines: CSV and JSON, documented in docs/cost.md.

Pure: a `Comparison` in, a string out. Amounts are decimal digits for one unit, in JSON as strings; nothing is a binary
float.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from loadgen.cost.comparison import OfferComparison
from loadgen.cost.prices import Owned, Rented
from loadgen.cost.unit_cost import UNITS, Offer

CSV_HEAD = (
    *("offer", "unit", "part", "amount", "currency", "low", "high", "basis", "comparable", "valid", "simulated"),
    *("sample_prices", "price", "as_of", "source"),
)


def render_csv(comparison: OfferComparison) -> str:
    """One line per offer, unit and part (the total among them), amounts per one unit, unrounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for offer, differs in zip(comparison.offers, comparison.against_first, strict=True):
        shared = (offer.basis.label, _yes(not differs), _yes(offer.evidence.valid), _yes(offer.evidence.simulated))
        price = (_yes(comparison.prices.sample), offer.price.name, offer.price.as_of, offer.price.source)
        for unit in UNITS:
            cost = offer.costs[unit]
            if cost is None:
                continue
            ends = ("" if end is None else f"{end:f}" for end in (cost.low, cost.high))
            total = ("total", f"{cost.total:f}", comparison.prices.currency, *ends)
            writer.writerow((offer.name, unit, *total, *shared, *price))
            for part, amount in cost.parts.items():
                one = (part, f"{amount:f}", comparison.prices.currency, "", "")
                writer.writerow((offer.name, unit, *one, *shared, *price))
    return out.getvalue()


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def render_json(comparison: OfferComparison) -> str:
    """Everything, documented in docs/cost.md. Amounts are strings of decimal digits per one unit."""
    prices = comparison.prices
    whole = {
        "schema": 1,
        "currency": prices.currency,
        "prices": {"file": prices.file, "sample": prices.sample, "exchanged": list(prices.exchanged)},
        "compared_by": comparison.unit,
        "offers": [
            _offer_json(offer, differs)
            for offer, differs in zip(comparison.offers, comparison.against_first, strict=True)
        ],
        "pairs": [
            {
                "a": pair.a,
                "b": pair.b,
                "differences": list(pair.differences),
                "notes": list(pair.notes),
                "ratio": _digits(pair.ratio),
                "low": _digits(pair.low),
                "high": _digits(pair.high),
                "judgement": pair.word,
            }
            for pair in comparison.pairs
        ],
        "sensitivity": [
            {
                "offer": swing.offer,
                "input": swing.input,
                "change": swing.change,
                "down": _digits(swing.down),
                "up": _digits(swing.up),
            }
            for swing in comparison.swings
        ],
        "break_even": [
            {
                "rent": one.rent,
                "by_token": one.by_token,
                "per_day": _digits(one.per_day),
                "carries_per_day": _digits(one.carries),
                "judgement": one.word,
            }
            for one in comparison.break_evens
        ],
    }
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _digits(amount: Decimal | None) -> str | None:
    """At most 12 places behind the point."""
    return None if amount is None else f"{round(amount, 12).normalize():f}"


def _offer_json(offer: Offer, differs: Sequence[str]) -> dict[str, Any]:
    price, power = offer.price, offer.power
    kind = "rented" if isinstance(price, Rented) else "owned" if isinstance(price, Owned) else "per_token"
    return {
        "name": offer.name,
        "folder": offer.evidence.folder,
        "basis": offer.basis.label,
        "confidence": offer.basis.confidence,
        "valid": offer.evidence.valid,
        "simulated": offer.evidence.simulated,
        "not_comparable_with_first": list(differs),
        "notes": list(offer.notes),
        "price": {
            "name": price.name,
            "kind": kind,
            "provider": price.provider,
            "as_of": price.as_of,
            "source": price.source,
            "quality": price.quality,
            "commitment": price.commitment,
        },
        "gpus_paid": _digits(offer.gpus_paid),
        "utilization": _digits(offer.utilization),
        "hourly": {part: _digits(amount) for part, amount in offer.hourly.items()},
        "rates_per_s": {unit: _digits(rate) for unit, rate in offer.basis.rates.items()},
        "costs": {
            unit: None
            if cost is None
            else {
                "total": _digits(cost.total),
                "low": _digits(cost.low),
                "high": _digits(cost.high),
                "parts": {part: _digits(amount) for part, amount in cost.parts.items()},
            }
            for unit, cost in offer.costs.items()
        },
        "power": None
        if power is None
        else {
            "watts": _digits(power.watts),
            "joules_per_output_token": _digits(power.joules_per_output_token),
            "output_tokens_per_s_per_mw": _digits(power.output_tokens_per_s_per_mw),
            "kwh": {unit: _digits(kwh) for unit, kwh in power.kwh.items()},
        },
    }
