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

import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig

from loadgen.core import seeds
from loadgen.core.schedule.build import build_schedule
from loadgen.core.slo import Slo, Term
from loadgen.core.stats import intervals, students_t
from loadgen.core.workload import FixedTokens, Poisson, Stage, Synthetic, Workload
from loadgen.mlperf import dataset, rules
from loadgen.search.goal import Goal
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import PlannedTrial, TrialResult
from loadgen.search.search_settings import ESTIMATE_STEP, SIGMA_PER_NOISE, SearchSettings
from loadgen.search.trial_monitor import PlannedLoad, TrialMonitor
from loadgen.sim import virtual_backend as virtual
from loadgen.sim.engine.system import SimulatedSystem
from loadgen.sim.presets import preset as presets
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


class SearchProblem(NamedTuple):
    """A preset under the latency limits of a benchmark."""

    preset: Any
    goal: Goal
    lengths: dataset.Lengths
    precision: float
    full_s: float  # of a run


def create_problem(name: str, scenario: Any, full_s: float) -> SearchProblem:
    """Create the problem of a preset and a scenario."""
    test = rules.create_test("llama2-70b", scenario)
    assert test.ttft_ns is not None and test.tpot_ns is not None
    terms = (
        Term(metric="ttft", limit_ns=test.ttft_ns),
        Term(metric="tpot_mlperf", limit_ns=test.tpot_ns),
    )
    lengths = dataset.synthetic_lengths(
        rules.load_rules().benchmarks["llama2-70b"], benchmark="llama2-70b"
    )
    return SearchProblem(
        presets.load_preset(name),
        Goal(slo=Slo(terms=terms)),
        lengths,
        PRECISION[scenario],
        full_s,
    )


def simulate_from_empty(
    problem: SearchProblem, rate: float, seed: int, length_s: float
) -> tuple[Any, Any]:
    """Return the schedule and the rows of one run from empty, in the order of their end."""
    order = seeds.generator(seed, "order").permutation(len(problem.lengths.input))
    inputs, outputs = (
        problem.lengths.input[order].tolist(),
        problem.lengths.output[order].tolist(),
    )
    sample_count = len(inputs)
    stage = Stage(name="load", arrival=Poisson(rate=rate), duration_ns=round(length_s * NS_PER_S))
    one_token: Any = FixedTokens(value=1)
    planned = build_schedule(
        Workload(
            name="x",
            requests=Synthetic(input_tokens=one_token, output_tokens=one_token),
            stages=(stage,),
        ),
        seed,
    )
    result, _ = virtual.simulate(
        planned,
        lambda number: RequestSize(inputs[number % sample_count], outputs[number % sample_count]),
        SimulatedSystem(
            costs=problem.preset.costs, limits=problem.preset.limits, speeds=problem.preset.speeds
        ),
    )
    return planned.stages[0].arrivals_ns, result.records[
        np.argsort(result.records["done_ns"], kind="stable")
    ]


def passes_slo(problem: SearchProblem, due_ns: Any, rows: Any) -> bool:
    """Return whether a run meets its SLO."""
    violations = problem.goal.find_misses(rows).sum(axis=1)
    return all(
        count <= allowed
        for count, allowed in zip(violations, problem.goal.allowed_misses(len(due_ns)), strict=True)
    )


def run_trial(problem: SearchProblem, trial: PlannedTrial, seed: int) -> TrialResult:
    """Run one trial, watched every WATCH_INTERVAL_S seconds.

    Its duration includes the time in which requests in flight at its decision end.
    """
    due_ns, rows = simulate_from_empty(problem, trial.load, seed, problem.full_s)
    trial_watch = TrialMonitor(
        problem.goal, PlannedLoad(due_ns), may_pass_early=trial.may_pass_early
    )
    outcome, reason, ended_early, spent_s, now_ns = None, "", False, 0.0, 0
    full_ns = int(rows["done_ns"].max())
    for now_ns in range(WATCH_INTERVAL_S * NS_PER_S, full_ns, WATCH_INTERVAL_S * NS_PER_S):
        first_row, end_row = np.searchsorted(
            rows["done_ns"], (now_ns - WATCH_INTERVAL_S * NS_PER_S, now_ns), "right"
        )
        if decision := trial_watch.add_rows(now_ns, rows[first_row:end_row]):
            outcome, reason, ended_early = decision.outcome, decision.reason, True
            stop_s = min(now_ns / NS_PER_S, problem.full_s)
            _, shortened_rows = simulate_from_empty(problem, trial.load, seed, stop_s)
            spent_s = max(now_ns, int(shortened_rows["done_ns"].max())) / NS_PER_S
            break
    if outcome is None:
        outcome, spent_s = (
            ("under" if passes_slo(problem, due_ns, rows) else "over"),
            full_ns / NS_PER_S,
        )
    seen_s = min(now_ns / NS_PER_S, problem.full_s) if ended_early else problem.full_s
    offered = float((due_ns < seen_s * NS_PER_S).sum()) / seen_s
    noise = 1 / math.sqrt(len(due_ns))
    return TrialResult(
        trial=trial,
        outcome=outcome,
        ended_early=ended_early,
        duration_s=spent_s,
        offered_load=offered,
        sampling_noise=noise,
        reason=reason,
    )


