"""Forecasts the trials of a search, the time that they take and what they cost."""

from __future__ import annotations

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
        most_trials: The largest possible number of trials; None if the time ends the search before.
        most_seconds: The longest possible time of load.
        is_bounded: Whether the expected time reaches the longest possible one.
    """

    trials: float
    seconds: float
    most_trials: int | None
    most_seconds: float

    @property
    def is_bounded(self) -> bool:
        """Whether the search is expected to use all that it may."""
        return self.seconds >= self.most_seconds


def forecast_search(
    search: LoadSearch, trial_s: float, *, runs_to_end: bool = False
) -> SearchForecast | None:
    """Return what is left of a search, or None if nothing is.

    Args:
        search: The search, with the trials that it has already.
        trial_s: The full length of the load of a trial, in seconds.
        runs_to_end: Whether every trial runs to its end instead of stopping once it is decided.
    """
    settings = search.settings
    ordinary_trials = settings.max_trials - len(search.results)
    if ordinary_trials <= 0 or search.next_trial() is None:
        return None
    longer_trials = MAX_SUSTAIN_TRIALS if settings.has_longer_trials else 0
    most_trials: int | None = ordinary_trials + longer_trials
    most_lengths = ordinary_trials + longer_trials * settings.sustain_length_factor
    warmup_s = (ordinary_trials + longer_trials) * settings.warmup_s
    most_seconds = most_lengths * trial_s + warmup_s
    if settings.max_time_s is not None and settings.max_time_s < most_seconds:
        most_seconds = settings.max_time_s
        most_trials = None
    left = estimate_trials_left(search, runs_to_end=runs_to_end, trial_s=trial_s)
    seconds = left.lengths * trial_s + left.trials * settings.warmup_s
    return SearchForecast(left.trials, seconds, most_trials, most_seconds)


def describe_forecast(forecast: SearchForecast, *, virtual: bool) -> str:
    """Return a forecast as text: the expected trials and time, and the largest possible ones."""
    most = f"at most {format.duration(forecast.most_seconds)}"
    if forecast.most_trials is not None:
        trials = format.counted(forecast.most_trials, "trial")
        most = f"at most {trials}, {format.duration(forecast.most_seconds)}"
    if forecast.is_bounded:
        return most
    load = "simulated load" if virtual else "load"
    trials = format.counted(round(forecast.trials), "trial")
    expected = f"about {trials}, {format.duration(forecast.seconds)} of {load}"
    return f"{expected} (the time of the last answers comes on top); {most}"


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
        print(f"first trial:\n{described.text}")
        if described.error is not None:
            raise described.error
        forecast = forecast_search(self.search, self.trial_s, runs_to_end=self.runs_to_end)
        if forecast is None:
            print("search: nothing is left to do")
            return
        print(f"search: {describe_forecast(forecast, virtual=self.settings.virtual)}")
        if self.budget is None:
            print("cost: add --prices FILE to see it")
            return
        load = described.load if self.is_load_known else described.load._replace(requests=None)
        self._show_cost(forecast, load, self.budget)

    def _show_cost(self, forecast: SearchForecast, first_load: Forecast, budget: Budget) -> None:
        """Print the expected and the largest cost. Raises UserError over --max-cost."""
        cost = _cost(first_load, forecast.seconds, self.settings, budget)
        most_cost = _cost(first_load, forecast.most_seconds, self.settings, budget)
        if cost is None or most_cost is None:
            print(
                "cost: unknown, since the price depends on requests and the load is not known yet"
            )
            return
        is_virtual = self.settings.virtual
        note = " on a real server; a simulation costs nothing" if is_virtual else ""
        expected = budget.format_amount(cost)
        largest = budget.format_amount(most_cost)
        print(f"cost: about {expected}, at most {largest}{note}")
        if not is_virtual:
            budget.check_limit(cost, "this search")


def _cost(
    first_load: Forecast, seconds: float, settings: Settings, budget: Budget
) -> Decimal | None:
    """Return the cost of sending the first load for this time, or None if it is not known."""
    from loadgen.runs.show import target_facts

    requests = None
    if first_load.requests is not None and first_load.seconds:
        requests = first_load.requests / first_load.seconds * seconds
    load = first_load._replace(requests=requests, seconds=seconds)
    return budget.forecast_cost(load, target_facts(settings))
