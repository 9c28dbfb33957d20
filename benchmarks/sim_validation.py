"""How well does the simulator predict published results?

    python benchmarks/sim_validation.py [--fit] [--parts offline,latency]

SIMULATED, in virtual time, about 15 minutes of CPU. It prints Markdown: what was fitted, what is
predicted and scored, what is only listed and why, how much each prediction depends on each
constant, upper bounds against published rates, the two routings of the rack, and what a simulated
rack costs to compute. The published numbers are those of `loadgen.reference`.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple, get_args

import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.core.results.record import BIN_NS
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import Constant as Evenly
from loadgen.core.workload import FixedTokens, Poisson, Stage, Synthetic, Workload
from loadgen.cost import published as reference
from loadgen.sim.engine.system import SimulatedSystem
from loadgen.sim.presets import preset as presets
from loadgen.sim.presets.preset import Preset, SourcedNumber
from loadgen.sim.request_lengths import RequestSize
from loadgen.sim.simulation import Simulation
from loadgen.sim.virtual_backend import simulate

PARTS = "offline,latency,sensitivity,throughput,rack"
SERVER_S = 600  # MLPerf's minimum duration, which all of these runs kept
# Of the logarithm of output lengths: published latencies have p99 / p50 = 4.0, p50 0.8 of the mean
SIGMA_OUT = 0.62
SIGMA_IN = 0.8  # of input lengths: an assumption
LONGEST = 1024  # of both, by the rules
PRESET_OF_RUN = {
    "Azure GB200": "gb200-vm",
    "NVIDIA GB200": "gb200-vm",
    "NVIDIA B200": "b200x8",
    "Nebius B200": "b200x8",
    "Nebius H200": "h200x8",
    "Cisco H100": "h100x8",
}
FITTED_TPOT = (
    "NVIDIA GB200",
    "Interactive",
)  # the one latency that was fitted on (Blackwell's overhead)


class SmokeSize:
    """What `--smoke` reduces: the fraction of the requests, and the rows of each table."""

    share, rows = 1.0, 100


@dataclass(frozen=True)
class OfflineRun:
    """A published Offline result: submitter, preset, samples per GPU and tokens per sample."""

    submitter: str
    preset: str
    samples_per_gpu: int
    tokens: float
    fitted: bool = False


# Samples: of Azure's GB200 607,200 on 4 GPUs and of GB300 1,032,192 by their logs; else what 40
# minutes hold, MLPerf's shortest Offline run for these submitters. Tokens per sample: by the logs,
# else as the same submitter's Server run.
OFFLINE = (
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
    """What is assumed of the requests, beside a published mean of output tokens."""

    input_tokens: float
    sigma_in: float = SIGMA_IN
    sigma_out: float = SIGMA_OUT


@lru_cache(maxsize=8)  # those of one row; every rate that is tried has its own
def draw_lengths(n: int, mean: float, sigma: float, seed: int) -> array[int]:
    """Draw `n` lognormal lengths that have this mean after they were clipped to 1 to LONGEST."""
    shape = np.random.default_rng(seed).lognormal(0.0, sigma, n)
    low, high = 0.1, 20.0 * mean
    for _ in range(50):
        middle = (low + high) / 2
        if np.clip(np.rint(shape * middle), 1, LONGEST).mean() < mean:
            low = middle
        else:
            high = middle

    return array("q", np.clip(np.rint(shape * high), 1, LONGEST).astype(np.int64).tobytes())


@dataclass(frozen=True)
class SimulatedResult:
    """What one simulated run shows, as LoadGen would report it."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    latency_p50_s: float
    latency_p99_s: float
    least_ttft_ms: float
    tokens_per_s: float  # all tokens until the last one
    middle_tokens_per_s: float  # in the middle half of that time
    sequences: float  # decoding, per iteration
    cpu_s: float


