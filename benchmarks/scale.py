"""From one core to many: what workers, many streams and many records cost.

    python benchmarks/scale.py workers      two workers against one: events/s and CPU-seconds per event
    python benchmarks/scale.py streams      20,000 streams at once, opened 1,000/s (--seconds 300: for so long then)
    python benchmarks/scale.py soak --streams 2000 --seconds 600      does anything grow?
    python benchmarks/scale.py cost         CPU per event with 10,000 streams against 256, at the same events/s
    python benchmarks/scale.py million      cores for a million streamed tokens a second
    python benchmarks/scale.py wide         64 workers, 100 targets: all shares are sent, at what cost
    python benchmarks/scale.py merge        10 million records: exact quantiles of all of them, time and memory
    python benchmarks/scale.py report       whole commands over them: report, compare, bundle, verify, export
    python benchmarks/scale.py ray          two workers on a Ray cluster against two local ones
    python benchmarks/scale.py rolling      send lag of a load whose bodies are built while it runs

Whole runs as a user has them: worker processes, recorder, files. CPU is what the workers measure of themselves from the
start instant on (`client.cpu_s`), the recorder's beside it; endpoints are processes of their own, their CPU taken out.
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
BUSY = 0.8  # of each core
FEW, MOST = 256, 10_000  # streams whose cost per event is compared
WIDE_RATE = 200  # requests/s, of 20 events each
RACK_STREAMS = 6_000  # of one worker: 100,000 over 16
RACK_CASES = (
    (1, 10_000),
    (1, 20_000),
    (1, 30_000),
    (1, 40_000),
    (4, 10_000),
)  # tokens an event, events/s


def drive(
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
    """One run; its summary, and what the endpoints used and sent. `targets`: so many names of one endpoint."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        options = Options(
            ttft=f"normal:{ttft_ms[0]}ms,{ttft_ms[1]}ms",
            itl=f"{itl_ms}ms",
            idle_close="600s",
            stream_interval=bundle,
        )
        urls = [stack.enter_context(embedded.start(options)).url for _ in range(servers)]
        file = Path(scratch) / "w.yaml"
        file.write_text(f"name: scale\nrequests: {{input_tokens: 20, output_tokens: {tokens}}}\n")
        named = [
            Endpoint(url=urls[0], name=f"vm-{i:03}", api_key=f"key-{i}") for i in range(targets)
        ]
        settings = Settings(
            url=urls[0],
            targets=tuple(named or (Endpoint(url=url, name=url) for url in urls if servers > 1)),
            model="sim",
            server="trtllm",
            workers=workers,
            ray=ray,
            out=out or Path(scratch) / "out",
            tuning=tuning or Tuning(),
        )
        given: dict[str, Any] = {"num_requests": str(streams), "warmup": "0", "seed": "1"} | flags
        if "request_rate" not in flags:
            given["concurrency"] = str(streams)
        before = [rig.read_counters(url) for url in urls]
        summary, _ = run.execute(
            load(str(file), read_flags(**given)), settings, () if on_drive is None else (on_drive,)
        )
        after = [rig.read_counters(url) for url in urls]
        found = {
            "events": sum(b["events"] - a["events"] for a, b in zip(before, after, strict=True)),
            "server_cpu_s": sum(
                b["cpu_s"] - a["cpu_s"] for a, b in zip(before, after, strict=True)
            ),
        }
        if summary.requests.ok != summary.requests.scheduled:
            print(f"!! {summary.requests}", flush=True)
        return summary, found


def per_event(summary: Summary) -> float:
    """CPU-seconds of the workers per output event."""
    assert summary.client.cpu_s is not None
    return summary.client.cpu_s / summary.inter_chunk_ms.count


