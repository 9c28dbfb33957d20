"""How often is `compare` of one run per side wrong, and which changes does it detect?

    python benchmarks/compare_power.py [--pairs 100] [--requests 2000]

SIMULATED runs at 70 % of the capacity of one replica (in virtual time, by the physical engine),
with mixed lengths of prompts and responses and different seeds. It counts the equal pairs without
any difference over all metrics, and the pairs in which a 10 % shift of every latency of one side is
detected. For each metric it prints the smallest change that nine of ten comparisons would detect.
100 pairs take some minutes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import rig
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.compare import comparison
from loadgen.compare.difference import DIFFER
from loadgen.core.results.manifest import Fingerprints, RunManifest, StagePlan, TargetFacts
from loadgen.core.results.record import RESPONSE_TIME_COLUMNS
from loadgen.core.run_summary import summarize
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import load, read_flags
from loadgen.runs.comparison_side import ComparedRun, Side
from loadgen.sim.engine.system import SimulatedSystem
from loadgen.sim.presets.preset import load_preset as preset
from loadgen.sim.request_lengths import RequestSize
from loadgen.sim.virtual_backend import simulate

BATCH = 64  # sequences at once: small, so that 2,000 requests are several minutes of load


def simulate_rows(rate: str, seed: int, request_count: int) -> NDArray[np.void]:
    """Simulate one run of so many requests with mixed lengths, and return its records.

    `rate` is an option of `loadgen run`: requests per second, or "inf" for all at once.
    """
    loaded_preset = preset("h100x8", "benchmark")
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(np.log(200), 0.6, request_count), 1, 2000).astype(int).tolist()
    responses = (
        np.clip(rng.lognormal(np.log(250), 0.5, request_count), 2, 1000).astype(int).tolist()
    )
    workload = load(
        "qa", read_flags(request_rate=rate, num_requests=str(request_count), warmup="0")
    )
    result, _ = simulate(
        build_schedule(workload, seed),
        lambda number: RequestSize(prompts[number], responses[number]),
        SimulatedSystem(
            costs=loaded_preset.costs, limits=replace(loaded_preset.limits, max_batch_size=BATCH)
        ),
    )

    return result.records[:]


def scale_latencies(rows: NDArray[np.void], factor: float) -> NDArray[np.void]:
    """Return records whose latencies are multiplied by `factor`, with the same scheduled times."""
    scaled = rows.copy()
    for timestamp in RESPONSE_TIME_COLUMNS:
        has_value = rows[timestamp] >= 0
        due_ns = rows["due_ns"][has_value]
        latency_ns = rows[timestamp][has_value] - due_ns
        scaled[timestamp][has_value] = due_ns + (latency_ns * factor).astype(np.int64)
    return scaled


def create_side(name: str, rows: NDArray[np.void]) -> Side:
    """Return a side of a comparison that consists of one run with these records.

    The run counts as VALID, because a comparison never judges invalid runs. Here it may be INVALID
    for having few requests.
    """
    manifest = RunManifest(
        run=name,
        state="finished",
        targets=(TargetFacts(simulated=True),),
        stages=(StagePlan(name="load", arrival="poisson", slots=len(rows)),),
        # The fingerprint of the workload, which is the same for both sides
        fingerprints=Fingerprints(recipe="1"),
    )
    summary = summarize(manifest, rows)
    valid_verdict = replace(summary.verdict, valid=True)
    valid_summary = replace(summary, verdict=valid_verdict)
    recorded_run = ComparedRun(name=name, summary=valid_summary, manifest=manifest, rows=rows)

    return Side(name=name, runs=(recorded_run,))


@dataclass
class MetricCounts:
    """What comparisons of pairs say of one metric.

    `false_alarms` are differences between equal sides, `hits` those between a side and one that is
    10 % slower. `detectable_changes` has the smallest change that each comparison would detect.
    """

    false_alarms: int = 0
    hits: int = 0
    detectable_changes: list[float] = field(default_factory=list)

    def format_row(self, metric: str) -> list[str]:
        """Return the row of the metric."""
        smallest = "-"
        if self.detectable_changes:
            smallest = f"{np.median(self.detectable_changes) * 100:.1f} %"
        return [metric, str(self.false_alarms), str(self.hits), smallest]


def main() -> None:
    """Print how often equal pairs differ, and how often a shift of 10 % is found."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--load", type=float, default=0.7)
    args = rig.parse_arguments(parser, pairs=1, requests=200)
    request_count = args.requests
    full_load_s = float(simulate_rows("inf", 0, request_count)["end_ns"].max()) / 1e9
    capacity = request_count / full_load_s
    rate = f"{args.load * capacity:.3f}"
    print(
        f"{args.pairs} pairs of {request_count:,} requests at {rate}/s, {args.load:.0%} of "
        f"{capacity:.2f}/s"
    )
    pairs_without_difference = 0

    counts: dict[str, MetricCounts] = defaultdict(MetricCounts)
    for pair in range(args.pairs):
        before_rows = simulate_rows(rate, 2 * pair + 1, request_count)
        after_rows = simulate_rows(rate, 2 * pair + 2, request_count)
        before = create_side("A", before_rows)
        equal = comparison.compare([before, create_side("B", after_rows)])
        shifted = comparison.compare([before, create_side("B", scale_latencies(after_rows, 1.1))])

        for difference in equal.differences:
            metric = counts[difference.metric]
            metric.false_alarms += difference.detailed_outcome == DIFFER
            if difference.detectable is not None:
                metric.detectable_changes.append(difference.detectable)

        for difference in shifted.differences:
            counts[difference.metric].hits += difference.detailed_outcome == DIFFER

        pairs_without_difference += all(
            difference.detailed_outcome != DIFFER for difference in equal.differences
        )

    print(
        f"two of the same: no difference in {pairs_without_difference} of {args.pairs} pairs, "
        f"over all metrics shown\n"
    )
    rows = [metric_counts.format_row(metric) for metric, metric_counts in counts.items()]
    print(rig.format_table(["metric", "wrong", "10 % found", "would be found from"], rows))


if __name__ == "__main__":
    main()