def print_rack_offline(rack: Preset, assumed: AssumedLengths) -> None:
    """Print the Offline rate of the rack with each routing."""
    rates = {}
    for routing in get_args(presets.Routing):
        system = rack.model_copy(update={"routing": routing})
        result = simulate_run(
            system, rack.gpus, Evenly(rate=math.inf), 72 * 12_000, 272.73, assumed
        )
        rates[routing] = round(result.tokens_per_s)

    round_robin_rate, weighted_rate = rates.values()
    rows = [(routing, f"{rate:,}") for routing, rate in rates.items()]
    difference = format_difference(weighted_rate, round_robin_rate)
    rows.append(("weighted over round robin", difference))
    print_table(("Offline, 864,000 samples, one clock", "tok/s"), rows)


def print_rack_server(rack: Preset, assumed: AssumedLengths) -> None:
    """Print latencies of the rack with each routing, at the published Server rate of a peer."""
    peer = next(
        row
        for row in reference.load_systems().rows
        if row.submitter == "CoreWeave" and "GB300" in row.system
    )
    assert peer.server is not None
    tokens = 274.35
    rate = peer.server / tokens

    rows = []
    for routing in get_args(presets.Routing):
        system = rack.model_copy(update={"routing": routing})
        result = simulate_server(system, rack.gpus, rate, tokens, assumed)
        ttft = f"{result.ttft_p50_ms:.0f} / {result.ttft_p99_ms:.0f}"
        tpot = f"{result.tpot_p50_ms:.0f} / {result.tpot_p99_ms:.0f}"
        rows.append((routing, f"{rate:,.0f}", ttft, tpot, f"{result.cpu_s:.1f}"))

    columns = (
        f"Server at the peer's {peer.server:,.0f} tok/s, 600 s",
        "requests/s",
        "TTFT p50 / p99 ms",
        "TPOT p50 / p99 ms",
        "CPU-s, engine and agenda and rows",
    )
    print_table(columns, rows)


def simulate_run(
    system: Preset,
    gpus: int,
    arrival: Evenly | Poisson,
    n: int,
    tokens: float,
    assumed: AssumedLengths,
) -> SimulatedResult:
    """Simulate `n` requests with on average `tokens` output tokens against a system.

    With more GPUs than the system has, there are several copies of it; with fewer, only a part of
    its replicas serves.
    """
    n = math.ceil(n * SmokeSize.share)
    input_lengths = draw_lengths(n, assumed.input_tokens, assumed.sigma_in, 3)
    output_lengths = draw_lengths(n, tokens, assumed.sigma_out, 2)
    copies = gpus // system.gpus if gpus > system.gpus else 1
    speeds = (system.speeds * copies)[: gpus // system.gpus_per_replica]
    started_s = time.process_time()
    result, simulation = simulate(
        build_schedule(create_counted_workload(arrival, n), 1),
        lambda number: RequestSize(input_lengths[number], output_lengths[number]),
        SimulatedSystem(
            costs=system.costs, limits=system.limits, speeds=speeds, routing=system.routing
        ),
    )
    cpu_s = time.process_time() - started_s

    return summarize_records(
        result.records[:],
        middle_tokens_per_s=_middle_tokens_per_s(result.timeline[0]),
        sequences=_mean_sequences(simulation),
        cpu_s=cpu_s,
    )


def create_counted_workload(arrival: Evenly | Poisson, request_count: int) -> Workload:
    """Return a workload that only serves to schedule arrivals; its lengths are not used."""
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
    rows: NDArray[np.void], *, middle_tokens_per_s: float, sequences: float, cpu_s: float
) -> SimulatedResult:
    """Compute the latencies and the rate of a simulated run from its request records."""
    first_token_ns = rows["first_token_ns"].astype(np.float64)
    last_token_ns = rows["last_token_ns"].astype(np.float64)
    due_ns = rows["due_ns"].astype(np.float64)
    output_tokens = rows["output_tokens"].astype(np.float64)
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
        least_ttft_ms=float(ttft_ms.min()),
        tokens_per_s=float(output_tokens.sum() / (last_token_ns.max() / 1e9)),
        middle_tokens_per_s=middle_tokens_per_s,
        sequences=sequences,
        cpu_s=cpu_s,
    )


