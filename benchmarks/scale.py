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
from typing import Any

import rig
import scale_ray
import waits

from loadgen.core.execution import plan_checks, run
from loadgen.core.execution.events import LoadStarted, RunEvent
from loadgen.core.execution.plan import Endpoint, Settings, Tuning
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.parquet import to_table
from loadgen.core.stats.histogram import Histogram
from loadgen.core.workload import load, read_flags
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
) -> tuple[Summary, dict[str, float]]:
    """Run one load; return its summary, and what the endpoints used and sent.

    `targets` gives one endpoint so many names.
    """
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        options = Options(
            ttft=f"normal:{ttft_ms[0]}ms,{ttft_ms[1]}ms",
            itl=f"{itl_ms}ms",
            idle_close="600s",
            stream_interval=bundle,
        )
        urls = [stack.enter_context(embedded.start(options)).url for _ in range(servers)]
        workload_path = Path(scratch) / "w.yaml"
        workload_path.write_text(
            f"name: scale\nrequests: {{input_tokens: 20, output_tokens: {tokens}}}\n"
        )
        targets_of_one_endpoint = [
            Endpoint(url=urls[0], name=f"vm-{i:03}", api_key=f"key-{i}") for i in range(targets)
        ]
        settings = Settings(
            url=urls[0],
            targets=tuple(
                targets_of_one_endpoint
                or (Endpoint(url=url, name=url) for url in urls if servers > 1)
            ),
            model="sim",
            server="trtllm",
            workers=workers,
            ray=ray,
            out=out or Path(scratch) / "out",
            tuning=tuning or Tuning(),
        )
        workload_options: dict[str, Any] = {
            "num_requests": str(streams),
            "warmup": "0",
            "seed": "1",
        } | flags
        if "request_rate" not in flags:
            workload_options["concurrency"] = str(streams)
        before = [rig.read_counters(url) for url in urls]
        summary, _ = run.execute(
            load(str(workload_path), read_flags(**workload_options)),
            settings,
            () if on_drive is None else (on_drive,),
        )
        after = [rig.read_counters(url) for url in urls]
        server_usage = {
            "events": sum(
                counters_after["events"] - counters_before["events"]
                for counters_before, counters_after in zip(before, after, strict=True)
            ),
            "server_cpu_s": sum(
                counters_after["cpu_s"] - counters_before["cpu_s"]
                for counters_before, counters_after in zip(before, after, strict=True)
            ),
        }
        if summary.requests.ok != summary.requests.scheduled:
            print(f"!! {summary.requests}", flush=True)
        return summary, server_usage


def cpu_s_per_event(summary: Summary) -> float:
    """Return CPU-seconds of the workers per output event."""
    assert summary.client.cpu_s is not None
    return summary.client.cpu_s / summary.inter_chunk_ms.count


def print_workers(flags: argparse.Namespace) -> None:
    """Compare two workers with one, in alternate rounds."""
    rows: list[list[str]] = []
    costs: dict[int, list[float]] = {1: [], 2: []}
    streams_per_worker = int(flags.rate * 0.08)
    for _ in range(flags.rounds):
        for count in (1, 2):
            summary, server_usage = run_load(
                workers=count,
                servers=count,
                streams=streams_per_worker * count,
                itl_ms=80,
                tokens=int(flags.seconds * 12.5),
            )
            costs[count].append(cpu_s_per_event(summary))
            steady = summary.inter_chunk_ms.count / (summary.window.duration_s or 1)
            rows.append(
                [
                    f"{count} worker(s), {streams_per_worker * count} streams",
                    f"{steady:,.0f}",
                    f"{cpu_s_per_event(summary) * 1e6:.2f}",
                    f"{1 / cpu_s_per_event(summary):,.0f}",
                    f"{summary.client.cpu_share_max or 0:.0%}",
                    f"{server_usage['server_cpu_s']:.1f}",
                    f"{(summary.client.peak_rss_bytes or 0) / 1e6:,.0f}",
                ]
            )
    print(
        rig.format_table(
            ["", "events/s", "µs/event", "events/CPU-s", "busiest", "server CPU-s", "MB"], rows
        )
    )
    cost_ratio = rig.median_ratio(costs[2], costs[1])
    speedup = 2 / cost_ratio
    print(
        f"\n- CPU per event of two against one: {cost_ratio:.3f}: "
        f"{rig.describe_limit(cost_ratio, 1.1, most=True)}"
    )
    print(
        f"- two cores carry {speedup:.2f} times one: {rig.describe_limit(speedup, 1.8, most=False)}"
    )


