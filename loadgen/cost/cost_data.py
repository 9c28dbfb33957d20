"""Renders a comparison of costs as CSV and JSON for other programs.

Pure. Amounts are for one unit, in decimal digits (strings in JSON), and never pass through a binary
float. docs/reference/prices.md documents the formats.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from decimal import Decimal

from loadgen.core import format
from loadgen.core.results.manifest import ReasonCode
from loadgen.cost.break_even import BreakEven
from loadgen.cost.commitments import CommitmentComparison
from loadgen.cost.comparability import has_lower_bound
from loadgen.cost.comparison import CostComparison, CostRatio
from loadgen.cost.sensitivity import Sensitivity
from loadgen.cost.yearly_cost import compute_yearly_cost
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Owned, Price, Rented
from loadgen.pricing.reasons import render_notes
from loadgen.pricing.unit_cost import UnitCost
from loadgen.pricing.units import UNITS

DECIMAL_PLACES = 12

CSV_COLUMNS = (
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
    "sample_prices",
    "price",
    "as_of",
    "source",
    "region",
    "notes",
)


def render_csv(comparison: CostComparison) -> str:
    """Return the costs as CSV, with a line for each total and for each part of it.

    Each line repeats what it needs to be read alone, such as the price and its source, because
    lines are often filtered or sorted in a spreadsheet.
    """
    output = io.StringIO()
    writer = csv.DictWriter(output, CSV_COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()

    for result, differences in zip(
        comparison.results, comparison.differences_from_first, strict=True
    ):
        columns_of_result = {
            "offer": result.name,
            "currency": comparison.prices.currency,
            "basis": result.basis.label,
            "comparable": _yes_or_no(not differences),
            "valid": _yes_or_no(result.evidence.is_valid),
            "simulated": _yes_or_no(result.evidence.is_simulated),
            "sample_prices": _yes_or_no(comparison.prices.sample),
            "price": result.price.name,
            "as_of": result.price.as_of,
            "source": result.price.source,
            "region": result.evidence.summary.target.region,
            "notes": "; ".join(result.notes),
        }
        for unit in UNITS:
            cost = result.costs[unit]
            if cost is None:
                continue

            columns_of_unit = {**columns_of_result, "unit": unit}
            writer.writerow(
                {
                    **columns_of_unit,
                    "part": "total",
                    "amount": f"{cost.total:f}",
                    "low": "" if cost.low is None else f"{cost.low:f}",
                    "high": "" if cost.high is None else f"{cost.high:f}",
                }
            )

            for part, amount in cost.parts.items():
                writer.writerow({**columns_of_unit, "part": part, "amount": f"{amount:f}"})

    return output.getvalue()


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def render_json(comparison: CostComparison) -> str:
    """Return the whole comparison as JSON.

    The keys are documented and do not change with the names of fields, so some differ from them,
    such as "judgement" for `judgment`.
    """
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
            _result_to_json(result, differences)
            for result, differences in zip(
                comparison.results, comparison.differences_from_first, strict=True
            )
        ],
        "pairs": [_ratio_to_json(ratio) for ratio in comparison.ratios],
        "sensitivity": [
            _sensitivity_to_json(sensitivity) for sensitivity in comparison.sensitivities
        ],
        "break_even": [_break_even_to_json(break_even) for break_even in comparison.break_evens],
        "commitments": [_commitment_to_json(commitment) for commitment in comparison.commitments],
    }
    return format.document(document).decode()


def _ratio_to_json(ratio: CostRatio) -> dict[str, object]:
    """Return the comparison of two costs under its documented keys."""
    return {
        **_select_fields(ratio, "a", "b", "differences", "difference_codes", "notes"),
        **_select_fields(ratio, "note_codes", "ratio", "low", "high"),
        "judgement": ratio.judgment,
    }


def _sensitivity_to_json(sensitivity: Sensitivity) -> dict[str, object]:
    """Return a sensitivity under its documented keys."""
    return {
        "offer": sensitivity.result_name,
        "input": sensitivity.input_name,
        "change": sensitivity.change,
        "down": _to_json_value(sensitivity.cost_with_lower_input),
        "up": _to_json_value(sensitivity.cost_with_higher_input),
    }


def _break_even_to_json(break_even: BreakEven) -> dict[str, object]:
    """Return a break-even under its documented keys."""
    return {
        "rent": break_even.machines,
        "by_token": break_even.per_token,
        "per_day": _to_json_value(break_even.units_per_day),
        "carries_per_day": _to_json_value(break_even.capacity_per_day),
        "judgement": break_even.judgment,
    }


def _commitment_to_json(commitment: CommitmentComparison) -> dict[str, object]:
    """Return the comparison with a commitment under its documented keys."""
    return {
        "committed": commitment.committed,
        "given_back": commitment.on_demand,
        "hours_share": _to_json_value(commitment.hours_share),
        "judgement": commitment.judgment,
    }


def _select_fields(value: object, *names: str) -> dict[str, object]:
    """Return some fields of an object by their names, as JSON values."""
    return {name: _to_json_value(getattr(value, name)) for name in names}


def _to_json_value(value: object) -> object:
    """Convert amounts of money in a value, also in nested ones, to strings that JSON can hold.

    A `Decimal` becomes a string of digits without an exponent, because a JSON number would be read
    as a binary float. It has 12 decimal places, or 12 significant digits if it is below 1. Mappings
    and tuples are converted item by item, and other values are returned as they are.
    """
    if isinstance(value, Mapping):
        return {key: _to_json_value(item) for key, item in value.items()}

    if isinstance(value, Decimal):
        # `adjusted` returns the exponent of the first digit, such as -3 for 0.001.
        places = max(DECIMAL_PLACES, DECIMAL_PLACES - 1 - value.adjusted())
        return f"{round(value, places).normalize():f}"

    if isinstance(value, tuple):
        return [_to_json_value(item) for item in value]

    return value


def _result_to_json(result: PricedResult, differences: Sequence[ReasonCode]) -> dict[str, object]:
    """Return everything about one result as JSON values: its price, its costs and its notes.

    Args:
        result: The result.
        differences: The differences that forbid comparing it with the first result.
    """
    yearly_cost = compute_yearly_cost(result)
    return {
        "name": result.name,
        "folder": result.evidence.folder,
        "basis": result.basis.label,
        "confidence": result.basis.confidence,
        "valid": result.evidence.is_valid,
        "simulated": result.evidence.is_simulated,
        "region": result.evidence.summary.target.region,
        "not_comparable_with_first": render_notes(differences),
        "not_comparable_codes": differences,
        **_select_fields(result, "notes", "note_codes"),
        "lower_bound": has_lower_bound(result),
        "price": _price_to_json(result.price),
        **_select_fields(result, "gpus", "gpus_paid", "utilization"),
        "hourly": _to_json_value(result.hourly_cost_parts),
        "rates_per_s": _to_json_value(result.basis.rates),
        "costs": _costs_to_json(result.costs),
        "classes": {
            name: {
                **_select_fields(class_cost, "tokens_share"),
                "costs": _costs_to_json(class_cost.costs),
            }
            for name, class_cost in result.class_costs.items()
        },
        "steps": {
            name: {
                **_select_fields(step, "per_task", "code"),
                "why": step.reason,
                "price": None if step.price is None else step.price.name,
            }
            for name, step in result.step_costs.items()
        },
        "power": _declared_power_to_json(result),
        "by_year": (
            None if yearly_cost is None else _select_fields(yearly_cost, "paid", "total", "present")
        ),
        "measured_energy": _measured_energy_to_json(result),
    }


def _price_to_json(price: Price) -> dict[str, object]:
    """Return what identifies a price, as JSON values. Its amounts are in the costs already."""
    if isinstance(price, Rented):
        kind = "rented"
    elif isinstance(price, Owned):
        kind = "owned"
    else:
        kind = "per_token"
    return {
        "name": price.name,
        "kind": kind,
        **_select_fields(price, "provider", "as_of", "source", "quality", "commitment", "region"),
        **_select_fields(price, "egress_per_gb"),
    }


def _costs_to_json(costs: Mapping[str, UnitCost | None]) -> dict[str, object]:
    """Return the cost of each unit with its interval and its parts. None without a cost."""
    return {
        unit: None if cost is None else _select_fields(cost, "total", "low", "high", "parts")
        for unit, cost in costs.items()
    }


def _declared_power_to_json(result: PricedResult) -> dict[str, object] | None:
    """Return the power and energy by the price file, or None if it declares no power."""
    if result.declared_power is None:
        return None
    return _select_fields(
        result.declared_power,
        "watts",
        "joules_per_output_token",
        "output_tokens_per_s_per_mw",
        "kwh",
    )


def _measured_energy_to_json(result: PricedResult) -> dict[str, object] | None:
    """Return the energy that the accelerators were measured to use, or None if it was not."""
    if result.measured_energy is None:
        return None
    return _select_fields(
        result.measured_energy,
        "watts",
        "joules_per_output_token",
        "joules_per_request",
        "error",
        "money",
    )
