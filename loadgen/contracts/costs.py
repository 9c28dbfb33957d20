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
    """Return the cost of a thousand good requests.

    If several prices fit the target of the run, it is the highest cost.

    Args:
        prices: The prices.
        run: The run.
        good_rate: The good requests per second in the run.

    Raises:
        UserError: No price fits the target, or its number of GPUs is not known.
    """
    basis = _basis_with_rate(run, good_rate)
    target = run.summary.target
    costs = []
    for price in find_prices(prices, target):
        cost = compute_unit_cost(basis, price, target.gpus, GOOD)
        if cost is None or cost.low is None or cost.high is None:
            text = "the number of GPUs is not known"
            raise UserError("missing_option", text, run.folder, "--gpus 8")
        costs.append(
            Interval(
                float(cost.total * REQUESTS_PER_COST),
                float(cost.low * REQUESTS_PER_COST),
                float(cost.high * REQUESTS_PER_COST),
            )
        )
    return CostEstimate(max(costs, key=tuple), prices.currency)


def _basis_with_rate(run: RecordedRun, good_rate: Interval) -> CostBasis:
    """Return the cost basis of a run, with this rate of good requests and its interval.

    A cost basis stores the ends of an interval as factors of the rate.
    """
    evidence = Evidence(name=run.folder, folder=run.folder, summaries=(run.summary,))
    basis = compute_cost_basis(evidence)
    rate = Decimal(repr(good_rate.value))
    low_rate = max(good_rate.low, good_rate.value / MAX_RATE_RATIO)
    return replace(
        basis,
        rates={**basis.rates, GOOD: rate},
        low=Decimal(repr(low_rate)) / rate,
        high=Decimal(repr(good_rate.high)) / rate,
    )