class RunObserver:
    """Observes a run from outside, every `every_s` seconds.

    It keeps the gaps between events before and after a time, and the memory of the workers and of
    their recorder.
    """

    def __init__(self, folder: Path, split_s: float, every_s: float = 2.0) -> None:
        self._folder, self._split_s, self._every_s, self._over = (
            folder,
            split_s,
            every_s,
            threading.Event(),
        )
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.set_up = Histogram()
        self.sizes: list[tuple[float, int, int]] = []  # s, bytes of memory, bytes on disk

    @property
    def peak_bytes(self) -> int:
        """Return the largest memory seen."""
        return max((memory for _, memory, _ in self.sizes), default=0)

    def begin(self, event: RunEvent) -> None:
        """Start to observe when the load starts."""
        if isinstance(event, LoadStarted):
            self._thread.start()

    def end(self) -> Histogram:
        """Return the gaps since the split; call it after the run."""
        self._over.set()
        self._thread.join()
        gaps = self._gaps()
        gaps.counts -= self.set_up.counts
        return gaps

    def _watch(self) -> None:
        """Sample until `end` is called."""
        started_s = time.monotonic()
        is_split = False
        while not self._over.wait(self._every_s):
            on_disk = 0
            for file in self._folder.rglob("*"):
                with contextlib.suppress(OSError):  # it went meanwhile
                    on_disk += file.stat().st_size
            self.sizes.append((time.monotonic() - started_s, _resident_bytes(), on_disk))
            if not is_split and time.monotonic() > started_s + self._split_s:
                is_split, self.set_up = True, self._gaps()

    def _gaps(self) -> Histogram:
        """Return the gaps of all workers so far."""
        gaps = Histogram()
        for file in (self._folder / "flows").glob("w*.gaps.0"):
            gaps.merge(Histogram.from_bytes(file.read_bytes()))
        return gaps


def _resident_bytes() -> int:
    """Return the resident bytes of this process and its children, without the endpoints."""
    total_bytes = 0
    for process_dir in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, StopIteration):
            status = (process_dir / "status").read_text()
            is_ours = int(process_dir.name) == os.getpid() or f"\nPPid:\t{os.getpid()}\n" in status
            if is_ours and b"loadgen.sim.server" not in (process_dir / "cmdline").read_bytes():
                total_bytes += (
                    int(
                        next(
                            line for line in status.splitlines() if line.startswith("VmRSS")
                        ).split()[1]
                    )
                    << 10
                )
    return total_bytes


def _late_gap_cells(gaps: Histogram, itl_ns: int) -> list[str]:
    """Return the count of gaps and the fractions that exceed `itl_ns` by 2, 10, 50 and 200 ms."""
    shares = [
        gaps.count_over(itl_ns + ms * 1_000_000) / max(gaps.count, 1) for ms in (2, 10, 50, 200)
    ]
    return [f"{gaps.count:,}", *(f"{share:.4%}" for share in shares)]


