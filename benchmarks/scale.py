"""What do many workers, many streams and many records cost?

    python benchmarks/scale.py workers   two workers against one: events/s and CPU-seconds per event
    python benchmarks/scale.py streams   20,000 streams at once, opened 1,000/s, then held open
    python benchmarks/scale.py soak --streams 2000 --seconds 600      does anything grow?
    python benchmarks/scale.py cost      CPU per event with 10,000 streams against 256
    python benchmarks/scale.py million   cores for a million streamed tokens a second
    python benchmarks/scale.py wide      64 workers, 100 targets: every part is sent, at what cost
    python benchmarks/scale.py merge     10 million records: exact quantiles, time and memory
    python benchmarks/scale.py report    whole commands over them: report, compare, bundle, export
    python benchmarks/scale.py ray       two workers on a Ray cluster against two local ones
    python benchmarks/scale.py rolling   send delay of a load whose bodies are built while it runs

The runs are full runs as a user has them: worker processes, recorder, files. CPU is what the
workers measure of themselves since the start time (`client.cpu_s`), with the recorder's separate.
Endpoints are processes of their own, and their CPU is not counted. A part takes a minute or more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import rig
import scale_ray
import waits
from scale_load import LoadResult, LoadSpec, run_load
from scale_records import (
    ReadCost,
    compute_quantiles,
    compute_summary,
    measure_in_new_process,
    write_records,
)

from loadgen.core.execution import plan_checks
from loadgen.core.execution.events import LoadStarted, RunEvent
from loadgen.core.execution.plan import Tuning
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.stats.histogram import Histogram


def render_rows(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table of rows that map the titles of the columns to the cells.

    All rows have the same columns. Without rows the result is empty.
    """
    if not rows:
        return ""
    return rig.format_table([*rows[0]], [[*row.values()] for row in rows])


class WorkersTrial(NamedTuple):
    """A load that was sent by this many workers, with the same number of streams for each."""

    workers: int
    streams: int
    result: LoadResult

    def format_cells(self) -> dict[str, str]:
        """Return the row of this load: its rate, CPU time and memory, by the column's title."""
        result = self.result
        events_per_cpu_s = 1 / result.cpu_s_per_event
        return {
            "": f"{self.workers} worker(s), {self.streams} streams",
            "events/s": f"{result.events_per_s:,.0f}",
            "CPU-µs per event": f"{result.cpu_s_per_event * 1e6:.2f}",
            "events per CPU-s": f"{events_per_cpu_s:,.0f}",
            "busiest worker, of a core": f"{result.busiest_worker_fraction:.0%}",
            "endpoint CPU-s": f"{result.endpoint_usage.cpu_s:.1f}",
            "worker MB": f"{result.worker_memory_mb:,.0f}",
        }


WORKERS_ITL_MS = 80  # so that each stream has 12.5 events/s
MAX_COST_RATIO_OF_TWO_WORKERS = 1.1
MIN_SPEEDUP_OF_TWO_WORKERS = 1.8


def run_workers_part(args: argparse.Namespace) -> None:
    """Compare the CPU time per event of two workers with that of one, in alternate rounds."""
    trials = rig.interleave_rounds(
        args.rounds,
        {
            "one worker": lambda: run_workers_trial(1, args.rate, args.seconds),
            "two workers": lambda: run_workers_trial(2, args.rate, args.seconds),
        },
    )
    all_trials = trials["one worker"] + trials["two workers"]
    print(render_rows([trial.format_cells() for trial in all_trials]))

    cost_ratio = rig.median_ratio(
        [trial.result.cpu_s_per_event for trial in trials["two workers"]],
        [trial.result.cpu_s_per_event for trial in trials["one worker"]],
    )
    print_workers_limits(cost_ratio)


def run_workers_trial(workers: int, events_per_s: float, seconds: int) -> WorkersTrial:
    """Run a load that gives each worker `events_per_s` events/s and an endpoint of its own."""
    events_per_stream_s = 1000 / WORKERS_ITL_MS
    streams = workers * int(events_per_s / events_per_stream_s)
    spec = LoadSpec(
        workers=workers,
        endpoints=workers,
        streams=streams,
        itl_ms=WORKERS_ITL_MS,
        tokens=int(seconds * events_per_stream_s),
    )
    return WorkersTrial(workers, streams, run_load(spec))


