"""What runs will send and cost, before they start: forecasts, `--dry-run`, and too short loads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadgen.core import slo
from loadgen.core.errors import CombinedError, LoadgenError
from loadgen.core.schedule.forecast import Forecast, combine_forecasts, forecast_load
from loadgen.core.stats.quantiles import needed_samples

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.results.manifest import TargetFacts
    from loadgen.core.schedule.forecast import MeanTokens
    from loadgen.core.schedule.schedule import Schedule
    from loadgen.core.slo import Slo, Term
    from loadgen.core.workload import Workload
    from loadgen.pricing.budget import Budget

PlannedRun = tuple["Workload", "Settings"]
"""The workload and the settings of a run that has not started."""

PlannedLoad = tuple[Forecast, "Settings"]
"""The forecast of a run that has not started, and its settings."""


class RunForecast(NamedTuple):
    """The forecast of the measured stages of a run, and of all its stages."""

    measured: Forecast
    total: Forecast


def forecast_run(schedule: Schedule, tokens: MeanTokens, response_s: float) -> RunForecast:
    """Return the forecast of a run.

    Args:
        schedule: The schedule of the run.
        tokens: The mean size of a request.
        response_s: How long a response takes, or 0 if that is not known.
    """
    measured_stages = tuple(stage for stage in schedule.stages if stage.measured)
    other_stages = tuple(stage for stage in schedule.stages if not stage.measured)
    measured, other = (
        forecast_load(msgspec.structs.replace(schedule, stages=stages), tokens, response_s)
        for stages in (measured_stages, other_stages)
    )
    return RunForecast(measured, combine_forecasts([measured, other]))


def warn_too_few_requests(measured: Forecast, requested_slo: Slo | None) -> str:
    """Return a warning if a load has too few requests to verify its SLO, or "" if it has enough.

    A closed loop may send fewer requests than its forecast, and never more.
    """
    count = measured.requests
    if count is None or requested_slo is None or not requested_slo.terms:
        return ""
    term = max(requested_slo.terms, key=_needed_samples)
    needed = _needed_samples(term)
    if count >= needed:
        return ""
    name = slo.name(term.metric, term.quantile)
    return (
        f"~{count:,.0f} requests are too few to verify {name} ({needed:,} needed). Use a longer "
        "--duration or more --num-requests."
    )


def _needed_samples(term: Term) -> int:
    return needed_samples(term.quantile)


def print_plans(runs: Iterable[PlannedRun], budget: Budget | None) -> int:
    """Print what runs would send and, with prices, what they would cost, for --dry-run.

    Returns the exit code 0.

    Raises UserError if the cost exceeds the limit, and CombinedError if a target does not accept
    such requests.
    """
    from loadgen.core.execution.load_description import describe_load

    error_by_text: dict[str, LoadgenError] = {}
    loads: list[PlannedLoad] = []
    for workload, settings in runs:
        description = describe_load(workload, settings)
        loads.append((description.load, settings))
        print(description.text)
        if budget is not None:
            print(_describe_forecast_cost(description.load, settings, budget))
        if description.error is not None:
            error_by_text.setdefault(str(description.error), description.error)
    if error_by_text:
        raise CombinedError(list(error_by_text.values()))
    if budget is not None:
        _print_total_cost(loads, budget)
    return 0


def _describe_forecast_cost(load: Forecast, settings: Settings, budget: Budget) -> str:
    cost = budget.forecast_cost(load, target_facts(settings))
    if cost is None:
        return "cost: known once the target was probed"
    return f"cost: about {describe_cost(budget, cost, settings)}"


def _print_total_cost(loads: Sequence[PlannedLoad], budget: Budget) -> None:
    """Print the cost of several runs. Raises UserError if real runs exceed the limit."""
    cost = total_cost(budget, loads)
    if cost is None:
        return
    settings = loads[-1][1]
    if len(loads) > 1:
        print(f"cost of all {len(loads)} runs: about {describe_cost(budget, cost, settings)}")
    if not settings.virtual:
        budget.check_limit(cost, describe_run_count(len(loads)))


def describe_run_count(count: int) -> str:
    """Return the runs as the subject of a message about their cost."""
    return "this run" if count == 1 else f"these {count} runs"


def describe_cost(budget: Budget, cost: Decimal, settings: Settings) -> str:
    """Return an amount of money. In virtual time nothing has to be paid."""
    amount = budget.format_amount(cost)
    return f"{amount} on a real server (virtual time is free)" if settings.virtual else amount


def total_cost(budget: Budget, loads: Sequence[PlannedLoad]) -> Decimal | None:
    """Return the cost of several loads.

    Returns None if the cost of a load is known only after its target was probed.
    """
    total = Decimal()
    for load, settings in loads:
        cost = budget.forecast_cost(load, target_facts(settings))
        if cost is None:
            return None
        total += cost
    return total


def target_facts(settings: Settings) -> list[TargetFacts]:
    """Return what is known of the targets before a request is sent."""
    from loadgen.core.execution import backend
    from loadgen.core.results.manifest import TargetFacts

    known = backend.known(settings)
    known_gpus = None if known is None else known.gpus
    return [
        TargetFacts(
            url=endpoint.url,
            server="",
            model=settings.model or "",
            gpus=endpoint.gpus or known_gpus,
            shape=endpoint.shape,
            region=endpoint.region,
        )
        for endpoint in settings.endpoints
    ]
