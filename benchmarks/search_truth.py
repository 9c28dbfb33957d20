"""How well does the search find the load that half of all full-length runs pass, and at what cost?

    python benchmarks/search_truth.py gb200-vm server --seeds 100
    python benchmarks/search_truth.py gb200-vm interactive --seeds 100
    python benchmarks/search_truth.py gb300-vm server --seeds 24 --guess 214 --near
    python benchmarks/search_truth.py coverage --seeds 100   # servers that differ between runs

SIMULATED, in virtual time. The truth is a ladder: rates in 1 % steps, 600 s from empty, 20 seeds
each, and the rate at which half of them pass by a probit fit. The search starts from a bracket of a
factor of four that lies differently around the truth for every seed, so that no first trial is
lucky. Plain bisection starts from the same brackets with trials of 600 s. With `--near`, the search
starts as `loadgen search` does on a simulated target: at a first load near the guess, without
bounds. The steady-state knee (the highest rate of the ladder whose requests in flight do not grow
over 1,800 s) is printed with the truth. The script prints one JSON object per search and the
errors of all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.core import seeds
from loadgen.core.schedule.build import build_schedule
from loadgen.core.slo import Slo, Term
from loadgen.core.stats import intervals, students_t
from loadgen.core.workload import FixedTokens, Poisson, Stage, Synthetic, Workload
from loadgen.mlperf import dataset, rules
from loadgen.search.goal import FAILED, PASSED, Decision, Goal
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import PlannedTrial, TrialResult
from loadgen.search.search_settings import ESTIMATE_STEP, SIGMA_PER_NOISE, SearchSettings
from loadgen.search.trial_monitor import PlannedLoad, TrialMonitor
from loadgen.sim import virtual_backend as virtual
from loadgen.sim.engine.system import SimulatedSystem
from loadgen.sim.presets import preset as presets
from loadgen.sim.presets.preset import Preset
from loadgen.sim.request_lengths import RequestSize

NS_PER_S = 1_000_000_000
BENCHMARK = "llama2-70b"
FULL_LENGTH_S = 600
MONITOR_INTERVAL_S = 5
PRECISIONS = {"server": 0.01, "interactive": 0.03}  # of the search, as a fraction of the load
# The time of a search may be at most this fraction of the time of plain bisection.
MAX_TIME_FRACTIONS = {"server": 0.70, "interactive": 0.40}


class SearchProblem(NamedTuple):
    """A simulated system under the latency limits of an MLPerf benchmark.

    `precision` is that of the search, as a fraction of the load. `run_length_s` is the length of a
    run, and of a trial that is not ended early.
    """

    preset: Preset
    goal: Goal
    lengths: dataset.Lengths
    precision: float
    run_length_s: float


def create_problem(
    preset_name: str, scenario: rules.Scenario, run_length_s: float
) -> SearchProblem:
    """Return the problem to find the capacity of a preset under the p99 limits of a scenario.

    The limits are those of TTFT and TPOT in the MLPerf scenario "server" or "interactive".
    """
    test = rules.create_test(BENCHMARK, scenario)
    assert test.ttft_ns is not None and test.tpot_ns is not None
    terms = (
        Term(metric="ttft", limit_ns=test.ttft_ns),
        Term(metric="tpot_mlperf", limit_ns=test.tpot_ns),
    )
    benchmark_rules = rules.load_rules().benchmarks[BENCHMARK]

    return SearchProblem(
        preset=presets.load_preset(preset_name),
        goal=Goal(slo=Slo(terms=terms)),
        lengths=dataset.synthetic_lengths(benchmark_rules, benchmark_name=BENCHMARK),
        precision=PRECISIONS[scenario],
        run_length_s=run_length_s,
    )


class SimulatedRun(NamedTuple):
    """A simulated run: when its requests were due, and their records in the order of their end."""

    due_ns: NDArray[np.int64]
    records: NDArray[np.void]

    @property
    def done_ns(self) -> NDArray[np.int64]:
        """When each request was done, in ascending order."""
        done_ns: NDArray[np.int64] = self.records["done_ns"]
        return done_ns

    @property
    def end_s(self) -> float:
        """When the last request was done, in seconds since the start of the run."""
        return int(self.done_ns.max()) / NS_PER_S

    def count_in_flight(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of requests in flight at each of these times."""
        begun = np.searchsorted(self.due_ns, times_ns, "right")
        ended = np.searchsorted(self.done_ns, times_ns, "right")
        return begun - ended