def print_workers_limits(cost_ratio: float) -> None:
    """Print whether two workers keep their limits.

    `cost_ratio` is their CPU time per event, relative to that of one worker. At a ratio of 1, two
    workers handle twice as many events as one.
    """
    speedup = 2 / cost_ratio
    cost_verdict = rig.format_limit_check(
        cost_ratio, MAX_COST_RATIO_OF_TWO_WORKERS, is_upper_bound=True
    )
    speedup_verdict = rig.format_limit_check(
        speedup, MIN_SPEEDUP_OF_TWO_WORKERS, is_upper_bound=False
    )
    print(f"\n- CPU per event of two workers, relative to one: {cost_ratio:.3f}: {cost_verdict}")
    print(f"- Events that two workers handle, relative to one: {speedup:.2f}: {speedup_verdict}")


class ResourceSample(NamedTuple):
    """The memory of a run and the size of its files, at a time since the start of its load."""

    elapsed_s: float
    memory_bytes: int
    disk_bytes: int


class RunSampler:
    """Samples memory, disk space and gaps between events while a run sends its load.

    `begin` is a listener of the run's events, and `end` is called after the run. At `split_s`
    seconds the gaps so far are put aside, so that those before and after it can be compared.
    """

    def __init__(self, run_dir: Path, split_s: float, interval_s: float = 2.0) -> None:
        self._run_dir = run_dir
        self._split_s = split_s
        self._interval_s = interval_s
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)
        self.gaps_before_split = Histogram()
        self.samples: list[ResourceSample] = []

    @property
    def peak_memory_bytes(self) -> int:
        """Return the largest sampled memory, or 0 if there is no sample."""
        return max((sample.memory_bytes for sample in self.samples), default=0)

    def begin(self, event: RunEvent) -> None:
        """Start to sample when the load starts; other events are ignored."""
        if isinstance(event, LoadStarted):
            self._thread.start()

    def end(self) -> Histogram:
        """Stop sampling and return the gaps between events since the split."""
        self._is_stopped.set()
        self._thread.join()
        gaps = self._read_gaps()
        gaps.counts -= self.gaps_before_split.counts
        return gaps

    def _sample_until_stopped(self) -> None:
        """Append a sample after each interval, and put the gaps aside once at the split."""
        start_s = time.monotonic()
        is_split = False
        while not self._is_stopped.wait(self._interval_s):
            elapsed_s = time.monotonic() - start_s
            sample = ResourceSample(elapsed_s, measure_run_memory_bytes(), self._disk_bytes())
            self.samples.append(sample)
            if not is_split and elapsed_s > self._split_s:
                is_split = True
                self.gaps_before_split = self._read_gaps()

    def _disk_bytes(self) -> int:
        """Return the size of all files of the run."""
        total_bytes = 0
        for path in self._run_dir.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # a file may be removed meanwhile
                total_bytes += path.stat().st_size
        return total_bytes

    def _read_gaps(self) -> Histogram:
        """Return the gaps between events that all workers have stored so far."""
        gaps = Histogram()
        for path in (self._run_dir / "flows").glob("w*.gaps.0"):
            gaps.merge(Histogram.from_bytes(path.read_bytes()))
        return gaps


def measure_run_memory_bytes() -> int:
    """Return the resident memory of this process and its children, without the endpoints."""
    total_bytes = 0
    for process_dir in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may end meanwhile
            status = read_process_status(process_dir)
            is_part_of_run = os.getpid() in (int(status["Pid"]), int(status["PPid"]))
            is_endpoint = b"loadgen.sim.server" in (process_dir / "cmdline").read_bytes()
            if is_part_of_run and not is_endpoint:
                resident_kib = int(status.get("VmRSS", "0 kB").split()[0])
                total_bytes += resident_kib * 1024

    return total_bytes


