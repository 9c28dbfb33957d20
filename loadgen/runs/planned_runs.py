"""What runs will send and cost, before they start: forecasts, `--dry-run`, and too short loads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadgen.core import slo
from loadgen.core.errors import OK, CombinedError, LoadgenError
from loadgen.core.schedule.forecast import Forecast, combine_forecasts, forecast_load
from loadgen.core.stats.quantiles import needed_samples

if TYPE_CHECKING:
    from loadgen.core.execution.load_description import LoadDescription
    from loadgen.core.execution.plan import Settings
    from loadgen.core.results.manifest import TargetFacts
    from loadgen.core.schedule.forecast import MeanTokens
    from loadgen.core.schedule.schedule import Schedule
    from loadgen.core.slo import Slo, Term
    from loadgen.core.workload import Workload
    from loadgen.pricing.budget import Budget


class PlannedRun(NamedTuple):
    """The workload and the settings of a run that has not started.

    Attributes:
        workload: The workload.
        settings: The settings.
        title: What the run is, for a command with different runs. "" for any other.
        command_seed: The seed of the command, if that of the run is derived from it. None if the
            run has the seed of its workload.
    """

    workload: Workload
    settings: Settings
    title: str = ""
    command_seed: int | None = None


class ForecastRun(NamedTuple):
    """The forecast of a run that has not started, and its settings."""

    forecast: Forecast
    settings: Settings


class RunForecast(NamedTuple):
    """The forecast of the measured stages of a run, and of all its stages."""

    measured: Forecast
    total: Forecast


def forecast_run(schedule: Schedule, tokens: MeanTokens, response_s: float) -> RunForecast:
    """Return the forecast of the requests, tokens and duration of a run.

    Args:
        schedule: The schedule of the run.
        tokens: The mean size of a request.
        response_s: How long a response takes, or 0 if that is not known.
    """
    measured_stages = tuple(stage for stage in schedule.stages if stage.measured)
    warmup_stages = tuple(stage for stage in schedule.stages if not stage.measured)
    measured_schedule = msgspec.structs.replace(schedule, stages=measured_stages)
    warmup_schedule = msgspec.structs.replace(schedule, stages=warmup_stages)
    measured = forecast_load(measured_schedule, tokens, response_s)
    warmup = forecast_load(warmup_schedule, tokens, response_s)
    return RunForecast(measured=measured, total=combine_forecasts([measured, warmup]))


def describe_too_few_requests(forecast: Forecast, requested_slo: Slo | None) -> str:
    """Return a warning if a load has too few requests to verify its SLO, or "" if it has enough.

    The warning is about the objective on the highest percentile, which needs most requests. It also
    applies to a closed loop, whose forecast is the highest number of requests that it may send.

    Args:
        forecast: The forecast of the measured stages of the load.
        requested_slo: The SLO, or None without one.
    """
    requests = forecast.requests
    if requests is None or requested_slo is None or not requested_slo.terms:
        return ""

    strictest_term = max(requested_slo.terms, key=_needed_samples)
    needed_requests = _needed_samples(strictest_term)
    if requests >= needed_requests:
        return ""

    name = slo.name(strictest_term.metric, strictest_term.quantile)
    return (
        f"~{requests:,.0f} requests are too few to verify {name} ({needed_requests:,} needed). "
        "Use a longer --duration or more --num-requests."
    )


def _needed_samples(term: Term) -> int:
    return needed_samples(term.quantile)


def print_plans(
    runs: Sequence[PlannedRun],
    budget: Budget | None,
    *,
    described_count: int | None = None,
    name_of_all: str = "",
) -> int:
    """Print what runs would send and, with prices, what they would cost, for --dry-run.

    Args:
        runs: All runs.
        budget: The prices and the limit of cost, or None without prices.
        described_count: How many of the first runs are described, if the others are like them. None
            to describe all.
        name_of_all: What all runs are called in a line about their total size, such as "all 80
            blocks". "" for no such line.

    Returns:
        The exit code of the command.

    Raises:
        CombinedError: A target cannot receive the requests of a run, for example because it has no
            endpoint of their type.
        UserError: The cost exceeds the limit.
    """
    from loadgen.core.execution.load_description import describe_load

    errors: list[LoadgenError] = []
    forecasts: list[ForecastRun] = []
    for run_index, run in enumerate(runs):
        description = describe_load(run.workload, run.settings, command_seed=run.command_seed)
        if described_count is None or run_index < described_count:
            _print_plan(run, description, budget)

        forecasts.append(ForecastRun(description.load, run.settings))

        # The plans of all runs are printed before an error is reported.
        if description.error is not None:
            errors.append(description.error)

    if errors:
        raise CombinedError(_without_repeated_texts(errors))

    if name_of_all:
        total = combine_forecasts([run.forecast for run in forecasts])
        print(f"{name_of_all}: about {total.text}")

    if budget is not None:
        _report_total_cost(forecasts, budget)

    return OK


def _print_plan(run: PlannedRun, description: LoadDescription, budget: Budget | None) -> None:
    """Print what one run would send and, with prices, what it would cost."""
    if run.title:
        print(f"{run.title}:")
    print(description.text)
    if budget is not None:
        print(_describe_forecast_cost(description.load, run.settings, budget))


def _without_repeated_texts(errors: Iterable[LoadgenError]) -> list[LoadgenError]:
    """Return the errors without those whose text equals that of an earlier one.

    Several runs with the same target have the same errors.
    """
    error_by_text: dict[str, LoadgenError] = {}
    for error in errors:
        error_by_text.setdefault(str(error), error)
    return list(error_by_text.values())


def _describe_forecast_cost(load: Forecast, settings: Settings, budget: Budget) -> str:
    cost = budget.forecast_cost(load, target_facts(settings))
    if cost is None:
        return "cost: known after the first request, which identifies the model"
    return f"cost: about {describe_cost(budget, cost, settings)}"


def _report_total_cost(runs: Sequence[ForecastRun], budget: Budget) -> None:
    """Print the cost of several runs together, and raise UserError if it exceeds the limit.

    Do nothing if the cost is known only after the runs have started. Runs in virtual time cost
    nothing, so their limit is not checked; the printed cost is that on a real server.
    """
    cost = compute_total_cost(budget, runs)
    if cost is None:
        return

    # All runs have the same target, which determines the price.
    settings = runs[0].settings
    if len(runs) > 1:
        print(f"cost of all {len(runs)} runs: about {describe_cost(budget, cost, settings)}")

    if not settings.virtual:
        budget.check_limit(cost, describe_run_count(len(runs)))


def describe_run_count(count: int) -> str:
    """Return the runs as the subject of a message about their cost."""
    return "this run" if count == 1 else f"these {count} runs"


def describe_cost(budget: Budget, cost: Decimal, settings: Settings) -> str:
    """Return an amount of money. In virtual time nothing has to be paid."""
    amount = budget.format_amount(cost)
    return f"{amount} on a real server (virtual time is free)" if settings.virtual else amount


def compute_total_cost(budget: Budget, runs: Sequence[ForecastRun]) -> Decimal | None:
    """Return the cost of several runs.

    Returns None if the cost of a run is known only after its target was probed.
    """
    total = Decimal()
    for run in runs:
        cost = budget.forecast_cost(run.forecast, target_facts(run.settings))
        if cost is None:
            return None
        total += cost
    return total


def target_facts(settings: Settings) -> list[TargetFacts]:
    """Return the properties of the targets on which their price depends, before a request is sent.

    These are the model, the region, the instance type (`shape`) and the number of GPUs. The number
    is that in the settings. A simulated target models a certain hardware, whose number of GPUs is
    used if the settings have none.
    """
    from loadgen.core.execution import backend
    from loadgen.core.results.manifest import TargetFacts

    # Only the hardware of a simulated target is known. It is None for a real server.
    simulated_target = backend.known(settings)
    simulated_gpus = None if simulated_target is None else simulated_target.gpus
    return [
        TargetFacts(
            url=endpoint.url,
            server="",  # not known before the first response
            model=settings.model or "",
            gpus=endpoint.gpus or simulated_gpus,
            shape=endpoint.shape,
            region=endpoint.region,
        )
        for endpoint in settings.endpoints
    ]