def simulate_from_empty(
    problem: SearchProblem, rate_per_s: float, seed: int, length_s: float
) -> SimulatedRun:
    """Simulate a run of Poisson arrivals that begins with an empty server.

    The requests have the lengths of the data set in a random order. After the last one the order is
    repeated.
    """
    order = seeds.generator(seed, "order").permutation(len(problem.lengths.input))
    input_tokens = problem.lengths.input[order].tolist()
    output_tokens = problem.lengths.output[order].tolist()

    def size_of_request(number: int) -> RequestSize:
        index = number % len(input_tokens)
        return RequestSize(input_tokens[index], output_tokens[index])

    schedule = build_schedule(create_arrivals_workload(rate_per_s, length_s), seed)
    preset = problem.preset
    system = SimulatedSystem(costs=preset.costs, limits=preset.limits, speeds=preset.speeds)
    result, _ = virtual.simulate(schedule, size_of_request, system)

    order_of_end = np.argsort(result.records["done_ns"], kind="stable")
    return SimulatedRun(schedule.stages[0].arrivals_ns, result.records[order_of_end])


def create_arrivals_workload(rate_per_s: float, length_s: float) -> Workload:
    """Return a workload with Poisson arrivals, from which a schedule can be built.

    Its requests have one token each, because the simulation is given the real lengths directly.
    """
    one_token: Any = FixedTokens(value=1)
    arrival = Poisson(rate=rate_per_s)
    stage = Stage(name="load", arrival=arrival, duration_ns=round(length_s * NS_PER_S))
    return Workload(
        name="arrivals",
        requests=Synthetic(input_tokens=one_token, output_tokens=one_token),
        stages=(stage,),
    )


def passes_slo(problem: SearchProblem, simulated: SimulatedRun) -> bool:
    """Return whether no objective of the SLO is missed by more requests than it allows."""
    misses = problem.goal.find_misses(simulated.records).sum(axis=1)
    allowed_misses = problem.goal.allowed_misses(len(simulated.due_ns))
    return bool(np.all(misses <= np.array(allowed_misses)))


def run_trial(problem: SearchProblem, trial: PlannedTrial, seed: int) -> TrialResult:
    """Simulate one trial of a search, which ends early if its outcome is certain before its end."""
    simulated = simulate_from_empty(problem, trial.load, seed, problem.run_length_s)
    early = find_early_decision(problem, trial, simulated)
    if early is not None:
        return _result_of_early_end(problem, trial, seed, simulated, early)

    offered_requests = np.sum(simulated.due_ns < problem.run_length_s * NS_PER_S)
    return TrialResult(
        trial=trial,
        outcome=PASSED if passes_slo(problem, simulated) else FAILED,
        ended_early=False,
        duration_s=simulated.end_s,
        offered_load=float(offered_requests) / problem.run_length_s,
        sampling_noise=1 / math.sqrt(len(simulated.due_ns)),
    )


class EarlyDecision(NamedTuple):
    """The outcome of a trial that was certain before its end, and when the monitor found it."""

    time_s: float  # since the start of the trial
    decision: Decision


