"""How well does the simulator predict published results?

    python benchmarks/sim_validation.py [--fit] [--parts offline,latency]

SIMULATED, in virtual time, about 15 minutes of CPU. It prints Markdown: what was fitted, what is
predicted and scored, what is only listed and why, how much each prediction depends on each
constant, upper bounds against published rates, the two routings of the rack, and what a simulated
rack costs to compute. The published numbers are those of `loadgen.cost.published`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import resource
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, get_args

import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.core.results.record import BIN_NS
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import Constant as ConstantRate
from loadgen.core.workload import FixedTokens, Poisson, Stage, Synthetic, Workload
from loadgen.cost import published as reference
from loadgen.sim.engine.system import SimulatedSystem
from loadgen.sim.presets import preset as presets
from loadgen.sim.presets.preset import Preset, SourcedNumber
from loadgen.sim.request_lengths import RequestSize
from loadgen.sim.simulation import Simulation
from loadgen.sim.virtual_backend import simulate

PARTS = "offline,latency,sensitivity,throughput,rack"
BENCHMARK = "llama2-70b"
SERVER_RUN_S = 600  # MLPerf's minimum duration, which all of these runs kept
ALL_AT_ONCE = ConstantRate(rate=math.inf)  # the arrivals of an Offline run
# Of the logarithm of output lengths: published latencies have p99 / p50 = 4.0, p50 0.8 of the mean
OUTPUT_SIGMA = 0.62
INPUT_SIGMA = 0.8  # of the logarithm of input lengths: an assumption
MAX_TOKENS = 1024  # of a prompt, and of a response, by the rules
INPUT_SEED = 3
OUTPUT_SEED = 2
# The mean output tokens of a request on each generation of GPUs, as in published logs
BLACKWELL_OUTPUT_TOKENS = 274.35
HOPPER_OUTPUT_TOKENS = 293.6
PRESET_OF_RUN = {
    "Azure GB200": "gb200-vm",
    "NVIDIA GB200": "gb200-vm",
    "NVIDIA B200": "b200x8",
    "Nebius B200": "b200x8",
    "Nebius H200": "h200x8",
    "Cisco H100": "h100x8",
}
# The run and scenario of the one latency that was fitted on (the overhead of Blackwell's TPOT)
FITTED_TPOT = ("NVIDIA GB200", "Interactive")


class ValidationSize:
    """How much of the validation is run. The defaults are all of it; `--smoke` reduces them."""

    request_share = 1.0  # of the requests of each run
    max_rows = 100  # of each table


@dataclass(frozen=True)
class OfflineRun:
    """A published Offline result, and the preset that simulates its hardware.

    `fitted` says that the compute share of the preset was fitted on this result.
    """

    submitter: str
    preset_name: str
    samples_per_gpu: int
    mean_output_tokens: float
    fitted: bool = False


# Samples: of Azure's GB200 607,200 on 4 GPUs and of GB300 1,032,192 by their logs; else what 40
# minutes hold, MLPerf's shortest Offline run for these submitters. Tokens per sample: by the logs,
# else as the same submitter's Server run.
OFFLINE_RUNS = (
    OfflineRun("Azure 5.1-0008", "gb200-vm", 151_800, 273.3, True),
    OfflineRun("NVIDIA 5.1-0070", "gb200-vm", 113_000, 276.56),
    OfflineRun("Nebius 5.1-0074", "gb200-vm", 113_000, 274.35),
    OfflineRun("NVIDIA 5.1-0069", "b200x8", 111_000, 274.35, True),
    OfflineRun("GigaComputing 5.1-0046", "b200x8", 111_000, 274.35),
    OfflineRun("Nebius 5.1-0073", "b200x8", 111_000, 274.33),
    OfflineRun("Nebius 5.1-0075", "h200x8", 35_500, 294.40, True),
    OfflineRun("Dell 5.1-0026", "h200x8", 35_500, 294.40),
    OfflineRun("Cisco 5.1-0015", "h100x8", 32_000, 292.87, True),
    OfflineRun("Cisco 5.1-0016", "h100x8", 32_000, 292.87),
    OfflineRun("Azure (Signal65 observed)", "gb300-vm", 258_048, 272.73, True),
)


@dataclass(frozen=True)
class AssumedLengths:
    """The assumed distribution of request lengths around a published mean of output tokens.

    Lengths are log-normal. A sigma is the standard deviation of their logarithm.
    """

    input_tokens: float
    input_sigma: float = INPUT_SIGMA
    output_sigma: float = OUTPUT_SIGMA


class Interval(NamedTuple):
    """An interval that contains the number that a bisection looks for."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The middle of the interval."""
        return (self.low + self.high) / 2


def bisect(is_too_low: Callable[[float], bool], interval: Interval, steps: int) -> Interval:
    """Halve an interval so many times, and return the one that contains the sought number.

    `is_too_low` says whether a number is below the sought one.
    """
    for _ in range(steps):
        if is_too_low(interval.middle):
            interval = Interval(interval.middle, interval.high)
        else:
            interval = Interval(interval.low, interval.middle)
    return interval


