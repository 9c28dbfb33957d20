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
from loadgen.pricing.prices import Owned, Price, Rented
from loadgen.pricing.unit_cost import compute_unit_cost

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
_POWER_INPUTS = {
    "watts": "watts under load",
    "idle_watts": "idle watts",
    "pue": "PUE",
    "per_kwh": "price per kWh",
}
_TOKEN_INPUTS = {
    "input_tokens": "fresh input tokens",
    "output_tokens": "output tokens",
    "cached_tokens": "cached tokens",
}


class Sensitivity(Struct, frozen=True, kw_only=True):
    """The cost of a result when one input alone is lower and higher.

    Attributes:
        offer: Name of the result.
        input: The input, such as "price per hour".
        change: By how much it is changed, such as "±10%".
        down: The cost with the lower input.
        up: The cost with the higher input.
    """

    offer: str
    input: str
    change: str
    down: Decimal
    up: Decimal

    @property
    def width(self) -> Decimal:
        """The difference between both costs."""
        return abs(self.up - self.down)


class _Input(NamedTuple):
    """An input of a cost: its name, and the fields of `PricedResult` that lead to it."""

    name: str
    path: tuple[str, ...]


def compute_sensitivities(result: PricedResult, unit: str) -> list[Sensitivity]:
    """Return the sensitivity of the cost of a unit to each input, the largest first.

    A rate is changed over its interval, and other inputs by 10 %. Inputs without an effect on the
    cost are left out. A higher rate means a lower cost, so `down` is the upper end of the cost.
    """
    cost = result.costs[unit]
    if cost is None:
        return []
    sensitivities = []
    is_per_token = isinstance(result.price, PerToken)
    if not is_per_token and cost.low is not None and cost.high is not None:
        sensitivities.append(
            Sensitivity(
                offer=result.name,
                input="capacity" if result.basis.is_capacity else "measured rate",
                change="its CI",
                down=cost.high,
                up=cost.low,
            )
        )
    for cost_input in _inputs(result):
        down = _cost_with(result, cost_input, 1 - RELATIVE_CHANGE, unit)
        up = _cost_with(result, cost_input, 1 + RELATIVE_CHANGE, unit)
        if down is not None and up is not None:
            sensitivities.append(
                Sensitivity(
                    offer=result.name,
                    input=cost_input.name,
                    change=f"±{RELATIVE_CHANGE:.0%}",
                    down=down,
                    up=up,
                )
            )
    relevant = [sensitivity for sensitivity in sensitivities if sensitivity.width]
    return sorted(relevant, key=lambda sensitivity: sensitivity.width, reverse=True)


def _cost_with(
    result: PricedResult, cost_input: _Input, factor: Decimal, unit: str
) -> Decimal | None:
    """Return the cost of a unit with one input multiplied by a factor."""
    changed: PricedResult = _multiply(result, cost_input.path, factor)
    cost = compute_unit_cost(changed.basis, changed.price, changed.gpus, unit, changed.utilization)
    return None if cost is None else cost.total


def _inputs(result: PricedResult) -> Iterator[_Input]:
    """Yield the inputs of a result that are changed by 10 %.

    A rate with an interval is not among them, because it is changed over its interval. Neither are
    keys that the price leaves out, and power that the price includes.
    """
    price = result.price
    if isinstance(price, PerToken):
        for token_field, name in _TOKEN_INPUTS.items():
            yield _Input(name, ("basis", token_field))
    elif result.basis.relative_low is None:
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


def _multiply(value: Any, path: tuple[str, ...], factor: Decimal) -> Any:
    """Return a copy of a value with the field at the end of a path multiplied by a factor.

    The path ("price", "energy", "pue") leads from a result to the PUE of its price. Each level of
    the recursion copies one object, because all of them are immutable.

    Values stay possible: PUE is at least 1, utilization at most 1, and idle power at most the power
    under load.
    """
    if isinstance(value, dict):
        # The rates by unit are one input: they all change together.
        return {unit: None if rate is None else rate * factor for unit, rate in value.items()}
    if not path:
        return value * factor
    field = path[0]
    remaining_path = path[1:]
    changed = _multiply(getattr(value, field), remaining_path, factor)
    match field:
        case "pue":
            changed = max(changed, Decimal(1))
        case "utilization":
            changed = min(changed, Decimal(1))
        case "idle_watts":
            changed = min(changed, value.watts)
        case "watts":
            changed = max(changed, value.idle_watts or Decimal(0))
    if isinstance(value, Part):
        return value.model_copy(update={field: changed})
    return replace(value, **{field: changed})
