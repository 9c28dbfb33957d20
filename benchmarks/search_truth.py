"""How well the search finds the load that half of all full-length runs pass, and what it costs, in virtual time.

Truth is a ladder: rates in 1 % steps, 600 s from empty, 20 seeds each, and the rate at which half of them pass by a
probit fit. The search starts from a bracket of a factor of four that lies differently around it for every seed, so that
no seed's first probe is lucky; plain bisection starts from the same brackets with 600 s probes. With `--near` it starts
as `loadgen search` does of a simulated target: at a first load near the guess, without bounds. The steady-state knee
(the highest rate of the ladder whose in-flight does not grow over 1,800 s) is printed beside the truth.

    python benchmarks/search_truth.py gb200-vm server --seeds 100
    python benchmarks/search_truth.py gb200-vm interactive --seeds 100
    python benchmarks/search_truth.py gb300-vm server --seeds 24 --guess 214 --near
    python benchmarks/search_truth.py coverage --seeds 100      # of the interval, of servers that differ between runs

Everything here is SIMULATED.
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

S = 1_000_000_000
FULL_S = 600
LOOK_S = 5
PRECISION = {"server": 0.01, "interactive": 0.03}
FIRST = (0.85, 1.09)  # first loads of searches of nine packaged workloads, over what they found
SHARE = {"server": 0.70, "interactive": 0.40}  # of plain bisection's time, at most


class World(NamedTuple):
    """A preset under a benchmark's limits."""

    preset: Any
    goal: Goal
    lengths: dataset.Lengths
    precision: float
    full_s: float  # of a run


def world(name: str, scenario: Any, full_s: float) -> World:
    asked = rules.test("llama2-70b", scenario)
    assert asked.ttft_ns is not None and asked.tpot_ns is not None
    terms = (
        Term(metric="ttft", limit_ns=asked.ttft_ns),
        Term(metric="tpot_mlperf", limit_ns=asked.tpot_ns),
    )
    lengths = dataset.synthetic(rules.rules().benchmarks["llama2-70b"], benchmark="llama2-70b")
    return World(
        presets.load_preset(name),
        Goal(slo=Slo(terms=terms)),
        lengths,
        PRECISION[scenario],
        full_s,
    )


def run(where: World, rate: float, seed: int, length_s: float) -> tuple[Any, Any]:
    """The schedule and the rows, in the order of their end, of one run from empty."""
    order = seeds.stream(seed, "order").permutation(len(where.lengths.input))
    inputs, outputs = (
        where.lengths.input[order].tolist(),
        where.lengths.output[order].tolist(),
    )
    size = len(inputs)
    stage = Stage(name="load", arrival=Poisson(rate=rate), duration_ns=round(length_s * S))
    one: Any = FixedTokens(value=1)
    planned = build_schedule(
        Workload(
            name="x", requests=Synthetic(input_tokens=one, output_tokens=one), stages=(stage,)
        ),
        seed,
    )
    made, _ = virtual.simulate(
        planned,
        lambda number: RequestSize(inputs[number % size], outputs[number % size]),
        SimulatedSystem(
            costs=where.preset.costs, limits=where.preset.limits, speeds=where.preset.speeds
        ),
    )
    return planned.stages[0].arrivals_ns, made.records[
        np.argsort(made.records["done_ns"], kind="stable")
    ]


def passes(where: World, due: Any, rows: Any) -> bool:
    missed = where.goal.find_misses(rows).sum(axis=1)
    return all(
        count <= most
        for count, most in zip(missed, where.goal.allowed_misses(len(due)), strict=True)
    )


def probe(where: World, trial: PlannedTrial, seed: int) -> TrialResult:
    """One probe, watched every LOOK_S seconds, with the drain of what it had in flight when it was decided."""
    due, rows = run(where, trial.load, seed, where.full_s)
    trial_watch = TrialMonitor(where.goal, PlannedLoad(due), may_pass_early=trial.may_pass_early)
    outcome, why, early, spent_s, now = None, "", False, 0.0, 0
    full_ns = int(rows["done_ns"].max())
    for now in range(LOOK_S * S, full_ns, LOOK_S * S):
        begin, end = np.searchsorted(rows["done_ns"], (now - LOOK_S * S, now), "right")
        if decision := trial_watch.add_rows(now, rows[begin:end]):
            outcome, why, early = decision.outcome, decision.reason, True
            stop_s = min(now / S, where.full_s)
            _, cut = run(where, trial.load, seed, stop_s)
            spent_s = max(now, int(cut["done_ns"].max())) / S
            break
    if outcome is None:
        outcome, spent_s = ("under" if passes(where, due, rows) else "over"), full_ns / S
    seen_s = min(now / S, where.full_s) if early else where.full_s
    offered = float((due < seen_s * S).sum()) / seen_s
    noise = 1 / math.sqrt(len(due))
    return TrialResult(
        trial=trial,
        outcome=outcome,
        ended_early=early,
        duration_s=spent_s,
        offered_load=offered,
        sampling_noise=noise,
        reason=why,
    )


