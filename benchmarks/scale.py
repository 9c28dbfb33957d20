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

The runs are whole runs as a user has them: worker processes, recorder, files. CPU is what the
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
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig
import scale_ray
import waits
from numpy.typing import NDArray

from loadgen.core.execution import plan_checks, run
from loadgen.core.execution.events import LoadStarted, RunEvent
from loadgen.core.execution.plan import Endpoint, Settings, Tuning
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest
from loadgen.core.results.parquet import to_table
from loadgen.core.stats.histogram import Histogram
from loadgen.core.workload import Workload, load, read_flags
from loadgen.sim.server import embedded
from loadgen.sim.server.options import Options

TOKENS_PER_S = 1_000_000
OPENED_PER_S = 1_000  # streams that begin in a second, until all are open
MAX_CORE_FRACTION = 0.8  # of each core
FEW_STREAMS, MANY_STREAMS = 256, 10_000  # streams whose cost per event is compared
WIDE_RATE = 200  # requests/s, of 20 events each
RACK_STREAMS = 6_000  # of one worker: 100,000 over 16
RACK_CASES = (
    (1, 10_000),
    (1, 20_000),
    (1, 30_000),
    (1, 40_000),
    (4, 10_000),
)  # tokens an event, events/s


class ServerUsage(NamedTuple):
    """What the endpoints did during a load: events sent, and their CPU time."""

    events: float
    cpu_s: float


def run_load(  # noqa: PLR0913 - each parameter is varied by one of the parts
    *,
    workers: int,
    servers: int,
    streams: int,
    itl_ms: float,
    tokens: int,
    bundle: int = 1,
    ttft_ms: tuple[float, float] = (500.0, 100.0),
    out: Path | None = None,
    on_drive: Any = None,
    ray: str | None = None,
    tuning: Tuning | None = None,
    targets: int = 0,
    **flags: str | None,
) -> tuple[Summary, ServerUsage]:
    """Run one load; return its summary, and what the endpoints used and sent.

    By default it is a closed loop of `streams` requests, one for each stream. `targets` gives one
    endpoint so many names.

    Args:
        workers: Worker processes.
        servers: Endpoints, each in a process of its own.
        streams: Requests that are open at once.
        itl_ms: Time between two events of a response.
        tokens: Tokens of a response.
        bundle: Tokens in an event.
        ttft_ms: Mean and standard deviation of the time to the first token.
        out: Where the results go; by default they are not kept.
        on_drive: Is called with each event of the run.
        ray: Address of a Ray cluster on which the workers run.
        tuning: Sizes and time limits of the run.
        targets: Number of names of the first endpoint, which then serves alone.
        flags: Other options of `loadgen run`.
    """
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        server_options = Options(
            ttft=f"normal:{ttft_ms[0]}ms,{ttft_ms[1]}ms",
            itl=f"{itl_ms}ms",
            idle_close="600s",
            stream_interval=bundle,
        )
        urls = [stack.enter_context(embedded.start(server_options)).url for _ in range(servers)]
        workload = load_workload(Path(scratch), streams, tokens, flags)
        settings = Settings(
            url=urls[0],
            targets=list_targets(urls, targets),
            model="sim",
            server="trtllm",
            workers=workers,
            ray=ray,
            out=out or Path(scratch) / "out",
            tuning=tuning or Tuning(),
        )
        before = read_server_usage(urls)
        summary, _ = run.execute(workload, settings, () if on_drive is None else (on_drive,))
        after = read_server_usage(urls)

    if summary.requests.ok != summary.requests.scheduled:
        print(f"!! {summary.requests}", flush=True)

    return summary, ServerUsage(after.events - before.events, after.cpu_s - before.cpu_s)


def cpu_s_per_event(summary: Summary) -> float:
    """Return CPU-seconds of the workers per output event."""
    assert summary.client.cpu_s is not None
    return summary.client.cpu_s / summary.inter_chunk_ms.count


def load_workload(
    folder: Path, streams: int, tokens: int, flags: dict[str, str | None]
) -> Workload:
    """Return a workload of short prompts: a closed loop, unless `flags` has a request rate."""
    workload_path = folder / "w.yaml"
    workload_path.write_text(
        f"name: scale\nrequests: {{input_tokens: 20, output_tokens: {tokens}}}\n"
    )
    options: dict[str, Any] = {"num_requests": str(streams), "warmup": "0", "seed": "1"}
    options |= flags

    if "request_rate" not in flags:
        options["concurrency"] = str(streams)

    return load(str(workload_path), read_flags(**options))