def print_streams(flags: argparse.Namespace) -> None:
    """Open many streams and hold them open; print their cost and lateness."""
    opened_per_s = min(OPENED_PER_S, flags.streams)
    opening_s = flags.streams // opened_per_s
    with tempfile.TemporaryDirectory() as scratch:
        observer = RunObserver(
            Path(scratch) / "out", opening_s + 3.0
        )  # what is on disk then is of up to two seconds before
        summary, server_usage = run_load(
            workers=2,
            servers=2,
            streams=flags.streams,
            itl_ms=1000,
            tokens=flags.seconds + opening_s,
            out=Path(scratch) / "out",
            on_drive=observer.begin,
            timeout="2000s",
            grace="2000s",
            request_rate=str(opened_per_s),
        )
        gaps_all_open = observer.end()
        core_fractions_by_phase = [
            [
                sample.cpu_share
                for sample in store.read_run(Path(scratch) / "out").seconds
                if start_s <= sample.t_s < end_s
            ]
            for start_s, end_s in ((0, opening_s), (opening_s + 3, opening_s + flags.seconds))
        ]
    requests = summary.requests
    print(
        f"{requests.scheduled:,} streams over 2 workers and 2 endpoints, an event each per "
        f"second, {flags.seconds} s "
        f"after the {opening_s} s in which they were opened: {requests.ok:,} ok, "
        f"{requests.failed} failed, "
        f"{requests.lost} lost; in flight at most {summary.load.in_flight_max:,}; memory of all "
        f"but the endpoints "
        f"{observer.peak_bytes / 1e6:,.0f} MB; {cpu_s_per_event(summary) * 1e6:.1f} µs/event; "
        f"connect p99 "
        f"{summary.connect_ms.p99} ms; send delay p50 {summary.send_lag_ms.p50}, p99 "
        f"{summary.send_lag_ms.p99} ms; "
        f"timestamp uncertainty p99 {summary.stamp_error_ms.p99} ms; server CPU "
        f"{server_usage['server_cpu_s']:.0f} s\n"
    )
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
        [
            name,
            f"{statistics.fmean(core_fractions):.1%}",
            f"{max(core_fractions):.1%}",
            *_late_gap_cells(gaps, 1_000_000_000),
        ]
        for name, core_fractions, gaps in (
            ("while they open", core_fractions_by_phase[0], observer.set_up),
            ("all open", core_fractions_by_phase[1], gaps_all_open),
        )
        if core_fractions
    ]
    print(rig.format_table(columns, rows))
    print(f"\n- lost or failed: {requests.scheduled - requests.ok}")
    print(f"- memory: {rig.describe_limit(observer.peak_bytes / 1e9, 2.0, most=True)} GB")
    print("- valid" if summary.verdict.valid else f"- NOT VALID: {summary.verdict.reasons}")


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
    settled_sizes = [size for size in observer.sizes if flags.seconds / 3 < size[0] < flags.seconds]
    growth = [""] * 5  # of a short run on a busy host, which was looked at once
    if len(settled_sizes) > 1:
        times_s, memory_bytes, disk_bytes = zip(*settled_sizes, strict=True)
        slopes = [
            statistics.linear_regression(times_s, sizes).slope * 3600 / 1e6
            for sizes in (memory_bytes, disk_bytes)
        ]
        growth = [
            f"{memory_bytes[0] / 1e6:.0f}",
            f"{memory_bytes[-1] / 1e6:.0f}",
            f"{slopes[0]:+.1f}",
            f"{disk_bytes[-1] / 1e6:.1f}",
            f"{slopes[1]:+.1f}",
        ]
    drift = summary.drift
    print(
        f"{'valid' if summary.verdict.valid else summary.verdict.reasons}; drift of TTFT p99 "
        f"{drift.ttft_p99}, TPOT p99 {drift.tpot_p99}, output {drift.output_per_s}",
        flush=True,
    )
    title = f"{flags.streams:,} streams, {flags.seconds} s"
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