# The cache keeps the lengths of one table row, all of whose simulations have the same requests.
@lru_cache(maxsize=8)
def draw_lengths(count: int, mean_tokens: float, sigma: float, seed: int) -> array[int]:
    """Draw log-normal lengths that have this mean after they were limited to 1 to MAX_TOKENS.

    The limits change the mean, so the scale that gives the requested mean is searched for.
    """
    unscaled_lengths = np.random.default_rng(seed).lognormal(0.0, sigma, count)

    def is_too_low(scale: float) -> bool:
        return bool(limit_lengths(unscaled_lengths * scale).mean() < mean_tokens)

    scale = bisect(is_too_low, Interval(0.1, 20.0 * mean_tokens), steps=50).high
    return array("q", limit_lengths(unscaled_lengths * scale).astype(np.int64).tobytes())


def limit_lengths(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return lengths rounded to whole tokens and limited to 1 to MAX_TOKENS."""
    return np.clip(np.rint(lengths), 1, MAX_TOKENS)


@dataclass(frozen=True)
class SimulatedResult:
    """The metrics of one simulated run, as LoadGen would report them."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    latency_p50_s: float
    latency_p99_s: float
    min_ttft_ms: float
    tokens_per_s: float  # all tokens, until the last one
    middle_tokens_per_s: float  # in the middle half of the run
    sequences_per_iteration: float  # that decode, on average
    cpu_s: float  # of the simulation itself


@dataclass(frozen=True)
class SimulationSetup:
    """A simulated system and the lengths of its requests.

    If there are more GPUs than the preset has, there are several copies of it; with fewer, only a
    part of its replicas serves.
    """

    preset: Preset
    gpu_count: int
    mean_output_tokens: float
    lengths: AssumedLengths

    def simulate_server(
        self, rate_per_s: float, duration_s: float = SERVER_RUN_S
    ) -> SimulatedResult:
        """Simulate a Server or Interactive run, which has Poisson arrivals at this rate."""
        return self.simulate(Poisson(rate=rate_per_s), int(rate_per_s * duration_s))

    def simulate_offline(self, sample_count: int) -> SimulatedResult:
        """Simulate an Offline run, in which all samples arrive at the start."""
        return self.simulate(ALL_AT_ONCE, sample_count)

    def simulate(self, arrival: ConstantRate | Poisson, request_count: int) -> SimulatedResult:
        """Simulate a run in virtual time and return its metrics."""
        request_count = math.ceil(request_count * ValidationSize.request_share)
        input_tokens = draw_lengths(
            request_count, self.lengths.input_tokens, self.lengths.input_sigma, INPUT_SEED
        )
        output_tokens = draw_lengths(
            request_count, self.mean_output_tokens, self.lengths.output_sigma, OUTPUT_SEED
        )

        cpu_start_s = time.process_time()
        result, simulation = simulate(
            build_schedule(create_arrivals_workload(arrival, request_count), 1),
            lambda number: RequestSize(input_tokens[number], output_tokens[number]),
            self._create_system(),
        )
        cpu_s = time.process_time() - cpu_start_s

        return summarize_records(
            result.records[:],
            middle_tokens_per_s=_middle_tokens_per_s(result.timeline[0]),
            sequences_per_iteration=_mean_sequences_per_iteration(simulation),
            cpu_s=cpu_s,
        )

    def _create_system(self) -> SimulatedSystem:
        """Return the system with as many replicas as fit on its GPUs.

        With more GPUs than the preset has, the replicas of the preset are repeated.
        """
        copies = max(self.gpu_count // self.preset.gpus, 1)
        replica_count = self.gpu_count // self.preset.gpus_per_replica
        replica_speeds = (self.preset.speeds * copies)[:replica_count]
        return SimulatedSystem(
            costs=self.preset.costs,
            limits=self.preset.limits,
            speeds=replica_speeds,
            routing=self.preset.routing,
        )

    def simulate_one_replica(self, samples_per_gpu: int) -> SimulatedResult:
        """Simulate an Offline run on one replica of the system."""
        gpu_count = self.preset.gpus_per_replica
        one_replica = dataclasses.replace(self, gpu_count=gpu_count)
        return one_replica.simulate_offline(samples_per_gpu * gpu_count)

    def find_capacity_per_s(self, samples_per_gpu: int = 40_000) -> float:
        """Return the rate of requests above which the queue of the model grows without end.

        It is the rate that the model reaches while its batch is always full.
        """
        result = self.simulate_one_replica(samples_per_gpu)
        tokens_per_s_per_gpu = result.middle_tokens_per_s / self.preset.gpus_per_replica
        return tokens_per_s_per_gpu * self.gpu_count / self.mean_output_tokens

    def find_rate_at_tpot(self, tpot_p50_ms: float, rates: Interval, steps: int) -> float:
        """Return the rate within an interval at which the model has this TPOT p50.

        TPOT grows with the rate, so the rate can be found by bisection.
        """

        def is_too_low(rate_per_s: float) -> bool:
            return self.simulate_server(rate_per_s).tpot_p50_ms < tpot_p50_ms

        return bisect(is_too_low, rates, steps).middle


def create_setup(preset: Preset, gpu_count: int, mean_output_tokens: float) -> SimulationSetup:
    """Return the setup of a preset with the input lengths that were assumed for it."""
    lengths = AssumedLengths(input_tokens=preset.assumed_input_tokens.value)
    return SimulationSetup(preset, gpu_count, mean_output_tokens, lengths)


def create_arrivals_workload(arrival: ConstantRate | Poisson, request_count: int) -> Workload:
    """Return a workload with these arrivals, from which a schedule can be built.

    Its requests have one token each, because the simulation is given the real lengths directly. The
    stage is not validated, because a workload file cannot have an infinite rate.
    """
    one_token = FixedTokens(value=1)
    stage = Stage.model_construct(
        name="",
        arrival=arrival,
        duration_ns=None,
        count=request_count,
        measured=True,
        at_least=None,
    )
    requests = Synthetic(input_tokens=one_token, output_tokens=one_token)

    return Workload.model_construct(
        name="validation", requests=requests, stages=(stage,), schedule_seed=None
    )


def summarize_records(
    records: NDArray[np.void],
    *,
    middle_tokens_per_s: float,
    sequences_per_iteration: float,
    cpu_s: float,
) -> SimulatedResult:
    """Compute the latencies and the rate of a simulated run from its request records."""
    due_ns = records["due_ns"].astype(np.float64)
    first_token_ns = records["first_token_ns"].astype(np.float64)
    last_token_ns = records["last_token_ns"].astype(np.float64)
    output_tokens = records["output_tokens"].astype(np.float64)

    ttft_ms = (first_token_ns - due_ns) / 1e6
    latency_s = (last_token_ns - due_ns) / 1e9
    has_tpot = output_tokens > 1  # TPOT is the mean gap between tokens
    decode_ns = (last_token_ns - first_token_ns)[has_tpot]
    tpot_ms = decode_ns / (output_tokens[has_tpot] - 1) / 1e6

    return SimulatedResult(
        ttft_p50_ms=float(np.quantile(ttft_ms, 0.5)),
        ttft_p99_ms=float(np.quantile(ttft_ms, 0.99)),
        tpot_p50_ms=float(np.quantile(tpot_ms, 0.5)),
        tpot_p99_ms=float(np.quantile(tpot_ms, 0.99)),
        latency_p50_s=float(np.quantile(latency_s, 0.5)),
        latency_p99_s=float(np.quantile(latency_s, 0.99)),
        min_ttft_ms=float(ttft_ms.min()),
        tokens_per_s=float(output_tokens.sum() / (last_token_ns.max() / 1e9)),
        middle_tokens_per_s=middle_tokens_per_s,
        sequences_per_iteration=sequences_per_iteration,
        cpu_s=cpu_s,
    )


def _middle_tokens_per_s(tokens_per_bin: NDArray[np.int64]) -> float:
    """Return tokens per second in the middle half of a run, when the batch is full.

    `tokens_per_bin` has the tokens of each interval of BIN_NS. The result of a run that is too
    short for a middle half is 0.
    """
    bin_count = len(tokens_per_bin)
    middle_half = tokens_per_bin[bin_count // 4 : 3 * bin_count // 4]
    if len(middle_half) == 0:
        return 0.0
    middle_half_s = len(middle_half) * BIN_NS / 1e9
    return float(middle_half.sum() / middle_half_s)


def _mean_sequences_per_iteration(simulation: Simulation) -> float:
    """Return the mean number of sequences that decode in an iteration, over all replicas."""
    replicas = simulation.replicas
    iterations = sum(len(replica.iteration_ends_ns) for replica in replicas)
    decoded_tokens = sum(replica.decoded_tokens for replica in replicas)
    return decoded_tokens / iterations


def with_constants(preset: Preset, **values: float) -> Preset:
    """Return a preset with other values of constants of its hardware or its server.

    A call such as `with_constants(preset, overhead_ms=12.0)` names the constants as the preset file
    does.
    """
    hardware_fields = type(preset.hardware).model_fields
    server_fields = type(preset.server).model_fields
    hardware_values = {
        name: SourcedNumber(value=value, source="")
        for name, value in values.items()
        if name in hardware_fields
    }
    server_values = {name: value for name, value in values.items() if name in server_fields}

    hardware = preset.hardware.model_copy(update=hardware_values)
    server = preset.server.model_copy(update=server_values)
    return preset.model_copy(update={"hardware": hardware, "server": server})


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table and an empty line."""
    print(rig.format_table(columns, rows) + "\n", flush=True)


def format_difference(simulated: float, published: float) -> str:
    """Return by how many percent a simulated value is above or below a published one."""
    return f"{(simulated / published - 1) * 100:+z.1f} %"


# -- Offline --


class OfflineComparison(NamedTuple):
    """Published and simulated tokens per second per GPU of an Offline run."""

    offline_run: OfflineRun
    gpu_count: int
    published: float
    simulated: float

    def format_row(self) -> tuple[str, ...]:
        """Return the row of the table."""
        return (
            self.offline_run.submitter,
            self.offline_run.preset_name,
            str(self.gpu_count),
            f"{self.published:,.0f}",
            f"{self.simulated:,.0f}",
            format_difference(self.simulated, self.published),
            "fitted on it" if self.offline_run.fitted else "not fitted",
        )


def find_published_system(offline_run: OfflineRun) -> reference.System:
    """Return the published system of an Offline run, by its submitter."""
    return next(
        system
        for system in reference.load_systems().rows
        if system.submitter == offline_run.submitter
    )


def published_tokens_per_s_per_gpu(offline_run: OfflineRun) -> float:
    """Return the published rate of an Offline run, in tokens per second per GPU."""
    system = find_published_system(offline_run)
    assert system.offline is not None
    return system.offline / system.gpus


def simulate_tokens_per_s_per_gpu(offline_run: OfflineRun, preset: Preset) -> float:
    """Return the simulated rate of an Offline run, in tokens per second per GPU.

    Replicas do not influence each other, so one of them is enough. Start and end of the run count.
    """
    setup = create_setup(preset, preset.gpus_per_replica, offline_run.mean_output_tokens)
    result = setup.simulate_one_replica(offline_run.samples_per_gpu)
    return result.tokens_per_s / preset.gpus_per_replica


def compare_offline(offline_run: OfflineRun) -> OfflineComparison:
    """Simulate a published Offline run."""
    preset = presets.load_preset(offline_run.preset_name)
    return OfflineComparison(
        offline_run=offline_run,
        gpu_count=find_published_system(offline_run).gpus,
        published=published_tokens_per_s_per_gpu(offline_run),
        simulated=simulate_tokens_per_s_per_gpu(offline_run, preset),
    )


def print_offline() -> None:
    """Print published and simulated Offline results."""
    print(
        "## Offline\n\nThe rows that were fitted on only show the fit. The others are predictions "
        "for the same hardware of other submitters.\n"
    )
    offline_runs = OFFLINE_RUNS[: ValidationSize.max_rows]
    rows = [compare_offline(offline_run).format_row() for offline_run in offline_runs]
    columns = ("run", "preset", "GPUs", "published tok/s/GPU", "model", "off by", "")
    print_table(columns, rows)


# -- the fit of the constants --


FIT_ROUNDS = 3
# A longer iteration also makes batches larger, which lengthens TPOT further. So only about this
# part of a difference in TPOT is corrected in the overhead.
OVERHEAD_PART_OF_TPOT = 0.48


def fit_overhead_ms() -> float:
    """Return the overhead of an iteration that gives the published TPOT p50 of GB200 Interactive.

    The compute share depends on the overhead, so both are fitted in turn.
    """
    published = next(
        row for row in reference.load_latencies().rows if (row.run, row.scenario) == FITTED_TPOT
    )
    base_preset = presets.load_preset("gb200-vm")
    offline_run = next(run for run in OFFLINE_RUNS if run.fitted and run.preset_name == "gb200-vm")

    overhead_ms = base_preset.hardware.overhead_ms.value
    for _ in range(FIT_ROUNDS):
        compute_share = fit_compute_share(offline_run, base_preset, overhead_ms)
        preset = with_constants(base_preset, overhead_ms=overhead_ms, compute_share=compute_share)
        setup = create_setup(preset, published.gpus, published.tokens_per_request)
        simulated = setup.simulate_server(published.target_qps)
        missing_ms = published.tpot_p50_ms - simulated.tpot_p50_ms
        overhead_ms += missing_ms * OVERHEAD_PART_OF_TPOT

    return overhead_ms


def fit_compute_share(offline_run: OfflineRun, base_preset: Preset, overhead_ms: float) -> float:
    """Return the compute share that gives the published Offline rate, for this overhead.

    The compute share is the fraction of the peak FLOPS that the model reaches. It is searched for
    within 10 % of the stored one.
    """
    published = published_tokens_per_s_per_gpu(offline_run)
    stored_share = base_preset.hardware.compute_share.value

    def is_too_low(compute_share: float) -> bool:
        preset = with_constants(base_preset, overhead_ms=overhead_ms, compute_share=compute_share)
        return simulate_tokens_per_s_per_gpu(offline_run, preset) < published

    shares = Interval(stored_share * 0.9, stored_share * 1.1)
    return bisect(is_too_low, shares, steps=10).middle


def print_fit() -> None:
    """Fit the constants of the model again, and print them beside the stored ones."""
    print("## Fit\n")
    stored_ms = presets.load_preset("gb200-vm").hardware.overhead_ms.value
    print(f"overhead: fitted {fit_overhead_ms():.2f} ms, stored {stored_ms} ms\n")

    rows = []
    fitted_runs = [offline_run for offline_run in OFFLINE_RUNS if offline_run.fitted]
    for offline_run in fitted_runs:
        preset = presets.load_preset(offline_run.preset_name)
        stored_overhead_ms = preset.hardware.overhead_ms.value
        fitted_share = fit_compute_share(offline_run, preset, stored_overhead_ms)
        stored_share = preset.hardware.compute_share.value
        rows.append((offline_run.preset_name, f"{fitted_share:.4f}", f"{stored_share:.4f}"))

    print_table(("preset", "compute share, fitted", "stored"), rows)


# -- latency at published rates --


class LatencyComparison(NamedTuple):
    """A published latency result, and the simulation of the same load.

    `load_fraction` is the load as a fraction of the model's capacity. `matching_rate_per_s` is the
    rate at which the model has the published TPOT p50.
    """

    published: reference.Latency
    setup: SimulationSetup
    simulated: SimulatedResult
    load_fraction: float
    matching_rate_per_s: float

    @property
    def name(self) -> str:
        """The run, its scenario and its rate."""
        return f"{self.published.run} {self.published.scenario} {self.published.target_qps:g}/s"

    def format_latencies(self) -> tuple[str, ...]:
        """Return the row of the table of latencies: "published → simulated" in each cell."""
        published = self.published
        simulated = self.simulated
        pairs = (
            (published.ttft_p50_ms, simulated.ttft_p50_ms),
            (published.ttft_p99_ms, simulated.ttft_p99_ms),
            (published.tpot_p50_ms, simulated.tpot_p50_ms),
            (published.tpot_p99_ms, simulated.tpot_p99_ms),
            (published.latency_p50_s, simulated.latency_p50_s),
            (published.latency_p99_s, simulated.latency_p99_s),
        )
        latency_cells = [
            f"{published_value:g} → {simulated_value:.3g}"
            for published_value, simulated_value in pairs
        ]
        sequences_cell = f"{simulated.sequences_per_iteration:,.0f}"
        return (self.name, f"{self.load_fraction:.0%}", *latency_cells, sequences_cell)


def compare_latencies(published: reference.Latency) -> LatencyComparison:
    """Simulate the load of a published latency result."""
    preset = presets.load_preset(PRESET_OF_RUN[published.run])
    setup = create_setup(preset, published.gpus, published.tokens_per_request)
    rate_per_s = published.target_qps
    nearby_rates = Interval(rate_per_s * 0.8, rate_per_s * 1.15)
    return LatencyComparison(
        published=published,
        setup=setup,
        simulated=setup.simulate_server(rate_per_s),
        load_fraction=rate_per_s / setup.find_capacity_per_s(),
        matching_rate_per_s=setup.find_rate_at_tpot(published.tpot_p50_ms, nearby_rates, steps=8),
    )


SATURATED_LOAD = 0.95  # of the model's capacity: above it, latencies depend on tiny differences
MAX_TTFT_ERROR = 0.30
MAX_RATE_ERROR = 0.05
MAX_TPOT_ERROR = 0.10


class LatencyErrors(NamedTuple):
    """The relative errors of the model: of the rate at the published TPOT p50, and of latencies."""

    rate: float
    tpot_p50: float
    ttft_p50: float


def compute_errors(comparison: LatencyComparison) -> LatencyErrors:
    """Return the relative errors of a simulation: 0.1 means that the model is 10 % too high."""
    published = comparison.published
    return LatencyErrors(
        rate=comparison.matching_rate_per_s / published.target_qps - 1,
        tpot_p50=comparison.simulated.tpot_p50_ms / published.tpot_p50_ms - 1,
        ttft_p50=comparison.simulated.ttft_p50_ms / published.ttft_p50_ms - 1,
    )


def describe_verdict(comparison: LatencyComparison) -> str:
    """Return which errors of the model are within their limits: "TTFT holds, rate MISSES".

    TTFT is scored for both scenarios. A Server result is also scored by the rate, and an
    Interactive one by TPOT, unless the model was fitted on it. Saturated results are not scored.
    """
    if comparison.load_fraction > SATURATED_LOAD:
        return "listed, not scored: saturated"

    published = comparison.published
    errors = compute_errors(comparison)
    is_within_limit = {"TTFT": abs(errors.ttft_p50) <= MAX_TTFT_ERROR}
    is_fitted_on_tpot = (published.run, published.scenario) == FITTED_TPOT
    if published.scenario == "Server":
        is_within_limit["rate"] = abs(errors.rate) <= MAX_RATE_ERROR
    elif not is_fitted_on_tpot:
        is_within_limit["TPOT"] = abs(errors.tpot_p50) <= MAX_TPOT_ERROR

    verdicts = [
        f"{metric} {'holds' if is_good else 'MISSES'}"
        for metric, is_good in is_within_limit.items()
    ]
    text = ", ".join(verdicts)
    if is_fitted_on_tpot:
        text += "; TPOT was fitted on"
    return text


def format_score(comparison: LatencyComparison) -> tuple[str, ...]:
    """Return the row of the table of scores: the errors of the model, and the verdict on them."""
    errors = compute_errors(comparison)
    return (
        comparison.name,
        f"{comparison.matching_rate_per_s:,.1f}/s ({errors.rate:+.1%})",
        f"{errors.tpot_p50:+.1%}",
        f"{errors.ttft_p50:+.1%}",
        describe_verdict(comparison),
    )


def print_latency() -> list[LatencyComparison]:
    """Print latencies at published rates; return the comparisons for the sensitivity tables."""
    published_rows = [row for row in reference.load_latencies().rows if row.run in PRESET_OF_RUN]
    comparisons = [compare_latencies(row) for row in published_rows[: ValidationSize.max_rows]]

    print("## Latency at published rates\n")
    columns = (
        "published → model",
        "load / model's capacity",
        "TTFT p50 ms",
        "p99",
        "TPOT p50 ms",
        "p99",
        "latency p50 s",
        "p99",
        "sequences",
    )
    print_table(columns, [comparison.format_latencies() for comparison in comparisons])
    print_min_ttft()

    print(
        "A prediction holds if the rate at which the model has the published TPOT p50 is within "
        "5 % (Server), TPOT p50\nis within 10 % (Interactive), and TTFT p50 is within 30 % (both). "
        "Rows above 95 % of the model's capacity are not scored.\n"
    )
    score_columns = ("row", "rate at published TPOT p50", "TPOT p50", "TTFT p50", "verdict")
    print_table(score_columns, [format_score(comparison) for comparison in comparisons])

    return comparisons


def print_min_ttft() -> None:
    """Print the lowest TTFT of the model beside the one in a public log.

    Only the first prompts of a run arrive at an idle server, so a run of one minute is enough.
    """
    preset = presets.load_preset("gb200-vm")
    setup = create_setup(preset, gpu_count=4, mean_output_tokens=BLACKWELL_OUTPUT_TOKENS)
    simulated = setup.simulate_server(rate_per_s=170, duration_s=60)
    print(
        f"A prompt that arrives at an idle server has the lowest TTFT: {simulated.min_ttft_ms:.1f} "
        "ms in the model, 20.25 ms in the\npublic log of Azure's GB200 Server run. It consists of "
        "the overhead and of reading the weights, for which\nonly one TPOT was used for fitting.\n"
    )


# -- sensitivity --


INCREASE = 1.05  # by which a parameter is increased
PRESET_CONSTANTS = (
    "compute_share",
    "bandwidth_share",
    "overhead_ms",
    "memory_gib",
    "max_num_tokens",
    "reserve_gib",
)
LENGTH_FIELDS = {
    "input tokens": "input_tokens",
    "input spread": "input_sigma",
    "output spread": "output_sigma",
}
PARAMETERS = (*PRESET_CONSTANTS, *LENGTH_FIELDS)


def with_larger_parameter(setup: SimulationSetup, parameter: str) -> SimulationSetup:
    """Return the setup with one parameter 5 % larger and all others as they are.

    A parameter is a constant of the preset or an assumption about the lengths of requests.
    """
    if parameter in LENGTH_FIELDS:
        field = LENGTH_FIELDS[parameter]
        larger_value = getattr(setup.lengths, field) * INCREASE
        lengths = dataclasses.replace(setup.lengths, **{field: larger_value})
        return dataclasses.replace(setup, lengths=lengths)

    larger_value = get_constant(setup.preset, parameter) * INCREASE
    if parameter == "max_num_tokens":
        larger_value = int(larger_value)
    preset = with_constants(setup.preset, **{parameter: larger_value})
    return dataclasses.replace(setup, preset=preset)


def get_constant(preset: Preset, name: str) -> float:
    """Return the value of a constant of the hardware or the server of a preset."""
    if name in type(preset.hardware).model_fields:
        value: float = getattr(preset.hardware, name).value
    else:
        value = getattr(preset.server, name)
    return value


P50_LATENCIES = ("ttft_p50_ms", "tpot_p50_ms", "latency_p50_s")
P99_LATENCIES = ("ttft_p99_ms", "tpot_p99_ms", "latency_p99_s")


class ParameterEffect(NamedTuple):
    """How a 5 % larger parameter changes a prediction, in % as text.

    `p50` and `p99` are such as "+3 / +1 / +2": TTFT, TPOT and latency. `matching_rate` is the
    change of the rate at which the model has the published TPOT p50.
    """

    p50: str
    p99: str
    matching_rate: str


def measure_parameter_effect(comparison: LatencyComparison, parameter: str) -> ParameterEffect:
    """Return the effect of a 5 % larger parameter on the latencies and the matching rate."""
    published = comparison.published
    base_rate_per_s = comparison.matching_rate_per_s
    changed_setup = with_larger_parameter(comparison.setup, parameter)
    changed = changed_setup.simulate_server(published.target_qps)
    changed_rate_per_s = changed_setup.find_rate_at_tpot(
        published.tpot_p50_ms, Interval(base_rate_per_s * 0.9, base_rate_per_s * 1.1), steps=6
    )
    return ParameterEffect(
        p50=_format_changes(P50_LATENCIES, changed, comparison.simulated),
        p99=_format_changes(P99_LATENCIES, changed, comparison.simulated),
        matching_rate=_format_change(changed_rate_per_s, base_rate_per_s),
    )


def _format_changes(
    latency_names: Sequence[str], changed: SimulatedResult, base: SimulatedResult
) -> str:
    """Return the changes of some latencies in percent, such as "+3 / +1 / +2"."""
    changes = [
        _format_change(getattr(changed, name), getattr(base, name)) for name in latency_names
    ]
    return " / ".join(changes)


def _format_change(changed: float, base: float) -> str:
    """Return a change in percent, with its sign and without decimals, such as "+3"."""
    return f"{(changed / base - 1) * 100:+.0f}"


def print_sensitivity(comparisons: Sequence[LatencyComparison]) -> None:
    """Print how much each prediction changes with each parameter, in three tables."""
    print("## Sensitivity\n")
    print(
        "Change in % if one constant is 5 % larger, all others are as they are, and nothing is "
        "fitted again. Close to\nsaturation, latencies change a lot. The rate at which the model "
        "has a given TPOT does not.\n"
    )
    p50_rows = []
    p99_rows = []
    rate_rows = []
    for comparison in comparisons:
        effects = [measure_parameter_effect(comparison, parameter) for parameter in PARAMETERS]
        p50_rows.append((comparison.name, *(effect.p50 for effect in effects)))
        p99_rows.append((comparison.name, *(effect.p99 for effect in effects)))
        rate_rows.append((comparison.name, *(effect.matching_rate for effect in effects)))

    print_table(("TTFT / TPOT / latency, p50", *PARAMETERS), p50_rows)
    print_table(("TTFT / TPOT / latency, p99", *PARAMETERS), p99_rows)
    print_table(("rate at published TPOT p50", *PARAMETERS), rate_rows)


# -- Server and Interactive throughput --


SCENARIOS = ("Server", "Interactive")
PRESET_OF_GPU = {
    "H100": "h100x8",
    "H200": "h200x8",
    "GB300": "gb300-vm",
    "GB200": "gb200-vm",
    "B200": "b200x8",
}


def find_limits(scenario: str) -> reference.PublishedLimit:
    """Return the published limits of a scenario, which are those of p99 TTFT and p99 TPOT."""
    return next(
        limit
        for limit in reference.load_limits().rows
        if limit.benchmark == BENCHMARK and limit.scenario == scenario
    )


def find_peak_rate(setup: SimulationSetup, scenario: str, rates: Interval, steps: int) -> float:
    """Return the highest rate within an interval that meets both p99 limits of a scenario.

    The interval is halved `steps` times. If no tried rate meets the limits, the result is the lower
    end of the interval.
    """
    limits = find_limits(scenario)

    def meets_limits(rate_per_s: float) -> bool:
        result = setup.simulate_server(rate_per_s)
        meets_ttft = result.ttft_p99_ms <= limits.ttft_p99_ms
        meets_tpot = result.tpot_p99_ms <= limits.tpot_p99_ms
        return meets_ttft and meets_tpot

    return bisect(meets_limits, rates, steps).low


class SimulatedPeak(NamedTuple):
    """The highest rate at which a system meets the limits of a scenario, and the run at it."""

    setup: SimulationSetup
    scenario: str
    rate_per_s: float
    result: SimulatedResult

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """The peak in output tokens per second per GPU."""
        return self.rate_per_s * self.setup.mean_output_tokens / self.setup.gpu_count


def simulate_peak(preset: Preset, scenario: str) -> SimulatedPeak:
    """Find the peak rate of a system in a scenario, and simulate a run at it."""
    is_blackwell = preset.generation == "blackwell"
    mean_output_tokens = BLACKWELL_OUTPUT_TOKENS if is_blackwell else HOPPER_OUTPUT_TOKENS
    setup = create_setup(preset, preset.gpus, mean_output_tokens)

    rates = Interval(0.0, setup.find_capacity_per_s() * 1.1)
    rate_per_s = find_peak_rate(setup, scenario, rates, steps=9)
    return SimulatedPeak(setup, scenario, rate_per_s, setup.simulate_server(rate_per_s))


def measure_peak_change(peak: SimulatedPeak, parameter: str) -> str:
    """Return by how many percent the peak rate changes with a 5 % larger parameter, as text."""
    changed_setup = with_larger_parameter(peak.setup, parameter)
    nearby_rates = Interval(peak.rate_per_s * 0.88, peak.rate_per_s * 1.12)
    changed_rate_per_s = find_peak_rate(changed_setup, peak.scenario, nearby_rates, steps=6)
    return _format_change(changed_rate_per_s, peak.rate_per_s)


def find_preset_of_system(system_name: str) -> str:
    """Return the preset that simulates a published system, or "" if there is none.

    The name of a system, such as "GB200 NVL72 1200W", has the name of its GPU as a word.
    """
    for word in system_name.split():
        if word in PRESET_OF_GPU:
            return PRESET_OF_GPU[word]
    return ""


def list_published_rates(preset_name: str, scenario: str) -> list[str]:
    """Return the submitters with a result on this hardware and their tokens/s per GPU, as text."""
    rates = []
    for row in reference.load_systems().rows:
        tokens_per_s = row.server if scenario == "Server" else row.interactive
        if tokens_per_s is not None and find_preset_of_system(row.system) == preset_name:
            rates.append(f"{row.submitter} {tokens_per_s / row.gpus:,.0f}")
    return rates


def list_slacks(preset_name: str, scenario: str) -> list[str]:
    """Return for each published run on this hardware how far its p99s are below their limits.

    A run that is listed several times counts once, with its last row.
    """
    limit = find_limits(scenario)
    row_by_run = {
        row.run: row
        for row in reference.load_latencies().rows
        if PRESET_OF_RUN.get(row.run) == preset_name and row.scenario == scenario
    }

    slacks = []
    for run, row in row_by_run.items():
        ttft_slack = 1 - row.ttft_p99_ms / limit.ttft_p99_ms
        tpot_slack = 1 - row.tpot_p99_ms / limit.tpot_p99_ms
        slacks.append(f"{run}: TTFT {ttft_slack:.0%}, TPOT {tpot_slack:.0%}")
    return slacks


def format_peak(preset_name: str, peak: SimulatedPeak) -> tuple[str, ...]:
    """Return the row of the table of peaks, with the published rates and slacks beside them."""
    published_rates = list_published_rates(preset_name, peak.scenario)
    slacks = list_slacks(preset_name, peak.scenario)
    return (
        preset_name,
        peak.scenario,
        f"{peak.tokens_per_s_per_gpu:,.0f}",
        f"{peak.result.ttft_p99_ms:,.0f} / {peak.result.tpot_p99_ms:.0f}",
        "; ".join(published_rates) or "none",
        "; ".join(slacks) or "not published",
    )


def print_throughput() -> None:
    """Print the model's peak rates beside published rates, and how parameters change the peaks."""
    print("## Server and Interactive throughput\n")
    print(
        "Submitters choose their rates, so published rates are lower bounds. The model's peak is "
        "the highest rate at which\nit meets the p99 limits, which is an upper bound of the model. "
        "Slack: how far published p99s are below their limits.\n"
    )
    cases = [
        (preset_name, scenario) for preset_name in PRESET_OF_GPU.values() for scenario in SCENARIOS
    ]
    peak_rows = []
    change_rows = []
    for preset_name, scenario in cases[: ValidationSize.max_rows]:
        peak = simulate_peak(presets.load_preset(preset_name), scenario)
        changes = [measure_peak_change(peak, parameter) for parameter in PARAMETERS]
        peak_rows.append(format_peak(preset_name, peak))
        change_rows.append((f"{preset_name} {scenario}", *changes))

    columns = (
        "system",
        "scenario",
        "model's peak tok/s/GPU",
        "p99 TTFT / TPOT ms there",
        "published tok/s/GPU",
        "slack",
    )
    print_table(columns, peak_rows)
    print("Change of the peak in % if one constant is 5 % larger:\n")
    print_table(("peak", *PARAMETERS), change_rows)


# -- the rack --


RACK_SAMPLES_PER_GPU = 12_000
# The mean output tokens of the published Offline run on the same hardware
RACK_OFFLINE_OUTPUT_TOKENS = 272.73


def create_rack_setup(routing: presets.Routing, mean_output_tokens: float) -> SimulationSetup:
    """Return the setup of the rack with a routing. Its prompts are as long as those of its VMs."""
    rack = presets.load_preset("gb300-rack")
    preset = rack.model_copy(update={"routing": routing})
    vm = presets.load_preset("gb300-vm")
    lengths = AssumedLengths(input_tokens=vm.assumed_input_tokens.value)
    return SimulationSetup(preset, rack.gpus, mean_output_tokens, lengths)


def print_rack_offline() -> None:
    """Print the Offline rate of the rack with each routing, and the difference.

    The rate counts until the last token of the slowest replica, so it depends on how the requests
    are distributed over the replicas.
    """
    rate_by_routing: dict[str, int] = {}
    for routing in get_args(presets.Routing):
        setup = create_rack_setup(routing, RACK_OFFLINE_OUTPUT_TOKENS)
        result = setup.simulate_offline(RACK_SAMPLES_PER_GPU * setup.gpu_count)
        rate_by_routing[routing] = round(result.tokens_per_s)

    difference = format_difference(rate_by_routing["weighted"], rate_by_routing["round_robin"])
    rows = [(routing, f"{rate:,}") for routing, rate in rate_by_routing.items()]
    rows.append(("weighted over round robin", difference))
    print_table(("Offline, 864,000 samples, one clock", "tok/s"), rows)


def find_published_rack_rate() -> float:
    """Return the published Server rate of the nearest real rack, in tokens per second."""
    rack = next(
        row
        for row in reference.load_systems().rows
        if row.submitter == "CoreWeave" and "GB300" in row.system
    )
    assert rack.server is not None
    return rack.server


def print_rack_server() -> None:
    """Print latencies of the simulated rack with each routing.

    The rate is the published Server rate of the peer, which is the nearest real rack.
    """
    peer_tokens_per_s = find_published_rack_rate()
    rate_per_s = peer_tokens_per_s / BLACKWELL_OUTPUT_TOKENS

    rows = []
    for routing in get_args(presets.Routing):
        setup = create_rack_setup(routing, BLACKWELL_OUTPUT_TOKENS)
        result = setup.simulate_server(rate_per_s)
        ttft_text = f"{result.ttft_p50_ms:.0f} / {result.ttft_p99_ms:.0f}"
        tpot_text = f"{result.tpot_p50_ms:.0f} / {result.tpot_p99_ms:.0f}"
        rows.append((routing, f"{rate_per_s:,.0f}", ttft_text, tpot_text, f"{result.cpu_s:.1f}"))

    columns = (
        f"Server at the peer's {peer_tokens_per_s:,.0f} tok/s, 600 s",
        "requests/s",
        "TTFT p50 / p99 ms",
        "TPOT p50 / p99 ms",
        "CPU-s, engine, dispatcher and rows",
    )
    print_table(columns, rows)


def print_rack() -> None:
    """Print the simulated rack with both routings, and what its simulation costs."""
    print("## The rack\n")
    print_rack_offline()
    print_rack_server()
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"Peak memory of this process: {memory_mb:,.0f} MB.\n")


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--fit",
        action="store_true",
        help="fit the constants again, and print them beside the stored",
    )
    parser.add_argument("--parts", default=PARTS, help="sensitivity needs latency")
    parser.add_argument(
        "--share", type=float, default=1.0, help="the fraction of requests that is run"
    )
    parser.add_argument(
        "--rows", type=int, default=100, help="how many rows of each table are computed"
    )
    return rig.parse_arguments(parser, fit=True, share=0.002, rows=1)


def main() -> None:
    """Print the selected parts."""
    args = parse_command_line()
    ValidationSize.request_share = args.share
    ValidationSize.max_rows = args.rows
    parts = args.parts.split(",")
    print("# SIMULATED: the model against published figures, Llama 2 70B\n")

    if args.fit:
        print_fit()
    if "offline" in parts:
        print_offline()
    if "latency" in parts:
        comparisons = print_latency()
        if "sensitivity" in parts:
            print_sensitivity(comparisons)
    if "throughput" in parts:
        print_throughput()
    if "rack" in parts:
        print_rack()


if __name__ == "__main__":
    main()
