"""How often is `compare` of one run per side wrong, and which changes does it detect?

    python benchmarks/compare_power.py [--pairs 100] [--requests 2000]

SIMULATED runs at 70 % of the capacity of one replica (in virtual time, by the physical engine),
with mixed lengths of prompts and responses and different seeds. The script counts the pairs of
equal servers without any difference over all metrics, and, for each metric, the pairs in which a
10 % increase of all latencies of one side is detected. It also prints for each metric the smallest
change that nine of ten comparisons would detect. 100 pairs take some minutes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import rig
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.compare import comparison
from loadgen.compare.difference import DIFFER, Difference
from loadgen.core.results.manifest import Fingerprints, RunManifest, StagePlan, TargetFacts
from loadgen.core.results.record import RESPONSE_TIME_COLUMNS
from loadgen.core.run_summary import summarize
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import load as load_workload
from loadgen.core.workload import read_flags
from loadgen.runs.comparison_side import ComparedRun, Side
from loadgen.sim.engine.system import SimulatedSystem
from loadgen.sim.presets.preset import load_preset
from loadgen.sim.request_lengths import RequestSize
from loadgen.sim.virtual_backend import simulate

MAX_BATCH_SIZE = 64  # sequences at once: small, so that 2,000 requests are several minutes of load
LATENCY_INCREASE = 1.1  # the factor between the two sides of a changed pair


def simulate_run(request_rate: str, seed: int, request_count: int) -> NDArray[np.void]:
    """Simulate a run on one replica, and return its request records.

    Args:
        request_rate: As in `loadgen run --request-rate`: requests per second, or "inf" to send all
            requests at once.
        seed: Draws the lengths of the requests and their send times.
        request_count: The number of requests.
    """
    preset = load_preset("h100x8", "benchmark")
    limits = replace(preset.limits, max_batch_size=MAX_BATCH_SIZE)
    sizes = draw_request_sizes(request_count, seed)
    flags = read_flags(request_rate=request_rate, num_requests=str(request_count), warmup="0")
    schedule = build_schedule(load_workload("qa", flags), seed)

    result, _ = simulate(
        schedule,
        lambda request_number: sizes[request_number],
        SimulatedSystem(costs=preset.costs, limits=limits),
    )
    return result.records[:]


def draw_request_sizes(request_count: int, seed: int) -> list[RequestSize]:
    """Return log-normal lengths of prompts and responses, with medians of 200 and 250 tokens."""
    rng = np.random.default_rng(seed)
    prompt_tokens = np.clip(rng.lognormal(np.log(200), 0.6, request_count), 1, 2000)
    response_tokens = np.clip(rng.lognormal(np.log(250), 0.5, request_count), 2, 1000)
    return [
        RequestSize(int(prompt), int(response))
        for prompt, response in zip(prompt_tokens, response_tokens, strict=True)
    ]


def measure_capacity(request_count: int) -> float:
    """Return how many requests per second the replica completes if all are sent at once."""
    records = simulate_run("inf", 0, request_count)
    last_end_s = float(records["end_ns"].max()) / 1e9
    return request_count / last_end_s


def scale_latencies(records: NDArray[np.void], factor: float) -> NDArray[np.void]:
    """Return records whose latencies are multiplied by `factor`, with the same scheduled times.

    A latency is the time from the scheduled time of a request to one of its timestamps. Timestamps
    that a record does not have are negative and stay so.
    """
    scaled = records.copy()
    for timestamp in RESPONSE_TIME_COLUMNS:
        has_value = records[timestamp] >= 0
        due_ns = records["due_ns"][has_value]
        latency_ns = records[timestamp][has_value] - due_ns
        scaled[timestamp][has_value] = due_ns + (latency_ns * factor).astype(np.int64)
    return scaled


def create_side(name: str, records: NDArray[np.void]) -> Side:
    """Return a side of a comparison that consists of one run with these records.

    The run is marked as VALID, because `compare` refuses invalid runs, and a run with few requests
    would be one.
    """
    manifest = RunManifest(
        run=name,
        state="finished",
        targets=(TargetFacts(simulated=True),),
        stages=(StagePlan(name="load", arrival="poisson", slots=len(records)),),
        # The fingerprint of the workload, which is the same for both sides
        fingerprints=Fingerprints(recipe="1"),
    )
    summary = summarize(manifest, records)
    valid_summary = replace(summary, verdict=replace(summary.verdict, valid=True))
    compared_run = ComparedRun(name=name, summary=valid_summary, manifest=manifest, rows=records)

    return Side(name=name, runs=(compared_run,))


@dataclass
class MetricCounts:
    """What the comparisons of all pairs say about one metric.

    Attributes:
        false_alarms: In how many pairs of equal servers the metric differs.
        detected: In how many pairs with a slower side the metric differs.
        detectable_changes: The smallest change, as a fraction, that each comparison of an equal
            pair would detect.
    """

    false_alarms: int = 0
    detected: int = 0
    detectable_changes: list[float] = field(default_factory=list)

    def format_row(self, metric: str) -> list[str]:
        """Return the row of the metric."""
        median_change = "-"
        if self.detectable_changes:
            median_change = f"{np.median(self.detectable_changes):.1%}"
        return [metric, str(self.false_alarms), str(self.detected), median_change]


class ComparisonCounts:
    """What the comparisons of all pairs say.

    `pairs_without_difference` is the number of pairs of equal servers in which no metric differs.
    """

    def __init__(self) -> None:
        self.pairs_without_difference = 0
        self.by_metric: dict[str, MetricCounts] = defaultdict(MetricCounts)

    def add_equal_pair(self, differences: Sequence[Difference]) -> None:
        """Count the differences between two equal servers."""
        has_difference = False
        for difference in differences:
            counts = self.by_metric[difference.metric]
            if difference.detectable is not None:
                counts.detectable_changes.append(difference.detectable)
            if difference.detailed_outcome == DIFFER:
                counts.false_alarms += 1
                has_difference = True

        if not has_difference:
            self.pairs_without_difference += 1

    def add_changed_pair(self, differences: Sequence[Difference]) -> None:
        """Count the differences between a server and one that is slower."""
        for difference in differences:
            if difference.detailed_outcome == DIFFER:
                self.by_metric[difference.metric].detected += 1


def compare_pairs(pair_count: int, request_rate: str, request_count: int) -> ComparisonCounts:
    """Compare pairs of runs of equal servers, and each pair again with the second run slower."""
    counts = ComparisonCounts()
    for pair in range(pair_count):
        before_records = simulate_run(request_rate, 2 * pair + 1, request_count)
        after_records = simulate_run(request_rate, 2 * pair + 2, request_count)
        slower_records = scale_latencies(after_records, LATENCY_INCREASE)

        before = create_side("A", before_records)
        equal = create_side("B", after_records)
        slower = create_side("B", slower_records)
        counts.add_equal_pair(comparison.compare([before, equal]).differences)
        counts.add_changed_pair(comparison.compare([before, slower]).differences)

    return counts


def main() -> None:
    """Print how often equal servers differ, and how often a slower server is detected."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--requests", type=int, default=2000, help="requests of each run")
    parser.add_argument("--load", type=float, default=0.7, help="the load as part of the capacity")
    args = rig.parse_arguments(parser, pairs=1, requests=200)

    capacity_per_s = measure_capacity(args.requests)
    request_rate = f"{args.load * capacity_per_s:.3f}"
    print(
        f"{args.pairs} pairs of {args.requests:,} requests at {request_rate}/s, {args.load:.0%} of "
        f"{capacity_per_s:.2f}/s"
    )

    counts = compare_pairs(args.pairs, request_rate, args.requests)
    print(
        f"equal servers: no difference in {counts.pairs_without_difference} of {args.pairs} pairs, "
        f"over all metrics\n"
    )
    rows = [metric_counts.format_row(name) for name, metric_counts in counts.by_metric.items()]
    print(
        rig.format_table(["metric", "false alarms", "10 % detected", "detectable (median)"], rows)
    )


if __name__ == "__main__":
    main()