def list_targets(urls: list[str], names_of_first: int) -> tuple[Endpoint, ...]:
    """Return the targets of a load: the first endpoint under many names, or all endpoints.

    A single endpoint needs no targets.
    """
    if names_of_first:
        return tuple(
            Endpoint(url=urls[0], name=f"vm-{i:03}", api_key=f"key-{i}")
            for i in range(names_of_first)
        )
    if len(urls) == 1:
        return ()

    return tuple(Endpoint(url=url, name=url) for url in urls)


def read_server_usage(urls: list[str]) -> ServerUsage:
    """Return what all endpoints have sent and used since their start."""
    counters = [rig.read_counters(url) for url in urls]
    return ServerUsage(
        events=sum(counter["events"] for counter in counters),
        cpu_s=sum(counter["cpu_s"] for counter in counters),
    )


def events_per_s(summary: Summary) -> float:
    """Return the output events per second of a run, over its measurement window."""
    return summary.inter_chunk_ms.count / (summary.window.duration_s or 1)


WORKERS_ITL_MS = 80  # so that a stream has 12.5 events/s


def print_workers(flags: argparse.Namespace) -> None:
    """Compare the CPU time per event of two workers with that of one, in alternate rounds."""
    events_per_stream_s = 1000 / WORKERS_ITL_MS
    streams_per_worker = int(flags.rate / events_per_stream_s)
    rows: list[list[str]] = []

    costs: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(flags.rounds):
        for worker_count in (1, 2):
            streams = streams_per_worker * worker_count
            summary, server_usage = run_load(
                workers=worker_count,
                servers=worker_count,
                streams=streams,
                itl_ms=WORKERS_ITL_MS,
                tokens=int(flags.seconds * events_per_stream_s),
            )
            cost_s = cpu_s_per_event(summary)
            costs[worker_count].append(cost_s)
            rows.append(
                [
                    f"{worker_count} worker(s), {streams} streams",
                    f"{events_per_s(summary):,.0f}",
                    f"{cost_s * 1e6:.2f}",
                    f"{1 / cost_s:,.0f}",
                    f"{summary.client.cpu_share_max or 0:.0%}",
                    f"{server_usage.cpu_s:.1f}",
                    f"{(summary.client.peak_rss_bytes or 0) / 1e6:,.0f}",
                ]
            )

    columns = ["", "events/s", "µs/event", "events/CPU-s", "busiest", "server CPU-s", "MB"]
    print(rig.format_table(columns, rows))
    print_worker_limits(rig.median_ratio(costs[2], costs[1]))


def print_worker_limits(cost_ratio: float) -> None:
    """Print whether two workers keep their limits, from the ratio of their CPU time per event."""
    speedup = 2 / cost_ratio
    print(
        f"\n- CPU per event of two against one: {cost_ratio:.3f}: "
        f"{rig.format_limit_check(cost_ratio, 1.1, is_upper_bound=True)}"
    )
    print(
        f"- two cores carry {speedup:.2f} times one: "
        f"{rig.format_limit_check(speedup, 1.8, is_upper_bound=False)}"
    )


class ProcessSample(NamedTuple):
    """A sample of a run: seconds since the start, bytes of memory, and bytes on disk."""

    elapsed_s: float
    memory_bytes: int
    disk_bytes: int


class RunObserver:
    """Observes a run from outside, every `every_s` seconds.

    It keeps the gaps between events before and after a time (`split_s`), and the memory of the
    workers and of their recorder.
    """

    def __init__(self, folder: Path, split_s: float, every_s: float = 2.0) -> None:
        self._folder = folder
        self._split_s = split_s
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.gaps_before_split = Histogram()
        self.samples: list[ProcessSample] = []

    @property
    def peak_bytes(self) -> int:
        """Return the largest memory seen."""
        return max((sample.memory_bytes for sample in self.samples), default=0)

    def begin(self, event: RunEvent) -> None:
        """Start to observe when the load starts."""
        if isinstance(event, LoadStarted):
            self._thread.start()

    def end(self) -> Histogram:
        """Return the gaps since the split; call it after the run."""
        self._over.set()
        self._thread.join()
        gaps = self._read_gaps()
        gaps.counts -= self.gaps_before_split.counts
        return gaps

    def _watch(self) -> None:
        """Sample until `end` is called."""
        started_s = time.monotonic()
        is_split = False
        while not self._over.wait(self._every_s):
            disk_bytes = self._measure_disk_bytes()
            elapsed_s = time.monotonic() - started_s
            self.samples.append(ProcessSample(elapsed_s, _resident_bytes(), disk_bytes))
            if not is_split and time.monotonic() > started_s + self._split_s:
                is_split = True
                self.gaps_before_split = self._read_gaps()

    def _measure_disk_bytes(self) -> int:
        """Return the size of all files of the run."""
        total_bytes = 0
        for file in self._folder.rglob("*"):
            with contextlib.suppress(OSError):  # a file may be removed meanwhile
                total_bytes += file.stat().st_size
        return total_bytes

    def _read_gaps(self) -> Histogram:
        """Return the gaps of all workers so far."""
        gaps = Histogram()
        for file in (self._folder / "flows").glob("w*.gaps.0"):
            gaps.merge(Histogram.from_bytes(file.read_bytes()))
        return gaps


