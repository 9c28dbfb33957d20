"""How often an adaptive load sustains more than the server can carry, how far under it stays, and how long it takes.

Three simulated machines with limits of three kinds, in virtual time, against a truth and against `loadgen search`:

- **Truth** is a ladder: rates in 2 % steps, at each so many runs of 1,800 s from empty with seeds of their own; a run
  holds when its last 1,200 s keep every term and nothing grows in them (the definition of sustainable). The truth is
  the rate at which half of them hold, between two steps by a straight line.
- **An adaptive run** has windows of 60 s and sustains for 1,200 s, and begins at a sixteenth of the truth, less a
  factor that differs from seed to seed.
- **A search** has probes of 600 s and the same first load. Its time is that of its probes with the confirmation.

    python benchmarks/adaptive_truth.py prefill --seeds 10
    python benchmarks/adaptive_truth.py all

Everything here is SIMULATED.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig

from loadgen.core import seeds
from loadgen.core.metrics import sustainable
from loadgen.core.metrics.columns import Columns
from loadgen.core.results.manifest import AdaptivePlan
from loadgen.core.schedule import arrivals
from loadgen.core.schedule.steered import Steered
from loadgen.core.slo import Slo, Term
from loadgen.core.workload import FixedTokens, Poisson, Stage, Synthetic, Workload
from loadgen.search import load_search, watch
from loadgen.search.adaptive import Adaptive
from loadgen.sim import virtual_backend as virtual
from loadgen.sim.course import Course
from loadgen.sim.presets import preset as presets

S = 1_000_000_000
LOOK_S = 5
STEP = 1.02
ONE: Any = FixedTokens(value=1)


class Lengths(NamedTuple):
    """Seconds: of a probe; of a run of the truth, and of its start; of what is sustained; of a window."""

    full: float = 600
    truth: float = 1800
    warm: float = 600
    sustain: float = 1200
    window: float = 60


class World(NamedTuple):
    """A machine, requests of about one length, and limits; `guess`: a rate near the truth."""

    preset: str
    tokens: tuple[int, int]
    terms: tuple[Term, ...]
    guess: float
    lengths: Lengths = Lengths()

    @property
    def goal(self) -> watch.Goal:
        return watch.Goal(slo=Slo(terms=self.terms))


def term(metric: Any, limit_ms: float, quantile: float) -> Term:
    return Term(metric=metric, limit_ns=round(limit_ms * 1e6), quantile=quantile)


WORLDS = {
    "prefill": World("gb300-vm", (3000, 8), (term("ttft", 200, 0.90),), 24.0),
    "queue": World("gb200-vm", (3000, 16), (term("ttft", 3000, 0.99),), 24.0),
    "decode": World("h200x8", (1000, 64), (term("ttft", 1000, 0.95), term("tpot", 60, 0.95)), 20.0),
}


def simulated(world: World, stage: Stage, seed: int, steer: Any = None) -> tuple[Any, Course]:
    """The rows of one run from empty, and the simulation. Lengths differ by up to a fifth."""
    drawn = seeds.stream(seed, "lengths").uniform(0.8, 1.2, (100_000, 2)) * world.tokens
    inputs, outputs = drawn.astype(int).T.tolist()
    preset = presets.load_preset(world.preset)
    requests = Synthetic(input_tokens=ONE, output_tokens=ONE)
    made, course = virtual.simulate(
        arrivals.build(Workload(name="x", requests=requests, stages=(stage,)), seed),
        lambda number: (inputs[number % 100_000], outputs[number % 100_000], ()),
        virtual.SimulatedSystem(costs=preset.costs, limits=preset.limits, speeds=preset.speeds),
        steer=steer,
    )
    return made.rows[np.argsort(made.rows["done_ns"], kind="stable")], course


def at(rate: float, length_s: float) -> Stage:
    return Stage(name="load", arrival=Poisson(rate=rate), duration_ns=round(length_s * S))


def holds(world: World, rows: Any) -> bool:
    missed = world.goal.misses(rows).sum(axis=1)
    return all(
        count <= most for count, most in zip(missed, world.goal.allowed(len(rows)), strict=True)
    )


def is_sustained(world: World, rate: float, seed: int) -> bool:
    rows, _ = simulated(world, at(rate, world.lengths.truth), seed)
    start_ns, end_ns = round(world.lengths.warm * S), round(world.lengths.truth * S)
    late = rows["due_ns"] >= start_ns
    grows = sustainable.of_span(Columns(rows[late]), Columns(rows[~late]), start_ns, end_ns)
    return holds(world, rows[late]) and grows.sustained is not False


def truth(world: World, count: int) -> tuple[float, dict[float, int]]:
    """The rate at which half of the long runs hold, and how many held at each rate of the ladder."""
    ladder: dict[int, int] = {}

    def held(step: int) -> int:
        if step not in ladder:
            rate = world.guess * STEP**step
            ladder[step] = sum(is_sustained(world, rate, 90_000 + seed) for seed in range(count))
        return ladder[step]

    step = 0
    while 2 * held(step) >= count:
        step += 1
    while 2 * held(step) < count:
        step -= 1
    below, above = held(step), held(step + 1)  # at least half, and fewer
    share = (below - count / 2) / (below - above)
    return world.guess * STEP ** (step + share), {
        round(world.guess * STEP**step, 3): hits for step, hits in sorted(ladder.items())
    }


def first_load(true: float, seed: int) -> float:
    return true / 16 / 2 ** float(seeds.stream(seed, "first load").uniform(0, 1))


def adaptive(world: World, start: float, seed: int) -> Adaptive:
    """The controller after one run."""
    plan = AdaptivePlan(
        over="rate",
        start=start,
        high=1e6,
        window_s=world.lengths.window,
        sustain_s=world.lengths.sustain,
        precision=load_search.PRECISION,
        run_spread=0.0,
    )
    controller = Adaptive(world.goal, plan, 600 * S)
    first = controller.first
    stage = at(first.load, first.length_ns / S)
    simulated(world, stage, seed, partial(Steered, controller, stage=stage, seed=seed))
    return controller


def probe(world: World, ask: load_search.NextTrial, seed: int) -> load_search.TrialResult:
    """One trial of a search, watched every LOOK_S seconds."""
    rows, course = simulated(world, at(ask.load, world.lengths.full), seed)
    due = course.timetable.stages[0].offsets
    trial_watch = watch.Watch(world.goal, due, early_under=ask.early_under)
    full_ns = int(rows["done_ns"].max())
    outcome: Any = "under" if holds(world, rows) else "over"
    early, spent_s, seen_s = False, full_ns / S, world.lengths.full
    for now in range(LOOK_S * S, full_ns, LOOK_S * S):
        begin, end = np.searchsorted(rows["done_ns"], (now - LOOK_S * S, now), "right")
        if decision := trial_watch.look(now, rows[begin:end]):
            in_flight = rows[(rows["due_ns"] <= now) & (rows["done_ns"] > now)]
            outcome, early, seen_s = decision.outcome, True, min(now / S, world.lengths.full)
            spent_s = int(in_flight["done_ns"].max(initial=now)) / S
            break
    return load_search.TrialResult(
        ask=ask,
        outcome=outcome,
        early=early,
        spent_s=spent_s,
        offered=float((due < seen_s * S).sum()) / seen_s,
        noise=1 / math.sqrt(len(due)),
    )


def searched(world: World, start: float, seed: int) -> load_search.SearchAnswer:
    search = load_search.LoadSearch(low=1e-3, high=1e6, start=start)
    while (ask := search.ask()) is not None:
        search.tell(probe(world, ask, seeds.derived(seed, "probe", ask.number)))
    return search.answer


def compare(name: str, count: int, searches: int, ladder: int, shorter: float) -> dict[str, Any]:
    world = WORLDS[name]._replace(lengths=Lengths(*(length / shorter for length in Lengths())))
    true, rungs = truth(world, ladder)
    print(f"SIMULATED: {name}, {world.preset}: truth {true:.2f}/s; held at {rungs}", flush=True)
    runs: list[dict[str, Any]] = []
    for seed in range(count):
        controller = adaptive(world, first_load(true, seed), seed)
        answer = controller.search.answer
        tries = sum(step.trial.ask.kind == "sustain" for step in controller.steps)
        finding_s = max(step.end_s for step in controller.steps if step.trial.ask.kind != "sustain")
        runs.append(
            {
                "seed": seed,
                "sustained": answer.steady,
                "is_sustained": answer.sustained,
                "share_of_truth": None if answer.steady is None else answer.steady / true,
                "limit": answer.load,
                "interval": None
                if answer.interval is None
                else (answer.interval.low, answer.interval.high),
                "reason": answer.reason,
                "steps": len(controller.steps),
                "tries": tries,
                "finding_s": finding_s,
                "whole_s": controller.steps[-1].end_s,
            }
        )
        print(json.dumps(runs[-1]), flush=True)
    answers = [searched(world, first_load(true, seed), 1000 + seed) for seed in range(searches)]
    for answer in answers:
        print(
            f"search: {answer.load:.2f} {answer.interval} confirmed {answer.confirmed} {answer.spent_s:.0f} s"
        )
    shares = np.array([run["share_of_truth"] for run in runs if run["share_of_truth"]])
    inside = [
        answer.interval.low <= run["limit"] <= answer.interval.high
        for run in runs
        for answer in answers
        if answer.interval is not None and run["limit"] is not None
    ]
    summary = {
        "world": name,
        "truth": true,
        "runs": len(runs),
        "sustained": len(shares),
        "over the truth": int((shares > 1).sum()),
        "over by more than 2 %": int((shares > STEP).sum()),
        "largest": float(shares.max(initial=0)),
        "mean": float(shares.mean()) if len(shares) else None,
        "least": float(shares.min(initial=9)),
        "limit within the interval of a search": float(np.mean(inside)) if inside else None,
        "finding_s": float(np.mean([run["finding_s"] for run in runs])),
        "whole_s": float(np.mean([run["whole_s"] for run in runs])),
        "tries": float(np.mean([run["tries"] for run in runs])),
        "search_s": float(np.mean([answer.spent_s for answer in answers])) if answers else None,
    }
    print(json.dumps(summary), flush=True)
    return {**summary, "each": runs}


def main() -> None:
    flags = rig.parser(__doc__)
    flags.add_argument("world", nargs="?", default="all", choices=[*WORLDS, "all"])
    flags.add_argument("--seeds", type=int, default=10)
    flags.add_argument("--searches", type=int, default=4)
    flags.add_argument("--ladder", type=int, default=6, help="runs at each rate of the truth")
    flags.add_argument("--out", type=Path)
    flags.add_argument("--shorter", type=float, default=1.0, help="all runs shorter by this factor")
    given = rig.given(flags, world="prefill", seeds=1, searches=1, ladder=1, shorter=20.0)
    names = list(WORLDS) if given.world == "all" else [given.world]
    results = [
        compare(name, given.seeds, given.searches, given.ladder, given.shorter) for name in names
    ]
    if given.out:
        given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