def workers(flags: argparse.Namespace) -> None:
    rows: list[list[str]] = []
    cost: dict[int, list[float]] = {1: [], 2: []}
    each = int(flags.rate * 0.08)
    for _ in range(flags.rounds):
        for count in (1, 2):
            summary, found = drive(
                workers=count,
                servers=count,
                streams=each * count,
                itl_ms=80,
                tokens=int(flags.seconds * 12.5),
            )
            cost[count].append(per_event(summary))
            steady = summary.inter_chunk_ms.count / (summary.window.duration_s or 1)
            rows.append(
                [
                    f"{count} worker(s), {each * count} streams",
                    f"{steady:,.0f}",
                    f"{per_event(summary) * 1e6:.2f}",
                    f"{1 / per_event(summary):,.0f}",
                    f"{summary.client.cpu_share_max or 0:.0%}",
                    f"{found['server_cpu_s']:.1f}",
                    f"{(summary.client.peak_rss_bytes or 0) / 1e6:,.0f}",
                ]
            )
    print(
        rig.format_table(
            ["", "events/s", "µs/event", "events/CPU-s", "busiest", "server CPU-s", "MB"], rows
        )
    )
    more = rig.median_ratio(cost[2], cost[1])
    carried = 2 / more
    print(
        f"\n- CPU per event of two against one: {more:.3f}: {rig.describe_limit(more, 1.1, most=True)}"
    )
    print(
        f"- two cores carry {carried:.2f} times one: {rig.describe_limit(carried, 1.8, most=False)}"
    )


class Phases:
    """Looks at a run from outside: its gaps between events before and after an instant, and the memory of its workers
    and of their recorder, every `every_s` seconds.
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
        return max((memory for _, memory, _ in self.sizes), default=0)

    def begin(self, event: RunEvent) -> None:
        if isinstance(event, LoadStarted):
            self._thread.start()

    def end(self) -> Histogram:
        """The gaps from the instant on; call it after the run."""
        self._over.set()
        self._thread.join()
        late = self._gaps()
        late.counts -= self.set_up.counts
        return late

    def _watch(self) -> None:
        began = time.monotonic()
        split = False
        while not self._over.wait(self._every_s):
            on_disk = 0
            for file in self._folder.rglob("*"):
                with contextlib.suppress(OSError):  # it went meanwhile
                    on_disk += file.stat().st_size
            self.sizes.append((time.monotonic() - began, _memory(), on_disk))
            if not split and time.monotonic() > began + self._split_s:
                split, self.set_up = True, self._gaps()

    def _gaps(self) -> Histogram:
        whole = Histogram()
        for file in (self._folder / "flows").glob("w*.gaps.0"):
            whole.merge(Histogram.from_bytes(file.read_bytes()))
        return whole


def _memory() -> int:
    """Of all that this process started, and of itself; without the endpoints."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, StopIteration):
            status = (folder / "status").read_text()
            ours = int(folder.name) == os.getpid() or f"\nPPid:\t{os.getpid()}\n" in status
            if ours and b"loadgen.sim.server" not in (folder / "cmdline").read_bytes():
                total += (
                    int(
                        next(
                            line for line in status.splitlines() if line.startswith("VmRSS")
                        ).split()[1]
                    )
                    << 10
                )
    return total


def _late(gaps: Histogram, itl_ns: int) -> list[str]:
    """Of gaps that should all be `itl_ns`: how many, and how many are longer by 2, 10, 50 and 200 ms."""
    shares = [gaps.over(itl_ns + ms * 1_000_000) / max(gaps.count, 1) for ms in (2, 10, 50, 200)]
    return [f"{gaps.count:,}", *(f"{share:.4%}" for share in shares)]