def _result_of_early_end(
    problem: SearchProblem,
    trial: PlannedTrial,
    seed: int,
    simulated: SimulatedRun,
    early: EarlyDecision,
) -> TrialResult:
    """Return the result of a trial that ends at an early decision.

    No requests are sent after the decision, but those in flight are completed, which takes time.
    That time is found by simulating a run with the same seed that is only that long.
    """
    load_s = min(early.time_s, problem.run_length_s)
    shortened = simulate_from_empty(problem, trial.load, seed, load_s)
    offered_requests = np.sum(simulated.due_ns < load_s * NS_PER_S)
    return TrialResult(
        trial=trial,
        outcome=early.decision.outcome,
        ended_early=True,
        duration_s=max(early.time_s, shortened.end_s),
        offered_load=float(offered_requests) / load_s,
        sampling_noise=1 / math.sqrt(len(simulated.due_ns)),
        reason=early.decision.reason,
    )


def find_early_decision(
    problem: SearchProblem, trial: PlannedTrial, simulated: SimulatedRun
) -> EarlyDecision | None:
    """Return the first decision of the monitor that watches a trial, or None if it makes none.

    As in a real search, the monitor regularly gets the records of the requests that have ended
    since the last time.
    """
    planned_load = PlannedLoad(simulated.due_ns)
    monitor = TrialMonitor(problem.goal, planned_load, may_pass_early=trial.may_pass_early)

    interval_ns = MONITOR_INTERVAL_S * NS_PER_S
    last_done_ns = int(simulated.done_ns.max())
    shown_records = 0
    for now_ns in range(interval_ns, last_done_ns, interval_ns):
        ended_records = int(np.searchsorted(simulated.done_ns, now_ns, "right"))
        new_records = simulated.records[shown_records:ended_records]
        shown_records = ended_records

        decision = monitor.add_rows(now_ns, new_records)
        if decision:
            return EarlyDecision(now_ns / NS_PER_S, decision)

    return None


def run_search(problem: SearchProblem, settings: SearchSettings, seed: int) -> LoadSearch:
    """Run a search with simulated trials to its end, and return it."""
    search = LoadSearch(settings)
    while (trial := search.next_trial()) is not None:
        trial_seed = seeds.derive_seed(seed, "probe", trial.number)
        search.add_result(run_trial(problem, trial, trial_seed))
    return search


class Bracket(NamedTuple):
    """Two loads between which a search or a bisection begins to look for the capacity."""

    low: float
    high: float


def draw_bracket(guess: float, seed: int) -> Bracket:
    """Return a bracket of a factor of four around a guess of the capacity.

    Where the guess lies in the bracket is random, so that no first trial is at the capacity by
    design.
    """
    position = float(seeds.generator(seed, "bracket").uniform(0.2, 0.8))
    low = guess / 4**position
    return Bracket(low, 4 * low)


def bracket_settings(problem: SearchProblem, guess: float, seed: int) -> SearchSettings:
    """Return the settings of a search that begins with a bracket around the guess."""
    bracket = draw_bracket(guess, seed)
    return SearchSettings(low=bracket.low, high=bracket.high, precision=problem.precision)


# In searches of nine packaged workloads, the first load was between 0.85 and 1.09 of the result.
MIN_FIRST_LOAD_FACTOR = 0.85
MAX_FIRST_LOAD_FACTOR = 1.09
NO_LOWER_BOUND = 1e-3  # far below every load
NO_UPPER_BOUND = 1e6  # far above every load


def near_guess_settings(problem: SearchProblem, guess: float, seed: int) -> SearchSettings:
    """Return the settings of a search that begins at a first load near the guess, without bounds.

    This is how `loadgen search` begins on a simulated target, whose capacity it can estimate.
    """
    rng = seeds.generator(seed, "first load")
    factor = rng.uniform(MIN_FIRST_LOAD_FACTOR, MAX_FIRST_LOAD_FACTOR)
    return SearchSettings(
        low=NO_LOWER_BOUND,
        high=NO_UPPER_BOUND,
        start=guess * float(factor),
        first_step=ESTIMATE_STEP,
        precision=problem.precision,
    )


class Bisection(NamedTuple):
    """The result of a plain bisection: its load, the simulated time, and its number of trials."""

    load: float
    duration_s: float
    trial_count: int


