"""Compute the cost of a thousand good requests in a run from a price file."""

from __future__ import annotations

from decimal import Decimal

from msgspec.structs import replace

from loadgen.contracts.evaluate import CostEstimate
from loadgen.contracts.recorded_run import RecordedRun
from loadgen.core.errors import UserError
from loadgen.core.stats.intervals import Interval
from loadgen.pricing.cost_basis import CostBasis, compute_cost_basis
from loadgen.pricing.evidence import Evidence
from loadgen.pricing.prices import Price, Prices, find_prices
from loadgen.pricing.unit_cost import compute_unit_cost
from loadgen.pricing.units import GOOD

REQUESTS_PER_COST = 1000
"""The number of good requests that a cost is for."""

MAX_RATE_RATIO = 1e6
"""The largest ratio of a rate to the low end of its interval.

An interval may begin at 0. A cost is a price per hour divided by a rate, so it would be infinite.
"""


def compute_cost_per_thousand(
    prices: Prices, run: RecordedRun, good_rate: Interval
) -> CostEstimate:
    """Return the cost of a thousand good requests, with the interval that their rate implies.

    If several prices fit the target of the run, it is the highest cost, so that a limit on the cost
    holds for all of them.

    Args:
        prices: The price file of the contract.
        run: The run whose target is paid for.
        good_rate: The good requests per second in the run, above 0, with a confidence interval.

    Raises:
        UserError: No price fits the target, or its number of GPUs is not known.
    """
    basis = _build_cost_basis(run, good_rate)
    fitting_prices = find_prices(prices, run.summary.target)
    costs = [_compute_cost_at_price(basis, price, run) for price in fitting_prices]
    highest_cost = max(costs, key=lambda interval: (interval.value, interval.low, interval.high))
    return CostEstimate(highest_cost, prices.currency)


def _compute_cost_at_price(basis: CostBasis, price: Price, run: RecordedRun) -> Interval:
    """Return the cost of a thousand good requests at one price, with its interval.

    Args:
        basis: The measured quantities from which the cost is computed.
        price: A price that fits the target of the run.
        run: The run.

    Raises:
        UserError: The number of GPUs of the target is not known.
    """
    unit_cost = compute_unit_cost(basis, price, run.summary.target.gpus, GOOD)

    # The rate of good requests is known, so only the number of GPUs can be missing.
    if unit_cost is None or unit_cost.low is None or unit_cost.high is None:
        text = "the number of GPUs is not known"
        raise UserError("missing_option", text, run.folder, "--gpus 8")

    return Interval(
        value=float(unit_cost.total * REQUESTS_PER_COST),
        low=float(unit_cost.low * REQUESTS_PER_COST),
        high=float(unit_cost.high * REQUESTS_PER_COST),
    )


def _build_cost_basis(run: RecordedRun, good_rate: Interval) -> CostBasis:
    """Return the measured quantities of a run from which its cost is computed.

    Such a cost basis has the rates per second and the token counts of one run. Here the rate of
    good requests is replaced by the one that the contract estimated from the steady state of all
    runs. The ends of its interval are stored relative to the rate, such as 0.9 and 1.1.

    Args:
        run: The run whose target is paid for.
        good_rate: The good requests per second, above 0, with a confidence interval.
    """
    evidence = Evidence(name=run.folder, folder=run.folder, summaries=(run.summary,))
    basis_of_run = compute_cost_basis(evidence)

    # The interval may begin at 0, which would make the cost infinite.
    low_rate = max(good_rate.low, good_rate.value / MAX_RATE_RATIO)
    rate = _to_decimal(good_rate.value)
    return replace(
        basis_of_run,
        rates={**basis_of_run.rates, GOOD: rate},
        relative_low=_to_decimal(low_rate) / rate,
        relative_high=_to_decimal(good_rate.high) / rate,
    )


def _to_decimal(number: float) -> Decimal:
    """Return a float as a decimal with the digits that it is printed with, not its binary ones."""
    return Decimal(repr(number))
