"""Computes what each step of a task costs, at the price of the endpoint that serves it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from loadgen_sdk.price_file import PerToken
from msgspec.structs import replace

from loadgen.core.errors import UserError
from loadgen.core.metrics.part_summaries import StepSummary
from loadgen.core.results.manifest import TargetFacts
from loadgen.pricing.machine_cost import hourly_cost, machines_paid
from loadgen.pricing.priced_result import PricedResult, StepCost
from loadgen.pricing.prices import Owned, Price, Prices, Rented, find_prices
from loadgen.pricing.prompt_lengths import TokenAmounts
from loadgen.pricing.unit_cost import compute_token_parts
from loadgen.pricing.units import SECONDS_PER_HOUR, TASK


def with_step_costs(result: PricedResult, prices: Prices) -> PricedResult:
    """Return the result with the cost of each step of its tasks.

    A step is priced at the price of the result, or at that of the endpoint that serves this step
    alone. If machines are paid by the hour, steps that share them pay in proportion to their
    tokens, and a step with machines of its own pays for all of them.
    """
    if not result.basis.counts[TASK]:
        return replace(result, steps={})
    costs = {}
    for step in result.evidence.summary.steps:
        name = f"{step.of_class}: {step.name}" if step.of_class else step.name
        costs[name] = _step_cost(step, result, prices)
    return replace(result, steps=costs)


def _step_cost(step: StepSummary, result: PricedResult, prices: Prices) -> StepCost:
    """Return what one step adds to the cost of a task.

    A step with targets of its own, such as an embedding model, has the price of those targets. All
    other steps share the endpoint of the result.
    """
    if step.targets:
        return _cost_on_own_endpoint(step, result, prices)
    if isinstance(result.price, PerToken):
        return _cost_by_token(step, result.price, result)
    return _cost_on_shared_machines(step, result.price, result)


def _cost_on_own_endpoint(step: StepSummary, result: PricedResult, prices: Prices) -> StepCost:
    target = _target_of(step, result)
    try:
        # Several prices differ only in commitment. The first one in the file is used.
        price = find_prices(prices, target)[0]
    except UserError as error:
        return _unknown_cost(None, error.what, error.code)
    if isinstance(price, PerToken):
        return _cost_by_token(step, price, result)
    return _cost_on_own_machines(price, target.gpus, result.basis.rates[TASK])


def _target_of(step: StepSummary, result: PricedResult) -> TargetFacts:
    targets = [part.target for part in result.evidence.summary.targets]
    return next(target for target in targets if target.name in step.targets)


def _cost_by_token(step: StepSummary, price: PerToken, result: PricedResult) -> StepCost:
    if price.above is not None:
        why = "its price changes with the length of each prompt"
        return _unknown_cost(price, why, "no_figure")
    tasks = result.basis.counts[TASK] or 1
    parts = compute_token_parts(price, _token_amounts(price, _in_all_runs(step, result)))
    return StepCost(price=price, per_task=sum(parts.values(), Decimal(0)) / tasks)


def _cost_on_shared_machines(
    step: StepSummary, price: Rented | Owned, result: PricedResult
) -> StepCost:
    """Return the part of a task's cost that is in proportion to the tokens of a step."""
    task_cost = result.costs[TASK]
    if task_cost is None:
        return _unknown_cost(price, "no steady rate of tasks", "no_figure")
    summaries = result.evidence.summaries
    shared_steps = [
        shared for summary in summaries for shared in summary.steps if not shared.targets
    ]
    all_tokens = sum(map(_count_tokens, shared_steps))
    step_tokens = sum(map(_count_tokens, _in_all_runs(step, result)))
    fraction = Decimal(step_tokens) / all_tokens if all_tokens else Decimal(0)
    return StepCost(price=price, per_task=task_cost.total * fraction)


def _cost_on_own_machines(
    price: Rented | Owned, gpus: int | None, tasks_per_s: Decimal | None
) -> StepCost:
    """Return the cost of machines that serve nothing but this step, spread over all tasks."""
    if gpus is None:
        return _unknown_cost(price, "its GPUs are not known: gpus in --targets", "missing_option")
    if not tasks_per_s:
        return _unknown_cost(price, "no steady rate of tasks", "no_figure")
    per_hour = hourly_cost(price) * machines_paid(price, gpus)
    return StepCost(price=price, per_task=per_hour / (SECONDS_PER_HOUR * tasks_per_s))


def _unknown_cost(price: Price | None, why: str, code: str) -> StepCost:
    return StepCost(price=price, per_task=None, why=why, code=code)


def _in_all_runs(step: StepSummary, result: PricedResult) -> list[StepSummary]:
    """Return the same step of the same class in each run."""
    key = (step.of_class, step.name)
    return [
        other
        for summary in result.evidence.summaries
        for other in summary.steps
        if (other.of_class, other.name) == key
    ]


def _count_tokens(step: StepSummary) -> int:
    return (step.tokens.input or 0) + (step.tokens.output or 0)


def _token_amounts(price: PerToken, steps: Sequence[StepSummary]) -> TokenAmounts:
    """Return the tokens of a step in all runs. Without a price for cached tokens, all are fresh."""
    tokens = [step.tokens for step in steps]
    cached = 0
    if price.per_million_cached is not None:
        cached = sum(count.cached or 0 for count in tokens)
    fresh = sum((count.input or 0) + (count.failed_input or 0) for count in tokens) - cached
    written = None
    if all(count.cache_written is not None for count in tokens):
        written = Decimal(sum(count.cache_written or 0 for count in tokens))
    output = sum((count.output or 0) + (count.failed_output or 0) for count in tokens)
    return TokenAmounts(
        fresh=Decimal(fresh), written=written, cached=Decimal(cached), output=Decimal(output)
    )