def run_bisection(problem: SearchProblem, guess: float, seed: int) -> Bisection:
    """Bisect the bracket with which the search of this seed begins, in trials of full length.

    The result is the geometric mean of the last bracket, which is as narrow as the precision.
    """
    low, high = draw_bracket(guess, seed)
    duration_s = 0.0
    trial_count = 0
    while high / low > 1 + problem.precision:
        rate_per_s = math.sqrt(low * high)
        trial_seed = seeds.derive_seed(seed, "bisect", trial_count)
        simulated = simulate_from_empty(problem, rate_per_s, trial_seed, problem.run_length_s)
        if passes_slo(problem, simulated):
            low = rate_per_s
        else:
            high = rate_per_s

        duration_s += simulated.end_s
        trial_count += 1

    return Bisection(math.sqrt(low * high), duration_s, trial_count)


class PassCount(NamedTuple):
    """A rate, and how many of the runs at it pass the SLO."""

    rate_per_s: float
    passes: int


LADDER_STEP = 1.01
LADDER_FIRST_SEED = 10_000  # other seeds than those of the searches


class RateLadder:
    """Runs at fixed rates in steps of 1 % around a guess, which show the true capacity.

    Step 0 is the guess and step n is guess * 1.01^n, where n can be negative. At each step there
    are `run_count` runs with different seeds.
    """

    def __init__(self, problem: SearchProblem, guess: float, run_count: int) -> None:
        self._problem = problem
        self._guess = guess
        self.run_count = run_count
        self._passes_by_step: dict[int, int] = {}

    def count_passes(self, step: int) -> int:
        """Return how many runs at a step pass. The runs are simulated once and remembered."""
        if step not in self._passes_by_step:
            seed_range = range(LADDER_FIRST_SEED, LADDER_FIRST_SEED + self.run_count)
            self._passes_by_step[step] = sum(self._passes(step, seed) for seed in seed_range)
        return self._passes_by_step[step]

    def _passes(self, step: int, seed: int) -> bool:
        """Simulate one run at a step and return whether it passes the SLO."""
        rate_per_s = self._rate_at(step)
        simulated = simulate_from_empty(self._problem, rate_per_s, seed, self._problem.run_length_s)
        return passes_slo(self._problem, simulated)

    def _rate_at(self, step: int) -> float:
        """Return the rate of a step, in requests per second."""
        return float(self._guess * LADDER_STEP**step)

    def extend_until_decided(self) -> None:
        """Run at further steps until all runs pass at the lowest and none at the highest."""
        lowest_step = 0
        while self.count_passes(lowest_step) < self.run_count:
            lowest_step -= 1

        highest_step = lowest_step + 1
        while self.count_passes(highest_step) > 0:
            highest_step += 1

    def results(self) -> list[PassCount]:
        """Return the result of each step, the lowest rate first."""
        return [
            PassCount(self._rate_at(step), passes)
            for step, passes in sorted(self._passes_by_step.items())
        ]


class PassCurve(NamedTuple):
    """The probability that a run at a rate passes, as a probit curve.

    P(pass) = Phi((log(capacity) - log(rate)) / sigma), where Phi is the distribution function of
    the standard normal distribution. At the capacity, half of the runs pass.
    """

    capacity_per_s: float
    sigma: float  # about the relative width of the curve

    def log_likelihood(
        self, log_rates: NDArray[np.float64], passes: NDArray[np.int64], run_count: int
    ) -> float:
        """Return the log-likelihood of the curve, given how many of `run_count` runs pass."""
        distances = math.log(self.capacity_per_s) - log_rates
        probabilities = students_t.normal_cdf(distances / self.sigma)
        probabilities = np.clip(probabilities, 1e-9, 1 - 1e-9)  # so that the logarithms are finite
        failures = run_count - passes
        terms = passes * np.log(probabilities) + failures * np.log(1 - probabilities)
        return float(terms.sum())


