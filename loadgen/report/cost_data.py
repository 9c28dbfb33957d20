"""What requests cost, as CSV and JSON for other programs; the formats are documented in docs/cost.md.

Pure: takes an `OfferComparison`, returns a string. Amounts are for one unit, in decimal digits (strings in JSON), and
never pass through a binary float.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from loadgen.cost.comparison import OfferComparison, has_lower_bound
from loadgen.cost.prices import Owned, Rented
from loadgen.cost.unit_cost import UNITS, Offer

CSV_HEAD = (
    *("offer", "unit", "part", "amount", "currency", "low", "high", "basis", "comparable", "valid", "simulated"),
    *("sample_prices", "price", "as_of", "source", "region", "notes"),
)


def render_csv(comparison: OfferComparison) -> str:
    """CSV with one line per offer, unit and part, and one for the total. Amounts are for one unit and not rounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for offer, differences in zip(comparison.offers, comparison.against_first, strict=True):
        shared = (offer.basis.label, _yes(not differences), _yes(offer.evidence.valid), _yes(offer.evidence.simulated))
        dated = (offer.price.name, offer.price.as_of, offer.price.source)
        price = (_yes(comparison.prices.sample), *dated, offer.evidence.summary.target.region, "; ".join(offer.notes))
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
        "prices": {"file": prices.file, "sample": prices.sample, "exchanged": list(prices.exchanged)},
        "compared_by": comparison.unit,
        "offers": [
            _offer_json(offer, differences)
            for offer, differences in zip(comparison.offers, comparison.against_first, strict=True)
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
                "rent": break_even.rent,
                "by_token": break_even.by_token,
                "per_day": _digits(break_even.per_day),
                "carries_per_day": _digits(break_even.carries),
                "judgement": break_even.word,
            }
            for break_even in comparison.break_evens
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _digits(amount: Decimal | None) -> str | None:
    """Decimal digits with at most 12 decimal places, without an exponent; None stays None."""
    return None if amount is None else f"{round(amount, 12).normalize():f}"


def _offer_json(offer: Offer, differences: Sequence[str]) -> dict[str, Any]:
    price, power = offer.price, offer.power
    kind = "rented" if isinstance(price, Rented) else "owned" if isinstance(price, Owned) else "per_token"
    return {
        "name": offer.name,
        "folder": offer.evidence.folder,
        "basis": offer.basis.label,
        "confidence": offer.basis.confidence,
        "valid": offer.evidence.valid,
        "simulated": offer.evidence.simulated,
        "region": offer.evidence.summary.target.region,
        "not_comparable_with_first": list(differences),
        "notes": list(offer.notes),
        "lower_bound": has_lower_bound(offer),  # then costs are at most these; why is among the notes
        "price": {
            "name": price.name,
            "kind": kind,
            "provider": price.provider,
            "as_of": price.as_of,
            "source": price.source,
            "quality": price.quality,
            "commitment": price.commitment,
            "region": price.region,
            "egress_per_gb": _digits(price.egress_per_gb),
        },
        "gpus": offer.gpus,
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
