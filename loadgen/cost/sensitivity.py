"""Computes how the cost of a result changes when one of its inputs changes. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from loadgen_sdk.price_file import PerToken
from msgspec import Struct
from msgspec.structs import replace

from loadgen.core.workload.file_models import Part
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Energy, Owned, Price, Rented
from loadgen.pricing.unit_cost import UnitCost, compute_unit_cost

RELATIVE_CHANGE = Decimal("0.1")
"""Change of inputs whose uncertainty is not known."""

_PRICE_INPUTS: dict[type[Price], dict[str, str]] = {
    Rented: {"per_hour": "price per hour", "per_gpu_hour": "price per GPU-hour"},
    Owned: {"capital": "capital", "years": "depreciation period", "staff_share": "staff share"},
    PerToken: {
        "per_million_input": "price of input",
        "per_million_output": "price of output",
        "per_million_cached": "price of cached input",
    },
}
"""The fields of each kind of price that are changed, with their names in the report."""
_POWER_INPUTS = {
    "watts": "watts under load",
    "idle_watts": "idle watts",
    "pue": "PUE",
    "per_kwh": "price per kWh",
}
"""The fields of `prices.Energy` that are changed, with their names in the report."""
_TOKEN_INPUTS = {
    "uncached_input_tokens": "fresh input tokens",
    "output_tokens": "output tokens",
    "cached_tokens": "cached tokens",
}
"""The fields of `CostBasis` that are changed for a price per token, with their names."""


class Sensitivity(Struct, frozen=True, kw_only=True):
    """The cost of a result when one input alone is lower and higher.

    Attributes:
        result_name: Name of the result.
        input_name: The input, such as "price per hour".
        change: By how much it is changed, such as "±10%".
        cost_with_lower_input: The cost if the input is lower. It is the higher cost if the input is
            a rate.
        cost_with_higher_input: The cost if the input is higher.
    """

    result_name: str
    input_name: str
    change: str
    cost_with_lower_input: Decimal
    cost_with_higher_input: Decimal

    @property
    def width(self) -> Decimal:
        """The difference between both costs."""
        return abs(self.cost_with_higher_input - self.cost_with_lower_input)


class _Input(NamedTuple):
    """An input of a cost that is changed to see its effect.

    Attributes:
        name: Its name in the report, such as "PUE".
        field_path: The fields that lead to it from a `PricedResult`, such as ("price", "energy",
            "pue").
    """

    name: str
    field_path: tuple[str, ...]


def compute_sensitivities(result: PricedResult, unit: str) -> list[Sensitivity]:
    """Return how the cost of a unit changes if one input at a time changes, the largest first.

    A rate with a confidence interval is changed over that interval, and every other input by 10 %.
    Inputs without an effect on the cost are left out.
    """
    cost = result.costs[unit]
    if cost is None:
        return []

    sensitivities = []
    rate_sensitivity = _find_rate_sensitivity(result, cost)
    if rate_sensitivity is not None:
        sensitivities.append(rate_sensitivity)

    for cost_input in _list_inputs(result):
        with_lower_input = _compute_cost_with(result, cost_input, 1 - RELATIVE_CHANGE, unit)
        with_higher_input = _compute_cost_with(result, cost_input, 1 + RELATIVE_CHANGE, unit)
        if with_lower_input is not None and with_higher_input is not None:
            sensitivities.append(
                Sensitivity(
                    result_name=result.name,
                    input_name=cost_input.name,
                    change=f"±{RELATIVE_CHANGE:.0%}",
                    cost_with_lower_input=with_lower_input,
                    cost_with_higher_input=with_higher_input,
                )
            )

    with_effect = [sensitivity for sensitivity in sensitivities if sensitivity.width]
    return sorted(with_effect, key=lambda sensitivity: sensitivity.width, reverse=True)


def _find_rate_sensitivity(result: PricedResult, cost: UnitCost) -> Sensitivity | None:
    """Return the sensitivity to the measured rate, or None if the rate has no interval.

    A lower rate means a higher cost, so the cost with the lower rate is the upper end of the cost's
    interval. A price per token does not depend on the rate.
    """
    if isinstance(result.price, PerToken) or cost.low is None or cost.high is None:
        return None
    return Sensitivity(
        result_name=result.name,
        input_name="capacity" if result.basis.is_capacity else "measured rate",
        change="its CI",
        cost_with_lower_input=cost.high,
        cost_with_higher_input=cost.low,
    )


def _compute_cost_with(
    result: PricedResult, cost_input: _Input, factor: Decimal, unit: str
) -> Decimal | None:
    """Return the cost of a unit with one input multiplied by a factor, such as 0.9.

    Returns None if the unit has no cost then.
    """
    changed_result: PricedResult = _scale_field(result, cost_input.field_path, factor)
    cost = compute_unit_cost(
        changed_result.basis,
        changed_result.price,
        changed_result.gpus,
        unit,
        changed_result.utilization,
    )
    return None if cost is None else cost.total


def _list_inputs(result: PricedResult) -> Iterator[_Input]:
    """Yield the inputs of a result that are changed by 10 %.

    These are token counts or the measured rate, the utilization, and the amounts and watts in the
    price. Left out are a rate with an interval, over which it is changed instead, keys that the
    price does not have, and power whose cost the price includes.
    """
    price = result.price
    has_rate_interval = result.basis.relative_low is not None
    if isinstance(price, PerToken):
        for field, name in _TOKEN_INPUTS.items():
            yield _Input(name, ("basis", field))
    elif not has_rate_interval:
        yield _Input("measured rate", ("basis", "rates"))

    if result.utilization != 1:
        yield _Input("utilization", ("utilization",))

    price_inputs = {**_PRICE_INPUTS[type(price)], "egress_per_gb": "price of egress"}
    for field, name in price_inputs.items():
        if getattr(price, field) is not None:
            yield _Input(name, ("price", field))

    energy = None if isinstance(price, PerToken) else price.energy
    if energy is None or energy.counted == "included":
        return

    for field, name in _POWER_INPUTS.items():
        if getattr(energy, field) is not None:
            yield _Input(name, ("price", "energy", field))


def _scale_field(parent: Any, field_path: tuple[str, ...], factor: Decimal) -> Any:
    """Return a copy of an object in which one field, possibly a nested one, is multiplied.

    For example, with the path ("price", "energy", "pue") the result is a copy of a `PricedResult`
    with a copy of its price with a copy of its energy, which has another PUE. The objects are
    copied because they are immutable.

    Args:
        parent: A msgspec struct or a pydantic model.
        field_path: The fields that lead to the number, or to the rates by unit, which are
            multiplied together.
        factor: The factor. The product is limited to values that are possible.
    """
    field = field_path[0]
    nested_path = field_path[1:]

    value = getattr(parent, field)
    if nested_path:
        changed = _scale_field(value, nested_path, factor)
    elif isinstance(value, dict):
        changed = {unit: None if rate is None else rate * factor for unit, rate in value.items()}
    else:
        changed = _limit_to_possible(parent, field, value * factor)

    if isinstance(parent, Part):
        return parent.model_copy(update={field: changed})

    return replace(parent, **{field: changed})


def _limit_to_possible(parent: object, field: str, value: Decimal) -> Decimal:
    """Return a changed value, or the nearest value that the field can have.

    PUE is at least 1, utilization at most 1, and idle power at most the power under load.
    """
    if field == "pue":
        return max(value, Decimal(1))
    if field == "utilization":
        return min(value, Decimal(1))
    if isinstance(parent, Energy) and field == "idle_watts":
        return min(value, parent.watts)
    if isinstance(parent, Energy) and field == "watts":
        return max(value, parent.idle_watts or Decimal(0))

    return value