def fit_pass_curve(results: list[PassCount], run_count: int) -> PassCurve:
    """Fit the pass probability by maximum likelihood, given the passes at several rates.

    All combinations of 60 values of sigma and 1,200 capacities between the lowest and the highest
    rate are tried.
    """
    log_rates = np.log([result.rate_per_s for result in results])
    passes = np.array([result.passes for result in results])
    curves = [
        PassCurve(math.exp(log_capacity), float(sigma))
        for sigma in np.geomspace(5e-4, 0.05, 60)
        for log_capacity in np.linspace(log_rates.min(), log_rates.max(), 1200)
    ]
    return max(curves, key=lambda curve: curve.log_likelihood(log_rates, passes, run_count))


# The number of requests in flight is sampled after the server has settled.
KNEE_SETTLING_S = 600
KNEE_END_S = 2400
KNEE_SAMPLE_INTERVAL_S = 30
KNEE_SEED = 77
MAX_RELATIVE_GROWTH = 0.2  # of the mean number of requests in flight, over the observed time


def find_steady_state_knee(problem: SearchProblem, capacity_per_s: float) -> float:
    """Return the highest rate at which the number of requests in flight does not grow.

    Rates are tried in 1 % steps, from 5 % above the capacity down to 30 % below it. If the number
    grows at all of them, the result is the rate below the last one.
    """
    rate_per_s = capacity_per_s * 1.05
    while rate_per_s > capacity_per_s * 0.7 and in_flight_grows(problem, rate_per_s):
        rate_per_s /= 1.01
    return rate_per_s


def in_flight_grows(problem: SearchProblem, rate_per_s: float) -> bool:
    """Return whether the number of requests in flight grows in a long run at this rate.

    It grows if its linear trend from KNEE_SETTLING_S to KNEE_END_S is a noticeable fraction of its
    mean.
    """
    simulated = simulate_from_empty(problem, rate_per_s, KNEE_SEED, KNEE_END_S)
    sample_times_s = np.arange(KNEE_SETTLING_S, KNEE_END_S, KNEE_SAMPLE_INTERVAL_S)
    in_flight = simulated.count_in_flight(sample_times_s * NS_PER_S).astype(float)
    growth, _ = intervals.extrapolate_growth(in_flight, len(in_flight))
    return bool(growth >= MAX_RELATIVE_GROWTH * in_flight.mean())


def search_with_random_outcomes(
    true_load: float,
    settings: SearchSettings,
    *,
    run_spread: float,
    sampling_spread: float,
    rng: np.random.Generator,
) -> LoadSearch:
    """Run a search whose trials have random outcomes instead of a simulator, and return it.

    A trial passes if its load is below the capacity of its run. That capacity is log-normal around
    the true load. The standard deviation of its logarithm has two parts: `run_spread`, by which the
    server differs from run to run, and `sampling_spread`, which comes from random arrivals.
    """
    total_spread = math.hypot(run_spread, sampling_spread)
    search = LoadSearch(settings)
    while (trial := search.next_trial()) is not None:
        capacity_of_run = true_load * math.exp(total_spread * float(rng.standard_normal()))
        search.add_result(
            TrialResult(
                trial=trial,
                outcome=PASSED if trial.load < capacity_of_run else FAILED,
                ended_early=False,
                duration_s=FULL_LENGTH_S,
                offered_load=trial.load,
                # The search expects a spread of SIGMA_PER_NOISE times this noise.
                sampling_noise=sampling_spread / SIGMA_PER_NOISE,
            )
        )
    return search


class Coverage(NamedTuple):
    """How many searches have an interval that contains the truth, and how many trials they take."""

    covering_searches: int
    mean_trials: float


SAMPLING_SPREAD = 0.002  # small, so that the spread from run to run decides