def streams(flags: argparse.Namespace) -> None:
    per_s = min(OPENED_PER_S, flags.streams)
    opening = flags.streams // per_s
    with tempfile.TemporaryDirectory() as scratch:
        phases = Phases(
            Path(scratch) / "out", opening + 3.0
        )  # what is on disk then is of up to two seconds before
        summary, found = drive(
            workers=2,
            servers=2,
            streams=flags.streams,
            itl_ms=1000,
            tokens=flags.seconds + opening,
            out=Path(scratch) / "out",
            on_drive=phases.begin,
            timeout="2000s",
            grace="2000s",
            request_rate=str(per_s),
        )
        measured = phases.end()
        shares = [
            [
                one.cpu_share
                for one in store.read_run(Path(scratch) / "out").seconds
                if low <= one.t_s < high
            ]
            for low, high in ((0, opening), (opening + 3, opening + flags.seconds))
        ]
    requests = summary.requests
    print(
        f"{requests.scheduled:,} streams over 2 workers and 2 endpoints, an event each per second, {flags.seconds} s "
        f"after the {opening} s in which they were opened: {requests.ok:,} ok, {requests.failed} failed, "
        f"{requests.lost} lost; in flight at most {summary.load.in_flight_max:,}; memory of all but the endpoints "
        f"{phases.peak_bytes / 1e6:,.0f} MB; {per_event(summary) * 1e6:.1f} µs/event; connect p99 "
        f"{summary.connect_ms.p99} ms; send lag p50 {summary.send_lag_ms.p50}, p99 {summary.send_lag_ms.p99} ms; "
        f"stamp error p99 {summary.stamp_error_ms.p99} ms; server CPU {found['server_cpu_s']:.0f} s\n"
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
        [name, f"{statistics.fmean(share):.1%}", f"{max(share):.1%}", *_late(gaps, 1_000_000_000)]
        for name, share, gaps in (
            ("while they open", shares[0], phases.set_up),
            ("all open", shares[1], measured),
        )
        if share
    ]
    print(rig.format_table(columns, rows))
    print(f"\n- lost or failed: {requests.scheduled - requests.ok}")
    print(f"- memory: {rig.describe_limit(phases.peak_bytes / 1e9, 2.0, most=True)} GB")
    print("- valid" if summary.verdict.valid else f"- NOT VALID: {summary.verdict.reasons}")


def soak(flags: argparse.Namespace) -> None:
    """Hours in minutes: does anything grow? Answers of 50 events, five a second in each of the streams."""
    with tempfile.TemporaryDirectory() as scratch:
        phases = Phases(Path(scratch) / "out", 0, min(2.0, flags.seconds / 10))
        summary, _ = drive(
            workers=1,
            servers=1,
            streams=flags.streams,
            itl_ms=200,
            tokens=min(50, 2 * flags.seconds),
            ttft_ms=(600.0, 200.0),
            out=Path(scratch) / "out",
            on_drive=phases.begin,
            duration=f"{flags.seconds}s",
            num_requests=None,
        )
        phases.end()
    settled = [look for look in phases.sizes if flags.seconds / 3 < look[0] < flags.seconds]
    growth = [""] * 5  # of a short run on a busy host, which was looked at once
    if len(settled) > 1:
        at, memory, disk = zip(*settled, strict=True)
        slopes = [
            statistics.linear_regression(at, sizes).slope * 3600 / 1e6 for sizes in (memory, disk)
        ]
        growth = [
            f"{memory[0] / 1e6:.0f}",
            f"{memory[-1] / 1e6:.0f}",
            f"{slopes[0]:+.1f}",
            f"{disk[-1] / 1e6:.1f}",
            f"{slopes[1]:+.1f}",
        ]
    drift = summary.drift
    print(
        f"{'valid' if summary.verdict.valid else summary.verdict.reasons}; drift of TTFT p99 "
        f"{drift.ttft_p99}, TPOT p99 {drift.tpot_p99}, output {drift.output_per_s}",
        flush=True,
    )
    title = f"{flags.streams:,} streams, {flags.seconds} s"
    row = [title, f"{summary.requests.ok:,}", f"{summary.inter_chunk_ms.count:,}", *growth]
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
    print(rig.format_table(columns, [row]))


