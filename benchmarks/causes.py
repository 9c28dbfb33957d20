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

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
PRESET = "gb300-vm"
RUN_LENGTH_S = 150
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
NO_CAUSE = "clean"  # a run without a cause
NOTHING_NAMED = "nothing"  # printed if loadgen names no cause
NOT_REPORTED_NS = -1  # in a record: the server did not report this time


@dataclass(frozen=True)
class Slowdown:
    """Iterations take `factor` times as long, before or after a change during the run."""

    factor: float
    change_s: float  # since the start of the run
    is_before_change: bool

    def factor_at(self, time_s: float) -> float:
        """Return the factor on the length of an iteration at a time since the start of the run."""
        is_slow = (time_s < self.change_s) == self.is_before_change
        return self.factor if is_slow else 1.0


NO_SLOWDOWN = Slowdown(factor=1.0, change_s=0.0, is_before_change=True)


@dataclass(frozen=True)
class PeriodicStall:
    """A replica stops for `length_ns` at the end of each interval. The interval 0 means: never."""

    interval_ns: int
    length_ns: int

    def occurs_during(self, begin_ns: int, duration_ns: int) -> bool:
        """Return whether a stall occurs in an iteration, which is if an interval ends during it."""
        if self.interval_ns == 0:
            return False
        elapsed_ns = begin_ns % self.interval_ns
        return elapsed_ns + duration_ns >= self.interval_ns


NO_STALL = PeriodicStall(interval_ns=0, length_ns=0)


class MetricsPage(NamedTuple):
    """The values on the metrics page of a replica; the names are those of vLLM."""

    kv_cache_usage_perc: float
    num_requests_waiting: float
    num_requests_running: float
    num_preemptions_total: float

    def to_samples(self, second: int, page_name: str) -> list[MetricSample]:
        """Return one sample for each metric, and one that says that the page could be read."""
        values_by_name = {f"vllm:{name}": value for name, value in self._asdict().items()}
        values_by_name[UP] = 1.0
        return [
            MetricSample(
                t_s=float(second), target=0, page=page_name, name=name, labels="", value=value
            )
            for name, value in values_by_name.items()
        ]


