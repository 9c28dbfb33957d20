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
from loadgen.pricing.prices import Prices, find_prices
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
        good_rate: The good requests per second in the run, with a confidence interval.

    Raises:
        UserError: No price fits the target, or its number of GPUs is not known.
    """
    basis = _build_cost_basis(run, good_rate)
    target = run.summary.target
    costs = []
    for price in find_prices(prices, target):
        cost = compute_unit_cost(basis, price, target.gpus, GOOD)
        if cost is None or cost.low is None or cost.high is None:
            text = "the number of GPUs is not known"
            raise UserError("missing_option", text, run.folder, "--gpus 8")
        costs.append(
            Interval(
                value=float(cost.total * REQUESTS_PER_COST),
                low=float(cost.low * REQUESTS_PER_COST),
                high=float(cost.high * REQUESTS_PER_COST),
            )
        )
    highest_cost = max(costs, key=lambda interval: (interval.value, interval.low, interval.high))
    return CostEstimate(highest_cost, prices.currency)


def _build_cost_basis(run: RecordedRun, good_rate: Interval) -> CostBasis:
    """Return the measured quantities of a run that a cost is computed from.

    The rate of good requests and its interval are replaced by those of the contract, which are
    estimated from the steady state of all runs. A cost basis stores the ends of an interval
    relative to the rate, such as 0.9 and 1.1.
    """
    evidence = Evidence(name=run.folder, folder=run.folder, summaries=(run.summary,))
    basis = compute_cost_basis(evidence)
    rate = _to_decimal(good_rate.value)
    low_rate = max(good_rate.low, good_rate.value / MAX_RATE_RATIO)
    return replace(
        basis,
        rates={**basis.rates, GOOD: rate},
        relative_low=_to_decimal(low_rate) / rate,
        relative_high=_to_decimal(good_rate.high) / rate,
    )


def _to_decimal(number: float) -> Decimal:
    """Return a float as a decimal with the digits that it is printed with, not its binary ones."""
    return Decimal(repr(number))