def draw_bracket(guess: float, seed: int) -> tuple[float, float]:
    """Return a bracket of a factor of four that lies at random around a guess."""
    low = guess / 4 ** float(seeds.generator(seed, "bracket").uniform(0.2, 0.8))
    return low, 4 * low


def run_search(
    problem: SearchProblem, guess: float, seed: int, *, near: bool
) -> tuple[LoadSearch, list[TrialResult]]:
    """Run a search and return it with its trials."""
    low, high = draw_bracket(guess, seed)
    search = LoadSearch(SearchSettings(low=low, high=high, precision=problem.precision))
    if near:
        first_load = guess * float(seeds.generator(seed, "first load").uniform(*FIRST_LOAD_FACTORS))
        search = LoadSearch(
            SearchSettings(
                low=1e-3,
                high=1e6,
                start=first_load,
                first_step=ESTIMATE_STEP,
                precision=problem.precision,
            )
        )
    while (trial := search.next_trial()) is not None:
        search.add_result(run_trial(problem, trial, seeds.derived(seed, "probe", trial.number)))
    return search, search.results


def run_bisection(problem: SearchProblem, guess: float, seed: int) -> tuple[float, float, int]:
    """Bisect the same bracket; return the load, the simulated time and the number of trials."""
    low, high = draw_bracket(guess, seed)
    spent_s, trial_count = 0.0, 0
    while high / low > 1 + problem.precision:
        rate = math.sqrt(low * high)
        due_ns, rows = simulate_from_empty(
            problem, rate, seeds.derived(seed, "bisect", trial_count), problem.full_s
        )
        low, high = (rate, high) if passes_slo(problem, due_ns, rows) else (low, rate)
        spent_s += int(rows["done_ns"].max()) / NS_PER_S
        trial_count += 1
    return math.sqrt(low * high), spent_s, trial_count


def fit_truth(
    problem: SearchProblem, guess: float, count: int
) -> tuple[float, float, list[tuple[float, int]]]:
    """Return the rate that half of the runs pass, the sigma of the curve and the ladder.

    The fit is a probit curve of maximum likelihood on rates in 1 % steps.
    """
    ladder: dict[int, int] = {}

    def count_passes(step: int) -> int:
        """Return how many seeds pass a step of the ladder."""
        if step not in ladder:
            rate = guess * 1.01**step
            ladder[step] = sum(
                passes_slo(
                    problem, *simulate_from_empty(problem, rate, 10_000 + seed, problem.full_s)
                )
                for seed in range(count)
            )
        return ladder[step]

    step = 0
    while count_passes(step) < count:
        step -= 1
    while count_passes(step + 1) > 0:
        step += 1
    while count_passes(min(ladder)) < count:
        count_passes(min(ladder) - 1)
    rows = sorted((guess * 1.01**step, hits) for step, hits in ladder.items())
    rates, hits = (
        np.log([rate for rate, _ in rows]),
        np.array([pass_count for _, pass_count in rows]),
    )
    best_likelihood, best_fit = -math.inf, (0.0, 0.0)
    for sigma in np.geomspace(5e-4, 0.05, 60):
        for theta in np.linspace(rates.min(), rates.max(), 1200):
            pass_probability = np.clip(
                students_t.normal_cdf((theta - rates) / sigma), 1e-9, 1 - 1e-9
            )
            likelihood = float(
                (
                    hits * np.log(pass_probability) + (count - hits) * np.log(1 - pass_probability)
                ).sum()
            )
            if likelihood > best_likelihood:
                best_likelihood, best_fit = likelihood, (math.exp(theta), float(sigma))
    return best_fit[0], best_fit[1], rows


def find_steady_state_knee(problem: SearchProblem, around: float) -> float:
    """Return the highest rate at which requests in flight do not grow over 1,800 s.

    It looks in 1 % steps, after 600 s, with one seed.
    """
    rate = around * 1.05
    while rate > around * 0.7:
        due_ns, rows = simulate_from_empty(problem, rate, 77, 2400)
        edges = np.arange(600, 2400, 30) * NS_PER_S
        in_flight = np.searchsorted(due_ns, edges, "right") - np.searchsorted(
            rows["done_ns"], edges, "right"
        )
        growth, _ = intervals.extrapolate_growth(in_flight.astype(float), len(in_flight))
        if growth < 0.2 * in_flight.mean():
            return rate
        rate /= 1.01
    return rate