def _resident_bytes() -> int:
    """Return the resident bytes of this process and its children, without the endpoints."""
    total_bytes = 0
    own_pid = os.getpid()
    for process_dir in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may end meanwhile
            status = _read_process_status(process_dir)
            is_of_run = own_pid in (int(status["Pid"]), int(status["PPid"]))
            is_endpoint = b"loadgen.sim.server" in (process_dir / "cmdline").read_bytes()
            if is_of_run and not is_endpoint:
                resident_kib = status.get("VmRSS", "0 kB").split()[0]
                total_bytes += int(resident_kib) << 10

    return total_bytes


def _late_gap_cells(gaps: Histogram, itl_ns: int) -> list[str]:
    """Return the count of gaps and the fractions that exceed `itl_ns` by 2, 10, 50 and 200 ms."""
    shares = [
        gaps.count_over(itl_ns + ms * 1_000_000) / max(gaps.count, 1) for ms in (2, 10, 50, 200)
    ]
    return [f"{gaps.count:,}", *(f"{share:.4%}" for share in shares)]


def _read_process_status(process_dir: Path) -> dict[str, str]:
    """Return the fields of /proc/PID/status, such as VmRSS: "1234 kB"."""
    lines = (process_dir / "status").read_text().splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in pairs}


SETTLING_S = 3  # after the last stream has begun; the gap files are up to two seconds behind


def print_streams(flags: argparse.Namespace) -> None:
    """Open many streams and hold them open; print their cost and how late their events are.

    The load has two phases: the streams begin at a fixed rate, and then all of them are open.
    """
    opened_per_s = min(OPENED_PER_S, flags.streams)
    opening_s = flags.streams // opened_per_s
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "out"
        observer = RunObserver(run_dir, split_s=opening_s + SETTLING_S)
        summary, server_usage = run_load(
            workers=2,
            servers=2,
            streams=flags.streams,
            itl_ms=1000,
            tokens=flags.seconds + opening_s,
            out=run_dir,
            on_drive=observer.begin,
            timeout="2000s",
            grace="2000s",
            request_rate=str(opened_per_s),
        )
        gaps_all_open = observer.end()
        opening_cpu = read_worker_cpu(run_dir, 0, opening_s)
        open_cpu = read_worker_cpu(run_dir, opening_s + SETTLING_S, opening_s + flags.seconds)

    print(describe_streams(summary, server_usage, observer.peak_bytes, opening_s, flags.seconds))
    columns = [
        "",
        "CPU of a worker, mean",
        "most",
        "gaps",
        "over by 2 ms",
        "10 ms",
        "50 ms",
        "200 ms",
    ]
    rows = [
        *_format_phase("while they open", opening_cpu, observer.gaps_before_split),
        *_format_phase("all open", open_cpu, gaps_all_open),
    ]
    print(rig.format_table(columns, rows))
    print(f"\n- lost or failed: {summary.requests.scheduled - summary.requests.ok}")
    memory_verdict = rig.format_limit_check(observer.peak_bytes / 1e9, 2.0, is_upper_bound=True)
    print(f"- memory: {memory_verdict} GB")
    print("- valid" if summary.verdict.valid else f"- NOT VALID: {summary.verdict.reasons}")


def read_worker_cpu(run_dir: Path, start_s: float, end_s: float) -> list[float]:
    """Return the fractions of a core that workers used in each second of a part of a run."""
    samples = store.read_run(run_dir).seconds
    return [sample.cpu_share for sample in samples if start_s <= sample.t_s < end_s]