def _middle_tokens_per_s(events: NDArray[np.int64]) -> float:
    """Return tokens per second in the middle half of a run, from events per bin."""
    middle_half = events[len(events) // 4 : 3 * len(events) // 4]
    return float(middle_half.sum() / (len(middle_half) * BIN_NS / 1e9)) if len(middle_half) else 0.0


def _mean_sequences(simulation: Simulation) -> float:
    """Return the mean number of sequences that decode in an iteration."""
    steps = sum(len(replica.iteration_ends_ns) for replica in simulation.replicas)
    return sum(replica.decoded_tokens for replica in simulation.replicas) / steps


def simulate_server(
    system: Preset,
    gpus: int,
    rate: float,
    tokens: float,
    assumed: AssumedLengths,
    seconds: float = SERVER_S,
) -> SimulatedResult:
    """Simulate a Server or Interactive run."""
    return simulate_run(system, gpus, Poisson(rate=rate), int(rate * seconds), tokens, assumed)


def simulate_offline(system: Preset, samples: int, tokens: float, assumed: AssumedLengths) -> float:
    """Return output tokens per second and GPU of an Offline run, ramp and tail included."""
    gpus = system.gpus_per_replica
    result = simulate_run(system, gpus, Evenly(rate=math.inf), samples * gpus, tokens, assumed)
    return result.tokens_per_s / gpus


def with_constants(system: Preset, **values: float) -> Preset:
    """Return the system with other constants of its hardware or server."""
    hardware = {
        name: SourcedNumber(value=value, source="")
        for name, value in values.items()
        if name in type(system.hardware).model_fields
    }
    server = {
        name: value for name, value in values.items() if name in type(system.server).model_fields
    }
    changed_hardware = system.hardware.model_copy(update=hardware)
    changed_server = system.server.model_copy(update=server)

    return system.model_copy(update={"hardware": changed_hardware, "server": changed_server})


def assumed_lengths(system: Preset) -> AssumedLengths:
    """Return the assumed lengths of a preset."""
    return AssumedLengths(input_tokens=system.assumed_input_tokens.value)


def published_offline(offline_run: OfflineRun) -> tuple[float, int]:
    """Return published tokens per second and GPU, and the number of GPUs."""
    row = next(
        row for row in reference.load_systems().rows if row.submitter == offline_run.submitter
    )
    assert row.offline is not None
    return row.offline / row.gpus, row.gpus


def find_capacity(system: Preset, gpus: int, tokens: float, samples: int = 40_000) -> float:
    """Return the requests per second at which the model's queue grows without end.

    It is the rate that the model reaches with its batch always full.
    """
    replica = system.gpus_per_replica
    full = simulate_run(
        system, replica, Evenly(rate=math.inf), samples * replica, tokens, assumed_lengths(system)
    )
    return full.middle_tokens_per_s / replica * gpus / tokens


def bisect(
    function: Callable[[float], float], wanted: float, low: float, high: float, steps: int
) -> float:
    """Return the argument at which a growing function reaches `wanted`."""
    for _ in range(steps):
        middle = (low + high) / 2
        if function(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print(rig.format_table(head, rows) + "\n", flush=True)


def format_difference(model: float, published: float) -> str:
    """Return the difference of the model from a published value in percent."""
    return f"{(model / published - 1) * 100:+z.1f} %"


# -- the parts --


# A longer iteration also makes batches larger, which lengthens TPOT further. So only about this
# part of a difference in TPOT is corrected in the overhead.
OVERHEAD_PART_OF_TPOT = 0.48


FIT_ROUNDS = 3


def print_fit() -> None:
    """Fit the constants of the model again, and print them beside the stored ones."""
    print("## Fit\n")
    stored_ms = presets.load_preset("gb200-vm").hardware.overhead_ms.value
    print(f"overhead: fitted {fit_overhead_ms():.2f} ms, stored {stored_ms} ms\n")

    rows = []
    for offline_run in OFFLINE:
        if offline_run.fitted:
            system = presets.load_preset(offline_run.preset)
            stored = system.hardware
            fitted_share = fit_compute_share(offline_run, system, stored.overhead_ms.value)
            rows.append(
                (offline_run.preset, f"{fitted_share:.4f}", f"{stored.compute_share.value:.4f}")
            )

    print_table(("preset", "compute share, fitted", "stored"), rows)


def print_offline() -> None:
    """Print published and simulated Offline results."""
    print(
        "## Offline\n\nThe fitted ones only show the fit; the others are the same hardware of "
        "other submitters.\n"
    )
    rows = []
    for offline_run in OFFLINE[: SmokeSize.rows]:
        system = presets.load_preset(offline_run.preset)
        wanted, gpus = published_offline(offline_run)
        tokens_per_s = simulate_offline(
            system, offline_run.samples_per_gpu, offline_run.tokens, assumed_lengths(system)
        )
        role = "fitted on it" if offline_run.fitted else "not fitted"
        rows.append(
            (
                offline_run.submitter,
                offline_run.preset,
                str(gpus),
                f"{wanted:,.0f}",
                f"{tokens_per_s:,.0f}",
                format_difference(tokens_per_s, wanted),
                role,
            )
        )

    print_table(("run", "preset", "GPUs", "published tok/s/GPU", "model", "off by", ""), rows)


def fit_overhead_ms() -> float:
    """Return the overhead of an iteration that gives the published TPOT p50 of GB200 Interactive.

    The compute share depends on the overhead, so both are fitted in turn.
    """
    published = next(
        row for row in reference.load_latencies().rows if (row.run, row.scenario) == FITTED_TPOT
    )
    base = presets.load_preset("gb200-vm")

    overhead_ms = base.hardware.overhead_ms.value
    for _ in range(FIT_ROUNDS):
        compute_share = fit_compute_share(OFFLINE[0], base, overhead_ms)
        system = with_constants(base, overhead_ms=overhead_ms, compute_share=compute_share)
        simulated = simulate_server(
            system,
            published.gpus,
            published.target_qps,
            published.tokens_per_request,
            assumed_lengths(system),
        )
        missing_ms = published.tpot_p50_ms - simulated.tpot_p50_ms
        overhead_ms += missing_ms * OVERHEAD_PART_OF_TPOT

    return overhead_ms


def fit_compute_share(offline_run: OfflineRun, base: Preset, overhead_ms: float) -> float:
    """Return the compute share that gives the published Offline rate, for this overhead.

    The compute share is the fraction of the peak FLOPS that the model reaches. It is searched for
    within 10 % of the stored one.
    """
    published_tokens_per_s, _ = published_offline(offline_run)
    stored_share = base.hardware.compute_share.value

    def simulate_tokens_per_s(compute_share: float) -> float:
        system = with_constants(base, overhead_ms=overhead_ms, compute_share=compute_share)
        return simulate_offline(
            system, offline_run.samples_per_gpu, offline_run.tokens, assumed_lengths(system)
        )

    return bisect(
        simulate_tokens_per_s,
        published_tokens_per_s,
        low=stored_share * 0.9,
        high=stored_share * 1.1,
        steps=10,
    )


class ScoredRow(NamedTuple):
    """A published latency result, the simulated system, and the rate at which it has that TPOT."""

    published: reference.Latency
    system: Preset
    matching_rate: float

    @property
    def name(self) -> str:
        """The run, its scenario and its rate."""
        row = self.published
        return f"{row.run} {row.scenario} {row.target_qps:g}/s"


def find_rate_at_tpot(
    published: reference.Latency,
    system: Preset,
    assumed: AssumedLengths,
    *,
    low: float,
    high: float,
    steps: int,
) -> float:
    """Return the rate between `low` and `high` at which the model has the published TPOT p50."""

    def simulate_tpot_ms(rate: float) -> float:
        return simulate_server(
            system, published.gpus, rate, published.tokens_per_request, assumed
        ).tpot_p50_ms

    return bisect(simulate_tpot_ms, published.tpot_p50_ms, low, high, steps)


def print_latency() -> list[ScoredRow]:
    """Print latencies at published rates, and return the rows for the sensitivity tables."""
    print("## Latency at published rates\n")
    published_rows = [row for row in reference.load_latencies().rows if row.run in PRESET_OF_RUN]
    rows = []
    scores = []

    scored_rows = []
    for published in published_rows[: SmokeSize.rows]:
        system = presets.load_preset(PRESET_OF_RUN[published.run])
        assumed = assumed_lengths(system)
        rate = published.target_qps
        simulated = simulate_server(
            system, published.gpus, rate, published.tokens_per_request, assumed
        )
        capacity = find_capacity(system, published.gpus, published.tokens_per_request)
        load_fraction = rate / capacity
        matching_rate = find_rate_at_tpot(
            published, system, assumed, low=rate * 0.8, high=rate * 1.15, steps=8
        )
        scored_row = ScoredRow(published, system, matching_rate)
        scored_rows.append(scored_row)
        rows.append(_format_latencies(scored_row, simulated, load_fraction))
        scores.append(_score_row(scored_row, simulated, load_fraction))

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
    print_table(columns, rows)
    print_latency_notes()
    print_table(("row", "rate at published TPOT p50", "TPOT p50", "TTFT p50", "verdict"), scores)

    return scored_rows


def _format_latencies(
    scored_row: ScoredRow, simulated: SimulatedResult, load_fraction: float
) -> tuple[str, ...]:
    """Return the cells of a row, with published and simulated latencies."""
    published = scored_row.published
    pairs = (
        (published.ttft_p50_ms, simulated.ttft_p50_ms),
        (published.ttft_p99_ms, simulated.ttft_p99_ms),
        (published.tpot_p50_ms, simulated.tpot_p50_ms),
        (published.tpot_p99_ms, simulated.tpot_p99_ms),
        (published.latency_p50_s, simulated.latency_p50_s),
        (published.latency_p99_s, simulated.latency_p99_s),
    )

    return (
        scored_row.name,
        f"{load_fraction:.0%}",
        *(f"{published_value:g} → {value:.3g}" for published_value, value in pairs),
        f"{simulated.sequences:,.0f}",
    )


def print_latency_notes() -> None:
    """Print the least TTFT of the model beside a published one, and how rows are scored."""
    system = presets.load_preset("gb200-vm")
    short_run = simulate_server(
        system, gpus=4, rate=170, tokens=274.35, assumed=assumed_lengths(system), seconds=60
    )
    print(
        f"A prompt that meets an empty server: least TTFT {short_run.least_ttft_ms:.1f} ms in the "
        f"model, 20.25 ms in the public log of"
    )
    print(
        "Azure's GB200 Server run: overhead and weights, on which nothing but one TPOT was "
        "fitted.\n"
    )
    print(
        "Scored: the rate at which the model shows the published TPOT p50 within 5 % (Server), "
        "TPOT p50 within 10 %"
    )
    print(
        "(Interactive), TTFT p50 within 30 %. Above 95 % of the model's capacity a row is listed, "
        "not scored.\n"
    )


SATURATED_LOAD = 0.95  # of the model's capacity: above it, latencies depend on tiny differences


MAX_TTFT_ERROR, MAX_RATE_ERROR, MAX_TPOT_ERROR = 0.30, 0.05, 0.10  # fractions


def _score_row(
    scored_row: ScoredRow, simulated: SimulatedResult, load_fraction: float
) -> tuple[str, ...]:
    """Return the cells of a scored row: the errors of the model, and whether they are small enough.

    A Server result is scored by the rate, and an Interactive one by the TPOT unless the model was
    fitted on it. Both are scored by the TTFT.
    """
    published = scored_row.published
    rate_error = scored_row.matching_rate / published.target_qps - 1
    tpot_error = simulated.tpot_p50_ms / published.tpot_p50_ms - 1
    ttft_error = simulated.ttft_p50_ms / published.ttft_p50_ms - 1
    cells = (
        scored_row.name,
        f"{scored_row.matching_rate:,.1f}/s ({rate_error:+.1%})",
        f"{tpot_error:+.1%}",
        f"{ttft_error:+.1%}",
    )
    if load_fraction > SATURATED_LOAD:
        return (*cells, "listed, not scored: saturated")

    is_fitted_on_tpot = (published.run, published.scenario) == FITTED_TPOT
    is_within_limit = {"TTFT": abs(ttft_error) <= MAX_TTFT_ERROR}
    if published.scenario == "Server":
        is_within_limit["rate"] = abs(rate_error) <= MAX_RATE_ERROR
    elif not is_fitted_on_tpot:
        is_within_limit["TPOT"] = abs(tpot_error) <= MAX_TPOT_ERROR

    verdict_text = ", ".join(
        f"{metric} {'holds' if is_good else 'MISSES'}"
        for metric, is_good in is_within_limit.items()
    )
    if is_fitted_on_tpot:
        verdict_text += "; TPOT was fitted on"

    return (*cells, verdict_text)


# A function that changes one constant of the system or one assumption about lengths
Change = Callable[[Preset, AssumedLengths], tuple[Preset, AssumedLengths]]


INCREASE = 1.05


CONSTANTS = (
    "compute_share",
    "bandwidth_share",
    "overhead_ms",
    "memory_gib",
    "max_num_tokens",
    "reserve_gib",
)


ASSUMPTIONS = {
    "input tokens": "input_tokens",
    "input spread": "sigma_in",
    "output spread": "sigma_out",
}


def list_changes() -> list[tuple[str, Change]]:
    """Return each constant and each assumption, with a function that makes it 5 % larger."""
    return [
        *((name, partial(increase_constant, name)) for name in CONSTANTS),
        *((label, partial(increase_assumption, field)) for label, field in ASSUMPTIONS.items()),
    ]


def increase_constant(
    name: str, system: Preset, assumed: AssumedLengths
) -> tuple[Preset, AssumedLengths]:
    """Return the system with one constant 5 % larger, and the lengths as they are."""
    if name in type(system.hardware).model_fields:
        value: float = getattr(system.hardware, name).value
    else:
        value = getattr(system.server, name)

    larger_value = value * INCREASE
    if isinstance(value, int):
        larger_value = int(larger_value)

    return with_constants(system, **{name: larger_value}), assumed


def increase_assumption(
    field: str, system: Preset, assumed: AssumedLengths
) -> tuple[Preset, AssumedLengths]:
    """Return the system as it is, and the lengths with one assumption 5 % larger."""
    larger_value = getattr(assumed, field) * INCREASE
    return system, dataclasses.replace(assumed, **{field: larger_value})


P50_LATENCIES = ("ttft_p50_ms", "tpot_p50_ms", "latency_p50_s")


P99_LATENCIES = ("ttft_p99_ms", "tpot_p99_ms", "latency_p99_s")


def print_sensitivity(scored_rows: Sequence[ScoredRow]) -> None:
    """Print how much each prediction changes with each constant."""
    print("## Sensitivity\n")
    print(
        "Change in %, when one constant is 5 % larger (all others as they are, nothing fitted "
        "again). Close to"
    )
    print(
        "saturation latencies change a lot: that is the knife edge. The rate that shows a given "
        "TPOT does not.\n"
    )
    p50_rows = []
    p99_rows = []

    rate_rows = []
    for scored_row in scored_rows:
        effects = measure_sensitivity(scored_row)
        p50_rows.append((scored_row.name, *(effect.p50 for effect in effects)))
        p99_rows.append((scored_row.name, *(effect.p99 for effect in effects)))
        rate_rows.append((scored_row.name, *(effect.matching_rate for effect in effects)))

    names = [name for name, _ in list_changes()]
    print_table(("TTFT / TPOT / latency, p50", *names), p50_rows)
    print_table(("TTFT / TPOT / latency, p99", *names), p99_rows)
    print_table(("rate at published TPOT p50", *names), rate_rows)


def _format_change(new: float, base: float) -> str:
    """Return a change in percent."""
    return f"{(new / base - 1) * 100:+.0f}"


class ChangeEffect(NamedTuple):
    """How a larger constant changes a prediction, in % as text.

    `p50` and `p99` are such as "+3 / +1 / +2": TTFT, TPOT and latency. `matching_rate` is the rate
    at which the model has the published TPOT p50.
    """

    p50: str
    p99: str
    matching_rate: str


def measure_sensitivity(scored_row: ScoredRow) -> list[ChangeEffect]:
    """Return the effect of each change of `list_changes` on a prediction."""
    published, system, matching_rate = scored_row
    assumed = assumed_lengths(system)
    tokens = published.tokens_per_request
    base = simulate_server(system, published.gpus, published.target_qps, tokens, assumed)

    effects = []
    for _, change in list_changes():
        changed_system, changed_lengths = change(system, assumed)
        changed = simulate_server(
            changed_system, published.gpus, published.target_qps, tokens, changed_lengths
        )
        changed_rate = find_rate_at_tpot(
            published,
            changed_system,
            changed_lengths,
            low=matching_rate * 0.9,
            high=matching_rate * 1.1,
            steps=6,
        )

        effects.append(
            ChangeEffect(
                p50=_format_changes(P50_LATENCIES, changed, base),
                p99=_format_changes(P99_LATENCIES, changed, base),
                matching_rate=_format_change(changed_rate, matching_rate),
            )
        )

    return effects


def _format_changes(
    latency_names: Sequence[str], changed: SimulatedResult, base: SimulatedResult
) -> str:
    """Return the changes of some latencies in percent, such as "+3 / +1 / +2"."""
    return " / ".join(
        _format_change(getattr(changed, name), getattr(base, name)) for name in latency_names
    )


def find_peak(
    system: Preset,
    tokens: float,
    scenario: str,
    assumed: AssumedLengths,
    *,
    low: float,
    high: float,
    steps: int,
) -> float:
    """Return the highest rate between `low` and `high` that meets both p99 limits of a scenario.

    The interval is halved `steps` times. If no tried rate meets the limits, the result is `low`.
    """
    limit = find_limits(scenario)

    def meets_limits(rate: float) -> bool:
        result = simulate_server(system, system.gpus, rate, tokens, assumed)
        return result.ttft_p99_ms <= limit.ttft_p99_ms and result.tpot_p99_ms <= limit.tpot_p99_ms

    for _ in range(steps):
        rate = (low + high) / 2
        if meets_limits(rate):
            low = rate
        else:
            high = rate

    return low


def find_limits(scenario: str) -> reference.PublishedLimit:
    """Return the published limits of a scenario."""
    return next(
        r
        for r in reference.load_limits().rows
        if (r.benchmark, r.scenario) == ("llama2-70b", scenario)
    )


PRESET_OF_GPU = {
    "H100": "h100x8",
    "H200": "h200x8",
    "GB300": "gb300-vm",
    "GB200": "gb200-vm",
    "B200": "b200x8",
}  # in this order: the name of a system with a GB200 contains B200 too


def print_throughput() -> None:
    """Print the model's peak rates beside published rates."""
    print("## Server and Interactive throughput\n")
    print(
        "Published rates are what submitters chose to run, so lower bounds; the model's peak is "
        "the highest rate that"
    )
    print(
        "keeps the p99 limits in it, an upper bound of the model. Slack: what published p99s "
        "leave of their limits.\n"
    )
    cases = [
        (preset_name, scenario)
        for preset_name in PRESET_OF_GPU.values()
        for scenario in ("Server", "Interactive")
    ]
    rows = []

    change_rows = []
    for preset_name, scenario in cases[: SmokeSize.rows]:
        peak = simulate_peak(presets.load_preset(preset_name), scenario)
        p99_text = f"{peak.result.ttft_p99_ms:,.0f} / {peak.result.tpot_p99_ms:.0f}"
        rows.append(
            (
                preset_name,
                scenario,
                f"{peak.rate * peak.tokens / peak.system.gpus:,.0f}",
                p99_text,
                "; ".join(list_published_rates(preset_name, scenario)) or "none",
                "; ".join(list_slacks(preset_name, scenario)) or "not published",
            )
        )
        change_rows.append((f"{preset_name} {scenario}", *measure_peak_changes(peak)))

    columns = (
        "system",
        "scenario",
        "model's peak tok/s/GPU",
        "p99 TTFT / TPOT ms there",
        "published tok/s/GPU",
        "slack",
    )
    print_table(columns, rows)
    print("Change of the peak in %, when one constant is 5 % larger:\n")
    print_table(("peak", *(name for name, _ in list_changes())), change_rows)


class SimulatedPeak(NamedTuple):
    """The highest rate at which a system meets the limits of a scenario, and the run at it."""

    system: Preset
    scenario: str
    tokens: float  # output tokens of a request, on average
    rate: float
    result: SimulatedResult


def simulate_peak(system: Preset, scenario: str) -> SimulatedPeak:
    """Find the peak rate of a system in a scenario, and simulate a run at it."""
    tokens = 274.35 if system.generation == "blackwell" else 293.6  # as in published logs
    assumed = assumed_lengths(system)
    highest_rate = find_capacity(system, system.gpus, tokens) * 1.1
    rate = find_peak(system, tokens, scenario, assumed, low=0.0, high=highest_rate, steps=9)
    result = simulate_server(system, system.gpus, rate, tokens, assumed)
    return SimulatedPeak(system, scenario, tokens, rate, result)


def measure_peak_changes(peak: SimulatedPeak) -> list[str]:
    """Return how much the peak rate changes with each change of `list_changes`, in % as text."""
    assumed = assumed_lengths(peak.system)
    changes = []
    for _, change in list_changes():
        changed_system, changed_lengths = change(peak.system, assumed)
        changed_rate = find_peak(
            changed_system,
            peak.tokens,
            peak.scenario,
            changed_lengths,
            low=peak.rate * 0.88,
            high=peak.rate * 1.12,
            steps=6,
        )
        changes.append(_format_change(changed_rate, peak.rate))

    return changes


def find_preset_of_system(system_name: str) -> str:
    """Return the preset that simulates a published system, or "" if there is none."""
    if "B300 1" in system_name:
        return ""
    for gpu_name, preset_name in PRESET_OF_GPU.items():
        if gpu_name in system_name:
            return preset_name
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
    rows_by_run = {
        row.run: row
        for row in reference.load_latencies().rows
        if PRESET_OF_RUN.get(row.run) == preset_name and row.scenario == scenario
    }
    return [
        f"{run}: TTFT {1 - row.ttft_p99_ms / limit.ttft_p99_ms:.0%}, TPOT "
        f"{1 - row.tpot_p99_ms / limit.tpot_p99_ms:.0%}"
        for run, row in rows_by_run.items()
    ]


def print_rack() -> None:
    """Print the simulated rack with both routings, and what its simulation costs."""
    print("## The rack\n")
    rack = presets.load_preset("gb300-rack")
    assumed = assumed_lengths(presets.load_preset("gb300-vm"))
    print_rack_offline(rack, assumed)
    print_rack_server(rack, assumed)
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"Peak memory of this process: {memory_mb:,.0f} MB.\n")


def main() -> None:
    """Print the selected parts."""
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--fit",
        action="store_true",
        help="fit the constants again, and print them beside the stored",
    )
    parser.add_argument("--parts", default=PARTS, help="sensitivity needs latency")
    parser.add_argument(
        "--share", type=float, default=SmokeSize.share, help="of the requests of each run"
    )
    parser.add_argument(
        "--rows", type=int, default=SmokeSize.rows, help="of each table, the first so many"
    )
    args = rig.parse_arguments(parser, fit=True, share=0.002, rows=1)
    SmokeSize.share, SmokeSize.rows, parts = args.share, args.rows, args.parts.split(",")
    print("# SIMULATED: the model against published figures, Llama 2 70B\n")

    if args.fit:
        print_fit()

    if "offline" in parts:
        print_offline()

    if "latency" in parts:
        scored_rows = print_latency()
        if "sensitivity" in parts:
            print_sensitivity(scored_rows)

    if "throughput" in parts:
        print_throughput()

    if "rack" in parts:
        print_rack()


if __name__ == "__main__":
    main()