def read_process_status(process_dir: Path) -> dict[str, str]:
    """Return the fields of /proc/PID/status, for example {"VmRSS": "1234 kB"}."""
    fields = {}
    for line in (process_dir / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = value.strip()
    return fields


MAX_OPENED_STREAMS_PER_S = 1_000
STREAMS_ITL_MS = 1_000  # each stream has an event per second
GAP_FILES_DELAY_S = 3  # gap files are up to two seconds old, so a phase begins this much later
MAX_STREAMS_MEMORY_GB = 2.0
LATE_BY_MS = (2, 10, 50, 200)  # how much a gap must exceed the interval of events to be counted


class StreamsPhase(NamedTuple):
    """A phase of a load of many streams, either while they are opened or while all are open.

    `core_fractions` is the fraction of a core that each worker used in each second. `gaps` are the
    times between two events of a stream, in ns.
    """

    name: str
    core_fractions: list[float]
    gaps: Histogram


class StreamsOutcome(NamedTuple):
    """A load of many streams: its result, the peak memory without the endpoints, and its phases."""

    result: LoadResult
    peak_memory_bytes: int
    phases: list[StreamsPhase]


def run_streams_part(args: argparse.Namespace) -> None:
    """Open many streams, hold them open, and print the cost and how late their events are."""
    opened_per_s = min(MAX_OPENED_STREAMS_PER_S, args.streams)
    opening_s = args.streams // opened_per_s
    outcome = run_streams_load(args.streams, opened_per_s, opening_s, args.seconds)

    summary = outcome.result.summary
    print(describe_streams(summary, opening_s, args.seconds))
    print(describe_streams_cost(outcome.result, outcome.peak_memory_bytes))
    print(render_phases(outcome.phases))
    print_streams_verdict(summary, outcome.peak_memory_bytes)


def run_streams_load(
    streams: int, opened_per_s: int, opening_s: int, all_open_s: int
) -> StreamsOutcome:
    """Open streams for `opening_s` seconds and hold all of them open for `all_open_s` seconds."""
    phase_start_s = opening_s + GAP_FILES_DELAY_S
    end_s = opening_s + all_open_s
    timeouts = {"timeout": "2000s", "grace": "2000s"}  # no stream is cancelled

    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "results"
        sampler = RunSampler(run_dir, split_s=phase_start_s)
        result = run_load(
            LoadSpec(
                workers=2,
                endpoints=2,
                streams=streams,
                itl_ms=STREAMS_ITL_MS,
                tokens=end_s,
                output_dir=run_dir,
                listener=sampler.begin,
                options={"request_rate": str(opened_per_s), **timeouts},
            )
        )
        gaps_all_open = sampler.end()
        opening_cpu = read_core_fractions(run_dir, 0, opening_s)
        all_open_cpu = read_core_fractions(run_dir, phase_start_s, end_s)

    phases = [
        StreamsPhase("while they open", opening_cpu, sampler.gaps_before_split),
        StreamsPhase("all open", all_open_cpu, gaps_all_open),
    ]
    return StreamsOutcome(result, sampler.peak_memory_bytes, phases)


def read_core_fractions(run_dir: Path, start_s: float, end_s: float) -> list[float]:
    """Return the fractions of a core that workers used in each second from start to end."""
    samples = store.read_run(run_dir).seconds
    return [sample.cpu_share for sample in samples if start_s <= sample.t_s < end_s]


def describe_streams(summary: Summary, opening_s: int, seconds: int) -> str:
    """Return sentences about the requests of a load of many streams and their delays."""
    requests = summary.requests
    load = f"{requests.scheduled:,} streams over 2 workers and 2 endpoints, an event per second"
    phases = f"{opening_s} s to open them, then {seconds} s"
    outcomes = f"{requests.ok:,} ok, {requests.failed} failed, {requests.lost} lost"
    delays = [
        f"Connect p99 {summary.connect_ms.p99} ms",
        f"send delay p50 {summary.send_lag_ms.p50} ms and p99 {summary.send_lag_ms.p99} ms",
        f"timestamp uncertainty p99 {summary.stamp_error_ms.p99} ms",
    ]

    return (
        f"{load}: {phases}. {outcomes}; at most {summary.load.in_flight_max:,} in flight. "
        f"{'; '.join(delays)}."
    )


def describe_streams_cost(result: LoadResult, peak_memory_bytes: int) -> str:
    """Return a sentence about the memory and the CPU time of a load of many streams."""
    costs = [
        f"Memory without the endpoints {peak_memory_bytes / 1e6:,.0f} MB",
        f"{result.cpu_s_per_event * 1e6:.1f} CPU-µs per event",
        f"endpoints {result.endpoint_usage.cpu_s:.0f} CPU-s",
    ]
    return f"{'; '.join(costs)}.\n"


def render_phases(phases: Sequence[StreamsPhase]) -> str:
    """Return a table of the workers' CPU use and of late events in each phase.

    A phase that was too short for a sample of the CPU use has no row.
    """
    return render_rows([format_phase(phase) for phase in phases if phase.core_fractions])


def format_phase(phase: StreamsPhase) -> dict[str, str]:
    """Return the row of a phase by the titles of the columns.

    The last columns are the fractions of gaps that exceed the interval of events by some ms.
    """
    cells = {
        "": phase.name,
        "worker CPU, mean": f"{statistics.fmean(phase.core_fractions):.1%}",
        "worker CPU, max": f"{max(phase.core_fractions):.1%}",
        "gaps": f"{phase.gaps.count:,}",
    }
    for late_ms in LATE_BY_MS:
        cells[f"late by {late_ms} ms"] = f"{late_gap_fraction(phase.gaps, late_ms):.4%}"
    return cells


def late_gap_fraction(gaps: Histogram, late_ms: int) -> float:
    """Return the fraction of gaps that exceed the interval between two events by `late_ms`."""
    limit_ns = (STREAMS_ITL_MS + late_ms) * 1_000_000
    return gaps.count_over(limit_ns) / max(gaps.count, 1)


def print_streams_verdict(summary: Summary, peak_memory_bytes: int) -> None:
    """Print lost requests, whether the memory keeps its limit, and whether the run is valid."""
    failed_count = summary.requests.scheduled - summary.requests.ok
    memory_gb = peak_memory_bytes / 1e9
    memory_verdict = rig.format_limit_check(memory_gb, MAX_STREAMS_MEMORY_GB, is_upper_bound=True)
    print(f"\n- Lost or failed requests: {failed_count}")
    print(f"- Memory {memory_gb:.2f} GB: {memory_verdict}")
    print(f"- {describe_validity(summary)}")


def describe_validity(summary: Summary) -> str:
    """Return "valid", or "NOT VALID" with the reasons."""
    if summary.verdict.valid:
        return "valid"
    return f"NOT VALID: {'; '.join(summary.verdict.reasons)}"


MAX_SOAK_TOKENS = 50  # of a response
SOAK_ITL_MS = 200  # each stream has five events per second


def run_soak_part(args: argparse.Namespace) -> None:
    """Print how memory and disk space grow in minutes of load, and the drift of the latencies."""
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "results"
        interval_s = min(2.0, args.seconds / 10)
        sampler = RunSampler(run_dir, split_s=0, interval_s=interval_s)
        result = run_load(
            LoadSpec(
                streams=args.streams,
                itl_ms=SOAK_ITL_MS,
                tokens=min(MAX_SOAK_TOKENS, 2 * args.seconds),
                ttft_mean_ms=600.0,
                ttft_deviation_ms=200.0,
                output_dir=run_dir,
                listener=sampler.begin,
                options={"duration": f"{args.seconds}s", "num_requests": None},
            )
        )
        sampler.end()

    print(describe_drift(result.summary), flush=True)
    row = {
        "": f"{args.streams:,} streams, {args.seconds} s",
        "ok requests": f"{result.summary.requests.ok:,}",
        "events": f"{result.event_gaps:,}",
        **format_growth(sampler.samples, args.seconds),
    }
    print(render_rows([row]))


def describe_drift(summary: Summary) -> str:
    """Return whether a run is valid, and the drift of its latencies and of its throughput."""
    drift = summary.drift
    return (
        f"{describe_validity(summary)}; drift of TTFT p99 {drift.ttft_p99}, "
        f"TPOT p99 {drift.tpot_p99}, output tokens/s {drift.output_per_s}"
    )


SECONDS_PER_HOUR = 3600


def format_growth(samples: Sequence[ResourceSample], load_s: float) -> dict[str, str]:
    """Return the memory and disk space of a load, and how fast they grow, by the column's title.

    The first third of the load is the warm-up. The growth is the slope of a linear regression over
    the rest. There are no columns if there are fewer than two samples, as in a short run on a busy
    host.
    """
    after_warm_up = [sample for sample in samples if load_s / 3 < sample.elapsed_s < load_s]
    if len(after_warm_up) < 2:
        return {}

    times_s = [sample.elapsed_s for sample in after_warm_up]
    memory_mb = [sample.memory_bytes / 1e6 for sample in after_warm_up]
    disk_mb = [sample.disk_bytes / 1e6 for sample in after_warm_up]
    memory_mb_per_s = statistics.linear_regression(times_s, memory_mb).slope
    disk_mb_per_s = statistics.linear_regression(times_s, disk_mb).slope

    return {
        "MB after a third": f"{memory_mb[0]:.0f}",
        "MB at the end": f"{memory_mb[-1]:.0f}",
        "MB per hour": f"{memory_mb_per_s * SECONDS_PER_HOUR:+.1f}",
        "disk MB at the end": f"{disk_mb[-1]:.1f}",
        "disk MB per hour": f"{disk_mb_per_s * SECONDS_PER_HOUR:+.1f}",
    }


class FixedRateLoad(NamedTuple):
    """A closed loop whose streams together have a fixed rate of events.

    The fewer streams there are, the faster each of them is. So loads with different numbers of
    streams have the same requests, events and duration.
    """

    streams: int
    requests: int
    tokens_per_request: int
    events_per_s: float

    @property
    def description(self) -> str:
        """Return the first cell of the load's row."""
        work = f"{self.requests:,} requests of {self.tokens_per_request} events"
        return f"{self.streams:,} streams, {work}"

    def run(self) -> LoadResult:
        """Run the load with one worker and one endpoint."""
        itl_ms = self.streams / self.events_per_s * 1e3
        spec = LoadSpec(
            streams=self.streams,
            itl_ms=itl_ms,
            tokens=self.tokens_per_request,
            ttft_mean_ms=2 * itl_ms,
            ttft_deviation_ms=itl_ms / 2,
            options={"timeout": "600s", "num_requests": str(self.requests)},
        )
        return run_load(spec)


FEW_STREAMS = 256
MANY_STREAMS = 10_000
MIN_TOKENS_PER_REQUEST = 8  # so that the cost of events outweighs that of requests
MAX_COST_RATIO_OF_MANY_STREAMS = 1.3  # CPU time per event, relative to few streams


def run_cost_part(args: argparse.Namespace) -> None:
    """Compare the CPU time per event of many streams with that of few, in alternate rounds."""
    few_streams = min(FEW_STREAMS, args.streams // 2)
    many_streams = min(MANY_STREAMS, args.streams)
    tokens = max(MIN_TOKENS_PER_REQUEST, int(args.seconds * args.rate / many_streams))
    few = FixedRateLoad(few_streams, many_streams, tokens, args.rate)
    many = FixedRateLoad(many_streams, many_streams, tokens, args.rate)

    results = rig.interleave_rounds(
        args.rounds, {few.description: few.run, many.description: many.run}
    )
    print(render_cost_table(results))

    ratio = rig.median_ratio(
        [result.cpu_s_per_event for result in results[many.description]],
        [result.cpu_s_per_event for result in results[few.description]],
    )
    verdict = rig.format_limit_check(ratio, MAX_COST_RATIO_OF_MANY_STREAMS, is_upper_bound=True)
    comparison = f"CPU per event of {many_streams:,} streams, relative to {few_streams}"
    print(f"\n- {comparison}: {ratio:.2f}: {verdict}")


def render_cost_table(results: dict[str, list[LoadResult]]) -> str:
    """Return a table with a row for each run of each load; the keys describe the loads."""
    rows = []
    for description, load_results in results.items():
        rows += [{"": description, **format_cost(result)} for result in load_results]
    return render_rows(rows)


def format_cost(result: LoadResult) -> dict[str, str]:
    """Return the rate of events and the CPU time of a load, by the column's title."""
    return {
        "events/s": f"{result.events_per_s:,.0f}",
        "CPU-µs per event": f"{result.cpu_s_per_event * 1e6:.2f}",
        "worker, of a core": f"{result.busiest_worker_fraction:.0%}",
    }


class TokenRateCase(NamedTuple):
    """The load of one worker: how many tokens an event has, and how many events it gets."""

    tokens_per_event: int
    events_per_s: int


class TokenCost(NamedTuple):
    """What one worker uses for a load, and what its endpoint uses meanwhile."""

    cpu_s_per_token: float
    core_fraction: float  # of the worker
    endpoint_cpu_s: float

    @property
    def cores_per_million_tokens_s(self) -> float:
        """Return the cores for a million tokens/s if each core is at most 80 % busy."""
        busy_cores = self.cpu_s_per_token * TARGET_TOKENS_PER_S
        return busy_cores / MAX_CORE_FRACTION


TARGET_TOKENS_PER_S = 1_000_000
MAX_CORE_FRACTION = 0.8  # of each core: a busier worker sends late
MAX_CORES_PER_MILLION = 16
STREAMS_OF_RACK_WORKER = 6_000  # a rack has 100,000 streams over 16 workers
TOKEN_RATE_CASES = (
    TokenRateCase(tokens_per_event=1, events_per_s=10_000),
    TokenRateCase(tokens_per_event=1, events_per_s=20_000),
    TokenRateCase(tokens_per_event=1, events_per_s=30_000),
    TokenRateCase(tokens_per_event=1, events_per_s=40_000),
    TokenRateCase(tokens_per_event=4, events_per_s=10_000),
)


def run_million_part(args: argparse.Namespace) -> None:
    """Print how many cores a million streamed tokens per second need, for several rates.

    A worker in front of a rack gets more events than one simulated endpoint can send. The CPU time
    per event falls with the rate, because one poll finds more sockets to read. So several rates are
    measured, and the highest one with one token per event is compared with the limit.
    """
    streams = min(STREAMS_OF_RACK_WORKER, args.streams)
    costs = {}
    for rack_case in TOKEN_RATE_CASES[: args.cases]:
        # With fewer streams, each stream keeps its rate.
        scaled_rate = rack_case.events_per_s * streams // STREAMS_OF_RACK_WORKER
        case = rack_case._replace(events_per_s=scaled_rate)
        costs[case] = measure_median_token_cost(case, streams, args.seconds, args.rounds)

    print(render_token_costs(costs, streams))
    single_token_cases = [case for case in costs if case.tokens_per_event == 1]
    fastest_case = max(single_token_cases, key=lambda case: case.events_per_s)
    cores = costs[fastest_case].cores_per_million_tokens_s
    verdict = rig.format_limit_check(cores, MAX_CORES_PER_MILLION, is_upper_bound=True)
    print(f"\n- Cores with one token per event: {cores:.1f}: {verdict}")


def measure_median_token_cost(
    case: TokenRateCase, streams: int, seconds: int, rounds: int
) -> TokenCost:
    """Run a load several times and return the cost of the run with the median CPU per token."""
    costs = [measure_token_cost(case, streams, seconds) for _ in range(rounds)]
    costs.sort(key=lambda cost: cost.cpu_s_per_token)
    return costs[len(costs) // 2]


def measure_token_cost(case: TokenRateCase, streams: int, seconds: int) -> TokenCost:
    """Run one load on one worker, whose streams share the case's rate, and return its cost."""
    events_per_stream = max(2, int(seconds * case.events_per_s / streams))
    tokens_per_s = case.events_per_s * case.tokens_per_event
    result = run_load(
        LoadSpec(
            streams=streams,
            itl_ms=streams / tokens_per_s * 1e3,  # between two tokens of one stream
            tokens=events_per_stream * case.tokens_per_event,
            tokens_per_event=case.tokens_per_event,
            ttft_mean_ms=1000.0,
            ttft_deviation_ms=300.0,
            options={"timeout": "600s"},
        )
    )
    output_tokens = result.summary.tokens.output or 1

    return TokenCost(
        cpu_s_per_token=result.worker_cpu_s / output_tokens,
        core_fraction=result.worker_cpu_s / result.window_s,
        endpoint_cpu_s=result.endpoint_usage.cpu_s,
    )


def render_token_costs(costs: dict[TokenRateCase, TokenCost], streams: int) -> str:
    """Return a table of the CPU time per token, and of the cores for a million tokens/s."""
    cores_title = f"cores at {MAX_CORE_FRACTION:.0%} for a million tokens/s"
    rows = []
    for case, cost in costs.items():
        load = f"{case.tokens_per_event} token(s) per event, {case.events_per_s:,} events/s"
        row = {
            f"{streams:,} streams": load,
            "CPU-µs per token": f"{cost.cpu_s_per_token * 1e6:.2f}",
            "worker, of a core": f"{cost.core_fraction:.0%}",
            "endpoint CPU-s": f"{cost.endpoint_cpu_s:.0f}",
            cores_title: f"{cost.cores_per_million_tokens_s:.1f}",
        }
        rows.append(row)
    return render_rows(rows)


WIDE_REQUESTS_PER_S = 200
WIDE_TOKENS = 20  # of a response


def run_wide_part(args: argparse.Namespace) -> None:
    """Send a load with more workers than a run may have on so few cores.

    It shows whether every worker and every target gets its share of the requests.
    """
    allow_workers_per_core(args.workers)
    load_s = 2 * args.seconds
    start_s = time.monotonic()
    result = run_load(
        LoadSpec(
            workers=args.workers,
            targets=args.targets,
            streams=WIDE_REQUESTS_PER_S * load_s,
            itl_ms=50,
            tokens=WIDE_TOKENS,
            ttft_mean_ms=100.0,
            ttft_deviation_ms=20.0,
            options={"request_rate": str(WIDE_REQUESTS_PER_S)},
        )
    )
    wall_s = time.monotonic() - start_s

    title = f"{args.workers} workers, {args.targets} targets, {load_s} s"
    print(render_rows([format_wide_load(title, result, wall_s)]))
    endpoint_events = result.endpoint_usage.events
    print(f"\n- Gaps between events: {result.event_gaps:,}")
    print(f"- Events that the endpoint sent: {endpoint_events:,.0f}")
    print(f"- {describe_validity(result.summary)}")


def allow_workers_per_core(workers: int) -> None:
    """Raise the limit of workers per core, which refuses runs that cannot send on time."""
    limit = plan_checks._MAX_WORKERS_PER_CORE
    plan_checks._MAX_WORKERS_PER_CORE = max(limit, workers)


def format_wide_load(title: str, result: LoadResult, wall_s: float) -> dict[str, str]:
    """Return the requests of all targets, and CPU time and memory, by the column's title.

    `wall_s` is the time of the whole run, with the start and the end of all processes.
    """
    requests = result.summary.requests
    ok_by_target = [target.requests.ok for target in result.summary.targets]
    ok_range = f"{min(ok_by_target, default=0)} to {max(ok_by_target, default=0)}"
    return {
        "": title,
        "requests": f"{requests.scheduled:,}",
        "ok": f"{requests.ok:,}",
        "lost": f"{requests.lost}",
        "ok per target": ok_range,
        "CPU-µs per event": f"{result.cpu_s_per_event * 1e6:.0f}",
        "busiest worker, of a core": f"{result.busiest_worker_fraction:.1%}",
        "worker MB": f"{result.worker_memory_mb:,.0f}",
        "seconds in all": f"{wall_s:.0f}",
    }


RACK_TARGETS = 18
MAX_SUMMARY_CPU_S = 10
MAX_SUMMARY_GB = 1.5


def run_merge_part(args: argparse.Namespace) -> None:
    """Print the cost of exact quantiles and of a full summary over many records.

    The second run has the records of a rack after ten minutes: 21 % of 10 million.
    """
    rack_records = args.records * 21 // 100
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        rack_run_dir = Path(scratch) / "rack-run"
        write_records(run_dir, args.records)
        write_records(rack_run_dir, rack_records, RACK_TARGETS)
        quantiles_cost = measure_in_new_process(compute_quantiles, run_dir)
        summary_cost = measure_in_new_process(compute_summary, run_dir)
        rack_cost = measure_in_new_process(compute_summary, rack_run_dir)

    costs = {
        f"{args.records:,}: exact quantiles of TTFT, TPOT, E2E and send delay": quantiles_cost,
        f"{args.records:,}: full summary": summary_cost,
        f"{rack_records:,}, {RACK_TARGETS} targets: full summary": rack_cost,
    }
    print(render_rows([format_read_cost(work, cost) for work, cost in costs.items()]))
    cpu_verdict = rig.format_limit_check(summary_cost.cpu_s, MAX_SUMMARY_CPU_S, is_upper_bound=True)
    memory_verdict = rig.format_limit_check(
        summary_cost.peak_gb, MAX_SUMMARY_GB, is_upper_bound=True
    )
    print(f"\n- CPU-s of the full summary: {cpu_verdict}")
    print(f"- GB of the full summary: {memory_verdict}")


def format_read_cost(description: str, cost: ReadCost) -> dict[str, str]:
    """Return what it costs to read stored records, by the column's title."""
    return {
        "records": description,
        "CPU-s": f"{cost.cpu_s:.1f}",
        "seconds": f"{cost.wall_s:.1f}",
        "peak GB": f"{cost.peak_gb:.2f}",
    }


REPORT_COMMANDS = (
    "report run",
    "compare run copy",
    "bundle run -o run.zip",
    "verify run.zip",
    "export run --as csv -o run.csv",
    "export run --as vllm -o run.json",
)


def run_report_part(args: argparse.Namespace) -> None:
    """Print CPU-seconds and peak memory of full commands over many stored records."""
    with tempfile.TemporaryDirectory() as scratch:
        work_dir = Path(scratch)
        write_records_in_new_process(work_dir / "run", args.records)
        shutil.copytree(work_dir / "run", work_dir / "copy")
        rows = [
            measure_report_command(command, work_dir, args.records) for command in REPORT_COMMANDS
        ]

    print(render_rows(rows))


def write_records_in_new_process(run_dir: Path, count: int) -> None:
    """Write a run of this many records without using the memory of this process.

    The kernel counts for a command at least the memory of the process that starts it. So the
    process that measures commands must stay small.
    """
    spawn = multiprocessing.get_context("spawn")
    writer = spawn.Process(target=write_records, args=(run_dir, count))
    writer.start()
    writer.join()
    assert writer.exitcode == 0, "the records could not be written"


def measure_report_command(command: str, work_dir: Path, record_count: int) -> dict[str, str]:
    """Run a loadgen command in a folder; return its CPU time and memory by the column's title."""
    cost = waits.measure_command([*waits.LOADGEN, *command.split()], work_dir)
    assert cost is not None, f"the command took too long: {command}"
    bytes_per_record = cost.peak_mb * 1e6 / record_count
    return {
        f"{record_count:,} records": command,
        "CPU-s": f"{cost.cpu_s:.1f}",
        "peak MB": f"{cost.peak_mb:,.0f}",
        "bytes per record": f"{bytes_per_record:.0f}",
    }


# Tuning.most_ahead: a load with more requests than this builds its bodies while it runs.
BUILD_ALL_BEFORE_LOAD = 1 << 40
BUILD_WHILE_LOAD_RUNS = 0
EVENTS_PER_BODY = 100  # of --rate, so that the usual 10,000 events/s are 100 requests/s


def run_rolling_part(args: argparse.Namespace) -> None:
    """Compare the send delay of request bodies built before the load and of those built during it.

    A body that is built during the load may not be ready when its request is due. Such bodies are
    counted as late.
    """
    requests_per_s = args.rate / EVENTS_PER_BODY
    max_requests_by_time = {
        "before the load": BUILD_ALL_BEFORE_LOAD,
        "while it runs": BUILD_WHILE_LOAD_RUNS,
    }
    rows = []
    for build_time, max_requests in max_requests_by_time.items():
        summary = run_rolling_load(max_requests, requests_per_s, args.seconds)
        rows.append({"bodies built": build_time, **format_send_delay(summary)})
    print(render_rows(rows))


def run_rolling_load(max_requests: int, requests_per_s: float, seconds: int) -> Summary:
    """Run an open loop of long prompts and return its summary.

    With more than `max_requests` requests, the bodies are built while the load runs.
    """
    request_count = int(seconds * requests_per_s)
    spec = LoadSpec(
        streams=1,
        itl_ms=20,
        tokens=10,
        tuning=Tuning(most_ahead=max_requests),
        options={
            "request_rate": str(requests_per_s),
            "num_requests": str(request_count),
            "input_tokens": "1500",
        },
    )
    return run_load(spec).summary


def format_send_delay(summary: Summary) -> dict[str, str]:
    """Return the send delay of a run in ms and its late bodies, by the column's title."""
    delay = summary.send_lag_ms
    return {
        "send delay p50 ms": f"{delay.p50}",
        "p99 ms": f"{delay.p99}",
        "max ms": f"{delay.max}",
        "late bodies": f"{count_late_bodies(summary)}",
    }


def count_late_bodies(summary: Summary) -> int:
    """Return how many request bodies were not ready when their request was due."""
    return sum(
        int(warning.values["bodies"])
        for warning in summary.verdict.warning_codes
        if warning.code == "bodies_late"
    )


def run_ray_part(args: argparse.Namespace) -> None:
    """Compare workers on a Ray cluster with local ones, if Ray is installed."""
    if importlib.util.find_spec("ray") is None:
        print("skipped: ray is not installed")
        return
    scale_ray.compare_with_local_workers(args)


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "workers": run_workers_part,
    "streams": run_streams_part,
    "wide": run_wide_part,
    "soak": run_soak_part,
    "cost": run_cost_part,
    "million": run_million_part,
    "merge": run_merge_part,
    "report": run_report_part,
    "rolling": run_rolling_part,
    "ray": run_ray_part,
}


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script; with --smoke, each part takes some seconds."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=[*PARTS, "all"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=10_000.0, help="events/s")
    parser.add_argument("--workers", type=int, default=64, help="of wide")
    parser.add_argument("--targets", type=int, default=100, help="of wide")
    parser.add_argument(
        "--cases", type=int, default=len(TOKEN_RATE_CASES), help="of million, the first so many"
    )
    parser.add_argument("--records", type=int, default=10_000_000, help="of merge and report")

    return rig.parse_arguments(
        parser,
        rounds=1,
        seconds=1,
        streams=20,
        rate=500.0,
        cases=1,
        records=10_000,
        workers=3,
        targets=5,
    )


def main() -> None:
    """Run one part of the script, or all of them one after another."""
    args = parse_command_line()
    rig.raise_open_file_limit()
    part_names = PARTS if args.part == "all" else [args.part]

    for name in part_names:
        start_s = time.monotonic()
        PARTS[name](args)
        print(f"\n{name} took {time.monotonic() - start_s:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