def _format_phase(name: str, core_fractions: list[float], gaps: Histogram) -> list[list[str]]:
    """Return the row of a phase; there is none if the phase was too short for a sample."""
    if not core_fractions:
        return []
    mean = f"{statistics.fmean(core_fractions):.1%}"
    return [[name, mean, f"{max(core_fractions):.1%}", *_late_gap_cells(gaps, 1_000_000_000)]]


def describe_streams(
    summary: Summary, server_usage: ServerUsage, peak_bytes: int, opening_s: int, seconds: int
) -> str:
    """Return the paragraph about a load of many streams."""
    requests = summary.requests
    return (
        f"{requests.scheduled:,} streams over 2 workers and 2 endpoints, an event each per "
        f"second, {seconds} s "
        f"after the {opening_s} s in which they were opened: {requests.ok:,} ok, "
        f"{requests.failed} failed, "
        f"{requests.lost} lost; in flight at most {summary.load.in_flight_max:,}; memory of all "
        f"but the endpoints "
        f"{peak_bytes / 1e6:,.0f} MB; {cpu_s_per_event(summary) * 1e6:.1f} µs/event; "
        f"connect p99 "
        f"{summary.connect_ms.p99} ms; send delay p50 {summary.send_lag_ms.p50}, p99 "
        f"{summary.send_lag_ms.p99} ms; "
        f"timestamp uncertainty p99 {summary.stamp_error_ms.p99} ms; server CPU "
        f"{server_usage.cpu_s:.0f} s\n"
    )


def print_soak(flags: argparse.Namespace) -> None:
    """Find out what grows in minutes of load: responses of 50 events, five a second per stream."""
    with tempfile.TemporaryDirectory() as scratch:
        observer = RunObserver(Path(scratch) / "out", 0, min(2.0, flags.seconds / 10))
        summary, _ = run_load(
            workers=1,
            servers=1,
            streams=flags.streams,
            itl_ms=200,
            tokens=min(50, 2 * flags.seconds),
            ttft_ms=(600.0, 200.0),
            out=Path(scratch) / "out",
            on_drive=observer.begin,
            duration=f"{flags.seconds}s",
            num_requests=None,
        )
        observer.end()

    drift = summary.drift
    print(
        f"{'valid' if summary.verdict.valid else summary.verdict.reasons}; drift of TTFT p99 "
        f"{drift.ttft_p99}, TPOT p99 {drift.tpot_p99}, output {drift.output_per_s}",
        flush=True,
    )
    title = f"{flags.streams:,} streams, {flags.seconds} s"
    growth = _growth_cells(observer.samples, flags.seconds)
    cells = [title, f"{summary.requests.ok:,}", f"{summary.inter_chunk_ms.count:,}", *growth]
    columns = [
        "",
        "ok",
        "events",
        "MB after a third",
        "MB at the end",
        "MB an hour",
        "disk MB",
        "disk MB an hour",
    ]
    print(rig.format_table(columns, [cells]))


def _growth_cells(samples: list[ProcessSample], load_s: float) -> list[str]:
    """Return memory and disk after the first third of a load and at its end, and their growth.

    The growth is the slope of a linear regression. The cells are empty if there are fewer than two
    samples, as of a short run on a busy host.
    """
    settled = [sample for sample in samples if load_s / 3 < sample.elapsed_s < load_s]
    if len(settled) < 2:
        return [""] * 5

    times_s = [sample.elapsed_s for sample in settled]
    memory_mb = [sample.memory_bytes / 1e6 for sample in settled]
    disk_mb = [sample.disk_bytes / 1e6 for sample in settled]
    memory_mb_per_hour = statistics.linear_regression(times_s, memory_mb).slope * 3600
    disk_mb_per_hour = statistics.linear_regression(times_s, disk_mb).slope * 3600

    return [
        f"{memory_mb[0]:.0f}",
        f"{memory_mb[-1]:.0f}",
        f"{memory_mb_per_hour:+.1f}",
        f"{disk_mb[-1]:.1f}",
        f"{disk_mb_per_hour:+.1f}",
    ]


MIN_EVENTS_PER_REQUEST = 8


MAX_COST_RATIO = 1.3  # of many streams against few