def measure_coverage(
    run_spread: float, search_count: int, *, specified_run_spread: float | None
) -> Coverage:
    """Run searches on servers that differ from run to run, and count the covering intervals.

    Args:
        run_spread: The standard deviation of the logarithm of the capacity from run to run.
        search_count: The number of searches, each with a true load of its own.
        specified_run_spread: The option `--run-spread` of the searches. With None, each search
            estimates the spread itself.
    """
    settings = SearchSettings(
        low=1, high=1e6, start=10, precision=0.02, run_spread=specified_run_spread
    )
    covering_searches = 0
    trial_count = 0
    for seed in range(search_count):
        rng = seeds.generator(seed, f"run spread {run_spread}")
        true_load = float(rng.uniform(70, 140))
        search = search_with_random_outcomes(
            true_load, settings, run_spread=run_spread, sampling_spread=SAMPLING_SPREAD, rng=rng
        )

        interval = search.result.interval
        if interval is not None and interval.low <= true_load <= interval.high:
            covering_searches += 1
        trial_count += len(search.results)

    return Coverage(covering_searches, trial_count / search_count)


def print_coverage(search_count: int) -> None:
    """Print the coverage for several spreads, estimated by the search or specified by the user."""
    for run_spread in (0.0, 0.004, 0.01, 0.02):
        for specified_run_spread in (None, run_spread):
            coverage = measure_coverage(
                run_spread, search_count, specified_run_spread=specified_run_spread
            )
            source = "estimated" if specified_run_spread is None else "specified"
            print(
                f"run-to-run spread {run_spread:.1%}, {source}: {coverage.covering_searches} of "
                f"{search_count} intervals contain the truth, {coverage.mean_trials:.1f} trials",
                flush=True,
            )


class Truth(NamedTuple):
    """What runs at fixed rates show about the true capacity."""

    run_count: int  # at each rate
    results: list[PassCount]
    curve: PassCurve
    knee_per_s: float

    def format_lines(self) -> str:
        """Return how many runs pass at each rate, the fitted capacity, and the knee, as text."""
        passes_text = ", ".join(
            f"{result.rate_per_s:.1f}/s {result.passes}/{self.run_count}" for result in self.results
        )
        capacity_text = f"{self.curve.capacity_per_s:.2f}/s, sigma {self.curve.sigma:.2%}"
        return (
            f"ladder: {passes_text}\n"
            f"truth: {capacity_text}; steady-state knee {self.knee_per_s:.1f}/s"
        )


def measure_truth(problem: SearchProblem, guess: float, run_count: int) -> Truth:
    """Simulate runs at fixed rates around the guess, and determine the capacity from them."""
    ladder = RateLadder(problem, guess, run_count)
    ladder.extend_until_decided()
    results = ladder.results()
    curve = fit_pass_curve(results, run_count)
    knee_per_s = find_steady_state_knee(problem, curve.capacity_per_s)
    return Truth(run_count, results, curve, knee_per_s)


def format_bisections(bisections: list[Bisection]) -> str:
    """Return the mean simulated time and the mean number of trials of plain bisections."""
    trials = np.mean([bisection.trial_count for bisection in bisections])
    return f"plain bisection: {mean_duration_s(bisections):.0f} s, {trials:.1f} trials"


def mean_duration_s(bisections: list[Bisection]) -> float:
    """Return the mean simulated time of bisections, or NaN if there are none."""
    if not bisections:
        return math.nan
    return float(np.mean([bisection.duration_s for bisection in bisections]))


class SearchOutcome(NamedTuple):
    """What a search found, compared with the true capacity, and what it cost."""

    seed: int
    load: float
    relative_error: float
    interval_covers_truth: bool
    relative_half_width: float  # of the interval
    confirmed_load: float | None
    stop_reason: str
    trial_count: int
    duration_s: float  # simulated, without the confirmation
    cpu_s: float
    trials: list[dict[str, Any]]


def measure_search(
    problem: SearchProblem, settings: SearchSettings, seed: int, true_load: float
) -> SearchOutcome:
    """Run a search and compare its result with the true capacity."""
    cpu_start_s = time.process_time()
    search = run_search(problem, settings, seed)
    cpu_s = time.process_time() - cpu_start_s

    result = search.result
    assert result.load is not None and result.interval is not None
    return SearchOutcome(
        seed=seed,
        load=result.load,
        relative_error=result.load / true_load - 1,
        interval_covers_truth=result.interval.low <= true_load <= result.interval.high,
        relative_half_width=result.interval.half_width / result.load,
        confirmed_load=result.confirmed_load,
        stop_reason=result.stop_reason,
        trial_count=result.trial_count,
        duration_s=result.duration_s - result.confirmation_s,
        cpu_s=cpu_s,
        trials=[describe_trial(trial_result) for trial_result in search.results],
    )