def print_cost(flags: argparse.Namespace) -> None:
    """Compare the cost per event of many streams with that of few.

    Requests, events and duration are the same; only the number of streams that are open at once
    differs.
    """
    rows, ratios = [], []
    few_streams, many_streams = (
        min(FEW_STREAMS, flags.streams // 2),
        min(MANY_STREAMS, flags.streams),
    )
    tokens = max(8, int(flags.seconds * flags.rate / many_streams))
    for _ in range(flags.rounds):
        costs = {}
        for stream_count in (few_streams, many_streams):
            itl_ms = stream_count / flags.rate * 1e3
            summary, _ = run_load(
                workers=1,
                servers=1,
                streams=stream_count,
                itl_ms=itl_ms,
                tokens=tokens,
                ttft_ms=(2 * itl_ms, itl_ms / 2),
                timeout="600s",
                num_requests=str(many_streams),
            )
            costs[stream_count] = cpu_s_per_event(summary)
            steady = summary.inter_chunk_ms.count / (summary.window.duration_s or 1)
            rows.append(
                [
                    f"{stream_count:,} streams, {many_streams:,} requests of {tokens} events",
                    f"{steady:,.0f}",
                    f"{costs[stream_count] * 1e6:.2f}",
                    f"{summary.client.cpu_share_max or 0:.0%}",
                ]
            )
        ratios.append(costs[many_streams] / costs[few_streams])
    print(rig.format_table(["", "events/s", "µs/event", "busiest"], rows))
    ratio = rig.median(ratios)
    print(
        f"\n- {many_streams:,} against {few_streams} streams: {ratio:.2f}: "
        f"{rig.describe_limit(ratio, 1.3, most=True)}"
    )


def print_million(flags: argparse.Namespace) -> None:
    """Print the cores that a million streamed tokens a second need.

    CPU per event falls with the rate, because one poll finds more sockets to read. So the worker is
    loaded as the rack would load it, up to what the one core of the endpoint can send.
    """
    rows, cores_by_bundle = [], {}
    streams = min(RACK_STREAMS, flags.streams)
    for tokens_per_event, rack_rate in RACK_CASES[: flags.cases]:
        rate = rack_rate * streams // RACK_STREAMS
        costs = []
        for _ in range(flags.rounds):
            summary, server_usage = run_load(
                workers=1,
                servers=1,
                streams=streams,
                itl_ms=streams / (rate * tokens_per_event) * 1e3,
                bundle=tokens_per_event,
                tokens=max(2, int(flags.seconds * rate / streams)) * tokens_per_event,
                ttft_ms=(1000.0, 300.0),
                timeout="600s",
            )
            assert summary.client.cpu_s is not None
            core_fraction = summary.client.cpu_s / (summary.window.duration_s or 1)
            costs.append(
                (
                    summary.client.cpu_s / (summary.tokens.output or 1),
                    core_fraction,
                    server_usage["server_cpu_s"],
                )
            )
        cpu_s_per_token, core_fraction, server_cpu_s = sorted(costs)[len(costs) // 2]
        cores_by_bundle[tokens_per_event] = cpu_s_per_token * TOKENS_PER_S / MAX_CORE_FRACTION
        rows.append(
            [
                f"{tokens_per_event} token(s) per event, {rate:,} events/s",
                f"{cpu_s_per_token * 1e6:.2f}",
                f"{core_fraction:.0%}",
                f"{server_cpu_s:.0f}",
                f"{cores_by_bundle[tokens_per_event]:.1f}",
            ]
        )
    columns = [f"{streams:,} streams", "µs per token", "of a core", "endpoint CPU-s"]
    print(
        rig.format_table(
            [*columns, f"cores at {MAX_CORE_FRACTION:.0%} for a million tokens/s"], rows
        )
    )
    print(
        f"\n- cores, one token per event: {cores_by_bundle[1]:.1f}: "
        f"{rig.describe_limit(cores_by_bundle[1], 16, most=True)}"
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
        f"\n- events: {summary.inter_chunk_ms.count:,} gaps, {server_usage['events']:,.0f} sent "
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


def write_records(folder: Path, count: int, targets: int = 1) -> None:
    """Write a finished run of this many records with drawn latencies.

    It looks like what 16 workers leave, with the first tenth as the warm-up.
    """
    import numpy as np
    import pyarrow.parquet as pq

    from loadgen.core.results.manifest import RunManifest, StagePlan, TargetFacts, encode_manifest
    from loadgen.core.results.record import BIN_NS, ROW, SOURCES
    from loadgen.core.slo import Slo, Term

    (folder / "requests").mkdir(parents=True)
    (folder / "flows").mkdir()
    warm_up_count, gap_ns = count // 10, 300_000
    manifest = RunManifest(
        run="merge",
        state="finished",
        workers=16,
        slo=Slo(terms=(Term(metric="ttft", limit_ns=450_000_000, quantile=0.99),)),
        stages=(
            StagePlan(
                name="warm-up", arrival="constant 3,333/s", slots=warm_up_count, measured=False
            ),
            StagePlan(
                name="load",
                arrival="constant 3,333/s",
                slots=count - warm_up_count,
                start_ns=warm_up_count * gap_ns,
            ),
        ),
        targets=tuple(
            TargetFacts(url=f"http://vm-{i:02}", name=f"vm-{i:02}", gpus=4) for i in range(targets)
        ),
    )
    (folder / "run.json").write_bytes(encode_manifest(manifest))
    rng, writer, block_rows = np.random.default_rng(1), None, min(count, 1_000_000)
    for stage in (0, 1):
        gaps = Histogram()
        gaps.add(rng.lognormal(16.8, 0.3, 100_000).astype(np.int64))
        (folder / "flows" / f"w0.gaps.{stage}").write_bytes(gaps.to_bytes())
        bins = np.full(count * gap_ns // BIN_NS, 7_000, "<i8")
        (folder / "flows" / f"w0.timeline.{stage}").write_bytes(bins.tobytes())
    for first_slot in range(0, count, block_rows):
        rows = np.zeros(block_rows, ROW)
        rows["slot"] = rows["request"] = np.arange(first_slot, first_slot + block_rows)
        rows["session"] = rows["virtual_user"] = rows["cached_tokens"] = rows[
            "reasoning_tokens"
        ] = rows["text"] = -1
        rows["worker"], rows["target"] = rows["slot"] % 16, rows["slot"] % targets
        rows["stage"] = rows["slot"] >= warm_up_count
        rows["due_ns"] = rows["slot"] * gap_ns
        rows["ready_ns"] = rows["sent_ns"] = rows["due_ns"] + rng.integers(
            20_000, 200_000, block_rows
        )
        rows["output_tokens"] = rows["output_events"] = rows["asked_output"] = rng.integers(
            50, 400, block_rows
        )
        rows["input_tokens"] = rows["built_tokens"] = rng.integers(50, 4000, block_rows)
        rows["input_source"] = rows["output_source"] = SOURCES.index("server")
        first_token = rows["due_ns"] + (rng.lognormal(19, 0.4, block_rows)).astype(np.int64)
        for name in ("first_byte_ns", "first_event_ns", "first_token_ns", "first_answer_ns"):
            rows[name] = first_token
        rows["last_token_ns"] = first_token + rows["output_tokens"] * rng.normal(
            20e6, 2e6, block_rows
        ).astype(np.int64)
        rows["end_ns"] = rows["done_ns"] = rows["last_token_ns"] + 100_000
        table = to_table(rows, [])
        writer = writer or pq.ParquetWriter(
            folder / "requests" / store.MERGED, table.schema, compression="zstd"
        )
        writer.write_table(table)
    assert writer is not None
    writer.close()


def print_merge(flags: argparse.Namespace) -> None:
    """Print the cost of exact quantiles and of a full summary over many records."""
    with tempfile.TemporaryDirectory() as scratch:
        rack_records = flags.records * 21 // 100
        count_leading_plain_events, rack_run = Path(scratch) / "ten", Path(scratch) / "rack"
        write_records(count_leading_plain_events, flags.records)
        write_records(rack_run, rack_records, targets=18)
        rows = []
        for description, folder, code in (
            (
                f"{flags.records:,}: exact quantiles of TTFT, TPOT, E2E and send delay",
                count_leading_plain_events,
                QUANTILES_CODE,
            ),
            (
                f"{flags.records:,}: the whole summary",
                count_leading_plain_events,
                FULL_SUMMARY_CODE,
            ),
            (
                f"{rack_records:,}, 18 targets (as of a rack in ten minutes): the whole summary",
                rack_run,
                FULL_SUMMARY_CODE,
            ),
        ):
            completed = subprocess.run(
                [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
            )
            cpu_s, seconds, peak_gb = map(float, completed.stdout.split())
            rows.append([description, f"{cpu_s:.1f}", f"{seconds:.1f}", f"{peak_gb:.2f}"])
        print(rig.format_table(["records", "CPU-s", "s", "GB"], rows))
        cpu_s, peak_gb = float(rows[1][1]), float(rows[1][3])
        print(
            f"\n- the whole summary: {rig.describe_limit(cpu_s, 10, most=True)} CPU-s; "
            f"{rig.describe_limit(peak_gb, 1.5, most=True)} GB"
        )


def print_report(flags: argparse.Namespace) -> None:
    """Print CPU-seconds and peak memory of whole commands over many stored records."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch_dir, count = Path(scratch), flags.records
        writer = multiprocessing.get_context("spawn").Process(
            target=write_records, args=(scratch_dir / "run", count)
        )
        # Apart: a command's peak, as the kernel counts it, is never below that of the process it is
        # of
        writer.start()
        writer.join()
        shutil.copytree(scratch_dir / "run", scratch_dir / "again")
        commands = [
            "report run",
            "compare run again",
            "bundle run -o run.zip",
            "verify run.zip",
            "export run --as csv -o run.csv",
            "export run --as vllm -o run.json",
        ]
        rows = []
        for command in commands:
            cost = waits.measure_command([*waits.LOADGEN, *command.split()], scratch_dir)
            assert cost is not None, f"{command}: stopped"
            rows.append(
                [
                    command,
                    f"{cost.cpu_s:.1f}",
                    f"{cost.peak_mb:,.0f}",
                    f"{cost.peak_mb * 1e6 / count:.0f}",
                ]
            )
        print(rig.format_table([f"{count:,} records", "CPU-s", "peak MB", "B a record"], rows))


def print_rolling(flags: argparse.Namespace) -> None:
    """Print the send delay of a load whose bodies are built ahead, and while it runs."""
    rows = []
    for max_ahead in (1 << 40, 0):
        summary, _ = run_load(
            tuning=Tuning(most_ahead=max_ahead),
            workers=1,
            servers=1,
            streams=1,
            itl_ms=20,
            tokens=10,
            request_rate=str(flags.rate / 100),
            num_requests=str(int(flags.seconds * flags.rate / 100)),
            input_tokens="1500",
        )
        late_bodies = [
            code.values["bodies"]
            for code in summary.verdict.warning_codes
            if code.code == "bodies_late"
        ]
        send_delay = summary.send_lag_ms
        rows.append(
            [
                "ahead" if max_ahead else "while it runs",
                f"{send_delay.p50}",
                f"{send_delay.p99}",
                f"{send_delay.max}",
                str(late_bodies or "0"),
            ]
        )
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