def print_cost(flags: argparse.Namespace) -> None:
    """Compare the cost per event of many streams with that of few.

    Requests, events and duration are the same; only the number of streams that are open at once
    differs.
    """
    few_streams = min(FEW_STREAMS, flags.streams // 2)
    many_streams = min(MANY_STREAMS, flags.streams)
    tokens = max(MIN_EVENTS_PER_REQUEST, int(flags.seconds * flags.rate / many_streams))
    rows = []

    ratios = []
    for _ in range(flags.rounds):
        costs = {}
        for stream_count in (few_streams, many_streams):
            summary = run_at_rate(stream_count, many_streams, tokens, flags.rate)
            costs[stream_count] = cpu_s_per_event(summary)
            rows.append(
                [
                    f"{stream_count:,} streams, {many_streams:,} requests of {tokens} events",
                    f"{events_per_s(summary):,.0f}",
                    f"{costs[stream_count] * 1e6:.2f}",
                    f"{summary.client.cpu_share_max or 0:.0%}",
                ]
            )

        ratios.append(costs[many_streams] / costs[few_streams])

    print(rig.format_table(["", "events/s", "µs/event", "busiest"], rows))
    ratio = rig.median(ratios)
    print(
        f"\n- {many_streams:,} against {few_streams} streams: {ratio:.2f}: "
        f"{rig.format_limit_check(ratio, MAX_COST_RATIO, is_upper_bound=True)}"
    )


def run_at_rate(streams: int, requests: int, tokens: int, rate_per_s: float) -> Summary:
    """Run so many concurrent streams that together have `rate_per_s` events per second."""
    itl_ms = streams / rate_per_s * 1e3
    summary, _ = run_load(
        workers=1,
        servers=1,
        streams=streams,
        itl_ms=itl_ms,
        tokens=tokens,
        ttft_ms=(2 * itl_ms, itl_ms / 2),
        timeout="600s",
        num_requests=str(requests),
    )
    return summary


class TokenCost(NamedTuple):
    """What a worker uses per token, its fraction of a core, and the CPU of its endpoint."""

    cpu_s_per_token: float
    core_fraction: float
    server_cpu_s: float


MAX_CORES_PER_MILLION = 16


def print_million(flags: argparse.Namespace) -> None:
    """Print the cores that a million streamed tokens a second need.

    CPU per event falls with the rate, because one poll finds more sockets to read. So the worker is
    loaded as the rack would load it, up to what the one core of the endpoint can send.
    """
    streams = min(RACK_STREAMS, flags.streams)
    rows = []

    cores_by_bundle = {}
    for tokens_per_event, rack_rate in RACK_CASES[: flags.cases]:
        rate = rack_rate * streams // RACK_STREAMS
        costs = [
            measure_token_cost(streams, rate, tokens_per_event, flags.seconds)
            for _ in range(flags.rounds)
        ]
        median_cost = sorted(costs)[len(costs) // 2]
        cores = median_cost.cpu_s_per_token * TOKENS_PER_S / MAX_CORE_FRACTION
        cores_by_bundle[tokens_per_event] = cores
        rows.append(
            [
                f"{tokens_per_event} token(s) per event, {rate:,} events/s",
                f"{median_cost.cpu_s_per_token * 1e6:.2f}",
                f"{median_cost.core_fraction:.0%}",
                f"{median_cost.server_cpu_s:.0f}",
                f"{cores:.1f}",
            ]
        )

    columns = [
        f"{streams:,} streams",
        "µs per token",
        "of a core",
        "endpoint CPU-s",
        f"cores at {MAX_CORE_FRACTION:.0%} for a million tokens/s",
    ]
    print(rig.format_table(columns, rows))
    print(
        f"\n- cores, one token per event: {cores_by_bundle[1]:.1f}: "
        f"{rig.format_limit_check(cores_by_bundle[1], MAX_CORES_PER_MILLION, is_upper_bound=True)}"
    )


def print_wide(flags: argparse.Namespace) -> None:
    """Run more workers than a run would use on so few cores, to show that all shares arrive."""
    plan_checks._MAX_WORKERS_PER_CORE = max(plan_checks._MAX_WORKERS_PER_CORE, flags.workers)
    seconds, started_s = 2 * flags.seconds, time.monotonic()
    summary, server_usage = run_load(
        workers=flags.workers,
        servers=1,
        targets=flags.targets,
        streams=WIDE_RATE * seconds,
        itl_ms=50,
        tokens=20,
        ttft_ms=(100.0, 20.0),
        request_rate=str(WIDE_RATE),
    )
    wall_s, requests, client = time.monotonic() - started_s, summary.requests, summary.client
    shares = [target.requests.ok for target in summary.targets]
    columns = [
        "",
        "requests",
        "ok",
        "lost",
        "of a target",
        "µs/event",
        "busiest worker",
        "MB of workers",
        "s in all",
    ]

    row = [
        f"{flags.workers} workers, {flags.targets} targets, {seconds} s",
        f"{requests.scheduled:,}",
        f"{requests.ok:,}",
        f"{requests.lost}",
        f"{min(shares, default=0)} to {max(shares, default=0)}",
        f"{cpu_s_per_event(summary) * 1e6:.0f}",
        f"{client.cpu_share_max or 0:.1%}",
        f"{(client.peak_rss_bytes or 0) / 1e6:,.0f}",
        f"{wall_s:.0f}",
    ]
    print(rig.format_table(columns, [row]))
    print(
        f"\n- events: {summary.inter_chunk_ms.count:,} gaps, {server_usage.events:,.0f} sent "
        f"by the endpoint"
    )
    print(
        "- valid" if summary.verdict.valid else f"- NOT VALID: {'; '.join(summary.verdict.reasons)}"
    )


QUANTILES_CODE = """
import resource, sys, time
from pathlib import Path
from loadgen.core.metrics import columns as metrics
from loadgen.core.results.parquet import Frame
from loadgen.core.stats.quantiles import distribution_of
began, cpu = time.perf_counter(), time.process_time()
columns = metrics.Columns(Frame([Path(sys.argv[1]) / "requests" / "requests.parquet"]))
for metric in ("ttft", "tpot", "e2e", "send_lag"):
    distribution_of(metrics.drop_undefined(columns.measure(metric)))
peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(time.process_time() - cpu, time.perf_counter() - began, peak_gb)
"""
FULL_SUMMARY_CODE = """
import resource, sys, time
from pathlib import Path
from loadgen.core import run_folder
began, cpu = time.perf_counter(), time.process_time()
run_folder.summary(Path(sys.argv[1]))
peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(time.process_time() - cpu, time.perf_counter() - began, peak_gb)
"""


def measure_token_cost(
    streams: int, rate_per_s: int, tokens_per_event: int, seconds: int
) -> TokenCost:
    """Run so many streams with together `rate_per_s` events per second on one worker."""
    events_per_stream = max(2, int(seconds * rate_per_s / streams))
    summary, server_usage = run_load(
        workers=1,
        servers=1,
        streams=streams,
        itl_ms=streams / (rate_per_s * tokens_per_event) * 1e3,
        bundle=tokens_per_event,
        tokens=events_per_stream * tokens_per_event,
        ttft_ms=(1000.0, 300.0),
        timeout="600s",
    )
    assert summary.client.cpu_s is not None

    return TokenCost(
        cpu_s_per_token=summary.client.cpu_s / (summary.tokens.output or 1),
        core_fraction=summary.client.cpu_s / (summary.window.duration_s or 1),
        server_cpu_s=server_usage.cpu_s,
    )


RECORD_WORKERS = 16


RECORD_GAP_NS = 300_000  # between the scheduled times of two requests


RECORDS_PER_BLOCK = 1_000_000


def write_records(folder: Path, count: int, targets: int = 1) -> None:
    """Write a finished run of this many records with random latencies.

    It looks like what 16 workers leave, with the first tenth as the warm-up.
    """
    import pyarrow.parquet as pq

    from loadgen.core.results.manifest import encode_manifest

    (folder / "requests").mkdir(parents=True)
    (folder / "flows").mkdir()
    warm_up_count = count // 10
    manifest = create_record_manifest(count, warm_up_count, targets)
    (folder / "run.json").write_bytes(encode_manifest(manifest))

    rng = np.random.default_rng(1)
    for stage in (0, 1):
        write_event_files(folder / "flows", stage, count, rng)

    block_rows = min(count, RECORDS_PER_BLOCK)
    with ExitStack() as stack:
        writer = None
        for first_slot in range(0, count, block_rows):
            rows = draw_records(first_slot, block_rows, warm_up_count, targets, rng)
            table = to_table(rows, [])
            if writer is None:
                path = folder / "requests" / store.MERGED
                writer = stack.enter_context(
                    pq.ParquetWriter(path, table.schema, compression="zstd")
                )

            writer.write_table(table)


def create_record_manifest(count: int, warm_up_count: int, targets: int) -> RunManifest:
    """Return the manifest of the run that `write_records` writes."""
    from loadgen.core.results.manifest import StagePlan, TargetFacts
    from loadgen.core.slo import Slo, Term

    arrival = "constant 3,333/s"
    warm_up = StagePlan(name="warm-up", arrival=arrival, slots=warm_up_count, measured=False)
    load_stage = StagePlan(
        name="load",
        arrival=arrival,
        slots=count - warm_up_count,
        start_ns=warm_up_count * RECORD_GAP_NS,
    )

    return RunManifest(
        run="merge",
        state="finished",
        workers=RECORD_WORKERS,
        slo=Slo(terms=(Term(metric="ttft", limit_ns=450_000_000, quantile=0.99),)),
        stages=(warm_up, load_stage),
        targets=tuple(
            TargetFacts(url=f"http://vm-{i:02}", name=f"vm-{i:02}", gpus=4) for i in range(targets)
        ),
    )


def write_event_files(folder: Path, stage: int, count: int, rng: np.random.Generator) -> None:
    """Write the gaps between events and the events per bin of one stage."""
    from loadgen.core.results.record import BIN_NS

    gaps = Histogram()
    gaps.add(rng.lognormal(16.8, 0.3, 100_000).astype(np.int64))
    (folder / f"w0.gaps.{stage}").write_bytes(gaps.to_bytes())
    events_per_bin = np.full(count * RECORD_GAP_NS // BIN_NS, 7_000, "<i8")
    (folder / f"w0.timeline.{stage}").write_bytes(events_per_bin.tobytes())


def draw_records(
    first_slot: int, count: int, warm_up_count: int, targets: int, rng: np.random.Generator
) -> NDArray[np.void]:
    """Return the records of some requests from `first_slot` on, with random values."""
    from loadgen.core.results.record import ROW, SOURCES

    rows = np.zeros(count, ROW)
    slots = np.arange(first_slot, first_slot + count)
    rows["slot"] = slots

    rows["request"] = slots
    for name in ("session", "virtual_user", "cached_tokens", "reasoning_tokens", "text"):
        rows[name] = -1  # no value

    rows["worker"] = slots % RECORD_WORKERS
    rows["target"] = slots % targets
    rows["stage"] = slots >= warm_up_count
    rows["due_ns"] = slots * RECORD_GAP_NS
    rows["sent_ns"] = rows["due_ns"] + rng.integers(20_000, 200_000, count)
    rows["ready_ns"] = rows["sent_ns"]

    output_tokens = rng.integers(50, 400, count)
    for name in ("output_tokens", "output_events", "asked_output"):
        rows[name] = output_tokens

    input_tokens = rng.integers(50, 4000, count)
    rows["input_tokens"] = input_tokens
    rows["built_tokens"] = input_tokens
    rows["input_source"] = SOURCES.index("server")
    rows["output_source"] = SOURCES.index("server")

    first_token_ns = rows["due_ns"] + rng.lognormal(19, 0.4, count).astype(np.int64)
    for name in ("first_byte_ns", "first_event_ns", "first_token_ns", "first_answer_ns"):
        rows[name] = first_token_ns

    decode_ns = rows["output_tokens"] * rng.normal(20e6, 2e6, count).astype(np.int64)
    rows["last_token_ns"] = first_token_ns + decode_ns
    rows["end_ns"] = rows["last_token_ns"] + 100_000
    rows["done_ns"] = rows["end_ns"]

    return rows


class ReadCost(NamedTuple):
    """What a program that reads stored records costs."""

    cpu_s: float
    wall_s: float
    peak_gb: float


def measure_reading(code: str, run_dir: Path) -> ReadCost:
    """Run Python code on the records of a run in a process of its own; it prints its own cost."""
    completed = subprocess.run(
        [sys.executable, "-c", code, run_dir], capture_output=True, text=True, check=True
    )
    cpu_s, wall_s, peak_gb = map(float, completed.stdout.split())
    return ReadCost(cpu_s, wall_s, peak_gb)


def print_merge(flags: argparse.Namespace) -> None:
    """Print the cost of exact quantiles and of a full summary over many records."""
    rack_records = flags.records * 21 // 100
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "ten"
        rack_run_dir = Path(scratch) / "rack"
        write_records(run_dir, flags.records)
        write_records(rack_run_dir, rack_records, targets=18)
        quantiles_cost = measure_reading(QUANTILES_CODE, run_dir)
        summary_cost = measure_reading(FULL_SUMMARY_CODE, run_dir)
        rack_cost = measure_reading(FULL_SUMMARY_CODE, rack_run_dir)

    costs = {
        f"{flags.records:,}: exact quantiles of TTFT, TPOT, E2E and send delay": quantiles_cost,
        f"{flags.records:,}: the whole summary": summary_cost,
        f"{rack_records:,}, 18 targets (as of a rack in ten minutes): the whole summary": rack_cost,
    }
    rows = [
        [description, f"{cost.cpu_s:.1f}", f"{cost.wall_s:.1f}", f"{cost.peak_gb:.2f}"]
        for description, cost in costs.items()
    ]
    print(rig.format_table(["records", "CPU-s", "s", "GB"], rows))
    print(
        f"\n- the whole summary: "
        f"{rig.format_limit_check(summary_cost.cpu_s, 10, is_upper_bound=True)} CPU-s; "
        f"{rig.format_limit_check(summary_cost.peak_gb, 1.5, is_upper_bound=True)} GB"
    )


REPORT_COMMANDS = (
    "report run",
    "compare run again",
    "bundle run -o run.zip",
    "verify run.zip",
    "export run --as csv -o run.csv",
    "export run --as vllm -o run.json",
)


def print_report(flags: argparse.Namespace) -> None:
    """Print CPU-seconds and peak memory of whole commands over many stored records."""
    record_count = flags.records
    rows = []
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)

        # The kernel counts for a command at least the memory of the process that starts it. So the
        # records are written by another process, whose memory is large.
        writer = multiprocessing.get_context("spawn").Process(
            target=write_records, args=(scratch / "run", record_count)
        )
        writer.start()
        writer.join()
        shutil.copytree(scratch / "run", scratch / "again")

        for command in REPORT_COMMANDS:
            cost = waits.measure_command([*waits.LOADGEN, *command.split()], scratch)
            assert cost is not None, f"{command}: stopped"
            bytes_per_record = cost.peak_mb * 1e6 / record_count
            rows.append(
                [
                    command,
                    f"{cost.cpu_s:.1f}",
                    f"{cost.peak_mb:,.0f}",
                    f"{bytes_per_record:.0f}",
                ]
            )

    columns = [f"{record_count:,} records", "CPU-s", "peak MB", "B a record"]
    print(rig.format_table(columns, rows))


ALL_BODIES = 1 << 40  # more than a load has requests: all bodies are built before it starts


def print_rolling(flags: argparse.Namespace) -> None:
    """Compare the send delay of two ways to build request bodies.

    Bodies are built before the load, or while it runs ("rolling"). Late are bodies that were not
    ready when their request was due.
    """
    rate_per_s = flags.rate / 100
    rows = []
    for name, max_bodies_ahead in (("ahead", ALL_BODIES), ("while it runs", 0)):
        summary, _ = run_load(
            tuning=Tuning(most_ahead=max_bodies_ahead),
            workers=1,
            servers=1,
            streams=1,
            itl_ms=20,
            tokens=10,
            request_rate=str(rate_per_s),
            num_requests=str(int(flags.seconds * flags.rate / 100)),
            input_tokens="1500",
        )

        late_bodies = [
            warning.values["bodies"]
            for warning in summary.verdict.warning_codes
            if warning.code == "bodies_late"
        ]
        delay = summary.send_lag_ms
        rows.append([name, f"{delay.p50}", f"{delay.p99}", f"{delay.max}", str(late_bodies or "0")])

    print(rig.format_table(["bodies built", "send delay p50 ms", "p99", "max", "late"], rows))


def print_ray(flags: argparse.Namespace) -> None:
    """Compare workers on a Ray cluster with local ones, if Ray is installed."""
    if importlib.util.find_spec("ray") is None:
        print("left out: ray is not installed")
        return
    scale_ray.compare_with_local_workers(flags, run_load, cpu_s_per_event)


PARTS: dict[str, Any] = {
    "workers": print_workers,
    "streams": print_streams,
    "wide": print_wide,
    "soak": print_soak,
    "cost": print_cost,
    "million": print_million,
    "merge": print_merge,
    "report": print_report,
    "rolling": print_rolling,
    "ray": print_ray,
}


def main() -> None:
    """Run one part, or all of them."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=[*PARTS, "all"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=10_000.0, help="events/s")
    parser.add_argument("--workers", type=int, default=64, help="of wide")
    parser.add_argument("--targets", type=int, default=100, help="of wide")
    parser.add_argument(
        "--cases", type=int, default=len(RACK_CASES), help="of million, the first so many"
    )
    parser.add_argument("--records", type=int, default=10_000_000, help="of merge and report")
    args = rig.parse_arguments(
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
    rig.raise_open_file_limit()

    for part in PARTS if args.part == "all" else [args.part]:
        started_s = time.monotonic()
        PARTS[part](args)
        print(f"\n{part} took {time.monotonic() - started_s:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
