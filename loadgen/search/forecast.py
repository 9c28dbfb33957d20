"""Forecasts the trials of a search, the time that they take and what they cost."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import format
from loadgen.core.schedule.forecast import Forecast
from loadgen.search.load_search import LoadSearch
from loadgen.search.progress_estimate import TrialEffort, estimate_trials_left
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
    def is_at_maximum(self) -> bool:
        """Whether the search is expected to use all the time that it may take."""
        return self.seconds >= self.max_seconds


def forecast_search(
    search: LoadSearch, trial_s: float, *, runs_to_end: bool = False
) -> SearchForecast | None:
    """Return the expected and the largest number of trials that are left, and their time.

    The time is how long the trials send load, each with its warm-up. Return None if no trial is
    left.

    Args:
        search: The search, with the trials that it has already.
        trial_s: The full length of the load of a trial, in seconds.
        runs_to_end: Whether every trial runs to its end instead of stopping once it is decided.
    """
    settings = search.settings
    max_ordinary_trials = settings.max_trials - len(search.results)
    if max_ordinary_trials <= 0 or search.next_trial() is None:
        return None

    expected = estimate_trials_left(search, runs_to_end=runs_to_end, trial_s=trial_s)
    expected_s = expected.load_duration_s(trial_s, settings.warmup_s)

    max_longer_trials = MAX_SUSTAIN_TRIALS if settings.has_longer_trials else 0
    max_trials = max_ordinary_trials + max_longer_trials
    largest = TrialEffort(
        trials=max_trials,
        full_length_trials=max_ordinary_trials + max_longer_trials * settings.sustain_length_factor,
    )
    largest_s = largest.load_duration_s(trial_s, settings.warmup_s)

    max_time_s = settings.max_time_s
    if max_time_s is not None and max_time_s < largest_s:
        # The limit of time ends the search before the limit of trials. How many trials run until
        # then depends on how early each is decided, so no largest number is stated.
        return SearchForecast(expected.trials, expected_s, max_trials=None, max_seconds=max_time_s)

    return SearchForecast(expected.trials, expected_s, max_trials=max_trials, max_seconds=largest_s)


def describe_forecast(forecast: SearchForecast, *, virtual: bool) -> str:
    """Return a forecast as text: the expected trials and time, and the largest possible ones.

    An example is "9 trials, 1 h 12 min of load plus drain time (at most 40 trials, 6 h 40 min)".
    If the search is expected to take the longest possible time, only the maximum is stated.
    """
    limits = [format.duration(forecast.max_seconds)]
    if forecast.max_trials is not None:
        limits.insert(0, format.counted(forecast.max_trials, "trial"))

    maximum = f"at most {', '.join(limits)}"
    if forecast.is_at_maximum:
        return maximum

    load = "simulated load" if virtual else "load"
    trials = format.counted(round(forecast.trials), "trial")
    expected = f"{trials}, {format.duration(forecast.seconds)} of {load} plus drain time"

    return f"{expected} ({maximum})"


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
        """Print the first trial of the search, and the forecast of all trials with their cost.

        Raises LoadgenError if the target refuses such requests, or the search would exceed
        --max-cost.
        """
        first_trial_forecast = self._show_first_trial()
        search_forecast = forecast_search(self.search, self.trial_s, runs_to_end=self.runs_to_end)
        if search_forecast is None:
            print("Search: nothing is left to do")
            return

        print(f"Search: {describe_forecast(search_forecast, virtual=self.settings.virtual)}")
        if self.budget is None:
            print("Cost: add --prices FILE to see it")
            return

        self._show_cost(search_forecast, first_trial_forecast, self.budget)

    def _show_first_trial(self) -> Forecast:
        """Print the first trial, and return how many requests and tokens it sends, and how long.

        If the first load may be far from the capacity, the returned number of requests is None: the
        loads of the later trials, and so their numbers of requests, would be quite different.

        Raises LoadgenError if the target refuses such requests.
        """
        from loadgen.core.execution.load_description import describe_load

        description = describe_load(self.first_trial, self.settings)
        print(f"First trial:\n{description.text}")
        if description.error is not None:
            raise description.error
        if self.is_load_known:
            return description.load

        return description.load._replace(requests=None)

    def _show_cost(
        self, search_forecast: SearchForecast, first_trial_forecast: Forecast, budget: Budget
    ) -> None:
        """Print the expected and the largest cost of the search.

        The loads of the later trials are not known yet. Both costs therefore assume that all trials
        send as many requests and tokens per second as the first one.

        Raises UserError if the expected cost exceeds --max-cost.

        Args:
            search_forecast: The expected and the longest time of load that is left of the search.
            first_trial_forecast: The duration, requests and tokens of the first trial. Its number
                of requests is None if it is not known.
            budget: The prices, and the limit of --max-cost.
        """
        expected_cost = _forecast_cost(
            first_trial_forecast, search_forecast.seconds, self.settings, budget
        )
        largest_cost = _forecast_cost(
            first_trial_forecast, search_forecast.max_seconds, self.settings, budget
        )
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
    first_trial_forecast: Forecast, total_seconds: float, settings: Settings, budget: Budget
) -> Decimal | None:
    """Return the cost of sending load like that of the first trial for `total_seconds`.

    Return None if the price is by the request or token, and their number is not known.
    """
    from loadgen.runs.planned_runs import target_facts

    total_requests = None
    if first_trial_forecast.requests is not None and first_trial_forecast.seconds:
        requests_per_s = first_trial_forecast.requests / first_trial_forecast.seconds
        total_requests = requests_per_s * total_seconds

    total_forecast = first_trial_forecast._replace(requests=total_requests, seconds=total_seconds)
    return budget.forecast_cost(total_forecast, target_facts(settings))