def bracket(guess: float, seed: int) -> tuple[float, float]:
    """A factor of four that lies at random around a guess."""
    low = guess / 4 ** float(seeds.stream(seed, "bracket").uniform(0.2, 0.8))
    return low, 4 * low


def searched(
    where: World, guess: float, seed: int, *, near: bool
) -> tuple[LoadSearch, list[TrialResult]]:
    low, high = bracket(guess, seed)
    found = LoadSearch(SearchSettings(low=low, high=high, precision=where.precision))
    if near:
        first = guess * float(seeds.stream(seed, "first load").uniform(*FIRST))
        found = LoadSearch(
            SearchSettings(
                low=1e-3, high=1e6, start=first, first_step=ESTIMATE_STEP, precision=where.precision
            )
        )
    while (trial := found.next_trial()) is not None:
        found.add_result(probe(where, trial, seeds.derived(seed, "probe", trial.number)))
    return found, found.results


def bisected(where: World, guess: float, seed: int) -> tuple[float, float, int]:
    """Plain bisection of the same bracket: its answer, its simulated time, its probes."""
    low, high = bracket(guess, seed)
    spent, number = 0.0, 0
    while high / low > 1 + where.precision:
        rate = math.sqrt(low * high)
        due, rows = run(where, rate, seeds.derived(seed, "bisect", number), where.full_s)
        low, high = (rate, high) if passes(where, due, rows) else (low, rate)
        spent += int(rows["done_ns"].max()) / S
        number += 1
    return math.sqrt(low * high), spent, number


def truth(where: World, guess: float, count: int) -> tuple[float, float, list[tuple[float, int]]]:
    """The rate that half of the runs pass and the curve's sigma, by maximum likelihood on a ladder in 1 % steps."""
    ladder: dict[int, int] = {}

    def passed(step: int) -> int:
        if step not in ladder:
            rate = guess * 1.01**step
            ladder[step] = sum(
                passes(where, *run(where, rate, 10_000 + seed, where.full_s))
                for seed in range(count)
            )
        return ladder[step]

    step = 0
    while passed(step) < count:
        step -= 1
    while passed(step + 1) > 0:
        step += 1
    while passed(min(ladder)) < count:
        passed(min(ladder) - 1)
    rows = sorted((guess * 1.01**step, hits) for step, hits in ladder.items())
    rates, hits = np.log([rate for rate, _ in rows]), np.array([hit for _, hit in rows])
    best, at = -math.inf, (0.0, 0.0)
    for sigma in np.geomspace(5e-4, 0.05, 60):
        for theta in np.linspace(rates.min(), rates.max(), 1200):
            p = np.clip(students_t.normal_cdf((theta - rates) / sigma), 1e-9, 1 - 1e-9)
            likelihood = float((hits * np.log(p) + (count - hits) * np.log(1 - p)).sum())
            if likelihood > best:
                best, at = likelihood, (math.exp(theta), float(sigma))
    return at[0], at[1], rows


def knee(where: World, around: float) -> float:
    """The highest rate in 1 % steps at which requests in flight do not grow over 1,800 s after 600 s (one seed)."""
    rate = around * 1.05
    while rate > around * 0.7:
        due, rows = run(where, rate, 77, 2400)
        edges = np.arange(600, 2400, 30) * S
        flying = np.searchsorted(due, edges, "right") - np.searchsorted(
            rows["done_ns"], edges, "right"
        )
        more, _ = intervals.extrapolate_growth(flying.astype(float), len(flying))
        if more < 0.2 * flying.mean():
            return rate
        rate /= 1.01
    return rate


