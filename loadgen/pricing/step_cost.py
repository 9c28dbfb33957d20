"""What each step of the tasks costs, each at the price of the endpoint that serves it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from loadgen_sdk.price_file import PerToken
from msgspec.structs import replace

from loadgen.core.errors import UserError
from loadgen.core.metrics.parts import StepSummary
from loadgen.pricing.prices import Price, Prices, find
from loadgen.pricing.unit_cost import (
    HOUR_S,
    TASK,
    Offer,
    StepCost,
    costs_by_token,
    hourly,
    machines,
)


def with_steps(offer: Offer, prices: Prices) -> Offer:
    """The offer with the cost of each step of its tasks: at the offer's price, or at that of an endpoint of its own.

    Of machines that are paid by the hour each step pays by its tokens; those of an endpoint of its own it pays alone.
    """
    summaries, tasks, tasks_per_s = (
        offer.evidence.summaries,
        offer.basis.counts[TASK],
        offer.basis.rates[TASK],
    )
    first, of_task = summaries[0], offer.costs[TASK]
    all_tokens = sum(
        _tokens(step) for summary in summaries for step in summary.steps if not step.targets
    )
    made: dict[str, StepCost] = {}
    for step in first.steps if tasks else ():
        name = f"{step.of_class}: {step.name}" if step.of_class else step.name
        key = step.of_class, step.name
        same = [
            one for summary in summaries for one in summary.steps if (one.of_class, one.name) == key
        ]
        price: Price = offer.price
        if step.targets:
            facts = next(part.target for part in first.targets if part.target.name in step.targets)
            try:
                price = find(prices, facts)[0]
            except UserError as error:
                made[name] = StepCost(price=None, per_task=None, why=error.what, code=error.code)
                continue
            if not isinstance(price, PerToken):
                made[name] = _by_the_hour(price, facts.gpus, tasks_per_s)
                continue
        if isinstance(price, PerToken) and price.above is not None:
            why = "its price changes with the length of each prompt"
            made[name] = StepCost(price=price, per_task=None, why=why, code="no_figure")
        elif isinstance(price, PerToken):
            made[name] = StepCost(price=price, per_task=_by_token(price, same) / (tasks or 1))
        elif of_task is None:
            made[name] = StepCost(
                price=price, per_task=None, why="no steady rate of tasks", code="no_figure"
            )
        else:
            share = Decimal(sum(map(_tokens, same))) / all_tokens if all_tokens else Decimal(0)
            made[name] = StepCost(price=price, per_task=of_task.total * share)
    return replace(offer, steps=made)


def _tokens(step: StepSummary) -> int:
    return (step.tokens.input or 0) + (step.tokens.output or 0)


def _by_token(price: PerToken, steps: Sequence[StepSummary]) -> Decimal:
    def total(*names: str) -> Decimal:
        return Decimal(sum(getattr(step.tokens, name) or 0 for step in steps for name in names))

    cached = total("cached") if price.per_million_cached is not None else Decimal(0)
    told = all(step.tokens.cache_written is not None for step in steps)
    fresh, written = (
        total("input", "failed_input") - cached,
        total("cache_written") if told else None,
    )
    return sum(
        costs_by_token(price, fresh, written, cached, total("output", "failed_output")).values(),
        Decimal(0),
    )


def _by_the_hour(price: Price, gpus: int | None, tasks_per_s: Decimal | None) -> StepCost:
    """Machines of an endpoint that serves this step alone: all their time is its."""
    if gpus is None or not tasks_per_s or isinstance(price, PerToken):
        why = (
            "its GPUs are not known: gpus in --targets"
            if gpus is None
            else "no steady rate of tasks"
        )
        return StepCost(
            price=price,
            per_task=None,
            why=why,
            code="no_figure" if gpus is not None else "missing_option",
        )
    paid = sum(hourly(price).values(), Decimal(0)) * machines(price, gpus)
    return StepCost(price=price, per_task=paid / (HOUR_S * tasks_per_s))
