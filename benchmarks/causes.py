"""How often the paragraph under the verdict names the right cause, on a simulated server. Everything here is SIMULATED.

    python benchmarks/causes.py                       ten causes x 20 seeds, 100 runs without a cause
    python benchmarks/causes.py --seed 500            other seeds; the limits in analysis/causes.py were set on the first
    python benchmarks/causes.py --no-account          a server that gives no account of its time
    python benchmarks/causes.py --only queue,clean -v

Each run is 150 s of Poisson load on four replicas in virtual time, with a rate, lengths and a size of the cause drawn
from its seed. The engine itself is slowed down, stopped or made too small; the client's lag, the network and
connections, which virtual time does not have, are added to its rows. Runs without a cause are loaded to between a
quarter and 80 % of the batch slots. What the metrics page of each replica would have said is read once a second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

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
from loadgen.sim.engine.routing import make_router
from loadgen.sim.load_bounds import LoadBounds
from loadgen.sim.presets.preset import load_preset
from loadgen.sim.request_lengths import RequestSize
from loadgen.sim.simulation import Simulation
from loadgen.sim.virtual_records import RecordOptions, build_records

S, MS = 1_000_000_000, 1_000_000
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
PAGE = (
    "kv_cache_usage_perc",
    "num_requests_waiting",
    "num_requests_running",
    "num_preemptions_total",
)


class Disturbed(Replica):
    """A replica whose iterations take `slower(seconds)` times as long. `stall`: how often it stands still, how long.

    `pages`: second -> what its metrics page would say, in the order of PAGE.
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

    def begin(self, now_ns: int) -> bool:
        if not super().begin(now_ns):
            return False
        every, length = self._stall
        took = int((self.end_ns - now_ns) * self._slower(now_ns / S))
        self.ends[-1] = self.end_ns = (
            now_ns + took + (length if every and now_ns % every + took >= every else 0)
        )
        values = (self.blocks_used / self._blocks, self.queued, self.active, self.pauses)
        self.pages.setdefault(now_ns // S, tuple(map(float, values)))
        return True


def simulate(cause: str, seed: int) -> tuple[NDArray[np.void], list[MetricSample]]:
    """The rows of a run with this cause ("clean": without one), and what the metrics pages said."""
    rng = seeds.stream(seed, cause)
    preset = load_preset("gb300-vm")
    speeds = [1.0] * REPLICAS
    stall = (0, 0)
    rate, tokens, n = float(rng.uniform(20, 60)), int(rng.uniform(60, 160)), 40_000
    inputs = np.clip(rng.lognormal(np.log(300), 0.4, n), 50, 1500).astype(int)
    outputs = np.clip(rng.normal(tokens, tokens / 4, n), 8, 1000).astype(int)
    limits = replace(preset.limits, max_batch_size=256, max_num_tokens=2048)
    in_flight = rate * tokens * ITERATION_S / REPLICAS  # at one replica
    least_blocks = limits.max_seq_len // limits.tokens_per_block + 1
    change_s, factor = LENGTH_S * 2.0, 1.0

    def slower(at_s: float) -> float:
        return factor if (at_s < change_s) == (cause == "startup") else 1.0

    if cause == "clean":
        limits = replace(limits, max_batch_size=max(int(in_flight / rng.uniform(0.25, 0.8)), 4))
    elif cause == "queue":
        limits = replace(limits, max_batch_size=max(int(in_flight / rng.uniform(1.15, 1.6)), 2))
    elif cause == "kv_cache":
        blocks = int(in_flight / rng.uniform(1.1, 1.4) * (330 + tokens) / 32)
        limits = replace(
            limits, guaranteed=True, block_reuse=False, kv_blocks=max(blocks, least_blocks)
        )
    elif cause == "preemptions":
        rate, outputs = rate / 2, outputs * 3
        blocks = int(in_flight * 1.5 / rng.uniform(1.0, 1.2) * (300 + 1.5 * tokens) / 32)
        limits = replace(
            limits, guaranteed=False, block_reuse=False, kv_blocks=max(blocks, least_blocks)
        )
    elif cause == "target":
        speeds[int(rng.integers(REPLICAS))] = 1 / rng.uniform(3, 6)
    elif cause == "long_prompts":
        limits = replace(
            limits, max_num_tokens=512, max_seq_len=32_000, kv_blocks=max(limits.kv_blocks, 2000)
        )
        inputs = np.where(
            rng.random(n) < rng.uniform(0.02, 0.05), int(rng.uniform(10_000, 16_000)), inputs
        )
    elif cause == "power":
        factor, change_s = rng.uniform(1.3, 1.8), rng.uniform(0.3, 0.7) * LENGTH_S
    elif cause == "startup":
        factor, change_s = rng.uniform(6, 12), rng.uniform(0.05, 0.1) * LENGTH_S
    elif cause == "stalls":
        stall = (int(rng.uniform(20, 35) * S), int(rng.uniform(0.8, 2.0) * S))
    one: Any = FixedTokens(value=1)
    stage = Stage(name="load", arrival=Poisson(rate=rate), duration_ns=LENGTH_S * S)
    workload = Workload(
        name="x", requests=Synthetic(input_tokens=one, output_tokens=one), stages=(stage,)
    )
    planned = build_schedule(workload, seed)
    replicas = [Disturbed(preset.costs.at_speed(speed), limits, slower, stall) for speed in speeds]

    def size(number: int) -> RequestSize:
        return RequestSize(int(inputs[number % n]), int(outputs[number % n]))

    simulation = Simulation(
        planned, size, replicas, make_router(speeds, "round_robin"), LoadBounds(timeout_ns=600 * S)
    )
    simulation.run()
    recorded = build_records(
        simulation.requests,
        simulation.ends,
        planned,
        RecordOptions(interval=1, source="estimate", reports_cached_tokens=False),
    )
    rows = recorded.records[:]
    _add_client_and_network(rows, cause, seed, rng)
    return rows, _samples(replicas)


def _add_client_and_network(
    rows: NDArray[np.void], cause: str, seed: int, rng: np.random.Generator
) -> None:
    """A client and a network around the simulated server: usual ones, or with the cause in them."""
    n = len(rows)
    network, lag, connect = (
        rng.lognormal(np.log(0.4), 0.3, n) * MS,
        rng.exponential(0.1, n) * MS,
        np.zeros(n),
    )
    if cause == "client":
        lag += np.where(rng.random(n) < rng.uniform(0.05, 0.15), rng.uniform(100, 400, n) * MS, 0)
    elif cause == "network":
        extra = np.where(rng.random(n) < rng.uniform(0.03, 0.1), rng.uniform(150, 500, n) * MS, 0)
        connect, network = (extra, network) if seed % 2 else (connect, network + extra)
        rows["reused"] = connect == 0
    whole = connect + lag + network
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
        later = {"ready_ns": connect, "sent_ns": connect + lag}.get(field, whole).astype(np.int64)
        rows[field] += np.where(rows[field] >= 0, later, 0)


def _samples(replicas: list[Disturbed]) -> list[MetricSample]:
    made = []
    for second in sorted({at for replica in replicas for at in replica.pages}):
        for i, replica in enumerate(replicas):
            if (values := replica.pages.get(second)) is not None:
                named = [
                    *((f"vllm:{name}", value) for name, value in zip(PAGE, values, strict=True)),
                    (UP, 1.0),
                ]
                made += [
                    MetricSample(
                        t_s=float(second),
                        target=0,
                        page=f"page {i}",
                        name=name,
                        labels="",
                        value=value,
                    )
                    for name, value in named
                ]
    return made


def judged(cause: str, seed: int, account: bool = True) -> Explanation:
    """What is said of a run with this cause."""
    rows, samples = simulate(cause, seed)
    if not account:
        for name in ("queue", "prefill", "decode"):
            rows[f"server_{name}_ns"] = -1
    return explain([Columns(rows)], RunManifest(stages=(StagePlan(),)), samples)


def main() -> None:
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
    right = 0
    for cause in args.only.split(","):
        began, named = time.process_time(), Counter[str]()
        count = args.clean if cause == "clean" else args.seeds
        for seed in range(args.seed, args.seed + count):
            said = judged(cause, seed, not args.no_account)
            first = said.causes[0].code if said.causes else "nothing"
            named[first] += 1
            if args.v and first != (cause if cause != "clean" else "nothing"):
                print(f"    seed {seed}: {[found.code for found in said.causes]} {said.text}")
        right += named[cause]
        words = ", ".join(f"{code} {times}" for code, times in named.most_common())
        print(
            f"{cause:<13} {count:>3} runs: {words} ({time.process_time() - began:.1f} CPU-s)",
            flush=True,
        )
    print(
        f"right cause first: {right} of {args.seeds * len(set(args.only.split(',')) - {'clean'})}"
    )


if __name__ == "__main__":
    main()
