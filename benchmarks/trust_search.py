"""How often does the interval of a capacity search cover the true capacity? Part of trust.py.

The capacity of the simulated server differs from trial to trial. A trial passes if it offers less
load than the capacity in that trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import drawn
import numpy as np
from trust_servers import DRAWN_TRUTH_LENGTH_S
from trust_tables import Column, RowTable

from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import PlannedTrial, SearchResult, TrialResult
from loadgen.search.search_settings import SearchSettings

# They keep random numbers apart from those that other parts draw with the same seed.
SEARCH_RNG_STREAM = 77
TRUTH_RNG_STREAM = 5

TRUE_CAPACITY_PER_S = 100.0
TRIAL_S = 600.0
MAX_TRIALS = 60  # more than a search makes
START_SIGMAS = (0.004, 0.01, 0.02)  # how much the capacity differs from start to start
MIN_COVERED_FRACTION = 0.90

# Yields the capacity in one trial after another, as a fraction of the true capacity. The argument
# draws the capacities.
CapacityModel = Callable[[np.random.Generator], Iterator[float]]


def draw_start_capacities(sigma: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield a log-normal capacity with the median 1 for each trial, without end.

    The server starts anew before each trial. `sigma` is the standard deviation of the logarithm.
    """
    while True:
        yield math.exp(rng.normal(0, sigma))


def draw_varying_capacities(kind: str, seed: int, rng: np.random.Generator) -> Iterator[float]:
    """Yield the capacity in each of MAX_TRIALS trials, as a fraction of the mean capacity.

    The server of this kind is drawn from the seed, and runs through all trials. Where it is twice
    as slow, it has half of its capacity, so the capacity in a trial is the mean of 1 / slowdown
    factor over the seconds of the trial.
    """
    server = drawn.draw_server(kind, seed)
    times_s = np.arange(0, MAX_TRIALS * TRIAL_S, 1.0)
    factors = server.draw_run_factors(times_s, rng)

    truth_rng = np.random.default_rng([seed, TRUTH_RNG_STREAM])
    long_run_factors = server.draw_long_run_factors(int(DRAWN_TRUTH_LENGTH_S), truth_rng)
    mean_capacity = float(np.mean(1 / long_run_factors))

    for factors_in_trial in np.split(factors, MAX_TRIALS):
        yield float(np.mean(1 / factors_in_trial)) / mean_capacity


class FinishedSearch(NamedTuple):
    """The result of a search, and whether its 95 % interval covers the true capacity."""

    result: SearchResult
    covers_truth: bool


def run_search(seed: int, create_capacities: CapacityModel) -> FinishedSearch:
    """Search for the capacity of a simulated server, which is TRUE_CAPACITY_PER_S.

    `create_capacities` says how the capacity differs from trial to trial. The seed draws these
    differences, the first load of the search and the arrivals.
    """
    rng = np.random.default_rng([seed, SEARCH_RNG_STREAM])
    # The range of loads spans a factor of 4, and the capacity is at a random place in its middle.
    low = TRUE_CAPACITY_PER_S / 4 ** float(rng.uniform(0.2, 0.8))
    search = LoadSearch(SearchSettings(low=low, high=4 * low, run_spread=None))

    relative_capacities = create_capacities(rng)
    while (trial := search.next_trial()) is not None:
        search.add_result(simulate_trial(trial, relative_capacities, rng))

    interval = search.result.interval
    covers_truth = interval is not None and interval.low <= TRUE_CAPACITY_PER_S <= interval.high
    return FinishedSearch(search.result, covers_truth)


def simulate_trial(
    trial: PlannedTrial, relative_capacities: Iterator[float], rng: np.random.Generator
) -> TrialResult:
    """Return the result of a trial, which passes if it offers less than the capacity.

    The capacity is the next value of `relative_capacities` times the true capacity. The offered
    load differs from the planned one by the randomness of Poisson arrivals.
    """
    # The standard deviation of the number of arrivals, as a fraction of their number
    sampling_noise = 1 / math.sqrt(trial.load * TRIAL_S)
    offered_load = trial.load * math.exp(rng.normal(0, sampling_noise))
    capacity = TRUE_CAPACITY_PER_S * next(relative_capacities)
    return TrialResult(
        trial=trial,
        outcome="under" if offered_load < capacity else "over",
        ended_early=False,
        duration_s=TRIAL_S,
        offered_load=offered_load,
        sampling_noise=sampling_noise,
        reason="",
    )


def print_searches(drawn_kinds: Sequence[str], seeds: range) -> bool:
    """Print how many of the 95 % intervals of searches cover the true capacity.

    Returns:
        Whether enough of them do, for each way in which the capacity differs.
    """
    print(
        f"\nsearch: 95 % intervals of {len(seeds)} searches that cover the truth "
        f"(limit {MIN_COVERED_FRACTION:.0%})"
    )
    table = RowTable(
        Column("server", 22), Column("covered", 10), Column("half width", 12), Column("trials", 8)
    )
    table.print_header()

    is_within_limit = True
    for sigma in START_SIGMAS:
        create_capacities = partial(draw_start_capacities, sigma)
        searches = [run_search(seed, create_capacities) for seed in seeds]
        is_within_limit &= print_search_row(table, f"starts {sigma:.1%} apart", searches)

    for kind in drawn_kinds:
        searches = [
            run_search(seed, partial(draw_varying_capacities, kind, seed)) for seed in seeds
        ]
        is_within_limit &= print_search_row(table, kind, searches)

    return is_within_limit


def print_search_row(table: RowTable, server: str, searches: Sequence[FinishedSearch]) -> bool:
    """Print how many searches cover the truth, their relative half width, and their trials.

    The half width is the median and the number of trials the mean over all searches.

    Returns:
        Whether enough searches cover the truth.
    """
    covered = sum(search.covers_truth for search in searches)
    results = [search.result for search in searches]
    relative_half_widths = [
        result.interval.half_width / result.interval.value
        for result in results
        if result.interval is not None
    ]
    mean_trials = np.mean([result.trial_count for result in results])

    cells = [
        server,
        str(covered),
        f"{np.median(relative_half_widths):.2%}",
        f"{mean_trials:.1f}",
    ]
    is_within_limit = covered >= MIN_COVERED_FRACTION * len(searches)
    table.print_row(cells, is_within_limit=is_within_limit)
    return is_within_limit
