"""Computes what each step of a task costs, at the price of the endpoint that serves it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from loadgen_sdk.price_file import PerToken
from msgspec.structs import replace

from loadgen.core.errors import UserError
from loadgen.core.metrics.part_summaries import StepSummary
from loadgen.core.results.manifest import TargetFacts
from loadgen.pricing.machine_cost import compute_hourly_cost, count_paid_machines
from loadgen.pricing.priced_result import PricedResult, StepCost
from loadgen.pricing.prices import Owned, Price, Prices, Rented, find_prices
from loadgen.pricing.prompt_lengths import TokenAmounts
from loadgen.pricing.unit_cost import compute_token_parts
from loadgen.pricing.units import SECONDS_PER_HOUR, TASK


def with_step_costs(result: PricedResult, prices: Prices) -> PricedResult:
    """Return a copy of the result with the cost of each step of its tasks.

    A task is a session of several requests, such as "plan", "search" and "answer", which are its
    steps. A step is priced at the price of the result, or at that of the endpoint that serves this
    step alone. If machines are paid by the hour, steps that share them pay in proportion to their
    tokens, and a step with machines of its own pays for all of them.
    """
    if not result.basis.counts[TASK]:
        return replace(result, step_costs={})

    costs: dict[str, StepCost] = {}
    for step in result.evidence.summary.steps:
        # Steps of different classes may have the same name.
        name = f"{step.of_class}: {step.name}" if step.of_class else step.name
        costs[name] = _price_step(step, result, prices)

    return replace(result, step_costs=costs)


def _price_step(step: StepSummary, result: PricedResult, prices: Prices) -> StepCost:
    """Return what one step, such as "plan" or "embed", adds to the cost of a task.

    There are three ways to pay for a step: at a separate endpoint with a price of its own, per
    token, or as a fraction of the machines that serve the whole task.
    """
    has_separate_endpoint = bool(step.targets)
    if has_separate_endpoint:
        return _price_on_separate_endpoint(step, result, prices)
    if isinstance(result.price, PerToken):
        return _price_by_token(step, result.price, result)
    return _price_on_shared_machines(step, result.price, result)


def _price_on_separate_endpoint(
    step: StepSummary, result: PricedResult, prices: Prices
) -> StepCost:
    """Return the cost of a step at the price of the endpoint that serves this step alone.

    A missing or ambiguous price is no error of the whole report: the step then has no amount, and
    the message of the error as its reason.
    """
    target = _find_target(step, result)
    try:
        matching_prices = find_prices(prices, target)
    except UserError as error:
        return _create_unknown_cost(None, error.message, error.code)

    # Several prices differ only in commitment. The first one in the file is used.
    price = matching_prices[0]
    if isinstance(price, PerToken):
        return _price_by_token(step, price, result)

    return _price_on_separate_machines(price, target.gpus, result.basis.rates[TASK])


def _find_target(step: StepSummary, result: PricedResult) -> TargetFacts:
    """Return the first target of the run that serves the step, whose price applies to it."""
    all_targets = [summary.target for summary in result.evidence.summary.targets]
    return next(target for target in all_targets if target.name in step.targets)


def _price_by_token(step: StepSummary, price: PerToken, result: PricedResult) -> StepCost:
    """Return the cost of a step's tokens in all runs, divided by the tasks of all runs.

    A price that changes with the length of the prompt gives no amount, because a step has only the
    sums of its tokens.
    """
    if price.long_prompt_price is not None:
        return _create_unknown_cost(price, "the price depends on the prompt length", "no_figure")
    # `with_step_costs` returns early for a result without tasks.
    task_count = result.basis.counts[TASK] or 1
    paid_tokens = _sum_paid_tokens(price, _collect_step_of_all_runs(step, result))
    cost_of_all_tasks = sum(compute_token_parts(price, paid_tokens).values(), Decimal(0))
    return StepCost(price=price, per_task=cost_of_all_tasks / task_count)


def _price_on_shared_machines(
    step: StepSummary, price: Rented | Owned, result: PricedResult
) -> StepCost:
    """Return the cost of a task times the step's fraction of all tokens on the shared machines.

    Machines are paid by the hour, and a measurement does not tell how much of that time they spend
    on each step. The time is assumed to be in proportion to the prompt and output tokens.
    """
    task_cost = result.costs[TASK]
    if task_cost is None:
        return _create_unknown_cost(price, "no steady rate of tasks", "no_figure")

    steps_on_shared_machines = [
        run_step
        for summary in result.evidence.summaries
        for run_step in summary.steps
        if not run_step.targets
    ]
    all_tokens = sum(map(_count_tokens, steps_on_shared_machines))
    step_tokens = sum(map(_count_tokens, _collect_step_of_all_runs(step, result)))
    fraction = Decimal(step_tokens) / all_tokens if all_tokens else Decimal(0)

    return StepCost(price=price, per_task=task_cost.total * fraction)


def _price_on_separate_machines(
    price: Rented | Owned, gpus: int | None, tasks_per_s: Decimal | None
) -> StepCost:
    """Return the cost of machines that serve nothing but this step, spread over all tasks.

    Their hourly cost is divided by the tasks of an hour, at the steady rate of the run.
    """
    if gpus is None:
        return _create_unknown_cost(
            price, "the number of GPUs is not known (gpus in --targets)", "missing_option"
        )
    if not tasks_per_s:
        return _create_unknown_cost(price, "no steady rate of tasks", "no_figure")

    per_hour = compute_hourly_cost(price) * count_paid_machines(price, gpus)
    return StepCost(price=price, per_task=per_hour / (SECONDS_PER_HOUR * tasks_per_s))


def _create_unknown_cost(price: Price | None, reason: str, code: str) -> StepCost:
    """Return a step without an amount, with the reason as text and as the code of an error."""
    return StepCost(price=price, per_task=None, reason=reason, code=code)


def _collect_step_of_all_runs(step: StepSummary, result: PricedResult) -> list[StepSummary]:
    """Return the step of the same name and request class in each run."""
    return [
        run_step
        for summary in result.evidence.summaries
        for run_step in summary.steps
        if run_step.of_class == step.of_class and run_step.name == step.name
    ]


def _count_tokens(step: StepSummary) -> int:
    """Return the prompt and output tokens of a step. A count that is not known is taken as 0."""
    return (step.tokens.input or 0) + (step.tokens.output or 0)


def _sum_paid_tokens(price: PerToken, step_of_runs: Sequence[StepSummary]) -> TokenAmounts:
    """Return the tokens of one step that are paid for, summed over all runs, by kind.

    The provider charges for failed requests too, as far as their tokens are known. A count that a
    run does not have is taken as 0.

    Args:
        price: The price per token. If it has no price for cached tokens, they are counted as
            uncached ones, which have the normal price of prompt tokens.
        step_of_runs: The summary of the step in each run.
    """
    prompt_tokens = 0
    cached_tokens = 0
    output_tokens = 0

    cache_written_tokens = 0
    for step in step_of_runs:
        tokens = step.tokens
        prompt_tokens += (tokens.input or 0) + (tokens.failed_input or 0)
        cached_tokens += tokens.cached or 0
        output_tokens += (tokens.output or 0) + (tokens.failed_output or 0)
        cache_written_tokens += tokens.cache_written or 0

    paid_as_cached = cached_tokens if price.per_million_cached is not None else 0

    # A sum over only some of the runs would be too low.
    is_cache_written_known = all(step.tokens.cache_written is not None for step in step_of_runs)
    return TokenAmounts(
        uncached=Decimal(prompt_tokens - paid_as_cached),
        cache_written=Decimal(cache_written_tokens) if is_cache_written_known else None,
        cached=Decimal(paid_as_cached),
        output=Decimal(output_tokens),
    )