class DisturbedReplica(Replica):
    """A simulated replica that can be slow or stall, and records its metrics page every second."""

    def __init__(
        self, costs: Costs, limits: ServerLimits, slowdown: Slowdown, stall: PeriodicStall
    ) -> None:
        super().__init__(costs, limits)
        self._slowdown = slowdown
        self._stall = stall
        self._kv_block_count = limits.kv_blocks
        self.page_by_second: dict[int, MetricsPage] = {}

    def begin_iteration(self, now_ns: int) -> bool:
        """Begin an iteration and make it longer. Return False if there is nothing to compute."""
        if not super().begin_iteration(now_ns):
            return False

        slowdown_factor = self._slowdown.factor_at(now_ns / NS_PER_S)
        duration_ns = int((self.end_ns - now_ns) * slowdown_factor)
        if self._stall.occurs_during(now_ns, duration_ns):
            duration_ns += self._stall.length_ns
        self.end_ns = now_ns + duration_ns
        self.iteration_ends_ns[-1] = self.end_ns

        self._record_page(second=now_ns // NS_PER_S)
        return True

    def _record_page(self, second: int) -> None:
        """Record the metrics page, unless this second already has one."""
        page = MetricsPage(
            kv_cache_usage_perc=self.used_block_count / self._kv_block_count,
            num_requests_waiting=float(self.queued_count),
            num_requests_running=float(self.active_count),
            num_preemptions_total=float(self.pause_count),
        )
        self.page_by_second.setdefault(second, page)


@dataclass(frozen=True)
class Scenario:
    """The requests and the servers of a simulated run.

    `input_tokens` and `output_tokens` are the lengths of the requests, in the order of the
    schedule. A run with more requests begins again with the first length.
    """

    rate_per_s: float
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    mean_output_tokens: int
    limits: ServerLimits
    replica_speeds: tuple[float, ...] = (1.0,) * REPLICAS
    slowdown: Slowdown = NO_SLOWDOWN
    stall: PeriodicStall = NO_STALL

    def request_size(self, request_number: int) -> RequestSize:
        """Return the lengths of a request."""
        index = request_number % len(self.input_tokens)
        return RequestSize(int(self.input_tokens[index]), int(self.output_tokens[index]))

    @property
    def mean_in_flight(self) -> float:
        """The mean number of requests that one replica processes at a time, by Little's law.

        Each output token takes an iteration, so a request takes that many iterations.
        """
        request_s = self.mean_output_tokens * ITERATION_S
        return self.rate_per_s * request_s / REPLICAS


SIZE_COUNT = 40_000  # lengths drawn for a run, more than it has requests
MEDIAN_INPUT_TOKENS = 300
MEAN_INPUT_TOKENS = 330  # about: the distribution of lengths has a long tail


def draw_scenario(cause: str, rng: np.random.Generator, limits: ServerLimits) -> Scenario:
    """Draw the requests of a run, and change them or the servers so that this cause is at work.

    The causes "client" and "network" change nothing here: their delays are added to the request
    records after the simulation.
    """
    scenario = draw_undisturbed_scenario(rng, limits)
    if cause in SCENARIO_CHANGES:
        scenario = SCENARIO_CHANGES[cause](scenario, rng)
    return scenario


def draw_undisturbed_scenario(rng: np.random.Generator, limits: ServerLimits) -> Scenario:
    """Draw the rate and the lengths of requests that the servers can process without a queue."""
    rate_per_s = float(rng.uniform(20, 60))
    mean_output_tokens = int(rng.uniform(60, 160))
    input_tokens = rng.lognormal(np.log(MEDIAN_INPUT_TOKENS), 0.4, SIZE_COUNT)
    output_tokens = rng.normal(mean_output_tokens, mean_output_tokens / 4, SIZE_COUNT)
    return Scenario(
        rate_per_s=rate_per_s,
        input_tokens=np.clip(input_tokens, 50, 1500).astype(int),
        output_tokens=np.clip(output_tokens, 8, 1000).astype(int),
        mean_output_tokens=mean_output_tokens,
        limits=replace(limits, max_batch_size=256, max_num_tokens=2048),
    )


def leave_free_batch_slots(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Limit the batch so that requests fill a quarter to 80 % of it: no cause of slow requests."""
    utilization = rng.uniform(0.25, 0.8)
    batch_size = max(int(scenario.mean_in_flight / utilization), 4)
    limits = replace(scenario.limits, max_batch_size=batch_size)
    return dataclasses.replace(scenario, limits=limits)


def overload_batch(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Limit the batch to fewer requests than arrive, so that a queue grows (cause "queue")."""
    utilization = rng.uniform(1.15, 1.6)
    batch_size = max(int(scenario.mean_in_flight / utilization), 2)
    limits = replace(scenario.limits, max_batch_size=batch_size)
    return dataclasses.replace(scenario, limits=limits)


def overload_kv_cache(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Make the KV cache too small, so that requests wait for blocks (cause "kv_cache").

    The blocks of a request, for its prompt and its output, are reserved before it is processed.
    """
    utilization = rng.uniform(1.1, 1.4)
    tokens_per_request = MEAN_INPUT_TOKENS + scenario.mean_output_tokens
    tokens = scenario.mean_in_flight / utilization * tokens_per_request
    limits = limit_kv_cache(scenario.limits, tokens, reserves_output_blocks=True)
    return dataclasses.replace(scenario, limits=limits)


def provoke_preemptions(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Make the KV cache just large enough for running requests (cause "preemptions").

    Blocks for the output are not reserved. So the cache gets full while responses, which are three
    times as long here, grow, and the server has to pause some requests. Half the rate of requests
    three times as long makes 1.5 times as many in flight.
    """
    utilization = rng.uniform(1.0, 1.2)
    mean_in_flight = scenario.mean_in_flight * 1.5
    half_output_tokens = 1.5 * scenario.mean_output_tokens  # a request in flight is half done
    tokens = mean_in_flight / utilization * (MEDIAN_INPUT_TOKENS + half_output_tokens)
    return dataclasses.replace(
        scenario,
        rate_per_s=scenario.rate_per_s / 2,
        output_tokens=scenario.output_tokens * 3,
        mean_output_tokens=scenario.mean_output_tokens * 3,
        limits=limit_kv_cache(scenario.limits, tokens, reserves_output_blocks=False),
    )


def limit_kv_cache(
    limits: ServerLimits, tokens: float, *, reserves_output_blocks: bool
) -> ServerLimits:
    """Return limits with a KV cache of so many tokens, but enough for the longest request.

    Requests do not share blocks, so each of them needs all blocks of its own prompt.
    """
    min_blocks = limits.max_seq_len // limits.tokens_per_block + 1
    return replace(
        limits,
        reserves_output_blocks=reserves_output_blocks,
        block_reuse=False,
        kv_blocks=max(int(tokens / limits.tokens_per_block), min_blocks),
    )


def slow_down_one_replica(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Make one replica 3 to 6 times as slow as the others (cause "target")."""
    replica_speeds = list(scenario.replica_speeds)
    slow_replica = int(rng.integers(REPLICAS))
    replica_speeds[slow_replica] = 1 / rng.uniform(3, 6)
    return dataclasses.replace(scenario, replica_speeds=tuple(replica_speeds))


def add_long_prompts(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Give 2 to 5 % of the requests a prompt of 10,000 to 16,000 tokens (cause "long_prompts").

    An iteration computes at most 512 tokens, so a long prompt delays the prompts behind it.
    """
    limits = replace(
        scenario.limits,
        max_num_tokens=512,
        max_seq_len=32_000,
        kv_blocks=max(scenario.limits.kv_blocks, 2000),  # enough for the longest request
    )
    is_long = rng.random(SIZE_COUNT) < rng.uniform(0.02, 0.05)
    long_prompt_tokens = int(rng.uniform(10_000, 16_000))
    input_tokens = np.where(is_long, long_prompt_tokens, scenario.input_tokens)
    return dataclasses.replace(scenario, limits=limits, input_tokens=input_tokens)


def slow_down_during_run(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Make iterations 1.3 to 1.8 times as long from a time in the middle on (cause "power").

    This is what a power cap does that is set during a run.
    """
    factor = rng.uniform(1.3, 1.8)
    change_s = rng.uniform(0.3, 0.7) * RUN_LENGTH_S
    slowdown = Slowdown(factor, change_s, is_before_change=False)
    return dataclasses.replace(scenario, slowdown=slowdown)


def slow_down_at_start(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Make iterations 6 to 12 times as long in the first 5 to 10 % of the run (cause "startup").

    This is what a server does that compiles kernels for its first requests.
    """
    factor = rng.uniform(6, 12)
    change_s = rng.uniform(0.05, 0.1) * RUN_LENGTH_S
    slowdown = Slowdown(factor, change_s, is_before_change=True)
    return dataclasses.replace(scenario, slowdown=slowdown)


def add_stalls(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Stop all replicas for 0.8 to 2 s, every 20 to 35 s (cause "stalls")."""
    interval_ns = int(rng.uniform(20, 35) * NS_PER_S)
    length_ns = int(rng.uniform(0.8, 2.0) * NS_PER_S)
    return dataclasses.replace(scenario, stall=PeriodicStall(interval_ns, length_ns))


SCENARIO_CHANGES: dict[str, Callable[[Scenario, np.random.Generator], Scenario]] = {
    NO_CAUSE: leave_free_batch_slots,
    "queue": overload_batch,
    "kv_cache": overload_kv_cache,
    "preemptions": provoke_preemptions,
    "target": slow_down_one_replica,
    "long_prompts": add_long_prompts,
    "power": slow_down_during_run,
    "startup": slow_down_at_start,
    "stalls": add_stalls,
}


def simulate_run(cause: str, seed: int) -> tuple[NDArray[np.void], list[MetricSample]]:
    """Simulate a run in which this cause makes requests slow; "clean" is a run without a cause.

    Return the request records of the run, and the samples of the metrics pages of all replicas.
    """
    rng = seeds.generator(seed, cause)
    preset = load_preset(PRESET)
    scenario = draw_scenario(cause, rng, preset.limits)
    replicas = [
        DisturbedReplica(
            preset.costs.at_speed(speed), scenario.limits, scenario.slowdown, scenario.stall
        )
        for speed in scenario.replica_speeds
    ]

    records = simulate_records(scenario, replicas, seed)
    delays = draw_delays(cause, seed, len(records), rng)
    delay_records(records, delays)
    if cause == "network":
        # A request that was not delayed by its connection used one that was open already.
        records["reused"] = delays.connect_ns == 0
    return records, collect_metric_samples(replicas)


def simulate_records(
    scenario: Scenario, replicas: Sequence[DisturbedReplica], seed: int
) -> NDArray[np.void]:
    """Simulate the requests of a scenario in virtual time, and return their records."""
    schedule = build_schedule(create_arrivals_workload(scenario.rate_per_s), seed)
    simulation = Simulation(
        schedule,
        scenario.request_size,
        replicas,
        create_router(scenario.replica_speeds, "round_robin"),
        LoadBounds(timeout_ns=600 * NS_PER_S),
    )
    simulation.run()

    recorded = build_records(
        simulation.requests,
        simulation.iteration_ends_ns,
        schedule,
        RecordOptions(tokens_per_event=1, source="estimate", reports_cached_tokens=False),
    )
    return recorded.records[:]


def create_arrivals_workload(rate_per_s: float) -> Workload:
    """Return a workload with Poisson arrivals at this rate, from which a schedule can be built.

    Its requests have one token each, because the scenario has the lengths that are used.
    """
    one_token: Any = FixedTokens(value=1)
    stage = Stage(
        name="load", arrival=Poisson(rate=rate_per_s), duration_ns=RUN_LENGTH_S * NS_PER_S
    )
    return Workload(
        name="arrivals",
        requests=Synthetic(input_tokens=one_token, output_tokens=one_token),
        stages=(stage,),
    )


class Delays(NamedTuple):
    """The delays of each request, in ns and in the order in which they occur.

    A request is delayed while it connects, then by the client before it is sent, then by the
    network.
    """

    connect_ns: NDArray[np.float64]
    client_ns: NDArray[np.float64]
    network_ns: NDArray[np.float64]


def draw_delays(cause: str, seed: int, request_count: int, rng: np.random.Generator) -> Delays:
    """Draw the delays of a client and a network, which the simulation does not have.

    Usually they are below 1 ms. The causes "client" and "network" delay some requests by 100 to
    500 ms; the network does so while they connect (odd seeds) or afterwards (even seeds).
    """
    network_ns = rng.lognormal(np.log(0.4), 0.3, request_count) * NS_PER_MS
    client_ns = rng.exponential(0.1, request_count) * NS_PER_MS
    connect_ns = np.zeros(request_count)

    if cause == "client":
        client_ns += draw_rare_delays_ns(
            request_count, affected_share=(0.05, 0.15), delay_ms=(100, 400), rng=rng
        )
    elif cause == "network":
        rare_delays_ns = draw_rare_delays_ns(
            request_count, affected_share=(0.03, 0.1), delay_ms=(150, 500), rng=rng
        )
        if seed % 2 == 1:
            connect_ns += rare_delays_ns
        else:
            network_ns += rare_delays_ns

    return Delays(connect_ns, client_ns, network_ns)


def draw_rare_delays_ns(
    request_count: int,
    *,
    affected_share: tuple[float, float],
    delay_ms: tuple[float, float],
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Return delays that are 0 for most requests.

    The share of affected requests, and the delay of each of them, are drawn from these ranges.
    """
    is_affected = rng.random(request_count) < rng.uniform(*affected_share)
    delays_ns = rng.uniform(*delay_ms, request_count) * NS_PER_MS
    return np.where(is_affected, delays_ns, 0)


def delay_records(records: NDArray[np.void], delays: Delays) -> None:
    """Move the timestamps of request records by the delays that occur before them."""
    ready_delay_ns = delays.connect_ns
    send_delay_ns = ready_delay_ns + delays.client_ns
    response_delay_ns = send_delay_ns + delays.network_ns

    delay_timestamps(records, ("ready_ns",), ready_delay_ns)
    delay_timestamps(records, ("sent_ns",), send_delay_ns)
    delay_timestamps(records, RESPONSE_TIME_COLUMNS, response_delay_ns)


def delay_timestamps(
    records: NDArray[np.void], columns: Sequence[str], delay_ns: NDArray[np.float64]
) -> None:
    """Add a delay to the timestamps in these columns. A negative timestamp stands for none."""
    whole_delay_ns = delay_ns.astype(np.int64)
    for column in columns:
        has_timestamp = records[column] >= 0
        records[column] += np.where(has_timestamp, whole_delay_ns, 0)


def collect_metric_samples(replicas: Sequence[DisturbedReplica]) -> list[MetricSample]:
    """Return the samples of all metrics pages, ordered by time and then by replica."""
    all_seconds = {second for replica in replicas for second in replica.page_by_second}
    samples = []
    for second in sorted(all_seconds):
        for replica_number, replica in enumerate(replicas):
            page = replica.page_by_second.get(second)
            if page is not None:
                samples += page.to_samples(second, page_name=f"page {replica_number}")

    return samples


def explain_run(cause: str, seed: int, *, has_server_timing: bool = True) -> Explanation:
    """Simulate a run with this cause, and return the explanation that loadgen gives for it.

    Without `has_server_timing`, the server does not report how long each request was queued,
    prefilled and decoded.
    """
    records, samples = simulate_run(cause, seed)
    if not has_server_timing:
        for phase in ("queue", "prefill", "decode"):
            records[f"server_{phase}_ns"] = NOT_REPORTED_NS
    return explain([Columns(records)], RunManifest(stages=(StagePlan(),)), samples)


class ExplainedRuns(NamedTuple):
    """Runs with the same cause, and what loadgen names as their causes.

    `explanations` has the explanation of each run by the seed of the run. `cpu_s` is what the
    simulation and the explanation of all of them cost.
    """

    true_cause: str
    explanations: dict[int, Explanation]
    cpu_s: float

    def count_first_causes(self) -> Counter[str]:
        """Return how often each cause is named first."""
        return Counter(first_cause(explanation) for explanation in self.explanations.values())

    def count_correct(self) -> int:
        """Return how often the true cause is named first, or no cause in runs without one."""
        return self.count_first_causes()[self.expected_cause]

    @property
    def expected_cause(self) -> str:
        """What `first_cause` should return for these runs."""
        return NOTHING_NAMED if self.true_cause == NO_CAUSE else self.true_cause


def first_cause(explanation: Explanation) -> str:
    """Return the code of the cause that an explanation names first, or "nothing" if it has none."""
    if not explanation.causes:
        return NOTHING_NAMED
    return explanation.causes[0].code


def explain_runs(cause: str, seed_range: range, *, has_server_timing: bool) -> ExplainedRuns:
    """Simulate a run with this cause for each seed, and explain all of them."""
    start_s = time.process_time()
    explanations = {
        seed: explain_run(cause, seed, has_server_timing=has_server_timing) for seed in seed_range
    }
    return ExplainedRuns(cause, explanations, cpu_s=time.process_time() - start_s)


def print_wrong_explanations(runs: ExplainedRuns) -> None:
    """Print a line for each run whose true cause is not named first."""
    for seed, explanation in runs.explanations.items():
        if first_cause(explanation) != runs.expected_cause:
            codes = [cause.code for cause in explanation.causes]
            print(f"    seed {seed}: {codes} {explanation.text}")


def print_first_causes(runs: ExplainedRuns) -> None:
    """Print how often each cause is named first: "queue  20 runs: queue 19, power 1 (9 CPU-s)"."""
    first_causes = runs.count_first_causes().most_common()
    counts_text = ", ".join(f"{code} {count}" for code, count in first_causes)
    run_count = len(runs.explanations)
    print(
        f"{runs.true_cause:<13} {run_count:>3} runs: {counts_text} ({runs.cpu_s:.1f} CPU-s)",
        flush=True,
    )


def main() -> None:
    """Print which causes loadgen names for each true cause, and how often it is right."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="runs of each cause")
    parser.add_argument("--clean", type=int, default=100, help="runs without a cause")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--only", default=",".join((*CAUSES, NO_CAUSE)))
    parser.add_argument("--no-account", action="store_true", help="no timing from the server")
    parser.add_argument(
        "-v", action="store_true", help="print the explanations that do not name the true cause"
    )
    args = rig.parse_arguments(parser, seeds=1, clean=1, only="queue,power,clean")

    run_count = 0
    correct_count = 0
    for cause in args.only.split(","):
        seed_count = args.clean if cause == NO_CAUSE else args.seeds
        seed_range = range(args.seed, args.seed + seed_count)
        runs = explain_runs(cause, seed_range, has_server_timing=not args.no_account)
        if args.v:
            print_wrong_explanations(runs)
        print_first_causes(runs)

        if cause != NO_CAUSE:
            run_count += seed_count
            correct_count += runs.count_correct()

    print(f"right cause first: {correct_count} of {run_count}")


if __name__ == "__main__":
    main()
