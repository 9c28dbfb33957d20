"""How often `compare` of one run a side is wrong, and what it finds: pairs that are the same, and pairs 10 % apart.

    python benchmarks/compare_power.py [--pairs 100] [--requests 2000]

Runs of 2,000 requests at 70 % of what one simulated replica carries (in virtual time, by the physical engine), prompts
and answers of mixed length, other seeds on each side. "Same" counts pairs without any word of difference over all
metrics shown; "shifted" multiplies every latency of one side by 1.1. For each metric: how often the shift is found, and
the smallest change that would be found in nine of ten.
"""

from __future__ import annotations

import msgspec
import numpy as np
import rig
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.compare import comparison
from loadgen.compare.difference import DIFFER
from loadgen.core.results.manifest import Fingerprints, RunManifest, StagePlan, TargetFacts
from loadgen.core.run_summary import summarize
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import load, read_flags
from loadgen.runs.comparison_side import ComparedRun, Side
from loadgen.sim.engine.system import SimulatedSystem
from loadgen.sim.presets.preset import load_preset as preset
from loadgen.sim.request_lengths import RequestSize
from loadgen.sim.virtual_backend import simulate

BATCH = 64  # sequences at once: small, so that 2,000 requests are several minutes of load
INSTANTS = (
    "first_byte_ns",
    "first_event_ns",
    "first_token_ns",
    "first_answer_ns",
    "last_token_ns",
    "end_ns",
    "done_ns",
)


def rows(rate: str, seed: int, n: int) -> NDArray[np.void]:
    """One run of n requests."""
    found = preset("h100x8", "benchmark")
    draw = np.random.default_rng(seed)
    prompts = np.clip(draw.lognormal(np.log(200), 0.6, n), 1, 2000).astype(int).tolist()
    answers = np.clip(draw.lognormal(np.log(250), 0.5, n), 2, 1000).astype(int).tolist()
    workload = load("qa", read_flags(request_rate=rate, num_requests=str(n), warmup="0"))
    made, _ = simulate(
        build_schedule(workload, seed),
        lambda number: RequestSize(prompts[number], answers[number]),
        SimulatedSystem(costs=found.costs, limits=replace(found.limits, max_batch_size=BATCH)),
    )
    return made.records[:]


def slower(found: NDArray[np.void], by: float) -> NDArray[np.void]:
    """Every latency times `by`, arrivals as they were."""
    scaled = found.copy()
    for field in INSTANTS:
        came = found[field] >= 0
        scaled[field][came] = found["due_ns"][came] + (
            (found[field] - found["due_ns"])[came] * by
        ).astype(np.int64)
    return scaled


def side(name: str, found: NDArray[np.void]) -> Side:
    manifest = RunManifest(
        run=name,
        state="finished",
        targets=(TargetFacts(simulated=True),),
        stages=(StagePlan(name="load", arrival="poisson", slots=len(found)),),
        fingerprints=Fingerprints(recipe="1"),
    )
    summary = summarize(manifest, found)
    summary = msgspec.structs.replace(
        summary, verdict=msgspec.structs.replace(summary.verdict, valid=True)
    )
    return Side(
        name=name, runs=(ComparedRun(name=name, summary=summary, manifest=manifest, rows=found),)
    )


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--load", type=float, default=0.7)
    args = rig.given(parser, pairs=1, requests=200)
    n = args.requests
    capacity = n / (float(rows("inf", 0, n)["end_ns"].max()) / 1e9)
    rate = f"{args.load * capacity:.3f}"
    print(f"{args.pairs} pairs of {n:,} requests at {rate}/s, {args.load:.0%} of {capacity:.2f}/s")
    quiet = 0
    found: dict[str, int] = {}
    wrong: dict[str, int] = {}
    reach: dict[str, list[float]] = {}
    for pair in range(args.pairs):
        a, b = rows(rate, 2 * pair + 1, n), rows(rate, 2 * pair + 2, n)
        before = side("A", a)
        same = comparison.compare([before, side("B", b)])
        shifted = comparison.compare([before, side("B", slower(b, 1.1))])
        quiet += all(one.word != DIFFER for one in same.differences)
        for one in same.differences:
            wrong[one.metric] = wrong.get(one.metric, 0) + (one.word == DIFFER)
            if one.detectable is not None:
                reach.setdefault(one.metric, []).append(one.detectable)
        for one in shifted.differences:
            found[one.metric] = found.get(one.metric, 0) + (one.word == DIFFER)
    print(
        f"two of the same: no difference in {quiet} of {args.pairs} pairs, over all metrics shown\n"
    )
    smallest = {name: f"{np.median(each) * 100:.1f} %" for name, each in reach.items()}
    table = [
        [name, str(wrong[name]), str(hits), smallest.get(name, "-")] for name, hits in found.items()
    ]
    print(rig.table(["metric", "wrong", "10 % found", "would be found from"], table))


if __name__ == "__main__":
    main()