def measure_coverage(
    spread: float, count: int, *, run_spread: float | None = None, sampling: float = 0.002
) -> tuple[int, float]:
    """Return how many searches cover the truth, and their mean number of trials.

    The load that a run passes differs by `spread` from run to run and by `sampling` with its
    arrivals. Outcomes are drawn, without a simulator. `told` is the value of `--run-spread`; None
    lets the search learn it.
    """
    hits, trials = 0, 0
    for seed in range(count):
        rng = seeds.generator(seed, f"run spread {spread}")
        true_load = float(rng.uniform(70, 140))
        search = LoadSearch(
            SearchSettings(low=1, high=1e6, start=10, precision=0.02, run_spread=run_spread)
        )
        while (trial := search.next_trial()) is not None:
            run_capacity = true_load * math.exp(
                math.hypot(spread, sampling) * float(rng.standard_normal())
            )
            outcome: Any = "under" if trial.load < run_capacity else "over"
            noise = sampling / SIGMA_PER_NOISE
            search.add_result(
                TrialResult(
                    trial=trial,
                    outcome=outcome,
                    ended_early=False,
                    duration_s=FULL_LENGTH_S,
                    offered_load=trial.load,
                    sampling_noise=noise,
                )
            )
        interval = search.result.interval
        hits += interval is not None and interval.low <= true_load <= interval.high
        trials += len(search.results)
    return hits, trials / count


def print_coverage(count: int) -> None:
    """Print the coverage for several spreads, learned and configured."""
    for spread in (0.0, 0.004, 0.01, 0.02):
        for run_spread in (None, spread):
            hits, trials = measure_coverage(spread, count, run_spread=run_spread)
            source = "learned" if run_spread is None else "told"
            print(
                f"run-to-run spread {spread:.1%}, {source}: {hits} of {count} cover, {trials:.1f} "
                f"probes",
                flush=True,
            )


def main() -> None:
    """Print the truth, the cost of bisection and the errors of all searches."""
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
    args = rig.parse_arguments(parser, seeds=1, bisections=1, ladder=1, truth=150.0, length=20.0)
    if args.preset == "coverage":
        print_coverage(args.seeds)
        return
    problem = create_problem(args.preset, args.scenario, args.length)
    print(f"SIMULATED: {args.preset}, {args.scenario} limits, {problem.lengths.name}")
    if args.truth:
        theta = args.truth
    else:
        theta, sigma, rows = fit_truth(problem, args.guess, args.ladder)
        print("ladder: " + ", ".join(f"{rate:.1f}/s {hits}/{args.ladder}" for rate, hits in rows))
        print(
            f"truth: {theta:.2f}/s, sigma {sigma:.2%}; steady-state knee "
            f"{find_steady_state_knee(problem, theta):.1f}/s",
            flush=True,
        )
    bisections = [run_bisection(problem, args.guess, seed)[1:] for seed in range(args.bisections)]
    plain_s = float(np.mean([spent_s for spent_s, _ in bisections])) if bisections else math.nan
    if bisections:
        print(
            f"plain bisection: {plain_s:.0f} s, "
            f"{np.mean([trial_count for _, trial_count in bisections]):.1f} probes",
            flush=True,
        )
    results = []
    for seed in range(args.first, args.first + args.seeds):
        started_s = time.process_time()
        search, trials = run_search(problem, args.guess, seed, near=args.near)
        result = search.result
        assert result.load is not None and result.interval is not None
        spent_s = result.duration_s - result.confirmation_s
        results.append(
            {
                "seed": seed,
                "answer": result.load,
                "error": result.load / theta - 1,
                "covers": result.interval.low <= theta <= result.interval.high,
                "half_width": result.interval.half_width / result.load,
                "confirmed": result.confirmed_load,
                "reason": result.stop_reason,
                "probes": result.trial_count,
                "spent_s": spent_s,
                "cpu_s": time.process_time() - started_s,
                "told": [
                    (
                        trial.kind,
                        round(trial.load, 2),
                        trial.outcome,
                        trial.ended_early,
                        round(trial.duration_s),
                    )
                    for trial in trials
                ],
            }
        )
        print(json.dumps(results[-1]), flush=True)
    errors = np.abs([trial["error"] for trial in results])
    spent_s = float(np.mean([trial["spent_s"] for trial in results]))
    print(
        f"{len(results)} seeds: within {problem.precision:.0%} in "
        f"{np.mean(errors <= problem.precision):.0%}, mean error "
        f"{errors.mean():.2%}, median {np.median(errors):.2%}, worst {errors.max():.2%}; interval "
        f"covers the truth in "
        f"{np.mean([trial['covers'] for trial in results]):.0%}; {spent_s:.0f} s, "
        f"{spent_s / plain_s:.0%} of plain bisection "
        f"(at most {MAX_TIME_FRACTION[args.scenario]:.0%}), confirmation left out"
    )
    if args.out:
        args.out.write_text(
            json.dumps({"truth": theta, "plain_s": plain_s, "seeds": results}, indent=1)
        )


if __name__ == "__main__":
    main()
