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
from collections.abc import Callable
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
        self._slower, self._stall, self._blocks = slower, stall, limits.kv_blocks
        self.pages: dict[int, tuple[float, ...]] = {}

    def begin_iteration(self, now_ns: int) -> bool:
        """Begin an iteration, lengthen it, and record the metrics page of this second."""
        if not super().begin_iteration(now_ns):
            return False
        every, length = self._stall
        took = int((self.end_ns - now_ns) * self._slower(now_ns / NS_PER_S))
        self.iteration_ends_ns[-1] = self.end_ns = (
            now_ns + took + (length if every and now_ns % every + took >= every else 0)
        )
        values = (
            self.used_block_count / self._blocks,
            self.queued_count,
            self.active_count,
            self.pause_count,
        )
        self.pages.setdefault(now_ns // NS_PER_S, tuple(map(float, values)))
        return True


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


def simulate_run(cause: str, seed: int) -> tuple[NDArray[np.void], list[MetricSample]]:
    """Return the rows of a run with this cause, and the samples of its metrics pages.

    The cause "clean" stands for a run without one.
    """
    rng = seeds.generator(seed, cause)
    preset = load_preset("gb300-vm")
    speeds = [1.0] * REPLICAS
    stall = (0, 0)
    rate, tokens, size_count = float(rng.uniform(20, 60)), int(rng.uniform(60, 160)), 40_000
    inputs = np.clip(rng.lognormal(np.log(300), 0.4, size_count), 50, 1500).astype(int)
    outputs = np.clip(rng.normal(tokens, tokens / 4, size_count), 8, 1000).astype(int)
    limits = replace(preset.limits, max_batch_size=256, max_num_tokens=2048)
    in_flight = rate * tokens * ITERATION_S / REPLICAS  # at one replica
    least_blocks = limits.max_seq_len // limits.tokens_per_block + 1
    change_s, factor = LENGTH_S * 2.0, 1.0

    if cause == "clean":
        limits = replace(limits, max_batch_size=max(int(in_flight / rng.uniform(0.25, 0.8)), 4))
    elif cause == "queue":
        limits = replace(limits, max_batch_size=max(int(in_flight / rng.uniform(1.15, 1.6)), 2))
    elif cause == "kv_cache":
        blocks = int(in_flight / rng.uniform(1.1, 1.4) * (330 + tokens) / 32)
        limits = replace(
            limits,
            reserves_output_blocks=True,
            block_reuse=False,
            kv_blocks=max(blocks, least_blocks),
        )
    elif cause == "preemptions":
        rate, outputs = rate / 2, outputs * 3
        blocks = int(in_flight * 1.5 / rng.uniform(1.0, 1.2) * (300 + 1.5 * tokens) / 32)
        limits = replace(
            limits,
            reserves_output_blocks=False,
            block_reuse=False,
            kv_blocks=max(blocks, least_blocks),
        )
    elif cause == "target":
        speeds[int(rng.integers(REPLICAS))] = 1 / rng.uniform(3, 6)
    elif cause == "long_prompts":
        limits = replace(
            limits, max_num_tokens=512, max_seq_len=32_000, kv_blocks=max(limits.kv_blocks, 2000)
        )
        inputs = np.where(
            rng.random(size_count) < rng.uniform(0.02, 0.05),
            int(rng.uniform(10_000, 16_000)),
            inputs,
        )
    elif cause == "power":
        factor, change_s = rng.uniform(1.3, 1.8), rng.uniform(0.3, 0.7) * LENGTH_S
    elif cause == "startup":
        factor, change_s = rng.uniform(6, 12), rng.uniform(0.05, 0.1) * LENGTH_S
    elif cause == "stalls":
        stall = (int(rng.uniform(20, 35) * NS_PER_S), int(rng.uniform(0.8, 2.0) * NS_PER_S))
    slowdown = Slowdown(factor, change_s, is_at_start=cause == "startup")
    one_token: Any = FixedTokens(value=1)
    stage = Stage(name="load", arrival=Poisson(rate=rate), duration_ns=LENGTH_S * NS_PER_S)
    workload = Workload(
        name="x",
        requests=Synthetic(input_tokens=one_token, output_tokens=one_token),
        stages=(stage,),
    )
    planned = build_schedule(workload, seed)
    replicas = [
        DisturbedReplica(preset.costs.at_speed(speed), limits, slowdown.factor_at, stall)
        for speed in speeds
    ]
    simulation = Simulation(
        planned,
        partial(_request_size, inputs, outputs),
        replicas,
        create_router(speeds, "round_robin"),
        LoadBounds(timeout_ns=600 * NS_PER_S),
    )
    simulation.run()
    recorded = build_records(
        simulation.requests,
        simulation.iteration_ends_ns,
        planned,
        RecordOptions(tokens_per_event=1, source="estimate", reports_cached_tokens=False),
    )
    rows = recorded.records[:]
    _add_client_and_network(rows, cause, seed, rng)
    return rows, _metric_samples(replicas)


def _add_client_and_network(
    rows: NDArray[np.void], cause: str, seed: int, rng: np.random.Generator
) -> None:
    """Add the delays of a client and a network to the rows.

    They are usual ones, or those of the cause "client" or "network".
    """
    row_count = len(rows)
    network, receive_delay, connect = (
        rng.lognormal(np.log(0.4), 0.3, row_count) * NS_PER_MS,
        rng.exponential(0.1, row_count) * NS_PER_MS,
        np.zeros(row_count),
    )
    if cause == "client":
        receive_delay += np.where(
            rng.random(row_count) < rng.uniform(0.05, 0.15),
            rng.uniform(100, 400, row_count) * NS_PER_MS,
            0,
        )
    elif cause == "network":
        extra = np.where(
            rng.random(row_count) < rng.uniform(0.03, 0.1),
            rng.uniform(150, 500, row_count) * NS_PER_MS,
            0,
        )
        connect, network = (extra, network) if seed % 2 else (connect, network + extra)
        rows["reused"] = connect == 0
    total_delay = connect + receive_delay + network
    for field in (
        "ready_ns",
        "sent_ns",
        "first_byte_ns",
        "first_event_ns",
        "first_token_ns",
        "first_answer_ns",
        "last_token_ns",
        "end_ns",
        "done_ns",
    ):
        delay = {"ready_ns": connect, "sent_ns": connect + receive_delay}.get(
            field, total_delay
        ).astype(np.int64)
        rows[field] += np.where(rows[field] >= 0, delay, 0)


def _metric_samples(replicas: list[DisturbedReplica]) -> list[MetricSample]:
    """Return the samples of all metrics pages of the replicas."""
    samples = []
    for second in sorted({page_second for replica in replicas for page_second in replica.pages}):
        for page_number, replica in enumerate(replicas):
            if (values := replica.pages.get(second)) is not None:
                values_by_name = [
                    *(
                        (f"vllm:{name}", value)
                        for name, value in zip(PAGE_METRICS, values, strict=True)
                    ),
                    (UP, 1.0),
                ]
                samples += [
                    MetricSample(
                        t_s=float(second),
                        target=0,
                        page=f"page {page_number}",
                        name=name,
                        labels="",
                        value=value,
                    )
                    for name, value in values_by_name
                ]
    return samples


def explain_run(cause: str, seed: int, account: bool = True) -> Explanation:
    """Return the explanation that loadgen gives for a run with this cause.

    Without `account` the server reports no timing breakdown.
    """
    rows, samples = simulate_run(cause, seed)
    if not account:
        for name in ("queue", "prefill", "decode"):
            rows[f"server_{name}_ns"] = -1
    return explain([Columns(rows)], RunManifest(stages=(StagePlan(),)), samples)


def main() -> None:
    """Print which causes were named for each true cause."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--clean", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--only", default=",".join((*CAUSES, "clean")))
    parser.add_argument("--no-account", action="store_true")
    parser.add_argument(
        "-v", action="store_true", help="print what is said where it is not the cause"
    )
    args = rig.parse_arguments(parser, seeds=1, clean=1, only="queue,power,clean")
    correct = 0
    for cause in args.only.split(","):
        started_s, code_counts = time.process_time(), Counter[str]()
        count = args.clean if cause == "clean" else args.seeds
        for seed in range(args.seed, args.seed + count):
            explanation = explain_run(cause, seed, not args.no_account)
            first_code = explanation.causes[0].code if explanation.causes else "nothing"
            code_counts[first_code] += 1
            if args.v and first_code != (cause if cause != "clean" else "nothing"):
                print(
                    f"    seed {seed}: {[cause_found.code for cause_found in explanation.causes]} "
                    f"{explanation.text}"
                )
        correct += code_counts[cause]
        counts = ", ".join(f"{code} {times}" for code, times in code_counts.most_common())
        print(
            f"{cause:<13} {count:>3} runs: {counts} ({time.process_time() - started_s:.1f} CPU-s)",
            flush=True,
        )
    print(
        f"right cause first: {correct} of {args.seeds * len(set(args.only.split(',')) - {'clean'})}"
    )


if __name__ == "__main__":
    main()