def cost(flags: argparse.Namespace) -> None:
    """As many requests of as many events in the same time: only how many of them are open at once differs."""
    rows, ratios = [], []
    few, most = min(FEW, flags.streams // 2), min(MOST, flags.streams)
    tokens = max(8, int(flags.seconds * flags.rate / most))
    for _ in range(flags.rounds):
        found = {}
        for count in (few, most):
            itl = count / flags.rate * 1e3
            summary, _ = drive(
                workers=1,
                servers=1,
                streams=count,
                itl_ms=itl,
                tokens=tokens,
                ttft_ms=(2 * itl, itl / 2),
                timeout="600s",
                num_requests=str(most),
            )
            found[count] = per_event(summary)
            steady = summary.inter_chunk_ms.count / (summary.window.duration_s or 1)
            rows.append(
                [
                    f"{count:,} streams, {most:,} requests of {tokens} events",
                    f"{steady:,.0f}",
                    f"{found[count] * 1e6:.2f}",
                    f"{summary.client.cpu_share_max or 0:.0%}",
                ]
            )
        ratios.append(found[most] / found[few])
    print(rig.format_table(["", "events/s", "µs/event", "busiest"], rows))
    ratio = rig.median(ratios)
    print(
        f"\n- {most:,} against {few} streams: {ratio:.2f}: {rig.describe_limit(ratio, 1.3, most=True)}"
    )


def million(flags: argparse.Namespace) -> None:
    """CPU per event falls with the rate, as one look at the sockets finds more to read; so the worker is loaded as the
    rack would load it, with some thousands of streams, up to what the one core of the endpoint can send.
    """
    rows, cores = [], {}
    streams = min(RACK_STREAMS, flags.streams)
    for bundle, rack_rate in RACK_CASES[: flags.cases]:
        rate = rack_rate * streams // RACK_STREAMS
        found = []
        for _ in range(flags.rounds):
            summary, server = drive(
                workers=1,
                servers=1,
                streams=streams,
                itl_ms=streams / (rate * bundle) * 1e3,
                bundle=bundle,
                tokens=max(2, int(flags.seconds * rate / streams)) * bundle,
                ttft_ms=(1000.0, 300.0),
                timeout="600s",
            )
            assert summary.client.cpu_s is not None
            busy = summary.client.cpu_s / (summary.window.duration_s or 1)
            found.append(
                (summary.client.cpu_s / (summary.tokens.output or 1), busy, server["server_cpu_s"])
            )
        value, busy, served = sorted(found)[len(found) // 2]
        cores[bundle] = value * TOKENS_PER_S / BUSY
        rows.append(
            [
                f"{bundle} token(s) per event, {rate:,} events/s",
                f"{value * 1e6:.2f}",
                f"{busy:.0%}",
                f"{served:.0f}",
                f"{cores[bundle]:.1f}",
            ]
        )
    columns = [f"{streams:,} streams", "µs per token", "of a core", "endpoint CPU-s"]
    print(rig.format_table([*columns, f"cores at {BUSY:.0%} for a million tokens/s"], rows))
    print(
        f"\n- cores, one token per event: {cores[1]:.1f}: {rig.describe_limit(cores[1], 16, most=True)}"
    )


def wide(flags: argparse.Namespace) -> None:
    """More workers than a run would take on so few cores: what is shown is that all shares come together."""
    plan_checks._MAX_WORKERS_PER_CORE = max(plan_checks._MAX_WORKERS_PER_CORE, flags.workers)
    seconds, began = 2 * flags.seconds, time.monotonic()
    summary, found = drive(
        workers=flags.workers,
        servers=1,
        targets=flags.targets,
        streams=WIDE_RATE * seconds,
        itl_ms=50,
        tokens=20,
        ttft_ms=(100.0, 20.0),
        request_rate=str(WIDE_RATE),
    )
    wall_s, requests, client = time.monotonic() - began, summary.requests, summary.client
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
        f"{per_event(summary) * 1e6:.0f}",
        f"{client.cpu_share_max or 0:.1%}",
        f"{(client.peak_rss_bytes or 0) / 1e6:,.0f}",
        f"{wall_s:.0f}",
    ]
    print(rig.format_table(columns, [row]))
    print(
        f"\n- events: {summary.inter_chunk_ms.count:,} gaps, {found['events']:,.0f} sent by the endpoint"
    )
    print(
        "- valid" if summary.verdict.valid else f"- NOT VALID: {'; '.join(summary.verdict.reasons)}"
    )


MERGE = """
import resource, sys, time
from pathlib import Path
from loadgen.core.metrics import columns as metrics
from loadgen.core.results.parquet import Frame
from loadgen.core.stats.quantiles import distribution_of
began, cpu = time.perf_counter(), time.process_time()
columns = metrics.Columns(Frame([Path(sys.argv[1]) / "requests" / "requests.parquet"]))
for metric in ("ttft", "tpot", "e2e", "send_lag"):
    distribution_of(metrics.drop_undefined(columns.measure(metric)))
print(time.process_time() - cpu, time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
"""
WHOLE = """
import resource, sys, time
from pathlib import Path
from loadgen.core import run_folder
began, cpu = time.perf_counter(), time.process_time()
run_folder.summary(Path(sys.argv[1]))
print(time.process_time() - cpu, time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
"""


def records(folder: Path, count: int, targets: int = 1) -> None:
    """A finished run of this many records, of drawn latencies, as 16 workers leave it, its first tenth a warm-up."""
    import numpy as np
    import pyarrow.parquet as pq

    from loadgen.core.results.manifest import RunManifest, StagePlan, TargetFacts, encode_manifest
    from loadgen.core.results.record import BIN_NS, ROW, SOURCES
    from loadgen.core.slo import Slo, Term

    (folder / "requests").mkdir(parents=True)
    (folder / "flows").mkdir()
    early, gap_ns = count // 10, 300_000
    made = RunManifest(
        run="merge",
        state="finished",
        workers=16,
        slo=Slo(terms=(Term(metric="ttft", limit_ns=450_000_000, quantile=0.99),)),
        stages=(
            StagePlan(name="warm-up", arrival="constant 3,333/s", slots=early, measured=False),
            StagePlan(
                name="load",
                arrival="constant 3,333/s",
                slots=count - early,
                start_ns=early * gap_ns,
            ),
        ),
        targets=tuple(
            TargetFacts(url=f"http://vm-{i:02}", name=f"vm-{i:02}", gpus=4) for i in range(targets)
        ),
    )
    (folder / "run.json").write_bytes(encode_manifest(made))
    draw, writer, block = np.random.default_rng(1), None, min(count, 1_000_000)
    for stage in (0, 1):
        gaps = Histogram()
        gaps.add(draw.lognormal(16.8, 0.3, 100_000).astype(np.int64))
        (folder / "flows" / f"w0.gaps.{stage}").write_bytes(gaps.to_bytes())
        bins = np.full(count * gap_ns // BIN_NS, 7_000, "<i8")
        (folder / "flows" / f"w0.timeline.{stage}").write_bytes(bins.tobytes())
    for first in range(0, count, block):
        rows = np.zeros(block, ROW)
        rows["slot"] = rows["request"] = np.arange(first, first + block)
        rows["session"] = rows["virtual_user"] = rows["cached_tokens"] = rows[
            "reasoning_tokens"
        ] = rows["text"] = -1
        rows["worker"], rows["target"] = rows["slot"] % 16, rows["slot"] % targets
        rows["stage"] = rows["slot"] >= early
        rows["due_ns"] = rows["slot"] * gap_ns
        rows["ready_ns"] = rows["sent_ns"] = rows["due_ns"] + draw.integers(20_000, 200_000, block)
        rows["output_tokens"] = rows["output_events"] = rows["asked_output"] = draw.integers(
            50, 400, block
        )
        rows["input_tokens"] = rows["built_tokens"] = draw.integers(50, 4000, block)
        rows["input_source"] = rows["output_source"] = SOURCES.index("server")
        first_token = rows["due_ns"] + (draw.lognormal(19, 0.4, block)).astype(np.int64)
        for name in ("first_byte_ns", "first_event_ns", "first_token_ns", "first_answer_ns"):
            rows[name] = first_token
        rows["last_token_ns"] = first_token + rows["output_tokens"] * draw.normal(
            20e6, 2e6, block
        ).astype(np.int64)
        rows["end_ns"] = rows["done_ns"] = rows["last_token_ns"] + 100_000
        table = to_table(rows, [])
        writer = writer or pq.ParquetWriter(
            folder / "requests" / store.MERGED, table.schema, compression="zstd"
        )
        writer.write_table(table)
    assert writer is not None
    writer.close()


def merge(flags: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        of_a_rack = flags.records * 21 // 100
        ten, rack = Path(scratch) / "ten", Path(scratch) / "rack"
        records(ten, flags.records)
        records(rack, of_a_rack, targets=18)
        rows = []
        for what, folder, code in (
            (f"{flags.records:,}: exact quantiles of TTFT, TPOT, E2E and send lag", ten, MERGE),
            (f"{flags.records:,}: the whole summary", ten, WHOLE),
            (
                f"{of_a_rack:,}, 18 targets (as of a rack in ten minutes): the whole summary",
                rack,
                WHOLE,
            ),
        ):
            done = subprocess.run(
                [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
            )
            cpu_s, seconds, gb = map(float, done.stdout.split())
            rows.append([what, f"{cpu_s:.1f}", f"{seconds:.1f}", f"{gb:.2f}"])
        print(rig.format_table(["records", "CPU-s", "s", "GB"], rows))
        cpu_s, gb = float(rows[1][1]), float(rows[1][3])
        print(
            f"\n- the whole summary: {rig.describe_limit(cpu_s, 10, most=True)} CPU-s; {rig.describe_limit(gb, 1.5, most=True)} GB"
        )


def report(flags: argparse.Namespace) -> None:
    """CPU-seconds and peak memory of whole commands over many stored records."""
    with tempfile.TemporaryDirectory() as scratch:
        here, count = Path(scratch), flags.records
        making = multiprocessing.get_context("spawn").Process(
            target=records, args=(here / "run", count)
        )
        making.start()  # apart: a command's peak, as the kernel counts it, is never below that of the process it is of
        making.join()
        shutil.copytree(here / "run", here / "again")
        commands = [
            "report run",
            "compare run again",
            "bundle run -o run.zip",
            "verify run.zip",
            "export run --as csv -o run.csv",
            "export run --as vllm -o run.json",
        ]
        rows = []
        for words in commands:
            cost = waits.spent([*waits.LOADGEN, *words.split()], here)
            assert cost is not None, f"{words}: stopped"
            rows.append(
                [
                    words,
                    f"{cost.cpu_s:.1f}",
                    f"{cost.peak_mb:,.0f}",
                    f"{cost.peak_mb * 1e6 / count:.0f}",
                ]
            )
        print(rig.format_table([f"{count:,} records", "CPU-s", "peak MB", "B a record"], rows))


def rolling(flags: argparse.Namespace) -> None:
    rows = []
    for most in (1 << 40, 0):
        summary, _ = drive(
            tuning=Tuning(most_ahead=most),
            workers=1,
            servers=1,
            streams=1,
            itl_ms=20,
            tokens=10,
            request_rate=str(flags.rate / 100),
            num_requests=str(int(flags.seconds * flags.rate / 100)),
            input_tokens="1500",
        )
        late = [
            code.values["bodies"]
            for code in summary.verdict.warning_codes
            if code.code == "bodies_late"
        ]
        lag = summary.send_lag_ms
        rows.append(
            [
                "ahead" if most else "while it runs",
                f"{lag.p50}",
                f"{lag.p99}",
                f"{lag.max}",
                str(late or "0"),
            ]
        )
    print(rig.format_table(["bodies built", "send lag p50 ms", "p99", "max", "late"], rows))


def ray(flags: argparse.Namespace) -> None:
    if importlib.util.find_spec("ray") is None:
        print("left out: ray is not installed")
        return
    scale_ray.compare_with_local_workers(flags, drive, per_event)


PARTS: dict[str, Any] = {
    "workers": workers,
    "streams": streams,
    "wide": wide,
    "soak": soak,
    "cost": cost,
    "million": million,
    "merge": merge,
    "report": report,
    "rolling": rolling,
    "ray": ray,
}


def main() -> None:
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
        began = time.monotonic()
        PARTS[part](args)
        print(f"\n{part} took {time.monotonic() - began:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