def describe_trial(result: TrialResult) -> dict[str, Any]:
    """Return the result of a trial as a JSON object."""
    return {
        "kind": result.kind,
        "load": round(result.load, 2),
        "outcome": result.outcome,
        "ended_early": result.ended_early,
        "duration_s": round(result.duration_s),
    }


def print_errors(
    outcomes: list[SearchOutcome], precision: float, bisection_s: float, max_time_fraction: float
) -> None:
    """Print the errors of all searches, and their simulated time relative to plain bisection."""
    errors = np.abs([outcome.relative_error for outcome in outcomes])
    within_precision = np.mean(errors <= precision)
    covering = np.mean([outcome.interval_covers_truth for outcome in outcomes])
    mean_s = float(np.mean([outcome.duration_s for outcome in outcomes]))

    print(
        f"{len(outcomes)} seeds: within {precision:.0%} in {within_precision:.0%}, "
        f"mean error {errors.mean():.2%}, median {np.median(errors):.2%}, "
        f"largest {errors.max():.2%}; interval contains the truth in {covering:.0%}; "
        f"{mean_s:.0f} s without the confirmation, {mean_s / bisection_s:.0%} of plain bisection "
        f"(at most {max_time_fraction:.0%})"
    )


def main() -> None:
    """Print the truth, the cost of bisection and the errors of all searches."""
    args = parse_command_line()
    if args.preset == "coverage":
        print_coverage(args.seeds)
        return

    problem = create_problem(args.preset, args.scenario, args.length)
    print(f"SIMULATED: {args.preset}, {args.scenario} limits, {problem.lengths.name}")
    true_load = args.truth
    if true_load is None:
        truth = measure_truth(problem, args.guess, args.ladder)
        true_load = truth.curve.capacity_per_s
        print(truth.format_lines(), flush=True)

    bisections = [run_bisection(problem, args.guess, seed) for seed in range(args.bisections)]
    bisection_s = mean_duration_s(bisections)
    if bisections:
        print(format_bisections(bisections), flush=True)

    create_settings = near_guess_settings if args.near else bracket_settings
    outcomes = []
    for seed in range(args.first, args.first + args.seeds):
        settings = create_settings(problem, args.guess, seed)
        outcome = measure_search(problem, settings, seed, true_load)
        outcomes.append(outcome)
        print(json.dumps(outcome._asdict()), flush=True)

    print_errors(outcomes, problem.precision, bisection_s, MAX_TIME_FRACTIONS[args.scenario])
    if args.out:
        document = {
            "true_load": true_load,
            "bisection_s": bisection_s,
            "searches": [outcome._asdict() for outcome in outcomes],
        }
        args.out.write_text(json.dumps(document, indent=1))


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("preset", nargs="?", default="gb200-vm", help="or: coverage")
    parser.add_argument("scenario", nargs="?", default="server", choices=list(PRECISIONS))
    parser.add_argument("--length", type=float, default=FULL_LENGTH_S, help="of a run, s")
    parser.add_argument("--seeds", type=int, default=100, help="the number of searches")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--ladder", type=int, default=20, help="runs at each rate of the ladder")
    parser.add_argument("--guess", type=float, default=150.0, help="of the capacity, requests/s")
    parser.add_argument("--truth", type=float, help="from an earlier ladder, instead of a new one")
    parser.add_argument(
        "--near", action="store_true", help="begin at a first load near the guess, without bounds"
    )
    parser.add_argument("--bisections", type=int, default=10, help="seeds of plain bisection")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")

    return rig.parse_arguments(parser, seeds=1, bisections=1, ladder=1, truth=150.0, length=20.0)


if __name__ == "__main__":
    main()