def coverage(
    spread: float, count: int, *, told: float | None = None, sampling: float = 0.002
) -> tuple[int, float]:
    """How many of so many searches have the truth in their 95 % interval, and their mean number of probes.

    Each run of the server has a level of its own: the load that it passes differs by `spread` from run to run, and by
    `sampling` with its arrivals. No simulator: the outcome of a run is drawn. `told`: of --run-spread; None: learned.
    """
    hits, probes = 0, 0
    for seed in range(count):
        rng = seeds.stream(seed, f"run spread {spread}")
        true = float(rng.uniform(70, 140))
        search = LoadSearch(
            SearchSettings(low=1, high=1e6, start=10, precision=0.02, run_spread=told)
        )
        while (trial := search.next_trial()) is not None:
            own = true * math.exp(math.hypot(spread, sampling) * float(rng.standard_normal()))
            outcome: Any = "under" if trial.load < own else "over"
            noise = sampling / SIGMA_PER_NOISE
            search.add_result(
                TrialResult(
                    trial=trial,
                    outcome=outcome,
                    ended_early=False,
                    duration_s=FULL_S,
                    offered_load=trial.load,
                    sampling_noise=noise,
                )
            )
        interval = search.result.interval
        hits += interval is not None and interval.low <= true <= interval.high
        probes += len(search.results)
    return hits, probes / count


def print_coverage(count: int) -> None:
    for spread in (0.0, 0.004, 0.01, 0.02):
        for told in (None, spread):
            hits, probes = coverage(spread, count, told=told)
            words = "learned" if told is None else "told"
            print(
                f"run-to-run spread {spread:.1%}, {words}: {hits} of {count} cover, {probes:.1f} probes",
                flush=True,
            )


def main() -> None:
    parser = rig.create_parser(__doc__)
    parser.add_argument("preset", nargs="?", default="gb200-vm", help="or: coverage")
    parser.add_argument("scenario", nargs="?", default="server", choices=list(PRECISION))
    parser.add_argument("--length", type=float, default=FULL_S, help="of a run, s")
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
    where = world(args.preset, args.scenario, args.length)
    print(f"SIMULATED: {args.preset}, {args.scenario} limits, {where.lengths.name}")
    if args.truth:
        theta = args.truth
    else:
        theta, sigma, rows = truth(where, args.guess, args.ladder)
        print("ladder: " + ", ".join(f"{rate:.1f}/s {hits}/{args.ladder}" for rate, hits in rows))
        print(
            f"truth: {theta:.2f}/s, sigma {sigma:.2%}; steady-state knee {knee(where, theta):.1f}/s",
            flush=True,
        )
    plain = [bisected(where, args.guess, seed)[1:] for seed in range(args.bisections)]
    plain_s = float(np.mean([spent for spent, _ in plain])) if plain else math.nan
    if plain:
        print(
            f"plain bisection: {plain_s:.0f} s, {np.mean([n for _, n in plain]):.1f} probes",
            flush=True,
        )
    results = []
    for seed in range(args.first, args.first + args.seeds):
        began = time.process_time()
        found, told = searched(where, args.guess, seed, near=args.near)
        answer = found.result
        assert answer.load is not None and answer.interval is not None
        spent = answer.duration_s - answer.confirmation_s
        results.append(
            {
                "seed": seed,
                "answer": answer.load,
                "error": answer.load / theta - 1,
                "covers": answer.interval.low <= theta <= answer.interval.high,
                "half_width": answer.interval.half_width / answer.load,
                "confirmed": answer.confirmed_load,
                "reason": answer.stop_reason,
                "probes": answer.trial_count,
                "spent_s": spent,
                "cpu_s": time.process_time() - began,
                "told": [
                    (
                        one.kind,
                        round(one.load, 2),
                        one.outcome,
                        one.ended_early,
                        round(one.duration_s),
                    )
                    for one in told
                ],
            }
        )
        print(json.dumps(results[-1]), flush=True)
    errors = np.abs([one["error"] for one in results])
    spent = float(np.mean([one["spent_s"] for one in results]))
    print(
        f"{len(results)} seeds: within {where.precision:.0%} in {np.mean(errors <= where.precision):.0%}, mean error "
        f"{errors.mean():.2%}, median {np.median(errors):.2%}, worst {errors.max():.2%}; interval covers the truth in "
        f"{np.mean([one['covers'] for one in results]):.0%}; {spent:.0f} s, {spent / plain_s:.0%} of plain bisection "
        f"(at most {SHARE[args.scenario]:.0%}), confirmation left out"
    )
    if args.out:
        args.out.write_text(
            json.dumps({"truth": theta, "plain_s": plain_s, "seeds": results}, indent=1)
        )


if __name__ == "__main__":
    main()
