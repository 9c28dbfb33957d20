"""How well does the simulator predict published results?

    python benchmarks/sim_validation.py [--fit] [--parts offline,latency]

SIMULATED, in virtual time, about 15 minutes of CPU. It prints Markdown: what was fitted, what is
predicted and scored, what is only listed and why, how much each prediction depends on each
constant, upper bounds against published rates, the two routings of the rack, and what a simulated
rack costs to compute. The published numbers are those of `loadgen.reference`.
"""

from __future__ import annotations

import math
import resource
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

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


def simulate_run(
    system: Preset,
    gpus: int,
    arrival: Evenly | Poisson,
    n: int,
    tokens: float,
    assumed: AssumedLengths,
) -> SimulatedResult:
    """Simulate `n` requests against `gpus` GPUs of a system."""
    n = math.ceil(n * SmokeSize.share)
    one_token = FixedTokens(value=1)  # lengths are given below
    stage = Stage.model_construct(
        name="", arrival=arrival, duration_ns=None, count=n, measured=True, at_least=None
    )
    requests = Synthetic(input_tokens=one_token, output_tokens=one_token)
    workload = Workload.model_construct(
        name="validation", requests=requests, stages=(stage,), schedule_seed=None
    )
    input_lengths = draw_lengths(n, assumed.input_tokens, assumed.sigma_in, 3)
    output_lengths = draw_lengths(n, tokens, assumed.sigma_out, 2)
    copies = gpus // system.gpus if gpus > system.gpus else 1
    speeds = (system.speeds * copies)[: gpus // system.gpus_per_replica]
    started_s = time.process_time()
    result, simulation = simulate(
        build_schedule(workload, 1),
        lambda number: RequestSize(input_lengths[number], output_lengths[number]),
        SimulatedSystem(
            costs=system.costs, limits=system.limits, speeds=speeds, routing=system.routing
        ),
    )
    cpu_s = time.process_time() - started_s
    rows = result.records
    first, last, due_ns, output_tokens = (
        rows[name].astype(np.float64)
        for name in ("first_token_ns", "last_token_ns", "due_ns", "output_tokens")
    )
    ttft = (first - due_ns) / 1e6
    has_many_tokens = output_tokens > 1
    tpot = (last - first)[has_many_tokens] / (output_tokens[has_many_tokens] - 1) / 1e6
    latency = (last - due_ns) / 1e9
    p50, p99 = 0.5, 0.99
    return SimulatedResult(
        ttft_p50_ms=float(np.quantile(ttft, p50)),
        ttft_p99_ms=float(np.quantile(ttft, p99)),
        tpot_p50_ms=float(np.quantile(tpot, p50)),
        tpot_p99_ms=float(np.quantile(tpot, p99)),
        latency_p50_s=float(np.quantile(latency, p50)),
        latency_p99_s=float(np.quantile(latency, p99)),
        least_ttft_ms=float(ttft.min()),
        tokens_per_s=float(output_tokens.sum() / (last.max() / 1e9)),
        middle_tokens_per_s=_middle_tokens_per_s(result.timeline[0]),
        sequences=_mean_sequences(simulation),
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
    return f"{(model / published - 1) * 100:+.1f} %"


# -- the parts --


def print_fit() -> None:
    """Print the constants that a fit gives.

    The overhead is fitted on GB200 Interactive, the compute share on each Offline run.
    """
    print("## Fit\n")
    row = next(
        row for row in reference.load_latencies().rows if (row.run, row.scenario) == FITTED_TPOT
    )
    base = presets.load_preset("gb200-vm")
    overhead = base.hardware.overhead_ms.value
    for _ in range(3):
        system = with_constants(
            base, overhead_ms=overhead, compute_share=_fit_compute_share(OFFLINE[0], base, overhead)
        )
        tpot_p50_ms = simulate_server(
            system, row.gpus, row.target_qps, row.tokens_per_request, assumed_lengths(system)
        ).tpot_p50_ms
        overhead += (
            row.tpot_p50_ms - tpot_p50_ms
        ) * 0.48  # the rest of a change comes back as batch
    rows = []
    for offline_run in OFFLINE:
        if offline_run.fitted:
            hardware = presets.load_preset(offline_run.preset).hardware
            compute_share = _fit_compute_share(
                offline_run, presets.load_preset(offline_run.preset), hardware.overhead_ms.value
            )
            rows.append(
                (offline_run.preset, f"{compute_share:.4f}", f"{hardware.compute_share.value:.4f}")
            )
    print(f"overhead: fitted {overhead:.2f} ms, stored {base.hardware.overhead_ms.value} ms\n")
    print_table(("preset", "compute share, fitted", "stored"), rows)


def _fit_compute_share(offline_run: OfflineRun, base: Preset, overhead: float) -> float:
    """Return the compute share with which the model shows the published Offline rate."""
    wanted, _ = published_offline(offline_run)
    stored_share = base.hardware.compute_share.value

    def shows(share: float) -> float:
        system = with_constants(base, overhead_ms=overhead, compute_share=share)
        return simulate_offline(
            system, offline_run.samples_per_gpu, offline_run.tokens, assumed_lengths(system)
        )

    return bisect(shows, wanted, stored_share * 0.9, stored_share * 1.1, 10)


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


def print_latency() -> list[tuple[reference.Latency, Preset, float]]:
    """Print latencies at published rates, and return the rows for the sensitivity tables."""
    print("## Latency at published rates\n")
    rows, scores, scored_rows = [], [], []
    for row in [row for row in reference.load_latencies().rows if row.run in PRESET_OF_RUN][
        : SmokeSize.rows
    ]:
        system = presets.load_preset(PRESET_OF_RUN[row.run])
        assumed = assumed_lengths(system)
        result = simulate_server(system, row.gpus, row.target_qps, row.tokens_per_request, assumed)
        load_fraction = row.target_qps / find_capacity(system, row.gpus, row.tokens_per_request)

        def tpot(
            rate: float,
            system: Preset = system,
            row: reference.Latency = row,
            assumed: AssumedLengths = assumed,
        ) -> float:
            """Return TPOT p50 in ms at a rate."""
            return simulate_server(
                system, row.gpus, rate, row.tokens_per_request, assumed
            ).tpot_p50_ms

        matching_rate = bisect(
            tpot, row.tpot_p50_ms, row.target_qps * 0.8, row.target_qps * 1.15, 8
        )
        pairs = (
            (row.ttft_p50_ms, result.ttft_p50_ms),
            (row.ttft_p99_ms, result.ttft_p99_ms),
            (row.tpot_p50_ms, result.tpot_p50_ms),
            (row.tpot_p99_ms, result.tpot_p99_ms),
            (row.latency_p50_s, result.latency_p50_s),
            (row.latency_p99_s, result.latency_p99_s),
        )
        name = f"{row.run} {row.scenario} {row.target_qps:g}/s"
        rows.append(
            (
                name,
                f"{load_fraction:.0%}",
                *(f"{published:g} → {simulated:.3g}" for published, simulated in pairs),
                f"{result.sequences:,.0f}",
            )
        )
        scores.append(_score_row(name, row, result, load_fraction, matching_rate))
        scored_rows.append((row, system, matching_rate))
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
    least_ttft_ms = simulate_server(
        presets.load_preset("gb200-vm"),
        4,
        170,
        274.35,
        assumed_lengths(presets.load_preset("gb200-vm")),
        60,
    ).least_ttft_ms
    print(
        f"A prompt that meets an empty server: least TTFT {least_ttft_ms:.1f} ms in the model, "
        f"20.25 ms in the public log of"
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
    print_table(("row", "rate at published TPOT p50", "TPOT p50", "TTFT p50", "verdict"), scores)
    return scored_rows


def _score_row(
    name: str,
    row: reference.Latency,
    result: SimulatedResult,
    load_fraction: float,
    matching_rate: float,
) -> tuple[str, ...]:
    """Return the cells of a scored row, with its verdict."""
    off_rate = matching_rate / row.target_qps - 1
    off_tpot = result.tpot_p50_ms / row.tpot_p50_ms - 1
    off_ttft = result.ttft_p50_ms / row.ttft_p50_ms - 1
    cells = (
        name,
        f"{matching_rate:,.1f}/s ({off_rate:+.1%})",
        f"{off_tpot:+.1%}",
        f"{off_ttft:+.1%}",
    )
    if load_fraction > 0.95:
        return (*cells, "listed, not scored: saturated")
    fitted = (row.run, row.scenario) == FITTED_TPOT
    verdicts = [("TTFT", abs(off_ttft) <= 0.30)]
    if row.scenario == "Server":
        verdicts.append(("rate", abs(off_rate) <= 0.05))
    elif not fitted:
        verdicts.append(("TPOT", abs(off_tpot) <= 0.10))
    verdict_text = ", ".join(
        f"{metric} {'holds' if holds else 'MISSES'}" for metric, holds in verdicts
    )
    return (*cells, verdict_text + ("; TPOT was fitted on" if fitted else ""))


Change = Callable[[Preset, AssumedLengths], tuple[Preset, AssumedLengths]]


def list_changes() -> list[tuple[str, Change]]:
    """Return each constant with a function that makes it 5 % larger."""

    def enlarge(name: str) -> Change:
        """Return a function that makes a hardware constant 5 % larger."""
        return lambda system, assumed: (
            with_constants(system, **{name: getattr(system.hardware, name).value * 1.05}),
            assumed,
        )

    return [
        *(
            (name, enlarge(name))
            for name in ("compute_share", "bandwidth_share", "overhead_ms", "memory_gib")
        ),
        (
            "max_num_tokens",
            lambda system, assumed: (
                with_constants(system, max_num_tokens=int(system.server.max_num_tokens * 1.05)),
                assumed,
            ),
        ),
        (
            "reserve_gib",
            lambda system, assumed: (
                with_constants(system, reserve_gib=system.server.reserve_gib * 1.05),
                assumed,
            ),
        ),
        (
            "input tokens",
            lambda system, assumed: (
                system,
                AssumedLengths(assumed.input_tokens * 1.05, assumed.sigma_in, assumed.sigma_out),
            ),
        ),
        (
            "input spread",
            lambda system, assumed: (
                system,
                AssumedLengths(assumed.input_tokens, assumed.sigma_in * 1.05, assumed.sigma_out),
            ),
        ),
        (
            "output spread",
            lambda system, assumed: (
                system,
                AssumedLengths(assumed.input_tokens, assumed.sigma_in, assumed.sigma_out * 1.05),
            ),
        ),
    ]


def print_sensitivity(scored_rows: Sequence[tuple[reference.Latency, Preset, float]]) -> None:
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
    names = [name for name, _ in list_changes()]
    middle: list[tuple[str, ...]] = []
    tail: list[tuple[str, ...]] = []
    rates: list[tuple[str, ...]] = []
    for row, system, matching_rate in scored_rows:
        assumed = assumed_lengths(system)
        tokens = row.tokens_per_request
        base_result = simulate_server(system, row.gpus, row.target_qps, tokens, assumed)
        cells_of_row: tuple[list[str], list[str], list[str]] = ([], [], [])
        for _, change in list_changes():
            changed, changed_lengths = change(system, assumed)
            changed_result = simulate_server(
                changed, row.gpus, row.target_qps, tokens, changed_lengths
            )
            for cells, quantile in zip(cells_of_row, ("p50", "p99"), strict=False):
                cells.append(
                    " / ".join(
                        _format_change(getattr(changed_result, name), getattr(base_result, name))
                        for name in (
                            f"ttft_{quantile}_ms",
                            f"tpot_{quantile}_ms",
                            f"latency_{quantile}_s",
                        )
                    )
                )

            def tpot(
                rate: float,
                system: Preset = changed,
                row: reference.Latency = row,
                assumed: AssumedLengths = changed_lengths,
                tokens: float = tokens,
            ) -> float:
                """Return TPOT p50 in ms at a rate."""
                return simulate_server(system, row.gpus, rate, tokens, assumed).tpot_p50_ms

            cells_of_row[2].append(
                _format_change(
                    bisect(tpot, row.tpot_p50_ms, matching_rate * 0.9, matching_rate * 1.1, 6),
                    matching_rate,
                )
            )
        for rows, cells in zip((middle, tail, rates), cells_of_row, strict=True):
            rows.append((f"{row.run} {row.scenario} {row.target_qps:g}/s", *cells))
    for title, rows in (
        ("TTFT / TPOT / latency, p50", middle),
        ("TTFT / TPOT / latency, p99", tail),
        ("rate at published TPOT p50", rates),
    ):
        print_table((title, *names), rows)


def _format_change(new: float, base: float) -> str:
    """Return a change in percent."""
    return f"{(new / base - 1) * 100:+.0f}"


def find_peak(
    system: Preset,
    tokens: float,
    scenario: str,
    assumed: AssumedLengths,
    low: float,
    high: float,
    steps: int,
) -> float:
    """Return the highest rate in an interval that meets both p99 limits, or its lower end."""
    limit = find_limits(scenario)

    def violates_limits(rate: float) -> float:
        """Return 1.0 if a limit is violated at this rate."""
        result = simulate_server(system, system.gpus, rate, tokens, assumed)
        return float(
            result.ttft_p99_ms > limit.ttft_p99_ms or result.tpot_p99_ms > limit.tpot_p99_ms
        )

    for _ in range(steps):
        rate = (low + high) / 2
        low, high = (low, rate) if violates_limits(rate) else (rate, high)
    return low


def find_limits(scenario: str) -> reference.PublishedLimit:
    """Return the published limits of a scenario."""
    return next(
        r
        for r in reference.load_limits().rows
        if (r.benchmark, r.scenario) == ("llama2-70b", scenario)
    )


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
    slack = {
        (PRESET_OF_RUN[row.run], row.scenario, row.run): row
        for row in reference.load_latencies().rows
        if row.run in PRESET_OF_RUN
    }
    rows, change_rows = [], []
    of_system = {
        "H100": "h100x8",
        "H200": "h200x8",
        "GB300": "gb300-vm",
        "GB200": "gb200-vm",
        "B200": "b200x8",
    }
    for name, scenario in [
        (name, scenario) for name in of_system.values() for scenario in ("Server", "Interactive")
    ][: SmokeSize.rows]:
        system = presets.load_preset(name)
        tokens = 274.35 if system.generation == "blackwell" else 293.6
        assumed, limit = assumed_lengths(system), find_limits(scenario)
        peak_rate = find_peak(
            system,
            tokens,
            scenario,
            assumed,
            0.0,
            find_capacity(system, system.gpus, tokens) * 1.1,
            9,
        )
        result = simulate_server(system, system.gpus, peak_rate, tokens, assumed)
        cells = []
        for _, change in list_changes():
            changed, changed_lengths = change(system, assumed)
            cells.append(
                _format_change(
                    find_peak(
                        changed,
                        tokens,
                        scenario,
                        changed_lengths,
                        peak_rate * 0.88,
                        peak_rate * 1.12,
                        6,
                    ),
                    peak_rate,
                )
            )
        change_rows.append((f"{name} {scenario}", *cells))
        published = []
        for row in reference.load_systems().rows:
            matching_preset = next(
                (
                    preset_name
                    for gpu_name, preset_name in of_system.items()
                    if gpu_name in row.system and "B300 1" not in row.system
                ),
                "",
            )
            value = row.server if scenario == "Server" else row.interactive
            if matching_preset == name and value is not None:
                published.append(f"{row.submitter} {value / row.gpus:,.0f}")
        slack_texts = [
            f"{run}: TTFT {1 - row.ttft_p99_ms / limit.ttft_p99_ms:.0%}, TPOT "
            f"{1 - row.tpot_p99_ms / limit.tpot_p99_ms:.0%}"
            for (preset_name, matching_preset, run), row in slack.items()
            if (preset_name, matching_preset) == (name, scenario)
        ]
        p99_text = f"{result.ttft_p99_ms:,.0f} / {result.tpot_p99_ms:.0f}"
        published_cells = "; ".join(published) or "none", "; ".join(slack_texts) or "not published"
        rows.append(
            (name, scenario, f"{peak_rate * tokens / system.gpus:,.0f}", p99_text, *published_cells)
        )
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


def print_rack() -> None:
    """Print the simulated rack with both routings."""
    print("## The rack\n")
    vm, rack = presets.load_preset("gb300-vm"), presets.load_preset("gb300-rack")
    assumed, tokens = assumed_lengths(vm), 272.73
    rows: list[tuple[str, ...]] = []
    for routing in get_args(presets.Routing):
        system = rack.model_copy(update={"routing": routing})
        result = simulate_run(
            system, rack.gpus, Evenly(rate=math.inf), 72 * 12_000, tokens, assumed
        )
        rows.append((routing, f"{result.tokens_per_s:,.0f}"))
    first_rate, second_rate = (float(row[1].replace(",", "")) for row in rows)
    rows.append(("weighted over round robin", format_difference(second_rate, first_rate)))
    print_table(("Offline, 864,000 samples, one clock", "tok/s"), rows)
    tokens = 274.35
    rows = []
    peer = next(
        row
        for row in reference.load_systems().rows
        if row.submitter == "CoreWeave" and "GB300" in row.system
    ).server
    assert peer is not None
    for routing in get_args(presets.Routing):
        system = rack.model_copy(update={"routing": routing})
        result = simulate_server(system, rack.gpus, peer / tokens, tokens, assumed)
        ttft = f"{result.ttft_p50_ms:.0f} / {result.ttft_p99_ms:.0f}"
        tpot = f"{result.tpot_p50_ms:.0f} / {result.tpot_p99_ms:.0f}"
        rows.append((routing, f"{peer / tokens:,.0f}", ttft, tpot, f"{result.cpu_s:.1f}"))
    print_table(
        (
            f"Server at the peer's {peer:,.0f} tok/s, 600 s",
            "requests/s",
            "TTFT p50 / p99 ms",
            "TPOT p50 / p99 ms",
            "CPU-s, engine and agenda and rows",
        ),
        rows,
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"Peak memory of this process: {memory:,.0f} MB.\n")


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
