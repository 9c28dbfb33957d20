"""How often does a report name the right cause of slow requests?

    python benchmarks/causes.py                   ten causes x 20 seeds, 100 runs without a cause
    python benchmarks/causes.py --seed 500        other seeds than those on which the limits of
                                                  analysis/causes.py were set
    python benchmarks/causes.py --no-account      a server that reports no timing breakdown
    python benchmarks/causes.py --only queue,clean -v

SIMULATED: each run is 150 s of Poisson load on four replicas in virtual time, with a rate, lengths
and a size of the cause drawn from its seed. The delays of a client and of new connections, which
virtual time does not have, are added to its rows. Runs without a cause use a quarter to 80 % of the
batch slots. The metrics page of each replica is read once a second. The script prints which causes
were named for each true cause.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import rig
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core import seeds
from loadgen.core.analysis.causes import explain
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.sections import Explanation
from loadgen.core.results.manifest import RunManifest, StagePlan
from loadgen.core.results.record import RESPONSE_TIME_COLUMNS
from loadgen.core.schedule.build import build_schedule
from loadgen.core.server_metrics.series import UP, MetricSample
from loadgen.core.workload import FixedTokens, Poisson, Stage, Synthetic, Workload
from loadgen.sim.engine.replica import Costs, Replica, ServerLimits
from loadgen.sim.engine.routing import create_router
from loadgen.sim.load_bounds import LoadBounds
from loadgen.sim.presets.preset import load_preset
from loadgen.sim.request_lengths import RequestSize
from loadgen.sim.simulation import Simulation
from loadgen.sim.virtual_records import RecordOptions, build_records

NS_PER_S, NS_PER_MS = 1_000_000_000, 1_000_000
LENGTH_S = 150
REPLICAS = 4
ITERATION_S = 0.022  # of this preset, about
CAUSES = (
    "queue",
    "kv_cache",
    "preemptions",
    "target",
    "long_prompts",
    "power",
    "client",
    "startup",
    "stalls",
    "network",
)
PAGE_METRICS = (
    "kv_cache_usage_perc",
    "num_requests_waiting",
    "num_requests_running",
    "num_preemptions_total",
)


CLEAN = "clean"  # a run without a cause


NOTHING = "nothing"  # what is counted if loadgen names no cause


NOT_REPORTED_NS = -1


class DisturbedReplica(Replica):
    """A replica that slows down or stalls on demand.

    Its iterations take `slower(seconds)` times as long. `stall` is the interval and the length of
    stalls in ns. `pages` maps a second to the values of its metrics page, in the order of
    PAGE_METRICS.
    """

    def __init__(
        self,
        costs: Costs,
        limits: ServerLimits,
        slower: Callable[[float], float],
        stall: tuple[int, int],
    ) -> None:
        super().__init__(costs, limits)
        self._slower = slower
        self._stall_interval_ns, self._stall_length_ns = stall
        self._blocks = limits.kv_blocks
        self.pages: dict[int, tuple[float, ...]] = {}

    def begin_iteration(self, now_ns: int) -> bool:
        """Begin an iteration, lengthen it, and record the metrics page of this second."""
        if not super().begin_iteration(now_ns):
            return False

        duration_ns = int((self.end_ns - now_ns) * self._slower(now_ns / NS_PER_S))
        if self._meets_stall(now_ns, duration_ns):
            duration_ns += self._stall_length_ns

        self.end_ns = now_ns + duration_ns
        self.iteration_ends_ns[-1] = self.end_ns
        values = (
            self.used_block_count / self._blocks,
            self.queued_count,
            self.active_count,
            self.pause_count,
        )
        self.pages.setdefault(now_ns // NS_PER_S, tuple(map(float, values)))

        return True

    def _meets_stall(self, now_ns: int, duration_ns: int) -> bool:
        """Return whether a stall, one at the end of each interval, begins in an iteration."""
        if not self._stall_interval_ns:
            return False
        since_last_stall_ns = now_ns % self._stall_interval_ns
        return since_last_stall_ns + duration_ns >= self._stall_interval_ns


class Slowdown(NamedTuple):
    """A change of the length of iterations at a time of the run."""

    factor: float
    change_s: float
    is_at_start: bool  # slow until the change, not after it

    def factor_at(self, at_s: float) -> float:
        """Return the factor on the length of iterations at a time of the run."""
        is_before_change = at_s < self.change_s
        return self.factor if is_before_change == self.is_at_start else 1.0


def _request_size(
    inputs: NDArray[np.int64], outputs: NDArray[np.int64], number: int
) -> RequestSize:
    """Return the lengths of a request; they repeat after the last drawn one."""
    index = number % len(inputs)
    return RequestSize(int(inputs[index]), int(outputs[index]))


NO_SLOWDOWN = Slowdown(1.0, LENGTH_S * 2.0, is_at_start=False)


@dataclass
class Scenario:
    """The load and the servers of a simulated run.

    `inputs` and `outputs` are the lengths of the requests in tokens. `speeds` has the speed of each
    replica, `stall` the interval and the length of stalls in ns, and `slowdown` a change of the
    length of iterations during the run.
    """

    rate: float
    inputs: NDArray[np.int64]
    outputs: NDArray[np.int64]
    limits: ServerLimits
    speeds: list[float]
    stall: tuple[int, int] = (0, 0)
    slowdown: Slowdown = NO_SLOWDOWN


SIZE_COUNT = 40_000  # drawn lengths; they repeat after that


def draw_scenario(cause: str, rng: np.random.Generator, limits: ServerLimits) -> Scenario:
    """Draw a load, and change the servers so that it is slow for this cause.

    The causes "client" and "network" do not change it: their delays are added to the records.
    """
    rate = float(rng.uniform(20, 60))
    tokens = int(rng.uniform(60, 160))
    inputs = np.clip(rng.lognormal(np.log(300), 0.4, SIZE_COUNT), 50, 1500).astype(int)
    outputs = np.clip(rng.normal(tokens, tokens / 4, SIZE_COUNT), 8, 1000).astype(int)
    limits = replace(limits, max_batch_size=256, max_num_tokens=2048)
    scenario = Scenario(rate, inputs, outputs, limits, speeds=[1.0] * REPLICAS)

    in_flight = rate * tokens * ITERATION_S / REPLICAS  # at one replica, by Little's law
    match cause:
        case "clean":
            batch = max(int(in_flight / rng.uniform(0.25, 0.8)), 4)
            scenario.limits = replace(limits, max_batch_size=batch)
        case "queue":
            batch = max(int(in_flight / rng.uniform(1.15, 1.6)), 2)
            scenario.limits = replace(limits, max_batch_size=batch)
        case "kv_cache":
            blocks = int(in_flight / rng.uniform(1.1, 1.4) * (330 + tokens) / 32)
            scenario.limits = _with_small_cache(limits, blocks, reserves_output_blocks=True)
        case "preemptions":
            scenario.rate = rate / 2
            scenario.outputs = outputs * 3
            blocks = int(in_flight * 1.5 / rng.uniform(1.0, 1.2) * (300 + 1.5 * tokens) / 32)
            scenario.limits = _with_small_cache(limits, blocks, reserves_output_blocks=False)
        case "target":
            slow_replica = int(rng.integers(REPLICAS))
            scenario.speeds[slow_replica] = 1 / rng.uniform(3, 6)
        case "long_prompts":
            scenario.limits = replace(
                limits,
                max_num_tokens=512,
                max_seq_len=32_000,
                kv_blocks=max(limits.kv_blocks, 2000),
            )
            is_long = rng.random(SIZE_COUNT) < rng.uniform(0.02, 0.05)
            scenario.inputs = np.where(is_long, int(rng.uniform(10_000, 16_000)), inputs)
        case "power":
            factor = rng.uniform(1.3, 1.8)
            change_s = rng.uniform(0.3, 0.7) * LENGTH_S
            scenario.slowdown = Slowdown(factor, change_s, is_at_start=False)
        case "startup":
            factor = rng.uniform(6, 12)
            change_s = rng.uniform(0.05, 0.1) * LENGTH_S
            scenario.slowdown = Slowdown(factor, change_s, is_at_start=True)
        case "stalls":
            interval_ns = int(rng.uniform(20, 35) * NS_PER_S)
            scenario.stall = (interval_ns, int(rng.uniform(0.8, 2.0) * NS_PER_S))

    return scenario


def _with_small_cache(
    limits: ServerLimits, blocks: int, *, reserves_output_blocks: bool
) -> ServerLimits:
    """Return limits with a KV cache of so many blocks, but enough for the longest request."""
    least_blocks = limits.max_seq_len // limits.tokens_per_block + 1
    return replace(
        limits,
        reserves_output_blocks=reserves_output_blocks,
        block_reuse=False,
        kv_blocks=max(blocks, least_blocks),
    )


def simulate_run(cause: str, seed: int) -> tuple[NDArray[np.void], list[MetricSample]]:
    """Return the request records of a run with this cause, and the samples of its metrics pages.

    The cause "clean" stands for a run without one.
    """
    rng = seeds.generator(seed, cause)
    preset = load_preset("gb300-vm")
    scenario = draw_scenario(cause, rng, preset.limits)
    schedule = build_schedule(_create_workload(scenario.rate), seed)
    replicas = [
        DisturbedReplica(
            preset.costs.at_speed(speed),
            scenario.limits,
            scenario.slowdown.factor_at,
            scenario.stall,
        )
        for speed in scenario.speeds
    ]

    simulation = Simulation(
        schedule,
        partial(_request_size, scenario.inputs, scenario.outputs),
        replicas,
        create_router(scenario.speeds, "round_robin"),
        LoadBounds(timeout_ns=600 * NS_PER_S),
    )
    simulation.run()
    recorded = build_records(
        simulation.requests,
        simulation.iteration_ends_ns,
        schedule,
        RecordOptions(tokens_per_event=1, source="estimate", reports_cached_tokens=False),
    )
    rows = recorded.records[:]
    _add_client_and_network(rows, cause, seed, rng)

    return rows, _metric_samples(replicas)


def _create_workload(rate: float) -> Workload:
    """Return a workload that only serves to schedule arrivals; its lengths are not used."""
    one_token: Any = FixedTokens(value=1)
    stage = Stage(name="load", arrival=Poisson(rate=rate), duration_ns=LENGTH_S * NS_PER_S)
    return Workload(
        name="arrivals",
        requests=Synthetic(input_tokens=one_token, output_tokens=one_token),
        stages=(stage,),
    )


def _add_client_and_network(
    rows: NDArray[np.void], cause: str, seed: int, rng: np.random.Generator
) -> None:
    """Add the delays of a client and a network to the timestamps of the records.

    A request is delayed by its connection, then by the client before it is sent, then by the
    network. The causes "client" and "network" delay some requests by 100 to 500 ms. The network
    does so while it connects (odd seeds) or afterwards (even seeds).
    """
    row_count = len(rows)
    network_ns = rng.lognormal(np.log(0.4), 0.3, row_count) * NS_PER_MS
    client_ns = rng.exponential(0.1, row_count) * NS_PER_MS

    connect_ns = np.zeros(row_count)
    if cause == "client":
        is_delayed = rng.random(row_count) < rng.uniform(0.05, 0.15)
        delays_ns = rng.uniform(100, 400, row_count) * NS_PER_MS
        client_ns += np.where(is_delayed, delays_ns, 0)
    elif cause == "network":
        is_delayed = rng.random(row_count) < rng.uniform(0.03, 0.1)
        delays_ns = rng.uniform(150, 500, row_count) * NS_PER_MS

        extra_ns = np.where(is_delayed, delays_ns, 0)
        if seed % 2:
            connect_ns = extra_ns
        else:
            network_ns = network_ns + extra_ns

        rows["reused"] = connect_ns == 0

    _delay_timestamps(rows, ("ready_ns",), connect_ns)
    _delay_timestamps(rows, ("sent_ns",), connect_ns + client_ns)
    _delay_timestamps(rows, RESPONSE_TIME_COLUMNS, connect_ns + client_ns + network_ns)


def _delay_timestamps(
    rows: NDArray[np.void], fields: Sequence[str], delay_ns: NDArray[np.float64]
) -> None:
    """Add a delay to timestamps of the records, where they have one (it is not negative)."""
    whole_delay_ns = delay_ns.astype(np.int64)
    for field in fields:
        rows[field] += np.where(rows[field] >= 0, whole_delay_ns, 0)


def _metric_samples(replicas: list[DisturbedReplica]) -> list[MetricSample]:
    """Return the samples of all metrics pages, in the order of time and then of the replica."""
    seconds = sorted({second for replica in replicas for second in replica.pages})
    samples = []
    for second in seconds:
        for replica_number, replica in enumerate(replicas):
            values = replica.pages.get(second)
            if values is not None:
                samples += _samples_of_page(second, f"page {replica_number}", values)

    return samples


def _samples_of_page(second: int, page: str, values: tuple[float, ...]) -> list[MetricSample]:
    """Return one sample for each metric of a page, and one that says that it could be read."""
    values_by_name = {
        f"vllm:{name}": value for name, value in zip(PAGE_METRICS, values, strict=True)
    }
    values_by_name[UP] = 1.0
    return [
        MetricSample(t_s=float(second), target=0, page=page, name=name, labels="", value=value)
        for name, value in values_by_name.items()
    ]


def count_named_causes(
    cause: str, seed_range: range, *, has_server_timing: bool, verbose: bool
) -> int:
    """Print which causes loadgen names first in runs with this cause; return how often it is right.

    With `verbose`, each explanation that names another cause is printed too.
    """
    started_s = time.process_time()
    expected_code = NOTHING if cause == CLEAN else cause

    code_counts = Counter[str]()
    for seed in seed_range:
        explanation = explain_run(cause, seed, has_server_timing=has_server_timing)
        codes = [named_cause.code for named_cause in explanation.causes]
        first_code = codes[0] if codes else NOTHING
        code_counts[first_code] += 1
        if verbose and first_code != expected_code:
            print(f"    seed {seed}: {codes} {explanation.text}")

    counts = ", ".join(f"{code} {times}" for code, times in code_counts.most_common())
    cpu_s = time.process_time() - started_s
    print(f"{cause:<13} {len(seed_range):>3} runs: {counts} ({cpu_s:.1f} CPU-s)", flush=True)

    return code_counts[cause]


def explain_run(cause: str, seed: int, *, has_server_timing: bool = True) -> Explanation:
    """Simulate a run with this cause, and return the explanation that loadgen gives for it.

    Without `has_server_timing`, the server reports no timing breakdown (how long a request was
    queued, prefilled and decoded).
    """
    rows, samples = simulate_run(cause, seed)
    if not has_server_timing:
        for name in ("queue", "prefill", "decode"):
            rows[f"server_{name}_ns"] = NOT_REPORTED_NS
    return explain([Columns(rows)], RunManifest(stages=(StagePlan(),)), samples)


def main() -> None:
    """Print which causes were named for each true cause."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--clean", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--only", default=",".join((*CAUSES, CLEAN)))
    parser.add_argument("--no-account", action="store_true")
    parser.add_argument(
        "-v", action="store_true", help="print the explanations that do not name the true cause"
    )
    args = rig.parse_arguments(parser, seeds=1, clean=1, only="queue,power,clean")
    causes = args.only.split(",")

    correct = 0
    for cause in causes:
        run_count = args.clean if cause == CLEAN else args.seeds
        seed_range = range(args.seed, args.seed + run_count)
        correct += count_named_causes(
            cause, seed_range, has_server_timing=not args.no_account, verbose=args.v
        )

    run_count = args.seeds * len(set(causes) - {CLEAN})
    print(f"right cause first: {correct} of {run_count}")


if __name__ == "__main__":
    main()
