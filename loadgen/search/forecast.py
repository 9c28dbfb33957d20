"""Forecasts the trials of a search, the time that they take and what they cost."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import format
from loadgen.core.schedule.forecast import Forecast
from loadgen.search.load_search import LoadSearch
from loadgen.search.progress_estimate import estimate_trials_left
from loadgen.search.search_settings import MAX_SUSTAIN_TRIALS

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Workload
    from loadgen.pricing.budget import Budget


class SearchForecast(NamedTuple):
    """What is left of a search.

    Attributes:
        trials: The expected number of trials.
        seconds: How long they send load, all together. Responses that are still to come when the
            load of a trial ends are not included.
        max_trials: The largest possible number of trials; None if the time ends the search before.
        max_seconds: The longest possible time of load.
    """

    trials: float
    seconds: float
    max_trials: int | None
    max_seconds: float

    @property
    def is_bounded(self) -> bool:
        """Whether the search is expected to use all that it may."""
        return self.seconds >= self.max_seconds


def forecast_search(
    search: LoadSearch, trial_s: float, *, runs_to_end: bool = False
) -> SearchForecast | None:
    """Return the expected and the largest number of trials that are left, and their time.

    Return None if no trial is left. The time of a number of trials is the load that they send, in
    full lengths of a trial, and the warm-up of each.

    Args:
        search: The search, with the trials that it has already.
        trial_s: The full length of the load of a trial, in seconds.
        runs_to_end: Whether every trial runs to its end instead of stopping once it is decided.
    """
    settings = search.settings
    max_ordinary_trials = settings.max_trials - len(search.results)
    if max_ordinary_trials <= 0 or search.next_trial() is None:
        return None

    estimate = estimate_trials_left(search, runs_to_end=runs_to_end, trial_s=trial_s)
    expected_load_s = estimate.lengths * trial_s + estimate.trials * settings.warmup_s

    max_longer_trials = MAX_SUSTAIN_TRIALS if settings.has_longer_trials else 0
    max_trials = max_ordinary_trials + max_longer_trials
    max_lengths = max_ordinary_trials + max_longer_trials * settings.sustain_length_factor
    max_load_s = max_lengths * trial_s + max_trials * settings.warmup_s
    max_time_s = math.inf if settings.max_time_s is None else settings.max_time_s
    return SearchForecast(
        trials=estimate.trials,
        seconds=expected_load_s,
        max_trials=None if max_time_s < max_load_s else max_trials,
        max_seconds=min(max_load_s, max_time_s),
    )


def describe_forecast(forecast: SearchForecast, *, virtual: bool) -> str:
    """Return a forecast as text: the expected trials and time, and the largest possible ones.

    An example is "9 trials, 1 h 12 min of load plus drain time (at most 40 trials, 6 h 40 min)".
    """
    most = f"at most {format.duration(forecast.max_seconds)}"
    if forecast.max_trials is not None:
        trials = format.counted(forecast.max_trials, "trial")
        most = f"at most {trials}, {format.duration(forecast.max_seconds)}"
    if forecast.is_bounded:
        return most
    load = "simulated load" if virtual else "load"
    trials = format.counted(round(forecast.trials), "trial")
    expected = f"{trials}, {format.duration(forecast.seconds)} of {load} plus drain time"
    return f"{expected} ({most})"


class DryRun(NamedTuple):
    """A search of which only the forecast is shown.

    Attributes:
        search: The search, with the trials that it has already.
        first_trial: The workload at the first load.
        settings: The settings of the trials.
        budget: The prices and the limit of --max-cost; None without prices.
        trial_s: The full length of the load of a trial, in seconds.
        runs_to_end: Whether every trial runs to its end.
        is_load_known: Whether the first load is near the capacity, so that prices by the request
            or token can be applied to it.
    """

    search: LoadSearch
    first_trial: Workload
    settings: Settings
    budget: Budget | None
    trial_s: float
    runs_to_end: bool
    is_load_known: bool

    def show(self) -> None:
        """Print the first trial of the search and the forecast of all.

        Raises LoadgenError if the target refuses such requests, or the search would exceed
        --max-cost.
        """
        from loadgen.core.execution.load_description import describe_load

        described = describe_load(self.first_trial, self.settings)
        print(f"First trial:\n{described.text}")
        if described.error is not None:
            raise described.error
        forecast = forecast_search(self.search, self.trial_s, runs_to_end=self.runs_to_end)
        if forecast is None:
            print("Search: nothing is left to do")
            return
        print(f"Search: {describe_forecast(forecast, virtual=self.settings.virtual)}")
        if self.budget is None:
            print("Cost: add --prices FILE to see it")
            return
        first_trial_size = described.load
        if not self.is_load_known:
            # Most other loads may be far from the first one, and so may their numbers of requests.
            first_trial_size = described.load._replace(requests=None)
        self._show_cost(forecast, first_trial_size, self.budget)

    def _show_cost(
        self, forecast: SearchForecast, first_trial_size: Forecast, budget: Budget
    ) -> None:
        """Print the expected and the largest cost of the search.

        The loads of the later trials are not known yet. Both costs therefore assume that all trials
        send as many requests and tokens per second as the first one.

        Raises UserError if the expected cost exceeds --max-cost.

        Args:
            forecast: The expected and the longest time of load that is left of the search.
            first_trial_size: The duration, requests and tokens of the first trial. Its number of
                requests is None if it is not known.
            budget: The prices, and the limit of --max-cost.
        """
        expected_cost = _forecast_cost(first_trial_size, forecast.seconds, self.settings, budget)
        largest_cost = _forecast_cost(first_trial_size, forecast.max_seconds, self.settings, budget)
        if expected_cost is None or largest_cost is None:
            print(
                "Cost: unknown until the load is known, because the price depends on "
                "the number of requests"
            )
            return
        is_virtual = self.settings.virtual
        note = " on a real server; a simulation costs nothing" if is_virtual else ""
        expected_amount = budget.format_amount(expected_cost)
        largest_amount = budget.format_amount(largest_cost)
        print(f"Cost: about {expected_amount}, at most {largest_amount}{note}")
        if not is_virtual:
            budget.check_limit(expected_cost, "this search")


def _forecast_cost(
    first_trial_size: Forecast, seconds: float, settings: Settings, budget: Budget
) -> Decimal | None:
    """Return the cost of sending the load of the first trial for this time, in seconds.

    Return None if the price is by the request or token, and their number is not known.
    """
    from loadgen.runs.planned_runs import target_facts

    request_count = None
    if first_trial_size.requests is not None and first_trial_size.seconds:
        requests_per_s = first_trial_size.requests / first_trial_size.seconds
        request_count = requests_per_s * seconds
    total_size = first_trial_size._replace(requests=request_count, seconds=seconds)
    return budget.forecast_cost(total_size, target_facts(settings))
