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
from loadgen.search.goal import Decision, Goal, Outcome
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
FULL_LENGTH_S = 600
WATCH_INTERVAL_S = 5
PRECISION = {"server": 0.01, "interactive": 0.03}
FIRST_LOAD_FACTORS = (
    0.85,
    1.09,
)  # first loads of searches of nine packaged workloads, over what they found
MAX_TIME_FRACTION = {"server": 0.70, "interactive": 0.40}  # of plain bisection's time, at most


BENCHMARK = "llama2-70b"


class SearchProblem(NamedTuple):
    """A simulated system under the latency limits of an MLPerf benchmark.

    `precision` is that of the search, as a fraction of the load. `full_s` is the length of a run.
    """

    preset: Preset
    goal: Goal
    lengths: dataset.Lengths
    precision: float
    full_s: float


def create_problem(preset_name: str, scenario: Any, full_s: float) -> SearchProblem:
    """Return the search for the capacity of a preset under the limits of a scenario.

    The scenario is "server" or "interactive"; runs last `full_s` seconds.
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
        precision=PRECISION[scenario],
        full_s=full_s,
    )


class SimulatedRun(NamedTuple):
    """A simulated run: when its requests were due, and their records in the order of their end."""

    due_ns: NDArray[np.int64]
    rows: NDArray[np.void]


def simulate_from_empty(
    problem: SearchProblem, rate: float, seed: int, length_s: float
) -> SimulatedRun:
    """Simulate a run of Poisson arrivals that begins with an empty server."""
    order = seeds.generator(seed, "order").permutation(len(problem.lengths.input))
    inputs = problem.lengths.input[order].tolist()
    outputs = problem.lengths.output[order].tolist()
    sample_count = len(inputs)
    schedule = build_schedule(create_poisson_workload(rate, length_s), seed)
    result, _ = virtual.simulate(
        schedule,
        lambda number: RequestSize(inputs[number % sample_count], outputs[number % sample_count]),
        SimulatedSystem(
            costs=problem.preset.costs, limits=problem.preset.limits, speeds=problem.preset.speeds
        ),
    )
    order_of_end = np.argsort(result.records["done_ns"], kind="stable")

    return SimulatedRun(schedule.stages[0].arrivals_ns, result.records[order_of_end])


def create_poisson_workload(rate: float, length_s: float) -> Workload:
    """Return a workload that only serves to schedule arrivals; its lengths are not used."""
    one_token: Any = FixedTokens(value=1)
    stage = Stage(name="load", arrival=Poisson(rate=rate), duration_ns=round(length_s * NS_PER_S))
    return Workload(
        name="arrivals",
        requests=Synthetic(input_tokens=one_token, output_tokens=one_token),
        stages=(stage,),
    )


def passes_slo(problem: SearchProblem, simulated: SimulatedRun) -> bool:
    """Return whether no objective of the SLO is missed by more requests than it allows."""
    misses = problem.goal.find_misses(simulated.rows).sum(axis=1)
    allowed_misses = problem.goal.allowed_misses(len(simulated.due_ns))
    return all(count <= allowed for count, allowed in zip(misses, allowed_misses, strict=True))


class EarlyDecision(NamedTuple):
    """When a trial was decided before its end, and how."""

    now_ns: int
    decision: Decision


def run_trial(problem: SearchProblem, trial: PlannedTrial, seed: int) -> TrialResult:
    """Run one trial of a search, watched every WATCH_INTERVAL_S seconds.

    Its duration includes the time in which requests in flight at its decision end.
    """
    simulated = simulate_from_empty(problem, trial.load, seed, problem.full_s)
    early = find_early_decision(problem, trial, simulated)
    if early is None:
        outcome: Outcome = "under" if passes_slo(problem, simulated) else "over"
        reason = ""
        observed_s = problem.full_s
        duration_s = int(simulated.rows["done_ns"].max()) / NS_PER_S
    else:
        outcome = early.decision.outcome
        reason = early.decision.reason
        observed_s = min(early.now_ns / NS_PER_S, problem.full_s)
        shortened = simulate_from_empty(problem, trial.load, seed, observed_s)
        duration_s = max(early.now_ns, int(shortened.rows["done_ns"].max())) / NS_PER_S

    offered_requests = int((simulated.due_ns < observed_s * NS_PER_S).sum())
    return TrialResult(
        trial=trial,
        outcome=outcome,
        ended_early=early is not None,
        duration_s=duration_s,
        offered_load=offered_requests / observed_s,
        sampling_noise=1 / math.sqrt(len(simulated.due_ns)),
        reason=reason,
    )


def draw_bracket(guess: float, seed: int) -> tuple[float, float]:
    """Return a bracket of a factor of four that lies at random around a guess."""
    low = guess / 4 ** float(seeds.generator(seed, "bracket").uniform(0.2, 0.8))
    return low, 4 * low


def find_early_decision(
    problem: SearchProblem, trial: PlannedTrial, simulated: SimulatedRun
) -> EarlyDecision | None:
    """Return the first decision of a monitor that sees the records as they end, or None."""
    monitor = TrialMonitor(
        problem.goal, PlannedLoad(simulated.due_ns), may_pass_early=trial.may_pass_early
    )
    done_ns = simulated.rows["done_ns"]

    interval_ns = WATCH_INTERVAL_S * NS_PER_S
    for now_ns in range(interval_ns, int(done_ns.max()), interval_ns):
        first_row, end_row = np.searchsorted(done_ns, (now_ns - interval_ns, now_ns), "right")
        decision = monitor.add_rows(now_ns, simulated.rows[first_row:end_row])
        if decision:
            return EarlyDecision(now_ns, decision)

    return None


# Bounds of a search that knows none: far below and above every load
NO_LOWER_BOUND, NO_UPPER_BOUND = 1e-3, 1e6


def create_search(problem: SearchProblem, guess: float, seed: int, *, near: bool) -> LoadSearch:
    """Return a search that begins around a guess of the capacity.

    With `near`, it begins at a first load near the guess and has no bounds, as `loadgen search` on
    a simulated target. Otherwise it begins with a bracket of a factor of four around the guess.
    """
    if near:
        first_load = guess * float(seeds.generator(seed, "first load").uniform(*FIRST_LOAD_FACTORS))
        settings = SearchSettings(
            low=NO_LOWER_BOUND,
            high=NO_UPPER_BOUND,
            start=first_load,
            first_step=ESTIMATE_STEP,
            precision=problem.precision,
        )
    else:
        low, high = draw_bracket(guess, seed)
        settings = SearchSettings(low=low, high=high, precision=problem.precision)
    return LoadSearch(settings)


def run_search(problem: SearchProblem, guess: float, seed: int, *, near: bool) -> LoadSearch:
    """Run a search to its end and return it; for `near` see `create_search`."""
    search = create_search(problem, guess, seed, near=near)
    while (trial := search.next_trial()) is not None:
        search.add_result(run_trial(problem, trial, seeds.derive_seed(seed, "probe", trial.number)))
    return search


class Bisection(NamedTuple):
    """The result of a plain bisection: its load, the simulated time, and its number of trials."""

    load: float
    spent_s: float
    trial_count: int


def run_bisection(problem: SearchProblem, guess: float, seed: int) -> Bisection:
    """Bisect the bracket with which the search of this seed begins, in trials of full length."""
    low, high = draw_bracket(guess, seed)
    spent_s = 0.0

    trial_count = 0
    while high / low > 1 + problem.precision:
        rate = math.sqrt(low * high)
        trial_seed = seeds.derive_seed(seed, "bisect", trial_count)

        simulated = simulate_from_empty(problem, rate, trial_seed, problem.full_s)
        if passes_slo(problem, simulated):
            low = rate
        else:
            high = rate

        spent_s += int(simulated.rows["done_ns"].max()) / NS_PER_S
        trial_count += 1

    return Bisection(math.sqrt(low * high), spent_s, trial_count)


class LadderStep(NamedTuple):
    """A rate of the ladder, and how many runs at it pass the SLO."""

    rate: float
    passes: int


class Ladder:
    """Runs at rates in 1 % steps around a guess, to which the truth is fitted.

    Step 0 is the guess; step n is guess * 1.01^n. Each step has `run_count` runs.
    """

    def __init__(self, problem: SearchProblem, guess: float, run_count: int) -> None:
        self._problem = problem
        self._guess = guess
        self.run_count = run_count
        self._passes_by_step: dict[int, int] = {}

    def count_passes(self, step: int) -> int:
        """Return how many runs at a step pass, and remember the count."""
        if step not in self._passes_by_step:
            self._passes_by_step[step] = sum(
                passes_slo(self._problem, self._simulate(step, seed))
                for seed in range(self.run_count)
            )
        return self._passes_by_step[step]

    def _simulate(self, step: int, seed: int) -> SimulatedRun:
        """Simulate a run at a step."""
        rate = self._guess * 1.01**step
        return simulate_from_empty(self._problem, rate, 10_000 + seed, self._problem.full_s)

    def extend_until_decided(self) -> None:
        """Add steps until all runs pass at the lowest and none at the highest."""
        step = 0
        while self.count_passes(step) < self.run_count:
            step -= 1

        while self.count_passes(step + 1) > 0:
            step += 1

        lowest_step = min(self._passes_by_step)
        while self.count_passes(lowest_step) < self.run_count:
            lowest_step -= 1

    def steps(self) -> list[LadderStep]:
        """Return the steps, the lowest rate first."""
        return [
            LadderStep(self._guess * 1.01**step, passes)
            for step, passes in sorted(self._passes_by_step.items())
        ]


class FittedTruth(NamedTuple):
    """The rate that half of the runs pass, and the sigma of the pass curve as a fraction of it."""

    rate: float
    sigma: float


def fit_truth(steps: list[LadderStep], run_count: int) -> FittedTruth:
    """Fit the probability that a run at a rate passes, by maximum likelihood.

    It is a probit curve: P(pass at rate r) = Phi((theta - log r) / sigma), where Phi is the normal
    distribution function and exp(theta) the rate that half of the runs pass. Both parameters are
    searched for on a grid.
    """
    log_rates = np.log([step.rate for step in steps])
    passes = np.array([step.passes for step in steps])
    failures = run_count - passes
    best_log_likelihood = -math.inf

    best = FittedTruth(0.0, 0.0)
    for sigma in np.geomspace(5e-4, 0.05, 60):
        for theta in np.linspace(log_rates.min(), log_rates.max(), 1200):
            probability = students_t.normal_cdf((theta - log_rates) / sigma)
            probability = np.clip(probability, 1e-9, 1 - 1e-9)  # whose logarithms are finite

            log_likelihood = float(
                (passes * np.log(probability) + failures * np.log(1 - probability)).sum()
            )
            if log_likelihood > best_log_likelihood:
                best_log_likelihood = log_likelihood
                best = FittedTruth(math.exp(theta), float(sigma))

    return best


KNEE_SETTLING_S, KNEE_END_S, KNEE_SAMPLE_S = 600, 2400, 30


KNEE_SEED = 77


MAX_RELATIVE_GROWTH = 0.2  # of the mean number of requests in flight, over the observed time


def find_steady_state_knee(problem: SearchProblem, around: float) -> float:
    """Return the highest rate at which the number of requests in flight does not grow.

    Rates are tried in 1 % steps, from 5 % above `around` down to 30 % below it, with one seed. A
    run is observed from 600 s to 2,400 s, a sample each 30 s.
    """
    rate = around * 1.05
    while rate > around * 0.7:
        simulated = simulate_from_empty(problem, rate, KNEE_SEED, KNEE_END_S)
        times_ns = np.arange(KNEE_SETTLING_S, KNEE_END_S, KNEE_SAMPLE_S) * NS_PER_S
        begun = np.searchsorted(simulated.due_ns, times_ns, "right")
        ended = np.searchsorted(simulated.rows["done_ns"], times_ns, "right")
        in_flight = (begun - ended).astype(float)
        growth, _ = intervals.extrapolate_growth(in_flight, len(in_flight))
        if growth < MAX_RELATIVE_GROWTH * in_flight.mean():
            return rate

        rate /= 1.01

    return rate


class Coverage(NamedTuple):
    """How many searches have an interval that covers the truth, and their mean number of trials."""

    covering: int
    mean_trials: float


def measure_coverage(
    spread: float, count: int, *, run_spread: float | None = None, sampling: float = 0.002
) -> Coverage:
    """Run searches on random outcomes, without a simulator, and count those that cover the truth.

    The load that a run passes is log-normal around the true load of its search.

    Args:
        spread: How much that load differs from run to run: the standard deviation of its logarithm.
        count: The number of searches. Each has a true load of its own, between 70 and 140.
        run_spread: The value of `--run-spread`. With None the search estimates the spread itself.
        sampling: How much that load also differs with the arrivals of a run.
    """
    covering = 0
    trials = 0

    total_spread = math.hypot(spread, sampling)
    for seed in range(count):
        rng = seeds.generator(seed, f"run spread {spread}")
        true_load = float(rng.uniform(70, 140))

        search = LoadSearch(
            SearchSettings(low=1, high=1e6, start=10, precision=0.02, run_spread=run_spread)
        )
        while (trial := search.next_trial()) is not None:
            run_capacity = true_load * math.exp(total_spread * float(rng.standard_normal()))
            search.add_result(
                TrialResult(
                    trial=trial,
                    outcome="under" if trial.load < run_capacity else "over",
                    ended_early=False,
                    duration_s=FULL_LENGTH_S,
                    offered_load=trial.load,
                    # The search takes SIGMA_PER_NOISE times the noise for the spread of outcomes.
                    sampling_noise=sampling / SIGMA_PER_NOISE,
                )
            )

        interval = search.result.interval
        covering += interval is not None and interval.low <= true_load <= interval.high
        trials += len(search.results)

    return Coverage(covering, trials / count)


def print_coverage(count: int) -> None:
    """Print the coverage for several spreads, which the search estimates or is given."""
    for spread in (0.0, 0.004, 0.01, 0.02):
        for run_spread in (None, spread):
            coverage = measure_coverage(spread, count, run_spread=run_spread)
            source = "learned" if run_spread is None else "told"
            print(
                f"run-to-run spread {spread:.1%}, {source}: {coverage.covering} of {count} cover, "
                f"{coverage.mean_trials:.1f} probes",
                flush=True,
            )


def measure_truth(problem: SearchProblem, guess: float, run_count: int) -> float:
    """Print the ladder, the truth fitted to it and the steady-state knee; return the true rate."""
    ladder = Ladder(problem, guess, run_count)
    ladder.extend_until_decided()
    steps = ladder.steps()
    print("ladder: " + ", ".join(f"{step.rate:.1f}/s {step.passes}/{run_count}" for step in steps))
    truth = fit_truth(steps, run_count)
    knee = find_steady_state_knee(problem, truth.rate)
    print(
        f"truth: {truth.rate:.2f}/s, sigma {truth.sigma:.2%}; steady-state knee {knee:.1f}/s",
        flush=True,
    )

    return truth.rate


def measure_bisection_s(problem: SearchProblem, guess: float, count: int) -> float:
    """Print the mean cost of plain bisection; return its simulated seconds, or NaN for none."""
    if not count:
        return math.nan
    bisections = [run_bisection(problem, guess, seed) for seed in range(count)]
    mean_s = float(np.mean([bisection.spent_s for bisection in bisections]))
    mean_trials = np.mean([bisection.trial_count for bisection in bisections])
    print(f"plain bisection: {mean_s:.0f} s, {mean_trials:.1f} probes", flush=True)
    return mean_s


def measure_search(
    problem: SearchProblem, guess: float, seed: int, true_rate: float, *, near: bool
) -> dict[str, object]:
    """Run a search and return what it found, its error, its cost and its trials."""
    started_s = time.process_time()
    search = run_search(problem, guess, seed, near=near)
    result = search.result
    assert result.load is not None and result.interval is not None
    trials = [
        (
            trial.kind,
            round(trial.load, 2),
            trial.outcome,
            trial.ended_early,
            round(trial.duration_s),
        )
        for trial in search.results
    ]

    return {
        "seed": seed,
        "answer": result.load,
        "error": result.load / true_rate - 1,
        "covers": result.interval.low <= true_rate <= result.interval.high,
        "half_width": result.interval.half_width / result.load,
        "confirmed": result.confirmed_load,
        "reason": result.stop_reason,
        "probes": result.trial_count,
        "spent_s": result.duration_s - result.confirmation_s,
        "cpu_s": time.process_time() - started_s,
        "told": trials,
    }


def print_errors(
    results: list[dict[str, Any]], precision: float, bisection_s: float, max_time_fraction: float
) -> None:
    """Print the errors of all searches, and their simulated time relative to plain bisection."""
    errors = np.abs([result["error"] for result in results])
    within_precision = np.mean(errors <= precision)
    covering = np.mean([result["covers"] for result in results])
    spent_s = float(np.mean([result["spent_s"] for result in results]))
    print(
        f"{len(results)} seeds: within {precision:.0%} in {within_precision:.0%}, mean error "
        f"{errors.mean():.2%}, median {np.median(errors):.2%}, worst {errors.max():.2%}; interval "
        f"covers the truth in {covering:.0%}; {spent_s:.0f} s, "
        f"{spent_s / bisection_s:.0%} of plain bisection "
        f"(at most {max_time_fraction:.0%}), confirmation left out"
    )


def main() -> None:
    """Print the truth, the cost of bisection and the errors of all searches."""
    args = parse_command_line()
    if args.preset == "coverage":
        print_coverage(args.seeds)
        return

    problem = create_problem(args.preset, args.scenario, args.length)
    print(f"SIMULATED: {args.preset}, {args.scenario} limits, {problem.lengths.name}")
    true_rate = args.truth or measure_truth(problem, args.guess, args.ladder)
    bisection_s = measure_bisection_s(problem, args.guess, args.bisections)

    results = []
    for seed in range(args.first, args.first + args.seeds):
        result = measure_search(problem, args.guess, seed, true_rate, near=args.near)
        results.append(result)
        print(json.dumps(result), flush=True)

    print_errors(results, problem.precision, bisection_s, MAX_TIME_FRACTION[args.scenario])
    if args.out:
        args.out.write_text(
            json.dumps({"truth": true_rate, "plain_s": bisection_s, "seeds": results}, indent=1)
        )


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("preset", nargs="?", default="gb200-vm", help="or: coverage")
    parser.add_argument("scenario", nargs="?", default="server", choices=list(PRECISION))
    parser.add_argument("--length", type=float, default=FULL_LENGTH_S, help="of a run, s")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ladder", type=int, default=20)
    parser.add_argument("--guess", type=float, default=150.0)
    parser.add_argument("--truth", type=float, help="from an earlier ladder, instead of a new one")
    parser.add_argument(
        "--near", action="store_true", help="begin at a first load near the guess, without bounds"
    )
    parser.add_argument("--bisections", type=int, default=10, help="seeds of plain bisection")
    parser.add_argument("--out", type=Path)

    return rig.parse_arguments(parser, seeds=1, bisections=1, ladder=1, truth=150.0, length=20.0)


if __name__ == "__main__":
    main()
