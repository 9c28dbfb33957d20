"""The simulator held against what is published.

    python benchmarks/sim_validation.py [--fit] [--parts offline,latency]

Virtual time, some 15 minutes of CPU. Prints Markdown: what was fitted, what is predicted and scored, what is only
listed and why, how much each prediction depends on each constant, upper bounds against published rates, the two
routings of the rack, and what a simulated rack costs to compute. Published figures are those of `loadgen.reference`.
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
SIGMA_OUT = 0.62  # of the logarithm of output lengths: published latencies have p99 / p50 = 4.0, p50 0.8 of the mean
SIGMA_IN = 0.8  # of input lengths: an assumption
LONGEST = 1024  # of both, by the rules
OF_RUN = {
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


class Size:
    """What --smoke makes small: the share of the requests of each run, and the rows of each table."""

    share, rows = 1.0, 100


@dataclass(frozen=True)
class OfflineRun:
    """A published Offline result: whose, on what, how many samples a GPU did, of how many tokens."""

    submitter: str
    preset: str
    samples_per_gpu: int
    tokens: float
    fitted: bool = False


# Samples: of Azure's GB200 607,200 on 4 GPUs and of GB300 1,032,192 by their logs; else what 40 minutes hold, MLPerf's
# shortest Offline run for these submitters. Tokens per sample: by the logs, else as the same submitter's Server run.
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
class Assumed:
    """What is assumed of the requests, beside a published mean of output tokens."""

    input_tokens: float
    sigma_in: float = SIGMA_IN
    sigma_out: float = SIGMA_OUT


@lru_cache(maxsize=8)  # those of one row; every rate that is tried has its own
def lengths(n: int, mean: float, sigma: float, seed: int) -> array[int]:
    """N lengths from 1 to LONGEST, lognormal before they are cut, of this mean."""
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
class Found:
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


def run(
    system: Preset, gpus: int, arrival: Evenly | Poisson, n: int, tokens: float, assumed: Assumed
) -> Found:
    """`n` requests against `gpus` GPUs of a system."""
    n = math.ceil(n * Size.share)
    shown = FixedTokens(value=1)  # lengths are given below
    stage = Stage.model_construct(
        name="", arrival=arrival, duration_ns=None, count=n, measured=True, at_least=None
    )
    requests = Synthetic(input_tokens=shown, output_tokens=shown)
    workload = Workload.model_construct(
        name="validation", requests=requests, stages=(stage,), schedule_seed=None
    )
    into = lengths(n, assumed.input_tokens, assumed.sigma_in, 3)
    out = lengths(n, tokens, assumed.sigma_out, 2)
    repeat = gpus // system.gpus if gpus > system.gpus else 1
    speeds = (system.speeds * repeat)[: gpus // system.gpus_per_replica]
    began = time.process_time()
    made, simulation = simulate(
        build_schedule(workload, 1),
        lambda number: RequestSize(into[number], out[number]),
        SimulatedSystem(
            costs=system.costs, limits=system.limits, speeds=speeds, routing=system.routing
        ),
    )
    used = time.process_time() - began
    rows = made.records
    first, last, due, got = (
        rows[name].astype(np.float64)
        for name in ("first_token_ns", "last_token_ns", "due_ns", "output_tokens")
    )
    ttft = (first - due) / 1e6
    many = got > 1
    tpot = (last - first)[many] / (got[many] - 1) / 1e6
    latency = (last - due) / 1e9
    p50, p99 = 0.5, 0.99
    return Found(
        ttft_p50_ms=float(np.quantile(ttft, p50)),
        ttft_p99_ms=float(np.quantile(ttft, p99)),
        tpot_p50_ms=float(np.quantile(tpot, p50)),
        tpot_p99_ms=float(np.quantile(tpot, p99)),
        latency_p50_s=float(np.quantile(latency, p50)),
        latency_p99_s=float(np.quantile(latency, p99)),
        least_ttft_ms=float(ttft.min()),
        tokens_per_s=float(got.sum() / (last.max() / 1e9)),
        middle_tokens_per_s=_middle(made.timeline[0]),
        sequences=_sequences(simulation),
        cpu_s=used,
    )


def _middle(events: NDArray[np.int64]) -> float:
    """Tokens per second in the middle half of a run, of events per bin."""
    part = events[len(events) // 4 : 3 * len(events) // 4]
    return float(part.sum() / (len(part) * BIN_NS / 1e9)) if len(part) else 0.0


def _sequences(simulation: Simulation) -> float:
    steps = sum(len(replica.ends) for replica in simulation.replicas)
    return sum(replica.decoded for replica in simulation.replicas) / steps


def serve(
    system: Preset,
    gpus: int,
    rate: float,
    tokens: float,
    assumed: Assumed,
    seconds: float = SERVER_S,
) -> Found:
    """A Server or Interactive run."""
    return run(system, gpus, Poisson(rate=rate), int(rate * seconds), tokens, assumed)


def offline(system: Preset, samples: int, tokens: float, assumed: Assumed) -> float:
    """Output tokens per second and GPU of an Offline run, ramp and tail included."""
    gpus = system.gpus_per_replica
    found = run(system, gpus, Evenly(rate=math.inf), samples * gpus, tokens, assumed)
    return found.tokens_per_s / gpus


def with_constants(system: Preset, **values: float) -> Preset:
    """The system with other constants of its hardware or server."""
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


def assumed_of(system: Preset) -> Assumed:
    return Assumed(input_tokens=system.assumed_input_tokens.value)


def published_offline(one: OfflineRun) -> tuple[float, int]:
    """Tokens per second and GPU, and how many GPUs."""
    row = next(row for row in reference.mlperf().rows if row.submitter == one.submitter)
    assert row.offline is not None
    return row.offline / row.gpus, row.gpus


def capacity(system: Preset, gpus: int, tokens: float, samples: int = 40_000) -> float:
    """Requests per second at which the model's queue grows without end: what it does with its batch always full."""
    replica = system.gpus_per_replica
    full = run(
        system, replica, Evenly(rate=math.inf), samples * replica, tokens, assumed_of(system)
    )
    return full.middle_tokens_per_s / replica * gpus / tokens


def bisect(
    shows: Callable[[float], float], wanted: float, low: float, high: float, steps: int
) -> float:
    """The argument at which a growing function shows `wanted`."""
    for _ in range(steps):
        middle = (low + high) / 2
        if shows(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(rig.format_table(head, rows) + "\n", flush=True)


def percent(model: float, published: float) -> str:
    return f"{(model / published - 1) * 100:+.1f} %"


# -- the parts ---------------------------------------------------------------------------------------------------


def fit() -> None:
    """The constants as a fit gives them: overhead on GB200 Interactive, compute share on each Offline run."""
    print("## Fit\n")
    row = next(row for row in reference.latency().rows if (row.run, row.scenario) == FITTED_TPOT)
    base = presets.load_preset("gb200-vm")
    overhead = base.hardware.overhead_ms.value
    for _ in range(3):
        system = with_constants(
            base, overhead_ms=overhead, compute_share=_share(OFFLINE[0], base, overhead)
        )
        shown = serve(
            system, row.gpus, row.target_qps, row.tokens_per_request, assumed_of(system)
        ).tpot_p50_ms
        overhead += (row.tpot_p50_ms - shown) * 0.48  # the rest of a change comes back as batch
    rows = []
    for one in OFFLINE:
        if one.fitted:
            stored = presets.load_preset(one.preset).hardware
            share = _share(one, presets.load_preset(one.preset), stored.overhead_ms.value)
            rows.append((one.preset, f"{share:.4f}", f"{stored.compute_share.value:.4f}"))
    print(f"overhead: fitted {overhead:.2f} ms, stored {base.hardware.overhead_ms.value} ms\n")
    table(("preset", "compute share, fitted", "stored"), rows)


def _share(one: OfflineRun, base: Preset, overhead: float) -> float:
    wanted, _ = published_offline(one)
    low = base.hardware.compute_share.value

    def shows(share: float) -> float:
        system = with_constants(base, overhead_ms=overhead, compute_share=share)
        return offline(system, one.samples_per_gpu, one.tokens, assumed_of(system))

    return bisect(shows, wanted, low * 0.9, low * 1.1, 10)


def offline_table() -> None:
    print(
        "## Offline\n\nThe fitted ones only show the fit; the others are the same hardware of other submitters.\n"
    )
    rows = []
    for one in OFFLINE[: Size.rows]:
        system = presets.load_preset(one.preset)
        wanted, gpus = published_offline(one)
        found = offline(system, one.samples_per_gpu, one.tokens, assumed_of(system))
        use = "fitted on it" if one.fitted else "not fitted"
        rows.append(
            (
                one.submitter,
                one.preset,
                str(gpus),
                f"{wanted:,.0f}",
                f"{found:,.0f}",
                percent(found, wanted),
                use,
            )
        )
    table(("run", "preset", "GPUs", "published tok/s/GPU", "model", "off by", ""), rows)


def latency_table() -> list[tuple[reference.Latency, Preset, float]]:
    print("## Latency at published rates\n")
    rows, scores, kept = [], [], []
    for row in [row for row in reference.latency().rows if row.run in OF_RUN][: Size.rows]:
        system = presets.load_preset(OF_RUN[row.run])
        assumed = assumed_of(system)
        found = serve(system, row.gpus, row.target_qps, row.tokens_per_request, assumed)
        load = row.target_qps / capacity(system, row.gpus, row.tokens_per_request)

        def tpot(
            rate: float, s: Preset = system, r: reference.Latency = row, a: Assumed = assumed
        ) -> float:
            return serve(s, r.gpus, rate, r.tokens_per_request, a).tpot_p50_ms

        at = bisect(tpot, row.tpot_p50_ms, row.target_qps * 0.8, row.target_qps * 1.15, 8)
        pairs = (
            (row.ttft_p50_ms, found.ttft_p50_ms),
            (row.ttft_p99_ms, found.ttft_p99_ms),
            (row.tpot_p50_ms, found.tpot_p50_ms),
            (row.tpot_p99_ms, found.tpot_p99_ms),
            (row.latency_p50_s, found.latency_p50_s),
            (row.latency_p99_s, found.latency_p99_s),
        )
        name = f"{row.run} {row.scenario} {row.target_qps:g}/s"
        rows.append(
            (
                name,
                f"{load:.0%}",
                *(f"{p:g} → {m:.3g}" for p, m in pairs),
                f"{found.sequences:,.0f}",
            )
        )
        scores.append(_score(name, row, found, load, at))
        kept.append((row, system, at))
    head = (
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
    table(head, rows)
    least = serve(
        presets.load_preset("gb200-vm"),
        4,
        170,
        274.35,
        assumed_of(presets.load_preset("gb200-vm")),
        60,
    ).least_ttft_ms
    print(
        f"A prompt that meets an empty server: least TTFT {least:.1f} ms in the model, 20.25 ms in the public log of"
    )
    print(
        "Azure's GB200 Server run: overhead and weights, on which nothing but one TPOT was fitted.\n"
    )
    print(
        "Scored: the rate at which the model shows the published TPOT p50 within 5 % (Server), TPOT p50 within 10 %"
    )
    print(
        "(Interactive), TTFT p50 within 30 %. Above 95 % of the model's capacity a row is listed, not scored.\n"
    )
    table(("row", "rate at published TPOT p50", "TPOT p50", "TTFT p50", "verdict"), scores)
    return kept


def _score(
    name: str, row: reference.Latency, found: Found, load: float, at: float
) -> tuple[str, ...]:
    off_rate = at / row.target_qps - 1
    off_tpot = found.tpot_p50_ms / row.tpot_p50_ms - 1
    off_ttft = found.ttft_p50_ms / row.ttft_p50_ms - 1
    cells = (name, f"{at:,.1f}/s ({off_rate:+.1%})", f"{off_tpot:+.1%}", f"{off_ttft:+.1%}")
    if load > 0.95:
        return (*cells, "listed, not scored: saturated")
    fitted = (row.run, row.scenario) == FITTED_TPOT
    verdicts = [("TTFT", abs(off_ttft) <= 0.30)]
    if row.scenario == "Server":
        verdicts.append(("rate", abs(off_rate) <= 0.05))
    elif not fitted:
        verdicts.append(("TPOT", abs(off_tpot) <= 0.10))
    said = ", ".join(f"{what} {'holds' if good else 'MISSES'}" for what, good in verdicts)
    return (*cells, said + ("; TPOT was fitted on" if fitted else ""))


Change = Callable[[Preset, Assumed], tuple[Preset, Assumed]]


def changes() -> list[tuple[str, Change]]:
    """Each constant 5 % larger, all others as they are."""

    def larger(name: str) -> Change:
        return lambda s, a: (with_constants(s, **{name: getattr(s.hardware, name).value * 1.05}), a)

    return [
        *(
            (name, larger(name))
            for name in ("compute_share", "bandwidth_share", "overhead_ms", "memory_gib")
        ),
        (
            "max_num_tokens",
            lambda s, a: (with_constants(s, max_num_tokens=int(s.server.max_num_tokens * 1.05)), a),
        ),
        (
            "reserve_gib",
            lambda s, a: (with_constants(s, reserve_gib=s.server.reserve_gib * 1.05), a),
        ),
        ("input tokens", lambda s, a: (s, Assumed(a.input_tokens * 1.05, a.sigma_in, a.sigma_out))),
        ("input spread", lambda s, a: (s, Assumed(a.input_tokens, a.sigma_in * 1.05, a.sigma_out))),
        (
            "output spread",
            lambda s, a: (s, Assumed(a.input_tokens, a.sigma_in, a.sigma_out * 1.05)),
        ),
    ]


def sensitivity_tables(kept: Sequence[tuple[reference.Latency, Preset, float]]) -> None:
    print("## Sensitivity\n")
    print(
        "Change in %, when one constant is 5 % larger (all others as they are, nothing fitted again). Close to"
    )
    print(
        "saturation latencies change a lot: that is the knife edge. The rate that shows a given TPOT does not.\n"
    )
    names = [name for name, _ in changes()]
    middle: list[tuple[str, ...]] = []
    tail: list[tuple[str, ...]] = []
    rates: list[tuple[str, ...]] = []
    for row, system, at in kept:
        assumed = assumed_of(system)
        tokens = row.tokens_per_request
        base = serve(system, row.gpus, row.target_qps, tokens, assumed)
        of_row: tuple[list[str], list[str], list[str]] = ([], [], [])
        for _, change in changes():
            changed, asked = change(system, assumed)
            new = serve(changed, row.gpus, row.target_qps, tokens, asked)
            for cells, quantile in zip(of_row, ("p50", "p99"), strict=False):
                cells.append(
                    " / ".join(
                        _moved(getattr(new, name), getattr(base, name))
                        for name in (
                            f"ttft_{quantile}_ms",
                            f"tpot_{quantile}_ms",
                            f"latency_{quantile}_s",
                        )
                    )
                )

            def tpot(
                rate: float,
                s: Preset = changed,
                r: reference.Latency = row,
                a: Assumed = asked,
                t: float = tokens,
            ) -> float:
                return serve(s, r.gpus, rate, t, a).tpot_p50_ms

            of_row[2].append(_moved(bisect(tpot, row.tpot_p50_ms, at * 0.9, at * 1.1, 6), at))
        for rows, cells in zip((middle, tail, rates), of_row, strict=True):
            rows.append((f"{row.run} {row.scenario} {row.target_qps:g}/s", *cells))
    for title, rows in (
        ("TTFT / TPOT / latency, p50", middle),
        ("TTFT / TPOT / latency, p99", tail),
        ("rate at published TPOT p50", rates),
    ):
        table((title, *names), rows)


def _moved(new: float, base: float) -> str:
    return f"{(new / base - 1) * 100:+.0f}"


def peak(
    system: Preset,
    tokens: float,
    scenario: str,
    assumed: Assumed,
    low: float,
    high: float,
    steps: int,
) -> float:
    """The highest rate between these that keeps both p99 limits; the lower one where none does."""
    limit = limits_of(scenario)

    def misses(rate: float) -> float:
        found = serve(system, system.gpus, rate, tokens, assumed)
        return float(found.ttft_p99_ms > limit.ttft_p99_ms or found.tpot_p99_ms > limit.tpot_p99_ms)

    for _ in range(steps):
        rate = (low + high) / 2
        low, high = (low, rate) if misses(rate) else (rate, high)
    return low


def limits_of(scenario: str) -> reference.PublishedLimit:
    return next(
        r for r in reference.limits().rows if (r.benchmark, r.scenario) == ("llama2-70b", scenario)
    )


def throughput_table() -> None:
    print("## Server and Interactive throughput\n")
    print(
        "Published rates are what submitters chose to run, so lower bounds; the model's peak is the highest rate that"
    )
    print(
        "keeps the p99 limits in it, an upper bound of the model. Slack: what published p99s leave of their limits.\n"
    )
    slack = {
        (OF_RUN[r.run], r.scenario, r.run): r for r in reference.latency().rows if r.run in OF_RUN
    }
    rows, moved = [], []
    of_system = {
        "H100": "h100x8",
        "H200": "h200x8",
        "GB300": "gb300-vm",
        "GB200": "gb200-vm",
        "B200": "b200x8",
    }
    for name, scenario in [(n, s) for n in of_system.values() for s in ("Server", "Interactive")][
        : Size.rows
    ]:
        system = presets.load_preset(name)
        tokens = 274.35 if system.generation == "blackwell" else 293.6
        assumed, limit = assumed_of(system), limits_of(scenario)
        most = peak(
            system, tokens, scenario, assumed, 0.0, capacity(system, system.gpus, tokens) * 1.1, 9
        )
        found = serve(system, system.gpus, most, tokens, assumed)
        cells = []
        for _, change in changes():
            changed, asked = change(system, assumed)
            cells.append(
                _moved(peak(changed, tokens, scenario, asked, most * 0.88, most * 1.12, 6), most)
            )
        moved.append((f"{name} {scenario}", *cells))
        published = []
        for row in reference.mlperf().rows:
            kind = next(
                (
                    of
                    for part, of in of_system.items()
                    if part in row.system and "B300 1" not in row.system
                ),
                "",
            )
            value = row.server if scenario == "Server" else row.interactive
            if kind == name and value is not None:
                published.append(f"{row.submitter} {value / row.gpus:,.0f}")
        left = [
            f"{run}: TTFT {1 - r.ttft_p99_ms / limit.ttft_p99_ms:.0%}, TPOT {1 - r.tpot_p99_ms / limit.tpot_p99_ms:.0%}"
            for (of, kind, run), r in slack.items()
            if (of, kind) == (name, scenario)
        ]
        at = f"{found.ttft_p99_ms:,.0f} / {found.tpot_p99_ms:.0f}"
        shown = "; ".join(published) or "none", "; ".join(left) or "not published"
        rows.append((name, scenario, f"{most * tokens / system.gpus:,.0f}", at, *shown))
    head = (
        "system",
        "scenario",
        "model's peak tok/s/GPU",
        "p99 TTFT / TPOT ms there",
        "published tok/s/GPU",
        "slack",
    )
    table(head, rows)
    print("Change of the peak in %, when one constant is 5 % larger:\n")
    table(("peak", *(name for name, _ in changes())), moved)


def rack_tables() -> None:
    print("## The rack\n")
    vm, rack = presets.load_preset("gb300-vm"), presets.load_preset("gb300-rack")
    assumed, tokens = assumed_of(vm), 272.73
    rows: list[tuple[str, ...]] = []
    for routing in get_args(presets.Routing):
        system = rack.model_copy(update={"routing": routing})
        found = run(system, rack.gpus, Evenly(rate=math.inf), 72 * 12_000, tokens, assumed)
        rows.append((routing, f"{found.tokens_per_s:,.0f}"))
    first, second = (float(row[1].replace(",", "")) for row in rows)
    rows.append(("weighted over round robin", percent(second, first)))
    table(("Offline, 864,000 samples, one clock", "tok/s"), rows)
    tokens = 274.35
    rows = []
    peer = next(
        r for r in reference.mlperf().rows if r.submitter == "CoreWeave" and "GB300" in r.system
    ).server
    assert peer is not None
    for routing in get_args(presets.Routing):
        system = rack.model_copy(update={"routing": routing})
        found = serve(system, rack.gpus, peer / tokens, tokens, assumed)
        ttft = f"{found.ttft_p50_ms:.0f} / {found.ttft_p99_ms:.0f}"
        tpot = f"{found.tpot_p50_ms:.0f} / {found.tpot_p99_ms:.0f}"
        rows.append((routing, f"{peer / tokens:,.0f}", ttft, tpot, f"{found.cpu_s:.1f}"))
    table(
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
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--fit",
        action="store_true",
        help="fit the constants again, and print them beside the stored",
    )
    parser.add_argument("--parts", default=PARTS, help="sensitivity needs latency")
    parser.add_argument(
        "--share", type=float, default=Size.share, help="of the requests of each run"
    )
    parser.add_argument(
        "--rows", type=int, default=Size.rows, help="of each table, the first so many"
    )
    args = rig.parse_arguments(parser, fit=True, share=0.002, rows=1)
    Size.share, Size.rows, parts = args.share, args.rows, args.parts.split(",")
    print("# SIMULATED: the model against published figures, Llama 2 70B\n")
    if args.fit:
        fit()
    if "offline" in parts:
        offline_table()
    if "latency" in parts:
        kept = latency_table()
        if "sensitivity" in parts:
            sensitivity_tables(kept)
    if "throughput" in parts:
        throughput_table()
    if "rack" in parts:
        rack_tables()


if __name__ == "__main__":
    main()
